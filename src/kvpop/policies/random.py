"""Random: KVpop with scores drawn by lot. It keeps the others honest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpop.core.priority import FixedDecay
from kvpop.policies.base import BudgetPolicy, LayerShape, RankedLayer
from kvpop.scorers import Scorer


class RandomScorer(Scorer):
    """A uniform score per (seed, layer, KV head, position), the same however the sequence is cut into chunks."""

    def __init__(self, heads: int, head_dim: int, seed: int) -> None:
        super().__init__(heads, head_dim, delayed=False)
        self.seed = seed

    def init_state(self, rows: int, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
        return (torch.zeros(rows, self.heads, dtype=torch.long, device=device),)

    def _advance(
        self, state: tuple[Tensor, ...], x_new_NHLE: Tensor, x_due_NHLE: Tensor, valid_NL: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (seen_NH,) = state
        L = x_new_NHLE.shape[2]
        position_NHL = seen_NH[..., None] + torch.arange(L, device=seen_NH.device)
        head = torch.arange(self.heads, device=seen_NH.device)[None, :, None]
        bits = _mix(_mix(position_NHL + (self.seed << 32)) ^ _mix(head + 0x9E37))
        score = (bits >> 11 & 0xFFFFFFFF).double() / 2**32
        count = L if valid_NL is None else valid_NL.sum(-1)[:, None]
        return score.to(torch.promote_types(x_new_NHLE.dtype, torch.float32)), (seen_NH + count,)

    def state_bytes(self) -> int:
        return 8

    def extra_repr(self) -> str:
        return f"RandomScorer(seed={self.seed})"


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, in wrapping int64 arithmetic (logical shifts by masking)."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


@dataclass(frozen=True)
class Random(BudgetPolicy):
    """``decay``: log gamma in nats a token. 0 keeps a uniform sample of the past; a light decay prefers the newer."""

    seed: int = 0
    decay: float = -2e-3

    @property
    def name(self) -> str:
        return "random"

    def layer(self, shape: LayerShape) -> RankedLayer:
        scorer = RandomScorer(shape.kv_heads, shape.head_dim, self.seed * 1009 + shape.layer)
        decay = FixedDecay(shape.kv_heads, self.decay)
        return RankedLayer(shape, self.budget, scorer, decay, heads=self.heads)

"""StreamingLLM: the first tokens and the newest ones. The same mask as KVpop with a constant scorer and no decay."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kvpop.budget import Budget
from kvpop.core.priority import FixedDecay
from kvpop.ops.sparse_attention.api import sparse_attention
from kvpop.policies.base import LayerShape, Policy, RankedLayer, Rotary, SequencePass, pinned_rows, sequence_expiry
from kvpop.scorers import ConstantScorer
from kvpop.slots import FAR, RankedSlots, Slots

# Shapes: B rows, R query heads, H KV heads, Q queries, T keys, D head dim.


def rotate_back(q_BRQD: Tensor, delta_BQ: Tensor, rotary: Rotary) -> Tensor:
    """Turn queries rotated for position p into queries for position p - delta (rotary embedding, halves convention)."""
    cos_BQD, sin_BQD = (x[:, None].to(q_BRQD.dtype) for x in rotary(delta_BQ))
    width = cos_BQD.shape[-1]
    turned, rest = q_BRQD[..., :width], q_BRQD[..., width:]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos_BQD - torch.cat([-second, first], dim=-1) * sin_BQD, rest], dim=-1)


def cache_relative_attention(
    q_BRQD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    expiry_BHT: Tensor,
    *,
    scale: float,
    q_pos_BQ: Tensor,
    k_pos_BHT: Tensor,
    budget: Budget,
    rotary: Rotary,
) -> tuple[Tensor, Tensor]:
    """Attention with positions counted inside the cache, as the original StreamingLLM does.

    Recent tokens stand as far from the query as in the text; only the sinks move closer once the cache is full: their
    distance is that to index min(q, slots - 1). So sinks are attended with a query turned back by q - min(q, slots - 1),
    and the two parts are merged through their log-normalisers.
    """
    delta_BQ = (q_pos_BQ - (budget.slots - 1)).clamp(min=0).where(q_pos_BQ < FAR, 0)
    is_sink = k_pos_BHT < budget.sinks
    attend = partial(sparse_attention, scale=scale, q_pos_BQ=q_pos_BQ, k_pos_BHT=k_pos_BHT)
    near, near_lse = attend(q_BRQD, k_BHTD, v_BHTD, expiry_BHT.masked_fill(is_sink, 0))
    far, far_lse = attend(rotate_back(q_BRQD, delta_BQ, rotary), k_BHTD, v_BHTD, expiry_BHT.masked_fill(~is_sink, 0))
    lse = torch.logaddexp(near_lse, far_lse)
    total = lse.masked_fill(lse == -torch.inf, 0.0)
    out = near * (near_lse - total).exp()[..., None] + far * (far_lse - total).exp()[..., None]
    return out.to(q_BRQD.dtype), lse


class StreamingLayer(RankedLayer):
    def __init__(self, shape: LayerShape, budget: Budget, relative: bool) -> None:
        super().__init__(shape, budget, ConstantScorer(shape.kv_heads, shape.head_dim), FixedDecay(shape.kv_heads))
        self.attention = None
        if relative:
            if shape.rotary is None:
                raise ValueError(
                    f"layer {shape.layer} has no rotary embedding of fixed frequencies: no cache-relative positions"
                )
            self.attention = partial(cache_relative_attention, budget=budget, rotary=shape.rotary)

    def attend_sequence(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seq: SequencePass) -> Tensor:
        if self.attention is None:
            return super().attend_sequence(q, k, v, scale, seq)
        docs = seq.documents
        priority_NHL = self.priority(self.score(k, v, docs).detach())
        if seq.observe is not None:
            self.attend_expiry(
                q, k, v, sequence_expiry(priority_NHL, self.budget, docs, seq.pinned_BS, seq.impl), scale, seq
            )
        q_rows, k_rows, v_rows = docs.to_rows(q), docs.to_rows(k), docs.to_rows(v)
        N, H, L, _ = k_rows.shape
        index = torch.arange(L, device=k.device)
        pinned = None if seq.pinned_BS is None else pinned_rows(seq.pinned_BS, docs)[:, 0]
        expiry = sequence_expiry(priority_NHL, self.budget, type(docs).single(N, L, k.device), pinned, seq.impl)
        out, _ = self.attention(
            q_rows, k_rows, v_rows, expiry, scale=scale, q_pos_BQ=index.expand(N, L), k_pos_BHT=index.expand(N, H, L)
        )
        return docs.from_rows(out, fill=0.0)

    def new_slots(self, k: Tensor, v: Tensor) -> Slots:
        return RankedSlots(self.budget, self.scorer, self.decay(), 1, k, v, self.attention)

    def describe(self) -> dict[str, object]:
        return super().describe() | {"positions": "original" if self.attention is None else "cache"}


@dataclass(frozen=True)
class Streaming(Policy):
    """Sinks and the newest w + k tokens. ``positions``: "original" in the text, or "cache" (re-counted in the cache)."""

    budget: Budget
    positions: Literal["original", "cache"] = "original"

    def __post_init__(self) -> None:
        if self.positions not in ("original", "cache"):
            raise ValueError(f"positions must be 'original' or 'cache', got {self.positions!r}")
        if self.budget.heads:
            raise ValueError(f"the heads of StreamingLLM are alike, got a budget by head: {self.budget.heads}")

    @property
    def name(self) -> str:
        return "streaming" if self.positions == "original" else "streaming-cache"

    @property
    def slots(self) -> int:
        return self.budget.slots

    def layer(self, shape: LayerShape) -> StreamingLayer:
        return StreamingLayer(shape, self.budget, self.positions == "cache")

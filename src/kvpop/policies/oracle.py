"""The oracle: rank tokens by the attention they are going to receive. The ceiling for any scorer at a budget.

It needs the whole sequence, so it has no bounded store.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvpop.budget import Budget
from kvpop.core.priority import static_priority
from kvpop.core.target import Target, floored, future_target
from kvpop.policies.base import (
    BudgetPolicy,
    Heads,
    LayerPolicy,
    LayerShape,
    SequencePass,
    dense_attention,
    layer_budget,
    sequence_expiry,
)
from kvpop.slots import Slots


class OracleLayer(LayerPolicy):
    def __init__(
        self, shape: LayerShape, budget: Budget, target: Target, decay: float, heads: Heads = ()
    ) -> None:  # fmt: skip
        super().__init__(shape)
        self.target, self.decay, self.heads = target, decay, heads
        self.budget = layer_budget(budget, heads, shape.layer, shape.kv_heads)

    @torch.no_grad()
    def attend_sequence(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seq: SequencePass) -> Tensor:
        priority = self.order(q, k, v, scale, seq)
        return self.attend_expiry(
            q, k, v, sequence_expiry(priority, self.budget, seq.documents, impl=seq.impl), scale, seq
        )

    @torch.no_grad()
    def order(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seq: SequencePass) -> Tensor:
        """Static priorities of all tokens, rows of documents [N, H, L]: the attention that they are going to receive."""
        docs = seq.documents
        _, dense_lse = dense_attention(q, k, v, docs, scale, seq.impl)
        log_mass = future_target(
            q, k, dense_lse, docs, scale=scale, window=self.budget.window, target=self.target, impl=seq.impl
        )
        score = docs.to_rows(floored(log_mass, self.target.epsilon))
        log_gamma = torch.full((k.shape[1],), self.decay, device=k.device)
        return static_priority(score, torch.arange(score.shape[-1], device=k.device), log_gamma)

    def new_slots(self, k: Tensor, v: Tensor) -> Slots:
        raise ValueError("the oracle ranks tokens by future attention: it can score a given text, not generate one")


@dataclass(frozen=True)
class Oracle(BudgetPolicy):
    """``target`` says which future mass counts (dense normalisers always); ``decay`` is log gamma, nats a token."""

    target: Target = field(default_factory=lambda: Target(lse="dense"))
    decay: float = -1e-3

    @property
    def name(self) -> str:
        return "oracle"

    def layer(self, shape: LayerShape) -> OracleLayer:
        return OracleLayer(shape, self.budget, self.target, self.decay, self.heads)

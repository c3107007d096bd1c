"""A model's own sliding window: not a policy one chooses, but how a layer that was trained with one is left as it is."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpop.budget import Budget
from kvpop.ops.sparse_attention.api import sparse_attention
from kvpop.policies.base import LayerPolicy, LayerShape, SequencePass
from kvpop.scorers import ConstantScorer
from kvpop.slots import RankedSlots, Slots

# Shapes: B batch, H KV heads, S sequence.


class WindowLayer(LayerPolicy):
    """A query at q attends to q - window < t <= q: no sinks, no long-range slots, nothing to learn, nothing to observe."""

    def __init__(self, shape: LayerShape, window: int) -> None:
        super().__init__(shape)
        self.budget = Budget(sinks=0, window=window, long=0)

    def attend_sequence(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seq: SequencePass) -> Tensor:
        position_S = torch.arange(k.shape[2], device=k.device)
        expiry_BHS = seq.documents.end_BS[:, None].minimum(position_S + self.budget.window).expand(k.shape[:3]).int()
        return sparse_attention(q, k, v, expiry_BHS, scale=scale, impl=seq.impl)[0]

    attend_densely = attend_sequence  # its window is part of the model

    def new_slots(self, k: Tensor, v: Tensor) -> Slots:
        scorer = ConstantScorer(self.shape.kv_heads, self.shape.head_dim).to(k.device)
        return RankedSlots(self.budget, scorer, torch.zeros(self.shape.kv_heads, device=k.device), 1, k, v)

    def describe(self) -> dict[str, object]:
        return super().describe() | {"window": self.budget.window}

    pins_apply = False  # pins are about what a policy may drop; what the model itself never looks at again is not kept

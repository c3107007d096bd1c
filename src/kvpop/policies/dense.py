"""Dense attention: nothing is ever dropped. The teacher, and the reference for every comparison."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpop.ops.sparse_attention.api import NEVER
from kvpop.policies.base import LayerPolicy, LayerShape, Policy, SequencePass
from kvpop.slots import GrowingSlots, Slots


class DenseLayer(LayerPolicy):
    def attend_sequence(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seq: SequencePass) -> Tensor:
        if seq.observe is None:
            return self.attend_densely(q, k, v, scale, seq)
        never = torch.full(k.shape[:3], NEVER, dtype=torch.int32, device=k.device)
        return self.attend_expiry(q, k, v, never, scale, seq)

    def new_slots(self, k: Tensor, v: Tensor) -> Slots:
        return GrowingSlots(k, v)

    bounded = False
    reserves = True

    def check_pins(self, count: int) -> None:
        pass  # everything is kept


@dataclass(frozen=True)
class Dense(Policy):
    @property
    def name(self) -> str:
        return "dense"

    @property
    def slots(self) -> None:
        return None

    def layer(self, shape: LayerShape) -> DenseLayer:
        return DenseLayer(shape)

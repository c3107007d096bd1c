"""TOVA: drop what the last query attended to least, one set per layer. Found online, so its expiry is recorded, not made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpop.ops.sparse_attention.api import NEVER
from kvpop.policies.base import LayerPolicy, LayerShape, LayerView, Policy, SequencePass
from kvpop.slots import AttendedSlots, Slots


class TovaLayer(LayerPolicy):
    by_arrival = True

    def __init__(self, shape: LayerShape, size: int) -> None:
        super().__init__(shape)
        self.size = size

    def new_slots(self, k: Tensor, v: Tensor) -> Slots:
        return AttendedSlots(self.size, k, v)

    def check_rollback(self) -> None:
        raise ValueError("TOVA cannot roll back: what it keeps depends on how many tokens are read at once")

    def describe(self) -> dict[str, object]:
        return super().describe() | {"size": self.size}

    @torch.no_grad()
    def attend_sequence(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seq: SequencePass) -> Tensor:
        """Decoding, token by token: the policy as it runs when a text is generated. No gradients."""
        docs = seq.documents
        q_rows, k_rows, v_rows = docs.to_rows(q), docs.to_rows(k), docs.to_rows(v)
        slots = self.new_slots(k_rows, v_rows)
        N, H, L, _ = k_rows.shape
        expiry = torch.full((N, L), NEVER, dtype=torch.long, device=k.device)
        pieces = []
        for t in range(L):
            here = slice(t, t + 1)
            before = slots.position[:, 0].long()
            pieces.append(slots.step(q_rows[:, :, here], k_rows[:, :, here], v_rows[:, :, here], None, scale))
            if seq.observe is not None and t >= self.size:  # exactly one of held and new token was dropped
                old = torch.cat([before, before.new_full((N, 1), t)], 1)
                gone = ~(old[:, :, None] == slots.position[:, 0].long()[:, None]).any(-1)
                expiry.scatter_(1, old.gather(1, gone.int().argmax(1, keepdim=True)), t + 1)
        out = docs.from_rows(torch.cat(pieces, dim=2), fill=0.0)
        if seq.observe is not None:
            global_expiry = docs.from_rows(expiry[:, None].expand(N, H, L), fill=0) + docs.start_BS[:, None]
            global_expiry = global_expiry.minimum(docs.end_BS[:, None]).int()
            lse = torch.full(q.shape[:3], torch.nan, device=q.device)
            seq.observe(LayerView(self.shape.layer, self, q, k, v, lse, global_expiry, scale, docs))
        return out


@dataclass(frozen=True)
class Tova(Policy):
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"TOVA needs at least 1 slot, got {self.size}")

    @property
    def name(self) -> str:
        return "tova"

    @property
    def slots(self) -> int:
        return self.size

    def layer(self, shape: LayerShape) -> TovaLayer:
        return TovaLayer(shape, self.size)

"""The store of dense attention, which is not bounded at all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpop.core.cutoff import NEVER
from kvpop.ops.cache_step.api import take
from kvpop.ops.sparse_attention.api import sparse_attention
from kvpop.slots.base import EVERY, FAR, Slots

# Shapes: B rows, R = H * G query heads, H KV heads, n new tokens, D head dim.


class GrowingSlots(Slots):
    """Dense attention: everything is kept and memory grows with every token. Padding takes space but is never seen."""

    chunk = FAR

    def __init__(self, k_like: Tensor, v_like: Tensor) -> None:
        rows = k_like.shape[0]
        self.keys, self.values = k_like[:, :, :0], v_like[:, :, :0]
        self.position = torch.zeros(rows, k_like.shape[1], 0, dtype=torch.int32, device=k_like.device)
        self.seen = torch.zeros(rows, dtype=torch.long, device=k_like.device)
        self.taken = torch.zeros((), dtype=torch.long, device=k_like.device)
        self._appended = 0

    def clear(self, rows: slice = EVERY) -> None:
        super().clear(rows)
        self._compact(0)

    def put(self, row: int, other: Slots, other_row: int = 0) -> None:
        columns = int(other.seen[other_row])
        self.clear(slice(row, row + 1))
        self._compact(columns)
        there = (other.position[other_row, 0] >= 0).nonzero()[:, 0]
        for own, theirs in zip((self.keys, self.values, self.position), (other.keys, other.values, other.position)):
            own[row, :, :columns].copy_(theirs[other_row][:, there])
        self.seen[row] = columns

    def _compact(self, columns: int) -> None:
        """Move every row's tokens to the front; as many columns as the longest row needs, at least ``columns``."""
        with torch.inference_mode(False), torch.no_grad():
            order = (self.position < 0).int().argsort(dim=-1, stable=True)[..., : int(self.seen.max())]
            more = max(columns - order.shape[-1], 0)
            self.keys, self.values = (F.pad(take(x, order), (0, 0, 0, more)) for x in (self.keys, self.values))
            self.position = F.pad(take(self.position, order), (0, more), value=-1)
        self._appended = 0  # columns are no longer the last tokens of every row

    def record(self, reach: int) -> None:
        pass  # nothing is overwritten, so anything can be taken back

    @property
    def undoable(self) -> int:
        return self._appended

    def crop(self, tokens: int) -> None:
        stays = self.position.shape[-1] - tokens
        self._appended -= tokens
        self.taken -= tokens
        self.seen -= (self.position[:, 0, stays:] >= 0).sum(-1)
        self.keys, self.values, self.position = (x[:, :, :stays] for x in (self.keys, self.values, self.position))

    def pin(self, spans_BP2: Tensor) -> None:
        pass  # everything is kept

    def _several(self, q: Tensor, k: Tensor, v: Tensor, valid_Bn: Tensor | None, scale: float) -> Tensor:
        if valid_Bn is None:
            return super()._several(q, k, v, None, scale)
        return self._append(q, k, v, valid_Bn, scale).masked_fill(~valid_Bn[:, None, :, None], 0.0)

    def extend(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor, count_B: Tensor, scale: float) -> Tensor:
        offset_n = torch.arange(q_BRnD.shape[2], device=q_BRnD.device)
        return self._append(q_BRnD, k_BHnD, v_BHnD, offset_n < count_B[:, None], scale)

    def _append(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor, valid_Bn: Tensor, scale: float) -> Tensor:
        """One column for every token as it came, padding included, so that the last columns are the last tokens."""
        B, H, n, _ = k_BHnD.shape
        with torch.inference_mode(False), torch.no_grad():
            now_Bn = torch.where(valid_Bn, self.seen[:, None] + valid_Bn.cumsum(-1) - 1, -1)
            self.keys, self.values = torch.cat([self.keys, k_BHnD], 2), torch.cat([self.values, v_BHnD], 2)
            self.position = torch.cat([self.position, now_Bn[:, None].expand(B, H, n).int()], 2)
            self.seen += valid_Bn.sum(-1)
        self._appended += n
        expiry = torch.where(self.position >= 0, NEVER, 0)
        return sparse_attention(
            q_BRnD, self.keys, self.values, expiry, scale=scale, q_pos_BQ=now_Bn, k_pos_BHT=self.position
        )[0]

"""The store of dense attention, which is not bounded at all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpop.ops.cache_step.api import append, attend_held, impl_for, take
from kvpop.slots.base import CHUNK, EVERY, FAR, Slots

# Shapes: B rows, R = H * G query heads, H KV heads, G query heads per KV head, n new tokens, X queries of a KV head, T columns
# that are read, D head dim, V value dim.

ROUND = 64
"""Columns come in multiples of this."""


def roomy(columns: int) -> int:
    """Columns to allocate where so many are needed: a quarter more."""
    return -(-(columns + columns // 4) // ROUND) * ROUND


class GrowingSlots(Slots):
    """Dense attention: everything is kept and memory grows with the longest row. A row's token at position p is in column p.

    Columns that hold nothing (position -1) are room for what comes: where it runs out, keys and values are copied to ``roomy``
    columns, which ``nbytes`` counts. They are given back when every row is emptied. Padding takes no column.

    A step asks the device how long rows are when columns may have run out, and never after ``reserve``; a chunk if rows were
    padded, idle or moved about before it.
    """

    chunk = FAR

    def __init__(self, k_like: Tensor, v_like: Tensor) -> None:
        self.impl = impl_for(k_like)
        self.fixed = False
        rows, device = k_like.shape[0], k_like.device
        self.keys, self.values = k_like, v_like
        self.position = torch.zeros(*k_like.shape[:2], 0, dtype=torch.int32, device=device)
        self.seen = torch.zeros(rows, dtype=torch.long, device=device)
        self.taken = torch.zeros((), dtype=torch.long, device=device)
        self._start()

    def _start(self) -> None:
        """Let every row be empty, without memory."""
        self.keys, self.values, self.position = (x[:, :, :0].clone() for x in self._columns)
        self._most, self._exact = 0, True  # tokens of the longest row: no more than that, and whether it is that
        self._forget()

    @property
    def _columns(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.keys, self.values, self.position

    # Room.

    def _room(self, n: int, ask: bool = False) -> int:
        """See that every row has columns for n more tokens; the longest row before them, or more than that unless ``ask``."""
        columns = self.position.shape[-1]
        if self.fixed or ask or self._most + n > columns:
            self._most, self._exact = self._longest(), True
        before = self._most
        if before + n > columns:
            self._grow(before + n)
        self._most = before + n
        return before

    def _longest(self) -> int:
        longest, columns = int(self.seen.max()) if self.seen.numel() else 0, self.position.shape[-1]
        if longest > columns:
            raise RuntimeError(
                f"{longest} tokens came to {columns} columns: reserve(tokens) before the steps that need them"
            )
        return longest

    def _grow(self, columns: int) -> None:
        more = roomy(columns) - self.position.shape[-1]
        with torch.inference_mode(False), torch.no_grad():
            self.position = F.pad(self.position, (0, more), value=-1)
            self.keys = F.pad(self.keys, (0, 0, 0, more))
            self.values = F.pad(self.values, (0, 0, 0, more))

    def reserve(self, tokens: int) -> bool:
        """Make room for ``tokens`` more tokens of every row: so many steps then ask nothing of the host, and can be captured.

        As ``PagedSlots.reserve``, but what was taken in before the call, or is while it holds, cannot be taken back.
        """
        if tokens < 0:
            raise ValueError(f"tokens must be at least 0, got {tokens}")
        self.check()
        self.fixed, self._exact = tokens > 0, False
        if not self.fixed:
            self._known, self._most = (), self.position.shape[-1]  # as many as there could be
            return True
        self._forget()
        self._room(tokens)
        return self._moved(*self._columns, self.seen, self.taken)

    def check(self) -> None:
        if self.fixed:
            self._longest()

    # Taking tokens in.

    @torch.no_grad()
    def attend(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor, valid_Bn: Tensor | None, scale: float) -> Tensor:
        out = super().attend(q_BRnD, k_BHnD, v_BHnD, valid_Bn, scale)
        if not self.fixed:
            self._note(q_BRnD.shape[2], valid_Bn)
        return out

    def step(self, q_BR1D: Tensor, k_BH1D: Tensor, v_BH1D: Tensor, valid_B: Tensor | None, scale: float) -> Tensor:
        if not self.fixed:
            self._room(1)
        append(*self._columns, k_BH1D, v_BH1D, self.seen, valid_B, self.impl)
        self.seen += 1 if valid_B is None else valid_B
        return attend_held(q_BR1D, *self._columns, scale, self.impl, count_B=self.seen)

    def extend(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor, count_B: Tensor, scale: float) -> Tensor:
        B, H, n, D = k_BHnD.shape
        before, before_B = self._room(n, ask=not self._exact), self.seen.clone()
        index_n = torch.arange(n, device=k_BHnD.device)
        column_Bn, padding_Bn = before_B[:, None] + index_n, index_n >= count_B[:, None]
        # Masked or not held, it must be finite.
        k_BHnD, v_BHnD = (x.masked_fill(padding_Bn[:, None, :, None], 0) for x in (k_BHnD, v_BHnD))
        at = (torch.arange(B, device=k_BHnD.device)[:, None], slice(None), column_Bn)  # [B, n, H, ...]
        self.keys[at], self.values[at] = k_BHnD.transpose(1, 2), v_BHnD.transpose(1, 2)
        self.position[at] = column_Bn.masked_fill(padding_Bn, -1).int()[..., None]
        self.seen += count_B
        G = q_BRnD.shape[1] // H
        if not before:  # every row was empty. Keys are repeated: ``enable_gqa`` has no fast kernel in float32 on a GPU
            k_BRnD, v_BRnD = (x.repeat_interleave(G, 1) for x in (k_BHnD, v_BHnD))
            return F.scaled_dot_product_attention(q_BRnD, k_BRnD, v_BRnD, is_causal=True, scale=scale)
        # The query heads of a KV head stand side by side as its queries, as in ``attend_held``.
        pieces = []
        for start in range(0, n, CHUNK):
            stop = min(start + CHUNK, n)
            T, last_BX = before + stop, column_Bn[:, start:stop].repeat(1, G)
            seen_BXT = torch.arange(T, device=k_BHnD.device) <= last_BX[..., None]
            out = F.scaled_dot_product_attention(
                q_BRnD[:, :, start:stop].reshape(B, H, -1, D), self.keys[:, :, :T], self.values[:, :, :T],
                attn_mask=seen_BXT[:, None], scale=scale,
            )  # fmt: skip
            pieces.append(out.reshape(B, H * G, stop - start, -1))
        return torch.cat(pieces, 2)

    # Taking tokens back: which of the tokens that came since rows were moved about were real, a column each.

    def record(self, reach: int) -> None:
        pass  # nothing is overwritten, so anything can be taken back

    def _forget(self) -> None:
        self._came, self._appended = torch.zeros(len(self.seen), 0, dtype=torch.bool, device=self.seen.device), 0

    def _note(self, n: int, valid_Bn: Tensor | None) -> None:
        stop, have = self._appended + n, self._came.shape[-1]
        with torch.inference_mode(False), torch.no_grad():
            if stop > have:
                self._came = F.pad(self._came, (0, roomy(stop) - have))
            self._came[:, self._appended : stop] = True if valid_Bn is None else valid_Bn
        self._appended, self._exact = stop, self._exact and valid_Bn is None

    @property
    def undoable(self) -> int:
        return self._appended

    @torch.no_grad()
    def crop(self, tokens: int) -> None:
        assert 0 <= tokens <= self._appended
        stays = self._appended - tokens
        self.seen -= self._came[:, stays : self._appended].sum(-1)
        self.taken -= tokens
        self._appended, self._exact = stays, False
        gone_BHM = self.position >= self.seen[:, None, None]
        self.position.masked_fill_(gone_BHM, -1)
        for x in (self.keys, self.values):
            x.masked_fill_(gone_BHM[..., None], 0)

    def pin(self, spans_BP2: Tensor) -> None:
        pass  # everything is kept

    # Moving rows about.

    def replace(self, tensors: dict[str, Tensor]) -> None:
        """Tokens may lie in any columns."""
        super().replace(tensors)
        with torch.inference_mode(False), torch.no_grad():
            order = self.position.masked_fill(self.position < 0, FAR).argsort(dim=-1, stable=True)
            if bool((order != torch.arange(order.shape[-1], device=order.device)).any()):
                self.keys, self.values, self.position = (take(x, order) for x in self._columns)
        self._most, self._exact = self.position.shape[-1], False
        self._forget()

    def select(self, rows_n: Tensor) -> None:
        with torch.inference_mode(False):
            came, appended = self._came.index_select(0, rows_n.to(self._came.device)), self._appended
        super().select(rows_n)
        self._came, self._appended, self._exact = came, appended, False

    def clear(self, rows: slice = EVERY) -> None:
        super().clear(rows)
        self._exact = False
        self._forget()
        if rows == EVERY and not self.fixed:
            with torch.inference_mode(False):
                self._start()

    def put(self, row: int, other: Slots, other_row: int = 0) -> None:
        assert isinstance(other, GrowingSlots)
        columns = int(other.seen[other_row])
        if columns > self.position.shape[-1]:
            self._grow(columns)
        with torch.inference_mode(False), torch.no_grad():
            for x, theirs, nothing in zip(self._columns, other._columns, (0, 0, -1)):
                x[row, :, :columns].copy_(theirs[other_row, :, :columns])
                x[row, :, columns:] = nothing
            self.seen[row].copy_(other.seen[other_row])
        self._most, self._exact = max(self._most, columns), False
        self._forget()

    def to(self, device: torch.device | str) -> None:
        with torch.inference_mode(False):
            came, appended = self._came.to(device), self._appended
        super().to(device)
        self._came, self._appended = came, appended

    def nbytes(self) -> int:
        """Bytes allocated, room for what comes included."""
        return super().nbytes() + self._came.nbytes

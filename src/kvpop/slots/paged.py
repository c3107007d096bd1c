"""The store of DMS: a ring of recent tokens, and pages for those whose gate stayed open. Memory follows the gates, per head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvpop.core.cutoff import NEVER
from kvpop.ops.cache_step.api import attend_held, impl_for, take, write
from kvpop.ops.sparse_attention.api import sparse_attention
from kvpop.slots.base import EVERY, FAR, Slots

# Shapes: B rows, R = H * G query heads, H KV heads, W window, n new tokens, T = W + n recent and new tokens, N pages a head,
# P pages in the pool, L tokens a page, M the most tokens held by any head, D head dim, V value dim.

PAGE = 32
"""Tokens in a page."""

Gate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(q [B, R, n, D], k, v [B, H, n, D]) -> (the queries to attend with, what each token decides [B, H, n]: True drops)."""


class PagedSlots(Slots):
    """A token is held while it is one of the last ``window``; what then happens to it was decided ``lag`` tokens after it came.

    If its gate is open, or it is one of the first ``sinks`` tokens of its row, it moves to a page of its head and stays for
    ever; if not, its place in the ring is overwritten and nothing of it is left. Pages of ``page`` tokens come from one pool
    for all rows and heads of the layer. The pool grows by an eighth, or by what is missing if that is more; it gives memory
    back when every row is emptied, and hands out again the pages of a row that is cleared or overwritten. Growing it copies
    it, and attending gathers the pages of all heads to the length of the longest: memory that ``nbytes`` does not count.

    Raises ValueError for window < 1 (a token attends to itself), sinks < 0, page < 1 and a lag that is not 0 or 1.
    """

    def __init__(
        self, window: int, sinks: int, gate: Gate, lag: int, k_like: Tensor, v_like: Tensor, page: int = PAGE
    ) -> None:
        for name, value, low in (("window", window, 1), ("sinks", sinks, 0), ("page", page, 1)):
            if value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        if lag not in (0, 1):
            raise ValueError(f"lag must be 0 or 1 token, got {lag}")
        self.window, self.sinks, self.gate, self.lag, self.page = window, sinks, gate, lag, page
        self._start(len(k_like), k_like, v_like)

    def _start(self, rows: int, k_like: Tensor, v_like: Tensor) -> None:
        """An empty store with the heads, widths, dtype and device of k [..., H, n, D] and v."""
        H, D, V, device = k_like.shape[1], k_like.shape[-1], v_like.shape[-1], k_like.device
        W, L, long = self.window, self.page, torch.long
        self.impl = impl_for(k_like)
        self.ring_keys = torch.zeros(rows, H, W, D, dtype=k_like.dtype, device=device)
        self.ring_values = torch.zeros(rows, H, W, V, dtype=v_like.dtype, device=device)
        self.ring_closed = torch.zeros(rows, H, W, dtype=torch.bool, device=device)
        # Page 0 is never handed out: it stands, all zeros, where a head has no page.
        self.keys = torch.zeros(1, L, D, dtype=k_like.dtype, device=device)
        self.values = torch.zeros(1, L, V, dtype=v_like.dtype, device=device)
        self.paged_position = torch.zeros(1, L, dtype=torch.int32, device=device)
        self.free = torch.zeros(1, dtype=long, device=device)  # a stack: the first ``spare`` are free pages
        self.spare = 0
        self.table = torch.zeros(rows, H, 0, dtype=long, device=device)
        self.count = torch.zeros(rows, H, dtype=long, device=device)  # tokens in pages
        self.seen = torch.zeros(rows, dtype=long, device=device)
        self.taken = torch.zeros((), dtype=long, device=device)

    # Taking tokens in.

    def step(self, q_BR1D: Tensor, k_BH1D: Tensor, v_BH1D: Tensor, valid_B: Tensor | None, scale: float) -> Tensor:
        """Decide about token now - lag, let token now - w go, append, attend."""
        B, H = k_BH1D.shape[:2]
        q_BR1D, gate_BH1 = self.gate(q_BR1D, k_BH1D, v_BH1D)
        now_B = self.seen.clone()
        valid_B = torch.ones_like(now_B, dtype=torch.bool) if valid_B is None else valid_B
        slot_BH1 = (now_B % self.window)[:, None, None].expand(B, H, 1)
        about_B = now_B - self.lag
        gate_BH1 = gate_BH1 & (about_B >= self.sinks)[:, None, None]
        if self.lag:
            before_BH1 = (about_B % self.window)[:, None, None].expand(B, H, 1)
            write(self.ring_closed, before_BH1, gate_BH1, valid_B & (about_B >= 0))
        leaves_B11 = (valid_B & (now_B >= self.window))[:, None, None]
        self._append(
            take(self.ring_keys, slot_BH1),
            take(self.ring_values, slot_BH1),
            (now_B - self.window)[:, None, None].expand(B, H, 1),
            leaves_B11 & ~take(self.ring_closed, slot_BH1),
        )
        write(self.ring_keys, slot_BH1, k_BH1D, valid_B)
        write(self.ring_values, slot_BH1, v_BH1D, valid_B)
        write(self.ring_closed, slot_BH1, torch.zeros_like(gate_BH1) if self.lag else gate_BH1, valid_B)
        self.seen += valid_B
        keys, values, position = self._everything()
        return attend_held(q_BR1D, keys, values, position, scale, self.impl)

    def extend(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor, count_B: Tensor, scale: float) -> Tensor:
        """The ring and the new tokens are one run of positions, in which each gate says when its token goes."""
        W, lag = self.window, self.lag
        B, H, n, _ = k_BHnD.shape
        q_BRnD, gate_BHn = self.gate(q_BRnD, k_BHnD, v_BHnD)
        index_T = torch.arange(W + n, device=k_BHnD.device)
        end_B = self.seen + count_B
        position_BT = self.seen[:, None] - W + index_T
        real_BT = (position_BT >= 0) & (position_BT < end_B[:, None])
        ring_BHW = (position_BT[:, :W] % W)[:, None].expand(B, H, W)
        k_BHTD = torch.cat([take(self.ring_keys, ring_BHW), k_BHnD], 2)
        v_BHTD = torch.cat([take(self.ring_values, ring_BHW), v_BHnD], 2)
        closed_BHT = torch.cat([take(self.ring_closed, ring_BHW), torch.zeros_like(gate_BHn)], 2)
        closed_BHT[..., W - lag : W - lag + n] |= gate_BHn & real_BT[:, None, W:]
        closed_BHT &= (real_BT & (position_BT >= self.sinks))[:, None]
        paged = self._paged()
        expiry_BHT = torch.where(closed_BHT, position_BT[:, None] + W, NEVER).where(real_BT[:, None], 0)
        out, _ = sparse_attention(
            q_BRnD,
            torch.cat([paged[0], k_BHTD], 2),
            torch.cat([paged[1], v_BHTD], 2),
            torch.cat([torch.where(paged[2] >= 0, NEVER, 0), expiry_BHT], 2),
            scale=scale,
            q_pos_BQ=position_BT[:, W:],
            k_pos_BHT=torch.cat([paged[2], position_BT[:, None].expand(B, H, -1)], 2),
        )
        leaves_Bn = (real_BT & (position_BT < (end_B - W)[:, None]))[:, :n]
        keep_BHn = leaves_Bn[:, None] & ~closed_BHT[..., :n]
        self._append(k_BHTD[:, :, :n], v_BHTD[:, :, :n], position_BT[:, None, :n].expand(B, H, n), keep_BHn)
        new_BHW = (self._ring_position(end_B) - (self.seen - W)[:, None])[:, None].expand(B, H, W)
        self.ring_keys.copy_(take(k_BHTD, new_BHW))
        self.ring_values.copy_(take(v_BHTD, new_BHW))
        self.ring_closed.copy_(take(closed_BHT, new_BHW))
        self.seen += count_B
        return out

    def _append(self, k_BHnD: Tensor, v_BHnD: Tensor, position_BHn: Tensor, keep_BHn: Tensor) -> None:
        """Write the tokens of each head where ``keep`` holds behind those in its pages."""
        L = self.page
        total_BH = self.count + keep_BHn.sum(-1)
        have_BH, need_BH = (-(-x // L) for x in (self.count, total_BH))
        self._give_pages(have_BH, need_BH)
        b, h, i = keep_BHn.nonzero(as_tuple=True)
        at = self.count[b, h] + keep_BHn.cumsum(-1)[b, h, i] - 1
        page, offset = self.table[b, h, at // L], at % L
        self.keys[page, offset] = k_BHnD[b, h, i]
        self.values[page, offset] = v_BHnD[b, h, i]
        self.paged_position[page, offset] = position_BHn[b, h, i].int()
        self.count.copy_(total_BH)

    # Pages.

    def _give_pages(self, have_BH: Tensor, need_BH: Tensor) -> None:
        """See that each head has the number of pages it needs; asks the device."""
        fresh = (need_BH - have_BH).flatten()
        widest, wanted = torch.stack([need_BH.max(), fresh.sum()]).tolist() if fresh.numel() else (0, 0)
        self._widen(widest)
        if wanted:
            owner = torch.arange(len(fresh), device=fresh.device).repeat_interleave(fresh, output_size=wanted)
            index = torch.arange(wanted, device=fresh.device)
            column = have_BH.flatten()[owner] + index - (fresh.cumsum(0) - fresh)[owner]
            self.table.view(-1, self.table.shape[-1])[owner, column] = self._take_pages(wanted)

    def _widen(self, pages: int) -> None:
        """Room for at least this many pages a head in the table."""
        more = pages - self.table.shape[-1]
        if more > 0:
            with torch.inference_mode(False), torch.no_grad():
                self.table = torch.nn.functional.pad(self.table, (0, more))

    def _take_pages(self, wanted: int) -> Tensor:
        """Ids of pages that are free, zeroed: what is left of another row must not be read, not even times 0."""
        if wanted > self.spare:
            self._grow(max(wanted - self.spare, len(self.keys) // 8))
        self.spare -= wanted
        ids = self.free[self.spare : self.spare + wanted].clone()
        self.keys[ids], self.values[ids] = 0.0, 0.0
        return ids

    def _grow(self, pages: int) -> None:
        P = len(self.keys)
        with torch.inference_mode(False), torch.no_grad():
            for name in ("keys", "values", "paged_position"):
                x = getattr(self, name)
                setattr(self, name, torch.cat([x, x.new_zeros(pages, *x.shape[1:])]))
            stack = self.free.new_zeros(P + pages)
            stack[: self.spare] = self.free[: self.spare]
            stack[self.spare : self.spare + pages] = torch.arange(P, P + pages, device=stack.device)
            self.free, self.spare = stack, self.spare + pages

    def _free_pages(self, table: Tensor) -> None:
        ids = table[table > 0]
        self.free[self.spare : self.spare + len(ids)] = ids
        self.spare += len(ids)

    def _narrow(self) -> None:
        """Let the table be no wider than the longest head needs: attention gathers as many pages for every head."""
        with torch.inference_mode(False), torch.no_grad():
            most = -(-int(self.count.max()) // self.page) if self.count.numel() else 0
            self.table = self.table[..., :most].contiguous()

    # What is held.

    def _ring_position(self, end_B: Tensor) -> Tensor:
        """The position of what each place of the ring holds once ``end`` tokens were seen [B, W]; below 0: nothing."""
        place_W = torch.arange(self.window, device=end_B.device)
        last_B1 = end_B[:, None] - 1
        return last_B1 - (last_B1 - place_W) % self.window

    def _paged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and positions (-1: empty) of every head's pages, side by side [B, H, N * L, ...]."""
        place = torch.arange(self.table.shape[-1] * self.page, device=self.table.device)
        position = self.paged_position[self.table].flatten(2)
        position = position.where(place < self.count[..., None], -1)
        return self.keys[self.table].flatten(2, 3), self.values[self.table].flatten(2, 3), position

    def _everything(self) -> tuple[Tensor, Tensor, Tensor]:
        """The pages of every head and its ring."""
        keys, values, position = self._paged()
        ring = self._ring_position(self.seen).clamp(min=-1).int()[:, None].expand(*self.ring_keys.shape[:3])
        return (
            torch.cat([keys, self.ring_keys], 2),
            torch.cat([values, self.ring_values], 2),
            torch.cat([position, ring], 2),
        )

    @property
    def position(self) -> Tensor:  # type: ignore[override]
        """Positions held [B, H, M], sorted, -1 behind them: made anew at every look."""
        return self.tensors()["position"]

    def tensors(self) -> dict[str, Tensor]:
        """What is held, gathered: keys, values and position [B, H, M, ...] by position, empty places last; copies."""
        keys, values, position = self._everything()
        order = position.masked_fill(position < 0, FAR).argsort(dim=-1, stable=True)
        most = int((position >= 0).sum(-1).max()) if position.numel() else 0
        order = order[..., :most]
        held = {"keys": take(keys, order), "values": take(values, order), "position": take(position, order)}
        return held | {"seen": self.seen, "closed": self.ring_closed}

    def replace(self, tensors: dict[str, Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            keys, values, position = (tensors[name] for name in ("keys", "values", "position"))
            taken = self.taken.to(keys.device)
            self._start(len(keys), keys, values)
            self.seen.copy_(tensors["seen"])
            self.ring_closed.copy_(tensors["closed"])
            self.taken.copy_(taken)
            if not position.numel():
                return
            # The newest tokens of a head, as many as the ring holds of its row, are in the ring.
            behind_BW = self.seen[:, None] - self._ring_position(self.seen)
            column_BHW = ((position >= 0).sum(-1, keepdim=True) - behind_BW[:, None]).clamp(0, position.shape[-1] - 1)
            self.ring_keys.copy_(take(keys, column_BHW))
            self.ring_values.copy_(take(values, column_BHW))
            keep = (position >= 0) & (position < (self.seen - self.window)[:, None, None])
            self._append(keys, values, position, keep)

    # Moving rows about.

    def select(self, rows_n: Tensor) -> None:
        """Rows that stay keep their pages, rows that repeat get copies, pages of the others are free again."""
        with torch.inference_mode(False), torch.no_grad():
            rows_n = rows_n.to(self.seen.device)
            index_n = torch.arange(len(rows_n), device=rows_n.device)
            first = torch.full_like(self.seen, len(rows_n)).scatter_reduce_(0, rows_n, index_n, "amin")
            self._free_pages(self.table[first == len(rows_n)])
            table = self.table[rows_n]
            for name in ("ring_keys", "ring_values", "ring_closed", "count", "seen"):
                setattr(self, name, getattr(self, name)[rows_n])
            again = (first[rows_n] != index_n)[:, None, None] & (table > 0)
            table[again] = self._copies(self, table[again])
            self.table = table
            self._narrow()

    def _copies(self, other: PagedSlots, ids: Tensor) -> Tensor:
        """Pages of our own with the contents of another store's."""
        own = self._take_pages(len(ids))
        for name in ("keys", "values", "paged_position"):
            getattr(self, name)[own] = getattr(other, name)[ids].to(own.device)
        return own

    def clear(self, rows: slice = EVERY) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if rows == EVERY:
                self._start(len(self.seen), self.ring_keys, self.ring_values)
                return
            self._free_pages(self.table[rows])
            for name in ("table", "count", "ring_keys", "ring_values", "ring_closed", "seen"):
                getattr(self, name)[rows] = 0
            self._narrow()

    def put(self, row: int, other: Slots, other_row: int = 0) -> None:
        assert isinstance(other, PagedSlots)
        if other is self and row == other_row:
            return
        with torch.inference_mode(False), torch.no_grad():
            self.clear(slice(row, row + 1))
            theirs = other.table[other_row]
            self._widen(theirs.shape[-1])
            columns = self.table[row, :, : theirs.shape[-1]]
            columns[(theirs > 0).to(columns.device)] = self._copies(other, theirs[theirs > 0])
            for name in ("count", "ring_keys", "ring_values", "ring_closed", "seen"):
                getattr(self, name)[row].copy_(getattr(other, name)[other_row])

    def to(self, device: torch.device | str) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for name in STORED:
                setattr(self, name, getattr(self, name).to(device))

    def nbytes(self) -> int:
        """Bytes allocated: ring, pool with its free pages, table and counters."""
        return sum(x.numel() * x.element_size() for x in (getattr(self, name) for name in STORED))


STORED = (
    "keys", "values", "paged_position", "free", "table", "count", "ring_keys", "ring_values", "ring_closed", "seen", "taken",
)  # fmt: skip

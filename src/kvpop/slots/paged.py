"""The store of DMS: a ring of recent tokens, and pages for those whose gate stayed open. Memory follows the gates, per head."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvpop.core.cutoff import NEVER
from kvpop.ops.cache_step.api import impl_for, take
from kvpop.ops.paged_step.api import MLPGate, Pages, Ring, everything, paged, ring_position
from kvpop.ops.paged_step.api import step as paged_step
from kvpop.ops.sparse_attention.api import chunk_impl, sparse_attention
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
    it, and taking in several tokens (on a CPU also one) gathers the pages of all heads to the length of the longest: memory
    that ``nbytes`` does not count.

    A step asks the device which heads need a page (on a GPU only every ``page`` steps, giving all heads a page ahead), until
    ``reserve`` gives them beforehand. ``weights``: of the gate, for the kernels; None, or where it returns None, the step calls
    ``gate``.

    Raises ValueError for window < 1 (a token attends to itself), sinks < 0, page < 1 and a lag that is not 0 or 1.
    """

    def __init__(
        self, window: int, sinks: int, gate: Gate, lag: int, k_like: Tensor, v_like: Tensor, page: int = PAGE,
        weights: Callable[[], MLPGate | None] | None = None,
    ) -> None:  # fmt: skip
        for name, value, low in (("window", window, 1), ("sinks", sinks, 0), ("page", page, 1)):
            if value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
        if lag not in (0, 1):
            raise ValueError(f"lag must be 0 or 1 token, got {lag}")
        self.window, self.sinks, self.gate, self.lag, self.page, self.weights = window, sinks, gate, lag, page, weights
        self.fixed = False
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
        self._ahead = 0  # steps for which every head has its pages, if nothing else happens
        self.table = torch.zeros(rows, H, 0, dtype=long, device=device)
        self.count = torch.zeros(rows, H, dtype=long, device=device)  # tokens in pages
        self.missed = torch.zeros(rows, H, dtype=torch.bool, device=device)  # heads that ran out of reserved pages
        self.seen = torch.zeros(rows, dtype=long, device=device)
        self.taken = torch.zeros((), dtype=long, device=device)

    # Taking tokens in.

    @property
    def _pages(self) -> Pages:
        return Pages(self.keys, self.values, self.paged_position, self.table, self.count, self.missed)

    @property
    def _ring(self) -> Ring:
        return Ring(self.ring_keys, self.ring_values, self.ring_closed)

    def step(self, q_BR1D: Tensor, k_BH1D: Tensor, v_BH1D: Tensor, valid_B: Tensor | None, scale: float) -> Tensor:
        """Decide about token now - lag, let token now - w go, append, attend (``ops.paged_step``)."""
        early = self.lag > 0 and self.window == 1  # the token that is decided about goes in this very step
        gate: Tensor | MLPGate | None = None
        if self.impl == "triton" and self.weights is not None and not early:
            gate = self.weights()
        if gate is None:
            q_BR1D, gate = self.gate(q_BR1D, k_BH1D, v_BH1D)
        if not self.fixed and self.impl == "triton":
            if not self._ahead:
                self._give_pages(self.count + self.page)
                self._ahead = self.page
            self._ahead -= 1
        elif not self.fixed:
            self._page_for_one(gate if early and isinstance(gate, Tensor) else None, valid_B)
        return paged_step(
            q_BR1D, k_BH1D, v_BH1D, self._pages, self._ring, self.seen, gate,
            sinks=self.sinks, lag=self.lag, scale=scale, valid_B=valid_B, impl=self.impl,
        )  # fmt: skip

    def _page_for_one(self, gate_BH1: Tensor | None, valid_B: Tensor | None) -> None:
        """Give a page to each head that needs one in this step; ``gate``: what decides about the token that leaves now."""
        slot_B11 = (self.seen % self.window)[:, None, None]
        closed_BH1 = take(self.ring_closed, slot_B11.expand(*self.count.shape, 1))
        if gate_BH1 is not None:
            closed_BH1 = gate_BH1 & (self.seen > self.sinks)[:, None, None]
        leaves_B = self.seen >= self.window
        if valid_B is not None:
            leaves_B = leaves_B & valid_B
        self._give_pages(self.count + (leaves_B[:, None] & ~closed_BH1[..., 0]))

    def extend(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor, count_B: Tensor, scale: float) -> Tensor:
        """The ring and the new tokens are one run of positions, in which each gate says when its token goes."""
        self._check_missed()
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
        held = paged(self._pages)
        expiry_BHT = torch.where(closed_BHT, position_BT[:, None] + W, NEVER).where(real_BT[:, None], 0)
        keys, values = torch.cat([held[0], k_BHTD], 2), torch.cat([held[1], v_BHTD], 2)
        out, _ = sparse_attention(
            q_BRnD,
            keys,
            values,
            torch.cat([torch.where(held[2] >= 0, NEVER, 0), expiry_BHT], 2),
            scale=scale,
            q_pos_BQ=position_BT[:, W:],
            k_pos_BHT=torch.cat([held[2], position_BT[:, None].expand(B, H, -1)], 2),
            impl=chunk_impl(q_BRnD, keys, values),
        )
        leaves_Bn = (real_BT & (position_BT < (end_B - W)[:, None]))[:, :n]
        keep_BHn = leaves_Bn[:, None] & ~closed_BHT[..., :n]
        self._append(k_BHTD[:, :, :n], v_BHTD[:, :, :n], position_BT[:, None, :n].expand(B, H, n), keep_BHn)
        new_BHW = (ring_position(end_B, W) - (self.seen - W)[:, None])[:, None].expand(B, H, W)
        self.ring_keys.copy_(take(k_BHTD, new_BHW))
        self.ring_values.copy_(take(v_BHTD, new_BHW))
        self.ring_closed.copy_(take(closed_BHT, new_BHW))
        self.seen += count_B
        return out

    def _append(self, k_BHnD: Tensor, v_BHnD: Tensor, position_BHn: Tensor, keep_BHn: Tensor) -> None:
        """Write the tokens of each head where ``keep`` holds behind those in its pages."""
        L, self._ahead = self.page, 0
        total_BH = self.count + keep_BHn.sum(-1)
        self._give_pages(total_BH)
        b, h, i = keep_BHn.nonzero(as_tuple=True)
        at = self.count[b, h] + keep_BHn.cumsum(-1)[b, h, i] - 1
        page, offset = self.table[b, h, at // L], at % L
        self.keys[page, offset] = k_BHnD[b, h, i]
        self.values[page, offset] = v_BHnD[b, h, i]
        self.paged_position[page, offset] = position_BHn[b, h, i].int()
        self.count.copy_(total_BH)

    # Pages.

    def reserve(self, tokens: int) -> bool:
        """Give every head pages for ``tokens`` more tokens: so many steps then ask nothing of the host, and can be captured.

        From then on memory stays where it is, through ``clear``, ``replace``, ``select`` of as many rows and ``put``, as long
        as it suffices; call it again before the tokens are used up (in place, unless the pool or the table is too small) and
        after all of those. With 0 tokens the store goes back to growing by itself. Asks the device.

        Returns whether anything has moved since the last call: what was captured before must be captured again. Raises
        ValueError for tokens < 0, RuntimeError if more steps were made than were reserved (see ``missed``), and
        torch.OutOfMemoryError, saying how many pages were needed.
        """
        if tokens < 0:
            raise ValueError(f"tokens must be at least 0, got {tokens}")
        self._check_missed()
        self.fixed, self._ahead = tokens > 0, 0
        if not self.fixed:
            self._known = ()
            return True
        self._give_pages(self.count + tokens)
        return self._moved(*(getattr(self, name) for name in STORED))

    def check(self) -> None:
        if self.fixed:
            self._check_missed()

    def _check_missed(self) -> None:
        if self.missed.numel() and bool(self.missed.any()):
            heads = self.missed.nonzero().tolist()
            raise RuntimeError(
                f"{len(heads)} heads (row, head: {heads[:4]}...) ran out of their pages: the pool has {len(self.keys) - 1} "
                f"pages of {self.page} tokens, {self.spare} of them free; reserve(tokens) before the steps that need them"
            )

    def _give_pages(self, total_BH: Tensor) -> None:
        """See that each head has the pages for so many tokens; asks the device."""
        have_BH, need_BH = (self.table > 0).sum(-1), -(-total_BH // self.page)
        fresh = (need_BH - have_BH).clamp(min=0).flatten()
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
            more += pages // 4 if self.fixed else 0  # so that it does not move with every page of the longest head
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
            try:
                grown = [
                    torch.cat([x, x.new_zeros(pages, *x.shape[1:])])
                    for x in (self.keys, self.values, self.paged_position)
                ]
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(
                    f"a pool of {P} pages of {self.page} tokens, {self.spare} of them free, has to grow by {pages}, and is "
                    f"copied as it does: {error}"
                ) from error
            self.keys, self.values, self.paged_position = grown
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
        if self.fixed:
            return
        with torch.inference_mode(False), torch.no_grad():
            most = int((self.table > 0).sum(-1).max()) if self.count.numel() else 0
            self.table = self.table[..., :most].contiguous()

    # What is held.

    @property
    def position(self) -> Tensor:  # type: ignore[override]
        """Positions held [B, H, M], sorted, -1 behind them: made anew at every look."""
        return self.tensors()["position"]

    def tokens_held(self, row: int) -> Tensor:
        recent = self.seen[row].clamp(max=self.window)
        return self.count[row].sum() + recent * self.count.shape[1]

    def tensors(self) -> dict[str, Tensor]:
        """What is held, gathered: keys, values and position [B, H, M, ...] by position, empty places last; copies."""
        self._check_missed()
        keys, values, position = everything(self._pages, self._ring, self.seen)
        order = position.masked_fill(position < 0, FAR).argsort(dim=-1, stable=True)
        most = int((position >= 0).sum(-1).max()) if position.numel() else 0
        order = order[..., :most]
        held = {"keys": take(keys, order), "values": take(values, order), "position": take(position, order)}
        return held | {"seen": self.seen, "closed": self.ring_closed}

    def replace(self, tensors: dict[str, Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            keys, values, position = (tensors[name] for name in ("keys", "values", "position"))
            seen, closed, taken = tensors["seen"].clone(), tensors["closed"].clone(), self.taken.clone()
            given, own = (
                (*k.shape[:2], k.shape[-1], v.shape[-1], k.dtype, k.device)
                for k, v in ((keys, values), (self.ring_keys, self.ring_values))
            )
            if self.fixed and given == own:
                self.clear()  # in place
            else:
                self._start(len(keys), keys, values)
            self.seen.copy_(seen)
            self.ring_closed.copy_(closed)
            self.taken.copy_(taken)
            if not position.numel():
                return
            # The newest tokens of a head, as many as the ring holds of its row, are in the ring.
            behind_BW = self.seen[:, None] - ring_position(self.seen, self.window)
            column_BHW = ((position >= 0).sum(-1, keepdim=True) - behind_BW[:, None]).clamp(0, position.shape[-1] - 1)
            self.ring_keys.copy_(take(keys, column_BHW))
            self.ring_values.copy_(take(values, column_BHW))
            keep = (position >= 0) & (position < (self.seen - self.window)[:, None, None])
            self._append(keys, values, position, keep)

    # Moving rows about.

    def select(self, rows_n: Tensor) -> None:
        """Rows that stay keep their pages, rows that repeat get copies, pages of the others are free again."""
        with torch.inference_mode(False), torch.no_grad():
            rows_n, self._ahead = rows_n.to(self.seen.device), 0
            index_n = torch.arange(len(rows_n), device=rows_n.device)
            first = torch.full_like(self.seen, len(rows_n)).scatter_reduce_(0, rows_n, index_n, "amin")
            self._free_pages(self.table[first == len(rows_n)])
            table = self.table[rows_n]
            for name in ("ring_keys", "ring_values", "ring_closed", "count", "missed", "seen"):
                self._set(name, getattr(self, name)[rows_n])
            again = (first[rows_n] != index_n)[:, None, None] & (table > 0)
            table[again] = self._copies(self, table[again])
            self._set("table", table)
            self._narrow()

    def _set(self, name: str, x: Tensor) -> None:
        own = getattr(self, name)
        if self.fixed and own.shape == x.shape:
            own.copy_(x)
        else:
            setattr(self, name, x)

    def _copies(self, other: PagedSlots, ids: Tensor) -> Tensor:
        """Pages of our own with the contents of another store's."""
        own = self._take_pages(len(ids))
        for name in ("keys", "values", "paged_position"):
            getattr(self, name)[own] = getattr(other, name)[ids].to(own.device)
        return own

    def clear(self, rows: slice = EVERY) -> None:
        with torch.inference_mode(False), torch.no_grad():
            if rows == EVERY and not self.fixed:
                self._start(len(self.seen), self.ring_keys, self.ring_values)
                return
            self._ahead = 0
            self._free_pages(self.table[rows])
            for name in ("table", "count", "missed", "ring_keys", "ring_values", "ring_closed", "seen"):
                getattr(self, name)[rows] = 0
            if rows == EVERY:
                self.taken.zero_()
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
            for name in ("count", "missed", "ring_keys", "ring_values", "ring_closed", "seen"):
                getattr(self, name)[row].copy_(getattr(other, name)[other_row])

    def to(self, device: torch.device | str) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for name in STORED:
                setattr(self, name, getattr(self, name).to(device))

    def nbytes(self) -> int:
        """Bytes allocated: ring, pool with its free pages, table and counters."""
        return sum(x.numel() * x.element_size() for x in (getattr(self, name) for name in STORED))

    def empty_bytes(self) -> int:
        """Of these, the keys, values and positions of places in pages that hold no token. Waits for the device."""
        pool = (self.keys, self.values, self.paged_position)
        places = len(self.keys) * self.page - int(self.count.sum())
        return places * sum(x[0, 0].numel() * x.element_size() for x in pool)


STORED = (
    "keys", "values", "paged_position", "free", "table", "count", "missed", "ring_keys", "ring_values", "ring_closed", "seen",
    "taken",
)  # fmt: skip

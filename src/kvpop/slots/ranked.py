"""The store of every policy that scores tokens: sinks, a window, and the k best of the rest by static priority."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvpop.budget import Budget
from kvpop.core.cutoff import NEVER, dropped, kernel_or_parallel
from kvpop.core.priority import static_priority
from kvpop.ops.cache_step.api import (
    Layout,
    attend_held,
    by_head,
    choose_slot,
    impl_for,
    mark_due,
    overwrite,
    pinned,
    read,
    side_by_side,
    take,
)
from kvpop.ops.cache_step.api import step as fused_step
from kvpop.ops.cache_step.fused import Weights, derive
from kvpop.ops.sparse_attention.api import chunk_impl, sparse_attention
from kvpop.scorers import Scorer
from kvpop.slots.base import EVERY, FAR, Slots, stay
from kvpop.slots.journal import Journal, Update

# Shapes: B rows, R = H * G query heads, H KV heads, M slots, n new tokens, T = M + n candidates, D head dim, E = D_k + D_v,
# P pinned spans a row, w window, N slots of all heads of a row.

FUSE = True
"""Whether stores on a GPU take the fused step (``ops.cache_step.fused``)."""

LONG_CHUNK = 4096
"""Tokens of all rows together that ``extend`` takes in at a time where a kernel attends."""

Attention = Callable[..., tuple[Tensor, Tensor]]
"""Anything with the signature of ``sparse_attention`` with positions."""


class RankedSlots(Slots):
    """For every such policy it keeps exactly the set the training mask keeps.

    Write-once while decoding: a token keeps its slot until it is overwritten, leaving the window only makes it eligible.
    ``extend`` lays the held tokens out anew, sorted by position.

    Heads may have budgets of their own (``Budget.heads``): ``keys`` and ``values`` are [B, 1, N, D] then, no larger than the
    heads' slots together, and ``layout`` says where each head's lie. Where all have the same they are [B, H, M, D].
    """

    def __init__(
        self,
        budget: Budget,
        scorer: Scorer,
        log_gamma_H: Tensor,
        decay_step: int,
        k_like: Tensor,
        v_like: Tensor,
        attention: Attention | None = None,
    ) -> None:
        rows = k_like.shape[0]
        self.attention, self.impl = attention, impl_for(k_like)
        H, D, V, device = k_like.shape[1], k_like.shape[-1], v_like.shape[-1], k_like.device
        self.budget, self.scorer, self.log_gamma, self.decay_step = budget, scorer, log_gamma_H.detach(), decay_step
        M = budget.slots
        self.layout = Layout.of([budget.sinks + budget.window + k for k in budget.longs(H)], device)
        lie = (H, M) if self.layout is None else (1, self.layout.total)
        if self.layout is not None:
            stay(self.layout.size_H, self.layout.base_H)
        wide = torch.promote_types(k_like.dtype, torch.float32)
        self.keys = torch.zeros(rows, *lie, D, dtype=k_like.dtype, device=device)
        self.values = torch.zeros(rows, *lie, V, dtype=v_like.dtype, device=device)
        self.position = torch.full((rows, H, M), -1, dtype=torch.int32, device=device)
        self.priority = torch.zeros(rows, H, M, dtype=wide, device=device)
        self.seen = torch.zeros(rows, dtype=torch.long, device=device)
        self.taken = torch.zeros((), dtype=torch.long, device=device)
        self.state = scorer.init_state(rows, device)
        self.pins: Tensor | None = None
        self.journal: Journal | None = None
        self.derived: tuple[Tensor, ...] | None = None
        if FUSE and self.impl == "triton" and attention is None:
            self._refresh(first=True)

    # The fused step looks up what it would have to search for: ``least`` and ``ring``. They follow from the rest, so they are
    # saved nowhere and made anew after all that changes the rest, but for the step itself, and rows that are emptied or copied.
    # None where the step is not fused.

    @torch.no_grad()
    def _find(self) -> tuple[Tensor, Tensor]:
        return derive(
            self.position, self.priority, self.seen,
            sinks=self.budget.sinks, window=self.budget.window, due=self.scorer.delayed, pins_BP2=self.pins,
        )  # fmt: skip

    def _refresh(self, first: bool = False) -> None:
        if self.derived is None and not first:
            return
        found = self._find()
        if self.derived is None or [(x.shape, x.device) for x in found] != [(x.shape, x.device) for x in self.derived]:
            with torch.inference_mode(False):
                self.derived = tuple(torch.zeros_like(x) for x in found)
            stay(*self.derived)
        for kept, fresh in zip(self.derived, found):  # in place, like all that the store keeps
            kept.copy_(fresh)

    def tensors(self) -> dict[str, Tensor]:
        own = {**super().tensors(), "priority": self.priority}
        if self.pins is not None:
            own["pins"] = self.pins
        return own | {f"state.{i}": x for i, x in enumerate(self.state)}

    def replace(self, tensors: dict[str, Tensor]) -> None:
        tensors = dict(tensors)
        self.state = tuple(tensors.pop(f"state.{i}") for i in range(len(self.state)))
        super().replace(tensors)
        self.log_gamma = self.log_gamma.to(self.seen.device)
        if self.layout is not None and self.layout.size_H.device != self.seen.device:
            self.layout = self.layout.to(self.seen.device)
        self._refresh()

    def select(self, rows_n: Tensor) -> None:
        super().select(rows_n)
        self._refresh()
        if self.journal is not None:
            self.journal.map(lambda x: x.index_select(0, rows_n.to(x.device)))

    def clear(self, rows: slice = EVERY) -> None:
        super().clear(rows)
        with torch.inference_mode(False), torch.no_grad():
            for x, fresh in zip(self.state, self.scorer.init_state(1, self.seen.device)):
                x[rows] = fresh
            for x in self.derived or ():
                x[rows] = -1  # an empty row has neither
        self._forget()

    def put(self, row: int, other: Slots, other_row: int = 0) -> None:
        assert isinstance(other, RankedSlots)
        if other.pins is not None:
            self._room_for_pins(other.pins.shape[1])
        if self.pins is not None:
            other._room_for_pins(self.pins.shape[1])
        super().put(row, other, other_row)
        if self.derived is not None and other.derived is not None:
            with torch.inference_mode(False), torch.no_grad():
                for own, theirs in zip(self.derived, other.derived):
                    own[row].copy_(theirs[other_row])
        else:
            self._refresh()
        self._forget()

    def to(self, device: torch.device | str) -> None:
        super().to(device)
        if self.journal is not None:
            self.journal.map(lambda x: x.to(device))

    def nbytes(self) -> int:
        derived = sum(x.numel() * x.element_size() for x in self.derived or ())
        derived += 0 if self.layout is None else self.layout.nbytes()
        return super().nbytes() + derived + (0 if self.journal is None else self.journal.nbytes())

    # Pinned tokens: a table of spans, so that what is pinned depends on nothing but its position.

    def _room_for_pins(self, spans: int) -> None:
        have = 0 if self.pins is None else self.pins.shape[1]
        if spans > have:
            with torch.inference_mode(False), torch.no_grad():
                grown = torch.zeros(len(self.seen), spans, 2, dtype=torch.long, device=self.seen.device)
                if self.pins is not None:
                    grown[:, :have] = self.pins
                self.pins = grown

    def pin(self, spans_BP2: Tensor) -> None:
        with torch.inference_mode(False):
            self.pins = None
            self._room_for_pins(spans_BP2.shape[1])
            if self.pins is not None:
                self.pins.copy_(spans_BP2)
        self._refresh()

    # Scores, decoding, prefill.

    @torch.no_grad()
    def _score(self, x_new: Tensor, x_due: Tensor, position: Tensor, valid: Tensor | None) -> Tensor:
        score, state = self.scorer.advance(self.state, x_new, x_due, valid)
        for kept, fresh in zip(self.state, state):  # written in place: the store's memory never moves
            kept.copy_(fresh)
        return static_priority(score.to(self.priority.dtype), position, self.log_gamma, self.decay_step)

    def step(self, q_BR1D: Tensor, k_BH1D: Tensor, v_BH1D: Tensor, valid_B: Tensor | None, scale: float) -> Tensor:
        """Append, update the scorer, score t = q - w, evict, attend (the order of the method)."""
        if self.derived is not None:
            return self._fused(q_BR1D, k_BH1D, v_BH1D, valid_B, scale, *self.derived)
        s, w, now_B11 = self.budget.sinks, self.budget.window, self.seen[:, None, None]
        valid_B1 = None if valid_B is None else valid_B[:, None]
        x_new = torch.cat([k_BH1D, v_BH1D], dim=-1)
        state = () if self.journal is None else tuple(x.clone() for x in self.state)
        if self.scorer.delayed:
            due = (self.position == now_B11 - w).int().argmax(-1, keepdim=True)
            x_due = torch.cat([read(self.keys, due, self.layout), read(self.values, due, self.layout)], dim=-1)
            fresh = self._score(x_new, x_due, now_B11 - w, valid_B1)
        else:
            fresh = self._score(x_new, x_new, now_B11.expand(-1, x_new.shape[1], -1), valid_B1)
        if self.journal is not None:
            if self.scorer.delayed:
                mark_due(self.priority, self.position, fresh, self.seen, w, valid_B)
            slot = choose_slot(self.position, self.priority, self.seen, s, w, self.pins, self.layout)
            lost = {name: read(x, slot, self.layout) for name, x in (("keys", self.keys), ("values", self.values))}
            lost |= {name: take(x, slot) for name, x in (("position", self.position), ("priority", self.priority))}
            if valid_B is not None:
                lost["position"] = lost["position"].masked_fill(~valid_B[:, None, None], -1)
            self.journal.add(Update(k_BH1D, v_BH1D, self.seen.clone(), state, lost, valid_B1))
        overwrite(
            self.keys, self.values, self.position, self.priority, k_BH1D, v_BH1D, fresh, self.seen,
            sinks=s, window=w, due=self.scorer.delayed, valid_B=valid_B, pins_BP2=self.pins,
            layout=self.layout, impl=self.impl,
        )  # fmt: skip
        if self.attention is None:
            out = attend_held(q_BR1D, self.keys, self.values, self.position, scale, self.impl, self.layout)
        else:
            expiry = torch.where(self.position >= 0, NEVER, 0)
            keys, values = by_head(self.keys, self.layout), by_head(self.values, self.layout)
            out, _ = self.attention(
                q_BR1D, keys, values, expiry, scale=scale, q_pos_BQ=now_B11[:, 0], k_pos_BHT=self.position
            )
        self.seen += 1 if valid_B is None else valid_B
        return out

    def _fused(
        self, q: Tensor, k: Tensor, v: Tensor, valid_B: Tensor | None, scale: float, least: Tensor, ring: Tensor
    ) -> Tensor:
        """The same step in few launches, the scorer included if its weights are known."""
        b, due, now_B11 = self.budget, self.scorer.delayed, self.seen[:, None, None]
        scorer: Weights | Tensor | None = self.scorer.step_weights()
        if scorer is None:
            x_new = x_due = torch.cat([k, v], dim=-1)
            if due:
                slot = ring.gather(2, (now_B11 % b.window).expand(-1, k.shape[1], -1)).clamp(min=0).long()
                x_due = torch.cat([read(self.keys, slot, self.layout), read(self.values, slot, self.layout)], dim=-1)
            position = (now_B11 - b.window if due else now_B11).expand(-1, k.shape[1], -1)
            scorer = self._score(x_new, x_due, position, None if valid_B is None else valid_B[:, None])
        return fused_step(
            q, k, v, self.keys, self.values, self.position, self.priority, self.seen, least, ring,
            scorer, self.state, self.log_gamma,
            decay_step=self.decay_step, sinks=b.sinks, window=b.window, due=due, scale=scale,
            valid_B=valid_B, pins_BP2=self.pins, layout=self.layout, impl="triton",
        )  # fmt: skip

    def at_once(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor) -> int:
        """More where a kernel attends, which writes no logits: most of a chunk's time is that of launches."""
        if self.attention is not None or chunk_impl(q_BRnD, k_BHnD, v_BHnD) != "triton":
            return self.chunk
        return max(self.chunk, LONG_CHUNK // len(q_BRnD))

    def extend(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor, count_B: Tensor, scale: float) -> Tensor:
        """Each new query sees its own retained set: held and new tokens form one sequence of arrivals."""
        w, M = self.budget.window, self.budget.slots
        B, H, n, _ = k_BHnD.shape
        state = () if self.journal is None else tuple(x.clone() for x in self.state)
        offset_n = torch.arange(n, device=k_BHnD.device)
        valid_Bn = offset_n < count_B[:, None]
        now_Bn = torch.where(valid_Bn, self.seen[:, None] + offset_n, FAR)
        # Candidates by position: held tokens, then new ones, then empty slots and padding.
        position_BHT = torch.cat(
            [self.position.long().where(self.position >= 0, FAR), now_Bn[:, None].expand(B, H, n)], 2
        )
        order_BHT = position_BHT.argsort(dim=-1, stable=True)
        position_BHT = take(position_BHT, order_BHT)
        k_BHTD = take(torch.cat([by_head(self.keys, self.layout), k_BHnD], 2), order_BHT)
        v_BHTD = take(torch.cat([by_head(self.values, self.layout), v_BHnD], 2), order_BHT)
        priority_BHT = take(torch.cat([self.priority, self.priority.new_zeros(B, H, n)], 2), order_BHT)
        # Score what becomes due: the i-th new token makes the token w before it due (or itself, when not delayed).
        lag = w if self.scorer.delayed else 0
        size = M if self.layout is None else self.layout.size_H[:, None]
        due_BHn = (self.seen[:, None, None].clamp(max=size) + offset_n - lag).expand(B, H, n)
        landed = valid_Bn[:, None] & (due_BHn >= 0)
        due_BHn = due_BHn.clamp(min=0)
        x_new = torch.cat([k_BHnD, v_BHnD], dim=-1)
        x_due = torch.cat([take(k_BHTD, due_BHn), take(v_BHTD, due_BHn)], dim=-1) if lag else x_new
        fresh_BHn = self._score(x_new, x_due, (now_Bn - lag)[:, None], valid_Bn)
        spare = priority_BHT.shape[-1]  # scores of nothing real land behind the end
        priority_BHT = torch.cat([priority_BHT, priority_BHT[..., :1]], -1)
        priority_BHT = priority_BHT.scatter(2, due_BHn.where(landed, spare), fresh_BHn)[..., :spare]
        expiry_BHT = self._expiry(priority_BHT, position_BHT)
        attention = self.attention or partial(sparse_attention, impl=chunk_impl(q_BRnD, k_BHTD, v_BHTD))
        out, _ = attention(q_BRnD, k_BHTD, v_BHTD, expiry_BHT, scale=scale, q_pos_BQ=now_Bn, k_pos_BHT=position_BHT)
        last_B11 = (self.seen + count_B - 1)[:, None, None]
        survives = (position_BHT <= last_B11) & (expiry_BHT > last_B11)
        if self.journal is not None:
            gone = (position_BHT < self.seen[:, None, None]) & ~survives
            where = (~gone).int().argsort(dim=-1, stable=True)[..., :n]
            lost = {"keys": k_BHTD, "values": v_BHTD, "position": position_BHT.int(), "priority": priority_BHT}
            lost = {name: take(x, where) for name, x in lost.items()}
            lost["position"] = lost["position"].where(take(gone, where), -1)
            self.journal.add(Update(k_BHnD, v_BHnD, self.seen.clone(), state, lost))
        keep_BHM = (~survives).int().argsort(dim=-1, stable=True)[..., :M]
        self.keys.copy_(side_by_side(take(k_BHTD, keep_BHM), self.layout))
        self.values.copy_(side_by_side(take(v_BHTD, keep_BHM), self.layout))
        self.position.copy_(take(position_BHT, keep_BHM).where(take(survives, keep_BHM), -1))
        self.priority.copy_(take(priority_BHT, keep_BHM))
        self.seen += count_B
        self._refresh()
        return out

    def _expiry(self, priority_BHT: Tensor, position_BHT: Tensor) -> Tensor:
        """Expiry of every candidate, candidates sorted by position: the running top-k picks up where it stands.

        Tokens already ranked arrive first; there are at most k of them in a head, so nothing is dropped before the first
        new arrival. Tokens that are not yet due arrive last: what they drop, they drop after this chunk.
        """
        s, w = self.budget.sinks, self.budget.window
        expiry_BHT = torch.full_like(position_BHT, NEVER)
        marks = None if self.pins is None else pinned(position_BHT[..., s:], self.pins)
        k, impl = self.budget.heads or self.budget.long, kernel_or_parallel(priority_BHT)
        leaves_BHA = dropped(priority_BHT[..., s:], k, impl, marks)
        A = leaves_BHA.shape[-1]
        dropped_by = take(position_BHT[..., s:], leaves_BHA.clamp(max=A - 1)) + w
        expiry_BHT[..., s:] = torch.where(leaves_BHA < A, dropped_by, NEVER)
        return expiry_BHT

    # Taking tokens back.

    def record(self, reach: int) -> None:
        if not 1 <= reach <= self.chunk:
            raise ValueError(f"rollback must be between 1 and {self.chunk} tokens, got {reach}")
        self.reach, self.journal = reach, Journal(reach)
        self.derived = None  # a step that is recorded is not fused

    def _forget(self) -> None:
        if self.journal is not None:
            self.journal.updates.clear()

    def _several(self, q: Tensor, k: Tensor, v: Tensor, valid_Bn: Tensor | None, scale: float) -> Tensor:
        out = super()._several(q, k, v, valid_Bn, scale)
        if self.journal is not None:
            self.journal.updates[-1].valid_Bn = valid_Bn
        return out

    @property
    def undoable(self) -> int:
        return 0 if self.journal is None else self.journal.tokens

    @torch.no_grad()
    def crop(self, tokens: int) -> None:
        assert 0 <= tokens <= self.undoable
        self.taken -= tokens
        while tokens > 0:
            assert self.journal is not None
            update = self.journal.updates.pop()
            self._undo(update)
            kept = update.tokens - tokens
            if kept > 0:
                k, v = update.keys[:, :, :kept], update.values[:, :, :kept]
                valid = None if update.valid_Bn is None else update.valid_Bn[:, :kept]
                count_B = torch.full_like(self.seen, kept) if valid is None else valid.sum(-1)
                self.extend(torch.zeros_like(k), k, v, count_B, 1.0)  # nobody reads what these queries attend to
                self.journal.updates[-1].valid_Bn = valid
            tokens -= update.tokens

    def _undo(self, update: Update) -> None:
        """What was held before: what is still here of it, and what was driven out. Laid out by position.

        The priorities of tokens that were not due before are not restored: they are not read until they are set again.
        """
        kept = {name: getattr(self, name) for name in update.lost}
        kept |= {name: by_head(kept[name], self.layout) for name in ("keys", "values")}
        both = {name: torch.cat([kept[name], lost], 2) for name, lost in update.lost.items()}
        position = both["position"]
        there = (position >= 0) & (position < update.seen_B[:, None, None])
        order = position.where(there, NEVER).argsort(dim=-1, stable=True)[..., : self.budget.slots]
        both["position"] = position.where(there, -1)
        for name, x in both.items():
            before = take(x, order)
            getattr(self, name).copy_(side_by_side(before, self.layout) if name in ("keys", "values") else before)
        self.seen.copy_(update.seen_B)
        for part, before in zip(self.state, update.state):
            part.copy_(before)

"""The bounded store of one layer: a fixed number of slots per KV head, filled and overwritten in place.

Pure torch, no transformers: an engine adapter needs nothing else. A store attends to what it holds and decides what it
drops; ``step`` is decoding (one token a row), ``extend`` is prefill by chunks of any size. For every policy that ranks tokens
both keep exactly the set the training mask keeps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from kvpop.budget import Budget
from kvpop.core.cutoff import departures, ranks, running_cutoff
from kvpop.core.priority import static_priority
from kvpop.ops.sparse_attention.api import NEVER, sparse_attention
from kvpop.scorers import Scorer

# Shapes: B rows, R = H * G query heads, H KV heads, M slots, n new tokens, T = M + n candidates, D head dim, E = D_k + D_v.

FAR = 2**30
"""The position given to empty slots and padding: after everything real, far from overflow."""

Attention = Callable[..., tuple[Tensor, Tensor]]
"""Anything with the signature of ``sparse_attention`` with positions."""

CHUNK = 512
"""Longest piece of a prompt worked on at once; the result does not depend on it."""


def take(x_BHTX: Tensor, index_BHn: Tensor) -> Tensor:
    """Gather along dim 2 for [B, H, T] and [B, H, T, X]."""
    if x_BHTX.ndim == 3:
        return x_BHTX.gather(2, index_BHn)
    return x_BHTX.gather(2, index_BHn[..., None].expand(*index_BHn.shape, x_BHTX.shape[-1]))


def least(value_BHT: Tensor, position_BHT: Tensor, among_BHT: Tensor) -> Tensor:
    """Index of the least (value, position) pair where ``among`` holds: the older of equals. NaN counts as -inf."""
    value = torch.nan_to_num(value_BHT, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    lowest = value.masked_fill(~among_BHT, torch.inf).amin(-1, keepdim=True)
    return position_BHT.masked_fill(~(among_BHT & (value == lowest)), NEVER).argmin(-1)


class Slots(ABC):
    """What every store has: keys, values and the position of what each slot holds (-1: empty), and tokens seen a row."""

    keys: Tensor
    values: Tensor
    position: Tensor
    seen: Tensor
    tokens: int = 0
    """Tokens taken in by every row, padding included: what transformers calls the length of a cache."""

    @torch.no_grad()
    def attend(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor, valid_Bn: Tensor | None, scale: float) -> Tensor:
        """Take in n tokens a row and return what their queries attend to, [B, R, n, D_v].

        ``valid_Bn`` is False on padding, anywhere in the row: padding is never held or counted, and gets zeros. Carries no
        gradient: training runs on whole sequences.
        """
        self.tokens += q_BRnD.shape[2]
        if valid_Bn is not None and bool(valid_Bn.all()):
            valid_Bn = None
        if valid_Bn is None and q_BRnD.shape[2] == 1:
            return self.step(q_BRnD, k_BHnD, v_BHnD, scale)
        order = None
        if valid_Bn is not None:  # real tokens first, in order; padding behind them
            order = (~valid_Bn).long().argsort(dim=-1, stable=True)
            q_BRnD, k_BHnD, v_BHnD = (
                take(x, order[:, None].expand(-1, x.shape[1], -1)) for x in (q_BRnD, k_BHnD, v_BHnD)
            )
            valid_Bn = valid_Bn.gather(1, order)
        pieces = []
        for start in range(0, q_BRnD.shape[2], self.chunk):
            part = slice(start, start + self.chunk)
            count_B = (
                self.seen.new_full(self.seen.shape, min(self.chunk, q_BRnD.shape[2] - start))
                if valid_Bn is None
                else valid_Bn[:, part].sum(-1)
            )
            pieces.append(self.extend(q_BRnD[:, :, part], k_BHnD[:, :, part], v_BHnD[:, :, part], count_B, scale))
        out_BRnD = torch.cat(pieces, dim=2)
        if order is None or valid_Bn is None:
            return out_BRnD
        out_BRnD = out_BRnD.masked_fill(~valid_Bn[:, None, :, None], 0.0)
        return take(out_BRnD, order.argsort(-1)[:, None].expand(-1, out_BRnD.shape[1], -1))

    chunk: int = CHUNK

    @abstractmethod
    def extend(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor, count_B: Tensor, scale: float) -> Tensor:
        """Take in the first ``count_B`` of n tokens a row; queries past the count return anything finite."""

    def step(self, q_BR1D: Tensor, k_BH1D: Tensor, v_BH1D: Tensor, scale: float) -> Tensor:
        """Take in one token for every row."""
        return self.extend(q_BR1D, k_BH1D, v_BH1D, torch.ones_like(self.seen), scale)

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Everything the store keeps, rows along dim 0."""

    @abstractmethod
    def replace(self, tensors: list[Tensor]) -> None:
        """Put back a list as ``tensors`` returned it, perhaps with other rows."""

    def select(self, rows: Tensor) -> None:
        """Keep, reorder or repeat rows: every tensor moves together."""
        with torch.inference_mode(False), torch.no_grad():
            self.replace([x.index_select(0, rows.to(x.device)) for x in self.tensors()])

    def nbytes(self) -> int:
        """Bytes of everything the store keeps."""
        return sum(x.numel() * x.element_size() for x in self.tensors())

    def held(self) -> list[list[list[int]]]:
        """Positions held, sorted, per row and KV head (moves to the CPU: for reports and tests)."""
        return [[sorted(p for p in head if p >= 0) for head in row] for row in self.position.tolist()]


class RankedSlots(Slots):
    """Sinks, a window, and the k best of the rest by static priority: every policy that scores tokens.

    Write-once while decoding: a token keeps its slot until it is overwritten, leaving the window only makes it eligible.
    ``extend`` lays the held tokens out anew, sorted by position.
    """

    def __init__(
        self,
        budget: Budget,
        scorer: Scorer,
        log_gamma_H: Tensor,
        decay_step: int,
        k_like: Tensor,
        v_like: Tensor,
        attention: Attention = sparse_attention,
    ) -> None:
        rows = k_like.shape[0]
        self.attention = attention
        H, D, V, device = k_like.shape[1], k_like.shape[-1], v_like.shape[-1], k_like.device
        self.budget, self.scorer, self.log_gamma, self.decay_step = budget, scorer, log_gamma_H.detach(), decay_step
        M = budget.slots
        wide = torch.promote_types(k_like.dtype, torch.float32)
        self.keys = torch.zeros(rows, H, M, D, dtype=k_like.dtype, device=device)
        self.values = torch.zeros(rows, H, M, V, dtype=v_like.dtype, device=device)
        self.position = torch.full((rows, H, M), -1, dtype=torch.int32, device=device)
        self.priority = torch.zeros(rows, H, M, dtype=wide, device=device)
        self.seen = torch.zeros(rows, dtype=torch.long, device=device)
        self.state = scorer.init_state(rows, device)

    def tensors(self) -> list[Tensor]:
        return [self.keys, self.values, self.position, self.priority, self.seen, *self.state]

    def replace(self, tensors: list[Tensor]) -> None:
        self.keys, self.values, self.position, self.priority, self.seen, *state = tensors
        self.state = tuple(state)

    @torch.no_grad()
    def _score(self, x_new: Tensor, x_due: Tensor, position: Tensor, valid: Tensor | None) -> Tensor:
        score, state = self.scorer.advance(self.state, x_new, x_due, valid)
        if len(state):  # written in place: the store's memory never moves
            for kept, fresh in zip(self.state, state):
                kept.copy_(fresh)
        return static_priority(score.to(self.priority.dtype), position, self.log_gamma, self.decay_step)

    def step(self, q_BR1D: Tensor, k_BH1D: Tensor, v_BH1D: Tensor, scale: float) -> Tensor:
        """Append, update the scorer, score t = q - w, evict, attend (the order of the method)."""
        s, w, M = self.budget.sinks, self.budget.window, self.budget.slots
        now_B11 = self.seen[:, None, None].clone()  # ``seen`` is counted up below
        x_new = torch.cat([k_BH1D, v_BH1D], dim=-1)
        if self.scorer.delayed:
            is_due = self.position == now_B11 - w
            due = is_due.int().argmax(-1, keepdim=True)
            x_due = torch.cat([take(self.keys, due), take(self.values, due)], dim=-1)
            self.priority.copy_(torch.where(is_due, self._score(x_new, x_due, now_B11 - w, None), self.priority))
            fresh = torch.zeros_like(self.priority[..., :1])
        else:
            fresh = self._score(x_new, x_new, now_B11.expand(-1, x_new.shape[1], -1), None)
        eligible = (self.position >= s) & (self.position <= now_B11 - w)
        victim = least(self.priority, self.position, eligible)[..., None]
        slot = torch.where(now_B11 >= M, victim, now_B11.clamp(max=M - 1))
        wide_slot = slot[..., None]
        self.keys.scatter_(2, wide_slot.expand_as(k_BH1D), k_BH1D)
        self.values.scatter_(2, wide_slot.expand_as(v_BH1D), v_BH1D)
        self.position.scatter_(2, slot, now_B11.expand_as(slot).int())
        self.priority.scatter_(2, slot, fresh)
        self.seen += 1
        return self._attend(q_BR1D, self.keys, self.values, self.position, now_B11[:, 0], scale)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, q_pos: Tensor, scale: float) -> Tensor:
        expiry = torch.where(position >= 0, NEVER, 0)
        return self.attention(q, k, v, expiry, scale=scale, q_pos_BQ=q_pos, k_pos_BHT=position)[0]

    def extend(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor, count_B: Tensor, scale: float) -> Tensor:
        """Each new query sees its own retained set: held and new tokens form one sequence of arrivals."""
        w, M = self.budget.window, self.budget.slots
        B, H, n, _ = k_BHnD.shape
        offset_n = torch.arange(n, device=k_BHnD.device)
        valid_Bn = offset_n < count_B[:, None]
        now_Bn = torch.where(valid_Bn, self.seen[:, None] + offset_n, FAR)
        # Candidates by position: held tokens, then new ones, then empty slots and padding.
        position_BHT = torch.cat(
            [self.position.long().where(self.position >= 0, FAR), now_Bn[:, None].expand(B, H, n)], 2
        )
        order_BHT = position_BHT.argsort(dim=-1, stable=True)
        position_BHT = take(position_BHT, order_BHT)
        k_BHTD = take(torch.cat([self.keys, k_BHnD], 2), order_BHT)
        v_BHTD = take(torch.cat([self.values, v_BHnD], 2), order_BHT)
        priority_BHT = take(torch.cat([self.priority, self.priority.new_zeros(B, H, n)], 2), order_BHT)
        # Score what becomes due: the i-th new token makes the token w before it due (or itself, when not delayed).
        lag = w if self.scorer.delayed else 0
        due_Bn = self.seen.clamp(max=M)[:, None] + offset_n - lag
        due_BHn = due_Bn.clamp(min=0)[:, None].expand(B, H, n)
        x_new = torch.cat([k_BHnD, v_BHnD], dim=-1)
        x_due = torch.cat([take(k_BHTD, due_BHn), take(v_BHTD, due_BHn)], dim=-1) if lag else x_new
        fresh_BHn = self._score(x_new, x_due, (now_Bn - lag)[:, None], valid_Bn)
        landed = (valid_Bn & (due_Bn >= 0))[:, None].expand(B, H, n)
        spare = priority_BHT.shape[-1]  # scores of nothing real land behind the end
        priority_BHT = torch.cat([priority_BHT, priority_BHT[..., :1]], -1)
        priority_BHT = priority_BHT.scatter(2, due_BHn.where(landed, spare), fresh_BHn)[..., :spare]
        expiry_BHT = self._expiry(priority_BHT, position_BHT)
        out, _ = self.attention(
            q_BRnD, k_BHTD, v_BHTD, expiry_BHT, scale=scale, q_pos_BQ=now_Bn, k_pos_BHT=position_BHT
        )
        last_B11 = (self.seen + count_B - 1)[:, None, None]
        survives = (position_BHT <= last_B11) & (expiry_BHT > last_B11)
        keep_BHM = (~survives).int().argsort(dim=-1, stable=True)[..., :M]
        self.keys.copy_(take(k_BHTD, keep_BHM))
        self.values.copy_(take(v_BHTD, keep_BHM))
        self.position.copy_(take(position_BHT, keep_BHM).where(take(survives, keep_BHM), -1))
        self.priority.copy_(take(priority_BHT, keep_BHM))
        self.seen += count_B
        return out

    def _expiry(self, priority_BHT: Tensor, position_BHT: Tensor) -> Tensor:
        """Expiry of every candidate, candidates sorted by position: the running top-k picks up where it stands.

        Tokens already ranked arrive first; there are at most k of them, so nothing is dropped before the first new
        arrival. Tokens that are not yet due arrive last: what they drop, they drop after this chunk.
        """
        s, w = self.budget.sinks, self.budget.window
        expiry_BHT = torch.full_like(position_BHT, NEVER)
        rank_BHA = ranks(priority_BHT[..., s:])
        A = rank_BHA.shape[-1]
        leaves_BHA = departures(rank_BHA, running_cutoff(rank_BHA, self.budget.long))
        dropped_by = take(position_BHT[..., s:], leaves_BHA.clamp(max=A - 1)) + w
        expiry_BHT[..., s:] = torch.where(leaves_BHA < A, dropped_by, NEVER)
        return expiry_BHT


class AttendedSlots(Slots):
    """TOVA: attend to everything held, then keep the B tokens that the last query's heads attended to most, on average.

    One set per layer; no sinks, no protected window. A chunk attends to all it finds, then is reduced once: prefill
    depends on where chunks end, by definition of the policy.
    """

    chunk = FAR

    def __init__(self, slots: int, k_like: Tensor, v_like: Tensor) -> None:
        (rows, H), device = k_like.shape[:2], k_like.device
        self.slots = slots
        self.keys = torch.zeros(rows, H, slots, k_like.shape[-1], dtype=k_like.dtype, device=device)
        self.values = torch.zeros(rows, H, slots, v_like.shape[-1], dtype=v_like.dtype, device=device)
        self.position = torch.full((rows, H, slots), -1, dtype=torch.int32, device=device)
        self.seen = torch.zeros(rows, dtype=torch.long, device=device)

    def tensors(self) -> list[Tensor]:
        return [self.keys, self.values, self.position, self.seen]

    def replace(self, tensors: list[Tensor]) -> None:
        self.keys, self.values, self.position, self.seen = tensors

    def step(self, q_BR1D: Tensor, k_BH1D: Tensor, v_BH1D: Tensor, scale: float) -> Tensor:
        """Attend to the held tokens and the new one, then drop the least attended of them all; slots stay in place."""
        B, H, M, D = self.keys.shape
        wide = torch.promote_types(q_BR1D.dtype, torch.float32)
        q_BHGD = q_BR1D.to(wide).mul(scale).view(B, H, -1, D)
        keys, new_key = self.keys.to(wide), k_BH1D.to(wide)
        held_BM = self.position[:, 0] >= 0
        logits = torch.cat([q_BHGD @ keys.transpose(-1, -2), q_BHGD @ new_key.transpose(-1, -2)], dim=-1)
        logits[..., :M].masked_fill_(~held_BM[:, None, None], -torch.inf)
        weight_BHGT = logits.softmax(-1)
        out = weight_BHGT[..., :M] @ self.values.to(wide) + weight_BHGT[..., M:] @ v_BH1D.to(wide)
        now_B1 = self.seen[:, None].clone()
        position_BT = torch.cat([self.position[:, 0], now_B1.int()], dim=-1)
        victim_B1 = least(weight_BHGT.mean((1, 2)), position_BT, torch.ones_like(position_BT, dtype=torch.bool))[
            :, None
        ]
        slot_B1 = torch.where(now_B1 < M, now_B1, victim_B1)
        stored_B1 = slot_B1 < M  # a new token that is itself the least attended is not stored
        index_BH1 = slot_B1.clamp(max=M - 1)[:, None].expand(B, H, 1)
        for kept, new in ((self.keys, k_BH1D), (self.values, v_BH1D)):
            kept.scatter_(
                2,
                index_BH1[..., None].expand_as(new),
                torch.where(stored_B1[..., None, None], new, take(kept, index_BH1)),
            )
        new_position = now_B1[:, None].expand(B, H, 1).int()
        self.position.scatter_(
            2, index_BH1, torch.where(stored_B1[:, None], new_position, take(self.position, index_BH1))
        )
        self.seen += 1
        return out.view(q_BR1D.shape[:3] + out.shape[-1:]).to(q_BR1D.dtype)

    def extend(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor, count_B: Tensor, scale: float) -> Tensor:
        B, H, n, D = k_BHnD.shape
        offset_n = torch.arange(n, device=k_BHnD.device)
        now_Bn = torch.where(offset_n < count_B[:, None], self.seen[:, None] + offset_n, FAR)
        position = torch.cat([self.position.long().where(self.position >= 0, FAR), now_Bn[:, None].expand(B, H, n)], 2)
        keys, values = torch.cat([self.keys, k_BHnD], 2), torch.cat([self.values, v_BHnD], 2)
        expiry = torch.where(position < FAR, NEVER, 0)
        out, lse_BRn = sparse_attention(q_BRnD, keys, values, expiry, scale=scale, q_pos_BQ=now_Bn, k_pos_BHT=position)
        last_B = (count_B - 1).clamp(min=0)[:, None, None]
        q_BRD = q_BRnD.gather(2, last_B[..., None].expand(B, q_BRnD.shape[1], 1, D))[:, :, 0]
        lse_BR = lse_BRn.gather(2, last_B.expand(B, q_BRnD.shape[1], 1))
        logits = (keys.to(lse_BR.dtype) @ q_BRD.to(lse_BR.dtype).view(B, H, -1, D).transpose(-1, -2)) * scale
        weight_BT = (
            (logits - lse_BR.view(B, H, 1, -1)).exp().mean((1, 3)).masked_fill(position[:, 0] >= FAR, -torch.inf)
        )
        # Best B by (weight, position), then by position; a row without new tokens keeps what it holds.
        by_position = position[:, 0].argsort(dim=-1, stable=True)
        rank_BT = torch.empty_like(by_position).scatter_(-1, by_position, ranks(weight_BT.gather(-1, by_position)))
        held = (position[:, 0] < FAR).sum(-1, keepdim=True)
        stays = rank_BT >= position.shape[-1] - held.clamp(max=self.slots)
        stays = torch.where(count_B[:, None] > 0, stays, position[:, 0] < FAR)
        chosen = position[:, 0].masked_fill(~stays, FAR).argsort(dim=-1, stable=True)[:, : self.slots]
        index = chosen[:, None].expand(B, H, -1)
        self.keys.copy_(take(keys, index))
        self.values.copy_(take(values, index))
        self.position.copy_(take(position, index).where(take(stays[:, None].expand(B, H, -1), index), -1))
        self.seen += count_B
        return out


class GrowingSlots(Slots):
    """Dense attention: everything is kept and memory grows with every token. Padding takes space but is never seen."""

    chunk = FAR

    def __init__(self, k_like: Tensor, v_like: Tensor) -> None:
        rows = k_like.shape[0]
        self.keys, self.values = k_like[:, :, :0], v_like[:, :, :0]
        self.position = torch.zeros(rows, k_like.shape[1], 0, dtype=torch.int32, device=k_like.device)
        self.seen = torch.zeros(rows, dtype=torch.long, device=k_like.device)

    def tensors(self) -> list[Tensor]:
        return [self.keys, self.values, self.position, self.seen]

    def replace(self, tensors: list[Tensor]) -> None:
        self.keys, self.values, self.position, self.seen = tensors

    def extend(self, q_BRnD: Tensor, k_BHnD: Tensor, v_BHnD: Tensor, count_B: Tensor, scale: float) -> Tensor:
        B, H, n, _ = k_BHnD.shape
        offset_n = torch.arange(n, device=k_BHnD.device)
        now_Bn = torch.where(offset_n < count_B[:, None], self.seen[:, None] + offset_n, -1)
        self.keys, self.values = torch.cat([self.keys, k_BHnD], 2), torch.cat([self.values, v_BHnD], 2)
        self.position = torch.cat([self.position, now_Bn[:, None].expand(B, H, n).int()], 2)
        self.seen += count_B
        expiry = torch.where(self.position >= 0, NEVER, 0)
        return sparse_attention(
            q_BRnD, self.keys, self.values, expiry, scale=scale, q_pos_BQ=now_Bn, k_pos_BHT=self.position
        )[0]

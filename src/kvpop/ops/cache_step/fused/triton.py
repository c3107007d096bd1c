"""The whole step, scorer included: score, and beside it attend over splits of the slots; then decide, write and merge.

The scorer needs more registers than attention, which needs many programs on a multiprocessor to keep the memory busy: so they
are launches of their own, that run at the same time: on two streams, or, where programs are few, on one, each launch starting
early and waiting for the one before it when it must.

Nobody has to look for the victim first. The token that goes is one of two: the worst of those ranked before (``least``) or the
one that leaves the window now, whose score is made in this very step. Attention leaves both out of its sums, and the worst of
all others is found for the next step; the last launch adds back the one that stays. Nothing is asked of the host.

What the last launch both reads and writes would be a race between its programs. So the one before copies all that decides into
scratch ("notes"), and the last reads keys and values only where nothing is written.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvpop.ops.cache_step.api import Layout
from kvpop.ops.cache_step.fused import Weights
from kvpop.ops.cache_step.triton import _absorb, _highest, _merged
from kvpop.ops.few_rows.triton import _silu, overlaps
from kvpop.ops.mlstm.api import SMALLEST_NORMALISER

# Shapes: B rows, H KV heads, G query heads per KV head, M slots, D key dim, V value dim, E = D + V, P pinned spans, S splits,
# A value channels of the memory (its features are 2 A), N hidden units of the MLP in parts of UNITS. Slot m of a head has its
# position at head * M + m, its key and value at base + m: the same place, unless heads have different sizes (``Layout``).

PROGRAMS = 660
"""Programs of the attention that run at a time, heads of 128 channels: five per multiprocessor of an H100 or H200, where they
are compiled to 96 registers; four where to more."""
FEW_HEADS = 132
"""Heads, up to which a third more programs are started: shorter splits end more evenly, while no head has fewer than four."""
LEAST = 2
"""Blocks of a split, at least: to start a program, and to merge what it made, costs as much as a block."""
BLOCK = 64
"""Slots that one program loads at once."""
STAGES = 2
"""Blocks of slots that are under way at a time."""
WARPS = 4
SCORE_WARPS = 4
"""Of a program that scores; the others have ``WARPS``."""
SEARCH = 4096
"""Slots among which one program finds the worst."""
UNITS = 64
"""Hidden units of the MLP that one program computes."""
CHANNELS = 256
"""Channels of x that a scorer's program multiplies at once: few rounds, since each one waits for its weights."""
CROWD = 132
"""Programs of scorers, of which more are a crowd, no longer one a multiprocessor. They come after those that attend, and take
up what these leave free: a multiprocessor whose programs need little shared memory has none for others until they end. What a
memory multiplies x with is then read once for many rows (``_project``), not once for each."""
CROWD_CHANNELS = 128
CROWD_COLUMNS = 16
"""Columns of the memory that a program of a crowd updates at once: it finds room beside four that attend."""
TOGETHER = 32
"""Rows whose x one program multiplies."""
CHAIN = 32
"""Programs of scorers, or heads, up to which each launch starts while the one before it still runs (programmatic dependent
launch, on Hopper), all on one stream. More of them would only be in each other's way."""
NOTES = tl.constexpr(4)
"""Per head: the token's position, the slot and the position of the worst ranked before, the slot of the token that is due."""
NONE = tl.constexpr(2147483647)
"""The position of no candidate."""
SMALLEST = tl.constexpr(SMALLEST_NORMALISER)
"""A readout whose normaliser is not above this is 0."""


@triton.jit
def _before(value, position, other_value, other_position):
    """Whether a candidate is dropped before another one."""
    return (value < other_value) | ((value == other_value) & (position < other_position))


@triton.jit
def _as_rank(priority):
    return tl.where(priority == priority, priority, float("-inf"))


@triton.jit
def _due_slot(ring, head, t, window, DUE: tl.constexpr):
    slot = tl.full([], -1, tl.int32)
    if DUE:
        slot = tl.load(ring + head * window + t % window, mask=t >= window, other=-1)
    return slot


@triton.jit
def _standardised(key, value, e, there, shift, spread, D: tl.constexpr, V: tl.constexpr):
    """Channels ``e`` of x = [k; v], 0 past the end. Without ``there`` nothing is read."""
    x = tl.load(key + e, mask=there & (e < D), other=0.0).to(tl.float32)
    x += tl.load(value + e - D, mask=there & (e >= D) & (e < D + V), other=0.0).to(tl.float32)
    shift = tl.load(shift + e, mask=e < D + V, other=0.0).to(tl.float32)
    spread = tl.load(spread + e, mask=e < D + V, other=0.0).to(tl.float32)
    return (x - shift) * spread


@triton.jit
def _times(x, weight, e, column, E: tl.constexpr, N: tl.constexpr):
    """x W over the channels ``e``."""
    inside = (e[:, None] < E) & (column[None, :] < N)
    w = tl.load(weight + e[:, None] * N + column[None, :], mask=inside, other=0.0)
    return tl.sum(x[:, None] * w.to(tl.float32), 0)


@triton.jit
def _softmax(x, inside):
    x = tl.where(inside, x, float("-inf"))
    weight = tl.exp(x - tl.max(x, 0))
    return weight / tl.sum(weight, 0)


@triton.jit
def _mlp(
    new_key, new_value, due_key, due_value, there, shift, spread, w1, b1, w2, b2, score, own, part,
    DUE: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
    UNITS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    unit = part * UNITS + tl.arange(0, UNITS)
    hidden = tl.load(b1 + own * N + unit, mask=unit < N, other=0.0).to(tl.float32)
    for start in range(0, D + V, BLOCK_E):
        e = start + tl.arange(0, BLOCK_E)
        if DUE:
            x = _standardised(due_key, due_value, e, there, shift, spread, D, V)
        else:
            x = _standardised(new_key, new_value, e, True, shift, spread, D, V)
        hidden += _times(x, w1 + own * (D + V) * N, e, unit, D + V, N)
    weight = tl.load(w2 + own * N + unit, mask=unit < N, other=0.0).to(tl.float32)
    bias = tl.load(b2 + own).to(tl.float32)
    tl.store(score, tl.sum(_silu(hidden) * weight, 0) + tl.where(part == 0, bias, 0.0))


@triton.jit
def _gates(log_i, f_logit, m, CAP: tl.constexpr):
    """(input gate, forget gate, new stabiliser). In float64 where a forget gate of 1 - 3e-7 would be rounded away."""
    log_i = tl.minimum(tl.maximum(log_i, -CAP), CAP)
    f_logit = tl.minimum(tl.maximum(f_logit, -CAP), CAP).to(tl.float64)
    log_f = (tl.minimum(f_logit, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(f_logit)))).to(tl.float32)
    m_new = tl.maximum(log_f + m, log_i)
    forget = tl.exp((log_f + (m - m_new)).to(tl.float64)).to(tl.float32)
    return tl.exp((log_i - m_new).to(tl.float64)).to(tl.float32), forget, m_new


@triton.jit
def _rows_times(
    key, value, there, shift, spread, weight, w_i, w_f, own, b, r, projected, GATES: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """x W, and with GATES the two gates' logits behind it, of some rows of one head, into columns of ``projected``."""
    E: tl.constexpr = D + V
    total = tl.zeros([BLOCK_B, BLOCK_A], tl.float32)
    i_terms = tl.zeros([BLOCK_B, BLOCK_E], tl.float32)
    f_terms = tl.zeros([BLOCK_B, BLOCK_E], tl.float32)
    for start in tl.range(0, E, BLOCK_E, num_stages=1):
        e = start + tl.arange(0, BLOCK_E)[None, :]
        x = tl.load(key[:, None] + e, mask=there[:, None] & (e < D), other=0.0).to(tl.float32)
        x += tl.load(value[:, None] + e - D, mask=there[:, None] & (e >= D) & (e < E), other=0.0).to(tl.float32)
        x = (x - tl.load(shift + own * E + e, mask=e < E, other=0.0).to(tl.float32)) * tl.load(
            spread + own * E + e, mask=e < E, other=0.0
        ).to(tl.float32)
        w = tl.load(
            weight + (own * E + tl.trans(e)) * A + r[None, :], mask=(tl.trans(e) < E) & (r < A)[None, :], other=0.0
        )
        total = tl.dot(x, w.to(tl.float32), total, input_precision="ieee")
        if GATES:
            i_terms += x * tl.load(w_i + own * E + e, mask=e < E, other=0.0).to(tl.float32)
            f_terms += x * tl.load(w_f + own * E + e, mask=e < E, other=0.0).to(tl.float32)
    tl.store(projected[:, None] + r[None, :], total, mask=b[:, None] & (r < A)[None, :])
    if GATES:
        tl.store(projected + A, tl.sum(i_terms, 1), mask=b)
        tl.store(projected + A + 1, tl.sum(f_terms, 1), mask=b)


@triton.jit
def _project(
    k, v, keys, values, seen, ring, bases, shift, spread, w_q, w_k, w_v, w_i, w_f, projected,
    B, H, M, total, window,
    D: tl.constexpr, V: tl.constexpr, DUE: tl.constexpr, LAYOUT: tl.constexpr, A: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """What a memory makes of x, for some rows of one head: its query, key, or value with the gates: [heads, 3 A + 2]."""
    own, which = tl.program_id(0), tl.program_id(2)
    b, r = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_A)
    inside = b < B
    head = b.to(tl.int64) * H + own
    key, value, there = k + head * D, v + head * V, inside
    into = projected + head * (3 * A + 2) + which * A
    if which == 0:
        if DUE:
            t = tl.load(seen + b, mask=inside, other=0).to(tl.int32)
            slot = tl.load(ring + head * window + t % window, mask=inside & (t >= window), other=-1)
            base = b.to(tl.int64) * total + tl.load(bases + own) if LAYOUT else head * M
            due_key, due_value, there = keys + (base + slot) * D, values + (base + slot) * V, inside & (slot >= 0)
            _rows_times(due_key, due_value, there, shift, spread, w_q, w_i, w_f, own, inside, r, into, False,
                        D, V, A, BLOCK_B, BLOCK_A, BLOCK_E)  # fmt: skip
        else:
            _rows_times(key, value, there, shift, spread, w_q, w_i, w_f, own, inside, r, into, False,
                        D, V, A, BLOCK_B, BLOCK_A, BLOCK_E)  # fmt: skip
    elif which == 1:
        _rows_times(key, value, there, shift, spread, w_k, w_i, w_f, own, inside, r, into, False,
                    D, V, A, BLOCK_B, BLOCK_A, BLOCK_E)  # fmt: skip
    else:
        _rows_times(key, value, there, shift, spread, w_v, w_i, w_f, own, inside, r, into, True,
                    D, V, A, BLOCK_B, BLOCK_A, BLOCK_E)  # fmt: skip


@triton.jit
def _memory(
    new_key, new_value, due_key, due_value, there, shift, spread, projected,
    w_q, w_k, w_v, w_i, w_f, b_f, a, b, C, m, score, own, real,
    CAP: tl.constexpr, DUE: tl.constexpr, D: tl.constexpr, V: tl.constexpr, A: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr, PROJECTED: tl.constexpr,
):  # fmt: skip
    E: tl.constexpr = D + V
    r, c = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_C)
    # Rows of the state: the features of x, then those of -x; A + 1 columns, of which the last sums the weights. What is there
    # is read before anything is computed, and overwritten behind a barrier: several threads may hold what one of them writes.
    high, low = C + r * (A + 1), C + (r + A) * (A + 1)
    old_m = tl.load(m)
    z_high, z_low = tl.load(high + A, mask=r < A, other=0.0), tl.load(low + A, mask=r < A, other=0.0)
    if BLOCK_C == BLOCK_A:
        inside = (r[:, None] < A) & (c[None, :] < A)
        state_high = tl.load(high[:, None] + c[None, :], mask=inside, other=0.0)
        state_low = tl.load(low[:, None] + c[None, :], mask=inside, other=0.0)
    query = tl.load(projected + r, mask=PROJECTED & (r < A), other=0.0).to(tl.float32)
    key = tl.load(projected + A + r, mask=PROJECTED & (r < A), other=0.0).to(tl.float32)
    i_terms = tl.zeros([BLOCK_E], tl.float32)
    f_terms = tl.zeros([BLOCK_E], tl.float32)
    for start in tl.range(0, 0 if PROJECTED else E, BLOCK_E, num_stages=1):
        e = start + tl.arange(0, BLOCK_E)
        x = _standardised(new_key, new_value, e, True, shift, spread, D, V)
        x_due = x
        if DUE:
            x_due = _standardised(due_key, due_value, e, there, shift, spread, D, V)
        query += _times(x_due, w_q + own * E * A, e, r, E, A)
        key += _times(x, w_k + own * E * A, e, r, E, A)
        i_terms += x * tl.load(w_i + own * E + e, mask=e < E, other=0.0).to(tl.float32)
        f_terms += x * tl.load(w_f + own * E + e, mask=e < E, other=0.0).to(tl.float32)
    q_high, q_low = _softmax(query, r < A), _softmax(-query, r < A)
    k_high, k_low = _softmax(key, r < A), _softmax(-key, r < A)
    log_i, f_logit = tl.sum(i_terms, 0), tl.sum(f_terms, 0)
    if PROJECTED:
        log_i, f_logit = tl.load(projected + 3 * A), tl.load(projected + 3 * A + 1)
    take, forget, m_new = _gates(log_i, f_logit + tl.load(b_f + own).to(tl.float32), old_m, CAP)
    k_high *= take
    k_low *= take
    z_high, z_low = forget * z_high + k_high, forget * z_low + k_low
    norm = tl.sum(q_high * z_high + q_low * z_low, 0)
    readable = norm > SMALLEST
    total = tl.load(b + own).to(tl.float32)
    for first in tl.range(0, BLOCK_A, BLOCK_C, num_stages=1):  # by columns, where registers are short
        column = first + c
        inside = (r[:, None] < A) & (column[None, :] < A)
        if BLOCK_C < BLOCK_A:
            state_high = tl.load(high[:, None] + column[None, :], mask=inside, other=0.0)
            state_low = tl.load(low[:, None] + column[None, :], mask=inside, other=0.0)
        value = tl.load(projected + 2 * A + column, mask=PROJECTED & (column < A), other=0.0).to(tl.float32)
        for start in tl.range(0, 0 if PROJECTED else E, BLOCK_E, num_stages=1):
            e = start + tl.arange(0, BLOCK_E)
            x = _standardised(new_key, new_value, e, True, shift, spread, D, V)
            value += _times(x, w_v + own * E * A, e, column, E, A)
        state_high = forget * state_high + k_high[:, None] * value[None, :]
        state_low = forget * state_low + k_low[:, None] * value[None, :]
        tl.debug_barrier()
        tl.store(high[:, None] + column[None, :], state_high, mask=inside & real)
        tl.store(low[:, None] + column[None, :], state_low, mask=inside & real)
        read = tl.sum(q_high[:, None] * state_high + q_low[:, None] * state_low, 0)
        h = tl.where(readable, read / tl.where(readable, norm, 1.0), 0.0)
        total += tl.sum(_silu(h) * tl.load(a + own * A + column, mask=column < A, other=0.0).to(tl.float32), 0)
    tl.store(high + A, z_high, mask=(r < A) & real)
    tl.store(low + A, z_low, mask=(r < A) & real)
    tl.store(m, m_new, mask=real)
    tl.store(score, total)


@triton.jit
def _worst(
    position, priority, pins, row, first, stop, old, due, sinks, newest, P: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """(rank, position, slot) of the worst candidate in slots [first, stop), without the two that may go now."""
    # One best candidate a lane: they are compared with each other once, at the end.
    best_rank = tl.full([BLOCK_W], float("inf"), tl.float32)
    best_position = tl.full([BLOCK_W], NONE, tl.int32)
    best_slot = tl.full([BLOCK_W], -1, tl.int32)
    for start in range(first, stop, BLOCK_W):
        m = start + tl.arange(0, BLOCK_W)
        where = tl.load(position + m, mask=m < stop, other=-1)
        rank = _as_rank(tl.load(priority + m, mask=m < stop, other=0.0))
        ranked = (m != old) & (m != due) & (where >= sinks) & (where <= newest)
        for p in tl.static_range(P):
            begin = tl.load(pins + (row * P + p) * 2)
            end = tl.load(pins + (row * P + p) * 2 + 1)
            ranked &= ~((where >= begin) & (where < end))
        rank, where = tl.where(ranked, rank, float("inf")), tl.where(ranked, where, NONE)
        worse = _before(rank, where, best_rank, best_position)
        best_slot = tl.where(worse, m, best_slot)
        best_position = tl.where(worse, where, best_position)
        best_rank = tl.where(worse, rank, best_rank)
    lowest = tl.min(best_rank, 0)
    oldest = tl.min(tl.where(best_rank == lowest, best_position, NONE), 0)
    return lowest, oldest, tl.max(tl.where((best_rank == lowest) & (best_position == oldest), best_slot, -1), 0)


@triton.jit
def _attend(
    q, keys, values, least, ring, parts, stats, head, part, t, real, size, base, split, splits, window,
    scale: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DUE: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Over the slots of one split. A head that has seen t tokens holds some in its first min(t, size) slots, and nothing
    behind: what is loaded does not depend on anything else that is, so that loads can run ahead."""
    old = tl.load(least + head)
    due = _due_slot(ring, head, t, window, DUE)
    dropping = (t >= size) & real
    g, d, e, i = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_M)
    query = tl.load(q + (head * G + g[:, None]) * D + d, mask=(g[:, None] < G) & (d < D), other=0.0)
    high = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    summed = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    stop = tl.minimum(part * split + split, tl.minimum(t, size))
    for start in tl.range(part * split, stop, BLOCK_M, num_stages=STAGES):
        m = start + i
        if D == BLOCK_D:
            key = tl.load(keys + (base + m[:, None]) * D + d, mask=(m < stop)[:, None], other=0.0)
        else:
            key = tl.load(keys + (base + m[:, None]) * D + d, mask=(m < stop)[:, None] & (d < D), other=0.0)
        if V == BLOCK_V:
            value = tl.load(values + (base + m[:, None]) * V + e, mask=(m < stop)[:, None], other=0.0)
        else:
            value = tl.load(values + (base + m[:, None]) * V + e, mask=(m < stop)[:, None] & (e < V), other=0.0)
        stays = (m < stop) & (((m != old) & (m != due)) | ~dropping)
        high, mass, summed = _absorb(high, mass, summed, query, key, value, stays, scale, PRECISION)
    at = head * splits + part
    tl.store(stats + at * (2 * G) + g, high, mask=g < G)
    tl.store(stats + at * (2 * G) + G + g, mass, mask=g < G)
    tl.store(parts + (at * G + g[:, None]) * V + e, summed, mask=(g[:, None] < G) & (e < V))


@triton.jit
def _search(
    position, priority, pins, least, ring, ranks, marks, notes, priority_of_old,
    head, part, row, t, M, size, searches, sinks, window,
    P: tl.constexpr, DUE: tl.constexpr, SEARCH: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The worst candidate of ``SEARCH`` slots, for the next step; and a copy of what decides in this one."""
    old = tl.load(least + head)
    due = _due_slot(ring, head, t, window, DUE)
    newest = t - window if DUE else t + 1 - window  # that is ranked when the next token comes
    stop = tl.minimum(part * SEARCH + SEARCH, tl.minimum(t, size))
    lowest, oldest, slot = _worst(
        position + head * M, priority + head * M, pins, row, part * SEARCH, stop, old, due, sinks, newest, P, BLOCK_W,
    )  # fmt: skip
    at = head * searches + part
    tl.store(ranks + at, lowest)
    tl.store(marks + at * 2, oldest)
    tl.store(marks + at * 2 + 1, slot)
    if part == 0:
        tl.store(notes + head * NOTES, t)
        tl.store(notes + head * NOTES + 1, old)
        tl.store(notes + head * NOTES + 2, tl.load(position + head * M + old, mask=old >= 0, other=NONE))
        tl.store(notes + head * NOTES + 3, due)
        rank = _as_rank(tl.load(priority + head * M + old, mask=old >= 0, other=float("inf")))
        tl.store(priority_of_old + head, rank)


@triton.jit
def _attend_and_search(
    q, keys, values, position, priority, seen, valid, pins, least, ring, lengths, bases,
    parts, stats, ranks, marks, notes, priority_of_old,
    heads, H, M, total, split, splits, searches, sinks, window,
    scale: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
    DUE: tl.constexpr, VALID: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    SEARCH: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, CHAIN: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """``splits`` programs a head attend; then come ``searches`` a head that look for the worst."""
    if CHAIN:
        if not SCORED:
            gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    attends = program < heads * splits
    index = program - heads * splits
    head = tl.where(attends, program // splits, index % heads).to(tl.int64)
    row = head // H
    t = tl.load(seen + row).to(tl.int32)
    real = tl.load(valid + row) != 0 if VALID else t >= 0
    size = tl.load(lengths + head % H) if LAYOUT else M
    base = row * total + tl.load(bases + head % H) if LAYOUT else head * M
    if attends:
        _attend(
            q, keys, values, least, ring, parts, stats, head, program % splits, t, real, size, base, split, splits, window,
            scale, G, D, V, DUE, BLOCK_G, BLOCK_M, BLOCK_D, BLOCK_V, STAGES, PRECISION,
        )  # fmt: skip
    else:
        _search(
            position, priority, pins, least, ring, ranks, marks, notes, priority_of_old,
            head, index // heads, row, t, M, size, searches, sinks, window, P, DUE, SEARCH, BLOCK_W,
        )  # fmt: skip
    if CHAIN and SCORED:
        gdc_wait()  # who waits for this launch waits for the scores, too


@triton.jit
def _score(
    k, v, keys, values, seen, valid, ring, bases,
    shift, spread, w1, b1, w2, b2, w_q, w_k, w_v, w_i, w_f, b_f, a, b, C, m, projected, scores,
    heads, H, M, total, window,
    D: tl.constexpr, V: tl.constexpr, DUE: tl.constexpr, VALID: tl.constexpr, LAYOUT: tl.constexpr,
    MEMORY: tl.constexpr, A: tl.constexpr, CAP: tl.constexpr, PERCEPTRON: tl.constexpr, N: tl.constexpr,
    UNITS: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr, PROJECTED: tl.constexpr,
    CHAIN: tl.constexpr,
):  # fmt: skip
    """MEMORY (0 or 1) + PERCEPTRON programs a head, the memory's first."""
    program = tl.program_id(0)
    head, which = (program % heads).to(tl.int64), program // heads
    row, own = head // H, head % H
    if CHAIN:
        gdc_wait()
        gdc_launch_dependents()  # what attends: it may read all that has been waited for here
    t = tl.load(seen + row).to(tl.int32)
    real = tl.load(valid + row) != 0 if VALID else t >= 0
    base = row * total + tl.load(bases + head % H) if LAYOUT else head * M
    slot = _due_slot(ring, head, t, window, DUE)
    there = slot >= 0
    new_key, new_value = k + head * D, v + head * V
    due_key, due_value = keys + (base + slot) * D, values + (base + slot) * V
    own_shift, own_spread = shift + own * (D + V), spread + own * (D + V)
    score = scores + head * (MEMORY + PERCEPTRON) + which
    if MEMORY:  # noqa: SIM102 (one is known when this is compiled, the other when it runs)
        if which == 0:
            _memory(
                new_key, new_value, due_key, due_value, there, own_shift, own_spread, projected + head * (3 * A + 2),
                w_q, w_k, w_v, w_i, w_f, b_f, a, b, C + head * (2 * A * (A + 1)), m + head, score, own, real,
                CAP, DUE, D, V, A, BLOCK_A, BLOCK_C, BLOCK_E, PROJECTED,
            )  # fmt: skip
    if PERCEPTRON:  # noqa: SIM102
        if which >= MEMORY:
            _mlp(
                new_key, new_value, due_key, due_value, there, own_shift, own_spread, w1, b1, w2, b2, score, own,
                which - MEMORY, DUE, D, V, N, UNITS, BLOCK_E,
            )  # fmt: skip


@triton.jit
def _worst_next(
    ranks, marks, head, searches, old, old_rank, old_position, due, due_rank, due_position, new, new_rank, new_position,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Slot of the worst candidate when the next token comes, -1 for none. Who is no candidate has position NONE."""
    s = tl.arange(0, BLOCK_S)
    rank = tl.load(ranks + head * searches + s, mask=s < searches, other=float("inf"))
    where = tl.load(marks + (head * searches + s) * 2, mask=s < searches, other=NONE)
    slots = tl.load(marks + (head * searches + s) * 2 + 1, mask=s < searches, other=-1)
    lowest = tl.min(rank, 0)
    oldest = tl.min(tl.where(rank == lowest, where, NONE), 0)
    slot = tl.max(tl.where((rank == lowest) & (where == oldest), slots, -1), 0)
    if _before(old_rank, old_position, lowest, oldest):
        slot, lowest, oldest = old, old_rank, old_position
    if _before(due_rank, due_position, lowest, oldest):
        slot, lowest, oldest = due, due_rank, due_position
    if _before(new_rank, new_position, lowest, oldest):
        slot = new
    return slot


@triton.jit
def _finish(
    q, k, v, keys, values, position, priority, seen, valid, pins, least, ring, lengths, bases, fresh, log_gamma,
    parts, stats, ranks, marks, notes, scores, priority_of_old, out,
    H, M, total, splits, searches, sinks, window, decay_step,
    scale: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, P: tl.constexpr,
    DUE: tl.constexpr, VALID: tl.constexpr, LAYOUT: tl.constexpr, FRESH: tl.constexpr, SCORERS: tl.constexpr,
    OVERLAP: tl.constexpr, CHAIN: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()  # the product that comes next may read its weights meanwhile (``ops.few_rows``)
    if CHAIN:
        gdc_wait()
    head = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    row = head // H
    t = tl.load(notes + head * NOTES)
    old = tl.load(notes + head * NOTES + 1)
    old_position = tl.load(notes + head * NOTES + 2)
    due = tl.load(notes + head * NOTES + 3)
    old_rank = tl.load(priority_of_old + head)
    real = tl.load(valid + row) != 0 if VALID else t >= 0
    size = tl.load(lengths + head % H) if LAYOUT else M
    base = row * total + tl.load(bases + head % H) if LAYOUT else head * M
    full = t >= size

    if FRESH:
        made = tl.load(fresh + head)
    else:
        p = tl.arange(0, BLOCK_P)
        score = tl.sum(tl.load(scores + head * SCORERS + p, mask=p < SCORERS, other=0.0), 0)
        bucket = (t - window if DUE else t) // decay_step
        # The product is exact in float64 and rounded once: never fused with the sum, which would round otherwise than torch.
        decay = bucket.to(tl.float32).to(tl.float64) * tl.load(log_gamma + head % H).to(tl.float32).to(tl.float64)
        made = score - decay.to(tl.float32)

    # Of the two that may go, which one does.
    rank = _as_rank(made)
    ranked = (due >= 0) & (t - window >= sinks)
    new_ranked = (t >= sinks) & (t <= (t if DUE else t + 1) - window)  # already when the next token comes
    for p in tl.static_range(P):
        begin = tl.load(pins + (row * P + p) * 2)
        end = tl.load(pins + (row * P + p) * 2 + 1)
        ranked &= ~((t - window >= begin) & (t - window < end))
        new_ranked &= ~((t >= begin) & (t < end))
    due_position = tl.where(ranked, t - window, NONE)
    due_rank = tl.where(ranked, rank, float("inf"))
    due_goes = _before(due_rank, due_position, old_rank, old_position)
    target = tl.where(full, tl.maximum(tl.where(due_goes, due, old), 0), t)
    stays = tl.where(due_goes, old, due)
    added = real & full & (stays >= 0)

    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    query = tl.load(q + (head * G + g) * D + d, mask=d < D, other=0.0).to(tl.float32)
    new_key = tl.load(k + head * D + d, mask=d < D, other=0.0).to(keys.dtype.element_ty)
    new_value = tl.load(v + head * V + e, mask=e < V, other=0.0).to(values.dtype.element_ty)
    key = tl.load(keys + (base + stays) * D + d, mask=added & (d < D), other=0.0).to(tl.float32)
    value = tl.load(values + (base + stays) * V + e, mask=added & (e < V), other=0.0).to(tl.float32)
    new_logit = tl.where(real, tl.sum(query * new_key.to(tl.float32), 0) * scale, float("-inf"))
    logit = tl.where(added, tl.sum(query * key, 0) * scale, float("-inf"))
    highest = _highest(stats, head * splits, splits, g, tl.maximum(new_logit, logit), G, BLOCK_T)
    new_weight, weight = tl.exp(new_logit - highest), tl.exp(logit - highest)
    mass = new_weight + weight
    summed = new_weight * new_value.to(tl.float32) + weight * value
    result = _merged(stats, parts, head * splits, splits, g, highest, mass, summed, e, G, V, BLOCK_T)
    tl.store(out + (head * G + g) * V + e, result.to(out.dtype.element_ty), mask=e < V)

    if g == 0:
        tl.store(keys + (base + target) * D + d, new_key, mask=(d < D) & real)
        tl.store(values + (base + target) * V + e, new_value, mask=(e < V) & real)
        tl.store(position + head * M + target, t, mask=real)
        tl.store(priority + head * M + target, 0.0 if DUE else made, mask=real)
        due_goes = due_goes & full
        tl.store(priority + head * M + due, made, mask=real & (due >= 0) & ~due_goes)
        tl.store(ring + head * window + t % window, target, mask=real)
        old_stays = ~full | due_goes
        old_position = tl.where(old_stays, old_position, NONE)
        old_rank = tl.where(old_stays, old_rank, float("inf"))
        due_position = tl.where(due_goes, NONE, due_position)
        due_rank = tl.where(due_goes, float("inf"), due_rank)
        worst = _worst_next(
            ranks, marks, head, searches, old, old_rank, old_position, due, due_rank, due_position,
            target, tl.where(new_ranked, rank, float("inf")), tl.where(new_ranked, t, NONE), BLOCK_S,
        )  # fmt: skip
        tl.store(least + head, worst, mask=real)
        tl.store(seen + row, (t + 1).to(tl.int64), mask=real & (head % H == 0))


def _weights(scorer: Weights | Tensor) -> list[Tensor | None]:
    """The weights in the order in which the first launch takes them; None for those of what this scorer lacks."""
    lacks: list[Tensor | None] = [None] * 14
    if not isinstance(scorer, Weights):
        return lacks
    mlp, memory = lacks[2:6], lacks[6:]
    if (x := scorer.mlp) is not None:
        mlp = [x.w1_HEN, x.b1_HN, x.w2_HN, x.b2_H]
    if (y := scorer.memory) is not None:
        memory = [y.w_q_HEA, y.w_k_HEA, y.w_v_HEA, y.w_i_HE, y.w_f_HE, y.b_f_H, y.a_HA, y.b_H]
    return [scorer.shift_HE, scorer.scale_HE, *mlp, *memory]


def _sizes(weights: list[Tensor | None], cap: float) -> tuple[dict[str, int | float], int]:
    """Sizes that the first launch takes for its scorer, and how many of its programs score a head."""
    w1, w_q = weights[2], weights[6]
    perceptron, remembers = 0 if w1 is None else triton.cdiv(w1.shape[-1], UNITS), int(w_q is not None)
    N, A = (1 if x is None else x.shape[-1] for x in (w1, w_q))
    return {"MEMORY": remembers, "PERCEPTRON": perceptron, "A": A, "N": N, "CAP": cap}, remembers + perceptron


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _beside(device: torch.device) -> AbstractContextManager[object]:
    """What is launched inside may run while what is launched on the current stream does. In a captured graph, a branch."""
    return torch.cuda.stream(_side(device)) if device.type == "cuda" else nullcontext()


def _fork(device: torch.device) -> None:
    """What comes before this is done before what is launched ``_beside``."""
    if device.type == "cuda":
        _side(device).wait_stream(torch.cuda.current_stream(device))


def _join(device: torch.device) -> None:
    """What has been launched ``_beside`` is done before what comes after this."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_side(device))


def _early(chain: bool) -> dict[str, bool]:
    """How to launch what may start before the launch in front of it has ended."""
    return {"launch_pdl": True} if chain else {}


def step(
    q_BR1D: Tensor,
    k_BH1D: Tensor,
    v_BH1V: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    priority: Tensor,
    seen_B: Tensor,
    least_BH: Tensor,
    ring_BHw: Tensor,
    scorer: Weights | Tensor,
    state: tuple[Tensor, ...],
    log_gamma_H: Tensor,
    decay_step: int,
    sinks: int,
    window: int,
    due: bool,
    scale: float,
    valid_B: Tensor | None,
    pins_BP2: Tensor | None,
    layout: Layout | None,
) -> Tensor:
    """See ``api.step``."""
    fresh = scorer.contiguous() if isinstance(scorer, Tensor) else None
    C, m, cap = None, None, 0.0
    if isinstance(scorer, Weights) and scorer.memory is not None:
        (C, m), cap = state, scorer.memory.gate_cap
    size, base, total = (None, None, 0) if layout is None else (layout.size_H, layout.base_H, layout.total)
    with torch.no_grad():
        return _step(
            q_BR1D.contiguous(), k_BH1D.contiguous(), v_BH1V.contiguous(), keys, values, position, priority, seen_B,
            least_BH, ring_BHw, fresh, _weights(scorer), C, m, cap, log_gamma_H, decay_step, sinks, window, due, scale,
            None if valid_B is None else valid_B.contiguous(), pins_BP2, size, base, total,
        )  # fmt: skip


@torch.library.custom_op(
    "kvpop::fused_step",
    mutates_args=("keys", "values", "position", "priority", "seen_B", "least_BH", "ring_BHw", "C", "m"),
)
def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    priority: Tensor,
    seen_B: Tensor,
    least_BH: Tensor,
    ring_BHw: Tensor,
    fresh: Tensor | None,
    weights: list[Tensor | None],
    C: Tensor | None,
    m: Tensor | None,
    cap: float,
    log_gamma_H: Tensor,
    decay_step: int,
    sinks: int,
    window: int,
    due: bool,
    scale: float,
    valid_B: Tensor | None,
    pins_BP2: Tensor | None,
    size_H: Tensor | None,
    base_H: Tensor | None,
    total: int,
) -> Tensor:
    """The launches, one operation to ``torch.compile``: it cannot follow one stream beside another, and need not."""
    (B, H, M), D, V = position.shape, keys.shape[-1], values.shape[-1]
    R = q.shape[1]
    heads, G, device = B * H, R // H, keys.device
    if size_H is None:
        total = H * M
    blocks = triton.cdiv(triton.cdiv(total, H), BLOCK)  # of a head of average size: larger ones have more splits
    programs = PROGRAMS * 4 // 3 if heads <= FEW_HEADS else PROGRAMS
    split = max(LEAST, triton.cdiv(blocks, max(1, programs // heads))) * BLOCK
    splits = triton.cdiv(M, split)
    sizes, scorers = _sizes(weights, cap)
    parts = torch.empty(heads, splits, G, V, dtype=torch.float32, device=device)
    searches = triton.cdiv(M, SEARCH)
    stats = torch.empty(heads, splits, 2 * G, dtype=torch.float32, device=device)
    ranks = torch.empty(heads, searches, dtype=torch.float32, device=device)
    marks = torch.empty(heads, searches, 2, dtype=torch.int32, device=device)
    notes = torch.empty(heads, NOTES.value, dtype=torch.int32, device=device)
    scores = torch.empty(heads, max(1, scorers), dtype=torch.float32, device=device)
    priority_of_old = torch.empty(heads, dtype=torch.float32, device=device)
    out = torch.empty(B, R, 1, V, dtype=q.dtype, device=device)
    # q stands in for what is not there.
    valid, lengths, bases = (q if x is None else x for x in (valid_B, size_H, base_H))
    pins, P = (q, 0) if pins_BP2 is None else (pins_BP2, pins_BP2.shape[1])
    flags = dict(D=D, V=V, DUE=due, VALID=valid_B is not None, LAYOUT=size_H is not None)
    common = dict(
        **flags, scale=scale, G=G, P=P,
        BLOCK_D=max(16, triton.next_power_of_2(D)), BLOCK_V=max(16, triton.next_power_of_2(V)),
    )  # fmt: skip
    BLOCK_A = triton.next_power_of_2(int(sizes["A"]))
    crowd = heads * scorers > CROWD

    projects = crowd and bool(sizes["MEMORY"])
    projected = torch.empty(heads, 3 * int(sizes["A"]) + 2, dtype=torch.float32, device=device) if projects else q
    BLOCK_E = min(CROWD_CHANNELS if crowd else CHANNELS, triton.next_power_of_2(D + V))

    chain = heads * max(1, scorers) <= CHAIN and overlaps(device)
    early = _early(chain)

    def score() -> None:
        given = [q if x is None else x for x in (*weights, C, m)]
        if projects:
            _project[(H, triton.cdiv(B, TOGETHER), 3)](
                k, v, keys, values, seen_B, ring_BHw, bases, *given[:2], *given[6:11], projected,
                B, H, M, total, window,
                D=D, V=V, DUE=due, LAYOUT=size_H is not None, A=sizes["A"],
                BLOCK_B=TOGETHER, BLOCK_A=max(16, BLOCK_A), BLOCK_E=max(16, min(64, BLOCK_E)), num_warps=4,
            )  # fmt: skip
        _score[(heads * scorers,)](
            k, v, keys, values, seen_B, valid, ring_BHw, bases, *given, projected, scores,
            heads, H, M, total, window,
            **flags, **sizes, UNITS=UNITS, BLOCK_A=BLOCK_A, BLOCK_C=min(CROWD_COLUMNS if crowd else 64, BLOCK_A),
            BLOCK_E=BLOCK_E, PROJECTED=projects, CHAIN=chain, num_warps=SCORE_WARPS, **early,
        )  # fmt: skip

    def attend() -> None:
        _attend_and_search[(heads * (splits + searches),)](
            q, keys, values, position, priority, seen_B, valid, pins, least_BH, ring_BHw, lengths, bases,
            parts, stats, ranks, marks, notes, priority_of_old,
            heads, H, M, total, split, splits, searches, sinks, window,
            **common,
            BLOCK_G=max(16, triton.next_power_of_2(G)), BLOCK_M=BLOCK, SEARCH=SEARCH,
            BLOCK_W=min(1024, triton.next_power_of_2(M)), STAGES=STAGES,
            PRECISION="ieee" if keys.dtype == torch.float32 else "tf32",
            num_warps=WARPS if max(D, V) <= 128 else 8,  # a wider head does not fit into the registers of 4
            CHAIN=chain, SCORED=scorers > 0, **early,
        )  # fmt: skip

    if chain and scorers:
        score()
        attend()
    elif scorers:
        _fork(device)
        for launch in (attend, score) if crowd else (score, attend):
            with _beside(device) if launch is score else nullcontext():
                launch()
        _join(device)
    else:
        attend()
    _finish[(heads, G)](
        q, k, v, keys, values, position, priority, seen_B, valid, pins, least_BH, ring_BHw, lengths, bases,
        priority_of_old if fresh is None else fresh, log_gamma_H,
        parts, stats, ranks, marks, notes, scores, priority_of_old, out,
        H, M, total, splits, searches, sinks, window, decay_step,
        **common, FRESH=fresh is not None, SCORERS=scorers, OVERLAP=overlaps(device), CHAIN=chain, **early,
        BLOCK_P=triton.next_power_of_2(max(1, scorers)),
        BLOCK_S=triton.next_power_of_2(searches), BLOCK_T=min(32, triton.next_power_of_2(splits)), num_warps=4,
    )  # fmt: skip
    return out


@_step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])

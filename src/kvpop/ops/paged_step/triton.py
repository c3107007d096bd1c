"""The step in two launches: attend over splits of pages and ring, the gate beside it; then merge, write and move one token.

Whether the token that leaves the window stays is known before: its gate was decided at an earlier step (but for a window of 1,
whose gate is given). So the first launch attends to all that stays, ring and pages as they were, and only the new token is
added by the second. What the second launch both reads and writes would be a race between its programs, so the first copies what
decides into scratch ("notes"); keys and values of the ring are read only by the program that writes there.

A program of the first launch reads a fixed number of places of one head: long heads have more programs, and those behind the
end of a head do nothing, so the grid is the same at every length that the table has room for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpop.ops.cache_step.fused.triton import UNITS, _mlp
from kvpop.ops.cache_step.triton import _absorb, _highest, _merged
from kvpop.ops.paged_step.api import MLPGate, Pages, Ring

# Shapes: B rows, H KV heads, G query heads per KV head, W window, N pages a head has room for, L tokens a page, D key dim,
# V value dim, U hidden units of the gate in parts of UNITS. Of the splits of a head those of the ring come first.

PROGRAMS = 264
"""About how many programs the attention is spread over: two per multiprocessor of an H100 or H200."""
BLOCK = 64
"""Places that one program loads at once."""
CHANNELS = 128
"""Channels of x that the gate multiplies at once; more would take registers from the attention in the same launch."""
NOTES = tl.constexpr(4)
"""Per head: the token's position, tokens in pages, the page for the token that stays (0: none does), whether it had none."""


@triton.jit
def _absorb_rows(
    high, mass, summed, query, keys, values, row, held, d, e,
    scale: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``_absorb`` of the keys and values in these rows."""
    key = tl.load(keys + row[:, None] * D + d, mask=held[:, None] & (d < D), other=0.0)
    value = tl.load(values + row[:, None] * V + e, mask=held[:, None] & (e < V), other=0.0)
    return _absorb(high, mass, summed, query, key, value, held, scale, PRECISION)


@triton.jit
def _attend_and_gate(
    q, k, v, keys, values, table, count, missed, ring_keys, ring_values, closed, seen, valid, given,
    shift, spread, w1, b1, w2, b2,
    parts, stats, notes, scores,
    heads, H, N, window, sinks, split, ring_splits, splits,
    scale: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    VALID: tl.constexpr, EARLY: tl.constexpr, SCORERS: tl.constexpr, U: tl.constexpr, UNITS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """SCORERS programs a head compute the gate's score; then come ``splits`` a head that attend."""
    program = tl.program_id(0)
    attends = program >= heads * SCORERS
    index = program - heads * SCORERS
    head = tl.where(attends, index // splits, program % heads).to(tl.int64)
    row = head // H
    t = tl.load(seen + row).to(tl.int32)
    real = tl.load(valid + row) != 0 if VALID else t >= 0
    if attends:
        part = index % splits
        size = tl.load(count + head).to(tl.int32)
        slot = t % window  # of the token that leaves
        if EARLY:
            goes = (tl.load(given + head) != 0) & (t - 1 >= sinks)
        else:
            goes = tl.load(closed + head * window + slot) != 0
        leaves = real & (t >= window)
        stays = leaves & ~goes
        goes = leaves & goes
        if part == 0:
            page = tl.load(table + head * N + size // L, mask=stays & (size // L < N), other=0).to(tl.int32)
            lost = (tl.load(missed + head) != 0) | (stays & (page == 0))
            tl.store(notes + head * NOTES, t)
            tl.store(notes + head * NOTES + 1, size)
            tl.store(notes + head * NOTES + 2, page)
            tl.store(notes + head * NOTES + 3, lost.to(tl.int32))
        paged = part >= ring_splits
        first = tl.where(paged, part - ring_splits, part) * split
        stop = tl.minimum(first + split, tl.where(paged, size, tl.minimum(window, t)))
        if (first < stop) | (part < ring_splits):
            g, d, e, i = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_M)
            query = tl.load(q + (head * G + g[:, None]) * D + d, mask=(g[:, None] < G) & (d < D), other=0.0)
            high = tl.full([BLOCK_G], float("-inf"), tl.float32)
            mass = tl.zeros([BLOCK_G], tl.float32)
            summed = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
            if paged:
                for start in range(first, stop, BLOCK_M):
                    m = start + i
                    held = m < stop
                    page = tl.load(table + head * N + m // L, mask=held, other=0)
                    high, mass, summed = _absorb_rows(
                        high, mass, summed, query, keys, values, page * L + m % L, held, d, e, scale, D, V, PRECISION
                    )
            else:
                for start in range(first, stop, BLOCK_M):
                    m = start + i
                    held = (m < stop) & ((m != slot) | ~goes)
                    high, mass, summed = _absorb_rows(
                        high, mass, summed, query, ring_keys, ring_values, head * window + m, held, d, e,
                        scale, D, V, PRECISION,
                    )  # fmt: skip
            at = head * splits + part
            tl.store(stats + at * (2 * G) + g, high, mask=g < G)
            tl.store(stats + at * (2 * G) + G + g, mass, mask=g < G)
            tl.store(parts + (at * G + g[:, None]) * V + e, summed, mask=(g[:, None] < G) & (e < V))
    elif SCORERS > 0:
        own, which = head % H, program // heads
        new_key, new_value = k + head * D, v + head * V
        _mlp(
            new_key, new_value, new_key, new_value, True, shift + own * (D + V), spread + own * (D + V), w1, b1, w2, b2,
            scores + head * SCORERS + which, own, which, False, D, V, U, UNITS, BLOCK_E,
        )  # fmt: skip


@triton.jit
def _finish(
    q, k, v, keys, values, position, count, missed, ring_keys, ring_values, closed, seen, valid, given,
    parts, stats, notes, scores, out,
    H, window, sinks, split, ring_splits, splits,
    scale: tl.constexpr, offset: tl.constexpr, threshold: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    VALID: tl.constexpr, LAG: tl.constexpr, SCORERS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    row = head // H
    t = tl.load(notes + head * NOTES)
    size = tl.load(notes + head * NOTES + 1)
    page = tl.load(notes + head * NOTES + 2).to(tl.int64)
    lost = tl.load(notes + head * NOTES + 3) != 0
    real = tl.load(valid + row) != 0 if VALID else t >= 0

    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    query = tl.load(q + (head * G + g) * D + d, mask=d < D, other=0.0).to(tl.float32)
    new_key = tl.load(k + head * D + d, mask=d < D, other=0.0).to(keys.dtype.element_ty)
    new_value = tl.load(v + head * V + e, mask=e < V, other=0.0).to(values.dtype.element_ty)
    new_logit = tl.where(real, tl.sum(query * new_key.to(tl.float32), 0) * scale, float("-inf"))
    used = ring_splits + tl.cdiv(size, split)
    highest = _highest(stats, head * splits, used, g, new_logit, G, BLOCK_T)
    new_weight = tl.exp(new_logit - highest)
    summed = new_weight * new_value.to(tl.float32)
    result = _merged(stats, parts, head * splits, used, g, highest, new_weight, summed, e, G, V, BLOCK_T)
    result = tl.where(lost, float("nan"), result)
    tl.store(out + (head * G + g) * V + e, result.to(out.dtype.element_ty), mask=e < V)

    if g == 0:
        place, target = head * window + t % window, page * L + size % L
        moves = page > 0
        old_key = tl.load(ring_keys + place * D + d, mask=(d < D) & moves, other=0.0)
        old_value = tl.load(ring_values + place * V + e, mask=(e < V) & moves, other=0.0)
        tl.debug_barrier()  # several threads may hold an element that one overwrites: all have read it
        tl.store(keys + target * D + d, old_key, mask=(d < D) & moves)
        tl.store(values + target * V + e, old_value, mask=(e < V) & moves)
        tl.store(position + target, t - window, mask=moves)
        tl.store(count + head, (size + 1).to(tl.int64), mask=moves)
        tl.store(ring_keys + place * D + d, new_key, mask=(d < D) & real)
        tl.store(ring_values + place * V + e, new_value, mask=(e < V) & real)
        if SCORERS > 0:
            p = tl.arange(0, BLOCK_P)
            score = tl.sum(tl.load(scores + head * SCORERS + p, mask=p < SCORERS, other=0.0), 0)
            shut = score - offset > threshold
        else:
            shut = tl.load(given + head) != 0
        shut = shut & (t - LAG >= sinks)
        if LAG:
            before = head * window + (t + window - 1) % window
            tl.store(closed + before, shut, mask=real & (t >= 1) & (window > 1))
            tl.store(closed + place, t < 0, mask=real)
        else:
            tl.store(closed + place, shut, mask=real)
        tl.store(missed + head, lost)
        tl.store(seen + row, (t + 1).to(tl.int64), mask=real & (head % H == 0))


def step(
    q_BR1D: Tensor,
    k_BH1D: Tensor,
    v_BH1V: Tensor,
    pages: Pages,
    ring: Ring,
    seen_B: Tensor,
    gate: Tensor | MLPGate,
    sinks: int,
    lag: int,
    scale: float,
    valid_B: Tensor | None,
) -> Tensor:
    """See ``api.step``."""
    (B, H, W), N, (P, L, D) = ring.closed_BHW.shape, pages.table_BHN.shape[-1], pages.keys_PLD.shape
    V, R, device = pages.values_PLV.shape[-1], q_BR1D.shape[1], pages.keys_PLD.device
    heads, G = B * H, R // H
    blocks = triton.cdiv(max(1, min((P - 1) * L // heads, N * L)) + W, BLOCK)  # of a head of average size
    split = triton.cdiv(blocks, max(1, min(triton.cdiv(PROGRAMS, heads), blocks))) * BLOCK
    ring_splits = triton.cdiv(W, split)
    splits = ring_splits + triton.cdiv(N * L, split)
    q, k, v = q_BR1D.contiguous(), k_BH1D.contiguous(), v_BH1V.contiguous()
    # What stands in for an argument that is not there must not be written: a compiler keeps apart what is passed twice.
    valid = q if valid_B is None else valid_B.contiguous()
    if isinstance(gate, MLPGate):
        x, mlp = gate.weights, gate.weights.mlp
        assert mlp is not None
        weights = (x.shift_HE, x.scale_HE, mlp.w1_HEN, mlp.b1_HN, mlp.w2_HN, mlp.b2_H)
        given, U, offset, threshold = q, mlp.w1_HEN.shape[-1], float(gate.offset), float(gate.threshold)
        scorers = triton.cdiv(U, UNITS)
    else:
        weights, given, U, offset, threshold, scorers = (q,) * 6, gate.to(torch.bool).contiguous(), 1, 0.0, 0.0, 0
    parts = torch.empty(heads, splits, G, V, dtype=torch.float32, device=device)
    stats = torch.empty(heads, splits, 2 * G, dtype=torch.float32, device=device)
    notes = torch.empty(heads, NOTES.value, dtype=torch.int32, device=device)
    scores = torch.empty(heads, max(1, scorers), dtype=torch.float32, device=device)
    out = torch.empty(B, R, 1, V, dtype=q.dtype, device=device)
    common = dict(
        scale=scale, G=G, D=D, V=V, L=L, VALID=valid_B is not None, SCORERS=scorers,
        BLOCK_D=max(16, triton.next_power_of_2(D)), BLOCK_V=max(16, triton.next_power_of_2(V)),
    )  # fmt: skip
    _attend_and_gate[(heads * (scorers + splits),)](
        q, k, v, pages.keys_PLD, pages.values_PLV, pages.table_BHN, pages.count_BH, pages.missed_BH,
        ring.keys_BHWD, ring.values_BHWV, ring.closed_BHW, seen_B, valid, given,
        *weights,
        parts, stats, notes, scores,
        heads, H, N, W, sinks, split, ring_splits, splits,
        **common, EARLY=bool(lag and W == 1), U=U, UNITS=UNITS, BLOCK_E=CHANNELS,
        BLOCK_G=max(16, triton.next_power_of_2(G)), BLOCK_M=BLOCK,
        PRECISION="ieee" if pages.keys_PLD.dtype == torch.float32 else "tf32",
        num_warps=4 if max(D, V) <= 128 else 8,  # a wider head does not fit into the registers of 4
    )  # fmt: skip
    _finish[(heads, G)](
        q, k, v, pages.keys_PLD, pages.values_PLV, pages.position_PL, pages.count_BH, pages.missed_BH,
        ring.keys_BHWD, ring.values_BHWV, ring.closed_BHW, seen_B, valid, given,
        parts, stats, notes, scores, out,
        H, W, sinks, split, ring_splits, splits,
        **common, offset=offset, threshold=threshold, LAG=lag, BLOCK_P=triton.next_power_of_2(max(1, scorers)),
        BLOCK_T=min(32, triton.next_power_of_2(splits)), num_warps=4,
    )  # fmt: skip
    return out

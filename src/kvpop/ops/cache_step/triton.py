"""The step as three launches: one finds the victim and writes the new token, one attends over splits of the slots, one merges.

A split of a few hundred slots is read by one program; at batch 1 with 8 KV heads 32 splits keep the whole GPU busy. Logits and
sums are float32. Nothing is asked of the host: positions and lengths are read on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpop.ops.cache_step.api import Layout

# Shapes: B rows, H KV heads, G query heads per KV head, M slots, D key dim, V value dim, P pinned spans, S splits, N slots of
# all heads of a row.

PROGRAMS = 264
"""About how many programs the attention is spread over: two per multiprocessor of an H100 or H200."""
BLOCK = 64
"""Slots that one program loads at once."""


@triton.jit
def _overwrite(
    keys, values, position, priority, k, v, fresh, now, valid, pins, lengths, bases,
    H, M, N, sinks, window,
    D: tl.constexpr, V: tl.constexpr, P: tl.constexpr, DUE: tl.constexpr, VALID: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    row = head // H
    t = tl.load(now + row).to(tl.int32)
    real = tl.load(valid + row) != 0 if VALID else True
    size = tl.load(lengths + head % H) if LAYOUT else M
    base = row * N + tl.load(bases + head % H) if LAYOUT else head * M
    score = tl.load(fresh + head)
    best_value = float("inf")
    best_position = 2147483647
    best_slot = 0
    for start in range(0, size, BLOCK_M):
        offset = start + tl.arange(0, BLOCK_M)
        inside = offset < size
        where = tl.load(position + head * M + offset, mask=inside, other=-1)
        value = tl.load(priority + head * M + offset, mask=inside, other=0.0)
        if DUE:
            is_due = inside & (where == t - window)
            value = tl.where(is_due, score, value)
            tl.store(priority + head * M + offset, value, mask=is_due & real)
        value = tl.where(value == value, value, float("-inf"))
        eligible = inside & (where >= sinks) & (where <= t - window)
        for p in tl.static_range(P):
            begin = tl.load(pins + (row * P + p) * 2)
            end = tl.load(pins + (row * P + p) * 2 + 1)
            eligible &= ~((where >= begin) & (where < end))
        lowest = tl.min(tl.where(eligible, value, float("inf")), 0)
        oldest = tl.min(tl.where(eligible & (value == lowest), where, 2147483647), 0)
        slot = tl.min(tl.where(eligible & (where == oldest), offset, 2147483647), 0)
        better = (lowest < best_value) | ((lowest == best_value) & (oldest < best_position))
        best_slot = tl.where(better, slot, best_slot)
        best_position = tl.where(better, oldest, best_position)
        best_value = tl.where(better, lowest, best_value)
    target = tl.where(t >= size, best_slot, t).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    tl.store(keys + (base + target) * D + d, tl.load(k + head * D + d, mask=d < D), mask=(d < D) & real)
    tl.store(values + (base + target) * V + d, tl.load(v + head * V + d, mask=d < V), mask=(d < V) & real)
    tl.store(position + head * M + target, t, mask=real)
    tl.store(priority + head * M + target, 0.0 if DUE else score, mask=real)


@triton.jit
def _append(
    keys, values, position, k, v, now, valid,
    H, M, D: tl.constexpr, V: tl.constexpr, VALID: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    row = head // H
    t = tl.load(now + row)
    real = t < M
    if VALID:
        real &= tl.load(valid + row) != 0
    at = head * M + t
    d = tl.arange(0, BLOCK_D)
    tl.store(keys + at * D + d, tl.load(k + head * D + d, mask=d < D), mask=(d < D) & real)
    tl.store(values + at * V + d, tl.load(v + head * V + d, mask=d < V), mask=(d < V) & real)
    tl.store(position + at, t.to(tl.int32), mask=real)


@triton.jit
def _absorb(high, mass, summed, query, key, value, held, scale: tl.constexpr, PRECISION: tl.constexpr):
    """The running maximum, sum and output with these keys and values, of those that are held."""
    logit = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    logit = tl.where(held, logit, float("-inf"))
    higher = tl.maximum(high, tl.max(logit, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    weight = tl.exp(logit - safe[:, None])
    shrink = tl.exp(high - safe)
    mass = mass * shrink + tl.sum(weight, 1)
    summed = summed * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=PRECISION)
    return higher, mass, summed


@triton.jit
def _highest(stats, first, count, g, highest, G: tl.constexpr, BLOCK_T: tl.constexpr):
    """The largest logit of a query head in splits first .. first + count, or ``highest``; 0 for -inf."""
    s = tl.arange(0, BLOCK_T)
    for start in range(0, count, BLOCK_T):
        at = (first + start + s) * (2 * G) + g
        highest = tl.maximum(highest, tl.max(tl.load(stats + at, mask=start + s < count, other=float("-inf")), 0))
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def _merged(
    stats, parts, first, count, g, highest, mass, summed, e, G: tl.constexpr, V: tl.constexpr, BLOCK_T: tl.constexpr
):
    """The output of a query head: what these splits came to beside what is there, relative to exp(highest)."""
    s = tl.arange(0, BLOCK_T)
    for start in range(0, count, BLOCK_T):
        inside = start + s < count
        at = first + start + s
        shrink = tl.exp(tl.load(stats + at * (2 * G) + g, mask=inside, other=float("-inf")) - highest)
        mass += tl.sum(shrink * tl.load(stats + at * (2 * G) + G + g, mask=inside, other=0.0), 0)
        part = tl.load(parts + (at[:, None] * G + g) * V + e, mask=inside[:, None] & (e < V), other=0.0)
        summed += tl.sum(shrink[:, None] * part, 0)
    return tl.where(mass > 0, summed / tl.where(mass > 0, mass, 1.0), 0.0)


@triton.jit
def _attend(
    q, keys, values, position, parts, stats, lengths, bases, count,
    H, M, N, split,
    scale: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, LAYOUT: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    splits = tl.num_programs(1)
    size = tl.load(lengths + head % H) if LAYOUT else M
    base = head // H * N + tl.load(bases + head % H) if LAYOUT else head * M
    if COUNT:  # the splits share what the row holds, however many slots there are
        size = tl.minimum(tl.load(count + head // H), M).to(tl.int32)
        split = tl.cdiv(tl.cdiv(size, splits), BLOCK_M) * BLOCK_M
    g, d, e = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    query = tl.load(q + (head * G + g[:, None]) * D + d, mask=(g[:, None] < G) & (d < D), other=0.0)
    high = tl.full([BLOCK_G], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_G], tl.float32)
    summed = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    for start in range(part * split, tl.minimum(part * split + split, size), BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        inside = (m < size) & (m < part * split + split)
        held = inside if COUNT else tl.load(position + head * M + m, mask=inside, other=-1) >= 0
        key = tl.load(keys + (base + m[:, None]) * D + d, mask=held[:, None] & (d < D), other=0.0)
        value = tl.load(values + (base + m[:, None]) * V + e, mask=held[:, None] & (e < V), other=0.0)
        high, mass, summed = _absorb(high, mass, summed, query, key, value, held, scale, PRECISION)
    at = head * splits + part
    tl.store(stats + at * (2 * G) + g, high, mask=g < G)
    tl.store(stats + at * (2 * G) + G + g, mass, mask=g < G)
    tl.store(parts + (at * G + g[:, None]) * V + e, summed, mask=(g[:, None] < G) & (e < V))


@triton.jit
def _merge(
    parts, stats, out, splits, G: tl.constexpr, V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    g = tl.program_id(1)
    e = tl.arange(0, BLOCK_V)
    highest = _highest(stats, head * splits, splits, g, tl.full([], float("-inf"), tl.float32), G, BLOCK_T)
    mass, summed = tl.zeros([], tl.float32), tl.zeros([BLOCK_V], tl.float32)
    result = _merged(stats, parts, head * splits, splits, g, highest, mass, summed, e, G, V, BLOCK_T)
    tl.store(out + (head * G + g) * V + e, result.to(out.dtype.element_ty), mask=e < V)


def overwrite(
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    priority: Tensor,
    k_BH1D: Tensor,
    v_BH1V: Tensor,
    fresh_BH1: Tensor,
    now_B: Tensor,
    sinks: int,
    window: int,
    due: bool,
    valid_B: Tensor | None,
    pins_BP2: Tensor | None,
    layout: Layout | None,
) -> None:
    """See ``api.overwrite``: one program a head."""
    (B, H, M), D, V = position.shape, keys.shape[-1], values.shape[-1]
    lengths, bases, N = (now_B, now_B, H * M) if layout is None else (layout.size_H, layout.base_H, layout.total)
    _overwrite[(B * H,)](
        keys, values, position, priority, k_BH1D.contiguous(), v_BH1V.contiguous(), fresh_BH1.contiguous(), now_B,
        now_B if valid_B is None else valid_B.contiguous(), now_B if pins_BP2 is None else pins_BP2, lengths, bases,
        H, M, N, sinks, window,
        D=D, V=V, P=0 if pins_BP2 is None else pins_BP2.shape[1], DUE=due, VALID=valid_B is not None,
        LAYOUT=layout is not None,
        BLOCK_M=min(4096, triton.next_power_of_2(M)), BLOCK_D=triton.next_power_of_2(max(D, V)), num_warps=8,
    )  # fmt: skip


def append(
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    k_BH1D: Tensor,
    v_BH1V: Tensor,
    now_B: Tensor,
    valid_B: Tensor | None,
) -> None:
    """See ``api.append``: one program a head."""
    (B, H, M), D, V = position.shape, keys.shape[-1], values.shape[-1]
    _append[(B * H,)](
        keys, values, position, k_BH1D.contiguous(), v_BH1V.contiguous(), now_B,
        now_B if valid_B is None else valid_B.contiguous(),
        H, M, D=D, V=V, VALID=valid_B is not None, BLOCK_D=triton.next_power_of_2(max(D, V)), num_warps=1,
    )  # fmt: skip


def attend_held(
    q_BR1D: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    scale: float,
    layout: Layout | None,
    count_B: Tensor | None,
) -> Tensor:
    """See ``api.attend_held``."""
    (B, H, M), D, V = position.shape, keys.shape[-1], values.shape[-1]
    lengths, bases, N = (position, position, H * M) if layout is None else (layout.size_H, layout.base_H, layout.total)
    R = q_BR1D.shape[1]
    G = R // H
    blocks = triton.cdiv(triton.cdiv(N, H), BLOCK)  # of a head of average size: larger ones have more splits
    splits = max(1, min(triton.cdiv(PROGRAMS, B * H), blocks))
    split = triton.cdiv(blocks, splits) * BLOCK
    splits = triton.cdiv(M, split)
    parts = torch.empty(B * H, splits, G, V, dtype=torch.float32, device=keys.device)
    stats = torch.empty(B * H, splits, 2 * G, dtype=torch.float32, device=keys.device)
    out = torch.empty(B, R, 1, V, dtype=q_BR1D.dtype, device=keys.device)
    _attend[(B * H, splits)](
        q_BR1D.contiguous(), keys, values, position, parts, stats, lengths, bases,
        position if count_B is None else count_B,
        H, M, N, split,
        scale=scale, G=G, D=D, V=V, LAYOUT=layout is not None, COUNT=count_B is not None,
        BLOCK_G=max(16, triton.next_power_of_2(G)), BLOCK_M=BLOCK,
        BLOCK_D=max(16, triton.next_power_of_2(D)), BLOCK_V=max(16, triton.next_power_of_2(V)),
        PRECISION="ieee" if keys.dtype == torch.float32 else "tf32", num_warps=4,
    )  # fmt: skip
    _merge[(B * H, G)](
        parts, stats, out, splits, G=G, V=V,
        BLOCK_T=min(32, triton.next_power_of_2(splits)), BLOCK_V=max(16, triton.next_power_of_2(V)),
    )  # fmt: skip
    return out

"""Future mass as one fused pass: a program holds a tile of keys, walks over the queries after them and adds up what they send.

Only a number a key is carried from block to block, a running log-sum-exp in float32 and to base 2; there are no values.
Each result is written by one program, in one order: no atomics. Nothing is asked of the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Shapes: B batch, R = H * G query heads, H KV heads, G group, S sequence, T a tile of keys, Q a block of queries, D head dim.

LARGEST_HEAD_DIM = 256


@dataclass(frozen=True)
class Tiles:
    """Keys a program holds, queries it loads at once (powers of two from 16 on), its warps, and loads under way at a time."""

    keys: int
    queries: int
    warps: int
    stages: int


HALF = Tiles(keys=128, queries=64, warps=8, stages=3)
"""115 registers a thread: two programs fit on a multiprocessor, and one multiplies while the other takes exponentials."""
SINGLE = Tiles(keys=64, queries=32, warps=8, stages=2)
"""For float32, whose products take no tensor cores and hold their operands in registers: larger tiles spill."""


@triton.jit
def _add_blocks(
    high_T, mass_T, key_TD, q, lse, first_T, stop_T, start, end, S, q_step, scale, power,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add queries [start, end), in whole blocks: all of them for all keys, or if MASKED those in [first, stop) of each key."""
    i_Q, d_D = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    block = q + tl.cast(start, tl.int64) * q_step  # only offsets inside a block are 32 bits wide
    for at in range(start, end, BLOCK_Q):
        query_Q = at + i_Q
        where_QD = i_Q[:, None] * q_step + d_D
        if MASKED:
            query_QD = tl.load(block + where_QD, mask=(query_Q[:, None] < S) & (d_D < D), other=0.0)
            lse_Q = tl.load(lse + query_Q, mask=query_Q < S, other=0.0)
        else:
            if D == BLOCK_D:
                query_QD = tl.load(block + where_QD)
            else:
                query_QD = tl.load(block + where_QD, mask=d_D < D, other=0.0)
            lse_Q = tl.load(lse + query_Q)
        # A query without keys sends nothing: its share is exp(score - inf) = 0.
        sent_Q = tl.where(lse_Q == float("-inf"), float("inf"), lse_Q) * power
        share_TQ = tl.dot(key_TD, tl.trans(query_QD), input_precision=PRECISION) * scale - sent_Q
        if MASKED:
            counts_TQ = (query_Q >= first_T[:, None]) & (query_Q < stop_T[:, None])
            share_TQ = tl.where(counts_TQ, share_TQ, float("-inf"))
        higher_T = tl.maximum(high_T, tl.max(share_TQ, 1))
        safe_T = tl.where(higher_T == float("-inf"), 0.0, higher_T)
        mass_T = mass_T * tl.exp2(high_T - safe_T) + tl.sum(tl.exp2(share_TQ - safe_T[:, None]), 1)
        high_T = higher_T
        block += q_step * BLOCK_Q
    return high_T, mass_T


@triton.jit
def _future_mass(
    q, k, lse, end, out,
    heads, R, G, S, window, last, q_batch, q_head, q_step, k_batch, k_head, k_step, scale, power,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Early keys have the most queries after them: their tiles come first, in all heads, so that no long program ends alone.
    tile, head = tl.program_id(0) // heads, (tl.program_id(0) % heads).to(tl.int64)
    b, r = head // R, head % R
    t_T, d_D = tile * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    key = k + b * k_batch + (r // G) * k_head
    key_TD = tl.load(key + t_T.to(tl.int64)[:, None] * k_step + d_D, mask=(t_T[:, None] < S) & (d_D < D), other=0.0)
    # Each key counts the queries in [first, stop); a key without any is left out of the bounds, what it adds up is not used.
    end_T = tl.load(end + b * S + t_T, mask=t_T < S, other=0)
    first_T = t_T + window
    stop_T = tl.minimum(tl.minimum(end_T, S).to(tl.int32), t_T + last + 1)
    alive_T = stop_T > first_T
    begin = tl.min(tl.where(alive_T, first_T, S), 0)
    until = tl.max(tl.where(alive_T, stop_T, 0), 0)
    common_begin = tl.max(tl.where(alive_T, first_T, 0), 0)
    common_end = tl.min(tl.where(alive_T, stop_T, S), 0)
    # [begin, common) and [tail, until) need the mask, the blocks between them count for every key.
    common = begin + tl.cdiv(tl.maximum(common_begin - begin, 0), BLOCK_Q) * BLOCK_Q
    tail = common + tl.maximum(common_end - common, 0) // BLOCK_Q * BLOCK_Q
    high_T = tl.full([BLOCK_T], float("-inf"), tl.float32)
    mass_T = tl.zeros([BLOCK_T], tl.float32)
    queries, row = q + b * q_batch + r * q_head, head * S
    high_T, mass_T = _add_blocks(
        high_T, mass_T, key_TD, queries, lse + row, first_T, stop_T, begin, tl.minimum(common, until), S, q_step, scale,
        power, D, BLOCK_Q, BLOCK_D, True, PRECISION,
    )  # fmt: skip
    high_T, mass_T = _add_blocks(
        high_T, mass_T, key_TD, queries, lse + row, first_T, stop_T, common, tail, S, q_step, scale,
        power, D, BLOCK_Q, BLOCK_D, False, PRECISION,
    )  # fmt: skip
    high_T, mass_T = _add_blocks(
        high_T, mass_T, key_TD, queries, lse + row, first_T, stop_T, tail, until, S, q_step, scale,
        power, D, BLOCK_Q, BLOCK_D, True, PRECISION,
    )  # fmt: skip
    nothing_T = (mass_T == 0.0) | ~alive_T
    total_T = (high_T + tl.log2(tl.where(nothing_T, 1.0, mass_T))) * 0.6931471805599453
    tl.store(out + row + t_T, tl.where(nothing_T, float("-inf"), total_T), mask=t_T < S)


@torch.no_grad()
def log_mass(
    q_BRSD: Tensor,
    k_BHSD: Tensor,
    lse_BRS: Tensor,
    end_BS: Tensor,
    scale: float,
    window: int,
    power: float,
    lookahead: int | None,
    tiles: Tiles | None = None,
) -> Tensor:
    """See ``api.future_log_mass``; returns float32, without memory beside the result. ``tiles`` change the time only.

    Raises ValueError for inputs that are not float32, float16 or bfloat16 or not of one dtype, and for D > 256.
    """
    (B, R, S, D), H = q_BRSD.shape, k_BHSD.shape[1]
    if q_BRSD.dtype not in (torch.float32, torch.float16, torch.bfloat16) or k_BHSD.dtype != q_BRSD.dtype:
        raise ValueError(
            f"impl='triton' takes q and k in float32, float16 or bfloat16, both in the same, got {q_BRSD.dtype} and "
            f"{k_BHSD.dtype}: use impl='reference'"
        )
    if D > LARGEST_HEAD_DIM:
        raise ValueError(f"impl='triton' takes heads of up to {LARGEST_HEAD_DIM} channels, got {D}")
    out_BRS = torch.empty(B, R, S, dtype=torch.float32, device=q_BRSD.device)
    if not out_BRS.numel():
        return out_BRS
    # Heads are often views of [B, S, R, D]: strides spare a copy, as long as the channels of a token lie side by side.
    q_BRSD, k_BHSD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BRSD, k_BHSD))
    lse_BRS, end_BS = lse_BRS.float().contiguous(), end_BS.contiguous()
    exact = q_BRSD.dtype == torch.float32
    tiles = tiles or (SINGLE if exact else HALF)
    window = min(window, S)
    last = S if lookahead is None else window + min(lookahead, S)
    _future_mass[(triton.cdiv(S, tiles.keys) * B * R,)](
        q_BRSD, k_BHSD, lse_BRS, end_BS, out_BRS,
        B * R, R, R // H, S, window, last, *q_BRSD.stride()[:3], *k_BHSD.stride()[:3],
        scale * power * math.log2(math.e), power * math.log2(math.e),
        D=D, BLOCK_T=tiles.keys, BLOCK_Q=tiles.queries, BLOCK_D=max(16, triton.next_power_of_2(D)),
        PRECISION="ieee" if exact else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out_BRS

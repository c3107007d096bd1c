"""Block sums as one fused pass: a program holds a tile of keys and walks over the query heads of every block after them.

Of the weights only the largest over the heads so far is carried, [keys, queries] in float32 and to base 2; a block leaves a
number a key. Each result is written by one program, in one order: no atomics. Nothing is asked of the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpop.ops.residual_mass.api import KERNEL_DTYPES, LARGEST_HEAD_DIM

# Shapes: N rows, R = H * G query heads, H KV heads, G group, L longest row, T a tile of keys, Q a part of a block of queries,
# D head dim, C blocks of queries.


@dataclass(frozen=True)
class Tiles:
    """Keys a program holds, the most queries it loads at once (powers of two from 16 on), its warps, and loads under way at
    a time."""

    keys: int
    queries: int
    warps: int
    stages: int


HALF = Tiles(keys=128, queries=64, warps=8, stages=3)
"""Up to 128 registers a thread in heads of up to 128 channels: two programs fit on a multiprocessor."""
SINGLE = Tiles(keys=64, queries=32, warps=8, stages=2)
"""For float32, whose products take no tensor cores and hold their operands in registers: larger tiles spill."""


@triton.jit
def _block_mass(
    q, k, lse, length, out,
    H, L, C, block, tiles, parts, q_row, q_head, q_step, k_row, k_head, k_step, lse_row, lse_head, lse_step, scale, power,
    G: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The tiles of a head run side by side and share its queries in L2. Early keys have the most queries after them: first.
    head, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    n, h = head // H, head % H
    t_T, i_Q, d_D = tile * BLOCK_T + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    key = k + n * k_row + h * k_head
    key_TD = tl.load(key + t_T.to(tl.int64)[:, None] * k_step + d_D, mask=(t_T[:, None] < L) & (d_D < D), other=0.0)
    queries = tl.minimum(tl.load(length + n), L).to(tl.int32)
    # Blocks [first, stop) have queries, and keys of the tile before them; the others get zeros.
    first = tl.minimum(tile * BLOCK_T // block + 1, C)
    stop = tl.maximum(tl.cdiv(queries, block), first)
    row = out + head * C * L + t_T
    for c in range(0, first):
        tl.store(row + tl.cast(c, tl.int64) * L, tl.zeros([BLOCK_T], tl.float32), mask=t_T < L)
    for c in range(stop, C):
        tl.store(row + tl.cast(c, tl.int64) * L, tl.zeros([BLOCK_T], tl.float32), mask=t_T < L)
    query, sent = q + n * q_row + h * G * q_head, lse + n * lse_row + h * G * lse_head
    mass_T = tl.zeros([BLOCK_T], tl.float32)
    best_TQ = tl.full([BLOCK_T, BLOCK_Q], float("-inf"), tl.float32)
    # One loop over heads in parts in blocks, so that loads run ahead from one block to the next.
    for i in range(0, (stop - first) * parts * G):
        g, part, c = tl.cast(i % G, tl.int64), i // G % parts, first + i // G // parts
        begin = tl.cast(c * block + part * BLOCK_Q, tl.int64)
        counts_Q = begin + i_Q < tl.minimum((c + 1) * block, queries)
        where_QD = i_Q[:, None] * q_step + d_D  # only offsets inside a part are 32 bits wide
        if D == BLOCK_D:
            query_QD = tl.load(query + g * q_head + begin * q_step + where_QD, mask=counts_Q[:, None], other=0.0)
        else:
            query_QD = tl.load(
                query + g * q_head + begin * q_step + where_QD, mask=counts_Q[:, None] & (d_D < D), other=0.0
            )
        lse_Q = tl.load(sent + g * lse_head + (begin + i_Q) * lse_step, mask=counts_Q, other=float("-inf"))
        # A query without keys sends nothing: its share is exp(score - inf) = 0.
        sent_Q = tl.where(lse_Q == float("-inf"), float("inf"), lse_Q) * power
        share_TQ = tl.dot(key_TD, tl.trans(query_QD), input_precision=PRECISION) * scale - sent_Q
        if LARGEST:
            best_TQ = tl.maximum(best_TQ, share_TQ, propagate_nan=tl.PropagateNan.ALL)
            if g == G - 1:
                mass_T += tl.sum(tl.exp2(best_TQ), 1)
                best_TQ = tl.full([BLOCK_T, BLOCK_Q], float("-inf"), tl.float32)
        else:
            mass_T += tl.sum(tl.exp2(share_TQ), 1)
        if (g == G - 1) & (part == parts - 1):
            total_T = mass_T if LARGEST else mass_T / G
            tl.store(row + tl.cast(c, tl.int64) * L, tl.where(t_T < c * block, total_T, 0.0), mask=t_T < L)
            mass_T = tl.zeros([BLOCK_T], tl.float32)


@torch.no_grad()
def block_mass(
    q_NRLD: Tensor,
    k_NHLD: Tensor,
    lse_NRL: Tensor,
    length_N: Tensor,
    scale: float,
    block: int,
    power: float,
    largest: bool,
    tiles: Tiles | None = None,
) -> Tensor:
    """See ``api.block_mass``; returns float32, without memory beside the result. ``largest``: the maximum over G, not the mean.
    ``tiles`` change the time, and the order of a sum over queries.

    Raises ValueError for inputs that are not float32, float16 or bfloat16 or not of one dtype, and for D > 256.
    """
    (N, R, L, D), H = q_NRLD.shape, k_NHLD.shape[1]
    if q_NRLD.dtype not in KERNEL_DTYPES or k_NHLD.dtype != q_NRLD.dtype:
        raise ValueError(
            f"impl='triton' takes q and k in float32, float16 or bfloat16, both in the same, got {q_NRLD.dtype} and "
            f"{k_NHLD.dtype}: use impl='reference'"
        )
    if D > LARGEST_HEAD_DIM:
        raise ValueError(f"impl='triton' takes heads of up to {LARGEST_HEAD_DIM} channels, got {D}")
    C = -(-L // block)
    out_NHCL = torch.empty(N, H, C, L, dtype=torch.float32, device=q_NRLD.device)
    if not out_NHCL.numel():
        return out_NHCL
    # Heads are often views of [N, L, R, D]: strides spare a copy, as long as the channels of a token lie side by side.
    q_NRLD, k_NHLD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_NRLD, k_NHLD))
    lse_NRL, length_N = lse_NRL.float(), length_N.contiguous()
    exact, G = q_NRLD.dtype == torch.float32, R // H
    tiles = tiles or (SINGLE if exact else HALF)
    queries = max(16, min(tiles.queries, triton.next_power_of_2(block)))
    across = triton.cdiv(L, tiles.keys)
    _block_mass[(across * N * H,)](
        q_NRLD, k_NHLD, lse_NRL, length_N, out_NHCL,
        H, L, C, block, across, triton.cdiv(block, queries), *q_NRLD.stride()[:3], *k_NHLD.stride()[:3], *lse_NRL.stride(),
        scale * power * math.log2(math.e), power * math.log2(math.e),
        G=G, D=D, BLOCK_T=tiles.keys, BLOCK_Q=queries, BLOCK_D=max(16, triton.next_power_of_2(D)),
        LARGEST=largest and G > 1, PRECISION="ieee" if exact else "tf32",
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out_NHCL

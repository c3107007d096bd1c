"""Attention of a chunk of queries to keys that stand anywhere, forward only: prefill in chunks, over what a cache holds.

A program has some rows (queries of one KV head, its query heads side by side) and goes over the blocks of keys between the
first and the last that any of its queries may see. Keys sorted by position make that a short way; nothing depends on it.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from kvpop.ops.sparse_attention.api import NEVER
from kvpop.ops.sparse_attention.triton_kernels import _absorb, _settled

# Shapes: B batch, R = H * G query heads, H KV heads, G query heads per KV head, Q queries, T keys, D key dim, V value dim,
# N blocks of keys.

ROWS, KEYS, WARPS, STAGES = 128, 64, 8, 3
WIDE = (32, 32, 4, 1)
"""The same for float32, which is multiplied exactly and so without tensor cores, and for heads above 128 channels."""


@triton.jit
def _attend(
    q, k, v, expiry, q_pos, k_pos, first, last, out, lse, H, Q, T, N, scale,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``scale`` includes log2(e)."""
    head = tl.program_id(1).to(tl.int64)  # of a batch row
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query, there = row // G, row < Q * G
    at = (head * G + row % G) * Q + query
    d, e, i = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, KEYS)
    tile = tl.load(q + at[:, None] * D + d, mask=there[:, None] & (d < D), other=0.0)
    now = tl.load(q_pos + head // H * Q + query, mask=there, other=0)
    earliest, latest = tl.min(tl.where(there, now, 2147483647), 0), tl.max(tl.where(there, now, -2147483648), 0)
    high = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, BLOCK_V], tl.float32)
    n = tl.arange(0, BLOCK_N)
    live = tl.load(first + head * N + n, mask=n < N, other=2147483647) <= latest
    live &= tl.load(last + head * N + n, mask=n < N, other=-2147483648) > earliest
    live &= n < N
    begin = tl.min(tl.where(live, n, N), 0) * KEYS
    end = tl.minimum(tl.max(tl.where(live, n + 1, 0), 0) * KEYS, T)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        t = start + i
        key = tl.load(k + (head * T + t[:, None]) * D + d, mask=(t < T)[:, None] & (d < D), other=0.0)
        value = tl.load(v + (head * T + t[:, None]) * V + e, mask=(t < T)[:, None] & (e < V), other=0.0)
        born = tl.load(k_pos + head * T + t, mask=t < T, other=2147483647)
        dies = tl.load(expiry + head * T + t, mask=t < T, other=-2147483648)
        keep = (born[None, :] <= now[:, None]) & (now[:, None] < dies[None, :])
        raw = tl.where(keep, tl.dot(tile, tl.trans(key), input_precision=PRECISION), float("-inf"))
        high, mass, summed = _absorb(raw, value, high, mass, summed, scale, PRECISION, True)
    result, normaliser = _settled(high, mass, summed)
    tl.store(out + at[:, None] * V + e, result.to(out.dtype.element_ty), mask=there[:, None] & (e < V))
    tl.store(lse + at, normaliser, mask=there)


def attend_chunk(
    q_BRQD: Tensor,
    k_BHTD: Tensor,
    v_BHTV: Tensor,
    expiry_BHT: Tensor,
    scale: float,
    q_pos_BQ: Tensor,
    k_pos_BHT: Tensor,
) -> tuple[Tensor, Tensor]:
    """See ``api.sparse_attention``, with positions; no gradient."""
    (B, R, Q, D), (H, T), V = q_BRQD.shape, k_BHTD.shape[1:3], v_BHTV.shape[-1]
    out, lse = v_BHTV.new_empty(B, R, Q, V), q_BRQD.new_empty(B, R, Q, dtype=torch.float32)
    if not out.numel():
        return out, lse
    wide = q_BRQD.element_size() == 4 or max(D, V) > 128
    rows, keys, warps, stages = WIDE if wide else (ROWS, KEYS, WARPS, STAGES)
    N = max(1, triton.cdiv(T, keys))
    k_pos, expiry = k_pos_BHT.int().contiguous(), expiry_BHT.clamp(-NEVER, NEVER).int().contiguous()
    spare = N * keys - T
    first = pad(k_pos, (0, spare), value=2147483647).view(B, H, N, keys).amin(-1)
    last = pad(expiry, (0, spare), value=-2147483648).view(B, H, N, keys).amax(-1)
    _attend[(triton.cdiv(Q * (R // H), rows), B * H)](
        q_BRQD.contiguous(), k_BHTD.contiguous(), v_BHTV.contiguous(), expiry, q_pos_BQ.int().contiguous(), k_pos,
        first, last, out, lse, H, Q, T, N, scale * math.log2(math.e),
        G=R // H, D=D, V=V, ROWS=rows, KEYS=keys, BLOCK_N=triton.next_power_of_2(N),
        BLOCK_D=max(16, triton.next_power_of_2(D)), BLOCK_V=max(16, triton.next_power_of_2(V)), STAGES=stages,
        PRECISION="ieee" if q_BRQD.element_size() == 4 else "tf32", num_warps=warps,
    )  # fmt: skip
    return out, lse

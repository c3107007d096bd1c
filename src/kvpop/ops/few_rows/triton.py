"""The product for few rows: every program reads some rows of the weights, once.

One row of x is multiplied and summed up where it lies; several are padded to a tile of the tensor cores. With ``OVERLAP`` a
product starts while the kernel before it still runs: it reads its first weights, which nobody writes, and then waits for x.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Shapes: R rows of x, E input features, N output features.

LARGEST = 64
"""Rows that a tile has room for."""
OVERLAP = True
"""Whether a product starts while the kernel before it still runs (programmatic dependent launch, on Hopper)."""
ONE = (4, 1024, 4, 1)
"""Output features of a program, input features at a time, warps, stages: for one row."""
SEVERAL = (32, 256, 4, 4)
"""The same for several."""


@triton.jit
def _product(
    x, weight, bias, y, R, N,
    E: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    e, r = tl.arange(0, BLOCK_E), tl.arange(0, ROWS)
    own = weight + n.to(tl.int64)[:, None] * E
    whole: tl.constexpr = E % BLOCK_E == 0
    if OVERLAP:
        gdc_launch_dependents()
    w = tl.load(own + e, mask=(n < N)[:, None] & (e < E), other=0.0, eviction_policy="evict_first")
    if OVERLAP:
        gdc_wait()
    if ROWS == 1:
        total = w.to(tl.float32) * tl.load(x + e, mask=e < E, other=0.0).to(tl.float32)
    else:
        tile = tl.load(x + r[:, None] * E + e, mask=(r < R)[:, None] & (e < E), other=0.0)
        total = tl.dot(tile, tl.trans(w), input_precision=PRECISION)
    for start in tl.range(BLOCK_E, E, BLOCK_E, num_stages=STAGES):
        at = start + e
        if whole:
            w = tl.load(own + at, mask=(n < N)[:, None], other=0.0, eviction_policy="evict_first")
        else:
            w = tl.load(own + at, mask=(n < N)[:, None] & (at < E), other=0.0, eviction_policy="evict_first")
        if ROWS == 1:
            total += w.to(tl.float32) * tl.load(x + at, mask=at < E, other=0.0).to(tl.float32)
        else:
            tile = tl.load(x + r[:, None] * E + at, mask=(r < R)[:, None] & (at < E), other=0.0)
            total = tl.dot(tile, tl.trans(w), total, input_precision=PRECISION)
    if ROWS == 1:
        result = tl.sum(total, 1)
        if BIAS:
            result += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(y + n, result.to(y.dtype.element_ty), mask=n < N)
    else:
        if BIAS:
            total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(y + r[:, None] * N + n, total.to(y.dtype.element_ty), mask=(r < R)[:, None] & (n < N))


@cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device can start before the one before them has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@torch.library.custom_op("kvpop::few_rows", mutates_args=())
def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b of a matrix x; one operation to ``torch.compile``."""
    (R, E), N = x.shape, len(weight)
    y = torch.empty(R, N, dtype=x.dtype, device=x.device)
    block_n, block_e, warps, stages = ONE if R == 1 else SEVERAL
    overlap = OVERLAP and overlaps(x.device)
    options = {"launch_pdl": True} if overlap else {}
    _product[(triton.cdiv(N, block_n),)](
        x, weight, x if bias is None else bias, y, R, N,
        E=E, BIAS=bias is not None, ROWS=1 if R == 1 else max(16, triton.next_power_of_2(R)),
        BLOCK_N=block_n, BLOCK_E=min(block_e, max(16, triton.next_power_of_2(E))), STAGES=stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", OVERLAP=overlap, num_warps=warps, **options,
    )  # fmt: skip
    return y


@product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(len(x), len(weight))

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

# Shapes: R rows of x, E input features, N rows of the weights, O output features.

LARGEST = 64
"""Rows that a tile has room for."""
OVERLAP = True
"""Whether a product starts while the kernel before it still runs (programmatic dependent launch, on Hopper)."""
ONE = (4, 1024, 4, 1)
"""Output features of a program, input features at a time, warps, stages: for one row."""
SEVERAL = (32, 256, 4, 4)
"""The same for several."""


@triton.jit
def _weights_at(own, e, inside, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """A tile of weights, read once and not to be kept."""
    if E % BLOCK_E == 0:
        tile = tl.load(own + e, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        tile = tl.load(own + e, mask=inside & (e < E), other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _add_up(
    total, gated, squares, x, norm, w, u, r, at, R,
    E: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums with the input features ``at``: products with w, with u, and squares of x."""
    if ROWS == 1:
        part = tl.load(x + at, mask=at < E, other=0.0).to(tl.float32)
        if NORM:
            squares += part * part
            part *= tl.load(norm + at, mask=at < E, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * part
        if GATED:
            gated += u.to(tl.float32) * part
    else:
        part = tl.load(x + r[:, None] * E + at, mask=(r < R)[:, None] & (at < E), other=0.0)
        if NORM:
            wide = part.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            part = (wide * tl.load(norm + at, mask=at < E, other=0.0).to(tl.float32)).to(part.dtype)
        total = tl.dot(part, tl.trans(w), total, input_precision=PRECISION)
        if GATED:
            gated = tl.dot(part, tl.trans(u), gated, input_precision=PRECISION)
    return total, gated, squares


@triton.jit
def _product(
    x, weight, bias, norm, residual, y, R, outputs, epsilon,
    E: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    e, r = tl.arange(0, BLOCK_E), tl.arange(0, ROWS)
    own, inside = weight + n.to(tl.int64)[:, None] * E, (n < outputs)[:, None]
    second = own + outputs.to(tl.int64) * E
    if OVERLAP:
        gdc_launch_dependents()
    w = _weights_at(own, e, inside, E, BLOCK_E)
    u = _weights_at(second, e, inside, E, BLOCK_E) if GATED else w
    if OVERLAP:
        gdc_wait()
    if ROWS == 1:
        total = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
        squares = tl.zeros([BLOCK_E], tl.float32)
    else:
        total = tl.zeros([ROWS, BLOCK_N], tl.float32)
        squares = tl.zeros([ROWS], tl.float32)
    gated = total
    total, gated, squares = _add_up(
        total, gated, squares, x, norm, w, u, r, e, R, E, NORM, GATED, ROWS, PRECISION
    )  # fmt: skip
    for start in tl.range(BLOCK_E, E, BLOCK_E, num_stages=STAGES):
        w = _weights_at(own, start + e, inside, E, BLOCK_E)
        u = _weights_at(second, start + e, inside, E, BLOCK_E) if GATED else w
        total, gated, squares = _add_up(
            total, gated, squares, x, norm, w, u, r, start + e, R, E, NORM, GATED, ROWS, PRECISION
        )  # fmt: skip
    if ROWS == 1:
        total, gated, squares = tl.sum(total, 1)[None, :], tl.sum(gated, 1)[None, :], tl.sum(squares, 0)
    if NORM:
        shrink = 1.0 / tl.sqrt(squares / E + epsilon)
        shrink = shrink if ROWS == 1 else shrink[:, None]
        total, gated = total * shrink, gated * shrink
    if BIAS:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
        if GATED:
            gated += tl.load(bias + outputs + n, mask=n < outputs, other=0.0).to(tl.float32)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * gated
    place, there = r[:, None] * outputs + n, (r < R)[:, None] & (n < outputs)
    if RESIDUAL:
        total += tl.load(residual + place, mask=there, other=0.0).to(tl.float32)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=there)


@cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device can start before the one before them has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@torch.library.custom_op("kvpop::few_rows", mutates_args=())
def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    epsilon: float,
    gated: bool,
    residual: Tensor | None,
) -> Tensor:
    """See ``api.linear``, of a matrix x; one operation to ``torch.compile``."""
    (R, E), N = x.shape, len(weight)
    outputs = N // 2 if gated else N
    y = torch.empty(R, outputs, dtype=x.dtype, device=x.device)
    block_n, block_e, warps, stages = ONE if R == 1 else SEVERAL
    overlap = OVERLAP and overlaps(x.device)
    options = {"launch_pdl": True} if overlap else {}
    _product[(triton.cdiv(outputs, block_n),)](
        x, weight, *(x if given is None else given for given in (bias, norm, residual)), y, R, outputs, epsilon,
        E=E, BIAS=bias is not None, NORM=norm is not None, GATED=gated, RESIDUAL=residual is not None,
        ROWS=1 if R == 1 else max(16, triton.next_power_of_2(R)), BLOCK_N=block_n,
        BLOCK_E=min(block_e, max(16, triton.next_power_of_2(E))), STAGES=stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", OVERLAP=overlap, num_warps=warps, **options,
    )  # fmt: skip
    return y


@product.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    epsilon: float,
    gated: bool,
    residual: Tensor | None,
) -> Tensor:
    return x.new_empty(len(x), len(weight) // 2 if gated else len(weight))

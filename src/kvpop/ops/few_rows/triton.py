"""The products for few rows: every program reads some of the weights, once, and nobody reads them again.

One row of x is multiplied and summed up where it lies. Several are padded to a tile of the tensor cores, and where the outputs
alone give too few programs, each takes a piece of the input features; the last of a tile to arrive sums the pieces, in their
order. With ``OVERLAP`` a product starts while the kernel before it still runs: it asks for its first weights, which nobody
writes, and then waits for x.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvpop.ops import device_of

# Shapes: R rows of x, E input features, N rows of the weights, O output features.

LARGEST = 64
"""Rows that a tile has room for."""
OVERLAP = True
"""Whether a product starts while the kernel before it still runs (programmatic dependent launch, on Hopper)."""
ONE = (2, 2048, 4, 1)
"""Output features of a program, input features at a time, warps, stages: for one row."""
ONE_NORMED = (4, 2048, 8, 1)
"""The same where x goes through a norm first: that is read as often as there are programs."""
ONE_GATED = (8, 512, 4, 1)
"""And where two products are multiplied: twice the rows of the weights."""
SEVERAL = (64, 128, 4, 3)
"""Rows of the weights, input features at a time, warps, stages: for several rows of x. Three programs on a multiprocessor."""
PIECES = (64, 128, 4, 6)
"""The same where these are too few to have three on each: one with more under way."""
PROGRAMS = 132
"""Programs of the latter at a time, one per multiprocessor of an H100 or H200; fewer tiles are cut into pieces."""
AHEAD = tl.constexpr(512)
"""Input features (1,024 bytes) of each row of the weights that a program of several rows asks for while it waits."""
SMALLEST = tl.constexpr(16)
"""Rows of the smallest tile."""


@triton.jit
def _weights_at(own, e, inside, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """A tile of weights, read once and not to be kept."""
    if E % BLOCK_E == 0:
        tile = tl.load(own + e, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        tile = tl.load(own + e, mask=inside & (e < E), other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _add_up(total, gated, squares, x, norm, w, u, at, E: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr):
    """The sums with the input features ``at``: products with w, with u, and squares of x."""
    part = tl.load(x + at, mask=at < E, other=0.0).to(tl.float32)
    if NORM:
        squares += part * part
        part *= tl.load(norm + at, mask=at < E, other=0.0).to(tl.float32)
    total += w.to(tl.float32) * part
    if GATED:
        gated += u.to(tl.float32) * part
    return total, gated, squares


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _one(
    x, weight, bias, norm, residual, y, outputs, epsilon,
    E: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    own, inside = weight + n.to(tl.int64)[:, None] * E, (n < outputs)[:, None]
    second = own + outputs.to(tl.int64) * E
    if OVERLAP:
        gdc_launch_dependents()
    w = _weights_at(own, e, inside, E, BLOCK_E)
    u = _weights_at(second, e, inside, E, BLOCK_E) if GATED else w
    if OVERLAP:
        gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    squares = tl.zeros([BLOCK_E], tl.float32)
    gated = total
    total, gated, squares = _add_up(total, gated, squares, x, norm, w, u, e, E, NORM, GATED)
    for start in tl.range(BLOCK_E, E, BLOCK_E, num_stages=STAGES):
        w = _weights_at(own, start + e, inside, E, BLOCK_E)
        u = _weights_at(second, start + e, inside, E, BLOCK_E) if GATED else w
        total, gated, squares = _add_up(total, gated, squares, x, norm, w, u, start + e, E, NORM, GATED)
    result, other = tl.sum(total, 1), tl.sum(gated, 1)
    if NORM:
        shrink = 1.0 / tl.sqrt(tl.sum(squares, 0) / E + epsilon)
        result, other = result * shrink, other * shrink
    if BIAS:
        result += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
        if GATED:
            other += tl.load(bias + outputs + n, mask=n < outputs, other=0.0).to(tl.float32)
    if GATED:
        result = _silu(result) * other
    if RESIDUAL:
        result += tl.load(residual + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(y + n, result.to(y.dtype.element_ty), mask=n < outputs)


@triton.jit
def _normed(x, norm, y, epsilon, E: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * E
    wide = tl.load(x + row + e, mask=e < E, other=0.0).to(tl.float32)
    shrink = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / E + epsilon)
    wide *= shrink * tl.load(norm + e, mask=e < E, other=0.0).to(tl.float32)
    tl.store(y + row + e, wide.to(y.dtype.element_ty), mask=e < E)


@triton.jit
def _several(
    x, weight, bias, residual, y, parts, arrived, R, outputs,
    E: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr, ASK: tl.constexpr,
):  # fmt: skip
    """Half of a gated tile are rows of the first half of the weights, the others those that belong to them in the second."""
    OWN: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    tile, piece = tl.program_id(0), tl.program_id(1)
    i, e, r = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_E), tl.arange(0, ROWS)
    n = tile * OWN + i % OWN
    inside = n < outputs
    own = weight + (n + i // OWN * outputs).to(tl.int64) * E
    first = piece * PIECE
    if ASK:
        asked = tl.where(inside, own, weight) + tl.minimum(first, E - AHEAD)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 1024; mov.u32 $0, 0;", "=r,l", [asked.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if OVERLAP:
        gdc_wait()
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in tl.range(first, tl.minimum(first + PIECE, E), BLOCK_E, num_stages=STAGES):
        at = start + e
        w = _weights_at(own[:, None], at, inside[:, None], E, BLOCK_E)
        there = (r < R)[:, None] if E % BLOCK_E == 0 else (r < R)[:, None] & (at < E)
        part = tl.load(x + r[:, None] * E + at, mask=there, other=0.0)
        total = tl.dot(w, tl.trans(part), total, input_precision=PRECISION)
    if OVERLAP:
        gdc_launch_dependents()
    last = True
    if PIECES > 1:
        place = i[:, None] * ROWS + r
        tl.store(parts + (tile * PIECES + piece) * (BLOCK_N * ROWS) + place, total)
        tl.debug_barrier()  # what any thread has written is there before one of them says so
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PIECES - 1
    if last:
        if PIECES > 1:
            total = tl.zeros([BLOCK_N, ROWS], tl.float32)
            for p in tl.static_range(PIECES):
                total += tl.load(parts + (tile * PIECES + p) * (BLOCK_N * ROWS) + place, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
        if BIAS:
            total += tl.load(bias + n + i // OWN * outputs, mask=inside, other=0.0).to(tl.float32)[:, None]
        if GATED:
            result, other = tl.split(tl.permute(tl.reshape(total, [2, OWN, ROWS]), [1, 2, 0]))
            result = _silu(result) * other
        else:
            result = total
        column = tile * OWN + tl.arange(0, OWN)
        out, there = r * outputs + column[:, None], (r < R) & (column < outputs)[:, None]
        if RESIDUAL:
            result += tl.load(residual + out, mask=there, other=0.0).to(tl.float32)
        tl.store(y + out, result.to(y.dtype.element_ty), mask=there)


@cache
def overlaps(device: torch.device) -> bool:
    """Whether kernels on this device can start before the one before them has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def division(outputs: int, E: int, gated: bool) -> tuple[tuple[int, ...], int, int]:
    """Of a product of several rows: its setting, tiles of outputs, and in how many pieces, a power of 2, each is multiplied."""
    tiles = triton.cdiv(outputs, PIECES[0] // 2 if gated else PIECES[0])
    if tiles > PROGRAMS:
        return SEVERAL, triton.cdiv(outputs, SEVERAL[0] // 2 if gated else SEVERAL[0]), 1
    most = max(1, min(PROGRAMS // tiles, E // PIECES[1]))
    return PIECES, tiles, 1 << (most.bit_length() - 1)


def most_tiles(N: int) -> int:
    """Tiles of N rows of weights, at most."""
    return triton.cdiv(N, PIECES[0])


def _launched(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    epsilon: float,
    gated: bool,
    residual: Tensor | None,
    arrived: Tensor | None,
) -> Tensor:
    (R, E), N = x.shape, len(weight)
    outputs = N // 2 if gated else N
    y = torch.empty(R, outputs, dtype=x.dtype, device=x.device)
    overlap = OVERLAP and overlaps(x.device)
    options = {"launch_pdl": True} if overlap else {}
    around = dict(E=E, BIAS=bias is not None, GATED=gated, RESIDUAL=residual is not None, OVERLAP=overlap)
    bias, residual, scale = (x if given is None else given for given in (bias, residual, norm))
    if R == 1:
        block_n, block_e, warps, stages = ONE_GATED if gated else ONE if norm is None else ONE_NORMED
        _one[(triton.cdiv(outputs, block_n),)](
            x, weight, bias, scale, residual, y, outputs, epsilon, **around, NORM=norm is not None, BLOCK_N=block_n,
            BLOCK_E=min(block_e, triton.next_power_of_2(E)), STAGES=stages, num_warps=warps, **options,
        )  # fmt: skip
        return y
    if norm is not None:
        x, given = torch.empty_like(x), x
        _normed[(R,)](
            given, scale, x, epsilon, E=E, BLOCK=triton.next_power_of_2(E), OVERLAP=overlap, num_warps=8, **options
        )
    (block_n, block_e, warps, stages), tiles, count = division(outputs, E, gated)
    rows, block_e = max(SMALLEST.value, triton.next_power_of_2(R)), min(block_e, max(16, triton.next_power_of_2(E)))
    stages = 1 if x.dtype == torch.float32 else stages  # twice the bytes
    around["OVERLAP"] = overlap = (
        overlap and tiles <= PROGRAMS
    )  # else many programs of the next product would be in the way
    ask = overlap and x.element_size() == 2 and E % 8 == 0 and AHEAD.value <= E and weight.data_ptr() % 16 == 0
    parts = x
    if count > 1:
        parts = torch.empty(tiles * count * block_n * rows, dtype=torch.float32, device=x.device)
        if arrived is None:
            arrived = torch.zeros(tiles, dtype=torch.int32, device=x.device)
    _several[(tiles, count)](
        x, weight, bias, residual, y, parts, x if arrived is None else arrived, R, outputs, **around, ROWS=rows,
        BLOCK_N=block_n, BLOCK_E=block_e, PIECES=count, PIECE=triton.cdiv(triton.cdiv(E, block_e), count) * block_e,
        STAGES=stages, PRECISION="ieee" if x.dtype == torch.float32 else "tf32", ASK=ask, num_warps=warps,
        **(options if overlap else {}),
    )  # fmt: skip
    return y


@torch.library.custom_op("kvpop::few_rows", mutates_args=())
def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    epsilon: float,
    gated: bool,
    residual: Tensor | None,
    arrived: Tensor | None,
) -> Tensor:
    """See ``api.linear``, of a matrix x; one operation to ``torch.compile``. ``arrived``: zeros before and afterwards."""
    with device_of(x):
        return _launched(x, weight, bias, norm, epsilon, gated, residual, arrived)


@product.register_fake
def _(x: Tensor, weight: Tensor, bias: object, norm: object, epsilon: float, gated: bool, *_: object) -> Tensor:
    return x.new_empty(len(x), len(weight) // 2 if gated else len(weight))

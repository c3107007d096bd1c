"""Products for few rows of x, with what stands around them in a decoder layer: in decoding they are the reading of weights."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from kvpop.ops import HAS_TRITON, interpreted

# Shapes: E input features, N rows of the weights, O output features (N, or N / 2 where gated).

Impl = Literal["reference", "triton"]
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_ROWS = 32
"""Rows up to which the kernel is taken."""

_COUNTERS: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

Norm = tuple[Tensor, float]
"""The weights [E] of an RMSNorm, and its epsilon."""


def takes(weight: Tensor) -> bool:
    """Whether the kernel is the one to use for few rows of an input of this device and dtype: a GPU, half precision."""
    return weight.device.type == "cuda" and weight.dtype in (torch.float16, torch.bfloat16) and HAS_TRITON


def counters(weight_NE: Tensor, rows: int | None = None) -> Tensor | None:
    """Zeros that the kernel counts with, for ``linear``'s ``arrived``; None where it is not the one to use. The same every
    time, as long as these weights live: a captured graph may use them. ``rows``: N of a product that only begins with these.
    """
    if not takes(weight_NE):
        return None
    from kvpop.ops.few_rows.triton import most_tiles

    tiles = most_tiles(len(weight_NE) if rows is None else rows)
    found = _COUNTERS.get(weight_NE)
    if found is None or len(found) != tiles or found.device != weight_NE.device:
        with torch.inference_mode(False):
            found = _COUNTERS[weight_NE] = torch.zeros(tiles, dtype=torch.int32, device=weight_NE.device)
    return found


def kernel_or_reference(x: Tensor) -> Impl:
    """The implementation for an input like this: Triton for few rows where it ``takes`` them, the reference elsewhere."""
    return "triton" if takes(x) and 0 < x.numel() <= MOST_ROWS * x.shape[-1] else "reference"


def linear(
    x_E: Tensor,
    weight_NE: Tensor,
    bias_N: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual_O: Tensor | None = None,
    arrived: Tensor | None = None,
    impl: Impl = "reference",
) -> Tensor:
    """y = W x + b over the last dimension of x, which may have others: [..., O] in the dtype of x. More, if asked for:

    - ``norm``: of g * x / sqrt(mean(x^2) + epsilon) in place of x
    - ``gated``: silu(first half of y) * second half of y
    - ``residual``: [..., O], added in the end

    ``arrived``: the ``counters`` of these weights, for no two products at a time; without them the kernel makes some.

    "triton" rounds once, at the end, and reads the weights once for all rows, of which it takes up to 64; it has no gradient.
    On a GPU it may read weights while the kernel before it still runs: that must not be one that writes them.
    Raises ValueError for an unknown ``impl``, and from "triton" off a GPU (Triton's interpreter aside), for shapes that do not
    fit, for dtypes that differ or that are not float32, float16 or bfloat16, weights that are not contiguous, and more rows.
    """
    if impl == "reference":
        from kvpop.ops.few_rows.reference import linear

        return linear(x_E, weight_NE, bias_N, norm, gated, residual_O)
    if impl != "triton":
        raise ValueError(f"unknown impl {impl!r}: choose {', '.join(map(repr, get_args(Impl)))}")
    if x_E.device.type == "cpu" and not interpreted():
        raise ValueError("impl='triton' needs a GPU: use impl='reference'")
    from kvpop.ops.few_rows.triton import LARGEST, most_tiles, product

    (N, E), scale = weight_NE.shape, None if norm is None else norm[0]
    outputs = (*x_E.shape[:-1], N // 2 if gated else N)
    if gated and N % 2:
        raise ValueError(f"shapes do not fit: weight {(N, E)} has no two halves of rows")
    fit = {"x": (x_E.shape[-1:], (E,))}
    fit |= {"bias": (bias_N.shape, (N,))} if bias_N is not None else {}
    fit |= {"norm": (scale.shape, (E,))} if scale is not None else {}
    fit |= {"residual": (residual_O.shape, outputs)} if residual_O is not None else {}
    fit |= {"counters": (arrived.shape, (most_tiles(N),))} if arrived is not None else {}
    if wrong := [name for name, (have, need) in fit.items() if tuple(have) != need]:
        raise ValueError(f"shapes do not fit: {wrong[0]}, with x {tuple(x_E.shape)} and weight {(N, E)}, gated {gated}")
    tensors = [y for y in (x_E, weight_NE, bias_N, scale, residual_O) if y is not None]
    if x_E.dtype not in KERNEL_DTYPES or any(y.dtype != x_E.dtype for y in tensors):
        raise ValueError(
            f"impl='triton' takes one dtype of float32, float16 and bfloat16, got {[y.dtype for y in tensors]}"
        )
    if not E:
        raise ValueError("impl='triton' needs at least 1 input feature, got 0")
    rows = x_E.numel() // E
    if rows > LARGEST:
        raise ValueError(f"impl='triton' takes at most {LARGEST} rows, got {rows}")
    if not weight_NE.is_contiguous():
        raise ValueError(f"impl='triton' takes contiguous weights, got strides {weight_NE.stride()}")
    if not rows:
        return x_E.new_empty(outputs)
    bias_N, scale = (None if y is None else y.contiguous() for y in (bias_N, scale))
    residual = None if residual_O is None else residual_O.reshape(rows, -1).contiguous()
    epsilon = 0.0 if norm is None else float(norm[1])
    x_RE = x_E.reshape(rows, E).contiguous()
    return product(x_RE, weight_NE, bias_N, scale, epsilon, gated, residual, arrived).view(outputs)

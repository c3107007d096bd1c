"""x W^T + b for few rows of x: decoding, where a product is the reading of its weights."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

from kvpop.ops import interpreted

# Shapes: E input features, N output features.

Impl = Literal["reference", "triton"]
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_ROWS = 1
"""Rows up to which the kernel is faster than the library's product."""
HAS_TRITON = find_spec("triton") is not None


def takes(weight: Tensor) -> bool:
    """Whether the kernel is the one to use for few rows of an input of this device and dtype: a GPU, half precision."""
    return weight.device.type == "cuda" and weight.dtype in (torch.float16, torch.bfloat16) and HAS_TRITON


def kernel_or_reference(x: Tensor) -> Impl:
    """The implementation for an input like this: Triton for few rows where it ``takes`` them, the reference elsewhere."""
    return "triton" if takes(x) and 0 < x.numel() <= MOST_ROWS * x.shape[-1] else "reference"


def linear(x_E: Tensor, weight_NE: Tensor, bias_N: Tensor | None = None, *, impl: Impl = "reference") -> Tensor:
    """y_n = sum_e x_e W_ne + b_n, over the last dimension of x, which may have others: [..., N] in the dtype of x.

    "triton" sums in float32 and reads the weights once for all rows, of which it takes up to 64; it carries no gradient.
    Raises ValueError for an unknown ``impl``, and from "triton" off a GPU (Triton's interpreter aside), for shapes that do not
    fit, for dtypes that differ or that are not float32, float16 or bfloat16, weights that are not contiguous, and more rows.
    """
    if impl == "reference":
        from kvpop.ops.few_rows.reference import linear

        return linear(x_E, weight_NE, bias_N)
    if impl != "triton":
        raise ValueError(f"unknown impl {impl!r}: choose {', '.join(map(repr, get_args(Impl)))}")
    from kvpop.ops.few_rows.triton import LARGEST, product

    if x_E.device.type == "cpu" and not interpreted():
        raise ValueError("impl='triton' needs a GPU: use impl='reference'")
    N, E = weight_NE.shape
    if x_E.shape[-1] != E or (bias_N is not None and bias_N.shape != (N,)):
        bias = None if bias_N is None else tuple(bias_N.shape)
        raise ValueError(f"shapes do not fit: x {tuple(x_E.shape)}, weight {(N, E)}, bias {bias}")
    if x_E.dtype not in KERNEL_DTYPES or any(y.dtype != x_E.dtype for y in (weight_NE, bias_N) if y is not None):
        dtypes = [y.dtype for y in (x_E, weight_NE, bias_N) if y is not None]
        raise ValueError(f"impl='triton' takes one dtype of float32, float16 and bfloat16, got {dtypes}")
    rows = x_E.numel() // E
    if rows > LARGEST:
        raise ValueError(f"impl='triton' takes at most {LARGEST} rows, got {rows}")
    if not weight_NE.is_contiguous():
        raise ValueError(f"impl='triton' takes contiguous weights, got strides {weight_NE.stride()}")
    if not rows:
        return x_E.new_empty(*x_E.shape[:-1], N)
    return product(x_E.reshape(rows, E).contiguous(), weight_NE, bias_N).view(*x_E.shape[:-1], N)

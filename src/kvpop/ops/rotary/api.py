"""From one product for queries, keys and values to the heads that attend: RMSNorm of each head, and its rotation."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from kvpop.ops import interpreted
from kvpop.ops.few_rows import Norm
from kvpop.ops.few_rows.api import KERNEL_DTYPES

# Shapes: B rows, L tokens, R query heads, H KV heads, D head dim, F = (R + 2 H) D.

Impl = Literal["reference", "triton"]


def split_heads(
    x_BLF: Tensor,
    query_heads: int,
    kv_heads: int,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    impl: Impl = "reference",
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, R, L, D], k and v [B, H, L, D] of x = [q; k; v], all heads of each one after the other.

    ``q_norm``, ``k_norm``: g * y / sqrt(mean(y^2) + epsilon) of every head y, g being [D]. ``rotary``: (cos, sin), [B, L, D] or
    [1, L, D]; then of q and k, the halves of a head being (y1, y2),

        (y1, y2) cos + (-y2, y1) sin

    "triton" rounds once, at the end; it has no gradient. Raises ValueError for an unknown ``impl``, from "triton" off a GPU
    (Triton's interpreter aside), for shapes that do not fit, an odd D with ``rotary``, and from "triton" for a dtype other than
    float32, float16 and bfloat16, or weights of a norm that differ from it.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"unknown impl {impl!r}: choose {', '.join(map(repr, get_args(Impl)))}")
    heads = query_heads + 2 * kv_heads
    if x_BLF.ndim != 3 or x_BLF.shape[-1] % heads:
        raise ValueError(f"shapes do not fit: {tuple(x_BLF.shape)} has no {heads} heads of equal size")
    (B, L), D = x_BLF.shape[:2], x_BLF.shape[-1] // heads
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None and norm[0].shape != (D,):
            raise ValueError(f"shapes do not fit: {name} {tuple(norm[0].shape)} for heads of {D} channels")
    for angle in rotary or ():
        if D % 2 or angle.shape not in ((B, L, D), (1, L, D)):
            raise ValueError(
                f"shapes do not fit: cos and sin {tuple(angle.shape)} for {B} rows, {L} tokens, {D} channels"
            )
    if impl == "reference":
        from kvpop.ops.rotary.reference import split_heads

        return split_heads(x_BLF, query_heads, kv_heads, rotary, q_norm, k_norm)
    if x_BLF.device.type == "cpu" and not interpreted():
        raise ValueError("impl='triton' needs a GPU: use impl='reference'")
    norms = [None if norm is None else norm[0] for norm in (q_norm, k_norm)]
    if x_BLF.dtype not in KERNEL_DTYPES or any(g is not None and g.dtype != x_BLF.dtype for g in norms):
        raise ValueError(f"impl='triton' takes one dtype of float32, float16 and bfloat16, got {x_BLF.dtype}")
    from kvpop.ops.rotary.triton import split

    cos, sin = (None, None) if rotary is None else (angle.contiguous() for angle in rotary)
    scales = [None if g is None else g.contiguous() for g in norms]
    epsilons = [0.0 if norm is None else float(norm[1]) for norm in (q_norm, k_norm)]
    q, k, v = split(x_BLF.contiguous(), query_heads, kv_heads, cos, sin, *scales, *epsilons)
    return q, k, v


def empty_heads(x_BLF: Tensor, query_heads: int, kv_heads: int) -> list[Tensor]:
    """Where q, k and v go."""
    (B, L), D = x_BLF.shape[:2], x_BLF.shape[-1] // (query_heads + 2 * kv_heads)
    return [torch.empty(B, n, L, D, dtype=x_BLF.dtype, device=x_BLF.device) for n in (query_heads, kv_heads, kv_heads)]

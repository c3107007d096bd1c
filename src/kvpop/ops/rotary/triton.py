"""A head a program. It starts while the product that makes the heads still runs, and lets what attends start early."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvpop.ops import device_of
from kvpop.ops.few_rows.triton import overlaps
from kvpop.ops.rotary.api import empty_heads

# Shapes: B rows, L tokens, R query heads, H KV heads, D head dim, F = (R + 2 H) D.


@triton.jit
def _normed(y, other, scale, d, partner, there, epsilon, D: tl.constexpr):
    shrink = 1.0 / tl.sqrt(tl.sum(y * y, 0) / D + epsilon)
    y *= shrink * tl.load(scale + d, mask=there, other=0.0).to(tl.float32)
    other *= shrink * tl.load(scale + partner, mask=there, other=0.0).to(tl.float32)
    return y, other


@triton.jit
def _split(
    x, cos, sin, q_scale, k_scale, q, k, v, L, q_epsilon, k_epsilon, angle_row,
    R: tl.constexpr, H: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    token, head = tl.program_id(0), tl.program_id(1)
    row, t = (token // L).to(tl.int64), token % L
    d = tl.arange(0, BLOCK_D)
    there = d < D
    own = x + (token.to(tl.int64) * (R + 2 * H) + head) * D
    y = tl.load(own + d, mask=there, other=0.0).to(tl.float32)
    if head < R + H:
        partner = (d + D // 2) % D
        other = tl.where(d < D // 2, -1.0, 1.0) * tl.load(own + partner, mask=there, other=0.0).to(tl.float32)
        if Q_NORM:  # noqa: SIM102 (one is known when this is compiled, the other when it runs)
            if head < R:
                y, other = _normed(y, other, q_scale, d, partner, there, q_epsilon, D)
        if K_NORM:  # noqa: SIM102
            if head >= R:
                y, other = _normed(y, other, k_scale, d, partner, there, k_epsilon, D)
        if ROTARY:
            angle = row * angle_row + t * D + d
            y = y * tl.load(cos + angle, mask=there, other=0.0).to(tl.float32)
            y += other * tl.load(sin + angle, mask=there, other=0.0).to(tl.float32)
    if head < R:
        tl.store(q + ((row * R + head) * L + t) * D + d, y.to(q.dtype.element_ty), mask=there)
    elif head < R + H:
        tl.store(k + ((row * H + head - R) * L + t) * D + d, y.to(k.dtype.element_ty), mask=there)
    else:
        tl.store(v + ((row * H + head - R - H) * L + t) * D + d, y.to(v.dtype.element_ty), mask=there)


@torch.library.custom_op("kvpop::split_heads", mutates_args=())
def split(
    x: Tensor,
    query_heads: int,
    kv_heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    q_epsilon: float,
    k_epsilon: float,
) -> list[Tensor]:
    """See ``api.split_heads``; one operation to ``torch.compile``."""
    q, k, v = out = empty_heads(x, query_heads, kv_heads)
    (B, L, _), D = x.shape, q.shape[-1]
    if not x.numel():
        return out
    overlap = overlaps(x.device)
    with device_of(x):
        _split[(B * L, query_heads + 2 * kv_heads)](
            x, *(x if y is None else y for y in (cos, sin, q_scale, k_scale)), q, k, v, L, q_epsilon, k_epsilon,
            0 if cos is None or len(cos) < B else L * D,
            R=query_heads, H=kv_heads, D=D, ROTARY=cos is not None, Q_NORM=q_scale is not None, K_NORM=k_scale is not None,
            BLOCK_D=triton.next_power_of_2(D), OVERLAP=overlap, num_warps=1, **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return out


@split.register_fake
def _(x: Tensor, query_heads: int, kv_heads: int, *_: object) -> list[Tensor]:
    return empty_heads(x, query_heads, kv_heads)

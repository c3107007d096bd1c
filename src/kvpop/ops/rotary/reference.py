"""Heads of one product, as decoder layers of the known kinds make them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpop.ops.few_rows.reference import rms_norm

# Shapes: B rows, L tokens, D head dim, F all heads' channels.


def split_heads(
    x_BLF: Tensor,
    query_heads: int,
    kv_heads: int,
    rotary: tuple[Tensor, Tensor] | None,
    q_norm: tuple[Tensor, float] | None,
    k_norm: tuple[Tensor, float] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``api.split_heads``."""
    sizes = [query_heads, kv_heads, kv_heads]
    q, k, v = x_BLF.unflatten(-1, (sum(sizes), -1)).transpose(1, 2).split(sizes, dim=1)
    q, k = (y if norm is None else rms_norm(y, norm) for y, norm in ((q, q_norm), (k, k_norm)))
    q, k = (_rotated(y, rotary) for y in (q, k))
    return q, k, v


def _rotated(x_BHLD: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    if rotary is None:
        return x_BHLD
    cos, sin = (angle[:, None] for angle in rotary)
    first, second = x_BHLD.chunk(2, dim=-1)
    return x_BHLD * cos + torch.cat([-second, first], dim=-1) * sin

"""The attention a key receives from each block of later queries: what the teacher that looks again adds up from the end."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from kvpop.ops import HAS_TRITON, interpreted

# Shapes: N rows, R = H * G query heads, H KV heads, L longest row, D head dim, C blocks of queries.

Impl = Literal["reference", "triton"]
AGGREGATES = ("max", "mean")
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD_DIM = 256
"""What a tile of keys of the kernel has room for."""


def kernel_or_reference(like: Tensor) -> Impl:
    """The implementation for queries and keys like these: Triton on a GPU where it takes them, the reference elsewhere."""
    fits = like.dtype in KERNEL_DTYPES and like.shape[-1] <= LARGEST_HEAD_DIM
    return "triton" if like.device.type == "cuda" and fits and HAS_TRITON else "reference"


def block_mass(
    q_NRLD: Tensor,
    k_NHLD: Tensor,
    lse_NRL: Tensor,
    length_N: Tensor,
    *,
    scale: float,
    block: int,
    power: float = 1.0,
    aggregate: str = "max",
    impl: Impl = "reference",
) -> Tensor:
    """sum over d of the aggregate over G of p(d -> t)^power, for every block c of queries and key t before it.

    p(d -> t) = exp(scale q_d.k_t - lse_d) and d runs over [c * block, (c + 1) * block), as far as the row has queries:
    ``length_N`` of them. ``aggregate``: "max" or "mean" over the G query heads of a KV head. ``lse_NRL`` in nats; -inf (a
    query without keys) is read as a query that sends nothing.

    Returns float32 or wider [N, H, C, L], C = ceil(L / block); 0 for t >= c * block. Carries no gradient.
    Raises ValueError for block < 1, power <= 0, shapes that do not fit, an unknown ``aggregate`` or ``impl``, or
    ``impl="triton"`` off a GPU (Triton's interpreter aside), for another dtype than float32, float16 and bfloat16, and for
    D > 256.
    """
    (N, R, L, D), H = q_NRLD.shape, k_NHLD.shape[1]
    if R % H:
        raise ValueError(f"{R} query heads cannot share {H} KV heads evenly")
    if k_NHLD.shape != (N, H, L, D) or lse_NRL.shape != (N, R, L) or length_N.shape != (N,):
        raise ValueError(
            f"shapes do not fit: q {tuple(q_NRLD.shape)}, k {tuple(k_NHLD.shape)}, lse {tuple(lse_NRL.shape)}, "
            f"length {tuple(length_N.shape)}"
        )
    if block < 1:
        raise ValueError(f"block must be at least 1 query, got {block}")
    if not power > 0:
        raise ValueError(f"power must be positive, got {power}")
    if aggregate not in AGGREGATES:
        raise ValueError(f"unknown aggregate {aggregate!r}: choose {', '.join(map(repr, AGGREGATES))}")
    if impl == "reference":
        from kvpop.ops.residual_mass.reference import block_mass
    elif impl == "triton":
        if q_NRLD.device.type == "cpu" and not interpreted():
            raise ValueError("impl='triton' needs a GPU: use impl='reference'")
        from kvpop.ops.residual_mass.triton import block_mass
    else:
        raise ValueError(f"unknown impl {impl!r}: choose {', '.join(map(repr, get_args(Impl)))}")
    block = max(1, min(block, L))  # a longer one is as much one block of all
    return block_mass(q_NRLD, k_NHLD, lse_NRL, length_N, scale, block, power, aggregate == "max")

"""Attention over the keys an expiry keeps, with its log-normaliser.

keep(h, q, t)  <=>  t <= q < expiry[h, t]

Keys may also carry a bias: a gate that is neither open nor closed, for training through a decision.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kvpop.ops import HAS_TRITON, interpreted

# Shapes: B batch, R = H * G query heads, H KV heads, G query heads per KV head, Q queries, T keys, D head dim, V value dim.

Impl = Literal["reference", "flex", "triton"]

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD_DIM = 256
"""What a tile of the kernel for chunks has room for."""

NEVER = torch.iinfo(torch.int32).max
"""The expiry of a token that is never dropped."""


def sparse_attention(
    q_BRQD: Tensor,
    k_BHTD: Tensor,
    v_BHTV: Tensor,
    expiry_BHT: Tensor,
    *,
    scale: float,
    q_pos_BQ: Tensor | None = None,
    k_pos_BHT: Tensor | None = None,
    bias_BHT: Tensor | None = None,
    bias_from: int = 0,
    impl: Impl = "reference",
    live: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from each query at position q to the keys with t <= q < expiry.

    Query head r reads KV head r // G. Positions are integers in tokens; without them query i and key i both stand at i
    (then Q must equal T). A query without a single key gets a zero output and LSE -inf.

    ``bias`` (nats, finite) is added to the logits of key t for the queries at a distance q - t >= ``bias_from`` (tokens);
    it takes part in the LSE and gets a gradient.

    ``live`` tells ``impl="triton"`` about how many keys a query sees at most, such as the slots of a budget: it sizes the
    lists of keys. Where more are seen the result is the same, only slower to come by.

    Returns (output [B, R, Q, V] in the dtype of v, LSE [B, R, Q] in float32 or wider, natural log: Eq. 9).
    ``impl="triton"`` with positions is forward only; ``chunk_impl`` says where that will do.

    Raises ValueError for shapes that do not fit, a negative ``bias_from``, an unknown ``impl``, for "flex" with positions, for
    "flex" and "triton" off a GPU (Triton's interpreter aside), and for "triton" with a bias, with dtypes that differ or are not
    float32, float16 or bfloat16, with head dims above 128 (256 with positions), with a scale that is not positive, and with
    positions where a gradient is wanted.
    """
    (B, R, Q, D), (_, H, T, _) = q_BRQD.shape, k_BHTD.shape
    if R % H:
        raise ValueError(f"{R} query heads cannot share {H} KV heads evenly")
    if k_BHTD.shape != (B, H, T, D) or v_BHTV.shape[:3] != (B, H, T) or expiry_BHT.shape != (B, H, T):
        raise ValueError(
            f"shapes do not fit: q {tuple(q_BRQD.shape)}, k {tuple(k_BHTD.shape)}, v {tuple(v_BHTV.shape)}, "
            f"expiry {tuple(expiry_BHT.shape)}"
        )
    if bias_BHT is not None and bias_BHT.shape != (B, H, T):
        raise ValueError(f"the bias must have the shape of the expiry {(B, H, T)}, got {tuple(bias_BHT.shape)}")
    if bias_from < 0:
        raise ValueError(f"bias_from must be at least 0 tokens, got {bias_from}")
    if (q_pos_BQ is None) != (k_pos_BHT is None):
        raise ValueError("give positions for queries and keys, or for neither")
    if q_pos_BQ is None and Q != T:
        raise ValueError(f"without positions the {Q} queries and {T} keys must be the same tokens")
    if impl == "reference":
        from kvpop.ops.sparse_attention.reference import attend

        return attend(q_BRQD, k_BHTD, v_BHTV, expiry_BHT, scale, q_pos_BQ, k_pos_BHT, bias_BHT, bias_from)
    if impl == "flex":
        if q_pos_BQ is not None:
            raise ValueError("impl='flex' takes whole sequences only; use impl='reference' with explicit positions")
        from kvpop.ops.sparse_attention.flex import attend_sequence

        return attend_sequence(q_BRQD, k_BHTD, v_BHTV, expiry_BHT, scale, bias_BHT, bias_from)
    if impl == "triton":
        if bias_BHT is not None:
            raise ValueError("impl='triton' takes no bias; use impl='flex' or impl='reference'")
        if q_BRQD.device.type == "cpu" and not interpreted():
            raise ValueError("impl='triton' needs a GPU; use impl='reference'")
        if q_pos_BQ is not None and k_pos_BHT is not None:
            _check_chunk(q_BRQD, k_BHTD, v_BHTV, scale)
            from kvpop.ops.sparse_attention.triton_chunk import attend_chunk

            return attend_chunk(q_BRQD, k_BHTD, v_BHTV, expiry_BHT, scale, q_pos_BQ, k_pos_BHT)
        from kvpop.ops.sparse_attention import triton

        return triton.attend_sequence(q_BRQD, k_BHTD, v_BHTV, expiry_BHT, scale, live)
    raise ValueError(f"unknown impl {impl!r}: choose 'reference', 'flex' or 'triton'")


def _check_chunk(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    if not scale > 0:
        raise ValueError(f"impl='triton' needs a positive scale, got {scale}")
    if q.dtype not in KERNEL_DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"impl='triton' takes queries, keys and values of one dtype of float32, float16 and bfloat16, got {q.dtype}, "
            f"{k.dtype} and {v.dtype}"
        )
    if (widest := max(q.shape[-1], v.shape[-1])) > LARGEST_HEAD_DIM:
        raise ValueError(f"impl='triton' takes head dims up to {LARGEST_HEAD_DIM} with positions, got {widest}")
    if _wants_gradient(q, k, v):
        raise ValueError("impl='triton' with positions carries no gradient: use impl='reference', or torch.no_grad()")


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def chunk_impl(q_BRQD: Tensor, k_BHTD: Tensor, v_BHTV: Tensor) -> Impl:
    """The implementation for calls with positions: Triton on a GPU where it can, the reference elsewhere."""
    tensors = q_BRQD, k_BHTD, v_BHTV
    fits = all(x.dtype in KERNEL_DTYPES and x.dtype == q_BRQD.dtype for x in tensors)
    fits &= max(q_BRQD.shape[-1], v_BHTV.shape[-1]) <= LARGEST_HEAD_DIM and not _wants_gradient(*tensors)
    return "triton" if fits and q_BRQD.device.type == "cuda" and HAS_TRITON else "reference"


def keep_mask(expiry_BHT: Tensor, q_pos_BQ: Tensor, k_pos_BHT: Tensor) -> Tensor:
    """The boolean mask [B, H, Q, T] that an expiry describes. For tests, small inputs and the dense reference."""
    q = q_pos_BQ[:, None, :, None]
    return (k_pos_BHT[:, :, None, :] <= q) & (q < expiry_BHT[:, :, None, :])

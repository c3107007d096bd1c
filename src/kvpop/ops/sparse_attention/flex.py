"""Sparse attention as FlexAttention over the tiles that an expiry keeps. GPU only; trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from kvpop.ops.sparse_attention import blocks

# Shapes: B batch, R = H * G query heads, H KV heads, G query heads per KV head, S sequence, D head dim, V value dim.

CHUNK = 1024


def attend_sequence(
    q_BRSD: Tensor,
    k_BHSD: Tensor,
    v_BHSV: Tensor,
    expiry_BHS: Tensor,
    scale: float,
    bias_BHS: Tensor | None = None,
    bias_from: int = 0,
    *,
    permute: int | None = CHUNK,
) -> tuple[Tensor, Tensor]:
    """See ``api.sparse_attention``; query i and key i stand at position i. Time and memory follow the live tiles.

    Tokens that survive are scattered, so in position order nearly every tile is partial. With ``permute`` (tokens) the
    keys of each KV head are sorted by expiry within chunks of that many tokens, which leaves fewer live tiles and more
    full ones. It changes the order of summation, nothing else. Raises ValueError on the CPU and for permute < 1.
    """
    if permute is not None and permute < 1:
        raise ValueError(f"permute must be at least 1 token or None, got {permute}")
    S, G = q_BRSD.shape[2], q_BRSD.shape[1] // k_BHSD.shape[1]
    q_BRSD, k_BHSD, v_BHSV = (blocks.padded(x, -2) for x in (q_BRSD, k_BHSD, v_BHSV))
    birth_BHS, expiry_BHS = blocks.lifetimes(blocks.padded(expiry_BHS, -1))
    if bias_BHS is not None:
        bias_BHS = blocks.padded(bias_BHS.float(), -1)
    if permute is not None:
        order_BHS = expiry_order(expiry_BHS, permute)
        inverse_BHS = order_BHS.argsort(dim=-1)
        k_BHSD = _Reorder.apply(k_BHSD, order_BHS, inverse_BHS)
        v_BHSV = _Reorder.apply(v_BHSV, order_BHS, inverse_BHS)
        birth_BHS, expiry_BHS = birth_BHS.gather(-1, order_BHS), expiry_BHS.gather(-1, order_BHS)
        if bias_BHS is not None:
            bias_BHS = _Reorder.apply(bias_BHS[..., None], order_BHS, inverse_BHS)[..., 0]
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BRSD, k_BHSD, v_BHSV))
    mask = lifetime_mask(birth_BHS, expiry_BHS, G, backward=learns or bias_BHS is not None)
    biased = None if bias_BHS is None else distant_bias(bias_BHS.contiguous(), birth_BHS, bias_from, G)
    out_BRSV, lse_BRS = blocks.run_flex(q_BRSD, k_BHSD, v_BHSV, mask, scale, biased)
    return out_BRSV[:, :, :S], lse_BRS[:, :, :S]


def expiry_order(expiry_BHS: Tensor, chunk: int) -> Tensor:
    """The permutation [B, H, S] that sorts keys by (position // chunk, expiry), ties by position."""
    chunk_S = torch.arange(expiry_BHS.shape[-1], device=expiry_BHS.device) // chunk
    return ((chunk_S << 32) + expiry_BHS).argsort(dim=-1, stable=True)


def lifetime_mask(birth_BHS: Tensor, expiry_BHS: Tensor, G: int, backward: bool = True) -> BlockMask:
    """The mask of R = H * G query heads over keys that live for the queries [birth, expiry), in any order of keys."""
    live_BHKQ, full_BHKQ = blocks.interval_tiles(birth_BHS, expiry_BHS)
    live_BRQK, full_BRQK = (x.mT.repeat_interleave(G, dim=1) for x in (live_BHKQ, full_BHKQ))

    def alive(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (birth_BHS[b, h // G, kv] <= q) & (q < expiry_BHS[b, h // G, kv])

    return blocks.block_mask(live_BRQK, full_BRQK, alive, backward)


def distant_bias(bias_BHS: Tensor, birth_BHS: Tensor, first: int, G: int) -> blocks.ScoreMod:
    """Add a key's bias to its scores with the queries from ``birth + first`` on, in any order of keys.

    FlexAttention sums the gradient of the bias with atomic additions: in float32, and not bit for bit the same twice.
    """

    def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + torch.where(q - birth_BHS[b, h // G, kv] >= first, bias_BHS[b, h // G, kv], 0.0)

    return biased


class _Reorder(torch.autograd.Function):
    """x[..., order, :] whose backward gathers with the inverse permutation instead of a scatter-add."""

    @staticmethod
    def forward(ctx: Any, x_BHSD: Tensor, order_BHS: Tensor, inverse_BHS: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_BHS)
        return x_BHSD.take_along_dim(order_BHS[..., None], dim=2)

    @staticmethod
    def backward(ctx: Any, grad_BHSD: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (inverse_BHS,) = ctx.saved_tensors
        return grad_BHSD.take_along_dim(inverse_BHS[..., None], dim=2), None, None

"""What the FlexAttention implementations share: block masks built from intervals, and the compiled call.

A token that counts for the positions [first, stop) makes a 128 x 128 tile of (tokens, positions) dead, partial or full.
Three numbers a token block decide it, so a mask costs S / 128 x S / 128 values, never S x S.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from kvpop.ops.sparse_attention.api import NEVER

# Shapes: B batch, H heads of the mask, S sequence (a multiple of 128), N token blocks, M position blocks,
# Q query blocks, K key blocks.

BLOCK = 128
"""Tile side in tokens. Smaller tiles are slower on Hopper."""

GRAPHS = 64
"""How many (shape, dtype, grad mode) combinations a process may compile before the next one is an error."""

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def padded(x: Tensor, dim: int) -> Tensor:
    """x with zeros appended along ``dim`` (negative) until its length there is a positive multiple of 128."""
    S = x.shape[dim]
    extra = max(1, -(-S // BLOCK)) * BLOCK - S
    return pad(x, (0, 0) * (-dim - 1) + (0, extra)) if extra else x


def lifetimes(expiry_BHS: Tensor) -> tuple[Tensor, Tensor]:
    """Birth and expiry of each key as int32 [B, H, S]. A key that no query reads (expiry <= birth) gets expiry 0."""
    birth_S = torch.arange(expiry_BHS.shape[-1], device=expiry_BHS.device, dtype=torch.int32)
    birth_BHS = birth_S.expand(expiry_BHS.shape).contiguous()  # the strides of a permuted birth: one graph for both
    expiry_BHS = expiry_BHS.clamp(max=NEVER).to(torch.int32)
    return birth_BHS, expiry_BHS.masked_fill(expiry_BHS <= birth_BHS, 0)


def interval_tiles(first_BHS: Tensor, stop_BHS: Tensor) -> tuple[Tensor, Tensor]:
    """Which tiles hold an allowed (token, position) pair, and which hold nothing else.

    Token s counts for the positions [first, stop); an empty interval must be given with stop <= 0. Returns boolean
    (live, full), each [B, H, N, M]. ``full`` is exact. ``live`` may have a dead tile more only where the intervals of
    one token block leave a whole position block between them; with ``first`` increasing by one a token they cannot.
    """
    B, H, S = first_BHS.shape
    first_BHNT, stop_BHNT = first_BHS.view(B, H, -1, BLOCK), stop_BHS.view(B, H, -1, BLOCK)
    begin_M = torch.arange(0, S, BLOCK, device=first_BHS.device)
    end_M = begin_M + BLOCK  # exclusive
    never_BHNT = stop_BHNT <= 0
    earliest_BHN1 = first_BHNT.masked_fill(never_BHNT, S).amin(-1, keepdim=True)
    live = (earliest_BHN1 < end_M) & (stop_BHNT.amax(-1, keepdim=True) > begin_M)
    full = (first_BHNT.amax(-1, keepdim=True) <= begin_M) & (stop_BHNT.amin(-1, keepdim=True) >= end_M)
    return live, full


def listed(tiles_BHQK: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of each row are set, and which, those first: what FlexAttention reads."""
    order = tiles_BHQK.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles_BHQK.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


def block_mask(live_BHQK: Tensor, full_BHQK: Tensor, mask_mod: MaskMod, backward: bool = True) -> BlockMask:
    """A FlexAttention mask from its tiles. ``mask_mod`` is evaluated in the live tiles that are not full.

    On a GPU the kernel reads head ``query head % H`` of the mask: H must be 1 or the number of query heads. ``backward``:
    list the tiles of each key block too, which only the backward pass reads.
    """
    Q, K = live_BHQK.shape[-2:]
    return BlockMask.from_kv_blocks(
        *listed(live_BHQK & ~full_BHQK),
        *listed(full_BHQK),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(Q * BLOCK, K * BLOCK),
        compute_q_blocks=backward,
    )


def run_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, score_mod: ScoreMod | None = None
) -> tuple[Tensor, Tensor]:
    """Compiled FlexAttention: output in the dtype of v, and the float32 LSE in nats (-inf on rows without a key).

    Query heads may be a multiple of the key heads. Raises ValueError on the CPU, where compiled FlexAttention has
    neither LSE nor backward, and RuntimeError where it would run uncompiled, that is with a dense S x S score matrix.
    """
    if q.device.type == "cpu":
        raise ValueError(
            "impl='flex' needs a GPU: on the CPU FlexAttention has no LSE and no gradient; use impl='reference'"
        )
    with torch._dynamo.config.patch(recompile_limit=GRAPHS):
        return _compiled(q, k, v, mask, scale, score_mod)


def _flex(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, score_mod: ScoreMod | None
) -> tuple[Tensor, Tensor]:
    if not torch.compiler.is_dynamo_compiling():  # constant under tracing, so only the uncompiled path gets here
        raise RuntimeError("FlexAttention is not being compiled (torch.compile is disabled?): it would run dense")
    out, aux = flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
        kernel_options={"BACKEND": "TRITON"},  # the FLASH backend can drop the mask and was off by ln 2 in 2.11
    )
    assert aux.lse is not None
    return out, aux.lse


# dynamic=False: a new length is a new graph. With fullgraph, more graphs than GRAPHS raise; they never fall back.
_compiled = torch.compile(_flex, dynamic=False, fullgraph=True)

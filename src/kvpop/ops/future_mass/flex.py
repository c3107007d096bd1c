"""Future mass as a transposed attention pass: keys ask, queries answer, and only the normaliser is read. GPU only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from kvpop.ops.sparse_attention import blocks

# Shapes: B batch, R = H * G query heads, H KV heads, S sequence, D head dim.

VALUE_DIM = 16
"""The narrowest value FlexAttention takes; its contents do not matter."""


@torch.no_grad()
def log_mass(
    q_BRSD: Tensor,
    k_BHSD: Tensor,
    lse_BRS: Tensor,
    end_BS: Tensor,
    scale: float,
    window: int,
    power: float,
    lookahead: int | None,
) -> Tensor:
    """See ``api.future_log_mass``; returns float32. Time follows the live tiles, which all heads share."""
    S, G = q_BRSD.shape[2], q_BRSD.shape[1] // k_BHSD.shape[1]
    # A query without keys sends nothing: its share is exp(score - inf) = 0.
    sent_BRS = blocks.padded(lse_BRS.float().masked_fill(lse_BRS == -torch.inf, torch.inf) * power, -1)

    def share(score: Tensor, b: Tensor, h: Tensor, t: Tensor, d: Tensor) -> Tensor:
        return score - sent_BRS[b, h, d]

    q_BRSD, k_BRSD = blocks.padded(q_BRSD, -2), blocks.padded(k_BHSD, -2).repeat_interleave(G, dim=1)
    v_BRSV = q_BRSD.new_zeros(*q_BRSD.shape[:3], VALUE_DIM)
    mask = future_mask(blocks.padded(end_BS, -1), window, lookahead)
    return blocks.run_flex(k_BRSD, q_BRSD, v_BRSV, mask, scale * power, share)[1][:, :, :S]


def future_mask(end_BS: Tensor, window: int, lookahead: int | None) -> BlockMask:
    """The mask, one for all heads, from each key t (row) to its future queries [t + window, end_t) (column)."""
    S = end_BS.shape[-1]
    first_BS = (torch.arange(S, device=end_BS.device, dtype=torch.int32) + min(window, S)).expand(end_BS.shape)
    stop_BS = end_BS.clamp(max=S).to(torch.int32)
    if lookahead is not None:
        stop_BS = torch.minimum(stop_BS, first_BS + min(lookahead, S) + 1)
    stop_BS = stop_BS.masked_fill(stop_BS <= first_BS, 0)
    live_B1TD, full_B1TD = blocks.interval_tiles(first_BS[:, None], stop_BS[:, None])

    def future(b: Tensor, h: Tensor, t: Tensor, d: Tensor) -> Tensor:
        return (first_BS[b, t] <= d) & (d < stop_BS[b, t])

    return blocks.block_mask(live_B1TD, full_B1TD, future, backward=False)

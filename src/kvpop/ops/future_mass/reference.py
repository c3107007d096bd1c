"""Future mass written out: the column sums of the attention matrix below the window, a block of keys at a time."""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes: B batch, R = H * G query heads, H KV heads, G group, S sequence, T a block of keys, D head dim.

KEY_BLOCK = 128


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
    """See ``api.future_log_mass``. Memory is B x R x 128 x S."""
    B, R, S, D = q_BRSD.shape
    H = k_BHSD.shape[1]
    wide = torch.promote_types(q_BRSD.dtype, torch.float32)
    q_BHGSD = q_BRSD.to(wide).mul(scale * power).view(B, H, R // H, S, D)
    lse_BHGS = lse_BRS.to(wide).view(B, H, R // H, S)
    silent_BHGS = lse_BHGS == -torch.inf
    lse_BHGS = lse_BHGS.masked_fill(silent_BHGS, 0.0) * power
    query_S = torch.arange(S, device=q_BRSD.device)
    blocks = []
    for start in range(0, S, KEY_BLOCK):
        stop = min(start + KEY_BLOCK, S)
        first = min(start + window, S)  # no earlier query counts for any key of the block
        key_T, d_S = query_S[start:stop, None], query_S[None, first:]
        allowed_BTS = (d_S >= key_T + window) & (d_S < end_BS[:, start:stop, None])
        if lookahead is not None:
            allowed_BTS &= d_S <= key_T + window + lookahead
        logits_BHGTS = k_BHSD[:, :, None, start:stop].to(wide) @ q_BHGSD[..., first:, :].transpose(-1, -2)
        logits_BHGTS = logits_BHGTS.sub_(lse_BHGS[..., None, first:])
        allowed_BHGTS = allowed_BTS[:, None, None] & ~silent_BHGS[..., None, first:]
        blocks.append(logits_BHGTS.masked_fill_(~allowed_BHGTS, -torch.inf).logsumexp(-1).view(B, R, stop - start))
    return torch.cat(blocks, dim=-1) if blocks else q_BRSD.new_zeros(B, R, 0, dtype=wide)

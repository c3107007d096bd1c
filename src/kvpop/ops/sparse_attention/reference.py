"""Sparse attention written out: logits, mask, softmax. Trains on any device; holds a block of queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes: B batch, R = H * G query heads, H KV heads, G group, Q queries, T keys, D head dim, V value dim.

QUERY_BLOCK = 512


def attend(
    q_BRQD: Tensor,
    k_BHTD: Tensor,
    v_BHTV: Tensor,
    expiry_BHT: Tensor,
    scale: float,
    q_pos_BQ: Tensor,
    k_pos_BHT: Tensor,
) -> tuple[Tensor, Tensor]:
    """See ``api.sparse_attention``. Softmax in float32 at least; memory is B x R x 512 x T."""
    B, R, Q, D = q_BRQD.shape
    H, T = k_BHTD.shape[1:3]
    wide = torch.promote_types(q_BRQD.dtype, torch.float32)
    k_BHDT, v_BHTV = k_BHTD.to(wide).transpose(-1, -2), v_BHTV.to(wide)
    outputs, normalisers = [], []
    for start in range(0, Q, QUERY_BLOCK):
        q_BHXD = q_BRQD[:, :, start : start + QUERY_BLOCK].to(wide).reshape(B, H, -1, D)  # X = G * block
        pos_BQ = q_pos_BQ[:, start : start + QUERY_BLOCK]
        block = pos_BQ.shape[1]
        logits_BHGQT = (q_BHXD @ k_BHDT).mul(scale).view(B, H, R // H, block, T)
        pos = pos_BQ[:, None, :, None]
        keep_BHQT = (k_pos_BHT[:, :, None, :] <= pos) & (pos < expiry_BHT[:, :, None, :])
        logits_BHGQT = logits_BHGQT.masked_fill(~keep_BHQT[:, :, None], -torch.inf)
        lse_BHGQ = logits_BHGQT.logsumexp(-1)
        # A query without keys: subtract 0 instead of -inf, so that exp(-inf) = 0 and gradients stay finite.
        weight = (logits_BHGQT - lse_BHGQ.masked_fill(lse_BHGQ == -torch.inf, 0.0)[..., None]).exp()
        outputs.append((weight.view(B, H, -1, T) @ v_BHTV).view(B, R, block, -1))
        normalisers.append(lse_BHGQ.view(B, R, block))
    if not outputs:
        return q_BRQD.new_zeros(B, R, 0, v_BHTV.shape[-1]), q_BRQD.new_zeros(B, R, 0, dtype=wide)
    return torch.cat(outputs, dim=2).to(q_BRQD.dtype), torch.cat(normalisers, dim=2)

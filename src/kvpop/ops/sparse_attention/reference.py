"""Sparse attention written out: logits, mask, softmax. Trains on any device; holds a block of queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes: B batch, R = H * G query heads, H KV heads, G group, Q queries, T keys, D head dim, V value dim.

QUERY_BLOCK = 128

MASKED = -1e30
"""Finite, so that softmax and its gradient stay finite in a row without keys."""


def attend(
    q_BRQD: Tensor,
    k_BHTD: Tensor,
    v_BHTV: Tensor,
    expiry_BHT: Tensor,
    scale: float,
    q_pos_BQ: Tensor | None,
    k_pos_BHT: Tensor | None,
    bias_BHT: Tensor | None = None,
    bias_from: int = 0,
) -> tuple[Tensor, Tensor]:
    """See ``api.sparse_attention``. Softmax in float32 at least; memory is B x R x 128 x T."""
    B, R, Q, D = q_BRQD.shape
    H, T = k_BHTD.shape[1:3]
    wide = torch.promote_types(q_BRQD.dtype, torch.float32)
    k_BHDT, v_BHTV = k_BHTD.to(wide).transpose(-1, -2), v_BHTV.to(wide)
    index_T = torch.arange(T, device=q_BRQD.device)
    outputs, normalisers = [], []
    for start in range(0, Q, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, Q)
        q_BHXD = q_BRQD[:, :, start:stop].to(wide).mul(scale).reshape(B, H, -1, D)  # X = G * block
        if q_pos_BQ is None or k_pos_BHT is None:
            last = stop  # keys behind the block's last query are all in the future
            pos_q, pos_k = index_T[start:stop, None], index_T[:last]
        else:
            last = T
            pos_q, pos_k = q_pos_BQ[:, None, start:stop, None], k_pos_BHT[:, :, None]
        keep_BHQT = (pos_k <= pos_q) & (pos_q < expiry_BHT[:, :, None, :last])
        logits_BHGQT = (q_BHXD @ k_BHDT[..., :last]).view(B, H, R // H, stop - start, last)
        if bias_BHT is not None:
            bias_BH1T = bias_BHT[:, :, None, :last].to(wide)
            logits_BHGQT = logits_BHGQT + bias_BH1T.where(pos_q - pos_k >= bias_from, 0.0)[:, :, None]
        logits_BHGQT = logits_BHGQT.masked_fill_(~keep_BHQT[:, :, None], MASKED)
        weight_BHGQT = logits_BHGQT.softmax(-1)
        # log-sum-exp from the largest term, x - log softmax(x): two cheap reductions instead of another pass of exp.
        lse_BHGQ = logits_BHGQT.amax(-1) - weight_BHGQT.amax(-1).log()
        nothing_BHGQ = ~keep_BHQT.any(-1)[:, :, None]
        out_BHXV = weight_BHGQT.view(B, H, -1, last) @ v_BHTV[:, :, :last]
        out_BHGQV = out_BHXV.view(B, H, R // H, stop - start, -1).masked_fill(nothing_BHGQ[..., None], 0.0)
        outputs.append(out_BHGQV.flatten(1, 2))
        normalisers.append(lse_BHGQ.masked_fill(nothing_BHGQ, -torch.inf).flatten(1, 2))
    if not outputs:
        return q_BRQD.new_zeros(B, R, 0, v_BHTV.shape[-1]), q_BRQD.new_zeros(B, R, 0, dtype=wide)
    return torch.cat(outputs, dim=2).to(q_BRQD.dtype), torch.cat(normalisers, dim=2)

"""The gated linear memory in chunks: an L x L form inside each chunk, a state handed from chunk to chunk (Eq. 10-12).

Only the hand-over of the state is sequential; everything else is one batched product over all chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Shapes: N rows, H KV heads, L tokens, K chunks of P positions (J as queries, S as sources), D features, V = value dim
# + 1.


def chunkwise(
    q_NHLD: Tensor,
    k_NHLD: Tensor,
    v1_NHLV: Tensor,
    log_i_NHL: Tensor,
    log_f_NHL: Tensor,
    C_NHDV: Tensor,
    m_NH: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(r_NHLV, C_NHDV, m_NH): the unnormalised readouts r_j = q_j^T C_j relative to exp(m_j), and the final state.

    Takes what ``api.mlstm`` prepared: one dtype, padding neutralised, ones column appended, m detached, L >= 1. A last
    chunk that is shorter is filled up with padding. Gate logarithms are summed in float64, one chunk at a time.
    """
    N, H, L, D = q_NHLD.shape
    V, dtype = v1_NHLV.shape[-1], q_NHLD.dtype
    P = min(chunk, L)
    K = -(-L // P)
    if fill := K * P - L:
        q_NHLD, k_NHLD, v1_NHLV = (F.pad(t, (0, 0, 0, fill)) for t in (q_NHLD, k_NHLD, v1_NHLV))
        log_i_NHL, log_f_NHL = F.pad(log_i_NHL, (0, fill), value=-1e30), F.pad(log_f_NHL, (0, fill))
    q_NHKPD, k_NHKPD = q_NHLD.reshape(N, H, K, P, D), k_NHLD.reshape(N, H, K, P, D)
    v1_NHKPV = v1_NHLV.reshape(N, H, K, P, V)
    log_i_NHKP = log_i_NHL.double().reshape(N, H, K, P)
    b_NHKP = log_f_NHL.double().reshape(N, H, K, P).cumsum(-1)
    b_end_NHK = b_NHKP[..., -1]

    with torch.no_grad():
        # m_j = max(log f_j + m_{j-1}, log i_j) in closed form. Any m would do: weights below use the m that is rounded
        # here.
        sum_NHL = (b_NHKP + (b_end_NHK.cumsum(-1) - b_end_NHK)[..., None]).flatten(2)
        best_NHL = (log_i_NHKP.flatten(2) - sum_NHL).cummax(-1).values
        m_NHL = (sum_NHL + torch.maximum(best_NHL, m_NH.double()[..., None])).to(dtype)
        m_NHKP = m_NHL.double().reshape(N, H, K, P)
        m_end_NHK = m_NHKP[..., -1]
        m_start_NHK = torch.cat([m_NH.double()[..., None], m_end_NHK[..., :-1]], dim=-1)

    # What each chunk adds to the state, and the hand-over.
    to_end_NHKP = (b_end_NHK[..., None] - b_NHKP + log_i_NHKP - m_end_NHK[..., None]).to(dtype).exp()
    added_NHKDV = (k_NHKPD * to_end_NHKP[..., None]).mT @ v1_NHKPV
    kept_NHK = (b_end_NHK + (m_start_NHK - m_end_NHK)).to(dtype).exp()
    starts = []
    for added_NHDV, kept_NH in zip(added_NHKDV.unbind(2), kept_NHK.unbind(2)):
        starts.append(C_NHDV)
        C_NHDV = kept_NH[..., None, None] * C_NHDV + added_NHDV
    C_start_NHKDV = torch.stack(starts, dim=2)

    # Readout: tokens of the own chunk through the matrix of weights, all earlier ones through the state at its start.
    later_JS = torch.ones(P, P, dtype=torch.bool, device=q_NHLD.device).triu(1)
    log_w_NHKJS = b_NHKP[..., :, None] - b_NHKP[..., None, :] + log_i_NHKP[..., None, :] - m_NHKP[..., :, None]
    w_NHKJS = log_w_NHKJS.masked_fill(later_JS, -1e30).to(dtype).exp()
    from_start_NHKP = (b_NHKP + (m_start_NHK[..., None] - m_NHKP)).to(dtype).exp()
    r_NHKPV = (q_NHKPD @ k_NHKPD.mT * w_NHKJS) @ v1_NHKPV + (q_NHKPD * from_start_NHKP[..., None]) @ C_start_NHKDV
    return r_NHKPV.reshape(N, H, K * P, V)[:, :, :L], C_NHDV, m_NHL[..., -1]

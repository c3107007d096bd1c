"""The gated linear memory in chunks: an L x L form inside each chunk, a state handed from chunk to chunk (Eq. 10-12).

Nothing is sequential but sums of gate logarithms: everything else is a few batched products over all chunks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Shapes: N rows, H KV heads, L tokens, K chunks of P positions (J as queries, S as sources), T their
# K + 1 borders, D features, A value dim, V = A + 1.


def chunkwise(
    q_NHLD: Tensor,
    k_NHLD: Tensor,
    v_NHLA: Tensor,
    log_i_NHL: Tensor,
    log_f_NHL: Tensor,
    C_NHDV: Tensor,
    m_NH: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(r_NHLA, n_NHL1, C_NHDV, m_NH): the unnormalised readouts r_j = q_j^T C_j relative to exp(m_j), their last column by
    itself, and the final state.

    Takes what ``api.mlstm`` prepared: one dtype, padding neutralised, m detached, L >= 1; no ones column beside the values, but
    sums of their own for what it would collect: products of 65 columns are slow. A last chunk that is shorter is filled up with
    padding. Gate logarithms are summed in float64, one chunk at a time.
    """
    N, H, L, D = q_NHLD.shape
    A, dtype = v_NHLA.shape[-1], q_NHLD.dtype
    P = min(chunk, L)
    K = -(-L // P)
    if fill := K * P - L:
        q_NHLD, k_NHLD, v_NHLA = (F.pad(t, (0, 0, 0, fill)) for t in (q_NHLD, k_NHLD, v_NHLA))
        log_i_NHL, log_f_NHL = F.pad(log_i_NHL, (0, fill), value=-1e30), F.pad(log_f_NHL, (0, fill))
    q_NHKPD, k_NHKPD = q_NHLD.reshape(N, H, K, P, D), k_NHLD.reshape(N, H, K, P, D)
    v_NHKPA = v_NHLA.reshape(N, H, K, P, A)
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

    # What each chunk adds to the state, and what has come together at its start: a product with the decays between chunks.
    to_end_NHKP = (b_end_NHK[..., None] - b_NHKP + log_i_NHKP - m_end_NHK[..., None]).to(dtype).exp()
    entering_NHKPD = k_NHKPD * to_end_NHKP[..., None]
    added_NHKDA, added_NHKD = entering_NHKPD.mT @ v_NHKPA, entering_NHKPD.sum(-2)
    forgotten_NHT = F.pad(b_end_NHK.cumsum(-1), (1, 0))  # before chunk T = 0..K, the last being the end of the sequence
    m_NHT = torch.cat([m_NH.double()[..., None], m_end_NHK], dim=-1)
    log_kept_NHTK = forgotten_NHT[..., :, None] - forgotten_NHT[..., None, 1:] + m_NHT[..., None, 1:] - m_NHT[..., None]
    not_yet_TK = torch.ones(K + 1, K, dtype=torch.bool, device=q_NHLD.device).triu(0)
    kept_NHTK = log_kept_NHTK.masked_fill(not_yet_TK, -1e30).to(dtype).exp()
    from_before_NHT = (forgotten_NHT + m_NH.double()[..., None] - m_NHT).to(dtype).exp()
    C_NHTDA = (kept_NHTK @ added_NHKDA.flatten(3)).unflatten(3, (D, A))
    C_NHTDA = C_NHTDA + from_before_NHT[..., None, None] * C_NHDV[:, :, None, :, :-1]
    z_NHTD = kept_NHTK @ added_NHKD + from_before_NHT[..., None] * C_NHDV[:, :, None, :, -1]

    # Readout: tokens of the own chunk through the matrix of weights, all earlier ones through the state at its start.
    later_JS = torch.ones(P, P, dtype=torch.bool, device=q_NHLD.device).triu(1)
    log_w_NHKJS = (b_NHKP - m_NHKP)[..., :, None] + (log_i_NHKP - b_NHKP)[..., None, :]
    w_NHKJS = q_NHKPD @ k_NHKPD.mT * log_w_NHKJS.to(dtype).masked_fill(later_JS, -1e30).exp()
    from_start_NHKP = (b_NHKP + (m_start_NHK[..., None] - m_NHKP)).to(dtype).exp()
    q_NHKPD = q_NHKPD * from_start_NHKP[..., None]
    r_NHKPA = w_NHKJS @ v_NHKPA + q_NHKPD @ C_NHTDA[:, :, :-1]
    n_NHKP = w_NHKJS.sum(-1) + (q_NHKPD @ z_NHTD[:, :, :-1, :, None]).squeeze(-1)
    C_NHDV = torch.cat([C_NHTDA[:, :, -1], z_NHTD[:, :, -1, :, None]], dim=-1)
    return r_NHKPA.flatten(2, 3)[:, :, :L], n_NHKP.flatten(2)[:, :, :L, None], C_NHDV, m_NHL[..., -1]

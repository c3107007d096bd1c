"""The gated linear memory written down twice: as the recurrence of Eq. 10 and as one L x L matrix.

Both take what ``api.mlstm`` prepared (one dtype, padding neutralised, ones column appended, m detached, L >= 1) and
return the unnormalised readout r_j = q_j^T C_j, relative to exp(m_j) with

    m_j = max(log f_j + m_{j-1}, log i_j)

so that the largest weight of any token in the state is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes: N rows, H KV heads, L (also J queries, S sources) tokens, D features, V = value dim + 1.


def recurrent(
    q_NHLD: Tensor, k_NHLD: Tensor, v1_NHLV: Tensor, log_i_NHL: Tensor, log_f_NHL: Tensor, C_NHDV: Tensor, m_NH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(r_NHLV, C_NHDV, m_NH) by a loop over tokens; the decode path with L = 1."""
    r = []
    for q, k, v1, log_i, log_f in zip(*(t.unbind(2) for t in (q_NHLD, k_NHLD, v1_NHLV, log_i_NHL, log_f_NHL))):
        m_new_NH = torch.maximum(log_f + m_NH, log_i).detach()
        # m_old - m_new first: a forget gate of 1 - 3e-7 would be lost in the rounding of log_f + m.
        f_NH = (log_f + (m_NH - m_new_NH)).exp()
        i_NH = (log_i - m_new_NH).exp()
        C_NHDV = f_NH[..., None, None] * C_NHDV + (i_NH[..., None] * k)[..., None] * v1[..., None, :]
        m_NH = m_new_NH
        r.append((q[..., None] * C_NHDV).sum(-2))  # not a product of matrices: a compiler fuses it with the update
    return torch.stack(r, dim=2), C_NHDV, m_NH


def quadratic(
    q_NHLD: Tensor, k_NHLD: Tensor, v1_NHLV: Tensor, log_i_NHL: Tensor, log_f_NHL: Tensor, C_NHDV: Tensor, m_NH: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(r_NHLV, C_NHDV, m_NH) from one matrix of weights.

    At token j, token s weighs f_{s+1} ... f_j i_s and the carried state weighs f_1 ... f_j.
    """
    L, dtype = q_NHLD.shape[2], q_NHLD.dtype
    log_i_NHS, b_NHJ = log_i_NHL.double(), log_f_NHL.double().cumsum(-1)
    later_JS = torch.ones(L, L, dtype=torch.bool, device=q_NHLD.device).triu(1)
    log_w_NHJS = (b_NHJ[..., :, None] - b_NHJ[..., None, :] + log_i_NHS[..., None, :]).masked_fill(later_JS, -1e30)
    log_carry_NHJ = b_NHJ + m_NH[..., None]
    # Rounded before use, so that the m handed back is the very one the weights are relative to.
    m_NHJ = torch.maximum(log_w_NHJS.amax(-1), log_carry_NHJ).detach().to(dtype)

    w_NHJS = (log_w_NHJS - m_NHJ[..., None]).to(dtype).exp()
    carry_NHJ = (b_NHJ + (m_NH.double()[..., None] - m_NHJ)).to(dtype).exp()
    r_NHJV = (q_NHLD @ k_NHLD.mT * w_NHJS) @ v1_NHLV + carry_NHJ[..., None] * (q_NHLD @ C_NHDV)
    C_NHDV = carry_NHJ[..., -1, None, None] * C_NHDV + (k_NHLD * w_NHJS[..., -1, :, None]).mT @ v1_NHLV
    return r_NHJV, C_NHDV, m_NHJ[..., -1]

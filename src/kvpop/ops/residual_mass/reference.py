"""Block sums written out: attention weights of as many blocks of queries as fit, summed block by block."""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes: N rows, R = H * G query heads, H KV heads, G group, L longest row, D head dim, C blocks of queries, Q queries and T
# keys whose weights are formed at once.

ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Attention weights that are formed at once, by device: what caches hold, or what keeps a GPU busy."""


@torch.no_grad()
def block_mass(
    q_NRLD: Tensor,
    k_NHLD: Tensor,
    lse_NRL: Tensor,
    length_N: Tensor,
    scale: float,
    block: int,
    power: float,
    largest: bool,
) -> Tensor:
    """See ``api.block_mass``; ``largest``: the maximum over G, not the mean."""
    N, R, L, D = q_NRLD.shape
    H = k_NHLD.shape[1]
    wide = torch.promote_types(q_NRLD.dtype, torch.float32)
    C = -(-L // block)
    index_L = torch.arange(L, device=q_NRLD.device)
    silent_NRL = (index_L >= length_N[:, None])[:, None] | (lse_NRL == -torch.inf)
    lse_NHGL = lse_NRL.to(wide).masked_fill(silent_NRL, torch.inf).view(N, H, R // H, L)
    q_NHGLD = q_NRLD.view(N, H, R // H, L, D)
    at_once = max(1, ELEMENTS.get(q_NRLD.device.type, 1 << 22) // max(1, N * R * L * block)) * block
    mass_NHCL = q_NRLD.new_zeros(N, H, C, L, dtype=wide)
    for start in range(0, L, at_once):
        stop = min(start + at_once, L)
        logit_NHGQT = (q_NHGLD[..., start:stop, :] @ k_NHLD[:, :, None, :stop].mT).to(wide) * scale
        weight_NHGQT = ((logit_NHGQT - lse_NHGL[..., start:stop, None]) * power).exp()
        weight_NHQT = weight_NHGQT.amax(2) if largest else weight_NHGQT.mean(2)
        if (stop - start) % block:
            weight_NHQT = torch.nn.functional.pad(weight_NHQT, (0, 0, 0, block - (stop - start) % block))
        part = weight_NHQT.unflatten(2, (-1, block)).sum(3)
        mass_NHCL[:, :, start // block : start // block + part.shape[2], :stop] = part
    first_C = torch.arange(C, device=q_NRLD.device) * block
    return mass_NHCL.masked_fill_(index_L >= first_C[:, None], 0.0)

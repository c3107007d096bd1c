"""The step written out: masks, an argmin, four scatters, and one call of scaled_dot_product_attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Shapes: B rows, R = H * G query heads, H KV heads, M slots, D head dim, V value dim, P pinned spans a row.

LAST = torch.iinfo(torch.int32).max


def take(x_BHTX: Tensor, index_BHn: Tensor) -> Tensor:
    """Gather along dim 2 for [B, H, T] and [B, H, T, X]."""
    if x_BHTX.ndim == 3:
        return x_BHTX.gather(2, index_BHn)
    return x_BHTX.gather(2, index_BHn[..., None].expand(*index_BHn.shape, x_BHTX.shape[-1]))


def write(x_BHTX: Tensor, index_BH1: Tensor, new_BH1X: Tensor, where_B: Tensor | None) -> None:
    """Write one token a head along dim 2, in place, in the rows where ``where_B`` holds (None: all)."""
    if where_B is not None:
        where = where_B.view(-1, *(1,) * (x_BHTX.ndim - 1))
        new_BH1X = torch.where(where, new_BH1X, take(x_BHTX, index_BH1))
    index = index_BH1 if x_BHTX.ndim == 3 else index_BH1[..., None].expand_as(new_BH1X)
    x_BHTX.scatter_(2, index, new_BH1X)


def least(value_BHT: Tensor, position_BHT: Tensor, among_BHT: Tensor) -> Tensor:
    """Index of the least (value, position) pair where ``among`` holds: the older of equals. NaN counts as -inf."""
    value = torch.nan_to_num(value_BHT, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    lowest = value.masked_fill(~among_BHT, torch.inf).amin(-1, keepdim=True)
    return position_BHT.masked_fill(~(among_BHT & (value == lowest)), LAST).argmin(-1)


def pinned(position_BHT: Tensor, pins_BP2: Tensor) -> Tensor:
    """Where a position lies in one of the spans of its row."""
    start, stop = pins_BP2[:, None, None].unbind(-1)
    return ((position_BHT[..., None] >= start) & (position_BHT[..., None] < stop)).any(-1)


def choose_slot(
    position_BHM: Tensor, priority_BHM: Tensor, now_B: Tensor, sinks: int, window: int, pins_BP2: Tensor | None
) -> Tensor:
    """The slot [B, H, 1] that token ``now`` takes: the next empty one, or that of the worst eligible token."""
    M, now_B11 = position_BHM.shape[-1], now_B[:, None, None]
    eligible = (position_BHM >= sinks) & (position_BHM <= now_B11 - window)
    if pins_BP2 is not None:
        eligible &= ~pinned(position_BHM, pins_BP2)
    victim = least(priority_BHM, position_BHM, eligible)[..., None]
    return torch.where(now_B11 >= M, victim, now_B11.clamp(max=M - 1))


def mark_due(
    priority_BHM: Tensor, position_BHM: Tensor, fresh_BH1: Tensor, now_B: Tensor, window: int, valid_B: Tensor | None
) -> None:
    """Give the token that leaves the window the priority that was made for it."""
    is_due = position_BHM == now_B[:, None, None] - window
    if valid_B is not None:
        is_due &= valid_B[:, None, None]
    priority_BHM.copy_(torch.where(is_due, fresh_BH1, priority_BHM))


def overwrite(
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    priority: Tensor,
    k_BH1D: Tensor,
    v_BH1V: Tensor,
    fresh_BH1: Tensor,
    now_B: Tensor,
    sinks: int,
    window: int,
    due: bool,
    valid_B: Tensor | None,
    pins_BP2: Tensor | None,
) -> None:
    """See ``api.overwrite``."""
    if due:
        mark_due(priority, position, fresh_BH1, now_B, window, valid_B)
        fresh_BH1 = torch.zeros_like(fresh_BH1)
    slot = choose_slot(position, priority, now_B, sinks, window, pins_BP2)
    write(keys, slot, k_BH1D, valid_B)
    write(values, slot, v_BH1V, valid_B)
    write(position, slot, now_B[:, None, None].expand_as(slot).int(), valid_B)
    write(priority, slot, fresh_BH1, valid_B)


def attend_held(q_BR1D: Tensor, keys: Tensor, values: Tensor, position: Tensor, scale: float) -> Tensor:
    """The query heads of a KV head stand side by side as its queries, so keys and values are read once, never repeated."""
    B, R, n, D = q_BR1D.shape
    H = keys.shape[1]
    held = (position >= 0)[:, :, None]
    out = F.scaled_dot_product_attention(q_BR1D.reshape(B, H, R // H * n, D), keys, values, attn_mask=held, scale=scale)
    return out.masked_fill(~held.any(-1, keepdim=True), 0.0).reshape(B, R, n, -1)

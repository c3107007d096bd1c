"""The step written out: masks, an argmin, four scatters, and one call of scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Shapes: B rows, R = H * G query heads, H KV heads, M slots, D head dim, V value dim, X any of them, P pinned spans a row,
# N slots of all heads of a row.

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


@dataclass(frozen=True, eq=False)
class Layout:
    """Where slots lie if KV heads have different numbers of them.

    Keys and values are [B, 1, N, X]: head h has the ``size`` slots from ``base`` on. Positions and priorities, small beside
    them, are [B, H, M]: slot m of head h stands at [h, m], and what is at or past its size is no slot: position -1.

    Where all heads have M slots there is no layout (None): keys and values are [B, H, M, X], the same memory.
    """

    size_H: Tensor
    base_H: Tensor
    """Both int32, on the device of the store."""
    widest: int
    """M, the slots of the largest head."""
    total: int
    """N."""

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device) -> Layout | None:
        """The layout of heads with so many slots each (at least one); None if these are equal."""
        if len(set(sizes)) < 2:
            return None
        base = [sum(sizes[:h]) for h in range(len(sizes))]
        size_H, base_H = (torch.tensor(x, dtype=torch.int32, device=device) for x in (sizes, base))
        return cls(size_H, base_H, max(sizes), sum(sizes))

    def to(self, device: torch.device) -> Layout:
        return Layout(self.size_H.to(device), self.base_H.to(device), self.widest, self.total)

    def nbytes(self) -> int:
        return self.size_H.nbytes + self.base_H.nbytes

    def among_all(self, slot_BHn: Tensor) -> Tensor:
        """Slots of each head as slots of the row [B, 1, H * n]."""
        return (slot_BHn + self.base_H[:, None]).flatten(1)[:, None]


def read(x: Tensor, slot_BHn: Tensor, layout: Layout | None) -> Tensor:
    """Keys or values of some slots of each head, [B, H, n, X]."""
    if layout is None:
        return take(x, slot_BHn)
    return take(x, layout.among_all(slot_BHn)).view(*slot_BHn.shape, x.shape[-1])


def by_head(x: Tensor, layout: Layout | None) -> Tensor:
    """Keys or values as [B, H, M, X]; where a head has no slot there is another one of its own. Equal heads: x itself."""
    if layout is None:
        return x
    slot_M = torch.arange(layout.widest, device=x.device)
    index_HM = layout.base_H[:, None] + slot_M.minimum(layout.size_H[:, None] - 1)
    return x[:, 0].index_select(1, index_HM.flatten()).view(len(x), *index_HM.shape, x.shape[-1])


def side_by_side(x_BHMX: Tensor, layout: Layout | None) -> Tensor:
    """The inverse of ``by_head``: what stands where there is no slot is left out."""
    if layout is None:
        return x_BHMX
    slot_N = torch.arange(layout.total, dtype=torch.int32, device=x_BHMX.device)
    head_N = torch.searchsorted(layout.base_H, slot_N, right=True) - 1
    index_N = head_N * layout.widest + slot_N - layout.base_H[head_N]
    return x_BHMX.flatten(1, 2).index_select(1, index_N)[:, None]


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
    position_BHM: Tensor,
    priority_BHM: Tensor,
    now_B: Tensor,
    sinks: int,
    window: int,
    pins_BP2: Tensor | None,
    layout: Layout | None = None,
) -> Tensor:
    """The slot [B, H, 1] that token ``now`` takes: the next empty one, or that of the worst eligible token."""
    size = position_BHM.shape[-1] if layout is None else layout.size_H[:, None]
    now_B11 = now_B[:, None, None]
    eligible = (position_BHM >= sinks) & (position_BHM <= now_B11 - window)
    if pins_BP2 is not None:
        eligible &= ~pinned(position_BHM, pins_BP2)
    victim = least(priority_BHM, position_BHM, eligible)[..., None]
    return torch.where(now_B11 >= size, victim, now_B11.clamp(max=size - 1))


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
    layout: Layout | None,
) -> None:
    """See ``api.overwrite``."""
    if due:
        mark_due(priority, position, fresh_BH1, now_B, window, valid_B)
        fresh_BH1 = torch.zeros_like(fresh_BH1)
    slot = choose_slot(position, priority, now_B, sinks, window, pins_BP2, layout)
    for x, new_BH1X in ((keys, k_BH1D), (values, v_BH1V)):
        if layout is None:
            write(x, slot, new_BH1X, valid_B)
        else:
            write(x, layout.among_all(slot), new_BH1X.flatten(1, 2)[:, None], valid_B)
    write(position, slot, now_B[:, None, None].expand_as(slot).int(), valid_B)
    write(priority, slot, fresh_BH1, valid_B)


def append(
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    k_BH1D: Tensor,
    v_BH1V: Tensor,
    now_B: Tensor,
    valid_B: Tensor | None,
) -> None:
    """See ``api.append``. Not by ``write``: on a CPU scatter copies all of a tensor in half precision."""
    B, H, M = position.shape
    fits_B = now_B < M if valid_B is None else valid_B & (now_B < M)
    at = (torch.arange(B, device=now_B.device), slice(None), now_B.clamp(max=M - 1))
    for x, new_BHX in (
        (keys, k_BH1D[:, :, 0]),
        (values, v_BH1V[:, :, 0]),
        (position, now_B[:, None].expand(B, H).int()),
    ):
        x[at] = torch.where(fits_B.view(-1, *(1,) * (new_BHX.ndim - 1)), new_BHX, x[at])


def attend_held(
    q_BR1D: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    scale: float,
    layout: Layout | None,
    count_B: Tensor | None,
) -> Tensor:
    """The query heads of a KV head stand side by side as its queries, so keys and values are read once, never repeated."""
    B, R, n, D = q_BR1D.shape
    H = position.shape[1]
    keys, values = by_head(keys, layout), by_head(values, layout)
    held = (position >= 0)[:, :, None]
    out = F.scaled_dot_product_attention(q_BR1D.reshape(B, H, R // H * n, D), keys, values, attn_mask=held, scale=scale)
    return out.masked_fill(~held.any(-1, keepdim=True), 0.0).reshape(B, R, n, -1)

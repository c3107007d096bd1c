"""Readable, in torch: on a CPU and in float64. It gathers the pages of all heads to the width of the table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpop.ops.cache_step.api import attend_held, take, write

# Shapes: B rows, R = H * G query heads, H KV heads, W window, N pages a head has room for, P pages in the pool, L tokens a
# page, D head dim, V value dim.


@dataclass(frozen=True)
class Pages:
    """What heads hold in pages: place i < count of a head is row i % L of page ``table[i // L]``.

    Page 0 of the pool is nobody's: 0 in the table is no page. ``missed`` is not 0 for a head that had to move a token to a
    page and had none.
    """

    keys_PLD: Tensor
    values_PLV: Tensor
    position_PL: Tensor
    table_BHN: Tensor
    count_BH: Tensor
    missed_BH: Tensor


@dataclass(frozen=True)
class Ring:
    """The last W tokens: position p at place p % W. ``closed``: it goes as it leaves the ring."""

    keys_BHWD: Tensor
    values_BHWV: Tensor
    closed_BHW: Tensor


def ring_position(end_B: Tensor, window: int) -> Tensor:
    """The position of what each place of the ring holds once ``end`` tokens were seen [B, W]; below 0: nothing."""
    place_W = torch.arange(window, device=end_B.device)
    last_B1 = end_B[:, None] - 1
    return last_B1 - (last_B1 - place_W) % window


def paged(pages: Pages) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and positions (-1: empty) of every head's pages, side by side [B, H, N * L, ...]."""
    table = pages.table_BHN
    place = torch.arange(table.shape[-1] * pages.keys_PLD.shape[1], device=table.device)
    position = pages.position_PL[table].flatten(2)
    position = position.where(place < pages.count_BH[..., None], -1)
    return pages.keys_PLD[table].flatten(2, 3), pages.values_PLV[table].flatten(2, 3), position


def everything(pages: Pages, ring: Ring, seen_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and positions (-1: empty) of the pages of every head and then its ring [B, H, N * L + W, ...]."""
    keys, values, position = paged(pages)
    B, H, W = ring.closed_BHW.shape
    recent = ring_position(seen_B, W).clamp(min=-1).int()[:, None].expand(B, H, W)
    return (
        torch.cat([keys, ring.keys_BHWD], 2),
        torch.cat([values, ring.values_BHWV], 2),
        torch.cat([position, recent], 2),
    )


def append(pages: Pages, k_BHD: Tensor, v_BHV: Tensor, position_B1: Tensor, keep_BH: Tensor) -> None:
    """Write one token behind what a head has in pages, where ``keep`` holds."""
    L, count = pages.keys_PLD.shape[1], pages.count_BH
    table = F.pad(pages.table_BHN, (0, 1))  # behind its end there is no page
    page = take(table, (count // L).clamp(max=table.shape[-1] - 1)[..., None])[..., 0]
    offset, fits = count % L, keep_BH & (page > 0)
    for x, new in (
        (pages.keys_PLD, k_BHD),
        (pages.values_PLV, v_BHV),
        (pages.position_PL, position_B1.expand_as(keep_BH).to(pages.position_PL.dtype)),
    ):
        x[page, offset] = torch.where(fits.view(*fits.shape, *[1] * (new.ndim - 2)), new, x[page, offset])
    count += fits
    pages.missed_BH.logical_or_(keep_BH & ~fits)


def step(
    q_BR1D: Tensor,
    k_BH1D: Tensor,
    v_BH1V: Tensor,
    pages: Pages,
    ring: Ring,
    seen_B: Tensor,
    gate_BH1: Tensor,
    sinks: int,
    lag: int,
    scale: float,
    valid_B: Tensor | None,
) -> Tensor:
    """See ``api.step``: decide about token now - lag, let token now - w go, append, attend."""
    B, H, W = ring.closed_BHW.shape
    now_B = seen_B.clone()
    valid_B = torch.ones_like(now_B, dtype=torch.bool) if valid_B is None else valid_B
    slot_BH1 = (now_B % W)[:, None, None].expand(B, H, 1)
    about_B = now_B - lag
    gate_BH1 = gate_BH1 & (about_B >= sinks)[:, None, None]
    if lag:
        before_BH1 = (about_B % W)[:, None, None].expand(B, H, 1)
        write(ring.closed_BHW, before_BH1, gate_BH1, valid_B & (about_B >= 0))
    leaves_B1 = (valid_B & (now_B >= W))[:, None]
    append(
        pages,
        take(ring.keys_BHWD, slot_BH1)[:, :, 0],
        take(ring.values_BHWV, slot_BH1)[:, :, 0],
        (now_B - W)[:, None],
        leaves_B1 & ~take(ring.closed_BHW, slot_BH1)[..., 0],
    )
    write(ring.keys_BHWD, slot_BH1, k_BH1D, valid_B)
    write(ring.values_BHWV, slot_BH1, v_BH1V, valid_B)
    write(ring.closed_BHW, slot_BH1, torch.zeros_like(gate_BH1) if lag else gate_BH1, valid_B)
    seen_B += valid_B
    out = attend_held(q_BR1D, *everything(pages, ring, seen_B), scale)
    missed_BR = pages.missed_BH.repeat_interleave(q_BR1D.shape[1] // H, dim=1)
    return out.masked_fill(missed_BR[..., None, None], math.nan)

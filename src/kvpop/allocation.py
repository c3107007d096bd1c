"""Who gets how many slots: a constant budget for each KV head, from what each further slot of it is worth.

    curve_h(k)   what the k-th slot of head h saves of the loss (``calibration.loss_curves``), or the attention that the token
                 in it is still going to receive (``calibration.remaining_curves``), averaged over texts
    k_h          how many of these lie above one threshold, the same for all heads of all layers

At equal thresholds no slot would be worth more in another head.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from kvpop.policies.base import Heads
from kvpop.weights import AdapterError, read_tensors, write_tensors

# Shapes: N = 1 text, L layers, H KV heads, K ranks, S tokens of a text, C = ceil(S / block).

CURVES = "curves.safetensors"
"""The file of an adapter that holds the curves its budgets by head come from."""


def allocate(curves_LHK: Tensor, long: int, least: int | None = None) -> Heads:
    """Long-range slots of every KV head, ``long`` on average: rows for ``KVpop(budget, heads=...)``.

        k_h = number of k with curve_h(k) > threshold, at least ``least``;    sum of all k_h = L H ``long``, exactly

    ``least`` is a quarter of ``long`` unless given: curves are averages over other texts, and pinned tokens must fit into the
    smallest head; it costs next to nothing. Of equal values the one of the smaller k is above
    the threshold, then that of the earlier layer and head. A curve that rises counts as its running minimum. A layer whose
    curves are NaN gets an empty row and does not count. With more slots in all and the same ``least``, no head
    gets fewer.

    Raises ValueError for curves of another shape, without a layer, or with single NaNs, and unless
    0 <= ``least`` <= ``long`` <= K.
    """
    if curves_LHK.ndim != 3 or not curves_LHK.shape[1]:
        raise ValueError(f"curves must be [layers, heads, ranks], got shape {tuple(curves_LHK.shape)}")
    K = curves_LHK.shape[2]
    least = long // 4 if least is None else least
    if not 0 <= least <= long <= K:
        raise ValueError(f"slots must be 0 <= least <= long <= {K} (the ranks of the curves), got {least} and {long}")
    unknown_L = curves_LHK.isnan().any(-1).any(-1)
    if bool(unknown_L.all()) or not bool(curves_LHK[unknown_L].isnan().all()):
        raise ValueError(
            f"the curves of layers {unknown_L.nonzero()[:, 0].tolist()} hold NaN: every layer, or part of one"
        )
    falling_LHK = (
        curves_LHK[~unknown_L].cpu().double().cummin(-1).values if K else curves_LHK[~unknown_L].cpu().double()
    )
    L, H = falling_LHK.shape[:2]
    value = falling_LHK[..., least:].permute(2, 0, 1).flatten()  # of equals the smaller k first, then layer and head
    above = value.argsort(descending=True, stable=True)[: L * H * (long - least)]
    rows = (torch.bincount(above % (L * H), minlength=L * H) + least).view(L, H).tolist()
    given = iter(rows)
    return tuple(() if unknown else tuple(next(given)) for unknown in unknown_L.tolist())


MOST_RANKS = 2**24


def grid(ranks: int) -> Tensor:
    """The ranks 1 = r_0 < r_1 < ... <= ``ranks`` that a saved curve is given at, eight a doubling, and the last one [P]."""
    doublings = torch.arange(8 * max(ranks, 1).bit_length() + 1, dtype=torch.double) / 8
    return torch.cat([(2**doublings).round().long().clamp(max=ranks), torch.tensor([ranks])]).unique()


def write_curves(path: Path, curves_LHK: Tensor) -> None:
    """Save curves at the ranks of ``grid``: some tens of numbers a head, whatever the length of the texts."""
    at_P = grid(curves_LHK.shape[2])
    write_tensors(path, {"ranks": at_P, "curves": curves_LHK[..., at_P - 1].float().contiguous()})


def read_curves(path: Path) -> Tensor:
    """Curves [L, H, K] as ``write_curves`` saved them; between two ranks of the grid straight in log rank.

    Raises FileNotFoundError, and AdapterError for a file of anything else.
    """
    found = read_tensors(path)
    at_P, curves_LHP = found.get("ranks"), found.get("curves")
    if (
        at_P is None
        or curves_LHP is None
        or curves_LHP.ndim != 3
        or curves_LHP.shape[2:] != at_P.shape
        or not len(at_P)
    ):
        raise AdapterError(f"{path} does not hold the curves of budgets by head, only {sorted(found)}")
    last = int(at_P[-1]) if at_P.dtype == torch.long else 0
    if not 1 <= last <= MOST_RANKS or not torch.equal(at_P, grid(last)):
        raise AdapterError(
            f"{path}: ranks must be those of the grid up to at most {MOST_RANKS:,}, they end at {at_P[-1]}"
        )
    whole_L, none_L = (curves_LHP >= 0).flatten(1).all(1), curves_LHP.isnan().flatten(1).all(1)
    if not curves_LHP.is_floating_point() or bool(curves_LHP.isinf().any()) or not bool((whole_L | none_L).all()):
        raise AdapterError(f"{path}: curves must be finite numbers of at least 0, or NaN for a whole layer")
    rank_K = torch.arange(1, int(at_P[-1]) + 1)
    right_K = torch.searchsorted(at_P, rank_K).clamp(min=1, max=max(1, len(at_P) - 1))
    if len(at_P) == 1:
        return curves_LHP
    low_K, high_K = at_P[right_K - 1].double().log(), at_P[right_K].double().log()
    share_K = ((rank_K.double().log() - low_K) / (high_K - low_K)).float()
    return curves_LHP[..., right_K - 1].lerp(curves_LHP[..., right_K], share_K)


def apportion(heads: Heads, long: int) -> Heads:
    """The same shares of another mean: k_h scaled and rounded by largest remainders, so that the mean is ``long`` exactly.

    Of equal remainders the earlier layer and head gets the slot. Where all have 0 slots, all get ``long``. Raises ValueError
    for a negative ``long``.
    """
    if long < 0:
        raise ValueError(f"long must be at least 0 tokens, got {long}")
    listed = list(chain.from_iterable(heads))
    have, want = sum(listed), len(listed) * long
    if not have:
        scaled, rest = [long] * len(listed), [0] * len(listed)
    else:
        scaled, rest = [k * want // have for k in listed], [k * want % have for k in listed]
    for i in sorted(range(len(listed)), key=lambda i: -rest[i])[: want - sum(scaled)]:
        scaled[i] += 1
    given = iter(scaled)
    return tuple(tuple(next(given) for _ in row) for row in heads)

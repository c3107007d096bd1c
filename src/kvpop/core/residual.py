"""What a token is still worth: the attention it receives from a query on, and what a teacher that goes by it would keep.

The static target says what a token receives in all its future. Of an old token part of that is past, and a fixed decay is a
poor guess at how much. Here the teacher looks again every ``block`` queries:

    R_c(t) = sum over d >= q_c of p(d -> t)^power,    q_c = c * block
    held_c = the k best by R_c of (held_{c-1} and the tokens that became eligible in (q_{c-1}, q_c])

and every decision compares a token with the last one that stays, the boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpop.budget import Budget
from kvpop.core.boundary import Decisions
from kvpop.ops.residual_mass.api import Impl, block_mass

# Shapes: N rows, R = H * G query heads, H KV heads, L longest row, D head dim, C decision times, U queries between them,
# P decisions, K long-range slots of the heads that have most.

EPSILON = 1e-8


@dataclass(frozen=True)
class Comparisons(Decisions):
    """Decisions at the query positions ``time_P``. A token that is compared with the boundary need not be new."""

    time_P: Tensor

    def early(self, last_N: Tensor) -> Comparisons:
        """Only those at positions up to ``last`` of each row count."""
        return replace(self, valid_NHP=self.valid_NHP & (self.time_P <= last_N[:, None])[:, None])


@torch.no_grad()
def residual_mass(
    q_NRLD: Tensor, k_NHLD: Tensor, lse_NRL: Tensor, length_N: Tensor, *, scale: float, block: int, power: float,
    aggregate: str, impl: Impl = "reference",
) -> Tensor:  # fmt: skip
    """R [N, H, C, L] with C = ceil(L / block): entry (c, t) counts the queries from c * block on. Float32 or wider.

    Only entries of tokens before query c * block mean anything. ``aggregate`` over the G query heads as in ``Target``. Raises
    ValueError as ``block_mass`` does.
    """
    mass_NHCL = block_mass(
        q_NRLD, k_NHLD, lse_NRL, length_N, scale=scale, block=block, power=power, aggregate=aggregate, impl=impl
    )
    return mass_NHCL.flip(2).cumsum_(2).flip(2)


@torch.no_grad()
def comparisons(residual_NHCL: Tensor, budget: Budget, block: int) -> Comparisons:
    """Follow the teacher through every row and head: the decisions at those of its times where something is dropped.

    At each: every token that has just become eligible, every older one that is dropped, and ``block`` of those that stay,
    spread evenly over their ranks. Of equals the one that was held before stays. A token is not compared with itself. With a
    budget by heads each has the k of its own; one without slots decides nothing.
    """
    N, H, C, _ = residual_NHCL.shape
    s, w, U, device = budget.sinks, budget.window, block, residual_NHCL.device
    longs = budget.longs(H)
    K, k_H1 = max(longs, default=0), torch.tensor(longs, device=device)[:, None]
    held_NHK = torch.full((N, H, K), -1, dtype=torch.long, device=device)  # -1: an empty slot, or one that a head lacks
    index_U = torch.arange(U, device=device)
    last, spread, behind = (
        x.clamp(min=0).long().expand(N, H, -1)
        for x in (k_H1 - 1, (index_U + 0.5) * (k_H1 - 1) / U, k_H1 + index_U)
    )  # fmt: skip
    first_H1 = -(-(s + w + k_H1) // U)  # before there are no more eligible tokens than slots
    first = -(-(s + w + min((k for k in longs if k), default=C * U)) // U)
    decides: list[Tensor] = []
    found: list[tuple[Tensor, ...]] = []
    for c in range(1, C):
        worth_NHL, newest = residual_NHCL[:, :, c], c * U - w
        new_U = torch.arange(newest - U + 1, newest + 1, device=device)
        new_NHU = new_U.where(new_U >= s, -1).expand(N, H, U)
        among = torch.cat([held_NHK, new_NHU], -1)
        order = _worth(worth_NHL, among).argsort(dim=-1, descending=True, stable=True)
        ranked = among.gather(-1, order)
        dropped_NHU = ranked.gather(-1, behind)
        held_NHK = ranked[..., :K].where(torch.arange(K, device=device) < k_H1, -1)
        if c < first:
            continue
        stays = torch.ones_like(new_NHU, dtype=torch.bool)
        new_stays = (new_NHU[..., None] != dropped_NHU[..., None, :]).all(-1)
        old_NHU = dropped_NHU.where(dropped_NHU <= newest - U, -1)
        subject = torch.cat([held_NHK.gather(-1, spread), old_NHU, new_NHU], -1)
        boundary = held_NHK.gather(-1, last).expand_as(subject)
        decides.append(((c >= first_H1) & (k_H1 > 0)).expand_as(subject))
        label = torch.cat([stays, ~stays, new_stays], -1)
        found.append((subject, boundary, label, _worth(worth_NHL, subject), _worth(worth_NHL, boundary)))
    if not found:
        nothing = residual_NHCL.new_zeros(N, H, 0)
        none = nothing.long()
        return Comparisons(none, none, nothing, nothing, nothing, nothing.bool(), none[0, 0])
    subject, boundary, stays, worth, least = (torch.cat(x, -1) for x in zip(*found))
    valid = (subject >= 0) & (subject != boundary) & torch.cat(decides, -1)
    label = torch.where(stays, 1.0, -1.0).to(worth.dtype)
    worth, least = worth.where(valid, 0.0), least.where(valid, 0.0)
    return Comparisons(
        new_NHP=subject.clamp(min=0),
        boundary_NHP=boundary.clamp(min=0),
        label_NHP=label,
        margin_NHP=label * ((worth + EPSILON).log() - (least + EPSILON).log()),
        regret_NHP=(worth - least).abs(),
        valid_NHP=valid,
        time_P=(torch.arange(C - len(found), C, device=device) * U).repeat_interleave(3 * U),
    )


def _worth(worth_NHL: Tensor, token_NHT: Tensor) -> Tensor:
    return worth_NHL.gather(-1, token_NHT.clamp(min=0)).where(token_NHT >= 0, -torch.inf)

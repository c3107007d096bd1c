"""The one comparison that changes the cache: the token that just became evictable against the teacher's boundary token.

Rows are documents (see ``documents``). Arrival j of a row is the token t = s + j, which becomes eligible at q = t + w.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvpop.budget import Budget
from kvpop.core.cutoff import ranks, running_cutoff

# Shapes: N rows, H KV heads, L longest row, A = L - s arrivals, P sampled decisions a row.


@dataclass(frozen=True)
class BoundaryLoss:
    """Sampling and weighting of boundary decisions (Eq. 7, 22-25; Appendix B.4-B.6).

    ``samples`` decisions a row (0: every one), ``late`` the share of them drawn with density rising linearly towards the
    end; ``temperature`` tau; ``margin_floor`` and ``margin_scale`` are omega_min and tau_omega of Eq. 23; ``balance`` the
    clip range of Eq. 24; ``min_future``: a new token with fewer future queries is skipped, its target is too noisy.
    """

    samples: int = 128
    late: float = 0.5
    temperature: float = 1.0
    margin_floor: float = 0.1
    margin_scale: float = 0.5
    balance: tuple[float, float] = (0.5, 4.0)
    min_future: int = 128

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise ValueError(f"samples must be at least 0, got {self.samples}")
        if self.min_future < 1:
            raise ValueError(f"min_future must be at least 1 query, got {self.min_future}")
        if not 0 <= self.late <= 1 or not 0 <= self.margin_floor <= 1:
            raise ValueError(f"late and margin_floor must be in [0, 1], got {self.late} and {self.margin_floor}")
        if not self.temperature > 0 or not self.margin_scale > 0:
            raise ValueError(
                f"temperature and margin_scale must be positive, got {self.temperature} and {self.margin_scale}"
            )
        if not 0 < self.balance[0] <= self.balance[1]:
            raise ValueError(f"balance must be a range 0 < low <= high, got {self.balance}")


@dataclass(frozen=True)
class Decisions:
    """Teacher decisions at sampled queries: token indices within the row, label +-1, margin in nats, and which count."""

    new_NP: Tensor
    boundary_NHP: Tensor
    label_NHP: Tensor
    margin_NHP: Tensor
    valid_NHP: Tensor


def sample_arrivals(
    length_N: Tensor, budget: Budget, config: BoundaryLoss, longest: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Arrivals j in [k, a row's last allowed one] at which to decide (Eq. 25): indices [N, P] and whether each is real.

    Half of the draws (``late``) have density proportional to the distance from the first: the square root of a uniform.
    """
    first = budget.long
    count_N = (length_N - budget.sinks - budget.window - config.min_future + 1 - first).clamp(min=0)
    if config.samples == 0:
        offset_NP = torch.arange(max(0, longest - budget.sinks - first), device=length_N.device).expand(
            len(length_N), -1
        )
        return offset_NP + first, offset_NP < count_N[:, None]
    device = generator.device if generator is not None else length_N.device
    uniform_NP = torch.rand(len(length_N), config.samples, generator=generator, device=device).to(length_N.device)
    late = torch.arange(config.samples, device=length_N.device) < round(config.late * config.samples)
    draw_NP = torch.where(late, uniform_NP.sqrt(), uniform_NP)
    offset_NP = (draw_NP * count_N[:, None]).long().minimum((count_N[:, None] - 1).clamp(min=0))
    return (offset_NP + first).clamp(max=max(0, longest - budget.sinks - 1)), (count_N[:, None] > 0).expand_as(
        offset_NP
    )


@dataclass(frozen=True)
class TeacherTable:
    """The teacher's decision at every arrival: boundary arrival, label +-1, margin in nats; decided only from j >= k on."""

    boundary_NHA: Tensor
    label_NHA: Tensor
    margin_NHA: Tensor
    sinks: int
    long: int


@torch.no_grad()
def teacher_table(target_priority_NHL: Tensor, budget: Budget) -> TeacherTable:
    """Rank tokens by the target's static priorities and follow the running cutoff, once for all arrivals (Eq. 6).

    y = +1 iff the new token is among the teacher's k best of E(q); the boundary token is the k-th best.
    """
    ranked_NHA = target_priority_NHL[..., budget.sinks :]
    if ranked_NHA.shape[-1] <= budget.long or budget.long == 0:
        ranked_NHA = ranked_NHA[..., :0]  # never full, or nothing to keep: there is no boundary
        return TeacherTable(ranked_NHA.long(), ranked_NHA, ranked_NHA, budget.sinks, budget.long)
    rank_NHA = ranks(ranked_NHA)
    cutoff_NHA = running_cutoff(rank_NHA, budget.long)
    boundary_NHA = rank_NHA.argsort(dim=-1).gather(-1, cutoff_NHA.clamp(min=0))
    label_NHA = torch.where(rank_NHA >= cutoff_NHA, 1.0, -1.0)
    margin_NHA = label_NHA * (ranked_NHA - ranked_NHA.gather(-1, boundary_NHA))
    return TeacherTable(boundary_NHA, label_NHA, margin_NHA.to(label_NHA.dtype), budget.sinks, budget.long)


@torch.no_grad()
def decide(table: TeacherTable, arrival_NP: Tensor, valid_NP: Tensor) -> Decisions:
    """Read the table at sampled arrivals. A new token that is itself the boundary carries no information: not counted."""
    N, H, A = table.boundary_NHA.shape
    arrival_NHP = arrival_NP[:, None].expand(N, H, -1)
    if A == 0 or arrival_NP.shape[1] == 0:
        nothing = torch.zeros(arrival_NHP.shape, device=arrival_NP.device)
        return Decisions(torch.zeros_like(arrival_NP), nothing.long(), nothing, nothing, nothing.bool())
    boundary_NHP = table.boundary_NHA.gather(-1, arrival_NHP)
    return Decisions(
        new_NP=arrival_NP + table.sinks,
        boundary_NHP=boundary_NHP + table.sinks,
        label_NHP=table.label_NHA.gather(-1, arrival_NHP),
        margin_NHP=table.margin_NHA.gather(-1, arrival_NHP),
        valid_NHP=valid_NP[:, None] & (boundary_NHP != arrival_NHP),
    )


def teacher_decisions(target_priority_NHL: Tensor, arrival_NP: Tensor, valid_NP: Tensor, budget: Budget) -> Decisions:
    """``decide`` on a fresh ``teacher_table``."""
    return decide(teacher_table(target_priority_NHL, budget), arrival_NP, valid_NP)


@torch.no_grad()
def decision_weights(decisions: Decisions, config: BoundaryLoss) -> Tensor:
    """omega [N, H, P]: margin weight (Eq. 23) times keep/drop balance per head (Eq. 24), mean 1 over valid decisions."""
    valid = decisions.valid_NHP
    margin = config.margin_floor + (1 - config.margin_floor) * torch.sigmoid(decisions.margin_NHP / config.margin_scale)
    count_H = valid.sum((0, 2)).clamp(min=1)
    keep_H = (valid & (decisions.label_NHP > 0)).sum((0, 2)) / count_H
    keep, drop = (
        (1 / (2 * share.clamp(min=1e-6))).clamp(*config.balance)[None, :, None] for share in (keep_H, 1 - keep_H)
    )
    weight = margin * torch.where(decisions.label_NHP > 0, keep, drop) * valid
    return weight / (weight.sum() / valid.sum().clamp(min=1)).clamp(min=1e-12)


def boundary_loss(priority_NHL: Tensor, decisions: Decisions, config: BoundaryLoss) -> Tensor:
    """The pairwise logistic loss of Eq. 7 on effective scores, averaged over valid decisions; 0 if there is none.

    ``priority_NHL`` are the student's static priorities: their difference is the difference of effective scores at any q,
    ages included, so the decay gets a gradient too.
    """
    new_NHP = decisions.new_NP[:, None].expand_as(decisions.boundary_NHP)
    difference = priority_NHL.gather(-1, new_NHP) - priority_NHL.gather(-1, decisions.boundary_NHP)
    loss_NHP = F.softplus(-decisions.label_NHP * difference / config.temperature)
    weight_NHP = decision_weights(decisions, config)
    loss_NHP = torch.where(decisions.valid_NHP, weight_NHP * loss_NHP, 0.0)
    return loss_NHP.sum() / decisions.valid_NHP.sum().clamp(min=1)

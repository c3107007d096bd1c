"""The one comparison that changes the cache: the token that just became evictable against the teacher's boundary token.

Rows are documents (see ``documents``). Arrival j of a row is the token t = s + j, which becomes eligible at q = t + w.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvpop.budget import Budget
from kvpop.core.cutoff import ranks, running_cutoffs

# Shapes: N rows, H KV heads, L longest row, A = L - s arrivals, P sampled decisions a row; X = N, or N and H of a budget by
# heads.


@dataclass(frozen=True)
class BoundaryLoss:
    """Sampling and weighting of boundary decisions (Eq. 7, 22-25; Appendix B.4-B.6).

    ``samples`` decisions a row (0: every one), ``late`` the share of them drawn with density rising linearly towards the
    end; ``temperature`` tau; ``margin_floor`` and ``margin_scale`` are omega_min and tau_omega of Eq. 23; ``balance`` the
    clip range of Eq. 24; ``min_future``: a new token with fewer future queries is skipped, its target is too noisy.

    ``regret`` a (ours; 0 is the paper): decisions are weighted by |m_new - m_boundary|^a too, the attention mass that a
    wrong decision loses. Margins are differences of logarithms, which count a token that is never read again for as much as
    one that a later answer hangs on.
    """

    samples: int = 128
    late: float = 0.5
    temperature: float = 1.0
    margin_floor: float = 0.1
    margin_scale: float = 0.5
    balance: tuple[float, float] = (0.5, 4.0)
    min_future: int = 128
    regret: float = 0.0

    def __post_init__(self) -> None:
        if self.samples < 0:
            raise ValueError(f"samples must be at least 0, got {self.samples}")
        if not 0 <= self.regret <= 2:
            raise ValueError(f"regret must be an exponent in [0, 2], got {self.regret}")
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
    """Teacher decisions at sampled queries: token indices within the row, label +-1, margin in nats, regret in attention
    mass, and which count."""

    new_NHP: Tensor
    boundary_NHP: Tensor
    label_NHP: Tensor
    margin_NHP: Tensor
    regret_NHP: Tensor
    valid_NHP: Tensor


def sample_arrivals(
    length_N: Tensor, budget: Budget, config: BoundaryLoss, longest: int, uniform_NP: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Arrivals j in [k, a row's last allowed one] at which to decide (Eq. 25): indices and whether each is real, both [N, P],
    or [N, H, P] of a budget by heads, each with a k of its own.

    ``uniform_NP`` are the draws in [0, 1), P = ``samples`` a row (not needed when every arrival is taken; None: from the
    global generator). Half of them (``late``) have density proportional to the distance from the first: the square root
    of a uniform.
    """
    device, last = length_N.device, max(0, longest - budget.sinks - 1)
    first_X1: Tensor | int = budget.long
    length_X1 = length_N[:, None]
    if budget.heads:
        first_X1 = torch.tensor(budget.heads, device=device)[:, None]
        length_X1 = length_N[:, None, None]
    count_X1 = (length_X1 - budget.sinks - budget.window - config.min_future + 1 - first_X1).clamp(min=0)
    if config.samples == 0:
        offset_P = torch.arange(max(0, longest - budget.sinks - min(budget.heads, default=budget.long)), device=device)
        valid_XP = offset_P < count_X1
        return (offset_P + first_X1).clamp(max=last).expand_as(valid_XP), valid_XP
    if uniform_NP is None:
        uniform_NP = torch.rand(len(length_N), config.samples, device=device)
    late = torch.arange(config.samples, device=device) < round(config.late * config.samples)
    draw_XP = torch.where(late, uniform_NP.sqrt(), uniform_NP)
    if budget.heads:  # the same draws for every head
        draw_XP = draw_XP[:, None]
    offset_XP = (draw_XP * count_X1).long().minimum((count_X1 - 1).clamp(min=0))
    return (offset_XP + first_X1).clamp(max=last), (count_X1 > 0).expand_as(offset_XP)


@dataclass(frozen=True)
class TeacherTable:
    """The teacher's decision at every arrival: boundary arrival, label +-1, margin in nats, regret in attention mass; decided
    only from j >= k on. ``long`` is the k of the heads that have most."""

    boundary_NHA: Tensor
    label_NHA: Tensor
    margin_NHA: Tensor
    regret_NHA: Tensor
    sinks: int
    long: int


@torch.no_grad()
def teacher_tables(
    target_priority_NHL: Tensor, budgets: Sequence[Budget], impl: Literal["parallel", "triton"] = "parallel",
    target_NHL: Tensor | None = None,
) -> list[TeacherTable]:  # fmt: skip
    """Rank tokens by the target's static priorities and follow the running cutoff, once for all arrivals (Eq. 6).

    y = +1 iff the new token is among the teacher's k best of E(q); the boundary token is the k-th best. One table a
    budget; they differ in k only, which may be that of each head. ``target_NHL`` is the target itself (log mass), for
    regrets; None: there is no decay, the priorities are it. ``impl`` as in ``running_cutoffs``. Raises ValueError for budgets
    with different numbers of sinks.
    """
    sinks = budgets[0].sinks
    if any(budget.sinks != sinks for budget in budgets):
        raise ValueError(f"budgets must agree in their sinks, got {sorted({budget.sinks for budget in budgets})}")
    ranked_NHA = target_priority_NHL[..., sinks:]
    mass_NHA = (target_priority_NHL if target_NHL is None else target_NHL)[..., sinks:].exp()
    A = ranked_NHA.shape[-1]
    rank_NHA = ranks(ranked_NHA)
    order_NHA = torch.empty_like(rank_NHA).scatter_(
        -1, rank_NHA, torch.arange(A, device=rank_NHA.device).expand_as(rank_NHA)
    )
    tables = []
    for budget, cutoff_NHA in zip(budgets, running_cutoffs(rank_NHA, [b.heads or b.long for b in budgets], impl)):
        decides = [0 < k < A for k in budget.heads or (budget.long,)]
        if not any(decides):  # never full, or nothing to keep: there is no boundary
            nothing = ranked_NHA[..., :0]
            tables.append(TeacherTable(nothing.long(), nothing, nothing, nothing, sinks, budget.long))
            continue
        boundary_NHA = order_NHA.gather(-1, cutoff_NHA.clamp(min=0, max=A - 1))
        if not all(decides):  # of these heads every token is its own boundary: none counts
            decides_H1 = torch.tensor(decides, device=rank_NHA.device)[:, None]
            boundary_NHA = boundary_NHA.where(decides_H1, torch.arange(A, device=rank_NHA.device))
        label_NHA = torch.where(rank_NHA >= cutoff_NHA, 1.0, -1.0)
        margin_NHA = label_NHA * (ranked_NHA - ranked_NHA.gather(-1, boundary_NHA))
        regret_NHA = (mass_NHA - mass_NHA.gather(-1, boundary_NHA)).abs()
        margin_NHA, regret_NHA = margin_NHA.to(label_NHA.dtype), regret_NHA.to(label_NHA.dtype)
        tables.append(TeacherTable(boundary_NHA, label_NHA, margin_NHA, regret_NHA, sinks, budget.long))
    return tables


def teacher_table(target_priority_NHL: Tensor, budget: Budget) -> TeacherTable:
    """``teacher_tables`` for one budget."""
    return teacher_tables(target_priority_NHL, [budget])[0]


@torch.no_grad()
def decide(table: TeacherTable, arrival_XP: Tensor, valid_XP: Tensor) -> Decisions:
    """Read the table at sampled arrivals, [N, P] or [N, H, P] as ``sample_arrivals`` has them. A new token that is itself the
    boundary carries no information: not counted."""
    N, H, A = table.boundary_NHA.shape
    arrival_NHP, valid_NHP = ((x if x.ndim == 3 else x[:, None]).expand(N, H, -1) for x in (arrival_XP, valid_XP))
    if A == 0 or arrival_NHP.shape[2] == 0:
        nothing = torch.zeros(arrival_NHP.shape, device=arrival_NHP.device)
        return Decisions(nothing.long(), nothing.long(), nothing, nothing, nothing, nothing.bool())
    boundary_NHP = table.boundary_NHA.gather(-1, arrival_NHP)
    return Decisions(
        new_NHP=arrival_NHP + table.sinks,
        boundary_NHP=boundary_NHP + table.sinks,
        label_NHP=table.label_NHA.gather(-1, arrival_NHP),
        margin_NHP=table.margin_NHA.gather(-1, arrival_NHP),
        regret_NHP=table.regret_NHA.gather(-1, arrival_NHP),
        valid_NHP=valid_NHP & (boundary_NHP != arrival_NHP),
    )


def teacher_decisions(target_priority_NHL: Tensor, arrival_XP: Tensor, valid_XP: Tensor, budget: Budget) -> Decisions:
    """``decide`` on a fresh ``teacher_table``."""
    return decide(teacher_table(target_priority_NHL, budget), arrival_XP, valid_XP)


@torch.no_grad()
def decision_counts(decisions: Decisions, config: BoundaryLoss) -> Tensor:
    """What the weights need to know of a batch, per KV head: [4, H], float64. Adds up over batches and processes.

    Rows: number of valid decisions; those with the label keep; the sum of margin weights (Eq. 23) of the keeps; of the
    drops.
    """
    valid_NHP = decisions.valid_NHP
    keep_NHP = valid_NHP & (decisions.label_NHP > 0)
    margin_NHP = _margin_weight(decisions, config) * valid_NHP
    kept_NHP = margin_NHP * keep_NHP
    return torch.stack([x.double().sum((0, 2)) for x in (valid_NHP, keep_NHP, kept_NHP, margin_NHP - kept_NHP)])


def _margin_weight(decisions: Decisions, config: BoundaryLoss) -> Tensor:
    """Eq. 23, times the power of the regret, in float64: in float32 the last bit of a sigmoid depends on where in a tensor it
    is computed."""
    share_NHP = torch.sigmoid(decisions.margin_NHP.double() / config.margin_scale)
    weight_NHP = config.margin_floor + (1 - config.margin_floor) * share_NHP
    return weight_NHP * decisions.regret_NHP.double() ** config.regret if config.regret else weight_NHP


@torch.no_grad()
def decision_weights(
    decisions: Decisions, config: BoundaryLoss, counts_4H: Tensor | None = None, layers: int = 1
) -> Tensor:
    """omega [N, H, P]: margin weight (Eq. 23) times keep/drop balance per head (Eq. 24), mean 1 over valid decisions.

    ``counts_4H`` describe all the decisions that are averaged together (None: just these). Heads may be those of several
    ``layers``, an equal number each: every layer has its own mean.
    """
    count_H, keep_H, margin_keep_H, margin_drop_H = (
        decision_counts(decisions, config) if counts_4H is None else counts_4H
    )
    share_H = keep_H / count_H.clamp(min=1)
    keep_weight_H, drop_weight_H = (
        (1 / (2 * share.clamp(min=1e-6))).clamp(*config.balance) for share in (share_H, 1 - share_H)
    )
    total_L = (margin_keep_H * keep_weight_H + margin_drop_H * drop_weight_H).view(layers, -1).sum(-1)
    mean_L = (total_L / count_H.view(layers, -1).sum(-1).clamp(min=1)).clamp(min=1e-30)  # of regrets: tiny
    mean_H = mean_L[:, None].expand(layers, len(count_H) // layers).flatten()
    margin_NHP = _margin_weight(decisions, config)
    keep, drop = ((x / mean_H)[None, :, None] for x in (keep_weight_H, drop_weight_H))
    weight_NHP = margin_NHP * torch.where(decisions.label_NHP > 0, keep, drop) * decisions.valid_NHP
    return weight_NHP.to(decisions.margin_NHP.dtype)


def boundary_losses(
    priority_NHL: Tensor,
    decisions: Decisions,
    config: BoundaryLoss,
    counts_4H: Tensor | None = None,
    layers: int = 1,
) -> Tensor:
    """The pairwise logistic loss of Eq. 7 on effective scores, weighted and *summed* over the valid decisions of each
    layer: [layers]. Divided by their number it is the loss; sums add up over batches and processes.

    ``priority_NHL`` are the student's static priorities: their difference is the difference of effective scores at any q,
    ages included, so the decay gets a gradient too. ``counts_4H`` and ``layers`` as in ``decision_weights``.
    """
    difference = priority_NHL.gather(-1, decisions.new_NHP) - priority_NHL.gather(-1, decisions.boundary_NHP)
    loss_NHP = F.softplus(-decisions.label_NHP * difference / config.temperature)
    weight_NHP = decision_weights(decisions, config, counts_4H, layers)
    loss_NHP = torch.where(decisions.valid_NHP, weight_NHP * loss_NHP, 0.0)
    return loss_NHP.sum((0, 2)).view(layers, -1).sum(-1)


def boundary_loss(priority_NHL: Tensor, decisions: Decisions, config: BoundaryLoss) -> Tensor:
    """``boundary_losses`` averaged over the valid decisions; 0 if there is none."""
    return boundary_losses(priority_NHL, decisions, config).sum() / decisions.valid_NHP.sum().clamp(min=1)

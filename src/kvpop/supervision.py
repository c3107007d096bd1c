"""From what a layer did with a sequence to its scorer's loss: target, teacher decisions, boundary loss, and what to log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpop.budget import Budget
from kvpop.core.boundary import BoundaryLoss, TeacherTable, boundary_loss, decide, sample_arrivals, teacher_table
from kvpop.core.cutoff import expiry
from kvpop.core.target import Target, floored, future_target
from kvpop.documents import Documents
from kvpop.ops.sparse_attention.api import NEVER, sparse_attention
from kvpop.policies import LayerView, RankedLayer

# Shapes: B batch, H KV heads, S sequence, N documents, L longest document.


@dataclass(frozen=True)
class Supervised:
    """A layer's teacher signal, detached from everything: inputs of the scorer and what it should have said."""

    layer: int
    policy: RankedLayer
    k: Tensor
    v: Tensor
    documents: Documents
    target_NHL: Tensor
    tables: tuple[TeacherTable, ...]
    under_epsilon: float
    above_one: float


@torch.no_grad()
def supervise(view: LayerView, target: Target, budgets: Sequence[Budget], impl: str = "reference") -> Supervised:
    """Form the future-attention target of one layer from its queries, keys and log-normalisers (Eq. 2, 3, 8, 9), and
    what a teacher that ranks by it decides under each of ``budgets``. Teacher and student share the decay, detached here.
    """
    policy, docs = view.policy, view.documents
    assert isinstance(policy, RankedLayer)
    lse = view.lse
    if target.lse == "dense":
        never = torch.full(view.k.shape[:3], NEVER, dtype=torch.int32, device=view.k.device)
        never = never.minimum(docs.end_BS[:, None].int())
        _, lse = sparse_attention(view.q, view.k, view.v, never, scale=view.scale, impl=impl)  # type: ignore[arg-type]
    log_mass_BHS = future_target(
        view.q, view.k, lse, docs, scale=view.scale, window=policy.budget.window, target=target,
        impl=impl,  # type: ignore[arg-type]
    )  # fmt: skip
    has_future = log_mass_BHS > -torch.inf
    count = has_future.sum().clamp(min=1)
    under = ((log_mass_BHS.exp() < target.epsilon) & has_future).sum() / count
    above = (log_mass_BHS > 0).sum() / count
    target_NHL = docs.to_rows(floored(log_mass_BHS, target.epsilon))
    priority_NHL = policy.priority(target_NHL)
    return Supervised(
        layer=view.layer,
        policy=policy,
        k=view.k.detach(),
        v=view.v.detach(),
        documents=docs,
        target_NHL=target_NHL,
        tables=tuple(teacher_table(priority_NHL, budget) for budget in budgets),
        under_epsilon=float(under),
        above_one=float(above),
    )


def scorer_loss(
    teacher: Supervised,
    score_NHL: Tensor,
    config: BoundaryLoss,
    budgets: Sequence[Budget],
    generator: torch.Generator | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Boundary loss of a layer, averaged over the ``budgets`` it was supervised for, and per-head keep rate and accuracy."""
    policy, docs = teacher.policy, teacher.documents
    student_NHL = policy.priority(score_NHL)
    losses: list[Tensor] = []
    keep = right = count = torch.zeros(score_NHL.shape[1], dtype=torch.long, device=score_NHL.device)
    for budget, table in zip(budgets, teacher.tables, strict=True):
        arrival, valid = sample_arrivals(docs.length_N, budget, config, score_NHL.shape[-1], generator)
        decisions = decide(table, arrival, valid)
        losses.append(boundary_loss(student_NHL, decisions, config))
        with torch.no_grad():
            new = decisions.new_NP[:, None].expand_as(decisions.boundary_NHP)
            margin = student_NHL.gather(-1, new) - student_NHL.gather(-1, decisions.boundary_NHP)
            keep = keep + ((decisions.label_NHP > 0) & decisions.valid_NHP).sum((0, 2))
            right = right + ((margin * decisions.label_NHP > 0) & decisions.valid_NHP).sum((0, 2))
            count = count + decisions.valid_NHP.sum((0, 2))
    stats = {"keep_H": keep, "right_H": right, "count_H": count}
    return torch.stack(losses).mean(), stats


@torch.no_grad()
def teacher_recall(teacher: Supervised, score_NHL: Tensor, budget: Budget, min_future: int) -> Tensor:
    """Share of the teacher's long-range tokens that the student keeps too, per KV head [H]; NaN if no row is long enough.

    Read at each row's last query whose tokens all have at least ``min_future`` future queries behind the window.
    """
    policy, docs = teacher.policy, teacher.documents
    log_gamma_H = policy.decay().detach()
    student = expiry(policy.priority(score_NHL.detach(), log_gamma_H), budget)
    oracle = expiry(policy.priority(teacher.target_NHL.to(score_NHL.dtype), log_gamma_H), budget)
    q_N = (docs.length_N - 1 - min_future)[:, None, None]
    index = torch.arange(score_NHL.shape[-1], device=score_NHL.device)
    eligible = (index >= budget.sinks) & (index <= q_N - budget.window) & (q_N >= budget.slots)
    wanted = eligible & (q_N < oracle)
    return (wanted & (q_N < student)).sum((0, 2)) / wanted.sum((0, 2))


class Summary:
    """What an optimizer step says about its scorers, gathered layer by layer and batch by batch.

    Recall is that of ``budget``. Loss and accuracy are averages over decisions, NaN if there were none.
    """

    def __init__(self, budget: Budget, min_future: int) -> None:
        self.budget, self.min_future = budget, min_future
        self.parts: dict[int, list[dict[str, Tensor]]] = {}

    def add(self, teacher: Supervised, score_NHL: Tensor, loss: Tensor, stats: dict[str, Tensor]) -> None:
        """One layer on one batch, from what ``scorer_loss`` returned."""
        part = {
            **stats,
            "loss": loss.detach() * stats["count_H"].sum(),
            "recall": teacher_recall(teacher, score_NHL, self.budget, self.min_future).nanmean(),
            "decay": teacher.policy.decay().detach(),
            "under_epsilon": torch.tensor(teacher.under_epsilon),
            "above_one": torch.tensor(teacher.above_one),
        }
        self.parts.setdefault(teacher.layer, []).append(part)

    def _sum(self, layer: int, key: str) -> Tensor:
        return torch.stack([part[key] for part in self.parts[layer]]).sum(0)

    def decisions(self, layer: int) -> int:
        """Decisions of a layer, over batches, heads and budgets."""
        return int(self._sum(layer, "count_H").sum())

    def record(self) -> dict[str, Any]:
        """Means over layers; keep rates and decays per layer and head."""
        count = {layer: self.decisions(layer) for layer in self.parts}

        def mean(values: Iterable[Tensor]) -> float:
            return float(torch.stack([value.double().cpu() for value in values]).nanmean())

        return {
            "score_loss": mean(self._sum(layer, "loss") / count[layer] for layer in self.parts),
            "accuracy": mean(self._sum(layer, "right_H").sum() / count[layer] for layer in self.parts),
            "decisions": sum(count.values()),
            **{
                key: mean(part[key] for parts in self.parts.values() for part in parts)
                for key in ("recall", "under_epsilon", "above_one")
            },
            "keep": [
                (self._sum(layer, "keep_H") / self._sum(layer, "count_H").clamp(min=1)).tolist() for layer in self.parts
            ],
            "decay": [parts[-1]["decay"].tolist() for parts in self.parts.values()],
        }

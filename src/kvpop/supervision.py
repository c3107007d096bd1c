"""From what layers did with a sequence to their scorers' loss: target, teacher decisions, boundary loss, and what to log.

KV heads share no weights, so the scorers of several layers are one scorer with the heads of all of them: the work below is
done for a stack of layers at once. Nothing here is part of the backbone's graph: queries, keys and values come detached.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvpop.budget import Budget
from kvpop.core.boundary import (
    BoundaryLoss,
    Decisions,
    TeacherTable,
    boundary_losses,
    decide,
    decision_counts,
    sample_arrivals,
    teacher_tables,
)
from kvpop.core.cutoff import expiry
from kvpop.core.priority import static_priority
from kvpop.core.residual import Comparisons, comparisons, residual_mass
from kvpop.core.target import Target, floored, future_target
from kvpop.documents import Documents
from kvpop.ops.residual_mass import kernel_or_reference
from kvpop.policies import LayerView, RankedLayer
from kvpop.policies.base import cutoff_impl, dense_attention
from kvpop.scorers import Scorer

# Shapes: B batch, H KV heads of all layers of a stack, S sequence, N documents, L longest document, P decisions.


class Stack:
    """The scorers and decays of several layers as one: heads are laid one layer after the other, and so are their budgets.

    The parameters stay those of the layers; gradients reach them. Raises ValueError for layers that differ in anything
    but their weights and what their heads get of one policy's budget.
    """

    def __init__(self, layers: Sequence[RankedLayer]) -> None:
        first = layers[0]
        for layer in layers:
            mine, theirs = layer.describe(), first.describe()
            unlike = [key for key in mine if key not in ("layer", "decay", "heads") and mine[key] != theirs[key]]
            if unlike or layer.shape.kv_heads != first.shape.kv_heads:
                raise ValueError(
                    f"layers {first.shape.layer} and {layer.shape.layer} cannot be trained together: they differ in "
                    f"{', '.join(unlike) or 'their number of KV heads'}"
                )
        self.layers, self.decay_step = list(layers), first.decay_step
        self.budget = stacked([layer.budget for layer in layers], first.shape.kv_heads)
        with torch.random.fork_rng(devices=[]):
            self.template = _Scoring(copy.deepcopy(first.scorer))
        for module in self.template.modules():
            if isinstance(module, Scorer):
                module.heads *= len(layers)

    def score(self, x_NHLE: Tensor, documents: Documents) -> Tensor:
        """Raw scores in nats [N, H, L] of x = [k; v] of all heads, rows of documents."""
        scorers = [dict(layer.scorer.state_dict(keep_vars=True)) for layer in self.layers]
        stacked = {
            f"scorer.{name}": torch.cat([scorer[name] for scorer in scorers]) if first.ndim else first
            for name, first in scorers[0].items()
        }
        valid_NL = None if documents.is_trivial else documents.valid_rows(x_NHLE.shape[2])
        return torch.func.functional_call(self.template, stacked, (x_NHLE, self.budget.window, valid_NL))

    def log_gamma(self) -> Tensor:
        """log gamma [H], nats a step."""
        return torch.cat([layer.decay() for layer in self.layers])

    def priority(self, score_NHL: Tensor, log_gamma_H: Tensor) -> Tensor:
        position_L = torch.arange(score_NHL.shape[-1], device=score_NHL.device)
        return static_priority(score_NHL, position_L, log_gamma_H, self.decay_step)


def stacked(budgets: Sequence[Budget], kv_heads: int) -> Budget:
    """One budget for the heads of several layers of equal sinks and windows, ``kv_heads`` each."""
    return budgets[0].with_heads([k for budget in budgets for k in budget.longs(kv_heads)])


class _Scoring(nn.Module):
    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer

    def forward(self, x_NHLE: Tensor, window: int, valid_NL: Tensor | None) -> Tensor:
        return self.scorer.score_sequence(x_NHLE, window, valid_NL)


@dataclass(frozen=True)
class Supervised:
    """The teacher signal of a stack of layers on one batch, detached from everything: the scorers' inputs and what they
    should have said under each of several ``budgets`` of the stack."""

    stack: Stack
    x_NHLE: Tensor
    documents: Documents
    target_NHL: Tensor
    tables: tuple[TeacherTable, ...]
    edges_3H: Tensor
    budgets: tuple[Budget, ...]
    cutoff: Literal["parallel", "triton"] = "parallel"
    residual: tuple[Comparisons, ...] = ()
    """What a teacher that looks again would decide, in place of ``tables``."""


@torch.no_grad()
def supervise(
    views: Sequence[LayerView], target: Target, budgets: Sequence[Budget], impl: str = "reference",
    stack: Stack | None = None,
) -> Supervised:  # fmt: skip
    """Form the future-attention target of the layers in ``views`` from their queries, keys and log-normalisers (Eq. 2, 3,
    8, 9), and what a teacher that ranks by it decides under each of ``budgets``, those of the stack (``stacked``). Teacher
    and student share the decay.

    ``stack``: the stack of exactly these layers, if it exists already. ``edges_3H`` counts the keys of each head whose
    mass lies below epsilon, above 1, and all that have a future.
    """
    if stack is None:
        stack = Stack([view.policy for view in views])  # type: ignore[misc]
    docs, scale = views[0].documents, views[0].scale
    q, k, v = (torch.cat([getattr(view, name).detach() for view in views], dim=1) for name in ("q", "k", "v"))
    if target.lse == "dense":
        _, lse = dense_attention(q, k, v, docs, scale, impl)  # type: ignore[arg-type]
    else:
        lse = torch.cat([view.lse.detach() for view in views], dim=1)
    log_mass_BHS = future_target(
        q, k, lse, docs, scale=scale, window=stack.budget.window, target=target, impl=impl  # type: ignore[arg-type]
    )  # fmt: skip
    has_future = log_mass_BHS > -torch.inf
    under = (log_mass_BHS.exp() < target.epsilon) & has_future
    how = cutoff_impl(impl, q)  # type: ignore[arg-type]
    target_NHL = docs.to_rows(floored(log_mass_BHS, target.epsilon))
    tables: tuple[TeacherTable, ...] = ()
    residual: tuple[Comparisons, ...] = ()
    if target.residual:
        mass_NHCL = residual_mass(
            docs.to_rows(q), docs.to_rows(k), docs.to_rows(lse), docs.length_N, scale=scale, block=target.residual,
            power=target.power, aggregate=target.aggregate,
            impl=kernel_or_reference(q) if impl == "flex" else impl,  # type: ignore[arg-type]
        )  # fmt: skip
        residual = tuple(comparisons(mass_NHCL, budget, target.residual) for budget in budgets)
    else:
        tables = tuple(teacher_tables(stack.priority(target_NHL, stack.log_gamma()), budgets, how, target_NHL))
    return Supervised(
        stack=stack,
        x_NHLE=docs.to_rows(torch.cat([k, v], dim=-1)),
        documents=docs,
        target_NHL=target_NHL,
        tables=tables,
        residual=residual,
        budgets=tuple(budgets),
        cutoff=how,
        edges_3H=torch.stack([keys.sum((0, 2)) for keys in (under, log_mass_BHS > 0, has_future)]),
    )


def decisions_of(
    teacher: Supervised, config: BoundaryLoss, budgets: Sequence[Budget], uniform_NP: Tensor | None = None
) -> list[Decisions]:
    """The decisions that the loss looks at, for each budget; ``uniform_NP`` as in ``sample_arrivals``."""
    if teacher.residual:
        return [found.early(teacher.documents.length_N - config.min_future) for found in teacher.residual]
    longest = teacher.target_NHL.shape[-1]
    return [
        decide(table, *sample_arrivals(teacher.documents.length_N, budget, config, longest, uniform_NP))
        for budget, table in zip(budgets, teacher.tables, strict=True)
    ]


def scorer_losses(
    teacher: Supervised, decisions: Sequence[Decisions], config: BoundaryLoss, counts_K4H: Tensor
) -> tuple[Tensor, Tensor]:
    """The boundary losses of every layer, summed over its decisions under all budgets [layers], and the scores [N, H, L].

    ``counts_K4H``: ``decision_counts`` for each budget, of all the decisions that are averaged together.
    """
    stack = teacher.stack
    score_NHL = stack.score(teacher.x_NHLE, teacher.documents)
    priority_NHL = stack.priority(score_NHL, stack.log_gamma())
    losses = [
        boundary_losses(priority_NHL, of_budget, config, counts_4H, len(stack.layers))
        for of_budget, counts_4H in zip(decisions, counts_K4H, strict=True)
    ]
    return torch.stack(losses).sum(0), score_NHL.detach()


def counts_of(decisions: Sequence[Decisions], config: BoundaryLoss) -> Tensor:
    """``decision_counts`` of each budget: [K, 4, H]."""
    return torch.stack([decision_counts(of_budget, config) for of_budget in decisions])


@torch.no_grad()
def teacher_recall(teacher: Supervised, score_NHL: Tensor, budget: Budget, min_future: int) -> Tensor:
    """How many of the teacher's long-range tokens the student keeps too, and how many there are, per KV head: [2, H].
    ``budget`` is one of the stack's.

    Read at each row's last query whose tokens all have at least ``min_future`` future queries behind the window.
    """
    stack, docs = teacher.stack, teacher.documents
    log_gamma_H = stack.log_gamma()
    both = torch.cat([score_NHL.detach(), teacher.target_NHL.to(score_NHL.dtype)])
    student, oracle = expiry(stack.priority(both, log_gamma_H), budget, teacher.cutoff).chunk(2)
    q_N = (docs.length_N - 1 - min_future)[:, None, None]
    index = torch.arange(score_NHL.shape[-1], device=score_NHL.device)
    k_H1 = torch.tensor(budget.longs(score_NHL.shape[1]), device=score_NHL.device)[:, None]
    full = q_N >= k_H1 + budget.sinks + budget.window
    eligible = (index >= budget.sinks) & (index <= q_N - budget.window) & full
    wanted = eligible & (q_N < oracle)
    return torch.stack([(wanted & (q_N < student)).sum((0, 2)), wanted.sum((0, 2))]).double()


class Summary:
    """What an optimizer step says about its scorers: sums over batches and budgets, per head, so that they add up over
    processes too.

    Recall is that of the first budget; loss and accuracy are averages over decisions, NaN if there were none.
    """

    def __init__(self, layers: Sequence[RankedLayer], min_future: int, recall: bool = True) -> None:
        self.layers, self.min_future, self.with_recall = list(layers), min_future, recall
        self.rows = {layer.shape.layer: i for i, layer in enumerate(self.layers)}
        self.sums: Tensor | None = None  # [10, layers, heads of a layer], float64

    def add(
        self, teacher: Supervised, decisions: Sequence[Decisions], losses_L: Tensor, counts_K4H: Tensor,
        score_NHL: Tensor,
    ) -> None:  # fmt: skip
        """One stack on one batch, with the ``counts`` of this process alone."""
        stack = teacher.stack
        L = len(stack.layers)
        priority = stack.priority(score_NHL, stack.log_gamma().detach())
        right_H = torch.zeros(score_NHL.shape[1], dtype=torch.double, device=score_NHL.device)
        kept_H = torch.zeros_like(right_H)
        for of_budget in decisions:
            margin = priority.gather(-1, of_budget.new_NHP) - priority.gather(-1, of_budget.boundary_NHP)
            right_H += ((margin * of_budget.label_NHP > 0) & of_budget.valid_NHP).sum((0, 2))
            kept_H += ((margin > 0) & of_budget.valid_NHP).sum((0, 2))
        count_H, keep_H = counts_K4H.sum(0)[:2]
        recall = (
            teacher_recall(teacher, score_NHL, teacher.budgets[0], self.min_future)
            if self.with_recall
            else torch.zeros(2, len(count_H), dtype=torch.double, device=count_H.device)
        )
        loss_H = (losses_L.detach().double() / (len(count_H) // L)).repeat_interleave(len(count_H) // L)
        parts = torch.stack([count_H, keep_H, right_H, kept_H, loss_H, *recall, *teacher.edges_3H]).view(10, L, -1)
        if self.sums is None:
            self.sums = torch.zeros(10, len(self.layers), parts.shape[-1], dtype=torch.double, device=parts.device)
        self.sums[:, [self.rows[layer.shape.layer] for layer in stack.layers]] += parts

    def record(self) -> dict[str, Any]:
        """Means over layers; keep rates, recall and decays per layer (and head)."""
        if self.sums is None:
            return {}
        count, keep, right, kept, loss, hits, wanted, under, above, keys = self.sums.cpu().unbind()
        decisions = count.sum(1)

        def mean(x: Tensor) -> float:
            return float(x.nanmean())

        record = {
            "score_loss": mean(loss.sum(1) / decisions),
            "accuracy": mean(right.sum(1) / decisions),
            "decisions": int(count.sum()),
            "under_epsilon": float(under.sum() / keys.sum().clamp(min=1)),
            "above_one": float(above.sum() / keys.sum().clamp(min=1)),
            "decided": count.long().tolist(),
            "keep": (keep / count.clamp(min=1)).tolist(),
            "student_keep": (kept / count.clamp(min=1)).tolist(),
            "decay": [layer.decay().detach().tolist() for layer in self.layers],
        }
        if self.with_recall:
            record["recall"] = mean(hits / wanted)
            record["recall_by_layer"] = (hits / wanted).nanmean(1).tolist()
        return record

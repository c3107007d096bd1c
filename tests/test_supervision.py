"""Several layers trained as one stack are each layer alone; what a step says about its scorers adds up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvpop.attachment import attach, attached_policies
from kvpop.budget import Budget
from kvpop.core import BoundaryLoss, Target
from kvpop.data import PackedSequence
from kvpop.documents import Documents
from kvpop.policies import ByLayer, KVpop, LayerView, RankedLayer, SequencePass
from kvpop.supervision import (
    Stack,
    Summary,
    counts_of,
    decisions_of,
    scorer_losses,
    stacked,
    supervise,
    teacher_recall,
)
from tests.tiny import VOCAB, family_model, tiny_model
from tests.training import BUDGET, SCORER, assert_close, gradients, timeless, trainer

KINDS = ["mlp", "mlstm", "mlstm-immediate", "mlp+mlstm"]
LOSS = BoundaryLoss(min_future=8, samples=24)
BUDGETS = [BUDGET, Budget(2, 8, 3)]


def shaken(model, seed: int = 0):
    """Scorers, decays and standardisations that differ between layers and heads."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for policy in attached_policies(model):
            for p in policy.parameters():
                p.add_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
            policy.scorer.shift_HE.copy_(torch.randn(policy.scorer.shift_HE.shape, generator=generator))
            policy.scorer.scale_HE.copy_(torch.rand(policy.scorer.scale_HE.shape, generator=generator) + 0.5)
    return model


def observed(model, *rows: Sequence[int], size: int = 100, seed: int = 0) -> list[LayerView]:
    """What the layers did with rows of packed documents of these lengths."""
    rng = np.random.default_rng(seed)
    made = [PackedSequence.from_pieces([rng.integers(3, VOCAB, n) for n in lengths], size) for lengths in rows]
    documents = Documents(torch.from_numpy(np.stack([row.document_ids for row in made])))
    ids = torch.from_numpy(np.stack([row.tokens for row in made]).astype(np.int64))
    views: list[LayerView] = []
    with torch.no_grad():
        seq = SequencePass(documents, observe=views.append)
        model(ids, position_ids=documents.position_BS, use_cache=False, kvpop=seq)
    return views


def four_layers(policy) -> torch.nn.Module:
    return shaken(attach(family_model("Llama", num_hidden_layers=4), policy))


def score_inputs(view: LayerView) -> Tensor:
    return view.documents.to_rows(torch.cat([view.k, view.v], dim=-1))


def uniform(documents: Documents) -> Tensor:
    return torch.rand(len(documents), LOSS.samples, generator=torch.Generator().manual_seed(1))


# A stack is its layers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [((60, 37), (99,)), ((100,), (100,))], ids=["packed", "whole rows"])
def test_a_stack_scores_and_decays_as_its_layers_do(kind: str, rows: tuple) -> None:
    views = observed(four_layers(KVpop(BUDGET, scorer=kind, decay_step=3)), *rows)
    stack = Stack([view.policy for view in views])
    x = torch.cat([score_inputs(view) for view in views], dim=1)
    scores = stack.score(x, views[0].documents)
    assert scores.dtype == torch.float64
    assert scores.std() > 0.01
    for i, view in enumerate(views):
        heads = slice(2 * i, 2 * i + 2)
        torch.testing.assert_close(scores[:, heads], view.score_NHL, rtol=1e-12, atol=1e-13)
        assert torch.equal(stack.log_gamma()[heads], view.policy.decay())
        mine = stack.priority(scores, stack.log_gamma())[:, heads]
        assert torch.equal(mine, view.policy.priority(scores[:, heads]))


@pytest.mark.parametrize("target", [Target(), Target(residual=8)], ids=["static", "residual"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_has_the_target_loss_and_gradients_of_its_layers(kind: str, target: Target) -> None:
    model = four_layers(KVpop(BUDGET, scorer=kind))
    views = observed(model, (60, 37), (99,))
    draws = uniform(views[0].documents)

    def learned(group: list[LayerView]) -> tuple[dict[str, Tensor], list[Tensor], Tensor]:
        teacher = supervise(group, target, BUDGETS)
        decisions = decisions_of(teacher, LOSS, BUDGETS, draws)
        losses, _ = scorer_losses(teacher, decisions, LOSS, counts_of(decisions, LOSS))
        losses.sum().backward()
        parameters = {f"{v.layer}.{n}": p for v in group for n, p in v.policy.named_parameters()}
        found = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        assert found.keys() == parameters.keys()
        for p in parameters.values():
            p.grad = None
        return found, list(losses.detach()), teacher.target_NHL

    together, losses, targets = learned(views)
    assert all(loss > 0 for loss in losses)
    alone: dict[str, Tensor] = {}
    for i, view in enumerate(views):
        found, (loss,), target_of = learned([view])
        alone |= found
        torch.testing.assert_close(losses[i], loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(targets[:, 2 * i : 2 * i + 2], target_of, rtol=1e-12, atol=0)
    assert_close(alone, together)


HEADS = ((1, 15), (8, 8), (20, 0), (5, 7))  # of BUDGET: 8 on average


@pytest.mark.parametrize("samples", [0, 24])
@pytest.mark.parametrize("target", [Target(), Target(residual=8)], ids=["static", "residual"])
def test_a_stack_of_unequal_heads_has_the_loss_and_gradients_of_its_layers(target: Target, samples: int) -> None:
    views = observed(four_layers(KVpop(BUDGET, scorer="mlp", heads=HEADS)), (60, 37), (99,))
    draws = uniform(views[0].documents) if samples else None
    loss = replace(LOSS, samples=samples)
    other = [Budget(2, 8, 0).with_heads(row) for row in ((2, 2), (0, 4), (3, 3), (1, 1))]

    def learned(group: list[LayerView]) -> tuple[list[dict[str, Tensor]], Tensor, Tensor, Tensor]:
        budgets = [stacked([v.policy.budget for v in group], 2), stacked([other[v.layer] for v in group], 2)]
        teacher = supervise(group, target, budgets)
        assert teacher.stack.budget == teacher.budgets[0] == budgets[0]
        decisions = decisions_of(teacher, loss, teacher.budgets, draws)
        counts = counts_of(decisions, loss)
        losses, score = scorer_losses(teacher, decisions, loss, counts)
        losses.sum().backward()
        found = [{name: p.grad.clone() for name, p in v.policy.named_parameters()} for v in group]
        for v in group:
            v.policy.zero_grad()
        return found, losses.detach(), counts, teacher_recall(teacher, score, teacher.budgets[0], 8)

    together, losses, counts, recall = learned(views)
    assert torch.isfinite(losses).all()
    assert (counts[0, 0] > 0).tolist() == [k > 0 for row in HEADS for k in row]
    assert (counts[1, 0] > 0).tolist() == [k > 0 for budget in other for k in budget.longs(2)]
    for i, view in enumerate(views):
        (found,), loss_of, counts_of_it, recall_of = learned([view])
        torch.testing.assert_close(losses[i], loss_of[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(counts[..., 2 * i : 2 * i + 2], counts_of_it, rtol=1e-12, atol=0)
        assert torch.equal(recall[:, 2 * i : 2 * i + 2], recall_of)
        assert_close(together[i], found)


def test_a_stack_of_equal_heads_has_a_plain_budget() -> None:
    assert stacked([BUDGET, BUDGET], 2) == BUDGET
    assert stacked([Budget(2, 8, 3), BUDGET], 2) == Budget(2, 8, 8, (3, 3, 8, 8))
    assert stacked([Budget(2, 8, 9, (7, 9)), BUDGET], 2) == Budget(2, 8, 9, (7, 9, 8, 8))


def test_recall_of_unequal_heads_counts_the_tokens_of_each() -> None:
    views = observed(four_layers(KVpop(BUDGET, scorer="mlp", heads=HEADS)), (99, 30), size=130)
    teacher = supervise(views, Target(), [stacked([view.policy.budget for view in views], 2)])
    score = teacher.stack.score(teacher.x_NHLE, teacher.documents).detach()
    found = teacher_recall(teacher, score, teacher.budgets[0], 16)
    gamma = teacher.stack.log_gamma().detach()
    student, oracle = (teacher.stack.priority(x, gamma) for x in (score, teacher.target_NHL))
    for h, k in enumerate([k for row in HEADS for k in row]):
        hits = wanted = 0
        for n, length in enumerate((99, 30)):
            q = length - 1 - 16
            eligible = range(2, q - 8 + 1)
            if q < 10 + k or not k:
                continue
            best = [set(sorted(eligible, key=lambda t: (float(p[n, h, t]), t))[-k:]) for p in (student, oracle)]
            hits, wanted = hits + len(best[0] & best[1]), wanted + len(best[1])
        assert found[:, h].tolist() == [hits, wanted], h
    assert found[1].tolist() == [2, 15, 8, 8, 20, 0, 5, 7]


def test_a_stack_sees_its_layers_change_and_leaves_them_as_they_are() -> None:
    views = observed(four_layers(KVpop(BUDGET)), (90,))
    policies = [view.policy for view in views]
    before = [{name: t.clone() for name, t in policy.state_dict().items()} for policy in policies]
    stack = Stack(policies)
    x = torch.cat([score_inputs(view) for view in views], dim=1)
    first = stack.score(x, views[0].documents).detach()
    for policy, tensors in zip(policies, before):
        assert policy.scorer.heads == 2
        assert all(torch.equal(t, tensors[name]) for name, t in policy.state_dict().items())
    with torch.no_grad():
        policies[1].scorer.mlp.w2_HM.mul_(2)
    second = stack.score(x, views[0].documents).detach()
    changed = [not torch.equal(first[:, h], second[:, h]) for h in range(8)]
    assert changed == [False, False, True, True, False, False, False, False]


def test_making_a_stack_draws_nothing_from_the_global_generator() -> None:
    policies = attached_policies(four_layers(KVpop(BUDGET)))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    Stack(policies)
    assert torch.equal(torch.get_rng_state(), state)


UNLIKE = {
    "budget": KVpop(Budget(2, 8, 9)),
    "decay_step": KVpop(BUDGET, decay_step=2),
    "scorer": KVpop(BUDGET, scorer="mlp"),
}


@pytest.mark.parametrize("difference", UNLIKE)
def test_unlike_layers_are_refused_naming_the_difference(difference: str) -> None:
    model = attach(family_model("Llama", num_hidden_layers=3), ByLayer(KVpop(BUDGET), {2: UNLIKE[difference]}))
    policies = attached_policies(model)
    with pytest.raises(ValueError, match=rf"layers 0 and 2 cannot be trained together: they differ in {difference}$"):
        Stack(policies)
    assert len(Stack(policies[:2]).layers) == 2


def test_layers_with_unlike_numbers_of_heads_are_refused() -> None:
    layers = [attached_policies(attach(tiny_model(kv_heads=h), KVpop(BUDGET)))[0] for h in (1, 2)]
    with pytest.raises(ValueError, match="they differ in"):
        Stack(layers)


def test_decays_may_differ_also_in_their_range() -> None:
    other = KVpop(BUDGET, decay=-1e-3, decay_range=(-5e-3, -1e-4))
    policies = attached_policies(attach(tiny_model(), ByLayer(KVpop(BUDGET), {1: other})))
    assert torch.equal(Stack(policies).log_gamma(), torch.cat([policy.decay() for policy in policies]))


# How many layers at a time does not matter


@pytest.mark.parametrize("options", [{}, {"inner_updates": 3, "train_long": (8, 3)}], ids=["plain", "inner updates"])
def test_the_result_does_not_depend_on_how_many_layers_are_stacked(
    options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacked: list[int] = []

    def counted(views, *args):
        stacked.append(len(views))
        return supervise(views, *args)

    monkeypatch.setattr("kvpop.distill.scoring.supervise", counted)
    found, records = [], []
    elements = 2 * 2 * 2 * 96 * 8  # rows, KV heads, keys and values, tokens, channels: those of one layer
    for limit in (1, elements, 2 * elements - 1, 2 * elements, 2**28):
        t = trainer(replace(SCORER, stack_elements=limit, clip=1e9, **options))
        stacked.clear()
        found.append(gradients(t))
        assert stacked == ([2] if limit >= 2 * elements else [1, 1]), limit
        records.append(timeless(t.step()))
    for other, record in zip(found[1:], records[1:]):
        assert_close(found[0], other, rel=1e-11)
        assert record.keys() == records[0].keys()
        for name in ("score_loss", "accuracy", "recall", "scorer_grad", "decay_grad"):
            assert record[name] == pytest.approx(records[0][name], rel=1e-9), name
        assert record["decided"] == records[0]["decided"]
        assert np.allclose(record["keep"], records[0]["keep"], rtol=1e-12)


# What is logged


def summed(model, rows: Sequence[Sequence[int]], seed: int, recall: bool = True) -> Summary:
    """A summary of all the layers on one batch, all of its decisions."""
    views = observed(model, *rows, seed=seed)
    teacher = supervise(views, Target(), BUDGETS)
    every = replace(LOSS, samples=0)
    decisions = decisions_of(teacher, every, BUDGETS)
    counts = counts_of(decisions, every)
    losses, scores = scorer_losses(teacher, decisions, every, counts)
    summary = Summary(teacher.stack.layers, every.min_future, recall)
    summary.add(teacher, decisions, losses, counts, scores)
    return summary


def test_sums_of_batches_give_the_record_of_both() -> None:
    model = four_layers(KVpop(BUDGET))
    one, two = summed(model, [(60, 37)], 0), summed(model, [(99,)], 1)
    a, b = one.record(), two.record()
    assert one.sums is not None
    one.sums += two.sums  # as the processes do
    both = one.record()
    assert both["decisions"] == a["decisions"] + b["decisions"]
    assert both["decided"] == (np.array(a["decided"]) + np.array(b["decided"])).tolist()
    for name in ("keep", "student_keep"):
        mean = (np.array(a[name]) * a["decided"] + np.array(b[name]) * b["decided"]) / both["decided"]
        assert np.allclose(both[name], mean, rtol=1e-12)
    for name in ("score_loss", "accuracy"):
        assert min(a[name], b[name]) <= both[name] <= max(a[name], b[name])


def test_a_record_has_one_row_a_layer_in_their_order_however_they_are_stacked() -> None:
    model = four_layers(KVpop(BUDGET))
    views = observed(model, (60, 37), (99,))
    policies = [view.policy for view in views]
    every = replace(LOSS, samples=0)
    records = []
    for groups in ([views], [[views[2]], [views[0], views[3]], [views[1]]]):
        summary = Summary(policies, every.min_future)
        for group in groups:
            teacher = supervise(group, Target(), BUDGETS)
            decisions = decisions_of(teacher, every, BUDGETS)
            counts = counts_of(decisions, every)
            losses, scores = scorer_losses(teacher, decisions, every, counts)
            summary.add(teacher, decisions, losses, counts, scores)
        records.append(summary.record())
    assert records[0].keys() == records[1].keys()
    for name, value in records[0].items():
        assert np.allclose(value, records[1][name], rtol=1e-11), name
    assert records[0]["decay"] == [policy.decay().tolist() for policy in policies]
    assert len(records[0]["recall_by_layer"]) == 4


def test_recall_is_left_out_where_it_is_not_asked_for() -> None:
    model = four_layers(KVpop(BUDGET))
    with_recall, without = (summed(model, [(60, 37)], 0, recall).record() for recall in (True, False))
    assert with_recall.keys() - without.keys() == {"recall", "recall_by_layer"}
    assert all(without[name] == with_recall[name] for name in without)


def test_without_a_batch_there_is_nothing_to_say() -> None:
    policies = attached_policies(attach(tiny_model(), KVpop(BUDGET)))
    assert Summary(policies, 16).record() == {}


def test_without_a_decision_loss_and_accuracy_are_no_numbers() -> None:
    record = summed(four_layers(KVpop(BUDGET)), [(20, 20)], 0).record()
    assert record["decisions"] == 0
    assert math.isnan(record["score_loss"])
    assert math.isnan(record["accuracy"])
    assert math.isnan(record["recall"])
    assert record["keep"] == record["student_keep"] == [[0.0, 0.0]] * 4


def test_recall_counts_what_both_keep_at_one_query() -> None:
    """Against sets: the long-range tokens of teacher and student at the last query with enough future."""
    views = observed(four_layers(KVpop(BUDGET, scorer="mlp")), (99, 30), size=130)
    teacher = supervise(views, Target(), [BUDGET])
    score = teacher.stack.score(teacher.x_NHLE, teacher.documents).detach()
    found = teacher_recall(teacher, score, BUDGET, 16)
    gamma = teacher.stack.log_gamma().detach()
    student, oracle = (teacher.stack.priority(x, gamma) for x in (score, teacher.target_NHL))
    for h in range(8):
        hits = wanted = 0
        for n, length in enumerate((99, 30)):
            q = length - 1 - 16
            if q < BUDGET.slots:
                continue
            eligible = range(BUDGET.sinks, q - BUDGET.window + 1)
            best = [
                set(sorted(eligible, key=lambda t: (float(p[n, h, t]), t))[-BUDGET.long :]) for p in (student, oracle)
            ]
            hits, wanted = hits + len(best[0] & best[1]), wanted + len(best[1])
        assert found[:, h].tolist() == [hits, wanted], h
    assert 0 < found[0].sum() < found[1].sum()


@pytest.mark.parametrize("lse", ["sparse", "dense"])
def test_nothing_of_the_supervision_hangs_on_a_graph(lse: str) -> None:
    model = four_layers(KVpop(BUDGET))
    views: list[LayerView] = []
    ids = torch.randint(3, VOCAB, (1, 60))
    model(ids, use_cache=False, kvpop=SequencePass(Documents.single(1, 60), observe=views.append))
    assert views[1].k.requires_grad
    teacher = supervise(views, Target(lse=lse), BUDGETS)
    tensors = [teacher.x_NHLE, teacher.target_NHL, teacher.edges_3H]
    tensors += [table.margin_NHA for table in teacher.tables]
    assert not any(x.requires_grad for x in tensors)
    assert all(isinstance(layer, RankedLayer) for layer in teacher.stack.layers)


def test_a_teacher_that_looks_again_decides_while_there_is_a_future() -> None:
    """Its decisions are those of the residual masses of each document, up to ``min_future`` queries before its end."""
    views = observed(four_layers(KVpop(BUDGET)), (60, 37), (99,))
    every = replace(LOSS, samples=0, min_future=12)
    teacher = supervise(views[:1], Target(residual=8), [BUDGET])
    (decisions,) = decisions_of(teacher, every, [BUDGET])
    (found,) = teacher.residual
    for n, length in enumerate((60, 37, 99)):
        times = found.time_P[decisions.valid_NHP[n].any(0)]
        first = BUDGET.slots  # at this position there is one token too many
        assert bool((times <= length - 12).all())
        assert bool((times >= first).all())
        assert len(times) == 0 or int(times.max()) > length - 12 - 8
    assert bool(decisions.valid_NHP[2].any())

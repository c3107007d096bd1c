"""Training: what a loss may reach, what it must not, what the log says, and what must not change the result."""

from __future__ import annotations

import gc
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvpop.adapter import base_tensors, load, scorer_tensors
from kvpop.allocation import apportion
from kvpop.attachment import attach, attached_policies
from kvpop.budget import Budget
from kvpop.core import BoundaryLoss, Target
from kvpop.core.boundary import boundary_losses
from kvpop.data import SequenceStream
from kvpop.distill import LOG, DistillConfig, Trainer
from kvpop.distill.checkpoint import Checkpoints
from kvpop.documents import Documents
from kvpop.policies import ByLayer, Dense, KVpop, LayerView, SequencePass
from kvpop.supervision import Summary, counts_of, decisions_of, scorer_losses, supervise
from tests.tiny import VOCAB, expiries, tiny_model
from tests.training import (
    BUDGET,
    CONFIG_OF,
    LOSS,
    MODES,
    POLICY,
    SCORER,
    UNWEIGHTED,
    assert_close,
    assert_equal,
    count_layer_passes,
    gradients,
    is_policy,
    log_of,
    packed,
    run,
    snapshot,
    stream,
    timeless,
    trainer,
    unequal,
)

# What a loss may reach


def test_scorer_mode_changes_scorers_and_no_weight_of_the_model() -> None:
    t = trainer(SCORER)
    base, before = snapshot(base_tensors(t.model)), snapshot(dict(t.model.named_parameters()))
    found = gradients(t)
    assert found
    assert all(is_policy(name) for name in found)
    t.step()
    assert_equal(base, snapshot(base_tensors(t.model)))
    inert = ("b_H", "b2_H")  # a number added to every score decides nothing
    for name, p in t.model.named_parameters():
        if is_policy(name) and not name.endswith(inert):
            assert not torch.equal(p, before[name]), name


def test_full_mode_changes_scorers_and_model_but_not_the_teacher() -> None:
    t = trainer(CONFIG_OF["full"])
    assert t.teacher is not None
    teacher, base, scorers = snapshot(base_tensors(t.teacher)), snapshot(base_tensors(t.model)), scorer_tensors(t.model)
    t.step()
    assert_equal(teacher, snapshot(base_tensors(t.teacher)))
    after = base_tensors(t.model)
    assert all(not torch.equal(after[n], base[n]) for n in base)
    assert any(not torch.equal(tensor, scorers[n]) for n, tensor in scorer_tensors(t.model).items())


def test_the_kl_reaches_no_scorer_and_the_boundary_loss_no_weight_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG_OF["full"], clip=1e9)
    both = gradients(trainer(config))
    with monkeypatch.context() as patch:
        patch.setattr("kvpop.distill.trainer.distillation_kl", lambda hidden, *a, **k: hidden.sum() * 0.0)
        no_kl = gradients(trainer(config))
    with monkeypatch.context() as patch:
        patch.setattr("kvpop.distill.scoring.scorer_losses", scorer_losses_times_zero)
        no_boundary = gradients(trainer(config))
    for name, gradient in both.items():
        with_own, with_other = (no_kl, no_boundary) if is_policy(name) else (no_boundary, no_kl)
        torch.testing.assert_close(with_own[name], gradient, rtol=1e-10, atol=1e-14)
        assert with_other.get(name, torch.zeros(1)).abs().max() == 0, name
    assert any(g.abs().max() > 0 for n, g in both.items() if is_policy(n))
    assert all(g.abs().max() > 0 for n, g in both.items() if not is_policy(n))


def scorer_losses_times_zero(*args: Any) -> tuple[Tensor, Tensor]:
    losses, scores = scorer_losses(*args)
    return losses * 0.0, scores


def test_scores_hang_on_no_backbone_activation() -> None:
    model = attach(tiny_model(), POLICY)
    views: list[LayerView] = []
    ids = torch.randint(3, VOCAB, (1, 60))
    model(ids, use_cache=False, kvpop=SequencePass(Documents.single(1, 60), observe=views.append))
    assert views[1].k.requires_grad
    assert not any(view.score_NHL.requires_grad for view in views)  # the pass decides, it does not learn
    scores = [view.policy.score(view.k, view.v, view.documents) for view in views]
    backbone = [p for n, p in model.named_parameters() if not is_policy(n)]
    total = torch.stack([score.square().sum() for score in scores]).sum()
    assert all(g is None for g in torch.autograd.grad(total, backbone, allow_unused=True, retain_graph=True))
    own = [list(view.policy.scorer.parameters()) for view in views]
    first = torch.autograd.grad(scores[0].sum(), own[0] + own[1], allow_unused=True)
    assert all(g is None for g in first[len(own[0]) :])  # and one layer's score on no other layer's scorer


def test_loss_falls_and_accuracy_rises_on_a_learnable_toy() -> None:
    """Queries share a direction, so what a key will receive can be read from it. The loss weighs keep and drop equally:
    calling everything "drop" would raise the accuracy, but neither lower the loss nor raise recall."""
    data = SequenceStream([packed(192, size=192, seed=i) for i in range(4)], batch_size=4)
    model = tiny_model(dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(0.6)
    config = DistillConfig(steps=30, scorer_lr=3e-2, loss=BoundaryLoss(samples=0, min_future=32))
    t = Trainer(model, KVpop(BUDGET, scorer="mlp"), data, config)
    records = [t.step() for _ in range(30)]
    first, last = records[0], records[-1]
    assert first["score_loss"] == pytest.approx(math.log(2), abs=0.01)
    assert last["score_loss"] < 0.75 * first["score_loss"]
    assert last["accuracy"] > max(0.6, first["accuracy"])
    assert last["recall"] > 2 * first["recall"]


# Heads with budgets of their own

HEADS = ((3, 13), (16, 0))  # of BUDGET: 8 on average; one head is never asked
UNEQUAL = replace(POLICY, heads=HEADS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("target", [Target(), Target(residual=8)], ids=["static", "residual"])
def test_unequal_heads_train_under_their_own_budgets(mode: str, target: Target) -> None:
    config = replace(CONFIG_OF[mode], train_long=(8, 4), target=target, inner_updates=1 if mode == "full" else 2)
    t = trainer(config, policy=UNEQUAL)
    assert t.scorers is not None
    assert t.scorers.budgets == [
        {0: Budget(2, 8, 13, HEADS[0]), 1: Budget(2, 8, 16, HEADS[1])},
        {i: Budget(2, 8, 4).with_heads(row) for i, row in enumerate(apportion(HEADS, 4))},
    ]
    before = scorer_tensors(t.model)
    records = [t.step() for _ in range(3)]
    for record in records:
        assert math.isfinite(record["score_loss"])
        assert math.isfinite(record["recall"])
        decided = record["decided"]
        assert decided[1][1] == 0
        assert min(*decided[0], decided[1][0]) > 0
    after = scorer_tensors(t.model)
    assert all(bool(torch.isfinite(x).all()) for x in after.values())
    for name, x in after.items():
        if name.endswith("alpha"):
            layer = int(name.split(".")[1])
            assert [bool(a != b) for a, b in zip(x, before[name])] == [k > 0 for k in HEADS[layer]]


def test_unequal_heads_are_stacked_or_not_with_one_result() -> None:
    found = [
        gradients(trainer(replace(SCORER, stack_elements=elements, clip=1e9, train_long=(8, 3)), policy=UNEQUAL))
        for elements in (1, 2**28)
    ]
    assert_close(*found, rel=1e-11)


def test_heads_that_happen_to_be_equal_train_as_without() -> None:
    plain, listed = (gradients(trainer(SCORER, policy=p)) for p in (POLICY, replace(POLICY, heads=((8, 8), (8, 8)))))
    assert_equal(plain, listed)


def test_a_run_with_unequal_heads_can_be_killed_and_its_adapter_decides_as_it_did(tmp_path: Path) -> None:
    config = replace(SCORER, steps=4, checkpoint_every=2, train_long=(8, 4))
    _, straight = run(tmp_path / "a", config, policy=UNEQUAL)
    first = trainer(config, policy=UNEQUAL)
    for _ in range(2):
        first.step()
    (tmp_path / "c").mkdir()
    checkpoints = Checkpoints(tmp_path / "c", first)
    checkpoints.save()
    checkpoints.wait()
    resumed = trainer(config, policy=UNEQUAL)
    assert Checkpoints(tmp_path / "c", resumed).resume()
    for _ in range(2):
        resumed.step()
    assert_equal(scorer_tensors(straight), scorer_tensors(resumed.model))
    other = trainer(config, policy=replace(POLICY, heads=((13, 3), (16, 0))))
    with pytest.raises(ValueError, match=r"policy\.heads"):
        Checkpoints(tmp_path / "c", other).resume()
    loaded = load(tiny_model(), tmp_path / "a")
    assert [layer.budget for layer in attached_policies(loaded)] == [
        Budget(2, 8, 13, HEADS[0]), Budget(2, 8, 16, HEADS[1])
    ]  # fmt: skip
    ids = torch.randint(3, VOCAB, (1, 80))
    (logits, kept), (logits_again, kept_again) = expiries(straight, ids), expiries(loaded, ids)
    assert torch.equal(logits, logits_again)
    assert all(torch.equal(a, b) for a, b in zip(kept, kept_again))
    assert any(not torch.equal(layer[:, 0], layer[:, 1]) for layer in kept)


def test_layers_with_unlike_heads_are_not_trained_together() -> None:
    mixed = ByLayer(UNEQUAL, {1: replace(POLICY, heads=((16, 0), (13, 3)))})
    with pytest.raises(ValueError, match=r"layers 0 and 1 cannot be trained together: budgets .* of unlike heads"):
        trainer(SCORER, policy=mixed)
    t = trainer(SCORER, policy=ByLayer(UNEQUAL, {0: Dense()}))  # also where only some layers learn
    assert t.scorers is not None
    assert t.scorers.budgets == [{1: Budget(2, 8, 16, HEADS[1])}]
    assert math.isfinite(t.step()["score_loss"])


# The log


@pytest.mark.parametrize("mode", MODES)
def test_a_record_holds_what_one_looks_at(mode: str) -> None:
    t = trainer(CONFIG_OF[mode])
    record = t.step()
    names = {"step", "score_loss", "accuracy", "recall", "recall_by_layer", "decisions", "under_epsilon", "above_one"}
    names |= {"keep", "student_keep", "decided", "decay", "scorer_grad", "decay_grad", "scorer_lr", "decay_lr"}
    names |= {"seconds", "tokens", "tokens_per_s"} | ({"kl", "base_grad", "base_lr"} if mode == "full" else set())
    assert record.keys() == names
    assert record["tokens"] == 2 * 96
    assert np.sum(record["decided"]) == record["decisions"]
    assert len(record["recall_by_layer"]) == 2
    assert record["step"] == 1
    for name in ("accuracy", "recall", "under_epsilon", "above_one"):
        assert 0 <= record[name] <= 1, name
    assert record["score_loss"] > 0
    assert 0 < record["decisions"] <= 2 * 2 * 2 * 32  # layers, heads, documents long enough, samples
    for name, low, high in (("keep", 0, 1), ("student_keep", 0, 1), ("decay", -2e-3, -1e-5)):
        assert [len(heads) for heads in record[name]] == [2, 2]
        assert all(low <= value <= high for heads in record[name] for value in heads)
    assert json.loads(json.dumps(record)) == record


def test_accuracy_recall_and_keep_rate_are_those_of_a_direct_count() -> None:
    """The teacher's own scores decide everything right and keep all the teacher keeps; their negatives nothing."""
    views: list[LayerView] = []
    model = attach(tiny_model(), KVpop(BUDGET, scorer="mlp"))
    ids = torch.randint(3, VOCAB, (1, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(ids, use_cache=False, kvpop=SequencePass(Documents.single(1, 90), observe=views.append))
    teacher = supervise(views[:1], Target(), [BUDGET])
    every = replace(LOSS, samples=0)
    decisions = decisions_of(teacher, every, [BUDGET])
    counts = counts_of(decisions, every)

    def record_of(score_NHL: Tensor) -> dict[str, Any]:
        summary = Summary(teacher.stack.layers, 16)
        priority = teacher.stack.priority(score_NHL, teacher.stack.log_gamma())
        summary.add(teacher, decisions, boundary_losses(priority, decisions[0], every), counts, score_NHL)
        return summary.record()

    right, wrong = record_of(teacher.target_NHL), record_of(-teacher.target_NHL)
    assert (right["accuracy"], right["recall"]) == (1, 1)
    assert right["student_keep"] == right["keep"]
    assert wrong["accuracy"] < 0.1  # the decay, shared, may still decide a near-tie
    assert wrong["recall"] < 0.6
    assert right["score_loss"] < math.log(2) < wrong["score_loss"]
    priority = teacher.stack.priority(teacher.target_NHL, teacher.stack.log_gamma())[0].detach()
    for h in range(2):
        keep = count = 0
        for q in range(BUDGET.slots, 90 - 16 + 1):  # the arrival t = q - w has at least 16 future queries: 90 - q
            order = sorted(range(2, q - 8 + 1), key=lambda t: (float(priority[h, t]), t), reverse=True)
            count += order[7] != q - 8
            keep += q - 8 in order[:7]
        assert right["decided"][0][h] == count
        assert right["keep"][0][h] == keep / count


def test_the_log_has_one_line_a_step(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    finished, _ = run(tmp_path, SCORER, on_step=seen.append)
    assert finished
    lines = (tmp_path / LOG).read_text().splitlines()
    assert [json.loads(line) for line in lines] == seen
    assert [record["step"] for record in seen] == [1, 2, 3, 4, 5, 6]


def test_log_every_thins_the_log_and_keeps_the_last_step(tmp_path: Path) -> None:
    run(tmp_path, replace(SCORER, steps=5, log_every=2))
    lines = log_of(tmp_path)
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert all("recall" in line for line in lines)


def test_what_costs_time_is_left_out_of_steps_that_are_not_logged() -> None:
    t = trainer(replace(SCORER, steps=5, log_every=2))
    assert ["recall" in t.step() for _ in range(5)] == [False, True, False, True, True]


def test_a_log_line_that_a_crash_cut_short_is_dropped(tmp_path: Path) -> None:
    run(tmp_path, SCORER)
    whole = log_of(tmp_path)
    text = (tmp_path / LOG).read_text()
    (tmp_path / LOG).write_text(text[:-40])
    assert run(tmp_path, SCORER)[0]
    assert log_of(tmp_path) == whole[:-1]


# Lengths and packing (cases 18 and 19)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scorer", ["mlp", "mlp+mlstm"])
def test_any_length_trains_with_finite_loss_and_gradients(mode: str, scorer: str) -> None:
    sequences = [packed(1025, 129, 127, 1, size=1300, seed=0)]
    config = replace(CONFIG_OF[mode], kl_chunk=256)
    t = trainer(config, SequenceStream(sequences, 1), policy=KVpop(BUDGET, scorer=scorer), dtype=torch.float32)
    record = dict(t.step())
    assert math.isfinite(record["score_loss"])
    assert math.isfinite(record.get("kl", 0.0))
    found = gradients(t)
    assert all(g.isfinite().all() for g in found.values())
    assert found.keys() == {n for n, p in t.model.named_parameters() if p.requires_grad}
    assert all(p.isfinite().all() for p in t.model.parameters())


@pytest.mark.parametrize("length", [1, 127, 129, 1025])
def test_keys_without_a_future_have_a_finite_target_and_no_loss(length: int) -> None:
    documents = Documents(torch.from_numpy(packed(length, 40, size=length + 45).document_ids)[None])
    model = attach(tiny_model(), KVpop(BUDGET, scorer="mlp"))
    views: list[LayerView] = []
    with torch.no_grad():
        ids = torch.randint(3, VOCAB, documents.ids_BS.shape)
        seq = SequencePass(documents, observe=views.append)
        model(ids, position_ids=documents.position_BS, use_cache=False, kvpop=seq)
    for view in views:
        teacher = supervise([view], Target(), [BUDGET])
        assert teacher.target_NHL.isfinite().all()
        for row, n in enumerate((length, 40)):
            last = max(0, n - BUDGET.window)
            floor = torch.full_like(teacher.target_NHL[row, :, last:n], math.log(1e-8))
            torch.testing.assert_close(teacher.target_NHL[row, :, last:n], floor)
        score = torch.zeros_like(teacher.target_NHL).requires_grad_(True)
        every = replace(LOSS, samples=0, min_future=1)
        (decisions,) = decisions_of(teacher, every, [BUDGET])
        (loss,) = boundary_losses(teacher.stack.priority(score, teacher.stack.log_gamma()), decisions, every)
        loss.backward()
        assert loss.isfinite()
        assert score.grad is not None
        assert score.grad.isfinite().all()
        for row, n in enumerate((length, 40)):
            assert (score.grad[row, :, max(0, n - BUDGET.window) :] == 0).all()
        if length == 1:
            assert (score.grad[0] == 0).all()
        count_H = counts_of([decisions], every)[0, 0]
        assert (count_H <= sum(max(0, n - BUDGET.slots) for n in (length, 40))).all()


def test_a_batch_without_a_single_decision_trains_on_nothing() -> None:
    """Case 24, in one process: one sequence of the stream has only short documents."""
    data = SequenceStream([packed(20, 20, size=96), packed(90, size=96)], 1)
    for mode in MODES:
        t = trainer(replace(CONFIG_OF[mode], steps=2, calibrate=False), data)
        records = [t.step(), t.step()]
        empty = min(records, key=lambda record: record["decisions"])
        assert empty["decisions"] == 0
        assert empty["scorer_grad"] == 0
        assert math.isnan(empty["accuracy"])
        assert max(record["decisions"] for record in records) > 0
        assert all(p.isfinite().all() for p in t.model.parameters())


@pytest.mark.parametrize("scorer", ["mlp", "mlstm", "mlp+mlstm"])
def test_packed_documents_do_not_see_each_other(scorer: str) -> None:
    documents = Documents(torch.from_numpy(packed(50, 70, size=125).document_ids)[None])
    model = attach(tiny_model(), KVpop(BUDGET, scorer=scorer))

    def everything(ids: Tensor) -> dict[str, Tensor]:
        views: list[LayerView] = []
        with torch.no_grad():
            seq = SequencePass(documents, observe=views.append)
            out = model(ids, position_ids=documents.position_BS, use_cache=False, kvpop=seq)
        seen = {"logits": out.logits[0]}
        for view in views:
            teacher = supervise([view], Target(), [BUDGET])
            dense = supervise([view], Target(lse="dense"), [BUDGET])
            seen[f"dense target {view.layer}"] = dense.target_NHL[1, :, :70].T
            seen[f"expiry {view.layer}"] = view.expiry[0].T
            seen[f"score {view.layer}"] = view.score_NHL[1, :, :70].T
            seen[f"target {view.layer}"] = teacher.target_NHL[1, :, :70].T
            seen[f"boundary {view.layer}"] = teacher.tables[0].boundary_NHA[1, :, : 70 - BUDGET.sinks].T
        return seen

    ids = torch.randint(3, VOCAB, (1, 125), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 49] = 3 + (ids[0, 49] - 2) % (VOCAB - 3)
    before, after = everything(ids), everything(other)
    assert not torch.equal(before["logits"][:50], after["logits"][:50])
    for name, value in before.items():
        rows = slice(50, 120) if name.startswith(("logits", "expiry")) else slice(None)
        assert torch.equal(value[rows], after[name][rows]), name
    alone = Documents.single(1, 70)
    views: list[LayerView] = []
    with torch.no_grad():
        logits = model(ids[:, 50:120], use_cache=False, kvpop=SequencePass(alone, observe=views.append)).logits[0]
    torch.testing.assert_close(logits, before["logits"][50:120])
    for view in views:
        mine = view.expiry[0].minimum(torch.tensor(70)) + 50
        assert torch.equal(mine.T.int(), before[f"expiry {view.layer}"][50:120])


# Checkpointing and accumulation (case 20)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG_OF[mode], clip=1e9)
    plain, again = trainer(config), trainer(replace(config, checkpointing=True))
    plain_passes, passes = count_layer_passes(plain), count_layer_passes(again)
    supervised: list[list[int]] = []

    def counted(views: list[LayerView], *args: Any) -> Any:
        supervised.append([view.layer for view in views])
        return supervise(views, *args)

    monkeypatch.setattr("kvpop.distill.scoring.supervise", counted)
    a, b = gradients(plain), gradients(again)
    assert supervised == [[0, 1]] * 2  # the target is not formed a second time
    # Full mode: one pass to calibrate, one forward, and the recomputation. Scorer mode has no activations to save.
    assert (plain_passes[0], passes[0]) == ((2, 3) if mode == "full" else (2, 2))
    assert_close(a, b)
    records = [timeless(t.step()) for t in (plain, again)]
    for key in ("score_loss", "accuracy", "recall", "scorer_grad"):
        assert records[0][key] == pytest.approx(records[1][key], rel=1e-9)
    assert records[0].get("kl", 0.0) == pytest.approx(records[1].get("kl", 0.0), rel=1e-9)


def test_what_the_backward_pass_runs_again_is_not_kept() -> None:
    """A view holds queries, keys and values, and through them all that the layer computed."""
    t = trainer(replace(CONFIG_OF["full"], checkpointing=True))
    kept: list[int] = []

    def count(*_: Any) -> None:
        kept.append(sum(type(o) is LayerView for o in gc.get_objects()))

    t.optimizer.register_step_pre_hook(count)
    gc.collect()
    t.step()
    assert kept == [0]


def test_gradient_checkpointing_does_not_turn_dropout_on() -> None:
    model = tiny_model()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    t = Trainer(model, POLICY, stream(), replace(CONFIG_OF["full"], checkpointing=True), tiny_model())
    assert timeless(t.step())["kl"] == pytest.approx(trainer(CONFIG_OF["full"]).step()["kl"], rel=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_that_is_on_already_is_honoured_but_never_reentrant(reentrant: bool) -> None:
    """The reentrant kind runs layers without a graph: what they tell the observer would have no gradient."""
    config = replace(CONFIG_OF["full"], clip=1e9)
    model = tiny_model()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    t = Trainer(model, POLICY, stream(), config, tiny_model())
    passes = count_layer_passes(t)
    assert_close(gradients(trainer(config)), gradients(t))
    assert passes == [3]


@pytest.mark.parametrize("mode", MODES)
def test_four_batches_of_one_accumulate_to_one_batch_of_four(mode: str) -> None:
    """With uniform weights and every decision taken, exactly (up to rounding): Eq. 23 and 24 look at a batch as a whole."""
    config = replace(CONFIG_OF[mode], loss=UNWEIGHTED, clip=1e9, calibrate=False)
    whole, parts = trainer(config, unequal(4)), trainer(replace(config, accumulate=4), unequal(1))
    a, b = gradients(whole), gradients(parts)
    assert_close(a, b)
    whole, parts = trainer(config, unequal(4)), trainer(replace(config, accumulate=4), unequal(1))
    one, four = whole.step(), parts.step()
    assert four["decisions"] == one["decisions"]
    for name in ("score_loss", "accuracy", "scorer_grad", "decay_grad"):
        assert four[name] == pytest.approx(one[name], rel=1e-9), name
    assert np.allclose(four["keep"], one["keep"])
    assert four.get("kl", 0.0) == pytest.approx(one.get("kl", 0.0), rel=1e-12)


def test_accumulated_steps_go_on_through_the_stream_and_their_inner_updates_too() -> None:
    config = replace(SCORER, loss=UNWEIGHTED, clip=1e9, calibrate=False, inner_updates=3)
    whole, parts = trainer(config, unequal(2)), trainer(replace(config, accumulate=2), unequal(1))
    for _ in range(3):
        whole.step()
        parts.step()
    a, b = scorer_tensors(whole.model), scorer_tensors(parts.model)
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=1e-9, atol=1e-12)

"""Training: what a loss may reach, what it must not, and that no interruption changes the result."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvpop
from kvpop.adapter import CONFIG, base_tensors, scorer_tensors
from kvpop.attachment import attach, attached_policies
from kvpop.budget import Budget
from kvpop.core import BoundaryLoss, Target
from kvpop.data import PackedSequence, SequenceStream
from kvpop.distill import LOG, STATE, DistillConfig, Trainer, distill
from kvpop.documents import Documents
from kvpop.policies import KVpop, LayerView, SequencePass
from kvpop.supervision import scorer_loss, supervise, teacher_recall
from tests.tiny import VOCAB, tiny_model

BUDGET = Budget(2, 8, 8)
POLICY = KVpop(BUDGET, scorer="mlp+mlstm")
LOSS = BoundaryLoss(min_future=16, samples=32)
UNWEIGHTED = replace(LOSS, samples=0, margin_floor=1.0, balance=(1.0, 1.0))
CONFIG_OF = {
    "scorer": DistillConfig(steps=6, loss=LOSS, seed=3),
    "full": DistillConfig(mode="full", steps=6, loss=LOSS, seed=3, kl_top=16, kl_chunk=50),
}
MODES = ["scorer", "full"]


def packed(*lengths: int, size: int, seed: int = 0) -> PackedSequence:
    """Documents of random tokens of these lengths, and padding up to ``size``."""
    rng = np.random.default_rng(seed)
    return PackedSequence.from_pieces([rng.integers(3, VOCAB, n) for n in lengths], size)


def stream(batch_size: int = 2, size: int = 96, count: int = 6) -> SequenceStream:
    return SequenceStream([packed(size - 20, 15, size=size, seed=i) for i in range(count)], batch_size)


def trainer(
    config: DistillConfig, data: SequenceStream | None = None, *, policy: KVpop = POLICY, dtype=torch.float64
) -> Trainer:
    model = tiny_model(dtype=dtype)
    teacher = tiny_model(dtype=dtype) if config.mode == "full" else None
    return Trainer(model, policy, data or stream(), config, teacher)


def run(directory: Path, config: DistillConfig, **options: Any) -> tuple[bool, torch.nn.Module]:
    """``distill`` in a model, teacher and stream of its own, as a fresh process would."""
    model = tiny_model()
    teacher = tiny_model() if config.mode == "full" else None
    data = options.pop("data", None) or stream()
    policy = options.pop("policy", POLICY)
    return distill(model, policy, data, config, directory, model_id="tiny", teacher=teacher, **options), model


def snapshot(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def gradients(t: Trainer) -> dict[str, Tensor]:
    """The gradients of the next step as the optimizer sees them."""
    found: dict[str, Tensor] = {}

    def hook(*_: Any) -> None:
        found.update({n: p.grad.clone() for n, p in t.model.named_parameters() if p.grad is not None})

    handle = t.optimizer.register_step_pre_hook(hook)
    t.step()
    handle.remove()
    return found


def is_scorer(name: str) -> bool:
    return ".kvpop." in name


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("seconds", "tokens_per_s")}


def log_of(directory: Path) -> list[dict[str, Any]]:
    return [timeless(json.loads(line)) for line in (directory / LOG).read_text().splitlines()]


# What a loss may reach


def test_scorer_mode_changes_scorers_and_no_weight_of_the_model() -> None:
    t = trainer(CONFIG_OF["scorer"])
    base, before = snapshot(base_tensors(t.model)), snapshot(dict(t.model.named_parameters()))
    found = gradients(t)
    assert found
    assert all(is_scorer(name) for name in found)
    t.step()
    assert_equal(base, snapshot(base_tensors(t.model)))
    inert = ("b_H", "b2_H")  # a number added to every score decides nothing
    for name, p in t.model.named_parameters():
        if is_scorer(name) and not name.endswith(inert):
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
        patch.setattr("kvpop.distill.distillation_kl", lambda hidden, *a, **k: hidden.sum() * 0.0)
        no_kl = gradients(trainer(config))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_scorer_loss", scorer_loss_times_zero(Trainer._scorer_loss))
        no_boundary = gradients(trainer(config))
    for name, gradient in both.items():
        with_own, with_other = (no_kl, no_boundary) if is_scorer(name) else (no_boundary, no_kl)
        torch.testing.assert_close(with_own[name], gradient, rtol=1e-10, atol=1e-14)
        assert with_other.get(name, torch.zeros(1)).abs().max() == 0, name
    assert any(g.abs().max() > 0 for n, g in both.items() if is_scorer(n))
    assert all(g.abs().max() > 0 for n, g in both.items() if not is_scorer(n))


def scorer_loss_times_zero(original):
    return lambda *args, **kwargs: original(*args, **kwargs) * 0.0


def test_scores_hang_on_no_backbone_activation() -> None:
    model = attach(tiny_model(), POLICY)
    views: list[LayerView] = []
    ids = torch.randint(3, VOCAB, (1, 60))
    model(ids, use_cache=False, kvpop=SequencePass(Documents.single(1, 60), observe=views.append))
    assert views[1].k.requires_grad
    backbone = [p for n, p in model.named_parameters() if not is_scorer(n)]
    total = torch.stack([view.score_NHL.square().sum() for view in views]).sum()
    assert all(g is None for g in torch.autograd.grad(total, backbone, allow_unused=True, retain_graph=True))
    own = [list(view.policy.scorer.parameters()) for view in views]
    first = torch.autograd.grad(views[0].score_NHL.sum(), own[0] + own[1], allow_unused=True)
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


# The log


@pytest.mark.parametrize("mode", MODES)
def test_a_record_holds_what_one_looks_at(mode: str) -> None:
    t = trainer(CONFIG_OF[mode])
    record = t.step()
    names = {"step", "score_loss", "accuracy", "recall", "decisions", "under_epsilon", "above_one", "keep", "decay"}
    names |= {"scorer_grad", "decay_grad", "seconds", "tokens_per_s"} | (
        {"kl", "base_grad"} if mode == "full" else set()
    )
    assert record.keys() == names
    assert record["step"] == 1
    for name in ("accuracy", "recall", "under_epsilon", "above_one"):
        assert 0 <= record[name] <= 1, name
    assert record["score_loss"] > 0
    assert 0 < record["decisions"] <= 2 * 2 * 2 * 32  # layers, heads, documents long enough, samples
    for name, low, high in (("keep", 0, 1), ("decay", -2e-3, -1e-5)):
        assert [len(heads) for heads in record[name]] == [2, 2]
        assert all(low <= value <= high for heads in record[name] for value in heads)
    assert json.loads(json.dumps(record)) == record


def test_accuracy_recall_and_keep_rate_are_those_of_a_direct_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher's own scores decide everything right and keep all the teacher keeps; their negatives nothing."""
    views: list[LayerView] = []
    model = attach(tiny_model(), KVpop(BUDGET, scorer="mlp"))
    ids = torch.randint(3, VOCAB, (1, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(ids, use_cache=False, kvpop=SequencePass(Documents.single(1, 90), observe=views.append))
    teacher = supervise(views[0], Target(), [BUDGET])
    every = replace(LOSS, samples=0)
    _, stats = scorer_loss(teacher, teacher.target_NHL, every, [BUDGET], None)
    assert torch.equal(stats["right_H"], stats["count_H"])
    assert (teacher_recall(teacher, teacher.target_NHL, BUDGET, 16) == 1).all()
    _, wrong = scorer_loss(teacher, -teacher.target_NHL, every, [BUDGET], None)
    assert (wrong["right_H"] < 0.1 * wrong["count_H"]).all()  # the decay, shared, may still decide a near-tie
    assert (teacher_recall(teacher, -teacher.target_NHL, BUDGET, 16) < 0.6).all()
    priority = teacher.policy.priority(teacher.target_NHL)[0].detach()
    for h in range(2):
        keep = count = 0
        for q in range(BUDGET.slots, 90 - 16 + 1):  # the arrival t = q - w has at least 16 future queries: 90 - q
            order = sorted(range(2, q - 8 + 1), key=lambda t: (float(priority[h, t]), t), reverse=True)
            count += order[7] != q - 8
            keep += q - 8 in order[:7]
        assert (int(stats["keep_H"][h]), int(stats["count_H"][h])) == (keep, count)


def test_the_log_has_one_line_a_step(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    finished, _ = run(tmp_path, CONFIG_OF["scorer"], on_step=seen.append)
    assert finished
    lines = (tmp_path / LOG).read_text().splitlines()
    assert [json.loads(line) for line in lines] == seen
    assert [record["step"] for record in seen] == [1, 2, 3, 4, 5, 6]


def test_log_every_thins_the_log_and_keeps_the_last_step(tmp_path: Path) -> None:
    run(tmp_path, replace(CONFIG_OF["scorer"], steps=5, log_every=2))
    assert [line["step"] for line in log_of(tmp_path)] == [2, 4, 5]


def test_a_log_line_that_a_crash_cut_short_is_dropped(tmp_path: Path) -> None:
    run(tmp_path, CONFIG_OF["scorer"])
    whole = log_of(tmp_path)
    text = (tmp_path / LOG).read_text()
    (tmp_path / LOG).write_text(text[:-40])
    assert run(tmp_path, CONFIG_OF["scorer"])[0]
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
        teacher = supervise(view, Target(), [BUDGET])
        assert teacher.target_NHL.isfinite().all()
        for row, n in enumerate((length, 40)):
            last = max(0, n - BUDGET.window)
            floor = torch.full_like(teacher.target_NHL[row, :, last:n], math.log(1e-8))
            torch.testing.assert_close(teacher.target_NHL[row, :, last:n], floor)
        score = torch.zeros_like(teacher.target_NHL).requires_grad_(True)
        loss, stats = scorer_loss(teacher, score, replace(LOSS, samples=0, min_future=1), [BUDGET], None)
        loss.backward()
        assert loss.isfinite()
        assert score.grad is not None
        assert score.grad.isfinite().all()
        for row, n in enumerate((length, 40)):
            assert (score.grad[row, :, max(0, n - BUDGET.window) :] == 0).all()
        if length == 1:
            assert (score.grad[0] == 0).all()
        assert (stats["count_H"] <= sum(max(0, n - BUDGET.slots) for n in (length, 40))).all()


def test_a_batch_without_a_single_decision_trains_on_nothing() -> None:
    """Case 24: one sequence of the stream has only short documents."""
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
            teacher = supervise(view, Target(), [BUDGET])
            dense = supervise(view, Target(lse="dense"), [BUDGET])
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
    plain = trainer(config)
    model = tiny_model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = Trainer(model, POLICY, stream(), config, tiny_model() if mode == "full" else None)
    passes = count_layer_passes(again)
    plain_passes = count_layer_passes(plain)
    supervised: list[int] = []
    monkeypatch.setattr(
        "kvpop.distill.supervise", lambda view, *args: supervised.append(view.layer) or supervise(view, *args)
    )
    a, b = gradients(plain), gradients(again)
    assert supervised == [0, 1] * 2  # the target is not formed a second time
    # Full mode: one pass to calibrate, one forward, and the recomputation. Scorer mode has no activations to save.
    assert (plain_passes[0], passes[0]) == ((2, 3) if mode == "full" else (2, 2))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=1e-10, atol=1e-14)
    records = [timeless(t.step()) for t in (plain, again)]
    for key in ("score_loss", "accuracy", "recall", "scorer_grad"):
        assert records[0][key] == pytest.approx(records[1][key], rel=1e-9)
    assert records[0].get("kl", 0.0) == pytest.approx(records[1].get("kl", 0.0), rel=1e-5)


def count_layer_passes(t: Trainer) -> list[int]:
    """How often the first layer's MLP runs."""
    count = [0]

    def hook(*_: Any) -> None:
        count[0] += 1

    t.model.model.layers[0].mlp.register_forward_pre_hook(hook)
    return count


def test_gradient_checkpointing_does_not_turn_dropout_on() -> None:
    model = tiny_model()
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    t = Trainer(model, POLICY, stream(), CONFIG_OF["full"], tiny_model())
    assert timeless(t.step())["kl"] == pytest.approx(trainer(CONFIG_OF["full"]).step()["kl"], rel=1e-5)


def test_reentrant_gradient_checkpointing_is_refused() -> None:
    model = tiny_model()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    t = Trainer(model, POLICY, stream(), CONFIG_OF["full"], tiny_model())
    t.config = replace(t.config, calibrate=False)
    with pytest.raises(ValueError, match="use_reentrant=False"):
        t.step()


def unequal(batch_size: int) -> SequenceStream:
    """Four sequences of 128 tokens in which very different numbers of tokens and decisions are real."""
    lengths = [(120,), (40, 30), (64, 60), (50,)]
    return SequenceStream([packed(*n, size=128, seed=i) for i, n in enumerate(lengths)], batch_size)


@pytest.mark.parametrize("mode", MODES)
def test_four_batches_of_one_accumulate_to_one_batch_of_four(mode: str) -> None:
    """With uniform weights and every decision taken, exactly (up to rounding): Eq. 23 and 24 look at a batch as a whole."""
    config = replace(CONFIG_OF[mode], loss=UNWEIGHTED, clip=1e9, calibrate=False)
    whole, parts = trainer(config, unequal(4)), trainer(replace(config, accumulate=4), unequal(1))
    a, b = gradients(whole), gradients(parts)
    assert a.keys() == b.keys()
    for name in a:
        # The KL is formed in float32, so the model's gradients carry its rounding.
        torch.testing.assert_close(b[name], a[name], rtol=1e-9 if is_scorer(name) else 1e-4, atol=1e-8)
    whole, parts = trainer(config, unequal(4)), trainer(replace(config, accumulate=4), unequal(1))
    one, four = whole.step(), parts.step()
    assert four["decisions"] == one["decisions"]
    for name in ("score_loss", "accuracy", "scorer_grad", "decay_grad"):
        assert four[name] == pytest.approx(one[name], rel=1e-9), name
    assert np.allclose(four["keep"], one["keep"])
    assert four.get("kl", 0.0) == pytest.approx(one.get("kl", 0.0), rel=1e-6)


def test_accumulated_steps_go_on_through_the_stream_and_their_inner_updates_too() -> None:
    config = replace(CONFIG_OF["scorer"], loss=UNWEIGHTED, clip=1e9, calibrate=False, inner_updates=3)
    whole, parts = trainer(config, unequal(2)), trainer(replace(config, accumulate=2), unequal(1))
    for _ in range(3):
        whole.step()
        parts.step()
    a, b = scorer_tensors(whole.model), scorer_tensors(parts.model)
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=1e-6, atol=1e-8)


# Stopping and going on (case 21)


@pytest.mark.parametrize("mode", MODES)
def test_two_runs_with_one_seed_are_bit_equal(mode: str, tmp_path: Path) -> None:
    (_, a), (_, b) = run(tmp_path / "a", CONFIG_OF[mode]), run(tmp_path / "b", CONFIG_OF[mode])
    assert_equal(a.state_dict(), b.state_dict())
    assert log_of(tmp_path / "a") == log_of(tmp_path / "b")
    (_, other) = run(tmp_path / "c", replace(CONFIG_OF[mode], seed=4))
    assert any(not torch.equal(t, other.state_dict()[n]) for n, t in a.state_dict().items())


def test_a_run_does_not_depend_on_or_change_the_global_generator(tmp_path: Path) -> None:
    model = tiny_model()
    torch.manual_seed(77)
    state = torch.get_rng_state()
    distill(model, POLICY, stream(), replace(CONFIG_OF["scorer"], steps=2), tmp_path, model_id="tiny")
    assert torch.equal(torch.get_rng_state(), state)
    _, other = run(tmp_path / "b", replace(CONFIG_OF["scorer"], steps=2))
    assert_equal(scorer_tensors(model), scorer_tensors(other))


def straight_and_resumed(config: DistillConfig, directory: Path) -> tuple[Trainer, Trainer]:
    straight = trainer(config)
    for _ in range(6):
        straight.step()
    first = trainer(config)
    for _ in range(3):
        first.step()
    first.save(directory)
    torch.manual_seed(99)
    resumed = trainer(config)
    assert resumed.resume(directory)
    assert resumed.done == 3
    for _ in range(3):
        resumed.step()
    return straight, resumed


@pytest.mark.parametrize(
    "options", [{}, {"inner_updates": 2, "train_long": (8, 3)}, {"accumulate": 2}, {"mode": "full"}]
)
def test_resumed_weights_and_optimizer_are_bit_equal_to_the_straight_run(
    options: dict[str, Any], tmp_path: Path
) -> None:
    config = replace(CONFIG_OF[options.get("mode", "scorer")], **options)
    straight, resumed = straight_and_resumed(config, tmp_path)
    assert_equal(dict(straight.model.state_dict()), dict(resumed.model.state_dict()))
    a, b = straight.optimizer.state_dict(), resumed.optimizer.state_dict()
    assert a["param_groups"] == b["param_groups"]  # learning rates of scorers, decay and model included
    assert len(a["param_groups"]) == (3 if config.mode == "full" else 2)
    assert a["state"].keys() == b["state"].keys()
    for index in a["state"]:
        assert_equal(a["state"][index], b["state"][index])


class Killed(Exception):
    pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("killed_after", [3, 4])
def test_a_run_killed_at_any_step_ends_as_the_straight_one(mode: str, killed_after: int, tmp_path: Path) -> None:
    config = replace(CONFIG_OF[mode], checkpoint_every=3)
    _, straight = run(tmp_path / "straight", config)

    def kill(record: dict[str, Any]) -> None:
        if record["step"] == killed_after:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "broken", config, on_step=kill)
    finished, resumed = run(tmp_path / "broken", config)
    assert finished
    assert_equal(straight.state_dict(), resumed.state_dict())
    assert log_of(tmp_path / "broken") == log_of(tmp_path / "straight")


@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c_finishes_the_step_saves_and_can_go_on(mode: str, tmp_path: Path) -> None:
    config = CONFIG_OF[mode]
    _, straight = run(tmp_path / "straight", config)
    before = signal.getsignal(signal.SIGINT)

    def press(record: dict[str, Any]) -> None:
        if record["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    finished, _ = run(tmp_path / "stopped", config, on_step=press)
    assert finished is False
    assert signal.getsignal(signal.SIGINT) is before
    assert [line["step"] for line in log_of(tmp_path / "stopped")] == [1, 2]
    assert not (tmp_path / "stopped" / CONFIG).exists()
    finished, resumed = run(tmp_path / "stopped", config)
    assert finished is True
    assert_equal(straight.state_dict(), resumed.state_dict())
    assert log_of(tmp_path / "stopped") == log_of(tmp_path / "straight")


def test_a_second_ctrl_c_interrupts_at_once(tmp_path: Path) -> None:
    def press(record: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, CONFIG_OF["scorer"], on_step=press)


def test_a_finished_run_called_again_does_nothing_and_still_has_its_adapter(tmp_path: Path) -> None:
    _, model = run(tmp_path, CONFIG_OF["scorer"])
    facts = json.loads((tmp_path / CONFIG).read_text())["training"]
    seen: list[dict[str, Any]] = []
    finished, again = run(tmp_path, CONFIG_OF["scorer"], on_step=seen.append)
    assert finished
    assert seen == []
    assert_equal(scorer_tensors(model), scorer_tensors(again))
    assert json.loads((tmp_path / CONFIG).read_text())["training"] == facts


@pytest.mark.parametrize("mode", MODES)
def test_a_finished_run_leaves_an_adapter_that_loads_as_the_trained_model(mode: str, tmp_path: Path) -> None:
    _, model = run(tmp_path, CONFIG_OF[mode])
    again = kvpop.load(tiny_model(), tmp_path)
    assert_equal(model.state_dict(), again.state_dict())
    facts = json.loads((tmp_path / CONFIG).read_text())["training"]
    assert facts["steps"] == 6
    assert facts["config"]["mode"] == mode
    assert facts["score_loss"] == log_of(tmp_path)[-1]["score_loss"]
    assert ("kl" in facts) == (mode == "full")


OTHER_RUNS = {
    r"run.seed: 3 there, 4 here": {"config": replace(CONFIG_OF["scorer"], seed=4)},
    r"run.loss.min_future: 16 there, 17 here": {"config": replace(CONFIG_OF["scorer"], loss=replace(LOSS, min_future=17))},
    r"run.mode: 'scorer' there, 'full' here": {"config": replace(CONFIG_OF["scorer"], mode="full")},
    r"policy.budget.long: 8 there, 7 here": {"policy": replace(POLICY, budget=Budget(2, 8, 7))},
    r"data: '\w+' there, '\w+' here": {"data": stream(batch_size=1)},
}  # fmt: skip


@pytest.mark.parametrize("difference", OTHER_RUNS)
def test_a_checkpoint_of_another_run_is_refused_naming_the_difference(difference: str, tmp_path: Path) -> None:
    trainer(CONFIG_OF["scorer"]).save(tmp_path)
    before = (tmp_path / STATE).read_bytes()
    options = dict(OTHER_RUNS[difference])
    with pytest.raises(ValueError, match=rf"belongs to another run \({difference}\): use another directory"):
        run(tmp_path, options.pop("config", CONFIG_OF["scorer"]), **options)
    assert (tmp_path / STATE).read_bytes() == before


def test_a_checkpoint_of_another_model_is_refused_naming_the_difference(tmp_path: Path) -> None:
    trainer(CONFIG_OF["scorer"]).save(tmp_path)
    other = Trainer(tiny_model("qwen3", groups=1), POLICY, stream(), CONFIG_OF["scorer"])
    with pytest.raises(ValueError, match=r"model.heads: 4 there, 2 here; model.type: 'llama' there, 'qwen3' here"):
        other.resume(tmp_path)


def test_how_often_a_run_saves_and_logs_may_change_when_it_goes_on(tmp_path: Path) -> None:
    trainer(CONFIG_OF["scorer"]).save(tmp_path)
    assert trainer(replace(CONFIG_OF["scorer"], checkpoint_every=1, log_every=3)).resume(tmp_path)


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    assert trainer(CONFIG_OF["scorer"]).resume(tmp_path) is False


# Settings


def test_learning_rates_warm_up_and_fall_to_zero_or_stay() -> None:
    t = trainer(
        DistillConfig(mode="full", steps=100, warmup=0.1, loss=LOSS, scorer_lr=1e-3, decay_lr_ratio=0.1, base_lr=8e-5)
    )
    rate = t.learning_rate
    assert [rate(step, 1.0, "cosine") for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert rate(10, 1.0, "cosine") == pytest.approx(1.0)
    assert rate(55, 1.0, "cosine") == pytest.approx(0.5)
    assert rate(100, 1.0, "cosine") == pytest.approx(0.0)
    assert 0 < rate(99, 1.0, "cosine") < 1e-3
    assert {rate(step, 8e-5, "constant") for step in range(100)} == {8e-5}
    t.step()
    assert [g["lr"] for g in t.optimizer.param_groups] == pytest.approx([1e-4, 1e-5, 8e-5])
    assert [g["weight_decay"] for g in t.optimizer.param_groups] == [1e-4, 0.0, 1e-4]
    assert trainer(replace(CONFIG_OF["scorer"], warmup=0.0)).learning_rate(0, 1.0, "cosine") == 1.0


def test_every_trained_parameter_is_in_exactly_one_group() -> None:
    for mode in MODES:
        t = trainer(CONFIG_OF[mode])
        grouped = [id(p) for group in t.optimizer.param_groups for p in group["params"]]
        assert sorted(grouped) == sorted(id(p) for p in t.model.parameters() if p.requires_grad)


def test_inner_updates_are_more_optimizer_steps_on_one_forward_pass() -> None:
    t = trainer(replace(CONFIG_OF["scorer"], calibrate=False, inner_updates=3))
    passes = count_layer_passes(t)
    t.step()
    assert passes == [1]
    assert {int(state["step"]) for state in t.optimizer.state.values()} == {3}
    once = trainer(replace(CONFIG_OF["scorer"], calibrate=False))
    once.step()
    assert any(
        not torch.equal(a, b)
        for a, b in zip(t.optimizer.param_groups[0]["params"], once.optimizer.param_groups[0]["params"])
    )


def test_inner_updates_draw_decisions_of_their_own() -> None:
    t = trainer(CONFIG_OF["scorer"])
    draws = [torch.rand(4, generator=t.generator(*at)).tolist() for at in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))]
    assert len({tuple(draw) for draw in draws}) == 4
    assert torch.rand(4, generator=t.generator(0, 0, 0)).tolist() == draws[0]


def test_several_budgets_average_their_losses_over_the_same_targets() -> None:
    data = stream(batch_size=1)
    every = replace(LOSS, samples=0)
    config = replace(CONFIG_OF["scorer"], loss=every, clip=1e9)
    found = {}
    for longs in ((8,), (4,), (8, 4)):
        t = trainer(replace(config, train_long=longs), data)
        record = t.step()
        found[longs] = record["score_loss"], record["decisions"]
    assert found[8, 4][0] == pytest.approx((found[8,][0] + found[4,][0]) / 2)
    assert found[8, 4][1] == found[8,][1] + found[4,][1]
    assert found[4,][1] > found[8,][1]


def test_several_budgets_have_the_mean_of_their_gradients() -> None:
    config = replace(CONFIG_OF["scorer"], loss=replace(LOSS, samples=0), clip=1e9)
    a, b, both = (gradients(trainer(replace(config, train_long=longs))) for longs in ((8,), (4,), (8, 4)))
    for name in both:
        torch.testing.assert_close(both[name], (a[name] + b[name]) / 2, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("lse", ["sparse", "dense"])
def test_the_target_takes_the_sparse_or_the_dense_normaliser(lse: str) -> None:
    t = trainer(replace(CONFIG_OF["scorer"], target=Target(lse=lse)))
    record = t.step()
    assert math.isfinite(record["score_loss"])
    # Under the dense normaliser a probability is at most 1; the sparse one leaves evicted keys out of the sum.
    assert (record["above_one"] == 0) if lse == "dense" else (record["above_one"] >= 0)


def test_calibration_uses_valid_tokens_of_the_first_batch_once() -> None:
    t = trainer(CONFIG_OF["scorer"])
    t.step()
    scorers = [layer.scorer for layer in t.layers]
    assert all(bool(s.calibrated) for s in scorers)
    before = [s.shift_HE.clone() for s in scorers]
    t.step()
    assert all(torch.equal(s.shift_HE, b) for s, b in zip(scorers, before))
    model, batch = attach(tiny_model(), POLICY), stream().batch(0)
    views: list[LayerView] = []
    with torch.no_grad():
        seq = SequencePass(Documents(batch["document_ids"]), observe=views.append)
        model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False, kvpop=seq)
    x = torch.cat([views[0].k, views[0].v], dim=-1).transpose(1, 2)[batch["document_ids"] >= 0]
    torch.testing.assert_close(before[0], x.mean(0))


IMPOSSIBLE = {
    r"longest document has 76 tokens; a boundary decision needs at least slots \+ min_future = 77": {
        "config": replace(CONFIG_OF["scorer"], loss=replace(LOSS, min_future=59))
    },
    r"a budget with 0 long-range slots decides nothing": {"policy": replace(POLICY, budget=Budget(2, 8, 0))},
}


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_a_run_without_a_possible_decision_is_refused_before_any_work(message: str, tmp_path: Path) -> None:
    options = dict(IMPOSSIBLE[message])
    model = tiny_model()
    with pytest.raises(ValueError, match=message):
        Trainer(model, options.get("policy", POLICY), stream(), options.get("config", CONFIG_OF["scorer"]))
    assert attached_policies(model) == []


def test_the_shortest_document_that_is_accepted_gives_a_decision() -> None:
    needed = BUDGET.slots + LOSS.min_future
    data = SequenceStream([packed(needed, size=needed)], 1)
    records = [
        trainer(replace(CONFIG_OF["scorer"], loss=replace(LOSS, samples=0), seed=s), data).step() for s in range(3)
    ]
    assert max(record["decisions"] for record in records) > 0


def test_full_mode_needs_a_teacher_that_is_another_model() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="full mode needs a frozen dense teacher"):
        Trainer(model, POLICY, stream(), CONFIG_OF["full"])
    with pytest.raises(ValueError, match="scorer mode takes none"):
        Trainer(model, POLICY, stream(), CONFIG_OF["scorer"], tiny_model())
    with pytest.raises(ValueError, match="the teacher is the model itself"):
        Trainer(model, POLICY, stream(), CONFIG_OF["full"], model)
    assert Trainer(model, POLICY, stream(), CONFIG_OF["full"], copy.deepcopy(model)).step()["kl"] > 0


def test_the_kl_is_zero_while_the_budget_holds_everything() -> None:
    wide = KVpop(Budget(2, 8, 66), scorer="mlp")
    config = replace(CONFIG_OF["full"], train_long=(8,))
    assert trainer(config, policy=wide).step()["kl"] < 1e-6


WRONG_SETTINGS = [
    ("mode", "both", "mode must be 'scorer' or 'full', got 'both'"),
    ("steps", 0, "steps must be at least 1, got 0"),
    ("accumulate", 0, "accumulate must be at least 1, got 0"),
    ("inner_updates", 0, "inner_updates must be at least 1, got 0"),
    ("kl_top", 0, "kl_top must be at least 1, got 0"),
    ("kl_chunk", -1, "kl_chunk must be at least 1, got -1"),
    ("checkpoint_every", 0, "checkpoint_every must be at least 1, got 0"),
    ("log_every", 0, "log_every must be at least 1, got 0"),
    ("scorer_lr", 0.0, "scorer_lr must be positive, got 0.0"),
    ("decay_lr_ratio", 0.0, "decay_lr_ratio must be positive, got 0.0"),
    ("base_lr", math.nan, "base_lr must be positive, got nan"),
    ("clip", 0.0, "clip must be positive, got 0.0"),
    ("warmup", 1.5, r"warmup must be a share of the steps in \[0, 1\], got 1.5"),
    ("train_long", (8, 0), r"train_long must hold slots of at least 1, got \(8, 0\)"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG_SETTINGS)
def test_a_wrong_setting_is_named_with_its_bound(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillConfig(**{name: value})


def test_inner_updates_are_refused_in_full_mode() -> None:
    with pytest.raises(ValueError, match="full mode takes 1, got 2"):
        DistillConfig(mode="full", inner_updates=2)
    assert dataclasses.asdict(DistillConfig())["inner_updates"] == 1

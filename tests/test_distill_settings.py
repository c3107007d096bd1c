"""The settings of a run: what each does, which parameters it reaches, and what is refused before any work."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvpop.distill.trainer as trainer_module
import kvpop.lora
from kvpop.attachment import attach, attached_policies
from kvpop.budget import Budget
from kvpop.core import Target
from kvpop.data import SequenceStream
from kvpop.distill import DistillConfig, Trainer
from kvpop.distill.optim import learning_rate
from kvpop.distill.scoring import generator, rows_drawn
from kvpop.documents import Documents
from kvpop.policies import DMS, ByLayer, Dense, KVpop, LayerView, SequencePass, Streaming
from kvpop.supervision import Supervised, decisions_of
from tests.tiny import tiny_model
from tests.training import (
    BUDGET,
    CONFIG_OF,
    LOSS,
    MODES,
    POLICY,
    SCORER,
    count_layer_passes,
    gradients,
    packed,
    stream,
    trainer,
)


def test_learning_rates_warm_up_and_fall_to_zero_or_stay() -> None:
    config = DistillConfig(
        mode="full", steps=100, warmup=0.1, loss=LOSS, scorer_lr=1e-3, decay_lr_ratio=0.1, base_lr=8e-5, kl_top=16
    )
    assert [learning_rate(config, step, 1.0, "cosine") for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert learning_rate(config, 10, 1.0, "cosine") == pytest.approx(1.0)
    assert learning_rate(config, 55, 1.0, "cosine") == pytest.approx(0.5)
    assert learning_rate(config, 100, 1.0, "cosine") == pytest.approx(0.0)
    assert 0 < learning_rate(config, 99, 1.0, "cosine") < 1e-3
    assert {learning_rate(config, step, 8e-5, "constant") for step in range(100)} == {8e-5}
    assert learning_rate(replace(config, warmup=0.0), 0, 1.0, "cosine") == 1.0
    t = trainer(config)
    record = t.step()
    assert [g["name"] for g in t.optimizer.param_groups] == ["scorer", "decay", "base"]
    assert [g["lr"] for g in t.optimizer.param_groups] == pytest.approx([1e-4, 1e-5, 8e-5])
    assert [record[f"{name}_lr"] for name in ("scorer", "decay", "base")] == pytest.approx([1e-4, 1e-5, 8e-5])
    assert [g["weight_decay"] for g in t.optimizer.param_groups] == [1e-4, 0.0, 1e-4]


def test_every_trained_parameter_is_in_exactly_one_group() -> None:
    for mode in MODES:
        t = trainer(CONFIG_OF[mode])
        grouped = [id(p) for group in t.optimizer.param_groups for p in group["params"]]
        assert sorted(grouped) == sorted(id(p) for p in t.model.parameters() if p.requires_grad)


def test_inner_updates_are_more_optimizer_steps_on_one_forward_pass() -> None:
    t = trainer(replace(SCORER, calibrate=False, inner_updates=3))
    passes = count_layer_passes(t)
    t.step()
    assert passes == [1]
    assert {int(state["step"]) for state in t.optimizer.state.values()} == {3}
    once = trainer(replace(SCORER, calibrate=False))
    once.step()
    assert any(
        not torch.equal(a, b)
        for a, b in zip(t.optimizer.param_groups[0]["params"], once.optimizer.param_groups[0]["params"])
    )


def test_inner_updates_draw_decisions_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[Tensor] = []

    def recorded(teacher, config, budgets, uniform_NP):
        draws.append(uniform_NP)
        return decisions_of(teacher, config, budgets, uniform_NP)

    monkeypatch.setattr("kvpop.distill.scoring.decisions_of", recorded)
    trainer(replace(SCORER, inner_updates=3)).step()
    assert len(draws) == 3
    assert draws[0].shape == (4, LOSS.samples)  # two rows of two documents each
    assert len({tuple(x.flatten().tolist()) for x in draws}) == 3
    assert len({tuple(row.tolist()) for row in draws[0]}) == 4


def test_draws_of_a_sequence_do_not_depend_on_the_batch_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Tensor] = []

    def recorded(teacher, config, budgets, uniform_NP):
        drawn.append(uniform_NP)
        return decisions_of(teacher, config, budgets, uniform_NP)

    monkeypatch.setattr("kvpop.distill.scoring.decisions_of", recorded)
    trainer(SCORER, stream(batch_size=4)).step()
    trainer(replace(SCORER, accumulate=4), stream(batch_size=1)).step()
    assert torch.equal(drawn[0], torch.cat(drawn[1:]))


def test_randomness_is_a_function_of_every_part_of_its_key() -> None:
    keys = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0), (0, 0, 0, 0)]
    draws = [torch.rand(4, generator=generator(*key)).tolist() for key in keys]
    assert len({tuple(draw) for draw in draws}) == len(keys)
    assert torch.rand(4, generator=generator(0, 0, 0)).tolist() == draws[0]
    noise = rows_drawn(3, [7, 8])(1, (2, 2, 5))
    assert noise.shape == (2, 2, 5)
    assert not torch.equal(noise[0], noise[1])
    assert torch.equal(noise[1:], rows_drawn(3, [8])(1, (1, 2, 5)))
    assert not torch.equal(noise, rows_drawn(3, [7, 8])(0, (2, 2, 5)))
    assert not torch.equal(noise, rows_drawn(4, [7, 8])(1, (2, 2, 5)))


def test_several_budgets_are_one_loss_over_the_decisions_of_all() -> None:
    config = replace(SCORER, loss=replace(LOSS, samples=0), clip=1e9, calibrate=False)
    records, found = [], []
    for longs in ((8,), (4,), (8, 4)):
        records.append(trainer(replace(config, train_long=longs), stream(batch_size=1)).step())
        found.append(gradients(trainer(replace(config, train_long=longs), stream(batch_size=1))))
    one, two, both = records
    n, m, total = (np.array(record["decided"]).sum(1) for record in records)
    assert (m > n).all()
    assert (total == n + m).all()
    for name in found[2]:
        layer = int(name.split(".")[2])
        mean = (n[layer] * found[0][name] + m[layer] * found[1][name]) / total[layer]
        torch.testing.assert_close(found[2][name], mean, rtol=1e-9, atol=1e-14)
    assert min(one["score_loss"], two["score_loss"]) < both["score_loss"] < max(one["score_loss"], two["score_loss"])


@pytest.mark.parametrize("lse", ["sparse", "dense"])
def test_the_target_takes_the_sparse_or_the_dense_normaliser(lse: str) -> None:
    t = trainer(replace(SCORER, target=Target(lse=lse)))
    record = t.step()
    assert math.isfinite(record["score_loss"])
    # Under the dense normaliser a probability is at most 1; the sparse one leaves evicted keys out of the sum.
    assert (record["above_one"] == 0) if lse == "dense" else (record["above_one"] >= 0)


def test_calibration_uses_valid_tokens_of_the_first_batch_once() -> None:
    t = trainer(SCORER)
    t.step()
    scorers = [layer.scorer for layer in t.layers]
    passes = count_layer_passes(t)
    assert all(bool(s.calibrated) for s in scorers)
    before = [s.shift_HE.clone() for s in scorers]
    t.step()
    assert passes == [1]
    assert all(torch.equal(s.shift_HE, b) for s, b in zip(scorers, before))
    model, batch = attach(tiny_model(), POLICY), stream().batch(0)
    views: list[LayerView] = []
    with torch.no_grad():
        seq = SequencePass(Documents(batch["document_ids"]), observe=views.append)
        model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False, kvpop=seq)
    x = torch.cat([views[0].k, views[0].v], dim=-1).transpose(1, 2)[batch["document_ids"] >= 0]
    torch.testing.assert_close(before[0], x.mean(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(scorers[0].scale_HE, 1 / x.std(0, correction=0), rtol=1e-9, atol=1e-12)


NATIVE = DMS(window=8, ratio=4, gate="native")
IMPOSSIBLE: dict[str, tuple[Any, DistillConfig]] = {
    r"longest document has 76 tokens; a boundary decision needs at least slots \+ min_future = 77": (
        POLICY, replace(SCORER, loss=replace(LOSS, min_future=59)),
    ),
    "a budget with 0 long-range slots decides nothing": (replace(POLICY, budget=Budget(2, 8, 0)), SCORER),
    "nothing to train: streaming has no parameters of its own, and the mode is scorer": (Streaming(BUDGET), SCORER),
    "nothing to train: dms has no parameters of its own, and the mode is scorer": (NATIVE, SCORER),
    "inner_updates is for policies that rank tokens; dms takes 1": (
        DMS(window=8, ratio=4), replace(SCORER, inner_updates=2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_a_run_that_would_train_nothing_is_refused_and_the_model_stays_as_it_was(message: str) -> None:
    policy, config = IMPOSSIBLE[message]
    model = tiny_model()
    with pytest.raises(ValueError, match=message):
        Trainer(model, policy, stream(), config)
    assert attached_policies(model) == []
    assert all(p.requires_grad for p in model.parameters())


def test_a_refused_low_rank_run_leaves_no_layers_behind() -> None:
    pytest.importorskip("peft")
    model = tiny_model()
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match="the longest document has 76 tokens"):
        Trainer(model, POLICY, stream(), replace(CONFIG_OF["lora"], loss=replace(LOSS, min_future=59)))
    assert [name for name, _ in model.named_parameters()] == names


def test_the_shortest_document_that_is_accepted_gives_a_decision() -> None:
    needed = BUDGET.slots + LOSS.min_future
    data = SequenceStream([packed(needed, size=needed)], 1)
    records = [trainer(replace(SCORER, loss=replace(LOSS, samples=0), seed=s), data).step() for s in range(3)]
    assert max(record["decisions"] for record in records) > 0


@pytest.mark.parametrize("mode", ["full", "base"])
def test_modes_that_change_the_weights_need_a_teacher_that_is_another_model(mode: str) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match=f"{mode} mode changes the weights: it needs a frozen dense teacher"):
        Trainer(model, POLICY, stream(), CONFIG_OF[mode])
    with pytest.raises(ValueError, match="the teacher is the model itself"):
        Trainer(model, POLICY, stream(), CONFIG_OF[mode], model)
    assert Trainer(model, POLICY, stream(), CONFIG_OF[mode], copy.deepcopy(model)).step()["kl"] > 0


@pytest.mark.parametrize("mode", ["scorer", "lora"])
def test_modes_that_leave_the_weights_take_no_teacher(mode: str) -> None:
    with pytest.raises(ValueError, match=f"{mode} mode takes no teacher: the model is its own"):
        Trainer(tiny_model(), POLICY, stream(), CONFIG_OF[mode], tiny_model())


@pytest.mark.parametrize("mode", ["full", "base"])
def test_weights_under_low_rank_changes_are_not_trained(mode: str) -> None:
    pytest.importorskip("peft")
    model = tiny_model()
    kvpop.lora.inject(model, 2)
    with pytest.raises(ValueError, match=f"{mode} mode changes the weights themselves, but this model has LoRA layers"):
        Trainer(model, POLICY, stream(), CONFIG_OF[mode], tiny_model())


def test_the_kl_is_zero_while_the_budget_holds_everything() -> None:
    wide = KVpop(Budget(2, 8, 66), scorer="mlp")
    config = replace(CONFIG_OF["full"], train_long=(8,))
    assert abs(trainer(config, policy=wide).step()["kl"]) < 1e-12


WRONG_SETTINGS = [
    ("mode", "both", "mode must be one of scorer, full, lora, base, got 'both'"),
    ("compute", "float16", "compute must be one of same, bfloat16, got 'float16'"),
    ("lora_rank", 0, "lora_rank must be at least 1, got 0"),
    ("stack_elements", 0, "stack_elements must be at least 1, got 0"),
    ("gate_ramp", 0.0, r"gate_ramp must be a share of the steps in \(0, 1\], got 0.0"),
    ("gate_ramp", 1.1, r"gate_ramp must be a share of the steps in \(0, 1\], got 1.1"),
    ("gate_temperature", 0.0, "gate_temperature must be positive and finite, got 0.0"),
    ("steps", 0, "steps must be at least 1, got 0"),
    ("accumulate", 0, "accumulate must be at least 1, got 0"),
    ("inner_updates", 0, "inner_updates must be at least 1, got 0"),
    ("kl_top", 0, "kl_top must be at least 1, got 0"),
    ("kl_chunk", -1, "kl_chunk must be at least 1, got -1"),
    ("checkpoint_every", 0, "checkpoint_every must be at least 1, got 0"),
    ("log_every", 0, "log_every must be at least 1, got 0"),
    ("scorer_lr", 0.0, "scorer_lr must be positive and finite, got 0.0"),
    ("decay_lr_ratio", 0.0, "decay_lr_ratio must be positive and finite, got 0.0"),
    ("base_lr", math.nan, "base_lr must be positive and finite, got nan"),
    ("clip", 0.0, "clip must be positive and finite, got 0.0"),
    ("warmup", 1.5, r"warmup must be a share of the steps in \[0, 1\], got 1.5"),
    ("train_long", (8, 0), r"train_long must hold slots of at least 1, got \(8, 0\)"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG_SETTINGS)
def test_a_wrong_setting_is_named_with_its_bound(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillConfig(**{name: value})


@pytest.mark.parametrize("mode", ["full", "lora", "base"])
def test_inner_updates_are_refused_where_the_model_is_trained(mode: str) -> None:
    with pytest.raises(ValueError, match=f"{mode} mode takes 1, got 2"):
        DistillConfig(mode=mode, inner_updates=2)  # type: ignore[arg-type]
    assert dataclasses.asdict(DistillConfig())["inner_updates"] == 1


# What cannot be trained, or not together


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    t = trainer(CONFIG_OF["full"])
    t.step()
    before = {name: x.clone() for name, x in t.state().items()}
    with torch.no_grad():
        t.model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"step 2: base_grad is not finite: nothing was changed"):
        t.step()
    changed = {name for name, x in t.state().items() if not torch.equal(x, before[name])}
    assert changed == {"param/lm_head.weight"}  # what the test put there


def test_float16_weights_are_refused_where_a_kl_is_needed() -> None:
    with pytest.raises(ValueError, match="the KL cannot train through float16"):
        trainer(CONFIG_OF["full"], dtype=torch.float16)


def test_layers_are_stacked_only_with_their_like() -> None:
    t = trainer(SCORER)
    assert t.scorers is not None
    batch, views = t.batch(0), {}
    t._forward(t.student, batch, lambda hidden, head: None, lambda view: views.setdefault(view.layer, view))
    alike = list(views.values())
    assert [len(group) for group in t.scorers._groups(alike)] == [2]
    for change in (
        {"scale": alike[1].scale * 2},
        {"q": alike[1].q[:, ::2]},
        {"v": alike[1].v[..., :4]},
    ):
        other = replace(alike[1], **change)
        assert [len(group) for group in t.scorers._groups([alike[0], other])] == [1, 1]


def test_budgets_that_differ_by_layer_are_refused_and_layers_that_do_not_learn_are_left_out() -> None:
    policy = KVpop(BUDGET, scorer="mlp")
    with pytest.raises(ValueError, match="layers 0 and 1 cannot be trained together: budgets"):
        trainer(SCORER, policy=ByLayer(policy, {1: replace(policy, budget=Budget(2, 8, 7))}))
    t = trainer(SCORER, policy=ByLayer(policy, {0: Dense()}))
    assert t.step()["decisions"] > 0
    assert t.observed == {1}


def test_the_models_loss_is_backpropagated_without_a_stack_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[int] = []
    backward = torch.Tensor.backward

    def counted(self, *args, **options):
        if self.ndim == 0 and self.grad_fn is not None and len(alive) % 2 == 1:
            gc.collect()
            alive.append(sum(isinstance(o, Supervised) for o in gc.get_objects()))
        else:
            alive.append(-1)
        return backward(self, *args, **options)

    t = trainer(CONFIG_OF["full"])
    monkeypatch.setattr(torch.Tensor, "backward", counted)
    t.step()
    assert alive == [-1, 0]  # the boundary losses, then the KL


def test_what_gates_are_to_drop_rises_over_the_ramp_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    aims: list[float] = []
    original = trainer_module.shortfall
    monkeypatch.setattr(trainer_module, "shortfall", lambda *given: aims.append(given[2]) or original(*given))
    t = trainer(replace(SCORER, steps=4, gate_ramp=0.5), policy=DMS(window=8, ratio=4))
    for _ in range(4):
        t.step()
    assert aims == [0.375, 0.75, 0.75, 0.75]

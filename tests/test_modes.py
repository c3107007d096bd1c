"""Every mode with every kind of policy: what it changes, what it leaves alone, and that its adapter is the trained model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvpop
from kvpop.adapter import CONFIG, base_tensors, load_policy, read_config, scorer_tensors
from kvpop.attachment import attach
from kvpop.distill import DistillConfig, Trainer
from kvpop.distill.scoring import rows_drawn
from kvpop.documents import Documents
from kvpop.kl import TopLogits, distillation_kl, teacher_logits
from kvpop.lora import lora_parameters
from kvpop.policies import DMS, Dense, GateSampling, LayerView, Policy, SequencePass, Streaming
from kvpop.policies.dms import closed_counts, shortfall
from tests.tiny import tiny_model
from tests.training import (
    BUDGET,
    CONFIG_OF,
    POLICY,
    SCORER,
    assert_close,
    assert_equal,
    count_layer_passes,
    gradients,
    is_policy,
    log_of,
    run,
    snapshot,
    stream,
    trainer,
    unequal,
)

POLICIES: dict[str, Policy] = {
    "kvpop": POLICY,
    "dms": DMS(window=8, ratio=4, offset=0.0),
    "native": DMS(window=8, ratio=4, offset=0.0, scale=5.0, gate="native"),
    "streaming": Streaming(BUDGET),
    "streaming-cache": Streaming(BUDGET, positions="cache"),
}
NEEDS_PEFT = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
REFUSED = {("scorer", "native"), ("scorer", "streaming"), ("scorer", "streaming-cache")}
TRAINED = [
    pytest.param(mode, policy, marks=[NEEDS_PEFT] if mode == "lora" else [])
    for mode in ("scorer", "full", "lora", "base")
    for policy in POLICIES
    if (mode, policy) not in REFUSED
]
GATED = [case for case in TRAINED if case.values[0] != "base" and case.values[1] in ("dms", "native")]


def config_of(mode: str, **options: Any) -> DistillConfig:
    """Rates so large that whatever is trained has moved after two steps."""
    return replace(CONFIG_OF[mode], scorer_lr=1e-2, base_lr=1e-3, lora_rank=4, **options)


def learns_itself(policy: str) -> bool:
    return policy in ("kvpop", "dms")


def inert(name: str) -> bool:
    """A number added to every score ranks nothing."""
    return name.endswith(("b_H", "b2_H"))


def policy_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return snapshot({name: x for name, x in model.state_dict().items() if is_policy(name)})


# What a mode changes


@pytest.mark.parametrize(("mode", "policy"), TRAINED)
def test_a_mode_changes_what_it_trains_and_nothing_else(mode: str, policy: str) -> None:
    t = trainer(config_of(mode), policy=POLICIES[policy])
    assert (t.teacher is not None) == (mode in ("full", "base"))
    own, base, low_rank = (
        snapshot(x) for x in (policy_tensors(t.model), base_tensors(t.model), lora_parameters(t.model))
    )
    parameters = dict(t.model.named_parameters())
    teacher = snapshot(base_tensors(t.teacher)) if t.teacher is not None else {}
    records = [t.step(), t.step()]
    assert ("kl" in records[0]) == (mode != "scorer" or policy == "dms")
    assert ("score_loss" in records[0]) == (mode != "base" and policy == "kvpop")
    assert ("closed" in records[0]) == (mode != "base" and policy in ("dms", "native"))
    for name, x in policy_tensors(t.model).items():
        learns = mode != "base" and learns_itself(policy)
        if not learns:
            assert torch.equal(x, own[name]), name
        elif name in parameters and not inert(name):
            assert not torch.equal(x, own[name]), name
    for name, x in base_tensors(t.model).items():
        assert torch.equal(x, base[name]) == (mode in ("scorer", "lora")), name
    assert bool(low_rank) == (mode == "lora")
    for name, x in lora_parameters(t.model).items():
        assert not torch.equal(x, low_rank[name]), name
    if t.teacher is not None:
        assert_equal(snapshot(base_tensors(t.teacher)), teacher)
        assert not any(p.requires_grad for p in t.teacher.parameters())


@pytest.mark.parametrize(("mode", "policy"), sorted(REFUSED))
def test_a_mode_that_would_train_nothing_is_refused_with_the_reason(mode: str, policy: str) -> None:
    made = POLICIES[policy]
    with pytest.raises(
        ValueError, match=f"nothing to train: {made.name} has no parameters of its own, and the mode is"
    ):
        trainer(config_of(mode), policy=made)


@pytest.mark.parametrize(("mode", "policy"), TRAINED)
def test_the_teacher_is_the_untouched_dense_model_bit_for_bit_at_every_step(
    mode: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TopLogits] = []

    def recorded(hidden, head, target, valid, *, chunk):
        seen.append(target)
        return distillation_kl(hidden, head, target, valid, chunk=chunk)

    monkeypatch.setattr("kvpop.distill.trainer.distillation_kl", recorded)
    t = trainer(config_of(mode), policy=POLICIES[policy])
    for _ in range(3):
        t.step()
    assert len(seen) == (0 if (mode, policy) == ("scorer", "kvpop") else 3)
    untouched = attach(tiny_model(), Dense())
    for index, target in enumerate(seen):
        batch = t.batch(index)
        with torch.no_grad():
            out = untouched.model(
                batch.ids, position_ids=batch.position_ids, use_cache=False, kvpop=SequencePass(batch.documents)
            )
        head, config = untouched.lm_head, t.config
        expected = teacher_logits(
            out.last_hidden_state, head, batch.documents.valid_BS, top=config.kl_top, chunk=config.kl_chunk
        )
        assert torch.equal(target.index_XK, expected.index_XK)
        assert torch.equal(target.log_p_XK, expected.log_p_XK)
        assert torch.equal(target.rest_X, expected.rest_X)


@pytest.mark.parametrize(("mode", "policy"), TRAINED)
def test_checkpointing_changes_no_gradient_in_any_mode(mode: str, policy: str) -> None:
    """Also of gates: their noise is a function of seed, sequence and layer, the same when a layer runs again."""
    config = config_of(mode, clip=1e9)
    plain = trainer(config, policy=POLICIES[policy])
    again = trainer(replace(config, checkpointing=True), policy=POLICIES[policy])
    passes = count_layer_passes(again)
    a, b = gradients(plain), gradients(again)
    assert_close(a, b)
    scorer_only = (mode, policy) == ("scorer", "kvpop")
    calibrates = mode != "base" and policy == "kvpop"
    teaches_itself = mode == "lora" or (mode, policy) == ("scorer", "dms")
    assert passes == [1 + calibrates + teaches_itself + (not scorer_only)]


@pytest.mark.parametrize(("mode", "policy"), TRAINED)
def test_parts_of_a_batch_accumulate_to_the_whole(mode: str, policy: str) -> None:
    """Every decision at weight 1, and gates that close less than is asked for: then, as documented, exactly. Weights that have
    moved, so that there is a gradient beside its rounding: with all gates open nothing keeps a student from its teacher."""
    made = POLICIES[policy]
    if isinstance(made, DMS):
        made = replace(made, offset=9.0 if policy == "dms" else 30.0)
    loss = replace(SCORER.loss, samples=0, margin_floor=1.0, balance=(1.0, 1.0))
    config = config_of(mode, loss=loss, clip=1e9, calibrate=False)
    whole, parts = (
        trainer(config, unequal(4), policy=made),
        trainer(replace(config, accumulate=4), unequal(1), policy=made),
    )
    for t in (whole, parts):
        generator = torch.Generator().manual_seed(0)
        for name, p in t.model.named_parameters():
            if p.requires_grad and not is_policy(name):
                p.data.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    a, b = gradients(whole), gradients(parts)
    assert mode == "scorer" or max(float(x.abs().max()) for x in a.values()) > 1e-5
    assert_close(a, b, rel=1e-11)


# Gates


@pytest.mark.parametrize("with_kl", [True, False])
def test_closed_gates_rise_towards_their_aim(with_kl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The aim rises to 3 / 4. The KL holds against it, and on random weights it has a lot to say."""
    if not with_kl:
        monkeypatch.setattr(
            "kvpop.distill.trainer.distillation_kl", lambda hidden, *args, **options: hidden.sum() * 0.0
        )
    config = replace(SCORER, steps=40, scorer_lr=1e-1, kl_top=8)
    t = trainer(config, policy=DMS(window=4, ratio=4, offset=3.0), dtype=torch.float32)
    closed = [t.step()["closed"] for _ in range(40)]
    quarters = [sum(closed[i : i + 10]) / 10 for i in range(0, 40, 10)]
    assert closed[0] < 0.1
    assert quarters == sorted(quarters)
    assert closed[-1] > (0.5 if with_kl else 0.65)


@pytest.mark.parametrize(("mode", "policy"), GATED)
def test_the_shortfall_is_that_of_the_whole_batch(mode: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the KL, the gradient is that of relu(aim - closed / tokens) over all rows and layers."""
    monkeypatch.setattr("kvpop.distill.trainer.distillation_kl", lambda hidden, *args, **options: hidden.sum() * 0.0)
    config = replace(config_of(mode, clip=1e9), steps=1)  # at the last step the aim is 3 / 4
    made = POLICIES[policy]
    t = trainer(config, unequal(4), policy=made)
    batch = t.batch(0)
    views: list[LayerView] = []
    gates = GateSampling(config.gate_temperature, rows_drawn(config.seed, batch.places))
    seq = SequencePass(batch.documents, observe=views.append, gates=gates)
    t.model.model(batch.ids, position_ids=batch.position_ids, use_cache=False, kvpop=seq)
    closed, count = (sum(x) for x in zip(*(closed_counts(view.closed_BHS, view.documents) for view in views)))
    trained = {name: p for name, p in t.model.named_parameters() if p.requires_grad}
    loss = shortfall(closed, count, 0.75)
    assert 0 < float(loss.detach()) < 0.75
    expected = dict(zip(trained, torch.autograd.grad(loss, list(trained.values()), allow_unused=True)))
    records: list[dict[str, Any]] = []
    found = gradients_and_record(t, records)
    for name, gradient in expected.items():
        gradient = torch.zeros_like(trained[name]) if gradient is None else gradient
        torch.testing.assert_close(found.get(name, torch.zeros_like(gradient)), gradient, rtol=1e-10, atol=1e-15)
    assert any(float(gradient.abs().max()) > 1e-6 for gradient in found.values())
    assert records[0]["closed"] == pytest.approx(float(closed.detach() / count), rel=1e-12)


def gradients_and_record(t: Trainer, records: list[dict[str, Any]]) -> dict[str, Tensor]:
    original: Callable[[], dict[str, Any]] = t.step

    def step() -> dict[str, Any]:
        records.append(original())
        return records[-1]

    t.step = step  # type: ignore[method-assign]
    return gradients(t)


def test_gates_that_closed_enough_feel_the_kl_only() -> None:
    """Closing more than the aim, which is near 0 at first, is not rewarded."""
    one, many = (
        gradients(trainer(config_of("scorer", steps=steps, clip=1e9), policy=DMS(window=8, ratio=4, offset=-3.0)))
        for steps in (50, 100)
    )
    assert_close(one, many)


def test_a_base_run_keeps_gates_as_hard_as_in_generation() -> None:
    views: list[LayerView] = []
    t = trainer(config_of("base"), policy=POLICIES["native"])
    layer = t.model.model.layers[0].self_attn.kvpop
    original = layer.attend_sequence

    def watched(q, k, v, scale, seq):
        assert seq.gates is None
        return original(q, k, v, scale, replace(seq, observe=views.append))

    layer.attend_sequence = watched
    record = t.step()
    assert record["kl"] > 0
    assert "closed" not in record
    assert set(views[0].closed_BHS.unique().tolist()) == {0.0, 1.0}


# What is left behind


@pytest.mark.parametrize(("mode", "policy"), TRAINED)
def test_an_adapter_of_every_mode_loads_as_the_trained_model(mode: str, policy: str, tmp_path: Path) -> None:
    finished, model = run(tmp_path, config_of(mode, steps=2), policy=POLICIES[policy])
    assert finished
    again = kvpop.load(tiny_model(), tmp_path)
    assert_equal(dict(model.state_dict()), dict(again.state_dict()))
    ids, documents = stream().batch(0)["input_ids"], Documents(stream().batch(0)["document_ids"])
    logits = []
    for one in (model, again):
        assert not one.training
        with torch.no_grad():
            seq = SequencePass(documents)
            logits.append(one(ids, position_ids=documents.position_BS, use_cache=False, kvpop=seq).logits)
    assert torch.equal(*logits)
    kind = {"scorer": None, "full": "base.safetensors", "base": "base.safetensors", "lora": "adapter_model.safetensors"}
    config = read_config(tmp_path)
    assert config["base_weights"] == kind[mode]
    facts = config["training"]
    assert facts["steps"] == 2
    assert facts["config"]["mode"] == mode
    last = log_of(tmp_path)[-1]
    for name in ("score_loss", "accuracy", "recall", "kl", "closed"):
        assert (name in facts) == (name in last)
        assert facts.get(name) == last.get(name)


@pytest.mark.parametrize("mode", ["scorer", "full"])
def test_gates_that_were_trained_before_go_on_learning(mode: str, tmp_path: Path) -> None:
    """A policy that was loaded is the policy: its gates are relaxed and have an aim, too."""
    run(tmp_path, config_of("scorer", steps=2), policy=POLICIES["dms"])
    t = trainer(config_of(mode), policy=load_policy(tmp_path))
    before = scorer_tensors(t.model)
    record = t.step()
    assert 0 < record["closed"] < 1
    assert record["gate_grad"] > 0
    assert any(not torch.equal(x, before[name]) for name, x in scorer_tensors(t.model).items())


@NEEDS_PEFT
def test_a_low_rank_run_goes_on_from_the_adapter_of_another(tmp_path: Path) -> None:
    run(tmp_path / "first", config_of("lora", steps=2))
    model = kvpop.load(tiny_model(), tmp_path / "first")
    before = snapshot(lora_parameters(model))
    t = Trainer(model, load_policy(tmp_path / "first"), stream(), config_of("lora"))
    assert_equal(snapshot(lora_parameters(model)), before)
    t.step()
    assert all(not torch.equal(p, before[name]) for name, p in lora_parameters(model).items())


def test_a_policy_that_no_adapter_holds_is_refused_before_training(tmp_path: Path) -> None:
    from kvpop.policies import Random

    with pytest.raises(ValueError, match="Random cannot be saved: adapters hold one of kvpop, streaming, dms"):
        run(tmp_path / "out", config_of("full"), policy=Random(BUDGET))
    assert not (tmp_path / "out" / CONFIG).exists()

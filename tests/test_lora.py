"""LoRA in place: the model keeps its class and its names, off it is the old one bit for bit, and files come back whole."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvpop
from kvpop import lora
from kvpop.adapter import (
    CONFIG,
    AdapterError,
    adapter_files,
    base_fingerprint,
    base_tensors,
    changed_weights,
    load,
    read_config,
    save_adapter,
    scorer_tensors,
)
from kvpop.attachment import attach, attached_policies, detach
from kvpop.budget import Budget
from kvpop.lora import LORA_CONFIG, LORA_WEIGHTS
from kvpop.policies import Dense, KVpop, Streaming
from kvpop.session import Session, SessionError
from tests.tiny import VOCAB, expiries, family_model, tiny_model

peft = pytest.importorskip("peft")

BUDGET = Budget(2, 8, 8)
IDS = torch.randint(3, VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def changed(dtype: torch.dtype = torch.float32, rank: int = 3, targets=(), **sizes):
    """A model whose LoRA layers do something."""
    model = tiny_model(dtype=dtype, **sizes)
    lora.inject(model, rank, targets=targets)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in lora.lora_parameters(model).values():
            p.copy_(0.2 * torch.randn(p.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    policy = KVpop(BUDGET, scorer="mlp")
    model = attach(changed(), policy)
    return save_adapter(model, policy, tmp_path_factory.mktemp("lora"), model_id="tiny", training={"steps": 2})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_injection_changes_nothing_at_first_and_adapters_off_gives_the_old_model(dtype: torch.dtype) -> None:
    before = logits(tiny_model(dtype=dtype))
    fresh = tiny_model(dtype=dtype)
    names = lora.inject(fresh, 2)
    assert torch.equal(logits(fresh), before)
    assert list(lora.lora_parameters(fresh)) == names
    assert len(names) == 2 * 2 * len(LINEAR)
    wide = dtype if dtype != torch.bfloat16 else torch.float32
    assert {p.dtype for p in lora.lora_parameters(fresh).values()} == {wide}
    model = changed(dtype)
    after = logits(model)
    assert after.dtype == dtype
    assert (after - before).abs().max() > 0.1
    with lora.adapters_off(model):
        assert torch.equal(logits(model), before)
    assert torch.equal(logits(model), after)


def test_the_model_keeps_its_class_its_names_and_what_is_trainable() -> None:
    model = attach(tiny_model(), KVpop(BUDGET, scorer="mlp"))
    plain = {n: p.requires_grad_("norm" not in n).requires_grad for n, p in model.named_parameters()}
    lora.inject(model, 2, targets=["q_proj", "down_proj"])
    assert type(model) is type(tiny_model())
    assert base_tensors(model).keys() == base_tensors(tiny_model()).keys()
    assert base_fingerprint(model) == base_fingerprint(tiny_model())
    now = {n.replace(".base_layer.", "."): p.requires_grad for n, p in model.named_parameters() if ".lora_" not in n}
    assert now == plain
    assert all(p.requires_grad for p in lora.lora_parameters(model).values())
    assert not any(".kvpop." in n for n in lora.lora_parameters(model))
    assert len(attached_policies(model)) == 2


def test_what_is_trainable_survives_adapters_off_also_after_an_error() -> None:
    model = changed()
    first, *_ = lora.lora_parameters(model).values()
    first.requires_grad_(False)
    wanted = [p.requires_grad for p in model.parameters()]
    with pytest.raises(KeyError), lora.adapters_off(model):
        raise KeyError
    assert [p.requires_grad for p in model.parameters()] == wanted
    with lora.adapters_off(tiny_model()):  # nothing to switch off
        pass


def test_gradients_reach_lora_and_the_teacher_is_the_same_model_with_adapters_off() -> None:
    model = changed(torch.float64)
    model.requires_grad_(False)
    for p in lora.lora_parameters(model).values():
        p.requires_grad_(True)
    attach(model, Streaming(BUDGET))
    student = model(IDS, use_cache=False).logits
    with torch.no_grad(), lora.adapters_off(model):
        attach(model, Dense())
        teacher = model(IDS, use_cache=False).logits
        torch.testing.assert_close(teacher, logits(tiny_model()))
    (student - teacher).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in lora.lora_parameters(model).values())
    assert all(p.grad is None for p in base_tensors(model).values())


def test_generation_with_lora_in_place_equals_generation_with_it_merged(saved: Path) -> None:
    policy = Streaming(BUDGET)
    beside = attach(changed(torch.float64), policy)
    merged = attach(lora.remove(changed(torch.float64), merge=True), policy)
    assert not lora.lora_parameters(merged)
    assert [n for n, _ in detach(merged).named_parameters()] == [n for n, _ in tiny_model().named_parameters()]
    attach(merged, policy)
    torch.testing.assert_close(logits(beside), logits(merged))
    texts = [m.generate(IDS, max_new_tokens=20, min_new_tokens=20, do_sample=False) for m in (beside, merged)]
    assert torch.equal(*texts)
    assert texts[0].shape[1] == 60


def test_removing_gives_the_plain_model_back() -> None:
    model = lora.remove(changed())
    assert torch.equal(logits(model), logits(tiny_model(dtype=torch.float32)))
    assert not hasattr(model, "peft_config")
    assert len(lora.inject(model, 1, targets=["v_proj"])) == 4
    assert lora.remove(tiny_model()) is not None


def test_saved_layers_come_back_bit_equal_for_kvpop_and_for_peft_alone(tmp_path: Path) -> None:
    model = changed(targets=["q_proj", "up_proj"])
    lora.save(model, tmp_path, model_id="owner/tiny")
    assert sorted(p.name for p in tmp_path.iterdir()) == [LORA_CONFIG, LORA_WEIGHTS]
    config = json.loads((tmp_path / LORA_CONFIG).read_text())
    assert (config["base_model_name_or_path"], config["target_modules"]) == ("owner/tiny", ["q_proj", "up_proj"])
    again = lora.load(tiny_model(dtype=torch.float32), tmp_path)
    mine, theirs = lora.lora_parameters(model), lora.lora_parameters(again)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(p, theirs[n]) for n, p in mine.items())
    assert torch.equal(logits(again), logits(model))
    alone = peft.PeftModel.from_pretrained(tiny_model(dtype=torch.float32), str(tmp_path))
    assert torch.equal(logits(alone), logits(model))
    merged = lora.load(tiny_model(dtype=torch.float32), tmp_path, merge=True)
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Phi3", "Qwen3Moe"])
def test_other_families_have_other_linear_layers(family: str, tmp_path: Path) -> None:
    sizes = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16) if family == "Qwen3Moe" else {}
    model = family_model(family, dtype=torch.float32, **sizes)
    lora.inject(model, 2)
    lora.save(model, tmp_path)
    again = lora.load(family_model(family, dtype=torch.float32, **sizes), tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_an_adapter_with_lora_is_loaded_with_scorers_and_generates(saved: Path) -> None:
    config = read_config(saved)
    assert config["base_weights"] == LORA_WEIGHTS
    assert adapter_files(saved) == [CONFIG, "scorers.safetensors", LORA_CONFIG, LORA_WEIGHTS]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = kvpop.load(tiny_model(dtype=torch.float32), saved)
    original = attach(changed(), KVpop(BUDGET, scorer="mlp"))
    for layer, other in zip(attached_policies(original), attached_policies(model)):
        layer.load_state_dict(other.state_dict())
    (mine, kept), (theirs, kept_again) = expiries(original, IDS), expiries(model, IDS)
    assert torch.equal(mine, theirs)
    assert all(torch.equal(a, b) for a, b in zip(kept, kept_again))
    merged = kvpop.load(tiny_model(dtype=torch.float32), saved, merge=True)
    assert not lora.lora_parameters(merged)
    texts = [m.generate(IDS, max_new_tokens=10, do_sample=False) for m in (model, merged)]
    assert torch.equal(*texts)
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-4, atol=1e-4)


def test_changed_weights_are_the_merged_ones_and_the_model_stays_as_it_is(saved: Path) -> None:
    model = tiny_model(dtype=torch.float32)
    found = changed_weights(model, saved)
    assert not lora.lora_parameters(model)
    assert torch.equal(logits(model), logits(tiny_model(dtype=torch.float32)))
    merged = base_tensors(lora.load(tiny_model(dtype=torch.float32), saved, merge=True))
    assert len(found) == 2 * len(LINEAR)
    assert all(torch.equal(tensor, merged[name]) for name, tensor in found.items())


def test_lora_for_a_policy_that_learned_nothing_itself(tmp_path: Path) -> None:
    policy = Streaming(BUDGET)
    model = attach(changed(), policy)
    save_adapter(model, policy, tmp_path, model_id="tiny")
    assert adapter_files(tmp_path) == [CONFIG, LORA_CONFIG, LORA_WEIGHTS]
    assert torch.equal(logits(kvpop.load(tiny_model(dtype=torch.float32), tmp_path)), logits(model))


def test_a_session_knows_whether_lora_is_in_place(tmp_path: Path) -> None:
    model = attach(changed(), Streaming(BUDGET))
    cache = kvpop.BoundedCache(model)
    model.generate(IDS, max_new_tokens=3, past_key_values=cache)
    Session(cache).save(tmp_path / "s", model)
    Session.load(tmp_path / "s", model)
    with pytest.raises(SessionError, match="another model: weights"):
        Session.load(tmp_path / "s", attach(tiny_model(dtype=torch.float32), Streaming(BUDGET)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rank=0), "rank must be at least 1, got 0"),
        (dict(rank=2, alpha=0.0), "alpha must be positive, got 0.0"),
        (dict(rank=2, targets=["q_proj", "qq"]), r"\['qq'\]; the model has q_proj, k_proj, v_proj, o_proj, gate_proj"),
        (dict(rank=2, targets=["lm_head"]), r"\['lm_head'\]"),
    ],
)
def test_settings_that_cannot_be_used_are_named(options, message: str) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match=message):
        lora.inject(model, **options)
    assert not lora.lora_parameters(model)


def test_twice_is_refused(saved: Path, tmp_path: Path) -> None:
    model = changed()
    with pytest.raises(ValueError, match="has LoRA layers already"):
        lora.inject(model, 2)
    with pytest.raises(AdapterError, match="has LoRA layers already"):
        load(model, saved)
    with pytest.raises(ValueError, match="no LoRA layers to save"):
        lora.save(tiny_model(), tmp_path)
    with pytest.raises(ValueError, match="with_base saves changed weights"):
        save_adapter(attach(model, Streaming(BUDGET)), Streaming(BUDGET), tmp_path, model_id="x", with_base=True)


def edit_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_tensors(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DAMAGE = {
    "tensor missing": (
        lambda d: edit_tensors(d / LORA_WEIGHTS, lambda t: t.pop(KEY)),
        r"missing tensors \['base_model",
    ),
    "tensor too many": (
        lambda d: edit_tensors(d / LORA_WEIGHTS, lambda t: t.update(x=t[KEY] + 1)),
        r"unexpected .*'x'",
    ),
    "shape": (
        lambda d: edit_tensors(d / LORA_WEIGHTS, lambda t: t.update({KEY: torch.zeros(3, 5)})),
        r"q_proj.lora_A.weight has shape \(3, 5\), but this model needs \(3, 24\)",
    ),
    "another rank": (lambda d: edit_json(d / LORA_CONFIG, r=4), r"has shape \(3, 24\), but this model needs \(4, 24\)"),
    "file cut off": (
        lambda d: (d / LORA_WEIGHTS).write_bytes((d / LORA_WEIGHTS).read_bytes()[:100]),
        f"{LORA_WEIGHTS} cannot be read",
    ),
    "file gone": (lambda d: (d / LORA_WEIGHTS).unlink(), f"has no {LORA_WEIGHTS}"),
    "config gone": (lambda d: (d / LORA_CONFIG).unlink(), f"has no {LORA_CONFIG}"),
    "config broken": (lambda d: (d / LORA_CONFIG).write_text("{"), f"{LORA_CONFIG} cannot be read"),
    "config no object": (lambda d: (d / LORA_CONFIG).write_text("[]"), f"{LORA_CONFIG} cannot be read"),
    "another kind": (lambda d: edit_json(d / LORA_CONFIG, peft_type="IA3"), "type 'IA3', expected 'LORA'"),
    "targets": (lambda d: edit_json(d / LORA_CONFIG, target_modules=["wide"]), r"does not fit the model: .*\['wide'\]"),
    "layers twice": (lambda d: edit_json(d / LORA_CONFIG, layer_replication=[[0, 1]]), "layer_replication"),
    "dora": (lambda d: edit_json(d / LORA_CONFIG, use_dora=True), "use_dora True: only plain LoRA"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_damaged_or_does_not_fit_is_named_and_the_model_stays_as_it_was(case, saved: Path, tmp_path) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage, message = DAMAGE[case]
    damage(tmp_path)
    model = tiny_model(dtype=torch.float32)
    with pytest.raises(AdapterError, match=message):
        load(model, tmp_path)
    assert not lora.lora_parameters(model)
    assert attached_policies(model) == []
    assert not hasattr(model, "peft_config")
    assert torch.equal(logits(model), logits(tiny_model(dtype=torch.float32)))


def test_scorers_that_do_not_fit_take_lora_off_again(saved: Path, tmp_path: Path) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_tensors(tmp_path / "scorers.safetensors", lambda t: t.pop("layers.1.decay.alpha"))
    model = attach(tiny_model(dtype=torch.float32), KVpop(BUDGET, scorer="mlp"))
    before = scorer_tensors(model)
    with pytest.raises(AdapterError, match=r"missing tensors \['decay.alpha'\]"):
        load(model, tmp_path)
    assert not lora.lora_parameters(model)
    assert all(torch.equal(t, before[n]) for n, t in scorer_tensors(model).items())


def test_without_peft_it_says_what_to_install(saved: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    for call in (lambda: lora.inject(tiny_model(), 2), lambda: load(tiny_model(dtype=torch.float32), saved)):
        with pytest.raises(ImportError, match=r"pip install 'kvpop\[lora\]'"):
            call()

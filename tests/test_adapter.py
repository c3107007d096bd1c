"""Adapters: what is saved comes back bit for bit, and what does not fit is refused by name (case 22)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvpop
from kvpop.adapter import (
    BASE,
    CONFIG,
    SCORERS,
    AdapterError,
    base_tensors,
    load,
    load_policy,
    read_config,
    save_adapter,
    scorer_tensors,
)
from kvpop.attachment import attach, attached_policies, cache_argument
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.policies import KVpop
from tests.tiny import VOCAB, expiries, tiny_model

BUDGET = Budget(2, 8, 8)
KINDS = ["mlp", "mlstm", "mlstm-immediate", "mlp+mlstm"]
IDS = torch.randint(3, VOCAB, (1, 60), generator=torch.Generator().manual_seed(0))


def trained_model(policy: KVpop, dtype: torch.dtype = torch.float32, **sizes):
    """A model with scorers that are not what initialisation would give: parameters and standardisation moved."""
    model = attach(tiny_model(dtype=dtype, **sizes), policy)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in attached_policies(model):
            for tensor in layer.state_dict().values():
                if tensor.dtype.is_floating_point:
                    tensor.add_(0.3 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).abs())
                else:
                    tensor.fill_(True)
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    policy = KVpop(BUDGET, scorer="mlp", hidden=5)
    return save_adapter(trained_model(policy), policy, tmp_path / "adapter", model_id="tiny", training={"steps": 3})


def edit_config(directory: Path, change) -> None:
    config = json.loads((directory / CONFIG).read_text())
    change(config)
    (directory / CONFIG).write_text(json.dumps(config))


def edit_tensors(directory: Path, change, file: str = SCORERS) -> None:
    tensors = load_file(directory / file)
    change(tensors)
    save_file(tensors, directory / file)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_scorers_come_back_bit_equal_and_keep_the_same_set(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    policy = KVpop(BUDGET, scorer=kind, decay=-5e-4, decay_range=(-3e-3, -2e-5), decay_step=2)
    model = trained_model(policy, dtype)
    save_adapter(model, policy, tmp_path, model_id="tiny")
    torch.manual_seed(123)  # what initialisation would give is different now
    again = kvpop.load(tiny_model(dtype=dtype), tmp_path)
    before, after = scorer_tensors(model), scorer_tensors(again)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name
    assert load_policy(tmp_path).policy == policy
    (logits, kept), (logits_again, kept_again) = expiries(model, IDS), expiries(again, IDS)
    assert torch.equal(logits, logits_again)
    assert all(torch.equal(a, b) for a, b in zip(kept, kept_again))
    caches = [BoundedCache(m) for m in (model, again)]
    for m, cache in zip((model, again), caches):
        with torch.no_grad():
            m(IDS, use_cache=True, **{cache_argument(m): cache})
    assert caches[0].held_positions() == caches[1].held_positions()


def test_loading_does_not_tie_two_models_together(saved: Path) -> None:
    policy = load_policy(saved)
    first, second = attach(tiny_model(dtype=torch.float32), policy), attach(tiny_model(dtype=torch.float32), policy)
    with torch.no_grad():
        for p in attached_policies(first)[0].parameters():
            p.zero_()
    fresh = scorer_tensors(load(tiny_model(dtype=torch.float32), saved))
    assert all(torch.equal(t, fresh[n]) for n, t in scorer_tensors(second).items())


def test_the_config_says_what_the_adapter_is(saved: Path) -> None:
    config = read_config(saved)
    assert config["model"] == {"id": "tiny", "type": "llama", "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    assert config["policy"]["budget"] == {"sinks": 2, "window": 8, "long": 8}
    assert config["training"] == {"steps": 3}
    assert config["base_weights"] is None
    assert config["versions"]["kvpop"] == kvpop.__version__
    assert sorted(p.name for p in saved.iterdir()) == [CONFIG, SCORERS]
    (saved / "other").touch()
    assert (saved / CONFIG).stat().st_mode == (saved / "other").stat().st_mode  # as readable as any file


def test_a_budget_override_changes_the_slots_and_nothing_else(saved: Path) -> None:
    other = Budget(1, 4, 5)
    model = kvpop.load(tiny_model(dtype=torch.float32), saved, budget=other)
    assert [layer.budget for layer in attached_policies(model)] == [other] * 2
    own = scorer_tensors(kvpop.load(tiny_model(dtype=torch.float32), saved))
    assert all(torch.equal(t, own[n]) for n, t in scorer_tensors(model).items())
    cache = BoundedCache(model)
    with torch.no_grad():
        model(IDS, use_cache=True, **{cache_argument(model): cache})
    assert cache.rows_held() == other.slots
    policy = load_policy(saved)
    assert (policy.slots, policy.with_budget(other).slots) == (BUDGET.slots, other.slots)
    assert policy.with_budget(other).tensors is policy.tensors


def test_a_model_with_a_policy_attached_can_be_loaded_onto(saved: Path) -> None:
    model = attach(tiny_model(dtype=torch.float32), KVpop(Budget(0, 4, 2), scorer="mlstm"))
    load(model, saved)
    fresh = load(tiny_model(dtype=torch.float32), saved)
    assert torch.equal(expiries(model, IDS)[0], expiries(fresh, IDS)[0])


def test_a_full_adapter_restores_the_base_weights(tmp_path: Path) -> None:
    policy = KVpop(BUDGET, scorer="mlp")
    model = trained_model(policy, seed=5)
    save_adapter(model, policy, tmp_path, model_id="tiny", with_base=True)
    again = load(tiny_model(dtype=torch.float32), tmp_path)
    assert all(torch.equal(t, base_tensors(model)[n]) for n, t in base_tensors(again).items())
    assert torch.equal(expiries(model, IDS)[0], expiries(again, IDS)[0])


def test_a_full_adapter_of_a_model_with_tied_embeddings_keeps_them_tied(tmp_path: Path) -> None:
    def tied(seed: int):
        model = tiny_model(seed=seed, dtype=torch.float32)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return model

    policy = KVpop(BUDGET, scorer="mlp")
    model = attach(tied(5), policy)
    save_adapter(model, policy, tmp_path, model_id="tiny", with_base=True)
    again = load(tied(0), tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(expiries(model, IDS)[0], expiries(again, IDS)[0])


NAME = "layers.1.scorer.w1_HEM"


def test_a_missing_scorer_tensor_is_an_error(saved: Path) -> None:
    edit_tensors(saved, lambda t: t.pop(NAME))
    with pytest.raises(AdapterError, match=r"layer 1: missing tensors \['scorer.w1_HEM'\], unexpected tensors none"):
        load(tiny_model(dtype=torch.float32), saved)


@pytest.mark.parametrize("name", ["layers.1.scorer.extra", "layers.2.scorer.w1_HEM", "layers.11.decay.alpha", "stray"])
def test_an_unexpected_scorer_tensor_is_an_error(name: str, saved: Path) -> None:
    edit_tensors(saved, lambda t: t.update({name: torch.zeros(2)}))
    with pytest.raises(AdapterError, match=rf"unexpected tensors \['{name.removeprefix('layers.1.')}'\]"):
        load(tiny_model(dtype=torch.float32), saved)


def test_a_scorer_tensor_of_another_shape_is_an_error(saved: Path) -> None:
    edit_tensors(saved, lambda t: t.update({NAME: t[NAME][:, :, :3].contiguous()}))
    message = r"layer 1: scorer.w1_HEM has shape \(2, 16, 3\), but this model needs \(2, 16, 5\)"
    with pytest.raises(AdapterError, match=message):
        load(tiny_model(dtype=torch.float32), saved)


def test_a_model_of_another_shape_is_refused_with_all_differences(saved: Path) -> None:
    with pytest.raises(AdapterError, match="trained for tiny: heads 4 in the adapter, 6 in the model"):
        load(tiny_model(groups=3, dtype=torch.float32), saved)
    with pytest.raises(AdapterError, match="heads 4 in the adapter, 1 in the model; kv_heads 2 in the adapter, 1 in"):
        load(tiny_model(kv_heads=1, groups=1, dtype=torch.float32), saved)


def test_base_weights_that_do_not_fit_or_are_gone_are_refused(tmp_path: Path) -> None:
    policy = KVpop(BUDGET, scorer="mlp")
    save_adapter(trained_model(policy), policy, tmp_path, model_id="tiny", with_base=True)
    edit_tensors(tmp_path, lambda t: t.pop("model.norm.weight"), BASE)
    with pytest.raises(AdapterError, match=r"base weights: missing tensors \['model.norm.weight'\]"):
        load(tiny_model(dtype=torch.float32), tmp_path)
    (tmp_path / BASE).unlink()
    with pytest.raises(AdapterError, match=f"has no {BASE}"):
        load(tiny_model(dtype=torch.float32), tmp_path)


def test_a_refused_adapter_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    policy = KVpop(BUDGET, scorer="mlp")
    save_adapter(trained_model(policy, seed=5), policy, tmp_path, model_id="tiny", with_base=True)
    edit_tensors(tmp_path, lambda t: t.pop("layers.1.decay.alpha"))
    model = tiny_model(dtype=torch.float32)
    with pytest.raises(AdapterError, match=r"missing tensors \['decay.alpha'\]"):
        load(model, tmp_path)
    assert attached_policies(model) == []
    fresh = base_tensors(tiny_model(dtype=torch.float32))
    assert all(torch.equal(t, fresh[n]) for n, t in base_tensors(model).items())


BROKEN_CONFIGS = {
    "format": (lambda c: c.update(format=2), "format 2; this version of kvpop reads format 1"),
    "no format": (lambda c: c.pop("format"), "format None"),
    "no model": (lambda c: c.pop("model"), "no 'model' section"),
    "no policy": (lambda c: c.pop("policy"), "no 'policy' section"),
    "policy is no object": (lambda c: c.update(policy="kvpop"), "no 'policy' section"),
    "another policy": (lambda c: c["policy"].update(name="dms"), "holds policy 'dms', expected 'kvpop'"),
    "unknown setting": (lambda c: c["policy"].update(sharpness=3), r"unknown policy settings \['sharpness'\]"),
    "no budget": (lambda c: c["policy"].pop("budget"), "the policy has no budget"),
    "unknown budget setting": (lambda c: c["policy"]["budget"].update(pins=1), "budget .*'pins': 1.* cannot be used"),
    "negative budget": (lambda c: c["policy"]["budget"].update(long=-1), "Budget.long must be at least 0, got -1"),
    "another scorer": (lambda c: c["policy"].update(scorer="mlstm"), "missing tensors"),
}


@pytest.mark.parametrize("case", BROKEN_CONFIGS)
def test_a_config_that_cannot_be_used_says_why(case: str, saved: Path) -> None:
    change, message = BROKEN_CONFIGS[case]
    edit_config(saved, change)
    with pytest.raises(AdapterError, match=message):
        load(tiny_model(dtype=torch.float32), saved)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("", "not valid JSON"), ("[1]", "holds a list")]
)
def test_a_broken_json_file_says_so(text: str, message: str, saved: Path) -> None:
    (saved / CONFIG).write_text(text)
    with pytest.raises(AdapterError, match=message):
        read_config(saved)


def test_missing_and_damaged_files_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"nowhere is not a kvpop adapter: it has no {CONFIG}"):
        load(tiny_model(dtype=torch.float32), tmp_path / "nowhere")
    (saved / SCORERS).write_bytes((saved / SCORERS).read_bytes()[:100])
    with pytest.raises(AdapterError, match=f"{SCORERS} cannot be read"):
        load_policy(saved)
    (saved / SCORERS).unlink()
    with pytest.raises(AdapterError, match=f"has no {SCORERS}"):
        load_policy(saved)


def test_an_adapter_from_before_a_setting_existed_gets_its_default(saved: Path) -> None:
    edit_config(saved, lambda c: c["policy"].pop("decay_step"))
    assert load_policy(saved).policy == KVpop(BUDGET, scorer="mlp", hidden=5)


def test_an_adapter_of_another_family_is_refused(tmp_path: Path) -> None:
    policy = KVpop(Budget(1, 4, 4))
    save_adapter(attach(tiny_model("llama"), policy), policy, tmp_path, model_id="llama")
    with pytest.raises(AdapterError, match="type llama in the adapter, qwen3 in the model"):
        load(tiny_model("qwen3"), tmp_path)

"""Adapters: what is saved comes back bit for bit, and what does not fit is refused by name (case 22)."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvpop
from kvpop import hub
from kvpop.adapter import (
    BASE,
    BASE_INDEX,
    CONFIG,
    SCORERS,
    AdapterError,
    adapter_directory,
    adapter_files,
    base_fingerprint,
    base_tensors,
    changed_weights,
    fingerprint,
    load,
    load_policy,
    pretrained,
    read_config,
    save_adapter,
    scorer_tensors,
)
from kvpop.attachment import attach, attached_policies, cache_argument
from kvpop.budget import Budget, cache_bytes
from kvpop.cache import BoundedCache
from kvpop.card import model_card
from kvpop.policies import DMS, KVpop, Policy, Random, Streaming
from kvpop.trained import learned_tensors, policy_from, settings_of
from tests.tiny import VOCAB, expiries, tiny_model

BUDGET = Budget(2, 8, 8)
KINDS = ["mlp", "mlstm", "mlstm-immediate", "mlp+mlstm"]
IDS = torch.randint(3, VOCAB, (1, 60), generator=torch.Generator().manual_seed(0))


def trained_model(policy: Policy, dtype: torch.dtype = torch.float32, **sizes):
    """A model with scorers that are not what initialisation would give: parameters and standardisation moved."""
    model = attach(tiny_model(dtype=dtype, **sizes), policy)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in attached_policies(model):
            for tensor in learned_tensors(layer).values():
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
    assert config["model"] == {
        "id": "tiny", "type": "llama", "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8,
        "weights": base_fingerprint(tiny_model(dtype=torch.float32)),
    }  # fmt: skip
    assert config["policy"]["name"] == "kvpop"
    assert config["policy"]["budget"] == {"sinks": 2, "window": 8, "long": 8}
    assert config["training"] == {"steps": 3}
    assert (config["scorers"], config["base_weights"]) == (SCORERS, None)
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


def test_weights_that_were_put_together_elsewhere_are_saved_in_place_of_the_models(tmp_path: Path) -> None:
    policy = KVpop(BUDGET, scorer="mlp")
    model, whole = trained_model(policy), {n: t + 1 for n, t in base_tensors(tiny_model(dtype=torch.float32)).items()}
    save_adapter(model, policy, tmp_path, model_id="tiny", with_base=True, base=whole)
    again = base_tensors(load(tiny_model(dtype=torch.float32), tmp_path))
    assert all(torch.equal(t, again[n]) for n, t in whole.items())
    whole.pop("model.norm.weight")
    with pytest.raises(AdapterError, match=r"base weights: missing tensors \['model.norm.weight'\]"):
        save_adapter(model, policy, tmp_path / "x", model_id="tiny", with_base=True, base=whole)
    assert not (tmp_path / "x").exists()


def test_a_loaded_policy_can_be_saved_again(saved: Path, tmp_path: Path) -> None:
    trained = load_policy(saved)
    save_adapter(attach(tiny_model(dtype=torch.float32), trained), trained, tmp_path, model_id="tiny")
    again = load_policy(tmp_path)
    assert again.policy == trained.policy
    assert all(torch.equal(t, again.tensors[n]) for n, t in trained.tensors.items())


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
    "another policy": (
        lambda c: c["policy"].update(name="best"),
        "kvpop.json holds policy 'best', expected one of kvpop, streaming, dms",
    ),
    "settings of another": (lambda c: c["policy"].update(name="streaming"), r"unknown policy settings \['decay', "),
    "a string for a number": (lambda c: c["policy"].update(hidden="5"), "the hidden '5' cannot be used: expected int"),
    "true for a number": (lambda c: c["policy"].update(decay=True), "the decay True cannot be used: expected float"),
    "a number for a name": (lambda c: c["policy"].update(scorer=3), "the scorer 3 cannot be used: expected str"),
    "a short range": (
        lambda c: c["policy"].update(decay_range=[-1e-3]),
        r"the decay_range \[-0.001\] cannot be used: expected a list of 2 values",
    ),
    "a budget that is none": (lambda c: c["policy"].update(budget=8), "the budget 8 cannot be used"),
    "scorers elsewhere": (
        lambda c: c.update(scorers="../x"),
        "has scorers '../x', expected null or one of scorers.safe",
    ),
    "weights elsewhere": (lambda c: c.update(base_weights="/etc/x"), "has base_weights '/etc/x', expected null or one"),
    "scorers denied": (lambda c: c.update(scorers=None), "missing tensors"),
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
    with pytest.raises(FileNotFoundError, match="nowhere is not a kvpop adapter: there is no such directory"):
        load(tiny_model(dtype=torch.float32), tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=f"is not a kvpop adapter: it has no {CONFIG}"):
        load(tiny_model(dtype=torch.float32), tmp_path)
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


UNEQUAL = ((1, 2 * BUDGET.long - 1), ())

POLICIES = {
    "kvpop": KVpop(BUDGET, scorer="mlstm", hidden=3, decay=-5e-4, decay_range=(-3e-3, -2e-5), decay_step=2),
    "kvpop, unequal heads": KVpop(BUDGET, scorer="mlp", heads=UNEQUAL),
    "streaming": Streaming(BUDGET),
    "streaming-cache": Streaming(BUDGET, positions="cache"),
    "dms": DMS(window=6, ratio=4.0, sinks=2, hidden=5, offset=0.5, emitted_by="self", threshold=-1.0),
    "dms-native": DMS(window=6, ratio=2, gate="native", scale=3.0, offset=0),
}


@pytest.mark.parametrize("name", POLICIES)
def test_every_trained_policy_comes_back_with_its_settings_and_decides_the_same(name: str, tmp_path: Path) -> None:
    policy = POLICIES[name]
    model = trained_model(policy)
    learned = bool(scorer_tensors(model))
    assert learned == (name.startswith("kvpop") or name == "dms")
    save_adapter(model, policy, tmp_path, model_id="tiny", with_base=True)
    assert adapter_files(tmp_path) == [CONFIG, *([SCORERS] if learned else []), BASE]
    trained = load_policy(tmp_path)
    assert trained.policy == policy
    assert (trained.name, trained.slots) == (policy.name, policy.slots)
    again = load(tiny_model(seed=3, dtype=torch.float32), tmp_path)
    (logits, kept), (logits_again, kept_again) = expiries(model, IDS), expiries(again, IDS)
    assert torch.equal(logits, logits_again)
    assert all(torch.equal(a, b) for a, b in zip(kept, kept_again))
    texts = [m.generate(IDS, max_new_tokens=6, do_sample=False) for m in (model, again)]
    assert torch.equal(*texts)


def test_heads_are_said_only_where_there_are_any_and_read_with_care() -> None:
    plain, unequal = (settings_of(KVpop(BUDGET, heads=heads)) for heads in ((), UNEQUAL))
    assert "heads" not in plain
    assert json.loads(json.dumps(unequal))["heads"] == [list(row) for row in UNEQUAL]
    for heads, message in (
        ([[1, 2]], "slots on average, the budget"), ([[1.5, 2]], "expected int, got float"), ([3], "the heads"),
    ):  # fmt: skip
        with pytest.raises(AdapterError, match=message):
            policy_from(json.loads(json.dumps(unequal)) | {"heads": heads}, "here")


def test_another_budget_is_shared_by_the_heads_in_the_same_proportions(tmp_path: Path) -> None:
    policy = KVpop(Budget(1, 2, 6), scorer="mlp", heads=((2, 10), (5, 7)))
    save_adapter(trained_model(policy), policy, tmp_path, model_id="tiny")
    trained = load_policy(tmp_path, Budget(3, 4, 12))
    assert trained.policy == KVpop(Budget(3, 4, 12), scorer="mlp", heads=((4, 20), (10, 14)))
    assert trained.slots == 19
    assert load_policy(tmp_path).policy == policy
    assert load_policy(tmp_path, Budget(1, 2, 6)).policy == policy
    model = load(tiny_model(dtype=torch.float32), tmp_path, budget=Budget(3, 4, 5))
    budgets = [layer.budget for layer in attached_policies(model)]
    assert [budget.longs(2) for budget in budgets] == [(2, 8), (4, 6)]  # 1.67, 8.33, 4.17, 5.83
    with pytest.raises(ValueError, match="mean over all heads"):
        trained.with_budget(Budget(1, 2, 4, (1, 4)))


def test_the_card_states_the_budgets_of_unequal_heads(tmp_path: Path) -> None:
    policy = KVpop(Budget(1, 2, 6), scorer="mlp", heads=((2, 10), (5, 7)))
    save_adapter(trained_model(policy), policy, tmp_path, model_id="owner/tiny")
    card = model_card(tmp_path, "me/mine")
    assert "9 slots per KV head" in card
    assert "budgets by head: from 2 to 10, mean 6." in card
    assert "| slots per KV head, on average | 9 |" in card
    budgets = [Budget(1, 2, 10, (2, 10)), Budget(1, 2, 7, (5, 7))]
    size = cache_bytes(budgets, layers=2, kv_heads=2, head_dim=8, element_size=2)
    assert f"| whole cache of one sequence, MB | {size / 1e6:,.4g} |" in card
    plain = KVpop(Budget(1, 2, 6), scorer="mlp")
    save_adapter(trained_model(plain), plain, tmp_path / "plain", model_id="owner/tiny")
    assert "by head" not in model_card(tmp_path / "plain", "me/mine")
    assert "| slots per KV head | 9 |" in model_card(tmp_path / "plain", "me/mine")


def test_settings_are_plain_json_and_missing_ones_get_their_defaults() -> None:
    for policy in POLICIES.values():
        settings = json.loads(json.dumps(settings_of(policy)))
        assert policy_from(settings, "here") == policy
    assert policy_from({"name": "dms", "window": 4, "ratio": 2}, "here") == DMS(4, 2)
    with pytest.raises(AdapterError, match="here: the policy has no window, ratio"):
        policy_from({"name": "dms"}, "here")
    with pytest.raises(AdapterError, match=r"here: DMS\.window must be at least 1, got 0"):
        policy_from({"name": "dms", "window": 0, "ratio": 2}, "here")
    with pytest.raises(AdapterError, match="here: positions must be 'original' or 'cache', got 'x'"):
        policy_from({"name": "streaming", "budget": {"sinks": 0, "window": 1, "long": 0}, "positions": "x"}, "here")
    with pytest.raises(ValueError, match="Random cannot be saved: adapters hold one of kvpop, streaming, dms"):
        settings_of(Random(BUDGET))


def test_a_policy_without_a_budget_refuses_one(tmp_path: Path) -> None:
    policy = POLICIES["dms"]
    save_adapter(trained_model(policy), policy, tmp_path, model_id="tiny")
    for call in (lambda: load_policy(tmp_path, BUDGET), lambda: load(tiny_model(), tmp_path, layers={0: BUDGET})):
        with pytest.raises(ValueError, match="dms has no budget to change to"):
            call()


def test_saving_without_a_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to save: kvpop-mlp is not attached"):
        save_adapter(tiny_model(), KVpop(BUDGET, scorer="mlp"), tmp_path / "x", model_id="tiny")
    assert not (tmp_path / "x").exists()


def sharded(directory: Path, policy: Policy, seed: int = 5):
    model = trained_model(policy, seed=seed)
    save_adapter(model, policy, directory, model_id="tiny", with_base=True, trained_from="0" * 16, shard_bytes=10_000)
    return model


def test_big_weights_are_written_in_shards_and_read_back_bit_equal(tmp_path: Path) -> None:
    model = sharded(tmp_path, Streaming(BUDGET))
    files = adapter_files(tmp_path)
    shards = [name for name in files if name.startswith("base-")]
    assert len(shards) > 2
    assert sorted(files) == sorted([CONFIG, BASE_INDEX, *shards])
    assert max((tmp_path / name).stat().st_size for name in shards) < 12_000
    assert read_config(tmp_path)["base_weights"] == BASE_INDEX
    assert read_config(tmp_path)["model"]["weights"] == "0" * 16
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # all weights are replaced: which ones were there does not matter
        again = load(tiny_model(dtype=torch.float32), tmp_path)
    assert all(torch.equal(t, base_tensors(model)[n]) for n, t in base_tensors(again).items())
    found = changed_weights(tiny_model(dtype=torch.float32), tmp_path)
    assert found.keys() == base_tensors(model).keys()


def edit_index(directory: Path, change) -> None:
    index = json.loads((directory / BASE_INDEX).read_text())
    change(index)
    (directory / BASE_INDEX).write_text(json.dumps(index))


NORM = "model.norm.weight"
BROKEN_SHARDS = {
    "shard gone": (lambda d: min(d.glob("base-*")).unlink(), "has no base-00001-of-"),
    "shard cut off": (lambda d: min(d.glob("base-*")).write_bytes(b"12345678901"), "base-00001-of-.* cannot be read"),
    "index gone": (lambda d: (d / BASE_INDEX).unlink(), f"has no {BASE_INDEX}"),
    "index broken": (lambda d: (d / BASE_INDEX).write_text("{"), "is no index of weights: JSONDecodeError"),
    "index empty": (lambda d: (d / BASE_INDEX).write_text("{}"), "is no index of weights: KeyError 'weight_map'"),
    "tensor not in the index": (
        lambda d: edit_index(d, lambda i: i["weight_map"].pop(NORM)),
        rf"does not hold .*{NORM}",
    ),
    "tensor not in its shard": (
        lambda d: edit_tensors(d, lambda t: t.pop(next(iter(t))), sorted(d.glob("base-*"))[1].name),
        "base-00002-of-.* does not hold what base.safetensors.index.json says",
    ),
    "another directory": (
        lambda d: edit_index(d, lambda i: i["weight_map"].update({NORM: "../x.safetensors"})),
        r"names files outside its directory: \['../x.safetensors'\]",
    ),
}


@pytest.mark.parametrize("case", BROKEN_SHARDS)
def test_shards_that_cannot_be_used_say_why_and_the_model_stays_as_it_was(case: str, tmp_path: Path) -> None:
    sharded(tmp_path, Streaming(BUDGET))
    damage, message = BROKEN_SHARDS[case]
    damage(tmp_path)
    model = tiny_model(dtype=torch.float32)
    with pytest.raises(AdapterError, match=message):
        load(model, tmp_path)
    assert attached_policies(model) == []
    assert base_fingerprint(model) == base_fingerprint(tiny_model(dtype=torch.float32))


def test_a_fingerprint_is_of_the_weights_and_not_of_how_they_were_loaded() -> None:
    model = tiny_model(dtype=torch.float32)
    own = base_fingerprint(model)
    assert own == base_fingerprint(tiny_model(dtype=torch.float32).bfloat16())
    assert own == base_fingerprint(attach(tiny_model(dtype=torch.float32), KVpop(BUDGET)))
    assert own != base_fingerprint(tiny_model(seed=1, dtype=torch.float32))
    tensors = base_tensors(model)
    assert fingerprint(tensors) != fingerprint(base_tensors(tiny_model(dtype=torch.float32).bfloat16()))
    with torch.device("meta"):
        assert base_fingerprint(torch.nn.Linear(2, 2)) is None


def test_scorers_warn_about_another_base_and_say_nothing_about_their_own(saved: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(tiny_model(dtype=torch.float32), saved)
        load(tiny_model(dtype=torch.float32).bfloat16(), saved)
    other = tiny_model(seed=1, dtype=torch.float32)
    here, there = base_fingerprint(other), read_config(saved)["model"]["weights"]
    with pytest.warns(UserWarning, match=f"trained on tiny with weights {there}, this model has weights {here}"):
        load(other, saved)
    edit_config(saved, lambda c: c["model"].pop("weights"))  # an adapter from before there were any
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(other, saved)


@pytest.fixture
def stand_in(saved: Path, monkeypatch):
    """The hub: "owner/adapter" is there, nothing else is."""
    calls = []

    def snapshot_download(repo_id, *, revision=None, allow_patterns=None):
        calls.append((repo_id, revision, allow_patterns))
        if repo_id != "owner/adapter":
            raise OSError(f"404 Client Error: no {repo_id}\nand more")
        return str(saved)

    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_hub_name_is_downloaded_with_only_the_files_of_an_adapter(saved: Path, stand_in, monkeypatch) -> None:
    model = load(tiny_model(dtype=torch.float32), "owner/adapter", revision="v2")
    assert len(attached_policies(model)) == 2
    assert load_policy("owner/adapter").policy == load_policy(saved).policy
    (name, revision, patterns), second = stand_in
    assert (name, revision, second[1]) == ("owner/adapter", "v2", None)
    assert {CONFIG, SCORERS, BASE, BASE_INDEX, "adapter_config.json", "adapter_model.safetensors"} < set(patterns)
    assert not [pattern for pattern in patterns if "state" in pattern]
    with pytest.raises(
        FileNotFoundError,
        match=r"owner/none is not a kvpop adapter: there is no such directory, and .* at revision v1 "
        r"\(OSError: 404 Client Error: no owner/none\)",
    ):
        adapter_directory("owner/none", "v1")


def test_what_can_only_be_a_path_never_asks_the_hub(saved: Path, stand_in, monkeypatch) -> None:
    for path in ("nope", "./nope/x", "/nope/x", "~/nope", "nope/a/b", "nope/", Path("owner/adapter")):
        with pytest.raises(FileNotFoundError, match="is not a kvpop adapter: there is no such directory"):
            adapter_directory(path)
    monkeypatch.chdir(saved.parent.parent)
    assert adapter_directory(f"{saved.parent.name}/{saved.name}") == Path(saved.parent.name, saved.name)
    assert stand_in == []
    with pytest.raises(ValueError, match="is a directory: revision 'main' is for names on the hub"):
        adapter_directory(saved, "main")


def test_the_package_carries_adapters_by_name(saved: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(hub, "files", lambda package: tmp_path / package)
    with pytest.raises(FileNotFoundError, match="carries no adapters called 'smollm2'; there are: none"):
        pretrained()
    for name in ("smollm2-135m", "qwen-a", "qwen-b"):
        folder = tmp_path / "kvpop" / "pretrained" / name
        folder.mkdir(parents=True)
        for file in saved.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    assert pretrained().name == "smollm2-135m"
    assert adapter_directory("kvpop:qwen-b").name == "qwen-b"
    assert len(attached_policies(load(tiny_model(dtype=torch.float32), "kvpop:smollm2"))) == 2
    with pytest.raises(
        FileNotFoundError, match="carries 2 adapters called 'qwen'; there are: qwen-a, qwen-b, smollm2-135m"
    ):
        pretrained("qwen")
    with pytest.raises(FileNotFoundError, match="carries no adapters called 'llama'"):
        adapter_directory("kvpop:llama")

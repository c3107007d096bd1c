"""Case 5: another budget, another policy, or no bound at all, layer by layer; exact all the same, and honest about bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvpop.adapter import AdapterError, load, save_adapter
from kvpop.attachment import attach, attached_policies
from kvpop.budget import Budget, cache_bytes, dense_bytes
from kvpop.cache import BoundedCache
from kvpop.policies import ByLayer, Dense, KVpop, Policy, Random, RankedLayer, Streaming
from tests.test_cache import SMALL, close, feed, model_with, pieces, reference, text
from tests.tiny import SIZES, held_by_mask, tiny_model

MIXES: dict[str, Policy] = {
    "budgets": ByLayer(KVpop(SMALL), {1: KVpop(Budget(1, 7, 9))}),
    "first layer dense": ByLayer.dense_first(KVpop(SMALL), 1),
    "policies": ByLayer(Streaming(Budget(1, 3, 0)), {0: Random(SMALL, seed=1, decay=-1e-2)}),
}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("chunk", [1, 7, 60])
def test_case_5_budgets_by_layer_are_exact(mix: str, chunk: int) -> None:
    model, ids = model_with(MIXES[mix]), text(2, 60)
    expected, expiry = reference(model, ids)
    cache = BoundedCache(model)
    close(feed(model, cache, ids, pieces(60, chunk)), expected)
    assert cache.held_positions() == held_by_mask(expiry, 59)


@pytest.mark.parametrize("mix", MIXES)
def test_case_5_a_padded_row_is_the_row_alone(mix: str) -> None:
    model, ids = model_with(MIXES[mix]), text(1, 40)
    both = torch.cat([torch.cat([torch.zeros(1, 9, dtype=torch.long), ids[:, :31]], 1), ids])
    mask = torch.ones_like(both)
    mask[0, :9] = 0
    options = dict(max_new_tokens=30, min_new_tokens=30, do_sample=False)
    out = model.generate(both, attention_mask=mask, **options)
    alone = model.generate(ids[:, :31], **options)
    assert out[0, 40:].tolist() == alone[0, 31:].tolist()


def test_bytes_are_the_sum_of_what_each_layer_says() -> None:
    first, second = SMALL, Budget(1, 7, 9)
    model = model_with(ByLayer(KVpop(first), {1: KVpop(second, scorer="mlp")}), dtype=torch.float32)
    cache = BoundedCache(model)
    feed(model, cache, text(2, 50))
    state = attached_policies(model)[0].scorer.state_bytes()
    shape = dict(layers=1, kv_heads=2, head_dim=8, element_size=4, rows=2)
    expected = [cache_bytes(first, **shape, state_bytes=state), cache_bytes(second, **shape)]
    assert [layer["bytes"] for layer in cache.report()] == expected
    assert cache.nbytes() == sum(expected)
    assert [layer["slots"] for layer in cache.report()] == [10, 17]


def test_a_dense_layer_says_that_it_grows() -> None:
    policy = ByLayer.dense_first(KVpop(SMALL), 1)
    assert policy.slots is None
    model = model_with(policy, dtype=torch.float32)
    cache = BoundedCache(model)
    grown = []
    for _ in range(2):
        feed(model, cache, text(1, 50))
        dense, bounded = cache.report()
        assert (dense["policy"], dense["slots"], bounded["policy"], bounded["slots"]) == (
            "dense",
            None,
            "kvpop-mlp+mlstm",
            10,
        )
        assert dense["bytes"] > dense_bytes(len(grown) * 50, layers=1, kv_heads=2, head_dim=8, element_size=4)
        grown.append((dense["bytes"], bounded["bytes"]))
    assert grown[1][0] > grown[0][0]
    assert grown[1][1] == grown[0][1]
    assert not cache.is_compileable


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_the_model_does_not_have_is_refused(layer: int) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match=f"given for layer {layer}, but the model's layers are 0 to 1"):
        attach(model, ByLayer(KVpop(SMALL), {layer: Dense()}))
    assert not attached_policies(model)
    with pytest.raises(ValueError, match="at least 0, got -1"):
        ByLayer.dense_first(KVpop(SMALL), -1)


def test_a_trained_policy_takes_budgets_by_layer(tmp_path: Path) -> None:
    model = model_with(KVpop(SMALL))
    save_adapter(model, KVpop(SMALL), tmp_path, model_id="tiny")
    wider = Budget(1, 7, 9)
    again = load(tiny_model(), tmp_path, layers={0: wider})
    budgets = [policy.budget for policy in attached_policies(again) if isinstance(policy, RankedLayer)]
    assert budgets == [wider, SMALL]
    for own, other in zip(attached_policies(model), attached_policies(again)):
        assert all(torch.equal(a, b) for a, b in zip(own.state_dict().values(), other.state_dict().values()))
    cache = BoundedCache(load(tiny_model(), tmp_path, layers={0: Dense()}))
    assert [layer.policy.bounded for layer in cache.bounded_layers] == [False, True]
    plain = tiny_model()
    with pytest.raises((AdapterError, ValueError), match="layers are 0 to 1"):
        load(plain, tmp_path, layers={5: Dense()})


def test_a_layer_with_a_window_of_its_own_takes_no_policy() -> None:
    sizes = dict(SIZES, num_key_value_heads=2, num_attention_heads=4)
    kinds = ["sliding_attention", "full_attention"]
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, use_sliding_window=True, sliding_window=8, layer_types=kinds))
    with pytest.raises(ValueError, match="given for layer 0, which keeps the model's own sliding_attention"):
        attach(model, ByLayer.dense_first(KVpop(SMALL), 1))
    cache = BoundedCache(attach(model, ByLayer(KVpop(SMALL), {1: Random(SMALL)})))
    feed(model, cache, text(1, 20))
    assert [layer["policy"] for layer in cache.report()] == ["window", "random"]

"""Attach and detach: nothing is left behind, ``generate`` runs on the bounded cache, the rest is refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    StaticCache,
)

from kvpop.attachment import IMPLEMENTATION, attach, attached_policies, attention_modules, cache_argument, detach
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.policies import Dense, KVpop, LayerShape, Oracle, RankedLayer, Streaming, policy_by_name
from tests.tiny import SIZES, VOCAB, expiries, tiny_model

BUDGET = Budget(1, 3, 4)
FAMILIES = [("llama", 2, 2), ("qwen3", 2, 2), ("llama", 2, 1), ("qwen3", 1, 3)]


def prompt(rows: int = 1, length: int = 20, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(model: PreTrainedModel, ids: torch.Tensor, **options) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **options).logits


def cached(model: PreTrainedModel, cache: object) -> dict[str, object]:
    return {cache_argument(model): cache}


def generated(model: PreTrainedModel, ids: torch.Tensor, new: int = 20, **options):
    return model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **options)


@pytest.mark.parametrize("sizes", FAMILIES)
def test_detach_leaves_the_model_as_it_was(sizes: tuple[str, int, int]) -> None:
    model = tiny_model(sizes[0], kv_heads=sizes[1], groups=sizes[2])
    ids = prompt(2)
    keys, weights = list(model.state_dict()), copy.deepcopy(model.state_dict())
    implementation, attributes = model.config._attn_implementation, set(vars(model))
    before, text, config = logits(model, ids), generated(model, ids), model.config.to_dict()
    attach(model, KVpop(BUDGET))
    assert model.config._attn_implementation == IMPLEMENTATION
    assert not torch.equal(logits(model, ids), before)
    generated(model, ids)
    assert detach(model) is model
    assert list(model.state_dict()) == keys
    assert all(torch.equal(model.state_dict()[key], weights[key]) for key in keys)
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == config
    assert set(vars(model)) == attributes
    assert torch.equal(logits(model, ids), before)
    assert torch.equal(generated(model, ids), text)
    assert attached_policies(model) == []
    detach(model)  # and once more does nothing


def test_attaching_again_replaces() -> None:
    model, ids = tiny_model(), prompt()
    implementation = model.config._attn_implementation
    attach(model, KVpop(Budget(0, 2, 0)))
    attach(model, Streaming(BUDGET))
    assert all(policy.budget == BUDGET for policy in attached_policies(model))
    assert torch.equal(logits(model, ids), logits(attach(tiny_model(), Streaming(BUDGET)), ids))
    detach(model)
    assert model.config._attn_implementation == implementation
    assert torch.equal(logits(model, ids), logits(tiny_model(), ids))


@pytest.mark.parametrize("sizes", FAMILIES)
def test_every_shape_of_heads_is_read_from_the_model(sizes: tuple[str, int, int]) -> None:
    family, kv_heads, groups = sizes
    model = attach(tiny_model(family, kv_heads=kv_heads, groups=groups), KVpop(BUDGET))
    for i, policy in enumerate(attached_policies(model)):
        assert (policy.shape.layer, policy.shape.kv_heads, policy.shape.heads) == (i, kv_heads, kv_heads * groups)
        assert policy.shape.head_dim == 8
    ids = prompt(2)
    _, found = expiries(model, ids)
    assert [e.shape for e in found] == [(2, kv_heads, 20)] * 2
    assert torch.equal(generated(model, ids), generated(model, ids, use_cache=False))


def test_the_rotary_embedding_handed_to_policies_is_the_models() -> None:
    model = attach(tiny_model(), Streaming(BUDGET, positions="cache"))
    cos, sin = attached_policies(model)[0].shape.rotary(torch.tensor([[0, 1, 5]]))
    assert cos.shape == sin.shape == (1, 3, 8)
    angle = torch.tensor([[0.0], [1.0], [5.0]]) * 10000.0 ** (-torch.arange(4) / 4)
    torch.testing.assert_close(cos[0], torch.cat([angle, angle], -1).cos().to(cos.dtype), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin[0], torch.cat([angle, angle], -1).sin().to(sin.dtype), rtol=1e-5, atol=1e-5)


def test_scorers_are_children_of_the_attention_modules() -> None:
    model = attach(tiny_model(dtype=torch.float32), KVpop(BUDGET))
    added = set(model.state_dict()) - set(tiny_model().state_dict())
    for i, module in enumerate(attention_modules(model)):
        assert isinstance(module.kvpop, RankedLayer)
        assert module.kvpop in list(module.children())
        inside = {f"model.layers.{i}.self_attn.kvpop.{name}" for name in module.kvpop.state_dict()}
        assert inside <= added
        assert any(name.endswith("decay.alpha") for name in inside)
        added -= inside
    assert not added
    model.to(torch.float64)
    assert all(p.dtype == torch.float64 for policy in attached_policies(model) for p in policy.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scorers_are_float32_unless_the_model_is_wider(dtype: torch.dtype) -> None:
    model = attach(tiny_model(dtype=dtype), KVpop(BUDGET))
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert {p.dtype for policy in attached_policies(model) for p in policy.parameters()} == {expected}
    out = generated(model, prompt(), return_dict_in_generate=True)
    assert getattr(out, cache_argument(model)).stores[0].keys.dtype == dtype


@pytest.mark.parametrize("name", ["kvpop", "streaming", "streaming-cache", "random", "dense"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_plain_generate_runs_on_the_bounded_cache(family: str, name: str) -> None:
    model = attach(tiny_model(family), KVpop(BUDGET) if name == "kvpop" else policy_by_name(name, BUDGET))
    ids = prompt(2)
    out = generated(model, ids, new=30, return_dict_in_generate=True)
    cache = getattr(out, cache_argument(model))
    assert isinstance(cache, BoundedCache)
    assert cache.tokens_seen() == [49, 49]
    assert cache.rows_held() == (49 if name == "dense" else BUDGET.slots)
    manual, tokens, text = BoundedCache(model), ids, ids
    for _ in range(30):
        last = logits(model, tokens, use_cache=True, **cached(model, manual))[:, -1]
        tokens = last.argmax(-1, keepdim=True)
        text = torch.cat([text, tokens], dim=1)
    assert torch.equal(out.sequences, text)
    assert manual.held_positions() == cache.held_positions()
    assert torch.equal(text, generated(model, ids, new=30, use_cache=False))


def test_generate_with_left_padding_equals_each_row_alone() -> None:
    model, rows = attach(tiny_model(), KVpop(BUDGET)), [prompt(1, 7, 1), prompt(1, 18, 2)]
    ids, mask = torch.zeros(2, 18, dtype=torch.long), torch.zeros(2, 18, dtype=torch.long)
    ids[0, 11:], mask[0, 11:], ids[1], mask[1] = rows[0], 1, rows[1], 1
    together = generated(model, ids, new=24, attention_mask=mask)
    for i, row in enumerate(rows):
        assert torch.equal(together[i, 18:], generated(model, row, new=24)[0, row.shape[1] :])


def test_beam_search_equals_beam_search_without_a_cache() -> None:
    model, ids = attach(tiny_model(), KVpop(BUDGET)), prompt(2)
    with_cache, without = (generated(model, ids, num_beams=3, use_cache=flag) for flag in (True, False))
    assert torch.equal(with_cache, without)


def test_chunked_prefill_by_generate() -> None:
    model, ids = attach(tiny_model(), KVpop(BUDGET)), prompt(2)
    assert torch.equal(generated(model, ids, prefill_chunk_size=6), generated(model, ids))


def test_a_second_turn_through_generate() -> None:
    model, ids = attach(tiny_model(), KVpop(BUDGET)), prompt()
    first = generated(model, ids, return_dict_in_generate=True)
    second = torch.cat([first.sequences, prompt(1, 9, 5)], dim=1)
    cache = getattr(first, cache_argument(model))
    assert torch.equal(
        generated(model, second, **cached(model, cache)), generated(model, second, use_cache=False)
    )  # fmt: skip


def test_a_stock_cache_is_refused() -> None:
    model, ids = attach(tiny_model(), KVpop(BUDGET)), prompt()
    with pytest.raises(ValueError, match=r"must be a kvpop\.BoundedCache"):
        generated(model, ids, **cached(model, DynamicCache()))
    with pytest.raises(ValueError, match=r"must be a kvpop\.BoundedCache"):
        generated(model, ids, **cached(model, StaticCache(config=model.config, max_cache_len=64)))


@pytest.mark.parametrize("kind", ["static", "dynamic", "offloaded"])
def test_another_cache_implementation_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"cache_implementation='{kind}' cannot be used"):
        generated(attach(tiny_model(), KVpop(BUDGET)), prompt(), cache_implementation=kind)


def test_a_four_dimensional_mask_is_refused() -> None:
    model, ids = attach(tiny_model(), KVpop(BUDGET)), prompt()
    with pytest.raises(ValueError, match=r"2-D padding mask, got shape \(1, 1, 20, 20\)"):
        logits(model, ids, attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.float64), use_cache=False)


def test_an_observer_together_with_a_bounded_cache_is_refused() -> None:
    from kvpop.documents import Documents
    from kvpop.policies import SequencePass

    model, ids = attach(tiny_model(), KVpop(BUDGET)), prompt()
    with pytest.raises(ValueError, match="use_cache=False"):
        logits(model, ids, kvpop=SequencePass(Documents.single(1, 20)), **cached(model, BoundedCache(model)))


def test_attention_dropout_is_refused() -> None:
    model = attach(tiny_model(), KVpop(BUDGET)).train()
    for module in attention_modules(model):
        module.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout is 0\.1"):
        model(prompt(), use_cache=False)


def tiny_mistral(sliding_window: int | None) -> PreTrainedModel:
    sizes = dict(SIZES, num_key_value_heads=2, num_attention_heads=4)
    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=sliding_window)).double().eval()


def test_mistral_runs_without_and_never_with_a_sliding_window() -> None:
    model = attach(tiny_mistral(None), KVpop(BUDGET))
    assert torch.equal(generated(model, prompt()), generated(model, prompt(), use_cache=False))
    with pytest.raises(ValueError, match="sliding"):
        logits(attach(tiny_mistral(8), KVpop(BUDGET)), prompt())


def test_a_model_whose_config_has_a_sliding_window_is_refused_at_attach() -> None:
    with pytest.raises(
        ValueError, match=r"all layers of MistralForCausalLM are sliding_attention \(sliding_window 8\)"
    ):
        attach(tiny_mistral(8), Streaming(BUDGET))


def test_a_module_without_attention_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no attention modules"):
        attach(torch.nn.Linear(2, 2), Streaming(BUDGET))
    with pytest.raises(ValueError, match="no policy attached"):
        BoundedCache(tiny_model())


def test_an_oracle_cannot_generate() -> None:
    model = attach(tiny_model(), Oracle(BUDGET))
    assert torch.isfinite(logits(model, prompt(), use_cache=False)).all()
    with pytest.raises(ValueError, match="oracle"):
        generated(model, prompt())


def test_an_unknown_policy_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown policy 'lru': choose one of dense, streaming"):
        policy_by_name("lru", BUDGET)


def test_a_copy_of_an_attached_model_is_on_its_own() -> None:
    model = attach(tiny_model(), KVpop(BUDGET))
    clone = copy.deepcopy(model)
    out = generated(clone, prompt(), return_dict_in_generate=True)
    cache = getattr(out, cache_argument(clone))
    assert [layer.policy for layer in cache.layers] == attached_policies(clone)
    detach(clone)
    assert torch.equal(out.sequences, generated(model, prompt()))
    assert torch.equal(generated(clone, prompt()), generated(tiny_model(), prompt()))


class FailsAtLayerOne(Streaming):
    def layer(self, shape: LayerShape):
        if shape.layer == 1:
            raise ValueError("no such layer")
        return super().layer(shape)


def test_a_failed_attach_leaves_no_half_of_a_policy() -> None:
    model = tiny_model()
    keys = list(model.state_dict())
    with pytest.raises(ValueError, match="no such layer"):
        attach(model, FailsAtLayerOne(BUDGET))
    assert list(model.state_dict()) == keys


def test_a_model_that_shares_its_config_object_is_refused_not_wrong() -> None:
    model = tiny_model()
    other = LlamaForCausalLM(model.config).double().eval()
    attach(model, Dense())
    with pytest.raises(ValueError, match="shares its config"):
        logits(other, prompt())


def test_packing_by_position_ids_is_honoured() -> None:
    """The stock model isolates documents when position_ids start anew."""
    model, ids = tiny_model(), prompt()
    positions = torch.cat([torch.arange(10), torch.arange(10)])[None]
    expected = logits(model, ids, position_ids=positions, use_cache=False)
    attach(model, Dense())
    torch.testing.assert_close(logits(model, ids, position_ids=positions, use_cache=False), expected)


def test_a_part_of_an_attached_model_and_the_whole_are_not_both_attached() -> None:
    model = tiny_model()
    previous = model.config._attn_implementation
    attach(model.model, Streaming(BUDGET))
    with pytest.raises(ValueError, match="shares its config with one that has a kvpop policy attached"):
        attach(model, Streaming(BUDGET))
    detach(model.model)
    assert model.config._attn_implementation == previous
    detach(attach(model, Streaming(BUDGET)))
    assert model.config._attn_implementation == previous

"""Model families through the one seam: what fits is exact, what does not is refused by name before anything changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedModel

from kvpop.attachment import IMPLEMENTATION, attach, attached_policies, attention_modules, cache_argument, detach
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.documents import Documents
from kvpop.policies import KVpop, LayerView, SequencePass, Streaming
from kvpop.policies.window import WindowLayer
from tests.test_attach import generated, logits, prompt
from tests.test_invariant import shake
from tests.tiny import SIZES, VOCAB, dense_masks, family_model, masked_reference, randomise

SMALL, LONG = Budget(1, 3, 4), Budget(2, 8, 40)
WINDOW = 5
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0] * 4}
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


def mixed(layers: int = 2) -> dict[str, object]:
    """Options for sliding layers, the last one full."""
    return dict(layer_types=["sliding_attention"] * (layers - 1) + ["full_attention"], sliding_window=WINDOW)


FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {}),
    "llama, biases, one KV head, wide heads": ("Llama", dict(attention_bias=True, num_key_value_heads=1, head_dim=12)),
    "qwen2": ("Qwen2", {}),
    "qwen2, sliding layers": ("Qwen2", dict(mixed(), use_sliding_window=True)),
    "qwen3": ("Qwen3", {}),
    "qwen3, sliding layers": ("Qwen3", dict(mixed(), use_sliding_window=True)),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "ministral, sliding layers": ("Ministral", mixed()),
    "phi3": ("Phi3", dict(hidden_size=32)),
    "phi3, partial rotary": ("Phi3", dict(hidden_size=32, partial_rotary_factor=0.5)),
    "phi3, longrope": ("Phi3", dict(hidden_size=32, rope_parameters=LONGROPE, original_max_position_embeddings=512)),
    "gemma3": ("Gemma3", dict(mixed(), config="Gemma3TextConfig")),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "olmo2": ("Olmo2", dict(hidden_size=32)),
    "granite": ("Granite", dict(attention_multiplier=0.3, residual_multiplier=0.7, logits_scaling=2.0)),
    "smollm3": ("SmolLM3", dict(no_rope_layers=[1, 0])),
    "gemma4": ("Gemma4", dict(
        mixed(), config="Gemma4TextConfig", vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8,
        num_kv_shared_layers=0, global_head_dim=16, num_global_key_value_heads=1)),
}  # fmt: skip
MORE: dict[str, tuple[str, dict[str, object]]] = {
    "phi (partial rotary, biases)": ("Phi", dict(hidden_size=32)),
    "gemma": ("Gemma", dict(num_key_value_heads=1)),
    "mixtral": ("Mixtral", dict(EXPERTS, sliding_window=None)),
    "qwen2-moe": ("Qwen2Moe", dict(EXPERTS, shared_expert_intermediate_size=16)),
    "olmo": ("Olmo", dict(hidden_size=32, clip_qkv=1.5)),
    "olmo3": ("Olmo3", dict(mixed(), hidden_size=32)),
    "olmoe": ("Olmoe", dict(EXPERTS, hidden_size=32)),
    "cohere": ("Cohere", dict(hidden_size=32, use_qk_norm=True)),
    "cohere2": ("Cohere2", dict(mixed(), hidden_size=32)),
    "exaone4": ("Exaone4", mixed()),
    "stablelm": ("StableLm", dict(hidden_size=32)),
    "glm4": ("Glm4", {}),
    "starcoder2": ("Starcoder2", dict(hidden_size=32)),
    "nemotron": ("Nemotron", dict(hidden_size=32)),
    "helium": ("Helium", dict(hidden_size=32)),
    "seed-oss": ("SeedOss", {}),
    "apertus": ("Apertus", dict(hidden_size=32)),
    "arcee": ("Arcee", {}),
    "ernie4.5": ("Ernie4_5", {}),
    "hunyuan": ("HunYuanDenseV1", {}),
    "gpt-bigcode (one KV head)": ("GPTBigCode", dict(n_embd=32, n_layer=2, n_head=4, n_inner=48, n_positions=256)),
}
ALL = FAMILIES | MORE


def build(name: str, **more: object) -> PreTrainedModel:
    family, options = ALL[name]
    if not hasattr(transformers, f"{family}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return family_model(family, **options, **more)


def attached(name: str, budget: Budget = SMALL, **more: object) -> PreTrainedModel:
    model = attach(build(name, **more), KVpop(budget))
    shake(model, 1)
    return model


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def steps(model: PreTrainedModel, ids: Tensor, first: int, **options: Tensor):
    """Logits of a prompt of ``first`` tokens, then of one token at a time; yields (tokens taken in, logits, cache)."""
    cache, start = BoundedCache(model), 0
    for stop in range(first, ids.shape[1] + 1):
        out = model(ids[:, start:stop], use_cache=True, **{cache_argument(model): cache})
        yield stop, out.logits, cache
        start = stop


def observed(model: PreTrainedModel, ids: Tensor) -> dict[int, Tensor]:
    """The expiry of every layer that a policy bounds; a layer with the model's own window is not observed."""
    found: dict[int, Tensor] = {}

    def observe(view: LayerView) -> None:
        found[view.layer] = view.expiry

    logits(model, ids, use_cache=False, kvpop=SequencePass(Documents.single(*ids.shape), observe=observe))
    return found


def own_window(model: PreTrainedModel) -> set[int]:
    return {p.shape.layer for p in attached_policies(model) if isinstance(p, WindowLayer)}


@pytest.mark.parametrize("name", FAMILIES)
def test_held_sets_and_logits_are_those_of_the_training_mask(name: str) -> None:
    """In float64, across the first eviction; sliding layers are left to the model's own attention in the reference."""
    model, ids = attached(name), prompt(2, 24)
    found, sliding = observed(model, ids), own_window(model)
    layers = len(attention_modules(model))
    assert set(found) | sliding == set(range(layers))
    assert not set(found) & sliding
    masks = [dense_masks([found[i]])[0] if i in found else None for i in range(layers)]
    expected = masked_reference(model, ids, masks)
    close(logits(model, ids, use_cache=False), expected)
    for seen, out, cache in steps(model, ids, 6):
        close(out, expected[:, seen - out.shape[1] : seen])
        held, q = cache.held_positions(), seen - 1
        for i in range(layers):
            for row in range(2):
                for head, positions in enumerate(held[i][row]):
                    if i in sliding:
                        assert positions == list(range(max(0, seen - WINDOW), seen))
                    else:
                        assert positions == [t for t in range(seen) if q < found[i][row, head, t]]
                        assert len(positions) == min(seen, SMALL.slots)


@pytest.mark.parametrize("name", ALL)
def test_a_budget_longer_than_the_text_is_the_plain_model(name: str) -> None:
    model, ids = build(name), prompt(2, 24)
    plain, text = logits(model, ids, use_cache=False), generated(model, ids[:, :9], 16)
    early = logits(model, ids.roll(1, 1), use_cache=False)[:, -1] - plain[:, -1]
    assert early.abs().max() > 1e-3  # the model does look at what comes before
    attach(model, KVpop(LONG))
    close(logits(model, ids, use_cache=False), plain)
    close(torch.cat([out for _, out, _ in steps(model, ids, 9)], dim=1), plain)
    assert torch.equal(generated(model, ids[:, :9], 16), text)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_left_padded_batch_is_each_row_alone(name: str) -> None:
    model, rows = attached(name), [prompt(1, 7, 1), prompt(1, 12, 2)]
    ids, mask = torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 12, dtype=torch.long)
    ids[0, 5:], mask[0, 5:], ids[1], mask[1] = rows[0], 1, rows[1], 1
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    for options in (dict(use_cache=False), {cache_argument(model): BoundedCache(model)}):
        together = logits(model, ids, attention_mask=mask, position_ids=position_ids, **options)
        for i, row in enumerate(rows):
            close(together[i, 12 - row.shape[1] :], logits(model, row, use_cache=False)[0])
    together = generated(model, ids, 14, attention_mask=mask)
    for i, row in enumerate(rows):
        assert torch.equal(together[i, 12:], generated(model, row, 14)[0, row.shape[1] :])


@pytest.mark.parametrize("name", FAMILIES)
def test_detach_restores_every_family(name: str) -> None:
    model, ids = build(name), prompt(2, 20)
    before, keys, attributes = logits(model, ids), list(model.state_dict()), set(vars(model))
    implementation = model.config._attn_implementation
    attach(model, KVpop(SMALL))
    assert model.config._attn_implementation == IMPLEMENTATION
    assert not torch.equal(logits(model, ids), before)
    detach(model)
    assert torch.equal(logits(model, ids), before)
    assert list(model.state_dict()) == keys
    assert (set(vars(model)), model.config._attn_implementation) == (attributes, implementation)


COMPILED_ELSEWHERE = {"llama", "qwen3"}
LIKE_ANOTHER = {"qwen2, sliding layers", "qwen3, sliding layers", "phi3", "phi3, longrope"}


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - COMPILED_ELSEWHERE - LIKE_ANOTHER))
def test_every_family_decodes_in_one_graph_equal_to_eager(name: str) -> None:
    torch._dynamo.reset()
    model, ids = attached(name, dtype=torch.float32), prompt(2, 16)
    counter = CompileCounter()
    compiled = torch.compile(model.forward, fullgraph=True, backend=counter)
    kept, fresh = BoundedCache(model), BoundedCache(model)
    for cache in (kept, fresh):
        logits(model, ids[:, :5], **{cache_argument(model): cache})
    for t in range(5, 16):
        step = dict(input_ids=ids[:, t : t + 1].clone(), position_ids=torch.full((2, 1), t))
        with torch.no_grad():
            out = compiled(**step, **{cache_argument(model): kept}).logits
            torch.testing.assert_close(out, model(**step, **{cache_argument(model): fresh}).logits)
    assert kept.held_positions() == fresh.held_positions()
    assert counter.frame_count == 1
    torch._dynamo.reset()


# Phi-3 takes everything in again where its rotary embedding changes, or where its config says it would.


def phi3(limit: int, **options: object) -> PreTrainedModel:
    return family_model("Phi3", hidden_size=32, original_max_position_embeddings=limit, **options)


def test_phi3_keeps_its_bounded_cache_past_the_original_length() -> None:
    model = attach(phi3(16), KVpop(SMALL))
    for length in (10, 20):
        ids = prompt(1, length)
        assert torch.equal(generated(model, ids, 16), generated(model, ids, 16, use_cache=False))
    detach(model)
    assert "prepare_inputs_for_generation" not in vars(model)


def test_longrope_is_exact_on_either_side_of_its_change_and_refused_across_it() -> None:
    model = attach(phi3(16, rope_parameters=LONGROPE), KVpop(SMALL))
    for length, new in ((4, 12), (17, 12)):
        ids = prompt(1, length)
        assert torch.equal(generated(model, ids, new), generated(model, ids, new, use_cache=False))
    with pytest.raises(ValueError, match=r"changes its rotary embedding at 16 tokens .* \(max_length=16\)"):
        generated(model, prompt(1, 10), 12)
    generated(model, prompt(1, 10), 12, use_cache=False)


# Models with images: the language model is bounded, the vision tower is left alone.

VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
)
TEXT = dict(SIZES, num_attention_heads=4, num_key_value_heads=2)
IMAGE = VOCAB - 1


def llava() -> PreTrainedModel:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        text_config=LlamaConfig(**TEXT), vision_config=CLIPVisionConfig(**VISION), image_token_index=IMAGE
    )
    return randomise(LlavaForConditionalGeneration(config), torch.float64)


def gemma3_with_images() -> PreTrainedModel:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = dict(TEXT, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"])
    config = Gemma3Config(text_config=text, vision_config=VISION, mm_tokens_per_image=4, image_token_index=IMAGE)
    return randomise(Gemma3ForConditionalGeneration(config), torch.float64)


def with_image() -> tuple[Tensor, Tensor]:
    ids = prompt(1, 20).clamp(max=IMAGE - 1)
    ids[:, 3:7] = IMAGE
    return ids, torch.randn(1, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_llava_sees_its_image_through_a_bounded_cache() -> None:
    model, (ids, pixels) = llava(), with_image()
    plain = logits(model, ids, pixel_values=pixels, use_cache=False)
    attach(model, KVpop(LONG))
    assert model.config.vision_config._attn_implementation != IMPLEMENTATION
    close(logits(model, ids, pixel_values=pixels, use_cache=False), plain)
    close(logits(model, ids, pixel_values=pixels, **{cache_argument(model): BoundedCache(model)}), plain)
    attach(model, KVpop(SMALL))
    text = [generated(model, ids, 16, pixel_values=pixels, use_cache=flag) for flag in (True, False)]
    assert torch.equal(*text)
    detach(model)
    assert torch.equal(logits(model, ids, pixel_values=pixels, use_cache=False), plain)


def test_gemma3_with_images_reads_text_and_refuses_an_image_whose_tokens_see_each_other() -> None:
    model, (ids, pixels) = gemma3_with_images(), with_image()
    text = prompt(1, 20).clamp(max=IMAGE - 1)
    plain = logits(model, text, use_cache=False)
    attach(model, KVpop(LONG))
    close(logits(model, text, use_cache=False), plain)
    close(torch.cat([out for _, out, _ in steps(model, text, 9)], dim=1), plain)
    with pytest.raises(ValueError, match="attention that is not causal"):
        generated(model, ids, 4, pixel_values=pixels, token_type_ids=(ids == IMAGE).long())


def test_a_model_without_a_head_can_be_attached() -> None:
    model, ids = family_model("Llama", head="Model"), prompt(1, 20)
    attach(model, KVpop(SMALL))
    cache = BoundedCache(model)
    with torch.no_grad():
        close(
            model(ids, **{cache_argument(model): cache}).last_hidden_state,
            model(ids, use_cache=False).last_hidden_state,
        )
    assert cache.rows_held() == SMALL.slots
    detach(model)
    assert not [name for name in vars(model) if "kvpop" in name or "generation" in name]


# What does not fit


def causal(family: str, **options: object) -> Callable[[], PreTrainedModel]:
    return lambda: family_model(family, **dict(dict(hidden_size=32), **options))


def falcon() -> PreTrainedModel:
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, num_attention_heads=3))


MLA = dict(
    qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, kv_lora_rank=8, q_lora_rank=8, num_key_value_heads=4, head_dim=4,
    n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1,
)  # fmt: skip
SEQ2SEQ = dict(
    d_model=32, d_ff=16, d_kv=8, num_layers=1, num_heads=2, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
)  # fmt: skip
SMALL_TEXT = dict(TEXT, attn_logit_softcapping=None, layer_types=["full_attention"] * 2)
GEMMA4 = dict(config="Gemma4TextConfig", vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8)
SPECIAL = "has no attention modules with layer_idx and num_key_value_groups: only decoders that are built like Llama"
REFUSED: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "gemma2": (causal("Gemma2"), "Gemma2ForCausalLM has attn_logit_softcapping 50.0, which kvpop does not support yet"),
    "embedding gemma": (
        causal("Gemma3", config="Gemma3TextConfig", use_bidirectional_attention=True, **mixed()),
        "use_bidirectional_attention True, which kvpop does not support",
    ),
    "mistral, sliding": (
        causal("Mistral", sliding_window=8),
        r"all layers of MistralForCausalLM are sliding_attention \(sliding_window 8\): nothing to bound",
    ),
    "phi3, sliding": (causal("Phi3", sliding_window=8), "all layers of Phi3ForCausalLM are sliding_attention"),
    "qwen3-next": (
        causal("Qwen3Next", layer_types=["linear_attention", "full_attention"], **EXPERTS,
               shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=2),
        "layer 0 of Qwen3NextForCausalLM is linear_attention: only full_attention layers can be bounded",
    ),
    "llama4": (
        causal("Llama4", config="Llama4TextConfig", num_local_experts=2, intermediate_size_mlp=16),
        "layer 0 of Llama4ForCausalLM is chunked_attention",
    ),
    "lfm2": (causal("Lfm2", full_attn_idxs=[1]), "layer 0 of Lfm2ForCausalLM is conv"),
    "deepseek-v3": (causal("DeepseekV3", **MLA), "DeepseekV3Attention has no head_dim: only attention with one key"),
    "minicpm3": (causal("MiniCPM3", **MLA), "MiniCPM3Attention has no head_dim"),
    "gpt-oss": (causal("GptOss", **EXPERTS), "layer 0 of GptOssForCausalLM has learned attention sinks"),
    "diffllama": (causal("DiffLlama"), "DiffLlamaAttention calls the attention function 2 times a layer"),
    "jetmoe": (
        causal("JetMoe", kv_channels=8, num_attention_heads=4, num_experts_per_tok=2),
        "JetMoeAttention has 4 heads in groups of 1, but 2 KV heads: it repeats keys in a way of its own",
    ),
    "dory": (
        causal("Dory", layer_types=["full_attention"] * 4, num_hidden_layers=4),
        "DoryForCausalLM runs its layers 2 times a token",
    ),
    "hrm": (causal("HrmText"), r"HrmTextForCausalLM has \d+ layers, but attention modules for layers"),
    "gemma4, shared keys": (
        causal("Gemma4", **GEMMA4, num_kv_shared_layers=1, sliding_window=WINDOW,
               num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "full_attention"]),
        "layer 2 of Gemma4ForCausalLM reads the keys of another layer",
    ),
    "bart": (
        lambda: family_model("Bart", head="ForConditionalGeneration", **SEQ2SEQ),
        f"BartForConditionalGeneration {SPECIAL}",
    ),
    "t5": (
        lambda: family_model("T5", head="ForConditionalGeneration", **SEQ2SEQ), f"T5ForConditionalGeneration {SPECIAL}"
    ),
    "t5gemma": (
        lambda: family_model("T5Gemma", head="ForConditionalGeneration", encoder=SMALL_TEXT, decoder=SMALL_TEXT),
        "T5GemmaForConditionalGeneration is an encoder-decoder: only decoders can be bounded",
    ),
    "gpt2": (lambda: family_model("GPT2", head="LMHeadModel", n_embd=32, n_layer=2, n_head=4), f"GPT2LMHeadModel {SPECIAL}"),
    "opt": (causal("OPT", ffn_dim=16, word_embed_proj_dim=32), f"OPTForCausalLM {SPECIAL}"),
    "gpt-neox": (causal("GPTNeoX"), f"GPTNeoXForCausalLM {SPECIAL}"),
    "falcon": (falcon, f"FalconForCausalLM {SPECIAL}"),
    "bloom": (causal("Bloom", n_layer=2, n_head=4), f"BloomForCausalLM {SPECIAL}"),
    "mamba": (causal("Mamba"), f"MambaForCausalLM {SPECIAL}"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_named_before_anything_changes(name: str) -> None:
    make, message = REFUSED[name]
    try:
        model = make()
    except AttributeError as error:
        if "has no attribute" not in str(error) or "transformers" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__}: {error}")
    keys, attributes, implementation = list(model.state_dict()), set(vars(model)), model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        attach(model, Streaming(SMALL))
    assert list(model.state_dict()) == keys
    assert set(vars(model)) == attributes
    assert model.config._attn_implementation == implementation


def test_a_module_with_an_attention_of_its_own_is_refused() -> None:
    class Own(torch.nn.Module):
        layer_idx, num_key_value_groups, head_dim, scaling = 0, 1, 8, 1.0

        def __init__(self) -> None:
            super().__init__()
            self.o_proj = torch.nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x

    model = family_model("Llama", num_hidden_layers=1)
    model.model.layers[0].self_attn = Own()
    with pytest.raises(ValueError, match="Own does not go through the transformers attention interface"):
        attach(model, Streaming(SMALL))


def test_a_model_that_makes_masks_of_its_own_is_refused_by_its_first_pass() -> None:
    model = attach(family_model("Doge", hidden_size=32), Streaming(SMALL))
    with pytest.raises(ValueError, match="2-D padding mask"):
        generated(model, prompt(), 4)

"""Parameters against transformers models on the meta device, FLOPs against what torch counts on small ones."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from kvpop.budget import Budget
from kvpop.flops import (
    MLSTM_CHUNK,
    ModelShape,
    dense_pairs,
    flops_by_part,
    flops_per_token,
    kept_pairs,
    mfu,
    peak_flops,
    scorer_flops,
    target_pairs,
)  # fmt: skip
from kvpop.scorers import build_scorer

TINY = ModelShape(layers=2, hidden=24, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=61)
SIZES = dict(
    vocab_size=61, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
BUDGET = Budget(sinks=2, window=8, long=6)


def meta_model(family: str, **options: object) -> torch.nn.Module:
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    with torch.device("meta"):
        return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {"head_dim": 8}),
        ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("Mistral", {"head_dim": 16}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {"head_dim": 8}),
        ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "num_hidden_layers": 5}),
        ("Phi3", {}),
        ("SmolLM3", {}),
    ],
)
def test_parameters_are_those_of_the_model(family, options):
    model = meta_model(family, **options)
    shape = ModelShape.of(model.config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    layers = model.model.layers
    assert shape.layer_parameters == sum(p.numel() for p in layers[0].parameters())
    assert shape.layer_matrices == sum(p.numel() for p in layers[0].parameters() if p.ndim == 2)
    matrices = [p for p in layers.parameters() if p.ndim == 2]
    if family != "Phi3":  # one matrix for q, k, v there
        assert shape.lora_parameters(4) == 4 * sum(sum(p.shape) for p in matrices)


def test_shapes_that_are_not_known_are_refused():
    config = transformers.Qwen3MoeConfig(**SIZES)
    with pytest.raises(ValueError, match="shape of a 'qwen3_moe' model is not known: known are llama, mistral"):
        ModelShape.of(config)
    with pytest.raises(ValueError, match="4 heads are no multiple of 3 KV heads"):
        ModelShape(1, 8, 4, 3, 2, 8, 10)
    with pytest.raises(ValueError, match=r"ModelShape\.vocab must be at least 1, got 0"):
        ModelShape(1, 8, 4, 2, 2, 8, 0)


@pytest.mark.parametrize(("length", "slots", "window", "lookahead"), [(40, 16, 8, 5), (10, 16, 3, None), (7, 1, 9, 2)])
def test_pairs_are_counted_as_the_masks_have_them(length, slots, window, lookahead):
    assert dense_pairs(length) == sum(q + 1 for q in range(length))
    assert kept_pairs(length, slots) == sum(min(q + 1, slots) for q in range(length))
    assert kept_pairs(length, None) == dense_pairs(length)
    future = [max(0, length - (t + window)) for t in range(length)]
    limit = length if lookahead is None else lookahead + 1
    assert target_pairs(length, window, lookahead) == sum(min(n, limit) for n in future)


def counted(call) -> int:
    """Without the angles of the rotary embedding, which some versions of transformers make by a product."""
    with FlopCounterMode(display=False) as counter:
        call()
    by_module = counter.get_flop_counts()
    angles = sum(sum(ops.values()) for name, ops in by_module.items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - angles


def eager(model, frozen: bool = False):
    """A loss over all logits, and the FLOPs of its forward pass that the formulas leave out: eager attention works on
    the S x S matrix, not on its causal half."""
    model = model.float().eval()
    model.config._attn_implementation = "eager"
    for p in model.parameters():
        p.requires_grad_(not frozen)
    S = 32
    ids = torch.randint(3, 61, (1, S))
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    inputs = {"inputs_embeds": embedded} if frozen else {"input_ids": ids}
    square = 4 * TINY.layers * TINY.heads * TINY.head_dim * (S * S - dense_pairs(S))
    return lambda: model(**inputs, use_cache=False).logits.sum(), square, S


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8))


def test_flops_of_a_dense_model_are_what_torch_counts():
    loss, square, S = eager(qwen3())
    parts = flops_by_part(TINY, length=S, budget=None, mode="base")
    assert counted(loss) == pytest.approx(S * parts["teacher"] + square, rel=1e-12)
    student = parts["matrices"] + parts["attention"] + parts["head"]
    assert counted(lambda: loss().backward()) == pytest.approx(S * student + 3 * square, rel=1e-12)
    assert parts["target"] == parts["scorers"] == 0
    assert flops_by_part(TINY, length=S, budget=BUDGET, mode="full")["teacher"] == parts["teacher"]


def test_lora_needs_no_gradients_of_frozen_matrices():
    loss, square, S = eager(qwen3(), frozen=True)
    parts = flops_by_part(TINY, length=S, budget=None, mode="lora")
    student = parts["matrices"] + parts["attention"] + parts["head"]
    assert counted(lambda: loss().backward()) == pytest.approx(S * student + 3 * square, rel=1e-12)
    more = flops_by_part(TINY, length=S, budget=None, mode="lora", lora_parameters=10)
    assert more["matrices"] - parts["matrices"] == 60


@pytest.mark.parametrize("kind", ["mlp", "mlstm", "mlstm-immediate", "mlp+mlstm"])
def test_flops_of_scorers_are_what_torch_counts(kind):
    H, L, D = 3, 256, 16
    scorer, x = build_scorer(kind, H, D), torch.randn(1, H, L, 2 * D)
    flops, chunks = scorer_flops(kind, D), L // MLSTM_CHUNK
    handed = H * 2 * chunks * (chunks + 1) * D * (D // 2 + 1) * ("mlstm" in kind)  # from chunk to chunk, as a product
    assert counted(lambda: scorer.score_sequence(x, 8)) == H * L * flops["forward"] + handed
    both = counted(lambda: scorer.score_sequence(x, 8).sum().backward())
    assert both == H * L * (flops["forward"] + flops["backward"]) + 3 * handed


def test_flops_of_attention_and_target_follow_the_mask():
    common = dict(length=100, mode="full", scorer="mlp")
    parts = flops_by_part(TINY, budget=BUDGET, **common)
    pair = TINY.layers * TINY.heads * TINY.head_dim * 2  # of one product, a pair of query and key
    assert parts["attention"] == pytest.approx(3 * 2 * pair * kept_pairs(100, 16) / 100)
    assert parts["target"] == pytest.approx(pair * target_pairs(100, 8) / 100)
    dense = flops_by_part(TINY, budget=BUDGET, dense_lse=True, **common)
    assert dense["target"] - parts["target"] == pytest.approx(2 * pair * dense_pairs(100) / 100)
    assert flops_per_token(TINY, budget=BUDGET, **common) == sum(parts.values())
    once, thrice = (flops_by_part(TINY, length=100, budget=BUDGET, inner_updates=n) for n in (1, 3))
    assert thrice["scorers"] == 3 * once["scorers"]
    assert once["head"] == once["teacher"] == 0
    assert once["matrices"] == parts["matrices"] / 3


def test_flops_refuse_what_they_do_not_know():
    with pytest.raises(ValueError, match="mode must be one of scorer, full, lora, base, got 'half'"):
        flops_by_part(TINY, length=8, budget=BUDGET, mode="half")
    with pytest.raises(ValueError, match="length must be at least 1 token, got 0"):
        flops_by_part(TINY, length=0, budget=BUDGET)
    with pytest.raises(ValueError, match=r"scorer kind must be one of mlp, .*mlp\+mlstm, got 'best'"):
        flops_by_part(TINY, length=8, budget=BUDGET, scorer="best")


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA H20", None),
        ("cpu", None),
    ],
)
def test_peaks_by_device_name(name, peak):
    assert peak_flops(name) == peak


def test_mfu_is_a_share_of_the_peak_or_nothing():
    assert mfu(1000, 2e9, 4e12) == 0.5
    assert mfu(1000, 2e9, None) is None

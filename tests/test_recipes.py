"""Recipes: the paper's numbers, shapes that are those of the models, and names."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers

from kvpop.budget import Budget, entry_bytes
from kvpop.flops import ModelShape
from kvpop.recipes import RECIPES, qwen3_4b_instruct, qwen3_8b, recipe_by_name, smollm2_135m
from kvpop.scorers import build_scorer

CONFIGS = {
    "qwen3-4b-instruct": dict(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    "qwen3-8b": dict(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
}
COUNTS = {"qwen3-4b-instruct": 4_022_468_096, "qwen3-8b": 8_190_735_360, "smollm2-135m": 134_515_008}
"""As the models' cards and checkpoints have them."""


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_of_qwen3(name):
    config = transformers.Qwen3Config(
        **CONFIGS[name],
        vocab_size=151936,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    shape = RECIPES[name]().shape
    assert ModelShape.of(config) == shape
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters()) == COUNTS[name]


def test_shape_of_smollm2():
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    shape = smollm2_135m().shape
    assert ModelShape.of(config) == dataclasses.replace(shape, vectors=2 * 576)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters()) == COUNTS["smollm2-135m"]


@pytest.mark.parametrize("make", [qwen3_4b_instruct, qwen3_8b])
@pytest.mark.parametrize(
    ("budget", "scorer", "long"),
    [(4096, "mlp", 3836), (2048, "mlp", 1788), (4096, "mlstm", 3772), (2048, "mlstm", 1724)],
)
def test_the_papers_settings(make, budget, scorer, long):
    recipe = make(budget, scorer)
    assert recipe.policy.budget == Budget(sinks=4, window=256, long=long)
    assert recipe.policy.scorer == scorer
    assert (recipe.length, recipe.batch, recipe.gpus, recipe.rows) == (16384, 128, 8, 1)
    c = recipe.config
    assert (c.steps, c.mode, c.base_lr, c.scorer_lr, c.kl_top) == (2000, "full", 8e-5, 1e-3, 256)
    assert (c.weight_decay, c.betas, c.clip) == (1e-4, (0.9, 0.95), 1.0)
    assert recipe.corpus.source.startswith("nvidia/Nemotron-Math-v2:high_part00")
    assert recipe.corpus.max_tokens == 16384
    assert recipe.name == f"{recipe.name.split(':')[0]}:{budget}:{scorer}:full"


def test_what_a_state_costs_by_the_papers_count_and_by_bytes():
    """The paper charges C; with z and the stabiliser it is two entries more."""
    state, entry = build_scorer("mlstm", 1, 128).state_bytes(), entry_bytes(128, 2)
    nominal = Budget.of_slots(4096, sinks=4, window=256)
    assert nominal.charged(128 * 64 * 4, entry) == qwen3_8b(4096, "mlstm").policy.budget
    assert state == (128 * 65 + 1) * 4
    assert nominal.charged(state, entry).long == 3770
    small = build_scorer("mlp+mlstm", 1, 64).state_bytes()
    assert smollm2_135m().policy.budget == Budget.of_slots(1024).charged(small, entry_bytes(64, 2))
    assert smollm2_135m(scorer="mlp").policy.budget.slots == 1024


def test_recipes_by_name():
    assert recipe_by_name("qwen3-8b:2048:mlp:scorer") == qwen3_8b(2048, "mlp", "scorer")
    assert recipe_by_name("qwen3-4b-instruct") == qwen3_4b_instruct()
    assert recipe_by_name("smollm2-135m:512") == smollm2_135m(512)
    for name in RECIPES:
        assert recipe_by_name(recipe_by_name(name).name) == recipe_by_name(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "qwen3-9b",
            "unknown recipe 'qwen3-9b': .*the models qwen3-4b-instruct, qwen3-8b, smollm2-135m, the scorers mlp, ",
        ),
        ("qwen3-8b:4096:mlp:full:x", "a recipe is MODEL"),
        ("qwen3-8b::mlp", "a recipe is MODEL"),
        ("qwen3-8b:mlp", "the budget must be a number of slots, such as 4096, got 'mlp'"),
        ("qwen3-8b:4096:best", "scorer kind must be one of mlp, mlstm, mlstm-immediate, .*got 'best'"),
        ("qwen3-8b:4096:mlp:half", "the mode must be one of scorer, full, lora, got 'half'"),
        ("qwen3-8b:200", "a budget of 200 slots cannot hold 4 sinks and a window of 256"),
        ("qwen3-8b:300:mlstm", "costs 64 entries of 512 bytes, but only 40 long-range slots"),
    ],
)
def test_names_that_do_not_exist_say_what_does(name, message):
    with pytest.raises(ValueError, match=message):
        recipe_by_name(name)


def test_the_same_batch_on_other_machines():
    recipe = qwen3_8b()
    two = recipe.on(2)
    assert (two.gpus, two.config.accumulate, two.rows, two.batch, two.batch_size) == (2, 64, 1, 128, 2)
    assert two.on(8) == recipe
    assert smollm2_135m().on(2).config.accumulate == 2
    with pytest.raises(ValueError, match="a batch of 128 sequences in passes of 1 cannot be shared by 3 GPUs"):
        recipe.on(3)
    with pytest.raises(ValueError, match="a batch of 100 sequences cannot be shared by 8 GPUs in 16 passes each"):
        dataclasses.replace(recipe, batch=100)
    with pytest.raises(ValueError, match="memory_gb must be positive, got 0"):
        dataclasses.replace(recipe, memory_gb=0)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        dataclasses.replace(recipe, length=0)

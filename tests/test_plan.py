"""The plan's terms against what torch holds, what it refuses, and the command."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import transformers
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from kvpop.attachment import attach, attached_policies
from kvpop.budget import Budget
from kvpop.cli import app
from kvpop.flops import ModelShape, flops_per_token
from kvpop.kl import distillation_kl, teacher_logits
from kvpop.plan import (
    KL_COPIES,
    DoesNotFit,
    activation_bytes,
    make_plan,
    memory_by_part,
    peak_bytes,
    scorer_activation_bytes,
    scorer_parameters,
)  # fmt: skip
from kvpop.policies import KVpop
from kvpop.recipes import qwen3_8b, recipe_by_name, smollm2_135m
from kvpop.scorers import build_scorer
from tests.tiny import tiny_model


def saved_bytes(module: nn.Module, call) -> int:
    """Bytes of all storages that the backward pass of ``call`` keeps, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_are_what_a_layer_keeps(family, dtype):
    total = {}
    for layers in (1, 3):
        config = getattr(transformers, f"{family}Config")(
            vocab_size=64, hidden_size=64, intermediate_size=192, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=2, head_dim=16,
        )  # fmt: skip
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
        ids = torch.randint(0, 64, (1, 256))
        total[layers] = saved_bytes(model, lambda model=model, ids=ids: model.model(ids, use_cache=False))
    measured = (total[3] - total[1]) / 2 / 256
    assert activation_bytes(ModelShape.of(config, dtype.itemsize)) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("kind", ["mlp", "mlstm", "mlp+mlstm"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_activations_are_what_a_scorer_keeps(kind, head_dim):
    scorer, x = build_scorer(kind, 1, head_dim), torch.randn(1, 1, 1024, 2 * head_dim)
    measured = saved_bytes(scorer, lambda: scorer.score_sequence(x, 64)) / 1024
    assert scorer_activation_bytes(kind, head_dim) == pytest.approx(measured, rel=0.02)


def most_held(call) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def test_logits_are_what_the_chunked_kl_holds():
    E, V, chunk = 32, 4096, 128
    head = nn.Linear(E, V, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(1, 512, E, dtype=torch.bfloat16, requires_grad=True)
    valid = torch.ones(1, 512, dtype=torch.bool)
    teacher = teacher_logits(hidden, head, valid, top=256, chunk=chunk)
    peaks = [
        most_held(lambda: teacher_logits(hidden, head, valid, top=256, chunk=chunk)),
        most_held(lambda: distillation_kl(hidden, head, teacher, valid, chunk=chunk).backward()),
    ]
    assert KL_COPIES - 1.5 < max(peaks) / (4 * chunk * V) <= KL_COPIES


@pytest.mark.parametrize("scorer", ["mlp", "mlstm", "mlp+mlstm"])
def test_scorer_parameters_are_those_of_an_attached_policy(scorer):
    policy = KVpop(Budget(2, 8, 6), scorer)
    model = attach(tiny_model(), policy)
    expected = sum(p.numel() for layer in attached_policies(model) for p in layer.parameters())
    assert scorer_parameters(policy, ModelShape.of(model.config)) == expected


def test_memory_by_mode_and_by_gpus():
    full, scorer = memory_by_part(qwen3_8b()), memory_by_part(qwen3_8b(mode="scorer"))
    shard = 2 * 8_190_735_360 // 8
    assert full["parameters"] == full["gradients"] == full["teacher"] == shard
    assert full["moments"] == 2 * shard
    assert full["added"] == 16 * scorer_parameters(qwen3_8b().policy, qwen3_8b().shape)
    assert scorer["parameters"] == shard
    assert scorer["gradients"] == scorer["moments"] == scorer["teacher"] == scorer["logits"] == 0
    assert full["logits"] == KL_COPIES * 4 * 1024 * 151_936
    one = memory_by_part(qwen3_8b().on(1))
    assert (one["parameters"], one["gathered"]) == (8 * shard, 0)
    assert one["activations"] == full["activations"]  # passes stay as they are
    whole = with_settings(qwen3_8b(), checkpointing=False)
    assert whole["activations"] > 20 * full["activations"]
    assert (whole["views"], full["views"]) == (0, scorer["views"])  # held anyway for the backward pass
    assert (whole["layer"], full["layer"]) == (0, scorer["layer"])


def test_the_peak_counts_the_scorers_turn_or_the_backward_pass():
    memory = dict.fromkeys(memory_by_part(qwen3_8b()), 0) | {"parameters": 100, "views": 10, "scorers": 5, "logits": 12}
    assert peak_bytes(memory) == 115
    assert peak_bytes(memory | {"layer": 20}) == 132
    again = with_settings(qwen3_8b(mode="scorer"), inner_updates=4)
    assert again["views"] > 5 * memory_by_part(qwen3_8b(mode="scorer"))["views"]  # of 16 passes


def test_memory_by_precision_and_by_stack():
    recipe = qwen3_8b()
    wide = dataclasses.replace(recipe, shape=dataclasses.replace(recipe.shape, element_size=4))
    narrow, mixed, exact = memory_by_part(recipe), with_settings(wide, compute="bfloat16"), memory_by_part(wide)
    assert mixed["parameters"] == exact["parameters"] == 2 * narrow["parameters"]
    assert mixed["moments"] == 2 * narrow["moments"]
    assert mixed["activations"] == narrow["activations"] < exact["activations"]
    assert mixed["gathered"] == narrow["gathered"]
    one = with_settings(recipe, stack_elements=1)
    assert narrow["scorers"] == 8 * one["scorers"]  # 2^28 numbers: the keys and values of eight layers
    assert with_settings(recipe, stack_elements=2**40)["scorers"] == 36 * one["scorers"]
    lora = memory_by_part(qwen3_8b(mode="lora"))
    assert lora["teacher"] == lora["gradients"] == 0
    rank = dataclasses.replace(recipe.config, mode="lora", lora_rank=32)
    more = memory_by_part(dataclasses.replace(recipe, config=rank))
    assert more["added"] - lora["added"] == 16 * recipe.shape.lora_parameters(16)


def with_settings(recipe, **settings):
    return memory_by_part(dataclasses.replace(recipe, config=dataclasses.replace(recipe.config, **settings)))


def test_the_plan_adds_up():
    recipe = qwen3_8b(2048, "mlp")
    plan = make_plan(recipe, utilisation=0.5, peak=1e15)
    shape, policy = recipe.shape, recipe.policy
    per_token = flops_per_token(shape, length=16_384, budget=policy.budget, mode="full", scorer="mlp")
    assert sum(plan.flops.values()) == pytest.approx(per_token * 128 * 16_384)
    assert plan.seconds_per_step == pytest.approx(per_token * 128 * 16_384 / (8 * 1e15 * 0.5))
    report = plan.asdict()
    assert report["tokens"] == 2000 * 128 * 16_384
    assert report["hours"] == pytest.approx(2000 * plan.seconds_per_step / 3600)
    assert report["need_gb"] == pytest.approx(peak_bytes(report["memory"]) / 1e9)
    assert report["flops_per_token"] == pytest.approx(per_token)
    assert make_plan(recipe.on(4), peak=1e15).seconds_per_step > plan.seconds_per_step


def test_what_cannot_fit_names_the_need_and_the_bound():
    make_plan(qwen3_8b()).check()
    plan = make_plan(qwen3_8b().on(1))
    assert not plan.fits
    with pytest.raises(
        DoesNotFit, match=r"on 1 GPUs needs 1\d\d\.\d GB a GPU, more than the 80 GB there are; the largest part"
    ):
        plan.check()
    with pytest.raises(DoesNotFit, match="more than the 1 GB"):
        make_plan(smollm2_135m(), memory_gb=1).check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"utilisation": 0.0}, r"the assumed MFU must be in \(0, 1\], got 0\.0"),
        ({"utilisation": 1.5}, r"got 1\.5"),
        ({"memory_gb": 0}, "memory must be positive, got 0"),
        ({"peak": -1.0}, r"the peak FLOP/s must be positive, got -1\.0"),
    ],
)
def test_numbers_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        make_plan(smollm2_135m(), **options)


def test_a_longer_batch_row_needs_more():
    recipe = smollm2_135m(mode="full")
    wide = dataclasses.replace(recipe, config=dataclasses.replace(recipe.config, accumulate=1))
    assert wide.rows == 4 * recipe.rows
    assert memory_by_part(wide)["activations"] == 4 * memory_by_part(recipe)["activations"]


def call(*words):
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def test_the_command_prints_the_plan():
    result = call("qwen3-8b:4096:mlp:full", "--json", "--memory", 141, "--mfu", 0.4)
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    expected = make_plan(recipe_by_name("qwen3-8b:4096:mlp:full"), memory_gb=141, utilisation=0.4)
    assert report == expected.asdict()
    shown = call("smollm2-135m")
    assert shown.exit_code == 0
    assert "smollm2-135m:1024:mlp+mlstm:scorer" in shown.stdout
    assert "134,515,008 parameters" in shown.stdout
    assert "at the peak" in shown.stdout
    assert "35% MFU" in shown.stdout


def test_the_command_refuses_what_does_not_fit_with_exit_code_1():
    result = call("qwen3-8b", "--gpus", 1, "--json")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["fits"]
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: qwen3-8b:4096:mlstm:full on 1 GPUs needs ")
    assert "more than the 80 GB" in line
    wrong = call("qwen3-8b", "--gpus", 3)
    assert wrong.exit_code == 2
    assert "cannot be shared by 3 GPUs" in wrong.stderr

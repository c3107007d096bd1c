"""What tests of training share: small streams, short runs, and ways to compare two of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpop.budget import Budget
from kvpop.core import BoundaryLoss
from kvpop.data import PackedSequence, SequenceStream
from kvpop.distill import LOG, DistillConfig, Trainer, distill
from kvpop.policies import KVpop, Policy
from tests.tiny import VOCAB, tiny_model

BUDGET = Budget(2, 8, 8)
POLICY = KVpop(BUDGET, scorer="mlp+mlstm")
LOSS = BoundaryLoss(min_future=16, samples=32)
UNWEIGHTED = replace(LOSS, samples=0, margin_floor=1.0, balance=(1.0, 1.0))
SCORER = DistillConfig(steps=6, loss=LOSS, seed=3, kl_top=16, kl_chunk=50)
CONFIG_OF = {mode: replace(SCORER, mode=mode) for mode in ("scorer", "full", "lora", "base")}
MODES = ["scorer", "full"]
"""With and without a gradient in the model; ``test_modes`` goes through all of them."""


def packed(*lengths: int, size: int, seed: int = 0) -> PackedSequence:
    """Documents of random tokens of these lengths, and padding up to ``size``."""
    rng = np.random.default_rng(seed)
    return PackedSequence.from_pieces([rng.integers(3, VOCAB, n) for n in lengths], size)


def stream(batch_size: int = 2, size: int = 96, count: int = 6) -> SequenceStream:
    return SequenceStream([packed(size - 20, 15, size=size, seed=i) for i in range(count)], batch_size)


def unequal(batch_size: int) -> SequenceStream:
    """Four sequences of 128 tokens in which very different numbers of tokens and decisions are real."""
    lengths = [(120,), (40, 30), (64, 60), (50,)]
    return SequenceStream([packed(*n, size=128, seed=i) for i, n in enumerate(lengths)], batch_size)


def needs_teacher(config: DistillConfig) -> bool:
    return config.mode in ("full", "base")


def trainer(
    config: DistillConfig, data: SequenceStream | None = None, *, policy: Policy = POLICY, dtype=torch.float64,
    device="cpu",
) -> Trainer:  # fmt: skip
    teacher = tiny_model(dtype=dtype).to(device) if needs_teacher(config) else None
    return Trainer(tiny_model(dtype=dtype).to(device), policy, data or stream(), config, teacher)


def run(directory: Path, config: DistillConfig, **options: Any) -> tuple[bool, PreTrainedModel]:
    """``distill`` in a model, teacher and stream of its own, as a fresh process would."""
    dtype = options.pop("dtype", torch.float64)
    model = tiny_model(dtype=dtype)
    teacher = tiny_model(dtype=dtype) if needs_teacher(config) else None
    data = options.pop("data", None) or stream()
    policy = options.pop("policy", POLICY)
    return distill(model, policy, data, config, directory, model_id="tiny", teacher=teacher, **options), model


def snapshot(tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], rel: float = 1e-12) -> None:
    """Equal names, and values that differ by at most ``rel`` of the largest value in any of them."""
    assert a.keys() == b.keys()
    largest = max(float(x.abs().max()) for x in a.values())
    assert largest > 0
    for name in a:
        assert float((a[name] - b[name]).abs().max()) <= rel * largest, name


def gradients(t: Trainer, read: Callable[[Tensor], Tensor] = torch.clone) -> dict[str, Tensor]:
    """The gradients of the next step as the optimizer sees them."""
    found: dict[str, Tensor] = {}

    def hook(*_: Any) -> None:
        found.update({n: read(p.grad) for n, p in t.model.named_parameters() if p.grad is not None})

    handle = t.optimizer.register_step_pre_hook(hook)
    t.step()
    handle.remove()
    return found


def is_policy(name: str) -> bool:
    return ".kvpop." in name


def count_layer_passes(t: Trainer) -> list[int]:
    """How often the first layer's MLP runs."""
    count = [0]

    def hook(module: nn.Module, args: Any) -> None:
        count[0] += 1

    t.model.model.layers[0].mlp.register_forward_pre_hook(hook)
    return count


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("seconds", "tokens_per_s")}


def log_of(directory: Path) -> list[dict[str, Any]]:
    return [timeless(json.loads(line)) for line in (directory / LOG).read_text().splitlines()]

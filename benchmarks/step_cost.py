"""What a training step costs and where the time goes, on layers of a model's shape with random weights.

    python benchmarks/step_cost.py --shape qwen3-8b --layers 4 --length 16384 --budget 4096 --out benchmarks/results/FILE.json

Shares are measured with a synchronisation around each part (the sum of the parts is then a little above the plain step,
which is measured without). The comparison is the same trainer with dense attention and nothing but the KL. The floor is what
the arithmetic alone would take at the GPU's peak.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import kvpop.distill.scoring as scoring
import kvpop.distill.trainer as trainer_module
import kvpop.policies.base as base
import kvpop.policies.dms as dms
import kvpop.supervision as supervision
from kvpop.budget import Budget
from kvpop.core import BoundaryLoss, Target
from kvpop.data import PackedSequence, SequenceStream
from kvpop.distill import DistillConfig, Trainer
from kvpop.flops import ModelShape, flops_by_part, peak_flops
from kvpop.policies import DMS, Dense, KVpop, Policy, Streaming

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": dict(
        model_type="qwen3", hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936,
    ),
    "qwen3-4b": dict(
        model_type="qwen3", hidden_size=2560, intermediate_size=9728, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    ),
    "smollm2-135m": dict(
        model_type="llama", hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, vocab_size=49152, tie_word_embeddings=True,
    ),
    "tiny": dict(
        model_type="llama", hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=211, tie_word_embeddings=True,
    ),
}  # fmt: skip

PARTS: dict[str, list[tuple[Any, str]]] = {
    "scores in the pass": [(base.RankedLayer, "score")],
    "cutoff and expiry": [(base, "sequence_expiry")],
    "attention, forward": [(base, "sparse_attention"), (dms, "sparse_attention")],
    "target": [(supervision, "future_target")],
    "teacher's cutoff": [(supervision, "teacher_tables")],
    "boundary loss and scorers, forward and backward": [(scoring.Scorers, "learn")],
    "optimizer and sums": [(trainer_module.Trainer, "_update")],
    "teacher's pass": [(trainer_module.Trainer, "_teacher")],
}


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def timed(device: torch.device) -> Iterator[dict[str, float]]:
    """Seconds spent in each of ``PARTS`` while the context lasts."""
    spent: dict[str, float] = defaultdict(float)
    originals = []

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **options: Any) -> Any:
            synchronise(device)
            started = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                synchronise(device)
                spent[name] += time.perf_counter() - started

        return timed_call

    for name, places in PARTS.items():
        for owner, attribute in places:
            if hasattr(owner, attribute):
                originals.append((owner, attribute, getattr(owner, attribute)))
                setattr(owner, attribute, wrap(name, getattr(owner, attribute)))
    try:
        yield spent
    finally:
        for owner, attribute, original in originals:
            setattr(owner, attribute, original)


def seconds_a_step(trainer: Trainer, device: torch.device, warm: int, steps: int) -> float:
    for _ in range(warm):
        trainer.step()
    synchronise(device)
    started = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    synchronise(device)
    return (time.perf_counter() - started) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--scorers", nargs="+", default=["mlp", "mlstm"])
    parser.add_argument("--modes", nargs="+", default=["full", "scorer"])
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument(
        "--impl", choices=["flex", "triton"], default="triton", help="of attention, on a GPU (DMS: flex)"
    )
    parser.add_argument("--baselines", action="store_true", help="Streaming+ and DMS too")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    settings = dict(SHAPES[options.shape])
    config = AutoConfig.for_model(settings.pop("model_type"), num_hidden_layers=options.layers,
                                  max_position_embeddings=2 * options.length, **settings)  # fmt: skip
    torch.manual_seed(0)
    with device:  # random numbers for two billion weights take a minute on a CPU
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    rng = np.random.default_rng(0)
    S, B = options.length, options.batch
    stream = SequenceStream(
        [PackedSequence.from_pieces([rng.integers(3, config.vocab_size, S)], S) for _ in range(2 * B)], B
    )
    budget = Budget.of_slots(options.budget, sinks=4, window=options.window)
    shape, peak = ModelShape.of(config), peak_flops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    rows: list[dict[str, Any]] = []

    def measure(name: str, policy: Policy, mode: str, scorer: str = "mlp") -> None:
        student = copy.deepcopy(model)
        teacher = copy.deepcopy(model) if mode in ("full", "base") else None
        impl = "reference" if device.type == "cpu" else "flex" if isinstance(policy, DMS) else options.impl
        run = DistillConfig(
            mode=mode, steps=1000, impl=impl, target=Target(),  # type: ignore[arg-type]
            loss=BoundaryLoss(samples=options.samples), log_every=1000,
        )  # fmt: skip
        trainer = Trainer(student, policy, stream, run, teacher)
        plain = seconds_a_step(trainer, device, options.warm, options.steps)
        with timed(device) as spent:
            synchronised = seconds_a_step(trainer, device, 0, options.steps)
        row: dict[str, Any] = {
            "policy": name, "mode": mode, "impl": impl, "seconds": round(plain, 4),
            "seconds_synchronised": round(synchronised, 4),
            "parts": {part: round(value / options.steps, 4) for part, value in spent.items()},
            "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if device.type == "cuda" else None,
        }  # fmt: skip
        if peak is not None:
            parts = flops_by_part(
                shape, length=S, budget=None if isinstance(policy, Dense | DMS) else budget, mode=mode, scorer=scorer  # type: ignore[arg-type]
            )  # fmt: skip
            floor = sum(parts.values()) * S * B / peak
            row |= {"floor_seconds": round(floor, 4), "ratio": round(plain / floor, 2)}
        rows.append(row)
        print(json.dumps(row), flush=True)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    measure("dense", Dense(), "base")
    for mode in options.modes:
        for scorer in options.scorers:
            measure(f"kvpop-{scorer}", KVpop(budget, scorer), mode, scorer)
    if options.baselines:
        measure("streaming", Streaming(budget), "base")
        measure("dms", DMS(window=options.window, ratio=S / options.budget), "full")
    dense = rows[0]["seconds"]
    for row in rows:
        row["over_dense"] = round(row["seconds"] / dense, 3)
    result = {
        "what": f"seconds of a training step, {options.layers} layers of {options.shape}, S = {S}, batch {B}, "
                f"budget {options.budget}",
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": "python benchmarks/step_cost.py " + " ".join(sys.argv[1:]),
        "rows": rows,
    }  # fmt: skip
    print(json.dumps(result))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

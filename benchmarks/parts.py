"""What stands around attention in training and prefill, each part by itself: time, floor and ratio; and prefill as a whole.

    python benchmarks/parts.py --out benchmarks/results/parts-h200.json

Shapes of one layer of Qwen3-8B. The floor of a part is the bytes it must read and write once at the measured bandwidth, or the
products it must form at the GPU's dense bfloat16 peak, whichever takes longer. Prefill runs a few layers of that shape with
random weights, the prompt in chunks, beside the same layers with a dense cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from common import PEAK, milliseconds, write
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvpop.scorers as scorers_module
from kvpop.attachment import attach, cache_argument, detach
from kvpop.bench import random_model, read_bandwidth
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.core.cutoff import expiry
from kvpop.ops.future_mass import future_log_mass
from kvpop.ops.residual_mass import block_mass
from kvpop.ops.sparse_attention import blocks, flex
from kvpop.policies import KVpop, Policy, Streaming
from kvpop.scorers import build_scorer

# Shapes: B batch, R query heads, H KV heads, S sequence, D head dim.

LAYERS = 36


def parts(S: int, budget: Budget, R: int, H: int, D: int) -> dict[str, tuple[Callable[[], Any], float, float]]:
    """What to run by name, the bytes that must move and the products that must be formed."""
    from kvpop.ops.sparse_attention import triton as sparse

    q, k = (torch.randn(1, heads, S, D, device="cuda", dtype=torch.bfloat16) for heads in (R, H))
    lse = (torch.arange(1, S + 1, device="cuda").log() + 0.5).expand(1, R, S).contiguous()
    end, length = torch.full((1, S), S, device="cuda"), torch.tensor([S], device="cuda")
    priority = torch.randn(1, H, S, device="cuda")
    everyone = torch.randn(1, H * LAYERS, S, device="cuda")
    expiry_1HS = expiry(priority, budget, "triton")
    birth, stop = blocks.lifetimes(expiry_1HS)
    x = torch.randn(1, H, S, 2 * D, device="cuda", dtype=torch.bfloat16)
    scorers = {kind: build_scorer(kind, H, D).cuda() for kind in ("mlp", "mlstm")}

    def scored(kind: str, impl: str = "chunkwise") -> Callable[[], Tensor]:
        @torch.no_grad()
        def score() -> Tensor:
            with mock.patch.object(scorers_module, "_sequence_impl", return_value=impl):
                return scorers[kind].score_sequence(x, budget.window)

        return score

    def products(kind: str) -> float:
        return 2.0 * S * sum(p.numel() for p in scorers[kind].parameters())

    def lists() -> Any:
        keys = sparse.key_lists(stop, 128, budget.slots)
        return keys, sparse.schedule(sparse.expiry_order(stop, sparse.chunk_of(S)), stop, 128)

    small = 4.0 * H * S
    half = S * S / 2 * R * D * 2
    given = dict(scale=D**-0.5, window=budget.window)
    mass = dict(scale=D**-0.5, block=64, power=1.0, aggregate="max")
    return {
        "cutoff and expiry, the heads of one layer": (lambda: expiry(priority, budget, "triton"), 2 * small, 0),
        f"cutoff and expiry, those of {LAYERS} layers": (
            lambda: expiry(everyone, budget, "triton"), 2 * small * LAYERS, 0,
        ),
        "block mask for flex, forward and backward": (
            lambda: flex.lifetime_mask(birth, stop, R // H), small + R * (S / 128) ** 2 * 16, 0,
        ),
        "key lists and schedule of the Triton kernels": (lists, small + 4 * H * S / 128 * budget.slots, 0),
        "scores of 8 heads, MLP": (scored("mlp"), 2.0 * x.numel(), products("mlp")),
        "scores of 8 heads, mLSTM, torch": (scored("mlstm"), 2.0 * x.numel(), products("mlstm")),
        "scores of 8 heads, mLSTM": (scored("mlstm", "triton"), 2.0 * x.numel(), products("mlstm")),
        "future mass, flex": (lambda: future_log_mass(q, k, lse, end, impl="flex", **given), 0, half),
        "future mass, Triton": (lambda: future_log_mass(q, k, lse, end, impl="triton", **given), 0, half),
        "attention still to come every 64 queries, Triton": (
            lambda: block_mass(q, k, lse, length, impl="triton", **mass), 4.0 * H * S / 64 * S / 2, half,
        ),
    }  # fmt: skip


@torch.no_grad()
def prefill(model: PreTrainedModel, policy: Policy | None, tokens: int, chunk: int) -> dict[str, Any]:
    """Milliseconds and peak memory of taking in a prompt, the second of two times."""
    if policy is not None:
        attach(model, policy)
    name, seconds = cache_argument(model) if policy is not None else "past_key_values", 0.0
    ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
    for _ in range(2):
        cache = BoundedCache(model) if policy is not None else DynamicCache(config=model.config)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for part in ids.split(chunk, dim=1):
            model(part, logits_to_keep=1, **{name: cache})
        stop.record()
        torch.cuda.synchronize()
        seconds = start.elapsed_time(stop) / 1e3
        peak = torch.cuda.max_memory_allocated() / 1e9
        del cache
        torch.cuda.empty_cache()
    detach(model)
    return {"tokens": tokens, "chunk": chunk, "seconds": round(seconds, 4), "peak_gb": round(peak, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--budget", type=int, default=4096, help="slots of a KV head")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--prefill", type=int, nargs="*", default=[32768, 131072], help="tokens of a prompt")
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--layers", type=int, default=4, help="of the model that takes in the prompts")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    budget = Budget.of_slots(options.budget, sinks=4, window=options.window)
    speed = read_bandwidth(torch.device("cuda"))
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    for S in options.lengths:
        for name, (run, moved, formed) in parts(S, budget, 32, 8, 128).items():
            try:
                ms, floor = milliseconds(run, options.repeats), 1e3 * max(moved / speed, formed / PEAK)
                report(
                    {
                        "part": name,
                        "S": S,
                        "ms": round(ms, 4),
                        "floor_ms": round(floor, 4),
                        "ratio": round(ms / floor, 2),
                    }
                )
            except Exception as problem:  # one part must not end the others
                report({"part": name, "S": S, "failed": f"{type(problem).__name__}: {problem}"[:300]})
    if options.prefill:
        model = random_model("qwen3-8b", options.layers, torch.bfloat16, torch.device("cuda"))
        policies = {
            "dense": None,
            "streaming": Streaming(budget),
            "kvpop-mlp": KVpop(budget, "mlp"),
            "kvpop-mlstm": KVpop(budget, "mlstm"),
        }
        for tokens in options.prefill:
            for label, policy in policies.items():
                for chunk in options.chunks:
                    report({"prefill": label, **prefill(model, policy, tokens, chunk)})
    write(
        options.out,
        f"parts of training and prefill, Qwen3-8B shapes, budget {options.budget}, window {options.window}, bf16; prefill: "
        f"{options.layers} layers",
        "python benchmarks/parts.py " + " ".join(sys.argv[1:]), rows, bandwidth_gb_s=round(speed / 1e9, 1),
    )  # fmt: skip
    sys.exit(any("failed" in row for row in rows))


if __name__ == "__main__":
    main()

"""The fused step of a store by itself: microseconds a layer, beside plain attention over full slots and the floor, in variants.

    python benchmarks/fused_step.py --batch 1 8 32 --out benchmarks/results/FILE.json
    python benchmarks/fused_step.py --vary STAGES=2 --vary PROGRAMS=528,BLOCK=32

Shapes of Qwen3-8B, every layer with a store of its own, so that nothing stays in the L2 cache; one CUDA graph of all layers.
The floor reads keys and values of all slots once, and reads and writes what a recurrent scorer remembers. A variant sets
constants of ``ops.cache_step.fused.triton``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import microseconds, write
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvpop.attachment import attach, attached_policies
from kvpop.bench import fill_store, random_model, read_bandwidth
from kvpop.budget import Budget
from kvpop.capture import capture
from kvpop.ops.cache_step.fused import triton as fused
from kvpop.policies import KVpop, Policy, Streaming

H, G, D = 8, 4, 128
SEEN = 16384
GIGABYTES = 5.0
"""Keys and values of all layers, at most (two layers at least)."""


def variant(text: str) -> dict[str, int]:
    """NAME=VALUE,NAME=VALUE of constants."""
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if not isinstance(getattr(fused, name, None), int) or not value.isdigit():
            raise argparse.ArgumentTypeError(f"{part} is not CONSTANT=NUMBER of ops.cache_step.fused.triton")
        found[name] = int(value)
    return found


def kernels(step: Callable[[], Tensor], layers: int) -> dict[str, float]:
    """Microseconds of a layer in each kernel of more than half a microsecond."""
    graph = capture(step)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            graph()
        torch.cuda.synchronize()
    spent = {event.key[:40]: event.self_device_time_total / 5 / layers for event in profile.key_averages()}
    return {name: round(us, 2) for name, us in sorted(spent.items(), key=lambda x: -x[1]) if us > 0.5}


def attend_all(held: list[Tensor], q: Tensor) -> Tensor:
    for keys, values in held:
        out = scaled_dot_product_attention(q, keys, values, enable_gqa=True)
    return out


def step_all(stores: list[Any], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for store in stores:
        out = store.step(q, k, v, None, D**-0.5)
    return out


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument(
        "--policies", nargs="+", default=["streaming", "mlp", "mlstm"], choices=["streaming", "mlp", "mlstm"]
    )
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--vary", type=variant, action="append", default=[], help="CONSTANT=NUMBER,..; repeatable")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda")
    budget = Budget.of_slots(options.budget, sinks=4, window=256)
    policies: dict[str, Policy] = {
        "streaming": Streaming(budget), "mlp": KVpop(budget, "mlp"), "mlstm": KVpop(budget, "mlstm"),
    }  # fmt: skip
    model, speed = random_model("qwen3-8b", 1, torch.bfloat16, device), read_bandwidth(device)
    rows: list[dict[str, Any]] = []
    for B in options.batch:
        each = B * H * options.budget * D * 4
        L = max(2, min(36, int(GIGABYTES * 1e9) // each))
        q, k, v = (torch.randn(B, heads, 1, D, device=device).bfloat16() for heads in (H * G, H, H))
        held = [torch.randn(2, B, H, options.budget, D, device=device).bfloat16() for _ in range(L)]

        plain = microseconds(partial(attend_all, held, q), L, options.repeats)
        del held
        for name in options.policies:
            attach(model, policies[name])
            layer = attached_policies(model)[0]
            like = torch.zeros(B, H, 0, D, dtype=torch.bfloat16, device=device)
            stores: list[Any] = [layer.new_slots(like, like) for _ in range(L)]
            for store in stores:
                fill_store(store, SEEN, options.budget, torch.Generator(device).manual_seed(1))

            step = partial(step_all, stores, q, k, v)
            floor = each + 2 * sum(x.nbytes for x in stores[0].state)
            for changed in [{}, *options.vary]:
                usual = {constant: getattr(fused, constant) for constant in changed}
                for constant, value in changed.items():
                    setattr(fused, constant, value)
                row = {"policy": name, "batch": B, "layers": L, "changed": changed,
                       "floor_us": round(1e6 * floor / speed, 2), "plain_attention_us": round(plain, 2)}  # fmt: skip
                try:
                    us = microseconds(step, L, options.repeats)
                    row |= {"us": round(us, 2), "ratio": round(us / row["floor_us"], 2), "kernels_us": kernels(step, L)}
                except Exception as problem:  # a variant that does not fit must not end the others
                    row["failed"] = f"{type(problem).__name__}: {problem}"[:200]
                rows.append(row)
                print(json.dumps(row), flush=True)
                for constant, value in usual.items():
                    setattr(fused, constant, value)
            del stores
            torch.cuda.empty_cache()
    write(
        options.out,
        f"the fused step of a store, Qwen3-8B shapes, {options.budget} slots, window 256, bf16, {SEEN} tokens seen",
        "python benchmarks/fused_step.py " + " ".join(sys.argv[1:]), rows, bandwidth_gb_s=round(speed / 1e9, 1),
    )  # fmt: skip
    sys.exit(any("failed" in row for row in rows))


if __name__ == "__main__":
    main()

"""Prompts through the engine: time of one until its first token, with pieces launched kernel by kernel and as graphs.

    python benchmarks/prompts.py --out benchmarks/results/prompts-h200.json

Random weights. The floor is the products of the weights with so many tokens at the GPU's dense bfloat16 peak (attention, which
is bounded, is not counted). The engine is warm: what is captured, or compiled, has been before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import PEAK, write

from kvpop.attachment import attach
from kvpop.bench import make_policy, random_model
from kvpop.budget import Budget
from kvpop.engine import Engine

CASES = {"smollm2-135m": (1024, 64), "qwen3-8b": (4096, 256)}
"""Slots and window of a shape."""


def until_first_token(engine: Engine, tokens: int, repeats: int) -> float:
    """Median seconds; a prompt that is not the one before."""
    times = []
    for i in range(2 + repeats):
        started = time.perf_counter()
        engine.generate([[3 + i] * tokens], max_new_tokens=1)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--policies", nargs="+", default=["streaming", "kvpop-mlstm"])
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--tokens", type=int, nargs="+", default=[200, 512, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in options.shapes:
        model = random_model(shape, None, torch.bfloat16, torch.device("cuda"))
        weights = sum(p.numel() for p in model.get_decoder().layers.parameters())
        slots, window = CASES[shape]
        for policy in options.policies:
            attach(model, make_policy(policy, Budget.of_slots(slots, sinks=4, window=window), slots))
            for chunk in options.chunks:
                for graph in (False, True):
                    engine = Engine(model, rows=1, prefill_chunk=chunk, graph=True, prefill_graph=graph)
                    for tokens in options.tokens:
                        ms = 1e3 * until_first_token(engine, tokens, options.repeats)
                        floor = 2e3 * weights * tokens / PEAK
                        row = {"shape": shape, "policy": policy, "chunk": chunk, "graph": graph, "tokens": tokens}
                        row |= {"ms": round(ms, 2), "floor_ms": round(floor, 3), "ratio": round(ms / floor, 1)}
                        rows.append(row)
                        print(json.dumps(row), flush=True)
                    del engine
        del model
        torch.cuda.empty_cache()
    write(
        options.out, "time of a prompt until its first token, in the engine, bf16, random weights",
        "python benchmarks/prompts.py " + " ".join(sys.argv[1:]), rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()

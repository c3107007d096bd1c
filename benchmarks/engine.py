"""Many prompts over a few rows against the same prompts one at a time: generated tokens per second, prefill included.

Both go through ``kvpop.Engine``; one at a time is an engine of one row. Prompts are beginnings of held-out problems, 64 to
400 tokens long, and decoding is greedy. In low precision the two may part at a near-tie: how many streams are equal is
reported.

    python benchmarks/engine.py --policy streaming --prompts 16 --rows 8 --out benchmarks/results/engine-cpu.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers

import kvpop
from kvpop.corpora import champ_texts
from kvpop.engine import Request
from kvpop.models import load_base


def prompts_of(tokenizer, count: int, shortest: int, longest: int) -> list[list[int]]:
    rng = random.Random(0)
    texts = itertools.cycle(champ_texts("test"))
    return [tokenizer.encode(next(texts))[: rng.randint(shortest, longest)] for _ in range(count)]


def measure(model, prompts: list[list[int]], rows: int, new_tokens: int) -> tuple[dict[str, float], list[Request]]:
    engine = kvpop.Engine(model, rows=rows)
    engine.generate([prompts[0][:8]] * rows, max_new_tokens=2)  # allocates, and loads what is loaded on first use
    started = time.perf_counter()
    requests = engine.generate(prompts, max_new_tokens=new_tokens)
    seconds = time.perf_counter() - started
    waits = [request.first_token - request.submitted for request in requests]
    figures = {
        "rows": rows,
        "seconds": seconds,
        "tokens_per_second": sum(len(request.tokens) for request in requests) / seconds,
        "median_seconds_to_first_token": statistics.median(waits),
        "cache_bytes": engine.cache.nbytes(),
    }
    return figures, requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--policy", choices=["streaming", "kvpop"], default="streaming")
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--shortest", type=int, default=64)
    parser.add_argument("--longest", type=int, default=400)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model, tokenizer = load_base(args.model, getattr(torch, args.dtype), args.device)
    policy = {"streaming": kvpop.Streaming, "kvpop": kvpop.KVpop}[args.policy]
    kvpop.attach(model, policy(kvpop.Budget.of_slots(args.budget)))
    prompts = prompts_of(tokenizer, args.prompts, args.shortest, args.longest)
    together, ours = measure(model, prompts, args.rows, args.new_tokens)
    one_by_one, theirs = measure(model, prompts, 1, args.new_tokens)
    report = {
        "command": " ".join(["python benchmarks/engine.py", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {"kvpop": kvpop.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "together": together,
        "one_at_a_time": one_by_one,
        "ratio": together["tokens_per_second"] / one_by_one["tokens_per_second"],
        "equal_streams": sum(a.tokens == b.tokens for a, b in zip(ours, theirs)),
    }
    print(json.dumps(report, indent=2))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Decoding through ``torch.compile``: a bounded cache beside transformers' own static cache.

Random weights in the shape of a known model: time does not depend on what the weights say. For each cache the prompt is taken
in eagerly, then one token at a time, eagerly and compiled (on a GPU captured as one CUDA graph, so that launches and guards
on the host cost nothing); the figure is the median time a token. "below" decodes before the
budget is full, "full" after. The floor is the bytes of weights and slots over the measured copy bandwidth.

    python benchmarks/decode_compiled.py --shape qwen3-8b --budget 4096 --out decode.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config, StaticCache

import kvpop
from kvpop.attachment import cache_argument
from kvpop.policies import Policy

SHAPES: dict[str, Any] = {  # by name, the configuration
    "qwen3-8b": lambda: Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=65536, tie_word_embeddings=False,
    ),
    "smollm2-135m": lambda: LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
    "tiny": lambda: LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192,
    ),
}  # fmt: skip


def build(shape: str, layers: int | None, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = SHAPES[shape]()
    config.num_hidden_layers = layers or config.num_hidden_layers
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    with torch.device(device):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        finally:
            torch.set_default_dtype(previous)
    return model.eval()


def bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, read and written."""
    size = 2**32 if device.type == "cuda" else 2**28
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(5):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - started)
    return 2 * size / min(times)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Decoding:
    """One model, one cache: a prompt, then tokens one by one at static addresses."""

    def __init__(self, model: PreTrainedModel, rows: int, compiled: bool) -> None:
        self.model, self.rows = model, rows
        self.name, self.device = cache_argument(model), next(model.parameters()).device
        self.call = torch.compile(model.forward, fullgraph=True) if compiled else model.forward
        self.capture = compiled and self.device.type == "cuda"
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=self.device)
        self.position = torch.zeros(rows, 1, dtype=torch.long, device=self.device)

    @torch.no_grad()
    def run(self, cache: Any, prompt: int, steps: int, warm: int) -> tuple[float, torch.Tensor]:
        """Median seconds of a step, and the last logits."""
        generator = torch.Generator().manual_seed(1)
        vocab = self.model.config.vocab_size
        ids = torch.randint(3, vocab, (self.rows, prompt), generator=generator).to(self.device)
        for start in range(0, prompt, 2048):
            part = ids[:, start : start + 2048]
            position = torch.arange(start, start + part.shape[1], device=self.device)[None].expand(self.rows, -1)
            self.model(part, position_ids=position, logits_to_keep=1, **{self.name: cache})
        self.position.fill_(prompt)
        later = torch.randint(3, vocab, (self.rows, warm + steps), generator=generator).to(self.device)
        times: list[float] = []
        graph, logits = None, torch.empty(0)
        for step in range(warm + steps):
            self.ids.copy_(later[:, step : step + 1])
            synchronize(self.device)
            started = time.perf_counter()
            if graph is not None:
                graph.replay()
            elif self.capture and step == warm - 1:  # compiled by now; capturing runs nothing
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    logits = self.call(self.ids, position_ids=self.position, **{self.name: cache}).logits
                graph.replay()
            else:
                logits = self.call(self.ids, position_ids=self.position, **{self.name: cache}).logits
            synchronize(self.device)
            times.append(time.perf_counter() - started)
            self.position += 1
        return statistics.median(times[warm:]), logits[:, -1].float().clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument(
        "--layers", type=int, help="instead of the shape's own number: compiling takes as long in proportion"
    )
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--scorers", nargs="+", default=["streaming", "mlp", "mlp+mlstm"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--eager", action="store_true", help="time eager decoding, too")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    model = build(args.shape, args.layers, device, dtype)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding = model.get_input_embeddings().weight
    if model.get_output_embeddings().weight is not embedding:
        weights -= embedding.numel() * embedding.element_size()
    speed = bandwidth(device)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slot = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * dtype.itemsize
    budget = kvpop.Budget.of_slots(args.budget)
    below, full = args.budget // 2, args.budget + 512
    rows_out: list[dict[str, Any]] = []
    facts = {
        "machine": torch.cuda.get_device_name()
        if device.type == "cuda"
        else platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "kvpop": kvpop.__version__},
        "command": "python " + " ".join(sys.argv),
        "bandwidth_bytes_per_s": speed,
        "weights_bytes": weights,
        "rows": rows_out,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def report(cache: str, mode: str, rows: int, where: str, seconds: float, **more: Any) -> None:
        floor = (weights + rows * slot * (args.budget if where == "full" else below)) / speed
        row = {"cache": cache, "mode": mode, "rows": rows, "where": where, "ms_per_token": seconds * 1e3}
        rows_out.append(row | {"floor_ms": floor * 1e3, "ratio": seconds / floor} | more)
        print(json.dumps(rows_out[-1]), flush=True)
        args.out.write_text(json.dumps(facts, indent=2) + "\n")

    for rows in args.rows:
        modes = [False, True] if args.eager else [True]
        for compiled in modes:
            torch._dynamo.reset()
            decoding = Decoding(model, rows, compiled)
            cache = StaticCache(config=config, max_cache_len=args.budget)
            seconds, _ = decoding.run(cache, below, args.steps, 10)
            report("static", "compiled" if compiled else "eager", rows, "below", seconds)
        for scorer in args.scorers:
            policy: Policy = kvpop.Streaming(budget) if scorer == "streaming" else kvpop.KVpop(budget, scorer=scorer)
            kvpop.attach(model, policy)
            eager: dict[str, torch.Tensor] = {}
            for compiled in [False, True]:
                if not compiled and not args.eager:
                    continue
                torch._dynamo.reset()
                torch._dynamo.utils.counters.clear()
                decoding, cache = Decoding(model, rows, compiled), kvpop.BoundedCache(model)
                cache.allocate(rows)
                for where, prompt in (("below", below), ("full", full)):
                    cache.reset()
                    seconds, logits = decoding.run(cache, prompt, args.steps, 10)
                    more: dict[str, Any] = {}
                    if compiled:
                        more["graphs"] = torch._dynamo.utils.counters["stats"].get("unique_graphs")
                        if where in eager:
                            more["max_logit_difference"] = float((logits - eager[where]).abs().max())
                    else:
                        eager[where] = logits
                    more["cache_bytes"] = cache.nbytes()
                    report(f"bounded {scorer}", "compiled" if compiled else "eager", rows, where, seconds, **more)
            kvpop.detach(model)


if __name__ == "__main__":
    main()

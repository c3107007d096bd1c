"""Products of few rows: microseconds, beside the library's product and the floor, in variants.

    python benchmarks/few_rows.py --rows 1 32 --out benchmarks/results/FILE.json
    python benchmarks/few_rows.py --vary ONE=4,1024,4,1 --vary PIECES=64,128,4,4 --vary PROGRAMS=264

The projections of Qwen3-8B. Every product has weights of its own, together far more than the L2 cache; one CUDA graph of all.
The floor reads the weights once. "layer": the four of a decoder layer one after the other; "whole": with the norms, the
activation and the sums of a layer, by the library one after the other. A variant sets a constant of ``ops.few_rows.triton``;
every one is measured with kernels that start while the one before them runs, and without.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from common import microseconds, write
from torch import Tensor

from kvpop.bench import read_bandwidth
from kvpop.ops.few_rows import counters, linear
from kvpop.ops.few_rows import triton as kernel

SHAPES = {
    "q, k, v": (6144, 4096),
    "o": (4096, 4096),
    "gate, up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
    "norm, q, k, v": (6144, 4096),
    "norm, gate, up, silu": (24576, 4096),
}
LAYER = ("q, k, v", "o", "gate, up", "down")
GIGABYTES = 2.5

Product = tuple[Tensor, Tensor, dict[str, Any]]
"""x, weights, and what stands around them."""


def variant(text: str) -> tuple[str, Any]:
    """NAME=NUMBER or NAME=NUMBER,NUMBER,.. of a constant."""
    name, _, value = text.partition("=")
    present, numbers = getattr(kernel, name, None), tuple(int(part) for part in value.split(","))
    if not isinstance(present, int | tuple) or len(numbers) != (len(present) if isinstance(present, tuple) else 1):
        raise argparse.ArgumentTypeError(f"{text} is no constant of ops.few_rows.triton with as many numbers")
    return name, numbers if isinstance(present, tuple) else numbers[0]


def all_of(products: list[Product], impl: str) -> Tensor:
    for x, weight, around in products:
        out = linear(x, weight, **around, impl=impl)  # type: ignore[arg-type]
    return out


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES, "layer", "whole"], choices=[*SHAPES, "layer", "whole"])
    parser.add_argument("--vary", type=variant, action="append", default=[], help="CONSTANT=NUMBERS; repeatable")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda")
    speed = read_bandwidth(device)
    rows: list[dict[str, Any]] = []

    def measured(R: int, what: str, products: list[Product], count: int) -> None:
        size = sum(w.numel() for _, w, _ in products) * 2 / count
        shared = {"rows": R, "what": what, "floor_us": round(1e6 * size / speed, 2)}
        plain = microseconds(lambda: all_of(products, "reference"), count, options.repeats)
        found = [{**shared, "impl": "library", "us": round(plain, 2)}]
        x, weight, around = products[0]
        exact = {
            name: (y[0].double(), y[1]) if name == "norm" else y for name, y in around.items() if name != "arrived"
        }
        expected = linear(x.double(), weight.double(), **exact)
        for change, overlap in itertools.product([(), *options.vary], (True, False)):
            changed = {"OVERLAP": overlap} | ({change[0]: change[1]} if change else {})
            usual = {name: getattr(kernel, name) for name in changed}
            vars(kernel).update(changed)
            for _, weight, around in products:
                around["arrived"] = counters(weight)
            entry: dict[str, Any] = {**shared, "impl": "triton", "changed": changed}
            x, weight, around = products[0]
            try:
                entry["us"] = round(microseconds(lambda: all_of(products, "triton"), count, options.repeats), 2)
                found_y = linear(x, weight, **around, impl="triton")
                entry["error"] = float((found_y - expected).abs().max() / expected.std())
            except Exception as error:  # too large for the device
                entry["failed"] = f"{type(error).__name__}: {error}"[:200]
            vars(kernel).update(usual)
            found.append(entry)
        for entry in found:
            rows.append(entry | ({"ratio": round(entry["us"] / entry["floor_us"], 3)} if "us" in entry else {}))
            print(json.dumps(rows[-1]), flush=True)
        write(options.out, "products of few rows", "python " + " ".join(sys.argv), rows, gb_per_s=round(speed / 1e9))

    for R in options.rows:
        for name in options.shapes:
            several_products = name in ("layer", "whole")
            shapes = [SHAPES[n] for n in LAYER] if several_products else [SHAPES[name]]
            count = max(2, int(GIGABYTES * 1e9) // sum(2 * n * e for n, e in shapes))
            products: list[Product] = []
            for _ in range(count):
                for part, (n, e) in enumerate(shapes):
                    x = torch.randn(R, e, device=device).bfloat16()
                    around: dict[str, Any] = {}
                    if name.startswith("norm") or (name == "whole" and part in (0, 2)):
                        gated = part == 2 or "silu" in name
                        around = {"norm": (torch.ones(e, device=device).bfloat16(), 1e-6), "gated": gated}
                    elif name == "whole":
                        around = {"residual_O": torch.zeros(R, n, device=device).bfloat16()}
                    weight = torch.randn(n, e, device=device, dtype=torch.bfloat16) * e**-0.5
                    products.append((x, weight, around))
            measured(R, name, products, count)
            del products


if __name__ == "__main__":
    main()

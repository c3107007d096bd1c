"""Products of few rows: microseconds, beside the library's product and the floor, in variants.

    python benchmarks/few_rows.py --rows 1 32 --out benchmarks/results/FILE.json
    python benchmarks/few_rows.py --one 4,1024,4,1 8,512,4,1 --several 32,256,4,4

The projections of Qwen3-8B. Every product has weights of its own, together far more than the L2 cache; one CUDA graph of all.
The floor reads the weights once. "layer": the four of a decoder layer one after the other, with what "one" and "several" are by
default; "whole": with the norms, the activation and the sums of a layer, by the library one after the other. ``--one``,
``--several``: output features of a program, input features at a time, warps, stages.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from common import microseconds, write
from torch import Tensor

from kvpop.bench import read_bandwidth
from kvpop.ops.few_rows import linear
from kvpop.ops.few_rows import triton as kernel

SHAPES = {
    "q, k, v": (6144, 4096),
    "o": (4096, 4096),
    "gate, up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
}
LAYER = ("q, k, v", "o", "gate, up", "down")
GIGABYTES = 2.5

Product = tuple[Tensor, Tensor, dict[str, Any]]
"""x, weights, and what stands around them."""


def tile(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(","))
    if len(found) != 4:
        raise argparse.ArgumentTypeError(f"four numbers, got {text}")
    return found


def all_of(products: list[Product], impl: str) -> Tensor:
    for x, weight, around in products:
        out = linear(x, weight, **around, impl=impl)  # type: ignore[arg-type]
    return out


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES, "layer", "whole"], choices=[*SHAPES, "layer", "whole"])
    parser.add_argument("--one", type=tile, nargs="+", default=[kernel.ONE])
    parser.add_argument("--several", type=tile, nargs="+", default=[kernel.SEVERAL])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda")
    one, several, speed = kernel.ONE, kernel.SEVERAL, read_bandwidth(device)
    rows: list[dict[str, Any]] = []

    def measured(R: int, what: str, products: list[Product], count: int, tiles: list[Any]) -> None:
        size = sum(w.numel() for _, w, _ in products) * 2 / count
        shared = {"rows": R, "what": what, "floor_us": round(1e6 * size / speed, 2)}
        plain = microseconds(lambda: all_of(products, "reference"), count, options.repeats)
        found = [{**shared, "impl": "library", "us": round(plain, 2)}]
        x, weight, around = products[0]
        exact = {name: (y[0].double(), y[1]) if name == "norm" else y for name, y in around.items()}
        expected = linear(x.double(), weight.double(), **exact)
        for chosen in tiles:
            for overlap in (True, False):
                kernel.OVERLAP = overlap
                setattr(kernel, "ONE" if R == 1 else "SEVERAL", chosen)
                entry: dict[str, Any] = {**shared, "impl": "triton", "tile": chosen, "overlap": overlap}
                try:
                    entry["us"] = round(microseconds(lambda: all_of(products, "triton"), count, options.repeats), 2)
                    entry["error"] = float(
                        (linear(x, weight, **around, impl="triton") - expected).abs().max() / expected.std()
                    )
                except Exception as error:  # too large for the device
                    entry["failed"] = f"{type(error).__name__}: {error}"[:200]
                found.append(entry)
        for entry in found:
            rows.append(entry | ({"ratio": round(entry["us"] / entry["floor_us"], 3)} if "us" in entry else {}))
            print(json.dumps(rows[-1]), flush=True)
        write(options.out, "products of few rows", "python " + " ".join(sys.argv), rows, gb_per_s=round(speed / 1e9))

    for R in options.rows:
        tiles = options.one if R == 1 else options.several
        for name in options.shapes:
            several_products = name in ("layer", "whole")
            shapes = [SHAPES[n] for n in LAYER] if several_products else [SHAPES[name]]
            count = max(2, int(GIGABYTES * 1e9) // sum(2 * n * e for n, e in shapes))
            products: list[Product] = []
            for _ in range(count):
                for part, (n, e) in enumerate(shapes):
                    x = torch.randn(R, e, device=device).bfloat16()
                    around: dict[str, Any] = {}
                    if name == "whole" and part in (0, 2):
                        around = {"norm": (torch.ones(e, device=device).bfloat16(), 1e-6), "gated": part == 2}
                    elif name == "whole":
                        around = {"residual_O": torch.zeros(R, n, device=device).bfloat16()}
                    products.append((x, torch.randn(n, e, device=device, dtype=torch.bfloat16) * e**-0.5, around))
            measured(R, name, products, count, [one if R == 1 else several] if several_products else tiles)
            del products


if __name__ == "__main__":
    main()

"""The future mass of a layer on a GPU: the fused kernel beside the FlexAttention pass.

Random queries and keys, one document. Before anything is timed, each kernel's result is held against that of FlexAttention.
The floor is what the causal product alone takes at the peak of an H200. One JSON object a line.

    python benchmarks/future_mass.py --length 16384 65536 --tiles 128x64x8x3 --tiles 128x128x8x2
"""

from __future__ import annotations

import argparse
import json

import torch
from common import PEAK, milliseconds
from torch import Tensor

from kvpop.ops.future_mass import flex, triton

# Shapes: B batch, R query heads, H KV heads, S sequence, D head dim.

TOLERANCE = 1e-2
"""Nats between the two: both multiply bfloat16 and add in float32."""


def tiles(text: str) -> triton.Tiles:
    """KEYSxQUERIESxWARPSxSTAGES."""
    try:
        numbers = [int(part) for part in text.split("x")]
        return triton.Tiles(*numbers)
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(
            f"tiles are KEYSxQUERIESxWARPSxSTAGES, such as 128x64x8x3, got {text}"
        ) from None


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference in nats; infinite where only one of the two is."""
    if not torch.equal(found.isneginf(), expected.isneginf()):
        return float("inf")
    known = expected.isfinite()
    return float((found[known] - expected[known]).abs().max()) if known.any() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--power", type=float, default=1.0)
    parser.add_argument("--lookahead", type=int)
    parser.add_argument("--tiles", type=tiles, action="append", help="KEYSxQUERIESxWARPSxSTAGES; repeatable")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    B, R, H, D = args.batch, args.heads, args.kv_heads, args.head_dim
    for S in args.length:
        torch.manual_seed(S)
        q = torch.randn(B, R, S, D, device="cuda", dtype=torch.bfloat16)
        k = torch.randn(B, H, S, D, device="cuda", dtype=torch.bfloat16)
        lse = (torch.arange(1, S + 1, device="cuda").log() + 0.5).expand(B, R, S).contiguous()  # of unit normal logits
        end = torch.full((B, S), S, device="cuda")
        given = (q, k, lse, end, D**-0.5, args.window, args.power, args.lookahead)
        floor = 1e3 * B * 2 * (S * S / 2) * R * D / PEAK

        def report(impl: str, ms: float, **more: object) -> None:
            row = {"impl": impl, "S": S, "ms": round(ms, 4), "floor_ms": round(floor, 4), "ratio": round(ms / floor, 3)}  # noqa: B023
            print(json.dumps(row | more), flush=True)

        expected = flex.log_mass(*given)
        report("flex", milliseconds(lambda: flex.log_mass(*given), args.steps))  # noqa: B023
        for choice in args.tiles or [triton.HALF]:
            apart = difference(triton.log_mass(*given, choice), expected)
            if not apart <= TOLERANCE:
                raise SystemExit(f"S {S}, {choice}: {apart} nats from flex, at most {TOLERANCE} are allowed")
            ms = milliseconds(lambda: triton.log_mass(*given, choice), args.steps)  # noqa: B023
            report("triton", ms, tiles=vars(choice), max_difference=apart)


if __name__ == "__main__":
    main()

"""Training attention over the keys a budget keeps: dense flash, FlexAttention and Triton beside each other.

    python benchmarks/sparse_attention.py --lengths 16384 65536 --budget 4096 --out benchmarks/results/FILE.json
    python benchmarks/sparse_attention.py --impls triton --forward 128,128,8,3 128,64,8,4 --heads-shared 1 2 4 --kernels

Expiries are those of random scores. The floor is what the live (query, key) pairs alone cost at the GPU's dense bf16 peak:
two matrix products forward, five more backward. Every tile setting named is combined with every other; rows come as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import PEAK, milliseconds, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvpop.budget import Budget
from kvpop.core.cutoff import expiry
from kvpop.ops.sparse_attention import sparse_attention

# Shapes: B batch, R query heads, H KV heads, S sequence, D head dim.

NEAR = 1e-2
"""The largest relative root mean square error against float64: bf16 rounds to 0.4 % and a result is rounded a few times."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def attend_with(impl: str, live: int) -> Attend:
    def flash(q: Tensor, k: Tensor, v: Tensor, expiry_BHS: Tensor) -> tuple[Tensor, None]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), None

    def sparse(q: Tensor, k: Tensor, v: Tensor, expiry_BHS: Tensor) -> tuple[Tensor, Tensor]:
        scale = q.shape[-1] ** -0.5
        return sparse_attention(q, k, v, expiry_BHS, scale=scale, impl=impl, live=live)  # type: ignore[arg-type]

    return flash if impl == "flash" else sparse


def inputs(options: argparse.Namespace, R: int, H: int, S: int, budget: int) -> tuple[list[Tensor], Tensor]:
    """Random q, k, v and a cotangent, and the expiry of random scores under the budget (slots)."""
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float16  # the interpreter has no bfloat16
    shapes = [(options.batch, n, S, options.dim) for n in (R, H, H, R)]
    tensors = [torch.randn(shape, device=options.device, dtype=dtype) for shape in shapes]
    slots = Budget.of_slots(budget, sinks=min(4, budget - 1), window=min(options.window, budget // 2))
    return tensors, expiry(torch.randn(options.batch, H, S, device=options.device), slots)


def everything(attend: Attend, tensors: list[Tensor], expiry_BHS: Tensor) -> dict[str, Tensor]:
    """Output and the three gradients."""
    q, k, v, cotangent = tensors
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, _ = attend(*leaves, expiry_BHS)
    grads = torch.autograd.grad(out, leaves, cotangent)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative root mean square error of the four results."""
    return max(
        float((actual[name].double() - x.double()).norm() / x.double().norm().clamp(min=1e-30))
        for name, x in expected.items()
    )


def checked(impl: str, options: argparse.Namespace) -> float:
    """Error against float64 with one KV head, no longer than 4096 tokens. Raises ValueError if it is too large."""
    S = min(4096, *options.lengths)
    tensors, expiry_BHS = inputs(options, options.heads // options.kv_heads, 1, S, max(2, S // 4))
    if impl == "flash":
        expiry_BHS = torch.full_like(expiry_BHS, S)
    exact = everything(attend_with("reference", S), [x.double() for x in tensors], expiry_BHS)
    found = error(everything(attend_with(impl, S // 4), tensors, expiry_BHS), exact)
    if not found <= NEAR:
        raise ValueError(f"{impl} is wrong: relative error {found:.3g} against float64 at {S} tokens")
    return found


def checked_far(attend: Attend, tensors: list[Tensor], expiry_BHS: Tensor) -> float:
    """The same for the output of the last queries of a long sequence."""
    q, k, v, _ = tensors
    S, scale = q.shape[2], q.shape[-1] ** -0.5
    position_S = torch.arange(S, device=q.device)
    with torch.no_grad():
        last = attend(q, k, v, expiry_BHS)[0][:, :, -128:]
        exact, _ = sparse_attention(
            q[:, :, -128:].double(), k.double(), v.double(), expiry_BHS,
            scale=scale, q_pos_BQ=position_S[-128:].expand(len(q), -1), k_pos_BHT=position_S.expand(expiry_BHS.shape),
        )  # fmt: skip
    found = error({"out": last}, {"out": exact})
    if not found <= NEAR:
        raise ValueError(f"relative error {found:.3g} against float64 in the last queries of {S}")
    return found


def timed(run: Callable[[], Any], options: argparse.Namespace) -> float | None:
    """Median time of a call on the GPU; on a CPU, where nothing is measured, one call and None."""
    if options.device != "cuda":
        run()
        return None
    return milliseconds(run, options.repeats)


def kernel_times(run: Callable[[], Any], repeats: int = 5) -> dict[str, float]:
    """Milliseconds a call in each GPU kernel that takes more than 10 us."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    spent = {event.key[:60]: event.device_time_total / repeats / 1e3 for event in profile.key_averages()}
    return {name: round(ms, 4) for name, ms in sorted(spent.items(), key=lambda x: -x[1]) if ms > 0.01}


def measure(impl: str, options: argparse.Namespace, tensors: list[Tensor], expiry_BHS: Tensor) -> dict[str, Any]:
    S, dense = expiry_BHS.shape[-1], impl == "flash"
    births = torch.arange(S, device=expiry_BHS.device)
    stops = torch.full_like(expiry_BHS, S) if dense else expiry_BHS.clamp(max=S)
    pairs = int((stops.long() - births).clamp(min=0).sum()) * (options.heads // options.kv_heads)
    attend, (q, k, v, cotangent) = attend_with(impl, options.budget), tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v, expiry_BHS)

    def both() -> None:
        torch.autograd.grad(attend(*leaves, expiry_BHS)[0], leaves, cotangent)

    row: dict[str, Any] = {}
    if not dense:
        row["error_far"] = round(checked_far(attend, tensors, expiry_BHS), 5)
    for name, run, products in (("forward", forward, 2), ("forward_backward", both, 7)):
        ms, floor = timed(run, options), pairs * products * 2 * options.dim / PEAK * 1e3
        row[name] = {"ms": ms and round(ms, 3), "floor_ms": round(floor, 3), "ratio": ms and round(ms / floor, 2)}
    if options.kernels and options.device == "cuda":
        row["kernels_ms"] = kernel_times(both)
    if options.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        row["memory_mb"] = round((torch.cuda.max_memory_allocated() - before) / 1e6, 1)
    return row


def tilings(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Set each combination of tiles in turn, the defaults where none is named, and say what it is."""
    from kvpop.ops.sparse_attention import triton

    width = 64 if options.dim <= 64 else 128
    usual, chunk_of = triton.TILES[width], triton.chunk_of

    def tiles(named: list[str] | None, default: Any) -> list[Any]:
        return [triton.Tile(*map(int, name.split(","))) for name in named] if named else [default]

    for forward, queries, keys, shared, chunk in itertools.product(
        tiles(options.forward, usual.forward),
        tiles(options.queries, usual.queries),
        tiles(options.keys, usual.keys),
        options.heads_shared or [usual.heads],
        options.chunks or [None],
    ):
        if forward.rows != queries.rows:
            continue
        triton.TILES[width] = triton.Tiles(forward, queries, keys, shared)
        triton.chunk_of = chunk_of if chunk is None else lambda S, chunk=chunk: chunk
        yield {
            "forward": ",".join(map(str, vars(forward).values())),
            "queries": ",".join(map(str, vars(queries).values())),
            "keys": ",".join(map(str, vars(keys).values())),
            "heads_shared": shared,
            "chunk": chunk or "default",
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 65536])
    parser.add_argument("--budget", type=int, default=4096, help="slots of a KV head")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--impls", nargs="+", choices=["flash", "flex", "triton"], default=["flash", "flex", "triton"])
    for name, what in (("forward", "the forward pass"), ("queries", "dq"), ("keys", "dk and dv")):
        parser.add_argument(f"--{name}", nargs="+", metavar="ROWS,KEYS,WARPS,STAGES", help=f"tiles of {what}")
    parser.add_argument("--heads-shared", type=int, nargs="+", help="query heads that share the rows of a program")
    parser.add_argument("--chunks", type=int, nargs="+", help="tokens within which keys are sorted by expiry")
    parser.add_argument("--kernels", action="store_true", help="the time of every kernel too")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for impl in options.impls:
        for setting in tilings(options) if impl == "triton" else [None]:
            about: dict[str, Any] = {"impl": impl, "tiles": setting}
            try:
                about["error"] = round(checked(impl, options), 5)
                for S in options.lengths:
                    tensors, expiry_BHS = inputs(options, options.heads, options.kv_heads, S, options.budget)
                    rows.append({"S": S, **about, **measure(impl, options, tensors, expiry_BHS)})
                    print(json.dumps(rows[-1]), flush=True)
            except Exception as problem:  # a tile too large for the GPU must not end the others
                rows.append({**about, "failed": f"{type(problem).__name__}: {problem}"[:300]})
                print(json.dumps(rows[-1]), flush=True)
    write(
        options.out,
        f"training attention, {options.heads} query and {options.kv_heads} KV heads of {options.dim}, batch {options.batch}, "
        f"budget {options.budget}, window {options.window}, bf16",
        "python benchmarks/sparse_attention.py " + " ".join(sys.argv[1:]), rows,
    )  # fmt: skip
    sys.exit(any("failed" in row for row in rows))


if __name__ == "__main__":
    main()

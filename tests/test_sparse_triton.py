"""Sparse attention in Triton, interpreted without a GPU: lists against a loop, results and every gradient against float64.

The tolerance is measured, not chosen: what plain PyTorch makes of the same low-precision inputs, doubled.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from kvpop.budget import Budget
from kvpop.core import cutoff
from kvpop.ops.sparse_attention import NEVER, blocks, flex, keep_mask, sparse_attention
from tests.test_flex_gpu import eager_attention, no_further, poison

# Shapes: B batch, R = H * G query heads, H KV heads, G query heads per KV head, S sequence, D key dim, V value dim.

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
HALF = torch.bfloat16 if GPU else torch.float16  # the interpreter multiplies the bits of bfloat16
pytestmark = [pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")]
if GPU:
    pytestmark.append(pytest.mark.gpu)

BUDGET = Budget(sinks=2, window=9, long=20)
SHAPES = [
    # dtype, B, H, G, S, D, V
    (torch.float32, 1, 2, 4, 70, 64, 64),
    (torch.float32, 2, 1, 1, 33, 80, 96),
    (HALF, 1, 2, 4, 150, 128, 128),
    (HALF, 1, 2, 3, 131, 64, 80),
    (HALF, 1, 1, 8, 200, 96, 64),
    (HALF, 2, 2, 1, 1, 64, 64),
]
if GPU:
    SHAPES += [(HALF, 1, 2, 4, 2500, 128, 128), (HALF, 2, 2, 3, 1337, 64, 64), (torch.float32, 1, 2, 8, 1000, 128, 128)]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def expiries(kind: str, B: int, H: int, S: int, seed: int = 0) -> Tensor:
    """Expiries [B, H, S]: those of random scores, of the running top-k of one document or of two, or of no eviction."""
    generator = torch.Generator().manual_seed(seed)
    birth, chance = torch.arange(S), torch.rand(3, B, H, S, generator=generator)
    if kind == "never":
        return torch.full((B, H, S), NEVER, device=DEVICE)
    if kind == "nobody":
        return birth.expand(B, H, S).to(DEVICE)
    if kind == "top-k":
        return cutoff.expiry(chance[0], BUDGET).to(DEVICE)
    if kind == "packed":
        cut = S // 3
        first, second = cutoff.expiry(chance[0, ..., :cut], BUDGET), cutoff.expiry(chance[0, ..., cut:], BUDGET)
        shifted = torch.where(second < NEVER, second + cut, second)
        return torch.cat([first.clamp(max=cut), shifted], -1).to(DEVICE)
    expiry = birth + 1 + S // 10 - (chance[0].log() * S / 4).long()
    expiry[chance[1] < 0.1] = 2**40  # beyond int32
    expiry = torch.where(chance[2] < 0.1, birth - 3, expiry)  # never read, not even by themselves
    expiry[0, 0, : S // 5] = 0  # queries without a key
    return expiry.to(DEVICE)


def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, all of different sizes: many rounds of every loop in short sequences."""
    from kvpop.ops.sparse_attention import triton

    tiles = triton.Tiles(triton.Tile(64, 16, 4, 2), triton.Tile(64, 32, 4, 1), triton.Tile(32, 16, 4, 2), heads=4)
    monkeypatch.setattr(triton, "TILES", {64: tiles, 128: tiles})
    monkeypatch.setattr(triton, "SCAN", 32)
    monkeypatch.setattr(triton, "chunk_of", lambda S: 48)


def check(shape: tuple, expiry: Tensor, live: int | None = None) -> None:
    """Forward pass and all gradients, through the output and through the LSE, against float64."""
    dtype, B, H, G, S, D, V = shape
    leaves = [random(i, B, n, S, X).to(dtype) for i, (n, X) in enumerate([(H * G, D), (H, D), (H, V)])]
    out_cotangent, lse_cotangent = random(3, B, H * G, S, V).to(dtype), random(4, B, H * G, S)
    position, scale = torch.arange(S, device=DEVICE), D**-0.5
    keep = keep_mask(expiry, position.expand(B, S), position.expand(B, H, S))

    def results(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in leaves)
        if how == "eager":
            out, lse = eager_attention(q, k, v, keep, scale)
        else:
            out, lse = sparse_attention(q, k, v, expiry, scale=scale, impl=how, live=live)  # type: ignore[arg-type]
        seen = lse.masked_fill(lse.isneginf(), 0.0)
        loss = (out * out_cotangent.to(dtype)).sum() + (seen * lse_cotangent.to(lse.dtype)).sum()
        grads = torch.autograd.grad(loss, (q, k, v))
        return dict(out=out.detach(), lse=lse.detach(), dq=grads[0], dk=grads[1], dv=grads[2])

    exact, eager = results("reference", torch.float64), results("eager", dtype)
    if GPU:
        poison()
    actual = results("triton", dtype)
    assert actual["out"].dtype == dtype
    assert actual["lse"].dtype == torch.float32
    assert (actual["out"][actual["lse"].isneginf()] == 0).all()
    # Weights are made again as exp(logit - LSE), each rounded once and the LSE twice (it was stored), where eager kept its own.
    finite = exact["lse"][~exact["lse"].isinf()].abs()
    again = 3 * 2**-24 * float(finite.max()) if dtype == torch.float32 and finite.numel() else 0.0
    for name, expected in exact.items():
        no_further(actual[name], eager[name], expected, name, again if name[0] == "d" else 0.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_and_its_gradients(shape: tuple) -> None:
    B, H, S = shape[1], shape[2], shape[4]
    check(shape, expiries("random", B, H, S, seed=S))


@pytest.mark.parametrize(
    ("kind", "G"), [("random", 1), ("random", 4), ("top-k", 4), ("packed", 2), ("never", 2), ("nobody", 1)]
)
def test_small_tiles(kind: str, G: int, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow(monkeypatch)
    S = 900 if GPU else 90
    check((HALF, 1, 2, G, S, 64, 64), expiries(kind, 1, 2, S, seed=G))


@pytest.mark.parametrize("live", [1, 40, BUDGET.slots])
def test_the_bound_changes_nothing_but_memory(live: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that do not fit, that fit in some blocks only, and that all fit."""
    narrow(monkeypatch)
    S = 900 if GPU else 90
    expiry = expiries("random" if live == 40 else "top-k", 1, 2, S)
    check((HALF, 1, 2, 2, S, 64, 64), expiry, live)


def listed_by_loop(expiry: list[int], first: int, last: int) -> tuple[list[int], list[int]]:
    sees = {t: [t <= q < expiry[t] for q in range(first, last + 1)] for t in range(last + 1)}
    return [t for t, x in sees.items() if all(x)], [t for t, x in sees.items() if any(x) and not all(x)]


@pytest.mark.parametrize("kind", ["random", "top-k", "packed", "never", "nobody"])
def test_lists_are_what_a_loop_finds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpop.ops.sparse_attention import triton

    monkeypatch.setattr(triton, "SCAN", 32)
    B, H, S = 2, 1, 70
    expiry = blocks.lifetimes(expiries(kind, B, H, S))[1]
    for block, live in [(64, None), (16, 7), (16, BUDGET.slots)]:
        keys, counts = triton.key_lists(expiry, block, live)
        assert keys.shape[:3] == counts.shape[:3] == (B, H, -(-S // block))
        assert live is None or keys.shape[-1] == live + block - 1
        for b in range(B):
            for h in range(H):
                for n in range(keys.shape[2]):
                    first = n * block
                    always, sometimes = listed_by_loop(expiry[b, h].tolist(), first, min(first + block, S) - 1)
                    assert counts[b, h, n].tolist() == [len(always), len(always) + len(sometimes)]
                    if live is None or (kind in ("top-k", "packed") and live == BUDGET.slots):
                        assert len(always) + len(sometimes) <= keys.shape[-1]
                    if len(always) + len(sometimes) <= keys.shape[-1]:
                        assert keys[b, h, n, : len(always) + len(sometimes)].tolist() == always + sometimes


@pytest.mark.parametrize("S", [1, 100, 128, 300])
def test_key_tiles_hold_every_key_and_the_longest_come_first(S: int) -> None:
    from kvpop.ops.sparse_attention import triton

    expiry = blocks.lifetimes(expiries("random", 2, 3, S))[1]
    for chunk, size in [(48, 16), (1024, 128), (100, 64)]:
        order = triton.expiry_order(expiry, chunk)
        assert order.dtype == torch.int32
        assert torch.equal(order.long(), flex.expiry_order(expiry, chunk))
        jobs, spans = triton.schedule(order, expiry, size), []
        assert torch.equal(jobs.sort().values.long(), torch.arange(6 * -(-S // size), device=DEVICE))
        for job in jobs.tolist():
            head, tile = divmod(job, -(-S // size))
            keys = order.flatten(0, 1)[head, tile * size : (tile + 1) * size].tolist()
            lives = [(t, min(S, int(expiry.flatten(0, 1)[head, t]))) for t in keys]
            lives = [(birth, stop) for birth, stop in lives if stop]
            spans.append(max(stop for _, stop in lives) - min(birth for birth, _ in lives) if lives else -S)
        assert spans == sorted(spans, reverse=True)


def test_it_is_bit_for_bit_repeatable_in_any_memory_layout() -> None:
    S = 2000 if GPU else 70
    q, k, v = random(0, 2, 4, S, 64).to(HALF), random(1, 2, 2, S, 64).to(HALF), random(2, 2, 2, S, 64).to(HALF)
    out_cotangent, lse_cotangent = random(3, 2, 4, S, 64).to(HALF), random(4, 2, 4, S)
    expiry, found = expiries("random", 2, 2, S), []
    for layout in (lambda x: x, lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)):
        leaves = [layout(x).clone().requires_grad_() for x in (q, k, v)]
        out, lse = sparse_attention(*leaves, expiry, scale=0.2, impl="triton")
        lse = lse.masked_fill(lse.isneginf(), 0.0)
        grads = torch.autograd.grad((out, lse), leaves, (layout(out_cotangent), lse_cotangent))
        found.append([out, lse, *grads])
    for other in found[1:]:
        for first, again in zip(found[0], other, strict=True):
            assert torch.equal(first, again)


@pytest.mark.parametrize("which", ["out", "lse", "queries", "keys"])
def test_gradients_that_nobody_asks_for_are_not_needed(which: str) -> None:
    """A loss of one result only, and leaves of which some have no gradient."""
    S = 70
    q, k, v = random(0, 1, 2, S, 64), random(1, 1, 1, S, 64), random(2, 1, 1, S, 64)
    wanted = {"queries": [q], "keys": [k]}.get(which, [q, k, v])
    for x in wanted:
        x.requires_grad_()
    expiry, found = expiries("random", 1, 1, S), []
    for impl in ("reference", "triton"):
        out, lse = sparse_attention(q, k, v, expiry, scale=0.1, impl=impl)  # type: ignore[arg-type]
        lse = lse.masked_fill(lse.isneginf(), 0.0)
        loss = {"out": out.square().sum(), "lse": lse.square().sum()}.get(which, (out * lse[..., None]).sum())
        found.append(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
    for expected, actual in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_what_it_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = random(0, 1, 2, 8, 64), random(1, 1, 1, 8, 64)
    expiry, bias = torch.full((1, 1, 8), NEVER, device=DEVICE), torch.zeros(1, 1, 8, device=DEVICE)
    now, places = torch.arange(8, device=DEVICE).expand(1, 8), torch.arange(8, device=DEVICE).expand(1, 1, 8)

    def run(q: Tensor, k: Tensor, scale: float = 0.1, **options: object) -> None:
        sparse_attention(q, k, k, expiry, scale=scale, impl="triton", **options)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="with positions carries no gradient"):
        run(q.clone().requires_grad_(), k, q_pos_BQ=now, k_pos_BHT=places)
    with pytest.raises(ValueError, match="takes no bias; use impl='flex' or impl='reference'"):
        run(q, k, bias_BHT=bias)
    with pytest.raises(ValueError, match="one of float32, float16 and bfloat16"):
        run(q.double(), k.double())
    with pytest.raises(ValueError, match="one of float32, float16 and bfloat16"):
        run(q, k.half())
    with pytest.raises(ValueError, match="head dims up to 128, got 129"):
        run(random(0, 1, 2, 8, 129), random(1, 1, 1, 8, 129))
    with pytest.raises(ValueError, match="positive scale"):
        run(q, k, scale=0.0)
    with pytest.raises(ValueError, match="live must be at least 1 key"):
        run(q, k, live=0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a GPU; use impl='reference'"):
        sparse_attention(q.cpu(), k.cpu(), k.cpu(), expiry.cpu(), scale=0.1, impl="triton")

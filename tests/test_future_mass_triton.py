"""The fused future mass against float64, on a GPU or in Triton's interpreter.

The tolerance is measured, not chosen: plain PyTorch computes the same thing from the same low-precision inputs, and the kernel
may be no further from float64 than twice that. Every call sees fresh random data.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from kvpop.ops.future_mass import future_log_mass
from kvpop.ops.sparse_attention import NEVER, sparse_attention

# Shapes: B batch, R = H * G query heads, H KV heads, G query heads per KV head, S sequence, D head dim.

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
HALF = torch.bfloat16 if GPU else torch.float16  # the interpreter multiplies the bits of bfloat16
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
LONGER = 8 if GPU else 1
"""A GPU takes longer sequences: more blocks of every kind."""


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def packed_end(B: int, S: int) -> Tensor:
    """One past the last token of each token's document [B, S]: a row that is one document, then rows of two and padding."""
    end = torch.full((B, S), S)
    end[1:, : S // 3] = S // 3
    end[1:, S // 3 :] = S - S // 8
    end[1:, S - S // 8 :] = 0
    return end.to(DEVICE)


def sparse_lse(q: Tensor, k: Tensor, window: int, scale: float, seed: int) -> Tensor:
    """Of queries that see their window and few older keys, so that some probabilities are above 1; some see nothing."""
    B, H, S, _ = k.shape
    birth = torch.arange(S)
    chance = torch.rand(B, H, S, generator=torch.Generator().manual_seed(seed))
    expiry = torch.where(chance < 0.1, NEVER, birth + window)
    expiry[0, 0, : S // 5] = 0  # nothing is left for the first queries of a head
    return sparse_attention(q.float(), k.float(), k.float(), expiry.to(DEVICE), scale=scale)[1]


def plain_mass(
    q: Tensor, k: Tensor, lse: Tensor, end: Tensor, scale: float, window: int, power: float, lookahead
) -> Tensor:
    """Products in the dtype given, the rest in float32: what one writes without a fused kernel."""
    S, G = q.shape[2], q.shape[1] // k.shape[1]
    d, t = torch.arange(S, device=DEVICE), torch.arange(S, device=DEVICE)[:, None]
    allowed = (d >= t + window) & (d < end[..., None])
    if lookahead is not None:
        allowed &= d <= t + window + lookahead
    logits = ((k.repeat_interleave(G, dim=1) @ q.mT) * scale).float()
    share = power * (logits - lse.masked_fill(lse.isneginf(), torch.inf)[:, :, None])
    return share.masked_fill(~allowed[:, None], -torch.inf).logsumexp(-1)


def no_further(actual: Tensor, plain: Tensor, exact: Tensor, name: str) -> None:
    """Root mean square and largest error of ``actual`` against twice those of ``plain``; infinities must agree."""
    assert actual.dtype == torch.float32
    assert torch.equal(actual.isneginf(), exact.isneginf()), name
    known = ~exact.isneginf()
    got, allowed = ((x.double() - exact)[known].abs() for x in (actual, plain))
    if got.numel():
        # where there are few numbers, plain float32 may be right to the last bit
        floor = torch.finfo(torch.float32).eps * float(exact[known].abs().max().clamp(min=1))
        assert got.square().mean().sqrt() <= 2 * allowed.square().mean().sqrt() + floor, name  # False for NaN
        assert got.max() <= 2 * allowed.max() + floor, name


def compare(
    shape, dtype: torch.dtype, window: int, power: float, lookahead: int | None, tiles=None, seed: int = 0
) -> None:
    from kvpop.ops.future_mass import triton

    B, H, G, S, D = shape
    q, k = normal(B, H * G, S, D, dtype=dtype, seed=seed), normal(B, H, S, D, dtype=dtype, seed=seed + 1)
    scale, end = D**-0.5, packed_end(B, S)
    lse = sparse_lse(q, k, window, scale, seed)
    arguments = (scale, window, power, lookahead)
    names = dict(zip(("scale", "window", "power", "lookahead"), arguments))
    exact = future_log_mass(q.double(), k.double(), lse.double(), end, **names)
    plain = plain_mass(q, k, lse, end, *arguments)
    actual = triton.log_mass(q, k, lse, end, *arguments, tiles)
    no_further(actual, plain, exact, f"{shape}, {dtype}, {arguments}, {tiles}")


SHAPES = [
    # B, H, G, S, D
    (2, 1, 1, 150, 64),
    (1, 2, 3, 97, 80),
    (1, 1, 4, 200, 96),
    (1, 1, 8, 131, 128),
    (1, 2, 1, 1, 64),
]


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mass_is_that_of_float64(shape, dtype: torch.dtype) -> None:
    B, H, G, S, D = shape
    S = S * LONGER - 3 * (LONGER > 1)
    for seed, (window, power, lookahead) in enumerate([(1, 1.0, None), (20, 2.0, 0), (140, 4.0, None), (9, 1.0, 70)]):
        compare((B, H, G, S, D), dtype, window, power, lookahead, seed=2 * seed)


@needs_triton
@pytest.mark.parametrize(("keys", "queries"), [(16, 16), (64, 16), (16, 64), (128, 32)])
def test_mass_does_not_depend_on_the_tiles(keys: int, queries: int) -> None:
    """Small tiles, so that there are blocks before, in and behind the part that needs no mask."""
    from kvpop.ops.future_mass.triton import Tiles

    tiles = Tiles(keys, queries, warps=4, stages=2)
    for seed, (window, lookahead) in enumerate([(1, None), (17, 40), (90, None), (5, 0)]):
        compare((2, 1, 1, 150, 64), HALF, window, 1.0, lookahead, tiles, seed=seed)


@needs_triton
def test_probabilities_above_one_and_far_below() -> None:
    """Masses of e^30 and e^-300: neither overflows or is lost, whatever came before it in the sum."""
    q, k = normal(1, 2, 150, 64, dtype=HALF, seed=0), normal(1, 1, 150, 64, dtype=HALF, seed=1)
    end = packed_end(1, 150)
    lse = torch.linspace(-40, 300, 150, device=DEVICE).expand(1, 2, 150).clone()
    lse[:, 1] = lse[:, 1].flip(-1)
    for power in (1.0, 4.0):
        exact = future_log_mass(q.double(), k.double(), lse.double(), end, scale=0.125, window=3, power=power)
        plain = plain_mass(q, k, lse, end, 0.125, 3, power, None)
        actual = future_log_mass(q, k, lse, end, scale=0.125, window=3, power=power, impl="triton")
        assert exact.max() > 30
        assert exact[exact.isfinite()].min() < -200
        no_further(actual, plain, exact, f"power {power}")


@needs_triton
def test_queries_without_keys_send_nothing() -> None:
    q, k = normal(1, 2, 60, 64, dtype=HALF, seed=0), normal(1, 1, 60, 64, dtype=HALF, seed=1)
    lse = torch.full((1, 2, 60), -torch.inf, device=DEVICE)
    found = future_log_mass(q, k, lse, packed_end(1, 60), scale=0.1, window=2, impl="triton")
    assert found.isneginf().all()
    lse[0, 1, 40] = 1.0  # one query speaks: to the keys at least 2 before it
    found = future_log_mass(q, k, lse, packed_end(1, 60), scale=0.1, window=2, impl="triton")
    assert found[0, 0].isneginf().all()
    assert found[0, 1].isfinite().nonzero().flatten().tolist() == list(range(39))
    expected = 0.1 * (k[0, 0, :39].float() @ q[0, 1, 40].float()) - 1.0
    torch.testing.assert_close(found[0, 1, :39], expected, rtol=1e-3, atol=1e-3)


@needs_triton
def test_any_layout_and_limits_beyond_the_sequence() -> None:
    """Heads as views of [B, S, R, D], an expanded end of no document, a window and a lookahead of more than 32 bits."""
    B, R, H, S, D = 2, 4, 2, 100, 64
    q, k = (
        normal(B, S, R, D, dtype=HALF, seed=0).transpose(1, 2),
        normal(B, S, H, D, dtype=HALF, seed=1).transpose(1, 2),
    )
    lse = normal(B, S, R, dtype=torch.float32, seed=2).transpose(1, 2)
    end = torch.full((1, 1), 2**40, device=DEVICE).expand(B, S)
    plain = [x.contiguous() for x in (q, k, lse, end)]
    for options in ({"window": 5}, {"window": 5, "lookahead": 2**40}, {"window": 2**40, "lookahead": 2**40}):
        found = future_log_mass(q.requires_grad_(), k, lse, end, scale=0.1, impl="triton", **options)
        again = future_log_mass(*plain, scale=0.1, impl="triton", **options)
        assert torch.equal(found, again)
        assert not found.requires_grad
        reference = future_log_mass(*plain, scale=0.1, **options)
        assert torch.equal(found.isneginf(), reference.isneginf())
    channels_apart = q.detach().transpose(2, 3).contiguous().transpose(2, 3)
    first = future_log_mass(channels_apart, k, lse, end, scale=0.1, window=5, impl="triton")
    assert torch.equal(first, future_log_mass(*plain, scale=0.1, window=5, impl="triton"))


@needs_triton
def test_no_tokens_no_mass() -> None:
    empty = torch.zeros(1, 2, 0, 64, device=DEVICE)
    end = torch.zeros(1, 0, dtype=torch.long, device=DEVICE)
    assert future_log_mass(empty, empty, empty[..., 0], end, scale=1.0, window=1, impl="triton").shape == (1, 2, 0)


@needs_triton
def test_what_cannot_run_is_refused() -> None:
    q, lse, end = torch.zeros(1, 1, 4, 64, device=DEVICE), torch.zeros(1, 1, 4, device=DEVICE), torch.full((1, 4), 4)
    end = end.to(DEVICE)
    with pytest.raises(ValueError, match="float64"):
        future_log_mass(q.double(), q.double(), lse, end, scale=1.0, window=1, impl="triton")
    with pytest.raises(ValueError, match="both in the same"):
        future_log_mass(q, q.half(), lse, end, scale=1.0, window=1, impl="triton")
    wide = torch.zeros(1, 1, 4, 512, device=DEVICE)
    with pytest.raises(ValueError, match="up to 256 channels, got 512"):
        future_log_mass(wide, wide, lse, end, scale=1.0, window=1, impl="triton")


def test_without_a_gpu_or_the_interpreter_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    q = torch.zeros(1, 1, 4, 64)
    with pytest.raises(ValueError, match="impl='triton' needs a GPU: use impl='reference'"):
        future_log_mass(q, q, q[..., 0], torch.full((1, 4), 4), scale=1.0, window=1, impl="triton")

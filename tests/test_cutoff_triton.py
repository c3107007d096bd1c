"""The kernels of the cutoff against the wavelet matrix and against sorting every prefix."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor

from kvpop.budget import Budget
from kvpop.core import cutoff
from kvpop.core.cutoff import dropped, expiry, kernel_or_parallel, ranks, running_cutoff, running_cutoffs
from tests.test_cache_step import DEVICE, GPU, needs_triton

LENGTHS = [1, 2, 3, 5, 64, 100, 1000, 4097]
SPECIAL = (math.nan, -math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, -1e-45, 3e38)


def made(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Priorities, most of them tied with others, some of them special."""
    g = torch.Generator().manual_seed(seed + shape[-1])
    x = torch.randn(shape, generator=g)
    x = torch.where(torch.rand(shape, generator=g) < 0.3, torch.randint(-2, 3, shape, generator=g).float(), x)
    special = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), shape, generator=g)]
    return torch.where(torch.rand(shape, generator=g) < 0.2, special, x).to(DEVICE, dtype)


def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, of different sizes: several of them in short rows."""
    from kvpop.ops.cutoff import triton

    tiles = triton.Tiles(sort=triton.Tile(64, 4), build=triton.Tile(32, 4), ask=triton.Tile(64, 4))
    monkeypatch.setattr(triton, "FEW", tiles)


@needs_triton
@pytest.mark.parametrize("A", LENGTHS)
def test_cutoffs_are_those_of_the_wavelet_matrix(A: int) -> None:
    shape = (3, 2, A) if A < 1000 else (2, A)
    rank = torch.rand(shape, generator=torch.Generator().manual_seed(A)).argsort(-1).to(DEVICE)
    ks = [0, 1, A // 2, A - 1, A, A + 5, (A // 2, 0), (A + 1, 1), A]
    found, expected = (running_cutoffs(rank, ks, impl) for impl in ("triton", "parallel"))
    for k, a, b in zip(ks, found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
        if A <= 100:
            assert torch.equal(a, running_cutoff(rank, k, "brute"))


@needs_triton
@pytest.mark.parametrize("A", [31, 32, 33, 127, 128, 129])
@pytest.mark.parametrize("small", [False, True])
def test_lengths_around_words_and_powers_of_two(A: int, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if small:
        narrow(monkeypatch)
    rank = torch.rand(1, A, generator=torch.Generator().manual_seed(A)).argsort(-1).to(DEVICE)
    for k in (1, A // 3, A):
        assert torch.equal(running_cutoff(rank, k, "triton"), running_cutoff(rank, k, "brute"))
    rank = torch.stack([torch.arange(A), torch.arange(A).flip(0)]).to(DEVICE)
    assert torch.equal(running_cutoff(rank, 7, "triton"), running_cutoff(rank, 7, "brute"))


@needs_triton
@pytest.mark.parametrize("S", LENGTHS)
def test_expiries_with_ties_and_special_values(S: int) -> None:
    draw = random.Random(S)
    x = made(*((2, 2, S) if S < 1000 else (1, S)))
    for i in range(1 if S > 1000 else 3):
        k = (0, 1, S // 2, S - 1, S, S + 5)[draw.randrange(6)] if i else S // 3
        budget = Budget(draw.randrange(4), draw.randint(1, 6), k)
        found = expiry(x, budget, "triton")
        assert (found.dtype, found.shape) == (torch.int32, x.shape)
        assert torch.equal(found, expiry(x, budget, "parallel"))
        if S <= 100:
            assert torch.equal(found, expiry(x, budget, "brute"))


@needs_triton
@pytest.mark.parametrize("S", [5, 70, 333])
def test_rows_of_several_blocks(S: int, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow(monkeypatch)
    x = made(1, 2, S)
    for budget in (Budget(1, 3, S // 4), Budget(S // 2, 1, 2), Budget(S, 2, 3), Budget(S + 3, 2, 3)):
        assert torch.equal(expiry(x, budget, "triton"), expiry(x, budget, "parallel"))


@needs_triton
@pytest.mark.parametrize("pinned", [False, True])
def test_budgets_by_head_and_pinned_tokens(pinned: bool) -> None:
    x = made(2, 3, 90, seed=5)
    budget = Budget(2, 4, 0).with_heads((20, 30, 7))
    marks = torch.rand(x.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.03 if pinned else None
    found, expected = (expiry(x, budget, impl, marks) for impl in ("triton", "parallel"))
    assert torch.equal(found, expected)
    assert torch.equal(expiry(x[0], budget, "triton", None if marks is None else marks[0]), found[0])
    if pinned:  # one mark for all heads
        marks = (torch.arange(90, device=DEVICE) % 40 == 3).expand(x.shape)
        assert torch.equal(expiry(x, Budget(2, 4, 11), "triton", marks), expiry(x, Budget(2, 4, 11), "parallel", marks))


@needs_triton
def test_numbers_by_head_may_be_none_and_all() -> None:
    x = made(2, 4, 40)
    ks = (0, 41, 40, 5)
    for impl in ("parallel", "brute"):
        assert torch.equal(dropped(x, ks, "triton"), dropped(x, ks, impl))
    assert dropped(x, ks, "triton").dtype == torch.int64


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_any_dtype_and_strides(dtype: torch.dtype) -> None:
    x = made(2, 2, 77, dtype=dtype)
    if dtype == torch.float64:
        x += (
            torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(x) * 1e-12
        )  # more than float32 can tell apart
    budget = Budget(1, 2, 9)
    assert torch.equal(expiry(x, budget, "triton"), expiry(x, budget))
    marks = torch.arange(77, device=DEVICE).expand(x.shape) % 20 == 0
    assert torch.equal(expiry(x, budget, "triton", marks), expiry(x, budget, pinned_XS=marks))
    assert torch.equal(expiry(x.mT[..., :3, :], Budget(0, 1, 1), "triton"), expiry(x.mT[..., :3, :], Budget(0, 1, 1)))
    rank = ranks(x).mT.contiguous().mT
    assert torch.equal(running_cutoff(rank, 9, "triton"), running_cutoff(rank, 9))


@needs_triton
@pytest.mark.parametrize("shape", [(0,), (2, 3, 0), (0, 5), (0, 3, 5)])
def test_nothing(shape: tuple[int, ...]) -> None:
    rank = torch.zeros(shape, dtype=torch.long, device=DEVICE)
    assert running_cutoff(rank, 2, "triton").shape == shape
    assert dropped(rank.float(), 2, "triton").shape == shape
    found = expiry(rank.float(), Budget(1, 2, 3), "triton")
    assert (found.shape, found.dtype) == (shape, torch.int32)


@needs_triton
def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = torch.zeros(2, 3, 4, dtype=torch.long, device=DEVICE)
    for k, error in {-1: "at least 0 tokens, got -1", (1, 2): "2 numbers of slots do not fit"}.items():
        with pytest.raises(ValueError, match=error):
            running_cutoff(rank, k, "triton")
        with pytest.raises(ValueError, match=error):
            dropped(rank.float(), k, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="impl='triton' needs a GPU, got a tensor on cpu: use impl='parallel'"):
        running_cutoff(rank.cpu(), 2, "triton")
    with pytest.raises(ValueError, match="impl='triton' needs a GPU"):
        expiry(rank.cpu().float(), Budget(1, 2, 3), "triton")


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutoff, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="impl='triton' needs Triton, which is not installed: use impl='parallel'"):
        expiry(torch.zeros(2, 3), Budget(1, 2, 3), "triton")
    with pytest.raises(ValueError, match="not installed"):
        running_cutoff(torch.arange(4), 2, "triton")


def test_the_choice_off_a_gpu() -> None:
    assert kernel_or_parallel(torch.zeros(3)) == "parallel"


@needs_triton
@pytest.mark.skipif(not GPU, reason="needs a GPU: the interpreter has one thread, so nothing races")
@pytest.mark.parametrize(("rows", "S"), [(8, 16384), (288, 16384), (300, 4100), (2, 131072), (129, 33000), (1000, 700)])
def test_long_rows_again_and_again(rows: int, S: int) -> None:
    """Every thread must see what others have written."""
    x, budget = made(rows, S), Budget(4, 64, S // 5)
    marks = torch.arange(S, device=DEVICE).expand(x.shape) % 97 == 0
    plain, pinned = expiry(x, budget), expiry(x, budget, pinned_XS=marks)
    rank = ranks(x)
    cutoffs = running_cutoff(rank, S // 5)
    for _ in range(10):
        assert torch.equal(expiry(x, budget, "triton"), plain)
        assert torch.equal(expiry(x, budget, "triton", marks), pinned)
        assert torch.equal(running_cutoff(rank, S // 5, "triton"), cutoffs)


@needs_triton
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_the_host_waits_for_nothing() -> None:
    x = made(8, 1000)
    assert kernel_or_parallel(x) == "triton"
    expiry(x, Budget(4, 64, 100), "triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        expiry(x, Budget(4, 64, 90), "triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_triton
def test_ranks_in_another_layout() -> None:
    x = torch.stack([torch.randperm(9) for _ in range(5)]).to(DEVICE)
    (expected,) = running_cutoffs(x, [3], "parallel")
    (found,) = running_cutoffs(x.t().contiguous().t(), [3], "triton")
    assert torch.equal(found, expected)

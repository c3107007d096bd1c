"""The product for few rows against float64."""

from __future__ import annotations

import pytest
import torch

from kvpop.ops.few_rows import kernel_or_reference, linear
from tests.test_cache_step import DEVICE, GPU, HALF, needs_triton

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def made(rows: tuple[int, ...], E: int, N: int, dtype: torch.dtype, bias: bool) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(E + N)
    x, w, b = (torch.randn(*s, generator=g).to(DEVICE, dtype) for s in ((*rows, E), (N, E), (N,)))
    return x, w * E**-0.5, b if bias else None


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF][: 3 if GPU else 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (1, 1), (2, 1), (17,), (64,)])
@pytest.mark.parametrize(("E", "N"), [(64, 48), (96, 7), (576, 130), (1536, 33), (3000, 5)])
def test_it_is_the_product(rows: tuple[int, ...], E: int, N: int, bias: bool, dtype: torch.dtype) -> None:
    x, w, b = made(rows, E, N, dtype, bias)
    expected = torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double())
    got = linear(x, w, b, impl="triton")
    assert got.dtype == dtype
    assert got.shape == (*rows, N)
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@needs_triton
@pytest.mark.parametrize("rows", [(1, 1), (3, 1), (20,)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("norm", "gated", "residual"), [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 1, 1)])
@pytest.mark.parametrize(("E", "N"), [(96, 14), (576, 130)])
def test_what_stands_around_it(
    E: int, N: int, norm: int, gated: int, residual: int, bias: bool, rows: tuple[int, ...]
) -> None:
    for dtype in (torch.float32, HALF):
        x, w, b = made(rows, E, N, dtype, bias)
        x *= 3
        g, rest = made((1,), E, E, dtype, True)[2], made(rows, N // 2 if gated else N, 3, dtype, False)[0]
        found = []
        for d, impl in ((torch.float64, "reference"), (dtype, "triton")):
            x_, w_, b_, g_, rest_ = (None if y is None else y.to(d) for y in (x, w, b, g, rest))
            options = dict(norm=(g_, 1e-5) if norm else None, gated=bool(gated), residual_O=rest_ if residual else None)
            found.append(linear(x_, w_, b_, **options, impl=impl))
        assert found[1].dtype == dtype
        torch.testing.assert_close(found[1].double(), found[0], rtol=TOLERANCE[dtype], atol=3 * TOLERANCE[dtype])


@needs_triton
def test_one_row_next_to_others_is_the_same() -> None:
    x, w, b = made((5,), 96, 40, torch.float32, True)
    together = linear(x, w, b, impl="triton")
    for i in range(5):
        torch.testing.assert_close(linear(x[i], w, b, impl="triton"), together[i], rtol=1e-5, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("gated", [False, True])
def test_products_in_pieces_one_after_the_other(gated: bool) -> None:
    """The last piece to arrive leaves the counters as they were, for the next product of other rows."""
    from kvpop.ops.few_rows.triton import division, most_tiles

    x, w, _ = made((9,), 1200, 70, torch.float32, False)
    assert division(35 if gated else 70, 1200, gated)[2] == 8
    arrived = torch.zeros(most_tiles(70), dtype=torch.int32, device=DEVICE)
    for R in (9, 2, 5):
        found = linear(x[:R], w, gated=gated, arrived=arrived, impl="triton")
        torch.testing.assert_close(found, linear(x[:R], w, gated=gated), rtol=1e-4, atol=1e-4)
        assert not arrived.any()
    with pytest.raises(ValueError, match="shapes do not fit: counters"):
        linear(x, w, arrived=arrived[:1], impl="triton")


@needs_triton
@pytest.mark.parametrize("gated", [False, True])
def test_many_tiles_are_not_cut(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpop.ops.few_rows import triton as kernels

    monkeypatch.setattr(kernels, "PROGRAMS", 2)
    assert kernels.division(200, 300, gated)[0] is kernels.SEVERAL
    x, w, b = made((3,), 300, 400 if gated else 200, torch.float32, True)
    found = linear(x, w, b, gated=gated, impl="triton")
    torch.testing.assert_close(found, linear(x, w, b, gated=gated), rtol=1e-4, atol=1e-4)


@needs_triton
def test_strides_do_not_matter() -> None:
    x, w, _ = made((3,), 64, 37, torch.float32, False)
    wide = torch.randn(74, device=DEVICE)
    for bias in (wide[::2], wide[:1].expand(37)):
        for rows in (x[:1], x, x.T.contiguous().T):
            torch.testing.assert_close(
                linear(rows, w, bias, impl="triton"), linear(rows, w, bias), rtol=1e-4, atol=1e-4
            )


@needs_triton
def test_no_rows() -> None:
    x, w = torch.zeros(0, 16, device=DEVICE), torch.zeros(4, 16, device=DEVICE)
    assert linear(x, w, impl="triton").shape == (0, 4)


@needs_triton
def test_what_it_refuses() -> None:
    x, w = torch.zeros(2, 16, device=DEVICE), torch.zeros(4, 16, device=DEVICE)
    for error, options in {
        "shapes do not fit: norm": dict(norm=(x[0, :8], 1e-6)),
        "shapes do not fit: residual": dict(residual_O=x),
        "shapes do not fit: weight": dict(gated=True),
    }.items():
        with pytest.raises(ValueError, match=error):
            linear(x, torch.zeros(5, 16, device=DEVICE), **options, impl="triton")
    for error, arguments in {
        "shapes do not fit: x": (x[:, :8], w),
        "at most 64 rows, got 65": (x[:1].expand(65, -1), w),
        "one dtype": (x.half(), w),
        "at least 1 input feature, got 0": (x[:, :0], w[:, :0].contiguous()),
        "contiguous weights": (x[:, :4].contiguous(), w.T),
        "got \\[torch.float64": (x.double(), w.double()),
    }.items():
        with pytest.raises(ValueError, match=error):
            linear(*arguments, impl="triton")


def test_an_unknown_impl_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown impl 'cuda'"):
        linear(torch.zeros(2, 16), torch.zeros(4, 16), impl="cuda")  # type: ignore[arg-type]


def test_the_reference_is_the_library_and_the_choice_off_a_gpu() -> None:
    x, w, b = torch.randn(3, 16), torch.randn(4, 16), torch.randn(4)
    assert torch.equal(linear(x, w, b), torch.nn.functional.linear(x, w, b))
    assert kernel_or_reference(x[:1].half()) == "reference"


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_which_inputs_take_the_kernel() -> None:
    x = torch.zeros(1, 16, device="cuda")
    assert kernel_or_reference(x) == "reference"  # float32: the library's, bit for bit what it was
    assert kernel_or_reference(x.bfloat16()) == "triton"
    assert kernel_or_reference(x.bfloat16().expand(65, -1)) == "reference"

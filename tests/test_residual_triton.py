"""The fused block sums against float64, on a GPU or in Triton's interpreter.

The tolerance is measured, not chosen: plain PyTorch computes the same thing from the same low-precision inputs, and the kernel
may be no further from float64 than twice that. Every call sees fresh random data, and memory that is not written holds NaN.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from kvpop.core.residual import residual_mass
from kvpop.ops.residual_mass import block_mass

# Shapes: N rows, R = H * G query heads, H KV heads, G query heads per KV head, L longest row, D head dim, C blocks of queries.

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
HALF = torch.bfloat16 if GPU else torch.float16  # the interpreter multiplies the bits of bfloat16
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
LONGER = 8 if GPU else 1
"""A GPU takes longer rows: more tiles, and more blocks of every kind."""
FLOAT32 = torch.finfo(torch.float32)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write is NaN."""

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(torch.nan))


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ragged rows: all of one, then less and less, the last one empty if there are 3. Every 7th query or so has no keys."""
    N, H, G, L, D = shape
    q, k = normal(N, H * G, L, D, dtype=dtype, seed=seed), normal(N, H, L, D, dtype=dtype, seed=seed + 1)
    lse = normal(N, H * G, L, dtype=torch.float32, seed=seed + 2) + 2
    lse[normal(N, H * G, L, dtype=torch.float32, seed=seed + 3) > 1.1] = -torch.inf
    length = torch.tensor([L - n * (L // 2) for n in range(N)], device=DEVICE).clamp(min=0)
    return q, k, lse, length


def plain_mass(
    q: Tensor, k: Tensor, lse: Tensor, length: Tensor, scale: float, block: int, power: float, largest: bool
) -> Tensor:
    """Products in the dtype given, the rest in float32: what one writes without a fused kernel."""
    (R, L), H = q.shape[1:3], k.shape[1]
    d = torch.arange(L, device=DEVICE)
    sent = lse.masked_fill(lse.isneginf() | (d >= length[:, None])[:, None], torch.inf)
    logits = ((q @ k.repeat_interleave(R // H, dim=1).mT) * scale).float()
    weight_NHGQT = (power * (logits - sent[..., None])).exp().unflatten(1, (H, -1))
    weight_NHQT = weight_NHGQT.amax(2) if largest else weight_NHGQT.mean(2)
    return torch.stack([weight_NHQT[:, :, at : at + block].sum(2) * (d < at) for at in range(0, L, block)], 2)


def no_further(actual: Tensor, plain: Tensor, exact: Tensor, name: str) -> None:
    """Root mean square and largest relative error of ``actual`` against twice those of ``plain``; zeros must agree."""
    assert actual.dtype == torch.float32
    assert actual.shape == exact.shape
    assert torch.equal(actual == 0, exact == 0), name
    known = exact != 0
    got, allowed = ((x.double() / exact - 1)[known].abs() for x in (actual, plain))
    if got.numel():
        # where there are few numbers, plain float32 may be right to the last bits
        assert got.square().mean().sqrt() <= 2 * allowed.square().mean().sqrt() + FLOAT32.eps, name  # False for NaN
        assert got.max() <= 2 * allowed.max() + 4 * FLOAT32.eps, name


def compare(
    shape: tuple[int, ...], dtype: torch.dtype, block: int, power: float, aggregate: str, tiles=None, seed: int = 0
) -> None:
    from kvpop.ops.residual_mass import triton

    q, k, lse, length = inputs(shape, dtype, seed)
    scale, largest = shape[-1] ** -0.5, aggregate == "max"
    exact = block_mass(
        q.double(), k.double(), lse.double(), length, scale=scale, block=block, power=power, aggregate=aggregate
    )
    arguments = (scale, block, power, largest)
    plain = plain_mass(q, k, lse, length, *arguments)
    actual = triton.block_mass(q, k, lse, length, *arguments, tiles)
    no_further(actual, plain, exact, f"{shape}, {dtype}, block {block}, power {power}, {aggregate}, {tiles}")


SHAPES = [
    # N, H, G, L, D
    (2, 1, 1, 150, 64),
    (1, 2, 3, 97, 80),
    (3, 1, 4, 139, 96),
    (2, 1, 3, 131, 128),
    (1, 2, 1, 1, 64),
]


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("aggregate", ["max", "mean"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_are_those_of_float64(shape: tuple[int, ...], aggregate: str, dtype: torch.dtype) -> None:
    N, H, G, L, D = shape
    L = L * LONGER - 3 * (LONGER > 1)
    for seed, (block, power) in enumerate([(64, 1.0), (16, 2.0), (5, 1.0)]):
        compare((N, H, G, L, D), dtype, block, power, aggregate, seed=4 * seed)


@needs_triton
@pytest.mark.parametrize("aggregate", ["max", "mean"])
@pytest.mark.parametrize(("keys", "queries"), [(16, 16), (64, 16), (16, 32), (128, 32)])
def test_sums_do_not_depend_on_the_tiles(keys: int, queries: int, aggregate: str) -> None:
    """Blocks shorter than a part, of several parts, and of parts and a rest; tiles of keys that end inside a block."""
    from kvpop.ops.residual_mass.triton import Tiles

    tiles = Tiles(keys, queries, warps=4, stages=2)
    for seed, block in enumerate([7, 32, 50]):
        compare((2, 1, 2, 110, 64), HALF, block, 1.0, aggregate, tiles, seed=4 * seed)


@needs_triton
def test_only_queries_with_keys_inside_their_row_send() -> None:
    q, k = normal(1, 2, 60, 64, dtype=HALF, seed=0), normal(1, 1, 60, 64, dtype=HALF, seed=1)
    lse, length = torch.full((1, 2, 60), -torch.inf, device=DEVICE), torch.tensor([52], device=DEVICE)
    for aggregate in ("max", "mean"):
        options = {"scale": 0.1, "block": 10, "aggregate": aggregate, "impl": "triton"}
        assert bool((block_mass(q, k, lse, length, **options) == 0).all())
        spoken = lse.clone()
        spoken[0, 1, 45] = 1.0  # to the 40 keys before its block
        spoken[0, :, 52:] = 0.0  # past the end of the row
        rest = q.clone()
        rest[:, :, 52:] = torch.nan  # what lies there is not read
        found = block_mass(rest, k, spoken, length, **options)
        assert found.nonzero()[:, 2:].tolist() == [[4, t] for t in range(40)]
        expected = (0.1 * (k[0, 0, :40].float() @ q[0, 1, 45].float()) - 1.0).exp() / (1 if aggregate == "max" else 2)
        torch.testing.assert_close(found[0, 0, 4, :40], expected, rtol=1e-3, atol=0)


@needs_triton
@pytest.mark.parametrize("aggregate", ["max", "mean"])
def test_a_query_that_is_not_a_number_is_not_hidden(aggregate: str) -> None:
    q, k, lse, length = inputs((1, 1, 3, 40, 64), torch.float32, 0)
    q[0, 1, 33], lse[0, 1, 33] = torch.nan, 1.0
    found = block_mass(q, k, lse, length, scale=0.1, block=8, aggregate=aggregate, impl="triton")
    reference = block_mass(q, k, lse, length, scale=0.1, block=8, aggregate=aggregate)
    assert torch.equal(found.isnan(), reference.isnan())
    assert bool(found[0, 0, 4, :32].isnan().all())


@needs_triton
def test_any_layout_and_the_same_every_time() -> None:
    """Heads as views of [N, L, R, D], rows that share their keys, lengths and a block of more than 32 bits."""
    N, H, G, L, D = 2, 2, 2, 100, 64
    q = normal(N, L, H * G, D, dtype=HALF, seed=0).transpose(1, 2)
    k = normal(1, L, H, D, dtype=HALF, seed=1).transpose(1, 2).expand(N, -1, -1, -1)
    lse = normal(N, L, H * G, dtype=torch.float32, seed=2).transpose(1, 2)
    length = torch.tensor([[2**40, 0], [70, 0]], device=DEVICE)[:, 0]
    plain = [x.contiguous() for x in (q, k, lse, length)]
    for block in (16, 30, 2**40):
        options = {"scale": 0.1, "block": block, "impl": "triton"}
        found = block_mass(q.detach().requires_grad_(), k, lse, length, **options)
        assert torch.equal(found, block_mass(*plain, **options))
        assert torch.equal(found, block_mass(q, k, lse, length.clamp(max=L).int(), **options))
        assert not found.requires_grad
    channels_apart = q.transpose(2, 3).contiguous().transpose(2, 3)
    again = block_mass(channels_apart, k, lse, length, scale=0.1, block=16, impl="triton")
    assert torch.equal(again, block_mass(*plain, scale=0.1, block=16, impl="triton"))


@needs_triton
@pytest.mark.parametrize("aggregate", ["max", "mean"])
def test_residual_masses_are_those_of_the_reference(aggregate: str) -> None:
    q, k, lse, length = inputs((2, 2, 3, 90, 64), torch.float32, 5)
    options = {"scale": 0.1, "block": 16, "power": 2.0, "aggregate": aggregate}
    kernel = residual_mass(q, k, lse, length, **options, impl="triton")
    torch.testing.assert_close(kernel, residual_mass(q, k, lse, length, **options), rtol=1e-5, atol=1e-7)


@needs_triton
def test_one_launch_covers_every_tile_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the trainer's size, and where offsets take more than 32 bits; without the memory."""
    from kvpop.ops.residual_mass import triton

    launches = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]):
            return lambda *arguments, **options: launches.append((grid, arguments, options))

    monkeypatch.setattr(triton, "_block_mass", Recorder())
    for N, H, G, L, block in ((4, 90, 3, 4096, 64), (1, 8, 4, 1 << 18, 64), (3, 2, 1, 130, 200), (1, 1, 1, 7, 5)):
        q, k = (torch.zeros(N, heads, L, 64, dtype=HALF, device="meta") for heads in (H * G, H))
        out = triton.block_mass(q, k, q[..., 0], q[:, 0, 0, 0], 0.1, block, 1.0, True)
        (((programs,), arguments, options),) = launches
        launches.clear()
        assert out.shape == (N, H, -(-L // block), L)
        assert programs == N * H * -(-L // options["BLOCK_T"]) < 2**31
        tiles, parts = arguments[9:11]
        assert (programs // tiles, tiles * options["BLOCK_T"] >= L) == (N * H, True)
        assert (parts - 1) * options["BLOCK_Q"] < block <= parts * options["BLOCK_Q"]
        assert options["BLOCK_Q"] >= 16


@needs_triton
def test_no_tokens_no_mass() -> None:
    empty = torch.zeros(1, 2, 0, 64, device=DEVICE)
    length = torch.zeros(1, dtype=torch.long, device=DEVICE)
    assert block_mass(empty, empty, empty[..., 0], length, scale=1.0, block=4, impl="triton").shape == (1, 2, 0, 0)


@needs_triton
def test_what_cannot_run_is_refused() -> None:
    q, lse, length = torch.zeros(1, 1, 4, 64, device=DEVICE), torch.zeros(1, 1, 4, device=DEVICE), torch.tensor([4])
    length = length.to(DEVICE)
    with pytest.raises(ValueError, match="float64"):
        block_mass(q.double(), q.double(), lse, length, scale=1.0, block=2, impl="triton")
    with pytest.raises(ValueError, match="both in the same"):
        block_mass(q, q.half(), lse, length, scale=1.0, block=2, impl="triton")
    wide = torch.zeros(1, 1, 4, 512, device=DEVICE)
    with pytest.raises(ValueError, match="up to 256 channels, got 512"):
        block_mass(wide, wide, lse, length, scale=1.0, block=2, impl="triton")

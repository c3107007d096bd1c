"""A teacher that looks again: its masses against sums written out, its decisions against a walk through the row."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpop.budget import Budget
from kvpop.core.residual import comparisons, residual_mass
from kvpop.ops.residual_mass import block_mass, kernel_or_reference, reference

# Shapes: N rows, R = H * G query heads, H KV heads, L longest row, C decision times, P decisions.


@pytest.mark.parametrize("power", [1.0, 2.0])
@pytest.mark.parametrize("aggregate", ["max", "mean"])
@pytest.mark.parametrize("elements", [1, 1 << 22])
def test_a_mass_is_the_sum_over_the_queries_from_there_on(
    power: float, aggregate: str, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(reference.ELEMENTS, "cpu", elements)
    N, H, G, L, D, block = 2, 2, 3, 37, 8, 5
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(N, heads, L, D, generator=generator, dtype=torch.double) for heads in (H * G, H))
    lse = torch.randn(N, H * G, L, generator=generator, dtype=torch.double) + 2
    lse[0, 0, 20] = -torch.inf  # a query without keys sends nothing
    length = torch.tensor([L, 23])
    mass = residual_mass(q, k, lse, length, scale=0.3, block=block, power=power, aggregate=aggregate)
    assert mass.shape == (N, H, math.ceil(L / block), L)
    for n in range(N):
        for h in range(H):
            for c in range(mass.shape[2]):
                for t in range(c * block):
                    total = 0.0
                    for d in range(c * block, int(length[n])):
                        sent = [
                            0.0 if lse[n, r, d] == -torch.inf
                            else float((0.3 * q[n, r, d].dot(k[n, h, t]) - lse[n, r, d]).exp() ** power)
                            for r in range(h * G, (h + 1) * G)
                        ]  # fmt: skip
                        total += max(sent) if aggregate == "max" else sum(sent) / G
                    assert mass[n, h, c, t] == pytest.approx(total, rel=1e-9)


@pytest.mark.parametrize("aggregate", ["max", "mean"])
def test_blocks_of_a_row_add_up_and_keys_that_are_not_before_one_get_nothing(aggregate: str) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(1, heads, 23, 8, generator=generator, dtype=torch.double) for heads in (4, 2))
    lse, length = torch.full((1, 4, 23), 3.0, dtype=torch.double), torch.tensor([21])
    found = block_mass(q, k, lse, length, scale=0.3, block=5, aggregate=aggregate)
    weight_HGQT = ((q.unflatten(1, (2, 2)) @ k[:, :, None].mT)[0] * 0.3 - 3.0).exp()
    weight_HQT = weight_HGQT.amax(1) if aggregate == "max" else weight_HGQT.mean(1)
    for c in range(5):
        torch.testing.assert_close(found[0, :, c, : 5 * c], weight_HQT[:, 5 * c : min(5 * c + 5, 21), : 5 * c].sum(1))
        assert bool((found[:, :, c, 5 * c :] == 0).all())
    whole = residual_mass(q, k, lse, length, scale=0.3, block=5, power=1.0, aggregate=aggregate)
    torch.testing.assert_close(whole, torch.stack([found[:, :, c:].sum(2) for c in range(5)], 2))
    one = block_mass(q, k, lse, length, scale=0.3, block=2**40, aggregate=aggregate)  # all queries of a row and more
    assert torch.equal(one, torch.zeros(1, 2, 1, 23, dtype=torch.double))


def test_the_masses_of_an_empty_row_are_none() -> None:
    q = torch.zeros(2, 2, 0, 8)
    assert block_mass(q, q, q[..., 0], torch.zeros(2, dtype=torch.long), scale=1.0, block=4).shape == (2, 2, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block": 0}, "block must be at least 1 query, got 0"),
        ({"power": 0.0}, "power must be positive, got 0.0"),
        ({"power": math.nan}, "power must be positive, got nan"),
        ({"aggregate": "sum"}, "unknown aggregate 'sum': choose 'max', 'mean'"),
        ({"impl": "flex"}, "unknown impl 'flex': choose 'reference', 'triton'"),
        ({"impl": "triton"}, "impl='triton' needs a GPU: use impl='reference'"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused(wrong: dict, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    q, length = torch.zeros(1, 2, 4, 8), torch.tensor([4])
    options = {"scale": 1.0, "block": 2, "power": 1.0, "aggregate": "max"} | wrong
    for mass in (block_mass, residual_mass):
        with pytest.raises(ValueError, match=re.escape(message)):
            mass(q, q, q[..., 0], length, **options)


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, lse, length = torch.zeros(1, 4, 6, 8), torch.zeros(1, 2, 6, 8), torch.zeros(1, 4, 6), torch.tensor([6])
    with pytest.raises(ValueError, match="4 query heads cannot share 3 KV heads evenly"):
        block_mass(q, torch.zeros(1, 3, 6, 8), lse, length, scale=1.0, block=2)
    for wrong in (
        (q, k[..., :5, :], lse, length), (q, k[..., :7], lse, length), (q, k, lse[:, :2], length), (q, k, lse, length[0]),
        (q, k, lse, length.repeat(2)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"shapes do not fit: q \(1, 4, 6, 8\)"):
            block_mass(*wrong, scale=1.0, block=2)


def test_the_kernel_is_chosen_on_a_gpu_for_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpop.ops.residual_mass.api.HAS_TRITON", True)

    def choice(device: str, dtype: torch.dtype, D: int = 64) -> str:
        return kernel_or_reference(SimpleNamespace(device=torch.device(device), dtype=dtype, shape=(1, 1, 4, D)))  # type: ignore[arg-type]

    assert all(choice("cuda", dtype) == "triton" for dtype in (torch.float32, torch.float16, torch.bfloat16))
    for device, dtype, D in (("cuda", torch.float64, 64), ("cpu", torch.float32, 64), ("cuda", torch.bfloat16, 512)):
        assert choice(device, dtype, D) == "reference"
    monkeypatch.setattr("kvpop.ops.residual_mass.api.HAS_TRITON", False)
    assert choice("cuda", torch.bfloat16) == "reference"


def walk(worth: Tensor, budget: Budget, block: int) -> dict[int, list[tuple[int, int, int, float]]]:
    """Of one head: for each decision time its (subject, boundary, label, regret)."""
    C, s, w, k = worth.shape[0], budget.sinks, budget.window, budget.long
    held: list[int] = []
    found = {}
    for c in range(1, C):
        new = [t for t in range((c - 1) * block - w + 1, c * block - w + 1) if t >= s]
        ranked = sorted(held + new, key=lambda t: -float(worth[c, t]))
        held, dropped = ranked[:k], ranked[k:]
        if not dropped:
            continue
        last = held[-1]
        subjects = [(t, 1) for t in new if t in held] + [(t, -1) for t in dropped]
        subjects += [(held[int((i + 0.5) * (k - 1) / block)], 1) for i in range(block)]
        found[c * block] = sorted(
            (t, last, label, abs(float(worth[c, t] - worth[c, last]))) for t, label in subjects if t != last
        )
    return found


@settings(max_examples=60, deadline=None)
@given(
    sinks=st.integers(0, 3), window=st.integers(1, 9), long=st.integers(1, 12), block=st.integers(1, 7),
    L=st.integers(1, 60), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_decisions_are_those_of_a_walk(sinks: int, window: int, long: int, block: int, L: int, seed: int) -> None:
    budget = Budget(sinks, window, long)
    generator = torch.Generator().manual_seed(seed)
    worth = torch.rand(1, 2, math.ceil(L / block), L, generator=generator, dtype=torch.double)
    found = comparisons(worth, budget, block)
    for h in range(2):
        expected = walk(worth[0, h], budget, block)
        actual: dict[int, list[tuple[int, int, int, float]]] = {time: [] for time in expected}
        for p in found.valid_NHP[0, h].nonzero()[:, 0].tolist():
            actual[int(found.time_P[p])].append(
                (
                    int(found.new_NHP[0, h, p]), int(found.boundary_NHP[0, h, p]), int(found.label_NHP[0, h, p]),
                    float(found.regret_NHP[0, h, p]),
                )
            )  # fmt: skip
        assert {time: sorted(made) for time, made in actual.items()} == expected
        margin = found.margin_NHP[found.valid_NHP]
        assert bool((margin >= 0).all())


@settings(max_examples=60, deadline=None)
@given(
    sinks=st.integers(0, 3), window=st.integers(1, 9), longs=st.lists(st.integers(0, 30), min_size=3, max_size=3),
    block=st.integers(1, 7), L=st.integers(1, 60), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_heads_of_one_budget_decide_as_each_would_alone(
    sinks: int, window: int, longs: list[int], block: int, L: int, seed: int
) -> None:
    """Also where a head is never full, or has no slots: it decides nothing."""
    generator = torch.Generator().manual_seed(seed)
    worth = torch.rand(2, 3, math.ceil(L / block), L, generator=generator, dtype=torch.double)
    found = comparisons(worth, Budget(sinks, window, 0).with_heads(longs), block)
    names = ("new_NHP", "boundary_NHP", "label_NHP", "margin_NHP", "regret_NHP")
    assert all(bool(torch.isfinite(getattr(found, name).double()).all()) for name in names)
    for h, long in enumerate(longs):
        if not long:
            assert not found.valid_NHP[:, h].any()
            continue
        alone = comparisons(worth[:, h : h + 1], Budget(sinks, window, long), block)
        for n in range(2):
            mine, own = found.valid_NHP[n, h], alone.valid_NHP[n, 0]
            assert torch.equal(found.time_P[mine], alone.time_P[own])
            for name in names:
                assert torch.equal(getattr(found, name)[n, h][mine], getattr(alone, name)[n, 0][own]), name


def test_without_slots_nothing_is_decided() -> None:
    found = comparisons(torch.rand(1, 2, 8, 30), Budget(1, 2, 0), 4)
    assert found.valid_NHP.shape == (1, 2, 0)

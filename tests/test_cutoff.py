"""The running top-k and the expiry against sorting every prefix, and against the set definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpop.budget import Budget
from kvpop.core import NEVER, expiry, oracle_held, ranks, running_cutoff
from kvpop.core.cutoff import departures, running_cutoffs

IMPLS = ("parallel", "heap", "brute")
few = st.sampled_from([math.nan, -math.inf, -1.0, -0.0, 0.0, 1.0, math.inf])
priorities = st.lists(st.one_of(few, st.floats(-3, 3)), max_size=40)


def key(p: float, t: int) -> tuple[float, int]:
    return (-math.inf if math.isnan(p) else p, t)


@given(priorities, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_ranks_sort_by_priority_then_arrival(values: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=dtype)
    order = sorted(range(len(values)), key=lambda t: key(x.tolist()[t], t))
    rank = ranks(x)
    assert rank.dtype == torch.long
    assert [rank.tolist().index(r) for r in range(len(values))] == order
    assert torch.equal(ranks(torch.stack([x, x.flip(-1)]))[0], rank)


def test_ranks_of_special_values() -> None:
    nan, inf = math.nan, math.inf
    assert ranks(torch.tensor([0.0, -0.0, 0.0])).tolist() == [0, 1, 2]
    assert ranks(torch.tensor([-0.0, 0.0, -0.0])).tolist() == [0, 1, 2]
    assert ranks(torch.tensor([inf, nan, -inf, -1e38, 1e38, inf])).tolist() == [4, 0, 1, 2, 3, 5]
    assert ranks(torch.tensor([-inf, nan, -inf])).tolist() == [0, 1, 2]
    assert ranks(torch.tensor([-nan, torch.finfo(torch.float32).min])).tolist() == [0, 1]


@given(priorities, st.integers(0, 45))
def test_all_forms_of_the_cutoff_equal_sorting_every_prefix(values: list[float], k: int) -> None:
    rank, A = ranks(torch.tensor([values, values[::-1]], dtype=torch.float64)), len(values)
    expected = []
    for row in rank.tolist():
        best = [sorted(row[: j + 1], reverse=True) for j in range(A)]
        expected.append([A if k == 0 else prefix[k - 1] if len(prefix) >= k else -1 for prefix in best])
    for impl in IMPLS:
        cutoff = running_cutoff(rank, k, impl)
        assert cutoff.dtype == torch.long
        assert cutoff.tolist() == expected
        assert torch.equal(running_cutoff(rank[0], k, impl), cutoff[0])


@given(priorities, st.lists(st.integers(0, 45), max_size=5))
def test_several_cutoffs_at_once_are_each_of_them(values: list[float], ks: list[int]) -> None:
    rank = ranks(torch.tensor([[values, values[::-1]]], dtype=torch.float64))
    found = running_cutoffs(rank, ks)
    assert len(found) == len(ks)
    for k, cutoff in zip(ks, found):
        assert (cutoff.shape, cutoff.dtype) == (rank.shape, torch.long)
        assert torch.equal(cutoff, running_cutoff(rank, k))
        assert torch.equal(cutoff, running_cutoff(rank, k, "brute"))


@pytest.mark.parametrize("A", [1, 2, 8, 9, 128, 1000])
def test_several_cutoffs_agree_with_the_heap_at_any_length(A: int) -> None:
    rank = ranks(torch.randn(2, 3, A, generator=torch.Generator().manual_seed(A)))
    ks = [A + 1, 1, 0, A // 2, A, 1, 3]  # in any order, also twice
    for k, cutoff in zip(ks, running_cutoffs(rank, ks), strict=True):
        assert torch.equal(cutoff, running_cutoff(rank, k, "heap"))


@pytest.mark.slow
def test_compiled_cutoffs_are_the_same() -> None:
    rank = ranks(torch.randn(2, 3, 65, generator=torch.Generator().manual_seed(0)))
    for compiled, plain in zip(
        running_cutoffs(rank, [8, 0, 20, 65], "compiled"), running_cutoffs(rank, [8, 0, 20, 65])
    ):
        assert torch.equal(compiled, plain)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_arrivals_one_arrival_and_leading_dimensions(impl: str) -> None:
    for k in range(3):
        assert running_cutoff(torch.zeros(2, 3, 0, dtype=torch.long), k, impl).shape == (2, 3, 0)
        assert running_cutoff(torch.zeros(1, dtype=torch.long), k, impl).tolist() == [[1], [0], [-1]][k]
    rank = ranks(torch.randn(2, 3, 4, 17))
    cutoff = running_cutoff(rank, 5, impl)
    assert cutoff.shape == rank.shape
    assert torch.equal(cutoff[1, 2, 3], running_cutoff(rank[1, 2, 3], 5, impl))


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows(impl: str) -> None:
    cutoff = running_cutoff(torch.zeros(0, 5, dtype=torch.long), 2, impl)
    assert (cutoff.shape, cutoff.dtype) == ((0, 5), torch.long)


@pytest.mark.parametrize("A", [1, 2, 3, 4, 5, 7, 8, 9, 127, 128, 129, 1000])
def test_the_forms_agree_around_powers_of_two(A: int) -> None:
    rank = ranks(torch.randn(3, A, generator=torch.Generator().manual_seed(A)))
    for k in {1, 2, A // 2, A - 1, A, A + 1} - {0}:
        parallel, heap = (running_cutoff(rank, k, impl) for impl in ("parallel", "heap"))
        assert torch.equal(parallel, heap)
        if A <= 129:
            assert torch.equal(parallel, running_cutoff(rank, k, "brute"))


def test_a_negative_k_and_an_unknown_form_are_errors() -> None:
    with pytest.raises(ValueError, match="at least 0 tokens, got -1"):
        running_cutoff(torch.arange(4), -1)
    with pytest.raises(ValueError, match="unknown impl 'fenwick'"):
        running_cutoff(torch.arange(4), 2, "fenwick")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 0 tokens, got -1"):
        running_cutoffs(torch.arange(4), [2, -1])


@given(priorities, st.integers(0, 12))
def test_a_token_departs_when_the_prefix_first_holds_k_better_ones(values: list[float], k: int) -> None:
    rank, A = ranks(torch.tensor(values)), len(values)
    row = rank.tolist()
    expected = []
    for t in range(A):
        gone = [j for j in range(t, A) if sum(other > row[t] for other in row[: j + 1]) >= k]
        expected.append(gone[0] if gone else A)
    cutoff = running_cutoff(rank, k)
    assert departures(rank, cutoff).tolist() == expected
    assert (cutoff.diff() >= 0).all()  # it only ever tightens


@settings(max_examples=200)
@given(st.integers(0, 4), st.integers(1, 5), st.integers(0, 6), priorities, st.sampled_from(IMPLS))
def test_expiry_is_the_set_definition(s: int, w: int, k: int, values: list[float], impl: str) -> None:
    budget, S = Budget(s, w, k), len(values)
    rows = torch.tensor([[values, values[::-1]]], dtype=torch.float64)
    found = expiry(rows, budget, impl)
    assert found.dtype == torch.int32
    assert found.shape == rows.shape
    for h, row in enumerate(rows[0].tolist()):
        e = found[0, h].tolist()
        for q in range(S):
            held = {t for t in range(q + 1) if q < e[t]}
            assert held == oracle_held(row, budget, q)
            assert len(held) == min(q + 1, budget.slots)
        assert all(e[t] == NEVER for t in range(min(s, S)))
        assert all(e[t] >= t + w for t in range(S))


@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 4), priorities, st.integers(0, 40))
def test_later_tokens_never_change_what_was_held(s: int, w: int, k: int, values: list[float], cut: int) -> None:
    budget, cut = Budget(s, w, k), min(cut, len(values))
    whole, part = (expiry(torch.tensor(v), budget).clamp(max=cut) for v in (values, values[:cut]))
    assert torch.equal(whole[:cut], part)


def test_the_priorities_of_sinks_are_not_read() -> None:
    a = torch.randn(30)
    b = a.clone()
    b[:3] = torch.tensor([math.nan, math.inf, -math.inf])
    assert torch.equal(expiry(a, Budget(3, 2, 4)), expiry(b, Budget(3, 2, 4)))

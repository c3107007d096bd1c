"""The running top-k and the expiry against sorting every prefix, and against the set definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpop.budget import Budget
from kvpop.core import NEVER, expiry, oracle_held, ranks, running_cutoff
from kvpop.core.cutoff import check_pins, departures, running_cutoffs

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


# Numbers of slots by head


@st.composite
def by_head(draw) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Priorities [rows, heads, A] and k of each head, the trivial ones included."""
    heads, A = draw(st.integers(1, 4)), draw(st.integers(0, 24))
    values = [draw(st.lists(st.one_of(few, st.floats(-3, 3)), min_size=A, max_size=A)) for _ in range(heads)]
    x = torch.tensor([values, values[::-1]], dtype=torch.float64).view(2, heads, A)
    return x, tuple(draw(st.lists(st.integers(0, A + 2), min_size=heads, max_size=heads)))


@given(by_head(), st.sampled_from(IMPLS))
def test_a_cutoff_by_head_is_that_of_each_head(case: tuple[torch.Tensor, tuple[int, ...]], impl: str) -> None:
    rank, ks = ranks(case[0]), case[1]
    found = running_cutoff(rank, ks, impl)
    assert (found.shape, found.dtype) == (rank.shape, torch.long)
    for h, k in enumerate(ks):
        assert torch.equal(found[:, h], running_cutoff(rank[:, h], k, "brute"))
    assert torch.equal(running_cutoff(rank[0], list(ks), impl), found[0])  # no rows, only heads


@given(by_head(), st.lists(st.integers(0, 26), max_size=3), st.randoms())
def test_cutoffs_by_head_and_for_all_heads_at_once(case, uniform: list[int], random) -> None:
    rank, ks = ranks(case[0]), case[1]
    other = tuple(random.sample(ks, len(ks)))
    asked = [ks, *uniform, other]
    for k, cutoff in zip(asked, running_cutoffs(rank, asked), strict=True):
        assert torch.equal(cutoff, running_cutoff(rank, k, "brute"))


def test_one_number_for_all_heads_takes_the_path_of_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        "kvpop.core.cutoff._wavelet", lambda rank, k: seen.append(k.shape) or rank.expand(len(k), -1, -1)
    )
    rank = ranks(torch.randn(2, 3, 9))
    running_cutoffs(rank, [4, (4, 4, 4), 5])
    running_cutoffs(rank, [(4, 0, 5), (0, 4, 5), 4])
    running_cutoffs(rank, [(4, 0, 5)])
    assert seen == [(2, 1, 1), (3, 6, 1), (1, 6, 1)]


@settings(max_examples=100)
@given(st.integers(0, 3), st.integers(1, 4), by_head(), st.sampled_from(IMPLS))
def test_an_expiry_by_head_is_the_set_definition_of_each(s: int, w: int, case, impl: str) -> None:
    x, ks = case
    found = expiry(x, Budget(s, w, 0).with_heads(ks), impl)
    for h, k in enumerate(ks):
        budget = Budget(s, w, k)
        assert torch.equal(found[:, h], expiry(x[:, h], budget, impl))
        for q in range(x.shape[-1]):
            held = {t for t in range(q + 1) if q < found[0, h, t]}
            assert held == oracle_held(x[0, h].tolist(), budget, q)


def test_pins_must_fit_into_the_smallest_head() -> None:
    x, budget = torch.randn(1, 2, 20, generator=torch.Generator().manual_seed(0)), Budget(1, 2, 5, (5, 2))
    pinned = torch.zeros(1, 2, 20, dtype=torch.bool)
    pinned[..., [0, 3, 8]] = True
    found = expiry(x, budget, pinned_XS=pinned)
    for h, k in enumerate(budget.heads):
        assert torch.equal(found[:, h], expiry(x[:, h], Budget(1, 2, k), pinned_XS=pinned[:, h]))
        for q in range(20):
            assert {t for t in range(q + 1) if q < found[0, h, t]} == oracle_held(
                x[0, h].tolist(), Budget(1, 2, k), q, pinned={0, 3, 8}
            )
    pinned[..., 9] = True
    with pytest.raises(ValueError, match="3 pinned tokens do not fit into 2 long-range slots of head 1"):
        expiry(x, budget, pinned_XS=pinned)
    with pytest.raises(ValueError, match=r"6 pinned tokens do not fit into 5 long-range slots$"):
        check_pins(6, Budget(1, 2, 5))


def test_numbers_by_head_that_do_not_fit_are_errors() -> None:
    rank = ranks(torch.randn(2, 3, 5))
    for impl in IMPLS:
        with pytest.raises(ValueError, match=r"2 numbers of slots do not fit ranks of shape \(2, 3, 5\)"):
            running_cutoff(rank, (1, 2), impl)
        with pytest.raises(ValueError, match="at least 0 tokens, got -1"):
            running_cutoff(rank, (1, -1, 2), impl)
        with pytest.raises(ValueError, match="one a head is needed"):
            running_cutoff(rank[0, 0], (1, 2), impl)
    with pytest.raises(ValueError, match="that of one head"):
        oracle_held([0.0] * 4, Budget(0, 1, 2, (1, 2)), 3)

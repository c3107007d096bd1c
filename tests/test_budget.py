"""What a budget allows, and what it costs in bytes."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpop.budget import SLOT_OVERHEAD_BYTES, Budget, cache_bytes, dense_bytes, entry_bytes

sizes = st.integers(0, 50)


@given(sizes, st.integers(1, 50), sizes)
def test_slots_are_the_sum(s: int, w: int, k: int) -> None:
    budget = Budget(s, w, k)
    assert budget.slots == s + w + k
    assert Budget.of_slots(budget.slots, sinks=s, window=w) == budget


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, 1, 0), "sinks must be at least 0, got -1"),
        ((0, 0, 5), "window must be at least 1, got 0"),
        ((0, 1, -2), "long must be at least 0, got -2"),
        ((0, 1.0, 1), "window must be an integer, got 1.0"),
        ((True, 1, 1), "sinks must be an integer, got True"),
        ((0, "8", 1), "window must be an integer, got '8'"),
    ],
)
def test_a_bad_size_is_named(sizes: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Budget(*sizes)


def test_a_budget_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Budget(1, 2, 3).long = 4  # type: ignore[misc]


def test_of_slots_refuses_what_does_not_fit() -> None:
    assert Budget.of_slots(68) == Budget(4, 64, 0)
    with pytest.raises(ValueError, match="67 slots cannot hold 4 sinks and a window of 64: needs 68"):
        Budget.of_slots(67)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.01, math.nan, math.inf])
def test_of_ratio_refuses_what_is_no_share(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"ratio must be in \(0, 1\]"):
        Budget.of_ratio(ratio, 1000)


@given(st.integers(1, 1000), st.integers(100, 40_000))
def test_of_ratio_never_exceeds_the_share_and_wastes_less_than_two_slots(thousandths: int, context: int) -> None:
    exact = Fraction(thousandths, 1000) * context
    if exact < 4:
        return
    budget = Budget.of_ratio(thousandths / 1000, context, sinks=1, window=2)
    assert exact - 2 < budget.slots <= exact


def test_of_ratio_is_exact_where_the_product_is_a_whole_number() -> None:
    for percent in range(5, 101):
        assert Budget.of_ratio(percent / 100, 100, sinks=1, window=2).slots == percent


@given(st.integers(1, 100), st.integers(1, 10_000))
def test_compression_is_the_share_not_held(slots: int, context: int) -> None:
    got = Budget.of_slots(slots, sinks=0, window=1).compression(context)
    assert got == pytest.approx(max(0.0, (context - slots) / context))
    with pytest.raises(ValueError, match="context must be at least 1 token, got 0"):
        Budget(0, 1, 0).compression(0)


@given(st.integers(0, 60), st.integers(0, 5000), st.integers(1, 600))
def test_charged_pays_whole_entries(long: int, state: int, entry: int) -> None:
    price = 0
    while price * entry < state:
        price += 1
    budget = Budget(2, 3, long)
    if price > long:
        with pytest.raises(ValueError, match=f"costs {price} entries"):
            budget.charged(state, entry)
    else:
        assert budget.charged(state, entry) == Budget(2, 3, long - price)


def test_the_authors_charge_of_an_mlstm_state() -> None:
    """C in fp32 at D = 128 is 64 bf16 entries (method.md): 3836 long-range slots become 3772."""
    assert entry_bytes(128, 2) == 4 * 128
    assert Budget(4, 256, 3836).charged(128 * 64 * 4, entry_bytes(128, 2)).long == 3772


def test_entry_bytes_with_a_narrower_value() -> None:
    assert entry_bytes(128, 2, value_dim=64) == (128 + 64) * 2
    assert entry_bytes(128, 2, value_dim=0) == 128 * 2


@given(
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from([2, 4]),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_cache_bytes_counts_what_is_there(
    slots: int, layers: int, heads: int, element: int, rows: int, state: int
) -> None:
    D, total = 8, 8 * layers  # tokens taken in
    for _row in range(rows):
        for _layer in range(layers):
            total += 8  # tokens seen
            for _head in range(heads):
                total += state + sum(2 * D * element + SLOT_OVERHEAD_BYTES for _slot in range(slots))
    budget = Budget(0, 1, slots - 1)
    shape = dict(layers=layers, kv_heads=heads, head_dim=D, element_size=element, rows=rows)
    assert cache_bytes(budget, **shape, state_bytes=state) == total
    assert dense_bytes(slots, **shape) == rows * layers * heads * slots * 2 * D * element


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(1, 3),
    st.booleans(),
)  # fmt: skip
def test_cache_bytes_of_heads_that_differ_counts_what_is_there(layers: list[list[int]], rows: int, fused: bool) -> None:
    D, s, w, state, total = 8, 2, 3, 5, 0
    for heads in layers:
        total += 8  # tokens taken in
        total += 3 * (4 + 4) if len(set(heads)) > 1 else 0  # the size and the place of every head
        for _row in range(rows):
            total += 8  # tokens seen
            for k in heads:
                total += sum(2 * D * 2 for _slot in range(s + w + k)) + sum(
                    4 + 4 for _slot in range(s + w + max(heads))
                )
                total += state + (4 * (w + 1) if fused else 0)
    sizes = dict(kv_heads=3, head_dim=D, element_size=2, rows=rows, state_bytes=state, fused=fused)
    budgets = [Budget(s, w, 0).with_heads(heads) for heads in layers]
    assert cache_bytes(budgets, layers=len(layers), **sizes) == total
    assert cache_bytes(budgets[0], layers=2, **sizes) == cache_bytes([budgets[0]] * 2, layers=2, **sizes)


def test_budgets_for_other_layers_or_heads_are_refused() -> None:
    sizes = dict(head_dim=8, element_size=2)
    with pytest.raises(ValueError, match="2 budgets were given for 3 layers"):
        cache_bytes([Budget(0, 1, 2)] * 2, layers=3, kv_heads=2, **sizes)
    with pytest.raises(ValueError, match="2 KV heads was given to 3"):
        cache_bytes(Budget(0, 1, 2, (1, 2)), layers=1, kv_heads=3, **sizes)


def test_heads_may_differ():
    budget = Budget(4, 8, 10).with_heads((3, 0, 7))
    assert (budget.long, budget.slots, budget.longs(3)) == (7, 19, (3, 0, 7))
    assert Budget(4, 8, 10).with_heads([5, 5]) == Budget(4, 8, 5)
    assert Budget(4, 8, 5).longs(2) == (5, 5)


def test_what_is_wrong_with_heads_is_named():
    with pytest.raises(ValueError, match="largest of heads, 7, got 8"):
        Budget(0, 1, 8, (3, 7))
    with pytest.raises(ValueError, match=r"at least 0, got \(3, -1\)"):
        Budget(0, 1, 3, (3, -1))
    with pytest.raises(ValueError, match="2 KV heads was given to 3"):
        Budget(0, 1, 7, (3, 7)).longs(3)

"""Static priorities order tokens as effective scores do, and the learned decay stays in its range."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpop.budget import Budget
from kvpop.core import Decay, FixedDecay, oracle_held, static_priority
from kvpop.core.cutoff import expiry

scores = st.lists(st.floats(-5, 5), min_size=1, max_size=30)


@given(scores, st.floats(-0.5, 0.0))
def test_one_step_orders_tokens_as_effective_scores_at_every_query(values: list[float], log_gamma: float) -> None:
    """Eq. 19: the difference of two priorities is the difference of their effective scores, whatever q is."""
    T = len(values)
    score, position = torch.tensor([values], dtype=torch.float64), torch.arange(T)
    priority = static_priority(score, position, torch.tensor([log_gamma], dtype=torch.float64))[0]
    for q in (T - 1, T, 3 * T):
        effective = torch.tensor([values[t] + (q - t) * log_gamma for t in range(T)], dtype=torch.float64)
        difference = effective[:, None] - effective
        torch.testing.assert_close(priority[:, None] - priority, difference, rtol=1e-12, atol=1e-12)
        certain = difference.abs() > 1e-9
        assert torch.equal((priority[:, None] > priority)[certain], (difference > 0)[certain])


def test_every_head_has_its_own_decay_and_positions_may_differ_by_row() -> None:
    score = torch.randn(2, 3, 5, dtype=torch.float64)
    position = torch.randint(0, 100, (2, 3, 5))
    log_gamma = torch.tensor([0.0, -0.1, -1.0], dtype=torch.float64)
    for step in (1, 4):
        priority = static_priority(score, position, log_gamma, step)
        for b in range(2):
            for h in range(3):
                for t in range(5):
                    bucket = int(position[b, h, t]) // step
                    expected = score[b, h, t].item() - bucket * log_gamma[h].item()
                    assert priority[b, h, t].item() == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(scores, st.floats(-1.0, -1e-3), st.integers(2, 7))
def test_buckets_are_within_one_step_of_the_literal_formula(values: list[float], log_gamma: float, n: int) -> None:
    T = len(values)
    score = torch.tensor([values], dtype=torch.float64)
    priority = static_priority(score, torch.arange(T), torch.tensor([log_gamma], dtype=torch.float64), n)[0]
    for q in range(T - 1, T + 2 * n):
        literal = torch.tensor([values[t] + (q - t) // n * log_gamma for t in range(T)], dtype=torch.float64)
        shift = priority + q // n * log_gamma - literal
        assert (shift <= 1e-9).all()
        assert (shift >= log_gamma - 1e-9).all()


@given(scores, st.floats(-1.0, 0.0), st.integers(1, 7), st.integers(1, 3), st.integers(0, 4))
def test_with_buckets_no_token_ever_returns(values: list[float], log_gamma: float, n: int, w: int, k: int) -> None:
    T, budget = len(values), Budget(1, w, k)
    score = torch.tensor([values], dtype=torch.float64)
    priority = static_priority(score, torch.arange(T), torch.tensor([log_gamma], dtype=torch.float64), n)[0].tolist()
    dropped: set[int] = set()
    before: set[int] = set()
    for q in range(T):
        held = oracle_held(priority, budget, q)
        dropped |= before - held
        assert not held & dropped
        before = held
    found = expiry(torch.tensor(priority, dtype=torch.float64), budget).tolist()
    assert {t for t in range(T) if found[t] > T - 1} == before


def test_the_literal_buckets_would_let_a_token_return() -> None:
    """Why buckets are absolute: with floor((q - t) / n) the order of two tokens changes back and forth as q moves."""
    n, log_gamma, values = 2, -1.0, [0.5, 0.0]
    first_wins = [values[0] + q // n * log_gamma > values[1] + (q - 1) // n * log_gamma for q in range(2, 6)]
    assert first_wins == [False, True, False, True]


def test_scores_that_are_no_numbers_stay_so() -> None:
    score = torch.tensor([[math.nan, math.inf, -math.inf]])
    priority = static_priority(score, torch.arange(3), torch.tensor([-0.1]))
    assert priority.isnan().tolist() == [[True, False, False]]
    assert priority[0, 1:].tolist() == [math.inf, -math.inf]


def test_the_dtype_follows_the_score() -> None:
    for dtype in (torch.float32, torch.float64):
        assert static_priority(torch.zeros(1, 2, dtype=dtype), torch.arange(2), torch.tensor([-1e-3])).dtype == dtype


@pytest.mark.parametrize("step", [0, -1])
def test_a_step_below_one_token_is_an_error(step: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1 token, got {step}"):
        static_priority(torch.zeros(1, 2), torch.arange(2), torch.zeros(1), step)


@given(st.floats(-1.0, -1e-6), st.floats(0.01, 0.99), st.floats(0.0, 1e-7))
def test_the_decay_starts_where_it_is_told_and_stays_in_range(low: float, share: float, high: float) -> None:
    start = low + share * (-high - low)
    decay = Decay(3, start=start, low=low, high=-high)
    assert decay().tolist() == pytest.approx([start] * 3, rel=1e-4, abs=1e-6 * abs(low))
    for alpha in (-1e4, -3.0, 3.0, 1e4):
        with torch.no_grad():
            decay.alpha.fill_(alpha)
        expected = low + (1 / (1 + math.exp(-max(alpha, -700)))) * (-high - low)
        slack = 1e-6 * abs(low)
        assert decay().tolist() == pytest.approx([expected] * 3, rel=1e-4, abs=slack)
        assert all(low - slack <= value <= -high + slack for value in decay().tolist())


def test_the_default_decay_is_the_documented_one() -> None:
    decay = Decay(2)
    assert decay().tolist() == pytest.approx([-2e-4] * 2, rel=1e-4)
    assert decay.alpha.tolist() == pytest.approx([2.25] * 2, abs=0.01)
    decay().sum().backward()
    assert (decay.alpha.grad > 0).all()


@pytest.mark.parametrize(
    ("start", "low", "high"),
    [
        (-2e-3, -2e-3, -1e-5), (-1e-5, -2e-3, -1e-5), (-1.0, -2e-3, -1e-5), (-1e-6, -2e-3, -1e-5), (0.0, -1.0, 0.5),
        (-1e-3, -1e-5, -2e-3), (math.nan, -2e-3, -1e-5), (-1e-3, math.nan, -1e-5),
    ],
)  # fmt: skip
def test_a_start_outside_the_range_is_an_error(start: float, low: float, high: float) -> None:
    with pytest.raises(ValueError, match="low < start < high <= 0"):
        Decay(2, start=start, low=low, high=high)


def test_fixed_decay() -> None:
    assert FixedDecay(2, -0.5)().tolist() == [-0.5, -0.5]
    assert list(FixedDecay(2).parameters()) == []
    for value in (0.1, math.nan):
        with pytest.raises(ValueError, match="log gamma must be at most 0"):
            FixedDecay(2, value)

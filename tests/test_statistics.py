"""Estimates and intervals: against brute force where that is possible, by simulation where it is not."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpop.evals.statistics import (
    ONE_PROBLEM,
    Interval,
    compare,
    estimate,
    item_means,
    pass_at_1,
    pass_at_k,
    percentiles,
    resampled,
    sentence,
)

SCORES = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=6), min_size=2,
    max_size=6,
)  # fmt: skip


def named(rows):
    return {f"q{i:03}": list(row) for i, row in enumerate(rows)}


@given(SCORES)
def test_pass_at_1_is_the_mean_over_rollouts_then_over_items(scores):
    expected = sum(sum(values) / len(values) for values in scores.values()) / len(scores)
    assert pass_at_1(scores) == pytest.approx(expected)
    assert estimate([scores], draws=10).value == pytest.approx(expected)


@given(SCORES, st.integers(1, 6))
def test_pass_at_k_is_the_share_of_draws_of_k_with_a_right_one(scores, k):
    if min(map(len, scores.values())) < k:
        with pytest.raises(ValueError, match=f"pass@{k} needs {k} rollouts an item"):
            pass_at_k(scores, k)
        return
    shares = []
    for values in scores.values():
        draws = list(itertools.combinations(values, k))
        shares.append(sum(1.0 in draw for draw in draws) / len(draws))
    assert pass_at_k(scores, k) == pytest.approx(sum(shares) / len(shares))


@given(SCORES, st.randoms(use_true_random=False))
def test_nothing_depends_on_order(scores, draw):
    def shuffled(scores):
        items = [(item, draw.sample(values, len(values))) for item, values in scores.items()]
        return dict(draw.sample(items, len(items)))

    other = {item: [*values[::-1], 0.0] for item, values in scores.items()}
    assert estimate([shuffled(scores)], draws=50) == estimate([scores], draws=50)
    assert compare([shuffled(scores)], [shuffled(other)], draws=50) == compare([scores], [other], draws=50)


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=2, max_size=4))
def test_draws_have_the_distribution_of_all_draws(values):
    """All n**n draws of n items, counted, against 20,000 random ones."""
    n = len(values)
    exact = [sum(draw) / n for draw in itertools.product(values, repeat=n)]
    drawn = resampled(np.array(values)[:, None], 20_000, seed=1)[:, 0]
    for x in set(np.round(exact, 9)):
        share = sum(value <= x + 1e-9 for value in exact) / len(exact)
        assert (drawn <= x + 1e-9).mean() == pytest.approx(share, abs=0.02)


def test_chunks_of_draws_are_one_stream(monkeypatch):
    x = np.random.default_rng(0).random((7, 2))
    whole = resampled(x, 100, seed=3)
    monkeypatch.setattr("kvpop.evals.statistics._AT_ONCE", 7 * 2 * 9)
    assert (resampled(x, 100, seed=3) == whole).all()
    picks = np.random.default_rng(3).integers(7, size=(100, 7))
    np.testing.assert_allclose(whole[5], x[picks[5]].mean(0))
    assert not (resampled(x, 100, seed=4) == whole).all()


def test_columns_are_drawn_together():
    x = np.random.default_rng(0).random(9)
    means = resampled(np.stack([x, 2 * x], axis=1), 50)
    np.testing.assert_allclose(means[:, 1], 2 * means[:, 0])


def test_the_interval_is_as_wide_as_theory_says():
    draw = np.random.default_rng(0)
    scores = named((draw.random((400, 4)) < 0.5).astype(float))
    found = estimate([scores])
    error = item_means(scores).std() / math.sqrt(400)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.05)
    assert found == estimate([scores])
    two = estimate([scores, named((draw.random((400, 4)) < 0.5).astype(float))])
    assert two.high - two.low == pytest.approx((found.high - found.low) / math.sqrt(2), rel=0.1)


def test_intervals_cover_the_truth_as_often_as_they_say():
    """60 problems of difficulties of their own, 8 rollouts; student and teacher share the difficulty."""
    draw, runs = np.random.default_rng(7), 400
    hits = {"score": 0, "difference": 0, "retention": 0}
    truth = 0.5  # mean of Beta(1, 1)
    for run in range(runs):
        p = draw.beta(1, 1, size=60)
        teacher = named((draw.random((60, 8)) < p[:, None]).astype(float))
        student = named((draw.random((60, 8)) < 0.8 * p[:, None]).astype(float))
        found = compare([student], [teacher], draws=400, seed=run)
        hits["score"] += bool(estimate([teacher], draws=400, seed=run).contains(truth))
        hits["difference"] += bool(found.difference.contains(-0.2 * truth))
        hits["retention"] += bool(found.retention.contains(0.8))
    for name, count in hits.items():
        assert 0.91 <= count / runs <= 0.985, name


def test_a_true_difference_that_is_detectable_shows_in_four_of_five_samples():
    draw, runs, shows = np.random.default_rng(3), 400, 0
    spread, n = 0.2, 50
    gap = (1.959964 + 0.841621) * spread / math.sqrt(n)
    for run in range(runs):
        base = draw.random(n)
        found = compare([named((base + draw.normal(gap, spread, n))[:, None])], [named(base[:, None])], 400, run)
        shows += not found.difference.contains(0.0)
        assert found.detectable == pytest.approx(gap, rel=0.5)
    assert 0.74 <= shows / runs <= 0.88


def test_pairing_takes_out_what_problems_have_in_common():
    draw = np.random.default_rng(0)
    p = draw.choice([0.05, 0.95], size=200)
    a, b = (named((draw.random((200, 8)) < p[:, None]).astype(float)) for _ in range(2))
    paired = compare([a], [b]).difference
    alone = estimate([a])
    assert paired.high - paired.low < 0.6 * (alone.high - alone.low)


def test_a_teacher_of_zero_is_said_and_nothing_is_divided():
    student, nothing = named([[1.0], [0.0]]), named([[0.0], [0.0]])
    found = compare([student], [nothing])
    assert found.retention == Interval(None, note="the teacher scores 0: there is nothing to retain")
    assert "Retention is not given: the teacher scores 0: there is nothing to retain." in sentence("x", "y", found)
    rare = named([[1.0], *[[0.0]] * 9])
    found = compare([rare], [rare])
    assert found.retention.value == 1.0
    assert found.retention.high is None
    assert found.retention.note.startswith("the teacher scores 0 in 3")  # 0.9 ** 10 = 35 %
    assert "Retention is 1.000 [1.000, open]; the teacher scores 0 in 3" in sentence("x", "y", found)
    low = percentiles(np.array([np.inf] * 1 + [1.0] * 99), 1.0)
    assert (low.low, low.high) == (1.0, 1.0)


def test_one_problem_has_no_interval():
    found = compare([{"a": [1.0, 0.0]}], [{"a": [1.0, 1.0]}])
    assert found.difference == Interval(-0.5, note=ONE_PROBLEM)
    assert estimate([{"a": [1.0]}]) == Interval(1.0, note=ONE_PROBLEM)
    assert sentence("KVpop", "AIME", found) == (
        "KVpop scores 0.500 on AIME, the dense teacher 1.000; one problem says nothing about others: no interval."
    )


def test_sentences_say_what_there_is_to_say():
    draw = random.Random(0)
    teacher = named([[1.0] * 4] * 30)
    worse = named([[float(draw.random() < 0.5) for _ in range(4)] for _ in range(30)])
    found = compare([worse], [teacher])
    said = sentence("KVpop", "AIME", found)
    assert "The interval does not contain 0: 30 problems x 4 rollouts tell the two apart at 95 %." in said
    equal = compare([teacher], [teacher])
    assert (equal.resolution, equal.detectable) == (None, None)
    assert "in fewer than about 10% of problems may not have been seen" in sentence("KVpop", "AIME", equal)
    assert said.endswith(
        f"Retention is {pass_at_1(worse):.3f} [{found.retention.low:.3f}, {found.retention.high:.3f}]."
    )
    uneven = {**worse, "q000": [1.0]}
    assert compare([uneven], [teacher]).rollouts == "1 to 4"


def test_what_cannot_be_computed_is_named():
    one = named([[1.0], [0.0]])
    with pytest.raises(ValueError, match="there are no scores"):
        pass_at_1({})
    with pytest.raises(ValueError, match="item a has no rollouts"):
        pass_at_1({"a": []})
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        pass_at_k(one, 0)
    with pytest.raises(ValueError, match="there are no tasks"):
        estimate([])
    with pytest.raises(ValueError, match="the same tasks on both sides, got 1 and 2"):
        compare([one], [one, one])
    with pytest.raises(ValueError, match="1 have no partner, the first is z"):
        compare([one], [{**one, "z": [1.0]}])

"""What graded rollouts say about a policy, and what they cannot say.

Scores of a task are a mapping from item to its rollouts' scores, in [0, 1]. What is drawn anew, always, are items with all
their rollouts: rollouts of one problem are alike, and another 30 problems would have been other problems. Several tasks are
drawn one by one and their means averaged, as the tables do. Nothing depends on the order of items or rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

DRAWS = 10_000
LEVEL = 0.95
POWER = 0.8
_AT_ONCE = 1 << 22
"""Indices of items that exist at once."""

Scores = Mapping[str, Sequence[float]]
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval. ``low`` and ``high`` are None where there is none, ``note`` says why."""

    value: float | None
    low: float | None = None
    high: float | None = None
    note: str = ""

    def contains(self, x: float) -> bool | None:
        """Whether x lies in it; None without an interval."""
        return None if self.low is None or self.high is None else self.low <= x <= self.high


def item_means(scores: Scores) -> Array:
    """The mean over rollouts of every item [n], items by name. Raises ValueError without items or for one without rollouts."""
    if not scores:
        raise ValueError("there are no scores")
    if bare := [item for item, values in scores.items() if not len(values)]:
        raise ValueError(f"item {bare[0]} has no rollouts")
    return np.array([math.fsum(scores[item]) / len(scores[item]) for item in sorted(scores)])


def pass_at_1(scores: Scores) -> float:
    """The mean over rollouts, then over items."""
    return float(item_means(scores).mean())


def pass_at_k(scores: Scores, k: int) -> float:
    """The chance that at least one of k rollouts of an item is right (score 1), mean over items: 1 - C(n - c, k) / C(n, k) of
    an item with c right ones of n, which is unbiased (Chen et al., 2021). Raises ValueError if an item has fewer than k."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    item_means(scores)
    if few := [item for item in sorted(scores) if len(scores[item]) < k]:
        raise ValueError(f"pass@{k} needs {k} rollouts an item, {few[0]} has {len(scores[few[0]])}")
    chances = []
    for values in scores.values():
        n, c = len(values), sum(value == 1 for value in values)
        chances.append(1.0 - math.comb(n - c, k) / math.comb(n, k))
    return math.fsum(chances) / len(chances)


def resampled(columns_nC: Array, draws: int = DRAWS, seed: int = 0) -> Array:
    """Means [draws, C] over n items drawn with replacement, all columns from the same draws."""
    n, C = columns_nC.shape
    rng, means = np.random.default_rng(seed), np.empty((draws, C))
    step = max(1, _AT_ONCE // (n * C))
    for start in range(0, draws, step):
        picks = rng.integers(n, size=(min(step, draws - start), n))
        means[start : start + len(picks)] = columns_nC[picks].mean(1)
    return means


def percentiles(values: Array, value: float) -> Interval:
    """``value`` with the percentile interval of bootstrap ``values``; a bound that is infinite is None, and noted."""
    tails = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    if np.isfinite(values).all():
        low, high = np.quantile(values, tails)
        return Interval(value, float(low), float(high))
    low = float(np.quantile(values, tails[0], method="lower"))
    high = float(np.quantile(values, tails[1], method="higher"))
    note = f"the teacher scores 0 in {1 - np.isfinite(values).mean():.1%} of the draws"
    return Interval(value, low if math.isfinite(low) else None, high if math.isfinite(high) else None, note)


def _draws_of(tasks: Sequence[Array], draws: int, seed: int) -> Array:
    """Means over tasks [draws, C] of tasks [n, C] whose items are drawn independently of one another."""
    return np.mean([resampled(task, draws, seed + i) for i, task in enumerate(tasks)], axis=0)


ONE_PROBLEM = "one problem says nothing about others: no interval"


def estimate(tasks: Sequence[Scores], draws: int = DRAWS, seed: int = 0) -> Interval:
    """pass@1, mean over tasks, with its interval. Raises ValueError without tasks, items or rollouts."""
    columns = [item_means(scores)[:, None] for scores in tasks]
    if not columns:
        raise ValueError("there are no tasks")
    value = float(np.mean([column.mean() for column in columns]))
    if min(map(len, columns)) < 2:
        return Interval(value, note=ONE_PROBLEM)
    return percentiles(_draws_of(columns, draws, seed)[:, 0], value)


@dataclass(frozen=True)
class Comparison:
    """A policy against the dense teacher on the same items.

    ``difference`` in pass@1, ``retention`` the ratio of the two (value None if the teacher scores 0). ``items`` problems of
    ``rollouts`` each, "8 to 16" where they differ. ``resolution``: half the width of the 95 % interval of a difference, from
    the variance of differences between items: observed differences below it are not told from 0. ``detectable``: the true
    difference that would be told from 0 in 80 of 100 such samples. Both None where no two items differ.
    """

    score: float
    teacher: float
    difference: Interval
    retention: Interval
    items: int
    rollouts: str
    resolution: float | None
    detectable: float | None


def compare(students: Sequence[Scores], teachers: Sequence[Scores], draws: int = DRAWS, seed: int = 0) -> Comparison:
    """A policy's scores on some tasks, paired item by item with the teacher's on the same tasks.

    Raises ValueError unless both have the same items, and as ``estimate`` does.
    """
    if not students or len(students) != len(teachers):
        raise ValueError(f"a comparison needs the same tasks on both sides, got {len(students)} and {len(teachers)}")
    pairs = []
    for student, teacher in zip(students, teachers):
        if alone := sorted(student.keys() ^ teacher.keys()):
            raise ValueError(f"not the same items on both sides: {len(alone)} have no partner, the first is {alone[0]}")
        pairs.append(np.stack([item_means(student), item_means(teacher)], axis=1))
    score, teacher_score = (float(np.mean([pair[:, side].mean() for pair in pairs])) for side in (0, 1))
    gap = score - teacher_score
    ratio = score / teacher_score if teacher_score else None
    counts = sorted({len(values) for task in (*students, *teachers) for values in task.values()})
    shown = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    items = sum(map(len, pairs))
    if min(map(len, pairs)) < 2:
        none = Interval(gap, note=ONE_PROBLEM), Interval(ratio, note=ONE_PROBLEM)
        return Comparison(score, teacher_score, *none, items, shown, None, None)
    means = _draws_of(pairs, draws, seed)
    retention = Interval(None, note="the teacher scores 0: there is nothing to retain")
    if ratio is not None:
        ratios = np.divide(means[:, 0], means[:, 1], out=np.full(len(means), np.inf), where=means[:, 1] > 0)
        retention = percentiles(ratios, ratio)
    variance = sum((pair[:, 0] - pair[:, 1]).var(ddof=1) / len(pair) for pair in pairs) / len(pairs) ** 2
    error = math.sqrt(variance)
    half, power = NormalDist().inv_cdf((1 + LEVEL) / 2), NormalDist().inv_cdf(POWER)
    told = (half * error, (half + power) * error) if error > 0 else (None, None)
    return Comparison(score, teacher_score, percentiles(means[:, 0] - means[:, 1], gap), retention, items, shown, *told)


def sentence(name: str, where: str, c: Comparison) -> str:
    """What a comparison says and what it cannot say, in plain words: ``name`` (a policy) on ``where`` (a task)."""
    problems = f"{c.items} problem{'s' if c.items > 1 else ''} x {c.rollouts} rollout{'s' if c.rollouts != '1' else ''}"
    parts = [f"{name} scores {c.score:.3f} on {where}, the dense teacher {c.teacher:.3f}"]
    d = c.difference
    if d.low is None or d.high is None:
        return f"{parts[0]}; {d.note}."
    parts.append(f"a difference of {d.value:+.3f} [{d.low:+.3f}, {d.high:+.3f}]")
    text = ": ".join(parts) + ". "
    if c.resolution is None or c.detectable is None:
        text += (
            f"The difference is the same on every problem, which is why its interval has no width: {problems} do not show how "
            f"it varies, and what happens in fewer than about {min(1.0, 3 / c.items):.0%} of problems may not have been seen."
        )
    else:
        text += (
            f"The interval contains 0: {problems} do not tell the two apart."
            if d.contains(0.0)
            else f"The interval does not contain 0: {problems} tell the two apart at 95 %."
        )
        text += (
            f" With this variance between problems, differences below {c.resolution:.3f} do not show at 95 %, and a true "
            f"difference of {c.detectable:.3f} would show in 4 of 5 such samples."
        )
    if c.retention.value is None:
        return f"{text} Retention is not given: {c.retention.note}."
    low, high = ("open" if x is None else f"{x:.3f}" for x in (c.retention.low, c.retention.high))
    text += f" Retention is {c.retention.value:.3f} [{low}, {high}]"
    return f"{text}; {c.retention.note}." if c.retention.note else f"{text}."

"""An experiment's outcome: policies side by side, a panel for each measure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes

from kvpop.plots.style import BLACK, BLUE, GREEN, LEAST_KL, ORANGE, PURPLE, VERMILION, plt, save, tidy

METRICS = {
    "kl": ("KL to dense", "nats a token, log scale"),
    "agreement": ("top-1 agreement", "share of tokens"),
    "recall": ("recall of the oracle's set", "share of slots"),
    "passkey": ("passkey", "share answered"),
    "needle": ("needles", "share answered"),
}
LOOKS = ((BLUE, "o"), (VERMILION, "s"), (GREEN, "D"), (ORANGE, "^"), (PURPLE, "v"))
Row = Mapping[str, Any]
Value = tuple[float, float, float]


def comparison_figure(rows: Sequence[Row], path: Path) -> None:
    """Policies on the y axis, best KL on top; in each panel a marker per budget with its interval, seeds as small dots.

    Rows are {"policy", "mode", "seed", "budget"} and any of "kl" (nats), "agreement", "recall", "passkey", "needle", each
    {"value", "low", "high"} or None. ``mode`` may be None or "" (nothing was trained). Rows that differ in the seed only are
    one marker: that of the row without a seed (None) if there is one, else their mean, with the mean of their intervals (seeds
    are measured on the same texts, so their intervals do not shrink together). A row of the policy "dense" is a line.

    Raises ValueError if no row of another policy has a value.
    """
    panels = [name for name in METRICS if any(_value(row, name) for row in rows if row["policy"] != "dense")]
    if not panels:
        raise ValueError("nothing to draw: no row of a policy other than dense has a value")
    groups: dict[str, dict[int, list[Row]]] = {}
    for row in rows:
        if row["policy"] != "dense":
            groups.setdefault(_label(row), {}).setdefault(row["budget"], []).append(row)
    budgets = sorted({budget for by_budget in groups.values() for budget in by_budget})
    labels = sorted(groups, key=lambda label: _rank(groups[label], budgets, panels[0]))
    height = 0.9 + max(0.34, 0.17 * len(budgets)) * len(labels)
    figure, grid = plt.subplots(
        1, len(panels), figsize=(2.0 + 2.6 * len(panels), height + 0.5), dpi=120, sharey=True, layout="constrained",
        squeeze=False,
    )  # fmt: skip
    dense = [row for row in rows if row["policy"] == "dense"]
    for axes, name in zip(grid[0], panels):
        for y in range(0, len(labels), 2):
            axes.axhspan(y - 0.5, y + 0.5, color="#F3F3F3", lw=0, zorder=0)
        for y, label in enumerate(labels):
            for i, budget in enumerate(budgets):
                place = y + 0.62 * ((i + 0.5) / len(budgets) - 0.5)
                _mark(axes, place, groups[label].get(budget, []), name, i)
        _finish(axes, name, [value[0] for row in dense if (value := _value(row, name))])
    left = grid[0][0]
    left.set_yticks(range(len(labels)), labels)
    left.set_ylim(len(labels) - 0.5, -0.5)
    handles: list[Any] = [
        plt.Line2D([], [], color=LOOKS[i % 5][0], marker=LOOKS[i % 5][1], linewidth=1.4, markersize=6)
        for i in range(len(budgets))
    ]
    names = [f"{budget:,} slots" for budget in budgets]
    if dense:
        handles.append(plt.Line2D([], [], color=BLACK, linestyle="--", linewidth=1.2))
        names.append("dense")
    if any(len(_seeds(members)) > 1 for by_budget in groups.values() for members in by_budget.values()):
        handles.append(plt.Line2D([], [], color="#666666", marker=".", linestyle="", markersize=5))
        names.append("single seeds")
    figure.legend(handles, names, loc="outside upper left", ncols=len(names), frameon=False, fontsize=9)
    save(figure, path)


def _label(row: Row) -> str:
    return f"{row['policy']} ({row['mode']})" if row.get("mode") else str(row["policy"])


def _value(row: Row, name: str) -> Value | None:
    """(value, low, high) of a metric; None where the row has none. An interval that is missing is the value itself."""
    metric = row.get(name)
    if metric is None or metric.get("value") is None or not math.isfinite(metric["value"]):
        return None
    value = float(metric["value"])
    low, high = (metric.get(end) for end in ("low", "high"))
    return value, value if low is None else float(low), value if high is None else float(high)


def _seeds(members: Sequence[Row]) -> list[Row]:
    return [row for row in members if row.get("seed") is not None]


def _pooled(members: Sequence[Row], name: str) -> Value | None:
    whole = [row for row in members if row.get("seed") is None] or members
    values = [value for row in whole if (value := _value(row, name))]
    if not values:
        return None
    value, low, high = (sum(column) / len(values) for column in zip(*values))
    return value, low, high


def _rank(by_budget: Mapping[int, list[Row]], budgets: Sequence[int], name: str) -> float:
    """The mean over the budgets a policy has: small KL first, of shares the large one."""
    found = [pooled[0] for budget in budgets if (pooled := _pooled(by_budget.get(budget, []), name))]
    if not found:
        return math.inf
    return sum(found) / len(found) * (1 if name == "kl" else -1)


def _mark(axes: Axes, y: float, members: Sequence[Row], name: str, index: int) -> None:
    pooled, (colour, marker) = _pooled(members, name), LOOKS[index % 5]
    if pooled is None:
        return
    floor = LEAST_KL if name == "kl" else -math.inf
    value, low, high = (max(x, floor) for x in pooled)
    axes.plot([low, high], [y, y], color=colour, linewidth=1.4, solid_capstyle="butt", zorder=3)
    axes.plot(value, y, color=colour, marker=marker, markersize=5.5, linestyle="", zorder=4, markeredgecolor="white",
              markeredgewidth=0.6, clip_on=False)  # fmt: skip
    seeds = [max(found[0], floor) for row in _seeds(members) if (found := _value(row, name))]
    if len(seeds) > 1:
        axes.plot(seeds, [y + 0.11] * len(seeds), color=colour, marker=".", markersize=5, linestyle="", alpha=0.8,
                  markeredgewidth=0, zorder=2)  # fmt: skip


def _finish(axes: Axes, name: str, dense: list[float]) -> None:
    title, unit = METRICS[name]
    if name == "kl":
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        if high / low < 300:
            axes.xaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda x, _: f"{x:g}"))
    for value in dense:
        if name != "kl" or value > 0:  # a KL of zero is not on a log axis
            axes.axvline(value, color=BLACK, linestyle="--", linewidth=1.2, zorder=1)
    if name in ("passkey", "needle"):
        axes.set_xlim(-0.03, 1.03)
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.set_xlabel(unit, fontsize=9)
    axes.tick_params(labelsize=8.5)
    tidy(axes)
    axes.grid(False, axis="y")  # shaded rows lead the eye instead

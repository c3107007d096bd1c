"""Decoding after long sequences: milliseconds a token and peak memory against tokens seen, a panel a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvpop.plots.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, plt, save, tidy

LOOKS = (
    (BLACK, "X"),
    (GREY, "o"),
    (SKY, "^"),
    (BLUE, "s"),
    (GREEN, "D"),
    (VERMILION, "P"),
    (ORANGE, "v"),
    (PURPLE, "*"),
)
Row = Mapping[str, Any]


def decode_figure(rows: Sequence[Row], path: Path) -> None:
    """Rows as ``kvpop bench decode`` writes them; those that were skipped leave a gap. Dashed: the floor of each policy.

    Memory has its panels if any row has a peak, dashed what weights and cache come to. Raises ValueError without rows.
    """
    rows = [row for row in rows if "skipped" not in row]
    if not rows:
        raise ValueError("nothing to draw: no combination was measured")
    batches = sorted({row["batch"] for row in rows})
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    measures = [("ms_per_token", "floor_ms", "ms a token")]
    if any(row.get("peak_gb") is not None for row in rows):
        measures.append(("peak_gb", "formula_gb", "peak memory, GB"))
    figure, grid = plt.subplots(
        len(measures), len(batches), figsize=(1.2 + 3.2 * len(batches), 0.9 + 2.5 * len(measures)), dpi=120, sharex=True,
        sharey="row", layout="constrained", squeeze=False,
    )  # fmt: skip
    for line, (name, floor, unit) in zip(grid, measures):
        for axes, batch in zip(line, batches):
            for i, policy in enumerate(policies):
                _draw(axes, [row for row in rows if (row["policy"], row["batch"]) == (policy, batch)], name, floor, i)
            tidy(axes)
        line[0].set_ylabel(unit, fontsize=9)
        values = [row[key] for row in rows for key in (name, floor) if row.get(key)]
        if values and max(values) > 20 * min(values):
            line[0].set_yscale("log")
            line[0].yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        else:
            line[0].set_ylim(bottom=0)
    for axes, batch in zip(grid[0], batches):
        axes.set_title(f"batch {batch}", loc="left", fontsize=10.5)
    seen = sorted({row["seen"] for row in rows})
    for axes in grid[-1]:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(seen))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"))
        axes.set_xlabel("tokens seen", fontsize=9)
    handles = [plt.Line2D([], [], color=LOOKS[i % 8][0], marker=LOOKS[i % 8][1]) for i in range(len(policies))]
    handles.append(plt.Line2D([], [], color=GREY, linestyle="--", linewidth=1.0))
    names = [*policies, "floor: weights and cache"]
    columns = min(len(names), 1 + len(batches))  # no wider than the panels
    figure.legend(handles, names, loc="outside upper left", ncols=columns, frameon=False, fontsize=9)
    save(figure, path)


def _draw(axes: Axes, rows: Sequence[Row], name: str, floor: str, index: int) -> None:
    colour, marker = LOOKS[index % 8]
    rows = sorted((row for row in rows if row.get(name) is not None), key=lambda row: row["seen"])
    seen = [row["seen"] for row in rows]
    axes.plot(seen, [row[name] for row in rows], color=colour, marker=marker, linewidth=1.4, markersize=5.5)
    axes.plot(seen, [row[floor] for row in rows], color=colour, linestyle="--", linewidth=1.0, alpha=0.8)
    axes.tick_params(labelsize=8.5)

"""The demo's figure: quality against budget, memory against tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes

from kvpop.plots.style import BLACK, BLUE, COLOURS, LEAST_KL, MARKERS, plt, save, tidy

MB = 1e6


def demo_figure(report: dict[str, Any], path: Path) -> None:
    """Left: KL to dense against the budget, a line per policy. Right: KV-cache memory against tokens generated.

    ``report`` has "rows" of {"policy", "budget", "kl"} (budget None: dense) and "generation" with "budget",
    "bytes_last", "bytes_dense" and a "trace" of {"tokens", "bytes", "bytes_dense"}. Raises ValueError without a row that
    has a budget, or with an empty trace.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.9), dpi=120, layout="constrained")
    _quality(left, report["rows"])
    _memory(right, report["generation"])
    save(figure, path)


def _quality(axes: Axes, rows: list[dict[str, Any]]) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["budget"] is not None and row["kl"] is not None and math.isfinite(row["kl"]):
            lines.setdefault(row["policy"], []).append((int(row["budget"]), float(row["kl"])))
    if not lines:
        raise ValueError("nothing to draw: no row has a budget and a finite kl")
    learned = [name for name in lines if name.startswith("kvpop")]
    spare = iter(range(len(lines)))
    for name in sorted(
        lines, key=lambda name: -min(lines[name])[1]
    ):  # the legend reads from top to bottom, as the lines
        points = sorted(lines[name])
        style: dict[str, Any] = dict(linewidth=1.6, markersize=6)
        if name in learned:
            dash = ("-", "--", ":", "-.")[learned.index(name) % 4]
            style = dict(color=BLUE, marker="o", linewidth=2.6, markersize=7, zorder=3, linestyle=dash)
        elif name == "oracle":  # a ceiling, not a method
            style |= dict(color=BLACK, marker="_", linestyle=":", zorder=2)
        else:
            index = next(spare) % len(COLOURS)
            style |= dict(color=COLOURS[index], marker=MARKERS[index])
        axes.plot([x for x, _ in points], [max(y, LEAST_KL) for _, y in points], label=name, **style)
    budgets = sorted({x for points in lines.values() for x, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(budgets, [f"{x:,}" for x in budgets])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    if high / low < 300:  # few powers of ten in sight: ticks at 1, 2, 5
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda y, _: f"{y:g}"))
    axes.margins(x=0.08)
    axes.set_xlabel("budget (slots per KV head)")
    axes.set_ylabel("KL to dense (nats a token, log scale)")
    axes.set_title("How far from the dense model (lower is better; dense = 0)", loc="left", fontsize=11)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles, names, frameon=False, fontsize=9)
    tidy(axes)


def _memory(axes: Axes, generation: dict[str, Any]) -> None:
    trace = generation["trace"]
    if not trace:
        raise ValueError("nothing to draw: the trace of the generation is empty")
    tokens = [point["tokens"] for point in trace]
    bounded = [point["bytes"] / MB for point in trace]
    dense = [point["bytes_dense"] / MB for point in trace]
    last = f"at {tokens[-1]:,} tokens"
    axes.plot(tokens, dense, color=BLACK, linewidth=1.8, linestyle="--",
              label=f"dense (computed): {_megabytes(dense[-1])} {last}")  # fmt: skip
    axes.plot(tokens, bounded, color=BLUE, linewidth=2.4, marker="o", markersize=5, markevery=max(1, len(tokens) // 12),
              label=f"budget of {generation['budget']:,} slots (measured): {_megabytes(bounded[-1])} {last}")  # fmt: skip
    axes.fill_between(
        tokens, bounded, dense, where=[d > b for d, b in zip(dense, bounded)], color=BLUE, alpha=0.07, lw=0
    )
    axes.set_ylim(0, 1.3 * max(*dense, *bounded))  # room for the legend
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    axes.xaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    axes.set_xlabel("tokens generated")
    axes.set_ylabel("KV-cache memory (MB)")
    axes.set_title("Memory while generating", loc="left", fontsize=11)
    tidy(axes)


def _megabytes(value: float) -> str:
    return f"{value:,.0f} MB" if value >= 100 else f"{value:.3g} MB"

"""How training went: panels over the steps of one or several logs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from kvpop.plots.style import BLUE, COLOURS, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, plt, save, smooth, tidy

Record = dict[str, Any]
RUNS = (BLUE, *COLOURS)
STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Curve:
    """One quantity: ``read`` gives its numbers at a step, several for what there is per head or layer, none if absent.

    The line is their mean (on a log axis the median), the band covers 10 to 90 % of them; ``strands`` draws each instead.
    """

    label: str
    read: Callable[[Record], list[float]]
    colour: str = BLUE
    strands: bool = False


@dataclass(frozen=True)
class Panel:
    """``unit``: of the y axis. ``band``: what a band is about. ``base``: draw from 0. ``chance``: a dotted line. ``exact``:
    nothing to smooth, and what falls far below the curves' peaks is cut off (a cosine ends at zero)."""

    title: str
    unit: str
    curves: tuple[Curve, ...]
    band: str = ""
    log: bool = False
    base: bool = False
    chance: float | None = None
    exact: bool = False


def numbers(value: Any) -> list[float]:
    """A number, or the numbers of nested lists; what is missing or not finite is left out."""
    if isinstance(value, list):
        return [x for item in value for x in numbers(item)]
    return [] if value is None or not math.isfinite(value) else [float(value)]


def key(name: str, scale: float = 1.0) -> Callable[[Record], list[float]]:
    return lambda record: [scale * x for x in numbers(record.get(name))]


def half_lives(record: Record) -> list[float]:
    """Of scores, in decay steps (tokens, unless the policy's step is longer), from log-decays in nats a step."""
    return [math.log(2) / -x for x in numbers(record.get("decay")) if x < 0]


GROUPS = {"scorer": BLUE, "decay": ORANGE, "gate": PURPLE, "lora": GREEN, "base": VERMILION}
"""Of the optimizer, in the order of the legend."""


def of_groups(suffix: str) -> tuple[Curve, ...]:
    """A curve for every parameter group: "scorer_lr", "base_lr", ... for the suffix "lr"."""
    names = {"base": "model"}
    return tuple(Curve(names.get(group, group), key(f"{group}_{suffix}"), colour) for group, colour in GROUPS.items())


def panels() -> list[Panel]:
    """All that a log can show, in the order of reading."""
    return [
        Panel("boundary loss", "nats", (Curve("", key("score_loss"), VERMILION),)),
        Panel("KL to the dense teacher", "nats a token", (Curve("", key("kl"), ORANGE),)),
        Panel("accuracy of decisions", "share", (Curve("", key("accuracy"), BLUE),), chance=0.5),
        Panel("recall of the teacher's set", "share", (
            Curve("layers", key("recall_by_layer"), GREEN, strands=True), Curve("mean", key("recall"), GREEN),
        )),
        Panel("arrivals that are kept", "share", (
            Curve("teacher", key("keep"), PURPLE), Curve("student", key("student_keep"), BLUE),
        ), band="10 to 90 % of KV heads"),
        Panel("half-life of a score", "tokens", (Curve("median", half_lives, SKY),), band="10 to 90 % of KV heads", log=True),
        Panel("gates that close", "share", (Curve("", key("closed"), PURPLE),), band="10 to 90 % of layers"),
        Panel("keys at the edges of the target", "% of keys", (
            Curve("mass above 1", key("above_one", 100), VERMILION),
            Curve("mass below epsilon", key("under_epsilon", 100), BLUE),
        ), base=True),
        Panel("throughput", "tokens a second", (Curve("", key("tokens_per_s"), GREEN),), base=True),
        Panel("model FLOPs utilisation", "%", (Curve("", key("mfu", 100), GREEN),), base=True),
        Panel("learning rate", "", of_groups("lr"), log=True, exact=True),
        Panel("gradient norm before clipping", "", of_groups("grad"), log=True),
    ]  # fmt: skip


def training_figure(logs: Path | str | Mapping[str, Path], path: Path) -> None:
    """A panel for each quantity that the logs (JSONL, as ``distill`` writes them) hold, over the training step.

    ``logs``: one log, or several by the name that the legend gives them; then colours tell runs apart, and quantities
    per head show their mean or median only. Raises ValueError for a log without a line, and if there is nothing to draw.
    """
    named_logs = logs if isinstance(logs, Mapping) else {"": logs}
    runs = {name: _read(Path(log)) for name, log in named_logs.items()}
    everything = [record for records in runs.values() for record in records]
    shown = [panel for panel in panels() if any(curve.read(r) for curve in panel.curves for r in everything)]
    if not shown:
        raise ValueError(f"nothing to draw: {', '.join(map(str, named_logs.values()))} hold no quantity that is known")
    columns = 1 if len(shown) == 1 else 2 if len(shown) <= 4 else 3
    rows = -(-len(shown) // columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(4.6 * columns, 2.7 * rows + 0.3),
        dpi=120,
        sharex=True,
        layout="constrained",
        squeeze=False,
    )
    for axes, panel in zip(grid.flat, shown):
        _draw(axes, panel, runs)
    for i, axes in enumerate(grid.flat):
        axes.set_visible(i < len(shown))
        if i < len(shown) <= i + columns:  # the lowest of its column
            axes.tick_params(labelbottom=True)
    figure.supxlabel("training step", fontsize=9)
    if len(runs) > 1:
        lines = [plt.Line2D([], [], color=RUNS[i % len(RUNS)], linewidth=2.2) for i in range(len(runs))]
        figure.legend(lines, list(runs), loc="outside upper left", ncols=min(4, len(runs)), frameon=False)
    save(figure, path)


def _read(log: Path) -> list[Record]:
    records = [json.loads(line) for line in log.read_text().splitlines() if line.strip()]
    if not records:
        raise ValueError(f"nothing to draw: {log} has no line")
    return records


def _draw(axes: Axes, panel: Panel, runs: Mapping[str, list[Record]]) -> None:
    alone, banded, peaks = len(runs) == 1, False, []
    present = [
        curve
        for curve in panel.curves
        if (alone or not curve.strands) and any(curve.read(r) for records in runs.values() for r in records)
    ]
    for i, records in enumerate(runs.values()):
        steps = [record["step"] for record in records]
        for j, curve in enumerate(present):
            at_step = [curve.read(record) for record in records]
            if curve.strands:
                _strands(axes, steps, at_step)
                continue
            middle = np.median if panel.log else np.mean
            values = [float(middle(x)) if x else math.nan for x in at_step]
            if all(map(math.isnan, values)):
                continue
            colour = curve.colour if alone else RUNS[i % len(RUNS)]
            if alone and panel.band and any(len(x) > 1 for x in at_step):
                low, high = zip(*(np.quantile(x, (0.1, 0.9)) if x else (math.nan, math.nan) for x in at_step))
                if not banded:
                    axes.fill_between(steps, low, high, color=colour, alpha=0.18, lw=0)
                else:  # a second band on the first would hide it
                    axes.plot(steps, np.transpose([low, high]), color=colour, linewidth=0.9, linestyle="--")
                banded = True
            elif not panel.exact:
                axes.plot(
                    steps, values, color=colour, linewidth=0.8, alpha=0.35, marker="." if len(steps) < 40 else None
                )
            style = "-" if alone else STYLES[j % len(STYLES)]
            axes.plot(steps, values if panel.exact else smooth(values), color=colour, linewidth=2.0, linestyle=style)
            peaks.append(np.nanmax(values))
    if panel.exact and min(peaks) > 0:
        axes.set_ylim(bottom=min(peaks) / 50)
    _finish(axes, panel, present, alone, banded)


def _strands(axes: Axes, steps: list[int], at_step: list[list[float]]) -> None:
    """A thin line a layer, light to dark from the first to the last."""
    layers = max(map(len, at_step))
    shades = matplotlib.colormaps["YlGn"](np.linspace(0.25, 0.95, layers))
    for layer in range(layers):
        values = [x[layer] if len(x) == layers else math.nan for x in at_step]
        axes.plot(steps, smooth(values), color=shades[layer], linewidth=0.7, alpha=0.8)


def _finish(axes: Axes, panel: Panel, curves: list[Curve], alone: bool, banded: bool) -> None:
    if panel.log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high / low < 30:  # too few powers of ten in sight
            axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
            axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
            axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda y, _: f"{y:,g}"))
    elif panel.base:
        axes.set_ylim(bottom=0)
    if panel.chance is not None:
        axes.axhline(panel.chance, color=GREY, linewidth=1, linestyle=":")
        axes.annotate("chance", (1, panel.chance), xycoords=("axes fraction", "data"), xytext=(-4, 3), ha="right",
                      textcoords="offset points", color="#666666", fontsize=8)  # fmt: skip
    axes.set_title(panel.title, loc="left", fontsize=10.5)
    axes.set_ylabel(panel.unit, fontsize=9)
    axes.tick_params(labelsize=8.5)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5, integer=True))
    if not panel.log and axes.get_ylim()[1] >= 10_000:
        axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda y, _: f"{y / 1000:,g}k"))
    handles: list[Any] = []
    labels: list[str] = []
    if len(curves) > 1 or banded:
        for j, curve in enumerate(curves):
            look: dict[str, Any] = dict(color=curve.colour) if alone else dict(color="#444444", linestyle=STYLES[j % 4])
            if not curve.label:
                continue
            label = f"{curve.label} (light: first)" if curve.strands else curve.label
            handles.append(plt.Line2D([], [], linewidth=0.9 if curve.strands else 2.0, **look))
            labels.append(label)
    if banded:
        handles.append(plt.Rectangle((0, 0), 1, 1, color=GREY, alpha=0.25, lw=0))
        labels.append(panel.band)
    if handles:
        axes.legend(handles, labels, fontsize=8, loc="best", framealpha=0.75, edgecolor="none")
    tidy(axes)

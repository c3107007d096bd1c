"""What policies keep: retention maps, kinds of tokens, recall, use of the budget, lifetimes, turnover, decay, timing.

Policies come as mappings from the name that the figure gives them; arrays have a row per layer. Shapes: L layers, H KV heads,
S tokens, M tokens of a stretch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps, font_manager, ft2font
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from kvpop.plots.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, plt, save, smooth, tidy

Array = NDArray[Any]
MAP = "cividis"
"""Light is much; the same with every kind of colour vision, and in grey."""
LONGEST_LABEL = 14
DASHES = ("-", "--", "-.", ":")


LEARNED, OTHERS = (BLUE, PURPLE, GREEN), (VERMILION, SKY, ORANGE, GREY)


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Line and colour of every policy: the first learned one blue, the oracle black and dotted; colours that come again are
    dashed."""
    found: dict[str, dict[str, Any]] = {}
    learned = others = 0
    for name in names:
        if name.startswith("oracle"):
            found[name] = dict(color=BLACK, linestyle=":", linewidth=2.0, zorder=2)
        elif name.startswith("kvpop"):
            turn, i = divmod(learned, len(LEARNED))
            found[name] = dict(color=LEARNED[i], linestyle=DASHES[turn % 4], linewidth=2.4, zorder=3)
            learned += 1
        else:
            turn, i = divmod(others, len(OTHERS))
            found[name] = dict(color=OTHERS[i], linestyle=DASHES[turn % 4], linewidth=1.8)
            others += 1
    return found


def _looks_of(every: Iterable[str], drawn: Iterable[str]) -> list[tuple[str, dict[str, Any]]]:
    """Looks by all policies of an analysis, so that one that is left out here changes no colour."""
    found = looks(list(every))
    return [(name, found[name]) for name in drawn]


# Retention maps.


def retention_figure(
    maps: Mapping[str, Array], strings: Sequence[str], layers: Sequence[int], heads: int, path: Path, first: int = 0
) -> None:
    """How many of ``heads`` KV heads hold each token, [L, M] a policy: layers down, the tokens' ``strings`` along the axis.

    ``first``: the position of the first of them in the text. Legible up to some 120 tokens. Raises ValueError without a
    policy, and for a map that is not of these layers and tokens.
    """
    _check_maps(maps, layers, len(strings))
    M, L = len(strings), len(layers)
    width, height = max(6.0, 1.9 + 0.128 * M), max(1.5, 0.085 * L)
    figure, grid = plt.subplots(
        len(maps), 1, figsize=(width, 1.15 + (height + 0.3) * len(maps)), dpi=120, sharex=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    image: Any = None
    for axes, (name, map_LM) in zip(grid[:, 0], maps.items()):
        image = _count_map(axes, map_LM, heads)
        axes.set_title(f"{name} (mean {map_LM.mean() / heads:.0%} of the heads)", loc="left", fontsize=10.5)
        _layer_axis(axes, layers)
    lowest = grid[-1, 0]
    lowest.set_xticks(range(M))
    lowest.set_xticklabels([shown(string) for string in strings], rotation=90, fontsize=7.5, parse_math=False)
    lowest.tick_params(axis="x", length=2, pad=1.5)
    lowest.set_xlabel(f"token (positions {first:,} to {first + M - 1:,})", fontsize=9)
    _count_bar(figure, image, list(grid[:, 0]), heads)
    save(figure, path)


def overview_figure(
    maps: Mapping[str, Array], layers: Sequence[int], heads: int, path: Path, columns: int = 600
) -> None:
    """The same for whole texts, [L, S] a policy, by position; more than ``columns`` tokens are averaged in bins."""
    S = next(iter(maps.values())).shape[1] if maps else 0
    _check_maps(maps, layers, S)
    width = -(-S // columns)
    figure, grid = plt.subplots(
        len(maps), 1, figsize=(11, 0.75 + max(1.5, 0.07 * len(layers) + 0.35) * len(maps)), dpi=120, sharex=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    image: Any = None
    for axes, (name, map_LS) in zip(grid[:, 0], maps.items()):
        edges = np.arange(0, S, width)
        mean_LC = np.add.reduceat(map_LS, edges, axis=1) / np.diff(np.append(edges, S))
        image = axes.imshow(
            mean_LC, aspect="auto", interpolation="nearest", cmap=MAP, vmin=0, vmax=heads,
            extent=(-0.5, len(edges) * width - 0.5, len(layers) - 0.5, -0.5),
        )  # fmt: skip
        axes.set_xlim(-0.5, S - 0.5)
        axes.set_title(name, loc="left", fontsize=10.5)
        _layer_axis(axes, layers)
    grid[-1, 0].set_xlabel("position in the text (tokens)", fontsize=9)
    grid[-1, 0].tick_params(axis="x", labelsize=8.5)
    grid[-1, 0].xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    bar = figure.colorbar(image, ax=list(grid[:, 0]), pad=0.01, aspect=40, fraction=0.03)
    bar.set_label("KV heads that hold the token" + (f", mean of {width} tokens" if width > 1 else ""), fontsize=9)
    bar.ax.tick_params(labelsize=8.5)
    bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    save(figure, path)


@cache
def _glyphs() -> ft2font.FT2Font:
    return ft2font.FT2Font(font_manager.findfont("DejaVu Sans"))


def shown(string: str) -> str:
    """A token as a label: line ends, tabs and spaces are signs, what the font lacks is a box, what is long is cut."""
    core = string.strip(" ")
    text = core.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "␍") if core else "␣" * min(len(string), 4)
    text = "".join(c if c.isprintable() and _glyphs().get_char_index(ord(c)) else "□" for c in text) or "∅"
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"


def _check_maps(maps: Mapping[str, Array], layers: Sequence[int], tokens: int) -> None:
    if not maps or not tokens:
        raise ValueError(f"a map needs policies and tokens, got {len(maps)} and {tokens}")
    for name, found in maps.items():
        if found.shape != (len(layers), tokens):
            raise ValueError(f"the map of {name} must have shape {[len(layers), tokens]}, got {list(found.shape)}")


def _steps(heads: int) -> tuple[Colormap, BoundaryNorm]:
    """A colour for each number of heads."""
    return ListedColormap(colormaps[MAP](np.linspace(0, 1, heads + 1))), BoundaryNorm(
        np.arange(heads + 2) - 0.5, heads + 1
    )


def _count_map(axes: Axes, map_LM: Array, heads: int) -> Any:
    colours, norm = _steps(heads)
    image = axes.imshow(map_LM, aspect="auto", interpolation="nearest", cmap=colours, norm=norm)
    axes.set_xticks(np.arange(map_LM.shape[1] + 1) - 0.5, minor=True)
    axes.grid(True, which="minor", axis="x", color="white", linewidth=0.4)
    axes.tick_params(which="minor", length=0)
    return image


def _count_bar(figure: Figure, image: Any, axes: Sequence[Axes], heads: int) -> None:
    bar = figure.colorbar(image, ax=list(axes), pad=0.01, aspect=40, fraction=0.03, spacing="uniform")
    bar.set_ticks(range(0, heads + 1, max(1, heads // 8)))
    bar.ax.tick_params(labelsize=8.5)
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.set_label("KV heads that hold the token", fontsize=9)


def _layer_axis(axes: Axes, layers: Sequence[int], label: str = "layer") -> None:
    step = max(1, -(-len(layers) // 6))
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000) if s >= step)
    axes.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    axes.set_ylabel(label, fontsize=9)
    axes.tick_params(axis="y", labelsize=8.5)


# Kinds of tokens.


def kinds_figure(
    rows: Mapping[str, Sequence[Mapping[str, Any]]], path: Path, age: int, order: Sequence[str] = ()
) -> None:
    """How much more often than the average token each kind is kept: bars from 1 on, a colour a policy, intervals over texts.

    ``rows``: of each policy {"kind", "count", "base", "kept", "lift", "low", "high"} as ``kept_by_kind`` counts at this
    ``age``; policies whose lifts are all None are left out. ``order`` of the kinds from the top. Raises ValueError if nothing
    is left.
    """
    shown_rows = {
        name: {row["kind"]: row for row in found}
        for name, found in rows.items()
        if any(row["lift"] is not None for row in found)
    }
    if not shown_rows:
        raise ValueError("nothing to draw: no policy keeps a token to that age")
    first = next(iter(shown_rows.values()))
    kinds = sorted(first, key=lambda kind: (order.index(kind) if kind in order else len(order), kind))
    every = [row for of in shown_rows.values() for row in of.values()]
    values = [x for row in every for x in (row["lift"], row["low"], row["high"]) if x is not None and x > 0]
    floor, top = max(1 / 32, min(*values, 0.8) / 1.15), max(*values, 1.25) * 1.15
    thick = 0.8 / len(shown_rows)
    figure, axes = plt.subplots(
        figsize=(8.5, 1.4 + len(kinds) * max(0.3, 0.15 * len(shown_rows))), dpi=120, layout="constrained"
    )
    for i, (name, look) in enumerate(_looks_of(rows, shown_rows)):
        for y, kind in enumerate(kinds):
            row = shown_rows[name].get(kind)
            if row is None or row["lift"] is None:
                continue
            place, lift = y + thick * (i + 0.5) - 0.4, max(row["lift"], floor)
            label = f"{name} (keeps {_overall(shown_rows[name]):.0%})" if y == 0 else None
            axes.barh(place, lift - 1, left=1, height=thick * 0.92, color=look["color"], alpha=0.55, label=label, lw=0)
            if row["low"] is not None:
                ends = [min(max(row[end], floor), top) for end in ("low", "high")]
                axes.plot(ends, [place, place], color="#222222", linewidth=1.3, zorder=4, solid_capstyle="butt")
    for y in range(0, len(kinds), 2):
        axes.axhspan(y - 0.5, y + 0.5, color="#F3F3F3", lw=0, zorder=0)
    axes.axvline(1, color=BLACK, linewidth=1.0, zorder=3)
    axes.set_xscale("log", base=2)
    axes.set_xlim(floor, top)
    fine = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.4, 1.6, 1.8, 2, 2.5)
    halves = (0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4)
    ticks = fine if top / floor < 4 else halves if top / floor < 16 else tuple(2.0**i for i in range(-5, 8))
    axes.xaxis.set_major_locator(FixedLocator([x for x in ticks if floor <= x <= top]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}×"))
    axes.set_yticks(
        range(len(kinds)), [f"{kind}  ({first[kind]['base']:.1%}, n = {first[kind]['count']:,})" for kind in kinds]
    )
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.tick_params(labelsize=8.5)
    axes.set_xlabel(
        f"kept {age:,} tokens after leaving the window, relative to the average token (log scale)", fontsize=9
    )
    tidy(axes)
    axes.grid(False, axis="y")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=min(3, len(shown_rows)), frameon=False,
                  fontsize=9)  # fmt: skip
    save(figure, path)


def _overall(rows: Mapping[str, Mapping[str, Any]]) -> float:
    return sum(row["base"] * row["kept"] for row in rows.values())


# Heads.


def recall_figure(
    recalls: Mapping[str, Array], layers: Sequence[int], path: Path, whose: str = "the policy's own pass"
) -> None:
    """Share of the oracle's tokens that each head holds, [L, H] a policy, NaN hatched: heat maps beside each other, and right
    of them how the heads of all layers are distributed. ``whose`` attention says which tokens those are."""
    names = [name for name, found in recalls.items() if np.isfinite(found).any()]
    if not names:
        raise ValueError("nothing to draw: no policy has a recall")
    titles = [f"{name}\nmean {np.nanmean(recalls[name]):.0%}" for name in names]
    figure, panels, right = _heat_maps([recalls[name] for name in names], titles, layers)
    image: Any = None
    for axes, name in zip(panels, names):
        image = _heat_map(axes, recalls[name], Normalize(0.0, 1.0))
    _heat_bar(figure, image, panels, "share of the tokens with the most future attention", share=True)
    for name, look in _looks_of(recalls, names):
        values = np.sort(recalls[name][np.isfinite(recalls[name])])
        right.step(values, (np.arange(len(values)) + 1) / len(values), where="post", label=name, **look)
    right.set_xlim(-0.02, 1.02)
    right.set_ylim(0, 1.02)
    right.set_xlabel("recall (share of a head's long-range slots)", fontsize=9)
    right.set_ylabel("share of KV heads at or below", fontsize=9)
    _finish_right(figure, right, f"all heads; attention of {whose}")
    save(figure, path)


def use_figure(uses: Mapping[str, Array], shares: Mapping[str, Array], layers: Sequence[int], path: Path) -> None:
    """Long-range tokens that each head holds on average, [L, H] a policy: heat maps, and how unequal heads are.

    Where few heads have most of it (the largest above 20 times the median), colours are on a log scale from 1 token on.
    Right: ``shares``, how much of all that is held the busiest heads have, [L * H] a policy, growing to 1; on the diagonal all
    heads hold the same. Raises ValueError if no policy holds a long-range token.
    """
    names = [name for name, found in uses.items() if np.nansum(found) > 0]
    if not names:
        raise ValueError("nothing to draw: no policy holds a long-range token")
    top = max(float(np.nanmax(uses[name])) for name in names)
    middle = float(np.nanmedian(np.concatenate([np.ravel(uses[name]) for name in names])))
    norm = LogNorm(1.0, max(top, 10.0)) if top > 20 * middle else Normalize(0.0, top)
    titles = [f"{name}\nmean {np.nanmean(uses[name]):,.0f}" for name in names]
    figure, panels, right = _heat_maps([uses[name] for name in names], titles, layers)
    image: Any = None
    for axes, name in zip(panels, names):
        image = _heat_map(axes, uses[name] if norm.vmin == 0 else np.maximum(uses[name], 1.0), norm)
    _heat_bar(figure, image, panels, "long-range tokens held (mean over queries)")
    right.plot([0, 1], [0, 1], color=GREY, linewidth=1.0, zorder=1)
    for name, look in _looks_of(uses, names):
        share = np.concatenate([[0.0], shares[name]])
        right.plot(np.linspace(0, 1, len(share)), share, label=name, **look)
    right.set_xlim(0, 1)
    right.set_ylim(0, 1.02)
    right.set_xlabel("share of KV heads, the busiest first", fontsize=9)
    right.set_ylabel("their share of all that is held", fontsize=9)
    _finish_right(figure, right, "concentration (diagonal: all equal)")
    save(figure, path)


def _heat_maps(
    arrays: Sequence[Array], titles: Sequence[str], layers: Sequence[int]
) -> tuple[Figure, list[Axes], Axes]:
    heads = arrays[0].shape[1]
    wide = max(1.15, 0.22 * heads)
    longest = max(max(map(len, title.split("\n"))) for title in titles)
    wide = max(wide, 0.085 * longest)
    figure, grid = plt.subplots(
        1, len(arrays) + 1, figsize=(1.7 + (wide + 0.15) * len(arrays) + 4.2, max(3.6, 1.3 + 0.12 * len(layers))), dpi=120,
        width_ratios=[wide] * len(arrays) + [3.6], layout="constrained",
    )  # fmt: skip
    panels = list(grid[:-1])
    for i, (axes, title) in enumerate(zip(panels, titles)):
        axes.set_title(title, loc="left", fontsize=9.5)
        _layer_axis(axes, layers, "layer" if i == 0 else "")
        if i:
            axes.tick_params(labelleft=False)
        axes.set_xlabel("KV head", fontsize=9)
    return figure, panels, grid[-1]


def _heat_map(axes: Axes, values_LH: Array, norm: Normalize) -> Any:
    axes.set_facecolor("#DDDDDD")
    image = axes.imshow(values_LH, aspect="auto", interpolation="nearest", cmap=MAP, norm=norm)
    missing = np.isnan(values_LH)
    if missing.any():
        for row, column in zip(*np.nonzero(missing)):
            axes.add_patch(
                plt.Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, hatch="////", lw=0, edgecolor=GREY)
            )
    H = values_LH.shape[1]
    axes.set_xticks(range(0, H, max(1, -(-H // 8))))
    axes.tick_params(labelsize=8.5)
    return image


def _heat_bar(figure: Figure, image: Any, panels: Sequence[Axes], label: str, share: bool = False) -> None:
    bar = figure.colorbar(image, ax=list(panels), pad=0.015, aspect=26, fraction=0.05)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(labelsize=8.5)
    if share:
        bar.set_ticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    else:
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
        bar.ax.yaxis.set_minor_formatter(NullFormatter())


def _finish_right(figure: Figure, axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.tick_params(labelsize=8.5)
    tidy(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=min(5, len(labels)), frameon=False, fontsize=9)


# Over tokens.


def lifetimes_figure(
    curves: Mapping[str, Sequence[float]], ages: Sequence[int], path: Path, long: int | None = None
) -> None:
    """Share of the tokens still held at each of ``ages`` (tokens) after they left the window: a survival curve a policy.

    ``long``: where a plain window of the same memory drops everything, a dotted line. Gaps (NaN): nothing observed. Raises
    ValueError without a curve.
    """
    if not curves:
        raise ValueError("nothing to draw: no policy has lifetimes")
    figure, axes = plt.subplots(figsize=(7.5, 4.4), dpi=120, layout="constrained")
    for name, look in looks(list(curves)).items():
        axes.step(ages, curves[name], where="post", label=name, **look)
    if long is not None:
        axes.axvline(long, color=GREY, linewidth=1.0, linestyle=":")
        axes.annotate(f"{long:,} long-range slots", (long, 0.95), xycoords=("data", "axes fraction"), xytext=(4, -3),
                      textcoords="offset points", va="top", color="#555555", fontsize=8.5)  # fmt: skip
    axes.set_ylim(0, 1.02)
    known = [age for curve in curves.values() for age, y in zip(ages, curve) if y > 0]
    axes.set_xlim(0, max([*known, long or 0, 1]) * 1.02)
    axes.set_xlabel("age: tokens since the token left the window", fontsize=9)
    axes.set_ylabel("share of tokens still held", fontsize=9)
    axes.set_title("How long tokens stay, all layers and KV heads", loc="left", fontsize=10.5)
    axes.tick_params(labelsize=8.5)
    tidy(axes)
    axes.legend(frameon=True, framealpha=0.85, edgecolor="none", fontsize=9)
    save(figure, path)


def turnover_figure(rates: Mapping[str, Array], layers: Sequence[int], path: Path, start: int = 0) -> None:
    """Long-range tokens dropped per generated token and KV head, [L, S] a policy (mean over heads): over positions from
    ``start`` on (smoothed), and by layer. 1: every arrival pushes another token out."""
    if not rates:
        raise ValueError("nothing to draw: no policy has a turnover")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), dpi=120, layout="constrained", width_ratios=[3, 2])
    for name, look in looks(list(rates)).items():
        rate_S = rates[name].mean(0)[start:]
        left.plot(np.arange(start, start + len(rate_S)), smooth(rate_S.tolist()), label=name, **look)
        right.plot(layers, rates[name][:, start:].mean(1), marker="o", markersize=3.5, **look)
    top = max(1.0, *(axes.get_ylim()[1] for axes in (left, right)))
    for axes, title, label in (
        (left, "over the text (smoothed)", "position in the text (tokens)"),
        (right, "by layer", "layer"),
    ):
        axes.set_ylim(-0.02, top * 1.03)
        axes.set_title(title, loc="left", fontsize=10.5)
        axes.set_xlabel(label, fontsize=9)
        axes.tick_params(labelsize=8.5)
        tidy(axes)
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_ylabel("long-range tokens replaced\nper token and KV head", fontsize=9)
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=min(5, len(rates)), frameon=False,
                  fontsize=9)  # fmt: skip
    save(figure, path)


def decay_figure(half_lives: Mapping[str, Array], layers: Sequence[int], path: Path) -> None:
    """Half-lives of scores in tokens, [L, H] a policy: a dot a KV head, a line through the layers' medians.

    Heads without decay (inf) and without scores (NaN) are left out. Raises ValueError if no head has one.
    """
    known = {name: np.where(np.isfinite(x), x, np.nan) for name, x in half_lives.items() if np.isfinite(x).any()}
    if not known:
        raise ValueError("nothing to draw: no head has a decay")
    figure, axes = plt.subplots(figsize=(8, 4.2), dpi=120, layout="constrained")
    for i, (name, look) in enumerate(_looks_of(half_lives, known)):
        values = known[name]
        H = values.shape[1]
        shift = 0.5 * ((i + 0.5) / len(known) - 0.5) if len(known) > 1 else 0.0
        place = np.asarray(layers)[:, None] + shift + 0.2 * (np.arange(H) - (H - 1) / 2) / max(1, H)
        axes.plot(place.ravel(), values.ravel(), color=look["color"], marker="o", markersize=3.6, linestyle="", alpha=0.6,
                  markeredgewidth=0)  # fmt: skip
        some = np.isfinite(values).any(1)
        axes.plot(
            np.asarray(layers)[some], np.nanmedian(values[some], axis=1), label=f"{name}, median of {H} heads", **look
        )
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < 1.5:  # all alike: a scale that magnifies rounding would say they are not
        middle = math.sqrt(low * high)
        axes.set_ylim(middle / 1.5, middle * 1.5)
    if high / low < 100:
        subs = (1.0, 2.0, 3.0, 5.0, 7.0) if high / low > 8 else tuple(map(float, range(1, 10)))
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("layer", fontsize=9)
    axes.set_ylabel("half-life of a score (tokens, log scale)", fontsize=9)
    axes.set_title("Tokens after which a score has lost log 2 nats", loc="left", fontsize=10.5)
    axes.tick_params(labelsize=8.5)
    tidy(axes)
    axes.legend(frameon=True, framealpha=0.85, edgecolor="none", fontsize=9)
    save(figure, path)


TIMING = {
    "accuracy": ("accuracy of decisions", "share", 100, "points"),
    "recall": ("recall of the teacher's set", "share", 100, "points"),
    "kl": ("KL to the dense teacher", "nats a token", 1, "nats a token"),
    "score_loss": ("boundary loss", "nats", 1, "nats"),
}


def timing_figure(found: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Delayed against immediate scoring over training: a column a measure, both curves, and below their difference.

    ``found``: per measure {"step", "delayed", "immediate", "difference"}. Raises ValueError without a known measure.
    """
    names = [name for name in TIMING if name in found]
    if not names:
        raise ValueError(f"nothing to draw: none of {', '.join(TIMING)} is given")
    figure, grid = plt.subplots(
        2, len(names), figsize=(max(5.0, 4.0 * len(names)), 5.2), dpi=120, sharex=True, height_ratios=[3, 2], squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for (upper, lower), name in zip(grid.T, names):
        title, unit, scale, points = TIMING[name]
        rows = found[name]
        for label, colour, dash in (("delayed", BLUE, "-"), ("immediate", VERMILION, "--")):
            upper.plot(rows["step"], rows[label], color=colour, linewidth=0.8, alpha=0.35)
            upper.plot(rows["step"], smooth(rows[label]), color=colour, linewidth=2.0, linestyle=dash, label=label)
        gap = [scale * x for x in rows["difference"]]
        lower.axhline(0, color=BLACK, linewidth=1.0)
        lower.plot(rows["step"], gap, color=GREY, linewidth=0.8, alpha=0.6)
        lower.plot(rows["step"], smooth(gap), color=BLACK, linewidth=2.0)
        upper.set_title(title, loc="left", fontsize=10.5)
        upper.set_ylabel(unit, fontsize=9)
        lower.set_ylabel(f"delayed − immediate\n({points})", fontsize=9)
        lower.set_xlabel("training step", fontsize=9)
        lower.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        for axes in (upper, lower):
            axes.tick_params(labelsize=8.5)
            tidy(axes)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False, fontsize=9)
    save(figure, path)

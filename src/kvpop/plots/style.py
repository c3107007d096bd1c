"""What the figures share: a backend without a screen, colours, bare axes, smoothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito: told apart with every kind of colour vision.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000",
)  # fmt: skip
GREY = "#888888"
COLOURS = (VERMILION, SKY, GREEN, ORANGE, PURPLE)
MARKERS = ("s", "^", "D", "v", "P")
LEAST_KL = 1e-7
"""Where a KL of zero is drawn on the log axis: what float32 can tell from it."""


def smooth(values: Sequence[float]) -> list[float]:
    """Centred mean over about a tenth of the run, past gaps (NaN)."""
    reach, x = len(values) // 20, np.asarray(values, dtype=float)
    known = np.isfinite(x)
    total = np.concatenate([[0.0], np.where(known, x, 0.0).cumsum()])
    count = np.concatenate([[0], known.cumsum()])
    index = np.arange(len(x))
    low, high = (index - reach).clip(0), (index + reach + 1).clip(max=len(x))
    near = count[high] - count[low]
    return np.where(near > 0, (total[high] - total[low]) / near.clip(1), np.nan).tolist()


def tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> None:
    """Write the file (its suffix says as what) and let go of the figure."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white")
    plt.close(figure)

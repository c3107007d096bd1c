"""Figures from rows of results: plain data in, a PNG (or what the file's suffix says) out, no model code."""

from kvpop.plots.comparison import comparison_figure
from kvpop.plots.demo import demo_figure
from kvpop.plots.training import training_figure

__all__ = ["comparison_figure", "demo_figure", "training_figure"]

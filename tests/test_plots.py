"""Figures are drawn from whatever a log holds; what they show is read off the axes."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from kvpop.cli import app
from kvpop.plots import comparison, comparison_figure, training, training_figure
from kvpop.plots.style import smooth
from kvpop.watch import LOG


def is_png(path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000


@pytest.fixture
def drawn(monkeypatch):
    """The figures instead of files."""
    figures = []
    for module in (training, comparison):
        monkeypatch.setattr(module, "save", lambda figure, path: figures.append(figure))
    yield figures
    for figure in figures:
        training.plt.close(figure)


def visible(figure):
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_visible()}


def rich(step: int, **more):
    return {
        "step": step, "score_loss": 1 / step, "accuracy": 0.7, "recall": 0.6, "recall_by_layer": [0.5, 0.7],
        "keep": [[0.1, 0.4], [0.2, 0.3]], "student_keep": [[0.2, 0.4], [0.2, 0.4]], "decay": [[-1e-3, -1e-4], [-1e-3, -1e-2]],
        "kl": 0.1 / step, "closed": [0.1, 0.2], "above_one": 0.01, "under_epsilon": 0.002, "tokens_per_s": 12_000.0,
        "mfu": 0.4, "scorer_lr": 1e-3, "decay_lr": 1e-4, "base_lr": 8e-5, "scorer_grad": 1.0,
        "decay_grad": 0.1, "base_grad": 2.0, **more,
    }  # fmt: skip


def log(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_every_quantity_has_its_panel(tmp_path, drawn):
    training_figure(log(tmp_path / LOG, [rich(step) for step in range(1, 11)]), tmp_path / "x.png")
    panels = visible(drawn[0])
    assert len(panels) == 12
    assert panels["boundary loss"].lines[0].get_ydata()[0] == 1.0
    half = panels["half-life of a score"]
    assert half.get_yscale() == "log"
    assert half.lines[-1].get_ydata()[0] == pytest.approx(math.log(2) / 1e-3)  # the median of 693, 6931, 693 and 69
    assert panels["model FLOPs utilisation"].lines[-1].get_ydata()[0] == pytest.approx(40)
    assert [text.get_text() for text in panels["learning rate"].get_legend().get_texts()] == [
        "scorer",
        "decay",
        "model",
    ]
    assert len(panels["recall of the teacher's set"].lines) == 2 + 2  # two layers, the mean and its smooth


def test_panels_without_data_are_left_out(tmp_path, drawn):
    few = {
        "step": 1,
        "score_loss": 0.5,
        "accuracy": 0.5,
        "recall": math.nan,
        "kl": None,
        "closed": [],
        "scorer_lr": 1e-3,
    }
    training_figure(log(tmp_path / LOG, [few]), tmp_path / "x.png")
    assert set(visible(drawn[0])) == {"boundary loss", "accuracy of decisions", "learning rate"}
    with pytest.raises(ValueError, match="hold no quantity that is known"):
        training_figure(log(tmp_path / "b.jsonl", [{"step": 1, "recall": None}]), tmp_path / "x.png")


def test_several_runs_share_the_panels(tmp_path, drawn):
    logs = {
        "one": log(tmp_path / "a" / LOG, [rich(step) for step in range(1, 50)]),
        "two": log(tmp_path / "b" / LOG, [rich(step, kl=None) for step in range(1, 30)]),
    }
    training_figure(logs, tmp_path / "x.png")
    panels = visible(drawn[0])
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["one", "two"]
    assert len({line.get_color() for line in panels["boundary loss"].lines}) == 2
    assert len({line.get_color() for line in panels["KL to the dense teacher"].lines}) == 1
    assert not panels["arrivals that are kept"].collections  # bands of several runs would hide each other


@pytest.mark.parametrize("count", [1, 7, 100])
def test_smoothing_is_the_mean_of_what_is_near(count):
    values = np.random.default_rng(0).normal(size=count)
    values[::7] = math.nan
    reach = count // 20
    for i, found in enumerate(smooth(values)):
        near = values[max(0, i - reach) : i + reach + 1]
        expected = near[np.isfinite(near)]
        assert math.isnan(found) if not len(expected) else found == pytest.approx(expected.mean())


def row(policy, budget, kl, *, mode=None, seed=None, **more):
    share = {"value": 1 - kl, "low": 1 - 1.2 * kl, "high": 1.0}
    found = {"kl": {"value": kl, "low": 0.9 * kl, "high": 1.1 * kl}, "agreement": share, "passkey": None}
    return {"policy": policy, "mode": mode, "seed": seed, "budget": budget, **found, **more}


ROWS = [
    row("dense", None, 0.0),
    row("tova", 256, 0.15), row("tova", 128, 0.3),
    *(row("kvpop-mlp", budget, kl, mode="full", seed=seed) for budget in (128, 256) for seed, kl in ((0, 0.1), (1, 0.12))),
    row("oracle", 128, 0.01),
]  # fmt: skip


def test_comparison_sorts_by_kl_and_pools_seeds(tmp_path, drawn):
    comparison_figure(ROWS, tmp_path / "x.png")
    panels = visible(drawn[0])
    assert list(panels) == ["KL to dense", "top-1 agreement"]  # no row has a passkey
    kl, agreement = panels.values()
    assert [label.get_text() for label in kl.get_yticklabels()] == ["oracle", "kvpop-mlp (full)", "tova"]
    markers = [line for line in kl.lines if line.get_marker() == "o"]
    assert sorted(float(line.get_xdata()[0]) for line in markers) == pytest.approx([0.01, 0.11, 0.3])
    seeds = [line for line in kl.lines if line.get_marker() == "."]
    assert [list(line.get_xdata()) for line in seeds] == [[0.1, 0.12]] * 2
    assert [line.get_xdata()[0] for line in agreement.lines if line.get_linestyle() == "--"] == [1.0]
    assert not [line for line in kl.lines if line.get_linestyle() == "--"]  # zero is not on a log axis
    names = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert names == ["128 slots", "256 slots", "dense", "single seeds"]


def test_a_row_without_a_seed_stands_for_its_seeds(tmp_path, drawn):
    comparison_figure([*ROWS, row("kvpop-mlp", 128, 0.2, mode="full")], tmp_path / "x.png")
    kl = visible(drawn[0])["KL to dense"]
    assert 0.2 in [line.get_xdata()[0] for line in kl.lines if line.get_marker() == "o"]


def test_comparison_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no row of a policy other than dense has a value"):
        comparison_figure(ROWS[:1], tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_figures_are_files(tmp_path):
    missing = row("random", 128, math.nan, needle={"value": 0.5, "low": None, "high": None})
    comparison_figure([*ROWS, missing], tmp_path / "new" / "x.png")
    assert is_png(tmp_path / "new" / "x.png")


def call(*words):
    return CliRunner().invoke(app, ["plot", *map(str, words)])


def test_the_command_draws_runs(tmp_path):
    for name in ("a", "b"):
        log(tmp_path / name / LOG, [{"step": step, "score_loss": 1 / step} for step in (1, 2, 3)])
    assert call(tmp_path / "a").exit_code == 0
    assert is_png(tmp_path / "a" / "training.png")
    result = call(tmp_path / "a", tmp_path / "b", "--out", tmp_path / "both.svg")
    assert (result.exit_code, result.stdout) == (0, f"figure: {tmp_path / 'both.svg'}\n")
    assert b"<svg" in (tmp_path / "both.svg").read_bytes()
    refused = call(tmp_path / "c")
    assert refused.exit_code == 2
    assert "c is not a training run" in refused.stderr

"""Where records go, what survives a crash, and the warning about labels that teach nothing."""

from __future__ import annotations

import json
import math
import sys
import types

import pytest

from kvpop import terminal
from kvpop.watch import LOG, JsonLines, collapse, read_log, writers


def record(step: int, **more):
    return {"step": step, "score_loss": 1 / step, "keep": [[0.5, 0.25], [0.75, 1.0]], "tokens_per_s": 10.0, **more}


def write(made, *steps):
    for step in steps:
        for writer in made:
            writer.write(record(step))
    for writer in made:
        writer.close()


def test_a_log_keeps_the_steps_of_the_checkpoint_and_writes_no_step_twice(tmp_path):
    path = tmp_path / "run" / LOG
    write([JsonLines(path)], 1, 2, 3, 4, 5)
    with path.open("a") as file:
        file.write('{"step": 6, "sco')
    log = JsonLines(path, upto_step=3)
    assert log.kept == [record(step) for step in (1, 2, 3)]
    assert read_log(path) == log.kept
    log.write(record(4))
    assert read_log(path)[-1] == record(4)  # flushed by the line
    write([log], 5)
    assert [line["step"] for line in read_log(path)] == [1, 2, 3, 4, 5]
    assert [file.name for file in path.parent.iterdir()] == [LOG]
    assert JsonLines(path).kept == read_log(path) == []  # a run that starts anew


def test_a_log_that_is_not_there_has_no_records(tmp_path):
    assert read_log(tmp_path / LOG) == []


def test_writers_by_name(tmp_path):
    (only,) = writers([], tmp_path)
    assert isinstance(only, JsonLines)
    with pytest.raises(ValueError, match="unknown writer 'mlflow': choose from jsonl, tensorboard, wandb"):
        writers(["jsonl", "mlflow"], tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_says_what_to_install(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"the writer '{name}' needs a package: pip install 'kvpop\[watch\]'"):
        writers([name], tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_tensorboard_shows_each_step_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(writers(["tensorboard"], tmp_path), 1, 2, 3, 4, 5)
    again = writers(["tensorboard"], tmp_path, upto_step=3)
    for writer in again:
        writer.write(record(4, kl=math.nan, recall=None, decay=[]))
        writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"score_loss", "tokens_per_s"}
    losses = events.Scalars("score_loss")
    assert [event.step for event in losses] == [1, 2, 3, 4]
    assert losses[-1].value == pytest.approx(0.25)
    assert events.Tags()["histograms"] == ["keep"]
    last = events.Histograms("keep")[-1]
    assert (last.step, last.histogram_value.num, last.histogram_value.sum) == (4, 4, 2.5)


def test_wandb_goes_on_with_the_same_run_and_repeats_no_step(tmp_path, monkeypatch):
    runs: dict[str, types.SimpleNamespace] = {}
    calls = []

    def init(**options):
        calls.append(options)
        run = runs.setdefault(options["id"], types.SimpleNamespace(step=0, history=[], finished=0))
        if run.history:
            run.step = run.history[-1][0] + 1

        def log(values, step):
            assert step >= run.step  # the service would drop it, with a warning
            run.step = step
            run.history.append((step, values))

        def finish():
            run.finished += 1

        run.log, run.finish = log, finish
        return run

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Histogram=lambda values: list(values)))
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    write(writers(["wandb"], tmp_path / "run", config={"steps": 9}), 1, 2, 3, 4, 5)
    write(writers(["wandb"], tmp_path / "run", upto_step=3), 4, 5, 6)
    (run,) = runs.values()
    assert [step for step, _ in run.history] == [1, 2, 3, 4, 5, 6]
    assert run.history[0][1] == {"score_loss": 1.0, "tokens_per_s": 10.0, "keep": [0.5, 0.25, 0.75, 1.0]}
    assert run.finished == 2
    assert calls[0] == {
        "project": "mine", "name": "run", "id": (tmp_path / "run" / "wandb-id").read_text(), "resume": "allow",
        "dir": str(tmp_path / "run"), "config": {"steps": 9},
    }  # fmt: skip


def test_collapse_is_told_with_its_share_and_its_causes():
    assert collapse({"keep": [[0.5, 0.99], [0.3, 1.0]]}) is None  # half is not more than half
    told = collapse({"keep": [[0.5, 0.99], [1.0, 1.0]]})
    assert told is not None
    assert told.startswith("the labels of 75% of 4 KV heads have collapsed")
    assert "75% keep almost every token" in told
    assert "decay too strong" in told
    assert "budget too wide" in told
    assert "almost none" not in told
    both = collapse({"keep": [[0.0, 0.99, 0.01]]})
    assert both is not None
    assert "33% keep almost every" in both
    assert "67% keep almost none" in both
    assert collapse({}) is None
    assert collapse({"keep": [[]]}) is None


def test_heads_with_few_decisions_do_not_count():
    keep = [[0.0, 0.0, 0.0, 0.5], [0.4, 0.5, 0.5, 0.5]]
    few = [[3, 3, 3, 60], [60, 60, 60, 60]]
    assert collapse({"keep": keep, "decided": few}) is None
    told = collapse({"keep": [[0.0, 0.5, 0.5]], "decided": [[60, 2, 2]]})
    assert told is not None
    assert "100% of 1 KV heads" in told
    assert collapse({"keep": [[1.0, 1.0]], "decisions": 99}) is None
    assert collapse({"keep": [[1.0, 1.0]], "decisions": 100}) is not None
    assert collapse({"keep": [[math.nan, 1.0]], "decided": [[0, 0]]}) is None


@pytest.mark.parametrize("live", [False, True])
def test_the_progress_display_warns_once_in_fifty_steps(capsys, monkeypatch, live):
    from rich.console import Console

    monkeypatch.setattr(terminal, "ERR", Console(stderr=True, highlight=False, force_terminal=live, width=200))
    with terminal.TrainingProgress(200) as progress:
        for step in range(1, 121):
            progress.show(record(step, keep=[[1.0] * 4] if step >= 20 else [[0.5] * 4]))
    shown = capsys.readouterr().err
    assert shown.count("have collapsed") == 3  # at 20, 70 and 120
    assert "step 20:" in shown


def test_records_are_plain_json(tmp_path):
    write(writers(["jsonl"], tmp_path), 1)
    assert json.loads((tmp_path / LOG).read_text()) == record(1)

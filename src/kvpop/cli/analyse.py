"""``kvpop analyse``."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvpop.cli.evaluate import labelled
from kvpop.cli.options import (
    ADAPTER,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    SinksOption,
    WindowOption,
)
from kvpop.jobs import chosen_budget, comparison, load_entries, load_tokenizer, placement
from kvpop.terminal import ERR, OUT, print_facts, print_json
from kvpop.watch import LOG, read_log

if TYPE_CHECKING:
    from kvpop.analysis import Analysis

STRETCH = 112


def training_log(run: Path) -> list[dict[str, Any]]:
    """The records of a run's directory or log file. Raises FileNotFoundError if there is none."""
    log = run / LOG if run.is_dir() else run
    if not log.is_file():
        raise FileNotFoundError(f"{run} is not a training run: there is no {log}")
    return read_log(log)


def check_first(first: int | None, stretch: int, tokens: int, of: str) -> None:
    """ValueError unless a map of ``stretch`` tokens (all, if there are fewer) can begin at ``first`` of ``tokens``."""
    last = max(0, tokens - stretch)
    if first is not None and first > last:
        raise ValueError(
            f"--first must be at most {last}, for a map of {min(stretch, tokens)} tokens (--stretch) of {of} of {tokens}, got "
            f"{first}"
        )


def analyse(
    model: ModelOption = "smollm2",
    adapter: Annotated[list[str] | None, typer.Option(help=f"{ADAPTER}; repeatable.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="A training-free policy; repeatable.")] = None,
    budget: Annotated[list[int] | None, typer.Option(help="Slots per KV head; repeatable.")] = None,
    sinks: SinksOption = None,
    window: WindowOption = None,
    text: Annotated[
        str, typer.Option(help='A text file or another source, as for distill; "champ": its test set.')
    ] = "champ",
    texts: Annotated[int, typer.Option(min=1, help="Documents; kinds of tokens have intervals from 2 on.")] = 1,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens a document at most.")] = 1024,
    min_future: Annotated[int, typer.Option(min=1, help="Queries that are to come where recall is read.")] = 128,
    first: Annotated[
        int | None,
        typer.Option(min=0, help="Where the map with token strings begins (where heads are divided the most)."),
    ] = None,
    stretch: Annotated[int, typer.Option(min=1, help="Tokens of that map.")] = STRETCH,
    delayed: Annotated[Path | None, typer.Option(help="A training run with delayed scoring, and ...")] = None,
    immediate: Annotated[Path | None, typer.Option(help="... one without, to draw beside each other.")] = None,
    saved: Annotated[Path | None, typer.Option(help="Draw what an earlier call saved there; no model runs.")] = None,
    out: Annotated[Path, typer.Option(help="Directory of data, figures and viewer.html.")] = Path("out/analysis"),
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """What policies keep of a text: data, figures, and a page to read it in, from one pass of each policy.

    Writes analysis.npz and analysis.json, a figure a question, and viewer.html, which needs nothing but a browser.
    """
    from kvpop.analysis import Analysis
    from kvpop.analysis.figures import draw
    from kvpop.viewer import write_viewer

    if (delayed is None) != (immediate is None):
        raise ValueError(f"--delayed and --immediate belong together, got {delayed} and {immediate}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: data and figures need a directory")
    if saved is not None and (adapter or policy):
        raise ValueError(f"--saved {saved} has its policies: --adapter and --policy are for a new analysis")
    logs = [training_log(run) for run in (delayed, immediate) if run is not None]
    if saved is not None:
        found = Analysis.load(saved)
        check_first(first, stretch, len(found.texts[0]), "the first text")
    else:
        check_first(first, stretch, tokens, "a text")
        found = _run(model, adapter or [], policy or [], budget or [], sinks, window, text, texts, tokens, min_future, first,
                     stretch, device, dtype)  # fmt: skip
    found.save(out)
    with ERR.status("drawing"):
        figures = draw(found, out, first, stretch, logs)
        write_viewer(found, out / "viewer.html")
    report = summary(found) | {"figures": [str(path) for path in figures], "viewer": str(out / "viewer.html")}
    if as_json:
        print_json(report)
        return
    table = Table("policy", "slots", *(title.format(age=report["age"]) for title in RESULTS.values()))
    for row in report["policies"]:
        shares = ("-" if row[key] is None else f"{row[key]:.1%}" for key in RESULTS)
        table.add_row(row["policy"], str(row["slots"] or "-"), *shares)
    OUT.print(table)
    print_facts({"data": out / "analysis.npz", "figures": len(figures), "viewer": report["viewer"]}, OUT)


RESULTS = {"recall": "recall, dense model's", "taken": "arrivals taken in", "kept": "held {age} tokens later"}
"""Columns of the summary."""


def summary(found: Analysis) -> dict[str, Any]:
    """What the figures come to in a number each, means over texts, layers and heads; None where there is none.

    recall: see ``teacher_recall``. taken: of the tokens that leave the window behind full budgets, the share that goes into a
    long-range slot. kept: of the same, the share that is still held ``age`` tokens later.
    """
    import numpy as np

    from kvpop.analysis import quantities
    from kvpop.analysis.figures import full_from, kinds_age, teacher_recall

    start, age, teacher = full_from(found), kinds_age(found), teacher_recall(found)
    rows = []
    for s, traces in zip(found.subjects, found.traces):
        first = max(s.sinks, start - s.window)
        ages = [quantities.at_age(trace.expiry_LHS, s.window, age)[..., first:].mean() for trace in traces]
        lives = [quantities.lifetimes(trace.expiry_LHS, s.sinks, s.window, start)[0] for trace in traces]
        recall = teacher[s.name]
        rows.append(
            {
                "policy": s.name,
                "slots": s.slots,
                "recall": float(np.nanmean(recall)) if np.isfinite(recall).any() else None,
                "taken": float(np.mean([(life > 0).mean() for life in lives])),
                "kept": float(np.mean(ages)),
            }
        )
    return {"model": found.model, "texts": [len(text) for text in found.texts], "age": age, "policies": rows}


def _run(
    model: str, adapter: list[str], policy: list[str], budget: list[int], sinks: int | None, window: int | None, text: str,
    texts: int, tokens: int, min_future: int, first: int | None, stretch: int, device: str, dtype: str,
) -> Analysis:  # fmt: skip
    import torch

    from kvpop.analysis.record import analyse as record
    from kvpop.data import documents_from, texts_from

    if not adapter and not set(policy) - {"dense"}:
        raise ValueError("nothing to analyse: give --adapter DIR or --policy NAME")
    source = "champ:test" if text == "champ" else text
    adapters = labelled(adapter)
    entries = comparison(adapters, policy, budget, sinks, window)
    entries = [entry for entry in entries if entry.label != "dense"]
    own = [entry.policy.budget for entry in entries if hasattr(entry.policy, "budget")]  # the smallest first
    asked = own[0] if own else chosen_budget(min(budget) if budget else None, sinks, window, None)
    place, precision = placement(device, dtype)
    texts_from(source)
    with ERR.status("reading the text"):
        pieces = islice(documents_from(source, load_tokenizer(model)), texts)
        ids = [torch.tensor(piece[:tokens].tolist()) for piece in pieces]
    if len(ids) < texts:
        raise ValueError(f"--texts {texts}: {source} has only {len(ids)} documents")
    check_first(first, stretch, len(ids[0]), "the first text")
    with ERR.status("loading the model"):
        base, tokenizer, entries = load_entries(model, precision, place, adapters, entries)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=ERR
    ) as bar:
        task = bar.add_task("analysing", total=len(ids) * (len(entries) + 1))

        def tick(label: str) -> None:
            bar.update(task, advance=1, description=label)

        names = [f"{source} {i}" if len(ids) > 1 else source for i in range(len(ids))]
        return record(
            base, entries, ids, tokenizer, asked, names=names, model_name=model, min_future=min_future, tick=tick
        )

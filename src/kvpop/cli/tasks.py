"""``kvpop tasks``: benchmarks by name, and ``kvpop report``: their tables."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from kvpop.budget import Budget
from kvpop.cli.options import ADAPTER, DeviceOption, DtypeOption, JsonOption, ModelOption, SinksOption, WindowOption
from kvpop.jobs import chosen_policy, load_model, load_tokenizer, placement
from kvpop.terminal import ERR, OUT, print_json

if TYPE_CHECKING:
    from kvpop.evals.base import Decoding, Item, Task
    from kvpop.policies import Policy

tasks = typer.Typer(no_args_is_help=True, help="Benchmarks: what a model writes under a policy, graded and compared.")
EVERY = 60.0
"""Seconds between lines of progress, at most, where there is no terminal."""

FileOption = Annotated[Path | None, typer.Option(help="A local file in place of the hub's.")]
AllowCodeOption = Annotated[
    bool, typer.Option("--allow-code", help="Run the code that the model wrote, where grading needs that.")
]
WorkersOption = Annotated[int, typer.Option(help="Processes that grade.")]


def spoken(seconds: float) -> str:
    """A length of time in words: 50 s, 12 min, 3 h 20 min."""
    minutes = round(seconds / 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def tasks_named(names: list[str], allow_code: bool = False) -> list[Task]:
    """``evals.task_by_name`` of each; ValueError, too, for a name that comes twice and where there is no code to allow."""
    from kvpop import evals

    tasks = [evals.task_by_name(name, allow_code) for name in names]
    if twice := [name for name, count in Counter(task.name for task in tasks).items() if count > 1]:
        raise ValueError(f"every task must be named once, got {twice[0]} twice")
    if allow_code and not any(map(runs_code, tasks)):
        raise ValueError(f"--allow-code: {', '.join(names)} runs no code")
    return tasks


def runs_code(task: Task) -> bool:
    return hasattr(task, "allow_code")


def places_of(names: list[str], out: Path) -> list[Path]:
    """Where the rollouts of each task go: ``{task}`` in the path is its name, with - for : and /.

    ValueError for several tasks in one place, and for a place that is a file, or in one.
    """
    places = [Path(str(out).replace("{task}", re.sub("[:/]", "-", name))) for name in names]
    if len(names) > 1 and "{task}" not in str(out):
        raise ValueError(f"--out of several tasks must have {{task}} in it, to be a directory for each, got {out}")
    for name, place in zip(names, places):
        if place in places[: names.index(name)]:
            raise ValueError(f"--out gives {names[places.index(place)]} and {name} the same directory, {place}")
        if found := [path for path in (place, *place.parents) if path.exists() and not path.is_dir()]:
            raise ValueError(f"--out {found[0]} is a file: rollouts need a directory")
    return places


def chosen_decoding(name: str, given: Decoding, **options: Any) -> Decoding:
    """A task's way of sampling with what was given on the command line; greedy without another number is one rollout."""
    chosen = replace(given, **{name: value for name, value in options.items() if value is not None})
    if chosen.temperature == 0 and chosen.rollouts > 1:
        if options.get("rollouts") is not None:
            raise ValueError(
                f"--rollouts must be 1 at temperature 0, where all are the same, got {chosen.rollouts} for {name}"
            )
        chosen = replace(chosen, rollouts=1)
    return chosen


def chosen_graph(given: bool | None, compiled: bool, place: Any) -> bool:
    """Whether decoding steps are captured, as the engine would say: it is known before the model is loaded."""
    possible = place.type == "cuda"  # whatever the policy
    if given and not possible:
        raise ValueError(f"--graph needs a GPU, got {place}")
    graph = possible if given is None else given
    if compiled and not graph:
        raise ValueError("--compile is for steps that are captured as a graph: it goes with --graph")
    return graph


@tasks.command("list")
def list_tasks(as_json: JsonOption = False) -> None:
    """The tasks there are; --json has their sources and citations too."""
    from kvpop import evals

    rows: list[dict[str, Any]] = []
    for name in evals.TASKS:
        task = evals.task_by_name(name)
        source = task.source
        rows.append(
            {
                "name": name,
                "title": task.title,
                "size": task.size,
                "licence": source and source.licence,
                "url": source and source.url,
                "citation": task.citation,
            }
        )
    families = [form for _, form in evals.FAMILIES.values()]
    if as_json:
        print_json({"tasks": rows, "families": families})
        return
    table = Table("name", "items", "licence", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(row["name"], f"{row['size']:,}", row["licence"] or "made here")
    OUT.print(table, markup=False)
    OUT.print("with something to choose:", *families, sep="\n  ", markup=False, highlight=False)


@tasks.command()
def run(
    names: Annotated[list[str], typer.Argument(metavar="TASK...", help="As kvpop tasks list shows them.")],
    out: Annotated[
        Path,
        typer.Option(
            help="Directory of rollouts and grades; give it again to go on. Of several tasks: with {task} in it."
        ),
    ],
    model: ModelOption = "smollm2",
    policy: Annotated[
        str, typer.Option(help="dense (the teacher), streaming, streaming-cache, random or tova.")
    ] = "dense",
    adapter: Annotated[
        str | None, typer.Option(help=f"Instead of a policy by name: {ADAPTER[0].lower()}{ADAPTER[1:]}.")
    ] = None,
    budget: Annotated[int | None, typer.Option(help="Slots per KV head (the adapter's, or 256).")] = None,
    sinks: SinksOption = None,
    window: WindowOption = None,
    rollouts: Annotated[int | None, typer.Option(help="Of every item (the task's number).")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Of a rollout (the task's number).")] = None,
    temperature: Annotated[float | None, typer.Option(help="0: always the most likely token (the task's).")] = None,
    top_p: Annotated[float | None, typer.Option(help="The task's.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0: no limit (the task's).")] = None,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="For chat templates that have this switch.")
    ] = None,
    items: Annotated[int | None, typer.Option(help="Only the first so many.")] = None,
    rows: Annotated[int, typer.Option(help="Rollouts generated at a time.")] = 8,
    graph: Annotated[
        bool | None,
        typer.Option("--graph/--no-graph", help="A decoding step is one CUDA graph (the default on a GPU)."),
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="With --graph: its decoder layers compiled.")] = False,
    shard: Annotated[
        str | None, typer.Option(help="i/n: only part i (from 0) of n (under torchrun: each process its own).")
    ] = None,
    file: FileOption = None,
    grade_too: Annotated[
        bool, typer.Option("--grade/--no-grade", help="Grade at the end, unless it is a shard.")
    ] = True,
    allow_code: AllowCodeOption = False,
    workers: WorkersOption = 1,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Sample a model's answers to tasks under a policy, and grade them. Ctrl-C is safe: the same command goes on."""
    from kvpop.evals.rollouts import Shard, TaskRollouts, check_items, check_numbers, check_thinking, run_facts

    asked = tasks_named(names, allow_code)
    sampling = dict(rollouts=rollouts, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k)
    decodings = [chosen_decoding(task.name, task.decoding, **sampling) for task in asked]
    for decoding in decodings:
        check_numbers(decoding, items, rows)
    part = Shard.chosen(shard)
    if workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    places = places_of(names, out)
    if file is not None and len(names) > 1:
        raise ValueError(f"--file is for one task, got {len(names)}: {', '.join(names)}")
    if file is not None and not file.is_file():
        raise FileNotFoundError(f"--file: no such file {file}")
    chosen, directory, slots = chosen_policy(policy, adapter, budget, sinks, window)
    place, precision = placement(device, dtype)
    graph = chosen_graph(graph, compiled, place)
    local = None if file is None else str(file)
    with ERR.status("reading the tasks"):
        tokenizer = load_tokenizer(model)
        check_thinking(tokenizer, thinking)
        given = [task.items(tokenizer, local) for task in asked]
    for name, task, all_items in zip(names, asked, given):
        check_items(task, all_items)
        if items is not None and items > len(all_items):
            raise ValueError(f"--items must be at most {len(all_items)}, the items of {name}, got {items}")

    with ERR.status("loading the model"):
        base, tokenizer, facts = _prepared(model, precision, place, chosen, directory, slots)
    where = {
        "shard": f"{part.index}/{part.count}", "rows": rows, "graph": graph, "compiled": compiled,
        "adapter": adapter, "file": local,
    }  # fmt: skip
    todos = [
        TaskRollouts(
            base, tokenizer, task, all_items, place_out, decoding=decoding, shard=part, limit=items, rows=rows,
            thinking=thinking, file=local, identity=facts, run=run_facts(place, **where), graph=graph, compiled=compiled,
        )
        for task, all_items, decoding, place_out in zip(asked, given, decodings, places)
    ]  # fmt: skip
    reports: list[dict[str, Any]] = []
    try:
        for name, task, all_items, place_out in zip(names, asked, given, places):
            if len(names) > 1:
                ERR.print(f"{name}:", markup=False, highlight=False)
            todo = todos.pop(0)
            report = {"task": name, **_sampled(todo)}
            if grade_too and part.count == 1:
                code = allow_code and runs_code(task)
                report["grades"] = _grade(task, all_items, place_out, workers, False, code, set(todo.expected))
            reports.append(report)
            del todo  # its rows of the cache
            if not as_json:
                _print_run(report)
    finally:  # also of the tasks before one that failed
        if as_json and reports:
            print_json(reports if len(names) > 1 else reports[0])


def _print_run(report: dict[str, Any]) -> None:
    typer.echo(f"rollouts: {report['rollouts']}")
    typer.echo(
        f"{report['capped']} hit the limit of tokens, {report['empty']} are empty, {report['loops']} loop", err=True
    )
    if report["grades"] is not None:
        _print_grades(report["grades"])


def _sampled(todo: Any) -> dict[str, Any]:
    """Sample what is missing, and say what came of it."""
    from kvpop.evals.rollouts import health

    for note in todo.notes:
        typer.echo(f"note: {note}", err=True)
    total, missing, started = len(todo.expected), todo.left, time.perf_counter()
    ERR.print(f"{total:,} rollouts of {len(todo.items):,} items, {total - missing:,} of them already there")
    counts: Counter[str] = Counter()
    for row in _shown(todo, missing):
        state = health(row)
        counts.update(new=1, tokens=len(row["completion_ids"]), **{key: int(value > 0) for key, value in state.items()})
    return {
        "rollouts": str(todo.out),
        "new": counts["new"],
        "total": total,
        "tokens": counts["tokens"],
        "tokens_per_s": todo.generated / (time.perf_counter() - started),
        "capped": counts["capped"],
        "empty": counts["empty"],
        "loops": counts["loop"],
        "grades": None,
    }


def _prepared(
    model: str, precision: Any, place: Any, policy: Policy, directory: Path | None, slots: Budget | None
) -> tuple[Any, Any, dict[str, Any]]:
    """The model with the policy attached, its tokenizer, and what they are."""
    from kvpop.adapter import load
    from kvpop.attachment import attach
    from kvpop.evals.rollouts import model_facts, policy_facts
    from kvpop.models import model_id

    base, tokenizer = load_model(model, precision, place)
    facts: dict[str, Any] = {"model": model_facts(base, tokenizer, model_id(model))}
    if directory is None:
        attach(base, policy)
    else:
        load(base, directory, budget=slots)
    facts["policy"], facts["budget"] = policy_facts(base, policy, directory)
    return base, tokenizer, facts


def _shown(todo: Any, missing: int) -> Any:
    """The rows of a run, with tokens/s and the time that is left on stderr."""
    started, every, done = time.perf_counter(), max(1, missing // 20), 0
    said = started

    def speed() -> str:
        rate = todo.generated / (time.perf_counter() - started)
        left = todo.seconds_left(rate)
        return f"{rate:,.1f} tokens/s" + ("" if left is None else f", about {spoken(left)} left")

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=ERR, disable=not ERR.is_terminal) as bar:
        shown = bar.add_task("first rollout", total=missing)

        def step() -> None:
            nonlocal said
            if not bar.disable:
                bar.update(shown, description=speed())
            elif time.perf_counter() - said > EVERY:
                said = time.perf_counter()
                typer.echo(f"{done:,} of {missing:,} rollouts: {speed()}", err=True)

        try:
            for row in todo.run(step):
                done += 1
                bar.update(shown, completed=done)
                if bar.disable and done % every == 0:
                    said = time.perf_counter()
                    typer.echo(f"{done:,} of {missing:,} rollouts: {speed()}", err=True)
                yield row
        except KeyboardInterrupt:
            typer.echo(f"interrupted at rollout {done:,} of {missing:,}; run the same command to go on", err=True)
            raise typer.Exit(130) from None


def _grade(
    task: Task, items: list[Item], directory: Path, workers: int, again: bool, allow_code: bool,
    asked: Collection[tuple[int, int]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Grade all that is there; what comes of the rollouts that were ``asked`` for (None: of all). "beyond": how many more
    there are."""
    from kvpop.evals.grades import GRADE, Grading, tally
    from kvpop.evals.rollouts import place_of, read_rows
    from kvpop.evals.statistics import estimate

    grading = Grading(task, items, directory, workers=workers, again=again, identity={"allow_code": allow_code})
    with Progress(TextColumn("graded"), MofNCompleteColumn(), console=ERR, disable=not ERR.is_terminal) as bar:
        shown = bar.add_task("", total=None)
        new = 0
        for _ in grading.run():
            new += 1
            bar.update(shown, completed=new)
    there = list(read_rows(grading.out, GRADE))
    rows = [row for row in there if asked is None or place_of(row) in asked]
    scores: dict[str, list[float]] = {}
    for row in rows:
        scores.setdefault(row["item"], []).append(row["score"])
    interval = estimate([scores]) if scores else None
    return {
        "grades": str(grading.out),
        "new": new,
        **tally(rows),
        "beyond": len(there) - len(rows),
        "pass_at_1": None if interval is None else interval.value,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
    }


def _print_grades(grades: dict[str, Any]) -> None:
    typer.echo(f"grades: {grades['grades']}")
    if grades["pass_at_1"] is None:
        return
    bounds = "" if grades["low"] is None else f" [{grades['low']:.3f}, {grades['high']:.3f}]"
    typer.echo(f"pass@1: {grades['pass_at_1']:.3f}{bounds}")
    said = [
        f"{grades[name]} {name}" for name in ("right", "wrong", "no answer", "timeout", "refused", "capped", "empty")
    ]
    typer.echo(f"{', '.join(said)}, {grades['loops']} looping, of {grades['rollouts']} rollouts", err=True)
    if grades["beyond"]:
        typer.echo(
            f"note: {grades['beyond']:,} more rollouts are there, of an earlier call that asked for more; they are not counted "
            "here, but are in kvpop tasks grade and kvpop report",
            err=True,
        )


@tasks.command()
def grade(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What kvpop tasks run wrote.")],
    file: FileOption = None,
    allow_code: AllowCodeOption = False,
    workers: WorkersOption = 1,
    again: Annotated[bool, typer.Option("--again", help="Throw away the grades that are there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Grade rollouts, or go on grading them. Their model is not needed."""
    from kvpop.evals.rollouts import STEM, check_items, file_checksum, read_settings
    from kvpop.models import model_name

    if workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    settings = directory / f"{STEM}.json"
    if not settings.is_file():
        shards = any(directory.glob(f"{STEM}-*-of-*.json"))
        raise FileNotFoundError(
            f"{directory} has no {settings.name}"
            + (": put its shards together with kvpop tasks merge" if shards else "")
        )
    made_with = read_settings(settings)
    (task,) = tasks_named([made_with["task"]["name"]], allow_code)
    before = next((run["file"] for run in reversed(made_with["runs"]) if run.get("file")), None)
    chosen = str(file) if file is not None else before
    if chosen is not None and file_checksum(chosen) != made_with["task"]["checksum"]:
        raise ValueError(
            f"--file {chosen} has the checksum {file_checksum(chosen)}, the rollouts were made from "
            f"{made_with['task']['checksum']}"
        )
    tokenizer = load_tokenizer(model_name(made_with["model"]["id"])) if task.source is None else None
    given = task.items(tokenizer, chosen)
    check_items(task, given)
    report = _grade(task, given, directory, workers, again, allow_code)
    if as_json:
        print_json(report)
    else:
        _print_grades(report)


@tasks.command()
def merge(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the shards are.")], as_json: JsonOption = False
) -> None:
    """Put the rollouts of all shards into one file, and say what is missing."""
    from kvpop.evals.rollouts import STEM
    from kvpop.evals.rollouts import merge as put_together

    report = put_together(directory)
    if as_json:
        print_json(report)
        return
    typer.echo(f"rollouts: {directory / f'{STEM}.jsonl'}")
    typer.echo(f"{report['rollouts']:,} of {report['expected']:,} rollouts", err=True)
    for note in report["notes"]:
        typer.echo(f"note: {note}", err=True)
    for item, numbers in report["missing"][:20]:
        typer.echo(f"missing: {item}, rollouts {', '.join(map(str, numbers))}", err=True)
    if len(report["missing"]) > 20:
        typer.echo(f"missing: rollouts of {len(report['missing']) - 20:,} more items", err=True)


def report(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Graded rollouts, or directories of them.")
    ],
    form: Annotated[str, typer.Option("--format", help="md, latex or json.")] = "md",
    out: Annotated[Path | None, typer.Option(help="Write it to this file instead of stdout.")] = None,
    context: Annotated[
        int, typer.Option(help="Tokens of the dense cache that compression ratios refer to (the paper's).")
    ] = 16384,
    draws: Annotated[int, typer.Option(help="Of the bootstrap.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Of the bootstrap.")] = 0,
) -> None:
    """Tables of graded rollouts in the layout of the paper, with its figures, intervals, and what they can and cannot tell."""
    from kvpop.evals.report import FORMATS, build, latex, markdown, read_results
    from kvpop.evals.rollouts import command
    from kvpop.terminal import as_strict_json

    if form not in FORMATS:
        raise ValueError(f"--format must be one of {', '.join(FORMATS)}, got {form!r}")
    if draws < 1:
        raise ValueError(f"--draws must be at least 1, got {draws}")
    if out is not None and out.is_dir():
        raise ValueError(f"--out {out} is a directory: the report needs a file")
    built = build(read_results(directories, context), command(), draws, seed)
    text = {"md": markdown, "latex": latex, "json": lambda value: as_strict_json(value) + "\n"}[form](built)
    if out is None:
        typer.echo(text, nl=False)
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
        typer.echo(f"report: {out}")

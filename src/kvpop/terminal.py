"""What the commands show: a training bar, tables, strict JSON. Results go to stdout, progress to stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvpop.watch import collapse, plain

OUT, ERR = Console(), Console(stderr=True, highlight=False)


WARN_EVERY = 50


class TrainingProgress(Progress):
    """A bar with loss, accuracy, recall, tokens/s, MFU and time left; where stderr is no terminal, about 20 lines of text.

    Says so when the teacher's labels have collapsed, at most once in 50 steps.
    """

    def __init__(self, steps: int, quiet: bool = False) -> None:
        super().__init__(
            BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), console=ERR, disable=quiet or not ERR.is_terminal,
        )  # fmt: skip
        self.steps, self.quiet = steps, quiet
        self.warned: int | None = None
        self.task = self.add_task("first step", total=steps)

    def show(self, record: dict[str, Any]) -> None:
        if self.quiet:  # another process speaks
            return
        names = {"score_loss": "loss", "accuracy": "accuracy", "recall": "recall", "kl": "KL"}
        parts = [f"{label} {record[name]:.3f}" for name, label in names.items() if record.get(name) is not None]
        parts.append(f"{record['tokens_per_s']:,.0f} tokens/s")
        if record.get("mfu") is not None:
            parts.append(f"MFU {record['mfu']:.0%}")
        line = ", ".join(parts)
        self.update(self.task, completed=record["step"], description=line)
        if self.disable and record["step"] % max(1, self.steps // 20) == 0:
            typer.echo(f"step {record['step']} of {self.steps}: {line}", err=True)
        self._warn(record)

    def _warn(self, record: dict[str, Any]) -> None:
        if self.warned is not None and record["step"] - self.warned < WARN_EVERY:
            return
        if warning := collapse(record):
            self.warned = record["step"]
            self.console.print(f"warning, step {record['step']}: {warning}", style="bold yellow", markup=False)


def as_strict_json(value: Any) -> str:
    """JSON without NaN and infinities, which the standard does not know: they become null."""
    return json.dumps(plain(value), indent=2)


def print_json(value: Any) -> None:
    typer.echo(as_strict_json(value))


def print_facts(facts: dict[str, Any], console: Console) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in facts.items():
        shown = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
        table.add_row(key.replace("_", " "), shown)
    console.print(table, markup=False)


@contextmanager
def counting(what: str) -> Iterator[Callable[[], None]]:
    """A line on stderr that says what goes on; what is given is called after each part, which it counts."""
    done = 0
    with ERR.status(what) as status:

        def tick() -> None:
            nonlocal done
            done += 1
            status.update(f"{what}, {done} done")

        yield tick


def print_comparison(rows: list[dict[str, Any]]) -> None:
    def size(row: dict[str, Any]) -> str:
        return f"{row['held']:.0%} held" if "held" in row else str(row["budget"] or "-")

    names = ("kl", "agreement", "perplexity", "passkey", "needle")
    titles = {"kl": "KL to dense", "agreement": "agreement with dense"}
    keys = [name for name in names if any(name in row for row in rows)]
    table = Table("policy", "budget", *(titles.get(key, key) for key in keys))
    for row in rows:
        table.add_row(row["policy"], size(row), *(f"{row[key]:.4f}" for key in keys))
    OUT.print(table)
    if "intervals" in rows[0]:
        names, title = tuple(rows[0]["intervals"]), "95 % intervals, bootstrap over texts"
        table = Table("policy", "budget", *names, title=title, title_justify="left")
        for row in rows:
            spans = (f"{row['intervals'][name]['low']:.4f} to {row['intervals'][name]['high']:.4f}" for name in names)
            table.add_row(row["policy"], size(row), *spans)
        OUT.print(table)
    if "by_position" in rows[0]:
        spans = (f"{part['from']}-{part['to'] - 1}" for part in rows[0]["by_position"])
        table = Table("policy", "budget", *spans, title="KL to dense by position", title_justify="left")
        for row in rows:
            table.add_row(row["policy"], size(row), *(f"{part['kl']:.4f}" for part in row["by_position"]))
        OUT.print(table)
    cells = [(row, cell) for row in rows for cell in row.get("retrieval", [])]
    if cells:
        sweep = Table(
            "policy",
            "budget",
            "task",
            "length",
            "depth",
            "exact",
            "NLL",
            "answers",
            title="retrieval (NLL in nats a token)",
            title_justify="left",
        )
        for row, cell in cells:
            sweep.add_row(
                row["policy"], size(row), cell["task"], f"{cell['length']:,}", f"{cell['depth']:g}",
                f"{cell['exact']:.2f}", f"{cell['nll']:.3f}", str(cell["answers"]),
            )  # fmt: skip
        OUT.print(sweep)


def print_demo(report: dict[str, Any], lines: list[str]) -> None:
    """The demo's table, and its sentences."""
    settings = report["settings"]
    table = Table(
        title=f"{report['model']}, held-out maths text of {settings['length']} tokens, "
        f"from token {settings['start']} on: KL to dense (nats), top-1 agreement with dense, perplexity; "
        "passkeys and needles answered, and the answers' NLL (nats a token)"
    )
    for column in ("policy", "slots", "KL", "agree", "ppl", "passkey", "needle", "NLL"):  # fits 80 columns
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for row in report["rows"]:
        nll = (row["passkey_nll"] * row["passkey_answers"] + row["needle_nll"] * row["needle_answers"]) / (
            row["passkey_answers"] + row["needle_answers"]
        )
        table.add_row(
            row["policy"], str(row["budget"] or "all"), f"{row['kl']:.4f}", f"{row['agreement']:.1%}",
            f"{row['perplexity']:.3f}",
            f"{row['passkey']:.0%}", f"{row['needle']:.0%}", f"{nll:.2f}", end_section=row["policy"] in ("dense", "oracle"),
        )  # fmt: skip
    OUT.print(table)
    for line in lines:
        OUT.print(line, soft_wrap=True)

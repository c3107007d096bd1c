"""``kvpop plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpop.watch import LOG


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Directories that distill wrote, finished or not.")],
    out: Annotated[Path | None, typer.Option(help="The figure (default: training.png in the first directory).")] = None,
) -> None:
    """Draw how training went; several runs are laid over each other."""
    logs = {}
    for run in dict.fromkeys(runs):
        log = run / LOG if run.is_dir() else run
        if not log.is_file():
            raise FileNotFoundError(f"{run} is not a training run: there is no {log}")
        same = [other for other in runs if other.resolve().name == run.resolve().name]
        logs[run.resolve().name if len(same) == 1 else str(run)] = log
    try:
        from kvpop.plots import training_figure
    except ImportError as error:
        raise ImportError("figures need the package matplotlib: pip install 'kvpop[demo]'") from error
    first = next(iter(logs.values()))
    target = first.parent / "training.png" if out is None else out
    training_figure(logs, target)
    typer.echo(f"figure: {target}")

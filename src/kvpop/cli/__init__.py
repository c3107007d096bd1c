"""The command line: one file per command. Everything heavy is imported inside them, so that ``--help`` is quick.

Results go to stdout, progress to stderr; with --json stdout holds one JSON object and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import kvpop
from kvpop.cli.allocate import allocate
from kvpop.cli.analyse import analyse
from kvpop.cli.bench import bench
from kvpop.cli.distill import distill
from kvpop.cli.evaluate import evaluate
from kvpop.cli.generate import generate
from kvpop.cli.match import match
from kvpop.cli.options import ADAPTER, JsonOption, app
from kvpop.cli.plan import plan
from kvpop.cli.plot import plot
from kvpop.cli.prepare import prepare
from kvpop.cli.publish import publish
from kvpop.cli.rollouts import rollouts
from kvpop.cli.tasks import report, tasks
from kvpop.jobs import read_adapter
from kvpop.terminal import OUT, print_demo, print_facts, print_json

app.command()(analyse)
app.command()(distill)
app.command()(allocate)
app.command()(match)
app.command()(generate)
app.command("eval")(evaluate)
app.command()(plan)
app.command()(plot)
app.command()(publish)
app.command()(prepare)
app.command()(rollouts)
app.command()(report)
app.add_typer(bench, name="bench")
app.add_typer(tasks, name="tasks")


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvpop {kvpop.__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print it.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Errors with their traceback.")] = False,
) -> None:
    """Long generations of existing language models in a fixed amount of KV-cache memory."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory of report, figures and adapter.")] = Path("out/demo"),
    minutes: Annotated[float, typer.Option(help="About how long it may take.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Train on the embedded model, compare policies, and show memory staying flat: the whole story on a CPU."""
    if not minutes > 0:
        raise ValueError(f"--minutes must be positive, got {minutes}")
    from kvpop.demo import run_demo

    report, lines = run_demo(out, minutes)
    if as_json:
        print_json(report)
    else:
        print_demo(report, lines)


@app.command()
def info(adapter: Annotated[str, typer.Argument(help=f"{ADAPTER}.")], as_json: JsonOption = False) -> None:
    """What an adapter holds."""
    from kvpop.adapter import SCORERS, adapter_directory, read_tensors

    directory = adapter_directory(adapter)
    config = read_adapter(directory)
    tensors = read_tensors(directory / SCORERS) if config["scorers"] else {}
    parameters = sum(tensor.numel() for tensor in tensors.values())
    config = {"directory": str(directory), **config, "scorer_parameters": parameters}
    if as_json:
        print_json(config)
        return
    policy, training = dict(config["policy"]), config.get("training", {})
    facts = {
        "model": f"{config['model'].get('id')} ({', '.join(f'{v} {k}' for k, v in config['model'].items() if k != 'id')})",
        "policy": policy.pop("name"),
    }
    if slots := policy.pop("budget", None):
        facts["budget"] = (
            f"{sum(slots.values())} slots per KV head: "
            f"{slots['sinks']} sinks, {slots['window']} window, {slots['long']} long-range"
        )
        if heads := [k for row in policy.pop("heads", ()) for k in row]:
            facts["budget"] += f" on average, {min(heads)} to {max(heads)} by head"
    OUT.print()
    print_facts(
        {
            **facts,
            **policy,
            "learned": f"{parameters:,} values of the policy",
            "base weights": config.get("base_weights") or "unchanged",
            "versions": ", ".join(f"{name} {version}" for name, version in config.get("versions", {}).items()),
            **{f"training: {key}": value for key, value in training.items() if key != "config"},
            **{f"  {key}": value for key, value in training.get("config", {}).items()},
        },
        OUT,
    )

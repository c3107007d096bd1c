"""``kvpop plan``."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from kvpop.cli.options import JsonOption
from kvpop.terminal import OUT, print_facts, print_json


def plan(
    recipe: Annotated[str, typer.Argument(help="MODEL[:BUDGET[:SCORER[:MODE]]], such as qwen3-8b:4096:mlp:full.")],
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs (the recipe's).")] = None,
    memory: Annotated[float | None, typer.Option(help="GB of one GPU (the recipe's; an H200 has 141).")] = None,
    mfu: Annotated[float, typer.Option(help="Model FLOPs utilisation to assume for the times.")] = 0.35,
    peak: Annotated[float, typer.Option(help="TFLOP/s of one GPU, dense bfloat16.")] = 989.0,
    checkpointing: Annotated[
        bool | None, typer.Option(help="Keep only inputs of layers for the backward pass (as the recipe says).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What a run will need and take, before anything starts. Exit code 1 if it does not fit."""
    from kvpop.plan import make_plan
    from kvpop.recipes import recipe_by_name

    chosen = recipe_by_name(recipe)
    if gpus is not None:
        chosen = chosen.on(gpus)
    if checkpointing is not None:
        chosen = replace(chosen, config=replace(chosen.config, checkpointing=checkpointing))
    made = make_plan(chosen, memory_gb=memory, utilisation=mfu, peak=peak * 1e12)
    report = made.asdict()
    if as_json:
        print_json(report)
    else:
        show(report)
    try:
        made.check()
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def show(report: dict[str, Any]) -> None:
    """What is planned, then memory and FLOPs by part, then times."""
    from rich.table import Table

    budget = report["budget"]
    OUT.print()
    print_facts(
        {
            "recipe": report["recipe"],
            "model": f"{report['model']}, {report['parameters']:,} parameters",
            "scorers": f"{report['scorer_parameters']:,} parameters",
            "slots": f"{budget['sinks']} sinks, {budget['window']} window, {budget['long']} long-range",
            "step": f"{report['batch']} sequences of {report['length']:,} tokens: {report['gpus']} GPUs, "
            f"{report['accumulate']} passes of {report['rows']}",
        },
        OUT,
    )
    memory = Table("memory of a GPU", "GB", box=None, pad_edge=False)
    for name, value in report["memory"].items():
        if value:
            memory.add_row(name, f"{value / 1e9:.2f}")
    memory.add_row("at the peak", f"{report['need_gb']:.2f} of {report['memory_gb']:g}", style="bold")
    unit, scale = ("PFLOP", 1e15) if report["flops_per_step"] >= 1e15 else ("TFLOP", 1e12)
    flops = Table("model FLOPs of a step", unit, "share", box=None, pad_edge=False)
    for name, value in report["flops"].items():
        if value:
            flops.add_row(name, f"{value / scale:,.2f}", f"{value / report['flops_per_step']:.1%}")
    flops.add_row("in all", f"{report['flops_per_step'] / scale:,.2f}", "", style="bold")
    for table in (memory, flops):
        for column in table.columns[1:]:
            column.justify = "right"
        OUT.print()
        OUT.print(table)
    OUT.print()
    whole = f"{report['hours']:,.1f} h" if report["hours"] >= 1 else f"{60 * report['hours']:,.1f} min"
    print_facts(
        {
            "tokens": f"{report['tokens_per_step']:,} a step, {report['tokens'] / 1e9:,.2f} billion in all",
            "time": f"{report['seconds_per_step']:,.1f} s a step, {whole} for {report['steps']:,} steps",
            "assuming": f"{report['mfu']:.0%} MFU of {report['peak'] / 1e12:,.0f} TFLOP/s a GPU",
        },
        OUT,
    )

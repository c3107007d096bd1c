"""``kvpop bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpop.budget import Budget
from kvpop.cli.options import DeviceOption, DtypeOption, JsonOption
from kvpop.jobs import load_model, placement
from kvpop.terminal import OUT, print_json

if TYPE_CHECKING:
    import torch

    from kvpop.bench import DecodeSettings

bench = typer.Typer(no_args_is_help=True, help="Measure speed and memory on this machine.")
RESULTS, FIGURE = "decode.json", "decode.png"
UNSAID = ("out", "as_json")
"""Options that say nothing about what is measured."""


@bench.command()
def decode(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Directory of results and figure; a run that was cut short goes on there.")],
    shape: Annotated[
        str | None, typer.Option(help="Random weights: qwen3-8b (default), qwen3-4b or smollm2-135m.")
    ] = None,
    model: Annotated[str | None, typer.Option(help='Or a model: "smollm2", a directory, or a hub name.')] = None,
    layers: Annotated[int | None, typer.Option(help="Only so many layers of the shape.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="dense-eager, dense-static, dense, streaming, kvpop-mlp, kvpop-mlstm, kvpop-sum or dms; repeatable (all)."
        ),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Rows; repeatable (1, 8, 32).")] = None,
    seen: Annotated[
        list[int] | None,
        typer.Option(help="Tokens a row has seen when timing starts; repeatable (16k to 128k)."),
    ] = None,
    budget: Annotated[int, typer.Option(help="Slots per KV head.")] = 4096,
    sinks: Annotated[int, typer.Option(help="First tokens that are always held.")] = 4,
    window: Annotated[int, typer.Option(help="Newest tokens that are always held.")] = 256,
    steps: Annotated[int, typer.Option(help="Tokens that are timed.")] = 50,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile decoder layers: for kinds whose decoding has no kernels.")
    ] = False,
    fuse: Annotated[
        bool, typer.Option("--fuse/--no-fuse", help="One product for q, k and v, and one for gate and up.")
    ] = True,
    tune: Annotated[str, typer.Option(help="How compiled layers are tuned: none or max.")] = "none",
    fit_static: Annotated[
        bool, typer.Option("--fit-static", help="A static cache as long as a row needs, not one for the longest.")
    ] = False,
    largest_batch: Annotated[
        bool, typer.Option("--largest-batch", help="Instead of --batch: tokens/s at the largest batch that fits.")
    ] = False,
    bandwidth: Annotated[float | None, typer.Option(help="GB/s of the floor (measured by a read).")] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Milliseconds and memory of a decoded token against the tokens seen before it, beside what reading it all once takes."""
    from kvpop.bench import POLICIES, DecodeSettings, decode_rows, largest_rows, random_model, read_bandwidth

    try:
        from kvpop.plots.decode import decode_figure
    except ImportError as error:
        raise ImportError("the figure needs the package matplotlib: pip install 'kvpop[demo]'") from error
    if model is not None and (shape is not None or layers is not None):
        raise ValueError(f"--model {model} has its own shape: leave --shape and --layers out")
    shape = shape or "qwen3-8b"
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"--bandwidth must be above 0 GB/s, got {bandwidth}")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: results need a directory")
    place, precision = placement(device, dtype)
    if largest_batch and place.type == "cpu":
        raise ValueError("--largest-batch needs a GPU: on a CPU nothing says what fits")
    settings = DecodeSettings(
        model=model or shape,
        policies=tuple(policy or POLICIES),
        batches=tuple(batch or (1, 8, 32)),
        seen=tuple(seen or (16384, 32768, 65536, 131072)),
        budget=Budget.of_slots(budget, sinks=sinks, window=window),
        layers=layers,
        steps=steps,
        compiled=compiled,
        fuse=fuse,
        tune=tune,  # type: ignore[arg-type]  # checked there
        fit_static=fit_static,
    )
    report = opened(out / RESULTS, settings, place, precision, command_of(context.params))
    if model is None:
        base = random_model(shape, layers, precision, place)
    else:
        base, _ = load_model(model, precision, place)
    if bandwidth is not None:
        report["bandwidth_gb_s"] = bandwidth
    elif report["bandwidth_gb_s"] is None:
        report["bandwidth_gb_s"] = read_bandwidth(place) / 1e9
    run, kind = (largest_rows, "largest") if largest_batch else (decode_rows, "rows")
    known = {(row["policy"], -1 if largest_batch else row["batch"], row["seen"]) for row in report[kind]}
    out.mkdir(parents=True, exist_ok=True)
    for row in run(base, settings, known, report["bandwidth_gb_s"] * 1e9):
        report[kind].append(row)
        written(out / RESULTS, report)
        typer.echo(line_of(row), err=True)
    if any("skipped" not in row for row in report["rows"]):
        decode_figure(report["rows"], out / FIGURE)
    if as_json:
        print_json(report)
    else:
        show([*report["rows"], *report["largest"]])


def command_of(params: dict[str, Any]) -> str:
    """The options that were given, as a command, but for those that say nothing about what is measured."""
    said = ["kvpop bench decode"]
    for name, value in params.items():
        flag = {"compiled": "compile"}.get(name, name).replace("_", "-")
        if name in UNSAID or value is None or (value is False and name != "fuse"):
            continue
        if isinstance(value, bool):
            said.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            said += [f"--{flag} {item}" for item in (value if isinstance(value, list | tuple) else [value])]
    return " ".join(said)


def opened(
    path: Path, settings: DecodeSettings, device: torch.device, dtype: torch.dtype, command: str
) -> dict[str, Any]:
    """The results so far, or empty ones. Raises ValueError for results of something else."""
    import json
    import platform

    import torch
    import transformers

    import kvpop

    machine = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    )
    same = settings.identity() | {"dtype": str(dtype).removeprefix("torch."), "machine": machine}
    fresh: dict[str, Any] = {
        "settings": same,
        "versions": {"kvpop": kvpop.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "command": command,
        "bandwidth_gb_s": None,
        "rows": [],
        "largest": [],
    }
    if not path.is_file():
        return fresh
    found = json.loads(path.read_text())
    for name, value in same.items():
        if (before := found["settings"].get(name)) != value:
            raise ValueError(f"{path} holds results with {name} {before}, not {value}: give another --out")
    for row in found["rows"]:
        if (before := row.get("static_length")) not in (None, value := settings.static_length(row["seen"])):
            raise ValueError(f"{path} holds a static cache of {before} slots, not {value}: give another --out")
    return fresh | {name: found[name] for name in ("bandwidth_gb_s", "rows", "largest")}


def written(path: Path, report: dict[str, Any]) -> None:
    from kvpop.watch import plain
    from kvpop.weights import write_json

    write_json(path, plain(report))


def line_of(row: dict[str, Any]) -> str:
    where = f"{row['policy']}, batch {row['batch']}, {row['seen']:,} seen"
    if "skipped" in row:
        return f"{where}: skipped, {row['skipped']}"
    memory = "" if row["peak_gb"] is None else f", {row['peak_gb']:.1f} GB"
    rate = f", {row['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in row else ""
    return f"{where}: {row['ms_per_token']:.2f} ms a token, {row['ratio']:.2f} of the floor{memory}{rate}"


def show(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    names = {"ms_per_token": "ms a token", "spread": "spread", "floor_ms": "floor", "ratio": "ratio", "peak_gb": "peak GB",
             "formula_gb": "formula GB", "tokens_per_s": "tokens/s"}  # fmt: skip
    names = {name: title for name, title in names.items() if any(row.get(name) is not None for row in rows)}
    table = Table("policy", "batch", "seen", *names.values(), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        values = ("-" if row.get(name) is None else f"{row[name]:,.2f}" for name in names)
        table.add_row(row["policy"], str(row["batch"]), f"{row['seen']:,}", *values)
    OUT.print(table)

"""``kvpop rollouts``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvpop.cli.options import ADAPTER, DeviceOption, DtypeOption, JsonOption, ModelOption, SinksOption, WindowOption
from kvpop.jobs import chosen_policy, load_model, placement
from kvpop.terminal import ERR, print_json


def rollouts(
    out: Annotated[Path, typer.Option(help="The .jsonl file of traces; give it again to go on.")],
    prompts: Annotated[
        str, typer.Option(help="A file of lines or .jsonl (prompt or messages), champ, or free: the model asks itself.")
    ] = "free",
    samples: Annotated[int, typer.Option(help="Traces of each prompt.")] = 1,
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
    max_new_tokens: Annotated[int, typer.Option(help="Of one answer.")] = 1024,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token.")] = 1.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: no limit.")] = 0,
    question_tokens: Annotated[int, typer.Option(help="Of a question of the model's own.")] = 256,
    seed: Annotated[int, typer.Option(min=0, help="Every trace has its own seed, from this one.")] = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue prompts as they are, without the chat template.")
    ] = False,
    rows: Annotated[int, typer.Option(help="Traces generated at a time.")] = 8,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Sample traces from the model itself, as data for distill --data. Ctrl-C is safe: the same command goes on."""
    from kvpop.adapter import load
    from kvpop.attachment import attach
    from kvpop.models import model_id
    from kvpop.rollouts import Rollouts, RolloutSettings, check_out, check_prompts, prompts_from

    settings = RolloutSettings(samples, max_new_tokens, temperature, top_p, top_k, seed, rows, question_tokens)
    chosen, directory, slots = chosen_policy(policy, adapter, budget, sinks, window)
    check_out(out)
    check_prompts(prompts)
    place, precision = placement(device, dtype)

    with ERR.status("loading the model"):
        base, tokenizer = load_model(model, precision, place)
        if directory is None:
            attach(base, chosen)
        else:
            load(base, directory, budget=slots)
    identity = {
        "model": model_id(model),
        "dtype": str(precision),
        "policy": chosen.name if adapter is None else adapter,
        "budget": chosen.slots,
    }
    run = Rollouts(base, tokenizer, prompts_from(prompts, tokenizer, raw), out, settings, identity)
    missing, started, every = len(run.missing), time.perf_counter(), max(1, len(run.missing) // 20)
    total = len(run.prompts) * samples
    ERR.print(f"{total:,} traces of {len(run.prompts):,} prompts, {total - missing:,} of them already there")

    def speed() -> float:
        return run.generated / (time.perf_counter() - started)

    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    new: list[dict[str, Any]] = []
    with Progress(*columns, console=ERR, disable=not ERR.is_terminal) as bar:
        task = bar.add_task("first trace", total=missing)
        try:
            for row in run.run(lambda: bar.update(task, description=f"{speed():,.1f} tokens/s")):
                new.append({"tokens": len(row["tokens"]), "finish_reason": row["finish_reason"]})
                bar.update(task, completed=len(new))
                if bar.disable and len(new) % every == 0:
                    typer.echo(f"trace {len(new):,} of {missing:,}: {speed():,.1f} tokens/s", err=True)
        except KeyboardInterrupt:
            typer.echo(f"interrupted at trace {len(new):,} of {missing:,}; run the same command to go on", err=True)
            raise typer.Exit(130) from None
    facts = {
        "traces": str(out),
        "new": len(new),
        "total": total,
        "tokens": sum(row["tokens"] for row in new),
        "finished": {
            reason: sum(row["finish_reason"] == reason for row in new) for reason in ("stop", "length", "empty")
        },
        "tokens_per_s": speed(),
    }
    if as_json:
        print_json(facts)
    else:
        typer.echo(f"traces: {out}")

"""``kvpop eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvpop.cli.options import (
    ADAPTER,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    SeedOption,
    SinksOption,
    WindowOption,
)
from kvpop.jobs import comparison, evaluation_texts, load_entries, placement, retrieval_cells, retrieval_prompts
from kvpop.terminal import ERR, as_strict_json, print_comparison, print_json


def labelled(names: list[str]) -> dict[str, Path]:
    """The directories of adapters by the last part of their names, or by the whole name where two share that."""
    from kvpop.adapter import adapter_directory

    last = {name: Path(name).resolve().name for name in names}
    unique = {name: [*last.values()].count(label) == 1 for name, label in last.items()}
    return {last[name] if unique[name] else name: adapter_directory(name) for name in last}


def evaluate(
    model: ModelOption = "smollm2",
    adapter: Annotated[list[str] | None, typer.Option(help=f"{ADAPTER}; repeatable.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="A training-free policy; repeatable.")] = None,
    budget: Annotated[list[int] | None, typer.Option(help="Slots per KV head; repeatable.")] = None,
    sinks: SinksOption = None,
    window: WindowOption = None,
    data: Annotated[str, typer.Option(help="As for distill.")] = "champ:test",
    texts: Annotated[int, typer.Option(min=0)] = 4,
    length: Annotated[int, typer.Option(min=2, help="Tokens a text.")] = 1024,
    passkey: Annotated[int, typer.Option(min=0, help="Passkey prompts per length and depth.")] = 0,
    needle: Annotated[int, typer.Option(min=0, help="Multi-needle prompts per length, 4 needles each.")] = 0,
    lengths: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens a prompt; repeatable (default: --length).")
    ] = None,
    depths: Annotated[str, typer.Option(help="Where facts stand, 0 to 1.")] = "0.1,0.5,0.9",
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file, too.")] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compare policies with the dense model: KL, agreement, perplexity and retrieval, teacher-forced on the same text.

    An adapter that changes the model's weights is measured with them; dense is the model as it was before, for all of them.
    Texts are scored from the largest budget on, where every policy has dropped something. Intervals (of several texts)
    are those of a bootstrap over them; of a policy without a budget it is measured what it held at their ends.
    """
    from kvpop.data import texts_from
    from kvpop.measure import compare_retrieval, compare_texts, interval

    if out is not None and out.is_dir():
        raise ValueError(f"--out {out} is a directory: the JSON needs a file")
    if not adapter and not policy:
        raise ValueError("nothing to compare: give --adapter DIR or --policy NAME")
    if not texts + passkey + needle:
        raise ValueError("nothing to measure: --texts, --passkey and --needle are all 0")
    try:
        places = [float(part) for part in depths.split(",")]
    except ValueError as error:
        raise ValueError(f"--depths must be numbers in [0, 1] with commas between, got {depths}") from error
    if not all(0 <= depth <= 1 for depth in places):
        raise ValueError(f"--depths must lie in [0, 1], got {depths}")
    adapters = labelled(adapter or [])
    entries = comparison(adapters, policy or [], budget or [], sinks, window)
    start = max(entry.budget or 0 for entry in entries)
    if texts and length < start + 2:
        raise ValueError(f"--length must be at least the largest budget + 2 = {start + 2}, got {length}")
    place, precision = placement(device, dtype)
    texts_from(data)

    with ERR.status("loading the model"):
        base, tokenizer, entries = load_entries(model, precision, place, adapters, entries)
    sizes = (lengths or [length]) if passkey or needle else []
    with ERR.status("reading the texts"):
        ids, haystack = evaluation_texts(data, tokenizer, texts, length, max(sizes, default=0))
        prompts = retrieval_prompts(tokenizer, haystack, sizes, places, passkey, needle, seed)
    passes = len(ids) * (len(entries) + 1) + len(prompts) * len(entries)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=ERR
    ) as bar:
        task = bar.add_task("evaluating", total=passes)

        def tick(label: str) -> None:
            bar.update(task, advance=1, description=label)

        scores = compare_texts(base, ids, entries, start, tick) if ids else []
        answers = compare_retrieval(base, prompts, entries, tick) if prompts else []
    rows: list[dict[str, Any]] = []
    for i, entry in enumerate(entries):
        row: dict[str, Any] = {"policy": entry.label, "budget": entry.budget}
        if scores:
            row |= scores[i].row(start)
            if texts > 1:
                names = ("kl", "agreement", "accuracy")
                row["intervals"] = {name: interval(row[f"{name}_by_text"], seed) for name in names}
        for name, found in answers[i].items() if answers else ():
            row |= {name: found.row()["exact"], f"{name}_nll": found.row()["nll"]}
            row.setdefault("retrieval", []).extend(retrieval_cells(name, found, places))
        rows.append(row)
    report = {
        "model": model,
        "data": data,
        "texts": len(ids),
        "length": length,
        "start": start,
        "seed": seed,
        "rows": rows,
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(as_strict_json(report) + "\n")
    if as_json:
        print_json(report)
    else:
        print_comparison(rows)

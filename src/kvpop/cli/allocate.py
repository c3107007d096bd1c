"""``kvpop allocate``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpop.cli.options import ADAPTER, DataOption, DeviceOption, DtypeOption, JsonOption, ModelOption, SeedOption
from kvpop.jobs import check_data, chosen_budget, document_curves, load_model, placement, read_adapter, training_stream
from kvpop.terminal import ERR, OUT, counting, print_facts, print_json


def allocate(
    out: Annotated[
        Path, typer.Option(help="Directory of the new adapter; without --adapter, of curves.safetensors alone.")
    ],
    adapter: Annotated[str | None, typer.Option(help=f"Trained scorers. {ADAPTER}.")] = None,
    model: ModelOption = "smollm2",
    data: DataOption = "champ",
    budget: Annotated[int | None, typer.Option(help="Slots per KV head, on average (the adapter's, or 256).")] = None,
    least: Annotated[
        int | None,
        typer.Option(
            min=0, help="Long-range slots that every head keeps; pinned tokens must fit (a quarter of the mean)."
        ),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, help="Documents to look at.")] = 8,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a document: at least twice the slots (default: four times).")
    ] = None,
    retrieval_share: Annotated[
        float, typer.Option(help="Share of documents with facts stated early, asked late.")
    ] = 0.25,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Share a budget among KV heads by what each slot saves of the loss: the same memory, better spent.

    Runs the model over a few documents, with gradients, and writes a copy of the adapter in which every head has its own number
    of slots. Any other --budget of the new adapter is shared anew.
    """
    from kvpop.adapter import CONFIG, adapter_directory, adapter_files, load, load_policy
    from kvpop.allocation import CURVES, read_curves, write_curves
    from kvpop.policies.base import BudgetPolicy
    from kvpop.tasks.training import MIN_LENGTH
    from kvpop.trained import settings_of
    from kvpop.weights import write_json

    if not 0 <= retrieval_share < 1:
        raise ValueError(f"--retrieval-share must be in [0, 1), got {retrieval_share}")
    there = [name for name in (CONFIG, CURVES, "run.json") if (out / name).exists()]
    if there or (out.exists() and not out.is_dir()):
        raise ValueError(f"--out {out} is there already{f', with {there[0]}' if there else ''}: give a new directory")
    directory = None if adapter is None else adapter_directory(adapter)
    trained = None if directory is None else load_policy(directory)
    if trained is not None and not isinstance(trained.policy, BudgetPolicy):
        raise ValueError(f"{adapter} holds {trained.name}, whose heads cannot have budgets of their own")
    slots = chosen_budget(budget, None, None, directory)
    if least is not None and least > slots.long:
        raise ValueError(f"--least must be at most the mean, {slots.long} long-range slots, got {least}")
    length = length or max(4 * slots.slots, MIN_LENGTH if retrieval_share else 0)
    if length < 2 * slots.slots:
        raise ValueError(f"--length must be at least {2 * slots.slots}, twice the slots, got {length}")
    if retrieval_share and length < MIN_LENGTH:
        raise ValueError(
            f"--length must be at least {MIN_LENGTH} for --retrieval-share {retrieval_share}, got {length}"
        )
    check_data(data, length)
    place, precision = placement(device, dtype)
    with ERR.status("loading the model"):
        base, tokenizer = load_model(model, precision, place)
        if directory is not None:
            load(base, directory)  # a model that was trained along is looked at as it is now
    with ERR.status("reading the texts"):
        stream = training_stream(data, tokenizer, length, 1, seed, texts * length, retrieval_share)
    ranking = None if trained is None else trained.with_budget(slots)
    with counting(f"looking at {min(texts, len(stream))} documents") as tick:
        curves = document_curves(base, stream, slots, texts, ranking, tick)
    out.mkdir(parents=True, exist_ok=True)
    write_curves(out / CURVES, curves)
    facts: dict[str, Any] = {"curves": str(out / CURVES)}
    if directory is not None and ranking is not None:
        shared = ranking.by_head(read_curves(out / CURVES), least)
        for name in adapter_files(directory):
            if name not in (CONFIG, CURVES):
                shutil.copyfile(directory / name, out / name)
        write_json(out / CONFIG, {**read_adapter(directory), "policy": settings_of(shared.policy)})
        heads = [k for row in shared.policy.heads for k in row]  # type: ignore[attr-defined]
        facts = {
            "adapter": str(out),
            "slots per KV head": f"{slots.slots} on average: {slots.sinks} sinks, {slots.window} window, and long-range",
            "long-range slots": f"{min(heads)} to {max(heads)}, mean {slots.long}",
        }
    if as_json:
        print_json(facts)
    else:
        OUT.print()
        print_facts(facts, OUT)

"""``kvpop match``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpop.cli.options import DataOption, DeviceOption, DtypeOption, JsonOption, ModelOption, SeedOption
from kvpop.jobs import check_data, load_model, longest_documents, placement, read_adapter, training_stream
from kvpop.terminal import ERR, OUT, counting, print_facts, print_json


def match(
    adapter: Annotated[Path, typer.Argument(help="Directory of a DMS adapter, whose threshold is set anew.")],
    model: ModelOption = "smollm2",
    data: DataOption = "champ",
    ratio: Annotated[float | None, typer.Option(help="Hold 1 / RATIO of the tokens (what it was trained for).")] = None,
    texts: Annotated[int, typer.Option(min=1, help="Documents to look at.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a document.")] = 4096,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Let DMS hold as many tokens as it was to: set the threshold of its gates by what they say about a few documents.

    Gates that were trained briefly end short of the compression they were trained for, and are compared with less memory than
    they take. The share is that of documents of --length tokens: of a shorter text as much of it, so fewer tokens. Writes
    nothing but kvpop.json: the threshold, and under "matched" what it was found by.
    """
    from kvpop.adapter import CONFIG, adapter_files, load
    from kvpop.matching import ROUNDS, matched
    from kvpop.weights import write_json

    if not (adapter / CONFIG).is_file():
        raise ValueError(f"{adapter} is no directory of an adapter (with a {CONFIG}), which match would change")
    config = read_adapter(adapter)
    adapter_files(adapter)  # all there
    if config["policy"]["name"] != "dms":
        raise ValueError(f"{adapter} holds {config['policy']['name']}, which has no gates: kvpop match is for dms")
    aim = float(config["policy"]["ratio"]) if ratio is None else ratio
    if not 1 <= aim < math.inf:
        raise ValueError(f"--ratio must be at least 1 and finite, got {aim}")
    check_data(data, length)
    place, precision = placement(device, dtype)
    with ERR.status("loading the model"):
        base, tokenizer = load_model(model, precision, place)
        load(base, adapter)
    with ERR.status("reading the texts"):
        documents = longest_documents(training_stream(data, tokenizer, length, 1, seed, texts * length, 0.0), texts)
    with counting(f"looking at {len(documents)} documents, up to {ROUNDS} times") as tick:
        found = matched(base, documents, aim, tick)
    by = {
        "ratio": aim,
        "held": found.held,
        "documents": len(documents),
        "tokens": sum(map(len, documents)),
        "data": data,
    }
    policy = {**config["policy"], "ratio": aim, "threshold": found.threshold}
    write_json(adapter / CONFIG, {**config, "policy": policy, "matched": by})
    facts: dict[str, Any] = {
        "adapter": str(adapter), "threshold": found.threshold, "held": found.held, "held before": found.before,
        "documents": by["documents"], "tokens": by["tokens"],
    }  # fmt: skip
    if as_json:
        print_json(facts)
    else:
        shares = {name: f"{facts[name]:.1%} of the tokens" for name in ("held", "held before")}
        OUT.print()
        print_facts({**facts, "threshold": f"{found.threshold:.3f}", **shares}, OUT)

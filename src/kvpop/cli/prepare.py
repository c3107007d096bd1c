"""``kvpop prepare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpop.cli.options import JsonOption, ModelOption
from kvpop.jobs import load_tokenizer
from kvpop.terminal import ERR, print_facts, print_json


def filters(where: list[str]) -> tuple[tuple[str, str], ...]:
    """``field=value`` as pairs; ValueError for anything without a field or an equals sign."""
    pairs = []
    for word in where:
        field, equals, value = word.partition("=")
        if not field or not equals:
            raise ValueError(f"--where is written field=value, got {word!r}")
        pairs.append((field, value))
    return tuple(pairs)


def prepare(
    out: Annotated[Path, typer.Option(help="Directory of the sequences; give it again to go on.")],
    data: Annotated[
        str,
        typer.Option(help="champ, a text, .jsonl or .parquet file, a directory, a hub dataset, or nemotron-math-v2."),
    ],
    length: Annotated[int, typer.Option(min=1, help="Tokens of a packed sequence.")],
    model: ModelOption = "smollm2",
    where: Annotated[
        list[str] | None,
        typer.Option(help="field=value: only documents with this metadata; dots reach in. Repeatable."),
    ] = None,
    min_tokens: Annotated[int, typer.Option(help="Leave out shorter documents.")] = 1,
    max_tokens: Annotated[int | None, typer.Option(help="Leave out longer documents.")] = None,
    overlong: Annotated[
        str | None,
        typer.Option(help="Documents longer than a sequence: cut them into pieces (the default), or drop them."),
    ] = None,
    packing: Annotated[
        str,
        typer.Option(help="isolated: documents of a sequence do not see each other; shared: they are one document."),
    ] = "isolated",
    reasoning: Annotated[
        str, typer.Option(help="reasoning_content of a chat: left to its template, or inline: as <think>...</think>.")
    ] = "template",
    tokens: Annotated[int | None, typer.Option(min=1, help="Stop after so many (default: all).")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Orders the documents of a shared sequence.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Tokenize and pack a corpus once, on disk, for distill --data. Ctrl-C is safe: the same command goes on."""
    from kvpop.data import Corpus, nemotron_math_v2, rows_from
    from kvpop.data import prepare as write

    options: dict[str, Any] = dict(
        where=filters(where or []), min_tokens=min_tokens, packing=packing, reasoning=reasoning
    )
    options |= {} if overlong is None else {"overlong": overlong}
    options |= {} if max_tokens is None else {"max_tokens": max_tokens}
    corpus = nemotron_math_v2(length, **options) if data == "nemotron-math-v2" else Corpus(data, **options)
    rows_from(corpus.source)
    with ERR.status("loading the tokenizer"):
        tokenizer = load_tokenizer(model)
    shown: dict[str, Any] = {"shards": 0, "sequences": 0}
    with ERR.status("reading") as status:

        def on_progress(record: dict[str, Any]) -> None:
            line = (
                f"{record['seen']:,} documents seen, {record['kept']:,} kept, {record['tokens']:,} tokens, "
                f"{record['sequences']:,} sequences in {record['shards']:,} shards"
            )
            status.update(line)
            if not ERR.is_terminal and record["shards"] > shown["shards"]:
                typer.echo(line, err=True)
            shown.update(record)

        try:
            prepared = write(corpus, tokenizer, out, length, tokens, seed, on_progress)
        except KeyboardInterrupt:
            typer.echo(f"interrupted after {shown['sequences']:,} sequences; run the same command to go on", err=True)
            raise typer.Exit(130) from None
    index = prepared.index
    facts = {
        "directory": str(out),
        "sequences": index["sequences"],
        "length": index["length"],
        "shards": len(index["shards"]),
        "fill": index["fill"],
        "longest_document": index["longest_document"],
        "documents": index["documents"],
    }
    if as_json:
        print_json(facts)
        return
    documents = facts.pop("documents")
    dropped = {f"dropped: {reason}": count for reason, count in documents.pop("dropped").items() if count}
    print_facts({**facts, **{f"documents {name}": count for name, count in documents.items()}, **dropped}, ERR)
    typer.echo(f"prepared: {out}")

"""``kvpop publish``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpop.cli.options import ADAPTER, JsonOption
from kvpop.terminal import print_json


def publish(
    adapter: Annotated[str, typer.Argument(help=f"{ADAPTER}.")],
    repo: Annotated[str, typer.Argument(help="OWNER/NAME on the Hugging Face hub; made if it is not there.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository a private one.")] = False,
    evaluation: Annotated[Path | None, typer.Option(help="What `kvpop eval --out` wrote, for the card.")] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Hub name of the model, if training named a directory.")
    ] = None,
    license: Annotated[
        str | None, typer.Option(help='As the hub spells it, "apache-2.0"; default: none stated.')
    ] = None,
    keep_card: Annotated[bool, typer.Option("--keep-card", help="Upload the README.md that is there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the card, list the files, do nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Upload an adapter with a model card. Only what loading needs: no checkpoint, no log. Log in first: `hf auth login`."""
    from kvpop.publish import CARD, prepare, push_to_hub

    what = prepare(
        adapter, repo, evaluation=evaluation, base_model=base_model, license=license, keep_card=keep_card
    )  # fmt: skip
    address = None
    if not dry_run:
        address = push_to_hub(
            adapter, repo, private=private, evaluation=evaluation, base_model=base_model, license=license,
            keep_card=keep_card,
        )  # fmt: skip
    if as_json:
        print_json({"repository": repo, "commit": address, "files": {CARD: len(what.card.encode())} | what.files})
    elif dry_run:
        typer.echo(what.card)
        for name, size in ({CARD: len(what.card.encode())} | what.files).items():
            typer.echo(f"{size:>14,}  {name}", err=True)
    else:
        typer.echo(address)

"""An adapter with its model card onto the Hugging Face hub: the files it consists of, and nothing of the training run."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open

from kvpop.adapter import AdapterError, adapter_directory, adapter_files
from kvpop.card import model_card

CARD = "README.md"


@dataclass(frozen=True)
class Publication:
    """What goes to the hub: the card's text, and every other file with its size in bytes."""

    directory: Path
    repo_id: str
    card: str
    files: dict[str, int]


def prepare(
    directory: str | Path,
    repo_id: str,
    *,
    evaluation: str | Path | None = None,
    base_model: str | None = None,
    license: str | None = None,
    keep_card: bool = False,
) -> Publication:
    """What ``push_to_hub`` would upload, after checking that all of it is there and whole. Writes nothing."""
    validate_repo_id(repo_id)
    if repo_id.count("/") != 1:
        raise ValueError(f"a repository is called OWNER/NAME, got {repo_id!r}")
    directory = adapter_directory(directory)
    names = adapter_files(directory)
    for name in names:
        if name.endswith(".safetensors"):
            try:
                with safe_open(directory / name, "pt"):
                    pass
            except SafetensorError as error:
                raise AdapterError(f"{directory / name} cannot be read: {error}") from error
    if keep_card:
        if not (directory / CARD).is_file():
            raise FileNotFoundError(f"{directory} has no {CARD} to keep")
        card = (directory / CARD).read_text()
    else:
        report = None if evaluation is None else _read_report(Path(evaluation))
        card = model_card(directory, repo_id, base_model=base_model, license=license, evaluation=report)
    return Publication(directory, repo_id, card, {name: (directory / name).stat().st_size for name in names})


def push_to_hub(
    directory: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    evaluation: str | Path | None = None,
    base_model: str | None = None,
    license: str | None = None,
    keep_card: bool = False,
    token: str | None = None,
) -> str:
    """Write the model card of the adapter in ``directory`` and upload both to ``repo_id`` (OWNER/NAME); returns the commit's
    address. ``directory`` may be any name that ``adapter_directory`` takes: then nothing is written into the package or into
    the cache of the hub.

    The repository is made if it is not there, ``private`` or not; one that is there keeps its visibility. ``evaluation``: a
    file that ``kvpop eval --out`` wrote. ``base_model``, ``license``: see ``card.model_card``. ``keep_card`` uploads the
    README.md that is there instead of writing it anew. ``token``: the one you logged in with, unless given.

    Raises ValueError for names and settings that cannot be used, AdapterError and FileNotFoundError for files that are
    missing or damaged, all before anything is written; OSError for what the hub refuses.
    """
    what = prepare(
        directory, repo_id, evaluation=evaluation, base_model=base_model, license=license, keep_card=keep_card
    )  # fmt: skip
    api = huggingface_hub.HfApi(token=token)
    with ExitStack() as stack:
        folder = what.directory
        if folder != Path(directory).expanduser():  # the package's, or in the cache of the hub
            folder = Path(stack.enter_context(TemporaryDirectory()))
            for name in what.files:
                (folder / name).symlink_to((what.directory / name).resolve())
        (folder / CARD).write_text(what.card)
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=str(folder),
                allow_patterns=[CARD, *what.files],
                commit_message="kvpop adapter",
            )
        except (OSError, ValueError):
            raise
        except Exception as error:  # the HTTP client's own, whose package depends on the version of huggingface_hub
            raise ConnectionError(f"the upload to {repo_id} failed: {error}") from error
    return str(getattr(commit, "commit_url", commit))


def _read_report(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no evaluation {path}")
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"the evaluation {path} is not valid JSON: {error}") from error

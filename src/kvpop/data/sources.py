"""What a source holds, row by row and in a fixed order, and how a row becomes text or token ids. Everything is lazy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvpop.corpora import SPLITS, champ_texts
from kvpop.jsonl import Row, json_rows

TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
PARQUET_ROWS = 256
"""Rows read at a time: a trace of reasoning may have a megabyte."""
PROBE = "It's 3 apples,\n\n  naïve → 𝛼 Ω; \t<b>12,345.67</b>"

Reasoning = Literal["template", "inline"]


class Tokenizer(Protocol):
    """What this package asks of a tokenizer; every Hugging Face tokenizer fits."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool = True) -> Any: ...


def rows_from(source: str) -> Iterator[Row]:
    """Rows of a source, in a fixed order.

    ``source`` is one of

    - a ``.txt`` or ``.md`` file: one row;
    - a ``.jsonl`` file: one row a line;
    - a ``.parquet`` file, which needs pyarrow (the extra ``kvpop[data]``);
    - a directory: all such files below it, by name;
    - ``"champ"`` (or ``"champ:validation"``, ``"champ:test"``): long mathematical text, see ``kvpop.corpora``; the training
      split by default;
    - anything else: a dataset of the Hugging Face hub, read as a stream: ``"name"`` or ``"name:split:field"`` (default
      ``train`` and ``text``; several splits, one after the other, are joined by "+"), which needs the extra ``kvpop[data]``.

    Raises at once FileNotFoundError for a path that does not exist or a directory without texts, ValueError for a file of
    another kind or a split that does not exist, ImportError if a package is missing; while reading, ValueError for an empty
    file or a line that is not a JSON object.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
        if not files:
            raise FileNotFoundError(f"no file ending in {', '.join(TEXT_SUFFIXES)} below the directory {source}")
        if any(file.suffix == ".parquet" for file in files):
            _need_pyarrow(path)
        return (row for file in files for row in _file_rows(file))
    if path.is_file():
        if path.suffix not in TEXT_SUFFIXES:
            raise ValueError(f"{source}: a text file must end in {', '.join(TEXT_SUFFIXES)}, got {path.suffix!r}")
        if path.suffix == ".parquet":
            _need_pyarrow(path)
        return _file_rows(path)
    if path.suffix in TEXT_SUFFIXES or source.startswith(("/", ".", "~")):
        raise FileNotFoundError(f"no such file or directory: {source}")
    name, *details = source.split(":")
    if name == "champ":
        return (
            Row({"text": text}, f"{source}, document {i}") for i, text in enumerate(champ_texts(champ_split_of(source)))
        )
    if len(details) not in (0, 2):
        raise ValueError(f"a hub dataset is written 'name' or 'name:split:field', got {source!r}")
    splits, field = details or ("train", "text")
    return _hub_rows(name, splits.split("+"), field)


def champ_split_of(source: str) -> Any:
    """The split that ``"champ"`` or ``"champ:split"`` names; ValueError if there is none of that name."""
    _, *details = source.split(":")
    if details and details not in [[split] for split in SPLITS]:
        raise ValueError(f"the corpus champ has the splits {', '.join(SPLITS)}, got {source!r}")
    return details[0] if details else "train"


def _need_pyarrow(path: Path) -> None:
    if find_spec("pyarrow") is None:
        raise ImportError(f"{path} is parquet, which needs a package: pip install 'kvpop[data]'")


def _file_rows(path: Path) -> Iterator[Row]:
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix == ".jsonl":
        yield from json_rows(path)
    else:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError(f"the file {path} is empty")
        yield Row({"text": text}, str(path))


def _parquet_rows(path: Path) -> Iterator[Row]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
    except ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file ({error})") from error
    with file:
        if not file.metadata.num_rows:
            raise ValueError(f"the file {path} is empty")
        number = 0
        for batch in file.iter_batches(batch_size=PARQUET_ROWS):
            for values in batch.to_pylist():
                yield Row(values, f"{path}, row {number}")
                number += 1


def _hub_rows(name: str, splits: list[str], field: str) -> Iterator[Row]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{name!r} is no file or directory; to read it as a hub dataset: pip install 'kvpop[data]'"
        ) from error
    streams = [load_dataset(name, split=split, streaming=True) for split in splits]
    return (
        Row(values, f"{name}:{split}, row {i}", field)
        for split, rows in zip(splits, streams)
        for i, values in enumerate(rows)
    )


# A row as text, and as token ids.


def row_text(row: Row, tokenizer: Any, reasoning: Reasoning = "template") -> tuple[str, bool]:
    """The text of a row, and whether a chat template made it: its ``field`` or, failing that, its "messages".

    Either may be a conversation; it goes to the template as it is, with the row's "tools" if it has any. "inline" writes each
    ``reasoning_content`` into the content that follows it, between <think> and </think>, for templates that know no such field.

    Raises ValueError for a row without text, a conversation without a tokenizer, or a template that leaves out all reasoning.
    """
    value = row.values.get(row.field)
    value = row.values.get("messages") if value is None else value
    if isinstance(value, str):
        return value, False
    if not isinstance(value, list):
        raise ValueError(f"{row.where}: neither a field {row.field!r} nor 'messages', only {sorted(row.values)}")
    if tokenizer is None or getattr(tokenizer, "chat_template", "its own") is None:
        raise ValueError(f"{row.where}: a conversation needs a tokenizer with a chat template")
    messages = [_with_reasoning(message) for message in value] if reasoning == "inline" else value
    tools = {"tools": row.values["tools"]} if row.values.get("tools") else {}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **tools)
    thoughts = [message["reasoning_content"].strip() for message in value if message.get("reasoning_content")]
    if any(thoughts) and not any(thought in text for thought in thoughts if thought):
        raise ValueError(
            f"{row.where}: the chat template leaves out every reasoning_content; use reasoning 'inline' to write them into "
            "the content"
        )
    return text, True


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    thought = message.get("reasoning_content")
    if not thought:
        return message
    rest = {name: value for name, value in message.items() if name != "reasoning_content"}
    return rest | {"content": f"<think>\n{thought.strip()}\n</think>\n\n{message.get('content') or ''}"}


def texts_from(source: str, tokenizer: Any = None) -> Iterator[str]:
    """Texts of a source, see ``rows_from``: of its field "text" or from "messages" by the tokenizer's chat template.

    Raises as ``rows_from`` and ``row_text`` do.
    """
    return (row_text(row, tokenizer)[0] for row in rows_from(source))


def tokenize(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[NDArray[np.uint32]]:
    """Token ids of each text, with what the tokenizer itself puts around a text (a BOS for some models)."""
    for text in texts:
        yield np.asarray(tokenizer.encode(text), dtype=np.uint32)


class Encoder:
    """Rows to token ids [n], uint32.

    A row with "tokens" (``kvpop rollouts`` writes such) is taken as it is, if its "tokenizer" is this one's fingerprint.
    Text gets what the tokenizer itself puts around it (a BOS for some models); what a chat template wrote has it already.
    """

    def __init__(self, tokenizer: Any, reasoning: Reasoning = "template") -> None:
        self.tokenizer, self.reasoning = tokenizer, reasoning
        self._fingerprint: str | None = None

    def __call__(self, row: Row) -> NDArray[np.uint32]:
        """Raises ValueError for a row without text, or with the tokens of another tokenizer."""
        ids = row.values.get("tokens")
        if ids is None:
            text, is_chat = row_text(row, self.tokenizer, self.reasoning)
            return np.asarray(self.tokenizer.encode(text, add_special_tokens=not is_chat), dtype=np.uint32)
        made_by = row.values.get("tokenizer")
        self._fingerprint = self._fingerprint or tokenizer_fingerprint(self.tokenizer)
        if made_by != self._fingerprint:
            raise ValueError(
                f"{row.where}: its tokens were made by the tokenizer {made_by}, this one is {self._fingerprint}"
            )
        return np.asarray(ids, dtype=np.uint32)


def documents_from(source: str, tokenizer: Any, reasoning: Reasoning = "template") -> Iterator[NDArray[np.uint32]]:
    """Token ids of each document of a source, see ``rows_from`` and ``Encoder``. Raises as they do."""
    encode = Encoder(tokenizer, reasoning)
    return (encode(row) for row in rows_from(source))


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """16 hex digits that change with the vocabulary, and with how text of many kinds is split."""
    vocabulary = sorted(tokenizer.get_vocab().items()) if hasattr(tokenizer, "get_vocab") else []
    text = json.dumps([vocabulary, list(tokenizer.encode(PROBE))])
    return hashlib.sha256(text.encode()).hexdigest()[:16]

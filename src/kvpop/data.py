"""From text to batches: read texts, tokenize, cut, pack into sequences of one length, and serve batches by step
number."""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpop.corpora import champ_texts

# Shapes: B batch, S tokens of a packed sequence.

TEXT_SUFFIXES = (".txt", ".md", ".jsonl")
PADDING = -1


class Tokenizer(Protocol):
    """What this package asks of a tokenizer; every Hugging Face tokenizer fits."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool = True) -> Any: ...


def texts_from(source: str, tokenizer: Any = None) -> Iterator[str]:
    """Documents of a source, in a fixed order.

    ``source`` is one of

    - a ``.txt`` or ``.md`` file: one document;
    - a ``.jsonl`` file: one document a line, from its field "text", or from "messages" by the tokenizer's chat
      template;
    - a directory: all such files below it, by name;
    - ``"champ"`` (or ``"champ:test"``): long mathematical text, see ``kvpop.corpora``; the training split by default;
    - anything else: a dataset of the Hugging Face hub, ``"name"`` or ``"name:split:field"`` (default ``train`` and
      ``text``), which needs the extra ``kvpop[data]``.

    Raises FileNotFoundError for a path that does not exist or a directory without texts, ValueError for an empty file,
    a line without text or a conversation without a tokenizer, ImportError if a package is missing.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
        if not files:
            raise FileNotFoundError(f"no file ending in {', '.join(TEXT_SUFFIXES)} below the directory {source}")
        return (text for file in files for text in _file_texts(file, tokenizer))
    if path.is_file():
        if path.suffix not in TEXT_SUFFIXES:
            raise ValueError(f"{source}: a text file must end in {', '.join(TEXT_SUFFIXES)}, got {path.suffix!r}")
        return _file_texts(path, tokenizer)
    if path.suffix in TEXT_SUFFIXES or source.startswith(("/", ".", "~")):
        raise FileNotFoundError(f"no such file or directory: {source}")
    name, *details = source.split(":")
    if name == "champ":
        if details not in ([], ["train"], ["test"]):
            raise ValueError(f"the corpus champ has the splits train and test, got {source!r}")
        return champ_texts("test" if details == ["test"] else "train")
    if len(details) not in (0, 2):
        raise ValueError(f"a hub dataset is written 'name' or 'name:split:field', got {source!r}")
    split, field = details or ("train", "text")
    return _hub_texts(name, split, field, tokenizer)


def _file_texts(path: Path, tokenizer: Any) -> Iterator[str]:
    if path.suffix != ".jsonl":
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise ValueError(f"the file {path} is empty")
        yield text
        return
    documents = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                documents += 1
                yield _row_text(_parse(line, f"{path}:{number}"), "text", f"{path}:{number}", tokenizer)
    if not documents:
        raise ValueError(f"the file {path} is empty")


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a line of JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def _hub_texts(name: str, split: str, field: str, tokenizer: Any) -> Iterator[str]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{name!r} is no file or directory; to read it as a hub dataset: pip install 'kvpop[data]'"
        ) from error
    rows = load_dataset(name, split=split, streaming=True)
    return (_row_text(row, field, f"{name}:{split}, row {i}", tokenizer) for i, row in enumerate(rows))


def _row_text(row: dict[str, Any], field: str, where: str, tokenizer: Any) -> str:
    """The text of a row: its ``field`` or, failing that, its "messages". Either may be a conversation."""
    value = row.get(field, row.get("messages"))
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"{where}: neither a field {field!r} nor 'messages', only {sorted(row)}")
    if tokenizer is None:
        raise ValueError(f"{where}: a conversation needs a tokenizer with a chat template")
    return tokenizer.apply_chat_template(value, tokenize=False)


def tokenize(texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[NDArray[np.uint32]]:
    """Token ids of each text, with what the tokenizer itself puts around a text (a BOS for some models)."""
    for text in texts:
        yield np.asarray(tokenizer.encode(text), dtype=np.uint32)


def chunks(documents: Iterable[NDArray[np.uint32]], length: int) -> Iterator[NDArray[np.uint32]]:
    """Cut each document into pieces of ``length`` tokens and a shorter rest; empty documents give nothing.

    A piece is a document of its own from then on. Raises ValueError if length < 1.
    """
    if length < 1:
        raise ValueError(f"the length of a piece must be at least 1 token, got {length}")
    for document in documents:
        for start in range(0, len(document), length):
            yield document[start : start + length]


@dataclass(frozen=True, eq=False)
class PackedSequence:
    """Several documents in one sequence of S tokens.

    ``tokens`` int64 [S]; ``document_ids`` int64 [S]: 0, 1, ... in order, -1 on padding, which comes last;
    ``position_ids`` int64 [S]: restarting at 0 with each document, 0 on padding.
    """

    tokens: NDArray[np.int64]
    document_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]

    @classmethod
    def from_pieces(cls, pieces: Sequence[NDArray[Any]], length: int, pad_token: int = 0) -> PackedSequence:
        """Lay the pieces one after the other and pad to ``length``. Raises ValueError if they do not fit."""
        lengths = [len(piece) for piece in pieces]
        if sum(lengths) > length:
            raise ValueError(f"pieces of {sum(lengths)} tokens do not fit into a sequence of {length}")
        padding = length - sum(lengths)
        tokens = np.concatenate([*pieces, np.full(padding, pad_token)]).astype(np.int64)
        ids = np.repeat(np.arange(len(pieces) + 1), [*lengths, padding]).astype(np.int64)
        ids[length - padding :] = PADDING
        positions = np.concatenate([np.arange(n) for n in lengths] + [np.zeros(padding)]).astype(np.int64)
        return cls(tokens, ids, positions)

    @property
    def fill(self) -> float:
        """Share of the sequence that is not padding."""
        return float((self.document_ids != PADDING).mean())


def pack(pieces: Iterable[NDArray[Any]], length: int, pad_token: int = 0) -> Iterator[PackedSequence]:
    """Pack whole pieces into sequences of exactly ``length`` tokens, best fit decreasing.

    The longest piece goes first; each goes where it leaves the least room, or into a new sequence. On long text cut by
    ``chunks`` more than 99 % of the tokens are not padding. Every token of every piece is in exactly one sequence.

    Raises ValueError if a piece is longer than ``length`` or all of them together are shorter.
    """
    by_length = sorted((piece for piece in pieces if len(piece)), key=len, reverse=True)
    total = sum(map(len, by_length))
    if total < length:
        raise ValueError(f"not enough tokens for one sequence: {total} of {length}")
    if len(by_length[0]) > length:
        raise ValueError(
            f"a piece of {len(by_length[0])} tokens does not fit into a sequence of {length}; cut it first"
        )
    bins: list[list[NDArray[Any]]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for piece in by_length:
        at = bisect.bisect_left(rooms, (len(piece), -1))
        if at == len(rooms):
            bins.append([])
            room, index = length, len(bins) - 1
        else:
            room, index = rooms.pop(at)
        bins[index].append(piece)
        if room > len(piece):
            bisect.insort(rooms, (room - len(piece), index))
    for contents in bins:
        yield PackedSequence.from_pieces(contents, length, pad_token)


class SequenceStream:
    """Endless batches of packed sequences, where ``batch(step)`` depends on nothing but the seed and the step.

    Each epoch goes through all sequences once, in an order of its own. There is no state: training that resumes at a
    step sees the batches it would have seen.
    """

    def __init__(self, sequences: Sequence[PackedSequence], batch_size: int, seed: int = 0) -> None:
        """Raises ValueError without sequences, with sequences of different lengths, or if batch_size < 1 or seed <
        0."""
        if not sequences:
            raise ValueError("a stream needs at least 1 sequence, got 0")
        lengths = sorted({len(sequence.tokens) for sequence in sequences})
        if len(lengths) > 1:
            raise ValueError(f"all sequences must have the same length, got {lengths[0]} and {lengths[-1]} tokens")
        if batch_size < 1 or seed < 0:
            raise ValueError(f"batch_size must be at least 1 and seed at least 0, got {batch_size} and {seed}")
        self.batch_size = batch_size
        self.seed = seed
        self._columns = {
            "input_ids": np.stack([sequence.tokens for sequence in sequences]).astype(np.uint32),
            "document_ids": np.stack([sequence.document_ids for sequence in sequences]).astype(np.int32),
            "position_ids": np.stack([sequence.position_ids for sequence in sequences]).astype(np.int32),
        }

    def __len__(self) -> int:
        """Number of sequences, the same as batch_size * steps of one epoch."""
        return len(self._columns["input_ids"])

    @property
    def length(self) -> int:
        """Tokens of each sequence (S)."""
        return self._columns["input_ids"].shape[1]

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document in any sequence."""
        return int(self._columns["position_ids"].max()) + 1

    def fingerprint(self) -> str:
        """A digest of everything ``batch`` depends on: two streams with the same one give the same batches."""
        digest = hashlib.sha256(f"{self.batch_size} {self.seed} {len(self)} {self.length}".encode())
        for name in sorted(self._columns):
            digest.update(self._columns[name].tobytes())
        return digest.hexdigest()[:16]

    def batch(self, step: int) -> dict[str, Tensor]:
        """int64 tensors [B, S] "input_ids", "document_ids" (-1 on padding) and "position_ids" of one step (from 0).

        A batch may hold the end of one epoch and the start of the next. Raises ValueError if step < 0.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        places = range(step * self.batch_size, (step + 1) * self.batch_size)
        orders = {epoch: self._order(epoch) for epoch in {place // len(self) for place in places}}
        rows = [orders[place // len(self)][place % len(self)] for place in places]
        return {name: torch.from_numpy(column[rows].astype(np.int64)) for name, column in self._columns.items()}

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self))

"""A corpus packed once and kept on disk: written shard by shard, gone on with after any interruption, read by mapping.

A directory holds ``sequences.json`` (the index), ``shard-00000.safetensors``, ... and, while it is being written, one
``held-00000.safetensors``: the documents that wait for the next shard. The index names the shards that count; it is replaced
in one step after each.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from kvpop.data.corpus import Corpus, Counts, Reader
from kvpop.data.packing import Piece, best_fit, document_columns, fuller_half, in_order
from kvpop.data.sources import Row, rows_from, tokenizer_fingerprint
from kvpop.data.stream import Columns

# Shapes: n sequences of a shard, P pieces in it, S tokens of a sequence.

INDEX = "sequences.json"
FORMAT = "kvpop-sequences 1"
POOL = 1 << 25
"""Tokens that are packed together: 128 MiB, and about half of it becomes a shard."""
REPORT_EVERY = 100
IDENTITY = ("format", "corpus", "length", "wanted", "seed", "pool", "tokenizer", "chat_template", "dtype", "pad_token")
"""Entries of the index that must be equal for a directory to be gone on with."""


class Prepared:
    """The sequences of a directory that ``prepare`` has finished. They stay on disk; what is asked for is read.

    ``index`` is what ``sequences.json`` holds. Raises FileNotFoundError if there is none, ValueError if it is of another format
    or not finished, or if a shard is missing or cut off.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.index = read_index(self.directory)
        if not self.index["complete"]:
            raise ValueError(
                f"{directory} is not finished: {len(self.index['shards'])} shards so far; run the same prepare command to go on"
            )
        for shard in self.index["shards"]:
            path = self.directory / shard["file"]
            size = path.stat().st_size if path.is_file() else 0
            if size != shard["bytes"]:
                raise ValueError(f"{path} is damaged: {size} bytes instead of {shard['bytes']}")
        self.length: int = self.index["length"]
        self.longest_document: int = self.index["longest_document"]
        self.shared: bool = self.index["corpus"]["packing"] == "shared"
        self._ends = np.cumsum([shard["sequences"] for shard in self.index["shards"]])
        self._open: dict[int, tuple[Any, NDArray[np.int64], NDArray[np.int64]]] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def columns(self, rows: Sequence[int]) -> Columns:
        found = [self._row(int(row)) for row in rows]
        return {name: np.stack([one[name] for one in found]) for name in found[0]}

    def _row(self, row: int) -> Columns:
        shard = int(np.searchsorted(self._ends, row, side="right"))
        place = row - (int(self._ends[shard - 1]) if shard else 0)
        if shard not in self._open:
            file: Any = safe_open(self.directory / self.index["shards"][shard]["file"], framework="numpy")
            self._open[shard] = (file.get_slice("tokens"), file.get_tensor("ends"), file.get_tensor("lengths"))
        tokens, ends, lengths = self._open[shard]
        pieces = lengths[ends[place - 1] if place else 0 : ends[place]].tolist()
        ids, positions = document_columns([sum(pieces)] if self.shared else pieces, self.length)
        return {"input_ids": tokens[place : place + 1][0], "document_ids": ids, "position_ids": positions}

    def identify(self, digest: Any) -> None:
        digest.update(
            json.dumps([self.index["corpus"]["packing"], *(s["sha256"] for s in self.index["shards"])]).encode()
        )

    def check(self, length: int, tokenizer: Any = None) -> None:
        """ValueError unless the sequences have ``length`` tokens and were made with this tokenizer."""
        if length != self.length:
            raise ValueError(f"{self.directory} holds sequences of {self.length} tokens, {length} are asked for")
        if tokenizer is not None and (own := tokenizer_fingerprint(tokenizer)) != self.index["tokenizer"]:
            raise ValueError(
                f"{self.directory} was made with the tokenizer {self.index['tokenizer']}, this one is {own}: prepare it again"
            )


def is_prepared(directory: str | Path) -> bool:
    """Whether ``prepare`` has written there, finished or not."""
    return (Path(directory) / INDEX).is_file()


def read_index(directory: Path) -> dict[str, Any]:
    """The index of a directory. Raises FileNotFoundError, or ValueError for another format."""
    if not is_prepared(directory):
        raise FileNotFoundError(f"{directory} is no prepared corpus: it has no {INDEX}")
    try:
        index = json.loads((directory / INDEX).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{directory / INDEX} is not JSON ({error})") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        found = index.get("format") if isinstance(index, dict) else index
        raise ValueError(f"{directory / INDEX} must have the format {FORMAT!r}, got {found!r}")
    return index


def prepare(
    corpus: Corpus,
    tokenizer: Any,
    directory: str | Path,
    length: int,
    tokens: int | None = None,
    seed: int = 0,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    *,
    pool: int = POOL,
) -> Prepared:
    """Pack a corpus into sequences of ``length`` tokens on disk, and open it.

    Reads documents until ``tokens`` tokens were kept (None: all). ``pool``: tokens packed together, see ``pack``; the
    sequences of one round are a shard. ``seed`` orders the documents within a sequence if they share it. ``on_progress`` is
    given the counts of documents, "sequences" and "shards" written, now and then.

    Stopped at any moment, the same call goes on after the last shard that was complete and writes what it would have written
    (rows before that are read again, not tokenized). A finished directory is opened as it is.

    Raises as ``Reader`` does; ValueError for sizes out of range, for a directory that holds something else or was made with
    other settings (which are named), for a source that has changed since, or if there is not enough text for one sequence.
    """
    if length < 1 or (tokens is not None and tokens < length) or seed < 0 or pool < length:
        raise ValueError(
            f"length must be at least 1, tokens and pool at least length, seed at least 0, "
            f"got {length}, {tokens}, {pool} and {seed}"
        )
    directory = Path(directory)
    vocabulary = max(tokenizer.get_vocab().values(), default=0) if hasattr(tokenizer, "get_vocab") else 1 << 32
    template = json.dumps(getattr(tokenizer, "chat_template", None))
    fresh = {
        "format": FORMAT,
        "corpus": json.loads(json.dumps(asdict(corpus))),
        "length": length,
        "wanted": tokens,
        "seed": seed,
        "pool": pool,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": hashlib.sha256(template.encode()).hexdigest()[:16],
        "dtype": "uint16" if vocabulary < 1 << 16 else "uint32",
        "pad_token": getattr(tokenizer, "pad_token_id", None) or 0,
        "documents": Counts().asdict(),
        "found": [],
        "last_row": None,
        "held": None,
        "longest_document": 0,
        "shards": [],
        "sequences": 0,
        "fill": 0.0,
        "complete": False,
    }
    index = _begun(directory, fresh)
    if not index["complete"]:
        _write(corpus, tokenizer, directory, index, on_progress)
    return Prepared(directory)


def _begun(directory: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """The index of the directory, which is ``fresh`` if nothing is there yet."""
    index = read_index(directory) if is_prepared(directory) else None
    if index is not None and index["shards"]:
        other = [
            f"{name} {index.get(name)!r}, now {fresh[name]!r}" for name in IDENTITY if index.get(name) != fresh[name]
        ]
        if other:
            raise ValueError(f"{directory} was prepared with other settings: {'; '.join(other)}")
        return index
    if index is None and directory.is_dir() and any(not path.name.startswith(".") for path in directory.iterdir()):
        raise ValueError(f"{directory} is not empty and holds no prepared corpus")
    rows_from(fresh["corpus"]["source"])  # raises for a source that does not exist, before anything is made
    directory.mkdir(parents=True, exist_ok=True)
    _replace(directory / INDEX, json.dumps(fresh, indent=1).encode())
    return fresh


def _write(
    corpus: Corpus,
    tokenizer: Any,
    directory: Path,
    index: dict[str, Any],
    on_progress: Callable[[dict[str, Any]], None] | None,
) -> None:
    """Read, pack and write from where the index ends until the source or the tokens wanted end."""
    counts, length = Counts.fromdict(index["documents"]), index["length"]
    held = _load_held(directory, index)
    rows = _rows_after(corpus.source, counts.seen, index["last_row"])
    reader = Reader(corpus, tokenizer, length, index["wanted"], rows, counts, set(index["found"]))
    waiting = sum(map(len, held))
    for pieces in reader:
        held += pieces
        waiting += sum(map(len, pieces))
        is_shard = waiting >= index["pool"]
        if is_shard:
            full, held = fuller_half(best_fit(held, length))
            waiting = sum(map(len, held))
            _add_shard(directory, index, reader, full, held)
        if on_progress is not None and (is_shard or counts.kept % REPORT_EVERY == 0):
            on_progress(progress(index, counts))
    if counts.tokens < length:
        raise ValueError(f"not enough tokens for one sequence: {counts.tokens} of {length} ({counts})")
    index["complete"] = True
    _add_shard(directory, index, reader, best_fit(held, length), [])
    if on_progress is not None:
        on_progress(progress(index, counts))


def progress(index: dict[str, Any], counts: Counts) -> dict[str, Any]:
    return counts.asdict() | {"sequences": index["sequences"], "shards": len(index["shards"])}


def _rows_after(source: str, count: int, digest: str | None) -> Iterator[Row]:
    """The rows of a source after the first ``count``, of which the last must have that digest."""
    rows = rows_from(source)
    if not count:
        return rows
    last = next(itertools.islice(rows, count - 1, None), None)
    if last is None or row_digest(last) != digest:
        raise ValueError(
            f"{source} has changed since its first {count:,} rows were read: prepare it into another directory"
        )
    return rows


def row_digest(row: Row) -> str:
    return hashlib.sha256(json.dumps(row.values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _add_shard(
    directory: Path, index: dict[str, Any], reader: Reader, bins: list[list[Piece]], held: list[Piece]
) -> None:
    """Write a shard, then the documents that wait, then the index, which makes them count."""
    number, length, dtype = len(index["shards"]), index["length"], np.dtype(index["dtype"])
    tokens = np.full((len(bins), length), index["pad_token"], dtype=dtype)
    lengths: list[int] = []
    ends = []
    for row, contents in enumerate(bins):
        contents = in_order(contents, index["corpus"]["packing"] == "shared", index["seed"], index["sequences"] + row)
        joined = np.concatenate(contents)
        if joined.max() > np.iinfo(dtype).max:
            raise ValueError(
                f"token {joined.max()} lies outside the tokenizer's vocabulary, at most {np.iinfo(dtype).max}"
            )
        tokens[row, : len(joined)] = joined
        lengths += map(len, contents)
        ends.append(len(lengths))
        longest = len(joined) if index["corpus"]["packing"] == "shared" else max(map(len, contents))
        index["longest_document"] = max(index["longest_document"], longest)
    if bins:
        content = save({"tokens": tokens, "ends": np.asarray(ends), "lengths": np.asarray(lengths)})
        name = f"shard-{number:05d}.safetensors"
        _replace(directory / name, content)
        digest = hashlib.sha256(content).hexdigest()
        index["shards"].append({"file": name, "sequences": len(bins), "bytes": len(content), "sha256": digest})
    index["held"] = f"held-{number:05d}.safetensors" if held else None
    if held:
        _replace(
            directory / index["held"],
            save({"tokens": np.concatenate(held), "lengths": np.asarray([len(piece) for piece in held])}),
        )
    index["documents"], index["found"] = reader.counts.asdict(), sorted(reader.found)
    index["last_row"] = None if reader.last is None else row_digest(reader.last)
    index["sequences"] += len(bins)
    written = reader.counts.tokens - sum(map(len, held))
    index["fill"] = written / (index["sequences"] * length)
    _replace(directory / INDEX, json.dumps(index, indent=1).encode())
    for path in directory.glob("held-*.safetensors"):
        if path.name != index["held"]:
            path.unlink()


def _load_held(directory: Path, index: dict[str, Any]) -> list[Piece]:
    if index["held"] is None:
        return []
    try:
        held = load_file(directory / index["held"])
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{directory / index['held']} is damaged ({error}): prepare into another directory") from error
    return np.split(held["tokens"], np.cumsum(held["lengths"])[:-1])


def _replace(path: Path, content: bytes) -> None:
    """Write atomically: a reader sees the old file or the new one, also after a loss of power."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)

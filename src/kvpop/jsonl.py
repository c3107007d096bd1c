"""JSONL files that only grow, and the settings beside them: gone on with after any kill, never under other settings."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True)
class Row:
    """A row of a file: its ``values`` by name, where it stands, and the field that holds the text, of one that has."""

    values: dict[str, Any]
    where: str
    field: str = "text"


def json_rows(path: Path) -> Iterator[Row]:
    """One row a line of a JSONL file, blank lines aside. Raises ValueError for an empty file or a line that is no object."""
    empty = True
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                empty = False
                yield Row(_parse(line, f"{path}:{number}"), f"{path}:{number}")
    if empty:
        raise ValueError(f"the file {path} is empty")


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a line of JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def cut_last_line(path: Path) -> bool:
    """Remove a last line that was cut off (it has no line end); whether anything is left. False if there is no file."""
    if not path.is_file():
        return False
    with path.open("rb+") as file:
        whole = sum(len(line) for line in file if line.endswith(b"\n"))
        if whole != file.tell():
            file.truncate(whole)
    return whole > 0


@contextmanager
def appending(path: Path) -> Iterator[TextIO]:
    """The file (made if there is none), to append to; no other process may have it so meanwhile. ValueError if one has.

    Where the file system knows no locks, nothing is checked.
    """
    while True:
        with path.open("a", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(f"another process is writing to {path}") from error
            except OSError:
                pass
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # not replaced (sort_lines) since it was opened
                yield file
                return


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one of dotted names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What ``new`` says otherwise than ``old``, a phrase each: "model.id 'a', now 'b'"."""
    before, now = flat(old), flat(new)
    keys = [*now, *(key for key in before if key not in now)]
    return [f"{key} {before.get(key)!r}, now {now.get(key)!r}" for key in keys if before.get(key) != now.get(key)]


def sort_lines(path: Path, key: Callable[[dict[str, Any]], Any]) -> None:
    """Put the lines of a file in the order of ``key``, of equal keys the first line only; a reader sees the old file or the
    new one. The file is never in memory as a whole."""
    places: dict[Any, tuple[int, int]] = {}
    start = 0
    with path.open("rb") as file:
        for line in file:
            places.setdefault(key(json.loads(line)), (start, len(line)))
            start += len(line)
        order = [places[one] for one in sorted(places)]
        if order == sorted(order) and sum(size for _, size in order) == start:
            return
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("wb") as out:
            for at, size in order:
                file.seek(at)
                out.write(file.read(size))
    os.replace(temporary, path)

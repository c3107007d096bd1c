"""Files of items: from the hub or the disk, with their checksum and number of rows verified. None comes with the package.

A data set on the hub changes under its name. A source whose ``revision`` is a commit is read at that commit. One that says
``UNPINNED`` is read at the newest commit once; what that was goes into a lock file (commit, checksum and number of rows, by
data set and file), and from then on only the very same file is accepted. The lock file stands beside the hub's cache, or
where KVPOP_EVALS_LOCK says: put it under version control, and everybody measures on the same items.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvpop.evals.base import Source

UNPINNED = "main"
LOCK_VARIABLE = "KVPOP_EVALS_LOCK"
SUFFIXES = (".parquet", ".jsonl", ".csv")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class ItemFile:
    """The rows of a file and what they were read from: its path, the commit on the hub (None for a local file), its SHA-256."""

    rows: list[dict[str, Any]]
    path: Path
    revision: str | None
    sha256: str

    def numbered(self) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Every row with its number, and where it stands, for an error about it."""
        for number, row in enumerate(self.rows):
            yield number, f"{self.path}, row {number}", row


def lock_path() -> Path:
    """The lock file: where KVPOP_EVALS_LOCK says, else beside the hub's cache."""
    if given := os.environ.get(LOCK_VARIABLE):
        return Path(given).expanduser()
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE).parent / "kvpop-evals.lock.json"


def read_items(source: Source, file: str | Path | None = None) -> ItemFile:
    """The rows of ``source``, or of the local ``file`` in its place.

    A local file must have the source's number of rows, and its checksum where the source states one; the lock has no say.

    Raises FileNotFoundError for a file that does not exist or cannot be downloaded, ValueError for another suffix, checksum,
    number of rows or revision than expected, or a file that cannot be read, ImportError if pyarrow is missing for parquet.
    """
    if file is not None:
        path = Path(file).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"no such file of items: {file}")
        return _verified(path, source, None, {})
    name = f"{source.hub}/{source.file}"
    locked = _read_lock().get(name, {})
    pinned = COMMIT.fullmatch(source.revision) is not None
    if not pinned and source.revision != UNPINNED:
        raise ValueError(f"{name}: a revision is a commit of 40 hex digits or {UNPINNED!r}, got {source.revision!r}")
    if pinned and locked and locked["revision"] != source.revision:
        raise ValueError(
            f"{name}: the lock file {lock_path()} has the commit {locked['revision']}, asked for is {source.revision}; "
            "remove its entry to measure on another"
        )
    path, commit = _download(source, source.revision if pinned else locked.get("revision", UNPINNED))
    found = _verified(path, source, commit, locked)
    if not locked:
        _lock(name, {"revision": commit, "sha256": found.sha256, "rows": len(found.rows)})
    return found


def _download(source: Source, revision: str) -> tuple[Path, str]:
    """The file and the commit it is of."""
    import huggingface_hub

    try:
        path = Path(huggingface_hub.hf_hub_download(source.hub, source.file, revision=revision, repo_type="dataset"))
    except (OSError, ValueError) as error:
        lines = str(error).strip().splitlines()
        raise FileNotFoundError(
            f"{source.hub}/{source.file} could not be downloaded from the hub at {revision} "
            f"({type(error).__name__}: {lines[0] if lines else 'no reason'}). Where its owner asks for consent, give it at "
            f"{source.url} and log in with `hf auth login`; or name a local file"
        ) from error
    # .../snapshots/COMMIT/FILE
    commit = path.parts[-1 - len(Path(source.file).parts)]
    if not COMMIT.fullmatch(commit):
        raise ValueError(f"{path}: not in a snapshot of the hub's cache, so its commit is not known")
    return path, commit


def _verified(path: Path, source: Source, commit: str | None, locked: Mapping[str, Any]) -> ItemFile:
    digest = _sha256(path)
    for expected, origin in ((source.sha256, "the source"), (locked.get("sha256"), f"the lock file {lock_path()}")):
        if expected is not None and digest != expected:
            raise ValueError(f"{path}: its SHA-256 is {digest}, {origin} has {expected}")
    rows = read_rows(path)
    for count, origin in ((source.rows, source.hub), (locked.get("rows"), f"the lock file {lock_path()}")):
        if count is not None and len(rows) != count:
            raise ValueError(f"{path}: it has {len(rows)} rows, {origin} must have {count}")
    return ItemFile(rows, path, commit, digest)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_lock() -> dict[str, dict[str, Any]]:
    path = lock_path()
    if not path.is_file():
        return {}
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        complete = all({"revision", "sha256", "rows"} <= entry.keys() for entry in held.values())
    except (ValueError, AttributeError) as error:
        raise ValueError(f"the lock file {path} is broken ({error})") from error
    if not complete:
        raise ValueError(f"the lock file {path} is broken (an entry needs revision, sha256 and rows)")
    return held


def _lock(name: str, entry: dict[str, Any]) -> None:
    from filelock import FileLock

    path = lock_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):  # other processes have files of their own to enter
        held = _read_lock()
        if held.setdefault(name, entry) != entry:
            raise ValueError(
                f"{name}: read at {entry['revision']}, but the lock file {path} now has {held[name]['revision']}"
            )
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(held, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All rows of a .parquet, .jsonl or .csv file. Raises ValueError for another suffix or a file that is empty or broken,
    ImportError if pyarrow is missing for parquet."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: a file of items must end in {', '.join(SUFFIXES)}, got {path.suffix!r}")
    if path.suffix != ".csv":
        from kvpop.data.sources import rows_from

        return [row.values for row in rows_from(str(path))]
    csv.field_size_limit(1 << 24)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            rows = list(reader)
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num}: not a line of CSV ({error})") from error
    if not rows:
        raise ValueError(f"the file {path} is empty")
    return rows


def value(row: Mapping[str, Any], names: Sequence[str], where: str) -> Any:
    """The first of the fields ``names`` that the row has. Raises ValueError, listing the fields there are, if it has none."""
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(f"{where}: none of the fields {', '.join(names)}, only {sorted(str(key) for key in row)}")

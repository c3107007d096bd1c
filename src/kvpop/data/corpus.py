"""Which documents of a source are trained on, and how: filters, and what became of every document."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kvpop.data.packing import chunks
from kvpop.data.sources import Encoder, Reasoning, Row, rows_from

PATIENCE = 10_000
"""Rows without a field that a filter names, after which the field is taken for a mistake."""

Overlong = Literal["cut", "drop"]
Packing = Literal["isolated", "shared"]
DROPPED = ("where", "short", "long", "overlong")


@dataclass(frozen=True)
class Corpus:
    """A source of documents, filtered, and how its documents become sequences of S tokens.

    ``source`` is what ``rows_from`` takes. ``where``: pairs of a field and the value it must have, both as strings; a dotted
    name reaches into fields of fields, values other than strings are compared as JSON (true, 1, null, []). Documents of fewer
    than ``min_tokens`` or more than ``max_tokens`` tokens are left out. Documents longer than S are ``overlong``: "cut" into
    pieces, each a document of its own from then on, or left out ("drop"). ``packing``: documents of one sequence do not see
    each other and their positions restart ("isolated"), or the sequence is one document ("shared"). ``reasoning``: how the
    ``reasoning_content`` of a conversation is written, see ``row_text``.

    Raises ValueError for settings out of range.
    """

    source: str
    where: tuple[tuple[str, str], ...] = ()
    min_tokens: int = 1
    max_tokens: int | None = None
    overlong: Overlong = "cut"
    packing: Packing = "isolated"
    reasoning: Reasoning = "template"

    def __post_init__(self) -> None:
        if not self.source:
            raise ValueError("a corpus needs a source, got ''")
        for pair in self.where:
            if len(pair) != 2 or not all(isinstance(word, str) for word in pair) or not pair[0]:
                raise ValueError(f"a filter is a pair (field, value) of strings, got {pair!r}")
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens must be at least 1, got {self.min_tokens}")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"max_tokens must be at least min_tokens = {self.min_tokens}, got {self.max_tokens}")
        for name, kinds in (("overlong", Overlong), ("packing", Packing), ("reasoning", Reasoning)):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kinds))}, got {getattr(self, name)!r}")


@dataclass
class Counts:
    """What became of the documents read so far. ``tokens`` of the ``kept`` ones; ``dropped`` by reason: "where" (a filter),
    "short", "long" (``min_tokens``, ``max_tokens``), "overlong" (longer than a sequence)."""

    seen: int = 0
    kept: int = 0
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def asdict(self) -> dict[str, Any]:
        return {"seen": self.seen, "kept": self.kept, "tokens": self.tokens} | {
            "dropped": {reason: self.dropped[reason] for reason in DROPPED}
        }

    @classmethod
    def fromdict(cls, values: dict[str, Any]) -> Counts:
        return cls(values["seen"], values["kept"], values["tokens"], Counter(values["dropped"]))

    def __str__(self) -> str:
        reasons = ", ".join(f"{self.dropped[reason]:,} {reason}" for reason in DROPPED if self.dropped[reason])
        return f"{self.seen:,} documents seen, {self.kept:,} kept" + (f", dropped: {reasons}" if reasons else "")


class Reader:
    """The documents of a corpus that are kept, one after the other, with ``counts`` of all. ``rows`` were read so far.

    ``limit``: tokens after which it stops; the last document is cut to fit (None: all). A reader may begin in the middle:
    ``counts`` and ``found`` are then those of the reader before it, and ``rows`` what it left.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Any,
        length: int,
        limit: int | None = None,
        rows: Iterator[Row] | None = None,
        counts: Counts | None = None,
        found: set[str] | None = None,
    ) -> None:
        self.corpus, self.length, self.limit = corpus, length, limit
        self.rows = rows_from(corpus.source) if rows is None else rows
        self.counts = Counts() if counts is None else counts
        self.found = set() if found is None else found  # fields of filters that some row had
        self.last: Row | None = None
        self._encode = Encoder(tokenizer, corpus.reasoning)
        self._fields: set[str] = set()

    def __iter__(self) -> Iterator[list[NDArray[np.uint32]]]:
        """The pieces of one document after the other, each of at most ``length`` tokens.

        Raises as ``rows_from`` and ``Encoder`` do; ValueError for a filter on a field that no row has (none of the first 10,000
        is enough), and at the end if no document was kept, with the counts.
        """
        while self.limit is None or self.counts.tokens < self.limit:
            row = next(self.rows, None)
            if row is None:
                break
            self.last = row
            self.counts.seen += 1
            document = self._kept(row)
            if document is not None:
                document = document[: None if self.limit is None else self.limit - self.counts.tokens]
                self.counts.kept += 1
                self.counts.tokens += len(document)
                yield list(chunks([document], self.length))
        self._check_fields(self.counts.seen)
        if not self.counts.kept:
            raise ValueError(f"nothing of {self.corpus.source} is left: {self.counts}")

    def _kept(self, row: Row) -> NDArray[np.uint32] | None:
        if not self._matches(row):
            self.counts.dropped["where"] += 1
            return None
        document, corpus = self._encode(row), self.corpus
        reason = (
            "short" if len(document) < corpus.min_tokens
            else "long" if corpus.max_tokens is not None and len(document) > corpus.max_tokens
            else "overlong" if corpus.overlong == "drop" and len(document) > self.length
            else None
        )  # fmt: skip
        if reason is None:
            return document
        self.counts.dropped[reason] += 1
        return None

    def _matches(self, row: Row) -> bool:
        if not self.corpus.where:
            return True
        values = [lookup(row.values, name) for name, _ in self.corpus.where]
        self.found |= {name for (name, _), value in zip(self.corpus.where, values) if value is not None}
        if len(self.found) < len({name for name, _ in self.corpus.where}):
            self._fields |= field_names(row.values)
            if self.counts.seen == PATIENCE:
                self._check_fields(PATIENCE)
        return all(value == wanted for value, (_, wanted) in zip(values, self.corpus.where))

    def _check_fields(self, rows: int) -> None:
        for name, _ in self.corpus.where:
            if name not in self.found:
                raise ValueError(
                    f"none of {rows:,} rows of {self.corpus.source} has the field {name!r}, only {sorted(self._fields)}"
                )


def lookup(values: Any, name: str) -> str | None:
    """The value at a dotted name, a string as it is and anything else as JSON; None if there is no such field."""
    if name in values:
        value = values[name]
        return value if isinstance(value, str) else json.dumps(value, default=str)
    first, _, rest = name.partition(".")
    inside = values.get(first)
    return lookup(inside, rest) if rest and isinstance(inside, dict) else None


def field_names(values: dict[str, Any]) -> set[str]:
    """Dotted names of all fields of a row, those of fields of fields included."""
    found = set()
    for name, value in values.items():
        found |= {f"{name}.{inner}" for inner in field_names(value)} if isinstance(value, dict) and value else {name}
    return found

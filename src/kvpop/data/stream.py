"""Batches by step number: which sequences a step trains on depends on nothing but the seed, the step and the rank."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpop.data.packing import PackedSequence

# Shapes: B rows of a batch, n rows asked for, S tokens of a packed sequence.

Columns = dict[str, NDArray[Any]]


class Sequences(Protocol):
    """Packed sequences of one length, wherever they are."""

    def __len__(self) -> int: ...

    @property
    def length(self) -> int:
        """Tokens of each sequence (S)."""
        ...

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document in any sequence."""
        ...

    def columns(self, rows: Sequence[int]) -> Columns:
        """Integer arrays [n, S] "input_ids", "document_ids" (-1 on padding) and "position_ids" of these sequences."""
        ...

    def identify(self, digest: Any) -> None:
        """Feed all that ``columns`` depends on to a digest of ``hashlib``."""
        ...


class InMemory:
    """Sequences held as arrays. Raises ValueError without sequences or for sequences of different lengths."""

    def __init__(self, sequences: Sequence[PackedSequence]) -> None:
        if not sequences:
            raise ValueError("a stream needs at least 1 sequence, got 0")
        lengths = sorted({len(sequence.tokens) for sequence in sequences})
        if len(lengths) > 1:
            raise ValueError(f"all sequences must have the same length, got {lengths[0]} and {lengths[-1]} tokens")
        self.length = lengths[0]
        self._columns = {
            "input_ids": np.stack([sequence.tokens for sequence in sequences]).astype(np.uint32),
            "document_ids": np.stack([sequence.document_ids for sequence in sequences]).astype(np.int32),
            "position_ids": np.stack([sequence.position_ids for sequence in sequences]).astype(np.int32),
        }
        self.longest_document = int(self._columns["position_ids"].max()) + 1

    def __len__(self) -> int:
        return len(self._columns["input_ids"])

    def columns(self, rows: Sequence[int]) -> Columns:
        return {name: column[list(rows)] for name, column in self._columns.items()}

    def identify(self, digest: Any) -> None:
        for name in sorted(self._columns):
            digest.update(self._columns[name].tobytes())


class Generated:
    """``count`` sequences of one full document each, made by number when they are asked for.

    ``make(i)`` gives the S token ids of sequence i and must give the same each time; ``key`` names what it depends on.
    """

    def __init__(self, make: Callable[[int], Sequence[int]], count: int, length: int, key: str) -> None:
        self.make, self.count, self.length, self.longest_document, self.key = make, count, length, length, key

    def __len__(self) -> int:
        return self.count

    def columns(self, rows: Sequence[int]) -> Columns:
        made = [PackedSequence.from_pieces([np.asarray(self.make(int(row)))], self.length) for row in rows]
        return InMemory(made).columns(range(len(made)))

    def identify(self, digest: Any) -> None:
        digest.update(f"{self.key} {self.count} {self.length}".encode())


class Joined:
    """The sequences of several sources, one source after the other. Raises ValueError if their lengths differ."""

    def __init__(self, parts: Sequence[Sequences]) -> None:
        lengths = sorted({part.length for part in parts})
        if len(lengths) != 1:
            raise ValueError(f"all sequences must have the same length, got {lengths} tokens")
        self.parts, self.length = parts, lengths[0]
        self.longest_document = max(part.longest_document for part in parts)
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def columns(self, rows: Sequence[int]) -> Columns:
        found = []
        for row in rows:
            part = bisect.bisect_right(self._ends, row)
            found.append(self.parts[part].columns([row - (self._ends[part - 1] if part else 0)]))
        return {name: np.concatenate([one[name] for one in found]) for name in found[0]}

    def identify(self, digest: Any) -> None:
        for part in self.parts:
            part.identify(digest)


class SequenceStream:
    """Endless batches of packed sequences, where ``batch(step)`` depends on nothing but the seed and the step.

    Each epoch goes through all sequences once, in an order of its own. There is no state: training that resumes at a
    step sees the batches it would have seen. The order of an epoch is one permutation in memory, 8 bytes a sequence.
    """

    def __init__(self, sequences: Sequence[PackedSequence] | Sequences, batch_size: int, seed: int = 0) -> None:
        """``batch_size`` counts the rows of all processes together. Raises ValueError without sequences, with sequences
        of different lengths, or if batch_size < 1 or seed < 0."""
        if batch_size < 1 or seed < 0:
            raise ValueError(f"batch_size must be at least 1 and seed at least 0, got {batch_size} and {seed}")
        self.sequences = cast(Sequences, sequences) if hasattr(sequences, "columns") else InMemory(sequences)
        if not len(self.sequences):
            raise ValueError("a stream needs at least 1 sequence, got 0")
        self.batch_size = batch_size
        self.seed = seed
        self._orders: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        """Number of sequences, the same as batch_size * steps of one epoch."""
        return len(self.sequences)

    @property
    def length(self) -> int:
        """Tokens of each sequence (S)."""
        return self.sequences.length

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document in any sequence."""
        return self.sequences.longest_document

    def fingerprint(self, with_batch_size: bool = True) -> str:
        """A digest of everything ``batch`` depends on: two streams with the same one give the same batches; without the batch
        size, the same rows in the same order."""
        size = f"{self.batch_size} " if with_batch_size else ""
        digest = hashlib.sha256(f"{size}{self.seed} {len(self)} {self.length}".encode())
        self.sequences.identify(digest)
        return digest.hexdigest()[:16]

    def batch(self, step: int, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
        """The rows of one step (from 0) that process ``rank`` of ``world`` trains on: rows rank, rank + world, ... of the
        whole batch.

        int64 tensors [B, S] "input_ids", "document_ids" (-1 on padding) and "position_ids", and [B] "sequence": the place
        of a row among all rows ever served, step * batch_size + row. What is drawn at random for a row should depend on
        that, not on the number of processes. A batch may hold the end of one epoch and the start of the next.

        Raises ValueError if step < 0, rank is not in [0, world), or world does not divide the batch size.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in [0, world), got {rank} of {world}")
        if self.batch_size % world:
            raise ValueError(f"a batch of {self.batch_size} sequences cannot be shared evenly by {world} processes")
        places = range(step * self.batch_size + rank, (step + 1) * self.batch_size, world)
        rows = [int(self._order(place // len(self))[place % len(self)]) for place in places]
        columns = self.sequences.columns(rows)
        batch = {name: torch.from_numpy(column.astype(np.int64)) for name, column in columns.items()}
        return {**batch, "sequence": torch.tensor(places)}

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            for old in sorted(self._orders)[:-1]:  # a batch at the seam of two epochs needs both
                del self._orders[old]
            self._orders[epoch] = np.random.default_rng([self.seed, epoch]).permutation(len(self))
        return self._orders[epoch]

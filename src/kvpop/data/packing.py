"""From documents to sequences of one length: cut, pack, pad."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Shapes: S tokens of a packed sequence.

PADDING = -1
Piece = NDArray[Any]


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
    def from_pieces(
        cls, pieces: Sequence[Piece], length: int, pad_token: int = 0, shared: bool = False
    ) -> PackedSequence:
        """Lay the pieces one after the other and pad to ``length``; ``shared`` makes one document of them, with positions
        that run through. Raises ValueError if they do not fit."""
        lengths = [len(piece) for piece in pieces]
        if sum(lengths) > length:
            raise ValueError(f"pieces of {sum(lengths)} tokens do not fit into a sequence of {length}")
        padding = length - sum(lengths)
        tokens = np.concatenate([*pieces, np.full(padding, pad_token)]).astype(np.int64)
        return cls(tokens, *document_columns([sum(lengths)] if shared else lengths, length))

    @property
    def fill(self) -> float:
        """Share of the sequence that is not padding."""
        return float((self.document_ids != PADDING).mean())


def document_columns(lengths: Sequence[int], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(document ids, positions), each [S], of documents of these lengths and padding up to ``length``."""
    padding = length - sum(lengths)
    ids = np.repeat(np.arange(len(lengths) + 1), [*lengths, padding]).astype(np.int64)
    ids[length - padding :] = PADDING
    positions = np.concatenate([np.arange(n) for n in lengths] + [np.zeros(padding)]).astype(np.int64)
    return ids, positions


def pack(
    pieces: Iterable[Piece],
    length: int,
    pad_token: int = 0,
    *,
    pool: int | None = None,
    shared: bool = False,
    seed: int = 0,
) -> Iterator[PackedSequence]:
    """Pack whole pieces into sequences of exactly ``length`` tokens, best fit decreasing.

    The longest piece goes first; each goes where it leaves the least room, or into a new sequence. On long text cut by
    ``chunks`` more than 99 % of the tokens are not padding. Every token of every piece is in exactly one sequence.

    ``pool``: tokens held at a time (None: all). Whenever so many are there they are packed, the fuller half of the sequences
    is given out, and the pieces of the others stay for the next round. ``shared`` makes one document of each sequence; its
    pieces are shuffled by ``seed``, or the longest would always come first.

    Raises ValueError if a piece is longer than ``length``, the pool is smaller than that, or all pieces together are shorter.
    """
    if pool is not None and pool < length:
        raise ValueError(f"the pool must hold at least one sequence of {length} tokens, got {pool}")
    held: list[Piece] = []
    total = tokens = count = 0
    for piece in pieces:
        if len(piece) > length:
            raise ValueError(f"a piece of {len(piece)} tokens does not fit into a sequence of {length}; cut it first")
        if len(piece):
            held.append(piece)
            total, tokens = total + len(piece), tokens + len(piece)
        if pool is not None and tokens >= pool:
            full, held = fuller_half(best_fit(held, length))
            tokens = sum(map(len, held))
            for contents in full:
                yield _sequence(contents, length, pad_token, shared, seed, count)
                count += 1
    if total < length:
        raise ValueError(f"not enough tokens for one sequence: {total} of {length}")
    for contents in best_fit(held, length):
        yield _sequence(contents, length, pad_token, shared, seed, count)
        count += 1


def _sequence(
    contents: list[Piece], length: int, pad_token: int, shared: bool, seed: int, number: int
) -> PackedSequence:
    return PackedSequence.from_pieces(in_order(contents, shared, seed, number), length, pad_token, shared)


def in_order(contents: list[Piece], shared: bool, seed: int, number: int) -> list[Piece]:
    """The pieces of sequence ``number`` as they stand in it."""
    if not shared:
        return contents
    return [contents[i] for i in np.random.default_rng([seed, number]).permutation(len(contents))]


def best_fit(pieces: Sequence[Piece], length: int) -> list[list[Piece]]:
    """The pieces of every sequence, best fit decreasing. None may be empty or longer than ``length``."""
    bins: list[list[Piece]] = []
    rooms: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for piece in sorted(pieces, key=len, reverse=True):
        at = bisect.bisect_left(rooms, (len(piece), -1))
        if at == len(rooms):
            bins.append([])
            room, index = length, len(bins) - 1
        else:
            room, index = rooms.pop(at)
        bins[index].append(piece)
        if room > len(piece):
            bisect.insort(rooms, (room - len(piece), index))
    return bins


def fuller_half(bins: list[list[Piece]]) -> tuple[list[list[Piece]], list[Piece]]:
    """(the fuller half of the sequences, in order; the pieces of the others, which wait for better company)."""
    fills = np.asarray([sum(map(len, contents)) for contents in bins])
    full = set(np.argsort(-fills, kind="stable")[: (len(bins) + 1) // 2].tolist())
    rest = [piece for i, contents in enumerate(bins) if i not in full for piece in contents]
    return [contents for i, contents in enumerate(bins) if i in full], rest

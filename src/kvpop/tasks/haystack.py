"""Haystacks, and documents of an exact length with facts hidden in them.

Every piece of text is tokenized on its own and the ids are concatenated, never tokenized again. So the length is exact
and the span of an answer is known, whatever the tokenizer merges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvpop.data import Tokenizer

FILLER = (
    " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    " The river runs past the old mill. A cart waits at the gate. Nobody is in a hurry today.",
    " Bread is baked in the morning. The window stays open. It smells of flour and wood.",
    " Rain is expected in the evening. The road to the hills is long. We take the train instead.",
)


@dataclass(frozen=True)
class RetrievalPrompt:
    """A text with facts in it, questions about them, and the right answers, to be scored teacher-forced in one pass.

    ``tokens``: all token ids. ``answers``: for each question the (start, end) span of its answer in ``tokens``, without
    leading white space. ``answer_texts``: the same as text. ``depths``: for each question where its fact stands, from 0
    (start of the haystack) to 1 (end). ``task``: name of the task; ``tasks``: of each answer, where a prompt mixes several.
    """

    tokens: list[int]
    answers: list[tuple[int, int]]
    answer_texts: list[str]
    depths: list[float]
    task: str
    tasks: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """Total number of tokens."""
        return len(self.tokens)

    @property
    def depth(self) -> float:
        """Mean depth of the facts asked for."""
        return sum(self.depths) / len(self.depths)


@dataclass
class Piece:
    """Token ids with the spans of the answers among them."""

    tokens: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)

    def add(self, tokens: Sequence[int]) -> Piece:
        self.tokens.extend(tokens)
        return self

    def add_answer(self, tokenizer: Tokenizer, answer: str) -> Piece:
        """Append " answer". A leading token that is only the space is not part of the span: it holds nothing to
        retrieve."""
        tokens, space = encode(tokenizer, " " + answer), encode(tokenizer, " ")
        skip = len(space) if tokens[: len(space)] == space and len(tokens) > len(space) else 0
        self.answers.append((len(self.tokens) + skip, len(self.tokens) + len(tokens)))
        return self.add(tokens)

    def add_piece(self, other: Piece) -> Piece:
        at = len(self.tokens)
        self.answers.extend((start + at, end + at) for start, end in other.answers)
        return self.add(other.tokens)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a piece of text in the middle of a document."""
    return list(tokenizer.encode(text, add_special_tokens=False))


def opening(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before any text: a BOS for some models, nothing for others."""
    return list(tokenizer.encode(""))


def haystack(
    tokenizer: Tokenizer, haystack_tokens: Sequence[int] | None, count: int, rng: np.random.Generator
) -> list[int]:
    """``count`` tokens in a row from a random place of ``haystack_tokens``; None stands for filler sentences.

    Raises ValueError if ``haystack_tokens`` is shorter than ``count``.
    """
    if haystack_tokens is None:
        sentences = [encode(tokenizer, sentence) for sentence in FILLER]
        filler: list[int] = []
        while len(filler) < count:
            filler += sentences[rng.integers(len(sentences))]
        return filler[:count]
    if len(haystack_tokens) < count:
        raise ValueError(f"the haystack has {len(haystack_tokens)} tokens, {count} are needed")
    start = int(rng.integers(len(haystack_tokens) - count + 1))
    return [int(token) for token in haystack_tokens[start : start + count]]


def assemble(
    tokenizer: Tokenizer,
    haystack_tokens: Sequence[int] | None,
    length: int,
    before: Piece,
    placed: Sequence[tuple[float, Piece]],
    after: Piece,
    rng: np.random.Generator,
) -> Piece:
    """A document of exactly ``length`` tokens: ``before``, a haystack with each piece at its depth in [0, 1],
    ``after``.

    Answer spans are in order of appearance. Raises ValueError if the pieces leave no room for a haystack or a depth
    lies outside [0, 1].
    """
    for depth, _ in placed:
        if not 0 <= depth <= 1:
            raise ValueError(f"depth must lie in [0, 1], got {depth}")
    needed = len(before.tokens) + sum(len(piece.tokens) for _, piece in placed) + len(after.tokens)
    if length <= needed:
        raise ValueError(f"length must be above the {needed} tokens of facts and questions, got {length}")
    hay = haystack(tokenizer, haystack_tokens, length - needed, rng)
    document, done = Piece().add_piece(before), 0
    for depth, piece in sorted(placed, key=lambda entry: entry[0]):
        at = round(depth * len(hay))
        document.add(hay[done:at]).add_piece(piece)
        done = at
    return document.add(hay[done:]).add_piece(after)

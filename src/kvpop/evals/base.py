"""What a task is: where its items come from, what the model is asked, and how an answer is graded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Message = dict[str, str]
"""{"role": ..., "content": ...}."""

Outcome = Literal["right", "wrong", "no answer", "timeout", "refused"]
"""How a grade came about: an answer that is right or is not; none that could be found; a grader that had to be killed; code
that was not run because nobody allowed it."""


@dataclass(frozen=True)
class Item:
    """One question. ``prompt``: a user's text or messages, put into the model's chat template, or token ids, taken as they are.

    ``answer`` is what graders compare with, as JSON values; it never reaches the model. ``fields`` say more about the item
    (year, subject, depth, length), for breaking results down.
    """

    id: str
    prompt: str | Sequence[Message] | Sequence[int]
    answer: Any
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Grade:
    """``score`` in [0, 1] (1: right), the ``answer`` that was found in the text, if any, and what else there is to say."""

    score: float
    outcome: Outcome
    answer: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Decoding:
    """How a task is usually sampled, and how many times an item. Temperature 0 is greedy: one rollout says it all."""

    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 0
    max_new_tokens: int = 32768
    rollouts: int = 16


@dataclass(frozen=True)
class Source:
    """Where items are: a hub data set at a pinned revision, or a local file in its place.

    ``sha256`` is of the file's bytes, ``rows`` the number of its rows; either is verified where it is not None. ``licence``
    and ``url`` are for whoever reads a report.
    """

    hub: str
    revision: str
    file: str
    licence: str
    url: str
    rows: int | None = None
    sha256: str | None = None


class Task(ABC):
    """A benchmark by name. One file each in ``evals``; ``evals.TASKS`` lists them."""

    name: str
    """As on the command line: aime-2024."""
    title: str
    """As in a table: AIME 2024."""
    citation: str
    decoding: Decoding = Decoding()
    source: Source | None = None
    """None: items are made, not read."""
    size: int | None
    """The number of items that are expected; another number is an error. None: not known before the file is read."""

    @abstractmethod
    def items(self, tokenizer: Any, file: str | None = None) -> list[Item]:
        """All items, in a fixed order, ids unique. ``file``: a local file in place of the hub's. ``tokenizer`` is that of the
        model, for tasks whose prompts have a length in tokens.

        Raises ValueError for a file with another checksum, number of rows or format.
        """

    @abstractmethod
    def grade(self, item: Item, text: str) -> Grade:
        """Grade what the model wrote (without the prompt). Never hangs and never raises over what the text says."""

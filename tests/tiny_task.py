"""A task of a few words for tests of what is done with tasks; it loads nothing heavy, for processes that import it."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass, field
from pathlib import Path

from kvpop.evals.base import Decoding, Grade, Item, Source, Task


@dataclass
class Words(Task):
    """Right is an answer in which the item's word occurs. ``slow``: the item whose grader is "killed"."""

    name: str = "words"
    title: str = "Words"
    citation: str = "Nobody, 2020."
    size: int = 5
    decoding: Decoding = field(default_factory=lambda: Decoding(1.0, 0.9, 0, 24, 3))
    source: Source | None = None
    slow: str = ""

    def items(self, tokenizer, file=None):
        words = Path(file).read_text().split() if file else [f"w{20 + i}" for i in range(self.size)]
        prompts = {0: f"{words[0]} w5", 1: [{"role": "user", "content": words[1]}], 2: [7, 8, 9]}
        return [Item(f"q{i}", prompts.get(i, word), word if i else "w4", {"place": i}) for i, word in enumerate(words)]

    def grade(self, item, text):
        if item.id == self.slow:
            return Grade(0.0, "timeout", note="killed")
        if not text:
            return Grade(0.0, "no answer")
        right = item.answer in text.split()
        return Grade(float(right), "right" if right else "wrong", text.split()[-1])


@dataclass
class Code(Words):
    name: str = "code"
    allow_code: bool = False

    def grade(self, item, text):
        return Grade(1.0, "right") if self.allow_code else Grade(0.0, "refused")


class Broken(Words):
    def grade(self, item, text):
        raise RuntimeError("cannot")


class Dying(Words):
    """Ends its process where that is not the one that made it."""

    def grade(self, item, text):
        if item.id == "q1" and multiprocessing.parent_process() is not None:
            os._exit(1)
        return super().grade(item, text)

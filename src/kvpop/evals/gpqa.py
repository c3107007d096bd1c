"""GPQA Diamond: 198 questions of graduate level in biology, physics and chemistry, four options each."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from kvpop.evals.base import Decoding, Grade, Item, Source, Task
from kvpop.evals.grading.choice import last_choice
from kvpop.evals.sources import UNPINNED, read_items, value

INSTRUCTION = "Reason step by step, and put the letter of your answer, A, B, C or D, in \\boxed{}."
LETTERS = "ABCD"


class GpqaDiamond(Task):
    """The options of a question are in an order that depends on the task and the question alone: every model, and every
    rollout, sees the same."""

    name = "gpqa-diamond"
    title = "GPQA Diamond"
    citation = "Rein et al., GPQA: A Graduate-Level Google-Proof Q&A Benchmark, 2023; arXiv:2311.12022"
    decoding = Decoding(rollouts=8)
    size = 198
    source: Source | None = Source(
        "Idavidrein/gpqa",
        UNPINNED,
        "gpqa_diamond.csv",
        "CC BY 4.0; its authors ask that no question be shown in plain text online",
        "https://huggingface.co/datasets/Idavidrein/gpqa",
        rows=198,
    )

    def items(self, tokenizer: Any, file: str | None = None) -> list[Item]:
        """Fields of a row: Question, Correct Answer, Incorrect Answer 1 to 3, and Record ID, High-level domain and Subdomain
        if it has them."""
        assert self.source is not None
        found = read_items(self.source, file)
        items = []
        for number, where, row in found.numbered():
            question = str(value(row, ("Question",), where)).strip()
            names = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
            options = [str(value(row, (name,), where)).strip() for name in names]
            seed = hashlib.sha256(f"{self.name} {question}".encode()).digest()[:8]
            order = np.random.default_rng(int.from_bytes(seed)).permutation(len(options)).tolist()
            listed = "\n".join(f"({letter}) {options[i]}" for letter, i in zip(LETTERS, order))
            fields = {
                ours: str(row[theirs]).strip()
                for ours, theirs in (
                    ("domain", "High-level domain"),
                    ("subdomain", "Subdomain"),
                    ("record", "Record ID"),
                )
                if row.get(theirs)
            }
            items.append(
                Item(
                    f"{self.name}/{number}",
                    f"{question}\n\n{listed}\n\n{INSTRUCTION}",
                    LETTERS[order.index(0)],
                    {"row": number, **fields},
                )
            )
        return items

    def grade(self, item: Item, text: str) -> Grade:
        answer = last_choice(text, LETTERS)
        if answer is None:
            return Grade(0.0, "no answer", note="no single letter")
        return Grade(1.0, "right", answer) if answer == item.answer else Grade(0.0, "wrong", answer)

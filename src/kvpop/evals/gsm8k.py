"""GSM8K: word problems of grade school, the 1319 of the test set. Answers are integers."""

from __future__ import annotations

import re
from typing import Any

from kvpop.evals.base import Decoding, Grade, Item, Source, Task
from kvpop.evals.grading.maths import grade_integer, integer, last_boxed
from kvpop.evals.grading.text import final_part
from kvpop.evals.sources import UNPINNED, read_items, value

INSTRUCTION = "Reason step by step, and put your final answer, a number without its unit, in \\boxed{}."
MARK = "####"
"""Stands before the answer in the data, and in the answers of models that were trained on it."""
UNITS = re.compile(r"^\\?\$|\\?%$|\\?\$$")


class Gsm8k(Task):
    """The last box counts; in a text without one, what follows the last "####" on its line."""

    name = "gsm8k"
    title = "GSM8K"
    citation = "Cobbe et al., Training Verifiers to Solve Math Word Problems, 2021; arXiv:2110.14168"
    decoding = Decoding(temperature=0.0, top_p=1.0, max_new_tokens=4096, rollouts=1)
    size = 1319
    source: Source | None = Source(
        "openai/gsm8k",
        UNPINNED,
        "main/test-00000-of-00001.parquet",
        "MIT",
        "https://huggingface.co/datasets/openai/gsm8k",
        rows=1319,
    )

    def items(self, tokenizer: Any, file: str | None = None) -> list[Item]:
        """Fields of a row: question, and answer, whose last line is "#### 42"."""
        assert self.source is not None
        found = read_items(self.source, file)
        items = []
        for number, where, row in found.numbered():
            question = str(value(row, ("question",), where)).strip()
            solution = str(value(row, ("answer",), where))
            gold = integer(solution.rpartition(MARK)[2])
            if gold is None:
                raise ValueError(f"{where}: the answer must end in {MARK} and an integer, got {solution[-40:]!r}")
            items.append(Item(f"{self.name}/{number}", f"{question}\n\n{INSTRUCTION}", gold, {"row": number}))
        return items

    def grade(self, item: Item, text: str) -> Grade:
        part = final_part(text)
        answer = last_boxed(part)
        if answer is None and MARK in part:
            answer = (part.rpartition(MARK)[2].strip().splitlines() or [""])[0]
        if not answer:
            return Grade(0.0, "no answer", note=f"neither a box nor {MARK}")
        return grade_integer(f"\\boxed{{{UNITS.sub('', answer.strip())}}}", item.answer)

"""MATH-500: 500 problems of the test set of MATH, over seven subjects and five levels."""

from __future__ import annotations

from typing import Any

from kvpop.evals.base import Decoding, Grade, Item, Source, Task
from kvpop.evals.grading.maths import grade_expression, need_math_verify
from kvpop.evals.hmmt import INSTRUCTION
from kvpop.evals.sources import UNPINNED, read_items, value


class Math500(Task):
    """Answers are expressions; ``fields`` have the subject and the level, 1 to 5."""

    name = "math-500"
    title = "MATH-500"
    citation = (
        "Hendrycks et al., Measuring Mathematical Problem Solving With the MATH Dataset, 2021; arXiv:2103.03874. "
        "Selection: Lightman et al., Let's Verify Step by Step, 2023; arXiv:2305.20050"
    )
    decoding = Decoding(rollouts=4)
    size = 500
    source: Source | None = Source(
        "HuggingFaceH4/MATH-500",
        UNPINNED,
        "test.jsonl",
        "none stated there; MATH is under the MIT licence",
        "https://huggingface.co/datasets/HuggingFaceH4/MATH-500",
        rows=500,
    )

    def items(self, tokenizer: Any, file: str | None = None) -> list[Item]:
        """Fields of a row: problem, answer, and subject, level, unique_id if it has them. Raises ImportError without
        math-verify."""
        assert self.source is not None
        need_math_verify()
        found = read_items(self.source, file)
        items = []
        for number, where, row in found.numbered():
            problem = str(value(row, ("problem",), where)).strip()
            gold = str(value(row, ("answer",), where)).strip()
            fields = {name: row[name] for name in ("subject", "level", "unique_id") if row.get(name) is not None}
            items.append(Item(f"{self.name}/{number}", f"{problem}\n\n{INSTRUCTION}", gold, {"row": number, **fields}))
        return items

    def grade(self, item: Item, text: str) -> Grade:
        return grade_expression(text, item.answer)

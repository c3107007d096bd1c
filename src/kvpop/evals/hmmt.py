"""HMMT: the Harvard-MIT Mathematics Tournament of 2025. Answers are expressions."""

from __future__ import annotations

from typing import Any

from kvpop.evals.base import Decoding, Grade, Item, Source, Task
from kvpop.evals.grading.maths import grade_expression, need_math_verify
from kvpop.evals.sources import UNPINNED, read_items, value

INSTRUCTION = "Reason step by step, and put your final answer in \\boxed{}."


class Hmmt(Task):
    """The 30 problems of one of the two tournaments of 2025, as MathArena wrote them down."""

    citation = (
        "Balunovic et al., MathArena: Evaluating LLMs on Uncontaminated Math Competitions, 2025; arXiv:2505.23281"
    )
    decoding = Decoding(rollouts=16)
    size = 30

    def __init__(self, month: str, short: str) -> None:
        hub = f"MathArena/hmmt_{short}_2025"
        self.name, self.title = f"hmmt-{short}-2025", f"HMMT {month} 2025"
        self.source = Source(
            hub,
            UNPINNED,
            "data/train-00000-of-00001.parquet",
            "CC BY-NC-SA 4.0",
            f"https://huggingface.co/datasets/{hub}",
            rows=30,
        )

    def items(self, tokenizer: Any, file: str | None = None) -> list[Item]:
        """Fields of a row: problem, answer, and problem_type (a list) if it has one. Raises ImportError without math-verify."""
        assert self.source is not None
        need_math_verify()
        found = read_items(self.source, file)
        items = []
        for number, where, row in found.numbered():
            problem = str(value(row, ("problem", "question"), where)).strip()
            gold = str(value(row, ("answer",), where)).strip()
            kinds = row.get("problem_type") or []
            fields = {"row": number, "subject": kinds if isinstance(kinds, str) else ", ".join(kinds)}
            items.append(Item(f"{self.name}/{number}", f"{problem}\n\n{INSTRUCTION}", gold, fields))
        return items

    def grade(self, item: Item, text: str) -> Grade:
        return grade_expression(text, item.answer)


def hmmt_february() -> Hmmt:
    return Hmmt("February", "feb")


def hmmt_november() -> Hmmt:
    return Hmmt("November", "nov")

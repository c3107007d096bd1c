"""AIME: the American Invitational Mathematics Examination. Answers are integers from 0 to 999."""

from __future__ import annotations

from typing import Any

from kvpop.evals.base import Decoding, Grade, Item, Source, Task
from kvpop.evals.grading.maths import grade_integer
from kvpop.evals.sources import UNPINNED, read_items, value

INSTRUCTION = "Reason step by step, and put your final answer, an integer from 0 to 999, in \\boxed{}."


class Aime(Task):
    """The 30 problems of both papers of a year."""

    citation = "Mathematical Association of America, American Invitational Mathematics Examination (AIME)"
    decoding = Decoding(rollouts=16)
    size = 30

    def __init__(self, year: int, hub: str, file: str, licence: str) -> None:
        self.name, self.title, self.year = f"aime-{year}", f"AIME {year}", year
        self.source = Source(hub, UNPINNED, file, licence, f"https://huggingface.co/datasets/{hub}", rows=30)

    def items(self, tokenizer: Any, file: str | None = None) -> list[Item]:
        """Fields of a row: problem, answer, and an id or a number."""
        assert self.source is not None
        found = read_items(self.source, file)
        items = []
        for number, where, row in found.numbered():
            problem = str(value(row, ("problem", "Problem", "question"), where)).strip()
            answer = value(row, ("answer", "Answer"), where)
            try:
                gold = int(str(answer).strip())
            except ValueError as error:
                raise ValueError(f"{where}: the answer must be an integer, got {answer!r}") from error
            if not 0 <= gold <= 999:
                raise ValueError(f"{where}: the answer must lie in [0, 999], got {gold}")
            items.append(
                Item(f"{self.name}/{number}", f"{problem}\n\n{INSTRUCTION}", gold, {"year": self.year, "row": number})
            )
        return items

    def grade(self, item: Item, text: str) -> Grade:
        return grade_integer(text, item.answer, 0, 999)


def aime_2024() -> Aime:
    return Aime(
        2024, "HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet", "none stated; problems of the MAA"
    )


def aime_2025() -> Aime:
    return Aime(2025, "MathArena/aime_2025", "data/train-00000-of-00001.parquet", "CC BY-NC-SA 4.0")

"""HumanEval: 164 functions to write from their signature and docstring, with a test each."""

from __future__ import annotations

from typing import Any

from kvpop.evals.base import Decoding, Grade, Item, Source, Task
from kvpop.evals.grading.code import CodeGrader, defines, last_code_block
from kvpop.evals.grading.sandbox import Limits
from kvpop.evals.grading.text import final_part
from kvpop.evals.sources import UNPINNED, read_items, value

INSTRUCTION = "Complete this Python function. Put all of it, with its imports, in one block that begins with ```python."
LIMITS = Limits(seconds=10.0)


class HumanEval(Task):
    """An answer is a block of code that defines the function, or text that goes on where the prompt ends, as a base model
    writes it. Nothing runs unless ``allow_code``."""

    name = "humaneval"
    title = "HumanEval"
    citation = "Chen et al., Evaluating Large Language Models Trained on Code, 2021; arXiv:2107.03374"
    decoding = Decoding(temperature=0.0, top_p=1.0, max_new_tokens=4096, rollouts=1)
    size = 164
    source: Source | None = Source(
        "openai/openai_humaneval",
        UNPINNED,
        "openai_humaneval/test-00000-of-00001.parquet",
        "MIT",
        "https://huggingface.co/datasets/openai/openai_humaneval",
        rows=164,
    )

    def __init__(self) -> None:
        self.allow_code = False
        self.grader = CodeGrader(limits=LIMITS)

    def items(self, tokenizer: Any, file: str | None = None) -> list[Item]:
        """Fields of a row: task_id, prompt, test, entry_point."""
        assert self.source is not None
        found = read_items(self.source, file)
        items = []
        for number, where, row in found.numbered():
            answer = {ours: str(value(row, (ours,), where)) for ours in ("prompt", "test", "entry_point")}
            items.append(
                Item(
                    f"{self.name}/{value(row, ('task_id',), where)}",
                    f"{INSTRUCTION}\n\n```python\n{answer['prompt'].strip()}\n```",
                    answer,
                    {"row": number},
                )
            )
        return items

    def grade(self, item: Item, text: str) -> Grade:
        prompt, entry = item.answer["prompt"], item.answer["entry_point"]
        code = last_code_block(text)
        if code is None:
            part = final_part(text)
            if defines(part, entry):
                code = part
            elif _is_body(part):
                code = _first_lines(part)
        if code is None:
            return Grade(0.0, "no answer", note="no block of Python")
        if _is_body(code) and not defines(code, entry):
            code = f"{prompt.rstrip()}\n{code}"
        grader = CodeGrader(self.allow_code, self.grader.limits, self.grader.total, self.grader.isolation)
        return grader.check(prompt, code, item.answer["test"], entry)


def _is_body(text: str) -> bool:
    return text.lstrip("\n")[:1] in (" ", "\t") and bool(text.strip())


def _first_lines(text: str) -> str:
    """The indented lines that ``text`` begins with: what follows them is no longer the function."""
    lines = []
    for line in text.splitlines():
        if line.strip() and line[0] not in " \t":
            break
        lines.append(line)
    return "\n".join(lines) + "\n"

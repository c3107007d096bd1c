"""LiveCodeBench v6: problems of programming contests, with tests that run."""

from __future__ import annotations

import base64
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from datetime import date
from typing import Any

from kvpop.evals.base import Decoding, Grade, Item, Source, Task
from kvpop.evals.grading.code import CodeGrader, Test, last_code_block
from kvpop.evals.grading.sandbox import Limits
from kvpop.evals.sources import UNPINNED, read_items, value

FOR_STDIN = (
    "Write a Python program that reads from standard input and writes to standard output. Put the whole program in one "
    "block that begins with ```python."
)
FOR_FUNCTION = (
    "Complete this Python code, keeping its names. Put all of it in one block that begins with ```python.\n\n"
)
LIMITS = Limits(seconds=6.0, memory=4096)
"""Six seconds a test, as its authors have it."""


TESTS = ("public_test_cases", "private_test_cases")


class LiveCodeBench(Task):
    """The problems that release v6 added to those before it: 175, of contests from January to April 2025.

    ``window``: of these only the contests on or after the first date and before the second, either may be None. ``size`` is
    then known when the file has been read. Nothing runs unless ``allow_code``.
    """

    citation = "Jain et al., LiveCodeBench, 2024; arXiv:2403.07974"
    decoding = Decoding(rollouts=4)
    source: Source | None = Source(
        "livecodebench/code_generation_lite",
        UNPINNED,
        "test6.jsonl",
        "CC",
        "https://huggingface.co/datasets/livecodebench/code_generation_lite",
        rows=175,
    )

    def __init__(self, window: tuple[date | None, date | None] = (None, None)) -> None:
        first, end = window
        if first is not None and end is not None and first >= end:
            raise ValueError(f"a window's first date must be before its end, got {first} and {end}")
        self.window, self.allow_code = window, False
        self.name, self.title, self.size = "livecodebench-v6", "LiveCodeBench v6", 175
        if window != (None, None):
            self.name += f":{first or ''}:{end or ''}"
            self.title += f" ({first or 'begin'} to {end or 'end'})"
            self.size = None
        self.grader = CodeGrader(limits=LIMITS)

    def items(self, tokenizer: Any, file: str | None = None) -> list[Item]:
        """Fields of a row: question_id, question_content, contest_date, public_test_cases, private_test_cases, and
        starter_code, metadata, platform, difficulty if it has them."""
        assert self.source is not None
        found = read_items(self.source, file)
        items = []
        for number, where, row in found.numbered():
            day = date.fromisoformat(str(value(row, ("contest_date",), where))[:10])
            if not (self.window[0] or day) <= day or (self.window[1] is not None and day >= self.window[1]):
                continue
            question = str(value(row, ("question_content",), where)).strip()
            starter = str(row.get("starter_code") or "").rstrip()
            wanted = f"{FOR_FUNCTION}```python\n{starter}\n```" if starter else FOR_STDIN
            _tests(row, where)  # they can be read; unpacked, all of them would take gigabytes
            fields = {name: str(row[name]) for name in ("platform", "difficulty") if row.get(name)}
            items.append(
                Item(
                    f"{self.name.split(':')[0]}/{value(row, ('question_id',), where)}",
                    f"{question}\n\n{wanted}",
                    {"entry": _entry(row, where) if starter else None, **{name: row.get(name) for name in TESTS}},
                    {"row": number, "contest_date": day.isoformat(), **fields},
                )
            )
        if not items:
            raise ValueError(f"{found.path}: no contest lies in the window {self.window[0]} to {self.window[1]}")
        self.size = len(items)
        return items

    def grade(self, item: Item, text: str) -> Grade:
        code = last_code_block(text)
        if code is None:
            return Grade(0.0, "no answer", note="no block of Python")
        grader = CodeGrader(self.allow_code, self.grader.limits, self.grader.total, self.grader.isolation)
        entry, tests = item.answer["entry"], [Test(*test) for test in _tests(item.answer, item.id)]
        if entry is None:
            return grader.stdin_tests(code, tests)
        return grader.function_tests(code, entry, tests)


def windowed(dates: str) -> LiveCodeBench:
    """The task of "2025-02-01:2025-05-01"; either date may be left out."""
    parts = dates.split(":")
    try:
        first, end = (date.fromisoformat(part) if part else None for part in parts)
    except ValueError as error:
        raise ValueError(
            f"a window is written livecodebench-v6:2025-02-01:2025-05-01 (the second date excluded), got {dates!r}"
        ) from error
    return LiveCodeBench((first, end))


def _entry(row: dict[str, Any], where: str) -> str:
    metadata = row.get("metadata") or "{}"
    metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
    name = metadata.get("func_name")
    if not name:
        raise ValueError(f"{where}: starter code, but no func_name in the metadata, only {sorted(metadata)}")
    return f"Solution.{name}" if "class Solution" in row["starter_code"] else str(name)


def _tests(row: Mapping[str, Any], where: str) -> list[list[Any]]:
    """[input, output] of all tests: texts, or arguments and a value."""
    tests = []
    for name in TESTS:
        for case in _cases(row.get(name), f"{where}, {name}"):
            given, wanted, kind = (value(case, (key,), f"{where}, {name}") for key in ("input", "output", "testtype"))
            if kind == "functional":
                tests.append([[json.loads(line) for line in given.splitlines() if line.strip()], json.loads(wanted)])
            elif kind == "stdin":
                tests.append([given, wanted])
            else:
                raise ValueError(f"{where}, {name}: a test is of the type stdin or functional, got {kind!r}")
    if not tests:
        raise ValueError(f"{where}: no tests")
    return tests


def _cases(held: Any, where: str) -> list[dict[str, Any]]:
    """A list of tests as JSON, or the same pickled, compressed and in base 64."""
    if not held:
        return []
    try:
        return json.loads(held) if isinstance(held, str) else list(held)
    except json.JSONDecodeError:
        pass
    try:
        text = _OnlyData(io.BytesIO(zlib.decompress(base64.b64decode(held)))).load()
        return json.loads(text)
    except (ValueError, zlib.error, pickle.UnpicklingError, EOFError, TypeError) as error:
        raise ValueError(f"{where}: neither JSON nor packed JSON ({error})") from error


class _OnlyData(pickle.Unpickler):
    """A pickle can name any function to call; one that holds a text names none."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, a text needs no such thing")

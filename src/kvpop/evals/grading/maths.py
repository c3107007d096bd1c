"""Mathematical answers: the last box of a text, integers, and equality of expressions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Literal

from kvpop.evals.base import Grade
from kvpop.evals.grading.killable import Pool, TimedOut
from kvpop.evals.grading.text import final_part

BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
BRACE = re.compile(r"\\.|[{}]", re.S)
ALONE = re.compile(r"-?\w+")
SECONDS = 10.0
"""How long one comparison may take."""
LONGEST = 2000
"""Characters of an answer that may still be compared as an expression. A longer one is no answer to any of these tasks."""


def last_boxed(text: str) -> str | None:
    """What the last complete \\boxed{...} or \\fbox{...} of ``text`` holds, or None. A box in a box is taken off."""
    ends = _closing_braces(text)
    found, at = None, 0
    while match := BOX.search(text, at):
        span = _argument(text, match.end(), ends)
        at = match.end() if span is None else span[1] + (text[span[1] : span[1] + 1] == "}")
        found = span or found
    if found is None:
        return None
    start, end = found
    while True:
        while start < end and text[start].isspace():
            start += 1
        while start < end and text[end - 1].isspace():
            end -= 1
        inner = BOX.match(text, start, end)
        span = _argument(text, inner.end(), ends) if inner else None
        if span is None or span[1] + (text[span[0] - 1] == "{") != end:
            return BOX.sub("", text[start:end])
        start, end = span


def _closing_braces(text: str) -> dict[int, int]:
    """Where each brace that opens is closed. One pass: a model in a loop may write thousands that are not."""
    ends: dict[int, int] = {}
    opened: list[int] = []
    for match in BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            ends[opened.pop()] = match.start()
    return ends


def _argument(text: str, at: int, ends: Mapping[int, int]) -> tuple[int, int] | None:
    """The (start, end) of what a command at ``at`` is given: {...}, or what stands there alone, as in \\boxed 7."""
    if text.startswith("{", at):
        return (at + 1, ends[at]) if at in ends else None
    match = ALONE.match(text, at)
    return match.span() if match else None


_SPACES = re.compile(
    r"\\[,;:!> ]|\\quad|\\qquad|~|\s|\\displaystyle(?![A-Za-z])|\\left(?![A-Za-z])|\\right(?![A-Za-z])"
)
_STYLE = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mathsf|mbox|bm)\{([^{}]*)\}")


def plain(text: str) -> str:
    """``text`` without what changes nothing: dollars, white space, sizes of brackets and fractions, fonts, a full stop at
    the end. Equal plain texts are equal answers."""
    text = text.strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
            text = text[len(opening) : len(text) - len(closing)].strip()
    text = _STYLE.sub(r"\1", text)
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("{,}", ",").replace("−", "-")
    return _SPACES.sub("", text).rstrip(".")


def integer(text: str) -> int | None:
    """The integer that ``text`` writes, or None.

    Leading zeros, commas between thousands, LaTeX spaces and fonts, a zero fraction ("12.0"), a degree sign, and one name
    before it ("n = 12") are let through; anything else is not an integer.
    """
    text = re.sub(r"\^\{?\\circ\}?$|°$", "", plain(text))
    if text.count("=") == 1:
        text = text.partition("=")[2]
    while len(text) > 2 and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    if not re.fullmatch(r"[+-]?(?:\d{1,60}|\d{1,3}(?:,\d{3}){1,20})(?:\.0{1,20})?", text, re.A):
        return None
    return int(text.split(".")[0].replace(",", ""))


def grade_integer(text: str, gold: int, low: int | None = None, high: int | None = None) -> Grade:
    """Whether the last box of the final part of ``text`` holds the integer ``gold``. What is not an integer in [low, high] is
    wrong, with a note that says so."""
    answer = last_boxed(final_part(text))
    if not answer:
        return Grade(0.0, "no answer", note="nothing in a box")
    value = integer(answer)
    if value is None:
        return Grade(0.0, "wrong", answer, "not an integer")
    if (low is not None and value < low) or (high is not None and value > high):
        return Grade(0.0, "wrong", answer, f"{value} lies outside [{low}, {high}]")
    return Grade(1.0, "right", answer) if value == gold else Grade(0.0, "wrong", answer)


def need_math_verify() -> None:
    """Raises ImportError, saying what to install, unless math-verify is there."""
    if find_spec("math_verify") is None:
        raise ImportError("comparing mathematical expressions needs math-verify: pip install 'kvpop[evals]'")


@cache
def pool() -> Pool:
    """The workers that all graders of this process share."""
    return Pool("equal.py")


def equal(answer: str, gold: str, seconds: float = SECONDS) -> Literal["equal", "different", "timeout"]:
    """Whether two expressions are equal: as plain texts or integers, else by math-verify in a process that is killed after
    ``seconds``. Raises ImportError if that is needed and not there."""
    if plain(answer) == plain(gold):
        return "equal"
    numbers = integer(answer), integer(gold)
    if numbers[0] is not None and numbers[1] is not None:
        return "equal" if numbers[0] == numbers[1] else "different"
    if not answer.strip() or len(answer) > LONGEST:
        return "different"
    need_math_verify()
    try:
        reply = pool().ask({"gold": gold, "answer": answer}, seconds)
    except TimedOut:
        return "timeout"
    return "equal" if reply.get("equal") is True else "different"


def grade_expression(text: str, gold: str, seconds: float = SECONDS) -> Grade:
    """Whether the last box of the final part of ``text`` holds an expression equal to ``gold``. Raises ImportError without
    math-verify."""
    answer = last_boxed(final_part(text))
    if not answer:
        return Grade(0.0, "no answer", note="nothing in a box")
    verdict = equal(answer, gold, seconds)
    if verdict == "timeout":
        return Grade(0.0, "timeout", answer, f"comparing it took more than {seconds:g} s")
    return Grade(1.0, "right", answer) if verdict == "equal" else Grade(0.0, "wrong", answer)

"""The letter of a multiple choice in a model's text."""

from __future__ import annotations

import re

from kvpop.evals.grading.maths import last_boxed
from kvpop.evals.grading.text import final_part

_WRAP = r"(?:[\s*_`$\"'({\[]|\\\(|\\text\w*\{|\\mathrm\{|\\mathbf\{|\\boxed\{|\\fbox\{){0,12}"
_NOT_MORE = r"(?![A-Za-z0-9'’])"


def last_choice(text: str, letters: str = "ABCD") -> str | None:
    """The last letter that the final part of ``text`` gives as its answer, or None if there is none or it names several.

    An answer is \\boxed{C}, "Answer: C", "the answer is (C)", or a last line that is nothing but a letter. Capitals only: an
    "a" is a word. "A or B" is no answer.
    """
    part = final_part(text)
    one = f"[{letters}]"
    found: list[tuple[int, str]] = []
    boxed = last_boxed(part)
    if boxed is not None:
        # A box that holds something else is an answer too, one that is none of the letters.
        boxed = boxed.strip()[:200]
        match = re.fullmatch(rf"{_WRAP}({one}){_NOT_MORE}(?:[\s*_`$)}}\].:,]|\\\)).*|{_WRAP}({one})", boxed, re.S)
        letter = (match.group(1) or match.group(2)) if match else ""
        if letter and _several(boxed[boxed.index(letter) + 1 :], letters):
            letter = ""
        found.append((max(part.rfind("\\boxed"), part.rfind("\\fbox")), letter))
    said = re.compile(
        rf"\b(?:answer|choice|option)\b[\s*_`]{{0,8}}(?:is|:|=|would be|must be)[\s*_`:]{{0,8}}"
        rf"(?:(?:the\s)?(?:option|choice|letter)\s)?{_WRAP}({one}){_NOT_MORE}",
        re.I,
    )
    for match in said.finditer(part):
        letter, rest = match.group(1), part[match.end() : match.end() + 60]
        if letter not in letters:  # the search ignores case
            continue
        if letter == "A" and re.match(r" [a-z]", rest) and not re.match(r" (?:because|since|as|is|which|with)\b", rest):
            continue  # "the answer is A good deal of ..."
        found.append((match.start(), "" if _several(rest, letters) else letter))
    lines = part.rstrip().splitlines()
    if lines and len(lines[-1]) < 40 and (match := re.fullmatch(rf"{_WRAP}({one})[\s*_`$)}}\].]*", lines[-1].strip())):
        found.append((len(part), match.group(1)))
    return (max(found)[1] or None) if found else None


def _several(rest: str, letters: str) -> bool:
    """Whether another letter follows as an alternative: ") or (B)", ", C", "/D"."""
    return bool(re.match(rf"[)\s*_`}}\].]*(?:or|and|,|/|&)\s*(?:or\s+|and\s+)?{_WRAP}[{letters}]{_NOT_MORE}", rest))

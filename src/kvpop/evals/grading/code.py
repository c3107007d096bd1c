"""Code that a model wrote: finding it in an answer, and running it against tests.

A test is passed by what comes out, not by what the program says about itself. Expected outputs never reach the process that
runs the program: it is given inputs, what it prints or returns is compared outside, and a ``check`` function runs in a second
sandbox that talks to the first in plain data.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

from kvpop.evals.base import Grade
from kvpop.evals.grading.sandbox import INSIDE, Isolation, Limits, Sandbox, pick
from kvpop.evals.grading.text import final_part

LONGEST = 1 << 20
"""Characters of code that are run. Nobody writes more."""
PYTHON = ("python", "python3", "py", "")
PRELUDE = """\
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
"""What contest sites import before a solution, so that solutions leave it out."""
FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n]*\n(.*?)(?:^[ \t]*\1[ \t]*$|\Z)", re.M | re.S)


def last_code_block(text: str) -> str | None:
    """The last fenced block of Python, or of no language, in the final part of an answer; None if there is none.

    The last one need not end: some models stop there, and what was cut off passes no test.
    """
    found = None
    for match in FENCE.finditer(final_part(text)):
        if match.group(2).lower() in PYTHON and match.group(3).strip():
            found = match.group(3)
    return found


def defines(code: str, name: str) -> bool:
    """Whether ``code`` seems to define the function or class ``name`` at its top level. Looks at lines only: parsing what a
    model wrote is left to the sandbox."""
    return (
        re.search(rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*[:=]", code, re.M)
        is not None
    )


@dataclass(frozen=True)
class Test:
    """An input and what must come out: text on stdin and stdout, or, for a function, its arguments and its value."""

    input: Any
    output: Any


@dataclass(frozen=True)
class CodeGrader:
    """Runs programs against tests.

    ``allow_code``: nothing runs without it, the outcome is then "refused". ``limits`` are those of one program, their seconds
    those of one test. ``total``: seconds of wall time for all tests of an answer. ``isolation``: None picks one, and
    "refused" is the outcome if none works here. All raise OSError where this machine fails, not the program.
    """

    allow_code: bool = False
    limits: Limits = field(default_factory=Limits)
    total: float = 300.0
    isolation: Isolation | None = None

    def _isolation(self, code: str) -> tuple[Isolation | None, Grade]:
        if len(code) > LONGEST:
            return None, Grade(0.0, "wrong", note=f"the code has {len(code)} characters, more than {LONGEST}")
        if not self.allow_code:
            return None, Grade(0.0, "refused", note="running a model's code was not allowed (allow_code)")
        isolation, reason = pick(self.isolation)
        return isolation, Grade(0.0, "refused", note=reason)

    def stdin_tests(self, code: str, tests: Sequence[Test]) -> Grade:
        """Run ``code`` as a script, once a test: right if every run exits with 0 and prints what is expected.

        Trailing white space aside, lines must be equal; numbers may be written in another way (1.0 and 1.00).
        """
        isolation, refused = self._isolation(code)
        if isolation is None:
            return replace(refused, answer=code[:LONGEST])
        until = time.monotonic() + self.total
        files = _inside("program.py") | {"prelude.py": PRELUDE, "solution.py": code}
        for number, test in enumerate(tests, start=1):
            left = until - time.monotonic()
            if left <= 0:
                return _over(code, f"test {number} of {len(tests)} would begin past {self.total:g} s", isolation)
            allowed = max(self.limits.output, 2 * len(test.output))
            limits = replace(self.limits, seconds=min(self.limits.seconds, left), output=allowed)
            with Sandbox(
                files, ["program.py", "prelude.py", "solution.py"], limits, isolation, stdin=_bytes(test.input)
            ) as box:
                ended = box.result()
            where = f"test {number} of {len(tests)}"
            if error := box.failure():
                raise OSError(f"a sandbox failed: {error}")
            if ended.why == "timeout":
                return _over(code, f"{where}: the program {ended}", isolation)
            if (ended.why, ended.code) != ("exit", 0):
                return _wrong(code, f"{where}: the program {ended}", isolation)
            if not same_output(ended.stdout.decode("utf-8", "replace"), test.output):
                return _wrong(code, f"{where}: another output", isolation)
        return _right(code, f"{len(tests)} tests", isolation)

    def function_tests(self, code: str, entry: str, tests: Sequence[Test]) -> Grade:
        """Call ``entry`` ("f", or "Class.method" of an instance made for each call) with each test's list of arguments: right
        if every value equals the expected one; lists and tuples are the same."""
        isolation, refused = self._isolation(code)
        if isolation is None:
            return replace(refused, answer=code[:LONGEST])
        deadline = time.monotonic() + self.total
        (to_program, requests), (replies, from_program) = os.pipe(), os.pipe()
        files = _inside("serve.py", "wire.py") | {"prelude.py": PRELUDE, "solution.py": code}
        # All calls go to one process: its time is that of all of them, each reply is waited for the time of one.
        limits = replace(self.limits, seconds=min(self.total, self.limits.seconds * (len(tests) + 1)))
        with _Closing(to_program, requests, replies, from_program) as pipes:
            box = Sandbox(
                files, ["serve.py", entry, "prelude.py", "solution.py"], limits, isolation, (to_program, from_program)
            )
            pipes.close(to_program, from_program)
            with box, _Drain(replies, requests, box) as drain:
                return self._function_tests(code, tests, drain, deadline, isolation)

    def _function_tests(
        self, code: str, tests: Sequence[Test], drain: _Drain, deadline: float, isolation: Isolation
    ) -> Grade:
        wire = _wire()
        for number, test in enumerate([None, *tests]):
            where = f"test {number} of {len(tests)}" if number else "loading it"
            request = b""
            if test is not None:
                packed = {"args": wire.pack(list(test.input)), "kwargs": wire.pack({})}
                request = json.dumps(packed).encode() + b"\n"
            line = drain.line(min(deadline, time.monotonic() + self.limits.seconds), request)
            if line is None:
                return _over(code, f"{where}: the program ran past its time", isolation)
            if not line:
                return _wrong(code, f"{where}: the program ended before it was tested", isolation)
            try:
                reply = json.loads(line)
                value = wire.unpack(reply["value"]) if "value" in reply else None
                error_text = str(reply["error"])[:200] if "error" in reply else ""
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return _wrong(code, f"{where}: what came back is no data", isolation)
            if error_text:
                return _wrong(code, f"{where}: {error_text}", isolation)
            if test is not None and not same_value(value, test.output):
                return _wrong(code, f"{where}: another value", isolation)
        return _right(code, f"{len(tests)} tests", isolation)

    def check(self, prompt: str, code: str, test: str, entry: str) -> Grade:
        """Put ``test``, which defines ``check(candidate)``, to the function ``entry`` of ``prompt`` and then ``code``.

        The test runs in a sandbox of its own and sees only the values that the function returns.
        """
        isolation, refused = self._isolation(code)
        if isolation is None:
            return replace(refused, answer=code[:LONGEST])
        (to_program, requests), (replies, from_program), (verdict, told) = os.pipe(), os.pipe(), os.pipe()
        with (
            _Closing(to_program, requests, replies, from_program, verdict, told) as pipes,
            Sandbox(
                _inside("serve.py", "wire.py") | {"prompt.py": prompt, "solution.py": code},
                ["serve.py", entry, "prompt.py", "solution.py"],
                self.limits,
                isolation,
                (to_program, from_program),
            ) as program,
            Sandbox(
                _inside("check.py", "wire.py") | {"prompt.py": prompt, "test.py": test},
                ["check.py", "prompt.py", "test.py", entry],
                self.limits,
                isolation,
                (replies, requests, told),
            ) as checker,
        ):
            pipes.close(to_program, from_program, requests, replies, told)
            with _Drain(verdict, None, program, checker) as drain:
                line = drain.line(time.monotonic() + self.limits.seconds)
        if line is None:
            return _over(code, "the program ran past its time", isolation)
        said = json.loads(line) if line else {"failed": "the check ended early"}
        if said.get("passed") is True:
            return _right(code, "check passed", isolation)
        return _wrong(code, str(said["failed"])[:200], isolation)


class _Closing:
    """File descriptors that are closed once, at the end at the latest."""

    def __init__(self, *fds: int) -> None:
        self.open = set(fds)

    def __enter__(self) -> _Closing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close(*self.open)

    def close(self, *fds: int) -> None:
        for fd in self.open.intersection(fds):
            os.close(fd)
        self.open.difference_update(fds)


class _Drain:
    """Reads lines from a pipe while what sandboxes print is thrown away, so that no one waits for a full pipe; and neither
    does this process when it writes."""

    def __init__(self, fd: int, requests: int | None, *boxes: Sandbox) -> None:
        self.fd, self.requests, self.boxes, self.held = fd, requests, boxes, bytearray()
        self.limit, self.printed = boxes[0].limits.output, 0
        self.selector = selectors.DefaultSelector()
        self.selector.register(fd, selectors.EVENT_READ)
        if requests is not None:
            os.set_blocking(requests, False)
        for box in boxes:
            assert box.process.stdin is not None
            assert box.process.stdout is not None
            box.process.stdin.close()
            self.selector.register(box.process.stdout, selectors.EVENT_READ)

    def __enter__(self) -> _Drain:
        return self

    def __exit__(self, *_: object) -> None:
        self.selector.close()

    def line(self, deadline: float, request: bytes = b"") -> bytes | None:
        """The next line, after ``request`` was written; empty at the end of the pipe or when there is too much, None past the
        deadline. Raises OSError if it is the sandbox that failed."""
        line = self._line(deadline, request)
        if line == b"":
            for box in self.boxes:
                if error := box.failure():
                    raise OSError(f"a sandbox failed: {error}")
        return line

    def _line(self, deadline: float, request: bytes) -> bytes | None:
        if request:
            self.selector.register(self.requests, selectors.EVENT_WRITE)  # type: ignore[arg-type]
        try:
            while request or b"\n" not in self.held:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                for key, _ in self.selector.select(left):
                    if key.fd == self.requests:
                        try:
                            request = request[os.write(key.fd, request[: 1 << 16]) :]
                        except BlockingIOError:
                            continue
                        except OSError:
                            return b""
                        if not request:
                            self.selector.unregister(key.fd)
                    elif not self._read(key):
                        return b""
        finally:
            if request:
                self.selector.unregister(self.requests)  # type: ignore[arg-type]
        line, _, rest = bytes(self.held).partition(b"\n")
        self.held = bytearray(rest)
        return line

    def _read(self, key: selectors.SelectorKey) -> bool:
        chunk = os.read(key.fd, 1 << 16)
        if key.fd == self.fd:
            self.held += chunk
            return bool(chunk) and len(self.held) <= self.limit
        if not chunk:
            self.selector.unregister(key.fileobj)
        self.printed += len(chunk)
        return self.printed <= self.limit


def same_output(got: str, expected: str) -> bool:
    """Whether two outputs are the same line by line, up to trailing white space and how numbers are written."""
    left, right = ([line.split() for line in text.rstrip().split("\n")] for text in (got, expected))
    return len(left) == len(right) and all(
        len(a) == len(b) and all(x == y or _same_number(x, y) for x, y in zip(a, b)) for a, b in zip(left, right)
    )


NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", re.A)


def _same_number(a: str, b: str) -> bool:
    if not (NUMBER.fullmatch(a) and NUMBER.fullmatch(b)):
        return False
    try:
        return Decimal(a) == Decimal(b)
    except InvalidOperation:
        return False


def same_value(got: Any, expected: Any) -> bool:
    """Whether two values are equal, lists and tuples being the same thing."""
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(same_value(a, b) for a, b in zip(got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        return got.keys() == expected.keys() and all(same_value(got[key], expected[key]) for key in got)
    return bool(got == expected)


@cache
def _script(name: str) -> str:
    return (INSIDE / name).read_text(encoding="utf-8")


def _inside(*names: str) -> dict[str, str]:
    return {name: _script(name) for name in names}


def _wire() -> Any:
    from kvpop.evals.grading.inside import wire

    return wire


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _right(code: str, note: str, isolation: Isolation) -> Grade:
    return Grade(1.0, "right", code, f"{note}; isolation: {isolation}")


def _wrong(code: str, note: str, isolation: Isolation) -> Grade:
    return Grade(0.0, "wrong", code, f"{note}; isolation: {isolation}")


def _over(code: str, note: str, isolation: Isolation) -> Grade:
    return Grade(0.0, "timeout", code, f"{note}; isolation: {isolation}")

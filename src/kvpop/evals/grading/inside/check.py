"""Puts a test to a function that lives in another process: ``check.py PROMPT TEST ENTRY``.

Replies come on fd 3, requests go to fd 4, the verdict to fd 5: {"passed": true} or {"failed": why}.

The prompt is run for what the test may use of it. The program under test has only its two pipes, and gives data.
"""

import os
import sys
from typing import Any

from wire import pack, receive, send, unpack


class Broken(BaseException):
    """The program failed. No ``except Exception`` of a test takes it for what it tests."""


class Candidate:
    """The function under test, as the test sees it."""

    def __init__(self, replies, requests):
        self.replies, self.requests = replies, requests

    def __call__(self, *args, **kwargs):
        send(self.requests, {"args": pack(args), "kwargs": pack(kwargs)})
        return self.answer()

    def answer(self):
        reply = receive(self.replies)
        if reply is None:
            raise Broken("the program ended before it was tested")
        if "error" in reply:
            raise Broken(reply["error"])
        return unpack(reply["value"])


def verdict(candidate) -> dict[str, Any]:
    try:
        candidate.answer()  # it was loaded
        namespace: dict[str, Any] = {"__name__": "test"}
        for part in sys.argv[1:3]:
            with open(part, encoding="utf-8", errors="surrogatepass") as file:
                exec(compile(file.read(), part, "exec"), namespace)
        namespace[sys.argv[3]] = candidate
        namespace["check"](candidate)
    except BaseException as error:
        return {"failed": f"{type(error).__name__}: {error}"[:500]}
    return {"passed": True}


def main():
    sys.set_int_max_str_digits(0)
    with os.fdopen(5, "w") as told:
        send(told, verdict(Candidate(os.fdopen(3), os.fdopen(4, "w"))))


if __name__ == "__main__":
    main()

"""Holds a program and calls a function of it: ``serve.py ENTRY PART ...``; requests on fd 3, replies on fd 4.

The parts run one after the other in one namespace. A request is {"args": packed list, "kwargs": packed dictionary}, the reply
{"value": packed} or {"error": text}; the first reply, {"value": null}, says that the program was loaded.
"""

import os
import sys
from typing import Any

from wire import pack, receive, send, unpack

namespace = {"__name__": "program", "__builtins__": __builtins__}


def guarded(call, *args):
    try:
        return {"value": pack(call(*args))}
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def load():
    for part in sys.argv[2:]:
        with open(part, encoding="utf-8", errors="surrogatepass") as file:
            exec(compile(file.read(), part, "exec"), namespace)


def answer(request):
    found: Any = None
    for name in sys.argv[1].split("."):
        found = namespace[name] if found is None else getattr(found, name)
        if isinstance(found, type):
            found = found()
    return found(*unpack(request["args"]), **unpack(request["kwargs"]))


def main():
    sys.set_int_max_str_digits(0)
    requests, replies = os.fdopen(3), os.fdopen(4, "w")
    loaded = guarded(load)
    send(replies, loaded)
    while "error" not in loaded and (request := receive(requests)) is not None:
        send(replies, guarded(answer, request))


if __name__ == "__main__":
    main()

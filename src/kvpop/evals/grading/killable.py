"""Work that may never come back, in processes that can be killed: a pool of workers that answer lines of JSON.

A worker is a script of ``inside`` in a fresh interpreter, so how the caller starts its own processes does not matter. It
ends when its input does, and sets itself an alarm for each request: a caller that goes away leaves none behind.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import threading
import time
from typing import Any

from kvpop.evals.grading.sandbox import INSIDE

START_SECONDS = 120.0
"""How long a worker may take to import what it needs, on a machine that is busy."""


class TimedOut(Exception):
    """The work took too long, or ended its worker."""


class _Worker:
    def __init__(self, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(INSIDE / script)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            self.hello = self._line(time.monotonic() + START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def ask(self, request: Any, seconds: float) -> Any:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise TimedOut("the worker ended") from error
        return self._line(time.monotonic() + seconds)

    def _line(self, deadline: float) -> Any:
        assert self.process.stdout is not None
        fd, held = self.process.stdout.fileno(), b""
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while not held.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimedOut("the worker took too long")
                chunk = os.read(fd, 1 << 16)
                if not chunk:
                    raise TimedOut("the worker ended")
                held += chunk
        return json.loads(held)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class Pool:
    """Up to ``workers`` processes that run ``script``, started when they are needed. Safe to use from several threads, and in a
    process that was forked: that one starts its own."""

    def __init__(self, script: str, workers: int = 2) -> None:
        self.script, self.workers = script, workers
        self._reset()
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._free: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        self._all: set[_Worker] = set()
        self._lock = threading.Lock()
        for _ in range(self.workers):
            self._free.put(None)

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        """The worker's reply.

        Raises TimedOut if there is none within ``seconds``, the start of a worker not counted, ImportError if the script
        lacks a package; either way the worker is replaced.
        """
        worker = self._free.get()
        if worker is not None and worker.process.poll() is not None:
            worker = None  # closed, or killed by somebody else
        try:
            if worker is None:
                worker = _Worker(self.script)
                with self._lock:
                    self._all.add(worker)
                if worker.hello != "ready":
                    raise ImportError(str(worker.hello))
            reply = worker.ask(request | {"seconds": seconds}, seconds)
        except BaseException:
            if worker is not None:
                worker.kill()
                with self._lock:
                    self._all.discard(worker)
            self._free.put(None)
            raise
        self._free.put(worker)
        return reply

    def close(self) -> None:
        """End all workers; the next request starts new ones."""
        with self._lock:
            workers, self._all = self._all, set()
        for worker in workers:
            worker.kill()

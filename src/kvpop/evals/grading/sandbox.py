"""A process that may do little: no network, no files but a few that are read-only, no more time, memory or processes than
it is given; and nothing of it is left when it has ended.

Three kinds of isolation, the first that works here is taken unless one is named:

- "bubblewrap": the program bwrap sets up namespaces of users, processes, mounts and the network;
- "namespaces": the same without it, where the kernel lets this user make them;
- "limits": no namespaces, as in most containers. A seccomp filter refuses sockets, new processes and signals to others, and
  root's program runs as nobody; but it sees the file system, and may write where its user may. Never taken unless named.

Linux only. Nothing here is a guard against an attack on the kernel itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Isolation = Literal["bubblewrap", "namespaces", "limits"]

INSIDE = Path(__file__).parent / "inside"
BOX = "/box"
MEBIBYTE = 1 << 20
GRACE = 5.0
"""Seconds that a launcher gets to end what it runs, before it is killed itself."""


@dataclass(frozen=True)
class Limits:
    """``seconds`` of wall time and of CPU time (each process), MiB of address space (each process), ``processes`` and
    threads at a time, open ``files`` (each process), MiB that all files together may have, and bytes that are read of what
    it writes: more of it ends the program."""

    seconds: float = 10.0
    memory: int = 1024
    processes: int = 16
    files: int = 64
    disk: int = 32
    output: int = 4 * MEBIBYTE

    def __post_init__(self) -> None:
        for name in ("seconds", "memory", "processes", "files", "disk", "output"):
            if getattr(self, name) <= 0:
                raise ValueError(f"the limit {name} must be above 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Ended:
    """How a program ended. ``why``: "exit" (with ``code``), "signal" (``code`` is its number), "timeout", "output" (it wrote
    more than it may) or "error" (it could not be started, or its launcher was killed: ``error`` says what)."""

    why: Literal["exit", "signal", "timeout", "output", "error"]
    code: int = 0
    stdout: bytes = b""
    error: str = ""

    def __str__(self) -> str:
        if self.why == "signal":
            name = signal.Signals(self.code).name if self.code in set(signal.Signals) else str(self.code)
            return f"ended by the signal {name}"
        return {
            "exit": f"ended with exit code {self.code}",
            "timeout": "ran past its time",
            "output": "wrote more than it may",
            "error": f"did not run: {self.error}",
        }[self.why]


def seen() -> list[str]:
    """What a program sees of the file system: the system's libraries and the interpreter with its packages."""
    wanted = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives"]
    for prefix in (sys.base_prefix, sys.prefix, os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix)):
        wanted.append(os.path.abspath(prefix))
    for link in _links(sys.executable):
        wanted.append(os.path.dirname(link))
    found: list[str] = []
    for path in wanted:
        if os.path.exists(path) and path != "/" and not any(path == up or path.startswith(up + "/") for up in found):
            found.append(path)
    return found


def _links(path: str) -> Iterator[str]:
    """The file and what it links to, step by step."""
    for _ in range(40):
        yield os.path.abspath(path)
        if not os.path.islink(path):
            return
        path = os.path.join(os.path.dirname(path), os.readlink(path))


class Sandbox:
    """One program, running. Use as a context manager: at the end nothing of it is left, whatever happened.

    ``files``: texts by name, written into its working directory, the only one it may write to. ``arguments``: of the Python
    interpreter. ``fds``: the program has them as 3, 4, ... ``stdin``: what it reads there.

    Raises OSError if not even the launcher can be started.
    """

    def __init__(
        self, files: Mapping[str, str], arguments: Sequence[str], limits: Limits, isolation: Isolation,
        fds: Sequence[int] = (), stdin: bytes = b"",
    ) -> None:  # fmt: skip
        self.limits, self.isolation, self.stdin = limits, isolation, stdin
        self.deadline = time.monotonic() + limits.seconds
        self.directory = tempfile.mkdtemp(prefix="kvpop-box-")
        try:
            self._start(files, arguments, fds)
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise

    def _start(self, files: Mapping[str, str], arguments: Sequence[str], fds: Sequence[int]) -> None:
        limits, box = self.limits, self.directory if self.isolation == "limits" else BOX
        config = {
            "isolation": self.isolation,
            "root": self.directory,
            "see": seen(),
            "disk": limits.disk * MEBIBYTE,
            "bubblewrap": _bubblewrap(seen(), limits.disk * MEBIBYTE) if self.isolation == "bubblewrap" else [],
            "files": dict(files),
            "fds": list(fds),
            "argv": [sys.executable, "-s", "-B", *arguments],
            "env": {
                "PATH": "/usr/bin:/bin",
                "HOME": box,
                "TMPDIR": box,
                "LANG": "C.UTF-8",
                "PYTHONHASHSEED": "0",  # the order of sets is the same in every run
                "PYTHONIOENCODING": "utf-8:surrogateescape",
                "OPENBLAS_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
            },
            "limits": {
                "CPU": int(limits.seconds) + 1,
                "AS": limits.memory * MEBIBYTE,
                "NPROC": limits.processes,
                "NOFILE": limits.files,
                "FSIZE": limits.disk * MEBIBYTE,
                "CORE": 0,
            },
        }
        status, told = os.pipe()
        memory = os.memfd_create("config")
        self.status: int | None = status
        self.told = b""
        try:
            with open(memory, "w", closefd=False) as file:
                json.dump(config, file)
            launch = str(INSIDE / "launch.py")
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", launch, str(memory), str(told), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[memory, told, *fds],
                env={},
                cwd="/",
                start_new_session=True,
            )
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(memory)
            os.close(told)

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the program and everything it started, and wait until it is all gone."""
        process = self.process
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        if self.status is not None:
            with os.fdopen(self.status, "rb") as file:
                self.status, self.told = None, file.readline()
        shutil.rmtree(self.directory, ignore_errors=True)

    def failure(self) -> str:
        """End it; why the program could not be started, empty if it was."""
        self.end()
        return json.loads(self.told).get("error", "") if self.told else ""

    def result(self) -> Ended:
        """Feed it, read what it writes, and wait for its end; ends it when it is over a limit."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        out, fed, why = bytearray(), 0, ""
        os.set_blocking(stdin.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if self.stdin:
                selector.register(stdin, selectors.EVENT_WRITE)
            else:
                stdin.close()
            while not why:
                left = self.deadline - time.monotonic()
                if left <= 0:
                    why = "timeout"
                    break
                for key, _ in selector.select(left):
                    if key.fileobj is stdout:
                        chunk = os.read(stdout.fileno(), 1 << 16)
                        out += chunk
                        if not chunk:
                            why = "end"
                        elif len(out) > self.limits.output:
                            why = "output"
                    else:
                        try:
                            fed += os.write(stdin.fileno(), self.stdin[fed : fed + (1 << 16)])
                        except BlockingIOError:
                            continue
                        except OSError:
                            fed = len(self.stdin)
                        if fed >= len(self.stdin):
                            selector.unregister(stdin)
                            with contextlib.suppress(OSError):
                                stdin.close()
        return self._ended(why, bytes(out[: self.limits.output]))

    def _ended(self, why: str, out: bytes) -> Ended:
        if why == "end":
            # A program may close its output and go on.
            try:
                self.process.wait(max(self.deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                why = "timeout"
        self.end()
        if why != "end":
            return Ended("timeout" if why == "timeout" else "output", stdout=out)
        said: dict[str, Any] = (
            json.loads(self.told) if self.told else {"error": f"the launcher ended with code {self.process.returncode}"}
        )
        if "error" in said:
            return Ended("error", stdout=out, error=said["error"])
        if said.get("signal") == signal.SIGXCPU:
            return Ended("timeout", stdout=out)
        if "signal" in said:
            return Ended("signal", code=said["signal"], stdout=out)
        return Ended("exit", code=said["exit"], stdout=out)


def _bubblewrap(see: Sequence[str], disk: int) -> list[str]:
    command = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    if "--disable-userns" in _bubblewrap_help(command[0]):  # since 0.8
        command += ["--unshare-user", "--disable-userns"]
    for path in see:
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    if not any(str(INSIDE).startswith(path + "/") for path in see):
        command += ["--ro-bind", str(INSIDE), str(INSIDE)]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--size", str(disk), "--tmpfs", BOX]
    if not any((path + "/").startswith("/tmp/") for path in [*see, str(INSIDE)]):
        command += ["--symlink", BOX, "/tmp"]
    return [*command, "--remount-ro", "/", "--chdir", BOX, "--"]


@cache
def _bubblewrap_help(program: str) -> str:
    return subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout


_WORKS: set[str] = set()


def works(isolation: Isolation) -> str:
    """Empty if programs can be run in this isolation here, else why they cannot. A success is remembered."""
    if isolation in _WORKS:
        return ""
    if not sys.platform.startswith("linux"):
        return f"programs are run on Linux only, this is {sys.platform}"
    if isolation == "bubblewrap" and shutil.which("bwrap") is None:
        return "there is no program bwrap"
    try:
        with Sandbox({}, ["-S", "-c", "print(1)"], Limits(seconds=20), isolation) as sandbox:
            ended = sandbox.result()
    except OSError as error:
        return str(error)
    if (ended.why, ended.code, ended.stdout) != ("exit", 0, b"1\n"):
        return str(ended)
    _WORKS.add(isolation)
    return ""


def pick(isolation: Isolation | None = None) -> tuple[Isolation | None, str]:
    """The isolation to use, or None and why there is none.

    bubblewrap first, but not for root: there it has no limit on processes.
    """
    if isolation is not None:
        reason = works(isolation)
        return (None, f"the isolation {isolation} does not work here: {reason}") if reason else (isolation, "")
    order: tuple[Isolation, ...] = ("bubblewrap", "namespaces")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        order = ("namespaces", "bubblewrap")
    reasons = []
    for one in order:
        if not (reason := works(one)):
            return one, ""
        reasons.append(f"{one}: {reason}")
    return None, "no isolation works here: " + "; ".join(reasons)

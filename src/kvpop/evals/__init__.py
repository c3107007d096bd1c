"""Benchmarks: tasks and their graders, rollouts of a model on them, statistics, and the report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpop.evals.base import Task


def _made(where: str, *rest: str) -> Task:
    """What ``module:attribute`` of this package makes; the module is loaded only now."""
    module, _, attribute = where.partition(":")
    return getattr(import_module(f"kvpop.evals.{module}"), attribute)(*rest)


TASKS: dict[str, Callable[[], Task]] = {
    "aime-2024": partial(_made, "aime:aime_2024"),
    "aime-2025": partial(_made, "aime:aime_2025"),
    "hmmt-feb-2025": partial(_made, "hmmt:hmmt_february"),
    "hmmt-nov-2025": partial(_made, "hmmt:hmmt_november"),
    "gpqa-diamond": partial(_made, "gpqa:GpqaDiamond"),
    "livecodebench-v6": partial(_made, "livecodebench:LiveCodeBench"),
    "gsm8k": partial(_made, "gsm8k:Gsm8k"),
    "math-500": partial(_made, "math500:Math500"),
    "humaneval": partial(_made, "humaneval:HumanEval"),
    **{
        f"ruler:{kind}:4096": partial(_made, "ruler:named", f"{kind}:4096")
        for kind in ("niah-single", "niah-multi-key", "niah-multi-value", "niah-multi-query")
    },
    "passkey:4096": partial(_made, "ruler:passkey", "4096"),
}
"""Tasks by name, and what makes each. ``task_by_name`` knows more: the ``FAMILIES``."""

FAMILIES: dict[str, tuple[str, str]] = {
    "ruler": (
        "ruler:named",
        "ruler:KIND:LENGTH",
    ),
    "passkey": ("ruler:passkey", "passkey:LENGTH"),
    "reasoning": ("reasoning:named", "reasoning:NAME[:OPTION=VALUE...] (of reasoning-gym)"),
    "livecodebench-v6": ("livecodebench:windowed", "livecodebench-v6:FIRST-DATE:END-DATE"),
}
"""Tasks with something to choose, by what their name begins with: what makes one of the rest, and how a name looks."""


def task_by_name(name: str, allow_code: bool = False) -> Task:
    """A task by its name. ``allow_code``: tasks that run what a model wrote may do so, in a sandbox; their grades are "refused"
    without it.

    Raises ValueError, listing the names, for one that does not exist, ImportError if a package is missing.
    """
    family, _, rest = name.partition(":")
    if name in TASKS:
        task = TASKS[name]()
    elif rest and family in FAMILIES:
        task = _made(FAMILIES[family][0], rest)
    else:
        choices = [*TASKS, *(form for _, form in FAMILIES.values())]
        raise ValueError(f"there is no task {name!r}; there are: {', '.join(choices)}")
    if hasattr(task, "allow_code"):
        task.allow_code = allow_code
    return task

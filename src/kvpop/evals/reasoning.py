"""Tasks of reasoning-gym by name, generated from a seed, with its own scores. The package is optional."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from typing import Any

from kvpop.evals.base import Decoding, Grade, Item, Task
from kvpop.evals.grading.killable import Pool, TimedOut
from kvpop.evals.grading.maths import last_boxed
from kvpop.evals.grading.text import final_part

INSTRUCTION = "Think first. Then give the final answer alone between <answer> and </answer>."
TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.S)
SECONDS = 20.0


@cache
def pool() -> Pool:
    return Pool("reason.py")


class Reasoning(Task):
    """``size`` items of the task ``task``, made with ``seed`` and with ``options`` of its own configuration. The score is the
    package's; only 1 is right, less may be given for part of an answer.

    Raises ImportError without reasoning-gym, ValueError for a task that it does not have, and for options that the task does
    not have or does not allow.
    """

    citation = (
        "Stojanovski et al., Reasoning Gym: Reasoning Environments for Reinforcement Learning with Verifiable Rewards, 2025; "
        "arXiv:2505.24760"
    )
    decoding = Decoding(rollouts=1)
    source = None

    def __init__(self, task: str, size: int = 100, seed: int = 0, options: Mapping[str, Any] | None = None) -> None:
        if find_spec("reasoning_gym") is None:
            raise ImportError("tasks of reasoning-gym need the package reasoning-gym: pip install 'kvpop[reasoning]'")
        import reasoning_gym.factory

        if size < 1:
            raise ValueError(f"the number of items must be at least 1, got {size}")
        if task not in reasoning_gym.factory.DATASETS:
            known = ", ".join(sorted(reasoning_gym.factory.DATASETS))
            raise ValueError(f"reasoning-gym has no task {task!r}; it has: {known}")
        self.task, self.count, self.seed, self.options = task, size, seed, dict(sorted((options or {}).items()))
        _check(task, self.options)
        self.size = size
        said = [f"{name}={json.dumps(value)}" for name, value in self.options.items()]
        self.name, self.title = ":".join(["reasoning", task, *said]), " ".join(["Reasoning Gym", task, *said])

    def items(self, tokenizer: Any, file: str | None = None) -> list[Item]:
        """Raises ValueError for a file: there is none to read."""
        import reasoning_gym

        if file is not None:
            raise ValueError(f"{self.name} is generated, it reads no file: got {file}")
        made = reasoning_gym.create_dataset(self.task, size=self.count, seed=self.seed, **self.options)
        return [
            Item(
                f"{self.name}/{self.seed}/{number}",
                f"{made[number]['question'].strip()}\n\n{INSTRUCTION}",
                {"index": number, "answer": _text(made[number]["answer"])},
                {"row": number},
            )
            for number in range(self.count)
        ]

    def grade(self, item: Item, text: str) -> Grade:
        part = final_part(text)
        tagged = TAGGED.findall(part)
        answer = tagged[-1].strip() if tagged else last_boxed(part)
        if not answer:
            return Grade(0.0, "no answer", note="nothing between <answer> and </answer>")
        request = {
            "task": self.task,
            "size": self.count,
            "seed": self.seed,
            "options": self.options,
            "index": item.answer["index"],
            "answer": answer,
        }
        try:
            reply = pool().ask(request, SECONDS)
        except TimedOut as error:
            return Grade(0.0, "timeout", answer, str(error))
        score = min(max(float(reply["score"]), 0.0), 1.0)
        return Grade(score, "right" if score == 1.0 else "wrong", answer, reply.get("error", ""))


def named(rest: str) -> Reasoning:
    """The task of "needle_haystack", or of "needle_haystack:min_num_statements=300:max_num_statements=400"."""
    task, *said = rest.split(":")
    options = {}
    for text in said:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"an option of a task of reasoning-gym is written NAME=VALUE, got {text!r} in {rest!r}")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return Reasoning(task, options=options)


def _check(task: str, options: Mapping[str, Any]) -> None:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    known = [field.name for field in fields(DATASETS[task][1]) if field.name not in ("seed", "size")]
    if unknown := [name for name in options if name not in known]:
        raise ValueError(f"{task} of reasoning-gym has no option {unknown[0]!r}; it has: {', '.join(known)}")
    try:
        reasoning_gym.create_dataset(task, size=1, seed=0, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{task} of reasoning-gym does not allow {dict(options)}: {error}") from error


def _text(answer: Any) -> str | None:
    return None if answer is None else str(answer)

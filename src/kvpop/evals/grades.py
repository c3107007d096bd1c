"""Grading rollouts: ``grades.jsonl`` beside ``rollouts.jsonl``, a line a rollout, made by several processes."""

from __future__ import annotations

import hashlib
import inspect
import json
import multiprocessing
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvpop.evals.base import Item, Task
from kvpop.evals.rollouts import PLACE, STEM, health, place_of, read_rows, read_settings
from kvpop.jsonl import appending, cut_last_line, differences, sort_lines

GRADES = "grades"
OUTCOMES = ("right", "wrong", "no answer", "timeout", "refused")


SCORE = {**PLACE, "score": int | float}
GRADE = {**SCORE, "text_sha256": str}


def read_grader(path: Path) -> dict[str, Any]:
    """What graded a file. Raises ValueError for what does not say so."""
    try:
        found = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict) or "grader" not in found:
        raise ValueError(f"{path} does not say what graded: it has no grader")
    return found


def text_digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def grader_fingerprint(task: Task) -> str:
    """16 hex digits of the source of the task's class, of its bases below ``Task``, and of all that is shared by graders."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "grading").rglob("*.py")):
        digest.update(path.read_bytes())
    for kind in type(task).__mro__:
        if kind not in (Task, object) and issubclass(kind, Task):
            digest.update(inspect.getsource(sys.modules[kind.__module__]).encode())
    return digest.hexdigest()[:16]


class Grading:
    """Grades of the rollouts in ``directory``, in the order of ``rollouts.jsonl``.

    A row has "item", "index", "rollout", "score", "outcome", "answer", "note", "seconds" (of the grader), "text_sha256",
    "prompt_tokens", "tokens" (that were generated), and what ``health`` says. ``grades.json`` says what graded them.

    ``again`` throws away the grades that are there. Raises FileNotFoundError if there are no rollouts; ValueError for rollouts
    of another task or items, grades of another grader or other answers (unless ``again``), and grades of a text that is not
    that of its rollout any more; a last line that was cut off is removed.
    """

    def __init__(
        self, task: Task, items: Sequence[Item], directory: str | Path, *, workers: int = 1, again: bool = False,
        identity: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        import kvpop
        from kvpop.weights import write_json

        if workers < 1:
            raise ValueError(f"--workers must be at least 1, got {workers}")
        directory = Path(directory)
        self.task, self.workers, self.items = task, workers, {item.id: item for item in items}
        self.source, self.out = directory / f"{STEM}.jsonl", directory / f"{GRADES}.jsonl"
        if not self.source.is_file():
            shards = any(directory.glob(f"{STEM}-*-of-*.jsonl"))
            raise FileNotFoundError(
                f"{directory} has no {STEM}.jsonl"
                + (": put its shards together with kvpop tasks merge" if shards else "")
            )
        settings = read_settings(self.source.with_suffix(".json"))
        if settings["task"]["name"] != task.name:
            raise ValueError(f"{directory} has rollouts of {settings['task']['name']}, not of {task.name}")
        beside = self.out.with_suffix(".json")
        if again:
            self.out.unlink(missing_ok=True)
            beside.unlink(missing_ok=True)
        answers = [[item.id, item.answer] for item in items]
        made_with = {
            "task": task.name,
            "grader": grader_fingerprint(task),
            "answers": hashlib.sha256(json.dumps(answers, default=str).encode()).hexdigest()[:16],
            **(identity or {}),
        }
        old = read_grader(beside) if beside.is_file() else None
        if old is not None and (other := differences({k: v for k, v in old.items() if k != "kvpop"}, made_with)):
            raise ValueError(f"{self.out} was graded otherwise: {'; '.join(other)}; --again grades anew")
        if old is None and self.out.exists():
            raise ValueError(f"{self.out} is there, but not what graded it: {beside}; --again grades anew")
        if old is None:
            write_json(beside, {**made_with, "kvpop": kvpop.__version__})
        with appending(self.out):
            self._look()

    def _look(self) -> None:
        cut_last_line(self.out)
        self.done = {place_of(row): row["text_sha256"] for row in read_rows(self.out, GRADE)}
        self.size = self.out.stat().st_size

    def _todo(self) -> Iterator[dict[str, Any]]:
        for row in read_rows(self.source):
            known = self.done.get(place_of(row))
            if known is None:
                if row["item"] not in self.items:
                    raise ValueError(f"{self.source}: {self.task.name} has no item {row['item']!r}")
                yield row
            elif known != text_digest(row["text"]):
                raise ValueError(
                    f"{self.out}: rollout {row['rollout']} of item {row['item']} has another text than was graded; "
                    "--again grades anew"
                )

    def run(self) -> Iterator[dict[str, Any]]:
        """Grade what is missing; gives each row once it is written. Raises what a grader raises, naming the rollout."""
        with appending(self.out) as file:
            if self.out.stat().st_size != self.size:  # another run was faster
                self._look()
            for row in self._graded():
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                self.done[place_of(row)] = row["text_sha256"]
                yield row
            sort_lines(self.out, place_of)
            self.size = self.out.stat().st_size

    def _graded(self) -> Iterator[dict[str, Any]]:
        if self.workers == 1:
            for row in self._todo():
                yield graded(self.task, self.items[row["item"]], row)
            return
        # Not forked: torch may have threads. Few at a time: a file of rollouts may have gigabytes.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(self.workers, context, _hold, (self.task,)) as pool:
            waiting: deque[tuple[dict[str, Any], Future[dict[str, Any]]]] = deque()
            try:
                for row in self._todo():
                    waiting.append((row, pool.submit(_graded_there, self.items[row["item"]], row)))
                    while len(waiting) >= 4 * self.workers:
                        yield waiting.popleft()[1].result()
                while waiting:
                    yield waiting.popleft()[1].result()
            except BrokenProcessPool as error:
                row = waiting[0][0] if waiting else row
                raise ValueError(
                    f"a grading process died (of memory?), at rollout {row['rollout']} of item {row['item']} or soon after; "
                    "what was graded stays, the same command goes on"
                ) from error
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


_task: list[Task] = []  # of this worker


def _hold(task: Task) -> None:
    _task[:] = [task]


def _graded_there(item: Item, row: dict[str, Any]) -> dict[str, Any]:
    return graded(_task[0], item, row)


def graded(task: Task, item: Item, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of grades of a rollout."""
    started = time.perf_counter()
    try:
        grade = asdict(task.grade(item, row["text"]))
    except Exception as error:
        error.add_note(f"while grading rollout {row['rollout']} of item {row['item']} of {task.name}")
        raise
    return {
        "item": row["item"],
        "index": row["index"],
        "rollout": row["rollout"],
        **grade,
        "seconds": round(time.perf_counter() - started, 3),
        "text_sha256": text_digest(row["text"]),
        "prompt_tokens": row["prompt_tokens"],
        "tokens": len(row["completion_ids"]),
        **health(row),
    }


def tally(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of rows of grades: "rollouts", every outcome (a grader that had to be killed is "timeout"), "capped", "empty",
    "loops", and the mean number of "tokens"."""
    outcomes = Counter(row["outcome"] for row in rows)
    return {
        "rollouts": len(rows),
        **{outcome: outcomes[outcome] for outcome in OUTCOMES},
        "capped": sum(row["capped"] for row in rows),
        "empty": sum(row["empty"] for row in rows),
        "loops": sum(row["loop"] > 0 for row in rows),
        "tokens": sum(row["tokens"] for row in rows) / max(1, len(rows)),
    }

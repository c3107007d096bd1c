"""Rollouts of a model on a task: what it wrote, how it came about, and nothing about whether it is right.

``rollouts.jsonl`` has a line a rollout, ``rollouts.json`` says what they were made with; a shard has files of its own,
``rollouts-0-of-4.jsonl``. Grades are another file (``kvpop.evals.grades``), so that a grader can be changed.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from kvpop.evals.base import Decoding, Item, Task
from kvpop.jsonl import appending, cut_last_line, differences, json_rows, sort_lines

FORMAT = 1
STEM = "rollouts"

LOOP_PERIOD, LOOP_REPEATS, LOOP_TOKENS = 512, 4, 128
"""A rollout ends in a loop if its last tokens, at least 4 periods and at least 128 tokens of them, repeat with a period of at
most 512 tokens."""


@dataclass(frozen=True)
class Shard:
    """Part ``index`` (from 0) of ``count`` of a task's rollouts. Which rollouts belong to it does not depend on how many items
    or rollouts there are, and every item's rollouts are spread over all parts. Raises ValueError for values out of range."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"--shard i/n: n must be at least 1, got {self.count}")
        if not 0 <= self.index < self.count:
            raise ValueError(f"--shard i/n: i must be in [0, {self.count}), got {self.index}")

    @classmethod
    def chosen(cls, text: str | None) -> Shard:
        """The shard that ``text`` names ("0/4"); without one the process's own among those that torchrun started."""
        if text is None:
            return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
        index, slash, count = text.partition("/")
        if not slash or not index.isdecimal() or not count.isdecimal():
            raise ValueError(f"--shard must be written i/n, as 0/4, got {text!r}")
        return cls(int(index), int(count))

    def has(self, index: int, rollout: int) -> bool:
        return (index + rollout) % self.count == self.index

    @property
    def stem(self) -> str:
        return STEM if self.count == 1 else f"{STEM}-{self.index}-of-{self.count}"


def rollout_seed(task: str, item: str, rollout: int) -> int:
    """The seed of a rollout, below 2**63: of nothing else than the task's name, the item's id and which rollout it is."""
    return int.from_bytes(hashlib.sha256(json.dumps([task, item, rollout]).encode()).digest()[:8]) >> 1


def loop_period(
    tokens: Sequence[int], period: int = LOOP_PERIOD, repeats: int = LOOP_REPEATS, least: int = LOOP_TOKENS
) -> int:
    """The period, in tokens, of the cycle that ``tokens`` end in; 0 if they end in none.

    They end in a cycle of period p if among the last max(``repeats`` * p, ``least``) tokens every one equals the one p before
    it. The smallest p up to ``period`` is given; fewer tokens than that are no cycle.
    """
    import numpy as np

    x = np.asarray(tokens)
    for p in range(1, period + 1):
        length = max(repeats * p, least)
        if length > len(x):
            return 0
        if x[-1] == x[-1 - p] and (x[-length:-p] == x[len(x) - length + p :]).all():
            return p
    return 0


def health(row: Mapping[str, Any]) -> dict[str, Any]:
    """What to know about a rollout beside its grade: ``capped`` (it hit the limit of new tokens), ``empty`` (nothing but white
    space), ``loop`` (``loop_period`` of its tokens, a stop token aside; 0: none); and where the cache grew ``held``, how many
    tokens a KV head held at the end, on average."""
    ids = row["completion_ids"]
    found = {
        "capped": row["finish_reason"] == "length",
        "empty": not row["text"].strip(),
        "loop": loop_period(ids[:-1] if row["finish_reason"] == "stop" else ids),
    }
    return found | ({"held": row["held"]} if row.get("held") is not None else {})


def item_ids(tokenizer: Any, item: Item, thinking: bool | None = None) -> list[int]:
    """The token ids of an item's prompt.

    Text (as a user's message) and messages go through the chat template, with ``enable_thinking`` if ``thinking`` is not
    None; without a template they are taken as they are, messages joined by blank lines. Ids are taken as they are.

    Raises ValueError for a prompt without tokens, or if ``thinking`` is given and the template has no such switch.
    """
    check_thinking(tokenizer, thinking)
    prompt = item.prompt
    if isinstance(prompt, str) or (prompt and not isinstance(prompt[0], int)):
        messages: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if tokenizer.chat_template:
            switch = {} if thinking is None else {"enable_thinking": thinking}
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **switch)
            ids = tokenizer.encode(text, add_special_tokens=False)
        else:
            ids = tokenizer.encode("\n\n".join(message["content"] for message in messages), add_special_tokens=True)
    else:
        ids = [operator.index(token) for token in prompt]  # type: ignore[arg-type]
    if not ids:
        raise ValueError(f"item {item.id} has a prompt without tokens")
    return list(ids)


def check_thinking(tokenizer: Any, thinking: bool | None) -> None:
    if thinking is not None and "enable_thinking" not in str(tokenizer.chat_template):
        raise ValueError(
            f"--{'' if thinking else 'no-'}thinking: the chat template of this model has no switch enable_thinking"
        )


def ids_digest(ids: Sequence[int]) -> str:
    """16 hex digits of token ids."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:16]


def locked(name: str) -> dict[str, Any]:
    """The commit and the checksum of a file of the hub, where the lock file has them: those of a source may be open."""
    from kvpop.evals.sources import lock_path

    path = lock_path()
    entry = json.loads(path.read_text(encoding="utf-8")).get(name, {}) if path.is_file() else {}
    return {key: entry[key] for key in ("revision", "sha256") if key in entry}


def file_checksum(path: str | Path) -> str:
    """SHA-256 of a file's bytes, as a ``Source`` has it."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digest(paths: Iterable[Path]) -> str:
    """SHA-256 of files' names and contents, in order of their names."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


# What rollouts are made with


def task_facts(task: Task, items: Sequence[Item], tokenizer: Any, thinking: bool | None, file: str | None) -> Any:
    """Which questions were asked: source, checksum, and a digest of all prompts as the model gets them."""
    prompts = [[item.id, ids_digest(item_ids(tokenizer, item, thinking))] for item in items]
    source = None if task.source is None else asdict(task.source)
    if source is not None and not file:
        source |= locked(f"{source['hub']}/{source['file']}")
    return {
        "name": task.name,
        "title": task.title,
        "citation": task.citation,
        "size": len(items),
        "source": source,
        "checksum": file_checksum(file) if file else source and source["sha256"],
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
    }


def model_facts(model: Any, tokenizer: Any, model_id: str) -> dict[str, Any]:
    """Which model it is; to be asked before an adapter changes its weights."""
    from kvpop.data.sources import tokenizer_fingerprint
    from kvpop.weights import base_fingerprint

    return {
        "id": model_id,
        "revision": getattr(model.config, "_commit_hash", None),
        "type": model.config.model_type,
        "weights": base_fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16],
    }


def policy_facts(model: Any, policy: Any, adapter: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is attached to the model, and what that costs: the policy with the adapter's checksum; slots per KV head, bytes of a
    row of the cache in the model's dtype (None: it grows), and bytes a token of a dense one."""
    from kvpop.adapter import adapter_files, model_shape
    from kvpop.architecture import attached_policies
    from kvpop.budget import dense_bytes
    from kvpop.cache import BoundedCache
    from kvpop.trained import recipe_of

    recipe = recipe_of(policy)
    nbytes = None
    if all(layer.bounded for layer in attached_policies(model)):
        cache = BoundedCache(model)
        cache.allocate(1)
        nbytes = cache.nbytes()
    shape = model_shape(model)
    per_token = dense_bytes(
        1, layers=shape["layers"], kv_heads=shape["kv_heads"], head_dim=shape["head_dim"],
        element_size=next(model.parameters()).element_size(),
    )  # fmt: skip
    facts = {
        "name": policy.name,
        "kind": type(recipe).__name__,
        "settings": json.loads(json.dumps(asdict(recipe))) if is_dataclass(recipe) else {},
        "adapter": None if adapter is None else file_digest(adapter / name for name in adapter_files(adapter)),
    }
    return facts, {"slots": policy.slots, "bytes": nbytes, "dense_bytes_per_token": per_token}


def run_facts(device: Any, **more: Any) -> dict[str, Any]:
    """Where and how a run went: what rows may differ in."""
    import torch
    import transformers

    import kvpop

    cuda = getattr(device, "type", "cpu") == "cuda"
    return {
        "versions": {
            "kvpop": kvpop.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": torch.cuda.get_device_name(device) if cuda else f"cpu ({platform.machine()})",
        "command": command(),
        **more,
    }  # fmt: skip


def command() -> list[str]:
    """The words this process was called with, without where the program lies."""
    return [Path(sys.argv[0]).name.replace("__main__.py", "kvpop"), *sys.argv[1:]]


# The files


def agree(beside: Path, identity: Mapping[str, Any], extent: Mapping[str, int], run: Mapping[str, Any]) -> list[str]:
    """Write down what rows are made with and how far they are to go; what this run has otherwise than those before it.

    ``run`` may differ, ``identity`` may not: ValueError names what does, and then nothing is written.
    """
    from kvpop.weights import write_json

    identity, run = json.loads(json.dumps(identity)), json.loads(json.dumps(run))
    notes: list[str] = []
    old: dict[str, Any] = {"extent": {}, "runs": []}
    if beside.is_file():
        old = read_settings(beside)
        if other := differences({k: v for k, v in old.items() if k not in ("extent", "runs")}, identity):
            raise ValueError(f"{beside.with_suffix('.jsonl')} was made with other settings: {'; '.join(other)}")
        if old["runs"]:
            notes = differences(_where(old["runs"][-1]), _where(run))
    elif beside.with_suffix(".jsonl").exists():
        raise ValueError(f"{beside.with_suffix('.jsonl')} is there, but not the settings it was made with: {beside}")
    furthest = {name: max(value, old["extent"].get(name, 0)) for name, value in extent.items()}
    runs = old["runs"] if run in old["runs"] else [*old["runs"], run]
    beside.parent.mkdir(parents=True, exist_ok=True)
    write_json(beside, {**identity, "extent": furthest, "runs": runs})
    return notes


def read_settings(path: Path) -> dict[str, Any]:
    """The settings beside a file of rollouts. Raises ValueError for what is no such file or of another format."""
    try:
        settings = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    kinds = {"task": dict, "extent": dict, "runs": list}
    whole = isinstance(settings, dict) and all(isinstance(settings.get(name), kind) for name, kind in kinds.items())
    if not whole or settings.get("format") != FORMAT:
        raise ValueError(f"{path} does not hold the settings of rollouts in format {FORMAT}")
    return settings


PLACE = {"index": int, "rollout": int}
ROLLOUT = {**PLACE, "item": str, "text": str, "completion_ids": list}


def read_rows(path: Path, needs: Mapping[str, Any] = ROLLOUT) -> Iterator[dict[str, Any]]:
    """The rows in a file of rollouts (or grades, by what they need). Raises ValueError, with file and line, for one that is
    none."""
    if not path.is_file() or not path.stat().st_size:
        return
    for row in json_rows(path):
        if lacks := [name for name, kind in needs.items() if not isinstance(row.values.get(name), kind)]:
            raise ValueError(f"{row.where}: this row has no {' and no '.join(lacks)}, only {sorted(row.values)}")
        yield row.values


def place_of(row: Mapping[str, Any]) -> tuple[int, int]:
    """(index of the item, rollout): what rows are ordered by."""
    return row["index"], row["rollout"]


def content(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row without what may differ however often it is made: the time it took, and (by rounding) what was held."""
    return {name: value for name, value in row.items() if name not in ("seconds", "held")}


def prefill_chunk(model: Any) -> int:
    """Tokens of a prompt at a time: many on a GPU, where a kernel attends and nobody waits for a single row; but always the
    same for policies that would hold something else (TOVA)."""
    from kvpop.attachment import attached_policies
    from kvpop.slots.base import CHUNK
    from kvpop.slots.ranked import LONG_CHUNK

    by_arrival = any(policy.by_arrival for policy in attached_policies(model))
    return LONG_CHUNK if model.device.type == "cuda" and not by_arrival else CHUNK


class TaskRollouts:
    """Rollouts of a model, under its attached policy, on the first ``limit`` items of a task (None: all), written to
    ``directory`` as they end.

    A row has "task", "item", "index" (of the item), "rollout", "seed", "prompt_tokens", "prompt_sha256" (of the ids),
    "completion_ids" (a stop token included), "text" (without special tokens), "finish_reason" ("stop" or "length"),
    "decoding", "seconds" (from the moment its row of the cache was free, the other rows beside it), "fields", and where the
    cache grows "held" (tokens a KV head held at the end, on average).
    Up to rounding of batched products a rollout depends on its seed (``rollout_seed``) and the settings alone: not on
    ``rows`` (generated at a time), on ``shard``, or on how many there are. The file only grows; when all that belongs to it
    is there, its rows are put in order of item and rollout.

    ``identity`` is what else rollouts depend on (``model_facts`` and the like), ``run`` what they may differ in; ``notes``
    says in what this run does. ``graph`` and ``compiled`` are the engine's. Raises ValueError for values below 1, a file that
    was made with other settings or other prompts, one that is broken in the middle, or that another process is writing to; a
    last line that was cut off is removed.
    """

    def __init__(
        self, model: Any, tokenizer: Any, task: Task, items: Sequence[Item], directory: str | Path, *,
        decoding: Decoding, shard: Shard = Shard(), limit: int | None = None, rows: int = 8, thinking: bool | None = None,
        file: str | None = None, identity: Mapping[str, Any] | None = None, run: Mapping[str, Any] | None = None,
        graph: bool = False, compiled: bool = False,
    ) -> None:  # fmt: skip
        from kvpop.engine import Engine
        from kvpop.rollouts import end_ids

        check_numbers(decoding, limit, rows)
        # Ids in, ids out: a rollout is turned into text once, at its end.
        self.engine = Engine(model, rows=rows, prefill_chunk=prefill_chunk(model), graph=graph, compiled=compiled)
        self.tokenizer, self.task, self.decoding, self.shard, self.rows = tokenizer, task, decoding, shard, rows
        self.items = list(items)[:limit]
        self.prompts = [item_ids(tokenizer, item, thinking) for item in self.items]
        self.stop = end_ids(model, tokenizer)
        self.generated = 0  # tokens of this run
        self.out = Path(directory) / f"{shard.stem}.jsonl"
        self.settings = {name: value for name, value in asdict(decoding).items() if name != "rollouts"}
        made_with = {
            "format": FORMAT,
            "task": task_facts(task, items, tokenizer, thinking, file),
            "decoding": {**self.settings, "thinking": thinking, "stop": sorted(self.stop)},
            **(identity or {}),
        }
        extent = {"items": len(self.items), "rollouts": decoding.rollouts}
        self.notes = agree(self.out.with_suffix(".json"), made_with, extent, run or {})
        limits = model.config.get_text_config()
        longest, room = max(map(len, self.prompts)), getattr(limits, "max_position_embeddings", None)
        if room and longest + decoding.max_new_tokens > room:
            self.notes.append(
                f"prompts of up to {longest} tokens and {decoding.max_new_tokens} new ones go beyond the {room} positions "
                "that the model was made for"
            )
        self.lengths: list[int] = []  # tokens of the rollouts that are there
        with appending(self.out):
            self._look()

    def _look(self) -> None:
        """What is in the file. Nobody else may be writing to it."""
        cut_last_line(self.out)
        done = set()
        self.lengths.clear()
        digests = [ids_digest(ids) for ids in self.prompts]
        for row in read_rows(self.out):
            i = row["index"]
            if i < len(self.items) and (row["item"], row["prompt_sha256"]) != (self.items[i].id, digests[i]):
                raise ValueError(
                    f"{self.out}: item {row['item']} was asked in other words, or is not item {i} any more"
                )
            done.add(place_of(row))
            self.lengths.append(len(row["completion_ids"]))
        self.done, self.size = done, self.out.stat().st_size
        self.left = len(self.missing)

    @property
    def expected(self) -> list[tuple[int, int]]:
        """(index, rollout) of all that belongs to this file, item by item: an engine takes in the same prompt once."""
        pairs = ((i, r) for i in range(len(self.items)) for r in range(self.decoding.rollouts))
        return [pair for pair in pairs if self.shard.has(*pair)]

    @property
    def missing(self) -> list[tuple[int, int]]:
        """Of the expected those that are not in the file."""
        return [pair for pair in self.expected if pair not in self.done]

    def seconds_left(self, tokens_per_s: float) -> float | None:
        """About how long the rest takes at this speed, from the mean length of the rollouts that are there; None at first."""
        if not self.lengths or not tokens_per_s:
            return None
        begun = sum(len(request.tokens) for request in self.engine.rows if request is not None)
        mean = sum(self.lengths) / len(self.lengths)
        return max(0.0, self.left * mean - begun) / tokens_per_s

    def run(self, on_step: Callable[[], None] | None = None) -> Iterator[dict[str, Any]]:
        """Generate what is missing; gives each row once it is written. ``on_step`` is called after every step of the engine.

        Raises the error that a rollout ends in (logits that are NaN). Stopped anywhere, what is in the file stays.
        """
        running: dict[Any, tuple[int, int]] = {}
        try:
            with appending(self.out) as file:
                if self.out.stat().st_size != self.size:  # another run was faster
                    self._look()
                todo = iter(self.missing)
                while True:
                    # One waits always: an engine with nothing to do forgets the prompt, which the next may have, too.
                    room = 1 + sum(row is None for row in self.engine.rows) - len(self.engine.waiting)
                    for pair in (pair for _, pair in zip(range(room), todo)):
                        running[self._submit(*pair)] = pair
                    if not running:
                        break
                    for event in self.engine.step():
                        self.generated += 1
                        if event.request.finish_reason is not None:
                            pair = running.pop(event.request)
                            row = self._row(event.request, *pair)
                            file.write(json.dumps(row, ensure_ascii=False) + "\n")
                            file.flush()
                            self.done.add(pair)
                            self.left -= 1
                            self.lengths.append(len(row["completion_ids"]))
                            yield row
                    if on_step is not None:
                        on_step()
                sort_lines(self.out, place_of)
                self.size = self.out.stat().st_size
        finally:
            for request in running:
                request.cancel()

    def _submit(self, index: int, rollout: int) -> Any:
        d = self.decoding
        return self.engine.submit(
            self.prompts[index], max_new_tokens=d.max_new_tokens, temperature=d.temperature, top_p=d.top_p, top_k=d.top_k,
            seed=rollout_seed(self.task.name, self.items[index].id, rollout), stop_ids=self.stop,
        )  # fmt: skip

    def _row(self, request: Any, index: int, rollout: int) -> dict[str, Any]:
        if request.error is not None:
            raise request.error
        item = self.items[index]
        return {
            "task": self.task.name,
            "item": item.id,
            "index": index,
            "rollout": rollout,
            "seed": rollout_seed(self.task.name, item.id, rollout),
            "prompt_tokens": len(request.prompt),
            "prompt_sha256": ids_digest(request.prompt),
            "completion_ids": request.tokens,
            "text": self.tokenizer.decode(request.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False),
            "finish_reason": request.finish_reason,
            "decoding": self.settings,
            "seconds": round(request.finished - request.started, 3),
            "fields": dict(item.fields),
            **({} if request.held is None else {"held": round(request.held, 3)}),
        }


def check_numbers(decoding: Decoding, limit: int | None, rows: int) -> None:
    """ValueError, by the name of its option, for what is out of range."""
    from kvpop.sampling import Sampling

    given = {
        "--rollouts": decoding.rollouts, "--max-new-tokens": decoding.max_new_tokens, "--rows": rows,
        "--items": 1 if limit is None else limit,
    }  # fmt: skip
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    try:
        Sampling(decoding.temperature, decoding.top_p, decoding.top_k)
    except ValueError as error:
        raise ValueError(f"--{str(error).replace('_', '-', 1)}") from error


def check_items(task: Task, items: Sequence[Item]) -> None:
    """ValueError unless there are as many items as the task has, no two of one id."""
    if len(items) != task.size:
        raise ValueError(f"{task.name} has {task.size} items, got {len(items)}")
    if twice := sorted(name for name, count in Counter(item.id for item in items).items() if count > 1):
        raise ValueError(f"{task.name} has more than one item of the id {', '.join(twice[:3])}")


def merge(directory: str | Path) -> dict[str, Any]:
    """Put the rollouts of all shards in ``directory`` (and what was merged before) into one file, in order of item and rollout.

    Returns "rollouts" and "expected" (counts), "missing" (list of [item, [rollouts]]; an item that nothing is known of by its
    index, "#17"), "duplicates" (equal rows that were found more than once) and "notes" (in what runs differ).

    Raises FileNotFoundError if there is nothing to merge; ValueError, writing nothing, for shards made with different settings
    and for two rollouts of one place that differ.
    """
    from kvpop.weights import write_json

    directory = Path(directory)
    files = sorted(directory.glob(f"{STEM}-*-of-*.jsonl"))
    if not files:
        raise FileNotFoundError(f"{directory} has no shards to merge: no {STEM}-i-of-n.jsonl")
    whole = directory / f"{STEM}.jsonl"
    files = [whole, *files] if whole.is_file() else files
    identity: dict[str, Any] = {}
    extent: dict[str, int] = {}
    runs: list[Any] = []
    for path in files:
        settings = read_settings(path.with_suffix(".json"))
        own = {key: value for key, value in settings.items() if key not in ("extent", "runs")}
        if identity and (other := differences(identity, own)):
            raise ValueError(f"{path.name} and {files[0].name} were made with different settings: {'; '.join(other)}")
        identity = identity or own
        extent = {name: max(value, extent.get(name, 0)) for name, value in settings["extent"].items()}
        runs += [run for run in settings["runs"] if run not in runs]
    digests: dict[tuple[int, int], tuple[str, str]] = {}
    duplicates, names = 0, {}
    temporary = directory / f".{STEM}.merged.jsonl"
    with temporary.open("w", encoding="utf-8") as out:
        for path in files:
            cut_last_line(path)
            for row in read_rows(path):
                digest = hashlib.sha256(json.dumps(content(row)).encode()).hexdigest()
                known = digests.setdefault(place_of(row), (digest, path.name))
                names[row["index"]] = row["item"]
                if known[0] != digest:
                    temporary.unlink()
                    raise ValueError(
                        f"rollout {row['rollout']} of item {row['item']} is not the same in {known[1]} and {path.name}"
                    )
                if known[1] != path.name:
                    duplicates += 1
                else:
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")
    sort_lines(temporary, place_of)
    write_json(whole.with_suffix(".json"), {**identity, "extent": extent, "runs": runs})
    os.replace(temporary, whole)
    pairs = {(i, r) for i in range(extent["items"]) for r in range(extent["rollouts"])}
    missing: dict[int, list[int]] = {}
    for i, r in sorted(pairs - digests.keys()):
        missing.setdefault(i, []).append(r)
    return {
        "rollouts": len(digests),
        "expected": len(pairs),
        "missing": [[names.get(i, f"#{i}"), rollouts] for i, rollouts in missing.items()],
        "duplicates": duplicates,
        "notes": sorted({note for run in runs for note in differences(_where(runs[0]), _where(run))}),
    }


def _where(run: Mapping[str, Any]) -> dict[str, Any]:
    """Of what a run says that which may explain a difference."""
    return {key: value for key, value in run.items() if key not in ("command", "shard")}

"""Self-distillation data: traces sampled from the model itself, on prompts or on questions that it asks itself.

A trace is a row of a JSONL file that ``kvpop.data`` reads as token ids. The file only grows; what is in it is not made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from kvpop.corpora import champ_statements
from kvpop.data.sources import champ_split_of, tokenizer_fingerprint
from kvpop.engine import Engine, Request
from kvpop.jsonl import cut_last_line, json_rows
from kvpop.rollout import prompt_ids
from kvpop.sampling import Sampling
from kvpop.weights import write_json

FREE = "free"
MARK = "(the question)"
PROMPT_SUFFIXES = (".txt", ".md", ".jsonl")

Kind = Literal["answer", "question"]


@dataclass(frozen=True)
class Prompt:
    """``ids`` to go on from. After a "question", what the model writes is put to it as a prompt; its answer is the trace."""

    ids: tuple[int, ...]
    kind: Kind = "answer"


@dataclass(frozen=True)
class RolloutSettings:
    """How traces are sampled. ``samples`` for each prompt; a question of the model's own may have ``question_tokens``.

    ``rows`` are generated at a time. Raises ValueError for values out of range.
    """

    samples: int = 1
    max_new_tokens: int = 1024
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    rows: int = 8
    question_tokens: int = 256

    def __post_init__(self) -> None:
        for name in ("samples", "max_new_tokens", "rows", "question_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        Sampling(self.temperature, self.top_p, self.top_k, self.seed)

    @property
    def identity(self) -> dict[str, Any]:
        """What a trace depends on: the number of samples and of rows is not part of it."""
        return {name: value for name, value in asdict(self).items() if name not in ("samples", "rows")}

    def trace_seed(self, prompt: int, sample: int, kind: Kind = "answer") -> int:
        """The seed of one trace, or of the question before it, below 2**63."""
        return int.from_bytes(hashlib.sha256(f"{self.seed} {prompt} {sample} {kind}".encode()).digest()[:8]) >> 1


def check_prompts(source: str) -> None:
    """Raise what ``prompts_from`` would raise before it reads anything, without a tokenizer."""
    if source == FREE:
        return
    if source.split(":")[0] == "champ":
        champ_statements(champ_split_of(source))
        return
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"no such file of prompts: {source}")
    if path.suffix not in PROMPT_SUFFIXES:
        raise ValueError(f"{source}: a file of prompts must end in {', '.join(PROMPT_SUFFIXES)}, got {path.suffix!r}")


def prompts_from(source: str, tokenizer: Any, raw: bool = False) -> list[Prompt]:
    """Prompts of a source, as token ids.

    ``source`` is one of

    - a ``.txt`` or ``.md`` file: one prompt a line;
    - a ``.jsonl`` file: one a line, from its field "prompt", or "messages" up to where the model is to speak;
    - ``"champ"`` (or ``"champ:validation"``, ``"champ:test"``): the problems' statements, see ``kvpop.corpora``;
    - ``"free"``: a single prompt, from which the model writes a question of its own and then answers it; without a chat
      template it writes what it likes after its BOS token.

    Text is a user's message in the chat template, if there is one, and as it is if ``raw``.

    Raises FileNotFoundError for a file that does not exist, ValueError for one without prompts, a row without one, or if "free"
    has nothing to start from.
    """
    check_prompts(source)
    if source == FREE:
        return [_free_prompt(tokenizer, raw)]
    if source.split(":")[0] == "champ":
        texts: list[Any] = list(champ_statements(champ_split_of(source)))
    elif source.endswith(".jsonl"):
        texts = [_prompt_of(row.values, row.where) for row in json_rows(Path(source))]
    else:
        texts = [line for line in Path(source).read_text(encoding="utf-8").splitlines() if line.strip()]
    if not texts:
        raise ValueError(f"the file {source} has no prompts")
    return [Prompt(_ids(tokenizer, text, raw)) for text in texts]


def _prompt_of(values: dict[str, Any], where: str) -> Any:
    prompt = values.get("prompt", values.get("messages"))
    if not isinstance(prompt, str | list) or not prompt:
        raise ValueError(f"{where}: neither 'prompt' nor 'messages', only {sorted(values)}")
    return prompt


def _ids(tokenizer: Any, prompt: Any, raw: bool) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(prompt_ids(tokenizer, prompt, raw)[0].tolist())
    if not tokenizer.chat_template:
        raise ValueError("prompts of messages need a tokenizer with a chat template")
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _free_prompt(tokenizer: Any, raw: bool) -> Prompt:
    """What stands before a user's first message; else the token that begins (or ends) a text."""
    if tokenizer.chat_template and not raw:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
        before, found, _ = chat.partition(MARK)
        ids = tokenizer.encode(before, add_special_tokens=False)
        if found and ids:
            return Prompt(tuple(ids), "question")
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if first is None:
        raise ValueError(
            "the prompts 'free' need a chat template, or a token that begins or ends a text: there is none"
        )
    return Prompt((first,))


class Rollouts:
    """Traces of a model under its attached policy, written to ``out`` (.jsonl) as they end.

    A row has "tokens" (prompt and answer, the stop token included), "text" (the same, special tokens shown), "prompt_tokens",
    "prompt_index", "sample", "finish_reason" ("stop", "length", or "empty": no tokens, a question without words), "seed", and
    "tokenizer" (a fingerprint, so that no other reads the ids). Each trace has a seed of its own: up to rounding of batched
    products it does not depend on what else is generated. Settings stand beside the file, in ``out`` with the suffix .json.

    ``identity`` is what else traces depend on, the names of model and policy say. Raises ValueError for a file that is broken
    in the middle or was made with other settings (which are named); a last line that was cut off is removed.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, prompts: list[Prompt], out: str | Path, settings: RolloutSettings,
        identity: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.engine = Engine(model, rows=settings.rows)  # ids in, ids out: a trace is turned into text once, at its end
        self.tokenizer, self.prompts, self.out, self.settings = tokenizer, prompts, Path(out), settings
        self.fingerprint = tokenizer_fingerprint(tokenizer)
        self.stop = end_ids(model, tokenizer)
        self.generated = 0  # tokens of this run, questions included
        digest = hashlib.sha256(json.dumps([asdict(prompt) for prompt in prompts]).encode()).hexdigest()[:16]
        made_with = (identity or {}) | settings.identity | {"tokenizer": self.fingerprint, "prompts": digest}
        check_out(self.out)
        _agree(self.out, made_with)
        self.done = _done(self.out)

    @property
    def missing(self) -> list[tuple[int, int]]:
        """(prompt, sample) of every trace that is not in the file: the first samples of all prompts first."""
        pairs = ((prompt, sample) for sample in range(self.settings.samples) for prompt in range(len(self.prompts)))
        return [pair for pair in pairs if pair not in self.done]

    def run(self, on_step: Callable[[], None] | None = None) -> Iterator[dict[str, Any]]:
        """Generate what is missing; gives each row once it is written. ``on_step`` is called after every step of the engine.

        Raises the error that a trace ends in (logits that are NaN). Stopped anywhere, what is in the file stays.
        """
        todo = iter(self.missing)
        running: dict[Request, tuple[int, int, Kind]] = {}
        try:
            with self.out.open("a", encoding="utf-8") as file:
                while True:
                    while len(self.engine.waiting) < self.settings.rows and (pair := next(todo, None)) is not None:
                        prompt = self.prompts[pair[0]]
                        running[self._submit(prompt.ids, pair, prompt.kind)] = (*pair, prompt.kind)
                    if not running:
                        return
                    for event in self.engine.step():
                        self.generated += 1
                        if event.request.finish_reason is not None:
                            ended = running.pop(event.request)
                            row = self._row(event.request, ended, running)
                            if row is not None:
                                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                                file.flush()
                                self.done.add(ended[:2])
                                yield row
                    if on_step is not None:
                        on_step()
        finally:
            for request in running:
                request.cancel()

    def _submit(self, ids: Sequence[int], pair: tuple[int, int], kind: Kind) -> Request:
        s = self.settings
        return self.engine.submit(
            ids, max_new_tokens=s.question_tokens if kind == "question" else s.max_new_tokens, temperature=s.temperature,
            top_p=s.top_p, top_k=s.top_k, seed=s.trace_seed(*pair, kind), stop_ids=self.stop,
        )  # fmt: skip

    def _row(
        self, request: Request, ended: tuple[int, int, Kind], running: dict[Request, tuple[int, int, Kind]]
    ) -> dict[str, Any] | None:
        """The row of a trace that has ended; None after a question, which is put to the model now."""
        if request.error is not None:
            raise request.error
        prompt, sample, kind = ended
        tokens, reason = [*request.prompt, *request.tokens], str(request.finish_reason)
        if kind == "question":
            question = self.tokenizer.decode(request.tokens, skip_special_tokens=True).strip()
            if question:
                ids = _ids(self.tokenizer, question, raw=False)
                running[self._submit(ids, (prompt, sample), "answer")] = (prompt, sample, "answer")
                return None
            tokens, reason = [], "empty"
        return {
            "prompt_index": prompt,
            "sample": sample,
            "seed": self.settings.trace_seed(prompt, sample, "answer"),
            "finish_reason": reason,
            "prompt_tokens": len(request.prompt) if tokens else 0,
            "tokenizer": self.fingerprint,
            "tokens": tokens,
            "text": self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        }


def end_ids(model: PreTrainedModel, tokenizer: Any) -> set[int]:
    """The tokens that end an answer: the tokenizer's, and those of the model's generation config."""
    ends = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}


def check_out(out: Path) -> None:
    """ValueError for a file of traces that is not called .jsonl."""
    if out.suffix != ".jsonl":
        raise ValueError(f"traces go to a file that ends in .jsonl, got {out}")


def _agree(out: Path, made_with: dict[str, Any]) -> None:
    """Write down what traces are made with, or ValueError if those in the file were made with something else."""
    beside = out.with_suffix(".json")
    if beside.is_file():
        old = json.loads(beside.read_text())
        other = [
            f"{name} {old.get(name)!r}, now {value!r}" for name, value in made_with.items() if old.get(name) != value
        ]
        if other:
            raise ValueError(f"{out} was made with other settings: {'; '.join(other)}")
        return
    if out.exists():
        raise ValueError(f"{out} is there, but not the settings it was made with: {beside}")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(beside, made_with)


def _done(out: Path) -> set[tuple[int, int]]:
    """(prompt, sample) of the traces in the file, after a last line that was cut off is removed."""
    done = set()
    for row in json_rows(out) if cut_last_line(out) else ():
        prompt, sample = row.values.get("prompt_index"), row.values.get("sample")
        if not isinstance(prompt, int) or not isinstance(sample, int):
            raise ValueError(f"{row.where}: no trace, it has no prompt_index and sample, only {sorted(row.values)}")
        done.add((prompt, sample))
    return done

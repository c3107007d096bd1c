"""Generation as a plain loop: prefill in chunks, then one token at a time, with the memory in sight at every step."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpop.attachment import attached_policies, cache_argument
from kvpop.budget import dense_bytes
from kvpop.cache import BoundedCache
from kvpop.sampling import Sampling, checked, draw

# Shapes: S new tokens of the prompt, V vocabulary. Batch is 1 throughout.


@dataclass(frozen=True)
class Step:
    """One generated token and what it took.

    ``seen`` tokens were taken in before it was chosen, the fullest KV head holds ``held`` of them, in a cache of ``nbytes``
    bytes; a dense cache of the seen tokens needs ``dense_bytes`` (keys and values). ``seconds`` since the token before
    (for the first token: the prefill).
    """

    token: int
    seen: int
    held: int
    nbytes: int
    dense_bytes: int
    seconds: float


def generate(
    model: PreTrainedModel,
    ids_1S: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    cache: BoundedCache | None = None,
    prefill_chunk: int = 512,
    generator: torch.Generator | None = None,
) -> Iterator[Step]:
    """Tokens that follow ``ids_1S`` [1, S] under the attached policy, one ``Step`` each; a stop token is the last one.

    Temperature 0 takes the most likely token. Above 0, tokens are drawn from the softmax at that temperature of the
    ``top_k`` likeliest (0: all), cut to the likeliest that hold ``top_p`` of the mass; the draw depends on ``seed`` only.
    A ``cache`` that was used before is continued; afterwards it holds the past of the last token, not that token itself.
    A ``generator`` (as ``Sampling.generator`` makes one) takes the place of the seed and is left where the draws ended.

    Raises ValueError for ids of another shape, settings out of range, or a model without a policy; while generating, for
    logits that are NaN.
    """
    if ids_1S.ndim != 2 or len(ids_1S) != 1 or ids_1S.shape[1] < 1:
        raise ValueError(f"the prompt must be ids of shape [1, S] with S at least 1, got {tuple(ids_1S.shape)}")
    for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    sampling = Sampling(temperature, top_p, top_k, seed)
    cache = BoundedCache(model) if cache is None else cache
    chance = sampling.uniforms(generator)
    return _steps(model, ids_1S, max_new_tokens, sampling, chance, frozenset(stop_ids), cache, prefill_chunk)


def pass_options(model: PreTrainedModel) -> dict[str, Any]:
    """What every forward pass of generation is given beside its tokens and its cache: logits of the last token will do."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    return {"use_cache": True, **last}


@torch.no_grad()
def _steps(
    model: PreTrainedModel,
    ids_1S: Tensor,
    count: int,
    sampling: Sampling,
    uniforms: Iterator[float],
    stop: frozenset[int],
    cache: BoundedCache,
    chunk: int,
) -> Iterator[Step]:
    device = next(model.parameters()).device
    keywords = {cache_argument(model): cache, **pass_options(model)}
    shape = attached_policies(model)[0].shape
    fresh_1n = ids_1S.to(device)
    seen = cache.tokens_seen()[0] if cache.stores else 0  # real tokens: padding of earlier turns has no position
    for _ in range(count):
        started = time.perf_counter()
        for part_1n in fresh_1n.split(chunk, dim=1):
            position_1n = torch.arange(seen, seen + part_1n.shape[1], device=device)[None]
            logits_1V = model(input_ids=part_1n, position_ids=position_1n, **keywords).logits[:, -1]
            seen += part_1n.shape[1]
        token = checked(int(draw(logits_1V, [sampling], [next(uniforms)])))
        seconds = time.perf_counter() - started
        dense = dense_bytes(
            seen,
            layers=len(cache.layers),
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            element_size=cache.stores[0].keys.element_size(),
        )
        yield Step(token, seen, cache.rows_held(), cache.nbytes(), dense, seconds)
        if token in stop:
            return
        fresh_1n = torch.tensor([[token]], device=device)


class TextStream:
    """Token ids to text, piece by piece: what is said so far never changes, so a half-finished character waits."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.text = ""
        self._start = 0  # decoding starts a little earlier than what is new: tokenizers treat the first token apart
        self._said = 0

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def put(self, token: int, last: bool = False) -> str:
        """The text that ``token`` completes, perhaps none; ``last`` gives out what was waiting."""
        self.tokens.append(token)
        return self.flush() if last else self._say(whole=True)

    def flush(self) -> str:
        """The text that was waiting: nothing more will come."""
        return self._say(whole=False)

    def _say(self, whole: bool) -> str:
        before = self._decode(self.tokens[self._start : self._said])
        now = self._decode(self.tokens[self._start :])
        if whole and now.endswith("\ufffd"):
            return ""
        self._start, self._said = self._said, len(self.tokens)
        fresh = now[len(before) :]
        self.text += fresh
        return fresh


class Words:
    """Token ids to text, piece by piece, up to the first stop string: what may be the beginning of one waits."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.stream, self.stop = TextStream(tokenizer), stop
        self.stopped = False
        self._waiting = ""

    def put(self, token: int | None, last: bool = False) -> str:
        """The text that is certain now; ``last`` gives out what was waiting. A token of None adds no text."""
        text = self._waiting + (self.stream.flush() if token is None else self.stream.put(token, last))
        found = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        self.stopped = bool(found)
        certain = min(found) if found else len(text) - (0 if last else self._beginning(text))
        self._waiting = text[certain:]
        return text[:certain]

    def _beginning(self, text: str) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        return max((n for stop in self.stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


def prompt_ids(tokenizer: Any, text: str, raw: bool = False, after: int | None = None) -> Tensor:
    """Ids [1, S] of a prompt: as a user's message in the tokenizer's chat template, or as it is (``raw``, or no template).

    ``after``: the last token of an answer that this message follows. Then the ids are what the template puts behind an
    answer (its end, unless that token is it) and the new message.
    """
    if raw or not tokenizer.chat_template:
        return torch.tensor([tokenizer.encode(text, add_special_tokens=after is None)])
    answer = "(the answer)"
    before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}] if after is not None else []
    chat = tokenizer.apply_chat_template(
        [*before, {"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    if before:
        chat = chat[chat.index(answer) + len(answer) :]
    ids = tokenizer.encode(chat, add_special_tokens=False)
    return torch.tensor([ids[1:] if ids and ids[0] == after else ids])


class StatusLine:
    """The bottom row of the terminal behind stderr, kept out of the way of the text that scrolls above it.

    Text and status usually share a terminal, so the row is taken out of the scrolling region. Without a terminal nothing
    is shown. Text on stdout must be flushed before ``show``.
    """

    def __init__(self, every: float = 0.1) -> None:
        self.live = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self.every, self._shown, self._rows = every, 0.0, 0

    def show(self, text: str) -> None:
        if not self.live or time.perf_counter() - self._shown < self.every:
            return
        self._shown = time.perf_counter()
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
        if rows < 3:
            return
        if rows != self._rows:  # first time, or another size: one line down and up again makes room, then fence it off
            self._rows = rows
            self._write(f"\x1bD\x1b[1A\x1b7\x1b[1;{rows - 1}r\x1b8")
        self._write(f"\x1b7\x1b[{rows};1H\x1b[2K\x1b[7m{text[: columns - 1]}\x1b[0m\x1b8")

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *args: object) -> None:
        if self._rows:
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")

    @staticmethod
    def _write(codes: str) -> None:
        sys.stderr.write(codes)
        sys.stderr.flush()

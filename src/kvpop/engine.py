"""Continuous batching: any number of prompts through a fixed number of rows.

A sequence's bounded cache has a constant size, so one cache of [rows, H, M, D] with a position per row serves them all:
a request takes a free row, is prefilled, decodes together with the others, and leaves its row to the next one.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpop.attachment import cache_argument
from kvpop.cache import BoundedCache
from kvpop.capture import WARM, Captured, capture, compiled_layers
from kvpop.projections import fused
from kvpop.rollout import Words, pass_options, prompt_ids
from kvpop.sampling import Sampling, checked, draw, upload

# Shapes: B rows, n new tokens of one prompt, V vocabulary.

FinishReason = Literal["stop", "length", "cancelled", "error"]
SHORT = 512
"""Pieces of prompts up to this length are padded to no more than this, if they are captured."""
AHEAD = 64
"""Steps that memory is reserved for at a time, where stores grow."""


@dataclass(eq=False)
class Request:
    """A prompt and what has become of it so far.

    ``tokens`` are what was generated, a stop token included. ``text`` is their text without special tokens, a stop token,
    or a stop string and what follows it; what may yet become a stop string or a whole character is held back. ``seen``
    tokens were taken in by the model. ``finish_reason`` is None until the end; ``error`` says more if it is "error".
    ``held`` is how many tokens a KV head held at the end, on average over the layers whose stores grow (without such, or
    before, None). Times are seconds of ``time.perf_counter``; ``started`` is when it got a row.
    """

    id: int
    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling
    stop_ids: frozenset[int]
    engine: Engine = field(repr=False)
    cache: BoundedCache | None = field(repr=False)  # its own, until it is prefilled
    words: Words | None = field(repr=False)
    uniforms: Iterator[float] = field(repr=False)
    submitted: float
    pinned: tuple[tuple[int, int], ...] = ()
    row: int | None = None
    seen: int = 0
    held: float | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    error: BaseException | None = None
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def cancel(self) -> None:
        """End it now, wherever it is, and free its row. Does nothing once it has finished; ``text`` stays as it is."""
        self.engine._end(self, "cancelled")

    def take(self, token: int) -> str:
        """Add a token; returns the text it completes, and sets ``finish_reason`` if it is the last."""
        self.tokens.append(checked(token))
        self.first_token = self.first_token or time.perf_counter()
        full = len(self.tokens) == self.max_new_tokens
        reason: FinishReason | None = "stop" if token in self.stop_ids else "length" if full else None
        fresh = ""
        if self.words is not None:
            fresh = self.words.put(None if reason == "stop" else token, last=reason is not None)
            self.text += fresh
            reason = "stop" if self.words.stopped else reason
        if reason is not None:
            self.engine._end(self, reason)
        return fresh


@dataclass(frozen=True)
class Event:
    """One more token of a request, and the text that it completes (perhaps none).

    ``token`` is None if the request ended in an error instead. Whether it was the last: ``request.finish_reason``.
    """

    request: Request
    token: int | None
    text: str


def _at_least_1(name: str, value: int) -> None:
    if not hasattr(value, "__index__") or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _addresses(cache: BoundedCache) -> list[int]:
    """Of all that a step reads and writes; but for what was reserved, of which ``reserve`` says whether it moved."""
    return [x.data_ptr() for store in cache.stores if not store.fixed for x in store.tensors().values()]


class Engine:
    """Generation for many requests at once; each gets what ``rollout.generate`` gives it alone (in low precision up to
    rounding).

    A step takes in at most ``prefill_chunk`` tokens of prompts, then decodes one token of every row that is ready: a long
    prompt does not stall the others. Prompts are prefilled alone, in order of submission, cut every ``prefill_chunk`` tokens;
    one that is the same as the last, pins included, is copied from it as long as the engine has anything to do (do not change
    weights meanwhile). That takes the memory of one row more, as taking a prompt in does.
    Decoding has static shapes, and rows that are idle change nothing. Not for several threads at once.

    ``graph``: decoding steps are one CUDA graph, captured at the first of them and again if a store had to move (pins, pages of
    DMS, columns of dense layers), with projections fused (``projections.fuse``). None: where there can be one, on a GPU with
    stores of a fixed size or that can reserve memory. ``compiled``: with its decoder layers compiled, which takes a minute at
    the first step; of the kinds that ``projections.step`` knows, in half precision, little is left to compile.

    ``prefill_graph``: pieces of prompts are graphs as well, padded in front to ``prefill_chunk`` tokens, or to 512 if that is
    enough: launching hundreds of kernels a layer takes longer than their work, for prompts of some hundred tokens or a small
    model. None: where decoding steps are one and stores have a fixed size. Prompts with pins are taken in as without it. An
    engine keeps the memory that a piece of either length takes.

    An error with the text or the logits of one request ends that request alone. If a pass of the model breaks off (out of
    memory, an interrupt), what it has written is unknown: every request that has a row ends with that error, it is raised,
    and the engine goes on with those that wait.

    Raises ValueError for a model without a policy, for settings below 1, and for graphs where there can be none.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any = None, *, rows: int = 8, prefill_chunk: int = 512,
        graph: bool | None = None, compiled: bool = False, prefill_graph: bool | None = None,
    ) -> None:  # fmt: skip
        for name, value in (("rows", rows), ("prefill_chunk", prefill_chunk)):
            _at_least_1(name, value)
        self.policies = BoundedCache(model).policies  # raises if there is no policy
        self.model, self.tokenizer, self.prefill_chunk = model, tokenizer, prefill_chunk
        self.device = next(model.parameters()).device
        possible = self.device.type == "cuda" and all(policy.bounded or policy.reserves for policy in self.policies)
        if graph and not possible:
            raise ValueError(
                f"graph=True needs a GPU and stores of a fixed size or that reserve, got {self.policies[0].label} on "
                f"{self.device}"
            )
        self.graph, self.compiled = possible if graph is None else graph, compiled
        if compiled and not self.graph:
            raise ValueError("compiled=True is for steps that are captured as a graph: leave it out")
        self.bounded = all(policy.bounded for policy in self.policies)
        capturable = self.graph and self.bounded
        if prefill_graph and not capturable:
            raise ValueError(
                f"prefill_graph=True needs graph=True and stores of a fixed size, got graph={self.graph} and "
                f"{self.policies[0].label}"
            )
        self.prefill_graph = capturable if prefill_graph is None else prefill_graph
        self._pieces: dict[int, tuple[Captured, Tensor]] = {}  # by length
        self._prompt: BoundedCache | None = None  # of one row, into which captured pieces are taken
        self._captured: Captured | None = None
        self._inputs = torch.empty(0)
        self._addresses: list[int] = []
        self._reserved = 0  # steps that all rows have memory for
        self.cache: BoundedCache | None = None  # made like the first one that is prefilled
        self.rows: list[Request | None] = [None] * rows
        self.waiting: deque[Request] = deque()
        self._last: tuple[Request, BoundedCache, Tensor] | None = None  # the last prompt: its cache and last logits [V]
        self._ids = itertools.count()
        self._cache_argument, self._options = cache_argument(model), pass_options(model)

    def submit(
        self,
        prompt: str | Sequence[int] | Tensor,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        stop_ids: Collection[int] = (),
        pinned: Sequence[tuple[int, int]] = (),
    ) -> Request:
        """Queue a prompt: text as it is (chats: ``rollout.prompt_ids``), or token ids, [S] or [1, S] if they are a tensor.

        Generation ends after ``max_new_tokens``, at a token of ``stop_ids``, or when the text contains a string of ``stop``.
        Tokens are chosen as ``Sampling`` says. ``pinned`` are spans of positions as in ``BoundedCache.pin``.

        Raises ValueError, and queues nothing, if anything is empty, out of range, does not fit, or needs a tokenizer that
        the engine does not have.
        """
        _at_least_1("max_new_tokens", max_new_tokens)
        sampling = Sampling(temperature, top_p, top_k, seed)
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in strings:
            raise ValueError("a stop string must have at least 1 character, got ''")
        if self.tokenizer is None and (strings or isinstance(prompt, str)):
            raise ValueError("prompts of text and stop strings need a tokenizer: Engine(model, tokenizer)")
        if isinstance(prompt, str):
            prompt = prompt_ids(self.tokenizer, prompt, raw=True)
        if isinstance(prompt, Tensor):
            if prompt.ndim != 1 and (prompt.ndim != 2 or len(prompt) != 1):
                raise ValueError(f"the prompt must be ids of shape [S] or [1, S], got {tuple(prompt.shape)}")
            prompt = prompt.flatten().tolist()
        ids, last_ids = self._checked_ids("the prompt", prompt), self._checked_ids("stop_ids", stop_ids)
        if not ids:
            raise ValueError("the prompt must have at least 1 token, got none")
        cache = BoundedCache(self.model)
        spans = tuple((operator.index(start), operator.index(end)) for start, end in pinned)
        if spans:
            cache.pin(list(spans))
        words = None if self.tokenizer is None else Words(self.tokenizer, strings)
        request = Request(
            next(self._ids), ids, max_new_tokens, sampling, frozenset(last_ids), self, cache, words, sampling.uniforms(),
            time.perf_counter(), spans,
        )  # fmt: skip
        self.waiting.append(request)
        return request

    def _checked_ids(self, name: str, ids: Iterable[int]) -> list[int]:
        size = self.model.config.get_text_config().vocab_size
        for token in (ids := list(ids)):
            if not hasattr(token, "__index__") or not 0 <= token < size:
                raise ValueError(
                    f"{name} must hold token ids of the model's vocabulary, 0 to {size - 1}, got {token!r}"
                )
        return [operator.index(token) for token in ids]

    @property
    def busy(self) -> bool:
        """Whether anything submitted has not finished."""
        return bool(self.waiting) or any(self.rows)

    @torch.no_grad()
    def step(self) -> list[Event]:
        """A piece of the prompts, then one token for every row that decodes. Waits for the device once."""
        if not all(policy.attached for policy in self.policies):
            raise ValueError("the policy of this engine is no longer attached to its model: make a new Engine")
        try:
            due = self._prefill() + self._decode()
            if not due:
                return []
            requests = [request for request, _ in due]
            token_B = draw(
                torch.stack([logits_V for _, logits_V in due]),
                [request.sampling for request in requests],
                [next(request.uniforms) for request in requests],
            )
            return [self._take(request, token) for request, token in zip(requests, token_B.tolist())]
        except BaseException as error:
            self._captured = self._last = None
            self._pieces.clear()
            for request in filter(None, self.rows):
                self._end(request, "error", error)
            raise

    def _prefill(self) -> list[tuple[Request, Tensor]]:
        """Take in a step's share of the prompts; requests whose prompt is complete, each with its last logits [V]."""
        complete, room = [], self.prefill_chunk
        while (request := self._next_prompt()) is not None and request.cache is not None and request.row is not None:
            if not self._known(request):
                part = request.prompt[request.seen : request.seen + self.prefill_chunk]
                if len(part) > room:
                    break
                room -= len(part)
                self._last = None  # its memory is that of the next
                logits_V = self._take_in(request, part)
                request.seen += len(part)
                if request.seen < len(request.prompt):
                    continue
                self._last = (request, request.cache, logits_V)
            complete.append((request, self._placed(request, request.row)))
        return complete

    def _known(self, request: Request) -> bool:
        """Whether the prompt is the last one."""
        last = None if self._last is None else self._last[0]
        return last is not None and (last.prompt, last.pinned) == (request.prompt, request.pinned)

    def _placed(self, request: Request, row: int) -> Tensor:
        """Copy the last prompt's cache, which is this one's, into its row; the prompt's last logits [V]."""
        assert self._last is not None
        _, cache, logits_V = self._last
        if self.cache is None:
            self.cache = cache.like(len(self.rows))
        self.cache.put(row, cache)
        self._reserved = 0
        request.seen, request.cache = len(request.prompt), None
        return logits_V

    def _take_in(self, request: Request, part: list[int]) -> Tensor:
        """The logits [V] behind the next piece of a prompt, which goes into the request's cache."""
        positions = range(request.seen, request.seen + len(part))
        if not self.prefill_graph or request.pinned:
            assert request.cache is not None
            ids_1n, position_1n = upload([[part], [positions]], self.device)
            return self._forward(request.cache, ids_1n, position_1n)[0]
        if self._prompt is None:
            self._prompt = BoundedCache(self.model)
            self._prompt.allocate(1)
        if request.seen == 0:
            self._prompt.clear(0)
            request.cache = self._prompt
        size = min(SHORT, self.prefill_chunk) if len(part) <= SHORT else self.prefill_chunk
        pad = [0] * (size - len(part))
        inputs_31n = upload([[pad + part], [[*pad, *positions]], [pad + [1] * len(part)]], self.device)
        if size not in self._pieces:
            self._pieces[size] = self._capture(self._prompt, inputs_31n)
        captured, given = self._pieces[size]
        given.copy_(inputs_31n)
        return captured()[0].clone()

    def _capture(self, cache: BoundedCache, like_3Bn: Tensor, compiled: bool = False) -> tuple[Captured, Tensor]:
        """A pass over such ids, positions and which of them there are; and the tensor that it takes them from."""
        with torch.inference_mode(False):  # where this begins says nothing of where it goes on
            inputs = torch.zeros_like(like_3Bn)  # nothing is there: warming up changes nothing
        with compiled_layers(self.model, fused=True) if compiled else fused(self.model):
            return capture(lambda: self._forward(cache, *inputs)), inputs

    def _next_prompt(self) -> Request | None:
        """The request whose prompt is being taken in; else the first that waits, if a row is free."""
        for request in filter(None, self.rows):
            if request.seen < len(request.prompt):
                return request
        if not self.waiting or None not in self.rows:
            return None
        request = self.waiting.popleft()
        request.row, request.started = self.rows.index(None), time.perf_counter()
        self.rows[request.row] = request
        return request

    def _decode(self) -> list[tuple[Request, Tensor]]:
        """Take in the last token of every row that has one; those requests, each with its next logits [V]."""
        active = [request if request is not None and request.tokens else None for request in self.rows]
        if self.cache is None or not any(active):
            return []
        inputs = [(0, 0, 0) if request is None else (request.tokens[-1], request.seen, 1) for request in active]
        logits_BV = self._step(self.cache, upload(list(zip(*inputs)), self.device)[..., None])
        for request in filter(None, active):
            request.seen += 1
        return [(request, logits_V) for request, logits_V in zip(active, logits_BV) if request is not None]

    def _step(self, cache: BoundedCache, inputs_3B1: Tensor) -> Tensor:
        """The next logits [B, V] from ids, positions and which rows there are; a captured step's are at one address."""
        if not self.graph:
            return self._forward(cache, *inputs_3B1)
        if self._reserved < 1:
            moved = cache.reserve(AHEAD + WARM + 1)
            if moved or self._addresses != _addresses(cache):  # pins make room for themselves
                self._captured = None
            self._reserved = AHEAD
        self._reserved -= 1
        if self._captured is None:
            self._captured, self._inputs = self._capture(cache, inputs_3B1, self.compiled)
            self._addresses = _addresses(cache)
        self._inputs.copy_(inputs_3B1)
        return self._captured()

    def _forward(self, cache: BoundedCache, ids: Tensor, position: Tensor, valid: Tensor | None = None) -> Tensor:
        keywords = {self._cache_argument: cache, **self._options}
        return self.model(input_ids=ids, position_ids=position, attention_mask=valid, **keywords).logits[:, -1]

    def _take(self, request: Request, token: int) -> Event:
        try:
            return Event(request, token, request.take(token))
        except Exception as error:
            self._end(request, "error", error)
            return Event(request, None, "")

    def _end(self, request: Request, reason: FinishReason, error: BaseException | None = None) -> None:
        if request.finish_reason is not None:
            return
        request.finish_reason, request.error, request.finished = reason, error, time.perf_counter()
        request.cache = None
        if request.row is None:
            self.waiting.remove(request)
        else:
            self.rows[request.row] = None
            if self.cache is not None:
                if reason in ("stop", "length") and not self.bounded:
                    request.held = self.cache.tokens_held(request.row)
                self.cache.clear(request.row)
                self._reserved = 0
            request.row = None
        if not self.busy:
            self._last = None  # weights may change before the next

    def run(self) -> Iterator[Event]:
        """Step until everything submitted has finished. More may be submitted, and requests cancelled, meanwhile."""
        while self.busy:
            for event in self.step():
                if event.request.finish_reason != "cancelled":
                    yield event

    def stream(self, request: Request) -> Iterator[str]:
        """The text of one request from its beginning, as it becomes certain; steps the engine, and so all others, too.

        Raises the request's error if it ends in one, and ValueError for a request of another engine.
        """
        if request.engine is not self:
            raise ValueError(f"request {request.id} was submitted to another engine")
        said = 0
        while True:
            if said < len(request.text):
                piece = request.text[said:]
                said += len(piece)
                yield piece
            elif request.finish_reason is None:
                self.step()
            else:
                break
        if request.error is not None:
            raise request.error

    def generate(self, prompts: Iterable[str | Sequence[int] | Tensor], **settings: Any) -> list[Request]:
        """Submit prompts with the same settings (see ``submit``) and finish them all; the requests in the given order.

        Raises the first error that a request ended in. Whatever is raised, none of these requests is left unfinished.
        """
        requests: list[Request] = []
        try:
            for prompt in prompts:
                requests.append(self.submit(prompt, **settings))
            while any(request.finish_reason is None for request in requests):
                self.step()
        finally:
            for request in requests:
                request.cancel()
        for request in requests:
            if request.error is not None:
                raise request.error
        return requests

"""BoundedCache: a transformers ``Cache`` that holds only what its policy retains."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvpop.policies import LayerPolicy
from kvpop.policies.base import HANDOVER
from kvpop.slots import CHUNK, Slots
from kvpop.slots.base import stay

IMPLEMENTATION = "kvpop"
"""The name under which the attention function is registered with transformers."""

ROLLBACK = 32
"""How many tokens can be taken back once transformers asks for it without saying how many."""

Spans = Sequence[tuple[int, int]]
"""Half-open ranges of positions [start, stop), counted in a row's real tokens from 0."""


class BoundedLayer(CacheLayerMixin):
    """One layer's store behind the transformers interface.

    ``update`` does not concatenate: it hands its store to the layer policy, and the attention function takes it from there
    (queries are needed to attend, and the policy decides what is kept). Lengths are tokens *seen*, padding included.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, policy: LayerPolicy, config: Any, weight: Tensor, rollback: int = 0) -> None:
        super().__init__()
        self.policy, self.config, self.weight, self.rollback = policy, config, weight, rollback
        self.slots: Slots | None = None
        self.home = weight.device
        self.spans: list[list[tuple[int, int]]] | None = None

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        return (self.policy.bounded or (self.slots is not None and self.slots.fixed)) and not self.rollback

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundedLayer:
        """A copy with its own store, for the same model: the policy and its scorer are shared."""
        memo.update({id(module): module for module in self.policy.modules()})
        twin = type(self)(self.policy, self.config, self.weight, self.rollback)
        with torch.inference_mode(False):
            twin.slots, twin.is_initialized = copy.deepcopy(self.slots, memo), self.is_initialized
        twin.spans, twin.home = self.spans, self.home
        return twin

    @property
    def tokens(self) -> Tensor | int:
        return 0 if self.slots is None else self.slots.taken

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        with torch.inference_mode(False):  # so that a cache filled in inference mode can go on outside of it
            slots = self.policy.new_slots(key_states, value_states)
        if self.rollback:
            slots.record(self.rollback)
        if self.spans is not None and self.policy.pins_apply:
            slots.pin(_table(self.spans, slots.seen))
        stay(*slots.tensors().values(), slots.taken)
        self.slots, self.home = slots, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.policy.attached:
            raise ValueError(
                "this cache belongs to a policy that is no longer attached: make a new BoundedCache(model)"
            )
        if self.config._attn_implementation != IMPLEMENTATION:
            raise ValueError(
                f"the model now attends with {self.config._attn_implementation!r}, not {IMPLEMENTATION!r}: attach anew"
            )
        if self.policy.shape.layer == 0:
            HANDOVER.take()  # what an interrupted call may have left
        if key_states.dtype != value_states.dtype:  # autocast computes them apart
            key_states = key_states.to(value_states.dtype)
        rows, dtype = len(key_states), key_states.dtype
        if self.slots is not None and (len(self.slots.seen), self.slots.keys.dtype) != (rows, dtype):
            if not self.empty:
                held = f"{len(self.slots.seen)} rows of {self.slots.keys.dtype}"
                given = f"{rows} rows of {dtype}"
                raise ValueError(f"the cache holds {held}, but the input has {given}")
            self.slots = None  # reset, and now used for another batch
        if self.slots is None:
            if torch.compiler.is_compiling():
                raise ValueError("a compiled call cannot make the stores of an empty cache: cache.allocate(rows) first")
            self.lazy_initialization(key_states, value_states)
        assert self.slots is not None
        HANDOVER.give(self.policy, self.slots, key_states, value_states)
        return key_states, value_states

    @property
    def empty(self) -> bool:
        """Whether no row has taken in anything (asks the device)."""
        return self.slots is None or not (int(self.slots.taken) or bool(self.slots.seen.any()))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0  # type: ignore[return-value]

    def get_seq_length(self) -> int:
        tokens = self.tokens  # a copy: the store counts in place
        return tokens if isinstance(tokens, int) else tokens.clone()  # type: ignore[return-value]

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        if self.slots is not None:
            self.slots.clear()
        self.spans = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.slots is not None:
            self.slots.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.slots is not None:
            self.slots.select(torch.arange(len(self.slots.seen))[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.slots is not None:
            self.slots.select(torch.arange(len(self.slots.seen)).repeat_interleave(repeats))

    def check_pins(self, spans: list[tuple[int, int]], row: int, seen: int) -> None:
        """Raise ValueError if these tokens cannot be kept, or if one of them may be gone already."""
        budget = getattr(self.policy, "budget", None)
        sinks, window = (0, 0) if budget is None else (budget.sinks, budget.window)
        count, counted = 0, sinks
        for start, stop in sorted(spans):  # what is named twice counts once
            count += max(0, stop - max(start, counted))
            counted = max(counted, stop)
        self.policy.check_pins(count)
        if budget is None:
            return
        pins = getattr(self.slots, "pins", None)
        before = [] if pins is None else pins[row].tolist()
        for start, stop in spans:
            for p in range(max(start, sinks), min(stop, seen - window)):
                if not any(a <= p < b for a, b in before):
                    raise ValueError(
                        f"token {p} has left the window of {window} tokens (row {row} has seen {seen}): pin tokens before "
                        "they leave it"
                    )

    def activate_past_recording(self) -> None:
        """See ``BoundedCache.activate_past_recording``, which asks every policy first."""
        if not self.rollback:
            self.rollback = ROLLBACK
            if self.slots is not None:
                self.slots.record(self.rollback)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.slots is not None:
            self.slots.crop(abs(tokens_to_remove))

    def offload(self) -> None:
        """Move everything the layer keeps, scores, positions and counters included, to the CPU."""
        if self.slots is not None:
            self.slots.to("cpu")

    def prefetch(self) -> None:
        """Move everything back."""
        if self.slots is not None:
            self.slots.to(self.home)


def _by_row(spans: Spans | Sequence[Spans]) -> list[list[tuple[int, int]]]:
    """Spans as one list of (start, stop) per row; a single list stands for every row. Raises ValueError for anything else."""
    try:
        flat = all(len(item) == 2 and not hasattr(item[0], "__len__") for item in spans)
        rows: Any = [spans] if flat else spans
        found = [[(operator.index(start), operator.index(stop)) for start, stop in row] for row in rows]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"spans must be (start, stop) pairs of integers, or a list of such lists, got {spans!r}"
        ) from error
    for start, stop in (span for row in found for span in row):
        if not 0 <= start < stop:
            raise ValueError(f"a span must be (start, stop) with 0 <= start < stop, got ({start}, {stop})")
    return found


def _table(by_row: list[list[tuple[int, int]]], seen_B: Tensor) -> Tensor:
    """One tensor [B, P, 2]; rows with fewer spans are filled up with empty ones."""
    if len(by_row) not in (1, len(seen_B)):
        raise ValueError(f"pinned spans were given for {len(by_row)} rows, but the input has {len(seen_B)}")
    widest = max(len(row) for row in by_row)
    filled = [[*row, *[(0, 0)] * (widest - len(row))] for row in by_row]
    table = torch.tensor(filled, dtype=torch.long, device=seen_B.device).view(len(by_row), widest, 2)
    return table.expand(len(seen_B), -1, -1)


class BoundedCache(Cache):
    """At most ``policy.slots`` tokens per KV head, for a model that ``attach`` prepared.

    Pass it as ``past_key_values`` (``cache`` in newer transformers) and go on as with any cache: prefill, chunks of any
    size, decode, further turns, padded batches. Each row has its own count of tokens; padding is never held.

    ``rollback``: how many of the last tokens ``crop`` can take back exactly, at most 512. It costs the rows that those
    tokens drove out, and such a cache is not compiled. Raises ValueError if the model has no policy attached, or if the
    policy cannot roll back.
    """

    def __init__(self, model: Any, *, rollback: int = 0) -> None:
        found = [(getattr(m, IMPLEMENTATION, None), m) for m in model.modules()]
        owners = {policy: module for policy, module in found if isinstance(policy, LayerPolicy)}
        policies = sorted(owners, key=lambda policy: policy.shape.layer)
        if not policies:
            raise ValueError(f"{type(model).__name__} has no policy attached: call kvpop.attach(model, policy) first")
        if not 0 <= rollback <= CHUNK:
            raise ValueError(f"rollback must be between 0 and {CHUNK} tokens, got {rollback}")
        if rollback:
            for policy in policies:
                policy.check_rollback()
        config = model.config.get_text_config()
        super().__init__(
            layers=[BoundedLayer(policy, config, next(owners[policy].parameters()), rollback) for policy in policies]
        )

    def allocate(self, rows: int) -> None:
        """Make the stores of a fresh cache now, in the dtype of the weights, instead of at the first call."""
        for layer in self.bounded_layers:
            if layer.slots is not None and len(layer.slots.seen) != rows and layer.empty:
                layer.slots = None
            if layer.slots is None:
                shape = (rows, layer.policy.shape.kv_heads, 0, layer.policy.shape.head_dim)
                like = layer.weight.detach().new_empty(shape)
                layer.lazy_initialization(like, like)

    def reserve(self, tokens: int) -> bool:
        """Give stores that grow (DMS, dense) memory for the next ``tokens`` steps, which can be captured then:
        ``is_compileable``.

        Call it again before ``tokens`` steps are over and after rows were moved about; 0 undoes it. Returns whether memory has
        moved since the last call, so that a step must be captured again. Asks the device. Other stores do nothing here. From
        then on nothing can be taken back from dense layers but what comes after 0.

        Raises ValueError for tokens < 0 and for a cache without stores (``allocate`` first), RuntimeError if more steps were
        made than were reserved, torch.OutOfMemoryError if memory runs out.
        """
        if not self.stores:
            raise ValueError("a cache that was never used has no stores: allocate(rows) first")
        if tokens < 0:
            raise ValueError(f"tokens must be at least 0, got {tokens}")
        return any([store.reserve(tokens) for store in self.stores])

    def check_reserved(self) -> None:
        """Raise RuntimeError if more steps were made than were reserved: what they gave says nothing."""
        for store in self.stores:
            store.check()

    @property
    def bounded_layers(self) -> list[BoundedLayer]:
        return [layer for layer in self.layers if isinstance(layer, BoundedLayer)]

    @property
    def policies(self) -> list[LayerPolicy]:
        return [layer.policy for layer in self.bounded_layers]

    @property
    def rows(self) -> int:
        """Rows of the batch the cache is made for; 0 before the first use."""
        return len(self.stores[0].seen) if self.stores else 0

    @property
    def stores(self) -> list[Slots]:
        """The stores of the layers that have been used."""
        return [layer.slots for layer in self.bounded_layers if layer.slots is not None]

    def pin(self, spans: Spans | Sequence[Spans]) -> None:
        """Never drop the tokens at these positions; each takes a long-range slot of every KV head as it leaves the window.

        ``spans`` are half-open ranges [start, stop) of positions, the same for all rows, or a list with one list of ranges
        per row. Positions count a row's real tokens from 0. They replace spans given before, and may lie ahead. Raises
        ValueError, changing nothing, if a row pins more tokens than there are long-range slots (sinks are held anyway), if
        a token has already left the window unpinned, or if the policy cannot pin.
        """
        by_row = _by_row(spans)
        seen = self.tokens_seen()
        if not any(seen):
            seen = []  # empty: the number of rows is not settled
        if seen and len(by_row) not in (1, len(seen)):
            raise ValueError(f"pinned spans were given for {len(by_row)} rows, but the cache holds {len(seen)}")
        for row in range(max(len(seen), len(by_row))):
            for layer in self.bounded_layers:
                if layer.policy.pins_apply:
                    layer.check_pins(by_row[row % len(by_row)], row, seen[row] if seen else 0)
        for layer in self.bounded_layers:
            layer.spans = by_row
            if layer.slots is None or not layer.policy.pins_apply:
                continue
            if len(by_row) not in (1, len(layer.slots.seen)):
                layer.slots = None  # empty, and made for another number of rows
            else:
                layer.slots.pin(_table(by_row, layer.slots.seen))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens of every row (``-n``, as transformers says it). Exact, or refused with nothing changed."""
        wanted, within = abs(int(tokens_to_remove)), min((store.undoable for store in self.stores), default=0)
        taken = int(self.get_seq_length())
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}")
        if wanted > taken:
            raise ValueError(
                f"crop({tokens_to_remove}): the cache has only taken in {taken} tokens; nothing was changed"
            )
        if wanted > within:
            raise ValueError(
                f"crop({tokens_to_remove}): {within} tokens can be taken back here; nothing was changed. Evicted tokens are "
                "gone, unless the cache was made with BoundedCache(model, rollback=n)"
            )
        super().crop(tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Called by transformers before it rolls back: as an assistant, or for a cache that did not come from ``generate``.

        Raises ValueError, changing nothing, if a layer cannot.
        """
        for policy in self.policies:
            policy.check_rollback()
        for layer in self.bounded_layers:
            layer.activate_past_recording()

    def like(self, rows: int) -> BoundedCache:
        """An empty cache of ``rows`` rows with the dtypes, shapes and devices of this one, which must have been used."""
        if not self.stores:
            raise ValueError("a cache that was never used has no shapes to be like: use allocate(rows)")
        twin = copy.deepcopy(self)
        for store in twin.stores:
            store.select(torch.zeros(rows, dtype=torch.long))
            store.clear()
        return twin

    def put(self, row: int, other: BoundedCache, other_row: int = 0) -> None:
        """Overwrite one row with a row of another cache of the same model and policy, in place: the rest stays as it is.

        Raises ValueError, changing nothing, for a cache that is unused or of another policy, and for rows out of range.
        """
        if other.policies != self.policies:
            raise ValueError("the other cache belongs to another model or policy")
        for name, cache, at in (("row", self, row), ("other_row", other, other_row)):
            if not 0 <= at < cache.rows:
                raise ValueError(f"{name} must be in [0, {cache.rows}), got {at}")
        for own, theirs in zip(self.stores, other.stores):
            own.put(row, theirs, other_row)

    def clear(self, row: int) -> None:
        """Empty one row, in place. Raises ValueError for a row out of range."""
        if not 0 <= row < self.rows:
            raise ValueError(f"row must be in [0, {self.rows}), got {row}")
        for store in self.stores:
            store.clear(slice(row, row + 1))

    def pinned(self) -> list[list[tuple[int, int]]]:
        """The spans that are pinned in each row, as ``pin`` takes them."""
        for layer in self.bounded_layers:
            table = getattr(layer.slots, "pins", None)
            if table is not None:
                return [[(start, stop) for start, stop in row if stop > start] for row in table.tolist()]
            if layer.slots is None and layer.spans is not None and layer.policy.pins_apply:
                return layer.spans
        return []

    def report(self) -> list[dict[str, Any]]:
        """For every layer that has been used: its policy, slots per KV head (None: growing) and bytes allocated."""
        return [
            {
                "layer": layer.policy.shape.layer,
                "policy": layer.policy.label,
                "slots": layer.slots.position.shape[-1] if layer.policy.bounded else None,
                "bytes": layer.slots.nbytes(),
            }
            for layer in self.bounded_layers
            if layer.slots is not None
        ]

    def held_positions(self) -> list[list[list[list[int]]]]:
        """Sorted positions held, as [layer][row][KV head]: positions count a row's real tokens from 0."""
        return [store.held() for store in self.stores]

    def tokens_seen(self) -> list[int]:
        """Real tokens each row has taken in (padding not counted)."""
        return self.stores[0].seen.tolist() if self.stores else []

    def tokens_held(self, row: int) -> float:
        """How many tokens of a row a KV head holds, on average over the layers whose stores grow (all, if none does); 0 before
        the first use."""
        used = [(layer.policy, layer.slots) for layer in self.bounded_layers if layer.slots is not None]
        used = [pair for pair in used if not pair[0].bounded] or used
        heads = sum(policy.shape.kv_heads for policy, _ in used)
        device = used[0][1].seen.device if used else None  # asked once, not layer by layer
        return int(sum(store.tokens_held(row).to(device) for _, store in used)) / heads if used else 0.0

    def rows_held(self) -> int:
        """The largest number of slots in use by any KV head."""
        return max(
            (int((store.position >= 0).sum(-1).max()) for store in self.stores if store.position.numel()), default=0
        )

    def nbytes(self) -> int:
        """Bytes allocated: keys, values, positions, priorities, scorer state and counters of all layers."""
        return sum(store.nbytes() for store in self.stores)

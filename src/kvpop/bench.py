"""What a decoded token costs once a sequence has grown long: time and peak memory, per policy, batch and tokens seen.

Nothing is generated to get there: stores are filled with random keys and values at positions they could hold, so that a bounded
cache evicts at every step from the first one on. Time does not depend on what weights, keys and values say.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

from kvpop.attachment import attach, cache_argument, detach
from kvpop.budget import Budget, dense_bytes
from kvpop.cache import BoundedCache
from kvpop.capture import WARM, Captured, Tune, capture, check_tune, compile_layers, plain_layers
from kvpop.policies import DMS, Dense, KVpop, Policy, Streaming
from kvpop.projections import fuse, unfuse
from kvpop.scorers import ConstantScorer
from kvpop.slots import FAR, GrowingSlots, PagedSlots, RankedSlots, Slots

# Shapes: B rows, H KV heads, M slots, K older tokens, D head dim.

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": dict(
        model_type="qwen3", num_hidden_layers=36, hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False,
    ),
    "qwen3-4b": dict(
        model_type="qwen3", num_hidden_layers=36, hidden_size=2560, intermediate_size=9728, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    ),
    "smollm2-135m": dict(
        model_type="llama", num_hidden_layers=30, hidden_size=576, intermediate_size=1536, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, vocab_size=49152, tie_word_embeddings=True,
    ),
}  # fmt: skip
DENSE = ("dense-eager", "dense-static")
"""The caches of transformers; "dense" is our own store of everything, with its kernels."""
SCORERS = {"kvpop-mlp": "mlp", "kvpop-mlstm": "mlstm", "kvpop-sum": "mlp+mlstm"}
POLICIES = (*DENSE, "dense", "streaming", *SCORERS, "dms")
Key = tuple[str, int, int]
SPREAD = {"keys": 3.0, "values": 1.0, "priority": 1.0}
"""Standard deviation of what stores are filled with: attention to such keys is sharp, so a step that reads others shows."""
ALLOWED = {2: 0.2, 4: 1e-3}
"""Root mean square by which the fast step's logits may differ from the plain one's, relative, by bytes of a weight. 36 random
layers in bfloat16 are .07 to .09 from the same step in float32 (products of this package .05 to .07), so two ways to round are
.08 to .14 apart (docs/speed.md); a layer that reads what it should not is off by the size of the logits."""


@dataclass(frozen=True)
class DecodeSettings:
    """What is measured. ``model`` is its name only. ``fuse``: projections of one input are one product where steps have a fixed
    size. ``tune``: of compiled layers (``capture.TUNES``). ``fit_static``: the static cache is as long as a row of results
    needs, instead of one for the longest. ``most``: the largest batch that is tried. Raises ValueError for what cannot run."""

    model: str
    policies: tuple[str, ...]
    batches: tuple[int, ...]
    seen: tuple[int, ...]
    budget: Budget
    layers: int | None = None
    steps: int = 50
    compiled: bool = False
    fuse: bool = True
    tune: Tune = "none"
    fit_static: bool = False
    most: int = 4096

    def __post_init__(self) -> None:
        for policy in self.policies:
            if policy not in POLICIES:
                raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
        if min(self.batches, default=1) < 1:
            raise ValueError(f"batch must be at least 1 row, got {min(self.batches)}")
        if self.steps < 2:
            raise ValueError(f"steps must be at least 2, got {self.steps}")
        check_tune(self.tune)
        if self.tune != "none" and not self.compiled:
            raise ValueError(f"tune {self.tune} is for compiled layers: compile them, or leave it out")
        slots, most = self.budget.slots, FAR // 2
        for seen in self.seen:
            if not slots <= seen <= most:
                raise ValueError(f"seen must be between the budget, {slots} tokens, and {most}, got {seen}")

    def static_length(self, seen: int) -> int:
        """Slots of the static cache of a row: room for the steps, a multiple of 128."""
        return -(-((seen if self.fit_static else max(self.seen)) + WARM + self.steps + 1) // 128) * 128

    def identity(self) -> dict[str, Any]:
        """What rows of one file have in common."""
        sizes = {name: value for name, value in asdict(self.budget).items() if name != "heads" or value}
        return {name: getattr(self, name) for name in ("model", "layers", "steps", "compiled", "fuse", "tune")} | sizes


def random_model(shape: str, layers: int | None, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model of this shape, or of its first layers, with random weights. Raises ValueError for what there is not."""
    if shape not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    most = SHAPES[shape]["num_hidden_layers"]
    if layers is not None and not 1 <= layers <= most:
        raise ValueError(f"layers must be between 1 and the {most} of {shape}, got {layers}")
    options = SHAPES[shape] | {"num_hidden_layers": layers or most, "max_position_embeddings": 2**18}
    config = AutoConfig.for_model(**options)
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def make_policy(name: str, budget: Budget, seen: int) -> Policy:
    if name == "dense":
        return Dense()
    if name == "streaming":
        return Streaming(budget)
    if name == "dms":  # without an offset about half of a random scorer's gates close
        return DMS(window=budget.window, ratio=seen / budget.slots, sinks=budget.sinks, offset=0.0)
    return KVpop(budget, SCORERS[name])


# Filling.


def likely_positions(
    count_BH: Tensor, seen: int, sinks: int, window: int, generator: torch.Generator, newest: bool = False
) -> Tensor:
    """What heads that hold ``count`` of ``seen`` tokens could hold: sinks, window, distinct older ones, or the newest.

    int64 [B, H, M], sorted, -1 behind; ``count`` lies between sinks + window and seen.
    """
    (B, H), device = count_BH.shape, count_BH.device
    older_BH = count_BH - sinks - window
    K = int(older_BH.max())
    if newest:
        older_BHK = (seen - window - K + torch.arange(K, device=device)).expand(B, H, K)
    else:
        drawn_BHK = torch.randint(seen - sinks - window - K + 1, (B, H, K), generator=generator, device=device)
        older_BHK = sinks + drawn_BHK.sort(-1).values + torch.arange(K, device=device)
    order_BHK = torch.rand(B, H, K, generator=generator, device=device).argsort(-1)
    if newest:
        order_BHK = torch.arange(K - 1, -1, -1, device=device).expand(B, H, K)
    older_BHK = older_BHK.masked_fill(order_BHK >= older_BH[..., None], FAR)
    always = torch.cat([torch.arange(sinks, device=device), torch.arange(seen - window, seen, device=device)])
    held_BHM = torch.cat([always.expand(B, H, -1), older_BHK], -1).sort(-1).values
    return held_BHM.where(held_BHM < FAR, -1)


@torch.no_grad()
def fill_store(store: Slots, seen: int, slots: int, generator: torch.Generator) -> None:
    """Leave a store as ``seen`` tokens a row might have left it, with random keys and values; a ranked one in place.

    A paged store, which has no bound, holds ``slots`` tokens a head on average, from half of that to half as many again; one of
    everything gets so many columns.
    """
    with torch.inference_mode(False):
        store.clear()
        if isinstance(store, PagedSlots):
            _fill_pages(store, seen, slots, generator)
        elif isinstance(store, RankedSlots):
            held, budget = store.tensors(), store.budget
            B, H, _ = held["position"].shape
            window = min(budget.window, seen)
            each = [min(budget.sinks + budget.window + k, seen) for k in budget.longs(H)]
            count_BH = torch.tensor(each, device=store.seen.device).expand(B, H)
            newest = isinstance(store.scorer, ConstantScorer)
            position = likely_positions(count_BH, seen, min(budget.sinks, seen - window), window, generator, newest)
            held["position"][..., : position.shape[-1]] = position.int()
            for name in ("keys", "values", "priority"):
                held[name].normal_(0.0, SPREAD[name], generator=generator)
            held["seen"].fill_(seen)
            store.replace(held)  # the same tensors: what follows from them is made anew
        elif isinstance(store, GrowingSlots):
            _fill_columns(store, seen, slots, generator)
        else:
            raise ValueError(f"{type(store).__name__} cannot be filled: it has neither slots nor pages")
        store.taken.fill_(seen)


def _fill_columns(store: GrowingSlots, seen: int, columns: int, generator: torch.Generator) -> None:
    if store.position.shape[-1] != columns:
        store.reserve(0)
        store.clear()  # lets go of what there was
        for name, x in store.tensors().items():
            if name != "seen":
                setattr(store, name, x.new_empty(*x.shape[:2], columns, *x.shape[3:]))
    held = store.tensors()
    for name in ("keys", "values"):
        held[name].normal_(0.0, SPREAD[name], generator=generator)
    column = torch.arange(columns, device=store.seen.device)
    held["position"].copy_(column.masked_fill(column >= seen, -1))
    held["seen"].fill_(seen)
    store.replace(held)


def _fill_pages(store: PagedSlots, seen: int, slots: int, generator: torch.Generator) -> None:
    B, H, _ = store.ring_closed.shape
    heads, device = B * H, store.seen.device
    reach = min(slots // 2, seen - slots, slots - store.sinks - store.window)
    apart = (
        (torch.linspace(-1, 1, heads, device=device) * reach).round().long() if heads > 1 else store.seen.new_zeros(1)
    )
    count_BH = slots + apart[torch.randperm(heads, generator=generator, device=device)].view(B, H)
    position = likely_positions(count_BH, seen, store.sinks, store.window, generator)
    keys, values = (
        x.new_empty(*position.shape, x.shape[-1]).normal_(0.0, SPREAD[name], generator=generator)
        for name, x in (("keys", store.keys), ("values", store.values))
    )
    closed, seen_B = torch.zeros_like(store.ring_closed), torch.full_like(store.seen, seen)
    store.replace({"keys": keys, "values": values, "position": position, "seen": seen_B, "closed": closed})


# Decoding.


def heads_of(model: PreTrainedModel) -> dict[str, int]:
    """Layers, KV heads, head dim and bytes of an element, as ``dense_bytes`` takes them."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return {
        "layers": config.num_hidden_layers,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "element_size": model.dtype.itemsize,
    }


class Decoding:
    """A model, the cache of a policy, and greedy steps at fixed addresses; ``prepare`` makes them fast where that is possible.

    ``static_length``: slots of the static cache. ``ahead``: for how many steps paged stores get pages when they are filled.
    Dense policies raise ValueError for models with sliding layers.
    """

    def __init__(
        self, model: PreTrainedModel, policy: str, rows: int, slots: int, static_length: int, ahead: int = 128
    ) -> None:  # fmt: skip
        self.model, self.rows, self.slots, self.device, self.ahead = model, rows, slots, model.device, ahead
        self.name = cache_argument(model)
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=self.device)
        self.position = torch.zeros_like(self.ids)
        self.run: Callable[[], Tensor] = self.step
        self.peak: int | None = None
        """Bytes allocated while the step was captured."""
        self.how = "eager"
        config, self.heads = model.config.get_text_config(), heads_of(model)
        self.cache: Any
        if policy not in DENSE:
            self.cache = BoundedCache(model)
            self.cache.allocate(rows)
            return
        self.cache = DynamicCache(config=config) if policy == "dense-eager" else StaticCache(config, static_length)
        if any(layer.is_sliding for layer in self.cache.layers):
            raise ValueError(f"{type(model).__name__} has sliding layers, which {policy} cannot fill: leave it out")
        if policy == "dense-static":
            H, D = self.heads["kv_heads"], self.heads["head_dim"]
            self.cache.early_initialization(rows, H, D, model.dtype, self.device)

    @torch.no_grad()
    def fill(self, seen: int) -> None:
        """As though ``seen`` tokens a row had been taken in: the same ones at every call. A captured step whose memory had to
        move for that is captured anew."""
        generator = torch.Generator(self.device).manual_seed(seen)
        if isinstance(self.cache, BoundedCache):
            for store in self.cache.stores:
                slots = seen + self.ahead if isinstance(store, GrowingSlots) else self.slots
                fill_store(store, seen, slots, generator)
            if self.cache.reserve(self.ahead) and isinstance(self.run, Captured):
                self.run = capture(self.step)
                self.fill(seen)
        else:
            for layer in self.cache.layers:
                if not isinstance(self.cache, StaticCache):
                    shape = (self.rows, self.heads["kv_heads"], seen, self.heads["head_dim"])
                    layer.keys = layer.values = None  # before their successors are made
                    empty = self.model.get_output_embeddings().weight.new_empty(*shape[:2], 0, shape[3])
                    layer.lazy_initialization(empty, empty)
                    layer.keys, layer.values = empty.new_empty(shape), empty.new_empty(shape)
                else:
                    layer.cumulative_length.fill_(seen)
                for name in ("keys", "values"):
                    getattr(layer, name).normal_(0.0, SPREAD[name], generator=generator)
        self.ids.random_(self.model.config.get_text_config().vocab_size, generator=generator)
        self.position.fill_(seen)

    @torch.no_grad()
    def step(self) -> Tensor:
        """One token a row: its logits [B, vocabulary]; the likeliest one comes next."""
        logits = self.model(self.ids, position_ids=self.position, **{self.name: self.cache}).logits[:, -1]
        self.ids.copy_(logits.argmax(-1, keepdim=True))
        self.position += 1
        return logits

    def prepare(self, seen: int, compiled: bool, fused: bool = False, tune: Tune = "none") -> float | None:
        """Fuse projections, compile the layers and, on a GPU, capture the step as one graph. None for caches that allow neither
        of the latter, and steps as they are.

        Returns how far the logits of the fast step are from those of the plain one (root mean square, relative). Raises
        RuntimeError if that is more than rounding.
        """
        self.fill(seen)
        if not self.cache.is_compileable:
            return None
        expected = self.step().float()
        if compiled:
            compile_layers(self.model, tune)
            self.how = "compiled" if tune == "none" else f"compiled, tuned ({tune})"
        if fused and fuse(self.model):
            self.how += ", fused"
        if self.device.type == "cuda":
            captured = capture(self.step)
            self.run, self.peak, self.how = captured, captured.peak, f"{self.how}, one graph"
        self.fill(seen)
        error = float((self.run().float() - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        if not error <= (allowed := ALLOWED[min(self.model.dtype.itemsize, 4)]):
            raise RuntimeError(f"the fast step's logits are off by {error:.2g} of their size, {allowed:g} is allowed")
        return error

    def times(self, steps: int) -> list[float]:
        """Milliseconds of each of so many steps."""
        for _ in range(WARM):
            self.run()
        if self.device.type != "cuda":
            marks = [time.perf_counter()]
            for _ in range(steps):
                self.run()
                marks.append(time.perf_counter())
            return [1e3 * (after - before) for before, after in pairwise(marks)]
        torch.cuda.reset_peak_memory_stats()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
        events[0].record()
        for event in events[1:]:
            self.run()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairwise(events)]

    def cache_bytes(self, tokens: int) -> int:
        """Bytes of a cache that holds ``tokens`` tokens a row, if it is dense; else of all that the stores allocate."""
        if isinstance(self.cache, BoundedCache):
            return self.cache.nbytes()
        return dense_bytes(tokens, rows=self.rows, **self.heads)

    def read_bytes(self, tokens: int) -> int:
        """Of these, what a step has to read: not what is empty in the pages of DMS."""
        stores = self.cache.stores if isinstance(self.cache, BoundedCache) else ()
        return self.cache_bytes(tokens) - sum(x.empty_bytes() for x in stores if isinstance(x, PagedSlots))


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of reading a large tensor once, the best of several times."""
    x = torch.ones(2**30 if device.type == "cuda" else 2**25, device=device)
    times = []
    for _ in range(6):
        started = time.perf_counter()
        x.sum().item()
        times.append(time.perf_counter() - started)
    return x.numel() * x.element_size() / min(times)


def weight_bytes(model: PreTrainedModel, read: bool) -> int:
    """Bytes of all parameters, scorers included; ``read``: of those that every token reads, not just looks up."""
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    table: Any = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    return total - (table.numel() * table.element_size() if read and head is not table else 0)


# Rows.


def out_of_memory(error: BaseException | None) -> bool:
    """Whether memory that ran out is behind an error: a capture that ends early raises others on top."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or "ALLOC_FAILED" in str(error):
            return True
        error = error.__context__
    return False


def release(model: PreTrainedModel) -> None:
    """Take off policy, compiled layers and fused projections, and let go of memory that nothing refers to any more."""
    detach(model)
    plain_layers(model)
    unfuse(model)
    if model.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def rows_of(
    model: PreTrainedModel, policy: str, batch: int, lengths: Sequence[int], settings: DecodeSettings, speed: float
) -> Iterator[dict[str, Any]]:
    """A row for each length: one cache and one captured step serve all of them."""
    torch.manual_seed(0)
    if policy not in DENSE:
        attach(model, make_policy(policy, settings.budget, max(settings.seen)))
    static_length = settings.static_length(max(lengths))
    decoding = Decoding(model, policy, batch, settings.budget.slots, static_length, 2 * (WARM + settings.steps))
    error = decoding.prepare(lengths[0], settings.compiled, settings.fuse, settings.tune)
    for seen in lengths:
        decoding.fill(seen)
        times = decoding.times(settings.steps)
        tenths, ms = statistics.quantiles(times, n=10, method="inclusive"), statistics.median(times)
        floor = 1e3 * (weight_bytes(model, read=True) + decoding.read_bytes(seen)) / speed
        static, peak = policy == "dense-static", None
        length = static_length if static else seen + WARM + settings.steps
        if model.device.type == "cuda":
            peak = max(decoding.peak or 0, torch.cuda.max_memory_allocated()) / 1e9
        yield {
            "policy": policy, "batch": batch, "seen": seen, "ms_per_token": ms, "spread": tenths[-1] - tenths[0],
            "floor_ms": floor, "ratio": ms / floor, "peak_gb": peak,
            "formula_gb": (weight_bytes(model, read=False) + decoding.cache_bytes(length)) / 1e9,
            "step": decoding.how, "logit_error": error, **({"static_length": static_length} if static else {}),
        }  # fmt: skip


def guarded(
    model: PreTrainedModel, policy: str, batch: int, lengths: Sequence[int], settings: DecodeSettings, speed: float
) -> Iterator[dict[str, Any]]:
    """``rows_of``, with a row that says so for the first length that does not fit in memory, and all after it."""
    done, reason = 0, ""
    try:
        for row in rows_of(model, policy, batch, lengths, settings, speed):
            done += 1
            yield row
    except Exception as error:
        if not out_of_memory(error):
            raise
        reason = f"out of memory: {'. '.join(str(error).split('. ')[:2])}"
    finally:
        release(model)
    yield from ({"policy": policy, "batch": batch, "seen": seen, "skipped": reason} for seen in lengths[done:])


def largest_fit(fits: Callable[[int], bool], most: int, guess: int = 1) -> int:
    """The largest batch in [1, most] that fits, by doubling and then bisecting; 0 if not even 1 does. From a ``guess`` above 1
    on it goes up or down by sixteenths instead of doubling."""
    part = 16 if guess > 1 else 1
    low, high = 0, min(guess, most)
    while high <= most and fits(high):
        low, high = high, high + max(1, high // part)
    if low == 0:
        lower = high
        while (lower := lower - max(1, lower // part)) > 0 and not fits(lower):
            high = lower
        low = lower
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def likely_fit(model: PreTrainedModel, row: dict[str, Any]) -> int:
    """Rows that should fit into a GPU's memory, by the formula of one row."""
    if model.device.type != "cuda":
        return 1
    weights = weight_bytes(model, read=False)
    free = 0.98 * torch.cuda.get_device_properties(model.device).total_memory - weights
    return max(1, int(free / max(1.0, 1e9 * row["formula_gb"] - weights)))


def decode_rows(
    model: PreTrainedModel, settings: DecodeSettings, done: Container[Key], speed: float
) -> Iterator[dict[str, Any]]:
    """A row for every combination whose (policy, batch, seen) is not ``done``; ``speed``: bytes a second."""
    for policy in settings.policies:
        for batch in settings.batches:
            left = [seen for seen in sorted(set(settings.seen)) if (policy, batch, seen) not in done]
            alone = policy == "dense-eager" or (settings.fit_static and policy == "dense-static")
            for lengths in ([seen] for seen in left) if alone else [left] if left else []:
                yield from guarded(model, policy, batch, lengths, settings, speed)


def largest_rows(
    model: PreTrainedModel, settings: DecodeSettings, done: Container[Key], speed: float
) -> Iterator[dict[str, Any]]:
    """Tokens a second at the largest batch that fits, a row for each policy and length: found with few plain steps, then
    measured, with fewer rows if need be. ``done`` says -1 for the batch."""
    settings = replace(settings, fit_static=True)
    short = replace(settings, steps=2, compiled=False, tune="none")
    for policy, seen in product(settings.policies, settings.seen):
        if (policy, -1, seen) in done:
            continue

        def measured(batch: int, how: DecodeSettings) -> dict[str, Any]:
            (row,) = guarded(model, policy, batch, [seen], how, speed)  # noqa: B023
            return row

        def fits(batch: int) -> bool:
            return "skipped" not in measured(batch, short)

        one = measured(1, short)
        batch = 0 if "skipped" in one else largest_fit(fits, settings.most, likely_fit(model, one))
        row: dict[str, Any] = {"policy": policy, "batch": 0, "seen": seen, "skipped": "not even one row fits in memory"}
        while batch and "skipped" in (row := measured(batch, settings)):
            batch = batch * 15 // 16
        if "skipped" not in row:
            row["tokens_per_s"] = 1e3 * batch / row["ms_per_token"]
        yield row

"""One graph for every step: before, at and after the first eviction, for any mix of rows, generation after generation."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig, LogitsProcessor, LogitsProcessorList

from kvpop import generation
from kvpop.attachment import attach, cache_argument
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.policies import Dense, KVpop, Policy, Random, Streaming, Tova
from kvpop.slots import RankedSlots
from tests.test_cache import feed, model_with, text
from tests.tiny import tiny_model

SMALL = Budget(2, 8, 8)
POLICIES = {
    "mlp+mlstm": KVpop(SMALL),
    "mlp": KVpop(SMALL, scorer="mlp"),
    "random": Random(SMALL),
    "streaming": Streaming(SMALL),
    "streaming-cache": Streaming(SMALL, positions="cache"),
    "tova": Tova(18),
}


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_case_16_three_generations_one_graph_equal_to_eager(family: str, name: str) -> None:
    model = model_with(POLICIES[name], dtype=torch.float32, family=family)
    counter = CompileCounter()
    compiled = torch.compile(model.forward, fullgraph=True, backend=counter)
    for prompt in (5, 17, 40):  # below the budget, just below, above
        kept, fresh = BoundedCache(model), BoundedCache(model)
        ids = text(2, prompt + 40, prompt)
        for cache in (kept, fresh):
            feed(model, cache, ids[:, :prompt])
        for t in range(prompt, prompt + 40):
            step = dict(input_ids=ids[:, t : t + 1].clone(), position_ids=torch.full((2, 1), t))
            with torch.no_grad():
                logits = compiled(**step, **{cache_argument(model): kept}).logits
                assert torch.equal(logits, model(**step, **{cache_argument(model): fresh}).logits)
        assert kept.held_positions() == fresh.held_positions()
        assert int(kept.get_seq_length()) == prompt + 40
    assert counter.frame_count == 1


def test_case_16_rows_of_any_length_and_idle_rows_share_the_graph() -> None:
    model = model_with(POLICIES["mlp+mlstm"], dtype=torch.float32)
    counter = CompileCounter()
    compiled = torch.compile(model.forward, fullgraph=True, backend=counter)
    singles, lengths = [], [3, 17, 30]
    for row, length in enumerate(lengths):
        singles.append(BoundedCache(model))
        feed(model, singles[-1], text(1, length, row))
    cache = singles[0].like(3)
    for row, single in enumerate(singles):
        cache.put(row, single)
    for step in range(40):
        ids = text(3, 1, 50 + step)
        awake = torch.tensor([[True], [step % 3 != 0], [step < 10]])
        position = torch.tensor(lengths)[:, None]
        with torch.no_grad():
            logits = compiled(ids, attention_mask=awake, position_ids=position, **{cache_argument(model): cache}).logits
        for row in range(3):
            if awake[row]:
                expected = feed(model, singles[row], ids[row : row + 1], position_ids=position[row : row + 1])
                torch.testing.assert_close(logits[row], expected[0], rtol=1e-4, atol=1e-5)
                lengths[row] += 1
    assert cache.tokens_seen() == lengths
    for row, single in enumerate(singles):
        assert [layer[row] for layer in cache.held_positions()] == [layer[0] for layer in single.held_positions()]
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["mlp+mlstm", "streaming"])
def test_case_16_generate_compiles_the_bounded_cache(name: str) -> None:
    """As on a GPU, where transformers compiles by itself: through ``generate``, three times, one graph."""
    model = model_with(POLICIES[name], dtype=torch.float32)
    counter = CompileCounter()
    config = CompileConfig(fullgraph=True, backend=lambda graph, inputs, **_: counter(graph, inputs))
    config._compile_all_devices = True
    options = dict(max_new_tokens=30, min_new_tokens=30, do_sample=False)
    for prompt in (4, 15, 33):
        ids = text(2, prompt, prompt)
        ids[0, :2] = 0
        mask = (ids > 0).long()
        eager = model.generate(ids, attention_mask=mask, **options)
        assert torch.equal(model.generate(ids, attention_mask=mask, compile_config=config, **options), eager)
    assert counter.frame_count == 1


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a GPU: ``generate`` keeps its cache for the next call. Filled with the identities of the caches."""
    used: list[int] = []
    fresh = generation.fresh_cache

    def spy(*args):
        cache = fresh(*args)
        used.append(id(cache))
        return cache

    monkeypatch.setattr(generation, "captures", lambda model: True)
    monkeypatch.setattr(generation, "fresh_cache", spy)
    return used


@pytest.mark.parametrize("compiled", [True, False])
def test_generate_uses_its_last_cache_again_where_steps_are_captured(captured, compiled: bool) -> None:
    model = model_with(POLICIES["mlp"], dtype=torch.float32)
    counter = CompileCounter()
    config = CompileConfig(fullgraph=True, backend=lambda graph, inputs, **_: counter(graph, inputs))
    config._compile_all_devices = compiled
    options = dict(max_new_tokens=20, min_new_tokens=20, do_sample=False, compile_config=config)
    expected = [model.generate(text(2, n, n), max_new_tokens=20, min_new_tokens=20, use_cache=False) for n in (5, 40)]
    for _ in range(2):
        for n, wanted in zip((5, 40), expected):
            assert torch.equal(model.generate(text(2, n, n), **options), wanted)
    assert len(captured) == 4
    assert len(set(captured)) == 1
    model.generate(text(3, 5), **options)  # other rows, another cache
    assert len(set(captured)) == 2


def test_a_cache_that_somebody_holds_is_not_used_again(captured) -> None:
    model = model_with(POLICIES["mlp"], dtype=torch.float32)
    options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)
    outer, inner = model.generate(text(1, 9), **options), model.generate(text(1, 30, 3), **options)

    class Nested(LogitsProcessor):
        """Generates something else in the middle of a generation."""

        def __call__(self, input_ids, scores):
            assert torch.equal(model.generate(text(1, 30, 3), **options), inner)
            return scores

    assert torch.equal(model.generate(text(1, 9), logits_processor=LogitsProcessorList([Nested()]), **options), outer)
    out = model.generate(text(1, 9), return_dict_in_generate=True, **options)
    held = getattr(out, cache_argument(model)).held_positions()
    model.generate(text(1, 30, 3), **options)
    assert getattr(out, cache_argument(model)).held_positions() == held


def test_a_cache_without_bound_or_with_rollback_is_not_compiled() -> None:
    assert not BoundedCache(attach(tiny_model(), Dense())).is_compileable
    model = model_with(POLICIES["mlp"])
    assert BoundedCache(model).is_compileable
    assert not BoundedCache(model, rollback=4).is_compileable


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def one_step(policy: Policy, heads: int, rows: int, prompt: int) -> Counter[str]:
    model = model_with(policy, dtype=torch.float32, kv_heads=heads)
    cache = BoundedCache(model)
    feed(model, cache, text(rows, prompt))
    store = cache.stores[0]
    assert isinstance(store, RankedSlots)
    q, k = torch.randn(rows, 2 * heads, 1, 8), torch.randn(rows, heads, 1, 8)
    with Ops() as ops:
        store.attend(q, k, k, torch.ones(rows, 1, dtype=torch.bool), 0.3)
    return ops.count


@pytest.mark.parametrize("name", ["mlp+mlstm", "mlp", "streaming", "random"])
def test_case_17_a_step_takes_the_same_operations_for_any_heads_rows_and_lengths_and_asks_the_host_nothing(
    name: str,
) -> None:
    counts = [one_step(POLICIES[name], *sizes) for sizes in ((1, 1, 3), (6, 1, 3), (2, 4, 18), (2, 2, 60))]
    assert all(count == counts[0] for count in counts)
    asks = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.is_nonzero.default", "aten.equal.default"}
    assert not asks & set(counts[0])


def test_what_is_written_stays_where_it_is() -> None:
    """A captured graph finds every tensor where it was, also after rows are cleared, put, reordered or reset."""
    model = model_with(POLICIES["mlp+mlstm"])
    cache = BoundedCache(model)
    feed(model, cache, text(3, 25))

    def where() -> list[int]:
        return [x.data_ptr() for store in cache.stores for x in (*store.tensors().values(), store.taken)]

    before = where()
    other = cache.like(1)
    feed(model, other, text(1, 9))
    cache.put(1, other)
    cache.clear(0)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    feed(model, cache, text(3, 1))
    feed(model, cache, text(3, 5))
    cache.reset()
    feed(model, cache, text(3, 5))
    assert where() == before


def test_a_row_that_is_put_or_cleared_is_that_row() -> None:
    model = model_with(POLICIES["mlp+mlstm"])
    singles: list[BoundedCache] = []
    for row, length in enumerate((30, 4)):
        singles.append(BoundedCache(model))
        feed(model, singles[row], text(1, length, row))
    cache = singles[0].like(2)
    assert (cache.tokens_seen(), int(cache.get_seq_length())) == ([0, 0], 0)
    for _ in range(2):
        cache.put(0, singles[0])
        cache.put(1, singles[1])
        assert cache.tokens_seen() == [30, 4]
        cache.clear(0)
        assert cache.tokens_seen() == [0, 4]
        assert [layer[0] for layer in cache.held_positions()] == [[[], []]] * 2
        cache.put(0, singles[0])
    step: Tensor = text(2, 1, 9)
    positions = torch.tensor([[30], [4]])
    both = feed(model, cache, step, position_ids=positions)
    for row in range(2):
        alone = feed(model, singles[row], step[row : row + 1], position_ids=positions[row : row + 1])
        torch.testing.assert_close(both[row], alone[0], rtol=1e-9, atol=1e-9)

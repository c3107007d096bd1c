"""Pinned tokens: what fits is kept by every head, what does not fit is an error. The sets are in test_invariant.py."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from kvpop.attachment import attach
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.core.cutoff import expiry, oracle_held
from kvpop.documents import Documents
from kvpop.policies import ByLayer, Dense, KVpop, Random, SequencePass, Streaming, Tova
from tests.test_cache import SMALL, feed, model_with, snapshot, text
from tests.tiny import expiries, held_by_mask, tiny_model


@pytest.mark.parametrize("seed", range(20))
def test_the_expiry_of_pinned_tokens_is_the_set_definition(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    budget = Budget(seed % 3, 1 + seed % 4, 2 + seed % 3)
    priority = torch.randn(25, generator=generator)
    pinned = set(torch.randperm(25, generator=generator)[: budget.long].tolist())
    marks = torch.tensor([t in pinned for t in range(25)])
    for impl in ("parallel", "heap", "brute"):
        found = expiry(priority, budget, impl, marks)
        for q in range(25):
            held = {t for t in range(q + 1) if q < found[t]}
            assert held == oracle_held(priority.tolist(), budget, q, pinned)
            assert {t for t in pinned if t <= q} <= held


def test_more_pins_than_slots_is_an_error_that_names_both_numbers() -> None:
    model = model_with(KVpop(SMALL))
    cache = BoundedCache(model)
    for spans in ([(2, 7)], [(0, 4), (9, 12)], [[(0, 1)], [(3, 8)]]):
        with pytest.raises(ValueError, match="5 pinned tokens do not fit into 4 long-range slots"):
            cache.pin(spans)
    cache.pin([(0, 2), (1, 3), (10, 13)])  # sinks take no slot, and what is named twice counts once
    marks = torch.zeros(1, 20, dtype=torch.bool)
    marks[0, 3:8] = True
    with pytest.raises(ValueError, match="5 pinned tokens do not fit into 4 long-range slots"):
        expiries(model, text(1, 20), pinned=marks)
    with pytest.raises(ValueError, match="1 pinned tokens do not fit into 0 long-range slots"):
        BoundedCache(attach(tiny_model(), Streaming(Budget(2, 8, 0)))).pin([(3, 4)])


def test_pins_count_inside_each_document() -> None:
    model = model_with(KVpop(SMALL))
    ids, marks = text(1, 40), torch.zeros(1, 40, dtype=torch.bool)
    marks[0, [3, 4, 5, 19, 23, 24, 25, 26]] = True  # four in either document, the last token of the first among them
    documents = Documents(torch.tensor([[0] * 20 + [1] * 20]))
    _, packed = expiries(model, ids, documents, marks)
    for part in (slice(0, 20), slice(20, 40)):
        _, alone = expiries(model, ids[:, part], pinned=marks[:, part])
        for layer in range(2):
            for q in range(20):
                both = held_by_mask([packed[layer][..., part] - part.start], q)
                assert both == held_by_mask([alone[layer]], q)


def test_spans_are_pairs_of_integers_of_any_kind() -> None:
    cache = BoundedCache(model_with(KVpop(SMALL)))
    cache.pin([(np.int64(3), torch.tensor(5))])
    assert cache.pinned() == [[(3, 5)]]
    for wrong in ([(3.0, 5)], [3, 5], [(1, 2, 3)], [["a", "b"]]):
        with pytest.raises(ValueError, match="spans must be"):
            cache.pin(wrong)
    with pytest.raises(ValueError, match="19999998 pinned tokens"):
        cache.pin([(0, 20_000_000)])


@pytest.mark.parametrize("spans", [[(5, 5)], [(-1, 3)], [(4, 2)]])
def test_a_span_that_is_none_is_refused(spans) -> None:
    with pytest.raises(ValueError, match="0 <= start < stop"):
        BoundedCache(model_with(KVpop(SMALL))).pin(spans)


def test_a_token_that_may_be_gone_cannot_be_pinned_and_nothing_changes() -> None:
    model = model_with(KVpop(SMALL))
    cache = BoundedCache(model)
    cache.pin([(9, 10)])
    feed(model, cache, text(1, 30))
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"token 25 has left the window of 4 tokens \(row 0 has seen 30\)"):
        cache.pin([(9, 10), (25, 28)])
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(cache)))
    cache.pin([(9, 10), (26, 28)])  # what is pinned already may stay so; token 26 leaves with the next one
    assert cache.pinned() == [[(9, 10), (26, 28)]]
    feed(model, cache, text(1, 40))
    assert all({9, 26, 27} <= set(head) for layer in cache.held_positions() for head in layer[0])


def test_pins_of_a_row_follow_the_row() -> None:
    model = model_with(Random(SMALL))
    cache = BoundedCache(model)
    cache.pin([[(3, 5)], []])
    feed(model, cache, text(2, 20))
    twin = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    feed(model, cache, text(2, 40))
    held = cache.held_positions()
    assert all({3, 4} <= set(head) for layer in held for head in layer[1])
    assert not all({3, 4} <= set(head) for layer in held for head in layer[0])
    with pytest.raises(ValueError, match="given for 3 rows, but the cache holds 2"):
        cache.pin([[(3, 5)], [], []])
    feed(model, twin, text(2, 40))
    assert all({3, 4} <= set(head) for layer in twin.held_positions() for head in layer[0])
    twin.reset()
    assert twin.pinned() in ([], [[], []])


def test_spans_for_another_number_of_rows_are_refused_at_the_first_call() -> None:
    model = model_with(KVpop(SMALL))
    cache = BoundedCache(model)
    cache.pin([[(3, 5)], [(3, 4)]])
    with pytest.raises(ValueError, match="given for 2 rows, but the input has 3"):
        feed(model, cache, text(3, 5))


def test_pins_reach_every_layer_that_drops_and_no_other() -> None:
    policy = ByLayer(KVpop(SMALL), {0: Dense()})
    model = model_with(policy)
    cache = BoundedCache(model)
    cache.pin([(3, 6)])
    feed(model, cache, text(1, 50))
    assert all({3, 4, 5} <= set(head) for layer in cache.held_positions() for head in layer[0])
    with pytest.raises(ValueError, match="layer 0: TovaLayer cannot pin tokens"):
        BoundedCache(attach(tiny_model(), Tova(8))).pin([(3, 4)])


def test_generate_takes_a_cache_with_pins() -> None:
    from kvpop.attachment import cache_argument

    model = model_with(KVpop(SMALL))
    cache = BoundedCache(model)
    cache.pin([(2, 5)])
    model.generate(text(1, 30), max_new_tokens=20, min_new_tokens=20, **{cache_argument(model): cache})
    assert all({2, 3, 4} <= set(head) for layer in cache.held_positions() for head in layer[0])


def test_a_pass_with_pins_is_a_pass_without_where_nothing_is_pinned() -> None:
    model, ids = model_with(KVpop(SMALL)), text(1, 30)
    plain, expected = expiries(model, ids)
    with torch.no_grad():
        call = SequencePass(Documents.single(1, 30), pinned_BS=torch.zeros(1, 30, dtype=torch.bool))
        assert torch.equal(model(ids, use_cache=False, kvpop=call).logits, plain)
    assert all(torch.equal(a, b) for a, b in zip(expiries(model, ids, pinned=torch.zeros(1, 30).bool())[1], expected))

"""What goes wrong with bounded caches elsewhere (shared/cases), each as a test; plus TOVA, StreamingLLM and random.

The reference is a full-length forward of the plain model under the dense boolean mask that the expiry describes.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from kvpop.attachment import attach, attached_policies, cache_argument, detach
from kvpop.budget import Budget, cache_bytes, dense_bytes
from kvpop.cache import BoundedCache
from kvpop.core.cutoff import oracle_held
from kvpop.core.priority import FixedDecay
from kvpop.documents import Documents
from kvpop.policies import (
    ByLayer,
    Dense,
    KVpop,
    LayerShape,
    LayerView,
    Policy,
    Random,
    RankedLayer,
    SequencePass,
    Streaming,
    Tova,
)
from kvpop.policies.base import HANDOVER
from kvpop.policies.streaming import StreamingLayer
from kvpop.policies.tova import TovaLayer
from kvpop.rollout import generate
from kvpop.scorers import Scorer
from kvpop.slots import RankedSlots
from tests.tiny import VOCAB, dense_masks, expiries, held_by_mask, masked_reference, tiny_model

SMALL = Budget(2, 4, 4)
KINDS = ["kvpop", "random", "streaming", "streaming-cache", "tova", "dense"]


def make(kind: str, budget: Budget = SMALL) -> Policy:
    return {
        "kvpop": lambda: KVpop(budget),
        "random": lambda: Random(budget, seed=1, decay=-1e-2),
        "streaming": lambda: Streaming(budget),
        "streaming-cache": lambda: Streaming(budget, positions="cache"),
        "tova": lambda: Tova(budget.slots),
        "dense": Dense,
    }[kind]()


def model_with(policy: Policy, *, seed: int = 0, **options) -> PreTrainedModel:
    """A tiny model whose scorers say something: their parameters are shaken."""
    model = attach(tiny_model(**options), policy)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in attached_policies(model):
            for p in layer.parameters():
                p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype) * 0.5)
    return model


def text(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def feed(
    model: PreTrainedModel, cache: BoundedCache, ids: Tensor, sizes: Sequence[int] | None = None, **options
) -> Tensor:
    """Logits of ``ids`` taken in by pieces; positions are left to the model, as a user would."""
    out, start = [], 0
    for size in sizes or [ids.shape[1]]:
        piece = ids[:, start : start + size]
        out.append(model(piece, use_cache=True, **{cache_argument(model): cache}, **options).logits)
        start += size
    return torch.cat(out, dim=1)


def pieces(total: int, size: int) -> list[int]:
    return [size] * (total // size) + ([total % size] if total % size else [])


def reference(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    _, expiry = expiries(model, ids)
    return masked_reference(model, ids, dense_masks(expiry)), expiry


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def snapshot(cache: BoundedCache) -> list[Tensor]:
    return [x.clone() for store in cache.stores for x in store.tensors().values()]


class Largest(TorchDispatchMode):
    """The largest tensor that any operation gives out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


# Positions, masks, prefill


def test_case_1_tokens_seen_is_not_rows_held() -> None:
    budget, ids = Budget(4, 60, 64), text(1, 301)
    model = model_with(KVpop(budget))
    cache = BoundedCache(model)
    feed(model, cache, ids[:, :300])
    assert cache.get_seq_length() == 300
    assert cache.tokens_seen() == [300]
    assert cache.rows_held() == 128
    expected, expiry = reference(model, ids)
    close(feed(model, cache, ids[:, 300:])[:, 0], expected[:, 300])
    assert cache.held_positions() == held_by_mask(expiry, 300)


@pytest.mark.parametrize("length", [60, 600])
@pytest.mark.parametrize("kind", ["kvpop", "random", "streaming"])
def test_case_2_in_a_one_shot_prefill_each_query_sees_its_own_set(kind: str, length: int) -> None:
    """600 tokens are more than the store works on at once (512)."""
    model, ids = model_with(make(kind)), text(1, length)
    cache = BoundedCache(model)
    expected, expiry = reference(model, ids)
    close(feed(model, cache, ids), expected)
    assert cache.held_positions() == held_by_mask(expiry, length - 1)


@pytest.mark.parametrize("kind", ["kvpop", "random", "streaming"])
def test_case_3_chunk_sizes_do_not_matter(kind: str) -> None:
    model, ids, w = model_with(make(kind)), text(2, 40), SMALL.window
    expected, expiry = reference(model, ids)
    for size in (1, 3, w - 1, w, w + 1, 40):
        cache = BoundedCache(model)
        close(feed(model, cache, ids, pieces(40, size)), expected)
        assert cache.held_positions() == held_by_mask(expiry, 39)


def test_case_3_the_length_worked_on_at_once_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = model_with(KVpop(SMALL)), text(2, 40)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :17] = 0
    caches, found = [], []
    for chunk in (512, 1, 3, 7, 39):
        monkeypatch.setattr(RankedSlots, "chunk", chunk)
        caches.append(BoundedCache(model))
        found.append(feed(model, caches[-1], ids, attention_mask=mask))
        close(found[-1][0, 17:], found[0][0, 17:])
        close(found[-1][1], found[0][1])
        assert caches[-1].held_positions() == caches[0].held_positions()


def true_state(cache: BoundedCache, row: int) -> list[Tensor]:
    return [store.state[0][row] * store.state[1][row].exp()[..., None, None] for store in cache.stores]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["kvpop", "random", "streaming", "streaming-cache", "tova"])
def test_case_4_a_padded_row_is_the_row_alone(kind: str, batch: int) -> None:
    """Left-padded, beside a longer row or not, decoded to three times the budget."""
    model, length, pad = model_with(make(kind)), 7, 12
    ids, more = text(batch, pad + length, 1), text(batch, 3 * SMALL.slots, 2)
    mask = torch.ones(batch, pad + length, dtype=torch.long)
    mask[0, :pad] = 0
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    alone, padded = BoundedCache(model), BoundedCache(model)
    expected = feed(model, alone, ids[:1, pad:])
    got = feed(model, padded, ids, attention_mask=mask, position_ids=position)
    close(got[:1, pad:], expected)
    for t in range(more.shape[1]):
        mask = torch.cat([mask, mask.new_ones(batch, 1)], dim=1)
        position = mask.sum(-1, keepdim=True) - 1
        expected = feed(model, alone, more[:1, t : t + 1])
        got = feed(model, padded, more[:, t : t + 1], attention_mask=mask, position_ids=position)
        close(got[:1], expected)
        assert [layer[0] for layer in padded.held_positions()] == [layer[0] for layer in alone.held_positions()]
    assert padded.tokens_seen()[0] == alone.tokens_seen()[0] == length + more.shape[1]
    if kind == "kvpop":
        for a, b in zip(true_state(padded, 0), true_state(alone, 0)):
            close(a, b)


def test_case_4_what_stands_in_the_padding_does_not_matter() -> None:
    model, ids = model_with(KVpop(SMALL)), text(2, 30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :11] = 0
    found = []
    for filler in (0, 17):
        ids[0, :11] = filler
        cache = BoundedCache(model)
        found.append((feed(model, cache, ids, attention_mask=mask)[0, 11:], cache.held_positions(), snapshot(cache)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("kind", ["kvpop", "random", "streaming"])
def test_case_6_a_second_turn_after_a_first_over_budget(kind: str) -> None:
    model, ids = model_with(make(kind)), text(1, 60)
    expected, expiry = reference(model, ids)
    cache = BoundedCache(model)
    close(feed(model, cache, ids, [35, 1, 1, 1, 20, 1, 1]), expected)
    assert cache.get_seq_length() == 60
    assert cache.held_positions() == held_by_mask(expiry, 59)


# Rows, rollback, errors


def decode(model: PreTrainedModel, cache: BoundedCache, ids: Tensor, mask: Tensor) -> Tensor:
    out = []
    for t in range(ids.shape[1]):
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        position = mask.sum(-1, keepdim=True) - 1
        out.append(feed(model, cache, ids[:, t : t + 1], attention_mask=mask, position_ids=position))
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["reorder", "select", "mask", "repeat"])
def test_case_8_rows_move_with_everything_they_own(kind: str, how: str) -> None:
    """Rows of unequal length; rearranged in mid-decode they go on as they would have."""
    model, ids, more = model_with(make(kind)), text(3, 15, 3), text(3, 20, 4)
    mask = torch.ones(3, 15, dtype=torch.long)
    mask[1, :9] = 0
    order = {"reorder": [2, 0, 0], "select": [2, 0], "mask": [1, 2], "repeat": [0, 0, 1, 1, 2, 2]}[how]
    straight, moved = BoundedCache(model), BoundedCache(model)
    for cache in (straight, moved):
        feed(model, cache, ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
        decode(model, cache, more[:, :5], mask)
    mask = torch.cat([mask, mask.new_ones(3, 5)], dim=1)
    if how == "reorder":
        moved.reorder_cache(torch.tensor(order))
    elif how == "select":
        moved.batch_select_indices(torch.tensor(order))
    elif how == "mask":
        moved.batch_select_indices(torch.tensor([False, True, True]))
    else:
        moved.batch_repeat_interleave(2)
    assert moved.tokens_seen() == [straight.tokens_seen()[i] for i in order]
    expected = decode(model, straight, more[:, 5:], mask)
    close(decode(model, moved, more[order, 5:], mask[order]), expected[order])
    assert moved.held_positions() == [[layer[i] for i in order] for layer in straight.held_positions()]
    for a, b in zip(snapshot(straight), snapshot(moved)):
        close(b.double(), a[order].double())


@pytest.mark.parametrize("kind", KINDS)
def test_case_8_reset_forgets_everything(kind: str) -> None:
    model = model_with(make(kind))
    used = BoundedCache(model)
    feed(model, used, text(2, 30), [20] + [1] * 10)
    for rows in (2, 3):  # the same memory, then another number of rows
        used.reset()
        assert (used.get_seq_length(), sum(used.tokens_seen()), used.rows_held()) == (0, 0, 0)
        ids, fresh = text(rows, 25, 7), BoundedCache(model)
        assert torch.equal(feed(model, used, ids), feed(model, fresh, ids))
        assert used.held_positions() == fresh.held_positions()
        assert used.nbytes() == fresh.nbytes()


def test_case_8_an_empty_cache_can_be_rearranged() -> None:
    model = model_with(KVpop(SMALL))
    cache = BoundedCache(model)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_select_indices(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    assert cache.held_positions() == []


def test_case_9_crop_is_refused_and_changes_nothing() -> None:
    model, ids = model_with(KVpop(SMALL)), text(2, 30)
    cache, untouched = BoundedCache(model), BoundedCache(model)
    with pytest.raises(ValueError, match="only taken in 0 tokens"):
        cache.crop(-3)
    for c in (cache, untouched):
        feed(model, c, ids[:, :25])
    before = snapshot(cache)
    for count, why in (
        (-1, "0 tokens can be taken back"),
        (-30, "only taken in 25"),
        (3, "as a negative number, got 3"),
    ):
        with pytest.raises(ValueError, match=why):
            cache.crop(count)
    cache.crop(0)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(cache)))
    assert cache.get_seq_length() == 25
    assert torch.equal(feed(model, cache, ids[:, 25:]), feed(model, untouched, ids[:, 25:]))


@pytest.mark.parametrize("kind", ["kvpop", "random", "streaming", "streaming-cache", "dense"])
@pytest.mark.parametrize("length", [3, 30])
def test_case_9_crop_within_reach_is_exact_and_beyond_it_is_refused(kind: str, length: int) -> None:
    model, ids = model_with(make(kind)), text(2, 60)
    cache, untouched = BoundedCache(model, rollback=6), BoundedCache(model)
    feed(model, cache, ids[:, :length])
    feed(model, untouched, ids[:, :length])
    for draft, back in ((5, 5), (6, 2), (1, 0), (3, 3)):
        feed(model, cache, text(2, draft, 99))
        cache.crop(-back)
        if draft > back:
            feed(model, untouched, text(2, draft, 99)[:, : draft - back])
        assert cache.held_positions() == untouched.held_positions()
        assert int(cache.get_seq_length()) == int(untouched.get_seq_length())
    seen = int(cache.get_seq_length())
    before = snapshot(cache)
    with pytest.raises(ValueError, match="nothing was changed"):
        cache.crop(-seen - 1 if kind == "dense" else -7)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(cache)))
    close(feed(model, cache, ids[:, :20]), feed(model, untouched, ids[:, :20]))


@pytest.mark.parametrize("kind", ["kvpop", "dense"])
def test_case_9_columns_of_padding_are_taken_back_as_columns(kind: str) -> None:
    model, ids = model_with(make(kind)), text(2, 6)
    cache, expected = BoundedCache(model, rollback=4), BoundedCache(model)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 0, 1, 0, 1]])
    feed(model, cache, ids, attention_mask=mask)
    cache.crop(-2)
    feed(model, expected, ids[:, :4], attention_mask=mask[:, :4])
    assert cache.tokens_seen() == expected.tokens_seen() == [1, 3]
    assert cache.held_positions() == expected.held_positions()


def test_case_9_a_dense_store_that_was_rearranged_takes_back_only_what_came_since() -> None:
    model = model_with(make("dense"))
    cache = BoundedCache(model, rollback=4)
    feed(model, cache, text(2, 7), attention_mask=torch.tensor([[1] * 7, [0, 0] + [1] * 5]))
    cache.clear(0)
    with pytest.raises(ValueError, match="0 tokens can be taken back"):
        cache.crop(-1)
    feed(model, cache, text(2, 3), position_ids=torch.tensor([[0, 1, 2], [5, 6, 7]]))
    cache.crop(-2)
    assert cache.tokens_seen() == [1, 6]


def test_case_9_a_refused_recording_changes_no_layer() -> None:
    model = model_with(ByLayer(make("kvpop"), {1: make("tova")}))
    cache = BoundedCache(model)
    with pytest.raises(ValueError, match="TOVA cannot roll back"):
        cache.activate_past_recording()
    with pytest.raises(ValueError, match="TOVA cannot roll back"):
        model.generate(text(1, 12), max_new_tokens=5, prompt_lookup_num_tokens=3, **{cache_argument(model): cache})
    assert [layer.rollback for layer in cache.bounded_layers] == [0, 0]
    assert cache.is_compileable


def test_case_8_rows_that_do_not_fit_are_refused_and_nothing_changes() -> None:
    model = model_with(make("kvpop"))
    cache, unused = BoundedCache(model), BoundedCache(model)
    feed(model, cache, text(2, 20))
    before = snapshot(cache)
    for wrong in (-1, 2):
        with pytest.raises(ValueError, match=rf"row must be in \[0, 2\), got {wrong}"):
            cache.clear(wrong)
        with pytest.raises(ValueError, match=rf"row must be in \[0, 2\), got {wrong}"):
            cache.put(wrong, cache)
    with pytest.raises(ValueError, match=r"other_row must be in \[0, 0\), got 0"):
        cache.put(0, unused)
    with pytest.raises(ValueError, match="another model or policy"):
        cache.put(0, BoundedCache(model_with(make("kvpop"))))
    with pytest.raises(ValueError, match="never used has no shapes"):
        unused.like(2)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(cache)))


def test_what_was_put_is_not_forgotten_by_a_call_with_other_rows() -> None:
    model = model_with(make("kvpop"))
    one = BoundedCache(model)
    feed(model, one, text(1, 20))
    cache = one.like(2)
    cache.put(0, one)
    with pytest.raises(ValueError, match="the cache holds 2 rows"):
        feed(model, cache, text(3, 1))
    assert cache.tokens_seen() == [20, 0]


def test_an_empty_cache_is_allocated_for_another_number_of_rows() -> None:
    model = model_with(make("kvpop"))
    cache = BoundedCache(model)
    for rows in (2, 4):
        cache.allocate(rows)
        assert cache.rows == rows
    feed(model, cache, text(4, 20))
    cache.allocate(2)
    assert cache.rows == 4  # it is used


@pytest.mark.parametrize("kind", KINDS)
def test_everything_works_in_inference_mode_and_outside_of_it_afterwards(kind: str) -> None:
    model, ids = model_with(make(kind), dtype=torch.float32), text(2, 30)
    expected = model.generate(ids, max_new_tokens=10, num_beams=2, min_new_tokens=10)
    with torch.inference_mode():
        assert torch.equal(model.generate(ids, max_new_tokens=10, num_beams=2, min_new_tokens=10), expected)
        cache = BoundedCache(model)
        feed(model, cache, ids)
        twin = copy.deepcopy(cache)
    for c in (cache, twin):
        c.reorder_cache(torch.tensor([1, 0]))
        feed(model, c, ids)
    assert cache.held_positions() == twin.held_positions()
    cache.reset()
    assert sum(cache.tokens_seen()) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_model_under_autocast(kind: str) -> None:
    model, ids = model_with(make(kind), dtype=torch.float32), text(2, 30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model.generate(ids, max_new_tokens=10, min_new_tokens=10, return_dict_in_generate=True)
    cache = getattr(out, cache_argument(model))
    assert {store.keys.dtype for store in cache.stores} == {torch.bfloat16}
    assert cache.tokens_seen() == [39, 39]


def test_case_9_tova_cannot_roll_back_and_says_so() -> None:
    model = model_with(make("tova"))
    with pytest.raises(ValueError, match="TOVA cannot roll back"):
        BoundedCache(model, rollback=3)
    cache = BoundedCache(model)
    feed(model, cache, text(1, 20))
    with pytest.raises(ValueError, match="TOVA cannot roll back"):
        cache.activate_past_recording()


@pytest.mark.parametrize("rollback", [-1, 513])
def test_a_rollback_out_of_range_is_refused(rollback: int) -> None:
    with pytest.raises(ValueError, match=f"between 0 and 512 tokens, got {rollback}"):
        BoundedCache(model_with(make("kvpop")), rollback=rollback)


def test_rolling_back_costs_what_the_report_says() -> None:
    model = model_with(make("kvpop"))
    plain, cache = BoundedCache(model), BoundedCache(model, rollback=4)
    sizes = []
    for _ in range(20):
        feed(model, plain, text(1, 3))
        feed(model, cache, text(1, 3))
        sizes.append(cache.nbytes() - plain.nbytes())
    assert 0 < sizes[0] <= sizes[-1] == sizes[-2]


def test_case_10_a_fresh_cache_is_true_and_is_the_one_that_is_filled() -> None:
    model = model_with(KVpop(SMALL))
    cache = BoundedCache(model)
    assert cache
    assert (cache.get_seq_length(), cache.rows_held(), cache.nbytes()) == (0, 0, 0)
    options = {cache_argument(model): cache}
    out = model.generate(text(1, 5), max_new_tokens=3, min_new_tokens=3, return_dict_in_generate=True, **options)
    assert getattr(out, cache_argument(model)) is cache
    assert cache.tokens_seen() == [7]


def test_another_number_of_rows_is_an_error_and_changes_nothing() -> None:
    model = model_with(KVpop(SMALL))
    cache = BoundedCache(model)
    feed(model, cache, text(2, 20))
    before = snapshot(cache)
    for rows in (1, 3):
        with pytest.raises(ValueError, match=f"the cache holds 2 rows of .*, but the input has {rows} rows"):
            feed(model, cache, text(rows, 1))
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(cache)))
    assert cache.get_seq_length() == 20
    assert HANDOVER.take() is None


def test_a_refused_call_leaves_no_store_behind() -> None:
    model, ids = model_with(KVpop(SMALL)), text(1, 20)
    expected = model(ids, use_cache=False).logits
    cache = BoundedCache(model)
    feed(model, cache, ids)
    before = snapshot(cache)
    with pytest.raises(ValueError, match="2-D padding mask"):
        feed(model, cache, ids, attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.float64))
    close(model(ids, use_cache=False).logits, expected)  # this call has no cache
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(cache)))


def test_a_copied_cache_goes_on_from_the_same_prefix() -> None:
    """What the transformers documentation does to reuse a prompt."""
    model, ids = model_with(KVpop(SMALL)), text(1, 21)
    cache = BoundedCache(model)
    feed(model, cache, ids[:, :20])
    other = copy.deepcopy(cache)
    close(feed(model, other, ids[:, 20:]), feed(model, cache, ids[:, 20:]))
    assert other.held_positions() == cache.held_positions()


@pytest.mark.parametrize("what", ["attached anew", "another model", "detached"])
def test_a_cache_of_another_attachment_is_refused(what: str) -> None:
    model, ids = model_with(KVpop(SMALL)), text(1, 21)
    cache = BoundedCache(model)
    feed(model, cache, ids[:, :20])
    if what == "attached anew":
        attach(model, KVpop(SMALL))
    elif what == "another model":
        model = model_with(KVpop(SMALL))
    else:
        detach(model)
    with pytest.raises(ValueError):
        feed(model, cache, ids[:, 20:])


def test_a_cache_filled_in_inference_mode_goes_on_under_no_grad() -> None:
    """A DynamicCache does."""
    model, ids = model_with(KVpop(SMALL)), text(1, 21)
    cache = BoundedCache(model)
    with torch.inference_mode():
        model(ids[:, :20], **{cache_argument(model): cache})
    close(feed(model, cache, ids[:, 20:])[:, 0], reference(model, ids)[0][:, 20])


# Scores and budgets

SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0], dtype=torch.float64)


class SpecialScorer(Scorer):
    """NaN, +-inf and +-0 in an order that depends on the token."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__(heads, head_dim, delayed=False)

    def _advance(self, state, x_new, x_due, valid=None):
        return SPECIAL[(x_due.double().sum(-1) * 1000).floor().long() % len(SPECIAL)].to(self.dtype), state


class OwnScorer(Policy):
    """Any scorer and decay as a policy."""

    def __init__(self, budget: Budget, scorer: type[Scorer], decay: float = 0.0) -> None:
        for name, value in (("budget", budget), ("scorer", scorer), ("decay", decay)):
            object.__setattr__(self, name, value)

    name = "own"

    @property
    def slots(self) -> int:
        return self.budget.slots

    def layer(self, shape: LayerShape) -> RankedLayer:
        scorer = self.scorer(shape.kv_heads, shape.head_dim)
        return RankedLayer(shape, self.budget, scorer, FixedDecay(shape.kv_heads, self.decay))


def observed(model: PreTrainedModel, ids: Tensor) -> dict[int, LayerView]:
    seen: dict[int, LayerView] = {}
    with torch.no_grad():
        model(
            ids, use_cache=False, kvpop=SequencePass(Documents.single(*ids.shape), lambda v: seen.update({v.layer: v}))
        )
    return seen


@pytest.mark.parametrize("size", [1, 5, 60])
@pytest.mark.parametrize("decay", [0.0, -0.1])
def test_case_11_protection_is_structural_under_any_score(size: int, decay: float) -> None:
    model, ids = model_with(OwnScorer(SMALL, SpecialScorer, decay)), text(1, 60, 5)
    scores = torch.cat([view.score_NHL.flatten() for view in observed(model, ids).values()])
    assert scores.isnan().any()
    assert scores.isposinf().any()
    assert scores.isneginf().any()
    expected, expiry = reference(model, ids)
    cache, start = BoundedCache(model), 0
    for count in pieces(60, size):
        close(feed(model, cache, ids[:, start : start + count]), expected[:, start : start + count])
        start += count
        held = cache.held_positions()
        assert held == held_by_mask(expiry, start - 1)
        protected = {0, 1} | set(range(start - SMALL.window, start))
        for layer in held:
            for head in layer[0]:
                assert {t for t in protected if 0 <= t < start} <= set(head)


@pytest.mark.parametrize("kind", ["kvpop", "random", "streaming", "streaming-cache", "tova"])
@pytest.mark.parametrize("sizes", [(s, 1, k) for s in (0, 1) for k in (0, 1)])
def test_case_12_rows_held_is_the_lesser_of_seen_and_budget(kind: str, sizes: tuple[int, int, int]) -> None:
    budget = Budget(*sizes)
    model = model_with(make(kind, budget))
    for length in range(1, budget.slots + 2):
        ids = text(2, length, length)
        for size in {1, length}:
            cache = BoundedCache(model)
            assert cache.rows_held() == 0
            assert torch.isfinite(feed(model, cache, ids, pieces(length, size))).all()
            for layer in cache.held_positions():
                assert [len(head) for row in layer for head in row] == [min(length, budget.slots)] * 4
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        Budget(sizes[0], 0, sizes[2])


@pytest.mark.parametrize("decay", [0.0, -1e-3, -0.05, -10.0])
def test_case_13_newcomers_compete(decay: float) -> None:
    budget = Budget(2, 8, 16)
    length = 5 * budget.slots
    model, ids = model_with(Random(budget, decay=decay)), text(1, length)
    scores = {layer: view.score_NHL[0].tolist() for layer, view in observed(model, ids).items()}
    cache, long_sets = BoundedCache(model), []
    for start in range(0, length, budget.slots):
        feed(model, cache, ids[:, start : start + budget.slots])
        q = start + budget.slots - 1
        for layer, heads in scores.items():
            for h, score in enumerate(heads):  # Eq. 18 at this very query, not the static priority
                effective = [r + (q - t) * decay for t, r in enumerate(score)]
                assert set(cache.held_positions()[layer][0][h]) == oracle_held(effective, budget, q)
        long_sets.append({t for t in cache.held_positions()[0][0][0] if budget.sinks <= t <= q - budget.window})
    assert all(a != b for a, b in itertools.pairwise(long_sets))
    if decay == -10.0:  # stronger than any score: the newest win
        assert long_sets[-1] == set(range(length - budget.window - budget.long, length - budget.window))
    if decay == 0.0:
        assert min(long_sets[-1]) < length // 2


# Memory


@pytest.mark.parametrize("how", ["by the caller", "by generate", "by rollout.generate"])
def test_a_long_prompt_taken_in_by_chunks_needs_the_memory_of_one_chunk(how: str) -> None:
    model = model_with(KVpop(SMALL), dtype=torch.float32)
    needed = []
    for length in (600, 2400):
        cache, ids = BoundedCache(model), text(1, length)
        with Largest() as largest:
            if how == "by the caller":
                for part in ids.split(100, dim=1):
                    feed(model, cache, part)
            elif how == "by generate":
                model.generate(ids, max_new_tokens=2, prefill_chunk_size=100, **{cache_argument(model): cache})
            else:
                list(generate(model, ids, max_new_tokens=2, prefill_chunk=100, cache=cache))
        needed.append(largest.bytes)
    assert needed[1] < needed[0] + 2400 * 16  # the ids and positions of the prompt itself


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scorer", ["mlp", "mlp+mlstm"])
@pytest.mark.parametrize("groups", [1, 3])
def test_cases_14_and_15_bytes_are_the_formula_and_flat(dtype: torch.dtype, scorer: str, groups: int) -> None:
    model = model_with(KVpop(SMALL, scorer=scorer), dtype=dtype, groups=groups)
    state = attached_policies(model)[0].scorer.state_bytes()
    assert (state > 0) == (scorer != "mlp")
    cache, ids = BoundedCache(model), text(2, 10 * SMALL.slots)
    expected = cache_bytes(
        SMALL, layers=2, kv_heads=2, head_dim=8, element_size=dtype.itemsize, rows=2, state_bytes=state
    )  # fmt: skip
    feed(model, cache, ids[:, : SMALL.slots])
    where = [x.data_ptr() for store in cache.stores for x in store.tensors().values()]
    for t in range(SMALL.slots, ids.shape[1]):
        assert cache.nbytes() == expected
        feed(model, cache, ids[:, t : t + 1])
    feed(model, cache, ids)
    assert cache.nbytes() == expected
    allocated = sum(
        x.untyped_storage().nbytes() for store in cache.stores for x in (*store.tensors().values(), store.taken)
    )
    assert allocated == expected  # no view into something larger
    assert [x.data_ptr() for store in cache.stores for x in store.tensors().values()] == where  # written in place


def test_dense_memory_grows_and_says_so() -> None:
    model = attach(tiny_model(dtype=torch.float32), Dense())
    cache = BoundedCache(model)
    assert Dense().slots is None
    for seen, columns in ((10, 64), (20, 64), (80, 128), (300, 384)):  # a quarter more than was needed, in 64s
        feed(model, cache, text(2, seen - cache.rows_held()))
        shape = dict(layers=2, kv_heads=2, head_dim=8, element_size=4, rows=2)
        came = columns  # a byte for each token of a row that can be taken back, with the same room
        assert cache.nbytes() == dense_bytes(columns, **shape) + 2 * 2 * (2 * columns * 4 + 8 + came) + 2 * 8
        assert cache.rows_held() == seen


@pytest.mark.parametrize("kind", ["tova", "streaming-cache", "random"])
def test_case_15_other_policies_are_flat_too(kind: str) -> None:
    model = model_with(make(kind))
    cache, sizes = BoundedCache(model), set()
    feed(model, cache, text(1, SMALL.slots))
    for _ in range(9 * SMALL.slots):
        feed(model, cache, text(1, 1))
        sizes.add((cache.nbytes(), cache.rows_held()))
    assert sizes == {(cache.nbytes(), SMALL.slots)}


# TOVA


def naive_tova(q: Tensor, k: Tensor, v: Tensor, size: int, prefill: int) -> tuple[Tensor, list[list[int]]]:
    """One row: attend to all that is held and new, then keep the ``size`` best by the last query's mean weight."""
    R, S, _ = q.shape
    G, held, out, sets = R // k.shape[0], [], torch.zeros(R, S, v.shape[-1], dtype=q.dtype), []
    for first, last in [(0, prefill), *((t, t + 1) for t in range(prefill, S))]:
        held = held + list(range(first, last))
        for t in range(first, last):
            seen = [i for i in held if i <= t]
            weights = [(k[r // G, seen] @ q[r, t] * 0.5).softmax(0) for r in range(R)]
            for r in range(R):
                out[r, t] = weights[r] @ v[r // G, seen]
        if len(held) > size:
            mean = sum(weights) / R
            held = sorted(held[i] for i in mean.argsort(descending=True)[:size].tolist())
        sets.append(held)
    return out, sets


@settings(max_examples=30)
@given(
    st.integers(0, 999), st.sampled_from([(1, 1), (2, 2), (1, 3)]), st.integers(1, 7), st.integers(1, 20),
)  # fmt: skip
def test_tova_is_its_rule(seed: int, heads: tuple[int, int], size: int, prefill: int) -> None:
    H, G = heads
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (2 * torch.randn(2, n, 20, 6, generator=generator, dtype=torch.float64) for n in (H * G, H, H))
    layer = TovaLayer(LayerShape(0, H * G, H, 6), size)
    expected = [naive_tova(q[b], k[b], v[b], size, prefill) for b in range(2)]
    slots, out = layer.new_slots(k, v), []
    bounds = [(0, prefill), *((t, t + 1) for t in range(prefill, 20))]
    for i, (a, b) in enumerate(bounds):
        out.append(slots.attend(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], None, 0.5))
        for row in range(2):
            assert slots.held()[row] == [expected[row][1][i]] * H
    close(torch.cat(out, dim=2), torch.stack([o for o, _ in expected]))


@settings(max_examples=10)
@given(st.integers(0, 999), st.integers(1, 7))
def test_tova_on_a_given_text_is_tova_while_decoding_it(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (2 * torch.randn(2, n, 20, 6, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    ids = torch.tensor([[0] * 20, [1] * 8 + [-1] * 3 + [2] * 9])
    views: list[LayerView] = []
    layer = TovaLayer(LayerShape(0, 4, 2, 6), size)
    out = layer.attend_sequence(q, k, v, 0.5, SequencePass(Documents(ids), views.append))
    for b, first, last in ((0, 0, 20), (1, 0, 8), (1, 11, 20)):
        part = slice(first, last)
        expected, sets = naive_tova(q[b, :, part], k[b, :, part], v[b, :, part], size, 1)
        close(out[b, :, part], expected)
        for t in range(first, last):
            for h in range(2):
                kept = [i - first for i in range(t + 1) if t < views[0].expiry[b, h, i]]
                before = sorted({*sets[t - first - 1], t - first}) if t > first else [0]
                assert kept == before  # what query t sees; what it drops is gone from t + 1 on


def test_tova_through_a_model() -> None:
    model, ids = model_with(make("tova")), text(2, 41)
    expected, expiry = reference(model, ids)
    cache = BoundedCache(model)
    close(feed(model, cache, ids[:, :40], [1] * 40), expected[:, :40])
    seen_by_next = [[[[t for t in h if t < 40] for h in row] for row in layer] for layer in held_by_mask(expiry, 40)]
    assert cache.held_positions() == seen_by_next
    for layer in cache.held_positions():
        for first, second in layer:
            assert first == second  # one set for all heads of a layer
            assert len(first) == SMALL.slots


def test_tova_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="at least 1 slot, got 0"):
        Tova(0)


# StreamingLLM with positions counted inside the cache


def rotate(x: Tensor, position: Tensor, width: int) -> Tensor:
    """Rotary embedding, halves convention, written out."""
    half = width // 2
    angle = position[..., None].double() * 100.0 ** (-torch.arange(half).double() / half)
    a, b, rest = x[..., :half], x[..., half:width], x[..., width:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], dim=-1)


def rotary(width: int):
    def cos_sin(position: Tensor) -> tuple[Tensor, Tensor]:
        angle = position[..., None].double() * 100.0 ** (-torch.arange(width // 2).double() / (width // 2))
        return torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()

    return cos_sin


@settings(max_examples=30)
@given(
    st.integers(0, 999), st.integers(0, 3), st.integers(1, 4), st.integers(0, 3), st.sampled_from([8, 4]),
    st.lists(st.integers(1, 24), max_size=4),
)  # fmt: skip
def test_streaming_positions_are_indices_in_the_cache(
    seed: int, s: int, w: int, k: int, width: int, cuts: list[int]
) -> None:
    """Keys are kept without rotation and rotated at their index in the cache, as the original StreamingLLM does."""
    S, D, budget = 24, 8, Budget(s, w, k)
    generator = torch.Generator().manual_seed(seed)
    raw_q, raw_k, v = (torch.randn(1, n, S, D, generator=generator, dtype=torch.float64) for n in (4, 2, 2))
    expected = torch.zeros(1, 4, S, D, dtype=torch.float64)
    for t in range(S):
        cache = sorted({*range(min(s, t + 1)), *range(max(0, t - w - k + 1), t + 1)})
        index = torch.arange(len(cache))
        for r in range(4):
            keys = rotate(raw_k[0, r // 2, cache], index, width)
            query = rotate(raw_q[0, r, t], index[-1], width)
            expected[0, r, t] = (keys @ query * 0.5).softmax(0) @ v[0, r // 2, cache]
    text_position = torch.arange(S)
    q, keys = rotate(raw_q, text_position, width), rotate(raw_k, text_position, width)
    layer = StreamingLayer(LayerShape(0, 4, 2, D, rotary(width)), budget, relative=True).double()
    close(layer.attend_sequence(q, keys, v, 0.5, SequencePass(Documents.single(1, S))), expected)
    slots, out = layer.new_slots(keys, v), []
    for a, b in itertools.pairwise(sorted({0, S, *cuts})):
        out.append(slots.attend(q[:, :, a:b], keys[:, :, a:b], v[:, :, a:b], None, 0.5))
    close(torch.cat(out, dim=2), expected)


def test_streaming_in_the_cache_through_a_model() -> None:
    model, ids = model_with(make("streaming-cache")), text(2, 50)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        original = attach(tiny_model(), Streaming(SMALL))(ids, use_cache=False).logits
    full = SMALL.slots
    torch.testing.assert_close(expected[:, :full], original[:, :full], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(expected[:, full:], original[:, full:], atol=1e-3)
    for size in (1, 7, 50):
        close(feed(model, BoundedCache(model), ids, pieces(50, size)), expected)


def test_streaming_in_the_cache_counts_inside_each_document() -> None:
    model = model_with(make("streaming-cache"))
    parts = [text(1, 30, 1), text(1, 17, 2)]
    documents = Documents(torch.tensor([[0] * 30 + [1] * 17]))
    with torch.no_grad():
        packed = model(
            torch.cat(parts, 1), position_ids=documents.position_BS, use_cache=False, kvpop=SequencePass(documents)
        ).logits
        alone = [model(part, use_cache=False).logits for part in parts]
    close(packed, torch.cat(alone, dim=1))


def test_streaming_in_the_cache_needs_a_rotary_embedding() -> None:
    with pytest.raises(ValueError, match="layer 3 has no rotary embedding"):
        StreamingLayer(LayerShape(3, 4, 2, 8), SMALL, relative=True)
    with pytest.raises(ValueError, match="'original' or 'cache', got 'both'"):
        Streaming(SMALL, positions="both")  # type: ignore[arg-type]


# Random


@settings(max_examples=20)
@given(st.lists(st.integers(1, 50), max_size=6), st.integers(0, 99))
def test_random_is_the_same_under_any_chunking(cuts: list[int], seed: int) -> None:
    model, ids = attach(tiny_model(), Random(SMALL, seed=seed)), text(2, 50)
    bounds = sorted({0, 50, *cuts})
    caches = BoundedCache(model), BoundedCache(model)
    a = feed(model, caches[0], ids, [y - x for x, y in itertools.pairwise(bounds)])
    close(a, feed(model, caches[1], ids))
    assert caches[0].held_positions() == caches[1].held_positions()


def test_random_differs_by_seed_layer_and_head_but_not_by_text_or_row() -> None:
    held = {}
    for seed in (0, 1):
        for start in (0, 1):
            model = attach(tiny_model(), Random(SMALL, seed=seed))
            cache = BoundedCache(model)
            feed(model, cache, text(2, 60, start))
            held[seed, start] = cache.held_positions()
    assert held[0, 0] == held[0, 1]
    assert held[0, 0] != held[1, 0]
    layers = held[0, 0]
    assert layers[0][0] == layers[0][1]
    assert layers[0] != layers[1]
    assert layers[0][0][0] != layers[0][0][1]


def test_random_scores_are_uniform_and_independent() -> None:
    scorer = Random(SMALL).layer(LayerShape(0, 4, 2, 8)).scorer
    assert isinstance(scorer, nn.Module)
    score = scorer.score_sequence(torch.zeros(1, 2, 20_000, 16), 4)[0].double()
    assert score.min() >= 0
    assert score.max() <= 1
    assert score.mean(-1).tolist() == pytest.approx([0.5, 0.5], abs=0.01)
    assert score.var(-1).tolist() == pytest.approx([1 / 12, 1 / 12], abs=0.003)
    centred = score - 0.5
    assert abs((centred[0] * centred[1]).mean().item()) < 0.003
    assert (centred[:, 1:] * centred[:, :-1]).mean(-1).abs().max() < 0.003


# Found by review


@pytest.mark.parametrize("layers", [1, 2])
def test_a_cache_is_refused_once_the_attention_implementation_was_changed(layers: int) -> None:
    model, ids = model_with(KVpop(SMALL)), text(1, 21)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    cache = BoundedCache(model)
    feed(model, cache, ids[:, :20])
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="now attends with 'sdpa', not 'kvpop'"):
        feed(model, cache, ids[:, 20:])
    model.config._attn_implementation = "kvpop"
    assert HANDOVER.take() is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_outside_no_grad_keeps_no_graph(kind: str) -> None:
    model = model_with(make(kind)).requires_grad_(True)
    cache = BoundedCache(model)
    for t in range(12):
        model(text(1, 12)[:, t : t + 1], **{cache_argument(model): cache})
    assert all(not tensor.requires_grad for store in cache.stores for tensor in store.tensors().values())
    copy.deepcopy(cache)


def test_an_attention_mask_that_does_not_fit_is_refused() -> None:
    model, ids = model_with(KVpop(SMALL)), text(1, 10)
    with pytest.raises(ValueError, match="covers 7 tokens"):
        model(ids, attention_mask=torch.ones(1, 7, dtype=torch.long), use_cache=False)
    cache = BoundedCache(model)
    feed(model, cache, ids)
    with pytest.raises(ValueError, match="covers 10 tokens, but 11 were given, 1 of them new"):
        feed(model, cache, ids[:, :1], attention_mask=torch.ones(1, 10, dtype=torch.long))
    assert cache.tokens_seen() == [10]


def test_cache_relative_positions_need_a_rotary_embedding_by_halves() -> None:
    from transformers import CohereConfig, CohereForCausalLM

    sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4)
    model = CohereForCausalLM(CohereConfig(**sizes, num_key_value_heads=2, pad_token_id=0))
    with pytest.raises(ValueError, match="no cache-relative positions"):
        attach(model, Streaming(Budget(1, 2, 2), positions="cache"))

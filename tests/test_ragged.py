"""Stores whose heads have budgets of their own: each head holds what the definition says for its budget, and no more memory.

Whatever is done to a store: the expected sets are ``oracle_held`` of each head by itself, the expected outputs a softmax over
them, in float64. Slots are found by adding up sizes in plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from kvpop.attachment import cache_argument
from kvpop.bench import fill_store
from kvpop.budget import Budget, cache_bytes
from kvpop.cache import BoundedCache
from kvpop.core.cutoff import oracle_held
from kvpop.core.priority import Decay, static_priority
from kvpop.ops.sparse_attention.api import sparse_attention
from kvpop.policies import RankedLayer
from kvpop.policies.base import LayerShape, Policy
from kvpop.scorers import ConstantScorer, Scorer, build_scorer
from kvpop.session import Session, SessionError
from kvpop.slots import RankedSlots
from tests.test_cache import feed, model_with, text
from tests.test_compile import Ops

# Shapes: B rows, H KV heads, G query heads per KV head, M slots, N slots of all heads of a row, S tokens, D head dim.

D, V, G, SCALE = 4, 8, 2, 0.7
SPECIAL = {50.0: math.inf, -50.0: -math.inf, 90.0: math.nan}


class FromKey(Scorer):
    """The score of a token is what stands in its key's first channel: ties and special values as a test likes."""

    def __init__(self, heads: int, delayed: bool) -> None:
        super().__init__(heads, (D + V) // 2, delayed=delayed)

    def _advance(self, state, x_new_NHLE: Tensor, x_due_NHLE: Tensor, valid_NL=None):
        score_NHL = x_due_NHLE[..., 0]
        for code, value in SPECIAL.items():
            score_NHL = score_NHL.where(score_NHL != code, value)
        return score_NHL, state


def scorer_of(kind: str, H: int) -> Scorer:
    if kind in ("key", "key/delayed"):
        return FromKey(H, kind == "key/delayed").double()
    torch.manual_seed(0)
    scorer, generator = build_scorer(kind, H, (D + V) // 2).double(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in scorer.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.4)
    return scorer


SCORERS = ["key", "key/delayed", "mlp+mlstm"]


def store_of(budget: Budget, scorer: Scorer, rows: int, dtype=torch.float64, attention=None) -> RankedSlots:
    H = scorer.heads
    log_gamma_H = -torch.linspace(0.0, 0.3, H, dtype=torch.float64)
    k, v = (torch.zeros(rows, H, 0, X, dtype=dtype) for X in (D, V))
    return RankedSlots(budget, scorer, log_gamma_H, 2, k, v, attention)


def draw_tokens(
    generator: torch.Generator, rows: int, H: int, n: int, plain: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (
        torch.randn(rows, heads, n, X, generator=generator, dtype=torch.float64)
        for heads, X in ((H * G, D), (H, D), (H, V))
    )
    if plain:
        return q, k, v
    k[..., 0] = torch.randint(-3, 3, (rows, H, n), generator=generator).double()
    for code in SPECIAL:
        k[..., 0][torch.rand(rows, H, n, generator=generator) < 0.04] = code
    return q, k, v


@dataclass
class Row:
    """What a row was given: (key [H, D], value [H, V]) of a token, or None for padding; and the positions pinned in it."""

    given: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)
    pins: frozenset[int] = frozenset()

    @property
    def real(self) -> list[tuple[Tensor, Tensor]]:
        return [token for token in self.given if token is not None]


def keys_of(row: Row) -> Tensor:
    return torch.stack([k for k, _ in row.real], 1)


def values_of(row: Row) -> Tensor:
    return torch.stack([v for _, v in row.real], 1)


def sets_of(store: RankedSlots, row: Row, queries: list[int]) -> list[list[set[int]]]:
    """[head][query] -> what the definition holds."""
    k_HSD, v_HSV = keys_of(row), values_of(row)
    score_HS = store.scorer.score_sequence(torch.cat([k_HSD, v_HSV], -1)[None], store.budget.window)[0]
    priority_HS = static_priority(score_HS, torch.arange(k_HSD.shape[1]), store.log_gamma, store.decay_step).tolist()
    s, w = store.budget.sinks, store.budget.window
    longs = store.budget.longs(len(priority_HS))
    return [
        [oracle_held(p, Budget(s, w, k), q, row.pins) for q in queries] for p, k in zip(priority_HS, longs, strict=True)
    ]


def check(store: RankedSlots, rows: list[Row]) -> None:
    """Every head holds its set, with the keys and values of these tokens, in slots of its own."""
    H = store.position.shape[1]
    sizes = [store.budget.sinks + store.budget.window + k for k in store.budget.longs(H)]
    if len(set(sizes)) > 1:
        assert store.keys.shape == (len(rows), 1, sum(sizes), D)
        assert store.values.shape == (len(rows), 1, sum(sizes), V)
    else:
        assert store.keys.shape == (len(rows), H, sizes[0], D)
    keys, values = (x.reshape(len(rows), sum(sizes), -1) for x in (store.keys, store.values))
    assert store.seen.tolist() == [len(row.real) for row in rows]
    for b, row in enumerate(rows):
        seen = len(row.real)
        sets = sets_of(store, row, [seen - 1]) if seen else [[set()]] * H
        for h in range(H):
            where = store.position[b, h].tolist()
            assert sorted(p for p in where if p >= 0) == sorted(sets[h][0]), (b, h)
            assert len(sets[h][0]) == min(seen, sizes[h])
            assert all(p < 0 for p in where[sizes[h] :])
            for m, p in enumerate(where):
                if p >= 0:
                    at = sum(sizes[:h]) + m
                    assert torch.equal(keys[b, at], row.real[p][0][h])
                    assert torch.equal(values[b, at], row.real[p][1][h])


def feed_rows(store: RankedSlots, rows: list[Row], generator: torch.Generator, n: int, valid: Tensor | None) -> None:
    """Take tokens in, and check what their queries attended to."""
    H = store.position.shape[1]
    q, k, v = draw_tokens(generator, len(rows), H, n, not isinstance(store.scorer, FromKey))
    out = store.attend(q, k, v, valid, SCALE)
    for b, row in enumerate(rows):
        real = [valid is None or bool(valid[b, j]) for j in range(n)]
        start = len(row.real)
        row.given += [(k[b, :, j], v[b, :, j]) if real[j] else None for j in range(n)]
        columns = [j for j in range(n) if real[j]]
        assert not out[b][:, [j for j in range(n) if not real[j]]].any()
        if not columns:
            continue
        sets, S = sets_of(store, row, list(range(start, start + len(columns)))), len(row.real)
        keep_HnS = torch.tensor([[[t in held for t in range(S)] for held in of_head] for of_head in sets])
        logits = q[b][:, columns] @ keys_of(row).repeat_interleave(G, 0).transpose(-1, -2) * SCALE
        logits = logits.masked_fill(~keep_HnS.repeat_interleave(G, 0), -torch.inf)
        expected = logits.softmax(-1) @ values_of(row).repeat_interleave(G, 0)
        torch.testing.assert_close(out[b][:, columns], expected, rtol=1e-9, atol=1e-9)
    check(store, rows)


@st.composite
def cases(draw):
    heads = draw(
        st.one_of(
            st.lists(st.integers(0, 6), min_size=2, max_size=4),
            st.sampled_from([[0, 14], [14, 0, 1], [5, 0], [0, 0, 9], [2, 2]]),
        )
    )
    budget = Budget(draw(st.integers(0, 2)), draw(st.integers(1, 5)), 0).with_heads(heads)
    rows = draw(st.integers(1, 3))
    action = st.one_of(
        st.tuples(st.just("feed"), st.integers(1, 3 * budget.slots // 2 + 2), st.sampled_from(["all", "left", "right", "any"])),
        st.tuples(st.just("steps"), st.integers(1, 2 * budget.slots), st.sampled_from(["all", "any"])),
        st.tuples(st.just("crop"), st.integers(1, 6), st.just("")),
        st.tuples(st.sampled_from(["select", "clear", "put", "move"]), st.integers(0, 10**6), st.just("")),
    )  # fmt: skip
    pins = st.sets(st.integers(0, 30), max_size=min(heads))
    return {
        "budget": budget,
        "heads": len(heads),
        "scorer": draw(st.sampled_from(SCORERS)),
        "reach": draw(st.integers(0, 6)),
        "pins": [draw(pins) for _ in range(rows)] if min(heads) and draw(st.booleans()) else None,
        "rows": rows,
        "actions": draw(st.lists(action, min_size=1, max_size=7)),
        "seed": draw(st.integers(0, 999)),
    }


def marks(side: str, rows: int, n: int, generator: torch.Generator) -> Tensor | None:
    if side == "all":
        return None
    count = torch.randint(0, n + 1, (rows, 1), generator=generator)
    index = torch.arange(n)
    if side == "any":
        return torch.rand(rows, n, generator=generator) < 0.6
    return index < count if side == "right" else index >= n - count


@settings(max_examples=200)
@given(cases())
@example(
    {
        "budget": Budget(1, 3, 0).with_heads([5, 0, 2]), "heads": 3, "scorer": "key/delayed", "reach": 5, "pins": None,
        "rows": 2, "seed": 3,
        "actions": [("feed", 9, "left"), ("steps", 9, "any"), ("crop", 4, ""), ("feed", 4, "all"), ("crop", 3, "")],
    }
)  # fmt: skip
def test_every_head_holds_what_its_budget_says_whatever_is_done(case) -> None:
    budget, generator = case["budget"], torch.Generator().manual_seed(case["seed"])
    store = store_of(budget, scorer_of(case["scorer"], case["heads"]), case["rows"])
    rows = [Row() for _ in range(case["rows"])]
    if case["reach"]:
        store.record(case["reach"])
    if case["pins"]:
        for row, pins in zip(rows, case["pins"]):
            row.pins = frozenset(pins)
        spans = [[(t, t + 1) for t in sorted(pins)] for pins in case["pins"]]
        widest = max(1, *(len(row) for row in spans))
        store.pin(torch.tensor([row + [(0, 0)] * (widest - len(row)) for row in spans]))
    for what, count, how in case["actions"]:
        if what == "feed":
            feed_rows(store, rows, generator, count, marks(how, len(rows), count, generator))
        elif what == "steps":
            for _ in range(count):
                feed_rows(store, rows, generator, 1, marks(how, len(rows), 1, generator))
        elif what == "crop":
            count = min(count, store.undoable)
            if count:
                store.crop(count)
                for row in rows:
                    del row.given[-count:]
        elif what == "select":
            order = torch.randint(len(rows), (1 + count % 3,), generator=generator)
            store.select(order)
            rows = [Row(list(rows[i].given), rows[i].pins) for i in order.tolist()]
        elif what == "clear":
            at = count % len(rows)
            store.clear(slice(at, at + 1))
            rows[at] = Row()
        elif what == "put":
            other, theirs = store_of(budget, store.scorer, 2), [Row(), Row()]
            length = 1 + count % (2 * budget.slots)
            feed_rows(other, theirs, generator, length, marks("any", 2, length, generator))
            at, of = count % len(rows), count // 7 % 2
            store.put(at, other, of)
            rows[at] = theirs[of]
        else:
            store.replace({name: x.clone() for name, x in store.tensors().items()})
            store.to("cpu")
        check(store, rows)


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 7), min_size=2, max_size=4), st.integers(0, 2), st.integers(1, 4), st.sampled_from(SCORERS)
)
def test_steps_and_chunks_of_any_size_are_the_same_store(heads: list[int], s: int, w: int, kind: str) -> None:
    budget = Budget(s, w, 0).with_heads(heads)
    length = 2 * budget.slots + 5
    q, k, v = draw_tokens(
        torch.Generator().manual_seed(length), 2, len(heads), length, kind not in ("key", "key/delayed")
    )
    found, scorer = [], scorer_of(kind, len(heads))
    for chunk in (1, 2, w + 1, length):
        store = store_of(budget, scorer, 2)
        parts = [
            store.attend(*(x[:, :, i : i + chunk] for x in (q, k, v)), None, SCALE) for i in range(0, length, chunk)
        ]
        found.append((torch.cat(parts, 2), store.held()))
    for out, held in found[1:]:
        torch.testing.assert_close(out, found[0][0], rtol=1e-9, atol=1e-9)
        assert held == found[0][1]


@pytest.mark.parametrize("through", [None, sparse_attention], ids=["own attention", "attention of the policy"])
@pytest.mark.parametrize("kind", ["key", "key/delayed"])
@pytest.mark.parametrize("heads", [(3, 0, 7), (0, 20), (1, 2, 3, 4)], ids=str)
def test_it_is_a_store_a_head(heads: tuple[int, ...], kind: str, through: Callable | None) -> None:
    budget = Budget(1, 3, 0).with_heads(heads)
    together = store_of(budget, scorer_of(kind, len(heads)), 2, attention=through)
    alone = [store_of(Budget(1, 3, k), scorer_of(kind, 1), 2) for k in heads]
    for store, gamma in zip(alone, together.log_gamma):
        store.log_gamma = gamma[None]
    generator = torch.Generator().manual_seed(0)
    for n in (1, 1, 5, 1, 17, *[1] * 30, 6, 1):
        q, k, v = draw_tokens(generator, 2, len(heads), n)
        out = together.attend(q, k, v, None, SCALE)
        for h, store in enumerate(alone):
            mine = store.attend(q[:, h * G : h * G + G], k[:, h : h + 1], v[:, h : h + 1], None, SCALE)
            torch.testing.assert_close(out[:, h * G : h * G + G], mine, rtol=1e-12, atol=1e-12)
            size = store.position.shape[-1]
            assert torch.equal(together.position[:, h, :size], store.position[:, 0])  # the very same slots
            base = sum(4 + k for k in heads[:h])
            for both, own in ((together.keys, store.keys), (together.values, store.values)):
                assert torch.equal(both[:, 0, base : base + size], own[:, 0])


def test_equal_heads_have_the_tensors_that_one_number_gives() -> None:
    """Also if they are named one by one."""
    stores = [store_of(budget, scorer_of("key", 3), 2) for budget in (Budget(1, 2, 4), Budget(1, 2, 4, (4, 4, 4)))]
    generator = torch.Generator().manual_seed(2)
    for n in (5, 1, 9, 1, 1):
        given = draw_tokens(generator, 2, 3, n)
        outs = [store.attend(*given, None, SCALE) for store in stores]
        assert torch.equal(*outs)
    assert stores[1].layout is None
    for name, x in stores[0].tensors().items():
        torch.testing.assert_close(stores[1].tensors()[name], x, rtol=0, atol=0, equal_nan=True)
    assert stores[0].keys.shape == (2, 3, 7, D)
    assert stores[0].nbytes() == stores[1].nbytes()


def test_budgets_for_other_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="a budget for 2 KV heads was given to 3"):
        store_of(Budget(1, 2, 4, (4, 1)), scorer_of("key", 3), 1)


@pytest.mark.parametrize("heads", [(3, 0, 7), (0, 500), (4, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bytes_are_those_of_the_formula_from_the_first_token_on(heads: tuple[int, ...], dtype: torch.dtype) -> None:
    budget, H = Budget(2, 5, 0).with_heads(heads), len(heads)
    scorer = build_scorer("mlp+mlstm", H, 8)
    k = torch.zeros(3, H, 0, 8, dtype=dtype)
    store = RankedSlots(budget, scorer, torch.zeros(H), 1, k, k)
    sizes = dict(
        layers=1, kv_heads=H, head_dim=8, element_size=dtype.itemsize, rows=3, state_bytes=scorer.state_bytes()
    )
    assert store.nbytes() == cache_bytes(budget, **sizes)
    held = sum(7 + k for k in heads)
    assert store.keys.numel() == 3 * held * 8
    x = torch.randn(3, H, 30, 8).to(dtype)
    store.attend(x, x, x, None, 0.3)
    store.attend(x[:, :, :1], x[:, :, :1], x[:, :, :1], None, 0.3)
    assert store.nbytes() == cache_bytes(budget, **sizes)
    store.select(torch.tensor([0, 2, 2, 1]))
    assert store.nbytes() == cache_bytes(budget, **sizes | {"rows": 4})


def test_a_store_moves_with_all_that_it_keeps() -> None:
    store = store_of(Budget(1, 2, 0).with_heads([3, 0]), scorer_of("key", 2), 1)
    store.to("meta")
    assert {x.device.type for x in (*store.tensors().values(), store.layout.size_H, store.layout.base_H)} == {"meta"}


def test_nothing_moves_in_memory() -> None:
    store = store_of(Budget(1, 2, 0).with_heads([3, 0]), scorer_of("key", 2), 2)
    generator = torch.Generator().manual_seed(0)

    def where() -> list[int]:
        return [x.data_ptr() for x in (*store.tensors().values(), store.layout.size_H, store.layout.base_H)]

    before = where()
    for n in (4, 1, 9):
        store.attend(*draw_tokens(generator, 2, 2, n), None, SCALE)
    store.select(torch.tensor([1, 0]))
    store.put(0, store_of(store.budget, store.scorer, 1))
    store.clear()
    assert where() == before


def test_a_step_takes_the_same_operations_at_every_length_and_asks_the_host_nothing() -> None:
    counts = []
    for length in (1, 5, 9, 40):  # below both heads' slots, between them, above
        store = store_of(Budget(1, 3, 0).with_heads([9, 0]), scorer_of("mlp+mlstm", 2), 2)
        generator = torch.Generator().manual_seed(0)
        store.attend(*draw_tokens(generator, 2, 2, length), None, SCALE)
        given = draw_tokens(generator, 2, 2, 1)
        with Ops() as ops:
            store.attend(*given, torch.ones(2, 1, dtype=torch.bool), SCALE)
        counts.append(ops.count)
    assert all(count == counts[0] for count in counts)
    assert not {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.is_nonzero.default"} & set(counts[0])


@pytest.mark.parametrize("constant", [False, True])
def test_a_store_can_be_filled_for_measuring(constant: bool) -> None:
    heads = (3, 0, 7)
    budget, H = Budget(2, 4, 0).with_heads(heads), len(heads)
    scorer = ConstantScorer(H, (D + V) // 2).double() if constant else scorer_of("key", H)
    for seen in (5, 8, 9, 40):
        store = store_of(budget, scorer, 2)
        fill_store(store, seen, budget.slots, torch.Generator().manual_seed(0))
        for row in store.held():
            for held, k in zip(row, heads):
                size = min(6 + k, seen)
                assert len(set(held)) == size
                if constant:
                    assert held == [*range(min(2, seen)), *range(seen - size + 2, seen)]
        for h, k in enumerate(heads):
            assert (store.position[:, h, 6 + k :] == -1).all()
        store.attend(*draw_tokens(torch.Generator().manual_seed(1), 2, H, 1), None, SCALE)
        assert [len(head) for head in store.held()[1]] == [min(6 + k, seen + 1) for k in heads]


# Through a model.

UNEVEN = Budget(2, 5, 0).with_heads([6, 1])


class Uneven(Policy):
    """Every layer has the same heads."""

    name = "uneven"
    slots = None

    def __init__(self, budget: Budget) -> None:
        object.__setattr__(self, "budget", budget)

    def layer(self, shape: LayerShape) -> RankedLayer:
        scorer = build_scorer("mlp+mlstm", shape.kv_heads, shape.head_dim)
        return RankedLayer(shape, self.budget, scorer, Decay(shape.kv_heads))


def test_one_graph_at_every_length() -> None:
    torch._dynamo.reset()
    model = model_with(Uneven(UNEVEN), dtype=torch.float32)
    counter = CompileCounter()
    compiled = torch.compile(model.forward, fullgraph=True, backend=counter)
    for prompt in (3, 8, 25):  # below both heads' slots, between them, above
        kept, fresh = BoundedCache(model), BoundedCache(model)
        ids = text(2, prompt + 15, prompt)
        for cache in (kept, fresh):
            feed(model, cache, ids[:, :prompt])
        for t in range(prompt, prompt + 15):
            step = dict(input_ids=ids[:, t : t + 1].clone(), position_ids=torch.full((2, 1), t))
            with torch.no_grad():
                logits = compiled(**step, **{cache_argument(model): kept}).logits
                assert torch.equal(logits, model(**step, **{cache_argument(model): fresh}).logits)
        assert kept.held_positions() == fresh.held_positions()
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_session_goes_on_and_does_not_fit_other_heads(tmp_path: Path) -> None:
    model = model_with(Uneven(UNEVEN))
    cache = BoundedCache(model)
    feed(model, cache, text(2, 40))
    Session(cache).save(tmp_path / "s", model)
    again = Session.load(tmp_path / "s", model).cache
    assert again.held_positions() == cache.held_positions()
    assert [[len(head) for head in row] for row in again.held_positions()[0]] == [[13, 8]] * 2
    step = text(2, 3, 9)
    assert torch.equal(feed(model, again, step), feed(model, cache, step))
    for heads in ([1, 6], [6, 2], [6, 6]):
        other = model_with(Uneven(Budget(2, 5, 0).with_heads(heads)))
        with pytest.raises(SessionError, match=r"another policy: layer 0: (budget|heads)"):
            Session.load(tmp_path / "s", other)


def test_rows_of_a_cache_come_and_go() -> None:
    model = model_with(Uneven(UNEVEN))
    single = BoundedCache(model)
    feed(model, single, text(1, 30))
    many = single.like(3)
    many.put(1, single)
    assert [len(row[0]) for row in many.held_positions()[0]] == [0, 13, 0]
    assert many.held_positions()[0][1] == single.held_positions()[0][0]
    many.clear(1)
    assert not any(head for row in many.held_positions()[0] for head in row)
    sizes = dict(layers=2, kv_heads=2, head_dim=8, element_size=8, rows=1)
    stores = sum(x.nbytes for store in single.stores for x in (store.keys, store.values))
    assert stores == 2 * (13 + 8) * 16 * 8
    assert single.nbytes() > cache_bytes(UNEVEN, **sizes)  # scorers' states, and priorities of 64 bits

"""The dense store against lists in plain Python: every token a row was given, attended to in float64, one query at a time."""

from __future__ import annotations

import copy
import math
import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from kvpop.attachment import attach, cache_argument
from kvpop.cache import BoundedCache
from kvpop.capture import capture
from kvpop.policies import ByLayer, Dense, Streaming
from kvpop.session import Session
from kvpop.slots import GrowingSlots, growing
from kvpop.slots.growing import ROUND, roomy
from tests.test_cache import SMALL, feed, model_with, text
from tests.test_cache_step import DEVICE, GPU, HALF, needs_triton
from tests.test_fused_step import launches, needs_gpu
from tests.tiny import tiny_model

# Shapes: B rows, H KV heads, G query heads per KV head, D head dim, V value dim.

H, G, D, V, SCALE = 2, 2, 8, 4, 0.5


class Lists:
    """What a dense store is: for every row the keys and values of its real tokens, and for every column that came since rows
    were moved about, which rows had a real token in it."""

    def __init__(self, rows: int) -> None:
        self.rows: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(rows)]
        self.came: list[list[bool]] = []
        self.taken = 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, valid: list[list[bool]]) -> Tensor:
        out = torch.zeros(*q.shape[:3], V, dtype=torch.float64)
        for i in range(q.shape[2]):
            for b, row in enumerate(self.rows):
                if valid[b][i]:
                    row.append((k[b, :, i].double(), v[b, :, i].double()))
                    for r in range(H * G):
                        keys, values = (torch.stack([pair[j][r // G] for pair in row]) for j in (0, 1))
                        out[b, r, i] = (SCALE * keys @ q[b, r, i].double()).softmax(0) @ values
            self.came.append([valid[b][i] for b in range(len(self.rows))])
        self.taken += q.shape[2]
        return out

    def crop(self, tokens: int) -> None:
        self.taken -= tokens
        for _ in range(tokens):
            for row, real in zip(self.rows, self.came.pop()):
                if real:
                    row.pop()

    def put(self, row: int, other: Lists, other_row: int) -> None:
        self.rows[row], self.came = list(other.rows[other_row]), []

    def select(self, rows: list[int]) -> None:
        self.rows = [list(self.rows[b]) for b in rows]
        self.came = [[column[b] for b in rows] for column in self.came]

    def clear(self, row: int | None) -> None:
        self.came = []
        for b in range(len(self.rows)) if row is None else [row]:
            self.rows[b] = []
        self.taken = 0 if row is None else self.taken


def fresh(rows: int, dtype: torch.dtype = torch.float64, impl: str = "reference") -> GrowingSlots:
    like = torch.zeros(rows, H, 0, D, dtype=dtype, device=DEVICE)
    store = GrowingSlots(like, like[..., :V])
    store.impl = impl
    return store


def tokens(rows: int, n: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(rows, heads, n, X, generator=generator) for heads, X in ((H * G, D), (H, D), (H, V)))
    return [x.to(dtype) for x in made]


def same(store: GrowingSlots, lists: Lists, n: int = 1, seed: int = 0, valid: list[list[bool]] | None = None) -> None:
    """Both take in the same tokens, NaN in place of padding, and agree about everything."""
    rows, dtype = len(lists.rows), store.keys.dtype
    q, k, v = tokens(rows, n, seed, dtype)
    expected = lists.attend(q, k, v, valid or [[True] * n] * rows)
    given = None if valid is None else torch.tensor(valid)
    if given is not None:
        k, v = (x.masked_fill(~given[:, None, :, None], math.nan) for x in (k, v))
    moved = (x.to(DEVICE) for x in (q, k, v))
    found = store.attend(*moved, None if given is None else given.to(DEVICE), SCALE)
    close = dict(rtol=1e-4, atol=1e-5) if dtype == torch.float32 else dict(rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.double().cpu(), expected, **close)
    agree(store, lists)


def agree(store: GrowingSlots, lists: Lists) -> None:
    assert store.held() == [[list(range(len(row)))] * H for row in lists.rows]
    assert (store.seen.tolist(), int(store.taken)) == ([len(row) for row in lists.rows], lists.taken)
    assert store.undoable == (0 if store.fixed else len(lists.came))
    for b, row in enumerate(lists.rows):
        for i, x in enumerate((store.keys, store.values)):
            held = torch.stack([pair[i] for pair in row], 1) if row else x[b, :, :0].double().cpu()
            assert torch.equal(x[b, :, : len(row)].double().cpu(), held)
            assert x[b, :, len(row) :].isfinite().all()  # masked is not enough: 0 times NaN
    columns = store.position.shape[-1]
    assert store.nbytes() == sum(
        x.untyped_storage().nbytes() for x in vars(store).values() if isinstance(x, Tensor)
    )  # no view into something larger, and nothing that is not counted
    assert columns >= max((len(row) for row in lists.rows), default=0)
    assert columns % ROUND == 0


def addresses(store: GrowingSlots) -> list[int]:
    return [x.data_ptr() for x in (*store.tensors().values(), store.taken)]


# Any run of anything.


def masks(data: st.DataObject, rows: int, n: int) -> list[list[bool]] | None:
    if data.draw(st.booleans(), "all real"):
        return None
    return [data.draw(st.lists(st.booleans(), min_size=n, max_size=n), f"row {b}") for b in range(rows)]


def run(data: st.DataObject, dtype: torch.dtype, impl: str, most: int) -> None:
    rows = data.draw(st.integers(1, 3), "rows")
    store, lists = fresh(rows, dtype, impl), Lists(rows)
    reserved, seeds = 0, iter(range(1000))
    for _ in range(data.draw(st.integers(1, most), "operations")):
        rows = len(lists.rows)
        what = data.draw(
            st.sampled_from(["step", "step", "chunk", "crop", "put", "clear", "select", "reserve", "replace", "copy"])
        )
        if what == "step":
            if store.fixed and not reserved:
                store.reserve(1)
            reserved = max(reserved - 1, 0)
            same(store, lists, 1, next(seeds), masks(data, rows, 1))
        elif what == "chunk":
            n = data.draw(st.sampled_from([2, 3, 7, 64, 70]), "tokens")
            same(store, lists, n, next(seeds), masks(data, rows, n))
            reserved = 0
        elif what == "crop" and store.undoable:
            back = data.draw(st.integers(0, store.undoable), "back")
            store.crop(back)
            lists.crop(back)
        elif what == "put":
            n = data.draw(st.sampled_from([1, 5, 80]), "tokens")
            other, theirs = fresh(2, dtype, impl), Lists(2)
            same(other, theirs, n, next(seeds), [[i % 3 != 1 for i in range(n)], [True] * n])
            here, there = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, 1))
            store.put(here, other, there)
            lists.put(here, theirs, there)
            reserved = 0
        elif what == "clear":
            row = data.draw(st.sampled_from([None, *range(rows)]), "row")
            store.clear(slice(None) if row is None else slice(row, row + 1))
            lists.clear(row)
        elif what == "select":
            wanted = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=3), "wanted")
            store.select(torch.tensor(wanted))
            lists.select(wanted)
            reserved = 0
        elif what == "reserve":
            reserved = data.draw(st.sampled_from([0, 1, 5, 70]), "reserved")
            store.reserve(reserved)
            if reserved:
                assert not store.reserve(reserved)
                lists.came = []
        elif what == "replace":  # as a store of an earlier version: columns of padding, tokens in any order
            order = torch.randperm(store.position.shape[-1], generator=torch.Generator().manual_seed(next(seeds)))
            own = store.tensors()
            columns = {name: own[name][:, :, order] for name in ("keys", "values", "position")}
            store.replace({name: x.clone() for name, x in own.items()} | columns)
            lists.came, reserved = [], 0
        elif what == "copy":
            store = copy.deepcopy(store)
        if store.fixed:
            lists.came = []
        agree(store, lists)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_run_does_what_lists_do(data: st.DataObject) -> None:
    run(data, torch.float64, "reference", 14)


@needs_triton
@given(st.data())
@settings(max_examples=10, deadline=None)
def test_any_run_in_kernels_does_what_lists_do(data: st.DataObject) -> None:
    if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    run(data, torch.float32, "triton", 6)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_long_chunk_behind_other_tokens_is_read_in_pieces(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "CHUNK", 16)
    store, lists = fresh(rows), Lists(rows)
    for seed, n in enumerate((3, 50, 1, 16, 33)):
        same(store, lists, n, seed, None if rows == 1 else [[True] * n, [i % 5 > 0 for i in range(n)]])


# Room.


def test_room_is_made_by_quarters_and_asked_for_only_when_it_seems_to_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    longest = GrowingSlots._longest
    monkeypatch.setattr(GrowingSlots, "_longest", lambda store: asked.append(1) or longest(store))
    store, sizes = fresh(2), []
    q, k, v = tokens(2, 1, 0)
    for _ in range(700):
        store.attend(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), None, SCALE)
        sizes.append(store.keys.shape[2])
    kept = sorted(set(sizes))
    assert kept == [64, 128, 192, 256, 384, 512, 704]
    assert all(after == roomy(before + 1) for before, after in pairwise(kept))
    assert len(asked) == len(kept)
    store = fresh(2)
    store.attend(*(x.to(DEVICE) for x in tokens(2, 500, 0)), None, SCALE)
    assert store.keys.shape[2] == roomy(500) == 640


def test_rows_that_are_idle_need_no_room() -> None:
    store, lists = fresh(3), Lists(3)
    for t in range(180):  # each token is real in one row only
        same(store, lists, 1, t, [[t % 3 == b] for b in range(3)])
    assert store.keys.shape[2] == 64


def test_memory_is_given_back_when_every_row_is_emptied() -> None:
    store = fresh(2)
    before = store.nbytes()
    store.attend(*(x.to(DEVICE) for x in tokens(2, 90, 0)), None, SCALE)
    assert store.nbytes() > before
    store.clear()
    assert store.nbytes() == before


def test_what_is_reserved_stays_where_it_is() -> None:
    """Through all that changes a store between steps, as long as it suffices; and no step asks for anything."""
    store, lists, other, theirs = fresh(3), Lists(3), fresh(1), Lists(1)
    same(other, theirs, 20)
    assert store.reserve(30)
    assert not store.reserve(30)
    where, seeds = addresses(store), iter(range(100))

    def steps() -> None:
        assert not store.reserve(5)
        for _ in range(5):
            same(store, lists, 1, seed := next(seeds), [[True], [True], [seed % 3 != 1]])

    for x in ("step", "select", "clear", "put", "put itself", "empty"):
        if x == "select":
            store.select(torch.tensor([2, 0, 0]))
            lists.select([2, 0, 0])
        elif x == "clear":
            store.clear(slice(1, 2))
            lists.clear(1)
        elif x == "put":
            store.put(1, other)
            lists.put(1, theirs, 0)
        elif x == "put itself":
            store.put(1, store, 1)
        elif x == "empty":
            store.clear()
            lists.clear(None)
        lists.came = []
        agree(store, lists)
        steps()
    assert addresses(store) == where
    assert store.reserve(60)  # more than 64 columns have
    assert addresses(store) != where
    same(store, lists, 1, 99)
    assert store.undoable == 0
    assert store.reserve(0)
    lists.came = []
    same(store, lists, 1, 100)
    assert store.undoable == 1
    with pytest.raises(ValueError, match="tokens must be at least 0, got -1"):
        store.reserve(-1)


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=needs_triton)])
def test_steps_past_what_was_reserved_write_nowhere_and_say_so(impl: str) -> None:
    store, lists = fresh(2, torch.float32, impl), Lists(2)
    store.reserve(1)
    for t in range(64):
        same(store, lists, 1, t, [[True], [t < 3]])
    before = [x.clone() for x in store._columns]
    q, k, v = (x.to(DEVICE) for x in tokens(2, 1, 64, torch.float32))
    store.attend(q, k, v, torch.tensor([[True], [False]], device=DEVICE), SCALE)
    assert all(torch.equal(x, y) for x, y in zip(before, store._columns))
    chunk = [x.to(DEVICE) for x in tokens(2, 3, 0, torch.float32)]
    for attempt in (lambda: store.reserve(4), store.check, lambda: store.attend(*chunk, None, SCALE)):
        with pytest.raises(RuntimeError, match=r"65 tokens came to 64 columns: reserve\(tokens\) before"):
            attempt()
    store.clear(slice(0, 1))
    lists.clear(0)
    store.reserve(2)
    store.taken.copy_(lists.taken)
    lists.came = []
    same(store, lists, 1, 65)


def test_generating_past_what_was_reserved_is_an_error() -> None:
    model = attach(tiny_model(dtype=torch.float32), Dense())
    cache = BoundedCache(model)
    cache.allocate(1)
    cache.reserve(4)
    ids = torch.arange(3, 9)[None]
    with pytest.raises(RuntimeError, match="tokens came to 64 columns"):
        model.generate(ids, max_new_tokens=100, min_new_tokens=100, do_sample=False, past_key_values=cache)


# The cache.


@pytest.mark.parametrize("policy", [Dense(), ByLayer(Streaming(SMALL), {0: Dense()})], ids=lambda policy: policy.name)
def test_a_cache_that_has_reserved_can_be_compiled_and_says_the_same(policy: Dense | ByLayer) -> None:
    torch._dynamo.reset()
    model = model_with(policy, dtype=torch.float32)
    counter = CompileCounter()
    compiled = torch.compile(model.forward, fullgraph=True, backend=counter)
    ids = text(2, 60)
    plain, cache = BoundedCache(model), BoundedCache(model)
    for x in (plain, cache):
        feed(model, x, ids[:, :10])
    cache.reserve(50)
    assert cache.is_compileable
    assert not plain.is_compileable
    for t in range(10, 50):
        awake = torch.tensor([[True], [t % 3 > 0]])
        position = torch.tensor(plain.tokens_seen())[:, None]
        step = dict(input_ids=ids[:, t : t + 1].clone(), attention_mask=awake, position_ids=position)
        with torch.no_grad():
            logits = compiled(**step, **{cache_argument(model): cache}).logits
            expected = model(**step, **{cache_argument(model): plain}).logits
        torch.testing.assert_close(logits[awake[:, 0]], expected[awake[:, 0]], rtol=1e-4, atol=1e-5)
    assert cache.held_positions() == plain.held_positions()
    assert counter.frame_count == 1
    assert not cache.reserve(1)
    cache.reserve(0)
    assert not cache.is_compileable
    torch._dynamo.reset()


def test_a_session_of_a_reserved_cache_goes_on_without(tmp_path: Path) -> None:
    model = model_with(Dense(), dtype=torch.float32)
    cache = BoundedCache(model)
    feed(model, cache, text(2, 90))
    cache.reserve(20)
    feed(model, cache, text(2, 1))
    Session(cache).save(tmp_path / "s", model)
    back = Session.load(tmp_path / "s", model).cache
    for step in range(60):
        token = text(2, 1 + step % 2, step)
        cache.reserve(2)
        assert torch.equal(feed(model, cache, token), feed(model, back, token))
    assert cache.held_positions() == back.held_positions()
    assert not back.is_compileable


# What only a GPU can show.


class TestOnAGPU:
    pytestmark = needs_gpu

    def store(self, rows: int, heads: int, seen: int) -> GrowingSlots:
        like = torch.zeros(rows, heads, 0, 128, dtype=HALF, device=DEVICE)
        store = GrowingSlots(like, like)
        store.attend(*self.tokens(rows, heads, seen, 0), None, 0.1)
        return store

    def tokens(self, rows: int, heads: int, n: int, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = (torch.randn(rows, h, n, 128, generator=generator) for h in (heads * 4, heads, heads))
        return [x.to(HALF).to(DEVICE) for x in made]

    def test_a_step_is_four_launches_and_asks_nothing_of_the_host(self) -> None:
        store = self.store(2, 2, 300)
        store.reserve(8)
        assert launches(store, self.tokens(2, 2, 1, 1)) == 4  # append, count, attend, merge

    def test_a_captured_step_goes_on_as_a_plain_one(self) -> None:
        """Rows that come and go in place between replays: one graph serves all of it, until there must be more columns."""
        plain, store = self.store(2, 2, 150), self.store(2, 2, 150)
        given = self.tokens(2, 2, 1, 0)
        valid = torch.zeros(2, dtype=torch.bool, device=DEVICE)  # nobody is there while it is captured
        store.reserve(60)
        graph = capture(lambda: store.step(*given, valid, 0.1))
        for t in range(55):
            if t % 5 == 0:
                assert not store.reserve(5)
            if t == 30:
                for x in (plain, store):
                    x.clear(slice(0, 1))
                    x.select(torch.tensor([1, 0], device=DEVICE))
                assert not store.reserve(5)
            for static, x in zip(given, self.tokens(2, 2, 1, t)):
                static.copy_(x)
            awake = torch.tensor([True, t % 4 != 2], device=DEVICE)
            valid.copy_(awake)
            out, expected = graph(), plain.attend(*given, awake[:, None], 0.1)
            torch.testing.assert_close(out[awake], expected[awake], rtol=2e-2, atol=2e-2)
        assert store.held() == plain.held()
        assert store.reserve(500)

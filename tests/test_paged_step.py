"""The paged step in two launches against the step in torch operations: the same held sets, gates and pages at every step.

Interpreted without a GPU, so the sizes are small and the runs short.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from kvpop.attachment import attach, attached_policies, cache_argument
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.capture import capture
from kvpop.ops.paged_step import MLPGate, api
from kvpop.policies import DMS, LayerShape, Streaming
from kvpop.slots import PagedSlots, base
from tests.test_cache_step import DEVICE, GPU, HALF, needs_triton
from tests.test_dms import forward, shaken
from tests.test_fused_step import launches, needs_gpu, quick_interpreter  # noqa: F401 (a fixture of every test)
from tests.tiny import VOCAB, tiny_model

# Shapes: B rows, H KV heads, G query heads per KV head, D head dim.

GATES = [("mlp", "next"), ("mlp", "self"), ("native", "next"), ("native", "self")]


def pair(
    gate: tuple[str, str] = ("mlp", "next"), *, B: int = 2, H: int = 2, G: int = 2, D: int = 16, window: int = 4,
    sinks: int = 1, page: int = 4, dtype: torch.dtype = torch.float32, threshold: float = 0.0,
) -> tuple[PagedSlots, PagedSlots]:  # fmt: skip
    """The same empty store twice: with the step in torch operations, which grows by itself, and with the fused one."""
    policy = DMS(
        window=window, ratio=2, sinks=sinks, gate=gate[0], emitted_by=gate[1], offset=0.0, scale=1.0, threshold=threshold,
    )  # fmt: skip
    layer = policy.layer(LayerShape(layer=0, heads=H * G, kv_heads=H, head_dim=D)).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for x in layer.parameters():  # gates of about any value, half of them closed
            x.copy_(torch.randn(x.shape, generator=generator))
        if layer.scorer is not None:
            layer.scorer.shift_HE.copy_(torch.randn(layer.scorer.shift_HE.shape, generator=generator) * 0.1)
            layer.scorer.scale_HE.copy_(torch.rand(layer.scorer.scale_HE.shape, generator=generator) + 0.5)
    like = torch.zeros(B, H, 0, D, dtype=dtype, device=DEVICE)
    lag = 1 if gate[1] == "next" else 0
    plain, fused = (
        PagedSlots(window, sinks, layer.decide, lag, like, like, page=page, weights=layer.step_weights)
        for _ in range(2)
    )
    plain.impl, fused.impl = "reference", "triton"
    return plain, fused


def tokens(store: PagedSlots, n: int, G: int, seed: int) -> list[Tensor]:
    (B, H), D = store.count.shape, store.keys.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(B, heads, n, D, generator=generator) for heads in (H * G, H, H))
    return [x.to(store.keys.dtype).to(DEVICE) for x in made]


def agree(plain: PagedSlots, fused: PagedSlots) -> None:
    assert fused.held() == plain.held()
    for name, x in plain.tensors().items():
        torch.testing.assert_close(fused.tensors()[name], x, rtol=0, atol=0)
    assert torch.equal(fused.count, plain.count)
    for x in (plain, fused):
        taken = x.table[x.table > 0].tolist()
        assert sorted([*taken, *x.free[: x.spare].tolist()]) == list(range(1, len(x.keys)))


def same(
    plain: PagedSlots, fused: PagedSlots, seed: int, n: int = 1, valid: list[bool] | None = None, G: int = 2
) -> None:
    """Both take in the same tokens, and agree about everything."""
    q, k, v = tokens(plain, n, G, seed)
    valid_Bn = None if valid is None else torch.tensor(valid, device=DEVICE)[:, None].expand(-1, n)
    expected, found = (x.attend(q, k, v, valid_Bn, 0.3) for x in (plain, fused))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    agree(plain, fused)


def addresses(store: PagedSlots) -> list[int]:
    return [x.data_ptr() for x in vars(store).values() if isinstance(x, Tensor)]


# Runs.


@needs_triton
@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("reserved", [True, False])
def test_the_step_does_what_it_did_from_the_first_token_on(gate: tuple[str, str], reserved: bool) -> None:
    """Rows at different lengths, one of them idle now and then; over several pages of each head."""
    plain, fused = pair(gate)
    for t in range(30):
        if reserved and t % 7 == 0:
            fused.reserve(7)
        same(plain, fused, t, valid=[True, t % 3 != 1] if t > 3 else [t > 0, True])
    assert plain.seen.tolist() == [29, 21]
    kept = plain.count.tolist()
    assert all(0 < n < seen - 4 for row, seen in zip(kept, (29, 21)) for n in row)
    assert max(n for row in kept for n in row) > 2 * plain.page


@needs_triton
@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("window", [1, 2])
def test_small_windows_and_pages(gate: tuple[str, str], window: int) -> None:
    plain, fused = pair(gate, B=1, window=window, sinks=2, page=1)
    fused.reserve(14)
    for t in range(14):
        same(plain, fused, t)


@needs_triton
@pytest.mark.parametrize("threshold", [math.inf, -math.inf])
def test_gates_that_all_open_or_all_close(threshold: float) -> None:
    plain, fused = pair(B=1, sinks=3, page=2, threshold=threshold)
    fused.reserve(16)
    for t in range(16):
        same(plain, fused, t)
    assert fused.count.tolist() == [[12, 12] if threshold > 0 else [3, 3]]


@needs_triton
@pytest.mark.parametrize(("G", "D"), [(1, 64), (3, 128), (4, 64), (1, 128), (4, 128), (3, 64)])
@pytest.mark.parametrize("gate", [("mlp", "next"), ("native", "self")], ids=str)
def test_heads_over_several_splits(G: int, D: int, gate: tuple[str, str]) -> None:
    plain, fused = pair(gate, B=2, H=2, G=G, D=D, window=70, page=32)
    fused.reserve(8)
    same(plain, fused, 0, n=300, G=G)
    same(plain, fused, 1, n=90, valid=[True, False], G=G)
    fused.reserve(40)
    assert fused.count.max() > 128
    assert fused.count.min() > 0
    for t in range(3):
        same(plain, fused, 2 + t, G=G)


@needs_triton
def test_pages_that_are_freed_are_used_again() -> None:
    """All that changes a store between steps, in memory that stays where it is."""
    stores = plain, fused = pair(B=3, H=1)
    other, _ = pair(B=1, H=1)
    other.attend(*tokens(other, 17, 2, 50), None, 0.3)
    seeds = iter(range(100))
    for x in stores:  # rows of NaN before: nothing of them is read again
        x.attend(*(torch.full_like(y, math.nan) for y in tokens(x, 40, 2, 0)), None, 0.3)
        x.clear()
    assert fused.reserve(60)
    assert not fused.reserve(60)
    where = addresses(fused)

    def steps(count: int) -> None:
        fused.reserve(count)
        for _ in range(count):
            same(plain, fused, next(seeds), valid=[True, True, next(seeds) % 3 != 0])

    steps(12)
    for change in (
        lambda x: x.select(torch.tensor([2, 0, 1], device=DEVICE)),
        lambda x: x.clear(slice(1, 2)),
        lambda x: x.put(1, other),
        lambda x: x.select(torch.tensor([1, 1, 0], device=DEVICE)),
        lambda x: x.replace({name: y.clone() for name, y in plain.tensors().items()}),
        lambda x: x.clear(),
    ):
        for x in stores:
            change(x)
        agree(plain, fused)
        steps(4)
    assert not fused.reserve(1)
    assert addresses(fused) == where
    same(plain, fused, 99, n=90)  # more than the pool has
    assert fused.reserve(1)
    assert addresses(fused) != where
    for x in stores:
        x.select(torch.tensor([0, 1], device=DEVICE))
    steps(0)
    assert fused.fixed is False
    fused.clear()
    assert fused.nbytes() == pair(B=2, H=1)[1].nbytes()


@needs_triton
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_head_without_a_page_says_so(impl: str) -> None:
    plain, fused = pair(B=1, H=2, sinks=0, page=2, threshold=-math.inf)
    fused.sinks = plain.sinks = 99  # nothing goes
    fused.impl = impl
    fused.reserve(1)
    assert fused.table.shape[-1] == 1
    for t in range(6):  # four in the ring, two on the page
        same(plain, fused, t)
    q, k, v = tokens(fused, 1, 2, 9)
    for _ in range(2):
        assert fused.attend(q, k, v, None, 0.3).isnan().all()
    assert fused.count.tolist() == [[2, 2]]
    message = r"2 heads .* ran out of their pages: the pool has 2 pages of 2 tokens, 0 of them free"
    for attempt in (lambda: fused.reserve(4), fused.held, lambda: fused.attend(*tokens(fused, 3, 2, 0), None, 0.3)):
        with pytest.raises(RuntimeError, match=message):
            attempt()
    fused.clear()
    plain.clear()
    fused.reserve(9)
    for t in range(8):
        same(plain, fused, t)


@needs_triton
def test_what_was_never_written_is_never_read() -> None:
    plain, fused = pair(B=2, H=1)
    fused.reserve(20)
    for t in range(9):
        same(plain, fused, t, valid=[True, t < 2])
    empty = torch.ones(fused.paged_position.shape, dtype=torch.bool, device=DEVICE)
    for row in range(2):
        for i in range(int(fused.count[row, 0])):
            empty[fused.table[row, 0, i // 4], i % 4] = False
    for x in (fused.keys, fused.values):
        x[empty] = math.nan
    fused.ring_keys[1, :, 2:], fused.ring_values[1, :, 2:] = math.nan, math.nan
    q, k, v = tokens(fused, 1, 2, 20)
    expected, found = (x.attend(q, k, v, None, 0.3) for x in (plain, fused))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@needs_triton
def test_a_row_that_is_idle_attends_to_what_it_holds() -> None:
    """Called without the store's ``attend``, which blanks such rows: long, short and empty ones stay as they are."""
    plain, fused = pair(B=3)
    for n, valid in ((11, [True, False, False]), (3, [False, True, False])):
        same(plain, fused, n, n=n, valid=valid)
    fused.reserve(4)
    before = copy.deepcopy(fused)
    q, k, v = tokens(fused, 1, 2, 20)
    idle = torch.zeros(3, dtype=torch.bool, device=DEVICE)
    expected, found = (x.step(q, k, v, idle, 0.3) for x in (plain, fused))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not found[2].any()
    agree(before, fused)


@needs_triton
@pytest.mark.parametrize("D", [64, 96])
def test_half_precision_is_as_close_to_float64_as_the_torch_step(D: int) -> None:
    plain, fused = pair(("native", "self"), B=1, H=2, G=4, D=D, window=40, page=32, dtype=HALF)
    for x in (plain, fused):
        x.attend(*tokens(x, 200, 4, 0), None, 0.1)
    exact, _ = pair(("native", "self"), B=1, H=2, G=4, D=D, window=40, page=32, dtype=torch.float64)
    exact.replace({name: x.double() if x.is_floating_point() else x for name, x in plain.tensors().items()})
    fused.reserve(2)
    for t in range(2):
        q, k, v = tokens(fused, 1, 4, 1 + t)
        expected, found = (x.attend(q, k, v, None, 0.1) for x in (plain, fused))
        truth = exact.attend(q.double(), k.double(), v.double(), None, 0.1)
        assert found.dtype == HALF
        allowed = 2 * float((expected.double() - truth).abs().max()) + torch.finfo(HALF).eps
        assert float((found.double() - truth).abs().max()) <= allowed
        agree(plain, fused)


# What is refused, and the cache.


def test_the_torch_step_with_reserved_pages_is_the_one_without() -> None:
    plain, other = pair(B=2)
    other.impl = "reference"
    for t in range(24):
        if t % 5 == 0:
            other.reserve(5)
        same(plain, other, t, valid=[True, t % 3 != 1])


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = pair(B=1, dtype=torch.float64, page=2)
    q, k, v = tokens(plain, 1, 2, 0)
    gate = plain.weights()
    assert isinstance(gate, MLPGate)
    closed = torch.zeros(1, 2, 1, dtype=torch.bool, device=DEVICE)
    ring_of_1 = pair(B=1, window=1)[0]

    def call(store: PagedSlots, gate: Tensor | MLPGate, impl: str) -> None:
        api.step(q, k, v, store._pages, store._ring, store.seen, gate, sinks=0, lag=1, scale=1.0, impl=impl)  # type: ignore[arg-type]

    for store, given, impl, message in (
        (plain, closed, "cuda", "unknown impl 'cuda': choose reference or triton"),
        (plain, closed, "triton", "up to 32 bits, got float64"),
        (plain, gate, "reference", "takes what the gate says, not its weights"),
        (ring_of_1, gate, "triton", "with a window of 1 and a lag of 1 a gate decides before the step"),
    ):
        with pytest.raises(ValueError, match=message):
            call(store, given, impl)
    with pytest.raises(ValueError, match="tokens must be at least 0, got -1"):
        plain.reserve(-1)

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "cat", out_of_memory)
    message = "a pool of 1 pages of 2 tokens, 0 of them free, has to grow by 8, .*no memory"
    with pytest.raises(torch.OutOfMemoryError, match=message):
        plain.reserve(8)


def test_native_gates_and_wide_scorers_are_no_weights() -> None:
    assert pair(("native", "next"))[0].weights() is None
    (layer, _) = attached_policies(attach(tiny_model(), DMS(window=4, ratio=2)))  # in float64
    assert layer.step_weights() is None


def test_a_table_of_another_width_has_moved_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    _, store = pair(("mlp", "self"), B=2, H=1)
    store.reserve(4)
    assert not store.reserve(4)
    place = base.place
    monkeypatch.setattr(base, "place", lambda x: (0, *place(x)[1:]))  # all at one address, as freed memory may be
    store.reserve(4)
    assert not store.reserve(4)
    wide = store.table.shape[-1]
    assert store.reserve(1000)
    assert store.table.shape[-1] > wide


def test_generating_past_what_was_reserved_is_an_error() -> None:
    model = attach(tiny_model(dtype=torch.float32), DMS(window=4, ratio=2, threshold=float("inf")))
    cache = BoundedCache(model)
    cache.allocate(1)
    cache.reserve(4)
    ids = torch.arange(3, 9)[None]
    with pytest.raises(RuntimeError, match="ran out of their pages"):
        model.generate(ids, max_new_tokens=200, min_new_tokens=200, do_sample=False, past_key_values=cache)
    other = BoundedCache(attach(tiny_model(), Streaming(Budget(1, 2, 3))))
    other.allocate(1)
    with pytest.raises(ValueError, match="tokens must be at least 0, got -1"):
        other.reserve(-1)


def test_a_cache_that_has_reserved_can_be_compiled_and_says_the_same() -> None:
    model = shaken(attach(tiny_model(), DMS(window=4, ratio=2, sinks=1, offset=0.0)), 1)
    ids = torch.randint(3, VOCAB, (2, 30), generator=torch.Generator().manual_seed(0))
    plain, cache = BoundedCache(model), BoundedCache(model)
    with pytest.raises(ValueError, match="has no stores: allocate"):
        cache.reserve(4)
    for x in (plain, cache):
        forward(model, x, ids[:, :10], ids[:, :0], torch.ones_like(ids[:, :10]))
    assert cache.reserve(20)
    assert cache.is_compileable
    assert not plain.is_compileable
    for t in range(10, 30):
        step = slice(t, t + 1)
        before, now = (torch.ones_like(ids[:, part]) for part in (slice(0, t), step))
        expected, found = (forward(model, x, ids[:, step], before, now) for x in (plain, cache))
        torch.testing.assert_close(found, expected)
    assert cache.held_positions() == plain.held_positions()
    assert not cache.reserve(1)
    cache.reserve(0)
    assert not cache.is_compileable


# What only a GPU can show.


class TestOnAGPU:
    pytestmark = needs_gpu

    def test_a_step_is_two_launches_and_asks_nothing_of_the_host(self) -> None:
        _, fused = pair(B=2, H=2, G=4, D=128, window=64, page=32, dtype=HALF)
        fused.attend(*tokens(fused, 300, 4, 0), None, 0.1)
        fused.reserve(8)
        assert launches(fused, tokens(fused, 1, 4, 1)) == 2

    @pytest.mark.parametrize("gate", GATES, ids=str)
    @pytest.mark.parametrize("impl", ["reference", "triton"])
    def test_a_captured_step_goes_on_over_pages(self, gate: tuple[str, str], impl: str) -> None:
        """Pages given in place between replays, rows that come and go: one graph serves all of it."""
        plain, fused = pair(gate, B=2, H=2, G=4, D=64, window=8, page=4)
        fused.impl = impl
        same(plain, fused, 0, n=150, G=4)
        given = tokens(fused, 1, 4, 0)
        valid = torch.zeros(2, dtype=torch.bool, device=DEVICE)  # nobody is there while it is captured
        fused.reserve(100)  # a pool for all that comes
        graph = capture(lambda: fused.step(*given, valid, 0.3))
        for t in range(60):
            if t % 5 == 0:
                assert not fused.reserve(5)
            if t == 30:
                for x in (plain, fused):
                    x.clear(slice(0, 1))
                    x.select(torch.tensor([1, 0], device=DEVICE))
                assert not fused.reserve(5)
            for static, x in zip(given, tokens(fused, 1, 4, t)):
                static.copy_(x)
            valid.copy_(torch.tensor([True, t % 4 != 2], device=DEVICE))
            out = graph()
            fused.taken += 1
            expected = plain.attend(*given, valid[:, None], 0.3)
            torch.testing.assert_close(out[valid], expected[valid], rtol=1e-4, atol=1e-5)
            agree(plain, fused)
        for _ in range(200):  # past what was reserved: never a wrong number
            graph()
        assert out[0].isnan().any()
        with pytest.raises(RuntimeError, match="ran out of their pages"):
            fused.reserve(1)

    def test_it_is_one_graph_to_the_compiler(self) -> None:
        torch._dynamo.reset()
        plain, fused = pair(B=2, H=2, G=2, D=64, window=8, page=4)
        compiled = torch.compile(fused.attend, fullgraph=True, dynamic=False)
        valid = torch.ones(2, 1, dtype=torch.bool, device=DEVICE)
        fused.reserve(50)
        for t in range(50):
            given = tokens(fused, 1, 2, t)
            expected = plain.attend(*given, valid, 0.3)
            torch.testing.assert_close(compiled(*given, valid, 0.3), expected, rtol=1e-4, atol=1e-5)
            agree(plain, fused)

    def test_a_model_whose_step_is_one_graph(self) -> None:
        assert GPU
        model = shaken(attach(tiny_model(dtype=torch.float32), DMS(window=4, ratio=2, offset=0.0)), 1).to(DEVICE)
        ids = torch.randint(3, VOCAB, (2, 80), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        plain, cache = BoundedCache(model), BoundedCache(model)
        one, before = torch.zeros_like(ids[:, :1]), torch.ones_like(ids)
        position = torch.zeros_like(one)
        for x in (plain, cache):
            forward(model, x, ids[:, :20], ids[:, :0], before[:, :20])
            for store in x.stores:
                store.impl = "reference" if x is plain else "triton"
        with torch.no_grad():
            cache.reserve(70)
            graph = capture(
                lambda: model(one, position_ids=position, **{cache_argument(model): cache}, use_cache=True).logits
            )
            cache.put(0, plain, 0)
            cache.put(1, plain, 1)
            assert not cache.reserve(60)
            for t in range(20, 80):
                one.copy_(ids[:, t : t + 1])
                position.fill_(t)
                expected = forward(model, plain, one, before[:, :t], before[:, :1])
                torch.testing.assert_close(graph(), expected, rtol=1e-3, atol=1e-4)
        assert cache.held_positions() == plain.held_positions()

"""The step in three launches against the step in torch operations: the same sets, priorities and states at every step.

Interpreted without a GPU, so the sizes are small and the runs short: past the first eviction, and each kind of step beyond.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from kvpop import capture
from kvpop.bench import fill_store
from kvpop.budget import Budget, cache_bytes
from kvpop.cache import BoundedCache
from kvpop.ops.cache_step import api
from kvpop.ops.cache_step.fused import Weights, derive
from kvpop.policies import KVpop
from kvpop.policies.random import RandomScorer
from kvpop.scorers import ConstantScorer, Scorer, build_scorer
from kvpop.slots import RankedSlots, ranked
from tests.test_cache import feed, model_with, text
from tests.test_cache_step import DEVICE, GPU, HALF, SHAPES, exact, needs_triton, new_token, store
from tests.tiny import SIZES

# Shapes: B rows, H KV heads, G query heads per KV head, M slots, D head dim.

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a GPU")]
LEARNED = ["mlp", "mlstm", "mlstm-immediate", "mlp+mlstm"]


@pytest.fixture(autouse=True)
def quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter adapts the language anew for every function that a kernel calls: once a launch will do."""
    if GPU or find_spec("triton") is None:
        yield
        return
    from triton.runtime import interpreter

    adapt, adapted = interpreter._patch_lang, set()

    class Adapted:
        def __init__(self, scope) -> None:
            self.scope = scope

        def restore(self) -> None:
            adapted.clear()
            self.scope.restore()

    class Nothing:
        def restore(self) -> None:
            pass

    def once(fn):
        space = id(fn.__globals__)
        if space in adapted:
            return Nothing()
        outermost = not adapted
        adapted.add(space)
        return Adapted(adapt(fn)) if outermost else adapt(fn)

    monkeypatch.setattr(interpreter, "_patch_lang", once)
    yield


def scorer_of(kind: str, H: int, D: int, seed: int = 0) -> Scorer:
    """A scorer that says something: its parameters are shaken and it standardises."""
    if kind == "random":
        return RandomScorer(H, D, seed=3).to(DEVICE)
    if kind.startswith("constant"):
        return ConstantScorer(H, D, float(kind.split(":")[1])).to(DEVICE)
    generator = torch.Generator().manual_seed(seed)
    scorer = build_scorer(kind.removesuffix("/double"), H, D)
    with torch.no_grad():
        for p in scorer.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.3)
        scorer.shift_HE.normal_(std=0.1, generator=generator)
        scorer.scale_HE.uniform_(0.5, 1.5, generator=generator)
    return (scorer.double() if kind.endswith("/double") else scorer).to(DEVICE)


def pair(
    kind: str, budget: Budget, *, B: int, H: int, D: int, V: int | None = None, dtype=torch.float32, decay_step: int = 1
) -> list[RankedSlots]:
    """The same empty store twice: with the step in torch operations, and with the fused one."""
    scorer, made = scorer_of(kind, H, (D + (V or D)) // 2), []
    log_gamma = (
        torch.zeros(H, device=DEVICE) if kind.startswith("constant") else -torch.linspace(0.001, 0.02, H, device=DEVICE)
    )
    with pytest.MonkeyPatch.context() as patch:
        for impl in ("reference", "triton"):
            patch.setattr(ranked, "impl_for", lambda like, impl=impl: impl)
            patch.setattr(ranked, "FUSE", True)
            k, v = (torch.zeros(B, H, 0, X, dtype=dtype, device=DEVICE) for X in (D, V or D))
            made.append(RankedSlots(budget, scorer, log_gamma, decay_step, k, v))
    assert made[0].derived is None
    assert made[1].derived is not None
    return made


def tokens(plain: RankedSlots, n: int, G: int, seed: int) -> list[Tensor]:
    (B, H, _), D, V = plain.position.shape, plain.keys.shape[-1], plain.values.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randn(B, heads, n, X, generator=generator) for heads, X in ((H * G, D), (H, D), (H, V)))
    return [x.to(plain.keys.dtype).to(DEVICE) for x in made]


def same(plain: RankedSlots, fused: RankedSlots, seed: int, n: int = 1, valid=None, G: int = 1) -> None:
    """Both take in the same tokens, and agree about everything."""
    q, k, v = tokens(plain, n, G, seed)
    valid = None if valid is None else torch.tensor(valid, device=DEVICE)[:, None].expand(-1, n)
    expected, found = (x.attend(q, k, v, valid, 0.3) for x in (plain, fused))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    agree(plain, fused)


def agree(plain: RankedSlots, fused: RankedSlots) -> None:
    assert fused.held() == plain.held()
    for name, x in plain.tensors().items():
        rounding = dict(rtol=1e-4, atol=1e-5) if name.startswith(("priority", "state")) else dict(rtol=0, atol=0)
        found = fused.tensors()[name]
        if name == "priority":  # that of an empty slot is never read
            found, x = (y.where(plain.position >= 0, 0.0) for y in (found, x))
        torch.testing.assert_close(found, x, equal_nan=True, **rounding)
    assert fused.derived is not None
    for kept, found in zip(fused.derived, fused._find()):
        assert torch.equal(kept, found)


# Long runs.


@needs_triton
@pytest.mark.parametrize("kind", LEARNED)
def test_the_store_does_what_it_did_from_the_first_token_on(kind: str) -> None:
    """Rows at different lengths, one of them idle now and then."""
    plain, fused = pair(kind, Budget(1, 2, 3), B=2, H=1, D=16, decay_step=3 if kind == "mlp+mlstm" else 1)
    for t in range(14):
        same(plain, fused, t, valid=[True, t % 3 != 1] if t > 3 else [t > 0, True])
    assert plain.seen.tolist() == [13, 10]


@needs_triton
@pytest.mark.parametrize("heads", [(), (4, 0)], ids=str)
@pytest.mark.parametrize("kind", LEARNED)
def test_what_scorers_of_many_heads_multiply_is_multiplied_for_many_rows(
    kind: str, heads: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvpop.ops.cache_step.fused import triton as kernels

    for name, number in {"CROWD": 0, "CROWD_CHANNELS": 16, "CROWD_COLUMNS": 4}.items():
        monkeypatch.setattr(kernels, name, number)
    budget = Budget(1, 2, 0).with_heads(heads) if heads else Budget(1, 2, 3)
    plain, fused = pair(kind, budget, B=17, H=len(heads) or 1, D=16)
    for t in range(7):
        same(plain, fused, t, valid=[t % 3 != 1, *[True] * 16])


@needs_triton
@pytest.mark.parametrize("kind", ["random", "mlstm/double"])
@pytest.mark.parametrize("sizes", [(0, 1, 0), (0, 1, 2), (2, 3, 0)], ids=str)
def test_small_budgets(kind: str, sizes: tuple[int, int, int]) -> None:
    plain, fused = pair(kind, Budget(*sizes), B=1, H=1, D=8)
    for t in range(2 * sum(sizes) + 3):
        same(plain, fused, t)


@needs_triton
@pytest.mark.parametrize("kind", ["random", "mlstm", "mlp+mlstm"])
@pytest.mark.parametrize("heads", [(4, 0, 1), (0, 3)], ids=str)
def test_heads_of_different_sizes(kind: str, heads: tuple[int, ...]) -> None:
    """Rows at different lengths, so that heads are full at different times; some steps of several tokens."""
    plain, fused = pair(kind, Budget(1, 2, 0).with_heads(heads), B=2, H=len(heads), D=8)
    for t in range(12):
        same(plain, fused, t, valid=[True, t % 3 != 1])
    assert [len(head) for head in fused.held()[1]] == [min(3 + k, 8) for k in heads]
    same(plain, fused, 50, n=4, valid=[True, False])
    for x in (plain, fused):
        x.select(torch.tensor([1, 0]))
        x.clear(slice(0, 1))
    for t in range(60, 66):
        same(plain, fused, t)
    sizes = dict(layers=1, kv_heads=len(heads), head_dim=8, element_size=4, rows=2)
    assert fused.nbytes() == cache_bytes(fused.budget, **sizes, state_bytes=fused.scorer.state_bytes(), fused=True)


@needs_triton
def test_pins_in_heads_of_different_sizes() -> None:
    plain, fused = pair("mlp", Budget(0, 3, 0).with_heads([2, 5]), B=1, H=2, D=8)
    for x in (plain, fused):
        x.pin(torch.tensor([[[1, 2], [4, 5]]], device=DEVICE))
    for t in range(12):
        same(plain, fused, t)
    assert all({1, 4} <= set(head) for head in fused.held()[0])


@needs_triton
@pytest.mark.parametrize(
    ("kind", "dtype"), [("mlp", torch.float32), ("mlp+mlstm", torch.float32), ("mlp", HALF)], ids=str
)
def test_heads_of_different_sizes_over_several_splits(kind: str, dtype: torch.dtype) -> None:
    plain, fused = pair(kind, Budget(2, 8, 0).with_heads([290, 0, 60]), B=1, H=3, D=64, V=32, dtype=dtype)
    given = tokens(plain, 320, 1, 0)
    expected = plain.attend(*given, None, 0.1)
    torch.testing.assert_close(fused.attend(*given, None, 0.1), expected)
    q, k, v = tokens(plain, 3, 4, 1)
    for t in range(3):
        step = [x[:, :, t : t + 1] for x in (q, k, v)]
        found, expected = fused.attend(*step, None, 0.1), plain.attend(*step, None, 0.1)
        agree(plain, fused)
        if dtype == torch.float32:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            continue
        wide = (x.double() for x in (step[0], plain.keys, plain.values))
        truth = api.attend_held(*wide, plain.position, 0.1, "reference", plain.layout)
        ours, theirs = ((x.double() - truth).square().mean().sqrt() for x in (found, expected))
        assert ours <= 2 * theirs, f"{ours} from float64, the plain step {theirs}"


@needs_triton
@pytest.mark.parametrize("kind", ["random", "mlstm/double", "constant:0", "constant:nan", "constant:inf"])
def test_scores_that_are_made_elsewhere_and_ties(kind: str) -> None:
    """Also with a memory in float64: it is delayed, but the fused step does not run it."""
    plain, fused = pair(kind, Budget(1, 2, 3), B=2, H=1, D=8)
    for t in range(10):
        same(plain, fused, t, valid=[True, t % 4 != 1])


@needs_triton
@pytest.mark.parametrize("kind", ["random", "mlp+mlstm"])
def test_pins_and_all_that_changes_a_store_between_steps(kind: str) -> None:
    plain, fused = stores = pair(kind, Budget(1, 2, 4), B=2, H=1, D=8)
    _, other = pair(kind, Budget(1, 2, 4), B=1, H=1, D=8)
    seeds = iter(range(100))

    def steps(count: int) -> None:
        for _ in range(count):
            same(plain, fused, next(seeds))

    for x in stores:
        x.pin(torch.tensor([[[1, 2], [3, 5]], [[4, 6], [0, 0]]], device=DEVICE))
    same(plain, fused, 99, n=3, valid=[True, False])
    steps(6)
    for x in stores:
        x.select(torch.tensor([1, 0]))
    steps(2)
    same(plain, fused, 98, n=5)
    steps(3)
    other.attend(*tokens(other, 4, 1, 50), None, 0.3)
    for x in stores:
        x.clear(slice(1, 2))
        x.put(0, other)
    steps(2)
    for x in stores:
        x.select(torch.tensor([0, 1, 1]))  # other rows, other memory
    steps(3)
    for x in stores:
        x.clear()
    steps(2)


@needs_triton
@pytest.mark.parametrize("kind", ["mlp+mlstm", "random"])
def test_what_is_looked_up_goes_along_with_rows_that_are_emptied_and_copied(kind: str) -> None:
    """Compared right away, not only after the next step; from a fused store and from a plain one, pinned and by head."""
    for budget in (Budget(1, 3, 4), Budget(1, 3, 6, (2, 6))):
        stores, others = (pair(kind, budget, B=rows, H=2, D=8) for rows in (3, 2))
        for x in (*stores, *others):
            x.pin(torch.tensor([[[2, 3]]], device=DEVICE).expand(len(x.seen), -1, -1))
        for t in range(14):
            same(*stores, t, valid=[True, t % 2 == 0, t < 5])
            same(*others, 50 + t, valid=[True, t < 3])
        for x in stores:
            x.clear(slice(1, 2))
        agree(*stores)
        for x, other in zip(stores, others):
            x.put(1, other, 1)
            x.put(0, other, 0)
        agree(*stores)
        stores[1].put(2, others[0], 0)
        stores[0].put(2, others[0], 0)
        agree(*stores)
        for t in range(4):
            same(*stores, 90 + t)
        for x in stores:
            x.clear()
        agree(*stores)


@needs_triton
def test_the_memory_of_a_store_stays_where_it_is() -> None:
    _, fused = pair("mlp+mlstm", Budget(1, 2, 3), B=2, H=1, D=8)
    q, k, v = tokens(fused, 3, 1, 0)
    other = pair("mlp+mlstm", Budget(1, 2, 3), B=2, H=1, D=8)[1]

    def where() -> list[int]:
        return [x.data_ptr() for x in (*fused.tensors().values(), *fused.derived)]

    before = where()
    fused.attend(q, k, v, None, 0.3)
    fused.attend(q[:, :, :1], k[:, :, :1], v[:, :, :1], None, 0.3)
    fused.select(torch.tensor([1, 0]))
    fused.put(0, other)
    fused.clear()
    assert where() == before
    assert fused.nbytes() == sum(x.nbytes for x in (*fused.tensors().values(), *fused.derived, fused.taken))
    sizes = dict(layers=1, kv_heads=1, head_dim=8, element_size=4, rows=2, state_bytes=fused.scorer.state_bytes())
    assert fused.nbytes() == cache_bytes(fused.budget, **sizes, fused=True)


@needs_triton
def test_a_store_that_records_takes_the_other_path() -> None:
    plain, fused = pair("mlstm", Budget(1, 2, 3), B=1, H=1, D=8)
    for x in (plain, fused):
        x.record(2)
    assert fused.derived is None
    for t in range(8):
        q, k, v = tokens(plain, 1, 1, t)
        expected, found = (x.attend(q, k, v, None, 0.3) for x in (plain, fused))
        torch.testing.assert_close(found, expected)
        for x in (plain, fused):
            if t % 3 == 2:
                x.crop(1)
    assert fused.held() == plain.held()


# Single steps at real head dims, over several splits.


def fill(x: RankedSlots, shape, seen: list[int], dtype: torch.dtype) -> None:
    for name, made in store(shape, seen, dtype, seed=sum(seen)).items():
        getattr(x, name).copy_(made)
    x.seen.copy_(torch.tensor(seen))
    generator = torch.Generator().manual_seed(1)
    for part in x.state:
        part.copy_(torch.rand(part.shape, generator=generator))
    x._refresh()


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("kind", "shape"), zip(["mlp", *LEARNED], SHAPES), ids=str)
def test_a_step_is_that_of_float64(dtype: torch.dtype, kind: str, shape) -> None:
    B, H, G, M, D, V, sinks, window = shape
    plain, fused = pair(kind, Budget(sinks, window, M - sinks - window), B=B, H=H, D=D, V=V, dtype=dtype)
    if dtype == HALF:
        plain.scorer.to(HALF)
    for seen in ([M - 1] * B, [2 * M + b for b in range(B)])[dtype == HALF :]:
        for x in (plain, fused):
            fill(x, shape, seen, dtype)
        empty = fused.position < 0
        fused.keys[empty], fused.values[empty] = math.nan, math.nan  # what was never written is never read
        q, k, v = tokens(plain, 1, G, 7)
        expected, found = (x.attend(q, k, v, None, D**-0.5) for x in (plain, fused))
        for x in (fused.keys, fused.values):
            x.nan_to_num_(0.0)
        agree(plain, fused)
        truth = exact(shape, {name: getattr(plain, name) for name in ("keys", "values", "position")}, q, D**-0.5)
        assert found.dtype == dtype
        allowed = 2 * float((expected.double() - truth).abs().max()) + torch.finfo(dtype).eps
        assert float((found.double() - truth).abs().max()) <= allowed


@needs_triton
def test_a_row_that_is_idle_attends_to_what_it_holds() -> None:
    """Called without the store, which blanks such rows: full, filling and empty ones stay as they are."""
    shape = (3, 1, 4, 70, 64, 64, 2, 8)
    plain, fused = pair("mlp+mlstm", Budget(2, 8, 60), B=3, H=1, D=64)
    for x in (plain, fused):
        fill(x, shape, [150, 5, 0], torch.float32)
    before = [x.clone() for x in (*fused.tensors().values(), *fused.derived)]
    q, k, v = tokens(plain, 1, 4, 3)
    idle = torch.zeros(3, dtype=torch.bool, device=DEVICE)
    expected, found = (x.step(q, k, v, idle, 0.125) for x in (plain, fused))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not found[2].any()
    for old, new in zip(before, (*fused.tensors().values(), *fused.derived)):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


@needs_triton
def test_what_is_written_into_a_store_counts_once_it_is_put_back() -> None:
    """As a session that is loaded fills a store."""
    plain, fused = pair("mlp+mlstm", Budget(1, 2, 3), B=1, H=1, D=8)
    for t in range(8):
        plain.attend(*tokens(plain, 1, 1, t), None, 0.3)
    for x, given in zip(fused.tensors().values(), plain.tensors().values()):
        x.copy_(given)
    fused.replace(fused.tensors())
    for t in range(8, 11):
        same(plain, fused, t)


@needs_triton
def test_a_gate_that_forgets_next_to_nothing_still_forgets() -> None:
    """The highest forget gate, 1 - 3e-7, whose logarithm a careless log(1 + x) gets wrong by a fifth."""
    plain, fused = pair("mlstm", Budget(0, 1, 2), B=1, H=1, D=8)
    with torch.no_grad():
        plain.scorer.b_f_H.fill_(100.0)
        plain.scorer.w_f_HE.zero_()
        plain.scorer.w_i_HE.fill_(-1000.0)  # with a shift of -100: nothing gets in
        plain.scorer.shift_HE.fill_(-100.0)
    for x in (plain, fused):
        x.state[0].fill_(1.0)
        x.state[1].fill_(0.0)
        x.attend(*tokens(plain, 1, 1, 0), None, 0.3)
        torch.testing.assert_close(x.state[1].double().cpu(), -torch.full((1, 1), math.exp(-15), dtype=torch.double))


# What is looked up.


def by_loop(shape, state: dict[str, Tensor], seen: list[int], due: bool, pins) -> tuple[list, list]:
    B, H, _, M, _, _, sinks, window = shape
    least = [[-1] * H for _ in range(B)]
    ring = [[[-1] * window for _ in range(H)] for _ in range(B)]
    for b in range(B):
        for h in range(H):
            best = None
            for m in range(M):
                p, value = int(state["position"][b, h, m]), float(state["priority"][b, h, m])
                if p >= 0 and seen[b] - window <= p < seen[b]:
                    ring[b][h][p % window] = m
                rank = (-math.inf if math.isnan(value) else value, p)
                safe = pins is not None and any(a <= p < z for a, z in pins[b])
                if sinks <= p <= seen[b] - window - due and not safe and (best is None or rank < best):
                    best, least[b][h] = rank, m
    return least, ring


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
@pytest.mark.parametrize("due", [True, False])
def test_what_is_looked_up_is_what_the_loop_finds(shape, due: bool) -> None:
    B, M, sinks, window = shape[0], shape[3], *shape[6:]
    for seen in ([0] * B, [1] * B, [M - 1] * B, [M] * B, [3 * M + b for b in range(B)]):
        state = store(shape, seen, torch.float32, seed=sum(seen))
        for pins in (None, [[(sinks, sinks + 2), (M, M + 1)]] * B, [[(0, 10**6)]] * B):
            least, ring = derive(
                state["position"], state["priority"], torch.tensor(seen, device=DEVICE),
                sinks=sinks, window=window, due=due, pins_BP2=None if pins is None else torch.tensor(pins, device=DEVICE),
            )  # fmt: skip
            assert (least.tolist(), ring.tolist()) == by_loop(shape, state, seen, due, pins)
            assert least.dtype == ring.dtype == torch.int32


def test_which_scorers_the_fused_step_runs() -> None:
    for kind in LEARNED:
        scorer = scorer_of(kind, 2, 8)
        weights = scorer.step_weights()
        assert isinstance(weights, Weights)
        assert weights.shift_HE is scorer.shift_HE  # the scorer's own tensors: what is trained or loaded is what runs
        assert ((weights.mlp is not None), (weights.memory is not None)) == ("mlp" in kind, "mlstm" in kind)
        assert scorer.double().step_weights() is None
    nothing = scorer_of("constant:0", 2, 8).step_weights()  # a score of 0, without a launch
    assert isinstance(nothing, Weights)
    assert (nothing.mlp, nothing.memory) == (None, None)
    for kind in ("random", "constant:1", "constant:nan"):
        assert scorer_of(kind, 2, 8).step_weights() is None


def test_what_cannot_run_is_refused() -> None:
    shape = SHAPES[1]
    state, (k, v, fresh, now) = store(shape, [4, 4], torch.float64), new_token(shape, [4, 4], torch.float64)
    arguments = (
        k, k, v, *state.values(), now, torch.zeros(2, 2), torch.zeros(2, 2, 8), fresh, (), torch.zeros(2),
    )  # fmt: skip
    options = dict(decay_step=1, sinks=2, window=8, due=True, scale=0.1)
    with pytest.raises(ValueError, match="up to 32 bits, got float64"):
        api.step(*arguments, **options)
    with pytest.raises(ValueError, match="only 'triton': use overwrite and attend_held"):
        api.step(*arguments, **options, impl="reference")
    with pytest.raises(ValueError, match="unknown impl 'cuda': choose reference or triton"):
        api.step(*arguments, **options, impl="cuda")  # type: ignore[arg-type]


# What only a GPU can show.


@needs_triton
def test_compiled_layers_are_a_graph_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """More layers than Dynamo's own limit, before and after the first eviction: nothing is compiled a second time."""
    layers = 9
    monkeypatch.setitem(SIZES, "num_hidden_layers", layers)
    monkeypatch.setattr(ranked, "impl_for", lambda like: "triton")
    monkeypatch.setitem(capture.COMPILE, "backend", "aot_eager")  # traces, guards and says what is written where
    model = model_with(KVpop(Budget(1, 2, 2)), dtype=torch.float32, family="qwen3", kv_heads=1).to(DEVICE)
    ids = text(1, 6).to(DEVICE)
    plain, compiled = BoundedCache(model), BoundedCache(model)
    for cache in (plain, compiled):
        feed(model, cache, ids[:, :4])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    steps = [dict(ids=ids[:, t : t + 1], position_ids=torch.full((1, 1), t, device=DEVICE)) for t in (4, 5)]
    expected = [feed(model, plain, **step) for step in steps]
    with capture.compiled_layers(model):
        for step, logits in zip(steps, expected):
            torch.testing.assert_close(feed(model, compiled, **step), logits, rtol=1e-4, atol=1e-4)
    assert plain.held_positions() == compiled.held_positions()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == layers + 1  # and the norm
    assert not torch._dynamo.utils.counters["graph_break"]


def launches(store, given: list[Tensor]) -> int:
    """Kernels of one step, which must not wait for the device."""
    valid = torch.tensor([True, False], device=DEVICE)
    store.step(*given, valid, 0.1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        store.step(*given, valid, 0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        store.step(*given, valid, 0.1)
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.self_device_time_total > 0)


@pytest.mark.parametrize("kind", LEARNED)
class TestOnAGPU:
    pytestmark = needs_gpu

    def test_a_step_is_three_launches_and_asks_nothing_of_the_host(self, kind: str) -> None:
        _, fused = pair(kind, Budget(4, 64, 200), B=2, H=2, D=128, dtype=HALF)
        assert launches(fused, tokens(fused, 1, 4, 0)) == 3

    def test_a_captured_step_goes_on_through_the_first_eviction(self, kind: str) -> None:
        plain, fused = pair(kind, Budget(2, 8, 20), B=2, H=2, D=64)
        given = tokens(fused, 1, 4, 0)
        for t in range(3):  # compiled before it is captured
            same(plain, fused, t, G=4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            out = fused.step(*given, None, 0.3)
        for t in range(3, 60):
            for static, x in zip(given, tokens(fused, 1, 4, t)):
                static.copy_(x)
            graph.replay()
            fused.taken += 1
            expected = plain.attend(*given, None, 0.3)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
            agree(plain, fused)

    @pytest.mark.parametrize("rows", [1, 2])
    def test_launches_that_start_early_read_nothing_too_early(
        self, kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stores one right after the other in one graph, each asking with what the one before found: bit for bit as with
        launches that wait."""
        from kvpop.ops.cache_step.fused import triton as kernels

        found: list[list[Tensor]] = []
        for early in (lambda chain: {}, kernels._early):
            monkeypatch.setattr(kernels, "_early", early)
            torch.manual_seed(0)  # the scorers' parameters
            stores = [pair(kind, Budget(4, 64, 1500), B=rows, H=2, D=128, dtype=HALF)[1] for _ in range(8)]
            for each in stores:
                fill_store(each, 5000, 1568, torch.Generator(DEVICE).manual_seed(0))
            q, k, v = given = tokens(stores[0], 1, 4, 0)

            def step(stores=stores, q=q, k=k, v=v) -> Tensor:
                for each in stores:
                    q = each.step(q, k, v, None, 0.3)
                return q

            with torch.no_grad():
                graph = capture.capture(step)
            found.append([])
            for t in range(20):
                for static, x in zip(given, tokens(stores[0], 1, 4, t)):
                    static.copy_(x)
                found[-1].append(graph().clone())
            found[-1] += [x for each in stores for x in each.tensors().values()]
        for apart, chained in zip(*found, strict=True):
            assert torch.equal(apart, chained)

    def test_it_is_one_graph_to_the_compiler(self, kind: str) -> None:
        torch._dynamo.reset()
        plain, fused = pair(kind, Budget(2, 8, 20), B=2, H=2, D=64)
        compiled = torch.compile(fused.attend, fullgraph=True)
        valid = torch.ones(2, 1, dtype=torch.bool, device=DEVICE)
        for t in range(50):
            given = tokens(fused, 1, 4, t)
            expected = plain.attend(*given, valid, 0.3)
            torch.testing.assert_close(compiled(*given, valid, 0.3), expected, rtol=1e-4, atol=1e-5)
            agree(plain, fused)

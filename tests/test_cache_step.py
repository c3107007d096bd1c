"""The decoding step: the reference against a loop in plain Python, Triton (interpreted without a GPU) against float64.

The tolerance is measured, not chosen: what the reference makes of the same low-precision inputs, doubled.
"""

from __future__ import annotations

import math
import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from kvpop.ops.cache_step import Layout, api, append, attend_held, overwrite

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
if not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
HALF = torch.bfloat16 if GPU else torch.float16  # the interpreter multiplies the bits of bfloat16
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
SHAPES = [
    # B, H, G, M, D, V, sinks, window
    (1, 1, 1, 3, 64, 64, 0, 1),
    (2, 2, 4, 70, 64, 64, 2, 8),
    (1, 3, 3, 129, 80, 80, 4, 64),
    (2, 1, 8, 257, 96, 96, 1, 30),
    (1, 2, 4, 300, 128, 64, 0, 5),
]


def store(shape, seen: list[int], dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """A store whose rows have seen so many tokens: some of them in random slots, and special priorities among the scores."""
    B, H, _, M, D, V, sinks, window = shape
    generator = torch.Generator().manual_seed(seed)
    position = torch.full((B, H, M), -1, dtype=torch.int32)
    for b, n in enumerate(seen):
        for h in range(H):
            if n < M:
                position[b, h, :n] = torch.arange(n)
            else:
                old = torch.randperm(n - window - sinks, generator=generator)[: M - window - sinks] + sinks
                held = torch.cat([torch.arange(sinks), old, torch.arange(n - window, n)])
                position[b, h] = held[torch.randperm(M, generator=generator)].int()
    priority = torch.randint(-3, 3, (B, H, M), generator=generator).to(torch.float32)  # many ties
    for value in (math.nan, math.inf, -math.inf):
        priority[torch.rand(priority.shape, generator=generator) < 0.05] = value
    made = {
        "keys": torch.randn(B, H, M, D, generator=generator).to(dtype),
        "values": torch.randn(B, H, M, V, generator=generator).to(dtype),
        "position": position,
        "priority": priority,
    }
    return {name: x.to(DEVICE) for name, x in made.items()}


def new_token(shape, seen: list[int], dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    B, H, _, _, D, V, _, _ = shape
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(B, H, 1, X, generator=generator).to(dtype) for X in (D, V)]
    made.append(torch.randn(B, H, 1, generator=generator))
    return [x.to(DEVICE) for x in [*made, torch.tensor(seen)]]


def by_loop(shape, state: dict[str, Tensor], new: list[Tensor], due: bool, valid, pins) -> None:
    B, H, _, M, _, _, sinks, window = shape
    k, v, fresh, now = new
    for b in range(B):
        if valid is not None and not valid[b]:
            continue
        for h in range(H):
            t, best = int(now[b]), None
            for i in range(M):
                p = int(state["position"][b, h, i])
                if due and p == t - window:
                    state["priority"][b, h, i] = fresh[b, h, 0]
                value = float(state["priority"][b, h, i])
                value = -math.inf if math.isnan(value) else value
                safe = pins is not None and any(a <= p < z for a, z in pins[b].tolist())
                if sinks <= p <= t - window and not safe and (best is None or (value, p) < best[:2]):
                    best = (value, p, i)
            slot = t if t < M else best[2]
            state["keys"][b, h, slot], state["values"][b, h, slot] = k[b, h, 0], v[b, h, 0]
            state["position"][b, h, slot] = t
            state["priority"][b, h, slot] = 0.0 if due else fresh[b, h, 0]


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("due", [True, False])
def test_a_token_overwrites_what_the_loop_overwrites(impl: api.Impl, shape, due: bool) -> None:
    B, M, sinks, window = shape[0], shape[3], shape[6], shape[7]
    for fill in ("empty", "last slot", "full", "long"):
        seen = [{"empty": 0, "last slot": M - 1, "full": M, "long": 3 * M + b}[fill] for b in range(B)]
        for valid, pins in ((None, None), ([b % 2 == 0 for b in range(B)], [[(sinks, sinks + 2), (M, M)]] * B)):
            if pins is not None and M - window - sinks < 4:
                pins = None
            marks = None if valid is None else torch.tensor(valid, device=DEVICE)
            spans = None if pins is None else torch.tensor(pins, device=DEVICE)
            state, new = store(shape, seen, torch.float32), new_token(shape, seen, torch.float32)
            expected = {name: x.clone() for name, x in state.items()}
            by_loop(shape, expected, new, due, marks, spans)
            overwrite(
                *state.values(), *new, sinks=sinks, window=window, due=due, valid_B=marks, pins_BP2=spans, impl=impl
            )
            for name in ("keys", "values", "position"):
                assert torch.equal(state[name], expected[name]), (fill, name)
            in_window = expected["position"] > (new[3] - window)[:, None, None].to(DEVICE)
            ranked = ~in_window | (not due)  # the priority of a token that is not due yet is not read
            torch.testing.assert_close(
                state["priority"][ranked], expected["priority"][ranked], rtol=0, atol=0, equal_nan=True
            )


UNEVEN = [
    # B, G, D, V, sinks, window, slots of each head (of the first two, one has no long-range slot)
    (2, 2, 16, 16, 1, 2, (6, 3, 5)),
    (1, 4, 64, 48, 0, 5, (300, 5, 70, 129)),
    (2, 1, 80, 80, 4, 30, (40, 257)),
]


def heads_apart(case, seen: list[int], dtype: torch.dtype) -> list[tuple[tuple, dict[str, Tensor]]]:
    """A (shape, store) for each head, as though it were alone."""
    B, G, D, V, sinks, window, sizes = case
    shapes = [(B, 1, G, M, D, V, sinks, window) for M in sizes]
    return [(shape, store(shape, seen, dtype, seed=h)) for h, shape in enumerate(shapes)]


def heads_together(apart: list[tuple[tuple, dict[str, Tensor]]]) -> tuple[dict[str, Tensor], Layout]:
    """The same heads as one store; what stands where a head has no slot would be taken by whoever read it."""
    sizes = [shape[3] for shape, _ in apart]
    M, states = max(sizes), [state for _, state in apart]
    made = {name: torch.cat([state[name] for state in states], 2) for name in ("keys", "values")}
    for name, nothing in (("position", -1), ("priority", -math.inf)):
        padded = [
            torch.nn.functional.pad(state[name], (0, M - state[name].shape[2]), value=nothing) for state in states
        ]
        made[name] = torch.cat(padded, 1)
    layout = Layout.of(sizes, made["keys"].device)
    assert layout is not None
    return made, layout


def overwrites_as_apart(
    impl: api.Impl, case, seen: list[int], due: bool, valid=None, spans=None, last_goes: bool = False
) -> None:
    B, _, D, V, sinks, window, sizes = case
    apart = heads_apart(case, seen, torch.float32)
    if last_goes:
        for _, state in apart:
            state["priority"].zero_()[..., -1] = -1.0
    new = new_token((B, len(sizes), 1, 0, D, V, 0, 0), seen, torch.float32)
    found, layout = heads_together(apart)
    for h, (shape, state) in enumerate(apart):
        by_loop(shape, state, [*(x[:, h : h + 1] for x in new[:3]), new[3]], due, valid, spans)
    expected, _ = heads_together(apart)
    overwrite(
        *found.values(),
        *new,
        sinks=sinks,
        window=window,
        due=due,
        valid_B=valid,
        pins_BP2=spans,
        layout=layout,
        impl=impl,
    )
    for name in ("keys", "values", "position"):
        assert torch.equal(found[name], expected[name]), (seen, name)
    in_window = expected["position"] > (new[3] - window)[:, None, None].to(DEVICE)
    ranked = (~in_window | (not due)) & (expected["position"] >= 0)
    torch.testing.assert_close(found["priority"][ranked], expected["priority"][ranked], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("case", UNEVEN, ids=str)
@pytest.mark.parametrize("due", [True, False])
def test_heads_of_different_sizes_each_overwrite_what_they_would_alone(impl: api.Impl, case, due: bool) -> None:
    B, *_, sinks, window, sizes = case
    some = sorted(sizes)
    for seen in (
        [0] * B,
        [some[0] - 1] * B,
        [some[0]] * B,
        [some[-1] - 1] * B,
        [some[-1], some[0]][:B],
        [3 * some[-1]] * B,
    ):
        for valid in (None, torch.tensor([b % 2 == 0 for b in range(B)], device=DEVICE)):
            # A head without long-range slots leaves nothing to choose from if a pin is in its one place.
            spans = None
            if valid is not None and min(sizes) - sinks - window > 1:
                spans = torch.tensor([[(sinks, sinks + 1)]] * B, device=DEVICE)
            overwrites_as_apart(impl, case, seen, due, valid, spans)


@needs_triton
def test_a_head_of_more_slots_than_a_program_loads_at_once() -> None:
    case = (1, 1, 16, 16, 0, 1, (4097, 3))
    overwrites_as_apart("triton", case, [4500], due=False, last_goes=True)


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("case", UNEVEN, ids=str)
def test_heads_of_different_sizes_each_attend_as_they_would_alone(impl: api.Impl, dtype: torch.dtype, case) -> None:
    B, G, D, *_, sizes = case
    for seen in ([0] * B, [1] * B, [min(sizes)] * B, [2 * max(sizes) + b for b in range(B)]):
        apart = heads_apart(case, seen, dtype)
        together, layout = heads_together(apart)
        if impl == "triton":  # what was never written is never read
            filled = torch.cat([state["position"] >= 0 for _, state in apart], 2)
            for name in ("keys", "values"):
                together[name][~filled] = math.nan
        q = torch.randn(B, len(sizes) * G, 1, D, generator=torch.Generator().manual_seed(5)).to(dtype).to(DEVICE)
        found = attend_held(q, together["keys"], together["values"], together["position"], D**-0.5, impl, layout=layout)
        assert found.dtype == dtype
        for h, (shape, state) in enumerate(apart):
            mine = slice(h * G, h * G + G)
            truth = exact(shape, state, q[:, mine], D**-0.5)
            plain = attend_held(q[:, mine], state["keys"], state["values"], state["position"], D**-0.5)
            allowed = 2 * float((plain.double() - truth).abs().max()) + torch.finfo(dtype).eps
            assert float((found[:, mine].double() - truth).abs().max()) <= allowed


def test_equal_heads_need_no_layout() -> None:
    assert Layout.of([7, 7, 7], torch.device("cpu")) is None
    layout = Layout.of([3, 5, 4], torch.device("cpu"))
    assert (layout.size_H.tolist(), layout.base_H.tolist(), layout.widest, layout.total) == (
        [3, 5, 4],
        [0, 3, 8],
        5,
        12,
    )
    x = torch.arange(24.0).view(1, 1, 12, 2)
    padded = api.by_head(x, layout)
    assert padded[0, :, :, 0].tolist() == [[0, 2, 4, 4, 4], [6, 8, 10, 12, 14], [16, 18, 20, 22, 22]]
    assert torch.equal(api.side_by_side(padded, layout), x)


def exact(shape, state: dict[str, Tensor], q: Tensor, scale: float) -> Tensor:
    G = shape[2]
    keys, values = (state[name].double().repeat_interleave(G, 1) for name in ("keys", "values"))
    held = (state["position"] >= 0).repeat_interleave(G, 1)[:, :, None]
    logits = (q.double() @ keys.transpose(-1, -2) * scale).masked_fill(~held, -torch.inf)
    return (logits.softmax(-1) @ values).nan_to_num(0.0)


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_what_is_held_is_that_of_float64(impl: api.Impl, dtype: torch.dtype, shape) -> None:
    B, H, G, M, D, *_ = shape
    for seen in ([0] * B, [1] * B, [M - 1] * B, [2 * M + b for b in range(B)]):
        state = store(shape, seen, dtype, seed=sum(seen))
        empty = state["position"] < 0
        state["keys"][empty], state["values"][empty] = math.nan, math.nan  # what was never written is never read
        if impl == "reference":
            state["keys"], state["values"] = (state[name].nan_to_num(0.0) for name in ("keys", "values"))
        q = torch.randn(B, H * G, 1, D, generator=torch.Generator().manual_seed(5)).to(dtype).to(DEVICE)
        clean = {name: x.nan_to_num(0.0) if name in ("keys", "values") else x for name, x in state.items()}
        truth = exact(shape, clean, q, D**-0.5)
        plain = attend_held(q, clean["keys"], clean["values"], clean["position"], D**-0.5)
        found = attend_held(q, state["keys"], state["values"], state["position"], D**-0.5, impl)
        assert found.dtype == dtype
        allowed = 2 * float((plain.double() - truth).abs().max()) + torch.finfo(dtype).eps
        assert float((found.double() - truth).abs().max()) <= allowed


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_the_first_slots_of_a_row_is_that_over_what_is_held(impl: api.Impl, dtype, shape) -> None:
    """However many slots lie behind them, whatever is in these, and in whatever state their positions are."""
    B, H, G, M, D, *_ = shape
    for seen in ([0] * B, [1] * B, [M - 1 - 40 * b for b in range(B)], [M + 3 * b for b in range(B)]):
        count = torch.tensor(seen).clamp(min=0)
        state = store(shape, [min(n, M - 1) for n in count.tolist()], dtype, seed=sum(seen))
        state["position"][:] = torch.arange(M, dtype=torch.int32).where(torch.arange(M) < count[:, None, None], -1)
        count = count.to(DEVICE)
        q = torch.randn(B, H * G, 1, D, generator=torch.Generator().manual_seed(5)).to(dtype).to(DEVICE)
        truth = exact(shape, state, q, D**-0.5)
        plain = attend_held(q, state["keys"], state["values"], state["position"], D**-0.5)
        position = state["position"]
        if impl == "triton":
            empty, position = position < 0, torch.zeros_like(position)
            state["keys"][empty], state["values"][empty] = math.nan, math.nan
        found = attend_held(q, state["keys"], state["values"], position, D**-0.5, impl, count_B=count)
        assert found.dtype == dtype
        allowed = 2 * float((plain.double() - truth).abs().max()) + torch.finfo(dtype).eps
        assert float((found.double() - truth).abs().max()) <= allowed


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_token_is_appended_where_there_is_a_slot(impl: api.Impl, shape) -> None:
    B, M = shape[0], shape[3]
    for seen in ([0] * B, [M - 1 - b for b in range(B)], [M + b for b in range(B)]):
        for valid in (None, [b % 2 == 0 for b in range(B)]):
            state, (k, v, _, now) = store(shape, [0] * B, HALF), new_token(shape, seen, HALF)
            del state["priority"]
            expected = {name: x.clone() for name, x in state.items()}
            for b, n in enumerate(seen):
                if n < M and (valid is None or valid[b]):
                    for x, new in zip(expected.values(), (k[b, :, 0], v[b, :, 0], n)):
                        x[b, :, n] = new
            append(*state.values(), k, v, now, None if valid is None else torch.tensor(valid, device=DEVICE), impl)
            assert all(torch.equal(state[name], x) for name, x in expected.items())


def test_what_cannot_run_is_refused() -> None:
    shape = SHAPES[1]
    state, new = store(shape, [4, 4], torch.float64), new_token(shape, [4, 4], torch.float64)
    with pytest.raises(ValueError, match="up to 32 bits, got float64"):
        overwrite(*state.values(), *new, sinks=2, window=8, due=True, impl="triton")
    with pytest.raises(ValueError, match="unknown impl 'cuda': choose reference or triton"):
        attend_held(torch.zeros(2, 8, 1, 64), *list(state.values())[:3], 0.1, "cuda")  # type: ignore[arg-type]
    layout = Layout.of([3, 5], torch.device("cpu"))
    with pytest.raises(ValueError, match="count is for heads of equal size"):
        attend_held(torch.zeros(2, 8, 1, 64), *list(state.values())[:3], 0.1, layout=layout, count_B=new[3])
    with pytest.raises(ValueError, match="up to 32 bits, got float64"):
        append(*list(state.values())[:3], *new[:2], new[3], impl="triton")
    assert api.impl_for(torch.zeros(1)) == "reference"

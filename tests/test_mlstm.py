"""The three forms of the gated memory agree, with each other and with the recurrence of Eq. 10 written down here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpop.ops.mlstm import MLSTMState, init_state, mlstm

torch.set_num_threads(1)
property_test = settings(max_examples=25, deadline=None, derandomize=True)
IMPLS = ("chunkwise", "quadratic", "recurrent")
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
N, H, DK, DV = 2, 3, 8, 4


def make_inputs(seed: int, L: int, bias: float, dtype: torch.dtype, sharp: float = 2.0) -> list[Tensor]:
    """q, k, v, log_i, log_f; head h has the forget logits of ``bias`` times 1, 0 and -1 plus noise, capped at +-15."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    q, k = ((sharp * draw(N, H, L, DK)).softmax(-1) for _ in range(2))
    logit = (torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)[:, None] * bias + draw(N, H, L)).clamp(-15, 15)
    log_i = (4 * draw(N, H, L)).clamp(-15, 15)
    return [t.to(dtype) for t in (q, k, draw(N, H, L, DV), log_i, torch.nn.functional.logsigmoid(logit))]


def naive(q: Tensor, k: Tensor, v: Tensor, log_i: Tensor, log_f: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 10-12 in fp64 without a stabiliser: readouts, and [C, z] at the end."""
    q, k, v, log_i, log_f = (t.double() for t in (q, k, v, log_i, log_f))
    C, z, h = torch.zeros(N, H, DK, DV).double(), torch.zeros(N, H, DK).double(), []
    for j in range(q.shape[2]):
        f, i = log_f[:, :, j].exp()[..., None], log_i[:, :, j].exp()[..., None]
        C = f[..., None] * C + i[..., None] * k[:, :, j, :, None] * v[:, :, j, None, :]
        z = f * z + i * k[:, :, j]
        h.append((q[:, :, j, :, None] * C).sum(2) / (q[:, :, j] * z).sum(-1, keepdim=True))
    return torch.stack(h, 2), torch.cat([C, z[..., None]], -1)


def true_state(state: MLSTMState) -> Tensor:
    return state.C.double() * state.m.double().exp()[..., None, None]


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Error relative to the largest entry of each head's own state or readout."""
    actual, expected = actual.double().flatten(2), expected.double().flatten(2)
    assert torch.isfinite(actual).all()
    scale = expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert ((actual - expected).abs() / scale).max().item() <= tolerance


@property_test
@given(
    seed=st.integers(0, 10**6),
    L=st.integers(1, 160),
    chunk=st.integers(1, 80),
    bias=st.sampled_from([0.0, 3.0, 7.0, 15.0, 30.0]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_all_forms_equal_the_recurrence(seed: int, L: int, chunk: int, bias: float, dtype: torch.dtype) -> None:
    inputs = make_inputs(seed, L, bias, dtype)
    h_expected, C_expected = naive(*inputs)
    for impl in IMPLS:
        h, state = mlstm(*inputs, init_state(N, H, DK, DV, dtype), impl=impl, chunk=chunk)
        assert h.dtype == state.C.dtype == state.m.dtype == dtype
        assert_close(h, h_expected, TOLERANCE[dtype])
        assert_close(true_state(state), C_expected, TOLERANCE[dtype])


@property_test
@given(
    seed=st.integers(0, 10**6),
    cuts=st.lists(st.integers(0, 100), max_size=4),
    steps=st.integers(0, 12),
    bias=st.sampled_from([0.0, 7.0, 30.0]),
    impls=st.lists(st.sampled_from(IMPLS), min_size=7, max_size=7),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_the_state_carries_over(
    seed: int, cuts: list[int], steps: int, bias: float, impls: list[str], dtype: torch.dtype
) -> None:
    """Pieces of any length (also none), each by any form, then single steps: the same as all at once."""
    L = 100 + steps
    inputs = make_inputs(seed, L, bias, dtype)
    h_expected, C_expected = naive(*inputs)
    state, h = init_state(N, H, DK, DV, dtype), []
    edges = [0, *sorted(cuts), 100]
    for impl, start, end in zip(impls, edges, edges[1:], strict=False):
        piece, state = mlstm(*(t[:, :, start:end] for t in inputs), state, impl=impl, chunk=16)
        h.append(piece)
    for j in range(100, L):
        piece, state = mlstm(*(t[:, :, j : j + 1] for t in inputs), state, impl="recurrent")
        h.append(piece)
    assert_close(torch.cat(h, 2), h_expected, TOLERANCE[dtype])
    assert_close(true_state(state), C_expected, TOLERANCE[dtype])


@pytest.mark.parametrize("impl", IMPLS)
def test_a_nearly_open_forget_gate_still_forgets(impl: str) -> None:
    """f = sigmoid(15) in fp32: 2,000 steps lose 6e-4 of the first token, which must not round away beside a large m."""
    L = 2000
    q = k = torch.ones(1, 1, L, 1)
    v = torch.zeros(1, 1, L, 1)
    v[:, :, 0] = 1.0
    log_i = torch.full((1, 1, L), -15.0)
    log_i[:, :, 0] = 15.0
    log_f = torch.full((1, 1, L), -3.0590232e-07)
    _, state = mlstm(q, k, v, log_i, log_f, init_state(1, 1, 1, 1), impl=impl)
    expected = torch.tensor(15.0 - 3.0590232e-07 * (L - 1)).double()
    kept = (true_state(state)[0, 0, 0, 0].log() - expected).exp() - 1
    assert abs(kept.item()) < 1e-4


@pytest.mark.parametrize("impl", IMPLS)
def test_forgetting_everything_costs_no_precision_later(impl: str) -> None:
    """100 nearly closed gates, then open ones: sums of log f near -1500 are 1e-4 apart in fp32."""
    inputs = make_inputs(0, 128, 0.0, torch.float32)
    inputs[4][:, :, :100], inputs[4][:, :, 100:] = -15.0, 0.1 * inputs[4][:, :, 100:]
    _, C_expected = naive(*inputs)
    _, state = mlstm(*inputs, init_state(N, H, DK, DV), impl=impl, chunk=128)
    assert_close(true_state(state), C_expected, 5e-6)


@property_test
@given(seed=st.integers(0, 10**6), L=st.integers(1, 70), chunk=st.integers(1, 40), carried=st.booleans())
def test_padding_leaves_the_state_alone(seed: int, L: int, chunk: int, carried: bool) -> None:
    """A row of padding keeps its state bit for bit; a padded end, whatever it holds, changes nothing before it."""
    inputs = make_inputs(seed, L, 3.0, torch.float32)
    start = init_state(N, H, DK, DV)
    if carried:
        _, start = mlstm(*make_inputs(seed + 1, 9, 3.0, torch.float32), start)
    length = seed % (L + 1)
    valid = torch.arange(L).expand(N, L) < torch.tensor([[0], [length]])
    for t in inputs:
        t.movedim(2, 1)[~valid] = float("nan")
    for impl in IMPLS:
        h, state = mlstm(*inputs, start, valid, impl=impl, chunk=chunk)
        assert torch.equal(state.C[0], start.C[0])
        assert torch.equal(state.m[0], start.m[0])
        assert torch.isfinite(h).all()
        h_expected, expected = mlstm(*(t[:, :, :length] for t in inputs), start, valid[:, :length], impl=impl)
        assert_close(true_state(state)[1:], true_state(expected)[1:], 1e-5)
        if length:
            assert_close(h[1:, :, :length], h_expected[1:], 1e-5)
        else:
            assert torch.equal(state.C[1], start.C[1])


@pytest.mark.parametrize("bias", [0.0, 7.0, 30.0])
@pytest.mark.parametrize("padded", [False, True])
def test_gradients_agree(bias: float, padded: bool) -> None:
    """Of the readouts and of the true final state, with respect to all inputs and the carried state, in fp64."""
    L = 37
    grads: dict[str, list[Tensor]] = {}
    for impl in IMPLS:
        _, start = mlstm(*make_inputs(1, 9, 3.0, torch.float64), init_state(N, H, DK, DV, torch.float64))
        leaves = [t.requires_grad_() for t in (*make_inputs(0, L, bias, torch.float64), start.C)]
        valid = torch.arange(L).expand(N, L) < torch.tensor([[L], [20]]) if padded else None
        h, state = mlstm(*leaves[:5], MLSTMState(leaves[5], start.m), valid, impl=impl, chunk=8)
        weight = torch.linspace(-1, 1, h.numel(), dtype=torch.float64).view_as(h)
        loss = (weight * h).sum() + (state.C * state.m.exp()[..., None, None]).asinh().sum()
        grads[impl] = list(torch.autograd.grad(loss, leaves))
    for impl in ("chunkwise", "recurrent"):
        for actual, expected in zip(grads[impl], grads["quadratic"]):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_readable_gives_no_nan(impl: str) -> None:
    """Rows of padding only, and queries whose features miss every key: readout 0, finite gradients."""
    inputs = make_inputs(0, 10, 3.0, torch.float32)
    inputs[0][..., 0], inputs[0][..., 1:] = 1.0, 0.0
    inputs[1][..., 0] = 0.0
    leaves = [t.requires_grad_() for t in inputs]
    for valid in (None, torch.zeros(N, 10, dtype=torch.bool)):
        h, state = mlstm(*leaves, init_state(N, H, DK, DV), valid, impl=impl, chunk=4)
        assert torch.equal(h, torch.zeros_like(h))
        for grad in torch.autograd.grad(h.sum() + state.C.sum(), leaves, allow_unused=True, materialize_grads=True):
            assert torch.isfinite(grad).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_low_precision_is_upcast_and_autocast_is_off(impl: str) -> None:
    inputs = [t.bfloat16() for t in make_inputs(0, 33, 3.0, torch.float64)]
    h_expected, C_expected = naive(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h, state = mlstm(*inputs, init_state(N, H, DK, DV), impl=impl)
    assert h.dtype == state.C.dtype == state.m.dtype == torch.float32
    assert_close(h, h_expected, 1e-5)
    assert_close(true_state(state), C_expected, 1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_tokens_and_no_rows(impl: str) -> None:
    start = init_state(N, H, DK, DV)
    h, state = mlstm(*make_inputs(0, 0, 0.0, torch.float32), start, torch.zeros(N, 0), impl=impl)
    assert h.shape == (N, H, 0, DV)
    assert torch.equal(state.C, start.C)
    assert torch.equal(state.m, start.m)
    none = [t[:0] for t in make_inputs(0, 5, 0.0, torch.float32)]
    h, state = mlstm(*none, init_state(0, H, DK, DV), impl=impl)
    assert h.shape == (0, H, 5, DV)
    assert state.C.shape == (0, H, DK, DV + 1)


def test_errors_name_the_value_and_the_bound() -> None:
    inputs, state = make_inputs(0, 5, 0.0, torch.float32), init_state(N, H, DK, DV)
    with pytest.raises(ValueError, match=r"one of chunkwise, triton, quadratic, recurrent, got 'fused'"):
        mlstm(*inputs, state, impl="fused")
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        mlstm(*inputs, state, chunk=0)
    with pytest.raises(ValueError, match="4 dimensions"):
        mlstm(inputs[0][0], *inputs[1:], state)
    with pytest.raises(ValueError, match=r"state.C must have shape \(2, 3, 8, 5\)"):
        mlstm(*inputs, init_state(N, H, DK, DV + 1))
    with pytest.raises(ValueError, match=r"log_f must have shape"):
        mlstm(*inputs[:4], inputs[4][:, :, :3], state)
    with pytest.raises(ValueError, match=r"valid must have shape \(2, 5\)"):
        mlstm(*inputs, state, torch.ones(N, 4))

"""The kernels of the gated memory against the recurrence of Eq. 10 in float64, and against the torch form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpop.ops.mlstm import MLSTMState, init_state, mlstm
from kvpop.scorers import MLSTMScorer, build_scorer
from tests.test_cache_step import DEVICE, GPU, needs_triton
from tests.test_mlstm import assert_close, true_state

TOLERANCE = 1e-5
SIZES = [(1, 1, 8, 4), (2, 3, 16, 16), (1, 2, 80, 40), (1, 3, 96, 48), (2, 1, 128, 64)]
"""Rows, heads, features, value channels."""

pytestmark = needs_triton


def made(seed: int, N: int, H: int, L: int, D: int, A: int, bias: float = 3.0) -> list[Tensor]:
    """q, k, v, log_i, log_f in float32; the forget logits of neighbouring heads are ``bias`` times 1, 0 and -1."""
    g = torch.Generator().manual_seed(seed)
    q, k = ((2.0 * torch.randn(N, H, L, D, generator=g)).softmax(-1) for _ in range(2))
    slope = torch.tensor([1.0, 0.0, -1.0]).repeat(H)[:H, None]
    logit = (slope * bias + torch.randn(N, H, L, generator=g)).clamp(-15, 15)
    log_i = (4 * torch.randn(N, H, L, generator=g)).clamp(-15, 15)
    v = torch.randn(N, H, L, A, generator=g)
    return [t.to(DEVICE) for t in (q, k, v, log_i, torch.nn.functional.logsigmoid(logit))]


def exactly(inputs: list[Tensor], state: MLSTMState | None = None) -> tuple[Tensor, MLSTMState]:
    """In float64, token by token."""
    wide = [t.double() for t in inputs]
    N, H, _, D = wide[0].shape
    start = state or init_state(N, H, D, wide[2].shape[-1], torch.float64, wide[0].device)
    return mlstm(*wide, start, impl="recurrent")  # type: ignore[arg-type]


def empty(size: tuple[int, int, int, int]) -> MLSTMState:
    return init_state(*size, device=DEVICE)


@pytest.mark.parametrize("bias", [0.0, 7.0, 30.0])
@pytest.mark.parametrize("L", [1, 7, 64, 65, 130, 1100])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_the_recurrence(size: tuple[int, int, int, int], L: int, bias: float) -> None:
    if not GPU and ((L == 1100 and size != SIZES[0]) or (L > 64 and bias != 7.0)):
        pytest.skip("slow in the interpreter")
    inputs = made(L, size[0], size[1], L, *size[2:], bias)
    h_expected, expected = exactly(inputs)
    h, state = mlstm(*inputs, empty(size), impl="triton")
    assert (h.dtype, state.C.dtype, state.m.dtype) == (torch.float32,) * 3
    assert_close(h, h_expected, TOLERANCE)
    assert_close(true_state(state), true_state(expected), TOLERANCE)


@pytest.mark.parametrize("cuts", [(0, 1), (63, 64), (64, 128), (65, 199), (100, 100)])
def test_the_state_goes_from_form_to_form(cuts: tuple[int, int]) -> None:
    size = (2, 3, 16, 8)
    inputs = made(5, 2, 3, 200, 16, 8, 7.0)
    h_expected, expected = exactly(inputs)
    forms = (("triton",) * 3, ("chunkwise", "triton", "recurrent"), ("triton", "recurrent", "triton"))
    for impls in forms if GPU else forms[1:]:
        state, h = empty(size), []
        for impl, start, end in zip(impls, (0, *cuts), (*cuts, 200)):
            before = [t.clone() for t in state]
            piece, after = mlstm(*(t[:, :, start:end] for t in inputs), state, impl=impl)
            assert all(torch.equal(a, b) for a, b in zip(before, state))
            h.append(piece)
            state = after
        assert_close(torch.cat(h, 2), h_expected, TOLERANCE)
        assert_close(true_state(state), true_state(expected), TOLERANCE)


def test_a_nearly_open_forget_gate_still_forgets() -> None:
    """f = sigmoid(15) in float32: 2,000 steps lose 6e-4 of the first token."""
    L = 2000
    q = k = torch.ones(1, 1, L, 1, device=DEVICE)
    v, log_i = torch.zeros(1, 1, L, 1, device=DEVICE), torch.full((1, 1, L), -15.0, device=DEVICE)
    v[:, :, 0], log_i[:, :, 0] = 1.0, 15.0
    log_f = torch.full((1, 1, L), -3.0590232e-07, device=DEVICE)
    _, state = mlstm(q, k, v, log_i, log_f, empty((1, 1, 1, 1)), impl="triton")
    expected = torch.tensor(15.0 - 3.0590232e-07 * (L - 1)).double()
    assert abs(((true_state(state)[0, 0, 0, 0].log().cpu() - expected).exp() - 1).item()) < 1e-4


def test_forgetting_everything_costs_no_precision_later() -> None:
    size = (2, 3, 16, 8)
    inputs = made(0, 2, 3, 128, 16, 8, 0.0)
    inputs[4][:, :, :100], inputs[4][:, :, 100:] = -15.0, 0.1 * inputs[4][:, :, 100:]
    h_expected, expected = exactly(inputs)
    h, state = mlstm(*inputs, empty(size), impl="triton")
    assert_close(h, h_expected, TOLERANCE)
    assert_close(true_state(state), true_state(expected), TOLERANCE)


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("length", [0, 1, 64, 90, 130])
def test_padding_leaves_the_state_alone(length: int, carried: bool) -> None:
    """A row of padding keeps its state bit for bit; a padded end, whatever it holds, changes nothing before it."""
    size, L = (2, 3, 16, 8), 130
    inputs = made(length, 2, 3, L, 16, 8)
    start = empty(size)
    if carried:
        _, start = mlstm(*made(99, 2, 3, 9, 16, 8), start)
    valid = torch.arange(L, device=DEVICE).expand(2, L) < torch.tensor([[0], [length]], device=DEVICE)
    for t in inputs:
        t.movedim(2, 1)[~valid] = float("nan")
    h, state = mlstm(*inputs, start, valid, impl="triton")
    for mine, before in zip(state, start):
        assert torch.equal(mine[0], before[0])
    assert (h[0] == 0).all()
    assert (h[1, :, length:] == 0).all()
    if length:
        own = [t[1:, :, :length] for t in inputs]
        h_expected, expected = exactly(own, MLSTMState(*(t[1:].double() for t in start)))
        assert_close(h[1:, :, :length], h_expected, TOLERANCE)
        assert_close(true_state(MLSTMState(*(t[1:] for t in state))), true_state(expected), TOLERANCE)


def test_what_it_does_not_take() -> None:
    inputs = made(0, 1, 1, 5, 8, 4)
    with pytest.raises(ValueError, match=r"impl='triton' has no backward pass"):
        mlstm(inputs[0].requires_grad_(), *inputs[1:], empty((1, 1, 8, 4)), impl="triton")
    with torch.no_grad():
        mlstm(*inputs, empty((1, 1, 8, 4)), impl="triton")
    with pytest.raises(ValueError, match=r"impl='triton' computes in float32, got torch.float64"):
        mlstm(*(t.detach().double() for t in inputs), empty((1, 1, 8, 4)), impl="triton")
    with pytest.raises(ValueError, match=r"up to 256 value channels, got 257"):
        mlstm(*made(0, 1, 1, 5, 8, 257), empty((1, 1, 8, 257)), impl="triton")


@pytest.mark.parametrize(("N", "L"), [(0, 5), (2, 0), (0, 0)])
def test_no_tokens_and_no_rows(N: int, L: int) -> None:
    start = empty((N, 3, 16, 8))
    h, state = mlstm(*made(0, N, 3, L, 16, 8), start, impl="triton")
    assert h.shape == (N, 3, L, 8)
    assert all(torch.equal(a, b) for a, b in zip(state, start))


def test_strides_do_not_matter() -> None:
    size = (2, 3, 16, 8)
    inputs = made(3, 2, 3, 70, 16, 8)
    expected, state = mlstm(*inputs, empty(size), impl="triton")
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs]
    found, after = mlstm(*turned, empty(size), impl="triton")
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(after, state))


@pytest.mark.parametrize("kind", ["mlstm", "mlstm-immediate", "mlp+mlstm"])
def test_scores_are_those_of_the_torch_form(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole sequences and pieces of any length, with padding."""
    torch.manual_seed(0)
    scorer = build_scorer(kind, 2, 16).to(DEVICE)
    x = torch.randn(2, 2, 90, 32, device=DEVICE)
    valid = torch.arange(90, device=DEVICE).expand(2, -1) < torch.tensor([[90], [40]], device=DEVICE)

    def scores() -> list[Tensor]:
        state, found = scorer.init_state(2, DEVICE), [scorer.score_sequence(x, 7, valid)]
        for start, end in ((0, 2), (2, 67), (67, 68), (68, 90)):
            piece, state = scorer.advance(state, x[:, :, start:end], x[:, :, start:end].flip(0), valid[:, start:end])
            found.append(torch.where(valid[:, None, start:end], piece, 0.0))
        return [*found, *state]

    with torch.no_grad():
        monkeypatch.setattr("kvpop.scorers._sequence_impl", lambda x: "chunkwise")
        expected = scores()
        monkeypatch.setattr("kvpop.scorers._sequence_impl", lambda x: "triton")
        for found, own in zip(scores(), expected, strict=True):
            torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_a_scorer_takes_them_where_no_gradient_is_needed(head_dim: int) -> None:
    torch.manual_seed(0)
    scorer = MLSTMScorer(3, head_dim).cuda()
    x = torch.randn(2, 3, 333, 2 * head_dim, device="cuda", dtype=torch.bfloat16)
    valid = torch.arange(333, device="cuda").expand(2, -1) < torch.tensor([[333], [100]], device="cuda")
    expected = scorer.score_sequence(x, 20, valid)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpop.ops.mlstm.chunkwise.chunkwise", None)
        found = scorer.score_sequence(x, 20, valid)
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_offsets_beyond_32_bits() -> None:
    """17 million tokens of 128 features: the last ones as from the state that a part carried on."""
    L, D, A = 2**24 + 200, 128, 16
    g = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.rand(1, 1, L, D, device="cuda", generator=g) for _ in range(2))
    v = torch.randn(1, 1, L, A, device="cuda", generator=g)
    log_i, log_f = (-torch.rand(1, 1, L, device="cuda", generator=g) for _ in range(2))
    inputs = [q, k, v, log_i, log_f]
    h, state = mlstm(*inputs, init_state(1, 1, D, A, device="cuda"), impl="triton")
    last = [t[:, :, -1500:] for t in inputs]  # what came before is forgotten: e^-750
    h_expected, expected = exactly(last)
    assert_close(h[:, :, -500:], h_expected[:, :, -500:], TOLERANCE)
    assert_close(true_state(state), true_state(expected), TOLERANCE)

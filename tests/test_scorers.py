"""Scorers against loops written from the equations, and the properties the cache and the trainer rely on."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpop.scorers import ConstantScorer, MLPScorer, MLSTMScorer, Scorer, SumScorer, build_scorer

torch.set_num_threads(1)
KINDS = ("mlp", "mlstm", "mlstm-immediate", "mlp+mlstm")
HEADS, D, W = 2, 6, 16


def make_scorer(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Scorer:
    """A scorer with all parameters drawn anew, so that no term is small or zero, and with standardised inputs."""
    torch.manual_seed(seed)
    scorer = build_scorer(kind, HEADS, D).to(dtype)
    for parameter in scorer.parameters():
        parameter.data.normal_()
    scorer.calibrate(3 * torch.randn(2, HEADS, 50, 2 * D) + 1)
    return scorer


def make_x(rows: int, L: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, HEADS, L, 2 * D, generator=g, dtype=torch.float64).to(dtype)


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def naive_mlp(scorer: MLPScorer, x: Tensor, head: int) -> Tensor:
    return (scorer.w2_HM[head] * silu(x @ scorer.w1_HEM[head] + scorer.b1_HM[head])).sum() + scorer.b2_H[head]


def naive_mlstm(scorer: MLSTMScorer, x_LE: Tensor, head: int, delay: int) -> list[Tensor]:
    """Eq. 10-12 token by token for one head of one row: entry t is the readout by token t of the state at t + delay."""

    def phi(u: Tensor) -> Tensor:
        return torch.cat([u.exp() / u.exp().sum(), (-u).exp() / (-u).exp().sum()])

    C, z = torch.zeros(D, D // 2).double(), torch.zeros(D).double()
    scores = []
    for now, x in enumerate(x_LE):
        i = (x @ scorer.w_i_HE[head]).clamp(-15, 15).exp()
        f = (x @ scorer.w_f_HE[head] + scorer.b_f_H[head]).clamp(-15, 15).sigmoid()
        k, v = phi(x @ scorer.w_k_HEA[head]), x @ scorer.w_v_HEA[head]
        C, z = f * C + i * torch.outer(k, v), f * z + i * k
        if now >= delay:
            q = phi(x_LE[now - delay] @ scorer.w_q_HEA[head])
            h = (q @ C) / (q @ z)
            scores.append((scorer.a_HA[head] * silu(h)).sum() + scorer.b_H[head])
    return scores


def naive_scores(scorer: Scorer, x_NHLE: Tensor) -> Tensor:
    score = torch.zeros(x_NHLE.shape[:3]).double()
    for row, x_HLE in enumerate((x_NHLE - scorer.shift_HE[:, None]) * scorer.scale_HE[:, None]):
        for head, x_LE in enumerate(x_HLE):
            delay = W if scorer.delayed else 0
            memory = scorer.mlstm if isinstance(scorer, SumScorer) else scorer
            mlp = scorer.mlp if isinstance(scorer, SumScorer) else scorer
            due = max(len(x_LE) - delay, 0)
            if isinstance(memory, MLSTMScorer) and due:
                score[row, head, :due] += torch.stack(naive_mlstm(memory, x_LE, head, delay))
            if isinstance(mlp, MLPScorer):
                for t in range(due):
                    score[row, head, t] += naive_mlp(mlp, x_LE[t], head)
    return score


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("L", [1, W, W + 1, 127, 129])
def test_score_sequence_equals_the_equations(kind: str, L: int) -> None:
    scorer, x = make_scorer(kind), make_x(1, L)
    with torch.no_grad():
        actual, expected = scorer.score_sequence(x, W), naive_scores(scorer, x)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    if scorer.delayed:
        assert torch.equal(actual[:, :, max(L - W, 0) :], torch.zeros(1, HEADS, min(L, W)).double())


@pytest.mark.parametrize("kind", KINDS)
def test_float32_stays_close_to_float64(kind: str) -> None:
    x = make_x(2, 129)
    expected = make_scorer(kind).score_sequence(x, W)
    scorer = make_scorer(kind).float()
    actual = scorer.score_sequence(x.float(), W)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_steps_equal_score_sequence(kind: str) -> None:
    """One token at a time, the due one taken from what was seen w tokens ago, as a cache does it."""
    scorer, L = make_scorer(kind), 50
    x = make_x(2, L)
    delay = W if scorer.delayed else 0
    expected = scorer.score_sequence(x, W)
    state = scorer.init_state(2)
    for q in range(L):
        due = max(q - delay, 0)
        score, state = scorer.advance(state, x[:, :, q : q + 1], x[:, :, due : due + 1])
        if q >= delay:
            torch.testing.assert_close(score[:, :, 0], expected[:, :, due], rtol=1e-10, atol=1e-10)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(0, 140), max_size=5), kind=st.sampled_from(KINDS), seed=st.integers(0, 999))
def test_advance_does_not_depend_on_the_pieces(cuts: list[int], kind: str, seed: int) -> None:
    scorer = make_scorer(kind, seed=seed)
    new, due = make_x(2, 140, seed), make_x(2, 140, seed + 1)
    valid = torch.arange(140).expand(2, 140) < torch.tensor([[140], [seed % 141]])
    expected, state_expected = scorer.advance(scorer.init_state(2), new, due, valid)
    state, pieces = scorer.init_state(2), []
    edges = [0, *sorted(cuts), 140]
    for a, b in pairwise(edges):
        piece, state = scorer.advance(state, new[:, :, a:b], due[:, :, a:b], valid[:, a:b])
        pieces.append(piece)
    shown = valid[:, None].expand(2, HEADS, 140)
    torch.testing.assert_close(torch.cat(pieces, 2)[shown], expected[shown], rtol=1e-9, atol=1e-9)
    if state:
        true, true_expected = (s[0] * s[1].exp()[..., None, None] for s in (state, state_expected))
        torch.testing.assert_close(true, true_expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_isolated_and_padding_is_ignored(kind: str) -> None:
    """A document scores the same alone, beside other documents, and with a padded end that holds anything."""
    scorer, lengths = make_scorer(kind), [40, 7, W + 3, 1]
    x = make_x(4, 40)
    valid = torch.arange(40).expand(4, 40) < torch.tensor(lengths)[:, None]
    x = torch.where(valid[:, None, :, None], x, torch.nan)
    actual = scorer.score_sequence(x, W, valid)
    for row, length in enumerate(lengths):
        alone = scorer.score_sequence(x[row : row + 1, :, :length], W)[0]
        torch.testing.assert_close(actual[row, :, :length], alone, rtol=1e-10, atol=1e-10)
        assert torch.equal(actual[row, :, length:], torch.zeros(HEADS, 40 - length).double())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_padding_leave_the_state_untouched(kind: str) -> None:
    scorer = make_scorer(kind, torch.float32)
    x = make_x(2, 5, dtype=torch.float32)
    _, state = scorer.advance(scorer.init_state(2), x, x)
    for L in (1, 5):
        _, after = scorer.advance(state, x[:, :, :L], x[:, :, :L], torch.zeros(2, L, dtype=torch.bool))
        assert all(torch.equal(a, b) for a, b in zip(state, after))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_the_scorer_and_not_the_inputs(kind: str) -> None:
    scorer = make_scorer(kind, torch.float32)
    x = make_x(2, 40, dtype=torch.float32).requires_grad_()
    (scorer.score_sequence(x, W).square().sum() + scorer.advance(scorer.init_state(2), x, x * 2)[0].sum()).backward()
    assert x.grad is None
    for name, parameter in scorer.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_bytes_are_those_of_the_tensors(kind: str, dtype: torch.dtype) -> None:
    scorer = build_scorer(kind, HEADS, D).to(dtype)
    state = scorer.init_state(3)
    assert all(t.shape[0] == 3 and t.dtype == dtype for t in state)
    assert scorer.state_bytes() * 3 * HEADS == sum(t.numel() * t.element_size() for t in state)


def test_sizes_at_head_dim_128() -> None:
    """The MLP's default width makes the two scorers equal in parameters, about 49.5 thousand a head."""
    counts = [sum(p.numel() for p in build_scorer(kind, 1, 128).parameters()) for kind in ("mlp", "mlstm")]
    assert all(49_400 < count < 49_800 for count in counts)
    assert MLSTMScorer(1, 128).state_bytes() == (128 * 65 + 1) * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_bfloat16_inputs_give_float32_states_and_scores(kind: str, parameters: torch.dtype) -> None:
    scorer, x = make_scorer(kind, parameters), make_x(2, 20, dtype=torch.bfloat16)
    expected = make_scorer(kind, parameters).float().score_sequence(x.float(), W)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        score, state = scorer.advance(scorer.init_state(2), x, x)
        actual = scorer.score_sequence(x, W)
    assert score.dtype == actual.dtype == torch.float32
    assert all(t.dtype == torch.float32 for t in state)
    assert torch.equal(actual, expected)


def test_scores_start_near_zero_and_memories_start_long() -> None:
    for kind in KINDS:
        assert build_scorer(kind, 8, 32).score_sequence(torch.randn(1, 8, 40, 64), W).abs().max() < 0.1
    bias = MLSTMScorer(5, D, horizon=256).b_f_H
    torch.testing.assert_close(bias.detach(), math.log(256) + torch.tensor([-0.5, 0.0, 0.5, 1.0, 1.5]))


def test_gate_logits_are_capped() -> None:
    """Inputs of any size: all scores finite, the same past the cap."""
    scorer = make_scorer("mlstm", torch.float32)
    for scale in (1e2, 1e4):
        x = (scale * make_x(1, 40, dtype=torch.float32)).requires_grad_()
        score = scorer.score_sequence(x, W)
        assert torch.isfinite(score).all()
        for grad in torch.autograd.grad(score.sum(), list(scorer.parameters())):
            assert torch.isfinite(grad).all()


def test_calibrate_standardises_and_is_saved() -> None:
    scorer = MLPScorer(HEADS, D)
    assert not scorer.calibrated
    x = 5 * torch.randn(3, HEADS, 40, 2 * D) + torch.arange(2.0 * D)
    x[:, :, :, 0] = 2.0
    valid = torch.arange(40).expand(3, 40) < torch.tensor([[40], [11], [0]])
    x[~valid[:, None].expand(3, HEADS, 40)] = torch.nan
    scorer.calibrate(x, valid)
    seen_HTE = scorer._normalise(x).transpose(0, 1)[:, valid]
    torch.testing.assert_close(seen_HTE.mean(1), torch.zeros(HEADS, 2 * D), rtol=0, atol=1e-5)
    torch.testing.assert_close(seen_HTE[..., 1:].std(1, correction=0), torch.ones(HEADS, 2 * D - 1), rtol=1e-5, atol=0)
    assert torch.equal(scorer.scale_HE[:, 0], torch.full((HEADS,), 1e4))
    copy = MLPScorer(HEADS, D)
    copy.load_state_dict(scorer.state_dict())
    assert copy.calibrated
    assert torch.equal(copy.shift_HE, scorer.shift_HE)
    with pytest.raises(ValueError, match="at least 1 valid token, got 0"):
        scorer.calibrate(x, torch.zeros_like(valid))


@pytest.mark.parametrize("value", [0.0, -2.5, math.inf, -math.inf, math.nan])
def test_constant_scorer(value: float) -> None:
    scorer, x = ConstantScorer(HEADS, D, value), make_x(2, 5)
    score, state = scorer.advance(scorer.init_state(2), x, x)
    assert state == ()
    assert scorer.state_bytes() == 0
    assert torch.equal(torch.nan_to_num(score, 7.0), torch.nan_to_num(torch.full((2, HEADS, 5), value), 7.0))
    valid = torch.tensor([[True, True, False, False, False]] * 2)
    assert torch.equal(scorer.score_sequence(x, W, valid)[:, :, 2:], torch.zeros(2, HEADS, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_empty_inputs(kind: str) -> None:
    scorer = make_scorer(kind)
    assert scorer.score_sequence(make_x(2, 0), W).shape == (2, HEADS, 0)
    assert scorer.score_sequence(make_x(0, 20), W).shape == (0, HEADS, 20)


def test_errors_name_the_value_and_the_bound() -> None:
    with pytest.raises(ValueError, match=r"one of mlp, mlstm, mlstm-immediate, mlp\+mlstm, got 'lstm'"):
        build_scorer("lstm", HEADS, D)
    with pytest.raises(ValueError, match="even, got 5"):
        MLSTMScorer(HEADS, 5)
    with pytest.raises(ValueError, match="horizon must be above 0 tokens, got 0"):
        MLSTMScorer(HEADS, D, horizon=0)
    with pytest.raises(ValueError, match="hidden must be at least 1, got 0"):
        MLPScorer(HEADS, D, hidden=0)
    with pytest.raises(ValueError, match="heads must be at least 1, got 0"):
        MLPScorer(0, D)
    scorer, x = MLSTMScorer(HEADS, D), make_x(2, 5)
    with pytest.raises(ValueError, match="window must be at least 0 tokens, got -1"):
        scorer.score_sequence(x, -1)
    with pytest.raises(ValueError, match=r"2 heads, tokens, 12 channels\], got \(2, 2, 5, 11\)"):
        scorer.score_sequence(x[..., :11], W)
    with pytest.raises(ValueError, match=r"valid must have shape \(2, 5\), got \(2, 4\)"):
        scorer.score_sequence(x, W, torch.ones(2, 4))
    with pytest.raises(ValueError, match="x_due must have the shape of x_new"):
        scorer.advance(scorer.init_state(2), x, x[:, :, :4])
    with pytest.raises(ValueError, match=r"state\.C must have shape"):
        scorer.advance(scorer.init_state(3), x, x)

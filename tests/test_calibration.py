"""What a slot of each head saves of the loss, against the formula written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpop import calibration
from kvpop.attachment import attach, attached_policies
from kvpop.budget import Budget
from kvpop.calibration import Probe, Probing, loss_curves, savings
from kvpop.ops.sparse_attention import sparse_attention
from kvpop.policies import DMS, KVpop, Oracle, Random, Streaming, Tova
from kvpop.policies.base import sequence_expiry
from tests.test_invariant import shake
from tests.tiny import VOCAB, family_model, tiny_model

BUDGET = Budget(2, 4, 6)


def text(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def probes(model, policy, ids: torch.Tensor) -> list[Probe]:
    attach(model, Probing(policy))
    shake(model, 5)
    with calibration._frozen(model):
        calibration._backward(model, ids, torch.Generator().manual_seed(1))
    return attached_policies(model)


@pytest.mark.parametrize("policy", [KVpop(BUDGET, scorer="mlp"), Random(BUDGET), Oracle(BUDGET), Streaming(BUDGET)])
@pytest.mark.parametrize("queries", [7, 256])
def test_the_cost_is_the_formula(policy, queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "QUERIES", queries)
    for probe in probes(tiny_model(kv_heads=2, groups=3), policy, text(40)):
        q, k, v, out, scale, seq = probe.seen
        priority = probe.ranking.order(q, k, v, scale, seq)
        expected = []
        for long in (0, 3, 16, 34):
            expiry = sequence_expiry(priority, Budget(2, 4, long), seq.documents)
            held, _ = sparse_attention(q, k, v, expiry, scale=scale)
            by_query_head = ((held - out.detach()) * out.grad).sum(-1)[0]
            expected.append((by_query_head.view(2, 3, -1).sum(1) ** 2).mean(-1) / 2)
        found = probe.cost([0, 3, 16, 34], 2, 4)
        torch.testing.assert_close(found, torch.stack(expected, -1), rtol=1e-9, atol=1e-18)
        assert (found[:, -1] < 1e-20).all()  # all is held
        assert (found[:, 0] > 0).all()


def test_the_gradient_is_that_of_tokens_the_model_would_say() -> None:
    """The chance that moves a head's output along its gradient: a directional derivative of the drawn log-probabilities."""
    model, ids = tiny_model(), text(30)
    layers = probes(model, Oracle(BUDGET), ids)
    assert all(layer.seen[3].grad.abs().sum() > 0 for layer in layers)
    before = [layer.seen[3].grad.clone() for layer in layers]
    monkey = probes(model, Oracle(BUDGET), ids)
    assert all(torch.equal(a, layer.seen[3].grad) for a, layer in zip(before, monkey))  # the same draws


def test_curves_fall_add_up_and_leave_the_model_as_it_was() -> None:
    model = tiny_model()
    asked = [p.requires_grad for p in model.parameters()]
    curves = loss_curves(model, [text(40), text(60, 1)], Random(BUDGET), sinks=2, window=4)
    assert curves.shape == (2, 2, 54)
    assert (curves.diff(dim=-1) <= 0).all()
    assert (curves >= 0).all()
    assert (curves[..., 0] > 0).all()
    assert [p.requires_grad for p in model.parameters()] == asked
    assert not attached_policies(model)
    again = loss_curves(model, [text(40), text(60, 1)], Random(BUDGET), sinks=2, window=4)
    assert torch.equal(curves, again)


def test_layers_with_a_window_of_their_own_have_no_curve() -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    model = family_model("Qwen3", num_hidden_layers=3, layer_types=kinds, use_sliding_window=True, sliding_window=8)
    curves = loss_curves(model, [text(60)], Oracle(BUDGET), sinks=2, window=4)
    assert curves.isnan().all(-1).all(-1).tolist() == [True, False, False]
    assert not curves[1:].isnan().any()


@given(st.lists(st.floats(0, 1), min_size=2, max_size=6), st.integers(1, 20))
def test_savings_are_the_hull_of_the_costs(costs: list[float], step: int) -> None:
    ranks = [i * step for i in range(len(costs))]
    costs = [*costs[:-1], 0.0]
    found = savings(ranks, costs).double()
    assert len(found) == ranks[-1]
    assert (found.diff() <= 1e-9).all()
    assert float(found.sum()) == pytest.approx(costs[0], abs=1e-5)
    left = costs[0] - found.cumsum(0)
    for k, cost in zip(ranks[1:], costs[1:]):
        assert float(left[k - 1]) <= cost + 1e-5  # never above a measured point: what could be had for so many slots


def test_weights_that_underflow_are_no_loss_without_a_number() -> None:
    model = tiny_model(dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(60)
    assert loss_curves(model, [text(90)], Streaming(BUDGET), sinks=0, window=1).isfinite().all()


def test_what_cannot_be_looked_at_is_refused() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="at least 1 text, got none"):
        loss_curves(model, [], KVpop(BUDGET))
    with pytest.raises(ValueError, match="a text of 69 tokens is too short: sinks and window hold 68"):
        loss_curves(model, [text(69)], KVpop(BUDGET))
    for policy in (Tova(8), DMS(window=4, ratio=2.0)):
        with pytest.raises(ValueError, match="does not rank tokens by a score"):
            loss_curves(model, [text(80)], policy)
        assert not attached_policies(model)

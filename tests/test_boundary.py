"""Boundary decisions against a teacher that sorts sets, and the loss against Eq. 7 and 22-25 in loops."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpop.budget import Budget
from kvpop.core import BoundaryLoss, Decay, boundary_loss, sample_arrivals, static_priority, teacher_decisions
from kvpop.core.boundary import (
    Decisions,
    boundary_losses,
    decide,
    decision_counts,
    decision_weights,
    teacher_table,
    teacher_tables,
)

budgets = st.builds(Budget, st.integers(0, 3), st.integers(1, 4), st.integers(0, 5))
N, H = 2, 3


def draw(seed: int, L: int, ties: bool) -> Tensor:
    x = torch.randn(N, H, L, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (2 * x).round() if ties else x


def uniform(rows: int, samples: int, seed: int = 0) -> Tensor:
    return torch.rand(rows, samples, generator=torch.Generator().manual_seed(seed))


def every_decision(
    priority: Tensor, budget: Budget, min_future: int = 1, lengths: list[int] | None = None
) -> Decisions:
    L = priority.shape[-1]
    lengths = lengths or [L] * len(priority)
    config = BoundaryLoss(samples=0, min_future=min_future)
    arrival, valid = sample_arrivals(torch.tensor(lengths), budget, config, L)
    return teacher_decisions(priority, arrival, valid, budget)


@given(st.integers(0, 999), budgets, st.integers(1, 30), st.booleans(), st.integers(1, 6))
def test_the_teacher_sorts_the_eligible_tokens(seed: int, budget: Budget, L: int, ties: bool, min_future: int) -> None:
    priority = draw(seed, L, ties)
    lengths = [L, max(1, L - 5)]
    decisions = every_decision(priority, budget, min_future, lengths)
    s, w, k = budget.sinks, budget.window, budget.long
    found = {}
    for n, h, p in decisions.valid_NHP.nonzero().tolist():
        new = int(decisions.new_NHP[n, h, p])
        assert (n, h, new) not in found
        found[n, h, new] = (
            int(decisions.boundary_NHP[n, h, p]),
            decisions.label_NHP[n, h, p].item(),
            decisions.margin_NHP[n, h, p].item(),
        )
    expected = {}
    for n in range(N):
        for h in range(H):
            for q in range(s + w + k, lengths[n]):
                new = q - w
                if k == 0 or lengths[n] - (new + w) < min_future:
                    continue
                eligible = sorted(range(s, q - w + 1), key=lambda t: (priority[n, h, t].item(), t), reverse=True)
                kept = eligible[:k]
                if kept[-1] != new:
                    y = 1.0 if new in kept else -1.0
                    margin = y * (priority[n, h, new] - priority[n, h, kept[-1]]).item()
                    expected[n, h, new] = (kept[-1], y, margin)
    assert found.keys() == expected.keys()
    for where, (boundary, label, margin) in expected.items():
        assert found[where][:2] == (boundary, label)
        assert found[where][2] == pytest.approx(margin, abs=1e-6)
        assert margin >= 0


@given(
    st.integers(0, 999),
    budgets,
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(0, 20),
    st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)
def test_samples_lie_between_saturation_and_the_last_token_with_enough_future(
    seed: int, budget: Budget, lengths: list[int], min_future: int, samples: int, late: float
) -> None:
    longest = max(lengths)
    config = BoundaryLoss(samples=samples, late=late, min_future=min_future)
    draws = uniform(len(lengths), samples, seed)
    arrival, valid = sample_arrivals(torch.tensor(lengths), budget, config, longest, draws)
    assert arrival.shape == valid.shape
    assert arrival.shape[0] == len(lengths)
    if samples:
        assert arrival.shape[1] == samples
    for n, length in enumerate(lengths):
        allowed = {
            t - budget.sinks
            for t in range(budget.sinks, length)
            if t + budget.window >= budget.slots and length - (t + budget.window) >= min_future
        }
        drawn = arrival[n][valid[n]].tolist()
        assert set(drawn) <= allowed
        if not samples:
            assert sorted(drawn) == sorted(allowed)
        else:
            assert valid[n].tolist() == [bool(allowed)] * samples
    if longest > budget.sinks and samples:  # indices may be gathered even where they do not count
        assert (arrival >= 0).all()
        assert (arrival < longest - budget.sinks).all()


@pytest.mark.parametrize("value", [0, -1])
def test_min_future_below_one_is_an_error(value: int) -> None:
    with pytest.raises(ValueError, match=f"min_future must be at least 1 query, got {value}"):
        BoundaryLoss(min_future=value)


def test_half_of_the_samples_come_late() -> None:
    budget, length = Budget(0, 1, 10), 1011
    for late, mean in ((0.0, 0.5), (1.0, 2 / 3), (0.5, 7 / 12)):
        config = BoundaryLoss(samples=20_000, late=late, min_future=1)
        arrival, valid = sample_arrivals(torch.tensor([length]), budget, config, length, uniform(1, 20_000))
        assert valid.all()
        assert (arrival.double() - 10).mean().item() / 1000 == pytest.approx(mean, abs=0.01)
        assert (arrival.min(), arrival.max()) == (10, 1009) or late > 0


def test_samples_are_a_function_of_the_draws_of_their_row() -> None:
    budget, config, draws = Budget(2, 8, 8), BoundaryLoss(samples=64, min_future=32), uniform(3, 64)
    lengths = torch.tensor([500, 400, 80])
    arrival, _ = sample_arrivals(lengths, budget, config, 500, draws)
    assert torch.equal(arrival, sample_arrivals(lengths, budget, config, 500, draws)[0])
    assert not torch.equal(arrival, sample_arrivals(lengths, budget, config, 500, uniform(3, 64, seed=1))[0])
    alone, _ = sample_arrivals(lengths[1:], budget, config, 400, draws[1:])
    assert torch.equal(arrival[1:], alone)


def test_draws_fill_the_range_and_those_at_its_ends_stay_in_it() -> None:
    budget, config = Budget(2, 8, 8), BoundaryLoss(samples=4, late=0.5, min_future=32)
    last_below_one = 1 - 2**-24
    draws = torch.tensor([[0.0, last_below_one, 0.0, last_below_one], [0.0, 0.25, 0.25, 0.5]])
    arrival, valid = sample_arrivals(torch.tensor([100, 100]), budget, config, 100, draws)
    assert valid.all()
    assert arrival[0].tolist() == [8, 58, 8, 58]  # the last arrival, token 60, has its 32nd future query at 99
    assert arrival[1].tolist() == [
        8,
        8 + 25,
        8 + 12,
        8 + 25,
    ]  # the first half of the draws is the late one: square roots


def test_without_draws_the_global_generator_is_asked() -> None:
    budget, config, lengths = Budget(2, 8, 8), BoundaryLoss(samples=16, min_future=32), torch.tensor([200])
    torch.manual_seed(5)
    arrival, _ = sample_arrivals(lengths, budget, config, 200)
    torch.manual_seed(5)
    assert torch.equal(arrival, sample_arrivals(lengths, budget, config, 200, torch.rand(1, 16))[0])


def naive_weights(decisions: Decisions, config: BoundaryLoss) -> dict[tuple[int, int, int], float]:
    valid = [tuple(i) for i in decisions.valid_NHP.nonzero().tolist()]
    raw = {}
    for n, h, p in valid:
        labels = [decisions.label_NHP[i].item() for i in valid if i[1] == h]
        rho = labels.count(1.0) / len(labels)
        y, margin = decisions.label_NHP[n, h, p].item(), decisions.margin_NHP[n, h, p].item()
        share = rho if y > 0 else 1 - rho
        balance = min(max(1 / (2 * share), config.balance[0]), config.balance[1])
        sigmoid = 1 / (1 + math.exp(-margin / config.margin_scale))
        regret = decisions.regret_NHP[n, h, p].item() ** config.regret
        raw[n, h, p] = (config.margin_floor + (1 - config.margin_floor) * sigmoid) * regret * balance
    mean = sum(raw.values()) / max(1, len(raw))
    return {i: value / mean for i, value in raw.items()}


configs = st.builds(
    BoundaryLoss, temperature=st.sampled_from([0.5, 1.0, 2.0]), margin_floor=st.sampled_from([0.0, 0.1, 1.0]),
    margin_scale=st.sampled_from([0.1, 0.5]), balance=st.sampled_from([(0.5, 4.0), (1.0, 1.0), (0.9, 1.2)]),
    regret=st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0]),
)  # fmt: skip


@given(st.integers(0, 999), budgets, st.integers(8, 30), configs)
def test_weights_and_loss_are_the_equations(seed: int, budget: Budget, L: int, config: BoundaryLoss) -> None:
    decisions = every_decision(draw(seed, L, False), budget)
    student = draw(seed + 1, L, False)
    weights, expected = decision_weights(decisions, config), naive_weights(decisions, config)
    total = 0.0
    for (n, h, p), omega in expected.items():
        assert weights[n, h, p].item() == pytest.approx(omega, rel=1e-5)
        new, boundary = int(decisions.new_NHP[n, h, p]), int(decisions.boundary_NHP[n, h, p])
        y = decisions.label_NHP[n, h, p].item()
        difference = (student[n, h, new] - student[n, h, boundary]).item()
        total += omega * math.log1p(math.exp(-y * difference / config.temperature))
    assert (weights[~decisions.valid_NHP] == 0).all()
    if expected:
        assert weights.sum().item() / len(expected) == pytest.approx(1.0, rel=1e-5)
    loss = boundary_loss(student, decisions, config)
    assert loss.item() == pytest.approx(total / max(1, len(expected)), rel=1e-5, abs=1e-12)


@given(st.integers(0, 999), st.integers(8, 30), configs, st.booleans())
def test_counts_of_parts_of_a_batch_add_up_and_give_each_part_its_weights(
    seed: int, L: int, config: BoundaryLoss, ties: bool
) -> None:
    """Whether rows are in one batch, or in batches or processes of their own, their weights and losses are the same."""
    budget, target, student = Budget(1, 2, 3), draw(seed, L, ties), draw(seed + 1, L, False)
    whole = every_decision(target, budget)
    parts = [every_decision(target[n : n + 1], budget) for n in range(N)]
    counts = decision_counts(whole, config)
    assert counts.dtype == torch.float64
    torch.testing.assert_close(sum(decision_counts(part, config) for part in parts), counts, rtol=1e-13, atol=0)
    weights = decision_weights(whole, config)
    assert torch.equal(weights, decision_weights(whole, config, counts))
    total = boundary_losses(student, whole, config)
    assert total.shape == (1,)
    for n, part in enumerate(parts):
        torch.testing.assert_close(decision_weights(part, config, counts), weights[n : n + 1], rtol=2e-7, atol=0)
    apart = sum(boundary_losses(student[n : n + 1], part, config, counts) for n, part in enumerate(parts))
    torch.testing.assert_close(apart, total, rtol=2e-7, atol=0)
    number = int(whole.valid_NHP.sum())
    assert boundary_loss(student, whole, config).item() == pytest.approx(total.item() / max(1, number), rel=1e-12)


@given(st.integers(0, 999), budgets, st.integers(8, 30), configs)
def test_counts_are_those_of_a_loop(seed: int, budget: Budget, L: int, config: BoundaryLoss) -> None:
    decisions = every_decision(draw(seed, L, False), budget, lengths=[L, max(1, L - 5)])
    expected = torch.zeros(4, H, dtype=torch.float64)
    for n, h, p in decisions.valid_NHP.nonzero().tolist():
        keep = decisions.label_NHP[n, h, p].item() > 0
        sigmoid = 1 / (1 + math.exp(-decisions.margin_NHP[n, h, p].item() / config.margin_scale))
        expected[0, h] += 1
        expected[1, h] += keep
        regret = decisions.regret_NHP[n, h, p].item() ** config.regret
        expected[2 if keep else 3, h] += (config.margin_floor + (1 - config.margin_floor) * sigmoid) * regret
    torch.testing.assert_close(decision_counts(decisions, config), expected, rtol=1e-6, atol=1e-6)


@given(st.integers(0, 999), budgets, st.integers(8, 30), configs)
def test_layers_in_one_stack_have_the_weights_and_losses_of_each_alone(
    seed: int, budget: Budget, L: int, config: BoundaryLoss
) -> None:
    targets = [draw(seed + i, L, False) for i in (0, 1)]
    students = [draw(seed + i, L, False).requires_grad_() for i in (2, 3)]
    stacked = every_decision(torch.cat(targets, dim=1), budget)
    alone = [every_decision(target, budget) for target in targets]
    weights = decision_weights(stacked, config, layers=2)
    losses = boundary_losses(torch.cat(students, dim=1), stacked, config, layers=2)
    assert losses.shape == (2,)
    (together,) = torch.autograd.grad(losses.sum(), [students[1]], allow_unused=True)
    for i, (decisions, student) in enumerate(zip(alone, students)):
        heads = slice(i * H, (i + 1) * H)
        assert torch.equal(stacked.boundary_NHP[:, heads], decisions.boundary_NHP)
        assert torch.equal(stacked.label_NHP[:, heads], decisions.label_NHP)
        assert torch.equal(stacked.margin_NHP[:, heads], decisions.margin_NHP)
        assert torch.equal(stacked.valid_NHP[:, heads], decisions.valid_NHP)
        assert torch.equal(decision_counts(stacked, config)[:, heads], decision_counts(decisions, config))
        torch.testing.assert_close(weights[:, heads], decision_weights(decisions, config), rtol=2e-7, atol=0)
        torch.testing.assert_close(losses[i], boundary_losses(student, decisions, config)[0], rtol=2e-7, atol=0)
    (own,) = torch.autograd.grad(boundary_losses(students[1], alone[1], config).sum(), [students[1]])
    torch.testing.assert_close(together, own, rtol=2e-7, atol=0)


@given(st.integers(0, 999), st.integers(1, 30), st.booleans(), st.lists(st.integers(0, 8), min_size=1, max_size=4))
def test_tables_of_several_budgets_are_those_of_each(seed: int, L: int, ties: bool, longs: list[int]) -> None:
    target = draw(seed, L, ties)
    several = [Budget(2, 3, long) for long in longs]
    for budget, table in zip(several, teacher_tables(target, several), strict=True):
        alone = teacher_table(target, budget)
        assert torch.equal(table.boundary_NHA, alone.boundary_NHA)
        assert torch.equal(table.label_NHA, alone.label_NHA)
        assert torch.equal(table.margin_NHA, alone.margin_NHA)
        assert torch.equal(table.regret_NHA, alone.regret_NHA)
        assert (table.sinks, table.long) == (2, budget.long)
        arrival, valid = sample_arrivals(torch.tensor([L] * N), budget, BoundaryLoss(samples=0, min_future=1), L)
        assert torch.equal(
            decide(table, arrival, valid).valid_NHP, teacher_decisions(target, arrival, valid, budget).valid_NHP
        )


def test_the_regret_is_the_mass_at_stake_without_the_decay() -> None:
    """The teacher ranks with the decay, but what a wrong decision loses is attention mass alone."""
    budget, L = Budget(2, 3, 4), 40
    target = draw(0, L, False) * 3 - 20
    priority = static_priority(target, torch.arange(L), torch.full((H,), -0.3))
    (table,) = teacher_tables(priority, [budget], target_NHL=target)
    arrival, valid = sample_arrivals(torch.tensor([L] * N), budget, BoundaryLoss(samples=0, min_future=1), L)
    decisions = decide(table, arrival, valid)
    assert torch.equal(decisions.label_NHP, teacher_decisions(priority, arrival, valid, budget).label_NHP)
    for n, h, p in decisions.valid_NHP.nonzero().tolist():
        new, boundary = int(decisions.new_NHP[n, h, p]), int(decisions.boundary_NHP[n, h, p])
        lost = abs(math.exp(target[n, h, new].item()) - math.exp(target[n, h, boundary].item()))
        assert decisions.regret_NHP[n, h, p].item() == pytest.approx(lost, rel=1e-6)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_weights_by_regret_have_mean_one_however_small_the_masses(power: float) -> None:
    """Long-range tokens receive 1e-6 to 1e-8 of the attention of a query."""
    decisions = every_decision(draw(0, 40, False) - 17, Budget(2, 3, 4))
    plain, weighted = (decision_weights(decisions, BoundaryLoss(regret=a)) for a in (0.0, power))
    valid = decisions.valid_NHP
    assert decisions.regret_NHP[valid].max() < 1e-6
    assert weighted[valid].mean().item() == pytest.approx(1.0, rel=1e-5)
    ratio = (weighted / plain)[valid] / decisions.regret_NHP[valid].double() ** power
    keep = decisions.label_NHP[valid] > 0
    head = torch.arange(H)[None, :, None].expand_as(valid)[valid]
    for h in range(H):
        for label in (keep, ~keep):
            same = ratio[label & (head == h)]
            torch.testing.assert_close(same, same[:1].expand_as(same), rtol=1e-5, atol=0)


# Budgets by head

by_head = st.lists(st.integers(0, 34), min_size=H, max_size=H)
FIELDS = ("new_NHP", "boundary_NHP", "label_NHP", "margin_NHP", "regret_NHP")


def decided(decisions: Decisions, h: int) -> list[list[tuple[float, ...]]]:
    """Of one head: the valid decisions of every row."""
    values = [getattr(decisions, name)[:, h] for name in FIELDS]
    return [
        [tuple(x[n, p].item() for x in values) for p in decisions.valid_NHP[n, h].nonzero()[:, 0].tolist()]
        for n in range(len(decisions.valid_NHP))
    ]


@given(st.integers(0, 999), by_head, st.integers(1, 30), st.booleans(), st.integers(1, 6), st.sampled_from([0, 7]))
def test_heads_of_one_budget_decide_as_each_would_alone(
    seed: int, longs: list[int], L: int, ties: bool, min_future: int, samples: int
) -> None:
    """Also where a head is never full, or has nothing to keep: it decides nothing."""
    priority, lengths = draw(seed, L, ties), torch.tensor([L, max(1, L - 5)])
    config, draws = BoundaryLoss(samples=samples, min_future=min_future), uniform(N, samples, seed)
    budget = Budget(2, 3, 0).with_heads(longs)
    arrival, valid = sample_arrivals(lengths, budget, config, L, draws)
    decisions = teacher_decisions(priority, arrival, valid, budget)
    for h, long in enumerate(longs):
        alone = Budget(2, 3, long)
        expected = teacher_decisions(priority[:, h : h + 1], *sample_arrivals(lengths, alone, config, L, draws), alone)
        assert decided(decisions, h) == decided(expected, 0)
        if not 0 < long < L - 2:
            assert not decisions.valid_NHP[:, h].any()
    for name in FIELDS:  # what does not count is still a number, and an index into the row
        value = getattr(decisions, name)
        assert torch.isfinite(value.double()).all()
        if name in ("new_NHP", "boundary_NHP") and value.numel() and L > 2:
            assert 0 <= int(value.min()) <= int(value.max()) < L


@given(st.integers(0, 999), by_head, by_head, st.integers(0, 9), st.integers(1, 30))
def test_tables_of_several_budgets_by_head_are_those_of_each(
    seed: int, one: list[int], other: list[int], long: int, L: int
) -> None:
    target, plain = draw(seed, L, False), Budget(2, 3, long)
    several = [plain.with_heads(one), plain, plain.with_heads(other)]
    for budget, table in zip(several, teacher_tables(target, several), strict=True):
        alone = teacher_table(target, budget)
        assert table.long == budget.long
        for name in ("boundary_NHA", "label_NHA", "margin_NHA", "regret_NHA"):
            assert torch.equal(getattr(table, name), getattr(alone, name))


@given(st.integers(0, 999), st.sampled_from([(0, 3, 5), (40, 3, 5), (0, 40, 3)]), configs)
def test_heads_without_decisions_leave_the_weights_of_the_others_alone(
    seed: int, longs: tuple[int, ...], config: BoundaryLoss
) -> None:
    L, budget = 30, Budget(1, 2, 0).with_heads(longs)
    target, student = draw(seed, L, False), draw(seed + 1, L, False).requires_grad_()
    decides = [h for h, long in enumerate(longs) if 0 < long < 40]
    decisions = every_decision(target, budget)
    assert decisions.valid_NHP.any(-1).any(0).nonzero()[:, 0].tolist() == decides
    counts = decision_counts(decisions, config)
    assert torch.isfinite(counts).all()
    assert (counts[:, [h for h in range(H) if h not in decides]] == 0).all()
    weights, expected = decision_weights(decisions, config), naive_weights(decisions, config)
    assert int((weights != 0).sum()) == len(expected)
    for where, omega in expected.items():
        assert weights[where].item() == pytest.approx(omega, rel=1e-5)
    loss = boundary_loss(student, decisions, config)
    loss.backward()
    assert torch.isfinite(student.grad).all()
    assert (student.grad != 0).any(-1).any(0).nonzero()[:, 0].tolist() == decides
    kept = dataclasses.replace(
        decisions, **{name: getattr(decisions, name)[:, decides] for name in (*FIELDS, "valid_NHP")}
    )
    assert loss.item() == pytest.approx(boundary_loss(student[:, decides], kept, config).item(), rel=1e-6)


@pytest.mark.parametrize("samples", [0, 9])
def test_without_a_head_that_decides_the_loss_is_zero(samples: int) -> None:
    budget, L = Budget(2, 3, 0).with_heads((0, 40, 26)), 25
    arrival, valid = sample_arrivals(torch.tensor([L] * N), budget, BoundaryLoss(samples=samples, min_future=1), L)
    decisions = teacher_decisions(draw(0, L, False), arrival, valid, budget)
    assert not decisions.valid_NHP.any()
    score = draw(1, L, False).requires_grad_()
    loss = student_loss(score, Decay(H), decisions)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(score.grad, torch.zeros_like(score))


def test_budgets_with_unlike_sinks_share_no_table() -> None:
    with pytest.raises(ValueError, match=r"must agree in their sinks, got \[1, 2\]"):
        teacher_tables(draw(0, 20, False), [Budget(1, 3, 4), Budget(2, 3, 4)])


def test_the_balance_is_clipped() -> None:
    """Nine keeps and one drop in head 0; only keeps in head 1."""
    label = torch.ones(1, 2, 10)
    label[0, 0, 9] = -1
    zero = torch.zeros(1, 2, 10)
    decisions = Decisions(zero.long(), zero.long(), label, zero, zero, zero == 0)
    weight = decision_weights(decisions, BoundaryLoss(balance=(0.6, 4.0)))[0]
    ratio = (weight / weight[0, 0]).tolist()
    assert ratio[0] == pytest.approx([1.0] * 9 + [4.0 / 0.6])  # 1/1.8 is clipped to 0.6, 1/0.2 to 4
    assert ratio[1] == pytest.approx([1.0] * 10)
    assert weight.mean().item() == pytest.approx(1.0)


def student_loss(score: Tensor, decay: Decay, decisions: Decisions) -> Tensor:
    priority = static_priority(score, torch.arange(score.shape[-1]), decay())
    return boundary_loss(priority, decisions, BoundaryLoss())


def test_gradients_reach_only_the_compared_tokens_and_the_decay() -> None:
    budget, L = Budget(2, 3, 4), 25
    target, score = draw(0, L, False).requires_grad_(), draw(1, L, False).requires_grad_()
    decay = Decay(H, start=-1e-3)
    decisions = every_decision(target, budget)
    loss = student_loss(score, decay, decisions)
    loss.backward()
    assert target.grad is None
    compared = torch.zeros(N, H, L, dtype=torch.bool)
    for n, h, p in decisions.valid_NHP.nonzero().tolist():
        compared[n, h, decisions.new_NHP[n, h, p]] = True
        compared[n, h, decisions.boundary_NHP[n, h, p]] = True
    assert torch.equal(score.grad != 0, compared)
    assert not compared[..., : budget.sinks].any()
    assert (decay.alpha.grad != 0).all()  # the ages of the two tokens differ
    step = 1e-3
    with torch.no_grad():
        for h in range(H):
            losses = []
            for sign in (1, -1):
                moved = Decay(H, start=-1e-3).double()
                moved.alpha.copy_(decay.alpha)
                moved.alpha[h] += sign * step
                losses.append(student_loss(score, moved, decisions).item())
            assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(decay.alpha.grad[h].item(), rel=1e-2)


@pytest.mark.parametrize("sizes", [(2, 3, 40), (2, 3, 0), (40, 3, 4), (2, 40, 4)])
def test_without_a_valid_decision_the_loss_is_zero_and_so_is_its_gradient(sizes: tuple[int, int, int]) -> None:
    budget, L = Budget(*sizes), 25
    for samples in (0, 8):
        arrival, valid = sample_arrivals(torch.tensor([L] * N), budget, BoundaryLoss(samples=samples, min_future=1), L)
        decisions = teacher_decisions(draw(0, L, False), arrival, valid, budget)
        assert not decisions.valid_NHP.any()
        score, decay = draw(1, L, False).requires_grad_(), Decay(H)
        loss = student_loss(score, decay, decisions)
        loss.backward()
        assert loss.item() == 0
        assert torch.equal(score.grad, torch.zeros_like(score))
        assert torch.equal(decay.alpha.grad, torch.zeros(H))


@pytest.mark.parametrize("length", [1, 2, 127, 129, 1025])
def test_any_length_gives_a_finite_loss_and_gradient(length: int) -> None:
    budget = Budget(4, 16, 32)
    arrival, valid = sample_arrivals(torch.tensor([length] * N), budget, BoundaryLoss(min_future=8), length)
    decisions = teacher_decisions(draw(0, length, True), arrival, valid, budget)
    score = draw(1, length, False).requires_grad_()
    loss = student_loss(score, Decay(H), decisions)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(score.grad).all()
    assert bool(loss > 0) == (length > 60)


def test_short_rows_beside_long_ones_have_no_decisions() -> None:
    budget, L = Budget(1, 2, 3), 30
    decisions = every_decision(draw(0, L, False), budget, min_future=4, lengths=[L, 9])
    assert decisions.valid_NHP[0].any()
    assert not decisions.valid_NHP[1].any()  # 9 tokens: the first saturated query, 6, has only 3 to come


def test_a_priority_shared_by_all_labels_nothing_but_keeps_no_information() -> None:
    """Constant targets: of equals the newer wins, so every label is +1 with margin 0."""
    decisions = every_decision(torch.zeros(N, H, 30), Budget(1, 2, 3))
    assert decisions.valid_NHP.any()
    assert (decisions.label_NHP[decisions.valid_NHP] == 1).all()
    assert (decisions.margin_NHP == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": -1}, "samples must be at least 0, got -1"),
        ({"late": 1.5}, "late and margin_floor"),
        ({"margin_floor": -0.1}, "late and margin_floor"),
        ({"temperature": 0.0}, "temperature and margin_scale must be positive"),
        ({"margin_scale": math.nan}, "temperature and margin_scale must be positive"),
        ({"regret": 2.5}, r"regret must be an exponent in \[0, 2\], got 2.5"),
        ({"regret": -0.5}, r"regret must be an exponent in \[0, 2\], got -0.5"),
        ({"balance": (0.0, 4.0)}, "0 < low <= high"),
        ({"balance": (4.0, 0.5)}, "0 < low <= high"),
    ],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BoundaryLoss(**options)

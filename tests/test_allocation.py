"""Slots by head: the curves against sums written out, the integers against what they promise."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvpop.allocation import CURVES, allocate, apportion, grid, read_curves, write_curves
from kvpop.attachment import attach, attached_policies
from kvpop.budget import Budget
from kvpop.calibration import query_times, remaining_curves
from kvpop.measure import hidden_states
from kvpop.policies import Dense, KVpop, LayerView, Oracle, Random
from kvpop.policies.base import BudgetPolicy, LayerShape
from kvpop.trained import Trained
from kvpop.weights import AdapterError, write_tensors
from tests.tiny import VOCAB, expiries, family_model, held_by_mask, tiny_model


def text(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


# Curves


def looped(model, ids: Tensor, sinks: int, window: int, times: list[int], K: int) -> Tensor:
    """[L, H, K]: softmax of all logits, the largest query head, summed from q on, sorted, averaged."""
    views: list[LayerView] = []
    hidden_states(attach(model, Dense()), ids[None], views.append)
    layers = []
    for view in views:
        H, G, S = view.k.shape[1], view.q.shape[1] // view.k.shape[1], len(ids)
        curve = torch.zeros(H, K, dtype=torch.float64)
        for h in range(H):
            heads = view.q[0, h * G : (h + 1) * G] @ view.k[0, h].T * view.scale
            p = heads.masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf).softmax(-1).amax(0)
            for q in times:
                best = sorted((float(p[q:, t].sum()) for t in range(sinks, q - window + 1)), reverse=True)
                curve[h, : len(best)] += torch.tensor(best, dtype=torch.float64) / len(times)
        layers.append(curve)
    return torch.stack(layers)


def test_a_curve_is_the_remaining_attention_of_the_best_tokens() -> None:
    model, texts = tiny_model(groups=3), [text(70), text(47, 1)]
    attach(model, Random(Budget(1, 2, 3)))
    curves = remaining_curves(model, texts, sinks=2, window=5, block=8)
    assert attached_policies(model) == []
    at = [[24, 32, 40, 48, 56], [16, 24, 32]]
    K = 56 - 5 - 2 + 1
    assert curves.shape == (2, 2, K)
    assert curves.dtype == torch.float32
    expected = torch.stack([looped(model, ids, 2, 5, times, K) for ids, times in zip(texts, at)]).mean(0)
    torch.testing.assert_close(curves.double(), expected, rtol=1e-5, atol=1e-6)
    assert bool((curves.diff(dim=-1) <= 0).all())
    assert torch.equal(curves, remaining_curves(model, texts, sinks=2, window=5, block=8))


@given(st.integers(1, 300), st.integers(0, 4), st.integers(1, 40), st.integers(1, 64))
def test_a_text_is_looked_at_from_a_third_on_while_a_block_is_to_come(
    length: int, sinks: int, window: int, block: int
) -> None:
    wanted = [q for q in range(0, length, block) if 3 * q >= length and q + block <= length and q - window >= sinks]
    if wanted:
        assert query_times(length, sinks, window, block) == wanted
    else:
        with pytest.raises(ValueError, match=f"a text of {length} tokens is too short: no multiple of {block}"):
            query_times(length, sinks, window, block)


def test_curves_need_texts() -> None:
    with pytest.raises(ValueError, match="at least 1 text, got none"):
        remaining_curves(tiny_model(), [])
    with pytest.raises(ValueError, match="a text of 40 tokens is too short"):
        remaining_curves(tiny_model(), [text(400), text(40)])


def test_layers_with_a_window_of_their_own_have_no_curve_and_get_no_slots() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = family_model("Qwen3", num_hidden_layers=4, layer_types=kinds, use_sliding_window=True, sliding_window=8)
    curves = remaining_curves(model, [text(90)], sinks=2, window=8, block=8)
    assert curves.isnan().flatten(1).all(1).tolist() == curves.isnan().flatten(1).any(1).tolist()
    assert curves.isnan()[:, 0, 0].tolist() == [True, False, True, False]
    heads = allocate(curves, 6, least=1)
    assert [len(row) for row in heads] == [0, 2, 0, 2]
    assert sum(map(sum, heads)) == 4 * 6
    attach(model, KVpop(Budget(2, 8, 6), heads=heads))
    assert [layer.budget.longs(2) for layer in attached_policies(model) if hasattr(layer, "mean")] == [
        heads[1],
        heads[3],
    ]
    with pytest.raises(ValueError, match="layer 0, which keeps the model's own sliding_attention: leave its row empty"):
        attach(model, KVpop(Budget(2, 8, 6), heads=((6, 6), (6, 6), (), ())))


# Integers


@st.composite
def curves(draw, ties: bool = True) -> Tensor:
    """Falling, [L, H, K], with many equal values or none."""
    L, H, K = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    if ties and draw(st.booleans()):
        x = torch.randint(0, 4, (L, H, K), generator=generator).float()
    else:
        x = (torch.randperm(L * H * K, generator=generator).view(L, H, K) + 1.0) ** draw(st.sampled_from([1, 3]))
    return x.sort(dim=-1, descending=True).values


@given(curves(), st.data())
def test_one_threshold_shares_exactly_what_there_is(x: Tensor, data) -> None:
    L, H, K = x.shape
    long = data.draw(st.integers(0, K))
    least = data.draw(st.integers(0, long))
    heads = allocate(x, long, least)
    assert [len(row) for row in heads] == [H] * L
    flat = list(chain.from_iterable(heads))
    assert sum(flat) == L * H * long
    assert all(type(k) is int and least <= k <= K for k in flat)
    rows = x.view(L * H, K).tolist()
    taken = [v for row, k in zip(rows, flat) for v in row[least:k]]
    left = [v for row, k in zip(rows, flat) for v in row[k:]]
    assert not taken or not left or min(taken) >= max(left)  # a threshold lies between them
    assert allocate(x, long, least) == heads
    assert KVpop(Budget(1, 2, long), heads=heads).heads in (heads, ())


@given(curves(), st.data())
def test_with_more_slots_no_head_gets_fewer(x: Tensor, data) -> None:
    K = x.shape[2]
    fewer = data.draw(st.integers(0, K))
    more = data.draw(st.integers(fewer, K))
    least = data.draw(st.one_of(st.none(), st.integers(0, fewer)))
    a, b = (list(chain.from_iterable(allocate(x, long, least))) for long in (fewer, more))
    assert all(k <= other for k, other in zip(a, b))


@given(curves(ties=False), st.data())
def test_a_permutation_of_heads_permutes_the_slots(x: Tensor, data) -> None:
    L, H, K = x.shape
    long = data.draw(st.integers(0, K))
    order = data.draw(st.permutations(range(L * H)))
    found = list(chain.from_iterable(allocate(x, long)))
    moved = list(chain.from_iterable(allocate(x.view(L * H, K)[order].view(L, H, K), long)))
    assert moved == [found[i] for i in order]


def test_equal_values_are_shared_evenly_and_the_earlier_head_first() -> None:
    assert allocate(torch.ones(2, 2, 9), 3, 1) == ((3, 3), (3, 3))
    x = torch.zeros(2, 2, 9)
    x[1, 1] = 1
    assert allocate(x, 3, 0) == ((1, 1), (1, 9))
    assert allocate(x[:, :, :6], 4, 1) == ((4, 3), (3, 6))


def test_a_curve_that_rises_counts_as_its_running_minimum() -> None:
    x = torch.tensor([[[5.0, 1.0, 9.0, 9.0], [4.0, 3.0, 2.0, 0.0]]])
    assert allocate(x, 2, 0) == ((1, 3),)


def test_every_head_keeps_a_quarter_of_the_mean() -> None:
    x = torch.zeros(1, 2, 100)
    x[0, 0] = 1
    assert allocate(x, 40) == ((70, 10),)  # a quarter of the mean
    assert allocate(x, 40, 3) == ((77, 3),)
    assert allocate(x, 3) == ((6, 0),)
    assert allocate(x, 0) == ((0, 0),)


@pytest.mark.parametrize(
    ("shape", "long", "least", "message"),
    [
        ((2, 9), 3, None, r"must be \[layers, heads, ranks\], got shape \(2, 9\)"),
        ((2, 0, 9), 3, None, "must be"),
        ((2, 2, 9), 10, None, "0 <= least <= long <= 9"),
        ((2, 2, 9), 3, 4, "0 <= least <= long <= 9 .*got 4 and 3"),
        ((2, 2, 9), 3, -1, "got -1 and 3"),
        ((2, 2, 9), -1, None, "got -1 and -1"),
        ((0, 2, 9), 3, None, "NaN"),
    ],
)
def test_what_cannot_be_shared_is_an_error(shape, long: int, least: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allocate(torch.zeros(shape), long, least)


def test_single_nans_and_curves_of_nothing_are_errors() -> None:
    x = torch.ones(3, 2, 9)
    x[1, 0, 4] = math.nan
    with pytest.raises(ValueError, match=r"curves of layers \[1\] hold NaN"):
        allocate(x, 3)
    with pytest.raises(ValueError, match="hold NaN"):
        allocate(x * math.nan, 3)


rows = st.lists(st.lists(st.integers(0, 50), max_size=4).map(tuple), min_size=1, max_size=5).map(tuple)


@given(rows, st.integers(0, 60))
def test_another_mean_is_shared_in_proportion(heads, long: int) -> None:
    found = apportion(heads, long)
    assert [len(row) for row in found] == [len(row) for row in heads]
    have, flat = list(chain.from_iterable(heads)), list(chain.from_iterable(found))
    assert sum(flat) == len(have) * long
    assert found == apportion(heads, long)
    for k, scaled in zip(have, flat):
        exact = Fraction(k * len(have) * long, sum(have)) if sum(have) else long
        assert math.floor(exact) <= scaled <= math.ceil(exact)
    for (k, scaled), (other, more) in zip(zip(have, flat), list(zip(have, flat))[1:]):
        assert (k - other) * (scaled - more) >= 0 or abs(scaled - more) <= 1


def test_the_same_mean_leaves_all_as_it_is_and_ties_go_to_the_earlier_head() -> None:
    heads = ((3, 9), (), (1, 7))
    assert apportion(heads, 5) == heads
    assert apportion(heads, 10) == ((6, 18), (), (2, 14))
    assert apportion(((1, 1), (1, 1)), 0) == ((0, 0), (0, 0))
    assert apportion(((0, 0),), 4) == ((4, 4),)
    assert apportion((), 4) == ()
    assert apportion(((1, 3), (1, 3)), 1) == ((1, 2), (0, 1))
    assert apportion(((1, 3), (3, 1)), 3) == ((2, 5), (4, 1))
    with pytest.raises(ValueError, match="at least 0 tokens, got -1"):
        apportion(heads, -1)


# Policies


POLICIES = {"kvpop": KVpop, "random": Random, "oracle": Oracle}


@pytest.mark.parametrize("kind", POLICIES)
def test_a_policy_gives_every_head_its_own_slots(kind: str) -> None:
    heads = ((1, 7), (), (5, 3), (4, 4))
    policy = POLICIES[kind](Budget(1, 3, 4), heads=[list(row) for row in heads])
    assert policy.heads == heads
    assert hash(policy) == hash(POLICIES[kind](Budget(1, 3, 4), heads=heads))
    assert policy.slots == 8
    model = attach(family_model("Llama", num_hidden_layers=4), policy)
    budgets = [layer.budget for layer in attached_policies(model)]
    assert budgets == [Budget(1, 3, 7, (1, 7)), Budget(1, 3, 4), Budget(1, 3, 5, (5, 3)), Budget(1, 3, 4)]
    if kind == "oracle":
        return
    _, expiry = expiries(model, text(40)[None])
    for layer, found in enumerate(held_by_mask(expiry, 39)):
        assert [len(head) for head in found[0]] == [4 + k for k in heads[layer] or (4, 4)]


def test_a_policy_without_listed_heads_is_the_plain_one() -> None:
    assert KVpop(Budget(1, 3, 4), heads=((), ())) == KVpop(Budget(1, 3, 4))


@pytest.mark.parametrize("kind", POLICIES.values())
@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (((1, 7), (5, 4)), "4.25 long-range slots on average, the budget 4: 4 heads must have 16 together, got 17"),
        (((1, 7), (-1, 9)), "integers of at least 0"),
        (((1, 7), (4.0, 4)), "integers of at least 0"),
        (((True, 7),), "integers of at least 0"),
    ],
)
def test_heads_that_do_not_add_up_are_refused(kind: type[BudgetPolicy], heads, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(Budget(1, 3, 4), heads=heads)


def test_heads_of_another_model_are_refused_naming_layer_and_sizes() -> None:
    policy = KVpop(Budget(1, 3, 4), heads=((1, 7), (4, 4), (4, 4)))
    with pytest.raises(ValueError, match="heads has rows for 3 layers, the model has 2"):
        attach(tiny_model(), policy)
    with pytest.raises(ValueError, match=r"layer 0: heads has 2 numbers for 3 KV heads: \(1, 7\)"):
        policy.layer(LayerShape(0, 6, 3, 8))
    with pytest.raises(ValueError, match="layer 3: heads has rows for 3 layers only"):
        policy.layer(LayerShape(3, 4, 2, 8))
    with pytest.raises(ValueError, match=r"mean over all heads, got one of the heads \(1, 4\)"):
        KVpop(Budget(1, 3, 4, (1, 4)))


def test_a_layer_describes_its_heads_only_where_they_differ() -> None:
    shape = LayerShape(1, 4, 2, 8)
    plain = KVpop(Budget(1, 3, 4)).layer(shape).describe()
    assert "heads" not in plain
    for row, said in (((1, 7), [1, 7]), ((3, 3), [3, 3]), ((4, 4), None)):
        heads = (tuple(8 - k for k in row), row)
        found = KVpop(Budget(1, 3, 4), heads=heads).layer(shape).describe()
        assert found["budget"] == [1, 3, 4]
        assert found.get("heads") == said
        assert (found == plain) == (said is None)


@given(st.integers(1, 300), st.integers(1, 3))
def test_saved_curves_are_exact_on_the_grid_and_between_their_neighbours_elsewhere(tmp_path_factory, K: int, L: int):
    path = tmp_path_factory.mktemp("curves") / CURVES
    x = torch.rand(L, 2, K, generator=torch.Generator().manual_seed(K)).sort(dim=-1, descending=True).values
    write_curves(path, x)
    back, at = read_curves(path), grid(K) - 1
    assert back.shape == x.shape
    assert torch.equal(back[..., at], x[..., at])
    assert (back.diff(dim=-1) <= 1e-7).all()


def test_saved_curves_keep_layers_without_one(tmp_path):
    x = torch.rand(3, 2, 40)
    x[1] = torch.nan
    write_curves(tmp_path / CURVES, x)
    assert read_curves(tmp_path / CURVES).isnan().all(-1).all(-1).tolist() == [False, True, False]


def test_a_file_of_something_else_is_not_curves(tmp_path):
    write_tensors(tmp_path / CURVES, {"x": torch.ones(2)})
    with pytest.raises(AdapterError, match=r"does not hold the curves of budgets by head, only \['x'\]"):
        read_curves(tmp_path / CURVES)


def test_the_grid_has_eight_ranks_a_doubling_and_the_last():
    assert grid(1).tolist() == [1]
    assert grid(21).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 19, 21]
    assert grid(4000)[-1] == 4000
    assert len(grid(4000)) < 90


@pytest.mark.parametrize(
    ("ranks", "curves", "message"),
    [
        ([-3, -1], torch.ones(1, 1, 2), "ranks must be those of the grid"),
        ([2, 1], torch.ones(1, 1, 2), "ranks must be those of the grid"),
        ([2**40], torch.ones(1, 1, 1), "ranks must be those of the grid"),
        ([1, 2], -torch.ones(1, 1, 2), "finite numbers of at least 0"),
        ([1, 2], torch.tensor([[[1.0, math.nan]]]), "finite numbers of at least 0"),
        ([1, 2], torch.tensor([[[math.inf, 1.0]]]), "finite numbers of at least 0"),
        ([1, 2], torch.ones(1, 1, 2).int(), "finite numbers of at least 0"),
    ],
)
def test_odd_curves_are_refused_naming_the_file(tmp_path, ranks, curves, message) -> None:
    write_tensors(tmp_path / CURVES, {"ranks": torch.tensor(ranks), "curves": curves})
    with pytest.raises(AdapterError, match=rf"{CURVES}: .*{message}"):
        read_curves(tmp_path / CURVES)


def of_curves(long: int = 20) -> Trained:
    """A policy of 3 layers of 2 heads whose curves reach 100 ranks."""
    generator = torch.Generator().manual_seed(0)
    decay = torch.rand(3, 2, 1, generator=generator) * 0.2 + 0.01
    curves = (-decay * torch.arange(100)).exp()
    return Trained(Random(Budget(2, 4, long)), {}, curves=curves).by_head(curves)


def mean(heads) -> float:
    listed = list(chain(*heads))
    return sum(listed) / len(listed)


def test_other_budgets_do_not_depend_on_the_way_there_and_go_on_beyond_the_curves() -> None:
    trained = of_curves()
    for long in (1, 2, 49, 50, 51, 99, 100, 101, 4000):
        other = trained.with_budget(Budget(2, 4, long))
        assert mean(other.policy.heads) == long
        assert other.with_budget(Budget(2, 4, 20)).policy.heads == trained.policy.heads
    before, after = (trained.with_budget(Budget(2, 4, long)).policy.heads for long in (100, 101))
    assert all(abs(a - b) <= 4 for a, b in zip(chain(*before), chain(*after)))


def test_layers_of_their_own_leave_the_mean_to_the_others() -> None:
    trained = of_curves()
    apart = trained.apart_from([0])
    assert apart.policy.heads[0] == ()
    assert mean(apart.policy.heads) == 20
    assert trained.apart_from([]) is trained
    alone = trained.of_layer(1, Budget(2, 4, 7))
    assert mean(alone.policy.heads) == 7
    assert alone.policy.heads[0] == alone.policy.heads[2] == ()
    row, whole = alone.policy.heads[1], trained.policy.heads[1]
    assert (row[0] > row[1]) == (whole[0] > whole[1])
    assert trained.apart_from([0, 1, 2]) is trained


def test_sharing_anew_forgets_the_smallest_share_of_before() -> None:
    trained = of_curves().with_budget(Budget(2, 4, 40))
    again = trained.by_head(trained.curves, least=20)
    assert min(chain(*again.policy.heads)) == 20
    assert min(chain(*again.with_budget(Budget(2, 4, 20)).policy.heads)) >= 10

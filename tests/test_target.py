"""The future-attention target against Eq. 2, 3 and 13-17 written out with dense probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpop.budget import Budget
from kvpop.core import Target, expiry, floored, future_target
from kvpop.core.target import future_count
from kvpop.documents import Documents
from kvpop.ops.sparse_attention import NEVER, sparse_attention

B, D = 2, 4
SCALE = 0.7


def draw(seed: int, H: int, G: int, S: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(B, H * G, S, D, generator=generator, dtype=torch.float64)
    return q, 2 * torch.randn(B, H, S, D, generator=generator, dtype=torch.float64)


def lse_under(q: Tensor, k: Tensor, expiry_BHS: Tensor) -> Tensor:
    return sparse_attention(q, k, torch.zeros_like(k), expiry_BHS, scale=SCALE)[1]


def dense_lse(q: Tensor, k: Tensor, documents: Documents) -> Tensor:
    return lse_under(q, k, torch.full(k.shape[:3], NEVER).minimum(documents.end_BS[:, None]).int())


def naive(q: Tensor, k: Tensor, ids: list[list[int]], w: int, target: Target) -> dict[tuple[int, int, int], float]:
    """m [b, h, t] (no floor), one probability at a time: dense causal attention inside each document."""
    H, G, mass = k.shape[1], q.shape[1] // k.shape[1], {}
    for b, row in enumerate(ids):
        S = len(row)
        for r in range(H * G):
            for d in range(S):
                seen = [t for t in range(d + 1) if row[t] == row[d] and row[d] >= 0]
                weights = [math.exp(SCALE * float(q[b, r, d] @ k[b, r // G, t])) for t in seen]
                for t, weight in zip(seen, weights):
                    far = target.lookahead is not None and d > t + w + target.lookahead
                    if d >= t + w and not far:
                        p = weight / sum(weights)
                        mass[b, r, t] = mass.get((b, r, t), 0.0) + p**target.power
    result = {}
    for b, row in enumerate(ids):
        for h in range(H):
            for t in range(len(row)):
                if row[t] < 0:
                    continue
                queries = [d for d in range(t + w, len(row)) if row[d] == row[t]]
                if target.lookahead is not None:
                    queries = queries[: target.lookahead + 1]
                N = max(1, len(queries)) if target.normalise else 1
                groups = [(mass.get((b, r, t), 0.0) / N) ** (1 / target.power) for r in range(h * G, (h + 1) * G)]
                result[b, h, t] = max(groups) if target.aggregate == "max" else sum(groups) / G
    return result


targets = st.builds(
    Target,
    aggregate=st.sampled_from(["max", "mean"]),
    power=st.sampled_from([1.0, 2.0]),
    normalise=st.booleans(),
    lookahead=st.sampled_from([None, 0, 1, 4]),
    lse=st.just("dense"),
)


@settings(max_examples=40)
@given(st.integers(0, 999), st.sampled_from([(1, 1), (2, 2), (1, 3)]), st.integers(1, 5), targets, st.booleans())
def test_the_target_is_the_equations(seed: int, heads: tuple[int, int], w: int, target: Target, packed: bool) -> None:
    ids = [[0] * 4 + [1] * 3 + [-1] * 2 + [2] * 4, [-1] + [7] * 12] if packed else [[0] * 13] * 2
    q, k = draw(seed, *heads, 13)
    documents = Documents(torch.tensor(ids))
    log_mass = future_target(q, k, dense_lse(q, k, documents), documents, scale=SCALE, window=w, target=target)
    assert log_mass.dtype == torch.float64
    assert log_mass.shape == k.shape[:3]
    log_target = floored(log_mass, target.epsilon)
    for (b, h, t), mass in naive(q, k, ids, w, target).items():
        assert log_mass[b, h, t].exp().item() == pytest.approx(mass, rel=1e-9, abs=1e-300)
        assert log_target[b, h, t].item() == pytest.approx(math.log(target.epsilon + mass), rel=1e-9)
    padding = ~documents.valid_BS[:, None].expand_as(log_mass)
    assert (log_mass[padding] == -torch.inf).all()


@pytest.mark.parametrize("normalise", [True, False])
def test_a_key_without_a_future_query_gets_log_epsilon(normalise: bool) -> None:
    q, k = draw(0, 2, 2, 9)
    documents = Documents(torch.tensor([[0] * 5 + [1] * 4, [0] * 9]))
    target = Target(normalise=normalise)
    log_mass = future_target(q, k, dense_lse(q, k, documents), documents, scale=SCALE, window=3, target=target)
    log_target = floored(log_mass, target.epsilon)
    assert torch.isfinite(log_target).all()
    without = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1], [0] * 6 + [1] * 3]).bool()[:, None].expand_as(log_mass)
    assert (log_mass[without] == -torch.inf).all()
    assert torch.isfinite(log_mass[~without]).all()
    assert torch.equal(log_target[without], torch.full_like(log_target[without], math.log(1e-8)))


@given(st.floats(-60, 5), st.sampled_from([1e-8, 1e-6, 1e-12]))
def test_the_floor_is_added_in_log_space(log_mass: float, epsilon: float) -> None:
    expected = math.log(epsilon + math.exp(log_mass))
    assert floored(torch.tensor(log_mass, dtype=torch.float64), epsilon).item() == pytest.approx(expected, rel=1e-12)
    assert floored(torch.tensor(log_mass), epsilon).item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_floor_too_small_for_float32_still_floors() -> None:
    assert floored(torch.tensor([-torch.inf, -1000.0]), 1e-60).tolist() == pytest.approx([math.log(1e-60)] * 2)


def test_counts_of_future_queries() -> None:
    documents = Documents(torch.tensor([[0, 0, 0, 0, 1, 1, -1]]))
    assert future_count(documents, 1).tolist() == [[3, 2, 1, 1, 1, 1, 1]]
    assert future_count(documents, 1, lookahead=1).tolist() == [[2, 2, 1, 1, 1, 1, 1]]
    assert future_count(documents, 1, lookahead=0).tolist() == [[1] * 7]
    assert future_count(documents, 100).tolist() == [[1] * 7]


def test_mass_is_conserved_without_normalisation() -> None:
    """With w = 1 and one query head a KV head, masses and the diagonal of the attention add up to the queries."""
    q, k = draw(1, 2, 1, 11)
    documents = Documents.single(B, 11)
    lse = dense_lse(q, k, documents)
    target = Target(normalise=False)
    mass = future_target(q, k, lse, documents, scale=SCALE, window=1, target=target).exp().sum(-1)
    own = ((q * k).sum(-1) * SCALE - lse).exp().sum(-1)
    torch.testing.assert_close(mass + own, torch.full_like(mass, 11.0), rtol=1e-10, atol=1e-10)


def test_with_sparse_normalisers_an_evicted_key_can_receive_more_than_everything() -> None:
    """The student's LSE leaves out what it dropped: exp(logit - LSE) of a dropped key has no upper bound of 1."""
    S, window = 12, 2
    q, k = torch.ones(1, 1, S, D, dtype=torch.float64), torch.zeros(1, 1, S, D, dtype=torch.float64)
    k[0, 0, 3] = 3.0  # every query wants token 3, and the student drops it
    priority = torch.zeros(1, 1, S)
    priority[0, 0, 3] = -1.0
    documents = Documents.single(1, S)
    lse = lse_under(q, k, expiry(priority, Budget(0, window, 2)))
    log_mass = future_target(q, k, lse, documents, scale=SCALE, window=window, target=Target())
    assert log_mass[0, 0, 3].item() > 0
    assert torch.isfinite(floored(log_mass, 1e-8)).all()
    dense = future_target(q, k, dense_lse(q, k, documents), documents, scale=SCALE, window=window, target=Target())
    assert (dense <= 0).all()
    assert (dense <= log_mass + 1e-12).all()


def test_documents_do_not_see_each_other() -> None:
    q, k = draw(2, 2, 2, 14)
    documents = Documents(torch.tensor([[0] * 6 + [1] * 8] * B))
    found = []
    for change in (0.0, 5.0):
        k2, q2 = k.clone(), q.clone()
        k2[:, :, 5] += change
        q2[:, :, 5] -= change
        found.append(
            future_target(q2, k2, dense_lse(q2, k2, documents), documents, scale=SCALE, window=2, target=Target())
        )
    assert torch.equal(found[0][..., 6:], found[1][..., 6:])
    assert not torch.equal(found[0][..., :4], found[1][..., :4])


def test_the_target_carries_no_gradient_and_is_float32_for_bfloat16() -> None:
    q, k = (x.bfloat16().requires_grad_() for x in draw(3, 2, 2, 9))
    documents = Documents.single(B, 9)
    log_mass = future_target(
        q, k, dense_lse(q, k, documents).float(), documents, scale=SCALE, window=2, target=Target()
    )  # fmt: skip
    assert log_mass.dtype == torch.float32
    assert not log_mass.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aggregate": "sum"}, "aggregate must be 'max' or 'mean', got 'sum'"),
        ({"lse": "full"}, "lse must be 'sparse' or 'dense', got 'full'"),
        ({"power": 0.0}, "power must be positive, got 0.0"),
        ({"power": math.nan}, "power must be positive, got nan"),
        ({"epsilon": 0.0}, "epsilon must be positive, got 0.0"),
    ],
)
def test_bad_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Target(**options)


def test_a_bad_lookahead_or_window_is_refused() -> None:
    q, k = draw(0, 1, 1, 5)
    documents = Documents.single(B, 5)
    for window, lookahead in ((0, None), (1, -1)):
        with pytest.raises(ValueError, match="must be at least"):
            future_target(
                q, k, dense_lse(q, k, documents), documents, scale=SCALE, window=window,
                target=Target(lookahead=lookahead),
            )  # fmt: skip

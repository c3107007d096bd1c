"""The running top-k and the expiry it implies (Appendix C).

Tokens arrive one after the other, each with a priority that never changes; the k best of those that have arrived are kept.
The k-th best can only improve, so a token that is dropped never returns, and one integer per token says all there is to say:
the arrival that drops it. ``expiry`` puts that integer in terms of query positions for a whole sequence.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Collection, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from kvpop.budget import Budget

# Shapes: X any leading dimensions (rows, heads), A arrivals, S sequence.

Impl = Literal["parallel", "compiled", "heap", "brute"]

NEVER = torch.iinfo(torch.int32).max

GRAPHS = 64
"""How many shapes a process may compile the cutoff for; the next ones run uncompiled."""


def ranks(priority_XA: Tensor, pinned_XA: Tensor | None = None) -> Tensor:
    """0 (worst) to A - 1 (best) by (pinned, priority, arrival): of equals the newer is better. NaN counts as -inf."""
    priority_XA = (
        torch.nan_to_num(priority_XA, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0
    )  # -0.0 to 0.0
    order_XA = priority_XA.argsort(dim=-1, stable=True)
    if pinned_XA is not None:
        order_XA = order_XA.gather(-1, pinned_XA.gather(-1, order_XA).int().argsort(dim=-1, stable=True))
    index_XA = torch.arange(priority_XA.shape[-1], device=priority_XA.device).expand_as(order_XA)
    return torch.empty_like(order_XA).scatter_(-1, order_XA, index_XA)


PerHead = int | Sequence[int]
"""k of all rows, or one for every index of the second last dimension (KV heads)."""


def running_cutoff(rank_XA: Tensor, k: PerHead, impl: Impl = "parallel") -> Tensor:
    """The rank of the k-th best of arrivals 0..j, for every j; -1 while fewer than k have arrived (nothing is cut).

    With k = 0 nothing is ever kept: the cutoff is A, above every rank. ``rank_XA`` is a permutation along its last
    dimension; ``k`` is one number, or one for each KV head, the second last dimension. ``impl``: "parallel" is a wavelet
    matrix, ceil(log2 A) rounds of cumsum and gather for all rows at once; "compiled" is the same through torch.compile, once
    for every shape, for GPUs; "heap" is one heap per row on the CPU, O(A log k) (0.3 us a token); "brute" sorts every prefix,
    for tests. Raises ValueError for a negative k, and for several that are not one a head.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"unknown impl {impl!r}: choose one of {', '.join(get_args(Impl))}")
    if impl in ("parallel", "compiled"):
        return running_cutoffs(rank_XA, [k], impl)[0]
    k = _checked(k, rank_XA)
    if isinstance(k, tuple):
        return torch.stack([running_cutoff(row_XA, one, impl) for row_XA, one in zip(rank_XA.unbind(-2), k)], dim=-2)
    A = rank_XA.shape[-1]
    if not 0 < k < A:
        return _trivial_cutoff(rank_XA, k)
    if impl == "heap":
        cutoff_XA = _heap(rank_XA, k)
    else:
        cutoff_XA = torch.stack(
            [rank_XA[..., : max(j + 1, k)].topk(k, dim=-1).values[..., -1] for j in range(A)], dim=-1
        )
    cutoff_XA[..., : k - 1] = -1
    return cutoff_XA


def running_cutoffs(rank_XA: Tensor, ks: Sequence[PerHead], impl: Impl = "parallel") -> list[Tensor]:
    """``running_cutoff`` for several k at once: the work on the ranks is shared. ``impl``: "parallel" or "compiled"."""
    A = rank_XA.shape[-1]
    asked = [_checked(k, rank_XA) for k in ks]
    proper = list(dict.fromkeys(k for k in asked if (A > 0 if isinstance(k, tuple) else 0 < k < A)))
    found: dict[int | tuple[int, ...], Tensor] = {}
    if proper:
        rank_NA = rank_XA.reshape(-1, A)
        k_KN1 = _of_rows(proper, rank_XA)
        if impl == "compiled":
            with torch._dynamo.config.patch(recompile_limit=GRAPHS):
                value_KNA = _compiled_wavelet()(rank_NA, k_KN1)
        else:
            value_KNA = _wavelet(rank_NA, k_KN1)
        found = dict(zip(proper, value_KNA.view(len(proper), *rank_XA.shape)))
    for k, cutoff_XA in found.items():
        if isinstance(k, int):
            cutoff_XA[..., : k - 1] = -1
        else:
            k_H1 = torch.tensor(k, device=rank_XA.device)[:, None]
            cutoff_XA.masked_fill_(torch.arange(A, device=rank_XA.device) < k_H1 - 1, -1).masked_fill_(k_H1 == 0, A)
    return [found[k] if k in found else _trivial_cutoff(rank_XA, k if isinstance(k, int) else 1) for k in asked]


def _checked(k: PerHead, rank_XA: Tensor) -> int | tuple[int, ...]:
    """One number where all heads have the same."""
    least = k if isinstance(k, int) else min(k, default=0)
    if least < 0:
        raise ValueError(f"k must be at least 0 tokens, got {least}")
    if isinstance(k, int):
        return k
    if rank_XA.ndim < 2 or len(k) != rank_XA.shape[-2]:
        raise ValueError(
            f"{len(k)} numbers of slots do not fit ranks of shape {tuple(rank_XA.shape)}: one a head is needed"
        )
    return k[0] if k and len(set(k)) == 1 else tuple(k)


def _of_rows(ks: Sequence[int | tuple[int, ...]], rank_XA: Tensor) -> Tensor:
    """[K, 1, 1], or [K, N, 1] with a number for every row if one of ``ks`` is by head."""
    if all(isinstance(k, int) for k in ks):
        return torch.tensor(ks, device=rank_XA.device)[:, None, None]
    X = rank_XA.shape[:-1]
    by_head = [(k,) * X[-1] if isinstance(k, int) else k for k in ks]
    k_KH = torch.tensor(by_head, device=rank_XA.device)
    return k_KH.view(len(ks), *[1] * (len(X) - 1), X[-1]).expand(len(ks), *X).reshape(len(ks), -1, 1)


def _trivial_cutoff(rank_XA: Tensor, k: int) -> Tensor:
    """The cutoff where k = 0 (nothing is kept) or k >= A (nothing is cut, at most by the last arrival)."""
    A = rank_XA.shape[-1]
    if k == 0:
        return torch.full_like(rank_XA, A)
    cutoff_XA = torch.full_like(rank_XA, -1)
    if k == A and A > 0:
        cutoff_XA[..., -1] = 0
    return cutoff_XA


def _wavelet(rank_NA: Tensor, k_KN1: Tensor) -> Tensor:
    """k-th largest of every prefix [K, N, A], most significant bit first: follow its interval through the levels.

    Of prefixes shorter than k, the smallest; of no meaning where k is 0. ``k_KN1`` may be [K, 1, 1], the same for all rows.
    """
    level_NA, (N, A), K, device = rank_NA, rank_NA.shape, len(k_KN1), rank_NA.device
    index_A = torch.arange(A, device=device)
    left = torch.zeros(K, N, A, dtype=torch.long, device=device)
    right = (index_A + 1).expand(K, N, A)
    wanted = k_KN1.minimum(right)
    value = torch.zeros_like(left)
    for bit in reversed(range(max(1, (A - 1).bit_length()))):
        is_one_NA = (level_NA >> bit) & 1
        ones_NA = torch.nn.functional.pad(is_one_NA.cumsum(-1), (1, 0))
        zeros_N1 = A - ones_NA[:, -1:]
        ones_KNA = ones_NA.expand(K, N, A + 1)
        ones_left, ones_right = ones_KNA.gather(2, left), ones_KNA.gather(2, right)
        inside = ones_right - ones_left
        up = wanted <= inside
        value |= up.long() << bit
        wanted = torch.where(up, wanted, wanted - inside)
        left = torch.where(up, zeros_N1 + ones_left, left - ones_left)
        right = torch.where(up, zeros_N1 + ones_right, right - ones_right)
        # Zeros to the front, ones behind them, both in order: no sort is needed, the counts say where each goes.
        before_NA = ones_NA[:, :-1]
        place_NA = torch.where(is_one_NA.bool(), zeros_N1 + before_NA, index_A - before_NA)
        level_NA = torch.empty_like(level_NA).scatter_(1, place_NA, level_NA)
    return value


@functools.cache
def _compiled_wavelet() -> Callable[[Tensor, Tensor], Tensor]:
    return torch.compile(_wavelet, dynamic=False)


def _heap(rank_XA: Tensor, k: int) -> Tensor:
    rows = []
    for row in rank_XA.reshape(-1, rank_XA.shape[-1]).tolist():
        best = row[:k]
        heapq.heapify(best)
        cutoffs = [best[0]] * k
        for rank in row[k:]:
            heapq.heappushpop(best, rank)
            cutoffs.append(best[0])
        rows.append(cutoffs)
    return torch.tensor(rows, dtype=rank_XA.dtype, device=rank_XA.device).view(rank_XA.shape)


def departures(rank_XA: Tensor, cutoff_XA: Tensor) -> Tensor:
    """The arrival that drops each token: the first j >= own arrival whose cutoff is above its rank; A if none does."""
    A = rank_XA.shape[-1]
    first = torch.searchsorted(cutoff_XA.contiguous(), rank_XA.contiguous(), right=True)
    return first.maximum(torch.arange(A, device=rank_XA.device))


def expiry(priority_XS: Tensor, budget: Budget, impl: Impl = "parallel", pinned_XS: Tensor | None = None) -> Tensor:
    """The first query position at which each token of a sequence is no longer held; int32, NEVER if it always is.

        sinks (t < s): NEVER          others: max(t + w, first q whose k-th best of E(q) outranks t)

    ``priority_XS`` holds the static priorities of tokens 0..S-1 of one document a row; with a budget by heads, the heads are
    its second last dimension. Sinks' priorities are not read.
    Positions at or past S are reported as they fall out, or as NEVER: nothing beyond S is known.

    ``pinned_XS`` marks tokens that must never be dropped: they outrank all others, so each takes a long-range slot for good
    (a pinned sink takes none). Raises ValueError if a row pins more tokens than a head has long-range slots.
    """
    if pinned_XS is not None:
        most = int(pinned_XS[..., budget.sinks :].sum(-1).max()) if pinned_XS.numel() else 0
        check_pins(most, budget)
    S = priority_XS.shape[-1]
    expiry_XS = torch.full(priority_XS.shape, NEVER, dtype=torch.int32, device=priority_XS.device)
    ranked_XA = priority_XS[..., budget.sinks :]
    if ranked_XA.numel():
        rank_XA = ranks(ranked_XA, None if pinned_XS is None else pinned_XS[..., budget.sinks :])
        leaves_XA = departures(rank_XA, running_cutoff(rank_XA, budget.heads or budget.long, impl))
        query_XA = leaves_XA + (budget.sinks + budget.window)
        # The last w tokens have not been ranked within S: whatever happens to them happens at S or later.
        expiry_XS[..., budget.sinks :] = torch.where(query_XA < S, query_XA, NEVER).int()
    return expiry_XS


def check_pins(count: int, budget: Budget) -> None:
    """Raise ValueError if ``count`` pinned tokens do not fit into the long-range slots of every head."""
    least = min(budget.heads, default=budget.long)
    if count > least:
        smallest = f" of head {budget.heads.index(least)}" if budget.heads else ""
        raise ValueError(f"{count} pinned tokens do not fit into {least} long-range slots{smallest}")


def oracle_held(priority_S: list[float], budget: Budget, q: int, pinned: Collection[int] = ()) -> set[int]:
    """The set definition, word for word: sinks, the window {t : q-w < t <= q}, the top-k of E(q) = {t : s <= t <= q-w}.

    Pinned tokens of E(q) come before all others. Of one head: raises ValueError for a budget by heads.
    """
    if budget.heads:
        raise ValueError(f"the held set is that of one head, but the budget is one by heads: {budget.heads}")
    sinks = {t for t in range(budget.sinks) if t <= q}
    window = {t for t in range(q - budget.window + 1, q + 1) if t >= 0}

    def key(t: int) -> tuple[bool, float, int]:
        p = priority_S[t]
        return (t in pinned, float("-inf") if p != p else p, t)

    eligible = sorted(range(budget.sinks, q - budget.window + 1), key=key, reverse=True)
    return sinks | window | set(eligible[: budget.long])

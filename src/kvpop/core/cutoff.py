"""The running top-k and the expiry it implies (Appendix C).

Tokens arrive one after the other, each with a priority that never changes; the k best of those that have arrived are kept.
The k-th best can only improve, so a token that is dropped never returns, and one integer per token says all there is to say:
the arrival that drops it. ``expiry`` puts that integer in terms of query positions for a whole sequence.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from functools import cache
from types import ModuleType
from typing import Literal, get_args

import torch
from torch import Tensor

from kvpop.budget import Budget
from kvpop.ops import HAS_TRITON, device_of, interpreted

# Shapes: X any leading dimensions (rows, heads), A arrivals, S sequence.

Impl = Literal["parallel", "triton", "heap", "brute"]

NEVER = torch.iinfo(torch.int32).max


def kernel_or_parallel(like: Tensor) -> Literal["triton", "parallel"]:
    """The implementation for ranks or priorities like these: Triton on a GPU, the wavelet matrix elsewhere."""
    return "triton" if like.device.type == "cuda" and HAS_TRITON else "parallel"


def _kernels(like: Tensor) -> ModuleType:
    """Raises ValueError where they do not run."""
    if not HAS_TRITON:
        raise ValueError("impl='triton' needs Triton, which is not installed: use impl='parallel'")
    if like.device.type != "cuda" and not interpreted():
        raise ValueError(f"impl='triton' needs a GPU, got a tensor on {like.device.type}: use impl='parallel'")
    from kvpop.ops.cutoff import triton

    return triton


def _order(priority_XA: Tensor, pinned_XA: Tensor | None) -> Tensor:
    """Arrivals from the worst to the best."""
    priority_XA = (
        torch.nan_to_num(priority_XA, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0
    )  # -0.0 to 0.0
    order_XA = priority_XA.argsort(dim=-1, stable=True)
    if pinned_XA is not None:
        order_XA = order_XA.gather(-1, pinned_XA.gather(-1, order_XA).int().argsort(dim=-1, stable=True))
    return order_XA


def ranks(priority_XA: Tensor, pinned_XA: Tensor | None = None) -> Tensor:
    """0 (worst) to A - 1 (best) by (pinned, priority, arrival): of equals the newer is better. NaN counts as -inf."""
    order_XA = _order(priority_XA, pinned_XA)
    index_XA = torch.arange(priority_XA.shape[-1], device=priority_XA.device).expand_as(order_XA)
    return torch.empty_like(order_XA).scatter_(-1, order_XA, index_XA)


PerHead = int | Sequence[int]
"""k of all rows, or one for every index of the second last dimension (KV heads)."""


def running_cutoff(rank_XA: Tensor, k: PerHead, impl: Impl = "parallel") -> Tensor:
    """The rank of the k-th best of arrivals 0..j, for every j; -1 while fewer than k have arrived (nothing is cut).

    With k = 0 nothing is ever kept: the cutoff is A, above every rank. ``rank_XA`` is a permutation along its last
    dimension; ``k`` is one number, or one for each KV head, the second last dimension. ``impl``: "parallel" is a wavelet
    matrix, ceil(log2 A) rounds of cumsum and gather for all rows at once; "triton" is two kernels for GPUs; "heap" is one heap
    per row on the CPU, O(A log k) (0.3 us a token); "brute" sorts every prefix, for tests. Raises ValueError for a negative k,
    for several that are not one a head, and for "triton" without Triton or off a GPU (Triton's interpreter aside).
    """
    if impl not in get_args(Impl):
        raise ValueError(f"unknown impl {impl!r}: choose one of {', '.join(get_args(Impl))}")
    if impl in ("parallel", "triton"):
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
    """``running_cutoff`` for several k at once: the work on the ranks is shared. ``impl``: "parallel" or "triton"."""
    A = rank_XA.shape[-1]
    asked = [_checked(k, rank_XA) for k in ks]
    if impl == "triton":
        kernels = _kernels(rank_XA)
        if not rank_XA.numel():
            return [rank_XA.clone() for _ in asked]
        unlike = list(dict.fromkeys(asked))
        with device_of(rank_XA):
            cutoffs = kernels.running_cutoffs(rank_XA.reshape(-1, A), [_on_device(k, rank_XA) for k in unlike])
        by_k = dict(zip(unlike, cutoffs))
        return [by_k[k].view(rank_XA.shape) for k in asked]
    proper = list(dict.fromkeys(k for k in asked if (A > 0 if isinstance(k, tuple) else 0 < k < A)))
    found: dict[int | tuple[int, ...], Tensor] = {}
    if proper:
        rank_NA = rank_XA.reshape(-1, A)
        k_KN1 = _of_rows(proper, rank_XA)
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


def _on_device(k: int | tuple[int, ...], like: Tensor) -> int | Tensor:
    return k if isinstance(k, int) else _numbers(k, like.device)


@cache
def _numbers(k: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied to the device once: what is captured cannot copy, and reads them where they are."""
    with torch.inference_mode(False):
        return torch.tensor(k, dtype=torch.int32, device=device)


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


def dropped(priority_XA: Tensor, k: PerHead, impl: Impl = "parallel", pinned_XA: Tensor | None = None) -> Tensor:
    """``departures`` of the ``ranks`` of priorities under ``running_cutoff``."""
    if impl == "triton":
        return _by_kernel(priority_XA, k, pinned_XA, never=priority_XA.shape[-1], dtype=torch.int64)
    rank_XA = ranks(priority_XA, pinned_XA)
    return departures(rank_XA, running_cutoff(rank_XA, k, impl))


def _by_kernel(
    priority_XS: Tensor, k: PerHead, pinned_XS: Tensor | None, sinks: int = 0, window: int = 0, *, never: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """When each token leaves: ``window`` after the arrival that drops it; ``never`` for sinks, and at or past S."""
    kernels, k = _kernels(priority_XS), _checked(k, priority_XS)
    S = priority_XS.shape[-1]
    A = max(S - sinks, 0)
    if not (priority_XS.numel() and A):
        return torch.full(priority_XS.shape, never, dtype=dtype, device=priority_XS.device)
    priority_NS = priority_XS.reshape(-1, S).contiguous()
    pinned_NS = None if pinned_XS is None else pinned_XS.expand_as(priority_XS).reshape(-1, S).contiguous()
    with device_of(priority_XS):
        if kernels.sorts(priority_NS):
            item_NA = kernels.best_first(priority_NS, pinned_NS, sinks)
        else:
            pinned_NA = None if pinned_NS is None else pinned_NS[:, sinks:]
            item_NA = A - 1 - _order(priority_NS[:, sinks:], pinned_NA).flip(-1)
        leaves_NS = kernels.departures(item_NA, _on_device(k, priority_XS), A, sinks, window, never, dtype)
    return leaves_NS.view(priority_XS.shape)


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
    if impl == "triton":
        k = budget.heads or budget.long
        return _by_kernel(priority_XS, k, pinned_XS, budget.sinks, budget.window, never=NEVER, dtype=torch.int32)
    S = priority_XS.shape[-1]
    expiry_XS = torch.full(priority_XS.shape, NEVER, dtype=torch.int32, device=priority_XS.device)
    ranked_XA = priority_XS[..., budget.sinks :]
    if ranked_XA.numel():
        pinned_XA = None if pinned_XS is None else pinned_XS[..., budget.sinks :]
        leaves_XA = dropped(ranked_XA, budget.heads or budget.long, impl, pinned_XA)
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

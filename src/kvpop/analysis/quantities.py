"""Counts on recorded expiries: numpy in, numpy out, no model.

Everywhere keep(h, q, t) <=> t <= q < expiry[h, t], and an expiry of S means: still held when the text ended. At a query q
the tokens of a head are its sinks (t < sinks), its window (q - window < t <= q), and its long-range tokens: all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Shapes: L layers, H KV heads, S tokens, N observed tokens of any heads, A ages.

Array = NDArray[Any]


def held(expiry_LHS: Array, q: int) -> Array:
    """Which tokens the heads hold at query q: bool [L, H, S]. Raises ValueError for a q outside the text."""
    S = expiry_LHS.shape[-1]
    if not 0 <= q < S:
        raise ValueError(f"q must be in [0, {S - 1}], got {q}")
    return (np.arange(S) <= q) & (expiry_LHS > q)


def retention_map(expiry_LHS: Array, q: int | None = None) -> Array:
    """How many KV heads of each layer hold each token at query q (None: at the last): int64 [L, S]."""
    return held(expiry_LHS, expiry_LHS.shape[-1] - 1 if q is None else q).sum(1)


def at_age(expiry_LHS: Array, window: int, age: int) -> Array:
    """Which tokens are held ``age`` tokens after they left the window, at q = t + window + age: bool [L, H, M].

    M = S - window - age tokens, from the first on: later ones are never that old. Unlike a look at one query, this
    asks the same of early and late tokens. Raises ValueError for an age below 0 or at which no token is observed.
    """
    S = expiry_LHS.shape[-1]
    M = S - window - age
    if age < 0 or M < 1:
        raise ValueError(f"age must be in [0, {S - window - 1}] for {S} tokens and a window of {window}, got {age}")
    return expiry_LHS[..., :M] > np.arange(M) + window + age


def priority(score_LHS: Array, log_gamma_LH: Array, step: int = 1) -> Array:
    """Static priorities r - floor(t / step) log gamma of raw scores, in nats (Eq. 20)."""
    return score_LHS - (np.arange(score_LHS.shape[-1]) // step) * log_gamma_LH[..., None]


def half_life(log_gamma_LH: Array, step: int = 1) -> Array:
    """Tokens after which the decay has cost log 2 nats; inf for no decay. Raises ValueError for a log gamma above 0."""
    x = np.asarray(log_gamma_LH, dtype=float)
    if (x > 0).any():
        raise ValueError(f"log gamma must be at most 0, got {float(np.nanmax(x)):g}")
    with np.errstate(divide="ignore"):
        return step * math.log(2) / np.abs(x)


def recall(expiry_LHS: Array, mass_LHS: Array, long_LH: Array, sinks: int, window: int, q: int) -> Array:
    """Share of the k eligible tokens with the largest mass that each head holds at q: float64 [L, H], NaN where k is 0.

    Eligible are sinks <= t <= q - window; k = ``long_LH``, at most all of them. Raises ValueError if none is eligible.
    """
    if q - window < sinks:
        raise ValueError(f"at q = {q} no token has left a window of {window} behind {sinks} sinks")
    mass_LHA = mass_LHS[..., sinks : q - window + 1]
    rank_LHA = np.argsort(np.argsort(-mass_LHA, axis=-1, kind="stable"), axis=-1)
    best_LHA = rank_LHA < long_LH[..., None]
    hits_LH = (best_LHA & held(expiry_LHS, q)[..., sinks : q - window + 1]).sum(-1)
    wanted_LH = best_LHA.sum(-1)
    found = np.full(wanted_LH.shape, np.nan)
    known = (wanted_LH > 0) & ~np.isnan(mass_LHA).any(-1)
    found[known] = hits_LH[known] / wanted_LH[known]
    return found


def mean_held(expiry_LHS: Array, start: int, sinks: int = 0, window: int = 0) -> Array:
    """Mean number of tokens that a head holds at queries from ``start`` on: float64 [L, H].

    With ``sinks`` and ``window`` only long-range tokens count. Raises ValueError for a start outside the text.
    """
    S = expiry_LHS.shape[-1]
    if not 0 <= start < S:
        raise ValueError(f"start must be in [0, {S - 1}], got {start}")
    first_S = np.maximum(np.arange(S) + window, start)
    lives_LHS = np.clip(np.minimum(expiry_LHS, S) - first_S, 0, None)
    return lives_LHS[..., sinks:].sum(-1) / (S - start)


def concentration(use_LH: Array) -> Array:
    """Cumulative share of the capacity in use that the busiest heads have: float64 [L * H], growing to 1; zeros if none is."""
    use = np.sort(np.asarray(use_LH, dtype=float), axis=None)[::-1]
    return use.cumsum() / total if (total := use.sum()) > 0 else np.zeros_like(use)


def lifetimes(expiry_LHS: Array, sinks: int, window: int, start: int = 0) -> tuple[Array, Array]:
    """How long tokens stay after they leave the window: (life, dropped), [L, H, M] each, int64 queries and bool.

    Of the tokens t >= sinks that leave at q = t + window >= ``start`` (behind a full budget, else what has no rival counts) and
    before the text ends. Life 0: dropped as it left, or before (a policy without a window). Where ``dropped`` is False, the
    text ended first, and the life is a lower bound. Raises ValueError if there is no such token.
    """
    S = expiry_LHS.shape[-1]
    first = max(sinks, start - window, 0)
    if first + window >= S:
        raise ValueError(f"no token leaves a window of {window} at a query in [{start}, {S - 1}]")
    t_M = np.arange(first, S - window)
    end_LHM = np.minimum(expiry_LHS[..., t_M], S)
    return np.clip(end_LHM - t_M - window, 0, None), end_LHM < S


def survival(life: Array, dropped: Array, ages: Array) -> Array:
    """Share of tokens still held at each of ``ages`` after they left the window (Kaplan and Meier): float64 [A].

    At age d the rate of dropping is deaths / tokens that were held until then and are observed at d; the curve is the product
    of what stays. NaN from the first age on that no token is observed at, unless all are gone.
    """
    life, dropped = np.ravel(life), np.ravel(dropped).astype(bool)
    last = int(life.max(initial=0)) + 1
    deaths = np.bincount(life[dropped], minlength=last + 1)
    ends = np.bincount(life[~dropped], minlength=last + 1)
    left_before = np.concatenate([[0], (deaths + ends).cumsum()[:-1]])
    risk = len(life) - left_before - ends  # a token that the text's end hides at age d is not observed at d
    with np.errstate(invalid="ignore", divide="ignore"):
        curve = np.cumprod(np.where(risk > 0, 1 - deaths / risk, np.nan))
    gone = np.flatnonzero(curve == 0)
    if len(gone):
        curve[gone[0] :] = 0.0
    past = 0.0 if len(gone) else np.nan
    ages = np.asarray(ages)
    return np.where(ages <= last, curve[np.minimum(ages, last)], past)


def turnover(expiry_LHS: Array, sinks: int, window: int) -> Array:
    """How many long-range tokens each head drops at each query: int64 [L, H, S].

    What leaves the window and is not taken in does not count. A full head that ranks has 1 or 0: each drop is a slot that
    changes its token. What would go right after the end is not seen.
    """
    L, H, S = expiry_LHS.shape
    t_S = np.arange(S)
    counts = (t_S >= sinks) & (expiry_LHS - window > t_S) & (expiry_LHS < S)
    row = np.arange(L * H).reshape(L, H, 1) * S
    return np.bincount((row + expiry_LHS)[counts], minlength=L * H * S).reshape(L, H, S)


def kept_by_kind(
    expiries: Sequence[Array], kinds: Sequence[Sequence[str]], first: int, window: int, age: int, draws: int = 1000
) -> list[dict[str, Any]]:
    """Which kinds of tokens are still held ``age`` tokens after they left the window; a row per kind, texts pooled.

    count: tokens. base: their share of all tokens. kept: share of their places (heads x tokens) that are held. lift: kept over
    that of all tokens, None where nothing is held. low, high: 95 % interval of the lift, of a bootstrap over texts; None for
    one text. Tokens from position ``first`` on that reach the age in their text; texts too short for that are an error
    (``at_age``), and so is it if no token is left.
    """
    names = sorted({kind for text in kinds for kind in text})
    T, K = len(expiries), len(names)
    tokens_TK, kept_TK = np.zeros((T, K)), np.zeros((T, K))
    for i, (expiry_LHS, text) in enumerate(zip(expiries, kinds, strict=True)):
        share_M = at_age(expiry_LHS, window, age).mean((0, 1))[first:]
        index_M = np.searchsorted(names, list(text[first : first + len(share_M)]))
        tokens_TK[i] = np.bincount(index_M, minlength=K)
        kept_TK[i] = np.bincount(index_M, weights=share_M, minlength=K)
    if not tokens_TK.any():
        raise ValueError(f"no token from position {first} on is seen {age} tokens after it left a window of {window}")
    lift_K = _lift(tokens_TK.sum(0), kept_TK.sum(0))
    low_K, high_K = np.full(K, np.nan), np.full(K, np.nan)
    if T > 1:
        picks = np.random.default_rng(0).integers(T, size=(draws, T))
        drawn = _lift(tokens_TK[picks].sum(1), kept_TK[picks].sum(1))
        for k in range(K):
            if np.isfinite(drawn[:, k]).any():
                low_K[k], high_K[k] = np.nanquantile(drawn[:, k], (0.025, 0.975))
    count_K, held_K = tokens_TK.sum(0), kept_TK.sum(0)
    return [
        {
            "kind": name, "count": int(count_K[k]), "base": float(count_K[k] / count_K.sum()),
            "kept": float(held_K[k] / count_K[k]),
            **{key: _or_none(x[k]) for key, x in (("lift", lift_K), ("low", low_K), ("high", high_K))},
        }
        for k, name in enumerate(names) if count_K[k]
    ]  # fmt: skip


def _lift(tokens_XK: Array, kept_XK: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        overall = kept_XK.sum(-1, keepdims=True) / tokens_XK.sum(-1, keepdims=True)
        lift = kept_XK / tokens_XK / overall
    return np.where(np.isfinite(lift), lift, np.nan)


def _or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


MEASURES = ("accuracy", "recall", "kl", "score_loss")
"""Of a training log, that two ways of scoring are compared by."""


def timing(
    delayed: Sequence[Mapping[str, Any]], immediate: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, list[float]]]:
    """Two training logs side by side: per measure of both, {"step", "delayed", "immediate", "difference"} at the steps that
    both recorded, the difference delayed - immediate. Raises ValueError if they share no step or no measure."""
    by_step = [{record["step"]: record for record in log} for log in (delayed, immediate)]
    steps = sorted(by_step[0].keys() & by_step[1].keys())
    found: dict[str, dict[str, list[float]]] = {}
    for name in MEASURES:
        rows = [(step, *(of[step].get(name) for of in by_step)) for step in steps]
        rows = [row for row in rows if all(x is not None and math.isfinite(x) for x in row[1:])]
        if rows:
            step, a, b = (list(column) for column in zip(*rows))
            found[name] = {"step": step, "delayed": a, "immediate": b, "difference": [x - y for x, y in zip(a, b)]}
    if not found:
        raise ValueError(f"the two logs have {len(steps)} steps in common, but none of {', '.join(MEASURES)} in both")
    return found

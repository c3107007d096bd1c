"""All figures of an analysis, from its counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvpop.analysis import quantities
from kvpop.analysis.data import Analysis, Array
from kvpop.analysis.kinds import KINDS, kinds_of

STRETCH = 112
"""Tokens of a stretch, as in the paper's Figure 6."""


def default_first(analysis: Analysis, text: int = 0, stretch: int = STRETCH) -> int:
    """Where the stretch of tokens begins about which heads are divided the most when the text ends: the highest mean of
    s (1 - s) over its tokens and all policies, s being the share of all KV heads that hold a token; of equals the last. All of
    them have left the window of every policy."""
    behind = len(analysis.texts[text]) - max(subject.window for subject in analysis.subjects)
    if behind <= stretch:
        return 0
    shares = [
        quantities.held(traces[text].expiry_LHS, len(analysis.texts[text]) - 1).mean((0, 1))
        for traces in analysis.traces
    ]
    divided = np.mean([share * (1 - share) for share in shares], axis=0)[:behind]
    sums = np.convolve(divided, np.ones(stretch), "valid").round(9)
    return int(len(sums) - 1 - sums[::-1].argmax())


def full_from(analysis: Analysis) -> int:
    """The first query at which every budget is full: before it nothing has to go."""
    sizes = [max(s.slots or 0, s.sinks + s.window) for s in analysis.subjects]
    return max([analysis.sinks + analysis.window + analysis.long, *sizes])


def kinds_age(analysis: Analysis) -> int:
    """The age at which a plain window of the same memory has dropped everything (``long``), or half of what the shortest text
    can show of tokens that had rivals, whichever is less; in tokens after leaving the window."""
    return min(analysis.long, (min(map(len, analysis.texts)) - full_from(analysis)) // 2)


def kind_rows(analysis: Analysis, age: int) -> dict[str, list[dict[str, Any]]]:
    """``kept_by_kind`` of every policy over the tokens of all texts that left the window behind full budgets."""
    kinds = [kinds_of(text.strings) for text in analysis.texts]
    start = full_from(analysis)
    return {
        s.name: quantities.kept_by_kind(
            [trace.expiry_LHS for trace in traces], kinds, max(s.sinks, start - s.window), s.window, age
        )
        for s, traces in zip(analysis.subjects, analysis.traces)
    }


def draw(
    analysis: Analysis,
    directory: Path,
    first: int | None = None,
    tokens: int = STRETCH,
    logs: Sequence[Sequence[Mapping[str, Any]]] = (),
    suffix: str = "png",
) -> list[Path]:
    """Write every figure that the data have something for, and return their paths.

    Maps are of the first text when it ends, the stretch of ``tokens`` tokens from ``first`` on (None: ``default_first``). All
    else is over all texts, from the query on at which all budgets are full. ``logs``: the records of two training runs, delayed
    and immediate. Raises ImportError without matplotlib, ValueError for a stretch outside the text.
    """
    try:
        from kvpop.plots import analysis as plots
    except ImportError as error:
        raise ImportError("figures need the package matplotlib: pip install 'kvpop[demo]'") from error
    text, layers, heads = analysis.texts[0], analysis.layers, analysis.heads
    S, tokens = len(text), min(tokens, len(text))
    if tokens < 1 or not (first is None or 0 <= first <= S - tokens):
        raise ValueError(f"a stretch of {tokens} tokens must begin in [0, {S - tokens}], got {first}")
    first = default_first(analysis, stretch=tokens) if first is None else first
    start, age = full_from(analysis), kinds_age(analysis)
    window = max(subject.window for subject in analysis.subjects)
    subjects = dict(zip((subject.name for subject in analysis.subjects), zip(analysis.subjects, analysis.traces)))
    maps = {name: quantities.retention_map(traces[0].expiry_LHS) for name, (_, traces) in subjects.items()}
    ages = np.arange(0, min(map(len, analysis.texts)) - window)

    def over_texts(count: Callable[[Array, Any], Array]) -> dict[str, Array]:
        return {
            name: np.mean([count(trace.expiry_LHS, subject) for trace in traces], axis=0)
            for name, (subject, traces) in subjects.items()
        }

    def survival(subject: Any, traces: Sequence[Any]) -> list[float]:
        found = [quantities.lifetimes(t.expiry_LHS, subject.sinks, subject.window, start) for t in traces]
        life, dropped = (np.concatenate([np.ravel(x) for x in parts]) for parts in zip(*found))
        return quantities.survival(life, dropped, ages).tolist()

    shortest = min(map(len, analysis.texts))
    recalls = {name: _mean([trace.recall_LH for trace in traces]) for name, (_, traces) in subjects.items()}
    teacher = teacher_recall(analysis)
    uses = over_texts(lambda expiry, s: quantities.mean_held(expiry, start, s.sinks, s.window))
    shares = {name: quantities.concentration(x) for name, x in uses.items()}
    rates = over_texts(lambda expiry, s: quantities.turnover(expiry, s.sinks, s.window).mean(1)[:, :shortest])
    halves = {
        name: np.full(s.long_LH.shape, np.nan)
        if s.log_gamma_LH is None
        else quantities.half_life(s.log_gamma_LH, s.decay_step)
        for name, (s, _) in subjects.items()
    }
    rows = kind_rows(analysis, age)
    stretch = slice(first, first + tokens)
    jobs: dict[str, Callable[[Path], None]] = {
        "retention": lambda path: plots.retention_figure(
            {name: found[:, stretch] for name, found in maps.items()}, text.strings[stretch], layers, heads, path, first
        ),
        "overview": lambda path: plots.overview_figure(maps, layers, heads, path),
        "lifetimes": lambda path: plots.lifetimes_figure(
            {name: survival(*pair) for name, pair in subjects.items()}, ages.tolist(), path, analysis.long
        ),
        "turnover": lambda path: plots.turnover_figure(rates, layers, path, start),
    }
    if any(row["lift"] is not None for found in rows.values() for row in found):
        jobs["kinds"] = lambda path: plots.kinds_figure(rows, path, age, list(KINDS))
    if any(np.isfinite(x).any() for x in recalls.values()):
        jobs["recall"] = lambda path: plots.recall_figure(recalls, layers, path)
    jobs["recall-dense"] = lambda path: plots.recall_figure(teacher, layers, path, "the dense model")
    if any(np.nansum(x) > 0 for x in uses.values()):
        jobs["use"] = lambda path: plots.use_figure(uses, shares, layers, path)
    if any(np.isfinite(x).any() for x in halves.values()):
        jobs["decay"] = lambda path: plots.decay_figure(halves, layers, path)
    if logs:
        delayed, immediate = logs
        found = quantities.timing(delayed, immediate)
        jobs["timing"] = lambda path: plots.timing_figure(found, path)
    paths = []
    for name, job in jobs.items():
        paths.append(Path(directory) / f"{name}.{suffix}")
        job(paths[-1])
    return paths


def teacher_recall(analysis: Analysis) -> dict[str, Array]:
    """Share of the tokens with the most attention of the dense model that each head holds, [L, H] a policy, mean over texts.

    The same question for all policies, TOVA too; ``Trace.recall_LH`` goes by the attention of the policy's own pass.
    """
    found = {}
    for subject, traces in zip(analysis.subjects, analysis.traces):
        long_LH = np.where(subject.long_LH < 0, analysis.long, subject.long_LH)
        of_texts = [
            quantities.recall(
                trace.expiry_LHS, mass_LHS, long_LH, subject.sinks, subject.window,
                mass_LHS.shape[-1] - 1 - analysis.min_future,
            )
            for trace, mass_LHS in zip(traces, analysis.mass)
        ]  # fmt: skip
        found[subject.name] = _mean(of_texts)
    return found


def _mean(arrays: Sequence[Array]) -> Array:
    """Over texts, past NaN; NaN where all are."""
    stack = np.stack(arrays)
    count = np.isfinite(stack).sum(0)
    return np.where(count > 0, np.nansum(stack, axis=0) / np.maximum(count, 1), np.nan)

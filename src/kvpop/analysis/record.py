"""One pass of every policy over every text, and what it kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import kvpop
from kvpop.analysis.data import Analysis, Array, Subject, Text, Trace
from kvpop.analysis.quantities import recall
from kvpop.attachment import attach
from kvpop.budget import Budget
from kvpop.core.target import Target, future_target
from kvpop.measure import Entry, detached_after, hidden_states, impl_for, measured
from kvpop.policies import DMS, Dense, LayerView
from kvpop.policies.dms import DMSLayer
from kvpop.policies.tova import TovaLayer

# Shapes: L observed layers, H KV heads, S tokens.


class Layer:
    """What is kept of one layer's pass: arrays, not the queries and keys that the view holds on to."""

    def __init__(self, view: LayerView, window: int) -> None:
        policy: Any = view.policy
        self.layer, self.kv_heads = view.layer, policy.shape.kv_heads
        self.expiry_HS = _array(view.expiry[0], np.int32)
        self.mass_HS = log_mass(view, window)
        self.score_HS = None if view.score_NHL is None else _array(view.score_NHL[0], np.float32)
        self.budget: Budget | None = getattr(policy, "budget", None)
        self.size = policy.size if isinstance(policy, TovaLayer) else None
        self.recent: tuple[int, int] | None = None  # sinks and window
        rule = policy.recipe if isinstance(policy, DMSLayer) else self.budget
        if rule is not None:
            self.recent = (rule.sinks, rule.window)
        self.log_gamma_H, self.step = None, int(getattr(policy, "decay_step", 1))
        decay: Any = getattr(policy, "decay", None)
        if decay is not None:
            value = decay() if callable(decay) else torch.full((self.kv_heads,), float(decay))
            self.log_gamma_H = _array(value, np.float32)


def log_mass(view: LayerView, window: int) -> Array:
    """Log of the future attention of each token under the view's own pass, as the oracle counts it: float32 [H, S]."""
    mass_BHS = future_target(
        view.q,
        view.k,
        view.lse,
        view.documents,
        scale=view.scale,
        window=window,
        target=Target(),
        impl=impl_for(view.k),
    )
    return _array(mass_BHS[0], np.float32)


def analyse(
    model: PreTrainedModel,
    entries: Sequence[Entry],
    texts: Sequence[Tensor],
    tokenizer: Any,
    budget: Budget,
    *,
    names: Sequence[str] = (),
    model_name: str = "",
    min_future: int = 128,
    tick: Callable[[str], None] = lambda what: None,
) -> Analysis:
    """Run every entry and the dense model over every text (token ids [S]) and keep what is said about tokens.

    ``budget`` says which tokens count as older (behind its sinks and window) and how many of them a policy without long-range
    slots of its own is asked for; where a policy has a budget, that counts. Dense entries are not policies to analyse and are
    left out; the dense model is run in any case. ``names`` of the texts: their numbers by default. ``tick`` is called after
    every pass. Detaches at the end.

    Raises ValueError without a policy or a text, for a text that has no query behind all budgets with ``min_future`` to come,
    and for layers of one policy whose sinks, windows or decay steps differ.
    """
    entries = [entry for entry in entries if not isinstance(entry.policy, Dense)]
    if not entries or not texts:
        raise ValueError(f"an analysis needs policies and texts, got {len(entries)} and {len(texts)}")
    gated = [entry.policy for entry in entries if isinstance(entry.policy, DMS)]
    most = max([budget.slots, *(entry.budget or 0 for entry in entries), *(dms.sinks + dms.window for dms in gated)])
    for text in texts:
        if len(text) - 1 - min_future < most:
            raise ValueError(
                f"a text of {len(text)} tokens is too short: {most} slots and {min_future} queries behind them need "
                f"{most + min_future + 1}"
            )
    mass: list[Array] = []
    subjects: list[Subject] = []
    traces: list[list[Trace]] = []
    layers: list[Layer] = []
    with detached_after(model):
        attach(model, Dense())
        for text in texts:
            seen: dict[int, Array] = {}

            def look(view: LayerView, seen: dict[int, Array] = seen) -> None:
                seen[view.layer] = log_mass(view, budget.window)

            hidden_states(model, text[None], look)
            mass.append(np.stack([seen[layer] for layer in sorted(seen)]))
            tick("dense")
        for name, entry in zip(_names(entries), entries):
            traces.append([])
            with measured(model, entry):
                for text in texts:
                    layers = []

                    def keep(view: LayerView, layers: list[Layer] = layers) -> None:
                        layers.append(Layer(view, budget.window))

                    hidden_states(model, text[None], keep)
                    layers.sort(key=lambda layer: layer.layer)
                    if len(subjects) < len(traces):
                        subjects.append(_subject(name, entry, layers, budget))
                    traces[-1].append(_trace(layers, subjects[-1], budget, min_future))
                    tick(entry.label)
    return Analysis(
        model=model_name or str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
        layers=tuple(layer.layer for layer in layers),
        heads=mass[0].shape[1],
        sinks=budget.sinks,
        window=budget.window,
        long=budget.long,
        min_future=min_future,
        texts=[
            Text(name, _array(text, np.int32), token_strings(tokenizer, text.tolist()))
            for name, text in zip(names or [str(i) for i in range(len(texts))], texts, strict=True)
        ],
        subjects=subjects,
        traces=traces,
        mass=mass,
        versions={"kvpop": kvpop.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    )


def _array(x: Tensor, dtype: Any) -> Array:
    return x.detach().cpu().numpy().astype(dtype)


def _names(entries: Sequence[Entry]) -> list[str]:
    """Labels, with the budget where one policy comes at several."""
    labels = [entry.label for entry in entries]
    return [
        f"{entry.label} {entry.budget}" if labels.count(entry.label) > 1 and entry.budget else entry.label
        for entry in entries
    ]


def _subject(name: str, entry: Entry, layers: Sequence[Layer], budget: Budget) -> Subject:
    own = sorted({layer.recent for layer in layers if layer.recent is not None})
    steps = sorted({layer.step for layer in layers if layer.log_gamma_H is not None})
    if len(own) > 1 or len(steps) > 1:
        raise ValueError(
            f"the layers of {name} differ in their sinks and windows {own} or decay steps {steps}: analyse them one by one"
        )
    sinks, window = own[0] if own else (budget.sinks, budget.window)
    long_LH = np.full((len(layers), layers[0].kv_heads), -1, np.int32)
    log_gamma_LH = np.full(long_LH.shape, np.nan, np.float32)
    for row, layer in enumerate(layers):
        if layer.budget is not None:
            long_LH[row] = layer.budget.longs(layer.kv_heads)
        elif layer.size is not None:
            long_LH[row] = max(0, layer.size - sinks - window)
        if layer.log_gamma_H is not None:
            log_gamma_LH[row] = layer.log_gamma_H
    return Subject(
        name=name,
        policy=entry.policy.name,
        slots=entry.budget,
        sinks=sinks,
        window=window,
        long_LH=long_LH,
        log_gamma_LH=log_gamma_LH if steps else None,
        decay_step=max(steps, default=1),
    )


def _trace(layers: Sequence[Layer], subject: Subject, budget: Budget, min_future: int) -> Trace:
    expiry_LHS = np.stack([layer.expiry_HS for layer in layers])
    mass_LHS = np.stack([layer.mass_HS for layer in layers])
    q = expiry_LHS.shape[-1] - 1 - min_future
    recall_LH = recall(expiry_LHS, mass_LHS, asked(subject, budget.long), subject.sinks, subject.window, q)
    score_LHS = None
    if any(layer.score_HS is not None for layer in layers):
        empty = np.full(expiry_LHS.shape[1:], np.nan, np.float32)
        score_LHS = np.stack([empty if layer.score_HS is None else layer.score_HS for layer in layers])
    return Trace(expiry_LHS, recall_LH.astype(np.float32), score_LHS)


def asked(subject: Subject, long: int) -> Array:
    """How many tokens each head is asked for [L, H]: as many as it has long-range slots, else ``long``."""
    return np.where(subject.long_LH < 0, long, subject.long_LH)


CONTEXT = 4
"""Tokens in front of a piece that is decoded: some tokenizers drop the space at the beginning of what they decode."""
LONGEST = 8
"""Tokens of which one character may consist before it counts as broken."""


def token_strings(tokenizer: Any, ids: Sequence[int]) -> tuple[str, ...]:
    """What each token adds to the decoded text; see ``Text``."""

    def decode(low: int, high: int) -> str:
        return tokenizer.decode(ids[low:high], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    strings: list[str] = []
    start = 0  # of the tokens that are not yet a whole character
    for i in range(len(ids)):
        low = max(0, start - CONTEXT)
        known, now = decode(low, start), decode(low, i + 1)
        if now.endswith("\ufffd") and i + 1 - start < LONGEST and i + 1 < len(ids):
            strings.append("")
            continue
        strings.append(now[len(known) :])
        start = i + 1
    return tuple(strings)

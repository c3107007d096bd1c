"""The memory that gates take, as it was asked for: the threshold under which DMS holds so many tokens on average.

    held(threshold) = share of all (token, KV head) pairs of some texts, of T tokens each, that are held behind token T:
    sinks, the window, and every other token with logit <= threshold

Training only draws gates towards a ratio: a short run ends before it, a long one may close more than asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpop.architecture import attached_policies
from kvpop.measure import hidden_states
from kvpop.policies import LayerView
from kvpop.policies.dms import DMSLayer

# Shapes: B rows (1), H KV heads, S tokens of a text, N tokens with a gate in all heads, layers and texts.

ROUNDS, NEAR, FAR = 8, 0.001, 0.1
"""Looks at the texts, at most (what a layer drops changes what the gates of the next say); how far off the share may be where
they end; and by how much of what was asked for it may be missed."""


@dataclass(frozen=True)
class Match:
    """``threshold``, and the share of the texts' tokens that is held under it, and was under the one before."""

    threshold: float
    held: float
    before: float


@torch.no_grad()
def matched(
    model: PreTrainedModel, texts: Sequence[Tensor], ratio: float, tick: Callable[[], None] = lambda: None
) -> Match:
    """The threshold at which the DMS gates attached to ``model`` hold 1 / ``ratio`` of the tokens of ``texts`` (ids [S]).

    Of up to ``ROUNDS`` thresholds, each the one that would have been right for what the gates said under the one before, it is
    the first that is within ``NEAR``, else the nearest. ``tick`` is called after each text of each. The model's own threshold
    stays; layers without gates do not count.

    Raises ValueError without texts, for a ratio that is not finite and at least 1, if no DMS is attached or two of different
    settings are, if sinks and window alone are more than that, for gates that are NaN, and where no threshold comes within
    a tenth of what was asked for (gates that say the same about many tokens).
    """
    layers = [policy for policy in attached_policies(model) if isinstance(policy, DMSLayer)]
    if not layers:
        raise ValueError("there are no gates to match: the policy of the model is not DMS")
    if not texts or not 1 <= ratio < math.inf:
        raise ValueError(
            f"a match needs at least 1 text and a finite ratio of at least 1, got {len(texts)} texts and a ratio of {ratio}"
        )
    recipe = layers[0].recipe
    if any(layer.recipe != recipe for layer in layers):
        raise ValueError("the DMS of this model's layers differ in their settings: there is no one threshold to match")
    heads = sum(layer.shape.kv_heads for layer in layers)
    tokens = heads * sum(map(len, texts))
    always = heads * sum(min(len(text), recipe.sinks + recipe.window) for text in texts)
    wanted = round(tokens / ratio) - always
    if wanted < 0:
        raise ValueError(
            f"a ratio of {ratio:g} leaves {1 / ratio:.1%} of the tokens, but {recipe.sinks} sinks and a window of "
            f"{recipe.window} are {always / tokens:.1%} of texts of {min(map(len, texts))} to {max(map(len, texts))} tokens"
        )
    tried: list[tuple[float, float]] = []  # threshold, share held under it
    threshold = recipe.threshold
    try:
        while True:
            for layer in layers:
                layer.recipe = replace(recipe, threshold=threshold)
            logit_N = gate_logits(model, texts, tick).sort().values
            if logit_N.isnan().any():
                raise ValueError(f"what the gates say is NaN for {int(logit_N.isnan().sum())} of {len(logit_N)} tokens")
            tried.append((threshold, (always + int((logit_N <= threshold).sum())) / tokens))
            if abs(tried[-1][1] - 1 / ratio) <= NEAR or len(tried) == ROUNDS or not len(logit_N):
                break
            around_N = torch.cat([logit_N[:1] - 2, logit_N, logit_N[-1:] + 2])
            threshold = float((around_N[wanted] + around_N[wanted + 1]) / 2)
    finally:
        for layer in layers:
            layer.recipe = recipe
    best, held = min(tried, key=lambda one: abs(one[1] - 1 / ratio))
    if abs(held * ratio - 1) > FAR:
        raise ValueError(
            f"no threshold makes the gates hold {1 / ratio:.1%} of the tokens: the nearest of {len(tried)} holds {held:.1%}"
        )
    return Match(best, held, tried[0][1])


def gate_logits(model: PreTrainedModel, texts: Sequence[Tensor], tick: Callable[[], None]) -> Tensor:
    """What gates say about all tokens behind the sinks that have left the window by the end of their text [N], float32, CPU."""
    found: list[Tensor] = []

    def observe(view: LayerView) -> None:
        if isinstance(view.policy, DMSLayer) and view.logit_BHS is not None:
            recipe, S = view.policy.recipe, view.logit_BHS.shape[-1]
            found.append(
                view.logit_BHS[..., recipe.sinks : max(recipe.sinks, S - recipe.window)].float().flatten().cpu()
            )

    for text in texts:
        hidden_states(model, text[None], observe)
        tick()
    return torch.cat(found)

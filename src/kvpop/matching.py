"""The memory that gates take, as it was asked for: the threshold under which DMS holds so many tokens on average.

    held(threshold) = share of all (token, KV head) pairs of some texts, of T tokens each, that are held behind token T:
    sinks, the window, and every other token with logit <= threshold

Training only draws gates towards a ratio: a short run ends before it, a long one may close more than asked.
"""

from __future__ import annotations

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

ROUNDS, NEAR = 8, 0.001
"""Looks at the texts, at most, and how far off the share may be: what a layer drops changes what the gates of the next say."""


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
    stays. Raises ValueError without texts, for a ratio below 1, if no DMS is attached, and if sinks and window alone are more
    than that.
    """
    layers = [policy for policy in attached_policies(model) if isinstance(policy, DMSLayer)]
    if not layers:
        raise ValueError("there are no gates to match: the policy of the model is not DMS")
    if not texts or not ratio >= 1:
        raise ValueError(f"a match needs at least 1 text and a ratio of at least 1, got {len(texts)} and {ratio}")
    recipe = layers[0].recipe
    tokens = sum(map(len, texts)) * sum(layer.shape.kv_heads for layer in layers)
    always = sum(min(len(text), recipe.sinks + recipe.window) for text in texts) * (tokens // sum(map(len, texts)))
    wanted = round(tokens / ratio) - always
    if wanted < 0:
        raise ValueError(
            f"a ratio of {ratio:g} leaves {1 / ratio:.1%} of the tokens, but sinks and window alone are {always / tokens:.1%} "
            f"of these texts ({len(texts)}, of up to {max(map(len, texts))} tokens): give longer ones"
        )
    tried: list[tuple[float, float]] = []  # threshold, share held under it
    threshold = recipe.threshold
    try:
        while True:
            for layer in layers:
                layer.recipe = replace(recipe, threshold=threshold)
            logit_N = gate_logits(model, texts, tick).sort().values
            tried.append((threshold, (always + int((logit_N <= threshold).sum())) / tokens))
            if abs(tried[-1][1] - 1 / ratio) <= NEAR or len(tried) == ROUNDS or not len(logit_N):
                break
            around_N = torch.cat([logit_N[:1] - 2, logit_N, logit_N[-1:] + 2])
            threshold = float((around_N[wanted] + around_N[wanted + 1]) / 2)
    finally:
        for layer in layers:
            layer.recipe = recipe
    best, held = min(tried, key=lambda one: abs(one[1] - 1 / ratio))
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

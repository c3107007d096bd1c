"""The curves that budgets by head come from: how much attention the tokens of each KV head are still going to receive."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpop.attachment import attach, attention_modules
from kvpop.core.residual import residual_mass
from kvpop.measure import detached_after, hidden_states
from kvpop.policies import Dense, LayerView

# Shapes: L layers, H KV heads, K ranks, S tokens of a text, T query times, C = ceil(S / block).


def remaining_curves(
    model: PreTrainedModel, texts: Sequence[Tensor], *, sinks: int = 4, window: int = 64, block: int = 64
) -> Tensor:  # fmt: skip
    """How much attention the k-th best token of each KV head still is going to receive [L, H, K], float32; k = 1 first.

        R_q(t) = sum over d >= q of max over query heads of p(d -> t),    sinks <= t <= q - window

    of the dense model, sorted at each of the query times q = c * ``block`` from a third of each text on while ``block``
    queries are to come; the mean over times, then over ``texts`` (token ids [S] each). In queries' worth of attention. K is
    the largest number of eligible tokens; where there are fewer, the attention is 0. Layers that keep the model's own
    attention (sliding windows) have NaN. Detaches whatever is attached.

    Raises ValueError without texts, and for a text that is too short to have such a time.
    """
    if not texts:
        raise ValueError("curves need at least 1 text, got none")
    times = [query_times(len(text), sinks, window, block) for text in texts]
    K = max(at[-1] - window - sinks + 1 for at in times)
    found: dict[int, Tensor] = {}
    with detached_after(model):
        attach(model, Dense())
        for text, at in zip(texts, times):

            def observe(view: LayerView, at: list[int] = at) -> None:
                curve_HK = _curve(view, at, block, sinks, window, K) / len(texts)
                found[view.layer] = found[view.layer] + curve_HK if view.layer in found else curve_HK

            hidden_states(model, text[None], observe)
    curves_LHK = next(iter(found.values())).new_full(
        (len(attention_modules(model)), *found[min(found)].shape), torch.nan
    )
    for layer, curve_HK in found.items():
        curves_LHK[layer] = curve_HK
    return curves_LHK


def query_times(length: int, sinks: int, window: int, block: int) -> list[int]:
    """The query positions at which a text of ``length`` tokens is looked at. Raises ValueError if there is none."""
    first = max(-(-length // 3), sinks + window)
    times = list(range(-(-first // block) * block, length - block + 1, block))
    if not times:
        raise ValueError(
            f"a text of {length} tokens is too short: no multiple of {block} lies between {first}, where a token behind "
            f"{sinks} sinks and a window of {window} is eligible, and {length - block}"
        )
    return times


def _curve(view: LayerView, times: list[int], block: int, sinks: int, window: int, K: int) -> Tensor:
    length_N = torch.tensor([view.k.shape[2]], device=view.k.device)
    mass_HCS = residual_mass(
        view.q, view.k, view.lse, length_N, scale=view.scale, block=block, power=1.0, aggregate="max"
    )[0]
    total_HK = torch.zeros(mass_HCS.shape[0], K)
    for q in times:
        best = mass_HCS[:, q // block, sinks : q - window + 1].sort(dim=-1, descending=True).values
        total_HK[:, : best.shape[-1]] += best.float().cpu()
    return total_HK / len(times)

"""The curves that budgets by head come from: what a slot of each KV head is worth, on a few texts.

``loss_curves`` (what ``kvpop allocate`` uses) goes by what the model's output loses; ``remaining_curves`` by attention alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpop.architecture import attached_policies
from kvpop.attachment import attach, attention_modules
from kvpop.budget import Budget
from kvpop.core.residual import residual_mass
from kvpop.documents import Documents
from kvpop.measure import detached_after, hidden_states, impl_for
from kvpop.models import check_head
from kvpop.ops.residual_mass import kernel_or_reference
from kvpop.policies import Dense, LayerView, Policy
from kvpop.policies.base import (
    LayerPolicy,
    LayerShape,
    RankedLayer,
    SequencePass,
    sequence_expiry,
)
from kvpop.policies.oracle import OracleLayer
from kvpop.slots import Slots

# Shapes: L layers, R = H * G query heads, H KV heads, K ranks, P ranks that are measured, S tokens of a text, D head dim,
# E width, T query times, C = ceil(S / block).

FIRST = 16
"""The smallest number of long-range slots, but 0, under which an output is looked at; then twice as many, and so on."""
CHUNK = 1024
"""Positions whose logits exist at once."""
QUERIES = 256
"""Queries whose attention weights exist at once."""


def loss_curves(
    model: PreTrainedModel, texts: Sequence[Tensor], policy: Policy, *, sinks: int = 4, window: int = 64, seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> Tensor:  # fmt: skip
    """What the k-th long-range slot of each KV head saves of the KL to the dense model [L, H, K], float32; k = 1 first.

        C_h(k) = 1/2 mean over t of ( sum over the G query heads of g_t . (o_t(k) - o_t) )^2,    curve_h(k) = C_h(k-1) - C_h(k)

    o_t is the attention output of a head at position t in the dense model, o_t(k) with k long-range slots filled as ``policy``
    ranks tokens (a scorer, or the oracle), and g_t the gradient of the log-probability of tokens drawn from the model's own
    predictions: the second-order expansion of the KL (the Fisher information), heads and positions apart. In nats a token.
    Measured at k = 0, 16, 32, ..., a power law in between, made convex; nothing is lost where all of a text is held. The mean
    over ``texts`` (token ids [S] each); ``tick`` is called after each.

    Layers that keep the model's own attention have NaN. Detaches whatever is attached. One pass with gradients a text: takes
    the memory of a training step with frozen weights. Raises ValueError without texts, for a text with fewer than 2 tokens
    behind sinks and window, for a policy that does not rank tokens, and for a model whose head is not a plain one.
    """
    if not texts:
        raise ValueError("curves need at least 1 text, got none")
    for text in texts:
        if len(text) < sinks + window + 2:
            raise ValueError(f"a text of {len(text)} tokens is too short: sinks and window hold {sinks + window}")
    check_head(model)
    longest = max(map(len, texts)) - sinks - window
    ranks = [0, *_doubling(longest)]
    total: dict[int, Tensor] = {}
    with detached_after(model), _frozen(model):
        attach(model, Probing(policy))
        probes = [layer for layer in attached_policies(model) if isinstance(layer, Probe)]
        for i, text in enumerate(texts):
            _backward(model, text, torch.Generator().manual_seed(seed + i))
            for probe in probes:
                cost_HP = probe.cost(ranks, sinks, window) / len(texts)
                total[probe.shape.layer] = cost_HP + total.get(probe.shape.layer, 0.0)
            tick()
    curves_LHK = torch.full((len(attention_modules(model)), len(total[min(total)]), longest), torch.nan)
    for layer, cost_HP in total.items():
        for h, cost_P in enumerate(cost_HP.tolist()):
            curves_LHK[layer, h] = savings([*ranks, longest], [*cost_P, 0.0])
    return curves_LHK


def _doubling(longest: int) -> Iterator[int]:
    k = FIRST
    while k < longest:
        yield k
        k *= 2


def savings(ranks: Sequence[int], costs: Sequence[float]) -> Tensor:
    """What each slot k = 1 .. K saves [K], float32 and falling, from the costs with ``ranks`` = 0 .. K slots: the lower convex
    hull of what was measured, and between two points of it a power law of k + 1 (straight down to a cost of 0)."""
    hull: list[tuple[int, float]] = []
    for k, cost in zip(ranks, costs, strict=True):
        while len(hull) > 1 and _slope(hull[-1], (k, cost)) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append((k, cost))
    pieces = []
    for (k0, c0), (k1, c1) in pairwise(hull):
        k_n = torch.arange(k0, k1 + 1, dtype=torch.double)
        if c0 > 0 and c1 > 0:
            share_n = ((k_n + 1) / (k0 + 1)).log() / math.log((k1 + 1) / (k0 + 1))
            cost_n = c0 * (c1 / c0) ** share_n
        else:
            cost_n = c0 + (c1 - c0) * (k_n - k0) / (k1 - k0)
        pieces.append(-cost_n.diff())
    return torch.cat(pieces).clamp(min=0).sort(descending=True).values.float()


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


@dataclass(frozen=True)
class Probing(Policy):
    """Dense attention that remembers what it did, to be asked what ``policy`` would have lost."""

    policy: Policy

    @property
    def name(self) -> str:
        return f"dense, beside {self.policy.name}"

    @property
    def slots(self) -> None:
        return None

    def layer(self, shape: LayerShape) -> Probe:
        return Probe(shape, self.policy.layer(shape))

    def check(self, kinds: Sequence[str]) -> None:
        self.policy.check(kinds)


class Probe(LayerPolicy):
    """One layer of ``Probing``."""

    def __init__(self, shape: LayerShape, ranking: LayerPolicy) -> None:
        super().__init__(shape)
        if not isinstance(ranking, RankedLayer | OracleLayer):
            raise ValueError(
                f"{type(ranking).__name__} does not rank tokens by a score: its heads cannot have budgets of their own"
            )
        self.ranking: RankedLayer | OracleLayer = ranking
        self.seen: tuple[Tensor, Tensor, Tensor, Tensor, float, SequencePass] | None = None

    def attend_sequence(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seq: SequencePass) -> Tensor:
        out = self.attend_densely(q, k, v, scale, seq)
        if out.requires_grad:
            out.retain_grad()
        else:
            out.requires_grad_()  # the first layer: nothing before it has a gradient
        self.seen = q.detach(), k.detach(), v.detach(), out, scale, seq
        return out

    @torch.no_grad()
    def cost(self, ranks: Sequence[int], sinks: int, window: int) -> Tensor:
        """C_h with so many slots [H, P], on the CPU, float64. The pass is forgotten."""
        assert self.seen is not None
        q, k, v, out, scale, seq = self.seen
        self.seen = None
        assert out.grad is not None
        priority_1HS = self.ranking.order(q, k, v, scale, seq)
        H, S = k.shape[1:3]
        budgets = Budget(sinks, window, 0).with_heads([long for long in ranks for _ in range(H)])  # all of them at once
        expiry_1XS = sequence_expiry(priority_1HS.repeat(1, len(ranks), 1), budgets, seq.documents, impl=seq.impl)
        expiry_HSP = expiry_1XS.view(-1, H, S).permute(1, 2, 0).contiguous()
        wide = torch.promote_types(q.dtype, torch.float32)  # what is lost is small beside what is there
        q_HGSD, slope_HGSD = (x[0].to(wide).unflatten(0, (H, -1)) for x in (q, out.grad))
        k_HSD, v_HSD = k[0].to(wide), v[0].to(wide)
        position_S = torch.arange(S, device=q.device)
        total_HP = torch.zeros(H, len(ranks), dtype=torch.double, device=q.device)
        for now_Q in position_S.split(QUERIES):
            seen = int(now_Q[-1]) + 1
            weight_HQGT = (q_HGSD[:, :, now_Q].transpose(1, 2) @ k_HSD[:, None, :seen].mT).mul_(scale)
            weight_HQGT.masked_fill_((position_S[:seen] > now_Q[:, None])[None, :, None], -torch.inf)
            weight_HQGT = weight_HQGT.softmax(-1)
            gain_HQGT = weight_HQGT * (slope_HGSD[:, :, now_Q].transpose(1, 2) @ v_HSD[:, None, :seen].mT)
            held_HQTP = (expiry_HSP[:, None, :seen] > now_Q[:, None, None]).to(wide)
            mass_HQGP = weight_HQGT @ held_HQTP
            kept_HQGP = torch.where(mass_HQGP > 0, gain_HQGT @ held_HQTP / mass_HQGP, 0.0)  # too little is nothing
            lost_HQGP = kept_HQGP - gain_HQGT.sum(-1)[..., None]
            total_HP += lost_HQGP.double().sum(2).square().sum(1)
        return (total_HP / (2 * S)).cpu()

    def new_slots(self, k: Tensor, v: Tensor) -> Slots:
        raise ValueError("a probe looks at texts that are given, it generates none")


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient, for a while."""
    asked = [p for p in model.parameters() if p.requires_grad]
    for p in asked:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in asked:
            p.requires_grad_(True)


def _backward(model: PreTrainedModel, text: Tensor, generator: torch.Generator) -> None:
    """Gradients of the log-probability of tokens drawn from the model's own predictions, one a position."""
    weight = next(model.parameters())
    ids_1S, head = text[None].to(weight.device), model.get_output_embeddings()
    seq = SequencePass(Documents.single(1, len(text), weight.device), impl=impl_for(weight))
    with torch.enable_grad():
        hidden_SE = model.get_decoder()(input_ids=ids_1S, use_cache=False, kvpop=seq).last_hidden_state[0]
        slope_SE = torch.zeros_like(hidden_SE)
        for start in range(0, len(text), CHUNK):
            part = slice(start, start + CHUNK)
            leaf_QE = hidden_SE[part].detach().requires_grad_()
            log_p_QV = head(leaf_QE).float().log_softmax(-1)
            uniform_Q1 = torch.rand(len(log_p_QV), 1, generator=generator).to(log_p_QV.device)
            below_QV = log_p_QV.detach().exp().cumsum(-1) < uniform_Q1
            drawn_Q1 = below_QV.sum(-1, keepdim=True).clamp(max=below_QV.shape[-1] - 1)
            (slope_SE[part],) = torch.autograd.grad(log_p_QV.gather(-1, drawn_Q1).sum(), leaf_QE)
        hidden_SE.backward(slope_SE)


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
        view.q, view.k, view.lse, length_N, scale=view.scale, block=block, power=1.0, aggregate="max",
        impl=kernel_or_reference(view.q),
    )[0]  # fmt: skip
    total_HK = torch.zeros(mass_HCS.shape[0], K)
    for q in times:
        best = mass_HCS[:, q // block, sinks : q - window + 1].sort(dim=-1, descending=True).values
        total_HK[:, : best.shape[-1]] += best.float().cpu()
    return total_HK / len(times)

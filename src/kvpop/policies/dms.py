"""DMS, Dynamic Memory Sparsification: a learned gate per KV head lets a token go as it leaves the window, or keeps it for ever.

    expiry[t] = t + window if the gate of t is closed, else never

Nothing ranks, so nothing bounds the memory: the gates decide how much is held, per head and per text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpop.documents import Documents
from kvpop.ops.paged_step.api import MLPGate
from kvpop.ops.sparse_attention.api import NEVER, sparse_attention
from kvpop.policies.base import GateSampling, LayerPolicy, LayerShape, LayerView, Policy, SequencePass
from kvpop.scorers import MLPScorer
from kvpop.slots import PagedSlots, Slots

# Shapes: B batch, R = H * G query heads, H KV heads, S sequence, n new tokens, D head dim.

GateKind = Literal["native", "mlp"]
Emitter = Literal["next", "self"]


class DMSLayer(LayerPolicy):
    bounded = False
    reserves = True
    taught_by = "kl"

    def __init__(self, shape: LayerShape, recipe: DMS) -> None:
        super().__init__(shape)
        self.recipe = recipe
        self.scorer = None
        if recipe.gate == "mlp":
            self.scorer = MLPScorer(shape.kv_heads, shape.head_dim, recipe.hidden or None)

    def logits(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What each token's gate says [B, H, n], in float32 at least: above the threshold it closes.

        With the native gate the gradient reaches the query; with the MLP it ends at the scorer's weights.
        """
        if self.scorer is None:
            wide = torch.promote_types(q.dtype, torch.float32)
            return self.recipe.scale * q[:, :: q.shape[1] // k.shape[1], :, -1].to(wide) - self.recipe.offset
        x = torch.cat([k, v], dim=-1)
        return self.scorer.advance((), x, x)[0] - self.recipe.offset

    def attended_query(self, q: Tensor, kv_heads: int) -> Tensor:
        """The queries to attend with: a channel that is a gate is no part of the product."""
        if self.scorer is not None:
            return q
        first_R = torch.arange(q.shape[1], device=q.device) % (q.shape[1] // kv_heads) == 0
        last_D = torch.arange(q.shape[-1], device=q.device) == q.shape[-1] - 1
        return q.masked_fill(first_R[:, None, None] & last_D, 0.0)

    def decide(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See ``slots.paged.Gate``."""
        return self.attended_query(q, k.shape[1]), self.logits(q, k, v) > self.recipe.threshold

    def step_weights(self) -> MLPGate | None:
        """The gate as kernels run it; None if they cannot, and ``decide`` has to."""
        weights = None if self.scorer is None else self.scorer.step_weights()
        return None if weights is None else MLPGate(weights, self.recipe.offset, self.recipe.threshold)

    def attend_sequence(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seq: SequencePass) -> Tensor:
        """Hard gates, or with ``seq.gates`` relaxed ones.

        Relaxed, a decision is z = (logit - threshold + log u - log(1 - u)) / temperature with u uniform: the gate is
        closed with the probability sigmoid(logit - threshold), and a = sigmoid(z) is how far. Attention is soft forward and
        backward: the logits of the token, for queries at least ``window`` tokens later, get log(1 - a) = logsigmoid(-z),
        and nothing is dropped, so the expiry that is observed is the end of the document. (A hard gate forward would be
        a bias of -inf, which has no gradient.) The indicator that is observed, and that the auxiliary loss counts, is
        straight-through: 1 where z > 0 and 0 elsewhere forward, the gradient of a backward.
        """
        if seq.pinned_BS is not None:
            self.check_pins(int(seq.pinned_BS.sum()))
        docs, recipe = seq.documents, self.recipe
        logit_BHS = self.logits(q, k, v)
        decided_BS = docs.valid_BS & (docs.position_BS >= recipe.sinks)
        index_S = torch.arange(k.shape[2], device=k.device)
        if recipe.emitted_by == "next":
            logit_BHS = logit_BHS.roll(-1, dims=-1)
            decided_BS = decided_BS & (index_S + 1 < docs.end_BS)
        decided_BHS, end_BHS = decided_BS[:, None].expand_as(logit_BHS), docs.end_BS[:, None].expand_as(logit_BHS)
        if seq.gates is None:
            bias_BHS = None
            closed_BHS = decided_BHS & (logit_BHS > recipe.threshold)
            expiry_BHS = torch.where(closed_BHS, index_S + recipe.window, NEVER).minimum(end_BHS).int()
            closed_BHS = closed_BHS.to(logit_BHS.dtype)
        else:
            z_BHS = relaxed(logit_BHS - recipe.threshold, self.shape.layer, seq.gates)
            bias_BHS = F.logsigmoid(-z_BHS).where(decided_BHS, 0.0)
            closed_BHS = straight_through(z_BHS).where(decided_BHS, 0.0)
            expiry_BHS = end_BHS.int()
        q_attended = self.attended_query(q, k.shape[1])
        out, lse = sparse_attention(
            q_attended, k, v, expiry_BHS, scale=scale, bias_BHT=bias_BHS, bias_from=recipe.window, impl=seq.impl
        )
        if seq.observe is not None:
            view = LayerView(self.shape.layer, self, q_attended, k, v, lse, expiry_BHS, scale, docs)
            view.closed_BHS, view.logit_BHS = closed_BHS, logit_BHS
            seq.observe(view)
        return out

    def new_slots(self, k: Tensor, v: Tensor) -> Slots:
        lag = 1 if self.recipe.emitted_by == "next" else 0
        return PagedSlots(self.recipe.window, self.recipe.sinks, self.decide, lag, k, v, weights=self.step_weights)

    def check_rollback(self) -> None:
        raise ValueError("DMS cannot roll back: a token whose gate is closed is gone once it has left the window")

    def describe(self) -> dict[str, object]:
        recipe = self.recipe
        gate = {"hidden": self.scorer.hidden} if self.scorer is not None else {"scale": recipe.scale}
        return super().describe() | gate | {
            "sinks": recipe.sinks,
            "window": recipe.window,
            "gate": recipe.gate,
            "offset": recipe.offset,
            "emitted_by": recipe.emitted_by,
            "threshold": recipe.threshold,
        }  # fmt: skip


def relaxed(logit_BHS: Tensor, layer: int, gates: GateSampling) -> Tensor:
    """(logit + logistic noise) / temperature [B, H, S]; raises ValueError if the uniform numbers have another shape."""
    uniform = gates.uniform(layer, tuple(logit_BHS.shape))
    if uniform.shape != logit_BHS.shape:
        raise ValueError(
            f"the gates need uniform numbers of shape {tuple(logit_BHS.shape)}, got {tuple(uniform.shape)}"
        )
    tiny = torch.finfo(
        torch.float32
    ).eps  # 0 and 1, which generators may draw in low precision, would be infinite noise
    uniform = uniform.to(logit_BHS).clamp(tiny, 1 - tiny)
    return (logit_BHS + uniform.log() - (-uniform).log1p()) / gates.temperature


def straight_through(z: Tensor) -> Tensor:
    """1 where z > 0, else 0, with the gradient of sigmoid(z)."""
    soft = z.sigmoid()
    return (z > 0).to(z.dtype) + (soft - soft.detach())


def seeded_uniform(seed: int) -> Callable[[int, tuple[int, ...]], Tensor]:
    """Uniform numbers for ``GateSampling`` that are a function of (seed, layer, shape) and nothing else."""

    def uniform(layer: int, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed((seed * 1009 + layer) % 2**63)
        return torch.rand(shape, generator=generator)

    return uniform


# The auxiliary loss. For a batch over many devices and layers: add up ``closed_counts`` over all of them, then ``shortfall``.


def closed_counts(closed_BHS: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
    """How many gates closed (with their gradient), and how many tokens there are, in all KV heads: two scalars.

    Sinks and the last tokens of documents count as tokens, padding does not.
    """
    return closed_BHS.sum(), documents.valid_BS.sum() * closed_BHS.shape[1]


def shortfall(closed: Tensor, tokens: Tensor, target: float) -> Tensor:
    """relu(target - closed / tokens). Over devices: reduce both, but keep the gradient of the device's own ``closed``:
    ``own + (reduced - own).detach()``. Without tokens it is 0."""
    return (target - closed / tokens.clamp(min=1)).relu() * (tokens > 0)


def gate_loss(closed_BHS: Tensor, documents: Documents, target: float) -> Tensor:
    """relu(target - share of the tokens whose gate closed): closing more than asked for is not rewarded."""
    return shortfall(*closed_counts(closed_BHS, documents), target)


def target_at(progress: float, ratio: float) -> float:
    """The share of tokens to drop at ``progress`` of training: from 0 at 0 in a straight line to 1 - 1 / ratio at 1, where it
    stays. Raises ValueError for progress below 0 and ratio below 1."""
    if not progress >= 0:
        raise ValueError(f"progress must be at least 0, got {progress}")
    if not ratio >= 1:
        raise ValueError(f"the compression ratio must be at least 1, got {ratio}")
    return min(progress, 1.0) * (1.0 - 1.0 / ratio)


@dataclass(frozen=True)
class DMS(Policy):
    """Sinks, a window, and every older token whose gate stayed open. Must be trained; the ratio is what training aims at.

    window: recent tokens that are always held; a token whose gate is closed goes as it leaves them.
    ratio: the compression to train for: 4 keeps a quarter of the tokens on average (behind the window).
    sinks: first tokens of every row, which have no gate.
    gate: "mlp" is a scorer of its own on the key and the value, with logit = score - offset; its scores start near 0 and its
        weights are of order 1, so it needs no scale. "native" reads the last channel of the first query head of each KV
        head, with logit = scale * channel - offset, and zeroes that channel in attention: only for a backbone that is
        trained along.
    hidden: width of the MLP; 0: 1.5 D, as many parameters as the other scorers.
    scale, offset: see ``gate``; in nats. With an offset of 5 relaxed gates start closed with probability 0.7 %.
    emitted_by: the decision about token t is read off token t + 1 ("next") or off t ("self").
    threshold: a gate is closed if its logit is above. Moving it after training moves the memory.

    Raises ValueError for values out of these ranges: window >= 1, ratio >= 1, sinks, hidden >= 0, scale > 0.
    """

    window: int
    ratio: float
    sinks: int = 0
    gate: GateKind = "mlp"
    hidden: int = 0
    scale: float = 100.0
    offset: float = 5.0
    emitted_by: Emitter = "next"
    threshold: float = 0.0

    def __post_init__(self) -> None:
        for name, low in (("window", 1), ("sinks", 0), ("hidden", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"DMS.{name} must be an integer, got {value!r}")
            if value < low:
                raise ValueError(f"DMS.{name} must be at least {low}, got {value}")
        for name, choices in (("gate", get_args(GateKind)), ("emitted_by", get_args(Emitter))):
            if getattr(self, name) not in choices:
                raise ValueError(f"DMS.{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if not 1 <= self.ratio < math.inf:
            raise ValueError(f"DMS.ratio must be at least 1 and finite, got {self.ratio}")
        if not 0 < self.scale < math.inf:
            raise ValueError(f"DMS.scale must be above 0 and finite, got {self.scale}")
        for name in ("offset", "threshold"):
            if math.isnan(getattr(self, name)):
                raise ValueError(f"DMS.{name} must be a number, got {getattr(self, name)}")

    @property
    def name(self) -> str:
        return "dms"

    @property
    def slots(self) -> None:
        return None

    def layer(self, shape: LayerShape) -> DMSLayer:
        return DMSLayer(shape, self)

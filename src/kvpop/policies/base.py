"""What a policy is: a recipe that gives every attention layer a ``LayerPolicy``.

A layer policy does two things. On a whole sequence it turns q, k, v into an expiry and attends under it. For generation it
makes the bounded store that keeps the same set. Everything else only reads the expiry.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvpop.budget import Budget
from kvpop.core.cutoff import check_pins, expiry, kernel_or_parallel
from kvpop.core.priority import static_priority
from kvpop.documents import Documents
from kvpop.ops.sparse_attention.api import Impl, sparse_attention
from kvpop.scorers import Scorer
from kvpop.slots import RankedSlots, Slots

# Shapes: B batch, R query heads, H KV heads, S sequence, D head dim, N documents, L longest document.


Heads = tuple[tuple[int, ...], ...]
"""Long-range slots of every KV head, a row a layer; an empty row: as the budget says."""

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions [B, n] in tokens to (cos, sin) [B, n, D_rotary], unscaled: the model's own rotary embedding."""


@dataclass(frozen=True)
class LayerShape:
    """What a policy needs to know about an attention layer."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary | None = None


@dataclass
class LayerView:
    """What one layer did with a whole sequence: handed to the observer of a pass. Priorities are rows of documents."""

    layer: int
    policy: LayerPolicy
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    expiry: Tensor
    scale: float
    documents: Documents
    score_NHL: Tensor | None = None
    closed_BHS: Tensor | None = None
    """Of a policy with gates: 1 on tokens whose gate closed, else 0; never on padding. With relaxed gates it has a gradient."""
    logit_BHS: Tensor | None = None
    """Of a policy with gates: what the gate says that decides about each token."""


@dataclass
class Given:
    """A store on its way, and the keys and values that the attention function must be called with."""

    policy: LayerPolicy
    slots: Slots
    key: Tensor
    value: Tensor


class Handover(threading.local):
    """From a cache's ``update`` to the attention function of the same layer call: which store the call belongs to."""

    def __init__(self) -> None:  # once in every thread; a compiled graph finds the same attributes at every call
        self.given: Given | None = None

    def give(self, policy: LayerPolicy, slots: Slots, key: Tensor, value: Tensor) -> None:
        if self.take() is not None:
            raise ValueError("the store of an earlier layer was not taken: the attention implementation was changed")
        self.given = Given(policy, slots, key, value)

    def take(self) -> Given | None:
        """What was given since the last call, once."""
        given, self.given = self.given, None
        return given


HANDOVER = Handover()

Observer = Callable[[LayerView], None]


@dataclass(frozen=True)
class GateSampling:
    """Relaxed gates, for training a policy that decides by gates (DMS); the others do not look at it.

    ``uniform(layer, shape)`` returns the uniform numbers in (0, 1) that stand for chance, one for every decision
    [B, H, S], on any device. It must return the same numbers when a layer is run again (activation checkpointing), and
    others for other steps and ranks. Raises ValueError for a temperature that is not above 0.
    """

    temperature: float
    uniform: Callable[[int, tuple[int, ...]], Tensor]

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"the temperature of relaxed gates must be above 0, got {self.temperature}")


@dataclass
class SequencePass:
    """What travels with one cache-free forward pass to every attention layer: ``model(ids, kvpop=SequencePass(...))``."""

    documents: Documents
    observe: Observer | None = None
    impl: Impl = "reference"
    pinned_BS: Tensor | None = None
    """True on tokens that must never be dropped, as ``BoundedCache.pin`` does for generation."""
    gates: GateSampling | None = None
    """Relax the gates of a policy that has them; None: gates are open or closed, as in generation."""
    dense: bool = False
    """Attend to everything, whatever the policy: the model as its own teacher. Nothing is observed."""


class LayerPolicy(nn.Module, ABC):
    """The retention of one attention layer; attached as its child module ``kvpop``."""

    label = ""
    """The name of the policy it belongs to."""
    attached = False
    """Whether this is the policy its attention module uses: a cache of a policy that was taken off is refused."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape

    @abstractmethod
    def attend_sequence(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seq: SequencePass) -> Tensor:
        """Attention output [B, R, S, D] of a whole sequence under this policy; calls ``seq.observe`` if there is one."""

    @abstractmethod
    def new_slots(self, k: Tensor, v: Tensor) -> Slots:
        """An empty store for the rows of k and v [B, H, n, D]."""

    def describe(self) -> dict[str, object]:
        """What a saved store must agree on beside the weights: the policy, its sizes and settings, as plain values."""
        return {"kind": type(self).__name__, "layer": self.shape.layer}

    taught_by = ""
    """What its parameters learn from: "boundary" (the boundary loss), "kl" (the loss of the whole model), or nothing."""

    def attend_densely(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seq: SequencePass) -> Tensor:
        """Attention output [B, R, S, D] as without a policy; documents do not see each other. Nothing is observed."""
        if seq.documents.is_trivial:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
        return dense_attention(q, k, v, seq.documents, scale, seq.impl)[0]

    heads: Heads = ()
    """What the policy gives to the KV heads of all layers, where they differ."""
    bounded = True
    """Whether the stores have a fixed size."""
    reserves = False
    """Whether stores that grow can be given what the next steps need beforehand (``Slots.reserve``)."""
    pins_apply = True
    """Whether a pinned token is kept by the stores of this layer."""
    by_arrival = False
    """Whether what its stores hold depends on how many tokens come at once."""

    def check_rollback(self) -> None:
        """Raise ValueError if a store of this layer cannot take its last tokens back."""

    def check_pins(self, count: int) -> None:
        """Raise ValueError if ``count`` tokens (sinks not counted) cannot be pinned in a store of this layer."""
        raise ValueError(f"layer {self.shape.layer}: {type(self).__name__} cannot pin tokens")

    def attend_expiry(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        expiry_BHS: Tensor,
        scale: float,
        seq: SequencePass,
        score: Tensor | None = None,
        live: int | None = None,
    ) -> Tensor:
        """Attend under an expiry that is cut at document ends, and tell the observer. ``live``: keys a query sees at most."""
        expiry_BHS = expiry_BHS.minimum(seq.documents.end_BS[:, None].int())
        out, lse = sparse_attention(q, k, v, expiry_BHS, scale=scale, live=live, impl=seq.impl)
        if seq.observe is not None:
            seq.observe(LayerView(self.shape.layer, self, q, k, v, lse, expiry_BHS, scale, seq.documents, score))
        return out


class RankedLayer(LayerPolicy):
    """Sinks, window, and the k best of the rest under a scorer and a decay: KVpop, and whatever else scores tokens.

    ``mean`` is the budget of the policy, ``budget`` what this layer has of it by ``heads``.
    """

    def __init__(
        self, shape: LayerShape, budget: Budget, scorer: Scorer, decay: nn.Module, decay_step: int = 1,
        heads: Heads = (),
    ) -> None:  # fmt: skip
        super().__init__(shape)
        self.mean, self.heads, self.decay_step = budget, heads, decay_step
        self.budget = layer_budget(budget, heads, shape.layer, shape.kv_heads)
        self.scorer, self.decay = scorer, decay
        self.taught_by = "boundary" if list(self.parameters()) else ""

    def attend_sequence(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seq: SequencePass) -> Tensor:
        with torch.no_grad():  # an expiry is an integer: the scorer learns from its own loss, outside this pass
            score_NHL = self.score(k, v, seq.documents)
            expiry_BHS = sequence_expiry(self.priority(score_NHL), self.budget, seq.documents, seq.pinned_BS, seq.impl)
        return self.attend_expiry(q, k, v, expiry_BHS, scale, seq, score_NHL, self.budget.slots)

    def order(self, q: Tensor, k: Tensor, v: Tensor, scale: float, seq: SequencePass) -> Tensor:
        """Static priorities of all tokens, rows of documents [N, H, L]."""
        return self.priority(self.score(k, v, seq.documents))

    def score(self, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """Raw scores in nats, rows of documents [N, H, L]. k and v are detached: no gradient reaches the backbone."""
        x_NHLE = documents.to_rows(torch.cat([k, v], dim=-1).detach())
        valid_NL = None if documents.is_trivial else documents.valid_rows(x_NHLE.shape[2])
        return self.scorer.score_sequence(x_NHLE, self.budget.window, valid_NL)

    def priority(self, score_NHL: Tensor, log_gamma_H: Tensor | None = None) -> Tensor:
        """Static priorities of scores (Eq. 20); positions count from the start of each document."""
        log_gamma_H = self.decay() if log_gamma_H is None else log_gamma_H
        position_L = torch.arange(score_NHL.shape[-1], device=score_NHL.device)
        return static_priority(score_NHL, position_L, log_gamma_H, self.decay_step)

    def new_slots(self, k: Tensor, v: Tensor) -> Slots:
        return RankedSlots(self.budget, self.scorer, self.decay(), self.decay_step, k, v)

    def describe(self) -> dict[str, object]:
        unequal = self.budget.heads or self.budget != self.mean
        return super().describe() | {
            "budget": [self.mean.sinks, self.mean.window, self.mean.long],
            **({"heads": list(self.budget.longs(self.shape.kv_heads))} if unequal else {}),
            "decay_step": self.decay_step,
            "scorer": self.scorer.extra_repr() or type(self.scorer).__name__,
            "decay": [f"{gamma:.5g}" for gamma in self.decay().tolist()],
        }

    def check_pins(self, count: int) -> None:
        check_pins(count, self.budget)


def pinned_rows(pinned_BS: Tensor, documents: Documents) -> Tensor:
    """The marks as rows of documents [N, 1, L], False past the end of a document."""
    rows_N1L = documents.to_rows(pinned_BS[:, None])
    return rows_N1L & documents.valid_rows(rows_N1L.shape[-1])[:, None]


def cutoff_impl(impl: Impl, like: Tensor) -> Literal["parallel", "triton"]:
    """How to follow the cutoff of tensors like this, beside attention by ``impl``: by kernels on a GPU, not as a reference."""
    return "parallel" if impl == "reference" else kernel_or_parallel(like)


def dense_impl(impl: Impl) -> Impl:
    """Where nothing is dropped there is nothing to gather: flex in place of the sparse kernels."""
    return "flex" if impl == "triton" else impl


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float, impl: Impl
) -> tuple[Tensor, Tensor]:
    """Output and LSE, as of ``sparse_attention``, of queries that see all of their own document up to themselves."""
    end_BHS = documents.end_BS[:, None].expand(k.shape[:3]).int()
    return sparse_attention(q, k, v, end_BHS, scale=scale, impl=dense_impl(impl))


def sequence_expiry(
    priority_NHL: Tensor,
    budget: Budget,
    documents: Documents,
    pinned_BS: Tensor | None = None,
    impl: Impl = "reference",
) -> Tensor:
    """Expiry [B, H, S] in positions of the packed sequence, cut at document ends; 0 on padding."""
    pinned_NHL = None if pinned_BS is None else pinned_rows(pinned_BS, documents).expand_as(priority_NHL)
    local_NHL = expiry(priority_NHL, budget, cutoff_impl(impl, priority_NHL), pinned_NHL).long()
    expiry_BHS = documents.from_rows(local_NHL, fill=0) + documents.start_BS[:, None]
    return expiry_BHS.minimum(documents.end_BS[:, None]).int()


def layer_budget(budget: Budget, heads: Heads, layer: int, kv_heads: int) -> Budget:
    """The budget of one layer. Raises ValueError, naming the layer, if its row is missing or of another number of KV heads."""
    if not heads:
        return budget
    if layer >= len(heads):
        raise ValueError(f"layer {layer}: heads has rows for {len(heads)} layers only")
    row = heads[layer]
    if row and len(row) != kv_heads:
        raise ValueError(f"layer {layer}: heads has {len(row)} numbers for {kv_heads} KV heads: {row}")
    return budget.with_heads(row) if row else budget


@dataclass(frozen=True)
class Policy(ABC):
    """A named recipe. Adding one: subclass, give ``name``, ``slots`` and ``layer``, and list it in ``policies.POLICIES``."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    @abstractmethod
    def slots(self) -> int | None:
        """Slots per KV head; None if memory is not bounded."""

    @abstractmethod
    def layer(self, shape: LayerShape) -> LayerPolicy: ...

    def check(self, kinds: Sequence[str]) -> None:  # noqa: B027
        """Raise ValueError if the policy does not fit a model whose layers attend in these ways (``full_attention``, ...)."""


@dataclass(frozen=True)
class BudgetPolicy(Policy):
    """A policy of one ``budget``, which KV heads may share unequally.

    ``heads``: the long-range slots of every KV head, a row a layer; an empty row for a layer whose heads have what the budget
    says, or that keeps the model's own attention. Empty: all heads are equal. Over the heads that are listed, the mean is
    ``budget.long``, exactly.

    Raises ValueError for another mean, for numbers below 0, and for a ``budget`` that is one by heads itself.
    """

    budget: Budget
    heads: Heads = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        heads = tuple(tuple(row) for row in self.heads)
        if self.budget.heads:
            raise ValueError(
                f"the budget of a policy is the mean over all heads, got one of the heads {self.budget.heads}: give heads, a "
                "row a layer"
            )
        listed = [k for row in heads for k in row]
        if any(not isinstance(k, int) or isinstance(k, bool) or k < 0 for k in listed):
            raise ValueError(f"heads must hold integers of at least 0, got {heads}")
        if sum(listed) != len(listed) * self.budget.long:
            raise ValueError(
                f"the heads have {sum(listed) / len(listed):g} long-range slots on average, the budget {self.budget.long}: "
                f"{len(listed)} heads must have {len(listed) * self.budget.long} together, got {sum(listed)}"
            )
        object.__setattr__(self, "heads", heads if listed else ())

    @property
    def slots(self) -> int:
        """Slots per KV head, on average."""
        return self.budget.slots

    def check(self, kinds: Sequence[str]) -> None:
        if self.heads and len(self.heads) != len(kinds):
            raise ValueError(f"heads has rows for {len(self.heads)} layers, the model has {len(kinds)}")
        for layer, (row, kind) in enumerate(zip(self.heads, kinds)):
            if row and kind != "full_attention":
                raise ValueError(
                    f"heads has slots for layer {layer}, which keeps the model's own {kind}: leave its row empty"
                )

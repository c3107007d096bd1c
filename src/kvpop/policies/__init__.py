"""Retention policies. To add one: (1) a file here with a ``Policy`` dataclass, (2) its ``layer`` returns a ``LayerPolicy``
(for anything that scores tokens, a ``RankedLayer`` with your ``Scorer``), (3) list it in ``POLICIES``, (4) add it to
``tests/test_invariant.py``, (5) name it in the README."""

from collections.abc import Callable

from kvpop.budget import Budget
from kvpop.policies.base import GateSampling, LayerPolicy, LayerShape, LayerView, Policy, RankedLayer, SequencePass
from kvpop.policies.by_layer import ByLayer
from kvpop.policies.dense import Dense
from kvpop.policies.dms import DMS
from kvpop.policies.kvpop import KVpop
from kvpop.policies.oracle import Oracle
from kvpop.policies.random import Random
from kvpop.policies.streaming import Streaming
from kvpop.policies.tova import Tova

POLICIES: dict[str, Callable[[Budget], Policy]] = {
    "dense": lambda budget: Dense(),
    "streaming": Streaming,
    "streaming-cache": lambda budget: Streaming(budget, positions="cache"),
    "random": Random,
    "tova": lambda budget: Tova(budget.slots),
    "oracle": Oracle,
}
"""Training-free policies by name, each from the budget it is compared at. Trained ones are loaded from their directory."""


def policy_by_name(name: str, budget: Budget) -> Policy:
    """The training-free policy called ``name``; ValueError lists the names there are."""
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name](budget)


__all__ = [
    "DMS",
    "POLICIES",
    "ByLayer",
    "Dense",
    "GateSampling",
    "KVpop",
    "LayerPolicy",
    "LayerShape",
    "LayerView",
    "Oracle",
    "Policy",
    "Random",
    "RankedLayer",
    "SequencePass",
    "Streaming",
    "Tova",
    "policy_by_name",
]

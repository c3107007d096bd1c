"""Policies that training leaves behind: their settings as JSON, and together with the tensors they learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from kvpop.allocation import allocate, apportion
from kvpop.budget import Budget
from kvpop.policies import DMS, KVpop, LayerPolicy, LayerShape, Policy, Streaming
from kvpop.policies.base import BudgetPolicy, Heads
from kvpop.weights import AdapterError, check_tensors

TRAINABLE: dict[str, type[Policy]] = {"kvpop": KVpop, "streaming": Streaming, "dms": DMS}
"""What an adapter may hold, by the name in its JSON: frozen dataclasses of numbers, strings, tuples, and a ``Budget``."""


def settings_of(policy: Policy) -> dict[str, Any]:
    """A policy as plain values: ``name`` and every field. Raises ValueError for a policy that adapters do not hold."""
    for name, kind in TRAINABLE.items():
        if type(policy) is kind:
            return {"name": name, **_without_empty_heads(dataclasses.asdict(policy))}
    raise ValueError(f"{type(policy).__name__} cannot be saved: adapters hold one of {', '.join(TRAINABLE)}")


def _without_empty_heads(settings: dict[str, Any]) -> dict[str, Any]:
    """Budgets by head are said only where there are any."""
    plain = {key: _without_empty_heads(value) if isinstance(value, dict) else value for key, value in settings.items()}
    return {key: value for key, value in plain.items() if key != "heads" or value}


def policy_from(settings: Mapping[str, Any], where: str) -> Policy:
    """The policy that ``settings_of`` described; settings it does not name get their defaults.

    Raises AdapterError, which begins with ``where``, for unknown names and settings, and for values that cannot be used.
    """
    name = settings.get("name")
    if name not in TRAINABLE:
        raise AdapterError(f"{where} holds policy {name!r}, expected one of {', '.join(TRAINABLE)}")
    kind, given = TRAINABLE[name], {key: value for key, value in settings.items() if key != "name"}
    fields, hints = dataclasses.fields(kind), get_type_hints(kind)
    if unknown := sorted(given.keys() - {field.name for field in fields}):
        raise AdapterError(f"{where}: unknown policy settings {unknown}")
    needed = [f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    if missing := [key for key in needed if key not in given]:
        raise AdapterError(f"{where}: the policy has no {', '.join(missing)}")
    made = {}
    for key, value in given.items():
        try:
            made[key] = _restored(hints[key], value)
        except (TypeError, ValueError) as error:
            raise AdapterError(f"{where}: the {key} {value!r} cannot be used: {error}") from error
    try:
        return kind(**made)
    except ValueError as error:
        raise AdapterError(f"{where}: {error}") from error


def _restored(kind: Any, value: Any) -> Any:
    """A value of type ``kind`` from its JSON form; TypeError or ValueError says what is wrong with it."""
    if dataclasses.is_dataclass(kind):
        return kind(**value)  # type: ignore[operator]
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if not isinstance(value, list) or (kinds[-1] is not ... and len(value) != len(kinds)):
            raise TypeError(f"expected a list of {len(kinds)} values")
        kinds = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        return tuple(_restored(one, part) for one, part in zip(kinds, value))
    if get_origin(kind) is Literal:
        kind = type(get_args(kind)[0])
    if not isinstance(value, (int, float) if kind is float else kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


@dataclass(frozen=True, eq=False)
class Trained(Policy):
    """A policy together with the tensors it learned (none if only the model learned): attach it like any other policy."""

    policy: Policy
    tensors: Mapping[str, Tensor]
    label: str = ""
    curves: Tensor | None = None
    """What budgets by head come from (``allocation``), if the adapter has it."""
    least: float | None = None
    """What the smallest head has of the mean, wherever it is shared anew; None: what it has now."""

    @property
    def name(self) -> str:
        return self.label or self.policy.name

    @property
    def slots(self) -> int | None:
        return self.policy.slots

    def with_budget(self, budget: Budget) -> Trained:
        """The same tensors under another budget. Heads that share it unequally share the new one as the curves say, up to half
        of what these reach, the smallest its share of it; beyond, or without curves, in the same proportions.

        Raises ValueError for a policy whose size is not a budget."""
        if "budget" not in {field.name for field in dataclasses.fields(self.policy)}:
            raise ValueError(
                f"{self.policy.name} has no budget to change to {budget}: its size is what it was trained for"
            )
        heads = getattr(self.policy, "heads", ())
        if heads and budget.long != self.policy.budget.long:
            kept = dataclasses.replace(self, least=self._least(heads))
            return kept._with(budget=budget, heads=self._shared(heads, budget.long))
        return self._with(budget=budget)

    def _with(self, **changes: Any) -> Trained:
        return dataclasses.replace(self, policy=dataclasses.replace(self.policy, **changes))

    def _least(self, heads: Heads) -> float:
        own: int = self.policy.budget.long
        smallest = min(chain.from_iterable(heads))
        now = 0.25 if smallest == own // 4 else smallest / max(1, own)
        return now if self.least is None else self.least

    def _shared(self, heads: Heads, long: int) -> Heads:
        if self.curves is None:
            return apportion(heads, long)
        reach = min(long, self.curves.shape[2] // 2)  # nearer to their end, curves would make all heads alike
        least = int(self._least(heads) * reach)
        unlisted = torch.tensor([not row for row in heads])
        curves_LHK = self.curves.masked_fill(unlisted[:, None, None].to(self.curves.device), torch.nan)
        return apportion(allocate(curves_LHK, reach, least), long)

    def apart_from(self, layers: Collection[int]) -> Trained:
        """The same where ``layers`` have policies of their own: what heads have is the mean over the other layers alone."""
        heads = getattr(self.policy, "heads", ())
        rest = tuple(() if i in layers else row for i, row in enumerate(heads))
        if not any(rest) or rest == heads:
            return self
        return self._with(heads=self._shared(rest, self.policy.budget.long))

    def of_layer(self, layer: int, budget: Budget) -> Trained:
        """The same tensors with ``budget`` for one layer, whose heads share it as they do now."""
        heads = getattr(self.policy, "heads", ())
        if not heads:
            return self.with_budget(budget)
        row = apportion((heads[layer],), budget.long)[0] if layer < len(heads) else ()
        alone = tuple(row if i == layer else () for i in range(len(heads)))
        return self._with(budget=budget, heads=alone)

    def by_head(self, curves_LHK: Tensor, least: int | None = None) -> Trained:
        """The same tensors and budget, shared by the heads as the curves say (``allocate``). Raises ValueError as that does,
        and for a policy whose heads cannot differ."""
        if not isinstance(self.policy, BudgetPolicy):
            raise ValueError(f"the heads of {self.policy.name} cannot have budgets of their own")
        heads = allocate(curves_LHK, self.policy.budget.long, least)
        return dataclasses.replace(self, curves=curves_LHK, least=None)._with(heads=heads)

    def layer(self, shape: LayerShape) -> LayerPolicy:
        layer = self.policy.layer(shape)
        prefix = f"layers.{shape.layer}."
        given = {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}
        wanted = learned_tensors(layer)
        check_tensors(given, wanted, f"layer {shape.layer}")
        if any(tensor.dtype == torch.float64 for tensor in given.values()):
            layer = layer.double()
        if wanted:
            layer.load_state_dict(given)
        return layer

    def check(self, kinds: Sequence[str]) -> None:
        self.policy.check(kinds)


def recipe_of(policy: Policy) -> Policy:
    """The policy without tensors that it may have learned."""
    return policy.policy if isinstance(policy, Trained) else policy


def learned_tensors(layer: LayerPolicy) -> dict[str, Tensor]:
    """Parameters and buffers of a layer policy that has something to learn; nothing of one that has not."""
    return layer.state_dict() if any(True for _ in layer.parameters()) else {}

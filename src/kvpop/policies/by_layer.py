"""Another policy, or another budget, in some layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvpop.policies.base import LayerPolicy, LayerShape, Policy
from kvpop.policies.dense import Dense


@dataclass(frozen=True)
class ByLayer(Policy):
    """``default`` in every layer but those named in ``layers``: ``ByLayer(KVpop(budget), {0: Dense(), 1: KVpop(larger)})``.

    ``attach`` raises ValueError for a layer that the model does not have.
    """

    default: Policy
    layers: Mapping[int, Policy] = field(default_factory=dict)

    @classmethod
    def dense_first(cls, policy: Policy, count: int) -> ByLayer:
        """``policy`` with the first ``count`` layers left dense. Raises ValueError for a negative count."""
        if count < 0:
            raise ValueError(f"the number of dense layers must be at least 0, got {count}")
        return cls(policy, {layer: Dense() for layer in range(count)})

    @property
    def name(self) -> str:
        return self.default.name

    @property
    def slots(self) -> int | None:
        """The largest number of slots of any layer; None if one is dense."""
        sizes = [policy.slots for policy in (self.default, *self.layers.values())]
        return None if None in sizes else max(size for size in sizes if size is not None)

    def layer(self, shape: LayerShape) -> LayerPolicy:
        chosen = self.layers.get(shape.layer, self.default)
        layer = chosen.layer(shape)
        layer.label = chosen.name
        return layer

    def check(self, kinds: Sequence[str]) -> None:
        for layer, policy in self.layers.items():
            if not 0 <= layer < len(kinds):
                raise ValueError(
                    f"a policy was given for layer {layer}, but the model's layers are 0 to {len(kinds) - 1}"
                )
            if kinds[layer] != "full_attention":
                raise ValueError(f"a policy was given for layer {layer}, which keeps the model's own {kinds[layer]}")
            policy.check(kinds)
        self.default.check(kinds)

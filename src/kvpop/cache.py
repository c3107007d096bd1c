"""BoundedCache: a transformers ``Cache`` that holds only what its policy retains."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvpop.policies import LayerPolicy
from kvpop.policies.base import HANDOVER
from kvpop.slots import Slots

IMPLEMENTATION = "kvpop"
"""The name under which the attention function is registered with transformers."""


class BoundedLayer(CacheLayerMixin):
    """One layer's store behind the transformers interface.

    ``update`` does not concatenate: it hands its store to the layer policy, and the attention function takes it from there
    (queries are needed to attend, and the policy decides what is kept). Lengths are tokens *seen*, padding included.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, policy: LayerPolicy, config: Any) -> None:
        super().__init__()
        self.policy, self.config = policy, config
        self.slots: Slots | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundedLayer:
        """A copy with its own store, for the same model: the policy and its scorer are shared."""
        memo.update({id(module): module for module in self.policy.modules()})
        twin = type(self)(self.policy, self.config)
        twin.slots, twin.is_initialized = copy.deepcopy(self.slots, memo), self.is_initialized
        return twin

    @property
    def tokens(self) -> int:
        return 0 if self.slots is None else self.slots.tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        with torch.inference_mode(False):  # so that a cache filled in inference mode can go on outside of it
            self.slots = self.policy.new_slots(key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.policy.attached:
            raise ValueError(
                "this cache belongs to a policy that is no longer attached: make a new BoundedCache(model)"
            )
        if self.config._attn_implementation != IMPLEMENTATION:
            raise ValueError(
                f"the model now attends with {self.config._attn_implementation!r}, not {IMPLEMENTATION!r}: attach anew"
            )
        if self.slots is None:
            self.lazy_initialization(key_states, value_states)
        assert self.slots is not None
        if len(self.slots.seen) != len(key_states):
            raise ValueError(f"the cache holds {len(self.slots.seen)} rows, but the input has {len(key_states)}")
        HANDOVER.give(self.policy, self.slots)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self.tokens

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.slots, self.is_initialized = None, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.slots is not None:
            self.slots.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.slots is not None:
            self.slots.select(torch.arange(len(self.slots.seen))[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.slots is not None:
            self.slots.select(torch.arange(len(self.slots.seen)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove and self.tokens:
            raise ValueError(
                f"crop({tokens_to_remove}): a bounded cache overwrites tokens and cannot roll back; nothing was changed"
            )

    def offload(self) -> None:
        raise ValueError("a bounded cache is not offloaded: it is small by construction")

    prefetch = offload


class BoundedCache(Cache):
    """At most ``policy.slots`` tokens per KV head, for a model that ``attach`` prepared.

    Pass it as ``past_key_values`` and go on as with any cache: prefill, chunks of any size, decode, further turns, and
    left-padded batches. Each row has its own count of tokens; padding is never held. Raises ValueError if the model has
    no policy attached.
    """

    def __init__(self, model: Any) -> None:
        policies = sorted(
            (m for m in model.modules() if isinstance(m, LayerPolicy)), key=lambda policy: policy.shape.layer
        )
        if not policies:
            raise ValueError(f"{type(model).__name__} has no policy attached: call kvpop.attach(model, policy) first")
        super().__init__(layers=[BoundedLayer(policy, model.config.get_text_config()) for policy in policies])

    @property
    def stores(self) -> list[Slots]:
        """The stores of the layers that have been used."""
        return [layer.slots for layer in self.layers if isinstance(layer, BoundedLayer) and layer.slots is not None]

    def held_positions(self) -> list[list[list[list[int]]]]:
        """Sorted positions held, as [layer][row][KV head]: positions count a row's real tokens from 0."""
        return [store.held() for store in self.stores]

    def tokens_seen(self) -> list[int]:
        """Real tokens each row has taken in (padding not counted)."""
        return self.stores[0].seen.tolist() if self.stores else []

    def rows_held(self) -> int:
        """The largest number of slots in use by any KV head."""
        return max((int((store.position >= 0).sum(-1).max()) for store in self.stores), default=0)

    def nbytes(self) -> int:
        """Bytes allocated: keys, values, positions, priorities, scorer state and counters of all layers."""
        return sum(store.nbytes() for store in self.stores)

"""How many tokens a KV head may hold, and what that costs in bytes.

B_kv = sinks + window + long slots per KV head (Eq. 1). Nothing in this module knows about tensors or models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """The slots of one KV head: ``sinks`` (s) first tokens, ``window`` (w) newest tokens, ``long`` (k) ranked older ones.

    Token t of a sequence is a sink if t < s, protected at query q while q - w < t <= q, and competes for the k long-range
    slots from q = t + w on. All counts are tokens. Raises ValueError for negative counts and for window < 1: the token
    that is being processed always attends to itself, so it needs a protected slot.

    ``heads``: the long-range slots of each KV head of a layer where they differ (empty: every head has ``long``); ``long`` is
    then the largest of them, and ``slots`` what no head exceeds.
    """

    sinks: int
    window: int
    long: int
    heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", tuple(self.heads))
        if self.heads:
            if any(not isinstance(k, int) or isinstance(k, bool) or k < 0 for k in self.heads):
                raise ValueError(f"Budget.heads must be integers of at least 0, got {self.heads}")
            if max(self.heads) != self.long:
                raise ValueError(f"Budget.long must be the largest of heads, {max(self.heads)}, got {self.long}")
        for name, low in (("sinks", 0), ("window", 1), ("long", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"Budget.{name} must be an integer, got {value!r}")
            if value < low:
                raise ValueError(f"Budget.{name} must be at least {low}, got {value}")

    @property
    def slots(self) -> int:
        """Slots per KV head, s + w + k (Eq. 1)."""
        return self.sinks + self.window + self.long

    def longs(self, kv_heads: int) -> tuple[int, ...]:
        """Long-range slots of each of ``kv_heads`` KV heads. Raises ValueError if ``heads`` are of another number."""
        if self.heads and len(self.heads) != kv_heads:
            raise ValueError(f"a budget for {len(self.heads)} KV heads was given to {kv_heads}: {self.heads}")
        return self.heads or (self.long,) * kv_heads

    def with_heads(self, heads: Sequence[int]) -> Budget:
        """The same sinks and window, and long-range slots of each head's own; one number for all where they are equal."""
        heads = tuple(heads)
        return Budget(self.sinks, self.window, max(heads), heads if len(set(heads)) > 1 else ())

    def compression(self, context: int) -> float:
        """Share of a dense cache of ``context`` tokens that is not held: 1 - slots / context, at least 0."""
        if context < 1:
            raise ValueError(f"context must be at least 1 token, got {context}")
        return max(0.0, 1.0 - self.slots / context)

    @classmethod
    def of_slots(cls, slots: int, *, sinks: int = 4, window: int = 64) -> Budget:
        """A budget of ``slots`` in all; what sinks and window leave over is ranked. Raises ValueError if nothing is left."""
        if slots < sinks + window:
            raise ValueError(
                f"a budget of {slots} slots cannot hold {sinks} sinks and a window of {window}: needs {sinks + window}"
            )
        return cls(sinks=sinks, window=window, long=slots - sinks - window)

    @classmethod
    def of_ratio(cls, ratio: float, context: int, *, sinks: int = 4, window: int = 64) -> Budget:
        """A budget that holds ``ratio`` (0 < ratio <= 1) of a dense cache of ``context`` tokens."""
        if not 0.0 < ratio <= 1.0:
            raise ValueError(f"ratio must be in (0, 1], got {ratio}")
        if not isinstance(context, int) or context < 1:
            raise ValueError(f"context must be at least 1 token, got {context}")
        return cls.of_slots(math.floor(ratio * context + 1e-9), sinks=sinks, window=window)

    def charged(self, state_bytes: int, entry_bytes: int) -> Budget:
        """This budget with ``long`` lowered by what ``state_bytes`` of scorer state per KV head cost, in whole entries.

        Used to compare stateful with stateless scorers at equal memory. Raises ValueError if the state does not fit.
        """
        if state_bytes < 0 or entry_bytes < 1:
            raise ValueError(f"bytes must be state >= 0 and entry >= 1, got {state_bytes} and {entry_bytes}")
        entries = -(-state_bytes // entry_bytes)
        if entries > self.long:
            raise ValueError(
                f"a scorer state of {state_bytes} bytes costs {entries} entries of {entry_bytes} bytes, "
                f"but only {self.long} long-range slots can be given up"
            )
        return Budget(self.sinks, self.window, self.long - entries)


def entry_bytes(head_dim: int, element_size: int, value_dim: int | None = None) -> int:
    """Bytes of one key and one value of one KV head: (D_k + D_v) x element size (4D in 16-bit formats)."""
    return (head_dim + (head_dim if value_dim is None else value_dim)) * element_size


SLOT_OVERHEAD_BYTES = 8
"""Per slot and KV head beside K and V: the int32 position and the float32 priority."""


def cache_bytes(
    budget: Budget | Sequence[Budget], *, layers: int, kv_heads: int, head_dim: int, element_size: int, rows: int = 1,
    state_bytes: int = 0, fused: bool = False,
) -> int:  # fmt: skip
    """Bytes a bounded cache allocates: rows x layers x KV heads x (slots x (entry + overhead) + scorer state) + counters.

    ``budget`` is that of every layer, or one a layer. ``state_bytes`` is the scorer state per KV head. Every row of every
    layer also carries one int64 count of seen tokens, and every layer one of the tokens taken in. ``fused``: the fused
    decoding step looks up slots in tables, 4 bytes a head and a token of the window and 4 more.

    Where the heads of a layer differ, each has keys and values for its own slots, but the overhead of the largest head's, and
    8 bytes a head and layer say where they lie. Raises ValueError for budgets of another number of layers or heads.
    """
    budgets = [budget] * layers if isinstance(budget, Budget) else list(budget)
    if len(budgets) != layers:
        raise ValueError(f"{len(budgets)} budgets were given for {layers} layers")
    total = 0
    for one in budgets:
        longs = one.longs(kv_heads)
        entries = kv_heads * (one.sinks + one.window) + sum(longs)
        per_head = one.slots * SLOT_OVERHEAD_BYTES + state_bytes + (4 * (one.window + 1) if fused else 0)
        per_row = entries * entry_bytes(head_dim, element_size) + kv_heads * per_head + 8
        total += rows * per_row + 8 + (8 * kv_heads if len(set(longs)) > 1 else 0)
    return total


def dense_bytes(tokens: int, *, layers: int, kv_heads: int, head_dim: int, element_size: int, rows: int = 1) -> int:
    """Bytes of a dense KV cache of ``tokens`` tokens."""
    return rows * layers * kv_heads * tokens * entry_bytes(head_dim, element_size)

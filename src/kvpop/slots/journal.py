"""What a ranked store needs to take its last tokens back: the few rows each update overwrote, and the state before it.

Rolling back by r tokens undoes whole updates until at least r tokens are gone, then takes in again what went too far. So the
store ends where it would be had the tokens never come: there is no other notion of exact here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

# Shapes: B rows, H KV heads, n tokens of the update, X channels.


@dataclass
class Update:
    """One update: n new tokens (real ones first), the state before them, and what they drove out (position -1: nothing).

    ``valid_Bn`` says which of the n columns were real, in the order they came (None: all).
    """

    keys: Tensor
    values: Tensor
    seen_B: Tensor
    state: tuple[Tensor, ...]
    lost: dict[str, Tensor]
    valid_Bn: Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.keys.shape[2]

    def map(self, change: Callable[[Tensor], Tensor]) -> Update:
        return replace(
            self,
            keys=change(self.keys),
            values=change(self.values),
            seen_B=change(self.seen_B),
            state=tuple(change(x) for x in self.state),
            lost={name: change(x) for name, x in self.lost.items()},
            valid_Bn=None if self.valid_Bn is None else change(self.valid_Bn),
        )

    def tensors(self) -> list[Tensor]:
        valid = [] if self.valid_Bn is None else [self.valid_Bn]
        return [self.keys, self.values, self.seen_B, *self.state, *self.lost.values(), *valid]


class Journal:
    """The last updates, as many as cover ``reach`` tokens."""

    def __init__(self, reach: int) -> None:
        self.reach = reach
        self.updates: deque[Update] = deque()

    @property
    def tokens(self) -> int:
        return sum(update.tokens for update in self.updates)

    def add(self, update: Update) -> None:
        self.updates.append(update)
        while self.tokens - self.updates[0].tokens >= self.reach:
            self.updates.popleft()

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        self.updates = deque(update.map(change) for update in self.updates)

    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for update in self.updates for x in update.tensors())

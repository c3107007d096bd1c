"""One decoding step of a paged store (DMS): what leaves the window moves to a page or goes, and the new token takes its place.

now = seen, about = now - lag
closed[about] = gate says so and about >= sinks
now >= w and not closed[now - w]: token now - w is appended to the pages of its head
the ring's place now % w gets the new token; its queries attend to all pages and the ring

Static shapes, and nothing is asked of the host: pages were given before (``PagedSlots.reserve``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kvpop.ops.cache_step.fused import Weights
from kvpop.ops.paged_step.reference import Pages, Ring, everything, paged, ring_position

# Shapes: B rows, R = H * G query heads, H KV heads, W window, N pages a head has room for, P pages in the pool, L tokens a
# page, D head dim, V value dim.

Impl = Literal["reference", "triton"]

__all__ = ["Impl", "MLPGate", "Pages", "Ring", "everything", "paged", "ring_position", "step"]


@dataclass(frozen=True)
class MLPGate:
    """A gate the kernels run: it is closed if the score of the MLP, minus ``offset``, is above ``threshold``."""

    weights: Weights
    offset: float
    threshold: float


def step(
    q_BR1D: Tensor,
    k_BH1D: Tensor,
    v_BH1V: Tensor,
    pages: Pages,
    ring: Ring,
    seen_B: Tensor,
    gate: Tensor | MLPGate,
    *,
    sinks: int,
    lag: int,
    scale: float,
    valid_B: Tensor | None = None,
    impl: Impl = "reference",
) -> Tensor:
    """Token ``seen`` of every row comes in, and [B, R, 1, V] in the dtype of q comes out.

    In place, in the rows where ``valid`` holds: pages, ring and ``seen`` (one more). Other rows stay as they are, and their
    queries attend to what these hold. ``gate``: what the new token's gate says [B, H, 1] (True: closed), or with impl="triton"
    the weights it is made with.

    A head that has no page for a token that must not go says so in ``missed``; from then on its output is NaN.

    Raises ValueError for an unknown ``impl``, for weights with "reference", for weights that have to be known before anything
    goes (a window of 1 and a lag of 1), and for "triton" in float64.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"unknown impl {impl!r}: choose {' or '.join(get_args(Impl))}")
    if impl == "triton":
        if pages.keys_PLD.dtype == torch.float64:
            raise ValueError("impl='triton' works in up to 32 bits, got float64: use impl='reference'")
        if lag and ring.closed_BHW.shape[-1] == 1 and isinstance(gate, MLPGate):
            raise ValueError("with a window of 1 and a lag of 1 a gate decides before the step: give what it says")
        from kvpop.ops.paged_step.triton import step as run

        return run(q_BR1D, k_BH1D, v_BH1V, pages, ring, seen_B, gate, sinks, lag, scale, valid_B)
    if isinstance(gate, MLPGate):
        raise ValueError("impl='reference' takes what the gate says, not its weights")
    from kvpop.ops.paged_step.reference import step as plain

    return plain(q_BR1D, k_BH1D, v_BH1V, pages, ring, seen_B, gate, sinks, lag, scale, valid_B)

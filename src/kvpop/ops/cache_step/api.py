"""One decoding step of a ranked store: the new token overwrites the worst eligible one, then the query attends to what is held.

victim = argmin over {i : s <= position_i <= now - w, not pinned} of (priority_i, position_i)
slot = now while now < M_h, else victim

Heads may have different numbers of slots M_h: see ``Layout``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from kvpop.ops.cache_step.reference import (
    Layout,
    by_head,
    choose_slot,
    least,
    mark_due,
    pinned,
    read,
    side_by_side,
    take,
    write,
)

if TYPE_CHECKING:
    from kvpop.ops.cache_step.fused import Weights

# Shapes: B rows, R = H * G query heads, H KV heads, M slots, D head dim, V value dim, P pinned spans a row, w window.

Impl = Literal["reference", "triton"]

__all__ = [
    "Impl", "Layout", "append", "attend_held", "by_head", "choose_slot", "impl_for", "least", "mark_due", "overwrite", "pinned",
    "read", "side_by_side", "step", "take", "write",
]  # fmt: skip


def impl_for(like: Tensor) -> Impl:
    """The implementation for a store: Triton on a GPU in up to 32 bits, the reference elsewhere."""
    return "triton" if like.device.type == "cuda" and like.dtype != torch.float64 else "reference"


def overwrite(
    keys_BHMD: Tensor,
    values_BHMV: Tensor,
    position_BHM: Tensor,
    priority_BHM: Tensor,
    k_BH1D: Tensor,
    v_BH1V: Tensor,
    fresh_BH1: Tensor,
    now_B: Tensor,
    *,
    sinks: int,
    window: int,
    due: bool,
    valid_B: Tensor | None = None,
    pins_BP2: Tensor | None = None,
    layout: Layout | None = None,
    impl: Impl = "reference",
) -> None:
    """Take in token ``now`` of every row, in place.

    ``fresh`` is the priority that this step made: of the token that leaves the window if ``due`` (written where position
    = now - window), else of the new token. ``position`` is int32, -1 where a slot is empty; ``priority`` float32 or wider,
    NaN counts as -inf. Rows where ``valid`` is False stay as they are. Tokens in ``pins`` [start, stop) are never chosen.
    ``layout``: of heads with different numbers of slots; keys and values are as it says.

    Raises ValueError for an unknown ``impl``, and for "triton" off a GPU or in float64.
    """
    _check(impl, keys_BHMD)
    arguments = (keys_BHMD, values_BHMV, position_BHM, priority_BHM, k_BH1D, v_BH1V, fresh_BH1, now_B)
    if impl == "triton":
        from kvpop.ops.cache_step.triton import overwrite as run
    else:
        from kvpop.ops.cache_step.reference import overwrite as run
    run(*arguments, sinks, window, due, valid_B, pins_BP2, layout)


def append(
    keys_BHMD: Tensor,
    values_BHMV: Tensor,
    position_BHM: Tensor,
    k_BH1D: Tensor,
    v_BH1V: Tensor,
    now_B: Tensor,
    valid_B: Tensor | None = None,
    impl: Impl = "reference",
) -> None:
    """Write token ``now`` of every row into slot ``now``, in place; nothing where there is no such slot or ``valid`` is False.

    Errors: as for ``overwrite``.
    """
    _check(impl, keys_BHMD)
    if impl == "triton":
        from kvpop.ops.cache_step.triton import append as run
    else:
        from kvpop.ops.cache_step.reference import append as run
    run(keys_BHMD, values_BHMV, position_BHM, k_BH1D, v_BH1V, now_B, valid_B)


def attend_held(
    q_BR1D: Tensor,
    keys_BHMD: Tensor,
    values_BHMV: Tensor,
    position_BHM: Tensor,
    scale: float,
    impl: Impl = "reference",
    layout: Layout | None = None,
    count_B: Tensor | None = None,
) -> Tensor:
    """Attention of one query a head over every slot that holds a token (position >= 0): [B, R, 1, V] in the dtype of q.

    Query head r reads KV head r // G. A head that holds nothing gives zeros. ``layout`` and errors: as for ``overwrite``.
    ``count`` says that these are the first so many of a row, all of them if there are fewer: no others are looked at then.
    Raises ValueError if a ``layout`` is given too.
    """
    _check(impl, keys_BHMD)
    if layout is not None and count_B is not None:
        raise ValueError("count is for heads of equal size: it does not go with a layout")
    if impl == "triton":
        from kvpop.ops.cache_step.triton import attend_held as run
    else:
        from kvpop.ops.cache_step.reference import attend_held as run
    return run(q_BR1D, keys_BHMD, values_BHMV, position_BHM, scale, layout, count_B)


def step(
    q_BR1D: Tensor,
    k_BH1D: Tensor,
    v_BH1V: Tensor,
    keys_BHMD: Tensor,
    values_BHMV: Tensor,
    position_BHM: Tensor,
    priority_BHM: Tensor,
    seen_B: Tensor,
    least_BH: Tensor,
    ring_BHw: Tensor,
    scorer: Weights | Tensor,
    state: tuple[Tensor, ...],
    log_gamma_H: Tensor,
    *,
    decay_step: int,
    sinks: int,
    window: int,
    due: bool,
    scale: float,
    valid_B: Tensor | None = None,
    pins_BP2: Tensor | None = None,
    layout: Layout | None = None,
    impl: Impl = "triton",
) -> Tensor:
    """Score, overwrite and attend at once: token ``seen`` of every row comes in, and [B, R, 1, V] in the dtype of q comes out.

    In place, in the rows where ``valid`` holds: the store, ``seen`` (one more), ``state`` (the memory's C and m, float32), and
    ``least`` and ``ring`` (what ``fused.derive`` makes of the store; they must be right before, and are after). The queries
    of other rows attend to what these hold. ``layout``: as for ``overwrite``.

    ``scorer``: its weights, or the priorities [B, H, 1] that were made elsewhere, as ``fresh`` of ``overwrite``. The weights'
    scores r become priorities r - floor(position / decay_step) * log_gamma, of the token that leaves the window if ``due``.

    Raises ValueError for any ``impl`` but "triton" (the others have ``overwrite`` and ``attend_held``), and in float64.
    """
    _check(impl, keys_BHMD)
    if impl != "triton":
        raise ValueError(f"the fused step has no impl {impl!r}, only 'triton': use overwrite and attend_held")
    from kvpop.ops.cache_step.fused.triton import step as run

    return run(
        q_BR1D, k_BH1D, v_BH1V, keys_BHMD, values_BHMV, position_BHM, priority_BHM, seen_B, least_BH, ring_BHw,
        scorer, state, log_gamma_H, decay_step, sinks, window, due, scale, valid_B, pins_BP2, layout,
    )  # fmt: skip


def _check(impl: str, like: Tensor) -> None:
    if impl not in get_args(Impl):
        raise ValueError(f"unknown impl {impl!r}: choose {' or '.join(get_args(Impl))}")
    if impl == "triton" and like.dtype == torch.float64:
        raise ValueError("impl='triton' works in up to 32 bits, got float64: use impl='reference'")

"""What the fused step keeps beside the store, and the weights it scores with. The kernels are in ``triton``.

least = slot of argmin over {i : s <= position_i <= now - w (due: now - w - 1), not pinned} of (priority_i, position_i)
ring[p % w] = slot of position p, for now - w <= p < now
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpop.ops.cache_step.api import least, pinned

# Shapes: B rows, H KV heads, M slots, w window, P pinned spans a row, E = D_k + D_v channels of x = [k; v], A value channels
# of the memory, N hidden units of the MLP.


@dataclass(frozen=True)
class MLPWeights:
    """score = w2 . SiLU(w1 x + b1) + b2."""

    w1_HEN: Tensor
    b1_HN: Tensor
    w2_HN: Tensor
    b2_H: Tensor


@dataclass(frozen=True)
class MemoryWeights:
    """The projections, gates and readout of the gated linear memory; ``gate_cap`` bounds the gates' logits."""

    w_q_HEA: Tensor
    w_k_HEA: Tensor
    w_v_HEA: Tensor
    w_i_HE: Tensor
    w_f_HE: Tensor
    b_f_H: Tensor
    a_HA: Tensor
    b_H: Tensor
    gate_cap: float


@dataclass(frozen=True)
class Weights:
    """A scorer the fused step can run: what standardises x, and its parts, whose scores add up: to 0 if there are none.

    These are the scorer's own tensors, of any floating dtype: nothing is copied, so they never go stale.
    """

    shift_HE: Tensor
    scale_HE: Tensor
    mlp: MLPWeights | None = None
    memory: MemoryWeights | None = None


def derive(
    position_BHM: Tensor,
    priority_BHM: Tensor,
    seen_B: Tensor,
    *,
    sinks: int,
    window: int,
    due: bool,
    pins_BP2: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(least [B, H], ring [B, H, w]), int32, from a store that has taken in ``seen`` tokens a row; -1 where there is none.

    ``due``: the step to come makes the priority of the token that then leaves the window, so that one is not compared yet.
    """
    now_B11 = seen_B[:, None, None]
    eligible = (position_BHM >= sinks) & (position_BHM <= now_B11 - (window + int(due)))
    if pins_BP2 is not None:
        eligible &= ~pinned(position_BHM, pins_BP2)
    worst_BH = least(priority_BHM, position_BHM, eligible)
    least_BH = torch.where(eligible.any(-1), worst_BH, -1).int()
    recent = (position_BHM >= 0) & (position_BHM >= now_B11 - window)
    place_BHM = torch.where(recent, position_BHM % window, window).long()  # all others land behind the end
    slot_BHM = torch.arange(position_BHM.shape[-1], dtype=torch.int32, device=position_BHM.device).expand_as(place_BHM)
    ring = torch.full((*least_BH.shape, window + 1), -1, dtype=torch.int32, device=position_BHM.device)
    return least_BH, ring.scatter(2, place_BHM, slot_BHM)[..., :window].contiguous()

"""What a scorer should have said: the attention a token receives after it leaves the window (Eq. 2, 3, 8, 13-17)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvpop.documents import Documents
from kvpop.ops.future_mass.api import Impl, future_log_mass

# Shapes: B batch, R = H * G query heads, H KV heads, G query heads per KV head, S sequence, D head dim.


@dataclass(frozen=True)
class Target:
    """How the future-attention target is formed.

    ``aggregate`` over the G query heads of a KV head: "max" (Eq. 14, default) or "mean" in probability space (Eq. 15).
    ``power`` p of the power mean over future queries, log m = (1/p) log mean p(d -> t)^p; 1 is the paper's mean, larger
    values keep rare decisive tokens. ``normalise`` divides by the number of future queries (Eq. 17). ``lookahead`` limits
    them to d <= t + w + L (tokens). ``lse``: the student's "sparse" normaliser (Eq. 9) or the "dense" one.
    ``epsilon`` is the floor of the mass.

    ``residual`` (ours; 0 is the paper): a teacher that looks again every so many queries and goes by the attention that tokens
    receive from there on, see ``residual``. It decides in place of the target's static ranking, which stays what recall is
    counted against.
    """

    aggregate: Literal["max", "mean"] = "max"
    power: float = 1.0
    normalise: bool = True
    lookahead: int | None = None
    lse: Literal["sparse", "dense"] = "sparse"
    epsilon: float = 1e-8
    residual: int = 0

    def __post_init__(self) -> None:
        if self.aggregate not in ("max", "mean"):
            raise ValueError(f"target aggregate must be 'max' or 'mean', got {self.aggregate!r}")
        if self.lse not in ("sparse", "dense"):
            raise ValueError(f"target lse must be 'sparse' or 'dense', got {self.lse!r}")
        if self.lookahead is not None and self.lookahead < 0:
            raise ValueError(f"target lookahead must be at least 0 tokens, got {self.lookahead}")
        if not self.power > 0:
            raise ValueError(f"target power must be positive, got {self.power}")
        if self.residual < 0:
            raise ValueError(f"target residual must be at least 0 queries, got {self.residual}")
        if not self.epsilon > 0:
            raise ValueError(f"target epsilon must be positive, got {self.epsilon}")


def future_count(documents: Documents, window: int, lookahead: int | None = None) -> Tensor:
    """N_t [B, S]: future queries of each key in its document, max(1, end - (t + w)), at most L + 1 (Eq. 16)."""
    index = torch.arange(documents.ids_BS.shape[1], device=documents.ids_BS.device)
    count_BS = documents.end_BS - (index + window)
    if lookahead is not None:
        count_BS = count_BS.clamp(max=lookahead + 1)
    return count_BS.clamp(min=1)


@torch.no_grad()
def future_target(
    q_BRSD: Tensor,
    k_BHSD: Tensor,
    lse_BRS: Tensor,
    documents: Documents,
    *,
    scale: float,
    window: int,
    target: Target,
    impl: Impl = "reference",
) -> Tensor:
    """log m_t per KV head and key, before the floor epsilon: nats, float32 or wider [B, H, S], -inf without a future.

    The floor is applied by ``floored``, so that the share of keys below it can be reported.
    """
    mass_BRS = future_log_mass(
        q_BRSD, k_BHSD, lse_BRS, documents.end_BS, scale=scale, window=window, power=target.power,
        lookahead=target.lookahead, impl=impl,
    )  # fmt: skip
    if target.normalise:
        mass_BRS = mass_BRS - future_count(documents, window, target.lookahead).to(mass_BRS.dtype).log()[:, None]
    mass_BRS = mass_BRS / target.power
    B, R, S = mass_BRS.shape
    H = k_BHSD.shape[1]
    mass_BHGS = mass_BRS.view(B, H, R // H, S)
    if target.aggregate == "max":
        return mass_BHGS.amax(dim=2)
    return mass_BHGS.logsumexp(dim=2) - math.log(R // H)


def floored(log_mass: Tensor, epsilon: float) -> Tensor:
    """log(eps + m) from log m, in log space: the target r of Eq. 3. A key without a future gets log eps."""
    return torch.logaddexp(log_mass, torch.full_like(log_mass, math.log(epsilon)))

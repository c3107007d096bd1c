"""The attention a key will receive after it has left the protected window (Eq. 2 and 8), summed over its future queries."""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from kvpop.ops import interpreted

# Shapes: B batch, R = H * G query heads, H KV heads, S sequence, D head dim.

Impl = Literal["reference", "flex", "triton"]


def future_log_mass(
    q_BRSD: Tensor,
    k_BHSD: Tensor,
    lse_BRS: Tensor,
    end_BS: Tensor,
    *,
    scale: float,
    window: int,
    power: float = 1.0,
    lookahead: int | None = None,
    impl: Impl = "reference",
) -> Tensor:
    """log sum over d of p(d -> t)^power, for every key t and query head; p(d -> t) = exp(scale q_d.k_t - lse_d).

    d runs over [t + window, end_t), clipped to t + window + lookahead when a lookahead (tokens, >= 0) is given. ``end_BS``
    is one past the last token of the document that holds t (0 on padding). ``lse_BRS`` is the dense or the sparse
    log-normaliser of each query, in nats; -inf (a query without keys) is read as a query that sends no mass.

    Returns float32 or wider [B, R, S]; -inf where there is no future query. Carries no gradient.
    Raises ValueError for window < 1, power <= 0, lookahead < 0, shapes that do not fit, an unknown ``impl``,
    or ``impl="flex"`` or "triton" off a GPU (Triton's interpreter aside).
    """
    (B, R, S, D), H = q_BRSD.shape, k_BHSD.shape[1]
    if R % H:
        raise ValueError(f"{R} query heads cannot share {H} KV heads evenly")
    if k_BHSD.shape != (B, H, S, D) or lse_BRS.shape != (B, R, S) or end_BS.shape != (B, S):
        raise ValueError(
            f"shapes do not fit: q {tuple(q_BRSD.shape)}, k {tuple(k_BHSD.shape)}, lse {tuple(lse_BRS.shape)}, "
            f"end {tuple(end_BS.shape)}"
        )
    if window < 1:
        raise ValueError(f"window must be at least 1 token, got {window}")
    if not power > 0:
        raise ValueError(f"power must be positive, got {power}")
    if lookahead is not None and lookahead < 0:
        raise ValueError(f"lookahead must be at least 0 tokens, got {lookahead}")
    if impl == "reference":
        from kvpop.ops.future_mass.reference import log_mass
    elif impl == "flex":
        from kvpop.ops.future_mass.flex import log_mass
    elif impl == "triton":
        if q_BRSD.device.type == "cpu" and not interpreted():
            raise ValueError("impl='triton' needs a GPU: use impl='reference'")
        from kvpop.ops.future_mass.triton import log_mass
    else:
        raise ValueError(f"unknown impl {impl!r}: choose {', '.join(map(repr, get_args(Impl)))}")
    return log_mass(q_BRSD, k_BHSD, lse_BRS, end_BS, scale, window, power, lookahead)

"""A gated linear memory with a normalised readout (Eq. 10-12).

    C_j = f_j C_{j-1} + i_j k_j (x) [v_j, 1]        h_j = (q_j^T C_j)[:Dv] / (q_j^T C_j)[Dv]

The ones column appended to v makes the paper's C and z one state. q and k are positive features already. The query
stream is any stream of the same length; a delayed readout is this memory with a query stream that is shifted by the
window.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

# Shapes: N rows, H KV heads, L tokens, k feature dim of q and k, v value dim, V = v + 1 with the ones column.

Impl = Literal["chunkwise", "triton", "quadratic", "recurrent"]

NEVER = -1e30
"""The logarithm of nothing. Finite, since -inf minus -inf is NaN."""

SMALLEST_NORMALISER = 1e-30
"""Where q^T z (scaled so that the largest weight in z is 1) is not above this, the readout is 0 instead of a ratio."""


class MLSTMState(NamedTuple):
    """The memory after some tokens: the true state is ``C * exp(m)``.

    C: [N, H, k, v + 1], the last column is z. m: [N, H], the stabiliser in nats, a constant to autograd (it cancels in
    the readout). Both in the dtype of the computation, float32 or float64.
    """

    C: Tensor
    m: Tensor


def init_state(
    N: int, H: int, Dk: int, Dv: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> MLSTMState:
    """The empty memory: C = 0 and m = -1e30."""
    return MLSTMState(
        C=torch.zeros(N, H, Dk, Dv + 1, dtype=dtype, device=device),
        m=torch.full((N, H), NEVER, dtype=dtype, device=device),
    )


def mlstm(
    q_NHLk: Tensor,
    k_NHLk: Tensor,
    v_NHLv: Tensor,
    log_i_NHL: Tensor,
    log_f_NHL: Tensor,
    state: MLSTMState,
    valid_NL: Tensor | None = None,
    *,
    impl: Impl = "chunkwise",
    chunk: int = 64,
) -> tuple[Tensor, MLSTMState]:
    """Let L tokens enter the memory one after the other and read it with q_j after token j (Eq. 10-12).

    Args:
        q_NHLk, k_NHLk: positive features, [N, H, L, k].
        v_NHLv: values, [N, H, L, v].
        log_i_NHL, log_f_NHL: logarithms of the input and the forget gate (nats), [N, H, L]; log_f <= 0.
        state: the memory before the first of these tokens; it is not modified.
        valid_NL: False on padding, [N, L]. Padding leaves the state bit for bit as it is and reads 0, whatever it holds.
        impl: "chunkwise" (parallel inside chunks, for sequences), "triton" (the same in kernels, in float32 and without a
            gradient), "recurrent" (a loop, for decode), "quadratic" (an L x L matrix, for checks). They differ in rounding
            only, as long as log_f is above about -1e9.
        chunk: tokens per chunk of the chunkwise form.

    Returns:
        h_NHLv and the new state, in float32, or float64 if any input is float64. Lower precisions are upcast, and
        autocast is off inside.

    Raises:
        ValueError: for shapes that do not fit, an unknown ``impl``, chunk < 1, and what ``impl="triton"`` does not take.
    """
    _validate(q_NHLk, k_NHLk, v_NHLv, log_i_NHL, log_f_NHL, state, valid_NL, impl, chunk)
    dtype = torch.float32
    for tensor in (q_NHLk, k_NHLk, v_NHLv, log_i_NHL, log_f_NHL, *state):
        dtype = torch.promote_types(dtype, tensor.dtype)
    q, k, v, log_i, log_f = (t.to(dtype) for t in (q_NHLk, k_NHLk, v_NHLv, log_i_NHL, log_f_NHL))
    C, m = state.C.to(dtype), state.m.detach().to(dtype)
    if q.shape[2] == 0:
        return v, MLSTMState(C, m)

    if valid_NL is not None:
        valid_NHL = valid_NL.bool()[:, None]
        # A zero key, not the gate alone: in an empty memory the weight of padding relative to m = -1e30 is 1.
        q, k, v = (torch.where(valid_NHL[..., None], t, 0.0) for t in (q, k, v))
        log_i, log_f = torch.where(valid_NHL, log_i, NEVER), torch.where(valid_NHL, log_f, 0.0)
    with torch.autocast(q.device.type, enabled=False):
        if impl == "chunkwise":
            from kvpop.ops.mlstm.chunkwise import chunkwise

            numerator_NHLv, normaliser_NHL1, C, m = chunkwise(q, k, v, log_i, log_f, C, m, chunk)
        elif impl == "triton":
            from kvpop.ops.mlstm.triton import chunks

            numerator_NHLv, normaliser_NHL1, C, m = chunks(q, k, v, log_i, log_f, C, m)
        else:
            from kvpop.ops.mlstm import reference

            plain = reference.quadratic if impl == "quadratic" else reference.recurrent
            r_NHLV, C, m = plain(q, k, torch.cat([v, torch.ones_like(v[..., :1])], dim=-1), log_i, log_f, C, m)
            numerator_NHLv, normaliser_NHL1 = r_NHLV[..., :-1], r_NHLV[..., -1:]

    readable_NHL1 = normaliser_NHL1 > SMALLEST_NORMALISER
    # The inner where keeps the gradient of the unreadable branch finite; the outer one makes it zero.
    h_NHLv = torch.where(readable_NHL1, numerator_NHLv / torch.where(readable_NHL1, normaliser_NHL1, 1.0), 0.0)
    return h_NHLv, MLSTMState(C, m)


def _validate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_i: Tensor,
    log_f: Tensor,
    state: MLSTMState,
    valid_NL: Tensor | None,
    impl: str,
    chunk: int,
) -> None:
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be one of {', '.join(get_args(Impl))}, got {impl!r}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    if q.ndim != 4 or v.ndim != 4:
        raise ValueError(f"q and v must have 4 dimensions [N, H, L, D], got {tuple(q.shape)} and {tuple(v.shape)}")
    N, H, L, Dk = q.shape
    Dv = v.shape[-1]
    expected = {
        "k": (k, (N, H, L, Dk)),
        "v": (v, (N, H, L, Dv)),
        "log_i": (log_i, (N, H, L)),
        "log_f": (log_f, (N, H, L)),
        "state.C": (state.C, (N, H, Dk, Dv + 1)),
        "state.m": (state.m, (N, H)),
    }
    if valid_NL is not None:
        expected["valid"] = (valid_NL, (N, L))
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} must have shape {shape} to fit q {tuple(q.shape)}, got {tuple(tensor.shape)}")

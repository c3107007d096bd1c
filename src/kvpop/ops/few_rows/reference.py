"""One thing after the other, each rounded to the dtype of x."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_E: Tensor, norm: tuple[Tensor, float]) -> Tensor:
    """g * x / sqrt(mean(x^2) + epsilon), the quotient rounded to the dtype of x first."""
    wide = x_E.to(torch.promote_types(x_E.dtype, torch.float32))
    return norm[0] * (wide * (wide.square().mean(-1, keepdim=True) + norm[1]).rsqrt()).to(x_E.dtype)


def linear(
    x_E: Tensor,
    weight_NE: Tensor,
    bias_N: Tensor | None,
    norm: tuple[Tensor, float] | None,
    gated: bool,
    residual_O: Tensor | None,
) -> Tensor:
    """See ``api.linear``."""
    if norm is not None:
        x_E = rms_norm(x_E, norm)
    y = F.linear(x_E, weight_NE, bias_N)
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y if residual_O is None else y + residual_O

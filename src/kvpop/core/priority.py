"""Decay and static priorities: the one number by which tokens of different ages are compared (Eq. 5, 18-21)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# Shapes: H KV heads; any leading dimensions in front of [H, T].


def static_priority(score_BHT: Tensor, position_BHT: Tensor, log_gamma_H: Tensor, step: int = 1) -> Tensor:
    """r - floor(t / n) * log gamma (Eq. 20; n = ``step`` tokens): a ranking of tokens that does not change with q.

    For n = 1 it orders tokens as the effective score r + (q - t) log gamma does at every q. For n > 1 the age buckets are
    absolute, floor(t / n), not floor((q - t) / n): a token could otherwise return after it was dropped. Scores in nats,
    positions in tokens, log_gamma <= 0 in nats a step. A NaN score stays NaN, and ranks below everything (see ``ranks``).
    """
    if step < 1:
        raise ValueError(f"the decay step must be at least 1 token, got {step}")
    bucket = position_BHT if step == 1 else position_BHT.div(step, rounding_mode="floor")
    return score_BHT - bucket.to(score_BHT.dtype) * log_gamma_H.to(score_BHT.dtype)[:, None]


class Decay(nn.Module):
    """A learned log-decay per KV head, confined to a range (Eq. 21): log_min + sigmoid(alpha) (log_max - log_min).

    All in nats a step; raises ValueError unless low < start < high <= 0.
    """

    def __init__(self, heads: int, *, start: float = -2e-4, low: float = -2e-3, high: float = -1e-5) -> None:
        super().__init__()
        if not low < start < high <= 0:
            raise ValueError(f"decay needs low < start < high <= 0, got low {low}, start {start}, high {high}")
        self.low, self.high = low, high
        share = (start - low) / (high - low)
        self.alpha = nn.Parameter(torch.full((heads,), math.log(share / (1 - share))))

    def forward(self) -> Tensor:
        """log gamma [H], nats a step."""
        return self.low + self.alpha.sigmoid() * (self.high - self.low)


class FixedDecay(nn.Module):
    """A constant log-decay, 0 for none; nothing to learn."""

    log_gamma: Tensor

    def __init__(self, heads: int, value: float = 0.0) -> None:
        super().__init__()
        if not value <= 0:
            raise ValueError(f"log gamma must be at most 0, got {value}")
        self.register_buffer("log_gamma", torch.full((heads,), float(value)))

    def forward(self) -> Tensor:
        return self.log_gamma

"""How the next token is chosen: one function for a single stream and for a batch of requests.

Every request brings its own uniforms, so what is drawn for it depends on its logits and its seed, not on its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Shapes: B rows, n of them where chance decides, V vocabulary.


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the most likely token (of equals the first).

    Above 0, tokens are drawn from the softmax at that temperature of the ``top_k`` likeliest (0: all), cut to the likeliest
    that hold ``top_p`` of the mass. Raises ValueError for values out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("top_k", "seed"):
            if not hasattr(getattr(self, name), "__index__"):
                raise ValueError(f"{name} must be an integer, got {getattr(self, name)!r}")
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if math.isinf(self.temperature):
            raise ValueError(f"temperature must be finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be at least 0, got {self.top_k}")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must be in [-2**63, 2**64), got {self.seed}")

    def generator(self) -> torch.Generator:
        """The source of chance, on the CPU whatever the device: its state is all there is to put away."""
        return torch.Generator().manual_seed(self.seed)

    def uniforms(self, generator: torch.Generator | None = None) -> Iterator[float]:
        """One number in [0, 1) for every token, without end: a function of the seed, or of the generator's state."""
        generator = generator or self.generator()
        while True:
            yield float(torch.rand((), dtype=torch.float64, generator=generator))


def draw(logits_BV: Tensor, sampling: Sequence[Sampling], uniforms: Sequence[float]) -> Tensor:
    """The next token of every row [B], int64, on the device of the logits; ``uniforms`` in [0, 1), one a row, are the chance.

    A token is the first, in the order of the vocabulary, at which the running mass exceeds the uniform; one of probability 0
    is never drawn. The device is not waited for: a row without a choice (NaN, or no finite maximum) gets -1, see ``checked``.
    """
    token_B = logits_BV.argmax(-1)
    drawn = [row for row, s in enumerate(sampling) if s.temperature > 0]
    if drawn:
        row_n = upload(drawn, logits_BV.device)
        u_n = upload([uniforms[row] for row in drawn], logits_BV.device)
        token_B[row_n] = first_beyond(u_n, nucleus(logits_BV[row_n], [sampling[row] for row in drawn]))
    return token_B.where(logits_BV.amax(-1).isfinite(), -1)


def checked(token: int) -> int:
    """The token ``draw`` gave; ValueError if there was nothing to choose from."""
    if token < 0:
        raise ValueError(
            "the logits of the next token are NaN or have no finite maximum: nothing can be drawn from them"
        )
    return token


def nucleus(logits_BV: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    """Probabilities at each row's temperature, 0 for what is cut off [B, V], float64: what stays need not sum to 1.

    A token stays if it is one of the ``top_k`` (of equals the first) and the mass before it is below ``top_p`` of theirs.
    """

    def column(values: list[float]) -> Tensor:
        return upload([float(value) for value in values], logits_BV.device)[:, None]

    below_BV = logits_BV.double() - logits_BV.amax(-1, keepdim=True)
    p_BV = (below_BV / column([s.temperature for s in sampling])).softmax(-1)
    if all(s.top_p == 1 and s.top_k == 0 for s in sampling):
        return p_BV
    order_BV = logits_BV.argsort(dim=-1, descending=True, stable=True)
    p_BV = p_BV.gather(1, order_BV)
    rank_V = torch.arange(p_BV.shape[1], device=p_BV.device)
    p_BV = p_BV.masked_fill(rank_V >= column([s.top_k or math.inf for s in sampling]), 0.0)
    before_BV = p_BV.cumsum(-1) - p_BV
    enough_B1 = p_BV.sum(-1, keepdim=True) * column([s.top_p if s.top_p < 1 else math.inf for s in sampling])
    cut_BV = (before_BV >= enough_B1) & (rank_V > 0)
    return torch.zeros_like(p_BV).scatter_(1, order_BV, p_BV.masked_fill(cut_BV, 0.0))


def first_beyond(u_B: Tensor, p_BV: Tensor) -> Tensor:
    """The first token with mass at which the running mass exceeds u of the whole; where rounding leaves none, the last.

    A sum in parallel may grow by rounding where nothing was added, so what has no mass is ruled out by itself.
    """
    mass_BV, some_BV = p_BV.cumsum(-1), p_BV > 0
    beyond_BV = some_BV & (mass_BV > u_B[:, None] * mass_BV[:, -1:])
    last_B = p_BV.shape[1] - 1 - some_BV.flip(-1).int().argmax(-1)
    return beyond_BV.int().argmax(-1).where(beyond_BV.any(-1), last_B)


def upload(values: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers (float64 or int64) on their way to a device, which is not waited for."""
    dtype = torch.float64 if isinstance(values[0], float) else torch.int64
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)

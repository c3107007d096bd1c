"""What is trained, at which rate: parameter groups, the two learning-rate rules, clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpop.distill.config import DistillConfig
from kvpop.distill.world import whole
from kvpop.lora import lora_parameters
from kvpop.policies import LayerPolicy
from kvpop.weights import base_tensors


@dataclass(frozen=True)
class Trained:
    """The parameters that a mode trains, by what they are: none of them is in two places.

    ``base`` are sharded where there are several processes, all others are ``small`` and replicated.
    """

    scorers: list[nn.Parameter]
    decays: list[nn.Parameter]
    gates: list[nn.Parameter]
    lora: list[nn.Parameter]
    base: list[nn.Parameter]

    @classmethod
    def of(cls, model: PreTrainedModel, policies: list[LayerPolicy], mode: str) -> Trained:
        scorers: list[nn.Parameter] = []
        decays: list[nn.Parameter] = []
        gates: list[nn.Parameter] = []
        for policy in policies if mode != "base" else ():
            for name, p in policy.named_parameters():
                kind = decays if name.startswith("decay.") else scorers
                (gates if policy.taught_by == "kl" else kind).append(p)
        return cls(
            scorers, decays, gates,
            list(lora_parameters(model).values()) if mode == "lora" else [],
            list(base_tensors(model).values()) if mode in ("full", "base") else [],
        )  # fmt: skip

    def parameters(self) -> list[nn.Parameter]:
        return [*self.scorers, *self.decays, *self.gates, *self.lora, *self.base]

    @property
    def by_kl(self) -> list[nn.Parameter]:
        """Those that the loss of the whole model teaches."""
        return [*self.gates, *self.lora, *self.base]

    def groups(self, c: DistillConfig) -> list[dict[str, Any]]:
        """For AdamW; only groups that hold something. A gain of a decay is no weight: it is not pulled to zero."""
        groups: list[dict[str, Any]] = [
            {"name": "scorer", "params": self.scorers, "peak": c.scorer_lr, "schedule": "cosine"},
            {"name": "decay", "params": self.decays, "peak": c.scorer_lr * c.decay_lr_ratio, "schedule": "cosine",
             "weight_decay": 0.0},
            {"name": "gate", "params": self.gates, "peak": c.scorer_lr, "schedule": "cosine"},
            {"name": "lora", "params": self.lora, "peak": c.base_lr, "schedule": "constant"},
            {"name": "base", "params": self.base, "peak": c.base_lr, "schedule": "constant"},
        ]  # fmt: skip
        return [{"lr": group["peak"], **group} for group in groups if group["params"]]


def learning_rate(config: DistillConfig, step: int, peak: float, schedule: str) -> float:
    """Constant, or linear warm-up then cosine to zero over ``steps``."""
    if schedule == "constant":
        return peak
    warm = max(1, round(config.warmup * config.steps))
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, config.steps - warm)))


def clipped(optimizer: torch.optim.Optimizer, clip: float) -> dict[str, Tensor]:
    """Clip each group by itself (the losses of model and scorers never mix); the norms before, by group."""
    return {
        f"{group['name']}_grad": whole(nn.utils.clip_grad_norm_(group["params"], clip)).detach()
        for group in optimizer.param_groups
    }

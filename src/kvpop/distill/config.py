"""The settings of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from kvpop.core.boundary import BoundaryLoss
from kvpop.core.target import Target

Mode = Literal["scorer", "full", "lora", "base"]
Compute = Literal["same", "bfloat16"]


@dataclass(frozen=True)
class DistillConfig:
    """A run. Learning rates as in the paper: policy ``scorer_lr`` with warm-up and cosine, model ``base_lr`` constant.

    ``train_long``: numbers of long-range slots the scorer is trained to decide at (the same targets serve all of them);
    empty: the policy's own. ``inner_updates``: scorer updates per forward pass in scorer mode, each on newly sampled
    decisions. ``accumulate``: batches of the stream per optimizer step, as if they were one: the KL weighted by tokens,
    the boundary loss by decisions. That is exact except for what is taken from each batch by itself, over all processes:
    mean weight and share of keep labels (Eq. 23, 24), and by how much the closed gates of DMS fall short of their aim.
    ``calibrate``: set the scorers' input standardisation on the first batch.

    ``kl_top`` teacher logits enter the KL (the rest as one bucket); ``kl_chunk`` tokens of logits exist at once.
    ``gate_temperature``: of the relaxed gates of DMS; what they are to drop rises over the first
    ``gate_ramp`` of the steps and stays. ``lora_rank``: of the low-rank change in lora mode (its learning rate
    is ``base_lr``).

    ``compute``: "same" as the weights, or "bfloat16" copies of them for every pass while the weights that are trained, and
    all sums over processes, keep their own precision. ``checkpointing``: keep only the inputs of decoder layers for the
    backward pass. ``stack_elements``: the scorers of so many layers are trained together that their inputs have at most this
    many numbers; the result does not depend on it.
    """

    mode: Mode = "scorer"
    steps: int = 200
    seed: int = 0
    scorer_lr: float = 1e-3
    decay_lr_ratio: float = 0.1
    base_lr: float = 8e-5
    warmup: float = 0.05
    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    accumulate: int = 1
    inner_updates: int = 1
    calibrate: bool = True
    train_long: tuple[int, ...] = ()
    kl_top: int = 256
    kl_chunk: int = 1024
    gate_temperature: float = 0.1
    gate_ramp: float = 1.0
    lora_rank: int = 16
    target: Target = field(default_factory=Target)
    loss: BoundaryLoss = field(default_factory=BoundaryLoss)
    impl: Literal["reference", "flex", "triton"] = "reference"
    compute: Compute = "same"
    checkpointing: bool = False
    stack_elements: int = 2**28
    checkpoint_every: int = 50
    log_every: int = 1

    def __post_init__(self) -> None:
        for name, kinds in (("mode", Mode), ("compute", Compute)):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kinds))}, got {getattr(self, name)!r}")
        counts = (
            "steps", "accumulate", "inner_updates", "kl_top", "kl_chunk", "lora_rank", "stack_elements", "checkpoint_every",
            "log_every",
        )  # fmt: skip
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.mode != "scorer" and self.inner_updates != 1:
            raise ValueError(f"inner_updates is for scorer mode; {self.mode} mode takes 1, got {self.inner_updates}")
        for name in ("scorer_lr", "decay_lr_ratio", "base_lr", "clip", "gate_temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not 0 < self.gate_ramp <= 1:
            raise ValueError(f"gate_ramp must be a share of the steps in (0, 1], got {self.gate_ramp}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup must be a share of the steps in [0, 1], got {self.warmup}")
        if any(long < 1 for long in self.train_long):
            raise ValueError(f"train_long must hold slots of at least 1, got {self.train_long}")

"""Before a run starts: what it needs of a GPU's memory, how many FLOPs a step is, and how long it will take.

Everything comes from a recipe, which carries the model's shape: no weights, no network, no GPU. What is counted exactly
(weights, optimizer, pairs of attention) and what is an estimate (activations, transients) is said at each term.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvpop.flops import ModelShape, flops_by_part, peak_flops
from kvpop.policies import KVpop, LayerShape
from kvpop.recipes import Recipe

GB = 1e9
KL_COPIES = 4
"""Float32 copies of a chunk of logits that ``kl.distillation_kl`` holds at its peak: 3.2 to 3.6 measured."""
RESERVE = int(3 * GB)
"""CUDA context, NCCL buffers, workspaces, fragmentation: a guess."""
SEEN_AGAIN = 32
"""Bytes a token and KV head of targets and teacher decisions: a guess."""
DEFAULT_PEAK = peak_flops("NVIDIA H200") or 0.0


SCORING, BACKWARD = ("views", "scorers", "supervision"), ("layer", "logits")
"""Parts that are not held at the same time: scorers have their turn between the forward and the backward pass."""


class DoesNotFit(ValueError):
    """A run that needs more memory than a GPU has."""


@dataclass(frozen=True)
class Plan:
    """``memory``: bytes a GPU by part, see ``memory_by_part``. ``flops``: model FLOPs a step by part, all GPUs together.
    ``utilisation``: the MFU that is assumed, ``peak``: FLOP/s of one GPU."""

    recipe: Recipe
    memory: dict[str, int]
    memory_gb: float
    flops: dict[str, float]
    utilisation: float
    peak: float

    @property
    def need_gb(self) -> float:
        """At the peak, 10^9 bytes."""
        return peak_bytes(self.memory) / GB

    @property
    def fits(self) -> bool:
        return self.need_gb <= self.memory_gb

    @property
    def tokens_per_step(self) -> int:
        return self.recipe.batch * self.recipe.length

    @property
    def seconds_per_step(self) -> float:
        return sum(self.flops.values()) / (self.recipe.gpus * self.peak * self.utilisation)

    def check(self) -> None:
        """Raise DoesNotFit, naming need, bound and the largest part, if a GPU's memory is too small."""
        if not self.fits:
            part = max(self.memory, key=lambda name: self.memory[name])
            raise DoesNotFit(
                f"{self.recipe.name} on {self.recipe.gpus} GPUs needs {self.need_gb:.1f} GB a GPU, more than the "
                f"{self.memory_gb:g} GB there are; the largest part is {part} with {self.memory[part] / GB:.1f} GB"
            )

    def asdict(self) -> dict[str, Any]:
        """Plain values: what ``kvpop plan --json`` prints."""
        recipe, steps = self.recipe, self.recipe.config.steps
        budget = recipe.policy.budget
        return {
            "recipe": recipe.name, "model": recipe.model, "parameters": recipe.shape.parameters,
            "scorer_parameters": scorer_parameters(recipe.policy, recipe.shape),
            "budget": {"sinks": budget.sinks, "window": budget.window, "long": budget.long},
            "gpus": recipe.gpus, "length": recipe.length, "batch": recipe.batch, "rows": recipe.rows,
            "accumulate": recipe.config.accumulate, "steps": steps,
            "memory": self.memory, "need_gb": self.need_gb, "memory_gb": self.memory_gb, "fits": self.fits,
            "flops": self.flops, "flops_per_step": sum(self.flops.values()),
            "flops_per_token": sum(self.flops.values()) / self.tokens_per_step,
            "mfu": self.utilisation, "peak": self.peak,
            "tokens_per_step": self.tokens_per_step, "tokens": self.tokens_per_step * steps,
            "seconds_per_step": self.seconds_per_step, "hours": self.seconds_per_step * steps / 3600,
        }  # fmt: skip


def make_plan(
    recipe: Recipe, *, memory_gb: float | None = None, utilisation: float = 0.35, peak: float = DEFAULT_PEAK
) -> Plan:
    """The plan of a recipe on its own number of GPUs (``recipe.on`` gives another).

    ``memory_gb``: of one GPU, the recipe's unless given. ``utilisation``: the MFU to assume for times, in (0, 1]; ``peak``:
    FLOP/s of one GPU. Whether the run fits is for ``Plan.check`` to say. Raises ValueError for numbers out of range.
    """
    if not 0 < utilisation <= 1:
        raise ValueError(f"the assumed MFU must be in (0, 1], got {utilisation}")
    bound = recipe.memory_gb if memory_gb is None else memory_gb
    for name, value in (("memory", bound), ("the peak FLOP/s", peak)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}")
    config, policy = recipe.config, recipe.policy
    parts = flops_by_part(
        recipe.shape, length=recipe.length, budget=policy.budget, mode=config.mode, scorer=policy.scorer, hidden=policy.hidden,
        inner_updates=config.inner_updates, lookahead=config.target.lookahead, dense_lse=config.target.lse == "dense",
        lora_parameters=recipe.shape.lora_parameters(config.lora_rank) if config.mode == "lora" else 0,
    )  # fmt: skip
    flops = {name: value * recipe.batch * recipe.length for name, value in parts.items()}
    return Plan(recipe, memory_by_part(recipe), bound, flops, utilisation, peak)


def memory_by_part(recipe: Recipe) -> dict[str, int]:
    """Bytes a GPU at the peak, by part.

    parameters    of the student, a shard of them on several GPUs (FSDP); likewise teacher, gradients and moments
    gradients     in the parameters' dtype; none of a frozen model
    moments       of AdamW, two a trained parameter, in its dtype
    teacher       a frozen copy; scorer mode has none, LoRA is its own
    added         float32 scorers (and LoRA matrices) with gradient and moments, 16 bytes a parameter, on every GPU
    activations   what the backward pass reads of the student: with checkpointing the input of every layer, without it all of
                  every layer; and the hidden states before the LM head
    layer         all of the layer that runs (scorer mode) or is run again (checkpointing)
    views         queries, keys, values, log-normalisers and expiry of every layer, which wait for their scorers' turn; with
                  inner updates what the scorers will see again of all batches of a step
    scorers       what the scorers of one stack of layers keep for their backward pass
    supervision   the stack's inputs side by side, and what its transposed pass holds
    logits        ``KL_COPIES`` float32 copies of a chunk; none in scorer mode
    gathered      whole layers (two of student and teacher, in use and on their way, and a gradient) and the embedding with
                  the LM head, with FSDP
    reserve       what torch does not count

    The peak is not their sum, see ``peak_bytes``. Weights and optimizer are exact; activations are those of a
    transformers layer, within a few percent; the rest is within tens of percent.
    """
    shape, config, policy = recipe.shape, recipe.config, recipe.policy
    copies, tokens = config.mode in ("full", "base"), recipe.rows * recipe.length
    backward, scored = config.mode != "scorer", config.mode != "base"
    running = shape if config.compute == "same" else replace(shape, element_size=2)  # what passes compute with
    size, heads, kv_heads, D = running.element_size, shape.heads, shape.kv_heads, shape.head_dim
    shard = -(-shape.parameters * shape.element_size // recipe.gpus)
    added = scorer_parameters(policy, shape) * scored
    added += shape.lora_parameters(config.lora_rank) * (config.mode == "lora")
    layer, inputs = activation_bytes(running) * tokens, shape.hidden * size * tokens
    kept = backward and not config.checkpointing
    keys_values = 2 * size * kv_heads * D * tokens
    view = size * heads * D * tokens + keys_values + 4 * (heads + kv_heads) * tokens
    again = (keys_values + SEEN_AGAIN * kv_heads * tokens) * config.accumulate * (config.inner_updates > 1)
    stacked = min(shape.layers, max(1, config.stack_elements // (2 * kv_heads * D * tokens)))
    scorer = scorer_activation_bytes(policy.scorer, D, policy.hidden) * kv_heads * tokens
    return {
        "parameters": shard,
        "gradients": shard * copies,
        "moments": 2 * shard * copies,
        "teacher": shard * copies,
        "added": 16 * added,
        "activations": (shape.layers * (layer if kept else inputs) + 2 * inputs) * backward,
        "layer": 0 if kept else layer,
        "views": shape.layers * (again + (0 if kept else view)),  # kept for the backward pass anyway
        "scorers": stacked * scorer * scored,
        "supervision": stacked * size * D * (2 * heads + 4 * kv_heads) * tokens * scored,
        "logits": KL_COPIES * 4 * min(config.kl_chunk, tokens) * shape.vocab * backward,
        "gathered": _gathered(running, copies) if recipe.gpus > 1 or config.compute != "same" else 0,
        "reserve": RESERVE,
    }


def peak_bytes(memory: Mapping[str, int]) -> int:
    """Bytes a GPU at the peak: what is always held, and the larger of the scorers' turn and the backward pass."""
    turns = [sum(memory[name] for name in names) for names in (SCORING, BACKWARD)]
    return sum(memory.values()) - min(turns)


def _gathered(shape: ModelShape, copies: bool) -> int:
    """Layers in use and on their way; embedding and LM head stay gathered between forward and backward."""
    outside = (1 if shape.tied else 2) * shape.head_parameters
    models, gradients = 1 + copies, int(copies)
    return shape.element_size * ((2 * models + gradients) * shape.layer_parameters + (models + gradients) * outside)


def scorer_parameters(policy: KVpop, shape: ModelShape) -> int:
    """Trained parameters of a policy on all layers of a model: scorers and decays."""
    with torch.device("meta"):
        layer = policy.layer(LayerShape(0, shape.heads, shape.kv_heads, shape.head_dim))
    return shape.layers * sum(p.numel() for p in layer.parameters())


def activation_bytes(shape: ModelShape) -> int:
    """Bytes a token that the backward pass of one layer reads, as transformers writes Llama and Qwen3.

    A norm keeps its input in float32, the normalised and the scaled values; attention its inputs, output and
    log-normalisers; the MLP four tensors of its width.
    """
    e, D = shape.element_size, shape.head_dim
    queries, keys = shape.heads * D, shape.kv_heads * D
    norms = 2 * (4 + 2 * e) * shape.hidden
    normed = shape.vectors == 2 * shape.hidden + 2 * D  # queries and keys have norms, too
    attention = (e + (4 + e) * normed) * (queries + keys) + e * (keys + queries) + 4 * shape.heads
    return norms + attention + 4 * e * shape.intermediate


def scorer_activation_bytes(kind: str, head_dim: int, hidden: int = 0) -> int:
    """Bytes a token and KV head that a scorer's backward pass reads, in float32."""
    floats = 2 * head_dim  # the input
    if "mlp" in kind.split("+"):
        floats += 2 * (hidden or round(1.5 * head_dim))
    if "mlstm" in kind:  # fitted: projections and features, states at the starts of chunks, weights inside them
        floats += 17 * head_dim // 2 + head_dim * (head_dim + 2) // 64 + 202
    return 4 * floats

"""Whole training runs: model, policy, settings, corpus and machines, as functions that return one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvpop.budget import Budget, entry_bytes
from kvpop.data import Corpus, nemotron_math_v2
from kvpop.distill import DistillConfig
from kvpop.flops import ModelShape
from kvpop.policies import KVpop
from kvpop.scorers import build_scorer


@dataclass(frozen=True)
class Recipe:
    """A run that can be planned without its weights.

    ``model``: hub name, or "smollm2" for the embedded one. ``length``: tokens of a sequence. ``batch``: sequences of an
    optimizer step over all ``gpus``, each of which takes ``config.accumulate`` passes for its share. ``memory_gb``: of one
    GPU, 10^9 bytes. Raises ValueError if the batch does not divide into passes of equal size.
    """

    name: str
    model: str
    shape: ModelShape
    policy: KVpop
    config: DistillConfig
    corpus: Corpus
    length: int
    batch: int
    gpus: int
    memory_gb: float

    def __post_init__(self) -> None:
        for name in ("length", "batch", "gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"{self.name}: {name} must be at least 1, got {getattr(self, name)}")
        if not self.memory_gb > 0:
            raise ValueError(f"{self.name}: memory_gb must be positive, got {self.memory_gb}")
        if self.batch % (self.gpus * self.config.accumulate):
            raise ValueError(
                f"{self.name}: a batch of {self.batch} sequences cannot be shared by {self.gpus} GPUs in "
                f"{self.config.accumulate} passes each"
            )

    @property
    def rows(self) -> int:
        """Sequences that one GPU takes in one pass."""
        return self.batch // (self.gpus * self.config.accumulate)

    @property
    def batch_size(self) -> int:
        """Sequences of one pass of all GPUs: the batch size of the run's ``SequenceStream``."""
        return self.rows * self.gpus

    def on(self, gpus: int) -> Recipe:
        """The same run, the same batches, on another number of GPUs: passes of the same size, so more or fewer of them.

        Raises ValueError if the batch does not divide so.
        """
        if gpus < 1 or self.batch % (gpus * self.rows):
            raise ValueError(
                f"{self.name}: a batch of {self.batch} sequences in passes of {self.rows} cannot be shared by {gpus} GPUs"
            )
        return replace(
            self, gpus=gpus, config=replace(self.config, accumulate=self.batch // (gpus * self.rows))
        )  # fmt: skip


def qwen3_4b_instruct(budget: int = 4096, scorer: str = "mlstm", mode: str = "full") -> Recipe:
    """Qwen3-4B-Instruct-2507 with the paper's settings, see ``papers``."""
    shape = ModelShape(
        layers=36, hidden=2560, heads=32, kv_heads=8, head_dim=128, intermediate=9728, vocab=151_936, tied=True,
        vectors=2 * 2560 + 2 * 128,
    )  # fmt: skip
    return papers("qwen3-4b-instruct", "Qwen/Qwen3-4B-Instruct-2507", shape, budget, scorer, mode)


def qwen3_8b(budget: int = 4096, scorer: str = "mlstm", mode: str = "full") -> Recipe:
    """Qwen3-8B with the paper's settings, see ``papers``."""
    shape = ModelShape(
        layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12_288, vocab=151_936,
        vectors=2 * 4096 + 2 * 128,
    )  # fmt: skip
    return papers("qwen3-8b", "Qwen/Qwen3-8B", shape, budget, scorer, mode)


def papers(name: str, model: str, shape: ModelShape, budget: int, scorer: str, mode: str) -> Recipe:
    """The paper's run: 2,000 steps of 128 sequences of 16,384 tokens on 8 GPUs of 80 GB; AdamW with betas (0.9, 0.95), weight
    decay 1e-4 and clip 1; the model at a constant 8e-5, scorers at 1e-3 with warm-up and cosine; KL over 256 logits; 4 sinks
    and a window of 256.

    Weights are bfloat16 without float32 copies, as there: at 8e-5 part of the updates rounds away. A checkpoint every 10
    steps: a step is about a minute, longer than torchrun waits after Ctrl-C. Documents are isolated;
    ``dataclasses.replace(recipe, corpus=nemotron_math_v2(packing="shared"))`` packs as the paper did.

    A stateful scorer pays as the authors let it: for C alone, D x D/2 in float32, 64 entries at D = 128, so k = 3772 beside
    the MLP's 3836. Counted with z and the stabiliser (``Scorer.state_bytes``) it would be 66 entries and k = 3770.
    """
    length = 16_384
    matched = Budget.of_slots(budget, sinks=4, window=256)
    if build_scorer(scorer, 1, shape.head_dim).state_bytes():
        matched = matched.charged(shape.head_dim * (shape.head_dim // 2) * 4, entry_bytes(shape.head_dim, 2))
    config = DistillConfig(
        mode=mode,  # type: ignore[arg-type]
        steps=2000, scorer_lr=1e-3, base_lr=8e-5, weight_decay=1e-4, betas=(0.9, 0.95), clip=1.0, kl_top=256, accumulate=16,
        checkpoint_every=10,
        impl="flex", checkpointing=mode != "scorer",
    )  # fmt: skip
    return Recipe(
        recipe_name(name, budget, scorer, mode), model, shape, KVpop(matched, scorer), config, nemotron_math_v2(length),
        length=length, batch=128, gpus=8, memory_gb=80.0,
    )  # fmt: skip


def smollm2_135m(budget: int = 1024, scorer: str = "mlp+mlstm", mode: str = "scorer") -> Recipe:
    """The embedded SmolLM2-135M-Instruct on long mathematical text: 400 steps of 16 sequences of 4,096 tokens on one GPU.

    A stateful scorer pays for its whole state, in entries of 16 bits; the decay starts in proportion to 1 / S.
    """
    shape = ModelShape(
        layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49_152, tied=True
    )
    length = 4096
    state_bytes = build_scorer(scorer, 1, shape.head_dim).state_bytes()
    matched = Budget.of_slots(budget, sinks=4, window=64).charged(state_bytes, entry_bytes(shape.head_dim, 2))
    policy = KVpop(matched, scorer, decay=-5 / length, decay_range=(-20 / length, -0.1 / length))
    config = DistillConfig(mode=mode, steps=400, accumulate=4, impl="flex", checkpointing=mode != "scorer")  # type: ignore[arg-type]
    return Recipe(
        recipe_name("smollm2-135m", budget, scorer, mode), "smollm2", shape, policy, config, Corpus("champ"),
        length=length, batch=16, gpus=1, memory_gb=80.0,
    )  # fmt: skip


RECIPES: dict[str, Callable[..., Recipe]] = {
    "qwen3-4b-instruct": qwen3_4b_instruct,
    "qwen3-8b": qwen3_8b,
    "smollm2-135m": smollm2_135m,
}


def recipe_name(model: str, budget: int, scorer: str, mode: str) -> str:
    return f"{model}:{budget}:{scorer}:{mode}"


def recipe_by_name(name: str) -> Recipe:
    """ "qwen3-8b:4096:mlp:full": model, and as far as they are given budget (slots a KV head), scorer and mode.

    Raises ValueError, saying which there are, for a name that is not of this form or does not exist.
    """
    model, *details = name.split(":")
    if model not in RECIPES or len(details) > 3 or not all(details):
        raise ValueError(
            f"unknown recipe {name!r}: a recipe is MODEL[:BUDGET[:SCORER[:MODE]]], such as qwen3-8b:4096:mlp:full, with the "
            f"models {', '.join(RECIPES)}, the scorers mlp, mlstm, mlstm-immediate, mlp+mlstm and the modes scorer, full, lora"
        )
    if details and not details[0].isdigit():
        raise ValueError(f"recipe {name!r}: the budget must be a number of slots, such as 4096, got {details[0]!r}")
    if details[2:] and details[2] not in ("scorer", "full", "lora"):
        raise ValueError(f"recipe {name!r}: the mode must be one of scorer, full, lora, got {details[2]!r}")
    settings = dict(zip(("budget", "scorer", "mode"), details))
    return RECIPES[model](**settings | ({"budget": int(details[0])} if details else {}))

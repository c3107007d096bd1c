"""The shape of a model, its parameters and the FLOPs of training it, counted without the model.

FLOPs are *model* FLOPs, the convention of MFU: the matrix products that the step asks for, 2 a multiply-add, nothing for
what is computed twice (activations under gradient checkpointing, logits of the chunked KL, scores inside a fused attention
backward), and nothing for norms, activations, top-k and the optimizer. Attention under a budget counts the pairs that the
mask keeps, not the blocks that a kernel visits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from kvpop.budget import Budget

Mode = Literal["scorer", "full", "lora", "base"]
MODES = ("scorer", "full", "lora", "base")

# Dense bfloat16 FLOP/s of a GPU by what torch calls it (vendors' data sheets, without structured sparsity).
PEAKS: tuple[tuple[str, float], ...] = (
    (r"B200", 2250e12),
    (r"GH200|H200", 989e12),
    (r"H100 PCIe", 756e12),
    (r"H100 NVL", 835e12),
    (r"H100|H800", 989e12),
    (r"A100|A800", 312e12),
    (r"L40S", 362e12),
    (r"L4\b", 121e12),
    (r"A10\b", 125e12),
    (r"RTX 4090", 165e12),
)

MLSTM_CHUNK = 64
"""Tokens of a chunk in the chunkwise form of the mLSTM, which is what training runs."""


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder with gated MLPs that memory and FLOPs depend on.

    ``vectors``: parameters of a layer that are no matrices (norms, biases); 0: the two norms of width ``hidden``.
    ``tied``: the LM head is the embedding. ``element_size``: bytes of a weight. Raises ValueError for numbers below 1 and for
    heads that KV heads do not divide.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    element_size: int = 2
    vectors: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "element_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"ModelShape.{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"ModelShape: {self.heads} heads are no multiple of {self.kv_heads} KV heads")

    @classmethod
    def of(cls, config: Any, element_size: int = 2) -> ModelShape:
        """From a transformers config, without weights: Llama, Mistral, Qwen2, Qwen3, Phi-3 and SmolLM3, and what saves one
        of these types. Raises ValueError for any other type (mixtures of experts among them)."""
        config = config.get_text_config()
        kind = config.model_type
        if kind not in _VECTORS:
            raise ValueError(f"the shape of a {kind!r} model is not known: known are {', '.join(sorted(_VECTORS))}")
        heads, hidden = config.num_attention_heads, config.hidden_size
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        queries, keys = heads * head_dim, kv_heads * head_dim
        vectors = 2 * hidden + (2 * head_dim if kind == "qwen3" else 0)
        if kind == "qwen2" or getattr(config, "attention_bias", False):
            vectors += queries + 2 * keys + (0 if kind == "qwen2" else hidden)
        if getattr(config, "mlp_bias", False):
            vectors += 2 * config.intermediate_size + hidden
        return cls(
            layers=config.num_hidden_layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            intermediate=config.intermediate_size, vocab=config.vocab_size, tied=config.tie_word_embeddings,
            element_size=element_size, vectors=vectors,
        )  # fmt: skip

    @property
    def layer_matrices(self) -> int:
        """Parameters of a layer's seven matrices."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        return self.layer_matrices + (self.vectors or 2 * self.hidden)

    @property
    def head_parameters(self) -> int:
        """Of the LM head, which are those of the embedding if the two are tied."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All of them: layers, embedding, last norm, and the LM head unless it is tied."""
        return self.layers * self.layer_parameters + (1 if self.tied else 2) * self.head_parameters + self.hidden

    def lora_parameters(self, rank: int) -> int:
        """Of low-rank matrices of this rank beside all seven matrices of every layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = 2 * (self.hidden + queries) + 2 * (self.hidden + keys) + 3 * (self.hidden + self.intermediate)
        return self.layers * rank * widths


_VECTORS = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3", "smollm3"})
"""Types whose layers are the seven matrices and the vectors that ``ModelShape.of`` counts."""


def dense_pairs(length: int) -> int:
    """Pairs of query and key of a causal document of ``length`` tokens."""
    return length * (length + 1) // 2


def kept_pairs(length: int, slots: int | None) -> int:
    """Pairs that a budget of ``slots`` keeps: the sum of min(q + 1, slots) over queries; None: dense."""
    full = length if slots is None else min(length, slots)
    return dense_pairs(full) + (length - full) * full


def target_pairs(length: int, window: int, lookahead: int | None = None) -> int:
    """Pairs that the future-attention target sums over: queries at least ``window`` after the key, at most L + 1 of them."""
    keys = max(0, length - window)
    if lookahead is None:
        return dense_pairs(keys)
    short = min(keys, lookahead + 1)
    return dense_pairs(short) + (keys - short) * short


def scorer_flops(kind: str, head_dim: int, hidden: int = 0) -> dict[str, int]:
    """FLOPs a token and KV head of a scorer: {"forward", "backward"}. Inputs are detached, so the first projections have no
    gradient to pass on. Handing the memory from chunk to chunk is not counted: it need not be a product of matrices.
    ``hidden``: the MLP's width, 0 for round(1.5 D). Raises ValueError for an unknown kind."""
    if kind not in ("mlp", "mlstm", "mlstm-immediate", "mlp+mlstm"):
        raise ValueError(f"scorer kind must be one of mlp, mlstm, mlstm-immediate, mlp+mlstm, got {kind!r}")
    channels, forward, backward = 2 * head_dim, 0, 0
    if "mlp" in kind.split("+"):
        first = 2 * channels * (hidden or round(1.5 * head_dim))
        forward, backward = forward + first, backward + first
    if "mlstm" in kind:
        half = head_dim // 2
        projections = 2 * channels * (3 * half + 2)
        # Inside a chunk: q k^T and its product with the values; across chunks: what enters the state, its readout, and that of
        # the sum of weights.
        memory = 2 * MLSTM_CHUNK * (head_dim + half) + 2 * 2 * head_dim * half + 2 * head_dim
        forward, backward = forward + projections + memory, backward + projections + 2 * memory
    return {"forward": forward, "backward": backward}


def flops_by_part(
    shape: ModelShape, *, length: int, budget: Budget | None, mode: Mode = "scorer", scorer: str = "mlp", hidden: int = 0,
    inner_updates: int = 1, lookahead: int | None = None, dense_lse: bool = False, lora_parameters: int = 0,
) -> dict[str, float]:  # fmt: skip
    """Model FLOPs a token of a training step, by part, for documents of ``length`` tokens (shorter ones cost less attention).

    matrices    the layers of the student: forward only in scorer mode, 3x with its backward pass, 2x (no weight gradients)
                plus 3x for the added matrices with LoRA
    attention   of the student, under ``budget`` (None: dense): forward, 3x with the backward pass
    head        logits of the student; none in scorer mode, which has no KL
    teacher     the dense forward pass with its logits; none in scorer mode
    target      the transposed pass over the pairs behind the window, and a dense pass if ``dense_lse``; none in base mode
    scorers     forward and backward, once per inner update; none in base mode

    Raises ValueError for an unknown mode or scorer and for length < 1.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if length < 1:
        raise ValueError(f"length must be at least 1 token, got {length}")
    matrices, head = 2 * shape.layers * shape.layer_matrices, 2 * shape.head_parameters
    pair = 4 * shape.layers * shape.heads * shape.head_dim / length  # q k^T and p v, per pair of the document and token
    sparse, dense = pair * kept_pairs(length, budget.slots if budget else None), pair * dense_pairs(length)
    parts: dict[str, float] = {}
    if mode == "scorer":
        parts |= {"matrices": matrices, "attention": sparse, "head": 0, "teacher": 0}
    else:
        frozen = mode == "lora"
        parts["matrices"] = (2 if frozen else 3) * matrices + 3 * 2 * lora_parameters * frozen
        parts |= {"attention": 3 * sparse, "head": (2 if frozen else 3) * head, "teacher": matrices + dense + head}
    if mode == "base" or budget is None:
        return parts | {"target": 0, "scorers": 0}
    once = scorer_flops(scorer, shape.head_dim, hidden)
    parts["target"] = pair / 2 * target_pairs(length, budget.window, lookahead) + dense_lse * dense
    parts["scorers"] = shape.layers * shape.kv_heads * inner_updates * (once["forward"] + once["backward"])
    return parts


def flops_per_token(shape: ModelShape, **step: Any) -> float:
    """Model FLOPs a token of a training step: the sum of ``flops_by_part``, which says what the arguments mean."""
    return sum(flops_by_part(shape, **step).values())


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 FLOP/s of the GPU that ``torch.cuda.get_device_name`` calls so; None if it is not in the table."""
    return next((peak for pattern, peak in PEAKS if re.search(pattern, device_name)), None)


def mfu(tokens_per_s: float, flops_per_token: float, peak: float | None) -> float | None:
    """Model FLOPs utilisation: the share of ``peak`` FLOP/s (of all GPUs together) that model FLOPs account for.

    None where the peak is not known: no figure is better than a made-up one.
    """
    return None if peak is None else tokens_per_s * flops_per_token / peak

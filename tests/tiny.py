"""Tiny random models, and the slow obvious reference most tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from kvpop.attachment import attention_modules
from kvpop.documents import Documents
from kvpop.ops.sparse_attention.api import keep_mask
from kvpop.policies import LayerView, SequencePass

VOCAB = 61
SIZES = dict(
    vocab_size=VOCAB, hidden_size=24, intermediate_size=48, num_hidden_layers=2, head_dim=8,
    max_position_embeddings=4096, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def tiny_model(
    family: str = "llama", *, kv_heads: int = 2, groups: int = 2, seed: int = 0, dtype=torch.float64
) -> PreTrainedModel:
    """Two layers, random weights large enough that attention is far from uniform."""
    torch.manual_seed(seed)
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config_class, model_class = kinds[family]
    config = config_class(**SIZES, num_key_value_heads=kv_heads, num_attention_heads=kv_heads * groups)
    model = model_class(config).to(dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(std=0.3 if "embed" in name else 0.2)
    return model


def randomise(model: PreTrainedModel, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """Weights and biases large enough that no part of the model is close to doing nothing."""
    model = model.to(dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 or name.endswith("bias"):
                p.copy_(torch.randn(p.shape, generator=generator) * (0.3 if "embed" in name else 0.2))
    return model


def family_model(
    family: str,
    *,
    dtype: torch.dtype = torch.float64,
    head: str = "ForCausalLM",
    config: str = "",
    **options: object,
) -> PreTrainedModel:
    """A tiny random model of any family, from its config class: ``family_model("Qwen2", num_hidden_layers=4)``.

    Raises AttributeError if the installed transformers does not have the family.
    """
    sizes = SIZES | dict(num_attention_heads=4, num_key_value_heads=2) | options
    made = getattr(transformers, config or f"{family}Config")(**sizes)
    model = randomise(getattr(transformers, family + head)(made), dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped kernels have no float64
    return model


def expiries(
    model: PreTrainedModel, ids: Tensor, documents: Documents | None = None, pinned: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Logits and each layer's expiry [B, H, S] of a cache-free pass under the attached policy."""
    found: dict[int, Tensor] = {}

    def observe(view: LayerView) -> None:
        found[view.layer] = view.expiry

    documents = documents or Documents.single(*ids.shape)
    with torch.no_grad():
        call = SequencePass(documents, observe=observe, pinned_BS=pinned)
        out = model(ids, position_ids=documents.position_BS, use_cache=False, kvpop=call)
    return out.logits, [found[layer] for layer in sorted(found)]


def masked_reference(model: PreTrainedModel, ids: Tensor, masks: Sequence[Tensor | None]) -> Tensor:
    """Logits of the plain model (nothing attached) when layer i attends under the dense boolean mask masks[i] [B, H, S, S].

    A layer whose mask is None keeps the mask that the model itself gives it. Written against the attention modules
    themselves, without any code of the package.
    """
    hooks = []
    previous = model.config._attn_implementation
    model.config._attn_implementation = "sdpa"

    def give(mask: Tensor):
        def hook(module, args, kwargs):
            kwargs["attention_mask"] = mask.repeat_interleave(module.num_key_value_groups, dim=1)
            return args, kwargs

        return hook

    for module, mask in zip(attention_modules(model), masks):
        if mask is not None:
            hooks.append(module.register_forward_pre_hook(give(mask), with_kwargs=True))
    try:
        with torch.no_grad():
            return model(ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
        model.config._attn_implementation = previous


def dense_masks(expiry: list[Tensor]) -> list[Tensor]:
    masks = []
    for e in expiry:
        B, H, S = e.shape
        index = torch.arange(S)
        masks.append(keep_mask(e, index.expand(B, S), index.expand(B, H, S)))
    return masks


def held_by_mask(expiry: list[Tensor], q: int) -> list[list[list[list[int]]]]:
    """[layer][row][head] -> positions kept at query q."""
    return [
        [[[t for t in range(q + 1) if q < row[h, t]] for h in range(row.shape[0])] for row in layer] for layer in expiry
    ]

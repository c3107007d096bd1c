"""Attach a policy to a model and take it off again.

Scorers become children of the attention modules, under the name ``kvpop``: state dicts, devices and sharding follow the model.
One attention function and one mask function are registered with transformers on first use. Nothing is patched at import.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.masking_utils import AttentionMaskInterface

from kvpop.architecture import CHILD, attached_policies, attention_kinds, attention_modules, cache_argument, rotary_of
from kvpop.cache import IMPLEMENTATION
from kvpop.documents import Documents
from kvpop.generation import HOOKS, generation_hooks
from kvpop.ops import device_of
from kvpop.policies import LayerPolicy, LayerShape, Policy, SequencePass
from kvpop.policies.base import HANDOVER
from kvpop.policies.window import WindowLayer

__all__ = ["attach", "attached_policies", "attention", "attention_modules", "cache_argument", "detach", "padding_mask"]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    kvpop: SequencePass | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: the store of a bounded cache if this call has one, else a whole sequence."""
    given = HANDOVER.take()
    policy: LayerPolicy | None = getattr(module, CHILD, None)
    if policy is None:
        raise ValueError("this model shares its config with one that has a kvpop policy attached: give it its own copy")
    if given is not None and given.policy is not policy:
        raise ValueError("the cache belongs to another model: make a BoundedCache of this one")
    if given is not None and (given.key is not key or given.value is not value):
        raise ValueError(f"layer {policy.shape.layer} attends with other keys or values than it gave to the cache")
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"layer {policy.shape.layer} uses {name}, which kvpop does not support yet")
    window = policy.budget.window if isinstance(policy, WindowLayer) else None
    if kwargs.get("sliding_window") != window:
        raise ValueError(
            f"layer {policy.shape.layer} now has a sliding_window of {kwargs.get('sliding_window')}, but had {window} when "
            "the policy was attached: attach anew"
        )
    if dropout:
        raise ValueError(f"attention dropout is {dropout}: kvpop attends without dropout, set it to 0")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(f"kvpop takes a 2-D padding mask, got shape {tuple(attention_mask.shape)}")
    if attention_mask is not None and attention_mask.shape[1] != query.shape[2]:
        raise ValueError(f"the attention mask covers {attention_mask.shape[1]} tokens, the input has {query.shape[2]}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query = query.to(key.dtype)  # under autocast the cache settles on the dtype of the values
    if given is not None:
        if kvpop is not None:
            raise ValueError(
                "packed documents and observers are for cache-free passes: call the model with use_cache=False"
            )
        with device_of(query):
            out = given.slots.attend(query, key, value, attention_mask, scale)
    else:
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                f"{key.shape[2]} cached keys for {query.shape[2]} queries: with a policy attached the cache must be a "
                "kvpop.BoundedCache(model)"
            )
        if kvpop is None:
            kvpop = SequencePass(_documents(query, attention_mask, kwargs.get("position_ids")))
        attend = policy.attend_densely if kvpop.dense else policy.attend_sequence
        with device_of(query):
            out = attend(query, key, value, scale, kvpop)
    return out.transpose(1, 2).contiguous(), None


def _documents(query: Tensor, valid_BS: Tensor | None, position_ids: Tensor | None) -> Documents:
    """The documents of a cache-free call: from the padding mask, or, as in transformers, from positions that restart."""
    B, _, S, _ = query.shape
    if valid_BS is not None:
        return Documents.single(B, S, query.device) if bool(valid_BS.all()) else Documents.from_padding(valid_BS)
    if position_ids is None or position_ids.ndim != 2:
        return Documents.single(B, S, query.device)
    restarts = torch.zeros(B, S, dtype=torch.long, device=query.device)
    restarts[:, 1:] = (position_ids.expand(B, S).diff(dim=-1) != 1).long()
    return Documents(restarts.cumsum(-1))


def padding_mask(
    *,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    mask_function: Any = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The registered mask function: which of the q_length new tokens are real, [B, q_length]; None if all are."""
    if not torch.compiler.is_compiling() and (use_vmap or _looks_ahead(mask_function)):
        raise ValueError(
            "the model asks for attention that is not causal (images, or a block of tokens that see each other): kvpop "
            "supports causal attention only"
        )
    if attention_mask is None:
        return None
    covered, new = attention_mask.shape[-1], int(q_length)
    mask = attention_mask[:, -new:].bool().contiguous()  # a view would have another stride at every step
    if torch.compiler.is_compiling() or (mask.device.type != "cpu" and (new == 1 or _capturing())):
        return mask  # no look at its values: that would wait for the device
    if covered not in (new, int(kv_length)):
        raise ValueError(
            f"the attention mask covers {covered} tokens, but {int(kv_length)} were given, {new} of them new"
        )
    return None if mask.shape[1] == new and bool(mask.all()) else mask


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _looks_ahead(mask_function: Any) -> bool:
    """Whether a transformers mask function is more than a causal one with further conditions: looks at what it is made of."""
    name = getattr(mask_function, "__name__", "")
    if name == "or_mask" or "bidirectional" in name:
        return True
    parts = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    inner = [f for part in parts for f in (part if isinstance(part, tuple) else (part,)) if callable(f)]
    return any(_looks_ahead(f) for f in inner if not isinstance(f, Tensor))


def attach(model: PreTrainedModel, policy: Policy) -> PreTrainedModel:
    """Put ``policy`` on every full-attention layer of ``model``, in place of one attached before; returns the model.

    Afterwards a cache-free forward pass runs under the policy's mask, and ``generate`` uses a ``BoundedCache``. Weights are
    not touched. Sliding layers keep the model's own window. Raises ValueError, changing nothing, for models that do not fit.
    """
    modules = attention_modules(model)
    config = model.config.get_text_config()
    kinds = attention_kinds(model, config, modules)
    policy.check(kinds)
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)
    layers = []
    for module, kind in zip(modules, kinds):
        weight = next(module.parameters())
        heads = getattr(module, "num_heads", config.num_attention_heads)  # a model may have more heads in some layers
        shape = LayerShape(
            layer=module.layer_idx,
            heads=heads,
            kv_heads=heads // module.num_key_value_groups,
            head_dim=module.head_dim,
            rotary=rotary_of(model, kind),
        )
        own_window = kind == "sliding_attention"
        layer = (WindowLayer(shape, config.sliding_window) if own_window else policy.layer(shape)).to(weight.device)
        if weight.dtype == torch.float64:
            layer = layer.double()
        layer.label = layer.label or ("window" if own_window else policy.name)
        layers.append(layer)
    if config._attn_implementation == IMPLEMENTATION and "_kvpop_previous" not in vars(model):
        raise ValueError(
            "this model shares its config with one that has a kvpop policy attached: detach that one first"
        )
    detach(model)  # only now: a policy that cannot be built leaves the model as it is
    for module, layer in zip(modules, layers):
        module.add_module(CHILD, layer)
        layer.attached = True
    model._kvpop_previous = config._attn_implementation
    config._attn_implementation = IMPLEMENTATION
    if isinstance(model, GenerationMixin):
        for name, function in generation_hooks(model).items():
            setattr(model, name, MethodType(function, model))
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Take the policy off: the model is as it was before ``attach``. Does nothing if none is attached."""
    for module in attention_modules(model):
        if hasattr(module, CHILD):
            getattr(module, CHILD).attached = False
            delattr(module, CHILD)
    if "_kvpop_previous" in vars(model):
        model.config.get_text_config()._attn_implementation = vars(model)["_kvpop_previous"]
        del model._kvpop_previous
        for name in HOOKS:
            vars(model).pop(name, None)
    return model

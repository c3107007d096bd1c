"""Attach a policy to a model and take it off again.

Scorers become children of the attention modules, under the name ``kvpop``: state dicts, devices and sharding follow the model.
One attention function and one mask function are registered with transformers on first use. Nothing is patched at import.
"""

from __future__ import annotations

import inspect
import sys
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.masking_utils import AttentionMaskInterface

from kvpop.cache import IMPLEMENTATION, BoundedCache
from kvpop.documents import Documents
from kvpop.policies import LayerPolicy, LayerShape, Policy, SequencePass
from kvpop.policies.base import HANDOVER, Rotary
from kvpop.policies.window import WindowLayer

CHILD = "kvpop"


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
    if given is not None and given[0] is not policy:
        raise ValueError("the cache belongs to another model: make a BoundedCache of this one")
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
    if given is not None:
        if kvpop is not None:
            raise ValueError(
                "packed documents and observers are for cache-free passes: call the model with use_cache=False"
            )
        out = given[1].attend(query, key, value, attention_mask, scale)
    else:
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                f"{key.shape[2]} cached keys for {query.shape[2]} queries: with a policy attached the cache must be a "
                "kvpop.BoundedCache(model)"
            )
        if kvpop is None:
            kvpop = SequencePass(_documents(query, attention_mask, kwargs.get("position_ids")))
        out = policy.attend_sequence(query, key, value, scale, kvpop)
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
    *, q_length: int, kv_length: int, attention_mask: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """The registered mask function: which of the q_length new tokens are real, [B, q_length]; None if all are."""
    if attention_mask is None:
        return None
    covered, new = attention_mask.shape[-1], int(q_length)
    mask = attention_mask[:, -new:].bool()
    if torch.compiler.is_compiling() or (new == 1 and mask.device.type != "cpu"):
        return mask  # no look at its values: that would wait for the device
    if covered not in (new, int(kv_length)):
        raise ValueError(
            f"the attention mask covers {covered} tokens, but {int(kv_length)} were given, {new} of them new"
        )
    return None if mask.shape[1] == new and bool(mask.all()) else mask


def attention_modules(model: nn.Module) -> list[Any]:
    """Attention modules of a decoder in layer order: those that go through the transformers attention interface."""
    found: list[Any] = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "num_key_value_groups")]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention modules with layer_idx and num_key_value_groups: it does not go "
            "through the transformers attention interface"
        )
    return sorted(found, key=lambda m: m.layer_idx)


def _rotary(model: nn.Module, kind: str) -> Rotary | None:
    module = next((m for name, m in model.named_modules() if name.endswith("rotary_emb")), None)
    rope = getattr(module, "rope_type", "default")
    rope = rope.get(kind) if isinstance(rope, dict) else rope
    if module is None or rope in ("dynamic", "longrope"):
        return None  # frequencies that depend on the length of the input: no fixed rotation by a distance
    if not _turns_halves(model):
        return None
    by_kind = {"layer_type": kind} if "layer_type" in inspect.signature(module.forward).parameters else {}
    scaling = getattr(module, f"{kind}_attention_scaling" if by_kind else "attention_scaling", 1.0)

    def cos_sin(position_Bn: Tensor) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, dtype=torch.float32, device=position_Bn.device)
        cos, sin = module(like, position_Bn, **by_kind)
        return cos / scaling, sin / scaling

    return cos_sin


def cache_argument(model: nn.Module) -> str:
    """The name under which this transformers release takes a cache: "cache" (newer) or "past_key_values"."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _turns_halves(model: nn.Module) -> bool:
    """Whether the model's own rotary embedding pairs channel i with channel i + D/2, as ``rotate_back`` does."""
    source = sys.modules[type(attention_modules(model)[0]).__module__]
    apply = getattr(source, "apply_rotary_pos_emb", None)
    if apply is None:
        return False
    x, angle = torch.arange(1.0, 9.0).view(1, 1, 1, 8), torch.full((1, 1, 8), 0.5)
    halves = x * angle.cos() + torch.cat([-x[..., 4:], x[..., :4]], dim=-1) * angle.sin()
    try:
        return torch.allclose(apply(x, x, angle.cos(), angle.sin())[0], halves)
    except (TypeError, RuntimeError):
        return False


def attached_policies(model: nn.Module) -> list[LayerPolicy]:
    """The layer policies of a model, in layer order; empty if nothing is attached."""
    return [getattr(m, CHILD) for m in attention_modules(model) if hasattr(m, CHILD)]


def attach(model: PreTrainedModel, policy: Policy) -> PreTrainedModel:
    """Put ``policy`` on every attention layer of ``model``, in place of one attached before; returns the model.

    Afterwards a cache-free forward pass runs under the policy's mask, and ``generate`` uses a ``BoundedCache``. Weights are
    not touched. Raises ValueError for models that do not go through the attention interface or that have sliding layers.
    """
    modules = attention_modules(model)
    config = model.config.get_text_config()
    kinds = _kinds(model, config, modules)
    policy.check(len(modules))
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)
    layers = []
    for module, kind in zip(modules, kinds):
        weight = next(module.parameters())
        shape = LayerShape(
            layer=module.layer_idx,
            heads=config.num_attention_heads,
            kv_heads=config.num_attention_heads // module.num_key_value_groups,
            head_dim=module.head_dim,
            rotary=_rotary(model, kind),
        )
        own_window = kind == "sliding_attention"
        layer = (WindowLayer(shape, config.sliding_window) if own_window else policy.layer(shape)).to(weight.device)
        if weight.dtype == torch.float64:
            layer = layer.double()
        layers.append(layer)
    detach(model)  # only now: a policy that cannot be built leaves the model as it is
    for module, layer in zip(modules, layers):
        module.add_module(CHILD, layer)
        layer.attached = True
    model._kvpop_previous = model.config._attn_implementation
    model.config._attn_implementation = IMPLEMENTATION
    name = cache_argument(model)

    def prepare_cache(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        mode = next((a for a in (*args, *kwargs.values()) if isinstance(a, GenerationMode)), None)
        rollback = _rollback(mode, generation_config, model_kwargs, name)
        if model_kwargs.get(name) is None and generation_config.use_cache is not False:
            if generation_config.cache_implementation is not None:
                raise ValueError(
                    f"cache_implementation={generation_config.cache_implementation!r} cannot be used while a kvpop policy "
                    "is attached: leave it unset"
                )
            model_kwargs[name] = BoundedCache(self, rollback=rollback)
        return type(self)._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs)

    setattr(model, "_prepare_cache_for_generation", MethodType(prepare_cache, model))  # noqa: B010
    return model


def _rollback(mode: Any, generation_config: Any, model_kwargs: dict[str, Any], name: str) -> int:
    """How many tokens a cache must be able to take back for this way of generating; ValueError if a given one cannot."""
    if mode != GenerationMode.ASSISTED_GENERATION:
        return 0
    schedule = generation_config.num_assistant_tokens_schedule
    if schedule not in (None, "constant") and generation_config.prompt_lookup_num_tokens is None:
        raise ValueError(
            f"num_assistant_tokens_schedule={schedule!r} lets the draft grow without bound, and with it what must be rolled "
            "back: set it to 'constant'"
        )
    drafts = (generation_config.prompt_lookup_num_tokens, generation_config.num_assistant_tokens, 20)
    rollback = next(n for n in drafts if n) + 1
    given = model_kwargs.get(name)
    if isinstance(given, BoundedCache) and (have := min(layer.rollback for layer in given.bounded_layers)) < rollback:
        raise ValueError(
            f"assisted decoding takes back up to {rollback} tokens, but this cache can take back {have}: make it with "
            f"BoundedCache(model, rollback={rollback})"
        )
    return rollback


def _kinds(model: PreTrainedModel, config: Any, modules: list[Any]) -> list[str]:
    """What kind of attention each layer has; ValueError names what is missing for a model that does not fit."""
    name = type(model).__name__
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if sliding else "full_attention"] * len(modules)
    for field in ("attn_logit_softcapping", "attention_sinks", "use_bidirectional_attention"):
        if getattr(config, field, None):
            raise ValueError(f"{name} has {field} {getattr(config, field)}, which kvpop does not support yet")
    for module in modules:
        if not hasattr(module, "head_dim") or not hasattr(module, "scaling"):
            raise ValueError(
                f"{type(module).__name__} has no head_dim: only attention with one key and value per KV head fits"
            )
        if kinds[module.layer_idx] not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"layer {module.layer_idx} of {name} is {kinds[module.layer_idx]}: only full_attention layers can be "
                "bounded, and only sliding_attention layers left as they are"
            )
        if next(module.parameters()).device.type == "meta":
            raise ValueError(
                f"the weights of layer {module.layer_idx} of {name} are offloaded: attach needs them on a device"
            )
    found = [kinds[module.layer_idx] for module in modules]
    if "full_attention" not in found:
        raise ValueError(
            f"all layers of {name} are sliding_attention (sliding_window {config.sliding_window}): nothing to bound"
        )
    return found


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Take the policy off: the model is as it was before ``attach``. Does nothing if none is attached."""
    for module in attention_modules(model):
        if hasattr(module, CHILD):
            getattr(module, CHILD).attached = False
            delattr(module, CHILD)
    if "_kvpop_previous" in vars(model):
        model.config._attn_implementation = vars(model)["_kvpop_previous"]
        del model._kvpop_previous
        del model._prepare_cache_for_generation
    return model

"""What can be known about a model from its classes: where its attention is, of what kind, and whether a policy fits."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpop.policies import LayerPolicy
from kvpop.policies.base import Rotary

CHILD = "kvpop"


def attention_modules(model: nn.Module) -> list[Any]:
    """Attention modules of a decoder in layer order: those that go through the transformers attention interface."""
    found: list[Any] = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "num_key_value_groups")]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention modules with layer_idx and num_key_value_groups: only decoders that "
            "are built like Llama, and go through the transformers attention interface, can be bounded"
        )
    return sorted(found, key=lambda m: m.layer_idx)


def rotary_module(model: nn.Module) -> Any:
    return next((m for name, m in model.named_modules() if name.endswith("rotary_emb")), None)


def rope_type(model: nn.Module, kind: str = "full_attention") -> str:
    rope = getattr(rotary_module(model), "rope_type", "default")
    return rope.get(kind, "default") if isinstance(rope, dict) else rope


@dataclass
class ModelRotary:
    """A model's own rotary embedding, unscaled; copied together with the model."""

    module: nn.Module
    by_kind: dict[str, str]
    scaling: float

    def __call__(self, position_Bn: Tensor) -> tuple[Tensor, Tensor]:
        like = torch.empty(0, dtype=torch.float32, device=position_Bn.device)
        cos, sin = self.module(like, position_Bn, **self.by_kind)
        return cos / self.scaling, sin / self.scaling


def rotary_of(model: nn.Module, kind: str) -> Rotary | None:
    module = rotary_module(model)
    if module is None or rope_type(model, kind) in ("dynamic", "longrope"):
        return None  # frequencies that depend on the length of the input: no fixed rotation by a distance
    if not _turns_halves(model):
        return None
    by_kind = {"layer_type": kind} if "layer_type" in inspect.signature(module.forward).parameters else {}
    scaling = getattr(module, f"{kind}_attention_scaling" if by_kind else "attention_scaling", 1.0)
    return ModelRotary(module, by_kind, scaling)


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


def attention_kinds(model: PreTrainedModel, config: Any, modules: list[Any]) -> list[str]:
    """What kind of attention each layer has; ValueError names what is missing for a model that does not fit."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder: only decoders can be bounded")
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
    for field in ("attn_logit_softcapping", "attention_sinks", "use_bidirectional_attention"):
        if getattr(config, field, None):
            raise ValueError(f"{name} has {field} {getattr(config, field)}, which kvpop does not support yet")
    for i, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"layer {i} of {name} is {kind}: only full_attention layers can be bounded, and only sliding_attention "
                "layers left as they are"
            )
    have = [module.layer_idx for module in modules]
    if have != list(range(config.num_hidden_layers)):
        raise ValueError(
            f"{name} has {config.num_hidden_layers} layers, but attention modules for layers {have}: every layer must have "
            "one of its own"
        )
    if (loops := getattr(config, "n_recurrent_loops", 1)) > 1:
        raise ValueError(f"{name} runs its layers {loops} times a token (n_recurrent_loops): each layer must run once")
    for module in modules:
        _check_module(name, module, config)
    if "full_attention" not in kinds:
        raise ValueError(
            f"all layers of {name} are sliding_attention (sliding_window {config.sliding_window}): nothing to bound"
        )
    return list(kinds)


def _check_module(name: str, module: Any, config: Any) -> None:
    layer, kind = module.layer_idx, type(module).__name__
    if not hasattr(module, "head_dim") or not hasattr(module, "scaling"):
        raise ValueError(f"{kind} has no head_dim: only attention with one key and value per KV head fits")
    forward = next(vars(c)["forward"] for c in type(module).__mro__ if "forward" in vars(c))
    source, known = _source(forward)
    if not known:
        raise ValueError(f"{kind} does not go through the transformers attention interface: nothing there to attach to")
    if (calls := len(re.findall(r"\battention_interface\(", source))) > 1:
        raise ValueError(f"{kind} calls the attention function {calls} times a layer: kvpop supports one call")
    if getattr(module, "sinks", None) is not None:
        raise ValueError(f"layer {layer} of {name} has learned attention sinks, which kvpop does not support yet")
    if getattr(module, "is_kv_shared_layer", False):
        raise ValueError(f"layer {layer} of {name} reads the keys of another layer: every layer must have its own")
    heads = getattr(module, "num_heads", config.num_attention_heads)
    if getattr(module, "num_key_value_heads", 0) not in (0, None, heads // module.num_key_value_groups):
        raise ValueError(
            f"{kind} has {heads} heads in groups of {module.num_key_value_groups}, but {module.num_key_value_heads} KV heads: "
            "it repeats keys in a way of its own"
        )
    if next(module.parameters()).device.type == "meta":
        raise ValueError(f"the weights of layer {layer} of {name} are offloaded: attach needs them on a device")


def _source(forward: Any) -> tuple[str, bool]:
    """The source text of a forward method ("" if there is none), and whether its file knows the attention interface."""
    forward = inspect.unwrap(forward)
    try:
        source = inspect.getsource(forward)
    except (OSError, TypeError):
        source = ""
    return source, "ALL_ATTENTION_FUNCTIONS" in getattr(forward, "__globals__", {})

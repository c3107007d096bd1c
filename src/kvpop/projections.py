"""Projections of one input as one product: q, k and v of an attention module, gate and up of an MLP.

A fused model has the modules, parameters and names that it had. The parameters of a group have become views of one tensor, its
rows in order; the first module of the group that is called computes the outputs of all, and the others take theirs. For
inference: with gradients enabled every module computes its own output from its own parameters.

On a GPU, products of few rows are those of ``ops.few_rows``, also of the modules that share their input with no other; in the
layers of ``LAYERS`` they take in the norms, the activation and the sums that stand around them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpop.cache import IMPLEMENTATION
from kvpop.ops.few_rows import Impl, Norm, counters, kernel_or_reference, linear, takes
from kvpop.ops.rotary import split_heads

# Shapes: E input features, F output features of a group, all modules together.

GROUPS = (
    ("self_attn", ("q_proj", "k_proj", "v_proj")),
    ("self_attn", ("o_proj",)),
    ("mlp", ("gate_proj", "up_proj")),
    ("mlp", ("down_proj",)),
)
"""Child of a decoder layer, and its projections of one input, in the order in which they are called."""

LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "SmolLM3DecoderLayer")
"""Decoder layers that are y = x + self_attn(norm(x)), y + mlp(norm(y)), RMSNorms, and mlp(x) = down(silu(gate(x)) * up(x))."""


ATTENTION = tuple(kind.replace("DecoderLayer", "Attention") for kind in LAYERS)
"""Their attention modules: heads by one product each, RMSNorms of q and k or none, a rotation, a cache, a function, o_proj."""
NORMS = ("q_norm", "k_norm")


class Group:
    """Linear modules that are called with the same input, the first of them first, and the tensors their parameters are of.

    Without a ``weight_FE`` it is no group any more: that is how one comes out of ``copy.deepcopy`` or a pickle, where
    parameters are tensors of their own.
    """

    weight_FE: Tensor | None
    bias_F: Tensor | None
    arrived: Tensor | None
    """What the kernel counts with: of this group alone, whose products come one after the other."""
    stash: tuple[Tensor, list[int] | None, tuple[Tensor, ...]] | None
    """An input, ``state`` at that time, and the outputs of all; from the call of the first module to that of the last."""

    def __init__(self, modules: Sequence[Any]) -> None:
        self.modules = tuple(modules)
        self.stash = None
        self.sizes = tuple(module.out_features for module in modules)
        self.weight_FE = _together([module.weight for module in modules])
        self.bias_F = None if modules[0].bias is None else _together([module.bias for module in modules])
        self.arrived = counters(modules[0].weight, len(self.weight_FE))
        self.starts = [p.data_ptr() for p in self.parameters()]
        for part, module in enumerate(modules):
            module.__class__ = FusedLinear
            module.group, module.part = self, part

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | dict.fromkeys(("weight_FE", "bias_F", "arrived", "stash"))

    def parameters(self) -> list[Tensor]:
        return [p for module in self.modules for p in module._parameters.values() if p is not None]

    def intact(self) -> bool:
        """Whether the parameters still are the rows of the group's tensors: those of a module that moved are not. (While it has
        these tensors, nothing else is at their addresses.)"""
        return [p.data_ptr() for p in self.parameters()] == self.starts

    def state(self, x: Tensor) -> list[int] | None:
        """Changes in place so far of an input and the parameters; None if nobody counts them, or outputs cannot be shared."""
        if x.is_inference() or not self.intact():
            return None
        return [x._version, *(p._version for p in self.parameters())]

    def dissolve(self) -> None:
        """The modules are plain ones again. Their parameters stay where they are."""
        self.weight_FE = self.bias_F = self.arrived = self.stash = None
        for module in self.modules:
            if type(module) is FusedLinear:
                module.__class__ = nn.Linear  # type: ignore[assignment]
                del module.group, module.part


class FusedLinear(nn.Linear):
    """A linear module of a group. Never the output of another input, or of other weights: what is stashed is taken only for
    the very tensor it was computed from, unchanged since (in eager mode changes are counted; traced, a group is one graph)."""

    group: Group
    part: int

    def forward(self, input: Tensor) -> Tensor:
        group, traced = self.group, torch.compiler.is_compiling()
        together = group.weight_FE is not None and not torch.is_grad_enabled() and type(self) is FusedLinear
        state = None if traced or not together else group.state(input)
        if not together or (state is None and not traced):
            return linear(input, self.weight, self.bias)
        if self.part == 0:
            impl = _impl(input, self.weight)
            product = linear(input, group.weight_FE, group.bias_F, arrived=group.arrived, impl=impl)  # type: ignore[arg-type]
            if len(group.sizes) == 1:
                return product
            outputs = product.split(group.sizes, -1)
            group.stash = input, state, outputs
            return outputs[0]
        stash = group.stash
        if stash is None or stash[0] is not input or stash[1] != state:
            return linear(input, self.weight, self.bias)
        if self.part == len(group.sizes) - 1:
            group.stash = None
        return stash[2][self.part]

    def _apply(self, fn: Any, recurse: bool = True) -> FusedLinear:
        super()._apply(fn, recurse)
        self._checked()
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._checked()

    def _checked(self) -> None:
        """A parameter that moved or was replaced ends the group; a compiled call sees that by the class of the module."""
        if self.group.weight_FE is not None and not self.group.intact():
            self.group.dissolve()


def fuse(model: PreTrainedModel) -> int:
    """One product for the q, k and v projections of a decoder layer, and one for gate and up; how many groups there are now.
    Where ``ops.few_rows`` has a kernel, other projections and the head are groups of one, and layers of a known kind ``step``.

    Left alone: modules that are not plain ``nn.Linear`` (quantised, LoRA, parametrised), have hooks or a forward of their own,
    differ in dtype, device, input features or in having a bias, and parameters that are tied, sharded or on the meta device.
    A group's weights move once, into one tensor; its old ones are let go of before the next group's are made. Fuse before
    anything is captured that reads them. Values may change in place meanwhile; a parameter that is moved or replaced ends its
    group. Layers that are compiled already do not see data given to it anew (``p.data = x``): unfuse first. What was captured
    of one fused model is not for several streams at the same time: its products count with the same counters.
    """
    settle(model)
    # Tied modules and parameters count twice, and so do tensors of one storage.
    tensors = [
        *(p for _, p in model.named_parameters(remove_duplicate=False)),
        *(b for _, b in model.named_buffers(remove_duplicate=False)),
    ]
    users = Counter(map(_storage, tensors))
    for layer in model.get_decoder().layers:
        for child, names in GROUPS:
            modules: list[Any] = [getattr(getattr(layer, child, None), name, None) for name in names]
            if len(names) == 1:
                _alone(modules[0])
            elif all(_plain(module) for module in modules) and _fit(modules, users):
                Group(modules)
        if _steps(layer):
            layer.forward = partial(step, layer)
    _alone(model.get_output_embeddings())
    return len(_groups(model))


def step(layer: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
    """A decoder layer whose products take in what stands around them, for few rows; else the layer's own forward pass."""
    few = not args and not layer.training and not torch.is_grad_enabled() and _whole(layer)
    if not few or _impl(hidden_states, layer.mlp.gate_proj.weight) != "triton":
        return type(layer).forward(layer, hidden_states, *args, **options)
    up, down = layer.mlp.gate_proj.group, layer.mlp.down_proj.group
    hidden_states = _attended(layer, hidden_states, **options)
    active = _of(up, hidden_states, norm=_norm(layer.post_attention_layernorm), gated=True)
    return _of(down, active, residual_O=hidden_states)


def _attended(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """x + self_attn(norm(x)), as the known kinds have it."""
    attention, config = layer.self_attn, layer.self_attn.config
    both = _of(attention.q_proj.group, hidden_states, norm=_norm(layer.input_layernorm))
    q_norm, k_norm = (None if (norm := getattr(attention, name, None)) is None else _norm(norm) for name in NORMS)
    rotary = position_embeddings if getattr(attention, "use_rope", True) else None
    heads = (config.num_attention_heads, config.num_key_value_heads)
    query, key, value = split_heads(both, *heads, rotary=rotary, q_norm=q_norm, k_norm=k_norm, impl="triton")
    named = "cache" if "cache" in options else "past_key_values"
    if (cache := options.pop(named, None)) is not None:
        given = {"kwargs": options} if named == "cache" else {}
        key, value = cache.update(key, value, attention.layer_idx, **given)
    window = (config if "Mistral" in type(attention).__name__ else attention, "sliding_window", None)
    attend = ALL_ATTENTION_FUNCTIONS[config._attn_implementation]
    out, _ = attend(
        attention, query, key, value, attention_mask, dropout=0.0, scaling=attention.scaling,
        sliding_window=getattr(*window), **options,
    )  # fmt: skip
    return _of(attention.o_proj.group, out.reshape(*hidden_states.shape[:-1], -1), residual_O=hidden_states)


def _of(group: Group, x: Tensor, **around: Any) -> Tensor:
    return linear(x, group.weight_FE, group.bias_F, **around, arrived=group.arrived, impl="triton")  # type: ignore[arg-type]


def _impl(input: Tensor, weight: Tensor) -> Impl:
    """How to multiply these: by the kernel only as they are, not as autocast would have them."""
    alike = (input.dtype, input.device) == (weight.dtype, weight.device)
    return kernel_or_reference(input) if alike and not torch.is_autocast_enabled(input.device.type) else "reference"


def _norm(module: Any) -> Norm:
    return module.weight, module.variance_epsilon


def _steps(layer: Any) -> bool:
    """Whether a layer is of a known kind, with all its groups."""
    known = type(layer).__name__ in LAYERS and type(getattr(layer, "self_attn", None)).__name__ in ATTENTION
    if not known or "forward" in vars(layer):
        return False
    return "silu" in type(layer.mlp.act_fn).__name__.lower() and _whole(layer)


def _whole(layer: Any) -> bool:
    """Whether nothing has come between or in place of the parts of a layer, and its attention function is one whose mask says
    all about it."""
    attention, mlp = layer.self_attn, layer.mlp
    if attention.config._attn_implementation not in ("sdpa", IMPLEMENTATION):
        return False
    reads, inner = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
    projections = (*reads, attention.o_proj, *inner, mlp.down_proj)
    if any(type(module) is not FusedLinear or module.group.weight_FE is None for module in projections):
        return False
    if reads[0].group.modules != reads or inner[0].group.modules != inner:
        return False
    if not torch.compiler.is_compiling() and not all(module.group.intact() for module in projections):
        return False
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [norm for norm in (getattr(attention, name, None) for name in NORMS) if norm is not None]
    if any(not hasattr(norm, "variance_epsilon") or norm.weight.dtype != mlp.gate_proj.weight.dtype for norm in norms):
        return False
    passed = (*norms, attention, mlp, mlp.act_fn, *projections)
    return not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in passed)


def _alone(module: Any) -> None:
    """A group of one, which moves nothing, if that is worth it."""
    if _plain(module) and takes(module.weight) and not module.weight.is_inference():
        Group([module])


def is_fused(model: PreTrainedModel) -> bool:
    """Whether any projections are."""
    return bool(_groups(model))


def settle(model: PreTrainedModel) -> None:
    """Groups whose parameters are elsewhere by now (``p.data = x``) are no groups any more."""
    for group in _groups(model):
        if group.weight_FE is None or not group.intact():
            group.dissolve()


def unfuse(model: PreTrainedModel) -> None:
    """Undo ``fuse``: plain modules, with the same parameter objects, which stay views of one tensor a group. Nothing moves, so
    that what was captured meanwhile goes on reading the model's weights; fusing again copies nothing."""
    for group in _groups(model):
        group.dissolve()
    for layer in model.get_decoder().layers:
        if isinstance(own := vars(layer).get("forward"), partial) and own.func is step:
            del layer.forward


@contextmanager
def fused(model: PreTrainedModel) -> Iterator[None]:
    """Projections are fused for the calls inside, and stay so if they were before. What is captured inside may be replayed
    afterwards."""
    mine = not is_fused(model)
    fuse(model)
    try:
        yield
    finally:
        if mine:
            unfuse(model)


def _groups(model: nn.Module) -> list[Group]:
    return list({id(m.group): m.group for m in model.modules() if isinstance(m, FusedLinear)}.values())


def _storage(tensor: Tensor) -> int:
    return 0 if tensor.is_meta or type(tensor.data) is not Tensor else tensor.untyped_storage().data_ptr()


def _plain(module: Any) -> bool:
    if type(module) is not nn.Linear or "forward" in vars(module) or module._compiled_call_impl is not None:
        return False
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return not any(hooks) and all(
        type(p) is nn.Parameter and type(p.data) is Tensor and p.is_floating_point() and p.is_contiguous()
        for p in module.parameters()
    )


def _fit(modules: Sequence[nn.Linear], users: Counter[int]) -> bool:
    """Whether the parameters of plain modules can become rows of one tensor, and nobody else has them."""
    alike = {(m.in_features, *((p.dtype, p.device) for p in m.parameters())) for m in modules}
    if len(alike) > 1 or any(p.is_meta or p.is_inference() for m in modules for p in m.parameters()):
        return False
    kinds: list[list[Tensor]] = [[m.weight for m in modules], [m.bias for m in modules if m.bias is not None]]
    return all(
        all(users[_storage(p)] == 1 for p in parameters)
        or (_are_rows(parameters) and users[_storage(parameters[0])] == len(parameters))
        for parameters in kinds
        if parameters
    )


def _are_rows(parameters: Sequence[Tensor]) -> bool:
    """Whether tensors of one dtype lie one behind the other in one storage."""
    sizes = [p.numel() * p.element_size() for p in parameters]
    starts = accumulate(sizes[:-1], initial=parameters[0].data_ptr())
    return (
        all(p.data_ptr() == start for p, start in zip(parameters, starts)) and len(set(map(_storage, parameters))) == 1
    )


@torch.no_grad()
def _together(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor whose rows parameters are: the one they lie in already, else a new one that they become views of."""
    first, rows = parameters[0].data, [len(p) for p in parameters]
    if _are_rows(parameters):
        return first.as_strided((sum(rows), *first.shape[1:]), first.stride())
    with torch.inference_mode(False):
        together = torch.cat([p.data for p in parameters])
        for p, part in zip(parameters, together.split(rows)):
            p.data = part
    return together

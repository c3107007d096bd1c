"""Low-rank changes of a model's own weights, with peft: in place, so that the model stays a transformers model.

Every targeted linear layer is replaced by one that holds it as ``base_layer`` beside ``lora_A`` and ``lora_B``. On disk they
are a plain peft adapter (``adapter_config.json``, ``adapter_model.safetensors``), which peft alone reads, too.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpop.architecture import CHILD
from kvpop.weights import AdapterError, check_tensors, copy_into, read_tensors, write_tensors

if TYPE_CHECKING:
    from peft import LoraConfig

LORA_CONFIG, LORA_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = "default"
"""Of the adapter inside the model: part of its parameters' names, ``...q_proj.lora_A.default.weight``."""


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError("LoRA needs the package peft: pip install 'kvpop[lora]'") from error
    return peft


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The LoRA parameters of a model by name; empty if it has none."""
    return {name: p for name, p in model.named_parameters() if ".lora_" in name}


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that carry LoRA parameters, by module name."""
    if not lora_parameters(model):
        return {}
    layers = _peft().tuners.lora.LoraLayer
    return {name: module for name, module in model.named_modules() if isinstance(module, layers)}


def linear_names(model: PreTrainedModel) -> list[str]:
    """What ``targets`` may name: the last part of the names of the decoder's linear layers, in order of appearance."""
    names = [n for n, m in model.get_decoder().named_modules() if isinstance(m, nn.Linear) and f".{CHILD}." not in n]
    return list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names))


def inject(
    model: PreTrainedModel, rank: int = 16, alpha: float | None = None, targets: Sequence[str] = ()
) -> list[str]:
    """Put trainable low-rank matrices beside the linear layers called ``targets``; returns their parameters' names.

    ``rank``: columns of each matrix; the change is ``alpha / rank`` x B A (``alpha``: 2 x rank unless given), zero at the
    start. No ``targets``: every linear layer of the decoder. The matrices are float32 where the model has fewer bits, drawn
    from torch's generator. All other parameters keep their ``requires_grad``.

    Raises ValueError for a rank or alpha that is not positive, unknown targets, and a model that has LoRA layers already.
    """
    alpha = 2 * rank if alpha is None else alpha
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    if not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")
    config = _peft().LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(targets) or linear_names(model),
        task_type="CAUSAL_LM",
    )
    return _inject(model, config)


def _inject(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    if lora_parameters(model):
        raise ValueError("the model has LoRA layers already: take them off with kvpop.lora.remove(model)")
    known = linear_names(model)
    wanted = config.target_modules or ()
    strange = [wanted] if isinstance(wanted, str) else sorted(set(wanted) - set(known))
    if strange or not wanted:
        raise ValueError(f"no linear layers for LoRA are called {strange}; the model has {', '.join(known)}")
    trained = {p: p.requires_grad for p in model.parameters()}
    scorers = any(f".{CHILD}." in name for name, _ in model.named_modules())
    config.exclude_modules = rf".*\.{CHILD}\..*" if scorers else None  # peft warns of an exclusion that matches nothing
    _peft().inject_adapter_in_model(config, model, adapter_name=NAME)
    for p, wanted_before in trained.items():
        p.requires_grad_(wanted_before)  # peft freezes whatever is not its own
    for p in lora_parameters(model).values():
        if p.dtype in (torch.bfloat16, torch.float16):
            p.data = p.data.float()
    return list(lora_parameters(model))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model is what it was before ``inject``, bit for bit: its own teacher. Also for a model without LoRA."""
    layers = lora_layers(model)
    trained = {p: p.requires_grad for p in lora_parameters(model).values()}
    try:
        for layer in layers.values():
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers.values():
            layer.enable_adapters(True)
        for p, wanted in trained.items():
            p.requires_grad_(wanted)  # peft sets it, too


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the targeted layers with their change added, by the names of the plain model, in the model's dtype."""
    merged = {}
    for name, layer in lora_layers(model).items():
        weight = layer.get_base_layer().weight
        merged[f"{name}.weight"] = weight + layer.get_delta_weight(NAME).to(weight)
    return merged


def remove(model: PreTrainedModel, *, merge: bool = False) -> PreTrainedModel:
    """Take the LoRA layers off; ``merge`` leaves their change in the weights. Does nothing without LoRA; returns the model."""
    layers, merged = lora_layers(model), merged_weights(model) if merge else {}
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        base = layer.get_base_layer()
        if merge:
            base.weight.data.copy_(merged[f"{name}.weight"])
        setattr(model.get_submodule(parent), child, base)
    vars(model).pop("peft_config", None)
    return model


def _on_disk(name: str) -> str:
    return "base_model.model." + name.replace(f".{NAME}.", ".")


def save(model: PreTrainedModel, directory: str | Path, *, model_id: str | None = None) -> None:
    """Write the LoRA layers of ``model`` as a peft adapter. Raises ValueError if it has none."""
    parameters = lora_parameters(model)
    if not parameters:
        raise ValueError("the model has no LoRA layers to save: kvpop.lora.inject puts them in")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / LORA_WEIGHTS, {_on_disk(name): p for name, p in parameters.items()})
    config = copy.copy(model.peft_config[NAME])
    config.base_model_name_or_path, config.exclude_modules = model_id, None
    config.target_modules = sorted(config.target_modules)  # a set comes in another order every time
    config.save_pretrained(directory)


def load(model: PreTrainedModel, directory: str | Path, *, merge: bool = False) -> PreTrainedModel:
    """Put the peft adapter in ``directory`` into ``model``, or, with ``merge``, its change into the weights.

    Raises AdapterError naming what is missing, damaged or does not fit (also a model that has LoRA layers already); the model
    is then as it was.
    """
    directory = Path(directory)
    tensors = read_tensors(directory / LORA_WEIGHTS)
    config = _read_config(directory)
    try:
        _inject(model, config)
    except (ValueError, KeyError) as error:
        raise AdapterError(f"{directory / LORA_CONFIG} does not fit the model: {error}") from error
    own = {_on_disk(name): p for name, p in lora_parameters(model).items()}
    try:
        check_tensors(tensors, own, str(directory / LORA_WEIGHTS))
    except AdapterError:
        remove(model)
        raise
    copy_into(own, tensors)
    return remove(model, merge=True) if merge else model


def _read_config(directory: Path) -> LoraConfig:
    path = directory / LORA_CONFIG
    if not path.is_file():
        raise AdapterError(f"{directory} has no {LORA_CONFIG}")
    try:
        kind = json.loads(path.read_text()).get("peft_type")
        if kind != "LORA":
            raise AdapterError(f"{path} holds an adapter of type {kind!r}, expected 'LORA'")
        config = _peft().LoraConfig.from_pretrained(str(directory))
    except (json.JSONDecodeError, AttributeError, TypeError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    config.init_lora_weights = (
        True  # what is read overwrites it; other ways to start would change the model's own weights
    )
    for option in (
        "use_dora", "lora_bias", "modules_to_save", "layer_replication", "target_parameters", "trainable_token_indices",
    ):  # fmt: skip
        if value := getattr(config, option, None):
            raise AdapterError(f"{path} has {option} {value}: only plain LoRA is supported")
    return config

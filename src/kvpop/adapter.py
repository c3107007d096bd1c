"""What training leaves behind: a small directory with the scorers and a JSON that says exactly what they fit.

kvpop.json             format, model id and shapes, policy, budget, versions, training facts
scorers.safetensors    one entry per scorer tensor, layers.<i>.<name>
base.safetensors       only after full distillation: the changed weights of the model
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

import kvpop
from kvpop.attachment import CHILD, attach, attached_policies
from kvpop.budget import Budget
from kvpop.policies import ByLayer, KVpop, LayerPolicy, LayerShape, Policy

FORMAT = 1
CONFIG, SCORERS, BASE = "kvpop.json", "scorers.safetensors", "base.safetensors"


class AdapterError(ValueError):
    """An adapter directory that cannot be used, and why."""


@dataclass(frozen=True, eq=False)
class Trained(Policy):
    """A KVpop policy together with trained scorer tensors: attach it like any other policy."""

    policy: KVpop
    tensors: Mapping[str, Tensor]
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.policy.name

    @property
    def slots(self) -> int:
        return self.policy.slots

    def with_budget(self, budget: Budget) -> Trained:
        """The same scorers under another budget."""
        return dataclasses.replace(self, policy=dataclasses.replace(self.policy, budget=budget))

    def layer(self, shape: LayerShape) -> LayerPolicy:
        layer = self.policy.layer(shape)
        prefix = f"layers.{shape.layer}."
        given = {name.removeprefix(prefix): t for name, t in self.tensors.items() if name.startswith(prefix)}
        check_tensors(given, layer.state_dict(), f"layer {shape.layer}")
        if any(tensor.dtype == torch.float64 for tensor in given.values()):
            layer = layer.double()
        layer.load_state_dict(given)
        return layer


def check_tensors(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str) -> None:
    """AdapterError unless names and shapes agree; it lists what is missing, unexpected or of another shape."""
    missing, unexpected = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    if missing or unexpected:
        raise AdapterError(f"{where}: missing tensors {missing or 'none'}, unexpected tensors {unexpected or 'none'}")
    for name, tensor in wanted.items():
        if given[name].shape != tensor.shape:
            raise AdapterError(
                f"{where}: {name} has shape {tuple(given[name].shape)}, but this model needs {tuple(tensor.shape)}"
            )


def scorer_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The trained tensors of an attached policy, by layer: copies on the CPU."""
    return {
        f"layers.{policy.shape.layer}.{name}": tensor.detach().cpu().clone().contiguous()
        for policy in attached_policies(model)
        for name, tensor in policy.state_dict().items()
    }


def model_shape(model: Any) -> dict[str, int]:
    """The numbers a scorer must agree with."""
    config = model.config.get_text_config()
    policies = attached_policies(model)
    return {
        "layers": len(policies) or config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", config.num_attention_heads),
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    }


def write_json(path: Path, value: Any) -> None:
    """Write atomically: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2))
    os.replace(temporary, path)


def save_adapter(
    model: PreTrainedModel, policy: KVpop, directory: str | Path, *, model_id: str, training: dict[str, Any] | None = None,
    with_base: bool = False,
) -> Path:  # fmt: skip
    """Write the adapter of a model that has ``policy`` attached. ``with_base`` adds the model's own (changed) weights."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(scorer_tensors(model), directory / SCORERS)
    if with_base:
        save_file({n: t.detach().cpu().contiguous() for n, t in base_tensors(model).items()}, directory / BASE)
    write_json(
        directory / CONFIG,
        {
            "format": FORMAT,
            "model": {"id": model_id, "type": model.config.model_type, **model_shape(model)},
            "policy": {"name": "kvpop", **dataclasses.asdict(policy)},
            "base_weights": BASE if with_base else None,
            "versions": {
                "kvpop": kvpop.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "training": training or {},
        },
    )
    return directory


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's own parameters, tied ones once, scorers left out."""
    return {name: p for name, p in model.named_parameters() if f".{CHILD}." not in name}


def read_config(directory: str | Path) -> dict[str, Any]:
    """The JSON of an adapter, checked for its format. Raises AdapterError or FileNotFoundError."""
    path = Path(directory) / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{directory} is not a kvpop adapter: it has no {CONFIG}")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise AdapterError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{path} holds a {type(config).__name__}, expected a JSON object")
    if config.get("format") != FORMAT:
        raise AdapterError(f"{path} has format {config.get('format')!r}; this version of kvpop reads format {FORMAT}")
    for key in ("model", "policy"):
        if not isinstance(config.get(key), dict):
            raise AdapterError(f"{path} has no {key!r} section")
    if config["policy"].get("name") != "kvpop":
        raise AdapterError(f"{path} holds policy {config['policy'].get('name')!r}, expected 'kvpop'")
    policy = config["policy"]
    if "budget" not in policy:
        raise AdapterError(f"{directory}: the policy has no budget")
    try:
        Budget(**policy["budget"])
    except (TypeError, ValueError) as error:
        raise AdapterError(f"{directory}: the budget {policy['budget']} cannot be used: {error}") from error
    if not isinstance(policy.get("decay_range", []), list):
        raise AdapterError(f"{directory}: decay_range must be a list of two numbers, got {policy['decay_range']!r}")
    return config


def load_policy(directory: str | Path, budget: Budget | None = None) -> Trained:
    """The trained policy in ``directory``, at its own budget or at ``budget``. Raises AdapterError or FileNotFoundError."""
    config = read_config(directory)
    fields = {key: value for key, value in config["policy"].items() if key != "name"}
    known = {field.name for field in dataclasses.fields(KVpop)}
    if fields.keys() - known:
        raise AdapterError(f"{directory}: unknown policy settings {sorted(fields.keys() - known)}")
    if "decay_range" in fields:
        fields["decay_range"] = tuple(fields["decay_range"])
    fields["budget"] = Budget(**fields["budget"]) if budget is None else budget
    return Trained(KVpop(**fields), read_tensors(Path(directory) / SCORERS))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises AdapterError if it is not there or damaged."""
    if not path.is_file():
        raise AdapterError(f"{path.parent} has no {path.name}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error


def load(
    base_model: str | PreTrainedModel,
    directory: str | Path,
    *,
    budget: Budget | None = None,
    layers: Mapping[int, Budget | Policy] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """The model with its trained policy attached: ``generate`` now uses a bounded cache.

    ``base_model`` is a loaded model or a name for ``kvpop.models.load_base`` (``options``: dtype, device). ``budget``
    overrides the one it was trained for; ``layers`` gives single layers another budget, or another policy such as
    ``Dense()``. Raises AdapterError naming what does not fit: format, model shapes, tensors; the
    model is then as it was.
    """
    config = read_config(directory)
    trained = load_policy(directory, budget)
    if isinstance(base_model, str):
        from kvpop.models import load_base

        model, _ = load_base(base_model, **options)
    else:
        model = base_model
    here: dict[str, Any] = {"type": model.config.model_type, **model_shape(model)}
    there = {key: config["model"].get(key) for key in here}
    wrong = [f"{key} {there[key]} in the adapter, {here[key]} in the model" for key in here if here[key] != there[key]]
    if wrong:
        raise AdapterError(f"{directory} was trained for {config['model'].get('id')}: {'; '.join(wrong)}")
    known = {f"layers.{layer}." for layer in range(int(here["layers"]))}
    stray = sorted(n for n in trained.tensors if ".".join(n.split(".")[:2]) + "." not in known)
    if stray:
        raise AdapterError(f"{directory}: unexpected tensors {stray}")
    weights: dict[str, Tensor] = {}
    if config.get("base_weights"):
        weights = read_tensors(Path(directory) / config["base_weights"])
        check_tensors(weights, base_tensors(model), "base weights")
    others = {i: trained.with_budget(p) if isinstance(p, Budget) else p for i, p in (layers or {}).items()}
    attach(model, ByLayer(trained, others))  # checks the scorers; with nothing left to fail, the model is changed
    own = base_tensors(model)
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
    return model

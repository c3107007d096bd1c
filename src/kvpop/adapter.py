"""What training leaves behind: a small directory with the scorers and a JSON that says exactly what they fit.

kvpop.json             format, model id, shapes and fingerprint, policy, versions, training facts
scorers.safetensors    one entry per tensor the policy learned, layers.<i>.<name>; none if it learned nothing itself

curves.safetensors     what budgets by head come from, if heads share the budget unequally

and, if training changed the model's own weights, either of

base.safetensors       all of them; beyond 5 GB in shards, base-00001-of-0000n.safetensors and base.safetensors.index.json
adapter_*              low-rank changes: a plain peft adapter
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import kvpop
from kvpop import lora
from kvpop.allocation import CURVES, read_curves, write_curves
from kvpop.attachment import attach, attached_policies
from kvpop.budget import Budget
from kvpop.hub import CONFIG, SCORERS, adapter_directory, pretrained
from kvpop.policies import ByLayer, Policy
from kvpop.trained import TRAINABLE, Trained, learned_tensors, policy_from, recipe_of, settings_of
from kvpop.weights import (
    BASE,
    BASE_INDEX,
    SHARD_BYTES,
    AdapterError,
    base_fingerprint,
    base_tensors,
    check_tensors,
    copy_into,
    fingerprint,
    read_base,
    read_tensors,
    shard_files,
    write_base,
    write_json,
    write_tensors,
)

__all__ = [
    "BASE", "BASE_INDEX", "CONFIG", "SCORERS", "TRAINABLE", "AdapterError", "Trained", "adapter_directory", "adapter_files",
    "base_fingerprint", "base_tensors", "changed_weights", "check_tensors", "fingerprint", "load", "load_policy",
    "model_shape", "pretrained", "read_config", "read_tensors", "save_adapter", "scorer_tensors", "write_json",
]  # fmt: skip

FORMAT = 1


def scorer_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that an attached policy learned, by layer: copies on the CPU."""
    return {
        f"layers.{policy.shape.layer}.{name}": tensor.detach().cpu().clone().contiguous()
        for policy in attached_policies(model)
        for name, tensor in learned_tensors(policy).items()
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


def save_adapter(
    model: PreTrainedModel, policy: Policy, directory: str | Path, *, model_id: str, training: dict[str, Any] | None = None,
    with_base: bool = False, base: Mapping[str, Tensor] | None = None, trained_from: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:  # fmt: skip
    """Write the adapter of a model that has ``policy`` attached, kvpop.json last.

    LoRA layers in the model are part of it. ``with_base`` adds the model's own (changed) weights, in files of at most
    ``shard_bytes``; ``base``: those weights, where the model holds only its share of them. ``trained_from``: the
    ``base_fingerprint`` of the model before training; needed only with ``with_base``, otherwise the model still has those
    weights. Raises ValueError for a policy that adapters do not hold or that is not attached, and for ``with_base`` of a
    model with LoRA layers; AdapterError if ``base`` is not what the model has.
    """
    curves, policy = policy.curves if isinstance(policy, Trained) else None, recipe_of(policy)
    settings, low_rank = settings_of(policy), bool(lora.lora_parameters(model))
    if not attached_policies(model):
        raise ValueError(f"there is nothing to save: {policy.name} is not attached to the model")
    if with_base and low_rank:
        raise ValueError(
            "with_base saves changed weights, but this model has LoRA layers, which leave its weights as they are"
        )
    own = base_tensors(model)
    if base is not None:
        check_tensors(base, own, "base weights")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    scorers = scorer_tensors(model)
    if scorers:
        write_tensors(directory / SCORERS, scorers)
    if curves is not None:
        write_curves(directory / CURVES, curves)
    base_weights = write_base(base or own, directory, shard_bytes) if with_base else None
    versions = {"kvpop": kvpop.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    if low_rank:
        lora.save(model, directory, model_id=model_id)
        base_weights = lora.LORA_WEIGHTS
    weights = trained_from if trained_from or with_base else base_fingerprint(model)
    write_json(
        directory / CONFIG,
        {
            "format": FORMAT,
            "model": {"id": model_id, "type": model.config.model_type, **model_shape(model), "weights": weights},
            "policy": settings,
            "scorers": SCORERS if scorers else None,
            "base_weights": base_weights,
            "versions": versions,
            "training": training or {},
        },
    )
    return directory


def read_config(directory: str | Path) -> dict[str, Any]:
    """The JSON of an adapter, checked. Raises AdapterError or FileNotFoundError."""
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
    policy_from(config["policy"], str(path))
    config.setdefault("scorers", SCORERS)
    for key, known in (("scorers", (SCORERS,)), ("base_weights", (BASE, BASE_INDEX, lora.LORA_WEIGHTS))):
        if config.get(key) not in (None, *known):
            raise AdapterError(f"{path} has {key} {config[key]!r}, expected null or one of {', '.join(known)}")
    return config


def adapter_files(directory: str | Path) -> list[str]:
    """The files that an adapter consists of, as its JSON says. Raises AdapterError naming one that is not there."""
    directory = Path(directory)
    config = read_config(directory)
    names = [CONFIG] + ([SCORERS] if config["scorers"] else []) + ([CURVES] if (directory / CURVES).is_file() else [])
    base = config.get("base_weights")
    if base == lora.LORA_WEIGHTS:
        names += [lora.LORA_CONFIG, lora.LORA_WEIGHTS]
    elif base:
        names += sorted({base, *shard_files(directory, base)})
    for name in names:
        if not (directory / name).is_file():
            raise AdapterError(f"{directory} has no {name}")
    return names


def load_policy(directory: str | Path, budget: Budget | None = None, *, revision: str | None = None) -> Trained:
    """The trained policy of an adapter (see ``adapter_directory``), at its own budget or at ``budget``.

    The model's own weights, where training changed them, are not part of it: that is ``load``. Raises AdapterError or
    FileNotFoundError, and ValueError for a ``budget`` where the policy has none.
    """
    directory = adapter_directory(directory, revision)
    config = read_config(directory)
    tensors = read_tensors(directory / SCORERS) if config["scorers"] else {}
    curves = read_curves(directory / CURVES) if (directory / CURVES).is_file() else None
    wanted = (config["model"].get("layers"), config["model"].get("kv_heads"))
    if curves is not None and None not in wanted and tuple(curves.shape[:2]) != wanted:
        raise AdapterError(
            f"{directory / CURVES} has curves of {curves.shape[0]} layers with {curves.shape[1]} KV heads, the adapter is for "
            f"{wanted[0]} with {wanted[1]}"
        )
    trained = Trained(policy_from(config["policy"], str(directory)), tensors, curves=curves)
    return trained if budget is None else trained.with_budget(budget)


def load(
    base_model: str | PreTrainedModel,
    directory: str | Path,
    *,
    budget: Budget | None = None,
    layers: Mapping[int, Budget | Policy] | None = None,
    merge: bool = False,
    revision: str | None = None,
    **options: Any,
) -> PreTrainedModel:
    """The model with its trained policy attached, and its weights changed if training changed them: ``generate`` now uses a
    bounded cache.

    ``base_model`` is a loaded model or a name for ``kvpop.models.load_base`` (``options``: dtype, device). ``directory`` is
    what ``adapter_directory`` takes: a directory, "kvpop:smollm2", or a name on the hub, there at ``revision``. ``budget``
    overrides the one it was trained for; ``layers`` gives single layers another budget, or another policy such as
    ``Dense()``. ``merge`` adds LoRA to the weights instead of computing it beside them (faster, rounded to the model's
    dtype).

    Raises AdapterError naming what does not fit: format, model shapes, tensors, a model with LoRA layers; the model is then
    as it was. Warns if the adapter was trained on other weights than the model has.
    """
    directory = adapter_directory(directory, revision)
    config, trained = read_config(directory), load_policy(directory, budget)
    others = {i: trained.of_layer(i, p) if isinstance(p, Budget) else p for i, p in (layers or {}).items()}
    trained = trained.apart_from(others)
    if isinstance(base_model, str):
        from kvpop.models import load_base

        model, _ = load_base(base_model, **options)
    else:
        model = base_model
    weights = _fitting(model, directory, config, trained)
    if config.get("base_weights") == lora.LORA_WEIGHTS:
        lora.load(model, directory)
    try:
        attach(model, ByLayer(trained, others))  # checks the scorers; with nothing left to fail, the model is changed
    except BaseException:
        lora.remove(model)
        raise
    if merge:
        lora.remove(model, merge=True)
    copy_into(base_tensors(model), weights)
    return model


def changed_weights(model: PreTrainedModel, directory: str | Path) -> dict[str, Tensor] | None:
    """The weights that ``load`` would give ``model`` in place of its own, by name; LoRA merged; None if they stay.

    The model is left as it is. Raises as ``load`` does.
    """
    directory = adapter_directory(directory)
    config = read_config(directory)
    weights = _fitting(model, directory, config, load_policy(directory))
    if config.get("base_weights") == lora.LORA_WEIGHTS:
        lora.load(model, directory)
        weights = lora.merged_weights(model)
        lora.remove(model)
    return weights or None


def _fitting(model: PreTrainedModel, directory: Path, config: dict[str, Any], trained: Trained) -> dict[str, Tensor]:
    """The full base weights of an adapter (empty if it has none), after checking that it fits the model."""
    if lora.lora_parameters(model):
        raise AdapterError("the model has LoRA layers already: take them off with kvpop.lora.remove(model)")
    here: dict[str, Any] = {"type": model.config.model_type, **model_shape(model)}
    there = {key: config["model"].get(key) for key in here}
    wrong = [f"{key} {there[key]} in the adapter, {here[key]} in the model" for key in here if here[key] != there[key]]
    if wrong:
        raise AdapterError(f"{directory} was trained for {config['model'].get('id')}: {'; '.join(wrong)}")
    known = {f"layers.{layer}." for layer in range(int(here["layers"]))}
    stray = sorted(n for n in trained.tensors if ".".join(n.split(".")[:2]) + "." not in known)
    if stray:
        raise AdapterError(f"{directory}: unexpected tensors {stray}")
    if config.get("base_weights") in (BASE, BASE_INDEX):  # these replace all that the model has
        weights = read_base(directory, config["base_weights"])
        check_tensors(weights, base_tensors(model), "base weights")
        return weights
    trained_from, own = config["model"].get("weights"), base_fingerprint(model)
    if trained_from and own and trained_from != own:
        warnings.warn(
            f"{directory} was trained on {config['model'].get('id')} with weights {trained_from}, this model has weights "
            f"{own}: it may keep other tokens than it was trained to keep",
            stacklevel=3,
        )
    return {}

"""A generation put away and taken up again: its whole state is constant in size, so it is a small file.

One safetensors file holds every tensor of a ``BoundedCache``, the ids that are not taken in yet and the state of the random
generator. It says which model and policy it belongs to, and nothing else will take it up. No code is stored.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import kvpop
from kvpop.attachment import attached_policies, attention_modules
from kvpop.cache import BoundedCache

FORMAT = 1
SAMPLES = 64
"""Values of each weight that enter the fingerprint."""


class SessionError(ValueError):
    """A session file that cannot be used, and why."""


@dataclass
class Session:
    """What goes on: the cache, ids [rows, n] that were chosen or typed but not taken in yet, and the generator of draws.

    ``save`` and ``load`` are exact: on the same kind of device, with the same versions, what follows is bit for bit what
    would have followed. What ``crop`` could take back is not kept.
    """

    cache: BoundedCache
    pending: Tensor | None = None
    generator: torch.Generator | None = None

    def save(self, path: str | Path, model: PreTrainedModel) -> None:
        """Write the session for ``model``, the model of its cache. The file appears whole or not at all.

        Raises SessionError for a cache that was never used or does not belong to the model.
        """
        layers = self.cache.bounded_layers
        if [layer.policy for layer in layers] != attached_policies(model):
            raise SessionError("this cache does not belong to the policy attached to the model")
        tensors: dict[str, Tensor] = {}
        for i, layer in enumerate(layers):
            if layer.slots is None:
                raise SessionError("an unused cache has nothing to save")
            tensors |= {f"layers.{i}.{name}": x for name, x in layer.slots.tensors().items()}
            tensors[f"layers.{i}.taken"] = layer.slots.taken
        if self.pending is not None:
            tensors["pending"] = self.pending
        if self.generator is not None:
            tensors["generator"] = self.generator.get_state()
        tensors = {name: x.detach().to("cpu").contiguous().clone() for name, x in tensors.items()}
        facts = belongs_to(model) | {
            "format": FORMAT,
            "rollback": min(layer.rollback for layer in layers),
            "versions": {"kvpop": kvpop.__version__, "torch": torch.__version__},
        }
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        half_written = path.with_name(path.name + ".part")
        save_file(tensors, half_written, metadata={"kvpop-session": json.dumps(facts)})
        os.replace(half_written, path)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel) -> Session:
        """The session at ``path``, ready to go on with ``model``, which must have the same weights and policy attached.

        Raises SessionError naming what does not fit: no session, another format, model, policy or budget, missing tensors.
        """
        facts, tensors = _read(Path(path))
        here = belongs_to(model)
        for what in ("model", "policy"):
            wrong = _differences(facts.get(what) or {}, here[what])
            if wrong:
                raise SessionError(f"{path} belongs to another {what}: {wrong}")
        cache = BoundedCache(model, rollback=facts.get("rollback", 0))
        for i, (layer, module) in enumerate(zip(cache.bounded_layers, attention_modules(model))):
            prefix = f"layers.{i}."
            own = {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
            for name in ("keys", "values", "position", "seen", "taken"):
                if name not in own:
                    raise SessionError(f"{path} has no tensor {prefix}{name}")
            device = next(module.parameters()).device
            own = {name: x.to(device) for name, x in own.items()}
            layer.lazy_initialization(own["keys"][:, :, :0], own["values"][:, :, :0])
            assert layer.slots is not None
            if "pins" in own:
                layer.slots.pin(own["pins"])
            fresh = {**layer.slots.tensors(), "taken": layer.slots.taken}
            for name, x in fresh.items():
                if name not in own:
                    raise SessionError(f"{path} has no tensor {prefix}{name}")
                if layer.policy.bounded and (own[name].shape != x.shape or own[name].dtype != x.dtype):
                    raise SessionError(
                        f"{path}: {prefix}{name} is {own[name].dtype} {tuple(own[name].shape)}, not {x.dtype} {tuple(x.shape)}"
                    )
                if own[name].shape == x.shape:
                    x.copy_(own[name])  # in the memory the store was given
            if not layer.policy.bounded:
                layer.slots.replace({name: own[name] for name in layer.slots.tensors()})
        generator = None
        if "generator" in tensors:
            generator = torch.Generator()
            generator.set_state(tensors["generator"])
        return cls(cache, tensors.get("pending"), generator)


def belongs_to(model: PreTrainedModel) -> dict[str, Any]:
    """What identifies a model and its policy: shapes, a hash of a sample of every weight (scorers too), policy settings."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        flat = weight.detach().flatten()
        picked = flat[:: max(1, -(-flat.numel() // SAMPLES))]
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(picked.double().cpu().numpy().tobytes())
    config = model.config.get_text_config()
    return {
        "model": {
            "type": config.model_type,
            "layers": config.num_hidden_layers,
            "width": config.hidden_size,
            "weights": digest.hexdigest(),
        },
        "policy": {str(i): policy.describe() for i, policy in enumerate(attached_policies(model))},
    }


def _differences(there: dict[str, Any], here: dict[str, Any]) -> str:
    wrong = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return "; ".join(f"{key} {there.get(key)} in the file, {here.get(key)} here" for key in wrong[:3])


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise SessionError(f"there is no session {path}")
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("kvpop-session", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise SessionError(f"{path} cannot be read: {error}") from error
    if not isinstance(facts, dict):
        raise SessionError(f"{path} is a safetensors file, but not a kvpop session")
    if facts.get("format") != FORMAT:
        raise SessionError(f"{path} has session format {facts.get('format')}, this version reads {FORMAT}")
    return facts, tensors

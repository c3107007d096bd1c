"""A generation put away and taken up again: its whole state is constant in size (unless a layer is dense), and so is the file.

One safetensors file holds every tensor of a ``BoundedCache``, the ids that are not taken in yet and the state of the random
generator. It says which model and policy it belongs to, and nothing else will take it up. No code is stored.
"""

from __future__ import annotations

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
from kvpop.architecture import CHILD, attached_policies
from kvpop.cache import BoundedCache, BoundedLayer
from kvpop.weights import fingerprint

FORMAT = 1


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
        check_target(path)
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        half_written = path.with_name(path.name + ".part")
        try:
            save_file(tensors, half_written, metadata={"kvpop-session": json.dumps(facts)})
            os.replace(half_written, path)
        finally:
            half_written.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path, model: PreTrainedModel) -> Session:
        """The session at ``path``, ready to go on with ``model``, which must have the same weights and policy attached.

        Raises SessionError naming what does not fit: no session, another format, model, policy or budget, missing tensors.
        """
        facts, tensors = _read(Path(path))
        here = belongs_to(model)
        for what in ("model", "policy"):
            there = facts.get(what)
            wrong = _differences(there if isinstance(there, dict) else {}, here[what])
            if wrong:
                raise SessionError(f"{path} belongs to another {what}: {wrong}")
        cache = BoundedCache(model, rollback=int(facts.get("rollback", 0)))
        try:
            rows = len(tensors["layers.0.seen"])
            for i, layer in enumerate(cache.bounded_layers):
                prefix = f"layers.{i}."
                own = {n.removeprefix(prefix): x.to(layer.home) for n, x in tensors.items() if n.startswith(prefix)}
                _fill(layer, own, rows, prefix)
            generator = None
            if "generator" in tensors:
                generator = torch.Generator()
                generator.set_state(tensors["generator"])
        except (KeyError, IndexError, TypeError, RuntimeError) as error:
            raise SessionError(f"{path} is damaged: {error}") from error
        return cls(cache, tensors.get("pending"), generator)


def _fill(layer: BoundedLayer, own: dict[str, Tensor], rows: int, prefix: str) -> None:
    """Make a layer's store and fill it; RuntimeError for tensors that are missing or do not fit."""
    empty = (rows, layer.policy.shape.kv_heads, 0)  # heads of different sizes: their keys are saved side by side
    layer.lazy_initialization(*(own[name].new_empty(*empty, own[name].shape[-1]) for name in ("keys", "values")))
    assert layer.slots is not None
    if "pins" in own:
        layer.slots.pin(own["pins"])
    kept = layer.slots.tensors()
    for name, x in kept.items():
        given, sizes = own[name], list(x.shape)
        sizes[0] = rows
        if not layer.policy.bounded and name in ("keys", "values", "position"):
            sizes[2] = own["position"].shape[2]
        if given.dtype != x.dtype or list(given.shape) != sizes:
            raise RuntimeError(f"{prefix}{name} is {given.dtype} {tuple(given.shape)}, not {x.dtype} {tuple(sizes)}")
        if given.shape == x.shape:
            x.copy_(given)  # in the memory the store was given
    layer.slots.replace(kept if layer.policy.bounded else {name: own[name] for name in kept})
    layer.slots.taken.copy_(own["taken"])


def belongs_to(model: PreTrainedModel) -> dict[str, Any]:
    """What identifies a model and its policy: shapes, policy settings, and fingerprints of weights and buffers."""
    every = sorted([*model.named_parameters(), *model.named_buffers()])
    own, scorers = ([pair for pair in every if (f".{CHILD}." in pair[0]) == wanted] for wanted in (False, True))
    config = model.config.get_text_config()
    return {
        "model": {
            "type": config.model_type,
            "layers": config.num_hidden_layers,
            "width": config.hidden_size,
            "dtype": str(model.dtype),
            "positions": json.loads(json.dumps(getattr(config, "rope_parameters", None), default=str)),
            "weights": fingerprint(dict(own)),
        },
        "policy": {
            **{str(i): policy.describe() for i, policy in enumerate(attached_policies(model))},
            "weights": fingerprint(dict(scorers)),
        },
    }


def _differences(there: dict[str, Any], here: dict[str, Any], inside: str = "") -> str:
    """The first things that differ, in words; looks into the layers of a policy."""
    for key in {**there, **here}:
        a, b = there.get(key), here.get(key)
        if isinstance(a, dict) and isinstance(b, dict) and a != b:
            return _differences(a, b, f"layer {key}: " if key.isdigit() else f"{key}: ")
        if a != b:
            return f"{inside}{key} {a} in the file, {b} here"
    return ""


def check_target(path: str | Path) -> None:
    """Raise SessionError, before work is lost, if no session can be written to ``path``."""
    path = Path(path)
    if path.is_dir():
        raise SessionError(f"{path} is a directory, not a session file")
    parent = next(p for p in path.absolute().parents if p.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise SessionError(f"{path} cannot be written: {parent} is no directory that can be written to")


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

"""A model's own weights: which they are, how to tell two checkpoints apart, and how they are written and read.

Names are those of the plain model, whatever was put into it: scorers and LoRA layers are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvpop.architecture import CHILD

BASE, BASE_INDEX = "base.safetensors", "base.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
SAMPLES = 64
"""Values of each tensor that enter a fingerprint."""


class AdapterError(ValueError):
    """An adapter directory that cannot be used, and why."""


def base_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's own parameters, tied ones once, scorers and LoRA parameters left out."""
    return {
        name.replace(".base_layer.", "."): p
        for name, p in model.named_parameters()
        if f".{CHILD}." not in name and ".lora_" not in name
    }


def fingerprint(tensors: Mapping[str, Tensor], *, exact: bool = True) -> str:
    """Sixteen hex digits that change with names, shapes and 64 values of every tensor.

    Another checkpoint shows, a few weights changed by hand may not. ``exact=False`` leaves dtypes out and rounds to bfloat16,
    so that a checkpoint has one fingerprint whether it was loaded in float32 or in bfloat16.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        flat = tensor.detach().flatten()
        picked = flat[:: max(1, -(-flat.numel() // SAMPLES))]
        picked = picked if exact else picked.bfloat16()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype if exact else ''}".encode())
        digest.update(picked.double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def base_fingerprint(model: nn.Module) -> str | None:
    """The fingerprint of a model's own weights, the same in float32 and bfloat16; None if some are not in memory."""
    tensors = base_tensors(model)
    return None if any(t.is_meta for t in tensors.values()) else fingerprint(tensors, exact=False)


@contextmanager
def swapped(model: nn.Module, weights: Mapping[str, Tensor] | None) -> Iterator[None]:
    """``weights`` (names of ``base_tensors``) in place of the model's own, which come back at the end, also after errors.

    Tensors change places, none is written to. They are taken in the dtype and on the device of those they stand for. Raises
    AdapterError, before anything is changed, for a name that the model does not have or another shape.
    """
    own, weights = base_tensors(model), weights or {}
    check_tensors(weights, {name: own[name] for name in weights if name in own}, "weights to swap in")
    kept: dict[str, Tensor] = {}
    try:
        for name, tensor in weights.items():
            kept[name] = own[name].data
            own[name].data = tensor.to(kept[name])
        yield
    finally:
        for name, tensor in kept.items():
            own[name].data = tensor


@torch.no_grad()
def copy_into(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Write the values of ``given`` into the tensors of the same names, in their dtype and on their device."""
    for name, tensor in given.items():
        own[name].copy_(tensor)


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


def write_json(path: Path, value: Any) -> None:
    """Write atomically: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2))
    os.replace(temporary, path)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copies on the CPU in one safetensors file, written atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.touch()  # with the permissions of a new file: safetensors gives its own to nobody else
    mode = temporary.stat().st_mode
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, temporary)
    temporary.chmod(mode)
    os.replace(temporary, path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. Raises AdapterError if it is not there or damaged."""
    if not path.is_file():
        raise AdapterError(f"{path.parent} has no {path.name}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error


def write_base(weights: Mapping[str, Tensor], directory: Path, shard_bytes: int = SHARD_BYTES) -> str:
    """Write a model's own weights into files of at most ``shard_bytes``; returns the one to read: the file, or the index."""
    tensors = {name: t.detach() for name, t in weights.items()}
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="base{suffix}.safetensors", max_shard_size=shard_bytes
    )
    for file, names in split.filename_to_tensors.items():
        write_tensors(directory / file, {name: tensors[name] for name in names})
    if not split.is_sharded:
        return BASE
    write_json(directory / BASE_INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})
    return BASE_INDEX


def shard_files(directory: Path, file: str) -> dict[str, list[str]]:
    """The files that ``file`` (``BASE`` or ``BASE_INDEX``) stands for, each with the tensors it must hold (BASE: whatever)."""
    if file == BASE:
        return {BASE: []}
    path = directory / file
    if not path.is_file():
        raise AdapterError(f"{directory} has no {file}")
    try:
        where = json.loads(path.read_text())["weight_map"]
        files = {shard: [name for name in where if where[name] == shard] for shard in sorted(set(where.values()))}
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise AdapterError(f"{path} is no index of weights: {type(error).__name__} {error}") from error
    if strange := [shard for shard in files if Path(shard).name != shard]:
        raise AdapterError(f"{path} names files outside its directory: {strange}")
    return files


def read_base(directory: Path, file: str) -> dict[str, Tensor]:
    """The weights that ``write_base`` wrote. Raises AdapterError naming what is missing or damaged."""
    found: dict[str, Tensor] = {}
    for shard, names in shard_files(directory, file).items():
        tensors = read_tensors(directory / shard)
        if names and tensors.keys() != set(names):
            wrong = sorted(tensors.keys() ^ set(names))
            raise AdapterError(f"{directory / shard} does not hold what {file} says: {wrong}")
        found |= tensors
    return found

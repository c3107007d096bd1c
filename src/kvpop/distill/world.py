"""Processes: who takes part in a run, how their sums are formed, and how the model is spread over them.

The model's own weights are sharded with FSDP2, a decoder layer a unit. Everything small that is trained (scorers, gates,
low-rank changes: at most 60 MB for 8B parameters) is replicated in float32 and kept out of those units: the boundary loss is
formed outside the backbone's graph, where no hook of FSDP would see its gradients. Their gradients are summed in one message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class World:
    """This process among those that train together; alone unless a process group exists."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> World:
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def sum_all(self, tensors: Sequence[Tensor]) -> None:
        """The sums over all processes of many small tensors of one dtype, in place, in one message."""
        if self.size > 1 and tensors:
            flat = torch.cat([x.flatten() for x in tensors])
            dist.all_reduce(flat)
            for x, part in zip(tensors, flat.split([x.numel() for x in tensors])):
                x.copy_(part.view_as(x))

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process: what all must agree on, such as to stop."""
        if self.size == 1:
            return flag
        where = "cuda" if dist.get_backend() == "nccl" else "cpu"
        return bool(self.sum(torch.tensor(int(flag), device=where)))

    def check_equal(self, what: str, value: str) -> None:
        """ValueError, in every process, unless all of them give the same ``value``."""
        if self.size > 1:
            values: list[Any] = [None] * self.size
            dist.all_gather_object(values, value)
            if len(set(values)) > 1:
                raise ValueError(f"the processes do not agree on {what}: {sorted(set(values))}")

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def process_group(device: torch.device, needed: bool = False) -> Iterator[World]:
    """The processes that ``torchrun`` started, for as long as the context lasts; this one alone without it.

    ``needed``: make a group even for one process (mixed precision is FSDP's). A group that exists already is used as it is.
    """
    if dist.is_initialized() or (int(os.environ.get("WORLD_SIZE", "1")) == 1 and not needed):
        yield World.current()
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World.current()
    finally:
        dist.destroy_process_group()


def shard(root: nn.Module, layers: Iterable[nn.Module], small: set[nn.Parameter], compute: torch.dtype | None) -> None:
    """Spread the parameters under ``root`` over the processes, each of ``layers`` a unit, all but the ``small`` ones.

    ``compute``: the precision of the gathered copies that passes use; sums of gradients are float32 at least.
    """
    widest = max((p.dtype for p in root.parameters() if p not in small), key=lambda dtype: dtype.itemsize)
    reduce = torch.promote_types(widest, torch.float32)
    # Inputs stay as they are: layers hand on what they compute in, and casting would copy the pass's documents at every layer.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    for layer in layers:
        fully_shard(layer, mp_policy=policy, ignored_params=small)
    fully_shard(root, mp_policy=policy, ignored_params=small)


def whole(x: Tensor) -> Tensor:
    """A sharded tensor put together (by all processes at once), any other as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def as_whole(tensors: Mapping[str, Tensor], keep: bool, put: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Every tensor put together, one after the other; only processes that ``keep`` hold on to ``put(tensor)``."""
    kept = {}
    for name, x in tensors.items():
        full = whole(x.detach())
        if keep:
            kept[name] = put(full)
    return kept

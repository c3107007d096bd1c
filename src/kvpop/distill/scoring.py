"""How scorers learn: from what the layers of one pass did, after it, a stack of layers at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpop.budget import Budget
from kvpop.core.boundary import BoundaryLoss
from kvpop.distill.config import DistillConfig
from kvpop.distill.passes import Batch
from kvpop.distill.world import World
from kvpop.policies import LayerView, RankedLayer
from kvpop.supervision import Stack, Summary, Supervised, counts_of, decisions_of, scorer_losses, stacked, supervise

# Shapes: N documents of a batch, P decisions.


@dataclass
class Scorers:
    """The ranked layers that learn, under several ``budgets``, each of them one a layer. ``decisions[layer]`` counts what
    their gradients are sums over, in all processes."""

    layers: list[RankedLayer]
    budgets: Sequence[Mapping[int, Budget]]
    config: DistillConfig
    world: World

    def __post_init__(self) -> None:
        self.stacks: dict[tuple[int, ...], Stack] = {}
        self.decisions: dict[int, Tensor] = {}

    def summary(self, recall: bool) -> Summary:
        return Summary(self.layers, self.config.loss.min_future, recall)

    def supervise(self, views: Sequence[LayerView]) -> Iterator[Supervised]:
        """The teacher signal of the layers that were seen, as many at a time as ``stack_elements`` allows."""
        for group in self._groups(views):
            layers = tuple(view.layer for view in group)
            if layers not in self.stacks:
                self.stacks[layers] = Stack([view.policy for view in group])  # type: ignore[misc]
            kv_heads = group[0].policy.shape.kv_heads
            budgets = [stacked([of_layer[layer] for layer in layers], kv_heads) for of_layer in self.budgets]
            yield supervise(group, self.config.target, budgets, self.config.impl, self.stacks[layers])

    def _groups(self, views: Sequence[LayerView]) -> Iterator[list[LayerView]]:
        """Runs of layers that are alike, small enough."""
        group: list[LayerView] = []
        for view in views:
            elements = view.k.numel() + view.v.numel()
            alike = not group or _alike(group[0], view)
            if group and (not alike or (len(group) + 1) * elements > self.config.stack_elements):
                yield group
                group = []
            group.append(view)
        if group:
            yield group

    def learn(self, teacher: Supervised, batch: Batch, inner: int = 0, summary: Summary | None = None) -> None:
        """Add this process' gradient of the boundary losses, summed over decisions, and count them."""
        loss: BoundaryLoss = self.config.loss
        decisions = decisions_of(teacher, loss, teacher.budgets, self._uniform(batch, inner))
        mine_K4H = counts_of(decisions, loss)
        all_K4H = self.world.sum(mine_K4H.clone())
        losses_L, score_NHL = scorer_losses(teacher, decisions, loss, all_K4H)
        losses_L.sum().backward()
        layers = [layer.shape.layer for layer in teacher.stack.layers]
        count_L = all_K4H[:, 0].sum(0).view(len(layers), -1).sum(-1)
        for layer, count in zip(layers, count_L.unbind()):
            self.decisions[layer] = self.decisions.get(layer, 0) + count
        if summary is not None:
            summary.add(teacher, decisions, losses_L, mine_K4H, score_NHL)

    def average(self) -> None:
        """Turn the sums over decisions, gradients and all, into averages over those of all processes; start to count anew.

        A layer without a decision in any process has no gradient: its scorer stays where it is.
        """
        parameters = [p for layer in self.layers for p in layer.parameters()]
        self.world.sum_all([gradient(p) for p in parameters])  # every process sends all of it, whatever it has decided
        missing = torch.zeros((), dtype=torch.double, device=parameters[0].device)
        counts = [self.decisions.get(layer.shape.layer, missing).to(missing.device) for layer in self.layers]
        for layer, count in zip(self.layers, torch.stack(counts).tolist()):  # the device is waited for once
            for p in layer.parameters():
                p.grad = gradient(p) / count if count else None
        self.decisions.clear()

    def _uniform(self, batch: Batch, inner: int) -> Tensor | None:
        """Draws for the rows of a batch [N, P], a function of the seed, the place of each sequence, and ``inner``."""
        samples, docs = self.config.loss.samples, batch.documents
        if not samples:
            return None
        counts = torch.bincount(docs.first_row(), minlength=len(batch.places)).tolist()
        rows = [
            torch.rand(count, samples, generator=generator(self.config.seed, place, inner))
            for place, count in zip(batch.places, counts, strict=True)
        ]
        return torch.cat(rows).to(batch.ids.device)


def _alike(a: LayerView, b: LayerView) -> bool:
    """Whether two layers can be worked on as one with more heads."""
    shapes = (a.q.shape, a.k.shape, a.v.shape) == (b.q.shape, b.k.shape, b.v.shape)
    return shapes and a.scale == b.scale and a.k.device == b.k.device


def gradient(p: Tensor) -> Tensor:
    """The gradient of a parameter, made zero where there is none."""
    if p.grad is None:
        p.grad = torch.zeros_like(p)
    return p.grad


def generator(*key: int) -> torch.Generator:
    """Randomness as a function of where we are, so nothing has to be saved to resume and no process draws for another."""
    seed = 0
    for part in key:
        seed = (seed * 1_000_003 + part + 1) % (2**61 - 1)
    return torch.Generator().manual_seed(seed)


def rows_drawn(seed: int, places: Sequence[int]) -> Callable[[int, tuple[int, ...]], Tensor]:
    """Uniform numbers [B, H, S] for ``GateSampling``: row b is a function of (seed, its place, layer)."""

    def uniform(layer: int, shape: tuple[int, ...]) -> Tensor:
        return torch.stack([torch.rand(shape[1:], generator=generator(seed, place, layer, 7)) for place in places])

    return uniform

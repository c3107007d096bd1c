"""A decoding step as one CUDA graph: no Python, no launches one by one; it reads and writes at fixed addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

WARM = 3
"""Steps before a capture: what compiles, allocates or tunes itself does so in these."""
COMPILE: dict[str, Any] = {"dynamic": False, "fullgraph": True}


@dataclass
class Captured:
    """A step that was captured: calling it replays it, and gives the same tensor every time, with new values."""

    graph: torch.cuda.CUDAGraph
    output: Tensor
    peak: int
    """Bytes allocated while it was captured."""

    def __call__(self) -> Tensor:
        self.graph.replay()
        return self.output


def capture(step: Callable[[], Tensor]) -> Captured:
    """Run a step ``WARM`` times beside the current stream, then capture it. It must not ask the host for anything, and takes
    its inputs from tensors that stay where they are."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # the graph has its own memory
    torch.cuda.reset_peak_memory_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    return Captured(graph, output, torch.cuda.max_memory_allocated())


@contextmanager
def compiled_layers(model: PreTrainedModel) -> Iterator[None]:
    """Decoder layers are compiled, each by itself, for the calls inside."""
    compile_layers(model)
    try:
        yield
    finally:
        plain_layers(model)


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each decoder layer by itself, for all calls until ``plain_layers``."""
    layers = model.get_decoder().layers
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(layers))
    for layer in layers:
        layer.compile(**COMPILE)


def plain_layers(model: PreTrainedModel) -> None:
    """Undo ``compile_layers``."""
    layers = [layer for layer in model.get_decoder().layers if layer._compiled_call_impl is not None]
    for layer in layers:
        layer._compiled_call_impl = None
    if layers:
        torch._dynamo.reset()

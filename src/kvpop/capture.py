"""A decoding step as one CUDA graph: no Python, no launches one by one; it reads and writes at fixed addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpop import projections

WARM = 3
"""Steps before a capture: what compiles, allocates or tunes itself does so in these."""
COMPILE: dict[str, Any] = {"dynamic": False, "fullgraph": True}
Tune = Literal["none", "max"]
TUNES: dict[str, dict[str, Any]] = {"none": {}, "max": {"coordinate_descent_tuning": True, "max_autotune": True}}
"""Options of inductor. ``max``, which is the mode max-autotune-no-cudagraphs, tries launch sizes one after the other and Triton
against cuBLAS when a kernel first runs, of one layer: the others find kernels and sizes in caches."""


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
    stream = _beside(torch.cuda.current_device())
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


@cache
def _beside(device: int) -> torch.cuda.Stream:
    """One stream to warm up on before all captures: cuBLAS keeps 32 MiB for each that it has worked on."""
    return torch.cuda.Stream(device)


@contextmanager
def compiled_layers(model: PreTrainedModel, *, tune: Tune = "none", fused: bool = False) -> Iterator[None]:
    """Decoder layers are compiled, each by itself, for the calls inside; with ``fused`` projections, which stay fused if they
    were before. What is captured inside may be replayed afterwards."""
    try:
        compile_layers(model, tune)
        with projections.fused(model) if fused else nullcontext():
            yield
    finally:
        plain_layers(model)


def compile_layers(model: PreTrainedModel, tune: Tune = "none") -> None:
    """Compile each decoder layer by itself, and the norm behind them, for all calls until ``plain_layers``. ``tune``: how much
    time that may take (``TUNES``). Raises ValueError for a way that there is not."""
    check_tune(tune)
    projections.settle(model)
    parts = _parts(model)
    settings = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, 4 * len(parts))
    if hasattr(settings, "use_recursive_dict_tags_for_guards"):  # before torch 2.12, which has withdrawn it, it is on
        settings.use_recursive_dict_tags_for_guards = False
    for part in parts:
        part.compile(**COMPILE, options=TUNES[tune] or None)


def plain_layers(model: PreTrainedModel) -> None:
    """Undo ``compile_layers``."""
    parts = [part for part in _parts(model) if part._compiled_call_impl is not None]
    for part in parts:
        part._compiled_call_impl = None
    if parts:
        torch._dynamo.reset()


def check_tune(tune: str) -> None:
    """ValueError for a way to tune that there is not."""
    if tune not in TUNES:
        raise ValueError(f"tune must be one of {', '.join(TUNES)}, got {tune!r}")


def _parts(model: PreTrainedModel) -> list[nn.Module]:
    decoder = model.get_decoder()
    norm = getattr(decoder, "norm", None)
    return [*decoder.layers, *([norm] if isinstance(norm, nn.Module) else [])]

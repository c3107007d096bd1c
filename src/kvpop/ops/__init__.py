"""The operations behind everything else, each with a readable reference and fast implementations."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch

HAS_TRITON = find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, so on a CPU too."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def device_of(x: torch.Tensor) -> AbstractContextManager[Any]:
    """The device of x is the current one: that is where Triton launches, and a model may be spread over several."""
    return torch.cuda.device(x.device) if x.is_cuda and not torch.compiler.is_compiling() else nullcontext()

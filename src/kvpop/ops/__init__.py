"""The operations behind everything else, each with a readable reference and fast implementations."""

from __future__ import annotations

import os
from importlib.util import find_spec

HAS_TRITON = find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, so on a CPU too."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")

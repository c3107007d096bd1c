"""What the benchmarks of kernels share. They are scripts: this file lies beside them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from kvpop.capture import capture

PEAK = 989e12
"""Dense bfloat16 FLOP/s of an H100 or H200."""


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    """Median of ``repeats`` calls, each between two events, after three that are not counted."""
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def microseconds(run: Callable[[], Any], count: int, repeats: int) -> float:
    """Of one of ``count`` alike things in a graph."""
    graph = capture(run)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph()
    start.record()
    for _ in range(repeats):
        graph()
    stop.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(stop) / repeats / count


def write(path: Path | None, what: str, command: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Rows as a result file: what they are, the machine, the versions and the command. Nothing without a path."""
    if path is None:
        return
    result = {
        "what": what,
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": command,
        **more,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))

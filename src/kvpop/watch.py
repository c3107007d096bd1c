"""Watching a run: where each step's record goes, what warns of labels that say nothing, and how busy the GPUs are.

A record is a flat dict of one step: numbers, and lists (of lists) of numbers over layers and KV heads.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from kvpop.flops import flops_by_part, flops_per_token, mfu, peak_flops

__all__ = [
    "LOG", "WRITERS", "JsonLines", "TensorBoard", "WandB", "Writer", "collapse", "flops_by_part", "flops_per_token", "mfu",
    "peak_flops", "read_log", "writers",
]  # fmt: skip

LOG = "log.jsonl"
Record = dict[str, Any]


class Writer(Protocol):
    """Where records go. ``record["step"]`` counts optimizer steps from 1 and grows from call to call."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


def read_log(path: Path) -> list[Record]:
    """The records of a JSONL log, up to a line that a crash cut short; none if there is no log."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def plain(value: Any) -> Any:
    """The value as strict JSON can hold it: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonLines:
    """One line of JSON a record, flushed at once.

    Opening keeps the records up to ``upto_step`` (the step of the checkpoint that the run goes on from) and drops the rest,
    which will be written again, and a last line that was cut short. ``kept`` are the records that stayed.
    """

    def __init__(self, path: Path, upto_step: int = 0) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.kept = [record for record in read_log(path) if record["step"] <= upto_step]
        temporary = path.with_name(f".{path.name}.tmp")  # a crash here must not cost the log
        temporary.write_text("".join(json.dumps(record) + "\n" for record in self.kept))
        os.replace(temporary, path)
        self.file = path.open("a")

    def write(self, record: Record) -> None:
        self.file.write(json.dumps(plain(record)) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Event files in ``directory``/tensorboard: numbers as scalars, lists over heads as histograms.

    Steps after ``upto_step`` that an earlier process wrote are marked as void; TensorBoard then shows each step once.
    """

    def __init__(self, directory: Path, upto_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("the writer 'tensorboard' needs a package: pip install 'kvpop[watch]'") from error
        folder = Path(directory) / "tensorboard"
        again = folder.is_dir()
        self.events = SummaryWriter(str(folder), purge_step=upto_step + 1 if again else None)

    def write(self, record: Record) -> None:
        for name, value in _scalars(record).items():
            self.events.add_scalar(name, value, record["step"])
        for name, values in _lists(record).items():
            self.events.add_histogram(name, values, record["step"])
        self.events.flush()

    def close(self) -> None:
        self.events.close()


class WandB:
    """A run of Weights & Biases, the same one whenever ``directory`` is used again: its id is kept in ``wandb-id`` there.

    A step that the run has seen already is not sent again: the service only appends, and a resumed run repeats its steps.
    (Offline what it has seen is not known; the service leaves out steps it has when the parts are synced.)
    The project is ``$WANDB_PROJECT``, else "kvpop".
    """

    def __init__(self, directory: Path, config: Mapping[str, Any] | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("the writer 'wandb' needs a package: pip install 'kvpop[watch]'") from error
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "wandb-id"
        if not path.exists():
            path.write_text(secrets.token_hex(4))
        self.histogram = wandb.Histogram
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "kvpop"), name=directory.resolve().name, id=path.read_text().strip(),
            resume="allow", dir=str(directory), config=dict(config or {}),
        )  # fmt: skip

    def write(self, record: Record) -> None:
        if record["step"] < self.run.step:
            return
        histograms = {name: self.histogram(values) for name, values in _lists(record).items()}
        self.run.log(_scalars(record) | histograms, step=record["step"])

    def close(self) -> None:
        self.run.finish()


WRITERS = ("jsonl", "tensorboard", "wandb")


def check_writers(names: Sequence[str]) -> None:
    """Raise ValueError for an unknown name and ImportError, with what to install, for a missing package."""
    for name in names:
        if name not in WRITERS:
            raise ValueError(f"unknown writer {name!r}: choose from {', '.join(WRITERS)}")
        if name != "jsonl" and name not in sys.modules and find_spec(name) is None:
            raise ImportError(f"the writer {name!r} needs a package: pip install 'kvpop[watch]'")


def writers(
    names: Sequence[str], directory: Path, upto_step: int = 0, config: Mapping[str, Any] | None = None
) -> list[Writer]:
    """The writers called so, for a run in ``directory`` that goes on after ``upto_step``; the JSONL log always, and first.

    ``config`` (plain values) is shown beside the run where a writer can. Raises ValueError for an unknown name and
    ImportError, with what to install, for a missing package, both before any file is touched.
    """
    check_writers(names)
    made: list[Writer] = []
    if "tensorboard" in names:
        made.append(TensorBoard(directory, upto_step))
    if "wandb" in names:
        made.append(WandB(directory, config))
    return [JsonLines(Path(directory) / LOG, upto_step), *made]


FEW = 50
"""Decisions of a head below which its keep rate says nothing about a share of 2 %."""
RARE = 0.02


def collapse(record: Record) -> str | None:
    """What to tell the user if more than half of all KV heads have a keep rate below 2 % or above 98 %; else None.

    There every decision has the same answer, the loss falls, and nothing is learned. Heads with fewer than 50 decisions do
    not count: by "decided" (per layer and head, as "keep"), else by the average of "decisions" over heads.
    """
    rates = list(_numbers(record.get("keep", ())))
    counts = list(_numbers(record.get("decided", ())))
    if not counts:
        counts = [record.get("decisions", math.inf) / max(1, len(rates))] * len(rates)
    rates = [rate for rate, count in zip(rates, counts, strict=True) if count >= FEW]
    if not rates:
        return None
    all_kept, none_kept = (sum(hits) / len(rates) for hits in zip(*((r > 1 - RARE, r < RARE) for r in rates)))
    if all_kept + none_kept <= 0.5:
        return None
    told = []
    if all_kept > 0:
        told.append(
            f"{all_kept:.0%} keep almost every token that leaves the window (is the decay too strong, or the budget too "
            "wide for these documents?)"
        )
    if none_kept > 0:
        told.append(f"{none_kept:.0%} keep almost none (is the decay too weak, or the budget too narrow?)")
    return (
        f"the labels of {all_kept + none_kept:.0%} of {len(rates)} KV heads have collapsed and teach nothing: "
        f"{'; '.join(told)}"
    )


def _numbers(values: Any) -> Iterator[float]:
    """The numbers of a list of lists, flat; null and NaN left out would shift what belongs together, so they stay as NaN."""
    if isinstance(values, list | tuple):
        for value in values:
            yield from _numbers(value)
    else:
        yield math.nan if values is None else float(values)


def _scalars(record: Record) -> dict[str, float]:
    return {
        name: value
        for name, value in record.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def _lists(record: Record) -> dict[str, Any]:
    """Lists over layers and heads as flat arrays of what is finite; empty ones left out."""
    import numpy as np

    flat = {
        name: np.array([x for x in _numbers(value) if math.isfinite(x)])
        for name, value in record.items()
        if isinstance(value, list | tuple)
    }
    return {name: values for name, values in flat.items() if values.size}

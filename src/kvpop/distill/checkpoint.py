"""Checkpoints of a run: torch.distributed.checkpoint, written in the background, read by any number of processes.

``run.json``                    what the run is: a checkpoint of another run is refused, naming the difference
``checkpoints/step-00000050``   everything that training changes; whole once its ``.metadata`` is there, which comes last
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from kvpop.distill.trainer import Trainer
from kvpop.weights import write_json

RUN, CHECKPOINTS = "run.json", "checkpoints"
KEPT = 2
_STEP = re.compile(r"step-(\d+)")


def path_of(directory: Path, step: int) -> Path:
    return directory / CHECKPOINTS / f"step-{step:08d}"


def steps_saved(directory: Path) -> list[int]:
    """Steps of the checkpoints that are whole, ascending."""
    found = ((_STEP.fullmatch(path.name), path) for path in (directory / CHECKPOINTS).glob("step-*"))
    return sorted(int(match[1]) for match, path in found if match and (path / ".metadata").is_file())


class Checkpoints:
    """Saves and restores a trainer. The last ``KEPT`` checkpoints stay. Raises ValueError if the directory holds another run.

    Saving copies the state and returns; the copy is written while training goes on. ``wait`` ends with it on disk.
    """

    def __init__(self, directory: Path, trainer: Trainer) -> None:
        self.directory, self.trainer, self.world = directory, trainer, trainer.world
        self.pending: Future[Any] | None = None
        self.saved: int | None = None
        # Its messages come from another thread: a group of their own keeps them apart from those of training.
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        if self.group is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
        self._claim()

    def _claim(self) -> None:
        mine = json.loads(json.dumps(self.trainer.identity()))
        self.world.check_equal("the run", json.dumps(mine, sort_keys=True))
        path = self.directory / RUN
        if steps_saved(self.directory) and not path.is_file():
            raise ValueError(f"{self.directory} has checkpoints but no {RUN} that says whose: use another directory")
        if steps_saved(self.directory):
            try:
                saved = json.loads(path.read_text())
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} is damaged ({error}): remove the directory to start anew") from error
            different = [
                f"{key}: {saved.get(key)!r} there, {mine.get(key)!r} here"
                for key in sorted(saved.keys() | mine.keys())
                if saved.get(key) != mine.get(key)
            ]
            if different:
                raise ValueError(
                    f"{self.directory} belongs to another run ({'; '.join(different)}): use another directory"
                )
        self.world.barrier()
        if self.world.leads:
            write_json(path, mine)

    def save(self) -> None:
        """Start to write the trainer's state; waits for the one before."""
        self.wait()
        target = path_of(self.directory, self.trainer.done)
        if (
            self.trainer.done == self.saved
        ):  # remembered, not looked up: processes may see another state of a file system
            return
        self.saved = self.trainer.done
        if self.world.leads:
            shutil.rmtree(target, ignore_errors=True)  # the remains of a process that was killed
        self.world.barrier()
        answer: Any = dcp.async_save(self.trainer.state(), checkpoint_id=str(target), process_group=self.group)
        self.pending = getattr(answer, "upload_completion", answer)

    def wait(self) -> None:
        """Until what was saved is on disk; then drop the oldest. Raises what went wrong with writing it."""
        if self.pending is None:
            return
        self.pending.result()
        self.pending = None
        self.world.barrier()
        if self.world.leads:
            for step in steps_saved(self.directory)[:-KEPT]:
                shutil.rmtree(path_of(self.directory, step))

    def close(self) -> None:
        """On the way out after an error: let what is being written come to its end, whatever that is."""
        if self.pending is not None:
            with suppress(Exception):
                self.pending.result()
            self.pending = None

    def resume(self) -> bool:
        """Go on from the last checkpoint, whatever number of processes wrote it; False if there is none."""
        saved = steps_saved(self.directory)
        self.world.check_equal("the last checkpoint", str(saved[-1:]))
        if not saved:
            return False
        path, trainer = path_of(self.directory, saved[-1]), self.trainer
        trainer.moments()
        mine = trainer.state()
        try:
            there = FileSystemReader(str(path)).read_metadata().state_dict_metadata
            missing = sorted(name for name in mine if name not in there and name.startswith(("param/", "buffer/")))
            if not missing:
                dcp.load(_present(mine, there), checkpoint_id=str(path), process_group=self.group)
        except (Exception, dcp.CheckpointException) as error:  # damaged bytes are unpickled into errors of any kind
            raise ValueError(
                f"{path} cannot be read ({_reason(error)}): remove it to go on from the one before"
            ) from error
        if missing:
            raise ValueError(f"{path} lacks {missing}")
        trainer.forget_moments(name.partition("/")[2] for name in mine if name not in there)
        trainer.done = self.saved = saved[-1]
        return True


def _reason(error: BaseException) -> str:
    """What went wrong, without the traces of all processes that a CheckpointException holds."""
    first = next(iter(getattr(error, "failures", {}).values()), (error,))[0]
    return str(first) or type(first).__name__


def _present(tensors: Mapping[str, Tensor], there: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: x for name, x in tensors.items() if name in there}

"""What the processes of ``test_distributed`` do: torchrun ... -m tests.distributed JOBS, a JSON file with a list of jobs.

All jobs of a file share one process group, but for those of a file called "own*.json", which make theirs. The functions are
called by the tests themselves, too, for the same thing in one process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from kvpop.budget import Budget
from kvpop.core import BoundaryLoss
from kvpop.data import PackedSequence, SequenceStream
from kvpop.distill import DistillConfig, Trainer, distill
from kvpop.distill.checkpoint import steps_saved
from kvpop.distill.world import World, process_group, whole
from kvpop.policies import DMS, KVpop, Policy, Streaming
from tests.tiny import VOCAB, tiny_model
from tests.training import timeless

BUDGET = Budget(2, 8, 8)
LOSS = BoundaryLoss(min_future=16, samples=24)
POLICIES: dict[str, Policy] = {
    "kvpop": KVpop(BUDGET, scorer="mlp+mlstm"),
    "dms": DMS(window=8, ratio=4, offset=4.0),
    "native": DMS(window=8, ratio=4, offset=8.0, scale=2.0, gate="native"),
    "streaming": Streaming(BUDGET),
}
CONFIG = DistillConfig(steps=6, loss=LOSS, seed=3, kl_top=16, kl_chunk=50, clip=1e9, checkpoint_every=2, lora_rank=4)
EMPTY = {"one": (1, 3), "both": (0, 1, 2, 3), "padding": (1, 3)}


def stream(batch_size: int = 4, size: int = 96, empty: str = "") -> SequenceStream:
    """Batches of four rows; documents of unequal lengths, and padding, so that tokens and decisions differ between ranks.

    ``empty``: rows of the first batch, those of the second process ("one") or all ("both"), hold nothing that could be
    decided; with "padding" those of the second process hold a single token.
    """
    rng = np.random.default_rng(0)

    def row(*lengths: int) -> PackedSequence:
        return PackedSequence.from_pieces([rng.integers(3, VOCAB, n) for n in lengths], size)

    rows = [row(60 + 3 * i, 12) for i in range(8)]
    made = SequenceStream(rows, batch_size)
    for place in EMPTY[empty] if empty else ():
        rows[int(made._order(0)[place])] = row(1) if empty == "padding" else row(20, 20)
    return SequenceStream(rows, batch_size)


def trainer(
    mode: str, policy: str, world: World, *, empty: str = "", dtype: str = "float64", **options: Any
) -> Trainer:
    kind = getattr(torch, dtype)
    config = replace(CONFIG, mode=mode, **options)  # type: ignore[arg-type]
    teacher = tiny_model(dtype=kind) if mode in ("full", "base") else None
    return Trainer(tiny_model(dtype=kind), POLICIES[policy], stream(empty=empty), config, teacher, world)


def gradients(mode: str, policy: str, **options: Any) -> dict[str, Any]:
    """Records of two steps, the gradients before the first, and what of the replicated tensors differs between processes."""
    world = World.current()
    t = trainer(mode, policy, world, **options)
    found: dict[str, torch.Tensor] = {}

    def hook(*_: Any) -> None:
        if t.done == 0:
            found.update({n: whole(p.grad).clone() for n, p in t.model.named_parameters() if p.grad is not None})

    t.optimizer.register_step_pre_hook(hook)
    records = [timeless(t.step()), timeless(t.step())]
    small = {
        n: p.detach() for n, p in t.state().items() if n.startswith("param/") and (".kvpop." in n or ".lora_" in n)
    }
    mine: list[Any] = [{n: x.double().numpy().tobytes() for n, x in small.items()}] * world.size
    everyone = list(mine)
    if world.size > 1:
        dist.all_gather_object(everyone, mine[0])
    unlike = sorted(n for n in small if len({one[n] for one in everyone}) > 1)
    return {"gradients": found, "records": records, "unlike": unlike, "replicated": sorted(small)}


def run(
    mode: str, policy: str, out: str, *, press: int = 0, die: int = 0, seed_of_rank: bool = False, rows: int = 4, **options: Any
) -> bool:  # fmt: skip
    """A whole run in ``out``. ``press``: the last process presses Ctrl-C in that step; ``die``: all end, hard, after that step,
    once the checkpoint before it is whole; ``seed_of_rank``: the processes do not agree on the seed."""
    last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    config = replace(CONFIG, mode=mode, seed=CONFIG.seed + (seed_of_rank and last), **options)  # type: ignore[arg-type]

    def on_step(record: dict[str, Any]) -> None:
        if record["step"] == press and last:
            os.kill(os.getpid(), signal.SIGINT)
        if record["step"] == die:
            deadline = time.monotonic() + 60
            while not steps_saved(Path(out)) and time.monotonic() < deadline:
                time.sleep(0.01)
            os._exit(3)

    return distill(
        tiny_model(), POLICIES[policy], stream(rows), config, out, model_id="tiny",
        teacher=tiny_model() if mode in ("full", "base") else None, on_step=on_step,
    )  # fmt: skip


JOBS = {"gradients": gradients, "run": run}


def perform(jobs: list[dict[str, Any]], out: Path) -> None:
    """Do the jobs in order; each process leaves what it got, or the ValueError that it met, in a file of its own."""
    rank = os.environ.get("RANK", "0")
    for job in jobs:
        options = dict(job)
        name, what = options.pop("name"), options.pop("job")
        try:
            result = JOBS[what](**options)
        except ValueError as error:
            result = str(error)
        torch.save(result, out / f"{name}.{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    if path.name.startswith("own"):
        perform(json.loads(path.read_text()), path.parent)
        assert not dist.is_initialized()
    else:
        with process_group(torch.device("cpu")):
            perform(json.loads(path.read_text()), path.parent)

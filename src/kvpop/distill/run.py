"""A whole run: train, log, checkpoint, and leave an adapter."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvpop.adapter import AdapterError, adapter_files, base_tensors, save_adapter
from kvpop.data import SequenceStream
from kvpop.distill.checkpoint import Checkpoints
from kvpop.distill.config import DistillConfig
from kvpop.distill.trainer import Trainer
from kvpop.distill.world import as_whole, process_group
from kvpop.flops import ModelShape, flops_by_part, mfu, peak_flops
from kvpop.policies import Policy
from kvpop.trained import recipe_of, settings_of
from kvpop.watch import Writer, check_writers, plain, writers

FACTS = ("score_loss", "accuracy", "recall", "kl", "closed")


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag that is read between steps; the second one interrupts as usual. SIGTERM, which
    schedulers send before they kill, counts as the first."""
    pressed = False

    def handler(signum: int, frame: Any) -> None:
        nonlocal pressed
        if pressed and signum == signal.SIGINT:
            raise KeyboardInterrupt
        pressed = True

    try:
        previous = {which: signal.signal(which, handler) for which in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: leave signals alone
        yield lambda: False
        return
    try:
        yield lambda: pressed
    finally:
        for which, old in previous.items():
            signal.signal(which, old)


def distill(
    model: PreTrainedModel,
    policy: Policy,
    stream: SequenceStream,
    config: DistillConfig,
    directory: str | Path,
    *,
    model_id: str,
    teacher: PreTrainedModel | None = None,
    watch: Sequence[str] = (),
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> bool:
    """Run (or go on with) a training run and write the adapter into ``directory``; False if it was interrupted.

    ``directory`` holds the checkpoints, the JSONL log (one line a logged step; ``watch`` names more writers) and, at the end,
    the adapter (a whole one of a run that had ended already stays as it is). Ctrl-C finishes the step, writes a checkpoint and
    returns; calling again with the same arguments goes on from there. A killed run loses the steps since its last checkpoint,
    no more.

    Where weights are sharded (several processes, or another precision to compute in) the model is of no use afterwards: load
    what was written.

    Under ``torchrun`` all processes call this with the same arguments, and share every batch of the stream; their number may
    change from call to call. Raises ValueError, before anything is trained, for what does not fit together.
    """
    directory = Path(directory)
    settings_of(recipe_of(policy))  # raises for a policy that could not be saved
    check_writers(watch)
    device = next(model.parameters()).device
    with process_group(device, needed=config.compute != "same") as world:
        trainer = Trainer(model, policy, stream, config, teacher, world)
        if world.leads:
            directory.mkdir(parents=True, exist_ok=True)
        world.barrier()
        checkpoints = Checkpoints(directory, trainer)
        checkpoints.resume()
        trains = trainer.done < config.steps
        described = {"model": model_id, **trainer.identity(), "processes": world.size}
        logs = writers(watch, directory, trainer.done, described) if world.leads else []
        try:
            finished, last = _train(trainer, checkpoints, logs, on_step)
        finally:
            checkpoints.close()
            for log in logs:
                log.close()
        if not finished:
            return False
        if not trains and not world.any(not _written(directory)):
            return True  # the adapter is there, and what may have been done with it since stays
        model.eval()
        facts: dict[str, Any] = {
            "steps": trainer.done, "tokens": trainer.done * config.accumulate * stream.batch_size * stream.length,
            "length": stream.length, "config": dataclasses.asdict(config),
        }  # fmt: skip
        facts.update(plain({key: last[key] for key in FACTS if key in last}))
        _save(trainer, policy, directory, model_id, facts)
    return True


def _written(directory: Path) -> bool:
    """Whether a whole adapter is there."""
    try:
        return bool(adapter_files(directory))
    except (AdapterError, FileNotFoundError):
        return False


def _train(
    trainer: Trainer, checkpoints: Checkpoints, logs: list[Writer], on_step: Callable[[dict[str, Any]], None] | None
) -> tuple[bool, dict[str, Any]]:
    config, last = trainer.config, dict(logs[0].kept[-1]) if logs and logs[0].kept else {}  # type: ignore[attr-defined]
    flops, peak = flops_of(trainer)
    with interruptible() as pressed:
        while trainer.done < config.steps:
            last = trainer.step()
            if (busy := mfu(last["tokens_per_s"], flops, peak)) is not None:
                last["mfu"] = busy
            if trainer.done % config.log_every == 0 or trainer.done == config.steps:
                for log in logs:
                    log.write(last)
            if on_step is not None:
                on_step(last)
            stopped = trainer.world.any(pressed())
            if trainer.done % config.checkpoint_every == 0 or stopped:
                checkpoints.save()
            if stopped and trainer.done < config.steps:
                checkpoints.wait()
                return False, last
        checkpoints.save()  # nothing if it is there already
        checkpoints.wait()
    return True, last


def flops_of(trainer: Trainer) -> tuple[float, float | None]:
    """Model FLOPs a token of this run, and what all its devices could do; None if that is not known."""
    device, policy = trainer.device, trainer.policy
    if device.type != "cuda":
        return 0.0, None
    inner = recipe_of(policy)
    peak = peak_flops(torch.cuda.get_device_name(device))
    try:
        shape = ModelShape.of(trainer.model.config)
    except ValueError:  # a kind of model whose FLOPs are not known
        return 0.0, None
    learns = trainer.scorers is not None
    mode = trainer.config.mode if learns else ("lora" if trainer.config.mode in ("scorer", "lora") else "base")
    target = trainer.config.target
    parts = flops_by_part(
        shape,
        length=trainer.stream.length,
        budget=getattr(inner, "budget", None),
        mode=mode,  # without scorers it is the KL that counts: through frozen weights, or with theirs
        scorer=getattr(inner, "scorer", "mlp") if learns else "mlp",
        hidden=getattr(inner, "hidden", 0),
        inner_updates=trainer.config.inner_updates,
        lookahead=target.lookahead,
        dense_lse=target.lse == "dense",
        lora_parameters=sum(p.numel() for p in trainer.trained.lora),
    )
    flops = sum(value for part, value in parts.items() if learns or part not in ("target", "scorers"))
    return flops, None if peak is None else peak * trainer.world.size


def _save(trainer: Trainer, policy: Policy, directory: Path, model_id: str, facts: dict[str, Any]) -> None:
    """Write the adapter, by the first process; sharded weights come together on its CPU."""
    world, base = trainer.world, None
    if trainer.config.mode in ("full", "base"):
        base = as_whole(base_tensors(trainer.model), world.leads, lambda x: x.cpu())
    if world.leads:
        save_adapter(
            trainer.model, policy, directory, model_id=model_id, training=facts, with_base=base is not None, base=base,
            trained_from=trainer.weights,
        )  # fmt: skip
    world.barrier()

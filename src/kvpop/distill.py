"""Training: scorers alone on a frozen model (default), or scorers and model together against the frozen dense teacher.

    scorer mode   one forward pass under the student's own mask; each layer's boundary loss is formed and backpropagated as
                  the pass goes by. The model is untouched, its activations are not kept.
    full mode     KL to the dense teacher trains the model, the boundary loss trains the scorers; neither reaches the other.

Everything random is a function of (seed, step), so a resumed run repeats the straight one bit for bit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from kvpop.adapter import base_tensors, model_shape, save_adapter
from kvpop.attachment import attach, attached_policies
from kvpop.budget import Budget
from kvpop.core.boundary import BoundaryLoss
from kvpop.core.target import Target
from kvpop.data import SequenceStream
from kvpop.documents import Documents
from kvpop.kl import distillation_kl
from kvpop.models import check_head
from kvpop.policies import Dense, KVpop, LayerView, RankedLayer, SequencePass
from kvpop.supervision import Summary, Supervised, scorer_loss, supervise

STATE, LOG = "state.safetensors", "log.jsonl"


@dataclass(frozen=True)
class DistillConfig:
    """A run. Learning rates as in the paper: scorers ``scorer_lr`` with warm-up and cosine, model ``base_lr`` constant.

    ``train_long``: numbers of long-range slots the scorer is trained to decide at (the same targets serve all of them);
    empty: the policy's own. ``inner_updates``: scorer updates per forward pass in scorer mode, each on newly sampled
    decisions. ``accumulate``: batches of the stream per optimizer step, as if they were one: the KL weighted by tokens,
    the boundary loss by decisions. That is exact except for what Eq. 23 and 24 take from a batch (the mean weight, the
    share of keep labels), which they take from each batch by itself. ``calibrate``: set the scorers' input standardisation
    on the first batch. ``kl_top`` teacher logits enter the KL (the rest as one bucket); ``kl_chunk`` tokens of logits
    exist at once.
    """

    mode: Literal["scorer", "full"] = "scorer"
    steps: int = 200
    seed: int = 0
    scorer_lr: float = 1e-3
    decay_lr_ratio: float = 0.1
    base_lr: float = 8e-5
    warmup: float = 0.05
    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    accumulate: int = 1
    inner_updates: int = 1
    calibrate: bool = True
    train_long: tuple[int, ...] = ()
    kl_top: int = 256
    kl_chunk: int = 1024
    target: Target = field(default_factory=Target)
    loss: BoundaryLoss = field(default_factory=BoundaryLoss)
    impl: Literal["reference", "flex"] = "reference"
    checkpoint_every: int = 50
    log_every: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("scorer", "full"):
            raise ValueError(f"mode must be 'scorer' or 'full', got {self.mode!r}")
        counts = ("steps", "accumulate", "inner_updates", "kl_top", "kl_chunk", "checkpoint_every", "log_every")
        for name in counts:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.mode == "full" and self.inner_updates != 1:
            raise ValueError(f"inner_updates is for scorer mode; full mode takes 1, got {self.inner_updates}")
        for name in ("scorer_lr", "decay_lr_ratio", "base_lr", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup must be a share of the steps in [0, 1], got {self.warmup}")
        if any(long < 1 for long in self.train_long):
            raise ValueError(f"train_long must hold slots of at least 1, got {self.train_long}")


@dataclass(frozen=True)
class Batch:
    """A batch of the stream on the model's device; ``index`` counts batches from the start of the run."""

    index: int
    ids: Tensor
    position_ids: Tensor
    documents: Documents


class Trainer:
    """One training run, step by step. ``distill`` drives it; tests call ``step`` themselves.

    The policy is attached to ``model`` here. ``teacher`` (full mode) is a dense copy of the model that stays frozen; Dense
    is attached to it. Gradient checkpointing that is already enabled on the model is honoured in full mode (scorer mode
    keeps no activations). Raises ValueError if no sequence is long enough for a single boundary decision.
    """

    def __init__(
        self, model: PreTrainedModel, policy: KVpop, stream: SequenceStream, config: DistillConfig,
        teacher: PreTrainedModel | None = None,
    ) -> None:  # fmt: skip
        if (teacher is None) == (config.mode == "full"):
            raise ValueError("full mode needs a frozen dense teacher, scorer mode takes none")
        if teacher is model:
            raise ValueError("the teacher is the model itself: full mode changes the model, give a copy as the teacher")
        longs = config.train_long or (policy.budget.long,)
        if min(longs) < 1:
            raise ValueError(
                f"a budget with {min(longs)} long-range slots decides nothing: at least 1 is needed to train"
            )
        if teacher is not None:
            check_head(model)
        self.budgets = [Budget(policy.budget.sinks, policy.budget.window, long) for long in longs]
        needed = min(b.slots for b in self.budgets) + config.loss.min_future
        if stream.longest_document < needed:
            raise ValueError(
                f"the longest document has {stream.longest_document} tokens; a boundary decision needs at "
                f"least slots + min_future = {needed}"
            )
        self.model, self.policy, self.stream, self.config, self.teacher = model, policy, stream, config, teacher
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            attach(model, policy)
        self.layers = [layer for layer in attached_policies(model) if isinstance(layer, RankedLayer)]
        self.done = 0
        self.weights = weights_digest(model if teacher is None else teacher)  # what training started from
        if teacher is not None:
            attach(teacher.requires_grad_(False).eval(), Dense())
        model.eval()  # no dropout, as in the teacher
        for module in model.modules():
            # A layer checkpoints its activations only in training mode; what is inside it stays without dropout.
            if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
                module.training = config.mode == "full"
        for name, p in model.named_parameters():
            p.requires_grad_(config.mode == "full" or ".kvpop." in name)
        self.groups = self._groups()
        self.optimizer = torch.optim.AdamW(self.groups, betas=config.betas, weight_decay=config.weight_decay)

    def _groups(self) -> list[dict[str, Any]]:
        c = self.config
        alphas = [p for layer in self.layers for n, p in layer.named_parameters() if n.startswith("decay.")]
        scorers = [p for layer in self.layers for n, p in layer.named_parameters() if not n.startswith("decay.")]
        groups: list[dict[str, Any]] = [
            {"params": scorers, "lr": c.scorer_lr, "peak": c.scorer_lr, "schedule": "cosine"},
            {
                "params": alphas,
                "lr": c.scorer_lr,
                "peak": c.scorer_lr * c.decay_lr_ratio,
                "schedule": "cosine",
                "weight_decay": 0.0,
            },
        ]
        if c.mode == "full":
            base = list(base_tensors(self.model).values())
            groups.append({"params": base, "lr": c.base_lr, "peak": c.base_lr, "schedule": "constant"})
        return groups

    def learning_rate(self, step: int, peak: float, schedule: str) -> float:
        """Constant, or linear warm-up then cosine to zero over ``steps``."""
        if schedule == "constant":
            return peak
        warm = max(1, round(self.config.warmup * self.config.steps))
        if step < warm:
            return peak * (step + 1) / warm
        return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, self.config.steps - warm)))

    def generator(self, batch: int, layer: int, inner: int) -> torch.Generator:
        """Sampling randomness as a function of where we are, so nothing has to be saved to resume."""
        seed = ((self.config.seed * 1_000_003 + batch) * 1_009 + layer) * 1_013 + inner
        return torch.Generator().manual_seed(seed % 2**62)

    def batch(self, index: int) -> Batch:
        columns = self.stream.batch(index)
        device = next(self.model.parameters()).device
        ids, document_ids, position_ids = (
            columns[name].to(device) for name in ("input_ids", "document_ids", "position_ids")
        )
        return Batch(index, ids, position_ids, Documents(document_ids))

    def step(self) -> dict[str, Any]:
        """One optimizer step (``inner_updates`` of them in scorer mode). Returns what the log shows."""
        started = time.perf_counter()
        first = self.done * self.config.accumulate
        batches = [self.batch(index) for index in range(first, first + self.config.accumulate)]
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.done, group["peak"], group["schedule"])
        if self.done == 0 and self.config.calibrate:
            self._calibrate(batches[0])
        run = self._scorer_step if self.config.mode == "scorer" else self._full_step
        record = run(batches)
        self.done += 1
        seconds = time.perf_counter() - started
        tokens = sum(batch.ids.numel() for batch in batches)
        return {"step": self.done, **record, "seconds": seconds, "tokens_per_s": tokens / seconds}

    def _forward(
        self, model: PreTrainedModel, batch: Batch, observe: Callable[[LayerView], None] | None = None
    ) -> Tensor:
        """Hidden states before the LM head, under the mask of the attached policy."""
        seq = SequencePass(batch.documents, observe=observe, impl=self.config.impl)
        out = model.get_decoder()(input_ids=batch.ids, position_ids=batch.position_ids, use_cache=False, kvpop=seq)
        return out.last_hidden_state

    @torch.no_grad()
    def _calibrate(self, batch: Batch) -> None:
        def observe(view: LayerView) -> None:
            x = view.documents.to_rows(torch.cat([view.k, view.v], dim=-1))
            index = torch.arange(x.shape[2], device=x.device)
            assert isinstance(view.policy, RankedLayer)
            view.policy.scorer.calibrate(x, index < view.documents.length_N[:, None])

        self._forward(self.model, batch, observe)

    def _supervise(self, view: LayerView) -> Supervised:
        return supervise(view, self.config.target, self.budgets, self.config.impl)

    def _summary(self) -> Summary:
        return Summary(self.budgets[0], self.config.loss.min_future)

    def _scorer_loss(
        self, teacher: Supervised, score_NHL: Tensor, batch: Batch, decisions: Counter[int], summary: Summary | None = None,
        inner: int = 0,
    ) -> Tensor:  # fmt: skip
        """Boundary loss of a layer on one batch, summed over its decisions, which are added to ``decisions``."""
        generator = self.generator(batch.index, teacher.layer, inner)
        loss, stats = scorer_loss(teacher, score_NHL, self.config.loss, self.budgets, generator)
        if summary is not None:
            summary.add(teacher, score_NHL, loss, stats)
        count = int(stats["count_H"].sum())
        decisions[teacher.layer] += count
        return loss * count

    def _update(self, decisions: Counter[int]) -> dict[str, float]:
        """Average the scorers' gradients over the decisions of each layer, clip each group by itself (losses of model and
        scorers never mix), and step. Returns the norms before clipping."""
        for layer in self.layers:
            for p in layer.parameters():
                if p.grad is not None:
                    p.grad /= max(1, decisions[layer.shape.layer])
        norms = {
            name: float(nn.utils.clip_grad_norm_(group["params"], self.config.clip))
            for name, group in zip(("scorer_grad", "decay_grad", "base_grad"), self.optimizer.param_groups)
        }
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norms

    def _scorer_step(self, batches: list[Batch]) -> dict[str, Any]:
        summary, decisions = self._summary(), Counter[int]()
        again: list[tuple[Batch, Supervised]] = []
        for batch in batches:

            def observe(view: LayerView, batch: Batch = batch) -> None:
                assert view.score_NHL is not None
                teacher = self._supervise(view)
                self._scorer_loss(teacher, view.score_NHL, batch, decisions, summary).backward()
                if self.config.inner_updates > 1:
                    again.append((batch, teacher))

            self._forward(self.model, batch, observe)
        record = {**summary.record(), **self._update(decisions)}
        for inner in range(1, self.config.inner_updates):
            decisions = Counter()
            for batch, teacher in again:
                score = teacher.policy.score(teacher.k, teacher.v, batch.documents)
                self._scorer_loss(teacher, score, batch, decisions, inner=inner).backward()
            self._update(decisions)
        return record

    def _full_step(self, batches: list[Batch]) -> dict[str, Any]:
        assert self.teacher is not None
        summary, decisions = self._summary(), Counter[int]()
        tokens = sum(int(batch.documents.valid_BS.sum()) for batch in batches)
        total_kl = 0.0
        for batch in batches:
            seen: dict[int, tuple[Supervised, Tensor]] = {}

            def observe(view: LayerView, seen: dict[int, tuple[Supervised, Tensor]] = seen) -> None:
                assert view.score_NHL is not None
                if not torch.is_grad_enabled():
                    raise ValueError(
                        "reentrant gradient checkpointing loses the scorers: enable it with use_reentrant=False"
                    )
                if view.layer not in seen:  # the backward pass of gradient checkpointing runs a layer again
                    seen[view.layer] = self._supervise(view), view.score_NHL

            hidden = self._forward(self.model, batch, observe)
            with torch.no_grad():
                target = self._forward(self.teacher, batch)
            valid_BS = batch.documents.valid_BS
            kl = distillation_kl(
                hidden, target, self.model.get_output_embeddings(), self.teacher.get_output_embeddings(),
                valid_BS, top=self.config.kl_top, chunk=self.config.kl_chunk,
            )  # fmt: skip
            kl = kl * (int(valid_BS.sum()) / max(1, tokens))
            total_kl += float(kl.detach())
            losses = [self._scorer_loss(teacher, score, batch, decisions, summary) for teacher, score in seen.values()]
            (kl + torch.stack(losses).sum()).backward()
        return {"kl": total_kl, **summary.record(), **self._update(decisions)}

    def save(self, directory: Path) -> None:
        """Checkpoint: weights, optimizer moments and the step, in one safetensors file written atomically."""
        tensors: dict[str, Tensor] = {"step": torch.tensor(self.done)}
        for name, p in self._trained().items():
            tensors[f"param/{name}"] = p
            for key, value in self.optimizer.state.get(p, {}).items():
                tensors[f"{key}/{name}"] = torch.as_tensor(value)
        for name, b in self._buffers().items():
            tensors[f"buffer/{name}"] = b
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f".{STATE}.tmp"
        meta = {"config": json.dumps(self._identity(), sort_keys=True)}
        save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, temporary, metadata=meta)
        os.replace(temporary, directory / STATE)

    def resume(self, directory: Path) -> bool:
        """Continue from a checkpoint in ``directory``; False if there is none. ValueError if it is of another run."""
        path = directory / STATE
        if not path.is_file():
            return False
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                saved = json.loads(file.metadata()["config"])
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): remove it to start anew") from error
        mine = json.loads(json.dumps(self._identity()))
        different = [
            f"{key}: {saved.get(key)!r} there, {mine.get(key)!r} here"
            for key in sorted(saved.keys() | mine.keys())
            if saved.get(key) != mine.get(key)
        ]
        if different:
            raise ValueError(f"{path} belongs to another run ({'; '.join(different)}): use another directory")
        tensors = load_file(path)
        trained = self._trained()
        with torch.no_grad():
            for name, p in trained.items():
                p.copy_(tensors[f"param/{name}"])
                moments = {
                    key: tensors[f"{key}/{name}"]
                    for key in ("exp_avg", "exp_avg_sq", "step")
                    if f"{key}/{name}" in tensors
                }
                if moments:
                    self.optimizer.state[p] = {k: v.to(p.device) if k != "step" else v for k, v in moments.items()}
            for name, b in self._buffers().items():
                b.copy_(tensors[f"buffer/{name}"])
        self.done = int(tensors["step"])
        return True

    def _trained(self) -> dict[str, nn.Parameter]:
        return {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def _buffers(self) -> dict[str, Tensor]:
        return {n: b for n, b in self.model.named_buffers() if ".kvpop." in n}

    def _identity(self) -> dict[str, Any]:
        """What must agree for a checkpoint to be of this run: one entry a setting."""
        config = dataclasses.asdict(self.config)
        for harmless in ("checkpoint_every", "log_every"):
            config.pop(harmless)
        return flattened(
            {
                "model": {
                    "type": self.model.config.model_type,
                    "dtype": str(self.model.dtype),
                    "weights": self.weights,
                    **model_shape(self.model),
                },
                "run": config,
                "policy": dataclasses.asdict(self.policy),
                "data": self.stream.fingerprint(),
            }
        )


def weights_digest(model: nn.Module) -> str:
    """A cheap fingerprint of a model's own weights: the first rows of every parameter."""
    digest = hashlib.sha256()
    for p in base_tensors(model).values():
        digest.update(p.detach().flatten()[:64].double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def flattened(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dictionary as one of dotted names."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag that is read between steps; the second one interrupts as usual."""
    pressed = False

    def handler(signum: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    try:
        previous = signal.signal(signal.SIGINT, handler)
    except ValueError:  # not the main thread: leave signals alone
        yield lambda: False
        return
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL log, up to a line that a crash cut short; none if there is no log."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def distill(
    model: PreTrainedModel,
    policy: KVpop,
    stream: SequenceStream,
    config: DistillConfig,
    directory: str | Path,
    *,
    model_id: str,
    teacher: PreTrainedModel | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> bool:
    """Run (or go on with) a training run and write the adapter into ``directory``; False if it was interrupted.

    ``directory`` holds the checkpoint, the JSONL log (one line a logged step) and, at the end, the adapter. Ctrl-C
    finishes the step, writes a checkpoint and returns; calling again with the same arguments goes on from there.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(model, policy, stream, config, teacher)
    trainer.resume(directory)
    log_path = directory / LOG
    kept = [line for line in read_log(log_path) if line["step"] <= trainer.done]  # the rest will be written again
    log_path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    last: dict[str, Any] = kept[-1] if kept else {}
    with interruptible() as stopped, log_path.open("a") as log:
        while trainer.done < config.steps:
            last = trainer.step()
            if trainer.done % config.log_every == 0 or trainer.done == config.steps:
                log.write(json.dumps(last) + "\n")
                log.flush()
            if on_step is not None:
                on_step(last)
            if trainer.done % config.checkpoint_every == 0 or stopped():
                trainer.save(directory)
            if stopped() and trainer.done < config.steps:
                return False
    trainer.save(directory)
    model.eval()
    facts: dict[str, Any] = {"steps": trainer.done, "config": dataclasses.asdict(config)}
    facts.update({key: last[key] for key in ("score_loss", "accuracy", "recall", "kl") if key in last})
    save_adapter(model, policy, directory, model_id=model_id, training=facts, with_base=config.mode == "full")
    return True

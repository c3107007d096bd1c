"""One run, step by step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from kvpop import lora
from kvpop.adapter import base_fingerprint, fingerprint, model_shape
from kvpop.allocation import apportion
from kvpop.attachment import attach, attached_policies, detach
from kvpop.budget import Budget
from kvpop.data import SequenceStream
from kvpop.distill.config import DistillConfig
from kvpop.distill.optim import Trained, clipped, learning_rate
from kvpop.distill.passes import Batch, LanguagePass
from kvpop.distill.scoring import Scorers, gradient, rows_drawn
from kvpop.distill.world import World, shard
from kvpop.documents import Documents
from kvpop.jsonl import flat
from kvpop.kl import TopLogits, distillation_kl, teacher_logits
from kvpop.models import check_head
from kvpop.policies import Dense, GateSampling, LayerPolicy, LayerView, Policy, RankedLayer, SequencePass
from kvpop.policies.base import layer_budget
from kvpop.policies.dms import closed_counts, shortfall, target_at
from kvpop.supervision import Summary, Supervised
from kvpop.trained import Trained as Adapter
from kvpop.trained import recipe_of, settings_of

# Shapes: B batch, H KV heads, S sequence, E model width.

Observe = Callable[[LayerView], None]


class Trainer:
    """One training run. ``distill`` drives it; tests call ``step`` themselves.

    The policy is attached to ``model`` here. Whatever learns from a KL needs a dense teacher. Where the weights of the model
    stay as they are (scorer mode, and lora mode with the change turned off) that is the model itself; in full and base mode
    ``teacher`` is a copy of it that stays frozen.

    With several processes (``world``) each takes its rows of every batch, and the weights are sharded over them.

    Of the model, whatever policy it had is replaced, and what is not trained is left without ``requires_grad``.

    Raises ValueError if teacher and mode do not fit, if nothing would be trained, and if no sequence is long enough for a
    single boundary decision.
    """

    def __init__(
        self, model: PreTrainedModel, policy: Policy, stream: SequenceStream, config: DistillConfig,
        teacher: PreTrainedModel | None = None, world: World | None = None,
    ) -> None:  # fmt: skip
        self.model, self.policy, self.stream, self.config, self.teacher = model, policy, stream, config, teacher
        self.world = World.current() if world is None else world
        self.device = next(model.parameters()).device
        self.done = 0
        changes_weights = config.mode in ("full", "base")
        if (teacher is None) == changes_weights:
            raise ValueError(
                f"{config.mode} mode changes the weights: it needs a frozen dense teacher, a copy of the model"
                if changes_weights
                else f"{config.mode} mode takes no teacher: the model is its own"
            )
        if changes_weights and lora.lora_parameters(model):
            raise ValueError(
                f"{config.mode} mode changes the weights themselves, but this model has LoRA layers: "
                "kvpop.lora.remove(model, merge=True) makes them part of the weights"
            )
        if teacher is model:
            raise ValueError(f"the teacher is the model itself: {config.mode} mode changes the model, give a copy")
        if stream.batch_size % self.world.size:
            raise ValueError(
                f"a batch of {stream.batch_size} sequences cannot be shared evenly by {self.world.size} processes"
            )
        if config.compute != "same" and not torch.distributed.is_initialized():
            raise ValueError("compute in bfloat16 needs a process group: distill makes one, or world.process_group")
        self.weights = base_fingerprint(model if teacher is None else teacher)  # what training started from
        self.dtype = str(model.dtype)
        had_lora = bool(lora.lora_parameters(model))
        self.low_rank = fingerprint(lora.lora_parameters(model)) if had_lora else None  # the one training goes on from
        self._prepare(model)
        try:
            self._choose(model, policy)
        except ValueError:  # refused: the model as it came
            detach(model)
            if not had_lora:
                lora.remove(model)
            raise
        for p in model.parameters():
            p.requires_grad_(False)
        for p in self.trained.parameters():
            p.requires_grad_(True)
        self.student = LanguagePass(model)
        self.dense = self.student if teacher is None else LanguagePass(teacher)
        self._shard()
        groups = self.trained.groups(config)
        self.optimizer = torch.optim.AdamW(groups, betas=config.betas, weight_decay=config.weight_decay)

    def _choose(self, model: PreTrainedModel, policy: Policy) -> None:
        """What is trained, and by which loss. Raises ValueError if that is nothing, or cannot be."""
        config = self.config
        self.layers = list(attached_policies(model))
        self.trained = Trained.of(model, self.layers, config.mode)
        if not self.trained.parameters():
            raise ValueError(
                f"nothing to train: {policy.name} has no parameters of its own, and the mode is {config.mode}"
            )
        if self.trained.by_kl:
            if model.dtype == torch.float16:
                raise ValueError("the KL cannot train through float16, its gradients vanish: load float32 or bfloat16")
            check_head(model)
        self.ratio = getattr(recipe_of(policy), "ratio", None) if config.mode != "base" else None
        if self.ratio is not None and config.impl == "triton":
            raise ValueError(f"impl='triton' has no relaxed gates, which {policy.name} trains by: use impl='flex'")
        ranked = [layer for layer in self.layers if isinstance(layer, RankedLayer) and layer.taught_by == "boundary"]
        self.scorers = self._scorers(ranked if self.trained.scorers else [])
        learns: set[LayerPolicy] = set(self.scorers.layers if self.scorers else ())
        if self.ratio is not None:
            learns |= {layer for layer in self.layers if layer.taught_by == "kl"}
        self.observed = {layer.shape.layer for layer in learns}
        if config.inner_updates > 1 and self.scorers is None:
            raise ValueError(f"inner_updates is for policies that rank tokens; {policy.name} takes 1")

    def _prepare(self, model: PreTrainedModel) -> None:
        """Policy and low-rank change in place, drawn from the seed; no dropout; checkpointing where it is wanted."""
        config = self.config
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(config.seed)
            attach(model, self.policy)
            if config.mode == "lora" and not lora.lora_parameters(model):
                lora.inject(model, config.lora_rank)
        if self.teacher is not None:
            attach(self.teacher.requires_grad_(False).eval(), Dense())
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if config.checkpointing or any(layer.gradient_checkpointing for layer in layers):
            # Never the reentrant kind: it cuts what layers tell the observer off from the graph.
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        model.eval()  # no dropout, as in the teacher
        for layer in layers:
            # A layer checkpoints its activations only in training mode; what is inside it stays without dropout.
            layer.training = layer.gradient_checkpointing

    def _scorers(self, ranked: list[RankedLayer]) -> Scorers | None:
        if not ranked:
            return None
        own, heads, kv_heads = ranked[0].mean, ranked[0].heads, ranked[0].shape.kv_heads
        longs = self.config.train_long or (own.long,)
        if min(longs) < 1:
            raise ValueError(
                f"a budget with {min(longs)} long-range slots decides nothing: at least 1 is needed to train"
            )
        for layer in ranked[1:]:
            if (layer.mean, layer.heads) != (own, heads) or layer.shape.kv_heads != kv_heads:
                unlike = " of unlike heads" if layer.heads != heads else ""
                raise ValueError(
                    f"layers {ranked[0].shape.layer} and {layer.shape.layer} cannot be trained together: budgets {own} and "
                    f"{layer.mean}{unlike}, {kv_heads} and {layer.shape.kv_heads} KV heads"
                )
        budgets = []
        for long in longs:
            mean, shares = Budget(own.sinks, own.window, long), apportion(heads, long)
            budgets.append(
                {i: layer_budget(mean, shares, i, kv_heads) for i in (layer.shape.layer for layer in ranked)}
            )
        slots = {k for budget in budgets for layer in budget.values() for k in layer.longs(kv_heads)}
        fewest = min(slots - {0}, default=min(longs))
        needed = own.sinks + own.window + fewest + self.config.loss.min_future
        if self.stream.longest_document < needed:
            raise ValueError(
                f"the longest document has {self.stream.longest_document} tokens; a boundary decision needs at "
                f"least slots + min_future = {needed}"
            )
        return Scorers(ranked, budgets, self.config, self.world)

    def _shard(self) -> None:
        """Spread the weights over the processes, or, with another precision to compute in, over this one."""
        compute = torch.bfloat16 if self.config.compute == "bfloat16" else None
        if not torch.distributed.is_initialized():
            return
        for language in dict.fromkeys((self.student, self.dense)):
            model = language.model
            if not hasattr(model.get_decoder(), "layers"):
                raise ValueError(f"{type(model).__name__} cannot be sharded: its decoder has no list of layers")
            small = {p for n, p in model.named_parameters() if ".kvpop." in n or ".lora_" in n}
            shard(language, model.get_decoder().layers, small, compute)
        self.trained = Trained.of(self.model, self.layers, self.config.mode)  # sharding puts others in their place

    def batch(self, index: int) -> Batch:
        columns = self.stream.batch(index, self.world.rank, self.world.size)
        ids, document_ids, position_ids = (
            columns[name].to(self.device) for name in ("input_ids", "document_ids", "position_ids")
        )
        return Batch(index, ids, position_ids, Documents(document_ids), columns["sequence"].tolist())

    def step(self) -> dict[str, Any]:
        """One optimizer step (``inner_updates`` of them in scorer mode). Returns what the log shows."""
        started, config = time.perf_counter(), self.config
        first = self.done * config.accumulate
        batches = [self.batch(index) for index in range(first, first + config.accumulate)]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(config, self.done, group["peak"], group["schedule"])
        if self.done == 0 and config.calibrate:
            self._calibrate(batches[0])
        logs = (self.done + 1) % config.log_every == 0 or self.done + 1 == config.steps
        record = self._learn(batches, logs)
        self.done += 1
        tokens = sum(batch.ids.numel() for batch in batches) * self.world.size
        values = {name: float(x) if isinstance(x, Tensor) else x for name, x in record.items()}  # waits for the device
        seconds = time.perf_counter() - started
        rates = {f"{group['name']}_lr": group["lr"] for group in self.optimizer.param_groups}
        return {
            "step": self.done, **values, **rates, "seconds": seconds, "tokens": tokens, "tokens_per_s": tokens / seconds,
        }  # fmt: skip

    def _learn(self, batches: list[Batch], logs: bool) -> dict[str, Any]:
        summary = self.scorers.summary(logs) if self.scorers else None
        tokens = None
        if self.trained.by_kl:
            tokens = self.world.sum(torch.stack([batch.documents.valid_BS.sum() for batch in batches]).sum())
        totals: dict[str, Tensor] = {}
        again: list[tuple[Batch, Supervised]] = []
        for batch in batches:
            views: dict[int, LayerView] = {}
            observe = _first_of_each_layer(views, self.observed) if self.observed else None
            if tokens is None:
                with torch.no_grad():
                    self._forward(self.student, batch, lambda hidden, head: None, observe)
                loss = None
            else:
                loss = self._model_loss(batch, tokens, observe, views, totals)
            again += self._learn_scorers(batch, views, summary)
            views.clear()
            if loss is not None:
                loss.backward()
        norms = self._update()
        for inner in range(1, self.config.inner_updates):
            for batch, teacher in again:
                assert self.scorers is not None
                self.scorers.learn(teacher, batch, inner)
            self._update()
        for total in totals.values():
            self.world.sum(total)
        return {**totals, **self._scores(summary), **norms}

    def _learn_scorers(
        self, batch: Batch, views: dict[int, LayerView], summary: Summary | None
    ) -> list[tuple[Batch, Supervised]]:
        """Gradients of the boundary losses; what a further update needs again. Nothing else stays in memory."""
        kept = []
        for teacher in self.scorers.supervise(list(views.values())) if self.scorers else ():
            assert self.scorers is not None
            self.scorers.learn(teacher, batch, summary=summary)
            if self.config.inner_updates > 1:
                kept.append((batch, teacher))
        return kept

    def _scores(self, summary: Summary | None) -> dict[str, Any]:
        if summary is None:
            return {}
        if summary.sums is not None:
            self.world.sum(summary.sums)
        return summary.record()

    def _model_loss(
        self, batch: Batch, tokens: Tensor, observe: Observe | None, views: dict[int, LayerView],
        totals: dict[str, Tensor],
    ) -> Tensor:  # fmt: skip
        """KL to the dense teacher and, for gates, the shortfall of what they drop. Scaled so that the *mean* over processes
        of gradients (which is what FSDP forms) is the gradient of the loss over all tokens."""
        valid_BS, config = batch.documents.valid_BS, self.config
        target = self._teacher(batch)
        gates = None
        if self.ratio is not None:
            gates = GateSampling(config.gate_temperature, rows_drawn(config.seed, batch.places))
        kl = self._forward(
            self.student, batch,
            lambda hidden, head: distillation_kl(hidden, head, target, valid_BS, chunk=config.kl_chunk), observe,
            gates=gates,
        ) / tokens.clamp(min=1)  # fmt: skip
        totals["kl"] = totals.get("kl", 0) + kl.detach()
        loss = kl * self.world.size
        if self.ratio is None:
            return loss
        closed, count = self._closed(views)
        share = valid_BS.sum().to(kl.dtype) / tokens.clamp(min=1)
        if self.world.size > 1:
            count = self.world.sum(count.clone())
            closed = closed + (self.world.sum(closed.detach().clone()) - closed).detach()
            share = self.world.sum(share.clone())
        aim = target_at((self.done + 1) / (config.steps * config.gate_ramp), self.ratio)
        totals["closed"] = totals.get("closed", 0) + closed.detach() / count.clamp(min=1) * share / self.world.size
        return loss + shortfall(closed, count, aim) * share * self.world.size

    @torch.no_grad()
    def _teacher(self, batch: Batch) -> TopLogits:
        """What the dense model says: another one, or this one with its change turned off."""

        def read(hidden_BSE: Tensor, head: nn.Module) -> TopLogits:
            return teacher_logits(
                hidden_BSE, head, batch.documents.valid_BS, top=self.config.kl_top, chunk=self.config.kl_chunk
            )

        with lora.adapters_off(self.model) if self.teacher is None else nullcontext():
            return self._forward(self.dense, batch, read, dense=True)

    def _closed(self, views: dict[int, LayerView]) -> tuple[Tensor, Tensor]:
        pairs = [closed_counts(v.closed_BHS, v.documents) for v in views.values() if v.closed_BHS is not None]
        closed, count = (torch.stack(list(values)).sum() for values in zip(*pairs))
        return closed, count.to(closed.dtype)

    def _forward(
        self, language: LanguagePass, batch: Batch, read: Callable[[Tensor, nn.Module], Any],
        observe: Observe | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        seq = SequencePass(batch.documents, observe=observe, impl=self.config.impl, **options)
        return language(batch, seq, read)

    @torch.no_grad()
    def _calibrate(self, batch: Batch) -> None:
        """Standardise the scorers' inputs on the rows of all processes, where that has not been done before."""
        moments: dict[int, Tensor] = {}
        learning = self.scorers.layers if self.scorers else []
        fresh = {layer.shape.layer for layer in learning if not bool(layer.scorer.calibrated)}

        def observe(view: LayerView) -> None:
            if view.layer in fresh:
                x = view.documents.to_rows(torch.cat([view.k, view.v], dim=-1))
                assert isinstance(view.policy, RankedLayer)
                moments[view.layer] = view.policy.scorer.moments(x, view.documents.valid_rows(x.shape[2]))

        if not fresh:
            return
        self._forward(self.student, batch, lambda hidden, head: None, observe)
        self.world.sum_all(list(moments.values()))
        for layer in learning:
            if layer.shape.layer in fresh:
                layer.scorer.standardise(moments[layer.shape.layer])

    def _update(self) -> dict[str, Tensor]:
        """Bring the gradients of all processes together, clip, step. Returns the norms before clipping."""
        if self.scorers:
            self.scorers.average()
        small = [*self.trained.gates, *self.trained.lora]
        self.world.sum_all([gradient(p) for p in small])
        for p in small:
            p.grad = gradient(p) / self.world.size
        norms = clipped(self.optimizer, self.config.clip)
        if wrong := [name for name, norm in norms.items() if not bool(torch.isfinite(norm))]:
            raise ValueError(
                f"step {self.done + 1}: {', '.join(wrong)} is not finite: nothing was changed. A lower learning rate, from "
                "the start, is the usual remedy"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norms

    def identity(self) -> dict[str, Any]:
        """What must agree for a checkpoint to be of this run: one entry a setting."""
        config = dataclasses.asdict(self.config)
        # Passes of another size, a recipe on other machines, are the same run: a step sees the same sequences.
        for harmless in ("checkpoint_every", "log_every", "stack_elements", "checkpointing", "accumulate"):
            config.pop(harmless)
        config["sequences a step"] = self.config.accumulate * self.stream.batch_size
        started = self.policy
        policy = settings_of(recipe_of(started))
        if isinstance(started, Adapter):
            policy["started from"] = fingerprint(started.tensors)
        return flat(
            {
                "model": {
                    "type": self.model.config.model_type,
                    "dtype": self.dtype,
                    "weights": self.weights,
                    "low-rank change": self.low_rank,
                    **model_shape(self.model),
                },
                "run": config,
                "policy": policy,
                "data": self.stream.fingerprint(with_batch_size=False),
            }
        )

    def state(self) -> dict[str, Tensor]:
        """Everything that training changes, by name: parameters, moments and buffers (sharded ones as they are)."""
        tensors: dict[str, Tensor] = {}
        wanted = {id(p) for p in self.trained.parameters()}
        for name, p in self.model.named_parameters():
            if id(p) in wanted:
                tensors[f"param/{name}"] = p.detach()
                for key, value in self.optimizer.state.get(p, {}).items():
                    tensors[f"{key}/{name}"] = value
        for name, b in self.model.named_buffers():
            if ".kvpop." in name:
                tensors[f"buffer/{name}"] = b
        return tensors

    def moments(self) -> None:
        """Make room for the optimizer's moments, as its first step would, to be overwritten by those of a checkpoint."""
        for p in self.trained.parameters():
            self.optimizer.state[p] = {
                "step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p),
            }  # fmt: skip

    def forget_moments(self, names: Iterable[str]) -> None:
        """Of parameters that a checkpoint has none for: they had no gradient yet."""
        parameters = dict(self.model.named_parameters())
        for name in set(names):
            self.optimizer.state.pop(parameters[name], None)


def _first_of_each_layer(views: dict[int, LayerView], wanted: set[int]) -> Observe:
    """Keep what each of these layers shows first: the backward pass of gradient checkpointing runs it again, and keeping that
    would keep all its activations."""
    seen: set[int] = set()

    def observe(view: LayerView) -> None:
        if view.layer in wanted and view.layer not in seen:
            seen.add(view.layer)
            views[view.layer] = view

    return observe

"""The main job, end to end on the embedded model: take the scorers that the package carries, train them on a little, compare
policies on held-out text, generate in flat memory.

Sized for two CPU cores. Everything it states is computed from the figures it just measured.
"""

from __future__ import annotations

import platform
import shutil
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import PreTrainedModel

import kvpop
from kvpop.adapter import Trained, load_policy, pretrained, write_json
from kvpop.attachment import attach, detach
from kvpop.budget import SLOT_OVERHEAD_BYTES, Budget, cache_bytes, entry_bytes
from kvpop.core import BoundaryLoss, Target
from kvpop.corpora import champ_texts
from kvpop.data import SequenceStream, chunks, pack, tokenize
from kvpop.distill import DistillConfig, distill
from kvpop.measure import Entry, compare_retrieval, compare_texts, hidden_states
from kvpop.models import load_base, model_id
from kvpop.plots import demo_figure
from kvpop.policies import Dense, KVpop, Oracle, Random, Streaming, Tova
from kvpop.policies.base import Heads, layer_budget
from kvpop.rollout import generate
from kvpop.scorers import build_scorer
from kvpop.tasks import RetrievalPrompt, mixed_prompt, training_retrieval_document
from kvpop.terminal import ERR

LENGTH = 1024
SINKS, WINDOW = 4, 64
BUDGETS = (256, 128)
CARRIED, CONTINUED = "kvpop", "kvpop-continued"
OURS = (CARRIED, CONTINUED)
RETRIEVAL_SHARE = 0.2
NEEDLES = 4


@dataclass(frozen=True)
class Plan:
    """How much work the machine gets: training steps of one sequence each, texts and prompts to compare on."""

    steps: int
    updates: int = 4
    texts: int = 4
    prompts: int = 3

    @classmethod
    def for_machine(cls, seconds_a_pass: float, minutes: float) -> Plan:
        """The full plan where a dense pass of 1,024 tokens takes up to 3.5 s and there are 10 minutes, less in proportion."""
        share = min(1.0, 3.5 / seconds_a_pass) * min(1.0, minutes / 10)
        if share >= 1:
            return cls(steps=8)
        scaled = [max(2, int(n * share)) for n in (cls.texts, cls.prompts)]
        return cls(max(4, int(8 * share)), cls.updates, *scaled)


def run_demo(out: Path, minutes: float = 10.0) -> tuple[dict[str, Any], list[str]]:
    """Run it all; return the report and what it says in sentences.

    Writes ``report.json`` and ``report.png`` into ``out``; the trained adapters lie beside them. ``minutes`` bounds the
    time on two cores, after installation and the one-time conversion of the model.
    """
    if not minutes > 0:
        raise ValueError(f"minutes must be positive, got {minutes}")
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with Progress(
        TextColumn("{task.description:<30}"), BarColumn(bar_width=16), TextColumn("{task.completed:>4}/{task.total}"),
        TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=ERR,
    ) as progress:  # fmt: skip
        loading = progress.add_task("load the model and the texts", total=3, note="(first time: converts the model)")
        model, tokenizer = load_base("smollm2")
        progress.advance(loading)
        train = list(islice(tokenize(champ_texts("train"), tokenizer), 16))
        held_out = [
            tokens for tokens in islice(tokenize(champ_texts("test"), tokenizer), 8) if len(tokens) > 2 * LENGTH
        ]
        progress.advance(loading)
        texts = [torch.from_numpy(tokens[:LENGTH].astype(np.int64)) for tokens in held_out]
        attach(model, Dense())
        before = time.perf_counter()
        hidden_states(model, texts[0][None])
        plan = Plan.for_machine(time.perf_counter() - before, minutes)
        detach(model)
        progress.update(loading, advance=1, note=f"{plan.steps} steps, {plan.texts} texts")
        carried = load_policy(pretrained("smollm2"))
        policies = {
            CARRIED: carried,
            CONTINUED: _continue(model, carried, plan, train, tokenizer, out / CONTINUED, progress),
        }
        prompts = _prompts(tokenizer, held_out, plan)
        entries = _entries(policies, model)
        rows = _compare(model, entries, texts[: plan.texts], prompts, progress)
        best = min(
            (row for row in rows if row["policy"] in OURS and row["budget"] == BUDGETS[-1]), key=lambda r: r["kl"]
        )
        generation = _generate(model, policies[best["policy"]], best["policy"], held_out[-1], progress)
    report = {
        "model": model_id("smollm2"),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"kvpop": kvpop.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "command": "make demo",
        "settings": {"length": LENGTH, "start": max(BUDGETS), "sinks": SINKS, "window": WINDOW, **vars(plan)},
        "rows": rows,
        "generation": generation,
        "seconds": round(time.perf_counter() - started, 1),
    }
    lines = findings(report)
    report["findings"] = lines
    write_json(out / "report.json", report)
    demo_figure(report, out / "report.png")
    where = f"Written: {out / 'report.json'}, {out / 'report.png'}; the continued scorers are in {out / CONTINUED}."
    return report, [*lines, where]


def budget_of(slots: int) -> Budget:
    return Budget.of_slots(slots, sinks=SINKS, window=WINDOW)


def charged_budget(slots: int, scorer: str, model: PreTrainedModel) -> Budget:
    """``slots`` less what the scorer's state costs in bytes: stateful and stateless scorers get the same memory."""
    config = model.config.get_text_config()
    entry = entry_bytes(config.head_dim, model.dtype.itemsize) + SLOT_OVERHEAD_BYTES
    return budget_of(slots).charged(_state_bytes(scorer, model), entry)


def _state_bytes(scorer: str, model: PreTrainedModel) -> int:
    config = model.config.get_text_config()
    return build_scorer(scorer, config.num_key_value_heads, config.head_dim).state_bytes()


def _scorer_of(policy: Trained) -> str:
    assert isinstance(policy.policy, KVpop)
    return policy.policy.scorer


def _continue(
    model: PreTrainedModel, carried: Trained, plan: Plan, train: list[Any], tokenizer: Any, directory: Path,
    progress: Progress,
) -> Trained:  # fmt: skip
    """Scorer-only training that starts from trained scorers: long maths text with a share of retrieval documents, one
    sequence a step."""
    rng = np.random.default_rng(0)
    retrieval = max(1, round(RETRIEVAL_SHARE * plan.steps))
    pieces = [piece for tokens in train for piece in islice(chunks([tokens], LENGTH), 1) if len(piece) == LENGTH]
    pieces = pieces[: plan.steps - retrieval]
    haystacks = [tokens for tokens in train if len(tokens) > 2 * LENGTH]
    for i in range(retrieval):
        document = training_retrieval_document(tokenizer, haystacks[i % len(haystacks)][LENGTH:], LENGTH, rng)
        pieces.append(np.asarray(document.tokens, dtype=np.uint32))
    stream = SequenceStream(list(pack(pieces, LENGTH)), batch_size=1)
    longs = tuple(budget_of(slots).long for slots in BUDGETS)
    config = DistillConfig(
        steps=plan.steps, inner_updates=plan.updates, train_long=longs, scorer_lr=3e-4, target=Target(),
        loss=BoundaryLoss(samples=0, min_future=64, regret=1.0, balance=(1.0, 1.0)),
    )  # fmt: skip
    task = progress.add_task("go on training the scorers", total=plan.steps, note="")

    def on_step(record: dict[str, Any]) -> None:
        note = f"boundary accuracy {record['accuracy']:.2f}, recall of the teacher {record['recall']:.2f}"
        progress.update(task, completed=record["step"], note=note)

    marker = directory / "made-by-the-demo"
    if not directory.exists():
        directory.mkdir(parents=True)
        marker.touch()

    def run() -> bool:
        policy = carried.with_budget(budget_of(BUDGETS[0]))
        return distill(model, policy, stream, config, directory, model_id=model_id("smollm2"), on_step=on_step)

    try:
        finished = run()
    except ValueError as error:
        if "belongs to another run" not in str(error) or not marker.exists():
            raise
        shutil.rmtree(directory)  # an earlier demo with other settings; never somebody's own run
        directory.mkdir()
        marker.touch()
        finished = run()
    if not finished:
        raise KeyboardInterrupt
    progress.update(task, completed=plan.steps)
    detach(model)
    return load_policy(directory)


def _prompts(tokenizer: Any, held_out: list[Any], plan: Plan) -> list[RetrievalPrompt]:
    rng = np.random.default_rng(1)
    length = LENGTH - 24
    hay = [tokens[LENGTH:] if len(tokens) > 2 * LENGTH + 64 else tokens for tokens in held_out]
    return [mixed_prompt(tokenizer, hay[i % len(hay)], length, NEEDLES, rng) for i in range(plan.prompts)]


def _entries(policies: dict[str, Trained], model: PreTrainedModel) -> list[Entry]:
    entries = [Entry("dense", None, Dense())]
    for slots in BUDGETS:
        budget = budget_of(slots)
        entries += [
            Entry("streaming", slots, Streaming(budget)),
            Entry("random", slots, Random(budget)),
            Entry("tova", slots, Tova(slots)),
        ]
        for name, policy in policies.items():
            entries.append(Entry(name, slots, policy.with_budget(charged_budget(slots, _scorer_of(policy), model))))
        entries.append(Entry("oracle", slots, Oracle(budget, heads=_heads(policies[CARRIED].with_budget(budget)))))
    return entries


def _heads(policy: Trained) -> Heads:
    assert isinstance(policy.policy, KVpop)
    return policy.policy.heads


def _compare(
    model: PreTrainedModel,
    entries: list[Entry],
    texts: list[Tensor],
    prompts: list[RetrievalPrompt],
    progress: Progress,
) -> list[dict[str, Any]]:
    """One row per entry. Texts are scored where the larger budget is already full, so every policy is tested."""
    start = max(BUDGETS)
    task = progress.add_task(f"compare on {len(texts)} held-out texts", total=len(texts) * (len(entries) + 1), note="")
    scores = compare_texts(model, texts, entries, start, lambda what: progress.update(task, advance=1, note=what))
    progress.update(task, note="")
    task = progress.add_task(f"compare on {len(prompts)} retrieval prompts", total=len(prompts) * len(entries), note="")
    retrieval = compare_retrieval(model, prompts, entries, lambda what: progress.update(task, advance=1, note=what))
    progress.update(task, note="")
    rows = []
    for entry, score, tasks in zip(entries, scores, retrieval):
        row = {"policy": entry.label, "budget": entry.budget, **score.row(start)}
        for name in ("passkey", "needle"):
            values = tasks[name].row()
            row |= {name: values["exact"], f"{name}_nll": values["nll"], f"{name}_answers": values["answers"]}
        rows.append(row)
    return rows


def _generate(model: PreTrainedModel, policy: Trained, name: str, tokens: Any, progress: Progress) -> dict[str, Any]:
    """Go on from a held-out problem until ten times the budget has been seen; record what the cache holds on the way."""
    slots = BUDGETS[-1]
    total = 10 * slots
    budget = charged_budget(slots, _scorer_of(policy), model)
    policy, config = policy.with_budget(budget), model.config.get_text_config()
    attach(model, policy)
    budgets = [
        layer_budget(budget, _heads(policy), i, config.num_key_value_heads) for i in range(config.num_hidden_layers)
    ]
    prompt = torch.from_numpy(tokens[:slots].astype(np.int64))[None]
    task = progress.add_task(f"generate to 10 x {slots} tokens", total=total, note="")
    trace: list[dict[str, int]] = []
    started, full = time.perf_counter(), 0
    for step in generate(model, prompt, max_new_tokens=total - slots + 1, temperature=0.7, top_p=0.9, seed=0):
        if step.held == max(of_layer.slots for of_layer in budgets) and not full:
            full = step.nbytes
        trace.append({"tokens": step.seen, "bytes": step.nbytes, "bytes_dense": step.dense_bytes, "held": step.held})
        rate = len(trace) / (time.perf_counter() - started)
        progress.update(
            task,
            completed=step.seen,
            note=f"{step.nbytes / 1e6:.1f} MB held, dense {step.dense_bytes / 1e6:.1f}; {rate:.1f} tok/s",
        )
    detach(model)
    formula = cache_bytes(
        budgets, layers=config.num_hidden_layers, kv_heads=config.num_key_value_heads, head_dim=config.head_dim,
        element_size=model.dtype.itemsize,
        state_bytes=_state_bytes(_scorer_of(policy), model),
    )  # fmt: skip
    return {
        "policy": name,
        "budget": slots,
        "slots": budget.slots,
        "tokens": trace[-1]["tokens"],
        "bytes_first_full": full,
        "bytes_last": trace[-1]["bytes"],
        "bytes_formula": formula,
        "bytes_dense": trace[-1]["bytes_dense"],
        "tokens_per_second": len(trace) / (time.perf_counter() - started),
        "trace": trace[::8] + trace[-1:],
    }


def findings(report: dict[str, Any]) -> list[str]:
    """What the figures say, in sentences; nothing is said that they do not."""
    by = {(row["policy"], row["budget"]): row for row in report["rows"]}
    lines = []
    for slots in BUDGETS:
        name = min(OURS, key=lambda policy: by[policy, slots]["kl"])
        ours, oracle = by[name, slots], by["oracle", slots]
        others = {policy: by[policy, slots] for policy in ("streaming", "random", "tova")}
        wins = [p for p, row in others.items() if ours["kl"] < row["kl"] and ours["agreement"] > row["agreement"]]
        losses = [p for p in others if p not in wins]
        stream = others["streaming"]
        less = 1 - ours["kl"] / stream["kl"]
        lines.append(
            f"At {slots} slots ({slots / LENGTH:.1%} of {LENGTH} tokens) {name} is the better scorer: KL to dense "
            f"{ours['kl']:.3f} against {stream['kl']:.3f} for StreamingLLM ({less:.0%} less), top-1 agreement "
            f"{ours['agreement']:.1%} against {stream['agreement']:.1%}. "
            + (f"It beats {', '.join(wins)} on both measures. " if wins else "")
            + (f"It does not beat {', '.join(losses)} on both." if losses else "")
        )
        lines.append(
            f"  The oracle, which knows the future attention, reaches KL {oracle['kl']:.3f}: the scorer closed "
            f"{(stream['kl'] - ours['kl']) / max(1e-9, stream['kl'] - oracle['kl']):.0%} of the way from StreamingLLM. "
            f"Retrieval (passkey / needle): {ours['passkey']:.0%} / {ours['needle']:.0%}, oracle {oracle['passkey']:.0%} / "
            f"{oracle['needle']:.0%}, dense {by['dense', None]['passkey']:.0%} / {by['dense', None]['needle']:.0%}."
        )
    g = report["generation"]
    flat = g["bytes_first_full"] == g["bytes_last"] == g["bytes_formula"]
    lines.append(
        f"Generating to {g['tokens']} tokens, {g['tokens'] / g['budget']:.0f} times the budget, the cache "
        + (f"held exactly {g['bytes_last'] / 1e6:.2f} MB from the first full step to the last, as the formula says"
           if flat else f"went from {g['bytes_first_full']} to {g['bytes_last']} bytes, formula {g['bytes_formula']}")
        + f"; a dense cache would hold {g['bytes_dense'] / 1e6:.2f} MB and still grow."
    )  # fmt: skip
    return lines

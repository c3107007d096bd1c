"""The experiment on SmolLM2-135M: every policy, trained by the same loop, beside those that need no training.

    python benchmarks/experiment.py prepare --data out/champ                    # texts: champ, by problem (CPU, 2 minutes)
    python benchmarks/experiment.py run --data out/champ --out out/exp --group scorer --workers 3     # on a GPU
    python benchmarks/experiment.py collect --out out/exp --result benchmarks/results/smollm2-4k-h200.json

``run`` works off a list of runs, each in a process of its own; a run whose row exists is left out, so that the same command
goes on where it stopped. Every row holds its values by document: intervals are bootstraps over documents.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from kvpop.attachment import detach
from kvpop.budget import Budget
from kvpop.core import BoundaryLoss, Target

LENGTH, SINKS, WINDOW = 4096, 4, 64
BUDGETS = (1024, 512)
DECAY_RANGE = (-20.0 / LENGTH, -0.1 / LENGTH)
NO_DECAY = (-2e-9, -1e-9)
RETRIEVAL_SHARE = 0.3
KEYS = 4
CURVES = 16  # training sequences whose longest documents say what slots are worth
CURVES_FILE = "curves-w{window}.safetensors"
GRACE = 30  # seconds for a checkpoint
TASKS = ("passkey_2k", "passkey_4k", "needle_2k", "needle_4k", "needle_nll_2k", "needle_nll_4k")
SHOWN = ("kl", "agreement", "accuracy", *TASKS)

# What each run differs in from DEFAULTS. Scorers learn to decide at both budgets at once; weights and DMS' gates learn under
# the smaller one and are measured at both. Ablations are of the MLP, in fewer steps.
FIRST = {"torch": "2.11.0+cu130", "transformers": "5.17.0"}  # of rows from before they were recorded
DEFAULTS: dict[str, Any] = dict(
    policy="kvpop", scorer="mlp+mlstm", mode="scorer", seed=0, steps=300, batch=4, inner=2, lr=2e-3, base_lr=8e-5, power=2.0,
    aggregate="max", lse="sparse", decay=-5.0, window=WINDOW, train_budget=None, share=RETRIEVAL_SHARE, packing=None,
    emitted_by="next", regret=1.0, balance=False, residual=0, decay_lr=0.1, ramp=0.6, impl="flex", by_head=False,
)  # fmt: skip
SCORERS = {"mlp": "mlp", "mlstm": "mlstm", "immediate": "mlstm-immediate", "sum": "mlp+mlstm"}


def all_runs() -> dict[str, dict[str, Any]]:
    runs: dict[str, dict[str, Any]] = {}
    for seed in (0, 1):
        for name, scorer in SCORERS.items():
            runs[f"scorer/{name}/{seed}"] = dict(scorer=scorer, seed=seed)
            runs[f"by-head/{name}/{seed}"] = dict(scorer=scorer, seed=seed, by_head=True)
        for emitter in ("next", "self"):
            name = "dms" if emitter == "next" else "dms-self"
            runs[f"scorer/{name}/{seed}"] = dict(policy="dms", emitted_by=emitter, seed=seed, train_budget=512)
        full = dict(mode="full", seed=seed, train_budget=min(BUDGETS), steps=200, inner=1)
        for name, scorer in SCORERS.items():
            runs[f"full/{name}/{seed}"] = dict(scorer=scorer, **full)
            runs[f"full-by-head/{name}/{seed}"] = dict(scorer=scorer, by_head=True, **full)
        for name in ("streaming", "dms"):
            runs[f"full/{name}/{seed}"] = dict(policy=name, **full)
        runs[f"full/dms-self/{seed}"] = dict(policy="dms", emitted_by="self", **full)
    ablations: dict[str, dict[str, Any]] = {
        "base": {}, "dense-lse": dict(lse="dense"), "p1": dict(power=1.0), "p4": dict(power=4.0),
        "mean": dict(aggregate="mean"), "no-decay": dict(decay=0.0), "decay-1": dict(decay=-1.0),
        "decay-small": dict(decay=-0.2),
        "w32": dict(window=32), "w128": dict(window=128), "lr1": dict(lr=1e-3),
        "lr4": dict(lr=4e-3), "no-retrieval": dict(share=0.0), "half-retrieval": dict(share=0.5),
        "paper-weights": dict(regret=0.0, balance=True), "unbalanced": dict(regret=0.0), "regret-half": dict(regret=0.5),
        "residual": dict(residual=64, power=1.0), "residual-half": dict(residual=64, power=1.0, regret=0.5),
        "residual-decay": dict(residual=64, power=1.0, decay_lr=1.0), "residual-p2": dict(residual=64),
        "by-head": dict(by_head=True), "by-head-residual": dict(by_head=True, residual=64, power=1.0),
        "by-head-residual-p2": dict(by_head=True, residual=64), "by-head-w32": dict(by_head=True, window=32),
        "by-head-p4": dict(by_head=True, power=4.0), "by-head-mean": dict(by_head=True, aggregate="mean"),
        "immediate": dict(scorer="mlstm-immediate"), "delayed": dict(scorer="mlstm"), "sum": dict(scorer="mlp+mlstm"),
        "isolated-pieces": dict(packing="isolated"), "shared-pieces": dict(packing="shared"),
        "long": dict(steps=1200), "dms": dict(policy="dms", train_budget=512),
        "dms-self": dict(policy="dms", emitted_by="self", train_budget=512),
    }  # fmt: skip
    for name, settings in ablations.items():
        runs[f"ablation/{name}"] = dict(scorer="mlp", steps=150) | settings
    for name in ("streaming", "random", "oracle", "oracle-p2", "dense"):
        runs[f"untrained/{name}"] = dict(policy=name, mode="")
    runs["untrained/oracle-by-head"] = dict(policy="oracle-p2", mode="", by_head=True)
    for budget in BUDGETS:
        runs[f"untrained/tova-{budget}"] = dict(policy="tova", mode="", train_budget=budget)
    return runs


def budget_of(slots: int, window: int = WINDOW) -> Budget:
    return Budget.of_slots(slots, sinks=SINKS, window=window)


def prepare(data: Path, model: str) -> None:
    """``data``/train: packed sequences; ``data``/{validation,test}.jsonl: a problem a line, as token ids."""
    from kvpop.corpora import champ_texts
    from kvpop.data import Corpus, tokenize
    from kvpop.data import prepare as prepare_corpus
    from kvpop.jobs import load_tokenizer

    tokenizer = load_tokenizer(model)
    data.mkdir(parents=True, exist_ok=True)
    made = prepare_corpus(Corpus("champ", overlong="cut"), tokenizer, data / "train", LENGTH)
    print(f"{len(made)} sequences of {LENGTH} tokens")
    for split in ("validation", "test"):
        documents = [ids.tolist() for ids in tokenize(champ_texts(split), tokenizer)]  # type: ignore[arg-type]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(d[: 5 * LENGTH]) + "\n" for d in documents))
        print(
            f"{split}: {len(documents)} problems, {sum(len(d) >= LENGTH for d in documents)} of {LENGTH} tokens and more"
        )


def documents(data: Path, split: str) -> list[list[int]]:
    return [json.loads(line) for line in (data / f"{split}.jsonl").read_text().splitlines()]


def held_out(data: Path, split: str, tokenizer: Any, texts: int, prompts: int) -> tuple[list[Tensor], list[Any]]:
    """The beginnings of so many problems, and so many retrieval prompts of 2,048 and of 4,096 tokens in their later text."""
    from kvpop.tasks import mixed_prompt

    found = documents(data, split)
    long = [torch.tensor(d[:LENGTH]) for d in found if len(d) >= LENGTH][:texts]
    haystack = [token for d in found for token in d]
    return long, [
        mixed_prompt(tokenizer, haystack, length, KEYS, np.random.default_rng([17, length, i]))
        for length in (LENGTH // 2, LENGTH)
        for i in range(prompts)
    ]


def pieces_of(stream: Any, packing: str, seed: int) -> Any:
    """The same tokens, each sequence of four quarters from four others: as four documents, or "shared", as one."""
    from kvpop.data import PackedSequence, SequenceStream

    tokens = stream.sequences.columns(range(len(stream)))["input_ids"].reshape(-1, LENGTH // 4)
    order = np.random.default_rng([seed, 23]).permutation(len(tokens)).reshape(-1, 4)
    made = [PackedSequence.from_pieces(list(tokens[four]), LENGTH, shared=packing == "shared") for four in order]
    return SequenceStream(made, stream.batch_size, stream.seed)


def evaluate(
    model: Any, entries: Sequence[Any], texts: list[Tensor], prompts: list[Any], settings: dict[str, Any], split: str
) -> list[dict[str, Any]]:
    """A row per entry: scored from the larger budget on, where every policy has had to drop tokens."""
    from kvpop import measure
    from kvpop.measure import compare_recall, compare_retrieval, compare_texts, interval

    if settings["policy"] == "tova":
        measure.BATCH = 64
    start = max(BUDGETS)
    rows = []
    retrieval = compare_retrieval(model, prompts, entries)
    for entry, scores, tasks in zip(entries, compare_texts(model, texts, entries, start), retrieval):
        kept = budget_of(entry.budget or LENGTH // 2, settings["window"])
        slow = settings["policy"] == "tova"  # token by token
        recall = {"recall": [], "held": []} if slow else compare_recall(model, texts[:8], [entry], kept, start=start)[0]
        row = scores.row(start)
        by_text = {"kl": row["kl_by_text"], "agreement": row["agreement_by_text"], "accuracy": row["accuracy_by_text"]}
        by_text["nll"] = [float(x.mean()) for x in scores.nll]
        if not slow:
            by_text["recall"] = torch.tensor(recall["recall"]).mean(0).tolist()
        for task, found in tasks.items():
            for length in sorted(set(found.length)):
                here = [i for i, n in enumerate(found.length) if n == length]
                per = 1 if task == "passkey" else KEYS  # answers of one prompt belong together
                groups = [here[i : i + per] for i in range(0, len(here), per)]
                short = f"{length // 1024}k"
                by_text[f"{task}_{short}"] = [sum(found.exact[i] for i in g) / len(g) for g in groups]
                by_text[f"{task}_nll_{short}"] = [sum(found.nll[i] for i in g) / len(g) for g in groups]
            by_text[task] = [x for n in ("2k", "4k") for x in by_text[f"{task}_{n}"]]
        rows.append(
            {
                "policy": entry.label, "mode": settings["mode"], "seed": settings["seed"] if settings["mode"] else None,
                "budget": entry.budget, "split": split,
                **{name: interval(values) for name, values in by_text.items()},
                "held": entry.budget if slow else float(torch.tensor(recall["held"]).mean()),
                "recall_by_layer": [] if slow else torch.tensor(recall["recall"]).mean(1).tolist(),
                "by_document": by_text,
            }
        )  # fmt: skip
        print(f"{split} {entry.label} {entry.budget}: " + ", ".join(
            f"{name} {rows[-1][name]['value']:.4f}" for name in
            SHOWN
        ) + f", held {rows[-1]['held']:.0f}", flush=True)  # fmt: skip
    return rows


def matched(model: Any, policy: Any, texts: list[Tensor], slots: int, weights: Any) -> Any:
    """A trained DMS policy whose threshold makes KV heads hold ``slots`` tokens on average over these texts' positions."""
    from kvpop.measure import Entry, hidden_states, measured

    found: list[Tensor] = []

    def observe(view: Any) -> None:
        found.append(view.logit_BHS[0, :, : LENGTH - 1].float())

    start, low, high = max(BUDGETS), -60.0, 60.0
    with measured(model, Entry("dms", None, policy, weights)):
        for text in texts[:6]:
            hidden_states(model, text[None], observe)
    detach(model)
    logits = torch.cat(found)
    eligible = torch.arange(LENGTH - 1, device=logits.device) + policy.policy.window
    lives = (LENGTH - eligible.clamp(min=start)).clamp(min=0)  # scored positions at which it is held if open
    for _ in range(40):
        middle = (low + high) / 2
        held = policy.policy.window + ((logits <= middle) * lives).sum(-1).float().mean() / (LENGTH - start)
        low, high = (middle, high) if held < slots else (low, middle)
    inner = dataclasses.replace(policy.policy, threshold=float((low + high) / 2))
    return dataclasses.replace(policy, policy=inner)


def training_sequences(settings: dict[str, Any], data: Path, tokenizer: Any) -> Any:
    from kvpop.jobs import training_stream

    s = settings
    stream = training_stream(str(data / "train"), tokenizer, LENGTH, s["batch"], s["seed"], 0, s["share"])
    return pieces_of(stream, s["packing"], s["seed"]) if s["packing"] else stream


def curves_for(settings: dict[str, Any], model: Any, stream: Any, policy: Any = None) -> Tensor:
    """What each slot of a KV head saves, on the first training sequences, as ``policy`` ranks tokens (None: the oracle)."""
    from kvpop.jobs import document_curves

    return document_curves(model, stream, budget_of(max(BUDGETS), settings["window"]), CURVES, policy)


def heads_from(curves: Tensor, settings: dict[str, Any]) -> dict[int, Any]:
    """The long-range slots of every KV head under each budget."""
    from kvpop.allocation import allocate

    return {b: allocate(curves, budget_of(b, settings["window"]).long) for b in BUDGETS}


def heads_for(settings: dict[str, Any], model: Any, stream: Any, out: Path) -> dict[int, Any]:
    """Before anything has learned: from the curves of the oracle, a file of all runs of a window; none if heads are equal."""
    from kvpop.allocation import read_curves, write_curves

    if not settings["by_head"]:
        return dict.fromkeys(BUDGETS, ())
    path = out / CURVES_FILE.format(window=settings["window"])
    if not path.exists():
        made = path.with_suffix(f".{os.getpid()}")
        made.parent.mkdir(parents=True, exist_ok=True)
        write_curves(made, curves_for(settings, model, stream))
        made.rename(path)
    return heads_from(read_curves(path), settings)


def untrained(settings: dict[str, Any], heads: dict[int, Any]) -> list[Any]:
    from kvpop.measure import Entry
    from kvpop.policies import Dense, Oracle, Random, Streaming, Tova

    kind = settings["policy"]
    if kind == "dense":
        return [Entry("dense", None, Dense())]
    make = {
        "streaming": lambda b: Streaming(budget_of(b)),
        "random": lambda b: Random(budget_of(b)),
        "oracle": lambda b: Oracle(budget_of(b), decay=-2e-4),
        "oracle-p2": lambda b: Oracle(budget_of(b), Target(lse="dense", power=2.0), decay=-2e-4, heads=heads[b]),
        "tova": Tova,
    }[kind]
    label = "oracle-by-head" if settings["by_head"] else kind
    return [Entry(label, b, make(b)) for b in ([settings["train_budget"]] if settings["train_budget"] else BUDGETS)]


def train(
    settings: dict[str, Any], data: Path, model: Any, tokenizer: Any, out: Path, model_id: str
) -> tuple[Any, list[Any]]:
    """Train; the model to evaluate on, which has its own weights, and the entries."""
    from kvpop.adapter import changed_weights, load_policy
    from kvpop.distill import DistillConfig, distill
    from kvpop.measure import Entry, swapped
    from kvpop.policies import DMS, KVpop, Streaming

    s, mode = settings, settings["mode"]
    stream = training_sequences(s, data, tokenizer)
    heads = heads_for(s, model, stream, out.parents[1])
    first = s["train_budget"] or max(BUDGETS)
    budget = budget_of(first, s["window"])
    policy: Any
    if s["policy"] == "streaming":
        policy = Streaming(budget)
    elif s["policy"] == "dms":
        # Its memory grows with the text: the ratio that holds the budget on average over the scored positions.
        middle = (max(BUDGETS) + LENGTH) / 2
        policy = DMS(
            window=s["window"], ratio=(middle - s["window"]) / (first - s["window"]), emitted_by=s["emitted_by"]
        )
    else:
        decay = dict(decay=s["decay"] / LENGTH, decay_range=DECAY_RANGE)  # in nats over a whole sequence
        if not s["decay"]:
            decay = dict(decay=sum(NO_DECAY) / 2, decay_range=NO_DECAY)
        policy = KVpop(budget, s["scorer"], **decay, heads=heads[first])
    longs = tuple(budget_of(b, s["window"]).long for b in BUDGETS)
    config = DistillConfig(
        mode=mode, steps=s["steps"], seed=s["seed"], scorer_lr=s["lr"], base_lr=s["base_lr"], train_long=longs,
        inner_updates=s["inner"] if s["policy"] == "kvpop" else 1,
        target=Target(power=s["power"], aggregate=s["aggregate"], lse=s["lse"], residual=s["residual"]),
        decay_lr_ratio=s["decay_lr"],
        loss=BoundaryLoss(
            samples=0, min_future=128, regret=s["regret"], balance=(0.5, 4.0) if s["balance"] else (1.0, 1.0)
        ),
        impl=s["impl"] if torch.cuda.is_available() else "reference",
        compute="bfloat16" if mode == "full" else "same",
        gate_ramp=s["ramp"], log_every=10,
        checkpoint_every=10**9,
    )  # fmt: skip
    from kvpop.models import load_base

    teacher = load_base(model_id, torch.float32, next(model.parameters()).device)[0] if mode == "full" else None
    started = time.perf_counter()

    def on_step(record: dict[str, Any]) -> None:
        if record["step"] % 20 == 0:
            shown = {k: round(v, 4) for k, v in record.items() if isinstance(v, float) and not k.endswith("lr")}
            print(record["step"], round(time.perf_counter() - started), shown, flush=True)

    if not distill(model, policy, stream, config, out, model_id=model_id, teacher=teacher, on_step=on_step):
        sys.exit(130)
    trained, weights = load_policy(out), None
    if mode == "full":
        device = next(model.parameters()).device
        del model, teacher
        model, _ = load_base(model_id, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
        weights = changed_weights(model, out)
    detach(model)
    label = f"kvpop-{s['scorer']}" + ("-by-head" if s["by_head"] else "") if s["policy"] == "kvpop" else s["policy"]
    if s["policy"] == "dms" and s["emitted_by"] == "self":
        label = "dms-self"
    if s["policy"] == "dms":
        texts, _ = held_out(data, "validation", tokenizer, 6, 0)
        return model, [Entry(label, b, matched(model, trained, texts, b, weights), weights) for b in BUDGETS]
    if s["policy"] == "kvpop":
        plain = dataclasses.replace(trained.policy, heads=())
        if s["by_head"]:  # shared out anew, by what the slots save where these scorers fill them
            ranking = dataclasses.replace(trained, policy=plain)
            with swapped(model, weights):
                heads = heads_from(curves_for(s, model, stream, ranking), s)
        kinds = {b: dataclasses.replace(plain, budget=budget_of(b, s["window"]), heads=heads[b]) for b in BUDGETS}
        return model, [Entry(label, b, dataclasses.replace(trained, policy=kinds[b]), weights) for b in BUDGETS]
    return model, [Entry(label, b, trained.with_budget(budget_of(b, s["window"])), weights) for b in BUDGETS]


def one(name: str, options: argparse.Namespace) -> None:
    from kvpop.jobs import load_model

    settings = {**DEFAULTS, **all_runs()[name], **dict(options.set)}
    torch.set_num_threads(2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    full = settings["mode"] == "full"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    started = time.perf_counter()
    model, tokenizer = load_model(options.model, torch.float32 if full else dtype, device)
    work = options.out / "runs" / name.replace("/", "-")
    if settings["mode"]:
        model, entries = train(settings, options.data, model, tokenizer, work, options.model)
    else:
        stream = training_sequences(settings, options.data, tokenizer)
        entries = untrained(settings, heads_for(settings, model, stream, options.out))
    trained_seconds = time.perf_counter() - started
    rows = []
    for split, texts, prompts in (("validation", 16, 12), ("test", 40, 32)):
        if split not in options.splits or (split == "validation" and not settings["mode"]):
            continue  # nothing about the untrained is chosen
        rows += evaluate(
            model, entries, *held_out(options.data, split, tokenizer, options.texts or texts, options.prompts or prompts),
            settings, split,
        )  # fmt: skip
    detach(model)
    path = options.out / "rows" / f"{name.replace('/', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {"run": name, "settings": settings, "seconds": round(time.perf_counter() - started),
            "seconds_trained": round(trained_seconds), "rows": rows,
            "machine": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "command": f"python benchmarks/experiment.py run --group {name}" + given(options)}  # fmt: skip
    path.write_text(json.dumps(done))


def curves(options: argparse.Namespace) -> None:
    from kvpop.jobs import load_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_model(options.model, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    settings = {**DEFAULTS, "by_head": True}
    heads_for(settings, model, training_sequences(settings, options.data, tokenizer), options.out)


def given(options: argparse.Namespace) -> str:
    return "".join(f" --set {name}={json.dumps(value)}" for name, value in options.set)


def setting(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value as JSON or a string."""
    name, _, value = text.partition("=")
    if name not in DEFAULTS:
        raise argparse.ArgumentTypeError(f"{name} is none of {', '.join(DEFAULTS)}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def show(options: argparse.Namespace) -> None:
    """What has been measured, a line a row."""
    for path in sorted((options.out / "rows").glob("*.json")):
        found = json.loads(path.read_text())
        for r in found["rows"]:
            values = "  ".join(f"{name} {r[name]['value']:.4f}" for name in SHOWN)
            print(f"{found['run']:24} {found['seconds']:4} s {r['split']:10} {r['budget'] or 0:5}  {values}")


def run(options: argparse.Namespace) -> None:
    """Work off the runs that ``group`` names, by their whole name or what comes before a slash, some at a time; at the
    deadline those that train write a checkpoint, and the next call goes on with them."""
    wanted = [n for g in options.group for n in all_runs() if n == g or n.startswith(g.rstrip("/") + "/")]
    wanted = [n for n in dict.fromkeys(wanted) if not (options.out / "rows" / f"{n.replace('/', '-')}.json").exists()]
    gpus = max(1, torch.cuda.device_count())
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    curves_there = (options.out / CURVES_FILE.format(window=WINDOW)).exists()
    if any(all_runs()[name].get("by_head") for name in wanted) and not curves_there:
        subprocess.run(
            [sys.executable, __file__, "curves", "--data", str(options.data), "--out", str(options.out),
             "--model", options.model], check=True
        )  # fmt: skip
    started, running, told = time.time(), {}, set()
    free = [gpu for _ in range(options.workers) for gpu in range(gpus)]
    while (wanted and time.time() - started < options.deadline) or running:
        while wanted and free and time.time() - started < options.deadline:
            name, gpu = wanted.pop(0), free.pop(0)
            command = [sys.executable, __file__, "one", name, "--data", str(options.data), "--out", str(options.out),
                       "--model", options.model, *given(options).split(), "--texts", str(options.texts),
                       "--prompts", str(options.prompts), "--splits", *options.splits]  # fmt: skip
            log = (logs / f"{name.replace('/', '-')}.txt").open("w")
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu)}
            running[subprocess.Popen(command, stdout=log, stderr=log, env=environment)] = (name, gpu)
        time.sleep(1)
        late = time.time() - started - options.deadline
        for process, (name, gpu) in list(running.items()):
            if late > 0 and process not in told:
                process.terminate()
                told.add(process)
            if late > GRACE:
                process.kill()
            if process.poll() is not None:
                print(f"{time.time() - started:.0f} s: {name} {process.returncode}", flush=True)
                free.append(gpu)
                del running[process]


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def collect(options: argparse.Namespace) -> None:
    from kvpop.plots import comparison_figure

    files = [json.loads(path.read_text()) for path in sorted((options.out / "rows").glob("*.json"))]
    rows = [{**row, "run": file["run"]} for file in files for row in file["rows"]]
    result = {
        "what": f"SmolLM2-135M-Instruct, S = {LENGTH}, held-out problems of champ",
        "machine": sorted({file.get("machine", options.machine) for file in files}),
        "versions": [dict(v) for v in sorted({tuple(file.get("versions", FIRST).items()) for file in files})],
        "command": "python benchmarks/experiment.py run --group "
        + " ".join(sorted({f["run"].split("/")[0] for f in files})),
        "settings": {
            file["run"]: {k: v for k, v in file["settings"].items() if v != DEFAULTS.get(k)}
            | {"seconds": file["seconds"]}
            for file in files
        },
        "defaults": DEFAULTS,
    }
    lines = ",\n".join("  " + json.dumps(rounded({k: v for k, v in row.items() if k != "by_document"})) for row in rows)
    options.result.write_text(json.dumps(result, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n')
    main_rows = [row for row in rows if row["split"] == "test" and not row["run"].startswith("ablation")]
    comparison_figure(main_rows, options.result.with_suffix(".png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["prepare", "curves", "run", "one", "show", "collect"])
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--data", type=Path, default=Path("out/champ"))
    parser.add_argument("--out", type=Path, default=Path("out/experiment"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--group", nargs="+", default=["untrained", "scorer"])
    parser.add_argument("--workers", type=int, default=3, help="runs at a time on each GPU")
    parser.add_argument("--deadline", type=float, default=570, help="seconds")
    parser.add_argument("--splits", nargs="+", default=["validation", "test"])
    parser.add_argument("--set", type=setting, action="append", default=[], help="a setting for all runs, as power=1")
    parser.add_argument("--texts", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=0)
    parser.add_argument("--machine", default="one NVIDIA H200")
    parser.add_argument("--result", type=Path, default=Path("benchmarks/results/smollm2-4k.json"))
    options = parser.parse_args()
    if options.job == "prepare":
        prepare(options.data, options.model)
    elif options.job == "curves":
        curves(options)
    elif options.job == "one":
        one(options.name, options)
    elif options.job == "run":
        run(options)
        show(options)
    elif options.job == "show":
        show(options)
    else:
        collect(options)


if __name__ == "__main__":
    main()

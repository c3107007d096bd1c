"""``kvpop distill``."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpop.budget import Budget
from kvpop.cli.options import ADAPTER, DataOption, DeviceOption, DtypeOption, JsonOption, ModelOption, SeedOption
from kvpop.cli.prepare import filters
from kvpop.jobs import DEFAULT, check_data, load_model, placement, read_adapter, training_stream
from kvpop.terminal import ERR, TrainingProgress, print_json

if TYPE_CHECKING:
    import torch

    from kvpop.data import Corpus
    from kvpop.distill import DistillConfig
    from kvpop.policies import Policy

BESIDE_A_RECIPE = ("out", "recipe", "data", "steps", "seed", "device", "watch", "checkpoint_every", "as_json")
DMS_ONLY = {"ratio", "gate", "emitted_by", "gate_ramp"}
CURVE_TEXTS = 8
"""Sequences that budgets by head are read from."""
IN_MEMORY = 2 * 10**8
"""Tokens of a corpus that are read and packed in memory; more must be prepared on disk first."""


@dataclass
class Job:
    """A run as the trainer takes it, but for what has to be loaded."""

    model: str
    policy: Policy
    config: DistillConfig
    corpus: str | Corpus
    length: int
    batch_size: int
    retrieval_share: float
    max_tokens: int | None
    dtype: str


def distill(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Directory of checkpoints, log and adapter; give it again to go on.")],
    recipe: Annotated[str, typer.Option(help="A whole run by name, such as qwen3-8b:4096:mlp:full; see kvpop plan.")] = "",
    model: ModelOption = "smollm2",
    data: DataOption = "champ",
    policy: Annotated[str, typer.Option(help="kvpop, streaming (full, lora or base mode) or dms.")] = "kvpop",
    budget: Annotated[int, typer.Option(help="Slots per KV head: sinks + window + long-range.")] = DEFAULT.slots,
    sinks: Annotated[int, typer.Option(min=0)] = DEFAULT.sinks,
    window: Annotated[int, typer.Option(min=1)] = DEFAULT.window,
    scorer: Annotated[str, typer.Option(help="mlp, mlstm, mlstm-immediate or mlp+mlstm.")] = "mlp+mlstm",
    by_head: Annotated[
        bool, typer.Option("--by-head", help="KV heads share the slots unequally, by what each saves of the loss: "
                           "kvpop allocate, on the first sequences. The same memory, better spent.")
    ] = False,
    start: Annotated[str, typer.Option(help=f"Go on from the scorers of an adapter. {ADAPTER}.")] = "",
    ratio: Annotated[float, typer.Option(help="DMS: the compression to train for; 4 keeps a quarter.")] = 4.0,
    gate: Annotated[str, typer.Option(help="DMS: mlp, or native (a channel of the query; full or lora mode).")] = "mlp",
    emitted_by: Annotated[
        str, typer.Option(help="DMS: the decision about a token is read off the next one (the paper's), or off itself: self.")
    ] = "next",
    gate_ramp: Annotated[
        float, typer.Option(help="DMS: share of the steps over which the compression rises to --ratio.")
    ] = 1.0,
    mode: Annotated[
        str, typer.Option(help="scorer: the model stays as it is; full: it is distilled too; lora: a low-rank change of it; "
                               "base: it alone, the policy stays as it is.")
    ] = "scorer",
    steps: Annotated[int, typer.Option(min=1)] = 200,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens of a packed sequence.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences of a pass, over all processes.")] = 1,
    accumulate: Annotated[int, typer.Option(min=1, help="Passes of a step.")] = 1,
    lr: Annotated[float, typer.Option(help="Peak learning rate of the scorers or gates.")] = 1e-3,
    base_lr: Annotated[float, typer.Option(help="Learning rate of the model, or of its low-rank change.")] = 8e-5,
    decay_lr: Annotated[float, typer.Option(help="Learning rate of the decays, as a share of --lr.")] = 0.1,
    also_budget: Annotated[
        list[int] | None, typer.Option(help="Slots that scorers learn to decide at too, beside --budget. Repeatable.")
    ] = None,
    lora_rank: Annotated[int, typer.Option(min=1)] = 16,
    seed: SeedOption = 0,
    inner_updates: Annotated[int, typer.Option(help="Scorer updates per forward pass (scorer mode).")] = 1,
    target_power: Annotated[float, typer.Option(help="Power mean over future queries; 1: the plain mean (the paper's).")] = 2.0,
    aggregate: Annotated[str, typer.Option(help="max or mean over the query heads of a KV head.")] = "max",
    lse: Annotated[str, typer.Option(help="The target's normaliser: sparse (the student's own) or dense.")] = "sparse",
    regret: Annotated[
        float, typer.Option(help="Weight decisions by this power of the attention mass at stake; 0: as in the paper, by log "
                                 "margins and with keeps and drops balanced.")
    ] = 1.0,
    residual: Annotated[
        int, typer.Option(min=0, help="Decide by the attention still to come, looked at every so many queries; 0: by all of a "
                                      "token's future at once.")
    ] = 0,
    decay: Annotated[
        float | None,
        typer.Option(
            help="Where the learned log-decay starts, nats a token; it stays between 10 times and a 20th of that. -2e-4 "
            "suits 16k tokens. Default: start -5 / S in [-20 / S, -0.1 / S] for sequences of S tokens."
        ),
    ] = None,
    retrieval_share: Annotated[
        float, typer.Option(help="Share of sequences with facts stated early, asked late.")
    ] = 0.1,
    where: Annotated[list[str] | None, typer.Option(help="field=value: only documents with this metadata.")] = None,
    packing: Annotated[str, typer.Option(help="isolated or shared documents, as in kvpop prepare.")] = "isolated",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of text to read (default: one pass).")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps.")] = 50,
    checkpointing: Annotated[bool, typer.Option(help="Keep only inputs of layers for the backward pass.")] = False,
    watch: Annotated[
        list[str] | None, typer.Option(help="tensorboard or wandb, beside the JSONL log. Repeatable.")
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    compute: Annotated[
        str, typer.Option(help="same, or bfloat16 copies of wider weights; auto: bfloat16 on a GPU where the model is trained.")
    ] = "auto",
    impl: Annotated[
        str, typer.Option(help="reference, flex or triton; auto: on a GPU triton, flex for DMS and where there is no Triton.")
    ] = "auto",
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Train a policy for a model: scorers, gates, and if wanted the model. Ctrl-C is safe: the same command goes on from where
    it stopped, also on another number of processes. Several GPUs: torchrun --nproc-per-node N -m kvpop distill ..."""
    from kvpop.distill import DistillConfig
    from kvpop.distill import distill as train
    from kvpop.models import model_id
    from kvpop.policies import LayerShape
    from kvpop.watch import check_writers

    place, _ = placement(device, "auto")
    if impl not in ("auto", "reference", "flex", "triton"):
        raise ValueError(f"--impl must be auto, reference, flex or triton, got {impl!r}")
    if impl in ("flex", "triton") and place.type == "cpu":
        raise ValueError(f"--impl {impl} needs a GPU, this run is on {place}: use reference")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: a run needs a directory")
    how: Any = fastest(place, policy) if impl == "auto" else impl
    given = {name for name in ctx.params if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")}
    if recipe:
        if strange := sorted(given - set(BESIDE_A_RECIPE)):
            raise ValueError(f"--recipe settles these itself: {', '.join(map(flag, strange))}")
        changes: dict[str, Any] = {
            name: ctx.params[name] for name in ("steps", "seed", "checkpoint_every") if name in given
        }
        job = job_of(recipe, data if "data" in given else "", {**changes, "impl": how})
    else:
        if not 0 <= retrieval_share < 1:
            raise ValueError(f"--retrieval-share must be in [0, 1), got {retrieval_share}")
        S = sequence_length
        span = (-5 / S, -20 / S, -0.1 / S) if decay is None else (decay, 10 * decay, decay / 20)
        slots = Budget.of_slots(budget, sinks=sinks, window=window)
        if start:
            slots = started_budget(start, ctx.params, given)
        if strange := sorted(given & DMS_ONLY) if policy != "dms" else []:
            raise ValueError(f"{', '.join(map(flag, strange))} is for --policy dms, got {policy!r}")
        if also_budget and policy != "kvpop":
            raise ValueError(f"--also-budget is for the scorers of --policy kvpop, got {policy!r}")
        longs = [Budget.of_slots(also, sinks=slots.sinks, window=slots.window).long for also in also_budget or ()]
        trains_model = mode in ("full", "base", "lora")
        if compute == "auto":
            compute = "bfloat16" if trains_model and place.type == "cuda" and dtype in ("auto", "float32") else "same"
        config = DistillConfig(
            mode=mode, steps=steps, seed=seed, scorer_lr=lr, base_lr=base_lr, inner_updates=inner_updates,  # type: ignore[arg-type]
            accumulate=accumulate, lora_rank=lora_rank, impl=how, compute=compute, checkpointing=checkpointing,  # type: ignore[arg-type]
            decay_lr_ratio=decay_lr, gate_ramp=gate_ramp, train_long=(slots.long, *longs) if longs else (),
            checkpoint_every=checkpoint_every, **objectives(target_power, aggregate, lse, regret, residual),
        )  # fmt: skip
        job = Job(
            model, chosen_policy(policy, slots, scorer, span, ratio, gate, start, emitted_by), config,
            corpus_of(data, where or [], packing, max_tokens), S, batch_size, retrieval_share, max_tokens,
            "float32" if dtype == "auto" and trains_model else dtype,
        )  # fmt: skip
    config = job.config
    if by_head:
        check_by_head(policy, out)
    if not start:  # trained scorers fit their own model only
        job.policy.layer(LayerShape(layer=0, heads=1, kv_heads=1, head_dim=8))  # bad settings show here
    check(job)
    check_writers(watch or ())

    precision = placement(device, job.dtype)[1]
    with ERR.status("loading the model"):
        base, tokenizer = load_model(job.model, precision, place)
        teacher = copy.deepcopy(base) if config.mode in ("full", "base") else None
    with ERR.status("reading and packing the texts"):
        wanted = job.max_tokens or max(job.length, config.steps * config.accumulate * job.batch_size * job.length)
        stream = training_stream(
            job.corpus, tokenizer, job.length, job.batch_size, config.seed, wanted, job.retrieval_share
        )
    if by_head:
        with ERR.status("looking at what heads need"):
            job.policy = shared_by_head(job.policy, base, stream, out)
    leads = leading()
    if leads:
        ERR.print(
            f"{len(stream)} sequences of {job.length} tokens, {job.policy.slots or 'a growing number of'} slots per KV head, "
            f"{config.steps} steps of {config.accumulate * job.batch_size}"
        )
    done = 0
    with TrainingProgress(config.steps, quiet=not leads) as progress:

        def on_step(record: dict[str, Any]) -> None:
            nonlocal done
            done = record["step"]
            progress.show(record)

        finished = train(
            base, job.policy, stream, config, out, model_id=model_id(job.model), teacher=teacher, watch=watch or (),
            on_step=on_step,
        )  # fmt: skip
    if as_json and leads:
        facts = read_adapter(out)["training"] if finished else {"steps": done}
        print_json({"adapter": str(out) if finished else None, "finished": finished, "training": facts})
    if not finished:
        if leads:
            typer.echo(f"interrupted at step {done}; run the same command to go on", err=True)
        raise typer.Exit(130)
    if not as_json and leads:
        typer.echo(f"adapter: {out}")


def leading() -> bool:
    """Whether this process speaks for all that torchrun started."""
    import os

    return int(os.environ.get("RANK", "0")) == 0


def fastest(place: torch.device, policy: str) -> str:
    """How to attend: FlexAttention has the relaxed gates that DMS trains by."""
    from kvpop.ops import HAS_TRITON

    if place.type != "cuda":
        return "reference"
    return "triton" if HAS_TRITON and policy != "dms" else "flex"


def started_budget(start: str, params: dict[str, Any], given: set[str]) -> Budget:
    """The adapter's own budget, but for what was given. Raises ValueError for what the adapter settles, or does not hold."""
    from kvpop.adapter import adapter_directory, read_config

    if strange := sorted(given & {"scorer", "decay", "ratio", "gate"}):
        raise ValueError(f"--start settles these itself: {', '.join('--' + name for name in strange)}")
    config = read_config(adapter_directory(start))
    if config["policy"].get("name") != "kvpop" or config.get("base_weights"):
        raise ValueError(
            f"--start takes scorers that rank tokens of an unchanged model; {start} holds policy "
            f"{config['policy'].get('name')!r} and {config.get('base_weights') or 'no'} changed weights"
        )
    own = Budget(**config["policy"]["budget"])
    return Budget.of_slots(
        params["budget"] if "budget" in given else own.slots,
        sinks=params["sinks"] if "sinks" in given else own.sinks,
        window=params["window"] if "window" in given else own.window,
    )


def check_by_head(policy: str, out: Path) -> None:
    """Raise ValueError for what has no heads to share among, and for several processes without the curves."""
    import os

    from kvpop.allocation import CURVES

    if policy != "kvpop":
        raise ValueError(f"--by-head shares the slots of --policy kvpop, got {policy!r}")
    if (out / "run.json").is_file() and not (out / CURVES).is_file():
        raise ValueError(f"{out} has a run, but not the {CURVES} that its budgets by head come from: put it back")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1 and not (out / CURVES).is_file():
        raise ValueError(
            f"--by-head with {processes} processes needs {out / CURVES}: write it first with kvpop allocate --out {out}"
        )


def shared_by_head(policy: Policy, model: Any, stream: Any, out: Path) -> Policy:
    """The policy with budgets by head, from the curves in ``out``, which are made and written if they are not there."""
    from kvpop.allocation import CURVES, allocate, read_curves, write_curves
    from kvpop.jobs import document_curves
    from kvpop.trained import Trained, recipe_of

    start = policy if isinstance(policy, Trained) else None  # scorers that have learned nothing yet rank nothing
    path, budget = out / CURVES, recipe_of(policy).budget  # type: ignore[attr-defined]
    if not path.is_file():
        out.mkdir(parents=True, exist_ok=True)
        write_curves(path, document_curves(model, stream, budget, CURVE_TEXTS, start))
    curves = read_curves(path)  # what is written, so that a run that goes on reads the same
    if isinstance(policy, Trained):
        return policy.by_head(curves)
    return dataclasses.replace(policy, heads=allocate(curves, budget.long))  # type: ignore[call-arg]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def objectives(power: float, aggregate: str, lse: str, regret: float, residual: int) -> dict[str, Any]:
    from kvpop.core import BoundaryLoss, Target

    loss = BoundaryLoss(regret=regret, balance=(1.0, 1.0)) if regret else BoundaryLoss()
    target = Target(aggregate=aggregate, power=power, lse=lse, residual=residual)  # type: ignore[arg-type]
    return {"target": target, "loss": loss}


def chosen_policy(
    name: str, budget: Budget, scorer: str, decay: tuple[float, float, float], ratio: float, gate: str, start: str,
    emitted_by: str = "next",
) -> Policy:  # fmt: skip
    """The policy to train. Raises ValueError for an unknown name, and for scorers to start from that are not for it."""
    from kvpop.policies import DMS, KVpop, Streaming

    if start and name != "kvpop":
        raise ValueError(f"--start takes up trained scorers: it goes with --policy kvpop, got {name!r}")
    if name == "kvpop":
        if start:
            from kvpop.adapter import adapter_directory, load_policy

            return load_policy(adapter_directory(start), budget)
        first, low, high = decay
        return KVpop(budget, scorer, decay=first, decay_range=(low, high))
    if name == "streaming":
        return Streaming(budget)
    if name == "dms":
        gates: Any = {"gate": gate, "emitted_by": emitted_by}
        return DMS(window=budget.window, sinks=budget.sinks, ratio=ratio, **gates)
    raise ValueError(f"--policy must be kvpop, streaming or dms, got {name!r}")


def corpus_of(data: str, where: list[str], packing: str, max_tokens: int | None = None) -> str | Corpus:
    from kvpop.data import Corpus, is_prepared

    if is_prepared(data):
        if where or packing != "isolated" or max_tokens is not None:
            raise ValueError(f"{data} is a prepared corpus: --where, --packing and --max-tokens were for kvpop prepare")
        return data
    return Corpus(data, where=filters(where), packing=packing)  # type: ignore[arg-type]


def job_of(recipe: str, data: str, changes: dict[str, Any]) -> Job:
    """A recipe on as many GPUs as there are processes, with another corpus or other settings where they are given."""
    import os

    from kvpop.plan import make_plan
    from kvpop.recipes import recipe_by_name

    chosen = recipe_by_name(recipe).on(int(os.environ.get("WORLD_SIZE", "1")))
    chosen = dataclasses.replace(chosen, config=dataclasses.replace(chosen.config, **changes))
    make_plan(chosen, memory_gb=gpu_gigabytes()).check()
    corpus: str | Corpus = corpus_of(data, [], "isolated") if data else chosen.corpus
    return Job(
        chosen.model, chosen.policy, chosen.config, corpus, chosen.length, chosen.batch_size, 0.0, None,
        "bfloat16" if chosen.shape.element_size == 2 else "float32",
    )  # fmt: skip


def gpu_gigabytes() -> float | None:
    """What a GPU of this machine holds; None without one."""
    import torch

    return torch.cuda.mem_get_info()[1] / 1e9 if torch.cuda.is_available() else None


def check(job: Job) -> None:
    """What can be known to be wrong before a model is loaded. Raises ValueError, FileNotFoundError."""
    from kvpop.policies import KVpop
    from kvpop.tasks.training import MIN_LENGTH
    from kvpop.trained import Trained

    slots, future = job.policy.slots, job.config.loss.min_future
    ranks = isinstance(job.policy, KVpop | Trained) and job.config.mode != "base"
    if ranks and slots is not None and slots + future > job.length:
        raise ValueError(f"--sequence-length must be at least budget + {future} = {slots + future}, got {job.length}")
    if job.retrieval_share and job.length < MIN_LENGTH:
        raise ValueError(
            f"--sequence-length must be at least {MIN_LENGTH} for --retrieval-share {job.retrieval_share}, got {job.length}"
        )
    tokens = job.max_tokens or job.config.steps * job.config.accumulate * job.batch_size * job.length
    if not isinstance(job.corpus, str) and min(tokens, most_tokens(job.corpus.source)) > IN_MEMORY:
        raise ValueError(
            f"{tokens:,} tokens are too many to hold in memory (at most {IN_MEMORY:,}): write them once with kvpop prepare "
            f"--data {job.corpus.source} --length {job.length} --out DIR, then --data DIR; or read less, with --max-tokens"
        )
    check_data(job.corpus if isinstance(job.corpus, str) else job.corpus.source, job.length)


def most_tokens(source: str) -> float:
    """No more tokens than that are in a source: at most one a byte of a file; of a data set on the hub, who knows."""
    path = Path(source)
    if path.exists():
        return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
    return IN_MEMORY if source.split(":")[0] == "champ" else float("inf")

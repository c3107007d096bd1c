"""The command line. Everything heavy is imported inside the commands, so that ``--help`` is quick.

Results go to stdout, progress to stderr; with --json stdout holds one JSON object and nothing else.
"""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer.core import TyperGroup

import kvpop
from kvpop.budget import Budget
from kvpop.jobs import (
    DEFAULT,
    chosen_budget,
    comparison,
    evaluation_texts,
    load_model,
    placement,
    read_adapter,
    retrieval_cells,
    retrieval_prompts,
    training_stream,
)
from kvpop.terminal import (
    ERR,
    OUT,
    TrainingProgress,
    as_strict_json,
    print_comparison,
    print_demo,
    print_facts,
    print_json,
)

MB = 1e6


class Commands(TyperGroup):
    """Errors that the user can mend are one line on stderr and exit code 2; a traceback with --debug."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `kvpop ... | head`: dealt with further up
            raise
        except (ValueError, OSError, ImportError) as error:
            if ctx.params.get("debug"):
                raise
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

ModelOption = Annotated[str, typer.Option(help='"smollm2" (embedded), a directory, or a hub name.')]
SinksOption = Annotated[
    int | None, typer.Option(min=0, help="First tokens that are always held (the adapter's, or 4).")
]
WindowOption = Annotated[
    int | None, typer.Option(min=1, help="Newest tokens that are always held (the adapter's, or 64).")
]
SeedOption = Annotated[int, typer.Option(min=0)]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one.")]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16 or float16; auto: bfloat16 on a GPU, else float32.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvpop {kvpop.__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print it.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Errors with their traceback.")] = False,
) -> None:
    """Long generations of existing language models in a fixed amount of KV-cache memory."""


@app.command()
def distill(
    out: Annotated[Path, typer.Option(help="Directory of checkpoint, log and adapter; give it again to go on.")],
    model: ModelOption = "smollm2",
    data: Annotated[str, typer.Option(help="champ, a text or .jsonl file, a directory, or a hub dataset.")] = "champ",
    budget: Annotated[int, typer.Option(help="Slots per KV head: sinks + window + long-range.")] = DEFAULT.slots,
    sinks: Annotated[int, typer.Option(min=0)] = DEFAULT.sinks,
    window: Annotated[int, typer.Option(min=1)] = DEFAULT.window,
    scorer: Annotated[str, typer.Option(help="mlp, mlstm, mlstm-immediate or mlp+mlstm.")] = "mlp+mlstm",
    mode: Annotated[str, typer.Option(help="scorer: the model stays as it is; full: it is distilled too.")] = "scorer",
    steps: Annotated[int, typer.Option(min=1)] = 200,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens of a packed sequence.")] = 2048,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 1,
    lr: Annotated[float, typer.Option(help="Peak learning rate of the scorers.")] = 1e-3,
    base_lr: Annotated[float, typer.Option(help="Learning rate of the model in full mode.")] = 8e-5,
    seed: SeedOption = 0,
    inner_updates: Annotated[int, typer.Option(help="Scorer updates per forward pass (scorer mode).")] = 1,
    target_power: Annotated[float, typer.Option(help="Power mean over future queries; 1: the plain mean.")] = 1.0,
    aggregate: Annotated[str, typer.Option(help="max or mean over the query heads of a KV head.")] = "max",
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
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of text to read (default: one pass).")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps.")] = 50,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    impl: Annotated[str, typer.Option(help="reference or flex; auto: flex on a GPU.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Train the scorers for a model and a budget. Ctrl-C is safe: the same command goes on from where it stopped."""
    from kvpop.core.target import Target
    from kvpop.data import texts_from
    from kvpop.distill import DistillConfig
    from kvpop.distill import distill as train
    from kvpop.models import model_id
    from kvpop.policies import KVpop, LayerShape
    from kvpop.tasks.training import MIN_LENGTH

    place, precision = placement(device, dtype)
    S = sequence_length
    start, low, high = (-5 / S, -20 / S, -0.1 / S) if decay is None else (decay, 10 * decay, decay / 20)
    policy = KVpop(Budget.of_slots(budget, sinks=sinks, window=window), scorer, decay=start, decay_range=(low, high))
    policy.layer(LayerShape(layer=0, heads=1, kv_heads=1, head_dim=8))  # unknown scorers and bad decays show here
    if impl not in ("auto", "reference", "flex"):
        raise ValueError(f"--impl must be auto, reference or flex, got {impl!r}")
    settings: dict[str, Any] = dict(
        mode=mode, steps=steps, seed=seed, scorer_lr=lr, base_lr=base_lr, inner_updates=inner_updates,
        impl=("flex" if place.type == "cuda" else "reference") if impl == "auto" else impl,
    )  # fmt: skip
    target = Target(aggregate=aggregate, power=target_power)  # type: ignore[arg-type]
    config = DistillConfig(**settings, target=target, checkpoint_every=checkpoint_every)
    needed = budget + config.loss.min_future
    if needed > S:
        raise ValueError(f"--sequence-length must be at least budget + {config.loss.min_future} = {needed}, got {S}")
    if not 0 <= retrieval_share < 1:
        raise ValueError(f"--retrieval-share must be in [0, 1), got {retrieval_share}")
    if retrieval_share and S < MIN_LENGTH:
        raise ValueError(
            f"--sequence-length must be at least {MIN_LENGTH} for --retrieval-share {retrieval_share}, got {S}"
        )
    texts_from(data)

    with ERR.status("loading the model"):
        base, tokenizer = load_model(model, precision, place)
        teacher = copy.deepcopy(base) if mode == "full" else None
    with ERR.status("reading and packing the texts"):
        wanted = max_tokens or max(S, steps * batch_size * S)
        stream = training_stream(data, tokenizer, S, batch_size, seed, wanted, retrieval_share)
    ERR.print(f"{len(stream)} sequences of {S} tokens, {budget} slots per KV head, {steps} steps of {batch_size}")
    done = 0
    with TrainingProgress(steps) as progress:

        def on_step(record: dict[str, Any]) -> None:
            nonlocal done
            done = record["step"]
            progress.show(record)

        finished = train(
            base, policy, stream, config, out, model_id=model_id(model), teacher=teacher, on_step=on_step
        )  # fmt: skip
    if as_json:
        facts = read_adapter(out)["training"] if finished else {"steps": done}
        print_json({"adapter": str(out) if finished else None, "finished": finished, "training": facts})
    if not finished:
        typer.echo(f"interrupted at step {done}; run the same command to go on", err=True)
        raise typer.Exit(130)
    if not as_json:
        typer.echo(f"adapter: {out}")


@app.command()
def generate(
    model: ModelOption = "smollm2",
    adapter: Annotated[Path | None, typer.Option(help="Directory that distill wrote.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="Instead: dense, streaming, streaming-cache, random or tova.")
    ] = None,
    budget: Annotated[int | None, typer.Option(help="Slots per KV head (the adapter's, or 256).")] = None,
    sinks: SinksOption = None,
    window: WindowOption = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[str | None, typer.Option(help='A file that holds it; "-": stdin.')] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: no limit.")] = 0,
    seed: SeedOption = 0,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Stream a generation; stderr shows what the cache holds beside what a dense one would need."""
    from kvpop.adapter import load, load_policy
    from kvpop.attachment import attach
    from kvpop.policies import policy_by_name
    from kvpop.rollout import StatusLine, TextStream, prompt_ids
    from kvpop.rollout import generate as steps_of

    if (adapter is None) == (policy is None):
        raise ValueError("give either --adapter DIR or --policy NAME")
    if policy == "oracle":
        raise ValueError(
            "--policy oracle ranks tokens by future attention: it can score a given text, not generate one"
        )
    if (prompt is None) == (prompt_file is None):
        raise ValueError("give either --prompt TEXT or --prompt-file FILE")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p must be in (0, 1], got {top_p}")
    slots = chosen_budget(budget, sinks, window, adapter)
    chosen = policy_by_name(policy, slots) if policy is not None else load_policy(adapter or "", slots)
    text = (
        prompt
        if prompt is not None
        else sys.stdin.read()
        if prompt_file == "-"
        else Path(prompt_file or "").read_text()
    )
    if not text.strip():
        raise ValueError("the prompt is empty")
    place, precision = placement(device, dtype)

    with ERR.status("loading the model"):
        base, tokenizer = load_model(model, precision, place)
        base = attach(base, chosen) if adapter is None else load(base, adapter, budget=slots)
    ids_1S = prompt_ids(tokenizer, text, raw)
    ends = base.generation_config.eos_token_id
    stop = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    pieces = TextStream(tokenizer)
    started, count, step = time.perf_counter(), 0, None
    with StatusLine() as status:
        for step in steps_of(
            base, ids_1S, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
            stop_ids=stop,
        ):  # fmt: skip
            count += 1
            piece = pieces.put(step.token, last=count == max_new_tokens or step.token in stop)
            if not as_json:
                typer.echo(piece, nl=False)
                sys.stdout.flush()
            status.show(
                f"{step.seen:,} tokens seen, {step.held:,} held | {step.nbytes / MB:,.1f} MB, dense would need "
                f"{step.dense_bytes / MB:,.1f} MB | {count / (time.perf_counter() - started):.1f} tokens/s"
            )
    assert step is not None
    facts = {
        "policy": chosen.name,
        "budget": chosen.slots,
        "prompt_tokens": ids_1S.shape[1],
        "new_tokens": count,
        "stopped": step.token in stop,
        "tokens_seen": step.seen,
        "tokens_held": step.held,
        "bytes": step.nbytes,
        "bytes_dense": step.dense_bytes,
        "tokens_per_s": count / (time.perf_counter() - started),
    }
    if as_json:
        print_json({"text": pieces.text, **facts})
    else:
        typer.echo()
        print_facts(facts, ERR)


@app.command("eval")
def evaluate(
    model: ModelOption = "smollm2",
    adapter: Annotated[list[Path] | None, typer.Option(help="Directory that distill wrote; repeatable.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="A training-free policy; repeatable.")] = None,
    budget: Annotated[list[int] | None, typer.Option(help="Slots per KV head; repeatable.")] = None,
    sinks: SinksOption = None,
    window: WindowOption = None,
    data: Annotated[str, typer.Option(help="As for distill.")] = "champ:test",
    texts: Annotated[int, typer.Option(min=0)] = 4,
    length: Annotated[int, typer.Option(min=2, help="Tokens a text.")] = 1024,
    passkey: Annotated[int, typer.Option(min=0, help="Passkey prompts per length and depth.")] = 0,
    needle: Annotated[int, typer.Option(min=0, help="Multi-needle prompts per length, 4 needles each.")] = 0,
    lengths: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens a prompt; repeatable (default: --length).")
    ] = None,
    depths: Annotated[str, typer.Option(help="Where facts stand, 0 to 1.")] = "0.1,0.5,0.9",
    out: Annotated[Path | None, typer.Option(help="Write the JSON to this file, too.")] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Compare policies with the dense model: KL, agreement, perplexity and retrieval, teacher-forced on the same text.

    Texts are scored from the largest budget on, where every policy has dropped something.
    """
    from kvpop.adapter import load
    from kvpop.data import texts_from
    from kvpop.measure import compare_retrieval, compare_texts

    if not adapter and not policy:
        raise ValueError("nothing to compare: give --adapter DIR or --policy NAME")
    if not texts + passkey + needle:
        raise ValueError("nothing to measure: --texts, --passkey and --needle are all 0")
    try:
        places = [float(part) for part in depths.split(",")]
    except ValueError as error:
        raise ValueError(f"--depths must be numbers in [0, 1] with commas between, got {depths}") from error
    if not all(0 <= depth <= 1 for depth in places):
        raise ValueError(f"--depths must lie in [0, 1], got {depths}")
    adapters = adapter or []
    entries = comparison(adapters, policy or [], budget or [], sinks, window)
    start = max(entry.budget or 0 for entry in entries)
    if texts and length < start + 2:
        raise ValueError(f"--length must be at least the largest budget + 2 = {start + 2}, got {length}")
    place, precision = placement(device, dtype)
    texts_from(data)

    with ERR.status("loading the model"):
        base, tokenizer = load_model(model, precision, place)
        for directory in adapters:
            load(base, directory)  # refuses what does not fit
    sizes = (lengths or [length]) if passkey or needle else []
    with ERR.status("reading the texts"):
        ids, haystack = evaluation_texts(data, tokenizer, texts, length, max(sizes, default=0))
        prompts = retrieval_prompts(tokenizer, haystack, sizes, places, passkey, needle, seed)
    passes = len(ids) * (len(entries) + 1) + len(prompts) * len(entries)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=ERR
    ) as bar:
        task = bar.add_task("evaluating", total=passes)

        def tick(label: str) -> None:
            bar.update(task, advance=1, description=label)

        scores = compare_texts(base, ids, entries, start, tick) if ids else []
        answers = compare_retrieval(base, prompts, entries, tick) if prompts else []
    rows: list[dict[str, Any]] = []
    for i, entry in enumerate(entries):
        row: dict[str, Any] = {"policy": entry.label, "budget": entry.budget}
        if scores:
            row |= scores[i].row(start)
        for name, found in answers[i].items() if answers else ():
            row |= {name: found.row()["exact"], f"{name}_nll": found.row()["nll"]}
            row.setdefault("retrieval", []).extend(retrieval_cells(name, found, places))
        rows.append(row)
    report = {
        "model": model,
        "data": data,
        "texts": len(ids),
        "length": length,
        "start": start,
        "seed": seed,
        "rows": rows,
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(as_strict_json(report) + "\n")
    if as_json:
        print_json(report)
    else:
        print_comparison(rows)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory of report, figures and adapter.")] = Path("out/demo"),
    minutes: Annotated[float, typer.Option(help="About how long it may take.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Train on the embedded model, compare policies, and show memory staying flat: the whole story on a CPU."""
    if not minutes > 0:
        raise ValueError(f"--minutes must be positive, got {minutes}")
    from kvpop.demo import run_demo

    report, lines = run_demo(out, minutes)
    if as_json:
        print_json(report)
    else:
        print_demo(report, lines)


@app.command()
def info(
    directory: Annotated[Path, typer.Argument(help="Directory that distill wrote.")], as_json: JsonOption = False
) -> None:
    """What an adapter holds."""
    from kvpop.adapter import SCORERS, read_tensors

    config = read_adapter(directory)
    parameters = sum(tensor.numel() for tensor in read_tensors(directory / SCORERS).values())
    config = {"directory": str(directory), **config, "scorer_parameters": parameters}
    if as_json:
        print_json(config)
        return
    policy, training = config["policy"], config.get("training", {})
    slots = policy["budget"]
    OUT.print()
    print_facts(
        {
            "model": f"{config['model'].get('id')} ({', '.join(f'{v} {k}' for k, v in config['model'].items() if k != 'id')})",
            "budget": f"{sum(slots.values())} slots per KV head: "
            f"{slots['sinks']} sinks, {slots['window']} window, {slots['long']} long-range",
            "scorer": f"{policy['scorer']}, {parameters:,} parameters",
            "decay": f"starts at {policy['decay']:g}, in {policy['decay_range']} nats a token",
            "base weights": config.get("base_weights") or "unchanged",
            "versions": ", ".join(f"{name} {version}" for name, version in config.get("versions", {}).items()),
            **{f"training: {key}": value for key, value in training.items() if key != "config"},
            **{f"  {key}": value for key, value in training.get("config", {}).items()},
        },
        OUT,
    )

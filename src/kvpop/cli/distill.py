"""``kvpop distill``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpop.budget import Budget
from kvpop.cli.options import DeviceOption, DtypeOption, JsonOption, ModelOption, SeedOption
from kvpop.jobs import DEFAULT, load_model, placement, read_adapter, training_stream
from kvpop.terminal import ERR, TrainingProgress, print_json


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

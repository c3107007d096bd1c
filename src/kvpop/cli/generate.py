"""``kvpop generate``."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from kvpop.cli.options import (
    ADAPTER,
    DeviceOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    SeedOption,
    SinksOption,
    WindowOption,
)
from kvpop.jobs import chosen_budget, load_model, placement, read_adapter
from kvpop.terminal import ERR, print_facts, print_json

MB = 1e6


def read_prompt(prompt: str | None, prompt_file: str | None) -> str | None:
    if prompt is not None or prompt_file is None:
        return prompt
    return sys.stdin.read() if prompt_file == "-" else Path(prompt_file).read_text()


def generate(
    model: ModelOption = "smollm2",
    adapter: Annotated[str | None, typer.Option(help=f"{ADAPTER}.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="Instead: dense, streaming, streaming-cache, random or tova.")
    ] = None,
    budget: Annotated[int | None, typer.Option(help="Slots per KV head (the adapter's, or 256).")] = None,
    ratio: Annotated[
        float | None, typer.Option(help="Instead: this share of a dense cache of --context tokens.")
    ] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens that --ratio speaks of.")] = None,
    sinks: SinksOption = None,
    window: WindowOption = None,
    dense_layers: Annotated[int, typer.Option(min=0, help="Leave so many first layers dense.")] = 0,
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
    pin_prompt: Annotated[
        bool, typer.Option("--pin-prompt", help="Never drop a token of the prompt; they take long-range slots.")
    ] = False,
    session: Annotated[
        Path | None, typer.Option(help="Go on from this file if it is there, and leave the state in it at the end.")
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Stream a generation; stderr shows what the cache holds beside what a dense one would need."""
    import torch

    from kvpop.adapter import adapter_directory, load, load_policy
    from kvpop.attachment import attach
    from kvpop.cache import BoundedCache
    from kvpop.policies import ByLayer, policy_by_name
    from kvpop.rollout import StatusLine, TextStream, prompt_ids
    from kvpop.rollout import generate as steps_of
    from kvpop.sampling import Sampling
    from kvpop.session import Session, check_target

    if (adapter is None) == (policy is None):
        raise ValueError("give either --adapter DIR or --policy NAME")
    if policy == "oracle":
        raise ValueError(
            "--policy oracle ranks tokens by future attention: it can score a given text, not generate one"
        )
    if session is not None:
        check_target(session)
    going_on = session is not None and session.is_file()
    if (prompt is not None and prompt_file is not None) or (not going_on and prompt is None and prompt_file is None):
        raise ValueError("give either --prompt TEXT or --prompt-file FILE")
    if not 0 < top_p <= 1:
        raise ValueError(f"--top-p must be in (0, 1], got {top_p}")
    directory = None if adapter is None else adapter_directory(adapter)
    slots = None
    if directory is None or "budget" in read_adapter(directory)["policy"]:
        slots = chosen_budget(budget, sinks, window, directory, ratio, context)
    elif any(option is not None for option in (budget, sinks, window, ratio, context)):
        raise ValueError(f"{adapter} has no budget to change: --budget, --sinks, --window and --ratio do not apply")
    trained = policy_by_name(policy, slots) if policy is not None and slots else load_policy(directory or "", slots)
    chosen = ByLayer.dense_first(trained, dense_layers)
    text = read_prompt(prompt, prompt_file)
    if text is not None and not text.strip():
        raise ValueError("the prompt is empty")
    if pin_prompt and text is None:
        raise ValueError("--pin-prompt needs a prompt to pin")
    place, precision = placement(device, dtype)

    with ERR.status("loading the model"):
        base, tokenizer = load_model(model, precision, place)
        if directory is None:
            attach(base, chosen)
        else:
            load(base, directory, budget=slots, layers=chosen.layers)
    sampling = Sampling(temperature, top_p, top_k, seed)
    state = Session.load(session, base) if session is not None and going_on else Session(BoundedCache(base))
    state.generator = state.generator or sampling.generator()
    parts = [] if state.pending is None else [state.pending]
    if text is not None:
        parts.append(prompt_ids(tokenizer, text, raw, None if state.pending is None else int(state.pending[0, -1])))
    ids_1S = torch.cat(parts, dim=1)
    if pin_prompt:
        stop_at = sum(state.cache.tokens_seen()) + ids_1S.shape[1]
        spans = (state.cache.pinned() or [[]])[0]
        state.cache.pin([*spans, (stop_at - parts[-1].shape[1], stop_at)])
    ends = base.generation_config.eos_token_id
    stop = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    pieces = TextStream(tokenizer)
    started, count, step = time.perf_counter(), 0, None
    with StatusLine() as status:
        for step in steps_of(
            base, ids_1S, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
            stop_ids=stop, cache=state.cache, generator=state.generator,
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
    if session is not None:
        state.pending = torch.tensor([[step.token]])
        state.save(session, base)
    if as_json:
        print_json({"text": pieces.text, **facts})
    else:
        typer.echo()
        print_facts(facts, ERR)

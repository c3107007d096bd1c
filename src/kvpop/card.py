"""The model card of an adapter: what it is, what it costs, how to load it, how it was trained and how it does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from kvpop.adapter import load_policy, read_config
from kvpop.budget import SLOT_OVERHEAD_BYTES, cache_bytes, dense_bytes, entry_bytes
from kvpop.jsonl import flat
from kvpop.lora import LORA_WEIGHTS
from kvpop.models import EMBEDDED_ID, EMBEDDED_NAMES
from kvpop.policies import LayerShape
from kvpop.policies.base import layer_budget
from kvpop.weights import BASE, BASE_INDEX

ELEMENT_BYTES = 2
"""Bytes are stated for a cache of 16-bit keys and values."""
CONTEXTS = (8192, 32768)
"""Tokens that a dense cache is compared at."""

METRICS = {"kl": "KL to dense", "agreement": "top-1 agreement", "perplexity": "perplexity"}


def model_card(
    directory: str | Path,
    repo_id: str,
    *,
    base_model: str | None = None,
    license: str | None = None,
    evaluation: Mapping[str, Any] | None = None,
) -> str:
    """The text of README.md for the adapter in ``directory``, published as ``repo_id``.

    ``base_model``: the hub name of the model it was trained for, where the adapter does not record one. ``license``: as the
    hub spells it; left out unless given. ``evaluation``: what ``kvpop eval --json`` prints. Raises ValueError without a hub
    name of the base model, and for an evaluation without rows; AdapterError and FileNotFoundError as ``read_config`` does.
    """
    config = read_config(directory)
    base = base_model or str(config["model"].get("id"))
    if base.count("/") != 1 or base[0] in "./~" or Path(base).is_dir():
        raise ValueError(
            f"the base model {base!r} of {directory} is no hub name: give base_model (--base-model OWNER/NAME)"
        )
    full = config.get("base_weights") in (BASE, BASE_INDEX)
    front = ModelCardData(
        base_model=base,
        base_model_relation="finetune" if full else "adapter",
        library_name="kvpop",
        pipeline_tag="text-generation",
        license=license,
        tags=[
            "kvpop",
            "kv-cache",
            "kv-cache-compression",
            *(["lora"] if config.get("base_weights") == LORA_WEIGHTS else []),
        ],
    )
    parts = [
        f"---\n{front.to_yaml()}\n---",
        f"# {repo_id.split('/')[-1]}",
        _what(config, base),
        _memory(directory, config),
        _use(base, repo_id, config.get("base_weights") == LORA_WEIGHTS),
        _training(config.get("training") or {}),
        _evaluation(evaluation) if evaluation is not None else "",
        _limits(config, base, evaluation is not None),
        "## Versions\n\n" + ", ".join(f"{name} {version}" for name, version in config.get("versions", {}).items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(rows: list[list[Any]], head: list[str]) -> str:
    """Markdown; floats with four significant digits."""
    shown = [
        [f"{x:,.4g}" if isinstance(x, float) else f"{x:,}" if type(x) is int else str(x) for x in row] for row in rows
    ]
    cells = [[text.replace("|", "\\|").replace("\n", " ") for text in row] for row in shown]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells))


def _what(config: dict[str, Any], base: str) -> str:
    policy, weights = config["policy"], config.get("base_weights")
    own = "The model's own weights are unchanged."
    if weights == LORA_WEIGHTS:
        own = "The model's weights are changed by LoRA, in a plain peft adapter; the rest of this text holds with it in place."
    elif weights:
        own = "The model's own weights were trained along and are part of this repository."
    kind = {
        "kvpop": "a learned scorer per KV head ranks the tokens that left the window, and the best of them stay",
        "streaming": "the first tokens and the newest ones stay (StreamingLLM); the model was trained under that mask",
        "dms": "a learned gate per KV head decides for each token whether it stays once it has left the window (DMS)",
    }[policy["name"]]
    if "budget" in policy:
        budget = policy["budget"]
        size = (
            f"It generates with {sum(budget.values()):,} slots per KV head, however long the text: {budget['sinks']:,} first "
            f"tokens, {budget['window']:,} newest ones, {budget['long']:,} others."
        )
        if by_head := [k for row in policy.get("heads", ()) for k in row]:
            size += (
                f" The others are budgets by head: from {min(by_head):,} to {max(by_head):,}, mean {budget['long']:,}."
            )
    else:
        aim = f"It was trained to hold 1/{policy['ratio']:g} of the tokens on average beyond a window of {policy['window']:,}"
        if matched := config.get("matched"):
            aim = (
                f"Its gates are set so that they hold {matched['held']:.1%} of {matched['documents']} documents "
                f"({matched['tokens']:,} tokens), sinks and a window of {policy['window']:,} included"
            )
        size = f"{aim}; the memory follows the text, it is not bounded."
    return f"A kvpop adapter for [{base}](https://huggingface.co/{base}): {kind}. {size} {own}"


def _memory(directory: str | Path, config: dict[str, Any]) -> str:
    model, trained = config["model"], load_policy(directory)
    if "budget" not in config["policy"]:
        return ""
    budget, heads = trained.policy.budget, getattr(trained.policy, "heads", ())
    indices = sorted({int(name.split(".")[1]) for name in trained.tensors}) or range(model["layers"])
    budgets, layers = [layer_budget(budget, heads, i, model["kv_heads"]) for i in indices], len(indices)
    sizes = {"layers": layers, "kv_heads": model["kv_heads"], "head_dim": model["head_dim"]}
    state = 0
    if trained.tensors:
        layer: Any = trained.policy.layer(LayerShape(indices[0], model["heads"], model["kv_heads"], model["head_dim"]))
        state = layer.scorer.state_bytes()
    entry = entry_bytes(model["head_dim"], ELEMENT_BYTES)
    rows: list[list[Any]] = [
        ["slots per KV head" + (", on average" if heads else ""), budget.slots],
        ["bytes per slot and KV head", f"{entry:,} + {SLOT_OVERHEAD_BYTES} for position and priority"],
        ["scorer state per KV head, bytes", state],
        [
            "whole cache of one sequence, MB",
            cache_bytes(budgets, **sizes, element_size=ELEMENT_BYTES, state_bytes=state) / 1e6,
        ],
        ["a dense cache: bytes per token", dense_bytes(1, **sizes, element_size=ELEMENT_BYTES)],
    ]
    for tokens in CONTEXTS:
        rows.append(
            [f"a dense cache: MB at {tokens:,} tokens", dense_bytes(tokens, **sizes, element_size=ELEMENT_BYTES) / 1e6]
        )
    where = f"{layers} layers x {model['kv_heads']} KV heads"
    return f"## Memory\n\nOf {where} with 16-bit keys and values:\n\n{table(rows, ['', ''])}"


def _use(base: str, repo_id: str, low_rank: bool) -> str:
    name = EMBEDDED_NAMES[0] if base == EMBEDDED_ID else base
    note = "  # the copy that kvpop carries" if base == EMBEDDED_ID else ""
    return f"""## Use

```sh
pip install {"'kvpop[lora]'" if low_rank else "kvpop"}
```

```python
import kvpop
from kvpop.models import load_base

model, tokenizer = load_base("{name}"){note}
model = kvpop.load(model, "{repo_id}")

inputs = tokenizer("The key to long proofs is", return_tensors="pt")
text = model.generate(**inputs, max_new_tokens=40, do_sample=False)  # in a bounded cache
print(tokenizer.decode(text[0]))
```

From the shell: `kvpop generate --model {name} --adapter {repo_id} --prompt "..."`."""


def _training(training: Mapping[str, Any]) -> str:
    facts = flat({key: value for key, value in training.items() if key != "config"})
    settings = flat(training.get("config") or {})
    if not facts and not settings:
        return ""
    text = "## Training\n\n" + table([[key, value] for key, value in facts.items()], ["", "at the end"])
    if settings:
        text += "\n\nSettings:\n\n" + table(
            [[f"`{key}`", value] for key, value in settings.items()], ["setting", "value"]
        )
    return text


def _evaluation(report: Mapping[str, Any]) -> str:
    rows = report.get("rows") if isinstance(report, Mapping) else None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) and "policy" in row for row in rows):
        raise ValueError("the evaluation has no rows: give what `kvpop eval --json` (or --out) wrote")
    tasks = [key.removesuffix("_nll") for row in rows for key in row if key.endswith("_nll")]
    names = (
        METRICS | {task: f"{task}, exact" for task in tasks} | {f"{task}_nll": f"{task}, answer NLL" for task in tasks}
    )
    names = {key: title for key, title in names.items() if any(key in row for row in rows)}
    body = [[row["policy"], row.get("budget") or "-", *(row.get(key, "-") for key in names)] for row in rows]
    said = [f"{key} {report[key]}" for key in ("data", "texts", "length", "start", "seed") if key in report]
    note = "Teacher-forced on the same tokens for every policy (KL in nats a token, NLL in nats a token)."
    return (
        f"## Evaluation\n\n{note} Settings: {', '.join(said)}.\n\n{table(body, ['policy', 'slots', *names.values()])}"
    )


def _limits(config: dict[str, Any], base: str, measured: bool) -> str:
    fits = f"It fits {base} and nothing else; other weights of the same shapes load with a warning, and may rank badly."
    if config.get("base_weights") in (BASE, BASE_INDEX):
        fits = f"It fits the architecture of {base} and nothing else; all weights of the model are replaced."
    lines = ["A token that was dropped never returns: what a later question needs may be gone.", fits]
    if not measured:
        lines.append("No evaluation is given here: measure it on your own text with `kvpop eval`.")
    if "budget" in config["policy"]:
        lines.append(
            "Other budgets than the one above can be chosen at load time (`budget=`); it was not trained for them."
        )
    lines.append(f"Whatever limits {base} has, its license included, it keeps.")
    return "## Limitations\n\n" + "\n".join(f"- {line}" for line in lines)

"""EleutherAI's lm-evaluation-harness with a bounded cache: the model type "kvpop".

    python -m kvpop.lm_eval run --model kvpop --tasks gsm8k --batch_size 8 \\
        --model_args pretrained=smollm2,adapter=kvpop:smollm2,budget=256

The harness looks up model types among those that are registered, and has no entry points for others: ``python -m
kvpop.lm_eval`` registers this one and is its command line otherwise. In Python, ``import kvpop.lm_eval`` does the same, or pass
``KVpopLM(model, tokenizer=tokenizer)`` to ``lm_eval.simple_evaluate``. Needs the package: pip install 'kvpop[lm-eval]'.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from kvpop.attachment import attach, attached_policies, cache_argument
from kvpop.cache import BoundedCache
from kvpop.documents import Documents
from kvpop.engine import Engine
from kvpop.jobs import chosen_policy, load_model, placement
from kvpop.measure import impl_for
from kvpop.policies import SequencePass
from kvpop.rollout import pass_options
from kvpop.rollouts import end_ids

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError("this needs the lm-evaluation-harness (and accelerate): pip install 'kvpop[lm-eval]'") from error

# Shapes: B rows, S tokens, n scored tokens, V vocabulary.

TILE = 128
"""On a GPU, batches are padded to multiples of so many tokens: fewer shapes to compile for."""
LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the number of new tokens, the first that is given counts, as in the harness."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1, None), "num_beams": (1, None), "min_p": (0, None), "typical_p": (1, None),
    "presence_penalty": (0, None), "frequency_penalty": (0, None), "use_cache": (True, None),
    "skip_special_tokens": (True, None), "spaces_between_special_tokens": (False, True, None),
}  # fmt: skip
"""Settings that tasks may give with a value that does nothing here."""

Inputs = tuple[tuple[int, ...], int]
"""What the model takes in, and how many of its last positions are scored."""


def main() -> None:
    """The command line of the harness."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":  # as kvpop.lm_eval, not as __main__: a name is registered once
    from kvpop.lm_eval import main

    main()
    sys.exit()


def generation_settings(given: Mapping[str, Any], new_tokens: int) -> tuple[dict[str, Any], list[str]]:
    """A task's generation settings as ``Engine.submit`` takes them (but for the seed), and its stop strings.

    Greedy unless ``do_sample`` or a temperature above 0 is given; ``do_sample`` alone is temperature 1. ``new_tokens``:
    how many if it does not say. Raises ValueError for settings that would change what is drawn and that there are not.
    """
    rest = dict(given)
    until = rest.pop("until", None) or []
    strings = [until] if isinstance(until, str) else list(until)
    lengths = [value for name in LENGTHS if (value := rest.pop(name, None)) is not None]
    temperature, sample = rest.pop("temperature", None), rest.pop("do_sample", None)
    if sample is None:
        sample = bool(temperature)
    if not sample:
        temperature = 0.0
    settings = {
        "max_new_tokens": int(lengths[0]) if lengths else new_tokens,
        "temperature": float(1.0 if temperature is None else temperature),
        "top_p": float(1.0 if (top_p := rest.pop("top_p", None)) is None else top_p),
        "top_k": int(rest.pop("top_k", None) or 0),
    }
    strange = {name: value for name, value in rest.items() if value not in NEUTRAL.get(name, ())}
    if strange:
        raise ValueError(
            f"generation settings that kvpop does not have: {strange}; it has until, {', '.join(LENGTHS)}, do_sample, "
            "temperature, top_p and top_k"
        )
    return settings, [string for string in strings if string]


class KVpopLM(HFLM):
    """A model under a retention policy. Text becomes tokens as in the harness's own "hf", of which this is a subclass.

    ``pretrained``: a name for ``kvpop.models.load_base``, or a model (then with its ``tokenizer``; without ``adapter`` and
    ``policy`` it must have a policy attached). ``adapter``, ``policy``, ``budget``, ``sinks``, ``window``, ``device`` and
    ``dtype`` are those of the command line; without an adapter or a policy the model is dense.

    ``loglikelihood`` scores a continuation under the sets that are held behind its context. ``scoring``: "sequence" is one pass
    over context and continuation under the policy's mask, which for all policies that rank tokens is exactly what the cache
    holds; "store" prefills the context in pieces of ``prefill_chunk`` tokens, as generation does, and then steps; "auto": the
    store only where what it holds depends on how tokens come (TOVA). ``get_model_info`` says which it was, and so do the
    results of the harness. In ``loglikelihood_rolling`` the context of a window is its first token.

    ``generate_until`` goes through ``kvpop.Engine`` with ``batch_size`` rows; ``graph`` and ``compiled`` are its. What is drawn
    depends on ``seed``, the context and, where a task repeats a question, on which time it is. Stop strings that are special
    tokens end an answer as tokens.

    Contexts that do not fit ``max_length`` (default: the model's positions) are cut on the left, as in "hf": counted in
    ``truncated``, with a warning.

    Raises ValueError for a ``batch_size`` that is no number, for several processes, and as the command line does.
    """

    def __init__(
        self, pretrained: str | PreTrainedModel = "smollm2", *, tokenizer: Any = None, adapter: str | None = None,
        policy: str | None = None, budget: int | None = None, sinks: int | None = None, window: int | None = None,
        batch_size: int | str = 1, max_batch_size: int | None = None, device: str | None = None, dtype: str = "auto",
        scoring: Literal["auto", "sequence", "store"] = "auto", prefill_chunk: int = 512, graph: bool | None = None,
        compiled: bool = False, seed: int = 0, max_length: int | None = None, max_gen_toks: int = 256,
        add_bos_token: bool | None = None, prefix_token_id: int | None = None, enable_thinking: bool | None = None,
        think_end_token: str | int | None = None, chat_template_args: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size must be a number of rows, at least 1, got {batch_size!r}")
        if scoring not in ("auto", "sequence", "store"):
            raise ValueError(f"scoring must be auto, sequence or store, got {scoring!r}")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("the model type kvpop runs in one process: start it without torchrun or accelerate launch")
        if isinstance(pretrained, str):
            if device == "cuda:0" and not torch.cuda.is_available():
                device = None  # what the harness says unless told otherwise
            place, precision = placement(device or "auto", dtype)
            model, own = load_model(pretrained, precision, place)
            tokenizer = tokenizer or own
        else:
            model = pretrained
        if adapter is not None or policy is not None or isinstance(pretrained, str):
            chosen, directory, slots = chosen_policy(policy or "dense", adapter, budget, sinks, window)
            if directory is None:
                attach(model, chosen)
            else:
                from kvpop.adapter import load

                load(model, directory, budget=slots)
        elif any(option is not None for option in (budget, sinks, window)):
            raise ValueError("budget, sinks and window belong to an adapter or a policy: give one")
        BoundedCache(model)  # raises if there is no policy
        super().__init__(
            pretrained=model, backend="causal", tokenizer=tokenizer, batch_size=int(batch_size), max_length=max_length,
            add_bos_token=add_bos_token, prefix_token_id=prefix_token_id, enable_thinking=enable_thinking,
            think_end_token=think_end_token, chat_template_args=chat_template_args,
        )  # fmt: skip
        by_store = scoring == "store" or (
            scoring == "auto" and any(policy.by_arrival for policy in attached_policies(model))
        )
        self.scoring: Literal["sequence", "store"] = "store" if by_store else "sequence"
        self.prefill_chunk, self.graph, self.compiled, self.seed = prefill_chunk, graph, compiled, seed
        self.new_tokens, self.truncated = max_gen_toks, 0

    @property
    def max_gen_toks(self) -> int:
        return self.new_tokens

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        from kvpop import __version__

        policies = attached_policies(self.model)
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.model.dtype),
            "kvpop_version": __version__,
            "kvpop_policies": sorted({policy.label for policy in policies}),
            "kvpop_first_layer": policies[0].describe(),
            "kvpop_loglikelihood": self.scoring,
            "kvpop_truncated": self.truncated,
        }

    # What the model scores.

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:  # fmt: skip
        asked = [self._fitted(context, continuation) for _, context, continuation in requests]
        self._say_truncated(sum(cut for *_, cut in asked), len(asked))
        groups: dict[Inputs, list[int]] = {}  # one pass for all that differ in their last token only
        for i, (tokens, n, _) in enumerate(asked):
            groups.setdefault((tokens[:-1], n), []).append(i)
        by_store = self.scoring == "store"
        order = sorted(groups, key=lambda inputs: (-len(inputs[0]) + by_store * inputs[1], inputs))
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(asked)
        with tqdm(total=len(asked), disable=disable_tqdm, desc="loglikelihood") as bar:
            for batch, logits in self._scored(order, override_bs or self.batch_size):
                for inputs, logits_nV in zip(batch, logits):
                    log_nV = (logits_nV if logits_nV.dtype == torch.float64 else logits_nV.float()).log_softmax(-1)
                    greedy_n = log_nV.argmax(-1)
                    for i in groups[inputs]:
                        text, (tokens, n, _) = requests[i][0], asked[i]
                        target_n = torch.tensor(tokens[-n:], device=log_nV.device)
                        total = log_nV.gather(-1, target_n[:, None]).sum()
                        answers[i] = float(total), bool((greedy_n == target_n).all())
                        if text is not None:  # None: a window of a longer text
                            self.cache_hook.add_partial("loglikelihood", text, answers[i])
                    bar.update(len(groups[inputs]))
        return answers

    def _fitted(self, context: list[int], continuation: list[int]) -> tuple[tuple[int, ...], int, bool]:
        """Context and continuation as far as they fit, how many tokens are scored, and whether the context was cut."""
        n = len(continuation)
        if not context or not n:
            raise ValueError(f"there is nothing to score: {len(context)} tokens of context, {n} of continuation")
        if n > self.max_length:
            raise ValueError(f"a continuation of {n} tokens does not fit the model's {self.max_length}")
        tokens = (*context, *continuation)
        room = self.max_length + 1  # the last token is not taken in
        return tokens[-room:], n, len(tokens) > room

    def _say_truncated(self, count: int, of: int) -> None:
        self.truncated += count
        if count:
            warnings.warn(
                f"{count} of {of} contexts were too long for {self.max_length} tokens and were cut on the left",
                stacklevel=3,
            )

    @torch.no_grad()
    def _scored(self, order: Sequence[Inputs], rows: int) -> Iterator[tuple[Sequence[Inputs], list[Tensor]]]:
        """Batches of inputs, each with the logits [n, V] at the last n positions."""
        how = self._by_store if self.scoring == "store" else self._by_sequence
        for start in range(0, len(order), rows):
            batch = order[start : start + rows]
            yield batch, how(batch)

    def _by_sequence(self, batch: Sequence[Inputs]) -> list[Tensor]:
        """One pass over whole sequences under the policy's mask, padded on the left."""
        weight = next(self.model.parameters())
        S, most = max(len(tokens) for tokens, _ in batch), max(n for _, n in batch)
        if weight.device.type == "cuda":
            S = -(-S // TILE) * TILE
        ids_BS = torch.tensor([[0] * (S - len(tokens)) + list(tokens) for tokens, _ in batch], device=weight.device)
        length_B1 = torch.tensor([[len(tokens)] for tokens, _ in batch], device=weight.device)
        documents = Documents.from_padding(torch.arange(S, device=weight.device) >= S - length_B1)
        keep = {"logits_to_keep": most} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        call = SequencePass(documents, impl=impl_for(weight))
        logits_BnV = self.model(
            input_ids=ids_BS, position_ids=documents.position_BS.clamp(min=0), use_cache=False, kvpop=call, **keep
        ).logits
        return [logits_SV[-n:] for logits_SV, (_, n) in zip(logits_BnV, batch)]

    def _by_store(self, batch: Sequence[Inputs]) -> list[Tensor]:
        """Contexts prefilled alone, then a token at a time of all rows together."""
        keywords, device = pass_options(self.model), next(self.model.parameters()).device
        name, rows = cache_argument(self.model), None
        found: list[list[Tensor]] = []
        contexts = [tokens[: len(tokens) - n + 1] for tokens, n in batch]
        last: tuple[tuple[int, ...], BoundedCache, Tensor] | None = None
        for row, context in enumerate(contexts):
            if last is None or last[0] != context:
                cache = BoundedCache(self.model)
                ids_1S = torch.tensor([context], device=device)
                position_1S = torch.arange(len(context), device=device)[None]
                for start in range(0, len(context), self.prefill_chunk):
                    part = slice(start, start + self.prefill_chunk)
                    logits_1V = self.model(
                        input_ids=ids_1S[:, part], position_ids=position_1S[:, part], **{name: cache}, **keywords
                    ).logits[:, -1]
                last = context, cache, logits_1V[0]
            rows = last[1].like(len(batch)) if rows is None else rows
            rows.put(row, last[1])
            found.append([last[2]])
        for t in range(max(n for _, n in batch) - 1):
            left = [len(context) + t < len(tokens) for (tokens, _), context in zip(batch, contexts)]
            ids = [
                tokens[len(context) + t] if there else 0 for (tokens, _), context, there in zip(batch, contexts, left)
            ]
            logits_BV = self.model(
                input_ids=torch.tensor(ids, device=device)[:, None],
                position_ids=torch.tensor([len(context) + t for context in contexts], device=device)[:, None],
                attention_mask=torch.tensor(left, device=device)[:, None].long(),
                **{name: rows},
                **keywords,
            ).logits[:, -1]
            for row, there in enumerate(left):
                if there:
                    found[row].append(logits_BV[row])
        return [torch.stack(logits) for logits in found]

    # What the model writes.

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes behind every context, up to a stop string or an end of text."""
        engine = Engine(
            self.model, self.tokenizer, rows=self.batch_size, prefill_chunk=self.prefill_chunk, graph=self.graph,
            compiled=self.compiled,
        )  # fmt: skip
        ends, added = end_ids(self.model, self.tokenizer), self.tokenizer.get_added_vocab()
        times: Counter[str] = Counter()
        places: dict[Any, tuple[int, list[str]]] = {}
        cut = 0
        for place, (context, given) in enumerate(request.args for request in requests):
            settings, until = generation_settings(given, self.max_gen_toks)
            room = self.max_length - settings["max_new_tokens"]
            if room < 1:
                raise ValueError(
                    f"{settings['max_new_tokens']} new tokens leave no room for a context in {self.max_length}"
                )
            ids = self.tok_encode(context) or [self.prefix_token_id]
            cut += len(ids) > room
            asked = json.dumps([context, settings, until])
            submitted = engine.submit(
                ids[-room:], **settings, seed=self._seed(context, times[asked]),
                stop=[string for string in until if string not in added],
                stop_ids=ends | {added[string] for string in until if string in added},
            )  # fmt: skip
            times[asked] += 1
            places[submitted] = place, until
        self._say_truncated(cut, len(places))
        answers = [""] * len(places)
        with tqdm(total=len(places), disable=disable_tqdm, desc="generate_until") as bar:
            for request in (event.request for event in engine.run() if event.request.finish_reason is not None):
                if request.error is not None:
                    raise request.error
                place, until = places[request]
                answers[place] = self._answer(request, until)
                self.cache_hook.add_partial("generate_until", requests[place].args, answers[place])
                bar.update()
        return answers

    def _seed(self, context: str, time: int) -> int:
        return int.from_bytes(hashlib.sha256(json.dumps([self.seed, context, time]).encode()).digest()[:8]) >> 1

    def _answer(self, request: Any, until: Sequence[str]) -> str:
        """The text of a request, behind the end of its thinking if there is such a token or string."""
        end, text = self.think_end_token, request.text
        if isinstance(end, int) and end in request.tokens:
            behind = request.tokens[len(request.tokens) - request.tokens[::-1].index(end) :]
            text = self.tokenizer.decode(behind, skip_special_tokens=True).lstrip()
            for stop in until:
                text = text.split(stop)[0]
        return text.split(end)[-1].lstrip() if isinstance(end, str) else text


register_model("kvpop")(KVpopLM)

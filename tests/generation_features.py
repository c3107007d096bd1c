"""What ``generate`` does with a policy attached, feature by feature: each verdict comes with the check that holds it.

    PYTHONPATH=src python -m tests.generation_features > docs/generation.md

"exact" compares with generation without a cache, where the same model attends under the policy's mask, or with what the note
names. "works" runs and does what the note says. "refused" raises ValueError before the model runs and leaves it usable.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteria,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from kvpop.attachment import attach, cache_argument, detach
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.policies import KVpop, Streaming, Tova
from tests.test_invariant import shake
from tests.tiny import VOCAB, tiny_model

Verdict = Literal["exact", "works", "refused"]
GROUPS = ("Decoding", "Drafting", "Prompts", "Logits and stopping", "Output", "Cache", "Running")
BUDGET = Budget(1, 3, 4)
LENGTH, NEW = 12, 16


class Missing(Exception):
    """The installed transformers does not have the feature."""


@dataclass(frozen=True)
class Feature:
    group: str
    name: str
    call: str
    verdict: Verdict
    note: str
    check: Callable[[], None]


FEATURES: list[Feature] = []


def feature(group: str, name: str, call: str, verdict: Verdict, note: str):
    def add(check: Callable[[], None]) -> Callable[[], None]:
        FEATURES.append(Feature(group, name, call, verdict, note, check))
        return check

    return add


# The models


@cache
def model() -> PreTrainedModel:
    made = attach(tiny_model(), KVpop(BUDGET))
    shake(made, 1)
    return made


@cache
def plain(seed: int = 0) -> PreTrainedModel:
    return tiny_model(seed=seed)


@cache
def tokenizer(words: int = VOCAB) -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[BOS]", "[EOS]", "[UNK]"]
    names = [*special, "abcdef", *(f"w{i}" for i in range(5, words))]  # stop strings are measured against "abcdef"
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, bos, eos, unk = special
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=unk, pad_token=pad, bos_token=bos, eos_token=eos, padding_side="left"
    )


def prompt(rows: int = 1, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def repetitive() -> Tensor:
    """A text whose continuation can be looked up."""
    return torch.cat([prompt(length=8)] * 3, dim=1)


def generate(ids: Tensor | None = None, *, with_model: PreTrainedModel | None = None, new: int = NEW, **options):
    torch.manual_seed(0)
    length = {} if "max_length" in options or "max_time" in options else {"max_new_tokens": new}
    if not {"eos_token_id", "stopping_criteria", "stop_strings", "min_length", "max_time"} & set(options):
        length |= {"min_new_tokens": new}
    options = {"do_sample": False, "pad_token_id": 0} | length | options
    return (model() if with_model is None else with_model).generate(ids, **options)


def cached(bounded: object) -> dict[str, object]:
    return {cache_argument(model()): bounded}


# The three verdicts


def exact(ids: Tensor | None = None, **options) -> Tensor:
    """Tokens with the bounded cache are those without any."""
    ids = prompt(2) if ids is None else ids
    with_cache, without = generate(ids, **options), generate(ids, **options, use_cache=False)
    assert torch.equal(with_cache, without)
    return with_cache


def refused(message: str, call: Callable[[], object], with_model: PreTrainedModel | None = None) -> None:
    """ValueError with that message, no pass through the model, and the model generates as before."""
    target = with_model or model()
    before = generate(prompt(), with_model=target)
    refused_at_once(message, call, target)
    assert torch.equal(generate(prompt(), with_model=target), before)


def refused_at_once(message: str, call: Callable[[], object], target: PreTrainedModel) -> None:
    passes: list[object] = []
    hook = target.register_forward_hook(lambda *_: passes.append(1))
    try:
        call()
        said = "nothing"
    except ValueError as error:
        said = str(error)
    finally:
        hook.remove()
    assert re.search(message, said), f"expected {message!r}, got {said}"
    assert not passes, "the model ran before it was refused"


# Decoding


@feature("Decoding", "greedy", "do_sample=False", "exact", "")
def _() -> None:
    exact()


@feature("Decoding", "sampling", "do_sample=True", "exact", "same seed, same tokens")
def _() -> None:
    assert not torch.equal(exact(do_sample=True), exact())


@feature(
    "Decoding", "sampling cut-offs", "temperature, top_k, top_p, min_p, typical_p, epsilon_cutoff, eta_cutoff", "exact", ""
)  # fmt: skip
def _() -> None:
    exact(do_sample=True, temperature=0.8, top_k=20, top_p=0.9)
    exact(do_sample=True, min_p=0.02)
    exact(do_sample=True, typical_p=0.9)
    exact(do_sample=True, epsilon_cutoff=0.01, eta_cutoff=0.01)


@feature("Decoding", "several samples of a prompt", "num_return_sequences=3", "exact", "")
def _() -> None:
    assert exact(do_sample=True, num_return_sequences=3).shape[0] == 6


@feature("Decoding", "beam search", "num_beams=3", "exact", "the store's rows are reordered in place")
def _() -> None:
    exact(num_beams=3)
    exact(num_beams=3, num_return_sequences=2, length_penalty=0.5, early_stopping=True, eos_token_id=[5, 9])


@feature("Decoding", "beam sampling", "num_beams=3, do_sample=True", "exact", "same seed, same tokens")
def _() -> None:
    exact(num_beams=3, do_sample=True)


@feature(
    "Decoding", "classifier-free guidance", "guidance_scale=1.5", "exact",
    "the unconditional branch gets a bounded cache of its own",
)  # fmt: skip
def _() -> None:
    guided = exact(guidance_scale=1.5)
    assert not torch.equal(guided, exact())


@feature("Decoding", "negative prompts", "guidance_scale, negative_prompt_ids", "exact", "as above")
def _() -> None:
    mask = torch.ones(2, 9, dtype=torch.long)
    exact(guidance_scale=1.5, negative_prompt_ids=prompt(2, 9, 3), negative_prompt_attention_mask=mask)


MOVED = "transformers moved it to hub code and asks for trust_remote_code; not tested with kvpop"


@feature("Decoding", "group beam search", "num_beams=4, num_beam_groups=2, diversity_penalty=1.0", "refused", MOVED)
def _() -> None:
    options = dict(num_beams=4, num_beam_groups=2, diversity_penalty=1.0)
    refused("trust_remote_code", lambda: generate(prompt(), **options))


@feature("Decoding", "constrained beam search", "num_beams=3, force_words_ids=[[7]]", "refused", MOVED)
def _() -> None:
    refused("trust_remote_code", lambda: generate(prompt(), num_beams=3, force_words_ids=[[7]]))


@feature("Decoding", "DoLa", 'dola_layers="high"', "refused", MOVED)
def _() -> None:
    refused("trust_remote_code", lambda: generate(prompt(), dola_layers="high"))


@feature(
    "Decoding", "contrastive search", "penalty_alpha=0.6, top_k=4", "refused",
    "hub code that takes caches apart: sample or use beams",
)  # fmt: skip
def _() -> None:
    options = dict(penalty_alpha=0.6, top_k=4)
    refused("trust_remote_code", lambda: generate(prompt(), **options))
    refused(r"contrastive search \(penalty_alpha\)", lambda: generate(prompt(), **options, custom_generate=decode))


# Drafting


@feature(
    "Drafting", "prompt lookup", "prompt_lookup_num_tokens=5", "exact", "equals greedy; the cache can take a draft back"
)  # fmt: skip
def _() -> None:
    for length in (3, 5, 40):
        looked_up = generate(repetitive(), prompt_lookup_num_tokens=length, max_matching_ngram_size=1)
        assert torch.equal(looked_up, exact(repetitive()))


@feature("Drafting", "assisted decoding", "assistant_model=small", "exact", "equals greedy")
def _() -> None:
    for assistant in (plain(), plain(1)):  # one that is often right, one that is not
        assert torch.equal(generate(prompt(), assistant_model=assistant), exact(prompt()))


@feature(
    "Drafting", "assisted sampling", "assistant_model=small, do_sample=True", "exact",
    "the logits that tokens are drawn from; draws are not those of plain sampling",
)  # fmt: skip
def _() -> None:
    flags = dict(do_sample=True, return_dict_in_generate=True, output_logits=True)
    out = generate(prompt(), assistant_model=plain(1), **flags)
    with torch.no_grad():
        expected = model()(out.sequences, use_cache=False).logits[0, LENGTH - 1 : -1]
    torch.testing.assert_close(torch.cat(out.logits), expected.float())


@feature(
    "Drafting", "an assistant with a policy of its own", "assistant_model=kvpop.attach(small, policy)", "exact",
    "equals greedy; the main model may have a policy or not",
)  # fmt: skip
def _() -> None:
    assistant = attach(tiny_model(seed=1), KVpop(BUDGET))
    assert torch.equal(generate(prompt(), assistant_model=assistant, new=30), exact(prompt(), new=30))
    expected = generate(prompt(), with_model=plain(), new=30)
    assert torch.equal(generate(prompt(), with_model=plain(), assistant_model=assistant, new=30), expected)


@feature(
    "Drafting", "length of a draft", "small.generation_config.num_assistant_tokens = 40", "exact",
    "equals greedy; how much can be rolled back follows from the assistant's own settings",
)  # fmt: skip
def _() -> None:
    assistant = tiny_model(seed=1)
    for length in (2, 40):
        assistant.generation_config.num_assistant_tokens = length
        assert torch.equal(generate(prompt(), assistant_model=assistant, new=60), exact(prompt(), new=60))


@feature(
    "Drafting", "early exit", "assistant_early_exit=1", "exact", "equals greedy; the draft has a bounded cache too"
)
def _() -> None:
    assert torch.equal(generate(prompt(), assistant_early_exit=1), exact(prompt()))


@feature(
    "Drafting", "an assistant with another tokenizer, greedy", "assistant_model, tokenizer, assistant_tokenizer", "exact",
    "equals greedy, for drafts of at most 512 tokens of the main model",
)  # fmt: skip
def _() -> None:
    other = smaller_vocabulary()
    options = dict(tokenizer=tokenizer(), assistant_tokenizer=tokenizer(VOCAB - 1), assistant_model=other)
    assert torch.equal(generate(prompt() % 50 + 5, **options), exact(prompt() % 50 + 5))
    options["assistant_model"] = attach(copy.deepcopy(other), KVpop(BUDGET))
    assert torch.equal(generate(prompt() % 50 + 5, **options), exact(prompt() % 50 + 5))


@cache
def smaller_vocabulary() -> PreTrainedModel:
    made = tiny_model(seed=2)
    made.resize_token_embeddings(VOCAB - 1)
    return made


@feature(
    "Drafting", "drafts that grow", 'num_assistant_tokens_schedule="heuristic"', "refused",
    'without bound, so would the rollback: set "constant"',
)  # fmt: skip
def _() -> None:
    assistant = tiny_model(seed=1)
    for schedule in ("heuristic", "heuristic_transient"):
        assistant.generation_config.num_assistant_tokens_schedule = schedule
        message = f"num_assistant_tokens_schedule='{schedule}' lets the draft grow .* 'constant'"
        refused(message, lambda: generate(prompt(), assistant_model=assistant))


@feature("Drafting", "very long drafts", "prompt_lookup_num_tokens=512", "refused", "511 tokens at most")
def _() -> None:
    refused("make them 511 at most", lambda: generate(repetitive(), prompt_lookup_num_tokens=512))


@feature(
    "Drafting", "a cache given, made to roll back", "BoundedCache(model, rollback=n)", "exact",
    "n is the longest draft and one more",
)  # fmt: skip
def _() -> None:
    bounded = BoundedCache(model(), rollback=6)
    found = generate(repetitive(), prompt_lookup_num_tokens=5, **cached(bounded))
    assert torch.equal(found, exact(repetitive()))
    assert bounded.tokens_seen() == [repetitive().shape[1] + NEW - 1]


@feature(
    "Drafting", "a cache given that has been used and cannot roll back", "BoundedCache(model)", "refused",
    "says how it must be made; an empty one is set up on the spot",
)  # fmt: skip
def _() -> None:
    used = BoundedCache(model(), rollback=2)
    with torch.no_grad():
        model()(repetitive()[:, :-1], **cached(used))
    message = (
        r"takes back up to 6 tokens, but this cache can take back 2: make it with BoundedCache\(model, rollback=6\)"
    )
    refused(message, lambda: generate(repetitive(), prompt_lookup_num_tokens=5, **cached(used)))
    empty = BoundedCache(model())
    found = generate(repetitive(), prompt_lookup_num_tokens=5, **cached(empty))
    assert torch.equal(found, exact(repetitive()))


@feature(
    "Drafting", "drafting with TOVA", "Tova(...), prompt_lookup_num_tokens=5", "refused",
    "what TOVA keeps depends on how many tokens are read at once",
)  # fmt: skip
def _() -> None:
    tova = attach(tiny_model(), Tova(8))
    refused("TOVA cannot roll back", lambda: generate(repetitive(), with_model=tova, prompt_lookup_num_tokens=5), tova)
    refused("TOVA cannot roll back", lambda: generate(prompt(), with_model=tova, assistant_model=plain()), tova)
    refused("TOVA cannot roll back", lambda: generate(prompt(), assistant_model=tova))


@feature("Drafting", "drafting for a batch", "two rows, prompt_lookup_num_tokens=5", "refused", "by transformers")
def _() -> None:
    refused("batch_size = 1", lambda: generate(prompt(2), prompt_lookup_num_tokens=5))


@feature("Drafting", "multi-token prediction", "use_mtp=True", "refused", "draft by look-up or with an assistant")
def _() -> None:
    if not hasattr(GenerationConfig(), "use_mtp"):
        raise Missing
    refused("use_mtp=True cannot be used", lambda: generate(prompt(), use_mtp=True))


@feature("Drafting", "DFlash drafts", 'speculation_type="dflash"', "refused", "as above")
def _() -> None:
    if not hasattr(GenerationConfig(), "speculation_type"):
        raise Missing
    options = dict(speculation_type="dflash", assistant_model=plain())
    refused("speculation_type='dflash' cannot be used", lambda: generate(prompt(), **options))


# Prompts


def padded(side: str) -> tuple[list[Tensor], Tensor, Tensor]:
    rows = [prompt(1, 5, 1), prompt(1, LENGTH, 2)]
    ids, mask = torch.zeros(2, LENGTH, dtype=torch.long), torch.zeros(2, LENGTH, dtype=torch.long)
    for i, row in enumerate(rows):
        part = slice(LENGTH - row.shape[1], None) if side == "left" else slice(0, row.shape[1])
        ids[i, part], mask[i, part] = row, 1
    return rows, ids, mask


@feature("Prompts", "unequal prompts, padded left", "attention_mask", "exact", "each row equals the row alone")
def _() -> None:
    rows, ids, mask = padded("left")
    together = exact(ids, attention_mask=mask)
    for i, row in enumerate(rows):
        assert torch.equal(together[i, LENGTH:], generate(row)[0, row.shape[1] :])


@feature(
    "Prompts", "unequal prompts, padded right", "attention_mask", "works",
    "as in transformers: a warning, and the first token of a shorter row is read off its padding. Pad left",
)  # fmt: skip
def _() -> None:
    rows, ids, mask = padded("right")
    together = generate(ids, attention_mask=mask)
    assert together.shape == (2, LENGTH + NEW)
    assert torch.equal(together[1:], generate(rows[1]))


@feature("Prompts", "embeddings for a prompt", "inputs_embeds", "exact", "equals the same prompt as tokens")
def _() -> None:
    embeddings = model().get_input_embeddings()(prompt(2))
    assert torch.equal(generate(inputs_embeds=embeddings), exact()[:, LENGTH:])


@feature("Prompts", "no prompt", "generate()", "exact", "starts at bos_token_id")
def _() -> None:
    assert torch.equal(generate(), generate(use_cache=False))
    assert torch.equal(generate(), exact(torch.ones(1, 1, dtype=torch.long)))


@feature("Prompts", "prefill in pieces", "prefill_chunk_size=5", "exact", "any size gives the same sets; not for TOVA")
def _() -> None:
    for size in (1, 5, 12):
        assert torch.equal(generate(prompt(2), prefill_chunk_size=size), exact())
    _, ids, mask = padded("left")
    assert torch.equal(generate(ids, attention_mask=mask, prefill_chunk_size=5), exact(ids, attention_mask=mask))


@feature("Prompts", "token healing", "token_healing=True, tokenizer", "works", "changes the prompt, then as ever")
def _() -> None:
    out = generate(prompt(), token_healing=True, tokenizer=tokenizer())
    assert out.shape == (1, LENGTH + NEW)


@feature("Prompts", "a 4-D attention mask", "attention_mask [B, 1, S, S]", "refused", "by transformers")
def _() -> None:
    mask = torch.ones(1, 1, LENGTH, LENGTH)
    refused("must be 2D", lambda: generate(prompt(), attention_mask=mask))


# Logits and stopping


class FavourSeven(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 7] += 2.0
        return scores


@feature(
    "Logits and stopping", "penalties",
    "repetition_penalty, encoder_repetition_penalty, no_repeat_ngram_size, exponential_decay_length_penalty", "exact", "",
)  # fmt: skip
def _() -> None:
    exact(repetition_penalty=1.3)
    exact(encoder_repetition_penalty=1.3)
    exact(no_repeat_ngram_size=2)
    exact(exponential_decay_length_penalty=(4, 1.5), eos_token_id=5)


@feature(
    "Logits and stopping", "tokens barred, forced or biased",
    "bad_words_ids, suppress_tokens, begin_suppress_tokens, forced_bos_token_id, forced_eos_token_id, sequence_bias",
    "exact", "",
)  # fmt: skip
def _() -> None:
    first = exact()[0, LENGTH].item()
    assert first not in exact(bad_words_ids=[[first]], suppress_tokens=[9])[0, LENGTH:]
    assert exact(begin_suppress_tokens=[first])[0, LENGTH] != first
    assert exact(forced_eos_token_id=5)[0, -1] == 5
    exact(forced_bos_token_id=7)
    exact(sequence_bias={(7,): 3.0})


@feature(
    "Logits and stopping", "your own processors", "logits_processor, prefix_allowed_tokens_fn, renormalize_logits", "exact", ""
)  # fmt: skip
def _() -> None:
    exact(logits_processor=[FavourSeven()], renormalize_logits=True, remove_invalid_values=True)
    assert set(exact(prefix_allowed_tokens_fn=lambda row, ids: [7, 8])[0, LENGTH:].tolist()) <= {7, 8}


@feature("Logits and stopping", "watermarks", "watermarking_config", "exact", "the green list and SynthID")
def _() -> None:
    from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

    exact(watermarking_config=WatermarkingConfig(bias=2.0))
    keys = list(range(10, 40))
    exact(do_sample=True, watermarking_config=SynthIDTextWatermarkingConfig(keys=keys, ngram_len=3))


@feature(
    "Logits and stopping", "rows that end early", "eos_token_id", "exact", "a finished row goes on with padding, as ever"
)  # fmt: skip
def _() -> None:
    text = generate(prompt(3))
    ends = text[0, LENGTH + 4].item()
    out = exact(prompt(3), eos_token_id=ends)
    assert (out[0] == 0).any()


@feature("Logits and stopping", "lengths", "max_length, min_length, min_new_tokens", "exact", "")
def _() -> None:
    assert exact(max_length=LENGTH + 5).shape[1] == LENGTH + 5
    exact(min_length=LENGTH + 9, eos_token_id=list(range(3, 40)))


class AfterFive(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= LENGTH + 5)


@feature("Logits and stopping", "stopping criteria", "stopping_criteria", "exact", "")
def _() -> None:
    assert exact(stopping_criteria=[AfterFive()]).shape[1] == LENGTH + 5


@feature("Logits and stopping", "stop strings", "stop_strings, tokenizer", "exact", "")
def _() -> None:
    word = tokenizer().decode(generate(prompt())[0, LENGTH + 3])
    out = exact(prompt(), stop_strings=[word], tokenizer=tokenizer())
    assert out.shape[1] <= LENGTH + 4


@feature("Logits and stopping", "a time limit", "max_time=0.05", "works", "ends after the step that passes it")
def _() -> None:
    out = generate(prompt(), max_time=0.05, max_length=2000)
    assert LENGTH < out.shape[1] < 2000


# Output


@feature("Output", "streamers", "streamer=TextStreamer(...), TextIteratorStreamer(...)", "exact", "drafting included")
def _() -> None:
    expected = tokenizer().decode(generate(prompt())[0, LENGTH:])
    for options in ({}, {"prompt_lookup_num_tokens": 3}):
        streamer = TextIteratorStreamer(tokenizer(), skip_prompt=True)
        generate(prompt(), streamer=streamer, **options)
        assert "".join(streamer).strip() == expected
    pieces: list[str] = []
    streamer = TextStreamer(tokenizer(), skip_prompt=True)
    streamer.on_finalized_text = lambda text, stream_end=False: pieces.append(text)
    generate(prompt(), streamer=streamer)
    assert "".join(pieces).strip() == expected


@feature(
    "Output", "scores, logits, hidden states", "return_dict_in_generate, output_scores, output_logits, output_hidden_states",
    "exact", "to rounding",
)  # fmt: skip
def _() -> None:
    flags = dict(return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True)
    with_cache, without = (generate(prompt(2), **flags, use_cache=use) for use in (True, False))
    for name in ("scores", "logits"):
        for a, b in zip(getattr(with_cache, name), getattr(without, name), strict=True):
            torch.testing.assert_close(a, b)
    for a, b in zip(with_cache.hidden_states, without.hidden_states, strict=True):
        torch.testing.assert_close(a[-1][:, -1], b[-1][:, -1])
    found = model().compute_transition_scores(with_cache.sequences, with_cache.scores, normalize_logits=True)
    assert found.shape == (2, NEW)


@feature("Output", "the cache", "return_dict_in_generate=True", "works", "returns the BoundedCache, to go on with")
def _() -> None:
    out = generate(prompt(2), return_dict_in_generate=True)
    bounded = getattr(out, cache_argument(model()))
    assert isinstance(bounded, BoundedCache)
    assert (bounded.rows_held(), bounded.tokens_seen()) == (BUDGET.slots, [LENGTH + NEW - 1] * 2)


@feature(
    "Output", "attention weights", "output_attentions=True", "refused",
    "they are never formed: observe a cache-free pass with `SequencePass(documents, observe=...)`",
)  # fmt: skip
def _() -> None:
    options = dict(output_attentions=True, return_dict_in_generate=True)
    refused(r"output_attentions|eager", lambda: generate(prompt(), **options))


# Cache


@feature("Cache", "no cache", "use_cache=False", "works", "the whole text runs again for every token, under the mask")
def _() -> None:
    ids = prompt()
    for _ in range(3):
        with torch.no_grad():
            token = model()(ids, use_cache=False).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, token], dim=1)
    assert torch.equal(generate(prompt(), use_cache=False)[:, : LENGTH + 3], ids)


@feature("Cache", "a cache of your own", "cache=BoundedCache(model), past_key_values=...", "exact", "filled as it goes")
def _() -> None:
    bounded = BoundedCache(model())
    assert torch.equal(generate(prompt(2), **cached(bounded)), exact())
    assert bounded.tokens_seen() == [LENGTH + NEW - 1] * 2


@feature(
    "Cache", "several turns", "the whole text and the cache of the turn before", "exact", "also when it is long full"
)  # fmt: skip
def _() -> None:
    bounded, ids = BoundedCache(model()), prompt()
    for turn in range(3):
        found = generate(ids, **cached(bounded))
        assert torch.equal(found, exact(ids))
        ids = torch.cat([found, prompt(1, 7, turn)], dim=1)


@feature(
    "Cache",
    "several turns, padded rows",
    "attention_mask over the whole text",
    "exact",
    "its columns over tokens already taken in are not looked at again",
)
def _() -> None:
    _, ids, mask = padded("left")
    bounded = BoundedCache(model())
    for turn in range(2):
        found = generate(ids, attention_mask=mask, **cached(bounded))
        assert torch.equal(found, exact(ids, attention_mask=mask))
        ids = torch.cat([found, prompt(2, 7, turn)], dim=1)
        mask = torch.cat([mask, mask.new_ones(2, NEW + 7)], dim=1)


@feature(
    "Cache", "a turn given as its new tokens alone", "the new tokens, attention_mask over the whole text", "exact",
    "without that mask it is refused",
)  # fmt: skip
def _() -> None:
    bounded = BoundedCache(model())
    whole = torch.cat([generate(prompt(2), **cached(bounded)), prompt(2, 7, 1)], dim=1)
    fresh = whole[:, LENGTH + NEW - 1 :]  # the last token of a turn has not been taken in
    refused("8 tokens were given to a cache that has taken in 27", lambda: generate(fresh, **cached(bounded)))
    out = generate(fresh, attention_mask=torch.ones_like(whole), **cached(bounded))
    assert torch.equal(out[:, fresh.shape[1] :], exact(whole)[:, whole.shape[1] :])


@feature(
    "Cache", "several continuations of a used cache", "cache.batch_repeat_interleave(3), then num_beams=3 or three samples",
    "exact", "repeat its rows first, or it is refused; deepcopy(cache) to keep it",
)  # fmt: skip
def _() -> None:
    used = BoundedCache(model())
    text = generate(prompt(), **cached(used))
    for options in (dict(num_beams=3), dict(num_return_sequences=3, do_sample=True)):
        refused("holds 1 rows .* has 3 rows", lambda options=options: generate(text, **options, **cached(used)))
        rows = copy.deepcopy(used)
        rows.batch_repeat_interleave(3)
        assert torch.equal(generate(text, **options, **cached(rows)), exact(text, **options))


@feature(
    "Cache", "another kind of cache", 'cache_implementation="dynamic", "static", "offloaded", "quantized", ...', "refused",
    "leave it unset",
)  # fmt: skip
def _() -> None:
    for kind in ("dynamic", "static", "offloaded", "offloaded_static", "quantized"):
        message = f"cache_implementation='{kind}' cannot be used .* leave it unset"
        refused(message, lambda kind=kind: generate(prompt(), cache_implementation=kind))


@feature("Cache", "a stock cache", "DynamicCache(), StaticCache(...)", "refused", "it must be a BoundedCache(model)")
def _() -> None:
    for stock in (DynamicCache(), StaticCache(config=model().config, max_cache_len=64)):
        message = rf"a {type(stock).__name__} was given: .* must be a kvpop\.BoundedCache"
        refused(message, lambda stock=stock: generate(prompt(), **cached(stock)))


@feature("Cache", "a cache of another model or policy", "BoundedCache(other)", "refused", "make a new one")
def _() -> None:
    other = attach(tiny_model(), Streaming(BUDGET))
    bounded = BoundedCache(other)
    refused("belongs to another model", lambda: generate(prompt(), **cached(bounded)))
    detach(other)
    refused("belongs to another model", lambda: generate(prompt(), **cached(bounded)))


# Running


def eager_graph() -> CompileConfig:
    config = CompileConfig(fullgraph=True, backend=lambda graph, inputs, **_: graph)
    config._compile_all_devices = True  # as on a GPU, where transformers compiles by itself
    return config


@feature(
    "Running", "a compiled decoding step", "compile_config=CompileConfig(fullgraph=True, ...)", "exact",
    "one graph for every step; disable_compile=True turns it off",
)  # fmt: skip
def _() -> None:
    torch._dynamo.reset()
    assert torch.equal(generate(prompt(2), compile_config=eager_graph()), exact())
    assert torch.equal(generate(prompt(2), compile_config=eager_graph(), disable_compile=True), exact())
    torch._dynamo.reset()


@feature(
    "Running", "a compiled model object", "torch.compile(model).generate", "exact",
    "as in transformers, its generate runs the model it wraps, uncompiled",
)  # fmt: skip
def _() -> None:
    assert torch.equal(generate(prompt(2), with_model=torch.compile(model(), backend="eager")), exact())


@feature(
    "Running", "a model compiled in place", "model.compile(), model.forward = torch.compile(model.forward)", "refused",
    "the prompt would be compiled too: leave the model as it is and give a `compile_config`",
)  # fmt: skip
def _() -> None:
    own = attach(tiny_model(), KVpop(BUDGET))
    own.forward = torch.compile(own.forward, backend="eager")
    message = r"is compiled itself, .* compile_config=CompileConfig\(\.\.\.\)"
    refused_at_once(message, lambda: generate(prompt(), with_model=own), own)
    del own.forward
    own.compile(backend="eager")
    refused_at_once(message, lambda: generate(prompt(), with_model=own), own)
    own._compiled_call_impl = None
    generate(prompt(), with_model=own)


@feature("Running", "pipelines", 'pipeline("text-generation", model, tokenizer)', "exact", "batches are padded left")
def _() -> None:
    run = pipeline("text-generation", model=model(), tokenizer=tokenizer())
    texts = [tokenizer().decode(prompt(1, length, 5)[0]) for length in (6, LENGTH)]
    options = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, return_full_text=False)
    found = run(texts, batch_size=2, **options)
    for text, out in zip(texts, found, strict=True):
        ids = tokenizer()(text, return_tensors="pt").input_ids
        assert (
            out[0]["generated_text"].split()
            == tokenizer().decode(exact(ids)[0, ids.shape[1] :], skip_special_tokens=True).split()
        )


def decode(self, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
    """A decoding loop of one's own: greedy."""
    while not stopping_criteria(input_ids, None).all():
        inputs = self.prepare_inputs_for_generation(
            input_ids, **model_kwargs, next_sequence_length=None if model_kwargs.get("begun") is None else 1
        )
        out = self(**inputs, return_dict=True)
        model_kwargs = self._update_model_kwargs_for_generation(out, model_kwargs) | {"begun": True}
        token = logits_processor(input_ids, out.logits[:, -1].float()).argmax(-1, keepdim=True)
        input_ids = torch.cat([input_ids, token], dim=1)
    return input_ids


@feature("Running", "a decoding loop of your own", "custom_generate=function", "exact", "is given the BoundedCache")
def _() -> None:
    assert torch.equal(generate(prompt(2), custom_generate=decode), exact())


@feature(
    "Running", "continuous batching",
    'generate_batch, continuous_batching_context_manager, init_continuous_batching, cache_implementation="paged"', "refused",
    "it pages a cache of its own: use left-padded batches",
)  # fmt: skip
def _() -> None:
    message = "continuous batching .* use generate with a left-padded batch"
    refused(message, lambda: model().generate_batch([[5, 6, 7]]))
    refused(message, lambda: model().init_continuous_batching())
    refused(message, lambda: model().continuous_batching_context_manager().__enter__())
    refused(f"{message}|cache_implementation='paged'", lambda: generate(prompt(), cache_implementation="paged"))


# The table


def markdown() -> str:
    lines = [
        "# `generate` with a policy attached",
        "",
        "Written by `python -m tests.generation_features`; every line is checked by `tests/test_generation.py`. **exact**: the",
        "tokens (or logits) are those of generation without a cache, where the model attends under the policy's mask, or of",
        "what the note names. **works**: runs, and does what the note says. **refused**: a ValueError that says what to do",
        "instead, before the first token; the model stays usable.",
    ]
    for group in GROUPS:
        lines += ["", f"## {group}", "", "| feature | how | verdict | note |", "|---|---|---|---|"]
        lines += [f"| {f.name} | `{f.call}` | {f.verdict} | {f.note} |" for f in FEATURES if f.group == group]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")

"""Retrieval tests in the manner of RULER: a passkey, or several numbers under keys, hidden in long text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvpop.data import Tokenizer
from kvpop.tasks.haystack import Piece, RetrievalPrompt, assemble, encode, opening

# Shapes: Q positions with logits, V vocabulary, A tokens of an answer.

NEEDLE_FACT = "\n\nThe special magic number for {word} is: {number}.\n\n"
NEEDLE_QUESTION = "\n\nWhat is the special magic number for {word}? The special magic number for {word} is:"
# fmt: off
NEEDLE_KEYS = (
    "apple", "anchor", "basket", "bridge", "button", "candle", "carpet", "castle", "cherry", "circle", "copper",
    "cotton", "dragon", "eagle", "engine", "feather", "finger", "forest", "garden", "guitar", "hammer", "harbor",
    "helmet", "island", "jacket", "kettle", "ladder", "lemon", "magnet", "marble", "mirror", "mountain", "needle",
    "ocean", "orange", "pencil", "pepper", "piano", "planet", "pocket", "rabbit", "ribbon", "river", "rocket",
    "saddle", "shadow", "silver", "spider", "station", "temple", "thunder", "ticket", "tiger", "tunnel", "turtle",
    "valley", "violin", "wagon", "walnut", "whistle", "window", "winter", "meadow", "lizard",
)
# fmt: on


PASSKEY_FACT = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
PASSKEY_QUESTION = "\n\nWhat is the pass key? The pass key is"


def passkey_prompt(
    tokenizer: Tokenizer, haystack_tokens: Sequence[int] | None, length: int, depth: float, rng: np.random.Generator
) -> RetrievalPrompt:
    """A five-digit passkey hidden at ``depth`` in [0, 1] of the haystack and asked for at the end of ``length`` tokens.

    ``haystack_tokens``: text to hide it in, at least ``length`` tokens to be safe; None for filler sentences. Raises
    ValueError if ``length`` has no room for the sentences, the haystack is too short or the depth outside [0, 1].
    """
    key = str(rng.integers(10_000, 100_000))
    before = Piece(opening(tokenizer)).add(
        encode(tokenizer, "There is a pass key hidden inside the following text. Find it and memorize it.\n\n")
    )
    fact = Piece(encode(tokenizer, PASSKEY_FACT.format(key=key)))
    after = Piece(encode(tokenizer, PASSKEY_QUESTION)).add_answer(tokenizer, key)
    document = assemble(tokenizer, haystack_tokens, length, before, [(depth, fact)], after, rng)
    return RetrievalPrompt(document.tokens, document.answers, [key], [depth], "passkey")


def needle_prompt(
    tokenizer: Tokenizer,
    haystack_tokens: Sequence[int] | None,
    length: int,
    keys: int,
    rng: np.random.Generator,
    asked: int | None = None,
) -> RetrievalPrompt:
    """``keys`` five-digit numbers under different words, at depths spread over the haystack; ``asked`` of them asked
    for.

    The questions follow each other at the end in random order, each with its right answer before the next question, so
    one pass scores them all. ``asked`` None asks for every key. Raises ValueError as ``passkey_prompt`` does, for keys
    outside 1..64, or for asked outside 1..keys.
    """
    if not 1 <= keys <= len(NEEDLE_KEYS):
        raise ValueError(f"keys must be between 1 and {len(NEEDLE_KEYS)}, got {keys}")
    asked = keys if asked is None else asked
    if not 1 <= asked <= keys:
        raise ValueError(f"asked must be between 1 and the number of keys, {keys}, got {asked}")
    words = [NEEDLE_KEYS[i] for i in rng.choice(len(NEEDLE_KEYS), keys, replace=False)]
    numbers = [str(n + 10_000) for n in rng.choice(90_000, keys, replace=False)]
    depths = [(i + rng.random()) / keys for i in range(keys)]
    before = Piece(opening(tokenizer)).add(
        encode(
            tokenizer,
            "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
            "I will quiz you about the numbers afterwards.\n\n",
        )
    )
    facts = [
        (depth, Piece(encode(tokenizer, NEEDLE_FACT.format(word=word, number=number))))
        for depth, word, number in zip(depths, words, numbers)
    ]
    order = [int(i) for i in rng.permutation(keys)[:asked]]
    after = Piece()
    for i in order:
        question = NEEDLE_QUESTION.format(word=words[i])
        after.add(encode(tokenizer, question)).add_answer(tokenizer, numbers[i]).add(encode(tokenizer, "."))
    document = assemble(tokenizer, haystack_tokens, length, before, facts, after, rng)
    return RetrievalPrompt(
        document.tokens, document.answers, [numbers[i] for i in order], [depths[i] for i in order], "needle"
    )


def mixed_prompt(
    tokenizer: Tokenizer, haystack_tokens: Sequence[int] | None, length: int, keys: int, rng: np.random.Generator
) -> RetrievalPrompt:
    """A passkey and ``keys`` needles in one haystack, all asked for at the end: one pass measures both tasks.

    Raises ValueError as ``needle_prompt`` does.
    """
    if not 1 <= keys <= len(NEEDLE_KEYS):
        raise ValueError(f"keys must be between 1 and {len(NEEDLE_KEYS)}, got {keys}")
    words = [NEEDLE_KEYS[i] for i in rng.choice(len(NEEDLE_KEYS), keys, replace=False)]
    passkey, *numbers = [str(n + 10_000) for n in rng.choice(90_000, keys + 1, replace=False)]
    depths = [float(rng.random()), *((i + float(rng.random())) / keys for i in range(keys))]
    texts = [PASSKEY_FACT.format(key=passkey)]
    texts += [NEEDLE_FACT.format(word=word, number=number) for word, number in zip(words, numbers)]
    facts = [(depth, Piece(encode(tokenizer, text))) for depth, text in zip(depths, texts)]
    before = Piece(opening(tokenizer)).add(
        encode(
            tokenizer, "A pass key and some special magic numbers are hidden in the following text. Memorize them.\n\n"
        )
    )
    after = Piece().add(encode(tokenizer, PASSKEY_QUESTION)).add_answer(tokenizer, passkey).add(encode(tokenizer, "."))
    order = [int(i) for i in rng.permutation(keys)]
    for i in order:
        after.add(encode(tokenizer, NEEDLE_QUESTION.format(word=words[i]))).add_answer(tokenizer, numbers[i])
        after.add(encode(tokenizer, "."))
    document = assemble(tokenizer, haystack_tokens, length, before, facts, after, rng)
    return RetrievalPrompt(
        document.tokens,
        document.answers,
        [passkey, *(numbers[i] for i in order)],
        [depths[0], *(depths[1 + i] for i in order)],
        "mixed",
        ("passkey", *["needle"] * keys),
    )


def score_retrieval(logits_QV: Tensor, tokens: Sequence[int], span: tuple[int, int]) -> tuple[bool, float]:
    """Score one answer of a teacher-forced pass: (every token is the most likely one, mean nats per answer token).

    ``logits_QV`` belong to the last Q positions of ``tokens`` (all of them, or a tail that holds the questions); those
    at position p predict token p + 1. Greedy decoding would give the answer exactly when the first value is True.
    Raises ValueError if the logits do not reach the position before the span, or the span lies outside the tokens.
    """
    start, end = span
    first = len(tokens) - len(logits_QV)
    if not 0 < start < end <= len(tokens):
        raise ValueError(f"the span {span} must be a range inside 1..{len(tokens)}")
    if not 0 <= first < start:
        raise ValueError(f"logits of the last {len(logits_QV)} of {len(tokens)} positions do not score the span {span}")
    logits_AV = logits_QV[start - 1 - first : end - 1 - first].float()
    target_A = torch.as_tensor(list(tokens[start:end]), device=logits_AV.device)
    exact = bool((logits_AV.argmax(-1) == target_A).all())
    return exact, float(torch.nn.functional.cross_entropy(logits_AV, target_A))

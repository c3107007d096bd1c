from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpop.tasks import (
    RetrievalPrompt,
    needle_prompt,
    passkey_prompt,
    score_retrieval,
    training_retrieval_document,
)
from kvpop.tasks.retrieval import NEEDLE_KEYS
from kvpop.tasks.training import MIN_LENGTH, TEMPLATES


class Splitting:
    """A tokenizer that splits at every word and sign; digits one by one, or in numbers that take the space before
    them."""

    def __init__(self, pattern: str, bos: int | None = None) -> None:
        self.pattern, self.bos = pattern, bos
        self.vocabulary: dict[str, int] = {}

    def encode(self, text, *, add_special_tokens=True):
        ids = [self.vocabulary.setdefault(part, len(self.vocabulary) + 10) for part in re.findall(self.pattern, text)]
        return [self.bos, *ids] if add_special_tokens and self.bos is not None else ids

    def apply_chat_template(self, conversation, *, tokenize=True):
        raise NotImplementedError

    def decode(self, tokens):
        parts = {number: part for part, number in self.vocabulary.items()}
        return "".join(parts.get(token, "") for token in tokens)


TOKENIZERS = {
    "single digits, space apart": lambda: Splitting(r"\d| ?[A-Za-z]+|\s|[^\w\s]|_"),
    "numbers merged with the space": lambda: Splitting(r" ?\w+|\s+|[^\w\s]", bos=1),
}
tokenizers = pytest.mark.parametrize("tokenizer", [make() for make in TOKENIZERS.values()], ids=list(TOKENIZERS))
HAYSTACK = [9] * 3000


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def check(prompt: RetrievalPrompt, tokenizer: Splitting, length: int) -> None:
    assert prompt.length == len(prompt.tokens) == length
    assert len(prompt.answers) == len(prompt.answer_texts) == len(prompt.depths)
    assert [tokenizer.decode(prompt.tokens[a:b]).lstrip() for a, b in prompt.answers] == prompt.answer_texts
    assert prompt.answers == sorted(prompt.answers)
    assert tokenizer.bos in (None, prompt.tokens[0])


@tokenizers
@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("haystack", [HAYSTACK, None], ids=["text", "filler"])
def test_passkey_stands_at_its_depth(tokenizer, depth, haystack):
    prompt = passkey_prompt(tokenizer, haystack, 600, depth, rng())
    check(prompt, tokenizer, 600)
    key = prompt.answer_texts[0]
    assert tokenizer.decode(prompt.tokens).count(key) == 3
    assert prompt.answers[0][1] == 600
    assert prompt.depth == depth
    assert prompt.task == "passkey"
    if haystack is not None:
        fact = prompt.tokens.index(tokenizer.encode(" " + key, add_special_tokens=False)[-1])
        assert prompt.tokens[:fact].count(9) == round(depth * prompt.tokens.count(9))


@tokenizers
@given(keys=st.integers(1, 8), seed=st.integers(0, 20), data=st.data())
def test_needles_are_distinct_and_stated_before_they_are_asked(tokenizer, keys, seed, data):
    asked = data.draw(st.none() | st.integers(1, keys))
    prompt = needle_prompt(tokenizer, HAYSTACK, 900, keys, rng(seed), asked)
    check(prompt, tokenizer, 900)
    assert len(prompt.answers) == (keys if asked is None else asked)
    text = tokenizer.decode(prompt.tokens)
    stated = re.findall(r"number for (\w+) is: (\d{5})\.", text)
    facts, answers = stated[:keys], stated[keys:]
    assert len({word for word, _ in facts}) == len({number for _, number in facts}) == keys
    assert [number for _, number in answers] == prompt.answer_texts
    assert set(answers) <= set(facts)
    assert all(0 <= depth <= 1 for depth in prompt.depths)


@tokenizers
@given(seed=st.integers(0, 40), length=st.sampled_from([MIN_LENGTH, 700, 2500]))
def test_training_documents_ask_much_later(tokenizer, seed, length):
    document = training_retrieval_document(tokenizer, HAYSTACK, length, rng(seed))
    check(document, tokenizer, length)
    for (start, _), answer, depth in zip(document.answers, document.answer_texts, document.depths):
        assert depth <= 0.5
        assert tokenizer.decode(document.tokens[: length // 2 + 150]).count(answer) >= 1
        assert start > 0.5 * length
    facts = max(2, min(14, length // 256))
    assert len(document.answers) == max(1, round(0.6 * facts))


def test_training_words_are_not_those_of_the_tests():
    words = {word for template in TEMPLATES for word in re.findall(r"\w+", template.fact + template.question)}
    assert not words & {*NEEDLE_KEYS, "pass", "magic", "special", "hidden"}


@tokenizers
def test_prompts_repeat_with_the_generator(tokenizer):
    for seed in range(2):
        first, again, other = (
            needle_prompt(tokenizer, HAYSTACK, 500, 3, rng(s)).tokens for s in (seed, seed, seed + 1)
        )
        assert first == again != other


def test_prompts_name_what_is_wrong():
    tokenizer = Splitting(r"\w+|\W")
    with pytest.raises(ValueError, match=r"depth must lie in \[0, 1\], got 1.5"):
        passkey_prompt(tokenizer, None, 500, 1.5, rng())
    with pytest.raises(ValueError, match=r"length must be above the \d+ tokens of facts and questions, got 20"):
        passkey_prompt(tokenizer, None, 20, 0.5, rng())
    with pytest.raises(ValueError, match=r"the haystack has 10 tokens, \d+ are needed"):
        passkey_prompt(tokenizer, HAYSTACK[:10], 500, 0.5, rng())
    with pytest.raises(ValueError, match="keys must be between 1 and 64, got 65"):
        needle_prompt(tokenizer, None, 5000, 65, rng())
    with pytest.raises(ValueError, match="number of keys, 2, got 3"):
        needle_prompt(tokenizer, None, 500, 2, rng(), asked=3)
    with pytest.raises(ValueError, match="at least 320 tokens, got 100"):
        training_retrieval_document(tokenizer, None, 100, rng())


def test_score_reads_the_logits_before_each_answer_token():
    tokens, vocabulary, high = [3, 1, 4, 1, 5], 8, 2.0
    logits = torch.zeros(len(tokens), vocabulary)
    logits[1, 4] = logits[2, 1] = high  # right predictions of tokens 2 and 3
    nll = math.log(math.exp(high) + vocabulary - 1) - high
    for tail in (logits, logits[1:]):
        exact, measured = score_retrieval(tail, tokens, (2, 4))
        assert exact
        assert measured == pytest.approx(nll)
    exact, measured = score_retrieval(logits, tokens, (2, 5))
    assert not exact
    assert measured == pytest.approx((2 * nll + math.log(vocabulary)) / 3)


def test_score_names_what_is_wrong():
    logits = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"last 2 of 5 positions do not score the span \(2, 4\)"):
        score_retrieval(logits, [0] * 5, (2, 4))
    with pytest.raises(ValueError, match=r"\(0, 2\) must be a range inside 1..5"):
        score_retrieval(torch.zeros(5, 8), [0] * 5, (0, 2))

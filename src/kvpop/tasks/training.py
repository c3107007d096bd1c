"""Retrieval documents for the training mix: facts stated early and asked for much later.

Nothing in ordinary text asks for a detail thousands of tokens back, so a scorer trained on it learns to give such
details up. Templates, words and answer formats are other than those of the tests in ``retrieval``: what is measured
there is not trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvpop.data import Tokenizer
from kvpop.tasks.haystack import Piece, RetrievalPrompt, assemble, encode, opening

TOKENS_PER_FACT = 256
"""A document states one fact per this many tokens, between MIN_FACTS and MAX_FACTS."""
MIN_FACTS, MAX_FACTS = 2, 14
MIN_LENGTH = 320
DISTRACTORS = 0.4
"""Share of the facts that nobody asks for."""
LATEST_FACT, EARLIEST_QUESTION = 0.5, 0.65
"""Facts stand in the first half of the haystack; from .65 of it on they are asked for."""

# fmt: off
NAMES = (
    "Maria", "Ahmed", "Ingrid", "Tomas", "Yuki", "Chidi", "Elena", "Farid", "Grace", "Henrik", "Isla", "Jorge",
    "Kavya", "Liam", "Mei", "Nadia", "Oscar", "Priya", "Quentin", "Rosa", "Stefan", "Tara", "Umar", "Vera",
)
CITIES = (
    "Lisbon", "Oslo", "Nairobi", "Kyoto", "Lima", "Prague", "Cairo", "Quebec", "Mumbai", "Dublin", "Hanoi",
    "Naples",
)
# fmt: on
OBJECTS = ("passport", "scarf", "notebook", "umbrella", "camera", "wallet", "flute", "map", "lantern", "compass")
COLOURS = ("red", "blue", "green", "yellow", "purple", "brown", "black", "white", "pink", "grey", "turquoise", "golden")
LETTERS = "BCDFGHJKLMNPQRSTVWXZ"


@dataclass(frozen=True)
class Template:
    """``fact`` and ``question`` with the fields {key} and {answer}; the answer follows the question, then
    ``ending``."""

    fact: str
    question: str
    ending: str
    key: Callable[[np.random.Generator], str]
    answer: Callable[[np.random.Generator], str]


def _one_of(words: Sequence[str]) -> Callable[[np.random.Generator], str]:
    return lambda rng: words[int(rng.integers(len(words)))]


def _number(low: int, high: int) -> Callable[[np.random.Generator], str]:
    return lambda rng: str(rng.integers(low, high))


def _letters(count: int) -> Callable[[np.random.Generator], str]:
    return lambda rng: "".join(LETTERS[i] for i in rng.integers(len(LETTERS), size=count))


def _belonging(rng: np.random.Generator) -> str:
    return f"{_one_of(NAMES)(rng)}'s {_one_of(OBJECTS)(rng)}"


def _decimal(rng: np.random.Generator) -> str:
    return f"{rng.integers(1, 100)}.{rng.integers(10, 100)}"


# The question ends in the words that precede the answer in the fact: small models find facts by such overlap.
TEMPLATES = (
    Template(
        "Note: the locker of {key} has the label {answer}, on the left.",
        "Which locker is it? The locker of {key} has the label",
        ", as noted.",
        _one_of(NAMES),
        _number(100, 1000),
    ),
    Template(
        "({key} lies in the {answer} box.)",
        "Where should we look? {key} lies in the",
        " box.",
        _belonging,
        _one_of(COLOURS),
    ),
    Template(
        "Room {key} opens with the letters {answer}.",
        "Question: how does one get in?\nAnswer: Room {key} opens with the letters",
        "",
        _number(10, 400),
        _letters(4),
    ),
    Template(
        "Reminder: this spring {key} moved to {answer} with the family.",
        "Who lives where now? This spring {key} moved to",
        ", as mentioned above.",
        _one_of(NAMES),
        _one_of(CITIES),
    ),
    Template(
        "Let c_{key} = {answer} be one of the constants.",
        "Recall the constants from the beginning: c_{key} =",
        " (see above).",
        _number(1, 100),
        _decimal,
    ),
    Template(
        "Phone list: {key}, extension {answer}.",
        "To make the call, look at the phone list: {key}, extension",
        "",
        _one_of(NAMES),
        _number(1000, 10_000),
    ),
    Template(
        "For {key} we paid {answer} euros in cash.",
        "Back to the bill: for {key} we paid",
        " euros.",
        _belonging,
        _number(11, 999),
    ),
)


def training_retrieval_document(
    tokenizer: Tokenizer, haystack_tokens: Sequence[int] | None, length: int, rng: np.random.Generator
) -> RetrievalPrompt:
    """A document of exactly ``length`` tokens with several facts, most of them asked for and answered much later.

    Facts stand at random depths in the first half of the haystack, questions after .65 of it, one by one with text
    between them; the others are distractors. ``answers`` are in order of appearance. ``haystack_tokens`` None stands
    for filler.

    Raises ValueError if length < 320 or the haystack is shorter than needed.
    """
    if length < MIN_LENGTH:
        raise ValueError(f"a training document must have at least {MIN_LENGTH} tokens, got {length}")
    facts = _distinct_facts(min(MAX_FACTS, max(MIN_FACTS, length // TOKENS_PER_FACT)), rng)
    fact_depths = np.sort(rng.uniform(0, LATEST_FACT, len(facts)))
    asked = rng.permutation(len(facts))[: max(1, round((1 - DISTRACTORS) * len(facts)))]
    question_depths = np.sort(rng.uniform(EARLIEST_QUESTION, 1, len(asked)))
    placed = [
        (float(depth), Piece(encode(tokenizer, f"\n\n{template.fact.format(key=key, answer=answer)}\n\n")))
        for depth, (template, key, answer) in zip(fact_depths, facts)
    ]
    for depth, i in zip(question_depths, asked):
        template, key, answer = facts[i]
        question = Piece(encode(tokenizer, "\n\n" + template.question.format(key=key)))
        question.add_answer(tokenizer, answer).add(encode(tokenizer, template.ending + "\n\n"))
        placed.append((float(depth), question))
    document = assemble(tokenizer, haystack_tokens, length, Piece(opening(tokenizer)), placed, Piece(), rng)
    return RetrievalPrompt(
        document.tokens,
        document.answers,
        [facts[i][2] for i in asked],
        [float(fact_depths[i]) for i in asked],
        "training",
    )


def _distinct_facts(count: int, rng: np.random.Generator) -> list[tuple[Template, str, str]]:
    """(template, key, answer) triples; no template asks twice for one key or has one answer twice, so none is
    ambiguous."""
    facts: list[tuple[Template, str, str]] = []
    used: set[tuple[Template, str]] = set()
    order = rng.permutation(len(TEMPLATES))
    while len(facts) < count:
        template = TEMPLATES[order[len(facts) % len(TEMPLATES)]]
        key, answer = template.key(rng), template.answer(rng)
        if not {(template, key), (template, answer)} & used:
            used |= {(template, key), (template, answer)}
            facts.append((template, key, answer))
    return facts

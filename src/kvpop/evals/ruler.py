"""Retrieval from long text in the manner of RULER, generated: the prompt has an exact length, the model writes the answer.

The items are made, not read: they depend on the name of the task and the tokenizer alone. Two things are not RULER's own: the
haystack (sentences about nothing, or a text of yours) and the words.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Literal

import numpy as np

from kvpop.evals.base import Decoding, Grade, Item, Message, Task
from kvpop.evals.grading.text import final_part

Kind = Literal["niah-single", "niah-multi-key", "niah-multi-value", "niah-multi-query", "passkey"]
KINDS: tuple[Kind, ...] = ("niah-single", "niah-multi-key", "niah-multi-value", "niah-multi-query", "passkey")
NEEDLES = 4
"""Keys of the multi-key and multi-query tasks, values of the multi-value task."""
ITEMS = 100
LONGEST = 1 << 24
MARK = "(the text)"

BEFORE = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about the numbers afterwards.\n\n"
)
BEFORE_PASSKEY = "There is a pass key hidden inside the following text. Find it and memorize it.\n\n"


class Ruler(Task):
    """``kind``: "passkey" (a number of five digits), "niah-single" (one under a word), "niah-multi-key" (four under different
    words, one is asked for), "niah-multi-value" (four under one word), "niah-multi-query" (four words, all asked for).

    ``length``: tokens of the prompt, the model's chat template included. Facts stand at depths spread evenly over the items.
    The score is the share of the numbers asked for that the answer contains, as in RULER: naming others as well costs nothing
    and is noted.
    """

    citation = "Hsieh et al., RULER: What's the Real Context Size of Your Long-Context Language Models?, 2024; arXiv:2404.06654"
    decoding = Decoding(temperature=0.0, top_p=1.0, max_new_tokens=128, rollouts=1)
    source = None

    def __init__(self, kind: Kind, length: int, size: int = ITEMS) -> None:
        if kind not in KINDS:
            raise ValueError(f"there is no task {kind!r}; there are: {', '.join(KINDS)}")
        if not 1 <= length <= LONGEST:
            raise ValueError(f"the length must be between 1 and {LONGEST} tokens, got {length}")
        if size < 1:
            raise ValueError(f"the number of items must be at least 1, got {size}")
        self.kind, self.length, self.count = kind, length, size
        self.size = size
        self.name = f"passkey:{length}" if kind == "passkey" else f"ruler:{kind}:{length}"
        self.title = f"{'Passkey' if kind == 'passkey' else 'RULER ' + kind}, {length} tokens"

    def items(self, tokenizer: Any, file: str | None = None) -> list[Item]:
        """``file``: a .txt or .md to hide the facts in; sentences about nothing without it.

        Raises ValueError if the length has no room for facts and question, or the text is too short.
        """
        from kvpop.tasks.haystack import encode

        hay = None
        if file is not None:
            from kvpop.data.sources import texts_from

            hay = [token for text in texts_from(file) for token in encode(tokenizer, text)]
        return [self._item(tokenizer, hay, number) for number in range(self.count)]

    def _item(self, tokenizer: Any, hay: list[int] | None, number: int) -> Item:
        from kvpop.tasks.haystack import Piece, assemble, encode
        from kvpop.tasks.retrieval import NEEDLE_FACT, NEEDLE_KEYS, PASSKEY_FACT

        seed = hashlib.sha256(f"{self.name} {number}".encode()).digest()[:8]
        rng = np.random.default_rng(int.from_bytes(seed))
        count = 1 if self.kind in ("passkey", "niah-single") else NEEDLES
        words = [NEEDLE_KEYS[i] for i in rng.choice(len(NEEDLE_KEYS), count, replace=False)]
        numbers = [str(n + 10_000) for n in rng.choice(90_000, count, replace=False)]
        # The first fact's depth walks over the haystack, the others are spread evenly from there, around its end.
        start = (number + 0.5) / self.count
        depths = [(start + i / count) % 1.0 for i in range(count)]
        if self.kind == "niah-multi-value":
            words = words[:1] * count
        if self.kind == "passkey":
            texts = [PASSKEY_FACT.format(key=numbers[0])]
        else:
            texts = [NEEDLE_FACT.format(word=word, number=value) for word, value in zip(words, numbers)]
        asked = count if self.kind in ("niah-multi-value", "niah-multi-query") else 1
        chat, around = _around(tokenizer)
        before = Piece(list(around[0])).add(encode(tokenizer, BEFORE_PASSKEY if self.kind == "passkey" else BEFORE))
        after = Piece(encode(tokenizer, self._question(words[:asked], chat))).add(around[1])
        facts = [(depth, Piece(encode(tokenizer, text))) for depth, text in zip(depths, texts)]
        prompt = assemble(tokenizer, hay, self.length, before, facts, after, rng).tokens
        fields = {
            "row": number,
            "length": self.length,
            "kind": self.kind,
            "depth": round(float(np.mean(depths[:asked])), 4),
        }
        return Item(f"{self.name}/{number}", prompt, {"numbers": numbers[:asked], "others": numbers[asked:]}, fields)

    def _question(self, words: list[str], chat: bool) -> str:
        """The question; without a chat template, also how the answer begins."""
        if self.kind == "passkey":
            return "\n\nWhat is the pass key?" + ("" if chat else " The pass key is")
        if self.kind == "niah-multi-value":
            name, begin = (
                f"all the special magic numbers for {words[0]}",
                f"The special magic numbers for {words[0]} are",
            )
        elif len(words) > 1:
            listed = f"{', '.join(words[:-1])} and {words[-1]}"
            name, begin = f"the special magic numbers for {listed}", f"The special magic numbers for {listed} are"
        else:
            name, begin = f"the special magic number for {words[0]}", f"The special magic number for {words[0]} is"
        verb = "is" if begin.endswith(" is") else "are"
        return f"\n\nWhat {verb} {name}?" + ("" if chat else f" {begin}:")

    def grade(self, item: Item, text: str) -> Grade:
        stated = re.findall(r"(?<![\d.])\d{5}(?![\d]|\.\d)", _joined(final_part(text)), re.A)
        if not stated:
            return Grade(0.0, "no answer", note="no number of five digits")
        asked, others = item.answer["numbers"], item.answer["others"]
        share = sum(number in stated for number in asked) / len(asked)
        named = sorted(set(stated) & set(others))
        note = f"{share * len(asked):.0f} of {len(asked)} numbers" + (f"; also {', '.join(named)}" if named else "")
        return Grade(share, "right" if share == 1 else "wrong", ", ".join(dict.fromkeys(stated[:20])), note)


def _joined(text: str) -> str:
    """Numbers written with a comma between thousands are the same numbers."""
    return re.sub(r"(?<![\d,])(\d{2}),(\d{3})(?![\d,])", r"\1\2", text, flags=re.A)


def _around(tokenizer: Any) -> tuple[bool, tuple[list[int], list[int]]]:
    """Whether there is a chat template, and the ids before and after a user's text."""
    from kvpop.tasks.haystack import encode, opening

    if not getattr(tokenizer, "chat_template", None):
        return False, (opening(tokenizer), [])
    message: Message = {"role": "user", "content": MARK}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, found, after = text.partition(MARK)
    if not found:
        raise ValueError(f"the chat template leaves out the user's text, it gives {text[:200]!r}")
    return True, (encode(tokenizer, before), encode(tokenizer, after))


def named(rest: str) -> Ruler:
    """The task of "niah-single:4096", or of "passkey:4096"."""
    kind, _, length = rest.rpartition(":")
    if kind not in KINDS or not length.isdecimal():
        raise ValueError(f"such a task is written ruler:KIND:LENGTH with KIND one of {', '.join(KINDS)}, got {rest!r}")
    return Ruler(kind, int(length))  # type: ignore[arg-type]


def passkey(rest: str) -> Ruler:
    """The task of "4096"."""
    if not rest.isdecimal():
        raise ValueError(f"such a task is written passkey:LENGTH, got {rest!r}")
    return Ruler("passkey", int(rest))

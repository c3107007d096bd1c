"""Kinds of tokens, told by their strings: a coarse, documented classifier for English mathematical text and code."""

from __future__ import annotations

import re
from collections.abc import Sequence

KINDS = {
    "special": "markers of the tokenizer and of chats: <|...|>, <s>, [BOS], ...",
    "whitespace": "only white space, and tokens that are not a whole character",
    "number": "digits, with points, commas, signs of percent or degree",
    "variable": "one letter standing alone, but for a, A and I",
    "operator": "signs of arithmetic, comparison, logic and set theory, arrows",
    "operation": "words for them: multiply, sum, equals, divisible, ...",
    "discourse": "words that order an argument: thus, since, first, suppose, wait, ...",
    "name": "a capital within a sentence",
    "function word": "articles, pronouns, prepositions, auxiliaries, conjunctions that are not discourse",
    "word": "any other word, or the first piece of one",
    "piece": "letters that go on a word of the token before",
    "bracket": "brackets, quotation marks, and code punctuation: ( ) [ ] { } $ # \\ _ ` ; ...",
    "punctuation": ". , : ! ? and dashes between words",
    "other": "everything else",
}
"""What each kind is; the order is that of figures. The first rule that fits decides, see ``kinds_of``."""

_SPECIAL = re.compile(r"<[|｜].*[|｜]>|</?(s|unk|pad|bos|eos|mask|think|start_of_turn|end_of_turn)>|\[(PAD|BOS|EOS|UNK|CLS|SEP|MASK)\]")  # fmt: skip # noqa: E501
_NUMBER = re.compile(r"[.,]?\d[\d.,]*[%°]?")
_OPERATOR = re.compile(r"[-+*/^=<>±×÷·∗√∑∏∫∂∇≤≥≠≈≡∼~∈∉⊂⊆∪∩∧∨¬→⇒⇔↔←∞|&!%−]+")
_BRACKET = re.compile(r"[()\[\]{}⟨⟩⌊⌋⌈⌉\"'`“”‘’$#\\_;@:.,=<>+*/|&!?^~-]+")
_PUNCTUATION = re.compile(r"[.,:!?…–—]+")
_WORD = re.compile(r"[^\W\d_]+(['’][^\W\d_]*)?|['’][^\W\d_]+")
_END = re.compile(r"[.!?:\n]\s*$")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DISCOURSE = _words(
    "thus therefore hence so because since then however but although though while whereas moreover furthermore also "
    "first firstly second secondly third thirdly next finally lastly now wait hmm let suppose assume assuming given consider "
    "note notice recall observe indeed instead otherwise alternatively actually similarly likewise conversely if unless "
    "implies means follows conclude conclusion therefor step case check verify okay ok alright solution proof answer"
)
OPERATION = _words(
    "add adds added adding addition plus sum sums subtract subtracts subtracted subtracting subtraction minus difference "
    "multiply multiplies multiplied multiplying multiplication times product divide divides divided dividing division "
    "divisible quotient remainder ratio fraction power powers square squares squared cube cubed root roots factor factors "
    "factored factoring factorial equal equals equation equality inequality less greater more most least modulo mod "
    "derivative integral limit log logarithm sqrt frac cdot leq geq neq equiv pmod sin cos tan max min gcd lcm"
)
FUNCTION = _words(
    "a an the this that these those it its he she they them their his her we us our you your i my me who whom whose which "
    "what where when why how of in on at by for from to with without into onto over under between among through during "
    "about against above below up down out off and or nor not no yes is are was were be been being am do does did doing have "
    "has had having can could may might must shall should will would as than there here all any each every both either "
    "neither some such only own same too very just one"
)


def kinds_of(strings: Sequence[str]) -> list[str]:
    """The kind of each token of a text, by its own string and what stands before it; one of ``KINDS``.

    White space around a token does not count, nor does case but for names. A run of letters right behind a letter, without a
    space, is a piece. A capital is a name unless it begins the text, a line, or a sentence (or follows a colon).
    """
    found, before = [], ""
    for string in strings:
        found.append(_kind(string, before))
        before = (before + string)[-8:]
    return found


def _kind(string: str, before: str) -> str:
    core, lower = string.strip(), string.strip().lower()
    joined = bool(before) and before[-1].isalpha() and string[:1].isalpha()
    if not core:
        return "whitespace"
    if _SPECIAL.fullmatch(core):
        return "special"
    if _NUMBER.fullmatch(core):
        return "number"
    if _WORD.fullmatch(core):
        if joined or core[0] in "'’":
            return "piece"
        if len(core) == 1 and core not in ("a", "A", "I"):
            return "variable"
        for kind, words in (("discourse", DISCOURSE), ("operation", OPERATION), ("function word", FUNCTION)):
            if lower in words:
                return kind
        starts = not before.strip() or _END.search(before)
        return "name" if core[0].isupper() and not starts else "word"
    for kind, pattern in (("punctuation", _PUNCTUATION), ("operator", _OPERATOR), ("bracket", _BRACKET)):
        if pattern.fullmatch(core):
            return kind
    return "other"

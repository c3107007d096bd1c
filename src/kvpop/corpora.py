"""Long mathematical text with real reuse: many attempted solutions of the same competition problem in one document.

The text comes from the package ``champ-dataset`` (CHAMP, MIT licence): 270 problems, each attempted 72 times by
language models. One document is a problem statement followed by its attempts, so a reader of the later ones profits
from the earlier ones thousands of tokens before. Attempts that mostly repeat kept ones are left out: copying is not
what is to be measured.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

SHINGLE_WORDS = 8
MIN_FRESH = 0.5

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
_WORD = re.compile(r"\w+|[^\w\s]")


class ChampDocuments(Mapping[str, str]):
    """Problem id -> document. A document is put together when it is first asked for: about 40 ms each, 10 s for all
    270."""

    def __init__(self, seed: int = 0) -> None:
        self._problems = _load_problems()
        self._seed = seed
        self._documents: dict[str, str] = {}

    def __getitem__(self, problem_id: str) -> str:
        if problem_id not in self._documents:
            self._documents[problem_id] = _document(problem_id, self._problems[problem_id], self._seed)
        return self._documents[problem_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._problems)

    def __len__(self) -> int:
        return len(self._problems)


def champ_documents(seed: int = 0) -> ChampDocuments:
    """All documents by problem id, built lazily; ``seed`` orders the attempts (and so decides which near-duplicates
    stay).

    Raises ImportError, with what to install, if ``champ-dataset`` is missing.
    """
    return ChampDocuments(seed)


def champ_splits(seed: int = 0, held_out: float = 0.15, validation: float = 0.10) -> dict[Split, list[str]]:
    """Problem ids by split: "train", "validation" (to choose hyperparameters by) and "test" (to report). Splits are by
    problem, so that no attempt at a held-out problem is ever trained on.

    Problems are ranked by a hash of the seed and their id, the same on every machine; the first ``held_out`` share is the
    test set, the last ``validation`` share the validation set. Raises ValueError unless both shares and their sum lie in
    (0, 1).
    """
    if not (held_out > 0 and validation > 0 and held_out + validation < 1):
        raise ValueError(f"held_out, validation and their sum must lie in (0, 1), got {held_out} and {validation}")
    ranked = sorted(_load_problems(), key=lambda problem_id: _digest(seed, problem_id))
    test = max(1, round(held_out * len(ranked)))
    end = len(ranked) - max(1, round(validation * len(ranked)))
    return {"train": ranked[test:end], "validation": ranked[end:], "test": ranked[:test]}


def champ_texts(split: Split, max_chars: int | None = None, seed: int = 0, held_out: float = 0.15) -> Iterator[str]:
    """Documents of one split, one problem each, in the order of ``champ_splits``; only what is consumed is built.

    Stops once ``max_chars`` characters were given in total; the last document is cut to fit. Raises ValueError for a split
    that does not exist or max_chars < 1.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    if max_chars is not None and max_chars < 1:
        raise ValueError(f"max_chars must be at least 1, got {max_chars}")
    return _texts(champ_splits(seed, held_out)[split], champ_documents(seed), max_chars)


def champ_statements(split: Split, seed: int = 0) -> Iterator[str]:
    """The statements alone of one split's problems, in the order of ``champ_splits``: prompts to solve. Raises ValueError for
    a split that does not exist."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    problems = _load_problems()
    return (problems[problem_id]["_text"].strip() for problem_id in champ_splits(seed)[split])


def _texts(problem_ids: list[str], documents: Mapping[str, str], max_chars: int | None) -> Iterator[str]:
    left = max_chars
    for problem_id in problem_ids:
        text = documents[problem_id][:left]
        yield text
        if left is not None:
            left -= len(text)
            if left <= 0:
                return


def without_near_duplicates(texts: list[str]) -> list[str]:
    """The texts, in order, of which at least half the shingles (runs of 8 words or signs) are new.

    New means: in none of the texts kept so far and not earlier in the same text, so that text caught in a loop goes
    too. Case and white space do not count, digits do. The shingles of a text that is left out do not count as seen.
    """
    seen: set[int] = set()
    kept = []
    for text in texts:
        words = _WORD.findall(text.lower())
        places = max(1, len(words) - SHINGLE_WORDS + 1)
        fresh = {hash(tuple(words[i : i + SHINGLE_WORDS])) for i in range(places)} - seen
        if words and len(fresh) >= MIN_FRESH * places:
            seen |= fresh
            kept.append(text)
    return kept


def _document(problem_id: str, problem: dict[str, Any], seed: int) -> str:
    attempts = _attempts(problem)
    random.Random(_digest(seed, problem_id)).shuffle(attempts)
    parts = [f"Problem. {problem['_text'].strip()}"]
    parts += [f"Solution {i}. {text}" for i, text in enumerate(without_near_duplicates(attempts), start=1)]
    return "\n\n".join(parts)


def _attempts(problem: dict[str, Any]) -> list[str]:
    """The solutions a model wrote. A conversation ends with: attempt, a request for a summary, the summary; what
    precedes (worked examples, explanations of concepts) is shared between problems and would leak over the split."""
    attempts = []
    for conversation in problem["conversations"].values():
        attempt = conversation["messages"][-3]
        if attempt["role"].startswith("Model.") and attempt["text"]:
            attempts.append(attempt["text"].strip())
    return attempts


def _digest(seed: int, problem_id: str) -> str:
    return hashlib.sha256(f"{seed}:{problem_id}".encode()).hexdigest()


@functools.cache
def _load_problems() -> dict[str, dict[str, Any]]:
    """The package's data file, read directly: importing the package would need more packages."""
    spec = find_spec("champ_dataset")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the corpus 'champ' needs a package: pip install --no-deps champ-dataset==1.0.0")
    path = Path(spec.submodule_search_locations[0]) / "dataset_files" / "v0.json"
    return json.loads(path.read_text(encoding="utf-8"))["problems"]

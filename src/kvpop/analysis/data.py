"""What an analysis holds, and the two files it is saved as: analysis.npz (arrays) and analysis.json (everything else)."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Shapes: L layers that a policy governs, H KV heads, S tokens of a text.

FORMAT = 1
ARRAYS, HEADER = "analysis.npz", "analysis.json"
Array = NDArray[Any]


@dataclass(frozen=True)
class Text:
    """Token ids [S], int32, and what each adds to the text: joined, the strings are the text. A character of several tokens
    belongs to the last of them; the others are empty."""

    name: str
    ids: Array
    strings: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Trace:
    """What one policy did with one text.

    expiry_LHS: int32; a head holds token t at query q if t <= q < expiry. S: still held at the end.
    recall_LH: float32, the share of the k older tokens that will receive the most attention, by its own pass, that a head
        holds at q = S - 1 - min_future (``measure.compare_recall`` before its mean over heads); NaN where k is 0 or the policy
        does not say what it attends to (TOVA).
    score_LHS: float32 raw scores in nats, NaN in layers without; None if no layer has any.
    """

    expiry_LHS: Array
    recall_LH: Array
    score_LHS: Array | None = None


@dataclass(frozen=True)
class Subject:
    """A policy as it was analysed.

    name: unique among its neighbours. policy: the name of the recipe. slots: per KV head, None if memory is not fixed.
    sinks, window: its own, or those of the analysis if it has none (TOVA).
    long_LH: int32 long-range slots of every head, -1 where nothing bounds them.
    log_gamma_LH: float32 log-decay in nats a step of ``decay_step`` tokens, NaN in layers without; None if no layer has any.
    """

    name: str
    policy: str
    slots: int | None
    sinks: int
    window: int
    long_LH: Array
    log_gamma_LH: Array | None = None
    decay_step: int = 1


@dataclass(frozen=True)
class Analysis:
    """Policies on texts, and what the dense model attends to there.

    ``layers``: the numbers of the layers that the rows of all arrays stand for; layers that keep the model's own attention
    have none. ``traces``: a list per subject, one trace a text. ``mass``: per text log mass [L, H, S] of the dense model,
    float32 nats: the mean attention that a token receives from the queries at least ``window`` tokens behind it, of the query
    head that gives most; -inf if there are none. ``window`` and ``long`` are those of the budget that was asked about.
    """

    model: str
    layers: tuple[int, ...]
    heads: int
    sinks: int
    window: int
    long: int
    min_future: int
    texts: Sequence[Text]
    subjects: Sequence[Subject]
    traces: Sequence[Sequence[Trace]]
    mass: Sequence[Array]
    versions: Mapping[str, str]

    def __post_init__(self) -> None:
        names = [subject.name for subject in self.subjects]
        if len(set(names)) < len(names):
            raise ValueError(f"two policies of an analysis share a name: {', '.join(names)}")
        if len(self.traces) != len(names) or any(len(row) != len(self.texts) for row in self.traces):
            raise ValueError(
                f"an analysis of {len(names)} policies and {len(self.texts)} texts needs as many traces, got "
                f"{[len(row) for row in self.traces]}"
            )
        if len(self.mass) != len(self.texts):
            raise ValueError(f"{len(self.texts)} texts need as many arrays of attention, got {len(self.mass)}")
        LH = (len(self.layers), self.heads)
        for t, text in enumerate(self.texts):
            if len(text.strings) != len(text):
                raise ValueError(f"text {text.name}: {len(text)} tokens have {len(text.strings)} strings")
            _check(f"the attention of text {text.name}", self.mass[t], (*LH, len(text)))
            for subject, row in zip(self.subjects, self.traces):
                what = f"{subject.name} on text {text.name}"
                _check(f"the expiry of {what}", row[t].expiry_LHS, (*LH, len(text)))
                _check(f"the recall of {what}", row[t].recall_LH, LH)
                _check(f"the scores of {what}", row[t].score_LHS, (*LH, len(text)))
        for subject in self.subjects:
            _check(f"the slots of {subject.name}", subject.long_LH, LH)
            _check(f"the decay of {subject.name}", subject.log_gamma_LH, LH)

    def subject(self, name: str) -> int:
        """The index of a policy by its name; ValueError lists the names there are."""
        names = [subject.name for subject in self.subjects]
        if name not in names:
            raise ValueError(f"no policy {name!r} in this analysis: it has {', '.join(names)}")
        return names.index(name)

    def save(self, directory: Path) -> None:
        """Write both files, each in one step; the header last."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        arrays, header = self._parts()
        temporary = directory / f".{ARRAYS}.tmp"
        with temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, directory / ARRAYS)
        temporary = directory / f".{HEADER}.tmp"
        temporary.write_text(json.dumps(header) + "\n")
        os.replace(temporary, directory / HEADER)

    @classmethod
    def load(cls, directory: Path) -> Analysis:
        """What ``save`` wrote. Raises FileNotFoundError without it, ValueError for another format and for files that do not
        fit each other."""
        directory = Path(directory)
        for name in (HEADER, ARRAYS):
            if not (directory / name).is_file():
                raise FileNotFoundError(f"{directory} holds no analysis: there is no {name}")
        try:
            header = json.loads((directory / HEADER).read_text())
            found = header.get("format")
        except (json.JSONDecodeError, AttributeError) as error:
            raise ValueError(f"{directory / HEADER} is not the header of an analysis ({error})") from error
        if found != FORMAT:
            raise ValueError(f"{directory / HEADER} has format {found!r}, this version reads {FORMAT}")
        try:
            with np.load(directory / ARRAYS, allow_pickle=False) as file:
                return cls._of_parts(dict(file.items()), header)
        except (zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"{directory / ARRAYS} is damaged: {error}") from error
        except KeyError as error:
            raise ValueError(f"the files of the analysis in {directory} do not fit each other: no {error}") from error

    def _parts(self) -> tuple[dict[str, Array], dict[str, Any]]:
        arrays: dict[str, Array] = {}
        for t, text in enumerate(self.texts):
            arrays |= {f"ids.{t}": text.ids, f"mass.{t}": self.mass[t]}
        for p, (subject, row) in enumerate(zip(self.subjects, self.traces)):
            arrays[f"long.{p}"] = subject.long_LH
            if subject.log_gamma_LH is not None:
                arrays[f"log_gamma.{p}"] = subject.log_gamma_LH
            for t, trace in enumerate(row):
                arrays |= {f"expiry.{p}.{t}": trace.expiry_LHS, f"recall.{p}.{t}": trace.recall_LH}
                if trace.score_LHS is not None:
                    arrays[f"score.{p}.{t}"] = trace.score_LHS
        plain = ("name", "policy", "slots", "sinks", "window", "decay_step")
        header = {
            "format": FORMAT,
            **{name: getattr(self, name) for name in ("model", "heads", "sinks", "window", "long", "min_future")},
            "layers": list(self.layers),
            "subjects": [{name: getattr(subject, name) for name in plain} for subject in self.subjects],
            "texts": [{"name": text.name, "strings": list(text.strings)} for text in self.texts],
            "versions": dict(self.versions),
        }
        return arrays, header

    @classmethod
    def _of_parts(cls, arrays: Mapping[str, Array], header: Mapping[str, Any]) -> Analysis:
        texts = [
            Text(text["name"], arrays[f"ids.{t}"], tuple(text["strings"])) for t, text in enumerate(header["texts"])
        ]
        subjects = [
            Subject(**facts, long_LH=arrays[f"long.{p}"], log_gamma_LH=arrays.get(f"log_gamma.{p}"))
            for p, facts in enumerate(header["subjects"])
        ]
        traces = [
            [
                Trace(arrays[f"expiry.{p}.{t}"], arrays[f"recall.{p}.{t}"], arrays.get(f"score.{p}.{t}"))
                for t in range(len(texts))
            ]
            for p in range(len(subjects))
        ]
        facts = {name: header[name] for name in ("model", "heads", "sinks", "window", "long", "min_future", "versions")}
        mass = [arrays[f"mass.{t}"] for t in range(len(texts))]
        return cls(**facts, layers=tuple(header["layers"]), texts=texts, subjects=subjects, traces=traces, mass=mass)


def _check(what: str, array: Array | None, shape: tuple[int, ...]) -> None:
    if array is not None and array.shape != shape:
        raise ValueError(f"{what} must have shape {list(shape)}, got {list(array.shape)}")

"""What policies keep: every count against a slow and obvious one, the two files, the figures, the command."""

from __future__ import annotations

import json
import math
import random
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvpop import models as base_models
from kvpop.analysis import KINDS, Analysis, kinds_of, quantities
from kvpop.analysis.data import ARRAYS, HEADER
from kvpop.analysis.figures import default_first, draw, full_from, kind_rows, kinds_age, teacher_recall
from kvpop.analysis.record import analyse, token_strings
from kvpop.attachment import attach
from kvpop.budget import Budget
from kvpop.cli import app
from kvpop.core.cutoff import expiry as cutoff_expiry
from kvpop.core.priority import static_priority
from kvpop.core.target import Target
from kvpop.measure import Entry, compare_recall
from kvpop.plots import analysis as plots
from kvpop.policies import DMS, ByLayer, Dense, Oracle, Random, Streaming, Tova
from kvpop.watch import LOG
from tests.tiny import VOCAB, expiries, tiny_model

L, H, S, SINKS, WINDOW = 2, 3, 40, 2, 5
BUDGET = Budget(2, 8, 10)


@pytest.fixture(scope="module")
def expiry() -> np.ndarray:
    """Anything goes: tokens that die in the window, at its end, later, never."""
    rng = np.random.default_rng(0)
    life = rng.integers(1, 30, size=(L, H, S))
    return np.minimum(np.where(rng.random((L, H, S)) < 0.2, S, np.arange(S) + life), S).astype(np.int32)


def heads(array: np.ndarray):
    """(layer, head, row as a list)."""
    return [(layer, h, array[layer, h].tolist()) for layer in range(array.shape[0]) for h in range(array.shape[1])]


# Counts.


@pytest.mark.parametrize("q", [0, 7, S - 1])
def test_held_and_maps_are_direct_counts(expiry, q):
    found = quantities.held(expiry, q)
    for layer, h, row in heads(expiry):
        assert found[layer, h].tolist() == [t <= q < row[t] for t in range(S)]
    map_LS = quantities.retention_map(expiry, q)
    for layer in range(L):
        for t in range(S):
            assert map_LS[layer, t] == sum(t <= q < expiry[layer, h, t] for h in range(H))


def test_the_map_is_of_the_last_query_by_default(expiry):
    assert (quantities.retention_map(expiry) == quantities.retention_map(expiry, S - 1)).all()
    for q in (-1, S):
        with pytest.raises(ValueError, match=rf"q must be in \[0, 39\], got {q}"):
            quantities.held(expiry, q)


@pytest.mark.parametrize("age", [0, 6, S - WINDOW - 1])
def test_at_age_looks_at_every_token_at_the_same_age(expiry, age):
    found = quantities.at_age(expiry, WINDOW, age)
    for layer, h, row in heads(expiry):
        expected = [row[t] > t + WINDOW + age for t in range(S) if t + WINDOW + age < S]
        assert found[layer, h].tolist() == expected
    with pytest.raises(ValueError, match=r"age must be in \[0, 34\] for 40 tokens"):
        quantities.at_age(expiry, WINDOW, S - WINDOW)


def test_recall_is_the_share_of_the_best_eligible_tokens(expiry):
    rng, q = np.random.default_rng(1), 30
    mass = rng.normal(size=expiry.shape)
    long = rng.integers(1, 9, size=(L, H))
    long[0, 0], long[1, 1] = 0, 1000
    found = quantities.recall(expiry, mass, long, SINKS, WINDOW, q)
    for layer, h, row in heads(expiry):
        eligible = [t for t in range(S) if SINKS <= t <= q - WINDOW]
        best = sorted(eligible, key=lambda t, x=mass[layer, h]: -x[t])[: long[layer, h]]
        if best:
            assert found[layer, h] == pytest.approx(sum(row[t] > q for t in best) / len(best))
        else:
            assert math.isnan(found[layer, h])
    unknown = quantities.recall(expiry, np.full(mass.shape, np.nan), long, SINKS, WINDOW, q)
    assert np.isnan(unknown).all()
    with pytest.raises(ValueError, match="at q = 6 no token has left a window of 5 behind 2 sinks"):
        quantities.recall(expiry, mass, long, SINKS, WINDOW, 6)


@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (SINKS, WINDOW)])
@pytest.mark.parametrize("start", [0, 11])
def test_mean_held_counts_tokens_at_every_query(expiry, sinks, window, start):
    found = quantities.mean_held(expiry, start, sinks, window)
    for layer, h, row in heads(expiry):
        counts = [
            sum(t <= q < row[t] and t >= sinks and (not window or t <= q - window) for t in range(S))
            for q in range(start, S)
        ]
        assert found[layer, h] == pytest.approx(sum(counts) / len(counts))


def test_concentration_adds_up_the_busiest_heads_first():
    found = quantities.concentration(np.array([[1.0, 4.0], [3.0, 0.0]]))
    assert found.tolist() == pytest.approx([0.5, 0.875, 1.0, 1.0])
    assert quantities.concentration(np.zeros((2, 2))).tolist() == [0.0] * 4


@pytest.mark.parametrize("start", [0, 12])
def test_lifetimes_count_queries_after_the_window(expiry, start):
    life, dropped = quantities.lifetimes(expiry, SINKS, WINDOW, start)
    for layer, h, row in heads(expiry):
        tokens = [t for t in range(SINKS, S) if start <= t + WINDOW < S]
        expected = [sum(t + WINDOW <= q < row[t] for q in range(S)) for t in tokens]
        assert life[layer, h].tolist() == expected
        assert dropped[layer, h].tolist() == [row[t] < S for t in tokens]
    with pytest.raises(ValueError, match="no token leaves a window of 40"):
        quantities.lifetimes(expiry, SINKS, S)


def slow_survival(life, dropped, ages):
    """By the definition: at each age, who was held until then and is seen there, and who of them is gone."""
    curve, share = [], 1.0
    for age in range(max(ages) + 1):
        risk = [d for x, d in zip(life, dropped) if (x >= age if d else x > age)]
        gone = sum(d and x == age for x, d in zip(life, dropped))
        if share > 0:
            share = share * (1 - gone / len(risk)) if risk else math.nan
        curve.append(share)
    return [curve[age] for age in ages]


@pytest.mark.parametrize("cut", [0, 12, 30])
def test_survival_is_that_of_kaplan_and_meier(cut):
    rng = np.random.default_rng(cut)
    life = rng.integers(0, 15, size=60)
    seen = rng.integers(0, cut + 1, size=60) if cut else np.full(60, 1000)
    dropped = life < seen
    life = np.minimum(life, seen)
    ages = [0, 1, 5, 9, 14, 40]
    found = quantities.survival(life, dropped, np.array(ages))
    assert found.tolist() == pytest.approx(slow_survival(life.tolist(), dropped.tolist(), ages), nan_ok=True)
    if not cut:
        assert found.tolist() == pytest.approx([(life > age).mean() for age in ages])


def test_turnover_counts_drops_from_the_long_range_slots(expiry):
    found = quantities.turnover(expiry, SINKS, WINDOW)
    for layer, h, row in heads(expiry):
        for q in range(S):
            gone = [t for t in range(SINKS, S) if t <= q - 1 - WINDOW and q - 1 < row[t] <= q]
            assert found[layer, h, q] == len(gone)


def test_a_full_ranked_head_drops_one_token_a_step():
    priority = torch.randn(1, 4, 60, generator=torch.Generator().manual_seed(0))
    found = cutoff_expiry(priority, BUDGET).numpy().clip(max=60).astype(np.int32)
    replaced = quantities.turnover(found, BUDGET.sinks, BUDGET.window)[0]
    for h in range(4):
        for q in range(BUDGET.slots, 60):
            newest_refused = found[0, h, q - BUDGET.window] == q
            assert replaced[h, q] == (0 if newest_refused else 1)
    assert quantities.mean_held(found, BUDGET.slots, BUDGET.sinks, BUDGET.window).tolist() == [[10.0] * 4]


@pytest.mark.parametrize("step", [1, 4])
def test_priorities_and_half_lives(step):
    score, log_gamma = np.random.default_rng(0).normal(size=(L, H, S)), np.full((L, H), -0.01)
    expected = static_priority(torch.tensor(score), torch.arange(S), torch.full((H,), -0.01, dtype=torch.float64), step)
    assert quantities.priority(score, log_gamma, step) == pytest.approx(expected.numpy())
    half = quantities.half_life(np.array([-0.01, 0.0, np.nan]), step)
    assert -0.01 * half[0] / step == pytest.approx(-math.log(2))
    assert half[1] == math.inf
    assert math.isnan(half[2])
    with pytest.raises(ValueError, match=r"log gamma must be at most 0, got 0\.1"):
        quantities.half_life(np.array([0.1]))


def test_kinds_are_counted_over_tokens_and_heads(expiry):
    rng, age = np.random.default_rng(2), 4
    other = np.minimum(np.arange(S) + rng.integers(1, 30, size=expiry.shape), S).astype(np.int32)
    kinds = [[rng.choice(["a", "b", "c"]) for _ in range(S)] for _ in range(2)]
    rows = quantities.kept_by_kind([expiry, other], kinds, SINKS, WINDOW, age)
    seen = [(x, kinds[i], t) for i, x in enumerate((expiry, other)) for t in range(SINKS, S - WINDOW - age)]
    kept = {
        kind: [x[a, h, t] > t + WINDOW + age for x, of, t in seen if of[t] == kind for a in range(L) for h in range(H)]
        for kind in "abc"
    }
    everything = [x for values in kept.values() for x in values]
    assert [row["kind"] for row in rows] == ["a", "b", "c"]
    for row in rows:
        values = kept[row["kind"]]
        assert row["count"] == len(values) / (L * H)
        assert row["base"] == pytest.approx(len(values) / len(everything))
        assert row["kept"] == pytest.approx(np.mean(values))
        assert row["lift"] == pytest.approx(np.mean(values) / np.mean(everything))
        assert row["low"] <= row["lift"] <= row["high"]
    (alone, *_) = quantities.kept_by_kind([expiry], kinds[:1], SINKS, WINDOW, age)
    assert alone["low"] is None
    nothing = np.broadcast_to(np.arange(S) + WINDOW, expiry.shape).astype(np.int32)
    assert {row["lift"] for row in quantities.kept_by_kind([nothing] * 2, kinds, SINKS, WINDOW, age)} == {None}
    with pytest.raises(ValueError, match="no token from position 39 on"):
        quantities.kept_by_kind([expiry], kinds[:1], 39, WINDOW, age)


@pytest.mark.parametrize(
    ("strings", "expected"),
    [
        (("The", " answer", " is", " 42", "."), "function word,discourse,function word,number,punctuation"),
        (("Thus", ",", " x", "=", "3", ".", "5"), "discourse,punctuation,variable,operator,number,punctuation,number"),
        ((" multip", "lies", " Euler", "’s"), "word,piece,name,piece"),
        (
            ("end", ".", "\n\n", "Rook", "s", " by", " Rook"),
            "word,punctuation,whitespace,word,piece,function word,name",
        ),
        (("\\", "frac", "{", "n", "}", "$$", "):"), "bracket,operation,bracket,variable,bracket,bracket,bracket"),
        (("<|im_start|>", "user", "\n", "", "漢字", "☃"), "special,word,whitespace,whitespace,word,other"),
        ((" I", " a", " I", "'m", " →", "50%"), "function word,function word,function word,piece,operator,number"),
    ],
)
def test_kinds_of_tokens(strings, expected):
    found = kinds_of(strings)
    assert found == expected.split(",")
    assert set(found) <= set(KINDS)


class Bytes:
    """A token a byte."""

    def decode(self, ids, **options):
        return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["plain", "naïve → 𝛼!", "é", "\n<b>&</b>"])
def test_the_strings_of_tokens_are_the_text(text):
    ids = list(text.encode())
    found = token_strings(Bytes(), ids)
    assert len(found) == len(ids)
    assert "".join(found) == text
    assert all(len(string) <= 1 for string in found)


def test_broken_characters_do_not_swallow_the_rest():
    found = token_strings(Bytes(), [*b"ab", *[0xF0] * 20, *b"cd"])
    assert found[:2] == ("a", "b")
    assert found[-1] == "d"
    assert "".join(found).count("\ufffd") >= 1


def test_two_logs_are_compared_where_both_have_numbers():
    a = [{"step": s, "accuracy": 0.5 + s / 100, "recall": None, "kl": 1.0} for s in range(1, 6)]
    b = [{"step": s, "accuracy": 0.5, "recall": 0.5} for s in range(2, 9)]
    found = quantities.timing(a, b)
    assert list(found) == ["accuracy"]
    assert found["accuracy"]["step"] == [2, 3, 4, 5]
    assert found["accuracy"]["difference"] == pytest.approx([0.02, 0.03, 0.04, 0.05])
    with pytest.raises(ValueError, match="have 0 steps in common"):
        quantities.timing(a[:1], b)


# The record of a model.


class Words:
    def decode(self, ids, **options):
        return "".join(f" w{i}" for i in ids)


def text(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


HEADS = ((4, 16), (10, 10))
ENTRIES = [
    Entry("dense", None, Dense()),
    Entry("streaming", 20, Streaming(BUDGET)),
    Entry("oracle", 20, Oracle(BUDGET, Target(lse="dense"), decay=-1e-3)),
    Entry("kvpop-random", 20, Random(BUDGET, heads=HEADS)),
    Entry("tova", 20, Tova(20)),
    Entry("dms", None, DMS(window=8, ratio=2, sinks=2, gate="native", offset=0.0)),
    Entry("mixed", None, ByLayer(Random(BUDGET), {0: Dense()})),
]
TEXTS = [text(80), text(90, 1)]


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def found(model) -> Analysis:
    return analyse(model, ENTRIES, TEXTS, Words(), BUDGET, model_name="tiny", min_future=20)


def test_expiries_are_those_of_the_policies(model, found):
    assert [subject.name for subject in found.subjects] == [entry.label for entry in ENTRIES[1:]]
    for entry, traces in zip(ENTRIES[1:], found.traces):
        attach(model, entry.policy)
        for ids, trace in zip(TEXTS, traces):
            _, expected = expiries(model, ids[None])
            assert (trace.expiry_LHS == np.stack([layer[0].numpy() for layer in expected])).all()
            assert trace.expiry_LHS.dtype == np.int32
    assert found.texts[0].strings[0] == f" w{TEXTS[0][0]}"
    assert found.texts[1].ids.tolist() == TEXTS[1].tolist()


def test_recall_and_held_are_those_of_measure_before_the_mean(model, found):
    ranked = [1, 2, 3, 5]
    expected = compare_recall(model, TEXTS, [ENTRIES[i] for i in ranked], BUDGET, min_future=20)
    for i, values in zip(ranked, expected):
        for t, trace in enumerate(found.traces[i - 1]):
            got = np.nanmean(trace.recall_LH, axis=1)
            assert got.tolist() == pytest.approx([layer[t] for layer in values["recall"]], abs=1e-6)
            held = quantities.mean_held(trace.expiry_LHS, BUDGET.slots).mean(1)
            assert held.tolist() == pytest.approx([layer[t] for layer in values["held"]], abs=1e-4)
    assert np.isnan(found.traces[found.subject("tova")][0].recall_LH).all()


def test_the_dense_model_asks_all_policies_the_same(found):
    teacher = teacher_recall(found)
    assert np.isfinite(teacher["tova"]).all()
    assert teacher["oracle"].mean() > teacher["streaming"].mean()
    assert (teacher["mixed"][0] == 1).all()  # its first layer drops nothing


def test_subjects_say_what_their_heads_have(found):
    by_name = {subject.name: subject for subject in found.subjects}
    assert by_name["kvpop-random"].long_LH.tolist() == [list(row) for row in HEADS]
    assert by_name["tova"].long_LH.tolist() == [[10, 10]] * 2
    assert by_name["dms"].long_LH.tolist() == [[-1, -1]] * 2
    assert by_name["mixed"].long_LH.tolist() == [[-1, -1], [10, 10]]
    assert (by_name["dms"].sinks, by_name["dms"].window, by_name["dms"].log_gamma_LH) == (2, 8, None)
    assert by_name["kvpop-random"].log_gamma_LH == pytest.approx(np.full((2, 2), -2e-3))
    assert np.isnan(by_name["mixed"].log_gamma_LH[0]).all()
    scores = {name: found.traces[found.subject(name)][0].score_LHS for name in by_name}
    assert scores["tova"] is None
    assert np.isfinite(scores["streaming"]).all()
    with pytest.raises(ValueError, match="no policy 'x' in this analysis: it has streaming, oracle"):
        found.subject("x")


def test_what_cannot_be_analysed_is_refused(model):
    with pytest.raises(ValueError, match="needs policies and texts, got 0 and 2"):
        analyse(model, ENTRIES[:1], TEXTS, Words(), BUDGET)
    with pytest.raises(
        ValueError, match="a text of 80 tokens is too short: 20 slots and 60 queries behind them need 81"
    ):
        analyse(model, ENTRIES, TEXTS, Words(), BUDGET, min_future=60)
    wide = Entry("dms", None, DMS(window=70, ratio=2, gate="native"))
    with pytest.raises(ValueError, match="70 slots and 20 queries behind them need 91"):
        analyse(model, [wide], TEXTS, Words(), BUDGET, min_future=20)
    apart = ByLayer(Random(BUDGET), {0: Random(Budget(2, 4, 14))})
    with pytest.raises(ValueError, match=r"the layers of x differ in their sinks and windows \[\(2, 4\), \(2, 8\)\]"):
        analyse(model, [Entry("x", 20, apart)], TEXTS, Words(), BUDGET, min_future=20)
    twice = [Entry("s", 20, Streaming(BUDGET)), Entry("s", 24, Streaming(Budget(2, 8, 14)))]
    names = [subject.name for subject in analyse(model, twice, TEXTS[:1], Words(), BUDGET, min_future=20).subjects]
    assert names == ["s 20", "s 24"]


# The two files.


def same(a, b) -> bool:
    return (a is None and b is None) or (a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))


def test_what_is_saved_is_loaded(found, tmp_path):
    found.save(tmp_path / "new")
    back = Analysis.load(tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [HEADER, ARRAYS]
    for name in ("model", "layers", "heads", "sinks", "window", "long", "min_future", "versions"):
        assert getattr(back, name) == getattr(found, name)
    assert [text.strings for text in back.texts] == [text.strings for text in found.texts]
    assert all(same(a, b) for a, b in zip(back.mass, found.mass))
    for a, b in zip(back.subjects, found.subjects):
        plain = {"long_LH": None, "log_gamma_LH": None}
        assert replace(a, **plain) == replace(b, **plain)
        assert same(a.long_LH, b.long_LH)
        assert same(a.log_gamma_LH, b.log_gamma_LH)
    for row_a, row_b in zip(back.traces, found.traces):
        for a, b in zip(row_a, row_b):
            assert same(a.expiry_LHS, b.expiry_LHS)
            assert same(a.recall_LH, b.recall_LH)
            assert same(a.score_LHS, b.score_LHS)


def test_files_that_do_not_fit_are_refused(found, tmp_path):
    found.save(tmp_path)
    header = json.loads((tmp_path / HEADER).read_text())
    with pytest.raises(FileNotFoundError, match=r"holds no analysis: there is no analysis\.json"):
        Analysis.load(tmp_path / "none")
    for change, message in (
        ({"format": 9}, "has format 9, this version reads 1"),
        ({"heads": 3}, r"must have shape \[2, 3, 80\], got \[2, 2, 80\]"),
        ({"texts": [*header["texts"], header["texts"][0]]}, "do not fit each other: no 'ids.2'"),
        ({"texts": [{**header["texts"][0], "strings": ["x"]}]}, "80 tokens have 1 strings"),
    ):
        (tmp_path / HEADER).write_text(json.dumps(header | change))
        with pytest.raises(ValueError, match=message):
            Analysis.load(tmp_path)
    (tmp_path / HEADER).write_text(json.dumps(header))
    np.savez(tmp_path / ARRAYS, **{"ids.0": np.array([object()])})
    with pytest.raises(ValueError, match="allow_pickle=False"):
        Analysis.load(tmp_path)
    (tmp_path / ARRAYS).write_bytes(b"PK\x03\x04 nonsense")
    with pytest.raises(ValueError, match="is damaged"):
        Analysis.load(tmp_path)


def test_names_must_differ(found):
    with pytest.raises(ValueError, match="two policies of an analysis share a name"):
        replace(found, subjects=[found.subjects[0]] * len(found.subjects))
    with pytest.raises(ValueError, match="6 policies and 2 texts needs as many traces"):
        replace(found, traces=found.traces[:-1])


# Figures.


def is_png(path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000


ODD = ("$x_1$", "\n\n", "", " ", "\\frac{", "𝛼漢", "a" * 40, "</script>", "\t", "\x00")


def test_every_figure_is_drawn(found, tmp_path):
    strings = (*ODD, *found.texts[0].strings[len(ODD) :])
    odd = replace(found, texts=[replace(found.texts[0], strings=strings), found.texts[1]])
    log = [{"step": step, "accuracy": 0.5, "kl": 1 / step} for step in range(1, 30)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a glyph that the font lacks, an empty mean
        paths = draw(odd, tmp_path, first=0, tokens=40, logs=[log, log])
    names = "retention overview lifetimes turnover kinds recall recall-dense use decay timing"
    assert [path.stem for path in paths] == names.split()
    assert all(is_png(path) for path in paths)
    with pytest.raises(ValueError, match=r"a stretch of 40 tokens must begin in \[0, 40\], got 41"):
        draw(found, tmp_path, first=41, tokens=40)


@pytest.mark.parametrize(("text", "stretch"), [(0, 5), (1, 5), (0, 1), (0, 17)])
def test_the_map_shows_where_heads_are_divided(found, text, stretch):
    S = len(found.texts[text])
    behind = S - max(subject.window for subject in found.subjects)

    def divided(first: int) -> float:
        total = 0.0
        for traces in found.traces:
            for t in range(first, first + stretch):
                holding = [bool(x[t] > S - 1) for layer in traces[text].expiry_LHS for x in layer]
                total += sum(holding) / len(holding) * (1 - sum(holding) / len(holding))
        return round(total / len(found.traces), 9)

    best = max(range(behind - stretch + 1), key=lambda first: (divided(first), first))
    assert divided(best) > 0
    assert default_first(found, text, stretch) == best
    assert default_first(found, text, behind + 1) == default_first(found, text, behind) == 0


@pytest.fixture
def drawn(monkeypatch):
    """The figures instead of files."""
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    yield figures
    for figure in figures:
        plots.plt.close(figure)


def test_the_map_shows_the_counts_and_the_tokens(found, drawn):
    name = "kvpop-random"
    counts = quantities.retention_map(found.traces[found.subject(name)][0].expiry_LHS)
    plots.retention_figure({name: counts[:, 30:40]}, ODD, found.layers, found.heads, "x.png", first=30)
    axes = drawn[0].axes[0]
    assert (np.asarray(axes.images[0].get_array()) == counts[:, 30:40]).all()
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["$x_1$", "⏎⏎", "∅", "␣", "\\frac{", "□□", "a" * 13 + "…", "</script>", "⇥", "□"]
    assert "positions 30 to 39" in axes.get_xlabel()
    with pytest.raises(ValueError, match=r"the map of kvpop-random must have shape \[2, 9\], got \[2, 10\]"):
        plots.retention_figure({name: counts[:, 30:40]}, ODD[:9], found.layers, found.heads, "x.png")


def test_the_bars_show_the_lifts(found, drawn):
    rows = kind_rows(found, kinds_age(found))
    plots.kinds_figure(rows, "x.png", kinds_age(found), list(KINDS))
    axes, kept = drawn[0].axes[0], [name for name, of in rows.items() if of[0]["lift"] is not None]
    assert "streaming" not in kept
    widths = [1 + patch.get_width() for patch in axes.patches if patch.get_height() < 0.8]
    assert widths == pytest.approx([max(row["lift"], axes.get_xlim()[0]) for name in kept for row in rows[name]])
    with pytest.raises(ValueError, match="no policy keeps a token to that age"):
        plots.kinds_figure({"streaming": rows["streaming"]}, "x.png", 10)


def test_a_policy_keeps_its_colour_where_others_have_nothing(found, drawn):
    recalls = {s.name: traces[0].recall_LH for s, traces in zip(found.subjects, found.traces)}
    plots.recall_figure(recalls, found.layers, "x.png")
    colours = {line.get_label(): line.get_color() for line in drawn[0].axes[-2].lines + drawn[0].axes[-1].lines}
    expected = plots.looks(list(recalls))
    assert "tova" not in colours
    for name in ("dms", "mixed", "oracle", "kvpop-random"):
        assert colours[name] == expected[name]["color"]
    for figure, nothing in ((plots.recall_figure, np.nan), (plots.decay_figure, np.inf)):
        with pytest.raises(ValueError, match="nothing to draw"):
            figure({"x": np.full((2, 2), nothing)}, (0, 1), "x.png")
    with pytest.raises(ValueError, match="no policy holds a long-range token"):
        plots.use_figure({"x": np.zeros((2, 2))}, {"x": np.zeros(4)}, (0, 1), "x.png")


def test_unequal_heads_bend_the_curve(drawn):
    uses = {"dms": np.array([[9.0, 1.0], [0.0, 0.0]]), "equal": np.full((2, 2), 3.0)}
    plots.use_figure(uses, {name: quantities.concentration(x) for name, x in uses.items()}, (0, 1), "x.png")
    lines = {line.get_label(): list(line.get_ydata()) for axes in drawn[0].axes for line in axes.lines}
    assert lines["dms"] == pytest.approx([0, 0.9, 1, 1, 1])
    assert lines["equal"] == pytest.approx([0, 0.25, 0.5, 0.75, 1])


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a model, its tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("analyse")
    words = ["[PAD]", "[BOS]", "[EOS]", "[UNK]"]
    words += [f"w{i}" for i in range(VOCAB - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(
        folder / "model"
    )
    tiny_model(dtype=torch.float32).save_pretrained(folder / "model")
    (folder / "text.txt").write_text(" ".join(random.Random(0).choices(words[4:], k=90)))
    return folder


def call(*words):
    return CliRunner().invoke(app, ["analyse", *map(str, words)])


def test_the_command_writes_data_figures_and_page(folder, tmp_path):
    log = tmp_path / "run" / LOG
    log.parent.mkdir()
    log.write_text("".join(json.dumps({"step": s, "accuracy": 0.5}) + "\n" for s in range(1, 9)))
    sizes = ["--budget", 20, "--sinks", 2, "--window", 8, "--min-future", 20, "--stretch", 30]
    policies = ["--policy", "oracle", "--policy", "random", "--policy", "dense"]
    result = call("--model", folder / "model", "--text", folder / "text.txt", *policies, *sizes, "--out", tmp_path / "a",
                  "--delayed", log.parent, "--immediate", log, "--json")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert [row["policy"] for row in report["policies"]] == ["oracle", "random"]
    assert report["texts"] == [90]
    assert report["policies"][0]["recall"] > report["policies"][1]["recall"]
    written = Analysis.load(tmp_path / "a")
    assert full_from(written) == 20
    assert {path.stem for path in (tmp_path / "a").glob("*.png")} >= {"retention", "recall", "kinds", "timing"}
    assert "</html>" in (tmp_path / "a" / "viewer.html").read_text()
    again = call("--saved", tmp_path / "a", "--out", tmp_path / "b")
    assert again.exit_code == 0, again.stderr
    assert "oracle" in again.stdout
    assert (tmp_path / "b" / "retention.png").is_file()
    late = call("--saved", tmp_path / "a", "--out", tmp_path / "c", "--first", 61, "--stretch", 30)
    assert (
        "--first must be at most 60, for a map of 30 tokens (--stretch) of the first text of 90, got 61" in late.stderr
    )
    assert not (tmp_path / "c").exists()


def test_where_a_map_begins_is_checked_before_the_model_is_loaded(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(base_models, "load_base", lambda *a, **k: pytest.fail("the model was loaded"))
    words = [
        "--model",
        folder / "model",
        "--text",
        folder / "text.txt",
        "--policy",
        "random",
        "--out",
        tmp_path / "out",
    ]
    result = call(*words, "--stretch", 30, "--first", 61)
    assert result.exit_code == 2
    assert (
        "--first must be at most 60, for a map of 30 tokens (--stretch) of the first text of 90, got 61"
        in result.stderr
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to analyse: give --adapter DIR or --policy NAME"),
        (["--policy", "dense"], "nothing to analyse"),
        (["--policy", "random", "--saved", "x"], "--saved x has its policies"),
        (["--delayed", "x"], "--delayed and --immediate belong together"),
        (["--saved", "nowhere"], "nowhere holds no analysis"),
        (["--policy", "random", "--out", __file__], "is a file: data and figures need a directory"),
        (
            ["--policy", "random", "--first", "913"],
            "--first must be at most 912, for a map of 112 tokens (--stretch) of a text of 1024, got 913",
        ),
        (["--policy", "random", "--tokens", "50", "--first", "1"], "--first must be at most 0, for a map of 50 tokens"),
    ],
)
def test_mistakes_are_one_line(words, message, monkeypatch):
    monkeypatch.setattr(base_models, "load_base", lambda *a, **k: pytest.fail("the model was loaded"))
    monkeypatch.setattr(base_models, "model_location", lambda *a: pytest.fail("the tokenizer was loaded"))
    result = call(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr

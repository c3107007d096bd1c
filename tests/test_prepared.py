"""Corpora packed on disk: they hold what packing in memory gives, and an interruption changes no byte."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpop.data import Corpus, PackedSequence, Prepared, Reader, SequenceStream, is_prepared, pack, prepare
from kvpop.data import prepared as module
from tests.test_data import Characters, _documents

LENGTH, POOL = 32, 400


class Tokens(Characters):
    """One token a character, of a vocabulary that fits 16 bits, or does not."""

    chat_template = None
    pad_token_id = 9

    def __init__(self, size=200):
        self.size = size

    def get_vocab(self):
        return {chr(i): i for i in range(100)} | {"last": self.size - 1}

    def encode(self, text, *, add_special_tokens=True):
        return [ord(character) % self.size for character in text]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Waiting for the disk takes longer than everything else here."""
    monkeypatch.setattr(module.os, "fsync", lambda file: None)


@pytest.fixture
def source(tmp_path):
    """300 documents of 1 to 90 tokens."""
    draw = random.Random(0)
    rows = [
        {"text": "".join(draw.choice("abcdefgh") for _ in range(draw.randint(1, 90))), "kind": draw.choice("xyz")}
        for _ in range(300)
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "texts.jsonl")


def make(corpus, directory, **settings):
    return prepare(corpus, Tokens(), directory, LENGTH, **{"pool": POOL, **settings})


def content(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def pieces_of(corpus, limit=None):
    return [piece for document in Reader(corpus, Tokens(), LENGTH, limit) for piece in document]


def rows_of(sequences):
    """Every sequence as text, document ids and positions."""
    columns = sequences.columns(range(len(sequences)))
    return [tuple(map(tuple, row)) for row in zip(*(columns[name].tolist() for name in sorted(columns)))]


def packed_rows(sequences):
    return [
        (tuple(s.document_ids.tolist()), tuple(s.tokens.tolist()), tuple(s.position_ids.tolist())) for s in sequences
    ]


# The bounded pool


@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=60), pool=st.integers(30, 200), shared=st.booleans())
def test_a_bounded_pool_keeps_every_token_once(sizes, pool, shared):
    if sum(sizes) < 30:
        return
    pieces = _documents(sizes)
    sequences = list(pack(iter(pieces), 30, pool=pool, shared=shared))
    tokens = np.concatenate([sequence.tokens[sequence.document_ids >= 0] for sequence in sequences])
    assert sorted(tokens.tolist()) == list(range(1, sum(sizes) + 1))
    everything = packed_rows(pack(pieces, 30, pool=10_000, shared=shared))
    assert everything == packed_rows(pack(pieces, 30, shared=shared))


def test_a_bounded_pool_holds_no_more_and_fills_as_well():
    sizes = np.random.default_rng(0).lognormal(4, 1.2, 4000).clip(1, 1024).astype(int).tolist()
    taken = 0

    def pieces():
        nonlocal taken
        for piece in _documents(sizes):
            taken += len(piece)
            yield piece

    given_out, fills = 0, []
    for sequence in pack(pieces(), 1024, pool=32 * 1024):
        assert taken - given_out <= 33 * 1024
        given_out += int((sequence.document_ids >= 0).sum())
        fills.append(sequence.fill)
    assert given_out == sum(sizes)
    assert np.mean(fills) > 0.98


def test_a_shared_sequence_is_one_document_in_an_order_of_its_own():
    pieces = _documents([9, 8, 7, 6, 5, 4, 3, 2, 1])
    sequences = list(pack(pieces, 20, shared=True, seed=1))
    for sequence in sequences:
        used = sequence.document_ids >= 0
        assert set(sequence.document_ids[used]) == {0}
        assert sequence.position_ids[used].tolist() == list(range(used.sum()))
        assert (sequence.document_ids[~used] == -1).all()
    assert [s.tokens.tolist() for s in sequences] != [s.tokens.tolist() for s in pack(pieces, 20)]
    assert packed_rows(sequences) == packed_rows(pack(pieces, 20, shared=True, seed=1))
    orders = {tuple(s.tokens.tolist()) for seed in range(6) for s in pack(pieces, 20, shared=True, seed=seed)}
    assert len(orders) > len(sequences)


def test_a_pool_smaller_than_a_sequence_is_refused():
    with pytest.raises(ValueError, match="at least one sequence of 8 tokens, got 7"):
        list(pack(_documents([5]), 8, pool=7))


# On disk


@pytest.mark.parametrize("packing", ["isolated", "shared"])
def test_the_sequences_are_those_of_packing_in_memory(source, tmp_path, packing):
    corpus = Corpus(source, where=(("kind", "x"),), min_tokens=5, packing=packing)
    prepared = make(corpus, tmp_path / "out", seed=3)
    pieces = pieces_of(corpus)
    # The rounds of ``pack`` are after a piece, those of ``prepare`` after a document: compare without a bound.
    whole = make(corpus, tmp_path / "whole", seed=3, pool=1 << 20)
    expected = list(pack(pieces, LENGTH, 9, shared=packing == "shared", seed=3))
    assert rows_of(whole) == packed_rows(expected)
    assert len(prepared.index["shards"]) > 3
    tokens = [token for ids, row, _ in rows_of(prepared) for token, document in zip(row, ids) if document >= 0]
    assert sorted(tokens) == sorted(np.concatenate(pieces).tolist())
    for found in (prepared, whole):
        index = found.index
        assert index["documents"]["tokens"] == len(tokens)
        assert (
            index["documents"]["kept"] + sum(index["documents"]["dropped"].values())
            == index["documents"]["seen"]
            == 300
        )
        ids = found.columns(range(len(found)))["document_ids"]
        assert index["fill"] == (ids >= 0).mean()
        assert found.longest_document == found.columns(range(len(found)))["position_ids"].max() + 1
        assert index["sequences"] == len(found)
        assert found.columns([0])["input_ids"].dtype == np.uint16


def test_a_large_vocabulary_takes_four_bytes(source, tmp_path):
    prepared = prepare(Corpus(source), Tokens(70_000), tmp_path / "out", LENGTH)
    assert prepared.columns([0])["input_ids"].dtype == np.uint32
    assert prepared.index["dtype"] == "uint32"


@pytest.mark.parametrize("tokens", [None, 4_000])
def test_killed_after_any_shard_the_bytes_are_those_of_a_straight_run(source, tmp_path, monkeypatch, tokens):
    corpus = Corpus(source, where=(("kind", "x"),), packing="shared")
    make(corpus, tmp_path / "straight", tokens=tokens)
    expected = content(tmp_path / "straight")
    shards = sum(name.startswith("shard") for name in expected)
    assert shards > 5
    replace = module._replace
    for kill_at in range(0, 3 * shards, 7):  # before the writing of shards, of held documents and of indexes
        directory = tmp_path / f"{kill_at}"
        left = [kill_at]

        def dying(path, data, left=left):
            if left[0] == 0:
                path.with_name(f".{path.name}.tmp").write_bytes(data[: len(data) // 2])
                raise KeyboardInterrupt
            left[0] -= 1
            replace(path, data)

        monkeypatch.setattr(module, "_replace", dying)
        with pytest.raises(KeyboardInterrupt):
            make(corpus, directory, tokens=tokens)
        monkeypatch.setattr(module, "_replace", replace)
        if is_prepared(directory):
            with pytest.raises(ValueError, match=r"is not finished: .* run the same prepare command to go on"):
                Prepared(directory)
        make(corpus, directory, tokens=tokens)
        found = {name: data for name, data in content(directory).items() if not name.endswith(".tmp")}
        assert found == expected


def test_what_is_in_finished_shards_is_not_tokenized_again(source, tmp_path, monkeypatch):
    class Counting(Tokens):
        calls = 0

        def encode(self, text, **options):
            Counting.calls += 1
            return super().encode(text, **options)

    def stop(record):
        if record["shards"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(Corpus(source), Counting(), tmp_path / "out", LENGTH, pool=POOL, on_progress=stop)
    seen = json.loads((tmp_path / "out" / module.INDEX).read_text())["documents"]["seen"]
    Counting.calls = 0
    prepare(Corpus(source), Counting(), tmp_path / "out", LENGTH, pool=POOL)
    assert Counting.calls == 300 - seen + 1  # and the fingerprint
    Counting.calls = 0
    prepare(Corpus(source), Counting(), tmp_path / "out", LENGTH, pool=POOL)
    assert Counting.calls == 1


def test_progress_counts_up(source, tmp_path):
    records = []
    prepared = make(Corpus(source), tmp_path / "out", on_progress=records.append)
    assert [record["shards"] for record in records] == sorted(record["shards"] for record in records)
    assert records[-1]["sequences"] == len(prepared)
    assert records[-1]["seen"] == records[-1]["kept"] == 300


def test_a_stream_reads_only_what_a_batch_needs(source, tmp_path):
    prepared = make(Corpus(source), tmp_path / "out")
    stream = SequenceStream(prepared, 4, seed=2)
    batch = stream.batch(3)
    assert batch["input_ids"].dtype == torch.int64
    every = prepared.columns(range(len(prepared)))
    names = ("input_ids", "document_ids", "position_ids")
    held = [PackedSequence(*(every[name][row].astype(np.int64) for name in names)) for row in range(len(prepared))]
    memory = SequenceStream(held, 4, seed=2)
    for name, value in memory.batch(3).items():
        assert torch.equal(batch[name], value)
    assert stream.longest_document == memory.longest_document == LENGTH
    halves = [stream.batch(3, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([half["sequence"] for half in halves]).sort().values, batch["sequence"])


def test_fingerprints_follow_the_content_and_read_no_shard(source, tmp_path, monkeypatch):
    one = SequenceStream(make(Corpus(source), tmp_path / "one"), 2)
    two = SequenceStream(make(Corpus(source), tmp_path / "two"), 2)
    shared = SequenceStream(make(Corpus(source, packing="shared"), tmp_path / "shared"), 2)
    less = SequenceStream(make(Corpus(source), tmp_path / "less", tokens=5000), 2)
    monkeypatch.setattr(module, "safe_open", lambda *a, **k: pytest.fail("a shard was read"))
    assert one.fingerprint() == two.fingerprint()
    assert len({stream.fingerprint() for stream in (one, shared, less)}) == 3


# What is refused


def test_other_settings_are_named(source, tmp_path):
    make(Corpus(source), tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"prepared with other settings: corpus .*'min_tokens': 1.*, now .*'min_tokens': 2"
    ):
        make(Corpus(source, min_tokens=2), tmp_path / "out")
    with pytest.raises(ValueError, match="other settings: wanted None, now 4000; seed 0, now 1"):
        make(Corpus(source), tmp_path / "out", tokens=4000, seed=1)
    with pytest.raises(ValueError, match="other settings: tokenizer "):
        prepare(Corpus(source), Tokens(150), tmp_path / "out", LENGTH, pool=POOL)


def test_a_mistake_before_the_first_shard_can_be_mended(source, tmp_path):
    with pytest.raises(ValueError, match=r"has the field 'knd', only \['kind', 'text'\]"):
        make(Corpus(source, where=(("knd", "x"),)), tmp_path / "out")
    assert len(make(Corpus(source, where=(("kind", "x"),)), tmp_path / "out"))


def test_a_source_that_has_changed_is_noticed(source, tmp_path):
    def stop(record):
        if record["shards"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(Corpus(source), tmp_path / "out", on_progress=stop)
    lines = Path(source).read_text().splitlines()
    for changed in (lines[1:], lines[:3]):
        Path(source).write_text("\n".join(changed))
        with pytest.raises(ValueError, match=r"has changed since its first .* rows were read"):
            make(Corpus(source), tmp_path / "out")


def test_damage_is_noticed(source, tmp_path):
    prepared = make(Corpus(source), tmp_path / "out")
    shard = tmp_path / "out" / prepared.index["shards"][2]["file"]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"{shard.name} is damaged: {len(whole) - 1} bytes instead of {len(whole)}"):
        Prepared(tmp_path / "out")
    shard.unlink()
    with pytest.raises(ValueError, match="is damaged: 0 bytes"):
        Prepared(tmp_path / "out")
    index = tmp_path / "out" / module.INDEX
    index.write_text('{"format": "kvpop-sequences 99"}')
    with pytest.raises(ValueError, match="must have the format 'kvpop-sequences 1', got 'kvpop-sequences 99'"):
        Prepared(tmp_path / "out")
    index.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Prepared(tmp_path / "out")
    index.unlink()
    with pytest.raises(FileNotFoundError, match=r"is no prepared corpus: it has no sequences\.json"):
        Prepared(tmp_path / "out")


def test_documents_that_wait_and_are_damaged_are_noticed(source, tmp_path):
    def stop(record):
        if record["shards"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(Corpus(source), tmp_path / "out", on_progress=stop)
    (held,) = (tmp_path / "out").glob("held-*")
    held.write_bytes(held.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"held-00002\.safetensors is damaged"):
        make(Corpus(source), tmp_path / "out")


def test_length_and_tokenizer_are_checked(source, tmp_path):
    prepared = make(Corpus(source), tmp_path / "out")
    prepared.check(LENGTH, Tokens())
    with pytest.raises(ValueError, match="holds sequences of 32 tokens, 64 are asked for"):
        prepared.check(64)
    with pytest.raises(ValueError, match=r"was made with the tokenizer .*, this one is .*: prepare it again"):
        prepared.check(LENGTH, Tokens(150))


def test_a_directory_with_something_else_is_left_alone(source, tmp_path):
    with pytest.raises(ValueError, match="is not empty and holds no prepared corpus"):
        make(Corpus(source), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no such file or directory: /no/such\.txt"):
        make(Corpus("/no/such.txt"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("length", "more"), [(0, {}), (32, {"tokens": 31}), (32, {"seed": -1}), (32, {"pool": 31})])
def test_sizes_out_of_range_are_refused(source, tmp_path, length, more):
    with pytest.raises(
        ValueError, match="length must be at least 1, tokens and pool at least length, seed at least 0, got"
    ):
        prepare(Corpus(source), Tokens(), tmp_path / "out", length, **more)


def test_too_little_text_is_refused_with_the_counts(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(ValueError, match=r"not enough tokens for one sequence: 3 of 32 \(1 documents seen, 1 kept\)"):
        make(Corpus(str(tmp_path / "a.txt")), tmp_path / "out")


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    from kvpop.data import tokenizer_fingerprint

    row = {"tokens": [70_000] * 40, "tokenizer": tokenizer_fingerprint(Tokens())}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match="token 70000 lies outside the tokenizer's vocabulary, at most 65535"):
        make(Corpus(str(tmp_path / "a.jsonl")), tmp_path / "out")

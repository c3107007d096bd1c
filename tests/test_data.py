from __future__ import annotations

import builtins
import hashlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpop import corpora
from kvpop.data import (
    Generated,
    InMemory,
    Joined,
    PackedSequence,
    SequenceStream,
    chunks,
    pack,
    texts_from,
    tokenize,
)

has_champ = pytest.mark.skipif(
    not corpora.find_spec("champ_dataset"), reason="needs the data of the package champ-dataset"
)


class Characters:
    """A tokenizer with one token a character; its chat template is "role: content" lines."""

    def encode(self, text, *, add_special_tokens=True):
        return [ord(character) for character in text]

    def apply_chat_template(self, conversation, *, tokenize=True):
        assert not tokenize
        return "".join(f"{message['role']}: {message['content']}\n" for message in conversation)


# Texts


def test_text_file_is_one_document(tmp_path):
    (tmp_path / "a.md").write_text("one\n\ntwo", encoding="utf-8")
    assert list(texts_from(str(tmp_path / "a.md"))) == ["one\n\ntwo"]


def test_jsonl_holds_texts_and_conversations(tmp_path):
    rows = [{"text": "plain"}, {"messages": [{"role": "user", "content": "hello"}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    assert list(texts_from(str(tmp_path / "a.jsonl"), Characters())) == ["plain", "user: hello\n"]
    with pytest.raises(ValueError, match=r"a.jsonl:2: a conversation needs a tokenizer"):
        list(texts_from(str(tmp_path / "a.jsonl")))


def test_directory_is_read_in_order_of_names(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "sub" / "c.txt").write_text("c")
    (tmp_path / "ignored.csv").write_text("x")
    assert list(texts_from(str(tmp_path))) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", " \n", "is empty"),
        ("empty.jsonl", "\n", "is empty"),
        ("bad.jsonl", '{"text": "a"}\nnot json', r"bad.jsonl:2: not a line of JSON"),
        ("list.jsonl", "[1]", "expected a JSON object, got list"),
        ("other.jsonl", '{"body": "a"}', r"neither a field 'text' nor 'messages', only \['body'\]"),
        ("table.csv", "a,b", "must end in .txt, .md, .jsonl, .parquet, got '.csv'"),
    ],
)
def test_unusable_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        list(texts_from(str(tmp_path / name)))


def test_missing_sources_are_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt"):
        texts_from("nowhere.txt")
    with pytest.raises(FileNotFoundError, match="no file ending in"):
        texts_from(str(tmp_path))
    with pytest.raises(ValueError, match="'name:split:field', got 'name:train'"):
        texts_from("name:train")
    with pytest.raises(ValueError, match="splits train, validation, test, got 'champ:dev'"):
        texts_from("champ:dev")
    real_import = builtins.__import__

    def without_datasets(name, *rest):
        if name == "datasets":
            raise ImportError(name)
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(ImportError, match=r"pip install 'kvpop\[data\]'"):
        texts_from("owner/name")


# The corpus


@has_champ
def test_champ_split_is_stable_and_disjoint():
    splits = corpora.champ_splits(seed=0)
    assert {name: len(ids) for name, ids in splits.items()} == {"train": 203, "validation": 27, "test": 40}
    assert len(set().union(*splits.values())) == 270
    # Reported numbers stand on this split: it must never change.
    digest = hashlib.sha256(" ".join(splits["test"]).encode()).hexdigest()
    assert digest[:16] == "be89483fd1d1f209"
    assert splits["test"][:2] == corpora.champ_splits(seed=0, held_out=0.01)["test"][:2]
    assert splits["test"] != corpora.champ_splits(seed=1)["test"]
    for shares in ({"held_out": 1}, {"validation": 0}, {"held_out": 0.5, "validation": 0.5}):
        with pytest.raises(ValueError, match=r"must lie in \(0, 1\), got"):
            corpora.champ_splits(**shares)


@has_champ
def test_champ_documents_are_long_and_repeat_little():
    documents = corpora.champ_documents(seed=0)
    assert len(documents) == 270
    text = documents["P_Combinatorics_1"]
    assert text.startswith("Problem. Let a string consist of digit 1, 2, 3.")
    attempts = text.split("\n\nSolution ")
    assert len(attempts) > 20
    assert text == corpora.ChampDocuments(seed=0)["P_Combinatorics_1"]
    assert text != corpora.ChampDocuments(seed=1)["P_Combinatorics_1"]


@has_champ
def test_champ_texts_stop_at_the_limit():
    texts = list(corpora.champ_texts("test", max_chars=150_000))
    assert sum(map(len, texts)) == 150_000
    assert next(texts_from("champ:test")) == texts[0]
    assert next(texts_from("champ:validation")) == next(corpora.champ_texts("validation"))
    assert len({next(texts_from(name)) for name in ("champ", "champ:validation", "champ:test")}) == 3
    with pytest.raises(ValueError, match="train, validation, test, got 'dev'"):
        corpora.champ_texts("dev")  # type: ignore[arg-type]


def test_near_duplicates_are_left_out():
    first = "We count the strings of length six that end with one of the digits and sum them up to 239."
    spaced = first.replace(" ", "\n ").upper()
    changed = first.replace("239", "240")
    other = "Another way is induction: suppose the claim holds for all numbers below n, then it holds for n as well."
    loop = "so we try the next value " * 20
    assert corpora.without_near_duplicates([first, spaced, changed, loop, other, "", "short"]) == [
        first,
        other,
        "short",
    ]


def test_missing_corpus_says_what_to_install(monkeypatch):
    monkeypatch.setattr(corpora, "find_spec", lambda name: None)
    corpora._load_problems.cache_clear()
    with pytest.raises(ImportError, match="pip install --no-deps champ-dataset"):
        corpora.champ_documents()


# Packing

lengths = st.lists(st.integers(0, 90), min_size=1, max_size=40)


def _documents(sizes: list[int]) -> list[np.ndarray]:
    """Documents in which every token is different."""
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end, dtype=np.uint32) + 1 for size, end in zip(sizes, ends)]


def test_tokenize_gives_one_array_a_text():
    arrays = list(tokenize(["ab", "c"], Characters()))
    assert [array.tolist() for array in arrays] == [[97, 98], [99]]
    assert arrays[0].dtype == np.uint32


@given(sizes=lengths, length=st.integers(1, 40))
def test_chunks_keep_every_token_in_order(sizes, length):
    documents = _documents(sizes)
    pieces = list(chunks(documents, length))
    assert np.array_equal(np.concatenate([*pieces, []]), np.concatenate(documents))
    assert all(1 <= len(piece) <= length for piece in pieces)


@given(sizes=lengths, length=st.integers(1, 64))
def test_pack_keeps_every_token_once_and_splits_nothing(sizes, length):
    pieces = list(chunks(_documents(sizes), length))
    total = sum(map(len, pieces))
    if total < length:
        with pytest.raises(ValueError, match=f"not enough tokens for one sequence: {total} of {length}"):
            list(pack(pieces, length))
        return
    sequences = list(pack(pieces, length))
    unpacked = []
    for sequence in sequences:
        ids = sequence.document_ids
        assert len(sequence.tokens) == len(ids) == len(sequence.position_ids) == length
        used = ids[ids >= 0]
        assert np.array_equal(ids, np.concatenate([used, np.full(length - len(used), -1)]))  # padding comes last
        assert np.array_equal(np.unique(used), np.arange(used[-1] + 1))  # 0, 1, 2, ...
        assert (np.diff(used) >= 0).all()
        for document in range(used[-1] + 1):
            inside = ids == document
            assert np.array_equal(sequence.position_ids[inside], np.arange(inside.sum()))
            unpacked.append(tuple(sequence.tokens[inside]))
    assert sorted(unpacked) == sorted(tuple(piece) for piece in pieces)
    # Best fit never opens a sequence while a piece fits an earlier one: two sequences always hold more than one could.
    filled = sorted((sequence.document_ids >= 0).sum() for sequence in sequences)
    assert len(filled) < 2 or filled[0] + filled[1] > length


def test_pack_fills_long_text_almost_completely():
    sizes = np.random.default_rng(0).lognormal(6.5, 1.2, 400).astype(int).tolist()
    sequences = list(pack(chunks(_documents(sizes), 2048), 2048))
    assert np.mean([sequence.fill for sequence in sequences]) > 0.99


def test_pack_names_what_does_not_fit():
    with pytest.raises(ValueError, match="a piece of 5 tokens does not fit into a sequence of 4"):
        list(pack(_documents([5]), 4))
    with pytest.raises(ValueError, match="not enough tokens for one sequence: 0 of 4"):
        list(pack([], 4))
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        list(chunks([], 0))


# Batches


def _sequences(count: int, length: int = 4) -> list[PackedSequence]:
    return [PackedSequence.from_pieces([np.full(length - 1, i)], length) for i in range(count)]


@given(count=st.integers(1, 9), batch_size=st.integers(1, 12), seed=st.integers(0, 5))
def test_every_epoch_serves_every_sequence_once(count, batch_size, seed):
    stream = SequenceStream(_sequences(count), batch_size, seed)
    served = torch.cat([stream.batch(step)["input_ids"][:, 0] for step in range(3 * count)]).tolist()
    for start in range(0, len(served) - count + 1, count):
        assert sorted(served[start : start + count]) == list(range(count))


def test_batch_depends_on_seed_and_step_only():
    sequences = _sequences(7)
    stream = SequenceStream(sequences, batch_size=3, seed=1)
    ahead = [stream.batch(step) for step in range(6)]
    resumed = SequenceStream(sequences, batch_size=3, seed=1).batch(5)
    assert set(resumed) == {"input_ids", "document_ids", "position_ids", "sequence"}
    assert resumed.pop("sequence").tolist() == [15, 16, 17]
    for name, value in resumed.items():
        assert value.dtype == torch.int64
        assert value.shape == (3, stream.length)
        assert torch.equal(value, ahead[5][name])
    assert resumed["document_ids"].tolist() == [[0, 0, 0, -1]] * 3
    assert resumed["position_ids"].tolist() == [[0, 1, 2, 0]] * 3
    other = SequenceStream(sequences, batch_size=7, seed=2).batch(0)["input_ids"]
    assert not torch.equal(other, SequenceStream(sequences, batch_size=7, seed=1).batch(0)["input_ids"])


@given(
    count=st.integers(1, 9),
    each=st.integers(1, 4),
    world=st.integers(1, 5),
    step=st.integers(0, 9),
    seed=st.integers(0, 3),
)
def test_the_ranks_together_serve_the_batch_of_one_process(count, each, world, step, seed):
    sequences = _sequences(count)
    whole = SequenceStream(sequences, each * world, seed).batch(step)
    parts = [SequenceStream(sequences, each * world, seed).batch(step, rank, world) for rank in range(world)]
    for name, value in whole.items():
        for rank, part in enumerate(parts):
            assert torch.equal(part[name], value[rank::world])
    assert whole["sequence"].tolist() == list(range(step * each * world, (step + 1) * each * world))


def test_batches_and_fingerprints_are_what_they_always_were():
    """Checkpoints name the data they were trained on."""
    rng = np.random.default_rng(5)
    sequences = list(pack([rng.integers(0, 99, n).astype(np.uint32) for n in (3, 8, 5, 2, 7, 9, 4)], 10))
    stream = SequenceStream(sequences, 3, seed=2)
    assert stream.fingerprint() == "6c1d23833c32dbb8"
    digest = hashlib.sha256()
    for step in range(5):
        for name in ("input_ids", "document_ids", "position_ids"):
            digest.update(stream.batch(step)[name].numpy().tobytes())
    assert digest.hexdigest()[:16] == "94d12be640cde647"


def test_sequences_of_several_sources_are_one_after_the_other():
    made = Generated(lambda i: [50 + i] * 4, 2, 4, key="fifties")
    stream = SequenceStream(Joined([InMemory(_sequences(3)), made]), 5)
    batch = stream.batch(0)
    assert sorted(batch["input_ids"][:, 0].tolist()) == [0, 1, 2, 50, 51]
    full = batch["input_ids"][:, 0] >= 50
    assert batch["document_ids"][full].tolist() == [[0] * 4] * 2
    assert batch["position_ids"][full].tolist() == [[0, 1, 2, 3]] * 2
    assert batch["document_ids"][~full].tolist() == [[0, 0, 0, -1]] * 3
    assert (len(stream), stream.length, stream.longest_document) == (5, 4, 4)
    other = Generated(made.make, 2, 4, key="other")
    assert SequenceStream(Joined([InMemory(_sequences(3)), other]), 5).fingerprint() != stream.fingerprint()
    with pytest.raises(ValueError, match=r"same length, got \[4, 5\] tokens"):
        Joined([InMemory(_sequences(1)), InMemory(_sequences(1, length=5))])


def test_no_more_than_the_orders_of_two_epochs_are_held():
    stream = SequenceStream(_sequences(4), 3)
    for step in range(20):
        stream.batch(step)
        assert len(stream._orders) <= 2
    assert torch.equal(stream.batch(1)["input_ids"], SequenceStream(_sequences(4), 3).batch(1)["input_ids"])


def test_stream_names_what_is_wrong():
    with pytest.raises(ValueError, match="at least 1 sequence, got 0"):
        SequenceStream([], 1)
    with pytest.raises(ValueError, match="same length, got 4 and 5 tokens"):
        SequenceStream([*_sequences(1), *_sequences(1, length=5)], 1)
    with pytest.raises(ValueError, match="batch_size must be at least 1 and seed at least 0, got 0 and 0"):
        SequenceStream(_sequences(1), 0)
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        SequenceStream(_sequences(1), 1).batch(-1)
    with pytest.raises(ValueError, match="a batch of 4 sequences cannot be shared evenly by 3 processes"):
        SequenceStream(_sequences(1), 4).batch(0, 0, 3)
    for rank, world in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=rf"rank must be in \[0, world\), got {rank} of {world}"):
            SequenceStream(_sequences(1), 4).batch(0, rank, world)

"""What sources hold, how rows become token ids, and which documents a corpus keeps."""

from __future__ import annotations

import json
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpop.data import Corpus, Reader, documents_from, nemotron_math_v2, rows_from, texts_from, tokenizer_fingerprint
from kvpop.data import sources as sources_module
from kvpop.data.corpus import PATIENCE, field_names, lookup

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


class Letters:
    """One token a character behind a BOS of 7; its template shows reasoning, tools, and roles."""

    thinks = True

    def encode(self, text, *, add_special_tokens=True):
        return [7] * add_special_tokens + [ord(character) for character in text]

    def apply_chat_template(self, conversation, *, tokenize=True, tools=None):
        assert not tokenize
        text = f"[{len(tools)} tools]" if tools else ""
        for message in conversation:
            thought = message.get("reasoning_content") if self.thinks else None
            text += f"<{message['role']}>" + (f"({thought})" if thought else "") + (message["content"] or "")
        return text


CHAT = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2", "reasoning_content": "I add."}]


def write_parquet(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(corpus, length=1000, limit=None):
    """(text of every piece, reader)."""
    reader = Reader(corpus, Characters(), length, limit)
    return ["".join(map(chr, piece)) for document in reader for piece in document], reader


class Characters(Letters):
    def encode(self, text, *, add_special_tokens=True):
        return [ord(character) for character in text]


# Parquet, directories, the hub


def test_parquet_rows_are_those_of_jsonl(tmp_path, monkeypatch):
    monkeypatch.setattr(sources_module, "PARQUET_ROWS", 2)
    rows = [{"text": f"t{i}", "metadata": {"level": i}} for i in range(5)]
    write_parquet(tmp_path / "a.parquet", rows)
    write_jsonl(tmp_path / "a.jsonl", rows)
    for name in ("a.parquet", "a.jsonl"):
        assert [row.values for row in rows_from(str(tmp_path / name))] == rows
    assert list(rows_from(str(tmp_path / "a.parquet")))[3].where.endswith("a.parquet, row 3")


def test_directories_mix_all_kinds_by_name(tmp_path):
    (tmp_path / "d").mkdir()
    write_parquet(tmp_path / "d" / "part-1.parquet", [{"text": "c"}])
    write_parquet(tmp_path / "d" / "part-0.parquet", [{"text": "b"}])
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "z.md").write_text("z")
    assert list(texts_from(str(tmp_path))) == ["a", "b", "c", "z"]


def test_parquet_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"bad\.parquet: not a parquet file"):
        list(rows_from(str(tmp_path / "bad.parquet")))
    write_parquet(tmp_path / "bad.parquet", [{"text": "a"}])
    table = parquet.read_table(tmp_path / "bad.parquet").slice(0, 0)
    parquet.write_table(table, tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=r"bad\.parquet is empty"):
        list(rows_from(str(tmp_path / "bad.parquet")))
    monkeypatch.setattr(sources_module, "find_spec", lambda name: None)
    for source in (tmp_path, tmp_path / "bad.parquet"):
        with pytest.raises(ImportError, match=r"is parquet, which needs a package: pip install 'kvpop\[data\]'"):
            rows_from(str(source))


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for ``datasets``: splits by name; what was asked for is in ``calls``."""
    splits, calls = {}, []

    def load_dataset(name, *, split, streaming):
        calls.append((name, split, streaming))
        return iter(splits[split])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return types.SimpleNamespace(splits=splits, calls=calls)


def test_hub_datasets_are_streams_of_one_split_after_the_other(hub):
    hub.splits |= {"train": [{"text": "x"}], "a": [{"body": "1"}, {"body": "2"}], "b": [{"body": "3"}]}
    assert list(texts_from("owner/name")) == ["x"]
    rows = list(rows_from("owner/name:a+b:body"))
    assert list(texts_from("owner/name:a+b:body")) == ["1", "2", "3"]
    assert [row.where for row in rows] == ["owner/name:a, row 0", "owner/name:a, row 1", "owner/name:b, row 0"]
    assert hub.calls[:3] == [("owner/name", "train", True), ("owner/name", "a", True), ("owner/name", "b", True)]


def test_the_recipe_takes_high_effort_and_whole_traces(hub):
    for i, split in enumerate(("high_part00", "high_part01", "high_part02")):
        hub.splits[split] = [
            {"messages": CHAT, "tools": [], "uuid": f"{i}"},
            {"messages": CHAT, "tools": [{"name": "python"}], "uuid": f"{i} with tools"},
            {"messages": [*CHAT, {"role": "user", "content": "x" * 50}], "tools": [], "uuid": f"{i} long"},
        ]
    corpus = nemotron_math_v2(60, packing="shared")
    assert (corpus.max_tokens, corpus.packing) == (60, "shared")
    texts, reader = read(corpus, length=60)
    assert texts == ["<user>1+1?<assistant>(I add.)2", "[1 tools]<user>1+1?<assistant>(I add.)2"] * 3
    assert str(reader.counts) == "9 documents seen, 6 kept, dropped: 3 long"
    texts, reader = read(nemotron_math_v2(60, where=(("tools", "[]"),)), length=60)
    assert texts == ["<user>1+1?<assistant>(I add.)2"] * 3
    assert nemotron_math_v2().max_tokens == 16_384


# Conversations


def test_a_template_that_drops_all_reasoning_is_an_error_and_inline_writes_it(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    blind = Characters()
    blind.thinks = False
    source = str(tmp_path / "a.jsonl")
    with pytest.raises(
        ValueError, match=r"a\.jsonl:1: the chat template leaves out every reasoning_content; use reasoning"
    ):
        list(documents_from(source, blind))
    (ids,) = documents_from(source, blind, "inline")
    assert "".join(map(chr, ids)) == "<user>1+1?<assistant><think>\nI add.\n</think>\n\n2"


def test_only_text_gets_what_the_tokenizer_puts_around_it(tmp_path):
    """A chat template writes its own BOS; a second one would be another document."""
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"messages": [{"role": "user", "content": "b"}]}])
    first, second = documents_from(str(tmp_path / "a.jsonl"), Letters())
    assert first.tolist() == [7, ord("a")]
    assert second[0] == ord("<")


# Rows that are tokens already


def test_tokens_are_taken_as_they_are_if_their_tokenizer_is_this_one(tmp_path):
    rows = [{"tokens": [3, 1, 2], "tokenizer": tokenizer_fingerprint(Letters()), "text": "not read"}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    (ids,) = documents_from(str(tmp_path / "a.jsonl"), Letters())
    assert (ids.tolist(), ids.dtype) == ([3, 1, 2], np.uint32)
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: .* by the tokenizer {rows[0]['tokenizer']}, this one is"):
        list(documents_from(str(tmp_path / "a.jsonl"), Characters()))


def test_the_fingerprint_knows_the_vocabulary_and_the_splitting():
    class Known(Letters):
        def __init__(self, **vocabulary):
            self.get_vocab = lambda: vocabulary

    prints = [tokenizer_fingerprint(t) for t in (Letters(), Characters(), Known(a=1), Known(a=2), Known(a=1, b=2))]
    assert len(set(prints)) == 5
    assert tokenizer_fingerprint(Known(b=2, a=1)) == prints[-1]


# Filters


@pytest.fixture
def levels(tmp_path):
    effort = ("high", "low", "high", "medium")
    rows = [
        {"text": letter * size, "metadata": {"effort": e, "seed": i}, "checked": i % 2 == 0, "tools": []}
        for i, (letter, size, e) in enumerate(zip("abcd", (10, 20, 30, 40), effort))
    ]
    write_jsonl(tmp_path / "a.jsonl", rows)
    return str(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("settings", "kept", "dropped"),
    [
        ({}, "abcd", {}),
        ({"where": (("metadata.effort", "high"),)}, "ac", {"where": 2}),
        ({"where": (("metadata.effort", "high"), ("metadata.seed", "2"))}, "c", {"where": 3}),
        ({"where": (("checked", "true"), ("tools", "[]"))}, "ac", {"where": 2}),
        ({"min_tokens": 20}, "bcd", {"short": 1}),
        ({"min_tokens": 20, "max_tokens": 30}, "bc", {"short": 1, "long": 1}),
        ({"where": (("metadata.effort", "high"),), "max_tokens": 10}, "a", {"where": 2, "long": 1}),
    ],
)
def test_filters_keep_what_they_say(levels, settings, kept, dropped):
    texts, reader = read(Corpus(levels, **settings))
    assert "".join(text[0] for text in texts) == kept
    assert (reader.counts.seen, reader.counts.kept) == (4, len(kept))
    assert +reader.counts.dropped == dropped
    assert reader.counts.tokens == sum(map(len, texts))


def test_long_documents_are_cut_or_dropped_and_a_limit_cuts_the_last(levels):
    texts, reader = read(Corpus(levels), length=25)
    assert [len(text) for text in texts] == [10, 20, 25, 5, 25, 15]
    texts, reader = read(Corpus(levels, overlong="drop"), length=25)
    assert [len(text) for text in texts] == [10, 20]
    assert reader.counts.dropped["overlong"] == 2
    texts, reader = read(Corpus(levels), length=25, limit=45)
    assert [len(text) for text in texts] == [10, 20, 15]
    assert (reader.counts.seen, reader.counts.tokens) == (3, 45)


def test_a_filter_on_a_field_that_no_row_has_lists_the_fields(levels, tmp_path, hub):
    with pytest.raises(
        ValueError, match=r"none of 4 rows of .*a\.jsonl has the field 'metadata\.level', only \['checked', "
    ):
        read(Corpus(levels, where=(("metadata.level", "high"), ("checked", "true"))))
    with pytest.raises(ValueError, match=r"'metadata\.effort', 'metadata\.seed', 'text', 'tools'\]"):
        read(Corpus(levels, where=(("text.inner", "x"),)))

    def endless():
        i = 0
        while True:
            i += 1
            assert i <= PATIENCE
            yield {"text": "t"}

    hub.splits["train"] = endless()
    with pytest.raises(ValueError, match=r"none of 10,000 rows of owner/name has the field 'level', only \['text'\]"):
        read(Corpus("owner/name", where=(("level", "1"),)))


def test_filters_that_leave_nothing_give_the_counts(levels):
    with pytest.raises(ValueError, match="is left: 4 documents seen, 0 kept, dropped: 2 where, 2 short"):
        read(Corpus(levels, where=(("metadata.effort", "high"),), min_tokens=99))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": ""}, "needs a source, got ''"),
        ({"where": (("a",),)}, r"a pair \(field, value\) of strings, got \('a',\)"),
        ({"where": (("a", 1),)}, r"a pair \(field, value\) of strings, got \('a', 1\)"),
        ({"min_tokens": 0}, "min_tokens must be at least 1, got 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "max_tokens must be at least min_tokens = 5, got 4"),
        ({"overlong": "keep"}, "overlong must be one of cut, drop, got 'keep'"),
        ({"packing": "loose"}, "packing must be one of isolated, shared, got 'loose'"),
        ({"reasoning": "no"}, "reasoning must be one of template, inline, got 'no'"),
    ],
)
def test_a_corpus_out_of_range_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Corpus(**{"source": "x", **settings})


names = st.text("ab", min_size=1)
leaves = st.none() | st.booleans() | st.integers() | st.text("a.")


@given(st.recursive(leaves, lambda inner: st.dictionaries(names, inner, max_size=3), max_leaves=8))
def test_every_field_that_is_listed_can_be_looked_up(values):
    row = {"x": values}
    for name in field_names(row):
        assert lookup(row, name) is not None
    assert lookup(row, "x.no.such") is None
    assert lookup(row, "y") is None

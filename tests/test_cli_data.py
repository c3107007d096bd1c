"""``kvpop prepare`` and ``kvpop rollouts`` end to end, and ``distill`` on what they write."""

from __future__ import annotations

import json
import random
import sys

import pytest
import torch

from kvpop import models as base_models
from kvpop.data import Prepared, SequenceStream
from kvpop.data import prepared as prepared_module
from kvpop.jobs import check_data, load_tokenizer, training_stream
from kvpop.rollouts import Rollouts
from tests.test_cli import call, no_model, refused  # noqa: F401
from tests.test_rollouts import tokenizer_with
from tests.tiny import tiny_model

LENGTH = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a model, its tokenizer, and documents with metadata."""
    folder = tmp_path_factory.mktemp("data")
    tiny_model(dtype=torch.float32).save_pretrained(folder / "model")
    tokenizer_with(bos_token="[BOS]").save_pretrained(folder / "model")
    draw = random.Random(0)
    rows = [
        {"text": " ".join(f"w{draw.randint(4, 60)}" for _ in range(draw.randint(50, 500))), "meta": {"kind": kind}}
        for kind in "xy" * 40
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompts.txt").write_text("w20 w21\nw22\n")
    return folder


def preparing(folder, out, *more):
    model = ["--model", folder / "model"]
    return ["prepare", "--data", folder / "texts.jsonl", *model, "--length", LENGTH, "--out", folder / out, *more]


def rolling(folder, out, *more):
    common = ["--model", folder / "model", "--device", "cpu", "--max-new-tokens", "15", "--samples", "3"]
    return ["rollouts", "--prompts", folder / "prompts.txt", "--out", folder / out, *common, *more]


@pytest.fixture(scope="module")
def ready(folder):
    result = call(*preparing(folder, "ready"))
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"prepared: {folder / 'ready'}\n"
    assert "longest document" in result.stderr
    return folder / "ready"


# prepare


def test_prepare_filters_and_reports(folder):
    words = [
        "--where",
        "meta.kind=x",
        "--min-tokens",
        "60",
        "--max-tokens",
        "450",
        "--overlong",
        "drop",
        "--packing",
        "shared",
    ]
    report = json.loads(call(*preparing(folder, "some", *words, "--tokens", "5000", "--json")).stdout)
    prepared = Prepared(folder / "some")
    assert (report["sequences"], report["length"]) == (len(prepared), LENGTH)
    assert report["documents"]["tokens"] == 5000
    assert all(report["documents"]["dropped"][reason] for reason in ("where", "long", "overlong"))
    corpus = prepared.index["corpus"]
    assert corpus["where"] == [["meta.kind", "x"]]
    assert (corpus["min_tokens"], corpus["max_tokens"], corpus["overlong"], corpus["packing"]) == (
        60,
        450,
        "drop",
        "shared",
    )


def test_prepare_goes_on_after_an_interrupt(folder, ready, monkeypatch):
    """Shards are small for once; the last one of the first run is followed by an interrupt."""
    defaults = prepared_module.prepare.__kwdefaults__
    monkeypatch.setitem(defaults, "pool", 2000)
    assert call(*preparing(folder, "straight")).exit_code == 0
    add, shards = prepared_module._add_shard, 0

    def interrupted(*args):
        nonlocal shards
        add(*args)
        shards += 1
        if shards == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepared_module, "_add_shard", interrupted)
        result = call(*preparing(folder, "broken"))
    assert result.exit_code == 130
    assert "run the same command to go on" in result.stderr.splitlines()[-1]
    with pytest.raises(ValueError, match="is not finished: 3 shards so far"):
        check_data(str(folder / "broken"), LENGTH)
    assert call(*preparing(folder, "broken")).exit_code == 0
    for path in (folder / "straight").iterdir():
        assert (folder / "broken" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--where", "kind"], "--where is written field=value, got 'kind'"),
        (["--where", "=x"], "--where is written field=value, got '=x'"),
        (["--min-tokens", "0"], "min_tokens must be at least 1, got 0"),
        (["--overlong", "keep"], "overlong must be one of cut, drop, got 'keep'"),
        (["--packing", "loose"], "packing must be one of isolated, shared, got 'loose'"),
        (["--data", "/no/such/texts"], "/no/such/texts"),
    ],
)
def test_prepare_refuses_before_anything_is_read(folder, monkeypatch, words, message):
    module = sys.modules["kvpop.cli.prepare"]
    monkeypatch.setattr(module, "load_tokenizer", lambda name: pytest.fail("the tokenizer was loaded"))
    assert message in refused(*preparing(folder, "refused", *words))
    assert not (folder / "refused").exists()


def test_prepare_names_the_corpus_of_the_paper(folder, monkeypatch):
    def rows_from(source):
        raise FileNotFoundError(f"asked for {source}")

    monkeypatch.setattr("kvpop.data.rows_from", rows_from)
    words = ["prepare", "--data", "nemotron-math-v2", "--length", "16384", "--out", folder / "paper"]
    assert "nvidia/Nemotron-Math-v2:high_part00+high_part01+high_part02:messages" in refused(*words)


# What training reads


def test_a_prepared_corpus_is_trained_on_as_it_is(folder, ready):
    tokenizer = load_tokenizer(str(folder / "model"))
    stream = training_stream(str(ready), tokenizer, LENGTH, 2, 3, tokens=1, retrieval_share=0.0)
    whole = SequenceStream(Prepared(ready), 2, 3)
    assert stream.fingerprint() == whole.fingerprint()
    mixed = training_stream(str(ready), tokenizer, LENGTH, 2, 3, tokens=1, retrieval_share=0.25)
    assert len(mixed) == len(whole) + round(len(whole) / 3)
    batches = [mixed.batch(step) for step in range(len(mixed) // 2)]
    again = training_stream(str(ready), tokenizer, LENGTH, 2, 3, tokens=1, retrieval_share=0.25)
    assert mixed.fingerprint() == again.fingerprint() != whole.fingerprint()
    for step, batch in enumerate(batches):
        assert torch.equal(again.batch(step)["input_ids"], batch["input_ids"])
    check_data(str(ready), LENGTH)
    with pytest.raises(ValueError, match="holds sequences of 400 tokens, 512 are asked for"):
        check_data(str(ready), 512)
    other = tokenizer_with()
    other.add_tokens(["w99"])
    with pytest.raises(ValueError, match="prepare it again"):
        training_stream(str(ready), other, LENGTH, 2, 3, 1, 0.0)
    with pytest.raises(FileNotFoundError, match="/no/such"):
        check_data("/no/such", LENGTH)


def test_a_corpus_with_filters_is_packed_in_memory(folder):
    from kvpop.data import Corpus

    tokenizer = load_tokenizer(str(folder / "model"))
    source = str(folder / "texts.jsonl")
    plain = training_stream(source, tokenizer, LENGTH, 1, 0, 10_000, 0.0)
    assert plain.fingerprint() == training_stream(Corpus(source), tokenizer, LENGTH, 1, 0, 10_000, 0.0).fingerprint()
    shared = training_stream(Corpus(source, packing="shared"), tokenizer, LENGTH, 1, 0, 10_000, 0.1)
    assert all(int(shared.batch(step)["document_ids"].max()) == 0 for step in range(len(shared)))
    with pytest.raises(ValueError, match="has the field 'kind'"):
        training_stream(Corpus(source, where=(("kind", "x"),)), tokenizer, LENGTH, 1, 0, 10_000, 0.0)


def test_the_embedded_tokenizer_comes_without_the_model(folder, monkeypatch):
    monkeypatch.setattr(base_models, "embedded_directory", lambda: folder / "model")
    assert load_tokenizer("smollm2").get_vocab() == load_tokenizer(str(folder / "model")).get_vocab()


# rollouts


def test_rollouts_are_written_gone_on_with_and_prepared(folder, monkeypatch):
    run = Rollouts.run

    def interrupted(self, *args):
        for count, row in enumerate(run(self, *args)):
            if count == 2:
                raise KeyboardInterrupt
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(Rollouts, "run", interrupted)
        result = call(*rolling(folder, "traces.jsonl"))
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "interrupted at trace 2 of 6; run the same command to go on"
    result = call(*rolling(folder, "traces.jsonl"))
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"traces: {folder / 'traces.jsonl'}\n"
    assert "6 traces of 2 prompts, 3 of them already there" in result.stderr
    report = json.loads(call(*rolling(folder, "straight.jsonl", "--json")).stdout)
    assert (report["new"], report["total"], sum(report["finished"].values())) == (6, 6, 6)
    traces = [sorted(map(json.loads, (folder / f"{n}.jsonl").open()), key=str) for n in ("traces", "straight")]
    assert traces[0] == traces[1]
    again = json.loads(call(*rolling(folder, "traces.jsonl", "--json")).stdout)
    assert (again["new"], again["total"]) == (0, 6)
    assert "made with other settings: policy 'dense', now 'random'" in refused(
        *rolling(folder, "traces.jsonl", "--policy", "random", "--budget", "24", "--window", "8")
    )
    words = ["prepare", "--data", folder / "traces.jsonl", "--model", folder / "model", "--length", "20", "--out"]
    report = json.loads(call(*words, folder / "prepared", "--json").stdout)
    assert report["documents"]["tokens"] == sum(len(row["tokens"]) for row in traces[0])


def test_rollouts_ask_themselves_by_default(folder):
    words = ["rollouts", "--model", folder / "model", "--device", "cpu", "--max-new-tokens", "5", "--samples", "2"]
    report = json.loads(call(*words, "--out", folder / "free.jsonl", "--json").stdout)
    assert (report["total"], report["new"]) == (2, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "traces.txt"], "ends in .jsonl, got traces.txt"),
        (["--prompts", "/no/such/prompts"], "no such file of prompts: /no/such/prompts"),
        (["--prompts", "champ:dev"], "'champ:dev'"),
        (["--samples", "0"], "samples must be at least 1, got 0"),
        (["--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
        (["--policy", "best"], "unknown policy 'best'"),
        (["--policy", "oracle"], "not generate"),
        (["--policy", "random", "--budget", "10"], "budget of 10 slots"),
        (["--policy", "random", "--adapter", "x"], "either --adapter DIR or --policy NAME, got x and random"),
        (["--device", "toaster"], "--device toaster"),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_rollouts_refuse_before_the_model_is_loaded(tmp_path, words, message):
    assert message in refused("rollouts", "--out", tmp_path / "a.jsonl", *words)
    assert not any(tmp_path.iterdir())

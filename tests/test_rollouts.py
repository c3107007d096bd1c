"""Traces of a model's own: deterministic, gone on with after any interruption, and read back as the ids they were."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvpop import corpora
from kvpop.attachment import attach
from kvpop.budget import Budget
from kvpop.data import Corpus, documents_from, prepare, tokenizer_fingerprint
from kvpop.policies import Dense, Streaming
from kvpop.rollout import generate
from kvpop.rollouts import Prompt, Rollouts, RolloutSettings, check_prompts, prompts_from
from tests.tiny import VOCAB, tiny_model

TEMPLATE = "{% for m in messages %}w{{ 10 if m['role'] == 'user' else 11 }} {{ m['content'] }} w12 {% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}w11 {% endif %}"


def tokenizer_with(template=TEMPLATE, **special):
    words = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2, "[UNK]": 3} | {f"w{i}": i for i in range(4, VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "eos_token": "[EOS]", **special}
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", **special)
    fast.chat_template = template
    return fast


@pytest.fixture(scope="module")
def model():
    return attach(tiny_model(), Dense())


def make(model, out, prompts=((5, 6), (7,), (8, 9, 4)), tokenizer=None, identity=None, **settings):
    settings = RolloutSettings(**{"samples": 3, "max_new_tokens": 20, "rows": 4, **settings})
    prompts = [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in prompts]
    return Rollouts(model, tokenizer or tokenizer_with(), prompts, out, settings, identity)


def rows_of(out):
    return {(row["prompt_index"], row["sample"]): row for row in map(json.loads, out.read_text().splitlines())}


def test_each_trace_is_what_its_prompt_and_seed_give_alone(model, tmp_path):
    run = make(model, tmp_path / "new" / "a.jsonl", top_k=30, seed=4)
    given = list(run.run())
    rows = rows_of(run.out)
    assert list(rows.values()) == given
    assert set(rows) == {(prompt, sample) for prompt in range(3) for sample in range(3)}
    assert len({row["seed"] for row in given}) == 9
    reasons = set()
    for (prompt, _), row in rows.items():
        ids = torch.tensor([run.prompts[prompt].ids])
        steps = generate(model, ids, max_new_tokens=20, temperature=1.0, top_k=30, seed=row["seed"], stop_ids={2})
        assert row["tokens"] == [*run.prompts[prompt].ids, *(step.token for step in steps)]
        assert row["prompt_tokens"] == len(run.prompts[prompt].ids)
        assert row["finish_reason"] == ("stop" if row["tokens"][-1] == 2 else "length")
        assert row["text"] == run.tokenizer.decode(row["tokens"])
        reasons.add(row["finish_reason"])
    assert reasons == {"stop", "length"}
    assert run.generated == sum(len(row["tokens"]) - row["prompt_tokens"] for row in given)


def test_stopped_anywhere_it_goes_on_and_a_line_cut_off_is_made_again(model, tmp_path):
    whole = make(model, tmp_path / "whole.jsonl")
    list(whole.run())
    out = tmp_path / "part.jsonl"
    part = make(model, out)
    traces = part.run()
    for _ in range(4):
        next(traces)
    traces.close()
    assert not part.engine.busy
    assert len(part.done) == len(rows_of(out)) == 4
    out.write_bytes(b"".join(whole.out.read_bytes().splitlines(keepends=True)[:4])[:-3])
    again = make(model, out)
    assert len(again.done) == 3
    kept = out.read_bytes()
    assert len(list(again.run())) == 6
    assert out.read_bytes().startswith(kept)
    assert rows_of(out) == rows_of(whole.out)
    assert list(make(model, out).run()) == []
    out.write_bytes(b'{"tokens": [1')  # nothing whole at all
    assert make(model, out).done == set()


def test_an_interrupt_leaves_what_is_done(model, tmp_path):
    run = make(model, tmp_path / "a.jsonl")

    def interrupt():
        if len(run.done) >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run.run(interrupt))
    assert not run.engine.busy
    done = rows_of(run.out)
    assert 2 <= len(done) < 9
    more = make(model, run.out, samples=4, rows=2)  # more samples, other rows: the same traces
    assert len(more.missing) == 12 - len(done)
    list(more.run())
    straight = make(model, tmp_path / "b.jsonl", samples=4)
    list(straight.run())
    assert rows_of(run.out) == rows_of(straight.out)


def test_other_settings_are_refused_by_name(model, tmp_path):
    out = tmp_path / "a.jsonl"
    list(make(model, out, samples=1, identity={"model": "tiny"}).run())
    with pytest.raises(ValueError, match=r"other settings: model 'tiny', now 'other'; temperature 1.0, now 0.5"):
        make(model, out, identity={"model": "other"}, temperature=0.5)
    with pytest.raises(ValueError, match="other settings: prompts "):
        make(model, out, prompts=[(5,)], identity={"model": "tiny"})
    (tmp_path / "a.json").unlink()
    with pytest.raises(ValueError, match=r"a\.jsonl is there, but not the settings it was made with: .*a\.json"):
        make(model, out)
    with pytest.raises(ValueError, match=r"ends in \.jsonl, got .*a\.txt"):
        make(model, tmp_path / "a.txt")


def test_a_file_broken_in_the_middle_is_named(model, tmp_path):
    run = make(model, tmp_path / "a.jsonl", samples=1)
    list(run.run())
    good = run.out.read_text()
    run.out.write_text("broken\n" + good)
    with pytest.raises(ValueError, match=r"a\.jsonl:1: not a line of JSON"):
        make(model, run.out)
    run.out.write_text(good + '{"text": "a"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:4: no trace, it has no prompt_index and sample, only \['text'\]"):
        make(model, run.out)


def test_any_policy_samples(tmp_path):
    model = attach(tiny_model(), Streaming(Budget(1, 3, 4)))
    assert len(list(make(model, tmp_path / "a.jsonl").run())) == 9


def test_an_error_of_the_model_ends_the_run(tmp_path):
    model = attach(tiny_model(), Dense())
    model.lm_head.register_forward_hook(lambda module, args, out: out * float("nan"))
    with pytest.raises(ValueError, match="are NaN"):
        list(make(model, tmp_path / "a.jsonl").run())


# Questions of its own


def test_it_asks_itself_and_answers(model, tmp_path):
    tokenizer = tokenizer_with(bos_token="[BOS]")
    (prompt,) = prompts_from("free", tokenizer)
    assert prompt == Prompt((10,), "question")
    run = make(model, tmp_path / "a.jsonl", [prompt], tokenizer, samples=12, question_tokens=4, seed=1)
    rows = list(run.run())
    assert len(rows) == 12
    asked = set()
    for row in rows:
        question = row["tokens"][1 : row["prompt_tokens"] - 2]
        assert row["tokens"][: row["prompt_tokens"]] == [10, *question, 12, 11]
        assert 1 <= len(question) <= 4
        asked.add(tuple(question))
    assert len(asked) > 6
    assert [row["sample"] for row in make(model, tmp_path / "b.jsonl", [prompt], tokenizer, samples=3).run()]


def test_a_question_of_no_words_is_an_empty_trace_that_is_not_tried_again(model, tmp_path, monkeypatch):
    tokenizer = tokenizer_with()
    run = make(model, tmp_path / "a.jsonl", prompts_from("free", tokenizer), tokenizer, samples=2, question_tokens=1)
    run.stop = set(range(VOCAB))
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **options: " ")
    assert [(row["tokens"], row["finish_reason"], row["prompt_tokens"]) for row in run.run()] == [([], "empty", 0)] * 2
    assert run.missing == []


def test_without_a_chat_template_it_starts_from_the_token_before_all_text():
    assert prompts_from("free", tokenizer_with(None, bos_token="[BOS]")) == [Prompt((1,))]
    assert prompts_from("free", tokenizer_with(None)) == [Prompt((2,))]
    assert prompts_from("free", tokenizer_with(), raw=True) == [Prompt((2,))]
    with pytest.raises(ValueError, match="need a chat template, or a token that begins or ends a text"):
        prompts_from("free", tokenizer_with(None, eos_token=None))


# Prompts


def test_prompts_of_files(tmp_path):
    (tmp_path / "a.txt").write_text("w20 w21\n\n w22\n")
    rows = [
        {"prompt": "w20"},
        {"messages": [{"role": "user", "content": "w21"}, {"role": "assistant", "content": "w22"}]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = tokenizer_with()
    assert prompts_from(str(tmp_path / "a.txt"), tokenizer) == [Prompt((10, 20, 21, 12, 11)), Prompt((10, 22, 12, 11))]
    assert prompts_from(str(tmp_path / "a.txt"), tokenizer, raw=True) == [Prompt((20, 21)), Prompt((22,))]
    assert prompts_from(str(tmp_path / "a.jsonl"), tokenizer) == [
        Prompt((10, 20, 12, 11)),
        Prompt((10, 21, 12, 11, 22, 12, 11)),
    ]
    with pytest.raises(ValueError, match="prompts of messages need a tokenizer with a chat template"):
        prompts_from(str(tmp_path / "a.jsonl"), tokenizer_with(None))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "\n \n", "has no prompts"),
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", '{"text": "a"}', r"a\.jsonl:1: neither 'prompt' nor 'messages', only \['text'\]"),
        ("a.jsonl", '{"prompt": ""}', "neither 'prompt' nor 'messages'"),
        ("a.csv", "a", r"must end in \.txt, \.md, \.jsonl, got '\.csv'"),
    ],
)
def test_files_without_prompts_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        prompts_from(str(tmp_path / name), tokenizer_with())


@pytest.mark.skipif(not corpora.find_spec("champ_dataset"), reason="needs the data of the package champ-dataset")
def test_the_statements_of_champ_are_prompts_by_split():
    tokenizer = tokenizer_with(None)
    train, validation, test = (prompts_from(f"champ:{split}", tokenizer) for split in ("train", "validation", "test"))
    assert (len(train), len(validation), len(test)) == (203, 27, 40)
    assert prompts_from("champ", tokenizer) == train
    assert not set(corpora.champ_statements("train")) & set(corpora.champ_statements("test"))
    with pytest.raises(ValueError, match="'champ:dev'"):
        check_prompts("champ:dev")
    with pytest.raises(ValueError, match="got 'dev'"):
        corpora.champ_statements("dev")  # type: ignore[arg-type]


def test_missing_files_are_named():
    with pytest.raises(FileNotFoundError, match="no such file of prompts: nowhere"):
        check_prompts("nowhere")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"question_tokens": 0}, "question_tokens must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        RolloutSettings(**wrong)


# As data


def test_traces_are_data_without_tokenizing_again(model, tmp_path, monkeypatch):
    run = make(model, tmp_path / "a.jsonl", samples=4)
    rows = list(run.run())
    assert [ids.tolist() for ids in documents_from(str(run.out), run.tokenizer)] == [row["tokens"] for row in rows]
    other = tokenizer_with()
    other.add_tokens(["w99"])
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: .* by the tokenizer {tokenizer_fingerprint(run.tokenizer)}"):
        list(documents_from(str(run.out), other))
    corpus = Corpus(str(run.out), where=(("finish_reason", "length"),))
    prepared = prepare(corpus, run.tokenizer, tmp_path / "out", 16)
    ended = sum(len(row["tokens"]) for row in rows if row["finish_reason"] == "length")
    assert prepared.index["documents"]["tokens"] == ended

"""Rollouts on tasks: the same whatever runs beside them, whole after any kill, shards equal to one run; and their grades."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvpop import evals
from kvpop import models as base_models
from kvpop.adapter import save_adapter
from kvpop.attachment import attach
from kvpop.budget import Budget
from kvpop.cli import app
from kvpop.cli.tasks import chosen_graph, places_of
from kvpop.evals import paper
from kvpop.evals.base import Decoding, Item
from kvpop.evals.grades import GRADE, Grading, tally
from kvpop.evals.rollouts import (
    Shard,
    TaskRollouts,
    content,
    file_digest,
    health,
    item_ids,
    loop_period,
    merge,
    model_facts,
    policy_facts,
    prefill_chunk,
    read_rows,
    rollout_seed,
)
from kvpop.jsonl import cut_last_line, differences, sort_lines
from kvpop.policies import Dense, KVpop, Streaming, Tova
from kvpop.rollout import generate
from tests.test_rollouts import tokenizer_with
from tests.tiny import tiny_model
from tests.tiny_task import Broken, Code, Dying, Words

TASK = Words()
PACKAGED = tuple(evals.TASKS)


@pytest.fixture(scope="module")
def model():
    return attach(tiny_model(dtype=torch.float32), Dense())


def make(model, directory, task=TASK, items=None, tokenizer=None, rollouts=None, decoding=None, rows=4, **options):
    decoding = decoding or task.decoding
    decoding = decoding if rollouts is None else replace(decoding, rollouts=rollouts)
    items = task.items(None) if items is None else items
    return TaskRollouts(
        model, tokenizer or tokenizer_with(), task, items, directory, decoding=decoding, rows=rows, **options
    )


def rows_of(path):
    return [content(row) for row in read_rows(path)]


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A directory with all rollouts, made in one go."""
    run = make(model, tmp_path_factory.mktemp("whole"))
    assert len(list(run.run())) == 15
    return run.out.parent


# What a rollout is


def test_a_row_says_all_there_is_to_say_and_no_grade(model, whole):
    tokenizer, items = tokenizer_with(), TASK.items(None)
    rows = list(read_rows(whole / "rollouts.jsonl"))
    assert [(row["index"], row["rollout"]) for row in rows] == [(i, r) for i in range(5) for r in range(3)]
    assert len({row["seed"] for row in rows}) == 15
    reasons = set()
    for row in rows:
        item = items[row["index"]]
        ids = item_ids(tokenizer, item)
        steps = generate(
            model, torch.tensor([ids]), max_new_tokens=24, temperature=1.0, top_p=0.9, seed=row["seed"], stop_ids={2}
        )  # fmt: skip
        assert row["completion_ids"] == [step.token for step in steps]
        assert row["text"] == tokenizer.decode([t for t in row["completion_ids"] if t not in (0, 2, 3)])
        assert row["finish_reason"] == ("stop" if row["completion_ids"][-1] == 2 else "length")
        assert (row["task"], row["item"], row["fields"]) == ("words", item.id, {"place": row["index"]})
        assert row["seed"] == rollout_seed("words", item.id, row["rollout"])
        assert row["decoding"] == {"temperature": 1.0, "top_p": 0.9, "top_k": 0, "max_new_tokens": 24}
        assert row["prompt_tokens"] == len(ids)
        assert row["seconds"] >= 0
        assert not {"score", "answer", "outcome"} & row.keys()
        reasons.add(row["finish_reason"])
    assert reasons == {"stop", "length"}


def test_settings_stand_beside(whole):
    settings = json.loads((whole / "rollouts.json").read_text())
    assert settings["extent"] == {"items": 5, "rollouts": 3}
    assert settings["task"] | {"prompts": ""} == {
        "name": "words", "title": "Words", "citation": "Nobody, 2020.", "size": 5, "source": None, "checksum": None,
        "prompts": "",
    }  # fmt: skip
    assert settings["decoding"] == {
        "temperature": 1.0, "top_p": 0.9, "top_k": 0, "max_new_tokens": 24, "thinking": None, "stop": [2],
    }  # fmt: skip


def test_rows_at_a_time_change_nothing(model, whole, tmp_path):
    for rows in (1, 16):
        run = make(model, tmp_path / str(rows), rows=rows)
        list(run.run())
        assert rows_of(run.out) == rows_of(whole / "rollouts.jsonl")


def test_a_seed_is_of_task_item_and_rollout_alone():
    seeds = {rollout_seed(task, item, r) for task in ("a", "a1") for item in ("1", "11", 'x", "y') for r in range(20)}
    assert len(seeds) == 120
    assert rollout_seed("aime-2024", "I-1", 3) == 8551953983404121702
    assert all(0 <= seed < 2**63 for seed in seeds)


# Prompts


def test_prompts_go_through_the_template_with_its_switch_or_as_they_are():
    text, messages, ids, plain = TASK.items(None)[:4]
    tokenizer = tokenizer_with()
    assert item_ids(tokenizer, text) == [10, 20, 5, 12, 11]
    assert item_ids(tokenizer, messages) == [10, 21, 12, 11]
    assert item_ids(tokenizer, ids) == [7, 8, 9]
    assert item_ids(tokenizer_with(None), plain) == [23]
    two = Item("a", [{"role": "system", "content": "w4"}, {"role": "user", "content": "w5"}], "")
    assert item_ids(tokenizer_with(None), two) == [4, 5]
    switched = tokenizer_with(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if enable_thinking %} w9{% endif %}"
    )
    assert [item_ids(switched, plain, thinking) for thinking in (None, True, False)] == [[23], [23, 9], [23]]
    with pytest.raises(
        ValueError, match="--no-thinking: the chat template of this model has no switch enable_thinking"
    ):
        item_ids(tokenizer, plain, thinking=False)
    with pytest.raises(ValueError, match="item b has a prompt without tokens"):
        item_ids(tokenizer_with(None), Item("b", [], ""))


# Loops and the like


def test_a_loop_is_four_periods_and_128_tokens_at_least():
    noise = random.Random(0).sample(range(10**6), 400)
    assert loop_period(noise) == 0
    assert loop_period(noise + [5] * 127) == 0
    assert loop_period(noise + [5] * 128) == 1
    cycle = noise[:100]
    assert loop_period(noise[100:] + cycle * 4) == 100
    assert loop_period(noise[100:] + cycle * 4 + cycle[:30]) == 100  # in the middle of a cycle
    assert loop_period(noise[100:] + cycle * 3) == 0
    assert loop_period(noise + cycle * 4 + [1]) == 0  # it left the cycle
    long = random.Random(1).sample(range(10**6), 513)
    assert loop_period(long[:512] * 4) == 512
    assert loop_period(long * 4) == 0
    assert loop_period([]) == 0


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5), st.integers(2, 3), st.integers(2, 9))
def test_a_loop_is_what_its_definition_says(tokens, period, repeats, least):
    found = 0
    for p in range(period, 0, -1):
        last = max(repeats * p, least)
        tail = tokens[-last:]
        if len(tokens) >= last > p and all(tail[i] == tail[i - p] for i in range(p, last)):
            found = p
    assert loop_period(tokens, period, repeats, least) == found


def test_health_sees_caps_empty_answers_and_loops():
    row = {"finish_reason": "length", "text": " \n", "completion_ids": [4] * 128}
    assert health(row) == {"capped": True, "empty": True, "loop": 1}
    row = {"finish_reason": "stop", "text": "a", "completion_ids": [4] * 128 + [2]}
    assert health(row) == {"capped": False, "empty": False, "loop": 1}


# Killed and gone on with


def _run(model, directory):
    list(make(model, directory).run())


def test_killed_at_random_moments_it_ends_as_if_it_had_not_been(model, whole, tmp_path):
    draw, kills = random.Random(0), 0
    context = multiprocessing.get_context("fork")  # the model is there already
    for attempt in range(60):
        process = context.Process(target=_run, args=(model, tmp_path))
        process.start()
        if attempt < 40:
            process.join(draw.uniform(0.02, 0.15))
        else:
            process.join()
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert process.exitcode == 0
    assert kills >= 3
    assert rows_of(tmp_path / "rollouts.jsonl") == rows_of(whole / "rollouts.jsonl")


def test_a_file_cut_at_any_byte_is_gone_on_with(model, whole, tmp_path):
    data, settings = (whole / "rollouts.jsonl").read_bytes(), (whole / "rollouts.json").read_bytes()
    lines = data.splitlines(keepends=True)
    ends = [sum(map(len, lines[:n])) for n in range(len(lines) + 1)]
    cuts = [0, 1, ends[3] - 1, ends[3], ends[3] + 1, ends[-1] - 1, *random.Random(1).sample(range(len(data)), 4)]
    for n, cut in enumerate(cuts):
        folder = tmp_path / str(n)
        folder.mkdir()
        (folder / "rollouts.jsonl").write_bytes(data[:cut])
        (folder / "rollouts.json").write_bytes(settings)
        run = make(model, folder)
        assert len(run.done) == sum(end <= cut for end in ends[1:])
        made = list(run.run())
        assert len(made) == 15 - sum(end <= cut for end in ends[1:])
        assert rows_of(run.out) == rows_of(whole / "rollouts.jsonl")


def test_more_rollouts_and_more_items_are_added_to_those_there(model, whole, tmp_path):
    first = make(model, tmp_path, rollouts=1, limit=2)
    list(first.run())
    assert len(rows_of(first.out)) == 2
    more = make(model, tmp_path, rows=2)
    assert more.left == 13
    list(more.run())
    assert rows_of(more.out) == rows_of(whole / "rollouts.jsonl")
    assert json.loads((tmp_path / "rollouts.json").read_text())["extent"] == {"items": 5, "rollouts": 3}
    assert list(make(model, tmp_path, rollouts=1).run()) == []


def test_an_interrupt_leaves_what_is_done_and_frees_the_engine(model, tmp_path):
    run = make(model, tmp_path)

    def interrupt():
        if len(run.done) >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run.run(interrupt))
    assert not run.engine.busy
    assert 2 <= len(rows_of(run.out)) < 15


def test_the_time_that_is_left_is_what_is_missing_at_this_speed(model, tmp_path):
    run = make(model, tmp_path)
    assert run.seconds_left(10.0) is None
    rows = run.run()
    made = [next(rows) for _ in range(5)]
    mean = sum(len(row["completion_ids"]) for row in made) / 5
    begun = sum(len(request.tokens) for request in run.engine.rows if request)
    assert run.seconds_left(10.0) == pytest.approx((10 * mean - begun) / 10)
    list(rows)
    assert run.seconds_left(10.0) == 0


# Settings


def test_other_settings_are_refused_by_name_and_other_machines_noted(model, tmp_path):
    facts = {"model": {"id": "tiny", "weights": "a"}, "policy": {"name": "dense"}}
    run = {"versions": {"torch": "1"}, "device": "cpu", "command": ["a"]}
    list(make(model, tmp_path, rollouts=1, identity=facts, run=run).run())
    other = {**facts, "model": {"id": "tiny", "weights": "b"}}
    with pytest.raises(ValueError, match=r"rollouts\.jsonl was made with other settings: model\.weights 'a', now 'b'$"):
        make(model, tmp_path, identity=other, run=run)
    cooler = replace(TASK.decoding, temperature=0.5)
    with pytest.raises(ValueError, match=r"decoding\.temperature 1\.0, now 0\.5"):
        make(model, tmp_path, identity=facts, decoding=cooler)
    with pytest.raises(ValueError, match=r"settings: task\.prompts '\w+', now '\w+'"):
        make(model, tmp_path, identity=facts, items=[*TASK.items(None)[:4], Item("q4", "w40", "")])
    before = (tmp_path / "rollouts.json").read_text()
    with pytest.raises(ValueError, match=r"policy\.name 'dense', now None"):
        make(model, tmp_path, identity={"model": facts["model"]})
    assert (tmp_path / "rollouts.json").read_text() == before
    again = make(model, tmp_path, identity=facts, run={**run, "versions": {"torch": "2"}, "command": ["b"]})
    assert again.notes == ["versions.torch '1', now '2'"]
    runs = json.loads((tmp_path / "rollouts.json").read_text())["runs"]
    assert [(one["versions"]["torch"], one["command"]) for one in runs] == [("1", ["a"]), ("2", ["b"])]
    (tmp_path / "rollouts.json").unlink()
    with pytest.raises(ValueError, match=r"rollouts\.jsonl is there, but not the settings it was made with"):
        make(model, tmp_path)


def test_broken_files_are_named(model, whole, tmp_path):
    for name in ("rollouts.json", "rollouts.jsonl"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    good = (tmp_path / "rollouts.jsonl").read_text()
    (tmp_path / "rollouts.jsonl").write_text("broken\n" + good)
    with pytest.raises(ValueError, match=r"rollouts\.jsonl:1: not a line of JSON"):
        make(model, tmp_path)
    (tmp_path / "rollouts.jsonl").write_text(good + '{"text": "a"}\n')
    with pytest.raises(
        ValueError, match=r"rollouts\.jsonl:16: this row has no index and no rollout and .*, only \['text'\]"
    ):
        make(model, tmp_path)
    (tmp_path / "rollouts.jsonl").write_text(good.replace('"prompt_sha256": "', '"prompt_sha256": "x', 1))
    with pytest.raises(ValueError, match="item q0 was asked in other words"):
        make(model, tmp_path)
    (tmp_path / "rollouts.json").write_text("{")
    with pytest.raises(ValueError, match=r"rollouts\.json is not valid JSON"):
        make(model, tmp_path)
    (tmp_path / "rollouts.json").write_text("{}")
    with pytest.raises(ValueError, match="does not hold the settings of rollouts in format 1"):
        make(model, tmp_path)


def test_a_prompt_beyond_the_models_positions_is_noted(model, tmp_path):
    run = make(model, tmp_path, decoding=Decoding(0.0, 1.0, 0, 5000, 1))
    assert run.notes == [
        "prompts of up to 5 tokens and 5000 new ones go beyond the 4096 positions that the model was made for"
    ]


def test_an_error_of_the_model_ends_the_run(tmp_path):
    model = attach(tiny_model(), Dense())
    model.lm_head.register_forward_hook(lambda module, args, out: out * float("nan"))
    with pytest.raises(ValueError, match="are NaN"):
        list(make(model, tmp_path).run())


def test_what_a_model_and_a_policy_are_is_told(tmp_path):
    model, budget = tiny_model(dtype=torch.float32), Budget(2, 4, 6)
    facts = model_facts(model, tokenizer_with(), "tiny")
    assert facts["dtype"] == "float32"
    assert model_facts(tiny_model(seed=1, dtype=torch.float32), tokenizer_with(), "tiny")["weights"] != facts["weights"]
    policy, cost = policy_facts(attach(model, Dense()), Dense(), None)
    assert policy == {"name": "dense", "kind": "Dense", "settings": {}, "adapter": None}
    assert cost == {"slots": None, "bytes": None, "dense_bytes_per_token": 2 * 2 * 2 * 8 * 4}
    policy, cost = policy_facts(attach(model, Streaming(budget)), Streaming(budget), None)
    assert policy["settings"]["budget"] == {"sinks": 2, "window": 4, "long": 6, "heads": []}
    assert cost["slots"] == 12
    assert cost["bytes"] > 12 * cost["dense_bytes_per_token"]
    assert policy_facts(attach(model, Tova(9)), Tova(9), None)[1]["slots"] == 9
    trained = KVpop(budget, scorer="mlp")
    adapter = save_adapter(attach(model, trained), trained, tmp_path / "a", model_id="tiny")
    one = policy_facts(model, trained, adapter)[0]
    assert (one["name"], one["settings"]["scorer"]) == ("kvpop-mlp", "mlp")
    (adapter / "README.md").write_text("another word")  # no part of what it does
    assert policy_facts(model, trained, adapter)[0]["adapter"] == one["adapter"]
    config = adapter / "kvpop.json"
    config.write_text(config.read_text() + " ")
    assert policy_facts(model, trained, adapter)[0]["adapter"] != one["adapter"]
    assert file_digest([config]) != file_digest([config, adapter / "README.md"])


# Shards


def test_shards_share_out_every_rollout_once():
    for count in (1, 2, 3, 7):
        for i in range(20):
            for r in range(16):
                assert sum(Shard(k, count).has(i, r) for k in range(count)) == 1
    sizes = Counter(next(k for k in range(8) if Shard(k, 8).has(i, r)) for i in range(30) for r in range(16))
    assert set(sizes.values()) == {60}


def test_shards_are_named_or_torchruns(monkeypatch):
    assert Shard.chosen("2/4") == Shard(2, 4)
    assert Shard.chosen(None) == Shard(0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert Shard.chosen(None) == Shard(3, 8)
    assert Shard.chosen("0/1") == Shard(0, 1)
    for text in ("4/4", "1/0", "a", "1", "-1/2", "1/2/3"):
        with pytest.raises(ValueError, match="--shard"):
            Shard.chosen(text)


def test_merged_shards_are_one_run(model, whole, tmp_path):
    for index in (2, 0):
        list(make(model, tmp_path, shard=Shard(index, 3), rows=2).run())
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["rollouts-0-of-3.jsonl", "rollouts-2-of-3.jsonl"]
    report = merge(tmp_path)
    assert (report["rollouts"], report["expected"]) == (10, 15)
    assert report["missing"] == [["q0", [1]], ["q1", [0]], ["q2", [2]], ["q3", [1]], ["q4", [0]]]
    list(make(model, tmp_path, shard=Shard(1, 3), run={"device": "other"}).run())
    report = merge(tmp_path)
    assert (report["rollouts"], report["missing"], report["duplicates"]) == (15, [], 10)
    assert rows_of(tmp_path / "rollouts.jsonl") == rows_of(whole / "rollouts.jsonl")
    assert report["notes"] == ["device None, now 'other'"]
    settings = [json.loads((folder / "rollouts.json").read_text()) for folder in (whole, tmp_path)]
    assert settings[0] | {"runs": 0} == settings[1] | {"runs": 0}
    assert list(make(model, tmp_path).run()) == []  # goes on from the merged file


def test_merge_refuses_what_does_not_belong_together(model, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no shards to merge: no rollouts-i-of-n\.jsonl"):
        merge(tmp_path)
    list(make(model, tmp_path, shard=Shard(0, 2), identity={"policy": {"name": "dense"}}).run())
    list(make(model, tmp_path, shard=Shard(1, 2), identity={"policy": {"name": "tova"}}).run())
    with pytest.raises(ValueError, match=r"different settings: policy\.name 'dense', now 'tova'"):
        merge(tmp_path)
    assert not (tmp_path / "rollouts.jsonl").exists()
    beside = tmp_path / "rollouts-1-of-2.json"
    beside.write_text((tmp_path / "rollouts-0-of-2.json").read_text())
    lines = (tmp_path / "rollouts-0-of-2.jsonl").read_text().splitlines()
    other = json.loads(lines[1]) | {"text": "other"}
    with (tmp_path / "rollouts-1-of-2.jsonl").open("a") as file:
        file.write(json.dumps(other) + "\n")
    with pytest.raises(
        ValueError, match=r"rollout 2 of item q0 is not the same in rollouts-0-of-2\.jsonl and rollouts-1"
    ):
        merge(tmp_path)
    assert not list(tmp_path.glob("rollouts.jsonl")) + list(tmp_path.glob(".*"))


# The file helpers


def test_two_processes_do_not_write_to_one_file(model, tmp_path):
    run, other = make(model, tmp_path), make(model, tmp_path, rows=2)
    rows = run.run()
    next(rows)
    for attempt in (lambda: make(model, tmp_path), lambda: list(other.run())):
        with pytest.raises(ValueError, match=r"another process is writing to .*rollouts\.jsonl"):
            attempt()
    rows.close()
    assert len(list(other.run())) == 15 - len(run.done)  # it looks again
    assert list(run.run()) == []


def test_lines_are_cut_sorted_and_said_once(tmp_path):
    path = tmp_path / "a.jsonl"
    assert not cut_last_line(path)
    path.write_bytes('{"k": 2}\n{"k": 1, "é": 1}\n{"k": 2, "x": 0}\n{"k": 0}\n{"k": 3, "é'.encode()[:-1])
    assert cut_last_line(path)
    sort_lines(path, lambda row: row["k"])
    assert path.read_text() == '{"k": 0}\n{"k": 1, "é": 1}\n{"k": 2}\n'
    inode = path.stat().st_ino
    sort_lines(path, lambda row: row["k"])
    assert path.stat().st_ino == inode
    assert differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}, "e": 5}) == [
        "a.c 2, now 4", "e None, now 5", "d 3, now None",
    ]  # fmt: skip


# Grades


def grade(directory, task=TASK, **options):
    grading = Grading(task, task.items(None), directory, **options)
    return list(grading.run()), list(read_rows(directory / "grades.jsonl", GRADE))


@pytest.fixture
def ungraded(whole, tmp_path):
    for name in ("rollouts.json", "rollouts.jsonl"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    return tmp_path


def without_seconds(rows):
    return [content(row) for row in rows]


def test_every_rollout_is_graded_beside_what_became_of_it(ungraded):
    task = Words(slow="q3")
    new, rows = grade(ungraded, task)
    assert new == rows
    rollouts = list(read_rows(ungraded / "rollouts.jsonl"))
    for row, rollout in zip(rows, rollouts, strict=True):
        expected = task.grade(task.items(None)[row["index"]], rollout["text"])
        assert (row["score"], row["outcome"], row["answer"]) == (expected.score, expected.outcome, expected.answer)
        assert (row["index"], row["rollout"]) == (rollout["index"], rollout["rollout"])
        assert row["tokens"] == len(rollout["completion_ids"])
        assert row["capped"] == (rollout["finish_reason"] == "length")
    counts = tally(rows)
    assert counts["timeout"] == 3
    assert (
        sum(counts[name] for name in ("right", "wrong", "no answer", "timeout", "refused")) == counts["rollouts"] == 15
    )
    assert grade(ungraded, task) == ([], rows)


def test_several_workers_grade_alike_and_a_cut_file_is_gone_on_with(ungraded):
    _, alone = grade(ungraded)
    _, several = grade(ungraded, workers=2, again=True)
    assert without_seconds(several) == without_seconds(alone)
    data = (ungraded / "grades.jsonl").read_bytes()
    (ungraded / "grades.jsonl").write_bytes(data[: len(data) // 2])
    new, rows = grade(ungraded)
    assert 0 < len(new) < 15
    assert without_seconds(rows) == without_seconds(alone)


def test_grades_of_others_are_refused(ungraded, tmp_path):
    grade(ungraded)
    with pytest.raises(ValueError, match=r"graded otherwise: allow_code None, now True; --again grades anew"):
        grade(ungraded, identity={"allow_code": True})
    with pytest.raises(ValueError, match="has rollouts of words, not of code"):
        grade(ungraded, Code())
    rollouts = ungraded / "rollouts.jsonl"
    row = json.loads(rollouts.read_text().splitlines()[0])
    good = rollouts.read_text()
    rollouts.write_text(json.dumps(row | {"text": "w4 other"}) + "\n")
    with pytest.raises(ValueError, match="rollout 0 of item q0 has another text than was graded"):
        grade(ungraded)
    rollouts.write_text(json.dumps(row | {"item": "x", "rollout": 9}) + "\n")
    with pytest.raises(ValueError, match="words has no item 'x'"):
        grade(ungraded)
    rollouts.write_text(good)
    (ungraded / "grades.json").unlink()
    with pytest.raises(ValueError, match=r"grades\.jsonl is there, but not what graded it"):
        grade(ungraded)
    with pytest.raises(FileNotFoundError, match=r"has no rollouts\.jsonl$"):
        grade(tmp_path / "nowhere")


def test_a_worker_that_dies_is_told(ungraded):
    grading = Grading(Dying(), TASK.items(None), ungraded, workers=2)
    with pytest.raises(ValueError, match=r"a grading process died .* at rollout \d of item q\d or soon after"):
        list(grading.run())
    assert grade(ungraded, Dying(), workers=1, again=True)[1] != []


def test_a_grader_that_fails_names_the_rollout(ungraded):
    with pytest.raises(RuntimeError, match="cannot") as caught:
        grade(ungraded, Broken(), again=True)
    assert caught.value.__notes__ == ["while grading rollout 0 of item q0 of words"]


# The command line


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(*words):
    result = call(*words)
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    assert result.stdout == ""
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
    assert line.startswith("error: ")
    return line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    tokenizer_with().save_pretrained(folder / "model")
    tiny_model(dtype=torch.float32).save_pretrained(folder / "model")
    return folder


def put(monkeypatch, **tasks):
    """These tasks in place of the package's."""

    def by_name(name, allow_code=False):
        if name not in tasks:
            raise ValueError(f"there is no task {name!r}")
        task = tasks[name]()
        if hasattr(task, "allow_code"):
            task.allow_code = allow_code
        return task

    monkeypatch.setattr(evals, "TASKS", dict.fromkeys(tasks, ""))
    monkeypatch.setattr(evals, "task_by_name", by_name)


@pytest.fixture(autouse=True)
def listed(monkeypatch):
    put(monkeypatch, words=Words, code=Code)


def test_the_command_line_from_end_to_end(folder, tmp_path):
    common = ["tasks", "run", "words", "--model", folder / "model", "--device", "cpu"]
    dense = json.loads(call(*common, "--out", tmp_path / "dense", "--json").stdout)
    assert (dense["new"], dense["total"], dense["grades"]["rollouts"]) == (15, 15, 15)
    assert dense["capped"] == dense["grades"]["capped"] > 0
    again = json.loads(call(*common, "--out", tmp_path / "dense", "--json").stdout)
    assert (again["new"], again["grades"]["new"], again["grades"]["rollouts"]) == (0, 0, 15)
    assert again["grades"]["beyond"] == 0
    with pytest.MonkeyPatch.context() as patch:  # torchrun
        patch.setenv("RANK", "1")
        patch.setenv("WORLD_SIZE", "2")
        assert json.loads(call(*common, "--out", tmp_path / "ranks", "--json").stdout)["rollouts"].endswith(
            "-1-of-2.jsonl"
        )
    small = ["--policy", "streaming", "--budget", "12", "--sinks", "1", "--window", "4", "--out", tmp_path / "small"]
    for index in range(2):
        result = call(*common, *small, "--shard", f"{index}/2", "--rows", "3")
        assert result.exit_code == 0, result.stderr
        assert result.stdout == f"rollouts: {tmp_path / 'small' / f'rollouts-{index}-of-2.jsonl'}\n"
    assert "put its shards together with kvpop tasks merge" in refused("tasks", "grade", tmp_path / "small")
    merged = call("tasks", "merge", tmp_path / "small")
    assert merged.stdout == f"rollouts: {tmp_path / 'small' / 'rollouts.jsonl'}\n"
    assert "15 of 15 rollouts" in merged.stderr
    graded = call("tasks", "grade", tmp_path / "small")
    assert graded.exit_code == 0, graded.stderr
    assert graded.stdout.splitlines()[1].startswith("pass@1: 0.")
    settings = json.loads((tmp_path / "small" / "rollouts.json").read_text())
    assert settings["budget"]["slots"] == 12
    assert settings["model"]["id"] == str(folder / "model")
    assert settings["runs"][0]["graph"] is False  # where there is a GPU, a run is told to capture
    assert settings["runs"][0]["versions"].keys() == {"kvpop", "torch", "transformers", "python"}
    built = json.loads(call("report", tmp_path, "--format", "json", "--context", "48").stdout)
    (table,) = built["tables"]
    assert [(row["label"], row["group"]) for row in table["rows"]] == [("Teacher", 0.0), ("StreamLLM", 0.75)]
    assert table["rows"][0]["cells"][0]["score"]["value"] == pytest.approx(dense["grades"]["pass_at_1"])
    assert table["rows"][1]["cells"][0]["comparison"]["items"] == 5
    written = call("report", tmp_path, "--format", "latex", "--out", tmp_path / "new" / "t.tex")
    assert written.stdout == f"report: {tmp_path / 'new' / 't.tex'}\n"
    assert "\\begin{tabular}" in (tmp_path / "new" / "t.tex").read_text()
    other = refused(*common, "--out", tmp_path / "dense", "--temperature", "0.5")
    assert "decoding.temperature 1.0, now 0.5" in other
    assert "policy.name 'dense', now 'streaming'" in refused(*common, *small[:-1], tmp_path / "dense")


def test_what_is_printed_is_of_what_was_asked_for(folder, tmp_path):
    common = ["tasks", "run", "words", "--model", folder / "model", "--device", "cpu"]
    few, wide = (["--items", items, "--rollouts", rollouts] for items, rollouts in (("2", "2"), ("4", "3")))
    alone = json.loads(call(*common, *few, "--out", tmp_path / "alone", "--json").stdout)["grades"]
    whole = json.loads(call(*common, *wide, "--out", tmp_path / "out", "--json").stdout)["grades"]
    again = json.loads(call(*common, *few, "--out", tmp_path / "out", "--json").stdout)["grades"]
    assert (whole["rollouts"], whole["beyond"]) == (12, 0)
    assert (again.pop("beyond"), alone.pop("beyond")) == (8, 0)
    assert again | {"grades": "", "new": 0} == alone | {"grades": "", "new": 0}
    shown = call(*common, *few, "--out", tmp_path / "out")
    assert "of 4 rollouts" in shown.stderr
    assert "note: 8 more rollouts are there, of an earlier call that asked for more" in shown.stderr
    assert json.loads(call("tasks", "grade", tmp_path / "out", "--json").stdout)["rollouts"] == 12
    report = json.loads(call("report", tmp_path / "out", "--format", "json").stdout)
    assert report["results"][0]["extent"] == {"items": 4, "rollouts": 3}


def test_an_adapter_a_local_file_and_allowed_code(folder, tmp_path):
    model, budget = tiny_model(dtype=torch.float32), Budget(1, 3, 8)
    trained = KVpop(budget, scorer="mlp")
    save_adapter(attach(model, trained), trained, tmp_path / "adapter", model_id="tiny")
    words = tmp_path / "words.txt"
    words.write_text("w30 w31 w32 w33 w34")
    result = call(
        "tasks", "run", "code", "--model", folder / "model", "--adapter", tmp_path / "adapter", "--file", words, "--items",
        "2", "--rollouts", "1", "--out", tmp_path / "out", "--device", "cpu", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["grades"]["refused"] == 2
    settings = json.loads((tmp_path / "out" / "rollouts.json").read_text())
    assert (settings["policy"]["name"], len(settings["policy"]["adapter"])) == ("kvpop-mlp", 64)
    assert len(settings["task"]["checksum"]) == 64
    assert "allow_code False, now True; --again" in refused("tasks", "grade", tmp_path / "out", "--allow-code")
    report = json.loads(call("tasks", "grade", tmp_path / "out", "--allow-code", "--again", "--json").stdout)
    assert (report["right"], report["pass_at_1"], report["low"]) == (2, 1.0, 1.0)
    words.write_text("w30 w31 w32 w33 w35")
    assert "the rollouts were made from" in refused("tasks", "grade", tmp_path / "out", "--allow-code")


def test_several_tasks_in_one_command_are_what_they_are_alone(folder, tmp_path):
    common = ["--model", folder / "model", "--device", "cpu", "--rollouts", "2", "--json"]
    both = call(
        "tasks", "run", "words", "code", *common, "--allow-code", "--out", tmp_path / "both" / "{task}" / "dense"
    )
    assert both.exit_code == 0, both.stderr
    reports = json.loads(both.stdout)
    assert [report["task"] for report in reports] == ["words", "code"]
    for report, more in zip(reports, ([], ["--allow-code"])):
        name = report["task"]
        alone = call("tasks", "run", name, *common, *more, "--out", tmp_path / name)
        assert json.loads(alone.stdout)["grades"] | {"grades": ""} == report["grades"] | {"grades": ""}
        made, expected = (
            [json.loads(line) for line in (place / "rollouts.jsonl").read_text().splitlines()]
            for place in (tmp_path / "both" / name / "dense", tmp_path / name)
        )
        assert [content(row) for row in made] == [content(row) for row in expected]
    shown = call(
        "tasks", "run", "words", "code", *common[:-1], "--allow-code", "--out", tmp_path / "both" / "{task}" / "dense"
    )
    assert [line for line in shown.stdout.splitlines() if line.startswith("rollouts: ")] == [
        f"rollouts: {tmp_path / 'both' / name / 'dense' / 'rollouts.jsonl'}" for name in ("words", "code")
    ]


def test_several_tasks_need_a_place_each(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(base_models, "load_base", lambda *a, **k: pytest.fail("the model was loaded"))
    common = ["tasks", "run", "words", "code", "--model", folder / "model"]
    assert "--out of several tasks must have {task} in it" in refused(*common, "--out", tmp_path / "out")
    (tmp_path / "code").write_text("")
    assert f"--out {tmp_path / 'code'} is a file" in refused(*common, "--out", tmp_path / "{task}")
    place = ["--out", tmp_path / "out-{task}"]
    assert "--file is for one task, got 2: words, code" in refused(*common, *place, "--file", tmp_path / "code")
    assert f"--out {tmp_path / 'code'} is a file" in refused(*common, "--out", tmp_path / "code" / "{task}")
    assert "every task must be named once, got words twice" in refused(*common, "words", *place)
    assert places_of(["reasoning:a:b=1", "gsm8k"], Path("x/{task}/y")) == [
        Path("x/reasoning-a-b=1/y"),
        Path("x/gsm8k/y"),
    ]
    with pytest.raises(ValueError, match="--out gives a:b and a/b the same directory, x-a-b"):
        places_of(["a:b", "c", "a/b"], Path("x-{task}"))
    greedy = refused(*common, *place, "--temperature", "0", "--rollouts", "2")
    assert "--rollouts must be 1 at temperature 0, where all are the same, got 2 for words" in greedy


def test_what_is_wrong_with_a_later_task_is_said_before_the_first_begins(folder, tmp_path, monkeypatch):
    common = ["--model", folder / "model", "--device", "cpu", "--rollouts", "2", "--json"]
    first = call("tasks", "run", "code", *common, "--temperature", "0.5", "--out", tmp_path / "code")
    assert first.exit_code == 0, first.stderr
    both = ["tasks", "run", "words", "code", *common, "--out"]
    assert "decoding.temperature 0.5, now 1.0" in refused(*both, tmp_path / "{task}")
    assert not list(read_rows(tmp_path / "words" / "rollouts.jsonl"))
    # What has been finished is reported, also where a later task fails.
    tasks_cli = importlib.import_module("kvpop.cli.tasks")
    sampled = tasks_cli._sampled

    def failing(todo):
        if todo.task.name == "code":
            raise ValueError("no more")
        return sampled(todo)

    monkeypatch.setattr(tasks_cli, "_sampled", failing)
    result = call(*both, tmp_path / "two-{task}")
    assert result.exit_code == 2
    (report,) = json.loads(result.stdout)
    assert (report["task"], report["new"]) == ("words", 10)


@pytest.mark.parametrize("rows", [1, 2, 3, 16])
@pytest.mark.parametrize("stops", [True, False])
def test_rollouts_of_an_item_take_in_its_prompt_once(model, rows, stops, tmp_path, monkeypatch):
    """Also where all rows end together."""
    run = make(model, tmp_path, rows=rows, rollouts=7)
    if not stops:
        run.stop = set()
    taken, forward = [], run.engine._forward

    def count(cache, ids, position, valid=None):
        if valid is None:
            taken.append(ids.shape[1])
        return forward(cache, ids, position, valid)

    monkeypatch.setattr(run.engine, "_forward", count)
    assert len(list(run.run())) == 35
    assert sum(taken) == sum(map(len, run.prompts))


def test_pieces_of_prompts_are_long_on_a_gpu_but_for_policies_that_would_hold_something_else(monkeypatch):
    for policy, expected in ((Streaming(Budget(1, 3, 8)), 4096), (Dense(), 4096), (Tova(12), 512)):
        model = attach(tiny_model(dtype=torch.float32), policy)
        assert prefill_chunk(model) == 512
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "device", torch.device("cuda"))
            assert prefill_chunk(model) == expected


def test_an_interrupt_is_safe(folder, tmp_path, monkeypatch):
    run = TaskRollouts.run

    def interrupted(self, on_step=None):
        with closing(run(self, on_step)) as rows:
            yield next(rows)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)

    common = ["tasks", "run", "words", "--model", folder / "model", "--out", tmp_path, "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(TaskRollouts, "run", interrupted)
        result = call(*common)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "interrupted at rollout 1 of 15; run the same command to go on"
    assert json.loads(call(*common, "--json").stdout)["new"] == 14


def test_tasks_are_listed():
    words, _ = json.loads(call("tasks", "list", "--json").stdout)["tasks"]
    assert words == {
        "name": "words", "title": "Words", "size": 5, "licence": None, "url": None, "citation": "Nobody, 2020.",
    }  # fmt: skip
    shown = call("tasks", "list").stdout
    assert "words" in shown
    assert "passkey:" in shown


def test_the_papers_columns_are_tasks_there_are():
    assert {name for table in paper.TABLES for name in table.columns} <= set(PACKAGED)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rollouts", "0"], "--rollouts must be at least 1, got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--rows", "0"], "--rows must be at least 1, got 0"),
        (["--items", "0"], "--items must be at least 1, got 0"),
        (["--items", "6"], "--items must be at most 5, the items of words, got 6"),
        (["--temperature", "-1"], "--temperature must be at least 0, got -1.0"),
        (["--temperature", "0", "--rollouts", "4"], "--rollouts must be 1 at temperature 0"),
        (["--top-p", "2"], "--top-p must be in (0, 1], got 2.0"),
        (["--top-k", "-1"], "--top-k must be at least 0, got -1"),
        (["--shard", "4/4"], "--shard i/n: i must be in [0, 4), got 4"),
        (["--workers", "0"], "--workers must be at least 1, got 0"),
        (["--file", "/no/such/file"], "--file: no such file /no/such/file"),
        (["--policy", "best"], "unknown policy 'best'"),
        (["--policy", "oracle"], "not generate"),
        (["--policy", "tova", "--adapter", "x"], "either --adapter DIR or --policy NAME"),
        (["--policy", "tova", "--budget", "10"], "budget of 10 slots"),
        (["--adapter", "/no/such/adapter"], "/no/such/adapter is not a kvpop adapter"),
        (["--graph", "--device", "cpu"], "--graph needs a GPU, got cpu"),
        (["--compile"], "it goes with --graph"),
        (["--dtype", "int8"], "got 'int8'"),
        (["--allow-code"], "--allow-code: words runs no code"),
        (["--thinking"], "--thinking: the chat template of this model has no switch enable_thinking"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_loaded(folder, tmp_path, monkeypatch, words, message):
    monkeypatch.setattr(base_models, "load_base", lambda *a, **k: pytest.fail("the model was loaded"))
    common = ["tasks", "run", "words", "--model", folder / "model", "--out", tmp_path / "out"]
    assert message in refused(*common, *words)
    assert not (tmp_path / "out").exists()


def test_steps_are_captured_where_they_can_be():
    cuda, cpu = torch.device("cuda:1"), torch.device("cpu")
    assert [chosen_graph(None, False, place) for place in (cuda, cpu)] == [True, False]
    assert not chosen_graph(False, False, cuda)
    assert chosen_graph(None, True, cuda)
    with pytest.raises(ValueError, match=r"--graph needs a GPU, got cpu"):
        chosen_graph(True, False, cpu)
    with pytest.raises(ValueError, match="it goes with --graph"):
        chosen_graph(False, True, cuda)


def test_more_bad_input(folder, tmp_path, monkeypatch):
    assert "there is no task 'word'" in refused("tasks", "run", "word", "--out", tmp_path / "a")
    (tmp_path / "file").write_text("")
    assert "is a file" in refused("tasks", "run", "words", "--out", tmp_path / "file")
    assert "has no rollouts.json" in refused("tasks", "grade", tmp_path)
    assert "no shards to merge" in refused("tasks", "merge", tmp_path)
    assert "no graded rollouts in or below" in refused("report", tmp_path)
    assert "--format must be one of md, latex, json, got 'html'" in refused("report", tmp_path, "--format", "html")
    assert "--context must be at least 1 token, got 0" in refused("report", tmp_path, "--context", "0")
    put(monkeypatch, words=type("Short", (Words,), {"items": lambda *a: []}))
    common = ["tasks", "run", "words", "--model", folder / "model", "--out", tmp_path / "out"]
    assert "words has 5 items, got 0" in refused(*common)


def test_greedy_is_one_rollout(folder, tmp_path):
    report = json.loads(
        call(
            "tasks", "run", "words", "--model", folder / "model", "--out", tmp_path, "--temperature", "0", "--device", "cpu",
            "--no-grade", "--json",
        ).stdout
    )  # fmt: skip
    assert (report["total"], report["grades"]) == (5, None)


def test_grading_what_the_embedded_model_wrote_asks_no_hub(monkeypatch):
    from kvpop import models

    monkeypatch.setattr(models, "find_spec", lambda name: object())
    assert models.model_name(models.model_id("smollm2")) == "smollm2"
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    assert models.model_name(models.EMBEDDED_ID) == models.EMBEDDED_ID
    assert models.model_name("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"

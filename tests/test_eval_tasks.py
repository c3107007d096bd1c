"""Tasks from items to grades, and the files that items come from. The items are ours, in the formats of the real ones."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import pickle
import re
import subprocess
import sys
import zlib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvpop.evals import FAMILIES, TASKS, livecodebench, sources, task_by_name
from kvpop.evals.base import Grade, Item, Source, Task
from kvpop.evals.grading import sandbox
from kvpop.evals.livecodebench import LiveCodeBench
from kvpop.evals.ruler import KINDS, Ruler
from kvpop.evals.sources import UNPINNED, read_items, read_rows, value

needs_isolation = pytest.mark.skipif(sandbox.pick()[0] is None, reason=sandbox.pick()[1])


class Words:
    """A tokenizer of words and signs, with a chat template if asked for."""

    def __init__(self, template: bool = False) -> None:
        self.chat_template = "a template" if template else None
        self.vocabulary: dict[str, int] = {}

    def encode(self, text, *, add_special_tokens=True):
        ids = [
            self.vocabulary.setdefault(part, len(self.vocabulary) + 1) for part in re.findall(r" ?\w+|\s|[^\w\s]", text)
        ]
        return [0, *ids] if add_special_tokens and not self.chat_template else ids

    def apply_chat_template(self, conversation, *, tokenize=True, add_generation_prompt=False):
        assert not tokenize
        text = "".join(f"[{message['role']}] {message['content']} [end]" for message in conversation)
        return text + "[assistant] " * add_generation_prompt

    def decode(self, ids):
        parts = {number: part for part, number in self.vocabulary.items()}
        return "".join(parts.get(one, "") for one in ids)


def write(path: Path, rows: list[dict]) -> str:
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def small(task: Task, rows: int) -> Task:
    """The task with a file of a few rows."""
    assert task.source is not None
    task.source = replace(task.source, rows=rows)
    return task


def ends(task: Task, item: Item, *texts: str) -> list[str]:
    grades = [task.grade(item, text) for text in texts]
    assert all(isinstance(grade, Grade) and 0 <= grade.score <= 1 for grade in grades)
    assert all((grade.score == 1) == (grade.outcome == "right") for grade in grades)
    return [grade.outcome for grade in grades]


# The list


def test_every_task_says_what_it_is():
    for name, make in TASKS.items():
        task = make()
        assert task.name == name == task_by_name(name).name
        assert task.title
        assert task.citation
        assert task.size > 0
        assert task.decoding.rollouts >= 1
        if task.source is not None:
            assert task.source.rows == task.size
            assert task.source.revision == UNPINNED
            assert task.source.url == f"https://huggingface.co/datasets/{task.source.hub}"
            assert task.source.licence
        if task.decoding.temperature == 0:
            assert task.decoding.rollouts == 1
    sizes = {name: make().size for name, make in TASKS.items()}
    assert {
        name: sizes[name] for name in ("aime-2024", "aime-2025", "hmmt-feb-2025", "hmmt-nov-2025")
    } == dict.fromkeys(("aime-2024", "aime-2025", "hmmt-feb-2025", "hmmt-nov-2025"), 30)
    assert (sizes["gpqa-diamond"], sizes["gsm8k"], sizes["math-500"]) == (198, 1319, 500)
    assert (sizes["humaneval"], sizes["livecodebench-v6"]) == (164, 175)


def test_names_with_something_to_choose():
    assert task_by_name("ruler:niah-multi-value:12345").title == "RULER niah-multi-value, 12345 tokens"
    assert task_by_name("passkey:99").name == "passkey:99"
    assert task_by_name("livecodebench-v6:2025-02-01:").title == "LiveCodeBench v6 (2025-02-01 to end)"
    with pytest.raises(ValueError, match=r"there is no task 'aime'; there are: aime-2024, .*reasoning:NAME"):
        task_by_name("aime")
    for family in FAMILIES:
        if family not in TASKS:
            with pytest.raises(ValueError, match="there is no task"):
                task_by_name(family)
    for name, error in {
        "ruler:niah-single": "such a task is written ruler:KIND:LENGTH",
        "ruler:haystack:100": "with KIND one of niah-single, .* got 'haystack:100'",
        "ruler:niah-single:-5": "such a task is written",
        "passkey:many": "such a task is written passkey:LENGTH, got 'many'",
        "passkey:0": "the length must be between 1 and 16777216 tokens, got 0",
        "livecodebench-v6:january": "a window is written .* got 'january'",
        "livecodebench-v6:2025-05-01:2025-02-01": "first date must be before its end, got 2025-05-01 and 2025-02-01",
    }.items():
        with pytest.raises(ValueError, match=error):
            task_by_name(name)


def test_code_runs_only_where_it_was_allowed():
    assert not task_by_name("humaneval").allow_code
    assert task_by_name("humaneval", allow_code=True).allow_code
    assert not hasattr(task_by_name("gsm8k", allow_code=True), "allow_code")


def test_tasks_go_to_other_processes():
    for name in [*TASKS, "livecodebench-v6:2025-02-01:2025-03-01"]:
        assert pickle.loads(pickle.dumps(task_by_name(name))).name == name


def test_importing_the_list_is_light():
    code = "import sys, kvpop.evals\nprint([m for m in ('torch', 'transformers', 'numpy', 'datasets') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
    code = (
        "import sys\nfrom kvpop.evals import TASKS, task_by_name\n[make() for make in TASKS.values()]\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'sympy') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


# Mathematics


@pytest.mark.parametrize(
    ("name", "file", "rows"),
    [
        (
            "aime-2024",
            "a.parquet",
            [
                {"id": 7, "problem": "What is 40 + 2?", "answer": "042", "url": "x"},
                {"id": 8, "problem": "1?", "answer": "1"},
            ],
        ),
        ("aime-2025", "a.jsonl", [{"problem_idx": 1, "problem": "What is 40 + 2?", "answer": 42, "problem_type": []}]),
        ("aime-2024", "a.csv", [{"ID": "x", "Problem": "What is 40 + 2?", "Answer": "42"}]),
    ],
)
def test_aime(tmp_path, name, file, rows):
    task = small(task_by_name(name), len(rows))
    items = task.items(None, write(tmp_path / file, rows))
    assert [item.id for item in items] == [f"{name}/{i}" for i in range(len(rows))]
    assert items[0].prompt.startswith("What is 40 + 2?\n\n")
    assert "\\boxed{}" in items[0].prompt
    assert items[0].answer == 42
    assert items[0].fields == {"year": int(name[-4:]), "row": 0}
    texts = (r"I think $\boxed{42}$.", r"\boxed{042}", r"\boxed{41}", "42", "")
    assert ends(task, items[0], *texts) == ["right", "right", "wrong", "no answer", "no answer"]


def test_aime_answers_are_integers_in_range(tmp_path):
    task = small(task_by_name("aime-2025"), 1)
    for answer, error in (
        ("x+1", "the answer must be an integer, got 'x\\+1'"),
        (1000, r"must lie in \[0, 999\], got 1000"),
    ):
        with pytest.raises(ValueError, match=error):
            task.items(None, write(tmp_path / "a.jsonl", [{"problem": "?", "answer": answer}]))
    with pytest.raises(
        ValueError, match=r"row 0: none of the fields problem, Problem, question, only \['answer', 'text'\]"
    ):
        task.items(None, write(tmp_path / "a.jsonl", [{"text": "?", "answer": 1}]))


@pytest.mark.parametrize("name", ["hmmt-feb-2025", "hmmt-nov-2025", "math-500"])
def test_expressions(tmp_path, name):
    row = {"problem": "Half of one?", "answer": r"\frac{1}{2}"}
    row |= (
        {"subject": "Algebra", "level": 3, "unique_id": "a/1"} if name == "math-500" else {"problem_type": ["Algebra"]}
    )
    task = small(task_by_name(name), 1)
    (item,) = task.items(None, write(tmp_path / "a.jsonl", [row]))
    assert item.fields["subject"] == "Algebra"
    assert row["answer"] not in item.prompt
    texts = (r"\boxed{0.5}", r"so \boxed{\dfrac12}", r"\boxed{2}", r"\boxed{?}", "one half", "")
    assert ends(task, item, *texts) == ["right", "right", "wrong", "wrong", "no answer", "no answer"]


def test_expressions_need_their_package(tmp_path, monkeypatch):
    from kvpop.evals.grading import maths

    monkeypatch.setattr(maths, "find_spec", lambda name: None)
    for name in ("hmmt-feb-2025", "math-500"):
        with pytest.raises(ImportError, match=r"pip install 'kvpop\[evals\]'"):
            task_by_name(name).items(None, str(tmp_path / "none.jsonl"))


def test_gsm8k(tmp_path):
    task = small(task_by_name("gsm8k"), 2)
    rows = [
        {
            "question": "Ann has 1,000 nuts and finds 200.",
            "answer": "She has 1000+200=<<1000+200=1200>>1200.\n#### 1,200",
        },
        {"question": "It cools from 3 to -4.", "answer": "So -4.\n#### -4"},
    ]
    first, second = task.items(None, write(tmp_path / "a.parquet", rows))
    assert first.answer == 1200
    texts = (r"\boxed{1,200}", r"\boxed{\$1200}", r"\boxed{\$1{,}200.00}", "#### 1200", "x #### 3\n#### 1,200\nDone.")
    assert ends(task, first, *texts) == ["right"] * 5
    texts = (r"\boxed{12}", r"\boxed{1200 nuts}", "#### many", "1200", "#### ", "")
    assert ends(task, first, *texts) == ["wrong", "wrong", "wrong", "no answer", "no answer", "no answer"]
    assert ends(task, first, r"#### 3, that is \boxed{1200}") == ["right"]
    assert ends(task, second, r"\boxed{-4}", r"\boxed{4}") == ["right", "wrong"]
    with pytest.raises(ValueError, match="must end in #### and an integer, got 'no mark'"):
        small(task, 1).items(None, write(tmp_path / "b.jsonl", [{"question": "?", "answer": "no mark"}]))


# Multiple choice


def gpqa_rows(count: int) -> list[dict]:
    same = {"Incorrect Answer 1": "one", "Incorrect Answer 2": "two", "Incorrect Answer 3": 'three, "quoted"'}
    same |= {"High-level domain": "Physics", "Subdomain": ""}
    return [
        {"Record ID": f"r{i}", "Question": f"Which is number {i}?", "Correct Answer": f" right {i}\n", **same}
        for i in range(count)
    ]


def test_gpqa(tmp_path):
    task = small(task_by_name("gpqa-diamond"), 40)
    items = task.items(None, write(tmp_path / "a.csv", gpqa_rows(40)))
    for i, item in enumerate(items):
        assert f"({item.answer}) right {i}\n" in item.prompt + "\n"
        assert all(f"({letter}) " in item.prompt for letter in "ABCD")
    assert {item.answer for item in items} == set("ABCD")
    assert items[0].fields == {"row": 0, "domain": "Physics", "record": "r0"}
    wrong = "ABCD"[("ABCD".index(items[0].answer) + 1) % 4]
    texts = (rf"\boxed{{{items[0].answer}}}", f"Answer: {items[0].answer}", rf"\boxed{{{wrong}}}", "who knows", "")
    assert ends(task, items[0], *texts) == ["right", "right", "wrong", "no answer", "no answer"]


def test_options_stand_where_the_task_and_the_question_say(tmp_path):
    """Other questions around it, other rows before it: the same order."""
    rows = gpqa_rows(6)
    first = small(task_by_name("gpqa-diamond"), 6).items(None, write(tmp_path / "a.jsonl", rows))
    second = small(task_by_name("gpqa-diamond"), 3).items(None, write(tmp_path / "b.jsonl", rows[::-2]))
    assert {item.prompt for item in second} <= {item.prompt for item in first}


# Code

HUMANEVAL = {
    "task_id": "Ours/0",
    "prompt": 'def triple(x: int) -> int:\n    """Three times x.\n    >>> triple(2)\n    6\n    """\n',
    "canonical_solution": "    return 3 * x\n",
    "entry_point": "triple",
    "test": "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 6\n    assert candidate(-1) == -3\n",
}


@needs_isolation
def test_humaneval(tmp_path):
    task = small(task_by_name("humaneval", allow_code=True), 1)
    (item,) = task.items(None, write(tmp_path / "a.parquet", [HUMANEVAL]))
    assert HUMANEVAL["canonical_solution"].strip() not in str(item.prompt)
    assert "METADATA" not in str(item.prompt)
    texts = (
        "Here:\n```python\ndef triple(x: int) -> int:\n    return x + x + x\n```",
        "```python\nfrom operator import mul\ntriple = lambda x: mul(x, 3)\n```",
        "```python\n    return 3 * x\n```",
        "    return 3 * x\n\ndef other():\n    oh no, this is no Python",
        "def triple(x):\n    return x * 3",
    )
    assert ends(task, item, *texts) == ["right"] * 5
    texts = (
        "```python\ndef triple(x):\n    return 6\n```",
        "```python\nimport os\nos._exit(0)\n```",
        "Three times x.",
        "",
    )
    assert ends(task, item, *texts) == ["wrong", "wrong", "no answer", "no answer"]
    refused = task_by_name("humaneval").grade(item, "```python\n1\n```")
    assert (refused.outcome, refused.answer) == ("refused", "1\n")


def packed(tests: list[dict]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def contest(identity: str, day: str, **more) -> dict:
    row = {
        "question_title": "Ours", "question_content": f"Problem {identity}.", "platform": "ours", "question_id": identity,
        "contest_id": "c", "contest_date": f"{day}T00:00:00", "starter_code": "", "difficulty": "easy", "metadata": "{}",
        "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
        "private_test_cases": packed([{"input": "5 6\n", "output": "11\n", "testtype": "stdin"}]),
    }  # fmt: skip
    return row | more


FUNCTION = {
    "starter_code": "class Solution:\n    def join(self, a: List[int], b: int) -> List[int]:\n        ",
    "metadata": json.dumps({"func_name": "join"}),
    "public_test_cases": json.dumps([{"input": "[1, 2]\n3", "output": "[1, 2, 3]", "testtype": "functional"}]),
    "private_test_cases": packed([{"input": "[]\n0", "output": "[0]", "testtype": "functional"}]),
}


@needs_isolation
def test_livecodebench(tmp_path):
    task = small(task_by_name("livecodebench-v6", allow_code=True), 2)
    rows = [contest("a", "2025-01-11"), contest("b", "2025-03-02", **FUNCTION)]
    script, function = task.items(None, write(tmp_path / "a.jsonl", rows))
    assert (script.id, function.id) == ("livecodebench-v6/a", "livecodebench-v6/b")
    assert script.fields == {"row": 0, "contest_date": "2025-01-11", "platform": "ours", "difficulty": "easy"}
    assert (script.answer["entry"], function.answer["entry"]) == (None, "Solution.join")
    assert json.loads(json.dumps(script.answer)) == script.answer
    assert livecodebench._tests(script.answer, "") == [["1 2\n", "3\n"], ["5 6\n", "11\n"]]
    assert livecodebench._tests(function.answer, "") == [[[[1, 2], 3], [1, 2, 3]], [[[], 0], [0]]]
    assert "class Solution" in str(function.prompt)
    texts = ("```python\nprint(sum(map(int, input().split())))\n```", "```python\nprint(3)\n```", "print(3)", "")
    assert ends(task, script, *texts) == ["right", "wrong", "no answer", "no answer"]
    body = "```python\nclass Solution:\n    def join(self, a: List[int], b: int) -> List[int]:\n        return {}\n```"
    assert ends(task, function, body.format("a + [b]"), body.format("[1, 2, 3]"), "") == ["right", "wrong", "no answer"]
    assert ends(task_by_name("livecodebench-v6"), script, texts[0]) == ["refused"]


def test_livecodebench_by_date(tmp_path):
    rows = [contest(day, f"2025-{day}") for day in ("01-31", "02-01", "04-30", "05-01")]
    file = write(tmp_path / "a.jsonl", rows)

    def kept(window: str) -> list[str]:
        task = small(task_by_name(f"livecodebench-v6:{window}"), 4)
        assert task.size is None
        items = task.items(None, file)
        assert task.size == len(items)
        return [item.id.partition("/")[2] for item in items]

    assert kept("2025-02-01:2025-05-01") == ["02-01", "04-30"]
    assert kept(":2025-02-01") == ["01-31"]
    assert kept("2025-02-01:") == ["02-01", "04-30", "05-01"]
    with pytest.raises(ValueError, match="no contest lies in the window 2026-01-01 to None"):
        small(task_by_name("livecodebench-v6:2026-01-01:"), 4).items(None, file)


class Bomb:
    def __reduce__(self):
        return (print, ("it ran",))


def test_a_pickle_of_tests_cannot_call_anything(tmp_path, capsys):
    bomb = base64.b64encode(zlib.compress(pickle.dumps(Bomb()))).decode()
    task = small(LiveCodeBench(), 1)
    with pytest.raises(
        ValueError, match=r"neither JSON nor packed JSON .*names builtins.print, a text needs no such thing"
    ):
        task.items(None, write(tmp_path / "a.jsonl", [contest("a", "2025-01-11", private_test_cases=bomb)]))
    assert "it ran" not in capsys.readouterr().out
    for more, error in (
        ({"private_test_cases": "!!"}, "private_test_cases: neither JSON nor packed JSON"),
        ({"public_test_cases": "[]", "private_test_cases": ""}, "row 0: no tests"),
        (
            {"public_test_cases": json.dumps([{"input": "", "output": "", "testtype": "other"}])},
            "stdin or functional, got 'other'",
        ),
        ({"public_test_cases": json.dumps([{"input": ""}])}, "none of the fields output, only"),
        (FUNCTION | {"metadata": "{}"}, r"no func_name in the metadata, only \[\]"),
    ):
        with pytest.raises(ValueError, match=error):
            task.items(None, write(tmp_path / "a.jsonl", [contest("a", "2025-01-11", **more)]))


# Made tasks


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [False, True])
def test_ruler(kind, template):
    tokenizer = Words(template)
    task = Ruler(kind, 600, size=6)
    items = task.items(tokenizer)
    assert len({item.id for item in items}) == len(items) == 6
    asked = 4 if kind in ("niah-multi-value", "niah-multi-query") else 1
    for item in items:
        assert len(item.prompt) == 600
        text = tokenizer.decode(item.prompt)
        assert text.startswith("[user] ") == template == text.endswith("[end][assistant] ")
        assert len(item.answer["numbers"]) == asked
        assert len(item.answer["others"]) == (3 if kind == "niah-multi-key" else 0)
        facts = re.findall(r"(?:number for \w+ is: |pass key is )(\d{5})\.", text)
        assert sorted(facts) == sorted(item.answer["numbers"] + item.answer["others"])
        question = text[text.rindex("What ") :]
        assert not any(number in question for number in item.answer["numbers"])
        said = ", ".join(item.answer["numbers"])
        assert ends(task, item, f"They are {said}.", "It is 00000.", "", "I forgot.") == [
            "right",
            "wrong",
            *["no answer"] * 2,
        ]
        first = task.grade(item, item.answer["numbers"][0])
        assert first.score == 1 / asked
        assert first.note == f"1 of {asked} numbers"
    if asked == 1:
        depths = [item.fields["depth"] for item in items]
        assert depths == [round((i + 0.5) / 6, 4) for i in range(6)]
        at = [tokenizer.decode(item.prompt).index(item.answer["numbers"][0]) for item in items]
        assert at == sorted(at)
    assert [item.prompt for item in task.items(tokenizer)] == [item.prompt for item in items]
    assert [item.answer for item in Ruler(kind, 601, size=6).items(tokenizer)] != [item.answer for item in items]


def test_ruler_reads_numbers_as_they_are_written():
    task = Ruler("niah-multi-key", 600, size=1)
    item = Item("x", [1], {"numbers": ["12345"], "others": ["54321", "11111", "22222"]})
    assert ends(task, item, "12,345", "**12345**.", "x12345", "It's 12345!") == ["right"] * 4
    assert ends(task, item, "123456", "012345", "12345.6", "1 2345", "54321") == ["no answer"] * 4 + ["wrong"]
    grade = task.grade(item, "12345, 54321 or 11111")
    assert (grade.outcome, grade.note) == ("right", "1 of 1 numbers; also 11111, 54321")
    assert task.grade(item, "<think>12345</think>54321").outcome == "wrong"


def test_ruler_hides_facts_in_a_text(tmp_path):
    text = tmp_path / "essay.txt"
    text.write_text("lorem ipsum " * 2000)
    tokenizer = Words()
    (item,) = Ruler("niah-single", 500, size=1).items(tokenizer, str(text))
    assert tokenizer.decode(item.prompt).count("lorem") > 150
    text.write_text("lorem ipsum")
    with pytest.raises(ValueError, match=r"the haystack has \d+ tokens, \d+ are needed"):
        Ruler("niah-single", 500, size=1).items(tokenizer, str(text))
    with pytest.raises(ValueError, match="length must be above the"):
        task_by_name("passkey:20").items(tokenizer)
    with pytest.raises(ValueError, match="the number of items must be at least 1, got 0"):
        Ruler("passkey", 500, size=0)


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym: pip install '.[reasoning]'")
def test_reasoning():
    from kvpop.evals.reasoning import Reasoning

    named = task_by_name("reasoning:basic_arithmetic")
    assert named.title == "Reasoning Gym basic_arithmetic"
    assert pickle.loads(pickle.dumps(named)).name == named.name
    with pytest.raises(ValueError, match=r"reasoning-gym has no task 'nothing'; it has: .*basic_arithmetic"):
        task_by_name("reasoning:nothing")
    task = Reasoning("basic_arithmetic", size=3, seed=5)
    items = task.items(None)
    assert [item.id for item in items] == [f"reasoning:basic_arithmetic/5/{i}" for i in range(3)]
    assert [item.prompt for item in Reasoning("basic_arithmetic", size=3, seed=5).items(None)] == [
        i.prompt for i in items
    ]
    assert [item.prompt for item in Reasoning("basic_arithmetic", size=3, seed=6).items(None)] != [
        i.prompt for i in items
    ]
    item = items[1]
    assert item.answer["answer"] not in ("", None)
    right = f"<answer>1e9</answer> no: <answer> {item.answer['answer']} </answer>"
    texts = (right, rf"\boxed{{{item.answer['answer']}}}", "<answer>x</answer>", "7", "", "<answer></answer>")
    assert ends(task, item, *texts) == ["right", "right", "wrong", "no answer", "no answer", "no answer"]
    with pytest.raises(ValueError, match=r"is generated, it reads no file: got a.jsonl"):
        task.items(None, "a.jsonl")
    with pytest.raises(ValueError, match="the number of items must be at least 1, got 0"):
        Reasoning("basic_arithmetic", size=0)
    long = task_by_name("reasoning:needle_haystack:min_num_statements=200:max_num_statements=210")
    assert long.name == "reasoning:needle_haystack:max_num_statements=210:min_num_statements=200"
    assert pickle.loads(pickle.dumps(long)).options == {"max_num_statements": 210, "min_num_statements": 200}
    item = long.items(None)[2]
    assert item.prompt.count(". ") > 190
    assert ends(long, item, f"<answer>{item.answer['answer']}</answer>") == ["right"]
    for rest, error in {
        "needle_haystack:statements=3": r"no option 'statements'; it has: min_num_statements, max_num_statements",
        "needle_haystack:min_num_statements=0": "does not allow {'min_num_statements': 0}: min_num_statements must be",
        "needle_haystack:many": "is written NAME=VALUE, got 'many'",
    }.items():
        with pytest.raises(ValueError, match=error):
            task_by_name(f"reasoning:{rest}")


def test_reasoning_needs_its_package(monkeypatch):
    from kvpop.evals import reasoning

    monkeypatch.setattr(reasoning, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"need the package reasoning-gym: pip install 'kvpop\[reasoning\]'"):
        task_by_name("reasoning:basic_arithmetic")


# Files

SOURCE = Source(
    "someone/questions", UNPINNED, "data/q.jsonl", "MIT", "https://huggingface.co/datasets/someone/questions"
)
ROWS = [{"q": "one", "n": 1}, {"q": "two", "n": 2}]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
def test_rows_of_a_file(tmp_path, suffix):
    rows = read_rows(Path(write(tmp_path / f"a{suffix}", ROWS)))
    assert [row["q"] for row in rows] == ["one", "two"]
    assert [int(row["n"]) for row in rows] == [1, 2]


def test_files_that_are_not_as_expected(tmp_path):
    file = write(tmp_path / "a.jsonl", ROWS)
    found = read_items(SOURCE, file)
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    assert (found.rows, found.revision, found.sha256, str(found.path)) == (ROWS, None, digest, file)
    assert read_items(replace(SOURCE, rows=2, sha256=digest), file).rows == ROWS
    with pytest.raises(ValueError, match=r"a.jsonl: it has 2 rows, someone/questions must have 30"):
        read_items(replace(SOURCE, rows=30), file)
    with pytest.raises(ValueError, match=f"its SHA-256 is {digest}, the source has {'0' * 64}"):
        read_items(replace(SOURCE, sha256="0" * 64), file)
    with pytest.raises(FileNotFoundError, match=r"no such file of items: .*none.jsonl"):
        read_items(SOURCE, tmp_path / "none.jsonl")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"must end in .parquet, .jsonl, .csv, got '.txt'"):
        read_items(SOURCE, tmp_path / "a.txt")
    for name, text, error in (
        ("b.jsonl", "{", "b.jsonl:1: not a line of JSON"),
        ("c.jsonl", "", "is empty"),
        ("d.csv", "a,b\n", "is empty"),
        ("e.csv", 'a,b\n"x"y,z\n', "e.csv:1: not a line of CSV"),
        ("f.parquet", "x", "not a parquet file"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=error):
            read_items(SOURCE, tmp_path / name)
    with pytest.raises(ValueError, match=r"here: none of the fields a, b, only \['a', 'c'\]"):
        value({"c": 1, "a": None}, ("a", "b"), "here")


class Hub:
    """A hub with one file, which may change; remembers what was asked for."""

    def __init__(self, root: Path) -> None:
        self.root, self.newest, self.asked = root, "a" * 40, []
        self.put("a" * 40, ROWS)

    def put(self, commit: str, rows: list[dict]) -> None:
        path = self.root / "snapshots" / commit / "data" / "q.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, rows)

    def download(self, hub, file, *, revision, repo_type):
        assert (hub, repo_type) == ("someone/questions", "dataset")
        self.asked.append(revision)
        path = self.root / "snapshots" / (self.newest if revision == "main" else revision) / file
        if not path.exists():
            raise OSError("404: no such revision\nmore")
        return str(path)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    import huggingface_hub

    made = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", made.download)
    monkeypatch.setenv(sources.LOCK_VARIABLE, str(tmp_path / "locks" / "evals.json"))
    return made


def test_the_first_download_is_remembered_and_stays(hub):
    found = read_items(SOURCE)
    assert (found.rows, found.revision) == (ROWS, "a" * 40)
    entry = json.loads(sources.lock_path().read_text())
    assert entry == {"someone/questions/data/q.jsonl": {"revision": "a" * 40, "sha256": found.sha256, "rows": 2}}
    hub.newest = "b" * 40
    hub.put("b" * 40, [*ROWS, *ROWS])
    assert read_items(SOURCE).revision == "a" * 40
    assert hub.asked == ["main", "a" * 40]
    hub.put("a" * 40, [ROWS[0], {"q": "other", "n": 2}])  # what stands in the cache was changed
    with pytest.raises(ValueError, match=r"its SHA-256 is \w+, the lock file .*evals.json has "):
        read_items(SOURCE)


def test_a_pinned_revision(hub):
    hub.put("b" * 40, [ROWS[0]])
    pinned = replace(SOURCE, revision="b" * 40)
    assert read_items(pinned).rows == ROWS[:1]
    assert hub.asked == ["b" * 40]
    assert read_items(SOURCE).revision == "b" * 40  # from here on it is locked
    with pytest.raises(ValueError, match=f"has the commit {'b' * 40}, asked for is {'a' * 40}; remove its entry"):
        read_items(replace(SOURCE, revision="a" * 40))
    with pytest.raises(ValueError, match="a revision is a commit of 40 hex digits or 'main', got 'v1'"):
        read_items(replace(SOURCE, revision="v1"))


def test_what_is_refused_is_not_locked(hub):
    with pytest.raises(ValueError, match="it has 2 rows"):
        read_items(replace(SOURCE, rows=3))
    assert not sources.lock_path().exists()
    with pytest.raises(FileNotFoundError, match=rf"at {'c' * 40} \(OSError: 404: no such revision\).*hf auth login"):
        read_items(replace(SOURCE, revision="c" * 40))
    for text in ("{", "[]", '{"x": {}}', '{"x": 1}'):
        sources.lock_path().parent.mkdir(exist_ok=True)
        sources.lock_path().write_text(text)
        with pytest.raises(ValueError, match=r"the lock file .*evals.json is broken"):
            read_items(SOURCE)


def test_a_local_file_takes_no_notice_of_the_lock(hub, tmp_path):
    read_items(SOURCE)
    assert len(read_items(SOURCE, write(tmp_path / "own.jsonl", ROWS[:1])).rows) == 1


def test_the_lock_stands_beside_the_cache(monkeypatch):
    from huggingface_hub.constants import HF_HUB_CACHE

    monkeypatch.delenv(sources.LOCK_VARIABLE, raising=False)
    assert sources.lock_path() == Path(HF_HUB_CACHE).parent / "kvpop-evals.lock.json"


def test_without_a_hub_it_is_said_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv(sources.LOCK_VARIABLE, str(tmp_path / "lock.json"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"gpqa_diamond.csv could not be downloaded .*or name a local file"):
        task_by_name("gpqa-diamond").items(None)

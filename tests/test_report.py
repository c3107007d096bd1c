"""The tables: numbers as computed by hand, the layout line by line, the paper's figures beside ours, and nothing guessed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvpop.evals import paper
from kvpop.evals.report import build, escaped, latex, markdown, read_results

DECODING = {"temperature": 0.6, "top_p": 0.95, "top_k": 0, "max_new_tokens": 32768, "thinking": None, "stop": [2]}
BUDGET = {"sinks": 4, "window": 64, "long": 4028, "heads": []}
TITLES = {"aime-2024": "AIME 2024", "gsm8k": "GSM8K", "ruler_4k": "RULER_4k & more"} | {
    name: title for table in paper.TABLES for name, title in table.columns.items()
}
POLICIES = {
    "dense": ("Dense", {}, None),
    "streaming": ("Streaming", {"positions": "original"}, None),
    "streaming+": ("Streaming", {"positions": "original"}, "f00d" * 16),
    "tova": ("Tova", {}, None),
    "dms": ("DMS", {"ratio": 4.0}, "beef" * 16),
    "kvpop-mlp": ("KVpop", {"scorer": "mlp"}, "cafe" * 16),
    "kvpop": ("KVpop", {"scorer": "mlp+mlstm"}, "abcd" * 16),
}


def write(
    folder, scores, task="aime-2024", policy="dense", slots=None, model="Qwen/Qwen3-4B-Instruct-2507", capped=(), size=None,
    expected=None, weights="w", grader="g", held=(), **decoding,
):  # fmt: skip
    """A directory as a graded run leaves it. ``scores``: those of every item; ``held``: the share that its cache held."""
    folder.mkdir(parents=True)
    kind, settings, adapter = POLICIES[policy]
    rollouts = expected or max(map(len, scores))
    (folder / "rollouts.json").write_text(
        json.dumps(
            {
                "format": 1,
                "task": {
                    "name": task, "title": TITLES[task], "citation": "Somebody", "size": size or len(scores), "source": None,
                    "checksum": None, "prompts": "p",
                },
                "decoding": DECODING | decoding,
                "model": {"id": model, "revision": "r1", "weights": weights, "dtype": "bfloat16"},
                "policy": {"name": policy, "kind": kind, "settings": settings, "adapter": adapter},
                "budget": {"slots": slots, "bytes": slots and slots * 100, "dense_bytes_per_token": 100},
                "extent": {"items": len(scores), "rollouts": rollouts},
                "runs": [{"versions": {"kvpop": "0.1"}, "device": "gpu", "command": ["kvpop", "tasks", "run", "a_b"]}],
            }
        )
    )  # fmt: skip
    (folder / "grades.json").write_text(json.dumps({"grader": grader}))
    rows = [
        {
            "item": f"q{i}", "index": i, "rollout": r, "score": score, "outcome": "right" if score else "wrong",
            "tokens": 10, "capped": (i, r) in capped, "empty": False, "loop": 0,
            "prompt_tokens": 991, **({"held": held[i]} if held and held[i] else {}),
        }
        for i, own in enumerate(scores)
        for r, score in enumerate(own)
    ]  # fmt: skip
    (folder / "grades.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def report(*folders, **options):
    return build(read_results(folders, **options), draws=200)


def row_of(table, label, group=None):
    (row,) = [row for row in table["rows"] if row["label"] == label and (group is None or row["group"] == group)]
    return row


# The paper's figures


def test_the_papers_averages_follow_from_its_figures():
    for _, rows in paper.TABLE_1.models.values():
        assert [variant for variant, _, _ in rows] == ["Teacher", *paper.VARIANTS[1:] * 2]
        teacher = rows[0][2][4]
        for _, ratio, figures in rows:
            assert ratio in (0.0, *paper.RATIOS)
            assert len(figures) == 6
            assert abs(sum(figures[:4]) / 4 - figures[4]) <= 0.0101
            low, high = (figures[4] - 0.005) / (teacher + 0.005), (figures[4] + 0.005) / (teacher - 0.005)
            assert low - 0.005 <= figures[5] <= high + 0.005
    total = sum(sum(figures[:4]) for _, rows in paper.TABLE_1.models.values() for _, _, figures in rows)
    assert total == pytest.approx(35.94)
    assert sum(sum(figures) for _, _, figures in paper.TABLE_2.models["Qwen3-4B-Instruct-2507"][1]) == pytest.approx(
        11.64
    )


def test_a_report_needs_no_torch(tmp_path):
    """Nor seconds to import it."""
    for name, policy in (("t", "dense"), ("s", "kvpop")):
        write(tmp_path / name, [[1, 1], [1, 0], [0, 1]], policy=policy, slots=None if policy == "dense" else 4096)
    code = (
        "import sys; from typer.testing import CliRunner; from kvpop.cli import app; "
        f"done = CliRunner().invoke(app, ['report', {str(tmp_path)!r}, '--draws', '20']); "
        "print(done.exit_code, [name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "0 []"


# Numbers


def test_numbers_are_those_computed_by_hand(tmp_path):
    write(tmp_path / "t", [[1, 1], [1, 0], [0, 0], [1, 1]], capped={(1, 1), (2, 0)})
    write(tmp_path / "s", [[1, 0], [1, 0], [0, 0], [1, 1]], policy="kvpop", slots=4096)
    built = report(tmp_path)
    (table,) = built["tables"]
    teacher, ours = row_of(table, "Teacher"), row_of(table, "KVpop", 0.75)
    assert teacher["cells"][0]["score"]["value"] == 0.625
    assert teacher["cells"][0]["tally"] | {"tokens": 0} == {
        "rollouts": 8, "right": 5, "wrong": 3, "no answer": 0, "timeout": 0, "refused": 0, "capped": 2, "empty": 0,
        "loops": 0, "tokens": 0,
    }  # fmt: skip
    comparison = ours["cells"][0]["comparison"]
    assert comparison["difference"]["value"] == -0.125
    assert comparison["retention"]["value"] == pytest.approx(0.8)
    assert comparison["resolution"] == pytest.approx(1.959964 * 0.125)  # differences -1/2, 0, 0, 0: sd 1/4, n 4
    assert (comparison["items"], comparison["rollouts"]) == (4, "2")
    assert ours["paper"] == [0.62, 0.44, 0.31, 0.39, 0.44, 0.98]
    assert ours["cells"][1:] == [None] * 3
    assert (ours["average"], ours["relative"]) == (None, None)
    places = {result["method"]: result for result in built["results"]}
    assert places["KVpop"]["pass_at_k"] == {"2": 0.75}
    assert places["KVpop"]["compression"] == 0.75
    assert len(table["rows"]) == 13


def test_average_and_retention_over_tasks(tmp_path):
    for n, task in enumerate(paper.TABLE_1.columns):
        write(tmp_path / f"t{n}", [[1], [1], [0], [n % 2]], task)
        write(tmp_path / f"s{n}", [[1], [0], [0], [n % 2]], task, "streaming", 2048)
    (table,) = report(tmp_path)["tables"]
    row = row_of(table, "StreamLLM", 0.875)
    assert row["average"]["value"] == pytest.approx(0.375)
    assert row["relative"]["value"] == pytest.approx(0.375 / 0.625)
    assert row_of(table, "Teacher")["relative"] == {"value": 1.0, "low": None, "high": None, "note": ""}
    assert sum("the average of the 4 tasks" in said for said in table["sentences"]) == 1
    assert row_of(table, "KVpop", 0.875)["cells"] == [None] * 4


def test_a_teacher_that_scores_nothing_is_no_division(tmp_path):
    write(tmp_path / "t", [[0], [0]], "gsm8k")
    write(tmp_path / "s", [[1], [0]], "gsm8k", "tova", 4096)
    (table,) = report(tmp_path)["tables"]
    assert row_of(table, "TOVA")["relative"]["value"] is None
    assert row_of(table, "Teacher")["relative"]["value"] is None
    assert "Retention is not given: the teacher scores 0" in table["sentences"][0]


# Which rows there are


def test_methods_stand_under_the_papers_names_and_ratios(tmp_path):
    for n, (policy, slots) in enumerate(
        [("kvpop", 4000), ("kvpop", 2048), ("dms", None), ("dense", None), ("streaming", 4096), ("streaming+", 4096),
         ("kvpop-mlp", 4096), ("tova", 8000)]
    ):  # fmt: skip
        write(tmp_path / str(n), [[1], [0]], "gsm8k", policy, slots)
    (table,) = report(tmp_path)["tables"]
    assert [(row["label"], row["group"]) for row in table["rows"]] == [
        ("Teacher", 0.0), ("TOVA", pytest.approx(0.5117, abs=1e-4)), ("StreamLLM", 0.75), ("StreamLLM+", 0.75),
            ("DMS [unknown number of tokens held]", 0.75),
        ("KVpop mlp", 0.75), ("KVpop", 0.75), ("KVpop", 0.875),
    ]  # fmt: skip
    assert report(tmp_path, context=32768)["tables"][0]["rows"][-1]["group"] == 0.9375


def test_a_cache_that_grows_is_shown_with_what_it_held(tmp_path):
    """It stands under the ratio that it aims at, whatever it holds."""
    for name, task, held in (("a", "gsm8k", [300, 400]), ("b", "ruler_4k", [1250, 1251])):
        write(tmp_path / name, [[1], [0]], task, "dms", held=held)
        write(tmp_path / f"{name}t", [[1], [1]], task)
    (table,) = report(tmp_path)["tables"]
    (row,) = [row for row in table["rows"] if row["group"] == 0.75]
    assert row["label"] == "DMS [350 to 1,250 tokens held]"
    assert [cell["held"] for cell in row["cells"]] == pytest.approx([350, 1250.5])
    said = "a KV head held 350 tokens at the end of a rollout, on average, of the 1,000 it had taken in (35%, 25% was the aim)"
    assert sum(said in note for note in table["notes"]) == 1
    assert all(said.startswith("DMS [350 to 1,250 tokens held] at 75% scores") for said in table["sentences"])


def test_what_was_held_in_some_rollouts_is_not_said_of_all(tmp_path):
    write(tmp_path / "a", [[1], [0]], "gsm8k", "dms", held=[300, None])
    (table,) = report(tmp_path)["tables"]
    assert [row["label"] for row in table["rows"]] == ["DMS [unknown number of tokens held]"]
    assert "how much of it was held is not in (all of) the grades" in table["notes"][0]


def test_two_of_one_name_are_told_apart(tmp_path):
    write(tmp_path / "a", [[1], [0]], "gsm8k", "kvpop", 4096)
    write(tmp_path / "b", [[1], [1]], "gsm8k", "kvpop", 4000)
    labels = [row["label"] for row in report(tmp_path)["tables"][0]["rows"]]
    assert labels == ["KVpop, 4000 slots", "KVpop, 4096 slots"]
    write(tmp_path / "c", [[1], [1]], "gsm8k", "kvpop", 4000)
    with pytest.raises(
        ValueError, match=r"/b and .*/c are both KVpop on gsm8k, sampled alike; .* \(nothing\): give one"
    ):
        report(tmp_path)


def test_of_two_that_differ_in_more_than_sampling_the_difference_is_named(tmp_path):
    write(tmp_path / "a", [[1], [0], [1]], "gsm8k", "kvpop", 4096, size=3)
    write(tmp_path / "b", [[1], [0]], "gsm8k", "kvpop", 4096, size=3, weights="v")
    message = r"/a and .*/b are both .*\(extent\.items 3, now 2; model\.weights 'w', now 'v'\): give one of them"
    with pytest.raises(ValueError, match=message):
        report(tmp_path)


def test_labels_say_in_what_policies_of_one_name_differ(tmp_path, monkeypatch):
    for n, adapter in enumerate(["1234abcd" * 8, "5678abcd" * 8]):
        monkeypatch.setitem(POLICIES, "kvpop", ("KVpop", {"scorer": "mlp+mlstm"}, adapter))
        write(tmp_path / f"k{n}", [[1], [0]], "gsm8k", "kvpop", 4096)
    for n, window in enumerate([64, 256]):
        settings = {"budget": {"sinks": 4, "window": window}, "positions": "original"}
        monkeypatch.setitem(POLICIES, "streaming", ("Streaming", settings, None))
        write(tmp_path / f"s{n}", [[1], [0]], "gsm8k", "streaming", 4096)
    assert [row["label"] for row in report(tmp_path)["tables"][0]["rows"]] == [
        "StreamLLM, window 256", "StreamLLM, window 64", "KVpop, adapter 1234abcd", "KVpop, adapter 5678abcd",
    ]  # fmt: skip


def test_ways_of_sampling_are_rows_each_beside_its_own_teacher(tmp_path):
    write(tmp_path / "t6", [[1], [1], [0]], "gsm8k")
    write(tmp_path / "t10", [[1], [0], [0]], "gsm8k", temperature=1.0)
    write(tmp_path / "k6", [[1], [0], [0]], "gsm8k", "kvpop", 4096)
    write(tmp_path / "k10", [[1], [0], [0]], "gsm8k", "kvpop", 4096, temperature=1.0)
    write(tmp_path / "k10-long", [[1], [1], [1]], "gsm8k", "kvpop", 4096, temperature=1.0, max_new_tokens=65536)
    write(tmp_path / "r6", [[1], [0]], "ruler_4k", "kvpop", 4096)
    (table,) = report(tmp_path)["tables"]
    long = "max new tokens 65536"
    assert [row["label"] for row in table["rows"]] == [
        "Teacher", "Teacher, temperature 1", "KVpop", f"KVpop, {long}, temperature 1", "KVpop, temperature 1",
    ]  # fmt: skip
    teacher6, teacher10, own6, longer, own10 = table["rows"]
    assert (own6["cells"][0]["score"]["value"], own6["cells"][0]["comparison"]["teacher"]) == (1 / 3, 2 / 3)
    assert (own10["cells"][0]["comparison"]["teacher"], longer["cells"][0]["comparison"]) == (1 / 3, None)
    assert (own6["cells"][1]["score"]["value"], own10["cells"][1]) == (0.5, None)
    (note,) = [note for note in table["notes"] if note.startswith(f"KVpop, {long}")]
    assert f"/t10 and {tmp_path}/k10-long differs (decoding.max_new_tokens 32768, now 65536)" in note
    assert (teacher6["relative"], teacher10["cells"][1]) == (None, None)
    (one,) = report(tmp_path / "t6", tmp_path / "t10", tmp_path / "k10")["tables"]
    assert [row["label"] for row in one["rows"]] == ["Teacher", "Teacher, temperature 0.6", "KVpop"]
    assert [row["relative"]["value"] for row in one["rows"]] == [1.0, 1.0, 1.0]


def test_one_run_sampled_otherwise_leaves_all_other_rows_whole(tmp_path):
    for policy, slots in (("dense", None), ("streaming", 4096)):
        write(tmp_path / policy / "a", [[1], [0]], "ruler_4k", policy, slots, max_new_tokens=4)
        write(tmp_path / policy / "b", [[1], [0]], "gsm8k", policy, slots, max_new_tokens=6)
    write(tmp_path / "more", [[1], [0]], "ruler_4k", "streaming", 4096, max_new_tokens=5)
    (table,) = report(tmp_path)["tables"]
    assert [(row["label"], row["average"] is None) for row in table["rows"]] == [
        ("Teacher", False), ("StreamLLM", False), ("StreamLLM, max new tokens 5", True),
    ]  # fmt: skip
    assert table["rows"][1]["relative"]["value"] == 1.0


def test_policies_that_were_sampled_differently_say_so(tmp_path):
    write(tmp_path / "t", [[1], [0]], "gsm8k", "tova", 4096, temperature=0.5)
    write(tmp_path / "s", [[1], [0]], "gsm8k", "streaming", 4096, thinking=True)
    (table,) = report(tmp_path)["tables"]
    assert [row["label"] for row in table["rows"]] == ["StreamLLM, temperature 0.6, thinking on", "TOVA"]


def test_tables_are_by_model_and_kind_of_task(tmp_path):
    write(tmp_path / "a", [[1], [0]], "gpqa-diamond", model="x/Qwen3-4B-Instruct-2507")
    write(tmp_path / "b", [[1], [0]], "gsm8k", model="x/Qwen3-4B-Instruct-2507")
    write(tmp_path / "c", [[1], [0]], "aime-2024", model="small")
    write(tmp_path / "d", [[1], [0]], "gpqa-diamond", model="small", policy="tova", slots=4096)
    tables = report(tmp_path)["tables"]
    assert [(table["title"], table["number"], len(table["rows"])) for table in tables] == [
        ("GPQA-D and LCB, Qwen3 4B", 2, 13),
        ("Accuracy, x/Qwen3-4B-Instruct-2507", None, 1),
        ("Pass@1 on AIME and HMMT, small", 1, 1),
        ("GPQA-D and LCB, small", 2, 1),
    ]
    assert row_of(tables[0], "Teacher")["paper"] == [0.59, 0.35]
    assert tables[3]["notes"] == [
        "TOVA at 75% on GPQA-D is not compared with the teacher: the teacher has no result there."
    ]


# What is not whole, or not comparable


def test_what_is_not_comparable_is_said(tmp_path):
    write(tmp_path / "t", [[1], [0], [1]], "gsm8k")
    ways = [
        ({"temperature": 1.0}, "the decoding of {} differs (decoding.temperature 0.6, now 1.0)"),
        ({"weights": "v"}, "the model of {} differs (model.weights 'w', now 'v')"),
        ({"grader": "h"}, "{} were graded by different graders"),
        ({"size": 9}, "the task of {} differs (task.size 3, now 9)"),
    ]
    for n, (way, message) in enumerate(ways):
        write(tmp_path / "s" / str(n), [[1], [0], [1]], "gsm8k", "tova", 4096, **way)
        (table,) = report(tmp_path / "t", tmp_path / "s" / str(n))["tables"]
        said = message.format(f"{tmp_path / 't'} and {tmp_path / 's' / str(n)}")
        label = "TOVA, temperature 1" if "temperature" in way else "TOVA"
        assert f"{label} at 75% on GSM8K is not compared with the teacher: {said}." in table["notes"]
        assert row_of(table, label)["relative"] is None
        assert row_of(table, label)["average"] is not None


def test_a_part_of_a_task_is_marked(tmp_path):
    write(tmp_path / "t", [[1, 0], [0, 0]], "gsm8k", size=2)
    write(tmp_path / "s", [[1, 0], [0]], "gsm8k", "tova", 4096, size=2, expected=2)
    built = report(tmp_path)
    assert "TOVA at 75% on GSM8K: 3 of 4 rollouts graded." in built["tables"][0]["notes"]
    assert "| TOVA | 0.250* [0.000, 0.500] (0.0/0.0/0.0) | 0.250* [0.000, 0.500] | 1.000* [" in markdown(built)
    write(tmp_path / "p", [[1]], "gsm8k", "streaming", 4096, size=2)
    built = report(tmp_path)
    notes = built["tables"][0]["notes"]
    assert "StreamLLM at 75% on GSM8K: the first 1 of 2 problems." in notes
    assert any("not the same items on both sides: 1 have no partner, the first is q1" in note for note in notes)
    assert "| StreamLLM | 1.000* (0.0" in markdown(built)


def test_what_was_not_graded_is_noted(tmp_path):
    write(tmp_path / "t", [[0, 0], [1, 1]], "gsm8k")
    grades = tmp_path / "t" / "grades.jsonl"
    grades.write_text(grades.read_text().replace('"wrong"', '"timeout"', 1).replace('"wrong"', '"refused"', 1))
    assert report(tmp_path)["tables"][0]["notes"] == [
        "Teacher on GSM8K: 1 of 4 rollouts took their grader too long and count as wrong.",
        "Teacher on GSM8K: 1 of 4 rollouts hold code that was not run and count as wrong.",
    ]


def test_files_that_are_no_results_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no graded rollouts in or below"):
        read_results([tmp_path])
    write(tmp_path / "t", [[1]])
    with pytest.raises(ValueError, match="--context must be at least 1 token, got 0"):
        read_results([tmp_path], context=0)
    (tmp_path / "t" / "grades.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no grades"):
        read_results([tmp_path])
    (tmp_path / "t" / "rollouts.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no rollouts\.json"):
        read_results([tmp_path])


# How it is written


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("t"), [[1, 1], [1, 1]], "gsm8k", model="a_model")
    write(Path("s"), [[1, 1], [0, 0]], "gsm8k", "kvpop", 2048, model="a_model", capped={(0, 0)})
    write(Path("r"), [[0, 0], [0, 0]], "ruler_4k", "kvpop", 2048, model="a_model")
    return build(read_results(["t", "s", "r"]), ["kvpop", "report", "t"], draws=2000)


MARKDOWN = """\
## Accuracy, a_model

| Variant | GSM8K | RULER_4k & more | Average Abs. | Rel. |
|---|---:|---:|---:|---:|
| Teacher | 1.000 [1.000, 1.000] (0.0/0.0/0.0) | - | - | - |
| **CR=88%** |  |  |  |  |
| KVpop | 0.500 [0.000, 1.000] (25.0/0.0/0.0) | 0.000 [0.000, 0.000] (0.0/0.0/0.0) | 0.250 [0.000, 0.500] | - |

- KVpop at 88% on RULER_4k & more is not compared with the teacher: the teacher has no result there.
- KVpop at 88% scores 0.500 on GSM8K, the dense teacher 1.000: a difference of -0.500 [-1.000, +0.000]. The interval contains \
0: 2 problems x 2 rollouts do not tell the two apart. With this variance between problems, differences below 0.980 do not show \
at 95 %, and a true difference of 1.401 would show in 4 of 5 such samples. Retention is 0.500 [0.000, 1.000].

"""
LATEX = r"""% needs \usepackage{booktabs}
\begin{table}
\caption{Accuracy, a\_model}
\begin{tabular}{lrrrr}
\toprule
Variant & GSM8K & RULER\_4k \& more & Average Abs. & Rel. \\
\midrule
Teacher & 1.000 [1.000, 1.000] (0.0/0.0/0.0) & - & - & - \\
\midrule
\multicolumn{5}{l}{CR=88\%} \\
KVpop & 0.500 [0.000, 1.000] (25.0/0.0/0.0) & 0.000 [0.000, 0.000] (0.0/0.0/0.0) & 0.250 [0.000, 0.500] & - \\
\bottomrule
\end{tabular}
\end{table}
\begin{itemize}
\item KVpop at 88\% on RULER\_4k \& more is not compared with the teacher: the teacher has no result there.
"""
CAME_FROM = (
    "- KVpop on GSM8K, s: model a_model, revision r1, weights w, bfloat16; policy kvpop, adapter "
    + "abcd" * 16
    + "; 2,048 "
    "slots a KV head, 204,800 bytes a sequence; 2 problems x 2 rollouts, temperature 0.6, top-p 0.95, top-k 0, at most 32,768 "
    "new tokens; seeds: SHA-256 of task, item and rollout; items: made items, checksum none, prompts p; grader g; outcomes: "
    "2 right, 2 wrong; pass@2 0.500; kvpop 0.1; device gpu; command: kvpop tasks run a_b."
)


def test_markdown_line_by_line(small):
    text = markdown(small)
    assert text.startswith(MARKDOWN)
    assert CAME_FROM in text.splitlines()
    assert "CR is the share of a dense cache of 16,384 tokens that is not held." in text
    assert "Intervals: 2,000 draws, seed 0." in text
    assert paper.CITATION in text
    assert text.splitlines()[-1] == "Report: kvpop report t"


def test_latex_line_by_line(small):
    text = latex(small)
    assert text.startswith(LATEX)
    assert r"command: kvpop tasks run a\_b." in text
    assert text.count(r"\begin{itemize}") == text.count(r"\end{itemize}") == 2
    for line in text.splitlines()[1:]:
        assert not [c for c in "%#$" if c in line.replace(f"\\{c}", "")]
    assert escaped("a\\b~c^d{e}<f>\ng&") == (
        r"a\textbackslash{}b\textasciitilde{}c\textasciicircum{}d\{e\}\textless{}f\textgreater{} g\&"
    )


def test_the_papers_figures_stand_below_ours(tmp_path):
    write(tmp_path / "t", [[1, 1], [0, 1]])
    lines = markdown(report(tmp_path)).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("| Teacher"))
    assert lines[at] == "| Teacher | 0.750 [0.500, 1.000] (0.0/0.0/0.0) | - | - | - | - | - |"
    assert lines[at + 1] == "| *paper* | *0.61* | *0.46* | *0.30* | *0.43* | *0.45* | *1.00* |"
    assert lines[at + 2] == "| **CR=75%** |  |  |  |  |  |  |"
    assert lines[at + 3 : at + 5] == [
        "| StreamLLM | - | - | - | - | - | - |", "| *paper* | *0.47* | *0.33* | *0.24* | *0.33* | *0.34* | *0.76* |",
    ]  # fmt: skip
    assert r"\textit{paper} & \textit{0.47} &" in latex(report(tmp_path))


def test_json_holds_all_of_it(small):
    assert json.loads(json.dumps(small)) == small
    assert small["command"] == ["kvpop", "report", "t"]
    assert [result["directory"] for result in small["results"]] == ["t", "s", "r"]


def test_order_of_rollouts_and_directories_changes_nothing(tmp_path):
    write(tmp_path / "t", [[1, 0], [1, 1], [0, 0]], "gsm8k")
    write(tmp_path / "s", [[1, 1], [0, 1], [0, 0]], "gsm8k", "tova", 4096)
    before = report(tmp_path / "t", tmp_path / "s")["tables"]
    grades = tmp_path / "s" / "grades.jsonl"
    grades.write_text("".join(reversed(grades.read_text().splitlines(keepends=True))))
    assert report(tmp_path / "s", tmp_path / "t")["tables"] == before

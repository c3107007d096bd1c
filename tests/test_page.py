"""The command that measures the page of speed: parts that are whole, cut or left out, and the lines that rows allow."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from kvpop.cli import app

SPEC = importlib.util.spec_from_file_location("page", Path(__file__).parent.parent / "benchmarks" / "page.py")
assert SPEC is not None
assert SPEC.loader is not None
page: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(page)

FAKE = """
import json, signal, sys, time
rows, seconds, stubborn = (int(x) for x in sys.argv[1:4])
if stubborn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
found = [{"ms": i + 1 / 3} for i in range(rows)]
for row in found:
    print(json.dumps(row), flush=True)
time.sleep(seconds)
result = {"machine": "a GPU", "versions": {"torch": "2"}, "rows": found}
print(json.dumps(result))
open(sys.argv[sys.argv.index("--out") + 1], "w").write(json.dumps(result))
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Set the parts to fakes: (limit, rows they print, seconds they sleep then, whether they ignore an interrupt)."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def these(**fakes: tuple[float, int, int, int]) -> Path:
        commands = {name: (x[0], f"python {script} {x[1]} {x[2]} {x[3]}") for name, x in fakes.items()}
        monkeypatch.setattr(page, "PARTS", commands)
        monkeypatch.setattr(page, "GRACE", 0.3)
        (tmp_path / "out").mkdir(exist_ok=True)
        return tmp_path / "out"

    return these


def main(monkeypatch, *words: object) -> Any:
    monkeypatch.setattr(sys, "argv", ["page.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        page.main()
    return ended.value.code


def test_what_is_whole_is_not_run_again_unless_its_command_is_another(parts, capsys):
    out = parts(first=(20, 2, 0, 0), second=(20, 1, 0, 0))
    assert page.run(out, ["second", "first"], 60)
    first = json.loads((out / "first.json").read_text())
    assert first["whole"]
    assert first["machine"] == "a GPU"
    assert len(first["rows"]) == 2
    assert "--out" not in first["command"]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in printed] == ["first", "second"]
    assert page.run(out, ["first", "second"], 60)
    assert capsys.readouterr().out.splitlines() == ["first: there already", "second: there already"]
    parts(first=(20, 3, 0, 0))
    assert page.run(out, ["first"], 60)
    assert len(json.loads((out / "first.json").read_text())["rows"]) == 3


@pytest.mark.parametrize("stubborn", [0, 1])
def test_a_part_that_was_cut_keeps_its_rows_and_is_run_again(parts, capsys, stubborn):
    out = parts(slow=(20, 2, 60, stubborn), never=(20, 1, 0, 0))
    assert not page.run(out, ["slow", "never"], 2)
    slow = json.loads((out / "slow.json").read_text())
    assert not slow["whole"]
    assert slow["rows"] == [{"ms": 1 / 3}, {"ms": 4 / 3}]
    said = capsys.readouterr().out
    assert "2 rows, cut" in said
    assert "never: not begun" in said
    assert not (out / "never.json").exists()
    assert not page.run(out, ["slow"], 0.01)  # so short that it has no row: those from before stay
    assert json.loads((out / "slow.json").read_text()) == slow


def test_an_interrupt_ends_the_part_and_keeps_its_rows(parts, monkeypatch, capsys):
    out, begun = parts(slow=(30, 1, 60, 0), later=(20, 1, 0, 0)), []
    wait = subprocess.Popen.wait

    def interrupted(process, timeout=None):
        if begun:
            return wait(process, timeout)
        begun.append(process)
        while not (out / "slow.log").read_text():
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    monkeypatch.setattr(page.signal, "signal", lambda *_: None)  # this process keeps its handlers
    assert main(monkeypatch, "run", "--out", out) == 130
    assert begun[0].returncode != 0
    assert json.loads((out / "slow.json").read_text())["rows"] == [{"ms": 1 / 3}]
    assert not (out / "later.json").exists()
    assert "interrupted" in capsys.readouterr().err


def test_arguments_that_cannot_be_are_named(tmp_path, monkeypatch, capsys):
    assert main(monkeypatch, "run", "--out", tmp_path, "--only", "decode") == 2
    said = capsys.readouterr().err
    assert "'decode'" in said
    assert all(name in said for name in page.PARTS)
    assert main(monkeypatch, "run", "--out", tmp_path, "--seconds", 0) == 2
    assert "got 0" in capsys.readouterr().err
    assert main(monkeypatch, "show", tmp_path, "--out", tmp_path / "x.json") == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_the_commands_of_parts_are_ones_that_exist():
    for _, command in page.PARTS.values():
        program, *words = shlex.split(command)
        if program == "python":
            assert (page.ROOT / words[0]).is_file()
            continue
        group: Any = get_command(app)
        for word in words[:2]:
            group = group.get_command(None, word)
        group.make_context("decode", [*words[2:], "--out", "x"])


def part(name: str, *rows: dict[str, Any]) -> dict[str, Any]:
    return {
        "command": page.PARTS[name][1], "whole": True, "rc": 0, "seconds": 1.5, "commit": "abc", "machine": "a GPU",
        "versions": {"torch": "2"}, "bandwidth_gb_s": 4281.12345, "rows": list(rows),
    }  # fmt: skip


def test_show_writes_rows_and_prints_what_they_allow(tmp_path, monkeypatch, capsys):
    decoded = {"policy": "kvpop-mlstm", "batch": 32, "floor_ms": 8.0, "ratio": 1.2, "formula_gb": 36.0}
    dense = {"policy": "dense", "batch": 8, "floor_ms": 8.0, "ratio": 1.15}
    found = {
        "decode-kvpop": part(
            "decode-kvpop",
            {**decoded, "seen": 16384, "ms_per_token": 9.35, "peak_gb": 36.5},
            {**decoded, "seen": 131072, "ms_per_token": 9.87, "peak_gb": 36.123456},
        ),
        "decode-dense": part(
            "decode-dense",
            {**dense, "seen": 16384, "ms_per_token": 9.2},
            {"policy": "dense", "batch": 8, "seen": 131072, "skipped": "out of memory"},
        ),
        "parts": part("parts", {"part": "future mass, Triton", "S": 16384, "ms": 2.5, "floor_ms": 1.0, "ratio": 2.5}),
        "train-16k": part(
            "train-16k", {"policy": "dense", "seconds": 0.5}, {"policy": "kvpop-mlp", "seconds": 0.55}
        ),
    }  # fmt: skip
    for name, x in found.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(x))
    monkeypatch.setattr(sys, "argv", ["page.py", "show", str(tmp_path), "--out", str(tmp_path / "speed" / "x.json")])
    page.main()
    text = (tmp_path / "speed" / "x.json").read_text()
    result = json.loads(text)
    assert (result["machine"], result["commit"], result["versions"]["torch"]) == ("a GPU", "abc", "2")
    assert result["parts"]["parts"]["bandwidth_gb_s"] == 4281.1
    assert sum('"from"' in line for line in text.splitlines()) == len(result["rows"]) == 7
    assert result["rows"][1]["peak_gb"] == 36.123
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| what | floor | simple | ours | ratio to floor | target |"

    def line(*words: str) -> str:
        (one,) = (x for x in lines if all(word in x for word in words))
        return one.split(" | ", 1)[1]

    assert line("mLSTM, batch 32, 16k") == "8 | - | 9.35 / 9.87 | 1.2 / 1.2 | 9.4: reached / **missed by 5 %** |"
    assert line("decode, KVpop, mLSTM", "131k to 16k") == "- | - | - / - / 1.056 | - | 1.02: **missed by 3.5 %** |"
    assert line("decode, KVpop, mLSTM", "peak") == "- | - | - / - / 0.123 | - | .3: reached |"
    assert line("own store, batch 8, 16k") == "8 / - | - | 9.2 / does not fit | 1.15 / - |  |"
    assert line("future mass") == "1 | not measured | 2.5 | 2.5 | 3: reached |"
    assert line("training step", "16k") == "- | - | 1.1 / - | - | 1.15: reached |"
    assert line("training step", "65k") == "- | - | not measured | - | below 1 |"
    assert line("step of a store, batch 1,") == "- | not measured | not measured | - | 3 above plain |"

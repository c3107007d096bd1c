"""The scripts of runs/: every command they print is one that the command line takes, and the quick ones run."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.main import get_command
from typer.testing import CliRunner

from kvpop import evals
from kvpop.cli import app
from kvpop.evals import paper
from kvpop.recipes import recipe_by_name
from tests.tiny import SIZES, randomise

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs"
SCRIPTS = sorted(path.stem for path in RUNS.glob("*.sh") if path.stem != "settings")
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def script(name: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "TMPDIR", "PYTHONPATH")}
    return subprocess.run(
        ["bash", str(RUNS / f"{name}.sh"), *words], env=clean | environment, capture_output=True, text=True, cwd=ROOT
    )


def printed(name: str, *words: str, **environment: str) -> list[list[str]]:
    """The arguments of kvpop in every command of a dry run."""
    done = script(name, *words, DRY_RUN="1", **environment)
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    for command in commands:
        starts = [["kvpop"], ["torchrun", "--nproc-per-node", environment.get("GPUS", ""), "-m", "kvpop"]]
        assert any(command[: len(start)] == start for start in starts), command
    return [command[command.index("kvpop") + 1 :] for command in commands]


@cache
def application() -> Any:
    return get_command(app)


def parsed(command: list[str]) -> tuple[str, dict[str, object]]:
    """The subcommand and its parameters, as the application's own parser reads them; nothing is run."""
    root = application()
    context = root.make_context("kvpop", list(command))
    names = []
    while hasattr(context.command, "resolve_command"):
        name, found, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        names.append(name)
        context = found.make_context(name, rest, parent=context)
    return " ".join(names), context.params


def check(name: str, params: dict[str, object]) -> None:
    """What the parser alone cannot know."""
    if name.startswith("tasks run"):
        for task in params["names"]:  # type: ignore[attr-defined]
            assert task in evals.TASKS or task.split(":")[0] in evals.FAMILIES
        assert len(params["names"]) == 1 or "{task}" in str(params["out"])  # type: ignore[arg-type]
    if params.get("recipe"):
        recipe_by_name(str(params["recipe"]))
    assert params.get("policy") is None or "oracle" not in params["policy"]  # type: ignore[operator]


@pytest.mark.parametrize("model", ["qwen3-4b", "qwen3-8b", "smollm2", "quick"])
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "smollm2"])
def test_every_command_is_one_that_there_is(name: str, model: str) -> None:
    for gpus in ("1", "8"):
        if model == "quick":
            commands = printed(name, "--quick", GPUS=gpus)
        else:
            commands = printed(name, MODEL=model, GPUS=gpus, GRAPH="0", GPU_MEMORY="141")
        assert commands
        for command in commands:
            check(*parsed(command))


def test_the_parser_of_these_tests_refuses_what_there_is_not() -> None:
    with pytest.raises(Exception, match="No such option"):
        parsed(["tasks", "run", "gsm8k", "--out", "x", "--rolouts", "3"])
    with pytest.raises(Exception, match="out"):
        parsed(["tasks", "run", "gsm8k"])


def test_the_tables_have_the_rows_and_columns_of_the_paper() -> None:
    commands = [parsed(command) for command in printed("table-1", MODEL="qwen3-8b")]
    cells = [params for name, params in commands if name == "tasks run"]
    assert {tuple(cell["names"]) for cell in cells} == {tuple(paper.TABLE_1.columns)}
    assert len(cells) == 13
    assert all(cell["thinking"] for cell in cells)
    assert {(cell["policy"] == "dense" and not cell["adapter"], cell["rows"]) for cell in cells} == {
        (True, 8),
        (False, 32),
    }
    assert all(cell["graph"] is None for cell in cells)  # as the engine can
    assert sum(cell["policy"] == "dense" and cell["adapter"] is None for cell in cells) == 1
    assert {cell["budget"] for cell in cells if cell["policy"] in ("streaming", "tova")} == {4096, 2048}
    runs = [params for name, params in commands if name == "distill"]
    assert {run["recipe"] for run in runs} - {""} == {
        f"qwen3-8b:{budget}:{scorer}:full" for budget in (4096, 2048) for scorer in ("mlp", "mlstm")
    }
    others = [run for run in runs if not run["recipe"]]
    assert [(run["policy"], run["budget"] if run["policy"] == "streaming" else run["ratio"]) for run in others] == [
        ("streaming", 4096), ("streaming", 2048), ("dms", 4.0), ("dms", 8.0),
    ]  # fmt: skip
    cells = [params for name, params in map(parsed, printed("table-2", MODEL="qwen3-8b")) if name == "tasks run"]
    assert [(*cell["names"], cell["allow_code"]) for cell in cells] == 13 * [
        ("gpqa-diamond", False), ("livecodebench-v6", True),
    ]  # fmt: skip


def test_runs_of_the_baselines_are_those_of_the_recipes() -> None:
    """What the options of distill come to is what the paper's recipe says: steps, batch, rates, precision."""
    recipe = recipe_by_name("qwen3-4b-instruct:4096:mlstm:full").on(8)
    runs = [p for name, p in map(parsed, printed("train", MODEL="qwen3-4b", GPUS="8")) if name == "distill"]
    for run in (run for run in runs if not run["recipe"]):
        assert run["steps"] == recipe.config.steps
        assert run["sequence_length"] == recipe.length
        assert run["batch_size"] * run["accumulate"] == recipe.batch
        assert run["batch_size"] == recipe.batch_size
        assert (run["lr"], run["base_lr"]) == (recipe.config.scorer_lr, recipe.config.base_lr)
        assert (run["mode"], run["compute"]) == (recipe.config.mode, recipe.config.compute)
        assert run["checkpointing"] == recipe.config.checkpointing
        assert run["checkpoint_every"] == recipe.config.checkpoint_every
        assert (run["sinks"], run["window"]) == (recipe.policy.budget.sinks, recipe.policy.budget.window)
        assert run["dtype"] == "bfloat16"


def test_a_scorer_with_a_state_pays_for_it() -> None:
    runs = [p for name, p in map(parsed, printed("train", MODEL="smollm2")) if name == "distill"]
    slots = {(run["scorer"], run["budget"]) for run in runs if run["policy"] == "kvpop"}
    matched = {
        (s, recipe_by_name(f"smollm2-135m:{b}:{s}:full").policy.slots) for s in ("mlp", "mlstm") for b in (1024, 512)
    }
    assert slots == matched


def test_scorers_with_budgets_by_head_learn_alone() -> None:
    runs = [p for name, p in map(parsed, printed("train", MODEL="smollm2")) if name == "distill" and p["by_head"]]
    assert [(run["mode"], run["scorer"], run["budget"]) for run in runs] == [("scorer", "mlp", b) for b in (1024, 512)]
    assert all((run["residual"], run["target_power"], run["steps"]) == (64, 1.0, 300) for run in runs)
    assert not any(p["by_head"] for name, p in map(parsed, printed("train", MODEL="qwen3-4b")) if name == "distill")


def test_settings_by_environment_reach_every_script() -> None:
    done = script("smollm2", DRY_RUN="1", KVPOP="python -m kvpop", METHODS="dense tova", BUDGETS="700", TASKS="gsm8k")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("python -m kvpop ") for line in lines)
    assert not any("1024" in line for line in lines if "tasks run" in line)
    assert sum("tasks run gsm8k" in line for line in lines) == 2 * 2
    assert not any("streaming-plus" in line for line in lines)


def test_the_readme_lists_every_script() -> None:
    text = (RUNS / "README.md").read_text()
    for name in SCRIPTS:
        assert f"`{name}.sh`" in text
        first = (RUNS / f"{name}.sh").read_text().splitlines()
        assert first[0] == "#!/usr/bin/env bash"
        head = "\n".join(first[:12])
        assert "# Needs: " in head
        assert "# Writes: " in head


def test_unknown_words_and_models_are_refused() -> None:
    done = script("table-1", "--fast", DRY_RUN="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown argument --fast" in done.stderr
    done = script("table-1", MODEL="gpt", DRY_RUN="1")
    assert done.returncode == 2
    assert "MODEL must be qwen3-4b, qwen3-8b or smollm2, got gpt" in done.stderr


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ({"BUDGETS": "abc"}, "BUDGETS must be a number above 0, got abc"),
        ({"BUDGETS": "8192"}, "BUDGETS must be below the 4096 tokens of CONTEXT, got 8192"),
        ({"GPU_MEMORY": "80GB"}, "GPU_MEMORY must be a number above 0, got 80GB"),
        ({"ITEMS": "0"}, "ITEMS must be a number above 0, got 0"),
    ],
)
def test_numbers_are_checked_before_anything_runs(setting: dict[str, str], error: str) -> None:
    done = script("train", DRY_RUN="1", MODEL="smollm2", **setting)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {error}\n"


def test_dms_compresses_as_much_as_a_budget() -> None:
    done = script("train", DRY_RUN="1", MODEL="smollm2", METHODS="dms", BUDGETS="600 512")
    lines = done.stdout.splitlines()
    assert [line.split("--ratio ")[1].split()[0] for line in lines if "--ratio" in line] == ["6.82667", "8"]
    assert [line.split()[1:3] for line in lines if " match " in line] == [
        ["match", f"out/runs/smollm2/adapters/dms-{budget}"] for budget in (600, 512)
    ]  # its threshold follows, see kvpop match


FAKE = """#!/usr/bin/env bash
echo "$*" >>"$LOG"
[[ -z ${FAIL:-} || $* != *"$FAIL"* ]] || exit 130
[[ $1 != match ]] || echo '"matched"' >>"$2/kvpop.json"
[[ $1 == distill ]] || exit 0
while (($#)); do
  if [[ $1 == --out ]]; then mkdir -p "$2" && touch "$2/kvpop.json"; fi
  shift
done
"""


def test_a_script_that_was_stopped_goes_on_where_it_was(tmp_path) -> None:
    fake, log = tmp_path / "kvpop", tmp_path / "log"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    settings = {"KVPOP": str(fake), "OUT": str(tmp_path / "out"), "LOG": str(log)}

    def calls(code: int, **more: str) -> list[str]:
        log.write_text("")
        assert script("table-1", "--quick", **settings, **more).returncode == code
        return log.read_text().splitlines()

    whole = [" ".join(command) for command in printed("table-1", "--quick", OUT=settings["OUT"])]
    first = calls(130, FAIL="--adapter " + str(tmp_path / "out/smollm2-quick/adapters/dms-128"))
    assert first == whole[: len(first)]
    assert first[-1].endswith("dms-128")
    assert calls(0) == whole[len(first) - 1 :]
    assert calls(0) == [line for line in whole if line.startswith("report")]
    config = tmp_path / "out/smollm2-quick/adapters/dms-128/kvpop.json"
    config.write_text("older\n")  # from before adapters were matched: its row is not what it was, either
    changed = calls(0)
    assert [line.split()[0] for line in changed] == ["match", "tasks", "report", "report"]
    assert "dms-128" in changed[0]
    assert "dms-128" in changed[1]
    again = calls(0, ITEMS="1")  # cells are made anew, adapters are not
    assert sum(line.startswith("tasks run") for line in again) == 8
    assert not any(line.startswith("distill") for line in again)


@pytest.fixture
def tiny(tmp_path) -> dict[str, str]:
    """A random model with a tokenizer of English, and texts, in place of the embedded model."""
    text = "\n".join(path.read_text() for path in (ROOT / "README.md", ROOT / "DESIGN.md", RUNS / "README.md"))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["[PAD]", "[BOS]", "[EOS]"]
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([text], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]"
    )
    sizes = SIZES | {"vocab_size": len(tokenizer), "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    randomise(LlamaForCausalLM(LlamaConfig(**sizes)), torch.float32).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "texts").mkdir()
    words = text.split()
    for i in range(3):
        (tmp_path / "texts" / f"{i}.txt").write_text(" ".join(random.Random(i).choices(words, k=1500)))
    return {
        "NAME": str(tmp_path / "model"), "DATA": str(tmp_path / "texts"), "TEST": str(tmp_path / "texts"),
        "OUT": str(tmp_path / "out"), "ITEMS": "1",
    }  # fmt: skip


def test_the_quick_path_runs_end_to_end(tiny, tmp_path, monkeypatch) -> None:
    """Every command that runs/smollm2.sh --quick prints, in this process and with a tiny model."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    seen = set()
    for command in printed("smollm2", "--quick", **tiny):
        if tuple(command) in seen:  # the scripts would find it done
            continue
        seen.add(tuple(command))
        if command[:2] == ["bench", "decode"]:
            command = [*command, "--policy", "kvpop-mlp"]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, (command, done.stderr[-1500:], done.exception)
    out = tmp_path / "out" / "smollm2-quick"
    for name in ("table-1.md", "table-1.tex", "table-2.md", "training.png", "figure-4/decode.png", "figure-5/timing.png",
                 "figures-6-9/viewer.html", "figures-6-9/retention.png", "figures-6-9/recall-dense.png"):  # fmt: skip
        assert (out / name).is_file(), name
    table = (out / "table-1.md").read_text()
    for variant in ("Teacher", "StreamLLM", "TOVA", "StreamLLM+", "KVpop mlp", "KVpop mlp by head", "KVpop"):
        assert f"| {variant} |" in table
    assert re.search(r"\| DMS \[\d+ tokens held\] \|", table)
    rows = json.loads((out / "held-out-128.json").read_text())["rows"]
    assert {row["policy"] for row in rows} >= {"dense", "streaming", "tova", "dms-128", "kvpop-128"}
    assert len(json.loads((out / "ablations.json").read_text())["rows"]) == 1 + 1 + 4


# Stands for kvpop: says when it begins and ends, makes what the scripts look for, fails or goes on for long if it is told to.
TAKES_TIME = """
out=$(sed -E 's/.*--out ([^ ]+).*/\\1/' <<<"$*")
trap 'sleep 0.5; echo "interrupted $*" >>"$LOG"; exit 130' INT
trap 'sleep 0.5; echo "terminated $*" >>"$LOG"; exit 143' TERM
echo "begin $*" >>"$LOG"
for i in {1..5}; do sleep 0.1; done
[[ -z ${SLOW:-} || $* != *"$SLOW"* ]] || for i in {1..300}; do sleep 0.1; done
[[ -z ${BAD:-} || $* != *"$BAD"* ]] || { echo "end $*" >>"$LOG"; exit 3; }
if [[ $1 == distill ]]; then mkdir -p "$out" && touch "$out/kvpop.json"; fi
if [[ $1 == match ]]; then echo '"matched"' >>"$2/kvpop.json"; fi
echo "end $*" >>"$LOG"
"""


@pytest.fixture
def slow(tmp_path) -> dict[str, str]:
    (tmp_path / "slow.sh").write_text(TAKES_TIME)
    (tmp_path / "log").touch()
    return {
        "KVPOP": f"bash {tmp_path / 'slow.sh'}",
        "LOG": str(tmp_path / "log"),
        "OUT": str(tmp_path / "out"),
        "MODEL": "smollm2",
    }


def events(slow: dict[str, str]) -> list[list[str]]:
    return [line.split(" ", 1) for line in Path(slow["LOG"]).read_text().splitlines()]


def test_commands_run_side_by_side_and_what_needs_them_waits(slow):
    settings = dict(TASKS="passkey:512", METHODS="dense kvpop dms", BUDGETS="1024 512", JOBS="3") | slow
    done = script("table-1", **settings)
    assert done.returncode == 0, done.stderr
    live, most, ended = set(), 0, []
    for what, command in events(slow):
        if what == "begin":
            kind = command.split()[0]
            assert kind != "tasks" or sum(x.startswith("distill") for x in ended) == 4  # adapters first
            assert kind != "report" or sum(x.startswith("tasks") for x in ended) == 5  # then rollouts
            live.add(command)
            most = max(most, len(live))
        else:
            live.remove(command)
            ended.append(command)
    assert most == 3
    assert not live
    before = len(events(slow))
    assert script("table-1", **settings).returncode == 0
    assert [command.split()[0] for what, command in events(slow)[before:] if what == "begin"] == ["report", "report"]


def test_after_one_that_failed_nothing_more_begins(slow):
    done = script(
        "train", METHODS="kvpop dms streaming-plus kvpop-mlp", BUDGETS="1024 512", JOBS="2", BAD="kvpop-1024", **slow
    )
    assert done.returncode == 3
    started = [command for what, command in events(slow) if what == "begin"]
    assert len(started) <= 3
    assert all(command.startswith("distill") for command in started)
    assert len(events(slow)) == 2 * len(started)  # those that had begun have ended


@pytest.mark.parametrize(
    ("sent", "got"), [("SIGINT", "interrupted"), ("SIGTERM", "terminated"), ("SIGHUP", "terminated")]
)
def test_what_ends_the_script_reaches_all_of_them(slow, sent, got):
    words = ["bash", str(RUNS / "train.sh")]
    settings = dict(METHODS="kvpop dms", BUDGETS="1024", JOBS="2", SLOW="distill") | slow
    clean = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "TMPDIR")}

    def heed() -> None:  # what is ignored from the start, as under nohup, no shell can trap
        signal.signal(getattr(signal, sent), signal.SIG_DFL)

    with subprocess.Popen(
        words, env=clean | settings, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True, preexec_fn=heed
    ) as run:
        deadline = time.monotonic() + 20
        while len(events(slow)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        run.send_signal(getattr(signal, sent))
        assert run.wait(20) == 128 + getattr(signal, sent)
    assert sorted(what for what, _ in events(slow)) == ["begin"] * 2 + [got] * 2


def test_nothing_is_made_twice_at_a_time():
    done = script("train", METHODS="dms kvpop dms", DRY_RUN="1")
    assert done.returncode == 2
    assert "METHODS must name everything once, got dms twice" in done.stderr


def test_several_commands_on_several_gpus_are_refused():
    done = script("train", GPUS="2", JOBS="2", DRY_RUN="1")
    assert done.returncode == 2
    assert "JOBS must be 1 on several GPUS, got 2 on 2" in done.stderr

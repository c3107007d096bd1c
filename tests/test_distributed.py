"""Two processes are one, up to rounding: losses, gradients, checkpoints, and how a run ends.

What the processes do is in ``tests/distributed.py``. Starting them takes seconds, so two launches do all the jobs.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import kvpop
from kvpop.adapter import CONFIG, adapter_files, read_config
from kvpop.distill.checkpoint import Checkpoints, path_of, steps_saved
from kvpop.distill.world import World
from tests import distributed
from tests.tiny import tiny_model
from tests.training import assert_close, assert_equal, log_of

ROOT = Path(__file__).parents[1]
HAS_PEFT = importlib.util.find_spec("peft") is not None
PAIRS = [
    ("scorer", "kvpop"), ("full", "kvpop"), ("full", "streaming"), ("lora", "dms"), ("base", "streaming"), ("full", "native"),
    ("scorer", "dms"),
]  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "lora kvpop": {"mode": "lora", "policy": "kvpop"},
    "inner updates": {"mode": "scorer", "policy": "kvpop", "inner_updates": 3, "train_long": [8, 3]},
    "accumulated": {"mode": "full", "policy": "kvpop", "accumulate": 2},
    "a layer a stack": {"mode": "full", "policy": "kvpop", "stack_elements": 1},
}
CASES: dict[str, dict[str, Any]] = {
    f"{mode} {policy}{' checkpointing' if checkpointing else ''}": {
        "mode": mode, "policy": policy, "checkpointing": checkpointing,
    }
    for mode, policy in PAIRS
    for checkpointing in (False, True)
} | MORE  # fmt: skip
EMPTY: dict[str, dict[str, Any]] = {
    f"{mode} {policy} {empty}": {"mode": mode, "policy": policy, "empty": empty}
    for mode, policy in (("scorer", "kvpop"), ("full", "kvpop"), ("lora", "dms"))
    for empty in ("one", "both", "padding")
}


RUNS = {"scorer": "kvpop", "lora": "dms", "base": "streaming"}


def needs_peft(options: dict[str, Any]) -> bool:
    return options["mode"] == "lora"


def cases(table: dict[str, dict[str, Any]]) -> list[Any]:
    skip = pytest.mark.skipif(not HAS_PEFT, reason="needs peft")
    return [pytest.param(name, marks=[skip] if needs_peft(options) else []) for name, options in table.items()]


def launch(jobs: list[dict[str, Any]], path: Path, code: int = 0, limit: int = 200) -> None:
    """Two processes under torchrun do ``jobs``; it must end with ``code``. The rendezvous picks a free port."""
    path.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "-m", "tests.distributed", str(path)], cwd=ROOT, env=environment, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun and its processes: a session of their own
        output, _ = process.communicate()
        pytest.fail(f"two processes did not end within {limit} s:\n{output[-4000:]}")
    assert process.returncode == code, output[-4000:]


@dataclass(frozen=True)
class Done:
    """Where the launches left everything."""

    out: Path

    def of(self, name: str, rank: int = 0) -> Any:
        return torch.load(self.out / f"{name}.{rank}.pt", weights_only=False)


def together(out: Path) -> None:
    jobs: list[dict[str, Any]] = [
        {"name": name, "job": "gradients", **options}
        for name, options in (CASES | EMPTY).items()
        if HAS_PEFT or not needs_peft(options)
    ]
    full = {"job": "run", "mode": "full", "policy": "kvpop"}
    jobs.append(full | {"name": "bf16", "job": "gradients", "compute": "bfloat16", "dtype": "float32"})
    jobs += [
        {
            "name": f"run {mode}",
            "job": "run",
            "mode": mode,
            "policy": policy,
            "steps": 2,
            "out": str(out / f"run {mode}"),
        }
        for mode, policy in RUNS.items()
        if HAS_PEFT or mode != "lora"
    ]
    one_to_two = out / "one to two"
    begun(one_to_two)
    jobs += [
        {"name": "straight", **full, "out": str(out / "straight")},
        {"name": "pressed", **full, "out": str(out / "pressed"), "press": 3},
        {"name": "after pressing", **full, "out": str(out / "pressed")},
        {"name": "one to two", **full, "out": str(one_to_two)},
        {"name": "rows", **full, "out": str(out / "rows"), "rows": 3},
        {"name": "disagreeing", **full, "out": str(out / "disagreeing"), "seed_of_rank": True},
        {"name": "other", **full, "out": str(out / "straight"), "base_lr": 1.0},
        {"name": "died", **full, "out": str(out / "died"), "die": 3},
    ]
    launch(jobs, out / "together.json", code=1)
    half = path_of(out / "died", 4)
    half.mkdir()  # as if a process had been killed while it wrote
    (half / "__1_0.distcp").write_bytes(b"half")
    shutil.copytree(out / "died", out / "two to one")
    launch([{"name": "went on", **full, "out": str(out / "died")}], out / "own.json")


def begun(directory: Path) -> None:
    """A checkpoint of step 2 that one process wrote."""
    t = distributed.trainer("full", "kvpop", World())
    directory.mkdir()
    checkpoints = Checkpoints(directory, t)
    t.step()
    t.step()
    checkpoints.save()
    checkpoints.wait()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """Both launches; with pytest-xdist the first of its workers that gets here does them for all."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "distributed"
    try:
        out.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + 400
        while not (out / "finished").exists():
            assert time.monotonic() < deadline, "another worker did not finish its launches"
            time.sleep(0.2)
    else:
        try:
            together(out)
        finally:
            (out / "finished").touch()
    return Done(out)


# Losses and gradients


def assert_same_record(two: dict[str, Any], one: dict[str, Any]) -> None:
    assert two.keys() == one.keys()
    for name, value in one.items():
        assert np.allclose(two[name], value, rtol=1e-11, atol=1e-13, equal_nan=True), (name, two[name], value)


@pytest.mark.parametrize("name", cases(CASES))
def test_two_processes_have_the_losses_and_gradients_of_one(name: str, done: Done) -> None:
    two, one = done.of(name), distributed.gradients(**CASES[name])
    assert_close(one["gradients"], two["gradients"])
    for theirs, mine in zip(two["records"], one["records"]):
        assert_same_record(theirs, mine)
    assert done.of(name, rank=1)["records"] == two["records"]


@pytest.mark.parametrize("name", cases(CASES))
def test_what_is_not_sharded_stays_the_same_in_both_bit_for_bit(name: str, done: Done) -> None:
    for rank in (0, 1):
        assert done.of(name, rank)["unlike"] == []
    learns = CASES[name]["mode"] == "lora" or CASES[name]["policy"] in ("kvpop", "dms")
    assert bool(done.of(name)["replicated"]) == learns


def test_the_boundary_cases_are_what_they_are_for(done: Done) -> None:
    """Tokens and decisions differ between the processes; in the empty ones a first batch decides nothing."""
    first = distributed.stream().batch(0, 0, 2), distributed.stream().batch(0, 1, 2)
    assert len({int((batch["document_ids"] >= 0).sum()) for batch in first}) == 2
    counts = {
        empty: done.of(f"scorer kvpop {empty}")["records"][0]["decisions"] for empty in ("one", "both", "padding")
    }
    assert counts["both"] == 0
    for half in (counts["one"], counts["padding"]):
        assert 0 < half < 0.6 * done.of("scorer kvpop")["records"][0]["decisions"]


@pytest.mark.parametrize("name", cases(EMPTY))
def test_a_step_without_an_eligible_token_trains_in_two_processes(name: str, done: Done) -> None:
    """Case 24: in one process or both there is nothing to decide, or hardly a token."""
    two, one = done.of(name), distributed.gradients(**EMPTY[name])
    if EMPTY[name]["empty"] == "both" and EMPTY[name]["mode"] == "scorer":
        assert two["gradients"] == one["gradients"] == {}  # not even weight decay moves what has nothing to learn from
        assert math.isnan(two["records"][0]["score_loss"])
    else:
        assert_close(one["gradients"], two["gradients"])
    for theirs, mine in zip(two["records"], one["records"]):
        assert_same_record(theirs, mine)
    assert two["unlike"] == []
    if EMPTY[name]["policy"] == "kvpop":
        assert two["records"][1]["decisions"] > 0


def test_passes_in_bfloat16_agree_as_far_as_they_can(done: Done) -> None:
    two = done.of("bf16")
    one = distributed.gradients("full", "kvpop", dtype="float32")
    assert {g.dtype for g in two["gradients"].values()} == {torch.float32}
    for theirs, mine in zip(two["records"], one["records"]):
        assert theirs["kl"] == pytest.approx(mine["kl"], rel=0.05)
        assert theirs["score_loss"] == pytest.approx(mine["score_loss"], rel=0.02)
    assert two["unlike"] == []


# Whole runs


def adapter(directory: Path) -> dict[str, Tensor]:
    files = [name for name in adapter_files(directory) if name.endswith(".safetensors")]
    return {name: x for file in files for name, x in load_file(directory / file).items()}


def assert_near(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Weights after a few steps of Adam, whose first ones magnify the rounding of gradients."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in one process."""
    out = tmp_path_factory.mktemp("straight")
    assert distributed.run("full", "kvpop", str(out))
    return out


def test_a_run_of_two_leaves_the_adapter_log_and_checkpoints_of_one(done: Done, straight: Path) -> None:
    two = done.out / "straight"
    assert [done.of("straight", rank) for rank in (0, 1)] == [True, True]
    assert_near(adapter(two), adapter(straight))
    for theirs, mine in zip(log_of(two), log_of(straight), strict=True):
        assert theirs.keys() == mine.keys()
        for name, value in mine.items():
            assert np.allclose(theirs[name], value, rtol=1e-7, atol=1e-9), name
    assert steps_saved(two) == steps_saved(straight) == [4, 6]
    facts = [json.loads((out / CONFIG).read_text()) for out in (two, straight)]
    assert facts[0]["model"] == facts[1]["model"]
    assert facts[0]["training"]["tokens"] == facts[1]["training"]["tokens"] == 6 * 4 * 96
    loaded = kvpop.load(tiny_model(), two)
    assert_equal(
        {name: x for name, x in adapter(two).items() if not name.startswith("layers.")},
        {name: p.detach() for name, p in loaded.named_parameters() if ".kvpop." not in name},
    )


@pytest.mark.parametrize("mode", cases({mode: {"mode": mode} for mode in RUNS}))
def test_adapters_of_the_other_modes_are_those_of_one_process_too(mode: str, done: Done, tmp_path: Path) -> None:
    assert done.of(f"run {mode}") is True
    assert distributed.run(mode, RUNS[mode], str(tmp_path), steps=2)
    assert adapter_files(done.out / f"run {mode}") == adapter_files(tmp_path)
    assert_near(adapter(done.out / f"run {mode}"), adapter(tmp_path))
    assert read_config(done.out / f"run {mode}")["model"] == read_config(tmp_path)["model"]


def test_two_processes_that_died_go_on_as_two_bit_for_bit(done: Done) -> None:
    """os._exit after step 3: the checkpoint of step 2 is whole, that of step 4 half there."""
    assert done.of("went on") is True
    assert_equal(adapter(done.out / "died"), adapter(done.out / "straight"))
    assert log_of(done.out / "died") == log_of(done.out / "straight")
    assert steps_saved(done.out / "died") == [4, 6]


def test_two_processes_that_died_go_on_as_one(done: Done, straight: Path, tmp_path: Path) -> None:
    out = tmp_path / "two to one"
    shutil.copytree(done.out / "two to one", out)
    assert steps_saved(out) == [2]
    assert distributed.run("full", "kvpop", str(out))
    assert [line["step"] for line in log_of(out)] == [1, 2, 3, 4, 5, 6]
    assert_near(adapter(out), adapter(straight))


def test_one_process_goes_on_as_two(done: Done, straight: Path) -> None:
    out = done.out / "one to two"
    assert done.of("one to two") is True
    assert [line["step"] for line in log_of(out)] == [3, 4, 5, 6]
    assert_near(adapter(out), adapter(straight))


def test_ctrl_c_in_one_process_stops_both_and_both_go_on(done: Done) -> None:
    assert [done.of("pressed", rank) for rank in (0, 1)] == [False, False]
    assert [done.of("after pressing", rank) for rank in (0, 1)] == [True, True]
    assert_equal(adapter(done.out / "pressed"), adapter(done.out / "straight"))
    assert log_of(done.out / "pressed") == log_of(done.out / "straight")


def test_a_batch_that_cannot_be_shared_is_refused_in_every_process(done: Done) -> None:
    for rank in (0, 1):
        assert done.of("rows", rank) == "a batch of 3 sequences cannot be shared evenly by 2 processes"
    assert not (done.out / "rows").exists()


def test_processes_that_disagree_on_the_run_are_refused_in_every_process(done: Done) -> None:
    for rank in (0, 1):
        message = done.of("disagreeing", rank)
        assert message.startswith("the processes do not agree on the run: ")
        assert '"run.seed": 3' in message
        assert '"run.seed": 4' in message
    assert list((done.out / "disagreeing").iterdir()) == []


def test_another_run_is_refused_in_every_process(done: Done) -> None:
    for rank in (0, 1):
        assert "belongs to another run (run.base_lr: 8e-05 there, 1.0 here): use another directory" in done.of(
            "other", rank
        )

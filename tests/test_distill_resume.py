"""No interruption changes the result of a run, and nothing but the same run goes on from a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpop
from kvpop.adapter import CONFIG, load_policy, scorer_tensors
from kvpop.budget import Budget
from kvpop.data import SequenceStream
from kvpop.distill import DistillConfig, Trainer, distill
from kvpop.distill.checkpoint import CHECKPOINTS, RUN, Checkpoints, path_of, steps_saved
from kvpop.distill.world import World, process_group, whole
from kvpop.documents import Documents
from kvpop.policies import DMS
from tests.tiny import tiny_model
from tests.training import (
    CONFIG_OF,
    LOSS,
    MODES,
    POLICY,
    SCORER,
    UNWEIGHTED,
    assert_equal,
    log_of,
    packed,
    run,
    snapshot,
    stream,
    trainer,
    unequal,
)


def saved(t: Trainer, directory: Path) -> Path:
    checkpoints = Checkpoints(directory, t)
    checkpoints.save()
    checkpoints.wait()
    return path_of(directory, t.done)


def resume(t: Trainer, directory: Path) -> bool:
    return Checkpoints(directory, t).resume()


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


class Killed(Exception):
    pass


def kill_at(step: int):
    def kill(record: dict[str, Any]) -> None:
        if record["step"] == step:
            raise Killed

    return kill


# The same run


@pytest.mark.parametrize("mode", MODES)
def test_two_runs_with_one_seed_are_bit_equal(mode: str, tmp_path: Path) -> None:
    (_, a), (_, b) = run(tmp_path / "a", CONFIG_OF[mode]), run(tmp_path / "b", CONFIG_OF[mode])
    assert_equal(a.state_dict(), b.state_dict())
    assert log_of(tmp_path / "a") == log_of(tmp_path / "b")
    (_, other) = run(tmp_path / "c", replace(CONFIG_OF[mode], seed=4))
    assert any(not torch.equal(t, other.state_dict()[n]) for n, t in a.state_dict().items())


def test_a_run_does_not_depend_on_or_change_the_global_generator(tmp_path: Path) -> None:
    model = tiny_model()
    torch.manual_seed(77)
    state = torch.get_rng_state()
    distill(model, POLICY, stream(), replace(SCORER, steps=2), tmp_path, model_id="tiny")
    assert torch.equal(torch.get_rng_state(), state)
    _, other = run(tmp_path / "b", replace(SCORER, steps=2))
    assert_equal(scorer_tensors(model), scorer_tensors(other))


RESUMED: dict[str, dict[str, Any]] = {
    "scorer": {},
    "inner updates, two budgets": {"inner_updates": 2, "train_long": (8, 3)},
    "accumulated": {"accumulate": 2},
    "full": {"mode": "full"},
    "checkpointing": {"mode": "full", "checkpointing": True},
    "dms": {"policy": DMS(window=8, ratio=4)},
    "dms, full": {"policy": DMS(window=8, ratio=4), "mode": "full"},
    "base": {"mode": "base"},
}


@pytest.mark.parametrize("case", RESUMED)
def test_resumed_weights_and_optimizer_are_bit_equal_to_the_straight_run(case: str, tmp_path: Path) -> None:
    options = dict(RESUMED[case])
    policy = options.pop("policy", POLICY)
    config = replace(SCORER, **options)
    straight, first = trainer(config, policy=policy), trainer(config, policy=policy)
    for _ in range(6):
        straight.step()
    for _ in range(3):
        first.step()
    saved(first, tmp_path)
    torch.manual_seed(99)
    resumed = trainer(config, policy=policy)
    assert resume(resumed, tmp_path)
    assert resumed.done == 3
    assert_equal(first.state(), resumed.state())
    for _ in range(3):
        resumed.step()
    assert_equal(dict(straight.model.state_dict()), dict(resumed.model.state_dict()))
    a, b = straight.optimizer.state_dict(), resumed.optimizer.state_dict()
    assert a["param_groups"] == b["param_groups"]  # learning rates of scorers, decay and model included
    assert a["state"].keys() == b["state"].keys()
    for index in a["state"]:
        assert_equal(a["state"][index], b["state"][index])


def test_a_checkpoint_of_scorers_that_had_nothing_to_learn_from_yet_has_no_moments_for_them(tmp_path: Path) -> None:
    """The first batch decides nothing: moments start with the second, also in a run that was interrupted between them."""
    data = SequenceStream([packed(90, size=96), packed(20, 20, size=96)], 1, seed=3)
    config = replace(CONFIG_OF["full"], calibrate=False)
    straight, first, resumed = (trainer(config, data) for _ in range(3))
    for _ in range(3):
        straight.step()
    assert first.step()["decisions"] == 0
    saved(first, tmp_path)
    assert resume(resumed, tmp_path)
    assert_equal(first.state(), resumed.state())
    assert not any(name.startswith("exp_avg") and ".kvpop." in name for name in resumed.state())
    assert any(name.startswith("exp_avg") for name in resumed.state())
    for _ in range(2):
        resumed.step()
    assert_equal(straight.state(), resumed.state())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("killed_after", [3, 4])
def test_a_run_killed_at_any_step_ends_as_the_straight_one(mode: str, killed_after: int, tmp_path: Path) -> None:
    config = replace(CONFIG_OF[mode], checkpoint_every=3)
    _, straight = run(tmp_path / "straight", config)
    with pytest.raises(Killed):
        run(tmp_path / "broken", config, on_step=kill_at(killed_after))
    finished, resumed = run(tmp_path / "broken", config)
    assert finished
    assert_equal(straight.state_dict(), resumed.state_dict())
    assert log_of(tmp_path / "broken") == log_of(tmp_path / "straight")


def test_a_low_rank_run_that_was_killed_ends_as_the_straight_one(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    config = replace(CONFIG_OF["lora"], checkpoint_every=2, lora_rank=4)
    _, straight = run(tmp_path / "straight", config)
    with pytest.raises(Killed):
        run(tmp_path / "broken", config, on_step=kill_at(5))
    _, resumed = run(tmp_path / "broken", config)
    assert_equal(straight.state_dict(), resumed.state_dict())
    assert log_of(tmp_path / "broken") == log_of(tmp_path / "straight")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_finishes_the_step_saves_and_can_go_on(mode: str, signum: int, tmp_path: Path) -> None:
    """SIGTERM, which schedulers send before they kill, does the same."""
    config = CONFIG_OF[mode]
    _, straight = run(tmp_path / "straight", config)
    before = signal.getsignal(signum)

    def press(record: dict[str, Any]) -> None:
        if record["step"] == 2:
            os.kill(os.getpid(), signum)

    finished, _ = run(tmp_path / "stopped", config, on_step=press)
    assert finished is False
    assert signal.getsignal(signum) is before
    assert [line["step"] for line in log_of(tmp_path / "stopped")] == [1, 2]
    assert steps_saved(tmp_path / "stopped") == [2]
    assert not (tmp_path / "stopped" / CONFIG).exists()
    finished, resumed = run(tmp_path / "stopped", config)
    assert finished is True
    assert_equal(straight.state_dict(), resumed.state_dict())
    assert log_of(tmp_path / "stopped") == log_of(tmp_path / "straight")


def test_a_second_ctrl_c_interrupts_at_once(tmp_path: Path) -> None:
    def press(record: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, SCORER, on_step=press)


def test_ctrl_c_in_the_last_step_still_finishes(tmp_path: Path) -> None:
    def press(record: dict[str, Any]) -> None:
        if record["step"] == 6:
            os.kill(os.getpid(), signal.SIGINT)

    assert run(tmp_path, SCORER, on_step=press)[0]
    assert (tmp_path / CONFIG).exists()


def test_a_finished_run_called_again_does_nothing_and_still_has_its_adapter(tmp_path: Path) -> None:
    _, model = run(tmp_path, SCORER)
    facts = json.loads((tmp_path / CONFIG).read_text())["training"]
    seen: list[dict[str, Any]] = []
    finished, again = run(tmp_path, SCORER, on_step=seen.append)
    assert finished
    assert seen == []
    assert_equal(scorer_tensors(model), scorer_tensors(again))
    assert json.loads((tmp_path / CONFIG).read_text())["training"] == facts


def test_a_run_that_starts_from_an_adapter_goes_on_from_it(tmp_path: Path) -> None:
    run(tmp_path / "first", replace(SCORER, steps=2))
    learned = load_policy(tmp_path / "first")
    t = trainer(SCORER, policy=learned)
    assert_equal(scorer_tensors(t.model), dict(learned.tensors))
    run(tmp_path / "second", SCORER, policy=learned)
    other = replace(learned, tensors={n: x.clone() for n, x in learned.tensors.items()})
    next(iter(other.tensors.values())).view(-1)[0] += 1.0
    with pytest.raises(ValueError, match=r"policy.started from: '\w+' there, '\w+' here"):
        run(tmp_path / "second", SCORER, policy=other)
    with pytest.raises(ValueError, match=r"policy.started from: '\w+' there, None here"):
        run(tmp_path / "second", SCORER)


# Checkpoints on disk


def test_a_run_leaves_its_description_and_the_last_two_checkpoints(tmp_path: Path) -> None:
    run(tmp_path, replace(SCORER, checkpoint_every=1))
    assert steps_saved(tmp_path) == [5, 6]
    assert sorted(p.name for p in (tmp_path / CHECKPOINTS).iterdir()) == ["step-00000005", "step-00000006"]
    described = json.loads((tmp_path / RUN).read_text())
    assert described["run.seed"] == 3
    assert described["model.type"] == "llama"
    assert described["policy.budget.long"] == 8


def test_a_checkpoint_holds_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    """It is written while training goes on."""
    t = trainer(CONFIG_OF["full"])
    t.step()
    then = snapshot(t.state())
    checkpoints = Checkpoints(tmp_path, t)
    checkpoints.save()
    with torch.no_grad():
        for x in t.state().values():
            x.zero_()
    checkpoints.wait()
    other = trainer(CONFIG_OF["full"])
    assert resume(other, tmp_path)
    assert_equal(other.state(), then)


def broken_off(tmp_path: Path) -> DistillConfig:
    """A run that died after step 5, with checkpoints of steps 2 and 4."""
    tmp_path.mkdir()
    config = replace(SCORER, checkpoint_every=2)
    t = trainer(config)
    checkpoints = Checkpoints(tmp_path, t)
    for _ in range(5):
        t.step()
        if t.done % 2 == 0:
            checkpoints.save()
    checkpoints.wait()
    assert steps_saved(tmp_path) == [2, 4]
    return config


@pytest.mark.parametrize("step", [4, 6])
def test_a_half_written_checkpoint_is_ignored_and_the_one_before_is_used(step: int, tmp_path: Path) -> None:
    """Its .metadata comes last. What lies there does not get in the way of writing it again."""
    config = broken_off(tmp_path / "broken")
    half = path_of(tmp_path / "broken", step)
    if step == 4:
        (half / ".metadata").unlink()
    else:
        half.mkdir()
        (half / "__0_0.distcp").write_bytes(b"half")
    before = 2 if step == 4 else 4
    assert steps_saved(tmp_path / "broken")[-1] == before
    again = trainer(config)
    assert resume(again, tmp_path / "broken")
    assert again.done == before
    _, straight = run(tmp_path / "straight", config)
    _, resumed = run(tmp_path / "broken", config)
    assert_equal(straight.state_dict(), resumed.state_dict())
    assert steps_saved(tmp_path / "broken") == [4, 6]


def shortened(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "data cut short": lambda path: shortened(next(path.glob("*.distcp"))),
    "data lost": lambda path: next(path.glob("*.distcp")).unlink(),
    "metadata cut short": lambda path: shortened(path / ".metadata"),
    "metadata empty": lambda path: (path / ".metadata").write_bytes(b""),
    "metadata of something else": lambda path: (path / ".metadata").write_bytes(b"hello"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on_once_it_is_gone(damage: str, tmp_path: Path) -> None:
    config = broken_off(tmp_path / "broken")
    path = path_of(tmp_path / "broken", 4)
    DAMAGES[damage](path)
    with pytest.raises(
        ValueError, match=r"step-00000004 cannot be read \(.+\): remove it to go on from the one before"
    ):
        run(tmp_path / "broken", config)
    shutil.rmtree(path)
    again = trainer(config)
    assert resume(again, tmp_path / "broken")
    assert again.done == 2


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    t = trainer(SCORER)
    state = t.state()
    lost = next(name for name in state if name.startswith("param/"))
    t.state = lambda: {name: x for name, x in state.items() if name != lost}  # type: ignore[method-assign]
    saved(t, tmp_path)
    with pytest.raises(ValueError, match=f"step-00000000 lacks .*{lost}"):
        resume(trainer(SCORER), tmp_path)


def test_a_damaged_description_is_named(tmp_path: Path) -> None:
    saved(trainer(SCORER), tmp_path)
    (tmp_path / RUN).write_text("{")
    with pytest.raises(ValueError, match=r"run.json is damaged .*: remove the directory to start anew"):
        run(tmp_path, SCORER)


# Another run

OTHER_RUNS = {
    r"run.seed: 3 there, 4 here": {"config": replace(SCORER, seed=4)},
    r"run.loss.min_future: 16 there, 17 here": {"config": replace(SCORER, loss=replace(LOSS, min_future=17))},
    r"run.mode: 'scorer' there, 'full' here": {"config": replace(SCORER, mode="full")},
    r"run.betas: \[0.9, 0.95\] there, \[0.9, 0.99\] here": {"config": replace(SCORER, betas=(0.9, 0.99))},
    r"run.train_long: \[\] there, \[8, 3\] here": {"config": replace(SCORER, train_long=(8, 3))},
    r"policy.budget.long: 8 there, 7 here": {"policy": replace(POLICY, budget=Budget(2, 8, 7))},
    r"policy.scorer: 'mlp\+mlstm' there, 'mlp' here": {"policy": replace(POLICY, scorer="mlp")},
    r"run.sequences a step: 2 there, 1 here": {"data": stream(batch_size=1)},
    r"data: '\w+' there, '\w+' here": {"data": stream(count=7)},
}  # fmt: skip


@pytest.mark.parametrize("difference", OTHER_RUNS)
def test_a_checkpoint_of_another_run_is_refused_naming_the_difference(difference: str, tmp_path: Path) -> None:
    saved(trainer(SCORER), tmp_path)
    before = contents(tmp_path)
    options: dict[str, Any] = dict(OTHER_RUNS[difference])
    with pytest.raises(ValueError, match=rf"belongs to another run \({difference}\): use another directory"):
        run(tmp_path, options.pop("config", SCORER), **options)
    assert contents(tmp_path) == before


def test_a_checkpoint_of_another_model_is_refused_naming_the_difference(tmp_path: Path) -> None:
    saved(trainer(SCORER), tmp_path)
    other = Trainer(tiny_model("qwen3", groups=1), POLICY, stream(), SCORER)
    with pytest.raises(ValueError, match=r"model.heads: 4 there, 2 here; model.type: 'llama' there, 'qwen3' here"):
        resume(other, tmp_path)
    weights = Trainer(tiny_model(seed=1), POLICY, stream(), SCORER)
    with pytest.raises(ValueError, match=r"another run \(model.weights: '\w+' there, '\w+' here\)"):
        resume(weights, tmp_path)


def test_a_checkpoint_of_the_same_weights_in_another_precision_is_refused(tmp_path: Path) -> None:
    saved(trainer(SCORER, dtype=torch.float32), tmp_path)
    with pytest.raises(
        ValueError, match=r"run \(model.dtype: 'torch.float32' there, 'torch.bfloat16' here\): use another"
    ):
        resume(Trainer(tiny_model(dtype=torch.float32).bfloat16(), POLICY, stream(), SCORER), tmp_path)


@pytest.mark.parametrize(
    "harmless", [{"checkpoint_every": 1}, {"log_every": 3}, {"stack_elements": 1}, {"checkpointing": True}]
)
def test_what_does_not_change_the_result_may_change_when_a_run_goes_on(harmless: dict, tmp_path: Path) -> None:
    saved(trainer(SCORER), tmp_path)
    assert resume(trainer(replace(SCORER, **harmless)), tmp_path)


def test_checkpoints_without_a_description_are_nobodys(tmp_path: Path) -> None:
    saved(trainer(SCORER), tmp_path)
    (tmp_path / RUN).unlink()
    with pytest.raises(ValueError, match=r"has checkpoints but no run\.json that says whose"):
        run(tmp_path, SCORER)


def test_passes_of_another_size_are_the_same_run(tmp_path: Path) -> None:
    """A recipe on other machines: one pass of four sequences, or two of two, go on from each other's checkpoints."""
    config = replace(SCORER, loss=UNWEIGHTED, inner_updates=1, calibrate=False)
    first = trainer(config, unequal(4))
    first.step()
    saved(first, tmp_path)
    second = trainer(replace(config, accumulate=2), unequal(2))
    assert resume(second, tmp_path)
    first.step()
    second.step()
    for name, tensor in first.state().items():
        torch.testing.assert_close(second.state()[name], tensor, rtol=1e-9, atol=1e-12)


def test_a_description_without_a_checkpoint_is_no_claim(tmp_path: Path) -> None:
    Checkpoints(tmp_path, trainer(SCORER))
    assert (tmp_path / RUN).is_file()
    Checkpoints(tmp_path, trainer(replace(SCORER, seed=4)))
    assert json.loads((tmp_path / RUN).read_text())["run.seed"] == 4


def test_without_a_checkpoint_there_is_nothing_to_resume(tmp_path: Path) -> None:
    t = trainer(SCORER)
    assert resume(t, tmp_path) is False
    assert t.optimizer.state == {}


# bfloat16 passes

BF16 = {mode: replace(CONFIG_OF[mode], compute="bfloat16", base_lr=1e-6) for mode in MODES}


@pytest.mark.parametrize("mode", MODES)
def test_passes_in_bfloat16_leave_the_trained_weights_in_their_own_precision(mode: str) -> None:
    """base_lr is so small that almost every update would vanish in bfloat16, whose steps are 0.4 % of a weight."""
    exact = trainer(CONFIG_OF[mode], dtype=torch.float32).step()
    with process_group(torch.device("cpu"), needed=True) as world:
        assert world == World(0, 1)
        t = trainer(BF16[mode], dtype=torch.float32)
        dtypes: list[torch.dtype] = []
        t.model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: dtypes.append(args[0].dtype))
        before = {name: whole(p.detach()).clone() for name, p in t.model.named_parameters()}
        record = t.step()
        assert set(dtypes) == {torch.bfloat16}
        state = {name: whole(x) for name, x in t.state().items()}
        assert {x.dtype for x in state.values()} == {torch.float32, torch.bool}  # moments included; bool: "calibrated"
        for name, p in t.model.named_parameters():
            if p.requires_grad and not name.endswith(("b_H", "b2_H")):
                moved = state[f"param/{name}"]
                assert not torch.equal(moved, before[name]), name
                if ".kvpop." not in name:
                    vanished = moved.bfloat16() == before[name].bfloat16()
                    assert vanished.double().mean() > 0.9, name
    assert record["score_loss"] == pytest.approx(exact["score_loss"], rel=0.02)
    if mode == "full":
        assert record["kl"] == pytest.approx(exact["kl"], rel=0.1)
        assert record["kl"] != exact["kl"]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_in_bfloat16_can_be_killed_and_leaves_its_adapter(mode: str, tmp_path: Path) -> None:
    config = replace(BF16[mode], checkpoint_every=2)
    with process_group(torch.device("cpu"), needed=True):
        _, straight = run(tmp_path / "straight", config, dtype=torch.float32)
        expected = {name: whole(x).clone() for name, x in straight.state_dict().items()}
    with pytest.raises(Killed):
        run(tmp_path / "broken", config, dtype=torch.float32, on_step=kill_at(3))
    assert not torch.distributed.is_initialized()
    run(tmp_path / "broken", config, dtype=torch.float32)
    assert log_of(tmp_path / "broken") == log_of(tmp_path / "straight")
    loaded = kvpop.load(tiny_model(dtype=torch.float32), tmp_path / "broken")
    assert_equal(dict(loaded.state_dict()), expected)


@pytest.mark.parametrize("mode", MODES)
def test_passes_in_bfloat16_hand_the_same_documents_to_every_layer(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Casting the inputs of a layer would copy them, with all that was worked out about them."""
    made: list[Documents] = []
    check = Documents.__post_init__

    def count(self: Documents) -> None:
        made.append(self)
        check(self)

    with process_group(torch.device("cpu"), needed=True):
        t = trainer(BF16[mode], dtype=torch.float32)
        monkeypatch.setattr(Documents, "__post_init__", count)
        t.step()
    assert len(made) == 1


def test_bfloat16_without_a_process_group_is_refused() -> None:
    with pytest.raises(ValueError, match="compute in bfloat16 needs a process group"):
        trainer(BF16["scorer"])

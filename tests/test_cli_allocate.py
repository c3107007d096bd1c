"""``kvpop allocate`` and ``kvpop distill --by-head``: a budget shared unequally, end to end."""

from __future__ import annotations

import json

import pytest
import torch

from kvpop.adapter import load, load_policy
from kvpop.allocation import CURVES, allocate, read_curves
from kvpop.attachment import attached_policies
from kvpop.budget import Budget
from tests.test_cli import adapter, call, folder, refused, training  # noqa: F401
from tests.tiny import tiny_model

LONG = 24 - 2 - 8


def allocating(folder, out: str, *more: str) -> list[str]:  # noqa: F811
    data = ["--model", str(folder / "model"), "--data", str(folder / "texts"), "--length", "96", "--texts", "4",
            "--retrieval-share", "0"]  # fmt: skip
    return [*data, "--out", str(folder / out), *more]


def test_an_adapter_gets_heads_of_unequal_size_and_is_otherwise_the_same(folder, adapter):  # noqa: F811
    result = call("allocate", *allocating(folder, "shared", "--adapter", str(adapter)))
    assert result.exit_code == 0, result.stderr
    assert "mean 14" in result.stdout
    before, after = load_policy(adapter), load_policy(folder / "shared")
    curves = read_curves(folder / "shared" / CURVES)
    assert after.policy.heads == allocate(curves, LONG)
    assert len({k for row in after.policy.heads for k in row}) > 1
    assert all(torch.equal(after.tensors[name], x) for name, x in before.tensors.items())
    other = after.with_budget(Budget(2, 8, 30))
    assert sum(k for row in other.policy.heads for k in row) == 30 * 4
    budgets = [p.budget for p in attached_policies(load(tiny_model(dtype=torch.float32), folder / "shared"))]
    assert [b.heads or (b.long,) * 2 for b in budgets] == list(after.policy.heads)
    shown = call("info", str(folder / "shared")).stdout
    assert "by head" in shown
    told = call("generate", "--model", str(folder / "model"), "--adapter", str(folder / "shared"), "--prompt", "w9 w8 w7",
                "--max-new-tokens", "40", "--json")  # fmt: skip
    assert told.exit_code == 0, told.stderr
    most = max(k for row in after.policy.heads for k in row)
    assert json.loads(told.stdout)["tokens_held"] == min(10 + most, json.loads(told.stdout)["tokens_seen"])


def test_the_smallest_head_is_as_large_as_asked(folder, adapter):  # noqa: F811
    result = call("allocate", *allocating(folder, "least", "--adapter", str(adapter), "--least", "12"))
    assert result.exit_code == 0, result.stderr
    policy = load_policy(folder / "least")
    assert min(k for row in policy.policy.heads for k in row) >= 12
    assert min(k for row in policy.with_budget(Budget(2, 8, 28)).policy.heads for k in row) >= 24


def test_distill_by_head_trains_with_them_and_goes_on_with_the_same(folder):  # noqa: F811
    words = [*training(folder, "by-head"), "--by-head"]
    result = call("distill", *words)
    assert result.exit_code == 0, result.stderr
    found = load_policy(folder / "by-head")
    assert found.policy.heads == allocate(read_curves(folder / "by-head" / CURVES), found.policy.budget.long)
    assert call("distill", *words).exit_code == 0
    again = call("distill", *training(folder, "from-there"), "--start", str(folder / "by-head"))
    assert again.exit_code == 0, again.stderr
    assert torch.equal(load_policy(folder / "from-there").curves, found.curves)


def test_what_cannot_be_shared_is_refused_first(folder, adapter, tmp_path, monkeypatch):  # noqa: F811
    assert "at least 48, twice the slots, got 40" in refused(
        "allocate", *allocating(folder, "x", "--adapter", str(adapter), "--length", "40")
    )
    assert "--length must be at least 320 for --retrieval-share 0.1, got 96" in refused(
        "allocate", *allocating(folder, "x", "--adapter", str(adapter), "--retrieval-share", "0.1")
    )
    assert "--least must be at most the mean, 14" in refused(
        "allocate", *allocating(folder, "x", "--adapter", str(adapter), "--least", "15")
    )
    assert "is there already" in refused("allocate", *allocating(folder, adapter.name, "--adapter", str(adapter)))
    assert "--policy kvpop, got 'dms'" in refused("distill", "--out", str(tmp_path), "--by-head", "--policy", "dms")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "with 2 processes needs" in refused("distill", "--out", str(tmp_path / "x"), "--by-head")


@pytest.mark.parametrize("least", ["-1"])
def test_numbers_out_of_range_are_usage_errors(least):
    assert call("allocate", "--out", "x", "--least", least).exit_code == 2

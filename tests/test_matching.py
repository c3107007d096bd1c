"""The threshold at which DMS holds what it was to, against caches that were filled with it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch

from kvpop import attach
from kvpop.adapter import CONFIG, load, load_policy
from kvpop.attachment import attached_policies, cache_argument
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.card import model_card
from kvpop.matching import matched
from kvpop.policies import DMS, ByLayer, Streaming
from tests.test_cli import adapter, call, folder, refused, saved, training  # noqa: F401
from tests.test_invariant import shake
from tests.tiny import VOCAB, tiny_model

KINDS = {
    "next": DMS(window=4, ratio=3.0, sinks=2, offset=0.0),
    "self": DMS(window=1, ratio=3.0, offset=1.0, emitted_by="self", threshold=0.5),
    "native": DMS(window=5, ratio=3.0, sinks=1, gate="native", scale=3.0, offset=0.0),
}


def texts(*lengths: int) -> list[torch.Tensor]:
    return [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]


def held(model, ids: list[torch.Tensor]) -> float:
    """The share that caches hold behind these texts, counted one by one."""
    pairs = tokens = 0
    for text in ids:
        cache = BoundedCache(model)
        with torch.no_grad():
            model(input_ids=text[None], **{cache_argument(model): cache})
        heads = [head for layer in cache.held_positions() for head in layer[0]]
        assert cache.tokens_held(0) == pytest.approx(sum(map(len, heads)) / len(heads))
        pairs, tokens = pairs + sum(map(len, heads)), tokens + len(heads) * len(text)
    return pairs / tokens


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ratio", [1.0, 1.5, 3.0])
def test_caches_hold_what_was_asked_for(name: str, ratio: float) -> None:
    policy, given = KINDS[name], texts(37, 60, 48)
    model = attach(tiny_model(kv_heads=2, groups=2), policy)
    shake(model, 3)
    found = matched(model, given, ratio)
    assert found.before == pytest.approx(held(model, given), abs=1e-12)
    again = attach(tiny_model(kv_heads=2, groups=2), replace(policy, threshold=found.threshold))
    shake(again, 3)
    assert held(again, given) == pytest.approx(found.held, abs=1e-12)
    assert abs(found.held - 1 / ratio) <= 0.01
    assert attached_policies(model)[0].recipe == policy


def test_what_cannot_be_matched_is_refused() -> None:
    model = attach(tiny_model(), KINDS["next"])
    with pytest.raises(
        ValueError,
        match=r"a ratio of 8 leaves 12\.5% of the tokens, but 2 sinks and a window of 4 are 20\.0% of texts of 30",
    ):
        matched(model, texts(30), 8.0)
    for few, ratio in (([], 2.0), (texts(30), 0.5), (texts(30), float("inf"))):
        with pytest.raises(ValueError, match="needs at least 1 text and a finite ratio of at least 1, got"):
            matched(model, few, ratio)
    with pytest.raises(ValueError, match="no gates to match"):
        matched(attach(tiny_model(), Streaming(Budget(2, 4, 6))), texts(30), 2.0)


def looking(folder) -> list[str]:  # noqa: F811
    return ["--model", str(folder / "model"), "--data", str(folder / "texts"), "--length", "60", "--texts", "3"]


def test_the_command_changes_the_threshold_and_nothing_else(folder) -> None:  # noqa: F811
    gates = saved(folder, "matched", DMS(window=6, ratio=2.0, sinks=1, offset=0.0), lambda model: shake(model, 1))
    before = json.loads((gates / CONFIG).read_text())
    words = [str(gates), *looking(folder)]
    result = call("match", *words, "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    after = json.loads((gates / CONFIG).read_text())
    assert after["policy"].pop("threshold") == facts["threshold"] != before["policy"].pop("threshold")
    assert after.pop("matched") == {
        "ratio": 2.0, "held": facts["held"], "documents": 3, "tokens": 180, "data": str(folder / "texts"),
    }  # fmt: skip
    assert after == before
    assert facts["held"] == pytest.approx(0.5, abs=0.001) != facts["held before"]
    assert load_policy(gates).policy.threshold == facts["threshold"]
    assert load(tiny_model(dtype=torch.float32), gates) is not None
    again = json.loads(call("match", *words, "--json").stdout)
    assert again == facts | {"held before": facts["held"]}
    shown = call("match", *words, "--ratio", "3")
    assert "33." in shown.stdout
    assert "% of the tokens" in shown.stdout
    assert load_policy(gates).policy.ratio == 3.0
    assert "they hold 33." in model_card(gates, "somebody/gates", base_model="somebody/base")


def test_training_that_had_ended_leaves_a_matched_adapter_alone(folder) -> None:  # noqa: F811
    words = ["distill", *training(folder, "trained", "--policy", "dms", "--steps", "2")]
    assert call(*words).exit_code == 0
    gates = folder / "trained"
    assert call("match", str(gates), *looking(folder), "--ratio", "2").exit_code == 0
    config = (gates / CONFIG).read_text()
    assert "matched" in config
    assert call(*words).exit_code == 0
    assert (gates / CONFIG).read_text() == config
    (gates / "scorers.safetensors").unlink()
    assert call(*words).exit_code == 0  # what is not whole is written again
    assert "matched" not in (gates / CONFIG).read_text()


def test_layers_keep_their_own_settings() -> None:
    """And layers that differ are not matched."""
    mixed = ByLayer(KINDS["next"], {0: replace(KINDS["next"], window=6)})
    model = attach(tiny_model(), mixed)
    with pytest.raises(ValueError, match="layers differ in their settings"):
        matched(model, texts(40), 2.0)
    assert [layer.recipe.window for layer in attached_policies(model)] == [6, *[4] * (len(model.model.layers) - 1)]
    model = attach(tiny_model(), ByLayer(KINDS["next"], {0: Streaming(Budget(2, 4, 6))}))
    assert matched(model, texts(40, 60), 2.0).held == pytest.approx(0.5, abs=0.01)  # of the layers with gates


def test_gates_that_cannot_do_it_are_an_error() -> None:
    model = attach(tiny_model(), KINDS["next"])
    for layer in attached_policies(model):
        for weight in layer.scorer.parameters():
            weight.data.zero_()
    with pytest.raises(
        ValueError, match=r"no threshold makes the gates hold 25\.0% of the tokens: the nearest of \d+ holds"
    ):
        matched(model, texts(60), 4.0)
    for layer in attached_policies(model):
        for weight in layer.scorer.parameters():
            weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="what the gates say is NaN for"):
        matched(model, texts(60), 4.0)


def test_the_command_refuses_first(folder, adapter, tmp_path) -> None:  # noqa: F811
    assert "holds kvpop, which has no gates: kvpop match is for dms" in refused("match", str(adapter))
    gates = saved(folder, "refused", DMS(window=6, ratio=2.0, sinks=1, offset=0.0))
    assert "--ratio must be at least 1 and finite, got 0.5" in refused("match", str(gates), "--ratio", "0.5")
    assert "is no directory of an adapter (with a kvpop.json)" in refused("match", str(tmp_path))
    assert "kvpop:smollm2 is no directory of an adapter" in refused("match", "kvpop:smollm2")
    shutil.rmtree(gates)

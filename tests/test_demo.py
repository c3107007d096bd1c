"""The demo's plan, its sentences, and (slow) the demo itself on the embedded model."""

from __future__ import annotations

import json

import pytest
import torch

from kvpop.attachment import attach, cache_argument
from kvpop.budget import Budget, cache_bytes
from kvpop.cache import BoundedCache
from kvpop.demo import BUDGETS, OURS, Plan, charged_budget, findings, run_demo
from kvpop.policies import KVpop
from tests.tiny import tiny_model


def report(kl: dict[str, float], flat: bool = True) -> dict:
    rows = [{"policy": "dense", "budget": None, "kl": 0.0, "agreement": 1.0, "passkey": 1.0, "needle": 1.0}]
    for slots in BUDGETS:
        rows += [
            {"policy": name, "budget": slots, "kl": value, "agreement": 1 - value, "passkey": 0.0, "needle": 0.0}
            for name, value in kl.items()
        ]
    generation = {
        "budget": 128, "tokens": 1280, "bytes_first_full": 100, "bytes_last": 100 if flat else 101, "bytes_formula": 100,
        "bytes_dense": 1000,
    }  # fmt: skip
    return {"rows": rows, "generation": generation}


def test_the_sentences_say_what_the_figures_say() -> None:
    kl = {"streaming": 0.2, "random": 0.3, "tova": 0.05, "kvpop-continued": 0.1, "kvpop": 0.15, "oracle": 0.02}
    text = " ".join(findings(report(kl)))
    assert "kvpop-continued is the better scorer: KL to dense 0.100 against 0.200 for StreamingLLM (50% less)" in text
    assert "It beats streaming, random on both measures. It does not beat tova on both." in text
    assert "closed 56% of the way" in text
    assert "held exactly" in text
    losing = " ".join(findings(report({**kl, "kvpop-continued": 0.4, "kvpop": 0.35}, flat=False)))
    assert "It beats" not in losing
    assert "went from 100 to 101 bytes, formula 100" in losing


def test_the_plan_shrinks_with_the_machine_and_the_minutes() -> None:
    full, slow, short = Plan.for_machine(2.0, 10), Plan.for_machine(14.0, 10), Plan.for_machine(2.0, 1)
    assert full.steps > slow.steps >= short.steps >= 4
    assert full.texts > slow.texts >= short.texts >= 2
    with pytest.raises(ValueError, match=r"minutes must be positive, got 0\.0"):
        run_demo(None, 0.0)  # type: ignore[arg-type]


def test_a_stateful_scorer_gets_the_same_bytes_not_the_same_slots() -> None:
    model = tiny_model(dtype=torch.float32)
    stateless, stateful = (charged_budget(76, scorer, model) for scorer in ("mlp", "mlp+mlstm"))
    assert stateless == Budget.of_slots(76, sinks=4, window=64)
    assert stateful.long < stateless.long
    sizes = []
    for budget, scorer in ((stateless, "mlp"), (stateful, "mlp+mlstm")):
        cache = BoundedCache(attach(model, KVpop(budget, scorer=scorer)))
        model(torch.randint(3, 60, (1, 100)), **{cache_argument(model): cache})
        sizes.append(cache.nbytes())
    assert (
        sizes[0] - cache_bytes(Budget(0, 1, 0), layers=2, kv_heads=2, head_dim=8, element_size=4) < sizes[1] <= sizes[0]
    )


@pytest.mark.slow
def test_the_demo_writes_its_report_and_figure(tmp_path) -> None:
    run_demo(tmp_path, minutes=1.0)
    written = json.loads((tmp_path / "report.json").read_text())
    assert {row["policy"] for row in written["rows"]} == {"dense", "streaming", "random", "tova", "oracle", *OURS}
    for row in written["rows"]:
        assert {"policy", "budget", "kl", "agreement", "perplexity", "passkey", "needle"} <= row.keys()
    generation = written["generation"]
    assert generation["tokens"] == 10 * generation["budget"]
    assert generation["bytes_first_full"] == generation["bytes_last"] == generation["bytes_formula"]
    assert (tmp_path / "report.png").stat().st_size > 10_000

"""A whole training step with the Triton kernels against one with the reference: interpreted without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpop.policies import DMS, KVpop
from tests.test_cache_step import needs_triton
from tests.training import BUDGET, CONFIG_OF, stream, trainer


@needs_triton
@pytest.mark.parametrize("mode", ["scorer", "full"])
@pytest.mark.parametrize("residual", [0, 8])
def test_a_step_of_the_kernels_is_a_step_of_the_reference(
    mode: str, residual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The teacher of packed documents: there is no fused one off a GPU, nor for heads as small as these.
    monkeypatch.setattr("kvpop.policies.base.dense_impl", lambda impl: "reference")
    config = CONFIG_OF[mode]
    config = replace(config, target=replace(config.target, residual=residual), checkpointing=mode == "full")
    records = []
    for impl in ("reference", "triton"):
        t = trainer(
            replace(config, impl=impl), stream(1), policy=KVpop(BUDGET, scorer="mlp"), dtype=torch.float32, device=device
        )  # fmt: skip
        records.append([t.step() for _ in range(2)])
    for plain, kernels in zip(*records, strict=True):
        for name in ("score_loss", "scorer_grad", *(("kl", "base_grad") if mode == "full" else ())):
            assert kernels[name] == pytest.approx(plain[name], rel=1e-3), name


def test_gates_are_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="impl='triton' has no relaxed gates, which dms trains by: use impl='flex'"):
        trainer(replace(CONFIG_OF["full"], impl="triton"), policy=DMS(window=8, ratio=2.0))

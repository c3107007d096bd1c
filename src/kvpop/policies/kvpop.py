"""KVpop: a learned scorer per KV head ranks the tokens that left the window."""

from __future__ import annotations

from dataclasses import dataclass

from kvpop.core.priority import Decay
from kvpop.policies.base import BudgetPolicy, LayerShape, RankedLayer
from kvpop.scorers import build_scorer


@dataclass(frozen=True)
class KVpop(BudgetPolicy):
    """``budget``, ``heads`` as of a ``BudgetPolicy``. ``scorer``: "mlp", "mlstm" (delayed), "mlstm-immediate" or "mlp+mlstm".
    ``hidden`` is the MLP's width (0: 1.5 D).

    ``decay``, ``decay_range``: where the learned log-decay starts and lies, nats a step of ``decay_step`` tokens (Eq. 21).
    """

    scorer: str = "mlp+mlstm"
    hidden: int = 0
    decay: float = -2e-4
    decay_range: tuple[float, float] = (-2e-3, -1e-5)
    decay_step: int = 1

    @property
    def name(self) -> str:
        return f"kvpop-{self.scorer}"

    def layer(self, shape: LayerShape) -> RankedLayer:
        options: dict[str, int] = {}
        if "mlp" in self.scorer and self.hidden:
            options["hidden"] = self.hidden
        if "mlstm" in self.scorer:
            options["horizon"] = self.budget.window
        scorer = build_scorer(self.scorer, shape.kv_heads, shape.head_dim, **options)
        low, high = self.decay_range
        decay = Decay(shape.kv_heads, start=self.decay, low=low, high=high)
        return RankedLayer(shape, self.budget, scorer, decay, self.decay_step, self.heads)

from kvpop.core.boundary import BoundaryLoss, boundary_loss, sample_arrivals, teacher_decisions
from kvpop.core.cutoff import NEVER, expiry, oracle_held, ranks, running_cutoff
from kvpop.core.priority import Decay, FixedDecay, static_priority
from kvpop.core.target import Target, floored, future_target

__all__ = [
    "NEVER",
    "BoundaryLoss",
    "Decay",
    "FixedDecay",
    "Target",
    "boundary_loss",
    "expiry",
    "floored",
    "future_target",
    "oracle_held",
    "ranks",
    "running_cutoff",
    "sample_arrivals",
    "static_priority",
    "teacher_decisions",
]

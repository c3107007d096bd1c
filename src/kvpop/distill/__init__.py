"""Training: scorers alone on a frozen model, or together with the model, or a low-rank change of it, against its dense self.

    scorer   the policy's own parameters; the model is untouched
    full     the policy and all of the model
    lora     the policy and a low-rank change of the model; the teacher is the same weights with the change turned off
    base     all of the model, under a policy that stays as it is (StreamingLLM+)

Ranking scorers learn from the boundary loss, layer by layer and outside the backbone's graph; gates (DMS), the model and its
low-rank change learn from the KL to the dense teacher. Everything random is a function of (seed, step, sequence), so a resumed
run repeats the straight one bit for bit, and the number of processes changes nothing but rounding.
"""

from kvpop.distill.config import DistillConfig
from kvpop.distill.run import distill
from kvpop.distill.trainer import Trainer
from kvpop.distill.world import World
from kvpop.watch import LOG, read_log

__all__ = ["LOG", "DistillConfig", "Trainer", "World", "distill", "read_log"]

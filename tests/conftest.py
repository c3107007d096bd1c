from __future__ import annotations

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# A shell's background jobs begin with this ignored, and what they start inherits it: tests that interrupt programs would wait.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile(
    "kvpop", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("kvpop")

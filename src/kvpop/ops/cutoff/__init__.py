"""Kernels for the running top-k: see ``kvpop.core.cutoff``."""

from kvpop.ops.few_rows.api import Impl, Norm, counters, kernel_or_reference, linear, takes

__all__ = ["Impl", "Norm", "counters", "kernel_or_reference", "linear", "takes"]

from kvpop.ops.few_rows.api import Norm, kernel_or_reference, linear, takes

__all__ = ["Norm", "kernel_or_reference", "linear", "takes"]

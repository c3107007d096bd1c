from kvpop.ops.few_rows.api import kernel_or_reference, linear, takes

__all__ = ["kernel_or_reference", "linear", "takes"]

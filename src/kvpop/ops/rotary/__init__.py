from kvpop.ops.rotary.api import split_heads

__all__ = ["split_heads"]

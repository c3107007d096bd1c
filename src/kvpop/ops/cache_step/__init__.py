from kvpop.ops.cache_step.api import Layout, append, attend_held, choose_slot, overwrite

__all__ = ["Layout", "append", "attend_held", "choose_slot", "overwrite"]

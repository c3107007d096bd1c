from kvpop.ops.cache_step.api import Layout, attend_held, choose_slot, overwrite

__all__ = ["Layout", "attend_held", "choose_slot", "overwrite"]

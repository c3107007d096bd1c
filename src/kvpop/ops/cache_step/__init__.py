from kvpop.ops.cache_step.api import attend_held, choose_slot, overwrite

__all__ = ["attend_held", "choose_slot", "overwrite"]

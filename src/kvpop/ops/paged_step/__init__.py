from kvpop.ops.paged_step.api import MLPGate, Pages, Ring, everything, step

__all__ = ["MLPGate", "Pages", "Ring", "everything", "step"]

from kvpop.ops.future_mass.api import future_log_mass

__all__ = ["future_log_mass"]

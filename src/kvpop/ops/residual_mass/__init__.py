from kvpop.ops.residual_mass.api import block_mass, kernel_or_reference

__all__ = ["block_mass", "kernel_or_reference"]

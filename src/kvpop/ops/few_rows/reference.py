"""The library's product."""

from torch.nn.functional import linear

__all__ = ["linear"]

"""KVpop: long generations of existing language models in a fixed amount of memory."""

from kvpop.budget import Budget

__version__ = "0.1.0"

__all__ = ["Budget", "__version__"]

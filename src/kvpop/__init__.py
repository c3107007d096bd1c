"""KVpop: long generations of existing language models in a fixed amount of memory."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvpop.budget import Budget

if TYPE_CHECKING:
    from kvpop.adapter import load, load_policy
    from kvpop.attachment import attach, detach
    from kvpop.cache import BoundedCache
    from kvpop.engine import Engine
    from kvpop.policies import DMS, ByLayer, Dense, KVpop, Oracle, Random, Streaming, Tova
    from kvpop.session import Session

__version__ = "0.1.0"

_LAZY = {
    "load": "kvpop.adapter",
    "load_policy": "kvpop.adapter",
    "attach": "kvpop.attachment",
    "detach": "kvpop.attachment",
    "BoundedCache": "kvpop.cache",
    "Engine": "kvpop.engine",
    "Session": "kvpop.session",
    **{
        name: "kvpop.policies" for name in ("DMS", "ByLayer", "Dense", "KVpop", "Oracle", "Random", "Streaming", "Tova")
    },
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'kvpop' has no attribute {name!r}")


__all__ = [
    "DMS",
    "BoundedCache",
    "Budget",
    "ByLayer",
    "Dense",
    "Engine",
    "KVpop",
    "Oracle",
    "Random",
    "Session",
    "Streaming",
    "Tova",
    "__version__",
    "attach",
    "detach",
    "load",
    "load_policy",
]

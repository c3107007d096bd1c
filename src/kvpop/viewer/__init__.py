"""A page to read a text in, with what every policy held of it at every step: one HTML file, no network, any modern browser.

What it shows comes from an ``Analysis`` alone. The expiries travel as the life of each token, token by
token, deflated and in base64: ten thousand tokens of 30 layers and 8 heads are a few megabytes a policy.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from kvpop.analysis.data import Analysis, Array
from kvpop.viewer.page import PAGE, SCRIPT, STYLE

__all__ = ["packed", "unpacked", "viewer", "write_viewer"]


def packed(expiry_LHS: Array) -> dict[str, Any]:
    """Expiries for the page: {"width": bytes a number, "data": base64 of the deflated little-endian numbers}.

    The numbers are expiry - t, unsigned, all layers and heads of token 0 first, then of token 1: a token is dead at q if its
    number is at most q - t.
    """
    L, H, S = expiry_LHS.shape
    life_SX = np.clip(expiry_LHS.astype(np.int64) - np.arange(S), 0, None).reshape(L * H, S).T
    width = 2 if life_SX.max(initial=0) < 1 << 16 else 4
    raw = np.ascontiguousarray(life_SX, dtype=f"<u{width}").tobytes()
    return {"width": width, "data": base64.b64encode(zlib.compress(raw, 6)).decode()}


def unpacked(value: dict[str, Any], layers: int, heads: int) -> Array:
    """What ``packed`` packed: int32 [L, H, S]."""
    raw = np.frombuffer(zlib.decompress(base64.b64decode(value["data"])), dtype=f"<u{value['width']}")
    life_SX = raw.reshape(-1, layers * heads).astype(np.int64)
    expiry_XS = life_SX.T + np.arange(len(life_SX))
    return expiry_XS.reshape(layers, heads, -1).astype(np.int32)


def viewer(analysis: Analysis) -> str:
    """The page. Token texts are data, never markup: they travel as JSON and are only ever set as text."""
    data = {
        "model": analysis.model,
        "layers": list(analysis.layers),
        "heads": analysis.heads,
        "texts": [{"name": text.name, "strings": list(text.strings)} for text in analysis.texts],
        "subjects": [
            {"name": subject.name, "slots": subject.slots, "sinks": subject.sinks, "window": subject.window}
            for subject in analysis.subjects
        ],
        "lives": [[packed(trace.expiry_LHS) for trace in traces] for traces in analysis.traces],
    }
    title = (
        f"kvpop: what is held of {len(analysis.texts)} text{'s' if len(analysis.texts) > 1 else ''} ({analysis.model})"
    )
    parts = {"TITLE": html.escape(title), "STYLE": STYLE, "DATA": _for_script(data), "SCRIPT": SCRIPT}
    page = PAGE
    for name in ("TITLE", "STYLE", "SCRIPT", "DATA"):  # the data last: what they hold is not looked at again
        page = page.replace(f"@@{name}@@", parts[name], 1)
    return page


def write_viewer(analysis: Analysis, path: Path) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(viewer(analysis), encoding="utf-8")


def _for_script(value: Any) -> str:
    """JSON in ASCII without any sign that could end a script element or begin a comment in it."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text

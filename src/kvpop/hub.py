"""Where an adapter is: a directory, one that the package carries, or a repository on the Hugging Face hub."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import huggingface_hub

from kvpop.allocation import CURVES
from kvpop.lora import LORA_CONFIG, LORA_WEIGHTS
from kvpop.weights import BASE, BASE_INDEX

CONFIG, SCORERS = "kvpop.json", "scorers.safetensors"
PATTERNS = (CONFIG, SCORERS, CURVES, BASE, BASE_INDEX, "base-*.safetensors", LORA_CONFIG, LORA_WEIGHTS)
"""The files of a repository that an adapter can consist of; nothing else is downloaded."""
CARRIED = "kvpop:"
"""``kvpop:smollm2`` names an adapter that the package carries."""


def adapter_directory(name_or_path: str | Path, revision: str | None = None) -> Path:
    """The directory of an adapter: an existing one, ``kvpop:NAME`` for one of the package, else ``owner/name`` on the hub.

    ``revision``: branch, tag or commit on the hub. Raises FileNotFoundError that says what was tried; what can only be a
    path (a ``Path``, or anything but one slash between two names) is never looked up on the hub. ValueError for a revision of
    a directory.
    """
    text = str(name_or_path)
    if text.startswith(CARRIED):
        return pretrained(text.removeprefix(CARRIED))
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"{text} is a directory: revision {revision!r} is for names on the hub")
        return path
    parts = text.split("/")
    if isinstance(name_or_path, Path) or text[:1] in (".", "~") or len(parts) != 2 or not all(parts):
        raise FileNotFoundError(f"{text} is not a kvpop adapter: there is no such directory")
    try:
        return Path(huggingface_hub.snapshot_download(text, revision=revision, allow_patterns=list(PATTERNS)))
    except (OSError, ValueError) as error:
        at = f" at revision {revision}" if revision else ""
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason'}"
        raise FileNotFoundError(
            f"{text} is not a kvpop adapter: there is no such directory, and it could not be downloaded from the hub{at} "
            f"({reason})"
        ) from error


def pretrained(name: str = "smollm2") -> Path:
    """The directory of an adapter that the package carries, by its name or the beginning of it up to a dash.

    Raises FileNotFoundError, listing the names there are, unless exactly one fits.
    """
    root = Path(str(files("kvpop"))) / "pretrained"
    known = sorted(path.parent.name for path in root.glob(f"*/{CONFIG}"))
    fits = [one for one in known if one == name] or [one for one in known if one.startswith(f"{name}-")]
    if len(fits) != 1:
        raise FileNotFoundError(
            f"the package carries {len(fits) or 'no'} adapters called {name!r}; there are: {', '.join(known) or 'none'}"
        )
    return root / fits[0]

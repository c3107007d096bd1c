"""Publishing: the card says what the files say, its snippet runs, and nothing but the adapter is uploaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from typer.testing import CliRunner

import kvpop
from kvpop import hub, lora, models, publish
from kvpop.adapter import AdapterError, save_adapter
from kvpop.attachment import attach
from kvpop.budget import Budget, cache_bytes
from kvpop.card import model_card
from kvpop.cli import app
from kvpop.policies import DMS, KVpop, Policy, Streaming
from kvpop.publish import prepare, push_to_hub
from tests.tiny import tiny_model

BUDGET = Budget(2, 8, 8)
REPO = "someone/kvpop-tiny-18"
TRAINING = {
    "steps": 3,
    "score_loss": 0.123456,
    "data": "champ | twice",
    "config": {"mode": "scorer", "scorer_lr": 1e-3, "target": {"aggregate": "max"}},
}
REPORT = {
    "model": "tiny", "data": "champ:test", "texts": 2, "length": 64, "start": 18, "seed": 0,
    "rows": [
        {"policy": "dense", "budget": None, "kl": 0.0, "agreement": 1.0, "perplexity": 2.5, "by_position": []},
        {"policy": "ours", "budget": 18, "kl": 0.08765, "agreement": 0.9, "perplexity": 2.75, "passkey": 0.5,
         "passkey_nll": 1.0},
    ],
}  # fmt: skip


def saved_adapter(directory: Path, policy: Policy, **options) -> Path:
    model = attach(tiny_model(dtype=torch.float32), policy)
    return save_adapter(model, policy, directory, model_id="owner/tiny", training=TRAINING, **options)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = saved_adapter(tmp_path / "adapter", KVpop(BUDGET, scorer="mlp+mlstm"))
    for name in ("state.safetensors", "log.jsonl", "optimizer.bin"):
        (folder / name).write_text("of the run")
    return folder


@pytest.fixture
def uploads(monkeypatch) -> list:
    calls: list = []

    class Api:
        def __init__(self, token=None):
            calls.append(("token", token))

        def create_repo(self, repo_id, **options):
            calls.append(("create_repo", repo_id, options))

        def upload_folder(self, **options):
            calls.append(("upload_folder", options))
            return SimpleNamespace(commit_url="https://hub/commit/1")

    monkeypatch.setattr(publish.huggingface_hub, "HfApi", Api)
    return calls


def front_matter(card: str) -> dict:
    _, front, _ = card.split("---\n", 2)
    return yaml.safe_load(front)


def test_the_card_says_what_the_adapter_is(saved: Path) -> None:
    card = model_card(saved, REPO, license="apache-2.0", evaluation=REPORT)
    assert front_matter(card) == {
        "base_model": "owner/tiny",
        "base_model_relation": "adapter",
        "library_name": "kvpop",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["kvpop", "kv-cache", "kv-cache-compression"],
    }
    assert "\n# kvpop-tiny-18\n" in card
    assert "18 slots per KV head, however long the text: 2 first tokens, 8 newest ones, 8 others" in card
    assert "The model's own weights are unchanged." in card
    layer = KVpop(BUDGET, scorer="mlp+mlstm").layer(kvpop.policies.LayerShape(0, 4, 2, 8))
    sizes = dict(layers=2, kv_heads=2, head_dim=8, element_size=2, state_bytes=layer.scorer.state_bytes())
    assert f"| whole cache of one sequence, MB | {cache_bytes(BUDGET, **sizes) / 1e6:,.4g} |" in card
    assert "| a dense cache: bytes per token | 128 |" in card  # 2 layers x 2 KV heads x 2 x 8 x 2 bytes
    assert "| steps | 3 |" in card
    assert "| score_loss | 0.1235 |" in card
    assert "| data | champ \\| twice |" in card
    assert "| `target.aggregate` | max |" in card
    assert (
        "| policy | slots | KL to dense | top-1 agreement | perplexity | passkey, exact | passkey, answer NLL |" in card
    )
    assert "| ours | 18 | 0.08765 | 0.9 | 2.75 | 0.5 | 1 |" in card
    assert "| dense | - | 0 | 1 | 2.5 | - | - |" in card
    assert "data champ:test, texts 2, length 64, start 18, seed 0" in card
    assert f"kvpop {kvpop.__version__}" in card
    plain = model_card(saved, REPO)
    assert "license" not in front_matter(plain)
    assert "## Evaluation" not in plain
    assert "No evaluation is given here" in plain


def test_the_card_of_other_policies_and_weights(tmp_path: Path) -> None:
    full = model_card(saved_adapter(tmp_path / "a", Streaming(BUDGET, positions="cache"), with_base=True), REPO)
    assert front_matter(full)["base_model_relation"] == "finetune"
    assert "StreamingLLM" in full
    assert "own weights were trained along and are part of this repository" in full
    assert "| scorer state per KV head, bytes | 0 |" in full
    assert "all weights of the model are replaced" in full
    gates = model_card(saved_adapter(tmp_path / "b", DMS(window=6, ratio=4.0)), REPO)
    assert "hold 1/4 of the tokens on average beyond a window of 6; the memory follows the text" in gates
    assert "## Memory" not in gates


def test_the_snippet_of_the_card_runs(saved: Path, monkeypatch, capsys) -> None:
    class Tokenizer:
        def __call__(self, text, return_tensors):
            return {"input_ids": torch.arange(3, 40)[None]}

        def decode(self, ids):
            return f"{len(ids)} ids"

    names = []

    def load_base(name):
        names.append(name)
        return tiny_model(dtype=torch.float32), Tokenizer()

    monkeypatch.setattr(models, "load_base", load_base)
    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", lambda name, **options: names.append(name) or saved)
    (code,) = re.findall(r"```python\n(.*?)```", model_card(saved, REPO), flags=re.DOTALL)
    exec(code, {})
    assert names == ["owner/tiny", REPO]
    assert capsys.readouterr().out.endswith(" ids\n")


def test_the_embedded_model_is_called_by_the_name_that_loads_it(saved: Path) -> None:
    card = model_card(saved, REPO, base_model=models.EMBEDDED_ID)
    assert front_matter(card)["base_model"] == models.EMBEDDED_ID
    assert 'load_base("smollm2")' in card


def test_only_the_adapter_is_uploaded(saved: Path, uploads: list) -> None:
    address = push_to_hub(saved, REPO, private=True, license="mit", token="t")
    assert address == "https://hub/commit/1"
    token, (_, repo, options), (_, upload) = uploads
    assert token == ("token", "t")
    assert (repo, options) == (REPO, {"private": True, "exist_ok": True})
    assert upload["allow_patterns"] == ["README.md", "kvpop.json", "scorers.safetensors"]
    assert (upload["repo_id"], upload["folder_path"]) == (REPO, str(saved))
    assert (saved / "README.md").read_text() == model_card(saved, REPO, license="mit")


def test_every_shard_is_uploaded(tmp_path: Path, uploads: list) -> None:
    saved_adapter(tmp_path, Streaming(BUDGET), with_base=True, shard_bytes=10_000)
    push_to_hub(tmp_path, REPO)
    patterns = uploads[-1][1]["allow_patterns"]
    assert sorted(patterns) == sorted(["README.md", "kvpop.json", *(p.name for p in tmp_path.glob("base*"))])
    assert len(patterns) > 4


def test_a_card_that_is_there_can_be_kept(saved: Path, uploads: list) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no README\.md to keep"):
        push_to_hub(saved, REPO, keep_card=True)
    (saved / "README.md").write_text("mine")
    push_to_hub(saved, REPO, keep_card=True)
    assert (saved / "README.md").read_text() == "mine"
    push_to_hub(saved, REPO)
    assert (saved / "README.md").read_text() != "mine"


def spoil(directory: Path, name: str, text: str) -> Path:
    (directory / name).write_text(text)
    return directory / name


REFUSED = {
    "a repository without owner": (lambda d: dict(repo_id="tiny"), ValueError, "called OWNER/NAME, got 'tiny'"),
    "a repository that cannot be": (lambda d: dict(repo_id="a/b/c"), ValueError, "a/b/c"),
    "a file gone": (lambda d: (d / "scorers.safetensors").unlink(), AdapterError, "has no scorers.safetensors"),
    "a file damaged": (lambda d: spoil(d, "scorers.safetensors", "x") and None, AdapterError, "cannot be read"),
    "no adapter": (lambda d: dict(directory=d.parent), FileNotFoundError, "is not a kvpop adapter"),
    "no evaluation": (lambda d: dict(evaluation=d / "none"), FileNotFoundError, "there is no evaluation"),
    "an evaluation that is no JSON": (
        lambda d: dict(evaluation=spoil(d, "e", "{")),
        ValueError,
        "e is not valid JSON",
    ),
    "an evaluation without rows": (lambda d: dict(evaluation=spoil(d, "e", "[]")), ValueError, "has no rows"),
    "a base model without a hub name": (
        lambda d: dict(base_model="/models/tiny"),
        ValueError,
        "the base model '/models/tiny' of .* is no hub name",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_published_is_refused_before_anything_happens(case: str, saved: Path, uploads: list) -> None:
    change, kind, message = REFUSED[case]
    options = {"directory": saved, "repo_id": REPO} | (change(saved) or {})
    with pytest.raises(kind, match=message):
        push_to_hub(**options)
    assert uploads == []
    assert not (saved / "README.md").exists()


def test_errors_of_the_client_are_one_kind(saved: Path, monkeypatch) -> None:
    class Broken:
        def __init__(self, token=None):
            pass

        def create_repo(self, *args, **options):
            raise RuntimeError("no route")

    monkeypatch.setattr(publish.huggingface_hub, "HfApi", Broken)
    with pytest.raises(ConnectionError, match=f"the upload to {REPO} failed: no route"):
        push_to_hub(saved, REPO)


def test_prepare_writes_nothing(saved: Path, uploads: list) -> None:
    before = sorted(saved.iterdir())
    what = prepare(saved, REPO)
    assert what.files == {n: (saved / n).stat().st_size for n in ("kvpop.json", "scorers.safetensors")}
    assert sorted(saved.iterdir()) == before
    assert uploads == []


def test_the_command(saved: Path, uploads: list, tmp_path: Path) -> None:
    (tmp_path / "eval.json").write_text(json.dumps(REPORT))
    words = ["publish", str(saved), REPO, "--evaluation", str(tmp_path / "eval.json")]
    dry = CliRunner().invoke(app, [*words, "--dry-run"])
    assert dry.exit_code == 0, dry.stderr
    assert dry.stdout == model_card(saved, REPO, evaluation=REPORT) + "\n"
    assert [line.split()[-1] for line in dry.stderr.splitlines()] == ["README.md", "kvpop.json", "scorers.safetensors"]
    assert uploads == []
    assert not (saved / "README.md").exists()
    done = CliRunner().invoke(app, [*words, "--private", "--json"])
    report = json.loads(done.stdout)
    assert (report["repository"], report["commit"]) == (REPO, "https://hub/commit/1")
    assert list(report["files"]) == ["README.md", "kvpop.json", "scorers.safetensors"]
    assert uploads[1][2]["private"] is True
    assert CliRunner().invoke(app, words).stdout == "https://hub/commit/1\n"
    refused = CliRunner().invoke(app, ["publish", str(tmp_path), REPO])
    assert refused.exit_code == 2
    assert "is not a kvpop adapter" in refused.stderr


def test_an_adapter_of_the_package_is_published_from_a_copy(uploads: list, monkeypatch) -> None:
    """Its files and card go up together, and the package stays as it was installed."""
    carried = hub.pretrained("smollm2")
    before = sorted(path.name for path in carried.iterdir())
    folders = []
    upload = publish.huggingface_hub.HfApi.upload_folder

    def seen(self, **options):
        folder = Path(options["folder_path"])
        folders.append({name: (folder / name).read_bytes() for name in options["allow_patterns"]})
        return upload(self, **options)

    monkeypatch.setattr(publish.huggingface_hub.HfApi, "upload_folder", seen)
    result = CliRunner().invoke(app, ["publish", "kvpop:smollm2", REPO, "--json"])
    assert result.exit_code == 0, result.stderr
    (uploaded,) = folders
    assert list(json.loads(result.stdout)["files"]) == list(uploaded)
    assert uploaded.pop("README.md").decode() == model_card(carried, REPO)
    assert uploaded == {name: (carried / name).read_bytes() for name in uploaded}
    assert "kvpop.json" in uploaded
    assert sorted(path.name for path in carried.iterdir()) == before
    assert not Path(uploads[-1][1]["folder_path"]).exists()
    dry = CliRunner().invoke(app, ["publish", "kvpop:smollm2", REPO, "--dry-run"])
    assert dry.stdout.rstrip() == model_card(carried, REPO).rstrip()
    unknown = CliRunner().invoke(app, ["publish", "kvpop:nothing", REPO])
    assert unknown.exit_code == 2
    assert "no adapters called 'nothing'; there are: smollm2-135m" in unknown.stderr


def test_the_card_of_lora_says_what_to_install(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = tiny_model(dtype=torch.float32)
    lora.inject(model, 2)
    attach(model, Streaming(BUDGET))
    save_adapter(model, Streaming(BUDGET), tmp_path, model_id="owner/tiny")
    card = model_card(tmp_path, REPO)
    assert "pip install 'kvpop[lora]'" in card
    assert "changed by LoRA" in card
    assert "lora" in front_matter(card)["tags"]
    assert list(prepare(tmp_path, REPO).files) == ["kvpop.json", "adapter_config.json", "adapter_model.safetensors"]

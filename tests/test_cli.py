"""The command line end to end, on a random model of two layers and a tokenizer of sixty words."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import types

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import kvpop
from kvpop import hub, lora
from kvpop import models as base_models
from kvpop.adapter import changed_weights, save_adapter
from kvpop.attachment import attach
from kvpop.cli import app
from kvpop.cli.distill import fastest
from kvpop.distill import Trainer
from kvpop.jobs import retrieval_cells
from kvpop.measure import RetrievalScores
from kvpop.terminal import as_strict_json
from tests.tiny import VOCAB, tiny_model

SMALL = ["--budget", "24", "--sinks", "2", "--window", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a model, its tokenizer, and texts."""
    folder = tmp_path_factory.mktemp("cli")
    words = ["[PAD]", "[BOS]", "[EOS]", "[UNK]"]
    words += [f"w{i}" for i in range(VOCAB - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]"
    )
    fast.chat_template = "{% for m in messages %}w1 {{ m['content'] }} {% endfor %}w2"
    fast.save_pretrained(folder / "model")
    tiny_model(dtype=torch.float32).save_pretrained(folder / "model")
    draw = random.Random(0)
    for name in ("a", "b", "c"):
        text = " ".join(draw.choice(words[4:]) for _ in range(700))
        (folder / "texts").mkdir(exist_ok=True)
        (folder / "texts" / f"{name}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def adapter(folder):
    result = call("distill", *training(folder, "adapter"))
    assert result.exit_code == 0, result.stderr
    return folder / "adapter"


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def training(folder, out, *more):
    return [
        "--model", folder / "model", "--data", folder / "texts", "--out", folder / out, *SMALL, "--steps", "4",
        "--sequence-length", "200", "--retrieval-share", "0", "--device", "cpu", *more,
    ]  # fmt: skip


def refused(*words):
    """The one line on stderr of a command that must fail with exit code 2."""
    result = call(*words)
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exception)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def no_model(monkeypatch):
    """Everything that can be checked without a model is checked before one is loaded."""
    monkeypatch.setattr(base_models, "load_base", lambda *a, **k: pytest.fail("the model was loaded"))


def test_distill_writes_an_adapter(adapter):
    config = json.loads((adapter / "kvpop.json").read_text())
    assert config["policy"]["budget"] == {"sinks": 2, "window": 8, "long": 14}
    assert config["policy"]["decay"] == -5 / 200
    assert config["policy"]["decay_range"] == [-20 / 200, -0.1 / 200]
    assert config["training"]["steps"] == 4
    assert len((adapter / "log.jsonl").read_text().splitlines()) == 4


def test_distill_says_where_the_adapter_is_and_goes_on_from_the_end(folder, adapter):
    result = call("distill", *training(folder, "adapter"))
    assert result.exit_code == 0
    assert result.stdout == f"adapter: {adapter}\n"
    report = json.loads(call("distill", *training(folder, "adapter"), "--json").stdout)
    assert report["finished"]
    assert report["training"]["steps"] == 4


def test_distill_resumes_after_an_interrupt(folder, adapter, monkeypatch):
    step = Trainer.step

    def interrupted(self):
        if self.done == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        result = call("distill", *training(folder, "again"))
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "interrupted at step 2; run the same command to go on"
    assert not (folder / "again" / "kvpop.json").exists()
    assert call("distill", *training(folder, "again")).exit_code == 0
    assert (folder / "again" / "scorers.safetensors").read_bytes() == (adapter / "scorers.safetensors").read_bytes()


def test_an_interrupt_elsewhere_ends_without_a_traceback(monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(base_models, "load_base", interrupt)
    result = call("generate", "--policy", "random", "--prompt", "w1")
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"


def test_distill_another_run_into_the_same_directory_is_refused(folder, adapter):
    result = call("distill", *training(folder, "adapter"), "--lr", "0.5")
    assert result.exit_code == 2
    assert "belongs to another run" in result.stderr.splitlines()[-1]
    assert result.stdout == ""


def test_distill_in_full_mode_changes_the_weights_and_its_adapter_generates(folder):
    words = training(
        folder, "full", "--mode", "full", "--decay", "-0.01", "--scorer", "mlp", "--base-lr", "0.01", "--json"
    )
    result = call("distill", *words)
    assert result.exit_code == 0, result.stderr
    training_facts = json.loads(result.stdout)["training"]
    assert training_facts["kl"] > 0
    config = json.loads((folder / "full" / "kvpop.json").read_text())
    assert config["base_weights"] == "base.safetensors"
    assert config["policy"]["decay_range"] == [-0.1, -0.0005]
    common = ["--model", folder / "model", "--prompt", "w3 w4", "--max-new-tokens", "5", "--json"]
    assert call("generate", "--adapter", folder / "full", *common).exit_code == 0

    result = call(
        "eval", "--model", folder / "model", "--adapter", folder / "full", "--policy", "streaming", "--budget", "24", "--data",
        folder / "texts", "--texts", "1", "--length", "100", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    dense, _, full = json.loads(result.stdout)["rows"]
    assert (dense["kl"], full["policy"]) == (0, "full")
    model = tiny_model(dtype=torch.float32)
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = changed_weights(model, folder / "full")
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert any(not torch.equal(p, before[name]) for name, p in found.items())


def saved(folder, name, policy, change=lambda model: None):
    """An adapter for the model in the folder, as training would leave it behind."""
    model = attach(tiny_model(dtype=torch.float32), policy)
    change(model)
    return save_adapter(model, policy, folder / name, model_id=str(folder / "model"))


def test_a_policy_without_a_budget_is_generated_with_evaluated_and_shown(folder):
    gates = saved(folder, "gates", kvpop.DMS(window=6, ratio=4.0, offset=0.0))
    common = ["--model", folder / "model", "--adapter", gates]
    report = json.loads(call("generate", *common, "--prompt", "w3 " * 60, "--max-new-tokens", "3", "--json").stdout)
    assert (report["policy"], report["budget"]) == ("dms", None)
    for option in (["--budget", "20"], ["--sinks", "1"], ["--ratio", "0.5", "--context", "64"]):
        assert "has no budget to change" in refused("generate", *common, "--prompt", "w3", *option)
    texts = ["--data", folder / "texts", "--texts", "1", "--length", "100", "--json"]
    rows = json.loads(call("eval", *common, "--policy", "random", *SMALL, *texts).stdout)["rows"]
    assert [(row["policy"], row["budget"]) for row in rows] == [("dense", None), ("random", 24), ("gates", None)]
    assert ["held" in row for row in rows] == [False, False, True]
    assert not any("intervals" in row for row in rows)  # of 1 text
    shown = call("eval", *common, *texts[:-1], "--texts", "2").stdout
    assert len(re.findall(r"\d+% held", shown)) >= 3  # in every table
    assert "95 % intervals, bootstrap over texts" in shown
    shown = call("info", gates)
    assert shown.exit_code == 0
    for words in ("dms", "ratio", "unchanged"):
        assert words in shown.stdout
    assert "slots per KV head" not in shown.stdout


def test_adapters_that_change_weights_are_evaluated_beside_each_other(folder):
    pytest.importorskip("peft")
    policy = kvpop.Streaming(kvpop.Budget(2, 8, 14))

    def low_rank(model):
        lora.inject(model, 2)
        for p in lora.lora_parameters(model).values():
            torch.nn.init.normal_(p, std=0.3)

    adapters = [saved(folder, "plain", policy), saved(folder, "low-rank", policy, low_rank)]
    words = [
        "--model", folder / "model", "--adapter", adapters[0], "--adapter", adapters[1], "--policy", "streaming", "--data",
        folder / "texts", "--texts", "1", "--length", "100", "--passkey", "1", "--lengths", "150",
    ]  # fmt: skip
    result = call("eval", *words, "--json")
    assert result.exit_code == 0, result.stderr
    rows = {row["policy"]: row for row in json.loads(result.stdout)["rows"]}
    for metric in ("kl", "passkey_nll"):
        assert rows["plain"][metric] == rows["streaming"][metric] != rows["low-rank"][metric]
    assert json.loads(call("info", adapters[1], "--json").stdout)["scorer_parameters"] == 0
    assert "adapter_model.safetensors" in call("info", adapters[1]).stdout


def test_adapters_are_taken_from_the_hub_and_named_after_their_repository(folder, adapter, monkeypatch):
    monkeypatch.setattr(hub.huggingface_hub, "snapshot_download", lambda name, **options: str(adapter))
    common = ["--model", folder / "model", "--adapter", "owner/name"]
    texts = ["--data", folder / "texts", "--texts", "1", "--length", "100", "--json"]
    result = call("eval", *common, *texts)
    assert [row["policy"] for row in json.loads(result.stdout)["rows"]] == ["dense", "name"]
    both = call(
        "eval",
        *common,
        "--adapter",
        "other/name",
        "--data",
        folder / "texts",
        "--texts",
        "1",
        "--length",
        "100",
        "--json",
    )
    assert [row["policy"] for row in json.loads(both.stdout)["rows"]] == ["dense", "owner/name", "other/name"]
    assert call("generate", *common, "--prompt", "w3", "--max-new-tokens", "2").exit_code == 0
    assert json.loads(call("info", "owner/name", "--json").stdout)["policy"]["name"] == "kvpop"
    assert "carries no adapters called 'nothing'" in refused("info", "kvpop:nothing")


def test_the_mix_holds_the_share_of_retrieval_documents(folder, monkeypatch):
    from kvpop.jobs import training_stream
    from kvpop.models import load_base

    _, tokenizer = load_base(str(folder / "model"))
    plain = training_stream(str(folder / "texts"), tokenizer, 350, 1, 0, 2100, 0.0)
    mixed = training_stream(str(folder / "texts"), tokenizer, 350, 1, 0, 2100, 0.25)
    assert (len(plain), len(mixed)) == (6, 8)
    limited = training_stream(str(folder / "texts"), tokenizer, 350, 1, 0, 800, 0.0)
    assert sum(int((limited.batch(i)["document_ids"] >= 0).sum()) for i in range(len(limited))) == 800


def test_info(adapter):
    report = json.loads(call("info", adapter, "--json").stdout)
    assert report["model"]["layers"] == 2
    assert report["scorer_parameters"] > 0
    assert report["training"]["steps"] == 4
    shown = call("info", adapter)
    assert shown.exit_code == 0
    for words in ("24 slots per KV head: 2 sinks, 8 window, 14 long-range", "mlp+mlstm", "recall"):
        assert words in shown.stdout


def test_generate_streams_text_and_nothing_else_to_stdout(folder, adapter):
    common = ["--model", folder / "model", "--max-new-tokens", "40", "--prompt", "w3 w4 w5", "--adapter", adapter]
    streamed = call("generate", *common)
    report = json.loads(call("generate", *common, "--json").stdout)
    assert streamed.exit_code == 0
    assert streamed.stdout == report["text"] + "\n"
    assert "tokens held" in streamed.stderr
    assert report["prompt_tokens"] == 5  # the template adds one on either side
    assert report["tokens_seen"] == 5 + report["new_tokens"] - 1
    assert report["tokens_held"] == min(24, report["tokens_seen"])
    assert report["budget"] == 24


def test_generate_past_the_budget_holds_no_more(folder):
    (folder / "long.txt").write_text("w7 w8 w9 " * 40)
    sizes = []
    for count in ("5", "20"):
        result = call(
            "generate", "--model", folder / "model", "--policy", "random", *SMALL, "--prompt-file", folder / "long.txt",
            "--max-new-tokens", count, "--raw", "--temperature", "1", "--seed", "3", "--json",
        )  # fmt: skip
        report = json.loads(result.stdout)
        assert report["prompt_tokens"] == 120
        assert report["tokens_held"] == 24
        assert report["bytes_dense"] > report["bytes"]
        sizes.append(report["bytes"])
    assert sizes[0] == sizes[1]


def test_generate_with_one_seed_gives_one_text(folder):
    def text(seed: int) -> str:
        common = [
            "--model",
            folder / "model",
            "--policy",
            "streaming",
            *SMALL,
            "--prompt",
            "w3",
            "--max-new-tokens",
            "30",
        ]
        return json.loads(call("generate", *common, "--temperature", "1.2", "--seed", seed, "--json").stdout)["text"]

    assert text(0) == text(0) != text(1)


def on_adapter(folder, adapter, prompt: str = "w3 " * 60) -> list[object]:
    """Three tokens after a prompt, with the adapter."""
    where = ["--model", folder / "model", "--adapter", adapter]
    return [*where, "--prompt", prompt, "--max-new-tokens", "3"]


def test_generate_takes_another_budget_than_the_adapters(folder, adapter):
    common = [*on_adapter(folder, adapter), "--json"]
    report = json.loads(call("generate", *common, "--budget", "12").stdout)
    assert (report["budget"], report["tokens_held"]) == (12, 12)


def test_eval_compares_on_the_same_text(folder, adapter):
    words = [
        "eval", "--model", folder / "model", "--adapter", adapter, "--policy", "streaming", "--policy", "dense", "--budget",
        "24", "--budget", "100", "--sinks", "2", "--window", "8", "--data", folder / "texts", "--texts", "4", "--length",
        "300", "--passkey", "1", "--needle", "1", "--lengths", "200", "--lengths", "250", "--depths", "0,1", "--out",
        folder / "new" / "eval.json",
    ]  # fmt: skip
    result = call(*words, "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report == json.loads((folder / "new" / "eval.json").read_text())
    assert (report["texts"], report["start"]) == (4, 100)  # three files, one of them read twice
    rows = {(row["policy"], row["budget"]): row for row in report["rows"]}
    assert set(rows) == {("dense", None), *((name, b) for name in ("streaming", "adapter") for b in (24, 100))}
    dense = rows["dense", None]
    assert (dense["kl"], dense["agreement"]) == (0, 1)
    assert rows["streaming", 24]["kl"] > rows["streaming", 100]["kl"] > 0
    for row in rows.values():
        assert len(row["by_position"]) == 4
        cells = {(cell["task"], cell["length"], cell["depth"]): cell for cell in row["retrieval"]}
        assert {key for key in cells if key[0] == "passkey"} == {("passkey", n, d) for n in (200, 250) for d in (0, 1)}
        assert sum(cell["answers"] for key, cell in cells.items() if key[0] == "needle") == 8
    shown = call(*words[:-2], "--texts", "1")
    assert shown.exit_code == 0
    assert "streaming" in shown.stdout
    assert "NLL" in shown.stdout


def test_eval_of_retrieval_alone(folder):
    result = call(
        "eval", "--model", folder / "model", "--policy", "random", *SMALL, "--data", folder / "texts", "--texts", "0",
        "--passkey", "1", "--length", "150", "--json",
    )  # fmt: skip
    rows = json.loads(result.stdout)["rows"]
    assert [row["policy"] for row in rows] == ["dense", "random"]
    assert "kl" not in rows[0]
    assert [cell["depth"] for cell in rows[1]["retrieval"]] == [0.1, 0.5, 0.9]


def test_eval_asks_for_no_more_text_than_there_is(folder):
    result = call(
        "eval", "--model", folder / "model", "--policy", "random", *SMALL, "--data", folder / "texts", "--texts", "7",
        "--length", "300",
    )  # fmt: skip
    assert result.exit_code == 2
    assert "--texts 7" in result.stderr
    assert "only 6 pieces of 300 tokens" in result.stderr


def test_answers_count_at_the_nearest_depth():
    scores = RetrievalScores(exact=[True, False, True], nll=[1.0, 3.0, 5.0], depth=[0.2, 0.3, 0.8], length=[10, 10, 10])
    near, far = retrieval_cells("needle", scores, [0.1, 0.9])
    assert (near["depth"], near["exact"], near["nll"], near["answers"]) == (0.1, 0.5, 2.0, 2)
    assert (far["depth"], far["exact"], far["nll"], far["answers"]) == (0.9, 1.0, 5.0, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "10"], "budget of 10 slots cannot hold 4 sinks and a window of 64: needs 68"),
        (["--scorer", "best"], "'best'"),
        (["--mode", "half"], "mode must be one of scorer, full, lora, base, got 'half'"),
        (["--decay", "0.1"], "start 0.1"),
        (["--aggregate", "min"], "got 'min'"),
        (["--target-power", "0"], "power must be positive, got 0.0"),
        (["--inner-updates", "0"], "inner_updates must be at least 1, got 0"),
        (["--lr", "0"], "scorer_lr must be positive and finite, got 0.0"),
        (["--impl", "fast"], "--impl must be auto, reference, flex or triton, got 'fast'"),
        (["--dtype", "int8"], "float32, bfloat16, float16, auto, got 'int8'"),
        (["--device", "toaster"], "--device toaster"),
        (["--device", "cuda:99"], "--device cuda:99"),
        (["--sequence-length", "383"], "at least budget + 128 = 384, got 383"),
        (["--retrieval-share", "1"], "--retrieval-share must be in [0, 1), got 1.0"),
        (["--budget", "80", "--sequence-length", "310"], "at least 320 for --retrieval-share 0.1, got 310"),
        (["--data", "/no/such/texts"], "/no/such/texts"),
        (["--data", "champ:dev"], "'champ:dev'"),
        (["--policy", "best"], "--policy must be kvpop, streaming or dms, got 'best'"),
        (["--policy", "dms", "--ratio", "0.5"], "ratio must be at least 1 and finite, got 0.5"),
        (["--policy", "dms", "--start", "kvpop:smollm2"], "it goes with --policy kvpop, got 'dms'"),
        (["--policy", "dms", "--emitted-by", "last"], "emitted_by must be one of next, self, got 'last'"),
        (["--policy", "dms", "--gate-ramp", "2"], "gate_ramp must be a share of the steps in (0, 1], got 2.0"),
        (["--ratio", "8", "--emitted-by", "self"], "--emitted-by, --ratio is for --policy dms, got 'kvpop'"),
        (["--policy", "dms", "--also-budget", "128"], "--also-budget is for the scorers of --policy kvpop, got 'dms'"),
        (["--also-budget", "60"], "budget of 60 slots cannot hold 4 sinks and a window of 64: needs 68"),
        (["--also-budget", "68"], "train_long must hold slots of at least 1, got (188, 0)"),
        (["--decay-lr", "0"], "decay_lr_ratio must be positive and finite, got 0.0"),
        (["--start", "kvpop:smollm2", "--scorer", "mlp"], "--start settles these itself: --scorer"),
        (["--start", "kvpop:nobody"], "no adapters called 'nobody'"),
        (["--regret", "3"], "regret must be an exponent in [0, 2], got 3.0"),
        (["--lse", "both"], "got 'both'"),
        (["--watch", "paper"], "unknown writer 'paper'"),
        (["--recipe", "qwen3-9b"], "unknown recipe 'qwen3-9b'"),
        (["--recipe", "smollm2-135m", "--lr", "1"], "--recipe settles these itself: --lr"),
        (["--recipe", "qwen3-8b:4096:mlp:full"], "GB"),
        (["--where", "effort"], "--where is written field=value, got 'effort'"),
        (["--steps", "100000", "--batch-size", "64", "--data", "some/corpus"], "memory (at most 200,000,000)"),
        (["--impl", "flex", "--device", "cpu"], "--impl flex needs a GPU"),
        (["--impl", "triton", "--device", "cpu"], "--impl triton needs a GPU"),
    ],
)
def test_distill_refuses_before_the_model_is_loaded(tmp_path, no_model, words, message):
    assert message in refused("distill", "--out", tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


def test_what_decides_and_when_can_be_chosen(folder):
    words = training(folder, "self", "--steps", "2", "--policy", "dms", "--emitted-by", "self", "--gate-ramp", "0.5")
    assert call("distill", *words).exit_code == 0
    saved = json.loads((folder / "self" / "kvpop.json").read_text())
    assert saved["policy"]["emitted_by"] == "self"
    words = training(folder, "two", "--also-budget", "16", "--decay-lr", "1.0")
    assert call("distill", *words).exit_code == 0
    run = json.loads((folder / "two" / "run.json").read_text())
    assert len(run["run.train_long"]) == 2
    assert run["run.decay_lr_ratio"] == 1.0


def test_starting_from_trained_scorers_keeps_their_budget_but_for_what_is_given():
    from kvpop.budget import Budget
    from kvpop.cli.distill import started_budget

    given = {"budget": 256, "sinks": 4, "window": 64}
    assert started_budget("kvpop:smollm2", given, set()) == Budget(4, 64, 956)
    assert started_budget("kvpop:smollm2", given, {"budget"}) == Budget(4, 64, 188)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "either --adapter DIR or --policy NAME"),
        (["--policy", "dense", "--adapter", "x"], "either --adapter DIR or --policy NAME"),
        (["--policy", "best"], "unknown policy 'best': choose one of dense"),
        (["--policy", "oracle"], "not generate"),
        (["--policy", "random", "--budget", "10"], "budget of 10 slots"),
        (["--policy", "random", "--top-p", "0"], "--top-p must be in (0, 1], got 0.0"),
        (["--adapter", "/no/such/adapter"], "/no/such/adapter is not a kvpop adapter"),
        (["--policy", "random", "--prompt-file", "x"], "either --prompt TEXT or --prompt-file FILE"),
        (["--policy", "random", "--prompt", " "], "the prompt is empty"),
    ],
)
def test_generate_refuses_before_the_model_is_loaded(no_model, words, message):
    assert message in refused("generate", *(words if "--prompt" in words else ["--prompt", "w1", *words]))


def test_generate_without_a_prompt_file(no_model):
    assert "/no/such/file" in refused("generate", "--policy", "random", "--prompt-file", "/no/such/file")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give --adapter DIR or --policy NAME"),
        (["--policy", "best"], "unknown policy 'best'"),
        (["--policy", "random", "--budget", "10"], "budget of 10 slots"),
        (
            ["--policy", "random", "--budget", "2048"],
            "--length must be at least the largest budget + 2 = 2050, got 1024",
        ),
        (["--policy", "random", "--texts", "0"], "nothing to measure"),
        (["--policy", "random", "--depths", "0.5,1.5"], "--depths must lie in [0, 1], got 0.5,1.5"),
        (["--policy", "random", "--data", "/no/such/texts"], "/no/such/texts"),
        (["--adapter", "/no/such/adapter"], "/no/such/adapter is not a kvpop adapter"),
    ],
)
def test_eval_refuses_before_the_model_is_loaded(no_model, words, message):
    assert message in refused("eval", *words)


def test_an_adapter_of_another_model_is_refused(folder, adapter, tmp_path):
    other = tiny_model(kv_heads=1, groups=4, dtype=torch.float32)
    other.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (folder / "model" / name).exists():
            (tmp_path / name).write_bytes((folder / "model" / name).read_bytes())
    result = call("generate", "--model", tmp_path, "--adapter", adapter, "--prompt", "w1")
    assert result.exit_code == 2
    assert "kv_heads 2 in the adapter, 1 in the model" in result.stderr


def test_numbers_out_of_range_are_usage_errors():
    result = call("generate", "--policy", "random", "--prompt", "w1", "--max-new-tokens", "0")
    assert result.exit_code == 2
    assert "--max-new-tokens" in result.stderr


def test_debug_shows_the_traceback():
    result = call("--debug", "info", "/no/such/adapter")
    assert isinstance(result.exception, FileNotFoundError)


def test_demo_is_handed_its_options(tmp_path, monkeypatch):
    given = []
    module = types.SimpleNamespace(
        run_demo=lambda *options: (
            given.append(options) or ({"rows": [], "model": "m", "settings": {"length": 1, "start": 1}}, ["so"])
        )
    )
    monkeypatch.setitem(sys.modules, "kvpop.demo", module)
    assert call("demo", "--out", tmp_path, "--minutes", "3").exit_code == 0
    assert given == [(tmp_path, 3.0)]
    assert "--minutes must be positive, got 0.0" in refused("demo", "--minutes", "0")


def test_json_has_no_nan():
    assert json.loads(as_strict_json({"a": [float("nan"), 1.5], "b": (float("inf"),)})) == {
        "a": [None, 1.5],
        "b": [None],
    }


def test_version():
    assert call("--version").stdout == f"kvpop {kvpop.__version__}\n"


def test_help_loads_nothing_heavy():
    code = (
        "import sys\nfrom kvpop.cli import app\ntry:\n    app(['distill', '--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'matplotlib') if name in sys.modules])"
    )
    started = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "[]"
    assert time.perf_counter() - started < 5  # 0.4 s on an idle machine


def test_a_session_goes_on_where_it_ended(folder, adapter, tmp_path):
    common = ["--model", folder / "model", "--adapter", adapter, "--temperature", "1", "--seed", "5", "--raw", "--json"]
    begin = ["--prompt", "w3 w4 w5 " * 20]
    whole = json.loads(call("generate", *common, *begin, "--max-new-tokens", "12").stdout)
    state = ["--session", tmp_path / "s"]
    first = json.loads(call("generate", *common, *begin, *state, "--max-new-tokens", "7").stdout)
    size = (tmp_path / "s").stat().st_size
    second = json.loads(call("generate", *common, *state, "--max-new-tokens", "5").stdout)
    assert (first["text"] + " " + second["text"]).split() == whole["text"].split()
    assert second["tokens_seen"] == whole["tokens_seen"]
    third = json.loads(call("generate", *common, *state, "--prompt", "w7 w8", "--max-new-tokens", "5").stdout)
    assert third["tokens_seen"] > second["tokens_seen"]
    assert abs((tmp_path / "s").stat().st_size - size) < 200
    assert "belongs to another" in refused(
        "generate", "--model", folder / "model", "--policy", "random", "--prompt", "w1", *state
    )


def test_generate_takes_a_ratio_dense_layers_and_pins(folder, adapter):
    common = [*on_adapter(folder, adapter), "--raw"]
    ratio = ["--ratio", "0.25", "--context", "64"]
    assert json.loads(call("generate", *common, *ratio, "--json").stdout)["tokens_held"] == 16
    report = json.loads(call("generate", *common, *ratio, "--dense-layers", "1", "--json").stdout)
    assert (report["tokens_held"], report["budget"]) == (62, None)
    assert "58 pinned tokens do not fit into 14 long-range" in refused("generate", *common, "--pin-prompt")  # 2 sinks
    assert "belong together" in refused("generate", *common, "--ratio", "0.5")
    assert "either --budget or --ratio" in refused("generate", *common, *ratio, "--budget", "20")
    assert "layers are 0 to 1" in refused("generate", *common, "--dense-layers", "3")
    assert call("generate", *on_adapter(folder, adapter, "w3 w4"), "--raw", "--pin-prompt").exit_code == 0


@pytest.mark.parametrize(
    ("place", "policy", "kernels", "how"),
    [
        ("cpu", "kvpop", True, "reference"), ("cuda", "kvpop", True, "triton"), ("cuda", "dms", True, "flex"),
        ("cuda:1", "streaming", False, "flex"),
    ],
)  # fmt: skip
def test_how_training_attends_by_itself(monkeypatch, place: str, policy: str, kernels: bool, how: str) -> None:
    monkeypatch.setattr("kvpop.ops.HAS_TRITON", kernels)
    assert fastest(torch.device(place), policy) == how

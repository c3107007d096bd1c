"""The lm-evaluation-harness on a tiny model: what is scored and written is what the bounded cache gives, batched or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import kvpop
from kvpop.adapter import save_adapter
from kvpop.attachment import attach, detach
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.engine import Engine
from kvpop.policies import DMS, Dense, KVpop, Streaming, Tova
from tests.tiny import VOCAB, tiny_model

lm_eval = pytest.importorskip("lm_eval", reason="pip install 'kvpop[lm-eval]'")
pytest.importorskip("accelerate")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from kvpop.lm_eval import KVpopLM, generation_settings  # noqa: E402

BUDGET = Budget(2, 6, 8)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .\n"
POLICIES = {
    "kvpop": KVpop(BUDGET, "mlp+mlstm", decay=-0.001),
    "streaming": Streaming(BUDGET),
    "streaming-cache": Streaming(BUDGET, "cache"),
    "dms": DMS(window=6, ratio=2.0, sinks=2, offset=0.0),
    "dense": Dense(),
}


@pytest.fixture(scope="module")
def tokenizer():
    """A token a character, so that every stop string of two letters straddles tokens."""
    words = ["[PAD]", "[BOS]", "[EOS]", "[UNK]", *LETTERS]
    words += [f"<{i}>" for i in range(VOCAB - len(words))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]"
    )
    made.chat_template = "{% for m in messages %}A{{ m['content'] }}B{% endfor %}C"
    return made


def model_with(policy, dtype=torch.float64, **changes):
    torch.manual_seed(1)
    model = attach(tiny_model(dtype=dtype), policy)
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def lm_with(policy, tokenizer, batch_size=1, **options):
    return KVpopLM(model_with(policy), tokenizer=tokenizer, batch_size=batch_size, **options)


def text(seed: int, length: int) -> str:
    pick = torch.randint(len(LETTERS) - 1, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return "".join(LETTERS[i] for i in pick).strip() + "x"


def asking(kind: str, *arguments) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


PAIRS = [
    (text(0, 30), text(1, 5)),
    (text(2, 3), text(3, 40)),  # longer than the budget
    ("", text(4, 25)),
    (text(5, 70), "a"),
    (text(5, 70), "b"),
    (text(5, 70), "bcd"),
    (text(6, 11) + "  ", text(7, 9)),  # spaces move to the continuation
    (text(8, 300), text(9, 20)),
]


def by_hand(model, tokens: list[int], n: int, chunk: int = 512) -> tuple[float, bool]:
    """The last n tokens scored one after the other through the cache, what stands before them prefilled."""
    cache, total, greedy = BoundedCache(model), 0.0, True
    name = kvpop.attachment.cache_argument(model)
    with torch.no_grad():
        context = tokens[:-n]
        for start in range(0, len(context), chunk):
            part = torch.tensor([context[start : start + chunk]])
            position = torch.arange(start, start + part.shape[1])[None]
            logits = model(part, position_ids=position, **{name: cache}).logits[0, -1]
        for place, token in enumerate(tokens[-n:], len(context)):
            total += float(logits.log_softmax(-1)[token])
            greedy &= int(logits.argmax()) == token
            logits = model(torch.tensor([[token]]), position_ids=torch.tensor([[place]]), **{name: cache}).logits[0, -1]
    return total, greedy


def encoded(lm, context: str, continuation: str) -> tuple[list[int], int]:
    if context:
        first, rest = lm._encode_pair(context, continuation)
    else:
        first, rest = [lm.prefix_token_id], lm.tok_encode(continuation, add_special_tokens=False)
    return first + rest, len(rest)


def same(found, expected, tolerance=1e-9) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert torch.allclose(
        torch.tensor([x for x, _ in found]), torch.tensor([x for x, _ in expected]), rtol=0, atol=tolerance
    )


@pytest.mark.parametrize("name", POLICIES)
def test_loglikelihood_is_that_of_the_bounded_cache_step_by_step(name, tokenizer) -> None:
    lm = lm_with(POLICIES[name], tokenizer)
    assert lm.scoring == "sequence"
    expected = [by_hand(lm.model, *encoded(lm, *pair)) for pair in PAIRS]
    found = lm.loglikelihood(asking("loglikelihood", *PAIRS), disable_tqdm=True)
    same(found, expected)
    lm.batch_size_per_gpu = 5
    same(lm.loglikelihood(asking("loglikelihood", *PAIRS), disable_tqdm=True), expected)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("name", ["kvpop", "dms"])
def test_the_store_gives_the_same_as_the_whole_sequence(name, batch, tokenizer) -> None:
    lm = lm_with(POLICIES[name], tokenizer, batch, scoring="store", prefill_chunk=7)
    expected = lm_with(POLICIES[name], tokenizer).loglikelihood(asking("loglikelihood", *PAIRS), disable_tqdm=True)
    same(lm.loglikelihood(asking("loglikelihood", *PAIRS), disable_tqdm=True), expected)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_tova_is_scored_through_its_store_as_it_generates(batch, tokenizer) -> None:
    lm = lm_with(Tova(16), tokenizer, batch, prefill_chunk=9)
    assert lm.scoring == "store"
    assert lm.get_model_info()["kvpop_loglikelihood"] == "store"
    expected = [by_hand(lm.model, *encoded(lm, *pair), chunk=9) for pair in PAIRS]
    same(lm.loglikelihood(asking("loglikelihood", *PAIRS), disable_tqdm=True), expected)
    other = lm_with(Tova(16), tokenizer, batch, scoring="sequence")  # decoding from the first token: another set
    assert other.loglikelihood(asking("loglikelihood", *PAIRS), disable_tqdm=True)[0][0] != pytest.approx(
        expected[0][0]
    )


def test_the_budget_is_felt_and_a_dense_policy_is_the_plain_model(tokenizer) -> None:
    requests = asking("loglikelihood", *PAIRS)
    plain = HFLM(pretrained=tiny_model(), tokenizer=tokenizer, batch_size=2)
    expected = plain.loglikelihood(requests, disable_tqdm=True)
    same(lm_with(Dense(), tokenizer, 3).loglikelihood(requests, disable_tqdm=True), expected)
    bounded = lm_with(POLICIES["streaming"], tokenizer).loglikelihood(requests, disable_tqdm=True)
    assert bounded[0][0] != pytest.approx(expected[0][0])


def test_greedy_continuations_are_recognised(tokenizer) -> None:
    lm = lm_with(POLICIES["kvpop"], tokenizer, 2)
    (written,) = lm.generate_until(asking("generate_until", (PAIRS[0][0], {"until": [], "max_gen_toks": 4})), True)
    pairs = [(PAIRS[0][0], written), (PAIRS[0][0], written[:-1] + "?")]
    ids = tokenizer.encode(written, add_special_tokens=False)
    if len(ids) == 4 and tokenizer.decode(ids) == written:  # nothing but letters
        assert [g for _, g in lm.loglikelihood(asking("loglikelihood", *pairs), True)] == [True, False]


@pytest.mark.parametrize("name", ["kvpop", "tova"])
def test_rolling_covers_every_token_once_in_windows(name, tokenizer) -> None:
    policy = Tova(16) if name == "tova" else POLICIES[name]
    texts = [text(20, 100), text(21, 7), text(22, 45)]
    one = lm_with(policy, tokenizer, 1, max_length=40, add_bos_token=False)
    three = lm_with(policy, tokenizer, 3, max_length=40, add_bos_token=False)
    found = one.loglikelihood_rolling(asking("loglikelihood_rolling", *((x,) for x in texts)), True)
    assert found == pytest.approx(
        three.loglikelihood_rolling(asking("loglikelihood_rolling", *((x,) for x in texts)), True), abs=1e-9
    )
    ids = tokenizer.encode(texts[1], add_special_tokens=False)
    assert found[1] == pytest.approx(by_hand(one.model, [1, *ids], len(ids))[0], abs=1e-9)
    whole = tokenizer.encode(texts[0], add_special_tokens=False)
    windows = [([1, *whole[:40]], 40), (whole[39:80], 40), (whole[len(whole) - 41 :], len(whole) - 80)]
    assert found[0] == pytest.approx(sum(by_hand(one.model, *window)[0] for window in windows), abs=1e-9)


def test_what_does_not_fit_is_cut_on_the_left_counted_and_warned_about(tokenizer) -> None:
    model = model_with(POLICIES["kvpop"], max_position_embeddings=32)
    lm = KVpopLM(model, tokenizer=tokenizer)
    pair = (text(30, 90), text(31, 10))
    with pytest.warns(UserWarning, match="1 of 2 contexts were too long for 32 tokens and were cut on the left"):
        found = lm.loglikelihood(asking("loglikelihood", pair, ("ab", "c")), True)
    tokens, n = encoded(lm, *pair)
    same(found[:1], [by_hand(model, tokens[-33:], n)])
    assert lm.get_model_info()["kvpop_truncated"] == 1
    with pytest.raises(ValueError, match="a continuation of 41 tokens does not fit the model's 32"):
        lm.loglikelihood(asking("loglikelihood", ("ab", "c" * 41)), True)
    plain = HFLM(pretrained=model, tokenizer=tokenizer)
    same(plain.loglikelihood(asking("loglikelihood", pair), True), found[:1])
    with pytest.warns(UserWarning, match="1 of 1 contexts"):
        (written,) = lm.generate_until(asking("generate_until", (pair[0], {"max_gen_toks": 5, "until": []})), True)
    ids = tokenizer.encode(pair[0])[-27:]
    (expected,) = Engine(model, tokenizer, rows=1).generate([ids], max_new_tokens=5, stop_ids=[2])
    assert written == expected.text
    with pytest.raises(ValueError, match="32 new tokens leave no room for a context in 32"):
        lm.generate_until(asking("generate_until", ("ab", {"max_gen_toks": 32})), True)


CONTEXTS = [text(40, 50), text(41, 4), text(42, 120), text(43, 17), ""]


@pytest.mark.parametrize("name", ["kvpop", "tova", "dms"])
def test_generate_until_is_the_engine_and_the_same_for_every_batch_size(name, tokenizer) -> None:
    policy = Tova(16) if name == "tova" else POLICIES[name]
    greedy = {"until": [], "max_gen_toks": 30, "do_sample": False, "temperature": 0.7}  # not sampled: no temperature
    drawn = {"until": [], "max_new_tokens": 30, "do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 20}
    requests = asking("generate_until", *((c, s) for s in (greedy, drawn) for c in CONTEXTS))
    one, four = (lm_with(policy, tokenizer, rows).generate_until(requests, True) for rows in (1, 4))
    assert one == four
    model = model_with(policy)
    ids = [tokenizer.encode(context) for context in CONTEXTS]
    expected = Engine(model, tokenizer, rows=2).generate(ids, max_new_tokens=30, stop_ids=[2])
    assert one[: len(CONTEXTS)] == [request.text for request in expected]


def test_what_is_drawn_depends_on_the_seed_and_on_which_time_it_is(tokenizer) -> None:
    drawn = {"until": [], "max_gen_toks": 25, "do_sample": True}
    requests = asking("generate_until", *[(CONTEXTS[0], drawn)] * 3)
    first = lm_with(POLICIES["kvpop"], tokenizer, 2).generate_until(requests, True)
    assert len(set(first)) == 3
    assert lm_with(POLICIES["kvpop"], tokenizer, 3).generate_until(requests, True) == first
    assert not set(lm_with(POLICIES["kvpop"], tokenizer, seed=1).generate_until(requests, True)) & set(first)


@pytest.mark.parametrize("rows", [1, 3])
def test_stop_strings_that_straddle_tokens_end_the_text_before_them(rows, tokenizer) -> None:
    lm = lm_with(POLICIES["kvpop"], tokenizer, rows)
    free = {"until": [], "max_gen_toks": 40}
    whole = lm.generate_until(asking("generate_until", *((c, free) for c in CONTEXTS)), True)
    stops = [x[5:8] for x in whole]
    found = lm.generate_until(
        asking("generate_until", *((c, free | {"until": ["never there", stop]}) for c, stop in zip(CONTEXTS, stops))),
        True,
    )
    assert found == [x[: x.index(stop)] for x, stop in zip(whole, stops)]
    as_string = lm.generate_until(asking("generate_until", (CONTEXTS[0], free | {"until": stops[0]})), True)
    assert as_string == found[:1]


def test_special_tokens_among_stop_strings_end_an_answer_as_tokens(tokenizer) -> None:
    lm = lm_with(POLICIES["kvpop"], tokenizer)
    seen = {}

    class Watched(Engine):
        def submit(self, *arguments, **settings):
            seen.update(settings)
            return super().submit(*arguments, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpop.lm_eval.Engine", Watched)
        lm.generate_until(asking("generate_until", ("ab", {"until": ["[PAD]", "xy"], "max_gen_toks": 1})), True)
    assert seen["stop"] == ["xy"]
    assert seen["stop_ids"] == {0, 2}


def test_thinking_is_left_out_of_the_answer(tokenizer) -> None:
    free = {"until": [], "max_gen_toks": 30}
    whole = lm_with(POLICIES["kvpop"], tokenizer).generate_until(asking("generate_until", (CONTEXTS[0], free)), True)[0]
    end = whole[10:12]
    behind = whole.split(end)[-1].lstrip()
    lm = lm_with(POLICIES["kvpop"], tokenizer, think_end_token=end)
    assert lm.generate_until(asking("generate_until", (CONTEXTS[0], free)), True) == [behind]
    (token,) = tokenizer.encode(whole[10], add_special_tokens=False)
    lm = lm_with(POLICIES["kvpop"], tokenizer, think_end_token=token)
    assert (
        lm.generate_until(asking("generate_until", (CONTEXTS[0], free)), True)[0] == whole.split(whole[10])[-1].lstrip()
    )


def test_generation_settings_as_tasks_give_them() -> None:
    base = {"max_new_tokens": 9, "temperature": 0.0, "top_p": 1.0, "top_k": 0}
    assert generation_settings({}, 9) == (base, [])
    assert generation_settings({"until": "a", "temperature": 0.0, "max_tokens": 3, "num_beams": 1}, 9) == (
        base | {"max_new_tokens": 3},
        ["a"],
    )
    assert generation_settings({"temperature": 0.6, "until": ["", "b"]}, 9) == (base | {"temperature": 0.6}, ["b"])
    assert generation_settings({"do_sample": True}, 9)[0]["temperature"] == 1.0
    assert generation_settings({"do_sample": False, "temperature": 0.6}, 9)[0]["temperature"] == 0.0
    with pytest.raises(ValueError, match=r"does not have: \{'num_beams': 4\}"):
        generation_settings({"num_beams": 4}, 9)


def test_plain_hflm_on_a_model_with_a_policy(tokenizer) -> None:
    """Its loglikelihood is a whole sequence under the mask; its generate goes through the bounded cache."""
    ours = lm_with(POLICIES["kvpop"], tokenizer)
    theirs = HFLM(pretrained=model_with(POLICIES["kvpop"]), tokenizer=tokenizer, batch_size=3)
    requests = asking("loglikelihood", *PAIRS)
    same(theirs.loglikelihood(requests, True), ours.loglikelihood(requests, True))
    rolling = asking("loglikelihood_rolling", (text(50, 60),))
    assert theirs.loglikelihood_rolling(rolling, True) == pytest.approx(ours.loglikelihood_rolling(rolling, True))
    made = []
    prepare = theirs.model._prepare_cache_for_generation

    def watched(*arguments, **keywords):
        found = prepare(*arguments, **keywords)
        made.extend(x for a in arguments if isinstance(a, dict) for x in a.values() if isinstance(x, BoundedCache))
        return found

    theirs.model._prepare_cache_for_generation = watched
    settings = {"until": ["zz"], "max_gen_toks": 20, "do_sample": False}
    requests = asking("generate_until", *((c, settings) for c in CONTEXTS[:4]))
    assert theirs.generate_until(requests, True) == ours.generate_until(requests, True)
    assert made
    assert made[0].rows_held() == BUDGET.slots


def test_bad_settings_say_what_is_wrong(tokenizer, monkeypatch) -> None:
    for words, options in (
        ("batch_size must be a number of rows", {"batch_size": "auto"}),
        ("batch_size must be a number of rows", {"batch_size": 0}),
        ("scoring must be auto, sequence or store", {"scoring": "other"}),
        ("budget, sinks and window belong to an adapter or a policy", {"budget": 4}),
        ("oracle", {"policy": "oracle"}),
        ("either --adapter DIR or --policy NAME", {"policy": "tova", "adapter": "somewhere"}),
    ):
        with pytest.raises(ValueError, match=words):
            KVpopLM(model_with(POLICIES["kvpop"]), tokenizer=tokenizer, **options)
    with pytest.raises(ValueError, match=r"policy"):
        KVpopLM(tiny_model(), tokenizer=tokenizer)
    lm = lm_with(POLICIES["kvpop"], tokenizer)
    with pytest.raises(ValueError, match="nothing to score"):
        lm._loglikelihood_tokens([(None, [1], [])], disable_tqdm=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="runs in one process"):
        lm_with(POLICIES["kvpop"], tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tokenizer):
    """A model, an adapter for it, and two tasks of the harness with their data."""
    folder = tmp_path_factory.mktemp("harness")
    policy = KVpop(Budget(2, 6, 24), "mlp", decay=-0.001)
    model = model_with(policy, torch.float32)
    save_adapter(model, policy, folder / "adapter", model_id="tiny")
    detach(model).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"question": text(60 + i, 50 + i), "options": ["ab", "cd", "ef"], "gold": i % 3} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = (
        f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder / 'rows.jsonl'}\ntest_split: test\n"
    )
    (folder / "tiny_choice.yaml").write_text(
        "task: tiny_choice\noutput_type: multiple_choice\n" + common
        + 'doc_to_text: "{{question}}"\ndoc_to_choice: "{{options}}"\ndoc_to_target: gold\ntarget_delimiter: ""\n'
        "metric_list:\n  - metric: acc\n"
    )  # fmt: skip
    (folder / "tiny_write.yaml").write_text(
        "task: tiny_write\noutput_type: generate_until\n" + common
        + 'doc_to_text: "{{question}}"\ndoc_to_target: "{{options[gold]}}"\n'
        'generation_kwargs:\n  until: ["zz"]\n  max_gen_toks: 8\n  do_sample: false\n'
        "metric_list:\n  - metric: exact_match\n    aggregation: mean\n    higher_is_better: true\n"
    )  # fmt: skip
    return folder


def test_it_is_registered_by_importing_the_module() -> None:
    assert get_model("kvpop") is KVpopLM


def test_the_harness_runs_tasks_by_model_args(folder, monkeypatch) -> None:
    monkeypatch.setenv("HF_HOME", str(folder / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from lm_eval.tasks import TaskManager

    tasks = ["tiny_choice", "tiny_write"]
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = {}
    for name, how in {
        "adapter": f"adapter={folder / 'adapter'},budget=24",
        "streaming": "policy=streaming,budget=16,sinks=2,window=6",
    }.items():
        for batch in (1, 3):
            done = lm_eval.simple_evaluate(
                model="kvpop", model_args=f"pretrained={folder / 'model'},dtype=float32,{how}", tasks=tasks, device="cpu",
                batch_size=batch, task_manager=manager, bootstrap_iters=0,
            )  # fmt: skip
            samples = {task: [row["filtered_resps"] for row in done["samples"][task]] for task in tasks}
            info = done["config"]
            found[name, batch] = samples
            assert info["kvpop_loglikelihood"] == "sequence"
            assert info["kvpop_policies"] == ["kvpop-mlp" if name == "adapter" else "streaming"]
            assert info["kvpop_first_layer"]["budget"] == ([2, 6, 16] if name == "adapter" else [2, 6, 8])
    for name in ("adapter", "streaming"):
        assert found[name, 1]["tiny_write"] == found[name, 3]["tiny_write"]
        for one, three in zip(found[name, 1]["tiny_choice"], found[name, 3]["tiny_choice"]):
            assert [x for x, _ in one] == pytest.approx([x for x, _ in three], abs=1e-4)
    assert found["adapter", 1] != found["streaming", 1]


def test_the_command_line(folder) -> None:
    """``python -m kvpop.lm_eval`` is the harness's own command line that knows the model type."""
    environment = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [
        sys.executable, "-m", "kvpop.lm_eval", "run", "--model", "kvpop", "--include_path", str(folder), "--model_args",
        f"pretrained={folder / 'model'},policy=tova,budget=16,sinks=2,window=6", "--tasks", "tiny_choice", "--output_path",
        str(folder / "out"), "--limit", "2",
    ]  # fmt: skip
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tiny_choice" in done.stdout
    (path,) = (folder / "out").rglob("results_*.json")
    assert json.loads(path.read_text())["config"]["kvpop_loglikelihood"] == "store"

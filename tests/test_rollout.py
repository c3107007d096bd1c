from __future__ import annotations

import json
import math

import pytest
import torch

from kvpop.attachment import attach, cache_argument
from kvpop.budget import Budget, dense_bytes
from kvpop.cache import BoundedCache
from kvpop.plots import demo_figure, training_figure
from kvpop.policies import POLICIES, KVpop, policy_by_name
from kvpop.rollout import TextStream, generate, prompt_ids
from tests.tiny import VOCAB, tiny_model

BUDGET = Budget(sinks=2, window=8, long=6)
PROMPT = torch.randint(3, VOCAB, (1, 21), generator=torch.Generator().manual_seed(0))


def tokens(steps) -> list[int]:
    return [step.token for step in steps]


@pytest.mark.parametrize("name", ["dense", "streaming", "streaming-cache", "random", "tova", "kvpop"])
def test_greedy_is_what_transformers_generates(name):
    policy = KVpop(BUDGET) if name == "kvpop" else policy_by_name(name, BUDGET)
    model = attach(tiny_model(), policy)
    theirs = model.generate(PROMPT, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert tokens(generate(model, PROMPT, max_new_tokens=40)) == theirs[0, PROMPT.shape[1] :].tolist()


@pytest.mark.parametrize("chunk", [1, 4, 512])
def test_prefill_chunks_do_not_matter(chunk):
    model = attach(tiny_model(), KVpop(BUDGET))
    assert tokens(generate(model, PROMPT, max_new_tokens=20, prefill_chunk=chunk)) == tokens(
        generate(model, PROMPT, max_new_tokens=20)
    )


def test_memory_is_flat_once_full_and_dense_grows():
    model = attach(tiny_model(), KVpop(BUDGET))
    steps = list(generate(model, PROMPT[:, :10], max_new_tokens=60))
    assert [step.seen for step in steps] == list(range(10, 70))
    assert [step.held for step in steps] == [min(seen, BUDGET.slots) for seen in range(10, 70)]
    assert len({step.nbytes for step in steps if step.held == BUDGET.slots}) == 1
    shape = dict(layers=2, kv_heads=2, head_dim=8, element_size=8)
    assert [step.dense_bytes for step in steps] == [dense_bytes(seen, **shape) for seen in range(10, 70)]
    assert all(step.seconds > 0 for step in steps)


def test_dense_bytes_are_what_a_dense_cache_holds():
    model = attach(tiny_model(), POLICIES["dense"](BUDGET))
    cache = BoundedCache(model)
    last = list(generate(model, PROMPT, max_new_tokens=10, cache=cache))[-1]
    store = cache.stores[0]
    held = sum(x.numel() * x.element_size() for s in cache.stores for x in (s.keys, s.values))
    assert last.held == last.seen == 30
    assert last.dense_bytes == held * 30 // store.keys.shape[2]


def test_sampling_depends_on_the_seed_alone():
    model = attach(tiny_model(), KVpop(BUDGET))

    def draw(seed: int) -> list[int]:
        return tokens(generate(model, PROMPT, max_new_tokens=30, temperature=1.5, top_p=0.9, top_k=20, seed=seed))

    torch.manual_seed(1)
    first = draw(0)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert draw(0) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert draw(1) != first


def test_a_tiny_temperature_is_greedy():
    model = attach(tiny_model(), KVpop(BUDGET))
    greedy = tokens(generate(model, PROMPT, max_new_tokens=20))
    assert tokens(generate(model, PROMPT, max_new_tokens=20, temperature=1e-6)) == greedy


def test_a_stop_token_is_the_last():
    model = attach(tiny_model(), KVpop(BUDGET))
    free = tokens(generate(model, PROMPT, max_new_tokens=20))
    stop = free[5]
    assert tokens(generate(model, PROMPT, max_new_tokens=20, stop_ids=[stop])) == free[: free.index(stop) + 1]


def test_a_cache_is_continued():
    """Two turns through one cache are one text: positions go on where they stopped."""
    model = attach(tiny_model(), KVpop(BUDGET))
    cache = BoundedCache(model)
    first = list(generate(model, PROMPT, max_new_tokens=12, cache=cache))
    assert cache.tokens_seen() == [first[-1].seen] == [PROMPT.shape[1] + 11]
    turn = torch.tensor([[first[-1].token, 5, 6, 7]])
    second = list(generate(model, turn, max_new_tokens=12, cache=cache))
    whole = torch.cat([PROMPT, torch.tensor([tokens(first)]), turn[:, 1:]], dim=1)
    assert tokens(second) == tokens(generate(model, whole, max_new_tokens=12))
    assert second[0].seen == whole.shape[1]


def test_the_callers_grad_mode_is_left_alone():
    model = attach(tiny_model(), KVpop(BUDGET))
    for _ in generate(model, PROMPT, max_new_tokens=2):
        assert torch.is_grad_enabled()


def test_only_the_last_logits_are_computed(monkeypatch):
    model = attach(tiny_model(), KVpop(BUDGET))
    assert cache_argument(model) in ("cache", "past_key_values")
    shapes = []
    model.lm_head.register_forward_hook(lambda module, given, out: shapes.append(out.shape[1]))
    list(generate(model, PROMPT, max_new_tokens=3, prefill_chunk=4))
    assert set(shapes) == {1}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
        (dict(temperature=-1.0), "temperature must be at least 0, got -1.0"),
        (dict(temperature=math.nan), "temperature must be at least 0, got nan"),
        (dict(top_p=0.0), r"top_p must be in \(0, 1\], got 0.0"),
        (dict(top_p=1.1), r"top_p must be in \(0, 1\], got 1.1"),
        (dict(top_k=-1), "top_k must be at least 0, got -1"),
        (dict(prefill_chunk=0), "prefill_chunk must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused_at_once(given, message):
    model = attach(tiny_model(), KVpop(BUDGET))
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPT, **{"max_new_tokens": 4, **given})


@pytest.mark.parametrize("shape", [(5,), (2, 5), (1, 0)])
def test_prompts_of_another_shape_are_refused(shape):
    model = attach(tiny_model(), KVpop(BUDGET))
    with pytest.raises(ValueError, match="shape"):
        generate(model, torch.ones(shape, dtype=torch.long), max_new_tokens=1)


def test_a_model_without_a_policy_is_refused():
    with pytest.raises(ValueError, match="no policy attached"):
        generate(tiny_model(), PROMPT, max_new_tokens=1)


class Bytes:
    """A tokenizer of UTF-8 bytes; 0 is a special token."""

    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **options) -> str:
        return bytes(i for i in ids if i).decode(errors="replace")


def test_streamed_text_never_changes_and_is_complete():
    text = "naïve – 漢字 🙂 end"
    stream = TextStream(Bytes())
    ids = [*text.encode(), 0]
    pieces = [stream.put(token, last=i == len(ids) - 1) for i, token in enumerate(ids)]
    assert "".join(pieces) == stream.text == text
    assert "\ufffd" not in "".join(pieces)


def test_a_character_cut_off_at_the_end_is_shown():
    stream = TextStream(Bytes())
    assert stream.put(ord("a")) == "a"
    assert stream.put("漢".encode()[0]) == ""
    assert stream.put("漢".encode()[1], last=True) == "\ufffd"


def test_what_waits_can_be_asked_for():
    stream = TextStream(Bytes())
    assert stream.put("漢".encode()[0]) == stream.put("漢".encode()[1]) == ""
    assert [stream.flush(), stream.flush(), stream.text] == ["\ufffd", "", "\ufffd"]


def test_prompts_take_the_chat_template_unless_raw():
    class Chat(Bytes):
        chat_template = "yes"

        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            marks = {"user": "<>", "assistant": "[]"}
            return "".join(marks[m["role"]][0] + m["content"] + marks[m["role"]][1] for m in messages)

    assert prompt_ids(Chat(), "hi").tolist() == [list(b"<hi>")]
    # After an answer: its end, unless the answer's last token is it, and the new message; no second greeting.
    assert prompt_ids(Chat(), "hi", after=7).tolist() == [list(b"]<hi>")]
    assert prompt_ids(Chat(), "hi", after=ord("]")).tolist() == [list(b"<hi>")]
    assert prompt_ids(Chat(), "hi", raw=True).tolist() == prompt_ids(Bytes(), "hi").tolist() == [list(b"hi")]


def is_png(path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 10_000


def report(rows, trace):
    generation = {"budget": 64, "tokens": 90, "bytes_first_full": 1, "bytes_last": 1, "bytes_dense": 1, "trace": trace}
    return {"rows": rows, "generation": generation}


TRACE = [{"tokens": t, "bytes": min(t, 64) * 1000, "bytes_dense": t * 1000} for t in range(1, 91)]
ROWS = [{"policy": "dense", "budget": None, "kl": 0.0}] + [
    {"policy": name, "budget": budget, "kl": 10 / budget}
    for name in ("streaming", "random", "tova", "oracle", "kvpop-mlp", "kvpop-mlstm", "a", "b", "c", "d")
    for budget in (64, 128)
]


@pytest.mark.parametrize("rows", [ROWS, ROWS[:2], [{"policy": "tova", "budget": 64, "kl": 0.0}]])
def test_demo_figure(tmp_path, rows):
    demo_figure(report(rows, TRACE), tmp_path / "new" / "demo.png")
    assert is_png(tmp_path / "new" / "demo.png")


def test_figures_of_nothing_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no row has a budget"):
        demo_figure(report(ROWS[:1], TRACE), tmp_path / "x.png")
    with pytest.raises(ValueError, match="trace"):
        demo_figure(report(ROWS, []), tmp_path / "x.png")
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(ValueError, match="no line"):
        training_figure(tmp_path / "log.jsonl", tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("count", [1, 60])
def test_training_figure(tmp_path, count):
    lines = [
        {
            "step": i + 1,
            "score_loss": 1 / (i + 1),
            "accuracy": 0.5,
            "recall": math.nan,
            "keep": [[0.1, 0.4], [0.2, 0.3]],
        }
        for i in range(count)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    training_figure(tmp_path / "log.jsonl", tmp_path / "training.png")
    assert is_png(tmp_path / "training.png")

"""Many requests over few rows: each must get exactly what it gets alone."""

from __future__ import annotations

import gc
import itertools
import math
import random
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpop
from kvpop.attachment import attach
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.engine import Engine, Request
from kvpop.policies import DMS, KVpop, Streaming, policy_by_name
from kvpop.rollout import Words, generate
from tests.test_invariant import shake
from tests.tiny import VOCAB, tiny_model

BUDGET = Budget(sinks=2, window=6, long=5)
CHUNK = 16

# Whole and half characters, one letter and several: what a tokenizer of bytes pairs may hold. 0 to 2 are special.
PIECES = [b"", b"", b"", *(bytes([c]) for c in range(ord("a"), ord("z") + 1)), b"\xc3"]
PIECES += [b"\xa9", b"the", b" of", b"ab", b"ba", b" ", b"\n", b"\xf0", b"\x9f", b"\x99", b"\x82"]
PIECES += [bytes([c]) for c in range(ord("A"), ord("A") + VOCAB - len(PIECES))]


class Pieces:
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [PIECES.index(c.encode()) for c in text]

    def decode(self, ids: list[int], **options) -> str:
        return b"".join(PIECES[i] for i in ids).decode(errors="replace")


def model_with(name: str = "kvpop", dtype=torch.float64, budget: Budget = BUDGET):
    by_head = KVpop(budget, heads=tuple((1 + layer, 9 - layer) for layer in range(2)))
    made = {
        "kvpop": KVpop(budget),
        "by head": by_head,
        "dms": DMS(window=budget.window, ratio=2.0, sinks=budget.sinks, offset=0.0),
    }
    policy = made.get(name) or policy_by_name(name, budget)
    model = attach(tiny_model(dtype=dtype), policy)
    shake(model, 7)
    return model


def prompts_of(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def settings_of(i: int) -> dict[str, object]:
    """Every other request is sampled, each in a way of its own."""
    sampled = dict(temperature=0.5 + i % 3, top_p=(1.0, 0.9)[i % 4 == 1], top_k=(0, 20)[i % 8 == 3], seed=i)
    return {"max_new_tokens": 1 + i * 7 % 14, **(sampled if i % 2 else {})}


def alone(model, prompt: list[int], *, pinned=(), prefill_chunk: int = CHUNK, **settings) -> list[int]:
    cache = BoundedCache(model)
    if pinned:
        cache.pin(list(pinned))
    steps = generate(model, torch.tensor([prompt]), cache=cache, prefill_chunk=prefill_chunk, **settings)
    return [step.token for step in steps]


def free_text(tokens: list[int]) -> str:
    return Pieces().decode(tokens)


def rows_in_use(engine: Engine) -> list[Request]:
    return [request for request in engine.rows if request is not None]


@pytest.mark.parametrize(
    ("name", "count", "dtype"),
    [
        ("kvpop", 64, torch.float64),
        ("kvpop", 24, torch.float32),
        ("streaming", 64, torch.float32),
        ("streaming-cache", 16, torch.float64),
        ("random", 64, torch.float64),
        ("tova", 32, torch.float64),
        ("tova", 16, torch.float32),
        ("dense", 32, torch.float64),
        ("dense", 16, torch.float32),
    ],
)
def test_every_request_equals_its_single_stream(name, count, dtype):
    model = model_with(name, dtype)
    engine = Engine(model, rows=8, prefill_chunk=CHUNK)
    prompts = prompts_of(count)
    requests = [engine.submit(prompt, **settings_of(i)) for i, prompt in enumerate(prompts)]
    events = list(engine.run())
    for i, (prompt, request) in enumerate(zip(prompts, requests)):
        assert request.tokens == alone(model, prompt, **settings_of(i)), i
        assert [event.token for event in events if event.request is request] == request.tokens
        assert (request.finish_reason, request.seen) == ("length", len(prompt) + len(request.tokens) - 1)
        assert request.submitted <= request.first_token <= request.finished
    assert not engine.busy
    assert engine.rows == [None] * 8


@pytest.mark.parametrize("name", ["kvpop", "random", "streaming", "tova", "dense"])
def test_a_row_holds_what_the_single_stream_holds_and_an_idle_row_nothing(name):
    model = model_with(name)
    prompts = prompts_of(7, longest=40, seed=1)
    expected = []
    for i, prompt in enumerate(prompts):
        cache, held = BoundedCache(model), {}
        for step in generate(model, torch.tensor([prompt]), cache=cache, prefill_chunk=CHUNK, **settings_of(i)):
            held[step.seen] = [layer[0] for layer in cache.held_positions()]
        expected.append(held)
    engine = Engine(model, rows=3, prefill_chunk=CHUNK)
    requests = [engine.submit(prompt, **settings_of(i)) for i, prompt in enumerate(prompts)]
    compared = 0
    while engine.busy:
        engine.step()
        for row, request in enumerate(engine.rows):
            held = [layer[row] for layer in engine.cache.held_positions()] if engine.cache else [[[]]]
            if request is None or not request.tokens:
                assert not any(head for layer in held for head in layer)
            else:
                assert held == expected[requests.index(request)][request.seen]
                assert engine.cache.tokens_seen()[row] == request.seen
                compared += 1
    assert compared > 20


def test_results_depend_neither_on_the_rows_nor_on_the_order():
    model = model_with()
    prompts = prompts_of(14, longest=30, seed=2)
    expected = [alone(model, prompt, **settings_of(i)) for i, prompt in enumerate(prompts)]
    for rows in (1, 3, 8):
        order = random.Random(rows).sample(range(14), 14)
        engine = Engine(model, rows=rows, prefill_chunk=CHUNK)
        requests = {i: engine.submit(prompts[i], **settings_of(i)) for i in order}
        list(engine.run())
        assert [requests[i].tokens for i in range(14)] == expected


def test_a_row_is_good_as_new_after_a_longer_request():
    model = model_with()
    engine = Engine(model, rows=1, prefill_chunk=CHUNK)
    for prompt, pinned in (([5] * 70, [(3, 7)]), ([6, 7, 8], []), (list(range(3, 40)), [(9, 10), (20, 22)]), ([9], [])):
        request = engine.submit(prompt, max_new_tokens=20, pinned=pinned)
        list(engine.run())
        assert request.tokens == alone(model, prompt, max_new_tokens=20, pinned=pinned)
        assert engine.cache.tokens_seen() == [0]


def test_seeds_decide_and_nothing_else():
    model = model_with()
    engine = Engine(model, rows=4)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    settings = dict(max_new_tokens=12, temperature=1.5)
    first, again, other = (engine.submit([5, 6, 7], seed=seed, **settings) for seed in (1, 1, 2))
    list(engine.run())
    later = engine.generate([[5, 6, 7]], seed=1, **settings)[0]
    assert first.tokens == again.tokens == later.tokens != other.tokens
    assert torch.equal(torch.get_rng_state(), state)


def test_memory_is_flat_over_many_requests():
    model = model_with()
    engine = Engine(model, rows=3, prefill_chunk=CHUNK)
    for i, prompt in enumerate(prompts_of(25, longest=50)):
        engine.submit(prompt, max_new_tokens=1 + i % 5)
    sizes, places = set(), set()
    for _ in engine.run():
        sizes.add(engine.cache.nbytes())
        places.add(tuple(x.data_ptr() for store in engine.cache.stores for x in store.tensors().values()))
    assert len(sizes) == len(places) == 1
    assert sum(1 for request in rows_in_use(engine)) == 0


def test_a_long_prompt_does_not_stall_the_others():
    model = model_with()
    engine = Engine(model, rows=2, prefill_chunk=8)
    short = engine.submit([5, 6], max_new_tokens=30)
    engine.step()
    long = engine.submit(prompts_of(1, seed=3)[0] * 40, max_new_tokens=2)
    between = []
    while long.first_token is None:
        seen, tokens = long.seen, len(short.tokens)
        engine.step()
        assert long.seen - seen <= 8
        between.append(len(short.tokens) - tokens)
        if len(between) == 20:
            break
    assert between == [1] * 20
    assert long.seen == 160


def test_short_prompts_share_a_steps_chunk_and_are_cut_as_if_alone():
    model = model_with("tova")  # what it keeps depends on where a prompt is cut
    engine = Engine(model, rows=4, prefill_chunk=CHUNK)
    prompts = [[5] * 6, [6] * 7, list(range(3, 40)), [7] * 3]
    requests = [engine.submit(prompt, max_new_tokens=9) for prompt in prompts]
    assert [event.request for event in engine.step()] == requests[:2]
    assert [request.seen for request in requests] == [6, 7, 0, 0]
    list(engine.run())
    assert [request.tokens for request in requests] == [alone(model, prompt, max_new_tokens=9) for prompt in prompts]


def test_decoding_has_one_shape():
    model = model_with("streaming")
    shapes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    list(Engine(model, rows=5, prefill_chunk=CHUNK).generate(prompts_of(9, longest=20), max_new_tokens=4))
    assert {shape for shape in shapes if shape[0] != 1} == {(5, 1)}


def test_one_new_token_needs_no_decoding():
    model = model_with()
    engine = Engine(model, rows=2)
    requests = engine.generate([[5, 6], [7], [8] * 30], max_new_tokens=1)
    assert [request.tokens for request in requests] == [
        alone(model, request.prompt, max_new_tokens=1) for request in requests
    ]


def test_pinned_tokens_stay_in_their_row_alone():
    model = model_with("streaming")
    engine = Engine(model, rows=3, prefill_chunk=CHUNK)
    prompt = list(range(3, 50))
    spans = [[], [(8, 11)], [], [(5, 6), (30, 33)]]
    requests = [engine.submit(prompt, max_new_tokens=12, pinned=pinned) for pinned in spans]
    kept = [None] * 4
    while engine.busy:
        engine.step()
        for request in rows_in_use(engine):
            if request.tokens:
                kept[request.id] = engine.cache.held_positions()[0][request.row][0]
    for request, pinned, held in zip(requests, spans, kept):
        assert request.tokens == alone(model, prompt, max_new_tokens=12, pinned=pinned)
        assert {p for start, stop in pinned for p in range(start, stop)} <= set(held)
    assert requests[0].tokens == requests[2].tokens != requests[1].tokens


def prefilled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every pass that takes in prompts, as it happens."""
    passes: list[int] = []
    forward = engine._forward

    def count(cache: BoundedCache, ids: torch.Tensor, position: torch.Tensor, valid: torch.Tensor | None = None):
        if valid is None:
            passes.append(ids.shape[1])
        return forward(cache, ids, position, valid)

    monkeypatch.setattr(engine, "_forward", count)
    return passes


@pytest.mark.parametrize("name", ["kvpop", "random", "streaming", "tova", "dms", "dense"])
def test_a_prompt_that_comes_again_is_taken_in_once_and_gives_what_it_gives_alone(name, monkeypatch):
    model = model_with(name)
    engine = Engine(model, rows=4, prefill_chunk=CHUNK)
    passes = prefilled(engine, monkeypatch)
    prompts = prompts_of(3, longest=60, seed=8)
    asked = [prompt for prompt in prompts for _ in range(7)]  # more than there are rows
    requests = [engine.submit(prompt, **settings_of(i)) for i, prompt in enumerate(asked)]
    held: dict[tuple[int, int], list] = {}
    while engine.busy:
        engine.step()
        for request in rows_in_use(engine):
            if request.tokens:
                held[request.id, request.seen] = [layer[request.row] for layer in engine.cache.held_positions()]
    assert sum(passes) == sum(map(len, prompts))
    for i, (prompt, request) in enumerate(zip(asked, requests)):
        cache = BoundedCache(model)
        steps = generate(model, torch.tensor([prompt]), cache=cache, prefill_chunk=CHUNK, **settings_of(i))
        for n, step in enumerate(steps):
            assert step.token == request.tokens[n]
            if (request.id, step.seen) in held:
                assert held[request.id, step.seen] == [layer[0] for layer in cache.held_positions()]
        assert n + 1 == len(request.tokens)
    assert len(held) > 50


@pytest.mark.parametrize("name", ["kvpop", "dms", "dense"])
def test_the_last_prompt_is_let_go_of_before_the_next_is_taken_in(name, monkeypatch):
    engine = Engine(model_with(name), rows=2, prefill_chunk=16)
    seen, take_in = [], engine._take_in

    def watch(request, part):
        gc.collect()
        seen.append(sum(cache() is not None for cache in before))
        logits = take_in(request, part)
        before.append(weakref.ref(request.cache))
        return logits

    before: list[weakref.ref[BoundedCache]] = []
    monkeypatch.setattr(engine, "_take_in", watch)
    engine.generate([[3 + i] * 12 for i in range(5)], max_new_tokens=6)
    assert seen == [0] * 5


def test_a_pass_that_breaks_off_forgets_the_last_prompt(monkeypatch):
    engine = Engine(model_with("kvpop"), rows=2, prefill_chunk=64)
    first, second = (engine.submit([5] * 20, max_new_tokens=9) for _ in range(2))
    engine.step()
    monkeypatch.setattr(engine, "_decode", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    assert engine._last is None
    assert (first.finish_reason, second.finish_reason) == ("error", "error")


def test_prompts_that_differ_in_their_pins_are_taken_in_each(monkeypatch):
    engine = Engine(model_with("kvpop"), rows=4, prefill_chunk=64)
    passes = prefilled(engine, monkeypatch)
    for pinned in ([], [(3, 5)], [(3, 5)], [(3, 6)]):
        engine.submit(list(range(3, 43)), max_new_tokens=3, pinned=pinned)
    list(engine.run())
    assert passes == [40] * 3


def test_an_engine_with_nothing_to_do_remembers_no_prompt(monkeypatch):
    """The weights may be others when the same prompt comes again."""
    model, prompt = model_with("kvpop"), list(range(3, 43))
    engine = Engine(model, rows=2, prefill_chunk=64)
    first = engine.generate([prompt], max_new_tokens=8)[0].tokens
    assert engine._last is None
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)
    second = engine.generate([prompt], max_new_tokens=8)[0].tokens
    assert second == alone(model, prompt, max_new_tokens=8, prefill_chunk=64) != first
    waits = engine.submit(prompt, max_new_tokens=8)
    engine.step()
    waits.cancel()
    assert engine._last is None


def test_a_cancelled_request_frees_its_row_at_once_and_the_others_go_on():
    model = model_with()
    engine = Engine(model, Pieces(), rows=2, prefill_chunk=CHUNK)
    prompts = prompts_of(4, longest=15, seed=4)
    requests = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts]
    while len(requests[1].tokens) < 4:
        engine.step()
    row, text = requests[1].row, requests[1].text
    requests[1].cancel()
    assert (requests[1].finish_reason, requests[1].text, requests[1].row) == ("cancelled", text, None)
    assert engine.rows[row] is None
    assert engine.cache.tokens_seen()[row] == 0
    assert requests[1].finished is not None
    events = list(engine.run())
    assert requests[1] not in [event.request for event in events]
    for request in (requests[0], requests[2], requests[3]):
        assert request.tokens == alone(model, request.prompt, max_new_tokens=12)
    requests[0].cancel()
    requests[1].cancel()
    assert [request.finish_reason for request in requests[:2]] == ["length", "cancelled"]


def test_a_request_can_be_cancelled_while_it_waits_and_while_it_is_prefilled():
    model = model_with()
    engine = Engine(model, rows=1, prefill_chunk=4)
    prefilling, waiting, last = (engine.submit([5] * 20, max_new_tokens=3) for _ in range(3))
    engine.step()
    assert (prefilling.seen, prefilling.row, waiting.row) == (4, 0, None)
    waiting.cancel()
    prefilling.cancel()
    assert engine.rows == [None]
    assert list(engine.waiting) == [last]
    list(engine.run())
    assert last.tokens == alone(model, [5] * 20, max_new_tokens=3)
    assert prefilling.tokens == waiting.tokens == []
    assert prefilling.first_token is None


def test_events_of_a_step_stop_at_a_cancellation():
    engine = Engine(model_with(), rows=3)
    requests = [engine.submit([5 + i], max_new_tokens=5) for i in range(3)]
    seen = []
    for event in engine.run():
        seen.append(event.request)
        requests[2].cancel()
    assert requests[2] not in seen
    assert seen.count(requests[0]) == 5


def test_requests_may_come_while_others_run():
    model = model_with()
    engine = Engine(model, rows=2)
    first, late = engine.submit([5, 6], max_new_tokens=6), None
    for _ in engine.run():
        if late is None:
            late = engine.submit([7, 8, 9], max_new_tokens=4)
    for request, count in ((first, 6), (late, 4)):
        assert request.tokens == alone(model, request.prompt, max_new_tokens=count)


# Text.


def test_streamed_pieces_are_the_text_and_streams_may_be_interleaved():
    engine = Engine(model_with(), Pieces(), rows=2)
    settings = dict(max_new_tokens=40, temperature=1.3)
    a, b = (engine.submit("the", seed=seed, **settings) for seed in (1, 2))
    first, second = engine.stream(a), engine.stream(b)
    taken = list(itertools.zip_longest(first, second, fillvalue=""))
    for request, said in zip((a, b), (list(filter(None, column)) for column in zip(*taken))):
        assert len(said) > 5
        assert "".join(said) == request.text == free_text(request.tokens)
    assert "".join(engine.stream(a)) == a.text
    with pytest.raises(ValueError, match="another engine"):
        next(Engine(engine.model).stream(a))


def test_events_carry_the_text():
    engine = Engine(model_with(), Pieces(), rows=3)
    requests = [engine.submit([5 + i], max_new_tokens=25, temperature=1.0, seed=i) for i in range(5)]
    events = list(engine.run())
    for request in requests:
        assert "".join(event.text for event in events if event.request is request) == request.text
        assert request.text == free_text(request.tokens)


def test_a_stop_string_ends_the_text_before_it_also_across_tokens():
    model = model_with()
    engine = Engine(model, Pieces(), rows=4)
    settings = dict(max_new_tokens=40, temperature=1.0)
    whole = engine.submit([5], seed=3, **settings)
    list(engine.run())
    text = whole.text
    across = 0
    for at in range(2, 22):
        stop = text[at : at + 3]
        if "\ufffd" in stop:
            continue
        request = engine.submit([5], seed=3, stop=["@@@", stop], **settings)
        said = ""
        for piece in engine.stream(request):
            said += piece
            assert text.startswith(said)
            assert stop not in said
        assert said == request.text == text[: text.find(stop)]
        assert request.finish_reason == "stop"
        assert request.tokens == whole.tokens[: len(request.tokens)]
        assert stop in free_text(request.tokens)
        assert stop not in free_text(request.tokens[:-1])
        across += not any(stop.encode() in PIECES[token] for token in request.tokens)
    assert across > 5
    assert engine.submit([5], seed=3, stop=text[3:6], **settings)  # one string is a stop string, not its letters
    list(engine.run())


def test_what_only_looked_like_a_stop_string_is_given_out():
    engine = Engine(model_with(), Pieces())
    free = engine.generate([[5]], max_new_tokens=20, temperature=1.0, seed=3)[0]
    request = engine.submit([5], max_new_tokens=20, temperature=1.0, seed=3, stop=[c + "@" for c in set(free.text)])
    assert "".join(engine.stream(request)) == request.text == free.text
    assert request.finish_reason == "length"


def test_a_stop_token_is_a_token_but_not_text():
    model = model_with()
    engine = Engine(model, Pieces())
    free = engine.generate([[5]], max_new_tokens=20, temperature=1.0, seed=3)[0]
    at = next(i for i in range(5, 20) if free.tokens[i] not in free.tokens[:i] and PIECES[free.tokens[i]])
    request = engine.submit([5], max_new_tokens=20, temperature=1.0, seed=3, stop_ids={free.tokens[at]})
    "".join(engine.stream(request))
    assert request.tokens == free.tokens[: at + 1]
    assert request.text == free_text(free.tokens[:at])
    assert request.finish_reason == "stop"


def test_a_stop_token_that_is_also_the_last_counts_as_a_stop():
    engine = Engine(model_with(), Pieces())
    token = engine.generate([[5]], max_new_tokens=1)[0].tokens[0]
    request = engine.generate([[5]], max_new_tokens=1, stop_ids=[token])[0]
    assert (request.finish_reason, request.tokens, request.text) == ("stop", [token], "")


@given(st.data())
def test_text_is_certain_as_early_as_possible_and_never_shows_a_stop_string(data):
    stops = data.draw(st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
    tokens = data.draw(
        st.lists(st.sampled_from([PIECES.index(p) for p in (b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9")]))
    )
    words, said, so_far = Words(Pieces(), stops), "", ""
    for i, token in enumerate(tokens):
        last = i == len(tokens) - 1
        said += words.put(token, last)
        text = free_text(tokens[: i + 1])
        so_far = text if last or not text.endswith("\ufffd") else so_far
        cuts = [so_far.find(stop) for stop in stops if stop in so_far]
        assert words.stopped == bool(cuts)
        if cuts:
            assert said == so_far[: min(cuts)]
            return
        open_ends = [n for stop in stops for n in range(1, len(stop)) if so_far.endswith(stop[:n])]
        assert said == so_far[: len(so_far) - (0 if last else max(open_ends, default=0))]


def test_of_two_stop_strings_in_a_token_the_earlier_one_counts():
    for stops in (["a", "b"], ["b", "a"], ["b", "ab"]):
        words = Words(Pieces(), stops)
        assert words.put(PIECES.index(b"ab")) == ""
        assert words.stopped


def test_half_a_character_is_shown_when_a_stop_token_ends_the_text():
    words = Words(Pieces())
    assert words.put(PIECES.index(b"a")) == "a"
    assert words.put(PIECES.index(b"\xf0")) == ""
    assert words.put(None, last=True) == "\ufffd"


# Errors.


def test_an_error_with_the_text_of_one_request_spares_the_others():
    class Broken(Pieces):
        def decode(self, ids, **options):
            raise KeyError("no such token")

    model = model_with()
    engine = Engine(model, Pieces(), rows=3)
    requests = [engine.submit([5 + i], max_new_tokens=8) for i in range(4)]
    requests[1].words = Words(Broken())
    events = list(engine.run())
    assert requests[1].finish_reason == "error"
    assert isinstance(requests[1].error, KeyError)
    assert [(event.token, event.text) for event in events if event.request is requests[1]] == [(None, "")]
    for request in (requests[0], *requests[2:]):
        assert request.tokens == alone(model, request.prompt, max_new_tokens=8)
    with pytest.raises(KeyError, match="no such token"):
        list(engine.stream(requests[1]))
    engine.tokenizer = Broken()
    with pytest.raises(KeyError, match="no such token"):
        engine.generate([[5], [6]], max_new_tokens=2)
    assert not engine.busy


def test_logits_that_are_nan_end_their_request_alone():
    model = model_with()
    engine = Engine(model, rows=3)
    requests = [engine.submit([5 + i], max_new_tokens=8, temperature=float(i), seed=i) for i in range(3)]
    engine.step()

    def spoil(module, args, out):
        if len(out) == 3:
            out[requests[1].row or 0] = math.nan

    handle = model.lm_head.register_forward_hook(spoil)
    engine.step()
    handle.remove()
    list(engine.run())
    assert [request.finish_reason for request in requests] == ["length", "error", "length"]
    assert str(requests[1].error).startswith("the logits of the next token are NaN")
    for i in (0, 2):
        assert requests[i].tokens == alone(model, [5 + i], max_new_tokens=8, temperature=float(i), seed=i)


@pytest.mark.parametrize("name", ["kvpop", "tova", "dense"])
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_a_pass_that_breaks_off_ends_the_requests_with_rows_and_the_rest_go_on(name, when):
    model = model_with(name)
    engine = Engine(model, rows=2, prefill_chunk=4)
    requests = [engine.submit([5 + i] * 6, max_new_tokens=5) for i in range(4)]
    while len(requests[0].tokens) < 2:
        engine.step()

    def fail(module, args, kwargs):
        if (len(kwargs["position_ids"]) == 1) == (when == "prefill"):
            raise MemoryError("out of memory")

    handle = model.model.layers[1].self_attn.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(MemoryError, match="out of memory"):
        list(engine.run())
    handle.remove()
    assert [request.finish_reason for request in requests] == ["error", "error", None, None]
    assert engine.rows == [None, None]
    list(engine.run())
    for request in requests[2:]:
        assert request.tokens == alone(model, request.prompt, max_new_tokens=5, prefill_chunk=4)


BAD = [
    (dict(prompt=[]), "the prompt must have at least 1 token, got none"),
    (dict(prompt=""), "the prompt must have at least 1 token, got none"),
    (
        dict(prompt=torch.ones(2, 3, dtype=torch.long)),
        r"the prompt must be ids of shape \[S\] or \[1, S\], got \(2, 3\)",
    ),
    (dict(prompt=torch.ones(3)), "the prompt must hold token ids of the model's vocabulary, 0 to 60, got 1.0"),
    (dict(prompt=[5, 61]), "the prompt must hold token ids of the model's vocabulary, 0 to 60, got 61"),
    (dict(prompt=[5, -1]), "the prompt must hold token ids of the model's vocabulary, 0 to 60, got -1"),
    (dict(stop_ids=[None]), "stop_ids must hold token ids of the model's vocabulary, 0 to 60, got None"),
    (dict(max_new_tokens=0), "max_new_tokens must be an integer of at least 1, got 0"),
    (dict(temperature=-1.0), "temperature must be at least 0, got -1.0"),
    (dict(top_p=0.0), r"top_p must be in \(0, 1\], got 0.0"),
    (dict(top_k=-1), "top_k must be at least 0, got -1"),
    (dict(seed=2**64), r"seed must be in"),
    (dict(stop=["a", ""]), "a stop string must have at least 1 character, got ''"),
    (dict(stop=""), "a stop string must have at least 1 character, got ''"),
    (dict(pinned=[(3, 3)]), r"a span must be \(start, stop\) with 0 <= start < stop, got \(3, 3\)"),
    (dict(pinned=[(3, 30)]), "long-range"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_what_cannot_be_done_is_refused_before_any_work(given, message):
    engine = Engine(model_with(), Pieces())
    engine.model.register_forward_pre_hook(lambda *args: pytest.fail("work was done"))
    with pytest.raises(ValueError, match=message):
        engine.submit(**{"prompt": [5], "max_new_tokens": 4, **given})
    assert not engine.busy


def test_a_prompt_that_is_refused_takes_the_ones_before_it_along():
    engine = Engine(model_with(), Pieces())
    with pytest.raises(ValueError, match="at least 1 token"):
        engine.generate([[5], []], max_new_tokens=4)
    assert not engine.busy


@pytest.mark.parametrize("given", [dict(prompt="ab"), dict(stop=["a"])])
def test_text_without_a_tokenizer_is_refused(given):
    with pytest.raises(ValueError, match="need a tokenizer"):
        Engine(model_with()).submit(**{"prompt": [5], "max_new_tokens": 4, **given})


def test_pins_on_a_policy_without_pins_are_refused():
    with pytest.raises(ValueError, match="TovaLayer cannot pin"):
        Engine(model_with("tova")).submit([5], max_new_tokens=1, pinned=[(0, 1)])


@pytest.mark.parametrize("name", ["rows", "prefill_chunk"])
def test_an_engine_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
        Engine(model_with(), **{name: 0})


def test_a_model_without_a_policy_is_refused():
    with pytest.raises(ValueError, match="no policy attached"):
        Engine(tiny_model())


@pytest.mark.parametrize("prompt", [[5, 6, 7], (5, 6, 7), torch.tensor([5, 6, 7]), torch.tensor([[5, 6, 7]]), "cde"])
def test_a_prompt_is_text_or_ids(prompt):
    engine = Engine(model_with(), Pieces())
    assert engine.generate([prompt], max_new_tokens=1)[0].prompt == [5, 6, 7]


def test_the_engine_is_exported():
    assert kvpop.Engine is Engine


def test_an_engine_runs_in_inference_mode() -> None:
    model = model_with()
    expected = Engine(model, rows=2).generate([[5, 6, 7], [8]], max_new_tokens=20)
    with torch.inference_mode():
        found = Engine(model, rows=2).generate([[5, 6, 7], [8]], max_new_tokens=20)
    assert [r.tokens for r in found] == [r.tokens for r in expected]


@pytest.mark.parametrize("wrong", [{"seed": 1.5}, {"top_k": 2.5}, {"max_new_tokens": 2.5}])
def test_numbers_that_are_no_integers_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be an integer"):
        Engine(model_with()).submit([5], **{"max_new_tokens": 3, **wrong})


def test_an_engine_of_a_policy_that_was_taken_off_says_so() -> None:
    model = model_with()
    engine = Engine(model, rows=2)
    engine.generate([[5, 6]], max_new_tokens=3)
    attach(model, Streaming(Budget(1, 2, 3)))
    engine.submit([5, 6], max_new_tokens=3)
    with pytest.raises(ValueError, match="no longer attached"):
        engine.step()


class Replayed:
    """What a captured step does, without a GPU: the same work on the same tensors, the same tensor as its answer."""

    made = 0

    def __init__(self, step) -> None:
        for _ in range(3):
            step()
        self.step, output = step, step()
        with torch.inference_mode(False):  # a graph's memory has no mode
            self.output = output.clone()
        Replayed.made += 1

    def __call__(self) -> torch.Tensor:
        return self.output.copy_(self.step())


@pytest.mark.parametrize("chunk", [1, 16, 40])
@pytest.mark.parametrize("name", ["kvpop", "by head", "streaming", "random", "tova", "streaming-cache"])
def test_captured_pieces_of_prompts_give_what_plain_ones_give(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where prompts come again, are pinned, or are cancelled halfway."""
    monkeypatch.setattr("kvpop.engine.SHORT", 16)
    model = model_with(name)
    prompts = [prompt for prompt in prompts_of(7, longest=90, seed=4) for _ in range(1 + len(prompt) % 2)]
    pins = [((4, 5),) if i == 3 and name in ("kvpop", "by head", "streaming") else () for i in range(len(prompts))]

    def texts(graph: bool) -> tuple[list[list[int]], dict[tuple[int, int], list]]:
        """The tokens of all, and what every row holds after every step."""
        engine = Engine(model, rows=3, prefill_chunk=chunk)
        engine.graph = engine.prefill_graph = graph
        requests = [engine.submit(p, pinned=pins[i], **settings_of(i)) for i, p in enumerate(prompts)]
        held: dict[tuple[int, int], list] = {}
        for step in itertools.count():
            if step == 3 and len(prompts[0]) > 3 * chunk:
                requests[0].cancel()
            if not engine.busy:
                break
            engine.step()
            for request in rows_in_use(engine):
                if request.tokens:
                    held[request.id, request.seen] = [layer[request.row] for layer in engine.cache.held_positions()]
        assert graph == bool(engine._pieces)
        assert len(held) > 20
        return [request.tokens for request in requests], held

    plain = texts(False)
    monkeypatch.setattr("kvpop.engine.capture", Replayed)
    Replayed.made = 0
    assert texts(True) == plain
    pieces = {16: 1, 40: 2}.get(chunk, 1)
    assert pieces < Replayed.made <= pieces + 3  # decoding, again where pins moved the store


@pytest.mark.parametrize("first", [True, False])
def test_captured_steps_go_on_inside_and_outside_of_inference_mode(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpop.engine.capture", Replayed)
    model, prompts = model_with(), prompts_of(5, longest=50, seed=3)
    engine = Engine(model, rows=2, prefill_chunk=40)
    engine.graph = engine.prefill_graph = True
    requests = [engine.submit(prompt, max_new_tokens=9) for prompt in prompts]
    for i in itertools.count():
        if not engine.busy:
            break
        with torch.inference_mode((i % 2 == 0) == first):
            engine.step()
    assert [r.tokens for r in requests] == [alone(model, p, max_new_tokens=9, prefill_chunk=40) for p in prompts]


def test_pieces_are_captured_only_where_they_can_be() -> None:
    with pytest.raises(
        ValueError, match=r"prefill_graph=True needs graph=True and stores of a fixed size, got graph=False"
    ):
        Engine(model_with(), prefill_graph=True)


@pytest.mark.parametrize("name", ["kvpop", "streaming", "random", "tova", "streaming-cache", "dms", "dense"])
def test_captured_steps_give_what_plain_ones_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = model_with(name), prompts_of(9)

    def texts(graph: bool) -> list[list[int]]:
        engine = Engine(model, rows=3, prefill_chunk=CHUNK)
        engine.graph = graph
        requests = [engine.submit(prompt, **settings_of(i)) for i, prompt in enumerate(prompts)]
        for _ in engine.run():
            pass
        return [request.tokens for request in requests]

    plain = texts(False)
    monkeypatch.setattr("kvpop.engine.capture", Replayed)
    Replayed.made = 0
    assert texts(True) == plain
    assert Replayed.made == 1 or name in ("dms", "dense")  # whose memory moves as it grows


@pytest.mark.parametrize("name", ["dms", "dense", "kvpop"])
def test_a_request_says_what_its_growing_cache_held(name: str) -> None:
    model, prompts = model_with(name), prompts_of(7, longest=60, seed=5)
    requests = Engine(model, rows=3, prefill_chunk=CHUNK).generate(prompts, max_new_tokens=9)
    for request, prompt in zip(requests, prompts):
        if name == "kvpop":
            assert request.held is None
            continue
        cache = BoundedCache(model)
        steps = list(generate(model, torch.tensor([prompt]), cache=cache, prefill_chunk=CHUNK, max_new_tokens=9))
        assert [step.token for step in steps] == request.tokens
        heads = [len(head) for layer in cache.held_positions() for head in layer[0]]
        assert request.held == pytest.approx(sum(heads) / len(heads))
        assert (request.held == request.seen) == (name == "dense")


def test_a_step_over_dense_layers_is_captured_anew_where_columns_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nowhere else, whatever comes and goes in the rows."""
    monkeypatch.setattr("kvpop.engine.capture", Replayed)
    model, prompts = model_with("dense"), prompts_of(6, seed=2)
    engine = Engine(model, rows=2, prefill_chunk=CHUNK)
    engine.graph, Replayed.made = True, 0
    requests = engine.generate(prompts, max_new_tokens=150)
    assert [request.tokens for request in requests] == [alone(model, p, max_new_tokens=150) for p in prompts]
    assert engine.cache is not None
    columns = engine.cache.stores[0].keys.shape[2]
    assert columns in (256, 384)
    assert Replayed.made <= 3


def test_a_step_is_captured_anew_where_pins_moved_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpop.engine.capture", Replayed)
    model, prompts = model_with(), prompts_of(4, longest=30, seed=3)
    pins = [(), ((0, 2),), ((0, 1), (3, 4)), ((0, 1),)]
    engines = [Engine(model, rows=2, prefill_chunk=CHUNK) for _ in range(2)]
    engines[1].graph, Replayed.made = True, 0
    found = []
    for engine in engines:
        requests = [engine.submit(p, max_new_tokens=20, pinned=spans) for p, spans in zip(prompts, pins)]
        for _ in engine.run():
            pass
        found.append([request.tokens for request in requests])
    assert found[0] == found[1]
    assert 1 < Replayed.made <= 3  # no spans, one, two


def test_where_there_can_be_no_graph_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs a GPU and stores of a fixed size or that reserve, got kvpop.* on cpu"):
        Engine(model_with(), graph=True)
    with pytest.raises(ValueError, match="compiled=True is for steps that are captured"):
        Engine(model_with(), compiled=True)

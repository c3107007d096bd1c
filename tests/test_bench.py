"""Decoding costs on the CPU with a tiny model: what stores are filled with, rows, what does not fit, and the command."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from kvpop import bench, capture
from kvpop.attachment import attach, attached_policies, attention_modules
from kvpop.bench import POLICIES, DecodeSettings, Decoding, decode_rows, largest_fit, largest_rows, likely_positions
from kvpop.budget import Budget, dense_bytes
from kvpop.cache import BoundedCache
from kvpop.cli import app
from kvpop.cli.bench import command_of
from kvpop.plots import decode as figures
from kvpop.projections import FusedLinear
from kvpop.slots.paged import STORED
from tests.tiny import tiny_model

BUDGET = Budget(sinks=2, window=8, long=22)
BOUNDED = ("streaming", "kvpop-mlp", "kvpop-mlstm", "kvpop-sum")
TINY = dict(
    model_type="llama", num_hidden_layers=2, hidden_size=24, intermediate_size=48, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, vocab_size=61, tie_word_embeddings=False, pad_token_id=0,
)  # fmt: skip


def settings(**options) -> DecodeSettings:
    given = dict(model="tiny", policies=POLICIES, batches=(1, 2), seen=(40, 100), budget=BUDGET, steps=3) | options
    return DecodeSettings(**given)  # type: ignore[arg-type]


@pytest.fixture
def model():
    return tiny_model(dtype=torch.float32)


def decoding(model, policy: str, rows: int = 2, seen: int = 100) -> Decoding:
    if policy not in bench.DENSE:
        attach(model, bench.make_policy(policy, BUDGET, seen))
    made = Decoding(model, policy, rows, BUDGET.slots, static_length=256)
    made.fill(seen)
    return made


# Filling.


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize(("seen", "sinks", "window", "counts"), [
    (1000, 4, 64, [[68, 200], [999, 1000]]), (32, 2, 8, [[32]]), (33, 0, 1, [[1, 2, 32]]), (500, 3, 5, [[8, 8]]),
])  # fmt: skip
def test_positions_are_distinct_and_hold_what_is_always_held(seen, sinks, window, counts, newest) -> None:
    count = torch.tensor(counts)
    found = likely_positions(count, seen, sinks, window, torch.Generator().manual_seed(0), newest)
    assert found.shape == (*count.shape, count.max())
    always = {*range(sinks), *range(seen - window, seen)}
    for head, wanted in zip(found.flatten(0, 1).tolist(), count.flatten().tolist()):
        held = [p for p in head if p >= 0]
        assert head == held + [-1] * (len(head) - wanted)
        assert held == sorted(set(held))
        assert len(held) == wanted
        assert set(held) >= always
        assert held[-1] == seen - 1


@pytest.mark.parametrize("policy", BOUNDED)
def test_a_filled_store_is_full_and_every_further_token_drives_out_one(model, policy: str) -> None:
    made = decoding(model, policy)
    cache = made.cache
    assert isinstance(cache, BoundedCache)
    assert (cache.tokens_seen(), int(cache.get_seq_length())) == ([100, 100], 100)
    always = {0, 1, *range(92, 100)}
    before = cache.held_positions()
    heads = [held for layer in before for row in layer for held in row]
    assert all(len(held) == BUDGET.slots and set(held) >= always for held in heads)
    if policy == "streaming":
        assert all(held == [0, 1, *range(70, 100)] for held in heads)
    else:
        assert len({tuple(held) for held in heads}) == len(heads)  # every head its own
    nbytes = cache.nbytes()
    for t in range(100, 112):
        made.step()
        after = cache.held_positions()
        for old, new in zip(before, after):
            for old_row, new_row in zip(old, new):
                for old_head, new_head in zip(old_row, new_row):
                    assert len(new_head) == BUDGET.slots
                    assert set(new_head) - set(old_head) == {t}
                    assert set(new_head) >= {0, 1, *range(t - 7, t + 1)}
        before = after
    assert cache.tokens_seen() == [112, 112]
    assert made.position.tolist() == [[112], [112]]
    assert cache.nbytes() == nbytes


def test_pages_hold_the_budget_on_average_and_grow_by_what_gates_keep(model) -> None:
    made = decoding(model, "dms", rows=4)
    for layer in made.cache.held_positions():
        heads = [held for row in layer for held in row]
        counts = [len(held) for held in heads]
        assert sum(counts) == BUDGET.slots * len(counts)
        assert (min(counts), max(counts)) == (16, 48)
        assert all(set(held) >= {0, 1, *range(92, 100)} for held in heads)
    for store in made.cache.stores:  # what pages hold, and the ring; the rest of a page is not read
        D = store.keys.shape[-1]
        held = int(store.count.sum()) * (8 * D + 4)
        rest = sum(getattr(store, n).nbytes for n in STORED if n not in ("keys", "values", "paged_position"))
        assert store.nbytes() - store.empty_bytes() == held + rest
    assert 0 < made.read_bytes(100) < made.cache_bytes(100)
    made.step()
    assert made.cache.tokens_seen() == [101] * 4
    assert all(100 in held for layer in made.cache.held_positions() for row in layer for held in row)


@pytest.mark.parametrize("policy", POLICIES)
def test_filling_again_gives_the_same_step_in_the_same_memory(model, policy: str) -> None:
    made = decoding(model, policy)

    def where() -> list[int]:
        return [x.data_ptr() for store in made.cache.stores for x in (*store.tensors().values(), store.taken)]

    first, before = made.step(), where() if policy in BOUNDED else []
    for _ in range(5):
        made.step()
    made.fill(100)
    assert torch.equal(made.step(), first)
    assert before == (where() if policy in BOUNDED else [])
    made.fill(60)
    assert not torch.equal(made.step(), first)


@pytest.mark.parametrize("policy", bench.DENSE)
def test_dense_caches_hold_all_that_was_seen(model, policy: str) -> None:
    made = decoding(model, policy)
    assert int(made.cache.get_seq_length()) == 100
    layer = made.cache.layers[1]
    assert layer.keys.shape == (2, 2, 256 if policy == "dense-static" else 100, 8)
    made.step()
    assert int(made.cache.get_seq_length()) == 101
    attended = made.step()
    with torch.no_grad():  # what lies beyond is not attended to
        layer.keys[:, :, 110:] = 1e4
    made.fill(100)
    made.step()
    assert torch.equal(made.step(), attended)


# Rows.


def test_every_policy_has_its_rows(model) -> None:
    chosen = settings()
    rows = list(decode_rows(model, chosen, set(), speed=1e9))
    keys = [(row["policy"], row["batch"], row["seen"]) for row in rows]
    assert keys == [(policy, batch, seen) for policy in POLICIES for batch in (1, 2) for seen in (40, 100)]
    weights = sum(p.numel() * 4 for p in model.parameters())
    table = model.get_input_embeddings().weight.numel() * 4
    cell = dict(layers=2, kv_heads=2, head_dim=8, element_size=4)
    for row in rows:
        assert row["ms_per_token"] > 0
        assert row["spread"] >= 0
        assert row["ratio"] == row["ms_per_token"] / row["floor_ms"]
        plain = row["policy"] == "dense-eager"
        assert (row["step"], row["peak_gb"]) == ("eager" if plain else "eager, fused", None)
        assert (row["logit_error"] is None) == plain
        if row["policy"] in bench.DENSE:
            read = weights - table + dense_bytes(row["seen"], rows=row["batch"], **cell)
            assert row["floor_ms"] == pytest.approx(read / 1e6)
            length = 128 if row["policy"] == "dense-static" else row["seen"] + bench.WARM + 3
            assert row["formula_gb"] == pytest.approx((weights + dense_bytes(length, rows=row["batch"], **cell)) / 1e9)
    floors = {row["seen"]: row["floor_ms"] for row in rows if (row["policy"], row["batch"]) == ("streaming", 1)}
    assert floors[40] == floors[100]
    assert not attached_policies(model)
    left = list(decode_rows(model, chosen, set(keys) - {("dms", 2, 100), ("dense-static", 1, 40)}, speed=1e9))
    assert [(row["policy"], row["batch"], row["seen"]) for row in left] == [("dense-static", 1, 40), ("dms", 2, 100)]


@pytest.mark.parametrize(("fit", "lengths"), [(False, [1024, 1024]), (True, [128, 1024])])
def test_a_static_cache_is_for_the_longest_or_fits(model, fit: bool, lengths: list[int]) -> None:
    chosen = settings(policies=("dense-static",), batches=(1,), seen=(900, 100), fit_static=fit)
    rows = list(decode_rows(model, chosen, set(), speed=1e9))
    assert [row["seen"] for row in rows] == [100, 900]
    assert [row["static_length"] for row in rows] == lengths


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(capture.COMPILE, "backend", "eager")  # traces and guards, without a compiler
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("how", "step"), [
    ({}, "compiled, fused"), ({"fuse": False}, "compiled"), ({"tune": "max"}, "compiled, tuned (max), fused"),
    ({"tune": "max", "fuse": False}, "compiled, tuned (max)"),
])  # fmt: skip
def test_compiled_layers_do_what_plain_ones_do(model, traced, how: dict[str, object], step: str) -> None:
    chosen = settings(policies=("dense-static", "kvpop-mlp"), batches=(2,), compiled=True, **how)
    assert {"fuse": True, "tune": "none", **how}.items() <= chosen.identity().items()
    rows = list(decode_rows(model, chosen, set(), speed=1e9))
    assert [row["step"] for row in rows] == [step] * 4
    assert all(row["logit_error"] < 1e-4 for row in rows)
    assert all(part._compiled_call_impl is None for part in (*model.model.layers, model.model.norm))
    assert not any(isinstance(module, FusedLinear) for module in model.modules())


def test_a_fast_step_that_does_something_else_is_an_error(model, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model, tune: str) -> None:
        attention_modules(model)[0].scaling *= 1.5

    monkeypatch.setattr(bench, "compile_layers", spoil)
    with pytest.raises(RuntimeError, match=r"logits are off by .*, 0.001 is allowed"):
        list(decode_rows(model, settings(policies=("kvpop-mlp",), compiled=True), set(), speed=1e9))


@pytest.mark.parametrize(
    ("policy", "skipped"), [("dense-eager", [100]), ("kvpop-mlp", [100, 300]), ("dms", [100, 300])]
)
def test_what_does_not_fit_is_a_row(model, monkeypatch: pytest.MonkeyPatch, policy: str, skipped: list[int]) -> None:
    fill = Decoding.fill

    def narrow(self, seen: int) -> None:
        if seen == 100:
            try:
                raise torch.OutOfMemoryError("Tried to allocate 9 GB. There are 3 GB. And more")
            finally:
                raise RuntimeError("capture ended early. It did")
        fill(self, seen)

    monkeypatch.setattr(Decoding, "fill", narrow)
    chosen = settings(policies=(policy,), batches=(1,), seen=(40, 100, 300))
    rows = list(decode_rows(model, chosen, set(), speed=1e9))
    assert [row["seen"] for row in rows] == [40, 100, 300]
    assert [row["seen"] for row in rows if "skipped" in row] == skipped
    assert rows[1] == {
        "policy": policy, "batch": 1, "seen": 100, "skipped": "out of memory: capture ended early. It did",
    }  # fmt: skip
    assert not attached_policies(model)


def test_other_errors_are_not_hidden(model, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self, seen: int) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(Decoding, "fill", broken)
    with pytest.raises(RuntimeError, match="something else"):
        list(decode_rows(model, settings(policies=("streaming",)), set(), speed=1e9))
    assert not attached_policies(model)


@pytest.mark.parametrize(
    ("limit", "most", "best"), [(0, 9, 0), (1, 9, 1), (5, 9, 5), (8, 9, 8), (99, 9, 9), (99, 1, 1)]
)
def test_the_largest_batch_is_found_by_doubling_and_bisecting(limit: int, most: int, best: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    assert largest_fit(fits, most) == best
    assert len(tried) == len(set(tried)) <= 8
    assert all(1 <= batch <= most for batch in tried)


@pytest.mark.parametrize("guess", [2, 100, 107, 128, 500])
@pytest.mark.parametrize(("limit", "most", "best"), [(108, 4096, 108), (1, 4096, 1), (211, 160, 160), (100, 100, 100)])
def test_the_largest_batch_is_near_a_good_guess(limit: int, most: int, best: int, guess: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= limit

    assert largest_fit(fits, most, guess) == best
    assert len(tried) == len(set(tried))
    assert all(1 <= batch <= most for batch in tried)
    if limit == 108 and guess in (100, 107):
        assert len(tried) <= 6


def test_tokens_a_second_at_the_largest_batch(model, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Decoding.__init__

    def narrow(self, model, policy: str, rows: int, *rest) -> None:
        if rows > {"dense-static": 3, "kvpop-mlp": 6, "dms": 0}[policy]:
            raise torch.OutOfMemoryError("too much")
        make(self, model, policy, rows, *rest)

    monkeypatch.setattr(Decoding, "__init__", narrow)
    chosen = settings(policies=("dense-static", "kvpop-mlp", "dms"), seen=(900, 100), most=64)
    rows = list(largest_rows(model, chosen, {("kvpop-mlp", -1, 900)}, speed=1e9))
    assert [(row["policy"], row["seen"], row["batch"]) for row in rows] == [
        ("dense-static", 900, 3), ("dense-static", 100, 3), ("kvpop-mlp", 100, 6), ("dms", 900, 0), ("dms", 100, 0),
    ]  # fmt: skip
    assert [row.get("static_length") for row in rows[:2]] == [1024, 128]
    for row in rows[:3]:
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms_per_token"])
    assert all(row["skipped"] == "not even one row fits in memory" for row in rows[3:])


# The command.


def call(*arguments: object):
    return CliRunner().invoke(app, ["bench", "decode", *map(str, arguments)])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path) -> list[object]:
    monkeypatch.setitem(bench.SHAPES, "tiny", TINY)
    options = dict(shape="tiny", device="cpu", budget=32, sinks=2, window=8, steps=3, bandwidth=1, out=tmp_path / "o")
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def test_the_command_writes_rows_and_figure_and_goes_on_where_it_stopped(
    small, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = ["--policy", "streaming", "--policy", "dense-static", "--batch", 2, "--seen", 40, "--seen", 70]
    rows_of, measured, most = bench.rows_of, [], 3

    def counting(*arguments):
        for row in rows_of(*arguments):
            if len(measured) == most:
                raise KeyboardInterrupt
            measured.append(row)
            yield row

    monkeypatch.setattr(bench, "rows_of", counting)
    assert call(*small, *some).exit_code == 130
    path = tmp_path / "o" / "decode.json"
    first = json.loads(path.read_text())
    assert [row["seen"] for row in first["rows"]] == [40, 70, 40]
    assert not (tmp_path / "o" / "decode.png").exists()
    most = 99
    done = call(*small, *some, "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads(path.read_text())
    assert report["rows"][:3] == first["rows"]
    assert len(report["rows"]) == len(measured) == 4
    assert report["settings"]["layers"] is None
    assert (report["settings"]["long"], report["settings"]["dtype"]) == (22, "float32")
    assert str(tmp_path) not in json.dumps(report)
    assert "--policy streaming --policy dense-static --batch 2 --seen 40 --seen 70" in report["command"]
    assert (report["settings"]["fuse"], report["settings"]["tune"]) == (True, "none")
    assert "--fuse --tune none" in report["command"]
    assert "dense-static, batch 2, 70 seen:" in done.stderr
    assert (tmp_path / "o" / "decode.png").read_bytes().startswith(b"\x89PNG")
    again = call(*small, *some)
    assert (again.exit_code, again.stderr, len(measured)) == (0, "", 4)
    assert "dense-static" in again.stdout
    more = call(*small, "--policy", "streaming", "--batch", 1, "--seen", 50)
    assert "streaming, batch 1, 50 seen" in more.stderr
    assert len(json.loads(path.read_text())["rows"]) == 5
    for options, message in (
        (["--steps", 4], "holds results with steps 3, not 4: give another --out"),
        (["--window", 9], "holds results with window 8, not 9"),
        (["--no-fuse"], "holds results with fuse True, not False"),
        (["--seen", 700], "holds a static cache of 128 slots, not 768"),
    ):
        other = call(*small, *options)
        assert (other.exit_code, len(measured)) == (2, 5)
        assert message in other.stderr


@pytest.mark.parametrize(("options", "message"), [
    (["--policy", "snapkv"], "policy must be one of dense-eager, dense-static, dense, streaming"),
    (["--seen", 31], "seen must be between the budget, 32 tokens, and 536870912, got 31"),
    (["--budget", 9], "a budget of 9 slots cannot hold 2 sinks and a window of 8: needs 10"),
    (["--shape", "gpt"], "shape must be one of qwen3-8b, qwen3-4b, smollm2-135m, tiny, got 'gpt'"),
    (["--layers", 3], "layers must be between 1 and the 2 of tiny, got 3"),
    (["--bandwidth", 0], "--bandwidth must be above 0 GB/s, got 0.0"),
    (["--model", "x"], "--model x has its own shape"),
    (["--largest-batch"], "--largest-batch needs a GPU"),
    (["--batch", 0], "batch must be at least 1 row, got 0"),
    (["--steps", 1], "steps must be at least 2, got 1"),
    (["--window", 0], "Budget.window must be at least 1, got 0"),
    (["--compile", "--tune", "most"], "tune must be one of none, max, got 'most'"),
    (["--tune", "max"], "tune max is for compiled layers: compile them, or leave it out"),
    (["--out", __file__], "is a file: results need a directory"),
])  # fmt: skip
def test_bad_options_are_named_before_anything_runs(small, tmp_path, options: list[object], message: str) -> None:
    result = call(*small, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not (tmp_path / "o").exists()


def test_a_command_says_what_was_turned_off() -> None:
    said = command_of({"fuse": False, "compiled": True, "fit_static": False})
    assert said == "kvpop bench decode --no-fuse --compile"


def test_the_library_checks_its_settings() -> None:
    with pytest.raises(ValueError, match="batch must be at least 1 row, got 0"):
        settings(batches=(2, 0))
    with pytest.raises(ValueError, match="steps must be at least 2, got 1"):
        settings(steps=1)


# The figure.


def row(policy: str, batch: int, seen: int, **more: object) -> dict[str, object]:
    return (
        dict(policy=policy, batch=batch, seen=seen, ms_per_token=2.0, floor_ms=1.5, peak_gb=20.0, formula_gb=19.0)
        | more
    )


def test_the_figure_has_a_panel_a_batch_and_a_floor(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    rows = [row(policy, batch, seen) for policy in ("dense-static", "dms") for batch in (1, 8) for seen in (2048, 1024)]
    rows[0] |= {"ms_per_token": 90.0}
    rows[-1] = {"policy": "dms", "batch": 8, "seen": 1024, "skipped": "out of memory"}
    figures.decode_figure(rows, tmp_path / "x.png")
    panels = drawn[0].axes
    assert [axes.get_title(loc="left") for axes in panels] == ["batch 1", "batch 8", "", ""]
    assert [axes.get_ylabel() for axes in panels] == ["ms a token", "", "peak memory, GB", ""]
    assert (panels[0].get_yscale(), panels[2].get_yscale()) == ("log", "linear")
    time, floor = panels[0].lines[:2]
    assert (list(time.get_xdata()), list(time.get_ydata())) == ([1024, 2048], [2.0, 90.0])
    assert (list(floor.get_ydata()), floor.get_linestyle()) == ([1.5, 1.5], "--")
    assert list(panels[1].lines[2].get_xdata()) == [2048]
    figures.plt.close(drawn[0])
    figures.decode_figure([row("dms", 1, 1024, peak_gb=None)], tmp_path / "x.png")
    assert len(drawn[1].axes) == 1
    figures.plt.close(drawn[1])
    with pytest.raises(ValueError, match="nothing to draw"):
        figures.decode_figure(rows[-1:], tmp_path / "x.png")

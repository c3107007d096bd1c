"""A session that is saved and loaded goes on as if nothing had happened, or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvpop.attachment import attach
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.policies import ByLayer, Dense, KVpop, Policy, Random, Streaming, Tova
from kvpop.session import Session, SessionError
from tests.test_cache import KINDS, SMALL, feed, make, model_with, snapshot, text
from tests.tiny import tiny_model


@pytest.mark.parametrize("kind", [*KINDS, "by layer"])
@pytest.mark.parametrize("seen", [5, 40])
def test_going_on_after_a_load_is_bit_equal(kind: str, seen: int, tmp_path: Path) -> None:
    policy = ByLayer(KVpop(SMALL), {0: Dense()}) if kind == "by layer" else make(kind)
    model, twin = (model_with(policy, dtype=torch.float32) for _ in range(2))
    cache = BoundedCache(model)
    feed(model, cache, text(2, seen), attention_mask=torch.tensor([[1] * seen, [0] * 3 + [1] * (seen - 3)]))
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    Session(cache, torch.tensor([[4], [5]]), generator).save(tmp_path / "s", model)
    back = Session.load(tmp_path / "s", twin)
    assert torch.equal(back.pending, torch.tensor([[4], [5]]))
    assert torch.equal(torch.rand(5, generator=generator), torch.rand(5, generator=back.generator))
    assert all(torch.equal(a, b) for a, b in zip(snapshot(cache), snapshot(back.cache)))
    assert int(back.cache.get_seq_length()) == seen
    for step in range(30):
        token = text(2, 1, step)
        assert torch.equal(feed(model, cache, token), feed(twin, back.cache, token))
    assert cache.held_positions() == back.cache.held_positions()


def test_the_file_is_constant_in_size_and_pins_travel(tmp_path: Path) -> None:
    model = model_with(KVpop(SMALL))
    cache, sizes = BoundedCache(model), []
    cache.pin([(3, 6)])
    for n in (20, 200):
        feed(model, cache, text(1, n))
        Session(cache).save(tmp_path / "s", model)
        sizes.append((tmp_path / "s").stat().st_size)
    assert max(sizes) - min(sizes) < 200  # the header counts in decimal
    back = Session.load(tmp_path / "s", model).cache
    feed(model, back, text(1, 50))
    assert all({3, 4, 5} <= set(head) for layer in back.held_positions() for head in layer[0])


def test_a_loaded_cache_rolls_back_what_came_after(tmp_path: Path) -> None:
    model = model_with(KVpop(SMALL))
    cache = BoundedCache(model, rollback=4)
    feed(model, cache, text(1, 30))
    Session(cache).save(tmp_path / "s", model)
    back = Session.load(tmp_path / "s", model).cache
    with pytest.raises(ValueError, match="0 tokens can be taken back"):
        back.crop(-1)
    held = back.held_positions()
    feed(model, back, text(1, 3))
    back.crop(-3)
    assert back.held_positions() == held


def saved(tmp_path: Path, policy: Policy) -> Path:
    model = model_with(policy)
    cache = BoundedCache(model)
    feed(model, cache, text(1, 20))
    Session(cache).save(tmp_path / "s", model)
    return tmp_path / "s"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (KVpop(Budget(2, 4, 5)), r"another policy: layer 0: budget \[2, 4, 4\] in the file, \[2, 4, 5\] here"),
        (KVpop(SMALL, scorer="mlp"), "another policy: layer 0: scorer SumScorer in the file, MLPScorer here"),
        (Streaming(SMALL), "another"),
        (Tova(10), "another"),
    ],
)
def test_another_policy_is_refused(other: Policy, message: str, tmp_path: Path) -> None:
    with pytest.raises(SessionError, match=message):
        Session.load(saved(tmp_path, KVpop(SMALL)), model_with(other))


def test_settings_that_are_no_weights_are_checked(tmp_path: Path) -> None:
    path = saved(tmp_path, Random(SMALL, seed=1))
    for other in (Random(SMALL, seed=2), Random(Budget(2, 4, 3), seed=1)):
        with pytest.raises(SessionError, match="another policy"):
            Session.load(path, model_with(other))


def test_other_weights_are_refused(tmp_path: Path) -> None:
    trained = saved(tmp_path, KVpop(SMALL))
    with pytest.raises(SessionError, match=r"another policy: (weights|layer 0: decay)"):
        Session.load(trained, model_with(KVpop(SMALL), seed=1))
    path = saved(tmp_path, Streaming(SMALL))
    model = attach(tiny_model(seed=1), Streaming(SMALL))
    with pytest.raises(SessionError, match="another model: weights"):
        Session.load(path, model)
    with pytest.raises(SessionError, match="another model"):
        Session.load(path, attach(tiny_model("qwen3"), Streaming(SMALL)))


def test_files_that_are_no_sessions_are_refused(tmp_path: Path) -> None:
    model = model_with(KVpop(SMALL))
    with pytest.raises(SessionError, match="there is no session"):
        Session.load(tmp_path / "nothing", model)
    (tmp_path / "junk").write_bytes(b"junk" * 9)
    with pytest.raises(SessionError, match="cannot be read"):
        Session.load(tmp_path / "junk", model)
    save_file({"a": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(SessionError, match="not a kvpop session"):
        Session.load(tmp_path / "other", model)
    save_file({"a": torch.ones(1)}, tmp_path / "newer", metadata={"kvpop-session": '{"format": 99}'})
    with pytest.raises(SessionError, match="session format 99, this version reads 1"):
        Session.load(tmp_path / "newer", model)


def test_what_cannot_be_saved_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    model, other = model_with(KVpop(SMALL)), model_with(KVpop(SMALL))
    with pytest.raises(SessionError, match="unused"):
        Session(BoundedCache(model)).save(tmp_path / "s", model)
    with pytest.raises(SessionError, match="does not belong"):
        Session(BoundedCache(model)).save(tmp_path / "s", other)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", ["a tensor is missing", "a shape is wrong", "rows differ", "the generator is junk"])
def test_a_damaged_session_is_refused_as_one(what: str, tmp_path: Path) -> None:
    path = saved(tmp_path, KVpop(SMALL))
    with safe_open(path, framework="pt") as file:
        facts, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if what == "a tensor is missing":
        del tensors["layers.1.priority"]
    elif what == "a shape is wrong":
        tensors["layers.1.state.0"] = tensors["layers.1.state.0"][..., :1].clone()
    elif what == "rows differ":
        tensors |= {n: x.repeat(2, *[1] * (x.ndim - 1)) for n, x in tensors.items() if "layers.1" in n and x.ndim}
    else:
        tensors["generator"] = torch.zeros(3)
    save_file(tensors, path, metadata=facts)
    with pytest.raises(SessionError, match="is damaged"):
        Session.load(path, model_with(KVpop(SMALL)))


def test_settings_beside_the_weights_belong_to_the_session(tmp_path: Path) -> None:
    path = saved(tmp_path, Random(SMALL, decay=-1e-2))
    with pytest.raises(SessionError, match="another policy: layer 0: decay"):
        Session.load(path, model_with(Random(SMALL, decay=-1e-3)))
    model = model_with(Random(SMALL, decay=-1e-2))
    model.model.rotary_emb.inv_freq.mul_(0.5)
    with pytest.raises(SessionError, match="another model: weights"):
        Session.load(path, model)
    with pytest.raises(SessionError, match=r"another model: dtype torch\.float64 in the file, torch\.float32 here"):
        Session.load(path, model_with(Random(SMALL, decay=-1e-2), dtype=torch.float32))


def test_a_target_that_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    model = model_with(KVpop(SMALL))
    cache = BoundedCache(model)
    feed(model, cache, text(1, 20))
    with pytest.raises(SessionError, match="is a directory"):
        Session(cache).save(tmp_path, model)
    (tmp_path / "file").write_text("")
    with pytest.raises(SessionError, match="cannot be written"):
        Session(cache).save(tmp_path / "file" / "s", model)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]

"""What only a GPU can show of the cache: captured graphs, several devices, moving between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvpop.attachment import attach, attached_policies, cache_argument
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.engine import Engine
from kvpop.policies import KVpop, Streaming, Tova
from kvpop.rollout import generate
from kvpop.session import Session
from tests.tiny import VOCAB, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SMALL = Budget(2, 8, 8)


def on_gpu(policy=None, dtype=torch.float32):
    model = attach(tiny_model(dtype=dtype).cuda(), policy or KVpop(SMALL))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in attached_policies(model):
            for p in layer.parameters():
                p.add_(torch.randn(p.shape, generator=generator).to(p) * 0.5)
    return model


def text(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed)).cuda()


@torch.no_grad()
def feed(model, cache: BoundedCache, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, **{cache_argument(model): cache}).logits


@pytest.mark.parametrize("policy", [KVpop(SMALL), Streaming(SMALL)], ids=lambda policy: policy.name)
def test_generate_captures_one_graph_and_equals_eager(policy) -> None:
    """transformers compiles by itself here (mode reduce-overhead); the third generation must not compile again."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = on_gpu(policy)
    graphs = []
    for prompt in (5, 17, 40):
        ids = text(2, prompt, prompt)
        mask = torch.ones_like(ids)
        mask[0, :2] = 0
        options = dict(attention_mask=mask, max_new_tokens=40, min_new_tokens=40, do_sample=False)
        compiled = model.generate(ids, **options)
        assert torch.equal(compiled, model.generate(ids, disable_compile=True, **options))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1] == 1
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


def test_a_decode_step_does_not_wait_for_the_host() -> None:
    model = on_gpu()
    cache = BoundedCache(model)
    feed(model, cache, text(2, 30))
    ids, mask = text(2, 1), torch.ones(2, 1, dtype=torch.long, device="cuda")
    position = torch.full((2, 1), 30, device="cuda")
    with torch.no_grad():
        torch.cuda.set_sync_debug_mode("error")
        try:
            for store in cache.stores:
                q, k = torch.randn(2, 4, 1, 8, device="cuda"), torch.randn(2, 2, 1, 8, device="cuda")
                store.attend(q, k, k, mask.bool(), 0.3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        model(ids, attention_mask=mask, position_ids=position, **{cache_argument(model): cache})


def test_the_engine_equals_single_streams() -> None:
    model = on_gpu(dtype=torch.float64)
    prompts = [text(1, length, length)[0].tolist() for length in (3, 40, 19, 25, 7)]
    requests = Engine(model, rows=2, prefill_chunk=16).generate(prompts, max_new_tokens=30, temperature=1.0, seed=4)
    for prompt, request in zip(prompts, requests):
        steps = generate(model, torch.tensor([prompt]), max_new_tokens=30, temperature=1.0, seed=4, prefill_chunk=16)
        assert request.tokens == [step.token for step in steps]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "policy",
    [KVpop(SMALL), KVpop(SMALL, scorer="mlp"), KVpop(SMALL, heads=((2, 14), (11, 5))), Streaming(SMALL)],
    ids=["sum", "mlp", "by head", "streaming"],
)
def test_the_engine_captures_one_step_for_rows_of_any_length(policy, compiled: bool) -> None:
    """Right before, at and after the first eviction, rows coming and going: the tokens of plain steps."""
    model = on_gpu(policy)
    prompts = [text(1, length, length)[0].tolist() for length in (3, 40, 19, 15, 16, 17, 7)]

    def tokens(graph: bool) -> list[list[int]]:
        engine = Engine(model, rows=3, prefill_chunk=16, graph=graph, compiled=graph and compiled)
        requests = [
            engine.submit(p, max_new_tokens=20 + i % 5, pinned=[(0, i % 2)][: i % 2]) for i, p in enumerate(prompts)
        ]
        for _ in engine.run():
            pass
        return [request.tokens for request in requests]

    assert tokens(True) == tokens(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "policy",
    [KVpop(SMALL), KVpop(SMALL, scorer="mlp"), KVpop(SMALL, heads=((2, 14), (11, 5))), Streaming(SMALL), Tova(24)],
    ids=["sum", "mlp", "by head", "streaming", "tova"],
)
def test_the_engine_captures_pieces_of_prompts(policy, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lengths of pieces, prompts that come again, one that is pinned: the tokens without graphs."""
    monkeypatch.setattr("kvpop.engine.SHORT", 16)
    model = on_gpu(policy, dtype=dtype)
    lengths = (3, 90, 90, 19, 40, 41, 80, 15, 16, 17, 1)
    prompts = [text(1, length, length)[0].tolist() for length in lengths]
    pins = [(4, 5)] if not isinstance(policy, Tova) else []

    def tokens(graph: bool) -> list[list[int]]:
        engine = Engine(model, rows=3, prefill_chunk=40, graph=graph, prefill_graph=graph)
        requests = [engine.submit(p, max_new_tokens=20 + i % 5, pinned=pins * (i == 3)) for i, p in enumerate(prompts)]
        for _ in engine.run():
            pass
        assert sorted(engine._pieces) == ([16, 40] if graph else [])
        return [request.tokens for request in requests]

    assert tokens(True) == tokens(False)


def test_a_session_goes_on_bit_equal_on_the_same_device_and_close_on_another(tmp_path: Path) -> None:
    model, cpu = on_gpu(dtype=torch.float64), on_gpu(dtype=torch.float64).cpu()
    cache = BoundedCache(model)
    feed(model, cache, text(2, 40))
    Session(cache).save(tmp_path / "s", model)
    same, other = Session.load(tmp_path / "s", model).cache, Session.load(tmp_path / "s", cpu).cache
    for step in range(20):
        token = text(2, 1, step)
        logits = feed(model, cache, token)
        assert torch.equal(feed(model, same, token), logits)
        torch.testing.assert_close(feed(cpu, other, token.cpu()), logits.cpu(), rtol=1e-6, atol=1e-6)
    assert cache.held_positions() == other.held_positions()


def test_offload_moves_everything_and_back() -> None:
    model = on_gpu()
    cache, twin = BoundedCache(model, rollback=4), BoundedCache(model, rollback=4)
    for c in (cache, twin):
        feed(model, c, text(2, 30))
    for layer, store in enumerate(cache.stores):
        cache.layers[layer].offload()
        assert {x.device.type for x in (*store.tensors().values(), store.taken)} == {"cpu"}
        cache.layers[layer].prefetch()
        assert {x.device.type for x in (*store.tensors().values(), store.taken)} == {"cuda"}
    cache.crop(-3)
    twin.crop(-3)
    assert torch.equal(feed(model, cache, text(2, 20)), feed(model, twin, text(2, 20)))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_model_on_two_devices_keeps_each_layers_cache_beside_it(dtype: torch.dtype) -> None:
    accelerate = pytest.importorskip("accelerate")
    whole, split = tiny_model(dtype=dtype).cuda(), tiny_model(dtype=dtype)
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1}
    split = accelerate.dispatch_model(split, {**places, "model.norm": 1, "lm_head": 1})
    torch.manual_seed(0)
    attach(whole, KVpop(SMALL))
    attach(split, KVpop(SMALL))
    for own, other in zip(attached_policies(whole), attached_policies(split)):
        other.load_state_dict(own.state_dict())
    ids, mask = text(2, 33), torch.ones(2, 33, dtype=torch.long, device="cuda")
    mask[0, :5] = 0
    options = dict(attention_mask=mask, max_new_tokens=40, min_new_tokens=40, do_sample=False)
    caches = [BoundedCache(whole), BoundedCache(split)]
    texts = [
        model.generate(ids, **options, disable_compile=True, **{cache_argument(model): cache})
        for model, cache in zip((whole, split), caches)
    ]
    assert torch.equal(*texts)
    assert caches[0].held_positions() == caches[1].held_positions()
    assert [store.keys.device.index for store in caches[1].stores] == [0, 1]
    assert torch.equal(texts[0], split.generate(ids, **options))  # compiled, if transformers thinks so

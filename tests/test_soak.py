"""A long generation: memory stays flat, and what was built up step by step is what a fresh start makes of the same text."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvpop.attachment import attached_policies, cache_argument
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.core.cutoff import expiry
from kvpop.documents import Documents
from kvpop.policies import KVpop, RankedLayer
from tests.test_cache import feed, model_with
from tests.tiny import VOCAB

BUDGET = Budget(2, 8, 16)


def resident() -> int:
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm")
    return int(pages.read_text().split()[1]) * 4096 if pages.exists() else 0


@torch.no_grad()
def first_layer_held(model, ids_1S: Tensor) -> list[list[int]]:
    """What the training mask of the first layer keeps at the last token: its keys and values depend on no attention."""
    layer = model.model.layers[0]
    hidden = layer.input_layernorm(model.model.embed_tokens(ids_1S))
    shape = (1, ids_1S.shape[1], -1, layer.self_attn.head_dim)
    k, v = (p(hidden).view(shape).transpose(1, 2) for p in (layer.self_attn.k_proj, layer.self_attn.v_proj))
    cos, sin = model.model.rotary_emb(k, torch.arange(ids_1S.shape[1])[None])
    k = apply_rotary_pos_emb(k, k, cos, sin)[1]
    policy = attached_policies(model)[0]
    assert isinstance(policy, RankedLayer)
    priority = policy.priority(policy.score(k, v, Documents.single(*ids_1S.shape)))
    last = ids_1S.shape[1] - 1
    kept = expiry(priority, BUDGET, impl="heap")[0] > last
    return [head.nonzero()[:, 0].tolist() for head in kept]


def memory(store) -> Tensor:
    """The scorer's memory without its arbitrary scale."""
    C, m = store.state
    return C * m.exp()[..., None, None]


@torch.no_grad()
def soak(total: int, checkpoints: int, compiled: bool) -> None:
    torch._dynamo.reset()
    tolerance = 1e-4 if compiled else 1e-9  # compiled, the rotary embedding's float32 is rounded in another way
    model = model_with(KVpop(BUDGET, decay=-1e-3, decay_range=(-1e-2, -1e-5)))
    call = torch.compile(model.forward, fullgraph=True) if compiled else model.forward
    cache, generator = BoundedCache(model), torch.Generator().manual_seed(0)
    cache.allocate(1)
    tokens, token = torch.empty(1, total, dtype=torch.long), torch.tensor([[3]])
    sizes, held_before = [], [[-1]]
    for t in range(total):
        tokens[:, t : t + 1] = token
        logits = call(token.clone(), position_ids=torch.tensor([[t]]), **{cache_argument(model): cache}).logits
        token = torch.multinomial(logits[0].softmax(-1), 1, generator=generator)
        if (t + 1) % (total // checkpoints):
            continue
        gc.collect()
        sizes.append((cache.nbytes(), resident()))
        fresh = BoundedCache(model)
        feed(model, fresh, tokens[:, : t + 1], [4096] * ((t + 4096) // 4096))
        assert cache.held_positions() == fresh.held_positions()
        for own, anew in zip(cache.stores, fresh.stores):
            torch.testing.assert_close(memory(own), memory(anew), rtol=tolerance, atol=tolerance)
        assert cache.held_positions()[0][0] == first_layer_held(model, tokens[:, : t + 1])
        held = [p for head in cache.held_positions()[1][0] for p in head]
        assert held != held_before  # it keeps turning over
        held_before = held
    assert len({size for size, _ in sizes}) == 1
    assert len(tokens.unique()) > VOCAB // 3  # it did not fall into a loop
    assert sizes[-1][1] - sizes[checkpoints // 2][1] < 64e6  # what is compared at a checkpoint is freed


def test_a_few_thousand_tokens_leave_no_drift() -> None:
    soak(3000, 3, compiled=False)


@pytest.mark.slow
def test_200_000_tokens_in_flat_memory_without_drift() -> None:
    soak(200_000, 10, compiled=True)

"""Attention of a chunk in Triton: positions anywhere, expiries of every kind, against float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvpop.attachment import attach
from kvpop.budget import Budget
from kvpop.cache import BoundedCache
from kvpop.ops.sparse_attention import NEVER, chunk_impl, sparse_attention
from kvpop.policies import DMS, KVpop, Streaming, Tova
from kvpop.slots.base import FAR
from tests.test_cache import feed, text
from tests.test_cache_step import DEVICE, GPU, HALF, needs_triton
from tests.tiny import tiny_model

pytestmark = [needs_triton, *([pytest.mark.gpu] if GPU else [])]
SHAPES = [
    # dtype, B, H, G, Q, T, D, V
    (torch.float32, 1, 2, 4, 7, 90, 64, 64),
    (torch.float32, 2, 1, 1, 1, 33, 80, 96),
    (torch.float32, 1, 1, 2, 40, 40, 160, 32),
    (HALF, 1, 2, 3, 50, 131, 64, 80),
    (HALF, 2, 1, 8, 33, 70, 96, 64),
    (HALF, 1, 2, 4, 65, 1, 128, 128),
]
if GPU:
    SHAPES += [
        (HALF, 1, 8, 4, 512, 4608, 128, 128),
        (HALF, 2, 3, 3, 777, 3001, 64, 64),
        (HALF, 1, 2, 4, 300, 900, 256, 256),
    ]


def made(shape: tuple, seed: int) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Queries, keys, values; expiries; positions of queries and of keys, in no order, some of nothing, some far ahead."""
    dtype, B, H, G, Q, T, D, V = shape
    g = torch.Generator().manual_seed(seed)
    x = [torch.randn(B, n, L, X, generator=g).to(dtype).to(DEVICE) for n, L, X in ((H * G, Q, D), (H, T, D), (H, T, V))]
    k_pos = torch.stack([torch.randperm(2 * T, generator=g)[:T] for _ in range(B * H)]).view(B, H, T)
    expiry = k_pos + torch.randint(-2, 2 * T, (B, H, T), generator=g)
    kind = torch.rand(B, H, T, generator=g)
    expiry = expiry.masked_fill(kind < 0.2, NEVER).masked_fill(kind > 0.9, 2**40)
    empty = (kind > 0.5) & (kind < 0.6)
    k_pos, expiry = k_pos.masked_fill(empty, FAR), expiry.masked_fill(empty, 0)
    q_pos = torch.randint(2 * T, (B, Q), generator=g).sort(-1).values
    q_pos[:, Q - Q // 5 :] = FAR
    q_pos[0, 0] = -1  # sees nothing
    return x, expiry.to(DEVICE), q_pos.to(DEVICE), k_pos.to(DEVICE)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_reference(shape: tuple, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not GPU:
        monkeypatch.setattr("kvpop.ops.sparse_attention.triton_chunk.ROWS", 32)
        monkeypatch.setattr("kvpop.ops.sparse_attention.triton_chunk.KEYS", 16)
    (q, k, v), expiry, q_pos, k_pos = made(shape, seed=len(str(shape)))
    if ordered:
        k_pos, order = k_pos.sort(-1)
        expiry = expiry.gather(-1, order)
    options = dict(scale=q.shape[-1] ** -0.5, q_pos_BQ=q_pos, k_pos_BHT=k_pos)
    exact, exact_lse = sparse_attention(q.double(), k.double(), v.double(), expiry, **options)
    plain, plain_lse = sparse_attention(q, k, v, expiry, **options)
    out, lse = sparse_attention(q, k, v, expiry, impl="triton", **options)
    assert (out.dtype, lse.dtype, out.shape) == (v.dtype, torch.float32, exact.shape)
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    assert (out[lse.isneginf()] == 0).all()
    for found, given, expected in ((out, plain, exact), (lse, plain_lse, exact_lse)):
        expected = expected.nan_to_num(neginf=0.0)
        off, allowed = ((x.double().nan_to_num(neginf=0.0) - expected).abs().max() for x in (found, given))
        assert off <= 4 * allowed + (1e-5 if q.dtype == torch.float32 else 4e-3)


def test_keys_far_into_memory() -> None:
    if not GPU:
        pytest.skip("needs 9 GB")
    H, T, D = 2, 2**24 + 64, 128  # the second head begins behind 2^31 elements
    k = torch.zeros(1, H, T, D, device=DEVICE, dtype=HALF)
    q, v = torch.randn(1, H, 3, D, device=DEVICE).to(HALF), k[..., :16].contiguous()
    v[0, 1, -1] = 3.0
    k_pos = torch.full((1, H, T), FAR, device=DEVICE, dtype=torch.int32)
    k_pos[:, :, -1] = 5
    expiry = torch.full_like(k_pos, NEVER)
    out, _ = sparse_attention(
        q, k, v, expiry, scale=0.1, q_pos_BQ=torch.full((1, 3), 7, device=DEVICE), k_pos_BHT=k_pos, impl="triton"
    )
    assert (out[0, 1] == 3).all()


def test_nothing_to_attend_from_or_to() -> None:
    for Q, T in ((0, 4), (3, 0)):
        x = [torch.randn(1, n, L, 16, device=DEVICE) for n, L in ((2, Q), (1, T), (1, T))]
        places = torch.zeros(1, 1, T, device=DEVICE, dtype=torch.long)
        now = torch.zeros(1, Q, device=DEVICE, dtype=torch.long)
        out, lse = sparse_attention(*x, places + 9, scale=0.1, q_pos_BQ=now, k_pos_BHT=places, impl="triton")
        assert (out == 0).all()
        assert lse.isneginf().all()
        assert out.shape == (1, 2, Q, 16)


def test_where_it_will_do() -> None:
    q = torch.zeros(1, 2, 3, 64, device="cuda" if GPU else "cpu")
    assert chunk_impl(q, q, q) == ("triton" if GPU else "reference")
    assert chunk_impl(q.double(), q.double(), q.double()) == "reference"
    assert chunk_impl(q.clone().requires_grad_(), q, q) == "reference"
    wide = q.new_zeros(1, 2, 3, 300)
    assert chunk_impl(wide, wide, wide) == "reference"


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "policy",
    [KVpop(Budget(2, 5, 9), "mlp+mlstm"), Streaming(Budget(2, 5, 9)), Tova(16), DMS(window=6, ratio=2.0)],
    ids=lambda p: p.name,
)
def test_a_prompt_in_chunks_holds_the_same_tokens(policy, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the stores: what they keep after a prompt in chunks is what the reference keeps, and logits agree."""
    model = tiny_model("qwen3", dtype=torch.float32).to(DEVICE)
    attach(model, policy)
    ids, found = text(2, 45).to(DEVICE), []
    real = torch.ones(2, 45, dtype=torch.long, device=DEVICE)
    if padded:
        real[0, :7], real[1, 20:23], real[1, 40:] = 0, 0, 0  # in front, a chunk, behind
    for how in ("reference", "triton"):
        for store in ("ranked", "paged", "attended"):
            monkeypatch.setattr(f"kvpop.slots.{store}.chunk_impl", lambda *_, how=how: how)
        cache = BoundedCache(model)
        logits, stops = [], (0, 20, 23, 45)
        with torch.no_grad():
            for start, stop in pairwise(stops):
                mask = real[:, :stop] if padded else None
                logits.append(feed(model, cache, ids[:, start:stop], attention_mask=mask))
        found.append((cache.held_positions(), torch.cat(logits, 1)[real.bool()]))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-4)

"""Sparse attention: the reference against a loop over queries, the tiles against the dense mask, flex against both."""

from __future__ import annotations

import math

import pytest
import torch
import torch._inductor.config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kvpop.ops.sparse_attention import NEVER, blocks, flex, keep_mask, reference, sparse_attention

# Shapes: B batch, R = H * G query heads, H KV heads, Q queries, T = S keys, D head dim, V value dim.


def random_expiry(B: int, H: int, S: int, window: int, seed: int) -> Tensor:
    """Expiries [B, H, S] as a policy gives them: a window, then a random survival; some tokens stay for ever, and the
    second half is another document. A few tokens are never read, not even by themselves."""
    generator = torch.Generator().manual_seed(seed)
    birth = torch.arange(S)
    survival = (torch.rand(B, H, S, generator=generator).log() * -(S / 8)).long()
    expiry = birth + window + survival
    expiry[torch.rand(B, H, S, generator=generator) < 0.1] = NEVER
    expiry[..., : S // 2] = expiry[..., : S // 2].clamp(max=S // 2)
    return torch.where(torch.rand(B, H, S, generator=generator) < 0.05, birth, expiry)


def naive(
    q: Tensor, k: Tensor, v: Tensor, expiry: Tensor, scale: float, q_pos: Tensor, k_pos: Tensor
) -> tuple[Tensor, Tensor]:
    """One query at a time, over the list of the keys that it sees."""
    (B, R, Q, _), H = q.shape, k.shape[1]
    out, lse = q.new_zeros(B, R, Q, v.shape[-1]), q.new_full((B, R, Q), -torch.inf)
    for b in range(B):
        for r in range(R):
            h = r // (R // H)
            for i in range(Q):
                now = int(q_pos[b, i])
                seen = [t for t in range(k.shape[2]) if k_pos[b, h, t] <= now < expiry[b, h, t]]
                if seen:
                    logits = scale * (k[b, h, seen] @ q[b, r, i])
                    lse[b, r, i] = logits.logsumexp(0)
                    out[b, r, i] = logits.softmax(0) @ v[b, h, seen]
    return out, lse


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


@settings(max_examples=40, deadline=None)
@given(
    B=st.integers(1, 2),
    H=st.integers(1, 3),
    G=st.integers(1, 3),
    Q=st.integers(1, 7),
    T=st.integers(1, 9),
    V=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_reference_equals_the_loop_at_any_positions(B: int, H: int, G: int, Q: int, T: int, V: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in ((B, H * G, Q, 3), (B, H, T, 3), (B, H, T, V))
    )
    q_pos = torch.randint(0, 12, (B, Q), generator=generator)
    k_pos = torch.randint(0, 12, (B, H, T), generator=generator)
    expiry = k_pos + torch.randint(-2, 10, (B, H, T), generator=generator)
    actual = sparse_attention(q, k, v, expiry, scale=0.7, q_pos_BQ=q_pos, k_pos_BHT=k_pos)
    expected = naive(q, k, v, expiry, 0.7, q_pos, k_pos)
    close(actual[0], expected[0])
    close(actual[1], expected[1])

    out_cotangent = torch.randn(expected[0].shape, dtype=torch.float64, generator=generator)
    lse_cotangent = torch.randn(expected[1].shape, dtype=torch.float64, generator=generator)

    def gradients(out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        loss = (out * out_cotangent).sum() + (finite * lse_cotangent).sum()
        return torch.autograd.grad(loss, (q, k, v), allow_unused=True, materialize_grads=True)

    if expected[0].requires_grad and keep_mask(expiry, q_pos, k_pos).any():
        for got, want in zip(gradients(*actual), gradients(*expected), strict=True):
            close(got, want)


@pytest.mark.parametrize("block", [1, 7, 64])
def test_reference_does_not_depend_on_its_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 50, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 50, 8, generator=generator, dtype=torch.float64)
    expiry = random_expiry(2, 2, 50, 6, seed=2)
    whole = sparse_attention(q, k, v, expiry, scale=0.3)
    monkeypatch.setattr(reference, "QUERY_BLOCK", block)
    for actual, expected in zip(sparse_attention(q, k, v, expiry, scale=0.3), whole, strict=True):
        close(actual, expected)


def test_a_bias_counts_from_a_distance_on_and_has_a_gradient() -> None:
    """Against the mask written out, at the natural positions and at given ones."""
    generator = torch.Generator().manual_seed(7)
    B, H, G, S, first = 2, 2, 3, 40, 5
    q = torch.randn(B, H * G, S, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, B, H, S, 8, generator=generator, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, torch.randn(B, H, S, generator=generator, dtype=torch.float64))]
    q, k, v, bias = leaves
    expiry, index = random_expiry(B, H, S, 9, seed=7), torch.arange(S)
    q_pos, k_pos = index.expand(B, S), index.expand(B, H, S)
    keep = keep_mask(expiry, q_pos, k_pos).repeat_interleave(G, dim=1)
    far = ((q_pos[:, None, :, None] - k_pos[:, :, None]) >= first).repeat_interleave(G, dim=1)
    logits = 0.4 * q @ k.repeat_interleave(G, dim=1).mT + far * bias.repeat_interleave(G, dim=1)[:, :, None]
    logits = logits.masked_fill(~keep, -torch.inf)
    lse = logits.logsumexp(-1)
    seen = lse.isfinite()
    weight = logits.masked_fill(~seen[..., None], 0.0).softmax(-1) * seen[..., None]
    expected = weight @ v.repeat_interleave(G, dim=1), lse
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in expected]

    def gradients(out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        loss = (out * cotangents[0]).sum() + (lse.masked_fill(~seen, 0.0) * cotangents[1]).sum()
        return torch.autograd.grad(loss, leaves)

    wanted = gradients(*expected)
    assert (wanted[3] != 0).sum() > S
    for positions in ({}, dict(q_pos_BQ=q_pos, k_pos_BHT=k_pos)):
        actual = sparse_attention(q, k, v, expiry, scale=0.4, bias_BHT=bias, bias_from=first, **positions)
        for got, want in zip([*actual, *gradients(*actual)], [*expected, *wanted], strict=True):
            close(got, want)
    low = sparse_attention(*(x.bfloat16() for x in (q, k, v)), expiry, scale=0.4, bias_BHT=bias, bias_from=first)
    assert low[0].dtype == torch.bfloat16
    close(low[0].double(), expected[0], 0.05)


def test_never_expiring_is_causal_attention() -> None:
    q, k, v = torch.randn(3, 1, 2, 33, 8, generator=torch.Generator().manual_seed(3))
    out, lse = sparse_attention(q, k, v, torch.full((1, 2, 33), NEVER), scale=8**-0.5)
    close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), 1e-5)
    assert lse.isfinite().all()


def test_a_query_without_keys_gets_zero_and_finite_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 1, 4, 2, generator=torch.Generator().manual_seed(4)))
    out, lse = sparse_attention(q, k, v, torch.tensor([[[1, 0, 2, 9]]]), scale=1.0)
    assert (out[0, 0, 1:3] == 0).all()
    assert lse[0, 0].isinf().tolist() == [False, True, True, False]
    (out.sum() + lse[lse.isfinite()].sum()).backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()


def test_no_queries() -> None:
    empty = torch.zeros(1, 2, 0, 4)
    out, lse = sparse_attention(empty, empty, empty, torch.zeros(1, 2, 0, dtype=torch.long), scale=1.0)
    assert out.shape == (1, 2, 0, 4)
    assert lse.shape == (1, 2, 0)


def test_errors() -> None:
    q, kv, expiry = torch.zeros(1, 4, 5, 2), torch.zeros(1, 2, 5, 2), torch.zeros(1, 2, 5)
    pos = torch.arange(5)
    with pytest.raises(ValueError, match="3 query heads"):
        sparse_attention(q[:, :3], kv, kv, expiry, scale=1.0)
    with pytest.raises(ValueError, match="do not fit"):
        sparse_attention(q, kv, kv[:, :, :4], expiry, scale=1.0)
    with pytest.raises(ValueError, match="same tokens"):
        sparse_attention(q[:, :, :3], kv, kv, expiry, scale=1.0)
    with pytest.raises(ValueError, match="or for neither"):
        sparse_attention(q, kv, kv, expiry, scale=1.0, q_pos_BQ=pos[None])
    with pytest.raises(ValueError, match="whole sequences"):
        sparse_attention(q, kv, kv, expiry, scale=1.0, q_pos_BQ=pos[None], k_pos_BHT=pos.expand(1, 2, 5), impl="flex")
    with pytest.raises(ValueError, match="unknown impl 'dense'"):
        sparse_attention(q, kv, kv, expiry, scale=1.0, impl="dense")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape of the expiry \(1, 2, 5\), got \(1, 4, 5\)"):
        sparse_attention(q, kv, kv, expiry, scale=1.0, bias_BHT=torch.zeros(1, 4, 5))
    with pytest.raises(ValueError, match="bias_from must be at least 0 tokens, got -1"):
        sparse_attention(q, kv, kv, expiry, scale=1.0, bias_BHT=expiry, bias_from=-1)
    with pytest.raises(ValueError, match="permute must be at least 1"):
        flex.attend_sequence(q, kv, kv, expiry, 1.0, permute=0)
    with pytest.raises(ValueError, match="use impl='reference'"):
        sparse_attention(q, kv, kv, expiry, scale=1.0, impl="flex")


# The tiles that flex is told to visit.


def dense_tiles(expiry: Tensor, order: Tensor | None) -> tuple[Tensor, Tensor]:
    """(live, full) [B, H, Q, K] by looking at every pair, keys in the given order."""
    B, H, S = expiry.shape
    position = torch.arange(S)
    keep = keep_mask(expiry, position.expand(B, S), position.expand(B, H, S))
    if order is not None:
        keep = keep.take_along_dim(order[:, :, None], dim=-1)
    tiles = keep.view(B, H, S // 128, 128, S // 128, 128)
    return tiles.any(-1).any(3), tiles.all(-1).all(3)


def listed_tiles(count: Tensor, index: Tensor) -> Tensor:
    """The boolean tiles that a block list names; a block named twice fails."""
    assert count.dtype == index.dtype == torch.int32
    assert count.is_contiguous()
    assert index.is_contiguous()
    named = torch.arange(index.shape[-1]) < count[..., None]
    times = torch.zeros_like(index).scatter_add_(-1, index.long(), named.int())
    assert times.max() <= 1
    return times.bool()


def mask_tiles(mask: BlockMask) -> tuple[Tensor, Tensor]:
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    assert mask.kv_indices.shape == mask.full_kv_indices.shape
    return (
        listed_tiles(mask.kv_num_blocks, mask.kv_indices),
        listed_tiles(mask.full_kv_num_blocks, mask.full_kv_indices),
    )


@pytest.mark.parametrize("seed", range(40))
def test_block_lists_are_exactly_the_live_tiles(seed: int) -> None:
    G, S, window = 1 + seed % 3, 128 * (1 + seed % 7), (1, 20, 200)[seed % 3]
    expiry = random_expiry(2, 3, S, window, seed)
    if seed % 4 == 0:  # stretches nobody reads, a stretch everybody reads, and a sequence that ends early
        expiry[0, 0, : S // 2] = 0
        expiry[0, 1] = NEVER
        expiry[1, :, S - 100 :] = 0
    birth, expiry_0 = blocks.lifetimes(expiry)
    partial, full = mask_tiles(flex.lifetime_mask(birth, expiry_0, G))
    live_expected, full_expected = (x.repeat_interleave(G, dim=1) for x in dense_tiles(expiry, None))
    assert partial.shape[1] == 3 * G  # a mask head for every query head
    assert torch.equal(full, full_expected)
    assert torch.equal(partial, live_expected & ~full_expected)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("chunk", [128, 256, 300, 10_000])
def test_permuted_block_lists_miss_nothing(seed: int, chunk: int) -> None:
    G, S = 1 + seed % 3, 128 * (1 + seed % 7)
    expiry = random_expiry(2, 3, S, (1, 20, 200)[seed % 3], seed)
    birth, expiry_0 = blocks.lifetimes(expiry)
    order = flex.expiry_order(expiry_0, chunk)
    assert torch.equal(order.sort(-1).values, torch.arange(S).expand_as(order))
    partial, full = mask_tiles(flex.lifetime_mask(birth.gather(-1, order), expiry_0.gather(-1, order), G))
    live_expected, full_expected = (x.repeat_interleave(G, dim=1) for x in dense_tiles(expiry, order))
    assert not (partial & full).any()
    assert torch.equal(full, full_expected)
    assert not (live_expected & ~(partial | full)).any()


def test_sorting_by_expiry_leaves_fewer_live_tiles() -> None:
    S, w = 4096, 64
    birth = torch.arange(S)
    survives = torch.rand(1, 2, S, generator=torch.Generator().manual_seed(5)) < 0.25
    birth_BHS, expiry = blocks.lifetimes(torch.where(survives, torch.tensor(NEVER), birth + w))
    order = flex.expiry_order(expiry, 1024)
    plain = blocks.interval_tiles(birth_BHS, expiry)
    sorted_ = blocks.interval_tiles(birth_BHS.gather(-1, order), expiry.gather(-1, order))
    assert sorted_[0].sum() < 0.6 * plain[0].sum()
    assert sorted_[1].sum() > 10 * plain[1].sum()


def test_expiries_beyond_int32_do_not_wrap() -> None:
    _, expiry = blocks.lifetimes(torch.tensor([[[2**40, NEVER, -(2**30), 3]]]))
    assert expiry.tolist() == [[[NEVER, NEVER, 0, 0]]]


def test_reordering_has_the_gradient_of_a_gather() -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(2, 3, 20, 4, generator=generator, requires_grad=True)
    order = torch.rand(2, 3, 20, generator=generator).argsort(-1)
    cotangent = torch.randn(x.shape, generator=generator)
    moved = flex._Reorder.apply(x, order, order.argsort(-1))
    natural = x.gather(2, order[..., None].expand(x.shape))
    assert torch.equal(moved, natural)
    (actual,), (expected,) = torch.autograd.grad(moved, x, cotangent), torch.autograd.grad(natural, x, cotangent)
    assert torch.equal(actual, expected)


# Flex itself. On the CPU eager flex gives output and LSE but looks only at mask_mod; compiled flex honours the block
# lists but has no LSE. Together they cover what the GPU does in one call.


_traced = torch.compile(blocks._flex, backend="eager", dynamic=False, fullgraph=True)


def eager_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, score_mod: blocks.ScoreMod | None = None
) -> tuple[Tensor, Tensor]:
    return _traced(q, k, v, mask, scale, score_mod)


_compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)


def compiled_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, score_mod: blocks.ScoreMod | None = None
) -> tuple[Tensor, Tensor]:
    assert score_mod is None
    out = _compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
    return out, q.new_full(out.shape[:3], math.nan)


@pytest.mark.parametrize(("S", "G", "permute"), [(1, 1, None), (40, 2, 16), (200, 1, 1024), (300, 3, 128)])
def test_flex_semantics(S: int, G: int, permute: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(blocks, "run_flex", eager_flex)
    generator = torch.Generator().manual_seed(S)
    q = torch.randn(2, 2 * G, S, 16, generator=generator)
    k, v = torch.randn(2, 2, 2, S, 16, generator=generator)
    expiry = random_expiry(2, 2, S, 9, seed=S)
    expiry[0, 0, : S // 3] = 0  # queries without a key
    out, lse = flex.attend_sequence(q, k, v, expiry, 0.4, permute=permute)
    expected_out, expected_lse = sparse_attention(q, k, v, expiry, scale=0.4)
    assert lse.dtype == torch.float32
    close(out, expected_out, 1e-5)
    close(lse, expected_lse, 1e-5)
    if S > 1:
        assert lse.isneginf().any()
        assert (out[lse.isneginf()] == 0).all()


@pytest.mark.parametrize(("S", "G", "permute"), [(40, 2, 16), (200, 1, 1024), (300, 3, 128), (300, 2, None)])
def test_flex_bias_and_its_gradient(S: int, G: int, permute: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU flex has no gradient for q, k and v, but it has one for what a score function captures."""
    torch._dynamo.reset()
    monkeypatch.setattr(blocks, "run_flex", eager_flex)
    generator = torch.Generator().manual_seed(S)
    q = torch.randn(2, 2 * G, S, 16, generator=generator)
    k, v = torch.randn(2, 2, 2, S, 16, generator=generator)
    bias = torch.randn(2, 2, S, generator=generator).requires_grad_()
    expiry = random_expiry(2, 2, S, 30, seed=S)
    expiry[0, 0, : S // 3] = 0
    results = []
    for run in (
        lambda: flex.attend_sequence(q, k, v, expiry, 0.4, bias, 9, permute=permute),
        lambda: sparse_attention(q, k, v, expiry, scale=0.4, bias_BHT=bias, bias_from=9),
    ):
        out, lse = run()
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        loss = (out * cotangent).sum() + lse.masked_fill(lse.isneginf(), 0.0).sum()
        results.append((out, lse, *torch.autograd.grad(loss, bias)))
    assert (results[0][2] != 0).sum() > S
    for got, want in zip(*results, strict=True):
        close(got, want, 2e-5)


def test_compiled_flex_visits_the_listed_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "run_flex", compiled_flex)
    torch._dynamo.reset()
    for seed, (S, permute) in enumerate([(500, None), (450, 256), (385, None), (512, 256)]):
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(1, 4, S, 16, generator=generator)
        k, v = torch.randn(2, 1, 2, S, 16, generator=generator)
        expiry = random_expiry(1, 2, S, 20, seed)
        # Nobody reads the tokens 128 to 255 of head 0. In both orders they are one tile column that is never visited.
        expiry[0, 0, :128] = torch.arange(1, 129) + 200 * seed
        expiry[0, 0, 128:256] = 0
        expiry[0, 1, :128] = NEVER
        expected, _ = sparse_attention(q, k, v, expiry, scale=0.4)
        k[0, 0, 128:256] = v[0, 0, 128:256] = math.nan
        one_graph = torch._dynamo.config.patch(error_on_recompile=seed > 0)  # only the numbers differ
        with one_graph, torch._inductor.config.patch({"cpp.vec_isa_ok": True}):  # compile no probe per instruction set
            out, _ = flex.attend_sequence(q, k, v, expiry, 0.4, permute=permute)
        close(out, expected, 1e-5)


def test_flex_never_runs_uncompiled() -> None:
    q = torch.zeros(1, 1, 128, 16)
    birth, expiry = blocks.lifetimes(torch.full((1, 1, 128), NEVER))
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="would run dense"):
        blocks._compiled(q, q, q, flex.lifetime_mask(birth, expiry, 1), 1.0, None)


def test_too_many_graphs_are_an_error() -> None:
    torch._dynamo.reset()

    def run(S: int) -> None:
        q = torch.zeros(1, 1, S, 16)
        birth, expiry = blocks.lifetimes(torch.full(q.shape[:3], NEVER))
        eager_flex(q, q, q, flex.lifetime_mask(birth, expiry, 1), 1.0)

    with torch._dynamo.config.patch(recompile_limit=2):
        run(128)
        run(256)
        run(128)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            run(384)
    torch._dynamo.reset()

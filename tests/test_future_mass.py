"""Future mass: the reference against a loop over keys, the tiles against the dense mask, flex against both."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kvpop.ops.future_mass import flex, future_log_mass, reference
from kvpop.ops.sparse_attention import NEVER, blocks, sparse_attention

# Shapes: B batch, R = H * G query heads, H KV heads, G query heads per KV head, S sequence, D head dim.


def random_end(B: int, S: int, seed: int) -> Tensor:
    """One past the last token of each token's document, [B, S]: packed documents, then padding (0)."""
    generator = torch.Generator().manual_seed(seed)
    end = torch.zeros(B, S, dtype=torch.long)
    for b in range(B):
        cuts = sorted(torch.randint(0, S + 1, (4,), generator=generator).tolist())
        for start, stop in zip([0, *cuts], cuts):
            end[b, start:stop] = stop
    return end


def allowed_pairs(end: Tensor, window: int, lookahead: int | None) -> Tensor:
    """[B, S keys t, S queries d]: d is a future query of t."""
    d, t = torch.arange(end.shape[-1]), torch.arange(end.shape[-1])[:, None]
    allowed = (d >= t + window) & (d < end[..., None])
    return allowed if lookahead is None else allowed & (d <= t + window + lookahead)


def naive(
    q: Tensor, k: Tensor, lse: Tensor, end: Tensor, scale: float, window: int, power: float, lookahead: int | None
) -> Tensor:
    """One key at a time, adding probabilities."""
    (B, R, S, _), H = q.shape, k.shape[1]
    mass = torch.zeros(B, R, S, dtype=torch.float64)
    for b in range(B):
        for r in range(R):
            for t in range(S):
                last = S if lookahead is None else t + window + lookahead + 1
                for d in range(t + window, min(int(end[b, t]), last)):
                    if lse[b, r, d] > -torch.inf:
                        p = (scale * q[b, r, d].dot(k[b, r // (R // H), t]) - lse[b, r, d]).exp()
                        mass[b, r, t] += p**power
    return mass.log()


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


@settings(max_examples=40, deadline=None)
@given(
    B=st.integers(1, 2),
    H=st.integers(1, 2),
    G=st.integers(1, 3),
    S=st.integers(1, 14),
    window=st.integers(1, 16),
    power=st.sampled_from([0.5, 1.0, 2.0]),
    lookahead=st.none() | st.integers(0, 16),
    seed=st.integers(0, 2**31),
)
def test_reference_equals_the_loop(
    B: int, H: int, G: int, S: int, window: int, power: float, lookahead: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H * G, S, 3, dtype=torch.float64, generator=generator).requires_grad_()
    k = torch.randn(B, H, S, 3, dtype=torch.float64, generator=generator)
    lse = torch.randn(B, H * G, S, dtype=torch.float64, generator=generator)
    lse[torch.rand(lse.shape, generator=generator) < 0.2] = -torch.inf
    end = random_end(B, S, seed)
    actual = future_log_mass(q, k, lse, end, scale=0.7, window=window, power=power, lookahead=lookahead)
    assert not actual.requires_grad
    close(actual, naive(q.detach(), k, lse, end, 0.7, window, power, lookahead))


@pytest.mark.parametrize("block", [1, 7, 64])
def test_reference_does_not_depend_on_its_block(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 50, 8, generator=generator, dtype=torch.float64)
    k, lse = torch.randn(2, 2, 50, 8, generator=generator, dtype=torch.float64), q.sum(-1)
    end = random_end(2, 50, seed=2)
    whole = future_log_mass(q, k, lse, end, scale=0.3, window=5, lookahead=20)
    monkeypatch.setattr(reference, "KEY_BLOCK", block)
    close(future_log_mass(q, k, lse, end, scale=0.3, window=5, lookahead=20), whole)


def test_mass_at_window_one_is_what_attention_gives_to_others() -> None:
    """Each query spreads a mass of 1 over the keys before it and itself."""
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 1, 2, 40, 8, generator=generator, dtype=torch.float64)
    own = torch.full((1, 2, 40), NEVER)
    _, lse = sparse_attention(q, k, k, own, scale=0.5)
    mass = future_log_mass(q, k, lse, torch.full((1, 40), 40), scale=0.5, window=1).exp()
    self_mass = (0.5 * (q * k).sum(-1) - lse).exp()
    close((mass + self_mass).sum(-1), torch.full((1, 2), 40.0))


def test_errors() -> None:
    q, k, lse, end = torch.zeros(1, 4, 5, 2), torch.zeros(1, 2, 5, 2), torch.zeros(1, 4, 5), torch.full((1, 5), 5)
    with pytest.raises(ValueError, match="3 query heads"):
        future_log_mass(q[:, :3], k, lse, end, scale=1.0, window=1)
    with pytest.raises(ValueError, match="do not fit"):
        future_log_mass(q, k, lse[:, :2], end, scale=1.0, window=1)
    with pytest.raises(ValueError, match="window must be at least 1 token, got 0"):
        future_log_mass(q, k, lse, end, scale=1.0, window=0)
    with pytest.raises(ValueError, match="power must be positive, got nan"):
        future_log_mass(q, k, lse, end, scale=1.0, window=1, power=float("nan"))
    with pytest.raises(ValueError, match="lookahead must be at least 0 tokens, got -1"):
        future_log_mass(q, k, lse, end, scale=1.0, window=1, lookahead=-1)
    with pytest.raises(ValueError, match="unknown impl 'dense'"):
        future_log_mass(q, k, lse, end, scale=1.0, window=1, impl="dense")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="use impl='reference'"):
        future_log_mass(q, k, lse, end, scale=1.0, window=1, impl="flex")


def listed_tiles(count: Tensor, index: Tensor) -> Tensor:
    """The boolean tiles that a block list names; a block named twice fails."""
    assert count.dtype == index.dtype == torch.int32
    assert count.is_contiguous()
    assert index.is_contiguous()
    named = torch.arange(index.shape[-1]) < count[..., None]
    times = torch.zeros_like(index).scatter_add_(-1, index.long(), named.int())
    assert times.max() <= 1
    return times.bool()


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("lookahead", [None, 0, 90, 10_000, 2**40])
def test_block_lists_are_exactly_the_live_tiles(seed: int, lookahead: int | None) -> None:
    S, window = 128 * (1 + seed % 6), (1, 64, 256, 2000, 2**40)[seed % 5]
    end = torch.full((2, S), NEVER) if seed % 7 == 0 else random_end(2, S, seed)
    mask = flex.future_mask(end, window, lookahead)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    assert mask.kv_indices.shape == mask.full_kv_indices.shape == (2, 1, S // 128, S // 128)
    tiles = allowed_pairs(end, window, lookahead).view(2, 1, S // 128, 128, S // 128, 128)
    live, full = tiles.any(-1).any(3), tiles.all(-1).all(3)
    assert torch.equal(listed_tiles(mask.full_kv_num_blocks, mask.full_kv_indices), full)
    assert torch.equal(listed_tiles(mask.kv_num_blocks, mask.kv_indices), live & ~full)


_traced = torch.compile(blocks._flex, backend="eager", dynamic=False, fullgraph=True)


def eager_flex(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, score_mod: blocks.ScoreMod | None = None
) -> tuple[Tensor, Tensor]:
    """Output and LSE on the CPU; visits every tile, so it checks the two mods alone."""
    return _traced(q, k, v, mask, scale, score_mod)


@pytest.mark.parametrize(
    ("S", "G", "power", "lookahead"), [(1, 1, 1.0, None), (40, 2, 0.5, None), (200, 1, 1.0, 30), (300, 3, 2.0, 0)]
)
def test_flex_semantics(S: int, G: int, power: float, lookahead: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(blocks, "run_flex", eager_flex)
    generator = torch.Generator().manual_seed(S)
    q = torch.randn(2, 2 * G, S, 16, generator=generator)
    k = torch.randn(2, 2, S, 16, generator=generator)
    lse = torch.randn(2, 2 * G, S, generator=generator) * 20
    lse[torch.rand(lse.shape, generator=generator) < 0.2] = -torch.inf
    end = random_end(2, S, seed=S)
    actual = flex.log_mass(q, k, lse, end, 0.4, 9, power, lookahead)
    assert actual.dtype == torch.float32
    close(actual, future_log_mass(q, k, lse, end, scale=0.4, window=9, power=power, lookahead=lookahead), 1e-4)


_compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)


def test_compiled_flex_visits_the_listed_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled CPU kernel honours the block lists but has no LSE, so that random values stand in for the zeros: the
    mean it gives them depends on every weight."""
    values: list[Tensor] = []
    means: list[Tensor] = []

    def compiled_flex(
        q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float, score_mod: blocks.ScoreMod | None = None
    ) -> tuple[Tensor, Tensor]:
        values.append(torch.randn(v.shape, generator=torch.Generator().manual_seed(len(values))))
        means.append(_compiled(q, k, values[-1], score_mod=score_mod, block_mask=mask, scale=scale))
        return means[-1], q.new_zeros(q.shape[:3])

    monkeypatch.setattr(blocks, "run_flex", compiled_flex)
    torch._dynamo.reset()
    for seed, (S, window, lookahead) in enumerate([(500, 20, None), (450, 200, 40), (512, 1, 150)]):
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(2, 4, S, 16, generator=generator)
        k = torch.randn(2, 2, S, 16, generator=generator)
        lse = torch.randn(2, 4, S, generator=generator)
        lse[torch.rand(lse.shape, generator=generator) < 0.2] = -torch.inf
        end = random_end(2, S, seed)
        end[0, :400] = 400
        one_graph = torch._dynamo.config.patch(error_on_recompile=seed > 0)  # only the numbers differ
        with one_graph, torch._inductor.config.patch({"cpp.vec_isa_ok": True}):  # compile no probe per instruction set
            flex.log_mass(q, k, lse, end, 0.4, window, 1.0, lookahead)
        score = 0.4 * k.repeat_interleave(2, dim=1) @ q.mT - lse.masked_fill(lse == -torch.inf, torch.inf)[:, :, None]
        score = score.masked_fill(~allowed_pairs(end, window, lookahead)[:, None], -torch.inf)
        expected = score.softmax(-1).nan_to_num(0.0) @ values[-1][:, :, :S]
        close(means[-1][:, :, :S], expected, 1e-5)

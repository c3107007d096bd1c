"""FlexAttention on a GPU, forward and every gradient, against float64.

The tolerance is measured, not chosen: plain bfloat16 PyTorch computes the same thing, and flex may be no further from
float64 than twice that. Every call sees fresh random data, and outputs land in memory filled with NaN.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpop.ops.future_mass import flex as mass_flex
from kvpop.ops.future_mass import future_log_mass
from kvpop.ops.sparse_attention import NEVER, blocks, flex, keep_mask, sparse_attention

# Shapes: B batch, R = H * G query heads, H KV heads, G query heads per KV head, S sequence, D head dim.

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

B, H = 2, 2
SHAPES = [(64, 1, 300), (64, 3, 1000), (64, 4, 512), (128, 1, 1337), (128, 3, 129), (128, 4, 2500)]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def poison() -> None:
    """Fill the caching allocator's free memory with NaN, so that an element nobody writes shows."""
    filled = [torch.full((2**20,), torch.nan, device="cuda") for _ in range(64)]
    filled += [torch.full((2**12,), torch.nan, device="cuda") for _ in range(256)]
    torch.cuda.synchronize()
    del filled


def no_further(actual: Tensor, eager: Tensor, exact: Tensor, name: str, relative: float = 0.0) -> None:
    """Root mean square and largest error of ``actual`` against twice those of ``eager``, the latter and ``relative`` of the
    largest value; infinities must agree."""
    same = exact.isinf()
    assert torch.equal(actual.isneginf(), exact.isneginf()), name
    assert torch.equal(eager.isneginf(), exact.isneginf()), name
    got, allowed = ((x.double() - exact)[~same].abs() for x in (actual, eager))
    if got.numel():
        assert got.square().mean().sqrt() <= 2 * allowed.square().mean().sqrt(), name  # False for NaN
        assert got.max() <= 2 * allowed.max() + relative * exact[~same].abs().max(), name


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Matrix products in the dtype given, softmax in float32: what one writes without a fused kernel.

    ``bias`` [B, H, S, S] is added to the logits of the pairs.
    """
    G = q.shape[1] // k.shape[1]
    k, v, keep = (x.repeat_interleave(G, dim=1) for x in (k, v, keep))
    logits = ((q @ k.mT) * scale).float()
    if bias is not None:
        logits = logits + bias.repeat_interleave(G, dim=1)
    logits = logits.masked_fill(~keep, -torch.inf)
    lse = logits.logsumexp(-1)
    weight = (logits - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
    return weight.to(v.dtype) @ v, lse


def random_expiry(S: int, window: int) -> Tensor:
    """Two packed documents; a window, then random survival; a few tokens stay for ever and a few are never read."""
    birth = torch.arange(S, device="cuda")
    chance = torch.rand(3, B, H, S, device="cuda")
    expiry = birth + window - (chance[0].log() * S / 4).long()
    expiry[chance[1] < 0.1] = NEVER
    expiry[..., : S // 2] = expiry[..., : S // 2].clamp(max=S // 2)
    expiry = torch.where(chance[2] < 0.05, birth, expiry)
    expiry[0, 0, : S // 5] = 0  # queries without a single key
    return expiry


def random_end(S: int) -> Tensor:
    """One past the end of each token's document: two documents, the second batch row with padding behind them."""
    end = torch.full((B, S), S, device="cuda")
    end[:, : S // 3] = S // 3
    end[1, S // 3 :] = S - S // 8
    end[1, S - S // 8 :] = 0
    return end


@pytest.mark.parametrize(("D", "G", "S"), SHAPES)
def test_attention_and_its_gradients(D: int, G: int, S: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(D + G + S)
    position, scale = torch.arange(S, device="cuda"), D**-0.5
    for trial, permute in enumerate([None, 256, flex.CHUNK]):
        leaves = [normal(B, H * G, S, D), normal(B, H, S, D), normal(B, H, S, D)]
        expiry = random_expiry(S, window=1 + S // 10)
        keep = keep_mask(expiry, position.expand(B, S), position.expand(B, H, S))
        out_cotangent, lse_cotangent = normal(B, H * G, S, D), normal(B, H * G, S)

        def results(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
            q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in leaves)  # noqa: B023
            if how == "flex":
                # Plain and permuted order, and fresh masks, are one graph.
                with torch._dynamo.config.patch(error_on_recompile=trial > 0):  # noqa: B023
                    out, lse = flex.attend_sequence(q, k, v, expiry, scale, permute=permute)  # noqa: B023
            elif how == "eager":
                out, lse = eager_attention(q, k, v, keep, scale)  # noqa: B023
            else:
                out, lse = sparse_attention(q, k, v, expiry, scale=scale)  # noqa: B023
            seen = lse.masked_fill(lse.isneginf(), 0.0)
            loss = (out * out_cotangent.to(dtype)).sum() + (seen * lse_cotangent.to(lse.dtype)).sum()  # noqa: B023
            grads = torch.autograd.grad(loss, (q, k, v))
            return dict(out=out.detach(), lse=lse.detach(), dq=grads[0], dk=grads[1], dv=grads[2])

        exact, eager = results("reference", torch.float64), results("eager", torch.bfloat16)
        poison()
        actual = results("flex", torch.bfloat16)
        assert actual["lse"].dtype == torch.float32
        assert actual["lse"].isneginf().any()
        assert (actual["out"][actual["lse"].isneginf()] == 0).all()
        for name, expected in exact.items():
            no_further(actual[name], eager[name], expected, f"{name}, permute={permute}")


@pytest.mark.parametrize(("D", "G", "S"), SHAPES)
def test_bias_and_all_gradients(D: int, G: int, S: int) -> None:
    """A bias with a gradient on keys at a distance: what relaxed gates train through."""
    torch._dynamo.reset()
    torch.manual_seed(D + G + S)
    position, scale = torch.arange(S, device="cuda"), D**-0.5
    for permute, first in [(None, 20), (256, 1 + S // 10), (flex.CHUNK, 0)]:
        leaves = [normal(B, H * G, S, D), normal(B, H, S, D), normal(B, H, S, D)]
        bias_leaf = -torch.rand(B, H, S, device="cuda").mul(8).exp().sub(1)  # from 0 to as good as closed
        expiry = random_expiry(S, window=1 + S // 10)
        keep = keep_mask(expiry, position.expand(B, S), position.expand(B, H, S))
        far = position[:, None] - position >= first
        out_cotangent, lse_cotangent = normal(B, H * G, S, D), normal(B, H * G, S)

        def results(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
            q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in leaves)  # noqa: B023
            bias = bias_leaf.to(torch.promote_types(dtype, torch.float32), copy=True).requires_grad_()  # noqa: B023
            if how == "flex":
                out, lse = flex.attend_sequence(q, k, v, expiry, scale, bias, first, permute=permute)  # noqa: B023
            elif how == "eager":
                pairs = bias[:, :, None].where(far, 0.0)  # noqa: B023
                out, lse = eager_attention(q, k, v, keep, scale, pairs)  # noqa: B023
            else:
                out, lse = sparse_attention(q, k, v, expiry, scale=scale, bias_BHT=bias, bias_from=first)  # noqa: B023
            seen = lse.masked_fill(lse.isneginf(), 0.0)
            loss = (out * out_cotangent.to(dtype)).sum() + (seen * lse_cotangent.to(lse.dtype)).sum()  # noqa: B023
            grads = torch.autograd.grad(loss, (q, k, v, bias))
            return dict(out=out.detach(), lse=lse.detach(), dq=grads[0], dk=grads[1], dv=grads[2], dbias=grads[3])

        exact, eager = results("reference", torch.float64), results("eager", torch.bfloat16)
        poison()
        actual = results("flex", torch.bfloat16)
        assert actual["dbias"].dtype == torch.float32
        assert (exact["dbias"] != 0).any()
        for name, expected in exact.items():
            no_further(actual[name], eager[name], expected, f"{name}, permute={permute}, first={first}")


@pytest.mark.parametrize(("D", "G", "S"), SHAPES)
def test_mass(D: int, G: int, S: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(D + G + S)
    d, t, scale, end = torch.arange(S, device="cuda"), torch.arange(S, device="cuda")[:, None], D**-0.5, random_end(S)
    for window, power, lookahead in [(1, 1.0, None), (S // 10, 0.5, None), (40, 2.0, S // 3), (130, 1.0, 200)]:
        q, k = normal(B, H * G, S, D), normal(B, H, S, D)
        _, lse = sparse_attention(q, k, k, random_expiry(S, window), scale=scale)
        exact = future_log_mass(
            q.double(), k.double(), lse.double(), end, scale=scale, window=window, power=power, lookahead=lookahead
        )
        allowed = (d >= t + window) & (d < end[..., None])
        if lookahead is not None:
            allowed &= d <= t + window + lookahead
        logits = ((k.repeat_interleave(G, dim=1) @ q.mT) * scale).float()
        share = power * (logits - lse.masked_fill(lse.isneginf(), torch.inf)[:, :, None])
        eager = share.masked_fill(~allowed[:, None], -torch.inf).logsumexp(-1)
        poison()
        actual = mass_flex.log_mass(q.requires_grad_(), k, lse, end, scale, window, power, lookahead)
        assert actual.dtype == torch.float32
        assert not actual.requires_grad
        no_further(actual, eager, exact, f"window={window}, power={power}, lookahead={lookahead}")


def test_a_graph_past_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(blocks, "GRAPHS", 1)
    for S in (128, 256):
        x, expiry = normal(1, 1, S, 64), torch.full((1, 1, S), NEVER, device="cuda")
        if S == 128:
            flex.attend_sequence(x, x, x, expiry, 0.1)
        else:
            with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
                flex.attend_sequence(x, x, x, expiry, 0.1)
    torch._dynamo.reset()

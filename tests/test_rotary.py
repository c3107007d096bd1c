"""Heads of one product against float64 and against the layers whose work it does."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from kvpop.ops.rotary import split_heads
from tests.test_cache_step import DEVICE, GPU, HALF, needs_triton

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def made(B: int, L: int, R: int, H: int, D: int, dtype=torch.float32, rows: int = 1) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(B * L + D)
    x = torch.randn(B, L, (R + 2 * H) * D, generator=g)
    angle = torch.randn(rows, L, D // 2, generator=g).repeat(1, 1, 2)
    norms = 1 + 0.2 * torch.randn(2, D, generator=g)
    return tuple(y.to(DEVICE, dtype) for y in (x, angle.cos(), angle.sin(), *norms))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, HALF][: 3 if GPU else 2])
@pytest.mark.parametrize("norms", [(True, True), (False, False), (True, False), (False, True)])
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize(("B", "L", "R", "H", "D"), [(1, 1, 4, 1, 64), (3, 1, 6, 2, 80), (2, 3, 3, 3, 16)])
def test_the_kernel_is_the_reference(B: int, L: int, R: int, H: int, D: int, rotary: bool, norms, dtype) -> None:
    x, cos, sin, g, h = made(B, L, R, H, D, dtype, rows=B)
    found = []
    for d, impl in ((torch.float64, "reference"), (dtype, "triton")):
        x_, cos_, sin_, g_, h_ = (y.to(d) for y in (x, cos, sin, g, h))
        both = dict(q_norm=(g_, 1e-6) if norms[0] else None, k_norm=(h_, 1e-3) if norms[1] else None)
        found.append(split_heads(x_, R, H, rotary=(cos_, sin_) if rotary else None, **both, impl=impl))
    for expected, y in zip(*found, strict=True):
        assert y.dtype == dtype
        assert y.is_contiguous()
        torch.testing.assert_close(y.double(), expected, rtol=TOLERANCE[dtype], atol=4 * TOLERANCE[dtype])


@needs_triton
def test_one_rotation_serves_all_rows() -> None:
    x, cos, sin, *_ = made(3, 2, 2, 1, 8)
    one = split_heads(x, 2, 1, rotary=(cos, sin), impl="triton")
    each = split_heads(x, 2, 1, rotary=(cos.expand(3, -1, -1), sin.expand(3, -1, -1)), impl="triton")
    for a, b in zip(one, each, strict=True):
        assert torch.equal(a, b)


def test_the_reference_is_what_a_layer_does() -> None:
    R, H, D = 4, 2, 16
    x, cos, sin, g, h = (y.cpu() for y in made(2, 5, R, H, D, rows=2))
    norms = [Qwen3RMSNorm(D, eps=1e-6) for _ in range(2)]
    for norm, scale in zip(norms, (g, h), strict=True):
        norm.weight.data = scale
    q, k, v = x.split([R * D, H * D, H * D], -1)
    q, k = (norm(y.view(2, 5, -1, D)).transpose(1, 2) for norm, y in zip(norms, (q, k), strict=True))
    expected = (*apply_rotary_pos_emb(q, k, cos, sin), v.view(2, 5, H, D).transpose(1, 2))
    found = split_heads(x, R, H, rotary=(cos, sin), q_norm=(g, 1e-6), k_norm=(h, 1e-6))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@needs_triton
def test_nothing_to_split() -> None:
    for B, L in ((0, 3), (2, 0)):
        x = torch.zeros(B, L, 32, device=DEVICE)
        assert [y.shape for y in split_heads(x, 2, 1, impl="triton")] == [(B, 2, L, 8), (B, 1, L, 8), (B, 1, L, 8)]


def test_what_it_refuses() -> None:
    x, cos, sin, g, _ = made(2, 3, 2, 1, 8)
    for error, arguments, options in (
        ("has no 5 heads of equal size", (x, 3, 1), {}),
        ("q_norm \\(4,\\) for heads of 8 channels", (x, 2, 1), dict(q_norm=(g[:4], 1e-6))),
        ("cos and sin \\(1, 2, 8\\)", (x, 2, 1), dict(rotary=(cos[:, :2], sin))),
        ("unknown impl 'cuda'", (x, 2, 1), dict(impl="cuda")),
    ):
        with pytest.raises(ValueError, match=error):
            split_heads(*arguments, **options)


@needs_triton
def test_what_the_kernel_refuses() -> None:
    x, *_, g, _ = made(1, 1, 2, 1, 8)
    for x_, norm in ((x.double(), None), (x, (g.half(), 1e-6))):
        with pytest.raises(ValueError, match="takes one dtype of float32, float16 and bfloat16"):
            split_heads(x_, 2, 1, q_norm=norm, impl="triton")

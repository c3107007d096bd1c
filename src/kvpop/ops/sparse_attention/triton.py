"""Sparse attention whose work follows the live (query, key) pairs: each block of queries reads a list of its keys.

Forward pass and dq go over blocks of queries. The keys that are live for at least one query of a block are scattered, so
they are listed once a call and gathered row by row; the keys that every query of the block sees come first in the list and
need no mask. dk and dv go over tiles of keys: a key is read by consecutive queries, and keys that expire at about the same
time share a tile. Query heads of one KV head can share the rows of a program, and dk and dv are summed over them in it.

A list has room for a fixed number of keys, which the host knows without asking the device. A block with more keys than that
leaves its list and reads every key up to its end under the mask: slower, never wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from kvpop.ops.sparse_attention import triton_kernels as kernels
from kvpop.ops.sparse_attention.api import NEVER
from kvpop.ops.sparse_attention.blocks import lifetimes

# Shapes: B batch, R = H * G query heads, H KV heads, G query heads per KV head, S sequence, D key dim, V value dim,
# N query blocks, C capacity of a list, T key tiles, K keys of a tile.

LIVE = 8192
"""The keys a query is taken to see where the caller gives no bound: it limits the memory of the lists, not the result."""

SCAN = 1024
"""Positions that a program looks at together when it builds a list."""

DELTA_ROWS = 64
"""Rows of queries whose gradient offsets a program computes."""


@dataclass(frozen=True)
class Tile:
    """What one program of a pass works on: rows (query heads x positions) by keys."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of the three passes. Forward pass and dq share their lists, hence their rows.

    ``heads``: at most how many query heads of a KV head share the rows of a program. More of them mean fewer positions a
    block, so fewer keys under a mask but more lists.
    """

    forward: Tile
    queries: Tile
    keys: Tile
    heads: int = 2

    def __post_init__(self) -> None:
        if self.forward.rows != self.queries.rows:
            raise ValueError("forward pass and dq share their lists: give both the same number of rows")


TILES = {
    64: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
}
"""By the wider of key and value dim, for 16-bit inputs."""

WIDE_TILES = Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1), heads=1)
"""For float32, which is multiplied exactly and so without tensor cores."""


def attend_sequence(
    q_BRSD: Tensor, k_BHSD: Tensor, v_BHSV: Tensor, expiry_BHS: Tensor, scale: float, live: int | None = None
) -> tuple[Tensor, Tensor]:
    """See ``api.sparse_attention``; query i and key i stand at position i.

    ``live``: about how many keys a query sees at most, such as the slots of a budget (``LIVE`` without it). The lists take
    B x H x N x (live + S / N) x 4 bytes. Raises ValueError for dtypes that differ or are not float32, float16 or bfloat16,
    head dims above 128, ``scale`` <= 0 and ``live`` < 1.
    """
    dtype, dims = q_BRSD.dtype, (q_BRSD.shape[-1], v_BHSV.shape[-1])
    if dtype not in (torch.float32, torch.float16, torch.bfloat16) or {k_BHSD.dtype, v_BHSV.dtype} != {dtype}:
        raise ValueError(
            f"impl='triton' takes q, k and v in one of float32, float16 and bfloat16, got {dtype}, {k_BHSD.dtype} and "
            f"{v_BHSV.dtype}"
        )
    if max(dims) > max(TILES):
        raise ValueError(f"impl='triton' takes head dims up to {max(TILES)}, got {max(dims)}")
    if scale <= 0:
        raise ValueError(f"impl='triton' needs a positive scale, got {scale}")
    if live is not None and live < 1:
        raise ValueError(f"live must be at least 1 key, got {live}")
    return _Attention.apply(q_BRSD, k_BHSD, v_BHSV, expiry_BHS, scale, live)


def key_lists(expiry_BHS: Tensor, block: int, live: int | None) -> tuple[Tensor, Tensor]:
    """The keys that the queries of each block of ``block`` positions see, and how many they are; int32.

    Row [b, h, n] of the first result [B, H, N, C] starts with the keys that every query of block n sees, in order; those
    that only some of them see follow, in order. The second [B, H, N, 2] holds the number of the former and of both. A list
    of more than C keys is cut off and must not be used; with no more than ``live`` keys a query it never is: what a block's
    first query sees and what is born behind it is all there is. Dead keys must have expiry 0.
    """
    B, H, S = expiry_BHS.shape
    N = triton.cdiv(S, block)
    C = min(S, (LIVE if live is None else live) + block - 1)
    keys_BHNC = torch.empty(B, H, N, C, dtype=torch.int32, device=expiry_BHS.device)
    counts_BHN2 = torch.empty(B, H, N, 2, dtype=torch.int32, device=expiry_BHS.device)
    kernels.list_keys[(N, B * H)](expiry_BHS, keys_BHNC, counts_BHN2, S, C, BLOCK_Q=block, BLOCK_S=SCAN, num_warps=4)
    return keys_BHNC, counts_BHN2


def expiry_order(expiry_BHS: Tensor, chunk: int) -> Tensor:
    """``flex.expiry_order`` as int32, sorted chunk by chunk: one launch for all of them if a chunk is short."""
    S = expiry_BHS.shape[-1]
    padded = pad(expiry_BHS, (0, -S % chunk), value=NEVER)  # behind every token of the last chunk
    order_BHXC = padded.unflatten(-1, (-1, chunk)).argsort(dim=-1, stable=True)
    start_X1 = torch.arange(0, padded.shape[-1], chunk, device=expiry_BHS.device)[:, None]
    return (order_BHXC + start_X1).flatten(-2)[..., :S].int().contiguous()


def chunk_of(S: int) -> int:
    """Within how many tokens keys are sorted by expiry: wider and a tile's births differ more, narrower and its expiries do.

    With the expiries of a running top-k of 4096 the tiles of 128 keys hold 1.26 times the live pairs at 16k, 1.43 times at 64k.
    """
    return 1024 if S <= 32768 else 2048


def schedule(order_BHS: Tensor, expiry_BHS: Tensor, size: int) -> Tensor:
    """The key tiles of all heads [B * H * T], those that most queries read first, so that no long one starts last."""
    S = order_BHS.shape[-1]
    stop_BHS = expiry_BHS.gather(-1, order_BHS.long()).clamp(max=S)
    birth_BHS = order_BHS.masked_fill(stop_BHS == 0, S)
    stop_BHTK = pad(stop_BHS, (0, -S % size)).unflatten(-1, (-1, size))
    birth_BHTK = pad(birth_BHS, (0, -S % size), value=S).unflatten(-1, (-1, size))
    span_BHT = stop_BHTK.amax(-1) - birth_BHTK.amin(-1)
    return span_BHT.flatten().argsort(descending=True, stable=True).int()


class _Attention(torch.autograd.Function):
    """Output and LSE with gradients for q, k and v through both."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BRSD: Tensor,
        k_BHSD: Tensor,
        v_BHSV: Tensor,
        expiry_BHS: Tensor,
        scale: float,
        live: int | None,
    ) -> tuple[Tensor, Tensor]:
        q_BRSD, k_BHSD, v_BHSV = q_BRSD.contiguous(), k_BHSD.contiguous(), v_BHSV.contiguous()
        _, expiry_BHS = lifetimes(expiry_BHS)
        expiry_BHS = expiry_BHS.contiguous()
        (B, R, S, _), V = q_BRSD.shape, v_BHSV.shape[-1]
        common, tiles, heads = _settings(q_BRSD, k_BHSD, v_BHSV)
        block = tiles.forward.rows // heads
        keys_BHNC, counts_BHN2 = key_lists(expiry_BHS, block, live)
        N, C = keys_BHNC.shape[2:]
        out_BRSV = torch.empty(B, R, S, V, dtype=v_BHSV.dtype, device=q_BRSD.device)
        lse_BRS = torch.empty(B, R, S, dtype=torch.float32, device=q_BRSD.device)
        kernels.forward[(N, B * R // heads)](
            q_BRSD, k_BHSD, v_BHSV, expiry_BHS, keys_BHNC, counts_BHN2, out_BRSV, lse_BRS,
            S, C, scale * math.log2(math.e),
            HEADS=heads, BLOCK_Q=block, **common, **_launch(tiles.forward),
        )  # fmt: skip
        ctx.save_for_backward(q_BRSD, k_BHSD, v_BHSV, expiry_BHS, keys_BHNC, counts_BHN2, out_BRSV, lse_BRS)
        ctx.scale = scale
        ctx.set_materialize_grads(False)
        return out_BRSV, lse_BRS

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BRSV: Tensor | None, dlse_BRS: Tensor | None) -> tuple[Tensor | None, ...]:
        q_BRSD, k_BHSD, v_BHSV, expiry_BHS, keys_BHNC, counts_BHN2, out_BRSV, lse_BRS = ctx.saved_tensors
        dout_BRSV = torch.zeros_like(out_BRSV) if dout_BRSV is None else dout_BRSV.contiguous()
        delta_BRS = _delta(out_BRSV, dout_BRSV, lse_BRS, dlse_BRS)
        common, tiles, heads = _settings(q_BRSD, k_BHSD, v_BHSV)
        (B, H, N, C), R, S = keys_BHNC.shape, q_BRSD.shape[1], q_BRSD.shape[2]
        scales = (ctx.scale, ctx.scale * math.log2(math.e))
        grads = (dout_BRSV, lse_BRS, delta_BRS)
        dq_BRSD = dk_BHSD = dv_BHSV = None
        if ctx.needs_input_grad[0]:
            dq_BRSD = torch.empty_like(q_BRSD)
            kernels.backward_queries[(N, B * R // heads)](
                q_BRSD, k_BHSD, v_BHSV, expiry_BHS, keys_BHNC, counts_BHN2, *grads, dq_BRSD,
                S, C, *scales,
                HEADS=heads, BLOCK_Q=tiles.queries.rows // heads, **common, **_launch(tiles.queries),
            )  # fmt: skip
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            dk_BHSD, dv_BHSV = torch.empty_like(k_BHSD), torch.empty_like(v_BHSV)
            order_BHS = expiry_order(expiry_BHS, chunk_of(S))
            T = triton.cdiv(S, tiles.keys.keys)
            kernels.backward_keys[(B * H * T,)](
                q_BRSD, k_BHSD, v_BHSV, expiry_BHS, order_BHS, schedule(order_BHS, expiry_BHS, tiles.keys.keys), *grads,
                dk_BHSD, dv_BHSV,
                S, T, *scales,
                HEADS=heads, BLOCK_Q=tiles.keys.rows // heads, **common, **_launch(tiles.keys),
            )  # fmt: skip
        return dq_BRSD, dk_BHSD, dv_BHSV, None, None, None


def _delta(out_BRSV: Tensor, dout_BRSV: Tensor, lse_BRS: Tensor, dlse_BRS: Tensor | None) -> Tensor:
    """rowsum(out * dout) - dlse [B, R, S] in float32: see ``kernels.gradient_offsets``."""
    delta_BRS, V = torch.empty_like(lse_BRS), out_BRSV.shape[-1]
    rows = delta_BRS.numel()
    kernels.gradient_offsets[(triton.cdiv(rows, DELTA_ROWS),)](
        out_BRSV, dout_BRSV, lse_BRS, lse_BRS if dlse_BRS is None else dlse_BRS.contiguous(), delta_BRS, rows,
        LSE=dlse_BRS is not None, V=V, BLOCK_V=triton.next_power_of_2(V), BLOCK=DELTA_ROWS, num_warps=4,
    )  # fmt: skip
    return delta_BRS


def _settings(q_BRSD: Tensor, k_BHSD: Tensor, v_BHSV: Tensor) -> tuple[dict[str, Any], Tiles, int]:
    """What all kernels are told, the tiles, and how many query heads share the rows of a program: a power of two."""
    D, V, G = q_BRSD.shape[-1], v_BHSV.shape[-1], q_BRSD.shape[1] // k_BHSD.shape[1]
    wide = q_BRSD.dtype == torch.float32
    width = next(width for width in sorted(TILES) if width >= max(D, V))
    tiles = WIDE_TILES if wide else TILES[width]
    block_D, block_V = (max(16, triton.next_power_of_2(x)) for x in (D, V))
    common = dict(G=G, D=D, V=V, BLOCK_D=block_D, BLOCK_V=block_V, PRECISION="ieee" if wide else "tf32")
    return common, tiles, min(tiles.heads, G & -G)


def _launch(tile: Tile) -> dict[str, int]:
    return dict(BLOCK_K=tile.keys, num_warps=tile.warps, num_stages=tile.stages)

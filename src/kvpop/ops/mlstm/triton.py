"""The gated linear memory in chunks, by three kernels: what each chunk adds, what there is before it, what its tokens read.

Values only, for passes without a gradient. Products are in float32 on tensor cores (three products of tf32 parts: about the
rounding of float32), gate logarithms are summed in float64 within chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpop.ops import device_of

# Shapes: N rows, H KV heads, L tokens, K chunks of P positions, T their K + 1 borders, D features, A value dim, V = A + 1,
# W = D * V: a state lies as D * A entries of C and D of z behind them.

CHUNK, FEATURES, WARPS = 64, 32, 4
"""Tokens of a chunk, features at a time (with 64 of them registers do not suffice), and warps."""
MOST = 256
"""Value channels at most: a program holds all of them."""
ENTRIES, STEPS = 128, 16
"""Of states: entries that one program carries along, and chunks that it takes in at a time."""

PRECISION = tl.constexpr("tf32x3")
NOTHING = tl.constexpr(-1e30)


@triton.jit
def _rows(x, first, L, t, c, WIDTH: tl.constexpr):
    """Rows t and columns c of a [L, WIDTH] matrix that begins at row ``first``, 0 where there are none."""
    return tl.load(x + (first + t)[:, None] * WIDTH + c, mask=(t < L)[:, None] & (c < WIDTH), other=0.0)


@triton.jit
def _gates(log_i, log_f, first, L, t):
    """(log_i, the sum of log_f up to each token) of a chunk in float64; nothing enters behind the end."""
    enters = tl.load(log_i + first + t, mask=t < L, other=NOTHING).to(tl.float64)
    return enters, tl.cumsum(tl.load(log_f + first + t, mask=t < L, other=0.0).to(tl.float64), 0)


@triton.jit
def add_up(
    k, v, log_i, log_f, added, forgotten, best, L, K,
    D: tl.constexpr, A: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_A: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The state of each chunk by itself, relative to exp(``best``), the largest weight of any of its tokens at its end; and
    ``forgotten``, its sum of log_f."""
    program = tl.program_id(0).to(tl.int64)
    row, j, a = program // K, tl.arange(0, P), tl.arange(0, BLOCK_A)
    first, t = row * L, (program % K) * P + j
    enters, sums = _gates(log_i, log_f, first, L, t)
    end = tl.sum(tl.where(j == P - 1, sums, 0.0), 0)
    weight = end - sums + enters
    high = tl.max(weight, 0)
    weight = tl.exp((weight - high).to(tl.float32))
    value = _rows(v, first, L, t, a, A)
    to = added + program * (D * (A + 1))
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        key = _rows(k, first, L, t, d, D) * weight[:, None]
        entries = tl.dot(tl.trans(key), value, input_precision=PRECISION)
        tl.store(to + d[:, None] * A + a, entries, mask=(d < D)[:, None] & (a < A))
        tl.store(to + D * A + d, tl.sum(key, 0), mask=d < D)
    tl.store(forgotten + program, end)
    tl.store(best + program, high)


@triton.jit
def _then(kept, x, kept_later, x_later):
    return kept * kept_later, x * kept_later + x_later


@triton.jit
def carry(added, kept, gain, states, K, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, STEPS: tl.constexpr):
    """states[T + 1] = kept[T] * states[T] + gain[T] * added[T], entries of a row of states a program; states[0] is there."""
    tiles = (WIDTH + ENTRIES - 1) // ENTRIES
    program = tl.program_id(0).to(tl.int64)
    row, e = program // tiles, program % tiles * ENTRIES + tl.arange(0, ENTRIES)
    inside, step = e < WIDTH, tl.arange(0, STEPS).to(tl.int64)
    at = states + row * (K + 1) * WIDTH + e
    state = tl.load(at, mask=inside, other=0.0)
    for start in range(0, K, STEPS):
        t = start + step
        live = t < K
        keep = tl.load(kept + row * K + t, mask=live, other=1.0)
        more = tl.load(gain + row * K + t, mask=live, other=0.0)
        there = live[:, None] & inside[None, :]
        x = tl.load(added + (row * K + t)[:, None] * WIDTH + e, mask=there, other=0.0) * more[:, None]
        keep, x = tl.associative_scan((tl.broadcast_to(keep[:, None], x.shape), x), 0, _then)
        x += keep * state[None, :]
        tl.store(at + (t + 1)[:, None] * WIDTH, x, mask=there)
        state = tl.sum(tl.where((step == STEPS - 1)[:, None], x, 0.0), 0)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def read(
    q, k, v, log_i, log_f, states, m, out, norm, L, K,
    D: tl.constexpr, A: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_A: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """What the queries of a chunk read: of its own tokens through the matrix of weights, of all before it through the state."""
    program = tl.program_id(0).to(tl.int64)
    row, j = program // K, tl.arange(0, P)
    first, t = row * L, (program % K) * P + j
    enters, sums = _gates(log_i, log_f, first, L, t)
    border = row * (K + 1) + program % K
    m_start = tl.load(m + border).to(tl.float64)
    # m_j = max(log f_j + m_{j-1}, log i_j) in closed form, rounded before use.
    since = enters - sums
    high = (sums + tl.maximum(tl.associative_scan(since, 0, _larger), m_start)).to(tl.float32).to(tl.float64)
    from_start = tl.exp((sums - high + m_start).to(tl.float32))

    a, at = tl.arange(0, BLOCK_A), states + border * (D * (A + 1))
    similar, answer = tl.zeros([P, P], tl.float32), tl.zeros([P, BLOCK_A], tl.float32)
    mass = tl.zeros([P], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        query = _rows(q, first, L, t, d, D)
        similar = tl.dot(query, tl.trans(_rows(k, first, L, t, d, D)), acc=similar, input_precision=PRECISION)
        query *= from_start[:, None]
        state = tl.load(at + d[:, None] * A + a, mask=(d < D)[:, None] & (a < A), other=0.0)
        answer = tl.dot(query, state, acc=answer, input_precision=PRECISION)
        mass += tl.sum(query * tl.load(at + D * A + d, mask=d < D, other=0.0)[None, :], 1)
    log_weight = ((sums - high)[:, None] + since[None, :]).to(tl.float32)
    similar *= tl.exp(tl.where(j[:, None] >= j[None, :], log_weight, NOTHING))
    answer = tl.dot(similar, _rows(v, first, L, t, a, A), acc=answer, input_precision=PRECISION)
    tl.store(out + (first + t)[:, None] * A + a, answer, mask=(t < L)[:, None] & (a < A))
    tl.store(norm + first + t, mass + tl.sum(similar, 1), mask=t < L)


def chunks(
    q_NHLD: Tensor, k_NHLD: Tensor, v_NHLA: Tensor, log_i_NHL: Tensor, log_f_NHL: Tensor, C_NHDV: Tensor, m_NH: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(r_NHLA, n_NHL1, C_NHDV, m_NH) as ``chunkwise.chunkwise``, without a gradient.

    Raises ValueError for inputs that are not float32, more than ``MOST`` value channels, and if a gradient is asked
    for.
    """
    tensors = (q_NHLD, k_NHLD, v_NHLA, log_i_NHL, log_f_NHL, C_NHDV)
    N, H, L, D = q_NHLD.shape
    A = v_NHLA.shape[-1]
    if q_NHLD.dtype != torch.float32:
        raise ValueError(f"impl='triton' computes in float32, got {q_NHLD.dtype}")
    if A > MOST:
        raise ValueError(f"impl='triton' takes up to {MOST} value channels, got {A}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError("impl='triton' has no backward pass: use chunkwise where a gradient is needed")
    if not N * H:
        return v_NHLA, v_NHLA.new_empty(N, H, L, 1), C_NHDV, m_NH
    q, k, v, log_i, log_f = (x.contiguous() for x in tensors[:5])
    K = triton.cdiv(L, CHUNK)
    new = q.new_empty
    added, states = new(N * H, K, D * (A + 1)), new(N * H, K + 1, D * (A + 1))
    forgotten, best = (new(N * H, K, dtype=torch.float64) for _ in range(2))
    out, norm = new(N, H, L, A), new(N, H, L, 1)
    block_D, block_A = (max(16, triton.next_power_of_2(x)) for x in (min(D, FEATURES), A))
    shape = dict(D=D, A=A, BLOCK_D=block_D, BLOCK_A=block_A, P=CHUNK, num_warps=WARPS)
    with device_of(q):
        add_up[(N * H * K,)](k, v, log_i, log_f, added, forgotten, best, L, K, **shape)
        sums, first = forgotten.cumsum(-1), m_NH.reshape(-1, 1).double()
        m_end = sums + torch.maximum((best - sums).cummax(-1).values, first)
        m = torch.cat([first, m_end], -1).float()  # rounded before use
        before, after = m[:, :-1].double(), m[:, 1:].double()
        kept, gain = (forgotten + (before - after)).float().exp(), (best - after).float().exp()
        states[:, 0, : D * A] = C_NHDV[..., :-1].reshape(N * H, -1)
        states[:, 0, D * A :] = C_NHDV[..., -1].reshape(N * H, -1)
        carry[(N * H * triton.cdiv(D * (A + 1), ENTRIES),)](
            added, kept, gain, states, K, D * (A + 1), ENTRIES, STEPS, num_warps=4
        )
        read[(N * H * K,)](q, k, v, log_i, log_f, states, m, out, norm, L, K, **shape)
    last = states[:, -1]
    C = torch.cat([last[:, : D * A].view(N, H, D, A), last[:, D * A :].view(N, H, D, 1)], -1)
    return out, norm, C, m[:, -1].view(N, H)

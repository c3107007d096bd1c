"""The kernels of ``triton.py``. A program never adds to what another one writes: results are bit for bit repeatable.

Rows of queries are pairs of a query head and a position: HEADS query heads of one KV head times BLOCK_Q positions, head by
head. Softmax is in base 2 and float32; matrix products take the dtype of their inputs and sum in float32.

Loops over a list load the indices of the next round one round ahead: loads whose addresses are known when a round starts are
what Triton's pipeliner keeps in flight for num_stages - 1 rounds; behind an index loaded in the same round it waits for both.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Shapes: B batch, H KV heads, G query heads per KV head, S sequence, N query blocks, C capacity of a list, D key dim,
# V value dim, T key tiles. q [B, H * G, S, D], k [B, H, S, D], v [B, H, S, V], expiry [B, H, S] (0: never read),
# keys [B, H, N, C], counts [B, H, N, 2], order [B, H, S], schedule [B * H * T]; all contiguous.


@triton.jit
def list_keys(expiry, keys, counts, S, capacity, BLOCK_Q: tl.constexpr, BLOCK_S: tl.constexpr):
    """One row: the keys that every query of a block sees, then those that some of its queries see, each in order.

    The counts are true even where the row is too short to hold the keys.
    """
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = head * tl.num_programs(0) + block
    first = block * BLOCK_Q
    last = tl.minimum(first + BLOCK_Q, S) - 1
    written = 0
    for part in tl.static_range(2):
        for start in range(0, last + 1, BLOCK_S):
            t = start + tl.arange(0, BLOCK_S)
            stop = tl.load(expiry + head * S + t, mask=t <= last, other=0)
            chosen = (t <= first) & (stop > last)
            if part == 1:
                chosen = (stop > first) & (chosen == 0)
            place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
            tl.store(keys + row * capacity + place, t, mask=chosen & (place < capacity))
            written += tl.sum(chosen.to(tl.int32), 0)
        tl.store(counts + row * 2 + part, written)


@triton.jit
def _query_rows(heads, block, S, HEADS: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Where the rows of a block lie among all (query head, position) pairs, and their positions."""
    i = tl.arange(0, HEADS * BLOCK_Q)
    position = block * BLOCK_Q + i % BLOCK_Q
    return (heads * HEADS + i // BLOCK_Q) * S + position, position


@triton.jit
def _load_rows(base, row, inside, X: tl.constexpr, BLOCK_X: tl.constexpr, MASKED: tl.constexpr):
    """Whole rows of X numbers as a tile, zeros behind them and, if MASKED, in rows that are not inside."""
    x = tl.arange(0, BLOCK_X)
    at = base + row.to(tl.int64)[:, None] * X + x[None, :]
    if MASKED:
        tile = tl.load(at, mask=inside[:, None] & (x < X)[None, :], other=0.0)
    elif X == BLOCK_X:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(x < X)[None, :], other=0.0)
    return tile


@triton.jit
def _store_rows(base, row, tile, inside, X: tl.constexpr, BLOCK_X: tl.constexpr):
    x = tl.arange(0, BLOCK_X)
    at = base + row.to(tl.int64)[:, None] * X + x[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=inside[:, None] & (x < X)[None, :])


@triton.jit
def _listed(counts, listing, block, S, capacity, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """(keys to read without a mask, keys to read in all, whether they are listed): a list that did not fit is not used."""
    always = tl.load(counts + listing * 2)
    total = tl.load(counts + listing * 2 + 1)
    fits = total <= capacity
    whole = tl.where(fits, always // BLOCK_K * BLOCK_K, 0)
    return whole, tl.where(fits, total, tl.minimum((block + 1) * BLOCK_Q, S)), fits


@triton.jit
def _masked_keys(listed, n, total, fits):
    """Keys n of a list, or the keys n themselves."""
    return tl.where(fits, tl.load(listed + n, mask=(n < total) & fits, other=0), n)


@triton.jit
def _absorb(raw, value, high, mass, summed, scale, PRECISION: tl.constexpr, MASKED: tl.constexpr):
    """Online softmax: take a tile of raw logits (-inf where there is no pair) and its values into the running sums."""
    higher = tl.maximum(high, tl.max(raw, 1) * scale)
    if MASKED:
        base = tl.where(higher == float("-inf"), 0.0, higher)
    else:
        base = higher
    weight = tl.exp2(raw * scale - base[:, None])
    shrink = tl.exp2(high - base)
    mass = mass * shrink + tl.sum(weight, 1)
    summed = tl.dot(weight.to(value.dtype), value, acc=summed * shrink[:, None], input_precision=PRECISION)
    return higher, mass, summed


@triton.jit
def _settled(high, mass, summed):
    """Output and LSE (nats) that the running sums came to: 0 and -inf for a query without a key."""
    seen = mass > 0
    mass = tl.where(seen, mass, 1.0)
    result = tl.where(seen[:, None], summed / mass[:, None], 0.0)
    return result, tl.where(seen, (high + tl.log2(mass)) * 0.6931471805599453, float("-inf"))


@triton.jit
def forward(
    q, k, v, expiry, keys, counts, out, lse,
    S, capacity, scale,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and LSE of a block of queries over its list of keys. ``scale`` includes log2(e)."""
    blocks = tl.num_programs(0)
    block = blocks - 1 - tl.program_id(0)  # the longest lists come last: start with them
    heads = tl.program_id(1).to(tl.int64)
    head = heads // (G // HEADS)
    row, position = _query_rows(heads, block, S, HEADS, BLOCK_Q)
    query = _load_rows(q, row, position < S, D, BLOCK_D, True)
    listing = head * blocks + block
    whole, total, fits = _listed(counts, listing, block, S, capacity, BLOCK_Q, BLOCK_K)
    listed = keys + listing * capacity
    n = tl.arange(0, BLOCK_K)
    high = tl.full([HEADS * BLOCK_Q], float("-inf"), tl.float32)
    mass = tl.zeros([HEADS * BLOCK_Q], tl.float32)
    summed = tl.zeros([HEADS * BLOCK_Q, BLOCK_V], tl.float32)
    t = tl.load(listed + n, mask=n < whole, other=0)
    for start in range(0, whole, BLOCK_K):
        key = _load_rows(k + head * S * D, t, n >= 0, D, BLOCK_D, False)
        value = _load_rows(v + head * S * V, t, n >= 0, V, BLOCK_V, False)
        t = tl.load(listed + start + BLOCK_K + n, mask=start + BLOCK_K + n < whole, other=0)
        raw = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        high, mass, summed = _absorb(raw, value, high, mass, summed, scale, PRECISION, False)
    t = _masked_keys(listed, whole + n, total, fits)
    for start in range(whole, total, BLOCK_K):
        inside = start + n < total
        key = _load_rows(k + head * S * D, t, inside, D, BLOCK_D, True)
        value = _load_rows(v + head * S * V, t, inside, V, BLOCK_V, True)
        stop = tl.load(expiry + head * S + t, mask=inside, other=0)
        raw = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        keep = (t[None, :] <= position[:, None]) & (position[:, None] < stop[None, :])
        t = _masked_keys(listed, start + BLOCK_K + n, total, fits)
        raw = tl.where(keep, raw, float("-inf"))
        high, mass, summed = _absorb(raw, value, high, mass, summed, scale, PRECISION, True)
    result, normaliser = _settled(high, mass, summed)
    _store_rows(out, row, result, position < S, V, BLOCK_V)
    tl.store(lse + row, normaliser, mask=position < S)


@triton.jit
def gradient_offsets(
    out, dout, lse, dlse, delta, rows,
    LSE: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(out * dout) - dlse, so that the gradient of a logit is weight * (dout . value - delta).

    0 for a query without a key: its output and LSE are constants.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    product = _load_rows(out, row, inside, V, BLOCK_V, True).to(tl.float32)
    product *= _load_rows(dout, row, inside, V, BLOCK_V, True).to(tl.float32)
    offset = tl.sum(product, 1)
    if LSE:
        offset -= tl.load(dlse + row, mask=inside, other=0.0)
    seen = tl.load(lse + row, mask=inside, other=0.0) > float("-inf")
    tl.store(delta + row, tl.where(seen, offset, 0.0), mask=inside)


@triton.jit
def backward_queries(
    q, k, v, expiry, keys, counts, dout, lse, delta, dq,
    S, capacity, scale, scale_log2,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries, over the same list as its forward pass."""
    blocks = tl.num_programs(0)
    block = blocks - 1 - tl.program_id(0)
    heads = tl.program_id(1).to(tl.int64)
    head = heads // (G // HEADS)
    row, position = _query_rows(heads, block, S, HEADS, BLOCK_Q)
    real = position < S
    query = _load_rows(q, row, real, D, BLOCK_D, True)
    grad = _load_rows(dout, row, real, V, BLOCK_V, True)
    normaliser = tl.load(lse + row, mask=real, other=0.0) * 1.4426950408889634
    offset = tl.load(delta + row, mask=real, other=0.0)
    listing = head * blocks + block
    whole, total, fits = _listed(counts, listing, block, S, capacity, BLOCK_Q, BLOCK_K)
    listed = keys + listing * capacity
    n = tl.arange(0, BLOCK_K)
    summed = tl.zeros([HEADS * BLOCK_Q, BLOCK_D], tl.float32)
    t = tl.load(listed + n, mask=n < whole, other=0)
    for start in range(0, whole, BLOCK_K):
        key = _load_rows(k + head * S * D, t, n >= 0, D, BLOCK_D, False)
        value = _load_rows(v + head * S * V, t, n >= 0, V, BLOCK_V, False)
        t = tl.load(listed + start + BLOCK_K + n, mask=start + BLOCK_K + n < whole, other=0)
        raw = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        weight = tl.exp2(raw * scale_log2 - normaliser[:, None])
        part = weight * (tl.dot(grad, tl.trans(value), input_precision=PRECISION) - offset[:, None])
        summed = tl.dot(part.to(key.dtype), key, acc=summed, input_precision=PRECISION)
    t = _masked_keys(listed, whole + n, total, fits)
    for start in range(whole, total, BLOCK_K):
        inside = start + n < total
        key = _load_rows(k + head * S * D, t, inside, D, BLOCK_D, True)
        value = _load_rows(v + head * S * V, t, inside, V, BLOCK_V, True)
        stop = tl.load(expiry + head * S + t, mask=inside, other=0)
        raw = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        keep = (t[None, :] <= position[:, None]) & (position[:, None] < stop[None, :])
        t = _masked_keys(listed, start + BLOCK_K + n, total, fits)
        weight = tl.where(keep, tl.exp2(raw * scale_log2 - normaliser[:, None]), 0.0)
        part = weight * (tl.dot(grad, tl.trans(value), input_precision=PRECISION) - offset[:, None])
        summed = tl.dot(part.to(key.dtype), key, acc=summed, input_precision=PRECISION)
    _store_rows(dq, row, summed * scale, real, D, BLOCK_D)


@triton.jit
def _key_step(
    key, value, birth, stop, dk, dv, q, dout, lse, delta, heads, block,
    S, scale_log2,
    HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What one block of queries adds to dk (without the scale) and dv of a tile of keys."""
    row, position = _query_rows(heads, block, S, HEADS, BLOCK_Q)
    real = position < S
    query = _load_rows(q, row, real, D, BLOCK_D, MASKED)
    grad = _load_rows(dout, row, real, V, BLOCK_V, MASKED)
    if MASKED:
        normaliser = tl.load(lse + row, mask=real, other=0.0) * 1.4426950408889634
        offset = tl.load(delta + row, mask=real, other=0.0)
    else:
        normaliser = tl.load(lse + row) * 1.4426950408889634
        offset = tl.load(delta + row)
    raw = tl.dot(key, tl.trans(query), input_precision=PRECISION)
    weight = tl.exp2(raw * scale_log2 - normaliser[None, :])
    if MASKED:
        keep = (birth[:, None] <= position[None, :]) & (position[None, :] < stop[:, None])
        weight = tl.where(keep, weight, 0.0)
    dv = tl.dot(weight.to(grad.dtype), grad, acc=dv, input_precision=PRECISION)
    part = weight * (tl.dot(value, tl.trans(grad), input_precision=PRECISION) - offset[None, :])
    dk = tl.dot(part.to(query.dtype), query, acc=dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def backward_keys(
    q, k, v, expiry, order, schedule, dout, lse, delta, dk, dv,
    S, tiles, scale, scale_log2,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of a tile of keys, over all blocks of queries from the first birth to the last expiry among them."""
    job = tl.load(schedule + tl.program_id(0)).to(tl.int64)
    head = job // tiles
    n = (job % tiles) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = n < S
    t = tl.load(order + head * S + n, mask=inside, other=0)
    stop = tl.minimum(tl.load(expiry + head * S + t, mask=inside, other=0), S)
    key = _load_rows(k + head * S * D, t, inside, D, BLOCK_D, True)
    value = _load_rows(v + head * S * V, t, inside, V, BLOCK_V, True)
    # Blocks of queries [begin, end), of which [begin + before, begin + before + full) see every key of the tile.
    begin = tl.min(tl.where(stop > 0, t, S), 0) // BLOCK_Q
    end = (tl.max(stop, 0) + BLOCK_Q - 1) // BLOCK_Q
    before = (tl.max(t, 0) + BLOCK_Q - 1) // BLOCK_Q - begin
    full = tl.maximum(tl.min(tl.where(inside, stop, S), 0) // BLOCK_Q - begin - before, 0)
    summed_k = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    summed_v = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    total_k, total_v = summed_k, summed_v
    for part in range(0, G // HEADS):
        heads = head * (G // HEADS) + part
        for i in range(0, full):
            summed_k, summed_v = _key_step(
                key, value, t, stop, summed_k, summed_v, q, dout, lse, delta, heads, begin + before + i,
                S, scale_log2, HEADS, D, V, BLOCK_D, BLOCK_V, BLOCK_Q, PRECISION, False,
            )  # fmt: skip
        for i in range(0, end - begin - full):
            block = begin + i + tl.where(i >= before, full, 0)
            summed_k, summed_v = _key_step(
                key, value, t, stop, summed_k, summed_v, q, dout, lse, delta, heads, block,
                S, scale_log2, HEADS, D, V, BLOCK_D, BLOCK_V, BLOCK_Q, PRECISION, True,
            )  # fmt: skip
        if PRECISION == "ieee":  # float32: a sum for each head, or rounding grows with the queries of all of them
            total_k += summed_k
            total_v += summed_v
            summed_k = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
            summed_v = tl.zeros([BLOCK_K, BLOCK_V], tl.float32)
    if PRECISION == "ieee":
        summed_k, summed_v = total_k, total_v
    _store_rows(dk, head * S + t, summed_k * scale, inside, D, BLOCK_D)
    _store_rows(dv, head * S + t, summed_v, inside, V, BLOCK_V)

"""The running top-k of many rows in three kernels: sort, build, ask. Nothing is asked of the host.

``_sort`` is a radix sort of a row by one program, two bits at a time. ``_build`` lays a permutation out as a wavelet tree, one
program a row: a bit of every value a level, packed into words with the number of ones before each. ``_ask`` walks down that
tree for every prefix of every row.

Rows are padded to whole blocks by elements that come after all others and are larger: no prefix of the row holds one, and it
stays a permutation. Of a permutation, a node with the values [v, v + 2^(b+1)) lies at [v, v + 2^(b+1)) on its level, has 2^b
zeros before its ones, and v / 2 ones lie before it: that much of the tree need not be counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Shapes: N rows, A arrivals, P padded arrivals, H KV heads, S sequence, G groups of a block, L the 32 elements of a group.


@dataclass(frozen=True)
class Tile:
    """Elements of a row at a time (a power of two from 32 on), and at most so many warps."""

    block: int
    warps: int

    def of(self, A: int) -> Tile:
        block = min(self.block, max(32, triton.next_power_of_2(A)))
        return Tile(block, max(1, min(self.warps, block // 128)))


@dataclass(frozen=True)
class Tiles:
    sort: Tile
    build: Tile
    ask: Tile


FEW = Tiles(sort=Tile(4096, 32), build=Tile(4096, 32), ask=Tile(256, 4))
"""For rows that have a multiprocessor each to themselves: as many as are in ``FEW_ROWS``."""
MANY = Tiles(sort=Tile(1024, 8), build=Tile(1024, 8), ask=Tile(512, 4))
"""For more: four programs, and five, fit on a multiprocessor (56 and 48 registers a thread)."""
FEW_ROWS = 128

SORTABLE = (torch.float32, torch.float16, torch.bfloat16)
LONGEST = 2**20 - 2**12
"""Arrivals that the fields of ``_sort`` have room for: 1,023 blocks, of 1,024 or more."""


ALL = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _ones_of(word):
    """How many bits are set; the compiler knows the pattern and takes the instruction for it."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _words(bit_LG):
    """The bits of every group as one number, the first the lowest."""
    return tl.sum(bit_LG.to(tl.uint32) << tl.arange(0, 32)[:, None].to(tl.uint32), 0)


@triton.jit
def _fields(ones, twos, threes):
    return ones.to(tl.int64) | (twos.to(tl.int64) << 21) | (threes.to(tl.int64) << 42)


@triton.jit
def _field(x, number: tl.constexpr):
    return ((x >> (21 * number - 21)) & 0x1FFFFF).to(tl.int32)


@triton.jit
def _tally(item_LG, shift):
    """One where the digit is 1, and so on for 2 and 3 in the next fields, of ten bits."""
    return (1 << (((item_LG >> shift) & 3).to(tl.int32) * 10)) >> 10


# Lanes come first and rows are not said to be aligned: so every access, also to scattered places, has a thread of a warp for
# each lane, in one layout, and a sum over lanes is one instruction.
@triton.jit(do_not_specialize_on_alignment=["A", "S", "P", "span"])
def _sort(
    priority, pinned, items, A, S, sinks, P, span, passes,
    PINNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Items [2, N, P] of int64, best first, in the buffer passes % 2: below bit 31, how far from the last the arrival is."""
    n = tl.program_id(0).to(tl.int64)
    lane_L, g_G = tl.arange(0, 32), tl.arange(0, BLOCK // 32)
    here_LG = g_G[None, :] * 32 + lane_L[:, None]
    lower_L1 = ((1 << lane_L) - 1).to(tl.uint32)[:, None]
    own = n * S + sinks + A - 1
    row = items + n * P
    # The newest first, since the sort is stable. Ascending: the larger the priority, the smaller the key; -0.0 is 0.0.
    tally_LG = tl.zeros([32, BLOCK // 32], tl.int32)
    for start in range(0, P, BLOCK):
        i_LG = start + here_LG
        x_LG = tl.load(priority + own - i_LG, mask=i_LG < A, other=0.0).to(tl.float32)
        x_LG = tl.where(x_LG != x_LG, float("-inf"), tl.where(x_LG == 0.0, 0.0, x_LG))
        bits_LG = x_LG.to(tl.int32, bitcast=True)
        key_LG = tl.where(bits_LG < 0, bits_LG, bits_LG ^ 0x7FFFFFFF)
        key_LG = tl.where(i_LG < A, key_LG, -1).to(tl.int64) & 0xFFFFFFFF
        if PINNED:
            free_LG = tl.load(pinned + own - i_LG, mask=i_LG < A, other=0).to(tl.int32) == 0
            key_LG |= free_LG.to(tl.int64) << 32
        item_LG = (key_LG << 31) | i_LG
        tl.store(row + i_LG, item_LG)
        tally_LG += _tally(item_LG, 31)
    for step in range(passes):
        shift = 31 + 2 * step
        total = tl.sum(_fields(tally_LG & 1023, (tally_LG >> 10) & 1023, tally_LG >> 20))
        first_1 = P - _field(total, 1) - _field(total, 2) - _field(total, 3)
        first_2 = first_1 + _field(total, 1)
        first_3 = first_2 + _field(total, 2)
        source, target = row + step % 2 * span, row + (step + 1) % 2 * span
        tally_LG = tl.zeros([32, BLOCK // 32], tl.int32)
        carry = tl.full([], 0, tl.int64)
        # What is read was written by other threads, and what is written all have read.
        tl.debug_barrier()
        for start in range(0, P, BLOCK):
            item_LG = tl.load(source + start + here_LG)
            digit_LG = ((item_LG >> shift) & 3).to(tl.int32)
            low_G, high_G = _words(digit_LG & 1), _words(digit_LG >> 1)
            count_G = _fields(
                _ones_of(low_G & (high_G ^ ALL)), _ones_of(high_G & (low_G ^ ALL)), _ones_of(low_G & high_G)
            )
            before_G = carry + tl.cumsum(count_G, 0) - count_G
            carry += tl.sum(count_G, 0)
            ones_G, twos_G, threes_G = _field(before_G, 1), _field(before_G, 2), _field(before_G, 3)
            zeros_G = start + g_G * 32 - ones_G - twos_G - threes_G
            is_odd_LG, is_high_LG = (digit_LG & 1) == 1, digit_LG > 1
            low_LG = tl.where(is_odd_LG, low_G[None, :], (low_G ^ ALL)[None, :])
            same_LG = low_LG & tl.where(is_high_LG, high_G[None, :], (high_G ^ ALL)[None, :])
            small_LG = tl.where(is_odd_LG, (first_1 + ones_G)[None, :], zeros_G[None, :])
            large_LG = tl.where(is_odd_LG, (first_3 + threes_G)[None, :], (first_2 + twos_G)[None, :])
            place_LG = tl.where(is_high_LG, large_LG, small_LG) + _ones_of(same_LG & lower_L1)
            tl.store(target + place_LG, item_LG)
            tally_LG += _tally(item_LG, tl.minimum(shift + 2, 63))


@triton.jit
def _level(x_LG, carry, start, tree, target, bit, BLOCK: tl.constexpr):
    """A block of a level: its words, and its values where they lie on the next level. Returns the ones up to its end."""
    lane_L, g_G = tl.arange(0, 32), tl.arange(0, BLOCK // 32)
    lower_L1 = ((1 << lane_L) - 1).to(tl.uint32)[:, None]
    one_LG = (x_LG >> bit) & 1
    word_G = _words(one_LG)
    count_G = _ones_of(word_G)
    before_G = carry + tl.cumsum(count_G, 0) - count_G
    tl.store(tree + start // 32 + g_G, (before_G.to(tl.int64) << 32) | word_G.to(tl.int64))
    if bit > 0:
        before_LG = before_G[None, :] + _ones_of(word_G[None, :] & lower_L1)
        half_LG = (x_LG >> bit >> 1) << bit  # of where the node begins
        zero_LG = start + g_G[None, :] * 32 + lane_L[:, None] - before_LG + half_LG
        tl.store(target + tl.where(one_LG == 1, half_LG + (1 << bit) + before_LG, zero_LG), x_LG)
    return carry + tl.sum(count_G, 0)


@triton.jit(do_not_specialize_on_alignment=["A", "P", "span"])
def _build(values, scratch, tree, A, P, span, levels, BLOCK: tl.constexpr):
    """Words [N, levels, P / 32] of the lower 31 bits of ``values`` [N, A]: 32 bits, and above them the ones before."""
    n = tl.program_id(0).to(tl.int64)
    here_LG = tl.arange(0, BLOCK // 32)[None, :] * 32 + tl.arange(0, 32)[:, None]
    row, own = scratch + n * P, tree + n * levels * (P // 32)
    carry = tl.full([], 0, tl.int32)
    for start in range(0, P, BLOCK):
        i_LG = start + here_LG
        x_LG = (tl.load(values + n * A + i_LG, mask=i_LG < A, other=0) & 0x7FFFFFFF).to(tl.int32)
        carry = _level(tl.where(i_LG < A, x_LG, i_LG), carry, start, own, row, levels - 1, BLOCK)
    for level in range(1, levels):
        carry = tl.full([], 0, tl.int32)
        source, target = row + (level - 1) % 2 * span, row + level % 2 * span
        # What is read was written by other threads, and what is written all have read.
        tl.debug_barrier()
        for start in range(0, P, BLOCK):
            x_LG = tl.load(source + start + here_LG)
            carry = _level(x_LG, carry, start, own + level * (P // 32), target, levels - 1 - level, BLOCK)


@triton.jit(do_not_specialize=["k", "sinks", "window", "never"], do_not_specialize_on_alignment=["A", "P", "item_row"])
def _ask(
    tree, items, k_of_head, out, A, P, item_row, H, levels, blocks, k, sinks, window, never,
    BY_HEAD: tl.constexpr, DROPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The k-th largest of every prefix, as ``running_cutoff`` has it; or, with DROPS, of ``items``, when each is dropped.

    Items are sorted, best first, and an arrival is counted from the end: the k-th largest of what is better than an item is the
    arrival after which k better ones have come.
    """
    n, i = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    k = tl.load(k_of_head + n % H).to(tl.int32) if BY_HEAD else tl.cast(k, tl.int32)
    count = tl.maximum(tl.minimum(i if DROPS else i + 1, A), 1)
    wanted = tl.maximum(tl.minimum(k, count), 1)
    value = tl.zeros([BLOCK], tl.int32)
    row = tree + n * levels * (P // 32)
    # The first ``count`` of the node that begins at ``value``; the one we look for is the ``wanted`` largest of them.
    for level in range(levels):
        last = value + count - 1
        entry = tl.load(row + level * (P // 32) + (last >> 5))
        seen = entry.to(tl.uint32) & (tl.full([BLOCK], ALL, tl.uint32) >> (31 - (last & 31)).to(tl.uint32))
        ones = (entry >> 32).to(tl.int32) + _ones_of(seen) - (value >> 1)
        up = wanted <= ones
        value = tl.where(up, value + (1 << (levels - 1 - level)), value)
        wanted = tl.where(up, wanted, wanted - ones)
        count = tl.where(up, ones, count - ones)
    if DROPS:
        t = A - 1 - (tl.load(items + n * item_row + i, mask=i < A, other=0) & 0x7FFFFFFF).to(tl.int32)
        leaves = tl.where(k == 0, t, tl.maximum(t, A - 1 - value))
        leaves = tl.where((i < k) | (leaves + window >= A), never, leaves + (sinks + window))
        own = out + n * (A + sinks)
        tl.store(own + sinks + t, leaves, mask=i < A)
        tl.store(own + i, tl.zeros([BLOCK], tl.int32) + never, mask=i < sinks)
    else:
        tl.store(out + n * A + i, tl.where(k == 0, A, tl.where(i < k - 1, -1, value)), mask=i < A)


def _tiles(N: int) -> Tiles:
    return FEW if N <= FEW_ROWS else MANY


def _padded(A: int, tiles: Tiles) -> int:
    """A multiple of the blocks that sort and build, powers of two."""
    block = max(tiles.sort.of(A).block, tiles.build.of(A).block)
    return -(-A // block) * block


def _tree(value_NA: Tensor, P: int, tile: Tile) -> Tensor:
    (N, A), levels = value_NA.shape, (P - 1).bit_length()
    scratch = torch.empty(2, N, P, dtype=torch.int32, device=value_NA.device)
    tree = torch.empty(N, levels, P // 32, dtype=torch.int64, device=value_NA.device)
    _build[(N,)](value_NA, scratch, tree, A, P, N * P, levels, BLOCK=tile.block, num_warps=tile.warps, num_stages=1)
    return tree


def _answers(
    tree: Tensor, item_NA: Tensor | None, k: int | Tensor, out: Tensor, A: int, tile: Tile,
    sinks: int = 0, window: int = 0, never: int = 0,
) -> Tensor:  # fmt: skip
    N, levels, words = tree.shape
    blocks = triton.cdiv(max(A, sinks), tile.block)
    k_H, H, one = (k, len(k), 0) if isinstance(k, Tensor) else (tree, 1, min(k, A + 1))
    items, item_row = (tree, 0) if item_NA is None else (item_NA, item_NA.shape[1])
    _ask[(N * blocks,)](
        tree, items, k_H, out, A, 32 * words, item_row, H, levels, blocks, one, sinks, window, never,
        BY_HEAD=isinstance(k, Tensor), DROPS=item_NA is not None, BLOCK=tile.block, num_warps=tile.warps,
    )  # fmt: skip
    return out


def running_cutoffs(rank_NA: Tensor, ks: Sequence[int | Tensor], tiles: Tiles | None = None) -> list[Tensor]:
    """The running cutoff of every k, one number or one a head [H], heads being the last of the dimensions behind N; neither N
    nor A is 0. In the dtype of ``rank_NA``."""
    N, A = rank_NA.shape
    tiles = tiles or _tiles(N)
    tree = _tree(rank_NA.contiguous(), _padded(A, tiles), tiles.build.of(A))
    return [_answers(tree, None, k, rank_NA.new_empty(N, A), A, tiles.ask.of(A)) for k in ks]


def best_first(priority_NS: Tensor, pinned_NS: Tensor | None, sinks: int, tiles: Tiles | None = None) -> Tensor:
    """Whose lower 31 bits say how far from the last each arrival is, by ``core.cutoff.ranks`` from the best on: [N, P], padding
    behind. The first ``sinks`` of S do not count."""
    (N, S), A = priority_NS.shape, priority_NS.shape[1] - sinks
    tiles = tiles or _tiles(N)
    P, tile = _padded(A, tiles), tiles.sort.of(A)
    passes = 16 if pinned_NS is None else 17
    items = torch.empty(2, N, P, dtype=torch.int64, device=priority_NS.device)
    _sort[(N,)](
        priority_NS, priority_NS if pinned_NS is None else pinned_NS, items, A, S, sinks, P, N * P, passes,
        PINNED=pinned_NS is not None, BLOCK=tile.block, num_warps=tile.warps, num_stages=1,
    )  # fmt: skip
    return items[passes % 2]


def sorts(priority_NS: Tensor) -> bool:
    """Whether ``best_first`` takes such priorities."""
    return priority_NS.dtype in SORTABLE and priority_NS.shape[-1] <= LONGEST


def departures(
    item_NA: Tensor, k: int | Tensor, A: int, sinks: int, window: int, never: int, dtype: torch.dtype,
    tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """When each token of a sequence leaves [N, S], ``never`` at or past its end: from ``best_first``, or from such a
    permutation without padding."""
    N = len(item_NA)
    tiles = tiles or _tiles(N)
    P = _padded(A, tiles)
    tree = _tree(item_NA, P, tiles.build.of(A))
    out = torch.empty(N, sinks + A, dtype=dtype, device=item_NA.device)
    return _answers(tree, item_NA, k, out, A, tiles.ask.of(max(A, sinks)), sinks, window, never)

"""Gumbel noise by id (csrc/common/gumbel.h): the id with the largest score of a row follows the row's law.

A launch scores the blocks of rows; the judges compare these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_ops.triton._filters import cut, load_threshold
from specdec_ops.triton._launch import kernel
from specdec_ops.triton._numerics import log2_scale
from specdec_ops.triton._philox import DRAFT, GUMBEL, random_words, splitmix64
from specdec_ops.triton._rows import (
    BLOCK_SIZE,
    CHUNK_SIZE,
    CHUNKS_PER_BLOCK,
    ONE_HOT,
    WIDE_FINAL_SLOTS,
    WIDE_POSITIONS,
    load_entry,
    load_integer,
    load_request,
    row_pointer,
)

#: How the kernel is launched.
SCORE = {"num_warps": 4}
#: Ids that share a random block are so far apart.
_LANES = tl.constexpr(16)
#: Coefficients of 2 * atanh(s) / ln 2, from that of s^13 down.
_C13 = tl.constexpr(float.fromhex("0x1.c68f56p-3"))
_C11 = tl.constexpr(float.fromhex("0x1.0c9a84p-2"))
_C9 = tl.constexpr(float.fromhex("0x1.484b14p-2"))
_C7 = tl.constexpr(float.fromhex("0x1.a61762p-2"))
_C5 = tl.constexpr(float.fromhex("0x1.2776c6p-1"))
_C3 = tl.constexpr(float.fromhex("0x1.ec709ep-1"))
_C1 = tl.constexpr(float.fromhex("0x1.715476p+1"))


@triton.jit
def log2_of_parts(fraction, exponent):
    """exponent + log2(1 + fraction), with the fraction in [-1/2, 0]."""
    s = tl.div_rn(fraction, fraction + 2.0)
    square = s * s
    total = tl.fma(square, _C13, _C11)
    total = tl.fma(total, square, _C9)
    total = tl.fma(total, square, _C7)
    total = tl.fma(total, square, _C5)
    total = tl.fma(total, square, _C3)
    total = tl.fma(total, square, _C1)
    return tl.fma(s, total, exponent)


@triton.jit
def parts_of(x):
    """Of normal numbers x = (1 + fraction) * 2^exponent, with the fraction in [-1/2, 0)."""
    bits = x.to(tl.int32, bitcast=True)
    fraction = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True) - 1.0
    return fraction, ((bits >> 23) - 126).to(tl.float32)


@triton.jit
def gumbel_of(word):
    """-log2(-log2(1 - u)) with u = (word + 1/2) / 2^32."""
    number = word.to(tl.int32, bitcast=True)
    is_large = number < 0
    number = tl.where(is_large, -1 - number, number).to(tl.float32) + 0.5
    # 1 - u is 1 + fraction, or from 1/2 down (1 + fraction) * 2^exponent.
    fraction, exponent = parts_of(number)
    fraction = tl.where(is_large, fraction, number * -(2.0**-32))
    exponential = -log2_of_parts(fraction, tl.where(is_large, exponent - 32.0, 0.0))
    fraction, exponent = parts_of(exponential)
    return -log2_of_parts(fraction, exponent)


@kernel
def score_blocks(
    cu: tl.int64, cu_stride: tl.int64,
    indices: tl.int64, indices_stride: tl.int64,
    temperature: tl.int64, temperature_stride: tl.int64,
    draft_temperature: tl.int64, draft_temperature_stride: tl.int64,
    has_draft_law: tl.int64, has_draft_law_stride: tl.int64,
    wide: tl.int32, num_drafts: tl.int64, most_drafts: tl.int64, num_entries: tl.int64,
    has_bonus_rows: tl.int32, has_random_numbers: tl.int32,
    target: tl.int64, target_stride: tl.int64,
    draft: tl.int64, draft_stride: tl.int64, draft_entry_stride: tl.int64, draft_slot_stride: tl.int64,
    vocab_size: tl.int32, num_blocks: tl.int32, num_target_rows: tl.int64,
    stats: tl.int64, plane: tl.int64,
    seeds: tl.int64, seeds_stride: tl.int64, positions: tl.int64, positions_stride: tl.int64,
    final_stream: tl.int32, final_slot: tl.int64, final_slots: tl.int64, final_slots_stride: tl.int64,
    batch: tl.int32, thresholds: tl.int64, scores: tl.int64,
    DTYPE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The largest score of a block and the lowest place that has it, each in a plane of its own."""
    number = tl.program_id(0) // num_blocks
    block = tl.program_id(0) - number * num_blocks
    r = (number % batch).to(tl.int64)
    slot = (number // batch).to(tl.int64)
    _first_draft, count, first_row = load_request(
        r, cu, cu_stride, wide, num_drafts, most_drafts, has_bonus_rows
    )
    entry, greedy, _has_law, t, _draft_t = load_entry(
        r, indices, indices_stride, temperature, temperature_stride,
        draft_temperature, draft_temperature_stride, has_draft_law, has_draft_law_stride,
        wide, num_entries, has_random_numbers, ONE_HOT,
    )  # fmt: skip
    if (slot < count + tl.where(has_bonus_rows != 0, 1, 0)) & (greedy == 0):
        row = first_row + slot
        scale = log2_scale(t)
        blocks = tl.arange(0, NUM_BLOCKS)
        row_stats = stats.to(tl.pointer_type(tl.float32)) + row * num_blocks + blocks
        largest = tl.max(tl.load(row_stats, mask=blocks < num_blocks, other=float("-inf")), axis=0)
        seed = tl.load((seeds + entry * seeds_stride).to(tl.pointer_type(tl.int64)))
        position = load_integer(positions, r * positions_stride, wide & WIDE_POSITIONS, positions != 0)
        own = load_integer(final_slots, r * final_slots_stride, wide & WIDE_FINAL_SLOTS, final_slots != 0)
        own = tl.where(final_slots != 0, own, final_slot)
        position = position + tl.where(final_stream == DRAFT, own, slot)

        threshold = load_threshold(thresholds, 4 * row, True)
        begin = block * BLOCK_SIZE
        size = vocab_size - begin
        pointer = row_pointer(target, row * target_stride + begin, DTYPE, False)
        chunk = tl.arange(0, CHUNKS_PER_BLOCK)[:, None]
        lane = tl.arange(0, _LANES)[None, :]
        random_block = (begin // 4) + chunk * _LANES + lane
        w0, w1, w2, w3 = random_words(
            splitmix64(seed), random_block, GUMBEL, position + (random_block ^ random_block).to(tl.int64)
        )
        best = tl.full([CHUNKS_PER_BLOCK, _LANES], float("-inf"), tl.float32)
        place = chunk * CHUNK_SIZE + lane
        for part in tl.static_range(4):
            word = w0 if part == 0 else w1 if part == 1 else w2 if part == 2 else w3
            ids = chunk * CHUNK_SIZE + part * _LANES + lane
            x = tl.load(pointer + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
            x = cut(x, threshold, True)
            score = tl.fma(x - largest, scale, gumbel_of(word))
            place = tl.where(score > best, ids, place)
            best = tl.where(score > best, score, best)
        score = tl.max(tl.max(best, axis=1), axis=0)
        place = tl.min(tl.min(tl.where(best == score, place, BLOCK_SIZE), axis=1), axis=0)
        out = scores.to(tl.pointer_type(tl.float32)) + row * num_blocks + block
        tl.store(out, score)
        tl.store(out + num_target_rows * num_blocks, place.to(tl.float32))


@triton.jit
def best_ids(scores, rows, present, num_blocks, num_target_rows, NUM_BLOCKS: tl.constexpr):
    """The id of each row with the largest score, the lowest one on ties."""
    blocks = tl.arange(0, NUM_BLOCKS)
    pointer = scores.to(tl.pointer_type(tl.float32)) + rows[:, None] * num_blocks + blocks[None, :]
    mask = present[:, None] & (blocks < num_blocks)[None, :]
    score = tl.load(pointer, mask=mask, other=float("-inf"))
    best = tl.max(score, axis=1)
    block = tl.min(tl.where(score == best[:, None], blocks[None, :], NUM_BLOCKS), axis=1)
    block = tl.minimum(block, num_blocks - 1)
    place = scores.to(tl.pointer_type(tl.float32)) + (num_target_rows + rows) * num_blocks + block
    return block.to(tl.int64) * BLOCK_SIZE + tl.load(place, mask=present, other=0.0).to(tl.int64)

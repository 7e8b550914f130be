"""Rows of logits in blocks of 4,096 ids, and the launch that reads them once.

A row's law is put together from its blocks' largest logits and sums of weights. The sums are those of
docs/numerics.md: 256 lanes, then halves.

Arguments of the kernels are addresses and strides in bytes, so that one compiled kernel serves every
integer type, and what is absent has the address 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_ops.triton._launch import kernel
from specdec_ops.triton._numerics import (
    flush,
    is_greedy,
    log2_scale,
    weight_factors,
)

BLOCK_SIZE = tl.constexpr(4096)
NUM_LANES = tl.constexpr(256)
CHUNK_SIZE = tl.constexpr(64)
CHUNKS_PER_BLOCK = tl.constexpr(64)
_REQUESTS_AT_ONCE = tl.constexpr(256)
_PLACES_AT_ONCE = tl.constexpr(1024)

#: Bits of `wide`: which arguments have elements of eight bytes.
WIDE_CU = tl.constexpr(1)
WIDE_INDICES = tl.constexpr(2)
WIDE_POSITIONS = tl.constexpr(4)
WIDE_DRAFT_IDS = tl.constexpr(8)
WIDE_LOGSUMEXP = tl.constexpr(16)
WIDE_SUPPORT_IDS = tl.constexpr(32)
WIDE_ACCEPT_UNIFORMS = tl.constexpr(64)
WIDE_FINAL_UNIFORMS = tl.constexpr(128)
WIDE_BONUS_IDS = tl.constexpr(256)
WIDE_RATES = tl.constexpr(512)
WIDE_FINAL_SLOTS = tl.constexpr(1024)

#: Kinds of draft laws.
ONE_HOT = tl.constexpr(0)
LOGITS = tl.constexpr(1)
PROBS = tl.constexpr(2)
SUPPORT = tl.constexpr(3)


@triton.jit
def load_integer(address, offset, is_wide, mask):
    """int32 or int64 at an address, as int64; 0 where masked."""
    where = address + offset
    narrow = tl.load(where.to(tl.pointer_type(tl.int32)), mask=mask & (is_wide == 0), other=0)
    wide = tl.load(where.to(tl.pointer_type(tl.int64)), mask=mask & (is_wide != 0), other=0)
    return tl.where(is_wide != 0, wide, narrow.to(tl.int64))


@triton.jit
def load_real(address, offset, is_wide, mask):
    """float32 or float64 at an address, as float64; 0 where masked."""
    where = address + offset
    narrow = tl.load(where.to(tl.pointer_type(tl.float32)), mask=mask & (is_wide == 0), other=0.0)
    wide = tl.load(where.to(tl.pointer_type(tl.float64)), mask=mask & (is_wide != 0), other=0.0)
    return tl.where(is_wide != 0, wide, narrow.to(tl.float64))


@triton.jit
def load_entry(
    r,
    indices, indices_stride, temperature, temperature_stride,
    draft_temperature, draft_temperature_stride, has_draft_law, has_draft_law_stride,
    wide, num_entries, has_random_numbers,
    LAW: tl.constexpr,
):  # fmt: skip
    """Where a request's temperatures, seeds and laws lie; whether it is greedy, has a law; its temperatures.

    Nobody has checked the values.
    """
    own_entry = load_integer(indices, r * indices_stride, wide & WIDE_INDICES, indices != 0)
    own_entry = tl.where(indices != 0, tl.minimum(tl.maximum(own_entry, -1), num_entries - 1), r)
    entry = tl.maximum(own_entry, 0)
    t = tl.load((temperature + entry * temperature_stride).to(tl.pointer_type(tl.float32)))
    t = tl.where(own_entry < 0, 0.0, t)
    own = (draft_temperature + entry * draft_temperature_stride).to(tl.pointer_type(tl.float32))
    draft_t = tl.where(draft_temperature != 0, tl.load(own, mask=draft_temperature != 0, other=0.0), t)
    flag = (has_draft_law + entry * has_draft_law_stride).to(tl.pointer_type(tl.int8))
    has_law = tl.load(flag, mask=has_draft_law != 0, other=1) != 0
    greedy = is_greedy(t) | (has_random_numbers == 0)
    if LAW == LOGITS:
        has_law = has_law & (is_greedy(draft_t) == 0)
    # Greedy requests: at temperature 1.
    t = tl.where(is_greedy(t), 1.0, t)
    return entry, greedy, has_law, t, draft_t


@triton.jit
def load_request(r, cu, cu_stride, wide, num_drafts, most_drafts, has_bonus_rows):
    """The first draft of a request, how many it has, and its first row. Nobody has checked the values."""
    is_wide = wide & WIDE_CU
    is_ragged = cu != 0
    begin = load_integer(cu, r * cu_stride, is_wide, is_ragged)
    end = load_integer(cu, (r + 1) * cu_stride, is_wide, is_ragged)
    begin = tl.where(is_ragged, begin, r * most_drafts)
    end = tl.where(is_ragged, end, (r + 1) * most_drafts)
    first_draft = tl.minimum(tl.maximum(begin, 0), num_drafts)
    count = tl.minimum(tl.minimum(tl.maximum(end, first_draft), num_drafts) - first_draft, most_drafts)
    return first_draft, count, first_draft + tl.where(has_bonus_rows != 0, r, 0)


@triton.jit
def owner_of_row(row, cu, cu_stride, wide, batch, rows_of_request, bonus_rows):
    """The request that a row belongs to; one of the batch in any case.

    Requests have ``bonus_rows`` more rows than drafts, 0 or 1.
    """
    r = (row // tl.maximum(rows_of_request, 1)).to(tl.int32)
    if cu != 0:
        requests = tl.arange(0, _REQUESTS_AT_ONCE)
        count = requests * 0
        for first in range(0, batch, _REQUESTS_AT_ONCE):
            one = first + requests
            rows = load_integer(cu, one.to(tl.int64) * cu_stride, wide & WIDE_CU, one < batch)
            count += ((one < batch) & (rows + one * bonus_rows <= row)).to(tl.int32)
        r = tl.maximum(tl.sum(count, axis=0) - 1, 0)
    return tl.minimum(r, batch - 1).to(tl.int64)


@triton.jit
def row_pointer(address, offset, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The first element of a row; the offset is in elements."""
    pointer = address.to(tl.int64).to(tl.pointer_type(DTYPE)) + offset
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def ids_of_block():
    """Where the ids of a block are, [chunks, ids]."""
    chunk = tl.arange(0, CHUNKS_PER_BLOCK)[:, None]
    return chunk * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)[None, :]


@triton.jit
def sum_by_halves(lanes):
    """The sum over 256 lanes: l and l + 128, then l + 64, ..., then l + 1."""
    lanes = tl.sum(tl.reshape(lanes, [2, 128]), axis=0)
    lanes = tl.sum(tl.reshape(lanes, [2, 64]), axis=0)
    lanes = tl.sum(tl.reshape(lanes, [2, 32]), axis=0)
    lanes = tl.sum(tl.reshape(lanes, [2, 16]), axis=0)
    lanes = tl.sum(tl.reshape(lanes, [2, 8]), axis=0)
    lanes = tl.sum(tl.reshape(lanes, [2, 4]), axis=0)
    lanes = tl.sum(tl.reshape(lanes, [2, 2]), axis=0)
    return tl.sum(lanes, axis=0)


@triton.jit
def defined_sum(pointer, size, reference, scale):
    """The sum of a block's weights as docs/numerics.md has it; the block comes from the first-level cache."""
    sums = tl.full([NUM_LANES], 0.0, tl.float32)
    for row in tl.range(0, 16, loop_unroll_factor=4):
        i = row * NUM_LANES + tl.arange(0, NUM_LANES)
        x = tl.load(pointer + i, mask=i < size, other=float("-inf")).to(tl.float32)
        polynomial, power = weight_factors(x, reference, scale)
        sums = tl.fma(polynomial, power, sums)
    return flush(sum_by_halves(sums))


@triton.jit
def quick_weights(x, reference, scale):
    """Weights by the hardware's exponential; ids that are masked have none."""
    return tl.exp2((x - tl.where(reference > float("-inf"), reference, 0.0)) * scale)


@triton.jit
def block_stats(x, chunks, scale, needs_sum, SUMS_CHUNKS: tl.constexpr):
    """The largest logit of a block that is not NaN, and the quick sum of its weights, or 0.

    It is NaN where the block holds a NaN or +inf. Sums of chunks go to `chunks`.
    """
    # NaN if there is no other.
    largest = tl.max(x)
    largest = tl.where(largest == largest, largest, float("-inf"))
    total = tl.full([], 0.0, tl.float32)
    if needs_sum:
        sums = flush(tl.sum(quick_weights(x, largest, scale), axis=1))
        total = tl.sum(sums, axis=0)
        if SUMS_CHUNKS:
            place = tl.arange(0, CHUNKS_PER_BLOCK)
            tl.store(chunks.to(tl.pointer_type(tl.float32)) + place, sums)
    else:
        # Without their signs, NaNs are the largest patterns of bits.
        patterns = x.to(tl.uint32, bitcast=True) << 1
        is_odd = (tl.max(patterns) > 0xFF000000) | (largest == float("inf"))
        total = tl.where(is_odd, float("nan"), 0.0)
    return largest, total


@triton.jit
def index_of(pointer, size, largest, IS_WHOLE: tl.constexpr):
    """The lowest place of the largest logit in its block.

    The block comes from the first-level cache, a part at a time, which takes fewer registers.
    """
    places = tl.arange(0, _PLACES_AT_ONCE)
    index = places * 0 + BLOCK_SIZE - 1
    for first in range(0, BLOCK_SIZE, _PLACES_AT_ONCE):
        ids = first + places
        if IS_WHOLE:
            x = tl.load(pointer + ids).to(tl.float32)
        else:
            x = tl.load(pointer + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
        index = tl.minimum(index, tl.where(x == largest, ids, BLOCK_SIZE))
    return tl.min(index)


@triton.jit
def read_block(
    x, pointer, size, numbers, plane, chunks, scale, best, finds_index, needs_sum,
    IS_WHOLE: tl.constexpr, SUMS_CHUNKS: tl.constexpr, IS_EXACT: tl.constexpr,
):  # fmt: skip
    """Stores the numbers of a block, each in a plane of its own; returns the best with it."""
    largest, total = block_stats(x.to(tl.float32), chunks, scale, needs_sum, SUMS_CHUNKS)
    index = tl.full([], 0, tl.int32)
    if IS_EXACT:  # noqa: SIM102
        if needs_sum:
            total = defined_sum(pointer, size, tl.where(largest > float("-inf"), largest, 0.0), scale)
    # Where an earlier block has as large a logit, nobody asks.
    if finds_index & (largest > best):
        index = index_of(pointer, size, largest, IS_WHOLE)
    tl.store(numbers, largest)
    tl.store(numbers + plane, total)
    tl.store(numbers + 2 * plane, index.to(tl.float32))
    return tl.maximum(best, largest)


@triton.jit
def read_blocks(
    x, pointer, first, end, vocab_size, numbers, plane, chunks, scale, finds_index, needs_sum,
    SUMS_CHUNKS: tl.constexpr, IS_EXACT: tl.constexpr,
):  # fmt: skip
    """Reads blocks from the first on, whose logits are at hand; each is asked for while another is summed."""
    last_whole = tl.minimum(end, vocab_size // BLOCK_SIZE)
    ids = ids_of_block()
    best = tl.full([], float("-inf"), tl.float32)
    for block in range(first, last_whole):
        following = pointer + BLOCK_SIZE
        next_x = tl.load(following + ids, mask=block + 1 < last_whole, other=float("-inf"))
        best = read_block(
            x, pointer, BLOCK_SIZE, numbers, plane, chunks, scale, best, finds_index, needs_sum,
            True, SUMS_CHUNKS, IS_EXACT,
        )  # fmt: skip
        x, pointer = next_x, following
        numbers += 1
        chunks += 4 * CHUNKS_PER_BLOCK
    if last_whole < end:
        # Part of a block: loads of single elements.
        size = vocab_size - last_whole * BLOCK_SIZE
        x = tl.load(pointer + ids, mask=ids < size, other=float("-inf"))
        read_block(
            x, pointer, size, numbers, plane, chunks, scale, best, finds_index, needs_sum,
            False, SUMS_CHUNKS, IS_EXACT,
        )  # fmt: skip


@triton.jit
def chunk_sums_of(stats, plane, place):
    """The address of the sums of a block's chunks, which lie behind the planes."""
    return stats + 4 * (3 * plane + place * CHUNKS_PER_BLOCK)


@kernel
def read_rows(
    cu: tl.int64, cu_stride: tl.int64,
    indices: tl.int64, indices_stride: tl.int64,
    temperature: tl.int64, temperature_stride: tl.int64,
    draft_temperature: tl.int64, draft_temperature_stride: tl.int64,
    has_draft_law: tl.int64, has_draft_law_stride: tl.int64,
    wide: tl.int32, batch: tl.int32, num_drafts: tl.int64, most_drafts: tl.int64, num_entries: tl.int64,
    has_bonus_rows: tl.int32, has_random_numbers: tl.int32,
    target: tl.int64, target_stride: tl.int64,
    draft: tl.int64, draft_stride: tl.int64, draft_entry_stride: tl.int64, draft_slot_stride: tl.int64,
    vocab_size: tl.int32, num_blocks: tl.int32, num_target_rows: tl.int64, needs_law: tl.int32,
    blocks_at_once: tl.int32, stats: tl.int64, plane: tl.int64,
    DTYPE: tl.constexpr, DRAFT_DTYPE: tl.constexpr, LAW: tl.constexpr, READS_DRAFTS: tl.constexpr,
    ALIGNED: tl.constexpr, IS_EXACT: tl.constexpr,
):  # fmt: skip
    """Some blocks of a row: of the target's, or of the drafts' behind them.

    A row of the target is asked for before its request is known: every row that there is is read.
    """
    parts = tl.cdiv(num_blocks, blocks_at_once)
    row = tl.program_id(0) // parts
    first = (tl.program_id(0) - row * parts) * blocks_at_once
    end = tl.minimum(first + blocks_at_once, num_blocks)
    begin = first * BLOCK_SIZE
    row = row.to(tl.int64)
    place = row * num_blocks + first
    numbers = stats.to(tl.pointer_type(tl.float32)) + place
    chunks = chunk_sums_of(stats, plane, place)
    is_whole = begin + BLOCK_SIZE <= vocab_size
    ids = ids_of_block()
    if READS_DRAFTS:  # noqa: SIM102
        if row >= num_target_rows:
            index = row - num_target_rows
            r = owner_of_row(index, cu, cu_stride, wide, batch, most_drafts, 0)
            first_draft, count, _ = load_request(
                r, cu, cu_stride, wide, num_drafts, most_drafts, has_bonus_rows
            )
            slot = index - first_draft
            entry, greedy, has_law, _, t = load_entry(
                r, indices, indices_stride, temperature, temperature_stride,
                draft_temperature, draft_temperature_stride, has_draft_law, has_draft_law_stride,
                wide, num_entries, has_random_numbers, LAW,
            )  # fmt: skip
            is_needed = has_law & (greedy == 0) & (slot >= 0) & (slot < count)
            end = tl.where(is_needed, end, first)
            offset = first_draft * draft_stride + entry * draft_entry_stride + slot * draft_slot_stride
            pointer = row_pointer(draft, offset + begin, DRAFT_DTYPE, ALIGNED)
            x = tl.load(pointer + ids, mask=is_whole & is_needed, other=float("-inf"))
            read_blocks(
                x, pointer, first, end, vocab_size, numbers, plane, chunks, log2_scale(t), False, True,
                False, IS_EXACT,
            )  # fmt: skip
            end = first
    if first < end:
        pointer = row_pointer(target, row * target_stride + begin, DTYPE, ALIGNED)
        x = tl.load(pointer + ids, mask=is_whole, other=float("-inf"))
        bonus_rows = tl.where(has_bonus_rows != 0, 1, 0)
        r = owner_of_row(row, cu, cu_stride, wide, batch, most_drafts + bonus_rows, bonus_rows)
        _, greedy, _, t, _ = load_entry(
            r, indices, indices_stride, temperature, temperature_stride,
            draft_temperature, draft_temperature_stride, has_draft_law, has_draft_law_stride,
            wide, num_entries, has_random_numbers, LAW,
        )  # fmt: skip
        read_blocks(
            x, pointer, first, end, vocab_size, numbers, plane, chunks, log2_scale(t), greedy,
            (greedy == 0) | (needs_law != 0), True, IS_EXACT,
        )  # fmt: skip

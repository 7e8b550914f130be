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
def load_request(
    r,
    cu, cu_stride, indices, indices_stride, temperature, temperature_stride,
    draft_temperature, draft_temperature_stride, has_draft_law, has_draft_law_stride,
    wide, num_drafts, most_drafts, num_entries, has_bonus_rows, has_random_numbers,
    LAW: tl.constexpr,
):  # fmt: skip
    """Where the drafts and rows of a request are, and its temperatures. Nobody has checked the values."""
    is_wide = wide & WIDE_CU
    is_ragged = cu != 0
    begin = load_integer(cu, r * cu_stride, is_wide, is_ragged)
    end = load_integer(cu, (r + 1) * cu_stride, is_wide, is_ragged)
    begin = tl.where(is_ragged, begin, r * most_drafts)
    end = tl.where(is_ragged, end, (r + 1) * most_drafts)
    own_entry = load_integer(indices, r * indices_stride, wide & WIDE_INDICES, indices != 0)
    own_entry = tl.where(indices != 0, tl.minimum(tl.maximum(own_entry, -1), num_entries - 1), r)
    entry = tl.maximum(own_entry, 0)
    t = tl.load((temperature + entry * temperature_stride).to(tl.pointer_type(tl.float32)))
    t = tl.where(own_entry < 0, 0.0, t)
    own = (draft_temperature + entry * draft_temperature_stride).to(tl.pointer_type(tl.float32))
    draft_t = tl.where(draft_temperature != 0, tl.load(own, mask=draft_temperature != 0, other=0.0), t)
    flag = (has_draft_law + entry * has_draft_law_stride).to(tl.pointer_type(tl.int8))
    has_law = tl.load(flag, mask=has_draft_law != 0, other=1) != 0

    first_draft = tl.minimum(tl.maximum(begin, 0), num_drafts)
    count = tl.minimum(tl.minimum(tl.maximum(end, first_draft), num_drafts) - first_draft, most_drafts)
    first_row = first_draft + tl.where(has_bonus_rows != 0, r, 0)
    greedy = is_greedy(t) | (has_random_numbers == 0)
    if LAW == LOGITS:
        has_law = has_law & (is_greedy(draft_t) == 0)
    # Greedy requests: at temperature 1.
    t = tl.where(is_greedy(t), 1.0, t)
    return first_draft, count, first_row, entry, greedy, has_law, t, draft_t


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
def block_stats(pointer, chunks, size, scale, finds_index, needs_sum, is_exact, MASKED: tl.constexpr):
    """The largest logit of a block that is not NaN, the sum of its weights, and the index of the largest.

    The sum is NaN where the block holds a NaN or +inf. Sums of chunks go to `chunks`, where that is not 0.
    They are quick ones, and so is the sum unless it is to be exact.
    """
    ids = ids_of_block()
    if MASKED:
        x = tl.load(pointer + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(pointer + ids).to(tl.float32)
    largest = tl.max(tl.max(tl.where(x == x, x, float("-inf")), axis=1), axis=0)
    total = tl.full([], 0.0, tl.float32)
    index = tl.full([], 0, tl.int32)
    if needs_sum:
        sums = flush(tl.sum(quick_weights(x, largest, scale), axis=1))
        total = tl.sum(sums, axis=0)
        if chunks != 0:
            place = tl.arange(0, CHUNKS_PER_BLOCK)
            tl.store(chunks.to(tl.pointer_type(tl.float32)) + place, sums)
        if is_exact:
            total = defined_sum(pointer, size, tl.where(largest > float("-inf"), largest, 0.0), scale)
    if finds_index:
        index = tl.min(tl.min(tl.where(x == largest, ids, BLOCK_SIZE), axis=1), axis=0)
        odd = tl.where((x != x) | (x == float("inf")), 1, 0)
        total = tl.where(tl.max(tl.max(odd, axis=1), axis=0) != 0, float("nan"), total)
    return largest, total, index


@triton.jit
def read_block(
    pointer, stats, plane, place, chunks, size, scale, finds_index, needs_sum, is_exact
):  # fmt: skip
    """Stores the numbers of a block, each in a plane of its own."""
    largest = tl.full([], 0.0, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    index = tl.full([], 0, tl.int32)
    # A whole block needs no mask, so that its loads are of 16 bytes.
    if size == BLOCK_SIZE:
        largest, total, index = block_stats(
            pointer, chunks, size, scale, finds_index, needs_sum, is_exact, False
        )
    else:
        largest, total, index = block_stats(
            pointer, chunks, size, scale, finds_index, needs_sum, is_exact, True
        )
    numbers = stats.to(tl.pointer_type(tl.float32)) + place
    tl.store(numbers, largest)
    tl.store(numbers + plane, total)
    tl.store(numbers + 2 * plane, index.to(tl.float32))


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
    is_exact: tl.int32, stats: tl.int64, plane: tl.int64,
    DTYPE: tl.constexpr, DRAFT_DTYPE: tl.constexpr, LAW: tl.constexpr, READS_DRAFTS: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """A few blocks of one row of a slot: of the target's, or of the draft's, in every second program."""
    units = tl.cdiv(num_blocks, BLOCKS)
    number = tl.program_id(0) // units
    unit = tl.program_id(0) - number * units
    is_draft = unit < 0
    if READS_DRAFTS:
        is_draft = number % 2 != 0
        number = number // 2
    r = (number % batch).to(tl.int64)
    slot = (number // batch).to(tl.int64)
    first_draft, count, first_row, entry, greedy, has_law, t, draft_t = load_request(
        r, cu, cu_stride, indices, indices_stride, temperature, temperature_stride,
        draft_temperature, draft_temperature_stride, has_draft_law, has_draft_law_stride,
        wide, num_drafts, most_drafts, num_entries, has_bonus_rows, has_random_numbers, LAW,
    )  # fmt: skip
    end = count + tl.where((has_bonus_rows != 0) & (is_draft == 0), 1, 0)
    if (slot < end) & ((is_draft == 0) | (has_law & (greedy == 0))):
        needs_sum = is_draft | (greedy == 0) | (needs_law != 0)
        scale = log2_scale(tl.where(is_draft, draft_t, t))
        row = tl.where(is_draft, num_target_rows + first_draft, first_row) + slot
        of_draft = first_draft * draft_stride + entry * draft_entry_stride + slot * draft_slot_stride
        of_target = (first_row + slot) * target_stride
        for i in range(BLOCKS):
            block = unit * BLOCKS + i
            if block < num_blocks:
                begin = block * BLOCK_SIZE
                size = tl.minimum(vocab_size - begin, BLOCK_SIZE)
                place = row * num_blocks + block
                chunks = tl.where(is_draft, 0, chunk_sums_of(stats, plane, place))
                if DTYPE == DRAFT_DTYPE:
                    pointer = row_pointer(
                        tl.where(is_draft, draft, target),
                        tl.where(is_draft, of_draft, of_target) + begin,
                        DTYPE, ALIGNED,
                    )  # fmt: skip
                    read_block(pointer, stats, plane, place, chunks, size, scale, greedy, needs_sum, is_exact)
                elif is_draft:
                    drafts = row_pointer(draft, of_draft + begin, DRAFT_DTYPE, ALIGNED)
                    read_block(drafts, stats, plane, place, chunks, size, scale, greedy, needs_sum, is_exact)
                else:
                    targets = row_pointer(target, of_target + begin, DTYPE, ALIGNED)
                    read_block(targets, stats, plane, place, chunks, size, scale, greedy, needs_sum, is_exact)

"""The likeliest ids of a row, without a sort of the row.

The launch that reads a row leaves the largest logit of each chunk of 64 ids. The n likeliest ids lie in the n
chunks with the largest ones, where lower chunks go first, as ids do. So a program picks chunks, then ids.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_ops.triton._row_blocks import load_lanes, sum_of_block
from specdec_ops.triton._rows import BLOCK_SIZE, CHUNK_SIZE, CHUNKS_PER_BLOCK, ids_of_block

#: Ids of a list at most, and chunks or blocks that they are sought in.
MOST_LISTED = tl.constexpr(64)
#: What the launch that reads leaves of a block, each in a plane of its own: its largest logit; the sum of its
#: weights, NaN where the block holds a NaN or +inf; an integer that the op asks for; and its largest logit
#: once more, NaN where it has none. The largest logits of its chunks lie behind the planes.
INTEGERS, LISTED, PLANES = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
#: Integers that a program takes notes with: blocks, chunks, ids, their orders, and the list.
NOTES = tl.constexpr(5 * 64)

#: What a block is asked for.
INDEX = tl.constexpr(0)  # its lowest id with the largest logit, BLOCK_SIZE where there is none
COUNT = tl.constexpr(1)  # how many of its logits are not below a given one


@triton.jit
def chunk_maxima_of(stats, plane, place):
    """The address of the largest logits of a block's chunks."""
    return stats + 4 * (PLANES * plane + place * CHUNKS_PER_BLOCK)


@triton.jit
def _numbers_of_block(
    pointer, chunks, size, scale, needs_sum, given, ASKED: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    ids = ids_of_block()
    x = load_lanes(pointer, ids, size, MASKED)
    is_number = (x == x) & (ids < size)
    maxima = tl.max(tl.where(x == x, x, float("-inf")), axis=1)
    largest = tl.max(maxima, axis=0)
    has_number = tl.max(is_number.to(tl.int32), axis=1)
    listed = tl.where(tl.max(has_number, axis=0) != 0, largest, float("nan"))
    if chunks != 0:
        place = tl.arange(0, CHUNKS_PER_BLOCK)
        maxima = tl.where(has_number != 0, maxima, float("nan"))
        tl.store(chunks.to(tl.pointer_type(tl.float32)) + place, maxima)
    total = tl.full([], 0.0, tl.float32)
    if needs_sum:
        total = sum_of_block(pointer, size, largest, scale, MASKED)
    else:
        odd = tl.max(tl.max(tl.where((x != x) | (x == float("inf")), 1, 0), axis=1), axis=0)
        total = tl.where(odd != 0, float("nan"), total)
    if ASKED == INDEX:
        places = tl.where(is_number & (x == largest), ids, BLOCK_SIZE)
        integer = tl.min(tl.min(places, axis=1), axis=0)
    else:
        integer = tl.sum(tl.sum((is_number & (x >= given)).to(tl.int32), axis=1), axis=0)
    return largest, total, integer, listed


@triton.jit
def read_block_to_list(
    pointer, stats, plane, place, size, scale, needs_sum, needs_list, given, ASKED: tl.constexpr
):  # fmt: skip
    """Stores the numbers of a block."""
    chunks = tl.where(needs_list, chunk_maxima_of(stats, plane, place), 0)
    # A whole block needs no mask, so that its loads are of 16 bytes.
    if size == BLOCK_SIZE:
        largest, total, integer, listed = _numbers_of_block(
            pointer, chunks, size, scale, needs_sum, given, ASKED, False
        )
    else:
        largest, total, integer, listed = _numbers_of_block(
            pointer, chunks, size, scale, needs_sum, given, ASKED, True
        )
    numbers = stats.to(tl.pointer_type(tl.float32)) + place
    tl.store(numbers, largest)
    tl.store(numbers + plane, total)
    tl.store(numbers + INTEGERS * plane, integer.to(tl.float32))
    tl.store(numbers + LISTED * plane, listed)


@triton.jit
def _order_of(x, is_there, DIGITS: tl.constexpr):
    """A number of so many binary digits that is the larger the earlier a logit is listed: NaN last."""
    bits = x.to(tl.int32, bitcast=True)
    # Zeros of both signs are equal.
    bits = tl.where(bits == -(1 << 31), 0, bits)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> (32 - DIGITS)
    least = -(1 << (DIGITS - 1))
    return tl.where(is_there, tl.where(x == x, order, least + 1), least)


@triton.jit
def _keep_largest(order, wanted, DIGITS: tl.constexpr):
    """Keeps so many of the largest orders, those in front of equal ones, and none of what is not there.

    Returns which are kept, the place of each among these, and their number.
    """
    least = -(1 << (DIGITS - 1))
    # The largest number that enough orders reach, digit by digit.
    floor = tl.where(tl.sum((order >= 0).to(tl.int32), axis=0) >= wanted, 0, least)
    digit = tl.full([], 1 << (DIGITS - 2), tl.int32)
    while digit > 0:
        next_floor = floor + digit
        floor = tl.where(tl.sum((order >= next_floor).to(tl.int32), axis=0) >= wanted, next_floor, floor)
        digit = digit >> 1
    is_above = order > floor
    is_equal = (order == floor) & (order > least)
    # Both counts in one number: neither reaches 2^16.
    prefix = tl.cumsum(is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16), axis=0)
    num_above = tl.sum(is_above.to(tl.int32), axis=0)
    room = wanted - num_above
    equal_prefix = prefix >> 16
    kept = is_above | (is_equal & (equal_prefix <= room))
    place = (prefix & 0xFFFF) + tl.minimum(equal_prefix, room) - 1
    count = num_above + tl.minimum(tl.sum(is_equal.to(tl.int32), axis=0), room)
    return kept, place, count


@triton.jit
def list_likeliest(
    pointer, stats, plane, row, notes, vocab_size, num_blocks, wanted, least, with_others,
    DTYPE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The likeliest ids of a row, by falling logit and then by rising id; and how many there are.

    With others, logits below the least one and NaN are listed too, where there is room. ``notes``
    is the address of NOTES integers.
    """
    # All digits that logits of the dtype differ in.
    DIGITS: tl.constexpr = 16 if DTYPE == tl.bfloat16 else 19 if DTYPE == tl.float16 else 32  # noqa: SIM300
    notes = notes.to(tl.pointer_type(tl.int32))
    places = tl.arange(0, MOST_LISTED)
    inner = tl.arange(0, CHUNK_SIZE)[None, :]
    numbers = stats.to(tl.pointer_type(tl.float32)) + LISTED * plane + row * num_blocks

    blocks = places
    is_there = places < num_blocks
    if NUM_BLOCKS > MOST_LISTED:
        all_blocks = tl.arange(0, NUM_BLOCKS)
        inside = all_blocks < num_blocks
        order = _order_of(tl.load(numbers + all_blocks, mask=inside, other=0.0), inside, 32)
        kept, place, count = _keep_largest(order, wanted, 32)
        tl.store(notes + place, all_blocks, mask=kept)
        tl.debug_barrier()
        is_there = places < count
        blocks = tl.load(notes + places, mask=is_there, other=0)
        notes += MOST_LISTED

    chunks = blocks[:, None] * CHUNKS_PER_BLOCK + inner
    inside = is_there[:, None]
    maxima = chunk_maxima_of(stats, plane, row * num_blocks).to(tl.pointer_type(tl.float32))
    order = _order_of(tl.load(maxima + chunks, mask=inside, other=0.0), inside, DIGITS)
    kept, place, count = _keep_largest(tl.reshape(order, [BLOCK_SIZE]), wanted, DIGITS)
    tl.store(notes + place, tl.reshape(chunks, [BLOCK_SIZE]), mask=kept)
    tl.debug_barrier()
    is_there = places < count
    chunks = tl.load(notes + places, mask=is_there, other=0)
    notes += MOST_LISTED

    ids = chunks[:, None] * CHUNK_SIZE + inner
    inside = is_there[:, None] & (ids < vocab_size)
    x = tl.load(pointer + ids, mask=inside, other=0.0).to(tl.float32)
    order = _order_of(x, inside & (with_others | (x >= least)), DIGITS)
    order = tl.reshape(order, [BLOCK_SIZE])
    kept, place, count = _keep_largest(order, wanted, DIGITS)
    tl.store(notes + place, tl.reshape(ids, [BLOCK_SIZE]), mask=kept)
    tl.store(notes + MOST_LISTED + place, order, mask=kept)
    tl.debug_barrier()
    is_there = places < count
    ids = tl.load(notes + places, mask=is_there, other=0)
    order = tl.load(notes + MOST_LISTED + places, mask=is_there, other=-(1 << 31))
    notes += 2 * MOST_LISTED

    # Ids come in rising order.
    is_earlier = (places[None, :] < places[:, None]) & (order[None, :] == order[:, None])
    rank = tl.sum((is_earlier | (order[None, :] > order[:, None])).to(tl.int32), axis=1)
    tl.store(notes + rank, ids, mask=is_there)
    tl.debug_barrier()
    return tl.load(notes + places, mask=is_there, other=0), count

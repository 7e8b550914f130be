"""Top-k, top-p and min-p as one threshold a row: launches before the judges, where there are filters.

docs/numerics.md defines a threshold, which does not depend on how it is found. One launch leaves the largest
logit of each chunk. The next one, a program to a row, takes the chunks with the largest: where all that
matters lies in them, the threshold is searched for in registers, else by passes over the row. The last one
reads rows as :mod:`_rows` does, but what lies below their thresholds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_ops.triton._launch import kernel, launch_prepared
from specdec_ops.triton._numerics import exp2_f64, flush, log2_f64, log2_scale, weight_factors
from specdec_ops.triton._rows import (
    BLOCK_SIZE,
    CHUNK_SIZE,
    CHUNKS_PER_BLOCK,
    LOGITS,
    NUM_LANES,
    chunk_sums_of,
    ids_of_block,
    load_entry,
    load_integer,
    load_real,
    load_request,
    quick_weights,
    row_pointer,
    sum_by_halves,
)

if TYPE_CHECKING:
    from specdec_ops.triton._chain_arguments import Chain, ChainChecks, Entries

#: How the search for thresholds is cut and launched: how many chunks are looked at at once, and how many
#: logits a pass tries.
SEARCH = {"TILE": 128, "PROBES": 8, "num_warps": 16}
READER = {"num_warps": 4}

#: Bits of `flags`.
WIDE_TOP_K = tl.constexpr(1)
WIDE_DRAFT_TOP_K = tl.constexpr(2)
JOINT = tl.constexpr(4)
OF_TARGETS = tl.constexpr(8)
OF_DRAFTS = tl.constexpr(16)

#: Blocks of a row whose chunks fit the registers of a program.
_MOST_BLOCKS = tl.constexpr(64)
_MOST_CHUNKS = tl.constexpr(4096)
_LOG2_MOST_CHUNKS = tl.constexpr(12)
_CHUNKS_PER_BLOCK_LOG2 = tl.constexpr(6)
#: By order: -inf, and the largest number.
_ORDER_OF_MASKED = tl.constexpr(-0x7F800000)
_LARGEST_ORDER = tl.constexpr(0x7F7FFFFF)
_MASS_UNITS = tl.constexpr(2.0**40)
#: Adding it to a float64 and taking it away rounds to an integer, to even.
_MASS_MAGIC = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52
#: Sums that were added in another order than the definition's agree with its sums to this part of them.
_NEAR = tl.constexpr(1e-12)
#: Octaves between the logits that a first pass tries.
_FIRST_STEP = tl.constexpr(3.0)


@triton.jit
def order_of(x):
    """An integer that grows with the float, by 1 from one to the next; the two zeros have the same one."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def float_of_order(order):
    return tl.where(order < 0, -2147483648 - order, order).to(tl.float32, bitcast=True)


@triton.jit
def cut(x, threshold, FILTERED: tl.constexpr):
    """Masks what lies below a threshold, if there are any."""
    if FILTERED:
        return tl.where(x < threshold, float("-inf"), x)
    else:
        return x


@triton.jit
def load_threshold(address, offset, mask):
    """-inf where there is none."""
    where = (address + offset).to(tl.pointer_type(tl.float32))
    return tl.load(where, mask=mask & (address != 0), other=float("-inf"))


@triton.jit
def masses_of(x, reference, scale):
    """Of ids of blocks with these maxima, in units: integers in float64, whose sums are exact."""
    polynomial, power = weight_factors(x, tl.where(reference > float("-inf"), reference, 0.0), scale)
    return ((polynomial * power).to(tl.float64) * _MASS_UNITS + _MASS_MAGIC) - _MASS_MAGIC


@triton.jit
def block_weight(block_max, largest, scale):
    distance = (block_max.to(tl.float64) - largest.to(tl.float64)) * scale.to(tl.float64)
    return exp2_f64(tl.where(block_max > float("-inf"), distance, 0.0))


@triton.jit
def min_p_order(largest, scale, min_p):
    """Of the least float that min-p keeps."""
    least = largest.to(tl.float64) + log2_f64(min_p) / scale.to(tl.float64)
    nearest = least.to(tl.float32)
    return order_of(nearest) + tl.where(nearest.to(tl.float64) < least, 1, 0)


@triton.jit
def at(values, places, i):
    """Element i of a vector, whose places are given, as a number."""
    return tl.sum(tl.where(places == i, values, 0), axis=0)


@triton.jit
def load_filters(
    entry, is_draft, vocab_size, flags,
    top_k, top_k_stride, top_p, top_p_stride, min_p, min_p_stride,
    draft_top_k, draft_top_k_stride, draft_top_p, draft_top_p_stride, draft_min_p, draft_min_p_stride,
):  # fmt: skip
    """Top-k (0: none), top-p (1: none) and min-p (0: none) of a request, for its target or its drafts."""
    ks = tl.where(is_draft, draft_top_k, top_k)
    is_wide = tl.where(is_draft, flags & WIDE_DRAFT_TOP_K, flags & WIDE_TOP_K)
    k = load_integer(ks, entry * tl.where(is_draft, draft_top_k_stride, top_k_stride), is_wide, ks != 0)
    k = tl.where((k > 0) & (k < vocab_size), k, 0)
    ps = tl.where(is_draft, draft_top_p, top_p)
    p = load_real(ps, entry * tl.where(is_draft, draft_top_p_stride, top_p_stride), 0, ps != 0)
    p = tl.where((ps != 0) & (p < 1.0), p, 1.0)
    ms = tl.where(is_draft, draft_min_p, min_p)
    m = load_real(ms, entry * tl.where(is_draft, draft_min_p_stride, min_p_stride), 0, ms != 0)
    m = tl.where(m > 0.0, tl.minimum(m, 1.0), 0.0)
    return k, p, m


@triton.jit
def row_of_program(
    number, of_targets, of_drafts,
    cu, cu_stride, indices, indices_stride, temperature, temperature_stride,
    draft_temperature, draft_temperature_stride, has_draft_law, has_draft_law_stride,
    wide, batch, num_drafts, most_drafts, num_entries, has_bonus_rows, has_random_numbers,
    target_stride, draft_stride, draft_entry_stride, draft_slot_stride, num_target_rows,
    LAW: tl.constexpr,
):  # fmt: skip
    """A row of a slot, of the target's or of the draft's: whether somebody needs it, and what it is."""
    has_both = (of_targets != 0) & (of_drafts != 0)
    is_draft = tl.where(has_both, number % 2, tl.where(of_drafts != 0, 1, 0)) != 0
    number = tl.where(has_both, number // 2, number)
    r = (number % batch).to(tl.int64)
    slot = (number // batch).to(tl.int64)
    first_draft, count, first_row = load_request(
        r, cu, cu_stride, wide, num_drafts, most_drafts, has_bonus_rows
    )
    entry, greedy, has_law, t, draft_t = load_entry(
        r, indices, indices_stride, temperature, temperature_stride,
        draft_temperature, draft_temperature_stride, has_draft_law, has_draft_law_stride,
        wide, num_entries, has_random_numbers, LAW,
    )  # fmt: skip
    end = count + tl.where((has_bonus_rows != 0) & (is_draft == 0), 1, 0)
    is_needed = (slot < end) & ((is_draft == 0) | (has_law & (greedy == 0)))
    scale = log2_scale(tl.where(is_draft, draft_t, t))
    row = tl.where(is_draft, num_target_rows + first_draft, first_row) + slot
    of_draft = first_draft * draft_stride + entry * draft_entry_stride + slot * draft_slot_stride
    offset = tl.where(is_draft, of_draft, (first_row + slot) * target_stride)
    return is_needed, is_draft, slot, first_draft, entry, greedy, scale, row, offset


@triton.jit
def load_logits(
    target, draft, offset, is_draft, ids, mask,
    DTYPE: tl.constexpr, DRAFT_DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Logits of a row of either kind in float32; -inf where masked."""
    if DTYPE == DRAFT_DTYPE:
        pointer = row_pointer(tl.where(is_draft, draft, target), offset, DTYPE, ALIGNED)
        return tl.load(pointer + ids, mask=mask, other=float("-inf")).to(tl.float32)
    else:
        of_target = row_pointer(target, tl.where(is_draft, 0, offset), DTYPE, ALIGNED)
        of_target = tl.load(of_target + ids, mask=mask & (is_draft == 0), other=float("-inf"))
        of_draft = row_pointer(draft, tl.where(is_draft, offset, 0), DRAFT_DTYPE, ALIGNED)
        of_draft = tl.load(of_draft + ids, mask=mask & is_draft, other=float("-inf"))
        return tl.where(is_draft, of_draft.to(tl.float32), of_target.to(tl.float32))


# ---- The largest logits of chunks ----


@triton.jit
def survey_block(pointer, maxima, block_max, mass, size, scale, weighs, MASKED: tl.constexpr):
    """Leaves the largest logits of a block and of its chunks, NaN where a chunk has one, and its mass."""
    ids = ids_of_block()
    if MASKED:
        x = tl.load(pointer + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(pointer + ids).to(tl.float32)
    of_chunks = tl.max(tl.where(x == x, x, float("-inf")), axis=1)
    has_nan = tl.max(tl.where(x != x, 1, 0), axis=1) != 0
    largest = tl.max(of_chunks, axis=0)
    place = tl.arange(0, CHUNKS_PER_BLOCK)
    tl.store(maxima.to(tl.pointer_type(tl.float32)) + place, tl.where(has_nan, float("nan"), of_chunks))
    tl.store(block_max.to(tl.pointer_type(tl.float32)), largest)
    if weighs:
        total = tl.sum(tl.sum(masses_of(x, largest, scale), axis=1), axis=0)
        tl.store(mass.to(tl.pointer_type(tl.float64)), tl.where(largest > float("-inf"), total, 0.0))


@kernel
def survey_rows(
    cu: tl.int64, cu_stride: tl.int64,
    indices: tl.int64, indices_stride: tl.int64,
    temperature: tl.int64, temperature_stride: tl.int64,
    draft_temperature: tl.int64, draft_temperature_stride: tl.int64,
    has_draft_law: tl.int64, has_draft_law_stride: tl.int64,
    wide: tl.int32, batch: tl.int32, num_drafts: tl.int64, most_drafts: tl.int64, num_entries: tl.int64,
    has_bonus_rows: tl.int32, has_random_numbers: tl.int32,
    target: tl.int64, target_stride: tl.int64,
    draft: tl.int64, draft_stride: tl.int64, draft_entry_stride: tl.int64, draft_slot_stride: tl.int64,
    vocab_size: tl.int32, num_blocks: tl.int32, num_target_rows: tl.int64,
    top_k: tl.int64, top_k_stride: tl.int64, top_p: tl.int64, top_p_stride: tl.int64,
    min_p: tl.int64, min_p_stride: tl.int64,
    draft_top_k: tl.int64, draft_top_k_stride: tl.int64, draft_top_p: tl.int64, draft_top_p_stride: tl.int64,
    draft_min_p: tl.int64, draft_min_p_stride: tl.int64, flags: tl.int32,
    masses: tl.int64, block_maxima: tl.int64, chunk_maxima: tl.int64,
    DTYPE: tl.constexpr, DRAFT_DTYPE: tl.constexpr, LAW: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A block of a row that has filters."""
    number = tl.program_id(0) // num_blocks
    block = tl.program_id(0) - number * num_blocks
    is_needed, is_draft, _slot, _first_draft, entry, greedy, scale, row, offset = row_of_program(
        number, flags & OF_TARGETS, flags & OF_DRAFTS,
        cu, cu_stride, indices, indices_stride, temperature, temperature_stride,
        draft_temperature, draft_temperature_stride, has_draft_law, has_draft_law_stride,
        wide, batch, num_drafts, most_drafts, num_entries, has_bonus_rows, has_random_numbers,
        target_stride, draft_stride, draft_entry_stride, draft_slot_stride, num_target_rows, LAW,
    )  # fmt: skip
    k, p, m = load_filters(
        entry, is_draft, vocab_size, flags,
        top_k, top_k_stride, top_p, top_p_stride, min_p, min_p_stride,
        draft_top_k, draft_top_k_stride, draft_top_p, draft_top_p_stride, draft_min_p, draft_min_p_stride,
    )  # fmt: skip
    if is_needed & (greedy == 0) & ((k > 0) | (p < 1.0) | (m > 0.0)):
        weighs = (p < 1.0) & (((flags & JOINT) != 0) | ((k == 0) & (m == 0.0)))
        begin = block * BLOCK_SIZE
        size = tl.minimum(vocab_size - begin, BLOCK_SIZE)
        place = row * num_blocks + block
        block_max = block_maxima + 4 * place
        maxima = chunk_maxima + 4 * place * CHUNKS_PER_BLOCK
        mass = masses + 8 * place
        if DTYPE == DRAFT_DTYPE:
            pointer = row_pointer(tl.where(is_draft, draft, target), offset + begin, DTYPE, ALIGNED)
            if size == BLOCK_SIZE:
                survey_block(pointer, maxima, block_max, mass, size, scale, weighs, False)
            else:
                survey_block(pointer, maxima, block_max, mass, size, scale, weighs, True)
        elif is_draft:
            drafts = row_pointer(draft, offset + begin, DRAFT_DTYPE, ALIGNED)
            survey_block(drafts, maxima, block_max, mass, size, scale, weighs, True)
        else:
            targets = row_pointer(target, offset + begin, DTYPE, ALIGNED)
            survey_block(targets, maxima, block_max, mass, size, scale, weighs, True)


# ---- Where rows are cut ----


@triton.jit
def mass_in_order(masses, weights, of_blocks, num_blocks):
    """The mass of a row as the definition adds it: block by block. Masses and weights of parts of blocks."""
    total = tl.full([], 0.0, tl.float64)
    for block in range(num_blocks):
        is_own = of_blocks == block
        mass = tl.sum(tl.where(is_own, masses, 0.0), axis=0)
        weight = tl.max(tl.where(is_own, weights, 0.0), axis=0)
        total = tl.where(mass > 0, tl.fma(mass, weight, total), total)
    return total


@triton.jit
def mass_of_row(masses, block_maxima, largest, scale, num_blocks, in_order):
    """The mass of a whole row by those of its blocks, in the definition's order or not."""
    blocks = tl.arange(0, _MOST_BLOCKS)
    inside = blocks < num_blocks
    of_blocks = tl.load(masses.to(tl.pointer_type(tl.float64)) + blocks, mask=inside, other=0.0)
    maxima = block_maxima.to(tl.pointer_type(tl.float32)) + blocks
    weights = block_weight(tl.load(maxima, mask=inside, other=float("-inf")), largest, scale)
    total = tl.sum(of_blocks * weights, axis=0)
    if in_order:
        total = mass_in_order(of_blocks, weights, blocks, num_blocks)
    return total


@triton.jit
def tile_of_row(keys, wanted, first, least, UNIT: tl.constexpr, TILE: tl.constexpr):
    """A floor by order that TILE chunks at most reach up to, and `wanted` of them where that can be had.

    Returns it with the places of these chunks and how many there are.
    """
    low, high = least, first
    found = tl.full([], 0, tl.int32)
    if tl.sum(tl.where(keys >= least.to(tl.int32), 1, 0), axis=0) <= TILE:
        high = least
    else:
        while (high - low > UNIT) & (found < wanted):
            middle = low + (high - low) // (2 * UNIT) * UNIT
            count = tl.sum(tl.where(keys >= middle.to(tl.int32), 1, 0), axis=0)
            is_few = count <= TILE
            found = tl.where(is_few, count, found)
            high = tl.where(is_few, middle, high)
            low = tl.where(is_few, low, middle)
    reaches = tl.where(keys >= high.to(tl.int32), 1, 0)
    prefix = tl.cumsum(reaches, axis=0)
    # The place of a chunk is how many prefixes do not exceed its number, which is found by halves.
    number = tl.arange(0, TILE)
    chunks = tl.full([TILE], 0, tl.int32)
    for e in tl.static_range(_LOG2_MOST_CHUNKS):
        is_before = tl.gather(prefix, chunks + ((_MOST_CHUNKS >> (e + 1)) - 1), 0) <= number
        chunks += tl.where(is_before, _MOST_CHUNKS >> (e + 1), 0)
    return high, chunks, tl.sum(reaches, axis=0)


@triton.jit
def count_from(keys, order):
    return tl.sum(tl.sum(tl.where(keys >= order.to(tl.int32), 1, 0), axis=1), axis=0)


@triton.jit
def masses_from(keys, units, order):
    """Of each chunk, from a logit on by order."""
    return tl.sum(tl.where(keys >= order.to(tl.int32), units, 0.0), axis=1)


@triton.jit
def threshold_by_tile(
    target, draft, offset, is_draft, block_maxima, chunk_maxima, masses, num_blocks, vocab_size,
    largest, scale, k, p, order, weighs_row,
    DTYPE: tl.constexpr, DRAFT_DTYPE: tl.constexpr, ALIGNED: tl.constexpr, UNIT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The threshold of a row by order, `order` at least, and whether its largest chunks were enough."""
    places = tl.arange(0, _MOST_CHUNKS)
    of_chunks = chunk_maxima.to(tl.pointer_type(tl.float32)) + places
    of_chunks = tl.load(of_chunks, mask=places < num_blocks * CHUNKS_PER_BLOCK, other=float("-inf"))
    least = tl.full([], -(_LARGEST_ORDER // UNIT * UNIT), tl.int64)
    first = order_of(largest).to(tl.int64) + UNIT
    wanted_chunks = tl.minimum(tl.maximum(k, TILE * 3 // 4), TILE).to(tl.int32)
    floor, chunks, num_listed = tile_of_row(order_of(of_chunks), wanted_chunks, first, least, UNIT, TILE)

    is_listed = tl.arange(0, TILE) < num_listed
    chunks = tl.where(is_listed, chunks, 0)
    ids = chunks[:, None] * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)[None, :]
    keys = order_of(
        load_logits(
            target, draft, offset, is_draft, ids, is_listed[:, None] & (ids < vocab_size),
            DTYPE, DRAFT_DTYPE, ALIGNED,
        )
    )  # fmt: skip
    is_whole = floor == least
    enough = num_listed >= 0
    if k > 0:
        if count_from(keys, floor) >= k:
            low, high = floor, first
            while high - low > UNIT:
                middle = low + (high - low) // (2 * UNIT) * UNIT
                holds = count_from(keys, middle) >= k
                low = tl.where(holds, middle, low)
                high = tl.where(holds, high, middle)
            order = tl.maximum(order, low)
        else:
            enough = is_whole
    if enough & (p < 1.0):
        of_blocks = chunks // CHUNKS_PER_BLOCK
        maxima = tl.load(block_maxima.to(tl.pointer_type(tl.float32)) + of_blocks)
        weights = block_weight(maxima, largest, scale)
        units = masses_of(float_of_order(keys), maxima[:, None], scale)
        if weighs_row == 0:
            # Of what the other filters leave.
            units = tl.where(keys >= order.to(tl.int32), units, 0.0)
            enough = is_whole | (order >= floor)
        wanted = tl.sum(tl.sum(units, axis=1) * weights, axis=0)
        if weighs_row:
            wanted = mass_of_row(masses, block_maxima, largest, scale, num_blocks, False)
        wanted = p * wanted
        near = _NEAR * wanted
        from_floor = tl.sum(masses_from(keys, units, floor) * weights, axis=0)
        if wanted <= 0.0:
            order = first - UNIT
        elif enough & (from_floor - wanted > near):
            low, high = floor, first
            while high - low > UNIT:
                middle = low + (high - low) // (2 * UNIT) * UNIT
                from_middle = masses_from(keys, units, middle)
                excess = tl.sum(from_middle * weights, axis=0) - wanted
                if tl.abs(excess) <= near:
                    exact = tl.full([], 0.0, tl.float64)
                    if weighs_row:
                        exact = mass_of_row(masses, block_maxima, largest, scale, num_blocks, True)
                    else:
                        exact = mass_in_order(tl.sum(units, axis=1), weights, of_blocks, num_blocks)
                    excess = mass_in_order(from_middle, weights, of_blocks, num_blocks) - p * exact
                low = tl.where(excess >= 0.0, middle, low)
                high = tl.where(excess >= 0.0, high, middle)
            order = tl.maximum(order, low)
        else:
            # It lies below the floor, which is of no concern where other filters cut above.
            enough = order >= floor
    return order, enough


@triton.jit
def measure(
    target, draft, offset, is_draft, block_maxima, num_blocks, vocab_size, largest, scale,
    probes, order, weighs,
    DTYPE: tl.constexpr, DRAFT_DTYPE: tl.constexpr, ALIGNED: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """By a pass: how many ids there are from each of some logits on, or the mass of those from `order` on."""
    tries = tl.arange(0, PROBES)
    least = tl.min(probes, axis=0)
    totals = tl.full([PROBES], 0.0, tl.float64)
    ids = ids_of_block()
    for block in range(num_blocks):
        block_max = tl.load((block_maxima + 4 * block).to(tl.pointer_type(tl.float32)))
        if order_of(block_max).to(tl.int64) >= least:
            begin = block * BLOCK_SIZE
            x = load_logits(
                target, draft, offset + begin, is_draft, ids, ids < vocab_size - begin,
                DTYPE, DRAFT_DTYPE, ALIGNED,
            )  # fmt: skip
            keys = order_of(x)
            units = tl.full([CHUNKS_PER_BLOCK, CHUNK_SIZE], 1.0, tl.float64)
            weight = tl.full([], 1.0, tl.float64)
            if weighs == 1:
                units = tl.where(keys >= order.to(tl.int32), masses_of(x, block_max, scale), 0.0)
                weight = block_weight(block_max, largest, scale)
            of_block = tl.full([PROBES], 0.0, tl.float64)
            for i in range(PROBES):
                probe = at(probes, tries, i).to(tl.int32)
                total = tl.sum(tl.sum(tl.where(keys >= probe, units, 0.0), axis=1), axis=0)
                of_block = tl.where(tries == i, total, of_block)
            totals = tl.where(of_block > 0, tl.fma(of_block, weight, totals), totals)
    return totals


@triton.jit
def threshold_by_passes(
    target, draft, offset, is_draft, block_maxima, num_blocks, vocab_size, largest, scale, k, p, order,
    is_joint,
    DTYPE: tl.constexpr, DRAFT_DTYPE: tl.constexpr, ALIGNED: tl.constexpr, UNIT: tl.constexpr,
    PROBES: tl.constexpr,
):  # fmt: skip
    """The threshold of a row by order, `order` at least. Sums are the definition's."""
    tries = tl.arange(0, PROBES)
    least = tl.full([], -(_LARGEST_ORDER // UNIT * UNIT), tl.int64)
    top = order_of(largest).to(tl.int64)
    for weighs in range(2):
        if tl.where(weighs == 1, p < 1.0, k > 0):
            # The least of all, then by value.
            distance = (PROBES - tries).to(tl.float32) * tl.div_rn(
                tl.full([], _FIRST_STEP, tl.float32), scale
            )
            probes = tl.maximum(order_of(largest - distance).to(tl.int64), least)
            probes = tl.where(tries == 0, least, (probes - least) // UNIT * UNIT + least)
            floor = tl.where(is_joint, least, order)
            wanted = k.to(tl.float64)
            low, high = least, top + UNIT
            is_first = num_blocks > 0
            is_open = is_first
            while is_open:
                totals = measure(
                    target, draft, offset, is_draft, block_maxima, num_blocks, vocab_size, largest, scale,
                    probes, floor, weighs, DTYPE, DRAFT_DTYPE, ALIGNED, PROBES,
                )  # fmt: skip
                if is_first & (weighs == 1):
                    wanted = p * at(totals, tries, 0)
                num_held = tl.sum(tl.where(totals >= wanted, 1, 0), axis=0)
                low = tl.where(num_held > 0, at(probes, tries, num_held - 1), low)
                high = tl.where(num_held < PROBES, at(probes, tries, num_held), high)
                if num_held == 0:
                    # There are fewer ids than top-k wants.
                    low = tl.where(is_first, tl.full([], _ORDER_OF_MASKED, tl.int64), low)
                is_open = (high - low > UNIT) & (low >= least)
                is_first = num_blocks < 0
                between = ((high - low) // UNIT + PROBES) // (PROBES + 1) * UNIT
                probes = tl.minimum(low + between * (tries + 1), high)
            order = tl.maximum(order, tl.where((weighs == 1) & (wanted <= 0.0), top, low))
    return order


@kernel
def find_thresholds(
    cu: tl.int64, cu_stride: tl.int64,
    indices: tl.int64, indices_stride: tl.int64,
    temperature: tl.int64, temperature_stride: tl.int64,
    draft_temperature: tl.int64, draft_temperature_stride: tl.int64,
    has_draft_law: tl.int64, has_draft_law_stride: tl.int64,
    wide: tl.int32, batch: tl.int32, num_drafts: tl.int64, most_drafts: tl.int64, num_entries: tl.int64,
    has_bonus_rows: tl.int32, has_random_numbers: tl.int32,
    target: tl.int64, target_stride: tl.int64,
    draft: tl.int64, draft_stride: tl.int64, draft_entry_stride: tl.int64, draft_slot_stride: tl.int64,
    vocab_size: tl.int32, num_blocks: tl.int32, num_target_rows: tl.int64,
    top_k: tl.int64, top_k_stride: tl.int64, top_p: tl.int64, top_p_stride: tl.int64,
    min_p: tl.int64, min_p_stride: tl.int64,
    draft_top_k: tl.int64, draft_top_k_stride: tl.int64, draft_top_p: tl.int64, draft_top_p_stride: tl.int64,
    draft_min_p: tl.int64, draft_min_p_stride: tl.int64, flags: tl.int32,
    masses: tl.int64, block_maxima: tl.int64, chunk_maxima: tl.int64,
    thresholds: tl.int64, draft_thresholds: tl.int64,
    DTYPE: tl.constexpr, DRAFT_DTYPE: tl.constexpr, LAW: tl.constexpr, ALIGNED: tl.constexpr,
    UNIT: tl.constexpr, TILE: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """Where a row is cut: -inf where it is not. UNIT divides what a logit's order can be."""
    is_needed, is_draft, slot, first_draft, entry, greedy, scale, row, offset = row_of_program(
        tl.program_id(0), flags & OF_TARGETS, flags & OF_DRAFTS,
        cu, cu_stride, indices, indices_stride, temperature, temperature_stride,
        draft_temperature, draft_temperature_stride, has_draft_law, has_draft_law_stride,
        wide, batch, num_drafts, most_drafts, num_entries, has_bonus_rows, has_random_numbers,
        target_stride, draft_stride, draft_entry_stride, draft_slot_stride, num_target_rows, LAW,
    )  # fmt: skip
    k, p, m = load_filters(
        entry, is_draft, vocab_size, flags,
        top_k, top_k_stride, top_p, top_p_stride, min_p, min_p_stride,
        draft_top_k, draft_top_k_stride, draft_top_p, draft_top_p_stride, draft_min_p, draft_min_p_stride,
    )  # fmt: skip
    if is_needed:
        order = tl.full([], _ORDER_OF_MASKED, tl.int64)
        if (greedy == 0) & ((k > 0) | (p < 1.0) | (m > 0.0)):
            first_block = row * num_blocks
            chunks = chunk_maxima + 4 * first_block * CHUNKS_PER_BLOCK
            blocks = block_maxima + 4 * first_block
            largest = tl.full([], float("-inf"), tl.float32)
            has_nan = tl.full([], 0, tl.int32)
            places = tl.arange(0, _MOST_CHUNKS)
            for begin in range(0, num_blocks * CHUNKS_PER_BLOCK, _MOST_CHUNKS):
                maxima = chunks.to(tl.pointer_type(tl.float32)) + begin + places
                inside = begin + places < num_blocks * CHUNKS_PER_BLOCK
                maxima = tl.load(maxima, mask=inside, other=float("-inf"))
                has_nan = tl.maximum(has_nan, tl.max(tl.where(maxima != maxima, 1, 0), axis=0))
                numbers = tl.where(maxima == maxima, maxima, float("-inf"))
                largest = tl.maximum(largest, tl.max(numbers, axis=0))
            if (has_nan == 0) & (tl.abs(largest) < float("inf")):
                is_joint = (flags & JOINT) != 0
                weighs_row = is_joint | ((k == 0) & (m == 0.0))
                if m > 0.0:
                    order = min_p_order(largest, scale, m).to(tl.int64)
                if (k > 0) | (p < 1.0):
                    enough = num_blocks <= _MOST_BLOCKS
                    found = order
                    if enough:
                        found, enough = threshold_by_tile(
                            target, draft, offset, is_draft, blocks, chunks, masses + 8 * first_block,
                            num_blocks, vocab_size, largest, scale, k, p, order, weighs_row,
                            DTYPE, DRAFT_DTYPE, ALIGNED, UNIT, TILE,
                        )  # fmt: skip
                    if enough == 0:
                        found = threshold_by_passes(
                            target, draft, offset, is_draft, blocks, num_blocks, vocab_size, largest, scale,
                            k, p, order, is_joint, DTYPE, DRAFT_DTYPE, ALIGNED, UNIT, PROBES,
                        )  # fmt: skip
                    order = found
        of_draft = draft_thresholds + 4 * (first_draft + slot)
        place = tl.where(is_draft, of_draft, thresholds + 4 * row).to(tl.pointer_type(tl.float32))
        tl.store(place, float_of_order(order.to(tl.int32)))


# ---- What is left of rows ----


@triton.jit
def defined_sum_of_kept(pointer, maxima, size, reference, scale, threshold):
    """The sum of a block's weights as docs/numerics.md has it, of the chunks that are looked at."""
    sums = tl.full([NUM_LANES], 0.0, tl.float32)
    for row in tl.range(0, 16, loop_unroll_factor=4):
        i = row * NUM_LANES + tl.arange(0, NUM_LANES)
        of_chunks = (maxima + 4 * (i // CHUNK_SIZE)).to(tl.pointer_type(tl.float32))
        reaches = (maxima == 0) | (tl.load(of_chunks, mask=maxima != 0, other=0.0) >= threshold)
        x = tl.load(pointer + i, mask=(i < size) & reaches, other=float("-inf")).to(tl.float32)
        polynomial, power = weight_factors(cut(x, threshold, True), reference, scale)
        sums = tl.fma(polynomial, power, sums)
    return flush(sum_by_halves(sums))


@triton.jit
def kept_stats(
    pointer, maxima, chunks, size, scale, threshold, finds_index, needs_sum, is_exact, MASKED: tl.constexpr
):  # fmt: skip
    """block_stats of what a threshold leaves. Chunks whose largest logit lies below it are not read."""
    ids = ids_of_block()
    place = tl.arange(0, CHUNKS_PER_BLOCK)
    of_chunks = tl.load((maxima + 4 * place).to(tl.pointer_type(tl.float32)), mask=maxima != 0, other=0.0)
    reaches = ((maxima == 0) | (of_chunks >= threshold))[:, None]
    if MASKED:
        reaches = reaches & (ids < size)
    x = tl.load(pointer + ids, mask=reaches, other=float("-inf")).to(tl.float32)
    x = cut(x, threshold, True)
    largest = tl.max(tl.max(tl.where(x == x, x, float("-inf")), axis=1), axis=0)
    total = tl.full([], 0.0, tl.float32)
    index = tl.full([], 0, tl.int32)
    if needs_sum:
        sums = flush(tl.sum(quick_weights(x, largest, scale), axis=1))
        total = tl.sum(sums, axis=0)
        if chunks != 0:
            tl.store(chunks.to(tl.pointer_type(tl.float32)) + place, sums)
        if is_exact:
            reference = tl.where(largest > float("-inf"), largest, 0.0)
            total = defined_sum_of_kept(pointer, maxima, size, reference, scale, threshold)
    if finds_index:
        index = tl.min(tl.min(tl.where(x == largest, ids, BLOCK_SIZE), axis=1), axis=0)
        odd = tl.where((x != x) | (x == float("inf")), 1, 0)
        total = tl.where(tl.max(tl.max(odd, axis=1), axis=0) != 0, float("nan"), total)
    return largest, total, index


@triton.jit
def read_kept_block(
    pointer, stats, plane, place, maxima, block_max, chunks, size, scale, threshold, finds_index, needs_sum,
    is_exact,
):  # fmt: skip
    """Stores the numbers of what is left of a block; `maxima` of its chunks, 0 where they are not known."""
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    index = tl.full([], 0, tl.int32)
    block_max = tl.load(block_max.to(tl.pointer_type(tl.float32)), mask=maxima != 0, other=float("inf"))
    if (maxima != 0) & (block_max < threshold):
        if chunks != 0:
            places = chunks.to(tl.pointer_type(tl.float32)) + tl.arange(0, CHUNKS_PER_BLOCK)
            tl.store(places, tl.full([CHUNKS_PER_BLOCK], 0.0, tl.float32))
    elif size == BLOCK_SIZE:
        largest, total, index = kept_stats(
            pointer, maxima, chunks, size, scale, threshold, finds_index, needs_sum, is_exact, False
        )
    else:
        largest, total, index = kept_stats(
            pointer, maxima, chunks, size, scale, threshold, finds_index, needs_sum, is_exact, True
        )
    numbers = stats.to(tl.pointer_type(tl.float32)) + place
    tl.store(numbers, largest)
    tl.store(numbers + plane, total)
    tl.store(numbers + 2 * plane, index.to(tl.float32))


@kernel
def read_kept_rows(
    cu: tl.int64, cu_stride: tl.int64,
    indices: tl.int64, indices_stride: tl.int64,
    temperature: tl.int64, temperature_stride: tl.int64,
    draft_temperature: tl.int64, draft_temperature_stride: tl.int64,
    has_draft_law: tl.int64, has_draft_law_stride: tl.int64,
    wide: tl.int32, batch: tl.int32, num_drafts: tl.int64, most_drafts: tl.int64, num_entries: tl.int64,
    has_bonus_rows: tl.int32, has_random_numbers: tl.int32,
    target: tl.int64, target_stride: tl.int64,
    draft: tl.int64, draft_stride: tl.int64, draft_entry_stride: tl.int64, draft_slot_stride: tl.int64,
    vocab_size: tl.int32, num_blocks: tl.int32, num_target_rows: tl.int64, reads_drafts: tl.int32,
    needs_law: tl.int32, is_exact: tl.int32, stats: tl.int64, plane: tl.int64,
    thresholds: tl.int64, draft_thresholds: tl.int64, draft_thresholds_stride: tl.int64,
    draft_thresholds_entry_stride: tl.int64, draft_thresholds_slot_stride: tl.int64, flags: tl.int32,
    block_maxima: tl.int64, chunk_maxima: tl.int64,
    DTYPE: tl.constexpr, DRAFT_DTYPE: tl.constexpr, LAW: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """read_rows, of what thresholds leave of each row: a block to a program."""
    number = tl.program_id(0) // num_blocks
    block = tl.program_id(0) - number * num_blocks
    is_needed, is_draft, slot, first_draft, entry, greedy, scale, row, offset = row_of_program(
        number, 1, reads_drafts,
        cu, cu_stride, indices, indices_stride, temperature, temperature_stride,
        draft_temperature, draft_temperature_stride, has_draft_law, has_draft_law_stride,
        wide, batch, num_drafts, most_drafts, num_entries, has_bonus_rows, has_random_numbers,
        target_stride, draft_stride, draft_entry_stride, draft_slot_stride, num_target_rows, LAW,
    )  # fmt: skip
    if is_needed:
        of_draft = (
            first_draft * draft_thresholds_stride + entry * draft_thresholds_entry_stride
            + slot * draft_thresholds_slot_stride
        )  # fmt: skip
        threshold = load_threshold(
            tl.where(is_draft, draft_thresholds, thresholds), tl.where(is_draft, of_draft, 4 * row), True
        )
        needs_sum = is_draft | (greedy == 0) | (needs_law != 0)
        begin = block * BLOCK_SIZE
        size = tl.minimum(vocab_size - begin, BLOCK_SIZE)
        place = row * num_blocks + block
        chunks = tl.where(is_draft, 0, chunk_sums_of(stats, plane, place))
        was_surveyed = tl.where(is_draft, flags & OF_DRAFTS, flags & OF_TARGETS) != 0
        maxima = chunk_maxima + 4 * place * CHUNKS_PER_BLOCK
        maxima = tl.where(was_surveyed & (threshold > float("-inf")), maxima, 0)
        block_max = block_maxima + 4 * place
        if DTYPE == DRAFT_DTYPE:
            pointer = row_pointer(tl.where(is_draft, draft, target), offset + begin, DTYPE, ALIGNED)
            read_kept_block(
                pointer, stats, plane, place, maxima, block_max, chunks, size, scale, threshold, greedy,
                needs_sum, is_exact,
            )  # fmt: skip
        elif is_draft:
            drafts = row_pointer(draft, offset + begin, DRAFT_DTYPE, ALIGNED)
            read_kept_block(
                drafts, stats, plane, place, maxima, block_max, chunks, size, scale, threshold, greedy,
                needs_sum, is_exact,
            )  # fmt: skip
        else:
            targets = row_pointer(target, offset + begin, DTYPE, ALIGNED)
            read_kept_block(
                targets, stats, plane, place, maxima, block_max, chunks, size, scale, threshold, greedy,
                needs_sum, is_exact,
            )  # fmt: skip


# ---- From tensors to launches ----

_Numbers = tuple[int, ...]
#: Of logits of a dtype, what divides the order of each.
_UNITS = {tl.float32: 1, tl.float16: 1 << 13, tl.bfloat16: 1 << 16}
_NAMES = ("top_k", "top_p", "min_p")
_NO_FILTERS = (0,) * 2 * len(_NAMES)


class FilterArguments(NamedTuple):
    """What an op is given to mask rows with."""

    of_target: tuple[Tensor | None, Tensor | None, Tensor | None]
    of_drafts: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    draft_thresholds: Tensor | None = None
    is_joint: bool = False


class Filters:
    """What masks the rows of a call: filters of the target and of the drafts, or thresholds of the drafts."""

    def __init__(self) -> None:
        """None of them."""
        self.flags = 0
        self.of_target: _Numbers = _NO_FILTERS
        self.of_drafts: _Numbers = _NO_FILTERS
        #: Of rows of the target: an address, 0 where they are whole.
        self.thresholds = 0
        #: Of drafts: an address, and the strides of a draft, an entry and a slot.
        self.draft_thresholds: _Numbers = (0, 0, 0, 0)
        #: Keeps what the addresses lead to.
        self.workspace: Tensor | None = None

    def without_drafts(self) -> Filters | None:
        """Those of the target; None if it has none."""
        self.flags &= ~OF_DRAFTS.value
        self.draft_thresholds = (0, 0, 0, 0)
        return self if self.flags & OF_TARGETS.value else None

    def find_thresholds(
        self,
        target: Tensor,
        request: _Numbers,
        rows: _Numbers,
        own: _Numbers,
        plane: int,
        constants: tuple[Any, ...],
        num_units: int,
    ) -> tuple[int, int]:
        """The launches that find thresholds by filters: see :meth:`read_rows`.

        Returns where the largest logits of blocks and those of chunks are.
        """
        _, row_blocks, num_target_rows = own
        num_rows = plane // row_blocks
        # Masses, then numbers of half their size.
        size = plane + (plane * (1 + CHUNKS_PER_BLOCK.value) + num_rows + 1) // 2
        self.workspace = target.new_empty(size, dtype=torch.float64)
        masses = self.workspace.data_ptr()
        block_maxima = masses + 8 * plane
        chunk_maxima = block_maxima + 4 * plane
        thresholds = chunk_maxima + 4 * plane * CHUNKS_PER_BLOCK.value
        if self.flags & OF_TARGETS.value and not self.thresholds:
            self.thresholds = thresholds
        if self.flags & OF_DRAFTS.value:
            self.draft_thresholds = (thresholds + 4 * num_target_rows, 4, 0, 4)
        kinds = 2 if (self.flags & OF_TARGETS.value) and (self.flags & OF_DRAFTS.value) else 1
        filters = (*self.of_target, *self.of_drafts, self.flags)
        workspace = (masses, block_maxima, chunk_maxima)
        launch_prepared(
            survey_rows, kinds * num_units * row_blocks, target,
            (*request, *rows, *own, *filters, *workspace), constants, READER,
        )  # fmt: skip
        dtype, draft_dtype, *_ = constants
        unit = min(_UNITS[dtype], _UNITS[draft_dtype])
        launch_prepared(
            find_thresholds, kinds * num_units, target,
            (*request, *rows, *own, *filters, *workspace, self.thresholds, self.draft_thresholds[0]),
            (*constants, unit), SEARCH,
        )  # fmt: skip
        return block_maxima, chunk_maxima

    def read_rows(
        self,
        target: Tensor,
        request: _Numbers,
        rows: _Numbers,
        own: _Numbers,
        law: _Numbers,
        constants: tuple[Any, ...],
        num_units: int,
    ) -> None:
        """The launches that find thresholds and then read rows.

        ``request``, ``rows`` and ``own``: arguments that the kernels have in common, in this order. ``law``:
        those of :func:`read_kept_rows` from ``reads_drafts`` to ``plane``. ``num_units``: how many rows of
        either kind there may be.
        """
        _, row_blocks, _ = own
        reads_drafts, plane = law[0], law[-1]
        block_maxima = chunk_maxima = 0
        if self.flags & (OF_TARGETS.value | OF_DRAFTS.value):
            block_maxima, chunk_maxima = self.find_thresholds(
                target, request, rows, own, plane, constants, num_units
            )
        launch_prepared(
            read_kept_rows, (2 if reads_drafts else 1) * num_units * row_blocks, target,
            (*request, *rows, *own, *law, self.thresholds, *self.draft_thresholds, self.flags, block_maxima,
             chunk_maxima),
            constants, READER,
        )  # fmt: skip


def filters_of(chain: Chain, arguments: FilterArguments, entries: Entries) -> Filters | None:
    """The filters of a call, once its draft law is known; None where there are none."""
    checks, filters = chain.checks, Filters()
    filters.of_target = _views(checks, arguments.of_target, "", entries)
    filters.of_drafts = _views(checks, arguments.of_drafts, "draft_", entries)
    if any(filters.of_target):
        filters.flags |= OF_TARGETS.value
    has_logits = chain.law == LOGITS.value
    given = [f"draft_{n}" for n, v in zip(_NAMES, arguments.of_drafts, strict=True) if v is not None]
    if given:
        checks.require(has_logits, f"{given[0]} must be given with draft_logits, got it without")
        checks.require(
            "lse" not in chain.draft_views,
            f"draft_logsumexp of filtered rows must be given with draft_thresholds, got {given[0]}",
        )
        filters.flags |= OF_DRAFTS.value
    thresholds = arguments.draft_thresholds
    if thresholds is not None:
        checks.require(has_logits, "draft_thresholds must be given with draft_logits, got it without")
        checks.require(
            not given, f"draft_thresholds and {given[0] if given else ''} must be at most one, got both"
        )
        checks.float32(thresholds, "draft_thresholds")
        filters.draft_thresholds = chain.draft_numbers(thresholds, "draft_thresholds", entries)
    if filters.flags == 0 and thresholds is None:
        return None
    for tensor, wide in (
        (arguments.of_target[0], WIDE_TOP_K),
        (arguments.of_drafts[0], WIDE_DRAFT_TOP_K),
    ):
        if tensor is not None and tensor.dtype == torch.int64:
            filters.flags |= wide.value
    if arguments.is_joint:
        filters.flags |= JOINT.value
    return filters


def _views(checks: ChainChecks, given: tuple[Tensor | None, ...], prefix: str, entries: Entries) -> _Numbers:
    """Addresses and strides."""
    numbers: list[int] = []
    for name, tensor in zip(_NAMES, given, strict=True):
        if tensor is None:
            numbers += (0, 0)
            continue
        if name == "top_k":
            checks.integer(tensor, prefix + name)
        else:
            checks.float32(tensor, prefix + name)
        checks.vector(tensor, prefix + name, entries.shape, entries.size)
        numbers += (tensor.data_ptr(), tensor.stride(0) * tensor.element_size())
    return tuple(numbers)

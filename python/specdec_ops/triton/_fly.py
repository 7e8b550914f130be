"""FLy: a rejected draft is accepted all the same where the target is undecided and accepts what follows."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_ops.triton._filters import cut, load_threshold
from specdec_ops.triton._launch import kernel
from specdec_ops.triton._laws import at, law_of_row, log2_prob
from specdec_ops.triton._numerics import LN2, exp2_f64, log2_scale
from specdec_ops.triton._rows import BLOCK_SIZE, ONE_HOT, ids_of_block, load_entry, load_request, row_pointer

#: How the kernel is launched.
GATE = {"num_warps": 4}


@kernel
def find_entropies(
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
    batch: tl.int32, window: tl.int64, top_k: tl.int32, thresholds: tl.int64, entropies: tl.int64,
    DTYPE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The entropy of one row over its most probable ids, where a whole window of drafts follows."""
    r = (tl.program_id(0) % batch).to(tl.int64)
    slot = (tl.program_id(0) // batch).to(tl.int64)
    _first_draft, count, first_row = load_request(
        r, cu, cu_stride, wide, num_drafts, most_drafts, has_bonus_rows
    )
    _entry, _greedy, _has_law, t, _draft_t = load_entry(
        r, indices, indices_stride, temperature, temperature_stride,
        draft_temperature, draft_temperature_stride, has_draft_law, has_draft_law_stride,
        wide, num_entries, has_random_numbers, ONE_HOT,
    )  # fmt: skip
    if slot + window < count:
        row = first_row + slot
        scale = log2_scale(t)
        blocks = tl.arange(0, NUM_BLOCKS)
        # Of each block, the largest logit that does not count yet.
        rest, _sums, _is_law, value, reference, log2_total = law_of_row(
            stats, plane, row, num_blocks, scale, NUM_BLOCKS
        )
        pointer = row_pointer(target, row * target_stride, DTYPE, False)
        threshold = load_threshold(thresholds, 4 * row, True)
        ids = ids_of_block()
        bits = tl.full([], 0.0, tl.float64)
        left = top_k
        while (left > 0) & (value > float("-inf")):
            equal = left * 0
            block = tl.min(tl.where(rest == value, blocks, NUM_BLOCKS), axis=0)
            while block < num_blocks:
                size = vocab_size - block * BLOCK_SIZE
                x = tl.load(pointer + block * BLOCK_SIZE + ids, mask=ids < size, other=float("-inf"))
                x = cut(x.to(tl.float32), threshold, True)
                equal += tl.sum(tl.sum(tl.where(x == value, 1, 0), axis=1), axis=0)
                below = tl.max(tl.max(tl.where(x < value, x, float("-inf")), axis=1), axis=0)
                rest = tl.where(blocks == block, below, rest)
                block = tl.min(tl.where(rest == value, blocks, NUM_BLOCKS), axis=0)
            log2_of_value = log2_prob(value, reference, scale, log2_total)
            prob = exp2_f64(log2_of_value)
            for _repeat in range(tl.minimum(equal, left)):
                bits = tl.fma(prob, -log2_of_value, bits)
            left -= equal
            value = tl.max(rest, axis=0)
        entropy = tl.where(bits > 0, bits * LN2, 0.0)
        tl.store(entropies.to(tl.pointer_type(tl.float64)) + row, entropy)


@triton.jit
def walk_windows(accepted, may_defer, present, places, begin, held, window, WAVE: tl.constexpr):
    """Goes through a wave, `held` being the deferred draft whose window is open, or -1.

    Returns the place of the draft that the rule rejects for good, or WAVE; the place of the last draft that
    was rejected or deferred outside of a window, or -1; and which draft is held now.
    """
    last = tl.full([], WAVE, tl.int32)
    place = tl.full([], -1, tl.int32)
    for i in range(WAVE):
        is_accepted = at(accepted.to(tl.int32), places, i) != 0
        defers = at(may_defer.to(tl.int32), places, i) != 0
        goes_on = (last == WAVE) & (at(present.to(tl.int32), places, i) != 0)
        slot = begin + i
        in_window = held >= 0
        starts = goes_on & (in_window == 0) & (is_accepted == 0)
        closes = goes_on & in_window & is_accepted & (slot == held + window)
        fails = goes_on & in_window & (is_accepted == 0)
        last = tl.where(fails | (starts & (defers == 0)), i, last)
        place = tl.where(starts, i, place)
        held = tl.where(starts & defers, slot, tl.where(closes, -1, held))
    return last, place, held

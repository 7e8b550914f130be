"""Lossy rules (docs/rules.md): what they ask of the blocks of a row, and what they make of verdicts."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_ops.triton._filters import cut, load_threshold
from specdec_ops.triton._launch import kernel
from specdec_ops.triton._laws import law_of_row, log2_prob
from specdec_ops.triton._numerics import (
    LN2,
    LOG2E,
    exp2_f64,
    log2_f64,
    log2_scale,
    weights_of,
)
from specdec_ops.triton._rows import (
    BLOCK_SIZE,
    NUM_LANES,
    ONE_HOT,
    WIDE_DRAFT_IDS,
    ids_of_block,
    load_entry,
    load_integer,
    load_request,
    row_pointer,
    sum_by_halves,
)

#: As in csrc/common/chain_params.h.
LENIENCE = tl.constexpr(5)
TYPICAL = tl.constexpr(6)
TOP_N = tl.constexpr(7)
THRESHOLDS = tl.constexpr(8)
MARGIN = tl.constexpr(9)

#: How the kernel is launched.
ASK = {"num_warps": 4}


@triton.jit
def load_mask(rule_mask, rule_mask_stride, drafts, mask):
    """Of which drafts the rule decides; of the others token level does."""
    where = (rule_mask + drafts * rule_mask_stride).to(tl.pointer_type(tl.int8))
    return mask & (tl.load(where, mask=mask & (rule_mask != 0), other=1) != 0)


@triton.jit
def weighted_logs(pointer, size, largest, scale, threshold):
    """The sum of w * log2 w over a block, where w are the weights relative to its largest logit."""
    sums = tl.full([NUM_LANES], 0.0, tl.float32)
    for row in range(0, 16):
        i = row * NUM_LANES + tl.arange(0, NUM_LANES)
        x = cut(tl.load(pointer + i, mask=i < size, other=float("-inf")).to(tl.float32), threshold, True)
        w = weights_of(x, largest, scale, tl.full([], 1.0, tl.float32))
        sums = sums + tl.where(w > 0, w * ((x - largest) * scale), 0.0)
    return sum_by_halves(sums)


@kernel
def ask_blocks(
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
    draft_ids: tl.int64, draft_ids_stride: tl.int64, rule: tl.int32, epsilon_bits: tl.int64,
    rule_mask: tl.int64, rule_mask_stride: tl.int64, batch: tl.int32, thresholds: tl.int64, answers: tl.int64,
    DTYPE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """What the rule asks of one block of a row, where that may matter.

    Typical acceptance: the sum of w * log2 w. The N most probable ids: how many logits are larger than the
    draft's. The margin: the largest logit but one, of a block that holds the largest of the row.
    """
    number = tl.program_id(0) // num_blocks
    block = tl.program_id(0) - number * num_blocks
    r = (number % batch).to(tl.int64)
    slot = (number // batch).to(tl.int64)
    first_draft, count, first_row = load_request(
        r, cu, cu_stride, wide, num_drafts, most_drafts, has_bonus_rows
    )
    _entry, greedy, _has_law, t, _draft_t = load_entry(
        r, indices, indices_stride, temperature, temperature_stride,
        draft_temperature, draft_temperature_stride, has_draft_law, has_draft_law_stride,
        wide, num_entries, has_random_numbers, ONE_HOT,
    )  # fmt: skip
    is_draft = slot < count
    x = load_integer(
        draft_ids, (first_draft + slot) * draft_ids_stride, wide & WIDE_DRAFT_IDS, is_draft
    )  # fmt: skip
    is_draft = is_draft & (x >= 0) & (x < vocab_size)
    is_draft = load_mask(rule_mask, rule_mask_stride, first_draft + slot, is_draft)
    if is_draft & ((greedy == 0) | (rule != TYPICAL)):
        row = first_row + slot
        scale = log2_scale(t)
        blocks = tl.arange(0, NUM_BLOCKS)
        out = answers.to(tl.pointer_type(tl.float32)) + row * num_blocks + block
        begin = block * BLOCK_SIZE
        size = vocab_size - begin
        pointer = row_pointer(target, row * target_stride, DTYPE, False)
        threshold = load_threshold(thresholds, 4 * row, True)
        logit = cut(tl.load(pointer + x).to(tl.float32), threshold, True)
        pointer += begin
        row_stats = stats.to(tl.pointer_type(tl.float32)) + row * num_blocks
        of_block = tl.load(row_stats + block)
        if rule == TYPICAL:
            _maxima, _sums, is_law, largest, reference, log2_total = law_of_row(
                stats, plane, row, num_blocks, scale, NUM_BLOCKS
            )
            p = exp2_f64(log2_prob(logit, reference, scale, log2_total))
            epsilon = epsilon_bits.to(tl.int64).to(tl.float64, bitcast=True)
            if is_law & ((p > epsilon) == 0):
                tl.store(out, weighted_logs(pointer, size, of_block, scale, threshold))
        else:
            largest = tl.max(
                tl.load(row_stats + blocks, mask=blocks < num_blocks, other=float("-inf")), axis=0
            )
            ids = ids_of_block()
            if (rule == TOP_N) & (of_block > logit):
                values = tl.load(pointer + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
                values = cut(values, threshold, True)
                larger = tl.sum(tl.sum(tl.where(values > logit, 1, 0), axis=1), axis=0)
                tl.store(out, larger.to(tl.float32))
            elif (rule == MARGIN) & (of_block == largest):
                values = tl.load(pointer + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
                values = cut(values, threshold, True)
                equal = tl.sum(tl.sum(tl.where(values == largest, 1, 0), axis=1), axis=0)
                below = tl.max(tl.max(tl.where(values < largest, values, float("-inf")), axis=1), axis=0)
                tl.store(out, tl.where(equal > 1, largest, below))


@triton.jit
def bend(
    accepted, kind, status, is_lossy, greedy, rule, first, second, coin, p, logits,
    largest, reference, scale, log2_total, maxima, sums, answers, rows, num_blocks,
    WITHOUT_DRAFT: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """What the rule makes of the verdicts at token level, and which drafts the most probable id replaces."""
    takes_argmax = rows < 0
    blocks = tl.arange(0, NUM_BLOCKS)
    # 0 for rules that ask nothing.
    pointer = answers.to(tl.int64).to(tl.pointer_type(tl.float32))
    pointer = pointer + rows[:, None] * num_blocks + blocks[None, :]
    if rule == LENIENCE:
        distance = (logits.to(tl.float64) - largest.to(tl.float64)) * scale.to(tl.float64)
        accepted = accepted | (is_lossy & greedy & (distance >= log2_f64(first)))
    elif rule == MARGIN:
        holds = is_lossy[:, None] & (maxima == largest[:, None]) & (blocks < num_blocks)[None, :]
        below = tl.load(pointer, mask=holds, other=float("-inf"))
        several = tl.sum(tl.where(holds, 1, 0), axis=1) > 1
        next_largest = tl.max(tl.where(holds, below, maxima), axis=1)
        next_largest = tl.where(several, largest, next_largest)
        is_close = (next_largest > 0) & (next_largest.to(tl.float64) > first * largest.to(tl.float64))
        accepted = accepted | (is_lossy & is_close & (logits >= next_largest))
    elif rule == THRESHOLDS:
        own = (p > 0) & ((p >= first) | (coin * second < p))
        accepted = tl.where(is_lossy & (greedy == 0), own, accepted)
        kind = tl.where(is_lossy, WITHOUT_DRAFT, kind)
        status = tl.where(is_lossy, 0, status)
    else:
        own = accepted
        if rule == TYPICAL:
            log2_of = log2_prob(maxima, reference[:, None], scale, log2_total[:, None])
            asked = (is_lossy & ((p > first) == 0))[:, None] & (sums > 0)
            logs = tl.load(pointer, mask=asked & (greedy == 0), other=0.0).to(tl.float64)
            bits = exp2_f64(tl.where(asked, log2_of, 0.0)) * (logs + sums.to(tl.float64) * log2_of)
            bits = -tl.sum(tl.where(asked, bits, 0.0), axis=1)
            entropy = tl.where(bits > 0, bits * LN2, 0.0)
            own = (p > first) | (p > second * exp2_f64(-entropy * LOG2E))
            own = tl.where(greedy, accepted, own)
        else:
            larger = is_lossy[:, None] & (maxima > logits[:, None])
            place = tl.sum(tl.load(pointer, mask=larger, other=0.0).to(tl.float64), axis=1)
            gap = exp2_f64(log2_prob(largest, reference, scale, log2_total)) - p
            own = (logits > float("-inf")) & (gap <= second) & (place < first)
        accepted = tl.where(is_lossy, own, accepted)
        takes_argmax = is_lossy
        status = tl.where(is_lossy, 0, status)
    return accepted, kind, status, takes_argmax

"""What becomes of a request once its rows are read: csrc/cpu/kernels/chain.kernel.h, a program to a request.

Decisions are in float64. Sums over blocks, chunks and ids are added in float64 in another order than there,
so a draw may choose another token where it lies within 1e-13 of a boundary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_ops.triton._decisions import CHANCE, decision_of, record_of
from specdec_ops.triton._filters import cut, load_threshold
from specdec_ops.triton._fly import walk_windows
from specdec_ops.triton._gumbel import best_ids
from specdec_ops.triton._launch import kernel
from specdec_ops.triton._laws import at, law_from, laws_of, load_stats_of_rows, log2_prob
from specdec_ops.triton._lossy import LENIENCE, bend, load_mask
from specdec_ops.triton._numerics import (
    LARGEST_LOGSUMEXP,
    LN2,
    LOG2E,
    exp2_f64,
    flush,
    is_finite,
    log2_f64,
    log2_scale,
    weights_of,
)
from specdec_ops.triton._philox import (
    ACCEPT,
    random_words,
    splitmix64,
    token_draw_of,
    uniform_of,
)
from specdec_ops.triton._rows import (
    BLOCK_SIZE,
    CHUNK_SIZE,
    CHUNKS_PER_BLOCK,
    LOGITS,
    NUM_LANES,
    ONE_HOT,
    PROBS,
    SUPPORT,
    WIDE_ACCEPT_UNIFORMS,
    WIDE_BONUS_IDS,
    WIDE_DRAFT_IDS,
    WIDE_FINAL_SLOTS,
    WIDE_FINAL_UNIFORMS,
    WIDE_LOGSUMEXP,
    WIDE_POSITIONS,
    WIDE_RATES,
    WIDE_SUPPORT_IDS,
    chunk_sums_of,
    load_entry,
    load_integer,
    load_real,
    load_request,
    quick_weights,
    row_pointer,
    sum_by_halves,
)

#: Where random numbers come from.
NO_NUMBERS = tl.constexpr(0)
SEEDS = tl.constexpr(1)
UNIFORMS = tl.constexpr(2)

#: Which drafts are accepted.
TOKEN_LEVEL = tl.constexpr(0)
REJECT_ALL = tl.constexpr(1)
SYNTHETIC = tl.constexpr(2)

#: What else decides: each is a kernel of its own, which a launch before it tells something of the rows.
PLAIN = tl.constexpr(0)
#: The token that is drawn in each slot.
EXACT_MATCH = tl.constexpr(1)
#: The same, as scores of blocks.
GUMBEL_NOISE = tl.constexpr(2)
#: The entropy of each row.
FLY = tl.constexpr(3)
#: Numbers of blocks, by the rule.
LOSSY = tl.constexpr(4)
#: How many drafts of each request are accepted, and perhaps what follows them.
BLOCK = tl.constexpr(5)

#: What to draw from where no further draft is accepted.
FROM_TARGET = tl.constexpr(0)
WITHOUT_DRAFT = tl.constexpr(1)
SUPPORT_RESIDUAL = tl.constexpr(2)
DENSE_RESIDUAL = tl.constexpr(3)

OK = tl.constexpr(0)
NON_FINITE_TARGET = tl.constexpr(1)
MASKED_TARGET = tl.constexpr(2)
UNUSABLE_DRAFT_LAW = tl.constexpr(3)
INVALID_DRAFT_ID = tl.constexpr(4)

THINNING_ATTEMPTS = tl.constexpr(32)
#: What a level of a draw is given to use what the level above has left.
_REMAINDER = tl.constexpr(-1.0)
_LOG2_CHUNK_SIZE = tl.constexpr(6)


@triton.jit
def choose_place(weights, prefix, draw, SIZE: tl.constexpr):
    """Of each row the first place whose prefix exceeds the draw, or the last with weight."""
    place = tl.arange(0, SIZE)[None, :]
    hit = tl.min(tl.where((weights > 0) & (prefix > draw[:, None]), place, SIZE), axis=1)
    last = tl.max(tl.where(weights > 0, place, 0), axis=1)
    return tl.where(hit < SIZE, hit, last), hit < SIZE


@triton.jit
def choose(weights, prefix, draw, SIZE: tl.constexpr):
    """choose_place; also what is left of the draw there, in parts of the weight, and the weight."""
    chosen, is_hit = choose_place(weights, prefix, draw, SIZE)
    is_chosen = tl.arange(0, SIZE)[None, :] == chosen[:, None]
    weight = tl.sum(tl.where(is_chosen, weights, 0.0), axis=1)
    before = tl.sum(tl.where(is_chosen, prefix - weights, 0.0), axis=1)
    return chosen, tl.where(is_hit, (draw - before) / weight, 1.0), weight


@triton.jit
def weights_of_chunk(
    pointer, ids, size, reference, scale, excluded, threshold, FILTERED: tl.constexpr
):  # fmt: skip
    """Weights of chunks, [draws, ids], from the ids on with which they begin."""
    ids = ids[:, None] + tl.arange(0, CHUNK_SIZE)[None, :]
    x = tl.load(pointer + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    x = cut(x, threshold, FILTERED)
    return tl.where(ids == excluded, 0.0, quick_weights(x, reference[:, None], scale))


@triton.jit
def sums_of_chunks(stats, plane, row_place, blocks, excluded, rest):
    """The readers' sums of the chunks of blocks, [blocks, chunks]; `rest` for that of the excluded id."""
    chunk = tl.arange(0, CHUNKS_PER_BLOCK)[None, :]
    begin = chunk_sums_of(stats, plane, row_place + blocks)
    sums = tl.load(begin[:, None].to(tl.pointer_type(tl.float32)) + chunk)
    is_excluded = blocks[:, None] * CHUNKS_PER_BLOCK + chunk == (excluded >> _LOG2_CHUNK_SIZE)
    return tl.where(is_excluded, rest, sums).to(tl.float64)


@triton.jit
def pick_by_chunks(
    pointer, stats, plane, row_place, blocks, size, reference, scale, chunk_number, id_number, excluded, rest,
    threshold, FILTERED: tl.constexpr,
):  # fmt: skip
    """Ids in blocks that numbers choose, by the readers' sums of chunks; never the excluded one."""
    sums = sums_of_chunks(stats, plane, row_place, blocks, excluded, rest)
    total = tl.sum(sums, axis=1)
    chunk, remainder, _ = choose(sums, tl.cumsum(sums, axis=1), chunk_number * total, CHUNKS_PER_BLOCK)
    begin = blocks * BLOCK_SIZE + chunk * CHUNK_SIZE
    weights = weights_of_chunk(pointer, begin, size, reference, scale, excluded, threshold, FILTERED)
    weights = weights.to(tl.float64)
    number = tl.where(id_number >= 0, id_number, remainder)
    place, _ = choose_place(weights, tl.cumsum(weights, axis=1), number * tl.sum(weights, axis=1), CHUNK_SIZE)
    # Where counts contradict each other, sums are of other requests, and may lead beyond the end.
    return tl.minimum(begin + place, size - 1)


@triton.jit
def pick_in_blocks(weights, chunk_number, id_number):
    """Places in blocks, each of weights [chunks, ids], that numbers choose."""
    sums = tl.sum(weights.to(tl.float64), axis=2)
    prefix = tl.cumsum(sums, axis=1)
    total = tl.sum(sums, axis=1)
    chunk, remainder, chunk_sum = choose(sums, prefix, chunk_number * total, CHUNKS_PER_BLOCK)
    is_chosen = tl.arange(0, CHUNKS_PER_BLOCK)[None, :] == chunk[:, None]
    inside = tl.sum(tl.where(is_chosen[:, :, None], weights, 0.0), axis=1).to(tl.float64)
    rest = tl.where(id_number >= 0, id_number, remainder) * chunk_sum
    place, _, _ = choose(inside, tl.cumsum(inside, axis=1), rest, CHUNK_SIZE)
    return chunk * CHUNK_SIZE + place


@triton.jit
def load_blocks(pointer, blocks, size, other: tl.constexpr, threshold, FILTERED: tl.constexpr):
    """Blocks of a row, [blocks, chunks, ids] in float32, cut; `other` from the end of the row on."""
    chunk = tl.arange(0, CHUNKS_PER_BLOCK)[None, :, None]
    place = tl.arange(0, CHUNK_SIZE)[None, None, :]
    ids = blocks[:, None, None] * BLOCK_SIZE + chunk * CHUNK_SIZE + place
    if tl.max(blocks, axis=0) * BLOCK_SIZE + BLOCK_SIZE <= size:
        x = tl.load(pointer + ids)
    else:
        x = tl.load(pointer + ids, mask=ids < size, other=other)
    return cut(x.to(tl.float32), threshold, FILTERED)


@triton.jit
def places_of_block():
    chunk = tl.arange(0, CHUNKS_PER_BLOCK)[None, :, None]
    return chunk * CHUNK_SIZE + tl.arange(0, CHUNK_SIZE)[None, None, :]


@triton.jit
def largest_of_block(x):
    """The largest of [1, chunks, ids] that is not NaN."""
    return tl.max(tl.reshape(tl.where(x == x, x, float("-inf")), [BLOCK_SIZE]), axis=0)


@triton.jit
def mass_of_block(weights):
    """The sum of [1, chunks, ids] in lanes and halves."""
    rows = tl.reshape(weights, [16, NUM_LANES])
    return sum_by_halves(tl.sum(rows, axis=0))


@triton.jit
def probs_of_block(x, largest, reference, scale, log2_total):
    factor = exp2_f64(log2_prob(largest, reference, scale, log2_total)).to(tl.float32)
    return weights_of(x, largest, scale, factor)


@triton.jit
def dense_draft_probs(y, draft_scale, draft_log2_total, LAW: tl.constexpr):
    """A block of the draft's law; NaN where an entry is not finite."""
    if LAW == PROBS:
        y = flush(y)
        return tl.maximum(tl.zeros_like(y), y + (y - y), propagate_nan=tl.PropagateNan.ALL)
    else:
        largest = largest_of_block(y)
        return probs_of_block(y, largest, tl.full([], 0.0, tl.float32), draft_scale, draft_log2_total)


@triton.jit
def subtract(weights, probs):
    rest = flush(weights - probs)
    return tl.maximum(tl.zeros_like(rest), rest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def residual_masses(
    pointer, drafts, row_stats, vocab_size, num_blocks, reference, scale, log2_total, draft_scale,
    draft_log2_total, threshold, draft_threshold,
    LAW: tl.constexpr, NUM_BLOCKS: tl.constexpr, FILTERED: tl.constexpr,
):  # fmt: skip
    """The mass of max(p - q, 0) of each block."""
    blocks = tl.arange(0, NUM_BLOCKS)
    masses = tl.full([NUM_BLOCKS], 0.0, tl.float64)
    for block in range(num_blocks):
        one = tl.zeros([1], tl.int32) + block
        values = load_blocks(pointer, one, vocab_size, float("-inf"), threshold, FILTERED)
        weights = probs_of_block(values, tl.load(row_stats + block), reference, scale, log2_total)
        values = load_blocks(
            drafts, one, vocab_size, 0.0 if LAW == PROBS else float("-inf"), draft_threshold, FILTERED
        )
        probs = dense_draft_probs(values, draft_scale, draft_log2_total, LAW)
        mass = mass_of_block(subtract(weights, probs)).to(tl.float64)
        masses = tl.where(blocks == block, mass, masses)
    return masses


@triton.jit
def subtract_support(
    weights, begin, ids, id_stride, logprobs, logprob_stride, support_size, vocab_size, wide
):  # fmt: skip
    """Takes a sparse law away from the probabilities of a block."""
    places = places_of_block()
    for j in range(support_size):
        token = load_integer(ids, j * id_stride, wide & WIDE_SUPPORT_IDS, support_size > 0)
        if (token >= begin) & (token < begin + BLOCK_SIZE) & (token < vocab_size):
            logprob = tl.load((logprobs + j * logprob_stride).to(tl.pointer_type(tl.float32)))
            q = exp2_f64(logprob.to(tl.float64) * LOG2E).to(tl.float32)
            rest = weights - q
            rest = tl.where(rest > 0, rest, 0.0)
            weights = tl.where(places == token - begin, rest, weights)
    return weights


@triton.jit
def draft_probs_of(
    x, looked_at, slots, is_read, first_draft, entry, draft_scale,
    draft, draft_stride, draft_entry_stride, draft_slot_stride,
    lse, lse_stride, lse_entry_stride, lse_slot_stride,
    support_ids, support_ids_stride, support_ids_entry_stride, support_ids_slot_stride, support_id_stride,
    support_logprobs, support_logprobs_stride, support_logprobs_entry_stride, support_logprobs_slot_stride,
    support_logprob_stride, support_size,
    wide, vocab_size, num_blocks, num_target_rows, stats, plane,
    draft_thresholds, draft_thresholds_stride, draft_thresholds_entry_stride, draft_thresholds_slot_stride,
    DRAFT_DTYPE: tl.constexpr, LAW: tl.constexpr, NUM_BLOCKS: tl.constexpr, WAVE: tl.constexpr,
    FILTERED: tl.constexpr,
):  # fmt: skip
    """q(x) of the drafts in a wave of slots, and log2 of the totals of their rows of logits."""
    draft_log2_total = tl.full([WAVE], 0.0, tl.float64)
    q = tl.full([WAVE], 0.0, tl.float64)
    if LAW == SUPPORT:
        for j in range(support_size):
            ids_at = (
                first_draft * support_ids_stride + entry * support_ids_entry_stride
                + slots * support_ids_slot_stride + j * support_id_stride
            )  # fmt: skip
            logprobs_at = (
                first_draft * support_logprobs_stride + entry * support_logprobs_entry_stride
                + slots * support_logprobs_slot_stride + j * support_logprob_stride
            )  # fmt: skip
            token = load_integer(support_ids, ids_at, wide & WIDE_SUPPORT_IDS, looked_at)
            logprob = load_real(support_logprobs, logprobs_at, 0, looked_at)
            prob = exp2_f64(logprob * LOG2E)
            inside = looked_at & (token >= 0) & (token < vocab_size)
            q = tl.where(inside & (token == x), q + prob, q)
            q = tl.where(inside & (is_finite(prob) == 0), float("nan"), q)
    else:
        draft_row = first_draft * draft_stride + entry * draft_entry_stride + slots * draft_slot_stride
        y = row_pointer(draft, draft_row + tl.where(looked_at, x, 0), DRAFT_DTYPE, False)
        y = tl.load(y, mask=looked_at, other=0.0).to(tl.float32)
        if FILTERED:
            of_drafts = (
                first_draft * draft_thresholds_stride + entry * draft_thresholds_entry_stride
                + slots * draft_thresholds_slot_stride
            )  # fmt: skip
            y = cut(y, load_threshold(draft_thresholds, of_drafts, looked_at), True)
        if LAW == LOGITS:
            draft_lse = load_real(
                lse, first_draft * lse_stride + entry * lse_entry_stride + slots * lse_slot_stride,
                wide & WIDE_LOGSUMEXP, is_read & (lse != 0),
            )  # fmt: skip
            if lse == 0:
                draft_maxima, draft_sums = load_stats_of_rows(
                    stats, num_target_rows + first_draft + slots,
                    is_read, num_blocks, NUM_BLOCKS, plane,
                )  # fmt: skip
                _, _, _, draft_lse = laws_of(draft_maxima, draft_sums, draft_scale)
            draft_log2_total = draft_lse * LOG2E
            q = exp2_f64(log2_prob(y, tl.full([], 0.0, tl.float32), draft_scale, draft_log2_total))
            q = tl.where(tl.abs(draft_lse) < LARGEST_LOGSUMEXP, q, float("nan"))
        else:
            q = tl.where(y > 0, y.to(tl.float64), tl.where(y <= 0, 0.0, float("nan")))
    return q, draft_log2_total


@triton.jit
def store_token(token_ids, place, token, is_wide, mask):
    narrow = token_ids.to(tl.pointer_type(tl.int32)) + place
    tl.store(narrow, token.to(tl.int32), mask=mask & (is_wide == 0))
    tl.store(token_ids.to(tl.pointer_type(tl.int64)) + place, token, mask=mask & (is_wide != 0))


@kernel
def judge_requests(
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
    draft_ids: tl.int64, draft_ids_stride: tl.int64,
    lse: tl.int64, lse_stride: tl.int64, lse_entry_stride: tl.int64, lse_slot_stride: tl.int64,
    support_ids: tl.int64, support_ids_stride: tl.int64, support_ids_entry_stride: tl.int64,
    support_ids_slot_stride: tl.int64, support_id_stride: tl.int64,
    support_logprobs: tl.int64, support_logprobs_stride: tl.int64, support_logprobs_entry_stride: tl.int64,
    support_logprobs_slot_stride: tl.int64, support_logprob_stride: tl.int64, support_size: tl.int32,
    seeds: tl.int64, seeds_stride: tl.int64, positions: tl.int64, positions_stride: tl.int64,
    accept_uniforms: tl.int64, accept_uniforms_stride: tl.int64,
    final_uniforms: tl.int64, final_uniforms_stride: tl.int64,
    bonus_ids: tl.int64, bonus_ids_stride: tl.int64,
    rates: tl.int64, rates_stride: tl.int64, rule: tl.int32,
    final_stream: tl.int32, final_slot: tl.int64, final_slots: tl.int64, final_slots_stride: tl.int64,
    token_ids: tl.int64, ids_are_wide: tl.int32, width: tl.int32,
    num_accepted: tl.int64, status_out: tl.int64, lse_out: tl.int64, logprobs_out: tl.int64,
    accept_probs_out: tl.int64,
    thresholds: tl.int64, draft_thresholds: tl.int64, draft_thresholds_stride: tl.int64,
    draft_thresholds_entry_stride: tl.int64, draft_thresholds_slot_stride: tl.int64,
    rule_first: tl.int64, rule_second: tl.int64, rule_mask: tl.int64, rule_mask_stride: tl.int64,
    window: tl.int64, answers: tl.int64,
    DTYPE: tl.constexpr, DRAFT_DTYPE: tl.constexpr, LAW: tl.constexpr, NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr, NUM_BLOCKS: tl.constexpr, WAVE: tl.constexpr, FILTERED: tl.constexpr,
    VARIANT: tl.constexpr,
    ATTEMPTS: tl.constexpr,
):  # fmt: skip
    """Judges the drafts of a request, a wave of slots at a time, and draws the token that follows."""
    r = tl.program_id(0).to(tl.int64)
    first_draft, count, first_row = load_request(
        r, cu, cu_stride, wide, num_drafts, most_drafts, has_bonus_rows
    )
    entry, greedy, has_law, t, draft_t = load_entry(
        r, indices, indices_stride, temperature, temperature_stride,
        draft_temperature, draft_temperature_stride, has_draft_law, has_draft_law_stride,
        wide, num_entries, has_random_numbers, LAW,
    )  # fmt: skip
    scale, draft_scale = log2_scale(t), log2_scale(draft_t)
    end = count + tl.where(has_bonus_rows != 0, 1, 0)
    key = splitmix64(
        tl.load((seeds + entry * seeds_stride).to(tl.pointer_type(tl.int64)), mask=seeds != 0, other=0)
    )
    position = load_integer(positions, r * positions_stride, wide & WIDE_POSITIONS, positions != 0)

    zero = tl.full([], 0.0, tl.float32)
    places = tl.arange(0, WAVE)
    blocks = tl.arange(0, NUM_BLOCKS)
    begin = count * 0
    # Of the slot where the request ends:
    is_open = end > 0
    ends = end < 0
    held = begin - 1
    is_searched = end < 0
    # Of the rule.
    first_parameter = rule_first.to(tl.int64).to(tl.float64, bitcast=True)
    second_parameter = rule_second.to(tl.int64).to(tl.float64, bitcast=True)
    # What p is taken times in the slot where the request ends.
    weight_end = tl.full([], 1.0, tl.float64)
    is_known = greedy
    final = tl.full([], 0, tl.int32)
    status = tl.full([], 0, tl.int32)
    x_end = begin - 1
    argmax_end = begin
    largest_end = tl.full([], 0.0, tl.float32)
    reference_end = tl.full([], 0.0, tl.float32)
    log2_total_end = tl.full([], 0.0, tl.float64)
    draft_log2_total_end = tl.full([], 0.0, tl.float64)
    row_status_end = tl.full([], 0, tl.int32)
    if VARIANT == BLOCK:
        decided = decision_of(answers, num_drafts, r)
        decided_count = tl.load(decided, mask=greedy == 0, other=0)
        decided_token = tl.load(decided + 1, mask=greedy == 0, other=-1)
        decided_status = tl.load(decided + 2, mask=greedy == 0, other=0)
        # Written already.
        accept_probs_out = tl.where(greedy, accept_probs_out, 0)
    while is_open:
        slots = begin + places
        present = slots < end
        is_draft = slots < count
        rows = first_row + slots

        x = load_integer(
            draft_ids, (first_draft + slots) * draft_ids_stride, wide & WIDE_DRAFT_IDS, is_draft
        )  # fmt: skip
        x = tl.where(is_draft, x, -1)
        valid = (x >= 0) & (x < vocab_size)
        x_inside = tl.where(valid, x, 0)
        logits = row_pointer(target, rows * target_stride + x_inside, DTYPE, False)
        logits = tl.load(logits, mask=valid & present, other=0.0).to(tl.float32)
        if FILTERED:
            logits = cut(logits, load_threshold(thresholds, 4 * rows, present), True)

        maxima, sums = load_stats_of_rows(stats, rows, present, num_blocks, NUM_BLOCKS, plane)
        largest, non_finite, log2_total, logsumexp = laws_of(maxima, sums, scale)
        reference, log2_total = law_from(largest, log2_total, logsumexp)
        row_status = tl.where(largest > float("-inf"), 0, 2)
        row_status = tl.where(non_finite, 1, row_status)

        argmax = x * 0
        if greedy:
            first = tl.min(tl.where(maxima == largest[:, None], blocks[None, :], NUM_BLOCKS), axis=1)
            first = tl.minimum(first, num_blocks - 1)
            index = stats.to(tl.pointer_type(tl.float32)) + 2 * plane + rows * num_blocks + first
            argmax = first.to(tl.int64) * BLOCK_SIZE + tl.load(index, mask=present, other=0.0).to(tl.int64)

        coin = tl.full([WAVE], 1.0, tl.float64)
        if NUMBERS == SEEDS:
            w0, w1, w2, w3 = random_words(key, slots.to(tl.int32), ACCEPT, position + (slots - slots))
            coin = uniform_of(w0, w1)
        elif NUMBERS == UNIFORMS:
            coin = load_real(
                accept_uniforms, (first_draft + slots) * accept_uniforms_stride, wide & WIDE_ACCEPT_UNIFORMS,
                is_draft & (accept_uniforms != 0),
            )  # fmt: skip
        rate = load_real(rates, slots * rates_stride, wide & WIDE_RATES, is_draft & (rates != 0))
        by_law = rule == TOKEN_LEVEL
        wins = (rule == SYNTHETIC) & (coin < rate)

        p = exp2_f64(log2_prob(logits, reference, scale, log2_total))
        weight = tl.full([WAVE], 1.0, tl.float64)
        if VARIANT == LOSSY:
            is_lossy = load_mask(rule_mask, rule_mask_stride, first_draft + slots, valid)
            weight = tl.where(is_lossy & (rule == LENIENCE), 1.0 / first_parameter, weight)
            by_law = rule >= LENIENCE
        accepted = wins | (by_law & (coin < p * weight))
        kind = tl.full([WAVE], WITHOUT_DRAFT, tl.int32)
        slot_status = tl.full([WAVE], 0, tl.int32)
        accept_prob = p
        draft_log2_total = tl.full([WAVE], 0.0, tl.float64)
        if LAW != ONE_HOT:
            q, draft_log2_total = draft_probs_of(
                x, valid & has_law, slots, is_draft & has_law & (greedy == 0), first_draft, entry,
                draft_scale, draft, draft_stride, draft_entry_stride, draft_slot_stride,
                lse, lse_stride, lse_entry_stride, lse_slot_stride,
                support_ids, support_ids_stride, support_ids_entry_stride, support_ids_slot_stride,
                support_id_stride, support_logprobs, support_logprobs_stride, support_logprobs_entry_stride,
                support_logprobs_slot_stride, support_logprob_stride, support_size,
                wide, vocab_size, num_blocks, num_target_rows, stats, plane,
                draft_thresholds, draft_thresholds_stride, draft_thresholds_entry_stride,
                draft_thresholds_slot_stride,
                DRAFT_DTYPE, LAW, NUM_BLOCKS, WAVE, FILTERED,
            )  # fmt: skip
            q_usable = (q > 0) & is_finite(q)
            ratio = tl.where(p < q, p / q, 1.0)
            accept_prob = tl.where(has_law, tl.where(q_usable, ratio, float("nan")), accept_prob)
            kind = tl.where(has_law & q_usable, SUPPORT_RESIDUAL if LAW == SUPPORT else DENSE_RESIDUAL, kind)
            slot_status = tl.where(has_law & (q_usable == 0), UNUSABLE_DRAFT_LAW, slot_status)
            accepted = accepted | (has_law & q_usable & by_law & (coin * q < p * weight))
        equal = x == argmax
        accepted = tl.where(greedy, wins | (by_law & equal), accepted)
        accept_prob = tl.where(greedy, tl.where(equal, 1.0, 0.0), accept_prob)
        slot_status = tl.where(greedy, 0, slot_status)
        takes_argmax = places < 0
        if VARIANT == LOSSY:
            accepted, kind, slot_status, takes_argmax = bend(
                accepted, kind, slot_status, is_lossy, greedy, rule, first_parameter, second_parameter, coin,
                p, logits, largest, reference, scale, log2_total, maxima, sums, answers, rows, num_blocks,
                WITHOUT_DRAFT, NUM_BLOCKS,
            )  # fmt: skip
        if (VARIANT == EXACT_MATCH) | (VARIANT == GUMBEL_NOISE):
            is_drawn = present & (greedy == 0)
            if VARIANT == EXACT_MATCH:
                drawn = tl.load(answers.to(tl.pointer_type(tl.int32)) + rows, mask=is_drawn, other=0)
            else:
                drawn = best_ids(answers, rows, is_drawn, num_blocks, num_target_rows, NUM_BLOCKS)
            argmax = tl.where(greedy, argmax, drawn.to(tl.int64))
            accepted = x == argmax
        if VARIANT == BLOCK:
            accepted = tl.where(greedy, x == argmax, slots < decided_count)
        accepted = accepted & valid & (row_status == 0)
        accept_prob = tl.where(valid & (row_status == 0), accept_prob, float("nan"))
        kind = tl.where(valid, kind, FROM_TARGET)
        slot_status = tl.where(valid, slot_status, tl.where(is_draft & (x != -1), INVALID_DRAFT_ID, 0))
        slot_status = tl.where(row_status != 0, row_status, slot_status)

        last = tl.min(tl.where(present & (accepted == 0), places, WAVE), axis=0)
        place = last
        if VARIANT == FLY:
            entropy = tl.load(
                answers.to(tl.pointer_type(tl.float64)) + rows, mask=slots + window < count, other=-1.0
            )
            may_defer = valid & (row_status == 0) & (logits > float("-inf")) & (entropy >= first_parameter)
            last, place, held = walk_windows(accepted, may_defer, present, places, begin, held, window, WAVE)
        is_reached = present & (places <= last)
        is_emitted = present & (places < last)
        store_token(token_ids, r * width + slots, x, ids_are_wide, is_emitted)
        if lse_out != 0:
            tl.store(lse_out.to(tl.pointer_type(tl.float64)) + rows, logsumexp, mask=is_reached)
        if logprobs_out != 0:
            logprob = log2_prob(logits, reference, scale, log2_total) * LN2
            tl.store(
                logprobs_out.to(tl.pointer_type(tl.float32)) + r * width + slots, logprob.to(tl.float32),
                mask=is_emitted,
            )  # fmt: skip
        if accept_probs_out != 0:
            tl.store(
                accept_probs_out.to(tl.pointer_type(tl.float32)) + first_draft + slots,
                accept_prob.to(tl.float32), mask=is_reached & is_draft,
            )  # fmt: skip

        ends = last < WAVE
        is_open = (ends == 0) & (begin + WAVE < end)
        is_noted = ends
        if VARIANT == FLY:
            is_noted = place >= 0
        if is_noted:
            final = at(kind, places, place)
            status = at(slot_status, places, place)
            x_end = at(x, places, place)
            argmax_end = at(argmax, places, place)
            largest_end = at(largest, places, place)
            reference_end = at(reference, places, place)
            log2_total_end = at(log2_total, places, place)
            draft_log2_total_end = at(draft_log2_total, places, place)
            row_status_end = at(row_status, places, place)
            if VARIANT == LOSSY:
                weight_end = at(weight, places, place)
                is_searched = (greedy == 0) & (at(takes_argmax.to(tl.int32), places, place) != 0)
        if ends:
            begin = tl.where(held >= 0, held, begin + last)
        elif is_open:
            begin = begin + WAVE
        else:
            begin = end

    if VARIANT == FLY:
        # What was written behind a deferred draft is written again.
        tl.debug_barrier()
    # Which branch draws nothing, and which is not compiled.
    draws = ends
    if (VARIANT == EXACT_MATCH) | (VARIANT == GUMBEL_NOISE):
        is_known = ends
        draws = False
    log2_total_of_p = log2_total_end
    if VARIANT == BLOCK:
        # The chance of the drafts before, where that counts.
        weight_end = tl.load(
            record_of(answers, num_drafts, CHANCE, first_draft + begin - 1),
            mask=ends & (greedy == 0) & (final == SUPPORT_RESIDUAL) & (begin > 0), other=1.0,
        )  # fmt: skip
        if decided_token >= 0:
            is_known = ends
            argmax_end = decided_token.to(tl.int64)
            status = decided_status
    if (VARIANT == LOSSY) | (VARIANT == BLOCK):
        log2_total_end = log2_total_end - log2_f64(weight_end)
    row = first_row + begin
    row_of_target = row * target_stride
    of_drafts = first_draft * draft_stride + entry * draft_entry_stride + begin * draft_slot_stride
    row_stats = stats.to(tl.pointer_type(tl.float32)) + row * num_blocks
    threshold = zero
    draft_threshold = zero
    if FILTERED:
        threshold = load_threshold(thresholds, 4 * row, ends)
        of_draft = (
            first_draft * draft_thresholds_stride + entry * draft_thresholds_entry_stride
            + begin * draft_thresholds_slot_stride
        )  # fmt: skip
        draft_threshold = load_threshold(draft_thresholds, of_draft, begin < count)
    token = begin * 0 - 1
    if ends & ((row_status_end != 0) | is_searched):
        # The lowest id with the largest logit that is not NaN.
        token = token + 1
        if row_status_end != MASKED_TARGET:
            found = token - 1
            block = tl.full([], 0, tl.int32)
            while (found < 0) & (block < num_blocks):
                if tl.load(row_stats + block) == largest_end:
                    pointer = row_pointer(target, row_of_target, DTYPE, ALIGNED)
                    values = load_blocks(
                        pointer, tl.zeros([1], tl.int32) + block, vocab_size, float("nan"), threshold,
                        FILTERED,
                    )  # fmt: skip
                    place = tl.where(values == largest_end, places_of_block(), BLOCK_SIZE)
                    first = tl.min(tl.reshape(place, [BLOCK_SIZE]), axis=0)
                    if first < BLOCK_SIZE:
                        found = block.to(tl.int64) * BLOCK_SIZE + first
                block += 1
            token = tl.maximum(found, 0)
    elif ends & is_known:
        token = argmax_end
    elif draws:
        pointer = row_pointer(target, row_of_target, DTYPE, ALIGNED)
        drafts = row_pointer(draft, of_drafts, DRAFT_DTYPE, ALIGNED)
        inside = blocks < num_blocks
        maxima = tl.load(row_stats + blocks, mask=inside, other=float("-inf"))
        sums = tl.load(row_stats + plane + blocks, mask=inside, other=0.0)
        of_target = exp2_f64(log2_prob(maxima, reference_end, scale, log2_total_end))
        of_target = tl.where(sums > 0, sums.to(tl.float64) * of_target, 0.0)
        of_blocks = of_target

        stream_slot = tl.full([], 0, tl.int32)
        at_position = position + begin
        if final_stream == 2:
            at_position = position
            own = load_integer(final_slots, r * final_slots_stride, wide & WIDE_FINAL_SLOTS, final_slots != 0)
            stream_slot = tl.where(final_slots != 0, own, final_slot).to(tl.int32)
        number = tl.full([], 0, tl.int32)
        # An id that is not to be drawn, and the weight of its chunk without it.
        excluded = begin * 0 - 1
        rest = zero
        if (LAW == LOGITS) | (LAW == PROBS):  # noqa: SIM102
            if final == DENSE_RESIDUAL:
                if NUMBERS == SEEDS:
                    # A token of p that is kept with probability max(p - q, 0) / p has the residual's law.
                    attempts = tl.arange(0, ATTEMPTS)
                    prefix = tl.cumsum(of_blocks, axis=0)
                    total = tl.sum(of_blocks, axis=0)
                    while (token < 0) & (number < THINNING_ATTEMPTS):
                        attempt = number + attempts
                        positions_of = at_position + (attempt - attempt).to(tl.int64)
                        w0, w1, w2, w3 = random_words(key, 2 * attempt, final_stream, positions_of)
                        block_number, chunk_number, id_number = token_draw_of(w0, w1, w2, w3)
                        w0, w1, w2, w3 = random_words(key, 2 * attempt + 1, final_stream, positions_of)
                        u = uniform_of(w0, w1)
                        chosen, _ = choose_place(
                            of_blocks[None, :], prefix[None, :], block_number * total, NUM_BLOCKS
                        )  # fmt: skip
                        ids = pick_by_chunks(
                            pointer, stats, plane, row * num_blocks, chosen, vocab_size,
                            tl.load(row_stats + chosen), scale, chunk_number, id_number, excluded, rest,
                            threshold, FILTERED,
                        )  # fmt: skip
                        value = tl.load(pointer + ids).to(tl.float32)
                        p = exp2_f64(log2_prob(value, reference_end, scale, log2_total_end))
                        value = cut(tl.load(drafts + ids).to(tl.float32), draft_threshold, FILTERED)
                        if LAW == LOGITS:
                            q = exp2_f64(log2_prob(value, zero, draft_scale, draft_log2_total_end))
                        else:
                            q = tl.where((value < 0) & is_finite(value), 0.0, value).to(tl.float64)
                        unusable = is_finite(q) == 0
                        kept = unusable | (u * p < p - q)
                        first = tl.min(tl.where(kept, attempts, ATTEMPTS), axis=0)
                        if first < ATTEMPTS:
                            token = at(ids, attempts, first).to(tl.int64)
                            if at(unusable.to(tl.int32), attempts, first) != 0:
                                status = tl.full([], UNUSABLE_DRAFT_LAW, tl.int32)
                        number += ATTEMPTS
                    number = tl.full([], 2 * THINNING_ATTEMPTS, tl.int32)
                if token < 0:
                    # A pass over both rows makes the residual.
                    of_blocks = residual_masses(
                        pointer, drafts, row_stats, vocab_size, num_blocks, reference_end, scale,
                        log2_total_end, draft_scale, draft_log2_total_end, threshold, draft_threshold,
                        LAW, NUM_BLOCKS, FILTERED,
                    )  # fmt: skip

        ids_at = (
            support_ids + first_draft * support_ids_stride + entry * support_ids_entry_stride
            + begin * support_ids_slot_stride
        )  # fmt: skip
        logprobs_at = (
            support_logprobs + first_draft * support_logprobs_stride
            + entry * support_logprobs_entry_stride + begin * support_logprobs_slot_stride
        )  # fmt: skip
        if final == WITHOUT_DRAFT:
            # The chunk that holds the draft anew, without it.
            excluded = x_end
            block_of_x = (x_end // BLOCK_SIZE).to(tl.int32)
            max_of_x = tl.load(row_stats + block_of_x)
            chunk = x_end // CHUNK_SIZE * CHUNK_SIZE + tl.zeros([1], tl.int64)
            left = weights_of_chunk(
                pointer, chunk, vocab_size, max_of_x + tl.zeros([1], tl.float32), scale, x_end, threshold,
                FILTERED,
            )  # fmt: skip
            rest = flush(tl.sum(tl.sum(left, axis=1), axis=0))
            chunks = sums_of_chunks(
                stats, plane, row * num_blocks, block_of_x + tl.zeros([1], tl.int32), excluded, rest
            )
            mass = tl.sum(tl.sum(chunks, axis=1), axis=0)
            mass = mass * exp2_f64(log2_prob(max_of_x, reference_end, scale, log2_total_end))
            of_blocks = tl.where(blocks == block_of_x, tl.where(mass > 0, mass, 0.0), of_blocks)
        touched = blocks < 0
        # A constant of the kernel and a number of the request: Triton compiles no `and` of them.
        if LAW == SUPPORT:  # noqa: SIM102
            if final == SUPPORT_RESIDUAL:
                for j in range(support_size):
                    listed = load_integer(
                        ids_at, j * support_id_stride, wide & WIDE_SUPPORT_IDS, support_size > 0
                    )
                    is_id = (listed >= 0) & (listed < vocab_size)
                    touched = touched | (is_id & (blocks == (listed // BLOCK_SIZE).to(tl.int32)))
        touched = touched & inside
        if token < 0:
            if LAW == SUPPORT:
                for block in range(num_blocks):
                    if at(touched.to(tl.int32), blocks, block) != 0:
                        values = load_blocks(
                            pointer, tl.zeros([1], tl.int32) + block, vocab_size, float("-inf"), threshold,
                            FILTERED,
                        )  # fmt: skip
                        weights = probs_of_block(
                            values, tl.load(row_stats + block), reference_end, scale, log2_total_end
                        )  # fmt: skip
                        weights = subtract_support(
                            weights, block * BLOCK_SIZE, ids_at, support_id_stride, logprobs_at,
                            support_logprob_stride, support_size, vocab_size, wide,
                        )  # fmt: skip
                        mass = tl.sum(tl.reshape(weights, [BLOCK_SIZE]).to(tl.float64), axis=0)
                        of_blocks = tl.where(blocks == block, mass, of_blocks)
            total = tl.sum(of_blocks, axis=0)
            if (total > 0) == 0:
                # Nothing is left, or the draft row is not usable: p.
                if total != total:
                    status = tl.full([], UNUSABLE_DRAFT_LAW, tl.int32)
                final = tl.full([], FROM_TARGET, tl.int32)
                excluded = begin * 0 - 1
                touched = blocks < 0
                of_blocks = of_target
                total = tl.sum(of_blocks, axis=0)

            given = load_real(
                final_uniforms, r * final_uniforms_stride, wide & WIDE_FINAL_UNIFORMS, final_uniforms != 0
            )  # fmt: skip
            block_number = tl.zeros([1], tl.float64) + given
            chunk_number = tl.full([1], _REMAINDER, tl.float64)
            id_number = tl.full([1], _REMAINDER, tl.float64)
            if NUMBERS == SEEDS:
                drawn = tl.where(final_stream == 2, stream_slot, number) + tl.zeros([1], tl.int32)
                w0, w1, w2, w3 = random_words(
                    key, drawn, final_stream, at_position + tl.zeros([1], tl.int64)
                )  # fmt: skip
                block_number, chunk_number, id_number = token_draw_of(w0, w1, w2, w3)
            chosen, remainder, _ = choose(
                of_blocks[None, :], tl.cumsum(of_blocks, axis=0)[None, :], block_number * total, NUM_BLOCKS
            )
            chunk_number = tl.where(chunk_number >= 0, chunk_number, remainder)
            block = tl.max(chosen, axis=0)
            block_max = tl.load(row_stats + block)
            is_touched = (final == DENSE_RESIDUAL) | (at(touched.to(tl.int32), blocks, block) != 0)
            if is_touched == 0:
                ids = pick_by_chunks(
                    pointer, stats, plane, row * num_blocks, chosen, vocab_size,
                    tl.load(row_stats + chosen), scale, chunk_number, id_number, excluded, rest, threshold,
                    FILTERED,
                )  # fmt: skip
                token = tl.max(ids, axis=0).to(tl.int64)
            elif LAW != ONE_HOT:
                values = load_blocks(pointer, chosen, vocab_size, float("-inf"), threshold, FILTERED)
                factor = exp2_f64(log2_prob(block_max, reference_end, scale, log2_total_end)).to(tl.float32)
                weights = weights_of(values, block_max, scale, factor)
                if LAW == SUPPORT:
                    weights = subtract_support(
                        weights, block * BLOCK_SIZE, ids_at, support_id_stride, logprobs_at,
                        support_logprob_stride, support_size, vocab_size, wide,
                    )  # fmt: skip
                else:
                    values = load_blocks(
                        drafts, chosen, vocab_size, 0.0 if LAW == PROBS else float("-inf"), draft_threshold,
                        FILTERED,
                    )  # fmt: skip
                    probs = dense_draft_probs(values, draft_scale, draft_log2_total_end, LAW)
                    weights = subtract(weights, probs)
                place = pick_in_blocks(weights, chunk_number, id_number)
                token = tl.max(chosen * BLOCK_SIZE + place, axis=0).to(tl.int64)

    has_logprob = ends & (row_status_end == 0)
    if ends == 0:
        # Every draft was accepted, and the bonus token is a given one.
        token = load_integer(bonus_ids, r * bonus_ids_stride, wide & WIDE_BONUS_IDS, bonus_ids != 0)
        is_id = (token >= 0) & (token < vocab_size) & (bonus_ids != 0)
        status = tl.where(is_id | (token == -1), 0, INVALID_DRAFT_ID)
        token = tl.where(is_id, token, -1)
    store_token(token_ids, r * width + begin, token, ids_are_wide, width > 0)
    tl.store(status_out.to(tl.pointer_type(tl.int32)) + r, status)
    if num_accepted != 0:
        tl.store(num_accepted.to(tl.pointer_type(tl.int32)) + r, begin.to(tl.int32))
    if logprobs_out != 0:
        value = row_pointer(target, row_of_target + token, DTYPE, False)
        value = cut(tl.load(value, mask=has_logprob, other=0.0).to(tl.float32), threshold, FILTERED)
        logprob = log2_prob(value, reference_end, scale, log2_total_of_p) * LN2
        logprob = tl.where(has_logprob, logprob, float("nan"))
        tl.store(logprobs_out.to(tl.pointer_type(tl.float32)) + r * width + begin, logprob.to(tl.float32))
    # What was not reached.
    for first_slot in range(0, width, 16):
        slots = first_slot + tl.arange(0, 16)
        behind = (slots > begin) & (slots < width)
        store_token(token_ids, r * width + slots, slots.to(tl.int64) * 0 - 1, ids_are_wide, behind)
        nothing = tl.full([16], float("nan"), tl.float64)
        if logprobs_out != 0:
            tl.store(
                logprobs_out.to(tl.pointer_type(tl.float32)) + r * width + slots, nothing.to(tl.float32),
                mask=behind,
            )  # fmt: skip
        if lse_out != 0:
            tl.store(
                lse_out.to(tl.pointer_type(tl.float64)) + first_row + slots, nothing,
                mask=(slots > begin) & (slots < end),
            )  # fmt: skip
        if accept_probs_out != 0:
            tl.store(
                accept_probs_out.to(tl.pointer_type(tl.float32)) + first_draft + slots,
                nothing.to(tl.float32), mask=(slots > begin) & (slots < count),
            )  # fmt: skip

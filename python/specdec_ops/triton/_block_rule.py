"""Block verification (csrc/cpu/kernels/block_rule.kernel.h): which drafts of a request that samples are kept.

With P(-1) = 1 and P(s) = min(1, P(s - 1) * p(x) / q(x)) for the draft x in slot s, the drafts up to slot s
are kept with probability h(s) = Z / (Z + 1 - P(s)), where Z is the sum of max(P(s) * p - q, 0) at the slot
behind; in the last slot with h = P. From the last slot on, the first one whose coin is below h decides. The
judges draw what follows, unless the decision has found it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_ops.triton._chain import (
    SEEDS,
    THINNING_ATTEMPTS,
    UNUSABLE_DRAFT_LAW,
    choose,
    dense_draft_probs,
    draft_probs_of,
    load_blocks,
    pick_by_chunks,
    pick_in_blocks,
    probs_of_block,
    residual_masses,
    subtract,
)
from specdec_ops.triton._decisions import (
    CHANCE,
    DRAFT_LOG2_TOTAL,
    KIND,
    LOG2_TOTAL,
    REFERENCE,
    TARGET_PROB,
    decision_of,
    record_of,
)
from specdec_ops.triton._filters import cut, load_threshold
from specdec_ops.triton._launch import kernel
from specdec_ops.triton._laws import at, law_from, laws_of, load_stats_of_rows, log2_prob
from specdec_ops.triton._numerics import LOG2E, exp2_f64, is_finite, log2_f64, log2_scale
from specdec_ops.triton._philox import ACCEPT, BLOCK, random_words, splitmix64, uniform_of
from specdec_ops.triton._rows import (
    BLOCK_SIZE,
    LOGITS,
    ONE_HOT,
    PROBS,
    SUPPORT,
    WIDE_ACCEPT_UNIFORMS,
    WIDE_DRAFT_IDS,
    WIDE_FINAL_UNIFORMS,
    WIDE_POSITIONS,
    WIDE_SUPPORT_IDS,
    load_entry,
    load_integer,
    load_real,
    load_request,
    row_pointer,
)

#: How the kernel is cut and launched.
WALK = {"ATTEMPTS": 32, "num_warps": 4}
#: Kinds of drafts.
_HAS_LAW = tl.constexpr(0)
_ONE_HOT = tl.constexpr(1)
#: Numbers of a slot in the stream.
_NUMBERS_PER_SLOT = tl.constexpr(128)
_SMALLEST_CHANCE = tl.constexpr(2.0**-1000)
#: Ids of a sparse law that are looked at at once.
_SUPPORT_TILE = tl.constexpr(32)
#: The next level of a draw uses what the level above has left.
_REMAINDER = tl.constexpr(-1.0)


@triton.jit
def next_chance(chance, p, q):
    """The chance of a chain once its next draft is judged; 0 where it has no digits left."""
    value = chance * p / q
    return tl.where(value < 1.0, tl.where(value > _SMALLEST_CHANCE, value, 0.0), 1.0)


@triton.jit
def rest_of(mass):
    """What a mass of p leaves of it."""
    return tl.where(mass < 1.0, 1.0 - mass, 0.0)


@triton.jit
def block_accepts(coin, chance, z):
    """Whether a coin is below z / (z + 1 - chance), where 0 / 0 is 1."""
    return ((chance < 1.0) == 0) | (coin * (z + (1.0 - chance)) < z)


@triton.jit
def block_number(key, slot, number, position):
    """Numbers of a slot. Not those at the position of the next token, which a step there would meet again."""
    index = (slot * _NUMBERS_PER_SLOT + number).to(tl.int32)
    w0, w1, _w2, _w3 = random_words(key, index, BLOCK, position + (index ^ index).to(tl.int64))
    return uniform_of(w0, w1)


@triton.jit
def mass_beyond_support(
    pointer, reference, scale, log2_total, chance, ids_at, id_stride, logprobs_at, logprob_stride,
    support_size, vocab_size, wide, threshold, FILTERED: tl.constexpr,
):  # fmt: skip
    """Z of a sparse draft law: what P * p has outside of the support, and beyond q inside."""
    inside = tl.full([], 0.0, tl.float64)
    beyond = tl.full([], 0.0, tl.float64)
    for begin in range(0, support_size, _SUPPORT_TILE):
        j = begin + tl.arange(0, _SUPPORT_TILE)
        ids = load_integer(ids_at, j * id_stride, wide & WIDE_SUPPORT_IDS, j < support_size)
        valid = (j < support_size) & (ids >= 0) & (ids < vocab_size)
        is_first = valid
        q = tl.full([_SUPPORT_TILE], 0.0, tl.float64)
        # Entries of an id that is listed more than once are added, where it comes first.
        for other in range(0, support_size, _SUPPORT_TILE):
            i = other + tl.arange(0, _SUPPORT_TILE)
            listed = load_integer(ids_at, i * id_stride, wide & WIDE_SUPPORT_IDS, i < support_size)
            logprobs = load_real(logprobs_at, i * logprob_stride, 0, i < support_size)
            equal = (listed[None, :] == ids[:, None]) & (i < support_size)[None, :]
            q += tl.sum(tl.where(equal, exp2_f64(logprobs * LOG2E)[None, :], 0.0), axis=1)
            is_first = is_first & (tl.max(tl.where(equal & (i[None, :] < j[:, None]), 1, 0), axis=1) == 0)
        logits = tl.load(pointer + tl.where(valid, ids, 0), mask=valid, other=0.0).to(tl.float32)
        logits = cut(logits, threshold, FILTERED)
        p = exp2_f64(log2_prob(logits, reference, scale, log2_total))
        rest = chance * p - q
        inside += tl.sum(tl.where(is_first, p, 0.0), axis=0)
        beyond += tl.sum(tl.where(is_first & (rest > 0), rest, 0.0), axis=0)
    return chance * rest_of(inside) + beyond


@kernel
def walk_chains(
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
    thresholds: tl.int64, draft_thresholds: tl.int64, draft_thresholds_stride: tl.int64,
    draft_thresholds_entry_stride: tl.int64, draft_thresholds_slot_stride: tl.int64,
    accept_probs_out: tl.int64, answers: tl.int64,
    DTYPE: tl.constexpr, DRAFT_DTYPE: tl.constexpr, LAW: tl.constexpr, NUMBERS: tl.constexpr,
    ALIGNED: tl.constexpr, NUM_BLOCKS: tl.constexpr, WAVE: tl.constexpr, FILTERED: tl.constexpr,
    ATTEMPTS: tl.constexpr,
):  # fmt: skip
    """Finds the chances of the chain of a request, and goes back through it to the slot that decides."""
    r = tl.program_id(0).to(tl.int64)
    first_draft, count, first_row = load_request(
        r, cu, cu_stride, wide, num_drafts, most_drafts, has_bonus_rows
    )
    entry, greedy, has_law, t, draft_t = load_entry(
        r, indices, indices_stride, temperature, temperature_stride,
        draft_temperature, draft_temperature_stride, has_draft_law, has_draft_law_stride,
        wide, num_entries, has_random_numbers, LAW,
    )  # fmt: skip
    if greedy == 0:
        scale, draft_scale = log2_scale(t), log2_scale(draft_t)
        key = splitmix64(
            tl.load((seeds + entry * seeds_stride).to(tl.pointer_type(tl.int64)), mask=seeds != 0, other=0)
        )
        position = load_integer(positions, r * positions_stride, wide & WIDE_POSITIONS, positions != 0)
        places = tl.arange(0, WAVE)
        chance = tl.full([], 1.0, tl.float64)
        begin = count * 0
        end = count
        while begin < end:
            slots = begin + places
            is_draft = slots < count
            rows = first_row + slots
            drafts = first_draft + slots
            x = load_integer(draft_ids, drafts * draft_ids_stride, wide & WIDE_DRAFT_IDS, is_draft)
            valid = is_draft & (x >= 0) & (x < vocab_size)
            logits = row_pointer(target, rows * target_stride + tl.where(valid, x, 0), DTYPE, False)
            logits = tl.load(logits, mask=valid, other=0.0).to(tl.float32)
            if FILTERED:
                logits = cut(logits, load_threshold(thresholds, 4 * rows, valid), True)
            maxima, sums = load_stats_of_rows(stats, rows, is_draft, num_blocks, NUM_BLOCKS, plane)
            largest, non_finite, log2_total, logsumexp = laws_of(maxima, sums, scale)
            reference, log2_total = law_from(largest, log2_total, logsumexp)
            counts = valid & (non_finite == 0) & (largest > float("-inf"))
            p = exp2_f64(log2_prob(logits, reference, scale, log2_total))
            kind = tl.full([WAVE], _ONE_HOT, tl.int32)
            q = tl.full([WAVE], 1.0, tl.float64)
            draft_log2_total = tl.full([WAVE], 0.0, tl.float64)
            if LAW != ONE_HOT:
                own, draft_log2_total = draft_probs_of(
                    x, valid & has_law, slots, is_draft & has_law, first_draft, entry, draft_scale,
                    draft, draft_stride, draft_entry_stride, draft_slot_stride,
                    lse, lse_stride, lse_entry_stride, lse_slot_stride,
                    support_ids, support_ids_stride, support_ids_entry_stride, support_ids_slot_stride,
                    support_id_stride, support_logprobs, support_logprobs_stride,
                    support_logprobs_entry_stride, support_logprobs_slot_stride, support_logprob_stride,
                    support_size, wide, vocab_size, num_blocks, num_target_rows, stats, plane,
                    draft_thresholds, draft_thresholds_stride, draft_thresholds_entry_stride,
                    draft_thresholds_slot_stride,
                    DRAFT_DTYPE, LAW, NUM_BLOCKS, WAVE, FILTERED,
                )  # fmt: skip
                # The one-hot law is exact for every drafter.
                usable = has_law & (own > 0) & is_finite(own)
                kind = tl.where(usable, _HAS_LAW, _ONE_HOT)
                q = tl.where(usable, own, 1.0)

            last = tl.min(tl.where(counts, WAVE, places), axis=0)
            chances = tl.full([WAVE], 0.0, tl.float64)
            for i in range(last):
                chance = next_chance(chance, at(p, places, i), at(q, places, i))
                chances = tl.where(places == i, chance, chances)
            in_chain = places < last
            record = record_of(answers, num_drafts, 0, drafts)
            tl.store(record + CHANCE * num_drafts, chances, mask=in_chain)
            tl.store(record + TARGET_PROB * num_drafts, p, mask=in_chain)
            tl.store(record + KIND * num_drafts, kind.to(tl.float64), mask=in_chain)
            tl.store(record + REFERENCE * num_drafts, reference.to(tl.float64), mask=in_chain)
            tl.store(record + LOG2_TOTAL * num_drafts, log2_total, mask=in_chain)
            tl.store(record + DRAFT_LOG2_TOTAL * num_drafts, draft_log2_total, mask=in_chain)
            if accept_probs_out != 0:
                out = accept_probs_out.to(tl.pointer_type(tl.float32)) + drafts
                tl.store(out, tl.where(in_chain, chances, float("nan")).to(tl.float32), mask=is_draft)
            if last < WAVE:
                end = begin + last
            begin += WAVE
        if accept_probs_out != 0:
            while begin < count:
                out = accept_probs_out.to(tl.pointer_type(tl.float32)) + first_draft + begin + places
                tl.store(out, tl.full([WAVE], float("nan"), tl.float32), mask=begin + places < count)
                begin += WAVE
        # Records are read by other threads than those that have written them.
        tl.debug_barrier()

        nothing = tl.full([], 0.0, tl.float32)
        accepted = end
        won = end < 0
        token = tl.full([], -1, tl.int32)
        status = tl.full([], 0, tl.int32)
        while (accepted > 0) & (won == 0):
            s = accepted - 1
            of_slot = first_draft + s
            chance = tl.load(record_of(answers, num_drafts, CHANCE, of_slot))
            if NUMBERS == SEEDS:
                w0, w1, _w2, _w3 = random_words(key, s.to(tl.int32), ACCEPT, position)
                coin = uniform_of(w0, w1)
            else:
                coin = load_real(
                    accept_uniforms, of_slot * accept_uniforms_stride, wide & WIDE_ACCEPT_UNIFORMS, s >= 0
                )
            if coin < chance:
                if accepted == end:
                    won = end >= 0
                else:
                    p_next = tl.load(record_of(answers, num_drafts, TARGET_PROB, of_slot + 1))
                    is_one_hot = tl.load(record_of(answers, num_drafts, KIND, of_slot + 1)) != _HAS_LAW
                    if is_one_hot:
                        won = block_accepts(coin, chance, chance * rest_of(p_next))
                    else:
                        row = first_row + accepted
                        reference = tl.load(record_of(answers, num_drafts, REFERENCE, of_slot + 1))
                        log2_total = tl.load(record_of(answers, num_drafts, LOG2_TOTAL, of_slot + 1))
                        draft_log2_total = tl.load(
                            record_of(answers, num_drafts, DRAFT_LOG2_TOTAL, of_slot + 1)
                        )
                        pointer = row_pointer(target, row * target_stride, DTYPE, ALIGNED)
                        threshold = nothing
                        draft_threshold = nothing
                        if FILTERED:
                            of_drafts = (
                                first_draft * draft_thresholds_stride
                                + entry * draft_thresholds_entry_stride
                                + accepted * draft_thresholds_slot_stride
                            )  # fmt: skip
                            threshold = load_threshold(thresholds, 4 * row, accepted < count)
                            draft_threshold = load_threshold(draft_thresholds, of_drafts, accepted < count)
                        if LAW == SUPPORT:
                            z = mass_beyond_support(
                                pointer, reference, scale, log2_total, chance,
                                support_ids + first_draft * support_ids_stride
                                + entry * support_ids_entry_stride + accepted * support_ids_slot_stride,
                                support_id_stride,
                                support_logprobs + first_draft * support_logprobs_stride
                                + entry * support_logprobs_entry_stride
                                + accepted * support_logprobs_slot_stride,
                                support_logprob_stride, support_size, vocab_size, wide, threshold, FILTERED,
                            )  # fmt: skip
                            won = block_accepts(coin, chance, z)
                        elif LAW != ONE_HOT:
                            of_drafts = (
                                first_draft * draft_stride + entry * draft_entry_stride
                                + accepted * draft_slot_stride
                            )  # fmt: skip
                            won, token, status = decide_densely(
                                pointer, row_pointer(draft, of_drafts, DRAFT_DTYPE, ALIGNED), row, s, coin,
                                chance, key, position,
                                load_real(
                                    final_uniforms, r * final_uniforms_stride, wide & WIDE_FINAL_UNIFORMS,
                                    final_uniforms != 0,
                                ),
                                stats, plane, num_blocks, vocab_size, reference, scale, log2_total,
                                draft_scale, draft_log2_total, threshold, draft_threshold,
                                LAW, NUMBERS, NUM_BLOCKS, FILTERED, ATTEMPTS,
                            )  # fmt: skip
            if won == 0:
                accepted = s
        decision = decision_of(answers, num_drafts, r)
        tl.store(decision, accepted.to(tl.int32))
        tl.store(decision + 1, token)
        tl.store(decision + 2, status)


@triton.jit
def decide_densely(
    pointer, drafts, row, s, coin, chance, key, position, final_uniform, stats, plane, num_blocks, vocab_size,
    reference, scale, log2_total, draft_scale, draft_log2_total, threshold, draft_threshold,
    LAW: tl.constexpr, NUMBERS: tl.constexpr, NUM_BLOCKS: tl.constexpr, FILTERED: tl.constexpr,
    ATTEMPTS: tl.constexpr,
):  # fmt: skip
    """Whether slot s decides, where the draft behind it has a dense law; then with the token that follows.

    An attempt fails with probability 1 - P, finds y with max(P * p(y) - q(y), 0), and else is made again. So
    a token is found with probability h, and has the law of what is to be emitted.
    """
    blocks = tl.arange(0, NUM_BLOCKS)
    row_stats = stats.to(tl.pointer_type(tl.float32)) + row * num_blocks
    maxima = tl.load(row_stats + blocks, mask=blocks < num_blocks, other=float("-inf"))
    sums = tl.load(row_stats + plane + blocks, mask=blocks < num_blocks, other=0.0)
    of_target = exp2_f64(log2_prob(maxima, reference, scale, log2_total))
    of_target = tl.where(sums > 0, sums.to(tl.float64) * of_target, 0.0)
    nothing = tl.full([], 0.0, tl.float32)
    decided = s < 0
    won = s < 0
    token = tl.full([], -1, tl.int32)
    status = tl.full([], 0, tl.int32)
    own_coin = coin
    last_number = final_uniform
    if NUMBERS == SEEDS:
        attempts = tl.arange(0, ATTEMPTS)
        prefix = tl.cumsum(of_target, axis=0)
        total = tl.sum(of_target, axis=0)
        number = tl.full([], 0, tl.int32)
        while (decided == 0) & (number < THINNING_ATTEMPTS):
            attempt = number + attempts
            u = block_number(key, s, 2 * attempt, position)
            u = tl.where(attempt == 0, coin, u)
            goes_on = u < chance
            draw = tl.where(goes_on, u / chance, 0.0)
            chosen, remainder, _weight = choose(of_target[None, :], prefix[None, :], draw * total, NUM_BLOCKS)
            ids = pick_by_chunks(
                pointer, stats, plane, row * num_blocks, chosen, vocab_size, tl.load(row_stats + chosen),
                scale, remainder, tl.full([ATTEMPTS], _REMAINDER, tl.float64), s * 0 - 1, nothing,
                threshold, FILTERED,
            )  # fmt: skip
            value = tl.load(pointer + ids).to(tl.float32)
            p = chance * exp2_f64(log2_prob(value, reference, scale, log2_total))
            value = cut(tl.load(drafts + ids).to(tl.float32), draft_threshold, FILTERED)
            if LAW == LOGITS:
                q = exp2_f64(log2_prob(value, nothing, draft_scale, draft_log2_total))
            else:
                q = tl.where((value < 0) & is_finite(value), 0.0, value).to(tl.float64)
            unusable = is_finite(q) == 0
            kept = unusable | (block_number(key, s, 2 * attempt + 1, position) * p < p - q)
            first = tl.min(tl.where(kept | (goes_on == 0), attempts, ATTEMPTS), axis=0)
            if first < ATTEMPTS:
                decided = first < ATTEMPTS
                won = at(goes_on.to(tl.int32), attempts, first) != 0
                token = tl.where(won, at(ids, attempts, first), -1).to(tl.int32)
                is_odd = won & (at(unusable.to(tl.int32), attempts, first) != 0)
                status = tl.where(is_odd, UNUSABLE_DRAFT_LAW, 0)
            number += ATTEMPTS
        own_coin = block_number(key, s, 2 * THINNING_ATTEMPTS, position)
        last_number = block_number(key, s, 2 * THINNING_ATTEMPTS + 1, position)
    if decided == 0:
        # A pass over both rows makes Z, and the law of the token.
        log2_total -= log2_f64(chance)
        masses = residual_masses(
            pointer, drafts, row_stats, vocab_size, num_blocks, reference, scale, log2_total, draft_scale,
            draft_log2_total, threshold, draft_threshold, LAW, NUM_BLOCKS, FILTERED,
        )  # fmt: skip
        z = tl.sum(masses, axis=0)
        # NaN: the draft row is not usable, and its slot counts as the end of the chain.
        won = (z != z) | block_accepts(own_coin, chance, z)
        if won:
            status = tl.where(z != z, UNUSABLE_DRAFT_LAW, 0)
            from_target = (z > 0) == 0
            masses = tl.where(from_target, of_target, masses)
            draw = tl.zeros([1], tl.float64) + last_number * tl.sum(masses, axis=0)
            chosen, remainder, _weight = choose(
                masses[None, :], tl.cumsum(masses, axis=0)[None, :], draw, NUM_BLOCKS
            )
            id_number = tl.full([1], _REMAINDER, tl.float64)
            if from_target:
                ids = pick_by_chunks(
                    pointer, stats, plane, row * num_blocks, chosen, vocab_size, tl.load(row_stats + chosen),
                    scale, remainder, id_number, s * 0 - 1, nothing, threshold, FILTERED,
                )  # fmt: skip
                token = tl.max(ids, axis=0).to(tl.int32)
            else:
                largest = tl.load(row_stats + tl.max(chosen, axis=0))
                values = load_blocks(pointer, chosen, vocab_size, float("-inf"), threshold, FILTERED)
                weights = probs_of_block(values, largest, reference, scale, log2_total)
                values = load_blocks(
                    drafts, chosen, vocab_size, 0.0 if LAW == PROBS else float("-inf"), draft_threshold,
                    FILTERED,
                )  # fmt: skip
                weights = subtract(weights, dense_draft_probs(values, draft_scale, draft_log2_total, LAW))
                place = pick_in_blocks(weights, remainder, id_number)
                token = tl.max(chosen * BLOCK_SIZE + place, axis=0).to(tl.int32)
    return won, token, status

"""Exact match: the token that plain sampling draws in each slot."""

from __future__ import annotations

import triton.language as tl

from specdec_ops.triton._chain import SEEDS, choose, pick_by_chunks
from specdec_ops.triton._filters import load_threshold
from specdec_ops.triton._launch import kernel
from specdec_ops.triton._laws import law_of_row, log2_prob
from specdec_ops.triton._numerics import exp2_f64, log2_scale
from specdec_ops.triton._philox import TARGET, random_words, splitmix64, token_draw_of
from specdec_ops.triton._rows import (
    ONE_HOT,
    WIDE_ACCEPT_UNIFORMS,
    WIDE_FINAL_UNIFORMS,
    WIDE_POSITIONS,
    load_entry,
    load_integer,
    load_real,
    load_request,
    row_pointer,
)

#: How the kernel is launched.
DRAW = {"num_warps": 4}
#: The next level of a draw uses what the level above has left.
_REMAINDER = tl.constexpr(-1.0)


@kernel
def draw_tokens(
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
    accept_uniforms: tl.int64, accept_uniforms_stride: tl.int64,
    final_uniforms: tl.int64, final_uniforms_stride: tl.int64,
    batch: tl.int32, thresholds: tl.int64, tokens: tl.int64,
    DTYPE: tl.constexpr, NUMBERS: tl.constexpr, ALIGNED: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The token of one slot of a request that samples; any id where its row holds no law."""
    r = (tl.program_id(0) % batch).to(tl.int64)
    slot = (tl.program_id(0) // batch).to(tl.int64)
    first_draft, count, first_row = load_request(
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
        one = tl.arange(0, 1)
        row_stats = stats.to(tl.pointer_type(tl.float32)) + row * num_blocks
        maxima, sums, _is_law, _largest, reference, log2_total = law_of_row(
            stats, plane, row, num_blocks, scale, NUM_BLOCKS
        )
        of_blocks = exp2_f64(log2_prob(maxima, reference, scale, log2_total))
        of_blocks = tl.where(sums > 0, sums.to(tl.float64) * of_blocks, 0.0)

        if NUMBERS == SEEDS:
            seed = tl.load((seeds + entry * seeds_stride).to(tl.pointer_type(tl.int64)))
            position = load_integer(positions, r * positions_stride, wide & WIDE_POSITIONS, positions != 0)
            w0, w1, w2, w3 = random_words(
                splitmix64(seed), one, TARGET, position + slot + one.to(tl.int64)
            )  # fmt: skip
            block_number, chunk_number, id_number = token_draw_of(w0, w1, w2, w3)
        else:
            own = load_real(
                accept_uniforms, (first_draft + slot) * accept_uniforms_stride, wide & WIDE_ACCEPT_UNIFORMS,
                slot < count,
            )  # fmt: skip
            final = load_real(
                final_uniforms, r * final_uniforms_stride, wide & WIDE_FINAL_UNIFORMS, slot >= count
            )
            block_number = tl.where(slot < count, own, final) + tl.zeros([1], tl.float64)
            chunk_number = tl.full([1], _REMAINDER, tl.float64)
            id_number = tl.full([1], _REMAINDER, tl.float64)
        total = tl.sum(of_blocks, axis=0)
        chosen, remainder, _ = choose(
            of_blocks[None, :], tl.cumsum(of_blocks, axis=0)[None, :], block_number * total, NUM_BLOCKS
        )  # fmt: skip
        chunk_number = tl.where(chunk_number >= 0, chunk_number, remainder)
        pointer = row_pointer(target, row * target_stride, DTYPE, ALIGNED)
        ids = pick_by_chunks(
            pointer, stats, plane, row * num_blocks, chosen, vocab_size, tl.load(row_stats + chosen), scale,
            chunk_number, id_number, slot * 0 - 1, tl.full([], 0.0, tl.float32),
            load_threshold(thresholds, 4 * row, True), True,
        )  # fmt: skip
        tl.store(tokens.to(tl.pointer_type(tl.int32)) + row, tl.max(ids, axis=0).to(tl.int32))

"""The draw from the likeliest ids of a row, whose law is handed over: docs/numerics.md.

Filters have their launches first, which leave a threshold a row. A launch reads blocks of rows, and a program
a row then lists, weighs and draws.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_ops.triton import _chain
from specdec_ops.triton._chain import (
    MASKED_TARGET,
    NON_FINITE_TARGET,
    OK,
    choose_place,
    store_token,
)
from specdec_ops.triton._chain_arguments import Chain, View
from specdec_ops.triton._filters import load_threshold
from specdec_ops.triton._launch import kernel, launch_prepared
from specdec_ops.triton._laws import at, log2_prob
from specdec_ops.triton._likeliest import (
    INDEX,
    INTEGERS,
    MOST_LISTED,
    NOTES,
    PLANES,
    list_likeliest,
    read_block_to_list,
)
from specdec_ops.triton._numerics import LN2, LOG2E, exp2_f64, is_greedy, log2_f64, log2_scale
from specdec_ops.triton._philox import DRAFT, random_words, splitmix64, uniform_of
from specdec_ops.triton._row_blocks import (
    ROW_DTYPES,
    argmax_of_row,
    is_aligned,
    law_of_row,
    places_of_blocks,
    row_blocks,
)
from specdec_ops.triton._rows import (
    BLOCK_SIZE,
    CHUNKS_PER_BLOCK,
    WIDE_FINAL_SLOTS,
    WIDE_FINAL_UNIFORMS,
    WIDE_INDICES,
    WIDE_POSITIONS,
    load_integer,
    load_real,
    row_pointer,
)

#: How the kernels are launched.
_READER = {"num_warps": 4}
_DRAWER = {"num_warps": 4}
_NONE = View()
#: The least float above -inf.
_LOWEST = tl.constexpr(-3.4028234663852886e38)


def draw_from_likeliest(
    chain: Chain,
    law_size: int,
    token_ids: Tensor,
    logprobs: Tensor,
    logsumexp: Tensor,
    status: Tensor,
    thresholds: Tensor,
) -> list[Tensor]:
    """Writes the outputs of ``sample``, and returns the ids of the law and their log-probabilities."""
    logits, batch, views = chain.target, chain.batch, chain.views
    law_ids = token_ids.new_empty((batch, law_size))
    law_logprobs = logits.new_empty((batch, law_size), dtype=torch.float32)
    if batch == 0:
        return [law_ids, law_logprobs]
    if chain.filters is not None:
        chain.find_thresholds(thresholds)
    blocks = row_blocks(chain.vocab_size)
    plane = batch * blocks
    num_numbers = plane * (PLANES.value + CHUNKS_PER_BLOCK.value)
    stats = logits.new_empty(num_numbers + batch * NOTES.value, dtype=torch.float32)
    rows = (
        logits.data_ptr(), logits.stride(0),
        *views.get("indices", _NONE), *views["temperature"], chain.wide, chain.num_entries,
        int(chain.numbers != _chain.NO_NUMBERS.value),
        chain.vocab_size, blocks, stats.data_ptr(), plane,
    )  # fmt: skip
    dtype = ROW_DTYPES[logits.dtype]
    launch_prepared(_read_blocks, plane, logits, rows, (dtype, is_aligned(logits)), _READER)
    outputs = (token_ids, logprobs, logsumexp, status, thresholds, law_ids, law_logprobs)
    launch_prepared(
        _draw, batch, logits,
        (*rows, stats.data_ptr() + 4 * num_numbers, law_size,
         *views.get("seeds", _NONE), *views.get("positions", _NONE), *views.get("final_uniforms", _NONE),
         chain.final_stream, chain.final_slot, *views.get("final_slots", _NONE),
         int(chain.filters is not None), int(token_ids.dtype == torch.int64),
         *(out.data_ptr() for out in outputs)),
        (dtype, places_of_blocks(blocks)), _DRAWER,
    )  # fmt: skip
    return [law_ids, law_logprobs]


@triton.jit
def _request(
    r, indices, indices_stride, temperature, temperature_stride, wide, num_entries, has_random_numbers
):  # fmt: skip
    """Where a request's seed is, whether it is greedy, and its scale. Nobody has checked the values."""
    own_entry = load_integer(indices, r * indices_stride, wide & WIDE_INDICES, indices != 0)
    own_entry = tl.where(indices != 0, tl.minimum(tl.maximum(own_entry, -1), num_entries - 1), r)
    entry = tl.maximum(own_entry, 0)
    t = tl.load((temperature + entry * temperature_stride).to(tl.pointer_type(tl.float32)))
    # Rows of no request are greedy, and greedy rows are at temperature 1.
    t = tl.where((own_entry < 0) | is_greedy(t), 0.0, t)
    scale = log2_scale(tl.where(is_greedy(t), 1.0, t))
    return entry, is_greedy(t) | (has_random_numbers == 0), scale


@kernel
def _read_blocks(
    logits: tl.int64, logits_stride: tl.int64,
    indices: tl.int64, indices_stride: tl.int64, temperature: tl.int64, temperature_stride: tl.int64,
    wide: tl.int32, num_entries: tl.int64, has_random_numbers: tl.int32,
    vocab_size: tl.int32, num_blocks: tl.int32, stats: tl.int64, plane: tl.int64,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A block of a row. Weights are added up where nothing is drawn."""
    r = (tl.program_id(0) // num_blocks).to(tl.int64)
    block = tl.program_id(0) % num_blocks
    _, greedy, scale = _request(
        r, indices, indices_stride, temperature, temperature_stride, wide, num_entries, has_random_numbers
    )
    begin = block * BLOCK_SIZE
    read_block_to_list(
        row_pointer(logits, r * logits_stride + begin, DTYPE, ALIGNED), stats, plane, r * num_blocks + block,
        tl.minimum(vocab_size - begin, BLOCK_SIZE), scale, greedy, greedy == 0, 0.0, INDEX,
    )  # fmt: skip


@kernel
def _draw(
    logits: tl.int64, logits_stride: tl.int64,
    indices: tl.int64, indices_stride: tl.int64, temperature: tl.int64, temperature_stride: tl.int64,
    wide: tl.int32, num_entries: tl.int64, has_random_numbers: tl.int32,
    vocab_size: tl.int32, num_blocks: tl.int32, stats: tl.int64, plane: tl.int64,
    notes: tl.int64, law_size: tl.int32,
    seeds: tl.int64, seeds_stride: tl.int64, positions: tl.int64, positions_stride: tl.int64,
    uniforms: tl.int64, uniforms_stride: tl.int64,
    stream: tl.int32, slot: tl.int64, slots: tl.int64, slots_stride: tl.int64,
    has_thresholds: tl.int32, ids_are_wide: tl.int32,
    token_out: tl.int64, logprob_out: tl.int64, logsumexp_out: tl.int64,
    status_out: tl.int64, threshold_out: tl.int64, law_ids_out: tl.int64, law_logprobs_out: tl.int64,
    DTYPE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """All outputs of a row, whose threshold by filters lies where that by size goes."""
    r = tl.program_id(0).to(tl.int64)
    entry, greedy, scale = _request(
        r, indices, indices_stride, temperature, temperature_stride, wide, num_entries, has_random_numbers
    )
    wide_scale = scale.to(tl.float64)
    pointer = row_pointer(logits, r * logits_stride, DTYPE, False)
    largest, reference, log2_total, logsumexp = law_of_row(stats, plane, r, num_blocks, scale, NUM_BLOCKS)
    status = tl.full([], OK, tl.int32)
    if logsumexp != logsumexp:
        status = tl.full([], NON_FINITE_TARGET, tl.int32)
    elif largest == float("-inf"):
        status = tl.full([], MASKED_TARGET, tl.int32)
    places = tl.arange(0, MOST_LISTED)
    threshold = tl.full([], float("-inf"), tl.float32)
    if (status == OK) & (greedy == 0):
        threshold = load_threshold(threshold_out, 4 * r, has_thresholds != 0) + 0.0
        ids, count = list_likeliest(
            pointer, stats, plane, r, notes + r * NOTES * 4, vocab_size, num_blocks, law_size,
            tl.maximum(threshold, _LOWEST), False, DTYPE, NUM_BLOCKS,
        )  # fmt: skip
        is_kept = places < count
        x = tl.load(pointer + ids, mask=is_kept, other=0.0).to(tl.float32)
        log2_weights = (x.to(tl.float64) - largest.to(tl.float64)) * wide_scale + 0.0
        log2_sum = log2_f64(tl.sum(tl.where(is_kept, exp2_f64(log2_weights), 0.0), axis=0))
        # Verification makes probabilities of these numbers, so the draw goes by the same ones.
        law = tl.where(is_kept, ((log2_weights - log2_sum) * LN2).to(tl.float32), float("-inf"))
        probs = tl.where(is_kept, exp2_f64(law.to(tl.float64) * LOG2E), 0.0)
        number = tl.zeros([1], tl.float64) + load_real(
            uniforms, r * uniforms_stride, wide & WIDE_FINAL_UNIFORMS, uniforms != 0
        )
        if seeds != 0:
            seed = tl.load((seeds + entry * seeds_stride).to(tl.pointer_type(tl.int64)))
            own_slot = load_integer(slots, r * slots_stride, wide & WIDE_FINAL_SLOTS, slots != 0)
            own_slot = tl.where(slots != 0, own_slot, slot)
            own_slot = tl.where(stream == DRAFT, own_slot, 0).to(tl.int32) + tl.zeros([1], tl.int32)
            position = load_integer(positions, r * positions_stride, wide & WIDE_POSITIONS, positions != 0)
            position += tl.zeros([1], tl.int64)
            w0, w1, _, _ = random_words(splitmix64(seed), own_slot, stream, position)
            number = uniform_of(w0, w1)
        chosen, _ = choose_place(
            probs[None, :], tl.cumsum(probs, axis=0)[None, :], number * tl.sum(probs, axis=0), MOST_LISTED
        )
        token = at(ids, places, chosen).to(tl.int64)
        logprob = at(law, places, chosen)
        logsumexp = tl.fma(largest.to(tl.float64), wide_scale, log2_sum) * LN2
        if count == law_size:
            threshold = at(x, places, count - 1) + 0.0
        law_ids = tl.where(is_kept, ids, -1).to(tl.int64)
    else:
        # A token that is certain: the lowest id with the largest logit.
        blocks = tl.arange(0, NUM_BLOCKS)
        inside = blocks < num_blocks
        numbers = stats.to(tl.pointer_type(tl.float32)) + r * num_blocks + blocks
        firsts = tl.load(numbers, mask=inside, other=float("nan"))
        of_first = tl.load(numbers + INTEGERS * plane, mask=inside, other=0.0)
        token = argmax_of_row(firsts, largest, of_first, blocks)
        value = tl.load(pointer + token).to(tl.float32)
        logprob = (log2_prob(value, reference, scale, log2_total) * LN2).to(tl.float32)
        logprob = tl.where(status == OK, logprob, float("nan"))
        law_ids = tl.where(places == 0, token, -1)
        law = tl.where(places == 0, 0.0, float("-inf"))
    store_token(token_out, r, token, ids_are_wide, r >= 0)
    tl.store(logprob_out.to(tl.pointer_type(tl.float32)) + r, logprob)
    tl.store(logsumexp_out.to(tl.pointer_type(tl.float64)) + r, logsumexp)
    tl.store(status_out.to(tl.pointer_type(tl.int32)) + r, status)
    tl.store(threshold_out.to(tl.pointer_type(tl.float32)) + r, threshold)
    is_of_law = places < law_size
    store_token(law_ids_out, r * law_size + places, law_ids, ids_are_wide, is_of_law)
    tl.store(law_logprobs_out.to(tl.pointer_type(tl.float32)) + r * law_size + places, law, mask=is_of_law)

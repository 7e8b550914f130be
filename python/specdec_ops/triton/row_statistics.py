"""row_statistics in Triton: blocks of rows, then blocks of pairs, then rows from their blocks.

csrc/cpu/kernels/row_statistics.kernel.h defines the bits of what a block leaves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_ops.triton._chain import (
    MASKED_TARGET,
    NON_FINITE_TARGET,
    OK,
    UNUSABLE_DRAFT_LAW,
)
from specdec_ops.triton._chain_arguments import ChainChecks, View, view
from specdec_ops.triton._launch import kernel, launch_prepared
from specdec_ops.triton._laws import log2_prob
from specdec_ops.triton._numerics import (
    LARGEST_LOGSUMEXP,
    LN2,
    exp2_f64,
    flush,
    is_greedy,
    log2_f64,
    log2_scale,
    weight_factors,
    weights_of,
)
from specdec_ops.triton._row_blocks import (
    ROW_DTYPES,
    argmax_of_row,
    is_aligned,
    law_of_row,
    load_lanes,
    places_of_blocks,
    row_blocks,
    rows_of_block,
)
from specdec_ops.triton._rows import (
    BLOCK_SIZE,
    NUM_LANES,
    ids_of_block,
    load_integer,
    row_pointer,
    sum_by_halves,
)

#: How the kernels are launched.
_READER = {"num_warps": 4}
_WRITER = {"num_warps": 4}
#: What a block of a row leaves, each in a plane of its own: its largest logit, the sum of its weights, the
#: lowest id with the largest logit, the second largest logit, and the moment of the weights.
_INDICES, _SECONDS, _MOMENTS = tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
_PLANES = tl.constexpr(5)
#: Behind them what a block of a pair leaves: sums of min(p, q) and of max(p - q, 0).
_PLANES_OF_PAIRS = 2


def row_statistics(
    logits: Tensor,
    temperature: Tensor,
    *,
    draft_logits: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    row_indices: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """See :func:`specdec_ops.row_statistics`."""
    checks = ChainChecks("row_statistics", logits)
    checks.row_dtype(logits, "logits")
    checks.dims(logits, "logits", "[rows, width]", 2)
    checks.contiguous_rows(logits, "logits")
    num_rows = logits.shape[0]
    indices = View()
    if row_indices is not None:
        checks.integer(row_indices, "row_indices")
        checks.dims(row_indices, "row_indices", "[num_rows]", 1)
        num_rows = row_indices.shape[0]
        indices = view(row_indices)
    size = checks.vocab_size(vocab_size, logits, "logits")
    checks.float32_vector(temperature, "temperature", "[num_rows]", num_rows)
    if draft_temperature is not None and draft_logits is None:
        checks.fail("draft_temperature must be given with draft_logits, got it alone")
    if draft_logits is not None:
        checks.rows(draft_logits, "draft_logits", "[num_rows, width]", num_rows)
        if num_rows > 0:
            checks.wide_enough(draft_logits, "draft_logits", size)
    if draft_temperature is not None:
        checks.float32_vector(draft_temperature, "draft_temperature", "[num_rows]", num_rows)

    num_floats = 3 if draft_logits is None else 5
    floats = [logits.new_empty(num_rows, dtype=torch.float32) for _ in range(num_floats)]
    logsumexp = logits.new_empty(num_rows, dtype=torch.float64)
    status = logits.new_empty(num_rows, dtype=torch.int32)
    outputs = (logsumexp, floats[0], floats[1], floats[2], status, floats[3:])
    if num_rows == 0:
        return outputs

    blocks = row_blocks(size)
    num_rows_read = num_rows if draft_logits is None else 2 * num_rows
    plane, pairs_plane = num_rows_read * blocks, num_rows * blocks
    num_numbers = _PLANES.value * plane + (_PLANES_OF_PAIRS * pairs_plane if draft_logits is not None else 0)
    stats = logits.new_empty(num_numbers, dtype=torch.float32)
    drafts = logits if draft_logits is None else draft_logits
    rows = (
        logits.data_ptr(), logits.stride(0), logits.shape[0],
        *indices, int(row_indices is not None and row_indices.dtype == torch.int64),
        *view(temperature),
        0 if draft_logits is None else drafts.data_ptr(), drafts.stride(0),
        *view(temperature if draft_temperature is None else draft_temperature),
        num_rows, size, blocks, stats.data_ptr(), plane,
    )  # fmt: skip
    dtype, draft_dtype = ROW_DTYPES[logits.dtype], ROW_DTYPES[drafts.dtype]
    aligned = is_aligned(logits) and is_aligned(drafts)
    if dtype == draft_dtype:
        launch_prepared(_read_blocks, plane, logits, (*rows, 0), (dtype, aligned), _READER)
    else:
        launch_prepared(_read_blocks, pairs_plane, logits, (*rows, 0), (dtype, aligned), _READER)
        launch_prepared(_read_blocks, pairs_plane, logits, (*rows, num_rows), (draft_dtype, aligned), _READER)
    places = places_of_blocks(blocks)
    if draft_logits is not None:
        launch_prepared(
            _compare_blocks, pairs_plane, logits, rows, (dtype, draft_dtype, aligned, places), _READER
        )
    launch_prepared(
        _write_rows, num_rows, logits,
        (*rows, logsumexp.data_ptr(), status.data_ptr(),
         *(out.data_ptr() for out in floats), *([0, 0] if draft_logits is None else [])),
        (dtype, draft_dtype, places), _WRITER,
    )  # fmt: skip
    return outputs


@triton.jit
def _target_row(row, num_target_rows, indices, indices_stride, indices_are_wide):
    """The row of the target's logits, -1 where there is none."""
    index = load_integer(indices, row * indices_stride, indices_are_wide, indices != 0)
    index = tl.where(indices != 0, index, row)
    return tl.where((index >= 0) & (index < num_target_rows), index, -1)


@triton.jit
def _temperature(temperature, stride, row):
    return tl.load((temperature + row * stride).to(tl.pointer_type(tl.float32)))


@triton.jit
def _scale(temperature):
    """Greedy rows: at temperature 1."""
    return log2_scale(tl.where(is_greedy(temperature), 1.0, temperature))


@triton.jit
def _statistics_of_block(pointer, size, scale, finds_index, MASKED: tl.constexpr):
    """Largest logit, sum of the weights, index of the largest, second largest, moment of the weights."""
    ids = ids_of_block()
    x = load_lanes(pointer, ids, size, MASKED)
    first = tl.max(tl.max(tl.where(x == x, x, float("-inf")), axis=1), axis=0)
    num_first = tl.sum(tl.sum(tl.where(x == first, 1, 0), axis=1), axis=0)
    second = tl.max(tl.max(tl.where(x < first, x, float("-inf")), axis=1), axis=0)
    second = tl.where(num_first > 1, first, second)
    index = tl.full([], BLOCK_SIZE, tl.int32)
    if finds_index:
        is_first = (x == first) & (ids < size)
        index = tl.min(tl.min(tl.where(is_first, ids, BLOCK_SIZE), axis=1), axis=0)
    reference = tl.where(first > float("-inf"), first, 0.0)
    floor = tl.div_rn(tl.full([], -127.0, tl.float32), scale)
    sums = tl.full([NUM_LANES], 0.0, tl.float32)
    moments = tl.full([NUM_LANES], 0.0, tl.float32)
    for row in tl.range(0, rows_of_block(size, MASKED), loop_unroll_factor=4):
        values = load_lanes(pointer, row * NUM_LANES + tl.arange(0, NUM_LANES), size, MASKED)
        polynomial, power = weight_factors(values, reference, scale)
        sums = tl.fma(polynomial, power, sums)
        above = tl.maximum(floor, values - reference, propagate_nan=tl.PropagateNan.ALL)
        moments = tl.fma(polynomial * power, above, moments)
    return first, flush(sum_by_halves(sums)), index, second, sum_by_halves(moments)


@kernel
def _read_blocks(
    target: tl.int64, target_stride: tl.int64, num_target_rows: tl.int64,
    indices: tl.int64, indices_stride: tl.int64, indices_are_wide: tl.int32,
    temperature: tl.int64, temperature_stride: tl.int64,
    draft: tl.int64, draft_stride: tl.int64,
    draft_temperature: tl.int64, draft_temperature_stride: tl.int64,
    num_rows: tl.int64, vocab_size: tl.int32, num_blocks: tl.int32, stats: tl.int64, plane: tl.int64,
    first_row: tl.int64,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A block of a row: those of the target's rows come first, then those of the draft's."""
    number = first_row + (tl.program_id(0) // num_blocks).to(tl.int64)
    block = tl.program_id(0) % num_blocks
    is_draft = number >= num_rows
    row = tl.where(is_draft, number - num_rows, number)
    target_row = _target_row(row, num_target_rows, indices, indices_stride, indices_are_wide)
    # A pair without a target row is not looked at.
    if target_row >= 0:
        t = _temperature(
            tl.where(is_draft, draft_temperature, temperature),
            tl.where(is_draft, draft_temperature_stride, temperature_stride), row,
        )  # fmt: skip
        begin = block * BLOCK_SIZE
        size = tl.minimum(vocab_size - begin, BLOCK_SIZE)
        offset = tl.where(is_draft, row * draft_stride, target_row * target_stride) + begin
        pointer = row_pointer(tl.where(is_draft, draft, target), offset, DTYPE, ALIGNED)
        finds_index = (draft != 0) & is_greedy(t)
        scale = _scale(t)
        # A whole block needs no mask, so that its loads are of 16 bytes.
        if size == BLOCK_SIZE:
            first, total, index, second, moment = _statistics_of_block(
                pointer, size, scale, finds_index, False
            )
        else:
            first, total, index, second, moment = _statistics_of_block(
                pointer, size, scale, finds_index, True
            )
        numbers = stats.to(tl.pointer_type(tl.float32)) + number * num_blocks + block
        tl.store(numbers, first)
        tl.store(numbers + plane, total)
        tl.store(numbers + _INDICES * plane, index.to(tl.float32))
        tl.store(numbers + _SECONDS * plane, second)
        tl.store(numbers + _MOMENTS * plane, moment)


@triton.jit
def _overlap_of_block(
    pointer, drafts, size, largest, scale, factor, draft_largest, draft_scale, draft_factor,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Sums of min(p, q) and of max(p - q, 0)."""
    common = tl.full([NUM_LANES], 0.0, tl.float32)
    excess = tl.full([NUM_LANES], 0.0, tl.float32)
    for row in tl.range(0, rows_of_block(size, MASKED), loop_unroll_factor=4):
        i = row * NUM_LANES + tl.arange(0, NUM_LANES)
        p = weights_of(load_lanes(pointer, i, size, MASKED), largest, scale, factor)
        q = weights_of(load_lanes(drafts, i, size, MASKED), draft_largest, draft_scale, draft_factor)
        common += tl.where(p < q, p, q)
        rest = flush(p - q)
        excess += tl.where(rest > 0.0, rest, 0.0)
    return sum_by_halves(common), sum_by_halves(excess)


@kernel
def _compare_blocks(
    target: tl.int64, target_stride: tl.int64, num_target_rows: tl.int64,
    indices: tl.int64, indices_stride: tl.int64, indices_are_wide: tl.int32,
    temperature: tl.int64, temperature_stride: tl.int64,
    draft: tl.int64, draft_stride: tl.int64,
    draft_temperature: tl.int64, draft_temperature_stride: tl.int64,
    num_rows: tl.int64, vocab_size: tl.int32, num_blocks: tl.int32, stats: tl.int64, plane: tl.int64,
    DTYPE: tl.constexpr, DRAFT_DTYPE: tl.constexpr, ALIGNED: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """A block of a pair of which neither law is one-hot."""
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    block = tl.program_id(0) % num_blocks
    target_row = _target_row(row, num_target_rows, indices, indices_stride, indices_are_wide)
    t = _temperature(temperature, temperature_stride, row)
    draft_t = _temperature(draft_temperature, draft_temperature_stride, row)
    if (target_row >= 0) & (is_greedy(t) == 0) & (is_greedy(draft_t) == 0):
        scale, draft_scale = log2_scale(t), log2_scale(draft_t)
        _, reference, log2_total, logsumexp = law_of_row(stats, plane, row, num_blocks, scale, NUM_BLOCKS)
        _, _, draft_log2_total, draft_logsumexp = law_of_row(
            stats, plane, num_rows + row, num_blocks, draft_scale, NUM_BLOCKS
        )
        is_summed = (tl.abs(logsumexp) < float("inf")) & (tl.abs(draft_logsumexp) < LARGEST_LOGSUMEXP)
        if is_summed:
            maxima = stats.to(tl.pointer_type(tl.float32)) + row * num_blocks + block
            largest, draft_largest = tl.load(maxima), tl.load(maxima + num_rows * num_blocks)
            factor = exp2_f64(log2_prob(largest, reference, scale, log2_total)).to(tl.float32)
            zero = tl.full([], 0.0, tl.float32)
            draft_factor = log2_prob(draft_largest, zero, draft_scale, draft_log2_total)
            draft_factor = exp2_f64(draft_factor).to(tl.float32)
            begin = block * BLOCK_SIZE
            size = tl.minimum(vocab_size - begin, BLOCK_SIZE)
            pointer = row_pointer(target, target_row * target_stride + begin, DTYPE, ALIGNED)
            drafts = row_pointer(draft, row * draft_stride + begin, DRAFT_DTYPE, ALIGNED)
            if size == BLOCK_SIZE:
                common, excess = _overlap_of_block(
                    pointer, drafts, size, largest, scale, factor, draft_largest, draft_scale, draft_factor,
                    False,
                )  # fmt: skip
            else:
                common, excess = _overlap_of_block(
                    pointer, drafts, size, largest, scale, factor, draft_largest, draft_scale, draft_factor,
                    True,
                )  # fmt: skip
            tl.store(maxima + _PLANES * plane, common)
            tl.store(maxima + _PLANES * plane + num_rows * num_blocks, excess)


@kernel
def _write_rows(
    target: tl.int64, target_stride: tl.int64, num_target_rows: tl.int64,
    indices: tl.int64, indices_stride: tl.int64, indices_are_wide: tl.int32,
    temperature: tl.int64, temperature_stride: tl.int64,
    draft: tl.int64, draft_stride: tl.int64,
    draft_temperature: tl.int64, draft_temperature_stride: tl.int64,
    num_rows: tl.int64, vocab_size: tl.int32, num_blocks: tl.int32, stats: tl.int64, plane: tl.int64,
    logsumexp_out: tl.int64, status_out: tl.int64, max_prob_out: tl.int64, margin_out: tl.int64,
    entropy_out: tl.int64, accept_prob_out: tl.int64, total_variation_out: tl.int64,
    DTYPE: tl.constexpr, DRAFT_DTYPE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """All outputs of a row."""
    row = tl.program_id(0).to(tl.int64)
    nan = tl.full([], float("nan"), tl.float64)
    logsumexp, max_prob, margin, entropy = nan, nan, nan, nan
    # Of min(p, q), and of max(p - q, 0).
    common, excess = nan, nan
    status = tl.full([], OK, tl.int32)
    target_row = _target_row(row, num_target_rows, indices, indices_stride, indices_are_wide)
    if target_row >= 0:
        t = _temperature(temperature, temperature_stride, row)
        scale = _scale(t)
        wide_scale = scale.to(tl.float64)
        largest, reference, log2_total, logsumexp = law_of_row(
            stats, plane, row, num_blocks, scale, NUM_BLOCKS
        )
        if logsumexp != logsumexp:
            status = tl.full([], NON_FINITE_TARGET, tl.int32)
        elif largest == float("-inf"):
            status = tl.full([], MASKED_TARGET, tl.int32)
        blocks = tl.arange(0, NUM_BLOCKS)
        inside = blocks < num_blocks
        numbers = stats.to(tl.pointer_type(tl.float32)) + row * num_blocks + blocks
        firsts = tl.load(numbers, mask=inside, other=float("-inf"))
        if status == OK:
            sums = tl.load(numbers + plane, mask=inside, other=0.0).to(tl.float64)
            seconds = tl.load(numbers + _SECONDS * plane, mask=inside, other=float("-inf"))
            moments = tl.load(numbers + _MOMENTS * plane, mask=inside, other=0.0).to(tl.float64)
            # Weights refer to the row's largest logit, as do the distances that make the energy.
            below = (largest.to(tl.float64) - tl.where(sums > 0, firsts, largest).to(tl.float64)) * wide_scale
            weights = tl.where(sums > 0, exp2_f64(-below), 0.0)
            total = tl.sum(sums * weights, axis=0)
            energy = tl.sum(tl.fma(sums, below, -(moments * wide_scale)) * weights, axis=0)
            entropy = (log2_f64(total) + energy / total) * LN2
            max_prob = exp2_f64(log2_prob(largest, reference, scale, log2_total))
            # Equal logits of several blocks are all first ones.
            is_alone = tl.sum(tl.where(firsts == largest, 1, 0), axis=0) == 1
            others = tl.where(is_alone & (firsts == largest), seconds, firsts)
            gap = largest.to(tl.float64) - tl.max(others, axis=0).to(tl.float64)
            # A difference of zeros may be -0.
            margin = gap * wide_scale * LN2 + 0.0
        if (draft != 0) & (status == OK):
            draft_t = _temperature(draft_temperature, draft_temperature_stride, row)
            draft_scale = _scale(draft_t)
            draft_largest, _, draft_log2_total, draft_logsumexp = law_of_row(
                stats, plane, num_rows + row, num_blocks, draft_scale, NUM_BLOCKS
            )
            of_target = row_pointer(target, target_row * target_stride, DTYPE, False)
            of_draft = row_pointer(draft, row * draft_stride, DRAFT_DTYPE, False)
            of_drafts = numbers + num_rows * num_blocks
            is_usable = tl.abs(draft_logsumexp) < LARGEST_LOGSUMEXP
            if is_greedy(draft_t):
                draft_firsts = tl.load(of_drafts, mask=inside, other=float("nan"))
                places = tl.load(of_drafts + _INDICES * plane, mask=inside, other=0.0)
                token = argmax_of_row(draft_firsts, draft_largest, places, blocks)
                if is_greedy(t):
                    places = tl.load(numbers + _INDICES * plane, mask=inside, other=BLOCK_SIZE)
                    common = (token == argmax_of_row(firsts, largest, places, blocks)).to(tl.float64)
                else:
                    x = tl.load(of_target + token).to(tl.float32)
                    common = exp2_f64(log2_prob(x, reference, scale, log2_total))
                excess = 1.0 - common
            elif is_usable == 0:
                status = tl.full([], UNUSABLE_DRAFT_LAW, tl.int32)
            elif is_greedy(t):
                places = tl.load(numbers + _INDICES * plane, mask=inside, other=BLOCK_SIZE)
                y = tl.load(of_draft + argmax_of_row(firsts, largest, places, blocks)).to(tl.float32)
                zero = tl.full([], 0.0, tl.float32)
                common = exp2_f64(log2_prob(y, zero, draft_scale, draft_log2_total))
                excess = 1.0 - common
            else:
                of_pairs = numbers + _PLANES * plane
                common = tl.sum(tl.load(of_pairs, mask=inside, other=0.0).to(tl.float64), axis=0)
                of_pairs += num_rows * num_blocks
                excess = tl.sum(tl.load(of_pairs, mask=inside, other=0.0).to(tl.float64), axis=0)
    tl.store(logsumexp_out.to(tl.pointer_type(tl.float64)) + row, logsumexp)
    tl.store(status_out.to(tl.pointer_type(tl.int32)) + row, status)
    tl.store(max_prob_out.to(tl.pointer_type(tl.float32)) + row, max_prob.to(tl.float32))
    tl.store(margin_out.to(tl.pointer_type(tl.float32)) + row, margin.to(tl.float32))
    tl.store(entropy_out.to(tl.pointer_type(tl.float32)) + row, entropy.to(tl.float32))
    if draft != 0:
        # Rounding may lead out of [0, 1]; NaN stays.
        common = tl.where(common > 1.0, 1.0, common)
        excess = tl.where(excess < 0.0, 0.0, tl.where(excess > 1.0, 1.0, excess))
        tl.store(accept_prob_out.to(tl.pointer_type(tl.float32)) + row, common.to(tl.float32))
        tl.store(total_variation_out.to(tl.pointer_type(tl.float32)) + row, excess.to(tl.float32))

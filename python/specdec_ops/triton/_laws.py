"""Laws of rows, from the numbers of their blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec_ops.triton._numerics import LARGEST_LOGSUMEXP, LN2, LOG2E, exp2_f64, log2_f64


@triton.jit
def at(values, places, i):
    """Element i of a vector, whose places are given, as a number."""
    return tl.sum(tl.where(places == i, values, 0), axis=0)


@triton.jit
def laws_of(maxima, sums, scale):
    """Of rows, from the numbers of their blocks: largest logit, whether all is finite, log2 of the total."""
    largest = tl.max(maxima, axis=1)
    non_finite = tl.max(tl.where(sums != sums, 1, 0), axis=1) != 0
    distance = (maxima.to(tl.float64) - largest[:, None].to(tl.float64)) * scale.to(tl.float64)
    weights = exp2_f64(tl.where(sums > 0, distance, 0.0))
    total = tl.sum(tl.where(sums > 0, sums.to(tl.float64) * weights, 0.0), axis=1)
    log2_total = log2_f64(tl.where(total > 0, total, 1.0))
    log2_sum = tl.fma(largest.to(tl.float64), scale.to(tl.float64), log2_total)
    logsumexp = tl.where(largest > float("-inf"), log2_sum * LN2, float("-inf"))
    logsumexp = tl.where(non_finite, float("nan"), logsumexp)
    return largest, non_finite, log2_total, logsumexp


@triton.jit
def law_from(largest, log2_total, logsumexp):
    """The reference and log2 of the total of laws that laws_of has found."""
    usable = tl.abs(logsumexp) < LARGEST_LOGSUMEXP
    # A law is put together from its logsumexp.
    return tl.where(usable, 0.0, largest), tl.where(usable, logsumexp * LOG2E, log2_total)


@triton.jit
def log2_prob(x, reference, scale, log2_total):
    distance = x.to(tl.float64) - reference.to(tl.float64)
    return tl.fma(distance, scale.to(tl.float64), -log2_total)


@triton.jit
def load_stats_of_rows(stats, rows, present, num_blocks, NUM_BLOCKS: tl.constexpr, PLANE):
    """Largest logits and sums of the blocks of rows, [rows, blocks]."""
    block = tl.arange(0, NUM_BLOCKS)
    mask = present[:, None] & (block < num_blocks)[None, :]
    pointer = stats.to(tl.pointer_type(tl.float32)) + rows[:, None] * num_blocks + block[None, :]
    maxima = tl.load(pointer, mask=mask, other=float("-inf"))
    return maxima, tl.load(pointer + PLANE, mask=mask, other=0.0)


@triton.jit
def law_of_row(stats, plane, row, num_blocks, scale, NUM_BLOCKS: tl.constexpr):
    """A row's numbers by block; whether it is a law, largest logit, reference, log2 of the total."""
    block = tl.arange(0, NUM_BLOCKS)
    pointer = stats.to(tl.pointer_type(tl.float32)) + row * num_blocks + block
    maxima = tl.load(pointer, mask=block < num_blocks, other=float("-inf"))
    sums = tl.load(pointer + plane, mask=block < num_blocks, other=0.0)
    largest, non_finite, log2_total, logsumexp = laws_of(maxima[None, :], sums[None, :], scale)
    reference, log2_total = law_from(largest, log2_total, logsumexp)
    one = tl.arange(0, 1)
    is_law = at(tl.where(non_finite | (largest == float("-inf")), 0, 1), one, 0) != 0
    return maxima, sums, is_law, at(largest, one, 0), at(reference, one, 0), at(log2_total, one, 0)

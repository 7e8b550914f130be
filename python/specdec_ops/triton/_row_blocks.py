"""What the kernels that read rows in blocks have in common, beside _rows.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import num_blocks
from specdec_ops.triton._laws import law_from, laws_of, load_stats_of_rows
from specdec_ops.triton._numerics import flush, weight_factors
from specdec_ops.triton._rows import BLOCK_SIZE, NUM_LANES, sum_by_halves

ROW_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
#: Room for the numbers of a row's blocks: one kernel serves all vocabularies up to 262,144.
_FEWEST_PLACES = 64
#: No id of a row.
_NO_ID = tl.constexpr(1 << 30)


def row_blocks(vocab_size: int) -> int:
    """Blocks of a row."""
    return num_blocks(vocab_size, BLOCK_SIZE.value)


def places_of_blocks(blocks: int) -> int:
    """A power of two that has room for a number of each block of a row."""
    return max(1 << (blocks - 1).bit_length(), _FEWEST_PLACES)


def is_aligned(rows: Tensor) -> bool:
    """Whether 16 bytes of a row can be read at once."""
    return (rows.data_ptr() | rows.stride(0) * rows.element_size()) % 16 == 0


@triton.jit
def load_lanes(pointer, ids, size, MASKED: tl.constexpr):
    """Elements of a block as float32; -inf from its end on."""
    if MASKED:
        return tl.load(pointer + ids, mask=ids < size, other=float("-inf")).to(tl.float32)
    else:
        return tl.load(pointer + ids).to(tl.float32)


@triton.jit
def rows_of_block(size, MASKED: tl.constexpr):
    """How many rows of lanes have elements: what pads the last block of a row adds nothing to a sum."""
    if MASKED:
        return tl.cdiv(size, NUM_LANES)
    else:
        return BLOCK_SIZE // NUM_LANES


@triton.jit
def sum_of_block(pointer, size, largest, scale, MASKED: tl.constexpr):
    """The sum of the weights of a block that was read before, as docs/numerics.md has it."""
    reference = tl.where(largest > float("-inf"), largest, 0.0)
    sums = tl.full([NUM_LANES], 0.0, tl.float32)
    for row in tl.range(0, rows_of_block(size, MASKED), loop_unroll_factor=4):
        x = load_lanes(pointer, row * NUM_LANES + tl.arange(0, NUM_LANES), size, MASKED)
        polynomial, power = weight_factors(x, reference, scale)
        sums = tl.fma(polynomial, power, sums)
    return flush(sum_by_halves(sums))


@triton.jit
def law_of_row(stats, plane, number, num_blocks, scale, NUM_BLOCKS: tl.constexpr):
    """Of a row: largest logit, the reference of its law, log2 of the total that goes with it, logsumexp."""
    one = tl.zeros([1], tl.int64) + number
    maxima, sums = load_stats_of_rows(stats, one, one >= 0, num_blocks, NUM_BLOCKS, plane)
    largest, _, log2_total, logsumexp = laws_of(maxima, sums, scale)
    largest, log2_total = tl.sum(largest, axis=0), tl.sum(log2_total, axis=0)
    logsumexp = tl.sum(logsumexp, axis=0)
    reference, log2_total = law_from(largest, log2_total, logsumexp)
    return largest, reference, log2_total, logsumexp


@triton.jit
def argmax_of_row(firsts, largest, indices, blocks):
    """The lowest id with the largest logit that is not NaN; 0 if there is none."""
    is_first = (firsts == largest) & (indices < BLOCK_SIZE)
    found = tl.min(tl.where(is_first, blocks * BLOCK_SIZE + indices.to(tl.int32), _NO_ID), axis=0)
    return tl.where(found < _NO_ID, found, 0).to(tl.int64)

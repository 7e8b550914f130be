"""What the ops share that prepare a draft model's inputs over a paged key-value cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import INT32_MAX, INT64_MAX, Checks, shape_of
from specdec_ops.triton._views import load_int_at, word_rows


def largest_value(tensor: Tensor) -> int:
    """Of an integer tensor's dtype."""
    return INT64_MAX if tensor.dtype == torch.int64 else INT32_MAX


def token_id(checks: Checks, value: int, name: str, output: Tensor) -> None:
    """Checks a token id that ``output`` can hold."""
    if output.dtype != torch.int64:
        checks.int32(value, name)


def slot_table(
    checks: Checks, block_table: Tensor, batch: int, block_size: int, pad_slot_id: int, *outputs: Tensor
) -> tuple[int, ...]:
    """The table of a batch as kernels take it, for slots that every one of ``outputs`` can hold."""
    checks.integer(block_table, "block_table")
    if block_table.dim() != 2 or block_table.shape[0] < batch:
        checks.fail(
            f"block_table must be [batch, num_columns] with at least {batch} rows, "
            f"got {shape_of(block_table)}"
        )
    checks.positive_int32(block_size, "block_size")
    last_slot = min(largest_value(output) for output in outputs)
    if last_slot == INT32_MAX:
        checks.int32(pad_slot_id, "pad_slot_id")
    last_block = (last_slot + 1) // block_size - 1
    view = word_rows(block_table, block_table)
    return (*view, block_table.shape[1], block_size, min(last_block, INT64_MAX), pad_slot_id)


@triton.jit
def slot_of(
    blocks,
    blocks_row_stride,
    blocks_layout,
    num_columns,
    block_size,
    last_block,
    pad_slot_id,
    request,
    position,
    mask,
):
    """Where a block table puts the positions of requests; padding where that is nowhere."""
    clamped_position = tl.maximum(position, 0)
    column = clamped_position // block_size
    is_inside = mask & (position >= 0) & (column < num_columns)
    block = load_int_at(blocks, blocks_row_stride, blocks_layout, request, column, is_inside)
    is_inside = is_inside & (block >= 0) & (block <= last_block)
    slot = tl.where(is_inside, block, 0) * block_size + (clamped_position - column * block_size)
    return tl.where(is_inside, slot, pad_slot_id)


@triton.jit
def token_or(token, otherwise, largest):
    """A token id that can be embedded and that the output can hold, or ``otherwise``."""
    return tl.where((token >= 0) & (token <= largest), token, otherwise)

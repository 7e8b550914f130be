"""What the kernels that read rows in blocks have in common, beside _rows.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import num_blocks
from specdec_ops.triton._rows import BLOCK_SIZE, NUM_LANES

ROW_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
#: Room for the numbers of a row's blocks: one kernel serves all vocabularies up to 262,144.
_FEWEST_PLACES = 64


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

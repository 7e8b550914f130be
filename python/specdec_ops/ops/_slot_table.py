"""What the references of the ops over block tables share."""

from __future__ import annotations

import torch
from torch import Tensor


def slot_of(
    block_table: Tensor, request: int, position: int, block_size: int, pad_slot_id: int, *outputs: Tensor
) -> int:
    """The slot of a request's position, or the pad id where every output cannot hold one."""
    num_slots = min(torch.iinfo(output.dtype).max for output in outputs) + 1
    column, offset = divmod(position, block_size)
    if not 0 <= column < block_table.shape[1]:
        return pad_slot_id
    block = int(block_table[request, column])
    return block * block_size + offset if 0 <= block < num_slots // block_size else pad_slot_id


def token_or(token_id: int, otherwise: int, output: Tensor) -> int:
    """A token id that can be embedded and that the output can hold, or ``otherwise``."""
    return token_id if 0 <= token_id <= torch.iinfo(output.dtype).max else otherwise

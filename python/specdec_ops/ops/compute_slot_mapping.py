"""compute_slot_mapping: where the key-value cache keeps each scheduled token."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._arguments import leading_size
from specdec_ops.ops._runner_state import spans
from specdec_ops.ops._slot_table import slot_of


def compute_slot_mapping(
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    pad_slot_id: int = -1,
) -> Tensor:
    """The slot of each token in a paged key-value cache: block times ``block_size`` plus offset in the block.

    Args:
        query_start_loc: ``[batch + 1]`` int32 or int64: where each request's tokens begin in ``positions``,
            and where the last one's end. Requests may have no tokens.
        positions: ``[num_tokens]`` int32 or int64: the position of each token in its sequence.
        block_table: ``[batch, num_columns]`` or more rows, int32 or int64: the block of positions
            ``[i * block_size, (i + 1) * block_size)`` in column i.
        block_size: Tokens a block.
        pad_slot_id: What a token without a slot gets: its position is negative or past the table's last
            column, the table has a negative block there or one whose slots the output cannot hold, or the
            token belongs to no request.

    Returns:
        ``[num_tokens]`` int64 slots.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype or range, or ``query_start_loc`` decreases or
            leaves ``positions``; the message names it. Kernels of an accelerator do not read the totals
            ahead: they clamp them.

    Source: the block tables of Kwon et al., arXiv 2309.06180. For a position past the last column vLLM's
    kernel reads the next request's row, or past the tensor.

    Example:
        >>> import torch, specdec_ops
        >>> specdec_ops.compute_slot_mapping(
        ...     torch.tensor([0, 2, 3]), torch.tensor([3, 4, 9]), torch.tensor([[7, 2], [5, 6]]), block_size=4
        ... ).tolist()
        [31, 8, -1]
    """
    num_tokens = leading_size("compute_slot_mapping", "positions", positions)
    slot_mapping = positions.new_empty(num_tokens, dtype=torch.int64)
    _op(query_start_loc, positions, block_table, slot_mapping, block_size, pad_slot_id)
    return slot_mapping


def compute_slot_mapping_(
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    *,
    block_size: int,
    pad_slot_id: int = -1,
) -> None:
    """Like ``compute_slot_mapping``, into the caller's buffer.

    Args:
        query_start_loc: As in ``compute_slot_mapping``.
        positions: As in ``compute_slot_mapping``.
        block_table: As in ``compute_slot_mapping``.
        slot_mapping: ``[num_tokens]`` or longer, int32 or int64: every element is written, those past the
            tokens with ``pad_slot_id``.
        block_size: As in ``compute_slot_mapping``.
        pad_slot_id: As in ``compute_slot_mapping``.

    Raises:
        RuntimeError: As in ``compute_slot_mapping``; nothing was written then.

    Source: as of ``compute_slot_mapping``.

    Example:
        >>> import torch, specdec_ops
        >>> slots = torch.empty(4, dtype=torch.int64)
        >>> specdec_ops.compute_slot_mapping_(
        ...     torch.tensor([0, 2]), torch.tensor([3, 4]), torch.tensor([[7, 2]]), slots, block_size=4
        ... )
        >>> slots.tolist()
        [31, 8, -1, -1]
    """
    _op(query_start_loc, positions, block_table, slot_mapping, block_size, pad_slot_id)


def _reference(
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    pad_slot_id: int = -1,
) -> None:
    tokens = spans(
        "compute_slot_mapping_",
        "query_start_loc",
        query_start_loc,
        query_start_loc.shape[0] - 1,
        limit=positions.shape[0],
        of="positions",
    )
    slot_mapping.fill_(pad_slot_id)
    for request, span in enumerate(tokens):
        for i in span:
            slot_mapping[i] = slot_of(
                block_table, request, int(positions[i]), block_size, pad_slot_id, slot_mapping
            )


_op = define(
    "compute_slot_mapping_(Tensor query_start_loc, Tensor positions, Tensor block_table, "
    "Tensor(a!) slot_mapping, SymInt block_size, SymInt pad_slot_id=-1) -> ()",
    reference=_reference,
)

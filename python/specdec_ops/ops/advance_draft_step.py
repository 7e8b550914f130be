"""advance_draft_step_: the bookkeeping between two steps of an autoregressive draft model."""

from __future__ import annotations

from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._slot_table import slot_of


def advance_draft_step_(
    positions: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    *,
    block_size: int,
    max_model_len: int,
    pad_slot_id: int = -1,
    overflow_position: int = 0,
) -> None:
    """Moves each request one token on: its position, its slot in the key-value cache, its sequence length.

    The first that holds for a row:

    - Padding, ``position < 0`` or ``seq_len <= 0``: position 0, slot ``pad_slot_id``, sequence length 0, so
      that it stays padding.
    - Full, ``position + 1 >= max_model_len``: position ``overflow_position``, slot ``pad_slot_id``, sequence
      length 1.
    - Live: ``position + 1``, the slot that the table gives it, and a sequence length one more. The slot is
      ``pad_slot_id`` past the table's last column, and in a block that is negative or whose slots
      ``out_slot_mapping`` cannot hold.

    No sequence length comes to exceed ``max_model_len`` or what the table can address,
    ``num_columns * block_size``.

    Args:
        positions: ``[batch]`` int32 or int64: the position of each request's last token.
        block_table: ``[batch, num_columns]`` or more rows, int32 or int64: the block of positions
            ``[i * block_size, (i + 1) * block_size)`` in column i.
        seq_lens: ``[batch]`` or longer, int32 or int64: tokens that attention reads; updated in place.
        out_positions: ``[batch]`` or longer, int32 or int64; may be the memory of ``positions``.
        out_slot_mapping: ``[batch]`` or longer, int32 or int64: every element is written, those past the
            batch with ``pad_slot_id``.
        block_size: Tokens a block.
        max_model_len: Tokens a sequence can have; the first position past it is ``max_model_len``.
        pad_slot_id: The slot whose key and value are not kept.
        overflow_position: The position of a full row, in ``[0, max_model_len)``. With vLLM's 0 the row goes
            on as if it had just begun: if ``out_positions`` is the next call's ``positions``, its next slot
            is that of position 1, which holds a token of the prompt. With ``max_model_len - 1`` it stays
            full.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype or range; the message names it. Nothing was
            written then.

    Source: the draft loop of Li et al., arXiv 2401.15077, in vLLM's form, which differs past the table's last
    column: it takes the last column's block, so that the token overwrites an earlier one.

    Example:
        >>> import torch, specdec_ops
        >>> positions, seq_lens = torch.tensor([3, 9]), torch.tensor([4, 10])
        >>> slots = torch.empty(3, dtype=torch.int64)
        >>> specdec_ops.advance_draft_step_(
        ...     positions, torch.tensor([[7, 2, 0], [4, 5, 6]]), seq_lens, positions, slots,
        ...     block_size=4, max_model_len=10,
        ... )
        >>> positions.tolist(), slots.tolist(), seq_lens.tolist()
        ([4, 0], [8, -1, -1], [5, 1])
    """
    _op(
        positions,
        block_table,
        seq_lens,
        out_positions,
        out_slot_mapping,
        block_size,
        max_model_len,
        pad_slot_id,
        overflow_position,
    )


def _reference(
    positions: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    block_size: int,
    max_model_len: int,
    pad_slot_id: int = -1,
    overflow_position: int = 0,
) -> None:
    batch = positions.shape[0]
    max_seq_len = min(max_model_len, block_table.shape[1] * block_size)
    for request, (position, seq_len) in enumerate(
        zip(positions.tolist(), seq_lens[:batch].tolist(), strict=True)
    ):
        slot = pad_slot_id
        if position < 0 or seq_len <= 0:
            new_position, new_seq_len = 0, 0
        elif position + 1 >= max_model_len:
            new_position, new_seq_len = overflow_position, 1
        else:
            new_position, new_seq_len = position + 1, seq_len + 1
            slot = slot_of(block_table, request, new_position, block_size, pad_slot_id, out_slot_mapping)
        out_positions[request] = new_position
        out_slot_mapping[request] = slot
        seq_lens[request] = min(new_seq_len, max_seq_len)
    out_slot_mapping[batch:] = pad_slot_id


_op = define(
    "advance_draft_step_(Tensor positions, Tensor block_table, Tensor(a!) seq_lens, "
    "Tensor(b!) out_positions, Tensor(c!) out_slot_mapping, SymInt block_size, "
    "SymInt max_model_len, SymInt pad_slot_id=-1, SymInt overflow_position=0) -> ()",
    reference=_reference,
)

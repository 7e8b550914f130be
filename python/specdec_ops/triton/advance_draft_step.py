"""advance_draft_step_ in Triton."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import Checks, num_blocks
from specdec_ops.triton._draft_inputs import slot_of, slot_table
from specdec_ops.triton._launch import kernel, launch
from specdec_ops.triton._views import load_int, store_int, words

_REQUESTS = 64


def advance_draft_step_(
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
    """See :func:`specdec_ops.advance_draft_step_`."""
    checks = Checks("advance_draft_step_")
    shape = "[batch] or longer"
    checks.ints_from(positions, "positions", "[batch]")
    batch = positions.shape[0]
    checks.ints_from(seq_lens, "seq_lens", shape, batch)
    checks.ints_from(out_positions, "out_positions", shape, batch)
    checks.ints_from(out_slot_mapping, "out_slot_mapping", shape, batch)
    checks.positive_int32(max_model_len, "max_model_len")
    if not 0 <= overflow_position < max_model_len:
        checks.fail(
            f"overflow_position must be between 0 and max_model_len - 1, {max_model_len - 1}, "
            f"got {overflow_position}"
        )
    table = slot_table(checks, block_table, batch, block_size, pad_slot_id, out_slot_mapping)
    num_slots = out_slot_mapping.shape[0]
    launch(
        _advance,
        num_blocks(num_slots, _REQUESTS),
        positions,
        batch,
        num_slots,
        max_model_len,
        overflow_position,
        *words(positions, positions),
        *table,
        *words(seq_lens, positions),
        *words(out_positions, positions),
        *words(out_slot_mapping, positions),
        REQUESTS=_REQUESTS,
    )


@kernel
def _advance(
    batch: tl.int64,
    num_slots: tl.int64,
    max_model_len: tl.int64,
    overflow_position: tl.int64,
    positions,
    positions_layout: tl.int64,
    blocks,
    blocks_row_stride: tl.int64,
    blocks_layout: tl.int64,
    num_columns: tl.int64,
    block_size: tl.int64,
    last_block: tl.int64,
    pad_slot_id: tl.int64,
    seq_lens,
    seq_lens_layout: tl.int64,
    out_positions,
    out_positions_layout: tl.int64,
    out_slots,
    out_slots_layout: tl.int64,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    mask = request < batch
    position = load_int(positions, positions_layout, request, mask)
    seq_len = load_int(seq_lens, seq_lens_layout, request, mask)
    max_seq_len = tl.minimum(max_model_len, num_columns.to(tl.int64) * block_size)
    is_padding = (position < 0) | (seq_len <= 0)
    overflows = (is_padding == 0) & (position >= max_model_len - 1)
    advances = (is_padding | overflows) == 0
    following = tl.where(advances, position + 1, 0)
    # Past the batch there is no request, and its slot is padding.
    slot = slot_of(
        blocks,
        blocks_row_stride,
        blocks_layout,
        num_columns,
        block_size,
        last_block,
        pad_slot_id,
        request,
        following,
        mask & advances,
    )
    following = tl.where(overflows, overflow_position, following)
    length = tl.where(seq_len < max_seq_len, seq_len + 1, max_seq_len)
    length = tl.where(overflows, tl.minimum(max_seq_len, 1), tl.where(is_padding, 0, length))
    store_int(out_slots, out_slots_layout, request, slot, request < num_slots)
    store_int(out_positions, out_positions_layout, request, following, mask)
    store_int(seq_lens, seq_lens_layout, request, length, mask)

"""compute_slot_mapping_ in Triton."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import Checks, num_blocks
from specdec_ops.triton._draft_inputs import slot_of, slot_table
from specdec_ops.triton._launch import LANES, REQUESTS, TILE, kernel, launch
from specdec_ops.triton._views import clamped, load_int, span_at, store_int, words


def compute_slot_mapping_(
    query_start_loc: Tensor,
    positions: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    pad_slot_id: int = -1,
) -> None:
    """See :func:`specdec_ops.compute_slot_mapping_`."""
    checks = Checks("compute_slot_mapping_")
    checks.ints_from(positions, "positions", "[num_tokens]")
    num_tokens = positions.shape[0]
    checks.ints_from(slot_mapping, "slot_mapping", "[num_tokens] or longer", num_tokens)
    checks.ints_from(query_start_loc, "query_start_loc", "[batch + 1]", 1)
    batch = query_start_loc.shape[0] - 1
    table = slot_table(checks, block_table, batch, block_size, pad_slot_id, slot_mapping)
    num_slots = slot_mapping.shape[0]
    # Some programs are for requests, the others pad the slots that no token has.
    for_requests = num_blocks(batch, REQUESTS)
    launch(
        _compute,
        for_requests + num_blocks(num_slots, TILE),
        slot_mapping,
        for_requests,
        batch,
        num_tokens,
        num_slots,
        *words(query_start_loc, slot_mapping),
        *words(positions, slot_mapping),
        *table,
        *words(slot_mapping, slot_mapping),
        REQUESTS=REQUESTS,
        LANES=LANES,
        TILE=TILE,
    )


@kernel
def _compute(
    for_requests: tl.int64,
    batch: tl.int64,
    num_tokens: tl.int64,
    num_slots: tl.int64,
    starts,
    starts_layout: tl.int64,
    positions,
    positions_layout: tl.int64,
    blocks,
    blocks_row_stride: tl.int64,
    blocks_layout: tl.int64,
    num_columns: tl.int64,
    block_size: tl.int64,
    last_block: tl.int64,
    pad_slot_id: tl.int64,
    slots,
    slots_layout: tl.int64,
    REQUESTS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    if program < for_requests:
        request = program * REQUESTS + tl.arange(0, REQUESTS)
        mask = request < batch
        begin, end = span_at(starts, starts_layout, request, mask, num_tokens)
        longest = tl.max(tl.where(mask, end - begin, 0), axis=0)
        lane = tl.arange(0, LANES).to(tl.int64)
        first = tl.full([], 0, tl.int64)
        while first < longest:
            index = begin[:, None] + first + lane[None, :]
            here = mask[:, None] & (index < end[:, None])
            position = load_int(positions, positions_layout, index, here)
            slot = slot_of(
                blocks,
                blocks_row_stride,
                blocks_layout,
                num_columns,
                block_size,
                last_block,
                pad_slot_id,
                request[:, None],
                position,
                here,
            )
            store_int(slots, slots_layout, index, slot, here)
            first += LANES
    else:
        index = (program - for_requests) * TILE + tl.arange(0, TILE)
        zero = tl.zeros([TILE], tl.int64)
        before = clamped(load_int(starts, starts_layout, zero, index >= 0), 0, num_tokens)
        after = clamped(load_int(starts, starts_layout, zero + batch, index >= 0), 0, num_tokens)
        here = (index < num_slots) & ((index < before) | (index >= after))
        store_int(slots, slots_layout, index, zero + pad_slot_id, here)

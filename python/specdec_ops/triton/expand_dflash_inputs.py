"""expand_dflash_inputs_ in Triton."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import Checks, num_blocks
from specdec_ops.triton._draft_inputs import largest_value, slot_of, slot_table, token_id, token_or
from specdec_ops.triton._launch import LANES, REQUESTS, kernel, launch
from specdec_ops.triton._views import clamped, is_present, load_int, span_at, store_int, words


def expand_dflash_inputs_(
    next_token_ids: Tensor,
    target_positions: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    num_rejected_tokens: Tensor | None,
    input_ids: Tensor,
    context_positions: Tensor,
    query_positions: Tensor,
    context_slot_mapping: Tensor,
    query_slot_mapping: Tensor,
    token_indices: Tensor,
    parallel_drafting_token_id: int,
    block_size: int,
    num_queries_per_request: int,
    num_speculative_tokens: int,
    max_model_len: int | None = None,
    pad_slot_id: int = -1,
) -> None:
    """See :func:`specdec_ops.expand_dflash_inputs_`."""
    checks = Checks("expand_dflash_inputs_")
    checks.ints_from(target_positions, "target_positions", "[num_tokens]")
    num_tokens = target_positions.shape[0]
    checks.ints_from(query_start_loc, "query_start_loc", "[batch + 1]", 1)
    batch = query_start_loc.shape[0] - 1
    checks.ints(next_token_ids, "next_token_ids", "[batch]", batch)
    if num_rejected_tokens is not None:
        checks.ints(num_rejected_tokens, "num_rejected_tokens", "[batch]", batch)
    checks.positive_int32(num_queries_per_request, "num_queries_per_request")
    checks.positive_int32(num_speculative_tokens, "num_speculative_tokens")
    context, queries = "[num_tokens] or longer", "[batch * num_queries_per_request] or longer"
    num_queries = batch * num_queries_per_request
    checks.ints_from(input_ids, "input_ids", queries, num_queries)
    checks.ints_from(context_positions, "context_positions", context)
    checks.ints_from(query_positions, "query_positions", queries, num_queries)
    checks.ints_from(context_slot_mapping, "context_slot_mapping", context)
    checks.ints_from(query_slot_mapping, "query_slot_mapping", queries, num_queries)
    checks.ints_from(
        token_indices,
        "token_indices",
        "[batch * num_speculative_tokens] or longer",
        batch * num_speculative_tokens,
    )
    token_id(checks, parallel_drafting_token_id, "parallel_drafting_token_id", input_ids)
    if max_model_len is not None:
        checks.positive_int32(max_model_len, "max_model_len")
    table = slot_table(
        checks, block_table, batch, block_size, pad_slot_id, context_slot_mapping, query_slot_mapping
    )
    launch(
        _expand,
        num_blocks(batch, REQUESTS),
        next_token_ids,
        batch,
        num_tokens,
        min(context_positions.shape[0], context_slot_mapping.shape[0]),
        parallel_drafting_token_id,
        num_queries_per_request,
        num_speculative_tokens,
        largest_value(query_positions) if max_model_len is None else max_model_len,
        largest_value(input_ids),
        largest_value(context_positions),
        *words(next_token_ids, input_ids),
        *words(target_positions, input_ids),
        *words(query_start_loc, input_ids),
        *words(num_rejected_tokens, input_ids),
        *table,
        *words(input_ids, input_ids),
        *words(context_positions, input_ids),
        *words(query_positions, input_ids),
        *words(context_slot_mapping, input_ids),
        *words(query_slot_mapping, input_ids),
        *words(token_indices, input_ids),
        REQUESTS=REQUESTS,
        LANES=LANES,
    )


@kernel
def _expand(
    batch: tl.int64,
    num_tokens: tl.int64,
    num_context: tl.int64,
    mask_token_id: tl.int64,
    num_queries: tl.int64,
    num_speculative_tokens: tl.int64,
    max_model_len: tl.int64,
    largest_id: tl.int64,
    largest_position: tl.int64,
    next_ids,
    next_ids_layout: tl.int64,
    target_positions,
    target_positions_layout: tl.int64,
    starts,
    starts_layout: tl.int64,
    num_rejected,
    num_rejected_layout: tl.int64,
    blocks,
    blocks_row_stride: tl.int64,
    blocks_layout: tl.int64,
    num_columns: tl.int64,
    block_size: tl.int64,
    last_block: tl.int64,
    pad_slot_id: tl.int64,
    ids,
    ids_layout: tl.int64,
    context_positions,
    context_positions_layout: tl.int64,
    query_positions,
    query_positions_layout: tl.int64,
    context_slots,
    context_slots_layout: tl.int64,
    query_slots,
    query_slots_layout: tl.int64,
    token_indices,
    token_indices_layout: tl.int64,
    REQUESTS: tl.constexpr,
    LANES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    mask = request < batch
    begin, end = span_at(starts, starts_layout, request, mask, num_tokens)
    lane = tl.arange(0, LANES).to(tl.int64)[None, :]

    longest = tl.max(tl.where(mask, end - begin, 0), axis=0)
    first = tl.full([], 0, tl.int64)
    while first < longest:
        index = begin[:, None] + first + lane
        here = mask[:, None] & (index < end[:, None]) & (index < num_context)
        position = load_int(target_positions, target_positions_layout, index, here)
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
        clamped_position = clamped(position, 0, largest_position)
        store_int(context_positions, context_positions_layout, index, clamped_position, here)
        store_int(context_slots, context_slots_layout, index, slot, here)
        first += LANES

    has_tokens = mask & (end > begin)
    rejected = load_int(
        num_rejected, num_rejected_layout, request, has_tokens & is_present(num_rejected_layout)
    )
    last_kept = end - 1 - clamped(rejected, 0, tl.maximum(end - begin - 1, 0))
    last = load_int(target_positions, target_positions_layout, last_kept, has_tokens)
    last = tl.where(has_tokens, last, -1)[:, None]
    next_id = load_int(next_ids, next_ids_layout, request, mask)
    next_id = token_or(next_id, mask_token_id, largest_id)[:, None]
    first = tl.full([], 0, tl.int64)
    while first < num_queries:
        query = first + lane
        here = mask[:, None] & (query < num_queries)
        out = request[:, None] * num_queries + query
        is_kept = last >= 0
        overflows = last >= max_model_len - 1 - query
        position = tl.where(overflows, max_model_len - 1, tl.where(overflows, 0, last) + 1 + query)
        position = tl.where(is_kept, position, 0)
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
            here & is_kept & (overflows == 0),
        )
        token = tl.where(query == 0, next_id, mask_token_id)
        store_int(ids, ids_layout, out, token, here)
        store_int(query_positions, query_positions_layout, out, position, here)
        store_int(query_slots, query_slots_layout, out, slot, here)
        is_speculative = here & (query > 0) & (query <= num_speculative_tokens)
        at = request[:, None] * num_speculative_tokens + query - 1
        store_int(token_indices, token_indices_layout, at, out, is_speculative)
        first += LANES

"""expand_draft_inputs_ in Triton."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import Checks, num_blocks
from specdec_ops.triton._draft_inputs import largest_value, token_id, token_or
from specdec_ops.triton._launch import LANES, REQUESTS, kernel, launch
from specdec_ops.triton._views import (
    clamped,
    flags,
    is_present,
    load_int,
    span_at,
    store_flag,
    store_int,
    words,
)


def expand_draft_inputs_(
    target_token_ids: Tensor,
    target_positions: Tensor,
    next_token_ids: Tensor,
    query_start_loc: Tensor,
    query_end_loc: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    is_rejected_token_mask: Tensor,
    is_masked_token_mask: Tensor,
    new_token_indices: Tensor,
    hidden_state_mapping: Tensor | None,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
) -> None:
    """See :func:`specdec_ops.expand_draft_inputs_`."""
    checks = Checks("expand_draft_inputs_")
    checks.ints_from(target_token_ids, "target_token_ids", "[num_tokens]")
    num_tokens = target_token_ids.shape[0]
    checks.ints(target_positions, "target_positions", "[num_tokens]", num_tokens)
    checks.ints_from(query_start_loc, "query_start_loc", "[batch + 1]", 1)
    batch = query_start_loc.shape[0] - 1
    checks.ints(next_token_ids, "next_token_ids", "[batch]", batch)
    checks.ints(query_end_loc, "query_end_loc", "[batch]", batch)
    checks.positive_int32(num_padding_slots_per_request, "num_padding_slots_per_request")
    # The totals are not read, so outputs may be too short: what they have no room for is dropped.
    shape = "[num_outputs] or longer"
    checks.ints_from(input_ids, "input_ids", shape)
    checks.ints_from(positions, "positions", shape)
    checks.bools_from(is_rejected_token_mask, "is_rejected_token_mask", shape, 0)
    checks.bools_from(is_masked_token_mask, "is_masked_token_mask", shape, 0)
    outputs = (input_ids, positions, is_rejected_token_mask, is_masked_token_mask)
    checks.ints_from(
        new_token_indices,
        "new_token_indices",
        "[batch * num_padding_slots_per_request] or longer",
        batch * num_padding_slots_per_request,
    )
    num_mapped = 0
    if shift_input_ids:
        if hidden_state_mapping is None:
            checks.fail("hidden_state_mapping must be a tensor with shift_input_ids, got none")
        checks.ints_from(hidden_state_mapping, "hidden_state_mapping", "[num_tokens] or longer")
        num_mapped = hidden_state_mapping.shape[0]
    token_id(checks, padding_token_id, "padding_token_id", input_ids)
    token_id(checks, parallel_drafting_token_id, "parallel_drafting_token_id", input_ids)
    launch(
        _expand,
        num_blocks(batch, REQUESTS),
        target_token_ids,
        batch,
        num_tokens,
        min(output.shape[0] for output in outputs),
        num_mapped,
        padding_token_id,
        parallel_drafting_token_id,
        num_padding_slots_per_request,
        int(shift_input_ids),
        largest_value(input_ids),
        largest_value(positions),
        *words(target_token_ids, input_ids),
        *words(target_positions, input_ids),
        *words(next_token_ids, input_ids),
        *words(query_start_loc, input_ids),
        *words(query_end_loc, input_ids),
        *words(input_ids, input_ids),
        *words(positions, input_ids),
        *flags(is_rejected_token_mask, input_ids),
        *flags(is_masked_token_mask, input_ids),
        *words(new_token_indices, input_ids),
        *words(hidden_state_mapping if shift_input_ids else None, input_ids),
        REQUESTS=REQUESTS,
        LANES=LANES,
    )


@kernel
def _expand(
    batch: tl.int64,
    num_tokens: tl.int64,
    num_outputs: tl.int64,
    num_mapped: tl.int64,
    padding_token_id: tl.int64,
    mask_token_id: tl.int64,
    num_slots: tl.int64,
    shift: tl.int64,
    largest_id: tl.int64,
    largest_position: tl.int64,
    target_ids,
    target_ids_layout: tl.int64,
    target_positions,
    target_positions_layout: tl.int64,
    next_ids,
    next_ids_layout: tl.int64,
    starts,
    starts_layout: tl.int64,
    ends,
    ends_layout: tl.int64,
    ids,
    ids_layout: tl.int64,
    positions,
    positions_layout: tl.int64,
    are_rejected,
    are_rejected_layout: tl.int64,
    are_masked,
    are_masked_layout: tl.int64,
    new_tokens,
    new_tokens_layout: tl.int64,
    mapping,
    mapping_layout: tl.int64,
    REQUESTS: tl.constexpr,
    LANES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    mask = request < batch
    begin, end = span_at(starts, starts_layout, request, mask, num_tokens)
    num_inputs = end - begin
    num_added = num_slots - shift
    out_begin = begin + request * num_added
    first_new_token = request * num_slots

    has_tokens = mask & (num_inputs > 0)
    last_kept = clamped(load_int(ends, ends_layout, request, has_tokens), begin, tl.maximum(end - 1, begin))
    num_kept = tl.where(has_tokens, last_kept - begin + 1 - shift, 0)
    num_new_tokens = tl.where(has_tokens, num_slots, 0)
    start = tl.maximum(load_int(target_positions, target_positions_layout, begin, has_tokens), 0)
    next_id = load_int(next_ids, next_ids_layout, request, mask)
    next_id = token_or(next_id, padding_token_id, largest_id)

    lane = tl.arange(0, LANES).to(tl.int64)[None, :]
    longest = tl.max(tl.where(mask, num_inputs + num_added, 0), axis=0)
    # A request without tokens has new tokens nowhere.
    longest = tl.maximum(longest, num_slots)
    first = tl.full([], 0, tl.int64)
    while first < longest:
        j = first + lane
        nowhere = mask[:, None] & (has_tokens[:, None] == 0) & (j < num_slots)
        at = first_new_token[:, None] + j
        store_int(new_tokens, new_tokens_layout, at, tl.full([REQUESTS, LANES], -1, tl.int64), nowhere)

        out = out_begin[:, None] + j
        here = mask[:, None] & (j < (num_inputs + num_added)[:, None]) & (out < num_outputs)
        new_token = j - num_kept[:, None]
        is_kept = new_token < 0
        is_rejected = new_token >= num_new_tokens[:, None]
        is_new = here & (is_kept == 0) & (is_rejected == 0)
        kept_id = load_int(target_ids, target_ids_layout, begin[:, None] + shift + j, here & is_kept)
        kept_id = token_or(kept_id, padding_token_id, largest_id)
        new_id = tl.where(new_token == 0, next_id[:, None], mask_token_id)
        token = tl.where(is_kept, kept_id, tl.where(is_rejected, padding_token_id, new_id))
        position = tl.where(is_rejected, 0, tl.minimum(start[:, None], largest_position - j) + j)
        store_int(new_tokens, new_tokens_layout, first_new_token[:, None] + new_token, out, is_new)
        store_int(ids, ids_layout, out, token, here)
        store_int(positions, positions_layout, out, position, here)
        store_flag(are_rejected, are_rejected_layout, out, is_rejected, here)
        store_flag(are_masked, are_masked_layout, out, (new_token > 0) & (is_rejected == 0), here)

        index = begin[:, None] + j
        is_mapped = mask[:, None] & (j < num_inputs[:, None]) & (index < num_mapped)
        store_int(mapping, mapping_layout, index, out, is_mapped & is_present(mapping_layout))
        first += LANES

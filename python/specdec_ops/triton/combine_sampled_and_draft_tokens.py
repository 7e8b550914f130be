"""combine_sampled_and_draft_tokens_ in Triton."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import num_blocks
from specdec_ops.triton._launch import LANES, REQUESTS, TILE, kernel, launch
from specdec_ops.triton._runner_state import (
    BATCH,
    MAX_REQUESTS,
    NUM_LOGITS,
    NUM_TOKENS,
    RunnerChecks,
    state_row,
)
from specdec_ops.triton._views import clamped, load_int, load_int_at, span_at, store_int, word_rows, words


def combine_sampled_and_draft_tokens_(
    request_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    last_token_ids: Tensor,
    draft_token_ids: Tensor,
    prefill_lens: Tensor,
    num_new_tokens: int,
    input_ids: Tensor,
    logits_indices: Tensor,
) -> None:
    """See :func:`specdec_ops.combine_sampled_and_draft_tokens_`."""
    checks = RunnerChecks("combine_sampled_and_draft_tokens_")
    batch = checks.some_ints(request_indices, "request_indices", BATCH)
    max_requests = checks.some_ints(prefill_lens, "prefill_lens", MAX_REQUESTS)
    num_tokens = checks.some_ints(input_ids, "input_ids", NUM_TOKENS)
    num_logits = checks.some_ints(logits_indices, "logits_indices", NUM_LOGITS)
    checks.totals(query_start_loc, "query_start_loc", batch)
    checks.ints_from(seq_lens, "seq_lens", BATCH, batch)
    checks.totals(cu_num_logits, "cu_num_logits", batch)
    checks.column(last_token_ids, "last_token_ids", max_requests)
    max_num_drafts = checks.int_rows(draft_token_ids, "draft_token_ids", "[max_requests, k]", max_requests)
    if num_new_tokens not in (0, 1):
        checks.fail(f"num_new_tokens must be 0 or 1, got {num_new_tokens}")
    # Some programs are for requests, the others for the rows of logits past the last one.
    for_requests = num_blocks(batch, REQUESTS)
    launch(
        _combine,
        for_requests + num_blocks(num_logits, TILE),
        request_indices,
        for_requests,
        batch,
        max_requests,
        num_tokens,
        num_logits,
        max_num_drafts,
        num_new_tokens,
        *words(request_indices, request_indices),
        *words(query_start_loc, request_indices),
        *words(seq_lens, request_indices),
        *words(cu_num_logits, request_indices),
        *words(last_token_ids, request_indices),
        *word_rows(draft_token_ids, request_indices),
        *words(prefill_lens, request_indices),
        *words(input_ids, request_indices),
        *words(logits_indices, request_indices),
        REQUESTS=REQUESTS,
        LANES=LANES,
        TILE=TILE,
    )


@kernel
def _combine(
    for_requests: tl.int64,
    batch: tl.int64,
    max_requests: tl.int64,
    num_tokens: tl.int64,
    num_logits: tl.int64,
    max_num_drafts: tl.int64,
    num_new_tokens: tl.int64,
    indices,
    indices_layout: tl.int64,
    starts,
    starts_layout: tl.int64,
    seq_lens,
    seq_lens_layout: tl.int64,
    totals,
    totals_layout: tl.int64,
    last_tokens,
    last_tokens_layout: tl.int64,
    drafts,
    drafts_row_stride: tl.int64,
    drafts_layout: tl.int64,
    prefill_lens,
    prefill_lens_layout: tl.int64,
    ids,
    ids_layout: tl.int64,
    logits_indices,
    logits_indices_layout: tl.int64,
    REQUESTS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    if program < for_requests:
        request = program * REQUESTS + tl.arange(0, REQUESTS)
        mask = request < batch
        query_begin, query_end = span_at(starts, starts_layout, request, mask, num_tokens)
        begin, end = span_at(totals, totals_layout, request, mask, num_logits)
        count = end - begin
        # The last tokens of the query are those that logits are computed for.
        first = query_end - count
        row = state_row(indices, indices_layout, request, mask, max_requests)
        is_live = row >= 0
        seq_len = load_int(seq_lens, seq_lens_layout, request, is_live)
        prefill_len = load_int(prefill_lens, prefill_lens_layout, row, is_live)
        is_decoding = is_live & (seq_len > prefill_len)
        # A query that starts in the prompt keeps the prompt's token before the drafts.
        has_new_token = is_decoding & (seq_len - count >= prefill_len)
        new_token = load_int(last_tokens, last_tokens_layout, row, has_new_token)
        lane = tl.arange(0, LANES).to(tl.int64)[None, :]
        longest = tl.max(tl.where(mask, count, 0), axis=0)
        i0 = tl.full([], 0, tl.int64)
        while i0 < longest:
            i = i0 + lane
            here = mask[:, None] & (i < count[:, None])
            token = first[:, None] + i
            at = begin[:, None] + i
            store_int(logits_indices, logits_indices_layout, at, tl.maximum(token, 0), here)
            draft = i - num_new_tokens
            here = here & (token >= query_begin[:, None]) & (draft < max_num_drafts)
            is_draft = here & is_decoding[:, None] & (draft >= 0)
            is_new = here & has_new_token[:, None] & (draft < 0)
            value = load_int_at(drafts, drafts_row_stride, drafts_layout, row[:, None], draft, is_draft)
            value = tl.where(is_draft, value, new_token[:, None])
            store_int(ids, ids_layout, token, value, is_draft | is_new)
            i0 += LANES
    else:
        index = (program - for_requests) * TILE + tl.arange(0, TILE)
        zero = tl.zeros([TILE], tl.int64)
        used = clamped(load_int(totals, totals_layout, zero + batch, index >= 0), 0, num_logits)
        store_int(logits_indices, logits_indices_layout, index, zero, (index >= used) & (index < num_logits))

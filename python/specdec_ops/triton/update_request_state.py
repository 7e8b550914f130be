"""update_request_state_ in Triton."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import INT64_MAX, num_blocks, shape_of
from specdec_ops.triton._launch import kernel, launch
from specdec_ops.triton._runner_state import BATCH, MAX_REQUESTS, RunnerChecks, state_row
from specdec_ops.triton._views import (
    clamped,
    is_present,
    load_int,
    load_int_at,
    span_at,
    store_int,
    store_int_at,
    word_rows,
    words,
)

#: Each has a lane of a program's one warp.
_REQUESTS = 32


def update_request_state_(
    request_indices: Tensor,
    sampled_token_ids: Tensor,
    num_emitted: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor | None,
    new_draft_token_ids: Tensor | None,
    num_computed_tokens: Tensor,
    last_token_ids: Tensor,
    total_lens: Tensor,
    all_token_ids: Tensor,
    output_counts: Tensor | None,
    draft_token_ids: Tensor | None,
) -> None:
    """See :func:`specdec_ops.update_request_state_`."""
    checks = RunnerChecks("update_request_state_")
    batch = checks.some_ints(request_indices, "request_indices", BATCH)
    max_num_emitted = checks.int_rows(sampled_token_ids, "sampled_token_ids", "[batch, k + 1]", batch)
    checks.ints(num_emitted, "num_emitted", BATCH, batch)
    checks.ints(num_rejected, "num_rejected", BATCH, batch)
    if query_start_loc is not None:
        checks.totals(query_start_loc, "query_start_loc", batch)
    max_requests = checks.some_ints(num_computed_tokens, "num_computed_tokens", MAX_REQUESTS)
    checks.column(last_token_ids, "last_token_ids", max_requests)
    checks.ints(total_lens, "total_lens", MAX_REQUESTS, max_requests)
    max_model_len = checks.int_rows(
        all_token_ids, "all_token_ids", "[max_requests, max_model_len]", max_requests
    )
    vocab_size = max_num_drafts = 0
    if output_counts is not None:
        vocab_size = checks.int_rows(
            output_counts, "output_counts", "[max_requests, vocab_size]", max_requests
        )
    if new_draft_token_ids is not None:
        if draft_token_ids is None:
            checks.fail("draft_token_ids must be given with new_draft_token_ids, got none")
        width = checks.int_rows(new_draft_token_ids, "new_draft_token_ids", "[batch, k]", batch)
        max_num_drafts = checks.int_rows(
            draft_token_ids, "draft_token_ids", "[max_requests, k]", max_requests
        )
        if width != max_num_drafts:
            checks.fail(
                f"new_draft_token_ids must have the {max_num_drafts} columns of draft_token_ids, "
                f"got {shape_of(new_draft_token_ids)}"
            )
    launch(
        _update,
        num_blocks(batch, _REQUESTS),
        request_indices,
        batch,
        max_requests,
        max_num_emitted,
        max_model_len,
        vocab_size,
        max_num_drafts,
        INT64_MAX,
        *words(request_indices, request_indices),
        *word_rows(sampled_token_ids, request_indices),
        *words(num_emitted, request_indices),
        *words(num_rejected, request_indices),
        *words(query_start_loc, request_indices),
        *word_rows(new_draft_token_ids, request_indices),
        *words(num_computed_tokens, request_indices),
        *words(last_token_ids, request_indices),
        *words(total_lens, request_indices),
        *word_rows(all_token_ids, request_indices),
        *word_rows(output_counts, request_indices),
        *word_rows(draft_token_ids, request_indices),
        REQUESTS=_REQUESTS,
        num_warps=1,
    )


@kernel
def _update(
    batch: tl.int64,
    max_requests: tl.int64,
    max_num_emitted: tl.int64,
    max_model_len: tl.int64,
    vocab_size: tl.int64,
    max_num_drafts: tl.int64,
    num_tokens: tl.int64,
    indices,
    indices_layout: tl.int64,
    sampled,
    sampled_row_stride: tl.int64,
    sampled_layout: tl.int64,
    num_emitted,
    num_emitted_layout: tl.int64,
    num_rejected,
    num_rejected_layout: tl.int64,
    starts,
    starts_layout: tl.int64,
    new_drafts,
    new_drafts_row_stride: tl.int64,
    new_drafts_layout: tl.int64,
    num_computed,
    num_computed_layout: tl.int64,
    last_tokens,
    last_tokens_layout: tl.int64,
    total_lens,
    total_lens_layout: tl.int64,
    tokens,
    tokens_row_stride: tl.int64,
    tokens_layout: tl.int64,
    counts,
    counts_row_stride: tl.int64,
    counts_layout: tl.int64,
    drafts,
    drafts_row_stride: tl.int64,
    drafts_layout: tl.int64,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    row = state_row(indices, indices_layout, request, request < batch, max_requests)
    mask = row >= 0
    i = tl.full([], 0, tl.int64)
    while i < max_num_drafts:
        draft = load_int_at(new_drafts, new_drafts_row_stride, new_drafts_layout, request, i, mask)
        store_int_at(drafts, drafts_row_stride, drafts_layout, row, i, draft, mask)
        i += 1

    emitted = clamped(load_int(num_emitted, num_emitted_layout, request, mask), 0, max_num_emitted)
    total_len = load_int(total_lens, total_lens_layout, row, mask)
    most = tl.max(tl.where(mask, emitted, 0), axis=0)
    i = tl.full([], 0, tl.int64)
    while i < most:
        here = mask & (i < emitted)
        token = load_int_at(sampled, sampled_row_stride, sampled_layout, request, i, here)
        position = total_len + i
        is_inside = here & (position >= 0) & (position < max_model_len)
        store_int_at(tokens, tokens_row_stride, tokens_layout, row, position, token, is_inside)
        is_counted = here & (token >= 0) & (token < vocab_size)
        count = load_int_at(counts, counts_row_stride, counts_layout, row, token, is_counted)
        store_int_at(counts, counts_row_stride, counts_layout, row, token, count + 1, is_counted)
        store_int(last_tokens, last_tokens_layout, row, token, here & (i == emitted - 1))
        # A token that occurs twice is counted twice: the next load sees this store.
        tl.debug_barrier()
        i += 1
    store_int(total_lens, total_lens_layout, row, total_len + emitted, mask)

    begin, end = span_at(starts, starts_layout, request, mask & is_present(starts_layout), num_tokens)
    computed = load_int(num_computed, num_computed_layout, row, mask)
    computed = computed + (end - begin) - load_int(num_rejected, num_rejected_layout, request, mask)
    store_int(num_computed, num_computed_layout, row, computed, mask)

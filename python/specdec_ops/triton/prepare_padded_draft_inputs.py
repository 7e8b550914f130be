"""prepare_padded_draft_inputs_ in Triton."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import INT64_MAX, Checks, num_blocks
from specdec_ops.triton._launch import kernel, launch
from specdec_ops.triton._views import clamped, drafts_of, load_int, store_int, words

_REQUESTS = 128


def prepare_padded_draft_inputs_(
    cu_num_draft_tokens: Tensor,
    num_sampled: Tensor,
    query_start_loc: Tensor,
    token_indices: Tensor,
    num_rejected: Tensor,
) -> None:
    """See :func:`specdec_ops.prepare_padded_draft_inputs_`."""
    checks = Checks("prepare_padded_draft_inputs_")
    checks.dims(token_indices, "token_indices", "[batch]", 1)
    batch = token_indices.shape[0]
    checks.ints_from(token_indices, "token_indices", "[batch]", batch)
    checks.ints_from(num_rejected, "num_rejected", "[batch]", batch)
    checks.ints_from(num_sampled, "num_sampled", "[batch]", batch)
    checks.ints_from(query_start_loc, "query_start_loc", "[batch + 1]", batch + 1)
    ends = checks.draft_ends(cu_num_draft_tokens, batch)
    launch(
        _prepare,
        num_blocks(batch, _REQUESTS),
        token_indices,
        batch,
        INT64_MAX,
        *words(ends, ends),
        *words(num_sampled, ends),
        *words(query_start_loc, ends),
        *words(token_indices, ends),
        *words(num_rejected, ends),
        REQUESTS=_REQUESTS,
    )


@kernel
def _prepare(
    batch: tl.int64,
    num_drafts: tl.int64,
    ends,
    ends_layout: tl.int64,
    num_sampled,
    num_sampled_layout: tl.int64,
    starts,
    starts_layout: tl.int64,
    token_indices,
    token_indices_layout: tl.int64,
    num_rejected,
    num_rejected_layout: tl.int64,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    mask = request < batch
    begin, end = drafts_of(ends, ends_layout, request, mask, num_drafts)
    count = end - begin
    sampled = load_int(num_sampled, num_sampled_layout, request, mask)
    rejected = tl.where(count > 0, clamped(count + 1 - sampled, 0, count + 1), 0)
    first = load_int(starts, starts_layout, request, mask)
    last = load_int(starts, starts_layout, request + 1, mask) - 1
    # A request of which nothing was kept points to its own first token, not to another request.
    token = tl.maximum(last - rejected, tl.minimum(first, last))
    store_int(token_indices, token_indices_layout, request, token, mask)
    store_int(num_rejected, num_rejected_layout, request, rejected, mask)

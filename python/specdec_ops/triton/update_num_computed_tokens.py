"""update_num_computed_tokens_ in Triton."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import INT64_MAX, num_blocks
from specdec_ops.triton._launch import kernel, launch
from specdec_ops.triton._runner_state import BATCH, MAX_REQUESTS, RunnerChecks, state_row
from specdec_ops.triton._views import load_int, span_at, store_int, words

_REQUESTS = 128


def update_num_computed_tokens_(
    request_indices: Tensor, query_start_loc: Tensor, num_computed_tokens: Tensor
) -> None:
    """See :func:`specdec_ops.update_num_computed_tokens_`."""
    checks = RunnerChecks("update_num_computed_tokens_")
    batch = checks.some_ints(request_indices, "request_indices", BATCH)
    checks.totals(query_start_loc, "query_start_loc", batch)
    max_requests = checks.some_ints(num_computed_tokens, "num_computed_tokens", MAX_REQUESTS)
    launch(
        _update,
        num_blocks(batch, _REQUESTS),
        request_indices,
        batch,
        max_requests,
        INT64_MAX,
        *words(request_indices, request_indices),
        *words(query_start_loc, request_indices),
        *words(num_computed_tokens, request_indices),
        REQUESTS=_REQUESTS,
    )


@kernel
def _update(
    batch: tl.int64,
    max_requests: tl.int64,
    num_tokens: tl.int64,
    indices,
    indices_layout: tl.int64,
    starts,
    starts_layout: tl.int64,
    num_computed,
    num_computed_layout: tl.int64,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    row = state_row(indices, indices_layout, request, request < batch, max_requests)
    mask = row >= 0
    begin, end = span_at(starts, starts_layout, request, mask, num_tokens)
    computed = load_int(num_computed, num_computed_layout, row, mask) + (end - begin)
    store_int(num_computed, num_computed_layout, row, computed, mask)

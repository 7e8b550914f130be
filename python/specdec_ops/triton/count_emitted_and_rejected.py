"""count_emitted_and_rejected_ in Triton."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import INT64_MAX, num_blocks
from specdec_ops.triton._launch import kernel, launch
from specdec_ops.triton._runner_state import BATCH, MAX_REQUESTS, RunnerChecks, state_row
from specdec_ops.triton._views import load_int, span_at, store_int, words

_REQUESTS = 128


def count_emitted_and_rejected_(
    request_indices: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    prefill_lens: Tensor,
    num_emitted: Tensor,
    num_rejected: Tensor,
) -> None:
    """See :func:`specdec_ops.count_emitted_and_rejected_`."""
    checks = RunnerChecks("count_emitted_and_rejected_")
    batch = checks.some_ints(request_indices, "request_indices", BATCH)
    checks.ints_from(seq_lens, "seq_lens", BATCH, batch)
    checks.totals(cu_num_logits, "cu_num_logits", batch)
    max_requests = checks.some_ints(prefill_lens, "prefill_lens", MAX_REQUESTS)
    checks.ints(num_emitted, "num_emitted", BATCH, batch)
    checks.ints(num_rejected, "num_rejected", BATCH, batch)
    launch(
        _count,
        num_blocks(batch, _REQUESTS),
        request_indices,
        batch,
        max_requests,
        INT64_MAX,
        *words(request_indices, request_indices),
        *words(seq_lens, request_indices),
        *words(cu_num_logits, request_indices),
        *words(prefill_lens, request_indices),
        *words(num_emitted, request_indices),
        *words(num_rejected, request_indices),
        REQUESTS=_REQUESTS,
    )


@kernel
def _count(
    batch: tl.int64,
    max_requests: tl.int64,
    num_logits: tl.int64,
    indices,
    indices_layout: tl.int64,
    seq_lens,
    seq_lens_layout: tl.int64,
    totals,
    totals_layout: tl.int64,
    prefill_lens,
    prefill_lens_layout: tl.int64,
    num_emitted,
    num_emitted_layout: tl.int64,
    num_rejected,
    num_rejected_layout: tl.int64,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    mask = request < batch
    row = state_row(indices, indices_layout, request, mask, max_requests)
    is_live = row >= 0
    seq_len = load_int(seq_lens, seq_lens_layout, request, is_live)
    prefill_len = load_int(prefill_lens, prefill_lens_layout, row, is_live)
    # Until its prefill is complete, what a request samples is thrown away.
    is_live = is_live & (seq_len >= prefill_len)
    begin, end = span_at(totals, totals_layout, request, is_live, num_logits)
    emitted = tl.maximum(load_int(num_emitted, num_emitted_layout, request, is_live), 0)
    rejected = tl.where(is_live, tl.maximum(end - begin - emitted, 0), 0)
    store_int(num_emitted, num_emitted_layout, request, emitted, mask)
    store_int(num_rejected, num_rejected_layout, request, rejected, mask)

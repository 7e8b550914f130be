"""expand_request_indices_ in Triton."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import num_blocks
from specdec_ops.triton._launch import LANES, REQUESTS, TILE, kernel, launch
from specdec_ops.triton._runner_state import BATCH, NUM_LOGITS, RunnerChecks
from specdec_ops.triton._views import clamped, load_int, span_at, store_int, words


def expand_request_indices_(
    request_indices: Tensor,
    cu_num_logits: Tensor,
    expanded_request_indices: Tensor,
    local_positions: Tensor,
) -> None:
    """See :func:`specdec_ops.expand_request_indices_`."""
    checks = RunnerChecks("expand_request_indices_")
    batch = checks.some_ints(request_indices, "request_indices", BATCH)
    num_logits = checks.some_ints(expanded_request_indices, "expanded_request_indices", NUM_LOGITS)
    checks.totals(cu_num_logits, "cu_num_logits", batch)
    checks.ints(local_positions, "local_positions", NUM_LOGITS, num_logits)
    # Some programs are for requests, the others for the rows of logits past the last one.
    for_requests = num_blocks(batch, REQUESTS)
    launch(
        _expand,
        for_requests + num_blocks(num_logits, TILE),
        request_indices,
        for_requests,
        batch,
        num_logits,
        *words(request_indices, cu_num_logits),
        *words(cu_num_logits, cu_num_logits),
        *words(expanded_request_indices, cu_num_logits),
        *words(local_positions, cu_num_logits),
        REQUESTS=REQUESTS,
        LANES=LANES,
        TILE=TILE,
    )


@kernel
def _expand(
    for_requests: tl.int64,
    batch: tl.int64,
    num_logits: tl.int64,
    indices,
    indices_layout: tl.int64,
    totals,
    totals_layout: tl.int64,
    expanded,
    expanded_layout: tl.int64,
    positions,
    positions_layout: tl.int64,
    REQUESTS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    if program < for_requests:
        request = program * REQUESTS + tl.arange(0, REQUESTS)
        mask = request < batch
        begin, end = span_at(totals, totals_layout, request, mask, num_logits)
        index = load_int(indices, indices_layout, request, mask)
        index = tl.broadcast_to(index[:, None], [REQUESTS, LANES])
        longest = tl.max(tl.where(mask, end - begin, 0), axis=0)
        lane = tl.arange(0, LANES).to(tl.int64)[None, :] + tl.zeros([REQUESTS, LANES], tl.int64)
        first = tl.full([], 0, tl.int64)
        while first < longest:
            at = begin[:, None] + first + lane
            here = mask[:, None] & (at < end[:, None])
            store_int(expanded, expanded_layout, at, index, here)
            store_int(positions, positions_layout, at, first + lane, here)
            first += LANES
    else:
        at = (program - for_requests) * TILE + tl.arange(0, TILE)
        zero = tl.zeros([TILE], tl.int64)
        used = clamped(load_int(totals, totals_layout, zero + batch, at >= 0), 0, num_logits)
        here = (at >= used) & (at < num_logits)
        store_int(expanded, expanded_layout, at, zero - 1, here)
        store_int(positions, positions_layout, at, zero, here)

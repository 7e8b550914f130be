"""prepare_positions_and_seq_lens_ in Triton."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import num_blocks
from specdec_ops.triton._launch import LANES, REQUESTS, TILE, kernel, launch
from specdec_ops.triton._runner_state import BATCH, MAX_REQUESTS, NUM_TOKENS, RunnerChecks, state_row
from specdec_ops.triton._views import load_int, span_at, store_int, words


def prepare_positions_and_seq_lens_(
    request_indices: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
) -> None:
    """See :func:`specdec_ops.prepare_positions_and_seq_lens_`."""
    checks = RunnerChecks("prepare_positions_and_seq_lens_")
    batch = checks.some_ints(request_indices, "request_indices", BATCH)
    max_requests = checks.some_ints(num_computed_tokens, "num_computed_tokens", MAX_REQUESTS)
    num_tokens = checks.some_ints(positions, "positions", NUM_TOKENS)
    checks.totals(query_start_loc, "query_start_loc", batch)
    checks.ints_from(seq_lens, "seq_lens", BATCH, batch)
    num_seq_lens = seq_lens.shape[0]
    # Some programs are for requests, the others for the lengths past the last one.
    for_requests = num_blocks(batch, REQUESTS)
    launch(
        _prepare,
        for_requests + num_blocks(num_seq_lens - batch, TILE),
        request_indices,
        for_requests,
        batch,
        max_requests,
        num_tokens,
        num_seq_lens,
        *words(request_indices, query_start_loc),
        *words(query_start_loc, query_start_loc),
        *words(num_computed_tokens, query_start_loc),
        *words(positions, query_start_loc),
        *words(seq_lens, query_start_loc),
        REQUESTS=REQUESTS,
        LANES=LANES,
        TILE=TILE,
    )


@kernel
def _prepare(
    for_requests: tl.int64,
    batch: tl.int64,
    max_requests: tl.int64,
    num_tokens: tl.int64,
    num_seq_lens: tl.int64,
    indices,
    indices_layout: tl.int64,
    starts,
    starts_layout: tl.int64,
    num_computed,
    num_computed_layout: tl.int64,
    positions,
    positions_layout: tl.int64,
    seq_lens,
    seq_lens_layout: tl.int64,
    REQUESTS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    if program < for_requests:
        request = program * REQUESTS + tl.arange(0, REQUESTS)
        mask = request < batch
        row = state_row(indices, indices_layout, request, mask, max_requests)
        is_live = row >= 0
        begin, end = span_at(starts, starts_layout, request, is_live, num_tokens)
        computed = load_int(num_computed, num_computed_layout, row, is_live)
        seq_len = tl.where(is_live, computed + (end - begin), 0)
        store_int(seq_lens, seq_lens_layout, request, seq_len, mask)
        longest = tl.max(tl.where(is_live, end - begin, 0), axis=0)
        lane = tl.arange(0, LANES).to(tl.int64)[None, :]
        first = tl.full([], 0, tl.int64)
        while first < longest:
            i = first + lane
            at = begin[:, None] + i
            here = is_live[:, None] & (at < end[:, None])
            store_int(positions, positions_layout, at, computed[:, None] + i, here)
            first += LANES
    else:
        at = batch + (program - for_requests) * TILE + tl.arange(0, TILE)
        store_int(seq_lens, seq_lens_layout, at, tl.zeros([TILE], tl.int64), at < num_seq_lens)

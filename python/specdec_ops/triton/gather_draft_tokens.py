"""gather_draft_tokens_ in Triton."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import num_blocks
from specdec_ops.triton._launch import TILE, kernel, launch
from specdec_ops.triton._runner_state import MAX_REQUESTS, NUM_LOGITS, NUM_TOKENS, RunnerChecks, state_row
from specdec_ops.triton._views import load_int, store_int, words


def gather_draft_tokens_(
    input_ids: Tensor,
    positions: Tensor,
    logits_indices: Tensor,
    expanded_request_indices: Tensor,
    local_positions: Tensor,
    prefill_lens: Tensor,
    out_token_ids: Tensor,
    out_positions: Tensor,
) -> None:
    """See :func:`specdec_ops.gather_draft_tokens_`."""
    checks = RunnerChecks("gather_draft_tokens_")
    num_ids = checks.some_ints(input_ids, "input_ids", NUM_TOKENS)
    num_positions = checks.some_ints(positions, "positions", NUM_TOKENS)
    num_logits = checks.some_ints(logits_indices, "logits_indices", NUM_LOGITS)
    checks.ints(expanded_request_indices, "expanded_request_indices", NUM_LOGITS, num_logits)
    checks.ints(local_positions, "local_positions", NUM_LOGITS, num_logits)
    max_requests = checks.some_ints(prefill_lens, "prefill_lens", MAX_REQUESTS)
    checks.ints(out_token_ids, "out_token_ids", NUM_LOGITS, num_logits)
    checks.ints(out_positions, "out_positions", NUM_LOGITS, num_logits)
    launch(
        _gather,
        num_blocks(num_logits, TILE),
        input_ids,
        min(num_ids, num_positions),
        num_logits,
        max_requests,
        *words(input_ids, out_token_ids),
        *words(positions, out_token_ids),
        *words(logits_indices, out_token_ids),
        *words(expanded_request_indices, out_token_ids),
        *words(local_positions, out_token_ids),
        *words(prefill_lens, out_token_ids),
        *words(out_token_ids, out_token_ids),
        *words(out_positions, out_token_ids),
        TILE=TILE,
    )


@kernel
def _gather(
    num_tokens: tl.int64,
    num_logits: tl.int64,
    max_requests: tl.int64,
    ids,
    ids_layout: tl.int64,
    positions,
    positions_layout: tl.int64,
    logits_indices,
    logits_indices_layout: tl.int64,
    indices,
    indices_layout: tl.int64,
    local_positions,
    local_positions_layout: tl.int64,
    prefill_lens,
    prefill_lens_layout: tl.int64,
    out_ids,
    out_ids_layout: tl.int64,
    out_positions,
    out_positions_layout: tl.int64,
    TILE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < num_logits
    row = state_row(indices, indices_layout, i, mask, max_requests)
    token = load_int(logits_indices, logits_indices_layout, i, mask)
    is_inside = (row >= 0) & (token >= 0) & (token < num_tokens)
    position = load_int(positions, positions_layout, token, is_inside)
    local_position = load_int(local_positions, local_positions_layout, i, is_inside)
    prefill_len = load_int(prefill_lens, prefill_lens_layout, row, is_inside)
    # Nothing was drafted for a query that starts in the prompt: its draft slots are fillers.
    is_filler = (local_position > 0) & (position - local_position < prefill_len)
    is_kept = is_inside & (is_filler == 0)
    draft = tl.where(is_kept, load_int(ids, ids_layout, token, is_kept), -1)
    store_int(out_ids, out_ids_layout, i, draft, mask)
    store_int(out_positions, out_positions_layout, i, position, mask)

"""map_draft_tokens in Triton."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import Checks, num_blocks
from specdec_ops.triton._draft_vocabulary import draft_vocabulary, target_of
from specdec_ops.triton._launch import TILE, kernel, launch
from specdec_ops.triton._views import load_int, store_int, words


def map_draft_tokens(draft_token_ids: Tensor, d2t: Tensor, *, offsets: bool = False) -> Tensor:
    """See :func:`specdec_ops.map_draft_tokens`."""
    checks = Checks("map_draft_tokens")
    checks.integer(draft_token_ids, "draft_token_ids")
    checks.dims(draft_token_ids, "draft_token_ids", "[num_ids]", 1)
    vocabulary = draft_vocabulary(checks, d2t, offsets)
    num_ids = draft_token_ids.shape[0]
    token_ids = draft_token_ids.new_empty(num_ids)
    launch(
        _map,
        num_blocks(num_ids, TILE),
        draft_token_ids,
        num_ids,
        *vocabulary,
        *words(draft_token_ids, d2t),
        *words(token_ids, d2t),
        TILE=TILE,
    )
    return token_ids


@kernel
def _map(
    num_ids: tl.int64,
    targets,
    targets_layout: tl.int64,
    size: tl.int64,
    are_offsets: tl.int64,
    drafts,
    drafts_layout: tl.int64,
    out,
    out_layout: tl.int64,
    TILE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = i < num_ids
    draft = load_int(drafts, drafts_layout, i, mask)
    store_int(out, out_layout, i, target_of(targets, targets_layout, size, are_offsets, draft, mask), mask)

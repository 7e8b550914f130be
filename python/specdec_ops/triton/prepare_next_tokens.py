"""prepare_next_tokens_ in Triton."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import Checks, num_blocks
from specdec_ops.triton._launch import kernel, launch
from specdec_ops.triton._views import flags, load_flag, load_int, load_int_at, store_int, word_rows, words

_REQUESTS = 64


def prepare_next_tokens_(
    token_ids: Tensor,
    discard_request_mask: Tensor,
    backup_token_ids: Tensor,
    vocab_size: int,
    next_token_ids: Tensor,
    num_sampled: Tensor,
) -> None:
    """See :func:`specdec_ops.prepare_next_tokens_`."""
    checks = Checks("prepare_next_tokens_")
    checks.integer(token_ids, "token_ids")
    checks.dims(token_ids, "token_ids", "[batch, k + 1]", 2)
    if vocab_size < 1:
        checks.fail(f"vocab_size must be at least 1, got {vocab_size}")
    batch, width = token_ids.shape
    checks.bools_from(discard_request_mask, "discard_request_mask", "[batch]", batch)
    checks.ints_from(backup_token_ids, "backup_token_ids", "[batch]", batch)
    checks.ints_from(next_token_ids, "next_token_ids", "[batch]", batch)
    checks.ints_from(num_sampled, "num_sampled", "[batch]", batch)
    launch(
        _prepare,
        num_blocks(batch, _REQUESTS),
        token_ids,
        batch,
        width,
        vocab_size,
        *word_rows(token_ids, token_ids),
        *flags(discard_request_mask, token_ids),
        *words(backup_token_ids, token_ids),
        *words(next_token_ids, token_ids),
        *words(num_sampled, token_ids),
        REQUESTS=_REQUESTS,
    )


@kernel
def _prepare(
    batch: tl.int64,
    width: tl.int64,
    vocab_size: tl.int64,
    ids,
    ids_row_stride: tl.int64,
    ids_layout: tl.int64,
    discards,
    discards_layout: tl.int64,
    backup,
    backup_layout: tl.int64,
    next_tokens,
    next_tokens_layout: tl.int64,
    num_sampled,
    num_sampled_layout: tl.int64,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    mask = request < batch
    token = load_int(backup, backup_layout, request, mask)
    following = tl.where((token >= 0) & (token < vocab_size), token, 0)
    kept = mask & (load_flag(discards, discards_layout, request, mask) == 0)
    count = tl.zeros([REQUESTS], tl.int64)
    i = tl.full([], 0, tl.int64)
    while i < width:
        token = load_int_at(ids, ids_row_stride, ids_layout, request, i, kept)
        is_valid = kept & (token >= 0) & (token < vocab_size)
        following = tl.where(is_valid, token, following)
        count += is_valid.to(tl.int64)
        i += 1
    store_int(next_tokens, next_tokens_layout, request, following, mask)
    store_int(num_sampled, num_sampled_layout, request, count, mask)

"""count_accepted in Triton."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import INT64_MAX, Checks, num_blocks
from specdec_ops.triton._launch import kernel, launch
from specdec_ops.triton._views import load_int_at, word_rows

_REQUESTS = 128


def count_accepted(token_ids: Tensor, *, vocab_size: int | None = None) -> tuple[Tensor, Tensor]:
    """See :func:`specdec_ops.count_accepted`."""
    checks = Checks("count_accepted")
    checks.integer(token_ids, "token_ids")
    checks.dims(token_ids, "token_ids", "[batch, k + 1]", 2)
    if vocab_size is not None and vocab_size < 1:
        checks.fail(f"vocab_size must be at least 1, got {vocab_size}")
    batch, width = token_ids.shape
    num_accepted = token_ids.new_empty(batch, dtype=torch.int32)
    num_emitted = torch.empty_like(num_accepted)
    launch(
        _count,
        num_blocks(batch, _REQUESTS),
        token_ids,
        *word_rows(token_ids, token_ids),
        batch,
        width,
        INT64_MAX if vocab_size is None else vocab_size,
        num_accepted,
        num_emitted,
        REQUESTS=_REQUESTS,
    )
    return num_accepted, num_emitted


@kernel
def _count(
    ids,
    ids_row_stride: tl.int64,
    ids_layout: tl.int64,
    batch: tl.int64,
    width: tl.int64,
    vocab_size: tl.int64,
    num_accepted,
    num_emitted,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    mask = request < batch
    count = tl.zeros([REQUESTS], tl.int32)
    i = tl.zeros([], tl.int64)
    while i < width:
        token = load_int_at(ids, ids_row_stride, ids_layout, request, i, mask)
        count += (mask & (token >= 0) & (token < vocab_size)).to(tl.int32)
        i += 1
    tl.store(num_emitted + request, count, mask=mask)
    tl.store(num_accepted + request, tl.maximum(count - 1, 0), mask=mask)

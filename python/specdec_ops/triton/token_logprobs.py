"""token_logprobs in Triton: where tokens go, then blocks of rows, then rows from their blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_ops.triton._chain import (
    INVALID_DRAFT_ID,
    MASKED_TARGET,
    NON_FINITE_TARGET,
    OK,
    store_token,
)
from specdec_ops.triton._chain_arguments import ChainChecks, View, view
from specdec_ops.triton._checks import count_of, shape_of
from specdec_ops.triton._launch import kernel, launch_prepared
from specdec_ops.triton._laws import log2_prob
from specdec_ops.triton._likeliest import (
    COUNT,
    INTEGERS,
    MOST_LISTED,
    NOTES,
    PLANES,
    list_likeliest,
    read_block_to_list,
)
from specdec_ops.triton._numerics import LN2, is_greedy, log2_scale
from specdec_ops.triton._row_blocks import ROW_DTYPES, is_aligned, law_of_row, places_of_blocks, row_blocks
from specdec_ops.triton._rows import BLOCK_SIZE, CHUNKS_PER_BLOCK, load_integer, row_pointer
from specdec_ops.triton._views import clamped

#: How the kernels are launched.
_PLACER = {"REQUESTS": 128, "num_warps": 4}
_READER = {"num_warps": 4}
_WRITER = {"num_warps": 4}


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    temperature: Tensor,
    *,
    top_n: int = 0,
    cu_num_draft_tokens: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    """See :func:`specdec_ops.token_logprobs`."""
    checks = ChainChecks("token_logprobs", logits)
    checks.integer(token_ids, "token_ids")
    is_verified = cu_num_draft_tokens is not None
    batch, ends, ends_are_wide = 0, View(), 0
    if cu_num_draft_tokens is not None:
        checks.dims(token_ids, "token_ids", "[batch, k + 1] with cu_num_draft_tokens", 2)
        batch = token_ids.shape[0]
        if logits.dim() != 2 or logits.shape[0] < batch:
            checks.fail(
                f"logits must be [num_drafts + batch, width] with at least {count_of(batch, 'row')}, "
                f"got {shape_of(logits)}"
            )
        num_rows = logits.shape[0]
        ends = view(checks.draft_ends(cu_num_draft_tokens, batch))
        ends_are_wide = int(cu_num_draft_tokens.dtype == torch.int64)
    else:
        checks.dims(token_ids, "token_ids", "[rows]", 1)
        num_rows = token_ids.shape[0]
    checks.rows(logits, "logits", "[num_drafts + batch, width]" if is_verified else "[rows, width]", num_rows)
    size = checks.vocab_size(vocab_size, logits, "logits")
    checks.float32_vector(
        temperature, "temperature", "[batch]" if is_verified else "[rows]", batch if is_verified else num_rows
    )
    checks.require(0 <= top_n <= MOST_LISTED.value, f"top_n must be in [0, {MOST_LISTED.value}], got {top_n}")
    if top_n > size:
        checks.fail(f"top_n must be at most vocab_size = {size}, got {top_n}")

    ids = token_ids.new_empty((num_rows, 1 + top_n))
    logprobs = logits.new_empty((num_rows, 1 + top_n), dtype=torch.float32)
    ranks = logits.new_empty(num_rows, dtype=torch.int64)
    status = logits.new_empty(num_rows, dtype=torch.int32)
    totals = [logits.new_empty(batch + 1, dtype=torch.int32)] if is_verified else []
    outputs = (ids, logprobs, ranks, status, totals)
    ids_are_wide = int(token_ids.dtype == torch.int64)
    tokens = logits.new_empty((3, num_rows) if is_verified else 0, dtype=torch.int64)
    if is_verified:
        strides = [stride * token_ids.element_size() for stride in token_ids.stride()]
        launch_prepared(
            _place_tokens, 1, logits,
            (token_ids.data_ptr(), *strides, ids_are_wide, *ends, ends_are_wide,
             batch, token_ids.shape[1], num_rows, tokens.data_ptr(), totals[0].data_ptr()),
            (), _PLACER,
        )  # fmt: skip
    if num_rows == 0:
        return outputs

    blocks = row_blocks(size)
    plane = num_rows * blocks
    num_maxima = plane * CHUNKS_PER_BLOCK.value if top_n > 0 else 0
    num_notes = num_rows * NOTES.value if top_n > 0 else 0
    stats = logits.new_empty(PLANES.value * plane + num_maxima + num_notes, dtype=torch.float32)
    rows = (
        logits.data_ptr(), logits.stride(0),
        *(view(token_ids) if not is_verified else View()), ids_are_wide,
        tokens.data_ptr() if is_verified else 0, *view(temperature),
        num_rows, size, blocks, stats.data_ptr(), plane, top_n,
    )  # fmt: skip
    dtype, aligned = ROW_DTYPES[logits.dtype], is_aligned(logits)
    launch_prepared(_read_blocks, plane, logits, rows, (dtype, aligned), _READER)
    launch_prepared(
        _write_rows, num_rows, logits,
        (*rows, stats.data_ptr() + 4 * (PLANES.value * plane + num_maxima),
         ids.data_ptr(), logprobs.data_ptr(), ranks.data_ptr(), status.data_ptr()),
        (dtype, places_of_blocks(blocks)), _WRITER,
    )  # fmt: skip
    return outputs


@kernel
def _place_tokens(
    token_ids: tl.int64, row_stride: tl.int64, stride: tl.int64, ids_are_wide: tl.int32,
    ends: tl.int64, ends_stride: tl.int64, ends_are_wide: tl.int32,
    batch: tl.int64, width: tl.int64, num_rows: tl.int64, tokens: tl.int64, cu_num_tokens: tl.int64,
    REQUESTS: tl.constexpr,
):  # fmt: skip
    """One program: of each row of the outputs the row of the logits, the token and the request."""
    cu_num_tokens = cu_num_tokens.to(tl.pointer_type(tl.int32))
    tokens = tokens.to(tl.int64).to(tl.pointer_type(tl.int64))
    num_drafts = num_rows - batch
    tl.store(cu_num_tokens, 0)
    num_before = tl.full([], 0, tl.int64)
    first = tl.full([], 0, tl.int64)
    while first < batch:
        request = first + tl.arange(0, REQUESTS)
        mask = request < batch
        begin = load_integer(ends, (request - 1) * ends_stride, ends_are_wide, mask & (request > 0))
        begin = clamped(begin, 0, num_drafts)
        end = clamped(load_integer(ends, request * ends_stride, ends_are_wide, mask), begin, num_drafts)
        room = tl.where(mask, tl.minimum(end - begin + 1, width), 0)
        most = tl.max(room, axis=0)
        count = tl.zeros([REQUESTS], tl.int64)
        slot = tl.full([], 0, tl.int64)
        while slot < most:
            # A request's tokens end with the first that is none.
            goes_on = (count == slot) & (slot < room)
            token = load_integer(token_ids, request * row_stride + slot * stride, ids_are_wide, goes_on)
            count += (goes_on & (token >= 0)).to(tl.int64)
            slot += 1
        begin_row = num_before + tl.cumsum(count, axis=0) - count
        end_row = tl.minimum(begin_row + count, num_rows).to(tl.int32)
        tl.store(cu_num_tokens + 1 + request, end_row, mask=mask)
        most = tl.max(count, axis=0)
        slot = tl.full([], 0, tl.int64)
        while slot < most:
            row = begin_row + slot
            # Totals that decrease give rows to several requests, and then there are too many.
            here = (slot < count) & (row < num_rows)
            token = load_integer(token_ids, request * row_stride + slot * stride, ids_are_wide, here)
            tl.store(tokens + row, begin + request + slot, mask=here)
            tl.store(tokens + num_rows + row, token, mask=here)
            tl.store(tokens + 2 * num_rows + row, request, mask=here)
            slot += 1
        num_before += tl.sum(count, axis=0)
        first += REQUESTS
    while num_before < num_rows:
        row = num_before + tl.arange(0, REQUESTS)
        tl.store(tokens + row, tl.zeros([REQUESTS], tl.int64) - 1, mask=row < num_rows)
        num_before += REQUESTS


@triton.jit
def _token_of_row(row, token_ids, stride, ids_are_wide, tokens, num_rows):
    """The row of the logits, -1 where there is nothing; the token; and whose temperature it has."""
    given = load_integer(token_ids, row * stride, ids_are_wide, token_ids != 0)
    placed = tokens.to(tl.int64).to(tl.pointer_type(tl.int64)) + row
    is_placed = tokens != 0
    logits_row = tl.load(placed, mask=is_placed, other=-1)
    is_row = is_placed & (logits_row >= 0)
    token = tl.load(placed + num_rows, mask=is_row, other=-1)
    entry = tl.load(placed + 2 * num_rows, mask=is_row, other=0)
    logits_row = tl.where(is_placed, logits_row, tl.where(given == -1, -1, row))
    return logits_row, tl.where(is_placed, token, given), tl.where(is_placed, entry, row)


@triton.jit
def _scale_of(temperature, stride, entry):
    """Greedy rows: at temperature 1."""
    t = tl.load((temperature + entry * stride).to(tl.pointer_type(tl.float32)))
    return log2_scale(tl.where(is_greedy(t), 1.0, t))


@triton.jit
def _logit_of(pointer, token, vocab_size):
    """NaN where the token is no id."""
    is_id = (token >= 0) & (token < vocab_size)
    x = tl.load(pointer + tl.where(is_id, token, 0), mask=is_id, other=0.0).to(tl.float32)
    return tl.where(is_id, x, float("nan"))


@kernel
def _read_blocks(
    logits: tl.int64, logits_stride: tl.int64,
    token_ids: tl.int64, token_ids_stride: tl.int64, ids_are_wide: tl.int32, tokens: tl.int64,
    temperature: tl.int64, temperature_stride: tl.int64,
    num_rows: tl.int64, vocab_size: tl.int32, num_blocks: tl.int32, stats: tl.int64, plane: tl.int64,
    top_n: tl.int32,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """A block of a row."""
    row = (tl.program_id(0) // num_blocks).to(tl.int64)
    block = tl.program_id(0) % num_blocks
    logits_row, token, entry = _token_of_row(row, token_ids, token_ids_stride, ids_are_wide, tokens, num_rows)
    if logits_row >= 0:
        scale = _scale_of(temperature, temperature_stride, entry)
        pointer = row_pointer(logits, logits_row * logits_stride, DTYPE, ALIGNED)
        own = _logit_of(pointer, token, vocab_size)
        begin = block * BLOCK_SIZE
        read_block_to_list(
            pointer + begin, stats, plane, row * num_blocks + block,
            tl.minimum(vocab_size - begin, BLOCK_SIZE), scale, True, top_n > 0, own, COUNT,
        )  # fmt: skip


@kernel
def _write_rows(
    logits: tl.int64, logits_stride: tl.int64,
    token_ids: tl.int64, token_ids_stride: tl.int64, ids_are_wide: tl.int32, tokens: tl.int64,
    temperature: tl.int64, temperature_stride: tl.int64,
    num_rows: tl.int64, vocab_size: tl.int32, num_blocks: tl.int32, stats: tl.int64, plane: tl.int64,
    top_n: tl.int32, notes: tl.int64,
    ids_out: tl.int64, logprobs_out: tl.int64, ranks_out: tl.int64, status_out: tl.int64,
    DTYPE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """All outputs of a row."""
    row = tl.program_id(0).to(tl.int64)
    logits_row, token, entry = _token_of_row(row, token_ids, token_ids_stride, ids_are_wide, tokens, num_rows)
    places = tl.arange(0, MOST_LISTED)
    own_logprob = tl.full([], float("nan"), tl.float64)
    logprobs = tl.full([MOST_LISTED], float("nan"), tl.float64)
    ids = tl.full([MOST_LISTED], -1, tl.int32)
    rank = tl.full([], 0, tl.int64)
    status = tl.full([], OK, tl.int32)
    if logits_row >= 0:
        scale = _scale_of(temperature, temperature_stride, entry)
        pointer = row_pointer(logits, logits_row * logits_stride, DTYPE, False)
        own = _logit_of(pointer, token, vocab_size)
        largest, reference, log2_total, logsumexp = law_of_row(
            stats, plane, row, num_blocks, scale, NUM_BLOCKS
        )
        blocks = tl.arange(0, NUM_BLOCKS)
        counts = stats.to(tl.pointer_type(tl.float32)) + INTEGERS * plane + row * num_blocks + blocks
        counts = tl.load(counts, mask=blocks < num_blocks, other=0.0).to(tl.int32)
        rank = tl.sum(counts, axis=0).to(tl.int64)
        if logsumexp != logsumexp:
            status = tl.full([], NON_FINITE_TARGET, tl.int32)
        elif largest == float("-inf"):
            status = tl.full([], MASKED_TARGET, tl.int32)
        elif (token < 0) | (token >= vocab_size):
            status = tl.full([], INVALID_DRAFT_ID, tl.int32)
        has_law = (status != NON_FINITE_TARGET) & (status != MASKED_TARGET)
        own_logprob = tl.where(has_law, log2_prob(own, reference, scale, log2_total) * LN2, own_logprob)
        if top_n > 0:
            ids, _ = list_likeliest(
                pointer, stats, plane, row, notes + row * NOTES * 4, vocab_size, num_blocks, top_n,
                float("-inf"), True, DTYPE, NUM_BLOCKS,
            )  # fmt: skip
            x = tl.load(pointer + ids, mask=places < top_n, other=0.0).to(tl.float32)
            logprobs = tl.where(has_law, log2_prob(x, reference, scale, log2_total) * LN2, logprobs)
    else:
        token = row * 0 - 1
    first = row * (1 + top_n)
    logprobs_out = logprobs_out.to(tl.pointer_type(tl.float32)) + first
    store_token(ids_out, first, token, ids_are_wide, row >= 0)
    tl.store(logprobs_out, own_logprob.to(tl.float32))
    is_listed = places < top_n
    store_token(ids_out, first + 1 + places, ids.to(tl.int64), ids_are_wide, is_listed)
    tl.store(logprobs_out + 1 + places, logprobs.to(tl.float32), mask=is_listed)
    tl.store(ranks_out.to(tl.pointer_type(tl.int64)) + row, rank)
    tl.store(status_out.to(tl.pointer_type(tl.int32)) + row, status)

"""sample_recovered_probs_ in Triton."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import Checks, num_blocks
from specdec_ops.triton._launch import kernel, launch
from specdec_ops.triton._views import drafts_of, load_int, store_int, words

_BLOCK = 4096
#: Blocks of a row that are compared at a time.
_BLOCKS = 64


def sample_recovered_probs_(
    target_probs: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    inverse_noise: Tensor,
    draft_probs: Tensor | None,
    vocab_size: int | None,
    token_ids: Tensor,
) -> None:
    """See :func:`specdec_ops.sample_recovered_probs_`."""
    checks = Checks("sample_recovered_probs_")
    num_drafts = checks.num_drafts(draft_token_ids)
    checks.float_rows(target_probs, "target_probs", "[num_drafts, width]", num_drafts)
    checks.contiguous_rows(target_probs, "target_probs")
    size = checks.vocab_size(vocab_size, target_probs, "target_probs")
    checks.real(inverse_noise, "inverse_noise")
    checks.float_rows(inverse_noise, "inverse_noise", "[batch, width]", 0)
    checks.wide_enough(inverse_noise, "inverse_noise", size)
    checks.contiguous_rows(inverse_noise, "inverse_noise")
    batch = inverse_noise.shape[0]
    if draft_probs is not None:
        checks.float_rows(draft_probs, "draft_probs", "[num_drafts, width]", num_drafts)
        checks.wide_enough(draft_probs, "draft_probs", size)
        checks.contiguous_rows(draft_probs, "draft_probs")
    ends = checks.draft_ends(cu_num_draft_tokens, batch)
    checks.ints_from(token_ids, "token_ids", "[num_drafts]", num_drafts)
    if num_drafts == 0:
        return
    blocks = num_blocks(size, _BLOCK)
    best_scores = target_probs.new_empty(num_drafts, blocks, dtype=torch.float64)
    best_ids = target_probs.new_empty(num_drafts, blocks, dtype=torch.int32)
    law = target_probs if draft_probs is None else draft_probs
    launch(
        _score_blocks,
        batch * blocks,
        target_probs,
        num_drafts,
        blocks,
        size,
        *words(ends, ends),
        *words(draft_token_ids, ends),
        target_probs,
        target_probs.stride(0),
        law,
        law.stride(0),
        inverse_noise,
        inverse_noise.stride(0),
        best_scores,
        best_ids,
        HAS_LAW=draft_probs is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    launch(
        _pick,
        batch,
        target_probs,
        num_drafts,
        blocks,
        *words(ends, ends),
        best_scores,
        best_ids,
        *words(token_ids, ends),
        BLOCKS=_BLOCKS,
    )


@kernel
def _score_blocks(
    num_drafts: tl.int64,
    blocks: tl.int64,
    vocab_size: tl.int64,
    ends,
    ends_layout: tl.int64,
    drafts,
    drafts_layout: tl.int64,
    target,
    target_stride: tl.int64,
    law,
    law_stride: tl.int64,
    noise,
    noise_stride: tl.int64,
    best_scores,
    best_ids,
    HAS_LAW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best id of a block of ids, for each draft of a request: they share its noise."""
    program = tl.program_id(0).to(tl.int64)
    request = program // blocks
    block = program - request * blocks
    draft, end = drafts_of(ends, ends_layout, request, request >= 0, num_drafts)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    factor = tl.load(noise + request * noise_stride + ids, mask=inside, other=0.0)
    while draft < end:
        p = tl.load(target + draft * target_stride + ids, mask=inside, other=0.0)
        if HAS_LAW:
            q = tl.load(law + draft * law_stride + ids, mask=inside, other=0.0)
            if p.dtype == tl.float64 or q.dtype == tl.float64:
                residual = p.to(tl.float64) - q.to(tl.float64)
            else:
                residual = p.to(tl.float32) - q.to(tl.float32)
        else:
            if p.dtype == tl.float64:  # noqa: SIM108
                residual = p
            else:
                residual = p.to(tl.float32)
            token = load_int(drafts, drafts_layout, draft, draft >= 0)
            residual = tl.where(ids == token, 0.0, residual)
        residual = tl.where(residual > 0.0, residual, 0.0)
        score = (residual * factor).to(tl.float64)
        score = tl.where(inside & (score == score), score, float("-inf"))
        best = tl.max(score, axis=0)
        first = tl.min(tl.where(score == best, ids, vocab_size - 1), axis=0)
        tl.store(best_scores + draft * blocks + block, best)
        tl.store(best_ids + draft * blocks + block, first.to(tl.int32))
        draft += 1


@kernel
def _pick(
    num_drafts: tl.int64,
    blocks: tl.int64,
    ends,
    ends_layout: tl.int64,
    best_scores,
    best_ids,
    out,
    out_layout: tl.int64,
    BLOCKS: tl.constexpr,
):
    """The first of the best ids of the blocks."""
    request = tl.program_id(0).to(tl.int64)
    draft, end = drafts_of(ends, ends_layout, request, request >= 0, num_drafts)
    while draft < end:
        best = tl.full([], float("-inf"), tl.float64)
        token = tl.full([], 0, tl.int64)
        first = tl.full([], 0, tl.int64)
        while first < blocks:
            block = first + tl.arange(0, BLOCKS)
            mask = block < blocks
            score = tl.load(best_scores + draft * blocks + block, mask=mask, other=float("-inf"))
            largest = tl.max(score, axis=0)
            ids = tl.load(best_ids + draft * blocks + block, mask=mask & (score == largest), other=2147483647)
            token = tl.where(largest > best, tl.min(ids, axis=0).to(tl.int64), token)
            best = tl.maximum(largest, best)
            first += BLOCKS
        store_int(out, out_layout, draft, token, draft >= 0)
        draft += 1

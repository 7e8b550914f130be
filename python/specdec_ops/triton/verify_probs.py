"""verify_probs_ in Triton."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import Checks, num_blocks
from specdec_ops.triton._launch import kernel, launch
from specdec_ops.triton._verified_rows import REQUESTS, bonus_tokens, verified_rows
from specdec_ops.triton._views import (
    drafts_of,
    flags,
    float_rows,
    is_present,
    load_flag,
    load_float_at,
    load_int,
    load_real,
    store_int_at,
    word_rows,
    words,
)


def verify_probs_(
    target_probs: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    recovered_token_ids: Tensor,
    bonus_token_ids: Tensor,
    accept_uniforms: Tensor,
    draft_probs: Tensor | None,
    is_greedy: Tensor | None,
    accept_rates: Tensor | None,
    vocab_size: int | None,
    token_ids: Tensor,
) -> None:
    """See :func:`specdec_ops.verify_probs_`."""
    checks = Checks("verify_probs_")
    num_drafts = checks.num_drafts(draft_token_ids)
    batch = bonus_tokens(checks, bonus_token_ids)
    checks.float_rows(target_probs, "target_probs", "[num_drafts, width]", num_drafts)
    size = checks.vocab_size(vocab_size, target_probs, "target_probs")
    if draft_probs is not None:
        checks.float_rows(draft_probs, "draft_probs", "[num_drafts, width]", num_drafts)
        checks.wide_enough(draft_probs, "draft_probs", size)
    checks.ints_from(recovered_token_ids, "recovered_token_ids", "[num_drafts]", num_drafts)
    checks.reals_from(accept_uniforms, "accept_uniforms", "[num_drafts]", num_drafts)
    ends, max_num_drafts = verified_rows(
        checks, cu_num_draft_tokens, batch, is_greedy, accept_rates, token_ids
    )
    has_law = draft_probs is not None
    is_float64 = torch.float64 in (target_probs.dtype, draft_probs.dtype if draft_probs is not None else None)
    launch(
        _verify,
        num_blocks(batch, REQUESTS),
        token_ids,
        batch,
        num_drafts,
        max_num_drafts,
        size,
        int(has_law),
        int(is_float64),
        *words(ends, token_ids),
        *float_rows(target_probs, token_ids),
        *float_rows(draft_probs, token_ids),
        *words(draft_token_ids, token_ids),
        *words(recovered_token_ids, token_ids),
        *words(bonus_token_ids, token_ids),
        *words(accept_uniforms, token_ids),
        *flags(is_greedy, token_ids),
        *words(accept_rates, token_ids),
        *word_rows(token_ids, token_ids),
        REQUESTS=REQUESTS,
    )


@kernel
def _verify(
    batch: tl.int64,
    num_drafts: tl.int64,
    max_num_drafts: tl.int64,
    vocab_size: tl.int64,
    has_law: tl.int64,
    is_float64: tl.int64,
    ends,
    ends_layout: tl.int64,
    target,
    target_row_stride: tl.int64,
    target_layout: tl.int64,
    law,
    law_row_stride: tl.int64,
    law_layout: tl.int64,
    drafts,
    drafts_layout: tl.int64,
    recovered,
    recovered_layout: tl.int64,
    bonus,
    bonus_layout: tl.int64,
    uniforms,
    uniforms_layout: tl.int64,
    is_greedy,
    is_greedy_layout: tl.int64,
    rates,
    rates_layout: tl.int64,
    out,
    out_row_stride: tl.int64,
    out_layout: tl.int64,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    alive = request < batch
    if is_present(is_greedy_layout):
        alive = alive & (load_flag(is_greedy, is_greedy_layout, request, alive) == 0)
    begin, end = drafts_of(ends, ends_layout, request, alive, num_drafts)
    count = tl.minimum(end - begin, max_num_drafts)
    longest = tl.max(tl.where(alive, count, 0), axis=0)
    has_rates = is_present(rates_layout)
    i = tl.full([], 0, tl.int64)
    while i < longest:
        here = alive & (i < count)
        draft = begin + i
        token = load_int(drafts, drafts_layout, draft, here)
        is_id = here & (token >= 0) & (token < vocab_size)
        uniform = load_real(uniforms, uniforms_layout, draft, here)
        rate = load_real(rates, rates_layout, i + tl.zeros_like(request), here & has_rates)
        reads = is_id & (has_rates == 0)
        p = load_float_at(target, target_row_stride, target_layout, draft, token, reads)
        q = load_float_at(law, law_row_stride, law_layout, draft, token, reads & (has_law != 0))
        divisor = tl.where(q > 0.0, q, 1.0)
        narrow = tl.div_rn(p.to(tl.float32), divisor.to(tl.float32)).to(tl.float64)
        ratio = tl.where(is_float64 != 0, p / divisor, narrow)
        of_law = tl.where(has_law != 0, (q > 0.0) & (ratio >= uniform), p >= uniform)
        accepted = is_id & tl.where(has_rates, uniform < rate, (p > 0.0) & of_law)
        otherwise = load_int(recovered, recovered_layout, draft, here & (accepted == 0))
        store_int_at(out, out_row_stride, out_layout, request, i, tl.where(accepted, token, otherwise), here)
        alive = alive & (accepted | (i >= count))
        i += 1
    token = load_int(bonus, bonus_layout, request, alive)
    store_int_at(out, out_row_stride, out_layout, request, count, token, alive)

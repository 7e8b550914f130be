"""verify_argmax_ in Triton."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import Checks, num_blocks
from specdec_ops.triton._launch import kernel, launch
from specdec_ops.triton._verified_rows import REQUESTS, bonus_tokens, verified_rows
from specdec_ops.triton._views import (
    drafts_of,
    flags,
    is_present,
    load_flag,
    load_int,
    load_real,
    store_int_at,
    word_rows,
    words,
)


def verify_argmax_(
    target_argmax: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    bonus_token_ids: Tensor,
    is_greedy: Tensor | None,
    accept_rates: Tensor | None,
    accept_uniforms: Tensor | None,
    token_ids: Tensor,
) -> None:
    """See :func:`specdec_ops.verify_argmax_`."""
    checks = Checks("verify_argmax_")
    num_drafts = checks.num_drafts(draft_token_ids)
    batch = bonus_tokens(checks, bonus_token_ids)
    checks.ints_from(target_argmax, "target_argmax", "[num_drafts]", num_drafts)
    if accept_rates is not None and accept_uniforms is None:
        checks.fail("accept_uniforms must be given with accept_rates, got accept_rates alone")
    ends, max_num_drafts = verified_rows(
        checks, cu_num_draft_tokens, batch, is_greedy, accept_rates, token_ids
    )
    if accept_rates is not None and accept_uniforms is not None:
        checks.reals_from(accept_uniforms, "accept_uniforms", "[num_drafts]", num_drafts)
    launch(
        _verify,
        num_blocks(batch, REQUESTS),
        token_ids,
        batch,
        num_drafts,
        max_num_drafts,
        *words(ends, token_ids),
        *words(target_argmax, token_ids),
        *words(draft_token_ids, token_ids),
        *words(bonus_token_ids, token_ids),
        *flags(is_greedy, token_ids),
        *words(accept_rates, token_ids),
        *words(accept_uniforms, token_ids),
        *word_rows(token_ids, token_ids),
        REQUESTS=REQUESTS,
    )


@kernel
def _verify(
    batch: tl.int64,
    num_drafts: tl.int64,
    max_num_drafts: tl.int64,
    ends,
    ends_layout: tl.int64,
    argmax,
    argmax_layout: tl.int64,
    drafts,
    drafts_layout: tl.int64,
    bonus,
    bonus_layout: tl.int64,
    is_greedy,
    is_greedy_layout: tl.int64,
    rates,
    rates_layout: tl.int64,
    uniforms,
    uniforms_layout: tl.int64,
    out,
    out_row_stride: tl.int64,
    out_layout: tl.int64,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    alive = request < batch
    if is_present(is_greedy_layout):
        alive = alive & load_flag(is_greedy, is_greedy_layout, request, alive)
    begin, end = drafts_of(ends, ends_layout, request, alive, num_drafts)
    count = tl.minimum(end - begin, max_num_drafts)
    longest = tl.max(tl.where(alive, count, 0), axis=0)
    has_rates = is_present(rates_layout)
    i = tl.full([], 0, tl.int64)
    while i < longest:
        here = alive & (i < count)
        draft = load_int(drafts, drafts_layout, begin + i, here)
        best = load_int(argmax, argmax_layout, begin + i, here)
        rate = load_real(rates, rates_layout, i + tl.zeros_like(request), here & has_rates)
        uniform = load_real(uniforms, uniforms_layout, begin + i, here & has_rates)
        accepted = tl.where(has_rates, (draft >= 0) & (uniform < rate), draft == best)
        store_int_at(out, out_row_stride, out_layout, request, i, tl.where(accepted, draft, best), here)
        alive = alive & (accepted | (i >= count))
        i += 1
    token = load_int(bonus, bonus_layout, request, alive)
    store_int_at(out, out_row_stride, out_layout, request, count, token, alive)

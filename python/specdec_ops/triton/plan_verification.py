"""plan_verification in Triton."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import INT64_MAX, Checks, count_of, num_blocks, shape_of
from specdec_ops.triton._launch import kernel, launch
from specdec_ops.triton._views import drafts_of, is_present, load_int, load_real, words

_REQUESTS = 32
#: Drafts of a program, which are ranked among all, so many at a time.
_DRAFTS, _OTHERS = 32, 128
#: Drafts that are admitted at a time.
_SCAN = 512
#: A survival probability of 1.
_CERTAIN = tl.constexpr(1 << 32)


def plan_verification(
    accept_probs: Tensor,
    cu_num_draft_tokens: Tensor,
    *,
    budget: int | None = None,
    device_budget: Tensor | None = None,
    step_costs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See :func:`specdec_ops.plan_verification`."""
    checks = Checks("plan_verification")
    checks.real(accept_probs, "accept_probs")
    checks.dims(accept_probs, "accept_probs", "[num_drafts]", 1)
    checks.integer(cu_num_draft_tokens, "cu_num_draft_tokens")
    if cu_num_draft_tokens.dim() != 1 or cu_num_draft_tokens.shape[0] < 1:
        checks.fail(f"cu_num_draft_tokens must be [batch + 1], got {shape_of(cu_num_draft_tokens)}")
    batch = cu_num_draft_tokens.shape[0] - 1
    ends = checks.draft_ends(cu_num_draft_tokens, batch)
    if budget is None and device_budget is None and step_costs is None:
        checks.fail("budget or step_costs must be given, got neither")
    if budget is not None and budget < 0:
        checks.fail(f"budget must be at least 0, got {budget}")
    if device_budget is not None:
        checks.integer(device_budget, "budget")
        checks.dims(device_budget, "budget", "one number", 0)
    if step_costs is not None:
        checks.real(step_costs, "step_costs")
        if step_costs.dim() != 1 or step_costs.shape[0] <= batch:
            elements = count_of(batch + 1, "element")
            checks.fail(
                f"step_costs must be [max_rows + 1] with at least batch + 1 = {elements}, "
                f"got {shape_of(step_costs)}"
            )
    num_drafts = accept_probs.shape[0]
    num_draft_tokens = accept_probs.new_empty(batch, dtype=torch.int32)
    expected_tokens = accept_probs.new_empty(batch, dtype=torch.float64)
    if batch == 0:
        return num_draft_tokens, expected_tokens
    # Of each draft its survival, slot and request; of each rank a survival; how many drafts are admitted.
    survivals = accept_probs.new_zeros(num_drafts, dtype=torch.int64)
    slots = accept_probs.new_empty(num_drafts, dtype=torch.int64)
    requests = accept_probs.new_empty(num_drafts, dtype=torch.int64)
    ranks = accept_probs.new_empty(num_drafts, dtype=torch.int64)
    ranked = accept_probs.new_zeros(num_drafts, dtype=torch.int64)
    num_admitted = accept_probs.new_empty(1, dtype=torch.int64)
    drafts = (batch, num_drafts, *words(ends, ends))
    for_requests = num_blocks(batch, _REQUESTS)
    launch(
        _find_survivals,
        for_requests,
        accept_probs,
        *drafts,
        *words(accept_probs, ends),
        survivals,
        slots,
        requests,
        REQUESTS=_REQUESTS,
    )
    launch(
        _rank,
        num_blocks(num_drafts, _DRAFTS),
        accept_probs,
        num_drafts,
        survivals,
        slots,
        requests,
        ranks,
        ranked,
        DRAFTS=_DRAFTS,
        OTHERS=_OTHERS,
    )
    launch(
        _admit,
        1,
        accept_probs,
        batch,
        num_drafts,
        INT64_MAX if budget is None else budget,
        *words(device_budget, ends),
        *words(step_costs, ends),
        0 if step_costs is None else step_costs.shape[0],
        ranked,
        num_admitted,
        SCAN=_SCAN,
    )
    launch(
        _write_plan,
        for_requests,
        accept_probs,
        *drafts,
        survivals,
        ranks,
        num_admitted,
        num_draft_tokens,
        expected_tokens,
        REQUESTS=_REQUESTS,
    )
    return num_draft_tokens, expected_tokens


@kernel
def _find_survivals(
    batch: tl.int64,
    num_drafts: tl.int64,
    ends,
    ends_layout: tl.int64,
    probs,
    probs_layout: tl.int64,
    survivals,
    slots,
    requests,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    mask = request < batch
    begin, end = drafts_of(ends, ends_layout, request, mask, num_drafts)
    longest = tl.max(tl.where(mask, end - begin, 0), axis=0)
    product = tl.full([REQUESTS], 1.0, tl.float64)
    i = tl.full([], 0, tl.int64)
    while i < longest:
        draft = begin + i
        here = mask & (draft < end)
        prob = load_real(probs, probs_layout, draft, here)
        # NaN and what is negative count as 0.
        product = tl.where(prob > 0.0, product * tl.where(prob < 1.0, prob, 1.0), 0.0)
        tl.store(survivals + draft, (product * _CERTAIN).to(tl.int64), mask=here)
        tl.store(slots + draft, i + tl.zeros([REQUESTS], tl.int64), mask=here)
        tl.store(requests + draft, request, mask=here)
        i += 1


@kernel
def _rank(
    num_drafts: tl.int64,
    survivals,
    slots,
    requests,
    ranks,
    ranked,
    DRAFTS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """How many drafts come before: the likelier first, then the earlier slot, then the lower request."""
    draft = tl.program_id(0).to(tl.int64) * DRAFTS + tl.arange(0, DRAFTS)
    mask = draft < num_drafts
    survival = tl.load(survivals + draft, mask=mask, other=0)
    is_possible = survival > 0
    slot = tl.load(slots + draft, mask=is_possible, other=0)
    request = tl.load(requests + draft, mask=is_possible, other=0)
    rank = tl.zeros([DRAFTS], tl.int64)
    first = tl.full([], 0, tl.int64)
    while first < num_drafts:
        other = first + tl.arange(0, OTHERS)
        others = tl.load(survivals + other, mask=other < num_drafts, other=0)
        other_slot = tl.load(slots + other, mask=others > 0, other=0)
        other_request = tl.load(requests + other, mask=others > 0, other=0)
        is_equal = others[None, :] == survival[:, None]
        is_same_slot = other_slot[None, :] == slot[:, None]
        is_lower = is_same_slot & (other_request[None, :] < request[:, None])
        is_earlier = is_equal & ((other_slot[None, :] < slot[:, None]) | is_lower)
        comes_before = (others[None, :] > survival[:, None]) | is_earlier
        rank += tl.sum((comes_before & (others > 0)[None, :]).to(tl.int64), axis=1)
        first += OTHERS
    tl.store(ranks + draft, tl.where(is_possible, rank, num_drafts), mask=mask)
    tl.store(ranked + rank, survival, mask=is_possible)


@kernel
def _admit(
    batch: tl.int64,
    num_drafts: tl.int64,
    budget: tl.int64,
    device_budget,
    device_budget_layout: tl.int64,
    costs,
    costs_layout: tl.int64,
    num_costs: tl.int64,
    ranked,
    num_admitted,
    SCAN: tl.constexpr,
):
    """How many drafts are admitted: as many as may be, up to the first that lowers the tokens per cost."""
    most = tl.minimum(budget, num_drafts)
    given = load_int(device_budget, device_budget_layout, batch * 0, is_present(device_budget_layout))
    most = tl.where(is_present(device_budget_layout), tl.minimum(most, given), most)
    has_costs = is_present(costs_layout)
    # A request has a row for each draft and one more.
    most = tl.where(has_costs, tl.minimum(most, num_costs - 1 - batch), most)
    most = tl.maximum(most, 0)
    if has_costs:
        before = batch.to(tl.int64) * _CERTAIN
        first = tl.full([], 0, tl.int64)
        while first < most:
            i = first + tl.arange(0, SCAN)
            mask = i < most
            survival = tl.load(ranked + i, mask=mask, other=0)
            tokens = before + tl.cumsum(survival, axis=0)
            cost = load_real(costs, costs_layout, batch + i, mask)
            next_cost = load_real(costs, costs_layout, batch + i + 1, mask)
            tokens_before = (tokens - survival).to(tl.float64)
            lowers = mask & (tokens.to(tl.float64) * cost < tokens_before * next_cost)
            most = tl.minimum(most, tl.min(tl.where(lowers, i, most), axis=0))
            before += tl.sum(survival, axis=0)
            first += SCAN
    tl.store(num_admitted, most)


@kernel
def _write_plan(
    batch: tl.int64,
    num_drafts: tl.int64,
    ends,
    ends_layout: tl.int64,
    survivals,
    ranks,
    num_admitted,
    num_draft_tokens,
    expected_tokens,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    mask = request < batch
    begin, end = drafts_of(ends, ends_layout, request, mask, num_drafts)
    longest = tl.max(tl.where(mask, end - begin, 0), axis=0)
    admitted = tl.load(num_admitted)
    count = tl.zeros([REQUESTS], tl.int32)
    total = tl.zeros([REQUESTS], tl.int64)
    i = tl.full([], 0, tl.int64)
    while i < longest:
        draft = begin + i
        here = mask & (draft < end)
        is_admitted = here & (tl.load(ranks + draft, mask=here, other=0) < admitted)
        count += is_admitted.to(tl.int32)
        total += tl.load(survivals + draft, mask=is_admitted, other=0)
        i += 1
    tl.store(num_draft_tokens + request, count, mask=mask)
    certain = tl.full([REQUESTS], _CERTAIN, tl.int64)
    expected = (certain + total).to(tl.float64) / certain.to(tl.float64)
    tl.store(expected_tokens + request, expected, mask=mask)

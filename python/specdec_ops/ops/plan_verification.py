"""plan_verification: how many drafts of each request to verify where not all fit into a step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ops._library import define

#: A survival probability of 1. What is below 2^-32 counts as 0.
_CERTAIN = 1 << 32


class PlanVerificationOutput(NamedTuple):
    """What ``plan_verification`` returns, one value per request."""

    #: ``[batch]`` int32: how many of the request's drafts to verify, the first ones.
    num_draft_tokens: Tensor
    #: ``[batch]`` float64: tokens that the request is expected to emit with them, at least 1.
    expected_tokens: Tensor


def plan_verification(
    accept_probs: Tensor,
    cu_num_draft_tokens: Tensor,
    *,
    budget: Tensor | int | None = None,
    step_costs: Tensor | None = None,
) -> PlanVerificationOutput:
    """Picks the drafts of a batch that are likeliest to be accepted, as many as a step is to verify.

    A draft is emitted only if it and all before it are accepted: its survival is the product of these
    estimates. Drafts are admitted by falling survival, which takes the first ones of each request. That is
    the choice that emits the most tokens for its number of drafts, as far as the estimates are right.
    Of equal survivals the earlier slot comes first, then the lower request. A survival below 2^-32 counts as
    0, and such a draft is never admitted.

    With ``step_costs`` admission ends before the first draft that lowers the expected tokens by the cost of
    the step, not where that quotient is largest: a look at later drafts would bias the output.

    **What may be fed.** Whether a draft is verified must not depend on which token it is. The estimate of a
    slot may be made of the context, of the drafts in earlier slots, and of the law that its draft is drawn
    from (its entropy, margin or largest probability: ``row_statistics``). It must not be made of the draft
    itself: not ``q(x)``, nor anything that the draft model computes with the draft as input, as the next
    slot's law, which may be used from that next slot on. With estimates that look at drafts, the output no
    longer follows the target's law. Drafts that are verified as one-hot are free of this: any estimate will
    do.

    Args:
        accept_probs: ``[num_drafts]`` float32 or float64, any stride: the chance that the draft is accepted
            if those before it are. NaN and what is negative count as 0, what is above 1 as 1.
        cu_num_draft_tokens: ``[batch + 1]`` int32 or int64, running totals of each request's drafts.
        budget: The most drafts that are verified in all, a number or a tensor of no dimension, int32 or
            int64, which a captured graph reads anew at each replay. On an accelerator a negative one in a
            tensor counts as 0.
        step_costs: ``[max_rows + 1]`` float32 or float64, positive and finite: entry n is the cost of a step
            whose target model computes n rows, in any unit. A request has a row for each draft that is
            verified and one more. The table also bounds the rows, so it needs at least ``batch + 1``
            entries; entry 0 is not used. On an accelerator its values are not checked.

    Returns:
        A :class:`PlanVerificationOutput`. The counts add up to at most the budget.

    Raises:
        RuntimeError: Neither ``budget`` nor ``step_costs`` is given, or an argument has the wrong shape,
            dtype, device or range; the message names it.

    Source: survival by products as in SpecDec++ (Huang et al., arXiv 2405.19715); that verification must not
    look ahead is shown in docs/numerics.md.

    Example:
        >>> import torch, specdec_ops
        >>> plan = specdec_ops.plan_verification(
        ...     torch.tensor([0.9, 0.5, 0.6, 0.9]), torch.tensor([0, 2, 4]), budget=3
        ... )
        >>> plan.num_draft_tokens.tolist()
        [1, 2]
    """
    in_tensor = isinstance(budget, Tensor)
    return PlanVerificationOutput(
        *_op(
            accept_probs,
            cu_num_draft_tokens,
            budget=None if in_tensor else budget,
            device_budget=budget if in_tensor else None,
            step_costs=step_costs,
        )
    )


def _fake(
    accept_probs: Tensor,
    cu_num_draft_tokens: Tensor,
    *,
    budget: int | None = None,
    device_budget: Tensor | None = None,
    step_costs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    batch = cu_num_draft_tokens.shape[0] - 1
    return (
        accept_probs.new_empty(batch, dtype=torch.int32),
        accept_probs.new_empty(batch, dtype=torch.float64),
    )


def _reference(
    accept_probs: Tensor,
    cu_num_draft_tokens: Tensor,
    *,
    budget: int | None = None,
    device_budget: Tensor | None = None,
    step_costs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    totals = cu_num_draft_tokens.tolist()
    probs = accept_probs.tolist()
    batch = len(totals) - 1
    candidates = []
    for request in range(batch):
        product = 1.0
        for slot in range(totals[request + 1] - totals[request]):
            prob = probs[totals[request] + slot]
            product = product * min(prob, 1.0) if prob > 0 else 0.0
            candidates.append((-int(product * _CERTAIN), slot, request))
    most = len(candidates)
    for limit in (budget, None if device_budget is None else int(device_budget)):
        most = most if limit is None else min(most, limit)
    costs = None if step_costs is None else step_costs.tolist()
    if costs is not None:
        most = min(most, len(costs) - 1 - batch)
    counts, survivals, total = [0] * batch, [0] * batch, batch * _CERTAIN
    for admitted, (negative, slot, request) in enumerate(sorted(candidates)[:most], start=1):
        rows, more = batch + admitted, total - negative
        if negative == 0 or (costs is not None and more * costs[rows - 1] < total * costs[rows]):
            break
        total = more
        counts[request] = slot + 1
        survivals[request] -= negative
    return (
        accept_probs.new_tensor(counts, dtype=torch.int32),
        accept_probs.new_tensor([1 + each / _CERTAIN for each in survivals], dtype=torch.float64),
    )


_op = define(
    "plan_verification(Tensor accept_probs, Tensor cu_num_draft_tokens, *, SymInt? budget=None, "
    "Tensor? device_budget=None, Tensor? step_costs=None) "
    "-> (Tensor num_draft_tokens, Tensor expected_tokens)",
    fake=_fake,
    reference=_reference,
)

"""verify_chain with top-k and top-p of both laws, beside the same call without filters and beside vLLM."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import _vllm
import pytest
import specdec_ops
import torch
from _cases import FILTERS, Case, Inputs
from _interleave import Call
from _suite import OURS, PLAIN, Calls, Suite
from torch import Tensor

TOP_K, TOP_P = 50, 0.9


def plain(inputs: Inputs) -> Callable[..., specdec_ops.VerifyChainOutput]:
    return functools.partial(
        specdec_ops.verify_chain,
        inputs.target_logits,
        inputs.draft_token_ids,
        inputs.cu_num_draft_tokens,
        max_num_draft_tokens=inputs.case.num_drafts,
        temperature=inputs.temperature,
        draft_logits=inputs.draft_logits,
        seeds=inputs.seeds,
        positions=inputs.positions,
    )


def specdec(inputs: Inputs) -> Callable[..., specdec_ops.VerifyChainOutput]:
    filters = {"top_k": TOP_K, "top_p": TOP_P, "draft_top_k": TOP_K, "draft_top_p": TOP_P}
    return functools.partial(plain(with_filtered_drafts(inputs)), **filters)


def vllm(inputs: Inputs) -> Call:
    return _vllm.filtered_rejection_sample(with_filtered_drafts(inputs), TOP_K, TOP_P)


def with_filtered_drafts(inputs: Inputs) -> Inputs:
    """The same step with drafts from the filtered law of the draft logits."""
    assert inputs.draft_logits is not None
    k = inputs.case.num_drafts
    drawn = specdec_ops.sample(
        inputs.draft_logits,
        temperature=inputs.temperature.repeat_interleave(k),
        seeds=inputs.seeds.repeat_interleave(k),
        positions=inputs.positions.repeat_interleave(k),
        draft_slot=torch.arange(k).repeat(inputs.case.batch),
        top_k=TOP_K,
        top_p=TOP_P,
        token_dtype=torch.int32,
    )
    return dataclasses.replace(inputs, draft_token_ids=drawn.token_ids)


def cut(logits: Tensor, temperature: float) -> Tensor:
    """A copy of rows with -inf in place of what filters leave out, by sorting them in float64."""
    rows = []
    for row in logits:
        x = row.double() / temperature
        kept = x >= x.topk(min(TOP_K, x.numel())).values[-1]
        law = x.where(kept, torch.tensor(-math.inf)).softmax(0)
        ordered = law.sort(descending=True).values
        size = int((ordered.cumsum(0) < TOP_P).sum()) + 1
        rows.append(row.where(law >= ordered[size - 1], torch.tensor(-math.inf, dtype=row.dtype)))
    return torch.stack(rows)


def check(sets: Sequence[Inputs], calls: Calls) -> Mapping[str, float]:
    """Tokens are those of the call without filters on rows that were cut before; acceptance for everyone."""
    first = with_filtered_drafts(sets[0])
    assert first.draft_logits is not None
    temperature = float(first.temperature[0])
    before = dataclasses.replace(
        first,
        target_logits=cut(first.target_logits, temperature),
        draft_logits=cut(first.draft_logits, temperature),
    )
    expected, actual = plain(before)(), specdec(sets[0])()
    assert torch.equal(expected.token_ids, actual.token_ids)
    assert (actual.status == specdec_ops.Status.OK).all()
    facts = {}
    for name, of_sets in calls.items():
        outputs = [call() for call in of_sets]
        tokens = torch.cat([output if name == "vllm" else output.token_ids for output in outputs])
        accepted = ((tokens >= 0).sum(dim=1) - 1).clamp(min=0)
        facts[name] = float(accepted.sum() / (accepted + 1).clamp(max=sets[0].case.num_drafts).sum())
    return facts


SUITE = Suite(
    name="filters",
    cases=FILTERS,
    implementations={OURS: specdec, PLAIN: plain, "vllm": vllm},
    check=check,
)


@pytest.mark.parametrize(("case", "implementation"), SUITE.parameters(), ids=str)
def test_filters(case: Case, implementation: str, side_by_side: Callable[[Suite, Case, str], None]) -> None:
    side_by_side(SUITE, case, implementation)

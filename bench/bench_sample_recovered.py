"""sample_recovered: what to emit in place of each draft, from logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import _eager
import _vllm
import pytest
import specdec_ops
import torch
from _cases import RECOVERED, Case, Inputs
from _interleave import Call
from _suite import OURS, Calls, Suite
from torch import Tensor


def specdec(inputs: Inputs) -> Call:
    return functools.partial(
        specdec_ops.sample_recovered,
        inputs.target_logits[inputs.target_rows],
        inputs.draft_token_ids,
        **_laws(inputs),
    )


def _laws(inputs: Inputs) -> dict[str, Any]:
    k = inputs.case.num_drafts
    slots = torch.arange(k).repeat(inputs.case.batch)
    return {
        "temperature": inputs.temperature.repeat_interleave(k),
        "draft_logits": inputs.draft_logits,
        "seeds": inputs.seeds.repeat_interleave(k),
        "positions": inputs.positions.repeat_interleave(k) + slots,
    }


def must_read(inputs: Inputs) -> list[Tensor]:
    rows = list(inputs.target_logits[inputs.target_rows])
    return rows if inputs.draft_logits is None else rows + list(inputs.draft_logits)


def check(sets: Sequence[Inputs], calls: Calls) -> Mapping[str, float]:
    """Tokens are valid and those of a float64 computation; one-hot drafts are never their own substitute."""
    for name, of_sets in calls.items():
        for inputs, call in zip(sets, of_sets, strict=True):
            tokens = call().token_ids if name == OURS else call()
            assert ((tokens >= 0) & (tokens < inputs.case.vocab_size)).all(), name
            if inputs.draft_logits is None:
                assert (tokens != inputs.draft_token_ids).all(), name
    _check_float64(sets[0])
    return {}


def _check_float64(inputs: Inputs) -> None:
    """With given uniforms the tokens invert the cumulated float64 difference of the laws."""
    laws = _laws(inputs)
    temperature = laws["temperature"].double().unsqueeze(1)
    target_logits = inputs.target_logits[inputs.target_rows]
    weights = (target_logits.double() / temperature).softmax(dim=1)
    if inputs.draft_logits is None:
        weights.scatter_(1, inputs.draft_token_ids.long().unsqueeze(1), 0.0)
    else:
        weights = (weights - (inputs.draft_logits.double() / temperature).softmax(dim=1)).clamp(min=0)
    prefix = weights.cumsum(dim=1)
    uniforms = torch.linspace(0.01, 0.99, len(prefix), dtype=torch.float64)
    expected = torch.searchsorted(prefix, (uniforms * prefix[:, -1]).unsqueeze(1), right=True).squeeze(1)
    del laws["seeds"], laws["positions"]
    tokens = specdec_ops.sample_recovered(
        target_logits, inputs.draft_token_ids, uniforms=uniforms, **laws
    ).token_ids
    assert torch.equal(tokens.long(), expected)


SUITE = Suite(
    name="sample_recovered",
    cases=RECOVERED,
    implementations={OURS: specdec, "eager": _eager.sample_recovered, "vllm": _vllm.sample_recovered},
    check=check,
    must_read=must_read,
)


@pytest.mark.parametrize(("case", "implementation"), SUITE.parameters(), ids=str)
def test_sample_recovered(
    case: Case, implementation: str, side_by_side: Callable[[Suite, Case, str], None]
) -> None:
    side_by_side(SUITE, case, implementation)

"""token_logprobs: log-probability and rank of a token in each row, and the likeliest ids beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import _eager
import pytest
import specdec_ops
import torch
from _cases import ROWS, Case, Inputs
from _interleave import Call
from _suite import OURS, Calls, Suite
from torch import Tensor


def specdec(inputs: Inputs) -> Call:
    return functools.partial(
        specdec_ops.token_logprobs,
        inputs.target_logits,
        inputs.target_logits.argmax(dim=1),
        top_n=_eager.TOP_N,
    )


def must_read(inputs: Inputs) -> list[Tensor]:
    return list(inputs.target_logits)


def check(sets: Sequence[Inputs], calls: Calls) -> Mapping[str, float]:
    """Log-probabilities and ranks are those of eager torch."""
    for ours, eager in zip(calls[OURS], calls["eager"], strict=True):
        out, (logprobs, ranks) = ours(), eager()
        torch.testing.assert_close(out.logprobs, logprobs, rtol=1e-4, atol=1e-4)
        assert torch.equal(out.ranks, ranks)
    return {}


SUITE = Suite(
    name="token_logprobs",
    cases=[case for case in ROWS if not case.greedy],
    implementations={OURS: specdec, "eager": _eager.token_logprobs},
    check=check,
    must_read=must_read,
)


@pytest.mark.parametrize(("case", "implementation"), SUITE.parameters(), ids=str)
def test_token_logprobs(
    case: Case, implementation: str, side_by_side: Callable[[Suite, Case, str], None]
) -> None:
    side_by_side(SUITE, case, implementation)

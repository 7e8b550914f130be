"""row_statistics: entropy, margin and largest probability of rows; acceptance of pairs of rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import _eager
import pytest
import specdec_ops
import torch
from _cases import RECOVERED, ROWS, Case, Inputs
from _interleave import Call
from _suite import OURS, Calls, Suite
from torch import Tensor


def specdec(inputs: Inputs) -> Call:
    if inputs.draft_logits is None:
        return functools.partial(specdec_ops.row_statistics, inputs.target_logits)
    return functools.partial(
        specdec_ops.row_statistics,
        inputs.target_logits,
        draft_logits=inputs.draft_logits,
        row_indices=inputs.target_rows,
    )


def must_read(inputs: Inputs) -> list[Tensor]:
    if inputs.draft_logits is None:
        return list(inputs.target_logits)
    return [*inputs.target_logits[inputs.target_rows], *inputs.draft_logits]


def check(sets: Sequence[Inputs], calls: Calls) -> Mapping[str, float]:
    """The last of the statistics is that of eager torch: the acceptance of a pair, the entropy of a row."""
    for ours, eager in zip(calls[OURS], calls["eager"], strict=True):
        out, expected = ours(), eager()
        last = out.entropy if out.accept_prob is None else out.accept_prob
        torch.testing.assert_close(last, expected[-1], rtol=1e-4, atol=1e-4)
    return {}


SUITE = Suite(
    name="row_statistics",
    cases=[case for case in (*ROWS, *RECOVERED[:2]) if not case.greedy],
    implementations={OURS: specdec, "eager": _eager.row_statistics},
    check=check,
    must_read=must_read,
)


@pytest.mark.parametrize(("case", "implementation"), SUITE.parameters(), ids=str)
def test_row_statistics(
    case: Case, implementation: str, side_by_side: Callable[[Suite, Case, str], None]
) -> None:
    side_by_side(SUITE, case, implementation)

"""count_accepted: how many drafts each request kept. Call overhead is all there is to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import _eager
import _vllm
import pytest
import specdec_ops
import torch
from _cases import COUNTS, Case, Inputs
from _interleave import Call
from _suite import OURS, Calls, Suite
from torch import Tensor


def _token_ids(inputs: Inputs) -> Tensor:
    torch.manual_seed(int(inputs.seeds[0]))
    tokens: Tensor = _eager.verify_chain(inputs)()
    return tokens


def specdec(inputs: Inputs) -> Call:
    return functools.partial(specdec_ops.count_accepted, _token_ids(inputs))


def eager(inputs: Inputs) -> Call:
    token_ids = _token_ids(inputs)

    def call() -> tuple[Tensor, Tensor]:
        num_emitted = (token_ids >= 0).sum(dim=1)
        return (num_emitted - 1).clamp_(min=0), num_emitted

    return call


def vllm(inputs: Inputs) -> Call:
    return _vllm.count_accepted(_token_ids(inputs))


def check(sets: Sequence[Inputs], calls: Calls) -> Mapping[str, float]:
    """Everyone counts the same."""
    for name, of_sets in calls.items():
        for inputs, call in zip(sets, of_sets, strict=True):
            counts = call() if name.startswith("vllm") else call()[1]
            assert torch.equal(counts.long(), (_token_ids(inputs) >= 0).sum(dim=1)), name
    return {}


SUITE = Suite(
    name="count_accepted",
    cases=COUNTS,
    implementations={OURS: specdec, "eager": eager, "vllm": vllm},
    check=check,
)


@pytest.mark.parametrize(("case", "implementation"), SUITE.parameters(), ids=str)
def test_count_accepted(
    case: Case, implementation: str, side_by_side: Callable[[Suite, Case, str], None]
) -> None:
    side_by_side(SUITE, case, implementation)

"""sample: one token per row, from logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import _eager
import _vllm
import pytest
import specdec_ops
import torch
from _cases import ROWS, Case, Inputs
from _interleave import Call
from _suite import OURS, Calls, Suite
from specdec_ops.ops.sample import _reference_sample
from torch import Tensor


def specdec(inputs: Inputs) -> Call:
    return functools.partial(
        specdec_ops.sample,
        inputs.target_logits,
        temperature=inputs.temperature,
        seeds=inputs.seeds,
        positions=inputs.positions,
    )


def must_read(inputs: Inputs) -> list[Tensor]:
    return list(inputs.target_logits)


def check(sets: Sequence[Inputs], calls: Calls) -> Mapping[str, float]:
    """Tokens are those of the float64 reference; valid, or the argmax, for everyone."""
    for name, of_sets in calls.items():
        for inputs, call in zip(sets, of_sets, strict=True):
            tokens = call().token_ids if name == OURS else call()
            assert ((tokens >= 0) & (tokens < inputs.case.vocab_size)).all(), name
            if inputs.case.greedy:
                assert torch.equal(tokens.long(), inputs.target_logits.argmax(dim=1)), name
    first = sets[0]
    expected = _reference_sample(
        first.target_logits[:2], first.temperature[:2], seeds=first.seeds[:2], positions=first.positions[:2]
    )
    assert torch.equal(specdec(first)().token_ids[:2], expected[0])
    return {}


SUITE = Suite(
    name="sample",
    cases=ROWS,
    implementations={OURS: specdec, "eager": _eager.sample, "vllm": _vllm.sample},
    check=check,
    must_read=must_read,
)


@pytest.mark.parametrize(("case", "implementation"), SUITE.parameters(), ids=str)
def test_sample(case: Case, implementation: str, side_by_side: Callable[[Suite, Case, str], None]) -> None:
    side_by_side(SUITE, case, implementation)

"""sample: one token per row, from logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import _eager
import _vllm
import pytest
import specdec_ops
import torch
from _cases import LIKELIEST, ROWS, Case, Inputs
from _suite import OURS, PLAIN, Calls, Suite
from specdec_ops.ops.sample import _reference_sample
from torch import Tensor


def specdec(inputs: Inputs) -> Callable[..., specdec_ops.SampleOutput]:
    return functools.partial(
        specdec_ops.sample,
        inputs.target_logits,
        temperature=inputs.temperature,
        seeds=inputs.seeds,
        positions=inputs.positions,
    )


def from_the_likeliest(inputs: Inputs) -> Callable[..., specdec_ops.SampleOutput]:
    return functools.partial(specdec(inputs), law_size=64)


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


def check_law(sets: Sequence[Inputs], calls: Calls) -> Mapping[str, float]:
    """Laws are those of the largest logits."""
    inputs = sets[0]
    out = from_the_likeliest(inputs)()
    assert out.support_ids is not None and out.support_logprobs is not None
    scaled = inputs.target_logits.double() / inputs.temperature[:, None]
    expected = scaled.topk(64).values.log_softmax(-1)
    torch.testing.assert_close(out.support_logprobs.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(scaled.gather(1, out.support_ids), scaled.topk(64).values)
    return {}


SUITE = Suite(
    name="sample",
    cases=ROWS,
    implementations={OURS: specdec, "eager": _eager.sample, "vllm": _vllm.sample},
    check=check,
    must_read=must_read,
)


LAW_SUITE = Suite(
    name="sample, 64 ids",
    cases=LIKELIEST,
    implementations={OURS: from_the_likeliest, PLAIN: specdec},
    check=check_law,
    must_read=must_read,
)


@pytest.mark.parametrize(("case", "implementation"), SUITE.parameters(), ids=str)
def test_sample(case: Case, implementation: str, side_by_side: Callable[[Suite, Case, str], None]) -> None:
    side_by_side(SUITE, case, implementation)


@pytest.mark.parametrize(("case", "implementation"), LAW_SUITE.parameters(), ids=str)
def test_sample_from_the_likeliest(
    case: Case, implementation: str, side_by_side: Callable[[Suite, Case, str], None]
) -> None:
    side_by_side(LAW_SUITE, case, implementation)

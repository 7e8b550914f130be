"""expand_to_drafts: a request's value for each of its drafts."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from draft_batches import POISON, Batch, check_against_reference, check_op
from hypothesis import given
from hypothesis import strategies as st
from implementations import Implementation
from runner_batches import assert_raises
from specdec_ops.ops import expand_to_drafts

NAME = "expand_to_drafts_"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cu", [[0, 2, 2, 5], [2, 2, 5]], ids=str)
def test_repeats_each_value(implementation: Implementation, dtype: torch.dtype, cu: list[int]) -> None:
    values = torch.tensor([0, 1, 1 if dtype == torch.bool else 3]).to(dtype)
    out = implementation.expand_to_drafts(values, torch.tensor(cu))
    assert out.dtype == dtype
    assert torch.equal(out, values.repeat_interleave(torch.tensor([2, 0, 3])))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fractions_stay(implementation: Implementation, dtype: torch.dtype) -> None:
    """A temperature of 0.7 is not cut to an integer."""
    values = torch.tensor([0.7, 1e-3]).to(dtype)
    out = implementation.expand_to_drafts(values, torch.tensor([1, 2]), replace_from=0, replace_to=1)
    assert torch.equal(out, values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_replaces_one_value(implementation: Implementation, dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 0]).to(dtype)
    out = implementation.expand_to_drafts(values, torch.tensor([1, 2, 4]), replace_from=0, replace_to=1)
    assert torch.equal(out, torch.ones(4).to(dtype))
    out = implementation.expand_to_drafts(values, torch.tensor([1, 2, 4]), replace_from=1, replace_to=0)
    assert torch.equal(out, torch.zeros(4).to(dtype))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_replacements_are_numbers_of_the_dtype(implementation: Implementation, dtype: torch.dtype) -> None:
    """0.7 means the value next to it that the dtype has; -0 is 0; NaN equals nothing."""
    values = torch.tensor([0.7, -0.0, torch.nan], dtype=dtype)
    cu = torch.tensor([0, 1, 2, 3])
    out = implementation.expand_to_drafts(values, cu, replace_from=0.7, replace_to=0.3)
    assert torch.equal(out[:2], torch.tensor([0.3, -0.0], dtype=dtype))
    out = implementation.expand_to_drafts(values, cu, replace_from=0, replace_to=torch.inf)
    assert torch.equal(out[:2], torch.tensor([0.7, torch.inf], dtype=dtype))
    out = implementation.expand_to_drafts(values, cu, replace_from=torch.nan, replace_to=1)
    assert out[2].isnan()


def test_integers_are_compared_exactly(implementation: Implementation) -> None:
    values = torch.tensor([2**62, 2**62 + 1, -(2**63)])
    out = implementation.expand_to_drafts(values, torch.arange(4), replace_from=2**62, replace_to=-(2**63))
    assert out.tolist() == [-(2**63), 2**62 + 1, -(2**63)]


def test_writes_up_to_the_last_total(implementation: Implementation) -> None:
    expanded = torch.full((7,), float(POISON))
    values = torch.tensor([0.5, 0.25])
    assert implementation.expand_to_drafts_(values, torch.tensor([1, 3]), expanded=expanded) is None
    assert expanded.tolist() == [0.5, 0.25, 0.25] + [POISON] * 4
    out = implementation.expand_to_drafts(values, torch.tensor([1, 3]), num_drafts=5)
    assert out.tolist() == [0.5, 0.25, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("cu", [[], [0]], ids=str)
def test_empty_batch(implementation: Implementation, cu: list[int]) -> None:
    assert implementation.expand_to_drafts(torch.zeros(0), torch.tensor(cu).long()).shape == (0,)


def test_a_value_expanded_over_the_batch(implementation: Implementation) -> None:
    out = implementation.expand_to_drafts(torch.tensor([0.5]).expand(3), torch.tensor([1, 2, 4]))
    assert out.tolist() == [0.5] * 4


def random_arguments(rng: random.Random) -> dict[str, Any]:
    batch = Batch(rng)
    dtype = rng.choice(DTYPES)
    values = batch.ints(0, 1, batch.size).to(dtype)
    replaces = rng.random() < 0.5
    return {
        "values": values,
        "cu_num_draft_tokens": batch.cu_num_draft_tokens(),
        "replace_from": 0 if replaces else None,
        "replace_to": 1 if replaces else None,
        "expanded": torch.full((batch.longer(batch.num_drafts),), POISON).to(dtype),
    }


@given(seed=st.integers(0, 2**32 - 1))
def test_matches_reference(native: Implementation, seed: int) -> None:
    rng = random.Random(seed)
    check_against_reference(native, NAME, random_arguments(rng), ["expanded"], rng)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": torch.ones(2, 1)}, "values must be [batch], got shape [2, 1]"),
        (
            {"values": torch.ones(2).byte(), "expanded": torch.ones(3).byte()},
            "values must be float64, float32, bfloat16, float16, int64, int32 or bool, got uint8",
        ),
        ({"expanded": torch.ones(3).int()}, "expanded must be float32 like values, got int32"),
        ({"expanded": torch.ones(3, 1)}, "expanded must be [num_drafts], got shape [3, 1]"),
        (
            {"expanded": torch.ones(2)},
            "cu_num_draft_tokens must end with at most num_drafts = 2, got 3",
        ),
        (
            {"cu_num_draft_tokens": torch.tensor([3])},
            "cu_num_draft_tokens must be [batch + 1] or [batch] with 2 requests, got shape [1]",
        ),
        ({"replace_from": 0.0}, "replace_from and replace_to must be given together, got one"),
        ({"replace_to": 0.0}, "replace_from and replace_to must be given together, got one"),
    ],
    ids=lambda value: value[:44] if isinstance(value, str) else "",
)
def test_errors(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    arguments = {
        "values": torch.ones(2),
        "cu_num_draft_tokens": torch.tensor([1, 3]),
        "expanded": torch.full((3,), float(POISON)),
    }
    assert_raises(default_native, NAME, {**arguments, **changes}, ["expanded"], message)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        (torch.int32, 0.5),
        (torch.int32, 2.0**31),
        (torch.int32, -(2.0**31) - 1),
        (torch.int64, 2.0**63),
        (torch.int64, torch.inf),
        (torch.int64, torch.nan),
        (torch.bool, 2.0),
    ],
    ids=str,
)
def test_an_integer_dtype_must_hold_the_replacements(
    default_native: Implementation, dtype: torch.dtype, number: float
) -> None:
    values = torch.ones(2).to(dtype)
    for name, other in (("replace_from", "replace_to"), ("replace_to", "replace_from")):
        expected = f"{NAME}: {name} must be a number that {str(dtype)[6:]} holds, got "
        with pytest.raises(RuntimeError, match=expected):
            default_native.expand_to_drafts(values, torch.tensor([1, 2]), **{name: number, other: 1})


def test_op_is_well_formed() -> None:
    check_op(expand_to_drafts._op, random_arguments(random.Random(3)))

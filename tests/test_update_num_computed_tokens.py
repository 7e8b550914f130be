"""update_num_computed_tokens_: queries that are computed."""

from __future__ import annotations

import random
from typing import Any

import pytest
import runner_batches
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import Implementation
from specdec_ops.ops import update_num_computed_tokens

NAME = "update_num_computed_tokens_"
WRITTEN = ("num_computed_tokens",)


def arguments(**changes: Any) -> dict[str, Any]:
    """Queries of three, no and five tokens for state rows 2, 0 and 1."""
    return {
        "request_indices": torch.tensor([2, 0, 1]),
        "query_start_loc": torch.tensor([0, 3, 3, 8]),
        "num_computed_tokens": torch.tensor([0, 10, 20]),
        **changes,
    }


def computed(implementation: Implementation, **changes: Any) -> list[int]:
    given = arguments(**changes)
    assert implementation.update_num_computed_tokens_(**given) is None
    return given["num_computed_tokens"].tolist()


def test_each_query_adds_its_tokens(implementation: Implementation) -> None:
    assert computed(implementation) == [0, 15, 23]


@pytest.mark.parametrize("index", [-1, -5, 3, 2**31 - 1])
def test_padding_changes_nothing(implementation: Implementation, index: int) -> None:
    assert computed(implementation, request_indices=torch.tensor([index, 0, 1])) == [0, 15, 20]


def test_a_row_that_occurs_twice_gets_both_queries(cpu_implementation: Implementation) -> None:
    assert computed(cpu_implementation, request_indices=torch.tensor([1, 0, 1])) == [0, 18, 20]


def test_buffers_longer_than_the_batch(implementation: Implementation) -> None:
    """Totals past the batch are not looked at; dtypes may differ."""
    longer = torch.tensor([2, 3, 3, 8, 0, -9], dtype=torch.int32)
    assert computed(implementation, query_start_loc=longer) == [0, 15, 21]


def test_empty_batch(implementation: Implementation) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert computed(implementation, request_indices=none, query_start_loc=torch.tensor([0])) == [0, 10, 20]


def random_arguments(rng: random.Random) -> dict[str, Any]:
    batch = runner_batches.Batch(rng)
    return {
        "request_indices": batch.ints(batch.request_indices),
        "query_start_loc": batch.totals(batch.query_lens),
        "num_computed_tokens": batch.random_ints(0, 9, batch.max_requests),
    }


@given(rng=st.randoms(use_true_random=False))
def test_matches_reference(native: Implementation, rng: random.Random) -> None:
    runner_batches.check_against_reference(native, NAME, random_arguments(rng), WRITTEN, rng)


TOTALS_ERROR = "query_start_loc must start at 0 or above and never decrease, got 2 after 3 at index 2"
ERRORS = [
    ({"request_indices": torch.zeros(3)}, "request_indices must be int32 or int64, got float32"),
    (
        {"query_start_loc": torch.tensor([0, 1, 2])},
        "query_start_loc must be [batch + 1] with at least 4 elements, got shape [3]",
    ),
    (
        {"num_computed_tokens": torch.zeros(3, 1, dtype=torch.int64)},
        "num_computed_tokens must be [max_requests], got shape [3, 1]",
    ),
]


def test_bad_totals(cpu_implementation: Implementation) -> None:
    bad = arguments(query_start_loc=torch.tensor([0, 3, 2, 5]))
    runner_batches.assert_raises(cpu_implementation, NAME, bad, WRITTEN, TOTALS_ERROR)


@pytest.mark.parametrize(("changes", "message"), ERRORS)
def test_bad_arguments(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    runner_batches.assert_raises(default_native, NAME, arguments(**changes), WRITTEN, message)


def test_opcheck() -> None:
    runner_batches.check_op(update_num_computed_tokens._op, arguments())

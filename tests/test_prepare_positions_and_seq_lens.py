"""prepare_positions_and_seq_lens_: positions of a step's tokens, lengths of its sequences."""

from __future__ import annotations

import random
from typing import Any

import pytest
import runner_batches
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import Implementation
from runner_batches import POISON
from specdec_ops.ops import prepare_positions_and_seq_lens

NAME = "prepare_positions_and_seq_lens_"
WRITTEN = ("positions", "seq_lens")


def arguments(**changes: Any) -> dict[str, Any]:
    """Queries of three and two tokens for state rows 1 and 0."""
    return {
        "request_indices": torch.tensor([1, 0]),
        "query_start_loc": torch.tensor([0, 3, 5]),
        "num_computed_tokens": torch.tensor([10, 20]),
        "positions": torch.full((6,), POISON),
        "seq_lens": torch.full((4,), POISON),
        **changes,
    }


def prepared(implementation: Implementation, **changes: Any) -> tuple[list[int], list[int]]:
    given = arguments(**changes)
    assert implementation.prepare_positions_and_seq_lens_(**given) is None
    return given["positions"].tolist(), given["seq_lens"].tolist()


def test_positions_go_on_from_the_computed_tokens(implementation: Implementation) -> None:
    """Lengths past the batch are 0, positions past its tokens stay."""
    assert prepared(implementation) == ([20, 21, 22, 10, 11, POISON], [23, 12, 0, 0])


@pytest.mark.parametrize("index", [-1, -5, 2, 2**31 - 1])
def test_padding_has_no_length_and_keeps_its_positions(implementation: Implementation, index: int) -> None:
    """F9."""
    assert prepared(implementation, request_indices=torch.tensor([index, 0])) == (
        [POISON, POISON, POISON, 10, 11, POISON],
        [0, 12, 0, 0],
    )


def test_an_empty_query_has_the_length_that_is_computed(implementation: Implementation) -> None:
    out = prepared(implementation, query_start_loc=torch.tensor([0, 0, 2]))
    assert out == ([10, 11, POISON, POISON, POISON, POISON], [20, 12, 0, 0])


def test_a_row_that_occurs_twice_is_read_twice(implementation: Implementation) -> None:
    out = prepared(implementation, request_indices=torch.tensor([0, 0]))
    assert out == ([10, 11, 12, 10, 11, POISON], [13, 12, 0, 0])


def test_buffers_longer_than_the_batch(implementation: Implementation) -> None:
    longer = torch.tensor([1, 4, 6, 6, 0], dtype=torch.int32)
    assert prepared(implementation, query_start_loc=longer) == ([POISON, 20, 21, 22, 10, 11], [23, 12, 0, 0])


def test_queries_of_thousands_of_tokens(implementation: Implementation) -> None:
    """B14."""
    positions, seq_lens = prepared(
        implementation,
        query_start_loc=torch.tensor([0, 1025, 3585]),
        positions=torch.full((3585,), POISON),
    )
    assert positions == [*range(20, 1045), *range(10, 2570)]
    assert seq_lens == [1045, 2570, 0, 0]


def test_empty_batch(implementation: Implementation) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    out = prepared(implementation, request_indices=none, query_start_loc=torch.tensor([0]))
    assert out == ([POISON] * 6, [0] * 4)


def random_arguments(rng: random.Random) -> dict[str, Any]:
    batch = runner_batches.Batch(rng)
    return {
        "request_indices": batch.ints(batch.request_indices),
        "query_start_loc": batch.totals(batch.query_lens),
        "num_computed_tokens": batch.random_ints(0, 9, batch.max_requests),
        "positions": batch.poisoned(sum(batch.query_lens)),
        "seq_lens": batch.poisoned(batch.size),
    }


@given(rng=st.randoms(use_true_random=False))
def test_matches_reference(native: Implementation, rng: random.Random) -> None:
    runner_batches.check_against_reference(native, NAME, random_arguments(rng), WRITTEN, rng)


TOTALS_ERRORS = [
    ([3, 2, 5], "query_start_loc must start at 0 or above and never decrease, got 2 after 3 at index 1"),
    ([0, 3, 7], "query_start_loc must end within the 6 elements of positions, got 7"),
]
ERRORS = [
    ({"request_indices": torch.zeros(2)}, "request_indices must be int32 or int64, got float32"),
    (
        {"query_start_loc": torch.tensor([0, 1])},
        "query_start_loc must be [batch + 1] with at least 3 elements, got shape [2]",
    ),
    (
        {"num_computed_tokens": torch.tensor([[10], [20]])},
        "num_computed_tokens must be [max_requests], got shape [2, 1]",
    ),
    ({"positions": torch.zeros(6)}, "positions must be int32 or int64, got float32"),
    ({"seq_lens": torch.tensor([0])}, "seq_lens must be [batch] with at least 2 elements, got shape [1]"),
]


@pytest.mark.parametrize(("totals", "message"), TOTALS_ERRORS)
def test_bad_totals(cpu_implementation: Implementation, totals: list[int], message: str) -> None:
    bad = arguments(query_start_loc=torch.tensor(totals))
    runner_batches.assert_raises(cpu_implementation, NAME, bad, WRITTEN, message)


@pytest.mark.parametrize(("changes", "message"), ERRORS)
def test_bad_arguments(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    runner_batches.assert_raises(default_native, NAME, arguments(**changes), WRITTEN, message)


def test_opcheck() -> None:
    runner_batches.check_op(prepare_positions_and_seq_lens._op, arguments())

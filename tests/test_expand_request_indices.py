"""expand_request_indices: the request of each logits row."""

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
from specdec_ops.ops import expand_request_indices

NAME = "expand_request_indices_"
WRITTEN = ("expanded_request_indices", "local_positions")


def arguments(num_logits: int = 5, **changes: Any) -> dict[str, Any]:
    return {
        "request_indices": torch.tensor([7, 4, 9]),
        "cu_num_logits": torch.tensor([0, 1, 1, 5]),
        "expanded_request_indices": torch.full((num_logits,), POISON),
        "local_positions": torch.full((num_logits,), POISON),
        **changes,
    }


def expanded(implementation: Implementation, **changes: Any) -> tuple[list[int], list[int]]:
    """By both forms."""
    given = arguments(**changes)
    assert implementation.expand_request_indices_(**given) is None
    requests, places = given["expanded_request_indices"], given["local_positions"]
    out = implementation.expand_request_indices(
        given["request_indices"], given["cu_num_logits"], num_logits=len(requests)
    )
    assert out.expanded_request_indices.dtype == given["request_indices"].dtype
    assert out.local_positions.dtype == torch.int32
    assert (out.expanded_request_indices.tolist(), out.local_positions.tolist()) == (
        requests.tolist(),
        places.tolist(),
    )
    return requests.tolist(), places.tolist()


def test_each_index_is_repeated_and_its_rows_numbered(implementation: Implementation) -> None:
    """Among them a request without logits rows."""
    assert expanded(implementation) == ([7, 9, 9, 9, 9], [0, 0, 1, 2, 3])


def test_rows_past_the_last_total_are_padding(implementation: Implementation) -> None:
    """F9."""
    assert expanded(implementation, num_logits=7) == ([7, 9, 9, 9, 9, -1, -1], [0, 0, 1, 2, 3, 0, 0])


def test_padding_stays_padding(implementation: Implementation) -> None:
    assert expanded(implementation, request_indices=torch.tensor([-1, 4, -2])) == (
        [-1, -2, -2, -2, -2],
        [0, 0, 1, 2, 3],
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_buffers_longer_than_the_batch(implementation: Implementation, dtype: torch.dtype) -> None:
    longer = torch.tensor([0, 1, 1, 5, 2, 99], dtype=dtype)
    indices = torch.tensor([7, 4, 9], dtype=dtype)
    assert expanded(implementation, cu_num_logits=longer, request_indices=indices) == (
        [7, 9, 9, 9, 9],
        [0, 0, 1, 2, 3],
    )


def test_thousands_of_rows(implementation: Implementation) -> None:
    """B10, B14."""
    requests, places = expanded(
        implementation, num_logits=3001, cu_num_logits=torch.tensor([0, 2560, 2560, 3001])
    )
    assert requests == [7] * 2560 + [9] * 441
    assert places == [*range(2560), *range(441)]


@pytest.mark.parametrize("num_logits", [0, 2])
def test_empty_batch(implementation: Implementation, num_logits: int) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    empty = {"request_indices": none, "cu_num_logits": torch.tensor([0])}
    assert expanded(implementation, num_logits=num_logits, **empty) == ([-1] * num_logits, [0] * num_logits)


def random_arguments(rng: random.Random) -> dict[str, Any]:
    batch = runner_batches.Batch(rng)
    expanded_request_indices = batch.poisoned(sum(batch.num_logits))
    return {
        "request_indices": batch.ints(batch.request_indices),
        "cu_num_logits": batch.totals(batch.num_logits),
        "expanded_request_indices": expanded_request_indices,
        "local_positions": batch.ints(expanded_request_indices.tolist()),
    }


@given(rng=st.randoms(use_true_random=False))
def test_matches_reference(native: Implementation, rng: random.Random) -> None:
    runner_batches.check_against_reference(native, NAME, random_arguments(rng), WRITTEN, rng)


TOTALS_ERRORS = [
    ([0, 3, 2, 5], "cu_num_logits must start at 0 or above and never decrease, got 2 after 3 at index 2"),
    ([0, 1, 1, 6], "cu_num_logits must end within the 5 elements of expanded_request_indices, got 6"),
]
ERRORS = [
    ({"request_indices": torch.zeros(3)}, "request_indices must be int32 or int64, got float32"),
    (
        {"cu_num_logits": torch.tensor([0, 1, 2])},
        "cu_num_logits must be [batch + 1] with at least 4 elements, got shape [3]",
    ),
    (
        {"expanded_request_indices": torch.zeros(5)},
        "expanded_request_indices must be int32 or int64, got float32",
    ),
    (
        {"local_positions": torch.zeros(6, dtype=torch.int64)},
        "local_positions must be [num_logits] with 5 elements, got shape [6]",
    ),
]


@pytest.mark.parametrize(("totals", "message"), TOTALS_ERRORS)
def test_bad_totals(cpu_implementation: Implementation, totals: list[int], message: str) -> None:
    bad = arguments(cu_num_logits=torch.tensor(totals))
    runner_batches.assert_raises(cpu_implementation, NAME, bad, WRITTEN, message)


@pytest.mark.parametrize(("changes", "message"), ERRORS)
def test_bad_arguments(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    runner_batches.assert_raises(default_native, NAME, arguments(**changes), WRITTEN, message)


def test_opcheck() -> None:
    runner_batches.check_op(expand_request_indices._op, arguments())

"""prepare_padded_draft_inputs: the token to go on from where rejected tokens stay in the batch."""

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
from specdec_ops.ops import prepare_padded_draft_inputs

NAME = "prepare_padded_draft_inputs_"
WRITTEN = ("token_indices", "num_rejected")


def prepared(
    implementation: Implementation, cu: list[int], num_sampled: list[int], query_start_loc: list[int]
) -> tuple[list[int], list[int]]:
    out = implementation.prepare_padded_draft_inputs(
        torch.tensor(cu), torch.tensor(num_sampled), torch.tensor(query_start_loc)
    )
    return out.token_indices.tolist(), out.num_rejected.tolist()


@pytest.mark.parametrize("cu", [[0, 3, 6, 9], [3, 6, 9]], ids=str)
def test_goes_on_from_the_last_kept_token(implementation: Implementation, cu: list[int]) -> None:
    """D15: none, one and all of three drafts accepted."""
    assert prepared(implementation, cu, [1, 2, 4], [0, 4, 8, 12]) == ([0, 5, 11], [3, 2, 0])


def test_requests_without_drafts_reject_nothing(implementation: Implementation) -> None:
    """Prompts of any length, whatever was sampled."""
    assert prepared(implementation, [0, 0, 0], [1, 0], [0, 7, 9]) == ([6, 8], [0, 0])


def test_a_request_of_which_nothing_was_kept_points_to_its_first_token(
    implementation: Implementation,
) -> None:
    """Not to the token before it, which is another request's or none."""
    assert prepared(implementation, [2, 4], [0, 0], [0, 3, 6]) == ([0, 3], [3, 3])


def test_counts_out_of_range_count_as_the_nearest_one_inside(implementation: Implementation) -> None:
    assert prepared(implementation, [2, 4], [9, -9], [0, 3, 6]) == ([2, 3], [0, 3])


def test_a_request_without_tokens(implementation: Implementation) -> None:
    assert prepared(implementation, [0, 0], [0, 0], [0, 0, 0]) == ([-1, -1], [0, 0])
    assert prepared(implementation, [0, 2], [0, 1], [0, 4, 4]) == ([3, 3], [0, 2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_outputs_have_the_dtype_of_query_start_loc(
    implementation: Implementation, dtype: torch.dtype
) -> None:
    out = implementation.prepare_padded_draft_inputs(
        torch.tensor([3], dtype=torch.int32), torch.tensor([2]), torch.tensor([0, 4], dtype=dtype)
    )
    assert (out.token_indices.dtype, out.num_rejected.dtype) == (dtype, dtype)


@pytest.mark.parametrize("cu", [[], [0]], ids=str)
def test_empty_batch(implementation: Implementation, cu: list[int]) -> None:
    none = torch.tensor(cu, dtype=torch.int64)
    out = implementation.prepare_padded_draft_inputs(none, none[:0], torch.tensor([0]))
    assert out.token_indices.shape == out.num_rejected.shape == (0,)


def random_arguments(rng: random.Random) -> dict[str, Any]:
    batch = Batch(rng)
    starts = torch.tensor([0] + [rng.randint(0, 6) for _ in range(batch.size)]).cumsum(0)
    starts = torch.cat([starts, batch.ints(0, 50, rng.choice([0, 0, 2]))])
    return {
        "cu_num_draft_tokens": batch.cu_num_draft_tokens(),
        "num_sampled": batch.ints(-1, 6, batch.longer(batch.size)),
        "query_start_loc": starts.to(rng.choice([torch.int32, torch.int64])),
        "token_indices": batch.ints(POISON, POISON, batch.size),
        "num_rejected": batch.ints(POISON, POISON, batch.longer(batch.size)),
    }


@given(seed=st.integers(0, 2**32 - 1))
def test_matches_reference(native: Implementation, seed: int) -> None:
    rng = random.Random(seed)
    check_against_reference(native, NAME, random_arguments(rng), WRITTEN, rng)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_num_draft_tokens": torch.ones(2)}, "cu_num_draft_tokens must be int32 or int64, got float32"),
        (
            {"cu_num_draft_tokens": torch.ones(4).int()},
            "cu_num_draft_tokens must be [batch + 1] or [batch] with 2 requests, got shape [4]",
        ),
        (
            {"cu_num_draft_tokens": torch.tensor([2, 1])},
            "cu_num_draft_tokens must not decrease, got 2 before 1 at index 1",
        ),
        ({"num_sampled": torch.ones(2)}, "num_sampled must be int32 or int64, got float32"),
        (
            {"num_sampled": torch.ones(1).int()},
            "num_sampled must be [batch] with at least 2 elements, got shape [1]",
        ),
        ({"query_start_loc": torch.ones(3)}, "query_start_loc must be int32 or int64, got float32"),
        (
            {"query_start_loc": torch.ones(2).int()},
            "query_start_loc must be [batch + 1] with at least 3 elements, got shape [2]",
        ),
        ({"token_indices": torch.ones(2)}, "token_indices must be int32 or int64, got float32"),
        ({"token_indices": torch.ones(2, 1).int()}, "token_indices must be [batch], got shape [2, 1]"),
        ({"num_rejected": torch.ones(2)}, "num_rejected must be int32 or int64, got float32"),
        (
            {"num_rejected": torch.ones(1).int()},
            "num_rejected must be [batch] with at least 2 elements, got shape [1]",
        ),
    ],
    ids=lambda value: value[:44] if isinstance(value, str) else "",
)
def test_errors(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    arguments = {
        "cu_num_draft_tokens": torch.tensor([1, 3]),
        "num_sampled": torch.tensor([1, 1]),
        "query_start_loc": torch.tensor([0, 2, 5]),
        "token_indices": torch.full((2,), POISON),
        "num_rejected": torch.full((2,), POISON),
    }
    assert_raises(default_native, NAME, {**arguments, **changes}, WRITTEN, message)


def test_op_is_well_formed() -> None:
    check_op(prepare_padded_draft_inputs._op, random_arguments(random.Random(3)))

"""prepare_next_tokens: the last sampled token of each request, or its backup token."""

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
from specdec_ops.ops import prepare_next_tokens

NAME = "prepare_next_tokens_"
WRITTEN = ("next_token_ids", "num_sampled")


def prepared(
    implementation: Implementation,
    rows: list[list[int]],
    backup: list[int],
    *,
    discard: list[bool] | None = None,
    vocab_size: int = 10,
) -> tuple[list[int], list[int]]:
    mask = torch.tensor(discard if discard is not None else [False] * len(rows))
    out = implementation.prepare_next_tokens(torch.tensor(rows), mask, torch.tensor(backup), vocab_size)
    return out.next_token_ids.tolist(), out.num_sampled.tolist()


def test_takes_the_last_sampled_token(implementation: Implementation) -> None:
    rows = [[5, -1, -1], [5, 6, -1], [5, 6, 7]]
    assert prepared(implementation, rows, [1, 2, 3]) == ([5, 6, 7], [1, 2, 3])


def test_without_a_sampled_token_the_backup_is_next(implementation: Implementation) -> None:
    """D7: a row of nothing, and a row of ids from the vocabulary size on."""
    assert prepared(implementation, [[-1, -1], [10, 2**40]], [1, 2]) == ([1, 2], [0, 0])


def test_discarded_requests_take_the_backup(implementation: Implementation) -> None:
    """D14: the next token of the prompt, and nothing counts as sampled."""
    rows = [[5, 6], [5, 6]]
    assert prepared(implementation, rows, [1, 2], discard=[True, False]) == ([1, 6], [0, 2])


def test_ids_outside_the_vocabulary_are_no_tokens(implementation: Implementation) -> None:
    """D5: -2 as little as -1; the valid ids need not come first."""
    assert prepared(implementation, [[-2, -1, 7], [9, 10, -1], [3, -5, 11]], [1, 1, 1]) == (
        [7, 9, 3],
        [1, 1, 1],
    )


def test_a_backup_outside_the_vocabulary_counts_as_0(implementation: Implementation) -> None:
    """D4, D5: what goes into the embedding is always an id."""
    rows, discard = [[-1], [5], [-1], [-1], [4]], [False, True, False, False, False]
    backup = [-1, -2, 10, 9, -1]
    assert prepared(implementation, rows, backup, discard=discard) == ([0, 0, 0, 9, 4], [0, 0, 0, 0, 1])


@pytest.mark.parametrize("backup_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
def test_dtypes(implementation: Implementation, id_dtype: torch.dtype, backup_dtype: torch.dtype) -> None:
    out = implementation.prepare_next_tokens(
        torch.tensor([[5, 6]], dtype=id_dtype),
        torch.tensor([False]),
        torch.tensor([1], dtype=backup_dtype),
        10,
    )
    assert out.next_token_ids.dtype == backup_dtype
    assert out.num_sampled.dtype == torch.int32
    assert (out.next_token_ids.item(), out.num_sampled.item()) == (6, 2)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty(implementation: Implementation, shape: tuple[int, int]) -> None:
    batch = shape[0]
    out = implementation.prepare_next_tokens(
        torch.zeros(shape, dtype=torch.int32), torch.zeros(batch).bool(), torch.full((batch,), 4), 10
    )
    assert (out.next_token_ids.tolist(), out.num_sampled.tolist()) == ([4] * batch, [0] * batch)


def random_arguments(rng: random.Random) -> dict[str, Any]:
    batch = Batch(rng)
    return {
        "token_ids": batch.ints(-3, 6, batch.size, batch.k + 1),
        "discard_request_mask": batch.bools(batch.longer(batch.size)),
        "backup_token_ids": batch.ints(-2, 6, batch.longer(batch.size)),
        "vocab_size": rng.randint(1, 5),
        "next_token_ids": batch.ints(POISON, POISON, batch.longer(batch.size)),
        "num_sampled": batch.ints(POISON, POISON, batch.longer(batch.size)),
    }


@given(seed=st.integers(0, 2**32 - 1))
def test_matches_reference(native: Implementation, seed: int) -> None:
    rng = random.Random(seed)
    check_against_reference(native, NAME, random_arguments(rng), WRITTEN, rng)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": torch.ones(2, 3)}, "token_ids must be int32 or int64, got float32"),
        ({"token_ids": torch.ones(2).int()}, "token_ids must be [batch, k + 1], got shape [2]"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"discard_request_mask": torch.ones(2)}, "discard_request_mask must be bool, got float32"),
        (
            {"discard_request_mask": torch.ones(1).bool()},
            "discard_request_mask must be [batch] with at least 2 elements, got shape [1]",
        ),
        ({"backup_token_ids": torch.ones(2)}, "backup_token_ids must be int32 or int64, got float32"),
        (
            {"backup_token_ids": torch.ones(1).int()},
            "backup_token_ids must be [batch] with at least 2 elements, got shape [1]",
        ),
        ({"next_token_ids": torch.ones(2)}, "next_token_ids must be int32 or int64, got float32"),
        (
            {"next_token_ids": torch.ones(2, 1).int()},
            "next_token_ids must be [batch] with at least 2 elements, got shape [2, 1]",
        ),
        ({"num_sampled": torch.ones(2)}, "num_sampled must be int32 or int64, got float32"),
        (
            {"num_sampled": torch.ones(1).int()},
            "num_sampled must be [batch] with at least 2 elements, got shape [1]",
        ),
    ],
    ids=lambda value: value[:44] if isinstance(value, str) else "",
)
def test_errors(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    arguments = {
        "token_ids": torch.tensor([[1, 2], [3, -1]]),
        "discard_request_mask": torch.tensor([False, False]),
        "backup_token_ids": torch.tensor([1, 1]),
        "vocab_size": 10,
        "next_token_ids": torch.full((2,), POISON),
        "num_sampled": torch.full((2,), POISON),
    }
    assert_raises(default_native, NAME, {**arguments, **changes}, WRITTEN, message)


def test_op_is_well_formed() -> None:
    check_op(prepare_next_tokens._op, random_arguments(random.Random(3)))

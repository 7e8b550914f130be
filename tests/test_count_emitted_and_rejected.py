"""count_emitted_and_rejected: tokens that a step brought, drafts that it verified in vain."""

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
from specdec_ops.ops import count_emitted_and_rejected

NAME = "count_emitted_and_rejected_"
WRITTEN = ("num_emitted", "num_rejected")


def one_request(**changes: Any) -> dict[str, Any]:
    """State row 1 with a prefill of five tokens; two tokens emitted from four logits rows."""
    arguments = {
        "request_indices": torch.tensor([1]),
        "seq_lens": torch.tensor([9]),
        "cu_num_logits": torch.tensor([0, 4]),
        "prefill_lens": torch.tensor([90, 5]),
        "num_emitted": torch.tensor([2]),
        "num_rejected": torch.tensor([POISON]),
    }
    return {**arguments, **changes}


def counted(implementation: Implementation, **changes: Any) -> tuple[list[int], list[int]]:
    """By both forms."""
    arguments = one_request(**changes)
    functional = {key: value for key, value in arguments.items() if key != "num_rejected"}
    before = arguments["num_emitted"].clone()
    out = implementation.count_emitted_and_rejected(**functional)
    assert torch.equal(arguments["num_emitted"], before)
    assert out.num_emitted.dtype == out.num_rejected.dtype == before.dtype
    assert implementation.count_emitted_and_rejected_(**arguments) is None
    assert torch.equal(arguments["num_emitted"], out.num_emitted)
    assert torch.equal(arguments["num_rejected"].to(before.dtype), out.num_rejected)
    return out.num_emitted.tolist(), out.num_rejected.tolist()


@pytest.mark.parametrize(("emitted", "rejected"), [(1, 3), (2, 2), (4, 0)])
def test_rejected_drafts_are_the_logits_rows_without_an_emitted_token(
    implementation: Implementation, emitted: int, rejected: int
) -> None:
    """D1, D2: none, some and all of three drafts accepted."""
    assert counted(implementation, num_emitted=torch.tensor([emitted])) == ([emitted], [rejected])


@pytest.mark.parametrize(("seq_len", "expected"), [(4, ([0], [0])), (5, ([2], [2]))], ids=["chunk", "last"])
def test_a_request_in_its_prefill_counts_nothing(
    implementation: Implementation, seq_len: int, expected: tuple[list[int], list[int]]
) -> None:
    """D14: what the last token of the prompt gives is emitted."""
    assert counted(implementation, seq_lens=torch.tensor([seq_len])) == expected


@pytest.mark.parametrize("index", [-1, -5, 2, 2**31 - 1])
def test_padding_counts_nothing(implementation: Implementation, index: int) -> None:
    """D21, F9: whatever was counted before."""
    assert counted(implementation, request_indices=torch.tensor([index])) == ([0], [0])


def test_counts_are_never_negative(implementation: Implementation) -> None:
    assert counted(implementation, num_emitted=torch.tensor([7])) == ([7], [0])
    assert counted(implementation, num_emitted=torch.tensor([-2])) == ([0], [4])


def test_each_request_has_its_own_logits_rows(implementation: Implementation) -> None:
    """D22; int32 and int64 in one call; totals that do not start with 0, as of a part of a batch."""
    assert counted(
        implementation,
        request_indices=torch.tensor([1, 0, 2], dtype=torch.int32),
        seq_lens=torch.tensor([9, 3, 8, 0]),
        cu_num_logits=torch.tensor([10, 14, 15, 18], dtype=torch.int32),
        prefill_lens=torch.tensor([5, 5, 8]),
        num_emitted=torch.tensor([3, 1, 1], dtype=torch.int32),
        num_rejected=torch.full((3,), POISON),
    ) == ([3, 0, 1], [1, 0, 2])


def test_empty_batch(implementation: Implementation) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    empty = {
        "request_indices": none,
        "cu_num_logits": torch.tensor([0]),
        "num_emitted": none,
        "num_rejected": none,
    }
    assert counted(implementation, **empty) == ([], [])


def random_arguments(rng: random.Random) -> dict[str, Any]:
    batch = runner_batches.Batch(rng)
    return {
        "request_indices": batch.ints(batch.request_indices),
        "seq_lens": batch.random_ints(0, 12, batch.size + rng.choice([0, 2])),
        "cu_num_logits": batch.totals(batch.num_logits),
        "prefill_lens": batch.random_ints(0, 10, batch.max_requests),
        "num_emitted": batch.random_ints(-1, 7, batch.size),
        "num_rejected": batch.ints([POISON] * batch.size),
    }


@given(rng=st.randoms(use_true_random=False))
def test_matches_reference(native: Implementation, rng: random.Random) -> None:
    runner_batches.check_against_reference(native, NAME, random_arguments(rng), WRITTEN, rng)


TOTALS_ERROR = "cu_num_logits must start at 0 or above and never decrease, got 4 after 5 at index 1"
ERRORS = [
    ({"request_indices": torch.zeros(1)}, "request_indices must be int32 or int64, got float32"),
    ({"seq_lens": torch.tensor(9)}, "seq_lens must be [batch], got shape []"),
    (
        {"cu_num_logits": torch.tensor([0])},
        "cu_num_logits must be [batch + 1] with at least 2 elements, got shape [1]",
    ),
    ({"prefill_lens": torch.zeros(2)}, "prefill_lens must be int32 or int64, got float32"),
    ({"num_emitted": torch.tensor([1, 1])}, "num_emitted must be [batch] with 1 element, got shape [2]"),
    ({"num_rejected": torch.tensor([1, 1])}, "num_rejected must be [batch] with 1 element, got shape [2]"),
]


def test_bad_totals(cpu_implementation: Implementation) -> None:
    arguments = one_request(cu_num_logits=torch.tensor([5, 4]))
    runner_batches.assert_raises(cpu_implementation, NAME, arguments, WRITTEN, TOTALS_ERROR)


@pytest.mark.parametrize(("changes", "message"), ERRORS)
def test_bad_arguments(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    runner_batches.assert_raises(default_native, NAME, one_request(**changes), WRITTEN, message)


def test_opcheck() -> None:
    runner_batches.check_op(count_emitted_and_rejected._op, one_request())

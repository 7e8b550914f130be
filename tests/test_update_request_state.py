"""update_request_state_: emitted tokens, counts and drafts in the rows of their requests."""

from __future__ import annotations

import random
from typing import Any

import pytest
import runner_batches
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import Implementation
from specdec_ops.ops import update_request_state
from torch import Tensor

NAME = "update_request_state_"
STATE = (
    "num_computed_tokens",
    "last_token_ids",
    "total_lens",
    "all_token_ids",
    "output_counts",
    "draft_token_ids",
)


def one_request(**changes: Any) -> dict[str, Any]:
    """State row 1 with four tokens; a query of four tokens emits 6, 7 and rejects two drafts."""
    arguments = {
        "request_indices": torch.tensor([1]),
        "sampled_token_ids": torch.tensor([[6, 7, -1, -1]]),
        "num_emitted": torch.tensor([2]),
        "num_rejected": torch.tensor([2]),
        "query_start_loc": torch.tensor([0, 4]),
        "num_computed_tokens": torch.tensor([30, 3, 50]),
        "last_token_ids": torch.tensor([90, 91, 92]),
        "total_lens": torch.tensor([5, 4, 5]),
        "all_token_ids": torch.zeros(3, 8, dtype=torch.int32),
        "output_counts": torch.zeros(3, 9, dtype=torch.int32),
    }
    return {**arguments, **changes}


def updated(implementation: Implementation, arguments: dict[str, Any]) -> dict[str, Any]:
    """The state afterwards; of tokens and counts the rows that changed."""
    before = {name: arguments[name].clone() for name in STATE if arguments.get(name) is not None}
    assert implementation.update_request_state_(**arguments) is None
    out: dict[str, Any] = {}
    for name, old in before.items():
        new: Tensor = arguments[name]
        changed = (new != old).nonzero().tolist()
        out[name] = {tuple(place): int(new[tuple(place)]) for place in changed}
    return out


def test_emitted_tokens_are_appended(implementation: Implementation) -> None:
    assert updated(implementation, one_request()) == {
        "num_computed_tokens": {(1,): 5},
        "last_token_ids": {(1,): 7},
        "total_lens": {(1,): 6},
        "all_token_ids": {(1, 4): 6, (1, 5): 7},
        "output_counts": {(1, 6): 1, (1, 7): 1},
    }


def test_a_token_counts_as_often_as_it_is_emitted(implementation: Implementation) -> None:
    """I11: rejected drafts do not count."""
    arguments = one_request(sampled_token_ids=torch.tensor([[6, 6, 6, 6]]), num_emitted=torch.tensor([3]))
    arguments["output_counts"][1, 6] = 5
    assert updated(implementation, arguments)["output_counts"] == {(1, 6): 8}


def test_nothing_emitted(implementation: Implementation) -> None:
    """A chunk of a prompt: its tokens are computed, that is all. D17: the same for a stale row."""
    for emitted in (0, -3):
        arguments = one_request(num_emitted=torch.tensor([emitted]), num_rejected=torch.tensor([0]))
        out = updated(implementation, arguments)
        assert out.pop("num_computed_tokens") == {(1,): 7}
        assert not any(out.values())


@pytest.mark.parametrize("index", [-1, -5, 3, 2**31 - 1])
def test_padding_changes_nothing(implementation: Implementation, index: int) -> None:
    arguments = one_request(
        request_indices=torch.tensor([index]),
        new_draft_token_ids=torch.tensor([[1, 2]]),
        draft_token_ids=torch.zeros(3, 2, dtype=torch.int64),
    )
    assert not any(updated(implementation, arguments).values())


def test_without_queries_only_rejected_drafts_are_taken_off(implementation: Implementation) -> None:
    """D15."""
    out = updated(implementation, one_request(query_start_loc=None))
    assert out["num_computed_tokens"] == {(1,): 1}


def test_without_counts(implementation: Implementation) -> None:
    out = updated(implementation, one_request(output_counts=None))
    assert out["all_token_ids"] == {(1, 4): 6, (1, 5): 7}


def test_ids_outside_of_the_vocabulary_are_stored_but_not_counted(implementation: Implementation) -> None:
    """D5: neither another row's count nor another tensor is touched."""
    ids = [-1, 9, 2**31 - 1, -(2**31)]
    arguments = one_request(sampled_token_ids=torch.tensor([ids]), num_emitted=torch.tensor([4]))
    out = updated(implementation, arguments)
    assert out["all_token_ids"] == {(1, 4 + i): token for i, token in enumerate(ids)}
    assert out["last_token_ids"] == {(1,): ids[-1]}
    assert out["output_counts"] == {}


@pytest.mark.parametrize("total_len", [7, 8, 100, -1])
def test_tokens_past_the_longest_sequence_are_dropped(implementation: Implementation, total_len: int) -> None:
    """D11: neither the next row nor the one before is written."""
    out = updated(implementation, one_request(total_lens=torch.tensor([5, total_len, 5])))
    assert out["all_token_ids"] == {7: {(1, 7): 6}, -1: {(1, 0): 7}}.get(total_len, {})
    assert out["total_lens"] == {(1,): total_len + 2}
    assert out["last_token_ids"] == {(1,): 7}


def test_no_more_tokens_are_emitted_than_there_are(implementation: Implementation) -> None:
    arguments = one_request(
        request_indices=torch.tensor([1, -1]),
        sampled_token_ids=torch.tensor([[6, 7], [8, 8]]),
        num_emitted=torch.tensor([3, 0]),
        num_rejected=torch.tensor([0, 0]),
        query_start_loc=torch.tensor([0, 4, 4]),
    )
    out = updated(implementation, arguments)
    assert out["all_token_ids"] == {(1, 4): 6, (1, 5): 7}
    assert out["total_lens"] == {(1,): 6}
    assert out["last_token_ids"] == {(1,): 7}


def test_new_drafts_go_to_the_rows_of_their_requests(implementation: Implementation) -> None:
    arguments = one_request(
        request_indices=torch.tensor([2, -1, 0]),
        sampled_token_ids=torch.zeros(3, 1, dtype=torch.int64),
        num_emitted=torch.tensor([0, 0, 0]),
        num_rejected=torch.tensor([0, 0, 0]),
        query_start_loc=None,
        new_draft_token_ids=torch.tensor([[1, 2], [3, 4], [5, -1]]),
        draft_token_ids=torch.zeros(3, 2, dtype=torch.int32),
    )
    out = updated(implementation, arguments)
    assert out.pop("draft_token_ids") == {(2, 0): 1, (2, 1): 2, (0, 0): 5, (0, 1): -1}
    assert not any(out.values())


def test_without_new_drafts_the_old_ones_stay(implementation: Implementation) -> None:
    arguments = one_request(draft_token_ids=torch.tensor([[1, 2], [3, 4], [5, 6]]))
    assert updated(implementation, arguments)["draft_token_ids"] == {}


def test_a_row_that_occurs_twice_is_updated_twice(cpu_implementation: Implementation) -> None:
    arguments = one_request(
        request_indices=torch.tensor([1, 1]),
        sampled_token_ids=torch.tensor([[6, 7], [8, -1]]),
        num_emitted=torch.tensor([2, 1]),
        num_rejected=torch.tensor([0, 1]),
        query_start_loc=torch.tensor([0, 2, 4]),
        last_token_ids=torch.tensor([[90], [91], [92]]),
    )
    assert updated(cpu_implementation, arguments) == {
        "num_computed_tokens": {(1,): 6},
        "last_token_ids": {(1, 0): 8},
        "total_lens": {(1,): 7},
        "all_token_ids": {(1, 4): 6, (1, 5): 7, (1, 6): 8},
        "output_counts": {(1, 6): 1, (1, 7): 1, (1, 8): 1},
    }


def test_empty_batch(implementation: Implementation) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    arguments = one_request(
        request_indices=none,
        sampled_token_ids=none.reshape(0, 4),
        num_emitted=none,
        num_rejected=none,
        query_start_loc=torch.tensor([0]),
    )
    assert not any(updated(implementation, arguments).values())


def random_arguments(rng: random.Random) -> dict[str, Any]:
    batch = runner_batches.Batch(rng)
    rows, k = batch.max_requests, batch.max_num_drafts
    last_token_ids = batch.random_ints(0, 99, rows)
    has_new_drafts = rng.random() < 0.5
    return {
        "request_indices": batch.ints(batch.request_indices),
        "sampled_token_ids": batch.random_ints(-2, 8, batch.size, k + 1),
        "num_emitted": batch.random_ints(-1, k + 2, batch.size),
        "num_rejected": batch.random_ints(0, k, batch.size),
        "query_start_loc": rng.choice([None, batch.totals(batch.query_lens)]),
        "num_computed_tokens": batch.random_ints(0, 9, rows),
        "last_token_ids": rng.choice([last_token_ids, last_token_ids[:, None]]),
        "total_lens": batch.random_ints(0, 9, rows),
        "all_token_ids": batch.random_ints(0, 99, rows, 7),
        "output_counts": rng.choice([None, batch.random_ints(0, 3, rows, 6)]),
        "new_draft_token_ids": batch.random_ints(-1, 99, batch.size, k) if has_new_drafts else None,
        "draft_token_ids": batch.random_ints(0, 99, rows, k)
        if has_new_drafts or rng.random() < 0.5
        else None,
    }


@given(rng=st.randoms(use_true_random=False))
def test_matches_reference(native: Implementation, rng: random.Random) -> None:
    runner_batches.check_against_reference(native, NAME, random_arguments(rng), STATE, rng)


TOTALS_ERROR = "query_start_loc must start at 0 or above and never decrease, got 4 after 5 at index 1"
DRAFTS = {
    "new_draft_token_ids": torch.zeros(1, 2, dtype=torch.int64),
    "draft_token_ids": torch.zeros(3, 2, dtype=torch.int64),
}
ERRORS = [
    ({"request_indices": torch.zeros(1)}, "request_indices must be int32 or int64, got float32"),
    (
        {"sampled_token_ids": torch.tensor([[1], [2]])},
        "sampled_token_ids must be [batch, k + 1] with 1 row, got shape [2, 1]",
    ),
    ({"sampled_token_ids": torch.tensor([1])}, "sampled_token_ids must be [batch, k + 1], got shape [1]"),
    ({"num_emitted": torch.tensor([1, 1])}, "num_emitted must be [batch] with 1 element, got shape [2]"),
    ({"num_rejected": torch.tensor([1, 1])}, "num_rejected must be [batch] with 1 element, got shape [2]"),
    (
        {"query_start_loc": torch.tensor([0])},
        "query_start_loc must be [batch + 1] with at least 2 elements, got shape [1]",
    ),
    ({"num_computed_tokens": torch.zeros(3)}, "num_computed_tokens must be int32 or int64, got float32"),
    (
        {"last_token_ids": torch.tensor([0])},
        "last_token_ids must be [max_requests] or [max_requests, 1] with 3 rows, got shape [1]",
    ),
    ({"total_lens": torch.tensor([5])}, "total_lens must be [max_requests] with 3 elements, got shape [1]"),
    (
        {"all_token_ids": torch.zeros(2, 8, dtype=torch.int64)},
        "all_token_ids must be [max_requests, max_model_len] with 3 rows, got shape [2, 8]",
    ),
    (
        {"output_counts": torch.zeros(2, 8, dtype=torch.int64)},
        "output_counts must be [max_requests, vocab_size] with 3 rows, got shape [2, 8]",
    ),
    (
        {**DRAFTS, "draft_token_ids": None},
        "draft_token_ids must be given with new_draft_token_ids, got none",
    ),
    (
        {**DRAFTS, "new_draft_token_ids": torch.zeros(2, 2, dtype=torch.int64)},
        "new_draft_token_ids must be [batch, k] with 1 row, got shape [2, 2]",
    ),
    (
        {**DRAFTS, "draft_token_ids": torch.zeros(2, 2, dtype=torch.int64)},
        "draft_token_ids must be [max_requests, k] with 3 rows, got shape [2, 2]",
    ),
    (
        {**DRAFTS, "draft_token_ids": torch.zeros(3, 3, dtype=torch.int64)},
        "new_draft_token_ids must have the 3 columns of draft_token_ids, got shape [1, 2]",
    ),
]


def test_bad_totals(cpu_implementation: Implementation) -> None:
    arguments = one_request(query_start_loc=torch.tensor([5, 4]))
    runner_batches.assert_raises(cpu_implementation, NAME, arguments, STATE, TOTALS_ERROR)


@pytest.mark.parametrize(("changes", "message"), ERRORS)
def test_bad_arguments(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    runner_batches.assert_raises(default_native, NAME, one_request(**changes), STATE, message)


@pytest.mark.parametrize("options", [{}, {**DRAFTS, "output_counts": None, "query_start_loc": None}])
def test_opcheck(options: dict[str, Any]) -> None:
    runner_batches.check_op(update_request_state._op, one_request(**options))

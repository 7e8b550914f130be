"""combine_sampled_and_draft_tokens_: input ids and logits rows of a verification step."""

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
from specdec_ops.ops import combine_sampled_and_draft_tokens

NAME = "combine_sampled_and_draft_tokens_"
WRITTEN = ("input_ids", "logits_indices")


def one_request(**changes: Any) -> dict[str, Any]:
    """State row 1: last token 11, drafts 20 to 22; a query of five tokens, four of them with logits."""
    arguments = {
        "request_indices": torch.tensor([1]),
        "query_start_loc": torch.tensor([0, 5]),
        "seq_lens": torch.tensor([9]),
        "cu_num_logits": torch.tensor([0, 4]),
        "last_token_ids": torch.tensor([10, 11]),
        "draft_token_ids": torch.tensor([[90, 91, 92], [20, 21, 22]]),
        "prefill_lens": torch.tensor([5, 5]),
        "input_ids": torch.full((6,), POISON),
        "logits_indices": torch.full((4,), POISON),
    }
    return {**arguments, **changes}


def combined(implementation: Implementation, arguments: dict[str, Any]) -> tuple[list[int], list[int]]:
    assert implementation.combine_sampled_and_draft_tokens_(**arguments) is None
    return arguments["input_ids"].tolist(), arguments["logits_indices"].tolist()


def test_a_query_ends_with_the_last_token_and_the_drafts(implementation: Implementation) -> None:
    assert combined(implementation, one_request()) == (
        [POISON, 11, 20, 21, 22, POISON],
        [1, 2, 3, 4],
    )


def test_tokens_of_the_prompt_stay(implementation: Implementation) -> None:
    """D14: nothing is written up to the end of the prompt."""
    ids, indices = combined(implementation, one_request(prefill_lens=torch.tensor([0, 9])))
    assert (ids, indices) == ([POISON] * 6, [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("prefill_len", "expected"), [(5, 11), (6, POISON), (8, POISON)], ids=["after", "within", "last"]
)
def test_logits_rows_that_begin_in_the_prompt_keep_its_token(
    implementation: Implementation, prefill_len: int, expected: int
) -> None:
    ids, _ = combined(implementation, one_request(prefill_lens=torch.tensor([0, prefill_len])))
    assert ids == [POISON, expected, 20, 21, 22, POISON]


def test_without_a_new_token_every_logits_row_is_of_a_draft(implementation: Implementation) -> None:
    arguments = one_request(cu_num_logits=torch.tensor([0, 3]), num_new_tokens=0)
    assert combined(implementation, arguments) == (
        [POISON, POISON, 20, 21, 22, POISON],
        [2, 3, 4, 0],
    )


def test_logits_rows_past_the_state_s_drafts_keep_their_tokens(implementation: Implementation) -> None:
    """The next state row's drafts are not read."""
    arguments = one_request(
        request_indices=torch.tensor([0]), draft_token_ids=torch.tensor([[90, 91], [20, 21]])
    )
    assert combined(implementation, arguments)[0] == [POISON, 10, 90, 91, POISON, POISON]


def test_fewer_logits_rows_than_drafts_take_the_first_drafts(implementation: Implementation) -> None:
    """D24: the length decides, not what the state holds."""
    arguments = one_request(cu_num_logits=torch.tensor([0, 2]))
    assert combined(implementation, arguments) == (
        [POISON, POISON, POISON, 11, 20, POISON],
        [3, 4, 0, 0],
    )


def test_a_request_without_logits_rows_gets_nothing(implementation: Implementation) -> None:
    """The token after its query belongs to the next one."""
    arguments = one_request(cu_num_logits=torch.tensor([0, 0]))
    assert combined(implementation, arguments) == ([POISON] * 6, [0] * 4)


@pytest.mark.parametrize("index", [-1, -5, 2, 2**31 - 1])
def test_padding_keeps_its_tokens(implementation: Implementation, index: int) -> None:
    """F9: nothing of the state is read; where the logits are needed does not depend on it."""
    arguments = one_request(
        request_indices=torch.tensor([index, 1]),
        query_start_loc=torch.tensor([0, 2, 4]),
        seq_lens=torch.tensor([9, 9]),
        cu_num_logits=torch.tensor([0, 2, 4]),
    )
    assert combined(implementation, arguments) == (
        [POISON, POISON, 11, 20, POISON, POISON],
        [0, 1, 2, 3],
    )


def test_prefills_and_decodes_in_any_order(implementation: Implementation) -> None:
    """D22: a chunk of a prompt, a decode with drafts, one without."""
    arguments = one_request(
        request_indices=torch.tensor([2, 0, 1]),
        query_start_loc=torch.tensor([0, 4, 7, 8, 8, 8], dtype=torch.int32),
        seq_lens=torch.tensor([4, 12, 6, 0, 0], dtype=torch.int32),
        cu_num_logits=torch.tensor([0, 1, 4, 5]),
        last_token_ids=torch.tensor([[10], [11], [12]]),
        draft_token_ids=torch.tensor([[20, 21], [30, 31], [40, 41]]),
        prefill_lens=torch.tensor([5, 5, 5]),
        input_ids=torch.full((8,), POISON, dtype=torch.int32),
        logits_indices=torch.full((5,), POISON),
    )
    assert combined(implementation, arguments) == ([POISON] * 4 + [10, 20, 21, 11], [3, 4, 5, 6, 7])


def test_negative_ids_are_copied(implementation: Implementation) -> None:
    """D4: what a placeholder means is for the caller to say."""
    arguments = one_request(draft_token_ids=torch.tensor([[0, 0, 0], [20, -1, -1]]))
    assert combined(implementation, arguments)[0] == [POISON, 11, 20, -1, -1, POISON]


def test_queries_of_thousands_of_tokens(implementation: Implementation) -> None:
    """B14, B10."""
    arguments = one_request(
        query_start_loc=torch.tensor([0, 2560]),
        seq_lens=torch.tensor([2600]),
        cu_num_logits=torch.tensor([0, 1501]),
        draft_token_ids=torch.arange(3000).reshape(2, 1500),
        input_ids=torch.full((2560,), POISON),
        logits_indices=torch.full((1501,), POISON),
    )
    ids, indices = combined(implementation, arguments)
    assert ids == [POISON] * 1059 + [11, *range(1500, 3000)]
    assert indices == list(range(1059, 2560))


def test_empty_batch(implementation: Implementation) -> None:
    arguments = one_request(
        request_indices=torch.zeros(0, dtype=torch.int64),
        query_start_loc=torch.tensor([0]),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        cu_num_logits=torch.tensor([0]),
    )
    assert combined(implementation, arguments) == ([POISON] * 6, [0] * 4)


def random_arguments(rng: random.Random) -> dict[str, Any]:
    batch = runner_batches.Batch(rng)
    rows = batch.max_requests
    last_token_ids = batch.random_ints(-1, 99, rows)
    return {
        "request_indices": batch.ints(batch.request_indices),
        "query_start_loc": batch.totals(batch.query_lens),
        "seq_lens": batch.random_ints(0, 12, batch.size + rng.choice([0, 2])),
        "cu_num_logits": batch.totals(batch.num_logits),
        "last_token_ids": rng.choice([last_token_ids, last_token_ids[:, None]]),
        "draft_token_ids": batch.random_ints(-1, 99, rows, batch.max_num_drafts),
        "prefill_lens": batch.random_ints(0, 10, rows),
        "input_ids": batch.poisoned(sum(batch.query_lens)),
        "logits_indices": batch.poisoned(sum(batch.num_logits)),
        "num_new_tokens": rng.randint(0, 1),
    }


@given(rng=st.randoms(use_true_random=False))
def test_matches_reference(native: Implementation, rng: random.Random) -> None:
    runner_batches.check_against_reference(native, NAME, random_arguments(rng), WRITTEN, rng)


TOTALS_ERRORS = [
    (
        {"query_start_loc": torch.tensor([0, 7])},
        "query_start_loc must end within the 6 elements of input_ids, got 7",
    ),
    (
        {"query_start_loc": torch.tensor([5, 4])},
        "query_start_loc must start at 0 or above and never decrease, got 4 after 5 at index 1",
    ),
    (
        {"query_start_loc": torch.tensor([-1, 5])},
        "query_start_loc must start at 0 or above and never decrease, got -1 after 0 at index 0",
    ),
    (
        {"cu_num_logits": torch.tensor([0, 5])},
        "cu_num_logits must end within the 4 elements of logits_indices, got 5",
    ),
    (
        {"query_start_loc": torch.tensor([2, 5])},
        "query_start_loc must give request 0 a token for each of its 4 logits rows, got 3",
    ),
]
ERRORS = [
    ({"request_indices": torch.zeros(1)}, "request_indices must be int32 or int64, got float32"),
    ({"request_indices": torch.tensor(1)}, "request_indices must be [batch], got shape []"),
    (
        {"query_start_loc": torch.tensor([0])},
        "query_start_loc must be [batch + 1] with at least 2 elements, got shape [1]",
    ),
    (
        {"seq_lens": torch.tensor([], dtype=torch.int64)},
        "seq_lens must be [batch] with at least 1 element, got shape [0]",
    ),
    (
        {"cu_num_logits": torch.tensor([0])},
        "cu_num_logits must be [batch + 1] with at least 2 elements, got shape [1]",
    ),
    (
        {"last_token_ids": torch.tensor([0])},
        "last_token_ids must be [max_requests] or [max_requests, 1] with 2 rows, got shape [1]",
    ),
    (
        {"last_token_ids": torch.zeros(2, 2, dtype=torch.int64)},
        "last_token_ids must be [max_requests] or [max_requests, 1] with 2 rows, got shape [2, 2]",
    ),
    (
        {"draft_token_ids": torch.zeros(3, 3, dtype=torch.int64)},
        "draft_token_ids must be [max_requests, k] with 2 rows, got shape [3, 3]",
    ),
    (
        {"draft_token_ids": torch.zeros(2, dtype=torch.int64)},
        "draft_token_ids must be [max_requests, k], got shape [2]",
    ),
    (
        {"prefill_lens": torch.zeros(2, 1, dtype=torch.int64)},
        "prefill_lens must be [max_requests], got shape",
    ),
    ({"input_ids": torch.zeros(6)}, "input_ids must be int32 or int64, got float32"),
    ({"logits_indices": torch.zeros(1, 4, dtype=torch.int64)}, "logits_indices must be [num_logits], got"),
    ({"num_new_tokens": 2}, "num_new_tokens must be 0 or 1, got 2"),
]


@pytest.mark.parametrize(("changes", "message"), TOTALS_ERRORS)
def test_bad_totals(cpu_implementation: Implementation, changes: dict[str, Any], message: str) -> None:
    runner_batches.assert_raises(cpu_implementation, NAME, one_request(**changes), WRITTEN, message)


@pytest.mark.parametrize(("changes", "message"), ERRORS)
def test_bad_arguments(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    runner_batches.assert_raises(default_native, NAME, one_request(**changes), WRITTEN, message)


def test_opcheck() -> None:
    runner_batches.check_op(combine_sampled_and_draft_tokens._op, one_request(num_new_tokens=1))

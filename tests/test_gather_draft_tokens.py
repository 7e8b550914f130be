"""gather_draft_tokens: input tokens and positions of logits rows."""

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
from specdec_ops.ops import gather_draft_tokens

NAME = "gather_draft_tokens_"
WRITTEN = ("out_token_ids", "out_positions")


def arguments(**changes: Any) -> dict[str, Any]:
    """Two requests with three logits rows each, the first past its prefill of 5 tokens, the second not."""
    return {
        "input_ids": torch.tensor([50, 51, 52, 53, 54, 55, 56]),
        "positions": torch.tensor([4, 5, 6, 7, 7, 8, 9]),
        "logits_indices": torch.tensor([1, 2, 3, 4, 5, 6]),
        "expanded_request_indices": torch.tensor([1, 1, 1, 0, 0, 0]),
        "local_positions": torch.tensor([0, 1, 2, 0, 1, 2]),
        "prefill_lens": torch.tensor([8, 5]),
        "out_token_ids": torch.full((6,), POISON),
        "out_positions": torch.full((6,), POISON),
        **changes,
    }


def gathered(implementation: Implementation, **changes: Any) -> tuple[list[int], list[int]]:
    """By both forms."""
    given = arguments(**changes)
    assert implementation.gather_draft_tokens_(**given) is None
    token_ids, positions = given.pop("out_token_ids"), given.pop("out_positions")
    out = implementation.gather_draft_tokens(**given)
    assert (out.token_ids.dtype, out.positions.dtype) == (given["input_ids"].dtype, given["positions"].dtype)
    assert (out.token_ids.tolist(), out.positions.tolist()) == (token_ids.tolist(), positions.tolist())
    return token_ids.tolist(), positions.tolist()


def test_draft_rows_of_a_query_that_starts_in_the_prompt_have_no_drafts(
    implementation: Implementation,
) -> None:
    """D4: its first row holds a token of the prompt."""
    assert gathered(implementation) == ([51, 52, 53, 54, -1, -1], [5, 6, 7, 7, 8, 9])


@pytest.mark.parametrize(("prefill_len", "drafts"), [(5, [52, 53]), (6, [-1, -1])])
def test_the_first_row_decides_where_a_query_starts(
    implementation: Implementation, prefill_len: int, drafts: list[int]
) -> None:
    ids, _ = gathered(implementation, prefill_lens=torch.tensor([8, prefill_len]))
    assert ids[:3] == [51, *drafts]


@pytest.mark.parametrize("index", [-1, -5, 2, 2**31 - 1])
def test_padding_has_no_token(implementation: Implementation, index: int) -> None:
    """F9: the first row of a request too."""
    indices = torch.tensor([index, 1, 1, 0, 0, index])
    out = gathered(implementation, expanded_request_indices=indices)
    assert out == ([-1, 52, 53, 54, -1, -1], [0, 6, 7, 7, 8, 0])


@pytest.mark.parametrize("index", [-1, 7, 2**31 - 1, -(2**31)])
def test_an_index_of_no_token_gives_none(implementation: Implementation, index: int) -> None:
    out = gathered(implementation, logits_indices=torch.tensor([index, 2, 3, 4, 5, 6]))
    assert out == ([-1, 52, 53, 54, -1, -1], [0, 6, 7, 7, 8, 9])


def test_the_shorter_of_ids_and_positions_counts(implementation: Implementation) -> None:
    positions = torch.tensor([4, 5, 6])
    assert gathered(implementation, positions=positions) == ([51, 52, -1, -1, -1, -1], [5, 6, 0, 0, 0, 0])
    assert gathered(implementation, input_ids=torch.tensor([50, 51])) == ([51] + [-1] * 5, [5] + [0] * 5)


def test_ids_are_gathered_as_they_are(implementation: Implementation) -> None:
    """int32 ids with int64 positions, as runners have them."""
    ids = torch.tensor([50, -7, 2**31 - 1, 53, 54, 55, 56], dtype=torch.int32)
    assert gathered(implementation, input_ids=ids)[0] == [-7, 2**31 - 1, 53, 54, -1, -1]


@pytest.mark.parametrize("num_logits", [1023, 1024, 1025, 2560])
def test_thousands_of_rows(implementation: Implementation, num_logits: int) -> None:
    """B14: no row is left out."""
    rows = torch.arange(num_logits)
    token_ids, positions = gathered(
        implementation,
        input_ids=rows + 10,
        positions=rows * 2,
        logits_indices=rows.flip(0),
        expanded_request_indices=torch.zeros(1, dtype=torch.int64).expand(num_logits),
        local_positions=torch.zeros(1, dtype=torch.int64).expand(num_logits),
        out_token_ids=torch.full((num_logits,), POISON),
        out_positions=torch.full((num_logits,), POISON),
    )
    assert token_ids == (rows.flip(0) + 10).tolist()
    assert positions == (rows.flip(0) * 2).tolist()


def test_no_rows(implementation: Implementation) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    rows = {name: none for name in arguments() if name not in ("input_ids", "positions", "prefill_lens")}
    assert gathered(implementation, **rows) == ([], [])


def random_arguments(rng: random.Random) -> dict[str, Any]:
    batch = runner_batches.Batch(rng)
    num_tokens, num_logits = (rng.randint(0, batch.max_size + 2) for _ in range(2))
    return {
        "input_ids": batch.random_ints(-1, 99, num_tokens),
        "positions": batch.random_ints(0, 12, num_tokens + rng.choice([0, 2])),
        "logits_indices": batch.random_ints(-1, num_tokens, num_logits),
        "expanded_request_indices": batch.random_ints(-1, batch.max_requests, num_logits),
        "local_positions": batch.random_ints(0, 4, num_logits),
        "prefill_lens": batch.random_ints(0, 10, batch.max_requests),
        "out_token_ids": batch.ints([POISON] * num_logits),
        "out_positions": batch.ints([POISON] * num_logits),
    }


@given(rng=st.randoms(use_true_random=False))
def test_matches_reference(native: Implementation, rng: random.Random) -> None:
    runner_batches.check_against_reference(native, NAME, random_arguments(rng), WRITTEN, rng)


ERRORS = [
    ({"input_ids": torch.zeros(7)}, "input_ids must be int32 or int64, got float32"),
    ({"positions": torch.zeros(7, 1, dtype=torch.int64)}, "positions must be [num_tokens], got shape [7, 1]"),
    ({"logits_indices": torch.tensor(1)}, "logits_indices must be [num_logits], got shape []"),
    (
        {"expanded_request_indices": torch.tensor([1])},
        "expanded_request_indices must be [num_logits] with 6 elements, got shape [1]",
    ),
    (
        {"local_positions": torch.tensor([1])},
        "local_positions must be [num_logits] with 6 elements, got shape [1]",
    ),
    ({"prefill_lens": torch.zeros(2)}, "prefill_lens must be int32 or int64, got float32"),
    (
        {"out_token_ids": torch.tensor([1])},
        "out_token_ids must be [num_logits] with 6 elements, got shape [1]",
    ),
    (
        {"out_positions": torch.tensor([1])},
        "out_positions must be [num_logits] with 6 elements, got shape [1]",
    ),
]


@pytest.mark.parametrize(("changes", "message"), ERRORS)
def test_bad_arguments(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    runner_batches.assert_raises(default_native, NAME, arguments(**changes), WRITTEN, message)


def test_the_functional_form_checks_its_arguments_too(default_native: Implementation) -> None:
    given = arguments(logits_indices=torch.tensor(1))
    del given["out_token_ids"], given["out_positions"]
    with pytest.raises(RuntimeError, match="logits_indices must be"):
        default_native.gather_draft_tokens(**given)


def test_opcheck() -> None:
    runner_batches.check_op(gather_draft_tokens._op, arguments())

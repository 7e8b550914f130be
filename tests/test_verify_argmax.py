"""verify_argmax: the longest prefix of drafts that equal the target's argmax."""

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
from specdec_ops.ops import verify_argmax

NAME = "verify_argmax_"


def batch_of_four(**changes: Any) -> dict[str, Any]:
    """Requests of which none, one and all of three drafts match, and one without drafts."""
    arguments = {
        "target_argmax": torch.tensor([1, 2, 3, 1, 2, 3, 1, 2, 3]),
        "draft_token_ids": torch.tensor([9, 2, 3, 1, 9, 3, 1, 2, 3]),
        "cu_num_draft_tokens": torch.tensor([0, 3, 6, 9, 9]),
        "bonus_token_ids": torch.tensor([4, 5, 6, 7]),
    }
    return {**arguments, **changes}


EMITTED = [[1, -1, -1, -1], [1, 2, -1, -1], [1, 2, 3, 6], [7, -1, -1, -1]]


def verified(implementation: Implementation, arguments: dict[str, Any]) -> list[list[int]]:
    return implementation.verify_argmax(**arguments).tolist()


def test_emits_accepted_drafts_and_then_the_argmax_or_the_bonus_token(implementation: Implementation) -> None:
    assert verified(implementation, batch_of_four()) == EMITTED


def test_counts_with_and_without_the_leading_zero(implementation: Implementation) -> None:
    """B7: the batch tells the two forms apart, also where the first count is 0."""
    cu = torch.tensor([3, 6, 9, 9])
    assert verified(implementation, batch_of_four(cu_num_draft_tokens=cu)) == EMITTED
    one = {"target_argmax": torch.tensor([1]), "draft_token_ids": torch.tensor([1])}
    for cu in (torch.tensor([0, 1]), torch.tensor([0, 0, 1])):
        arguments = {**one, "cu_num_draft_tokens": cu, "bonus_token_ids": torch.tensor([5, 6])}
        assert verified(implementation, arguments) == [[5, -1], [1, 6]]


def test_a_column_of_bonus_tokens(implementation: Implementation) -> None:
    for bonus in (torch.tensor([[4], [5], [6], [7]]), torch.tensor([[4, 5, 6, 7]] * 2).t()[:, :1]):
        assert verified(implementation, batch_of_four(bonus_token_ids=bonus)) == EMITTED


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("cu_dtype", [torch.int32, torch.int64], ids=str)
def test_integer_dtypes(implementation: Implementation, id_dtype: torch.dtype, cu_dtype: torch.dtype) -> None:
    arguments = batch_of_four()
    arguments["draft_token_ids"] = arguments["draft_token_ids"].to(id_dtype)
    arguments["cu_num_draft_tokens"] = arguments["cu_num_draft_tokens"].to(cu_dtype)
    out = implementation.verify_argmax(**arguments)
    assert (out.tolist(), out.dtype) == (EMITTED, id_dtype)


def test_padded_drafts_are_rejected(implementation: Implementation) -> None:
    """A8: -1 equals no argmax."""
    drafts = torch.tensor([-1, 2, 3, 1, 2, -1, 1, -2, 3])
    emitted = verified(implementation, batch_of_four(draft_token_ids=drafts))
    assert emitted == [[1, -1, -1, -1], [1, 2, 3, -1], [1, 2, -1, -1], [7, -1, -1, -1]]


def test_ids_of_the_bonus_tokens_are_not_checked(implementation: Implementation) -> None:
    emitted = verified(implementation, batch_of_four(bonus_token_ids=torch.tensor([4, 5, -1, 2**31])))
    assert emitted[2:] == [[1, 2, 3, -1], [2**31, -1, -1, -1]]


def test_writes_only_what_is_emitted(implementation: Implementation) -> None:
    token_ids = torch.full((5, 6), POISON)
    assert implementation.verify_argmax_(**batch_of_four(), token_ids=token_ids) is None
    expected = [[POISON if id == -1 else id for id in row] + [POISON] * 2 for row in EMITTED]
    assert token_ids.tolist() == [*expected, [POISON] * 6]


def test_requests_that_are_not_greedy_are_left_out(implementation: Implementation) -> None:
    is_greedy = torch.tensor([False, True, False, True])
    emitted = verified(implementation, batch_of_four(is_greedy=is_greedy))
    assert emitted == [[-1] * 4, EMITTED[1], [-1] * 4, EMITTED[3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_synthetic_acceptance_compares_uniforms_with_the_rate_of_the_place(
    implementation: Implementation, dtype: torch.dtype
) -> None:
    """A uniform that equals the rate rejects; a rejected draft gives way to the argmax."""
    uniforms = torch.tensor([0.2, 0.7, 0.1, 0.75, 0.0, 0.0, 0.0, 0.0, 0.2])
    arguments = batch_of_four(
        accept_rates=torch.tensor([0.75, 0.5, 0.25], dtype=dtype), accept_uniforms=uniforms.to(dtype)
    )
    expected = [[9, 2, -1, -1], [1, -1, -1, -1], [1, 2, 3, 6], [7, -1, -1, -1]]
    assert verified(implementation, arguments) == expected


def test_synthetic_acceptance_rejects_padded_drafts(implementation: Implementation) -> None:
    arguments = batch_of_four(
        draft_token_ids=torch.tensor([-1, 5, 5, 5, -1, 5, 5, 5, -2]),
        accept_rates=torch.ones(3),
        accept_uniforms=torch.zeros(9),
    )
    expected = [[1, -1, -1, -1], [5, 2, -1, -1], [5, 5, 3, -1], [7, -1, -1, -1]]
    assert verified(implementation, arguments) == expected


def test_uniforms_without_rates_are_not_used(implementation: Implementation) -> None:
    assert verified(implementation, batch_of_four(accept_uniforms=torch.zeros(9))) == EMITTED


@pytest.mark.parametrize("cu", [[], [0]], ids=str)
def test_empty_batch(implementation: Implementation, cu: list[int]) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    cu_num_draft_tokens = torch.tensor(cu, dtype=torch.int64)
    out = implementation.verify_argmax(none, none, cu_num_draft_tokens, none, max_num_draft_tokens=2)
    assert out.shape == (0, 3)


def test_requests_without_drafts_emit_their_bonus_token(implementation: Implementation) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    out = implementation.verify_argmax(none, none, torch.tensor([0, 0]), torch.tensor([3, 4]))
    assert out.tolist() == [[3], [4]]


def random_arguments(rng: random.Random) -> dict[str, Any]:
    batch = Batch(rng)
    arguments = {
        "target_argmax": batch.ints(0, 2, batch.longer(batch.num_drafts)),
        "draft_token_ids": batch.ints(-1, 2, batch.num_drafts),
        "cu_num_draft_tokens": batch.cu_num_draft_tokens(),
        "bonus_token_ids": batch.ints(-1, 5, batch.size, *([1] if rng.random() < 0.5 else [])),
        "is_greedy": batch.maybe(batch.bools(batch.longer(batch.size))),
        "accept_rates": batch.maybe(batch.reals(batch.longer(batch.k))),
        "accept_uniforms": batch.reals(batch.longer(batch.num_drafts)),
        "token_ids": batch.ints(POISON, POISON, batch.longer(batch.size), batch.k + 1),
    }
    return arguments


@given(seed=st.integers(0, 2**32 - 1))
def test_matches_reference(native: Implementation, seed: int) -> None:
    rng = random.Random(seed)
    check_against_reference(native, NAME, random_arguments(rng), ["token_ids"], rng)


def test_inputs_expanded_from_one_value(implementation: Implementation) -> None:
    arguments = {
        "target_argmax": torch.tensor([2]).expand(4),
        "draft_token_ids": torch.tensor([2]).expand(4),
        "cu_num_draft_tokens": torch.tensor([2, 4]),
        "bonus_token_ids": torch.tensor([[5]]).expand(2, 1),
        "is_greedy": torch.tensor([True]).expand(2),
    }
    assert verified(implementation, arguments) == [[2, 2, 5]] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_token_ids": torch.zeros(9)}, "draft_token_ids must be int32 or int64, got float32"),
        (
            {"draft_token_ids": torch.zeros(9, 1).int()},
            "draft_token_ids must be [num_drafts], got shape [9, 1]",
        ),
        ({"target_argmax": torch.zeros(9)}, "target_argmax must be int32 or int64, got float32"),
        (
            {"target_argmax": torch.zeros(8).int()},
            "target_argmax must be [num_drafts] with at least 9 elements, got shape [8]",
        ),
        ({"bonus_token_ids": torch.zeros(4)}, "bonus_token_ids must be int32 or int64, got float32"),
        (
            {"bonus_token_ids": torch.zeros(4, 2).int()},
            "bonus_token_ids must be [batch] or [batch, 1], got shape [4, 2]",
        ),
        ({"cu_num_draft_tokens": torch.zeros(5)}, "cu_num_draft_tokens must be int32 or int64, got float32"),
        (
            {"cu_num_draft_tokens": torch.zeros(6).int()},
            "cu_num_draft_tokens must be [batch + 1] or [batch] with 4 requests, got shape [6]",
        ),
        (
            {"cu_num_draft_tokens": torch.tensor([1, 3, 6, 9, 9])},
            "cu_num_draft_tokens must start with 0, got 1",
        ),
        (
            {"cu_num_draft_tokens": torch.tensor([3, 6, 5, 9])},
            "cu_num_draft_tokens must not decrease, got 6 before 5 at index 2",
        ),
        (
            {"cu_num_draft_tokens": torch.tensor([-1, 6, 6, 9])},
            "cu_num_draft_tokens must not decrease, got 0 before -1 at index 0",
        ),
        (
            {"cu_num_draft_tokens": torch.tensor([0, 3, 6, 9, 10])},
            "cu_num_draft_tokens must end with at most num_drafts = 9, got 10",
        ),
        ({"token_ids": torch.zeros(4, 4)}, "token_ids must be int32 or int64, got float32"),
        (
            {"token_ids": torch.zeros(3, 4).int()},
            "token_ids must be [batch, k + 1] with at least 4 rows, got shape [3, 4]",
        ),
        (
            {"token_ids": torch.zeros(4, 3).int()},
            "token_ids must have a column for each draft of a request and one more, got shape [4, 3] for a "
            "request with 3 drafts",
        ),
        ({"is_greedy": torch.zeros(4).int()}, "is_greedy must be bool, got int32"),
        (
            {"is_greedy": torch.zeros(3).bool()},
            "is_greedy must be [batch] with at least 4 elements, got shape [3]",
        ),
        (
            {"accept_rates": torch.zeros(3), "accept_uniforms": None},
            "accept_uniforms must be given with accept_rates, got accept_rates alone",
        ),
        (
            {"accept_rates": torch.zeros(3).half()},
            "accept_rates must be float32 or float64, got float16",
        ),
        (
            {"accept_rates": torch.zeros(2)},
            "accept_rates must be [k] with a rate for each draft of a request, got shape [2] for a request "
            "with 3 drafts",
        ),
        (
            {"accept_rates": torch.zeros(3), "accept_uniforms": torch.zeros(9).int()},
            "accept_uniforms must be float32 or float64, got int32",
        ),
        (
            {"accept_rates": torch.zeros(3), "accept_uniforms": torch.zeros(8)},
            "accept_uniforms must be [num_drafts] with at least 9 elements, got shape [8]",
        ),
    ],
    ids=lambda value: value[:44] if isinstance(value, str) else "",
)
def test_errors(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    arguments = batch_of_four(token_ids=torch.full((4, 4), POISON), accept_uniforms=torch.zeros(9))
    assert_raises(default_native, NAME, {**arguments, **changes}, ["token_ids"], message)


def test_a_width_below_the_largest_count_is_an_error(default_native: Implementation) -> None:
    with pytest.raises(RuntimeError, match="token_ids must have a column for each draft"):
        default_native.verify_argmax(**batch_of_four(), max_num_draft_tokens=2)


def test_op_is_well_formed() -> None:
    rng = random.Random(3)
    check_op(verify_argmax._op, random_arguments(rng))

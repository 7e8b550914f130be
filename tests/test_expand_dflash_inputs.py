"""expand_dflash_inputs: context and queries of a DFlash draft model."""

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
from specdec_ops.ops import expand_dflash_inputs as module

NAME = "expand_dflash_inputs_"
WRITTEN = (
    "input_ids",
    "context_positions",
    "query_positions",
    "context_slot_mapping",
    "query_slot_mapping",
    "token_indices",
)
MASK = 99


def batch(**changes: Any) -> dict[str, Any]:
    """Three tokens of which two were kept, then two of which both were; blocks of four tokens."""
    arguments = {
        "next_token_ids": torch.tensor([40, 50]),
        "target_positions": torch.tensor([5, 6, 7, 0, 1]),
        "block_table": torch.tensor([[7, 2, 9], [4, 1, 0]]),
        "query_start_loc": torch.tensor([0, 3, 5]),
        "num_rejected_tokens": torch.tensor([1, 0]),
        "parallel_drafting_token_id": MASK,
        "block_size": 4,
        "num_queries_per_request": 3,
        "num_speculative_tokens": 2,
    }
    return {**arguments, **changes}


def expanded(implementation: Implementation, **changes: Any) -> dict[str, list[int]]:
    out = implementation.expand_dflash_inputs(**batch(**changes))
    return {name: value.tolist() for name, value in out._asdict().items()}


def in_place(**changes: Any) -> dict[str, Any]:
    """The batch with buffers of eight elements."""
    return {**batch(), **{name: torch.full((8,), POISON) for name in WRITTEN}, **changes}


def test_layout(implementation: Implementation) -> None:
    """D15, D20: queries follow the last kept token, over the boundary of a block."""
    assert expanded(implementation) == {
        "input_ids": [40, MASK, MASK, 50, MASK, MASK],
        "context_positions": [5, 6, 7, 0, 1],
        "query_positions": [7, 8, 9, 2, 3, 4],
        "context_slot_mapping": [9, 10, 11, 16, 17],
        "query_slot_mapping": [11, 36, 37, 18, 19, 4],
        "token_indices": [1, 2, 4, 5],
    }


def test_nothing_rejected(implementation: Implementation) -> None:
    got = expanded(implementation, num_rejected_tokens=None)
    assert got["query_positions"] == [8, 9, 10, 2, 3, 4]
    assert got == expanded(implementation, num_rejected_tokens=torch.tensor([0, 0], dtype=torch.int32))


@pytest.mark.parametrize(("rejected", "first_query"), [(2, 6), (3, 6), (100, 6), (2**63 - 1, 6), (-1, 8)])
def test_at_least_one_token_is_kept(implementation: Implementation, rejected: int, first_query: int) -> None:
    """D23: the token before a request's first is never read, nor one after its last."""
    got = expanded(implementation, num_rejected_tokens=torch.tensor([rejected, 0]))
    assert got["query_positions"][:3] == [first_query, first_query + 1, first_query + 2]
    guarded = expanded(implementation, num_rejected_tokens=torch.tensor([0, rejected]))
    assert guarded["query_positions"][3] == (2 if rejected < 0 else 1)


def test_positions_past_the_last_column_have_no_slot(implementation: Implementation) -> None:
    """D10: for context and for queries."""
    got = expanded(implementation, block_table=torch.tensor([[7, 2, 9], [4, 1, 0]])[:, :1])
    assert got["context_slot_mapping"] == [-1, -1, -1, 16, 17]
    assert got["query_slot_mapping"] == [-1, -1, -1, 18, 19, -1]
    assert got["query_positions"] == [7, 8, 9, 2, 3, 4]


@pytest.mark.parametrize("pad", [-1, 0, 5])
def test_queries_past_the_model_have_no_slot(implementation: Implementation, pad: int) -> None:
    """D9, D12: their position stays one that the model has."""
    got = expanded(implementation, max_model_len=9, pad_slot_id=pad)
    assert got["query_positions"] == [7, 8, 8, 2, 3, 4]
    assert got["query_slot_mapping"] == [11, 36, pad, 18, 19, 4]


@pytest.mark.parametrize("placeholder", [-1, -2, -(2**63)])
def test_placeholders_become_masks(implementation: Implementation, placeholder: int) -> None:
    """D4: no id reaches an embedding that has no row there."""
    got = expanded(implementation, next_token_ids=torch.tensor([placeholder, 50]))
    assert got["input_ids"] == [MASK, MASK, MASK, 50, MASK, MASK]


def test_a_request_without_tokens_has_no_slots(implementation: Implementation) -> None:
    """The position before its first token is another request's, or lies before the tensor."""
    for starts in ([0, 0, 5], [0, 5, 5]):
        empty = 0 if starts[1] == 0 else 1
        got = expanded(implementation, query_start_loc=torch.tensor(starts), num_rejected_tokens=None)
        queries = slice(3 * empty, 3 * empty + 3)
        assert got["query_positions"][queries] == [0, 0, 0]
        assert got["query_slot_mapping"][queries] == [-1, -1, -1]
        assert got["input_ids"] == [40, MASK, MASK, 50, MASK, MASK]
        assert got["token_indices"] == [1, 2, 4, 5]


def test_negative_positions_have_no_slot(implementation: Implementation) -> None:
    got = expanded(implementation, target_positions=torch.tensor([-1, -1, 7, -4, -5]))
    assert got["context_positions"] == [0, 0, 7, 0, 0]
    assert got["context_slot_mapping"] == [-1, -1, 11, -1, -1]
    assert got["query_positions"] == [0] * 6
    assert got["query_slot_mapping"] == [-1] * 6


def test_context_of_no_request_has_no_slot(implementation: Implementation) -> None:
    got = expanded(implementation, query_start_loc=torch.tensor([1, 2, 3]), num_rejected_tokens=None)
    assert got["context_positions"] == [0, 6, 7, 0, 0]
    assert got["context_slot_mapping"] == [-1, 10, 7, -1, -1]


@pytest.mark.parametrize(
    ("num_speculative_tokens", "expected"), [(1, [1, 4]), (3, [1, 2, -1, 4, 5, -1])], ids=["fewer", "more"]
)
def test_masks_and_indices_need_not_match(
    implementation: Implementation, num_speculative_tokens: int, expected: list[int]
) -> None:
    """Indices of a request never run into the next one's."""
    got = expanded(implementation, num_speculative_tokens=num_speculative_tokens)
    assert got["token_indices"] == expected
    arguments = in_place(num_speculative_tokens=num_speculative_tokens)
    implementation.expand_dflash_inputs_(**arguments)
    kept = [POISON if index == -1 else index for index in expected]
    assert arguments["token_indices"].tolist() == kept + [POISON] * (8 - len(kept))


def test_buffers_keep_what_no_request_takes(implementation: Implementation) -> None:
    arguments = in_place(num_speculative_tokens=3)
    assert implementation.expand_dflash_inputs_(**arguments) is None
    assert arguments["input_ids"].tolist() == [40, MASK, MASK, 50, MASK, MASK, POISON, POISON]
    assert arguments["context_positions"].tolist() == [5, 6, 7, 0, 1, POISON, POISON, POISON]
    assert arguments["query_positions"].tolist() == [7, 8, 9, 2, 3, 4, POISON, POISON]
    assert arguments["context_slot_mapping"].tolist() == [9, 10, 11, 16, 17, POISON, POISON, POISON]
    assert arguments["query_slot_mapping"].tolist() == [11, 36, 37, 18, 19, 4, POISON, POISON]
    assert arguments["token_indices"].tolist() == [1, 2, POISON, 4, 5, POISON, POISON, POISON]


def test_what_int32_outputs_cannot_hold(implementation: Implementation) -> None:
    """B6: no id, position or slot is what is left of a larger one in 32 bits."""
    arguments = in_place(
        **{name: torch.zeros(8, dtype=torch.int32) for name in WRITTEN},
        next_token_ids=torch.tensor([2**32 + 1, 2**31 - 1]),
        target_positions=torch.tensor([5, 2**31 - 3, 2**32, 0, 1]),
        block_table=torch.tensor([[7, 2**29, 9], [2**29 - 1, 2**29, 0]]),
    )
    implementation.expand_dflash_inputs_(**arguments)
    assert arguments["input_ids"][:6].tolist() == [MASK, MASK, MASK, 2**31 - 1, MASK, MASK]
    assert arguments["context_positions"][:5].tolist() == [5, 2**31 - 3, 2**31 - 1, 0, 1]
    assert arguments["query_positions"][:6].tolist() == [2**31 - 2, 2**31 - 2, 2**31 - 2, 2, 3, 4]
    assert arguments["context_slot_mapping"][:5].tolist() == [-1, -1, -1, 2**31 - 4, 2**31 - 3]
    assert arguments["query_slot_mapping"][:6].tolist() == [-1, -1, -1, 2**31 - 2, 2**31 - 1, -1]


@pytest.mark.parametrize("num_tokens", [1025, 2560])
def test_long_requests(implementation: Implementation, num_tokens: int) -> None:
    """B14: every token of a long prefill."""
    table = torch.arange(700).flip(0)[None]
    positions = torch.arange(num_tokens)
    out = implementation.expand_dflash_inputs(
        **batch(
            next_token_ids=torch.tensor([40]),
            target_positions=positions,
            block_table=table,
            query_start_loc=torch.tensor([0, num_tokens]),
            num_rejected_tokens=None,
        )
    )
    assert torch.equal(out.context_positions, positions)
    assert torch.equal(out.context_slot_mapping, table[0, positions // 4] * 4 + positions % 4)
    assert out.query_positions.tolist() == [num_tokens, num_tokens + 1, num_tokens + 2]


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_an_empty_batch(implementation: Implementation, num_tokens: int) -> None:
    """B5, D23: the only total is read, nothing before it."""
    got = expanded(
        implementation,
        next_token_ids=torch.zeros(0, dtype=torch.int64),
        target_positions=torch.full((num_tokens,), 5),
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        num_rejected_tokens=None,
    )
    assert got["context_slot_mapping"] == [-1] * num_tokens
    assert got["input_ids"] == got["token_indices"] == []


def random_arguments(rng: random.Random) -> dict[str, Any]:
    random_batch = runner_batches.Batch(rng)
    size = random_batch.size
    starts = [rng.choice([0, 0, 2])]
    for length in random_batch.query_lens:
        starts.append(starts[-1] + length)
    num_tokens = starts[-1] + rng.choice([0, 0, 3])
    num_queries, num_speculative_tokens = rng.randint(1, 4), rng.randint(1, 4)
    block_size, num_columns = rng.choice([1, 3, 16]), rng.randint(0, 4)
    limit = block_size * num_columns
    return {
        "next_token_ids": random_batch.random_ints(-1, 30, size),
        "target_positions": random_batch.random_ints(-2, limit + 2, num_tokens),
        "block_table": random_batch.random_ints(-1, 2**31 - 1, size + rng.randint(0, 2), num_columns),
        "query_start_loc": random_batch.ints(starts),
        "num_rejected_tokens": rng.choice([None, random_batch.random_ints(-1, 8, size)]),
        "parallel_drafting_token_id": MASK,
        "block_size": block_size,
        "num_queries_per_request": num_queries,
        "num_speculative_tokens": num_speculative_tokens,
        "max_model_len": rng.choice([None, rng.randint(1, limit + 2)]),
        "pad_slot_id": rng.choice([-1, 0, 7]),
        "input_ids": random_batch.poisoned(size * num_queries),
        "context_positions": random_batch.poisoned(num_tokens),
        "query_positions": random_batch.poisoned(size * num_queries),
        "context_slot_mapping": random_batch.poisoned(num_tokens),
        "query_slot_mapping": random_batch.poisoned(size * num_queries),
        "token_indices": random_batch.poisoned(size * num_speculative_tokens),
    }


@given(seed=st.integers(0, 2**32))
def test_matches_reference(native: Implementation, seed: int) -> None:
    """B6, B7, B8: dtypes mixed, any strides, nothing read or written outside."""
    rng = random.Random(seed)
    runner_batches.check_against_reference(native, NAME, random_arguments(rng), WRITTEN, rng)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_positions": torch.zeros(5)}, "target_positions must be int32 or int64, got float32"),
        (
            {"next_token_ids": torch.zeros(5, dtype=torch.int64)},
            "next_token_ids must be [batch] with 2 elements, got shape [5]",
        ),
        (
            {"num_rejected_tokens": torch.zeros(1, dtype=torch.int64)},
            "num_rejected_tokens must be [batch] with 2 elements, got shape [1]",
        ),
        (
            {"block_table": torch.zeros(1, 3, dtype=torch.int64)},
            "block_table must be [batch, num_columns] with at least 2 rows, got shape [1, 3]",
        ),
        *(
            (
                {name: torch.zeros(5, dtype=torch.int64)},
                f"{name} must be [batch * num_queries_per_request] or longer with at least 6 elements",
            )
            for name in ("input_ids", "query_positions", "query_slot_mapping")
        ),
        *(
            (
                {name: torch.zeros(4, dtype=torch.int64)},
                f"{name} must be [num_tokens] or longer with at least 5 elements, got shape [4]",
            )
            for name in ("context_positions", "context_slot_mapping")
        ),
        (
            {"token_indices": torch.zeros(3, dtype=torch.int32)},
            "token_indices must be [batch * num_speculative_tokens] or longer with at least 4 elements",
        ),
        ({"block_size": 0}, "block_size must be between 1 and 2147483647, got 0"),
        ({"num_queries_per_request": 0}, "num_queries_per_request must be between 1 and"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be between 1 and"),
        ({"max_model_len": 0}, "max_model_len must be between 1 and 2147483647, got 0"),
        (
            {"context_slot_mapping": torch.zeros(5, dtype=torch.int32), "pad_slot_id": 2**31},
            "pad_slot_id must be between -2147483648 and 2147483647, got 2147483648",
        ),
        (
            {"input_ids": torch.zeros(6, dtype=torch.int32), "parallel_drafting_token_id": 2**31},
            "parallel_drafting_token_id must be between -2147483648 and 2147483647, got 2147483648",
        ),
    ],
    ids=str,
)
def test_arguments(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    runner_batches.assert_raises(default_native, NAME, in_place(**changes), WRITTEN, message)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 3, 6], "query_start_loc must end within the 5 elements of target_positions, got 6"),
        ([0, 3, 2], "query_start_loc must start at 0 or above and never decrease, got 2 after 3 at index 2"),
    ],
    ids=str,
)
def test_totals_that_decrease_or_leave_the_tokens(
    cpu_implementation: Implementation, starts: list[int], message: str
) -> None:
    arguments = in_place(query_start_loc=torch.tensor(starts))
    runner_batches.assert_raises(cpu_implementation, NAME, arguments, WRITTEN, message)


@pytest.mark.parametrize("rejected", [torch.tensor([1, 0]), None], ids=["rejected", "none"])
def test_op(rejected: torch.Tensor | None) -> None:
    arguments = in_place(num_rejected_tokens=rejected, max_model_len=None, pad_slot_id=-1)
    runner_batches.check_op(module._op, arguments)

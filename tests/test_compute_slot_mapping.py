"""compute_slot_mapping: slots of a paged key-value cache."""

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
from specdec_ops.ops import compute_slot_mapping as module
from torch import Tensor

NAME = "compute_slot_mapping_"
WRITTEN = ("slot_mapping",)


def one_request(**changes: Any) -> dict[str, Any]:
    """Blocks 7, 2, 9 of four tokens each, positions across the first boundary."""
    arguments = {
        "query_start_loc": torch.tensor([0, 3]),
        "positions": torch.tensor([3, 4, 11]),
        "block_table": torch.tensor([[7, 2, 9]]),
        "slot_mapping": torch.full((3,), POISON),
        "block_size": 4,
    }
    return {**arguments, **changes}


def slots(implementation: Implementation, **changes: Any) -> list[int]:
    arguments = one_request(**changes)
    assert implementation.compute_slot_mapping_(**arguments) is None
    return arguments["slot_mapping"].tolist()


def test_each_position_is_looked_up(implementation: Implementation) -> None:
    """D20: blocks need not follow each other."""
    assert slots(implementation) == [31, 8, 39]


def test_positions_past_the_last_column_have_no_slot(implementation: Implementation) -> None:
    """D10: the next request's row, or what lies behind the tensor, is not read."""
    table = torch.arange(64, dtype=torch.int32).reshape(2, 32)
    out = implementation.compute_slot_mapping(
        torch.tensor([0, 5, 5]), torch.tensor([0, 3, 130, 8192, 1048575]), table[:, :20], block_size=4
    )
    assert out.tolist() == [0, 3, -1, -1, -1]


def test_a_table_without_columns_has_no_slots(implementation: Implementation) -> None:
    assert slots(implementation, block_table=torch.zeros(1, 0, dtype=torch.int32)) == [-1] * 3


@pytest.mark.parametrize("position", [-1, -4, -(2**31)])
def test_negative_positions_have_no_slot(implementation: Implementation, position: int) -> None:
    """D4: -1 // 4 is column -1, which an index would take for the last one."""
    assert slots(implementation, positions=torch.tensor([position, 0, 1])) == [-1, 28, 29]


def test_negative_blocks_have_no_slots(implementation: Implementation) -> None:
    assert slots(implementation, block_table=torch.tensor([[7, -1, 9]])) == [31, -1, 39]


@pytest.mark.parametrize(
    ("dtype", "block_size", "last_block"),
    [
        (torch.int32, 4, 2**29 - 1),
        (torch.int32, 3, 2**31 // 3 - 1),
        (torch.int64, 4, 2**61 - 1),
        (torch.int64, 1, 2**63 - 1),
    ],
)
def test_blocks_whose_slots_do_not_fit_have_none(
    implementation: Implementation, dtype: torch.dtype, block_size: int, last_block: int
) -> None:
    got = torch.full((3,), POISON, dtype=dtype)
    implementation.compute_slot_mapping_(
        torch.tensor([0, 3]),
        torch.tensor([0, block_size - 1, block_size]),
        torch.tensor([[last_block, min(last_block + 1, 2**63 - 1)]]),
        got,
        block_size=block_size,
    )
    first = last_block * block_size
    after = last_block if block_size == 1 else -1
    assert got.tolist() == [first, first + block_size - 1, after]


@pytest.mark.parametrize("pad", [-1, 0, 1000])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_what_no_token_has_is_padded(implementation: Implementation, pad: int, dtype: torch.dtype) -> None:
    """The tail of the buffer, tokens before the first request and after the last one."""
    got = slots(
        implementation,
        query_start_loc=torch.tensor([1, 2]),
        slot_mapping=torch.full((6,), POISON, dtype=dtype),
        pad_slot_id=pad,
    )
    assert got == [pad, 8, pad, pad, pad, pad]


def test_requests_in_any_order_and_without_tokens(implementation: Implementation) -> None:
    """D22: a prefill before a decode, an empty request between them."""
    out = implementation.compute_slot_mapping(
        torch.tensor([0, 3, 3, 4]),
        torch.tensor([0, 1, 2, 5]),
        torch.tensor([[4, 0], [5, 0], [6, 1]]),
        block_size=2,
    )
    assert out.tolist() == [8, 9, 0, -1]
    assert out.dtype == torch.int64


@pytest.mark.parametrize("num_tokens", [1025, 2560])
def test_long_requests(implementation: Implementation, num_tokens: int) -> None:
    """B14: every token of a long prefill."""
    table = torch.arange(200).flip(0)[None]
    out = implementation.compute_slot_mapping(
        torch.tensor([0, num_tokens]), torch.arange(num_tokens), table, block_size=16
    )
    positions = torch.arange(num_tokens)
    assert torch.equal(out, table[0, positions // 16] * 16 + positions % 16)


@pytest.mark.parametrize("size", [0, 4])
def test_an_empty_batch_is_all_padding(implementation: Implementation, size: int) -> None:
    """B5, D23: the only total is read, nothing before it."""
    got = slots(
        implementation,
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        positions=torch.zeros(0, dtype=torch.int64),
        block_table=torch.zeros(0, 3, dtype=torch.int32),
        slot_mapping=torch.full((size,), POISON),
    )
    assert got == [-1] * size


def random_arguments(rng: random.Random) -> dict[str, Any]:
    batch = runner_batches.Batch(rng)
    query_start_loc, num_tokens = start_locs(batch)
    block_size = rng.choice([1, 3, 16])
    num_columns = rng.randint(0, 4)
    return {
        "query_start_loc": query_start_loc,
        "positions": batch.random_ints(-3, block_size * (num_columns + 1), num_tokens),
        "block_table": batch.random_ints(-1, 2**31 - 1, batch.size + rng.randint(0, 2), num_columns),
        "slot_mapping": batch.poisoned(num_tokens),
        "block_size": block_size,
        "pad_slot_id": rng.choice([-1, 0, 7]),
    }


@given(seed=st.integers(0, 2**32))
def test_matches_reference(native: Implementation, seed: int) -> None:
    """B6, B7, B8: dtypes mixed, any strides, nothing read or written outside."""
    rng = random.Random(seed)
    runner_batches.check_against_reference(native, NAME, random_arguments(rng), WRITTEN, rng)


def start_locs(batch: runner_batches.Batch) -> tuple[Tensor, int]:
    """Totals that begin past 0 now and then, and a number of tokens that may go on after them."""
    values = [batch.rng.choice([0, 0, 2])]
    for length in batch.query_lens:
        values.append(values[-1] + length)
    return batch.ints(values), values[-1] + batch.rng.choice([0, 0, 3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": torch.zeros(3)}, "positions must be int32 or int64, got float32"),
        ({"positions": torch.zeros(3, 1, dtype=torch.int64)}, "positions must be [num_tokens]"),
        (
            {"slot_mapping": torch.zeros(2, dtype=torch.int64)},
            "slot_mapping must be [num_tokens] or longer with at least 3 elements, got shape [2]",
        ),
        ({"slot_mapping": torch.zeros(3)}, "slot_mapping must be int32 or int64, got float32"),
        ({"query_start_loc": torch.zeros(0, dtype=torch.int64)}, "query_start_loc must be [batch + 1]"),
        (
            {"block_table": torch.zeros(3, dtype=torch.int64)},
            "block_table must be [batch, num_columns] with at least 1 rows, got shape [3]",
        ),
        (
            {"block_table": torch.zeros(0, 3, dtype=torch.int64)},
            "block_table must be [batch, num_columns] with at least 1 rows, got shape [0, 3]",
        ),
        ({"block_size": 0}, "block_size must be between 1 and 2147483647, got 0"),
        ({"block_size": 2**31}, "block_size must be between 1 and 2147483647, got 2147483648"),
        (
            {"slot_mapping": torch.zeros(3, dtype=torch.int32), "pad_slot_id": 2**31},
            "pad_slot_id must be between -2147483648 and 2147483647, got 2147483648",
        ),
    ],
    ids=str,
)
def test_arguments(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    runner_batches.assert_raises(default_native, NAME, one_request(**changes), WRITTEN, message)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 4], "query_start_loc must end within the 3 elements of positions, got 4"),
        (
            [0, 2, 1],
            "query_start_loc must start at 0 or above and never decrease, got 1 after 2 at index 2",
        ),
        ([-1, 2], "query_start_loc must start at 0 or above and never decrease, got -1 after 0 at index 0"),
    ],
    ids=str,
)
def test_totals_that_decrease_or_leave_the_tokens(
    cpu_implementation: Implementation, starts: list[int], message: str
) -> None:
    arguments = one_request(
        query_start_loc=torch.tensor(starts), block_table=torch.zeros(2, 3, dtype=torch.int64)
    )
    runner_batches.assert_raises(cpu_implementation, NAME, arguments, WRITTEN, message)


def test_op() -> None:
    runner_batches.check_op(module._op, {**one_request(), "pad_slot_id": -1})

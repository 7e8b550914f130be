"""advance_draft_step_: positions, slots and sequence lengths between two draft steps."""

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
from specdec_ops.ops import advance_draft_step as module

NAME = "advance_draft_step_"
WRITTEN = ("seq_lens", "out_positions", "out_slot_mapping")


def one_request(**changes: Any) -> dict[str, Any]:
    """The last token at position 3 of blocks 7, 2, 9, four tokens each."""
    arguments = {
        "positions": torch.tensor([3]),
        "block_table": torch.tensor([[7, 2, 9]]),
        "seq_lens": torch.tensor([4]),
        "out_positions": torch.full((1,), POISON),
        "out_slot_mapping": torch.full((1,), POISON),
        "block_size": 4,
        "max_model_len": 12,
    }
    return {**arguments, **changes}


def advanced(implementation: Implementation, **changes: Any) -> tuple[list[int], list[int], list[int]]:
    """Positions, slots and sequence lengths."""
    arguments = one_request(**changes)
    assert implementation.advance_draft_step_(**arguments) is None
    return (
        arguments["out_positions"].tolist(),
        arguments["out_slot_mapping"].tolist(),
        arguments["seq_lens"].tolist(),
    )


def test_one_token_further(implementation: Implementation) -> None:
    """D20: over the boundary of a block, into one that does not follow it."""
    assert advanced(implementation) == ([4], [8], [5])


@pytest.mark.parametrize("position", [11, 12, 1000, 2**63 - 1])
def test_a_full_row_has_no_slot(implementation: Implementation, position: int) -> None:
    """D9: not even the slot of the position that the model is given instead."""
    got = advanced(implementation, positions=torch.tensor([position]), seq_lens=torch.tensor([12]))
    assert got == ([0], [-1], [1])


def test_the_last_position_has_a_slot(implementation: Implementation) -> None:
    got = advanced(implementation, positions=torch.tensor([10]), seq_lens=torch.tensor([11]))
    assert got == ([11], [39], [12])


@pytest.mark.parametrize(
    ("overflow_position", "expected"),
    [(0, [-1, 29, 30]), (11, [-1, -1, -1])],
    ids=["starts over", "stays full"],
)
def test_steps_after_a_full_one(
    implementation: Implementation, overflow_position: int, expected: list[int]
) -> None:
    """D9: positions that are passed on as they came out overwrite the prompt, unless they stay at the end."""
    positions, seq_lens, slots = torch.tensor([11]), torch.tensor([12]), []
    for _ in range(3):
        _, slot, _ = advanced(
            implementation,
            positions=positions,
            out_positions=positions,
            seq_lens=seq_lens,
            overflow_position=overflow_position,
        )
        slots += slot
    assert slots == expected


def test_positions_past_the_last_column_have_no_slot(implementation: Implementation) -> None:
    """D10, D11: neither a slot of the last column, nor a sequence that the table cannot address."""
    got = advanced(
        implementation,
        positions=torch.tensor([10, 11, 12]),
        block_table=torch.tensor([[7, 2, 9], [7, 2, 9], [7, 2, 9]])[:, :3],
        seq_lens=torch.tensor([11, 12, 13]),
        out_positions=torch.zeros(3, dtype=torch.int64),
        out_slot_mapping=torch.zeros(3, dtype=torch.int64),
        max_model_len=100,
    )
    assert got == ([11, 12, 13], [39, -1, -1], [12, 12, 12])


def test_sequences_end_with_the_table(implementation: Implementation) -> None:
    """D11: 625 blocks of 128 address 80000 tokens, not 80001."""
    positions, seq_lens = torch.tensor([79997]), torch.tensor([79998])
    lengths = []
    for _ in range(4):
        advanced(
            implementation,
            positions=positions,
            out_positions=positions,
            seq_lens=seq_lens,
            block_table=torch.zeros(1, 625, dtype=torch.int32),
            block_size=128,
            max_model_len=2**31 - 1,
        )
        lengths += seq_lens.tolist()
    assert lengths == [79999, 80000, 80000, 80000]


def test_sequences_end_with_the_model(implementation: Implementation) -> None:
    """Though the table has room for more."""
    got = advanced(implementation, seq_lens=torch.tensor([10]), max_model_len=10)
    assert got == ([4], [8], [10])


@pytest.mark.parametrize(("position", "seq_len"), [(-1, 4), (-(2**63), 4), (3, 0), (3, -1), (-1, 0), (11, 0)])
def test_padding_stays_padding(implementation: Implementation, position: int, seq_len: int) -> None:
    """D4: a row that is no request gets a position that can be embedded, and no slot, in every step."""
    positions, seq_lens = torch.tensor([position]), torch.tensor([seq_len])
    for _ in range(2):
        got = advanced(implementation, positions=positions, out_positions=positions, seq_lens=seq_lens)
        assert got == ([0], [-1], [0])


@pytest.mark.parametrize("pad", [-1, 0, 2**31 - 1])
def test_slots_past_the_batch_are_padded(implementation: Implementation, pad: int) -> None:
    """Graph padding; longer sequence lengths, positions and tables stay as they are there."""
    got = advanced(
        implementation,
        block_table=torch.tensor([[7, 2, 9], [1, 1, 1]]),
        seq_lens=torch.tensor([4, 9]),
        out_positions=torch.full((2,), POISON),
        out_slot_mapping=torch.full((4,), POISON, dtype=torch.int32),
        pad_slot_id=pad,
    )
    assert got == ([4, POISON], [8, pad, pad, pad], [5, 9])


def test_negative_blocks_have_no_slots(implementation: Implementation) -> None:
    assert advanced(implementation, block_table=torch.tensor([[7, -1, 9]])) == ([4], [-1], [5])


@pytest.mark.parametrize(("block", "slot"), [(2**29 - 1, 2**31 - 4), (2**29, -1)])
def test_blocks_whose_slots_do_not_fit_have_none(
    implementation: Implementation, block: int, slot: int
) -> None:
    got = advanced(
        implementation,
        block_table=torch.tensor([[7, block, 9]]),
        out_slot_mapping=torch.zeros(1, dtype=torch.int32),
    )
    assert got == ([4], [slot], [5])


def test_a_table_without_columns(implementation: Implementation) -> None:
    """D11: no token can be addressed, so the row becomes padding."""
    got = advanced(implementation, block_table=torch.zeros(1, 0, dtype=torch.int32))
    assert got == ([4], [-1], [0])


def test_an_empty_batch_is_all_padding(implementation: Implementation) -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    got = advanced(
        implementation,
        positions=empty,
        seq_lens=empty,
        out_positions=empty,
        block_table=torch.zeros(0, 3, dtype=torch.int32),
        out_slot_mapping=torch.full((2,), POISON),
    )
    assert got == ([], [-1, -1], [])


def random_arguments(rng: random.Random) -> dict[str, Any]:
    batch = runner_batches.Batch(rng)
    block_size, num_columns = rng.choice([1, 3, 16]), rng.randint(0, 4)
    limit = block_size * num_columns
    max_model_len = rng.randint(1, limit + 4)
    return {
        "positions": batch.random_ints(-2, limit + 3, batch.size),
        "block_table": batch.random_ints(-1, 2**31 - 1, batch.size + rng.randint(0, 2), num_columns),
        "seq_lens": batch.random_ints(-1, limit + 3, batch.size + rng.randint(0, 2)),
        "out_positions": batch.poisoned(batch.size),
        "out_slot_mapping": batch.poisoned(batch.size),
        "block_size": block_size,
        "max_model_len": max_model_len,
        "pad_slot_id": rng.choice([-1, 0, 7]),
        "overflow_position": rng.choice([0, max_model_len - 1]),
    }


@given(seed=st.integers(0, 2**32))
def test_matches_reference(native: Implementation, seed: int) -> None:
    """B6, B7, B8: dtypes mixed, any strides, nothing read or written outside."""
    rng = random.Random(seed)
    runner_batches.check_against_reference(native, NAME, random_arguments(rng), WRITTEN, rng)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": torch.zeros(1)}, "positions must be int32 or int64, got float32"),
        ({"positions": torch.zeros(1, 1, dtype=torch.int64)}, "positions must be [batch]"),
        (
            {"seq_lens": torch.zeros(0, dtype=torch.int64)},
            "seq_lens must be [batch] or longer with at least 1",
        ),
        ({"seq_lens": torch.zeros(1)}, "seq_lens must be int32 or int64, got float32"),
        ({"out_positions": torch.zeros(0, dtype=torch.int64)}, "out_positions must be [batch] or longer"),
        (
            {"out_slot_mapping": torch.zeros(0, dtype=torch.int64)},
            "out_slot_mapping must be [batch] or longer",
        ),
        ({"out_slot_mapping": torch.zeros(1)}, "out_slot_mapping must be int32 or int64, got float32"),
        ({"block_table": torch.zeros(0, 3, dtype=torch.int64)}, "block_table must be [batch, num_columns]"),
        ({"block_table": torch.zeros(1, 3)}, "block_table must be int32 or int64, got float32"),
        ({"block_size": 0}, "block_size must be between 1 and 2147483647, got 0"),
        ({"max_model_len": 0}, "max_model_len must be between 1 and 2147483647, got 0"),
        ({"max_model_len": 2**31}, "max_model_len must be between 1 and 2147483647, got 2147483648"),
        (
            {"overflow_position": 12},
            "overflow_position must be between 0 and max_model_len - 1, 11, got 12",
        ),
        ({"overflow_position": -1}, "overflow_position must be between 0 and max_model_len - 1, 11, got -1"),
        (
            {"out_slot_mapping": torch.zeros(1, dtype=torch.int32), "pad_slot_id": -(2**31) - 1},
            "pad_slot_id must be between -2147483648 and 2147483647, got -2147483649",
        ),
    ],
    ids=str,
)
def test_arguments(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    runner_batches.assert_raises(default_native, NAME, one_request(**changes), WRITTEN, message)


def test_op() -> None:
    runner_batches.check_op(module._op, {**one_request(), "pad_slot_id": -1, "overflow_position": 0})

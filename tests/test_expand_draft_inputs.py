"""expand_draft_inputs: kept tokens, next token, masks and rejected slots of each request."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import runner_batches
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import REFERENCE, Implementation
from runner_batches import POISON
from specdec_ops.ops import expand_draft_inputs as module
from torch import Tensor

NAME = "expand_draft_inputs_"
WRITTEN = (
    "input_ids",
    "positions",
    "is_rejected_token_mask",
    "is_masked_token_mask",
    "new_token_indices",
    "hidden_state_mapping",
)
PAD, MASK = 0, 99


def batch(**changes: Any) -> dict[str, Any]:
    """Three tokens of which two were kept, then two of which both were; two slots each."""
    arguments = {
        "target_token_ids": torch.tensor([10, 11, 12, 20, 21]),
        "target_positions": torch.tensor([5, 6, 7, 0, 1]),
        "next_token_ids": torch.tensor([40, 50]),
        "query_start_loc": torch.tensor([0, 3, 5]),
        "query_end_loc": torch.tensor([1, 4]),
        "padding_token_id": PAD,
        "parallel_drafting_token_id": MASK,
        "num_padding_slots_per_request": 2,
        "shift_input_ids": True,
    }
    return {**arguments, **changes}


def expanded(implementation: Implementation, **changes: Any) -> dict[str, list[int] | None]:
    out = implementation.expand_draft_inputs(**batch(**changes))
    return {name: None if value is None else value.tolist() for name, value in out._asdict().items()}


def in_place(**changes: Any) -> dict[str, Any]:
    """The batch with buffers of ten elements."""
    buffers = {name: torch.full((10,), POISON) for name in WRITTEN}
    for name in ("is_rejected_token_mask", "is_masked_token_mask"):
        buffers[name] = torch.ones(10, dtype=torch.bool)
    return {**batch(), **buffers, **changes}


def test_layout_with_shifted_ids(implementation: Implementation) -> None:
    """D15, D16: rejected tokens come last, are marked, and have position 0."""
    assert expanded(implementation) == {
        "input_ids": [11, 40, MASK, PAD, 21, 50, MASK],
        "positions": [5, 6, 7, 0, 0, 1, 2],
        "is_rejected_token_mask": [False, False, False, True, False, False, False],
        "is_masked_token_mask": [False, False, True, False, False, False, True],
        "new_token_indices": [1, 2, 5, 6],
        "hidden_state_mapping": [0, 1, 2, 4, 5],
    }


def test_layout_without_shift(implementation: Implementation) -> None:
    assert expanded(implementation, shift_input_ids=False) == {
        "input_ids": [10, 11, 40, MASK, PAD, 20, 21, 50, MASK],
        "positions": [5, 6, 7, 8, 0, 0, 1, 2, 3],
        "is_rejected_token_mask": [False, False, False, False, True, False, False, False, False],
        "is_masked_token_mask": [False, False, False, True, False, False, False, False, True],
        "new_token_indices": [2, 3, 7, 8],
        "hidden_state_mapping": None,
    }


def test_one_slot_is_for_the_next_token_alone(implementation: Implementation) -> None:
    """A shifted batch keeps its size."""
    got = expanded(implementation, num_padding_slots_per_request=1)
    assert got["input_ids"] == [11, 40, PAD, 21, 50]
    assert got["is_masked_token_mask"] == [False] * 5
    assert got["new_token_indices"] == [1, 4]
    assert got["hidden_state_mapping"] == [0, 1, 2, 3, 4]


def test_requests_of_one_token(implementation: Implementation) -> None:
    """Zero drafts: with a shift nothing is kept but the next token."""
    got = expanded(
        implementation,
        target_token_ids=torch.tensor([10, 20]),
        target_positions=torch.tensor([5, 8]),
        query_start_loc=torch.tensor([0, 1, 2]),
        query_end_loc=torch.tensor([0, 1]),
    )
    assert got["input_ids"] == [40, MASK, 50, MASK]
    assert got["positions"] == [5, 6, 8, 9]


def test_all_drafts_rejected(implementation: Implementation) -> None:
    got = expanded(implementation, query_end_loc=torch.tensor([0, 3]))
    assert got["input_ids"] == [40, MASK, PAD, PAD, 50, MASK, PAD]
    assert got["is_rejected_token_mask"] == [False, False, True, True, False, False, True]


@pytest.mark.parametrize("shift", [False, True])
def test_an_end_outside_of_its_request_moves_to_the_nearest_token(
    implementation: Implementation, shift: bool
) -> None:
    far = expanded(implementation, query_end_loc=torch.tensor([-100, 2**40]), shift_input_ids=shift)
    assert far == expanded(implementation, query_end_loc=torch.tensor([0, 4]), shift_input_ids=shift)


@pytest.mark.parametrize("placeholder", [-1, -2, -(2**63)])
def test_placeholders_become_padding(implementation: Implementation, placeholder: int) -> None:
    """D4: no id reaches an embedding that has no row there, and the token still counts."""
    got = expanded(
        implementation,
        target_token_ids=torch.tensor([placeholder, placeholder, 12, 20, 21]),
        next_token_ids=torch.tensor([40, placeholder]),
        padding_token_id=7,
    )
    assert got["input_ids"] == [7, 40, MASK, 7, 21, 7, MASK]
    assert got["is_rejected_token_mask"] == [False, False, False, True, False, False, False]


def test_ids_that_the_output_cannot_hold_become_padding(implementation: Implementation) -> None:
    """B6: not what is left of them in 32 bits."""
    arguments = in_place(
        target_token_ids=torch.tensor([10, 2**32 + 5, 12, 20, 2**31 - 1]),
        next_token_ids=torch.tensor([2**31, 50]),
        input_ids=torch.zeros(7, dtype=torch.int32),
    )
    implementation.expand_draft_inputs_(**arguments)
    assert arguments["input_ids"].tolist() == [PAD, PAD, MASK, PAD, 2**31 - 1, 50, MASK]


def test_positions_are_clamped(implementation: Implementation) -> None:
    """To 0 below, and to what the output can hold above."""
    arguments = in_place(
        target_positions=torch.tensor([2**31 - 2, 0, 0, -5, 0]),
        positions=torch.zeros(7, dtype=torch.int32),
    )
    implementation.expand_draft_inputs_(**arguments)
    assert arguments["positions"].tolist() == [2**31 - 2, 2**31 - 1, 2**31 - 1, 0, 0, 1, 2]


def test_a_request_without_tokens_is_padding(implementation: Implementation) -> None:
    """Its slots are rejected, and no other request's position or token is taken for its own."""
    changes = {
        "query_start_loc": torch.tensor([0, 0, 5]),
        "query_end_loc": torch.tensor([-1, 3]),
        "num_padding_slots_per_request": 3,
    }
    arguments = in_place(**changes)
    implementation.expand_draft_inputs_(**arguments)
    assert arguments["new_token_indices"][:6].tolist() == [-1, -1, -1, 5, 6, 7]
    got = expanded(implementation, **changes)
    assert got["input_ids"] == [PAD, PAD, 11, 12, 20, 50, MASK, MASK, PAD]
    assert got["positions"] == [0, 0, 5, 6, 7, 8, 9, 10, 0]
    assert got["is_rejected_token_mask"] == [True, True, *[False] * 6, True]
    assert got["new_token_indices"] == [-1, -1, -1, 5, 6, 7]
    assert got["hidden_state_mapping"] == [2, 3, 4, 5, 6]


def test_tokens_of_no_request(implementation: Implementation) -> None:
    """Rejected slots at the end, where nothing is to be kept; their hidden states go nowhere."""
    got = expanded(
        implementation, query_start_loc=torch.tensor([0, 2, 4]), query_end_loc=torch.tensor([1, 3])
    )
    assert got["input_ids"] == [11, 40, MASK, 20, 50, MASK, PAD]
    assert got["is_rejected_token_mask"] == [False] * 6 + [True]
    assert got["hidden_state_mapping"] == [0, 1, 3, 4, -1]


def test_buffers_keep_what_no_request_takes(implementation: Implementation) -> None:
    arguments = in_place()
    assert implementation.expand_draft_inputs_(**arguments) is None
    assert arguments["input_ids"].tolist() == [11, 40, MASK, PAD, 21, 50, MASK, *[POISON] * 3]
    assert arguments["positions"].tolist() == [5, 6, 7, 0, 0, 1, 2, *[POISON] * 3]
    assert arguments["is_rejected_token_mask"].tolist() == [False] * 3 + [True] + [False] * 3 + [True] * 3
    assert arguments["is_masked_token_mask"].tolist() == [False] * 2 + [True] + [False] * 3 + [True] * 4
    assert arguments["new_token_indices"].tolist() == [1, 2, 5, 6, *[POISON] * 6]
    assert arguments["hidden_state_mapping"].tolist() == [0, 1, 2, 4, 5, *[POISON] * 5]


def test_the_mapping_is_not_touched_without_shift(implementation: Implementation) -> None:
    arguments = in_place(shift_input_ids=False)
    implementation.expand_draft_inputs_(**arguments)
    assert arguments["hidden_state_mapping"].tolist() == [POISON] * 10
    implementation.expand_draft_inputs_(**{**arguments, "hidden_state_mapping": None})


@pytest.mark.parametrize("num_tokens", [1025, 2560])
def test_long_requests(implementation: Implementation, num_tokens: int) -> None:
    """B14: every token of a long prefill."""
    ids = torch.arange(num_tokens) + 1
    out = implementation.expand_draft_inputs(
        **batch(
            target_token_ids=ids,
            target_positions=torch.arange(num_tokens),
            next_token_ids=torch.tensor([40]),
            query_start_loc=torch.tensor([0, num_tokens]),
            query_end_loc=torch.tensor([num_tokens - 1]),
        )
    )
    assert torch.equal(out.input_ids, torch.cat([ids[1:], torch.tensor([40, MASK])]))
    assert torch.equal(out.positions, torch.arange(num_tokens + 1))
    assert torch.equal(out.hidden_state_mapping, torch.arange(num_tokens, dtype=torch.int32))


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_an_empty_batch(implementation: Implementation, num_tokens: int) -> None:
    """B5, D23: the only total is read, nothing before it."""
    empty = torch.zeros(0, dtype=torch.int64)
    got = expanded(
        implementation,
        target_token_ids=torch.full((num_tokens,), 5),
        target_positions=torch.zeros(num_tokens, dtype=torch.int64),
        next_token_ids=empty,
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        query_end_loc=empty,
    )
    assert got["input_ids"] == [PAD] * num_tokens
    assert got["new_token_indices"] == []


@pytest.mark.parametrize(("ids", "positions"), [(torch.int32, torch.int64), (torch.int64, torch.int32)])
def test_dtypes_of_the_outputs(
    implementation: Implementation, ids: torch.dtype, positions: torch.dtype
) -> None:
    arguments = batch()
    out = implementation.expand_draft_inputs(
        **batch(
            target_token_ids=arguments["target_token_ids"].to(ids),
            target_positions=arguments["target_positions"].to(positions),
        )
    )
    assert (out.input_ids.dtype, out.positions.dtype) == (ids, positions)
    assert out.new_token_indices.dtype == out.hidden_state_mapping.dtype == torch.int32
    assert out.is_rejected_token_mask.dtype == out.is_masked_token_mask.dtype == torch.bool


def random_arguments(rng: random.Random) -> dict[str, Any]:
    random_batch = runner_batches.Batch(rng)
    size = random_batch.size
    starts = [rng.choice([0, 0, 2])]
    for length in random_batch.query_lens:
        starts.append(starts[-1] + length)
    num_tokens = starts[-1] + rng.choice([0, 0, 3])
    num_slots, shift = rng.randint(1, 4), rng.random() < 0.5
    num_outputs = starts[-1] + size * (num_slots - shift)
    ends = [rng.randint(start - 1, next_start) for start, next_start in itertools.pairwise(starts)]
    return {
        "target_token_ids": random_batch.random_ints(-1, 30, num_tokens),
        "target_positions": random_batch.random_ints(-1, 30, num_tokens),
        "next_token_ids": random_batch.random_ints(-1, 30, size),
        "query_start_loc": random_batch.ints(starts),
        "query_end_loc": random_batch.ints(ends),
        "padding_token_id": rng.randint(0, 3),
        "parallel_drafting_token_id": MASK,
        "num_padding_slots_per_request": num_slots,
        "shift_input_ids": shift,
        "input_ids": random_batch.poisoned(num_outputs),
        "positions": random_batch.poisoned(num_outputs),
        "is_rejected_token_mask": random_batch.random_ints(0, 1, num_outputs).bool(),
        "is_masked_token_mask": random_batch.random_ints(0, 1, num_outputs).bool(),
        "new_token_indices": random_batch.poisoned(size * num_slots),
        "hidden_state_mapping": random_batch.poisoned(num_tokens) if shift or rng.random() < 0.5 else None,
    }


@given(seed=st.integers(0, 2**32))
def test_matches_reference(native: Implementation, seed: int) -> None:
    """B6, B7, B8: dtypes mixed, any strides, nothing read or written outside."""
    rng = random.Random(seed)
    arguments = random_arguments(rng)
    plain = {key: value.clone() if isinstance(value, Tensor) else value for key, value in arguments.items()}
    REFERENCE.expand_draft_inputs_(**plain)
    guards = runner_batches.Guards(rng)
    sliced = {key: placed(guards, key, value) for key, value in arguments.items()}
    native.expand_draft_inputs_(**sliced)
    for key, want in plain.items():
        if isinstance(want, Tensor):
            assert torch.equal(sliced[key], want), key
            assert key in WRITTEN or torch.equal(want, arguments[key]), f"{key} was written"
    guards.assert_intact()


def placed(guards: runner_batches.Guards, key: str, value: Any) -> Any:
    """Masks lie among bytes that are no bool, so that a write beside them shows."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.bool:
        return guards.place(value.to(torch.int8), writable=True).view(torch.bool)
    return guards.place(value, writable=key in WRITTEN)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_token_ids": torch.zeros(5)}, "target_token_ids must be int32 or int64, got float32"),
        (
            {"target_positions": torch.zeros(4, dtype=torch.int64)},
            "target_positions must be [num_tokens] with 5 elements, got shape [4]",
        ),
        (
            {"next_token_ids": torch.zeros(5, dtype=torch.int64)},
            "next_token_ids must be [batch] with 2 elements, got shape [5]",
        ),
        (
            {"query_end_loc": torch.zeros(3, dtype=torch.int64)},
            "query_end_loc must be [batch] with 2 elements, got shape [3]",
        ),
        (
            {"input_ids": torch.zeros(6, dtype=torch.int64)},
            "input_ids must be [num_outputs] or longer with at",
        ),
        (
            {"positions": torch.zeros(6, dtype=torch.int64)},
            "positions must be [num_outputs] or longer with at least 7 elements, got shape [6]",
        ),
        (
            {"is_rejected_token_mask": torch.zeros(7, dtype=torch.uint8)},
            "is_rejected_token_mask must be bool, got uint8",
        ),
        (
            {"is_masked_token_mask": torch.zeros(6, dtype=torch.bool)},
            "is_masked_token_mask must be [num_outputs] or longer with at least 7 elements",
        ),
        (
            {"new_token_indices": torch.zeros(3, dtype=torch.int32)},
            "new_token_indices must be [batch * num_padding_slots_per_request] or longer with at least 4",
        ),
        (
            {"hidden_state_mapping": torch.zeros(4, dtype=torch.int32)},
            "hidden_state_mapping must be [num_tokens] or longer with at least 5 elements, got shape [4]",
        ),
        (
            {"hidden_state_mapping": None},
            "hidden_state_mapping must be a tensor with shift_input_ids, got none",
        ),
        ({"num_padding_slots_per_request": 0}, "num_padding_slots_per_request must be between 1 and"),
        (
            {"input_ids": torch.zeros(7, dtype=torch.int32), "padding_token_id": 2**31},
            "padding_token_id must be between -2147483648 and 2147483647, got 2147483648",
        ),
        (
            {"input_ids": torch.zeros(7, dtype=torch.int32), "parallel_drafting_token_id": 2**31},
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
        ([0, 3, 6], "query_start_loc must end within the 5 elements of target_token_ids, got 6"),
        ([0, 3, 2], "query_start_loc must start at 0 or above and never decrease, got 2 after 3 at index 2"),
    ],
    ids=str,
)
def test_totals_that_decrease_or_leave_the_tokens(
    cpu_implementation: Implementation, starts: list[int], message: str
) -> None:
    arguments = in_place(query_start_loc=torch.tensor(starts))
    runner_batches.assert_raises(cpu_implementation, NAME, arguments, WRITTEN, message)


@pytest.mark.parametrize("mapping", [torch.zeros(10, dtype=torch.int32), None], ids=["mapping", "none"])
def test_op(mapping: Tensor | None) -> None:
    arguments = in_place(hidden_state_mapping=mapping, shift_input_ids=mapping is not None)
    runner_batches.check_op(module._op, arguments)

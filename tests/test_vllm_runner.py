"""The functions with the calling conventions of vLLM's newer runner, without vLLM.

tests_vllm compares them with vLLM's kernels.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from specdec_ops.integrations.vllm import runner
from torch import Tensor

GPU = "vllm.v1.worker.gpu"


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_one_step_of_a_runner() -> None:
    """A decode with two drafts, of which one is accepted, and the first chunk of a prompt."""
    idx_mapping, query_start_loc, cu_num_logits = torch.tensor([2, 0]), int32(0, 3, 7), int32(0, 3, 4)
    num_computed, prefill_len, total_len = int32(0, 0, 9), int32(6, 0, 5), int32(6, 0, 10)
    last_sampled, draft_tokens = torch.tensor([[0], [0], [30]]), torch.tensor([[1, 2], [3, 4], [31, 32]])
    input_ids, positions, seq_lens = torch.zeros(8, dtype=torch.int32), torch.zeros(8).long(), int32(7, 7, 7)

    runner.prepare_pos_seq_lens(idx_mapping, query_start_loc, num_computed, positions, seq_lens)
    assert positions.tolist() == [9, 10, 11, 0, 1, 2, 3, 0]
    assert seq_lens.tolist() == [12, 4, 0]

    expanded_idx_mapping, expanded_local_pos = runner.expand_idx_mapping(idx_mapping, 4, cu_num_logits, 3)
    assert (expanded_idx_mapping.tolist(), expanded_idx_mapping.dtype) == ([2, 2, 2, 0], torch.int64)
    assert (expanded_local_pos.tolist(), expanded_local_pos.dtype) == ([0, 1, 2, 0], torch.int32)

    batch = (idx_mapping, last_sampled, query_start_loc, seq_lens, prefill_len, draft_tokens, cu_num_logits)
    logits_indices = runner.combine_sampled_and_draft_tokens(input_ids, *batch, 4)
    assert (logits_indices.tolist(), logits_indices.dtype) == ([0, 1, 2, 6], torch.int64)
    assert input_ids.tolist() == [30, 31, 32, 0, 0, 0, 0, 0]

    draft_sampled, pos = runner.gather_draft_sampled(
        input_ids, positions, logits_indices, expanded_idx_mapping, expanded_local_pos, prefill_len
    )
    assert (draft_sampled.tolist(), draft_sampled.dtype) == ([30, 31, 32, 0], torch.int32)
    assert (pos.tolist(), pos.dtype) == ([9, 10, 11, 3], torch.int64)

    sampled = int32(2, 1)
    num_sampled, num_rejected = runner.get_num_sampled_and_rejected(
        sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len
    )
    assert num_sampled is sampled
    assert (num_sampled.tolist(), num_rejected.tolist()) == ([2, 0], [1, 0])

    counts, all_token_ids = torch.zeros(3, 40, dtype=torch.int32), torch.zeros(3, 16, dtype=torch.int32)
    runner.post_update(
        idx_mapping,
        num_computed,
        last_sampled,
        counts,
        torch.tensor([[31, 35, 0], [7, 0, 0]]),
        num_sampled,
        num_rejected,
        query_start_loc,
        all_token_ids,
        total_len,
        torch.tensor([[36, 37], [38, 39]]),
        draft_tokens,
    )
    assert num_computed.tolist() == [4, 0, 11]
    assert last_sampled.flatten().tolist() == [0, 0, 35]
    assert counts.nonzero().tolist() == [[2, 31], [2, 35]]
    assert all_token_ids[2, 9:13].tolist() == [0, 31, 35, 0]
    assert total_len.tolist() == [6, 0, 12]
    assert draft_tokens.tolist() == [[38, 39], [3, 4], [36, 37]]


def test_without_a_new_token() -> None:
    """Models that draft whole blocks: every logits row is of a draft."""
    input_ids = torch.zeros(3, dtype=torch.int32)
    batch = (
        torch.tensor([0]),
        torch.tensor([[9]]),
        int32(0, 3),
        int32(8),
        int32(2),
        torch.tensor([[1, 2, 3]]),
    )
    runner.combine_sampled_and_draft_tokens(input_ids, *batch, int32(0, 3), 3, 0)
    assert input_ids.tolist() == [1, 2, 3]


def test_post_update_of_0_32_has_no_drafts() -> None:
    num_computed, last_sampled, total_len = int32(5), torch.tensor([[1]]), int32(4)
    state = (torch.zeros(1, 8, dtype=torch.int32), total_len)
    runner.post_update(
        torch.tensor([0]),
        num_computed,
        last_sampled,
        None,
        torch.tensor([[7]]),
        int32(1),
        int32(2),
        None,
        *state,
    )
    assert (num_computed.tolist(), last_sampled.tolist(), total_len.tolist()) == ([3], [[7]], [5])


def test_a_step_that_samples_nothing() -> None:
    num_computed = int32(5, 6)
    runner.post_update_num_computed_tokens(torch.tensor([1, 0]), num_computed, int32(0, 3, 4))
    assert num_computed.tolist() == [6, 9]


@pytest.mark.parametrize("name", sorted(runner.FUNCTIONS))
def test_a_bound_function_hands_over_what_is_not_on_the_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def stand_in(which: str) -> Any:
        def function(first: Tensor, second: int) -> str:
            """What the engine says of it."""
            calls.append((which, (first,), {"second": second}))
            return which

        return function

    monkeypatch.setitem(runner.FUNCTIONS, name, stand_in("ours"))
    stock = stand_in("stock")
    bound = runner.bind(name, stock)
    assert inspect.signature(bound) == inspect.signature(stock)
    assert bound.__doc__ == stock.__doc__
    for device, which in (("cpu", "ours"), ("meta", "stock")):
        tensor = torch.zeros(1, device=device)
        assert bound(tensor, 3) == bound(tensor, second=3) == bound(second=3, first=tensor) == which
        assert all(call[0] == which and call[1][0] is tensor and call[2] == {"second": 3} for call in calls)
        calls.clear()


def test_every_function_has_its_name_in_vllm_and_its_importers() -> None:
    assert runner.FUNCTIONS.keys() == runner.IMPORTERS.keys()
    for name, function in runner.FUNCTIONS.items():
        module, _, attribute = name.rpartition(".")
        assert function.__name__ == attribute
        assert module.startswith(GPU)
        assert module not in runner.IMPORTERS[name]

"""The adapters under the names of vLLM's kernels, without vLLM: its dtypes, buffers and flags."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from specdec_ops.integrations.vllm import sampling_kernels
from specdec_ops.integrations.vllm.sampling_kernels import KERNELS
from torch import Tensor

INT32 = torch.int32


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=INT32)


def launch(kernel: str, **arguments: Any) -> None:
    """As vLLM does: every parameter, by name."""
    [function] = [function for name, function in KERNELS.items() if name.endswith(f".{kernel}")]
    assert list(inspect.signature(function).parameters) == list(arguments)
    assert function(**arguments) is None


def test_functions_have_the_kernels_names() -> None:
    for name, function in KERNELS.items():
        assert function is getattr(sampling_kernels, name.rpartition(".")[2])
        assert function.__name__ == name.rpartition(".")[2]


def greedy(**changes: Any) -> list[list[int]]:
    output = torch.full((3, 3), -1, dtype=INT32)
    arguments = {
        "output_token_ids_ptr": output,
        "cu_num_draft_tokens_ptr": ints(2, 2, 4),
        "draft_token_ids_ptr": ints(5, 6, 5, -1),
        "target_argmax_ptr": torch.tensor([5, 6, 7, 8]),
        "bonus_token_ids_ptr": torch.tensor([[1], [2], [3]]),
        "is_greedy_ptr": None,
        "max_spec_len": 2,
        "uniform_probs_ptr": None,
        "synthetic_conditional_rates_ptr": None,
        "SYNTHETIC_MODE": False,
    }
    launch("rejection_greedy_sample_kernel", **{**arguments, **changes})
    return output.tolist()


def test_greedy() -> None:
    assert greedy() == [[5, 6, 1], [2, -1, -1], [7, -1, -1]]
    is_greedy = torch.tensor([False, True, True])
    assert greedy(is_greedy_ptr=is_greedy) == [[-1] * 3, [2, -1, -1], [7, -1, -1]]


def test_greedy_and_synthetic() -> None:
    uniforms = torch.tensor([0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
    rates = torch.tensor([0.25, 1.0, 1.0])
    options = {"uniform_probs_ptr": uniforms, "synthetic_conditional_rates_ptr": rates}
    assert greedy(**options, SYNTHETIC_MODE=True) == [[5, -1, -1], [2, -1, -1], [5, 8, -1]]
    assert greedy(**options, SYNTHETIC_MODE=False) == greedy()


def at_random(**changes: Any) -> list[list[int]]:
    output = torch.full((3, 3), -1, dtype=INT32)
    arguments = {
        "output_token_ids_ptr": output,
        "cu_num_draft_tokens_ptr": ints(2, 2, 4),
        "draft_token_ids_ptr": ints(0, 1, 2, -1),
        "draft_probs_ptr": torch.full((4, 3), 0.5),
        "target_probs_ptr": torch.full((4, 3), 0.25),
        "bonus_token_ids_ptr": torch.tensor([[7], [8], [9]]),
        "recovered_token_ids_ptr": ints(10, 11, 12, 13),
        "uniform_probs_ptr": torch.tensor([0.1, 0.3, 0.5, 0.0], dtype=torch.float64),
        "is_greedy_ptr": torch.tensor([False, False, False]),
        "max_spec_len": 2,
        "vocab_size": 3,
        "synthetic_conditional_rates_ptr": None,
        "NO_DRAFT_PROBS": False,
        "SYNTHETIC_MODE": False,
    }
    launch("rejection_random_sample_kernel", **{**arguments, **changes})
    return output.tolist()


def test_random() -> None:
    assert at_random() == [[0, 1, 7], [8, -1, -1], [2, 13, -1]]
    is_greedy = torch.tensor([True, True, False])
    assert at_random(is_greedy_ptr=is_greedy) == [[-1] * 3, [-1] * 3, [2, 13, -1]]


@pytest.mark.parametrize("draft_probs", [None, torch.full((4, 3), 0.5)])
def test_random_without_draft_probs(draft_probs: Tensor | None) -> None:
    """The flag decides, whatever tensor is there."""
    emitted = at_random(draft_probs_ptr=draft_probs, NO_DRAFT_PROBS=True)
    assert emitted == [[0, 11, -1], [8, -1, -1], [12, -1, -1]]


def test_random_and_synthetic() -> None:
    options = {"synthetic_conditional_rates_ptr": torch.tensor([0.2, 0.2])}
    assert at_random(**options, SYNTHETIC_MODE=True) == [[0, 11, -1], [8, -1, -1], [12, -1, -1]]
    assert at_random(**options) == at_random()


@pytest.mark.parametrize(
    ("values", "replace", "expected"),
    [
        (torch.tensor([0.7, 0.0, 0.5]), (0, 1), [0.7, 0.7, 0.5, 0.5]),
        (torch.tensor([0.0, 0.2, 0.0]), (0, 1), [1.0, 1.0, 1.0, 1.0]),
        (ints(50, 20, 0), (0, 0), [50, 50, 0, 0]),
        (torch.tensor([2**40, 0, 1]), (0, 0), [2**40, 2**40, 1, 1]),
    ],
)
def test_expand(values: Tensor, replace: tuple[int, int], expected: list[float]) -> None:
    output = values.new_empty(4)
    launch(
        "expand_kernel",
        output_ptr=output,
        input_ptr=values,
        cu_num_tokens_ptr=ints(2, 2, 4),
        replace_from=replace[0],
        replace_to=replace[1],
        MAX_NUM_TOKENS=128,
    )
    assert torch.equal(output, torch.tensor(expected, dtype=values.dtype))


@pytest.mark.parametrize("no_draft_probs", [False, True])
@pytest.mark.parametrize("noise_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2,), (2, 1)])
def test_recovered(no_draft_probs: bool, noise_dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Drafts in a row or in a column."""
    output, rows = ints(-9, -9).view(shape), torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    launch(
        "sample_recovered_tokens_kernel",
        output_token_ids_ptr=output,
        cu_num_draft_tokens_ptr=ints(1, 2),
        draft_token_ids_ptr=ints(0, 1).view(shape),
        draft_probs_ptr=torch.tensor([[0.5, 0.1, 0.1], [0.5, 0.3, 0.0]]),
        target_probs_ptr=rows,
        inv_q_ptr=torch.ones(2, 3, dtype=noise_dtype),
        vocab_size=3,
        BLOCK_SIZE=8192,
        NO_DRAFT_PROBS=no_draft_probs,
        USE_FP64_GUMBEL=noise_dtype == torch.float64,
    )
    assert output.view(-1).tolist() == ([1, 0] if no_draft_probs else [1, 2])


@pytest.mark.parametrize("spare", [0, 3])
def test_padded_inputs(spare: int) -> None:
    """Buffers may be longer than the batch; what lies beyond it stays."""
    indices, rejected = ints(*[-9] * (3 + spare)), ints(*[-9] * (3 + spare))
    launch(
        "eagle_prepare_inputs_padded_kernel",
        cu_num_draft_tokens_ptr=ints(3, 3, 6, *[99] * spare),
        valid_sampled_tokens_count_ptr=ints(2, 1, 4, *[99] * spare),
        query_start_loc_gpu_ptr=ints(0, 4, 9, 13, *[99] * spare),
        token_indices_to_sample_ptr=indices,
        num_rejected_tokens_gpu_ptr=rejected,
        num_reqs=3,
    )
    assert indices.tolist() == [1, 8, 12] + [-9] * spare
    assert rejected.tolist() == [2, 0, 0] + [-9] * spare


@pytest.mark.parametrize("spare", [0, 3])
def test_padded_next_tokens(spare: int) -> None:
    next_ids, counts = ints(*[-9] * (2 + spare)), ints(*[-9] * (2 + spare))
    rows = torch.full((2 + spare, 3 + spare), 7, dtype=INT32)
    rows[:2, :3] = torch.tensor([[5, 6, -1], [5, 6, 7]])
    launch(
        "eagle_prepare_next_token_padded_kernel",
        sampled_token_ids_ptr=rows,
        discard_request_mask_ptr=torch.tensor([False, True] + [False] * spare),
        backup_next_token_ids_ptr=ints(1, 2, 3, 4, 5, 6, 7, 8),
        next_token_ids_ptr=next_ids,
        valid_sampled_tokens_count_ptr=counts,
        vocab_size=10,
        num_sampled_tokens_per_req=3,
        num_reqs=2,
        stride_sampled_token_ids=rows.stride(0),
        BLOCK_SIZE_TOKENS=4,
    )
    assert next_ids.tolist() == [6, 2] + [-9] * spare
    assert counts.tolist() == [2, 0] + [-9] * spare

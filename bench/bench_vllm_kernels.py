"""The preparation ops as vLLM launches them: through our adapters, and through its own for CPU."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import _vllm
import pytest
import torch
from _cases import PREPARATION, Case, Inputs
from _interleave import Call
from _suite import OURS, Calls, Suite
from specdec_ops.integrations.vllm import drafting_kernels, sampling_kernels
from torch import Tensor

BLOCK_SIZE, MAX_MODEL_LEN = 16, 4096
#: The runner's buffers are as long as its largest batch of tokens.
BUFFER_LEN = 2048


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that both have, and what the engine gives it."""

    ours: Callable[..., None]
    #: In vllm.utils.cpu_triton_utils.
    stock: str
    #: In the kernel's order of parameters; those named in `outputs` are written to.
    arguments: Callable[[Inputs], dict[str, Any]]
    outputs: Sequence[str]
    #: False where vLLM's own result is wrong: see the fault in README.md.
    stock_is_right: bool = True


def _counts(inputs: Inputs) -> Tensor:
    """Emitted tokens of each request, from 1 to k + 1."""
    return (inputs.seeds % (inputs.case.num_drafts + 1) + 1).to(torch.int32)


def _emitted(inputs: Inputs) -> Tensor:
    slots = torch.arange(inputs.case.num_drafts + 1)
    ids = inputs.seeds.unsqueeze(1) % 64 * torch.ones_like(slots)
    return torch.where(slots < _counts(inputs).unsqueeze(1), ids, -1).to(torch.int32)


def _block_table(inputs: Inputs) -> Tensor:
    blocks = torch.arange(inputs.case.batch * (MAX_MODEL_LEN // BLOCK_SIZE), dtype=torch.int32)
    return blocks.view(inputs.case.batch, -1)


def _query_start_loc(inputs: Inputs) -> Tensor:
    return torch.arange(inputs.case.batch + 1, dtype=torch.int32) * (inputs.case.num_drafts + 1)


def _token_positions(inputs: Inputs) -> Tensor:
    return (inputs.positions.unsqueeze(1) + torch.arange(inputs.case.num_drafts + 1)).flatten()


def _buffer(size: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(size, dtype=dtype)


def greedy(inputs: Inputs) -> dict[str, Any]:
    batch, k = inputs.case.batch, inputs.case.num_drafts
    return {
        "output": torch.full((batch, k + 1), -1, dtype=torch.int32),
        "cu_num_draft_tokens": inputs.cu_num_draft_tokens[1:],
        "draft_token_ids": inputs.draft_token_ids,
        "target_argmax": inputs.draft_token_ids.long(),
        "bonus_token_ids": torch.zeros(batch, 1, dtype=torch.int32),
        "is_greedy": None,
        "max_spec_len": k,
        "uniforms": None,
        "rates": None,
        "SYNTHETIC_MODE": False,
    }


def random(inputs: Inputs) -> dict[str, Any]:
    batch, k = inputs.case.batch, inputs.case.num_drafts
    probs = inputs.target_logits[inputs.target_rows].softmax(dim=1)
    return {
        "output": torch.full((batch, k + 1), -1, dtype=torch.int32),
        "cu_num_draft_tokens": inputs.cu_num_draft_tokens[1:],
        "draft_token_ids": inputs.draft_token_ids,
        "draft_probs": None,
        "target_probs": probs,
        "bonus_token_ids": torch.zeros(batch, 1, dtype=torch.int32),
        "recovered_token_ids": torch.zeros_like(inputs.draft_token_ids),
        "uniforms": torch.full((batch * k,), 0.5, dtype=torch.float64),
        "is_greedy": torch.zeros(batch, dtype=torch.bool),
        "max_spec_len": k,
        "vocab_size": probs.shape[1],
        "rates": None,
        "NO_DRAFT_PROBS": True,
        "SYNTHETIC_MODE": False,
    }


def expand(inputs: Inputs) -> dict[str, Any]:
    return {
        "output": torch.zeros(inputs.draft_token_ids.shape[0]),
        "input": inputs.temperature,
        "cu_num_tokens": inputs.cu_num_draft_tokens[1:],
        "replace_from": 0,
        "replace_to": 1,
        "MAX_NUM_TOKENS": 128,
    }


def padded_inputs(inputs: Inputs) -> dict[str, Any]:
    batch = inputs.case.batch
    return {
        "cu_num_draft_tokens": inputs.cu_num_draft_tokens[1:],
        "valid_sampled_tokens_count": _counts(inputs),
        "query_start_loc": _query_start_loc(inputs),
        "token_indices": _buffer(batch, torch.int32),
        "num_rejected": _buffer(batch, torch.int32),
        "num_reqs": batch,
    }


def next_token(inputs: Inputs) -> dict[str, Any]:
    batch, width = inputs.case.batch, inputs.case.num_drafts + 1
    return {
        "sampled_token_ids": _emitted(inputs),
        "discard_request_mask": torch.zeros(batch, dtype=torch.bool),
        "backup": _buffer(batch, torch.int32),
        "next_token_ids": _buffer(batch, torch.int32),
        "count": _buffer(batch, torch.int32),
        "vocab_size": 64,
        "num_sampled_tokens_per_req": width,
        "num_reqs": batch,
        "stride": width,
        "BLOCK_SIZE_TOKENS": 4,
    }


def step(inputs: Inputs) -> dict[str, Any]:
    batch = inputs.case.batch
    table = _block_table(inputs)
    return {
        "positions": inputs.positions,
        "block_table": table,
        "block_table_stride": table.stride(0),
        "seq_lens": (inputs.positions + 1).to(torch.int32),
        "out_positions": _buffer(batch, torch.int64),
        "out_slot_mapping": _buffer(batch, torch.int64),
        "block_size": BLOCK_SIZE,
        "max_model_len": MAX_MODEL_LEN,
        "n_blocks_per_req": table.shape[1],
        "PAD_ID": -1,
        "batch_size": batch,
    }


def eagle(inputs: Inputs) -> dict[str, Any]:
    batch, k = inputs.case.batch, inputs.case.num_drafts
    starts = _query_start_loc(inputs)
    num_tokens = batch * (k + 1)
    return {
        "target_token_ids": torch.ones(num_tokens, dtype=torch.int32),
        "target_positions": _token_positions(inputs),
        "next_token_ids": torch.ones(batch, dtype=torch.int32),
        "input_ids": _buffer(BUFFER_LEN, torch.int32),
        "positions": _buffer(BUFFER_LEN, torch.int64),
        "is_rejected": _buffer(BUFFER_LEN, torch.bool),
        "is_masked": _buffer(BUFFER_LEN, torch.bool),
        "new_token_indices": _buffer(batch * k, torch.int32),
        "hidden_state_mapping": _buffer(num_tokens, torch.int32),
        "query_start_loc": starts,
        "query_end_loc": starts[:-1] + _counts(inputs) - 1,
        "padding_token_id": 0,
        "parallel_drafting_token_id": 63,
        "total_input_tokens": num_tokens,
        "num_padding_slots_per_request": k,
        "shift_input_ids": True,
        "BLOCK_SIZE_TOKENS": 8,
    }


def dflash(inputs: Inputs) -> dict[str, Any]:
    batch, k = inputs.case.batch, inputs.case.num_drafts
    table = _block_table(inputs)
    return {
        "next_token_ids": torch.ones(batch, dtype=torch.int32),
        "target_positions": _token_positions(inputs),
        "input_ids": _buffer(BUFFER_LEN, torch.int32),
        "context_positions": _buffer(BUFFER_LEN, torch.int64),
        "query_positions": _buffer(BUFFER_LEN, torch.int64),
        "context_slot_mapping": _buffer(BUFFER_LEN, torch.int64),
        "query_slot_mapping": _buffer(BUFFER_LEN, torch.int64),
        "token_indices": _buffer(batch * k, torch.int32),
        "block_table": table,
        "block_table_stride": table.stride(0),
        "query_start_loc": _query_start_loc(inputs),
        "num_rejected": (k + 1 - _counts(inputs)).to(torch.int32),
        "parallel_drafting_token_id": 63,
        "block_size": BLOCK_SIZE,
        "num_query_per_req": k + 1,
        "num_speculative_tokens": k,
        "total_input_tokens": batch * (k + 1),
        "BLOCK_SIZE": 8,
        "HAS_NUM_REJECTED": True,
    }


def slots(inputs: Inputs) -> dict[str, Any]:
    table = _block_table(inputs)
    return {
        "num_tokens": inputs.case.batch * (inputs.case.num_drafts + 1),
        "max_num_tokens": BUFFER_LEN,
        "query_start_loc": _query_start_loc(inputs),
        "positions": _token_positions(inputs),
        "block_table": table,
        "block_table_stride": table.stride(0),
        # The stock adapter leaves the padding as it is, ours writes it.
        "slot_mapping": torch.full((BUFFER_LEN,), -1),
        "KV_CACHE_BLOCK_SIZE": BLOCK_SIZE,
        "TOTAL_CP_WORLD_SIZE": 1,
        "TOTAL_CP_RANK": 0,
        "CP_KV_CACHE_INTERLEAVE_SIZE": 1,
        "PAD_ID": -1,
        "BLOCK_SIZE": 1024,
    }


KERNELS = {
    "rejection_greedy_sample": Kernel(
        sampling_kernels.rejection_greedy_sample_kernel,
        "_rejection_greedy_sample_kernel_impl",
        greedy,
        ["output"],
    ),
    "rejection_random_sample": Kernel(
        sampling_kernels.rejection_random_sample_kernel,
        "_rejection_random_sample_kernel_impl",
        random,
        ["output"],
    ),
    "expand": Kernel(
        sampling_kernels.expand_kernel, "_expand_kernel_impl", expand, ["output"], stock_is_right=False
    ),
    "eagle_prepare_inputs_padded": Kernel(
        sampling_kernels.eagle_prepare_inputs_padded_kernel,
        "_eagle_prepare_inputs_padded_kernel_impl",
        padded_inputs,
        ["token_indices", "num_rejected"],
    ),
    "eagle_prepare_next_token_padded": Kernel(
        sampling_kernels.eagle_prepare_next_token_padded_kernel,
        "_eagle_prepare_next_token_padded_kernel_impl",
        next_token,
        ["next_token_ids", "count"],
    ),
    "eagle_step_slot_mapping_metadata": Kernel(
        drafting_kernels.eagle_step_slot_mapping_metadata_kernel,
        "_eagle_step_slot_mapping_metadata_kernel_impl",
        step,
        ["out_positions", "out_slot_mapping"],
    ),
    "copy_and_expand_eagle_inputs": Kernel(
        drafting_kernels.copy_and_expand_eagle_inputs_kernel,
        "_copy_and_expand_eagle_inputs_kernel_impl",
        eagle,
        ["input_ids", "positions", "is_rejected", "is_masked", "new_token_indices", "hidden_state_mapping"],
    ),
    "copy_and_expand_dflash_inputs": Kernel(
        drafting_kernels.copy_and_expand_dflash_inputs_kernel,
        "_copy_and_expand_dflash_inputs_kernel_impl",
        dflash,
        [
            "input_ids",
            "context_positions",
            "query_positions",
            "context_slot_mapping",
            "query_slot_mapping",
            "token_indices",
        ],
    ),
    "compute_slot_mapping": Kernel(
        drafting_kernels.compute_slot_mapping_kernel,
        "_compute_slot_mapping_kernel_impl",
        slots,
        ["slot_mapping"],
    ),
}


def _call(kernel: Kernel, function: Callable[..., None], inputs: Inputs) -> Call:
    """A launch on buffers of its own, which returns what it wrote."""
    arguments = kernel.arguments(inputs)
    outputs = [arguments[name] for name in kernel.outputs]
    values = tuple(arguments.values())

    def call() -> list[Tensor]:
        function(*values)
        return outputs

    return call


def _stock(kernel: Kernel, inputs: Inputs) -> Call:
    _vllm.load()
    return _call(
        kernel, getattr(importlib.import_module("vllm.utils.cpu_triton_utils"), kernel.stock), inputs
    )


def _check(kernel: Kernel, sets: Sequence[Inputs], calls: Calls) -> Mapping[str, float]:
    """Both write the same, where vLLM's is right."""
    for inputs, ours, stock in zip(sets, calls[OURS], calls["vllm"], strict=True):
        written = ours()
        if kernel.stock_is_right:
            for one, other in zip(written, stock(), strict=True):
                assert torch.equal(one, other)
        else:
            assert torch.equal(written[0], inputs.temperature.repeat_interleave(inputs.case.num_drafts))
    return {}


SUITES = [
    Suite(
        name=name,
        cases=(PREPARATION,),
        implementations={
            OURS: lambda inputs, kernel=kernel: _call(kernel, kernel.ours, inputs),
            "vllm": functools.partial(_stock, kernel),
        },
        check=functools.partial(_check, kernel),
        calls_per_sample=50,
    )
    for name, kernel in KERNELS.items()
]


@pytest.mark.parametrize(
    ("suite", "case", "implementation"),
    [(suite, *rest) for suite in SUITES for rest in suite.parameters()] if _vllm.present() else (),
    ids=lambda value: value.name if isinstance(value, Suite) else str(value),
)
def test_vllm_kernels(
    suite: Suite, case: Case, implementation: str, side_by_side: Callable[[Suite, Case, str], None]
) -> None:
    side_by_side(suite, case, implementation)

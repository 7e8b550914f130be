"""The ops under vLLM's kernel names and argument lists, called as vLLM calls them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any

import pytest
import specdec_ops
import torch
from specdec_ops.integrations.vllm import drafting_kernels
from torch import Tensor

#: The parameters of vLLM 0.32's and 0.33's kernels, in order.
PARAMETERS = {
    "vllm.v1.spec_decode.utils.eagle_step_slot_mapping_metadata_kernel": (
        "positions_ptr block_table_ptr block_table_stride seq_lens_ptr out_clamped_positions_ptr "
        "out_slot_mapping_ptr block_size max_model_len n_blocks_per_req PAD_ID batch_size"
    ),
    "vllm.v1.spec_decode.utils.copy_and_expand_eagle_inputs_kernel": (
        "target_token_ids_ptr target_positions_ptr next_token_ids_ptr out_input_ids_ptr out_positions_ptr "
        "out_is_rejected_token_mask_ptr out_is_masked_token_mask_ptr out_new_token_indices_ptr "
        "out_hidden_state_mapping_ptr query_start_loc_ptr query_end_loc_ptr padding_token_id "
        "parallel_drafting_token_id total_input_tokens num_padding_slots_per_request shift_input_ids "
        "BLOCK_SIZE_TOKENS"
    ),
    "vllm.v1.spec_decode.utils.copy_and_expand_dflash_inputs_kernel": (
        "next_token_ids_ptr target_positions_ptr out_input_ids_ptr out_context_positions_ptr "
        "out_query_positions_ptr out_context_slot_mapping_ptr out_query_slot_mapping_ptr "
        "out_token_indices_ptr block_table_ptr block_table_stride query_start_loc_ptr "
        "num_rejected_tokens_ptr parallel_drafting_token_id block_size num_query_per_req "
        "num_speculative_tokens total_input_tokens BLOCK_SIZE HAS_NUM_REJECTED"
    ),
    "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": (
        "num_tokens max_num_tokens query_start_loc_ptr positions_ptr block_table_ptr block_table_stride "
        "slot_mapping_ptr KV_CACHE_BLOCK_SIZE TOTAL_CP_WORLD_SIZE TOTAL_CP_RANK "
        "CP_KV_CACHE_INTERLEAVE_SIZE PAD_ID BLOCK_SIZE"
    ),
}


def launch(name: str, *values: Any) -> None:
    """Forwards by name, as vLLM's override of a kernel does."""
    names = PARAMETERS[name].split()
    drafting_kernels.KERNELS[name](**dict(zip(names, values, strict=True)))


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_kernels(name: str) -> None:
    """Otherwise vLLM forwards by position."""
    assert tuple(inspect.signature(drafting_kernels.KERNELS[name]).parameters) == tuple(
        PARAMETERS[name].split()
    )


def test_every_kernel_is_listed() -> None:
    assert drafting_kernels.KERNELS.keys() == PARAMETERS.keys()


def test_eagle_step() -> None:
    """Positions 50 and 98 of 100 go on, 99 and 100 are past the end; two slots are graph padding."""
    positions, seq_lens = torch.tensor([50, 98, 99, 100]), int32(51, 99, 100, 101)
    table = torch.arange(28, dtype=torch.int32).reshape(4, 7)
    slots = torch.zeros(6, dtype=torch.int64)
    launch(
        "vllm.v1.spec_decode.utils.eagle_step_slot_mapping_metadata_kernel",
        *(positions, table, table.stride(0), seq_lens, positions, slots, 16, 100, 7, -1, 4),
    )
    assert positions.tolist() == [51, 99, 0, 0]
    assert slots.tolist() == [3 * 16 + 3, 13 * 16 + 3, -1, -1, -1, -1]
    assert seq_lens.tolist() == [52, 100, 1, 1]


@pytest.mark.parametrize("shift", [False, True])
def test_eagle_inputs(shift: bool) -> None:
    """The dtypes and buffers of vLLM's proposer: int32 ids, int64 positions, longer than the batch."""
    ids, positions = int32(10, 11, 12, 20, 21), torch.tensor([5, 6, 7, 0, 1])
    next_ids, starts, ends = int32(40, 50), int32(0, 3, 5), int32(1, 4)
    out_ids, out_positions = torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int64)
    rejected, masked = torch.zeros(2, 16, dtype=torch.bool)
    indices, mapping = torch.zeros(6, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    launch(
        "vllm.v1.spec_decode.utils.copy_and_expand_eagle_inputs_kernel",
        *(ids, positions, next_ids, out_ids, out_positions, rejected, masked, indices, mapping),
        *(starts, ends, 0, 99, 5, 3, shift, 8),
    )
    want = specdec_ops.expand_draft_inputs(
        ids,
        positions,
        next_ids,
        starts,
        ends,
        padding_token_id=0,
        parallel_drafting_token_id=99,
        num_padding_slots_per_request=3,
        shift_input_ids=shift,
    )
    size = want.input_ids.shape[0]
    assert torch.equal(out_ids[:size], want.input_ids)
    assert torch.equal(out_positions[:size], want.positions)
    assert torch.equal(rejected[:size], want.is_rejected_token_mask)
    assert torch.equal(masked[:size], want.is_masked_token_mask)
    assert torch.equal(indices, want.new_token_indices)
    assert mapping.tolist() == ([0, 1, 2, 5, 6] if shift else [0] * 5)


@pytest.mark.parametrize("has_rejected", [False, True])
def test_dflash_inputs(has_rejected: bool) -> None:
    """Without rejected tokens vLLM passes 0 for their tensor, and may leave the flag at its default."""
    positions, next_ids, starts = torch.tensor([5, 6, 7, 0, 1]), int32(40, 50), int32(0, 3, 5)
    table, rejected = torch.tensor([[7, 2, 9], [4, 1, 0]], dtype=torch.int32), int32(1, 0)
    out_ids, indices = torch.zeros(16, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    context, queries, context_slots, query_slots = torch.zeros(4, 16, dtype=torch.int64)
    name = "vllm.v1.spec_decode.utils.copy_and_expand_dflash_inputs_kernel"
    launch(
        name,
        *(next_ids, positions, out_ids, context, queries, context_slots, query_slots, indices),
        *(table, 3, starts, rejected if has_rejected else 0, 99, 4, 3, 2, 5, 8, has_rejected),
    )
    want = specdec_ops.expand_dflash_inputs(
        next_ids,
        positions,
        table,
        starts,
        rejected if has_rejected else None,
        parallel_drafting_token_id=99,
        block_size=4,
        num_queries_per_request=3,
        num_speculative_tokens=2,
    )
    for got, expected in zip(
        (out_ids, context, queries, context_slots, query_slots, indices), want, strict=True
    ):
        assert torch.equal(got[: expected.shape[0]], expected)
    flag = inspect.signature(drafting_kernels.KERNELS[name]).parameters["HAS_NUM_REJECTED"]
    assert flag.default is False


def test_slot_mapping() -> None:
    """The whole buffer is written, as for a captured graph."""
    slots, table = torch.zeros(6, dtype=torch.int64), torch.tensor([[7, 2], [5, 6]], dtype=torch.int32)
    launch(
        "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel",
        *(3, 6, int32(0, 2, 3), torch.tensor([3, 4, 5]), table, 2, slots, 4, 1, 0, 1, -1, 1024),
    )
    assert slots.tolist() == [31, 8, 25, -1, -1, -1]


def test_a_cache_over_several_ranks_is_refused() -> None:
    slots = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"TOTAL_CP_WORLD_SIZE must be 1, .* got 2"):
        launch(
            "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel",
            *(1, 3, int32(0, 1), torch.tensor([3]), torch.zeros(1, 2, dtype=torch.int32), 2),
            *(slots, 4, 2, 0, 1, -1, 1024),
        )
    assert slots.tolist() == [0, 0, 0]


def test_vllm_is_not_needed() -> None:
    """Nothing of it is imported, installed or not."""
    code = (
        "import sys; sys.modules['vllm'] = None; "
        "from specdec_ops.integrations.vllm import drafting_kernels; "
        "assert not [name for name in sys.modules if name.startswith('vllm.')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

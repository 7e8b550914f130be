"""Our ops under the names and argument lists of vLLM's kernels that prepare a draft model's inputs.

vLLM launches a kernel as ``kernel[grid](**arguments)``; a replacement gets the arguments without the grid.
Parameters have the kernel's names, so that they can be forwarded by name. Block sizes of the launch, and the
strides and sizes that tensors know themselves, are not used.

Valid inputs give vLLM's results. Elsewhere its kernels read out of bounds or write to another token's slot,
and these give what the ops document.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specdec_ops.ops import (
    advance_draft_step,
    compute_slot_mapping,
    expand_dflash_inputs,
    expand_draft_inputs,
)

# The ops themselves: at a batch of 16 another Python frame would be a tenth of the call.
_advance_draft_step = advance_draft_step._op
_compute_slot_mapping = compute_slot_mapping._op
_expand_dflash_inputs = expand_dflash_inputs._op
_expand_draft_inputs = expand_draft_inputs._op


def eagle_step_slot_mapping_metadata_kernel(
    positions_ptr: Tensor,
    block_table_ptr: Tensor,
    block_table_stride: int,
    seq_lens_ptr: Tensor,
    out_clamped_positions_ptr: Tensor,
    out_slot_mapping_ptr: Tensor,
    block_size: int,
    max_model_len: int,
    n_blocks_per_req: int,
    PAD_ID: int,
    batch_size: int,
) -> None:
    """``advance_draft_step_`` as ``vllm.v1.spec_decode.utils`` calls it."""
    _advance_draft_step(
        positions_ptr,
        block_table_ptr,
        seq_lens_ptr,
        out_clamped_positions_ptr,
        out_slot_mapping_ptr,
        block_size,
        max_model_len,
        PAD_ID,
    )


def copy_and_expand_eagle_inputs_kernel(
    target_token_ids_ptr: Tensor,
    target_positions_ptr: Tensor,
    next_token_ids_ptr: Tensor,
    out_input_ids_ptr: Tensor,
    out_positions_ptr: Tensor,
    out_is_rejected_token_mask_ptr: Tensor,
    out_is_masked_token_mask_ptr: Tensor,
    out_new_token_indices_ptr: Tensor,
    out_hidden_state_mapping_ptr: Tensor,
    query_start_loc_ptr: Tensor,
    query_end_loc_ptr: Tensor,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    total_input_tokens: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
    BLOCK_SIZE_TOKENS: int,
) -> None:
    """``expand_draft_inputs_`` as ``vllm.v1.spec_decode.llm_base_proposer`` calls it."""
    _expand_draft_inputs(
        target_token_ids_ptr,
        target_positions_ptr,
        next_token_ids_ptr,
        query_start_loc_ptr,
        query_end_loc_ptr,
        out_input_ids_ptr,
        out_positions_ptr,
        out_is_rejected_token_mask_ptr,
        out_is_masked_token_mask_ptr,
        out_new_token_indices_ptr,
        out_hidden_state_mapping_ptr,
        padding_token_id,
        parallel_drafting_token_id,
        num_padding_slots_per_request,
        shift_input_ids,
    )


def copy_and_expand_dflash_inputs_kernel(
    next_token_ids_ptr: Tensor,
    target_positions_ptr: Tensor,
    out_input_ids_ptr: Tensor,
    out_context_positions_ptr: Tensor,
    out_query_positions_ptr: Tensor,
    out_context_slot_mapping_ptr: Tensor,
    out_query_slot_mapping_ptr: Tensor,
    out_token_indices_ptr: Tensor,
    block_table_ptr: Tensor,
    block_table_stride: int,
    query_start_loc_ptr: Tensor,
    num_rejected_tokens_ptr: Tensor | int,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_tokens: int,
    total_input_tokens: int,
    BLOCK_SIZE: int,
    HAS_NUM_REJECTED: bool = False,
) -> None:
    """``expand_dflash_inputs_`` as ``vllm.v1.spec_decode.dflash`` calls it."""
    _expand_dflash_inputs(
        next_token_ids_ptr,
        target_positions_ptr,
        block_table_ptr,
        query_start_loc_ptr,
        num_rejected_tokens_ptr if HAS_NUM_REJECTED else None,
        out_input_ids_ptr,
        out_context_positions_ptr,
        out_query_positions_ptr,
        out_context_slot_mapping_ptr,
        out_query_slot_mapping_ptr,
        out_token_indices_ptr,
        parallel_drafting_token_id,
        block_size,
        num_query_per_req,
        num_speculative_tokens,
    )


def compute_slot_mapping_kernel(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc_ptr: Tensor,
    positions_ptr: Tensor,
    block_table_ptr: Tensor,
    block_table_stride: int,
    slot_mapping_ptr: Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """``compute_slot_mapping_`` as ``vllm.v1.worker.block_table`` calls it.

    Raises:
        NotImplementedError: The cache is spread over several ranks.
    """
    if TOTAL_CP_WORLD_SIZE != 1:
        raise NotImplementedError(
            "compute_slot_mapping_: TOTAL_CP_WORLD_SIZE must be 1, since a cache that is spread over several "
            f"context-parallel ranks is not supported, got {TOTAL_CP_WORLD_SIZE}"
        )
    _compute_slot_mapping(
        query_start_loc_ptr, positions_ptr, block_table_ptr, slot_mapping_ptr, KV_CACHE_BLOCK_SIZE, PAD_ID
    )


#: By the names that ``vllm.triton_utils.dispatcher.register_kernels`` takes.
KERNELS: dict[str, Callable[..., None]] = {
    **{
        f"vllm.v1.spec_decode.utils.{kernel.__name__}": kernel
        for kernel in (
            eagle_step_slot_mapping_metadata_kernel,
            copy_and_expand_eagle_inputs_kernel,
            copy_and_expand_dflash_inputs_kernel,
        )
    },
    "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel": compute_slot_mapping_kernel,
}

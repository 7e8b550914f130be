"""Our ops under the names and argument lists of vLLM's kernels that verify drafts and prepare the next ones.

vLLM launches a kernel as ``kernel[grid](**arguments)``; a replacement gets the arguments without the grid.
Names must be the kernel's own: then they are forwarded by name. What only a launch on a GPU needs (block
sizes of the program grid, strides and sizes that the tensors know themselves) is not used.

Valid inputs give vLLM's results. A draft id outside the vocabulary is rejected, and an id below -1 is no
sampled token; vLLM's kernels read out of bounds with the first and go on from the second.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specdec_ops.ops import (
    expand_to_drafts,
    prepare_next_tokens,
    prepare_padded_draft_inputs,
    sample_recovered_probs,
    verify_argmax,
    verify_probs,
)

# The ops themselves: at a batch of 16 another Python frame would be a tenth of the call.
_expand_to_drafts = expand_to_drafts._op
_prepare_next_tokens = prepare_next_tokens._op
_prepare_padded_draft_inputs = prepare_padded_draft_inputs._op
_sample_recovered_probs = sample_recovered_probs._op
_verify_argmax = verify_argmax._op
_verify_probs = verify_probs._op


def rejection_greedy_sample_kernel(
    output_token_ids_ptr: Tensor,
    cu_num_draft_tokens_ptr: Tensor,
    draft_token_ids_ptr: Tensor,
    target_argmax_ptr: Tensor,
    bonus_token_ids_ptr: Tensor,
    is_greedy_ptr: Tensor | None,
    max_spec_len: int,
    uniform_probs_ptr: Tensor | None,
    synthetic_conditional_rates_ptr: Tensor | None,
    SYNTHETIC_MODE: bool,
) -> None:
    """``verify_argmax_`` as ``vllm.v1.sample.rejection_sampler`` calls it."""
    _verify_argmax(
        target_argmax_ptr,
        draft_token_ids_ptr,
        cu_num_draft_tokens_ptr,
        bonus_token_ids_ptr,
        is_greedy_ptr,
        synthetic_conditional_rates_ptr if SYNTHETIC_MODE else None,
        uniform_probs_ptr,
        output_token_ids_ptr,
    )


def rejection_random_sample_kernel(
    output_token_ids_ptr: Tensor,
    cu_num_draft_tokens_ptr: Tensor,
    draft_token_ids_ptr: Tensor,
    draft_probs_ptr: Tensor | None,
    target_probs_ptr: Tensor,
    bonus_token_ids_ptr: Tensor,
    recovered_token_ids_ptr: Tensor,
    uniform_probs_ptr: Tensor,
    is_greedy_ptr: Tensor,
    max_spec_len: int,
    vocab_size: int,
    synthetic_conditional_rates_ptr: Tensor | None,
    NO_DRAFT_PROBS: bool,
    SYNTHETIC_MODE: bool,
) -> None:
    """``verify_probs_`` as ``vllm.v1.sample.rejection_sampler`` calls it."""
    _verify_probs(
        target_probs_ptr,
        draft_token_ids_ptr,
        cu_num_draft_tokens_ptr,
        recovered_token_ids_ptr,
        bonus_token_ids_ptr,
        uniform_probs_ptr,
        None if NO_DRAFT_PROBS else draft_probs_ptr,
        is_greedy_ptr,
        synthetic_conditional_rates_ptr if SYNTHETIC_MODE else None,
        vocab_size,
        output_token_ids_ptr,
    )


def expand_kernel(
    output_ptr: Tensor,
    input_ptr: Tensor,
    cu_num_tokens_ptr: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int,
) -> None:
    """``expand_to_drafts_`` as ``vllm.v1.sample.rejection_sampler`` calls it."""
    _expand_to_drafts(input_ptr, cu_num_tokens_ptr, replace_from, replace_to, output_ptr)


def sample_recovered_tokens_kernel(
    output_token_ids_ptr: Tensor,
    cu_num_draft_tokens_ptr: Tensor,
    draft_token_ids_ptr: Tensor,
    draft_probs_ptr: Tensor | None,
    target_probs_ptr: Tensor,
    inv_q_ptr: Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    NO_DRAFT_PROBS: bool,
    USE_FP64_GUMBEL: bool,
) -> None:
    """``sample_recovered_probs_`` as ``vllm.v1.sample.rejection_sampler`` calls it."""
    if draft_token_ids_ptr.dim() != 1:  # a column of drafts, as torch.multinomial returns them
        draft_token_ids_ptr, output_token_ids_ptr = (
            draft_token_ids_ptr.view(-1),
            output_token_ids_ptr.view(-1),
        )
    _sample_recovered_probs(
        target_probs_ptr,
        draft_token_ids_ptr,
        cu_num_draft_tokens_ptr,
        inv_q_ptr,
        None if NO_DRAFT_PROBS else draft_probs_ptr,
        vocab_size,
        output_token_ids_ptr,
    )


def eagle_prepare_inputs_padded_kernel(
    cu_num_draft_tokens_ptr: Tensor,
    valid_sampled_tokens_count_ptr: Tensor,
    query_start_loc_gpu_ptr: Tensor,
    token_indices_to_sample_ptr: Tensor,
    num_rejected_tokens_gpu_ptr: Tensor,
    num_reqs: int,
) -> None:
    """``prepare_padded_draft_inputs_`` as ``vllm.v1.spec_decode.llm_base_proposer`` calls it."""
    if cu_num_draft_tokens_ptr.shape[0] != num_reqs:
        cu_num_draft_tokens_ptr = cu_num_draft_tokens_ptr[:num_reqs]
    if token_indices_to_sample_ptr.shape[0] != num_reqs:
        token_indices_to_sample_ptr = token_indices_to_sample_ptr[:num_reqs]
    _prepare_padded_draft_inputs(
        cu_num_draft_tokens_ptr,
        valid_sampled_tokens_count_ptr,
        query_start_loc_gpu_ptr,
        token_indices_to_sample_ptr,
        num_rejected_tokens_gpu_ptr,
    )


def eagle_prepare_next_token_padded_kernel(
    sampled_token_ids_ptr: Tensor,
    discard_request_mask_ptr: Tensor,
    backup_next_token_ids_ptr: Tensor,
    next_token_ids_ptr: Tensor,
    valid_sampled_tokens_count_ptr: Tensor,
    vocab_size: int,
    num_sampled_tokens_per_req: int,
    num_reqs: int,
    stride_sampled_token_ids: int,
    BLOCK_SIZE_TOKENS: int,
) -> None:
    """``prepare_next_tokens_`` as ``vllm.v1.spec_decode.llm_base_proposer`` calls it."""
    if sampled_token_ids_ptr.shape != (num_reqs, num_sampled_tokens_per_req):
        sampled_token_ids_ptr = sampled_token_ids_ptr[:num_reqs, :num_sampled_tokens_per_req]
    _prepare_next_tokens(
        sampled_token_ids_ptr,
        discard_request_mask_ptr,
        backup_next_token_ids_ptr,
        vocab_size,
        next_token_ids_ptr,
        valid_sampled_tokens_count_ptr,
    )


_SAMPLER = "vllm.v1.sample.rejection_sampler"
_PROPOSER = "vllm.v1.spec_decode.utils"
#: By the names that ``vllm.triton_utils.dispatcher.register_kernels`` takes.
KERNELS: dict[str, Callable[..., None]] = {
    f"{_SAMPLER}.rejection_greedy_sample_kernel": rejection_greedy_sample_kernel,
    f"{_SAMPLER}.rejection_random_sample_kernel": rejection_random_sample_kernel,
    f"{_SAMPLER}.expand_kernel": expand_kernel,
    f"{_SAMPLER}.sample_recovered_tokens_kernel": sample_recovered_tokens_kernel,
    f"{_PROPOSER}.eagle_prepare_inputs_padded_kernel": eagle_prepare_inputs_padded_kernel,
    f"{_PROPOSER}.eagle_prepare_next_token_padded_kernel": eagle_prepare_next_token_padded_kernel,
}

"""The bookkeeping of vLLM's newer model runner (V2), with exactly its calling conventions.

The signatures are those of vLLM 0.33, which take what 0.32 passes too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec_ops.ops.combine_sampled_and_draft_tokens import combine_sampled_and_draft_tokens_
from specdec_ops.ops.count_emitted_and_rejected import count_emitted_and_rejected_
from specdec_ops.ops.expand_request_indices import expand_request_indices_
from specdec_ops.ops.gather_draft_tokens import gather_draft_tokens_
from specdec_ops.ops.prepare_positions_and_seq_lens import prepare_positions_and_seq_lens_
from specdec_ops.ops.update_num_computed_tokens import update_num_computed_tokens_
from specdec_ops.ops.update_request_state import update_request_state_


def prepare_pos_seq_lens(
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    pos: Tensor,
    seq_lens: Tensor,
) -> None:
    """``prepare_positions_and_seq_lens_``."""
    prepare_positions_and_seq_lens_(
        idx_mapping, query_start_loc, num_computed_tokens, positions=pos, seq_lens=seq_lens
    )


def combine_sampled_and_draft_tokens(
    input_ids: Tensor,
    idx_mapping: Tensor,
    last_sampled_tokens: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    prefill_len: Tensor,
    draft_tokens: Tensor,
    cu_num_logits: Tensor,
    num_logits: int,
    num_new_sampled_tokens: int = 1,
) -> Tensor:
    """``combine_sampled_and_draft_tokens_``; returns the logits indices."""
    logits_indices = input_ids.new_empty(num_logits, dtype=torch.int64)
    combine_sampled_and_draft_tokens_(
        idx_mapping,
        query_start_loc,
        seq_lens,
        cu_num_logits,
        last_sampled_tokens,
        draft_tokens,
        prefill_len,
        input_ids=input_ids,
        logits_indices=logits_indices,
        num_new_tokens=num_new_sampled_tokens,
    )
    return logits_indices


def get_num_sampled_and_rejected(
    num_sampled: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    prefill_len: Tensor,
) -> tuple[Tensor, Tensor]:
    """``count_emitted_and_rejected_``; writes to ``num_sampled`` and returns it too."""
    num_rejected = torch.empty_like(num_sampled)
    count_emitted_and_rejected_(
        idx_mapping,
        seq_lens,
        cu_num_logits,
        prefill_len,
        num_emitted=num_sampled,
        num_rejected=num_rejected,
    )
    return num_sampled, num_rejected


def post_update(
    idx_mapping: Tensor,
    num_computed_tokens: Tensor,
    last_sampled_tokens: Tensor,
    output_bin_counts: Tensor | None,
    sampled_tokens: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor | None,
    all_token_ids: Tensor,
    total_len: Tensor,
    draft_tokens: Tensor | None = None,
    draft_tokens_out: Tensor | None = None,
) -> None:
    """``update_request_state_``."""
    update_request_state_(
        idx_mapping,
        sampled_tokens,
        num_sampled,
        num_rejected,
        query_start_loc,
        num_computed_tokens=num_computed_tokens,
        last_token_ids=last_sampled_tokens,
        total_lens=total_len,
        all_token_ids=all_token_ids,
        output_counts=output_bin_counts,
        new_draft_token_ids=draft_tokens,
        draft_token_ids=draft_tokens_out,
    )


def post_update_num_computed_tokens(
    idx_mapping: Tensor, num_computed_tokens: Tensor, query_start_loc: Tensor
) -> None:
    """``update_num_computed_tokens_``."""
    update_num_computed_tokens_(idx_mapping, query_start_loc, num_computed_tokens=num_computed_tokens)


def expand_idx_mapping(
    idx_mapping: Tensor, total_num_logits: int, cu_num_logits: Tensor, max_expand_len: int
) -> tuple[Tensor, Tensor]:
    """``expand_request_indices_``, which needs no ``max_expand_len``."""
    expanded_idx_mapping = idx_mapping.new_empty(total_num_logits)
    expanded_local_pos = idx_mapping.new_empty(total_num_logits, dtype=torch.int32)
    expand_request_indices_(
        idx_mapping,
        cu_num_logits,
        expanded_request_indices=expanded_idx_mapping,
        local_positions=expanded_local_pos,
    )
    return expanded_idx_mapping, expanded_local_pos


def gather_draft_sampled(
    input_ids: Tensor,
    positions: Tensor,
    logits_indices: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    prefill_len: Tensor,
) -> tuple[Tensor, Tensor]:
    """``gather_draft_tokens_``."""
    num_logits = logits_indices.numel()
    draft_sampled, pos = input_ids.new_empty(num_logits), positions.new_empty(num_logits)
    gather_draft_tokens_(
        input_ids,
        positions,
        logits_indices,
        expanded_idx_mapping,
        expanded_local_pos,
        prefill_len,
        out_token_ids=draft_sampled,
        out_positions=pos,
    )
    return draft_sampled, pos


_GPU = "vllm.v1.worker.gpu"
_INPUT_BATCH = f"{_GPU}.input_batch"
_REJECTION_SAMPLER = f"{_GPU}.spec_decode.rejection_sampler"

#: What serves which function of vLLM, by its qualified name.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"{_INPUT_BATCH}.prepare_pos_seq_lens": prepare_pos_seq_lens,
    f"{_INPUT_BATCH}.combine_sampled_and_draft_tokens": combine_sampled_and_draft_tokens,
    f"{_INPUT_BATCH}.get_num_sampled_and_rejected": get_num_sampled_and_rejected,
    f"{_INPUT_BATCH}.post_update": post_update,
    f"{_INPUT_BATCH}.post_update_num_computed_tokens": post_update_num_computed_tokens,
    f"{_INPUT_BATCH}.expand_idx_mapping": expand_idx_mapping,
    f"{_REJECTION_SAMPLER}.gather_draft_sampled": gather_draft_sampled,
}

#: The modules that import those functions by name, and so hold copies that have to be replaced too.
IMPORTERS: dict[str, tuple[str, ...]] = {
    f"{_INPUT_BATCH}.prepare_pos_seq_lens": (f"{_GPU}.model_runner",),
    f"{_INPUT_BATCH}.combine_sampled_and_draft_tokens": (f"{_GPU}.model_runner",),
    f"{_INPUT_BATCH}.get_num_sampled_and_rejected": (f"{_GPU}.sample.sampler", _REJECTION_SAMPLER),
    f"{_INPUT_BATCH}.post_update": (f"{_GPU}.model_runner",),
    f"{_INPUT_BATCH}.post_update_num_computed_tokens": (f"{_GPU}.model_runner",),
    f"{_INPUT_BATCH}.expand_idx_mapping": (f"{_GPU}.model_runner",),
    f"{_REJECTION_SAMPLER}.gather_draft_sampled": (),
}


def bind(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement of a function of vLLM: ours for tensors on CPU and GPU, its own for all others.

    Args:
        name: A key of ``FUNCTIONS``.
        stock: vLLM's own function of that name.

    Returns:
        A function with the signature, name and docstring of ``stock``.

    Example:
        >>> from specdec_ops.integrations.vllm import runner
        >>> name = "vllm.v1.worker.gpu.input_batch.post_update"
        >>> replacement = runner.bind(name, stock=runner.post_update)
    """
    ours = FUNCTIONS[name]
    first = next(iter(inspect.signature(ours).parameters))

    @functools.wraps(stock)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs[first]
        return (stock if tensor.is_meta else ours)(*args, **kwargs)

    return replacement

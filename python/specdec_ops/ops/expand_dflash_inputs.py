"""expand_dflash_inputs: verified tokens become context and queries of a DFlash draft model."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._arguments import leading_size
from specdec_ops.ops._runner_state import spans
from specdec_ops.ops._slot_table import slot_of, token_or


class ExpandDFlashInputsOutput(NamedTuple):
    """Inputs of a DFlash draft model; ``num_queries = batch * num_queries_per_request``."""

    #: ``[num_queries]``, dtype of the next token ids: each request's next token, then masks.
    input_ids: Tensor
    #: ``[num_tokens]``, dtype of the target's positions.
    context_positions: Tensor
    #: ``[num_queries]``, dtype of the target's positions.
    query_positions: Tensor
    #: ``[num_tokens]`` int64.
    context_slot_mapping: Tensor
    #: ``[num_queries]`` int64.
    query_slot_mapping: Tensor
    #: ``[batch * num_speculative_tokens]`` int32: the queries to draft from, each request's masks.
    token_indices: Tensor


def expand_dflash_inputs(
    next_token_ids: Tensor,
    target_positions: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    num_rejected_tokens: Tensor | None = None,
    *,
    parallel_drafting_token_id: int,
    block_size: int,
    num_queries_per_request: int,
    num_speculative_tokens: int,
    max_model_len: int | None = None,
    pad_slot_id: int = -1,
) -> ExpandDFlashInputsOutput:
    """Each request's tokens become context, and its next token and masks the queries that follow.

    Args:
        next_token_ids: ``[batch]`` int32 or int64: the token that follows each request's kept ones. A
            negative id, or one that the output's dtype cannot hold, becomes ``parallel_drafting_token_id``.
        target_positions: ``[num_tokens]`` int32 or int64. A negative one counts as 0, without a slot.
        block_table: ``[batch, num_columns]`` or more rows, int32 or int64: the block of positions
            ``[i * block_size, (i + 1) * block_size)`` in column i.
        query_start_loc: ``[batch + 1]`` int32 or int64: where each request's tokens begin, and where the last
            one's end.
        num_rejected_tokens: ``[batch]`` int32 or int64: tokens at each request's end that were rejected;
            queries follow the last one before them. At least one token of a request counts as kept, and a
            negative number as none rejected. None: no request has any.
        parallel_drafting_token_id: The id of a mask.
        block_size: Tokens a block.
        num_queries_per_request: The next token and the masks of a request, at least 1.
        num_speculative_tokens: Masks to draft from, ``num_queries_per_request - 1`` as a rule. With fewer,
            the last masks are not drafted from; with more, the last indices are -1.
        max_model_len: If given, queries from this position on get position ``max_model_len - 1``, without
            a slot.
        pad_slot_id: The slot of a token without one: past the table's last column (where vLLM's kernel takes
            the last column's block), or in a block that is negative or whose slots the output cannot hold.

    Returns:
        An :class:`ExpandDFlashInputsOutput`. A request without tokens has queries at position 0, without
        slots, and so has one whose last kept position is negative. Context of no request has position 0,
        without a slot.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype or range, or ``query_start_loc`` decreases
            or leaves the tokens; the message names it. Kernels of an accelerator do not read the totals
            ahead: they clamp them, and drop what an output over tokens has no room for.

    Source: Chen et al. (DFlash), arXiv 2602.06036, in vLLM's layout.

    Example:
        >>> import torch, specdec_ops
        >>> out = specdec_ops.expand_dflash_inputs(
        ...     torch.tensor([42]), torch.tensor([5, 6, 7]), torch.tensor([[7, 2, 3]]),
        ...     torch.tensor([0, 3]), torch.tensor([1]), parallel_drafting_token_id=99,
        ...     block_size=4, num_queries_per_request=3, num_speculative_tokens=2,
        ... )
        >>> out.input_ids.tolist(), out.query_positions.tolist(), out.query_slot_mapping.tolist()
        ([42, 99, 99], [7, 8, 9], [11, 12, 13])
    """
    num_tokens = leading_size("expand_dflash_inputs", "target_positions", target_positions)
    batch = leading_size("expand_dflash_inputs", "next_token_ids", next_token_ids)
    num_queries = max(batch * num_queries_per_request, 0)
    out = ExpandDFlashInputsOutput(
        next_token_ids.new_empty(num_queries),
        target_positions.new_zeros(num_tokens),
        target_positions.new_empty(num_queries),
        target_positions.new_full((num_tokens,), pad_slot_id, dtype=torch.int64),
        target_positions.new_empty(num_queries, dtype=torch.int64),
        target_positions.new_full((max(batch * num_speculative_tokens, 0),), -1, dtype=torch.int32),
    )
    _op(
        next_token_ids,
        target_positions,
        block_table,
        query_start_loc,
        num_rejected_tokens,
        *out,
        parallel_drafting_token_id,
        block_size,
        num_queries_per_request,
        num_speculative_tokens,
        max_model_len,
        pad_slot_id,
    )
    return out


def expand_dflash_inputs_(
    next_token_ids: Tensor,
    target_positions: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    num_rejected_tokens: Tensor | None = None,
    *,
    parallel_drafting_token_id: int,
    block_size: int,
    num_queries_per_request: int,
    num_speculative_tokens: int,
    max_model_len: int | None = None,
    pad_slot_id: int = -1,
    input_ids: Tensor,
    context_positions: Tensor,
    query_positions: Tensor,
    context_slot_mapping: Tensor,
    query_slot_mapping: Tensor,
    token_indices: Tensor,
) -> None:
    """Like ``expand_dflash_inputs``, into the caller's buffers.

    Buffers may be longer than what the requests take; the rest of them is left as it is. They must not share
    memory with the inputs.

    Args:
        next_token_ids: As in ``expand_dflash_inputs``.
        target_positions: As in ``expand_dflash_inputs``.
        block_table: As in ``expand_dflash_inputs``.
        query_start_loc: As in ``expand_dflash_inputs``.
        num_rejected_tokens: As in ``expand_dflash_inputs``.
        parallel_drafting_token_id: As in ``expand_dflash_inputs``.
        block_size: As in ``expand_dflash_inputs``.
        num_queries_per_request: As in ``expand_dflash_inputs``.
        num_speculative_tokens: As in ``expand_dflash_inputs``, but indices without a mask are left as they
            are.
        max_model_len: As in ``expand_dflash_inputs``.
        pad_slot_id: As in ``expand_dflash_inputs``.
        input_ids: ``[num_queries]`` or longer, int32 or int64.
        context_positions: ``[num_tokens]`` or longer, int32 or int64; values that an int32 cannot hold are
            clamped.
        query_positions: ``[num_queries]`` or longer, int32 or int64; values that an int32 cannot hold are
            clamped, without a slot.
        context_slot_mapping: ``[num_tokens]`` or longer, int32 or int64.
        query_slot_mapping: ``[num_queries]`` or longer, int32 or int64.
        token_indices: ``[batch * num_speculative_tokens]`` or longer, int32 or int64.

    Raises:
        RuntimeError: As in ``expand_dflash_inputs``; nothing was written then.

    Source: as of ``expand_dflash_inputs``.

    Example:
        >>> import torch, specdec_ops
        >>> buffers = torch.zeros(5, 8, dtype=torch.int64)
        >>> names = ("input_ids", "context_positions", "query_positions", "context_slot_mapping",
        ...     "query_slot_mapping")
        >>> indices = torch.zeros(2, dtype=torch.int32)
        >>> specdec_ops.expand_dflash_inputs_(
        ...     torch.tensor([42]), torch.tensor([5, 6, 7]), torch.tensor([[7, 2, 3]]),
        ...     torch.tensor([0, 3]), parallel_drafting_token_id=99, block_size=4,
        ...     num_queries_per_request=3, num_speculative_tokens=2, token_indices=indices,
        ...     **dict(zip(names, buffers)),
        ... )
        >>> buffers[2, :3].tolist(), indices.tolist()
        ([8, 9, 10], [1, 2])
    """
    _op(
        next_token_ids,
        target_positions,
        block_table,
        query_start_loc,
        num_rejected_tokens,
        input_ids,
        context_positions,
        query_positions,
        context_slot_mapping,
        query_slot_mapping,
        token_indices,
        parallel_drafting_token_id,
        block_size,
        num_queries_per_request,
        num_speculative_tokens,
        max_model_len,
        pad_slot_id,
    )


def _reference(
    next_token_ids: Tensor,
    target_positions: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    num_rejected_tokens: Tensor | None,
    input_ids: Tensor,
    context_positions: Tensor,
    query_positions: Tensor,
    context_slot_mapping: Tensor,
    query_slot_mapping: Tensor,
    token_indices: Tensor,
    parallel_drafting_token_id: int,
    block_size: int,
    num_queries_per_request: int,
    num_speculative_tokens: int,
    max_model_len: int | None = None,
    pad_slot_id: int = -1,
) -> None:
    def slot(request: int, position: int) -> int:
        return slot_of(
            block_table,
            request,
            position,
            block_size,
            pad_slot_id,
            context_slot_mapping,
            query_slot_mapping,
        )

    largest_position = torch.iinfo(context_positions.dtype).max
    if max_model_len is None:
        max_model_len = torch.iinfo(query_positions.dtype).max
    tokens = spans(
        "expand_dflash_inputs_",
        "query_start_loc",
        query_start_loc,
        query_start_loc.shape[0] - 1,
        limit=target_positions.shape[0],
        of="target_positions",
    )
    for request, (begin, end) in enumerate((span.start, span.stop) for span in tokens):
        for i in range(begin, end):
            position = int(target_positions[i])
            context_positions[i] = min(max(position, 0), largest_position)
            context_slot_mapping[i] = slot(request, position)

        rejected = 0 if num_rejected_tokens is None else int(num_rejected_tokens[request])
        kept = target_positions[begin:end].tolist()
        kept = kept[: max(len(kept) - max(rejected, 0), 1)]
        for query in range(num_queries_per_request):
            out = request * num_queries_per_request + query
            token_id = int(next_token_ids[request]) if query == 0 else parallel_drafting_token_id
            input_ids[out] = token_or(token_id, parallel_drafting_token_id, input_ids)
            query_positions[out] = 0
            query_slot_mapping[out] = pad_slot_id
            if kept and kept[-1] >= 0:
                position = kept[-1] + 1 + query
                query_positions[out] = min(position, max_model_len - 1)
                if position < max_model_len:
                    query_slot_mapping[out] = slot(request, position)
            if 0 < query <= num_speculative_tokens:
                token_indices[request * num_speculative_tokens + query - 1] = out


_op = define(
    "expand_dflash_inputs_(Tensor next_token_ids, Tensor target_positions, Tensor block_table, "
    "Tensor query_start_loc, Tensor? num_rejected_tokens, Tensor(a!) input_ids, "
    "Tensor(b!) context_positions, Tensor(c!) query_positions, Tensor(d!) context_slot_mapping, "
    "Tensor(e!) query_slot_mapping, Tensor(f!) token_indices, SymInt parallel_drafting_token_id, "
    "SymInt block_size, SymInt num_queries_per_request, SymInt num_speculative_tokens, "
    "SymInt? max_model_len=None, SymInt pad_slot_id=-1) -> ()",
    reference=_reference,
)

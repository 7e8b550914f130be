"""expand_draft_inputs: verified tokens become the inputs of a draft model that needs extra slots."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._arguments import leading_size
from specdec_ops.ops._runner_state import spans
from specdec_ops.ops._slot_table import token_or


class ExpandDraftInputsOutput(NamedTuple):
    """A draft model's inputs, ``num_tokens + batch * (num_padding_slots_per_request - shift)`` outputs."""

    #: ``[num_outputs]``, dtype of the target's token ids.
    input_ids: Tensor
    #: ``[num_outputs]``, dtype of the target's positions.
    positions: Tensor
    #: ``[num_outputs]`` bool: rejected tokens, whose keys and values are not to be kept.
    is_rejected_token_mask: Tensor
    #: ``[num_outputs]`` bool: slots that hold ``parallel_drafting_token_id``.
    is_masked_token_mask: Tensor
    #: ``[batch * num_padding_slots_per_request]`` int32: where each request's next token and masks are.
    new_token_indices: Tensor
    #: ``[num_tokens]`` int32: where each target token's hidden state goes; None without ``shift_input_ids``.
    hidden_state_mapping: Tensor | None


def expand_draft_inputs(
    target_token_ids: Tensor,
    target_positions: Tensor,
    next_token_ids: Tensor,
    query_start_loc: Tensor,
    query_end_loc: Tensor,
    *,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
) -> ExpandDraftInputsOutput:
    """Lays out each request's tokens as ``[kept | next token | masks | rejected]``.

    A request with tokens ``[begin, end)``, of which ``query_end_loc`` is the last that was kept, takes
    ``end - begin + num_padding_slots_per_request - shift`` outputs, right after those of the request before:

    - its kept tokens, but for the first with ``shift_input_ids`` (an EAGLE head reads the token after the one
      whose hidden state it gets; ``shift`` is 1 then, else 0);
    - its next token;
    - ``num_padding_slots_per_request - 1`` masks, if the draft model drafts several tokens at once;
    - as many rejected slots as it has tokens after the last kept one.

    Positions count up from that of the request's first token, and are 0 in rejected slots.

    Args:
        target_token_ids: ``[num_tokens]`` int32 or int64: what the target model was run on.
        target_positions: ``[num_tokens]`` int32 or int64. Of each request the first is read; a negative one
            counts as 0.
        next_token_ids: ``[batch]`` int32 or int64: the token that follows each request's kept ones.
        query_start_loc: ``[batch + 1]`` int32 or int64: where each request's tokens begin, and where the last
            one's end.
        query_end_loc: ``[batch]`` int32 or int64: the index of each request's last kept token. One outside of
            the request is moved to its nearest token.
        padding_token_id: The id in rejected slots, and in place of ids that no embedding has: negative ones,
            and those that the output's dtype cannot hold. The slot of such an id is not rejected, since
            later tokens attend to it.
        parallel_drafting_token_id: The id of a mask.
        num_padding_slots_per_request: Slots for the next token and masks, at least 1.
        shift_input_ids: See above.

    Returns:
        An :class:`ExpandDraftInputsOutput`. A request without tokens has only rejected slots, and its
        ``new_token_indices`` are -1. Outputs of no request are rejected slots at the end; a target token of
        no request maps to -1.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype or range, or ``query_start_loc`` decreases
            or leaves the tokens; the message names it. Kernels of an accelerator do not read the totals
            ahead: they clamp them, and drop what an output over tokens has no room for.

    Source: the parallel drafting of An et al. (PARD), arXiv 2504.18583, in vLLM's layout.

    Example:
        >>> import torch, specdec_ops
        >>> out = specdec_ops.expand_draft_inputs(
        ...     torch.tensor([10, 11, 12]), torch.tensor([5, 6, 7]), torch.tensor([42]),
        ...     torch.tensor([0, 3]), torch.tensor([1]), padding_token_id=0,
        ...     parallel_drafting_token_id=99, num_padding_slots_per_request=2, shift_input_ids=True,
        ... )
        >>> out.input_ids.tolist(), out.positions.tolist(), out.new_token_indices.tolist()
        ([11, 42, 99, 0], [5, 6, 7, 0], [1, 2])
    """
    num_tokens = leading_size("expand_draft_inputs", "target_token_ids", target_token_ids)
    batch = leading_size("expand_draft_inputs", "next_token_ids", next_token_ids)
    num_outputs = max(num_tokens + batch * (num_padding_slots_per_request - int(shift_input_ids)), 0)
    out = ExpandDraftInputsOutput(
        target_token_ids.new_full((num_outputs,), padding_token_id),
        target_positions.new_zeros(num_outputs),
        target_token_ids.new_ones(num_outputs, dtype=torch.bool),
        target_token_ids.new_zeros(num_outputs, dtype=torch.bool),
        target_token_ids.new_full((max(batch * num_padding_slots_per_request, 0),), -1, dtype=torch.int32),
        target_token_ids.new_full((num_tokens,), -1, dtype=torch.int32) if shift_input_ids else None,
    )
    _op(
        target_token_ids,
        target_positions,
        next_token_ids,
        query_start_loc,
        query_end_loc,
        *out,
        padding_token_id,
        parallel_drafting_token_id,
        num_padding_slots_per_request,
        shift_input_ids,
    )
    return out


def expand_draft_inputs_(
    target_token_ids: Tensor,
    target_positions: Tensor,
    next_token_ids: Tensor,
    query_start_loc: Tensor,
    query_end_loc: Tensor,
    *,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
    input_ids: Tensor,
    positions: Tensor,
    is_rejected_token_mask: Tensor,
    is_masked_token_mask: Tensor,
    new_token_indices: Tensor,
    hidden_state_mapping: Tensor | None = None,
) -> None:
    """Like ``expand_draft_inputs``, into the caller's buffers.

    Buffers may be longer than what the requests take; the rest of them is left as it is. They must not share
    memory with the inputs.

    Args:
        target_token_ids: As in ``expand_draft_inputs``.
        target_positions: As in ``expand_draft_inputs``.
        next_token_ids: As in ``expand_draft_inputs``.
        query_start_loc: As in ``expand_draft_inputs``.
        query_end_loc: As in ``expand_draft_inputs``.
        padding_token_id: As in ``expand_draft_inputs``.
        parallel_drafting_token_id: As in ``expand_draft_inputs``.
        num_padding_slots_per_request: As in ``expand_draft_inputs``.
        shift_input_ids: As in ``expand_draft_inputs``.
        input_ids: ``[num_outputs]`` or longer, int32 or int64.
        positions: ``[num_outputs]`` or longer, int32 or int64; values that an int32 cannot hold are clamped.
        is_rejected_token_mask: ``[num_outputs]`` or longer, bool.
        is_masked_token_mask: ``[num_outputs]`` or longer, bool.
        new_token_indices: ``[batch * num_padding_slots_per_request]`` or longer, int32 or int64.
        hidden_state_mapping: ``[num_tokens]`` or longer, int32 or int64. Needed and written only with
            ``shift_input_ids``.

    Raises:
        RuntimeError: As in ``expand_draft_inputs``; nothing was written then.

    Source: as of ``expand_draft_inputs``.

    Example:
        >>> import torch, specdec_ops
        >>> ids, positions = torch.zeros(2, 8, dtype=torch.int64)
        >>> rejected, masked = torch.zeros(2, 8, dtype=torch.bool)
        >>> indices = torch.zeros(2, dtype=torch.int32)
        >>> specdec_ops.expand_draft_inputs_(
        ...     torch.tensor([10, 11, 12]), torch.tensor([5, 6, 7]), torch.tensor([42]),
        ...     torch.tensor([0, 3]), torch.tensor([1]), padding_token_id=0,
        ...     parallel_drafting_token_id=99, num_padding_slots_per_request=2, shift_input_ids=False,
        ...     input_ids=ids, positions=positions, is_rejected_token_mask=rejected,
        ...     is_masked_token_mask=masked, new_token_indices=indices,
        ... )
        >>> ids[:5].tolist(), indices.tolist()
        ([10, 11, 42, 99, 0], [2, 3])
    """
    _op(
        target_token_ids,
        target_positions,
        next_token_ids,
        query_start_loc,
        query_end_loc,
        input_ids,
        positions,
        is_rejected_token_mask,
        is_masked_token_mask,
        new_token_indices,
        hidden_state_mapping,
        padding_token_id,
        parallel_drafting_token_id,
        num_padding_slots_per_request,
        shift_input_ids,
    )


def _reference(
    target_token_ids: Tensor,
    target_positions: Tensor,
    next_token_ids: Tensor,
    query_start_loc: Tensor,
    query_end_loc: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    is_rejected_token_mask: Tensor,
    is_masked_token_mask: Tensor,
    new_token_indices: Tensor,
    hidden_state_mapping: Tensor | None,
    padding_token_id: int,
    parallel_drafting_token_id: int,
    num_padding_slots_per_request: int,
    shift_input_ids: bool,
) -> None:
    num_slots, shift = num_padding_slots_per_request, int(shift_input_ids)
    largest_position = torch.iinfo(positions.dtype).max
    tokens = spans(
        "expand_draft_inputs_",
        "query_start_loc",
        query_start_loc,
        query_start_loc.shape[0] - 1,
        limit=target_token_ids.shape[0],
        of="target_token_ids",
    )
    for request, (begin, end) in enumerate((span.start, span.stop) for span in tokens):
        out_begin = begin + request * (num_slots - shift)
        num_outputs = end - begin + num_slots - shift
        new_tokens: list[int] = []
        ids: list[int] = []
        start_position = 0
        if end > begin:
            last_kept = min(max(int(query_end_loc[request]), begin), end - 1)
            kept = [*target_token_ids[begin + shift : last_kept + 1].tolist(), int(next_token_ids[request])]
            ids = [token_or(token_id, padding_token_id, input_ids) for token_id in kept]
            new_tokens = [out_begin + len(ids) - 1 + i for i in range(num_slots)]
            ids += [parallel_drafting_token_id] * (num_slots - 1)
            start_position = max(int(target_positions[begin]), 0)
        for j in range(num_outputs):
            is_rejected = j >= len(ids)
            out = out_begin + j
            input_ids[out] = padding_token_id if is_rejected else ids[j]
            positions[out] = 0 if is_rejected else min(start_position + j, largest_position)
            is_rejected_token_mask[out] = is_rejected
            is_masked_token_mask[out] = out in new_tokens[1:]
        for i in range(num_slots):
            new_token_indices[request * num_slots + i] = new_tokens[i] if new_tokens else -1
        if shift_input_ids:
            assert hidden_state_mapping is not None
            for j in range(end - begin):
                hidden_state_mapping[begin + j] = out_begin + j


_op = define(
    "expand_draft_inputs_(Tensor target_token_ids, Tensor target_positions, Tensor next_token_ids, "
    "Tensor query_start_loc, Tensor query_end_loc, Tensor(a!) input_ids, Tensor(b!) positions, "
    "Tensor(c!) is_rejected_token_mask, Tensor(d!) is_masked_token_mask, Tensor(e!) new_token_indices, "
    "Tensor(f!)? hidden_state_mapping, SymInt padding_token_id, SymInt parallel_drafting_token_id, "
    "SymInt num_padding_slots_per_request, bool shift_input_ids) -> ()",
    reference=_reference,
)

"""gather_draft_tokens: the token that each logits row was computed from."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._runner_state import live_requests


class GatherDraftTokensOutput(NamedTuple):
    """What ``gather_draft_tokens`` returns, both ``[num_logits]``."""

    #: dtype of ``input_ids``: the last emitted token in a request's first row, then its drafts; -1 for
    #: draft rows without a draft.
    token_ids: Tensor
    #: dtype of ``positions``, of those tokens.
    positions: Tensor


def gather_draft_tokens(
    input_ids: Tensor,
    positions: Tensor,
    logits_indices: Tensor,
    expanded_request_indices: Tensor,
    local_positions: Tensor,
    prefill_lens: Tensor,
) -> GatherDraftTokensOutput:
    """Gathers the input token and the position of each logits row.

    The draft rows of a query that starts within the prompt hold no drafts, since drafts follow a
    sampled token: they give -1, which verification takes for the end of a request's drafts.

    Args:
        input_ids: ``[num_tokens]`` int32 or int64, like all that follow; any strides.
        positions: ``[num_tokens]``, of the input tokens in their sequences.
        logits_indices: ``[num_logits]``, for each logits row its index in ``input_ids``, as
            ``combine_sampled_and_draft_tokens_`` writes them.
        expanded_request_indices: ``[num_logits]``, the request's row in the runner's state for each
            logits row, as ``expand_request_indices`` gives them.
        local_positions: ``[num_logits]``, which of its request's logits rows it is, from there too.
        prefill_lens: ``[max_requests]``, of each state row: tokens that were not sampled here.

    Returns:
        A :class:`GatherDraftTokensOutput`. A logits row whose request index is no state row, as -1, or
        whose index is no input token gives token -1 and position 0.

    Raises:
        RuntimeError: An argument has the wrong shape or dtype; the message names it.

    Source: the layout of a verification step in Leviathan et al., arXiv 2211.17192; vLLM's runner
    has the same bookkeeping.

    Example:
        >>> import torch, specdec_ops
        >>> out = specdec_ops.gather_draft_tokens(
        ...     input_ids=torch.tensor([5, 6, 7, 8]),
        ...     positions=torch.tensor([9, 10, 2, 3]),
        ...     logits_indices=torch.tensor([0, 1, 2, 3]),
        ...     expanded_request_indices=torch.tensor([1, 1, 0, 0]),
        ...     local_positions=torch.tensor([0, 1, 0, 1]),
        ...     prefill_lens=torch.tensor([4, 4]),
        ... )
        >>> out.token_ids.tolist(), out.positions.tolist()
        ([5, 6, 7, -1], [9, 10, 2, 3])
    """
    num_logits = logits_indices.shape[0] if logits_indices.dim() > 0 else 0
    token_ids = input_ids.new_empty(num_logits)
    out_positions = positions.new_empty(num_logits)
    _op(
        input_ids,
        positions,
        logits_indices,
        expanded_request_indices,
        local_positions,
        prefill_lens,
        token_ids,
        out_positions,
    )
    return GatherDraftTokensOutput(token_ids, out_positions)


def gather_draft_tokens_(
    input_ids: Tensor,
    positions: Tensor,
    logits_indices: Tensor,
    expanded_request_indices: Tensor,
    local_positions: Tensor,
    prefill_lens: Tensor,
    *,
    out_token_ids: Tensor,
    out_positions: Tensor,
) -> None:
    """``gather_draft_tokens`` into the caller's buffers.

    Args:
        input_ids: As there, like the five that follow.
        positions: See there.
        logits_indices: See there.
        expanded_request_indices: See there.
        local_positions: See there.
        prefill_lens: See there.
        out_token_ids: ``[num_logits]`` int32 or int64, written.
        out_positions: ``[num_logits]`` int32 or int64, written.

    Raises:
        RuntimeError: As there.

    Source: as there.

    Example:
        >>> import torch, specdec_ops
        >>> token_ids, positions = torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
        >>> specdec_ops.gather_draft_tokens_(
        ...     torch.tensor([5, 6]),
        ...     torch.tensor([9, 10]),
        ...     torch.tensor([1]),
        ...     torch.tensor([0]),
        ...     torch.tensor([1]),
        ...     torch.tensor([4]),
        ...     out_token_ids=token_ids,
        ...     out_positions=positions,
        ... )
        >>> token_ids.tolist(), positions.tolist()
        ([6], [10])
    """
    _op(
        input_ids,
        positions,
        logits_indices,
        expanded_request_indices,
        local_positions,
        prefill_lens,
        out_token_ids,
        out_positions,
    )


def _reference(
    input_ids: Tensor,
    positions: Tensor,
    logits_indices: Tensor,
    expanded_request_indices: Tensor,
    local_positions: Tensor,
    prefill_lens: Tensor,
    out_token_ids: Tensor,
    out_positions: Tensor,
) -> None:
    out_token_ids.fill_(-1)
    out_positions.zero_()
    num_tokens = min(len(input_ids), len(positions))
    for i, row in live_requests(expanded_request_indices, len(prefill_lens)):
        token = int(logits_indices[i])
        if not 0 <= token < num_tokens:
            continue
        out_positions[i] = positions[token]
        is_draft = local_positions[i] > 0
        query_start = positions[token] - local_positions[i]
        if not (is_draft and query_start < prefill_lens[row]):
            out_token_ids[i] = input_ids[token]


_op = define(
    "gather_draft_tokens_(Tensor input_ids, Tensor positions, Tensor logits_indices, "
    "Tensor expanded_request_indices, Tensor local_positions, Tensor prefill_lens, "
    "Tensor(a!) out_token_ids, Tensor(b!) out_positions) -> ()",
    reference=_reference,
)

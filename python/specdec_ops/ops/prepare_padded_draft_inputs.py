"""prepare_padded_draft_inputs: where a drafter that keeps rejected tokens as padding goes on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._arguments import draft_totals, leading_size


class PreparePaddedDraftInputsOutput(NamedTuple):
    """What ``prepare_padded_draft_inputs`` returns, both ``[batch]``, dtype of ``query_start_loc``."""

    #: Index of each request's last kept token among the tokens of the batch.
    token_indices: Tensor
    #: Tokens of each request that were rejected.
    num_rejected: Tensor


def prepare_padded_draft_inputs(
    cu_num_draft_tokens: Tensor, num_sampled: Tensor, query_start_loc: Tensor
) -> PreparePaddedDraftInputsOutput:
    """Finds the token that each request goes on drafting from, where rejected tokens stay in the batch.

    A request with ``n > 0`` drafts has ``n + 1 - num_sampled`` rejected tokens, which are the last of its
    tokens; one without drafts has none.

    Args:
        cu_num_draft_tokens: int32 or int64 cumulative counts of the drafts that were verified:
            ``[batch + 1]`` that start with 0, or ``[batch]`` without the 0.
        num_sampled: ``[batch]`` int32 or int64, how many tokens verification emitted for each request, as
            ``prepare_next_tokens`` counts them: the accepted drafts and one more; 0 for a request whose
            tokens are discarded. Counts outside ``[0, n + 1]`` count as the nearest one inside.
        query_start_loc: ``[batch + 1]`` int32 or int64, where each request's tokens begin in the batch,
            and where the last one's end.

    Returns:
        A :class:`PreparePaddedDraftInputsOutput`. A token index is never before the request's first
        token; that of a request without tokens is ``query_start_loc[r + 1] - 1``.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype, device or range; the message names it. Kernels
            of an accelerator do not read the totals ahead.

    Source: vLLM's ``eagle_prepare_inputs_padded_kernel``.

    Example:
        >>> import torch, specdec_ops
        >>> cu_num_draft_tokens, num_sampled = torch.tensor([0, 3, 3]), torch.tensor([2, 1])
        >>> out = specdec_ops.prepare_padded_draft_inputs(
        ...     cu_num_draft_tokens, num_sampled, query_start_loc=torch.tensor([0, 4, 9])
        ... )
        >>> out.token_indices.tolist(), out.num_rejected.tolist()
        ([1, 8], [2, 0])
    """
    batch = leading_size("prepare_padded_draft_inputs", "num_sampled", num_sampled)
    token_indices, num_rejected = query_start_loc.new_empty(batch), query_start_loc.new_empty(batch)
    _op(cu_num_draft_tokens, num_sampled, query_start_loc, token_indices, num_rejected)
    return PreparePaddedDraftInputsOutput(token_indices, num_rejected)


def prepare_padded_draft_inputs_(
    cu_num_draft_tokens: Tensor,
    num_sampled: Tensor,
    query_start_loc: Tensor,
    *,
    token_indices: Tensor,
    num_rejected: Tensor,
) -> None:
    """Like :func:`prepare_padded_draft_inputs`, into the caller's buffers.

    Args:
        cu_num_draft_tokens: See :func:`prepare_padded_draft_inputs`.
        num_sampled: See :func:`prepare_padded_draft_inputs`; may be longer.
        query_start_loc: See :func:`prepare_padded_draft_inputs`; may be longer.
        token_indices: ``[batch]`` int32 or int64, any stride. Its length is the batch.
        num_rejected: At least ``[batch]`` int32 or int64, any stride.

    Raises:
        RuntimeError: See :func:`prepare_padded_draft_inputs`.

    Source: see :func:`prepare_padded_draft_inputs`.

    Example:
        >>> import torch, specdec_ops
        >>> token_indices, num_rejected = torch.empty(2, 1, dtype=torch.int32)
        >>> specdec_ops.prepare_padded_draft_inputs_(
        ...     torch.tensor([3]),
        ...     torch.tensor([2]),
        ...     torch.tensor([0, 4]),
        ...     token_indices=token_indices,
        ...     num_rejected=num_rejected,
        ... )
        >>> token_indices.item(), num_rejected.item()
        (1, 2)
    """
    _op(cu_num_draft_tokens, num_sampled, query_start_loc, token_indices, num_rejected)


def _reference(
    cu_num_draft_tokens: Tensor,
    num_sampled: Tensor,
    query_start_loc: Tensor,
    token_indices: Tensor,
    num_rejected: Tensor,
) -> None:
    batch = token_indices.shape[0]
    totals = torch.tensor(draft_totals(cu_num_draft_tokens, batch), dtype=torch.int64)
    counts = totals.diff()
    rejected = torch.where(counts > 0, counts + 1 - num_sampled[:batch].long(), 0).clamp(min=0)
    rejected = rejected.minimum(counts + 1)
    first, last = query_start_loc[:batch].long(), query_start_loc[1 : batch + 1].long() - 1
    token_indices.copy_((last - rejected).maximum(first.minimum(last)))
    num_rejected[:batch] = rejected


_op = define(
    "prepare_padded_draft_inputs_(Tensor cu_num_draft_tokens, Tensor num_sampled, Tensor query_start_loc, "
    "Tensor(a!) token_indices, Tensor(b!) num_rejected) -> ()",
    reference=_reference,
)

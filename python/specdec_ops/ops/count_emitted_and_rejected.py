"""count_emitted_and_rejected: what a step brought each request of a batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._runner_state import live_requests, spans


class CountEmittedAndRejectedOutput(NamedTuple):
    """Counts of ``count_emitted_and_rejected``, both ``[batch]`` with the dtype of ``num_emitted``."""

    #: Emitted tokens; 0 for requests that are still in their prefill and for padding.
    num_emitted: Tensor
    #: Drafts that were verified in vain: logits rows less emitted tokens, never negative.
    num_rejected: Tensor


def count_emitted_and_rejected(
    num_emitted: Tensor,
    request_indices: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    prefill_lens: Tensor,
) -> CountEmittedAndRejectedOutput:
    """Counts emitted tokens and rejected drafts, and neither for a request that is still in its prefill.

    What is sampled from a chunk of a prompt that is not its last is thrown away.

    Args:
        num_emitted: ``[batch]`` int32 or int64, like all that follow; any strides. Tokens that
            sampling gave each request. Negative numbers count as 0.
        request_indices: ``[batch]``, the row of each request in the runner's state. A request whose
            index is no such row, as -1, is padding and counts 0 and 0.
        seq_lens: ``[batch]`` or longer, computed tokens and those of the query together. Below the
            request's ``prefill_len`` the request counts 0 and 0.
        cu_num_logits: ``[batch + 1]`` or longer, running totals of the logits rows.
        prefill_lens: ``[max_requests]``, of each state row: tokens that were not sampled here.

    Returns:
        A :class:`CountEmittedAndRejectedOutput`.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype or range, or totals decrease; the message
            names it. Kernels of an accelerator do not read the totals ahead.

    Source: the acceptance counts of Leviathan et al., arXiv 2211.17192.

    Example:
        >>> import torch, specdec_ops
        >>> counts = specdec_ops.count_emitted_and_rejected(
        ...     torch.tensor([2, 1]),
        ...     request_indices=torch.tensor([1, 0]),
        ...     seq_lens=torch.tensor([9, 3]),
        ...     cu_num_logits=torch.tensor([0, 4, 5]),
        ...     prefill_lens=torch.tensor([4, 4]),
        ... )
        >>> counts.num_emitted.tolist(), counts.num_rejected.tolist()
        ([2, 0], [2, 0])
    """
    emitted = num_emitted.clone()
    rejected = torch.empty_like(emitted)
    _op(request_indices, seq_lens, cu_num_logits, prefill_lens, emitted, rejected)
    return CountEmittedAndRejectedOutput(emitted, rejected)


def count_emitted_and_rejected_(
    request_indices: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    prefill_lens: Tensor,
    *,
    num_emitted: Tensor,
    num_rejected: Tensor,
) -> None:
    """``count_emitted_and_rejected`` into the caller's buffers.

    Args:
        request_indices: As there, like the three that follow.
        seq_lens: See there.
        cu_num_logits: See there.
        prefill_lens: See there.
        num_emitted: ``[batch]``, read and written.
        num_rejected: ``[batch]``, written.

    Raises:
        RuntimeError: As there.

    Source: as there.

    Example:
        >>> import torch, specdec_ops
        >>> num_emitted, num_rejected = torch.tensor([2]), torch.empty(1, dtype=torch.int64)
        >>> specdec_ops.count_emitted_and_rejected_(
        ...     torch.tensor([0]),
        ...     torch.tensor([9]),
        ...     torch.tensor([0, 4]),
        ...     torch.tensor([4]),
        ...     num_emitted=num_emitted,
        ...     num_rejected=num_rejected,
        ... )
        >>> num_emitted.tolist(), num_rejected.tolist()
        ([2], [2])
    """
    _op(request_indices, seq_lens, cu_num_logits, prefill_lens, num_emitted, num_rejected)


def _reference(
    request_indices: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    prefill_lens: Tensor,
    num_emitted: Tensor,
    num_rejected: Tensor,
) -> None:
    batch = len(request_indices)
    logits = spans("count_emitted_and_rejected_", "cu_num_logits", cu_num_logits, batch)
    emitted = [max(count, 0) for count in num_emitted.tolist()]
    num_emitted.zero_()
    num_rejected.zero_()
    for request, row in live_requests(request_indices, len(prefill_lens)):
        if seq_lens[request] >= prefill_lens[row]:
            num_emitted[request] = emitted[request]
            num_rejected[request] = max(len(logits[request]) - emitted[request], 0)


_op = define(
    "count_emitted_and_rejected_(Tensor request_indices, Tensor seq_lens, Tensor cu_num_logits, "
    "Tensor prefill_lens, Tensor(a!) num_emitted, Tensor(b!) num_rejected) -> ()",
    reference=_reference,
)

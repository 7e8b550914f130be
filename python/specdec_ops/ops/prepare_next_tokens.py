"""prepare_next_tokens: the token that each request goes on drafting from, and how many were sampled."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._arguments import leading_size


class PrepareNextTokensOutput(NamedTuple):
    """What ``prepare_next_tokens`` returns, both ``[batch]``."""

    #: Dtype of ``backup_token_ids``; always in ``[0, vocab_size)``.
    next_token_ids: Tensor
    #: int32, sampled tokens: accepted drafts and the one after them, 0 for discarded requests.
    num_sampled: Tensor


def prepare_next_tokens(
    token_ids: Tensor, discard_request_mask: Tensor, backup_token_ids: Tensor, vocab_size: int
) -> PrepareNextTokensOutput:
    """Takes each request's last sampled token, or its backup token where there is none to take.

    Args:
        token_ids: ``[batch, k + 1]`` int32 or int64, any strides: rows as ``verify_chain`` returns them.
            Ids outside ``[0, vocab_size)`` count as nothing, -1 and other negative ones alike.
        discard_request_mask: ``[batch]`` bool, True where the sampled tokens do not count: the request is
            still in its prompt and the backup token is what comes next there.
        backup_token_ids: ``[batch]`` int32 or int64. One outside ``[0, vocab_size)`` counts as 0.
        vocab_size: Number of ids, at least 1.

    Returns:
        A :class:`PrepareNextTokensOutput`.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype, device or range; the message names it.

    Source: vLLM's ``eagle_prepare_next_token_padded_kernel``, which takes ids below -1 for tokens.

    Example:
        >>> import torch, specdec_ops
        >>> out = specdec_ops.prepare_next_tokens(
        ...     torch.tensor([[5, 6, -1], [7, -1, -1]]),
        ...     discard_request_mask=torch.tensor([False, True]),
        ...     backup_token_ids=torch.tensor([1, 2]),
        ...     vocab_size=10,
        ... )
        >>> out.next_token_ids.tolist(), out.num_sampled.tolist()
        ([6, 2], [2, 0])
    """
    batch = leading_size("prepare_next_tokens", "token_ids", token_ids)
    next_token_ids = backup_token_ids.new_empty(batch)
    num_sampled = backup_token_ids.new_empty(batch, dtype=torch.int32)
    _op(token_ids, discard_request_mask, backup_token_ids, vocab_size, next_token_ids, num_sampled)
    return PrepareNextTokensOutput(next_token_ids, num_sampled)


def prepare_next_tokens_(
    token_ids: Tensor,
    discard_request_mask: Tensor,
    backup_token_ids: Tensor,
    vocab_size: int,
    *,
    next_token_ids: Tensor,
    num_sampled: Tensor,
) -> None:
    """Like :func:`prepare_next_tokens`, into the caller's buffers.

    Args:
        token_ids: See :func:`prepare_next_tokens`. Its number of rows is the batch.
        discard_request_mask: See :func:`prepare_next_tokens`; may be longer.
        backup_token_ids: See :func:`prepare_next_tokens`; may be longer.
        vocab_size: See :func:`prepare_next_tokens`.
        next_token_ids: At least ``[batch]`` int32 or int64, any stride.
        num_sampled: At least ``[batch]`` int32 or int64, any stride.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype, device or range; the message names it.

    Source: see :func:`prepare_next_tokens`.

    Example:
        >>> import torch, specdec_ops
        >>> next_token_ids, num_sampled = torch.empty(2, 1, dtype=torch.int32)
        >>> specdec_ops.prepare_next_tokens_(
        ...     torch.tensor([[5, 6, -1]]),
        ...     torch.tensor([False]),
        ...     torch.tensor([1]),
        ...     vocab_size=10,
        ...     next_token_ids=next_token_ids,
        ...     num_sampled=num_sampled,
        ... )
        >>> next_token_ids.item(), num_sampled.item()
        (6, 2)
    """
    _op(token_ids, discard_request_mask, backup_token_ids, vocab_size, next_token_ids, num_sampled)


def _reference(
    token_ids: Tensor,
    discard_request_mask: Tensor,
    backup_token_ids: Tensor,
    vocab_size: int,
    next_token_ids: Tensor,
    num_sampled: Tensor,
) -> None:
    for r in range(token_ids.shape[0]):
        backup = int(backup_token_ids[r])
        sampled = [] if discard_request_mask[r] else [x for x in token_ids[r].tolist() if 0 <= x < vocab_size]
        next_token_ids[r] = sampled[-1] if sampled else backup if 0 <= backup < vocab_size else 0
        num_sampled[r] = len(sampled)


_op = define(
    "prepare_next_tokens_(Tensor token_ids, Tensor discard_request_mask, Tensor backup_token_ids, "
    "SymInt vocab_size, Tensor(a!) next_token_ids, Tensor(b!) num_sampled) -> ()",
    reference=_reference,
)

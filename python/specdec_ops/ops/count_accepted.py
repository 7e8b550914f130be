"""count_accepted: how many drafts a verified batch kept."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ops._library import define


class CountAcceptedOutput(NamedTuple):
    """Counts of ``count_accepted``, both ``[batch]`` int32."""

    #: Accepted drafts: ``max(num_emitted - 1, 0)``, since the last emitted token is not a draft.
    num_accepted: Tensor
    #: Emitted tokens: accepted drafts plus the recovered or bonus token.
    num_emitted: Tensor


def count_accepted(token_ids: Tensor, *, vocab_size: int | None = None) -> CountAcceptedOutput:
    """Counts the accepted drafts and emitted tokens of each row by counting what is a token id.

    Args:
        token_ids: ``[batch, k + 1]`` int32 or int64, any strides: rows as ``verify_chain`` returns
            them, -1 where nothing was emitted. Every negative id counts as nothing.
        vocab_size: If given, ids from here on count as nothing too.

    Returns:
        A :class:`CountAcceptedOutput`; a row without any id counts 0 and 0.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype or range; the message names it.

    Source: the acceptance counts of Leviathan et al., arXiv 2211.17192.

    Example:
        >>> import torch, specdec_ops
        >>> counts = specdec_ops.count_accepted(torch.tensor([[5, 6, 7], [5, -1, -1]]))
        >>> counts.num_accepted.tolist(), counts.num_emitted.tolist()
        ([2, 0], [3, 1])
    """
    return CountAcceptedOutput(*_op(token_ids, vocab_size=vocab_size))


def _fake(token_ids: Tensor, *, vocab_size: int | None = None) -> tuple[Tensor, Tensor]:
    batch = token_ids.shape[0]
    return token_ids.new_empty(batch, dtype=torch.int32), token_ids.new_empty(batch, dtype=torch.int32)


def _reference(token_ids: Tensor, *, vocab_size: int | None = None) -> tuple[Tensor, Tensor]:
    valid = token_ids >= 0
    if vocab_size is not None:
        valid = valid & (token_ids < vocab_size)
    num_emitted = valid.sum(dim=1).to(torch.int32)
    return (num_emitted - 1).clamp(min=0), num_emitted


_op = define(
    "count_accepted(Tensor token_ids, *, SymInt? vocab_size=None) "
    "-> (Tensor num_accepted, Tensor num_emitted)",
    fake=_fake,
    reference=_reference,
)

"""map_draft_tokens: ids of a drafter with a vocabulary of its own, as ids of the target."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._arguments import leading_size


def map_draft_tokens(draft_token_ids: Tensor, d2t: Tensor, *, offsets: bool = False) -> Tensor:
    """Maps draft ids to target ids.

    Drafters of the EAGLE-3 kind know a part of the target's vocabulary, under ids of their own; ``d2t`` says
    which target id each of them is. What ``verify_chain`` takes are target ids: of drafts, and of sparse
    draft laws. So a sparse law needs nothing but this op on its ``draft_support_ids``: where several draft
    ids lead to one target id, ``verify_chain`` adds up what is listed for it. Dense draft logits go through
    ``expand_draft_logits``.

    Args:
        draft_token_ids: Any shape, int32 or int64, any strides.
        d2t: ``[draft_vocab_size]`` int32 or int64, any stride: the target id of each draft id.
        offsets: ``d2t`` holds how far the target ids lie above the draft ids, as EAGLE-3 checkpoints do.
            Default: the target ids themselves.

    Returns:
        The target ids, with the shape and dtype of ``draft_token_ids``. An id outside
        ``[0, draft_vocab_size)``, -1 above all, gives -1, and so does one that leads to a negative id.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype or device; the message names it.

    Source: the draft vocabulary of EAGLE-3 (Li et al., arXiv 2503.01840).

    Example:
        >>> import torch, specdec_ops
        >>> d2t = torch.tensor([2, 5, 7])
        >>> specdec_ops.map_draft_tokens(torch.tensor([[1, 0], [2, -1]]), d2t).tolist()
        [[5, 2], [7, -1]]
    """
    leading_size("map_draft_tokens", "draft_token_ids", draft_token_ids)
    mapped: Tensor = _op(draft_token_ids.reshape(-1), d2t, offsets=offsets)
    return mapped.reshape(draft_token_ids.shape)


def _fake(draft_token_ids: Tensor, d2t: Tensor, *, offsets: bool = False) -> Tensor:
    return draft_token_ids.new_empty(draft_token_ids.shape)


def _reference(draft_token_ids: Tensor, d2t: Tensor, *, offsets: bool = False) -> Tensor:
    targets = d2t.tolist()
    mapped = []
    for token in draft_token_ids.tolist():
        target = targets[token] + (token if offsets else 0) if 0 <= token < len(targets) else -1
        mapped.append(max(target, -1))
    return torch.tensor(mapped, dtype=draft_token_ids.dtype, device=draft_token_ids.device)


_op = define(
    "map_draft_tokens(Tensor draft_token_ids, Tensor d2t, *, bool offsets=False) -> Tensor",
    fake=_fake,
    reference=_reference,
)

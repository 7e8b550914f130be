"""expand_draft_logits: logits over a drafter's own vocabulary, as rows over the target's."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec_ops import _reference
from specdec_ops._library import define
from specdec_ops.ops._arguments import leading_size, per_request


def expand_draft_logits(
    draft_logits: Tensor,
    d2t: Tensor,
    vocab_size: int,
    *,
    offsets: bool = False,
    temperature: Tensor | float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Puts draft logits at the target ids that they belong to, and -inf everywhere else.

    The rows go to ``verify_chain`` as ``draft_logits``. Drafts are drawn from the short rows, which is
    cheaper, and mapped by ``map_draft_tokens``: the law is the same. A logsumexp that ``sample`` returned for
    the short rows serves as ``draft_logsumexp`` for the long ones, and spares ``verify_chain`` a pass over
    them.

    Where several draft ids lead to one target id, its probability is the sum of theirs: its logit is
    ``temperature * log(sum(exp(logits / temperature)))``, so the temperature must be that which the drafts
    are drawn at. Where no two lead to one, each logit is copied as it is, at any temperature.

    Args:
        draft_logits: ``[rows, width]`` float32, bfloat16 or float16, any row stride. Columns from
            ``draft_vocab_size`` on are padding.
        d2t: ``[draft_vocab_size]`` int32 or int64, any stride: the target id of each draft id, in
            ``[0, vocab_size)``. On an accelerator nobody looks whether they are; others are left out.
        vocab_size: Columns of the result.
        offsets: ``d2t`` holds how far the target ids lie above the draft ids. Default: the target ids.
        temperature: ``[rows]`` float32 or a number for all; default 1. Below 1e-5 (and NaN) a target id gets
            the largest of its logits.
        dtype: Of the result. Default: that of ``draft_logits``. Sums of several ids are rounded to it: with
            16 bits the draft law is then off by as much as one of its digits. Take float32 where draft ids
            share target ids.

    Returns:
        ``[rows, vocab_size]``. A target id with a NaN among its logits gets NaN, else with a ``+inf`` that.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype, device or range; the message names it.

    Source: the draft vocabulary of EAGLE-3 (Li et al., arXiv 2503.01840).

    Example:
        >>> import torch, specdec_ops
        >>> rows = specdec_ops.expand_draft_logits(torch.tensor([[1.0, 2.0]]), torch.tensor([3, 1]), 5)
        >>> rows.tolist()
        [[-inf, 2.0, -inf, 1.0, -inf]]
    """
    rows = leading_size("expand_draft_logits_", "draft_logits", draft_logits)
    expanded = draft_logits.new_empty((rows, vocab_size), dtype=dtype)
    _op(draft_logits, d2t, per_request(temperature, rows, torch.float32, draft_logits), offsets, expanded)
    return expanded


def expand_draft_logits_(
    draft_logits: Tensor,
    d2t: Tensor,
    *,
    offsets: bool = False,
    temperature: Tensor | float = 1.0,
    expanded: Tensor,
) -> None:
    """``expand_draft_logits`` into the caller's rows.

    Args:
        draft_logits: As there, like the three that follow.
        d2t: See there.
        offsets: See there.
        temperature: See there.
        expanded: ``[rows, vocab_size]`` float32, bfloat16 or float16, any row stride; written.

    Raises:
        RuntimeError: As there.

    Source: as there.

    Example:
        >>> import torch, specdec_ops
        >>> expanded = torch.zeros(1, 4)
        >>> specdec_ops.expand_draft_logits_(
        ...     torch.tensor([[0.0, 0.0]]), torch.tensor([2, 2]), expanded=expanded
        ... )
        >>> round(expanded[0, 2].item(), 4)
        0.6931
    """
    rows = leading_size("expand_draft_logits_", "draft_logits", draft_logits)
    _op(draft_logits, d2t, per_request(temperature, rows, torch.float32, draft_logits), offsets, expanded)


def _reference_expand(
    draft_logits: Tensor, d2t: Tensor, temperature: Tensor, offsets: bool, expanded: Tensor
) -> None:
    members: dict[int, list[int]] = {}
    for draft_id, target in enumerate(d2t.tolist()):
        members.setdefault(target + (draft_id if offsets else 0), []).append(draft_id)
    expanded.fill_(-math.inf)
    for row, logits in enumerate(draft_logits.tolist()):
        t = float(temperature[row])
        for target, ids in members.items():
            values = [logits[i] for i in ids]
            largest = math.nan if any(math.isnan(value) for value in values) else max(values)
            if len(ids) > 1 and math.isfinite(largest) and t >= _reference.GREEDY_TEMPERATURE:
                total = sum(math.exp((value - largest) / t) for value in values)
                largest += t * math.log(total)
            expanded[row, target] = largest


_op = define(
    "expand_draft_logits_(Tensor draft_logits, Tensor d2t, Tensor temperature, bool offsets, "
    "Tensor(a!) expanded) -> ()",
    reference=_reference_expand,
)

"""expand_to_drafts: values of requests, repeated for each of their drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._arguments import draft_totals, leading_size


def expand_to_drafts(
    values: Tensor,
    cu_num_draft_tokens: Tensor,
    *,
    replace_from: float | None = None,
    replace_to: float | None = None,
    num_drafts: int | None = None,
) -> Tensor:
    """Repeats each request's value for each of its drafts, and can replace one value by another.

    Args:
        values: ``[batch]`` float64, float32, bfloat16, float16, int64, int32 or bool, any stride.
        cu_num_draft_tokens: int32 or int64 cumulative counts: ``[batch + 1]`` that start with 0, or
            ``[batch]`` without the 0.
        replace_from: Values that equal this number, once it has the dtype of ``values``, are replaced by
            ``replace_to``; the temperature 0 of greedy requests by 1, for example. An integer dtype must
            hold both, and float64 too. NaN equals nothing. Default: nothing is replaced.
        replace_to: Given with ``replace_from``.
        num_drafts: The length of the output. Default: the last total, which is read from
            ``cu_num_draft_tokens`` (a sync on an accelerator, a graph break in compile).

    Returns:
        ``[num_drafts]``, dtype of ``values``; 0 past the last total.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype, device or range; the message names it. Kernels
            of an accelerator do not read the totals ahead: they clamp them.

    Source: vLLM's ``expand_kernel``.

    Example:
        >>> import torch, specdec_ops
        >>> temperature = torch.tensor([0.7, 0.0])
        >>> specdec_ops.expand_to_drafts(temperature, torch.tensor([0, 2, 3]), replace_from=0, replace_to=1)
        tensor([0.7000, 0.7000, 1.0000])
    """
    if num_drafts is None:
        size = leading_size("expand_to_drafts", "cu_num_draft_tokens", cu_num_draft_tokens)
        num_drafts = int(cu_num_draft_tokens[-1]) if size > 0 else 0
    expanded = values.new_zeros(max(num_drafts, 0))
    _op(values, cu_num_draft_tokens, replace_from, replace_to, expanded)
    return expanded


def expand_to_drafts_(
    values: Tensor,
    cu_num_draft_tokens: Tensor,
    replace_from: float | None = None,
    replace_to: float | None = None,
    *,
    expanded: Tensor,
) -> None:
    """Like :func:`expand_to_drafts`, into the caller's buffer.

    Args:
        values: See :func:`expand_to_drafts`. Its length is the batch.
        cu_num_draft_tokens: See :func:`expand_to_drafts`.
        replace_from: See :func:`expand_to_drafts`.
        replace_to: See :func:`expand_to_drafts`.
        expanded: At least ``[num_drafts]``, dtype of ``values``, any stride; written up to the last total.

    Raises:
        RuntimeError: See :func:`expand_to_drafts`.

    Source: see :func:`expand_to_drafts`.

    Example:
        >>> import torch, specdec_ops
        >>> expanded = torch.empty(3, dtype=torch.int32)
        >>> top_k = torch.tensor([50, 20], dtype=torch.int32)
        >>> specdec_ops.expand_to_drafts_(top_k, torch.tensor([1, 3]), expanded=expanded)
        >>> expanded.tolist()
        [50, 20, 20]
    """
    _op(values, cu_num_draft_tokens, replace_from, replace_to, expanded)


def _reference(
    values: Tensor,
    cu_num_draft_tokens: Tensor,
    replace_from: float | None,
    replace_to: float | None,
    expanded: Tensor,
) -> None:
    totals = draft_totals(cu_num_draft_tokens, values.shape[0])
    if replace_from is not None and replace_to is not None:
        values = torch.where(values == values.new_tensor(replace_from), values.new_tensor(replace_to), values)
    for r in range(values.shape[0]):
        expanded[totals[r] : totals[r + 1]] = values[r]


_op = define(
    "expand_to_drafts_(Tensor values, Tensor cu_num_draft_tokens, float? replace_from, float? replace_to, "
    "Tensor(a!) expanded) -> ()",
    reference=_reference,
)

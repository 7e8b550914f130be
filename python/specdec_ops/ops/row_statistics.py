"""row_statistics: what an engine may ask of a row of logits, without drawing from it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_ops import _reference
from specdec_ops._library import define
from specdec_ops._status import Status
from specdec_ops.ops._arguments import leading_size, per_request


class RowStatisticsOutput(NamedTuple):
    """What ``row_statistics`` returns, one value per row."""

    #: ``[num_rows]`` float64, of ``logits / temperature``, in nats.
    logsumexp: Tensor
    #: ``[num_rows]`` float32, the largest probability.
    max_prob: Tensor
    #: ``[num_rows]`` float32, by how much the largest of ``logits / temperature`` exceeds the second largest:
    #: the logarithm of the quotient of their probabilities. 0 on a tie, infinity where there is no second.
    margin: Tensor
    #: ``[num_rows]`` float32, in nats.
    entropy: Tensor
    #: ``[num_rows]`` int32, values of :class:`specdec_ops.Status`.
    status: Tensor
    #: ``[num_rows]`` float32, the chance that a draft of the draft law is accepted: the sum of ``min(p, q)``.
    #: None without draft rows, as the next.
    accept_prob: Tensor | None
    #: ``[num_rows]`` float32, the total variation between the two laws: the sum of ``max(p - q, 0)``.
    total_variation: Tensor | None


def row_statistics(
    logits: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    draft_logits: Tensor | None = None,
    draft_temperature: Tensor | float | None = None,
    row_indices: Tensor | None = None,
    vocab_size: int | None = None,
) -> RowStatisticsOutput:
    """Entropy, margin and largest probability of rows, and how far draft rows agree with them.

    Statistics of the draft model's row say how likely its draft is to be accepted, before it is drawn: an
    estimator turns them into the ``accept_probs`` of ``plan_verification``. With a target and a draft row,
    ``accept_prob`` is the exact chance of acceptance under ``verify_chain``'s rule, over draft and coin: what
    an estimator learns from, with less noise than from drafts that were kept or not.

    Args:
        logits: ``[rows, width]`` float32, bfloat16 or float16, any row stride.
        temperature: ``[num_rows]`` float32 or a number for all; default 1. Below 1e-5 (and NaN): greedy. The
            statistics of the row are then those at temperature 1; ``accept_prob`` and ``total_variation``
            are those of the law that is used, one-hot at the argmax.
        draft_logits: ``[num_rows, width]``, any of the dtypes, any row stride: the draft law of each row that
            is asked for.
        draft_temperature: ``[num_rows]`` float32 or a number for all. Default: ``temperature``. Greedy: the
            draft is the argmax.
        row_indices: ``[num_rows]`` int32 or int64: which rows of ``logits`` are asked for, in any order and
            as often as wanted. Default: all of them. -1 is no row: its values are NaN, its status OK. On an
            accelerator nobody looks whether an index is in range; others count as -1.
        vocab_size: Columns from here on are padding and do not count. Default: the width of ``logits``.

    Returns:
        A :class:`RowStatisticsOutput`. A row with a NaN or +inf has NaN everywhere; a fully masked row has
        a logsumexp of ``-inf`` and NaN elsewhere; ``status`` tells. Where the draft row is no law (NaN, +inf
        or fully masked, or a logsumexp of 1e9 or more in absolute value), ``accept_prob`` and
        ``total_variation`` are NaN and the status is ``UNUSABLE_DRAFT_LAW``, unless the draft is greedy.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype, device or range; the message names it.

    Source: acceptance is 1 less the total variation (Leviathan et al., arXiv 2211.17192); entropy and margin
    as estimators as in AdaEDL (Agrawal et al., arXiv 2410.18351).

    Example:
        >>> import torch, specdec_ops
        >>> target = torch.tensor([[0.5, 0.25, 0.25]]).log()
        >>> draft = torch.tensor([[0.2, 0.5, 0.3]]).log()
        >>> out = specdec_ops.row_statistics(target, draft_logits=draft)
        >>> round(out.entropy.item(), 4), round(out.accept_prob.item(), 4)
        (1.0397, 0.7)
    """
    rows = logits if row_indices is None else row_indices
    num_rows = leading_size("row_statistics", "logits" if row_indices is None else "row_indices", rows)
    *values, of_pairs = _op(
        logits,
        per_request(temperature, num_rows, torch.float32, logits),
        draft_logits=draft_logits,
        draft_temperature=per_request(draft_temperature, num_rows, torch.float32, logits),
        row_indices=row_indices,
        vocab_size=vocab_size,
    )
    return RowStatisticsOutput(*values, *(of_pairs or (None, None)))


def _fake(
    logits: Tensor,
    temperature: Tensor,
    *,
    draft_logits: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    row_indices: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    num_rows = logits.shape[0] if row_indices is None else row_indices.shape[0]

    def values(dtype: torch.dtype) -> Tensor:
        return logits.new_empty(num_rows, dtype=dtype)

    return (
        values(torch.float64),
        values(torch.float32),
        values(torch.float32),
        values(torch.float32),
        values(torch.int32),
        [values(torch.float32) for _ in range(2 * (draft_logits is not None))],
    )


def _statistics_of(logits: Tensor, temperature: float, size: int) -> tuple[list[float], _reference.Row]:
    """logsumexp, largest probability, margin and entropy; and the law that verification uses."""
    law = _reference.read_row(logits, temperature, size)
    if law.status != Status.OK:
        return [law.logsumexp, math.nan, math.nan, math.nan], law
    if not temperature >= _reference.GREEDY_TEMPERATURE:
        temperature = 1.0
    probs = _reference.read_row(logits, temperature, size).probs
    largest = np.sort(np.append(logits[:size].detach().to("cpu", torch.float64).numpy(), -np.inf))
    gap = float(largest[-1] - largest[-2])
    margin = gap / temperature if math.isfinite(gap) else gap
    return [law.logsumexp, float(probs.max()), margin, _reference.entropy_of_largest(probs, size)], law


def _reference_row_statistics(
    logits: Tensor,
    temperature: Tensor,
    *,
    draft_logits: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    row_indices: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    size = logits.shape[1] if vocab_size is None else vocab_size
    indices = range(logits.shape[0]) if row_indices is None else row_indices.tolist()
    if draft_temperature is None:
        draft_temperature = temperature
    columns: list[list[float]] = [[] for _ in range(7)]
    for row, index in enumerate(indices):
        values, status, accept_prob, total_variation = [math.nan] * 4, Status.OK, math.nan, math.nan
        if index >= 0:
            values, target = _statistics_of(logits[index], float(temperature[row]), size)
            status = target.status
        if index >= 0 and draft_logits is not None and status == Status.OK:
            t = float(draft_temperature[row])
            draft = _reference.read_row(draft_logits[row], t, size)
            usable = draft.status == Status.OK and abs(draft.logsumexp) < _reference.LARGEST_LOGSUMEXP
            if usable or not t >= _reference.GREEDY_TEMPERATURE:
                accept_prob = float(np.minimum(target.probs, draft.probs).sum())
                total_variation = float(np.maximum(target.probs - draft.probs, 0.0).sum())
            else:
                status = Status.UNUSABLE_DRAFT_LAW
        for column, value in zip(
            columns, [*values, float(status), accept_prob, total_variation], strict=True
        ):
            column.append(value)
    dtypes = [torch.float64, torch.float32, torch.float32, torch.float32, torch.int32, *[torch.float32] * 2]
    outputs = [logits.new_tensor(c, dtype=dtype) for c, dtype in zip(columns, dtypes, strict=True)]
    logsumexp, max_prob, margin, entropy, statuses, *of_pairs = outputs
    return logsumexp, max_prob, margin, entropy, statuses, of_pairs if draft_logits is not None else []


_op = define(
    "row_statistics(Tensor logits, Tensor temperature, *, Tensor? draft_logits=None, "
    "Tensor? draft_temperature=None, Tensor? row_indices=None, SymInt? vocab_size=None) "
    "-> (Tensor logsumexp, Tensor max_prob, Tensor margin, Tensor entropy, Tensor status, Tensor[] of_pairs)",
    fake=_fake,
    reference=_reference_row_statistics,
)

"""sample_recovered_probs: recovered tokens from probabilities and the caller's noise."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._arguments import draft_totals


def sample_recovered_probs(
    target_probs: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    inverse_noise: Tensor,
    *,
    draft_probs: Tensor | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Draws for each draft the token to emit if that draft is rejected, by an exponential race.

    The token of a draft is the id ``v`` with the largest ``max(p[v] - q[v], 0) * inverse_noise[v]``, the
    lowest one on ties; without ``draft_probs`` ``q`` takes away all of the draft's own probability and
    nothing else. If ``inverse_noise`` is ``1 / E`` with exponential ``E``, that is a draw from the
    normalised residual. A request's drafts share its noise, which does no harm: one of their recovered
    tokens at most is emitted. ``sample_recovered`` makes its own noise, and only where needed.

    The difference is a float64 if either probability is, else a float32; the product is a float64 if the
    difference or the noise is.

    Args:
        target_probs: ``[num_drafts, width]`` float64, float32, bfloat16 or float16; the last dimension is
            contiguous, rows may have any stride. Need not be normalised. A residual that is NaN counts as 0.
        draft_token_ids: ``[num_drafts]`` int32 or int64; read without ``draft_probs`` only. An id outside
            ``[0, vocab_size)`` takes nothing away.
        cu_num_draft_tokens: int32 or int64 cumulative counts: ``[batch + 1]`` that start with 0, or
            ``[batch]`` without the 0. The last may be less than ``num_drafts``.
        inverse_noise: ``[batch, width]`` float32 or float64, contiguous as above; positive. Where the
            product is NaN the id cannot win.
        draft_probs: ``[num_drafts, width]``, dtypes as ``target_probs``, contiguous as above. Default: the
            draft law is one-hot.
        vocab_size: Columns from here on are padding and never win. Default: the width of ``target_probs``.

    Returns:
        ``[num_drafts]``, dtype of ``draft_token_ids``, in ``[0, vocab_size)``; 0 for a row whose residual
        is 0 everywhere, and past the last total.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype, device or range; the message names it. Kernels
            of an accelerator do not read the totals ahead: they clamp them.

    Source: the residual law of Leviathan et al., arXiv 2211.17192; vLLM's ``sample_recovered_tokens_kernel``.

    Example:
        >>> import torch, specdec_ops
        >>> target, noise = torch.tensor([[0.2, 0.3, 0.5]]), torch.tensor([[1.0, 2.0, 1.0]])
        >>> specdec_ops.sample_recovered_probs(target, torch.tensor([2]), torch.tensor([0, 1]), noise)
        tensor([1])
    """
    token_ids = torch.zeros_like(draft_token_ids)
    _op(target_probs, draft_token_ids, cu_num_draft_tokens, inverse_noise, draft_probs, vocab_size, token_ids)
    return token_ids


def sample_recovered_probs_(
    target_probs: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    inverse_noise: Tensor,
    draft_probs: Tensor | None = None,
    vocab_size: int | None = None,
    *,
    token_ids: Tensor,
) -> None:
    """Like :func:`sample_recovered_probs`, into the caller's buffer.

    Every argument that :func:`sample_recovered_probs` has means the same; those ``[num_drafts, width]``
    may have more rows.

    Args:
        target_probs: See :func:`sample_recovered_probs`.
        draft_token_ids: See :func:`sample_recovered_probs`.
        cu_num_draft_tokens: See :func:`sample_recovered_probs`.
        inverse_noise: See :func:`sample_recovered_probs`. Its number of rows is the batch.
        draft_probs: See :func:`sample_recovered_probs`.
        vocab_size: See :func:`sample_recovered_probs`.
        token_ids: At least ``[num_drafts]`` int32 or int64, any stride; written up to the last total.

    Raises:
        RuntimeError: See :func:`sample_recovered_probs`.

    Source: see :func:`sample_recovered_probs`.

    Example:
        >>> import torch, specdec_ops
        >>> token_ids = torch.empty(1, dtype=torch.int32)
        >>> target, noise = torch.tensor([[0.2, 0.3, 0.5]]), torch.tensor([[1.0, 2.0, 1.0]])
        >>> specdec_ops.sample_recovered_probs_(
        ...     target, torch.tensor([2]), torch.tensor([1]), noise, token_ids=token_ids
        ... )
        >>> token_ids.tolist()
        [1]
    """
    _op(target_probs, draft_token_ids, cu_num_draft_tokens, inverse_noise, draft_probs, vocab_size, token_ids)


def _reference(
    target_probs: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    inverse_noise: Tensor,
    draft_probs: Tensor | None,
    vocab_size: int | None,
    token_ids: Tensor,
) -> None:
    size = target_probs.shape[1] if vocab_size is None else vocab_size
    batch = inverse_noise.shape[0]
    totals = draft_totals(cu_num_draft_tokens, batch)
    float64 = torch.float64 in (target_probs.dtype, None if draft_probs is None else draft_probs.dtype)
    dtype = torch.float64 if float64 else torch.float32
    for r in range(batch):
        for draft in range(totals[r], totals[r + 1]):
            residual = target_probs[draft, :size].to(dtype, copy=True)
            if draft_probs is not None:
                residual -= draft_probs[draft, :size].to(dtype)
            elif 0 <= (x := int(draft_token_ids[draft])) < size:
                residual[x] = 0.0
            residual = torch.where(residual > 0, residual, 0.0)
            scores = (residual * inverse_noise[r, :size]).nan_to_num(-torch.inf, torch.inf, -torch.inf)
            token_ids[draft] = int((scores == scores.max()).nonzero()[0])


_op = define(
    "sample_recovered_probs_(Tensor target_probs, Tensor draft_token_ids, Tensor cu_num_draft_tokens, "
    "Tensor inverse_noise, Tensor? draft_probs, SymInt? vocab_size, Tensor(a!) token_ids) -> ()",
    reference=_reference,
)

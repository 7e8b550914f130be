"""verify_argmax: which drafts of a chain equal the target's argmax."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._arguments import draft_totals, largest_draft_count, leading_size


def verify_argmax(
    target_argmax: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    bonus_token_ids: Tensor,
    *,
    is_greedy: Tensor | None = None,
    accept_rates: Tensor | None = None,
    accept_uniforms: Tensor | None = None,
    max_num_draft_tokens: int | None = None,
) -> Tensor:
    """Verifies each request's chain of drafts against the argmax of the target's rows.

    The longest prefix of drafts that equal the argmax is accepted. What follows it is the argmax where
    the first draft was rejected, or the bonus token if none was.

    With ``accept_rates`` the acceptance is synthetic, to measure an engine at a given rate: draft ``i`` of
    a request is accepted if ``accept_uniforms < accept_rates[i]`` and the draft is not negative, and a
    rejected one is still replaced by the argmax.

    Args:
        target_argmax: ``[num_drafts]`` int32 or int64, the argmax of each draft's target row.
        draft_token_ids: ``[num_drafts]`` int32 or int64. A draft that equals no argmax, like -1, is
            rejected.
        cu_num_draft_tokens: int32 or int64 cumulative counts: ``[batch + 1]`` that start with 0, or
            ``[batch]`` without the 0. The last may be less than ``num_drafts``.
        bonus_token_ids: ``[batch]`` or ``[batch, 1]`` int32 or int64. Not checked: an id outside the
            vocabulary is emitted as it is.
        is_greedy: ``[batch]`` bool; requests that are False are left out. Default: all True.
        accept_rates: ``[k]`` float32 or float64, the rate at which a request's draft ``i`` is accepted if
            those before it were. Default: the argmax decides.
        accept_uniforms: ``[num_drafts]`` float32 or float64; needed and used with ``accept_rates`` only.
        max_num_draft_tokens: The ``k`` of the output's width. Default: the largest count, which is
            read from ``cu_num_draft_tokens`` (a sync on an accelerator, a graph break in compile).

    Returns:
        ``[batch, k + 1]``, dtype of ``draft_token_ids``: accepted drafts, then the argmax or bonus token,
        then -1. Rows that were left out are all -1.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype, device or range; the message names it. Kernels
            of an accelerator do not read the totals ahead: they clamp them, and the drafts of a request to
            the columns and rates that there are.

    Source: greedy verification in Leviathan et al., arXiv 2211.17192; vLLM's
    ``rejection_greedy_sample_kernel``.

    Example:
        >>> import torch, specdec_ops
        >>> argmax, drafts = torch.tensor([4, 5, 6, 7]), torch.tensor([4, 9, 6, 7])
        >>> specdec_ops.verify_argmax(argmax, drafts, torch.tensor([0, 2, 4]), torch.tensor([1, 2]))
        tensor([[ 4,  5, -1],
                [ 6,  7,  2]])
    """
    batch = leading_size("verify_argmax", "bonus_token_ids", bonus_token_ids)
    if max_num_draft_tokens is None:
        max_num_draft_tokens = largest_draft_count(cu_num_draft_tokens, batch)
    token_ids = draft_token_ids.new_full((batch, max_num_draft_tokens + 1), -1)
    _op(
        target_argmax,
        draft_token_ids,
        cu_num_draft_tokens,
        bonus_token_ids,
        is_greedy,
        accept_rates,
        accept_uniforms,
        token_ids,
    )
    return token_ids


def verify_argmax_(
    target_argmax: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    bonus_token_ids: Tensor,
    is_greedy: Tensor | None = None,
    accept_rates: Tensor | None = None,
    accept_uniforms: Tensor | None = None,
    *,
    token_ids: Tensor,
) -> None:
    """Like :func:`verify_argmax`, into the caller's buffer.

    Every argument that :func:`verify_argmax` has means the same; those ``[num_drafts]`` or ``[batch]``,
    but for ``draft_token_ids``, ``cu_num_draft_tokens`` and ``bonus_token_ids``, may be longer.

    Args:
        target_argmax: See :func:`verify_argmax`.
        draft_token_ids: See :func:`verify_argmax`.
        cu_num_draft_tokens: See :func:`verify_argmax`.
        bonus_token_ids: See :func:`verify_argmax`. Its length is the batch.
        is_greedy: See :func:`verify_argmax`.
        accept_rates: See :func:`verify_argmax`.
        accept_uniforms: See :func:`verify_argmax`.
        token_ids: At least ``[batch, k + 1]`` int32 or int64, any strides. Only what is emitted is written:
            the caller fills the rest with -1. An id that int32 does not hold loses its high bits in it.

    Raises:
        RuntimeError: See :func:`verify_argmax`.

    Source: see :func:`verify_argmax`.

    Example:
        >>> import torch, specdec_ops
        >>> token_ids = torch.full((1, 3), -1)
        >>> argmax, drafts = torch.tensor([4, 5]), torch.tensor([4, 9])
        >>> specdec_ops.verify_argmax_(
        ...     argmax, drafts, torch.tensor([2]), torch.tensor([1]), token_ids=token_ids
        ... )
        >>> token_ids
        tensor([[ 4,  5, -1]])
    """
    _op(
        target_argmax,
        draft_token_ids,
        cu_num_draft_tokens,
        bonus_token_ids,
        is_greedy,
        accept_rates,
        accept_uniforms,
        token_ids,
    )


def _reference(
    target_argmax: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    bonus_token_ids: Tensor,
    is_greedy: Tensor | None,
    accept_rates: Tensor | None,
    accept_uniforms: Tensor | None,
    token_ids: Tensor,
) -> None:
    batch = bonus_token_ids.shape[0]
    totals = draft_totals(cu_num_draft_tokens, batch)
    for r in range(batch):
        if is_greedy is not None and not is_greedy[r]:
            continue
        emitted = []
        for draft in range(totals[r], totals[r + 1]):
            x, best = int(draft_token_ids[draft]), int(target_argmax[draft])
            if accept_rates is None or accept_uniforms is None:
                accepted = x == best
            else:
                rate = float(accept_rates[draft - totals[r]])
                accepted = x >= 0 and float(accept_uniforms[draft]) < rate
            emitted.append(x if accepted else best)
            if not accepted:
                break
        else:
            emitted.append(int(bonus_token_ids[r]))
        token_ids[r, : len(emitted)] = torch.tensor(emitted)


_op = define(
    "verify_argmax_(Tensor target_argmax, Tensor draft_token_ids, Tensor cu_num_draft_tokens, "
    "Tensor bonus_token_ids, Tensor? is_greedy, Tensor? accept_rates, Tensor? accept_uniforms, "
    "Tensor(a!) token_ids) -> ()",
    reference=_reference,
)

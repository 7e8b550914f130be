"""verify_probs: which drafts of a chain are kept, from probabilities and tokens that were drawn already."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._arguments import draft_totals, largest_draft_count, leading_size


def verify_probs(
    target_probs: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    recovered_token_ids: Tensor,
    bonus_token_ids: Tensor,
    accept_uniforms: Tensor,
    *,
    draft_probs: Tensor | None = None,
    is_greedy: Tensor | None = None,
    accept_rates: Tensor | None = None,
    vocab_size: int | None = None,
    max_num_draft_tokens: int | None = None,
) -> Tensor:
    """Verifies each request's chain of drafts against probabilities, with given recovered and bonus tokens.

    Draft ``x`` with target probability ``p`` and draft probability ``q`` is accepted if both are
    positive and ``p / q >= u``. At the first rejection the recovered token of that draft is emitted; if every
    draft is accepted, the bonus token. ``verify_chain`` does all of this from logits, in one pass.

    The ratio is a float64 if either probability is, else a float32; ``u`` is compared to it as a float64.

    With ``accept_rates`` the acceptance is synthetic, to measure an engine at a given rate: draft ``i`` of
    a request is accepted if ``u < accept_rates[i]``, and the probabilities are not read.

    Args:
        target_probs: ``[num_drafts, width]`` float64, float32, bfloat16 or float16, any strides. A NaN
            rejects.
        draft_token_ids: ``[num_drafts]`` int32 or int64. A draft outside ``[0, vocab_size)`` is rejected.
        cu_num_draft_tokens: int32 or int64 cumulative counts: ``[batch + 1]`` that start with 0, or
            ``[batch]`` without the 0. The last may be less than ``num_drafts``.
        recovered_token_ids: ``[num_drafts]`` int32 or int64, drawn from the residual law of each draft
            (``sample_recovered_probs``). Not checked: an id outside the vocabulary is emitted as it is.
        bonus_token_ids: ``[batch]`` or ``[batch, 1]`` int32 or int64, not checked either.
        accept_uniforms: ``[num_drafts]`` float32 or float64, the ``u`` of each draft.
        draft_probs: ``[num_drafts, width]``, dtypes as ``target_probs``, any strides. Default: the draft
            law is one-hot, ``q`` is 1.
        is_greedy: ``[batch]`` bool; requests that are True are left out. Default: all False.
        accept_rates: ``[k]`` float32 or float64, the rate at which a request's draft ``i`` is accepted if
            those before it were. Default: the probabilities decide.
        vocab_size: Ids from here on are padding. Default: the width of ``target_probs``.
        max_num_draft_tokens: The ``k`` of the output's width. Default: the largest count, which is
            read from ``cu_num_draft_tokens`` (a sync on an accelerator, a graph break in compile).

    Returns:
        ``[batch, k + 1]``, dtype of ``draft_token_ids``: accepted drafts, then the recovered or bonus
        token, then -1. Rows that were left out are all -1.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype, device or range; the message names it. Kernels
            of an accelerator do not read the totals ahead: they clamp them, and the drafts of a request to
            the columns and rates that there are.

    Source: Leviathan et al., arXiv 2211.17192; vLLM's ``rejection_random_sample_kernel``,
    which accepts a draft of probability 0 if ``u`` is 0.

    Example:
        >>> import torch, specdec_ops
        >>> probs = torch.tensor([[0.5, 0.5], [0.1, 0.9]])
        >>> specdec_ops.verify_probs(
        ...     probs,
        ...     draft_token_ids=torch.tensor([1, 0]),
        ...     cu_num_draft_tokens=torch.tensor([0, 2]),
        ...     recovered_token_ids=torch.tensor([0, 1]),
        ...     bonus_token_ids=torch.tensor([0]),
        ...     accept_uniforms=torch.tensor([0.5, 0.5]),
        ... )
        tensor([[ 1,  1, -1]])
    """
    batch = leading_size("verify_probs", "bonus_token_ids", bonus_token_ids)
    if max_num_draft_tokens is None:
        max_num_draft_tokens = largest_draft_count(cu_num_draft_tokens, batch)
    token_ids = draft_token_ids.new_full((batch, max_num_draft_tokens + 1), -1)
    _op(
        target_probs,
        draft_token_ids,
        cu_num_draft_tokens,
        recovered_token_ids,
        bonus_token_ids,
        accept_uniforms,
        draft_probs,
        is_greedy,
        accept_rates,
        vocab_size,
        token_ids,
    )
    return token_ids


def verify_probs_(
    target_probs: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    recovered_token_ids: Tensor,
    bonus_token_ids: Tensor,
    accept_uniforms: Tensor,
    draft_probs: Tensor | None = None,
    is_greedy: Tensor | None = None,
    accept_rates: Tensor | None = None,
    vocab_size: int | None = None,
    *,
    token_ids: Tensor,
) -> None:
    """Like :func:`verify_probs`, into the caller's buffer.

    Every argument that :func:`verify_probs` has means the same; those ``[num_drafts, ...]`` or
    ``[batch]``, but for ``draft_token_ids``, ``cu_num_draft_tokens`` and ``bonus_token_ids``, may be longer.

    Args:
        target_probs: See :func:`verify_probs`.
        draft_token_ids: See :func:`verify_probs`.
        cu_num_draft_tokens: See :func:`verify_probs`.
        recovered_token_ids: See :func:`verify_probs`.
        bonus_token_ids: See :func:`verify_probs`. Its length is the batch.
        accept_uniforms: See :func:`verify_probs`.
        draft_probs: See :func:`verify_probs`.
        is_greedy: See :func:`verify_probs`.
        accept_rates: See :func:`verify_probs`.
        vocab_size: See :func:`verify_probs`.
        token_ids: At least ``[batch, k + 1]`` int32 or int64, any strides. Only what is emitted is written:
            the caller fills the rest with -1. An id that int32 does not hold loses its high bits in it.

    Raises:
        RuntimeError: See :func:`verify_probs`.

    Source: see :func:`verify_probs`.

    Example:
        >>> import torch, specdec_ops
        >>> token_ids = torch.full((1, 2), -1)
        >>> drafts, recovered, bonus = torch.tensor([1]), torch.tensor([0]), torch.tensor([2])
        >>> specdec_ops.verify_probs_(
        ...     torch.tensor([[0.3, 0.3, 0.4]]),
        ...     drafts,
        ...     torch.tensor([1]),
        ...     recovered,
        ...     bonus,
        ...     torch.tensor([0.25]),
        ...     token_ids=token_ids,
        ... )
        >>> token_ids
        tensor([[1, 2]])
    """
    _op(
        target_probs,
        draft_token_ids,
        cu_num_draft_tokens,
        recovered_token_ids,
        bonus_token_ids,
        accept_uniforms,
        draft_probs,
        is_greedy,
        accept_rates,
        vocab_size,
        token_ids,
    )


def _reference(
    target_probs: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    recovered_token_ids: Tensor,
    bonus_token_ids: Tensor,
    accept_uniforms: Tensor,
    draft_probs: Tensor | None,
    is_greedy: Tensor | None,
    accept_rates: Tensor | None,
    vocab_size: int | None,
    token_ids: Tensor,
) -> None:
    size = target_probs.shape[1] if vocab_size is None else vocab_size
    batch = bonus_token_ids.shape[0]
    totals = draft_totals(cu_num_draft_tokens, batch)
    float64 = torch.float64 in (target_probs.dtype, None if draft_probs is None else draft_probs.dtype)
    dtype = torch.float64 if float64 else torch.float32
    for r in range(batch):
        if is_greedy is not None and is_greedy[r]:
            continue
        emitted = []
        for draft in range(totals[r], totals[r + 1]):
            x, u = int(draft_token_ids[draft]), float(accept_uniforms[draft])
            if not 0 <= x < size:
                accepted = False
            elif accept_rates is not None:
                accepted = u < float(accept_rates[draft - totals[r]])
            else:
                p = target_probs[draft, x].to(dtype)
                q = torch.ones((), dtype=dtype) if draft_probs is None else draft_probs[draft, x].to(dtype)
                accepted = bool(p > 0) and bool(q > 0) and float(p / q) >= u
            emitted.append(x if accepted else int(recovered_token_ids[draft]))
            if not accepted:
                break
        else:
            emitted.append(int(bonus_token_ids[r]))
        token_ids[r, : len(emitted)] = torch.tensor(emitted)


_op = define(
    "verify_probs_(Tensor target_probs, Tensor draft_token_ids, Tensor cu_num_draft_tokens, "
    "Tensor recovered_token_ids, Tensor bonus_token_ids, Tensor accept_uniforms, Tensor? draft_probs, "
    "Tensor? is_greedy, Tensor? accept_rates, SymInt? vocab_size, Tensor(a!) token_ids) -> ()",
    reference=_reference,
)

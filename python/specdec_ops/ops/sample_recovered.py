"""sample_recovered: what to emit in place of a rejected draft."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ops import _reference
from specdec_ops._library import define
from specdec_ops._status import Status
from specdec_ops.ops._arguments import (
    filters_are_joint,
    filters_per_request,
    leading_size,
    per_request,
    seeds_per_request,
)


class SampleRecoveredOutput(NamedTuple):
    """What ``sample_recovered`` returns, one value per row."""

    #: ``[num_drafts]``, dtype of ``draft_token_ids``.
    token_ids: Tensor
    #: ``[num_drafts]`` int32, values of :class:`specdec_ops.Status`.
    status: Tensor


def sample_recovered(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    draft_logits: Tensor | None = None,
    draft_probs: Tensor | None = None,
    draft_logsumexp: Tensor | None = None,
    draft_support_ids: Tensor | None = None,
    draft_support_logprobs: Tensor | None = None,
    draft_temperature: Tensor | float | None = None,
    has_draft_law: Tensor | None = None,
    seeds: Tensor | int | None = None,
    positions: Tensor | None = None,
    uniforms: Tensor | None = None,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    draft_top_k: Tensor | int | None = None,
    draft_top_p: Tensor | float | None = None,
    draft_min_p: Tensor | float | None = None,
    draft_thresholds: Tensor | None = None,
    filter_order: str = "sequential",
    vocab_size: int | None = None,
) -> SampleRecoveredOutput:
    """Draws a recovered token for each draft row, as if that draft had been rejected.

    The token comes from the normalised ``max(p - q, 0)``, with q the draft law as in
    ``verify_chain``: one-hot at the draft if no law is given. ``verify_chain`` does this by itself for
    the one position that needs it; this op serves engines that accept drafts by a rule of their own.
    With filters p and q are what these keep of the rows.

    Args:
        target_logits: ``[num_drafts, width]`` float32, bfloat16 or float16, any row stride.
        draft_token_ids: ``[num_drafts]`` int32 or int64. A row whose draft lies outside
            ``[0, vocab_size)`` draws from the target law.
        temperature: ``[num_drafts]`` float32 or a number for all; default 1. Below 1e-5: the argmax.
        draft_logits: As in ``verify_chain``.
        draft_probs: As in ``verify_chain``.
        draft_logsumexp: As in ``verify_chain``.
        draft_support_ids: As in ``verify_chain``.
        draft_support_logprobs: As in ``verify_chain``.
        draft_temperature: ``[num_drafts]`` float32 or a number; default ``temperature``.
        has_draft_law: ``[num_drafts]`` bool; False treats that draft as one-hot. Default: all True.
        seeds: ``[num_drafts]`` int64 or a number for all. Needed with ``positions`` unless
            ``uniforms`` is given.
        positions: ``[num_drafts]`` int32 or int64, the absolute position of each draft.
        uniforms: ``[num_drafts]`` float32 or float64 in [0, 1), instead of seeds.
        top_k: ``[num_drafts]`` int32 or int64, or a number for all: p is what this, ``top_p`` and ``min_p``
            keep of a row, as in ``verify_chain``. Greedy rows have no filters.
        top_p: ``[num_drafts]`` float32 or a number.
        min_p: ``[num_drafts]`` float32 or a number.
        draft_top_k: ``[num_drafts]`` int32 or int64, or a number for all: q is what this, ``draft_top_p`` and
            ``draft_min_p`` keep of a row of ``draft_logits``, as in ``verify_chain``.
        draft_top_p: ``[num_drafts]`` float32 or a number.
        draft_min_p: ``[num_drafts]`` float32 or a number.
        draft_thresholds: ``[num_drafts]`` float32, as ``sample`` returns them: ``draft_logits`` below are
            masked. Instead of the draft's filters, and needed where ``draft_logsumexp`` is that of filtered
            rows.
        filter_order: As in ``verify_chain``.
        vocab_size: Columns from here on are padding and never win. Default: the width.

    Returns:
        A :class:`SampleRecoveredOutput`. Where rounding leaves no mass in the difference the token
        comes from the target law. ``status`` tells of draft laws that are
        not usable where they were consulted.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype, device or range; the message names it.

    Source: Leviathan et al., arXiv 2211.17192, algorithm 1; with seeds by von Neumann's rejection sampling.

    Example:
        >>> import torch, specdec_ops
        >>> logits = torch.tensor([[0.0, 0.0]])
        >>> specdec_ops.sample_recovered(
        ...     logits, torch.tensor([0]), uniforms=torch.tensor([0.25])
        ... ).token_ids.tolist()
        [1]
    """
    num_drafts = leading_size("sample_recovered", "draft_token_ids", draft_token_ids)
    filters = filters_per_request(top_k, top_p, min_p, num_drafts, target_logits)
    draft_filters = filters_per_request(draft_top_k, draft_top_p, draft_min_p, num_drafts, target_logits)
    return SampleRecoveredOutput(
        *_op(
            target_logits,
            draft_token_ids,
            per_request(temperature, num_drafts, torch.float32, target_logits),
            draft_logits=draft_logits,
            draft_probs=draft_probs,
            draft_logsumexp=draft_logsumexp,
            draft_support_ids=draft_support_ids,
            draft_support_logprobs=draft_support_logprobs,
            draft_temperature=per_request(draft_temperature, num_drafts, torch.float32, target_logits),
            has_draft_law=has_draft_law,
            seeds=seeds_per_request("sample_recovered", seeds, num_drafts, target_logits),
            positions=positions,
            uniforms=uniforms,
            top_k=filters[0],
            top_p=filters[1],
            min_p=filters[2],
            draft_top_k=draft_filters[0],
            draft_top_p=draft_filters[1],
            draft_min_p=draft_filters[2],
            draft_thresholds=draft_thresholds,
            joint_filters=filters_are_joint("sample_recovered", filter_order),
            vocab_size=vocab_size,
        )
    )


def _fake(
    target_logits: Tensor, draft_token_ids: Tensor, temperature: Tensor, **_: object
) -> tuple[Tensor, Tensor]:
    num_drafts = draft_token_ids.shape[0]
    return (
        draft_token_ids.new_empty(num_drafts),
        draft_token_ids.new_empty(num_drafts, dtype=torch.int32),
    )


def _reference_sample_recovered(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    temperature: Tensor,
    *,
    draft_logits: Tensor | None = None,
    draft_probs: Tensor | None = None,
    draft_logsumexp: Tensor | None = None,
    draft_support_ids: Tensor | None = None,
    draft_support_logprobs: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    has_draft_law: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    uniforms: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_top_k: Tensor | None = None,
    draft_top_p: Tensor | None = None,
    draft_min_p: Tensor | None = None,
    draft_thresholds: Tensor | None = None,
    joint_filters: bool = False,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    size = target_logits.shape[1] if vocab_size is None else vocab_size
    tokens, statuses = [], []
    target_logits = target_logits.clone()
    draft_logits = None if draft_logits is None else draft_logits.clone()
    for r, x in enumerate(draft_token_ids.tolist()):
        t = float(temperature[r])
        draft_t = t if draft_temperature is None else float(draft_temperature[r])
        filters = _reference.Filters.of(r, top_k, top_p, min_p, joint_filters)
        _reference.filter_row_(target_logits[r], t, size, filters)
        if draft_logits is not None:
            filters = _reference.Filters.of(r, draft_top_k, draft_top_p, draft_min_p, joint_filters)
            _reference.filter_row_(draft_logits[r], draft_t, size, filters)
            if draft_thresholds is not None:
                draft_logits[r][draft_logits[r] < draft_thresholds[r]] = -torch.inf
        law = _reference.DraftLaw(
            has_law=has_draft_law is None or bool(has_draft_law[r]),
            logits=draft_logits,
            probs=draft_probs,
            logsumexp=draft_logsumexp,
            support_ids=draft_support_ids,
            support_logprobs=draft_support_logprobs,
            temperature=draft_t,
            vocab_size=size,
        )
        row = _reference.read_row(target_logits[r], t, size)
        draws = _reference.draws_of(uniforms, seeds, positions, r)
        token, status = _reference.pick(row.probs, draws(0)), row.status
        if status == Status.OK and not 0 <= x < size:
            status = Status.OK if x == -1 else Status.INVALID_DRAFT_ID
        elif status == Status.OK and t >= _reference.GREEDY_TEMPERATURE:
            token, status = _reference.recover(row.probs, x, law, r, draws)
        tokens.append(token)
        statuses.append(int(status))
    return draft_token_ids.new_tensor(tokens), draft_token_ids.new_tensor(statuses, dtype=torch.int32)


_op = define(
    "sample_recovered(Tensor target_logits, Tensor draft_token_ids, Tensor temperature, *, "
    "Tensor? draft_logits=None, Tensor? draft_probs=None, Tensor? draft_logsumexp=None, "
    "Tensor? draft_support_ids=None, Tensor? draft_support_logprobs=None, "
    "Tensor? draft_temperature=None, Tensor? has_draft_law=None, Tensor? seeds=None, "
    "Tensor? positions=None, Tensor? uniforms=None, Tensor? top_k=None, Tensor? top_p=None, "
    "Tensor? min_p=None, Tensor? draft_top_k=None, Tensor? draft_top_p=None, Tensor? draft_min_p=None, "
    "Tensor? draft_thresholds=None, bool joint_filters=False, SymInt? vocab_size=None) "
    "-> (Tensor token_ids, Tensor status)",
    fake=_fake,
    reference=_reference_sample_recovered,
)

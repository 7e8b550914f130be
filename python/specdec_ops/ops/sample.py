"""sample: one token per row, straight from logits."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec_ops import _reference
from specdec_ops._library import define
from specdec_ops._status import Status
from specdec_ops.ops._arguments import (
    filters_are_joint,
    filters_per_request,
    leading_size,
    number_of_entries,
    per_request,
    seeds_per_request,
)


class SampleOutput(NamedTuple):
    """What ``sample`` returns, one value or law per row; the last two are ``None`` without ``law_size``."""

    #: ``[batch]``, dtype ``token_dtype``.
    token_ids: Tensor
    #: ``[batch]`` float32, log-probability of the token. Greedy and unusable rows: see ``sample``.
    logprobs: Tensor
    #: ``[batch]`` float64, of ``logits / temperature``, of what filters keep; what ``verify_chain`` takes as
    #: ``draft_logsumexp``.
    logsumexp: Tensor
    #: ``[batch]`` int32, values of :class:`specdec_ops.Status`.
    status: Tensor
    #: ``[batch]`` float32: filters mask the logits below, ``-inf`` where none does; what ``verify_chain``
    #: takes as ``draft_thresholds``.
    thresholds: Tensor
    #: ``[batch, law_size]``, dtype ``token_dtype``: the ids that the token was drawn from, the most probable
    #: first and equal logits by rising id, then -1; what ``verify_chain`` takes as ``draft_support_ids``.
    support_ids: Tensor | None = None
    #: ``[batch, law_size]`` float32, natural logarithms of their probabilities, then ``-inf``; what
    #: ``verify_chain`` takes as ``draft_support_logprobs``.
    support_logprobs: Tensor | None = None


def sample(
    logits: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    seeds: Tensor | int | None = None,
    positions: Tensor | None = None,
    request_indices: Tensor | None = None,
    draft_slot: Tensor | int | None = None,
    uniforms: Tensor | None = None,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    filter_order: str = "sequential",
    vocab_size: int | None = None,
    token_dtype: torch.dtype = torch.int64,
    sampler: str = "inverse_cdf",
    law_size: int | None = None,
) -> SampleOutput:
    """Draws one token per row from ``softmax(logits / temperature)``, or from what filters keep of it.

    Without ``draft_slot`` it is the plain sampler: at a position it draws with the same random
    number as the recovered or bonus token of ``verify_chain`` there, so that a request without
    drafts gets the same token from either. With ``draft_slot`` it is a draft model's sampler: the
    random numbers come from a stream of their own, keyed by the step's first position and the slot.

    Args:
        logits: ``[batch, width]`` float32, bfloat16 or float16, any row stride.
        temperature: ``[batch]`` float32 or a number for all; default 1. Below 1e-5 (and NaN): the
            argmax, lowest id on ties; log-probability and logsumexp are then at temperature 1. With
            ``request_indices``: ``[max_requests]``.
        seeds: ``[batch]`` int64 (all 64 bits count) or a number for all. Needed with ``positions``
            unless ``uniforms`` is given. With ``request_indices``: ``[max_requests]``.
        positions: ``[batch]`` int32 or int64. Without ``draft_slot``: the absolute position of the
            token that is drawn. With it: that of slot 0, which ``verify_chain`` gets as ``positions``.
        request_indices: ``[batch]`` int32 or int64, where temperatures and seeds are kept for more requests
            than are in the batch: row t has those at ``request_indices[t]``, in [0, max_requests). -1 is a
            row of no request, such as the padding of a graph: it gives the argmax, and nothing is drawn.
            Where both are numbers, max_requests is ``batch``. On an accelerator nobody looks whether an
            index is in range: a larger one counts as the last, a smaller one as -1.
        draft_slot: The draft's place in its chain, 0 for the first: a number, or a tensor, int32 or int64, of
            no dimension or ``[batch]``, which a captured graph reads anew at each replay. On an accelerator
            the low 32 bits of a tensor's values count.
        uniforms: ``[batch]`` float32 or float64 in [0, 1), instead of seeds and ``draft_slot``.
        top_k: As in ``verify_chain``, as are the three that follow: ``[batch]``, or a number for all; with
            ``request_indices``: ``[max_requests]``. Log-probability and logsumexp are those of the ids that
            are kept. A draft model's rows can be verified without another pass over them by handing
            ``logsumexp`` and ``thresholds`` to ``verify_chain``.
        top_p: As in ``verify_chain``.
        min_p: As in ``verify_chain``.
        filter_order: As in ``verify_chain``.
        vocab_size: Columns from here on are padding and never win. Default: the width.
        token_dtype: ``torch.int64`` (default) or ``torch.int32``.
        sampler: ``"inverse_cdf"`` (default); or ``"gumbel"``: the id with the largest sum of its logit (over
            the temperature) and Gumbel noise, which depends on the seed, the position (``positions`` plus
            ``draft_slot``) and the id alone. So a draft meets the noise that
            ``verify_chain(rule="exact_match", sampler="gumbel")`` draws the target's token with, and is that
            token most of the time. Not for drafts that any other rule verifies. Needs seeds.
        law_size: How many ids the token is drawn from at most, in [1, 64]; default: all that filters keep.
            The largest logits of those stay; where several tie for the last places, the lowest ids. Their law
            comes back as ``support_ids`` and ``support_logprobs``, and with these ``verify_chain`` reads no
            draft row: draft logits need not be kept. Log-probability and logsumexp are those of that law;
            ``thresholds`` are at least the ``law_size``-th largest logit. With one seed, the token differs
            from that without ``law_size``. Not with Gumbel noise.

    Returns:
        A :class:`SampleOutput`. A row with a NaN or +inf gives the argmax of what is not NaN (0 if
        nothing is) and log-probability and logsumexp NaN; a fully masked row gives 0, NaN and
        ``-inf``; ``status`` tells. With ``law_size``, the law of such a row and of a greedy one is one-hot at
        its token, which is what it was drawn from.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype, device or range; the message names it.

    Source: inverse transform sampling; Gumbel-max sampling, with noise that is shared as by Daliri et al.,
    arXiv 2408.07978; random numbers by Philox4x32-10 (Salmon et al., SC 2011).

    Example:
        >>> import torch, specdec_ops
        >>> out = specdec_ops.sample(torch.tensor([[0.0, 2.0]]), temperature=0.0)
        >>> out.token_ids.tolist(), round(out.logprobs.item(), 4)
        ([1], -0.1269)

        Two of three ids, and their law:

        >>> row = torch.tensor([[0.25, 0.25, 0.5]]).log()
        >>> out = specdec_ops.sample(row, uniforms=torch.tensor([0.7]), law_size=2)
        >>> out.token_ids.tolist(), out.support_ids.tolist()
        ([0], [[2, 0]])
        >>> [round(prob, 4) for prob in out.support_logprobs[0].exp().tolist()]
        [0.6667, 0.3333]
    """
    batch = leading_size("sample", "logits", logits)
    num_entries = batch
    if request_indices is not None:
        num_entries = number_of_entries(
            batch, (temperature, 1), (seeds, 1), (top_k, 1), (top_p, 1), (min_p, 1)
        )
    k, p, least_p = filters_per_request(top_k, top_p, min_p, num_entries, logits)
    slots = draft_slot if isinstance(draft_slot, Tensor) else None
    *of_rows, law = _op(
        logits,
        per_request(temperature, num_entries, torch.float32, logits),
        seeds=seeds_per_request("sample", seeds, num_entries, logits),
        positions=positions,
        request_indices=request_indices,
        draft_slot=draft_slot if slots is None else None,
        draft_slots=slots,
        uniforms=uniforms,
        top_k=k,
        top_p=p,
        min_p=least_p,
        joint_filters=filters_are_joint("sample", filter_order),
        vocab_size=vocab_size,
        token_dtype=token_dtype,
        sampler=sampler,
        law_size=law_size,
    )
    return SampleOutput(*of_rows, *law)


def _fake(
    logits: Tensor,
    temperature: Tensor,
    *,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    request_indices: Tensor | None = None,
    draft_slot: int | None = None,
    draft_slots: Tensor | None = None,
    uniforms: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    joint_filters: bool = False,
    vocab_size: int | None = None,
    token_dtype: torch.dtype = torch.int64,
    sampler: str = "inverse_cdf",
    law_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    batch = logits.shape[0]
    return (
        logits.new_empty(batch, dtype=token_dtype),
        logits.new_empty(batch, dtype=torch.float32),
        logits.new_empty(batch, dtype=torch.float64),
        logits.new_empty(batch, dtype=torch.int32),
        logits.new_empty(batch, dtype=torch.float32),
        [logits.new_empty(batch, law_size, dtype=dtype) for dtype in (token_dtype, torch.float32)]
        if law_size is not None
        else [],
    )


def _reference_sample(
    logits: Tensor,
    temperature: Tensor,
    *,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    request_indices: Tensor | None = None,
    draft_slot: int | None = None,
    draft_slots: Tensor | None = None,
    uniforms: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    joint_filters: bool = False,
    vocab_size: int | None = None,
    token_dtype: torch.dtype = torch.int64,
    sampler: str = "inverse_cdf",
    law_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    size = logits.shape[1] if vocab_size is None else vocab_size
    tokens, logprobs, logsumexps, statuses, thresholds, laws = [], [], [], [], [], []
    logits = logits.clone()
    for r in range(logits.shape[0]):
        entry = r if request_indices is None else int(request_indices[r])
        t = float(temperature[entry]) if entry >= 0 else 0.0
        filters = _reference.Filters.of(max(entry, 0), top_k, top_p, min_p, joint_filters)
        threshold = _reference.filter_row_(logits[r], t, size, filters)
        if law_size is not None:
            threshold = max(threshold, _reference.keep_largest_(logits[r], t, size, law_size))
        thresholds.append(threshold)
        row = _reference.read_row(logits[r], t, size)
        slot = draft_slot
        if uniforms is not None:
            draw = _reference.TokenDraw(float(uniforms[r]))
        elif seeds is not None and positions is not None and entry >= 0:
            if draft_slots is not None:
                slot = int(draft_slots[r] if draft_slots.dim() > 0 else draft_slots)
            stream = _reference.Stream.TARGET if slot is None else _reference.Stream.DRAFT
            draw = _reference.token_draw(int(seeds[entry]), stream, slot or 0, int(positions[r]))
        else:
            draw = _reference.TokenDraw(0.0)
        if law_size is None:
            token = _reference.pick(row.probs, draw)
        else:
            law = _reference.support_of(logits[r], t, size, row)
            number = draw.block if draw.id is None else draw.id
            token = int(law.ids[_reference.choose(np.exp(law.logprobs), number)])
            laws.append(law)
        if sampler == "gumbel" and seeds is not None and positions is not None and entry >= 0:
            token = _reference.pick_by_noise(row.probs, int(seeds[entry]), int(positions[r]) + (slot or 0))
        usable_t = t if t >= _reference.GREEDY_TEMPERATURE else 1.0
        tokens.append(token)
        logprobs.append(
            float(logits[r, token]) / usable_t - row.logsumexp if row.status == Status.OK else math.nan
        )
        logsumexps.append(row.logsumexp)
        statuses.append(int(row.status))
    return (
        logits.new_tensor(tokens, dtype=token_dtype),
        logits.new_tensor(logprobs, dtype=torch.float32),
        logits.new_tensor(logsumexps, dtype=torch.float64),
        logits.new_tensor(statuses, dtype=torch.int32),
        logits.new_tensor(thresholds, dtype=torch.float32),
        [] if law_size is None else _reference.support_tensors(laws, law_size, token_dtype, logits),
    )


_op = define(
    "sample(Tensor logits, Tensor temperature, *, Tensor? seeds=None, Tensor? positions=None, "
    "Tensor? request_indices=None, SymInt? draft_slot=None, Tensor? draft_slots=None, "
    "Tensor? uniforms=None, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, "
    "bool joint_filters=False, SymInt? vocab_size=None, ScalarType token_dtype=int64, "
    "str sampler='inverse_cdf', SymInt? law_size=None) "
    "-> (Tensor token_ids, Tensor logprobs, Tensor logsumexp, Tensor status, Tensor thresholds, "
    "Tensor[] law)",
    fake=_fake,
    reference=_reference_sample,
)

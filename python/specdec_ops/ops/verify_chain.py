"""verify_chain: which drafts of a chain are kept, and what is emitted after them."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ops import _reference
from specdec_ops._library import define
from specdec_ops._status import Status
from specdec_ops.ops._arguments import leading_size, per_request, seeds_per_request


class VerifyChainOutput(NamedTuple):
    """What ``verify_chain`` returns; the last three are ``None`` unless asked for."""

    #: ``[batch, k + 1]``, dtype of ``draft_token_ids``: accepted drafts, then one recovered or
    #: bonus token, then -1.
    token_ids: Tensor
    #: ``[batch]`` int32, without the recovered or bonus token.
    num_accepted: Tensor
    #: ``[batch]`` int32, values of :class:`specdec_ops.Status`.
    status: Tensor
    #: ``[num_drafts + batch]`` float64, of ``logits / temperature``, NaN for rows that were not read.
    logsumexp: Tensor | None = None
    #: ``[batch, k + 1]`` float32, of the emitted tokens under the target law, NaN where padded.
    logprobs: Tensor | None = None
    #: ``[num_drafts]`` float32, ``min(1, p / q)``, NaN for drafts that were not reached.
    accept_probs: Tensor | None = None


def verify_chain(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
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
    accept_uniforms: Tensor | None = None,
    recovered_uniforms: Tensor | None = None,
    vocab_size: int | None = None,
    max_num_draft_tokens: int | None = None,
    return_logsumexp: bool = False,
    return_logprobs: bool = False,
    return_accept_probs: bool = False,
) -> VerifyChainOutput:
    """Verifies each request's chain of drafts by token-level speculative sampling.

    Draft ``x`` with target probability ``p`` and draft probability ``q`` is accepted if
    ``u * q < p``. At the first rejection one token is drawn from the normalised ``max(p - q, 0)``
    (recovered); if every draft is accepted, one from the last row (bonus). The emitted tokens follow
    the target law exactly, whatever drafted them. A greedy request accepts the longest prefix of
    drafts that equal the argmax and emits the next argmax. Rows are read in order and only until
    the request's fate is known; no probability tensor is made.

    The draft law is one of: nothing (a one-hot law at the draft, exact for every drafter and the
    right choice for argmax and n-gram drafters), ``draft_logits``, ``draft_probs``, or a sparse law
    (``draft_support_ids`` with ``draft_support_logprobs``). It must be the law that the draft was
    drawn from, after that drafter's own temperature and filters.

    Args:
        target_logits: ``[num_drafts + batch, width]`` float32, bfloat16 or float16; the last
            dimension is contiguous, rows may have any stride. For each request in turn its draft
            rows, then its bonus row. ``-inf`` masks an id.
        draft_token_ids: ``[num_drafts]`` int32 or int64. -1 ends a request's drafts early. Any
            other id outside ``[0, vocab_size)`` is rejected there (``Status.INVALID_DRAFT_ID``).
        cu_num_draft_tokens: ``[batch + 1]`` int32 or int64, cumulative counts that start with 0.
        temperature: ``[batch]`` float32 or a number for all; default 1. Below 1e-5 (and NaN): greedy.
        draft_logits: ``[num_drafts, width]`` float32, bfloat16 or float16, before temperature.
        draft_probs: ``[num_drafts, width]`` float32, bfloat16 or float16, used as they are.
        draft_logsumexp: ``[num_drafts]`` float32 or float64, of ``draft_logits / draft_temperature``, as
            ``sample`` returns it. Spares the pass over the draft rows; trusted. With the float64
            values of ``sample`` the tokens are the same bit for bit.
        draft_support_ids: ``[num_drafts, support]`` int32 or int64, -1 pads.
        draft_support_logprobs: ``[num_drafts, support]`` float32.
        draft_temperature: ``[batch]`` float32 or a number; default ``temperature``.
        has_draft_law: ``[batch]`` bool; False treats that request's drafts as one-hot. Default: all
            True.
        seeds: ``[batch]`` int64 (all 64 bits count) or a number for all. Needed with ``positions``
            unless the two uniforms are given.
        positions: ``[batch]`` int32 or int64, the absolute position of the request's first draft.
            A request's tokens depend on its own rows, seed and position alone.
        accept_uniforms: ``[num_drafts]`` float32 or float64 in [0, 1), instead of seeds.
        recovered_uniforms: ``[batch]`` float32 or float64 in [0, 1), instead of seeds.
        vocab_size: Columns from here on are padding and never win. Default: the width.
        max_num_draft_tokens: The ``k`` of the output's width. Default: the largest count, which is
            read from ``cu_num_draft_tokens`` (a sync on an accelerator, a graph break in compile).
        return_logsumexp: Fill ``logsumexp``. Greedy requests: at temperature 1.
        return_logprobs: Fill ``logprobs``. Greedy requests: at temperature 1.
        return_accept_probs: Fill ``accept_probs``. Greedy requests: 1 or 0.

    Returns:
        A :class:`VerifyChainOutput`.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype, device or range; the message names it.

    Source: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. With seeds and a dense draft
    law the recovered token is found by von Neumann's rejection sampling, which has the same law; so only the
    entries of a draft row that are consulted can make it unusable.

    Example:
        >>> import torch, specdec_ops
        >>> logits = torch.tensor([[0.0, 9.0], [9.0, 0.0], [0.0, 9.0]])
        >>> out = specdec_ops.verify_chain(
        ...     logits, torch.tensor([1, 0]), torch.tensor([0, 2]), temperature=0.0
        ... )
        >>> out.token_ids.tolist(), out.num_accepted.tolist()
        ([[1, 0, 1]], [2])
    """
    batch = leading_size("verify_chain", "cu_num_draft_tokens", cu_num_draft_tokens) - 1
    if max_num_draft_tokens is None:
        max_num_draft_tokens = _largest_count(cu_num_draft_tokens)
    # By position: twenty keywords cost a call on one request several microseconds.
    token_ids, num_accepted, status, extras = _op(
        target_logits,
        draft_token_ids,
        cu_num_draft_tokens,
        per_request(temperature, batch, torch.float32, target_logits),
        max_num_draft_tokens,
        draft_logits,
        draft_probs,
        draft_logsumexp,
        draft_support_ids,
        draft_support_logprobs,
        per_request(draft_temperature, batch, torch.float32, target_logits),
        has_draft_law,
        seeds_per_request("verify_chain", seeds, batch, target_logits),
        positions,
        accept_uniforms,
        recovered_uniforms,
        vocab_size,
        return_logsumexp,
        return_logprobs,
        return_accept_probs,
    )
    if not extras:
        return VerifyChainOutput(token_ids, num_accepted, status)
    remaining = iter(extras)
    return VerifyChainOutput(
        token_ids,
        num_accepted,
        status,
        next(remaining) if return_logsumexp else None,
        next(remaining) if return_logprobs else None,
        next(remaining) if return_accept_probs else None,
    )


def _largest_count(cu_num_draft_tokens: Tensor) -> int:
    """The largest count; 0 for what is no list of them, which the op then reports by name."""
    if cu_num_draft_tokens.dim() != 1 or cu_num_draft_tokens.is_floating_point():
        return 0
    ends = cu_num_draft_tokens.tolist()
    return max((end - begin for begin, end in itertools.pairwise(ends)), default=0)


def _fake(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    temperature: Tensor,
    max_num_draft_tokens: int,
    draft_logits: Tensor | None = None,
    draft_probs: Tensor | None = None,
    draft_logsumexp: Tensor | None = None,
    draft_support_ids: Tensor | None = None,
    draft_support_logprobs: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    has_draft_law: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    accept_uniforms: Tensor | None = None,
    recovered_uniforms: Tensor | None = None,
    vocab_size: int | None = None,
    return_logsumexp: bool = False,
    return_logprobs: bool = False,
    return_accept_probs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    batch = cu_num_draft_tokens.shape[0] - 1
    width = max_num_draft_tokens + 1
    extras = []
    if return_logsumexp:
        extras.append(target_logits.new_empty(target_logits.shape[0], dtype=torch.float64))
    if return_logprobs:
        extras.append(target_logits.new_empty((batch, width), dtype=torch.float32))
    if return_accept_probs:
        extras.append(target_logits.new_empty(draft_token_ids.shape[0], dtype=torch.float32))
    return (
        draft_token_ids.new_empty((batch, width)),
        draft_token_ids.new_empty(batch, dtype=torch.int32),
        draft_token_ids.new_empty(batch, dtype=torch.int32),
        extras,
    )


def _reference_verify_chain(
    target_logits: Tensor,
    draft_token_ids: Tensor,
    cu_num_draft_tokens: Tensor,
    temperature: Tensor,
    max_num_draft_tokens: int,
    draft_logits: Tensor | None = None,
    draft_probs: Tensor | None = None,
    draft_logsumexp: Tensor | None = None,
    draft_support_ids: Tensor | None = None,
    draft_support_logprobs: Tensor | None = None,
    draft_temperature: Tensor | None = None,
    has_draft_law: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    accept_uniforms: Tensor | None = None,
    recovered_uniforms: Tensor | None = None,
    vocab_size: int | None = None,
    return_logsumexp: bool = False,
    return_logprobs: bool = False,
    return_accept_probs: bool = False,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    size = target_logits.shape[1] if vocab_size is None else vocab_size
    batch = cu_num_draft_tokens.shape[0] - 1
    cu = cu_num_draft_tokens.tolist()
    token_ids = draft_token_ids.new_full((batch, max_num_draft_tokens + 1), -1)
    num_accepted = draft_token_ids.new_zeros(batch, dtype=torch.int32)
    status = draft_token_ids.new_zeros(batch, dtype=torch.int32)
    logsumexp = target_logits.new_full((target_logits.shape[0],), torch.nan, dtype=torch.float64)
    logprobs = target_logits.new_full(token_ids.shape, torch.nan, dtype=torch.float32)
    accept_probs = target_logits.new_full(draft_token_ids.shape, torch.nan, dtype=torch.float32)

    for r in range(batch):
        t = float(temperature[r])
        law = _reference.DraftLaw(
            has_law=has_draft_law is None or bool(has_draft_law[r]),
            logits=draft_logits,
            probs=draft_probs,
            logsumexp=draft_logsumexp,
            support_ids=draft_support_ids,
            support_logprobs=draft_support_logprobs,
            temperature=t if draft_temperature is None else float(draft_temperature[r]),
            vocab_size=size,
        )
        num_drafts = cu[r + 1] - cu[r]
        for i in range(num_drafts + 1):
            draft = cu[r] + i
            row_index = draft + r
            row = _reference.read_row(target_logits[row_index], t, size)
            logsumexp[row_index] = row.logsumexp
            x = int(draft_token_ids[draft]) if i < num_drafts else -1
            draws = _reference.draws_of(recovered_uniforms, seeds, positions, r, slot=i)
            valid = i < num_drafts and 0 <= x < size and row.status == Status.OK
            found, accepted = row.status, False
            if valid and not t >= _reference.GREEDY_TEMPERATURE:
                accepted = x == row.argmax
                accept_probs[draft] = float(accepted)
            elif valid:
                if accept_uniforms is not None:
                    u = float(accept_uniforms[draft])
                elif seeds is not None and positions is not None:
                    u = _reference.uniform(int(seeds[r]), _reference.Stream.ACCEPT, i, int(positions[r]))
                else:
                    u = 0.0
                accepted, accept_probs[draft] = _reference.judge(
                    row.probs, x, u, law, draft, needs_q=return_accept_probs
                )
            if accepted:
                token = x
            elif valid and t >= _reference.GREEDY_TEMPERATURE:
                token, found = _reference.recover(row.probs, x, law, draft, draws)
            else:
                token = _reference.pick(row.probs, draws(0))
                if i < num_drafts and x != -1 and not valid and row.status == Status.OK:
                    found = Status.INVALID_DRAFT_ID
            token_ids[r, i] = token
            if row.status == Status.OK:
                usable_t = t if t >= _reference.GREEDY_TEMPERATURE else 1.0
                logprobs[r, i] = float(target_logits[row_index, token]) / usable_t - row.logsumexp
            if not accepted:
                num_accepted[r] = i
                status[r] = int(found)
                break

    extras = (
        [logsumexp] * return_logsumexp + [logprobs] * return_logprobs + [accept_probs] * return_accept_probs
    )
    return token_ids, num_accepted, status, extras


_op = define(
    "verify_chain(Tensor target_logits, Tensor draft_token_ids, Tensor cu_num_draft_tokens, "
    "Tensor temperature, SymInt max_num_draft_tokens, Tensor? draft_logits=None, "
    "Tensor? draft_probs=None, Tensor? draft_logsumexp=None, Tensor? draft_support_ids=None, "
    "Tensor? draft_support_logprobs=None, Tensor? draft_temperature=None, Tensor? has_draft_law=None, "
    "Tensor? seeds=None, Tensor? positions=None, Tensor? accept_uniforms=None, "
    "Tensor? recovered_uniforms=None, SymInt? vocab_size=None, bool return_logsumexp=False, "
    "bool return_logprobs=False, bool return_accept_probs=False) "
    "-> (Tensor token_ids, Tensor num_accepted, Tensor status, Tensor[] extras)",
    fake=_fake,
    reference=_reference_verify_chain,
)

"""verify_chain: which drafts of a chain are kept, and what is emitted after them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ops import _block, _lossy, _reference
from specdec_ops._library import define
from specdec_ops._status import Status
from specdec_ops.ops._arguments import (
    filters_are_joint,
    filters_per_request,
    largest_draft_count,
    leading_size,
    number_of_entries,
    per_request,
    seeds_per_request,
)
from specdec_ops.rules import LossyRule, name_and_parameters


class VerifyChainOutput(NamedTuple):
    """What ``verify_chain`` returns; the last three are ``None`` unless asked for."""

    #: ``[batch, k + 1]``, dtype of ``draft_token_ids``: accepted drafts, then one recovered or
    #: bonus token, then -1.
    token_ids: Tensor
    #: ``[batch]`` int32, without the recovered or bonus token.
    num_accepted: Tensor
    #: ``[batch]`` int32, values of :class:`specdec_ops.Status`.
    status: Tensor
    #: One float64 for each row of ``target_logits``, of ``logits / temperature``, NaN for rows behind the
    #: one that decided the request.
    logsumexp: Tensor | None = None
    #: ``[batch, k + 1]`` float32, of the emitted tokens under the target law, NaN where padded and for
    #: a bonus token that was given.
    logprobs: Tensor | None = None
    #: ``[num_drafts]`` float32, ``min(1, p / q)``, NaN for drafts that were not reached. Exact match: ``p``.
    #: Block verification: how probable it was that this draft and all before it are accepted, for every draft
    #: of the chain.
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
    request_indices: Tensor | None = None,
    accept_uniforms: Tensor | None = None,
    recovered_uniforms: Tensor | None = None,
    bonus_token_ids: Tensor | None = None,
    accept_rates: Tensor | None = None,
    fly_window_size: int | None = None,
    fly_entropy_threshold: float = 0.3,
    fly_entropy_top_k: int = 3,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    draft_top_k: Tensor | int | None = None,
    draft_top_p: Tensor | float | None = None,
    draft_min_p: Tensor | float | None = None,
    draft_thresholds: Tensor | None = None,
    filter_order: str = "sequential",
    vocab_size: int | None = None,
    max_num_draft_tokens: int | None = None,
    return_logsumexp: bool = False,
    return_logprobs: bool = False,
    return_accept_probs: bool = False,
    rule: str | LossyRule = "token",
    rule_mask: Tensor | None = None,
    sampler: str = "inverse_cdf",
) -> VerifyChainOutput:
    """Verifies each request's chain of drafts by speculative sampling.

    At token level, draft ``x`` with target probability ``p`` and draft probability ``q`` is accepted if
    ``u * q < p``. At the first rejection one token is drawn from the normalised ``max(p - q, 0)``
    (recovered); if every draft is accepted, one from the last row (bonus). The emitted tokens follow
    the target law exactly, whatever drafted them. A greedy request accepts the longest prefix of
    drafts that equal the argmax and emits the next argmax. Rows are read in order and only until
    the request's fate is known; no probability tensor is made. ``rule`` puts another rule in its place.

    The draft law is one of: nothing (a one-hot law at the draft, exact for every drafter and the
    right choice for argmax and n-gram drafters), ``draft_logits``, ``draft_probs``, or a sparse law
    (``draft_support_ids`` with ``draft_support_logprobs``). It must be the law that the draft was
    drawn from, after that drafter's own temperature and filters.

    What engines keep for each of ``max_requests`` requests, of which some are in the batch, is read where
    it lies: pass ``request_indices``. Draft laws may be kept so too, k rows a request; the draft in slot i
    of request r then has row ``[request_indices[r], i]``, or ``[r, i]`` without indices.

    Args:
        target_logits: ``[num_drafts + batch, width]`` float32, bfloat16 or float16; the last
            dimension is contiguous, rows may have any stride. For each request in turn its draft
            rows, then its bonus row. ``-inf`` masks an id. With ``bonus_token_ids``: ``[num_drafts,
            width]``, without the bonus rows.
        draft_token_ids: ``[num_drafts]`` int32 or int64. -1 ends a request's drafts early. Any
            other id outside ``[0, vocab_size)`` is rejected there (``Status.INVALID_DRAFT_ID``).
        cu_num_draft_tokens: ``[batch + 1]`` int32 or int64, cumulative counts that start with 0.
        temperature: ``[batch]`` float32 or a number for all; default 1. Below 1e-5 (and NaN): greedy.
        draft_logits: ``[num_drafts, width]`` or ``[max_requests, k, width]`` float32, bfloat16 or float16,
            before temperature; k at least ``max_num_draft_tokens``. The last dimension is contiguous, the
            others may have any stride.
        draft_probs: Like ``draft_logits``, but probabilities, used as they are.
        draft_logsumexp: ``[num_drafts]`` or ``[max_requests, k]`` float32 or float64, of ``draft_logits /
            draft_temperature``, as ``sample`` returns it. Spares the pass over the draft rows; trusted.
            With the float64 values of ``sample`` the tokens are the same bit for bit.
        draft_support_ids: ``[num_drafts, support]`` or ``[max_requests, k, support]`` int32 or int64, -1
            pads.
        draft_support_logprobs: float32, of the same shape.
        draft_temperature: ``[batch]`` float32 or a number; default ``temperature``.
        has_draft_law: ``[batch]`` bool; False treats that request's drafts as one-hot. Default: all
            True.
        seeds: ``[batch]`` int64 (all 64 bits count) or a number for all. Needed with ``positions``
            unless the two uniforms are given.
        positions: ``[batch]`` int32 or int64, the absolute position of the request's first draft.
            A request's tokens depend on its own rows, seed and position alone.
        request_indices: ``[batch]`` int32 or int64 in [0, max_requests), any order, repeated or not. With
            them ``temperature``, ``draft_temperature``, ``has_draft_law`` and ``seeds`` are
            ``[max_requests]``, and request r has the values at ``request_indices[r]``; all else stays by
            request or by draft. Default: request r has the values at r, and max_requests is ``batch``, as
            it is where numbers stand for all of those tensors. On an accelerator nobody looks whether an
            index is in range: a larger one counts as the last, and a request with a negative one is greedy.
        accept_uniforms: ``[num_drafts]`` float32 or float64 in [0, 1), instead of seeds.
        recovered_uniforms: ``[batch]`` float32 or float64 in [0, 1), instead of seeds.
        bonus_token_ids: ``[batch]`` int32 or int64, any stride: bonus tokens that the caller has drawn.
            A request whose drafts are all accepted emits its own; one without drafts does so at once. An
            id outside ``[0, vocab_size)`` is emitted as -1; unless it is -1 itself, the placeholder of
            a request whose result is thrown away, ``status`` is ``Status.INVALID_DRAFT_ID``.
        accept_rates: ``[slots]`` float32 or float64 in [0, 1], at least ``max_num_draft_tokens`` of them:
            synthetic acceptance, for benchmarks. The draft in slot i is accepted if its coin is below
            ``accept_rates[i]``, whatever ``p`` and ``q`` are and for greedy requests too (which then need
            seeds or uniforms); an id outside ``[0, vocab_size)`` never is. The recovered token is drawn
            as usual (greedy: the argmax). :mod:`specdec_ops.synthetic` makes rates. **The emitted tokens
            do not follow the target law.**
        fly_window_size: At least 1 switches FLy on: a rejected draft is accepted all the same if the target
            is undecided there and accepts this many drafts that follow, each by its own coin (greedy: each
            equals the argmax). The draft must not be masked. **The emitted tokens do not follow the target
            law.** Not with ``accept_rates``. Default: None, off.
        fly_entropy_threshold: In nats, default 0.3: from which entropy on the target counts as undecided.
        fly_entropy_top_k: Over how many of the largest target probabilities, without normalising them
            again, that entropy is taken; 1 to 64, default 3. Greedy requests: at temperature 1.
        top_k: ``[batch]`` int32 or int64, or a number for all: only the top_k largest logits of a row may be
            emitted. 0 or less, or ``vocab_size`` or more: no limit. Everything that comes of a row (tokens,
            decisions, ``logsumexp``, ``logprobs``, ``accept_probs``) is as if ids that a filter leaves out
            were masked by ``-inf``. Ties of the last id that is kept are kept. Greedy requests have no
            filters. With ``request_indices``, here and for the five that follow: ``[max_requests]``.
        top_p: ``[batch]`` float32 or a number: the fewest ids, the most probable first, with at least this
            probability together; at least one. 1 or more, or NaN: no limit.
        min_p: ``[batch]`` float32 or a number: ids with at least this times the largest probability. 0 or
            less, or NaN: no limit; 1 or more: the largest alone.
        draft_top_k: Like ``top_k``, of ``draft_logits``: what the drafts were sampled with. Default: none,
            for draft logits that are the law as they are. It costs a pass over each draft row that is
            needed; ``draft_thresholds`` with ``draft_logsumexp`` cost none.
        draft_top_p: Like ``top_p``, of ``draft_logits``.
        draft_min_p: Like ``min_p``, of ``draft_logits``.
        draft_thresholds: ``[num_drafts]`` or ``[max_requests, k]`` float32, as ``sample`` returns them:
            ``draft_logits`` below are masked. Instead of the draft's filters, and needed where
            ``draft_logsumexp`` is that of filtered rows.
        filter_order: ``"sequential"`` (default): min-p, then top-k, then top-p of the probability that these
            leave, as in vLLM and transformers. ``"joint"``: each of the whole row, and what all of them
            keep, as in FlashInfer and SGLang.
        vocab_size: Columns from here on are padding and never win. Default: the width.
        max_num_draft_tokens: The ``k`` of the output's width. Default: the largest count, which is
            read from ``cu_num_draft_tokens`` (a sync on an accelerator, a graph break in compile).
        return_logsumexp: Fill ``logsumexp``. Greedy requests: at temperature 1.
        return_logprobs: Fill ``logprobs``. Greedy requests: at temperature 1.
        return_accept_probs: Fill ``accept_probs``. Greedy requests: 1 or 0. ``accept_rates``, FLy and
            lossy rules do not show in it.
        rule: Which drafts are kept. Greedy requests are judged alike by all of these, and all follow the
            target law. ``"token"`` (default). ``"block"``: block verification, which judges the chain as a
            whole and accepts as many drafts or more on average; without a draft law, or with one draft, just
            as many.
            ``"exact_match"``: a token is drawn from ``p`` in every slot, the one that ``sample`` draws at its
            position, and a draft is accepted if it equals that; draft laws are not looked at. The emitted
            tokens are then those of plain sampling with the same seed, whatever is drafted. With uniforms,
            those of a slot draw its token. Or a lossy rule, one of :mod:`specdec_ops.rules`, such as
            ``Typical()``: **the emitted tokens then do not follow the target law.** Others than ``"token"``
            not with ``accept_rates`` or FLy.
        rule_mask: ``[num_drafts]`` bool, with a lossy rule: drafts where it is False are judged at token
            level. Default: all True.
        sampler: ``"inverse_cdf"`` (default); or ``"gumbel"``, with ``rule="exact_match"`` and seeds alone:
            the tokens are drawn by Gumbel noise of the seed, the position and the id. Drafts that ``sample``
            has drawn with it at the same positions agree most of the time.

    Returns:
        A :class:`VerifyChainOutput`.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype, device or range; the message names it.

    Source: Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318. With seeds and a dense draft
    law the recovered token is found by von Neumann's rejection sampling, which has the same law; so only the
    entries of a draft row that are consulted can make it unusable. Block verification: Sun et al., arXiv
    2403.10444. Shared Gumbel noise: Daliri et al., arXiv 2408.07978. FLy: Li et al., arXiv 2511.22972; it and
    synthetic acceptance as in vLLM 0.33.0 (``v1/spec_decode/fly.py``, ``v1/sample/rejection_sampler.py``).

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
        max_num_draft_tokens = largest_draft_count(cu_num_draft_tokens, batch)
    num_entries = batch
    if request_indices is not None:
        filters = (top_k, top_p, min_p, draft_top_k, draft_top_p, draft_min_p)
        by_request = (
            (value, 1) for value in (temperature, draft_temperature, seeds, has_draft_law, *filters)
        )
        laws = ((law, 3) for law in (draft_logits, draft_probs, draft_support_ids))
        num_entries = number_of_entries(batch, *by_request, *laws)
    # By position: so many keywords cost a call on one request several microseconds.
    token_ids, num_accepted, status, extras = _op(
        target_logits,
        draft_token_ids,
        cu_num_draft_tokens,
        per_request(temperature, num_entries, torch.float32, target_logits),
        max_num_draft_tokens,
        draft_logits,
        draft_probs,
        draft_logsumexp,
        draft_support_ids,
        draft_support_logprobs,
        per_request(draft_temperature, num_entries, torch.float32, target_logits),
        has_draft_law,
        seeds_per_request("verify_chain", seeds, num_entries, target_logits),
        positions,
        request_indices,
        accept_uniforms,
        recovered_uniforms,
        bonus_token_ids,
        accept_rates,
        fly_window_size,
        fly_entropy_threshold,
        fly_entropy_top_k,
        *filters_per_request(top_k, top_p, min_p, num_entries, target_logits),
        *filters_per_request(draft_top_k, draft_top_p, draft_min_p, num_entries, target_logits),
        draft_thresholds,
        filters_are_joint("verify_chain", filter_order),
        vocab_size,
        return_logsumexp,
        return_logprobs,
        return_accept_probs,
        *name_and_parameters("verify_chain", rule),
        rule_mask,
        sampler,
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
    request_indices: Tensor | None = None,
    accept_uniforms: Tensor | None = None,
    recovered_uniforms: Tensor | None = None,
    bonus_token_ids: Tensor | None = None,
    accept_rates: Tensor | None = None,
    fly_window_size: int | None = None,
    fly_entropy_threshold: float = 0.3,
    fly_entropy_top_k: int = 3,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_top_k: Tensor | None = None,
    draft_top_p: Tensor | None = None,
    draft_min_p: Tensor | None = None,
    draft_thresholds: Tensor | None = None,
    joint_filters: bool = False,
    vocab_size: int | None = None,
    return_logsumexp: bool = False,
    return_logprobs: bool = False,
    return_accept_probs: bool = False,
    rule: str = "token",
    rule_parameters: Sequence[float] = (),
    rule_mask: Tensor | None = None,
    sampler: str = "inverse_cdf",
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
    request_indices: Tensor | None = None,
    accept_uniforms: Tensor | None = None,
    recovered_uniforms: Tensor | None = None,
    bonus_token_ids: Tensor | None = None,
    accept_rates: Tensor | None = None,
    fly_window_size: int | None = None,
    fly_entropy_threshold: float = 0.3,
    fly_entropy_top_k: int = 3,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_top_k: Tensor | None = None,
    draft_top_p: Tensor | None = None,
    draft_min_p: Tensor | None = None,
    draft_thresholds: Tensor | None = None,
    joint_filters: bool = False,
    vocab_size: int | None = None,
    return_logsumexp: bool = False,
    return_logprobs: bool = False,
    return_accept_probs: bool = False,
    rule: str = "token",
    rule_parameters: Sequence[float] = (),
    rule_mask: Tensor | None = None,
    sampler: str = "inverse_cdf",
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    size = target_logits.shape[1] if vocab_size is None else vocab_size
    batch = cu_num_draft_tokens.shape[0] - 1
    cu: list[int] = cu_num_draft_tokens.tolist()
    entries: list[int] = list(range(batch)) if request_indices is None else request_indices.tolist()

    def by_request(values: Tensor) -> Tensor:
        return values if request_indices is None else values[entries]

    def by_draft(values: Tensor | None, dims: int) -> Tensor | None:
        """``[num_drafts, ...]``, also of what lies in entries; ``dims`` are those of one draft."""
        if values is None or values.dim() == dims + 1:
            return values
        places = [(entries[r], i) for r in range(batch) for i in range(cu[r + 1] - cu[r])]
        return values[[entry for entry, _ in places], [i for _, i in places]]

    temperature = by_request(temperature)
    draft_temperature = None if draft_temperature is None else by_request(draft_temperature)
    has_draft_law = None if has_draft_law is None else by_request(has_draft_law)
    seeds = None if seeds is None else by_request(seeds)
    draft_logits, draft_probs = by_draft(draft_logits, 1), by_draft(draft_probs, 1)
    draft_logsumexp = by_draft(draft_logsumexp, 0)
    draft_support_ids = by_draft(draft_support_ids, 1)
    draft_support_logprobs = by_draft(draft_support_logprobs, 1)
    if top_k is not None or top_p is not None or min_p is not None:
        target_logits = target_logits.clone()
        for r in range(batch):
            filters = _reference.Filters.of(entries[r], top_k, top_p, min_p, joint_filters)
            begin = cu[r] + (r if bonus_token_ids is None else 0)
            end = cu[r + 1] + (r + 1 if bonus_token_ids is None else 0)
            for row in target_logits[begin:end]:
                _reference.filter_row_(row, float(temperature[r]), size, filters)
    if draft_logits is not None:
        draft_logits = draft_logits.clone()
        draft_thresholds = by_draft(draft_thresholds, 0)
        own = temperature if draft_temperature is None else draft_temperature
        for r in range(batch):
            filters = _reference.Filters.of(entries[r], draft_top_k, draft_top_p, draft_min_p, joint_filters)
            for draft in range(cu[r], cu[r + 1]):
                _reference.filter_row_(draft_logits[draft], float(own[r]), size, filters)
                if draft_thresholds is not None:
                    draft_logits[draft][draft_logits[draft] < draft_thresholds[draft]] = -math.inf
    token_ids = draft_token_ids.new_full((batch, max_num_draft_tokens + 1), -1)
    num_accepted = draft_token_ids.new_zeros(batch, dtype=torch.int32)
    status = draft_token_ids.new_zeros(batch, dtype=torch.int32)
    logsumexp = target_logits.new_full((target_logits.shape[0],), torch.nan, dtype=torch.float64)
    logprobs = target_logits.new_full(token_ids.shape, torch.nan, dtype=torch.float32)
    accept_probs = target_logits.new_full(draft_token_ids.shape, torch.nan, dtype=torch.float32)

    def first_row(r: int) -> int:
        return cu[r] + (r if bonus_token_ids is None else 0)

    def law_of(r: int) -> _reference.DraftLaw:
        return _reference.DraftLaw(
            has_law=has_draft_law is None or bool(has_draft_law[r]),
            logits=draft_logits,
            probs=draft_probs,
            logsumexp=draft_logsumexp,
            support_ids=draft_support_ids,
            support_logprobs=draft_support_logprobs,
            temperature=float(temperature[r] if draft_temperature is None else draft_temperature[r]),
            vocab_size=size,
        )

    def coin(r: int, i: int) -> float:
        if accept_uniforms is not None:
            return float(accept_uniforms[cu[r] + i])
        if seeds is None or positions is None:
            return 0.0
        return _reference.uniform(int(seeds[r]), _reference.Stream.ACCEPT, i, int(positions[r]))

    def drawn(r: int, i: int, row: _reference.Row) -> int:
        """A token of the target's law at slot i, by the numbers of the slot."""
        if sampler == "gumbel" and seeds is not None and positions is not None:
            return _reference.pick_by_noise(row.probs, int(seeds[r]), int(positions[r]) + i)
        if rule == "exact_match" and accept_uniforms is not None and cu[r] + i < cu[r + 1]:
            return _reference.pick(row.probs, _reference.TokenDraw(float(accept_uniforms[cu[r] + i])))
        draws = _reference.draws_of(recovered_uniforms, seeds, positions, r, slot=i)
        return _reference.pick(row.probs, draws(0))

    def judge(r: int, i: int) -> _Judged:
        """Reads the row of slot i and says what its coin makes of the draft there."""
        t, draft = float(temperature[r]), cu[r] + i
        row = _reference.read_row(target_logits[first_row(r) + i], t, size)
        x = int(draft_token_ids[draft]) if draft < cu[r + 1] else -1
        if not 0 <= x < size or row.status != Status.OK:
            return _Judged(row, x, valid=False)
        if not t >= _reference.GREEDY_TEMPERATURE:
            accepted = x == row.argmax
            accept_prob = float(accepted)
        elif rule == "exact_match":
            accepted, accept_prob = x == drawn(r, i, row), float(row.probs[x])
        else:
            accepted, accept_prob = _reference.judge(
                row.probs, x, coin(r, i), law_of(r), draft, needs_q=return_accept_probs
            )
        if accept_rates is not None:
            accepted = coin(r, i) < float(accept_rates[i])
        if is_lossy(r, i):
            at_row = _lossy.AtRow(target_logits[first_row(r) + i, :size], t, row, x)
            accepted = _lossy.accepts(rule, rule_parameters, at_row, coin(r, i), law_of(r), draft, accepted)
        return _Judged(row, x, True, accepted, accept_prob)

    def is_lossy(r: int, i: int) -> bool:
        return rule in _lossy.RULES and (rule_mask is None or bool(rule_mask[cu[r] + i]))

    def verify_block(r: int) -> None:
        """Block verification of a request that samples."""
        t = float(temperature[r])
        slots: list[_block.Slot] = []
        for i in range(cu[r + 1] - cu[r]):
            judged = judge(r, i)
            if not judged.valid:
                break
            slots.append(_block.Slot(judged.row.probs, judged.x, coin(r, i), law_of(r), cu[r] + i))
        if not slots or recovered_uniforms is not None or seeds is None or positions is None:
            numbers = None
        else:
            numbers = _block.Numbers(int(seeds[r]), int(positions[r]))
        draws = [
            _reference.draws_of(recovered_uniforms, seeds, positions, r, slot=i)
            for i in range(len(slots) + 1)
        ]
        accepted, token, found, chances = _block.verify(slots, numbers, draws)
        accept_probs[cu[r] : cu[r] + len(slots)] = torch.tensor(chances, dtype=torch.float32)
        ids = [slot.x for slot in slots[:accepted]]
        if token is None and cu[r] + accepted == cu[r + 1] and bonus_token_ids is not None:
            given = int(bonus_token_ids[r])
            if 0 <= given < size:
                token_ids[r, accepted] = given
            elif given != -1:
                found = Status.INVALID_DRAFT_ID
        else:
            end = judge(r, accepted)
            if token is None:
                token, found = _reference.pick(end.row.probs, draws[accepted](0)), end.row.status
                if found == Status.OK and end.x != -1:
                    found = Status.INVALID_DRAFT_ID
            ids.append(token)
        for i, x in enumerate(ids):
            row = judge(r, i).row
            token_ids[r, i] = x
            logsumexp[first_row(r) + i] = row.logsumexp
            if row.status == Status.OK:
                logprobs[r, i] = float(target_logits[first_row(r) + i, x]) / t - row.logsumexp
        num_accepted[r], status[r] = accepted, int(found)

    def window_after(r: int, i: int, x: int) -> list[_Judged]:
        """FLy: the drafts that make up for the rejection of draft x in slot i; none if they do not."""
        if fly_window_size is None or cu[r] + i + fly_window_size >= cu[r + 1]:
            return []
        t, logits = float(temperature[r]), target_logits[first_row(r) + i]
        probs = _reference.read_row(logits, t if t >= _reference.GREEDY_TEMPERATURE else 1.0, size).probs
        undecided = _reference.entropy_of_largest(probs, fly_entropy_top_k) >= fly_entropy_threshold
        if not undecided or float(logits[x]) == -math.inf:
            return []
        window = [judge(r, i + j) for j in range(1, fly_window_size + 1)]
        return window if all(judged.accepted for judged in window) else []

    for r in range(batch):
        t, num_drafts = float(temperature[r]), cu[r + 1] - cu[r]
        greedy = not t >= _reference.GREEDY_TEMPERATURE
        if rule == "block" and not greedy:
            verify_block(r)
            continue
        i = 0
        while i < num_drafts or bonus_token_ids is None:
            judged = [judge(r, i)]
            row, x, valid, accepted, _ = judged[0]
            if valid and not accepted:
                judged += window_after(r, i, x)
                accepted = len(judged) > 1
            draws = _reference.draws_of(recovered_uniforms, seeds, positions, r, slot=i)
            found = row.status
            if accepted:
                token = x
            elif valid and is_lossy(r, i) and (greedy or rule in _lossy.EMIT_ARGMAX):
                token, found = row.argmax, Status.OK
            elif valid and is_lossy(r, i) and rule == "thresholds":
                token, found = _reference.recover(row.probs, x, _lossy.no_law(law_of(r)), cu[r] + i, draws)
            elif valid and is_lossy(r, i) and rule == "lenience":
                p = row.probs / rule_parameters[0]
                token, found = _reference.recover(p, x, law_of(r), cu[r] + i, draws)
            elif valid and not greedy and rule != "exact_match":
                token, found = _reference.recover(row.probs, x, law_of(r), cu[r] + i, draws)
            else:
                token = drawn(r, i, row)
                if x != -1 and not valid and row.status == Status.OK:
                    found = Status.INVALID_DRAFT_ID
            for j, (row, x, valid, _, accept_prob) in enumerate(judged, start=i):
                emitted = x if accepted else token
                token_ids[r, j] = emitted
                logsumexp[first_row(r) + j] = row.logsumexp
                if valid:
                    accept_probs[cu[r] + j] = accept_prob
                if row.status == Status.OK:
                    logit = float(target_logits[first_row(r) + j, emitted])
                    logprobs[r, j] = logit / (1.0 if greedy else t) - row.logsumexp
            if not accepted:
                status[r] = int(found)
                break
            i += len(judged)
        else:
            assert bonus_token_ids is not None
            token = int(bonus_token_ids[r])
            if 0 <= token < size:
                token_ids[r, i] = token
            elif token != -1:
                status[r] = int(Status.INVALID_DRAFT_ID)
        num_accepted[r] = i

    extras = (
        [logsumexp] * return_logsumexp + [logprobs] * return_logprobs + [accept_probs] * return_accept_probs
    )
    return token_ids, num_accepted, status, extras


class _Judged(NamedTuple):
    """A row of the target, and what became of its draft."""

    row: _reference.Row
    x: int
    #: Whether x is an id and the row has a law.
    valid: bool
    accepted: bool = False
    accept_prob: float = math.nan


_op = define(
    "verify_chain(Tensor target_logits, Tensor draft_token_ids, Tensor cu_num_draft_tokens, "
    "Tensor temperature, SymInt max_num_draft_tokens, Tensor? draft_logits=None, "
    "Tensor? draft_probs=None, Tensor? draft_logsumexp=None, Tensor? draft_support_ids=None, "
    "Tensor? draft_support_logprobs=None, Tensor? draft_temperature=None, Tensor? has_draft_law=None, "
    "Tensor? seeds=None, Tensor? positions=None, Tensor? request_indices=None, "
    "Tensor? accept_uniforms=None, Tensor? recovered_uniforms=None, Tensor? bonus_token_ids=None, "
    "Tensor? accept_rates=None, int? fly_window_size=None, float fly_entropy_threshold=0.3, "
    "int fly_entropy_top_k=3, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, "
    "Tensor? draft_top_k=None, Tensor? draft_top_p=None, Tensor? draft_min_p=None, "
    "Tensor? draft_thresholds=None, bool joint_filters=False, SymInt? vocab_size=None, "
    "bool return_logsumexp=False, bool return_logprobs=False, bool return_accept_probs=False, "
    "str rule='token', float[] rule_parameters=[], Tensor? rule_mask=None, str sampler='inverse_cdf') "
    "-> (Tensor token_ids, Tensor num_accepted, Tensor status, Tensor[] extras)",
    fake=_fake,
    reference=_reference_verify_chain,
)

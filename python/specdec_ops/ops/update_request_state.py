"""update_request_state_: what a step emitted goes into the state of its requests."""

from __future__ import annotations

from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._runner_state import live_requests, spans


def update_request_state_(
    request_indices: Tensor,
    sampled_token_ids: Tensor,
    num_emitted: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor | None = None,
    *,
    num_computed_tokens: Tensor,
    last_token_ids: Tensor,
    total_lens: Tensor,
    all_token_ids: Tensor,
    output_counts: Tensor | None = None,
    new_draft_token_ids: Tensor | None = None,
    draft_token_ids: Tensor | None = None,
) -> None:
    """Appends the emitted tokens of each request to its state, and takes rejected drafts back.

    The tokens are ``sampled_token_ids[request, :num_emitted]``; the count is held between 0 and the
    width. Ids are stored as they are; one outside of ``[0, vocab_size)`` is not counted.

    A state row belongs to one request of a batch at most. On the CPU a row that occurs twice is
    updated in the order of the batch, as by two calls; kernels of an accelerator may lose an update.

    Args:
        request_indices: ``[batch]`` int32 or int64, like all that follow; any strides. The row of
            each request in the runner's state. A request whose index is no such row, as -1, is
            padding: nothing of its own is read or written.
        sampled_token_ids: ``[batch, k + 1]``, accepted drafts, then the recovered or bonus token.
        num_emitted: ``[batch]``, how many of them count; 0 leaves the tokens of a row as they are.
        num_rejected: ``[batch]``, tokens of the query whose computed state is void.
        query_start_loc: ``[batch + 1]`` or longer, running totals of the tokens of each query. If
            ``None``, the query was counted before and only ``num_rejected`` is taken off.
        num_computed_tokens: ``[max_requests]``, written in place: ``+ query_len - num_rejected``.
        last_token_ids: ``[max_requests]`` or ``[max_requests, 1]``, written in place.
        total_lens: ``[max_requests]``, written in place: tokens of each request so far,
            ``+ num_emitted``, also past the width of ``all_token_ids``.
        all_token_ids: ``[max_requests, max_model_len]``, written in place from ``total_lens`` on;
            positions past the width are dropped.
        output_counts: ``[max_requests, vocab_size]``, written in place: how often each id was emitted.
            ``None``: not kept.
        new_draft_token_ids: ``[batch, k]``, the drafts of the next step. ``None``: none to store.
        draft_token_ids: ``[max_requests, k]``, written in place from ``new_draft_token_ids``; needed with
            them and left alone without.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype or range, or totals decrease; the message
            names it. Kernels of an accelerator do not read the totals ahead.

    Source: the acceptance counts of Leviathan et al., arXiv 2211.17192; vLLM's runner has the same
    bookkeeping.

    Example:
        >>> import torch, specdec_ops
        >>> num_computed_tokens, total_lens = torch.tensor([0, 4]), torch.tensor([0, 5])
        >>> last_token_ids, all_token_ids = torch.tensor([0, 9]), torch.zeros(2, 8, dtype=torch.int32)
        >>> specdec_ops.update_request_state_(
        ...     torch.tensor([1]),
        ...     sampled_token_ids=torch.tensor([[6, 7, -1]]),
        ...     num_emitted=torch.tensor([2]),
        ...     num_rejected=torch.tensor([1]),
        ...     query_start_loc=torch.tensor([0, 3]),
        ...     num_computed_tokens=num_computed_tokens,
        ...     last_token_ids=last_token_ids,
        ...     total_lens=total_lens,
        ...     all_token_ids=all_token_ids,
        ... )
        >>> num_computed_tokens.tolist(), total_lens.tolist(), last_token_ids.tolist()
        ([0, 6], [0, 7], [0, 7])
        >>> all_token_ids[1].tolist()
        [0, 0, 0, 0, 0, 6, 7, 0]
    """
    _op(
        request_indices,
        sampled_token_ids,
        num_emitted,
        num_rejected,
        query_start_loc,
        new_draft_token_ids,
        num_computed_tokens,
        last_token_ids,
        total_lens,
        all_token_ids,
        output_counts,
        draft_token_ids,
    )


def _reference(
    request_indices: Tensor,
    sampled_token_ids: Tensor,
    num_emitted: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor | None,
    new_draft_token_ids: Tensor | None,
    num_computed_tokens: Tensor,
    last_token_ids: Tensor,
    total_lens: Tensor,
    all_token_ids: Tensor,
    output_counts: Tensor | None,
    draft_token_ids: Tensor | None,
) -> None:
    batch = len(request_indices)
    queries = [range(0)] * batch
    if query_start_loc is not None:
        queries = spans("update_request_state_", "query_start_loc", query_start_loc, batch)
    for request, row in live_requests(request_indices, len(num_computed_tokens)):
        if new_draft_token_ids is not None and draft_token_ids is not None:
            draft_token_ids[row] = new_draft_token_ids[request]
        emitted = sampled_token_ids[request, : max(int(num_emitted[request]), 0)]
        for position, token_id in enumerate(emitted, start=int(total_lens[row])):
            last_token_ids[row] = token_id
            if 0 <= position < all_token_ids.shape[1]:
                all_token_ids[row, position] = token_id
            if output_counts is not None and 0 <= token_id < output_counts.shape[1]:
                output_counts[row, token_id] += 1
        total_lens[row] += len(emitted)
        num_computed_tokens[row] += len(queries[request]) - num_rejected[request]


_op = define(
    "update_request_state_(Tensor request_indices, Tensor sampled_token_ids, Tensor num_emitted, "
    "Tensor num_rejected, Tensor? query_start_loc, Tensor? new_draft_token_ids, "
    "Tensor(a!) num_computed_tokens, Tensor(b!) last_token_ids, Tensor(c!) total_lens, "
    "Tensor(d!) all_token_ids, Tensor(e!)? output_counts, Tensor(f!)? draft_token_ids) -> ()",
    reference=_reference,
)

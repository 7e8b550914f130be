"""combine_sampled_and_draft_tokens_: the input tokens of a step that verifies drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._runner_state import live_requests, spans


def combine_sampled_and_draft_tokens_(
    request_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    last_token_ids: Tensor,
    draft_token_ids: Tensor,
    prefill_lens: Tensor,
    *,
    input_ids: Tensor,
    logits_indices: Tensor,
    num_new_tokens: int = 1,
) -> None:
    """Ends each query with the request's last token and drafts, and tells where logits are needed.

    The logits rows of a request are those of the last tokens of its query, as many as
    ``cu_num_logits`` gives it: the last token that was emitted, then the drafts. Tokens of the prompt
    stay as they are: a request with ``seq_len <= prefill_len`` gets none, and one whose logits rows
    begin in its prompt gets drafts alone.

    Args:
        request_indices: ``[batch]`` int32 or int64, like all that follow; any strides. The row of
            each request in the runner's state. A request whose index is no such row, as -1, is
            padding: its state is not read and its input ids are left alone.
        query_start_loc: ``[batch + 1]`` or longer, running totals of the tokens of each query.
        seq_lens: ``[batch]`` or longer, computed tokens and those of the query together.
        cu_num_logits: ``[batch + 1]`` or longer, running totals of the logits rows.
        last_token_ids: ``[max_requests]`` or ``[max_requests, 1]``, of each state row.
        draft_token_ids: ``[max_requests, k]``, of each state row. Logits rows for more than k drafts
            leave their input ids alone.
        prefill_lens: ``[max_requests]``, of each state row: tokens that were not sampled here.
        input_ids: ``[num_tokens]``, written in place. Ids are copied as they are, negative ones too.
        logits_indices: ``[num_logits]``, written in place: for each logits row its index in
            ``input_ids``; 0 past the last total.
        num_new_tokens: 1 if the first logits row of a request is that of its last token, 0 if all are
            of drafts; default 1.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype or range, totals decrease or leave what
            they count, or a query is shorter than its logits rows; the message names it. Kernels of
            an accelerator do not read the totals ahead: they clamp them.

    Source: the layout of a verification step in Leviathan et al., arXiv 2211.17192; vLLM's runner
    has the same bookkeeping.

    Example:
        >>> import torch, specdec_ops
        >>> input_ids, logits_indices = torch.tensor([7, 7, 7, 7, 7]), torch.empty(4, dtype=torch.int64)
        >>> specdec_ops.combine_sampled_and_draft_tokens_(
        ...     torch.tensor([2, 0]),
        ...     query_start_loc=torch.tensor([0, 3, 5]),
        ...     seq_lens=torch.tensor([9, 2]),
        ...     cu_num_logits=torch.tensor([0, 3, 4]),
        ...     last_token_ids=torch.tensor([10, 11, 12]),
        ...     draft_token_ids=torch.tensor([[0, 0], [0, 0], [20, 21]]),
        ...     prefill_lens=torch.tensor([4, 4, 4]),
        ...     input_ids=input_ids,
        ...     logits_indices=logits_indices,
        ... )
        >>> input_ids.tolist(), logits_indices.tolist()
        ([12, 20, 21, 7, 7], [0, 1, 2, 4])
    """
    _op(
        request_indices,
        query_start_loc,
        seq_lens,
        cu_num_logits,
        last_token_ids,
        draft_token_ids,
        prefill_lens,
        num_new_tokens,
        input_ids,
        logits_indices,
    )


def _reference(
    request_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    last_token_ids: Tensor,
    draft_token_ids: Tensor,
    prefill_lens: Tensor,
    num_new_tokens: int,
    input_ids: Tensor,
    logits_indices: Tensor,
) -> None:
    name = "combine_sampled_and_draft_tokens_"
    batch = len(request_indices)
    queries = spans(name, "query_start_loc", query_start_loc, batch, limit=len(input_ids), of="input_ids")
    logits = spans(
        name, "cu_num_logits", cu_num_logits, batch, limit=len(logits_indices), of="logits_indices"
    )
    tails = []
    for request, (query, rows) in enumerate(zip(queries, logits, strict=True)):
        if len(query) < len(rows):
            raise RuntimeError(
                f"{name}: query_start_loc must give request {request} a token for each of its "
                f"{len(rows)} logits rows, got {len(query)}"
            )
        tails.append(query[len(query) - len(rows) :])
    logits_indices.zero_()
    for tail, rows in zip(tails, logits, strict=True):
        logits_indices[rows.start : rows.stop] = torch.arange(tail.start, tail.stop)
    for request, row in live_requests(request_indices, len(prefill_lens)):
        tail, seq_len, prefill_len = tails[request], int(seq_lens[request]), int(prefill_lens[row])
        if seq_len <= prefill_len:
            continue
        if num_new_tokens == 1 and len(tail) > 0 and seq_len - len(tail) >= prefill_len:
            input_ids[tail[0]] = last_token_ids.reshape(-1)[row]
        for token, draft in zip(tail[num_new_tokens:], draft_token_ids[row], strict=False):
            input_ids[token] = draft


_op = define(
    "combine_sampled_and_draft_tokens_(Tensor request_indices, Tensor query_start_loc, Tensor seq_lens, "
    "Tensor cu_num_logits, Tensor last_token_ids, Tensor draft_token_ids, Tensor prefill_lens, "
    "int num_new_tokens, Tensor(a!) input_ids, Tensor(b!) logits_indices) -> ()",
    reference=_reference,
)

"""prepare_positions_and_seq_lens_: where the tokens of a step are in their sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._runner_state import live_requests, spans


def prepare_positions_and_seq_lens_(
    request_indices: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    *,
    positions: Tensor,
    seq_lens: Tensor,
) -> None:
    """Numbers each query's tokens from the computed tokens of its request on, and adds up its length.

    Args:
        request_indices: ``[batch]`` int32 or int64, like all that follow; any strides. The row of
            each request in the runner's state. A request whose index is no such row, as -1, is
            padding: its state is not read, its positions are left alone and its ``seq_len`` is 0.
        query_start_loc: ``[batch + 1]`` or longer, running totals of the tokens of each query.
        num_computed_tokens: ``[max_requests]``, of each state row.
        positions: ``[num_tokens]``, written in place for the tokens of the queries.
        seq_lens: ``[batch]`` or longer, written in place: computed tokens and those of the query
            together; 0 past the batch.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype or range, or totals decrease or pass the
            size of ``positions``; the message names it. Kernels of an accelerator do not read the
            totals ahead: they clamp them.

    Source: vLLM's runner has the same bookkeeping.

    Example:
        >>> import torch, specdec_ops
        >>> positions, seq_lens = torch.full((6,), -1), torch.full((4,), -1)
        >>> specdec_ops.prepare_positions_and_seq_lens_(
        ...     torch.tensor([1, 0]),
        ...     torch.tensor([0, 3, 5]),
        ...     torch.tensor([10, 20]),
        ...     positions=positions,
        ...     seq_lens=seq_lens,
        ... )
        >>> positions.tolist(), seq_lens.tolist()
        ([20, 21, 22, 10, 11, -1], [23, 12, 0, 0])
    """
    _op(request_indices, query_start_loc, num_computed_tokens, positions, seq_lens)


def _reference(
    request_indices: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
) -> None:
    queries = spans(
        "prepare_positions_and_seq_lens_",
        "query_start_loc",
        query_start_loc,
        len(request_indices),
        limit=len(positions),
        of="positions",
    )
    seq_lens.zero_()
    for request, row in live_requests(request_indices, len(num_computed_tokens)):
        query, num_computed = queries[request], int(num_computed_tokens[row])
        positions[query.start : query.stop] = torch.arange(len(query)) + num_computed
        seq_lens[request] = num_computed + len(query)


_op = define(
    "prepare_positions_and_seq_lens_(Tensor request_indices, Tensor query_start_loc, "
    "Tensor num_computed_tokens, Tensor(a!) positions, Tensor(b!) seq_lens) -> ()",
    reference=_reference,
)

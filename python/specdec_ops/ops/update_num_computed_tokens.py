"""update_num_computed_tokens_: a step's tokens are computed."""

from __future__ import annotations

from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._runner_state import live_requests, spans


def update_num_computed_tokens_(
    request_indices: Tensor, query_start_loc: Tensor, *, num_computed_tokens: Tensor
) -> None:
    """Adds the tokens of each query to the computed tokens of its request.

    For steps that sample nothing; ``update_request_state_`` does this and more for those that do. A
    state row belongs to one request of a batch at most: on the CPU a row that occurs twice gets both
    queries, kernels of an accelerator may lose one.

    Args:
        request_indices: ``[batch]`` int32 or int64, like all that follow; any strides. The row of
            each request in the runner's state. A request whose index is no such row, as -1, is
            padding and changes nothing.
        query_start_loc: ``[batch + 1]`` or longer, running totals of the tokens of each query.
        num_computed_tokens: ``[max_requests]``, written in place.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype or range, or totals decrease; the message
            names it. Kernels of an accelerator do not read the totals ahead.

    Source: vLLM's runner has the same bookkeeping.

    Example:
        >>> import torch, specdec_ops
        >>> num_computed_tokens = torch.tensor([0, 10, 20])
        >>> specdec_ops.update_num_computed_tokens_(
        ...     torch.tensor([2, -1, 0]),
        ...     torch.tensor([0, 3, 3, 8]),
        ...     num_computed_tokens=num_computed_tokens,
        ... )
        >>> num_computed_tokens.tolist()
        [5, 10, 23]
    """
    _op(request_indices, query_start_loc, num_computed_tokens)


def _reference(request_indices: Tensor, query_start_loc: Tensor, num_computed_tokens: Tensor) -> None:
    queries = spans("update_num_computed_tokens_", "query_start_loc", query_start_loc, len(request_indices))
    for request, row in live_requests(request_indices, len(num_computed_tokens)):
        num_computed_tokens[row] += len(queries[request])


_op = define(
    "update_num_computed_tokens_(Tensor request_indices, Tensor query_start_loc, "
    "Tensor(a!) num_computed_tokens) -> ()",
    reference=_reference,
)

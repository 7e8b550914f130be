"""expand_request_indices: whose logits row is whose."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_ops._library import define
from specdec_ops.ops._runner_state import spans


class ExpandRequestIndicesOutput(NamedTuple):
    """What ``expand_request_indices`` returns, both ``[num_logits]``."""

    #: The request index of each logits row, dtype of ``request_indices``; -1 past the last total.
    expanded_request_indices: Tensor
    #: int32, which of its request's logits rows it is, from 0 on; 0 past the last total.
    local_positions: Tensor


def expand_request_indices(
    request_indices: Tensor, cu_num_logits: Tensor, *, num_logits: int
) -> ExpandRequestIndicesOutput:
    """Repeats the index of each request for its logits rows, and numbers those rows.

    Args:
        request_indices: ``[batch]`` int32 or int64, any strides: the row of each request in the
            runner's state. Copied as they are; padding stays padding.
        cu_num_logits: ``[batch + 1]`` or longer, int32 or int64, running totals of the logits rows.
        num_logits: Size of the outputs, the last total or more. It is asked for because reading it
            would wait for the device.

    Returns:
        An :class:`ExpandRequestIndicesOutput`.

    Raises:
        RuntimeError: An argument has the wrong shape, dtype or range, or totals decrease or pass
            ``num_logits``; the message names it. Kernels of an accelerator do not read the totals
            ahead: they clamp them.

    Source: vLLM's runner has the same bookkeeping.

    Example:
        >>> import torch, specdec_ops
        >>> out = specdec_ops.expand_request_indices(
        ...     torch.tensor([7, 4]), torch.tensor([0, 1, 4]), num_logits=5
        ... )
        >>> out.expanded_request_indices.tolist(), out.local_positions.tolist()
        ([7, 4, 4, 4, -1], [0, 0, 1, 2, 0])
    """
    expanded_request_indices = request_indices.new_empty(num_logits)
    local_positions = request_indices.new_empty(num_logits, dtype=torch.int32)
    _op(request_indices, cu_num_logits, expanded_request_indices, local_positions)
    return ExpandRequestIndicesOutput(expanded_request_indices, local_positions)


def expand_request_indices_(
    request_indices: Tensor,
    cu_num_logits: Tensor,
    *,
    expanded_request_indices: Tensor,
    local_positions: Tensor,
) -> None:
    """``expand_request_indices`` into the caller's buffers.

    Args:
        request_indices: As there.
        cu_num_logits: See there.
        expanded_request_indices: ``[num_logits]`` int32 or int64, written.
        local_positions: ``[num_logits]`` int32 or int64, written.

    Raises:
        RuntimeError: As there.

    Source: as there.

    Example:
        >>> import torch, specdec_ops
        >>> owners, places = torch.empty(3, dtype=torch.int64), torch.empty(3, dtype=torch.int64)
        >>> specdec_ops.expand_request_indices_(
        ...     torch.tensor([7, 4]),
        ...     torch.tensor([0, 1, 3]),
        ...     expanded_request_indices=owners,
        ...     local_positions=places,
        ... )
        >>> owners.tolist(), places.tolist()
        ([7, 4, 4], [0, 0, 1])
    """
    _op(request_indices, cu_num_logits, expanded_request_indices, local_positions)


def _reference(
    request_indices: Tensor,
    cu_num_logits: Tensor,
    expanded_request_indices: Tensor,
    local_positions: Tensor,
) -> None:
    logits = spans(
        "expand_request_indices_",
        "cu_num_logits",
        cu_num_logits,
        len(request_indices),
        limit=len(expanded_request_indices),
        of="expanded_request_indices",
    )
    expanded_request_indices.fill_(-1)
    local_positions.zero_()
    for index, rows in zip(request_indices, logits, strict=True):
        expanded_request_indices[rows.start : rows.stop] = index
        local_positions[rows.start : rows.stop] = torch.arange(len(rows))


_op = define(
    "expand_request_indices_(Tensor request_indices, Tensor cu_num_logits, "
    "Tensor(a!) expanded_request_indices, Tensor(b!) local_positions) -> ()",
    reference=_reference,
)

"""What the references of the runner's bookkeeping share."""

from __future__ import annotations

import itertools

from torch import Tensor


def spans(
    op: str, name: str, totals: Tensor, batch: int, *, limit: int | None = None, of: str = ""
) -> list[range]:
    """What running totals ``[batch + 1]`` give to each request; ``limit`` is the size of ``of``."""
    values = totals[: batch + 1].tolist()
    before = 0
    for index, total in enumerate(values):
        if total < before:
            raise RuntimeError(
                f"{op}: {name} must start at 0 or above and never decrease, "
                f"got {total} after {before} at index {index}"
            )
        before = total
    if limit is not None and before > limit:
        raise RuntimeError(f"{op}: {name} must end within the {limit} elements of {of}, got {before}")
    return [range(begin, end) for begin, end in itertools.pairwise(values)]


def live_requests(request_indices: Tensor, max_requests: int) -> list[tuple[int, int]]:
    """Where each request that is no padding is in the batch, and its row in the runner's state."""
    return [(request, row) for request, row in enumerate(request_indices.tolist()) if 0 <= row < max_requests]

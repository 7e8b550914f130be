"""What the ops share that keep a runner's state, in which each request has a row for as long as it lives."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import Checks, count_of, shape_of
from specdec_ops.triton._views import load_int

BATCH, MAX_REQUESTS, NUM_LOGITS, NUM_TOKENS = "[batch]", "[max_requests]", "[num_logits]", "[num_tokens]"


class RunnerChecks(Checks):
    """Checks of a runner's buffers."""

    def some_ints(self, tensor: Tensor, name: str, shape: str) -> int:
        """Integers of one dimension; returns how many."""
        self.integer(tensor, name)
        self.dims(tensor, name, shape, 1)
        return tensor.shape[0]

    def ints(self, tensor: Tensor, name: str, shape: str, size: int) -> None:
        """Integers, ``size`` of them."""
        self.some_ints(tensor, name, shape)
        self.vector(tensor, name, shape, size)

    def ints_from(self, tensor: Tensor, name: str, shape: str, size: int = 0) -> None:
        """Integers, of which the first ``size`` count."""
        self.some_ints(tensor, name, shape)
        self.at_least(tensor, name, shape, size)

    def int_rows(self, tensor: Tensor, name: str, shape: str, num_rows: int) -> int:
        """Rows of integers, of any width, which is returned."""
        self.integer(tensor, name)
        self.dims(tensor, name, shape, 2)
        if tensor.shape[0] != num_rows:
            self.fail(f"{name} must be {shape} with {count_of(num_rows, 'row')}, got {shape_of(tensor)}")
        return tensor.shape[1]

    def totals(self, tensor: Tensor, name: str, batch: int) -> None:
        """Running totals of the batch."""
        self.ints_from(tensor, name, "[batch + 1]", batch + 1)

    def column(self, tensor: Tensor, name: str, num_rows: int) -> None:
        """One integer of each state row: ``[max_requests]``, or the column that runners keep."""
        self.integer(tensor, name)
        dims = tensor.dim()
        if not (dims == 1 or (dims == 2 and tensor.shape[1] == 1)) or tensor.shape[0] != num_rows:
            self.fail(
                f"{name} must be [max_requests] or [max_requests, 1] with {count_of(num_rows, 'row')}, "
                f"got {shape_of(tensor)}"
            )


@triton.jit
def state_row(indices, indices_layout, request, mask, max_requests):
    """The state rows of requests of the batch; negative for padding, and where the mask is false."""
    row = load_int(indices, indices_layout, request, mask)
    return tl.where(mask & (row < max_requests), row, -1)

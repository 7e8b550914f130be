"""Conversions that the public functions share."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor


@overload
def per_request(value: Tensor | float, batch: int, dtype: torch.dtype, beside: Tensor) -> Tensor: ...
@overload
def per_request(
    value: Tensor | float | None, batch: int, dtype: torch.dtype, beside: Tensor
) -> Tensor | None: ...
def per_request(
    value: Tensor | float | None, batch: int, dtype: torch.dtype, beside: Tensor
) -> Tensor | None:
    """One value for each request: tensors pass through, a number is repeated on the device of ``beside``."""
    if value is None or isinstance(value, Tensor):
        return value
    if dtype == torch.int64 and value >= 1 << 63:
        value -= 1 << 64  # a seed whose 64 bits were given as an unsigned number
    return torch.full((max(batch, 0),), value, dtype=dtype, device=beside.device)


def leading_size(tensor: Tensor) -> int:
    """The first dimension; 0 without one, which the op then reports by name."""
    return tensor.shape[0] if tensor.dim() > 0 else 0

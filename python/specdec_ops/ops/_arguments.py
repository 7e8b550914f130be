"""Conversions that the public functions share."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor


@overload
def per_request(value: Tensor | float, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor: ...
@overload
def per_request(
    value: Tensor | float | None, batch: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None: ...
def per_request(
    value: Tensor | float | None, batch: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """One value for each request: tensors pass through, a number is repeated."""
    if value is None or isinstance(value, Tensor):
        return value
    return torch.full((max(batch, 0),), value, dtype=dtype, device=device)

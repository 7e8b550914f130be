"""Conversions that the public functions share."""

from __future__ import annotations

import itertools
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
    return torch.full((max(batch, 0),), value, dtype=dtype, device=beside.device)


def seeds_per_request(op: str, seeds: Tensor | int | None, batch: int, beside: Tensor) -> Tensor | None:
    """One seed for each request; a number may be signed or unsigned, 64 bits either way."""
    if seeds is None or isinstance(seeds, Tensor):
        return seeds
    if not isinstance(seeds, int) or not -(1 << 63) <= seeds < 1 << 64:
        raise RuntimeError(f"{op}: seeds must be a tensor or an integer in [-2^63, 2^64), got {seeds!r}")
    signed = seeds - (1 << 64) if seeds >= 1 << 63 else seeds
    return per_request(signed, batch, torch.int64, beside)


def number_of_entries(batch: int, *arguments: tuple[Tensor | float | None, int]) -> int:
    """The max_requests of a call with indices, from the first tensor that has entries; ``batch`` without one.

    Args:
        batch: Requests of the call.
        *arguments: Arguments, each with the dimensions that it has if it has entries.
    """
    sizes = (value.shape[0] for value, dims in arguments if isinstance(value, Tensor) and value.dim() == dims)
    return next(sizes, batch)


def leading_size(op: str, name: str, tensor: Tensor) -> int:
    """The first dimension; 0 without one, which the op then reports by name."""
    if not isinstance(tensor, Tensor):
        raise RuntimeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    return tensor.shape[0] if tensor.dim() > 0 else 0


def draft_totals(cu_num_draft_tokens: Tensor, batch: int) -> list[int]:
    """``[batch + 1]`` totals that start with 0, from either form of ``cu_num_draft_tokens``."""
    totals: list[int] = cu_num_draft_tokens.tolist()
    return totals if len(totals) > batch else [0, *totals]


def largest_draft_count(cu_num_draft_tokens: Tensor, batch: int) -> int:
    """The largest count; 0 for what is no list of them, which the op then reports by name."""
    if not isinstance(cu_num_draft_tokens, Tensor) or cu_num_draft_tokens.dim() != 1:
        return 0
    if cu_num_draft_tokens.is_floating_point():
        return 0
    totals = draft_totals(cu_num_draft_tokens, batch)
    return max(0, *(int(end - begin) for begin, end in itertools.pairwise(totals)), 0)


def filters_per_request(
    top_k: Tensor | int | None,
    top_p: Tensor | float | None,
    min_p: Tensor | float | None,
    batch: int,
    beside: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``per_request`` of filters, in no time where there are none."""
    if top_k is None and top_p is None and min_p is None:
        return None, None, None
    return (
        per_request(top_k, batch, torch.int64, beside),
        per_request(top_p, batch, torch.float32, beside),
        per_request(min_p, batch, torch.float32, beside),
    )


#: In which order filters are applied, and whether top-p is then of the whole row.
FILTER_ORDERS = {"sequential": False, "joint": True}


def filters_are_joint(op: str, filter_order: str) -> bool:
    """Whether top-p is of the whole row's mass."""
    if filter_order not in FILTER_ORDERS:
        raise RuntimeError(f"{op}: filter_order must be 'sequential' or 'joint', got {filter_order!r}")
    return FILTER_ORDERS[filter_order]

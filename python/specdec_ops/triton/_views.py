"""Tensors of integers, numbers and flags as kernels see them: of any width, any stride, and of one type.

A view is a pointer and a ``layout``, for rows a ``row_stride`` between the two. Integers are read as one or
two words of 32 bits, and so are float32 and float64, so that a kernel is compiled once, whatever the dtypes
of a call. Where there is no tensor the layout is 0, and another one lends its pointer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDE = (torch.int64, torch.float64)
_FLOATS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}


def words(tensor: Tensor | None, beside: Tensor) -> tuple[Any, int]:
    """The view of a vector of int32, int64, float32 or float64."""
    if tensor is None:
        return triton.reinterpret(beside, tl.int32), 0
    wide = tensor.dtype in _WIDE
    stride = tensor.stride(0) if tensor.dim() > 0 else 0
    return triton.reinterpret(tensor, tl.int32), _layout(stride, wide)


def word_rows(tensor: Tensor | None, beside: Tensor) -> tuple[Any, int, int]:
    """Likewise of a matrix."""
    if tensor is None:
        return triton.reinterpret(beside, tl.int32), 0, 0
    wide = tensor.dtype in _WIDE
    row_stride = tensor.stride(0) << wide
    return triton.reinterpret(tensor, tl.int32), row_stride, _layout(tensor.stride(1), wide)


def flags(tensor: Tensor | None, beside: Tensor) -> tuple[Any, int]:
    """The view of a vector of bool."""
    if tensor is None:
        return triton.reinterpret(beside, tl.int8), 0
    return triton.reinterpret(tensor, tl.int8), _layout(tensor.stride(0), False)


def float_rows(tensor: Tensor | None, beside: Tensor) -> tuple[Any, int, int]:
    """The view of a matrix of floats of any width, for kernels that read single elements of it."""
    if tensor is None:
        return triton.reinterpret(beside, tl.int16), 0, -1
    code = _FLOATS[tensor.dtype]
    halves = tensor.element_size() // 2
    return (
        triton.reinterpret(tensor, tl.int16),
        tensor.stride(0) * halves,
        tensor.stride(1) * halves * 4 + code,
    )


def _layout(stride: int, wide: bool) -> int:
    """Never 0, which stands for no tensor."""
    return (stride << wide) * 4 + 2 + wide


@triton.jit
def is_present(layout):
    """Whether there is a tensor."""
    return layout != 0


@triton.jit
def _join(low, high):
    return (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def load_int(data, layout, index, mask):
    """Elements of a vector as int64; 0 where the mask is false."""
    at = data + index * (layout >> 2)
    wide = (layout & 1) != 0
    low = tl.load(at, mask=mask, other=0)
    high = tl.load(at + 1, mask=mask & wide, other=0)
    return tl.where(wide, _join(low, high), low.to(tl.int64))


@triton.jit
def load_int_at(data, row_stride, layout, row, column, mask):
    """Elements of a matrix."""
    return load_int(data + row * row_stride, layout, column, mask)


@triton.jit
def store_int(data, layout, index, value, mask):
    """What does not fit an int32 is cut off."""
    at = data + index * (layout >> 2)
    wide = (layout & 1) != 0
    tl.store(at, value.to(tl.int32), mask=mask)
    tl.store(at + 1, (value >> 32).to(tl.int32), mask=mask & wide)


@triton.jit
def store_int_at(data, row_stride, layout, row, column, value, mask):
    """Elements of a matrix."""
    store_int(data + row * row_stride, layout, column, value, mask)


@triton.jit
def load_real(data, layout, index, mask):
    """Elements of a vector as float64, which holds every float32; 0 where the mask is false."""
    at = data + index * (layout >> 2)
    wide = (layout & 1) != 0
    low = tl.load(at, mask=mask, other=0)
    high = tl.load(at + 1, mask=mask & wide, other=0)
    narrow = low.to(tl.float32, bitcast=True).to(tl.float64)
    return tl.where(wide, _join(low, high).to(tl.float64, bitcast=True), narrow)


@triton.jit
def load_flag(data, layout, index, mask):
    """Elements of a vector of bool; false where the mask is."""
    return tl.load(data + index * (layout >> 2), mask=mask, other=0) != 0


@triton.jit
def store_flag(data, layout, index, value, mask):
    """Elements of a vector of bool."""
    tl.store(data + index * (layout >> 2), value.to(tl.int8), mask=mask)


@triton.jit
def load_float_at(data, row_stride, layout, row, column, mask):
    """Elements of a matrix of floats of any width as float64."""
    at = data + row * row_stride + column * (layout >> 2)
    code = layout & 3
    half0 = tl.load(at, mask=mask, other=0)
    half1 = tl.load(at + 1, mask=mask & (code >= 2), other=0)
    half2 = tl.load(at + 2, mask=mask & (code == 3), other=0)
    half3 = tl.load(at + 3, mask=mask & (code == 3), other=0)
    low = _join_halves(half0, half1)
    float16 = half0.to(tl.float16, bitcast=True).to(tl.float32)
    bfloat16 = (half0.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    narrow = tl.where(code == 2, low.to(tl.float32, bitcast=True), tl.where(code == 1, bfloat16, float16))
    wide = _join(low, _join_halves(half2, half3)).to(tl.float64, bitcast=True)
    return tl.where(code == 3, wide, narrow.to(tl.float64))


@triton.jit
def _join_halves(low, high):
    return (high.to(tl.int32) << 16) | low.to(tl.uint16, bitcast=True).to(tl.int32)


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """A float32 in the dtype of a row, to the nearest and of two to the even one."""
    if dtype == tl.bfloat16:
        # Spelled out: Triton's interpreter would cut digits off.
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(value != value, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return value.to(dtype)


@triton.jit
def clamped(value, low, high):
    """The value, held inside of [low, high]."""
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def span_at(data, layout, request, mask, limit):
    """What running totals give to a request, held inside of [0, limit]: its begin and its end."""
    begin = clamped(load_int(data, layout, request, mask), 0, limit)
    end = load_int(data, layout, request + 1, mask)
    return begin, clamped(end, begin, tl.maximum(begin, limit))


@triton.jit
def drafts_of(ends, ends_layout, request, mask, num_drafts):
    """Where a request's drafts begin and end, from one past the last draft of each request."""
    begin = load_int(ends, ends_layout, request - 1, mask & (request > 0))
    begin = clamped(begin, 0, num_drafts)
    end = load_int(ends, ends_layout, request, mask)
    return begin, clamped(end, begin, num_drafts)

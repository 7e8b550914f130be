"""Checks of arguments, with the messages of csrc/common/checks.h.

Tensors are not read: values that would be an error on the CPU have the results that docs/numerics.md gives
for accelerators.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
_NAMED = (
    "float32",
    "float64",
    "bfloat16",
    "float16",
    "int32",
    "int64",
    "int16",
    "int8",
    "uint8",
    "bool",
)
_DTYPE_NAMES = {getattr(torch, name): name for name in _NAMED}
_INTEGERS = (torch.int32, torch.int64)
_REALS = (torch.float32, torch.float64)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ROWS = (torch.float32, torch.bfloat16, torch.float16)


def name_of(dtype: torch.dtype) -> str:
    """A dtype in a message."""
    return _DTYPE_NAMES.get(dtype, "another dtype")


def shape_of(tensor: Tensor) -> str:
    """A shape in a message."""
    return f"shape {list(tensor.shape)}"


def count_of(number: int, noun: str) -> str:
    """A number of things in a message."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


class Checks:
    """The checks of one op, which names itself once."""

    def __init__(self, op: str) -> None:
        """``op``: its name in messages."""
        self.op = op

    def fail(self, message: str) -> NoReturn:
        """Reports a bad argument."""
        raise RuntimeError(f"{self.op}: {message}")

    def dtype(self, tensor: Tensor, name: str, allowed: tuple[torch.dtype, ...], expected: str) -> None:
        """The dtype is one of those allowed, which ``expected`` spells out."""
        if tensor.dtype not in allowed:
            self.fail(f"{name} must be {expected}, got {name_of(tensor.dtype)}")

    def integer(self, tensor: Tensor, name: str) -> None:
        """int32 or int64."""
        self.dtype(tensor, name, _INTEGERS, "int32 or int64")

    def real(self, tensor: Tensor, name: str) -> None:
        """float32 or float64."""
        self.dtype(tensor, name, _REALS, "float32 or float64")

    def float32(self, tensor: Tensor, name: str) -> None:
        """float32."""
        self.dtype(tensor, name, (torch.float32,), "float32")

    def boolean(self, tensor: Tensor, name: str) -> None:
        """Bool."""
        self.dtype(tensor, name, (torch.bool,), "bool")

    def dims(self, tensor: Tensor, name: str, shape: str, dims: int) -> None:
        """So many dimensions, which ``shape`` spells out."""
        if tensor.dim() != dims:
            self.fail(f"{name} must be {shape}, got {shape_of(tensor)}")

    def vector(self, tensor: Tensor, name: str, shape: str, size: int) -> None:
        """A vector of ``size`` elements."""
        if tensor.dim() != 1 or tensor.shape[0] != size:
            self.fail(f"{name} must be {shape} with {count_of(size, 'element')}, got {shape_of(tensor)}")

    def at_least(self, tensor: Tensor, name: str, shape: str, size: int) -> None:
        """A vector of ``size`` elements or more: buffers of a runner are longer than the batch."""
        if tensor.dim() != 1 or tensor.shape[0] < size:
            elements = count_of(size, "element")
            self.fail(f"{name} must be {shape} with at least {elements}, got {shape_of(tensor)}")

    def ints(self, tensor: Tensor, name: str, shape: str, size: int) -> None:
        """Integers, ``size`` of them."""
        self.integer(tensor, name)
        self.vector(tensor, name, shape, size)

    def ints_from(self, tensor: Tensor, name: str, shape: str, size: int = 0) -> None:
        """Integers, of which the first ``size`` count."""
        self.integer(tensor, name)
        self.at_least(tensor, name, shape, size)

    def reals_from(self, tensor: Tensor, name: str, shape: str, size: int) -> None:
        """Likewise of float32 or float64."""
        self.real(tensor, name)
        self.at_least(tensor, name, shape, size)

    def bools_from(self, tensor: Tensor, name: str, shape: str, size: int) -> None:
        """Likewise of bool."""
        self.boolean(tensor, name)
        self.at_least(tensor, name, shape, size)

    def float32_vector(self, tensor: Tensor, name: str, shape: str, size: int) -> None:
        """float32, ``size`` of them."""
        self.float32(tensor, name)
        self.vector(tensor, name, shape, size)

    def row_dtype(self, tensor: Tensor, name: str) -> None:
        """float32, bfloat16 or float16."""
        self.dtype(tensor, name, _ROWS, "float32, bfloat16 or float16")

    def float_rows(self, tensor: Tensor, name: str, shape: str, num_rows: int) -> None:
        """Floats of any width and stride, in ``num_rows`` rows or more."""
        self.dtype(tensor, name, _FLOATS, "float64, float32, bfloat16 or float16")
        if tensor.dim() != 2 or tensor.shape[0] < num_rows:
            rows = count_of(num_rows, "row")
            self.fail(f"{name} must be {shape} with at least {rows}, got {shape_of(tensor)}")

    def wide_enough(self, tensor: Tensor, name: str, vocab_size: int) -> None:
        """A column for each id."""
        if tensor.shape[1] < vocab_size:
            self.fail(f"{name} must have at least vocab_size = {vocab_size} columns, got {tensor.shape[1]}")

    def contiguous_rows(self, tensor: Tensor, name: str) -> None:
        """A contiguous last dimension."""
        if tensor.shape[-1] > 1 and tensor.shape[0] != 0 and tensor.stride(-1) != 1:
            self.fail(f"{name} must have a contiguous last dimension, got stride {tensor.stride(-1)}")

    def rows(self, tensor: Tensor, name: str, shape: str, num_rows: int) -> None:
        """So many rows of logits with a contiguous last dimension."""
        self.row_dtype(tensor, name)
        self.dims(tensor, name, shape, 2)
        if tensor.shape[0] != num_rows:
            self.fail(f"{name} must be {shape} with {count_of(num_rows, 'row')}, got {shape_of(tensor)}")
        self.contiguous_rows(tensor, name)

    def vocab_size(self, given: int | None, logits: Tensor, name: str) -> int:
        """The number of ids that can win: ``given``, or the width."""
        width = logits.shape[1]
        if width < 1:
            self.fail(f"{name} must have at least one column, got {shape_of(logits)}")
        size = width if given is None else given
        if not 1 <= size <= width:
            self.fail(f"vocab_size must be between 1 and the width of {name}, {width}, got {size}")
        if size > INT32_MAX:
            self.fail(f"vocab_size must be below 2^31, got {size}")
        return size

    def between(self, value: int, name: str, low: int, high: int) -> None:
        """A number in [low, high]."""
        if not low <= value <= high:
            self.fail(f"{name} must be between {low} and {high}, got {value}")

    def positive_int32(self, value: int, name: str) -> None:
        """A number in [1, 2^31)."""
        self.between(value, name, 1, INT32_MAX)

    def int32(self, value: int, name: str) -> None:
        """A number that an int32 holds."""
        self.between(value, name, -INT32_MAX - 1, INT32_MAX)

    def draft_ends(self, cu_num_draft_tokens: Tensor, batch: int) -> Tensor:
        """One past the last draft of each request, from either form of the totals."""
        self.integer(cu_num_draft_tokens, "cu_num_draft_tokens")
        size = cu_num_draft_tokens.shape[0] if cu_num_draft_tokens.dim() == 1 else -1
        if size not in (batch, batch + 1):
            self.fail(
                f"cu_num_draft_tokens must be [batch + 1] or [batch] with {count_of(batch, 'request')}, "
                f"got {shape_of(cu_num_draft_tokens)}"
            )
        return cu_num_draft_tokens[1:] if size == batch + 1 else cu_num_draft_tokens

    def num_drafts(self, draft_token_ids: Tensor) -> int:
        """How many drafts there are."""
        self.integer(draft_token_ids, "draft_token_ids")
        self.dims(draft_token_ids, "draft_token_ids", "[num_drafts]", 1)
        return draft_token_ids.shape[0]


def num_blocks(size: int, block: int) -> int:
    """Blocks that hold ``size`` elements."""
    return -(-size // block)

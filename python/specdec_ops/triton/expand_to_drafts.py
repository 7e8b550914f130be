"""expand_to_drafts_ in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import Checks, name_of, num_blocks
from specdec_ops.triton._launch import LANES, REQUESTS, kernel, launch
from specdec_ops.triton._views import drafts_of, words

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = {torch.int64: 63, torch.int32: 31}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def expand_to_drafts_(
    values: Tensor,
    cu_num_draft_tokens: Tensor,
    replace_from: float | None,
    replace_to: float | None,
    expanded: Tensor,
) -> None:
    """See :func:`specdec_ops.expand_to_drafts_`."""
    checks = Checks("expand_to_drafts_")
    checks.dims(values, "values", "[batch]", 1)
    checks.dims(expanded, "expanded", "[num_drafts]", 1)
    if expanded.dtype != values.dtype:
        checks.fail(f"expanded must be {name_of(values.dtype)} like values, got {name_of(expanded.dtype)}")
    if (replace_from is None) != (replace_to is None):
        checks.fail("replace_from and replace_to must be given together, got one")
    batch = values.shape[0]
    ends = checks.draft_ends(cu_num_draft_tokens, batch)
    if values.dtype not in (*_FLOATS, *_INTEGERS, torch.bool):
        checks.fail(
            "values must be float64, float32, bfloat16, float16, int64, int32 or bool, "
            f"got {name_of(values.dtype)}"
        )
    bits = [0, 0]
    if replace_from is not None and replace_to is not None:
        bits = [
            _bits_of(checks, number, values.dtype, name)
            for number, name in ((replace_from, "replace_from"), (replace_to, "replace_to"))
        ]
    if values.dtype == torch.bool:
        values, expanded = values.view(torch.uint8), expanded.view(torch.uint8)
    launch(
        _expand,
        num_blocks(batch, REQUESTS),
        expanded,
        batch,
        expanded.shape[0],
        *words(ends, ends),
        values,
        values.stride(0),
        int(replace_from is not None),
        *bits,
        expanded,
        expanded.stride(0),
        REQUESTS=REQUESTS,
        LANES=LANES,
    )


def _bits_of(checks: Checks, number: float, dtype: torch.dtype, name: str) -> int:
    """The bits of a number in a dtype, which must hold it if it has integers or bool."""
    if dtype not in _FLOATS:
        bound = 2.0 ** _INTEGERS.get(dtype, 0)
        fits = number in (0, 1) if dtype == torch.bool else -bound <= number < bound
        if not fits or number != int(number):
            checks.fail(f"{name} must be a number that {name_of(dtype)} holds, got {number:g}")
        return int(number)
    value = torch.tensor(number, dtype=dtype)
    return int(value.view(_BITS[value.element_size()]))


@triton.jit
def _number(bits, dtype: tl.constexpr):
    if dtype.is_floating():
        return bits.to(tl.core.get_int_dtype(dtype.primitive_bitwidth, True)).to(dtype, bitcast=True)
    else:
        return bits.to(dtype)


@triton.jit
def _comparable(value):
    """16-bit floats compare as float32."""
    if value.dtype.is_floating() and value.dtype.primitive_bitwidth == 16:
        return value.to(tl.float32)
    else:
        return value


@kernel
def _expand(
    batch: tl.int64,
    num_drafts: tl.int64,
    ends,
    ends_layout: tl.int64,
    values,
    values_stride: tl.int64,
    replaces: tl.int64,
    replace_from: tl.int64,
    replace_to: tl.int64,
    expanded,
    expanded_stride: tl.int64,
    REQUESTS: tl.constexpr,
    LANES: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64) * REQUESTS + tl.arange(0, REQUESTS)
    mask = request < batch
    begin, end = drafts_of(ends, ends_layout, request, mask, num_drafts)
    given = tl.load(values + request * values_stride, mask=mask, other=0)
    dtype: tl.constexpr = values.dtype.element_ty
    is_replaced = _comparable(given) == _comparable(_number(replace_from, dtype))
    value = tl.where((replaces != 0) & is_replaced, _number(replace_to, dtype), given)
    value = tl.broadcast_to(value[:, None], [REQUESTS, LANES])
    longest = tl.max(tl.where(mask, end - begin, 0), axis=0)
    lane = tl.arange(0, LANES).to(tl.int64)
    first = tl.full([], 0, tl.int64)
    while first < longest:
        index = begin[:, None] + first + lane[None, :]
        tl.store(expanded + index * expanded_stride, value, mask=mask[:, None] & (index < end[:, None]))
        first += LANES

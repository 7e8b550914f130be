"""expand_draft_logits_ in Triton."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import INT32_MAX, Checks, num_blocks
from specdec_ops.triton._draft_vocabulary import draft_vocabulary, target_of
from specdec_ops.triton._launch import TILE, kernel, launch
from specdec_ops.triton._numerics import exp2_f64, is_greedy, log2_f64, log2_scale
from specdec_ops.triton._views import rounded

#: Weights of ids that share a target are whole multiples of this part of the largest.
_UNITS = tl.constexpr(2.0**40)


def expand_draft_logits_(
    draft_logits: Tensor, d2t: Tensor, temperature: Tensor, offsets: bool, expanded: Tensor
) -> None:
    """See :func:`specdec_ops.expand_draft_logits_`."""
    checks = Checks("expand_draft_logits_")
    checks.row_dtype(draft_logits, "draft_logits")
    checks.dims(draft_logits, "draft_logits", "[rows, draft_vocab_size]", 2)
    checks.contiguous_rows(draft_logits, "draft_logits")
    num_rows, width = draft_logits.shape
    vocabulary = draft_vocabulary(checks, d2t, offsets)
    size = d2t.shape[0]
    if size > width:
        checks.fail(f"d2t must have at most one element for each column of draft_logits, {width}, got {size}")
    checks.rows(expanded, "expanded", "[rows, vocab_size]", num_rows)
    vocab_size = expanded.shape[1]
    if vocab_size > INT32_MAX:
        checks.fail(f"expanded must have fewer than 2^31 columns, got {vocab_size}")
    checks.float32_vector(temperature, "temperature", "[rows]", num_rows)
    if num_rows == 0 or vocab_size == 0:
        return
    # Of each target id a list of the draft ids that lead to it, in any order, ended by -1.
    first = d2t.new_full((vocab_size,), -1, dtype=torch.int32)
    following = d2t.new_full((max(size, 1),), -1, dtype=torch.int32)
    launch(
        _list_draft_ids,
        num_blocks(size, TILE),
        draft_logits,
        *vocabulary,
        vocab_size,
        first,
        following,
        TILE=TILE,
    )
    blocks = num_blocks(vocab_size, TILE)
    launch(
        _expand,
        num_rows * blocks,
        draft_logits,
        blocks,
        vocab_size,
        first,
        following,
        draft_logits,
        draft_logits.stride(0),
        temperature,
        temperature.stride(0),
        expanded,
        expanded.stride(0),
        TILE=TILE,
    )


@kernel
def _list_draft_ids(
    targets,
    targets_layout: tl.int64,
    size: tl.int64,
    are_offsets: tl.int64,
    vocab_size: tl.int64,
    first,
    following,
    TILE: tl.constexpr,
):
    draft = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    target = target_of(targets, targets_layout, size, are_offsets, draft, draft < size)
    is_listed = (target >= 0) & (target < vocab_size)
    before = tl.atomic_xchg(first + tl.where(is_listed, target, 0), draft.to(tl.int32), mask=is_listed)
    tl.store(following + draft, before, mask=is_listed)


@kernel
def _expand(
    blocks: tl.int64,
    vocab_size: tl.int64,
    first,
    following,
    logits,
    logits_stride: tl.int64,
    temperatures,
    temperatures_stride: tl.int64,
    expanded,
    expanded_stride: tl.int64,
    TILE: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    row = program // blocks
    target = (program - row * blocks) * TILE + tl.arange(0, TILE)
    mask = target < vocab_size
    temperature = tl.load(temperatures + row * temperatures_stride)
    logits += row * logits_stride
    head = tl.load(first + target, mask=mask, other=-1)
    largest = tl.load(logits + head, mask=head >= 0, other=float("-inf")).to(tl.float32)
    draft = tl.load(following + head, mask=head >= 0, other=-1)
    is_shared = draft >= 0
    if tl.max(draft, axis=0) >= 0:
        has_nan = is_shared & (largest != largest)
        while tl.max(draft, axis=0) >= 0:
            value = tl.load(logits + draft, mask=draft >= 0, other=float("-inf")).to(tl.float32)
            has_nan = has_nan | (value != value)
            largest = tl.where(value > largest, value, largest)
            draft = tl.load(following + draft, mask=draft >= 0, other=-1)
        # The weight of a shared target is the sum of its draft ids' weights, in whole numbers.
        greedy = is_greedy(temperature)
        scale = log2_scale(tl.where(greedy, 1.0, temperature)).to(tl.float64)
        is_finite = (largest > float("-inf")) & (largest < float("inf"))
        adds = is_shared & is_finite & (has_nan == 0) & (greedy == 0)
        units = tl.zeros([TILE], tl.int64)
        draft = tl.where(adds, head, -1)
        while tl.max(draft, axis=0) >= 0:
            value = tl.load(logits + draft, mask=draft >= 0, other=float("-inf")).to(tl.float32)
            distance = tl.where(draft >= 0, value.to(tl.float64) - largest.to(tl.float64), float("-inf"))
            units += (exp2_f64(distance * scale) * _UNITS).to(tl.int64)
            draft = tl.load(following + draft, mask=draft >= 0, other=-1)
        total = tl.where(adds, units, 1).to(tl.float64) / _UNITS
        more = log2_f64(total) / scale
        largest = tl.where(adds, (largest.to(tl.float64) + more).to(tl.float32), largest)
        largest = tl.where(has_nan, float("nan"), largest)
    expanded += row * expanded_stride
    tl.store(expanded + target, rounded(largest, expanded.dtype.element_ty), mask=mask)

"""Drafters whose vocabulary is a part of the target's."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specdec_ops.triton._checks import INT32_MAX, Checks
from specdec_ops.triton._views import load_int, words


def draft_vocabulary(checks: Checks, d2t: Tensor, offsets: bool) -> tuple[Any, int, int, int]:
    """Where draft ids lead, as kernels take it."""
    checks.integer(d2t, "d2t")
    checks.dims(d2t, "d2t", "[draft_vocab_size]", 1)
    if d2t.shape[0] > INT32_MAX:
        checks.fail(f"d2t must have fewer than 2^31 elements, got {d2t.shape[0]}")
    return (*words(d2t, d2t), d2t.shape[0], int(offsets))


@triton.jit
def target_of(targets, targets_layout, size, are_offsets, draft, mask):
    """-1 where an id is no draft id, or leads to a negative one."""
    is_draft = mask & (draft >= 0) & (draft < size)
    target = load_int(targets, targets_layout, draft, is_draft) + tl.where(are_offsets != 0, draft, 0)
    return tl.where(is_draft & (target >= 0), target, -1)

"""What block verification leaves behind for the judges: records of drafts, and a decision on each request."""

from __future__ import annotations

import triton
import triton.language as tl

#: Numbers in float64 that are kept of each draft, in planes.
CHANCE = tl.constexpr(0)
TARGET_PROB = tl.constexpr(1)
KIND = tl.constexpr(2)
REFERENCE = tl.constexpr(3)
LOG2_TOTAL = tl.constexpr(4)
DRAFT_LOG2_TOTAL = tl.constexpr(5)
NUM_RECORDS = tl.constexpr(6)
#: In int32: how many drafts are accepted, the token behind them or -1, and its status.
DECISION_SIZE = tl.constexpr(3)


def size_in_bytes(num_drafts: int, batch: int) -> int:
    """Of all of it."""
    return int(8 * NUM_RECORDS.value * num_drafts + 4 * DECISION_SIZE.value * batch)


@triton.jit
def record_of(answers, num_drafts, record, drafts):
    """Where a number of drafts is."""
    return answers.to(tl.int64).to(tl.pointer_type(tl.float64)) + record * num_drafts + drafts


@triton.jit
def decision_of(answers, num_drafts, r):
    """Where the decision on a request is."""
    behind = answers.to(tl.int64) + 8 * NUM_RECORDS * num_drafts
    return behind.to(tl.pointer_type(tl.int32)) + DECISION_SIZE * r

"""The table of ratios."""

from __future__ import annotations

from collections.abc import Sequence

from _cases import Case
from _suite import OURS, READ_LOOP, Result, Suite

_HEADER = (
    "op", "case", "accept", "us", "read us", "GB/s", "/read", "block", "/plain",
    "xvllm", "xvllm-step", "xvllm-argmax", "xeager", "others", "goals",
)  # fmt: skip
_NOTES = """\
us        specdec_ops: mean over input sets of the median over repeats
read us   the read loop on the bytes that must be touched, and its GB/s
/read     specdec_ops over the read loop
block     block verification over specdec_ops
/plain    a call with filters, or with law_size, over the same call without
x...      how many times faster specdec_ops is than
  vllm          rejection_sample alone: its scaled float32 logits, draft probabilities and bonus tokens made
                beforehand (other ops: the same from logits)
  vllm-step     RejectionSampler.forward and the softmax of the drafts' law, from the logits that specdec_ops
                takes. Its temperatures are uninitialised memory on CPU, a fault of vLLM 0.32: its tokens are
                wrong, and it is timed as users get it
  vllm-argmax   _C.greedy_argmax of all rows, then vLLM's greedy kernel
  eager         softmax and multinomial in torch
others    CPU share of other processes meanwhile (they also fill a core that a serial rival leaves idle)
"""


def render(results: Sequence[tuple[Suite, Case, Result]]) -> str:
    rows = [_HEADER] + [_row(suite, case, result) for suite, case, result in results]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = []
    for row in rows:
        cells = list(zip(row, widths, strict=True))
        padded = [cell.ljust(width) for cell, width in cells[:2]] + [
            cell.rjust(width) for cell, width in cells[2:]
        ]
        lines.append("  ".join(padded))
    return "\n".join([*lines, "", _NOTES])


def _row(suite: Suite, case: Case, result: Result) -> tuple[str, ...]:
    timings = result.timings
    read = timings.seconds(READ_LOOP) if READ_LOOP in timings.samples else None
    return (
        suite.name,
        str(case),
        _number(result.facts.get(OURS), 2),
        _number(timings.seconds(OURS) * 1e6, 1),
        _number(read and read * 1e6, 1),
        _number(read and result.bytes_read / read / 1e9, 1),
        _number(result.over_read_loop, 2),
        _number(result.speedup("block"), 2),
        _number(result.over_plain, 2),
        _number(result.speedup("vllm"), 1),
        _number(result.speedup("vllm-step"), 1),
        _number(result.speedup("vllm-argmax"), 2),
        _number(result.speedup("eager"), 1),
        f"{timings.disturbance:.0%}",
        "; ".join(_verdicts(case, result)),
    )


def _verdicts(case: Case, result: Result) -> list[str]:
    goals = case.goals
    verdicts = []
    for rival, goal in (("vllm", goals.vllm), ("vllm-argmax", goals.vllm_argmax)):
        reached = result.speedup(rival)
        if goal is not None and reached is not None:
            verdicts.append(f"{rival} >= {goal:g} {'met' if reached >= goal else 'MISSED'}")
    if goals.microseconds is not None:
        taken = result.timings.seconds(OURS) * 1e6
        verdicts.append(f"us <= {goals.microseconds:g} {'met' if taken <= goals.microseconds else 'MISSED'}")
    if goals.plain is not None and result.over_plain is not None:
        verdicts.append(f"plain <= {goals.plain:g} {'met' if result.over_plain <= goals.plain else 'MISSED'}")
    over = result.over_read_loop
    if goals.read_loop is not None and over is not None:
        verdicts.append(f"read <= {goals.read_loop:g} {'met' if over <= goals.read_loop else 'MISSED'}")
    return verdicts


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"

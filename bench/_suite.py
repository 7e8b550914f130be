"""An op's benchmark: its cases, its implementations, and what must hold before anything is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import _vllm
from _cases import Case, Inputs
from _interleave import REPEATS, Call, Timings, input_sets, measure, realtime
from _read_loop import read_loop
from torch import Tensor

OURS = "specdec_ops"
READ_LOOP = "read loop"
#: The same call without filters, or without a size of the law.
PLAIN = "plain"

Calls = Mapping[str, Sequence[Call]]


@dataclass(frozen=True)
class Result:
    timings: Timings
    #: What the check found, such as the acceptance per token of each implementation.
    facts: Mapping[str, float]
    #: Mean bytes that the read loop reads per call.
    bytes_read: float

    def speedup(self, rival: str) -> float | None:
        return self.timings.ratio(rival, OURS) if rival in self.timings.samples else None

    @property
    def over_read_loop(self) -> float | None:
        return self.timings.ratio(OURS, READ_LOOP) if READ_LOOP in self.timings.samples else None

    @property
    def over_plain(self) -> float | None:
        return self.timings.ratio(OURS, PLAIN) if PLAIN in self.timings.samples else None


@dataclass(frozen=True)
class Suite:
    name: str
    cases: Sequence[Case]
    #: By name; a rival of vLLM starts with "vllm".
    implementations: Mapping[str, Callable[[Inputs], Call]]
    #: Fails where a result is wrong; returns facts worth reporting.
    check: Callable[[Sequence[Inputs], Calls], Mapping[str, float]]
    #: The rows that the algorithm must read, if it reads any.
    must_read: Callable[[Inputs], Sequence[Tensor]] | None = None
    calls_per_sample: int = 1

    def names(self, case: Case) -> list[str]:
        names = [OURS] + ([READ_LOOP] if self.must_read else []) + list(self.implementations)
        if not case.greedy:
            names = [name for name in names if "argmax" not in name]
        return [name for name in dict.fromkeys(names) if not name.startswith("vllm") or _vllm.present()]

    def parameters(self) -> Iterator[tuple[Case, str]]:
        return ((case, name) for case in self.cases for name in self.names(case))

    def run(self, case: Case, smoke: bool, undisturbed: bool) -> Result:
        """Checks every implementation on every input set, then times them side by side."""
        sets = input_sets(case, smoke)
        rivals = [name for name in self.names(case) if name != READ_LOOP]
        calls = {name: [self.implementations[name](inputs) for inputs in sets] for name in rivals}
        facts = self.check(sets, calls)
        bytes_read = 0.0
        if self.must_read is not None:
            rows = [self.must_read(inputs) for inputs in sets]
            calls[READ_LOOP] = [read_loop(needed) for needed in rows]
            bytes_read = sum(row.numel() * row.element_size() for needed in rows for row in needed) / len(
                sets
            )
        with realtime(undisturbed):
            timings = measure(calls, 1 if smoke else REPEATS, self.calls_per_sample)
        return Result(timings, facts, bytes_read)

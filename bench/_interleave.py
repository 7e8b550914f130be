"""Times implementations side by side: alternating calls, rotated inputs, one run."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _cases import Case, Inputs, make_inputs

#: Before inputs come round again, at least this much else has been read: several times the last-level
#: cache, so that no implementation finds logits in it. (An engine's lm_head leaves at most the tail
#: of its logits there, since it streams its weights through the same cache.)
COLD_BYTES = 192 << 20
MIN_SETS, MAX_SETS = 4, 64
REPEATS = 5
_WAKE_ELEMENTS = 1 << 17

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Timings:
    """Seconds of each implementation, by input set and repeat."""

    samples: Mapping[str, Sequence[Sequence[float]]]
    #: Share of the machine's CPU time that other processes took meanwhile.
    disturbance: float

    def seconds(self, name: str) -> float:
        """The mean over input sets of the median over repeats: sets differ in work, repeats in noise."""
        return statistics.fmean(statistics.median(repeats) for repeats in self.samples[name])

    def ratio(self, name: str, other: str) -> float:
        """Times that ``name`` takes longer than ``other``."""
        return self.seconds(name) / self.seconds(other)


def input_sets(case: Case, smoke: bool) -> list[Inputs]:
    first = make_inputs(case, 0)
    count = 2 if smoke else min(MAX_SETS, max(MIN_SETS, math.ceil(COLD_BYTES / first.num_bytes())))
    return [first] + [make_inputs(case, i) for i in range(1, count)]


@torch.inference_mode()
def measure(calls: Mapping[str, Sequence[Call]], repeats: int, calls_per_sample: int = 1) -> Timings:
    """Times ``calls[name][i]``, the implementation ``name`` on input set i, ``repeats`` times each.

    A sample is the mean of ``calls_per_sample`` calls in a row: more than 1 for calls of a few microseconds.

    In a round every implementation runs once, each on another set and in rotating order. Before each call,
    off the clock, torch's threads get something to do: in an engine they come from the lm_head's product,
    awake, and not from the serial code of whichever rival went before. In inference mode, as engines are.
    """
    names = list(calls)
    num_sets = len(calls[names[0]])
    apart = max(1, num_sets // len(names))
    wake = torch.zeros(_WAKE_ELEMENTS)
    samples: dict[str, list[list[float]]] = {name: [[] for _ in range(num_sets)] for name in names}
    for name in names:
        calls[name][0]()
    gc.collect()
    gc.disable()
    busy, own, started = _busy_seconds(), time.process_time(), time.perf_counter()
    try:
        for round_ in range(repeats * num_sets):
            for place in range(len(names)):
                which = (round_ + place) % len(names)
                index = (round_ + which * apart) % num_sets
                call = calls[names[which]][index]
                wake.add_(1)
                start = time.perf_counter()
                for _ in range(calls_per_sample):
                    call()
                elapsed = time.perf_counter() - start
                samples[names[which]][index].append(elapsed / calls_per_sample)
    finally:
        gc.enable()
    others = _busy_seconds() - busy - (time.process_time() - own)
    elapsed = (time.perf_counter() - started) * (os.cpu_count() or 1)
    return Timings(samples, min(1.0, max(0.0, others / elapsed)))


@contextlib.contextmanager
def realtime(wanted: bool) -> Iterator[None]:
    """Keeps other processes off the cores meanwhile, if wanted and allowed (Linux, root)."""
    threads = [int(task) for task in os.listdir("/proc/self/task")] if wanted else []
    for thread in threads:
        os.sched_setscheduler(thread, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        for thread in threads:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _busy_seconds() -> float:
    """CPU seconds of all processes since boot; 0 where /proc is missing."""
    try:
        fields = Path("/proc/stat").read_text().split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")

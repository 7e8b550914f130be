"""Hands interleaved timings to pytest-benchmark, and prints the table of ratios at the end."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import _read_loop
import _table
import _vllm
import pytest
import specdec_ops
import torch
from _cases import Case, Goals
from _suite import OURS, READ_LOOP, Result, Suite

_SMOKE_VOCAB_SIZE = 2_000
_results: dict[tuple[str, str], tuple[Suite, Case, Result]] = {}


class _Replay:
    """Time that passes by recorded samples: pytest-benchmark's timer reads it, the target advances it."""

    now = 0.0
    samples: ClassVar[list[float]] = []

    @classmethod
    def advance(cls) -> None:
        if cls.samples:
            cls.now += cls.samples.pop()


def interleaved() -> float:
    return _Replay.now


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("specdec_ops")
    group.addoption("--smoke", action="store_true", help="small vocabularies, one repeat: does it run?")
    group.addoption("--realtime", action="store_true", help="timings keep other processes off (root)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.benchmark(timer=interleaved))


@pytest.fixture
def side_by_side(benchmark: Any, request: pytest.FixtureRequest) -> Callable[[Suite, Case, str], None]:
    """Reports one implementation of a case; the case's first test measures all of them."""

    def report(suite: Suite, case: Case, implementation: str) -> None:
        smoke = request.config.getoption("--smoke")
        key = suite.name, str(case)
        if key not in _results:
            run = _smaller(case) if smoke else case
            _results[key] = suite, run, suite.run(run, smoke, request.config.getoption("--realtime"))
        result = _results[key][2]
        benchmark.group = f"{suite.name} {case}"
        benchmark.extra_info |= _extra_info(result, implementation)
        _Replay.samples = [s for repeats in result.timings.samples[implementation] for s in repeats][::-1]
        benchmark.pedantic(_Replay.advance, rounds=len(_Replay.samples))

    return report


def _smaller(case: Case) -> Case:
    vocab_size = min(case.vocab_size, _SMOKE_VOCAB_SIZE)
    return dataclasses.replace(case, vocab_size=vocab_size, goals=Goals(read_loop=None))


def _extra_info(result: Result, implementation: str) -> Mapping[str, float | None]:
    info: dict[str, float | None] = {
        "seconds": result.timings.seconds(implementation),
        "disturbance": result.timings.disturbance,
        "acceptance": result.facts.get(implementation),
    }
    if implementation == OURS:
        info["over_read_loop"] = result.over_read_loop
    elif implementation == READ_LOOP:
        info["bytes"] = result.bytes_read
    else:
        info["speedup_of_specdec_ops"] = result.speedup(implementation)
    return info


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info |= {
        "cpu_name": _cpu_name(),
        "specdec_ops": specdec_ops.show_config().splitlines(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "read_loop": _read_loop.kind(),
        "vllm": _vllm.version() if _vllm.present() else None,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _results:
        terminalreporter.section("ratios, side by side")
        terminalreporter.write(_table.render(list(_results.values())))

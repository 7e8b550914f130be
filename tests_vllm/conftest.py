"""Runs the jobs that the selected tests name, two at a time, and hands the tests their results."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import upstream
from jobs import Job, timed

#: Engines use one thread each.
WORKERS = max(1, min(4, len(os.sched_getaffinity(0))))

_pool = concurrent.futures.ThreadPoolExecutor(WORKERS)
_futures: dict[Job, concurrent.futures.Future[tuple[dict[str, Any], float]]] = {}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*jobs): jobs whose results the test reads")


def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.collectonly:
        return
    jobs = []
    for item in session.items:
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        named = [job for mark in item.iter_markers("needs") for job in mark.args]
        for job in [*named, *(each for each in parameters if isinstance(each, Job))]:
            jobs += [*job.requires(), job]
    if jobs:
        upstream.prepare()
    for job in dict.fromkeys(jobs):
        _futures[job] = _pool.submit(timed, job)


def pytest_sessionfinish(session: pytest.Session) -> None:
    _pool.shutdown(wait=True, cancel_futures=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("jobs")
    for job, future in _futures.items():
        if future.done() and not future.cancelled() and future.exception() is None:
            result, seconds = future.result()
            laps = " ".join(f"{name} {lap}" for name, lap in result.get("seconds", {}).items())
            terminalreporter.write_line(f"{seconds:6.1f} s  {job} {laps}")


@pytest.fixture(scope="session")
def result_of() -> Iterator[Callable[[Job], dict[str, Any]]]:
    """The result of a job that the test names by a parameter or the mark ``needs``."""
    yield lambda job: _futures[job].result()[0]

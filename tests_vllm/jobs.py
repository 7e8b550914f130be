"""What the tests run in processes of their own, a few at a time, while others wait for their turn."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import upstream

HERE = Path(__file__).parent
#: A job that takes longer hangs.
TIMEOUT = 600


@dataclasses.dataclass(frozen=True)
class UpstreamRun:
    """A pytest run of upstream's own test files."""

    version: str
    files: tuple[str, ...]
    plugin: bool = True
    #: Unwritten memory reads as NaN.
    stale_memory_is_nan: bool = False

    def requires(self) -> list[Any]:
        return []

    def run(self) -> dict[str, Any]:
        """The outcome of each case, and how often the package was called."""
        folder = upstream.tests_folder(self.version)
        stale = "nan" if self.stale_memory_is_nan else ""
        environment = upstream.environment(self.version, plugin=self.plugin, STALE_MEMORY=stale)
        # `tests` is upstream's; `as_worker` is beside this file.
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(folder), *upstream.python_path(self.version), str(HERE), os.environ.get("PYTHONPATH", "")]
        )
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch) / "report.xml"
            options = ["-p", "as_worker", "--noconftest", "-p", "no:cacheprovider", "-q", "-W", "ignore"]
            command = [sys.executable, "-m", "pytest", *options, "-c", os.devnull, f"--rootdir={folder}"]
            log = _execute([*command, f"--junitxml={report}", *self.files], environment, folder)
            if not report.exists():
                raise RuntimeError(f"{self} wrote no report:\n{log[-3000:]}")
            cases = {}
            for case in xml.etree.ElementTree.parse(report).iter("testcase"):
                problem = next(
                    (kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None), ""
                )
                module = case.get("classname", "").rpartition(".")[2]
                cases[f"{module}::{case.get('name')}"] = problem or "passed"
        calls = re.search(r"^calls of specdec_ops: (\d+)$", log, re.MULTILINE)
        return {"cases": cases, "calls": int(calls[1]) if calls else None, "log": log}


@dataclasses.dataclass(frozen=True)
class EngineRun:
    """An engine with the tiny checkpoints that answers groups of requests: see engine_run.py."""

    version: str
    mode: str
    groups: tuple[str, ...] = ("greedy", "sampled", "seeded")
    plugin: bool = True
    multiprocessing: bool = False

    def plain(self) -> EngineRun:
        """The same engine without drafts."""
        return EngineRun(self.version, "plain")

    def requires(self) -> list[Any]:
        return [self.plain()] if self.plugin else []

    def run(self) -> dict[str, Any]:
        """What engine_run.py wrote."""
        environment = upstream.environment(
            self.version,
            plugin=self.plugin,
            VLLM_ENABLE_V1_MULTIPROCESSING=str(int(self.multiprocessing)),
            # The worker is asked for the plug-in's counters by a function.
            VLLM_ALLOW_INSECURE_SERIALIZATION=str(int(self.multiprocessing)),
        )
        with tempfile.TemporaryDirectory() as folder:
            job = json.dumps({"mode": self.mode, "groups": self.groups, "folder": folder})
            log = _execute([sys.executable, str(HERE / "engine_run.py"), job], environment, Path(folder))
            path = Path(folder) / "result.json"
            if not path.exists():
                raise RuntimeError(f"{self} wrote no result:\n{log[-4000:]}")
            return {**json.loads(path.read_text()), "log": log}


@dataclasses.dataclass(frozen=True)
class FaultsRun:
    """A look for each fault of stock vLLM: see faults.py."""

    version: str
    plugin: bool

    def requires(self) -> list[Any]:
        return []

    def run(self) -> dict[str, Any]:
        """Whether each fault is there."""
        environment = upstream.environment(self.version, plugin=self.plugin)
        log = _execute([sys.executable, str(HERE / "faults.py")], environment, HERE)
        last = log.splitlines()[-1]
        if not last.startswith("{"):
            raise RuntimeError(f"{self} found nothing out:\n{log[-3000:]}")
        return {"faults": json.loads(last)}


def _execute(command: list[str], environment: dict[str, str], folder: Path) -> str:
    """Standard output and error of a command, whatever it returns."""
    process = subprocess.run(
        command,
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=TIMEOUT,
        check=False,
    )
    return process.stdout


Job = UpstreamRun | EngineRun | FaultsRun


def timed(job: Job) -> tuple[dict[str, Any], float]:
    """A job's result and its seconds."""
    start = time.perf_counter()
    result = job.run()
    return result, time.perf_counter() - start

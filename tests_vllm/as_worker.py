"""A pytest plug-in for upstream's test files: the process starts as the engine's workers do.

With ``STALE_MEMORY=nan``, memory that nothing has written reads as NaN (floats) or the largest number
(integers), so that a result that was never written cannot look right by chance. Each case starts from the
same seed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

load_general_plugins()
current_platform.register_triton_kernel_overrides()

if os.environ.get("STALE_MEMORY") == "nan":
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True

#: Files that skip themselves unless the platform is a GPU, and yet name no GPU in what they do.
GUARDED = ("test_eagle_step_kernel.py",)


def pytest_runtest_setup() -> None:
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    name = collector.path.name
    if name == "test_eagle.py":
        # It asks which attention backends to try, and upstream's helper knows none for the CPU. The
        # backend only builds the metadata here: the model is a mock.
        import tests.utils

        with mock.patch.object(
            tests.utils, "get_attn_backend_list_based_on_platform", lambda: ["FLASH_ATTN"]
        ):
            return (yield)
    if name in GUARDED and isinstance(collector, pytest.Module):
        with mock.patch.object(type(current_platform), "is_xpu", lambda self: True):
            return (yield)
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    report = sys.modules.get("specdec_ops.integrations.vllm._report")
    calls = sum(report.calls.values()) if report else 0
    terminalreporter.write_line(f"calls of specdec_ops: {calls}")

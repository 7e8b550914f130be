"""A pytest plug-in for upstream's test files on a machine with a GPU and without vLLM.

``VLLM_SOURCES`` names an unpacked source distribution; the process starts as the engine's workers do. Each
case starts from the same seed. At the end it is said how often the package was called, and what ran on vLLM's
own code and why.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from specdec_ops.integrations import vllm as plugin
from specdec_ops.integrations.vllm import _report

from tools import vllm_sources

vllm_sources.load(Path(os.environ["VLLM_SOURCES"]))
#: What ``python -m specdec_ops vllm`` prints.
DESCRIPTION = plugin.describe()

#: Cases that want the tokens of ``rejection_sample`` with watermarks, which vLLM's code serves, to be those
#: that it gives without.
COMPARE_WITH_STOCK = frozenset(
    (
        "test_repeated_bonus_context_uses_ordinary_target_sample",
        "test_repeated_context_does_not_change_unwatermarked_or_greedy_rows",
        "test_repeated_context_skip_mask_is_read_per_row_in_a_block",
        "test_repeated_draft_context_does_not_change_acceptance",
        "test_repeated_recovery_context_uses_ordinary_residual_sample",
        "test_watermarked_recovery_leaves_disabled_rows_on_the_stock_draw",
    )
)

#: Cases by what they ran on, if not on ours alone.
_elsewhere: dict[str, list[str]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    torch.manual_seed(0)
    before = _report.calls.total()
    handed_over = _report.handed_over.copy()
    stock = isinstance(item, pytest.Function) and item.originalname in COMPARE_WITH_STOCK
    with pytest.MonkeyPatch.context() as patch:
        if stock:
            patch.setattr(item.module, "rejection_sample", item.module.rejection_sample.replaces)
        yield
    calls = _report.calls.total() - before
    features = sorted(_report.handed_over - handed_over)
    if stock:
        why = "vLLM's own rejection_sample put back, to compare with"
    elif features:
        why = f"vLLM's code for {', '.join(features)}{', ours for the rest' if calls else ''}"
    elif not calls:
        why = "no function that counts its calls (it may have launched kernels of ours)"
    else:
        return
    _elsewhere.setdefault(why, []).append(item.name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, count in sorted(_report.calls.items()):
        terminalreporter.write_line(f"{count:6d} calls of {name}")
    for why, cases in _elsewhere.items():
        counted = Counter(case.partition("[")[0] for case in cases)
        names = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in counted.items())
        terminalreporter.write_line(f"{len(cases)} cases on {why}: {names}")

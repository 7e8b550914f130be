"""The plug-in for vLLM around an engine that is not there, or not the one that it knows.

With a real engine it is tested in tests_vllm (`make test-vllm`).
"""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from specdec_ops.integrations import vllm as plugin
from specdec_ops.integrations.vllm import _plugin, _report, runner_sampling

Log = list[str]


@pytest.fixture(autouse=True)
def fresh_report() -> Iterator[None]:
    for facts in (_report.replacements, _report.calls, _report.handed_over):
        facts.clear()
    _report.warn_once.cache_clear()
    yield
    for facts in (_report.replacements, _report.calls, _report.handed_over):
        facts.clear()


@pytest.fixture
def log() -> Log:
    return []


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch, log: Log) -> Any:
    """A stand-in for vLLM with nothing but a platform."""

    class Platform:
        device_name = "cpu"
        capability = 90

        def is_cpu(self) -> bool:
            return self.device_name == "cpu"

        def is_cuda(self) -> bool:
            return self.device_name == "cuda"

        def has_device_capability(self, capability: int) -> bool:
            return self.capability >= capability

        @classmethod
        def register_triton_kernel_overrides(cls) -> None:
            log.append(f"stock {cls.__name__}")

    engine = types.ModuleType("vllm")
    engine.__version__ = "9.9.9"  # type: ignore[attr-defined]
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = Platform()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", engine)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    return platforms.current_platform


def test_without_vllm_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    plugin.register()
    assert plugin.describe().startswith("vLLM cannot be imported: ")


def test_the_command_says_that_vllm_is_not_there() -> None:
    code = "import sys, runpy; sys.modules['vllm'] = None; sys.argv = ['specdec_ops', 'vllm']; "
    code += "runpy.run_module('specdec_ops', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("vLLM cannot be imported")


def test_kernels_are_replaced_after_the_platform_has_put_in_its_own(
    platform: Any, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_plugin, "install", lambda: log.append("ours"))
    plugin.register()
    assert log == []
    platform.register_triton_kernel_overrides()
    assert log == ["stock Platform", "ours"]


def test_registering_again_changes_nothing(platform: Any, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_plugin, "install", lambda: log.append("ours"))
    for _ in range(3):
        plugin.register()
    platform.register_triton_kernel_overrides()
    assert log == ["stock Platform", "ours"]


def test_the_switch_leaves_the_engine_alone(platform: Any, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_OPS_VLLM", "0")
    monkeypatch.setattr(_plugin, "install", lambda: log.append("ours"))
    plugin.register()
    platform.register_triton_kernel_overrides()
    assert log == ["stock Platform"]
    assert plugin.describe().endswith("nothing is replaced, since SPECDEC_OPS_VLLM is 0")


def set_cuda_kernels(monkeypatch: pytest.MonkeyPatch, loaded: bool) -> None:
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda op, key: loaded)


def test_cuda_is_served_where_there_are_kernels_for_it(
    platform: Any, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The platform inherits a hook that does nothing."""
    set_cuda_kernels(monkeypatch, True)
    monkeypatch.setattr(type(platform), "device_name", "cuda")
    monkeypatch.setattr(_plugin, "install", lambda: log.append("ours"))
    plugin.register()
    platform.register_triton_kernel_overrides()
    assert log == ["stock Platform", "ours"]


@pytest.mark.parametrize(
    ("device", "kernels", "capability", "reason"),
    [
        ("tpu", True, 90, "the plug-in serves vLLM's platforms for CPU and CUDA"),
        ("cuda", False, 90, "specdec_ops has no native kernels for CUDA here (python -m specdec_ops)"),
        ("cuda", True, 75, "the GPU's compute capability is below 8.0"),
    ],
)
def test_other_platforms_are_left_alone(
    platform: Any,
    log: Log,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: str,
    kernels: bool,
    capability: int,
    reason: str,
) -> None:
    set_cuda_kernels(monkeypatch, kernels)
    monkeypatch.setattr(type(platform), "device_name", device)
    monkeypatch.setattr(type(platform), "capability", capability)
    monkeypatch.setattr(_plugin, "install", lambda: log.append("ours"))
    for _ in range(2):
        plugin.register()
    platform.register_triton_kernel_overrides()
    assert log == ["stock Platform"]
    assert plugin.describe() == f"vLLM 9.9.9, platform {device}\nnothing is replaced, since {reason}"
    told = [f"vLLM runs as it is, since {reason}"] if device == "cuda" else []
    assert [record.getMessage() for record in caplog.records] == told


@pytest.mark.skipif(torch.version.cuda is not None, reason="there may be kernels for CUDA")
def test_without_cuda_there_are_no_kernels_for_it(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(platform), "device_name", "cuda")
    assert "no native kernels for CUDA" in plugin.describe()


def stock_rejection_sample(target_logits: Any, pos: Any) -> None: ...


def stock_gumbel_sample(logits: Any, pos: Any) -> None: ...


STOCK = {"rejection_sample": stock_rejection_sample, "gumbel_sample": stock_gumbel_sample}


@pytest.fixture
def newer_runner(platform: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Any]]:
    """The functions of vLLM that sample, in their modules and those that import them, by name."""
    set_cuda_kernels(monkeypatch, True)
    monkeypatch.setattr(type(platform), "device_name", "cuda")
    triton_utils = types.ModuleType("vllm.triton_utils")
    triton_utils.HAS_TRITON = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.triton_utils", triton_utils)
    modules: dict[str, set[Any]] = {}
    for name, importers in runner_sampling.IMPORTERS.items():
        owner, _, attribute = name.rpartition(".")
        for holder in (owner, *importers):
            module = types.ModuleType(holder)
            setattr(module, attribute, STOCK[attribute])
            monkeypatch.setitem(sys.modules, holder, module)
            modules.setdefault(attribute, set()).add(module)
    return modules


@pytest.mark.parametrize("switch", [None, "1", "all"])
def test_drawing_stays_the_engines_unless_all_is_asked_for(
    newer_runner: dict[str, set[Any]], monkeypatch: pytest.MonkeyPatch, switch: str | None
) -> None:
    if switch is None:
        monkeypatch.delenv("SPECDEC_OPS_VLLM", raising=False)
    else:
        monkeypatch.setenv("SPECDEC_OPS_VLLM", switch)
    text = plugin.describe()
    replaced = {"rejection_sample", *(["gumbel_sample"] if switch == "all" else [])}
    for attribute, stock in STOCK.items():
        for module in newer_runner[attribute]:
            function = getattr(module, attribute)
            assert (function is not stock) == (attribute in replaced), module
            assert getattr(function, "replaces", stock) is stock
    name = "vllm.v1.worker.gpu.sample.gumbel.gumbel_sample"
    reason = "vLLM's own is mostly faster (SPECDEC_OPS_VLLM=all replaces it too)"
    assert _report.replacements[name].reason == ("" if switch == "all" else reason)
    assert (f"not replaced, since {reason}:\n  {name}" in text) == (switch != "all")


def test_an_engine_that_is_laid_out_otherwise_keeps_its_own_code(platform: Any) -> None:
    """Modules are missing: each group of replacements says so, and nothing is raised."""
    text = plugin.describe()
    assert text.startswith("vLLM 9.9.9, platform cpu\n")
    groups = ["kernels", "rejection_sampler", "proposer", "runner", "runner_filters"]
    assert list(_report.replacements) == groups
    assert not any(replacement.replaced for replacement in _report.replacements.values())
    assert text.count("not replaced, since ModuleNotFoundError") == 2


class Owner:
    def known(self, a: int, b: int) -> int:
        return a + b

    def grown(self, a: int, b: int, new: int = 0) -> int:
        return a + b + new


def ours(self: Owner, a: int, b: int, c: int = 0) -> int:
    return -a


def test_a_function_is_replaced_if_ours_takes_all_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Owner, "known", Owner.known)
    stock = Owner.known
    _plugin._replace(Owner, "engine.Owner", "known", ours)
    assert Owner().known(1, 2) == -1
    assert _plugin._stock(Owner, "known") is stock
    assert _report.replacements["engine.Owner.known"] == plugin.Replacement("engine.Owner.known", True)


def test_a_function_with_more_arguments_is_not_replaced() -> None:
    _plugin._replace(Owner, "engine.Owner", "grown", ours)
    assert Owner().grown(1, 2, 3) == 6
    assert _report.replacements["engine.Owner.grown"].reason == "it takes new"


def test_a_feature_that_is_missing_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level("INFO"):
        for _ in range(3):
            _report.hand_over("thinking budgets")
    assert _report.handed_over == {"thinking budgets": 3}
    assert [record.getMessage() for record in caplog.records] == [
        "specdec_ops has no thinking budgets: vLLM's own code serves these calls"
    ]


def test_the_adapters_import_nothing_of_vllm() -> None:
    code = "import sys; sys.modules['vllm'] = None; "
    code += "from specdec_ops.integrations.vllm import drafting_kernels, sampling_kernels; "
    code += "from specdec_ops.integrations.vllm import runner, runner_sampling"
    subprocess.run([sys.executable, "-c", code], check=True)

"""Which backend serves an op: native kernels, Triton where it has a driver, or the reference."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import specdec_ops
import torch
from specdec_ops import _library
from specdec_ops import triton as specdec_triton

ROOT = Path(__file__).parents[1]
IDS = torch.tensor([[5, 6, 7], [5, -1, -1]])
CPU, XPU = torch.device("cpu"), torch.device("xpu:0")


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which has not imported Triton."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT / "tests",
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


class FakeDriver:
    """What Triton's registry holds of a driver for a device."""

    device = CPU

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_active_torch_device(self) -> torch.device:
        return self.device


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Triton's registry of backends, empty, and no interpreter."""
    import triton

    specdec_triton.load("count_accepted")  # by way of the interpreter, where tests use it
    monkeypatch.setattr(triton.runtime.driver, "_active", None)
    monkeypatch.setattr(triton.runtime.driver, "_default", None)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    _library._without_native_kernel.cache_clear()
    with mock.patch.dict(triton.backends.backends, clear=True):
        yield triton.backends.backends
    _library._without_native_kernel.cache_clear()


def entry(driver: type) -> Any:
    from triton.backends import Backend

    return Backend(compiler=None, driver=driver)


def served_by(device: torch.device) -> Any:
    """What serves count_accepted on tensors of a device without native kernels."""
    return _library._without_native_kernel("count_accepted", _reference, device)


def _reference(*_: Any, **__: Any) -> None:
    raise AssertionError("the reference was called")


class TestWithoutNativeKernels:
    def test_triton_serves_the_device_of_its_driver(
        self, registry: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        registry["cpu"] = entry(FakeDriver)
        with caplog.at_level(logging.INFO):
            first, second = served_by(CPU), served_by(CPU)
        assert first.__module__ == "specdec_ops.triton.count_accepted"
        assert second is first
        assert caplog.text.count("count_accepted: no native kernel for cpu tensors, using Triton") == 1

    def test_what_triton_has_no_kernel_for_is_served_without_it(
        self, registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def in_triton(*, top_k: object = None) -> str:
            if top_k is not None:
                raise specdec_triton.MissingKernelError("sample: there is no Triton kernel for top_k")
            return "Triton"

        registry["cpu"] = entry(FakeDriver)
        monkeypatch.setattr(specdec_triton, "load", lambda name: in_triton)
        sample = _library._without_native_kernel("sample", lambda **_: "reference", CPU)
        assert [sample(), sample(top_k=1), sample(top_k=2), sample()] == [
            "Triton",
            *2 * ["reference"],
            "Triton",
        ]
        warning = "sample: there is no Triton kernel for top_k: using the slow reference"
        assert caplog.text.count(warning) == 1

    def test_a_driver_of_another_device_serves_nothing(self, registry: dict[str, Any]) -> None:
        registry["cpu"] = entry(FakeDriver)
        assert served_by(XPU).func is _library._by_way_of_the_cpu

    def test_a_triton_without_an_active_driver_serves_nothing(
        self, registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Idle(FakeDriver):
            @classmethod
            def is_active(cls) -> bool:
                return False

        registry["cpu"] = entry(Idle)
        assert served_by(CPU) is _reference
        assert specdec_triton.why_not("count_accepted", "cpu") == (
            "Triton has no active driver (installed: cpu)"
        )

    def test_a_driver_that_names_its_target_alone(self, registry: dict[str, Any]) -> None:
        class Old:
            @staticmethod
            def is_active() -> bool:
                return True

            def get_current_target(self) -> Any:
                from triton.backends.compiler import GPUTarget

                return GPUTarget("cpu", "x86_64", 0)

        registry["cpu"] = entry(Old)
        assert specdec_triton.active_device_type() == "cpu"

    def test_without_triton_the_reference_serves(
        self, registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        registry["cpu"] = entry(FakeDriver)
        monkeypatch.setitem(sys.modules, "triton", None)
        assert served_by(CPU) is _reference

    def test_an_op_without_a_triton_kernel(self, registry: dict[str, Any]) -> None:
        registry["cpu"] = entry(FakeDriver)
        assert specdec_triton.why_not("no_such_op_", "cpu") == "the op has no Triton kernel"

    def test_the_interpreter_serves_only_where_it_is_asked_for(
        self, registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import triton

        monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
        assert specdec_triton.why_not("count_accepted", "cpu") is None
        assert served_by(CPU) is _reference

    def test_two_drivers_at_once_are_reported(self, registry: dict[str, Any]) -> None:
        registry["cpu"] = registry["other"] = entry(FakeDriver)
        with pytest.raises(RuntimeError, match="2 active drivers"):
            served_by(CPU)


class TestBrokenTriton:
    def test_it_is_reported_where_it_is_needed_and_nowhere_else(self, tmp_path: Path) -> None:
        (tmp_path / "triton").mkdir()
        broken = "raise ImportError('libtriton.so: cannot open shared object file')"
        (tmp_path / "triton" / "__init__.py").write_text(broken)
        code = """
            import sys, torch, specdec_ops
            assert "triton" not in sys.modules
            ids = torch.tensor([[5, 6, 7], [5, -1, -1]])
            print(specdec_ops.count_accepted(ids).num_accepted.tolist())
            print(specdec_ops.show_config().splitlines()[-1])
            with specdec_ops.backend("triton"):
                specdec_ops.count_accepted(ids)
        """
        result = run(code, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
        message = "Triton is installed, but cannot be imported: libtriton.so: cannot open shared object file"
        assert result.stdout.splitlines() == [
            "[2, 0]",
            f"  Triton       cannot be used: ImportError: {message}",
        ]
        assert result.stderr.strip().splitlines()[-1] == f"ImportError: {message}"


class TestEnvironment:
    def test_triton(self) -> None:
        code = """
            import sys, torch, specdec_ops
            from specdec_ops import triton
            loaded = []
            load = triton.load
            triton.load = lambda op: loaded.append(op) or load(op)
            count = torch.compile(
                lambda ids: specdec_ops.count_accepted(ids).num_accepted, backend="aot_eager", fullgraph=True
            )
            print(count(torch.tensor([[5, 6, 7], [5, -1, -1]])).tolist(), loaded)
            print("specdec_ops._C" in sys.modules)
            print(specdec_ops.show_config().splitlines()[1])
        """
        result = run(code, SPECDEC_OPS_BACKEND="triton", TRITON_INTERPRET="1")
        assert result.stdout.splitlines() == [
            "[2, 0] ['count_accepted']",
            "False",
            "  all tensors  triton (SPECDEC_OPS_BACKEND)",
        ], result.stderr

    def test_reference(self) -> None:
        code = """
            import sys, torch, specdec_ops
            ids = torch.tensor([[5, 6, 7], [5, -1, -1]])
            print(specdec_ops.count_accepted(ids).num_accepted.tolist())
            print("specdec_ops._C" in sys.modules)
            with specdec_ops.backend("native"):
                specdec_ops.count_accepted(ids)
        """
        result = run(code, SPECDEC_OPS_BACKEND="reference")
        assert result.stdout.splitlines() == ["[2, 0]", "False"], result.stderr
        assert result.stderr.strip().splitlines()[-1] == (
            "RuntimeError: count_accepted: the backend 'native' is forced, but cannot take cpu tensors: "
            "with SPECDEC_OPS_BACKEND=reference no native kernels are loaded"
        )

    @pytest.mark.parametrize("name", ["cuda", "Triton", "native,triton"])
    def test_an_unknown_name(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setenv("SPECDEC_OPS_BACKEND", name)
        with pytest.raises(RuntimeError) as caught:
            _library.forced_by_environment.__wrapped__()
        assert str(caught.value) == (f"SPECDEC_OPS_BACKEND must be native, triton or reference, got '{name}'")

    def test_triton_without_a_driver_says_so(self, registry: dict[str, Any]) -> None:
        with pytest.raises(RuntimeError) as caught:
            _library.forced_implementation("count_accepted", CPU, "triton")
        assert str(caught.value) == (
            "count_accepted: the backend 'triton' is forced, but cannot take cpu tensors: "
            "Triton has no active driver (installed: none)"
        )

    def test_triton_with_a_driver_of_another_device_says_so(self, registry: dict[str, Any]) -> None:
        registry["cpu"] = entry(FakeDriver)
        with pytest.raises(RuntimeError, match=r"xpu tensors: Triton's active driver is for cpu tensors$"):
            _library.forced_implementation("count_accepted", XPU, "triton")


class TestContext:
    @pytest.fixture
    def served(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The backends that have served calls, in order."""
        calls: list[str] = []

        def spy(name: str, call: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                calls.append(name)
                return call(*args, **kwargs)

            return wrapped

        load, native = specdec_triton.load, _library._native
        reference = _library.REFERENCES["count_accepted"]
        monkeypatch.setattr(specdec_triton, "load", lambda op: spy("triton", load(op)))
        monkeypatch.setattr(_library, "_native", lambda op: spy("native", native(op)))
        monkeypatch.setitem(_library.REFERENCES, "count_accepted", spy("reference", reference))
        return calls

    @pytest.mark.parametrize("name", _library.BACKENDS)
    def test_forces_the_backend(self, served: list[str], name: str) -> None:
        if name == "triton" and not specdec_triton.is_interpreted():
            pytest.skip("there is a GPU, whose Triton takes no tensors of the CPU")
        with specdec_ops.backend(name):
            assert specdec_ops.count_accepted(IDS).num_accepted.tolist() == [2, 0]
        assert served == [name]
        specdec_ops.count_accepted(IDS)
        assert served == [name]

    def test_the_innermost_counts(self, served: list[str]) -> None:
        with specdec_ops.backend("reference"):
            with specdec_ops.backend("native"):
                specdec_ops.count_accepted(IDS)
            specdec_ops.count_accepted(IDS)
        assert served == ["native", "reference"]

    def test_it_can_be_used_again(self, served: list[str]) -> None:
        context = specdec_ops.backend("reference")
        for _ in range(2):
            with context:
                specdec_ops.count_accepted(IDS)
        assert served == ["reference"] * 2

    def test_other_ops_are_left_alone(self) -> None:
        with specdec_ops.backend("triton"):
            assert (IDS + 1).tolist() == [[6, 7, 8], [6, 0, 0]]

    def test_ops_that_write_to_their_arguments(self, served: list[str]) -> None:
        expanded = torch.zeros(3, dtype=torch.int64)
        with specdec_ops.backend("reference"):
            specdec_ops.expand_to_drafts_(torch.tensor([5, 6]), torch.tensor([0, 1, 3]), expanded=expanded)
        assert expanded.tolist() == [5, 6, 6]

    def test_tracing_goes_on(self, served: list[str]) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        fake = FakeTensorMode()
        with fake, specdec_ops.backend("reference"):
            counts = specdec_ops.count_accepted(fake.from_tensor(IDS))
        with specdec_ops.backend("reference"):
            specdec_ops.count_accepted(IDS.to("meta"))
        assert counts.num_accepted.shape == (2,)
        assert served == []

    def test_what_torch_would_compile_runs_as_it_is(self, served: list[str]) -> None:
        count = torch.compile(lambda ids: specdec_ops.count_accepted(ids).num_accepted, backend="aot_eager")
        with specdec_ops.backend("reference"):
            assert count(IDS).tolist() == [2, 0]
        assert served == ["reference"]

    def test_a_device_without_native_kernels_says_so(self) -> None:
        with pytest.raises(RuntimeError) as caught:
            _library.forced_implementation("count_accepted", XPU, "native")
        assert str(caught.value) == (
            "count_accepted: the backend 'native' is forced, but cannot take xpu tensors: "
            "there is no native kernel"
        )

    def test_triton_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "triton", None)
        with (
            specdec_ops.backend("triton"),
            pytest.raises(
                RuntimeError, match=r"^count_accepted: .*cannot take cpu tensors: Triton is not installed$"
            ),
        ):
            specdec_ops.count_accepted(IDS)

    def test_a_bad_name(self) -> None:
        with pytest.raises(
            RuntimeError, match=r"backend: name must be 'native', 'triton' or 'reference', got 'cpu'"
        ):
            specdec_ops.backend("cpu")


LAUNCH = """
    import torch, triton
    from triton.backends import Backend
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    launches = []

    class Launcher:
        def __init__(self, source, metadata):
            self.names = list(source.signature)

        def __call__(self, grid_x, grid_y, grid_z, stream, function, *rest):
            launches.append((grid_x, stream))

    class Utils:
        def load_binary(self, *_):
            return None, None, 0, 0, 1024

        def get_device_properties(self, _):
            return {"max_shared_mem": 1 << 17}

    class Driver:
        utils, launcher_cls = Utils(), Launcher
        is_active = staticmethod(lambda: True)
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 77)
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

    triton.backends.backends.clear()
    triton.backends.backends["cpu"] = Backend(CUDABackend, Driver)

    import specdec_ops
    from specdec_ops.triton.count_accepted import _count

    for dtype in (torch.int64, torch.int32):
        for batch in (0, 1, 15, 16, 17, 256):
            for vocab_size in (None, 1, 2**40):
                specdec_ops.count_accepted(torch.zeros(batch, 4, dtype=dtype)[:, 1:], vocab_size=vocab_size)
    num_compiled = sum(len(caches[0]) for caches in _count.device_caches.values())
    print(sorted(set(launches)), len(launches), num_compiled)
"""


def test_a_driver_for_the_cpu_launches_kernels_that_are_compiled_once() -> None:
    """As far as machine code: the driver is a stand-in that has a CPU's tensors and compiles for a GPU."""
    result = run(LAUNCH, SPECDEC_OPS_BACKEND="triton")
    assert result.stdout == "[(1, 77), (2, 77)] 30 1\n", result.stderr

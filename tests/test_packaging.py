"""What is built, installed and said about it."""

from __future__ import annotations

import doctest
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import specdec_ops
import specdec_ops._C as native
import torch

ROOT = Path(__file__).parents[1]
# A name in sys.modules that is None cannot be imported.
WITHOUT_TORCH = (
    "import sys, runpy; sys.modules['torch'] = None; runpy.run_path('setup.py', run_name='__main__')"
)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_version_is_written_once() -> None:
    assert importlib.metadata.version("specdec_ops") == specdec_ops.__version__
    for name in ("setup.py", "pyproject.toml", "CMakeLists.txt", "Makefile"):
        assert f'"{specdec_ops.__version__}"' not in (ROOT / name).read_text()


def test_requirements() -> None:
    requirements = importlib.metadata.requires("specdec_ops") or []
    assert {r for r in requirements if "extra" not in r} == {"torch>=2.10", "numpy"}
    assert importlib.metadata.metadata("specdec_ops")["Requires-Python"] == ">=3.10"


def test_installed_files() -> None:
    folder = Path(specdec_ops.__file__).parent
    assert (folder / "py.typed").exists()
    assert native.__file__.endswith("_C.abi3.so")
    assert not list(folder.rglob("*.cpp"))


def test_native_module_needs_no_cuda() -> None:
    content = Path(native.__file__).read_bytes()
    for library in (b"libcudart", b"libtorch_cuda", b"libc10_cuda"):
        assert library not in content


def test_native_module_holds_no_build_path() -> None:
    content = Path(native.__file__).read_bytes()
    assert b"site-packages" not in content
    assert os.fsencode(ROOT) not in content


def test_device_names_only_in_their_backend() -> None:
    """The dispatcher picks the backend by device: nothing else asks for one by name."""
    folders = (ROOT / "python", ROOT / "csrc/common", ROOT / "csrc/cpu")
    files = [f for folder in folders for f in folder.rglob("*") if f.suffix in (".py", ".h", ".cpp")]
    named = [str(f) for f in files if re.search(r"""["'](cuda|xpu|mps)["':]""", f.read_text())]
    assert named == []


def test_config_names_what_is_here() -> None:
    text = specdec_ops.show_config()
    assert text.startswith(f"specdec_ops {specdec_ops.__version__}\n")
    for fact in ("native", native.cpu_isa(), *native.available_cpu_isas(), torch.__version__):
        assert fact in text
    assert re.search(rf"threads +{torch.get_num_threads()}\n", text)


def test_run_as_module_with_a_capped_tier() -> None:
    result = run("-m", "specdec_ops", SPECDEC_OPS_CPU_ISA="scalar")
    assert result.returncode == 0, result.stderr
    assert re.search(r"CPU tier +scalar \(available: scalar", result.stdout)
    assert result.stderr == ""


@pytest.mark.parametrize("name", specdec_ops.__all__)
def test_docstring_example(name: str) -> None:
    public = getattr(specdec_ops, name)
    tests = doctest.DocTestFinder(recurse=False).find(public, name)
    results = [doctest.DocTestRunner().run(test) for test in tests]
    assert not any(result.failed for result in results)
    if not name.endswith("Output"):
        assert sum(result.attempted for result in results) > 0, "every public function has an example"


def test_missing_compiler_is_named(tmp_path: Path) -> None:
    result = run(
        "setup.py", "build_ext", f"--build-lib={tmp_path}", f"--build-temp={tmp_path}", CXX="no-such-compiler"
    )
    assert result.returncode != 0
    assert "needs a C++17 compiler, and 'no-such-compiler' was not found. Install one" in result.stderr
    assert "Traceback" not in result.stderr


def test_missing_torch_is_named(tmp_path: Path) -> None:
    result = run("-c", WITHOUT_TORCH, "build_ext", f"--build-lib={tmp_path}", f"--build-temp={tmp_path}")
    assert result.returncode != 0
    assert "needs torch >= 2.10 in the environment that builds, and it is not there" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture
def toolkit(tmp_path: Path) -> dict[str, str]:
    """The environment of a build with a CUDA toolkit that knows four architectures, and no GPU."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include/cuda_runtime_api.h").touch()
    programs = {"nvcc": "printf 'compute_%s\\n' 75 80 121 90", "nvidia-smi": 'printf "$GPUS"'}
    for name, line in programs.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return {"CUDA_HOME": str(tmp_path), "PATH": path, "GPUS": "", "SPECDEC_OPS_CUDA": ""}


def describe_build(**environment: str) -> subprocess.CompletedProcess[str]:
    return run("-c", "import runpy; print(runpy.run_path('setup.py')['describe']())", **environment)


def test_gpus_that_are_built_for(toolkit: dict[str, str]) -> None:
    built = {
        ("", ""): "sm_75, sm_80, sm_90",
        ("all", "8.0\\n"): "sm_75, sm_80, sm_90",
        ("9.0; 8.0", ""): "sm_80, sm_90",
        ("90,80", ""): "sm_80, sm_90",
        ("native", "9.0\\n8.0\\n9.0\\n"): "sm_80, sm_90",
        ("native", ""): "sm_90",
        ("native", "13.0\\n"): "sm_121",
    }
    describe_each = (
        "import os, runpy; setup = runpy.run_path('setup.py')\n"
        f"for asked, gpus in {list(built)}:\n"
        "    os.environ.update(SPECDEC_OPS_CUDA_ARCHS=asked, GPUS=gpus)\n"
        "    print(setup['describe']())\n"
    )
    result = run("-c", describe_each, **toolkit)
    assert result.returncode == 0, result.stderr
    lines = dict(zip(built, result.stdout.splitlines(), strict=True))
    assert {case: line.split(" (")[0] for case, line in lines.items()} == {
        case: f"Building for CPUs and CUDA: {archs}" for case, archs in built.items()
    }


def test_a_gpu_that_the_toolkit_does_not_know_is_named(toolkit: dict[str, str]) -> None:
    result = describe_build(**toolkit | {"SPECDEC_OPS_CUDA_ARCHS": "70"})
    assert result.returncode != 0
    assert "SPECDEC_OPS_CUDA_ARCHS has 70; this toolkit knows 75, 80, 121, 90." in result.stderr


def test_missing_ninja_is_named(toolkit: dict[str, str], tmp_path: Path) -> None:
    build = (
        "import os, pathlib, runpy; setup = runpy.run_path('setup.py')\n"
        f"os.environ['PATH'] = ''; setup['compile_cuda'](pathlib.Path({str(tmp_path)!r}))"
    )
    result = run("-c", build, **toolkit)
    assert result.returncode != 0
    assert "CUDA kernels need ninja. 'pip install ninja'" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_build_without_cuda_says_why(toolkit: dict[str, str]) -> None:
    result = describe_build(**toolkit | {"SPECDEC_OPS_CUDA": "0"})
    assert result.stdout == "Building for CPUs alone: SPECDEC_OPS_CUDA is 0\n"


def test_sdist_needs_neither_git_nor_torch(tmp_path: Path) -> None:
    options = ("egg_info", f"--egg-base={tmp_path}", "sdist", f"--dist-dir={tmp_path}")
    result = run("-c", WITHOUT_TORCH, *options, PATH="/nonexistent")
    assert result.returncode == 0, result.stderr
    (archive,) = tmp_path.glob("specdec_ops-*.tar.gz")
    assert archive.name == f"specdec_ops-{specdec_ops.__version__}.tar.gz"
    with tarfile.open(archive) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    expected = {p for folder in ("csrc", "python") for p in (ROOT / folder).rglob("*") if p.is_file()}
    skipped = ("__pycache__", ".egg-info", ".so")
    relative = {str(p.relative_to(ROOT)) for p in expected if not any(s in str(p) for s in skipped)}
    assert relative | {"setup.py", "pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md"} <= names
    assert not any(name.endswith((".so", ".pyc")) for name in names)


def test_static_library_is_found_by_cmake(tmp_path: Path) -> None:
    """A C++ program finds, links and runs the kernels that `make native` built."""
    cmake = Path(sys.executable).with_name("cmake")
    if not cmake.exists() or not (ROOT / "build/native/libspecdec_ops_kernels.a").exists():
        pytest.skip("needs `make native`")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\n"
        "project(engine LANGUAGES CXX)\n"
        f"find_package(specdec_ops {specdec_ops.__version__} REQUIRED)\n"
        "add_executable(engine engine.cpp)\n"
        "target_link_libraries(engine PRIVATE specdec_ops::kernels)\n"
    )
    (tmp_path / "engine.cpp").write_text(
        '#include <cstdio>\n#include "cpu/kernels/chain.h"\n#include "cpu/kernels/isa.h"\n'
        "int main() { std::puts(specdec_ops::cpu::name_of(specdec_ops::cpu::current_isa())); }\n"
    )
    prefix, build = tmp_path / "prefix", tmp_path / "build"
    ninja = Path(sys.executable).with_name("ninja")
    for arguments in (
        ["--install", ROOT / "build/native", "--prefix", prefix],
        [
            "-S",
            tmp_path,
            "-B",
            build,
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DCMAKE_PREFIX_PATH={prefix}",
        ],
        ["--build", build],
    ):
        subprocess.run([cmake, *arguments], check=True, capture_output=True)
    result = subprocess.run([build / "engine"], check=True, capture_output=True, text=True)
    assert result.stdout.strip() in native.available_cpu_isas()

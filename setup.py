"""Builds the native module; pyproject.toml holds everything else."""

import os
import platform
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
except ImportError:
    torch = None

ROOT = Path(__file__).resolve().parent
#: The oldest torch that the wheel runs with (2.10); any newer one may build it.
TORCH_TARGET_VERSION = "0x020a000000000000"


class MissingTool(build_ext):
    """Ends a build that cannot succeed with the reason and the way out."""

    def run(self):
        sys.exit(f"\nspecdec_ops: {problem}\n")


def find_problem():
    if torch is None or torch.__version__ < (2, 10):
        found = "it is not there" if torch is None else f"it has {torch.__version__}"
        return (
            f"building needs torch >= 2.10 in the environment that builds, and {found}. "
            "Install it ('pip install torch setuptools ninja'), then run pip with --no-build-isolation."
        )
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        return (
            f"building needs a C++17 compiler, and '{compiler}' was not found. Install one "
            "('apt-get install g++', 'dnf install gcc-c++') or set CXX to the compiler's path."
        )
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return (
            "building needs Python's headers, and Python.h was not found. Install them "
            "('apt-get install python3-dev', 'dnf install python3-devel')."
        )
    return None


def native_module():
    sources = [p for d in (".", "cpu", "cpu/kernels") for p in (ROOT / "csrc" / d).glob("*.cpp")]
    flags = ["-O3", "-g0", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += ["-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-psabi"]  # GCC 12's own AVX-512 headers
    if platform.machine() in ("x86_64", "AMD64"):
        flags += ["-march=x86-64"]  # tiers above the baseline are picked at run time
    # The headers of torch are not ours to warn about, and no build path belongs in the binary.
    flags += [f"-isystem{path}" for path in include_paths()]
    flags += [f"-ffile-prefix-map={path}/=" for path in (ROOT, *include_paths())]
    extension = CppExtension(
        "specdec_ops._C",
        sorted(str(source.relative_to(ROOT)) for source in sources),
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)],
        extra_compile_args={"cxx": flags},
        extra_link_args=[f"-Wl,--version-script={ROOT / 'csrc/exports.map'}"],
        py_limited_api=not sysconfig.get_config_var("Py_GIL_DISABLED"),
    )
    extension.include_dirs = [str(ROOT / "csrc")]
    return extension


problem = find_problem()
setup(
    ext_modules=[Extension("specdec_ops._C", []) if problem else native_module()],
    cmdclass={"build_ext": MissingTool if problem else BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)

"""Builds the native module; pyproject.toml holds everything else."""

import os
import platform
import re
import shlex
import shutil
import subprocess
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

# ninja may be beside this Python without being on the PATH, which is where torch looks for it.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])

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


#: What the CUDA kernels are built for, as far as the toolkit knows it; newer devices compile its PTX.
CUDA_ARCHS = ("75", "80", "86", "89", "90", "100", "120")
#: What `native` means on a machine without a GPU.
CUDA_ARCH_WITHOUT_GPU = "90"


def find_cuda():
    """The toolkit's folder; None where the CUDA module is not to be built."""
    wanted = os.environ.get("SPECDEC_OPS_CUDA", "")
    if wanted not in ("", "0", "1"):
        sys.exit(f"SPECDEC_OPS_CUDA must be 0 or 1, got '{wanted}'")
    if wanted == "0":
        return None
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    if nvcc := shutil.which("nvcc"):
        homes.insert(2, Path(nvcc).resolve().parents[1])
    for home in map(Path, filter(None, homes)):
        if (home / "bin/nvcc").is_file() and (home / "include/cuda_runtime_api.h").is_file():
            return home
    if wanted == "1":
        sys.exit("SPECDEC_OPS_CUDA is 1, and no CUDA toolkit was found. Set CUDA_HOME to its folder.")
    return None


class Build(BuildExtension if torch else build_ext):
    """Compiles .cu files with nvcc itself: torch's own way needs a torch that was built for CUDA."""

    def build_extension(self, extension):
        if extension.name == "specdec_ops._C_cuda":
            extension.extra_objects = compile_cuda(Path(self.build_temp).resolve() / "cuda")
        super().build_extension(extension)


def compile_cuda(folder):
    """The objects of the .cu files; ninja runs the compilers side by side, and those alone that must run."""
    if shutil.which("ninja") is None:
        sys.exit("\nspecdec_ops: CUDA kernels need ninja. 'pip install ninja', or set SPECDEC_OPS_CUDA=0.\n")
    folder.mkdir(parents=True, exist_ok=True)
    sources = sorted((ROOT / "csrc/cuda").glob("*.cu"))
    archs = cuda_archs()
    jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    # One file is half of the work: its architectures side by side first, then files.
    threads = min(jobs, len(archs))
    command = [str(CUDA_HOME / "bin/nvcc"), *cuda_flags(archs), f"--threads={threads}"]
    lines = [
        "rule nvcc",
        f"  command = {shlex.join(command).replace('$', '$$')} -MD -MT $out -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
    ]
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    for source, target in zip(map(str, sources), objects, strict=True):
        lines.append(f"build {ninja_path(target)}: nvcc {ninja_path(source)}")
    (folder / "build.ninja").write_text("\n".join([*lines, ""]))
    subprocess.run(["ninja", "-C", str(folder), "-j", str(jobs // threads)], check=True)
    return objects


def ninja_path(path):
    return re.sub(r"([$ :])", r"$\1", path)


def cuda_archs():
    """What to compile for, in rising order: of the toolkit's own architectures, those that were asked for."""
    nvcc = [str(CUDA_HOME / "bin/nvcc"), "--list-gpu-arch"]
    listed = subprocess.run(nvcc, check=True, capture_output=True, text=True).stdout
    known = re.findall(r"compute_(\d+)", listed)
    asked = os.environ.get("SPECDEC_OPS_CUDA_ARCHS", "").strip() or "all"
    if asked == "all":
        return [arch for arch in CUDA_ARCHS if arch in known]
    if asked == "native":
        here = archs_of_gpus_here()
        # A GPU newer than the toolkit compiles PTX.
        return [arch for arch in here if arch in known] or [
            max(known, key=int) if here else CUDA_ARCH_WITHOUT_GPU
        ]
    archs = re.split(r"[\s,;]+", asked.replace(".", ""))
    if unknown := [arch for arch in archs if arch not in known]:
        sys.exit(
            f"SPECDEC_OPS_CUDA_ARCHS has {', '.join(unknown)}; this toolkit knows {', '.join(known)}. "
            "It may also be 'all' or 'native'."
        )
    return sorted(set(archs), key=int)


def archs_of_gpus_here():
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True).stdout
    except OSError:
        return []
    return sorted(
        {major + minor for major, minor in re.findall(r"^(\d+)\.(\d)$", answer, re.MULTILINE)}, key=int
    )


def describe():
    """One line on what a build makes, for whoever waits for it."""
    if problem:
        return problem
    if CUDA_HOME is None:
        why = (
            "SPECDEC_OPS_CUDA is 0"
            if os.environ.get("SPECDEC_OPS_CUDA") == "0"
            else "no CUDA toolkit was found"
        )
        return f"Building for CPUs alone: {why}"
    archs = ", ".join(f"sm_{arch}" for arch in cuda_archs())
    return (
        f"Building for CPUs and CUDA: {archs} "
        "(SPECDEC_OPS_CUDA_ARCHS=80,90 picks others, all takes every one; SPECDEC_OPS_CUDA=0 leaves CUDA out)"
    )


def cuda_flags(archs):
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    flags.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    # The decisions are the CPU's: every fma is written out, and denormals are dropped where the code says so.
    flags += ["-std=c++17", "-O3", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true"]
    host = ["-fPIC", "-fvisibility=hidden", "-Wall", f"-ffile-prefix-map={ROOT}/="]
    host += [f"-ffile-prefix-map={path}/=" for path in include_paths()]
    flags += [f"-Xcompiler={flag}" for flag in host]
    flags += [f"-isystem={path}" for path in include_paths()]
    flags += [f"-I{ROOT / 'csrc'}", f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
    return flags


def cuda_module():
    extension = native_module()
    extension.name = "specdec_ops._C_cuda"
    extension.sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc/cuda").glob("*.cpp"))
    extension.extra_compile_args["cxx"].append(f"-isystem{CUDA_HOME / 'include'}")
    libraries = CUDA_HOME / "lib64"
    # The runtime travels in the module, so that any torch's, and none, will do.
    extension.extra_link_args += [f"-L{libraries}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    return extension


problem = find_problem()
CUDA_HOME = None if problem else find_cuda()

if __name__ == "__main__":
    modules = [Extension("specdec_ops._C", [])] if problem else [native_module()]
    if CUDA_HOME is not None:
        modules.append(cuda_module())
    setup(
        ext_modules=modules,
        cmdclass={"build_ext": MissingTool if problem else Build},
        options={"bdist_wheel": {"py_limited_api": "cp310"}},
    )

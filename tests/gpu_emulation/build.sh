#!/usr/bin/env bash
# Compiles the chain program of GPUs for an emulated one, into a library of ops.
#
#   tests/gpu_emulation/build.sh LIBRARY
#
# Environment: PYTHON, which has torch; CXX.
set -euo pipefail
library=$(realpath "$1")
cd "$(dirname "$0")/../.."
read -ra torch < <("${PYTHON:-python3}" - <<'PYTHON'
from torch.utils import cpp_extension as torch

print(*(f"-isystem{path}" for path in torch.include_paths()), *(f"-L{path}" for path in torch.library_paths()))
PYTHON
)
flags=(-std=c++17 -O2 -fPIC -shared -fvisibility=hidden -Wall -Wextra -Wno-unknown-pragmas -Wno-psabi)
# As nvcc compiles them; kernels look at the same memory as one type and another, and fibers switch by longjmp.
flags+=(-ffp-contract=off -fno-strict-aliasing -U_FORTIFY_SOURCE)
"${CXX:-g++}" "${flags[@]}" -Itests/gpu_emulation -Icsrc "${torch[@]}" tests/gpu_emulation/*.cpp \
  -ltorch_cpu -ltorch -lc10 -o "$library"

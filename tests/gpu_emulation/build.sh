#!/usr/bin/env bash
# Compiles kernels of GPUs for an emulated one, into a library of ops.
#
#   tests/gpu_emulation/build.sh LIBRARY
#
# Environment: PYTHON, which has torch; CXX.
set -euo pipefail
library=$(realpath "$1")
cd "$(dirname "$0")/../.."
mapfile -t torch < <("${PYTHON:-python3}" - <<'PYTHON'
from torch.utils import cpp_extension

print(*(f"-isystem{path}" for path in cpp_extension.include_paths()))
print(*(f"-L{path}" for path in cpp_extension.library_paths()))
PYTHON
)
flags=(-std=c++17 -O2 -fPIC -shared -fvisibility=hidden -Wall -Wextra -Wno-unknown-pragmas -Wno-psabi)
# Kernels look at memory as one type and then another, and fibers switch by longjmp.
flags+=(-ffp-contract=off -fno-strict-aliasing -U_FORTIFY_SOURCE)
# shellcheck disable=SC2068
"${CXX:-g++}" "${flags[@]}" -Itests/gpu_emulation -Icsrc ${torch[@]} tests/gpu_emulation/*.cpp \
  -ltorch_cpu -ltorch -lc10 -o "$library"

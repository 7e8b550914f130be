#!/usr/bin/env bash
# Tries a wheel that was built elsewhere on this machine, whose processor, Python or torch may differ: the
# kernels' native program in every tier, the tests, and the benchmark on two cores.
#
#   tools/test_elsewhere.sh WHEEL [WHEELHOUSE]
#
# Needs python3 with torch, and g++. WHEELHOUSE holds wheels of pytest, hypothesis, pytest-benchmark and
# pybind11 with what they need, all of which are installed, for machines that reach no package index. Left
# out are the tests that need pip, the demo's packages or a clone.
set -euo pipefail
cd "$(dirname "$0")/.."
site=$(mktemp -d)
build=$(mktemp -d)
trap 'rm -rf "$site" "$build"' EXIT
python3 -m pip install -q --no-deps --no-compile --target "$site" "$1" ${2:+--no-index "$2"/*.whl}
export PYTHONPATH="$build:$site" PYTHONDONTWRITEBYTECODE=1

grep -m1 'model name' /proc/cpuinfo
python3 -m specdec_ops

flags=(-std=c++17 -O2 -ffp-contract=off -w -Icsrc -Itests/native)
g++ "${flags[@]}" tests/native/kernels_test.cpp csrc/cpu/kernels/*.cpp -o "$build/kernels_test" -pthread
"$build/kernels_test"
includes=$(python3 -c 'import pybind11, sysconfig; print("-I" + pybind11.get_include(), "-I" + sysconfig.get_paths()["include"])')
# shellcheck disable=SC2086
g++ "${flags[@]}" $includes -fPIC -shared -fvisibility=hidden tests/native/module.cpp csrc/cpu/kernels/isa.cpp \
  -o "$build/specdec_ops_native.so"
tests/gpu_emulation/build.sh "$build/specdec_ops_emulated_gpu.so"

python3 -m pytest -q -p no:cacheprovider tests --ignore tests/test_packaging.py --ignore tests/test_examples.py \
  --ignore tests/test_readme.py -o pythonpath=
OMP_NUM_THREADS=2 taskset -c 0,1 python3 -m pytest -q -p no:cacheprovider bench --benchmark-enable --benchmark-json "$build/bench.json" \
  -k verify_chain | sed -n '/side by side/,$p'

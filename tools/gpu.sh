#!/usr/bin/env bash
# Runs what needs a GPU: with the installed package or, where there is none, with that of a tree whose
# python/specdec_ops holds both native modules.
#
#   tools/gpu.sh [STEP...]      not given: tests sanitize bench
#
#   tests      the CUDA kernels' own tests and Triton's, and on CUDA and in Triton those that all backends share
#   sanitize   memcheck and racecheck, which are steps too: every op under compute-sanitizer
#   bench      timings against what the kernels replace
#
# A step that fails keeps no other from running; the list at the end says what failed, and so does the exit code.
# Without a GPU, the tests are listed as skipped and the other steps fail. Environment: PYTHON; PYTEST_ARGS;
# BENCH_ARGS, such as "--vllm SOURCES --markdown"; JOBS, how many processes test at once where pytest-xdist is.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONUNBUFFERED=1
(cd / && "$PYTHON" -c 'import specdec_ops' 2>/dev/null) || export PYTHONPATH="python${PYTHONPATH:+:$PYTHONPATH}"

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q GPU; }

device() {
  "$PYTHON" - <<'PYTHON'
import sys
import specdec_ops
import torch
from specdec_ops import _library

print(f"{specdec_ops.__file__}\n{specdec_ops.show_config()}")
if not torch.cuda.is_available():
    sys.exit("there is a GPU, and this torch does not see it")
if not _library.load_backends()["cuda"].startswith("native"):
    sys.exit("there is a GPU, and the package was built without its kernels")
PYTHON
}

tests() {
  local several=()
  if "$PYTHON" -c 'import xdist' 2>/dev/null; then
    several=(-n "${JOBS:-8}")
    # Processes that each use every core for the CPU's results spend their time waiting for one another.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
  fi
  # By name: the files of CUDA's and Triton's own tests, and the parameter of shared ones. Without a GPU
  # Triton's would be interpreted; those of dispatch have a stand-in for one.
  local names=cuda
  if has_gpu; then names='(cuda or triton) and not dispatch'; fi
  # shellcheck disable=SC2086
  "$PYTHON" -m pytest tests/test_*.py -k "$names and not packaging and not NoVendor" -q -rs -p no:cacheprovider \
    "${several[@]}" ${PYTEST_ARGS:-}
}

sanitizer() {
  local program
  program=$(PATH="$PATH:${CUDA_HOME:-/usr/local/cuda}/bin" command -v compute-sanitizer) \
    || { echo "compute-sanitizer was not found"; return 1; }
  # Tensors that are allocations of their own: a write beyond one is not hidden by its neighbour.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$program" --tool "$1" --error-exitcode 1 "$PYTHON" tools/gpu_sanitize.py
}
memcheck() { sanitizer memcheck; }
racecheck() { sanitizer racecheck; }

bench() {
  # shellcheck disable=SC2086
  "$PYTHON" -m bench.bench_gpu ${BENCH_ARGS:-}
}

summary=() failed=0
step() {
  local start=$SECONDS outcome=ok
  echo "=== $1"
  "$1" || { outcome=FAILED failed=1; }
  summary+=("$(printf '%-10s %-7s %4d s' "$1" "$outcome" $((SECONDS - start)))")
}

steps=()
for name in "${@:-all}"; do
  case $name in
    all) steps+=(tests memcheck racecheck bench) ;;
    sanitize) steps+=(memcheck racecheck) ;;
    tests | memcheck | racecheck | bench) steps+=("$name") ;;
    *) echo "no step '$name'; there are: tests sanitize memcheck racecheck bench" >&2; exit 2 ;;
  esac
done

if has_gpu; then
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  step device
else
  echo "nvidia-smi lists no GPU"
fi
for name in "${steps[@]}"; do step "$name"; done
printf '%s\n' "=== summary" "${summary[@]}"
exit "$failed"

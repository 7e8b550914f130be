#!/usr/bin/env bash
# The plug-in for vLLM on a machine with a GPU and without vLLM, from the root of a tree in which python/specdec_ops
# holds both native modules (or with the wheel installed): what vLLM's newer runner and its older sampler call, and
# vLLM's own tests of these functions with ours in their place. SPECDEC_OPS_VLLM=all puts all of ours there; the tests
# of verification run once more with what is replaced by default, where vLLM draws the drafts.
# usage: tools/gpu_vllm.sh FOLDER...    each an unpacked source distribution of vLLM (vllm/ and tests/)
# SECONDS_EACH: what one of the pytest runs, which share the GPU, may take.
set -uo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
logs=$(mktemp -d)
export PYTHONPATH=$here/python:$here/tests_vllm:$here${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
pytest="timeout -s INT -k 10 ${SECONDS_EACH:-600} python3 -m pytest -q -p no:cacheprovider -W ignore --durations=5 -rfEs"

declare -A jobs
cd "$here"
$pytest tests/test_vllm_runner.py tests/test_vllm_runner_sampling.py tests/test_vllm_plugin.py \
  >"$logs/adapters" 2>&1 &
jobs[adapters]=$!
for sources in "$@"; do
  sources=$(cd "$sources" && pwd)
  version=$(basename "$sources")
  export VLLM_SOURCES=$sources
  python3 -c "import as_gpu_worker; print(as_gpu_worker.DESCRIPTION)" >"$logs/$version" 2>&1 &
  jobs[$version]=$!
  $pytest tests_vllm/gpu_kernels.py >"$logs/$version-kernels" 2>&1 &
  jobs[$version-kernels]=$!
  cd "$sources"
  for switch_and_file in all:v1/spec_decode/test_rejection_sampler_utils all:v1/worker/test_gpu_gumbel_sample \
    all:v1/sample/test_rejection_sampler all:v1/spec_decode/test_eagle_step_kernel \
    default:v1/spec_decode/test_rejection_sampler_utils; do
    switch=${switch_and_file%%:*} file=${switch_and_file#*:}
    name=$version-${file##*/}-$switch
    SPECDEC_OPS_VLLM=$switch PYTHONPATH=$sources:$PYTHONPATH $pytest --noconftest -p as_gpu_worker -c /dev/null \
      --rootdir="$sources" "tests/$file.py" >"$logs/$name" 2>&1 &
    jobs[$name]=$!
  done
  cd "$here"
done

failed=0
for name in $(printf '%s\n' "${!jobs[@]}" | sort); do
  wait "${jobs[$name]}" || failed=1
  echo "== $name"
  cat "$logs/$name"
done
rm -r "$logs"
exit $failed

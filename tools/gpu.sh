#!/usr/bin/env bash
# What is run on a machine with a GPU, from the root of a tree in which python/specdec_ops holds both native modules
# (or with the wheel installed): bits, the shared tests on the device, sanitizers, benchmarks.
# usage: tools/gpu.sh [folder with vLLM's sources]
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=python PYTHONUNBUFFERED=1

python3 -m specdec_ops
python3 -m pytest tests/test_cuda.py -q -p no:cacheprovider -n 8
python3 -m pytest tests/test_verify_chain.py tests/test_sample.py tests/test_sample_recovered.py \
  tests/test_count_accepted.py tests/test_random_numbers.py tests/test_properties.py -q -p no:cacheprovider -n 8 -k cuda
for tool in memcheck racecheck; do
  compute-sanitizer --tool "$tool" --error-exitcode 1 python3 tools/gpu_sanitize.py
done
python3 -m bench.bench_gpu ${1:+--vllm "$1"}

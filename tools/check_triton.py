"""Compiles the Triton kernels for GPUs that are not here, by the calls of warm-up, and counts how many.

The driver is a stand-in: its tensors are the CPU's, its launches do nothing. What the interpreter accepts and
a compiler refuses shows here, and so does a kernel that is compiled anew for another size of batch.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ["SPECDEC_OPS_BACKEND"] = "triton"
os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends import Backend
from triton.backends.compiler import GPUTarget

TARGETS = {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}
#: Requests of warm-up, and others that must compile nothing.
MAX_REQUESTS, OTHER_BATCHES = 16, (3, 15, 17)
VOCAB_SIZE, NUM_SLOTS = 5000, 3
RULES = ("token", "synthetic", "fly", "block", "exact_match", "lossy", "filters")
#: Their kernels take minutes: they are compiled where they are named.
SLOW = ("verify_chain", "sample", "sample_recovered")


class Utils:
    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        return None, None, 0, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}


class Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *_: Any) -> None:
        pass


def use_stand_in(target: GPUTarget) -> None:
    """Makes a driver active whose kernels are compiled for ``target``."""

    class Driver:
        utils, launcher_cls = Utils(), Launcher
        is_active = staticmethod(lambda: True)
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)
        get_current_target = staticmethod(lambda: target)
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

    name = {"cuda": "nvidia", "hip": "amd"}[target.backend]
    compiler = triton.backends.backends[name].compiler
    triton.backends.backends.clear()
    triton.backends.backends[name] = Backend(compiler, Driver)


def registers_and_spills(ptx: str) -> tuple[int, int]:
    """What ptxas says of a kernel for sm_90."""
    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        said = subprocess.run(
            [ptxas, "-v", "--gpu-name", "sm_90a", file.name, "-o", os.devnull],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None and spills is not None, said
    return int(registers[1]), int(spills[1])


def other_calls(warmup: Any, op: Any, rules: Sequence[str]) -> Iterator[dict[str, Any]]:
    """In batches of other sizes than warm-up's, with and without optional arguments."""
    for batch, dtype, ids in itertools.product(OTHER_BATCHES, warmup._DTYPES, (torch.int64, torch.int32)):
        sizes = (batch, NUM_SLOTS, VOCAB_SIZE)
        inputs = warmup._Inputs(
            torch.device("cpu"), sizes, dtype, ids, with_options=batch == OTHER_BATCHES[0]
        )
        yield from (warmup._OPS_ON_ROWS | warmup._OPS_ON_IDS)[op](inputs, rules)


def print_registers() -> None:
    """Of all kernels that were compiled for sm_90."""
    seen = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("specdec_ops.triton."):
            continue
        for kernel in vars(module).values():
            if not isinstance(kernel, triton.JITFunction):
                continue
            for cache in kernel.device_caches.values():
                for variant in cache[0].values():
                    if variant.hash in seen:
                        continue
                    seen.add(variant.hash)
                    registers, spills = registers_and_spills(variant.asm["ptx"])
                    print(f"{name}.{kernel.__name__}: {registers} registers, {spills} bytes spilled")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--ops", nargs="*", help=f"public functions; default: all but {SLOW}")
    parser.add_argument(
        "--rules", nargs="*", default=["token"], choices=RULES, help="of verification; default: token"
    )
    parser.add_argument("--registers", action="store_true", help="sm_90: registers and spills of each kernel")
    arguments = parser.parse_args()
    use_stand_in(TARGETS[arguments.target])

    from specdec_ops import triton as specdec_triton

    warmup = importlib.import_module("specdec_ops.warmup")
    compiled: collections.Counter[str] = collections.Counter()

    def note(*_: Any, fn: Any, compile: Any, **__: Any) -> None:
        compiled[fn.name] += 1

    triton.knobs.runtime.jit_post_compile_hook = note
    cpu, failures, start = torch.device("cpu"), 0, time.perf_counter()
    for op in (*warmup._OPS_ON_ROWS, *warmup._OPS_ON_IDS):
        name = op.__name__
        if name not in arguments.ops if arguments.ops else name in SLOW:
            continue
        of_op = op.__globals__["_op"]._schema.name.partition("::")[2]
        reason = specdec_triton.why_not(of_op, "cpu")
        if reason is not None:
            print(f"{name:<36} {reason}")
            continue
        before, began = sum(compiled.values()), time.perf_counter()
        try:
            sizes = (MAX_REQUESTS, NUM_SLOTS, VOCAB_SIZE)
            for call in warmup._calls(op, cpu, sizes, warmup._DTYPES, arguments.rules):
                op(**call)
            variants = sum(compiled.values()) - before
            for call in other_calls(warmup, op, arguments.rules):
                op(**call)
        except Exception as error:
            print(f"{name:<36} FAILED: {type(error).__name__}: {error}")
            failures += 1
            continue
        anew = sum(compiled.values()) - before - variants
        failures += anew > 0
        seconds = time.perf_counter() - began
        print(f"{name:<36} {variants:>4} kernels, {anew} compiled anew, {seconds:6.1f} s", flush=True)
    if arguments.registers and arguments.target == "sm_90":
        print_registers()
    print(f"{sum(compiled.values())} kernels for {arguments.target} in {time.perf_counter() - start:.0f} s")
    return failures != 0


if __name__ == "__main__":
    sys.exit(main())

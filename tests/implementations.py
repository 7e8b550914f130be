"""Every implementation of the ops that is present here, under one calling convention."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filtering
import numpy as np
import specdec_ops
import torch
from specdec_ops._library import REFERENCES
from torch.utils._pytree import tree_map_only

Op = Callable[..., Any]
TIERS = ("scalar", "avx2", "avx512")
#: The device whose kernels are tested beside the CPU's, where there is one.
DEVICE = "cuda"
#: The kernels of that device for the chain ops, compiled for an emulated one (tests/gpu_emulation).
EMULATED = "emulated-gpu"
EMULATED_OPS = (
    "verify_chain",
    "sample",
    "sample_recovered",
    "plan_verification",
    "row_statistics",
    "token_logprobs",
    "map_draft_tokens",
    "expand_draft_logits_",
    "apply_logit_processors_",
)


#: The ops in Triton: compiled where there is a device, else interpreted, which is slow.
TRITON = "triton" if torch.cuda.is_available() else "triton-interpreter"


@dataclass(frozen=True)
class Implementation:
    """The public functions as attributes, served by one implementation."""

    name: str

    @property
    def is_native(self) -> bool:
        return self.name != "reference"

    def __getattr__(self, function: str) -> Op:
        public = getattr(specdec_ops, function)
        if self.name == TRITON:
            in_triton = _in_triton(public)
            return _served_by_device(in_triton) if torch.cuda.is_available() else in_triton
        if self.name == DEVICE:
            return _served_by_device(public)
        if self.name == EMULATED and (op := _name_of_op(public)) in EMULATED_OPS:
            return served_by(public, emulated_op(op))
        return public if self.is_native else _served_by_reference(public)


def _name_of_op(function: Op) -> str:
    """Of the op behind a public function."""
    return str(function.__globals__["_op"]._schema.name.partition("::")[2])


def _served_by_reference(function: Op) -> Op:
    return served_by(function, REFERENCES[_name_of_op(function)])


@functools.cache
def served_by(function: Op, op: Op) -> Op:
    """A copy of a public function that calls this instead of the dispatcher."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, "_op": op},
        function.__name__,
        function.__defaults__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


@functools.cache
def _fuse_in_the_interpreter() -> None:
    """Has Triton's interpreter round an fma of float32 once, as processors do."""
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    in_two_steps = builder.create_fma

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.data.dtype != np.float32:
            return in_two_steps(self, x, y, z)
        with np.errstate(all="ignore"):
            return interpreter.TensorHandle(filtering.fma32(x.data, y.data, z.data), z.dtype.scalar)

    builder.create_fma = create_fma


@functools.cache
def _in_triton(function: Op) -> Op:
    """A public function that calls Triton, whatever native kernels there are."""
    if not torch.cuda.is_available():
        _fuse_in_the_interpreter()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with specdec_ops.backend("triton"):
            return function(*args, **kwargs)

    return call


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of the original, rows that overlap included."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0 or tensor.is_contiguous():
        return tensor.to(DEVICE)
    buffer = tensor.as_strided((size,), (1,)).to(DEVICE)
    return buffer.as_strided(tensor.shape, tensor.stride())


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _served_by_device(function: Op) -> Op:
    """A public function on tensors of the CPU that are moved to the device, and its results back.

    So are the arguments that it has written to.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return copies.setdefault(id(tensor), (tensor, _on_device(tensor)))[1]

        args, kwargs = tree_map_only(torch.Tensor, move, (args, kwargs))
        results = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), function(*args, **kwargs))
        for tensor, copy in copies.values():
            written = copy.cpu()
            if not _same(tensor, written):
                tensor.copy_(written)
        return results

    return call


@functools.cache
def emulation() -> tuple[ctypes.CDLL, torch.library.Library]:
    """The library of ``make native``, and what keeps its ops defined; if it is missing, tests must fail."""
    namespace = f"specdec_ops_{EMULATED.replace('-', '_')}"
    file = f"{namespace}.so"
    folder = next((path for path in map(Path, sys.path) if (path / file).is_file()), None)
    if folder is None:
        raise ImportError(f"{file} is in no folder of sys.path: run 'make native'")
    definitions = torch.library.Library(namespace, "DEF")
    for name in EMULATED_OPS:
        schema = str(getattr(torch.ops.specdec_ops, name).default._schema)
        definitions.define(schema.partition("::")[2])
    library = ctypes.CDLL(str(folder / file))
    library.set_emulation_seed.argtypes = [ctypes.c_uint64]
    return library, definitions


@functools.cache
def emulated_op(name: str) -> Op:
    _, definitions = emulation()
    return getattr(getattr(torch.ops, definitions.ns), name).default


REFERENCE = Implementation("reference")


def native_module() -> Any:
    """``specdec_ops._C``; a build without it must fail the tests, not skip them."""
    return importlib.import_module("specdec_ops._C")


def available_tiers() -> list[str]:
    """The instruction-set tiers of this machine; all names if the native module is missing."""
    try:
        return [tier for tier in TIERS if tier in native_module().available_cpu_isas()]
    except ImportError:
        return ["native"]


def native_cpu_names() -> list[str]:
    return [f"cpu-{tier}" for tier in available_tiers()]


def native_names() -> list[str]:
    return native_cpu_names() + [DEVICE] * torch.cuda.is_available()


def require_triton() -> None:
    """Where there are wheels of Triton, a test environment without it must fail the tests, not skip them."""
    if importlib.util.find_spec("triton") is None:
        raise ImportError("Triton is not installed: 'make test' installs it, pip the extra 'test'")


def loaded_native() -> Implementation:
    """The native kernels in the tier that was chosen when they were loaded."""
    return Implementation(f"cpu-{native_module().cpu_isa()}")


@contextlib.contextmanager
def use(name: str) -> Iterator[Implementation]:
    """Selects an implementation by its name for as long as the context lasts."""
    if name == "reference":
        yield REFERENCE
        return
    if name in (DEVICE, EMULATED, TRITON):
        yield Implementation(name)
        return
    module = native_module()
    before = module.cpu_isa()
    module.set_cpu_isa(name.removeprefix("cpu-"))
    try:
        yield Implementation(name)
    finally:
        module.set_cpu_isa(before)

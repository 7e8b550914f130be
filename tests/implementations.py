"""Every implementation of the ops that is present here, under one calling convention."""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import specdec_ops
from specdec_ops.ops import count_accepted as count_accepted_module
from specdec_ops.ops import sample as sample_module
from specdec_ops.ops import sample_recovered as sample_recovered_module
from specdec_ops.ops import verify_chain as verify_chain_module

Op = Callable[..., Any]
TIERS = ("scalar", "avx2", "avx512")


@dataclass(frozen=True)
class Implementation:
    """The four public functions, served by one implementation."""

    name: str
    verify_chain: Op
    sample: Op
    sample_recovered: Op
    count_accepted: Op

    @property
    def is_native(self) -> bool:
        return self.name != "reference"


def _served_by(function: Op, op: Op) -> Op:
    """A copy of a public function that calls ``op`` instead of the dispatcher."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__, {**function.__globals__, "_op": op}, function.__name__, function.__defaults__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


REFERENCE = Implementation(
    "reference",
    _served_by(specdec_ops.verify_chain, verify_chain_module._reference_verify_chain),
    _served_by(specdec_ops.sample, sample_module._reference_sample),
    _served_by(specdec_ops.sample_recovered, sample_recovered_module._reference_sample_recovered),
    _served_by(specdec_ops.count_accepted, count_accepted_module._reference),
)


def _native(name: str) -> Implementation:
    return Implementation(
        name,
        specdec_ops.verify_chain,
        specdec_ops.sample,
        specdec_ops.sample_recovered,
        specdec_ops.count_accepted,
    )


def native_module() -> Any:
    """``specdec_ops._C``; a build without it must fail the tests, not skip them."""
    return importlib.import_module("specdec_ops._C")


def available_tiers() -> list[str]:
    """The instruction-set tiers of this machine; all names if the native module is missing."""
    try:
        return [tier for tier in TIERS if tier in native_module().available_cpu_isas()]
    except ImportError:
        return ["native"]


def native_names() -> list[str]:
    return [f"cpu-{tier}" for tier in available_tiers()]


def loaded_native() -> Implementation:
    """The native kernels in the tier that was chosen when they were loaded."""
    return _native(f"cpu-{native_module().cpu_isa()}")


@contextlib.contextmanager
def use(name: str) -> Iterator[Implementation]:
    """Selects an implementation by its name for as long as the context lasts."""
    if name == "reference":
        yield REFERENCE
        return
    module = native_module()
    before = module.cpu_isa()
    module.set_cpu_isa(name.removeprefix("cpu-"))
    try:
        yield _native(name)
    finally:
        module.set_cpu_isa(before)

"""Every implementation of the ops that is present here, under one calling convention."""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import specdec_ops
from specdec_ops._library import REFERENCES

Op = Callable[..., Any]
TIERS = ("scalar", "avx2", "avx512")


@dataclass(frozen=True)
class Implementation:
    """The public functions as attributes, served by one implementation."""

    name: str

    @property
    def is_native(self) -> bool:
        return self.name != "reference"

    def __getattr__(self, function: str) -> Op:
        public = getattr(specdec_ops, function)
        return public if self.is_native else _served_by_reference(public)


@functools.cache
def _served_by_reference(function: Op) -> Op:
    """A copy of a public function that calls its op's reference instead of the dispatcher."""
    assert isinstance(function, types.FunctionType)
    op = function.__globals__["_op"]
    reference = REFERENCES[op._schema.name.partition("::")[2]]
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, "_op": reference},
        function.__name__,
        function.__defaults__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


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


def native_names() -> list[str]:
    return [f"cpu-{tier}" for tier in available_tiers()]


def loaded_native() -> Implementation:
    """The native kernels in the tier that was chosen when they were loaded."""
    return Implementation(f"cpu-{native_module().cpu_isa()}")


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
        yield Implementation(name)
    finally:
        module.set_cpu_isa(before)

"""The torch.library object, and the order in which backends claim an op.

An op is defined where its contract is, in ``ops/<op>.py``. PyTorch's dispatcher picks the backend
by the device of the tensors: the native kernels register themselves when ``_C`` is
imported. A device without them is served by Triton where that has a driver for it; else its tensors take
the way over the CPU. ``SPECDEC_OPS_BACKEND`` forces one backend: native kernels are registered if it is
theirs, and nothing else serves.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from specdec_ops import triton

NAMESPACE = "specdec_ops"
_CUDA_MODULE = "_C_cuda"
BACKENDS = ("native", "triton", "reference")
_VARIABLE = "SPECDEC_OPS_BACKEND"

#: The reference of each op, by name.
REFERENCES: dict[str, Callable[..., Any]] = {}

_library = torch.library.Library(NAMESPACE, "DEF")
_logger = logging.getLogger(NAMESPACE)


def define(schema: str, *, fake: Callable[..., Any] | None = None, reference: Callable[..., Any]) -> Any:
    """Defines an op and returns its callable overload.

    Args:
        schema: The op's schema, without the namespace. The name of an op that writes to its arguments
            ends in ``_``.
        fake: Shapes and dtypes of the outputs, for ``torch.compile`` and ``torch.export``. An op without
            outputs, which writes to its arguments, needs none.
        reference: The float64 implementation, which also serves where the native module was not built.
    """
    name = schema.partition("(")[0]
    REFERENCES[name] = reference
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake or _no_outputs, lib=_library)

    _library.impl(name, _fallback(name, reference), "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _no_outputs(*_: Any, **__: Any) -> None:
    """The fake of an op that writes to its arguments alone."""


def _fallback(name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel for devices without a native one."""

    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _without_native_kernel(name, reference, device_of(name, args, kwargs))(*args, **kwargs)

    return call


def device_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The one device of an op's tensors."""
    tensors = [tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, torch.Tensor)]
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise RuntimeError(
                f"{name}: every tensor must be on {device} like the first, got {tensor.device}"
            )
    return device


@functools.cache
def _without_native_kernel(
    name: str, reference: Callable[..., Any], device: torch.device
) -> Callable[..., Any]:
    """What serves the tensors of a device for which an op has no native kernel; the first call decides."""
    forced = forced_by_environment()
    if forced is not None:
        return forced_implementation(name, device, forced)
    without = f"{name}: no native kernel for {device.type} tensors"
    if device.type == "cpu" or not _has_native_cpu():
        without_triton, how = reference, "using the slow reference"
    else:
        without_triton = functools.partial(_by_way_of_the_cpu, name, device)
        how = "computing on the CPU"
    if not _triton_serves(name, device):
        _warn_once(f"{without}, {how}")
        return without_triton
    _logger.info("%s, using Triton", without)
    in_triton = triton.load(name)

    @functools.wraps(in_triton)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return in_triton(*args, **kwargs)
        except triton.MissingKernelError as error:
            _warn_once(f"{error}: {how}")
        return without_triton(*args, **kwargs)

    return call


def _triton_serves(name: str, device: torch.device) -> bool:
    # The interpreter is for tests, which ask for it.
    return triton.why_not(name, device.type) is None and triton.active_device_type() == device.type


def _by_way_of_the_cpu(name: str, device: torch.device, /, *args: Any, **kwargs: Any) -> Any:
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    host_args, host_kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), (args, kwargs))
    result = op(*host_args, **host_kwargs)
    # What the op wrote to, it wrote to a copy of.
    for i, argument in enumerate(op._schema.arguments):
        given, copy = (
            (args[i], host_args[i])
            if i < len(args)
            else (kwargs.get(argument.name), host_kwargs.get(argument.name))
        )
        if given is not None and argument.alias_info is not None and argument.alias_info.is_write:
            given.copy_(copy)
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), result)


def forced_implementation(name: str, device: torch.device, backend: str) -> Callable[..., Any]:
    """An op in a backend that was asked for by name.

    Raises:
        RuntimeError: The backend cannot run the op on that device; the message says why.
    """
    if backend == "reference":
        return REFERENCES[name]
    reason = _why_not_native(name, device) if backend == "native" else triton.why_not(name, device.type)
    if reason is not None:
        raise RuntimeError(
            f"{name}: the backend '{backend}' is forced, but cannot take {device.type} tensors: {reason}"
        )
    return _native(name) if backend == "native" else triton.load(name)


def _why_not_native(name: str, device: torch.device) -> str | None:
    key = torch._C._dispatch_key_for_device(device.type)
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::{name}", key):
        return None
    forced = forced_by_environment()
    if forced not in (None, "native"):
        return f"with {_VARIABLE}={forced} no native kernels are loaded"
    return "there is no native kernel" if _has_native_cpu() else "the native modules were not built"


def _native(name: str) -> Callable[..., Any]:
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    def call(*args: Any, **kwargs: Any) -> Any:
        # Contexts around the one that asked for native kernels may ask for others.
        with torch._C._DisableTorchDispatch():
            return op(*args, **kwargs)

    return call


@functools.cache
def forced_by_environment() -> str | None:
    """The backend that ``SPECDEC_OPS_BACKEND`` forces on this process."""
    name = os.environ.get(_VARIABLE, "")
    if name not in ("", *BACKENDS):
        raise RuntimeError(f"{_VARIABLE} must be {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}, got '{name}'")
    return name or None


def _has_native_cpu() -> bool:
    return importlib.util.find_spec(f"{NAMESPACE}._C") is not None


@functools.cache
def _warn_once(message: str) -> None:
    _logger.warning(message)


def load_backends() -> dict[str, str]:
    """Imports the native modules that are installed and usable; returns a line on each.

    A module that is there but cannot be loaded is an error, never a silent fallback.
    """
    forced = forced_by_environment()
    if forced not in (None, "native"):
        return {"all": f"{forced} ({_VARIABLE})"}
    otherwise = "served by Triton where it has a driver for them, else by way of the CPU"
    found = {}
    if not _has_native_cpu():
        found["cpu"] = (
            "not built: Triton serves CPU tensors where it has a driver for them, else the reference"
        )
        otherwise = otherwise.replace("by way of the CPU", "by the reference")
    else:
        importlib.import_module(f"{NAMESPACE}._C")
        found["cpu"] = "native"
    if torch.version.cuda is not None:
        device = _CUDA_MODULE.removeprefix("_C_")
        if importlib.util.find_spec(f"{NAMESPACE}.{_CUDA_MODULE}") is None:
            found[device] = f"not built: tensors are {otherwise}"
        else:
            module = importlib.import_module(f"{NAMESPACE}.{_CUDA_MODULE}")
            found[device] = f"native (built with CUDA {module.toolkit_version()})"
    if forced is not None:
        found["other"] = f"an error ({_VARIABLE}=native)"
    return found

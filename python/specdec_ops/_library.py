"""The torch.library object, and the order in which backends claim an op.

An op is defined where its contract is, in ``ops/<op>.py``. PyTorch's dispatcher picks the backend
by the device of the tensors: the native kernels register themselves when ``_C`` is
imported; tensors of a device without kernels take the way over the CPU.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

NAMESPACE = "specdec_ops"
_CUDA_MODULE = "_C_cuda"

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
    """The kernel for devices without one: by way of the CPU's, or of the reference where that is missing."""

    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, torch.Tensor)]
        device = tensors[0].device
        for tensor in tensors:
            if tensor.device != device:
                raise RuntimeError(
                    f"{name}: every tensor must be on {device} like the first, got {tensor.device}"
                )
        if device.type == "cpu" or not _has_native_cpu():
            _warn_once(f"{name}: no native kernel for {device.type} tensors, using the slow reference")
            return reference(*args, **kwargs)
        _warn_once(f"{name}: no native kernel for {device.type} tensors, computing on the CPU")
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

    return call


def _has_native_cpu() -> bool:
    return importlib.util.find_spec(f"{NAMESPACE}._C") is not None


@functools.cache
def _warn_once(message: str) -> None:
    _logger.warning(message)


def load_backends() -> dict[str, str]:
    """Imports the native modules that are installed and usable; returns a line on each.

    A module that is there but cannot be loaded is an error, never a silent fallback.
    """
    found = {}
    if not _has_native_cpu():
        found["cpu"] = "not built: the float64 reference serves CPU tensors"
    else:
        importlib.import_module(f"{NAMESPACE}._C")
        found["cpu"] = "native"
    if torch.version.cuda is not None:
        device = _CUDA_MODULE.removeprefix("_C_")
        if importlib.util.find_spec(f"{NAMESPACE}.{_CUDA_MODULE}") is None:
            found[device] = "not built: tensors go by way of the CPU"
        else:
            module = importlib.import_module(f"{NAMESPACE}.{_CUDA_MODULE}")
            found[device] = f"native (built with CUDA {module.toolkit_version()})"
    return found

"""The torch.library object, and the order in which backends claim an op.

An op is defined where its contract is, in ``ops/<op>.py``. PyTorch's dispatcher picks the backend
by the device of the tensors: the native kernels register themselves when ``_C`` (CPU) or
``_C_cuda`` is imported; a device that neither serves gets the float64 reference.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "specdec_ops"

_library = torch.library.Library(NAMESPACE, "DEF")
_logger = logging.getLogger(NAMESPACE)


def define(schema: str, *, fake: Callable[..., Any], reference: Callable[..., Any]) -> Any:
    """Defines an op and returns its callable overload.

    Args:
        schema: The op's schema, without the namespace.
        fake: Shapes and dtypes of the outputs, for ``torch.compile`` and ``torch.export``.
        reference: The float64 implementation that serves every device without a native kernel.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)

    @functools.wraps(reference)
    def reference_with_notice(*args: Any, **kwargs: Any) -> Any:
        _log_reference_once(name, next(a.device.type for a in args if isinstance(a, torch.Tensor)))
        return reference(*args, **kwargs)

    _library.impl(name, reference_with_notice, "CompositeExplicitAutograd")
    return getattr(getattr(torch.ops, NAMESPACE), name).default


@functools.cache
def _log_reference_once(name: str, device_type: str) -> None:
    _logger.warning("%s: no native kernel for %s tensors, using the slow reference", name, device_type)


def load_backends() -> dict[str, str]:
    """Imports the native modules that are installed and usable; returns a line on each.

    A module that is there but cannot be loaded is an error, never a silent fallback.
    """
    found = {}
    if importlib.util.find_spec(f"{NAMESPACE}._C") is None:
        found["cpu"] = "not built: the float64 reference serves CPU tensors"
    else:
        importlib.import_module(f"{NAMESPACE}._C")
        found["cpu"] = "native"
    return found

"""The ops in Triton: what serves a device that has no native kernels, but a driver of Triton.

``<op>.py`` has the op of that name, with the signature of its schema. Nothing of Triton is imported before
an op is called.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any


class MissingKernelError(RuntimeError):
    """An argument asks for what an op has no Triton kernel for."""


def why_not(op: str, device_type: str) -> str | None:
    """Why Triton cannot run an op on tensors of a device, None if it can.

    Raises:
        ImportError: Triton is installed, but cannot be imported.
    """
    if not is_installed():
        return "Triton is not installed"
    if importlib.util.find_spec(_module_name(op)) is None:
        return "the op has no Triton kernel"
    if is_interpreted():
        return None
    served = active_device_type()
    if served is None:
        backends = sorted(_triton("backends").backends)
        return f"Triton has no active driver (installed: {', '.join(backends) or 'none'})"
    return None if served == device_type else f"Triton's active driver is for {served} tensors"


def load(op: str) -> Callable[..., Any]:
    """The op, which :func:`why_not` has nothing against."""
    return getattr(importlib.import_module(_module_name(op)), op)  # type: ignore[no-any-return]


def is_installed() -> bool:
    """Whether there is a Triton, usable or not."""
    return importlib.util.find_spec("triton") is not None


def is_interpreted() -> bool:
    """Whether Triton interprets kernels (``TRITON_INTERPRET=1``): it does so for tensors of any device."""
    return bool(_triton("knobs").runtime.interpret)


def active_device_type() -> str | None:
    """The type of device on which Triton's active driver runs kernels, None where no driver is active."""
    if not any(backend.driver.is_active() for backend in _triton("backends").backends.values()):
        return None
    driver = _triton("runtime").driver.active
    if hasattr(driver, "get_active_torch_device"):
        return str(driver.get_active_torch_device().type)
    # A Triton-CPU from before drivers were asked for torch's device.
    return str(driver.get_current_target().backend)


def describe() -> str:
    """What an installation's report says of Triton."""
    if not is_installed():
        return "not installed"
    try:
        version = _triton().__version__
        served = active_device_type()
        if is_interpreted():
            return f"{version}, interpreted (TRITON_INTERPRET)"
    except Exception as error:
        return f"cannot be used: {type(error).__name__}: {error}"
    return f"{version}, {'no active driver' if served is None else f'its driver is for {served} tensors'}"


def _triton(module: str | None = None) -> ModuleType:
    try:
        return importlib.import_module(f"triton.{module}" if module else "triton")
    except ImportError as error:
        raise ImportError(f"Triton is installed, but cannot be imported: {error}") from error


def _module_name(op: str) -> str:
    return f"{__name__}.{op.rstrip('_')}"

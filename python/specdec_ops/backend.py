"""backend: forces the backend that serves the ops, for tests and for engines that compare."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_ops import _library


def backend(name: str) -> AbstractContextManager[Any]:
    """Forces the backend that serves this package's ops in the calling thread, inside of a ``with``.

    Of nested ones the innermost counts. Inside, functions that ``torch.compile`` would compile run as they
    are, since torch compiles nothing there: where compiled code should use one backend, set the environment
    variable ``SPECDEC_OPS_BACKEND`` to its name before this package is imported.

    Args:
        name: ``"native"``, the kernels in C++ and CUDA; ``"triton"``, where Triton has a driver for the
            device of the tensors, or interprets its kernels (``TRITON_INTERPRET=1``); ``"reference"``, in
            float64, which does not check its arguments.

    Returns:
        A context manager, which can be used again.

    Raises:
        RuntimeError: ``name`` is none of these; or, once an op is called, the backend cannot run it on the
            device of its tensors. The message says why.
        ImportError: Once an op is called: Triton is installed, but cannot be imported.

    Source: none; it makes no results.

    Example:
        >>> import torch, specdec_ops
        >>> with specdec_ops.backend("reference"):
        ...     specdec_ops.count_accepted(torch.tensor([[5, 6, -1]])).num_accepted.tolist()
        [1]
    """
    if name not in _library.BACKENDS:
        names = ", ".join(repr(known) for known in _library.BACKENDS[:-1])
        raise RuntimeError(f"backend: name must be {names} or {_library.BACKENDS[-1]!r}, got {name!r}")
    return _Forced(name)


class _Forced(TorchDispatchMode):
    """Hands the ops of this package to one backend, and lets everything else pass."""

    supports_higher_order_operators = True

    def __init__(self, name: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._name = name

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", None) != _library.NAMESPACE or _has_no_data(types):
            return func(*args, **kwargs)
        op = func._schema.name.partition("::")[2]  # type: ignore[attr-defined]
        device = _library.device_of(op, args, kwargs)
        if device.type == "meta":
            return func(*args, **kwargs)
        return _library.forced_implementation(op, device, self._name)(*args, **kwargs)


def _has_no_data(types: tuple[type, ...]) -> bool:
    """Whether something is being traced."""
    return any(issubclass(type_, torch._subclasses.FakeTensor) for type_ in types)

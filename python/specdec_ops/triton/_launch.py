"""Kernels, and their launch on the device of the tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

#: Requests of a program, and how many elements of each it takes at a time, where requests have many.
REQUESTS, LANES = 8, 32
#: Elements of a program where they belong to no request.
TILE = 1024


def kernel(function: Callable[..., Any]) -> Any:
    """``triton.jit`` that never compiles anew for other values or addresses.

    Triton tells arguments apart that are 1, or multiples of 16. Here only those annotated ``tl.constexpr``,
    and the dtypes of tensors, make another kernel. Integers are annotated ``tl.int64``, lest their size
    should.
    """
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if "constexpr" not in str(p.annotation)]
    return triton.jit(function, do_not_specialize=names, do_not_specialize_on_alignment=names)


def launch(jitted: Any, num_programs: int, beside: Tensor, *args: Any, **constants: Any) -> None:
    """Queues a kernel on the current stream of the device of ``beside``; nothing for no programs.

    Products and sums are not fused: where they are to be, kernels say so.
    """
    if num_programs == 0:
        return
    with _on_device_of(beside):
        jitted[(num_programs,)](*args, **constants, enable_fp_fusion=False)


def _on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    index = tensor.device.index
    if index is None or index == torch.accelerator.current_device_index():
        return nullcontext()
    return torch.accelerator.device_index(index)


_COMPILER_OPTIONS = ("num_warps", "maxnreg")
#: Compiled kernels by device, constants and options.
_prepared: dict[tuple[Any, ...], Any] = {}


def launch_prepared(
    jitted: Any,
    num_programs: int,
    beside: Tensor,
    args: tuple[int, ...],
    constants: tuple[Any, ...],
    options: dict[str, Any],
) -> None:
    """:func:`launch` of a kernel with many arguments, which Triton would take long to look at again.

    ``args``: integers, for which a kernel is not compiled anew. ``constants``: what is ``tl.constexpr``
    behind them. ``options``: the last of these by name and in order, then options of the
    compiler.
    """
    if num_programs == 0:
        return
    key = (id(jitted), beside.device.index, constants, *options.values())
    compiled = _prepared.get(key)
    with _on_device_of(beside):
        if compiled is None:
            known = _known_options(jitted, options)
            compiled = jitted[(num_programs,)](*args, *constants, **known, enable_fp_fusion=False)
            # The interpreter has nothing to keep.
            if compiled is not None:
                _prepared[key] = compiled
            return
        values = (value for name, value in options.items() if name not in _COMPILER_OPTIONS)
        compiled[(num_programs, 1, 1)](*args, *constants, *values)


def _known_options(jitted: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Without those that are for compilers of other makers: AMD's knows no ``maxnreg``."""
    if not isinstance(jitted, triton.JITFunction):
        return options
    target = triton.runtime.driver.active.get_current_target()
    known = triton.compiler.make_backend(target).parse_options({})
    foreign = [name for name in _COMPILER_OPTIONS if not hasattr(known, name)]
    return {name: value for name, value in options.items() if name not in foreign}

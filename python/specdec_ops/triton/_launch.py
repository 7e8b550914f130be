"""Kernels, and their launch on the device of the tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
    device = beside.device
    if device.index is None or device.index == torch.accelerator.current_device_index():
        jitted[(num_programs,)](*args, **constants, enable_fp_fusion=False)
        return
    with torch.accelerator.device_index(device.index):
        jitted[(num_programs,)](*args, **constants, enable_fp_fusion=False)

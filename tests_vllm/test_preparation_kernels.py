"""Our preparation ops and vLLM's own C++ write the same, on what an engine gives them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
kernels: Any = importlib.import_module("bench_vllm_kernels")
cases: Any = importlib.import_module("_cases")

#: Batches, drafts of a request, and inputs of each.
SHAPES = [(1, 1), (1, 5), (16, 3), (33, 7)]
NUM_INPUTS = 5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", kernels.KERNELS)
def test_kernel(name: str, shape: tuple[int, int]) -> None:
    kernel, case = kernels.KERNELS[name], cases.Case(*shape, cases.Draft.ONE_HOT, vocab_size=64)
    for index in range(NUM_INPUTS):
        inputs = cases.make_inputs(case, index)
        ours, stock = (
            call() for call in (kernels._call(kernel, kernel.ours, inputs), kernels._stock(kernel, inputs))
        )
        if not kernel.stock_is_right:
            stock = [inputs.temperature.repeat_interleave(case.num_drafts)]
        for output, one, other in zip(kernel.outputs, ours, stock, strict=True):
            assert torch.equal(one, other), output


def test_stock_kernels_that_are_wrong() -> None:
    assert [name for name, kernel in kernels.KERNELS.items() if not kernel.stock_is_right] == ["expand"]

"""Checks of Triton in a process without native kernels, run by test_triton.py: triton_process.py CHECK."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["SPECDEC_OPS_BACKEND"] = "triton"

import specdec_ops
import torch
import triton
from test_cuda import large_chain

DEVICE = torch.device("cuda", 0)
BATCHES = (0, 1, 15, 16, 17, 256)
NUM_SLOTS, VOCAB_SIZE = 3, 5000
RULES = ("token", "synthetic")
#: How much longer than others the first call of a batch size may take.
MOST = 1.2

warmup = importlib.import_module("specdec_ops.warmup")
compiled: list[str] = []


def note(*_: Any, fn: Any, compile: Any, **__: Any) -> None:
    compiled.append(fn.name)


def warm_up(vocab_size: int) -> None:
    triton.knobs.runtime.jit_post_compile_hook = note
    report = specdec_ops.warmup(
        device=DEVICE,
        vocab_size=vocab_size,
        max_num_reqs=16,
        num_speculative_tokens=NUM_SLOTS,
        dtypes=(torch.bfloat16,),
        rules=RULES,
    )
    print(f"{len(compiled)} kernels compiled in {sum(op.seconds for op in report.ops):.0f} s")
    assert len(compiled) > 50
    compiled.clear()


def warm_up_compiles_all() -> None:
    """Whatever the size of a batch and whichever optional arguments are given, warm-up has compiled it."""
    warm_up(VOCAB_SIZE)
    calls = 0
    for op, batch, ids in itertools.product(
        warmup._OPS_ON_ROWS | warmup._OPS_ON_IDS, BATCHES, (torch.int64, torch.int32)
    ):
        sizes = (batch, NUM_SLOTS, VOCAB_SIZE)
        made_up = warmup._Inputs(DEVICE, sizes, torch.bfloat16, ids, with_options=True)
        for arguments in (warmup._OPS_ON_ROWS | warmup._OPS_ON_IDS)[op](made_up, RULES):
            op(**arguments)
            calls += 1
        assert not compiled, f"{op.__name__} in a batch of {batch}: compiled {compiled}"
    print(f"{calls} calls compiled nothing")


def us(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start)


def first_calls() -> None:
    """A batch's first call after warm-up takes about as long as its later ones."""
    vocab_size = 151_936
    warm_up(vocab_size)
    ratios = []
    for batch in (1, 3, 4, 7, 15, 16, 17, 31, 32, 33, 48, 63, 64):
        chain = large_chain(batch, k=NUM_SLOTS, vocab_size=vocab_size)
        # The allocator and the caches of the GPU have seen such tensors; Triton has not.
        torch.ones_like(chain["target_logits"]).sum().item()
        call = functools.partial(specdec_ops.verify_chain, **chain)
        first = us(call)
        steady = statistics.median(us(call) for _ in range(30))
        ratios.append(first / steady)
        print(f"B={batch}: first call {first:.0f} us, then {steady:.0f} us")
    assert not compiled
    print(f"first calls take {statistics.median(ratios):.2f} times as long (median)")
    assert statistics.median(ratios) <= MOST


def compiled_by_torch() -> None:
    """torch.compile takes the ops into its graph, and the results are those of eager calls."""
    chain = large_chain(4, vocab_size=VOCAB_SIZE)

    def step(target_logits: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, ...]:
        out = specdec_ops.verify_chain(target_logits * 1.5, **rest, return_logprobs=True)
        return out.token_ids + 1, out.num_accepted, out.logprobs * 2

    eager = step(**chain)
    for mode in ("default", "reduce-overhead"):
        in_graph = torch.compile(step, fullgraph=True, mode=mode)
        for _ in range(3):
            for a, b in zip(in_graph(**chain), eager, strict=True):
                assert torch.equal(a.nan_to_num(7), b.nan_to_num(7)), mode
    assert int(eager[1].sum()) > 0


CHECKS = {check.__name__: check for check in (warm_up_compiles_all, first_calls, compiled_by_torch)}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()

"""Times the Triton kernels of the chain ops against the CUDA ones, and against vLLM's Triton.

Inputs are those of bench_gpu. Before a case is timed its tokens must be the CUDA kernels': other ones are
counted, and allowed in two of 10,000 requests. Times are medians of graph replays and of eager calls.
"compiles" is how many kernels Triton has compiled for the case.

Run it as ``python -m bench.bench_triton [--vllm SOURCES]``; ``--tune`` times other ways to cut and launch the
kernels at one batch size instead, and the two launches by themselves.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import specdec_ops
import torch
import triton
from specdec_ops.triton import _chain, _chain_arguments, _filters, _rows
from specdec_ops.triton.sample import sample as triton_sample
from specdec_ops.triton.verify_chain import verify_chain as triton_verify_chain
from torch import Tensor

from bench.bench_gpu import (
    DEVICE,
    TEMPERATURE,
    VOCAB_SIZE,
    Arguments,
    Call,
    eager_us,
    graph_us,
    load_vllm,
    make_inputs,
    vllm_rival,
)

CASES = ((1, 4), (8, 4), (64, 4), (256, 4))
#: Of bench_gpu, what Triton has kernels for.
MODES = ("dense", "dense, logsumexp given", "dense, top-k and top-p", "one-hot", "greedy")
#: Several times what the second-level cache holds.
ROTATED_BYTES = 600_000_000
REPEATS = 7


def num_compiled() -> int:
    filters = (_filters.survey_rows, _filters.find_thresholds, _filters.read_kept_rows)
    kernels = (_rows.read_rows, _chain.judge_requests, *filters)
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def make_sets(batch: int, k: int, mode: str) -> list[Arguments]:
    size = (k + 1 + k * mode.startswith("dense")) * batch * VOCAB_SIZE * 2
    count = max(4, min(100, ROTATED_BYTES // size + 1))
    return [make_inputs(batch, k, mode, seed) for seed in range(count)]


def calls_of(function: Callable[..., Any], sets: Sequence[Arguments]) -> list[Call]:
    return [lambda a=a: function(**a) for a in sets]


def check(sets: Sequence[Arguments], case: str) -> None:
    """Exits where tokens differ from the CUDA kernels' in more than rounding can explain."""
    requests = differing = 0
    for arguments in sets:
        ours = triton_verify_chain(**arguments)[0]
        theirs = specdec_ops.verify_chain(**arguments).token_ids
        requests += ours.shape[0]
        differing += int((ours != theirs).any(1).sum())
    if differing:
        print(f"{case}: {differing} of {requests} requests differ from the CUDA kernels")
    if differing > max(2, requests // 5_000):
        sys.exit(1)


def time_cases(vllm: Any, batches: Sequence[int]) -> None:
    print(f"{'case':32} {'CUDA':>8} {'Triton':>8} {'ratio':>6} {'vLLM':>8} {'CUDA eager':>11} "
          f"{'Triton eager':>13} {'compiles':>9}")  # fmt: skip
    for batch, k in CASES:
        for mode in MODES if batch in batches else ():
            sets = make_sets(batch, k, mode)
            before = num_compiled()
            check(sets, f"B={batch} {mode}")
            native, ours = calls_of(specdec_ops.verify_chain, sets), calls_of(triton_verify_chain, sets)
            cuda, own = graph_us(native, REPEATS), graph_us(ours, REPEATS)
            theirs = "-"
            if vllm is not None:
                rival = vllm_rival(vllm, sets, batch, k, torch.bfloat16)
                theirs = f"{graph_us(rival.calls, REPEATS):.1f}"
            eager = eager_us(native, REPEATS), eager_us(ours, REPEATS)
            print(f"{f'B={batch} k={k} {mode}':32} {cuda:8.1f} {own:8.1f} {own / cuda:6.2f} {theirs:>8} "
                  f"{eager[0]:11.1f} {eager[1]:13.1f} {num_compiled() - before:9d}", flush=True)  # fmt: skip
            del sets, native, ours
            torch.cuda.empty_cache()
    for rows in batches:
        logits = [
            (3 * torch.randn(rows, VOCAB_SIZE, device=DEVICE)).bfloat16()
            for _ in range(max(4, min(100, ROTATED_BYTES // (rows * VOCAB_SIZE * 2))))
        ]
        places = torch.arange(rows, device=DEVICE)
        rest: dict[str, Tensor] = {"seeds": places, "positions": places}
        rest["temperature"] = torch.full((rows,), TEMPERATURE, device=DEVICE)
        same = sum(
            torch.equal(triton_sample(x, **rest)[0], specdec_ops.sample(x, **rest).token_ids) for x in logits
        )
        native = [functools.partial(specdec_ops.sample, x, **rest) for x in logits]
        ours = [functools.partial(triton_sample, x, **rest) for x in logits]
        cuda, own = graph_us(native, REPEATS), graph_us(ours, REPEATS)
        print(f"{f'sample, {rows} rows':32} {cuda:8.1f} {own:8.1f} {own / cuda:6.2f}   "
              f"({same} of {len(logits)} calls with the same tokens)", flush=True)  # fmt: skip


def only(kernel: Any, calls: Sequence[Call]) -> float:
    """A graph in which one kernel alone is launched."""
    launch = _chain_arguments.launch_prepared

    def launch_one(jitted: Any, *arguments: Any) -> None:
        if jitted is kernel:
            launch(jitted, *arguments)

    _chain_arguments.launch_prepared = launch_one
    try:
        return graph_us(calls, REPEATS)
    finally:
        _chain_arguments.launch_prepared = launch


def tune(batch: int, k: int) -> None:
    sets = make_sets(batch, k, "dense")
    native, ours = calls_of(specdec_ops.verify_chain, sets), calls_of(triton_verify_chain, sets)
    print(f"B={batch} k={k} dense: CUDA {graph_us(native, REPEATS):.1f} us")
    reader, judge = dict(_chain_arguments.READER), dict(_chain_arguments.JUDGE)
    most = _chain_arguments.BLOCKS_AT_ONCE
    for warps, blocks in itertools.product((2, 4, 8), (1, 2, 4, 8, 16)):
        _chain_arguments.READER.update(num_warps=warps)
        _chain_arguments.BLOCKS_AT_ONCE = blocks
        print(f"readers of {blocks} blocks, {warps} warps: {only(_rows.read_rows, ours):.1f} us", flush=True)
    _chain_arguments.BLOCKS_AT_ONCE = most
    _chain_arguments.READER.update(reader)
    # Where nobody reads, the judges find what the allocator's memory holds: the numbers of a call before.
    for attempts, warps in ((32, 4), (32, 8), (16, 4)):
        _chain_arguments.JUDGE.update(ATTEMPTS=attempts, num_warps=warps)
        print(f"both with judges {_chain_arguments.JUDGE}: {graph_us(ours, REPEATS):.1f} us", flush=True)
    _chain_arguments.JUDGE.update(judge)
    kernels = [k for f in (_rows.read_rows, _chain.judge_requests)
               for c in f.device_caches.values() for k in c[0].values()]  # fmt: skip
    for compiled in kernels:
        print(compiled.metadata.name, compiled.metadata.num_warps, f"{compiled.n_regs} registers,",
              f"{compiled.n_spills} spilled, {compiled.metadata.shared} bytes shared")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, help="an unpacked source distribution of vLLM")
    parser.add_argument("--batch", default="1,8,64,256", help="batch sizes, of %(default)s")
    parser.add_argument("--tune", action="store_true", help="other ways to launch, at the first batch size")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_triton: torch sees no CUDA device here")
    batches = [int(batch) for batch in options.batch.split(",")]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}; "
          f"bfloat16, V={VOCAB_SIZE:,}, microseconds a call")  # fmt: skip
    if options.tune:
        tune(batches[0], 4)
    else:
        time_cases(load_vllm(options.vllm) if options.vllm else None, batches)


if __name__ == "__main__":
    main()

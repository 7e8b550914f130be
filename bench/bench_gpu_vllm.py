"""Times what the plug-in puts into vLLM's newer runner against vLLM's own functions, on a GPU.

Both are called as the runner calls them, on the same bfloat16 inputs, which rotate as in bench_gpu.py. (The
runner copies the target's logits to float32 first where sampling parameters have to be applied.) Before
a case is timed, verification must accept as many drafts as the op does, and what is drawn must be kept alike
in the cache and be the argmax at temperature 0.

Run it as ``python -m bench.bench_gpu_vllm SOURCES``; SOURCES is an unpacked source distribution of vLLM,
whose Triton kernels are loaded from their files. It prints the tables of docs/vllm.md.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from specdec_ops.integrations.vllm import runner_sampling
from torch import Tensor

from bench.bench_gpu import (
    DEVICE,
    TEMPERATURE,
    VOCAB_SIZE,
    Bench,
    Call,
    check,
    copy_bandwidth,
    load_vllm,
    make_inputs,
    vllm_rival,
)

BATCHES = (1, 8, 64)
NUM_DRAFTS = 4
MODES = ("dense", "one-hot", "greedy")


class Draws:
    """Rows to draw drafts from, and how the runner asks for it."""

    def __init__(self, batch: int, cached: bool, num_sets: int) -> None:
        random = torch.Generator(DEVICE).manual_seed(0)
        self._sets = [
            (3 * torch.randn(batch, VOCAB_SIZE, generator=random, device=DEVICE)).bfloat16()
            for _ in range(num_sets)
        ]
        self._slots = torch.arange(batch, dtype=torch.int32, device=DEVICE)
        self._numbers = torch.arange(batch, device=DEVICE)
        self._cache: Tensor | None = None
        self._more: dict[str, Tensor] = {}
        if cached:
            size = (batch, NUM_DRAFTS, VOCAB_SIZE)
            self._cache = torch.zeros(size, dtype=torch.bfloat16, device=DEVICE)
            column = torch.tensor(1, dtype=torch.int32, device=DEVICE)
            self._more = {"logits_cache": self._cache, "logits_cache_col": column}

    def calls(self, gumbel_sample: Callable[..., Tensor], temperature: float = TEMPERATURE) -> list[Call]:
        temperatures = torch.full((len(self._slots),), temperature, device=DEVICE)
        # The same numbers serve as seeds and as positions.
        keys = (self._slots, temperatures, self._numbers, self._numbers)
        return [
            lambda x=x: gumbel_sample(x, *keys, apply_temperature=True, is_drafting=True, **self._more)
            for x in self._sets
        ]

    def check(self, gumbel_sample: Callable[..., Tensor], name: str) -> None:
        """Exits unless the first set is drawn from, and kept, as it should be."""
        if self._cache is not None:
            self._cache.zero_()
        drawn = self.calls(gumbel_sample, temperature=0.0)[0]()
        # Of equal logits either may be meant.
        rows = self._sets[0]
        if not rows.gather(1, drawn[:, None])[:, 0].equal(rows.amax(1)):
            sys.exit(f"{name}: not the argmax at temperature 0")
        if self._cache is not None and not self._cache[:, 1].equal(rows):
            sys.exit(f"{name}: the cache does not hold the logits")


def print_row(case: str, cells: Sequence[str]) -> None:
    print(f"| {' | '.join([case, *cells])} |", flush=True)


def print_head(function: str) -> None:
    print()
    print_row(f"`{function}`", ("ours, in a graph", "eager", "vLLM's, in a graph", "eager"))
    print("|---" * 5 + "|")


def times(bench: Bench, *implementations: Sequence[Call]) -> list[str]:
    return [
        f"{us:,.1f}" for calls in implementations for us in (bench.graph_us(calls), bench.eager_us(calls))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", type=Path, help="an unpacked source distribution of vLLM")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_gpu_vllm: torch sees no CUDA device here")
    vllm: Any = load_vllm(options.sources)
    stock_draw = importlib.import_module("vllm.v1.worker.gpu.sample.gumbel").gumbel_sample
    plugin = types.SimpleNamespace(
        rejection_sample=runner_sampling.make_rejection_sample(vllm.rejection_sample)
    )
    draw = runner_sampling.make_gumbel_sample(stock_draw)
    bench = Bench(copy_bandwidth(), vllm, None, quick=False)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.sources.resolve().name}, "
        f"copy {bench.bandwidth / 1e3:,.0f} GB/s; bfloat16 logits, V={VOCAB_SIZE:,}, microseconds a call"
    )

    print_head("rejection_sample")
    for batch in BATCHES:
        for mode in MODES:
            size = (NUM_DRAFTS + 1 + NUM_DRAFTS * (mode == "dense")) * batch * VOCAB_SIZE * 2
            sets = [make_inputs(batch, NUM_DRAFTS, mode, seed) for seed in range(bench.num_sets(size))]
            rivals = {
                name: vllm_rival(module, sets, batch, NUM_DRAFTS, torch.bfloat16)
                for name, module in (("the plug-in", plugin), ("vLLM", vllm))
            }
            check(sets, rivals)
            print_row(f"B={batch}, {mode}", times(bench, *(rival.calls for rival in rivals.values())))
            del sets, rivals
            torch.cuda.empty_cache()

    print_head("gumbel_sample")
    for batch in BATCHES:
        for cached in (False, True):
            draws = Draws(batch, cached, bench.num_sets(batch * VOCAB_SIZE * 2))
            draws.check(draw, "the plug-in")
            draws.check(stock_draw, "vLLM")
            case = f"B={batch}, {'kept in a cache' if cached else 'no cache'}"
            print_row(case, times(bench, draws.calls(draw), draws.calls(stock_draw)))
            del draws
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

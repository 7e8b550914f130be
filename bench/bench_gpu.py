"""Times the CUDA kernels against what they replace, in one run on one GPU.

Inputs rotate, so that no cache serves them. Times are medians of graph replays, each of which calls an
op on every set of inputs, and of eager calls. Reading time is what one pass over the logits takes at the
copy bandwidth measured in the same run.

Run it as ``python -m bench.bench_gpu [--vllm SOURCES]``; SOURCES is an unpacked source distribution of vLLM,
whose Triton kernels are then loaded from their files.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import specdec_ops
import torch
from torch import Tensor

from tools import vllm_sources

DEVICE = "cuda"
VOCAB_SIZE = 151_936
TEMPERATURE = 0.8
#: As in bench/_cases.py: about 0.7 of the drafts are accepted.
DRAFT_NOISE = 0.77 * TEMPERATURE
ROTATED_BYTES = 600_000_000
CASES = ((1, 4), (8, 4), (64, 4), (256, 3))
MODES = ("dense", "dense, logsumexp given", "one-hot", "greedy")

Call = Callable[[], Any]
Arguments = dict[str, Any]


def make_inputs(batch: int, k: int, mode: str, seed: int) -> Arguments:
    random = torch.Generator(DEVICE).manual_seed(seed)
    target = 3 * torch.randn(batch * (k + 1), VOCAB_SIZE, generator=random, device=DEVICE)
    noise = torch.randn(batch * k, VOCAB_SIZE, generator=random, device=DEVICE)
    draft = target.view(batch, k + 1, -1)[:, :k].reshape(batch * k, -1) + DRAFT_NOISE * noise
    target, draft = target.bfloat16(), draft.bfloat16()
    sampled = specdec_ops.sample(
        draft, temperature=TEMPERATURE, seeds=seed + 1, positions=torch.arange(batch * k, device=DEVICE)
    )
    ids = sampled.token_ids
    if mode == "greedy":
        best = target.argmax(-1).view(batch, k + 1)[:, :k]
        missed = torch.rand(best.shape, generator=random, device=DEVICE) > 0.7
        ids = torch.where(missed, 5, best).flatten()
    arguments: Arguments = {
        "target_logits": target,
        "draft_token_ids": ids,
        "cu_num_draft_tokens": torch.arange(batch + 1, device=DEVICE) * k,
        "temperature": torch.full((batch,), 0.0 if mode == "greedy" else TEMPERATURE, device=DEVICE),
        "seeds": torch.arange(batch, device=DEVICE) + 1000 * seed,
        "positions": torch.arange(batch, device=DEVICE) * 7,
        "max_num_draft_tokens": k,
    }
    if mode.startswith("dense"):
        arguments["draft_logits"] = draft
    if mode.endswith("given"):
        arguments["draft_logsumexp"] = sampled.logsumexp
    return arguments


def graph_us(calls: list[Call], repeats: int = 7) -> float:
    """Microseconds a call in a graph of all calls."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    del kept
    return statistics.median(times[2:])


def eager_us(calls: list[Call], repeats: int = 200) -> float:
    """Microseconds of wall time a call, calls issued one after another."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for i in range(repeats):
        calls[i % len(calls)]()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats * 1e6


def copy_bandwidth() -> float:
    """Bytes a microsecond, read and written."""
    source = torch.randn(1 << 30, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return 2 * source.numel() * source.element_size() / statistics.median(times)


def load_vllm(sources: Path) -> Any:
    """vLLM's Triton rejection sampler from its files."""
    vllm_sources.load(sources)
    return importlib.import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils")


def vllm_call(vllm: Any, arguments: Arguments, batch: int, k: int, dtype: torch.dtype) -> Call:
    rows = batch * (k + 1)
    draft = arguments.get("draft_logits")
    sampled = torch.zeros(batch, k + 1, dtype=torch.int64, device=DEVICE)
    sampled[:, 1:] = arguments["draft_token_ids"].view(batch, k)
    requests = torch.arange(batch, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE) % (k + 1)
    fixed = (
        None if draft is None else draft.view(batch, k, -1),
        sampled.flatten(),
        (torch.arange(batch + 1, device=DEVICE) * (k + 1)).int(),
        torch.arange(rows, device=DEVICE),
        requests,
        requests.repeat_interleave(k + 1),
        slots,
        arguments["temperature"],
        arguments["seeds"],
        k,
    )
    logits: Tensor = arguments["target_logits"]
    return lambda: vllm.rejection_sample(logits.to(dtype), *fixed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path, help="an unpacked source distribution of vLLM")
    options = parser.parse_args()
    vllm = load_vllm(options.vllm) if options.vllm else None
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e3:,.0f} GB/s")
    columns = ("case", "reading us", "graph us", "/ reading", "eager us")
    columns += ("vLLM graph", "vLLM eager", "vLLM fp32 graph", "torch argmax")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for batch, k in CASES:
        for mode in MODES:
            size = (k + 1 + k * mode.startswith("dense")) * batch * VOCAB_SIZE * 2
            num_sets = max(3, min(100, ROTATED_BYTES // size + 1))
            sets = [make_inputs(batch, k, mode, seed) for seed in range(num_sets)]
            calls: list[Call] = [lambda a=a: specdec_ops.verify_chain(**a) for a in sets]
            reading = size / bandwidth
            ours = graph_us(calls)
            cells = [reading, ours, ours / reading, eager_us(calls)]
            if vllm is not None:
                theirs = [vllm_call(vllm, a, batch, k, torch.bfloat16) for a in sets]
                # The engine applies sampling parameters to a float32 copy.
                whole = [vllm_call(vllm, a, batch, k, torch.float32) for a in sets[: max(2, num_sets // 4)]]
                cells += [graph_us(theirs), eager_us(theirs), graph_us(whole)]
            else:
                cells += [float("nan")] * 3
            cells.append(graph_us([lambda a=a: a["target_logits"].argmax(-1) for a in sets]))
            print(f"| B={batch} k={k} {mode} | " + " | ".join(f"{c:,.1f}" for c in cells) + " |", flush=True)
            del sets, calls
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Times the CUDA kernels against what they replace, in one run on one GPU.

Inputs rotate, so that no cache serves them. Before a case is timed, its tokens on one set are compared with
the CPU's, its statuses are looked at, and every rival must accept as many drafts as the op does. Times are
medians of graph replays, each of which calls an op on every set of inputs, and of eager calls. Reading time
is what one pass over the logits takes at the copy bandwidth measured in the same run.

Run it as ``python -m bench.bench_gpu [--vllm SOURCES]``; SOURCES is an unpacked source distribution of vLLM,
whose Triton kernels are then loaded from their files. FlashInfer is a rival where it can be imported.
``--quick --batch 1,8`` times the project's ops alone, in seconds.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
#: Several times what the second-level cache of any GPU holds.
ROTATED_BYTES = 600_000_000
CASES = ((1, 4), (8, 4), (64, 4), (256, 3))
MODES = (
    "dense",
    "dense, logsumexp given",
    "one-hot",
    "greedy",
    "dense, top-k and top-p",
    "dense, block verification",
    "one-hot, exact match",
)
#: Where the mode says so, for the target's rows.
TOP_K, TOP_P = 50, 0.9
#: Rules that no rival here has.
OTHER_LAWS = ("dense, block verification", "one-hot, exact match")
#: Rows of the cases of `sample`.
SAMPLE_ROWS = (1, 64)

#: What a row of the table holds besides its case: microseconds but for the ratio.
COLUMNS = {
    "read": "read all once",
    "graph": "in a graph",
    "ratio": "/ read",
    "eager": "eager",
    "vllm": "Triton",
    "vllm eager": "Triton, eager",
    "vllm copy": "Triton, fp32 copy first",
    "torch softmax": "torch softmax + FlashInfer",
    "flashinfer": "FlashInfer with its softmax",
    "flashinfer eager": "the same, eager",
    "torch": "torch",
}
NOTES = """\
Microseconds a call, in a graph unless said. Triton is vLLM's V2 `rejection_sample` on bfloat16 logits; the
engine itself makes a float32 copy first. Its target logits are divided by the temperature beforehand, off the
clock. With top-k 50 and top-p 0.9 of the target, the engine's path is a float32 copy, the temperature, its
Triton `apply_top_k_top_p`, and `rejection_sample`. FlashInfer is softmax to float32 of both models' logits
with the temperatures, by torch or by FlashInfer, then `chain_speculative_sampling`; for `sample`, its
`sampling_from_logits`. torch is `argmax` of all rows (greedy), or softmax and what `multinomial` does
(`sample`)."""

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
    if mode.endswith("top-p"):
        arguments["top_k"] = torch.full((batch,), TOP_K, device=DEVICE)
        arguments["top_p"] = torch.full((batch,), TOP_P, device=DEVICE)
    if mode.endswith("block verification"):
        arguments["rule"] = "block"
    if mode.endswith("exact match"):
        arguments["rule"] = "exact_match"
    return arguments


def graph_us(calls: Sequence[Call], repeats: int) -> float:
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


def eager_us(calls: Sequence[Call], repeats: int) -> float:
    """Microseconds of wall time a call, calls issued one after another."""
    calls_at_once = 40
    for call in calls[:2]:
        call()
    times = []
    for repeat in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for i in range(calls_at_once):
            calls[(repeat * calls_at_once + i) % len(calls)]()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / calls_at_once * 1e6)
    return statistics.median(times)


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


def load_flashinfer() -> Any:
    """FlashInfer's sampling module, or None."""
    try:
        return importlib.import_module("flashinfer.sampling")
    except ImportError:
        return None


@dataclass(frozen=True)
class Rival:
    """What a user would call instead."""

    calls: Sequence[Call]
    #: The numbers of accepted drafts in what a call returns.
    accepted: Callable[[Any], Tensor]


def vllm_rival(vllm: Any, sets: Sequence[Arguments], batch: int, k: int, dtype: torch.dtype) -> Rival:
    rows = batch * (k + 1)
    requests = torch.arange(batch, dtype=torch.int32, device=DEVICE)
    slots = torch.arange(rows, dtype=torch.int32, device=DEVICE) % (k + 1)
    cu_num_logits = (torch.arange(batch + 1, device=DEVICE) * (k + 1)).int()
    positions = torch.arange(rows, device=DEVICE)

    def call_of(arguments: Arguments) -> Call:
        draft = arguments.get("draft_logits")
        sampled = torch.zeros(batch, k + 1, dtype=torch.int64, device=DEVICE)
        sampled[:, 1:] = arguments["draft_token_ids"].view(batch, k)
        fixed = (
            None if draft is None else draft.view(batch, k, -1),
            sampled.flatten(),
            cu_num_logits,
            positions,
            requests,
            requests.repeat_interleave(k + 1),
            slots,
            arguments["temperature"],
            arguments["seeds"],
            k,
        )
        logits: Tensor = arguments["target_logits"]
        if "top_k" in arguments:
            return filtered_call(vllm, logits, arguments, fixed)
        if bool((arguments["temperature"] > 0).all()):
            logits = (logits / arguments["temperature"].repeat_interleave(k + 1).unsqueeze(1)).to(
                logits.dtype
            )
        return lambda: vllm.rejection_sample(logits.to(dtype), *fixed)

    return Rival([call_of(a) for a in sets], lambda out: out[1] - 1)


def filtered_call(vllm: Any, logits: Tensor, arguments: Arguments, fixed: tuple[Any, ...]) -> Call:
    """The engine's whole path where sampling parameters have to be applied."""
    apply = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler").apply_top_k_top_p
    # Newer versions are told that every row has a top-k, which spares them a launch.
    known = "has_topp_only_rows" in inspect.signature(apply).parameters
    more = {"has_topp_only_rows": False} if known else {}
    slots = len(logits) // len(arguments["temperature"])
    temperature, top_k, top_p = (
        arguments[name].repeat_interleave(slots) for name in ("temperature", "top_k", "top_p")
    )

    def call() -> Any:
        copy = logits.float().div_(temperature.unsqueeze(1))
        return vllm.rejection_sample(apply(copy, top_k, top_p, **more), *fixed)

    return call


def flashinfer_rival(
    sampling: Any, sets: Sequence[Arguments], batch: int, k: int, softmax: Callable[[Tensor, Tensor], Tensor]
) -> Rival:
    def call_of(number: int, arguments: Arguments) -> Call:
        # In a tensor: a graph needs them there, and eager calls spare the generator.
        seed, offset = (torch.tensor([value], device=DEVICE) for value in (number, 0))
        target, draft = arguments["target_logits"], arguments["draft_logits"]
        ids = arguments["draft_token_ids"].view(batch, k).int()
        temperature = arguments["temperature"]
        of_targets, of_drafts = temperature.repeat_interleave(k + 1), temperature.repeat_interleave(k)
        return lambda: sampling.chain_speculative_sampling(
            softmax(draft, of_drafts).view(batch, k, -1),
            ids,
            softmax(target, of_targets).view(batch, k + 1, -1),
            seed=seed,
            offset=offset,
        )

    return Rival([call_of(i, a) for i, a in enumerate(sets)], lambda out: out[2])


def torch_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    return logits.float().div_(temperature.unsqueeze(1)).softmax(-1)


def torch_sample(logits: Tensor, temperature: Tensor) -> Tensor:
    """What `multinomial` does after softmax, but for its wait, which no graph can hold."""
    probs = torch_softmax(logits, temperature)
    return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


def check(sets: Sequence[Arguments], rivals: dict[str, Rival]) -> None:
    """Exits unless the op is right on these sets, and the rivals do the same work."""
    outs = [specdec_ops.verify_chain(**a) for a in sets]
    if any(bool(out.status.any()) for out in outs):
        sys.exit("verify_chain: a status is not OK")
    on_cpu = {n: v.cpu() if isinstance(v, Tensor) else v for n, v in sets[0].items()}
    expected = specdec_ops.verify_chain(**on_cpu)
    if not outs[0].token_ids.cpu().equal(expected.token_ids):
        sys.exit("verify_chain: the tokens are not the CPU's")
    ours = torch.cat([out.num_accepted for out in outs]).float()
    for name, rival in rivals.items():
        theirs = torch.cat([rival.accepted(call()) for call in rival.calls]).float()
        # Random numbers differ: five standard errors of two means, one of which may be of fewer sets.
        error = (ours.var() * (1 / ours.numel() + 1 / theirs.numel())).sqrt()
        if not abs(ours.mean() - theirs.mean()) <= 5 * error + 1e-6:
            sys.exit(f"{name} accepts {theirs.mean():.2f} drafts a request, verify_chain {ours.mean():.2f}")


@dataclass(frozen=True)
class Bench:
    """What a run times, and how thoroughly."""

    bandwidth: float
    vllm: Any
    flashinfer: Any
    quick: bool

    def graph_us(self, calls: Sequence[Call]) -> float:
        return graph_us(calls, 3 if self.quick else 7)

    def eager_us(self, calls: Sequence[Call]) -> float:
        return eager_us(calls, 3 if self.quick else 7)

    def num_sets(self, size: int) -> int:
        rotated = ROTATED_BYTES // 3 if self.quick else ROTATED_BYTES
        # Few sets would say little of calls that one request in hundreds makes slow.
        return max(4 if self.quick else 16, min(100, rotated // size + 1))

    def ours(self, size: int, calls: Sequence[Call]) -> dict[str, float]:
        read, graph = size / self.bandwidth, self.graph_us(calls)
        return {"read": read, "graph": graph, "ratio": graph / read, "eager": self.eager_us(calls)}

    def verify_chain(self, batch: int, k: int, mode: str) -> dict[str, float]:
        size = (k + 1 + k * mode.startswith("dense")) * batch * VOCAB_SIZE * 2
        sets = [make_inputs(batch, k, mode, seed) for seed in range(self.num_sets(size))]
        # Float32 probabilities or logits are cold with fewer sets.
        fewer = sets[: max(2, len(sets) // 4)]
        rivals = {}
        if self.vllm is not None and mode.endswith("top-p"):
            rivals["vllm copy"] = vllm_rival(self.vllm, fewer, batch, k, torch.float32)
        elif self.vllm is not None and mode not in OTHER_LAWS:
            rivals["vllm"] = vllm_rival(self.vllm, sets, batch, k, torch.bfloat16)
            rivals["vllm copy"] = vllm_rival(self.vllm, fewer, batch, k, torch.float32)
        if self.flashinfer is not None and mode in ("dense", "dense, logsumexp given"):
            for name, softmax in ("torch softmax", torch_softmax), ("flashinfer", self.flashinfer.softmax):
                rivals[name] = flashinfer_rival(self.flashinfer, fewer, batch, k, softmax)
        check(sets, rivals)
        cells = self.ours(size, [lambda a=a: specdec_ops.verify_chain(**a) for a in sets])
        cells |= {name: self.graph_us(rival.calls) for name, rival in rivals.items()}
        cells |= {
            f"{name} eager": self.eager_us(rivals[name].calls)
            for name in ("vllm", "flashinfer")
            if name in rivals
        }
        if mode == "greedy" and not self.quick:
            cells["torch"] = self.graph_us([lambda a=a: a["target_logits"].argmax(-1) for a in sets])
        return cells

    def sample(self, rows: int) -> dict[str, float]:
        size = rows * VOCAB_SIZE * 2
        random = torch.Generator(DEVICE).manual_seed(0)
        sets = [
            (3 * torch.randn(rows, VOCAB_SIZE, generator=random, device=DEVICE)).bfloat16()
            for _ in range(self.num_sets(size))
        ]
        temperature = torch.full((rows,), TEMPERATURE, device=DEVICE)
        seeds, positions = torch.arange(rows, device=DEVICE), torch.arange(rows, device=DEVICE)
        rest = {"temperature": temperature, "seeds": seeds, "positions": positions}
        drawn = specdec_ops.sample(sets[0], **rest)
        expected = specdec_ops.sample(sets[0].cpu(), **{n: v.cpu() for n, v in rest.items()})
        if bool(drawn.status.any()) or not drawn.token_ids.cpu().equal(expected.token_ids):
            sys.exit("sample: the tokens are not the CPU's")
        cells = self.ours(size, [lambda x=x: specdec_ops.sample(x, **rest) for x in sets])
        if self.quick:
            return cells
        cells["torch"] = self.graph_us([lambda x=x: torch_sample(x, temperature) for x in sets])
        if self.flashinfer is not None:
            seed, offset = (torch.tensor([value], device=DEVICE) for value in (1, 0))
            draw = self.flashinfer.sampling_from_logits
            calls: list[Call] = [
                lambda x=x: draw(x.float().div_(temperature.unsqueeze(1)), seed=seed, offset=offset)
                for x in sets
            ]
            cells |= {"flashinfer": self.graph_us(calls), "flashinfer eager": self.eager_us(calls)}
        return cells


class Table:
    """Prints a row as soon as it is known, for people or as Markdown."""

    def __init__(self, columns: Sequence[str], markdown: bool) -> None:
        self._columns = columns
        self._markdown = markdown
        self._print("case", [COLUMNS[column] for column in columns])
        if markdown:
            print("|---" * (len(columns) + 1) + "|")

    def add(self, case: str, cells: dict[str, float]) -> None:
        numbers = [
            f"{cells[column]:,.{2 if column == 'ratio' else 1}f}" if column in cells else "-"
            for column in self._columns
        ]
        self._print(case, numbers)

    def _print(self, case: str, cells: list[str]) -> None:
        if self._markdown:
            print(f"| {' | '.join([case, *cells])} |", flush=True)
            return
        widths = [max(8, len(COLUMNS[column])) for column in self._columns]
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        print("  ".join([case.ljust(40), *padded]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, help="an unpacked source distribution of vLLM")
    parser.add_argument("--batch", default="1,8,64,256", help="batch sizes, of %(default)s")
    parser.add_argument("--mode", action="append", choices=MODES, help="may be given again; not given: all")
    parser.add_argument("--quick", action="store_true", help="no rivals, fewer repeats: for development")
    parser.add_argument("--markdown", action="store_true", help="the table as docs/performance.md has it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_gpu: torch sees no CUDA device here")
    batches = [int(batch) for batch in options.batch.split(",")]
    vllm = load_vllm(options.vllm) if options.vllm and not options.quick else None
    flashinfer = None if options.quick else load_flashinfer()
    bench = Bench(copy_bandwidth(), vllm, flashinfer, options.quick)

    versions = [f"torch {torch.__version__}", f"copy {bench.bandwidth / 1e3:,.0f} GB/s"]
    if vllm is not None:
        versions.insert(1, options.vllm.resolve().name)
    if flashinfer is not None:
        versions.insert(1, f"FlashInfer {importlib.import_module('flashinfer').__version__}")
    print(f"{torch.cuda.get_device_name()}, {', '.join(versions)}; bfloat16 logits, V={VOCAB_SIZE:,}")
    columns = ["read", "graph", "ratio", "eager"]
    columns += ["vllm", "vllm eager", "vllm copy"] * (vllm is not None)
    columns += ["torch softmax", "flashinfer", "flashinfer eager"] * (flashinfer is not None)
    columns += ["torch"] * (not options.quick)
    table = Table(columns, options.markdown)
    for batch, k in CASES:
        for mode in options.mode or MODES:
            if batch in batches:
                table.add(f"B={batch} k={k} {mode}", bench.verify_chain(batch, k, mode))
                torch.cuda.empty_cache()
    for rows in SAMPLE_ROWS:
        if rows in batches and not options.mode:
            table.add(f"`sample`, {rows} row{'s' * (rows > 1)}", bench.sample(rows))
            torch.cuda.empty_cache()
    if not options.quick:
        print(f"\n{NOTES}")


if __name__ == "__main__":
    main()

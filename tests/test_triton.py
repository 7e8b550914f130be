"""The Triton kernels, compiled, on a GPU: the CUDA kernels' results, graphs, syncs and compiles."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import inputs
import pytest
import random_chains
import specdec_ops
import test_row_statistics
import test_sample_law
import test_token_logprobs
import torch
from implementations import served_by
from random_chains import EXTRAS
from test_cuda import large_chain, moved
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda"
#: Of requests, how many may differ from the CUDA kernels: 1e-5 of a coin for each of its five slots, and 4e-7
#: of a row, a block or a chunk for each of the 166 boundaries between blocks, chunks and ids of a draw.
MOST_EXCUSED = 2e-4


@pytest.fixture(scope="module")
def ops() -> Any:
    pytest.importorskip("triton")
    from specdec_ops.triton import load

    names = ("verify_chain", "sample", "sample_recovered", "row_statistics", "token_logprobs")
    return types.SimpleNamespace(**{n: served_by(getattr(specdec_ops, n), load(n)) for n in names})


def differing(there: Any, here: Any, context: object) -> Tensor:
    """Which requests have other tokens; whatever else there is must agree to the digits of float64 sums."""
    differs = there.token_ids != here.token_ids
    if differs.dim() > 1:
        differs = differs.any(1)
    for name, a, b in zip(here._fields, there, here, strict=True):
        if b is None:
            assert a is None
            continue
        assert a.device.type == DEVICE and a.dtype == b.dtype and a.shape == b.shape, name
        if bool(differs.any()):
            continue
        check_values(name, a, b, context)
    return differs


def check_values(name: str, there: Tensor, here: Tensor, context: object) -> None:
    """Equal integers, and floats that agree to the digits that sums in another order leave."""
    if here.is_floating_point():
        # Float32 outputs are rounded from float64.
        bound = 1e-13 if here.dtype == torch.float64 else 2e-7
        near = (there - here).abs() <= bound * (1 + here.abs())
        same = near | (there == here) | (there.isnan() & here.isnan())
    else:
        same = there == here
    where = (~same).nonzero()[:4].tolist()
    assert bool(same.all()), f"{name} differs at {where} of {context}: {there}, {here}"


def check_rows(there: Any, here: Any, context: object) -> None:
    """All outputs of an op that draws nothing."""
    for name, a, b in zip(here._fields, there, here, strict=True):
        if b is None:
            assert a is None, name
            continue
        assert a.device.type == DEVICE and a.dtype == b.dtype and a.shape == b.shape, name
        check_values(name, a, b, context)


def in_few_dtypes(arguments: inputs.Arguments) -> inputs.Arguments:
    """Each dtype is another kernel to compile."""
    dtypes = {"target_logits": torch.bfloat16, "logits": torch.bfloat16, "draft_logits": torch.bfloat16}
    dtypes["draft_probs"] = torch.float32
    return {n: v.to(dtypes[n]) if n in dtypes else v for n, v in arguments.items()}


class Count:
    """Of requests that were compared, and those with other tokens."""

    def __init__(self) -> None:
        self.requests = self.excused = 0

    def add(self, differs: Tensor) -> None:
        self.requests += differs.numel()
        self.excused += int(differs.sum())

    def check(self) -> None:
        print(f"{self.excused} of {self.requests} requests differ")
        assert self.excused <= max(2, MOST_EXCUSED * self.requests)


@pytest.mark.parametrize("part", range(20))
def test_verify_chain_gives_the_tokens_of_the_cuda_kernels(ops: Any, part: int) -> None:
    count = Count()
    for seed in range(part * 100, part * 100 + 100):
        arguments, flags, context = random_chains.random_chain(seed)
        gap, offset = random.Random(seed).choice(((0, 0), (0, 0), (8, 8), (3, 1), (2, 2), (4, 0)))
        there = moved(in_few_dtypes(arguments), gap, offset)
        here = specdec_ops.verify_chain(**there, **flags)
        count.add(differing(ops.verify_chain(**there, **flags), here, context))
    count.check()


OPTIONS = [
    name
    for name in random_chains.OPTIONS
    if not any(word in name for word in ("fly", "block", "exact_match", "lossy"))
]


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_verify_chain_give_the_tokens_of_the_cuda_kernels(ops: Any, option: str) -> None:
    count = Count()
    for seed in range(300):
        arguments, flags, context = random_chains.random_chain_with(option, seed)
        there = moved(in_few_dtypes(arguments), *random.Random(seed).choice(((0, 0), (8, 8), (3, 1))))
        here = specdec_ops.verify_chain(**there, **flags)
        count.add(differing(ops.verify_chain(**there, **flags), here, context))
    count.check()


@pytest.mark.parametrize("filters", [False, True], ids=["whole", "filters"])
def test_sample_gives_the_tokens_of_the_cuda_kernels(ops: Any, filters: bool) -> None:
    count = Count()
    for seed in range(400):
        arguments, context = random_chains.for_sample(seed, filters=filters)
        if arguments.get("sampler") == "gumbel":
            continue
        there = moved(in_few_dtypes(arguments), *random.Random(seed).choice(((0, 0), (3, 1))))
        actual, expected = ops.sample(**there), specdec_ops.sample(**there)
        assert torch.equal(actual.thresholds, expected.thresholds), context
        count.add(differing(actual, expected, context))
    count.check()


@pytest.mark.parametrize("filters", [False, True], ids=["whole", "filters"])
def test_sample_recovered_gives_the_tokens_of_the_cuda_kernels(ops: Any, filters: bool) -> None:
    count = Count()
    for seed in range(400):
        arguments, context = random_chains.for_sample_recovered(seed, filters=filters)
        there = moved(in_few_dtypes(arguments), *((3, 1) if seed % 3 == 0 else (0, 0)))
        here = specdec_ops.sample_recovered(**there)
        count.add(differing(ops.sample_recovered(**there), here, context))
    count.check()


@pytest.mark.parametrize("flags", [{}, EXTRAS], ids=["tokens", "extras"])
def test_batches_of_real_size(ops: Any, flags: dict[str, Any]) -> None:
    count = Count()
    for batch in (1, 3, 16, 64, 256):
        for seed in range(8 if batch < 256 else 2):
            arguments = large_chain(batch, seed=seed)
            for law in ("logits", "logits and logsumexp", "probs", "one-hot"):
                if law == "logits and logsumexp":
                    scaled = arguments["draft_logits"].double() / arguments["temperature"][0]
                    arguments["draft_logsumexp"] = scaled.logsumexp(-1)
                if law == "probs":
                    arguments["draft_probs"] = scaled.softmax(-1).float()
                    del arguments["draft_logits"], arguments["draft_logsumexp"]
                if law == "one-hot":
                    del arguments["draft_probs"]
                here = specdec_ops.verify_chain(**arguments, **flags)
                there = ops.verify_chain(**arguments, **flags)
                count.add(differing(there, here, (batch, law)))
            del arguments, scaled
    count.check()


@pytest.mark.parametrize("part", range(4))
def test_row_statistics_are_those_of_the_cuda_kernels(ops: Any, part: int) -> None:
    for seed in range(part * 50, part * 50 + 50):
        there = moved(in_few_dtypes(test_row_statistics.random_arguments(seed)))
        check_rows(ops.row_statistics(**there), specdec_ops.row_statistics(**there), seed)


@pytest.mark.parametrize("part", range(4))
def test_laws_of_the_likeliest_ids_are_those_of_the_cuda_kernels(ops: Any, part: int) -> None:
    count = Count()
    for seed in range(part * 50, part * 50 + 50):
        there = moved(in_few_dtypes(test_sample_law.random_rows(seed, filters=seed % 2 == 0)))
        count.add(differing(ops.sample(**there), specdec_ops.sample(**there), seed))
    count.check()


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("law_size", [1, 20, 64])
def test_laws_of_rows_of_real_size(ops: Any, batch: int, law_size: int) -> None:
    count = Count()
    logits = large_chain(batch)["draft_logits"]
    numbers = torch.arange(len(logits), device=DEVICE)
    keys = {"seeds": numbers, "positions": numbers}
    for temperature in (0.7, 0.0):
        there = {"logits": logits, "temperature": temperature, "law_size": law_size, "draft_slot": 1, **keys}
        count.add(differing(ops.sample(**there), specdec_ops.sample(**there), (batch, law_size)))
    count.check()


@pytest.mark.parametrize("part", range(4))
def test_token_logprobs_are_those_of_the_cuda_kernels(ops: Any, part: int) -> None:
    for seed in range(part * 50, part * 50 + 50):
        there = moved(in_few_dtypes(test_token_logprobs.random_arguments(seed)))
        check_rows(ops.token_logprobs(**there), specdec_ops.token_logprobs(**there), seed)


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("top_n", [0, 1, 20, 64])
def test_token_logprobs_of_rows_of_real_size(ops: Any, batch: int, top_n: int) -> None:
    chain = large_chain(batch)
    there = {
        "logits": chain["target_logits"],
        "token_ids": specdec_ops.verify_chain(**chain).token_ids,
        "cu_num_draft_tokens": chain["cu_num_draft_tokens"],
        "top_n": top_n,
    }
    check_rows(ops.token_logprobs(**there), specdec_ops.token_logprobs(**there), batch)


@pytest.mark.parametrize("batch", [1, 64])
def test_row_statistics_of_rows_of_real_size(ops: Any, batch: int) -> None:
    chain = large_chain(batch)
    rows = torch.arange(chain["draft_logits"].shape[0], device=DEVICE)
    for indices in (rows, rows.int().flip(0)):
        there = {
            "logits": chain["target_logits"],
            "draft_logits": chain["draft_logits"],
            "row_indices": indices,
        }
        check_rows(ops.row_statistics(**there), specdec_ops.row_statistics(**there), batch)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 50, "top_p": 0.9},
        {"top_k": 50, "top_p": 0.9, "filter_order": "joint"},
        {"top_p": 0.95},
        {"top_k": 5_000},
        {"min_p": 0.05},
        {"top_k": 50, "draft_top_k": 50, "draft_top_p": 0.9},
    ],
    ids=str,
)
def test_filters_of_batches_of_real_size(ops: Any, filters: dict[str, Any]) -> None:
    count = Count()
    for batch in (1, 16, 64):
        arguments = large_chain(batch)
        here = specdec_ops.verify_chain(**arguments, **filters)
        count.add(differing(ops.verify_chain(**arguments, **filters), here, batch))
        rows = arguments["target_logits"]
        drawn = {"seeds": 1, "positions": torch.arange(rows.shape[0], device=DEVICE)}
        of_target = {name: value for name, value in filters.items() if not name.startswith("draft_")}
        actual, expected = (
            ops.sample(rows, **drawn, **of_target),
            specdec_ops.sample(rows, **drawn, **of_target),
        )
        assert torch.equal(actual.thresholds, expected.thresholds)
        count.add(differing(actual, expected, batch))
    count.check()


def test_repeated_calls_give_the_same_bits(ops: Any) -> None:
    arguments = large_chain(64)
    first = [t for t in ops.verify_chain(**arguments) if t is not None]
    for _ in range(100):
        again = [t for t in ops.verify_chain(**arguments) if t is not None]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("batch", [1, 16])
def test_graph_replays_with_new_contents(ops: Any, batch: int) -> None:
    static = large_chain(batch)
    ops.verify_chain(**static, **EXTRAS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.verify_chain(**static, **EXTRAS)
        # Memory that the op has given back is used by others in the same graph.
        scratch = torch.full((1 << 20,), 7, dtype=torch.int64, device=DEVICE)
    count = Count()
    for seed in range(1, 6):
        fresh = large_chain(batch, seed=seed)
        for name, value in fresh.items():
            if isinstance(value, Tensor):
                static[name].copy_(value)
        graph.replay()
        count.add(differing(out, specdec_ops.verify_chain(**fresh, **EXTRAS), seed))
    count.check()
    assert bool((scratch == 7).all())


@pytest.fixture
def no_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_no_call_waits_for_the_device(ops: Any, no_syncs: None) -> None:
    arguments = large_chain(4)
    ops.verify_chain(**arguments, **EXTRAS)
    filters = {"top_k": torch.full((20,), 50, device=DEVICE), "top_p": torch.full((20,), 0.9, device=DEVICE)}
    for given in ({}, filters):
        ops.sample(arguments["target_logits"], seeds=1, positions=torch.arange(20, device=DEVICE), **given)
    ops.sample_recovered(
        arguments["target_logits"][:16],
        arguments["draft_token_ids"],
        seeds=1,
        positions=torch.arange(16, device=DEVICE),
    )


def num_compiled() -> int:
    from specdec_ops.triton import _chain, _filters, _rows

    filters = (_filters.survey_rows, _filters.find_thresholds, _filters.read_kept_rows)
    kernels = (_rows.read_rows, _chain.judge_requests, *filters)
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def test_nothing_is_compiled_for_other_batches_or_arguments(ops: Any) -> None:
    vocab_size = 5000
    chain = large_chain(2, vocab_size=vocab_size)
    for filters in ({}, {"top_k": 5}):
        ops.verify_chain(**chain, **filters)
    before = num_compiled()
    for batch in (0, 1, 15, 16, 17, 256):
        for k in (1, 3, 4, 7, 16):
            chain = large_chain(max(batch, 1), k=k, vocab_size=vocab_size)
            if batch == 0:
                for name, value in chain.items():
                    if isinstance(value, Tensor):
                        chain[name] = value[: int(name == "cu_num_draft_tokens")]
            for flags in ({}, EXTRAS):
                ops.verify_chain(**chain, **flags)
            indices = torch.arange(batch, device=DEVICE, dtype=torch.int32)
            optional = {
                "request_indices": indices,
                "has_draft_law": torch.ones(batch, dtype=torch.bool, device=DEVICE),
                "draft_temperature": torch.full((batch,), 0.7, device=DEVICE),
                "accept_rates": torch.ones(k, device=DEVICE),
            }
            for name, value in optional.items():
                ops.verify_chain(**chain, **{name: value})
            if batch > 0:
                for filters in ({"top_k": 5}, {"top_p": 0.9, "draft_min_p": 0.1}, {"draft_top_k": 7}):
                    ops.verify_chain(**chain, **filters)
            ops.verify_chain(**{**chain, "draft_token_ids": chain["draft_token_ids"].int()})
            ops.verify_chain(**{**chain, "cu_num_draft_tokens": chain["cu_num_draft_tokens"].int()})
    assert num_compiled() == before


def test_counts_that_nobody_checked_stay_inside_the_tensors(ops: Any) -> None:
    chain = large_chain(4, vocab_size=1000)
    given_bonus = {
        "target_logits": chain["target_logits"][:16],
        "bonus_token_ids": torch.arange(4, device=DEVICE),
    }
    for options in ({}, given_bonus, {"accept_rates": torch.ones(40, device=DEVICE)}):
        for most in (4, 40):
            for cu in ([0, 9, 3, 99, 16], [-5, -1, 2, 3, 1 << 40], [7, 7, 7, 7, 7], [0, 99, 0, 99, 0]):
                arguments = {**chain, **options, "max_num_draft_tokens": most}
                arguments["cu_num_draft_tokens"] = torch.tensor(cu, device=DEVICE)
                ops.verify_chain(**arguments, **EXTRAS)
                torch.cuda.synchronize()


def test_indices_that_nobody_checked_stay_inside_the_tensors(ops: Any) -> None:
    kept, _ = inputs.entries(
        "logits", indices=[6, 2, 5, 0], counts=[2, 0, 4, 1], max_requests=7, k=4, spoiled=False
    )
    there = moved(kept)
    there["request_indices"] = torch.tensor([99, -1, -(2**40), 2**40], device=DEVICE)
    out = ops.verify_chain(**there, **EXTRAS)
    there["request_indices"] = torch.tensor([6, 1, 1, 6], device=DEVICE)
    assert float(kept["temperature"][1]) == 0.0
    held = specdec_ops.verify_chain(**there, **EXTRAS)
    assert not bool(differing(out, held, "as if greedy, or the last").any())


@pytest.mark.parametrize("check", ["warm_up_compiles_all", "first_calls", "compiled_by_torch"])
def test_in_a_process_without_native_kernels(check: str) -> None:
    tests = Path(__file__).parent
    path = os.pathsep.join((str(Path(specdec_ops.__file__).parents[1]), str(tests)))
    done = subprocess.run(
        [sys.executable, tests / "triton_process.py", check],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]

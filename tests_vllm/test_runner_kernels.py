"""The runner's bookkeeping against vLLM's own Triton kernels, which Triton's interpreter runs on the CPU.

vLLM uses no Triton without a driver, so its kernels and the functions that launch them are taken from its
source files alone. VLLM_SOURCES may name further source trees, as of other versions.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import os
import random
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from specdec_ops.integrations.vllm import runner
from torch import Tensor

SEEDS = range(40)
VOCAB_SIZE = 12
MAX_MODEL_LEN = 64


def source_trees() -> list[Path]:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    trees = [Path(spec.origin).parents[1]]
    return trees + [Path(tree) for tree in os.environ.get("VLLM_SOURCES", "").split(os.pathsep) if tree]


def functions_of(source: str, names: set[str]) -> Iterator[str]:
    """The source of the functions of those names and of the kernels that they launch."""
    wanted = names | {f"_{name}_kernel" for name in names}
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in wanted:
            first = min(part.lineno for part in (node, *node.decorator_list))
            yield "\n".join(lines[first - 1 : node.end_lineno])


@pytest.fixture(scope="module", params=source_trees(), ids=lambda tree: tree.name)
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[types.ModuleType]:
    """A module with vLLM's functions, whose kernels are interpreted."""
    parts = ["import torch", "import triton", "import triton.language as tl"]
    owners = itertools.groupby(sorted(runner.FUNCTIONS), key=lambda name: name.rpartition(".")[0])
    for owner, names in owners:
        source = (request.param / f"{owner.replace('.', '/')}.py").read_text()
        parts += functions_of(source, {name.rpartition(".")[2] for name in names})
    path = tmp_path_factory.mktemp("kernels") / "runner_kernels.py"
    path.write_text("\n\n\n".join(parts) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec = importlib.util.spec_from_file_location("runner_kernels", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


class Step:
    """A random step, with the shapes and dtypes of the engine."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        rows, size, k = 8, rng.randint(1, 8), rng.randint(1, 5)
        self.rng, self.size, self.k, self.num_new_tokens = rng, size, k, rng.choice([0, 1, 1])
        num_logits = [rng.randint(0, k) + self.num_new_tokens for _ in range(size)]
        query_lens = [count + rng.choice([0, 0, rng.randint(0, 9)]) for count in num_logits]
        self.idx_mapping = torch.tensor(rng.sample(range(rows), size))
        self.cu_num_logits = totals(num_logits)
        self.query_start_loc = torch.cat(
            [totals(query_lens), torch.full((rng.randint(0, 2),), sum(query_lens), dtype=torch.int32)]
        )
        self.num_logits, self.num_tokens = sum(num_logits), sum(query_lens)
        self.num_computed_tokens = self.ints(0, 20, rows)
        # Most steps begin or end near the end of the prompt.
        self.prefill_len = (self.num_computed_tokens + self.ints(-2, 8, rows)).clamp(min=0)
        self.last_sampled_tokens = self.ints(0, VOCAB_SIZE - 1, rows, 1, dtype=torch.int64)
        self.draft_tokens = self.ints(0, VOCAB_SIZE - 1, rows, k, dtype=torch.int64)
        self.input_ids = self.ints(0, VOCAB_SIZE - 1, self.num_tokens + 3)
        self.positions = torch.full((self.num_tokens + 3,), -9)
        self.seq_lens = torch.full((rows,), -9, dtype=torch.int32)
        runner.prepare_pos_seq_lens(
            self.idx_mapping, self.query_start_loc, self.num_computed_tokens, self.positions, self.seq_lens
        )
        self.num_sampled = torch.tensor([rng.randint(0, count) for count in num_logits], dtype=torch.int32)
        self.sampled_tokens = self.ints(0, VOCAB_SIZE - 1, size, k + 1, dtype=torch.int64)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        generator = torch.Generator().manual_seed(self.rng.randrange(2**32))
        return torch.randint(low, high + 1, shape, dtype=dtype, generator=generator)


def totals(counts: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def check_against(engine: types.ModuleType, name: str, *arguments: Any) -> None:
    """Both functions return the same and leave the same in their arguments."""
    theirs = [value.clone() if isinstance(value, Tensor) else value for value in arguments]
    ours = [value.clone() if isinstance(value, Tensor) else value for value in arguments]
    want = getattr(engine, name)(*theirs)
    got = getattr(runner, name)(*ours)
    assert_same(name, got, want)
    for parameter, left, right in zip(
        inspect.signature(getattr(runner, name)).parameters, ours, theirs, strict=False
    ):
        assert_same(f"{name}: {parameter}", left, right)


def assert_same(what: str, got: Any, want: Any) -> None:
    assert type(got) is type(want), what
    if isinstance(want, tuple):
        assert len(got) == len(want), what
        for left, right in zip(got, want, strict=True):
            assert_same(what, left, right)
    elif isinstance(want, Tensor):
        assert got.dtype == want.dtype, what
        assert torch.equal(got, want), what
    else:
        assert got == want, what


@pytest.mark.parametrize("seed", SEEDS)
def test_prepare_pos_seq_lens(engine: types.ModuleType, seed: int) -> None:
    step = Step(seed)
    check_against(
        engine,
        "prepare_pos_seq_lens",
        step.idx_mapping,
        step.query_start_loc,
        step.num_computed_tokens,
        torch.full_like(step.positions, -9),
        torch.full_like(step.seq_lens, -9),
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_expand_idx_mapping(engine: types.ModuleType, seed: int) -> None:
    step = Step(seed)
    arguments = (step.idx_mapping, step.num_logits, step.cu_num_logits, step.k + 1)
    check_against(engine, "expand_idx_mapping", *arguments)


@pytest.mark.parametrize("seed", SEEDS)
def test_combine_sampled_and_draft_tokens(engine: types.ModuleType, seed: int) -> None:
    step = Step(seed)
    check_against(
        engine,
        "combine_sampled_and_draft_tokens",
        step.input_ids,
        step.idx_mapping,
        step.last_sampled_tokens,
        step.query_start_loc,
        step.seq_lens,
        step.prefill_len,
        step.draft_tokens,
        step.cu_num_logits,
        step.num_logits,
        step.num_new_tokens,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_gather_draft_sampled(engine: types.ModuleType, seed: int) -> None:
    step = Step(seed)
    expanded_idx_mapping, expanded_local_pos = runner.expand_idx_mapping(
        step.idx_mapping, step.num_logits, step.cu_num_logits, step.k + 1
    )
    logits_indices = runner.combine_sampled_and_draft_tokens(
        step.input_ids,
        step.idx_mapping,
        step.last_sampled_tokens,
        step.query_start_loc,
        step.seq_lens,
        step.prefill_len,
        step.draft_tokens,
        step.cu_num_logits,
        step.num_logits,
        step.num_new_tokens,
    )
    check_against(
        engine,
        "gather_draft_sampled",
        step.input_ids,
        step.positions,
        logits_indices,
        expanded_idx_mapping,
        expanded_local_pos,
        step.prefill_len,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_get_num_sampled_and_rejected(engine: types.ModuleType, seed: int) -> None:
    step = Step(seed)
    check_against(
        engine,
        "get_num_sampled_and_rejected",
        step.num_sampled,
        step.seq_lens,
        step.cu_num_logits,
        step.idx_mapping,
        step.prefill_len,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_post_update(engine: types.ModuleType, seed: int) -> None:
    """Some requests were finished meanwhile; from 0.33 on with drafts that another rank sends."""
    step = Step(seed)
    rng, rows = step.rng, len(step.prefill_len)
    for request in range(step.size):
        if rng.random() < 0.2:
            step.idx_mapping[request] = -1
    arguments = [
        step.idx_mapping,
        step.num_computed_tokens,
        step.last_sampled_tokens,
        rng.choice([None, step.ints(0, 3, rows, VOCAB_SIZE)]),
        step.sampled_tokens,
        step.num_sampled,
        step.ints(0, step.k, step.size),
        rng.choice([None, step.query_start_loc]),
        step.ints(0, VOCAB_SIZE - 1, rows, MAX_MODEL_LEN),
        step.ints(0, 40, rows),
    ]
    if "draft_tokens_out" in inspect.signature(engine.post_update).parameters:
        new_drafts = step.ints(0, VOCAB_SIZE - 1, step.size, step.k, dtype=torch.int64)
        arguments += [rng.choice([None, new_drafts]), step.draft_tokens]
    check_against(engine, "post_update", *arguments)


@pytest.mark.parametrize("seed", SEEDS)
def test_post_update_num_computed_tokens(engine: types.ModuleType, seed: int) -> None:
    step = Step(seed)
    arguments = (step.idx_mapping, step.num_computed_tokens, step.query_start_loc)
    check_against(engine, "post_update_num_computed_tokens", *arguments)


@pytest.mark.parametrize("name", sorted(runner.FUNCTIONS))
def test_ours_take_what_the_engine_passes(engine: types.ModuleType, name: str) -> None:
    function = name.rpartition(".")[2]
    theirs = inspect.signature(getattr(engine, function)).parameters.values()
    ours = inspect.signature(runner.FUNCTIONS[name]).parameters.values()
    shared = list(zip(ours, theirs, strict=False))
    assert [(a.name, a.default, a.kind) for a, _ in shared] == [
        (b.name, b.default, b.kind) for _, b in shared
    ]
    assert len(ours) >= len(theirs)
    assert all(extra.default is None for extra in list(ours)[len(theirs) :])

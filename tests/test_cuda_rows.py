"""The ops around verification on a GPU: the CPU's results to the bit, graphs, no waiting, one device."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import margins
import pytest
import specdec_ops
import test_draft_vocabulary
import test_logit_processors
import test_row_statistics
import test_token_logprobs
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda"
Arguments = dict[str, Any]


def plan_arguments(seed: int) -> Arguments:
    choice, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    counts = [choice.choice((0, 1, 3, 8)) for _ in range(choice.choice((1, 9, 500)))]
    levels = choice.choice((16, 1000))  # few of them make ties
    arguments: Arguments = {
        "accept_probs": (torch.rand(sum(counts), generator=draw) * levels).round() / levels,
        "cu_num_draft_tokens": torch.tensor([0, *counts]).cumsum(0),
        "budget": choice.choice((0, 5, 700, torch.tensor(100))),
    }
    if choice.random() < 0.5:
        arguments["step_costs"] = torch.arange(len(counts) + 900).div(64, rounding_mode="floor").mul(0.01) + 1
    return arguments


def map_arguments(seed: int) -> Arguments:
    draw = torch.Generator().manual_seed(seed)
    return {
        "draft_token_ids": torch.randint(-2, 70, (seed * 40, 3), generator=draw),
        "d2t": torch.randint(0, 900, (64,), generator=draw, dtype=torch.int32),
        "offsets": seed % 2 == 1,
    }


#: Of each op, arguments by a seed.
RANDOM_ARGUMENTS: dict[str, Callable[[int], Arguments]] = {
    "apply_logit_processors_": test_logit_processors.random_arguments,
    "expand_draft_logits_": test_draft_vocabulary.random_arguments,
    "map_draft_tokens": map_arguments,
    "plan_verification": plan_arguments,
    "row_statistics": test_row_statistics.random_arguments,
    "token_logprobs": test_token_logprobs.random_arguments,
}
every_op = pytest.mark.parametrize("name", RANDOM_ARGUMENTS)


def moved(arguments: Arguments) -> Arguments:
    return {
        name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in arguments.items()
    }


def results(name: str, arguments: Arguments) -> list[Tensor]:
    """What an op returns, or the arguments that it has written to."""
    returned = getattr(specdec_ops, name)(**arguments)
    if returned is None:
        return [arguments[key] for key in ("logits", "expanded") if key in arguments]
    outputs = returned if isinstance(returned, tuple) else (returned,)
    return [value for value in outputs if value is not None]


def assert_same(there: list[Tensor], here: list[Tensor], context: object) -> None:
    for a, b in zip(there, here, strict=True):
        assert a.device.type == DEVICE
        assert margins.same_bits(a.cpu(), b), context


@every_op
def test_results_are_those_of_the_cpu(name: str) -> None:
    for seed in range(200):
        there = moved(RANDOM_ARGUMENTS[name](seed))
        assert_same(results(name, there), results(name, RANDOM_ARGUMENTS[name](seed)), seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_real_size(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(20, 151_936, generator=draw)).to(dtype)
    draft = (logits.float() + torch.randn(20, 151_936, generator=draw)).to(dtype)
    history = torch.randint(0, 151_936, (5, 3000), generator=draw)
    calls: list[tuple[str, Arguments]] = [
        ("row_statistics", {"logits": logits, "draft_logits": draft, "temperature": 0.8}),
        ("token_logprobs", {"logits": logits, "token_ids": history[0, :20], "top_n": 64}),
        (
            "expand_draft_logits_",
            {
                "draft_logits": draft[:, :32_000],
                "d2t": torch.randint(0, 151_936, (32_000,), generator=draw),
                "expanded": torch.zeros_like(logits),
            },
        ),
        (
            "apply_logit_processors_",
            {
                "logits": logits.clone(),
                "draft_token_ids": history[1, :15],
                "cu_num_draft_tokens": torch.arange(6) * 3,
                "repetition_penalty": 1.1,
                "frequency_penalty": 0.3,
                "output_token_ids": history,
                "output_lens": torch.full((5,), 3000),
                "allowed_token_ids": history[:, :2000],
            },
        ),
    ]
    for name, arguments in calls:
        there = moved(arguments)
        assert_same(results(name, there), results(name, arguments), name)


@every_op
def test_graphs_replay_on_new_values(name: str) -> None:
    for seed in range(5):
        static, fresh = moved(RANDOM_ARGUMENTS[name](seed)), moved(RANDOM_ARGUMENTS[name](seed))
        for value in static.values():
            if isinstance(value, Tensor):
                value.zero_()
        results(name, static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = results(name, static)
        for key, value in fresh.items():
            if isinstance(value, Tensor):
                static[key].copy_(value)
        graph.replay()
        assert_same(out, results(name, RANDOM_ARGUMENTS[name](seed)), seed)


@every_op
def test_nothing_waits_for_the_device(name: str) -> None:
    there = moved(RANDOM_ARGUMENTS[name](3))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results(name, there)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@every_op
def test_every_tensor_must_be_on_the_device(name: str) -> None:
    for seed in range(3):
        here = RANDOM_ARGUMENTS[name](seed)
        there = moved(here)
        first = next(iter(there))
        for key, value in here.items():
            if isinstance(value, Tensor) and key != first:
                with pytest.raises(RuntimeError, match=rf"^{name}: \w+ must be on the device of the other"):
                    results(name, {**there, key: value})

"""What is replaced on a GPU against vLLM's own Triton kernels there; see tools/gpu_vllm.sh.

The cases are those of the tests on the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import as_gpu_worker  # noqa: F401  it makes vLLM importable
import pytest
import test_forward as forward
import test_runner_kernels as cases
import torch
import vllm.v1.sample.rejection_sampler as engine_module
from specdec_ops.integrations.vllm import _rejection_sampler, _report, runner
from test_jit_warmup import *  # noqa: F403
from test_runner_kernels import *  # noqa: F403
from torch import Tensor
from vllm.v1.sample import sampler as sampler_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def stock(name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(owner), attribute).replaces


@pytest.fixture(scope="module")
def engine() -> types.SimpleNamespace:
    """vLLM's own functions."""
    return types.SimpleNamespace(**{name.rpartition(".")[2]: stock(name) for name in runner.FUNCTIONS})


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    check = cases.check_against

    def check_on_device(engine: Any, name: str, *arguments: Any) -> None:
        moved = [each.to(DEVICE) if isinstance(each, Tensor) else each for each in arguments]
        check(engine, name, *moved)

    monkeypatch.setattr(cases, "check_against", check_on_device)


@contextlib.contextmanager
def waiting_is_an_error(apply: bool) -> Iterator[None]:
    if apply:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if apply:
            torch.cuda.set_sync_debug_mode("default")


FEATURES: dict[str, Callable[[int], dict[str, Any]]] = {
    "none": lambda batch: {},
    "filters": lambda batch: forward.random_filters(batch, seed=2),
    "generators": lambda batch: {"generators": {1: torch.Generator(DEVICE).manual_seed(1)}},
    "synthetic": lambda batch: {},
    "block": lambda batch: forward.random_filters(batch, seed=2),
    "logprobs": lambda batch: {"max_num_logprobs": 2},
    **{
        name: forward.GREEDY_FEATURES[name]
        for name in ("penalties", "allowed ids", "bad words", "min tokens")
    },
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("temperature", [[0.0], [0.8], [0.0, 0.7, 1.0]])
def test_forward_gives_the_tokens_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, temperature: list[float], feature: str
) -> None:
    """The older runner's sampler, given the same seeds on both devices."""
    monkeypatch.setattr(
        _rejection_sampler, "_draw_seeds", lambda _, batch, device: torch.arange(batch, device=device) * 7 + 1
    )
    # Which kernels truncate is the engine's choice for its platform, and none is called here.
    monkeypatch.setattr(sampler_module, "TopKTopPSampler", lambda *_: None)
    batch = 6
    drafts = forward.ragged(batch, seed=3)
    logits = forward.rows(drafts)
    law = torch.rand(sum(map(len, drafts)), forward.VOCAB_SIZE).softmax(1) if feature == "block" else None
    outputs = []
    for device in ("cpu", DEVICE):

        def moved(value: Any, device: str = device) -> Any:
            changes = {
                field.name: each.to(device)
                for field in dataclasses.fields(value)
                if isinstance(each := getattr(value, field.name), Tensor)
            }
            return dataclasses.replace(value, **changes)

        sampler = engine_module.RejectionSampler(sampler_module.Sampler())
        if feature == "synthetic":
            sampler.synthetic_mode = True
            sampler.synthetic_conditional_rates = torch.full((3,), 0.5, device=device)
        sampler.use_block_verification = feature == "block"
        torch.manual_seed(0)
        metadata = forward.sampling((temperature * batch)[:batch], **FEATURES[feature](batch))
        if metadata.all_greedy:
            metadata.top_k = metadata.top_p = None
        calls = _report.calls["RejectionSampler.forward"]
        probs = None if law is None else law.to(device)
        rows = logits.to(device, copy=True)
        arguments = moved(forward.spec_decode(drafts)), probs, rows, moved(metadata)
        with waiting_is_an_error(device == "cuda" and feature != "logprobs"):
            output = sampler.forward(*arguments)
        assert _report.calls["RejectionSampler.forward"] == calls + 1
        assert output.sampled_token_ids.device.type == device
        outputs.append(output)
    on_cpu, there = outputs
    assert on_cpu.sampled_token_ids.tolist() == there.sampled_token_ids.tolist()
    if feature == "logprobs":
        torch.testing.assert_close(on_cpu.logprobs_tensors.logprobs, there.logprobs_tensors.logprobs.cpu())

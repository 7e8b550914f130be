"""What is replaced on a GPU against vLLM's own Triton kernels there; see tools/gpu_vllm.sh.

The cases are those of the tests on the CPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import types
from collections.abc import Iterator
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
from vllm.v1.sample.ops import topk_topp_sampler

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


@pytest.mark.parametrize("feature", ["none", "top_k", "generators", "synthetic", "logprobs"])
@pytest.mark.parametrize("temperature", [[0.0], [0.8], [0.0, 0.7, 1.0]])
def test_forward_gives_the_tokens_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, temperature: list[float], feature: str
) -> None:
    """The older runner's sampler, given the same seeds on both devices."""
    monkeypatch.setattr(
        _rejection_sampler, "_draw_seeds", lambda _, batch, device: torch.arange(batch, device=device) * 7 + 1
    )
    # Which kernels truncate is the engine's choice for its platform, and both devices are asked here.
    monkeypatch.setattr(sampler_module, "TopKTopPSampler", lambda *_: None)
    monkeypatch.setattr(engine_module, "apply_top_k_top_p", topk_topp_sampler.apply_top_k_top_p_pytorch)
    batch = 6
    drafts = forward.ragged(batch, seed=3)
    logits = forward.rows(drafts)
    outputs = []
    for device in ("cpu", DEVICE):

        def moved(value: Any, device: str = device) -> Any:
            changes = {
                field.name: each.to(device)
                for field in dataclasses.fields(value)
                if isinstance(each := getattr(value, field.name), Tensor)
            }
            return dataclasses.replace(value, **changes)

        more: dict[str, Any] = {}
        if feature == "top_k":
            more = {"top_k": torch.full((batch,), 4, dtype=torch.int32)}
        elif feature == "generators":
            more = {"generators": {1: torch.Generator(device).manual_seed(1)}}
        elif feature == "logprobs":
            more = {"max_num_logprobs": 2}
        sampler = engine_module.RejectionSampler(sampler_module.Sampler())
        if feature == "synthetic":
            sampler.synthetic_mode = True
            sampler.synthetic_conditional_rates = torch.full((3,), 0.5, device=device)
        metadata = forward.sampling((temperature * batch)[:batch], **more)
        calls = _report.calls["RejectionSampler.forward"]
        arguments = moved(forward.spec_decode(drafts)), None, logits.to(device), moved(metadata)
        with waiting_is_an_error(device == "cuda" and feature in ("none", "generators", "synthetic")):
            output = sampler.forward(*arguments)
        assert _report.calls["RejectionSampler.forward"] == calls + 1
        assert output.sampled_token_ids.device.type == device
        outputs.append(output)
    on_cpu, there = outputs
    assert on_cpu.sampled_token_ids.tolist() == there.sampled_token_ids.tolist()
    if feature == "logprobs":
        torch.testing.assert_close(on_cpu.logprobs_tensors.logprobs, there.logprobs_tensors.logprobs.cpu())

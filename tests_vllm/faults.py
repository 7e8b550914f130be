"""Looks for each fault of stock vLLM on CPU and prints which are there, as JSON; SPECDEC_OPS_VLLM decides."""

from __future__ import annotations

import json
import types
from typing import Any

import torch
import vllm.v1.sample.rejection_sampler as sampler
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.v1.sample.sampler import Sampler

INT32_MAX = torch.iinfo(torch.int32).max


def metadata(**more: Any) -> types.SimpleNamespace:
    """As much of a SamplingMetadata as the functions here read: one request at temperature 1."""
    temperature = torch.ones(1)
    plain = {"all_greedy": False, "all_random": True, "temperature": temperature, "generators": {}}
    return types.SimpleNamespace(**{**plain, "top_k": None, "top_p": None, **more})


def expand_does_not_write_float32() -> bool:
    cu_num_tokens = torch.tensor([2, 3], dtype=torch.int32)
    return not sampler.expand_batch_to_tokens(torch.tensor([0.5, 0.7]), cu_num_tokens, 3).equal(
        torch.tensor([0.5, 0.5, 0.7])
    )


def expand_does_not_write_int32() -> bool:
    cu_num_tokens = torch.tensor([2, 3], dtype=torch.int32)
    values = torch.tensor([5, 7], dtype=torch.int32)
    expanded = sampler.expand_batch_to_tokens(values, cu_num_tokens, 3)
    return not expanded.equal(torch.tensor([5, 5, 7], dtype=torch.int32))


def top_k_without_top_p_raises() -> bool:
    top_k = torch.tensor([5], dtype=torch.int32)
    cu_num_draft_tokens = torch.tensor([2], dtype=torch.int32)
    try:
        sampler.apply_sampling_constraints(torch.randn(2, 10), cu_num_draft_tokens, metadata(top_k=top_k))
    except (IndexError, RuntimeError):
        return True
    return False


def draft_of_minus_one_is_accepted() -> bool:
    # The row of the second draft, read in column -1, is the last entry of the first row, which is 1.
    target_probs = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]])
    target_logits = target_probs.log()
    tokens = sampler.rejection_sample(
        torch.tensor([3, -1], dtype=torch.int32),
        [2],
        2,
        torch.tensor([2], dtype=torch.int32),
        None,
        target_logits,
        torch.tensor([[0]]),
        metadata(),
    )
    assert tokens[0, 0] == 3
    return tokens.tolist() != [[3, 2, -1]]


def synthetic_acceptance_is_refused() -> bool:
    arguments = (
        torch.tensor([1], dtype=torch.int32),
        [1],
        1,
        torch.tensor([1], dtype=torch.int32),
        None,
        torch.randn(1, 4),
        torch.tensor([[0]]),
        metadata(),
    )
    rates = torch.ones(1)
    try:
        tokens = sampler.rejection_sample(*arguments, synthetic_mode=True, synthetic_conditional_rates=rates)
    except AssertionError:
        return True
    return tokens.tolist() != [[1, 0]]


def fly_is_refused() -> bool:
    config = types.SimpleNamespace(
        rejection_sample_method="fly",
        num_speculative_tokens=3,
        fly_window_size=1,
        fly_entropy_threshold=0.3,
        fly_entropy_top_k=3,
    )
    try:
        sampler.RejectionSampler(Sampler(), config, torch.device("cpu"))
    except NotImplementedError:
        return True
    return False


def main() -> None:
    load_general_plugins()
    current_platform.register_triton_kernel_overrides()
    # Unwritten memory reads as NaN or as the largest integer.
    torch.use_deterministic_algorithms(True)
    faults = [
        expand_does_not_write_float32,
        expand_does_not_write_int32,
        top_k_without_top_p_raises,
        draft_of_minus_one_is_accepted,
        synthetic_acceptance_is_refused,
    ]
    if hasattr(sampler, "compute_fly_entropy"):
        faults.append(fly_is_refused)
    print(json.dumps({fault.__name__: fault() for fault in faults}))


if __name__ == "__main__":
    main()

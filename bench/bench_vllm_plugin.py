"""vLLM's ``RejectionSampler.forward`` with the plug-in, and as it is without."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import _vllm
import pytest
import torch
from _cases import ACCEPTANCE, PLUGIN, PLUGIN_FILTERS, Case, Inputs
from _interleave import Call
from _suite import OURS, Calls, Suite
from bench_filters import TOP_K, TOP_P, cut


def check(sets: Sequence[Inputs], calls: Calls) -> Mapping[str, float]:
    """Greedy tokens agree; sampled ones of the plug-in are accepted as often as the laws say.

    The acceptance of vLLM's own is reported alone: see the fault in README.md.
    """
    case = sets[0].case
    facts = {}
    for name, of_sets in calls.items():
        tokens = torch.cat([call().sampled_token_ids for call in of_sets])
        accepted = (tokens >= 0).sum(dim=1) - 1
        judged = (accepted + 1).clamp(max=case.num_drafts).sum()
        facts[name] = float(accepted.sum() / judged)
        if case.greedy:
            assert torch.equal(tokens, torch.cat([call().sampled_token_ids for call in calls[OURS]])), name
        elif name == OURS:
            error = math.sqrt(ACCEPTANCE * (1 - ACCEPTANCE) / float(judged))
            assert abs(facts[name] - ACCEPTANCE) < 6 * error, name
    return facts


def filtered(inputs: Inputs) -> Call:
    return _vllm.plugin_forward(inputs, TOP_K, TOP_P)


def vllm_filtered(inputs: Inputs) -> Call:
    return _vllm.filtered_forward(inputs, TOP_K, TOP_P)


def check_filtered(sets: Sequence[Inputs], calls: Calls) -> Mapping[str, float]:
    """Tokens are those without filters of rows that were cut before; vLLM accepts as many."""
    inputs = sets[0]
    rows = cut(inputs.target_logits, float(inputs.temperature[0]))
    tokens = []
    for call in (_vllm.plugin_forward(dataclasses.replace(inputs, target_logits=rows)), filtered(inputs)):
        torch.manual_seed(0)
        tokens.append(call().sampled_token_ids)
    assert torch.equal(*tokens)
    facts, judged = {}, 0
    for name, of_sets in calls.items():
        accepted = torch.cat([(call().sampled_token_ids >= 0).sum(dim=1) - 1 for call in of_sets])
        judged = int((accepted + 1).clamp(max=inputs.case.num_drafts).sum())
        facts[name] = float(accepted.sum() / judged)
    assert abs(facts[OURS] - facts["vllm"]) < 6 * math.sqrt(0.5 / judged)
    return facts


SUITE = Suite(
    name="vllm-forward",
    cases=PLUGIN,
    implementations={OURS: _vllm.plugin_forward, "vllm": _vllm.forward},
    check=check,
)


FILTERED = Suite(
    name="vllm-forward-filtered",
    cases=PLUGIN_FILTERS,
    implementations={OURS: filtered, "vllm": vllm_filtered},
    check=check_filtered,
)


@pytest.mark.parametrize(("case", "implementation"), SUITE.parameters() if _vllm.present() else (), ids=str)
def test_vllm_plugin(
    case: Case, implementation: str, side_by_side: Callable[[Suite, Case, str], None]
) -> None:
    side_by_side(SUITE, case, implementation)


@pytest.mark.parametrize(
    ("case", "implementation"), FILTERED.parameters() if _vllm.present() else (), ids=str
)
def test_vllm_plugin_with_filters(
    case: Case, implementation: str, side_by_side: Callable[[Suite, Case, str], None]
) -> None:
    side_by_side(FILTERED, case, implementation)

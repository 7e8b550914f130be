"""vLLM's ``RejectionSampler.forward`` with the plug-in, and as it is without."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import _vllm
import pytest
import torch
from _cases import ACCEPTANCE, PLUGIN, Case, Inputs
from _suite import OURS, Calls, Suite


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


SUITE = Suite(
    name="vllm-forward",
    cases=PLUGIN,
    implementations={OURS: _vllm.plugin_forward, "vllm": _vllm.forward},
    check=check,
)


@pytest.mark.parametrize(("case", "implementation"), SUITE.parameters() if _vllm.present() else (), ids=str)
def test_vllm_plugin(
    case: Case, implementation: str, side_by_side: Callable[[Suite, Case, str], None]
) -> None:
    side_by_side(SUITE, case, implementation)

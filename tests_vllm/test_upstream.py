"""vLLM's own test files, on CPU and with the plug-in: every case passes and none is skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from jobs import UpstreamRun
from upstream import VERSIONS

Result = Callable[[UpstreamRun], dict[str, Any]]

SAMPLER = ("tests/v1/sample/test_rejection_sampler.py",)
SAMPLER_CASES = {"0.32.0": 75, "0.33.0": 82}

#: Files below tests/v1/spec_decode that need no GPU and no checkpoint, with their cases.
DRAFTING = {
    "test_eagle": 30,
    "test_eagle_step_kernel": 3,
    "test_eagle_draft_attn_metadata": 5,
    "test_llm_base_proposer": 3,
    "test_llm_base_proposer_sampling": 4,
    "test_ngram": 2,
    "test_request_acceptance": 11,
    "test_synthetic_rejection_sampler_utils": 9,
}
DRAFTING_FILES = tuple(f"tests/v1/spec_decode/{name}.py" for name in DRAFTING)


def sampler_run(version: str, **options: bool) -> UpstreamRun:
    return UpstreamRun(version, SAMPLER, stale_memory_is_nan=True, **options)


@pytest.mark.parametrize("job", [sampler_run(v) for v in VERSIONS], ids=VERSIONS)
def test_rejection_sampler(job: UpstreamRun, result_of: Result) -> None:
    result = result_of(job)
    assert {case: outcome for case, outcome in result["cases"].items() if outcome != "passed"} == {}
    assert len(result["cases"]) == SAMPLER_CASES[job.version]
    assert result["calls"] > 0


@pytest.mark.parametrize("job", [UpstreamRun(v, DRAFTING_FILES) for v in VERSIONS], ids=VERSIONS)
def test_preparation_of_drafts(job: UpstreamRun, result_of: Result) -> None:
    cases = result_of(job)["cases"]
    assert {case: outcome for case, outcome in cases.items() if outcome != "passed"} == {}
    counts = {name: sum(case.startswith(f"{name}::") for case in cases) for name in DRAFTING}
    assert counts == DRAFTING

"""The engine on CPU, end to end: what speculative decoding emits is what plain decoding does."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from engine_run import GREEDY, LAWS, NUM_DRAFT_TOKENS, NUM_SAMPLES, NUM_SEEDED, NUM_TOKENS, SYNTHETIC_RATES
from jobs import EngineRun
from upstream import VERSIONS

from tests.chi_square import upper_gamma

Result = Callable[[EngineRun], dict[str, Any]]

#: Exact modes: what they emit follows the target's law.
MODES = ("n-gram", "draft model", "draft model, sampled drafts", "draft model, block", "EAGLE")
ENGINES = [EngineRun(version, mode) for version in VERSIONS for mode in MODES]
#: Accepts more than the target's law allows, by design.
SYNTHETIC = [EngineRun(version, "draft model, synthetic", ("greedy", "sampled")) for version in VERSIONS]
FLY = EngineRun("0.33.0", "draft model, FLy", ("greedy", "sampled"))
TARGET_AS_DRAFT = EngineRun("0.32.0", "target as draft", ("unconstrained",))
MULTIPROCESSING = EngineRun("0.32.0", "EAGLE", ("greedy", "sampled"), multiprocessing=True)
OFF = EngineRun("0.32.0", "draft model", ("greedy", "sampled"), plugin=False)

#: How improbable the samples may be. Seeds are fixed; all comparisons together number a few hundred.
P_VALUE = 1e-5
FORWARD = "RejectionSampler.forward"


def name_of(value: object) -> str | None:
    return f"{value.version} {value.mode}" if isinstance(value, EngineRun) else None


engines = pytest.mark.parametrize("job", ENGINES, ids=name_of)


def p_value(ours: Sequence[object], theirs: Sequence[object]) -> float:
    """Of the chi-square test that two samples come from one law; what is rare is pooled."""
    counts = [Counter(sample) for sample in (ours, theirs)]
    table = np.array([[count[cell] for cell in sorted(set(ours) | set(theirs))] for count in counts], float)
    large = table.sum(axis=0) >= 20
    table = np.column_stack([table[:, large], table[:, ~large].sum(axis=1)])
    table = table[:, table.sum(axis=0) > 0]
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    degrees = table.shape[1] - 1
    return upper_gamma(degrees / 2, float(((table - expected) ** 2 / expected).sum()) / 2) if degrees else 1.0


def p_values(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, float]:
    """Of each position that a draft can fill, and of each pair of positions beside each other."""
    parts = [slice(t, t + 1) for t in range(1, NUM_TOKENS)] + [slice(t, t + 2) for t in range(NUM_TOKENS - 1)]
    return {
        f"tokens {part.start}..{part.stop - 1}": p_value(
            [tuple(sample[part]) for sample in ours], [tuple(sample[part]) for sample in theirs]
        )
        for part in parts
    }


def acceptance_length(counters: dict[str, Any]) -> float:
    return 1 + counters["num_accepted_tokens"] / counters["num_drafts"]


@engines
def test_the_plugin_did_the_work(job: EngineRun, result_of: Result) -> None:
    report = result_of(job)["plug-in"]
    assert report["calls"][FORWARD] > 0
    assert report["handed over"] == {}


@engines
@pytest.mark.parametrize("request_kind", GREEDY)
def test_greedy_text_is_that_of_plain_decoding(request_kind: str, job: EngineRun, result_of: Result) -> None:
    ours, theirs = (result_of(each)["greedy"][request_kind] for each in (job, job.plain()))
    assert ours["token_ids"] == theirs["token_ids"]


@engines
def test_logprobs_are_those_of_plain_decoding(job: EngineRun, result_of: Result) -> None:
    ours, theirs = (result_of(each)["greedy"]["logprobs"]["logprobs"] for each in (job, job.plain()))
    for our_steps, their_steps in zip(ours, theirs, strict=True):
        for our_step, their_step in zip(our_steps, their_steps, strict=True):
            assert our_step == pytest.approx(their_step, abs=1e-4)


@engines
@pytest.mark.parametrize("law", LAWS)
def test_samples_follow_the_law_of_plain_decoding(law: str, job: EngineRun, result_of: Result) -> None:
    ours, theirs = (result_of(each)["sampled"][law] for each in (job, job.plain()))
    assert len(ours) == len(theirs) == NUM_SAMPLES
    wrong = {part: p for part, p in p_values(ours, theirs).items() if p < P_VALUE}
    assert wrong == {}


@pytest.mark.needs(*(EngineRun(version, "plain") for version in VERSIONS))
@pytest.mark.parametrize("version", VERSIONS)
def test_a_law_of_another_temperature_would_be_seen(version: str, result_of: Result) -> None:
    samples = result_of(EngineRun(version, "plain"))["sampled"]
    assert min(p_values(samples["near"], samples["temperature"]).values()) < P_VALUE


@engines
def test_greedy_request_in_a_sampled_batch(job: EngineRun, result_of: Result) -> None:
    assert result_of(job)["sampled"]["greedy"] == result_of(job.plain())["sampled"]["greedy"]


#: vLLM's draft models draw from torch's default generator, whatever the request's seed. What is emitted
#: then follows the same law, but depends on the drafts.
SAMPLED_DRAFTS = ("draft model, sampled drafts", "draft model, block")
SEEDED = [job for job in ENGINES if job.mode not in SAMPLED_DRAFTS]


@pytest.mark.parametrize("job", SEEDED, ids=name_of)
def test_seeded_requests_reproduce(job: EngineRun, result_of: Result) -> None:
    first, second = result_of(job)["seeded"]
    assert first == second
    assert len(first) == NUM_SEEDED


@engines
def test_seeds_matter(job: EngineRun, result_of: Result) -> None:
    first, _ = result_of(job)["seeded"]
    assert len(set(map(tuple, first.values()))) == NUM_SEEDED


@engines
def test_drafts_are_accepted(job: EngineRun, result_of: Result) -> None:
    for group in job.groups:
        counters = result_of(job)[f"counters after {group}"]
        assert 0 < counters["num_accepted_tokens"] < counters["num_draft_tokens"]
        assert counters["num_drafts"] <= counters["num_draft_tokens"]


@pytest.mark.parametrize("job", [job for job in ENGINES if job.mode != "n-gram"], ids=name_of)
def test_acceptance_length_where_draft_and_target_agree(job: EngineRun, result_of: Result) -> None:
    assert acceptance_length(result_of(job)["counters after greedy"]) >= 1.5


@pytest.mark.parametrize("job", [TARGET_AS_DRAFT], ids=name_of)
def test_a_draft_model_that_is_the_target_is_always_right(job: EngineRun, result_of: Result) -> None:
    counters = result_of(job)["counters after unconstrained"]
    assert acceptance_length(counters) > NUM_DRAFT_TOKENS + 0.5


@pytest.mark.parametrize("job", [*ENGINES, *SYNTHETIC, FLY], ids=name_of)
def test_metrics_are_those_of_the_engine(job: EngineRun, result_of: Result) -> None:
    result = result_of(job)
    theirs = result[f"counters after {job.groups[-1]}"]
    assert {name: result["metrics"][name] for name in theirs} == theirs
    ours = result["metrics"]
    assert ours["acceptance_length"] == acceptance_length(theirs)
    assert ours["acceptance_rate"] == theirs["num_accepted_tokens"] / theirs["num_draft_tokens"]
    rates = [accepted / theirs["num_drafts"] for accepted in theirs["num_accepted_tokens_per_pos"]]
    assert ours["acceptance_rate_per_pos"] == rates


@pytest.mark.parametrize("job", SYNTHETIC, ids=name_of)
def test_synthetic_rates(job: EngineRun, result_of: Result) -> None:
    result = result_of(job)
    assert result["plug-in"]["calls"][FORWARD] > 0
    counters = result[f"counters after {job.groups[-1]}"]
    # Some drafts are shorter, at the end of a request: conditional rates do not mind.
    accepted = [counters["num_drafts"], *counters["num_accepted_tokens_per_pos"]]
    drafted = result["metrics"]["num_draft_tokens_per_pos"]
    assert drafted[0] > 1000
    rate = accepted[1] / drafted[0]
    five_sigma = 5 * (SYNTHETIC_RATES[0] * (1 - SYNTHETIC_RATES[0]) / drafted[0]) ** 0.5
    assert rate == pytest.approx(SYNTHETIC_RATES[0], abs=five_sigma)
    assert all(a > b for a, b in itertools.pairwise(accepted))


@pytest.mark.parametrize(
    ("standard", "block"),
    [tuple(EngineRun(version, mode) for mode in SAMPLED_DRAFTS) for version in VERSIONS],
    ids=name_of,
)
def test_block_verification_gets_draft_laws_and_accepts_more(
    standard: EngineRun, block: EngineRun, result_of: Result
) -> None:
    """Of the sampled group: that comes after the greedy one, whose counts are in both."""
    lengths = []
    for result in map(result_of, (block, standard)):
        assert result["steps without and with a draft law"][1] > 100
        after, before = (result[f"counters after {group}"] for group in ("sampled", "greedy"))
        counters = {name: after[name] - before[name] for name in ("num_drafts", "num_accepted_tokens")}
        assert counters["num_drafts"] > 1000
        lengths.append(acceptance_length(counters))
    assert lengths[0] > lengths[1]


@pytest.mark.needs(EngineRun("0.33.0", "draft model"))
@pytest.mark.parametrize("job", [FLY], ids=name_of)
def test_fly_accepts_more(job: EngineRun, result_of: Result) -> None:
    result = result_of(job)
    assert result["plug-in"]["calls"][FORWARD] > 0
    exact = result_of(EngineRun(job.version, "draft model"))["counters after greedy"]
    assert acceptance_length(result["counters after greedy"]) > acceptance_length(exact)


@pytest.mark.parametrize("job", [MULTIPROCESSING], ids=name_of)
def test_a_worker_in_another_process_has_the_plugin(job: EngineRun, result_of: Result) -> None:
    result, plain = result_of(job), result_of(job.plain())
    assert result["plug-in"]["pid"] != result["pid"]
    assert result["plug-in"]["calls"][FORWARD] > 0
    assert {kind: each["token_ids"] for kind, each in result["greedy"].items()} == {
        kind: each["token_ids"] for kind, each in plain["greedy"].items()
    }
    assert min(p_values(result["sampled"]["top-k"], plain["sampled"]["top-k"]).values()) > P_VALUE


@pytest.mark.parametrize("job", [OFF], ids=name_of)
def test_the_plugin_can_be_turned_off(job: EngineRun, result_of: Result) -> None:
    result = result_of(job)
    assert result["plug-in"]["calls"] == {}
    assert result["plug-in"]["replaced"] == []
    assert result["counters after greedy"]["num_accepted_tokens"] > 0


@pytest.mark.parametrize("job", [OFF], ids=name_of)
def test_sampling_without_the_plugin_fails(job: EngineRun, result_of: Result) -> None:
    """The stock fault end to end; where this fails, upstream has mended it."""
    error = result_of(job)["sampled"]["error"]
    assert "in apply_top_k_top_p" in error and "RuntimeError" in error

"""AcceptanceMetrics: counters and rates of speculative decoding."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field
from typing import Any

import inputs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import Implementation
from specdec_ops.metrics import AcceptanceMetrics, AcceptanceSnapshot

ACCELERATOR = torch.accelerator.current_accelerator()
DEVICES = ["cpu", *([str(ACCELERATOR)] if ACCELERATOR is not None else [])]


@dataclass
class ByDefinition:
    """The definitions, one request at a time, with nothing of the code under test."""

    k: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    drafted_per_pos: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted_per_pos, self.drafted_per_pos = [0] * self.k, [0] * self.k

    def request(self, drafted: int, accepted: int, invalid: int = 0, discarded: bool = False) -> None:
        if drafted == 0 or discarded:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted - invalid
        self.num_accepted_tokens += accepted
        for i in range(accepted):
            self.accepted_per_pos[i] += 1
        for i in range(drafted - invalid):
            self.drafted_per_pos[i] += 1

    def check(self, got: AcceptanceSnapshot) -> None:
        assert got.num_drafts == self.num_drafts
        assert got.num_draft_tokens == self.num_draft_tokens
        assert got.num_accepted_tokens == self.num_accepted_tokens
        assert list(got.num_accepted_tokens_per_pos) == self.accepted_per_pos
        assert list(got.num_draft_tokens_per_pos) == self.drafted_per_pos
        if self.num_drafts:
            assert got.acceptance_length == 1 + self.num_accepted_tokens / self.num_drafts
            assert list(got.acceptance_rate_per_pos) == [n / self.num_drafts for n in self.accepted_per_pos]
        if self.num_draft_tokens:
            assert got.acceptance_rate == self.num_accepted_tokens / self.num_draft_tokens


class ByDevicePath(AcceptanceMetrics):
    """Takes the path of accelerators with tensors of the CPU."""

    def observe(self, num_accepted: Any, num_draft_tokens: Any = None, **options: Any) -> None:
        discarded = options.pop("discarded", None)
        counts = [
            num_accepted,
            num_draft_tokens,
            options.pop("cu_num_draft_tokens", None),
            options.pop("num_invalid_draft_tokens", None),
        ]
        assert not options
        self._observe_on_device(
            [None if each is None else torch.as_tensor(each, dtype=torch.int64) for each in counts],
            None if discarded is None else torch.as_tensor(discarded, dtype=torch.bool),
        )


@pytest.fixture(params=[AcceptanceMetrics, ByDevicePath], ids=["host", "device"])
def metrics_class(request: pytest.FixtureRequest) -> type[AcceptanceMetrics]:
    return request.param


def test_cumulative_counts_with_and_without_the_zero(metrics_class: type[AcceptanceMetrics]) -> None:
    for cu in ([0, 2, 2, 5], [2, 2, 5]):
        metrics = metrics_class(3)
        metrics.observe([1, 0, 3], cu_num_draft_tokens=cu)
        assert metrics.snapshot().num_draft_tokens_per_pos == (2, 2, 1), cu


def cumulative(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


requests = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 4), st.booleans()).map(
        lambda r: (r[0], min(r[1], r[0] - min(r[2], r[0])), min(r[2], r[0]), r[3])
    ),
    max_size=8,
)


@given(steps=st.lists(requests, max_size=4))
def test_counts_by_definition(metrics_class: type[AcceptanceMetrics], steps: list[Any]) -> None:
    metrics, expected = metrics_class(4), ByDefinition(4)
    for step in steps:
        drafted, accepted, invalid, discarded = ([r[i] for r in step] for i in range(4))
        metrics.observe(
            torch.tensor(accepted, dtype=torch.int64),
            cu_num_draft_tokens=cumulative(drafted),
            num_invalid_draft_tokens=torch.tensor(invalid, dtype=torch.int64),
            discarded=torch.tensor(discarded, dtype=torch.bool),
        )
        for request in step:
            expected.request(*request)
    expected.check(metrics.snapshot())


def test_the_emitted_token_behind_the_drafts_is_not_accepted(metrics_class: type[AcceptanceMetrics]) -> None:
    """D2: rates are of drafted tokens; the acceptance length alone has the extra token."""
    metrics = metrics_class(3)
    metrics.observe([0, 2, 3], [3, 3, 3])
    got = metrics.snapshot()
    assert got.acceptance_rate == 5 / 9
    assert got.acceptance_length == 1 + 5 / 3
    assert got.acceptance_rate_per_pos == (2 / 3, 2 / 3, 1 / 3)


def test_no_draft_accepted_is_a_rate_of_zero(metrics_class: type[AcceptanceMetrics]) -> None:
    """D2: not 1 / (k + 1)."""
    metrics = metrics_class(3)
    metrics.observe([0, 0], [3, 1])
    got = metrics.snapshot()
    assert (got.acceptance_rate, got.acceptance_length) == (0.0, 1.0)


def test_accepts_behind_a_rejection_do_not_count(implementation: Implementation) -> None:
    """D1: flags [[1,0,1],[0,1,0],[1,1,1]] are 1, 0 and 3 accepted drafts."""
    logits = torch.full((12, 4), -torch.inf)
    logits[:, 2] = 0.0
    cu = torch.arange(4) * 3
    out = implementation.verify_chain(logits, torch.tensor([2, 0, 2, 0, 2, 0, 2, 2, 2]), cu, temperature=0.0)
    metrics = AcceptanceMetrics(3)
    metrics.observe(out.num_accepted, cu_num_draft_tokens=cu)
    assert metrics.snapshot().num_accepted_tokens_per_pos == (2, 1, 1)


def test_what_was_verified_counts_even_if_it_is_cut_off_later(metrics_class: type[AcceptanceMetrics]) -> None:
    """D3: of [5, 6, EOS, 8, 9, bonus] the engine emits three tokens; five were accepted."""
    metrics = metrics_class(5)
    metrics.observe([5], [5])
    assert metrics.snapshot().num_accepted_tokens == 5


def test_discarded_requests_may_have_any_count(metrics_class: type[AcceptanceMetrics]) -> None:
    """D17: rows of a step before a preemption."""
    metrics = metrics_class(2)
    metrics.observe([1, 99, -7], [2, 2, 2], discarded=[False, True, True])
    got = metrics.snapshot()
    assert (got.num_drafts, got.num_draft_tokens, got.num_accepted_tokens) == (1, 2, 1)


def test_a_slice_of_the_batch_counts_as_itself() -> None:
    """D18: four requests are cut to two and joined with three."""
    accepted, drafted = torch.tensor([1, 0, 2, 2]), torch.tensor([2, 1, 2, 2])
    kept = torch.tensor([0, 3])
    metrics = AcceptanceMetrics(2)
    metrics.observe(
        torch.cat([accepted[kept], torch.tensor([1, 1, 0])]),
        torch.cat([drafted[kept], torch.tensor([1, 2, 2])]),
    )
    assert metrics.snapshot().num_accepted_tokens_per_pos == (4, 1)


def test_a_stale_count_without_drafts_does_not_count(metrics_class: type[AcceptanceMetrics]) -> None:
    """D21: three accepted, then a step without drafts that still shows the three."""
    metrics = metrics_class(3)
    metrics.observe([3], [3])
    metrics.observe([3], [0])
    got = metrics.snapshot()
    assert (got.num_drafts, got.num_accepted_tokens, got.acceptance_length) == (1, 3, 4.0)


def test_nothing_drafted_is_nan(metrics_class: type[AcceptanceMetrics]) -> None:
    metrics = metrics_class(2)
    metrics.observe([0, 0], [0, 0])
    metrics.observe([], [])
    got = metrics.snapshot()
    assert (got.num_drafts, got.num_accepted_tokens_per_pos) == (0, (0, 0))
    assert all(
        math.isnan(x) for x in (got.acceptance_length, got.acceptance_rate, *got.acceptance_rate_per_pos)
    )


def test_a_draft_whose_tokens_are_all_invalid_is_still_a_draft(
    metrics_class: type[AcceptanceMetrics],
) -> None:
    metrics = metrics_class(3)
    metrics.observe([0, 1], [3, 3], num_invalid_draft_tokens=[3, 2])
    got = metrics.snapshot()
    assert (got.num_drafts, got.num_draft_tokens, got.acceptance_length) == (2, 1, 1.5)
    assert got.num_draft_tokens_per_pos == (1, 0, 0)


def test_reset_starts_anew(metrics_class: type[AcceptanceMetrics]) -> None:
    metrics = metrics_class(3)
    metrics.observe([3], [3])
    before = metrics.snapshot()
    metrics.reset()
    assert metrics.snapshot().num_drafts == 0
    metrics.observe([1], [2])
    assert metrics.snapshot().num_accepted_tokens_per_pos == (1, 0, 0)
    assert before.num_accepted_tokens == 3


def test_snapshot_changes_nothing(metrics_class: type[AcceptanceMetrics]) -> None:
    metrics = metrics_class(3)
    metrics.observe([2], [3])
    assert metrics.snapshot() == metrics.snapshot()
    assert all(type(value) in (int, float, tuple) for value in metrics.snapshot())
    json.dumps(metrics.snapshot()._asdict())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_every_form_of_the_counts_gives_the_same(device: str, dtype: torch.dtype) -> None:
    accepted, drafted = [2, 0, 1, 0], [3, 2, 1, 0]
    as_tensor = torch.tensor(accepted, dtype=dtype, device=device)
    wide = torch.tensor([[d, -5] for d in drafted], dtype=dtype, device=device)
    cu = cumulative(drafted).to(device, dtype)
    discarded = [False, True, False, False]

    def observed(*counts: Any, **options: Any) -> AcceptanceSnapshot:
        metrics = AcceptanceMetrics(3)
        before = [c.clone() for c in (*counts, *options.values()) if isinstance(c, torch.Tensor)]
        metrics.observe(*counts, **options)
        after = [c for c in (*counts, *options.values()) if isinstance(c, torch.Tensor)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return metrics.snapshot()

    want = observed(accepted, drafted, discarded=discarded)
    assert want.num_draft_tokens == 4
    assert observed(np.array(accepted), np.array(drafted), discarded=np.array(discarded)) == want
    assert observed(as_tensor, wide[:, 0], discarded=torch.tensor(discarded, device=device)) == want
    assert observed(as_tensor, tuple(drafted), discarded=discarded) == want
    assert observed(as_tensor, cu_num_draft_tokens=cu, discarded=np.array(discarded)) == want
    assert observed(as_tensor, cu_num_draft_tokens=cu[1:], discarded=discarded) == want


@pytest.mark.skipif(ACCELERATOR is None, reason="no device but the CPU")
def test_counts_of_host_and_device_add_up_and_reset() -> None:
    metrics = AcceptanceMetrics(3)
    metrics.observe([1], [2])
    metrics.observe(torch.tensor([2], device=ACCELERATOR), torch.tensor([3], device=ACCELERATOR))
    assert metrics.snapshot().num_accepted_tokens_per_pos == (2, 1, 0)
    metrics.reset()
    assert metrics.snapshot().num_drafts == 0


def test_counts_of_verified_chains(native: Implementation) -> None:
    """Sampled requests with and without drafts, over several steps."""
    metrics, expected = AcceptanceMetrics(4), ByDefinition(4)
    for seed in range(4):
        counts = random.Random(seed).choices(range(5), k=12)
        arguments = inputs.chain(counts, 40, "logits", seed=seed, support=4)
        out = native.verify_chain(**arguments)
        emitted = native.count_accepted(out.token_ids).num_emitted.tolist()
        metrics.observe(out.num_accepted, cu_num_draft_tokens=arguments["cu_num_draft_tokens"])
        for drafted, num_emitted in zip(counts, emitted, strict=True):
            expected.request(drafted, num_emitted - 1)
    assert 0 < expected.num_accepted_tokens < expected.num_draft_tokens
    expected.check(metrics.snapshot())


def test_counts_are_those_of_vllm() -> None:
    """With the scheduler's way from generated tokens to counts."""
    stats_class = pytest.importorskip("vllm.v1.spec_decode.metrics").SpecDecodingStats
    stats, metrics, rng = stats_class.new(4), AcceptanceMetrics(4), random.Random(0)
    for _ in range(20):
        drafted = rng.choices(range(5), k=8)
        generated = [rng.randint(0, d + 1) for d in drafted]  # 0: a discarded request
        for d, g in zip(drafted, generated, strict=True):
            if d and g:
                stats.observe_draft(num_draft_tokens=d, num_accepted_tokens=max(g - 1, 0))
        metrics.observe([g - 1 for g in generated], drafted, discarded=[g == 0 for g in generated])
    got = metrics.snapshot()
    assert got.num_drafts == stats.num_drafts
    assert got.num_draft_tokens == stats.num_draft_tokens
    assert got.num_accepted_tokens == stats.num_accepted_tokens
    assert list(got.num_accepted_tokens_per_pos) == stats.num_accepted_tokens_per_pos
    assert list(got.num_draft_tokens_per_pos) == stats.num_draft_tokens_per_pos


def test_line_for_a_log() -> None:
    metrics = AcceptanceMetrics(2)
    metrics.observe([2, 1], [2, 2])
    assert str(metrics.snapshot()) == (
        "acceptance length 2.50, acceptance rate 75.0% (3 of 4), by position 1.000 0.500, 2 drafts"
    )


class TestBadInput:
    @pytest.mark.parametrize("k", [0, -1, 2.0, "3"])
    def test_num_speculative_tokens(self, k: Any) -> None:
        with pytest.raises(
            RuntimeError, match=r"AcceptanceMetrics: num_speculative_tokens must be a positive"
        ):
            AcceptanceMetrics(k)

    @pytest.mark.parametrize(
        ("accepted", "drafted"), [([3], [2]), ([-1], [2]), ([4], [4]), ([0], [-1]), ([9], [9])]
    )
    def test_counts_out_of_range(
        self, metrics_class: type[AcceptanceMetrics], accepted: list[int], drafted: list[int]
    ) -> None:
        """At once on the host, when it is read on a device; counted neither way."""
        metrics = metrics_class(3)
        metrics.observe([1], [2])
        message = r"num_accepted must lie in \[0, valid draft tokens\], these in \[0, .* = 3\], got "
        with pytest.raises(RuntimeError, match=message):
            metrics.observe([0, *accepted], [1, *drafted])
            metrics.snapshot()
        if metrics_class is AcceptanceMetrics:
            assert metrics.snapshot().num_drafts == 1
        metrics.reset()
        assert metrics.snapshot().num_drafts == 0

    def test_more_invalid_than_drafted(self, metrics_class: type[AcceptanceMetrics]) -> None:
        metrics = metrics_class(3)
        with pytest.raises(RuntimeError, match="num_accepted must lie in"):
            metrics.observe([0], [1], num_invalid_draft_tokens=[2])
            metrics.snapshot()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (([1],), "num_draft_tokens or cu_num_draft_tokens must be given, and one alone, got neither"),
            (([1], [1], [0, 1]), "must be given, and one alone, got both"),
            ((5, [1]), "num_accepted must be a vector or a sequence, got int"),
            ((torch.zeros(1, 1), [1]), r"num_accepted must be a vector or a sequence, got shape \[1, 1\]"),
            ((np.zeros((1, 1)), [1]), r"num_accepted must be a vector or a sequence, got shape \[1, 1\]"),
            (([1, 1], [1]), r"num_draft_tokens must be \[batch\] with 2 elements, got 1"),
            (([1], None, [0, 1, 1]), r"cu_num_draft_tokens must be \[batch \+ 1\] with 2 elements, got 3"),
            (([1], None, torch.ones(1)), "cu_num_draft_tokens must be int32 or int64, got float32"),
            (([1], None, torch.ones(2)), "cu_num_draft_tokens must be int32 or int64, got float32"),
            (([1], [1], None, [0, 0]), r"num_invalid_draft_tokens must be \[batch\] with 1 element, got 2"),
            (([1], [1], None, None, []), r"discarded must be \[batch\] with 1 element, got 0"),
            ((torch.ones(1), [1]), "num_accepted must be int32 or int64, got float32"),
            (([1], torch.ones(1, dtype=torch.int16)), "num_draft_tokens must be int32 or int64, got int16"),
            (([1], [1], None, None, torch.ones(1, dtype=torch.int32)), "discarded must be bool, got int32"),
            (
                ([1], torch.ones(1, dtype=torch.int32, device="meta")),
                "num_draft_tokens must be on cpu like num_accepted, got meta",
            ),
            (
                (torch.ones(1, dtype=torch.int32, device="meta"), torch.ones(1, dtype=torch.int32)),
                "num_draft_tokens must be on meta like num_accepted, got cpu",
            ),
        ],
    )
    def test_arguments(self, arguments: tuple[Any, ...], message: str) -> None:
        names = ["num_accepted", "num_draft_tokens"]
        names += ["cu_num_draft_tokens", "num_invalid_draft_tokens", "discarded"]
        with pytest.raises(RuntimeError, match="AcceptanceMetrics.observe: .*" + message):
            AcceptanceMetrics(3).observe(**dict(zip(names, arguments, strict=False)))

"""Synthetic acceptance: verify_chain with rates instead of the accept rule, and the makers of rates."""

from __future__ import annotations

import itertools
import math
from typing import Any

import chi_square
import inputs
import margins
import pytest
import specdec_ops
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import REFERENCE, Implementation
from specdec_ops import Status
from specdec_ops.ops import verify_chain
from specdec_ops.synthetic import (
    acceptance_rates_for_constant_rate,
    acceptance_rates_for_length,
    acceptance_rates_for_normal_length,
    conditional_acceptance_rates,
)
from test_properties import assert_well_formed, chains

EXTRAS = {"return_logsumexp": True, "return_logprobs": True, "return_accept_probs": True}
NAN, INF = math.nan, math.inf
P, Q = (0.5, 0.2, 0.2, 0.1), (0.1, 0.4, 0.2, 0.3)


def draft_law_rows(draft_law: str, num_drafts: int) -> dict[str, Any]:
    """The law Q for each draft."""
    if draft_law == "one_hot":
        return {}
    if draft_law == "probs":
        return {"draft_probs": torch.tensor([Q]).expand(num_drafts, 4)}
    if draft_law == "support":
        return {
            "draft_support_ids": torch.arange(4).expand(num_drafts, 4),
            "draft_support_logprobs": torch.tensor([Q]).log().expand(num_drafts, 4),
        }
    rows = {"draft_logits": inputs.logits_of([Q]).expand(num_drafts, 4)}
    if draft_law == "logits_and_logsumexp":
        rows["draft_logsumexp"] = torch.zeros(num_drafts, dtype=torch.float64)
    return rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_acceptance_is_the_coin_below_the_rate_alone(
    implementation: Implementation, draft_law: str, temperature: float
) -> None:
    """Every chain of two drafts, on a grid of coins that holds the rates themselves: strictly below."""
    rates = [0.25, 0.625]
    coins = torch.tensor(list(itertools.product(range(8), repeat=2)), dtype=torch.float64) / 8
    for path in itertools.product(range(4), repeat=2):
        batch = coins.shape[0]
        out = implementation.verify_chain(
            inputs.logits_of([P]).expand(3 * batch, 4),
            torch.tensor(path).repeat(batch),
            torch.arange(batch + 1) * 2,
            temperature=temperature,
            accept_rates=torch.tensor(rates),
            accept_uniforms=coins.flatten(),
            recovered_uniforms=torch.full((batch,), 0.5),
            **draft_law_rows(draft_law, 2 * batch),
        )
        below = coins < torch.tensor(rates)
        assert out.num_accepted.tolist() == below.int().cumprod(dim=1).sum(dim=1).tolist()
        for tokens, n in zip(out.token_ids.tolist(), out.num_accepted.tolist(), strict=True):
            assert tokens[:n] == list(path[:n])


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_recovered_tokens_have_the_law_of_the_residual(
    implementation: Implementation, draft_law: str
) -> None:
    """Whatever draft was rejected: edges of the law read off a grid of uniforms; greedy: the argmax."""
    cells = 1 << 10
    grid = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells
    for x, temperature in itertools.product(range(4), (0.0, 1.0)):
        out = implementation.verify_chain(
            inputs.logits_of([P]).expand(2 * cells, 4),
            torch.full((cells,), x),
            torch.arange(cells + 1),
            temperature=temperature,
            draft_temperature=1.0,
            accept_rates=torch.zeros(1),
            accept_uniforms=torch.zeros(cells),
            recovered_uniforms=grid,
            **draft_law_rows(draft_law, cells),
        )
        assert out.num_accepted.max() == 0
        rest = [max(p - (v == x if draft_law == "one_hot" else Q[v]), 0.0) for v, p in enumerate(P)]
        if temperature == 0.0:
            rest = [1.0, 0.0, 0.0, 0.0]
        measured = torch.bincount(out.token_ids[:, 0], minlength=4) / cells
        assert measured.tolist() == pytest.approx([r / sum(rest) for r in rest], abs=1 / cells)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rate_zero_rejects_and_rate_one_accepts_every_coin(
    implementation: Implementation, temperature: float
) -> None:
    arguments = inputs.chain([2] * 50, 30, "logits", seed=2, temperature=torch.full((50,), temperature))
    arguments["draft_temperature"] = torch.ones(50)
    for rates, accepted in [([0.0, 1.0], 0), ([1.0, 0.0], 1), ([1.0, 1.0], 2)]:
        out = implementation.verify_chain(
            **arguments, accept_rates=torch.tensor(rates, dtype=torch.float64), **EXTRAS
        )
        assert (out.num_accepted == accepted).all()
        native = implementation.verify_chain(**arguments, **EXTRAS)
        read = ~native.accept_probs.isnan() & ~out.accept_probs.isnan()
        assert torch.equal(out.accept_probs[read], native.accept_probs[read])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad_id", [-1, -2, 4, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_rejected_at_any_rate(
    implementation: Implementation, bad_id: int, temperature: float
) -> None:
    out = implementation.verify_chain(
        inputs.logits_of([P]).expand(3, 4),
        torch.tensor([1, bad_id]),
        torch.tensor([0, 2]),
        temperature=temperature,
        accept_rates=torch.ones(2),
        seeds=0,
        positions=torch.tensor([0]),
    )
    assert (out.num_accepted.tolist(), out.token_ids[0, 0].item()) == ([1], 1)
    assert 0 <= out.token_ids[0, 1] < 4 and out.token_ids[0, 2] == -1
    assert out.status.tolist() == [Status.OK if bad_id == -1 else Status.INVALID_DRAFT_ID]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("value", "status"), [(NAN, Status.NON_FINITE_TARGET), (-INF, Status.MASKED_TARGET)], ids=str
)
def test_rows_without_a_law_end_the_request(
    implementation: Implementation, value: float, status: Status, temperature: float
) -> None:
    rows = torch.zeros(3, 4)
    rows[1] = value
    out = implementation.verify_chain(
        rows,
        torch.tensor([2, 2]),
        torch.tensor([0, 2]),
        temperature=temperature,
        accept_rates=torch.ones(2),
        seeds=0,
        positions=torch.tensor([0]),
    )
    assert out.token_ids.tolist() == [[2, 0, -1]]
    assert (out.num_accepted.tolist(), out.status.tolist()) == ([1], [status])


def test_an_unusable_draft_law_shows_where_the_draft_is_rejected(implementation: Implementation) -> None:
    for rate, status in [(1.0, Status.OK), (0.0, Status.UNUSABLE_DRAFT_LAW)]:
        out = implementation.verify_chain(
            inputs.logits_of([P]).expand(2, 4),
            torch.tensor([0]),
            torch.tensor([0, 1]),
            draft_probs=torch.full((1, 4), NAN),
            accept_rates=torch.tensor([rate]),
            seeds=0,
            positions=torch.tensor([0]),
        )
        assert out.status.tolist() == [status]
        assert (out.token_ids[0, 0] == 0) == (rate == 1.0)


@given(
    chains(),
    st.lists(st.sampled_from([0.0, 0.3, 0.7, 0.9, 1.0]), min_size=5, max_size=7),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_matches_reference(
    native: Implementation,
    arguments: inputs.Arguments,
    rates: list[float],
    gives_bonus: bool,
    dtype: torch.dtype,
) -> None:
    if gives_bonus:
        batch = arguments["cu_num_draft_tokens"].shape[0] - 1
        arguments = inputs.without_bonus_rows(arguments, torch.zeros(batch, dtype=torch.int64))
    arguments["accept_rates"] = torch.tensor(rates, dtype=dtype).repeat_interleave(2)[::2]
    out = native.verify_chain(**arguments, **EXTRAS)
    assert_well_formed(out, arguments)
    # Where drafter and target agree but for rounding, all that is left of p - q is rounding.
    margins.assert_chain_matches(out, arguments, max_near=len(arguments["temperature"]))


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_a_request_gets_the_same_in_any_batch_and_with_any_threads(
    native: Implementation, draft_law: str, num_threads: None
) -> None:
    arguments = inputs.chain([3, 0, 2, 3], 9000, draft_law, seed=5)
    arguments["temperature"][2] = 0.0
    arguments["draft_temperature"] = torch.ones(4)
    arguments["accept_rates"] = torch.tensor([0.8, 0.6, 0.4])
    torch.set_num_threads(1)
    together = native.verify_chain(**arguments, max_num_draft_tokens=3)
    torch.set_num_threads(4)
    assert margins.all_same_bits(native.verify_chain(**arguments, max_num_draft_tokens=3), together)
    for r in range(4):
        alone = native.verify_chain(**inputs.select_requests(arguments, [r]), max_num_draft_tokens=3)
        assert margins.same_bits(alone.token_ids[0], together.token_ids[r])


def test_rates_are_met_over_many_requests(default_native: Implementation) -> None:
    """Chi-square of the counts against the rates, fixed seeds; p = 1e-3 would be the alarm."""
    batch, unconditional = 20_000, [0.9, 0.6, 0.45, 0.05]
    rates = torch.tensor(conditional_acceptance_rates(unconditional))
    temperature = torch.arange(batch) % 2 * 1.0
    out = default_native.verify_chain(
        inputs.logits_of([P]).expand(5 * batch, 4),
        torch.arange(4 * batch) % 4,
        torch.arange(batch + 1) * 4,
        temperature=temperature,
        accept_rates=rates,
        seeds=torch.arange(batch),
        positions=torch.arange(batch) % 97,
    )
    law = [a - b for a, b in itertools.pairwise([1.0, *unconditional, 0.0])]
    for greedy in (True, False):
        counts = torch.bincount(out.num_accepted[(temperature == 0) == greedy], minlength=5)
        assert chi_square.p_value(counts, law) > 1e-3


def test_greedy_requests_need_coins(default_native: Implementation) -> None:
    arguments = inputs.chain([2, 1], 30, "one_hot", seed=1, temperature=torch.zeros(2))
    del arguments["seeds"], arguments["positions"]
    with pytest.raises(RuntimeError, match="must be given with accept_rates, got neither"):
        default_native.verify_chain(**arguments, accept_rates=torch.ones(2))
    none = inputs.select_requests(arguments, [])
    assert default_native.verify_chain(**none, accept_rates=torch.ones(0)).token_ids.shape == (0, 1)


def test_opcheck() -> None:
    arguments = inputs.chain([2, 0, 3], 70, "logits")
    names = ("target_logits", "draft_token_ids", "cu_num_draft_tokens", "temperature")
    args = (*(arguments.pop(name) for name in names), 3)
    torch.library.opcheck(verify_chain._op, args, {**arguments, "accept_rates": torch.full((3,), 0.5)})


def test_conditional_rates() -> None:
    assert conditional_acceptance_rates([]) == []
    assert conditional_acceptance_rates([1, 1, 0, 0]) == [1.0, 1.0, 0.0, 0.0]
    given_rates = [0.83, 0.83, 0.41, 0.07, 0.0, 0.0]
    conditional = conditional_acceptance_rates(given_rates)
    assert list(itertools.accumulate(conditional, lambda a, b: a * b)) == pytest.approx(given_rates)
    assert all(0.0 <= rate <= 1.0 for rate in conditional)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([0.5, NAN], r"rates must be in \[0, 1\], got nan at index 1"),
        ([1.5], r"rates must be in \[0, 1\], got 1.5 at index 0"),
        ([0.5, -0.1], r"rates must be in \[0, 1\], got -0.1 at index 1"),
        ([0.5, 0.4, 0.6], "rates must not increase, got 0.6 after 0.4 at index 2"),
    ],
)
def test_conditional_rates_check_theirs(rates: list[float], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^conditional_acceptance_rates: {message}"):
        conditional_acceptance_rates(rates)


@given(st.integers(0, 12), st.floats(0, 1))
def test_rates_for_a_length_have_its_mean_and_the_least_variance(k: int, share: float) -> None:
    length = 1 + share * k
    rates = acceptance_rates_for_length(length, k)
    assert len(rates) == k and 1 + sum(rates) == pytest.approx(length, abs=1e-12)
    conditional = conditional_acceptance_rates(rates)
    accepted = [
        a - b for a, b in itertools.pairwise([1.0, *itertools.accumulate(conditional, float.__mul__), 0])
    ]
    # No law on integers with this mean has less variance than the one on its two neighbours.
    assert {n for n, weight in enumerate(accepted) if weight > 0} <= {
        math.floor(length - 1),
        math.ceil(length - 1),
    }


@pytest.mark.parametrize(
    ("length", "k", "message"),
    [
        (0.5, 3, r"acceptance_length must be in \[1, num_speculative_tokens \+ 1\] = \[1, 4\], got 0.5"),
        (4.5, 3, r"acceptance_length must be in \[1, num_speculative_tokens \+ 1\] = \[1, 4\], got 4.5"),
        (NAN, 3, r"acceptance_length must be in \[1, num_speculative_tokens \+ 1\] = \[1, 4\], got nan"),
        (1.0, -1, "num_speculative_tokens must be at least 0, got -1"),
    ],
)
def test_rates_for_a_length_check_it(length: float, k: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"^acceptance_rates_for_length: {message}"):
        acceptance_rates_for_length(length, k)


def test_mean_acceptance_length_is_the_one_asked_for(default_native: Implementation) -> None:
    batch, k, length = 4000, 4, 2.75
    out = specdec_ops.verify_chain(
        torch.zeros((k + 1) * batch, 5),
        torch.arange(k * batch) % 5,
        torch.arange(batch + 1) * k,
        accept_rates=torch.tensor(conditional_acceptance_rates(acceptance_rates_for_length(length, k))),
        seeds=torch.arange(batch),
        positions=torch.zeros(batch, dtype=torch.int64),
    )
    assert set(out.num_accepted.tolist()) == {1, 2}
    counts = torch.bincount(out.num_accepted, minlength=3)
    assert chi_square.p_value(counts, [0.0, 0.25, 0.75]) > 1e-3


def test_docstring_examples() -> None:
    assert conditional_acceptance_rates([0.8, 0.4, 0.1, 0.0, 0.0]) == [0.8, 0.5, 0.25, 0.0, 0.0]
    assert acceptance_rates_for_length(2.75, 4) == [1.0, 0.75, 0.0, 0.0]


@given(chains())
def test_the_reference_is_well_formed(arguments: inputs.Arguments) -> None:
    out = REFERENCE.verify_chain(**arguments, accept_rates=torch.full((5,), 0.8))
    assert_well_formed(out, arguments)


@pytest.mark.parametrize("num_slots", [0, 1, 3, 7])
def test_constant_rates_have_the_length(num_slots: int) -> None:
    for share in (0.0, 0.1, 0.5, 0.93, 1.0):
        length = 1 + share * num_slots
        rates = acceptance_rates_for_constant_rate(length, num_slots)
        assert 1 + sum(rates) == pytest.approx(length, abs=1e-12) and len(rates) == num_slots
        conditional = conditional_acceptance_rates(rates)
        assert conditional == pytest.approx(conditional[:1] * num_slots, abs=1e-12)


def test_normal_rates_are_those_of_rounded_numbers() -> None:
    draw = torch.randn(1 << 18, generator=inputs.generator(1), dtype=torch.float64)
    for mean, num_slots in ((1.0, 3), (2.62, 4), (4.0, 3)):
        lengths = (draw + mean).round().clamp(1, num_slots + 1)
        rates = acceptance_rates_for_normal_length(mean, num_slots)
        for i, rate in enumerate(rates):
            share = float((lengths >= i + 2).double().mean())
            assert abs(share - rate) < 5 * math.sqrt(0.25 / draw.shape[0])
        conditional_acceptance_rates(rates)


@pytest.mark.parametrize("maker", [acceptance_rates_for_constant_rate, acceptance_rates_for_normal_length])
def test_lengths_that_cannot_be(maker: Any) -> None:
    for length, num_slots in ((0.9, 3), (4.1, 3), (NAN, 3), (1.5, 0)):
        with pytest.raises(RuntimeError, match=rf"{maker.__name__}: acceptance_length must be in \[1, "):
            maker(length, num_slots)
    with pytest.raises(RuntimeError, match="num_speculative_tokens must be at least 0, got -1"):
        maker(1.0, -1)

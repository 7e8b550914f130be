"""verify_probs: acceptance by given probabilities, recovered and bonus tokens."""

from __future__ import annotations

import math
import random
from typing import Any

import chi_square
import pytest
import torch
from draft_batches import POISON, Batch, check_against_reference, check_op
from hypothesis import given
from hypothesis import strategies as st
from implementations import Implementation
from runner_batches import assert_raises
from specdec_ops.ops import verify_probs

NAME = "verify_probs_"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def one_draft(p: float, q: float | None, u: float, **changes: Any) -> dict[str, Any]:
    """Draft 1 of three ids with these probabilities; recovered token 8, bonus token 9."""
    arguments = {
        "target_probs": torch.tensor([[0.5, p, 0.5]]),
        "draft_token_ids": torch.tensor([1]),
        "cu_num_draft_tokens": torch.tensor([0, 1]),
        "recovered_token_ids": torch.tensor([8]),
        "bonus_token_ids": torch.tensor([9]),
        "accept_uniforms": torch.tensor([u], dtype=torch.float64),
        "draft_probs": None if q is None else torch.tensor([[0.5, q, 0.5]]),
    }
    return {**arguments, **changes}


def accepts(implementation: Implementation, arguments: dict[str, Any]) -> bool:
    emitted = implementation.verify_probs(**arguments).tolist()
    assert emitted in ([[1, 9]], [[8, -1]])
    return emitted == [[1, 9]]


def test_accepts_up_to_the_ratio(implementation: Implementation) -> None:
    """The ratio itself accepts, the next float64 does not."""
    for u, accepted in ((0.0, True), (0.5, True), (math.nextafter(0.5, 1), False), (0.9, False)):
        assert accepts(implementation, one_draft(0.25, 0.5, u)) == accepted
    assert accepts(implementation, one_draft(0.75, 0.5, math.nextafter(1, 0)))


def test_without_draft_probs_the_draft_law_is_one_hot(implementation: Implementation) -> None:
    assert accepts(implementation, one_draft(0.25, None, 0.25))
    assert not accepts(implementation, one_draft(0.25, None, math.nextafter(0.25, 1)))


def test_the_ratio_of_float32_is_a_float32_and_the_uniform_stays_a_float64(
    implementation: Implementation,
) -> None:
    """Exactly what a quotient in float32 compared with a uniform in float64 gives."""
    ratio = (torch.tensor(0.1) / torch.tensor(0.7)).item()
    assert ratio != torch.tensor(0.1).item() / torch.tensor(0.7).item()
    assert accepts(implementation, one_draft(0.1, 0.7, ratio))
    assert not accepts(implementation, one_draft(0.1, 0.7, math.nextafter(ratio, 1)))


@pytest.mark.parametrize("target_is_float64", [True, False])
def test_the_ratio_with_a_float64_is_a_float64(
    implementation: Implementation, target_is_float64: bool
) -> None:
    arguments = one_draft(0.1, 0.7, 0.0)
    wide = "target_probs" if target_is_float64 else "draft_probs"
    arguments[wide] = arguments[wide].double()
    ratio = arguments["target_probs"][0, 1].item() / arguments["draft_probs"][0, 1].item()
    for u, accepted in ((ratio, True), (math.nextafter(ratio, 1), False)):
        uniforms = torch.tensor([u], dtype=torch.float64)
        assert accepts(implementation, {**arguments, "accept_uniforms": uniforms}) == accepted


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float_dtypes(implementation: Implementation, dtype: torch.dtype) -> None:
    """Values that each dtype holds, and float32 uniforms."""
    for u, accepted in ((0.5, True), (0.625, False)):
        arguments = one_draft(0.125, 0.25, u)
        for name in ("target_probs", "draft_probs"):
            arguments[name] = arguments[name].to(dtype)
        arguments["accept_uniforms"] = arguments["accept_uniforms"].float()
        assert accepts(implementation, arguments) == accepted


def test_nothing_is_accepted_that_either_law_rules_out(implementation: Implementation) -> None:
    """A13, A16: not even by a uniform of 0."""
    nan = math.nan
    for p, q in ((0.0, 0.5), (0.0, None), (0.5, 0.0), (0.0, 0.0), (nan, 0.5), (0.5, nan), (nan, None)):
        assert not accepts(implementation, one_draft(p, q, 0.0)), (p, q)
    assert accepts(implementation, one_draft(math.inf, 0.5, 0.9))


@pytest.mark.parametrize("has_law", [True, False])
def test_drafts_outside_the_vocabulary_are_rejected_and_end_the_request(
    implementation: Implementation, has_law: bool
) -> None:
    """A8: -1 and the like are no columns."""
    rows = torch.ones(4, 3)
    for invalid in (-1, -2, 3, 2**31 - 1, -(2**31)):
        emitted = implementation.verify_probs(
            rows[:3],
            torch.tensor([0, invalid, 2], dtype=torch.int32),
            torch.tensor([3]),
            torch.tensor([6, 7, 8]),
            torch.tensor([9]),
            torch.zeros(3),
            draft_probs=rows[:3] if has_law else None,
        )
        assert emitted.tolist() == [[0, 7, -1, -1]]


def test_columns_from_the_vocabulary_size_on_are_padding(implementation: Implementation) -> None:
    assert accepts(implementation, one_draft(0.5, 0.5, 0.5, vocab_size=2))
    assert not accepts(implementation, one_draft(0.5, 0.5, 0.5, vocab_size=1))


def test_emits_accepted_drafts_and_then_the_recovered_or_the_bonus_token(
    implementation: Implementation,
) -> None:
    """None, one and all of three drafts accepted, and a request without drafts; either form of the counts."""
    arguments = {
        "target_probs": torch.full((9, 5), 0.5),
        "draft_token_ids": torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3]),
        "recovered_token_ids": torch.arange(10, 19),
        "bonus_token_ids": torch.tensor([[20], [21], [22], [23]]),
        "accept_uniforms": torch.tensor([0.6, 0.1, 0.1, 0.1, 0.6, 0.1, 0.1, 0.1, 0.5]),
    }
    expected = [[10, -1, -1, -1], [3, 14, -1, -1], [1, 2, 3, 22], [23, -1, -1, -1]]
    for cu in ([0, 3, 6, 9, 9], [3, 6, 9, 9]):
        emitted = implementation.verify_probs(**arguments, cu_num_draft_tokens=torch.tensor(cu))
        assert emitted.tolist() == expected
    token_ids = torch.full((5, 6), POISON)
    implementation.verify_probs_(**arguments, cu_num_draft_tokens=torch.tensor(cu), token_ids=token_ids)
    assert token_ids.tolist() == [
        *([POISON if id == -1 else id for id in row] + [POISON] * 2 for row in expected),
        [POISON] * 6,
    ]


def test_recovered_and_bonus_ids_are_not_checked(implementation: Implementation) -> None:
    arguments = one_draft(0.5, None, 0.9, recovered_token_ids=torch.tensor([-7]))
    assert implementation.verify_probs(**arguments).tolist() == [[-7, -1]]
    arguments = one_draft(0.5, None, 0.1, bonus_token_ids=torch.tensor([-1]))
    assert implementation.verify_probs(**arguments).tolist() == [[1, -1]]


def test_greedy_requests_are_left_out(implementation: Implementation) -> None:
    for is_greedy, expected in ((True, [[-1, -1]]), (False, [[1, 9]])):
        arguments = one_draft(0.5, None, 0.1, is_greedy=torch.tensor([is_greedy]))
        assert implementation.verify_probs(**arguments).tolist() == expected


def test_synthetic_acceptance_reads_no_probability(implementation: Implementation) -> None:
    for rate, u, accepted in ((0.5, 0.25, True), (0.5, 0.5, False), (0.0, 0.0, False), (1.0, 0.99, True)):
        rates = torch.tensor([rate])
        for p, q in ((math.nan, math.nan), (0.0, None), (1.0, 0.5)):
            assert accepts(implementation, one_draft(p, q, u, accept_rates=rates)) == accepted
    outside = one_draft(0.5, 0.5, 0.0, accept_rates=torch.ones(1), draft_token_ids=torch.tensor([-1]))
    assert not accepts(implementation, outside)


def test_with_recovered_tokens_the_law_is_the_target_s(default_native: Implementation) -> None:
    """Leviathan et al.: accepted drafts and recovered tokens together, p-value at least 1e-6."""
    n, random_numbers = 200_000, torch.Generator().manual_seed(11)
    law = [0.5, 0.2, 0.2, 0.1]
    p, q = torch.tensor(law), torch.tensor([0.1, 0.3, 0.2, 0.4])
    drafts = torch.multinomial(q, n, replacement=True, generator=random_numbers)
    noise = torch.empty(n, 4).exponential_(generator=random_numbers).reciprocal()
    cu = torch.arange(1, n + 1)
    rows = {"target_probs": p.expand(n, 4), "draft_probs": q.expand(n, 4)}
    recovered = default_native.sample_recovered_probs(
        **rows, draft_token_ids=drafts, cu_num_draft_tokens=cu, inverse_noise=noise
    )
    emitted = default_native.verify_probs(
        **rows,
        draft_token_ids=drafts,
        cu_num_draft_tokens=cu,
        recovered_token_ids=recovered,
        bonus_token_ids=torch.zeros(n, dtype=torch.int64),
        accept_uniforms=torch.rand(n, generator=random_numbers, dtype=torch.float64),
    )[:, 0]
    assert chi_square.p_value(emitted.bincount(minlength=4).numpy(), law) > 1e-6
    assert chi_square.p_value(drafts.bincount(minlength=4).numpy(), law) < 1e-6


def random_arguments(rng: random.Random) -> dict[str, Any]:
    batch = Batch(rng)
    width = rng.randint(3, 6)
    rows = batch.longer(batch.num_drafts)
    return {
        "target_probs": batch.reals(rows, width, dtypes=FLOATS),
        "draft_token_ids": batch.ints(-1, 3, batch.num_drafts),
        "cu_num_draft_tokens": batch.cu_num_draft_tokens(),
        "recovered_token_ids": batch.ints(10, 19, batch.longer(batch.num_drafts)),
        "bonus_token_ids": batch.ints(20, 29, batch.size, *([1] if rng.random() < 0.5 else [])),
        "accept_uniforms": batch.reals(batch.longer(batch.num_drafts)),
        "draft_probs": batch.maybe(batch.reals(rows, width + rng.randint(0, 1), dtypes=FLOATS)),
        "is_greedy": batch.maybe(batch.bools(batch.longer(batch.size))),
        "accept_rates": batch.maybe(batch.reals(batch.longer(batch.k))),
        "vocab_size": rng.choice([None, 3]),
        "token_ids": batch.ints(POISON, POISON, batch.longer(batch.size), batch.k + 1),
    }


@given(seed=st.integers(0, 2**32 - 1))
def test_matches_reference(native: Implementation, seed: int) -> None:
    rng = random.Random(seed)
    check_against_reference(native, NAME, random_arguments(rng), ["token_ids"], rng)


@pytest.mark.parametrize("cu", [[], [0]], ids=str)
def test_empty_batch(implementation: Implementation, cu: list[int]) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    out = implementation.verify_probs(
        torch.zeros(0, 3), none, torch.tensor(cu, dtype=torch.int64), none, none, torch.zeros(0)
    )
    assert out.shape == (0, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_probs": torch.ones(1, 3).int()},
            "target_probs must be float64, float32, bfloat16 or float16, got int32",
        ),
        (
            {"target_probs": torch.ones(3)},
            "target_probs must be [num_drafts, width] with at least 1 row, got shape [3]",
        ),
        (
            {"target_probs": torch.ones(0, 3)},
            "target_probs must be [num_drafts, width] with at least 1 row, got shape [0, 3]",
        ),
        ({"target_probs": torch.ones(1, 0)}, "target_probs must have at least one column, got shape [1, 0]"),
        ({"vocab_size": 4}, "vocab_size must be between 1 and the width of target_probs, 3, got 4"),
        ({"vocab_size": 0}, "vocab_size must be between 1 and the width of target_probs, 3, got 0"),
        (
            {"draft_probs": torch.ones(1, 2)},
            "draft_probs must have at least vocab_size = 3 columns, got 2",
        ),
        (
            {"draft_probs": torch.ones(0, 3)},
            "draft_probs must be [num_drafts, width] with at least 1 row, got shape [0, 3]",
        ),
        (
            {"draft_probs": torch.ones(1, 3).bool()},
            "draft_probs must be float64, float32, bfloat16 or float16, got bool",
        ),
        ({"draft_token_ids": torch.ones(1)}, "draft_token_ids must be int32 or int64, got float32"),
        ({"recovered_token_ids": torch.ones(1)}, "recovered_token_ids must be int32 or int64, got float32"),
        (
            {"recovered_token_ids": torch.ones(0).int()},
            "recovered_token_ids must be [num_drafts] with at least 1 element, got shape [0]",
        ),
        ({"bonus_token_ids": torch.ones(1)}, "bonus_token_ids must be int32 or int64, got float32"),
        (
            {"accept_uniforms": torch.ones(1).half()},
            "accept_uniforms must be float32 or float64, got float16",
        ),
        (
            {"accept_uniforms": torch.ones(1, 1)},
            "accept_uniforms must be [num_drafts] with at least 1 element, got shape [1, 1]",
        ),
        (
            {"cu_num_draft_tokens": torch.tensor([2])},
            "cu_num_draft_tokens must end with at most num_drafts = 1, got 2",
        ),
        (
            {"token_ids": torch.zeros(1, 1).int()},
            "token_ids must have a column for each draft of a request and one more, got shape [1, 1] for a "
            "request with 1 draft",
        ),
        ({"is_greedy": torch.zeros(1)}, "is_greedy must be bool, got float32"),
        ({"accept_rates": torch.zeros(1).int()}, "accept_rates must be float32 or float64, got int32"),
    ],
    ids=lambda value: value[:44] if isinstance(value, str) else "",
)
def test_errors(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    arguments = one_draft(0.5, 0.5, 0.5, token_ids=torch.full((1, 2), POISON))
    assert_raises(default_native, NAME, {**arguments, **changes}, ["token_ids"], message)


def test_op_is_well_formed() -> None:
    check_op(verify_probs._op, random_arguments(random.Random(3)))

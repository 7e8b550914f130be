"""verify_chain: agreement with the float64 reference, and what it does with awkward input."""

from __future__ import annotations

import math

import inputs
import margins
import pytest
import torch
from implementations import Implementation
from specdec_ops import Status

EXTRAS = {"return_logsumexp": True, "return_logprobs": True, "return_accept_probs": True}
VOCAB_SIZES = [1, 2, 7, 8, 15, 16, 17, 63, 64, 255, 256, 257, 4095, 4096, 4097, 8191, 8192, 8193, 10_000]
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_matches_reference_at_sizes_around_lanes_and_blocks(
    native: Implementation, vocab_size: int, draft_law: str
) -> None:
    """A9: the sizes go through every tile edge."""
    arguments = inputs.chain([3, 0, 1, 4, 2], vocab_size, draft_law, seed=vocab_size + 1)
    margins.assert_chain_matches(native.verify_chain(**arguments, **EXTRAS), arguments)


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_matches_reference_at_a_real_vocabulary(default_native: Implementation, draft_law: str) -> None:
    arguments = inputs.chain([3, 2], 151_936, draft_law, seed=1, dtype=torch.bfloat16, scale=4.0)
    margins.assert_chain_matches(default_native.verify_chain(**arguments, **EXTRAS), arguments, max_near=1)


@pytest.mark.parametrize("uniforms", [False, True], ids=["seeds", "uniforms"])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_matches_reference_for_every_dtype(
    native: Implementation, draft_law: str, dtype: torch.dtype, id_dtype: torch.dtype, uniforms: bool
) -> None:
    """B6: both integer dtypes are read as what they are."""
    arguments = inputs.chain(
        [2, 3, 0, 5] * 3, 517, draft_law, seed=3, dtype=dtype, id_dtype=id_dtype, uniforms=uniforms
    )
    margins.assert_chain_matches(native.verify_chain(**arguments, **EXTRAS), arguments, max_near=1)


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_matches_reference_over_many_requests(default_native: Implementation, draft_law: str) -> None:
    counts = [r % 6 for r in range(300)]
    arguments = inputs.chain(counts, 33, draft_law, seed=6, support=4)
    out = default_native.verify_chain(**arguments, **EXTRAS)
    margins.assert_chain_matches(out, arguments)
    assert 0.15 < out.num_accepted.sum().item() / sum(counts) < 0.95


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_own_draft_temperature_matches_reference(native: Implementation, draft_law: str) -> None:
    batch = 40
    arguments = inputs.chain(
        [3] * batch,
        300,
        draft_law,
        seed=6,
        draft_temperature=torch.linspace(0.3, 2.0, batch),
    )
    arguments["draft_temperature"][::7] = 0.0
    margins.assert_chain_matches(native.verify_chain(**arguments, **EXTRAS), arguments, max_near=1)


@pytest.mark.parametrize("draft_law", ["logits", "logits_and_logsumexp", "probs", "support"])
def test_requests_without_a_draft_law_count_as_one_hot(native: Implementation, draft_law: str) -> None:
    """A26: the fallback is per request; rows of a request without a law are never read."""
    arguments = inputs.chain([2] * 20, 300, draft_law, seed=7)
    has_law = torch.arange(20) % 3 > 0
    arguments["has_draft_law"] = has_law
    for name in ("draft_logits", "draft_probs", "draft_support_logprobs"):
        if name in arguments:
            arguments[name][~has_law.repeat_interleave(2)] = NAN
    out = native.verify_chain(**arguments, **EXTRAS)
    margins.assert_chain_matches(out, arguments)
    assert (out.status == Status.OK).all()
    strided = {**arguments, "has_draft_law": torch.stack([has_law, ~has_law], dim=1)[:, 0]}
    assert margins.all_same_bits(native.verify_chain(**strided, **EXTRAS), out)


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_a_long_chain_matches_reference(default_native: Implementation, draft_law: str) -> None:
    """B10, B14: any number of drafts, here 1,024, close to the target so that they get far."""
    arguments = inputs.chain([1024, 0, 1023], 48, draft_law, seed=8, noise=0.01, scale=0.05, support=48)
    if draft_law == "one_hot":
        ids = torch.zeros(1024 + 1 + 1 + 1023 + 1, dtype=torch.int64)
        ids[:1024], ids[1026:2049] = arguments["draft_token_ids"].split([1024, 1023])
        arguments["target_logits"].fill_(-15.0).scatter_(1, ids[:, None], 0.0)
    out = default_native.verify_chain(**arguments, **EXTRAS)
    margins.assert_chain_matches(out, arguments)
    assert out.token_ids.shape == (3, 1025)
    assert out.num_accepted.max() >= 100


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6, 7, 31, 32, 33])
def test_any_number_of_drafts_can_be_accepted(implementation: Implementation, k: int) -> None:
    ids = torch.arange(k) % 11
    logits = torch.zeros(k + 1, 11).scatter(1, torch.cat([ids, torch.tensor([4])])[:, None], 50.0)
    for temperature in (0.0, 1.0):
        out = implementation.verify_chain(
            logits, ids, torch.tensor([0, k]), temperature=temperature, seeds=1, positions=torch.tensor([9])
        )
        assert out.token_ids.tolist() == [[*ids.tolist(), 4]]
        assert out.num_accepted.tolist() == [k]


def test_empty_batch(implementation: Implementation) -> None:
    """B5: no requests; also after a call with some."""
    for _ in range(2):
        out = implementation.verify_chain(
            torch.zeros(0, 10), torch.zeros(0, dtype=torch.int32), torch.tensor([0]), **EXTRAS
        )
        shapes = [tuple(value.shape) for value in out if value is not None]
        assert shapes == [(0, 1), (0,), (0,), (0,), (0, 1), (0,)]
        assert out.token_ids.dtype == torch.int32
        implementation.verify_chain(
            torch.zeros(1, 10), torch.zeros(0, dtype=torch.int32), torch.tensor([0, 0]), temperature=0.0
        )


def test_greedy_batch_without_drafts(implementation: Implementation) -> None:
    """B5, D21: no drafts anywhere gives the bonus token and no accepted draft."""
    logits = torch.tensor([[0.0, 1.0, 0.5], [2.0, 1.0, 0.5]])
    out = implementation.verify_chain(
        logits, torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0, 0]), temperature=0.0
    )
    assert out.token_ids.tolist() == [[1], [0]]
    assert out.num_accepted.tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recovered_token_comes_from_the_rejected_row(
    implementation: Implementation, temperature: float
) -> None:
    """D19: rejection at the first, at the last of k, and k = 1."""
    rows = torch.full((4, 6), -INF)
    rows[torch.arange(4), torch.tensor([1, 2, 3, 4])] = 0.0
    for drafts, expected in [
        ([5, 2, 3], [1, -1, -1, -1]),
        ([1, 5, 3], [1, 2, -1, -1]),
        ([1, 2, 5], [1, 2, 3, -1]),
        ([1, 2, 3], [1, 2, 3, 4]),
    ]:
        out = implementation.verify_chain(
            rows,
            torch.tensor(drafts),
            torch.tensor([0, 3]),
            temperature=temperature,
            accept_uniforms=torch.zeros(3),
            recovered_uniforms=torch.zeros(1),
        )
        assert out.token_ids.tolist() == [expected]
    out = implementation.verify_chain(
        rows[:2],
        torch.tensor([5]),
        torch.tensor([0, 1]),
        temperature=temperature,
        accept_uniforms=torch.zeros(1),
        recovered_uniforms=torch.zeros(1),
    )
    assert out.token_ids.tolist() == [[1, -1]]


def test_drafts_of_no_probability_are_all_rejected(implementation: Implementation) -> None:
    """A31."""
    logits = torch.zeros(4, 5)
    logits[:, 3] = -INF
    out = implementation.verify_chain(
        logits, torch.tensor([3, 3, 3]), torch.tensor([0, 3]), seeds=1, positions=torch.tensor([0])
    )
    assert out.num_accepted.tolist() == [0]
    assert out.token_ids[0, 1:].tolist() == [-1, -1, -1]
    assert out.token_ids[0, 0] in (0, 1, 2, 4)


@pytest.mark.parametrize("draft_law", ["one_hot", "logits", "probs", "support"])
def test_coin_of_exactly_zero_does_not_accept_a_draft_of_no_probability(
    implementation: Implementation, draft_law: str
) -> None:
    """A13: logits -1000 except one, the candidate elsewhere, u = 0."""
    logits = torch.full((2, 4), -1000.0)
    logits[:, 1] = 1000.0
    laws = {
        "one_hot": {},
        "logits": {"draft_logits": torch.zeros(1, 4)},
        "probs": {"draft_probs": torch.full((1, 4), 0.25)},
        "support": {
            "draft_support_ids": torch.tensor([[2, -1]]),
            "draft_support_logprobs": torch.zeros(1, 2),
        },
    }
    out = implementation.verify_chain(
        logits,
        torch.tensor([2]),
        torch.tensor([0, 1]),
        accept_uniforms=torch.zeros(1),
        recovered_uniforms=torch.zeros(1),
        **laws[draft_law],
    )
    assert out.token_ids.tolist() == [[1, -1]]


@pytest.mark.parametrize("draft_law", ["one_hot", "probs"])
def test_a_draw_on_an_edge_takes_the_next_id(implementation: Implementation, draft_law: str) -> None:
    """A13: u exactly on a CDF edge, or exactly on the acceptance threshold."""
    p = inputs.logits_of([[0.25, 0.25, 0.25, 0.25]]).expand(2, 4)
    law = {} if draft_law == "one_hot" else {"draft_probs": torch.tensor([[0.0, 0.5, 0.0, 0.5]])}
    threshold = 0.25 if draft_law == "one_hot" else 0.5
    below, edge = math.nextafter(threshold, 0.0), threshold
    for u, accepted in [(below, 1), (edge, 0)]:
        out = implementation.verify_chain(
            p,
            torch.tensor([1]),
            torch.tensor([0, 1]),
            accept_uniforms=torch.tensor([u], dtype=torch.float64),
            recovered_uniforms=torch.tensor([0.5], dtype=torch.float64),
            **law,
        )
        assert out.num_accepted.tolist() == [accepted]
        assert out.token_ids[0, accepted] == 2


@pytest.mark.parametrize("k", [0, 1])
def test_the_largest_uniforms_stay_in_range(implementation: Implementation, k: int) -> None:
    """A9, A15: u = 1 - 2^-53 and 1 - 2^-24, at sizes around the tiles, zero mass at the end."""
    for vocab_size in (1, 16, 257, 4096, 8193, 10_000):
        logits = torch.full((k + 1, vocab_size), -INF)
        logits[:, 0] = 0.0
        for u in (torch.tensor([1 - 2.0**-53], dtype=torch.float64), torch.tensor([1 - 2.0**-24])):
            out = implementation.verify_chain(
                logits,
                torch.full((k,), vocab_size - 1),
                torch.tensor([0, k]),
                accept_uniforms=u[:k],
                recovered_uniforms=u,
            )
            assert out.token_ids[0].tolist() == [0, -1][: k + 1] if k == 0 or vocab_size > 1 else True


@pytest.mark.parametrize("draft_law", ["logits", "logits_and_logsumexp", "probs"])
def test_equal_laws_accept_every_coin(native: Implementation, draft_law: str) -> None:
    """A15: p = q accepts even u = 1 - 2^-53."""
    arguments = inputs.chain([4] * 50, 5000, draft_law, seed=9, noise=0.0, uniforms=True)
    if draft_law == "logits_and_logsumexp":
        draft_t = arguments["temperature"].repeat_interleave(4)
        arguments["draft_logsumexp"] = native.sample(
            arguments["draft_logits"], temperature=draft_t, uniforms=torch.zeros(200)
        ).logsumexp
    arguments["accept_uniforms"].fill_(1 - 2.0**-53 if draft_law != "probs" else 1 - 1e-6)
    out = native.verify_chain(**arguments)
    assert (out.num_accepted == 4).all()


def test_residual_of_nothing_draws_from_the_target(implementation: Implementation) -> None:
    """A residual that rounds to nothing falls back to the target law, not to an end of the vocabulary."""
    logits = torch.tensor([[-INF, 0.0, 0.0, -INF]]).expand(2, 4)
    for u, expected in [(0.0, 1), (0.49, 1), (0.51, 2), (0.99, 2)]:
        out = implementation.sample_recovered(
            logits[:1], torch.tensor([1]), draft_logits=logits[:1], uniforms=torch.tensor([u])
        )
        assert out.token_ids.tolist() == [expected]


def test_no_floor_is_added_to_a_small_residual(implementation: Implementation) -> None:
    """B15: a residual of mass 0.01 on two ids of 128,256 goes to these two."""
    vocab_size = 128_256
    target, draft = torch.full((1, vocab_size), -INF), torch.full((1, vocab_size), -INF)
    target[0, :4] = torch.tensor([0.495, 0.495, 0.005, 0.005]).log()
    draft[0, :2] = math.log(0.5)
    grid = (torch.arange(16) + 0.5) / 16
    out = implementation.sample_recovered(
        target.expand(16, -1),
        torch.zeros(16, dtype=torch.int64),
        draft_logits=draft.expand(16, -1),
        uniforms=grid,
    )
    assert out.token_ids.tolist() == [2] * 8 + [3] * 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad_id", [-1, -2, -(2**31), 10, 11, 2**31 - 1])
@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_ids_outside_the_vocabulary_are_never_looked_up(
    implementation: Implementation, draft_law: str, bad_id: int, temperature: float
) -> None:
    """A8, D7: rejected there, and the token comes from the target alone."""
    arguments = inputs.chain([3, 3], 10, draft_law, seed=11, temperature=torch.full((2,), temperature))
    if temperature > 0:
        arguments["draft_temperature"] = torch.ones(2)
    arguments["draft_token_ids"][3] = bad_id
    for name in ("draft_logits", "draft_probs", "draft_support_logprobs", "draft_logsumexp"):
        if name in arguments:
            arguments[name][3] = NAN
    out = implementation.verify_chain(**arguments, **EXTRAS)
    assert out.num_accepted[1] == 0
    assert out.status[1] == (Status.OK if bad_id == -1 else Status.INVALID_DRAFT_ID)
    without = inputs.select_requests(arguments, [0])
    without["cu_num_draft_tokens"] = torch.tensor([0, 3, 3])
    without["target_logits"] = torch.cat([without["target_logits"], arguments["target_logits"][4:5]])
    for name in ("temperature", "draft_temperature", "seeds", "positions"):
        if name in arguments:
            without[name] = arguments[name]
    assert out.token_ids[1].tolist() == [
        int(implementation.verify_chain(**without).token_ids[1, 0]),
        -1,
        -1,
        -1,
    ]
    margins.assert_chain_matches(out, arguments, max_near=0)


def test_padding_ends_the_drafts_early(implementation: Implementation) -> None:
    """A8: draft ids [1, 0, 1, -1, -1]: never more than 3 + 1 tokens, never -1 in the prefix."""
    logits = torch.full((6, 4), -INF)
    logits[torch.arange(6), torch.tensor([1, 0, 1, 2, 3, 3])] = 0.0
    probs = torch.full((5, 4), 0.25)
    probs[3:] = 0.0
    for temperature in (0.0, 1.0):
        for law in ({}, {"draft_probs": probs}):
            out = implementation.verify_chain(
                logits,
                torch.tensor([1, 0, 1, -1, -1]),
                torch.tensor([0, 5]),
                temperature=temperature,
                seeds=3,
                positions=torch.tensor([0]),
                **law,
            )
            assert out.token_ids.tolist() == [[1, 0, 1, 2, -1, -1]]
            assert (out.num_accepted.tolist(), out.status.tolist()) == ([3], [Status.OK])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("row", "token", "status"),
    [
        ([NAN] * 5, 0, Status.NON_FINITE_TARGET),
        ([0.0, NAN, 3.0, 1.0, 3.0], 2, Status.NON_FINITE_TARGET),
        ([NAN, -INF, -INF, -INF, -INF], 1, Status.NON_FINITE_TARGET),
        ([0.0, 1.0, INF, 2.0, INF], 2, Status.NON_FINITE_TARGET),
        ([NAN, 1.0, 5.0, INF, 0.0], 3, Status.NON_FINITE_TARGET),
        ([-INF] * 5, 0, Status.MASKED_TARGET),
    ],
    ids=["all-nan", "one-nan", "nan-and-masked", "inf", "nan-and-inf", "masked"],
)
@pytest.mark.parametrize("vocab_size", [5, 300, 8200])
def test_unusable_rows_give_a_fixed_id_and_a_status(
    implementation: Implementation,
    row: list[float],
    token: int,
    status: Status,
    temperature: float,
    vocab_size: int,
) -> None:
    """A10, A11, A38, A39, D7: one valid id for each request, the same everywhere, neighbours untouched."""
    fill = row[0] if len(set(map(str, row))) == 1 else -INF
    bad = torch.full((vocab_size,), fill)
    bad[: len(row)] = torch.tensor(row)
    arguments = inputs.chain([2, 2, 2], vocab_size, "logits", seed=12, temperature=torch.full((3,), 0.7))
    clean = implementation.verify_chain(**{**arguments, "temperature": torch.full((3,), temperature)})
    arguments["temperature"][:] = temperature
    arguments["target_logits"][3] = bad
    out = implementation.verify_chain(**arguments, **EXTRAS)
    assert out.token_ids[1].tolist() == [token, -1, -1]
    assert (int(out.num_accepted[1]), int(out.status[1])) == (0, status)
    assert out.logprobs is not None and out.logprobs[1].isnan().all()
    assert torch.equal(out.token_ids[::2], clean.token_ids[::2])
    margins.assert_chain_matches(out, arguments)


def test_an_unusable_row_behind_the_rejection_is_not_read(implementation: Implementation) -> None:
    """A27: rows are read in order, and only until the request's fate is known."""
    rows = torch.tensor([[0.0, -INF, -INF], [NAN, NAN, NAN], [NAN, NAN, NAN]])
    for temperature in (0.0, 1.0):
        out = implementation.verify_chain(
            rows,
            torch.tensor([1, 0]),
            torch.tensor([0, 2]),
            temperature=temperature,
            seeds=0,
            positions=torch.tensor([0]),
        )
        assert out.token_ids.tolist() == [[0, -1, -1]]
        assert out.status.tolist() == [Status.OK]


def test_a_later_unusable_row_ends_the_accepted_prefix(implementation: Implementation) -> None:
    rows = torch.tensor([[0.0, -INF, -INF], [NAN, 0.0, 1.0], [0.0, 0.0, 0.0]])
    for temperature in (0.0, 1.0):
        out = implementation.verify_chain(
            rows,
            torch.tensor([0, 0]),
            torch.tensor([0, 2]),
            temperature=temperature,
            seeds=0,
            positions=torch.tensor([0]),
        )
        assert out.token_ids.tolist() == [[0, 2, -1]]
        assert (out.num_accepted.tolist(), out.status.tolist()) == ([1], [Status.NON_FINITE_TARGET])


@pytest.mark.parametrize("value", [NAN, INF, "masked", "zeros", "negative"])
@pytest.mark.parametrize("draft_law", ["logits", "logits_and_logsumexp", "probs", "support"])
def test_unusable_draft_laws_have_a_status(
    implementation: Implementation, draft_law: str, value: object
) -> None:
    batch, vocab_size = 60, 700
    arguments = inputs.chain([1] * batch, vocab_size, draft_law, seed=13, scale=1.0)
    poison = -INF if isinstance(value, str) else value
    if draft_law.startswith("logits"):
        arguments["draft_logits"].fill_(poison)
        if draft_law == "logits_and_logsumexp":
            arguments["draft_logsumexp"].fill_(poison)
    elif draft_law == "probs":
        arguments["draft_probs"].fill_({"zeros": 0.0, "masked": 0.0, "negative": -0.5}.get(value, poison))
    else:
        arguments["draft_support_logprobs"].fill_(poison)
    out = implementation.verify_chain(**arguments, **EXTRAS)
    margins.assert_chain_matches(out, arguments)
    rejected = out.num_accepted == 0
    assert rejected.sum() > 0
    assert (out.status[rejected] == Status.UNUSABLE_DRAFT_LAW).all()
    assert ((out.token_ids[:, 0] >= 0) & (out.token_ids[:, 0] < vocab_size)).all()


def test_an_unusable_draft_law_leaves_the_output_law_exact(default_native: Implementation) -> None:
    """U1: a draft without a usable law must count as one-hot: p without x after a rejection."""
    draws = 1 << 16
    grid = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    p = [0.5, 0.3, 0.2]
    out = default_native.verify_chain(
        inputs.logits_of([p]).expand(2 * draws, 3),
        torch.zeros(draws, dtype=torch.int64),
        torch.arange(draws + 1),
        draft_logits=torch.full((1, 3), NAN).expand(draws, 3),
        accept_uniforms=grid,
        recovered_uniforms=(grid * 40_503) % 1.0,
    )
    measured = torch.bincount(out.token_ids[:, 0], minlength=3) / draws
    assert measured.tolist() == pytest.approx(p, abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_rows_masked_with_the_lowest_finite_number(
    implementation: Implementation, dtype: torch.dtype, temperature: float
) -> None:
    """A38: finfo.min in place of -inf, in some columns and in all; the latter is a uniform law."""
    lowest = torch.finfo(dtype).min
    some = torch.full((2, 8), lowest, dtype=dtype)
    some[:, 3] = some[:, 5] = 1.0
    whole = torch.full((2, 8), lowest, dtype=dtype)
    for u in (0.0, 0.3, 0.6, 0.99):
        for rows, first, last in [(some, 3, 5 if u >= 0.5 else 3), (whole, 0, int(u * 8))]:
            out = implementation.verify_chain(
                rows,
                torch.tensor([first]),
                torch.tensor([0, 1]),
                temperature=temperature,
                accept_uniforms=torch.zeros(1),
                recovered_uniforms=torch.tensor([u]),
                return_logprobs=True,
            )
            assert (out.token_ids.tolist(), out.status.tolist()) == ([[first, last]], [Status.OK])
            assert out.logprobs is not None and (out.logprobs <= 0).all()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("value", [-3e38, 3e38, -1e30, 1e30, 1e20, -1e13], ids=str)
def test_equal_logits_of_any_size_are_a_uniform_law(
    implementation: Implementation, value: float, temperature: float
) -> None:
    out = implementation.sample(
        torch.full((4, 8), value), temperature=temperature, uniforms=torch.tensor([0.0, 0.3, 0.6, 0.99])
    )
    assert (out.token_ids.tolist(), out.status.tolist()) == ([0, 2, 4, 7], [Status.OK] * 4)


@pytest.mark.parametrize("padding", [0.0, 1e30, NAN, INF], ids=str)
@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
@pytest.mark.parametrize("vocab_size", [5, 250, 4090, 8190])
def test_columns_behind_the_vocabulary_never_count(
    native: Implementation, vocab_size: int, draft_law: str, padding: float
) -> None:
    """A34: padded columns with garbage in target and draft rows; a draft id in there is rejected."""
    arguments = inputs.chain([2, 3, 1], vocab_size, draft_law, seed=14)
    arguments["temperature"][1] = 0.0
    expected = native.verify_chain(**arguments, **EXTRAS)
    for name in ("target_logits", "draft_logits", "draft_probs"):
        if name in arguments:
            rows = arguments[name]
            arguments[name] = torch.cat([rows, torch.full((rows.shape[0], 11), padding)], dim=1)
    out = native.verify_chain(**arguments, vocab_size=vocab_size, **EXTRAS)
    assert margins.all_same_bits(out, expected)
    arguments["draft_token_ids"][0] = vocab_size
    out = native.verify_chain(**arguments, vocab_size=vocab_size)
    assert (int(out.num_accepted[0]), int(out.status[0])) == (0, Status.INVALID_DRAFT_ID)
    assert int(out.token_ids[0, 0]) < vocab_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ties", [(5, 8200), (4095, 4096), (0, 8999), (300, 301), (7, 263)], ids=str)
def test_ties_go_to_the_lowest_id(
    implementation: Implementation, ties: tuple[int, int], dtype: torch.dtype
) -> None:
    """A33: equal maxima in different blocks, rows and lanes."""
    logits = torch.zeros(3, 9000, dtype=dtype)
    logits[0, list(ties)] = 2.0
    logits[1, list(ties)] = 2.0
    out = implementation.verify_chain(
        logits, torch.tensor([ties[0], ties[1]]), torch.tensor([0, 2]), temperature=0.0
    )
    assert out.token_ids.tolist() == [[ties[0], ties[0], -1]]
    equal = implementation.verify_chain(
        logits[2:], torch.zeros(0, dtype=torch.int64), torch.tensor([0, 0]), temperature=0.0
    )
    assert equal.token_ids.tolist() == [[0]]


def test_argmax_equals_torch_at_many_places(native: Implementation) -> None:
    """A44."""
    vocab_size = 129_280
    row = torch.randn(vocab_size, generator=inputs.generator(15))
    for start in range(0, 4000, 400):
        windows = row.repeat(2).as_strided((400, vocab_size), (1, 1), start)
        out = native.verify_chain(
            windows, torch.zeros(0, dtype=torch.int64), torch.zeros(401, dtype=torch.int64), temperature=0.0
        )
        assert torch.equal(out.token_ids.squeeze(1), windows.argmax(1))


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-6, 9.9e-6, NAN, -INF])
def test_temperatures_below_the_limit_are_greedy(implementation: Implementation, temperature: float) -> None:
    """A36, A42, B1: the same as an all-greedy call, for every seed, and finite with logits of 40."""
    logits = 40.0 * torch.randn(4, 300, generator=inputs.generator(16)).clamp(-1, 1)
    ids = logits.argmax(1)[:3]
    ids[2] = (ids[2] + 1) % 300
    expected = [[*ids[:2].tolist(), int(logits[2].argmax()), -1]]
    for seed in range(10):
        out = implementation.verify_chain(
            logits,
            ids,
            torch.tensor([0, 3]),
            temperature=temperature,
            seeds=seed,
            positions=torch.tensor([0]),
            return_logprobs=True,
            return_accept_probs=True,
        )
        assert out.token_ids.tolist() == expected
        assert out.accept_probs is not None and out.accept_probs.tolist() == [1.0, 1.0, 0.0]
        assert out.logprobs is not None
        wanted = logits.double().log_softmax(-1)[torch.arange(3), torch.tensor(expected[0][:3])]
        assert out.logprobs[0, :3].double().tolist() == pytest.approx(wanted.tolist(), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_small_temperatures_do_not_overflow(implementation: Implementation, dtype: torch.dtype) -> None:
    """A36: the sampling path just above the limit still finds the argmax."""
    logits = torch.linspace(-40, 40, 64).to(dtype).expand(2, 64)
    out = implementation.verify_chain(
        logits,
        torch.tensor([63]),
        torch.tensor([0, 1]),
        temperature=1.1e-5,
        seeds=0,
        positions=torch.tensor([0]),
    )
    assert out.token_ids.tolist() == [[63, 63]]
    assert out.status.tolist() == [Status.OK]


@pytest.mark.parametrize("temperature", [1e30, INF], ids=str)
def test_huge_temperatures_are_uniform_over_what_is_not_masked(
    implementation: Implementation, temperature: float
) -> None:
    logits = torch.tensor([[-INF, 3.0, -7.0, -INF, 100.0, 0.0]]).expand(4, 6)
    out = implementation.sample(logits, temperature=temperature, uniforms=torch.tensor([0.1, 0.3, 0.6, 0.9]))
    assert out.token_ids.tolist() == [1, 2, 4, 5]


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_mixed_batches_equal_their_requests_alone(native: Implementation, draft_law: str) -> None:
    """A4, B1, B2, D22: greedy and sampling requests, with and without drafts, in any order."""
    temperature = torch.tensor([0.0, -1.0, 1e-6, 0.7, 1.0, 0.0, 1.3])
    arguments = inputs.chain(
        [2, 0, 3, 1, 0, 4, 2],
        300,
        draft_law,
        seed=17,
        temperature=temperature,
        draft_temperature=torch.ones(7),
    )
    together = native.verify_chain(**arguments, **EXTRAS)
    margins.assert_chain_matches(together, arguments)
    for r in range(7):
        alone = native.verify_chain(**inputs.select_requests(arguments, [r]), **EXTRAS)
        width = alone.token_ids.shape[1]
        assert margins.same_bits(alone.token_ids[0], together.token_ids[r, :width])
        assert alone.num_accepted[0] == together.num_accepted[r]


def test_content_of_unused_drafts_does_not_matter(implementation: Implementation) -> None:
    """D24, D23: lengths decide; a buffer's old drafts behind the last request are not read."""
    buffer = torch.tensor([7, 7, 1, 1, 1, 7])
    cu = torch.tensor([5, 0, 0, 2, 5])[1:]
    logits = torch.zeros(4, 3)
    logits[:, 1] = 30.0
    out = implementation.verify_chain(
        logits,
        buffer[2:4],
        cu[:3],
        seeds=0,
        positions=torch.tensor([0, 1]),
        temperature=0.5,
        max_num_draft_tokens=4,
    )
    assert out.token_ids.tolist() == [[1, -1, -1, -1, -1], [1, 1, 1, -1, -1]]
    assert out.num_accepted.tolist() == [0, 2]


def test_outputs_are_only_what_was_asked_for(implementation: Implementation) -> None:
    arguments = inputs.chain([2, 1], 50, "logits", seed=18)
    plain = implementation.verify_chain(**arguments)
    assert plain.logsumexp is plain.logprobs is plain.accept_probs is None
    for name in ("logsumexp", "logprobs", "accept_probs"):
        out = implementation.verify_chain(**arguments, **{f"return_{name}": True})
        asked = {key for key, value in out._asdict().items() if value is not None}
        assert asked == {"token_ids", "num_accepted", "status", name}
        assert torch.equal(out.token_ids, plain.token_ids)


def test_extras_say_what_torch_says(implementation: Implementation) -> None:
    arguments = inputs.chain([3, 2, 0], 800, "logits", seed=19, temperature=torch.tensor([0.8, 1.0, 1.5]))
    out = implementation.verify_chain(**arguments, **EXTRAS)
    assert out.logsumexp is not None and out.logprobs is not None and out.accept_probs is not None
    requests = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
    scaled = arguments["target_logits"].double() / arguments["temperature"].double()[requests][:, None]
    read = torch.cat(
        [torch.arange(n) <= a for n, a in zip([4, 3, 1], out.num_accepted.tolist(), strict=True)]
    )
    assert torch.equal(read, ~out.logsumexp.isnan())
    assert torch.allclose(out.logsumexp[read], scaled.logsumexp(-1)[read], rtol=1e-6, atol=0)
    p, rows = scaled.softmax(-1), [0, 1, 2, 4, 5]
    q = (
        arguments["draft_logits"].double() / arguments["temperature"].double()[requests[rows]][:, None]
    ).softmax(-1)
    ids = arguments["draft_token_ids"]
    ratio = (p[rows, ids] / q[torch.arange(5), ids]).clamp(max=1.0)
    reached = torch.cat(
        [torch.arange(n) <= a for n, a in zip([3, 2], out.num_accepted.tolist()[:2], strict=True)]
    )
    assert torch.equal(reached, ~out.accept_probs.isnan())
    assert torch.allclose(out.accept_probs.double()[reached], ratio[reached], rtol=1e-5, atol=0)
    for r, first in enumerate([0, 4, 7]):
        n = int(out.num_accepted[r]) + 1
        wanted = p.log()[torch.arange(first, first + n), out.token_ids[r, :n]]
        assert torch.allclose(out.logprobs[r, :n].double(), wanted, rtol=1e-5, atol=1e-6)
        assert out.logprobs[r, n:].isnan().all()


def test_max_num_draft_tokens_only_widens_the_output(implementation: Implementation) -> None:
    arguments = inputs.chain([2, 3, 0], 60, "probs", seed=20)
    narrow = implementation.verify_chain(**arguments, **EXTRAS)
    wide = implementation.verify_chain(**arguments, **EXTRAS, max_num_draft_tokens=9)
    assert wide.token_ids.shape == (3, 10)
    assert torch.equal(wide.token_ids[:, :4], narrow.token_ids)
    assert (wide.token_ids[:, 4:] == -1).all()
    assert wide.logprobs is not None and wide.logprobs[:, 4:].isnan().all()


def test_support_ids_may_repeat_and_lie_outside(implementation: Implementation) -> None:
    """A23: several entries of one id add up; padding and ids outside the vocabulary count as nothing."""
    p = inputs.logits_of([[0.4, 0.3, 0.3]]).expand(2, 3)
    support = {
        "draft_support_ids": torch.tensor([[1, -1, 1, 3, 2, -7]]),
        "draft_support_logprobs": torch.tensor([[0.25, 0.9, 0.35, 0.9, 0.4, 0.9]]).log(),
    }
    for u, accepted in [(0.499, 1), (0.501, 0)]:
        out = implementation.verify_chain(
            p,
            torch.tensor([1]),
            torch.tensor([0, 1]),
            accept_uniforms=torch.tensor([u]),
            recovered_uniforms=torch.tensor([0.9]),
            **support,
        )
        assert out.num_accepted.tolist() == [accepted]
    assert out.token_ids.tolist() == [[0, -1]]


def test_docstring_example(implementation: Implementation) -> None:
    logits = torch.tensor([[0.0, 9.0], [9.0, 0.0], [0.0, 9.0]])
    out = implementation.verify_chain(logits, torch.tensor([1, 0]), torch.tensor([0, 2]), temperature=0.0)
    assert (out.token_ids.tolist(), out.num_accepted.tolist()) == ([[1, 0, 1]], [2])

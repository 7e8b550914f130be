"""token_logprobs: log-probabilities, ranks and the likeliest ids of rows."""

from __future__ import annotations

import math
import random
from typing import Any

import implementations
import inputs
import margins
import pytest
import specdec_ops
import torch
from implementations import Implementation
from specdec_ops import Status

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VOCAB_SIZES = (1, 2, 7, 64, 255, 256, 257, 4095, 4096, 4097, 9001)


def law(*probs: float) -> torch.Tensor:
    return inputs.logits_of([probs])


class TestRows:
    def test_a_token_and_the_likeliest_ids(self, implementation: Implementation) -> None:
        out = implementation.token_logprobs(law(0.5, 0.125, 0.25, 0.125), torch.tensor([2]), top_n=3)
        assert out.token_ids.tolist() == [[2, 0, 2, 1]]
        want = torch.tensor([[0.25, 0.5, 0.25, 0.125]]).log()
        torch.testing.assert_close(out.logprobs, want, rtol=0, atol=1e-6)
        assert (out.ranks.tolist(), out.status.tolist()) == ([2], [Status.OK])
        assert out.cu_num_tokens is None
        assert (out.logprobs.dtype, out.ranks.dtype) == (torch.float32, torch.int64)

    def test_ranks_count_equal_logits(self, implementation: Implementation) -> None:
        """As vLLM does: how many are at least as large."""
        logits = torch.tensor([[3.0, 1.0, 3.0, 2.0, 1.0, -0.0, 0.0]]).repeat(7, 1)
        out = implementation.token_logprobs(logits, torch.arange(7))
        assert out.ranks.tolist() == [2, 5, 2, 3, 5, 7, 7]

    def test_equal_logits_are_listed_by_rising_id(self, implementation: Implementation) -> None:
        logits = torch.zeros(1, 600)
        logits[0, [3, 599, 300]] = 1.0
        out = implementation.token_logprobs(logits, torch.tensor([0]), top_n=5)
        assert out.token_ids.tolist() == [[0, 3, 300, 599, 0, 1]]
        assert out.ranks.tolist() == [600]

    def test_zeros_of_both_signs_are_equal(self, implementation: Implementation) -> None:
        out = implementation.token_logprobs(torch.tensor([[-0.0, 0.0]]), torch.tensor([0]), top_n=2)
        assert out.token_ids.tolist() == [[0, 0, 1]]

    def test_at_a_temperature(self, implementation: Implementation) -> None:
        rows = torch.tensor([[math.log(2), 0.0]]).repeat(3, 1)
        out = implementation.token_logprobs(
            rows, torch.tensor([0, 1, 0]), temperature=torch.tensor([1.0, 0.5, 0.0])
        )
        want = torch.tensor([[2 / 3], [1 / 5], [2 / 3]]).log()
        torch.testing.assert_close(out.logprobs, want, rtol=0, atol=1e-6)

    def test_no_token(self, implementation: Implementation) -> None:
        out = implementation.token_logprobs(torch.zeros(2, 4), torch.tensor([-1, 1]), top_n=2)
        assert out.token_ids.tolist() == [[-1, -1, -1], [1, 0, 1]]
        assert out.logprobs.isnan().tolist() == [[True] * 3, [False] * 3]
        assert (out.ranks.tolist(), out.status.tolist()) == ([0, 4], [0, 0])

    @pytest.mark.parametrize("token", [4, 99, -2, 2**31 - 1])
    def test_tokens_that_are_no_ids(self, implementation: Implementation, token: int) -> None:
        out = implementation.token_logprobs(torch.zeros(1, 6), torch.tensor([token]), top_n=1, vocab_size=4)
        assert out.token_ids.tolist() == [[token, 0]]
        assert out.logprobs.isnan().tolist() == [[True, False]]
        assert (out.ranks.tolist(), out.status.tolist()) == ([0], [Status.INVALID_DRAFT_ID])

    def test_as_many_ids_as_there_are(self, implementation: Implementation) -> None:
        logits = torch.randn(1, 64, generator=inputs.generator(1))
        out = implementation.token_logprobs(logits, torch.tensor([5]), top_n=64)
        assert out.token_ids[0, 1:].tolist() == logits[0].argsort(descending=True).tolist()
        assert out.logprobs[0, 1:].exp().sum().item() == pytest.approx(1.0, abs=1e-5)

    @pytest.mark.parametrize("shape", [(0, 5), (0, 1)])
    def test_empty(self, implementation: Implementation, shape: tuple[int, int]) -> None:
        out = implementation.token_logprobs(torch.zeros(shape), torch.zeros(0, dtype=torch.int32), top_n=1)
        assert (out.token_ids.shape, out.token_ids.dtype) == ((0, 2), torch.int32)


class TestAwkwardRows:
    def test_masked_ids(self, implementation: Implementation) -> None:
        out = implementation.token_logprobs(torch.tensor([[-INF, 1.0, -INF]]), torch.tensor([2]), top_n=3)
        assert out.token_ids.tolist() == [[2, 1, 0, 2]]
        assert out.logprobs.tolist() == [[-INF, 0.0, -INF, -INF]]
        assert out.ranks.tolist() == [3]

    def test_masked_ids_of_later_blocks(self, native: Implementation) -> None:
        """What pads a block is no id."""
        logits = torch.full((1, 4100), -INF)
        logits[0, 4098] = 1.0
        out = native.token_logprobs(logits, torch.tensor([0]), top_n=3)
        assert out.token_ids.tolist() == [[0, 4098, 0, 1]]
        assert out.ranks.tolist() == [4100]

    def test_a_fully_masked_row(self, implementation: Implementation) -> None:
        out = implementation.token_logprobs(torch.full((1, 5), -INF), torch.tensor([1]), top_n=2)
        assert out.token_ids.tolist() == [[1, 0, 1]]
        assert out.logprobs.isnan().all()
        assert (out.ranks.tolist(), out.status.tolist()) == ([5], [Status.MASKED_TARGET])

    def test_nan_is_listed_last(self, implementation: Implementation) -> None:
        logits = torch.tensor([[NAN, 1.0, -INF, NAN, 2.0]])
        out = implementation.token_logprobs(logits.repeat(2, 1), torch.tensor([1, 0]), top_n=5)
        assert out.token_ids.tolist() == [[1, 4, 1, 2, 0, 3], [0, 4, 1, 2, 0, 3]]
        assert out.logprobs.isnan().all()
        assert out.ranks.tolist() == [2, 0]
        assert out.status.tolist() == [Status.NON_FINITE_TARGET] * 2

    def test_numbers_behind_a_block_of_nan(self, native: Implementation) -> None:
        logits = torch.full((1, 8200), NAN)
        logits[0, 4096:] = -INF
        logits[0, 8199] = -5.0
        out = native.token_logprobs(logits, torch.tensor([8199]), top_n=3)
        assert out.token_ids.tolist() == [[8199, 8199, 4096, 4097]]

    def test_masked_ids_come_before_blocks_of_nan(self, implementation: Implementation) -> None:
        """Also where there is but one NaN, and where padding fills the last block."""
        for nans, last, want in (
            (slice(0, 4096), 8199, [8199, 4096]),
            (slice(4096, 8192), 8199, [8199, 0]),
            (slice(4096, 8200), 9, [9, 0]),
            (slice(0, 1), 8199, [8199, 1]),
        ):
            logits = torch.full((1, 8200), -INF)
            logits[0, nans] = NAN
            logits[0, last] = -5.0
            out = implementation.token_logprobs(logits, torch.tensor([0]), top_n=2)
            assert out.token_ids.tolist() == [[0, *want]]
        logits = torch.full((1, 4100), -INF)
        logits[0, 4096:] = NAN
        logits[0, :4095] = NAN
        out = implementation.token_logprobs(logits, torch.tensor([0]), top_n=1)
        assert out.token_ids.tolist() == [[0, 4095]]

    def test_infinity(self, implementation: Implementation) -> None:
        out = implementation.token_logprobs(torch.tensor([[0.0, INF]]), torch.tensor([1]), top_n=1)
        assert out.token_ids.tolist() == [[1, 1]]
        assert (out.ranks.tolist(), out.status.tolist()) == ([1], [Status.NON_FINITE_TARGET])


class TestEmittedTokens:
    def test_rows_of_emitted_tokens(self, implementation: Implementation) -> None:
        """I10: accepted [2, 0, 3] of three drafts each: rows 0 to 2, 4, and 8 to 11."""
        logits = torch.randn(12, 30, generator=inputs.generator(2))
        emitted = torch.tensor([[5, 6, 7, -1], [8, -1, -1, -1], [1, 2, 3, 4]])
        cu = torch.tensor([0, 3, 6, 9])
        t = torch.tensor([0.5, 1.0, 2.0])
        out = implementation.token_logprobs(logits, emitted, top_n=4, temperature=t, cu_num_draft_tokens=cu)
        rows = [0, 1, 2, 4, 8, 9, 10, 11]
        want = implementation.token_logprobs(
            logits[rows],
            torch.tensor([5, 6, 7, 8, 1, 2, 3, 4]),
            top_n=4,
            temperature=t[[0, 0, 0, 1, 2, 2, 2, 2]],
        )
        assert out.cu_num_tokens.tolist() == [0, 3, 4, 8]
        assert out.cu_num_tokens.dtype == torch.int32
        for name in ("token_ids", "logprobs", "ranks", "status"):
            assert margins.same_bits(getattr(out, name)[:8], getattr(want, name)), name
        assert torch.all(out.token_ids[8:] == -1)
        assert out.logprobs[8:].isnan().all()
        assert out.ranks[8:].tolist() == out.status[8:].tolist() == [0] * 4

    def test_ragged_requests(self, implementation: Implementation) -> None:
        logits = torch.randn(6, 9, generator=inputs.generator(3))
        emitted = torch.tensor([[1, -1, -1], [2, 3, -1], [-1, -1, -1], [4, -1, -1]])
        for cu in (torch.tensor([0, 0, 2, 2, 2]), torch.tensor([0, 2, 2, 2], dtype=torch.int32)):
            out = implementation.token_logprobs(logits, emitted, cu_num_draft_tokens=cu)
            assert out.cu_num_tokens.tolist() == [0, 1, 3, 3, 4]
            assert out.token_ids[:, 0].tolist() == [1, 2, 3, 4, -1, -1]
            want = logits.log_softmax(-1)[[0, 1, 2, 5], [1, 2, 3, 4]]
            torch.testing.assert_close(out.logprobs[:4, 0], want, rtol=0, atol=2e-6)

    def test_ids_beyond_a_request_s_rows_do_not_count(self, implementation: Implementation) -> None:
        out = implementation.token_logprobs(
            torch.zeros(3, 9),
            torch.tensor([[1, 2, 3], [4, 5, 6]]),
            cu_num_draft_tokens=torch.tensor([0, 0, 1]),
        )
        assert out.cu_num_tokens.tolist() == [0, 1, 3]
        assert out.token_ids[:, 0].tolist() == [1, 4, 5]

    @pytest.mark.parametrize("draft_law", ["one_hot", "logits"])
    def test_logprobs_of_verify_chain(self, native: Implementation, draft_law: str) -> None:
        """Those that it reports itself, bit for bit."""
        arguments = inputs.chain([3, 0, 2, 5], 5000, draft_law, seed=4)
        arguments["temperature"][1] = 0.0
        verified = native.verify_chain(**arguments, return_logprobs=True)
        out = native.token_logprobs(
            arguments["target_logits"],
            verified.token_ids,
            temperature=arguments["temperature"],
            cu_num_draft_tokens=arguments["cu_num_draft_tokens"],
        )
        emitted = verified.token_ids >= 0
        count = int(emitted.sum())
        assert torch.equal(out.token_ids[:count, 0], verified.token_ids[emitted])
        assert torch.equal(out.logprobs[:count, 0], verified.logprobs[emitted])
        assert torch.equal(out.cu_num_tokens[1:], emitted.sum(1).cumsum(0))

    def test_no_requests(self, implementation: Implementation) -> None:
        out = implementation.token_logprobs(
            torch.zeros(2, 4),
            torch.zeros(0, 3, dtype=torch.int64),
            top_n=1,
            cu_num_draft_tokens=torch.tensor([0]),
        )
        assert out.cu_num_tokens.tolist() == [0]
        assert out.token_ids.tolist() == [[-1, -1]] * 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_and_offsets_do_not_matter(implementation: Implementation, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 4200, generator=inputs.generator(7)).to(dtype)
    ids = torch.tensor([5, 4100, 77])
    want = implementation.token_logprobs(logits, ids, top_n=9)
    for gap, offset in ((3, 1), (8, 8)):
        wide = torch.stack([ids, ids], dim=1)[:, 0]
        got = implementation.token_logprobs(inputs.strided(logits, gap, offset, NAN), wide, top_n=9)
        assert margins.all_same_bits(got, want)
    got = implementation.token_logprobs(logits, ids.int(), top_n=9)
    assert got.token_ids.dtype == torch.int32
    assert torch.equal(got.token_ids, want.token_ids)


def random_arguments(seed: int) -> dict[str, Any]:
    """Tokens of rows or of verified requests; ties, and rows that are no laws."""
    choice, draw = random.Random(seed), inputs.generator(seed)
    vocab_size = choice.choice(VOCAB_SIZES)
    counts = [choice.choice((0, 1, 3)) for _ in range(choice.randint(1, 3))]
    num_rows = sum(counts) + len(counts)
    logits = choice.choice((0.1, 3.0, 12.0)) * torch.randn(num_rows, vocab_size, generator=draw)
    if choice.random() < 0.4:
        logits = logits.round()
    logits = logits.to(choice.choice(DTYPES))
    for row in logits:
        if choice.random() < 0.2:
            row[torch.rand(vocab_size, generator=draw) < 0.9] = choice.choice((-INF, -INF, NAN))
        if choice.random() < 0.1:
            row[choice.randrange(vocab_size)] = choice.choice((NAN, INF))
    arguments: dict[str, Any] = {
        "logits": logits,
        "top_n": choice.randint(0, min(64, vocab_size)) if choice.random() < 0.8 else 0,
    }
    dtype = choice.choice((torch.int32, torch.int64))
    if choice.random() < 0.5:
        arguments["token_ids"] = torch.randint(-1, vocab_size, (num_rows,), generator=draw, dtype=dtype)
        entries = num_rows
    else:
        width = max(counts) + 1
        ids = torch.randint(0, vocab_size, (len(counts), width), generator=draw, dtype=dtype)
        for row in ids:
            row[choice.randint(0, width) :] = -1
        arguments["token_ids"] = ids
        arguments["cu_num_draft_tokens"] = torch.tensor([0, *counts]).cumsum(0)
        entries = len(counts)
    arguments["temperature"] = torch.tensor(
        [choice.choice((1.0, 0.7, 0.0, 5.0, INF, NAN)) for _ in range(entries)]
    )
    return arguments


@pytest.mark.parametrize("seed", range(60))
def test_matches_reference(native: Implementation, seed: int) -> None:
    arguments = random_arguments(seed)
    got = native.token_logprobs(**arguments)
    want = implementations.REFERENCE.token_logprobs(**arguments)
    for name in ("token_ids", "ranks", "status", "cu_num_tokens"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None and b is None) or torch.equal(a, b), name
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=3e-7, atol=1e-6, equal_nan=True)


def test_every_tier_gives_the_same_bits() -> None:
    for seed in range(100, 160):
        arguments = random_arguments(seed)
        results = []
        for name in implementations.native_cpu_names():
            with implementations.use(name) as tier:
                results.append(tier.token_logprobs(**arguments))
        assert all(margins.all_same_bits(result, results[0]) for result in results), seed


def test_threads_do_not_change_a_bit(default_native: Implementation, num_threads: None) -> None:
    logits, ids = torch.randn(40, 5000, generator=inputs.generator(8)), torch.arange(40)
    torch.set_num_threads(1)
    want = default_native.token_logprobs(logits, ids, top_n=20)
    for threads in (2, 5):
        torch.set_num_threads(threads)
        assert margins.all_same_bits(default_native.token_logprobs(logits, ids, top_n=20), want)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "logits dtype": (
        {"logits": torch.zeros(3, 4).double()},
        "logits must be float32, bfloat16 or float16, got float64",
    ),
    "rows": (
        {"token_ids": torch.zeros(2, dtype=torch.int64)},
        r"logits must be \[rows, width\] with 2 rows, got shape \[3, 4\]",
    ),
    "ids": ({"token_ids": torch.zeros(3)}, "token_ids must be int32 or int64, got float32"),
    "ids' shape": (
        {"token_ids": torch.zeros(3, 1, dtype=torch.int64)},
        r"token_ids must be \[rows\], got shape \[3, 1\]",
    ),
    "emitted ids' shape": (
        {"cu_num_draft_tokens": torch.tensor([0, 1])},
        r"token_ids must be \[batch, k \+ 1\] with cu_num_draft_tokens, got shape \[3\]",
    ),
    "too few rows": (
        {
            "token_ids": torch.zeros(4, 1, dtype=torch.int64),
            "cu_num_draft_tokens": torch.zeros(5, dtype=torch.int64),
        },
        r"logits must be \[num_drafts \+ batch, width\] with at least 4 rows, got shape \[3, 4\]",
    ),
    "totals": (
        {
            "token_ids": torch.zeros(2, 3, dtype=torch.int64),
            "cu_num_draft_tokens": torch.tensor([0, 1, 2]),
        },
        "cu_num_draft_tokens must end with at most num_drafts = 1, got 2",
    ),
    "narrow": (
        {
            "token_ids": torch.zeros(2, 1, dtype=torch.int64),
            "cu_num_draft_tokens": torch.tensor([0, 1, 1]),
        },
        "token_ids must have a column for each draft of a request and one more, got shape "
        r"\[2, 1\] for a request with 1 draft$",
    ),
    "temperature": (
        {"temperature": torch.ones(2)},
        r"temperature must be \[rows\] with 3 elements, got shape \[2\]",
    ),
    "temperature dtype": (
        {"temperature": torch.ones(3).double()},
        "temperature must be float32, got float64",
    ),
    "negative top_n": ({"top_n": -1}, r"top_n must be in \[0, 64\], got -1"),
    "large top_n": ({"top_n": 65, "logits": torch.zeros(3, 90)}, r"top_n must be in \[0, 64\], got 65"),
    "more than there are": ({"top_n": 5}, "top_n must be at most vocab_size = 4, got 5"),
    "vocab_size": ({"vocab_size": 0}, "vocab_size must be between 1 and the width of logits, 4, got 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(default_native: Implementation, case: str) -> None:
    arguments = {"logits": torch.zeros(3, 4), "token_ids": torch.zeros(3, dtype=torch.int64), **BAD[case][0]}
    with pytest.raises(RuntimeError, match=f"^token_logprobs: {BAD[case][1]}"):
        default_native.token_logprobs(**arguments)


def test_opcheck() -> None:
    op = specdec_ops.token_logprobs.__globals__["_op"]
    torch.library.opcheck(op, (torch.randn(3, 20), torch.arange(3), torch.ones(3)), {"top_n": 2})
    emitted, cu = torch.tensor([[1, 2], [3, -1]]), torch.tensor([0, 1, 1])
    torch.library.opcheck(op, (torch.randn(3, 20), emitted, torch.ones(2)), {"cu_num_draft_tokens": cu})

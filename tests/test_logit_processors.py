"""apply_logit_processors_: biases, penalties and masks at each draft position."""

from __future__ import annotations

import random
from typing import Any

import implementations
import inputs
import margins
import pytest
import specdec_ops
import torch
from implementations import Implementation
from torch import Tensor

INF, NAN = float("inf"), float("nan")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def ids(*lists: list[int]) -> Tensor:
    """Lists of ids, padded with -1."""
    width = max((len(each) for each in lists), default=0)
    return torch.tensor([each + [-1] * (width - len(each)) for each in lists], dtype=torch.int64)


def bitmask(rows: list[list[int]], vocab_size: int) -> Tensor:
    """The allowed ids of each row, packed."""
    words = torch.zeros(len(rows), (vocab_size + 31) // 32, dtype=torch.int64)
    for row, allowed in enumerate(rows):
        for i in allowed:
            words[row, i // 32] |= 1 << (i % 32)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def masked(logits: Tensor) -> list[list[int]]:
    return [(row == -INF).nonzero().flatten().tolist() for row in logits]


def chain(drafts: list[list[int]]) -> dict[str, Tensor]:
    return {
        "draft_token_ids": torch.tensor([token for own in drafts for token in own], dtype=torch.int64),
        "cu_num_draft_tokens": torch.tensor([0, *(len(own) for own in drafts)]).cumsum(0),
    }


class TestBias:
    def test_a_bias_is_added_in_every_row_of_its_request(self, implementation: Implementation) -> None:
        """I3: also at draft positions and in the bonus row."""
        logits = torch.ones(5, 6)
        implementation.apply_logit_processors_(
            logits,
            **chain([[3, 4], [5]]),
            logit_bias_ids=ids([1, 3], [2]),
            logit_bias=torch.tensor([[-100.0, 0.5], [2.0, 7.0]]),
        )
        want = torch.ones(5, 6)
        want[:3, 1], want[:3, 3], want[3:, 2] = -99.0, 1.5, 3.0
        assert torch.equal(logits, want)

    def test_of_an_id_that_is_listed_twice_the_first_counts(self, implementation: Implementation) -> None:
        logits = torch.zeros(1, 4)
        implementation.apply_logit_processors_(
            logits, logit_bias_ids=ids([2, -1, 2]), logit_bias=torch.tensor([[1.0, 9.0, 5.0]])
        )
        assert logits.tolist() == [[0.0, 0.0, 1.0, 0.0]]


class TestPenalties:
    def test_counts_of_output_and_drafts(self, implementation: Implementation) -> None:
        """I1: at slot i the drafts before i count."""
        logits = torch.zeros(4, 5)
        implementation.apply_logit_processors_(
            logits,
            **chain([[2, 4, 2]]),
            frequency_penalty=0.5,
            presence_penalty=4.0,
            output_token_ids=ids([2, 1, 2, 0]),
            output_lens=torch.tensor([3]),
        )
        assert logits.tolist() == [
            [0.0, -4.5, -5.0, 0.0, 0.0],
            [0.0, -4.5, -5.5, 0.0, 0.0],
            [0.0, -4.5, -5.5, 0.0, -4.5],
            [0.0, -4.5, -6.0, 0.0, -4.5],
        ]

    def test_repetition_counts_the_prompt_too(self, implementation: Implementation) -> None:
        logits = torch.tensor([[2.0, 2.0, -2.0, 2.0, 0.0]]).repeat(2, 1)
        implementation.apply_logit_processors_(
            logits,
            **chain([[3]]),
            repetition_penalty=2.0,
            prompt_token_ids=ids([0, 4, 1]),
            prompt_lens=torch.tensor([2]),
            output_token_ids=ids([2, 0]),
            output_lens=torch.tensor([1]),
        )
        assert logits.tolist() == [[1.0, 2.0, -4.0, 2.0, 0.0], [1.0, 2.0, -4.0, 1.0, 0.0]]

    def test_the_prompt_counts_for_repetition_alone(self, implementation: Implementation) -> None:
        logits = torch.ones(1, 3)
        implementation.apply_logit_processors_(
            logits,
            frequency_penalty=1.0,
            presence_penalty=1.0,
            prompt_token_ids=ids([1]),
            prompt_lens=torch.tensor([1]),
        )
        assert logits.tolist() == [[1.0, 1.0, 1.0]]

    def test_all_three_in_order(self, implementation: Implementation) -> None:
        """3 / 2 - 0.25 * 2 - 0.125, and -3 * 2 - ..."""
        logits = torch.tensor([[3.0, -3.0]])
        implementation.apply_logit_processors_(
            logits,
            repetition_penalty=2.0,
            frequency_penalty=0.25,
            presence_penalty=0.125,
            output_token_ids=ids([0, 1, 0, 1]),
            output_lens=torch.tensor([4]),
        )
        assert logits.tolist() == [[0.875, -6.625]]

    def test_biases_come_first(self, implementation: Implementation) -> None:
        logits = torch.tensor([[1.0]])
        implementation.apply_logit_processors_(
            logits,
            logit_bias_ids=ids([0]),
            logit_bias=torch.tensor([[3.0]]),
            repetition_penalty=2.0,
            prompt_token_ids=ids([0]),
            prompt_lens=torch.tensor([1]),
        )
        assert logits.item() == 2.0

    def test_requests_have_their_own(self, implementation: Implementation) -> None:
        """What one request has seen does not count for the next, whoever has the memory."""
        logits = torch.zeros(3, 4)
        implementation.apply_logit_processors_(
            logits,
            presence_penalty=torch.tensor([1.0, 0.0, 2.0]),
            output_token_ids=ids([0, 1], [2], [3]),
            output_lens=torch.tensor([2, 1, 1]),
        )
        assert logits.tolist() == [[-1.0, -1, 0, 0], [0.0, 0, 0, 0], [0.0, 0, 0, -2]]

    def test_tokens_that_are_no_ids_count_for_nothing(self, implementation: Implementation) -> None:
        logits = torch.zeros(3, 4)
        implementation.apply_logit_processors_(
            logits,
            **chain([[-1, 9]]),
            presence_penalty=1.0,
            output_token_ids=ids([-1, 4, 2**40, 1]),
            output_lens=torch.tensor([4]),
        )
        assert logits.tolist() == [[0.0, -1.0, 0.0, 0.0]] * 3


class TestMasks:
    def test_allowed_ids(self, implementation: Implementation) -> None:
        """The second request has none, and is free."""
        logits = torch.zeros(4, 40)
        implementation.apply_logit_processors_(
            logits, **chain([[1], [2]]), allowed_token_ids=ids([0, 33, 33, 99], [])
        )
        assert (logits[:2] == 0).nonzero().tolist() == [[0, 0], [0, 33], [1, 0], [1, 33]]
        assert logits[2:].eq(0).all()

    @pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 70])
    def test_a_grammar_of_each_row(self, implementation: Implementation, vocab_size: int) -> None:
        """I7, I8: each row by its own bits, the bonus row too; bits behind the last id mean nothing."""
        allowed = [[0], list(range(0, vocab_size, 3)), [vocab_size - 1], list(range(vocab_size))]
        words = bitmask([*allowed[:3], list(range((vocab_size + 31) // 32 * 32))], vocab_size)
        logits = torch.zeros(4, vocab_size + 2)
        implementation.apply_logit_processors_(
            logits, **chain([[5, 6, -1]]), grammar_bitmask=words, vocab_size=vocab_size
        )
        assert masked(logits) == [[i for i in range(vocab_size) if i not in row] for row in allowed]

    def test_a_bitmask_may_be_wide_and_strided(self, implementation: Implementation) -> None:
        words = bitmask([[1, 40], [2]], 64)
        wide = torch.zeros(2, 6, dtype=torch.int32)
        wide[:, ::3] = words
        logits = torch.zeros(2, 64)
        implementation.apply_logit_processors_(logits, grammar_bitmask=wide[:, ::3])
        assert (logits == 0).nonzero().tolist() == [[0, 1], [0, 40], [1, 2]]

    def test_grammar_and_allowed_ids_both_hold(self, implementation: Implementation) -> None:
        logits = torch.zeros(1, 8)
        implementation.apply_logit_processors_(
            logits, allowed_token_ids=ids([1, 2, 3]), grammar_bitmask=bitmask([[2, 3, 4]], 8)
        )
        assert masked(logits) == [[0, 1, 4, 5, 6, 7]]

    def test_stop_tokens_before_the_least_number_of_tokens(self, implementation: Implementation) -> None:
        """I4: an output of 3 that must have 5: rows 0 and 1, also of the bonus row by its own position."""
        logits = torch.zeros(8, 6)
        implementation.apply_logit_processors_(
            logits,
            **chain([[0] * 4, [0], []]),
            min_tokens=torch.tensor([5, 9, 3]),
            output_lens=torch.tensor([3, 2, 3]),
            stop_token_ids=ids([2, 5], [1], [0]),
        )
        assert masked(logits) == [[2, 5], [2, 5], [], [], [], [1], [1], []]

    def test_bad_words(self, implementation: Implementation) -> None:
        """I1: words of one token everywhere, longer ones behind the tokens before, output or draft."""
        logits = torch.zeros(3, 10)
        implementation.apply_logit_processors_(
            logits,
            **chain([[4, 5]]),
            output_token_ids=ids([9, 3, 7]),
            output_lens=torch.tensor([2]),
            bad_words=torch.tensor([[[1, -1, -1], [3, 4, 5], [4, 5, 6], [3, 2, -1], [9, 3, 8], [7, 0, -1]]]),
        )
        assert masked(logits) == [[1, 2, 8], [1, 5], [1, 6]]

    def test_a_word_that_is_longer_than_the_output(self, implementation: Implementation) -> None:
        logits = torch.zeros(2, 10)
        implementation.apply_logit_processors_(
            logits, **chain([[4]]), bad_words=torch.tensor([[[3, 4, 5], [-1, 4, 5], [4, 99, -1], [4, 6, -1]]])
        )
        assert masked(logits) == [[], [6]]

    def test_masks_come_last(self, implementation: Implementation) -> None:
        logits = torch.tensor([[NAN, INF, 1.0]])
        implementation.apply_logit_processors_(
            logits,
            logit_bias_ids=ids([0, 1, 2]),
            logit_bias=torch.full((1, 3), 5.0),
            allowed_token_ids=ids([2]),
        )
        assert logits.tolist() == [[-INF, -INF, 6.0]]

    def test_a_fully_masked_row_is_data(self, native: Implementation) -> None:
        logits = torch.zeros(2, 5)
        native.apply_logit_processors_(logits, grammar_bitmask=bitmask([[], [3]], 5))
        out = native.sample(logits, seeds=1, positions=torch.arange(2))
        assert out.status.tolist() == [specdec_ops.Status.MASKED_TARGET, 0]
        assert out.token_ids.tolist() == [0, 3]


class TestRows:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_one_rounding_each_for_biases_and_penalties(
        self, implementation: Implementation, dtype: torch.dtype
    ) -> None:
        logits = torch.tensor([[1.37, -2.11, 0.77]]).to(dtype)
        want = (logits.float() + 0.3).to(dtype).float()
        want = torch.where(want > 0, want / 1.1, want * 1.1)
        want = ((want - torch.tensor(0.7) * 2) - 0.2).to(dtype)
        implementation.apply_logit_processors_(
            logits,
            logit_bias_ids=ids([0, 1, 2]),
            logit_bias=torch.full((1, 3), 0.3),
            repetition_penalty=1.1,
            frequency_penalty=0.7,
            presence_penalty=0.2,
            output_token_ids=ids([0, 1, 2, 2, 1, 0]),
            output_lens=torch.tensor([6]),
        )
        digit = torch.finfo(dtype).eps
        exact = 0.0 if implementation.is_native else digit
        torch.testing.assert_close(logits, want, rtol=exact, atol=exact)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_ids_that_nothing_applies_to_keep_their_bits(
        self, implementation: Implementation, dtype: torch.dtype
    ) -> None:
        wide = torch.randn(3, 50, generator=inputs.generator(1)).to(dtype)
        wide[0, 9] = NAN
        before, logits = wide.clone(), wide[:, 4:44]
        implementation.apply_logit_processors_(
            logits,
            **chain([[7], []]),
            presence_penalty=1.0,
            logit_bias_ids=ids([39], [0]),
            logit_bias=torch.ones(2, 1),
            allowed_token_ids=ids([], [0, 1, 38]),
            vocab_size=39,
        )
        changed = (wide != before) & ~(wide.isnan() & before.isnan())
        assert changed.nonzero().tolist() == [[1, 11], [2, 4], *([2, i + 4] for i in range(2, 38))]

    def test_empty(self, implementation: Implementation) -> None:
        implementation.apply_logit_processors_(torch.zeros(0, 4), presence_penalty=1.0)
        logits = torch.randn(2, 4, generator=inputs.generator(2))
        before = logits.clone()
        implementation.apply_logit_processors_(
            logits,
            logit_bias_ids=torch.zeros(2, 0, dtype=torch.int64),
            logit_bias=torch.zeros(2, 0),
            allowed_token_ids=torch.zeros(2, 0, dtype=torch.int64),
            bad_words=torch.zeros(2, 0, 3, dtype=torch.int64),
            prompt_token_ids=torch.zeros(2, 0, dtype=torch.int64),
            prompt_lens=torch.zeros(2, dtype=torch.int64),
            repetition_penalty=2.0,
        )
        assert torch.equal(logits, before)

    def test_no_memory_is_left_behind_by_a_call(self, native: Implementation) -> None:
        """Counts of a request must be gone for the next one of the same worker."""
        for _ in range(2):
            logits = torch.zeros(300, 64)
            outputs = torch.arange(300)[:, None] % 64
            native.apply_logit_processors_(
                logits,
                presence_penalty=1.0,
                output_token_ids=outputs,
                output_lens=torch.ones(300, dtype=torch.int64),
            )
            assert torch.equal(logits, torch.zeros(300, 64).scatter(1, outputs, -1.0))


def random_arguments(seed: int) -> dict[str, Any]:
    choice, draw = random.Random(seed), inputs.generator(seed)
    vocab_size = choice.choice((1, 2, 31, 32, 33, 100, 300))
    counts = [choice.choice((0, 1, 3)) for _ in range(choice.randint(1, 4))]
    batch, num_drafts = len(counts), sum(counts)

    def some_ids(*shape: int) -> Tensor:
        # Few different ones, so that lists meet.
        low = choice.choice((-2, 0))
        drawn = torch.randint(low, min(vocab_size, 6) + 2, shape, generator=draw)
        return drawn.to(choice.choice((torch.int32, torch.int64)))

    def values(*shape: int) -> Tensor:
        return torch.randint(-8, 9, shape, generator=draw).float() / 4

    logits = torch.randint(-60, 61, (num_drafts + batch, vocab_size + choice.choice((0, 3))), generator=draw)
    arguments: dict[str, Any] = {
        "logits": (logits / 4).to(choice.choice(DTYPES)),
        "draft_token_ids": some_ids(num_drafts),
        "cu_num_draft_tokens": torch.tensor([0, *counts][choice.randint(0, 1) :]).cumsum(0),
        "vocab_size": vocab_size,
    }
    prompt_width, output_width = choice.choice((0, 3, 200)), choice.choice((0, 4, 200))
    if choice.random() < 0.7:
        arguments["prompt_token_ids"] = some_ids(batch, prompt_width)
        arguments["prompt_lens"] = torch.randint(0, prompt_width + 1, (batch,), generator=draw)
    if choice.random() < 0.8:
        arguments["output_token_ids"] = some_ids(batch, output_width)
    arguments["output_lens"] = torch.randint(0, output_width + 1, (batch,), generator=draw)
    if choice.random() < 0.5:
        width = choice.choice((0, 3))
        arguments |= {"logit_bias_ids": some_ids(batch, width), "logit_bias": values(batch, width)}
    if choice.random() < 0.6:
        arguments["repetition_penalty"] = torch.tensor([choice.choice((1.0, 2.0, 0.5)) for _ in counts])
    if choice.random() < 0.6:
        arguments["frequency_penalty"] = values(batch) * choice.choice((0, 1))
    if choice.random() < 0.6:
        arguments["presence_penalty"] = values(batch)
    if choice.random() < 0.4:
        arguments["allowed_token_ids"] = some_ids(batch, choice.choice((0, 1, 4)))
    if choice.random() < 0.4:
        words = (vocab_size + 31) // 32 + choice.choice((0, 1))
        drawn = torch.randint(-(2**31), 2**31, (num_drafts + batch, words), generator=draw)
        drawn[torch.rand(len(drawn), generator=draw) < 0.3] = -1
        arguments["grammar_bitmask"] = drawn.to(torch.int32)
    if choice.random() < 0.5:
        arguments["min_tokens"] = arguments["output_lens"] + choice.randint(-1, 4)
        arguments["stop_token_ids"] = some_ids(batch, choice.choice((0, 2)))
    if choice.random() < 0.5:
        arguments["bad_words"] = some_ids(batch, choice.randint(0, 5), choice.randint(1, 3))
    return arguments


@pytest.mark.parametrize("seed", range(80))
def test_matches_reference(implementation: Implementation, seed: int) -> None:
    """Numbers of few digits, so that nothing is rounded; then to the bit."""
    arguments, wanted = random_arguments(seed), random_arguments(seed)
    implementation.apply_logit_processors_(**arguments)
    implementations.REFERENCE.apply_logit_processors_(**wanted)
    got, want = arguments["logits"], wanted["logits"]
    # Frequencies of long outputs take more digits than 16 bits have; the roundings may differ by one digit.
    exact = got.dtype == torch.float32
    torch.testing.assert_close(
        got, want, rtol=0 if exact else torch.finfo(got.dtype).eps, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("seed", range(80, 120))
def test_each_row_is_that_of_a_request_whose_output_has_the_drafts(native: Implementation, seed: int) -> None:
    """Row by row without drafts, to the bit: what a draft position sees is its own past."""
    arguments = random_arguments(seed)
    before = arguments["logits"].clone()
    native.apply_logit_processors_(**arguments)
    cu = arguments["cu_num_draft_tokens"].tolist()
    batch = len(arguments["output_lens"])
    cu = cu if len(cu) > batch else [0, *cu]
    for request in range(batch):
        for slot in range(cu[request + 1] - cu[request] + 1):
            row = cu[request] + request + slot
            own = {
                name: value[request : request + 1] if isinstance(value, Tensor) else value
                for name, value in arguments.items()
                if name not in ("logits", "draft_token_ids", "cu_num_draft_tokens", "grammar_bitmask")
            }
            length = int(own["output_lens"])
            past = own.get("output_token_ids", torch.zeros(1, 0, dtype=torch.int64))[:, :length].long()
            missing = length - past.shape[1]
            drafts = arguments["draft_token_ids"][cu[request] : cu[request] + slot].long()[None]
            own["output_token_ids"] = torch.cat([torch.full((1, missing), -1), past, drafts], dim=1)
            own["output_lens"] = own["output_lens"] + slot
            if "grammar_bitmask" in arguments:
                own["grammar_bitmask"] = arguments["grammar_bitmask"][row : row + 1]
            alone = before[row : row + 1].clone()
            native.apply_logit_processors_(alone, **own)
            assert margins.same_bits(alone[0], arguments["logits"][row]), (request, slot)


def test_threads_do_not_change_a_bit(default_native: Implementation, num_threads: None) -> None:
    draw = inputs.generator(3)
    arguments: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.7,
        "output_token_ids": torch.randint(0, 9000, (40, 200), generator=draw),
        "output_lens": torch.randint(0, 200, (40,), generator=draw),
        "allowed_token_ids": torch.randint(0, 9000, (40, 4000), generator=draw),
    }
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(torch.randn(40, 9000, generator=inputs.generator(4)))
        default_native.apply_logit_processors_(results[-1], **arguments)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


#: Of three rows of four ids: a request with one draft, and one without.
GOOD = {
    "logits": torch.zeros(3, 4),
    "draft_token_ids": torch.tensor([1]),
    "cu_num_draft_tokens": torch.tensor([0, 1, 1]),
}
LENS, LISTS = torch.tensor([1, 0]), torch.zeros(2, 2, dtype=torch.int64)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "logits": (
        {"logits": torch.zeros(3, 4).double()},
        "logits must be float32, bfloat16 or float16, got float64",
    ),
    "shape": (
        {"logits": torch.zeros(3, 4, 1)},
        r"logits must be \[num_drafts \+ batch, width\], got shape \[3, 4, 1\]",
    ),
    "columns": (
        {"logits": torch.zeros(4, 3).t()},
        "logits must have a contiguous last dimension, got stride 3",
    ),
    "vocab_size": ({"vocab_size": 5}, "vocab_size must be between 1 and the width of logits, 4, got 5"),
    "drafts alone": (
        {"cu_num_draft_tokens": None},
        "draft_token_ids and cu_num_draft_tokens must be given together, got one",
    ),
    "drafts": ({"draft_token_ids": torch.zeros(1)}, "draft_token_ids must be int32 or int64, got float32"),
    "many drafts": (
        {"draft_token_ids": torch.zeros(4, dtype=torch.int64)},
        r"draft_token_ids must be \[num_drafts\] with at most 3 elements, got shape \[4\]",
    ),
    "totals": (
        {"cu_num_draft_tokens": torch.tensor([0, 1, 2])},
        "cu_num_draft_tokens must end with at most num_drafts = 1, got 2",
    ),
    "bias alone": (
        {"logit_bias": torch.zeros(2, 2)},
        "logit_bias_ids and logit_bias must be given together, got one",
    ),
    "bias ids": (
        {"logit_bias_ids": torch.zeros(3, 2, dtype=torch.int64), "logit_bias": torch.zeros(3, 2)},
        r"logit_bias_ids must be \[batch, n\] with 2 rows, got shape \[3, 2\]",
    ),
    "bias ids' dtype": (
        {"logit_bias_ids": torch.zeros(2, 2), "logit_bias": torch.zeros(2, 2)},
        "logit_bias_ids must be int32 or int64, got float32",
    ),
    "bias": (
        {"logit_bias_ids": LISTS, "logit_bias": torch.zeros(2, 3)},
        r"logit_bias must have the shape of logit_bias_ids, shape \[2, 2\], got shape \[2, 3\]",
    ),
    "bias dtype": (
        {"logit_bias_ids": LISTS, "logit_bias": torch.zeros(2, 2).half()},
        "logit_bias must be float32, got float16",
    ),
    "repetition": (
        {"repetition_penalty": 0.0},
        "repetition_penalty must be positive and finite, got 0 for request 0",
    ),
    "frequency": (
        {"frequency_penalty": torch.tensor([1.0, NAN])},
        "frequency_penalty must be finite, got nan for request 1",
    ),
    "presence": (
        {"presence_penalty": torch.zeros(3)},
        r"presence_penalty must be \[batch\] with 2 elements, got shape \[3\]",
    ),
    "penalty dtype": (
        {"presence_penalty": torch.zeros(2).double()},
        "presence_penalty must be float32, got float64",
    ),
    "prompt alone": (
        {"prompt_token_ids": LISTS},
        "prompt_token_ids and prompt_lens must be given together, got one",
    ),
    "output alone": (
        {"output_token_ids": LISTS},
        "output_lens must be given with output_token_ids, got output_token_ids alone",
    ),
    "long prompt": (
        {"prompt_token_ids": LISTS, "prompt_lens": torch.tensor([0, 3])},
        r"prompt_lens must be in \[0, 2\], got 3 for request 1",
    ),
    "negative output": (
        {"output_token_ids": LISTS, "output_lens": torch.tensor([-1, 0])},
        r"output_lens must be in \[0, 2\], got -1 for request 0",
    ),
    "lens": (
        {"output_token_ids": LISTS, "output_lens": torch.zeros(3, dtype=torch.int64)},
        r"output_lens must be \[batch\] with 2 elements, got shape \[3\]",
    ),
    "stops alone": (
        {"stop_token_ids": LISTS},
        "min_tokens and stop_token_ids must be given together, got one",
    ),
    "no lens": (
        {"min_tokens": LENS, "stop_token_ids": LISTS},
        "output_lens must be given with min_tokens, got min_tokens alone",
    ),
    "min_tokens": (
        {"min_tokens": torch.zeros(2), "stop_token_ids": LISTS, "output_lens": LENS},
        "min_tokens must be int32 or int64, got float32",
    ),
    "stops": (
        {"min_tokens": LENS, "stop_token_ids": LISTS[0], "output_lens": LENS},
        r"stop_token_ids must be \[batch, n\] with 2 rows, got shape \[2\]",
    ),
    "allowed": (
        {"allowed_token_ids": LISTS[:1]},
        r"allowed_token_ids must be \[batch, n\] with 2 rows, got shape \[1, 2\]",
    ),
    "bad words": ({"bad_words": LISTS}, r"bad_words must be \[batch, words, length\], got shape \[2, 2\]"),
    "bad words' rows": (
        {"bad_words": torch.zeros(1, 2, 2, dtype=torch.int64)},
        r"bad_words must be \[batch, n\] with 2 rows, got shape \[1, 4\]",
    ),
    "bitmask dtype": (
        {"grammar_bitmask": torch.zeros(3, 1, dtype=torch.int64)},
        "grammar_bitmask must be int32, got int64",
    ),
    "bitmask": (
        {"grammar_bitmask": torch.zeros(2, 1, dtype=torch.int32)},
        r"grammar_bitmask must be \[num_drafts \+ batch, words\] with 3 rows of at least 1 word, got shape",
    ),
    "narrow bitmask": (
        {"grammar_bitmask": torch.zeros(3, 1, dtype=torch.int32), "logits": torch.zeros(3, 33)},
        r"grammar_bitmask must be \[num_drafts \+ batch, words\] with 3 rows of at least 2 words, got shape",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(default_native: Implementation, case: str) -> None:
    with pytest.raises(RuntimeError, match=f"^apply_logit_processors_: {BAD[case][1]}"):
        default_native.apply_logit_processors_(**{**GOOD, **BAD[case][0]})


def test_opcheck() -> None:
    op = specdec_ops.apply_logit_processors_.__globals__["_op"]
    one = torch.ones(2)
    penalties = {"repetition_penalty": one, "frequency_penalty": one, "presence_penalty": one}
    torch.library.opcheck(
        op, (torch.zeros(3, 4), GOOD["draft_token_ids"], GOOD["cu_num_draft_tokens"]), penalties
    )

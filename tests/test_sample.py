"""sample: the plain sampler and the draft model's, against the float64 reference."""

from __future__ import annotations

import math

import inputs
import margins
import pytest
import torch
from implementations import Implementation
from specdec_ops import Status

VOCAB_SIZES = [1, 2, 7, 8, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097, 8191, 8192, 8193, 10_000]


def rows(batch: int, vocab_size: int, seed: int, dtype: torch.dtype = torch.float32) -> inputs.Arguments:
    random = inputs.generator(seed)
    return {
        "logits": (3 * torch.randn(batch, vocab_size, generator=random)).to(dtype),
        "temperature": 0.4 + torch.rand(batch, generator=random),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (batch,), generator=random),
        "positions": torch.randint(0, 2**40, (batch,), generator=random),
    }


@pytest.mark.parametrize("draft_slot", [None, 0, 3])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_matches_reference(native: Implementation, vocab_size: int, draft_slot: int | None) -> None:
    arguments = {**rows(6, vocab_size, seed=vocab_size), "draft_slot": draft_slot}
    margins.assert_sample_matches(native.sample(**arguments), arguments)


@pytest.mark.parametrize("token_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [100, 5000])
def test_matches_reference_for_every_dtype(
    native: Implementation, vocab_size: int, dtype: torch.dtype, token_dtype: torch.dtype
) -> None:
    arguments = {**rows(30, vocab_size, 1, dtype), "token_dtype": token_dtype}
    arguments["temperature"][::5] = 0.0
    margins.assert_sample_matches(native.sample(**arguments), arguments, max_near=1)


def test_matches_reference_at_a_real_vocabulary(default_native: Implementation) -> None:
    arguments = rows(4, 151_936, 2)
    margins.assert_sample_matches(default_native.sample(**arguments), arguments, max_near=2)


def test_uniforms_of_either_dtype(implementation: Implementation) -> None:
    logits = torch.zeros(3, 8)
    u = [0.0, 0.5, 1 - 2.0**-24]
    for dtype in (torch.float32, torch.float64):
        out = implementation.sample(logits, uniforms=torch.tensor(u, dtype=dtype))
        assert out.token_ids.tolist() == [0, 4, 7]


def test_zero_mass_never_wins(implementation: Implementation) -> None:
    """A9, A16: one-hot rows and rows with masked ends, for u at both ends."""
    for vocab_size in (3, 257, 8193, 10_000):
        logits = torch.full((4, vocab_size), -math.inf)
        logits[:2, 1] = 0.0
        logits[2:, 1 : vocab_size - 1] = 0.0
        u = torch.tensor([0.0, 1 - 2.0**-53, 0.0, 1 - 2.0**-53], dtype=torch.float64)
        out = implementation.sample(logits, uniforms=u)
        assert out.token_ids.tolist() == [1, 1, 1, vocab_size - 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_rows(implementation: Implementation, temperature: float) -> None:
    """A10, A11, A38, A39: fixed ids, the documented numbers, and a status."""
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [[nan, nan, nan], [1.0, nan, 2.0], [1.0, inf, 2.0], [-inf, -inf, -inf], [0.0, 1.0, 0.5]]
    )
    out = implementation.sample(logits, temperature=temperature, seeds=1, positions=torch.arange(5))
    assert out.token_ids[:4].tolist() == [0, 2, 1, 0]
    assert out.status.tolist() == [
        Status.NON_FINITE_TARGET,
        Status.NON_FINITE_TARGET,
        Status.NON_FINITE_TARGET,
        Status.MASKED_TARGET,
        Status.OK,
    ]
    assert out.logprobs[:4].isnan().all() and not out.logprobs[4].isnan()
    assert out.logsumexp[:3].isnan().all() and out.logsumexp[3] == -inf


def test_greedy_takes_the_lowest_of_ties_and_tells_temperature_one(implementation: Implementation) -> None:
    logits = torch.randn(3, 9000, generator=inputs.generator(3)).clamp(max=2.0)
    out = implementation.sample(logits, temperature=0.0)
    assert torch.equal(out.token_ids, logits.argmax(1))
    expected = logits.double().logsumexp(-1)
    assert torch.allclose(out.logsumexp, expected, rtol=1e-7, atol=0)
    assert torch.allclose(out.logprobs.double(), 2.0 - expected, rtol=1e-6, atol=0)


def test_log_probabilities_equal_torch(implementation: Implementation) -> None:
    arguments = rows(8, 3000, 4)
    out = implementation.sample(**arguments)
    expected = (arguments["logits"].double() / arguments["temperature"].double()[:, None]).log_softmax(-1)
    chosen = expected.gather(1, out.token_ids[:, None]).squeeze(1)
    assert torch.allclose(out.logprobs.double(), chosen, rtol=1e-6, atol=2e-6)


def test_columns_behind_the_vocabulary_never_count(native: Implementation) -> None:
    """A34."""
    arguments = rows(5, 500, 5)
    expected = native.sample(**arguments)
    for padding in (0.0, math.nan, math.inf, 1e30):
        arguments["logits"] = torch.cat([arguments["logits"][:, :500], torch.full((5, 20), padding)], dim=1)
        assert margins.all_same_bits(native.sample(**arguments, vocab_size=500), expected)


def test_empty_batch(implementation: Implementation) -> None:
    """B5."""
    out = implementation.sample(torch.zeros(0, 5), temperature=0.0, token_dtype=torch.int32)
    assert [tuple(value.shape) for value in out[:5]] == [(0,)] * 5
    assert [value.dtype for value in out[:5]] == [
        torch.int32,
        torch.float32,
        torch.float64,
        torch.int32,
        torch.float32,
    ]


def test_all_ids_of_a_law_appear(implementation: Implementation) -> None:
    """A40: p = [.4, .35, .25] over 300 seeds."""
    logits = inputs.logits_of([[0.4, 0.35, 0.25]]).expand(300, 3)
    out = implementation.sample(
        logits, seeds=torch.arange(300), positions=torch.zeros(300, dtype=torch.int64)
    )
    counts = torch.bincount(out.token_ids, minlength=3)
    assert (counts > 50).all()


def test_draft_slots_draw_from_a_stream_of_their_own(implementation: Implementation) -> None:
    """A19: the plain sampler and each slot draw different numbers at one position."""
    logits = torch.zeros(1, 1 << 16)
    draws = {
        int(implementation.sample(logits, seeds=5, positions=torch.tensor([9]), draft_slot=slot).token_ids)
        for slot in (None, 0, 1, 2, 3)
    }
    assert len(draws) == 5


def test_docstring_example(implementation: Implementation) -> None:
    out = implementation.sample(torch.tensor([[0.0, 2.0]]), temperature=0.0)
    assert (out.token_ids.tolist(), round(out.logprobs.item(), 4)) == ([1], -0.1269)

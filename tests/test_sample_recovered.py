"""sample_recovered: the residual draw by itself, against the float64 reference."""

from __future__ import annotations

import math

import inputs
import margins
import pytest
import torch
from chi_square import p_value
from implementations import Implementation
from specdec_ops import Status


def arguments_of(
    num_drafts: int, vocab_size: int, draft_law: str, *, seed: int, dtype: torch.dtype = torch.float32
) -> inputs.Arguments:
    chain = inputs.chain([1] * num_drafts, vocab_size, draft_law, seed=seed, dtype=dtype)
    chain["target_logits"] = chain["target_logits"][0::2].contiguous()
    del chain["cu_num_draft_tokens"]
    return chain


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
@pytest.mark.parametrize("vocab_size", [1, 2, 8, 17, 256, 257, 4096, 4097, 8193])
def test_matches_reference(native: Implementation, vocab_size: int, draft_law: str) -> None:
    arguments = arguments_of(6, vocab_size, draft_law, seed=vocab_size)
    max_near = 6 if vocab_size == 1 else 0
    margins.assert_recovered_matches(native.sample_recovered(**arguments), arguments, max_near=max_near)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_matches_reference_for_every_dtype(
    native: Implementation, draft_law: str, dtype: torch.dtype
) -> None:
    arguments = arguments_of(40, 600, draft_law, seed=1, dtype=dtype)
    arguments["temperature"][::4] = 0.0
    arguments["draft_temperature"] = torch.ones(40)
    margins.assert_recovered_matches(native.sample_recovered(**arguments), arguments, max_near=1)


@pytest.mark.parametrize("draft_law", inputs.DRAFT_LAWS)
def test_equals_verify_chain_after_a_rejection(native: Implementation, draft_law: str) -> None:
    """The token that verify_chain emits for a rejected draft, bit for bit."""
    chain = inputs.chain([1] * 200, 400, draft_law, seed=2)
    verified = native.verify_chain(**chain)
    rejected = verified.num_accepted == 0
    alone = {**chain, "target_logits": chain["target_logits"][0::2]}
    del alone["cu_num_draft_tokens"]
    out = native.sample_recovered(**alone)
    assert 20 < rejected.sum() < 200
    assert torch.equal(out.token_ids[rejected], verified.token_ids[rejected, 0])


def test_zero_draft_probability_leaves_the_target(implementation: Implementation) -> None:
    """A8: an id outside the vocabulary draws from p as it is, padding without a status."""
    logits = inputs.logits_of([[0.25, 0.25, 0.5]]).expand(4, 3)
    out = implementation.sample_recovered(
        logits,
        torch.tensor([-1, 3, -5, 0]),
        draft_probs=torch.tensor([[0.5, 0.25, 0.25]]).expand(4, 3),
        uniforms=torch.full((4,), 0.3),
    )
    assert out.token_ids.tolist() == [1, 1, 1, 2]
    assert out.status.tolist() == [Status.OK, Status.INVALID_DRAFT_ID, Status.INVALID_DRAFT_ID, Status.OK]


def test_rows_without_a_law_are_one_hot(implementation: Implementation) -> None:
    out = implementation.sample_recovered(
        torch.zeros(2, 4),
        torch.tensor([0, 0]),
        draft_probs=torch.tensor([[math.nan] * 4, [0.25, 0.5, 0.25, 0.0]]),
        has_draft_law=torch.tensor([False, True]),
        uniforms=torch.tensor([0.0, 0.0]),
    )
    assert out.token_ids.tolist() == [1, 3]
    assert out.status.tolist() == [Status.OK, Status.OK]


def test_greedy_and_unusable_rows_give_the_argmax(implementation: Implementation) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [math.nan, 2.0, 3.0], [-math.inf] * 3])
    out = implementation.sample_recovered(
        logits, torch.tensor([1, 1, 1]), temperature=torch.tensor([0.0, 1.0, 1.0]), uniforms=torch.zeros(3)
    )
    assert out.token_ids.tolist() == [1, 2, 0]
    assert out.status.tolist() == [Status.OK, Status.NON_FINITE_TARGET, Status.MASKED_TARGET]


def test_empty_batch(implementation: Implementation) -> None:
    out = implementation.sample_recovered(
        torch.zeros(0, 4), torch.zeros(0, dtype=torch.int32), temperature=0.0
    )
    assert (out.token_ids.shape, out.token_ids.dtype, out.status.dtype) == ((0,), torch.int32, torch.int32)


def test_docstring_example(implementation: Implementation) -> None:
    out = implementation.sample_recovered(
        torch.tensor([[0.0, 0.0]]), torch.tensor([0]), uniforms=torch.tensor([0.25])
    )
    assert out.token_ids.tolist() == [1]


def nearly_equal_laws(num_drafts: int, vocab_size: int, noise: float) -> inputs.Arguments:
    """p and q so close that most draws from p are refused, and the residual itself has to be made."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(1, vocab_size, generator=generator)
    draft = target + noise * torch.randn(1, vocab_size, generator=generator)
    return {
        "target_logits": target.expand(num_drafts, -1),
        "draft_logits": draft.expand(num_drafts, -1),
        "draft_token_ids": torch.zeros(num_drafts, dtype=torch.int64),
        "seeds": torch.arange(num_drafts),
        "positions": torch.full((num_drafts,), 12),
    }


@pytest.mark.parametrize(("vocab_size", "noise"), [(7, 0.02), (5000, 0.2)])
def test_matches_reference_where_thinning_gives_up(
    native: Implementation, vocab_size: int, noise: float
) -> None:
    arguments = nearly_equal_laws(60, vocab_size, noise)
    margins.assert_recovered_matches(native.sample_recovered(**arguments), arguments, max_near=2)


def test_law_of_the_residual_where_thinning_gives_up(default_native: Implementation) -> None:
    arguments = nearly_equal_laws(1 << 18, 7, 0.02)
    p = torch.softmax(arguments["target_logits"][0].double(), 0)
    residual = (p - torch.softmax(arguments["draft_logits"][0].double(), 0)).clamp(min=0)
    kept_in_eight = 1 - (1 - residual.sum()) ** 8
    assert kept_in_eight < 0.2
    tokens = default_native.sample_recovered(**arguments).token_ids
    counts = torch.bincount(tokens, minlength=7).numpy()
    assert p_value(counts, (residual / residual.sum()).numpy()) > 1e-6
    assert p_value(counts, p.numpy()) < 1e-6


@pytest.mark.parametrize("given", [False, True], ids=["own", "given"])
def test_a_draft_row_of_huge_logits_gives_no_law(implementation: Implementation, given: bool) -> None:
    logits = torch.full((1, 4), 3e9)
    out = implementation.sample_recovered(
        torch.zeros(1, 4),
        torch.tensor([2]),
        draft_logits=logits,
        draft_logsumexp=torch.logsumexp(logits.double(), -1) if given else None,
        seeds=1,
        positions=torch.tensor([0]),
    )
    assert out.status.tolist() == [Status.UNUSABLE_DRAFT_LAW]
    assert out.token_ids.item() != 2

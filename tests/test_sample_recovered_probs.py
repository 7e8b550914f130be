"""sample_recovered_probs: the exponential race over the residual, with given noise."""

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
from specdec_ops.ops import sample_recovered_probs
from torch import Tensor

NAME = "sample_recovered_probs_"
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: Next to the ends of vectors, of blocks, and of the runs of blocks that a thread takes.
SIZES = (1, 2, 7, 33, 100, 1023, 1024, 1025, 8191, 8192, 8193, 20_000)


def rows(num_rows: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, width, generator=generator).mul(3).softmax(-1).to(dtype)


def noise(batch: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(batch, width, dtype=dtype).exponential_(generator=generator).reciprocal()


def in_eager_torch(
    target: Tensor, drafts: Tensor, counts: list[int], inverse: Tensor, draft: Tensor | None
) -> list[int]:
    out = []
    for i, request in enumerate(r for r, count in enumerate(counts) for _ in range(count)):
        if draft is None:
            residual = target[i].clone()
            residual[drafts[i]] = 0.0
        else:
            residual = (target[i] - draft[i]).clamp_min(0.0)
        out.append(int(torch.argmax(residual * inverse[request])))
    return out


@pytest.mark.parametrize("has_law", [True, False])
@pytest.mark.parametrize("noise_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", SIZES)
def test_equals_eager_torch(
    native: Implementation, width: int, noise_dtype: torch.dtype, has_law: bool
) -> None:
    counts = [2, 0, 3, 1]
    target, draft = rows(6, width, 1), rows(6, width, 2) if has_law else None
    inverse = noise(4, width, 3, noise_dtype)
    drafts = torch.randint(width, (6,), generator=torch.Generator().manual_seed(4))
    drafts[0], drafts[1] = 0, width - 1
    out = native.sample_recovered_probs(
        target, drafts, torch.tensor(counts).cumsum(0), inverse, draft_probs=draft
    )
    assert out.tolist() == in_eager_torch(target, drafts, counts, inverse, draft)


def draw(
    implementation: Implementation,
    target: list[float],
    inverse: list[float],
    draft: list[float] | int,
    **options: Any,
) -> int:
    """One draft, its law or its id."""
    out = implementation.sample_recovered_probs(
        torch.tensor([target]),
        torch.tensor([draft if isinstance(draft, int) else 0]),
        torch.tensor([1]),
        torch.tensor([inverse]),
        draft_probs=None if isinstance(draft, int) else torch.tensor([draft]),
        **options,
    )
    return int(out)


def test_the_largest_product_of_residual_and_noise_wins(implementation: Implementation) -> None:
    assert draw(implementation, [0.5, 0.3, 0.2], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]) == 0
    assert draw(implementation, [0.5, 0.3, 0.2], [1.0, 2.0, 1.0], [0.0, 0.0, 0.0]) == 1
    assert draw(implementation, [0.5, 0.3, 0.2], [1.0, 1.0, 1.0], [0.5, 0.2, 0.0]) == 2
    assert draw(implementation, [0.1, 0.2, 0.7], [9.0, 9.0, 1.0], [0.5, 0.5, 0.0]) == 2


def test_a_one_hot_draft_takes_away_itself_alone(implementation: Implementation) -> None:
    assert draw(implementation, [0.5, 0.3, 0.2], [1.0, 1.0, 1.0], 0) == 1
    assert draw(implementation, [0.5, 0.3, 0.2], [1.0, 1.0, 9.0], 2) == 0
    for outside in (-1, 3, -(2**40)):
        assert draw(implementation, [0.5, 0.3, 0.2], [1.0, 1.0, 1.0], outside) == 0


@pytest.mark.parametrize("width", [5, 3000, 9000])
def test_ties_go_to_the_lowest_id(implementation: Implementation, width: int) -> None:
    """A33: within a vector, a block and across blocks."""
    for first in (0, 1, width // 2, width - 2):
        target = torch.zeros(1, width)
        target[0, first:] = 0.25
        arguments = (target, torch.tensor([0]), torch.tensor([1]), torch.ones(1, width))
        assert implementation.sample_recovered_probs(*arguments, draft_probs=torch.zeros(1, width)) == first
        if first > 0:
            assert implementation.sample_recovered_probs(*arguments) == first


@pytest.mark.parametrize("width", [3, 100, 8193, 10_000])
def test_a_residual_of_zeros_gives_id_0(implementation: Implementation, width: int) -> None:
    """A9, A34: never the width."""
    same = rows(1, width, 5)
    arguments = (torch.tensor([0]), torch.tensor([1]), noise(1, width, 6))
    assert implementation.sample_recovered_probs(same, *arguments, draft_probs=same) == 0
    only_the_draft = torch.zeros(1, width)
    only_the_draft[0, 0] = 1.0
    assert implementation.sample_recovered_probs(only_the_draft, *arguments) == 0


def test_columns_from_the_vocabulary_size_on_never_win(implementation: Implementation) -> None:
    """A34: padding may hold anything."""
    for size in (1, 2, 3):
        padded = [0.1, 0.2, 0.3][:size] + [9.0, math.nan, math.inf][: 4 - size]
        padded += [9.0] * (4 - len(padded))
        assert draw(implementation, padded, [1.0] * 4, [0.0] * 4, vocab_size=size) == size - 1
    assert draw(implementation, [0.1, 0.2, 9.0], [1.0] * 3, 1, vocab_size=2) == 0


def test_what_is_not_a_number_wins_nothing(implementation: Implementation) -> None:
    """A10, A11: a NaN residual counts as 0, and so does what noise of inf makes of a residual of 0."""
    nan, inf = math.nan, math.inf
    none = [0.0] * 3
    assert draw(implementation, [nan, 0.3, 0.2], [1.0] * 3, none) == 1
    assert draw(implementation, [nan, 0.3, 0.2], [1.0] * 3, 1) == 2
    assert draw(implementation, [0.5, 0.3, 0.2], [1.0] * 3, [nan, 0.0, 0.0]) == 1
    assert draw(implementation, [0.5, 0.3, 0.2], [nan, 1.0, 1.0], none) == 1
    assert draw(implementation, [0.0, 0.3, 0.2], [inf, 1.0, 1.0], none) == 1
    assert draw(implementation, [0.0, 0.3, 0.2], [1.0, 1.0, inf], none) == 2
    assert draw(implementation, [0.5, 0.3, 0.2], [inf, 1.0, 1.0], 0) == 1
    assert draw(implementation, [nan] * 3, [1.0] * 3, none) == 0
    assert draw(implementation, [0.0, 0.3, 0.2], [nan] * 3, none) == 0
    assert draw(implementation, [inf, 0.3, 0.2], [1.0] * 3, [inf, 0.0, 0.0]) == 1


@pytest.mark.parametrize("width", [50, 5000])
def test_a_row_without_a_number_gives_id_0(implementation: Implementation, width: int) -> None:
    for target, inverse in ((torch.nan, 1.0), (0.5, torch.nan), (torch.nan, torch.nan)):
        out = implementation.sample_recovered_probs(
            torch.full((1, width), target),
            torch.tensor([3]),
            torch.tensor([1]),
            torch.full((1, width), inverse),
        )
        assert out.tolist() == [0]


def test_noise_of_float64_is_compared_in_float64(implementation: Implementation) -> None:
    """Two products that differ in float64 alone."""
    target, draft = torch.tensor([[0.25, 0.25]]), torch.zeros(1, 2)
    inverse = torch.tensor([[1.0, 1.0 + 2.0**-40]], dtype=torch.float64)
    arguments = (target, torch.tensor([0]), torch.tensor([1]))
    assert implementation.sample_recovered_probs(*arguments, inverse, draft_probs=draft) == 1
    assert implementation.sample_recovered_probs(*arguments, inverse.float(), draft_probs=draft) == 0


@pytest.mark.parametrize("target_is_float64", [True, False])
def test_a_residual_with_float64_is_a_float64(
    implementation: Implementation, target_is_float64: bool
) -> None:
    wide, narrow = torch.tensor([[0.5, 0.5 + 2.0**-40]], dtype=torch.float64), torch.zeros(1, 2)
    if not target_is_float64:
        wide, narrow = wide - 0.75, torch.ones(1, 2)
    target, draft = (wide, narrow) if target_is_float64 else (narrow, 0.5 - wide)
    out = implementation.sample_recovered_probs(
        target, torch.tensor([0]), torch.tensor([1]), torch.ones(1, 2), draft_probs=draft
    )
    # 1 - (0.75, 0.75 - 2^-40): the second residual is the larger one by 2^-40.
    assert out.tolist() == [1]


def test_a_residual_of_float32_stays_one_beside_noise_of_float64(implementation: Implementation) -> None:
    """1 - 2^-30 is 1 in float32: a tie."""
    out = implementation.sample_recovered_probs(
        torch.ones(1, 2),
        torch.tensor([0]),
        torch.tensor([1]),
        torch.ones(1, 2, dtype=torch.float64),
        draft_probs=torch.tensor([[2.0**-30, 0.0]]),
    )
    assert out.tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [9, 1030])
def test_half_precision_is_read_exactly(
    implementation: Implementation, dtype: torch.dtype, width: int
) -> None:
    target, draft, inverse = rows(3, width, 7, dtype), rows(3, width, 8, dtype), noise(1, width, 9)
    drafts, cu = torch.tensor([1, 2, 3]), torch.tensor([0, 3])
    for law in (draft, None):
        got = implementation.sample_recovered_probs(target, drafts, cu, inverse, draft_probs=law)
        wide = None if law is None else law.float()
        want = implementation.sample_recovered_probs(target.float(), drafts, cu, inverse, draft_probs=wide)
        assert torch.equal(got, want)


def test_threads_do_not_change_a_token(native: Implementation, num_threads: None) -> None:
    width, counts = 50_000, [3, 0, 1, 2]
    target, draft, inverse = rows(6, width, 1), rows(6, width, 2), noise(4, width, 3)
    target[:, ::3] = target[:, :1]  # ties
    draft[:, ::3] = 0.0
    inverse[:, ::3] = inverse[:, :1]
    drafts, cu = torch.arange(6), torch.tensor(counts).cumsum(0)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results += [
            native.sample_recovered_probs(target, drafts, cu, inverse, draft_probs=draft) for _ in range(3)
        ]
    assert all(torch.equal(result, results[0]) for result in results)


def test_flushed_denormals_change_no_token(native: Implementation) -> None:
    """The caller's floating-point environment is not that of the other threads."""
    arguments = (torch.tensor([[1e-40, 2e-40]]), torch.tensor([0]), torch.tensor([1]), torch.ones(1, 2))
    try:
        torch.set_flush_denormal(True)
        assert native.sample_recovered_probs(*arguments, draft_probs=torch.zeros(1, 2)) == 1
    finally:
        torch.set_flush_denormal(False)


def test_draws_follow_the_residual_law(default_native: Implementation) -> None:
    n, p, q = 200_000, torch.tensor([0.5, 0.2, 0.2, 0.1]), torch.tensor([0.1, 0.3, 0.1, 0.5])
    out = default_native.sample_recovered_probs(
        p.expand(n, 4),
        torch.zeros(n, dtype=torch.int64),
        torch.arange(1, n + 1),
        noise(n, 4, 10),
        draft_probs=q.expand(n, 4),
    )
    counts = out.bincount(minlength=4).numpy()
    assert chi_square.p_value(counts, [0.8, 0.0, 0.2, 0.0]) > 1e-6
    assert chi_square.p_value(counts, [0.5, 0.2, 0.2, 0.1]) < 1e-6


def test_writes_up_to_the_last_total(implementation: Implementation) -> None:
    token_ids = torch.full((4,), POISON, dtype=torch.int32)
    arguments = (rows(3, 9, 1), torch.tensor([1, 2, 3]), torch.tensor([1, 2]), noise(2, 9, 2))
    assert implementation.sample_recovered_probs_(*arguments, token_ids=token_ids) is None
    assert (token_ids[:2] >= 0).all()
    assert token_ids[2:].tolist() == [POISON] * 2
    assert implementation.sample_recovered_probs(*arguments).tolist() == [*token_ids[:2].tolist(), 0]


def test_empty(implementation: Implementation) -> None:
    none = torch.zeros(0, dtype=torch.int32)
    out = implementation.sample_recovered_probs(torch.zeros(0, 5), none, none, torch.zeros(0, 5))
    assert (out.shape, out.dtype) == ((0,), torch.int32)
    cu = torch.tensor([0, 0, 0])
    assert implementation.sample_recovered_probs(torch.zeros(0, 5), none, cu, torch.ones(2, 5)).shape == (0,)


def random_arguments(rng: random.Random) -> dict[str, Any]:
    batch = Batch(rng)
    width = rng.choice([3, 4, 17, 40, 1025])
    num_rows = batch.longer(batch.num_drafts)
    return {
        "target_probs": batch.reals(num_rows, width, dtypes=FLOATS),
        "draft_token_ids": batch.ints(-1, width, batch.num_drafts),
        "cu_num_draft_tokens": batch.cu_num_draft_tokens(),
        "inverse_noise": 1 / (1 - batch.reals(batch.size, width + rng.randint(0, 1))),
        "draft_probs": batch.maybe(batch.reals(num_rows, width + rng.randint(0, 1), dtypes=FLOATS)),
        "vocab_size": rng.choice([None, 3]),
        "token_ids": batch.ints(POISON, POISON, batch.longer(batch.num_drafts)),
    }


@given(seed=st.integers(0, 2**32 - 1))
def test_matches_reference(native: Implementation, seed: int) -> None:
    rng = random.Random(seed)
    check_against_reference(native, NAME, random_arguments(rng), ["token_ids"], rng, contiguous_rows=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_probs": torch.ones(2, 4).int()},
            "target_probs must be float64, float32, bfloat16 or float16, got int32",
        ),
        (
            {"target_probs": torch.ones(1, 4)},
            "target_probs must be [num_drafts, width] with at least 2 rows, got shape [1, 4]",
        ),
        (
            {"target_probs": torch.ones(4, 2).t()},
            "target_probs must have a contiguous last dimension, got stride 2",
        ),
        ({"vocab_size": 5}, "vocab_size must be between 1 and the width of target_probs, 4, got 5"),
        (
            {"inverse_noise": torch.ones(1, 4).half()},
            "inverse_noise must be float32 or float64, got float16",
        ),
        (
            {"inverse_noise": torch.ones(4)},
            "inverse_noise must be [batch, width] with at least 0 rows, got shape [4]",
        ),
        (
            {"inverse_noise": torch.ones(1, 3)},
            "inverse_noise must have at least vocab_size = 4 columns, got 3",
        ),
        (
            {"inverse_noise": torch.ones(1, 8)[:, ::2]},
            "inverse_noise must have a contiguous last dimension, got stride 2",
        ),
        (
            {"draft_probs": torch.ones(2, 3)},
            "draft_probs must have at least vocab_size = 4 columns, got 3",
        ),
        (
            {"draft_probs": torch.ones(2, 8)[:, ::2]},
            "draft_probs must have a contiguous last dimension, got stride 2",
        ),
        (
            {"draft_probs": torch.ones(1, 4)},
            "draft_probs must be [num_drafts, width] with at least 2 rows, got shape [1, 4]",
        ),
        ({"draft_token_ids": torch.ones(2)}, "draft_token_ids must be int32 or int64, got float32"),
        (
            {"cu_num_draft_tokens": torch.tensor([0, 1, 2])},
            "cu_num_draft_tokens must be [batch + 1] or [batch] with 1 request, got shape [3]",
        ),
        (
            {"cu_num_draft_tokens": torch.tensor([3])},
            "cu_num_draft_tokens must end with at most num_drafts = 2, got 3",
        ),
        ({"token_ids": torch.ones(2)}, "token_ids must be int32 or int64, got float32"),
        (
            {"token_ids": torch.ones(1).int()},
            "token_ids must be [num_drafts] with at least 2 elements, got shape [1]",
        ),
    ],
    ids=lambda value: value[:44] if isinstance(value, str) else "",
)
def test_errors(default_native: Implementation, changes: dict[str, Any], message: str) -> None:
    arguments = {
        "target_probs": torch.ones(2, 4),
        "draft_token_ids": torch.tensor([0, 1]),
        "cu_num_draft_tokens": torch.tensor([2]),
        "inverse_noise": torch.ones(1, 4),
        "token_ids": torch.full((2,), POISON),
    }
    assert_raises(default_native, NAME, {**arguments, **changes}, ["token_ids"], message)


def test_op_is_well_formed() -> None:
    check_op(sample_recovered_probs._op, random_arguments(random.Random(3)))

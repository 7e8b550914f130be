"""count_accepted: emitted and accepted tokens of verified rows."""

from __future__ import annotations

import inputs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from implementations import REFERENCE, Implementation


def counts(
    implementation: Implementation, rows: list[list[int]], **options: int
) -> tuple[list[int], list[int]]:
    out = implementation.count_accepted(torch.tensor(rows), **options)
    assert out.num_accepted.dtype == out.num_emitted.dtype == torch.int32
    return out.num_accepted.tolist(), out.num_emitted.tolist()


def test_emitted_is_accepted_plus_one(implementation: Implementation) -> None:
    """D2: none, some and all of k drafts accepted."""
    rows = [[5, -1, -1, -1], [5, 6, 7, -1], [5, 6, 7, 8]]
    assert counts(implementation, rows) == ([0, 2, 3], [1, 3, 4])


def test_every_negative_id_counts_as_nothing(implementation: Implementation) -> None:
    """D5: a row [-2, -1, 7]."""
    assert counts(implementation, [[-2, -1, 7]]) == ([0], [1])


def test_a_row_without_ids_counts_zero(implementation: Implementation) -> None:
    """D7, D21: never negative."""
    assert counts(implementation, [[-1, -1], [3, -1]]) == ([0, 0], [0, 1])


def test_ids_from_the_vocabulary_size_on_count_as_nothing(implementation: Implementation) -> None:
    assert counts(implementation, [[9, 10, 11], [0, 9, -1]], vocab_size=10) == ([0, 1], [1, 2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_slices_of_a_wider_buffer(implementation: Implementation, dtype: torch.dtype) -> None:
    """B4, B6, B8, D18: any strides, both dtypes, rows that can be cut and put together."""
    buffer = torch.arange(64 * 7, dtype=dtype).reshape(64, 7)
    buffer[:, 3:] = -1
    buffer[5, 3] = 4
    out = implementation.count_accepted(buffer[:8, :5])
    assert out.num_emitted.tolist() == [3, 3, 3, 3, 3, 4, 3, 3]
    assert torch.equal(implementation.count_accepted(buffer.t()[:5].t()[:8]).num_emitted, out.num_emitted)
    assert implementation.count_accepted(buffer[:8, 1:6:2]).num_emitted.tolist() == [1, 1, 1, 1, 1, 2, 1, 1]
    assert implementation.count_accepted(buffer[0].expand(3, 7)).num_accepted.tolist() == [2, 2, 2]


def test_counts_what_verify_chain_emitted(implementation: Implementation) -> None:
    """D1: only the prefix before the first rejection is there to be counted."""
    arguments = inputs.chain([3, 0, 2, 1] * 5, 40, "logits", seed=1, support=4)
    out = implementation.verify_chain(**arguments)
    counted = implementation.count_accepted(out.token_ids)
    assert torch.equal(counted.num_accepted, out.num_accepted)
    assert torch.equal(counted.num_emitted, out.num_accepted + 1)


def test_accepts_after_a_rejection_do_not_count(implementation: Implementation) -> None:
    """D1: flags [[1,0,1],[0,1,0],[1,1,1]] give 1, 0, 3."""
    logits = torch.full((12, 4), -torch.inf)
    logits[:, 2] = 0.0
    out = implementation.verify_chain(
        logits, torch.tensor([2, 0, 2, 0, 2, 0, 2, 2, 2]), torch.arange(4) * 3, temperature=0.0
    )
    assert out.num_accepted.tolist() == [1, 0, 3]
    assert implementation.count_accepted(out.token_ids).num_accepted.tolist() == [1, 0, 3]


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty(implementation: Implementation, shape: tuple[int, int]) -> None:
    out = implementation.count_accepted(torch.zeros(shape, dtype=torch.int64))
    assert out.num_accepted.tolist() == out.num_emitted.tolist() == [0] * shape[0]


@given(
    rows=st.integers(0, 6).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(-(2**31), 2**31 - 1), min_size=width, max_size=width), max_size=6
        )
    ),
    vocab_size=st.none() | st.integers(1, 2**31 - 1),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_matches_reference(
    native: Implementation, rows: list[list[int]], vocab_size: int | None, dtype: torch.dtype
) -> None:
    ids = torch.tensor(rows, dtype=dtype).reshape(len(rows), len(rows[0]) if rows else 0)
    got = native.count_accepted(ids, vocab_size=vocab_size)
    want = REFERENCE.count_accepted(ids, vocab_size=vocab_size)
    assert torch.equal(got.num_accepted, want.num_accepted)
    assert torch.equal(got.num_emitted, want.num_emitted)


def test_docstring_example(implementation: Implementation) -> None:
    assert counts(implementation, [[5, 6, 7], [5, -1, -1]]) == ([2, 0], [3, 1])

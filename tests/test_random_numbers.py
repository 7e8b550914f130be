"""Philox, its key and its counters, as the ops use them."""

from __future__ import annotations

import itertools

import pytest
import specdec_ops
import torch
from implementations import Implementation
from specdec_ops import _reference
from specdec_ops._reference import Stream

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES), (ONES, ONES, ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_equals_the_known_answers_of_random123(
    key: tuple[int, int], counter: tuple[int, int, int, int], expected: tuple[int, int, int, int]
) -> None:
    assert _reference.philox4x32(key, counter) == expected


def test_splitmix64_equals_its_published_sequence() -> None:
    assert _reference.splitmix64(0) == 0xE220A8397B1DCDAF
    assert _reference.splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


EXTREME_SEEDS = [0, 1, -1, 42, 2**31, 2**32, 2**63 - 1, -(2**63)]
EXTREME_POSITIONS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40 + 5]


def uniform_grid(num_cells: int) -> torch.Tensor:
    """Equal logits: the token tells in which of the cells the draw fell."""
    return torch.zeros(1, num_cells)


def cell_of(draw: _reference.TokenDraw) -> int:
    """Of a whole block of cells."""
    assert draw.chunk is not None and draw.id is not None
    return 64 * int(draw.chunk * 64) + int(draw.id * 64)


@pytest.mark.parametrize("draft_slot", [None, 0, 1, 1023])
def test_sample_draws_the_reference_numbers(implementation: Implementation, draft_slot: int | None) -> None:
    pairs = list(itertools.product(EXTREME_SEEDS, EXTREME_POSITIONS))
    seeds, positions = (torch.tensor(column) for column in zip(*pairs, strict=True))
    cells = 4096
    out = implementation.sample(
        uniform_grid(cells).expand(len(pairs), cells), seeds=seeds, positions=positions, draft_slot=draft_slot
    )
    stream = Stream.TARGET if draft_slot is None else Stream.DRAFT
    draws = [_reference.token_draw(seed, stream, draft_slot or 0, position) for seed, position in pairs]
    assert out.token_ids.tolist() == [cell_of(draw) for draw in draws]


def test_verify_chain_draws_the_reference_numbers(implementation: Implementation) -> None:
    pairs = list(itertools.product(EXTREME_SEEDS, EXTREME_POSITIONS))
    seeds, positions = (torch.tensor(column) for column in zip(*pairs, strict=True))
    slots, cells = 5, 4096
    batch = len(pairs)
    logits = torch.full((batch * (slots + 1), cells), -torch.inf)
    rows = logits.view(batch, slots + 1, cells)
    rows[:, :, 0] = 0.0
    rows[:, :, 1] = 0.0
    rows[:, slots] = 0.0
    out = implementation.verify_chain(
        logits,
        torch.zeros(batch * slots, dtype=torch.int64),
        torch.arange(batch + 1) * slots,
        seeds=seeds,
        positions=positions,
    )
    for r, (seed, position) in enumerate(pairs):
        coins = [_reference.uniform(seed, Stream.ACCEPT, i, position) for i in range(slots)]
        accepted = next((i for i, u in enumerate(coins) if u >= 0.5), slots)
        assert int(out.num_accepted[r]) == accepted
        draw = _reference.token_draw(seed, Stream.TARGET, 0, position + accepted)
        last = cell_of(draw) if accepted == slots else 1
        assert int(out.token_ids[r, accepted]) == last


def test_seeds_and_positions_of_any_integer_dtype_draw_alike(implementation: Implementation) -> None:
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(0))
    seeds, positions = torch.arange(64), torch.arange(64) * 3
    wide = implementation.sample(logits, seeds=seeds, positions=positions)
    narrow = implementation.sample(logits, seeds=seeds, positions=positions.int())
    assert torch.equal(wide.token_ids, narrow.token_ids)
    assert torch.equal(
        implementation.sample(logits, seeds=7, positions=positions).token_ids,
        implementation.sample(logits, seeds=torch.full((64,), 7), positions=positions).token_ids,
    )


def test_streams_and_counters_never_share_a_number() -> None:
    """A19: draft, acceptance and recovered draws come from disjoint counters."""
    draws = {
        _reference.uniform(seed, stream, slot, position)
        for seed in range(4)
        for stream in Stream
        for slot in range(4)
        for position in range(16)
    }
    assert len(draws) == 4 * len(Stream) * 4 * 16


def test_sampled_tokens_are_pinned(implementation: Implementation) -> None:
    logits = (torch.arange(1000) % 17 * 0.25).expand(8, 1000).contiguous()
    out = implementation.sample(
        logits, temperature=0.8, seeds=torch.arange(8), positions=torch.arange(8) * 100
    )
    assert out.token_ids.tolist() == [337, 243, 864, 559, 179, 84, 184, 695]


def test_a_seed_may_be_given_as_an_unsigned_number(native: Implementation) -> None:
    logits, positions = torch.zeros(2, 5000), torch.tensor([3, 4])
    signed = native.sample(logits, seeds=-2, positions=positions).token_ids
    assert torch.equal(native.sample(logits, seeds=(1 << 64) - 2, positions=positions).token_ids, signed)


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1, 0.5], ids=str)
def test_a_seed_that_is_no_64_bit_integer_is_refused(seed: float) -> None:
    with pytest.raises(
        RuntimeError, match=r"sample: seeds must be a tensor or an integer in \[-2\^63, 2\^64\), got"
    ):
        specdec_ops.sample(torch.zeros(1, 4), seeds=seed, positions=torch.tensor([0]))

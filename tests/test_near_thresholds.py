"""Draws on their thresholds: bits are equal where digits that an implementation leaves out would show first.

Each request's row is built around its own random numbers: the quantity that a draw is compared with lies a
relative distance from it, down to the rounding of the logits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import implementations
import pytest
import torch
from inputs import Arguments
from specdec_ops._reference import Stream, TokenDraw, levels, pick, token_draw, uniform
from torch import Tensor

BATCH = 48
DISTANCES = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
#: Flat and peaked rows: many ids near each threshold, or few.
SPREADS = (0.0, 1.0, 4.0)


def logit_for(probability: float, others: Tensor) -> float:
    """What gives an id this probability beside the others, at temperature 1."""
    return float(others.double().logsumexp(0)) + math.log(probability) - math.log1p(-probability)


def nudged(value: float, choice: random.Random) -> float:
    return value * (1 + choice.choice((-1, 1)) * choice.choice(DISTANCES))


class Batch:
    """Requests with one draft each, whose rows are still to be written."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.choice = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        spread = torch.tensor([self.choice.choice(SPREADS) for _ in range(BATCH)])
        self.target = spread[:, None, None] * torch.randn(BATCH, 2, vocab_size, generator=generator)
        self.draft = spread[:, None] * torch.randn(BATCH, vocab_size, generator=generator)
        self.ids = torch.randint(vocab_size, (BATCH,), generator=generator)
        self.seeds = torch.randint(-(2**62), 2**62, (BATCH,), generator=generator)
        self.positions = torch.randint(0, 1 << 20, (BATCH,), generator=generator)

    def uniform(self, stream: Stream, number: int, request: int) -> float:
        return uniform(int(self.seeds[request]), stream, number, int(self.positions[request]))

    def draw(self, request: int, position: int = 0) -> TokenDraw:
        """The first at a position, from the request's own on."""
        return token_draw(int(self.seeds[request]), Stream.TARGET, 0, int(self.positions[request]) + position)

    def others(self, logits: Tensor, index: int) -> Tensor:
        return torch.cat([logits[:index], logits[index + 1 :]])

    def arguments(self, with_draft_law: bool) -> Arguments:
        arguments: Arguments = {
            "target_logits": self.target.flatten(0, 1),
            "draft_token_ids": self.ids,
            "cu_num_draft_tokens": torch.arange(BATCH + 1),
            "temperature": torch.ones(BATCH),
            "seeds": self.seeds,
            "positions": self.positions,
        }
        if with_draft_law:
            arguments["draft_logits"] = self.draft
        return arguments


def put_p_near_the_coin(batch: Batch) -> Arguments:
    for r in range(BATCH):
        coin, x = batch.uniform(Stream.ACCEPT, 0, r), int(batch.ids[r])
        row = batch.target[r, 0]
        row[x] = logit_for(min(nudged(coin, batch.choice), 1 - 1e-9), batch.others(row, x))
    return batch.arguments(with_draft_law=False)


def put_q_near_p_by_the_coin(batch: Batch) -> Arguments:
    for r in range(BATCH):
        coin, x = batch.uniform(Stream.ACCEPT, 0, r), int(batch.ids[r])
        p, row = batch.choice.uniform(0.01, 0.98) * coin, batch.target[r, 0]
        row[x] = logit_for(p, batch.others(row, x))
        p = float(row.double().softmax(0)[x])
        batch.draft[r, x] = logit_for(
            min(nudged(p / coin, batch.choice), 1 - 1e-9), batch.others(batch.draft[r], x)
        )
    return batch.arguments(with_draft_law=True)


def put_a_prefix_near_the_draw(row: Tensor, draw: TokenDraw, choice: random.Random) -> None:
    """Shifts the ids below a random part of a random level, so that their mass is near the level's number.

    Together, the ids from which the level chooses keep their mass: the levels above choose them still.
    """
    choices = [level for level in levels(row.double().softmax(0).numpy(), draw) if len(level[0]) > level[1]]
    ids, size, number = choice.choice(choices)
    first = ids.start + size * choice.randrange(1, -(-len(ids) // size))
    below, above = row[ids.start : first], row[first : ids.stop]
    total = row[ids.start : ids.stop].double().logsumexp(0)
    mass = min(max(nudged(number, choice), 1e-9), 1 - 1e-9)
    for part, share in ((below, mass), (above, 1 - mass)):
        part += float(math.log(share) + total - part.double().logsumexp(0))


def put_the_recovered_token_near_a_boundary(batch: Batch) -> Arguments:
    """Of a one-hot law: the draft's id is all but ruled out, and others are drawn from."""
    for r in range(BATCH):
        row, x = batch.target[r, 0], int(batch.ids[r])
        row[x] = -math.inf
        put_a_prefix_near_the_draw(row, batch.draw(r), batch.choice)
        row[x] = float(row.max()) - 30
    return batch.arguments(with_draft_law=False)


def put_an_attempt_near_its_threshold(batch: Batch) -> Arguments:
    """The first token that thinning finds is kept, or not, by a hair; or which one it is hangs on a hair."""
    for r in range(BATCH):
        row, draft, x = batch.target[r, 0], batch.draft[r], int(batch.ids[r])
        row[x] = float(row.max()) - 40
        draw = batch.draw(r)
        if batch.choice.random() < 0.3:
            put_a_prefix_near_the_draw(row, draw, batch.choice)
        p = row.double().softmax(0)
        y = pick(p.numpy(), draw)
        # The draft is likely under its law, and y as likely as it takes.
        draft[x] = logit_for(0.5, batch.others(draft, x))
        q = nudged(float(p[y]) * (1 - batch.uniform(Stream.TARGET, 1, r)), batch.choice)
        if y != x and 0 < q < 0.5:
            draft[y] = logit_for(q, batch.others(draft, y))
    return batch.arguments(with_draft_law=True)


def put_the_bonus_token_near_a_boundary(batch: Batch) -> Arguments:
    """Behind an accepted draft, at the next position."""
    for r in range(BATCH):
        batch.target[r, 0, batch.ids[r]] = float(batch.target[r, 0].max()) + 40
        put_a_prefix_near_the_draw(batch.target[r, 1], batch.draw(r, position=1), batch.choice)
    return batch.arguments(with_draft_law=True)


BUILDERS: tuple[Callable[[Batch], Arguments], ...] = (
    put_p_near_the_coin,
    put_q_near_p_by_the_coin,
    put_the_recovered_token_near_a_boundary,
    put_an_attempt_near_its_threshold,
    put_the_bonus_token_near_a_boundary,
)


#: These cut peaked rows, and move no threshold by more than the distances above.
FILTERS, OF_DRAFTS = {"min_p": 1e-11}, {"draft_min_p": 1e-11}


@pytest.mark.parametrize("build", BUILDERS)
@pytest.mark.parametrize("vocab_size", [40, 4104, 9000])
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("name", [*implementations.native_names(), implementations.EMULATED])
def test_draws_on_their_thresholds_have_the_bits_of_the_scalar_tier(
    name: str, filtered: bool, build: Callable[[Batch], Arguments], vocab_size: int
) -> None:
    for seed in range(4):
        arguments = build(Batch(vocab_size, seed))
        if filtered:
            arguments |= OF_DRAFTS | FILTERS if "draft_logits" in arguments else FILTERS
        with implementations.use(name) as implementation:
            got = implementation.verify_chain(**arguments)
        with implementations.use("cpu-scalar") as scalar:
            expected = scalar.verify_chain(**arguments)
        assert torch.equal(got.token_ids, expected.token_ids)
        assert torch.equal(got.num_accepted, expected.num_accepted)
        assert torch.equal(got.status, expected.status)


@pytest.mark.parametrize("build", BUILDERS)
def test_a_hair_makes_a_difference(build: Callable[[Batch], Arguments]) -> None:
    """Otherwise the test above shows nothing: these batches must hang on the last digits of their logits."""
    arguments = build(Batch(4104, seed=0))
    with implementations.use("cpu-scalar") as scalar:
        tokens = scalar.verify_chain(**arguments).token_ids
        changed = 0
        for sign in (-1, 1):
            warmer = {**arguments, "temperature": arguments["temperature"] * (1 + sign * 2e-6)}
            changed += int((scalar.verify_chain(**warmer).token_ids != tokens).any(1).sum())
    assert changed >= BATCH // 6

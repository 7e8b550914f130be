"""Block verification in float64, for the reference of verify_chain (Sun et al., arXiv 2403.10444)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from specdec_ops import _reference
from specdec_ops._reference import DraftLaw, Draws, Float64Array
from specdec_ops._status import Status


class Slot(NamedTuple):
    """A draft of the chain, whose row has a law."""

    p: Float64Array
    x: int
    coin: float
    law: DraftLaw
    draft: int

    @property
    def q_of_x(self) -> float:
        """NaN: the draft law is not usable."""
        return 1.0 if self.law.is_one_hot else self.law.prob_of(self.draft, self.x)

    @property
    def is_one_hot(self) -> bool:
        return self.law.is_one_hot or math.isnan(self.q_of_x)

    @property
    def is_sparse(self) -> bool:
        return self.law.support_ids is not None

    def q(self) -> Float64Array | None:
        """The draft law; None if the row is not finite."""
        if not self.is_one_hot:
            return self.law.probs_of(self.draft)
        one_hot = np.zeros_like(self.p)
        one_hot[self.x] = 1.0
        return one_hot


class Numbers(NamedTuple):
    """The random numbers of a step, by slot."""

    seed: int
    position: int

    def __call__(self, slot: int, number: int) -> float:
        index = slot * _NUMBERS_PER_SLOT + number
        return _reference.uniform(self.seed, _reference.Stream.BLOCK, index, self.position)


_NUMBERS_PER_SLOT = 128
_SMALLEST_CHANCE = 2.0**-1000


def verify(
    slots: list[Slot], numbers: Numbers | None, draws: list[Draws]
) -> tuple[int, int | None, Status, list[float]]:
    """How many drafts are accepted, the token that follows, its status, and P of each slot.

    The token is None where all are accepted. ``draws`` are those of each position, ``numbers`` those of the
    step, unless the caller brought uniforms.
    """
    chances = []
    chance = 1.0
    for slot in slots:
        q = 1.0 if slot.is_one_hot else slot.q_of_x
        chance = min(1.0, chance * float(slot.p[slot.x]) / q)
        chance = chance if chance > _SMALLEST_CHANCE else 0.0
        chances.append(chance)
    for s in reversed(range(len(slots))):
        if not slots[s].coin < chances[s]:
            continue
        if s + 1 == len(slots):
            return s + 1, None, Status.OK, chances
        found = _decide(s, slots[s].coin, chances[s], slots[s + 1], numbers, draws[s + 1])
        if found is not None:
            return s + 1, *found, chances
    if not slots:
        return 0, None, Status.OK, chances
    first = slots[0]
    token, status = _reference.recover(first.p, first.x, first.law, first.draft, draws[0])
    return 0, token, status, chances


def _decide(
    s: int, coin: float, chance: float, following: Slot, numbers: Numbers | None, draws: Draws
) -> tuple[int, Status] | None:
    """Whether the drafts up to slot s are accepted, with the token that follows."""
    p = following.p
    q = following.q()
    number = draws(0)
    if numbers is not None and not following.is_one_hot and not following.is_sparse:
        for attempt in range(_reference.THINNING_ATTEMPTS):
            u = coin if attempt == 0 else numbers(s, 2 * attempt)
            if not u < chance:
                return None
            y = _reference.pick(p, _reference.TokenDraw(u / chance))
            q_of_y = following.law.prob_at(following.draft, y)
            if not math.isfinite(q_of_y):
                return y, Status.UNUSABLE_DRAFT_LAW
            if numbers(s, 2 * attempt + 1) * chance * p[y] < chance * p[y] - q_of_y:
                return y, Status.OK
        coin = numbers(s, 2 * _reference.THINNING_ATTEMPTS)
        number = _reference.TokenDraw(numbers(s, 2 * _reference.THINNING_ATTEMPTS + 1))
    if q is None:
        return _reference.pick(p, number), Status.UNUSABLE_DRAFT_LAW
    z = float(np.maximum(chance * p - q, 0.0).sum())
    if chance < 1.0 and not coin * (z + (1.0 - chance)) < z:
        return None
    status = Status.OK if following.law.is_one_hot or not following.is_one_hot else Status.UNUSABLE_DRAFT_LAW
    return _reference.pick(_reference.residual(chance * p, q), number), status

"""Lossy rules in float64, for the reference of verify_chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from specdec_ops import _reference
from specdec_ops._reference import DraftLaw, Row

RULES = ("lenience", "typical", "top_n", "thresholds", "margin")
#: Those that emit the argmax in place of a rejected draft.
EMIT_ARGMAX = ("typical", "top_n")


class AtRow(NamedTuple):
    """A row of the target and its draft, which is an id of the vocabulary."""

    logits: Tensor
    temperature: float
    row: Row
    x: int

    @property
    def is_greedy(self) -> bool:
        return not self.temperature >= _reference.GREEDY_TEMPERATURE


def no_law(law: DraftLaw) -> DraftLaw:
    return law._replace(has_law=False)


def accepts(
    rule: str,
    parameters: Sequence[float],
    at_row: AtRow,
    coin: float,
    law: DraftLaw,
    draft: int,
    accepted: bool,
) -> bool:
    """Whether the rule accepts a draft that token level has judged."""
    logits, _, row, x = at_row
    size = logits.shape[0]
    # Greedy requests: at temperature 1.
    p = _reference.read_row(logits, 1.0, size).probs if at_row.is_greedy else row.probs
    if rule == "lenience":
        if at_row.is_greedy:
            return bool(p[x] >= parameters[0] * p.max() * (1 - 1e-12))
        return _reference.judge(row.probs / parameters[0], x, coin, law, draft)[0]
    values = np.sort(logits.to("cpu").double().numpy())[::-1]
    if rule == "margin":
        if accepted or size < 2:
            return accepted
        first, second = values[0], values[1]
        return bool(float(logits[x]) >= second > 0 and second > parameters[0] * first)
    if rule == "top_n":
        larger = int((values > float(logits[x])).sum())
        return bool(p[x] > 0 and larger < parameters[0] and p.max() - p[x] <= parameters[1])
    if at_row.is_greedy:
        return accepted
    if rule == "thresholds":
        return bool(p[x] > 0 and (p[x] >= parameters[0] or coin * parameters[1] < p[x]))
    entropy = _reference.entropy_of_largest(p, size)
    return bool(p[x] > min(parameters[0], parameters[1] * np.exp(-entropy)))

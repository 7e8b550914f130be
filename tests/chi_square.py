"""Pearson's chi-square test."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def upper_gamma(a: float, x: float) -> float:
    """The regularised upper incomplete gamma function Q(a, x)."""
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1.0 / a
        n = a
        while abs(term) > abs(total) * 1e-16:
            n += 1
            term *= x / n
            total += term
        return 1.0 - scale * total
    tiny = 1e-300
    b = x + 1.0 - a
    c, d = 1.0 / tiny, 1.0 / b
    fraction = d
    for i in range(1, 100_000):
        step = -i * (i - a)
        b += 2.0
        d = 1.0 / (step * d + b or tiny)
        c = b + step / c or tiny
        fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return scale * fraction


def p_value(counts: npt.ArrayLike, probabilities: npt.ArrayLike) -> float:
    """How probable counts at least this far from the law are; 0 if an impossible cell was hit.

    Cells that expect fewer than five are pooled.
    """
    observed = np.asarray(counts, dtype=np.float64).ravel()
    law = np.asarray(probabilities, dtype=np.float64).ravel()
    assert observed.shape == law.shape and abs(law.sum() - 1.0) < 1e-9
    if observed[law == 0].sum() > 0:
        return 0.0
    expected = law * observed.sum()
    large = expected >= 5
    observed = np.append(observed[large], observed[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    if expected[-1] < 5:
        observed[-2] += observed[-1]
        expected[-2] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return upper_gamma((len(expected) - 1) / 2, statistic / 2)

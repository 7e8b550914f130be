"""The tests' own statistics, against values that are known."""

from __future__ import annotations

import math

import chi_square
import numpy as np
import pytest


@pytest.mark.parametrize("x", [1e-3, 0.5, 1.0, 3.0, 20.0])
def test_upper_gamma_equals_its_closed_forms(x: float) -> None:
    assert chi_square.upper_gamma(0.5, x) == pytest.approx(math.erfc(math.sqrt(x)), rel=1e-10)
    assert chi_square.upper_gamma(1.0, x) == pytest.approx(math.exp(-x), rel=1e-10)
    poisson = sum(math.exp(-x) * x**k / math.factorial(k) for k in range(7))
    assert chi_square.upper_gamma(7.0, x) == pytest.approx(poisson, rel=1e-10)


@pytest.mark.parametrize(
    ("degrees", "statistic", "expected"),
    [(1, 3.841459, 0.05), (10, 18.307038, 0.05), (100, 124.342113, 0.05), (5, 35.888187, 1e-6)],
)
def test_upper_gamma_equals_tabulated_quantiles(degrees: int, statistic: float, expected: float) -> None:
    assert chi_square.upper_gamma(degrees / 2, statistic / 2) == pytest.approx(expected, rel=1e-4)


def test_upper_gamma_of_many_degrees_is_near_the_normal_law() -> None:
    degrees = 200_000
    for z in (-2.0, 0.0, 2.0):
        expected = 0.5 * math.erfc(z / math.sqrt(2))
        statistic = degrees + z * math.sqrt(2 * degrees)
        assert chi_square.upper_gamma(degrees / 2, statistic / 2) == pytest.approx(expected, abs=2e-3)


def test_p_values_of_true_laws_are_uniform() -> None:
    law = np.array([0.5, 0.25, 0.125, 0.125])
    counts = np.random.default_rng(0).multinomial(10_000, law, size=400)
    values = np.array([chi_square.p_value(row, law) for row in counts])
    assert 0.02 < (values < 0.05).mean() < 0.09
    assert 0.42 < values.mean() < 0.58


def test_p_value_sees_a_wrong_law_and_an_impossible_cell() -> None:
    law = np.array([0.5, 0.25, 0.25])
    assert chi_square.p_value([51_000, 24_500, 24_500], law) < 1e-6
    assert chi_square.p_value([50_000, 25_000, 25_000], law) > 0.99
    assert chi_square.p_value([10, 1], [1.0, 0.0]) == 0.0

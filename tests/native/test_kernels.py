"""The raw kernels of each instruction-set tier against float64, and each other."""

import numpy as np
import pytest
import specdec_ops_native as native
from specdec_ops import _reference

LOG2E = np.log2(np.e)
SIZES = (1, 7, 8, 15, 16, 17, 255, 256, 257, 1000, 4095, 4096)


@pytest.fixture(params=native.tiers())
def tier(request: pytest.FixtureRequest) -> str:
    return request.param


def halves(x: np.ndarray, dtype: str) -> np.ndarray:
    """The 16-bit storage of float32 values."""
    if dtype == "float16":
        return x.astype(np.float16).view(np.uint16)
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def test_the_baseline_tier_is_always_there() -> None:
    assert native.tiers()[0] == "scalar"


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFFFFFFFFFF, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers_of_random123(key: int, counter: tuple, expected: tuple) -> None:
    assert tuple(native.philox4x32(key, counter)) == expected


def test_the_reference_has_the_constants_of_the_kernels() -> None:
    assert native.thinning_attempts == _reference.THINNING_ATTEMPTS


def test_exp2_in_float64_is_within_its_stated_error() -> None:
    y = np.random.default_rng(0).uniform(-1021, 1023, 200_000)
    assert np.abs(native.exp2(y) / np.exp2(y) - 1).max() < 4e-16 + np.finfo(float).eps
    assert native.exp2(np.array([-1023.0, -np.inf, 1024.0])).tolist() == [0.0, 0.0, np.inf]
    assert np.isnan(native.exp2(np.nan))
    assert native.exp2(np.array([-1022.0, 0.0, 1.0, 1023.0])).tolist() == [2.0**-1022, 1.0, 2.0, 2.0**1023]


def test_log2_in_float64_is_within_its_stated_error() -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate([np.exp2(rng.uniform(-1000, 1000, 100_000)), rng.uniform(0.5, 2.0, 100_000)])
    expected = np.log2(x)
    assert (
        np.abs(native.log2(x) - expected) <= 3e-16 + (3e-16 + np.finfo(float).eps) * np.abs(expected)
    ).all()
    assert native.log2(np.array([1.0, 2.0, 0.25])).tolist() == [0.0, 1.0, -2.0]


def test_weights_are_within_their_stated_error(tier: str) -> None:
    x = np.linspace(-88.0, 0.0, 4096, dtype=np.float32)
    scale = native.log2_scale(1.0)
    exact = np.exp2(x.astype(np.float64) * float(scale))
    assert (
        np.abs(native.weights(tier, x, "float32", 0.0, scale) / exact - 1)[exact > 2.0**-125].max() < 1.8e-7
    )


def test_the_largest_weighs_one_and_the_masked_nothing(tier: str) -> None:
    x = np.array([3.0, -np.inf, 3.0 - 100.0, -3.0e38], dtype=np.float32)
    assert native.weights(tier, x, "float32", 3.0, native.log2_scale(1.0)).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_a_nan_stays_one(tier: str) -> None:
    for position in (0, 5, 300, 4095):
        x = np.zeros(4096, dtype=np.float32)
        x[position] = np.nan
        maximum, total = native.block_stats(tier, x, "float32", 1.0)
        assert maximum == 0.0 and np.isnan(total)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", SIZES)
def test_every_tier_gives_the_bits_of_the_scalar_one(tier: str, dtype: str, size: int) -> None:
    rng = np.random.default_rng(size)
    for spread in (1.0, 8.0, 60.0):
        x = (rng.standard_normal(size) * spread).astype(np.float32)
        x[rng.integers(size)] = -np.inf
        stored = x if dtype == "float32" else halves(x, dtype)
        for scale in (native.log2_scale(1.0), native.log2_scale(0.07)):
            expected = native.block_stats("scalar", stored, dtype, scale)
            assert native.block_stats(tier, stored, dtype, scale) == expected
            values = native.to_float32("scalar", stored, dtype)
            if np.isfinite(values.max()):
                exact = np.exp2((values.astype(np.float64) - values.max()) * float(scale)).sum()
                assert abs(expected[1] / exact - 1) < 4e-7


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_half_converts_exactly(tier: str, dtype: str) -> None:
    every = np.arange(65536, dtype=np.uint16)
    actual = np.concatenate([native.to_float32(tier, part, dtype) for part in every.reshape(16, 4096)])
    expected = (
        every.view(np.float16).astype(np.float32)
        if dtype == "float16"
        else (every.astype(np.uint32) << 16).view(np.float32)
    )
    np.testing.assert_array_equal(actual, expected)


def test_pick_takes_the_first_prefix_above_the_draw(tier: str) -> None:
    weights = np.zeros(1000, dtype=np.float32)
    weights[[3, 64, 65, 999]] = [1.0, 2.0, 1.0, 4.0]
    eighths_and_ids = [(0.0, 3), (0.999, 3), (1.0, 64), (2.9, 64), (3.1, 65), (4.0, 999), (8.0, 999)]
    remainder = -1.0
    for eighths, expected in eighths_and_ids:
        assert native.pick(tier, weights, eighths / 8, remainder) == expected
    for chunk, number, expected in [(0.2, 0.66, 64), (0.2, 0.67, 65), (0.1, 0.9, 3), (0.2, np.inf, 65)]:
        assert native.pick(tier, weights, chunk, number) == expected


@pytest.mark.parametrize("size", SIZES)
def test_the_residual_is_what_p_has_over_q(tier: str, size: int) -> None:
    rng = np.random.default_rng(size)
    p, q = rng.random(size).astype(np.float32), rng.random(size).astype(np.float32)
    residual, total = native.residual(tier, p, q)
    np.testing.assert_array_equal(residual, np.maximum(p - q, 0))
    assert total == native.residual("scalar", p, q)[1]
    assert total == pytest.approx(np.maximum(p.astype(np.float64) - q, 0).sum(), rel=1e-6, abs=1e-7)
    q[size // 2] = np.nan
    assert np.isnan(native.residual(tier, p, q)[1])

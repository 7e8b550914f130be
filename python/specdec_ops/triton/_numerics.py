"""The arithmetic that decides tokens, as in csrc/common/numerics.h: every fma written out, no fusion."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GREEDY_TEMPERATURE = tl.constexpr(9.999999747378752e-06)  # 1e-5 in float32
#: A logsumexp that is no smaller gives no law.
LARGEST_LOGSUMEXP = tl.constexpr(1e9)
#: Adding it to y leaves y as an integer n, and n + 127 in the low bits: the exponent of 2^n.
_EXP2_MAGIC = tl.constexpr(12582912.0 + 127.0)
_ROUNDING_MAGIC = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52
_SQRT2 = tl.constexpr(1.4142135623730951)
_SMALLEST_NORMAL = tl.constexpr(2.0**-126)
_SMALLEST_SCALE = tl.constexpr(2.0**-100)


@triton.jit
def is_finite(x):
    return (x == x) & (tl.abs(x) != float("inf"))


@triton.jit
def exp2_f64(y):
    """2^y: relative error below 4e-16; 0 below 2^-1022, inf from 2^1024 on, NaN for NaN."""
    inside = tl.where((y >= -1022.0) & (y < 1024.0), y, 0.0)
    # Numbers in an fma are spelled out as float64: plain ones would be rounded to float32 first.
    n = (inside + _ROUNDING_MAGIC) - _ROUNDING_MAGIC
    f = (inside - n) * LN2
    total = tl.fma(f, tl.full([], 1.0 / 6227020800.0, tl.float64), tl.full([], 1.0 / 479001600.0, tl.float64))
    total = tl.fma(total, f, tl.full([], 1.0 / 39916800.0, tl.float64))
    total = tl.fma(total, f, tl.full([], 1.0 / 3628800.0, tl.float64))
    total = tl.fma(total, f, tl.full([], 1.0 / 362880.0, tl.float64))
    total = tl.fma(total, f, tl.full([], 1.0 / 40320.0, tl.float64))
    total = tl.fma(total, f, tl.full([], 1.0 / 5040.0, tl.float64))
    total = tl.fma(total, f, tl.full([], 1.0 / 720.0, tl.float64))
    total = tl.fma(total, f, tl.full([], 1.0 / 120.0, tl.float64))
    total = tl.fma(total, f, tl.full([], 1.0 / 24.0, tl.float64))
    total = tl.fma(total, f, tl.full([], 1.0 / 6.0, tl.float64))
    total = tl.fma(total, f, tl.full([], 0.5, tl.float64))
    total = tl.fma(total, f, tl.full([], 1.0, tl.float64))
    total = tl.fma(total, f, tl.full([], 1.0, tl.float64))
    # 2^n in two factors: n can be 1024 or -1023 next to the ends of the range.
    exponent = n.to(tl.int64)
    half = exponent >> 1
    low = ((half + 1023) << 52).to(tl.float64, bitcast=True)
    high = ((exponent - half + 1023) << 52).to(tl.float64, bitcast=True)
    result = total * low * high
    result = tl.where(y < -1022.0, 0.0, result)
    return tl.where((y >= 1024.0) | (y != y), tl.where(y != y, y, float("inf")), result)


@triton.jit
def log2_f64(x):
    """log2 of a positive normal number, error below 3e-16 + 3e-16 * |log2 x|."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    is_large = mantissa > _SQRT2
    mantissa = tl.where(is_large, mantissa * 0.5, mantissa)
    exponent = tl.where(is_large, exponent + 1, exponent)
    # log(m) = 2 atanh(s) with s = (m - 1) / (m + 1), |s| < 0.1716.
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    total = tl.fma(square, tl.full([], 1.0 / 23.0, tl.float64), tl.full([], 1.0 / 21.0, tl.float64))
    total = tl.fma(total, square, tl.full([], 1.0 / 19.0, tl.float64))
    total = tl.fma(total, square, tl.full([], 1.0 / 17.0, tl.float64))
    total = tl.fma(total, square, tl.full([], 1.0 / 15.0, tl.float64))
    total = tl.fma(total, square, tl.full([], 1.0 / 13.0, tl.float64))
    total = tl.fma(total, square, tl.full([], 1.0 / 11.0, tl.float64))
    total = tl.fma(total, square, tl.full([], 1.0 / 9.0, tl.float64))
    total = tl.fma(total, square, tl.full([], 1.0 / 7.0, tl.float64))
    total = tl.fma(total, square, tl.full([], 1.0 / 5.0, tl.float64))
    total = tl.fma(total, square, tl.full([], 1.0 / 3.0, tl.float64))
    tail = total * square
    return exponent.to(tl.float64) + tl.fma(s, tail, s) * (2.0 * LOG2E)


@triton.jit
def is_greedy(temperature):
    return (temperature >= GREEDY_TEMPERATURE) == 0


@triton.jit
def log2_scale(temperature):
    """log2(e) / temperature in float32, at least 2^-100."""
    scale = (tl.full([], LOG2E, tl.float64) / temperature.to(tl.float64)).to(tl.float32)
    return tl.where(scale > _SMALLEST_SCALE, scale, _SMALLEST_SCALE)


@triton.jit
def flush(x):
    """Denormals to 0, NaN as it is."""
    return tl.where(tl.abs(x) < _SMALLEST_NORMAL, 0.0, x)


@triton.jit
def weight_factors(x, reference, scale):
    """2^((x - reference) * scale) as two factors; 0 below 2^-126, NaN for NaN."""
    floor = tl.div_rn(tl.full([], -127.0, tl.float32), scale)
    y = tl.maximum(floor, x - reference, propagate_nan=tl.PropagateNan.ALL)
    shifted = tl.fma(y, scale, _EXP2_MAGIC)
    f = tl.fma(y, scale, _EXP2_MAGIC - shifted)
    power = (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    total = tl.fma(f, 0.0013264646986499429, 0.009671516716480255)
    total = tl.fma(total, f, 0.05550720915198326)
    total = tl.fma(total, f, 0.24022243916988373)
    total = tl.fma(total, f, 0.6931470036506653)
    return tl.fma(total, f, 1.0), power


@triton.jit
def weights_of(x, reference, scale, factor):
    """Weights of logits of a block with this maximum, times a factor; 0 in a block that is masked."""
    polynomial, power = weight_factors(x, reference, scale)
    weights = flush(flush(polynomial * power) * factor)
    return tl.where(reference > float("-inf"), weights, 0.0)

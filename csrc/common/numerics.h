#pragma once

#include <cstdint>
#include <cstring>

#include "common/macros.h"

/// The arithmetic that decides tokens, the same bits on every backend: IEEE operations with fma
/// written out (-ffp-contract=off, -fmad=false) and of libm nothing but fma, which is exact.
/// docs/numerics.md has the errors.
namespace specdec_ops {

constexpr double kLog2E = 0x1.71547652b82fep+0;
constexpr double kLn2 = 0x1.62e42fefa39efp-1;
/// Temperatures below this (and NaN) are greedy.
constexpr float kGreedyTemperature = 1e-5f;

/// 2^f on [-1/2, 1/2] with 2^0 = 1 exactly, relative error 9.6e-8 before rounding: a fit in float32. The
/// coefficient of f^(i + 1), i = 0 ... 4.
SPECDEC_HOST_DEVICE constexpr float exp2_coefficient(int i) {
  const float coefficients[5] = {0x1.62e42ap-1f, 0x1.ebf9bep-3f, 0x1.c6b70ep-5f, 0x1.3cea90p-7f,
                                 0x1.5bb98ap-10f};
  return coefficients[i];
}
/// Adding this to y rounds y to an integer n and leaves n + 127, the exponent field of 2^n, in the
/// low bits of the sum.
constexpr float kExp2Magic = 12582912.0f + 127.0f;

/// Masses for top-p are whole multiples of 2^-40 of what the largest id of a block weighs. Those of a block
/// add up to at most 2^52: exactly, in any order, as integers or in float64.
constexpr double kMassUnits = 0x1p40;
/// Adding this to a float64 leaves an integer, rounded to even, in the low bits.
constexpr double kMassMagic = 0x1.8p52;

SPECDEC_HOST_DEVICE float fma32(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SPECDEC_HOST_DEVICE double fma64(double a, double b, double c) { return __builtin_fma(a, b, c); }

SPECDEC_HOST_DEVICE uint64_t bits_of(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
SPECDEC_HOST_DEVICE double double_of(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
SPECDEC_HOST_DEVICE bool is_finite(double value) {
  return (bits_of(value) & 0x7FF0000000000000) != 0x7FF0000000000000;
}

/// 2^y: relative error below 4e-16 for results that are normal numbers; 0 below 2^-1022 and inf
/// from 2^1024 on; NaN for NaN.
SPECDEC_HOST_DEVICE double exp2_f64(double y) {
  if (!(y >= -1022.0)) return y < -1022.0 ? 0.0 : y;
  if (y >= 1024.0) return double_of(0x7FF0000000000000);
  const double magic = 0x1.8p52;
  const double shifted = y + magic;
  const double n = shifted - magic;
  // Taylor's series of 2^f on [-1/2, 1/2] to f^13.
  const double f = (y - n) * kLn2;
  double sum = 1.0 / 6227020800.0;
  sum = fma64(sum, f, 1.0 / 479001600.0);
  sum = fma64(sum, f, 1.0 / 39916800.0);
  sum = fma64(sum, f, 1.0 / 3628800.0);
  sum = fma64(sum, f, 1.0 / 362880.0);
  sum = fma64(sum, f, 1.0 / 40320.0);
  sum = fma64(sum, f, 1.0 / 5040.0);
  sum = fma64(sum, f, 1.0 / 720.0);
  sum = fma64(sum, f, 1.0 / 120.0);
  sum = fma64(sum, f, 1.0 / 24.0);
  sum = fma64(sum, f, 1.0 / 6.0);
  sum = fma64(sum, f, 0.5);
  sum = fma64(sum, f, 1.0);
  sum = fma64(sum, f, 1.0);
  // 2^n in two factors: n can be 1024 or -1023 next to the ends of the range.
  const int64_t exponent = static_cast<int64_t>(n);
  const int64_t half = exponent / 2;
  return sum * double_of(static_cast<uint64_t>(half + 1023) << 52) *
         double_of(static_cast<uint64_t>(exponent - half + 1023) << 52);
}

/// log2(x) of a positive normal number, error below 3e-16 + 3e-16 * |log2 x|.
SPECDEC_HOST_DEVICE double log2_f64(double x) {
  const uint64_t bits = bits_of(x);
  int64_t exponent = static_cast<int64_t>(bits >> 52) - 1023;
  double mantissa = double_of((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000);
  if (mantissa > 0x1.6a09e667f3bcdp+0) {  // sqrt(2)
    mantissa *= 0.5;
    exponent += 1;
  }
  // log(m) = 2 atanh(s) with s = (m - 1) / (m + 1), |s| < 0.1716.
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double square = s * s;
  double sum = 1.0 / 23.0;
  sum = fma64(sum, square, 1.0 / 21.0);
  sum = fma64(sum, square, 1.0 / 19.0);
  sum = fma64(sum, square, 1.0 / 17.0);
  sum = fma64(sum, square, 1.0 / 15.0);
  sum = fma64(sum, square, 1.0 / 13.0);
  sum = fma64(sum, square, 1.0 / 11.0);
  sum = fma64(sum, square, 1.0 / 9.0);
  sum = fma64(sum, square, 1.0 / 7.0);
  sum = fma64(sum, square, 1.0 / 5.0);
  sum = fma64(sum, square, 1.0 / 3.0);
  const double tail = sum * square;
  return static_cast<double>(exponent) + fma64(s, tail, s) * (2.0 * kLog2E);
}

/// log2(e) / temperature, rounded once to float32: the factor that turns a difference of logits
/// into a power of two. Bounded below so that an infinite temperature still masks -inf.
SPECDEC_HOST_DEVICE float log2_scale(float temperature) {
  const float scale = static_cast<float>(kLog2E / static_cast<double>(temperature));
  return scale > 0x1p-100f ? scale : 0x1p-100f;
}

SPECDEC_HOST_DEVICE bool is_greedy(float temperature) { return !(temperature >= kGreedyTemperature); }

}  // namespace specdec_ops

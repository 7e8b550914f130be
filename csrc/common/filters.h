#pragma once

#include <cstdint>
#include <cstring>

#include "common/row_law.h"
#include "common/views.h"

/// Top-k, top-p and min-p as one threshold on the logits of a row: ids below it are masked, ties at it are
/// kept. docs/numerics.md has the definition.
namespace specdec_ops {

/// By entry of a request; each may be empty.
struct FilterViews {
  IntView top_k;
  RealView top_p;
  RealView min_p;

  SPECDEC_HOST_DEVICE explicit operator bool() const { return top_k || top_p || min_p; }
};

/// Those of one request.
struct Filters {
  /// 0: none.
  int64_t top_k = 0;
  /// 1: none.
  double top_p = 1.0;
  /// 0: none.
  double min_p = 0.0;

  SPECDEC_HOST_DEVICE bool any() const { return top_k > 0 || top_p < 1.0 || min_p > 0.0; }
  /// Whether top-p is of the mass of the whole row.
  SPECDEC_HOST_DEVICE bool weighs_whole_row(bool joint) const {
    return top_p < 1.0 && (joint || (top_k == 0 && min_p == 0.0));
  }
};

SPECDEC_HOST_DEVICE Filters filters_from(int64_t top_k, double top_p, double min_p, int64_t vocab_size) {
  Filters filters;
  if (top_k > 0 && top_k < vocab_size) filters.top_k = top_k;
  if (top_p < 1.0) filters.top_p = top_p;
  if (min_p > 0.0) filters.min_p = min_p < 1.0 ? min_p : 1.0;
  return filters;
}

SPECDEC_HOST_DEVICE Filters filters_of(const FilterViews& views, int64_t entry, int64_t vocab_size) {
  return filters_from(views.top_k ? at(views.top_k, entry) : 0, views.top_p ? at(views.top_p, entry) : 1.0,
                      views.min_p ? at(views.min_p, entry) : 0.0, vocab_size);
}

/// An integer that grows with the float, by 1 from one float to the next; the two zeros have the same one.
SPECDEC_HOST_DEVICE uint32_t order_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  return bits >> 31 != 0 ? 0x80000000u - magnitude : 0x80000000u + magnitude;
}
SPECDEC_HOST_DEVICE float float_of_order(uint32_t order) {
  const uint32_t bits = order < 0x80000000u ? 0x80000000u | (0x80000000u - order) : order - 0x80000000u;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
/// The next larger float.
SPECDEC_HOST_DEVICE float after(float x) { return float_of_order(order_of(x) + 1); }
/// The float halfway between two by order; `low` where they are neighbours.
SPECDEC_HOST_DEVICE float between(float low, float high) {
  return float_of_order(order_of(low) + (order_of(high) - order_of(low)) / 2);
}

/// The least float that min-p keeps.
SPECDEC_HOST_DEVICE float min_p_threshold(float max, float scale, double min_p) {
  const double least = static_cast<double>(max) + log2_f64(min_p) / static_cast<double>(scale);
  const float nearest = static_cast<float>(least);
  return static_cast<double>(nearest) < least ? after(nearest) : nearest;
}

/// The mass of an id: its weight relative to its block's maximum, as in the sum of the block.
SPECDEC_HOST_DEVICE int64_t mass_of(float x, float block_max, float scale) {
  const float floor = -127.0f / scale, distance = x - block_max;
  float fraction = floor > distance ? floor : distance;
  const float shifted = fma32(fraction, scale, kExp2Magic);
  fraction = fma32(fraction, scale, kExp2Magic - shifted);
  uint32_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits <<= 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  float polynomial = fma32(exp2_coefficient(4), fraction, exp2_coefficient(3));
  for (int i = 2; i >= 0; --i) polynomial = fma32(polynomial, fraction, exp2_coefficient(i));
  polynomial = fma32(polynomial, fraction, 1.0f);
  const double sum = fma64(static_cast<double>(polynomial * power), kMassUnits, kMassMagic);
  return static_cast<int64_t>(bits_of(sum) - bits_of(kMassMagic));
}

/// The mass of a row from those of its blocks; `weights` are block_weight of each.
SPECDEC_HOST_DEVICE double mass_of_row(const int64_t* masses, const double* weights, int num_blocks) {
  double total = 0.0;
  for (int b = 0; b < num_blocks; ++b) {
    if (masses[b] > 0) total = fma64(static_cast<double>(masses[b]), weights[b], total);
  }
  return total;
}

}  // namespace specdec_ops

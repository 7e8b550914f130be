#pragma once

#include <cstdint>

#include "common/numerics.h"
#include "common/philox.h"

/// Gumbel noise by id: the id with the largest score of a row follows the row's law, and rows that share
/// their noise often agree (Daliri et al., arXiv 2408.07978). All of it in float32, the same bits on every
/// backend.
namespace specdec_ops {

/// Ids that share a run of random blocks: id g * kNoiseGroup + w * kNoiseLanes + l has word w of random block
/// g * kNoiseLanes + l.
constexpr int kNoiseLanes = 16;
constexpr int kNoiseGroup = 4 * kNoiseLanes;

/// Of the noise at a position: everything but the number of the random block.
struct NoiseKey {
  uint64_t key;
  uint64_t position;
};

SPECDEC_HOST_DEVICE NoiseKey noise_key(int64_t seed, int64_t position) {
  return {splitmix64(static_cast<uint64_t>(seed)), static_cast<uint64_t>(position)};
}

SPECDEC_HOST_DEVICE PhiloxBlock noise_block(const NoiseKey& noise, uint32_t number) {
  return philox4x32(noise.key,
                    {{number, static_cast<uint32_t>(noise.position), static_cast<uint32_t>(Stream::kGumbel),
                      static_cast<uint32_t>(noise.position >> 32)}});
}

/// exponent + log2(1 + f) with f in [-1/2, 0], relative error of the logarithm 3e-7.
SPECDEC_HOST_DEVICE float log2_of_parts(float f, float exponent) {
  // 2 * atanh(s) / ln 2, |s| <= 1/3.
  const float s = f / (2.0f + f);
  const float square = s * s;
  float sum = 0x1.c68f56p-3f;  // 2 / (13 ln 2)
  sum = fma32(sum, square, 0x1.0c9a84p-2f);
  sum = fma32(sum, square, 0x1.484b14p-2f);
  sum = fma32(sum, square, 0x1.a61762p-2f);
  sum = fma32(sum, square, 0x1.2776c6p-1f);
  sum = fma32(sum, square, 0x1.ec709ep-1f);
  sum = fma32(sum, square, 0x1.715476p+1f);
  return fma32(s, sum, exponent);
}

SPECDEC_HOST_DEVICE uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
SPECDEC_HOST_DEVICE float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/// The parts of a positive normal number: it is (1 + fraction) * 2^exponent, the fraction in [-1/2, 0).
SPECDEC_HOST_DEVICE float exponent_of(float x) {
  return static_cast<float>(static_cast<int32_t>(float_bits(x) >> 23) - 126);
}
SPECDEC_HOST_DEVICE float fraction_of(float x) {
  return float_of_bits((float_bits(x) & 0x007FFFFF) | 0x3F000000) - 1.0f;
}

/// Noise in powers of two: -log2(-log2(1 - u)) with u = (word + 1/2) / 2^32. Large noise comes from small u,
/// where float32 is fine; it is below 32.6.
SPECDEC_HOST_DEVICE float gumbel_of(uint32_t word) {
  // 1 - u is 1 + f, or from 1/2 down (1 + f) * 2^exponent. Without branches, for the sake of vectors.
  const uint32_t is_large = 0u - (word >> 31);
  const float number = static_cast<float>(static_cast<int32_t>(word ^ is_large)) + 0.5f;
  const uint32_t large = float_bits(fraction_of(number)), small = float_bits(number * -0x1p-32f);
  const float f = float_of_bits((large & is_large) | (small & ~is_large));
  const float exponent = float_of_bits(float_bits(exponent_of(number) - 32.0f) & is_large);
  const float exponential = -log2_of_parts(f, exponent);
  return -log2_of_parts(fraction_of(exponential), exponent_of(exponential));
}

/// What is compared between ids; the largest wins, the lowest id on ties.
SPECDEC_HOST_DEVICE float gumbel_score(float logit, float max, float scale, float noise) {
  return fma32(logit - max, scale, noise);
}

}  // namespace specdec_ops

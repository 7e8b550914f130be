#pragma once

#include <cstdint>
#include <cstring>

#include "common/views.h"

namespace specdec_ops::cpu {

/// Storage types: converted to float32 as they are loaded.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

__attribute__((always_inline)) inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

__attribute__((always_inline)) inline float to_float(float x) { return x; }

__attribute__((always_inline)) inline float to_float(BFloat16 x) {
  return float_of(static_cast<uint32_t>(x.bits) << 16);
}

__attribute__((always_inline)) inline float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t magnitude = x.bits & 0x7FFF;
  if (magnitude > 0x7C00) return float_of(sign | 0x7FC00000 | (magnitude & 0x3FF) << 13);
  if (magnitude == 0x7C00) return float_of(sign | 0x7F800000);
  if (magnitude >= 0x0400) return float_of(sign | ((magnitude << 13) + (112u << 23)));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return sign != 0 ? -subnormal : subnormal;
}

}  // namespace specdec_ops::cpu

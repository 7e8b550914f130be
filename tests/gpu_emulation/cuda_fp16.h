#pragma once

#include "cuda_bf16.h"

struct __half {
  uint16_t bits;
};
struct __half2 {
  uint16_t x, y;
};

inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline float __half2float(__half half) {
  const uint32_t sign = uint32_t{half.bits} >> 15 << 31, exponent = half.bits >> 10 & 31,
                 mantissa = half.bits & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7F800000u | mantissa << 13);
  const float magnitude = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-24f
                                        : __uint_as_float((exponent + 112) << 23 | mantissa << 13);
  return __uint_as_float(sign | __float_as_uint(magnitude));
}

inline float emulated_f16(uint16_t bits) { return __half2float({bits}); }
inline __half2 __hmax2(__half2 a, __half2 b) {
  return {emulated_larger(a.x, b.x, false, emulated_f16), emulated_larger(a.y, b.y, false, emulated_f16)};
}
inline __half2 __hmax2_nan(__half2 a, __half2 b) {
  return {emulated_larger(a.x, b.x, true, emulated_f16), emulated_larger(a.y, b.y, true, emulated_f16)};
}

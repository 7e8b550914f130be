#pragma once

#include "cuda_runtime_api.h"

struct __nv_bfloat162 {
  uint16_t x, y;
};

/// The larger of two halves by their values. One NaN: the other, or NaN.
template <class ToFloat>
uint16_t emulated_larger(uint16_t a, uint16_t b, bool wants_nan, ToFloat to_float) {
  const float first = to_float(a), second = to_float(b);
  if (std::isnan(first) || std::isnan(second)) {
    if (wants_nan || (std::isnan(first) && std::isnan(second))) return 0x7FFF;
    return std::isnan(first) ? b : a;
  }
  return second > first ? b : a;
}

inline float emulated_bf16(uint16_t bits) { return __uint_as_float(uint32_t{bits} << 16); }
inline __nv_bfloat162 __hmax2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {emulated_larger(a.x, b.x, false, emulated_bf16), emulated_larger(a.y, b.y, false, emulated_bf16)};
}
inline __nv_bfloat162 __hmax2_nan(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {emulated_larger(a.x, b.x, true, emulated_bf16), emulated_larger(a.y, b.y, true, emulated_bf16)};
}

#pragma once

#include <cstdint>
#include <cstring>

namespace specdec_ops::cpu {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

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

/// Rows of `width` or more elements, `stride` elements apart.
struct RowsView {
  const void* data = nullptr;
  int64_t stride = 0;
  DType dtype = DType::kFloat32;
};

/// int32 or int64 values, `stride` elements apart, in rows `row_stride` apart.
struct IntView {
  const void* data = nullptr;
  int64_t stride = 0;
  bool is_int64 = false;
  int64_t row_stride = 0;

  explicit operator bool() const { return data != nullptr; }
};

/// float32 or float64 values, `stride` elements apart, in rows `row_stride` apart.
struct RealView {
  const void* data = nullptr;
  int64_t stride = 0;
  bool is_float64 = false;
  int64_t row_stride = 0;

  explicit operator bool() const { return data != nullptr; }
};

__attribute__((always_inline)) inline int64_t at(const IntView& view, int64_t row, int64_t column) {
  const int64_t offset = row * view.row_stride + column * view.stride;
  return view.is_int64 ? static_cast<const int64_t*>(view.data)[offset]
                       : static_cast<const int32_t*>(view.data)[offset];
}

__attribute__((always_inline)) inline double at(const RealView& view, int64_t row, int64_t column) {
  const int64_t offset = row * view.row_stride + column * view.stride;
  return view.is_float64 ? static_cast<const double*>(view.data)[offset]
                         : static_cast<const float*>(view.data)[offset];
}

__attribute__((always_inline)) inline int64_t at(const IntView& view, int64_t index) {
  return at(view, 0, index);
}

__attribute__((always_inline)) inline double at(const RealView& view, int64_t index) {
  return at(view, 0, index);
}

}  // namespace specdec_ops::cpu

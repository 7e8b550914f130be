#pragma once

#include <cstdint>

#include "common/macros.h"

namespace specdec_ops {

enum class FloatType : int32_t { kFloat64, kFloat32, kBFloat16, kFloat16 };

/// Floats of any width: elements `stride` apart, in rows `row_stride` apart.
struct FloatRowsView {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t stride = 0;
  FloatType dtype = FloatType::kFloat32;

  SPECDEC_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

}  // namespace specdec_ops

#pragma once

#include <cstdint>

#include "common/macros.h"

/// Tensors as kernels see them: pointers, strides in elements, and the dtypes that an op allows.
namespace specdec_ops {

enum class DType : int32_t { kFloat32, kBFloat16, kFloat16 };

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

  SPECDEC_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

/// Like IntView, to write to.
struct MutableIntView {
  void* data = nullptr;
  int64_t stride = 0;
  bool is_int64 = false;
  int64_t row_stride = 0;

  SPECDEC_HOST_DEVICE operator IntView() const { return {data, stride, is_int64, row_stride}; }
};

/// float32 or float64 values, `stride` elements apart, in rows `row_stride` apart.
struct RealView {
  const void* data = nullptr;
  int64_t stride = 0;
  bool is_float64 = false;
  int64_t row_stride = 0;

  SPECDEC_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

/// bool values, `stride` elements apart.
struct BoolView {
  const bool* data = nullptr;
  int64_t stride = 0;

  SPECDEC_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

/// Like BoolView, to write to.
struct MutableBoolView {
  bool* data = nullptr;
  int64_t stride = 0;
};

/// The view from `elements` further on.
SPECDEC_HOST_DEVICE RowsView advanced(RowsView view, int64_t elements) {
  view.data = static_cast<const char*>(view.data) + elements * (view.dtype == DType::kFloat32 ? 4 : 2);
  return view;
}

SPECDEC_HOST_DEVICE IntView advanced(IntView view, int64_t elements) {
  view.data = static_cast<const char*>(view.data) + elements * (view.is_int64 ? 8 : 4);
  return view;
}

SPECDEC_HOST_DEVICE RealView advanced(RealView view, int64_t elements) {
  view.data = static_cast<const char*>(view.data) + elements * (view.is_float64 ? 8 : 4);
  return view;
}

SPECDEC_HOST_DEVICE int64_t at(const IntView& view, int64_t row, int64_t column) {
  const int64_t offset = row * view.row_stride + column * view.stride;
  return view.is_int64 ? static_cast<const int64_t*>(view.data)[offset]
                       : static_cast<const int32_t*>(view.data)[offset];
}

SPECDEC_HOST_DEVICE double at(const RealView& view, int64_t row, int64_t column) {
  const int64_t offset = row * view.row_stride + column * view.stride;
  return view.is_float64 ? static_cast<const double*>(view.data)[offset]
                         : static_cast<const float*>(view.data)[offset];
}

SPECDEC_HOST_DEVICE int64_t at(const IntView& view, int64_t index) { return at(view, 0, index); }

SPECDEC_HOST_DEVICE double at(const RealView& view, int64_t index) { return at(view, 0, index); }

SPECDEC_HOST_DEVICE bool at(const BoolView& view, int64_t index) { return view.data[index * view.stride]; }

/// A value that does not fit an int32 view is cut off: ops check ranges before they write.
SPECDEC_HOST_DEVICE void put(const MutableIntView& view, int64_t row, int64_t column, int64_t value) {
  const int64_t offset = row * view.row_stride + column * view.stride;
  if (view.is_int64) {
    static_cast<int64_t*>(view.data)[offset] = value;
  } else {
    static_cast<int32_t*>(view.data)[offset] = static_cast<int32_t>(value);
  }
}

SPECDEC_HOST_DEVICE void put(const MutableIntView& view, int64_t index, int64_t value) {
  put(view, 0, index, value);
}

SPECDEC_HOST_DEVICE void put(const MutableBoolView& view, int64_t index, bool value) {
  view.data[index * view.stride] = value;
}

}  // namespace specdec_ops

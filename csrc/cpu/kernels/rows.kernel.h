// Rows of logits and their blocks, as whatever type they have. Included once per tier through foreach_isa.h.

#include "cpu/kernels/blocks.kernel.h"

namespace {

RowRef row_of(const RowsView& rows, int64_t row, float scale = 0.0f) {
  RowRef ref;
  ref.data = advanced(rows, row * rows.stride).data;
  ref.dtype = rows.dtype;
  ref.scale = scale;
  return ref;
}

/// Calls visit with a pointer to the row's elements, as the type that they have.
template <class Visit>
__attribute__((always_inline)) inline auto visit_row(const RowRef& row, const Visit& visit) {
  switch (row.dtype) {
    case DType::kBFloat16:
      return visit(static_cast<const BFloat16*>(row.data));
    case DType::kFloat16:
      return visit(static_cast<const Float16*>(row.data));
    default:
      return visit(static_cast<const float*>(row.data));
  }
}

/// Copies a block as float32, padded to whole rows, with what the row's threshold masks; returns the rows.
int float_block(const RowRef& row, int64_t begin, int n, float* padded, float padding = -__builtin_inff()) {
  const int rows =
      visit_row(row, [&](const auto* data) { return pad_block(data + begin, n, padded, padding); });
  if (row.is_masked()) mask_block(padded, rows, row.threshold);
  return rows;
}

/// Calls visit(pointer, rows) on a block of a row: in place, or copied to `padded` where it is short or
/// masked.
template <class Visit>
auto visit_block(const RowRef& row, int64_t begin, int n, float* padded, const Visit& visit) {
  return visit_row(row, [&](const auto* data) {
    if (n % kNumLanes == 0 && !row.is_masked()) return visit(data + begin, n / kNumLanes);
    const int rows = float_block(row, begin, n, padded);
    return visit(static_cast<const float*>(padded), rows);
  });
}

float element(const RowRef& row, int64_t index) {
  const float value = visit_row(row, [&](const auto* data) { return to_float(data[index]); });
  return value < row.threshold ? -__builtin_inff() : value;
}

}  // namespace

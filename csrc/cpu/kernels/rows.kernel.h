// Rows of logits by blocks, for kernels other than the chain program. Included once per tier through
// foreach_isa.h.

#include "cpu/kernels/blocks.kernel.h"

namespace {

struct RowRef {
  const void* data;
  DType dtype;
};

RowRef row_of(const RowsView& rows, int64_t row) {
  return {advanced(rows, row * rows.stride).data, rows.dtype};
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

/// Calls visit(pointer, rows) on a block of n elements, a short one padded with -inf in `padded`.
template <class Visit>
auto visit_block(const RowRef& row, int64_t begin, int n, float* padded, const Visit& visit) {
  return visit_row(row, [&](const auto* data) {
    if (n % kNumLanes == 0) return visit(data + begin, n / kNumLanes);
    const int rows = pad_block(data + begin, n, padded);
    return visit(static_cast<const float*>(padded), rows);
  });
}

float element(const RowRef& row, int64_t index) {
  return visit_row(row, [&](const auto* data) { return to_float(data[index]); });
}

}  // namespace

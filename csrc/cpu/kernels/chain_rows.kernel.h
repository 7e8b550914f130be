// Rows of logits and their blocks, as whatever type they have. Included once per tier.

#include "cpu/kernels/blocks.kernel.h"

namespace {

/// Calls visit with a pointer to the row's elements, as the type that they have.
template <class Visit>
__attribute__((always_inline)) inline auto visit_row(const void* row, DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kBFloat16:
      return visit(static_cast<const BFloat16*>(row));
    case DType::kFloat16:
      return visit(static_cast<const Float16*>(row));
    default:
      return visit(static_cast<const float*>(row));
  }
}

/// Copies a block as float32, padded to whole rows, with what the row's threshold masks; returns the rows.
int float_block(const RowRef& row, int64_t begin, int n, float* padded, float padding = -__builtin_inff()) {
  const int rows = visit_row(row.data, row.dtype,
                             [&](const auto* data) { return pad_block(data + begin, n, padded, padding); });
  if (row.is_masked()) mask_block(padded, rows, row.threshold);
  return rows;
}

/// Calls visit(pointer, rows) on a block of a row: in place, or copied to `padded` where it is short or
/// masked.
template <class Visit>
auto visit_block(const RowRef& row, int64_t begin, int n, float* padded, const Visit& visit) {
  return visit_row(row.data, row.dtype, [&](const auto* data) {
    if (n % kNumLanes == 0 && !row.is_masked()) return visit(data + begin, n / kNumLanes);
    const int rows = float_block(row, begin, n, padded);
    return visit(static_cast<const float*>(padded), rows);
  });
}

float element(const RowRef& row, int64_t index) {
  const float value = visit_row(row.data, row.dtype, [&](const auto* data) { return to_float(data[index]); });
  return value < row.threshold ? -__builtin_inff() : value;
}

int block_length(const ChainRun& run, int block) {
  const int64_t rest = run.params->vocab_size - static_cast<int64_t>(block) * kBlockSize;
  return rest < kBlockSize ? static_cast<int>(rest) : kBlockSize;
}

}  // namespace

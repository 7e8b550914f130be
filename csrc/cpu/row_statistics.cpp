#include "cpu/kernels/row_statistics.h"

#include <torch/csrc/stable/library.h>

#include "common/row_statistics_ops.h"

namespace specdec_ops::cpu {
namespace {

struct Backend {
  static constexpr bool kValuesOnHost = true;

  static Checks checks(const char* op, const Tensor&) { return Checks(op); }

  static void row_statistics(const Checks&, const RowStatisticsParams& params, const Tensor&) {
    torch::stable::parallel_for(0, params.num_rows, row_statistics_grain(params),
                                [&](int64_t begin, int64_t end) { run_row_statistics(params, begin, end); });
  }
};

}  // namespace
}  // namespace specdec_ops::cpu

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CPU, m) {
  m.impl("row_statistics", TORCH_BOX(&specdec_ops::row_statistics<specdec_ops::cpu::Backend>));
}

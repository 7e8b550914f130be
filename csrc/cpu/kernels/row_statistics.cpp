#include "cpu/kernels/row_statistics.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "common/philox.h"
#include "cpu/kernels/float_environment.h"
#include "cpu/kernels/isa.h"
#include "cpu/kernels/row_ref.h"
#include "cpu/kernels/types.h"

#define SPECDEC_KERNEL "cpu/kernels/row_statistics.kernel.h"
#include "cpu/kernels/foreach_isa.h"

namespace specdec_ops::cpu {

int64_t row_statistics_grain(const RowStatisticsParams& params) {
  constexpr int64_t kElementsPerWorker = 32768;
  return std::max<int64_t>(kElementsPerWorker / params.vocab_size, 1);
}

void run_row_statistics(const RowStatisticsParams& params, int64_t begin, int64_t end) {
  const size_t num_blocks = static_cast<size_t>(params.num_blocks()) * (params.has_draft() ? 2 : 1);
  const std::unique_ptr<BlockStatistics[]> workspace(new BlockStatistics[num_blocks]);
  const DenormalsOn environment;
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return avx512::statistics_of_rows(params, begin, end, workspace.get());
    case Isa::kAvx2:
      return avx2::statistics_of_rows(params, begin, end, workspace.get());
#endif
    default:
      return scalar::statistics_of_rows(params, begin, end, workspace.get());
  }
}

}  // namespace specdec_ops::cpu

#pragma once

#include "common/row_statistics.h"

namespace specdec_ops::cpu {

/// Rows that repay waking another thread.
int64_t row_statistics_grain(const RowStatisticsParams& params);
/// Statistics of rows [begin, end).
void run_row_statistics(const RowStatisticsParams& params, int64_t begin, int64_t end);

}  // namespace specdec_ops::cpu

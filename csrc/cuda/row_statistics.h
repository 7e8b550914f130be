#pragma once

#include <cuda_runtime_api.h>

#include "common/row_statistics.h"

namespace specdec_ops::cuda {

/// In bytes; depends on shapes alone.
int64_t row_statistics_workspace_size(const RowStatisticsParams& params);

/// `workspace` is aligned to 16 bytes and need not be initialised.
cudaError_t launch_row_statistics(const RowStatisticsParams& params, void* workspace, cudaStream_t stream);

}  // namespace specdec_ops::cuda

#pragma once

#include <cuda_runtime_api.h>

#include "common/recovered_probs_params.h"

namespace specdec_ops::cuda {

/// In bytes; depends on shapes alone.
int64_t recovered_probs_workspace_size(const RecoveredProbsParams& params);

/// `workspace` is aligned to 16 bytes and need not be initialised.
cudaError_t launch_recovered_probs(const RecoveredProbsParams& params, void* workspace, cudaStream_t stream);

}  // namespace specdec_ops::cuda

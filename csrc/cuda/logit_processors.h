#pragma once

#include <cuda_runtime_api.h>

#include "common/logit_processors.h"

namespace specdec_ops::cuda {

/// In bytes; depends on shapes alone.
int64_t logit_processors_workspace_size(const LogitProcessors& apply);

/// `workspace` is aligned to 16 bytes and need not be initialised.
cudaError_t launch_logit_processors(const LogitProcessors& apply, void* workspace, cudaStream_t stream);

}  // namespace specdec_ops::cuda

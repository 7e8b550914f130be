#pragma once

#include <cuda_runtime_api.h>

#include "common/token_logprobs.h"

namespace specdec_ops::cuda {

/// In bytes; depends on shapes alone.
int64_t token_logprobs_workspace_size(const TokenLogprobsParams& params);

/// `workspace` is aligned to 16 bytes and need not be initialised.
cudaError_t launch_token_logprobs(const TokenLogprobsParams& params, void* workspace, cudaStream_t stream);

}  // namespace specdec_ops::cuda

#pragma once

#include <cuda_runtime_api.h>

#include "common/plan_verification.h"

namespace specdec_ops::cuda {

/// In bytes; depends on shapes alone.
int64_t plan_verification_workspace_size(const PlanVerificationParams& params);

/// `workspace` is aligned to 16 bytes and need not be initialised.
cudaError_t launch_plan_verification(const PlanVerificationParams& params, void* workspace,
                                     cudaStream_t stream);

}  // namespace specdec_ops::cuda

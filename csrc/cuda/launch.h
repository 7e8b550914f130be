#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace specdec_ops::cuda {

/// Puts `num_tasks` CTAs on a stream, or as many as a grid may have: kernels step over the tasks.
template <class... Parameters>
cudaError_t launch(void (*kernel)(int64_t num_ctas, Parameters...), int64_t num_tasks, int num_threads,
                   cudaStream_t stream, Parameters... parameters) {
  constexpr int64_t kMaxCtas = 1 << 20;
  const int64_t num_ctas = std::min(num_tasks, kMaxCtas);
  if (num_ctas <= 0) return cudaSuccess;
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(num_ctas);
  config.blockDim = static_cast<unsigned>(num_threads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, num_ctas, parameters...);
}

}  // namespace specdec_ops::cuda

#pragma once

#include <algorithm>

#include "cuda/stream.h"
#include "cuda/warp.cuh"

/// Launches the bookkeeping ops, whose bodies are functors in csrc/common.
namespace specdec_ops::cuda {

constexpr int kRequestsPerCta = 4;

/// A warp to a request.
template <class Op>
__global__ void __launch_bounds__(kRequestsPerCta* kWarpSize) run_for_each_request(int64_t batch, Op op) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kRequestsPerCta;
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * kRequestsPerCta + warp_index(); r < batch;
       r += stride) {
    op(r, static_cast<int64_t>(lane_index()), static_cast<int64_t>(kWarpSize));
  }
}

/// Calls op(request, lane, num_lanes) for every request, on the current stream of the scope's device.
template <class Op>
cudaError_t for_each_request(const DeviceScope& scope, int64_t batch, const Op& op) {
  if (batch == 0) return cudaSuccess;
  const int64_t ctas = (batch + kRequestsPerCta - 1) / kRequestsPerCta;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(ctas, 65535));
  run_for_each_request<<<grid, kRequestsPerCta * kWarpSize, 0, scope.stream()>>>(batch, op);
  return cudaGetLastError();
}

}  // namespace specdec_ops::cuda

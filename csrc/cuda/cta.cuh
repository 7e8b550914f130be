#pragma once

#include "cuda/warp.cuh"

/// Kernels of four warps to a CTA, and what the threads of one do together.
namespace specdec_ops::cuda {

constexpr int kCtaThreads = 128;
constexpr int kCtaWarps = kCtaThreads / kWarpSize;

/// CTAs for as many tasks of a warp.
inline int64_t ctas_of_warps(int64_t num_tasks) { return (num_tasks + kCtaWarps - 1) / kCtaWarps; }
/// CTAs for as many tasks of a thread.
inline int64_t ctas_of_threads(int64_t num_tasks) { return (num_tasks + kCtaThreads - 1) / kCtaThreads; }
__device__ __forceinline__ int64_t first_warp_task() {
  return static_cast<int64_t>(blockIdx.x) * kCtaWarps + warp_index();
}
__device__ __forceinline__ int64_t first_thread_task() {
  return static_cast<int64_t>(blockIdx.x) * kCtaThreads + threadIdx.x;
}

/// The sum over the threads of the CTA up to this one, and over all of them.
struct CtaSum {
  int64_t inclusive, total;
};
static __device__ __noinline__ CtaSum cta_prefix_sum(int64_t value) {
  __shared__ int64_t sums_of_warps[kCtaWarps];
  int64_t sum = value;
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int64_t before = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane_index() >= distance) sum += before;
  }
  __syncthreads();
  if (lane_index() == kWarpSize - 1) sums_of_warps[warp_index()] = sum;
  __syncthreads();
  int64_t total = 0;
  for (int warp = 0; warp < kCtaWarps; ++warp) {
    if (warp == warp_index()) sum += total;
    total += sums_of_warps[warp];
  }
  return {sum, total};
}

}  // namespace specdec_ops::cuda

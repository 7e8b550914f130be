#pragma once

#include <cstdint>

/// What the lanes of a warp do together.
namespace specdec_ops::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFF;

__device__ __forceinline__ int lane_index() { return static_cast<int>(threadIdx.x) % kWarpSize; }
__device__ __forceinline__ int num_threads() { return static_cast<int>(blockDim.x); }
__device__ __forceinline__ int num_warps() { return num_threads() / kWarpSize; }
__device__ __forceinline__ int warp_index() { return static_cast<int>(threadIdx.x) / kWarpSize; }

/// The largest value of the warp that is not NaN.
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance >= 1; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

__device__ __forceinline__ int warp_min(int value) {
#if __CUDA_ARCH__ >= 800
  return __reduce_min_sync(kAllLanes, value);
#else
#pragma unroll
  for (int distance = kWarpSize / 2; distance >= 1; distance /= 2) {
    value = min(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
#endif
}

__device__ __forceinline__ int64_t warp_sum(int64_t value) {
  for (int distance = kWarpSize / 2; distance >= 1; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

/// The index of the first lane where the condition holds; -1 where there is none.
__device__ __forceinline__ int first_lane(bool condition) {
  return __ffs(static_cast<int>(__ballot_sync(kAllLanes, condition))) - 1;
}
__device__ __forceinline__ int last_lane(bool condition) {
  return kWarpSize - 1 - __clz(static_cast<int>(__ballot_sync(kAllLanes, condition)));
}

}  // namespace specdec_ops::cuda

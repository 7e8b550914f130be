#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

/// Instructions that C++ has no names for. tests/gpu_emulation has functions of the same names for a CPU.
namespace specdec_ops::cuda {

/// The shared memory that the launch asked for.
__device__ __forceinline__ uint4* dynamic_shared() {
  extern __shared__ uint4 shared[];
  return shared;
}

/// Float32 operations of the weights: denormals count as 0, in and out.
__device__ __forceinline__ float add_ftz(float a, float b) {
  float result;
  asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float sub_ftz(float a, float b) {
  float result;
  asm("sub.rn.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float mul_ftz(float a, float b) {
  float result;
  asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float fma_ftz(float a, float b, float c) {
  float result;
  asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
}
/// NaN where b is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float result;
  asm("max.ftz.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#else
  return a > b ? a : b;
#endif
}

/// 2^y by the special function unit: relative error 2^-22, and what y was rounded by.
__device__ __forceinline__ float quick_exp2(float y) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(y));
  return result;
}

/// 16 bytes to shared memory, which are there after wait_for_copies.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(global);
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(uint32_t* address, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
/// Lighter than __threadfence before and after: what the CTA wrote before it synchronized is released, and
/// what others released is acquired.
__device__ __forceinline__ uint32_t add_acq_rel(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

/// Lets the next launch begin where there is room; it waits for this one's results.
__device__ __forceinline__ void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
/// Waits until the launch before this one is done and what it wrote visible.
__device__ __forceinline__ void wait_for_previous_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace specdec_ops::cuda

#pragma once

#include <cuda_runtime_api.h>

/// In place of csrc/cuda/instructions.cuh, which lies behind this folder on the include path.
namespace specdec_ops::cuda {

inline uint4* dynamic_shared() { return static_cast<uint4*>(emulation::dynamic_shared()); }

inline float without_denormals(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

inline float add_ftz(float a, float b) {
  return without_denormals(without_denormals(a) + without_denormals(b));
}
inline float sub_ftz(float a, float b) {
  return without_denormals(without_denormals(a) - without_denormals(b));
}
inline float mul_ftz(float a, float b) {
  return without_denormals(without_denormals(a) * without_denormals(b));
}
inline float fma_ftz(float a, float b, float c) {
  return without_denormals(__builtin_fmaf(without_denormals(a), without_denormals(b), without_denormals(c)));
}
inline float max_or_nan(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return NAN;
  return std::fmax(without_denormals(a), without_denormals(b));
}

inline float quick_exp2(float y) {
  y = without_denormals(y);
  if (y == 0.0f) return 1.0f;
  // A rounding to float32 comes on top.
  return without_denormals(emulated_error(std::exp2(static_cast<double>(y)), y, 0x1p-22 - 0x1p-24));
}

inline void copy_async(void* shared, const void* global) { emulation::copy_later(shared, global); }
inline void wait_for_copies() { emulation::finish_copies(); }

inline uint32_t load_acquire(const uint32_t* address) {
  emulation::pass();
  return *address;
}
inline void store_release(uint32_t* address, uint32_t value) {
  emulation::pass();
  *address = value;
}
inline uint32_t add_acq_rel(uint32_t* address, uint32_t value) { return atomicAdd(address, value); }

inline void allow_next_launch() {}
inline void wait_for_previous_launch() { emulation::wait_for_previous_grids(); }

}  // namespace specdec_ops::cuda

#pragma once

// Functions of csrc/common are inlined into every caller, so that each instruction-set tier and
// the device compile them for itself, and no baseline copy of them can be shared by the linker.
#if defined(__CUDACC__)
#define SPECDEC_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SPECDEC_HOST_DEVICE __attribute__((always_inline)) inline
#endif

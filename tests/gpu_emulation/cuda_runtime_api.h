#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>

#include "machine.h"

/// What the CUDA kernels use of CUDA, for an emulated device.

// In functions that are no templates alone: there GCC ignores the section.
#define __shared__ static __attribute__((section("emulated_shared")))
#define __device__
#define __host__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

#define EMULATED_SITE const char *function = __builtin_FUNCTION(), int line = __builtin_LINE()

// ---- Host ----

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchOutOfResources = 701,
};
using cudaStream_t = void*;

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
};
/// Device 0 starts launches early, device 1 does not and is so small that units get large.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = device == 0 ? 3 : 1;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = device == 0 ? 9 : 8;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = 227 * 1024;
      break;
  }
  return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

struct dim3 {
  unsigned x = 1, y = 1, z = 1;

  dim3() = default;
  dim3(unsigned size) : x(size) {}
};
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  const bool is_early =
      config->numAttrs > 0 && config->attrs[0].val.programmaticStreamSerializationAllowed != 0;
  emulation::launch({[=] { kernel(arguments...); }, config->gridDim.x, static_cast<int>(config->blockDim.x),
                     config->dynamicSmemBytes, is_early});
  return cudaSuccess;
}

// ---- Device: types and numbers ----

struct Index {
  unsigned x = 0;
};
extern Index threadIdx, blockIdx, blockDim;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

using std::isnan;
using std::max;
using std::min;

template <class To, class From>
To emulated_bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(unsigned bits) { return emulated_bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return emulated_bit_cast<unsigned>(value); }
inline double __hiloint2double(int high, int low) {
  return emulated_bit_cast<double>(uint64_t{static_cast<unsigned>(high)} << 32 | static_cast<unsigned>(low));
}
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }

/// A value that is off by up to this much, relative to its own size: by its bits, so always in the same way.
inline float emulated_error(double value, float argument, double error) {
  uint32_t hash = __float_as_uint(argument) * 0x9E3779B9u;
  hash = (hash ^ hash >> 15) * 0x85EBCA6Bu;
  const double part = static_cast<double>(hash ^ hash >> 13) * 0x1p-31 - 1.0;
  return static_cast<float>(value * (1.0 + part * error));
}
inline float __fdividef(float a, float b) {
  if (std::fabs(b) > 0x1p126f && !std::isinf(b)) return std::isinf(a) ? NAN : 0.0f;
  return emulated_error(static_cast<double>(a) / static_cast<double>(b), a, 0x1p-23);
}

// ---- Device: memory ----

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
inline size_t __cvta_generic_to_shared(const void* address) { return reinterpret_cast<size_t>(address); }
inline void* __cvta_shared_to_generic(size_t address) { return reinterpret_cast<void*>(address); }

inline uint32_t atomicAdd(uint32_t* address, uint32_t value) {
  emulation::pass();
  const uint32_t before = *address;
  *address += value;
  return before;
}
inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  emulation::pass();
  const unsigned long long before = *address;
  *address += value;
  return before;
}
inline uint32_t atomicOr(uint32_t* address, uint32_t value) {
  emulation::pass();
  const uint32_t before = *address;
  *address |= value;
  return before;
}
inline int32_t atomicExch(int32_t* address, int32_t value) {
  emulation::pass();
  const int32_t before = *address;
  *address = value;
  return before;
}
inline unsigned long long atomicCAS(unsigned long long* address, unsigned long long expected,
                                    unsigned long long value) {
  emulation::pass();
  const unsigned long long before = *address;
  if (before == expected) *address = value;
  return before;
}
inline void __nanosleep(unsigned) { emulation::pass(); }

// ---- Device: collectives ----

inline void __syncwarp(unsigned mask = ~0u, EMULATED_SITE) {
  emulation::meet_warp(mask, 0, {function, line});
}
inline void __syncthreads(EMULATED_SITE) { emulation::meet_cta(false, {function, line}); }
inline int __syncthreads_or(int condition, EMULATED_SITE) {
  return emulation::meet_cta(condition != 0, {function, line}) > 0;
}
inline int __syncthreads_count(int condition, EMULATED_SITE) {
  return emulation::meet_cta(condition != 0, {function, line});
}

inline unsigned __ballot_sync(unsigned mask, bool condition, EMULATED_SITE) {
  const emulation::Lanes& lanes = emulation::meet_warp(mask, condition, {function, line});
  unsigned result = 0;
  for (int lane = 0; lane < emulation::kLanes; ++lane) {
    if (lanes.present >> lane & 1 && lanes.values[lane] != 0) result |= 1u << lane;
  }
  return result;
}
inline int __any_sync(unsigned mask, bool condition, EMULATED_SITE) {
  return __ballot_sync(mask, condition, function, line) != 0;
}

/// The value of another lane, which must be there.
template <class T>
T emulated_shuffle(unsigned mask, T value, int source, emulation::Site site) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  const emulation::Lanes& lanes = emulation::meet_warp(mask, bits, site);
  if ((lanes.present >> source & 1) == 0)
    emulation::fail("a shuffle reads from a lane that is not there", site);
  memcpy(&value, &lanes.values[source], sizeof value);
  return value;
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, EMULATED_SITE) {
  return emulated_shuffle(mask, value, source & 31, {function, line});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance, EMULATED_SITE) {
  return emulated_shuffle(mask, value, emulation::lane_index() ^ distance, {function, line});
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int distance, int width = 32, EMULATED_SITE) {
  const int lane = emulation::lane_index();
  return emulated_shuffle(mask, value, lane % width >= distance ? lane - distance : lane, {function, line});
}

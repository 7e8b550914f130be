#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#include <cstdint>

namespace specdec_ops::cpu {

#if defined(__x86_64__)
using FloatControl = uint32_t;
constexpr FloatControl kDenormalsOn = 0x1F80, kDenormalsOff = 0x9FC0;
__attribute__((always_inline)) inline FloatControl float_control() { return _mm_getcsr(); }
__attribute__((always_inline)) inline void set_float_control(FloatControl control) { _mm_setcsr(control); }
#elif defined(__aarch64__)
using FloatControl = uint64_t;
constexpr FloatControl kDenormalsOn = 0, kDenormalsOff = uint64_t{1} << 24;
__attribute__((always_inline)) inline FloatControl float_control() {
  FloatControl control;
  __asm__ volatile("mrs %0, fpcr" : "=r"(control));
  return control;
}
__attribute__((always_inline)) inline void set_float_control(FloatControl control) {
  __asm__ volatile("msr fpcr, %0" : : "r"(control));
}
#else
// Elsewhere the environment stays as it is: weights below 2^-126 may then be denormals instead of 0.
using FloatControl = uint32_t;
constexpr FloatControl kDenormalsOn = 0, kDenormalsOff = 1;
inline FloatControl float_control() { return 0; }
inline void set_float_control(FloatControl) {}
#endif

/// Rounding to nearest and a known treatment of denormals, whatever the caller's thread has set:
/// results depend on it. What is computed inside must be read from and written to memory inside.
template <FloatControl kControl>
class FloatEnvironment {
 public:
  __attribute__((always_inline)) FloatEnvironment() : saved_(float_control()) {
    set_float_control(kControl);
    __asm__ volatile("" ::: "memory");
  }
  __attribute__((always_inline)) ~FloatEnvironment() {
    __asm__ volatile("" ::: "memory");
    set_float_control(saved_);
  }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  FloatControl saved_;
};

using DenormalsOn = FloatEnvironment<kDenormalsOn>;
/// Float32 denormals count as 0, in and out, as in flush-to-zero mode on a GPU.
using DenormalsOff = FloatEnvironment<kDenormalsOff>;

}  // namespace specdec_ops::cpu

// Compiles the file named by SPECDEC_KERNEL once per instruction-set tier, in namespaces scalar,
// avx2 and avx512. Target regions instead of -m flags: what a tier's file includes is compiled
// before the regions, so no baseline function can end up with a tier's instructions or the other
// way round. Inside a region: no includes, no std:: containers, no namespace-scope objects.

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace specdec_ops::cpu::scalar {
namespace {
#include "cpu/kernels/simd/scalar.h"
}
#include SPECDEC_KERNEL
}  // namespace specdec_ops::cpu::scalar

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#endif
namespace specdec_ops::cpu::avx2 {
namespace {
#include "cpu/kernels/simd/avx2.h"
}
#include SPECDEC_KERNEL
}  // namespace specdec_ops::cpu::avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(                                                             \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2"))), \
    apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi,bmi2")
#endif
namespace specdec_ops::cpu::avx512 {
namespace {
#include "cpu/kernels/simd/avx512.h"
}
#include SPECDEC_KERNEL
}  // namespace specdec_ops::cpu::avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

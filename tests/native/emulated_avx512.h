#pragma once

// The AVX-512 tier's own source, compiled against plain-loop stand-ins for the intrinsics that it
// uses. Where the machine has no AVX-512, this still runs every line of the tier; only the
// instructions themselves are left to machines that have them.

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "cpu/kernels/chain_run.h"
#include "cpu/kernels/float_environment.h"

namespace specdec_ops::cpu::emulated {
namespace intrinsics {

struct M512 {
  float lanes[16];
};
struct M512i {
  uint32_t lanes[16];
};
struct M512d {
  double lanes[8];
};
struct M256 {
  float lanes[8];
};
struct M256i {
  uint16_t halves[16];
};

template <class Function>
M512 map(const Function& function) {
  M512 r;
  for (int i = 0; i < 16; ++i) r.lanes[i] = function(i);
  return r;
}
template <class Function>
M512i map_bits(const Function& function) {
  M512i r;
  for (int i = 0; i < 16; ++i) r.lanes[i] = function(i);
  return r;
}

inline M512 set1_ps(float x) {
  return map([&](int) { return x; });
}
inline M512 loadu_ps(const float* p) {
  return map([&](int i) { return p[i]; });
}
inline void storeu_ps(float* p, M512 a) { memcpy(p, a.lanes, sizeof a.lanes); }
inline M256i loadu_si256(const M256i* p) {
  M256i r;
  memcpy(&r, p, sizeof r);
  return r;
}
inline M512 add_ps(M512 a, M512 b) {
  return map([&](int i) { return a.lanes[i] + b.lanes[i]; });
}
inline M512 sub_ps(M512 a, M512 b) {
  return map([&](int i) { return a.lanes[i] - b.lanes[i]; });
}
inline M512 mul_ps(M512 a, M512 b) {
  return map([&](int i) { return a.lanes[i] * b.lanes[i]; });
}
inline M512 fmadd_ps(M512 a, M512 b, M512 c) {
  return map([&](int i) { return std::fmaf(a.lanes[i], b.lanes[i], c.lanes[i]); });
}
inline M512 max_ps(M512 a, M512 b) {
  return map([&](int i) { return a.lanes[i] > b.lanes[i] ? a.lanes[i] : b.lanes[i]; });
}
inline M512i castps_si512(M512 a) {
  M512i r;
  memcpy(&r, &a, sizeof r);
  return r;
}
inline M512 castsi512_ps(M512i a) {
  M512 r;
  memcpy(&r, &a, sizeof r);
  return r;
}
inline M512i loadu_si512(const void* p) {
  M512i r;
  memcpy(&r, p, sizeof r);
  return r;
}
inline M512i set1_epi32(int x) {
  return map_bits([&](int) { return static_cast<uint32_t>(x); });
}
template <class... Ints>
M512i setr_epi32(Ints... x) {
  return {{static_cast<uint32_t>(x)...}};
}
inline M512i add_epi32(M512i a, M512i b) {
  return map_bits([&](int i) { return a.lanes[i] + b.lanes[i]; });
}
inline M512i and_si512(M512i a, M512i b) {
  return map_bits([&](int i) { return a.lanes[i] & b.lanes[i]; });
}
inline M512 permutex2var_ps(M512 a, M512i index, M512 b) {
  return map([&](int i) { return (index.lanes[i] & 16 ? b : a).lanes[index.lanes[i] & 15]; });
}
inline M512i slli_epi32(M512i a, int count) {
  return map_bits([&](int i) { return a.lanes[i] << count; });
}
inline M512i cvtepu16_epi32(M256i a) {
  return map_bits([&](int i) { return uint32_t{a.halves[i]}; });
}
inline M512 cvtph_ps(M256i a) {
  return map([&](int i) { return to_float(Float16{a.halves[i]}); });
}
inline uint16_t cmp_ps_mask(M512 a, M512 b, int predicate) {
  uint16_t mask = 0;
  for (int i = 0; i < 16; ++i) {
    const bool unordered = a.lanes[i] != a.lanes[i] || b.lanes[i] != b.lanes[i];
    const bool holds = predicate == _CMP_UNORD_Q ? unordered
                       : predicate == _CMP_GE_OQ ? a.lanes[i] >= b.lanes[i]
                       : predicate == _CMP_LT_OQ ? a.lanes[i] < b.lanes[i]
                                                 : a.lanes[i] == b.lanes[i];
    if (holds) mask |= uint16_t(1u << i);
  }
  return mask;
}
inline M512 mask_blend_ps(uint16_t mask, M512 a, M512 b) {
  return map([&](int i) { return (mask >> i & 1 ? b : a).lanes[i]; });
}
template <class Function>
M512d map_doubles(const Function& function) {
  M512d r;
  for (int i = 0; i < 8; ++i) r.lanes[i] = function(i);
  return r;
}
inline M512d set1_pd(double x) {
  return map_doubles([&](int) { return x; });
}
inline M512d fmadd_pd(M512d a, M512d b, M512d c) {
  return map_doubles([&](int i) { return std::fma(a.lanes[i], b.lanes[i], c.lanes[i]); });
}
inline M512d cvtps_pd(M256 a) {
  return map_doubles([&](int i) { return double{a.lanes[i]}; });
}
inline M512i castpd_si512(M512d a) {
  M512i r;
  memcpy(&r, &a, sizeof r);
  return r;
}
inline M256 castps512_ps256(M512 a) {
  M256 r;
  memcpy(&r, a.lanes, sizeof r);
  return r;
}
inline M256 extractf32x8_ps(M512 a, int half) {
  M256 r;
  memcpy(&r, a.lanes + 8 * half, sizeof r);
  return r;
}
inline M512i add_epi64(M512i a, M512i b) {
  uint64_t left[8], right[8];
  memcpy(left, &a, sizeof left);
  memcpy(right, &b, sizeof right);
  for (int i = 0; i < 8; ++i) left[i] += right[i];
  M512i r;
  memcpy(&r, left, sizeof r);
  return r;
}
inline void storeu_si512(void* p, M512i a) { memcpy(p, a.lanes, sizeof a.lanes); }

}  // namespace intrinsics

#define __m512 intrinsics::M512
#define __m512i intrinsics::M512i
#define __m512d intrinsics::M512d
#define __m256 intrinsics::M256
#define __m256i intrinsics::M256i
#define __mmask16 uint16_t
#define _mm512_set1_ps intrinsics::set1_ps
#define _mm512_loadu_ps intrinsics::loadu_ps
#define _mm512_storeu_ps intrinsics::storeu_ps
#define _mm256_loadu_si256 intrinsics::loadu_si256
#define _mm512_add_ps intrinsics::add_ps
#define _mm512_sub_ps intrinsics::sub_ps
#define _mm512_mul_ps intrinsics::mul_ps
#define _mm512_fmadd_ps intrinsics::fmadd_ps
#define _mm512_max_ps intrinsics::max_ps
#define _mm512_castps_si512 intrinsics::castps_si512
#define _mm512_castsi512_ps intrinsics::castsi512_ps
#define _mm512_loadu_si512 intrinsics::loadu_si512
#define _mm512_set1_epi32 intrinsics::set1_epi32
#undef _mm512_setr_epi32  // a macro where it is real
#define _mm512_setr_epi32 intrinsics::setr_epi32
#define _mm512_add_epi32 intrinsics::add_epi32
#define _mm512_and_si512 intrinsics::and_si512
#define _mm512_permutex2var_ps intrinsics::permutex2var_ps
#define _mm512_slli_epi32 intrinsics::slli_epi32
#define _mm512_cvtepu16_epi32 intrinsics::cvtepu16_epi32
#define _mm512_cvtph_ps intrinsics::cvtph_ps
#define _mm512_cmp_ps_mask intrinsics::cmp_ps_mask
#define _mm512_mask_blend_ps intrinsics::mask_blend_ps
#define _mm512_set1_pd intrinsics::set1_pd
#define _mm512_fmadd_pd intrinsics::fmadd_pd
#define _mm512_cvtps_pd intrinsics::cvtps_pd
#define _mm512_castpd_si512 intrinsics::castpd_si512
#define _mm512_castps512_ps256 intrinsics::castps512_ps256
#undef _mm512_extractf32x8_ps  // a macro where it is real and nothing is optimised
#define _mm512_extractf32x8_ps intrinsics::extractf32x8_ps
#define _mm512_add_epi64 intrinsics::add_epi64
#define _mm512_storeu_si512 intrinsics::storeu_si512

namespace {
#include "cpu/kernels/simd/avx512.h"
}
#include SPECDEC_EMULATED_KERNEL

#undef __m512
#undef __m512i
#undef __m512d
#undef __m256
#undef __m256i
#undef __mmask16
#undef _mm512_set1_ps
#undef _mm512_loadu_ps
#undef _mm512_storeu_ps
#undef _mm256_loadu_si256
#undef _mm512_add_ps
#undef _mm512_sub_ps
#undef _mm512_mul_ps
#undef _mm512_fmadd_ps
#undef _mm512_max_ps
#undef _mm512_castps_si512
#undef _mm512_castsi512_ps
#undef _mm512_loadu_si512
#undef _mm512_set1_epi32
#undef _mm512_setr_epi32
#undef _mm512_add_epi32
#undef _mm512_and_si512
#undef _mm512_permutex2var_ps
#undef _mm512_slli_epi32
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtph_ps
#undef _mm512_cmp_ps_mask
#undef _mm512_mask_blend_ps
#undef _mm512_set1_pd
#undef _mm512_fmadd_pd
#undef _mm512_cvtps_pd
#undef _mm512_castpd_si512
#undef _mm512_castps512_ps256
#undef _mm512_extractf32x8_ps
#undef _mm512_add_epi64
#undef _mm512_storeu_si512

}  // namespace specdec_ops::cpu::emulated

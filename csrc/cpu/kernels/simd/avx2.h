// Eight float32 lanes. Included inside the AVX2 target region by foreach_isa.h.

struct F32 {
  static constexpr int kLanes = 8;
  __m256 value;
};

inline F32 set1(float value) { return {_mm256_set1_ps(value)}; }
inline F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline F32 load(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
inline F32 load(const Float16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline void load_pair(const BFloat16* p, F32* first, F32* second) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  *first = {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))};
  *second = {_mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xFFFF0000))))};
}
inline void interleave(F32* even, F32* odd) {
  const __m256 low = _mm256_unpacklo_ps(even->value, odd->value);
  const __m256 high = _mm256_unpackhi_ps(even->value, odd->value);
  even->value = _mm256_permute2f128_ps(low, high, 0x20);
  odd->value = _mm256_permute2f128_ps(low, high, 0x31);
}
inline void store(float* p, F32 a) { _mm256_storeu_ps(p, a.value); }
inline F32 add(F32 a, F32 b) { return {_mm256_add_ps(a.value, b.value)}; }
inline F32 sub(F32 a, F32 b) { return {_mm256_sub_ps(a.value, b.value)}; }
inline F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.value, b.value)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.value, b.value, c.value)}; }
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.value, b.value)}; }
inline F32 shift_left_23(F32 a) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a.value), 23))};
}

struct NanFlag {
  __m256 lanes;
};
inline NanFlag no_nan() { return {_mm256_setzero_ps()}; }
inline void note_nan(NanFlag& flag, F32 a) {
  flag.lanes = _mm256_or_ps(flag.lanes, _mm256_cmp_ps(a.value, a.value, _CMP_UNORD_Q));
}
inline bool seen(const NanFlag& flag) { return _mm256_movemask_ps(flag.lanes) != 0; }
inline uint32_t equal_mask(F32 a, F32 b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.value, b.value, _CMP_EQ_OQ)));
}
inline uint32_t at_least_mask(F32 a, F32 b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.value, b.value, _CMP_GE_OQ)));
}
inline F32 mask_below(F32 a, F32 floor) {
  const __m256 below = _mm256_cmp_ps(a.value, floor.value, _CMP_LT_OQ);
  return {_mm256_blendv_ps(a.value, _mm256_set1_ps(-__builtin_inff()), below)};
}

struct MassSum {
  __m256i low, high;
};
inline MassSum no_mass() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline __m256i biased_mass(__m128 weight) {
  return _mm256_castpd_si256(
      _mm256_fmadd_pd(_mm256_cvtps_pd(weight), _mm256_set1_pd(kMassUnits), _mm256_set1_pd(kMassMagic)));
}
inline void add_mass(MassSum& sum, F32 weight) {
  sum.low = _mm256_add_epi64(sum.low, biased_mass(_mm256_castps256_ps128(weight.value)));
  sum.high = _mm256_add_epi64(sum.high, biased_mass(_mm256_extractf128_ps(weight.value, 1)));
}
inline uint64_t total(const MassSum& sum) {
  uint64_t lanes[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi64(sum.low, sum.high));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

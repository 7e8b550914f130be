// Sixteen float32 lanes. Included inside the AVX-512 target region by foreach_isa.h.

struct F32 {
  static constexpr int kLanes = 16;
  __m512 value;
};

inline F32 set1(float value) { return {_mm512_set1_ps(value)}; }
inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F32 load(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline F32 load(const Float16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void load_pair(const BFloat16* p, F32* first, F32* second) {
  const __m512i bits = _mm512_loadu_si512(p);
  *first = {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))};
  *second = {_mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))))};
}
inline void interleave(F32* even, F32* odd) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const __m512 first = _mm512_permutex2var_ps(even->value, low, odd->value);
  odd->value = _mm512_permutex2var_ps(even->value, high, odd->value);
  even->value = first;
}
inline void store(float* p, F32 a) { _mm512_storeu_ps(p, a.value); }
inline F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.value, b.value)}; }
inline F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.value, b.value)}; }
inline F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.value, b.value)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.value, b.value, c.value)}; }
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.value, b.value)}; }
inline F32 shift_left_23(F32 a) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.value), 23))};
}

struct NanFlag {
  __mmask16 lanes;
};
inline NanFlag no_nan() { return {0}; }
inline void note_nan(NanFlag& flag, F32 a) {
  flag.lanes |= _mm512_cmp_ps_mask(a.value, a.value, _CMP_UNORD_Q);
}
inline bool seen(const NanFlag& flag) { return flag.lanes != 0; }
inline uint32_t equal_mask(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.value, b.value, _CMP_EQ_OQ); }
inline uint32_t at_least_mask(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.value, b.value, _CMP_GE_OQ); }
inline F32 mask_below(F32 a, F32 floor) {
  const __mmask16 below = _mm512_cmp_ps_mask(a.value, floor.value, _CMP_LT_OQ);
  return {_mm512_mask_blend_ps(below, a.value, _mm512_set1_ps(-__builtin_inff()))};
}

struct MassSum {
  __m512i low, high;
};
inline MassSum no_mass() { return {_mm512_set1_epi32(0), _mm512_set1_epi32(0)}; }
inline __m512i biased_mass(__m256 weight) {
  return _mm512_castpd_si512(
      _mm512_fmadd_pd(_mm512_cvtps_pd(weight), _mm512_set1_pd(kMassUnits), _mm512_set1_pd(kMassMagic)));
}
inline void add_mass(MassSum& sum, F32 weight) {
  sum.low = _mm512_add_epi64(sum.low, biased_mass(_mm512_castps512_ps256(weight.value)));
  sum.high = _mm512_add_epi64(sum.high, biased_mass(_mm512_extractf32x8_ps(weight.value, 1)));
}
inline uint64_t total(const MassSum& sum) {
  uint64_t lanes[8];
  _mm512_storeu_si512(lanes, _mm512_add_epi64(sum.low, sum.high));
  uint64_t all = 0;
  for (uint64_t lane : lanes) all += lane;
  return all;
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

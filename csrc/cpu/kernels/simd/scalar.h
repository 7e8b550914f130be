// The vector vocabulary without vectors: one lane, the same IEEE operations as the wider tiers.
// Included inside a tier's namespace by foreach_isa.h, hence no include guard and no includes.

struct F32 {
  static constexpr int kLanes = 1;
  float value;
};

inline F32 set1(float value) { return {value}; }
inline F32 load(const float* p) { return {*p}; }
inline F32 load(const BFloat16* p) { return {to_float(*p)}; }
inline F32 load(const Float16* p) { return {to_float(*p)}; }
/// Two vectors of bfloat16, whose lanes may come in another order; interleave() puts it right.
inline void load_pair(const BFloat16* p, F32* first, F32* second) {
  *first = load(p);
  *second = load(p + 1);
}
inline void interleave(F32*, F32*) {}
inline void store(float* p, F32 a) { *p = a.value; }
inline F32 add(F32 a, F32 b) { return {a.value + b.value}; }
inline F32 sub(F32 a, F32 b) { return {a.value - b.value}; }
inline F32 mul(F32 a, F32 b) { return {a.value * b.value}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {fma32(a.value, b.value, c.value)}; }
/// a where a > b, else b: so b where either is NaN.
inline F32 max(F32 a, F32 b) { return a.value > b.value ? a : b; }
/// Bits moved from the low mantissa into the exponent field.
inline F32 shift_left_23(F32 a) {
  uint32_t bits;
  memcpy(&bits, &a.value, sizeof bits);
  return {float_of(bits << 23)};
}

struct NanFlag {
  bool seen;
};
inline NanFlag no_nan() { return {false}; }
inline void note_nan(NanFlag& flag, F32 a) { flag.seen |= a.value != a.value; }
inline bool seen(const NanFlag& flag) { return flag.seen; }
/// One bit a lane.
inline uint32_t equal_mask(F32 a, F32 b) { return a.value == b.value; }
inline uint32_t at_least_mask(F32 a, F32 b) { return a.value >= b.value; }
/// -inf where a < floor, else a.
inline F32 mask_below(F32 a, F32 floor) { return a.value < floor.value ? set1(-__builtin_inff()) : a; }

/// Sums of masses: each adds weight * kMassUnits + kMassMagic in float64, whose bits are added as integers.
struct MassSum {
  uint64_t lanes;
};
inline MassSum no_mass() { return {0}; }
inline void add_mass(MassSum& sum, F32 weight) {
  sum.lanes += bits_of(fma64(static_cast<double>(weight.value), kMassUnits, kMassMagic));
}
inline uint64_t total(const MassSum& sum) { return sum.lanes; }

inline void prefetch(const void* p) { __builtin_prefetch(p); }

// What is done to one block of a row. Included once per tier through foreach_isa.h.
//
// A block is `rows` times kNumLanes elements; a shorter last block is padded with -inf, which
// weighs nothing. Rows that are left out add nothing, so the padding does not show in any bit.

namespace {

/// Vectors that are worked on in step.
constexpr int kInStep = 4;

/// Fetches the cache lines of the next kCount elements.
template <int kCount, class T>
void prefetch_vectors(const T* p) {
  for (int i = 0; i < kCount; i += 64 / static_cast<int>(sizeof(T))) prefetch(p + i);
}

/// 2^((x - max) * scale) as two factors, with 0 for everything below 2^-126. NaN stays NaN.
struct Exp2 {
  F32 reference, scale, floor;

  Exp2(float block_max, float row_scale)
      : reference(set1(block_max)), scale(set1(row_scale)), floor(set1(-127.0f / row_scale)) {}

  /// Several vectors in step: their chains of dependent operations fill each other's gaps.
  template <int kCount>
  void factors(const F32 (&x)[kCount], F32 (&polynomial)[kCount], F32 (&power)[kCount]) const {
    F32 fraction[kCount];
    const F32 magic = set1(kExp2Magic);
    // The floor rounds to n = -127, whose power has the bits of +0. In this order it loses to NaN.
    for (int i = 0; i < kCount; ++i) fraction[i] = max(floor, sub(x[i], reference));
    for (int i = 0; i < kCount; ++i) power[i] = fma(fraction[i], scale, magic);
    for (int i = 0; i < kCount; ++i) fraction[i] = fma(fraction[i], scale, sub(magic, power[i]));
    for (int i = 0; i < kCount; ++i) power[i] = shift_left_23(power[i]);
    for (int i = 0; i < kCount; ++i) {
      polynomial[i] = fma(set1(kExp2Coefficients[4]), fraction[i], set1(kExp2Coefficients[3]));
    }
    for (int c = 2; c >= 0; --c) {
      for (int i = 0; i < kCount; ++i) {
        polynomial[i] = fma(polynomial[i], fraction[i], set1(kExp2Coefficients[c]));
      }
    }
    for (int i = 0; i < kCount; ++i) polynomial[i] = fma(polynomial[i], fraction[i], set1(1.0f));
  }
};

/// The sum over the lanes, by halves; overwrites them.
float tree_sum(float* lanes) {
  int half = kNumLanes / 2;
  for (; half >= F32::kLanes; half /= 2) {
    for (int l = 0; l < half; l += F32::kLanes) store(lanes + l, add(load(lanes + l), load(lanes + l + half)));
  }
  for (; half >= 1; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
  }
  return lanes[0];
}

/// Copies n < kBlockSize elements as float32, padded with -inf to whole rows; returns their number.
template <class T>
int pad_block(const T* x, int n, float* padded) {
  int i = 0;
  for (; i + F32::kLanes <= n; i += F32::kLanes) store(padded + i, load(x + i));
  if (i < n) {
    T tail[F32::kLanes] = {};
    memcpy(tail, x + i, static_cast<size_t>(n - i) * sizeof(T));
    store(padded + i, load(tail));
  }
  const int rows = (n + kNumLanes - 1) / kNumLanes;
  for (i = n; i < rows * kNumLanes; ++i) padded[i] = -__builtin_inff();
  return rows;
}

/// The largest element that is not NaN, -inf if there is none.
template <class T>
float block_max(const T* x, int rows, bool* has_nan) {
  const F32 lowest = set1(-__builtin_inff());
  F32 best[kInStep];
  NanFlag nan[kInStep];
  for (int u = 0; u < kInStep; ++u) {
    best[u] = lowest;
    nan[u] = no_nan();
  }
  for (int i = 0; i < rows * kNumLanes; i += kInStep * F32::kLanes) {
    for (int u = 0; u < kInStep; ++u) {
      const F32 value = load(x + i + u * F32::kLanes);
      best[u] = max(value, best[u]);
      if (has_nan != nullptr) note_nan(nan[u], value);
    }
  }
  for (int u = 1; u < kInStep; ++u) best[0] = max(best[u], best[0]);
  float lanes[F32::kLanes];
  store(lanes, best[0]);
  float result = lanes[0];
  for (int l = 1; l < F32::kLanes; ++l) result = lanes[l] > result ? lanes[l] : result;
  if (has_nan != nullptr) {
    *has_nan = false;
    for (int u = 0; u < kInStep; ++u) *has_nan |= seen(nan[u]);
  }
  return result;
}

template <class T>
BlockStats block_argmax(const T* x, int rows) {
  bool has_nan;
  const float best = block_max(x, rows, &has_nan);
  return {best, has_nan || best == __builtin_inff() ? __builtin_nanf("") : 0.0f};
}

/// Maximum and sum of weights. While it sums, it prefetches `next`, the block that comes after.
template <class T>
BlockStats block_stats(const T* x, int rows, float scale, const T* next) {
  const float best = block_max(x, rows, nullptr);
  if (!(best > -__builtin_inff()) || best == __builtin_inff()) return block_argmax(x, rows);
  // A few columns of vectors at a time: down the rows of the block, then on to the next.
  const Exp2 exp2(best, scale);
  alignas(64) float lanes[kNumLanes];
  for (int lane = 0; lane < kNumLanes; lane += kInStep * F32::kLanes) {
    F32 sums[kInStep];
    for (int u = 0; u < kInStep; ++u) sums[u] = set1(0.0f);
    for (int row = 0; row < rows; ++row) {
      const int first = row * kNumLanes + lane;
      F32 values[kInStep], polynomial[kInStep], power[kInStep];
      for (int u = 0; u < kInStep; ++u) values[u] = load(x + first + u * F32::kLanes);
      if (next != nullptr) prefetch_vectors<kInStep * F32::kLanes>(next + first);
      exp2.factors(values, polynomial, power);
      for (int u = 0; u < kInStep; ++u) sums[u] = fma(polynomial[u], power[u], sums[u]);
    }
    for (int u = 0; u < kInStep; ++u) store(lanes + lane + u * F32::kLanes, sums[u]);
  }
  return {best, tree_sum(lanes)};
}

/// Writes weight * factor of every element of the block.
template <class T>
void block_weights(const T* x, int rows, float reference, float scale, float factor, float* weights) {
  const Exp2 exp2(reference, scale);
  const F32 factors = set1(factor);
  for (int i = 0; i < rows * kNumLanes; i += kInStep * F32::kLanes) {
    F32 values[kInStep], polynomial[kInStep], power[kInStep];
    for (int u = 0; u < kInStep; ++u) values[u] = load(x + i + u * F32::kLanes);
    exp2.factors(values, polynomial, power);
    for (int u = 0; u < kInStep; ++u) {
      store(weights + i + u * F32::kLanes, mul(mul(polynomial[u], power[u]), factors));
    }
  }
}

/// Writes max(x, 0) of every element: probabilities that came as they are. NaN stays NaN.
template <class T>
void block_probs(const T* x, int rows, float* probs) {
  const F32 zero = set1(0.0f);
  for (int i = 0; i < rows * kNumLanes; i += F32::kLanes) store(probs + i, max(zero, load(x + i)));
}

/// weights = max(weights - minus, 0); returns their sum, NaN if there was one.
float subtract_and_sum(float* weights, const float* minus, int rows) {
  const F32 zero = set1(0.0f);
  alignas(64) float lanes[kNumLanes];
  for (int lane = 0; lane < kNumLanes; lane += F32::kLanes) {
    F32 sum = zero;
    for (int row = 0; row < rows; ++row) {
      const int i = row * kNumLanes + lane;
      const F32 rest = max(zero, sub(load(weights + i), load(minus + i)));
      store(weights + i, rest);
      sum = add(sum, rest);
    }
    store(lanes + lane, sum);
  }
  return tree_sum(lanes);
}

/// The first element that equals value, or rows * kNumLanes.
template <class T>
int first_equal(const T* x, int rows, float value) {
  const F32 wanted = set1(value);
  for (int i = 0; i < rows * kNumLanes; i += F32::kLanes) {
    const uint32_t mask = equal_mask(load(x + i), wanted);
    if (mask != 0) return i + __builtin_ctz(mask);
  }
  return rows * kNumLanes;
}

/// Sum of a chunk in token order.
double chunk_sum(const float* weights) {
  double sum = 0.0;
  for (int i = 0; i < kChunkSize; ++i) sum = sum + static_cast<double>(weights[i]);
  return sum;
}

/// The first element whose prefix exceeds `draw`; if rounding leaves none, the last with weight.
int pick_in_block(const float* weights, int rows, double draw) {
  const int n = rows * kNumLanes;
  double prefix = 0.0;
  for (int chunk = 0; chunk < n; chunk += kChunkSize) {
    const double sum = chunk_sum(weights + chunk);
    if (prefix + sum > draw) {
      double inside = 0.0;
      for (int i = chunk; i < chunk + kChunkSize; ++i) {
        inside = inside + static_cast<double>(weights[i]);
        if (prefix + inside > draw) return i;
      }
    }
    prefix = prefix + sum;
  }
  int last = n - 1;
  while (last > 0 && !(weights[last] > 0.0f)) --last;
  return last;
}

}  // namespace

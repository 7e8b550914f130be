// What is done to one block of a row. Included once per tier through foreach_isa.h.
//
// A block is `rows` times kNumLanes elements; a shorter last block is padded with -inf, which
// weighs nothing. Rows that are left out add nothing, so the padding does not show in any bit.

namespace {

/// Vectors that are worked on in step: their chains of dependent operations fill each other's gaps.
constexpr int kInStep = 4;
constexpr int kStepSize = kInStep * F32::kLanes;

template <class T>
void load_step(const T* x, F32 (&values)[kInStep]) {
  for (int u = 0; u < kInStep; ++u) values[u] = load(x + u * F32::kLanes);
}
void load_step(const BFloat16* x, F32 (&values)[kInStep]) {
  for (int u = 0; u < kInStep; u += 2) load_pair(x + u * F32::kLanes, &values[u], &values[u + 1]);
}
/// Stores what came of a step of T in the order of its elements; may change it on the way.
template <class T>
void store_step(float* p, F32 (&values)[kInStep]) {
  for (int u = 0; u < kInStep && std::is_same_v<T, BFloat16>; u += 2) interleave(&values[u], &values[u + 1]);
  for (int u = 0; u < kInStep; ++u) store(p + u * F32::kLanes, values[u]);
}

/// Fetches the cache lines of the next step.
template <class T>
void prefetch_step(const T* p) {
  for (int i = 0; i < kStepSize; i += 64 / static_cast<int>(sizeof(T))) prefetch(p + i);
}

/// 2^((x - max) * scale) as two factors; 0 for everything below 2^-126. NaN stays NaN.
struct Exp2 {
  F32 reference, scale, floor;

  Exp2(float block_max, float row_scale)
      : reference(set1(block_max)), scale(set1(row_scale)), floor(set1(-127.0f / row_scale)) {}

  void factors(const F32 (&x)[kInStep], F32 (&polynomial)[kInStep], F32 (&power)[kInStep]) const {
    F32 fraction[kInStep];
    const F32 magic = set1(kExp2Magic);
    // The floor rounds to n = -127, whose power has the bits of +0. In this order it loses to NaN.
    for (int u = 0; u < kInStep; ++u) fraction[u] = max(floor, sub(x[u], reference));
    for (int u = 0; u < kInStep; ++u) power[u] = fma(fraction[u], scale, magic);
    for (int u = 0; u < kInStep; ++u) fraction[u] = fma(fraction[u], scale, sub(magic, power[u]));
    for (int u = 0; u < kInStep; ++u) power[u] = shift_left_23(power[u]);
    for (int u = 0; u < kInStep; ++u) {
      polynomial[u] = fma(set1(exp2_coefficient(4)), fraction[u], set1(exp2_coefficient(3)));
    }
    for (int c = 2; c >= 0; --c) {
      for (int u = 0; u < kInStep; ++u)
        polynomial[u] = fma(polynomial[u], fraction[u], set1(exp2_coefficient(c)));
    }
    for (int u = 0; u < kInStep; ++u) polynomial[u] = fma(polynomial[u], fraction[u], set1(1.0f));
  }
};

/// The sum over the lanes, by halves; overwrites them.
float tree_sum(float* lanes) {
  int half = kNumLanes / 2;
  for (; half >= F32::kLanes; half /= 2) {
    for (int l = 0; l < half; l += F32::kLanes)
      store(lanes + l, add(load(lanes + l), load(lanes + l + half)));
  }
  for (; half >= 1; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] = lanes[l] + lanes[l + half];
  }
  return lanes[0];
}

/// Copies n <= kBlockSize elements as float32, padded to whole rows; returns their number.
template <class T>
int pad_block(const T* x, int n, float* padded, float padding = -__builtin_inff()) {
  int i = 0;
  for (; i + F32::kLanes <= n; i += F32::kLanes) store(padded + i, load(x + i));
  if (i < n) {
    T tail[F32::kLanes] = {};
    memcpy(tail, x + i, static_cast<size_t>(n - i) * sizeof(T));
    store(padded + i, load(tail));
  }
  const int rows = (n + kNumLanes - 1) / kNumLanes;
  for (i = n; i < rows * kNumLanes; ++i) padded[i] = padding;
  return rows;
}

/// Masks what lies below the threshold.
[[maybe_unused]] void mask_block(float* x, int rows, float threshold) {
  const F32 floor = set1(threshold);
  for (int i = 0; i < rows * kNumLanes; i += F32::kLanes) store(x + i, mask_below(load(x + i), floor));
}

float largest_lane(F32 a) {
  float lanes[F32::kLanes];
  store(lanes, a);
  float largest = lanes[0];
  for (int l = 1; l < F32::kLanes; ++l) largest = lanes[l] > largest ? lanes[l] : largest;
  return largest;
}

/// The largest element that is not NaN, -inf if there is none.
template <class T>
float block_max(const T* x, int rows, bool* has_nan) {
  F32 best[kInStep];
  NanFlag nan[kInStep];
  for (int u = 0; u < kInStep; ++u) {
    best[u] = set1(-__builtin_inff());
    nan[u] = no_nan();
  }
  for (int i = 0; i < rows * kNumLanes; i += kStepSize) {
    F32 values[kInStep];
    load_step(x + i, values);
    for (int u = 0; u < kInStep; ++u) {
      best[u] = max(values[u], best[u]);
      if (has_nan != nullptr) note_nan(nan[u], values[u]);
    }
  }
  for (int u = 1; u < kInStep; ++u) best[0] = max(best[u], best[0]);
  const float result = largest_lane(best[0]);
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
  const Exp2 exp2(best, scale);
  alignas(64) float lanes[kNumLanes];
  {
    const DenormalsOff environment;
    // A few columns of vectors at a time: down the rows of the block, then on to the next.
    for (int lane = 0; lane < kNumLanes; lane += kStepSize) {
      F32 sums[kInStep];
      for (int u = 0; u < kInStep; ++u) sums[u] = set1(0.0f);
      for (int i = lane; i < rows * kNumLanes; i += kNumLanes) {
        F32 values[kInStep], polynomial[kInStep], power[kInStep];
        load_step(x + i, values);
        if (next != nullptr) prefetch_step(next + i);
        exp2.factors(values, polynomial, power);
        for (int u = 0; u < kInStep; ++u) sums[u] = fma(polynomial[u], power[u], sums[u]);
      }
      store_step<T>(lanes + lane, sums);
    }
  }
  return {best, tree_sum(lanes)};
}

/// Sources of probabilities of a block, a step at a time in the order of load_step.
template <class T>
struct ProbsOfLogits {
  using Element = T;
  const T* x;
  Exp2 exp2;
  F32 factor;

  ProbsOfLogits(const T* logits, float max, float scale, float factor_of_block)
      : x(logits), exp2(max, scale), factor(set1(factor_of_block)) {}

  void step(int i, F32 (&probs)[kInStep]) const {
    F32 values[kInStep], polynomial[kInStep], power[kInStep];
    load_step(x + i, values);
    exp2.factors(values, polynomial, power);
    for (int u = 0; u < kInStep; ++u) probs[u] = mul(mul(polynomial[u], power[u]), factor);
  }
};

/// Probabilities that came as they are, negative ones as 0; NaN for what is not finite.
template <class T>
struct GivenProbs {
  using Element = T;
  const T* x;

  void step(int i, F32 (&probs)[kInStep]) const {
    load_step(x + i, probs);
    for (int u = 0; u < kInStep; ++u) probs[u] = max(set1(0.0f), add(probs[u], sub(probs[u], probs[u])));
  }
};

/// A fully masked block.
template <class T>
struct NoProbs {
  using Element = T;

  void step(int, F32 (&probs)[kInStep]) const {
    for (int u = 0; u < kInStep; ++u) probs[u] = set1(0.0f);
  }
};

template <class Probs>
void write_probs(const Probs& source, int rows, float* probs) {
  const DenormalsOff environment;
  for (int i = 0; i < rows * kNumLanes; i += kStepSize) {
    F32 values[kInStep];
    source.step(i, values);
    store_step<typename Probs::Element>(probs + i, values);
  }
}

/// The sum of max(p - q, 0), NaN if there is one; written to `residual` too, unless that is null.
template <class Target, class Draft>
float sum_residual(const Target& target, const Draft& draft, int rows, float* residual) {
  using Element = typename Target::Element;
  static_assert(std::is_same_v<Element, typename Draft::Element>, "steps of one order");
  alignas(64) float lanes[kNumLanes];
  {
    const DenormalsOff environment;
    for (int lane = 0; lane < kNumLanes; lane += kStepSize) {
      F32 sums[kInStep];
      for (int u = 0; u < kInStep; ++u) sums[u] = set1(0.0f);
      for (int i = lane; i < rows * kNumLanes; i += kNumLanes) {
        F32 p[kInStep], q[kInStep];
        target.step(i, p);
        draft.step(i, q);
        for (int u = 0; u < kInStep; ++u) p[u] = max(set1(0.0f), sub(p[u], q[u]));
        for (int u = 0; u < kInStep; ++u) sums[u] = add(sums[u], p[u]);
        if (residual != nullptr) store_step<Element>(residual + i, p);
      }
      store_step<Element>(lanes + lane, sums);
    }
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

/// Sums of the chunks of a block, each in token order; returns their sum in order. A row's chunks
/// side by side, since each addition waits for the one before it in its chunk.
double chunk_sums(const float* weights, int rows, double* sums) {
  constexpr int kChunksPerRow = kNumLanes / kChunkSize;
  double total = 0.0;
  for (int row = 0; row < rows; ++row) {
    const float* first = weights + row * kNumLanes;
    double partial[kChunksPerRow] = {};
    for (int i = 0; i < kChunkSize; ++i) {
      for (int c = 0; c < kChunksPerRow; ++c) {
        partial[c] = partial[c] + static_cast<double>(first[c * kChunkSize + i]);
      }
    }
    for (int c = 0; c < kChunksPerRow; ++c) {
      sums[row * kChunksPerRow + c] = partial[c];
      total = total + partial[c];
    }
  }
  return total;
}

/// The element that the numbers of a chunk and of an id choose: of each level the first whose prefix exceeds
/// the number times the sum; if rounding leaves none, the last with weight.
[[maybe_unused]] int pick_in_block(const float* weights, int rows, double chunk_number, double id_number) {
  double sums[kBlockSize / kChunkSize];
  const double draw = chunk_number * chunk_sums(weights, rows, sums);
  double prefix = 0.0, remainder = 1.0;
  int chunk = 0;
  for (int c = 0; c < rows * kNumLanes / kChunkSize; ++c) {
    if (sums[c] > 0.0) chunk = c;
    if (prefix + sums[c] > draw) {
      remainder = (draw - prefix) / sums[c];
      break;
    }
    prefix = prefix + sums[c];
  }
  const double rest = number_or_remainder(id_number, remainder) * sums[chunk];
  double inside = 0.0;
  int last = chunk * kChunkSize;
  for (int i = chunk * kChunkSize; i < (chunk + 1) * kChunkSize; ++i) {
    if (weights[i] > 0.0f) last = i;
    inside = inside + static_cast<double>(weights[i]);
    if (inside > rest) break;
  }
  return last;
}

}  // namespace

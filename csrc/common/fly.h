#pragma once

#include <cstdint>

#include "common/row_law.h"

/// The entropy gate of FLy (Li et al., arXiv 2511.22972): how undecided the target is at a row.
namespace specdec_ops {

/// How many probabilities the entropy may be taken over.
constexpr int kMaxEntropyTopK = 64;

/// The k largest of the logits that were offered, in descending order.
struct LargestLogits {
  float values[kMaxEntropyTopK];
  int capacity;
  int size = 0;

  SPECDEC_HOST_DEVICE explicit LargestLogits(int k) : capacity(k) {}
  /// No logit up to this one changes the list.
  SPECDEC_HOST_DEVICE float floor() const {
    return size < capacity ? -__builtin_inff() : values[capacity - 1];
  }
  SPECDEC_HOST_DEVICE void offer(float logit) {
    if (!(logit > floor())) return;
    int i = size < capacity ? size++ : capacity - 1;
    for (; i > 0 && values[i - 1] < logit; --i) values[i] = values[i - 1];
    values[i] = logit;
  }
};

/// Entropy in nats over these ids alone, whose probabilities are not normalised again. Not below 0, which
/// the rounding of a probability of 1 could give.
SPECDEC_HOST_DEVICE double entropy_of_largest(const RowLaw& law, const LargestLogits& largest) {
  double bits = 0.0;
  for (int i = 0; i < largest.size; ++i) {
    const double log2_prob = law.log2_prob(largest.values[i]);
    bits = fma64(exp2_f64(log2_prob), -log2_prob, bits);
  }
  return bits > 0.0 ? bits * kLn2 : 0.0;
}

}  // namespace specdec_ops

#pragma once

#include "common/philox.h"
#include "common/row_law.h"

/// The law of a few ids that a token is drawn from and that is handed over with it, as float32
/// log-probabilities. Verification makes probabilities of these, so the draw goes by the same ones.
/// docs/numerics.md.
namespace specdec_ops {

constexpr int kLargestLawSize = 64;

/// log2 of what an id weighs relative to the largest logit of the row. Not -0, whichever zero that is.
SPECDEC_HOST_DEVICE double log2_support_weight(float x, float max, float scale) {
  return (static_cast<double>(x) - static_cast<double>(max)) * static_cast<double>(scale) + 0.0;
}

/// The natural logarithm of a probability.
SPECDEC_HOST_DEVICE float support_logprob(double log2_weight, double log2_total) {
  return static_cast<float>((log2_weight - log2_total) * kLn2);
}

/// The probability that a log-probability stands for.
SPECDEC_HOST_DEVICE double support_prob(double logprob) { return exp2_f64(logprob * kLog2E); }

/// The logsumexp of the ids whose weights add up to `total`.
SPECDEC_HOST_DEVICE double support_logsumexp(float max, float scale, double log2_total) {
  return fma64(static_cast<double>(max), static_cast<double>(scale), log2_total) * kLn2;
}

/// The number that chooses among the ids: that of ids, or the one that was given.
SPECDEC_HOST_DEVICE double support_number(const TokenDraw& draw) {
  return number_or_remainder(draw.id, draw.block);
}

}  // namespace specdec_ops

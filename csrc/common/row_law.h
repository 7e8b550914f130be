#pragma once

#include <cstdint>

#include "common/numerics.h"

/// How a row of logits becomes a law. Blocks are cut by global token id, so the law does not depend
/// on threads, launch shapes or shards.
namespace specdec_ops {

constexpr int kBlockSize = 4096;
/// A block is summed in 256 lanes: lane l adds the elements l, l + 256, ... in order; then halves
/// are added, lane l to lane l + 128, + 64, ..., + 1. Sixteen rows of a block fit the registers of
/// an AVX-512 core or of one warp.
constexpr int kNumLanes = 256;
constexpr int kChunkSize = 64;
/// How often a recovered token is sought among draws from the target law before its own law is made.
constexpr int kThinningAttempts = 32;
/// How many numbers of Stream::kBlock a slot has: two for each attempt, and two for the law that is made.
constexpr int kBlockNumbersPerSlot = 128;

/// What one pass over a block leaves behind.
struct BlockStats {
  /// Over everything but NaN; -inf where there is nothing.
  float max;
  /// Of 2^((x - max) * scale); 0 where everything is masked, NaN where the block holds a NaN or +inf.
  float sum;
};

enum class Status : int32_t {
  kOk = 0,
  kNonFiniteTarget = 1,
  kMaskedTarget = 2,
  kUnusableDraftLaw = 3,
  kInvalidDraftId = 4,
};

/// A row as a law: p(v) = 2^((x_v - reference) * scale - log2_total).
struct RowLaw {
  float scale;
  /// 0, or the row's maximum where logits are so large that they must cancel before they are scaled.
  float reference;
  double log2_total;
  /// Natural logarithm of the sum of exp(x / temperature); NaN or -inf where there is no law.
  double logsumexp;

  SPECDEC_HOST_DEVICE bool usable() const { return is_finite(logsumexp); }
  /// log2 of the probability of an id with logit x.
  SPECDEC_HOST_DEVICE double log2_prob(float x) const {
    return fma64(static_cast<double>(x) - static_cast<double>(reference), static_cast<double>(scale),
                 -log2_total);
  }
  SPECDEC_HOST_DEVICE double prob(float x) const { return exp2_f64(log2_prob(x)); }
};

/// Beyond this a probability that is computed from logsumexp would lose its digits.
constexpr double kLargestLogsumexp = 1e9;

/// The law that a logsumexp implies. Laws found by a pass over the row go through here too, so that
/// handing logsumexp from one op to the next changes no bit, and equal rows have equal laws.
SPECDEC_HOST_DEVICE RowLaw row_law_from_logsumexp(float scale, double logsumexp) {
  const bool precise = logsumexp > -kLargestLogsumexp && logsumexp < kLargestLogsumexp;
  return {scale, 0.0f, logsumexp * kLog2E, precise ? logsumexp : __builtin_nan("")};
}

/// What a pass over a row says before any weight is added up.
struct RowMax {
  float max;
  bool non_finite;
};

SPECDEC_HOST_DEVICE RowMax row_max_from_blocks(const BlockStats* blocks, int num_blocks) {
  RowMax row = {-__builtin_inff(), false};
  for (int b = 0; b < num_blocks; ++b) {
    if (blocks[b].max > row.max) row.max = blocks[b].max;
    if (blocks[b].sum != blocks[b].sum) row.non_finite = true;
  }
  return row;
}

/// 2^ of how far a block's maximum lies below the row's: what its sum counts for in the row's.
SPECDEC_HOST_DEVICE double block_weight(const BlockStats& block, float row_max, float scale) {
  return exp2_f64((static_cast<double>(block.max) - static_cast<double>(row_max)) *
                  static_cast<double>(scale));
}

/// The law of a row whose weights relative to its maximum add up to `total`.
SPECDEC_HOST_DEVICE RowLaw row_law_from_total(float scale, RowMax row, double total) {
  if (row.non_finite) return {scale, row.max, 0.0, __builtin_nan("")};
  if (!(row.max > -__builtin_inff())) return {scale, row.max, 0.0, -__builtin_inf()};
  const double log2_total = log2_f64(total);
  const double log2_sum = fma64(static_cast<double>(row.max), static_cast<double>(scale), log2_total);
  const RowLaw law = row_law_from_logsumexp(scale, log2_sum * kLn2);
  return law.usable() ? law : RowLaw{scale, row.max, log2_total, log2_sum * kLn2};
}

SPECDEC_HOST_DEVICE RowLaw row_law_from_blocks(float scale, RowMax row, const BlockStats* blocks,
                                               int num_blocks) {
  double total = 0.0;
  for (int b = 0; b < num_blocks; ++b) {
    if (!(blocks[b].sum > 0.0f)) continue;
    total = fma64(static_cast<double>(blocks[b].sum), block_weight(blocks[b], row.max, scale), total);
  }
  return row_law_from_total(scale, row, total);
}

/// Block verification: the chance of a chain once its next draft is judged; 0 where it has no digits left.
SPECDEC_HOST_DEVICE double next_chance(double chance, double p, double q) {
  const double next = chance * p / q;
  if (!(next < 1.0)) return 1.0;
  return next > 0x1p-1000 ? next : 0.0;
}

/// What a mass of p leaves of it.
SPECDEC_HOST_DEVICE double rest_of(double mass) { return mass < 1.0 ? 1.0 - mass : 0.0; }

/// Whether a coin is below z / (z + 1 - chance), where 0 / 0 is 1.
SPECDEC_HOST_DEVICE bool block_accepts(double coin, double chance, double z) {
  return !(chance < 1.0) || coin * (z + (1.0 - chance)) < z;
}

}  // namespace specdec_ops

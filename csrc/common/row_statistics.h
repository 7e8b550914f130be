#pragma once

#include <cstdint>

#include "common/row_law.h"
#include "common/views.h"

/// What an engine may ask of a row of logits, or of a target and a draft row, without drawing from it.
namespace specdec_ops {

struct RowStatisticsParams {
  /// Rows that are asked for.
  int64_t num_rows = 0;
  int64_t vocab_size = 0;
  RowsView target;
  /// Of `target`.
  int64_t num_target_rows = 0;
  /// May be empty: row t is asked for row t of `target`.
  IntView row_indices;
  RealView temperature;
  /// data may be null: there are no draft rows.
  RowsView draft;
  RealView draft_temperature;

  double* logsumexp = nullptr;
  float* max_prob = nullptr;
  float* margin = nullptr;
  float* entropy = nullptr;
  int32_t* status = nullptr;
  // Null without draft rows.
  float* accept_prob = nullptr;
  float* total_variation = nullptr;

  SPECDEC_HOST_DEVICE bool has_draft() const { return draft.data != nullptr; }
  SPECDEC_HOST_DEVICE int num_blocks() const {
    return static_cast<int>((vocab_size + kBlockSize - 1) / kBlockSize);
  }
  SPECDEC_HOST_DEVICE int block_length(int block) const {
    const int64_t rest = vocab_size - static_cast<int64_t>(block) * kBlockSize;
    return rest < kBlockSize ? static_cast<int>(rest) : kBlockSize;
  }
  /// The row of `target`, -1 where there is none.
  SPECDEC_HOST_DEVICE int64_t target_row(int64_t row) const {
    if (!row_indices) return row;
    const int64_t index = at(row_indices, row);
    return index >= 0 && index < num_target_rows ? index : -1;
  }
  SPECDEC_HOST_DEVICE float temperature_of(int64_t row) const {
    return static_cast<float>(at(temperature, row));
  }
  SPECDEC_HOST_DEVICE float draft_temperature_of(int64_t row) const {
    return static_cast<float>(at(draft_temperature, row));
  }
};

/// The largest two values, equal ones twice.
struct TopTwo {
  float first = -__builtin_inff();
  float second = -__builtin_inff();

  SPECDEC_HOST_DEVICE void offer(float value) {
    if (value > first) {
      second = first;
      first = value;
    } else if (value > second) {
      second = value;
    }
  }
};

/// What one pass over a block leaves behind.
struct BlockStatistics {
  TopTwo top;
  /// As in BlockStats.
  float sum;
  /// Of the weights times how far their logits lie above the block's largest, hence not positive.
  float moment;
};

/// A row's sums over its blocks, whose terms come in the order of the blocks.
struct RowTotals {
  /// Of the weights relative to the row's largest logit.
  double total = 0.0;
  /// Of the weights times how far they lie below the largest one, in powers of two.
  double energy = 0.0;

  SPECDEC_HOST_DEVICE void add(double block_sum, double block_energy, double weight) {
    total = fma64(block_sum, weight, total);
    energy = fma64(block_energy, weight, energy);
  }
};

/// The energy of a block's weights where they refer to the row's largest logit, but for the factor `weight`
/// that they get there.
SPECDEC_HOST_DEVICE double block_energy(const BlockStatistics& block, float row_max, float scale) {
  const double factor = static_cast<double>(scale);
  const double below = (static_cast<double>(row_max) - static_cast<double>(block.top.first)) * factor;
  return fma64(static_cast<double>(block.sum), below, -(static_cast<double>(block.moment) * factor));
}

/// 2^ of how far a block's largest logit lies below the row's.
SPECDEC_HOST_DEVICE double block_weight(const BlockStatistics& block, float row_max, float scale) {
  return block_weight(BlockStats{block.top.first, block.sum}, row_max, scale);
}

SPECDEC_HOST_DEVICE Status status_of(const RowLaw& law) {
  if (law.logsumexp != law.logsumexp) return Status::kNonFiniteTarget;
  return law.usable() ? Status::kOk : Status::kMaskedTarget;
}

/// Writes what is known of the row by itself.
SPECDEC_HOST_DEVICE void write_statistics(const RowStatisticsParams& params, int64_t row, const RowLaw& law,
                                          const TopTwo& top, const RowTotals& totals) {
  const Status status = status_of(law);
  const double nan = __builtin_nan("");
  double max_prob = nan, margin = nan, entropy = nan;
  if (status == Status::kOk) {
    max_prob = law.prob(top.first);
    const double gap = static_cast<double>(top.first) - static_cast<double>(top.second);
    // A difference of zeros may be -0.
    margin = gap * static_cast<double>(law.scale) * kLn2 + 0.0;
    entropy = (log2_f64(totals.total) + totals.energy / totals.total) * kLn2;
  }
  params.logsumexp[row] = law.logsumexp;
  params.max_prob[row] = static_cast<float>(max_prob);
  params.margin[row] = static_cast<float>(margin);
  params.entropy[row] = static_cast<float>(entropy);
  params.status[row] = static_cast<int32_t>(status);
}

SPECDEC_HOST_DEVICE void write_no_row(const RowStatisticsParams& params, int64_t row) {
  params.logsumexp[row] = __builtin_nan("");
  params.max_prob[row] = params.margin[row] = params.entropy[row] = __builtin_nanf("");
  params.status[row] = static_cast<int32_t>(Status::kOk);
  if (params.has_draft()) params.accept_prob[row] = params.total_variation[row] = __builtin_nanf("");
}

/// Sums over a pair of rows: min(p, q), and max(p - q, 0).
struct Overlap {
  double common = 0.0;
  double excess = 0.0;
};

/// Where a law is one-hot at an id, whose probability in the other law is given.
SPECDEC_HOST_DEVICE Overlap overlap_of_one_hot(double prob) { return {prob, 1.0 - prob}; }

SPECDEC_HOST_DEVICE void write_overlap(const RowStatisticsParams& params, int64_t row,
                                       const Overlap& overlap) {
  // Rounding may lead out of [0, 1]; NaN stays.
  params.accept_prob[row] = static_cast<float>(overlap.common > 1.0 ? 1.0 : overlap.common);
  params.total_variation[row] = static_cast<float>(overlap.excess < 0.0   ? 0.0
                                                   : overlap.excess > 1.0 ? 1.0
                                                                          : overlap.excess);
}

/// Of a pair without an overlap, as one of its rows is no law.
SPECDEC_HOST_DEVICE void write_no_overlap(const RowStatisticsParams& params, int64_t row, bool is_draft) {
  write_overlap(params, row, {__builtin_nan(""), __builtin_nan("")});
  if (is_draft) params.status[row] = static_cast<int32_t>(Status::kUnusableDraftLaw);
}

}  // namespace specdec_ops

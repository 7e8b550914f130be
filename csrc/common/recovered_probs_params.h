#pragma once

#include <cstdint>

#include "common/draft_counts.h"
#include "common/float_rows.h"
#include "common/views.h"

namespace specdec_ops {

/// For each draft the id with the largest max(p - q, 0) * inverse noise.
///
/// The difference is a float64 where one of the probabilities is, else a float32, and so are its product
/// with the noise and all comparisons, but for noise in float64. What is not a number counts as a
/// difference of 0, and as a product wins nothing. The lowest of equal ids wins, and 0 where none does.
struct RecoveredProbsParams {
  int64_t batch = 0;
  int64_t vocab_size = 0;
  DraftCounts drafts;
  IntView draft_token_ids;
  /// Contiguous rows.
  FloatRowsView target_probs;
  /// May be empty: the draft law is one-hot.
  FloatRowsView draft_probs;
  FloatRowsView inverse_noise;
  MutableIntView token_ids;
};

}  // namespace specdec_ops

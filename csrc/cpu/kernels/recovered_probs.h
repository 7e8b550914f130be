#pragma once

#include <atomic>
#include <cstdint>

#include "common/recovered_probs_params.h"

namespace specdec_ops::cpu {

/// Ids whose largest score is kept, to look for the id only where the row's largest score is.
constexpr int kScoreBlock = 1024;

/// What the workers of a call share.
struct RecoveredProbsRun {
  const RecoveredProbsParams* params = nullptr;
  /// [drafts, blocks]: the largest score of each block, -inf if none is a number.
  double* block_scores = nullptr;
  int64_t num_blocks = 0;
  alignas(64) std::atomic<int64_t> next_task{0};
};

/// How many workers a call is worth, at most `max_workers`.
int recovered_probs_num_workers(const RecoveredProbsParams& params, int max_workers);
int64_t num_score_blocks(int64_t vocab_size);

/// Scores blocks while there are any. The scores depend neither on which worker scores what nor on
/// how many workers there are.
void score_blocks(RecoveredProbsRun& run);
/// Writes the ids, once all blocks have their scores.
void pick_recovered(const RecoveredProbsRun& run);

}  // namespace specdec_ops::cpu

// What the lossy rules ask of a row of the target. Included by chain.kernel.h. docs/rules.md has the rules.

namespace {

/// The sum of w * log2 w over a block, where w are the weights relative to the block's largest logit.
float weighted_logs_of_block(const ChainRun& run, const RowRef& row, float max, int block) {
  alignas(64) float logits[kBlockSize], weights[kBlockSize], lanes[kNumLanes] = {};
  const int rows =
      float_block(row, static_cast<int64_t>(block) * kBlockSize, block_length(run, block), logits);
  write_probs(ProbsOfLogits(static_cast<const float*>(logits), max, row.scale, 1.0f), rows, weights);
  for (int r = 0; r < rows; ++r) {
    for (int l = 0; l < kNumLanes; ++l) {
      const float w = weights[r * kNumLanes + l];
      const float term = w * ((logits[r * kNumLanes + l] - max) * row.scale);
      lanes[l] = lanes[l] + (w > 0.0f ? term : 0.0f);
    }
  }
  return tree_sum(lanes);
}

/// Entropy of a row in nats.
double entropy_of_row(const ChainRun& run, const Phase& target) {
  double bits = 0.0;
  for (int block = 0; block < run.num_blocks; ++block) {
    const BlockStats& stats = target.stats[block];
    if (!(stats.sum > 0.0f)) continue;
    const double log2_prob = target.law.log2_prob(stats.max);
    const double logs = static_cast<double>(weighted_logs_of_block(run, target.row, stats.max, block));
    bits = bits - exp2_f64(log2_prob) * (logs + static_cast<double>(stats.sum) * log2_prob);
  }
  return bits > 0.0 ? bits * kLn2 : 0.0;
}

/// How many logits of a row are larger, up to `most`.
int64_t count_larger(const ChainRun& run, const Phase& target, float logit, int64_t most) {
  int64_t count = 0;
  for (int block = 0; block < run.num_blocks && count < most; ++block) {
    if (!(target.stats[block].max > logit)) continue;
    alignas(64) float logits[kBlockSize];
    const int n = block_length(run, block);
    float_block(target.row, static_cast<int64_t>(block) * kBlockSize, n, logits);
    int in_block = 0;
    for (int i = 0; i < n; ++i) in_block += logits[i] > logit;
    count += in_block;
  }
  return count < most ? count : most;
}

}  // namespace

#pragma once

#include "common/gumbel.h"
#include "cuda/blocks.cuh"

namespace specdec_ops::cuda {

struct ScoredId {
  float score;
  int64_t id;

  /// Of two ids, that with the larger score, the lower one on ties.
  __device__ static ScoredId better(const ScoredId& a, const ScoredId& b) {
    return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
  }
};

/// The id with the largest score of a row with law, by `num_warps` warps: that of this warp's share of it.
/// Out of line, for few calls come this way.
static __device__ __noinline__ ScoredId best_score(const RowRef row, int64_t vocab_size, float max,
                                                   float scale, const NoiseKey noise, int warp,
                                                   int num_warps) {
  static_assert(kWarpSize == 2 * kNoiseLanes, "a warp takes two groups at a time");
  const int lane = lane_index();
  ScoredId best = {kMasked, vocab_size};
#pragma unroll 1
  for (int64_t first = int64_t{warp} * 2 * kNoiseGroup; first < vocab_size;
       first += int64_t{num_warps} * 2 * kNoiseGroup) {
    const int64_t group = first / kNoiseGroup + lane / kNoiseLanes;
    const int own = lane % kNoiseLanes;
    const PhiloxBlock words = noise_block(noise, static_cast<uint32_t>(group * kNoiseLanes + own));
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int64_t id = group * kNoiseGroup + w * kNoiseLanes + own;
      if (id >= vocab_size) continue;
      best =
          ScoredId::better(best, {gumbel_score(element(row, id), max, scale, gumbel_of(words.words[w])), id});
    }
  }
#pragma unroll
  for (int distance = kWarpSize / 2; distance >= 1; distance /= 2) {
    best = ScoredId::better(best, {__shfl_xor_sync(kAllLanes, best.score, distance),
                                   __shfl_xor_sync(kAllLanes, best.id, distance)});
  }
  return best;
}

}  // namespace specdec_ops::cuda

#pragma once

#include "common/fly.h"
#include "cuda/blocks.cuh"

namespace specdec_ops::cuda {

/// LargestLogits, by a warp: lane l holds the values number l and l + 32 in descending order, -inf where
/// there is none. Values past the capacity may be there too, but count for nothing.
class LargestLogitsOfWarp {
 public:
  __device__ explicit LargestLogitsOfWarp(int k) : capacity_(k) {}

  /// No logit up to this one changes the list.
  __device__ float floor() const { return floor_; }

  /// Offers the logits of all lanes.
  __device__ void offer(float logit) {
    unsigned lanes = __ballot_sync(kAllLanes, logit > floor_);
#pragma unroll 1
    for (; lanes != 0; lanes &= lanes - 1) {
      insert(__shfl_sync(kAllLanes, logit, __ffs(static_cast<int>(lanes)) - 1));
    }
  }

  /// Offers a block that fetch_block has brought, but for what is below `least`.
  __device__ void offer_block(const uint4* stage, const BlockRef& block, float least) {
#pragma unroll 1
    for (int row = 0; row < block.rows(); ++row) {
      float x[kOctet];
      staged_octet(stage, block.row.dtype, row * kWarpSize + lane_index(), x);
#pragma unroll
      for (int j = 0; j < kOctet; ++j) offer(x[j] >= least ? x[j] : kMasked);
    }
  }

  __device__ void store(float* values) const {
    values[lane_index()] = first_;
    values[kWarpSize + lane_index()] = second_;
  }

  /// entropy_of_largest, whose terms are found at once and added in order.
  __device__ double entropy(const RowLaw& law) const {
    const double log2_first = law.log2_prob(first_), log2_second = law.log2_prob(second_);
    const double first = exp2_out_of_line(log2_first), second = exp2_out_of_line(log2_second);
    double bits = 0.0;
#pragma unroll 1
    for (int i = 0; i < capacity_; ++i) {
      const int lane = i % kWarpSize;
      const bool in_first = i < kWarpSize;
      if (__shfl_sync(kAllLanes, in_first ? first_ : second_, lane) == kMasked) break;
      const double prob = __shfl_sync(kAllLanes, in_first ? first : second, lane);
      const double log2_prob = __shfl_sync(kAllLanes, in_first ? log2_first : log2_second, lane);
      bits = fma64(prob, -log2_prob, bits);
    }
    return bits > 0.0 ? bits * kLn2 : 0.0;
  }

 private:
  static_assert(kMaxEntropyTopK == 2 * kWarpSize, "a lane holds two values");

  __device__ void insert(float logit) {
    if (!(logit > floor_)) return;
    const int lane = lane_index();
    const int place = __popc(__ballot_sync(kAllLanes, first_ >= logit)) +
                      __popc(__ballot_sync(kAllLanes, second_ >= logit));
    const float before_first = __shfl_up_sync(kAllLanes, first_, 1);
    float before_second = __shfl_up_sync(kAllLanes, second_, 1);
    const float end_of_first = __shfl_sync(kAllLanes, first_, kWarpSize - 1);
    if (lane == 0) before_second = end_of_first;
    if (lane >= place) first_ = lane == place ? logit : before_first;
    if (lane + kWarpSize >= place) second_ = lane + kWarpSize == place ? logit : before_second;
    const int last = capacity_ - 1;
    floor_ = __shfl_sync(kAllLanes, last < kWarpSize ? first_ : second_, last % kWarpSize);
  }

  int capacity_;
  float floor_ = kMasked, first_ = kMasked, second_ = kMasked;
};

}  // namespace specdec_ops::cuda

#pragma once

#include <cfloat>

#include "common/filters.h"
#include "cuda/plan.cuh"

/// Where filters cut a row, and what is left of it: a CTA to a row, between the launch that reads rows and
/// the one that judges. csrc/common/filters.h defines the threshold, which does not depend on how it is
/// found.
///
/// The launch before has left the largest logit of each part of a block, which is what one thread of a warp
/// holds of it: eight lanes. What may lie at the threshold is gathered from the parts that reach up to it.
namespace specdec_ops::cuda {

/// Ids that are looked at at once.
constexpr int kMostGathered = 1024;

/// Shared memory of a CTA that filters; arrays of numbers by block follow.
struct FilterScratch {
  int64_t masses_of_ids[kMostGathered];
  float values[kMostGathered];
  int32_t ids[kMostGathered];
  uint32_t num_found;
  float result;
};

__host__ __device__ constexpr size_t filter_scratch_size(int num_blocks) {
  return sizeof(FilterScratch) + static_cast<size_t>(num_blocks) * (2 * sizeof(int64_t) + sizeof(double));
}

__device__ __forceinline__ uint32_t warp_max_of_orders(uint32_t value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance >= 1; distance /= 2) {
    value = max(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

/// One row on a whole CTA. All threads take the same way.
class RowFilter {
 public:
  __device__ RowFilter(const Plan& plan, const RowRef& row, float scale, BlockStats* stats,
                       const float* part_maxima, uint4* shared)
      : plan_(plan),
        row_(row),
        scale_(scale),
        stats_(stats),
        part_maxima_(part_maxima),
        s_(*reinterpret_cast<FilterScratch*>(shared)),
        masses_(reinterpret_cast<int64_t*>(&s_ + 1)),
        masses_above_(masses_ + plan.num_blocks),
        weights_(reinterpret_cast<double*>(masses_above_ + plan.num_blocks)) {
    bool non_finite = false;
    for (int first = 0; first < plan_.num_blocks; first += kWarpSize) {
      const int block = first + lane_index();
      if (block >= plan_.num_blocks) continue;
      const BlockStats of_block = load_stats(stats_ + block);
      max_ = fmaxf(max_, of_block.max);
      non_finite |= of_block.sum != of_block.sum;
    }
    max_ = warp_max(max_);
    non_finite_ = __any_sync(kAllLanes, non_finite);
  }

  __device__ RowMax row_max() const { return {max_, non_finite_}; }
  __device__ bool has_law() const { return !non_finite_ && max_ > kMasked; }

  /// The threshold of the row by its filters; -inf where there is nothing to filter.
  __device__ float find_threshold(const Filters& filters, bool joint) {
    if (!has_law()) return kMasked;
    float threshold = kMasked;
    if (filters.min_p > 0.0) threshold = min_p_threshold(max_, scale_, filters.min_p);
    if (filters.top_k > 0) threshold = larger(threshold, top_k_threshold(filters.top_k, threshold));
    if (filters.top_p < 1.0) {
      is_of_mass_ = true;
      weigh_blocks();
      float guess = max_;
      if (filters.weighs_whole_row(joint)) {
        find_masses(-FLT_MAX);
      } else {
        const uint32_t found = gather(lowest(threshold), after(max_));
        clear_masses();
        add_all(found, lowest(threshold));
        if (found <= kMostGathered) guess = lowest(threshold);
      }
      wanted_mass_ = filters.top_p * mass_of_row(masses_, weights_, plan_.num_blocks);
      __syncthreads();
      clear_masses();
      threshold = larger(threshold, wanted_mass_ > 0.0 ? search(lowest(threshold), guess) : max_);
    }
    return threshold + 0.0f;
  }

  /// The threshold of a row that holds a law, raised so that fewer than `size` ids are above it.
  __device__ float cut_to_size(float threshold, int64_t size) {
    return larger(threshold, top_k_threshold(size, threshold)) + 0.0f;
  }

  /// The least logit of what a threshold keeps, at least.
  __device__ static float lowest(float threshold) { return threshold > -FLT_MAX ? threshold : -FLT_MAX; }

  /// Gathers the ids above `floor`, of which there are fewer than `wanted`, and of those at it the lowest, so
  /// that there are `wanted` in all or somewhat more; returns how many there are.
  __device__ uint32_t gather_largest(float floor, int wanted) {
    // Those at the floor count below `end`.
    const auto vocab_size = static_cast<int32_t>(plan_.params.vocab_size);
    int32_t end = vocab_size, too_low = 0, too_high = vocab_size;
#pragma unroll 1
    for (;;) {
      const uint32_t found =
          gather_if(floor, [&](float x, int32_t id) { return x > floor || (x == floor && id < end); });
      if (found > kMostGathered) {
        too_high = end;
      } else if (found < static_cast<uint32_t>(wanted) && end < vocab_size) {
        too_low = end;
      } else {
        return found;
      }
      end = too_low + (too_high - too_low) / 2;
    }
  }
  __device__ const FilterScratch& gathered() const { return s_; }

  /// The sum of the weights of the row, which holds a law, relative to its maximum: row_law_from_blocks.
  __device__ double total_weight() {
    if (!has_law()) return 0.0;
    weigh_blocks();
    double total = 0.0;
#pragma unroll 1
    for (int block = 0; block < plan_.num_blocks; ++block) {
      const float sum = load_stats(stats_ + block).sum;
      if (sum > 0.0f) total = fma64(static_cast<double>(sum), weights_[block], total);
    }
    return total;
  }

  /// Puts the statistics of what a threshold leaves in place of the row's.
  __device__ void keep(float threshold) {
    __syncthreads();  // everybody is done with those of the whole row
#pragma unroll 1
    for (int block = warp_index(); block < plan_.num_blocks; block += num_warps()) {
      const BlockStats whole = load_stats(stats_ + block);
      if (whole.sum != whole.sum) continue;
      BlockStats kept = {kMasked, 0.0f};
      if (whole.max >= threshold) {
        const Exp2 exp2(whole.max, scale_);
        float sums[kOctet] = {};
        // A thread's part is what its lanes add up; weights of 0 change no sum.
        visit_part(block, threshold, [&](const float (&x)[kOctet], int32_t) {
#pragma unroll
          for (int j = 0; j < kOctet; ++j) {
            if (!(x[j] >= threshold)) continue;
            float polynomial, power;
            exp2.factors(x[j], &polynomial, &power);
            sums[j] = fma_ftz(polynomial, power, sums[j]);
          }
        });
        __syncwarp();
        kept = {whole.max, tree_sum(sums)};
      }
      if (lane_index() == 0) *reinterpret_cast<float2*>(stats_ + block) = make_float2(kept.max, kept.sum);
    }
  }

 private:
  __device__ static float larger(float a, float b) { return b > a ? b : a; }
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }

  /// The largest logit with `k` ids from it on; -inf if there is none at or above the threshold.
  __device__ float top_k_threshold(int64_t k, float threshold) {
    is_of_mass_ = false;
    wanted_count_ = k;
    count_ = 0;
    return search(lowest(threshold), guess_of_top_k(k));
  }

  /// Calls visit with the thread's part of a block, eight ids at a time and the first of these, if it reaches
  /// up to `floor`.
  template <class Visit>
  __device__ __forceinline__ void visit_part(int block, float floor, const Visit& visit) {
    if (!(__ldcg(part_maxima_ + block * kWarpSize + lane_index()) >= floor)) return;
    const BlockRef ref = block_of(plan_.params, row_, block);
    const int rows = ref.rows();
#pragma unroll 4
    for (int r = 0; r < rows; ++r) {
      float x[kOctet];
      const int64_t first = ref.begin + r * kNumLanes + lane_index() * kOctet;
      load_octet(row_, first, ref.begin + ref.size, kMasked, x);
      visit(x, static_cast<int32_t>(first));
    }
  }

  /// Gathers the ids in [floor, below), kMostGathered of them at most; returns how many there are.
  __device__ uint32_t gather(float floor, float below) {
    return gather_if(floor, [&](float x, int32_t) { return x >= floor && x < below; });
  }

  /// The same of the ids that keeps(logit, id) holds for, none of them below `floor`.
  template <class Keeps>
  __device__ __forceinline__ uint32_t gather_if(float floor, const Keeps& keeps) {
    __syncthreads();
    if (thread() == 0) s_.num_found = 0;
    __syncthreads();
#pragma unroll 1
    for (int block = warp_index(); block < plan_.num_blocks; block += num_warps()) {
      if (!(load_stats(stats_ + block).max >= floor)) continue;
      visit_part(block, floor, [&](const float (&x)[kOctet], int32_t first) {
        uint32_t num_found = 0;
#pragma unroll
        for (int j = 0; j < kOctet; ++j) num_found += keeps(x[j], first + j) ? 1 : 0;
        if (num_found == 0) return;
        uint32_t place = atomicAdd(&s_.num_found, num_found);
#pragma unroll
        for (int j = 0; j < kOctet; ++j) {
          if (!keeps(x[j], first + j)) continue;
          if (place < kMostGathered) {
            s_.values[place] = x[j];
            s_.ids[place] = first + j;
          }
          ++place;
        }
      });
    }
    __syncthreads();
    return s_.num_found;
  }

  __device__ void weigh_blocks() {
    for (int block = thread(); block < plan_.num_blocks; block += num_threads()) {
      const double distance = static_cast<double>(load_stats(stats_ + block).max) - static_cast<double>(max_);
      weights_[block] = exp2_out_of_line(distance * static_cast<double>(scale_));
    }
    __syncthreads();
  }

  __device__ void clear_masses() {
    for (int block = thread(); block < plan_.num_blocks; block += num_threads()) masses_[block] = 0;
    __syncthreads();
  }

  /// The masses of all ids from `floor` on, by block.
  __device__ void find_masses(float floor) {
    __syncthreads();
#pragma unroll 1
    for (int block = warp_index(); block < plan_.num_blocks; block += num_warps()) {
      const float block_max = load_stats(stats_ + block).max;
      int64_t mass = 0;
      if (block_max >= floor) {
        visit_part(block, floor, [&](const float (&x)[kOctet], int32_t) {
#pragma unroll
          for (int j = 0; j < kOctet; ++j) mass += x[j] >= floor ? mass_of(x[j], block_max, scale_) : 0;
        });
      }
      __syncwarp();
      mass = warp_sum(mass);
      if (lane_index() == 0) masses_[block] = mass;
    }
    __syncthreads();
  }

  // ---- A measure of the ids from a logit on: how many there are, or their masses ----

  __device__ bool holds() const {
    return is_of_mass_ ? mass_of_row(masses_, weights_, plan_.num_blocks) >= wanted_mass_
                       : count_ >= wanted_count_;
  }

  __device__ void put_aside() {
    count_above_ = count_;
    if (!is_of_mass_) return;
    for (int block = thread(); block < plan_.num_blocks; block += num_threads())
      masses_above_[block] = masses_[block];
    __syncthreads();
  }

  __device__ void take_back() {
    count_ = count_above_;
    if (!is_of_mass_) return;
    __syncthreads();
    for (int block = thread(); block < plan_.num_blocks; block += num_threads())
      masses_[block] = masses_above_[block];
    __syncthreads();
  }

  /// Adds those that were gathered from `floor` on; by a pass over the row if they are too many.
  __device__ void add_all(uint32_t found, float floor) {
    if (!is_of_mass_) {
      count_ += found;
      return;
    }
    if (found > kMostGathered) return find_masses(floor);
    for (uint32_t i = threadIdx.x; i < found; i += num_threads()) {
      const int block = block_of_gathered(i);
      s_.masses_of_ids[i] = mass_of(s_.values[i], load_stats(stats_ + block).max, scale_);
      add_mass(block, s_.masses_of_ids[i]);
    }
    __syncthreads();
  }

  __device__ int block_of_gathered(uint32_t i) const { return s_.ids[i] / kBlockSize; }

  __device__ void add_mass(int block, int64_t mass) {
    atomicAdd(reinterpret_cast<unsigned long long*>(masses_ + block), static_cast<unsigned long long>(mass));
  }

  /// Whether the measure of what is above, and of the ids gathered from an order on, holds: by one warp.
  __device__ bool holds_from(uint32_t order, uint32_t found) {
    if (!is_of_mass_) {
      int count = 0;
      for (uint32_t i = lane_index(); i < found; i += kWarpSize)
        count += order_of(s_.values[i]) >= order ? 1 : 0;
      return count_ + warp_sum(count) >= wanted_count_;
    }
    for (int block = lane_index(); block < plan_.num_blocks; block += kWarpSize) {
      masses_[block] = masses_above_[block];
    }
    __syncwarp();
    for (uint32_t i = lane_index(); i < found; i += kWarpSize) {
      if (order_of(s_.values[i]) >= order) add_mass(block_of_gathered(i), s_.masses_of_ids[i]);
    }
    __syncwarp();
    const bool result = holds();
    __syncwarp();
    return result;
  }

  /// The largest gathered logit for which the measure holds. It does for the least of them, and not for what
  /// is above.
  __device__ float select(uint32_t found) {
    if (warp_index() == 0) {
      uint32_t from = 0, end = 0xFFFFFFFF;
#pragma unroll 1
      for (;;) {
        uint32_t least = 0xFFFFFFFF, most = 0;
        for (uint32_t i = lane_index(); i < found; i += kWarpSize) {
          const uint32_t order = order_of(s_.values[i]);
          if (order < from || order >= end) continue;
          least = min(least, order);
          most = max(most, order);
        }
        least = ~warp_max_of_orders(~least);
        most = warp_max_of_orders(most);
        if (least == most) {
          if (lane_index() == 0) s_.result = float_of_order(least);
          break;
        }
        const uint32_t middle = least + (most - least + 1) / 2;
        if (holds_from(middle, found)) {
          from = middle;
        } else {
          end = middle;
        }
      }
    }
    __syncthreads();
    return s_.result;
  }

  /// The largest logit of the row for which the measure of the ids from it on holds; -inf if there is none at
  /// or above `lowest`. The first guess is `probe`.
  __device__ float search(float lowest, float probe) {
    constexpr int kHalvingsByValue = 12;
    bool at_lowest_holds = false;
    int halvings = 0;
    float below = after(max_);
    const float step = 8.0f / scale_;
    probe = larger(lowest, probe);
#pragma unroll 1
    for (;;) {
      put_aside();
      const uint32_t found = gather(probe, below);
      add_all(found, probe);
      if (holds()) {
        take_back();
        if (found <= kMostGathered) return select(found);
        lowest = probe;
        at_lowest_holds = true;
      } else {
        if (probe == lowest) return kMasked;
        below = probe;
      }
      if (at_lowest_holds) {
        // By value at first, since halves of the floats of either sign are next to 0.
        const double middle = 0.5 * (static_cast<double>(lowest) + static_cast<double>(below));
        probe = static_cast<float>(middle);
        if (++halvings > kHalvingsByValue || !(probe > lowest && probe < below))
          probe = between(lowest, below);
        // No float in between: all of these ids have one logit.
        if (probe == lowest) return lowest;
      } else {
        const float distance = 1.5f * (max_ - below);
        const float lower = max_ - larger(distance, step);
        probe = lower < below && lower > lowest ? lower : lowest;
      }
    }
  }

  /// How many parts of the row reach up to a logit.
  __device__ int64_t count_parts(float floor) {
    __syncthreads();
    if (thread() == 0) s_.num_found = 0;
    __syncthreads();
    uint32_t count = 0;
    for (int part = thread(); part < plan_.num_blocks * kWarpSize; part += num_threads()) {
      count += __ldcg(part_maxima_ + part) >= floor ? 1 : 0;
    }
    const int64_t of_warp = warp_sum(count);
    if (lane_index() == 0) atomicAdd(&s_.num_found, static_cast<uint32_t>(of_warp));
    __syncthreads();
    return s_.num_found;
  }

  /// A lower bound of the k-th largest logit with few ids above it, where there are enough parts.
  __device__ float guess_of_top_k(int64_t k) {
    constexpr int kMostHalvings = 6;
    float distance = 2.0f / scale_, below = max_;
    float guess = max_ - distance;
    int64_t count = count_parts(guess);
    while (count < k) {
      if (!(distance * scale_ < 128.0f)) return max_ - 8.0f / scale_;
      below = guess;
      distance *= 2.0f;
      guess = max_ - distance;
      count = count_parts(guess);
    }
    for (int i = 0; i < kMostHalvings && count > 2 * k + kWarpSize; ++i) {
      const float middle = 0.5f * (guess + below);
      const int64_t at_middle = count_parts(middle);
      if (at_middle >= k) {
        guess = middle;
        count = at_middle;
      } else {
        below = middle;
      }
    }
    return guess;
  }

  const Plan& plan_;
  RowRef row_;
  float scale_;
  BlockStats* stats_;
  const float* part_maxima_;
  FilterScratch& s_;
  int64_t* masses_;
  int64_t* masses_above_;
  double* weights_;
  float max_ = kMasked;
  bool non_finite_ = false;
  bool is_of_mass_ = false;
  int64_t wanted_count_ = 0, count_ = 0, count_above_ = 0;
  double wanted_mass_ = 0.0;
};

}  // namespace specdec_ops::cuda

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

/// Ids that are looked at at once; a power of two, since they are sorted.
constexpr int kMostGathered = 1024;
/// Parts whose ids are spread over all threads.
constexpr uint32_t kMostParts = 1024;
/// Parts are counted by how far they stay below the row, in eighths of a power of two; what is farther is
/// not.
constexpr int kNumBins = 256;
constexpr float kBinsPerOctave = 8.0f;

/// Shared memory of a CTA that filters; arrays of numbers by block follow.
struct FilterScratch {
  /// Of ids: larger for a larger logit and, of equal ones, for a lower id.
  unsigned long long keys[kMostGathered];
  int64_t masses_of_ids[kMostGathered];
  uint32_t parts[kMostParts];
  uint32_t bins[kNumBins];
  uint32_t num_found, num_parts;
  float guess;
};

__host__ __device__ constexpr size_t filter_scratch_size(int num_blocks, int warps) {
  return sizeof(FilterScratch) +
         static_cast<size_t>(num_blocks) * ((2 + warps) * sizeof(int64_t) + sizeof(double) + sizeof(float));
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
        trial_masses_(masses_above_ + plan.num_blocks),
        weights_(reinterpret_cast<double*>(trial_masses_ + num_warps() * plan.num_blocks)),
        maxima_(reinterpret_cast<float*>(weights_ + plan.num_blocks)) {
    bool non_finite = false;
    for (int first = 0; first < plan_.num_blocks; first += kWarpSize) {
      const int block = first + lane_index();
      if (block >= plan_.num_blocks) continue;
      const BlockStats of_block = load_stats(stats_ + block);
      max_ = fmaxf(max_, of_block.max);
      non_finite |= of_block.sum != of_block.sum;
      if (warp_index() == 0) maxima_[block] = of_block.max;
    }
    max_ = warp_max(max_);
    non_finite_ = __any_sync(kAllLanes, non_finite);
    __syncthreads();
  }

  __device__ RowMax row_max() const { return {max_, non_finite_}; }
  __device__ float logit_of(int64_t id) const { return element(row_, id); }
  __device__ bool has_law() const { return !non_finite_ && max_ > kMasked; }

  /// The threshold of the row by its filters; -inf where there is nothing to filter.
  __device__ float find_threshold(const Filters& filters, bool joint) {
    if (!has_law()) return kMasked;
    float threshold = kMasked;
    if (filters.min_p > 0.0) threshold = min_p_threshold(max_, scale_, filters.min_p);
    if (filters.top_k > 0) threshold = larger(threshold, top_k_threshold(filters.top_k, lowest(threshold)));
    if (filters.top_p < 1.0) {
      const bool weighs_whole_row = filters.weighs_whole_row(joint);
      threshold = larger(threshold, threshold_of_top_p(filters.top_p, weighs_whole_row, lowest(threshold)));
    }
    return threshold + 0.0f;
  }

  /// The threshold of a row that holds a law, raised so that fewer than `size` ids are above it.
  __device__ float cut_to_size(float threshold, int64_t size) {
    return larger(threshold, top_k_threshold(size, lowest(threshold))) + 0.0f;
  }

  /// The least logit of what a threshold keeps, at least.
  __device__ static float lowest(float threshold) { return threshold > -FLT_MAX ? threshold : -FLT_MAX; }

  /// Lists the ids above `floor`, of which there are fewer than `wanted`, and of those at it the lowest, so
  /// that there are `wanted` in all or somewhat more, by falling logit, then by rising id. Returns how many
  /// there are.
  __device__ uint32_t list_largest(float floor, int wanted) {
    if (is_listed_from(floor)) return num_listed_from(floor);
    // Those at the floor count below `end`.
    const auto vocab_size = static_cast<uint32_t>(plan_.params.vocab_size);
    uint32_t end = vocab_size, too_low = 0, too_high = vocab_size;
#pragma unroll 1
    for (;;) {
      const uint32_t found =
          gather_if(floor, [&](float x, uint32_t id) { return x > floor || (x == floor && id < end); });
      if (found > kMostGathered) {
        too_high = end;
      } else if (found < static_cast<uint32_t>(wanted) && end < vocab_size) {
        too_low = end;
      } else {
        sort(found);
        return found;
      }
      end = too_low + (too_high - too_low) / 2;
    }
  }
  __device__ float listed_logit(uint32_t i) const { return float_of_order(listed_order(i)); }
  __device__ int32_t listed_id(uint32_t i) const {
    return static_cast<int32_t>(~static_cast<uint32_t>(s_.keys[i]));
  }

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
    if (is_listed_from(lowest(threshold))) {
      const uint32_t num_ids = num_listed_from(lowest(threshold));
      __syncthreads();  // everybody has looked at the list
      return keep_listed(num_ids);
    }
#pragma unroll 1
    for (int block = warp_index(); block < plan_.num_blocks; block += num_warps()) {
      const float part_max = __ldcg(part_maxima_ + block * kWarpSize + lane_index());
      const BlockStats whole = load_stats(stats_ + block);
      if (whole.sum != whole.sum) continue;
      BlockStats kept = {kMasked, 0.0f};
      if (whole.max >= threshold) {
        const Exp2 exp2(whole.max, scale_);
        float sums[kOctet] = {};
        // A thread's part is what its lanes add up; weights of 0 change no sum.
        if (part_max >= threshold) {
          visit_part(block, [&](const float (&x)[kOctet], uint32_t) {
#pragma unroll
            for (int j = 0; j < kOctet; ++j) {
              if (!(x[j] >= threshold)) continue;
              float polynomial, power;
              exp2.factors(x[j], &polynomial, &power);
              sums[j] = fma_ftz(polynomial, power, sums[j]);
            }
          });
        }
        __syncwarp();
        kept = {whole.max, tree_sum(sums)};
      }
      if (lane_index() == 0) *reinterpret_cast<float2*>(stats_ + block) = make_float2(kept.max, kept.sum);
    }
  }

 private:
  __device__ static float larger(float a, float b) { return b > a ? b : a; }
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }
  __device__ float top() const { return after(max_); }

  // ---- Ids ----

  /// Calls visit with the thread's part of a block, eight logits at a time and the first one's id.
  template <class Visit>
  __device__ __forceinline__ void visit_part(int block, const Visit& visit) {
    const BlockRef ref = block_of(plan_.params, row_, block);
    const char* source = ref.aligned_whole();
    if (source == nullptr || row_.dtype == DType::kFloat32) {
      const int rows = ref.rows();
#pragma unroll 1
      for (int r = 0; r < rows; ++r) {
        float x[kOctet];
        const int64_t id = ref.begin + r * kNumLanes + lane_index() * kOctet;
        load_octet(row_, id, ref.begin + ref.size, kMasked, x);
        visit(x, static_cast<uint32_t>(id));
      }
      return;
    }
    constexpr int kRowsAtOnce = 4;
#pragma unroll 1
    for (int first = 0; first < kRowsPerBlock; first += kRowsAtOnce) {
      uint4 words[kRowsAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        words[r] = __ldg(reinterpret_cast<const uint4*>(source) + (first + r) * kWarpSize + lane_index());
      }
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        float x[kOctet];
        octet_of_halves(words[r], row_.dtype, x);
        visit(x, static_cast<uint32_t>(ref.begin + (first + r) * kNumLanes + lane_index() * kOctet));
      }
    }
  }

  /// Takes those of eight ids that are kept.
  template <class Keeps>
  __device__ __forceinline__ void take(const float (&x)[kOctet], uint32_t first, const Keeps& keeps) {
    uint32_t num_taken = 0;
#pragma unroll
    for (int j = 0; j < kOctet; ++j) num_taken += keeps(x[j], first + j) ? 1 : 0;
    if (num_taken == 0) return;
    uint32_t place = atomicAdd(&s_.num_found, num_taken);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
      if (!keeps(x[j], first + j)) continue;
      if (place < kMostGathered) s_.keys[place] = uint64_t{order_of(x[j])} << 32 | ~(first + j);
      ++place;
    }
  }

  __device__ uint32_t listed_order(uint32_t i) const { return static_cast<uint32_t>(s_.keys[i] >> 32); }
  __device__ int listed_block(uint32_t i) const { return listed_id(i) / kBlockSize; }
  __device__ int64_t listed_mass(uint32_t i) const {
    return mass_of(listed_logit(i), maxima_[listed_block(i)], scale_);
  }

  /// Gathers the ids in [floor, below), kMostGathered of them at most; returns how many there are.
  __device__ uint32_t gather(float floor, float below) {
    return gather_if(floor, [&](float x, uint32_t) { return x >= floor && x < below; });
  }

  /// The same of the ids that keeps(logit, id) holds for, none of them below `floor`.
  template <class Keeps>
  __device__ __forceinline__ uint32_t gather_if(float floor, const Keeps& keeps) {
    is_listed_ = false;
    __syncthreads();
    if (thread() == 0) s_.num_found = s_.num_parts = 0;
    __syncthreads();
    for (int part = thread(); part < plan_.num_blocks * kWarpSize; part += num_threads()) {
      if (!(__ldcg(part_maxima_ + part) >= floor)) continue;
      const uint32_t place = atomicAdd(&s_.num_parts, 1u);
      if (place < kMostParts) s_.parts[place] = static_cast<uint32_t>(part);
    }
    __syncthreads();
    if (s_.num_parts <= kMostParts) {
      gather_from_parts(s_.num_parts * kRowsPerBlock, keeps);
    } else {
#pragma unroll 1
      for (int block = warp_index(); block < plan_.num_blocks; block += num_warps()) {
        if (!(__ldcg(part_maxima_ + block * kWarpSize + lane_index()) >= floor)) continue;
        visit_part(block, [&](const float (&x)[kOctet], uint32_t first) { take(x, first, keeps); });
      }
    }
    __syncthreads();
    return s_.num_found;
  }

  /// From the rows of all parts of the list, each thread from several at once.
  template <class Keeps>
  __device__ __forceinline__ void gather_from_parts(uint32_t num_rows, const Keeps& keeps) {
    constexpr int kRowsAtOnce = 4;
    const auto vocab_size = static_cast<uint32_t>(plan_.params.vocab_size);
    const bool has_aligned_halves =
        row_.dtype != DType::kFloat32 && reinterpret_cast<uintptr_t>(row_.data) % 16 == 0;
#pragma unroll 1
    for (uint32_t first = threadIdx.x; first < num_rows; first += kRowsAtOnce * num_threads()) {
      uint32_t ids[kRowsAtOnce];  // the first of each row; vocab_size: none
      uint4 words[kRowsAtOnce];
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const uint32_t i = first + r * num_threads();
        ids[r] = vocab_size;
        if (i >= num_rows) continue;
        const uint32_t part = s_.parts[i / kRowsPerBlock];
        ids[r] = part / kWarpSize * kBlockSize + i % kRowsPerBlock * kNumLanes + part % kWarpSize * kOctet;
        if (has_aligned_halves && ids[r] + kOctet <= vocab_size) {
          words[r] = __ldg(reinterpret_cast<const uint4*>(row_.data) + ids[r] / kOctet);
        }
      }
#pragma unroll
      for (int r = 0; r < kRowsAtOnce; ++r) {
        if (ids[r] >= vocab_size) continue;
        float x[kOctet];
        if (has_aligned_halves && ids[r] + kOctet <= vocab_size) {
          octet_of_halves(words[r], row_.dtype, x);
        } else {
          load_octet(row_, ids[r], vocab_size, kMasked, x);
        }
        take(x, ids[r], keeps);
      }
    }
  }

  /// Sorts the ids that were gathered by falling logit.
  __device__ void sort(uint32_t found) {
    uint32_t size = 2;
    while (size < found) size *= 2;
    for (uint32_t i = found + threadIdx.x; i < size; i += num_threads()) s_.keys[i] = 0;
#pragma unroll 1
    for (uint32_t run = 2; run <= size; run *= 2) {
#pragma unroll 1
      for (uint32_t distance = run / 2; distance >= 1; distance /= 2) {
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < size / 2; i += num_threads()) {
          const uint32_t a = 2 * i - (i & (distance - 1)), b = a + distance;
          const unsigned long long at_a = s_.keys[a], at_b = s_.keys[b];
          if ((at_a < at_b) != ((a & run) == 0)) continue;
          s_.keys[a] = at_b;
          s_.keys[b] = at_a;
        }
      }
    }
    __syncthreads();
  }

  /// What keep() does, where the first ids of the list are what is left of a row. The list is lost.
  __device__ void keep_listed(uint32_t num_ids) {
    for (uint32_t i = threadIdx.x; i < num_ids; i += num_threads()) {
      s_.keys[i] = s_.keys[i] << 32 | s_.keys[i] >> 32;
    }
    is_listed_ = false;
    sort(num_ids);  // by rising id
    const auto id_at = [&](uint32_t i) { return ~static_cast<uint32_t>(s_.keys[i] >> 32); };
#pragma unroll 1
    for (int block = warp_index(); block < plan_.num_blocks; block += num_warps()) {
      const uint32_t begin = static_cast<uint32_t>(block) * kBlockSize;
      uint32_t i = 0;
      for (uint32_t step = kMostGathered; step > 0; step /= 2) {
        if (i + step <= num_ids && id_at(i + step - 1) < begin) i += step;
      }
      BlockStats kept = {kMasked, 0.0f};
      if (i < num_ids && id_at(i) < begin + kBlockSize) {
        const Exp2 exp2(maxima_[block], scale_);
        float sums[kOctet] = {};
#pragma unroll 1
        for (; i < num_ids && id_at(i) < begin + kBlockSize; ++i) {
          float polynomial, power;
          exp2.factors(float_of_order(static_cast<uint32_t>(s_.keys[i])), &polynomial, &power);
          const int lane_of_row = static_cast<int>(id_at(i) % kNumLanes);
#pragma unroll
          for (int j = 0; j < kOctet; ++j) {
            if (lane_of_row == lane_index() * kOctet + j) sums[j] = fma_ftz(polynomial, power, sums[j]);
          }
        }
        kept = {maxima_[block], tree_sum(sums)};
      }
      if (lane_index() == 0) *reinterpret_cast<float2*>(stats_ + block) = make_float2(kept.max, kept.sum);
    }
  }

  // ---- Masses ----

  __device__ void weigh_blocks() {
    __syncthreads();
    for (int block = thread(); block < plan_.num_blocks; block += num_threads()) {
      const double distance = static_cast<double>(maxima_[block]) - static_cast<double>(max_);
      weights_[block] = exp2_out_of_line(distance * static_cast<double>(scale_));
      masses_[block] = masses_above_[block] = 0;
    }
    __syncthreads();
  }

  /// Of the first ids of the list.
  __device__ void weigh_ids(uint32_t num_ids) {
    for (uint32_t i = threadIdx.x; i < num_ids; i += num_threads()) s_.masses_of_ids[i] = listed_mass(i);
    __syncthreads();
  }

  /// The masses of all ids from `floor` on, by block.
  __device__ void find_masses(float floor) {
    __syncthreads();
#pragma unroll 1
    for (int block = warp_index(); block < plan_.num_blocks; block += num_warps()) {
      const float block_max = maxima_[block];
      int64_t mass = 0;
      if (__ldcg(part_maxima_ + block * kWarpSize + lane_index()) >= floor) {
        visit_part(block, [&](const float (&x)[kOctet], uint32_t) {
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

  __device__ static void add_mass(int64_t* mass, int64_t more) {
    atomicAdd(reinterpret_cast<unsigned long long*>(mass), static_cast<unsigned long long>(more));
  }

  /// Of what lies above the list and its first ids, by one warp: each warp may ask for another number.
  __device__ double mass_with(uint32_t num_ids) {
    int64_t* masses = trial_masses_ + warp_index() * plan_.num_blocks;
    for (int block = lane_index(); block < plan_.num_blocks; block += kWarpSize) {
      masses[block] = masses_above_[block];
    }
    __syncwarp();
    for (uint32_t i = lane_index(); i < num_ids; i += kWarpSize) {
      add_mass(masses + listed_block(i), s_.masses_of_ids[i]);
    }
    __syncwarp();
    const double mass = mass_of_row(masses, weights_, plan_.num_blocks);
    __syncwarp();
    return mass;
  }

  /// The logit of the first id of the list with which the mass suffices. It does with all of `num_ids`, whose
  /// masses are there.
  __device__ float select_by_mass(uint32_t num_ids) {
    uint32_t first = 0, last = num_ids - 1;
#pragma unroll 1
    while (first < last) {
      const auto warps = static_cast<uint32_t>(num_warps());
      const uint32_t step = (last - first + warps - 1) / warps;
      const auto place_of = [&](uint32_t warp) { return min(first + (warp + 1) * step - 1, last); };
      const uint32_t place = place_of(static_cast<uint32_t>(warp_index()));
      const bool suffices = place == last || mass_with(place + 1) >= wanted_mass_;
      const uint32_t num_failed = warps - static_cast<uint32_t>(__syncthreads_count(suffices)) / kWarpSize;
      const uint32_t next_last = num_failed < warps ? place_of(num_failed) : last;
      if (num_failed > 0) first = place_of(num_failed - 1) + 1;
      last = next_last;
    }
    return listed_logit(last);
  }

  /// The threshold of top-p among the ids from `floor` on; of the mass of the row or of these ids.
  __device__ float threshold_of_top_p(double top_p, bool weighs_whole_row, float floor) {
    if (!weighs_whole_row && !is_listed_from(floor)) list(gather(floor, top()), floor);
    weigh_blocks();
    const bool has_list = is_listed_from(floor);
    const uint32_t num_ids = has_list ? num_listed_from(floor) : 0;
    if (has_list) weigh_ids(num_ids);
    if (weighs_whole_row || !has_list) {
      find_masses(weighs_whole_row ? -FLT_MAX : floor);
      wanted_mass_ = top_p * mass_of_row(masses_, weights_, plan_.num_blocks);
    } else {
      wanted_mass_ = top_p * mass_with(num_ids);
    }
    if (!(wanted_mass_ > 0.0)) return max_;
    if (has_list) {
      // Of the mass of the row more may be wanted than there is from `floor` on.
      if (weighs_whole_row && !(mass_with(num_ids) >= wanted_mass_)) return kMasked;
      return select_by_mass(num_ids);
    }
    is_of_mass_ = true;
    clear_masses();
    return search(floor, max_);
  }

  /// The largest logit with `k` ids from it on; -inf if there is none at or above `floor`.
  __device__ float top_k_threshold(int64_t k, float floor) {
    if (is_listed_from(floor)) {
      return num_listed_from(floor) >= k ? listed_logit(static_cast<uint32_t>(k) - 1) : kMasked;
    }
    is_of_mass_ = false;
    wanted_count_ = k;
    count_ = 0;
    return search(floor, guess_of_top_k(k));
  }

  __device__ void clear_masses() {
    __syncthreads();
    for (int block = thread(); block < plan_.num_blocks; block += num_threads()) masses_[block] = 0;
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
      add_mass(masses_ + listed_block(i), listed_mass(i));
    }
    __syncthreads();
  }

  /// Sorts all ids from `floor` on, where they are not too many, for whoever needs them next.
  __device__ void list(uint32_t found, float floor) {
    if (found > kMostGathered) return;
    sort(found);
    is_listed_ = true;
    list_size_ = found;
    list_floor_ = floor;
  }
  __device__ bool is_listed_from(float floor) const { return is_listed_ && list_floor_ <= floor; }
  __device__ uint32_t num_listed_from(float floor) const {
    uint32_t count = 0;
    for (uint32_t step = kMostGathered; step > 0; step /= 2) {
      if (count + step <= list_size_ && listed_order(count + step - 1) >= order_of(floor)) count += step;
    }
    return count;
  }

  /// The largest gathered logit for which the measure holds. It does for the least of them, and not for what
  /// is above.
  __device__ float select(uint32_t found, float floor, bool from_top) {
    if (from_top) {
      list(found, floor);
    } else {
      sort(found);
    }
    if (!is_of_mass_) return listed_logit(static_cast<uint32_t>(wanted_count_ - count_ - 1));
    weigh_ids(found);
    return select_by_mass(found);
  }

  /// The largest logit of the row for which the measure of the ids from it on holds; -inf if there is none at
  /// or above `lowest`. The first guess is `probe`.
  __device__ float search(float lowest, float probe) {
    constexpr int kHalvingsByValue = 12;
    bool at_lowest_holds = false;
    int halvings = 0;
    float below = top();
    const float step = 8.0f / scale_;
    probe = larger(lowest, probe);
#pragma unroll 1
    for (;;) {
      put_aside();
      const uint32_t found = gather(probe, below);
      add_all(found, probe);
      if (holds()) {
        take_back();
        if (found <= kMostGathered) return select(found, probe, below == top());
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

  /// A lower bound of the k-th largest logit with few ids above it, where there are enough parts.
  __device__ float guess_of_top_k(int64_t k) {
    __syncthreads();
    for (int bin = thread(); bin < kNumBins; bin += num_threads()) s_.bins[bin] = 0;
    __syncthreads();
    const float bins_per_unit = kBinsPerOctave * scale_;
    for (int part = thread(); part < plan_.num_blocks * kWarpSize; part += num_threads()) {
      const float bin = (max_ - __ldcg(part_maxima_ + part)) * bins_per_unit;
      if (bin < static_cast<float>(kNumBins)) atomicAdd(s_.bins + static_cast<int>(bin), 1u);
    }
    __syncthreads();
    if (warp_index() == 0) {
      constexpr int kBinsPerLane = kNumBins / kWarpSize;
      const uint32_t* bins = s_.bins + lane_index() * kBinsPerLane;
      int64_t count = 0;
      for (int i = 0; i < kBinsPerLane; ++i) count += bins[i];
      const int64_t own = count;
      for (int distance = 1; distance < kWarpSize; distance *= 2) {
        const int64_t before = __shfl_up_sync(kAllLanes, count, distance);
        if (lane_index() >= distance) count += before;
      }
      const int lane = first_lane(count >= k);
      if (lane_index() == max(lane, 0)) {
        int num_bins = lane < 0 ? kNumBins : lane * kBinsPerLane;
        for (int64_t sum = count - own; lane >= 0 && sum < k; ++num_bins)
          sum += bins[num_bins % kBinsPerLane];
        // A little more than the bins, so that no rounding loses a part.
        s_.guess = max_ - (static_cast<float>(num_bins) + 0.01f) / bins_per_unit;
      }
    }
    __syncthreads();
    return s_.guess;
  }

  const Plan& plan_;
  RowRef row_;
  float scale_;
  BlockStats* stats_;
  const float* part_maxima_;
  FilterScratch& s_;
  int64_t* masses_;
  int64_t* masses_above_;
  int64_t* trial_masses_;  ///< by warp
  double* weights_;
  float* maxima_;
  float max_ = kMasked;
  bool non_finite_ = false;
  bool is_of_mass_ = false;
  int64_t wanted_count_ = 0, count_ = 0, count_above_ = 0;
  double wanted_mass_ = 0.0;
  /// Whether the ids in shared memory are all of those from list_floor_ on, sorted.
  bool is_listed_ = false;
  uint32_t list_size_ = 0;
  float list_floor_ = 0.0f;
};

}  // namespace specdec_ops::cuda

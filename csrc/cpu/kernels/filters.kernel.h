// The threshold of a row with filters, and the statistics of what it leaves. Included once per tier.
//
// A pass over the row finds the largest logits of its parts of kNumLanes ids. What lies at a threshold is
// then gathered from the few parts that reach up to it, so there is no second pass unless thousands of ids
// do.

#include "cpu/kernels/rows.kernel.h"

namespace {

constexpr int kPartsPerBlock = kBlockSize / kNumLanes;
/// How often a search halves a range of logits before it halves the number of floats in it.
constexpr int kHalvingsByValue = 12;
/// Kept ids of a block from which its sum is made of a masked copy.
constexpr int kManyKept = 512;

int block_length(const ChainRun& run, int block) {
  const int64_t rest = run.params->vocab_size - static_cast<int64_t>(block) * kBlockSize;
  return rest < kBlockSize ? static_cast<int>(rest) : kBlockSize;
}

template <class T>
BlockStats part_maxima(const T* x, int rows, float* maxima) {
  NanFlag nan[kInStep];
  for (int u = 0; u < kInStep; ++u) nan[u] = no_nan();
  float largest = -__builtin_inff();
  for (int row = 0; row < rows; ++row) {
    F32 best[kInStep];
    for (int u = 0; u < kInStep; ++u) best[u] = set1(-__builtin_inff());
    for (int i = row * kNumLanes; i < (row + 1) * kNumLanes; i += kStepSize) {
      F32 values[kInStep];
      load_step(x + i, values);
      for (int u = 0; u < kInStep; ++u) {
        best[u] = max(values[u], best[u]);
        note_nan(nan[u], values[u]);
      }
    }
    maxima[row] = largest_lane(max(max(best[0], best[1]), max(best[2], best[3])));
    largest = maxima[row] > largest ? maxima[row] : largest;
  }
  bool has_nan = largest == __builtin_inff();
  for (int u = 0; u < kInStep; ++u) has_nan |= seen(nan[u]);
  return {largest, has_nan ? __builtin_nanf("") : 0.0f};
}

/// The sum of the masses of a block, whose maximum is finite.
template <class T>
int64_t block_mass(const T* x, int rows, float max, float scale) {
  const ProbsOfLogits<T> weights(x, max, scale, 1.0f);
  MassSum sum = no_mass();
  const DenormalsOff environment;
  for (int i = 0; i < rows * kNumLanes; i += kStepSize) {
    F32 values[kInStep];
    weights.step(i, values);
    for (int u = 0; u < kInStep; ++u) add_mass(sum, values[u]);
  }
  return static_cast<int64_t>(total(sum) - static_cast<uint64_t>(rows * kNumLanes) * bits_of(kMassMagic));
}

void maxima_of_block(const ChainRun& run, const Phase& phase, int block) {
  float* maxima = phase.filters->maxima + block * kPartsPerBlock;
  float padded[kBlockSize];
  visit_block(phase.row, static_cast<int64_t>(block) * kBlockSize, block_length(run, block), padded,
              [&](const auto* x, int rows) {
                const BlockStats stats = part_maxima(x, rows, maxima);
                for (int part = rows; part < kPartsPerBlock; ++part) maxima[part] = -__builtin_inff();
                phase.stats[block] = stats;
                if (!phase.weighs_blocks) return;
                const bool has_mass = stats.max > -__builtin_inff() && stats.sum == stats.sum;
                phase.filters->masses[block] = has_mass ? block_mass(x, rows, stats.max, phase.row.scale) : 0;
              });
}

void kept_mass_of_block(const ChainRun& run, const Phase& phase, int block) {
  const float max = phase.stats[block].max;
  int64_t mass = 0;
  if (max >= phase.row.threshold) {
    float padded[kBlockSize];
    mass = visit_block(phase.row, static_cast<int64_t>(block) * kBlockSize, block_length(run, block), padded,
                       [&](const auto* x, int rows) { return block_mass(x, rows, max, phase.row.scale); });
  }
  phase.filters->masses[block] = mass;
}

/// One bit for each of kChunkSize elements: whether it is at least the bound.
template <class T>
uint64_t chunk_at_least(const T* x, F32 bound) {
  static_assert(kChunkSize == 64, "one bit each");
  uint64_t mask = 0;
  for (int i = 0; i < kChunkSize; i += F32::kLanes) {
    mask |= static_cast<uint64_t>(at_least_mask(load(x + i), bound)) << i;
  }
  return mask;
}

/// Gathers up to `most` indices of what lies in [floor, below) of a block, in order; returns how many there
/// are. `maxima` are those of its parts.
template <class T>
int gather_in_block(const T* x, int rows, const float* maxima, float floor, float below, int* indices,
                    int most) {
  const F32 floors = set1(floor), ends = set1(below);
  int found = 0;
  for (int begin = 0; begin < rows * kNumLanes; begin += kChunkSize) {
    if (!(maxima[begin / kNumLanes] >= floor)) continue;
    uint64_t mask = chunk_at_least(x + begin, floors);
    if (mask == 0) continue;
    if (maxima[begin / kNumLanes] >= below) mask &= ~chunk_at_least(x + begin, ends);
    const int in_chunk = __builtin_popcountll(mask);
    for (int i = found; mask != 0 && i < most; mask &= mask - 1, ++i) {
      indices[i] = begin + __builtin_ctzll(mask);
    }
    found += in_chunk;
  }
  return found;
}

/// block_stats of what the row's threshold leaves of a block.
void kept_stats_of_block(const ChainRun& run, const Phase& phase, int block) {
  const float threshold = phase.row.threshold, largest = phase.stats[block].max, scale = phase.row.scale;
  if (!(largest >= threshold)) {
    phase.stats[block] = {-__builtin_inff(), 0.0f};
    return;
  }
  const int64_t begin = static_cast<int64_t>(block) * kBlockSize;
  const int n = block_length(run, block);
  RowRef whole = phase.row;
  whole.threshold = -__builtin_inff();
  float padded[kBlockSize];
  alignas(64) float kept[kManyKept];
  int ids[kManyKept];
  const int num_kept = visit_block(whole, begin, n, padded, [&](const auto* x, int rows) {
    const int found = gather_in_block(x, rows, phase.filters->maxima + block * kPartsPerBlock, threshold,
                                      __builtin_inff(), ids, kManyKept);
    for (int i = 0; i < found && i < kManyKept; ++i) kept[i] = to_float(x[ids[i]]);
    return found;
  });
  if (num_kept > kManyKept) {
    phase.stats[block] = visit_block(phase.row, begin, n, padded, [&](const auto* x, int rows) {
      return block_stats(x, rows, scale, static_cast<decltype(x)>(nullptr));
    });
    return;
  }
  // Weights of 0 change no sum, so those that are kept are added alone.
  for (int i = num_kept; i % kStepSize != 0; ++i) kept[i] = largest;
  const Exp2 exp2(largest, scale);
  alignas(64) float lanes[kNumLanes] = {};
  {
    const DenormalsOff environment;
    for (int i = 0; i < num_kept; i += kStepSize) {
      F32 values[kInStep], polynomial[kInStep], power[kInStep];
      for (int u = 0; u < kInStep; ++u) values[u] = load(kept + i + u * F32::kLanes);
      exp2.factors(values, polynomial, power);
      float polynomials[kStepSize], powers[kStepSize];
      for (int u = 0; u < kInStep; ++u) {
        store(polynomials + u * F32::kLanes, polynomial[u]);
        store(powers + u * F32::kLanes, power[u]);
      }
      for (int j = 0; j < kStepSize && i + j < num_kept; ++j) {
        float& lane = lanes[ids[i + j] % kNumLanes];
        lane = fma32(polynomials[j], powers[j], lane);
      }
    }
  }
  phase.stats[block] = {largest, tree_sum(lanes)};
}

/// Gathers the ids of a row in [floor, below), at most kMostCandidates of them; returns how many there are.
int64_t gather(const ChainRun& run, const Phase& phase, float floor, float below) {
  Candidate* candidates = phase.filters->candidates;
  int64_t found = 0;
  for (int block = 0; block < run.num_blocks; ++block) {
    if (!(phase.stats[block].max >= floor)) continue;
    const int room = found < kMostCandidates ? static_cast<int>(kMostCandidates - found) : 0;
    float padded[kBlockSize];
    found += visit_block(phase.row, static_cast<int64_t>(block) * kBlockSize, block_length(run, block),
                         padded, [&](const auto* x, int rows) {
                           int indices[kBlockSize];
                           const int in_block =
                               gather_in_block(x, rows, phase.filters->maxima + block * kPartsPerBlock, floor,
                                               below, indices, room);
                           for (int i = 0; i < in_block && i < room; ++i) {
                             candidates[found + i] = {0, to_float(x[indices[i]]), block};
                           }
                           return in_block;
                         });
  }
  return found;
}

/// Whether a row has `wanted` ids from a value on.
struct Count {
  int64_t wanted;
  int64_t count = 0;
  int64_t count_above = 0;

  explicit Count(int64_t k) : wanted(k) {}
  bool holds() const { return count >= wanted; }
  void add(const Candidate&) { ++count; }
  void take_away(const Candidate&) { --count; }
  void put_aside() { count_above = count; }
  void take_back() { count = count_above; }
  void add_all(const Phase&, int64_t found, float) { count += found; }
};

/// Whether the ids of a row from a value on have a mass of `wanted`.
template <class MassesAtLeast>
struct Mass {
  const FilterScratch& scratch;
  int num_blocks;
  const MassesAtLeast& masses_at_least;
  double wanted = 0.0;

  Mass(const FilterScratch& filters, int blocks, const MassesAtLeast& pass)
      : scratch(filters), num_blocks(blocks), masses_at_least(pass) {}
  void clear() { memset(scratch.masses, 0, static_cast<size_t>(num_blocks) * sizeof(int64_t)); }
  double sum() const { return mass_of_row(scratch.masses, scratch.weights, num_blocks); }
  bool holds() const { return sum() >= wanted; }
  void add(const Candidate& id) { scratch.masses[id.block] += id.mass; }
  void take_away(const Candidate& id) { scratch.masses[id.block] -= id.mass; }
  void put_aside() {
    memcpy(scratch.masses_above, scratch.masses, static_cast<size_t>(num_blocks) * sizeof(int64_t));
  }
  void take_back() {
    memcpy(scratch.masses, scratch.masses_above, static_cast<size_t>(num_blocks) * sizeof(int64_t));
  }
  /// Those that were gathered from `floor` on; by a pass if they are too many.
  void add_all(const Phase& phase, int64_t found, float floor) {
    if (found > kMostCandidates) return masses_at_least(floor);
    for (int64_t i = 0; i < found; ++i) {
      Candidate& id = scratch.candidates[i];
      id.mass = mass_of(id.value, phase.stats[id.block].max, phase.row.scale);
      add(id);
    }
  }
};

void swap(Candidate& a, Candidate& b) {
  const Candidate kept = a;
  a = b;
  b = kept;
}

/// The largest value for which the measure holds once all candidates from it on are added. It does not hold
/// yet, and does for all of them. Sorts them by halves (quickselect).
template <class Measure>
float largest_that_holds(Candidate* ids, int64_t count, Measure& measure) {
  for (;;) {
    const float pivot = ids[count / 2].value;
    int64_t above = 0, end = count;
    for (int64_t i = 0; i < end;) {
      if (ids[i].value > pivot) {
        swap(ids[i++], ids[above++]);
      } else if (ids[i].value < pivot) {
        swap(ids[i], ids[--end]);
      } else {
        ++i;
      }
    }
    for (int64_t i = 0; i < above; ++i) measure.add(ids[i]);
    if (measure.holds()) {
      for (int64_t i = 0; i < above; ++i) measure.take_away(ids[i]);
      count = above;
      continue;
    }
    for (int64_t i = above; i < end; ++i) measure.add(ids[i]);
    if (end == count || measure.holds()) return pivot;
    ids += end;
    count -= end;
  }
}

/// The largest logit of a row for which the measure holds once all ids from it on are added; -inf if there is
/// none at or above `lowest`. The first guess is `probe`.
template <class Measure>
float search(const ChainRun& run, const Phase& phase, float max, float lowest, float probe,
             Measure& measure) {
  bool at_lowest_holds = false;
  int halvings = 0;
  float below = after(max);
  const float step = 8.0f / phase.row.scale;
  for (probe = probe > lowest ? probe : lowest;;) {
    measure.put_aside();
    const int64_t found = gather(run, phase, probe, below);
    measure.add_all(phase, found, probe);
    if (measure.holds()) {
      measure.take_back();
      if (found <= kMostCandidates) return largest_that_holds(phase.filters->candidates, found, measure);
      lowest = probe;
      at_lowest_holds = true;
    } else {
      if (probe == lowest) return -__builtin_inff();
      below = probe;
    }
    if (at_lowest_holds) {
      // By value at first, since halves of the floats of either sign are next to 0.
      const double middle = 0.5 * (static_cast<double>(lowest) + static_cast<double>(below));
      probe = static_cast<float>(middle);
      if (++halvings > kHalvingsByValue || !(probe > lowest && probe < below)) probe = between(lowest, below);
      // No float in between: all of these ids have one logit.
      if (probe == lowest) return lowest;
    } else {
      const float distance = 1.5f * (max - below);
      const float lower = max - (distance > step ? distance : step);
      probe = lower < below && lower > lowest ? lower : lowest;
    }
  }
}

/// A lower bound of the k-th largest logit, with few ids above it.
float guess_of_top_k(const ChainRun& run, const Phase& phase, float max, int64_t k) {
  const int num_parts = run.num_blocks * kPartsPerBlock;
  Candidate* candidates = phase.filters->candidates;
  int64_t count = 0;
  for (int part = 0; part < num_parts && num_parts <= kMostCandidates; ++part) {
    const float value = phase.filters->maxima[part];
    if (value > -__builtin_inff()) candidates[count++] = {0, value, 0};
  }
  Count at_least(k);
  if (count >= k) return largest_that_holds(candidates, count, at_least);
  return run.params->vocab_size <= kMostCandidates ? -__builtin_inff() : max - 8.0f / phase.row.scale;
}

/// The threshold of a row by its filters. The row is finite and has an id that is not masked; the phase has
/// left maxima, and masses if top-p is of the whole row.
template <class MassesAtLeast>
float find_threshold(const ChainRun& run, const Phase& phase, float max, const Filters& filters, bool joint,
                     const MassesAtLeast& masses_at_least) {
  constexpr float kLowest = -__FLT_MAX__;
  float threshold = -__builtin_inff();
  const auto lowest = [&] { return threshold > kLowest ? threshold : kLowest; };
  const auto raise = [&](float other) { threshold = other > threshold ? other : threshold; };
  if (filters.min_p > 0.0) raise(min_p_threshold(max, phase.row.scale, filters.min_p));
  if (filters.top_k > 0) {
    Count at_least(filters.top_k);
    raise(search(run, phase, max, lowest(), guess_of_top_k(run, phase, max, filters.top_k), at_least));
  }
  if (!(filters.top_p < 1.0)) return threshold + 0.0f;

  for (int block = 0; block < run.num_blocks; ++block) {
    phase.filters->weights[block] = block_weight(phase.stats[block], max, phase.row.scale);
  }
  Mass<MassesAtLeast> at_least(*phase.filters, run.num_blocks, masses_at_least);
  float guess = max;
  if (!filters.weighs_whole_row(joint)) {
    const int64_t found = gather(run, phase, lowest(), after(max));
    at_least.clear();
    at_least.add_all(phase, found, lowest());
    if (found <= kMostCandidates) guess = lowest();
  }
  at_least.wanted = filters.top_p * at_least.sum();
  at_least.clear();
  raise(at_least.wanted > 0.0 ? search(run, phase, max, lowest(), guess, at_least) : max);
  // One bit pattern for both zeros.
  return threshold + 0.0f;
}

}  // namespace

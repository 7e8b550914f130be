#pragma once

#include <atomic>
#include <cstdint>

#include "common/fly.h"
#include "common/gumbel.h"
#include "common/support_law.h"
#include "cpu/kernels/chain.h"
#include "cpu/kernels/row_ref.h"

/// What the workers of one run_chain call share. Compiled for the baseline; the tiers only use it.
namespace specdec_ops::cpu {

/// An id that may lie at the threshold of a row.
struct Candidate {
  int64_t mass;
  float value;
  int32_t block;
};

/// How many of them are looked at at once.
constexpr int kMostCandidates = kBlockSize;

/// What a worker needs to find the threshold of a row.
struct FilterScratch {
  /// Largest logits of kNumLanes ids each, of whole blocks.
  float* maxima = nullptr;
  /// By block: masses of ids from a threshold on.
  int64_t* masses = nullptr;
  /// The same, put aside.
  int64_t* masses_above = nullptr;
  /// By block: what its masses count for in the row's.
  double* weights = nullptr;
  Candidate* candidates = nullptr;
};

/// One pass over the blocks of a row (or of a target and a draft row).
struct Phase {
  enum Kind : int32_t {
    /// Largest logit and whether the row is finite.
    kArgmax,
    /// The same and the sum of the weights.
    kStats,
    /// Mass of max(p - q, 0) by block.
    kResidual,
    /// The largest score with Gumbel noise, and the lowest index that has it, in `stats`.
    kScores,
    /// Of a row with filters: kArgmax and the largest logits of parts of blocks; masses too, if asked for.
    kMaxima,
    /// Then the masses of what the row's threshold leaves.
    kKeptMasses,
    /// Then, in place of kMaxima's statistics, kStats of what the row's threshold leaves.
    kKeptStats,
  };
  Kind kind = kArgmax;
  RowRef row;
  BlockStats* stats = nullptr;
  /// Where there are filters.
  const FilterScratch* filters = nullptr;
  bool weighs_blocks = false;
  /// Of the residual only.
  RowLaw law{};
  RowRef draft_row;
  RowLaw draft_law{};
  /// Null where the law came from a given logsumexp, or as probabilities.
  const BlockStats* draft_stats = nullptr;
  double* masses = nullptr;
  /// Of the scores only: the noise, and the largest logit.
  NoiseKey noise{};
  float reference = 0.0f;
};

/// A draft that block verification has read.
struct BlockSlot {
  /// Its row, and what the residual needs of its draft row.
  Phase target;
  int64_t x;
  double coin, p;
  /// P: how probable it is that all drafts up to this one are accepted.
  double chance;
  bool one_hot, is_unusable;
};

/// A run of blocks.
struct Blocks {
  int begin = 0;
  int end = 0;

  bool empty() const { return begin >= end; }
};

/// A worker's place: the phase it is in and the blocks of it that are still to be had. The owner
/// takes blocks from the front and helpers take them from the back, in runs that shrink towards the
/// end, so that each reads memory in order and all are done at about the same time.
struct alignas(64) Lane {
  /// Phase number (24 bits), end and begin of the blocks that nobody took (20 bits each).
  std::atomic<uint64_t> ticket{0};
  std::atomic<int32_t> unfinished{0};
  Phase phase;
  BlockStats* target_stats = nullptr;
  BlockStats* draft_stats = nullptr;
  double* masses = nullptr;
  /// Of block verification: a place for each slot, with the statistics of its target and its draft row.
  BlockSlot* slots = nullptr;
  BlockStats* stats_by_slot = nullptr;
  FilterScratch filters;

  void publish(const Phase& next, int num_blocks) {
    phase = next;
    unfinished.store(num_blocks, std::memory_order_relaxed);
    const uint64_t number = (ticket.load(std::memory_order_relaxed) >> 40) + 1;
    ticket.store(number << 40 | static_cast<uint64_t>(num_blocks) << 20, std::memory_order_release);
  }

  Blocks claim(int num_workers, bool from_front) {
    constexpr int kMask = (1 << 20) - 1;
    uint64_t seen = ticket.load(std::memory_order_acquire);
    for (;;) {
      const int begin = static_cast<int>(seen) & kMask;
      const int end = static_cast<int>(seen >> 20) & kMask;
      if (begin >= end) return {};
      const int run = 1 + (end - begin - 1) / (2 * num_workers);
      const uint64_t rest =
          from_front ? seen + static_cast<uint64_t>(run) : seen - (static_cast<uint64_t>(run) << 20);
      // The phase cannot change while a block of it is unfinished, so a claimed run is safe to take.
      if (ticket.compare_exchange_weak(seen, rest, std::memory_order_acq_rel, std::memory_order_acquire)) {
        return from_front ? Blocks{begin, begin + run} : Blocks{end - run, end};
      }
    }
  }

  void finish(Blocks blocks) { unfinished.fetch_sub(blocks.end - blocks.begin, std::memory_order_acq_rel); }
  void wait();
};

struct ChainRun;
/// Takes requests while there are any, then helps the other workers with theirs. One per tier.
using RunWorker = void (*)(ChainRun& run, int worker);

struct ChainRun {
  const ChainParams* params = nullptr;
  RunWorker run_worker = nullptr;
  Lane* lanes = nullptr;
  int num_workers = 1;
  int num_blocks = 0;
  alignas(64) std::atomic<int64_t> next_request{0};
  alignas(64) std::atomic<int64_t> unfinished_requests{0};
};

/// run_chain with a given tier.
void run_chain_with(RunWorker run_worker, const ChainParams& params, void* workspace, int num_workers,
                    ParallelFor parallel_for);

/// Gives way to the other hyper-thread, and after a while to other threads.
void relax(int* spins);

}  // namespace specdec_ops::cpu

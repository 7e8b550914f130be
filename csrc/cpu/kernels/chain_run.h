#pragma once

#include <atomic>
#include <cstdint>

#include "cpu/kernels/chain.h"

/// What the workers of one run_chain call share. Compiled for the baseline; the tiers only use it.
namespace specdec_ops::cpu {

struct RowRef {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  float scale = 0.0f;
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
  };
  Kind kind = kArgmax;
  RowRef row;
  BlockStats* stats = nullptr;
  /// Of the residual only.
  RowLaw law{};
  RowRef draft_row;
  RowLaw draft_law{};
  /// Null where the law came from a given logsumexp, or as probabilities.
  const BlockStats* draft_stats = nullptr;
  double* masses = nullptr;
};

/// A worker's place: the phase it is in and the units of it that are still to be had. The owner
/// takes units from the front and helpers take them from the back, so that each reads a run of memory.
struct alignas(64) Lane {
  /// Phase number (32 bits), end and begin of the units that nobody took (16 bits each).
  std::atomic<uint64_t> ticket{0};
  std::atomic<int32_t> unfinished{0};
  Phase phase;
  BlockStats* target_stats = nullptr;
  BlockStats* draft_stats = nullptr;
  double* masses = nullptr;

  void publish(const Phase& next, int num_units) {
    phase = next;
    unfinished.store(num_units, std::memory_order_relaxed);
    const uint64_t number = (ticket.load(std::memory_order_relaxed) >> 32) + 1;
    ticket.store(number << 32 | static_cast<uint64_t>(num_units) << 16, std::memory_order_release);
  }

  int claim(bool from_front) {
    uint64_t seen = ticket.load(std::memory_order_acquire);
    for (;;) {
      const int begin = static_cast<int>(seen & 0xFFFF);
      const int end = static_cast<int>(seen >> 16 & 0xFFFF);
      if (begin >= end) return -1;
      const uint64_t rest = from_front ? seen + 1 : seen - 0x10000;
      // The phase cannot change while a unit of it is unfinished, so a claimed unit is safe to run.
      if (ticket.compare_exchange_weak(seen, rest, std::memory_order_acq_rel, std::memory_order_acquire)) {
        return from_front ? begin : end - 1;
      }
    }
  }

  void finish_unit() { unfinished.fetch_sub(1, std::memory_order_acq_rel); }
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
  int blocks_per_unit = 1;
  int num_units = 0;
  alignas(64) std::atomic<int64_t> next_request{0};
  alignas(64) std::atomic<int64_t> unfinished_requests{0};
};

/// run_chain with a given tier.
void run_chain_with(RunWorker run_worker, const ChainParams& params, void* workspace, int num_workers,
                    ParallelFor parallel_for);

/// Gives way to the other hyper-thread, and after a while to other threads.
void relax(int* spins);

}  // namespace specdec_ops::cpu

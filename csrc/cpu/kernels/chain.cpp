#include "cpu/kernels/chain.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <thread>
#include <type_traits>

#include "common/cutter.h"
#include "cpu/kernels/chain_run.h"
#include "cpu/kernels/float_environment.h"
#include "cpu/kernels/isa.h"

#define SPECDEC_KERNEL "cpu/kernels/chain.kernel.h"
#include "cpu/kernels/foreach_isa.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace specdec_ops::cpu {
namespace {

/// Elements that repay waking another thread.
constexpr int64_t kElementsPerWorker = 32768;

RunWorker worker_of_current_isa() {
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return avx512::run_worker;
    case Isa::kAvx2:
      return avx2::run_worker;
#endif
    default:
      return scalar::run_worker;
  }
}

int num_blocks_of(const ChainParams& params) {
  return static_cast<int>((params.vocab_size + kBlockSize - 1) / kBlockSize);
}

/// Slots that have a place of their own.
int64_t num_places(const ChainParams& params) { return params.rule == Rule::kBlock ? params.width : 0; }

/// Gives a lane its arrays; returns the bytes that they take.
size_t lay_out(const ChainParams& params, char* memory, Lane* lane) {
  const int64_t num_blocks = num_blocks_of(params), places = num_places(params);
  Cutter<64> cutter(memory);
  lane->masses = cutter.take<double>(num_blocks);
  lane->target_stats = cutter.take<BlockStats>(num_blocks);
  lane->draft_stats = cutter.take<BlockStats>(num_blocks);
  lane->slots = cutter.take<BlockSlot>(places);
  lane->stats_by_slot = cutter.take<BlockStats>(2 * places * num_blocks);
  if (params.filters || params.draft_filters || params.law_size > 0) {
    lane->filters.maxima = cutter.take<float>(num_blocks * (kBlockSize / kNumLanes));
    lane->filters.masses = cutter.take<int64_t>(num_blocks);
    lane->filters.masses_above = cutter.take<int64_t>(num_blocks);
    lane->filters.weights = cutter.take<double>(num_blocks);
    lane->filters.candidates = cutter.take<Candidate>(kMostCandidates);
  }
  return cutter.size();
}

size_t lane_memory(const ChainParams& params) {
  Lane lane;
  return lay_out(params, nullptr, &lane);
}

}  // namespace

void relax(int* spins) {
#if defined(__x86_64__)
  _mm_pause();
#endif
  if (++*spins > 4096) std::this_thread::yield();
}

void Lane::wait() {
  for (int spins = 0; unfinished.load(std::memory_order_acquire) > 0;) relax(&spins);
}

int chain_num_workers(const ChainParams& params, int max_workers) {
  // Two rows a request, as most are decided by then.
  const int64_t work = params.batch * params.vocab_size * 2;
  return static_cast<int>(std::clamp<int64_t>(work / kElementsPerWorker, 1, std::max(max_workers, 1)));
}

size_t chain_workspace_size(const ChainParams& params, int num_workers) {
  return static_cast<size_t>(num_workers) * (sizeof(Lane) + lane_memory(params));
}

void run_chain(const ChainParams& params, void* workspace, int num_workers, ParallelFor parallel_for) {
  run_chain_with(worker_of_current_isa(), params, workspace, num_workers, parallel_for);
}

void run_chain_with(RunWorker run_worker, const ChainParams& params, void* workspace, int num_workers,
                    ParallelFor parallel_for) {
  ChainRun run;
  run.params = &params;
  run.run_worker = run_worker;
  run.num_workers = num_workers;
  run.num_blocks = num_blocks_of(params);
  run.unfinished_requests.store(params.batch, std::memory_order_relaxed);
  run.lanes = static_cast<Lane*>(workspace);
  char* memory = static_cast<char*>(workspace) + static_cast<size_t>(num_workers) * sizeof(Lane);
  for (int worker = 0; worker < num_workers; ++worker) {
    Lane* lane = new (run.lanes + worker) Lane;
    memory += lay_out(params, memory, lane);
  }
  const auto task = [](void* context, int worker) {
    const DenormalsOn environment;
    ChainRun& shared = *static_cast<ChainRun*>(context);
    shared.run_worker(shared, worker);
  };
  if (num_workers == 1) return task(&run, 0);
  parallel_for(num_workers, task, &run);
}

}  // namespace specdec_ops::cpu

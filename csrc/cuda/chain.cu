// The chain program as one kernel.
//
// Work is cut into units, a CTA each: a few blocks of one row. They start in the order of their slots, those
// of all requests abreast. The CTA that finishes the last unit of a wave (a few neighbouring slots of a
// request) judges it, while the others go on reading. A unit whose request is decided by then returns at
// once: so most rows behind a rejected draft are not read, and nobody ever waits for a verdict. With FLy,
// where a verdict depends on those of later drafts, all slots are one wave.
//
// A residual that is to be made is queued. The CTA that queued it makes it, and the last CTAs of the launch,
// which have nothing to read, help. Their patience is limited: they are not needed for progress, whatever the
// order in which CTAs start.

#include "cuda/chain.h"

#include <algorithm>
#include <mutex>

#include "cuda/judge.cuh"

namespace specdec_ops::cuda {
namespace {

/// With more the compiler spills what judges need.
constexpr int kCtasPerMultiprocessor = 3;
constexpr int kMostBlocksPerWarp = 2;
/// Units that each warp of the device should get at least.
constexpr int kLeastRounds = 3;
/// How many blocks a warp may read before its wave is judged.
constexpr int kRoundsPerWave = 3;
/// How often a CTA that helps with residuals looks for one in vain: some 100 us.
constexpr int kPatience = 500;

/// What a CTA reads: a few blocks of a row of one slot.
struct Unit {
  uint32_t request;
  int slot, unit;
  bool is_draft;

  __device__ static Unit of(const Plan& plan, uint32_t number) {
    const uint32_t kinds = plan.reads_draft_rows ? 2 : 1;
    const uint32_t row = number / static_cast<uint32_t>(plan.units_per_row);
    const auto batch = static_cast<uint32_t>(plan.params.batch);
    const uint32_t slot = row / kinds / batch;
    return {row / kinds - slot * batch, static_cast<int>(slot),
            static_cast<int>(number - row * static_cast<uint32_t>(plan.units_per_row)), row % kinds != 0};
  }
};

/// Slots that somebody reads. A request without any row (no drafts, and its bonus token is given) has one all
/// the same: somebody must judge it.
__device__ __forceinline__ int num_read_slots(const Plan& plan, const Request& request) {
  return max(static_cast<int>(request.num_slots(plan.params)), 1);
}

/// Units that a wave waits for.
__device__ __forceinline__ uint32_t expected_units(const Plan& plan, const Request& request, int wave) {
  const int begin = wave * plan.slots_per_wave, end = begin + plan.slots_per_wave;
  int rows = min(end, num_read_slots(plan, request)) - begin;
  if (plan.reads_draft_rows) rows += max(min(end, static_cast<int>(request.num_drafts)) - begin, 0);
  return static_cast<uint32_t>(rows * plan.units_per_row);
}

/// The mass of max(p - q, 0) in one block, NaN if the draft law is not usable there.
__device__ __noinline__ float residual_mass(const Plan& plan, const Request& request, int64_t slot, int block,
                                            uint4* stage, uint4* draft_stage) {
  const ChainParams& params = plan.params;
  const int64_t row = request.first_row + slot, draft = request.first_draft + slot;
  const BlockRef target_block = block_of(params, row_of(params.target, row), block);
  const BlockRef draft_block = block_of(params, row_of(params.draft, draft), block);
  const float target_max = load_stats(plan.target_stats + row * plan.num_blocks + block).max;
  fetch_block(target_block, stage);
  const WeightsOfLogits target =
      probs_of_block(target_block, stage, load_law(plan.laws + 2 * request.index), target_max);
  if (params.draft_law == DraftLawKind::kProbs) {
    return sum_in_lanes(Residual<GivenProbs>{target, {draft_block}}, target_block.rows());
  }
  const float draft_max = plan.reads_draft_rows
                              ? load_stats(plan.draft_stats + draft * plan.num_blocks + block).max
                              : block_max(draft_block);
  fetch_block(draft_block, draft_stage);
  const WeightsOfLogits draft_probs =
      probs_of_block(draft_block, draft_stage, load_law(plan.laws + 2 * request.index + 1), draft_max);
  return sum_in_lanes(Residual<WeightsOfLogits>{target, draft_probs}, target_block.rows());
}

/// A unit of a residual. Each block takes the shared memory of two warps.
__device__ __forceinline__ void run_residual_unit(const Plan& plan, const Request& request, int slot,
                                                  int unit, uint4* stage) {
  constexpr int kWarps = kWarpsPerCta / 2;
  if (warp_index() >= kWarps) return;
#pragma unroll 1
  for (int i = warp_index(); i < plan.blocks_per_warp * kWarpsPerCta; i += kWarps) {
    const int block = unit * plan.blocks_per_warp * kWarpsPerCta + i;
    if (block >= plan.num_blocks) return;
    const float mass = residual_mass(plan, request, slot, block, stage, stage + kWarps * plan.stage_words);
    if (lane_index() == 0) plan.masses[request.index * plan.num_blocks + block] = mass;
  }
}

/// A unit of a row of logits: a warp to a block. Completes the request.
__device__ __forceinline__ void run_unit(const Plan& plan, Request& request, const Unit& unit, uint4* stage) {
  int block = unit.unit * plan.blocks_per_warp * kWarpsPerCta + warp_index();
  const int end = min(block + plan.blocks_per_warp * kWarpsPerCta, plan.num_blocks);
  // A law that is not asked for, or a request without rows: the unit only arrives.
  const bool is_read = block < end && (unit.is_draft ? request.has_law && !request.greedy
                                                     : request.num_slots(plan.params) > 0);
  const int64_t row = (unit.is_draft ? request.first_draft : request.first_row) + unit.slot;
  const RowRef row_ref = row_of(unit.is_draft ? plan.params.draft : plan.params.target, row);
  BlockStats* stats_of_row = (unit.is_draft ? plan.draft_stats : plan.target_stats) + row * plan.num_blocks;
  if (is_read) stage_block(block_of(plan.params, row_ref, block), stage);
  request.find_scales();
  if (!is_read) return;
  const float scale = unit.is_draft ? request.draft_scale : request.scale;
  // A draft's probability is only compared: digits that settle nothing send the judge back to its row.
  const Sum of_target = needs_law(plan.params, request) ? Sum::kDefined : Sum::kNone;
  const Sum sum = !unit.is_draft ? of_target : plan.may_be_quick ? Sum::kQuick : Sum::kDefined;
  for (;;) {
    wait_for_copies();
    const BlockStats stats = block_stats(block_of(plan.params, row_ref, block), scale, sum, stage);
    if (lane_index() == 0)
      *reinterpret_cast<float2*>(stats_of_row + block) = make_float2(stats.max, stats.sum);
    block += kWarpsPerCta;
    if (block >= end) return;
    stage_block(block_of(plan.params, row_ref, block), stage);
  }
}

/// In every thread: whether a counter reaches `expected` with this CTA. What CTAs wrote before they arrived
/// is then visible.
__device__ __forceinline__ bool arrives_last(uint32_t* counter, uint32_t expected) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) is_last = add_acq_rel(counter, 1) + 1 == expected;
  __syncthreads();
  return is_last;
}

/// A unit of a queued residual that nobody has taken; false where there is none.
__device__ __forceinline__ bool take_residual_unit(const Plan& plan, uint64_t* entry, int* unit) {
  const auto units = static_cast<unsigned long long>(plan.units_per_row);
  volatile Counters* counters = plan.counters;
  unsigned long long next = counters->next_residual_unit;
  while (next < counters->num_queued * units) {
    const unsigned long long seen = atomicCAS(&plan.counters->next_residual_unit, next, next + 1);
    if (seen == next) {
      // Its place was taken before the entry was written.
      while ((*entry = load_acquire(plan.queue + next / units)) == 0) {
      }
      *unit = static_cast<int>(next % units);
      return true;
    }
    next = seen;
  }
  return false;
}

/// Makes residuals while there are any; `patience`: how often to look again where there are none and requests
/// are undecided.
template <bool kLooksAhead>
__device__ __noinline__ void make_residuals(const Plan& plan, int patience, uint4* stage, Scratch& scratch) {
  __shared__ uint64_t entry;
  __shared__ int unit;
  __shared__ bool is_taken;
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) {
      is_taken = take_residual_unit(plan, &entry, &unit);
      const volatile uint32_t* num_finished = &plan.counters->num_finished;
      for (; !is_taken && patience > 0 && *num_finished < plan.params.batch; --patience) {
        __nanosleep(200);
        is_taken = take_residual_unit(plan, &entry, &unit);
      }
    }
    __syncthreads();
    if (!is_taken) return;
    Request request = Request::load(plan.params, static_cast<int64_t>(entry >> 32) - 1);
    request.find_scales();
    const auto slot = static_cast<int>(entry & 0xFFFFFFFF);
    run_residual_unit(plan, request, slot, unit, stage);
    if (!arrives_last(&plan.states[request.index].num_residual_units,
                      static_cast<uint32_t>(plan.units_per_row)))
      continue;
    Judge<kLooksAhead>(plan, request, stage, scratch, reinterpret_cast<double*>(&scratch + 1))
        .run_residual(slot);
  }
}

/// Judges the waves of a request that are read, `wave` the last to become so. One CTA at a time does: one
/// that finds another at it leaves its wave to that one.
template <bool kLooksAhead>
__device__ __forceinline__ Judgement judge_waves(const Plan& plan, const Request& request, int wave,
                                                 uint4* stage, Scratch& scratch) {
  __shared__ int begin_slot, end_slot;
  unsigned long long* state = &plan.states[request.index].progress;
  unsigned long long word = Progress::read(wave) | Progress::kIsJudged;
  int next = 0;
  bool is_mine = true;
  if (threadIdx.x == 0 && plan.num_waves > 1) {
    const unsigned long long before = or_acq_rel(state, word);
    is_mine = (before & Progress::kIsJudged) == 0;
    next = Progress::next_wave(before);
    word |= before;
  }
  for (;;) {
    if (threadIdx.x == 0) {
      while (is_mine && Progress::end_wave(word, next) == next) {
        const unsigned long long now = cas_acq_rel(state, word, Progress::released(word, next));
        is_mine = now != word;
        word = now;
      }
      begin_slot = is_mine ? next * plan.slots_per_wave : -1;
      next = Progress::end_wave(word, next);
      end_slot = next * plan.slots_per_wave;
    }
    __syncthreads();
    if (begin_slot < 0) return Judgement::kGoesOn;
    const int end = min(end_slot, static_cast<int>(request.num_slots(plan.params)));
    int begin = begin_slot;
    do {
      const Judgement judgement =
          Judge<kLooksAhead>(plan, request, stage, scratch, reinterpret_cast<double*>(&scratch + 1))
              .run(begin, kLooksAhead ? end : min(begin + kLargestWave, end));
      if (judgement != Judgement::kGoesOn) return judgement;
      __syncthreads();
      begin += kLargestWave;
    } while (begin < end);
  }
}

__global__ void __launch_bounds__(kCtaSize) clear_workspace(uint4* words, int64_t num_words) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kCtaSize;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kCtaSize + threadIdx.x; i < num_words; i += stride) {
    words[i] = make_uint4(0, 0, 0, 0);
  }
}

template <bool kLooksAhead>
__global__ void __launch_bounds__(kCtaSize, kCtasPerMultiprocessor)
    run_chain(const __grid_constant__ Plan plan) {
  extern __shared__ uint4 shared[];
  uint4* stage = shared + warp_index() * plan.stage_words;
  Scratch& scratch = *reinterpret_cast<Scratch*>(shared + kWarpsPerCta * plan.stage_words);
  if (blockIdx.x < plan.num_units) {
    const Unit unit = Unit::of(plan, blockIdx.x);
    const bool is_first_wave = unit.slot < plan.slots_per_wave;
    if (!is_first_wave) wait_for_cleared_workspace();
    Request request = Request::load(plan.params, unit.request,
                                    is_first_wave ? nullptr : &plan.states[unit.request].decided);
    if (unit.slot >= (unit.is_draft ? request.num_drafts : num_read_slots(plan, request))) return;
    if (!is_first_wave && __syncthreads_or(request.decided)) return;
    run_unit(plan, request, unit, stage);
    wait_for_cleared_workspace();
    const int wave = unit.slot / plan.slots_per_wave;
    if (!arrives_last(plan.arrived + request.index * plan.num_waves + wave,
                      expected_units(plan, request, wave)))
      return;
    const Judgement judgement = judge_waves<kLooksAhead>(plan, request, wave, stage, scratch);
    if (judgement != Judgement::kNeedsResidual) return;
  } else {
    wait_for_cleared_workspace();
  }
  const bool is_helper = blockIdx.x >= plan.num_units;
  make_residuals<kLooksAhead>(plan, is_helper ? kPatience : 0, stage, scratch);
}

// ---- Host ----

int64_t num_target_rows(const ChainParams& params) {
  return params.num_drafts + (params.has_bonus_rows ? params.batch : 0);
}

bool has_dense_law(const ChainParams& params) {
  return params.draft_law == DraftLawKind::kLogits || params.draft_law == DraftLawKind::kProbs;
}

/// Slots of a request of which somebody reads a row, at least one.
int64_t most_slots(const ChainParams& params) {
  return std::max<int64_t>(params.width - (params.bonus_token_ids ? 1 : 0), 1);
}

/// Cuts a workspace into its parts; the sum of their sizes where there is none yet.
class Cutter {
 public:
  explicit Cutter(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  T* take(int64_t count) {
    char* part = memory_ == nullptr ? nullptr : memory_ + size_;
    size_ += (static_cast<size_t>(count) * sizeof(T) + 15) / 16 * 16;
    return reinterpret_cast<T*>(part);
  }
  size_t size() const { return size_; }

 private:
  char* memory_;
  size_t size_ = 0;
};

struct Layout {
  /// What is cleared before each call.
  size_t cleared;
  size_t size;
};

Layout lay_out(Plan& plan, void* workspace) {
  const ChainParams& params = plan.params;
  const int64_t rows = num_target_rows(params);
  const int64_t draft_rows = plan.reads_draft_rows ? params.num_drafts : 0;
  const int64_t residuals = has_dense_law(params) ? params.batch : 0;
  Cutter cutter(workspace);
  plan.counters = cutter.take<Counters>(1);
  plan.states = cutter.take<RequestState>(params.batch);
  plan.arrived = cutter.take<uint32_t>(params.batch * most_slots(params));
  plan.queue = cutter.take<uint64_t>(residuals);
  const size_t cleared = cutter.size();
  plan.target_stats = cutter.take<BlockStats>(rows * plan.num_blocks);
  plan.draft_stats = cutter.take<BlockStats>(draft_rows * plan.num_blocks);
  plan.laws = cutter.take<RowLaw>(2 * residuals);
  plan.masses = cutter.take<float>(residuals * plan.num_blocks);
  return {cleared, cutter.size()};
}

Plan plan_of(const ChainParams& params) {
  Plan plan = {};
  plan.params = params;
  plan.num_blocks = static_cast<int>((params.vocab_size + kBlockSize - 1) / kBlockSize);
  plan.reads_draft_rows = params.draft_law == DraftLawKind::kLogits && !params.draft_logsumexp;
  plan.may_be_quick =
      params.logsumexp == nullptr && params.logprobs == nullptr && params.accept_probs == nullptr &&
      !params.final_uniforms && params.fly_window_size == 0 && plan.num_blocks <= kBlocksAtOnce &&
      (params.draft_law == DraftLawKind::kOneHot || params.draft_law == DraftLawKind::kLogits);
  return plan;
}

/// What a launch needs to know of a device, asked for once.
struct DeviceFacts {
  cudaError_t error = cudaSuccess;
  int num_multiprocessors = 1;
  /// Bytes of shared memory that a CTA may ask for.
  size_t dynamic_shared = 0;
  bool has_programmatic_launch = false;
};

DeviceFacts ask_device(int device) {
  DeviceFacts facts;
  int major = 0, shared = 0;
  const auto ask = [&](int* value, cudaDeviceAttr attribute) {
    const cudaError_t error = cudaDeviceGetAttribute(value, attribute, device);
    if (facts.error == cudaSuccess) facts.error = error;
  };
  ask(&facts.num_multiprocessors, cudaDevAttrMultiProcessorCount);
  ask(&major, cudaDevAttrComputeCapabilityMajor);
  ask(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  facts.has_programmatic_launch = major >= 9;
  if (facts.error != cudaSuccess) return facts;
  facts.dynamic_shared = static_cast<size_t>(shared - kStaticShared);
  for (auto* kernel : {run_chain<false>, run_chain<true>}) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared - kStaticShared);
    if (facts.error == cudaSuccess) facts.error = error;
  }
  return facts;
}

const DeviceFacts& facts_of(int device) {
  constexpr int kMostDevices = 64;
  static std::once_flag asked[kMostDevices];
  static DeviceFacts facts[kMostDevices];
  const int index = device % kMostDevices;
  std::call_once(asked[index], [&] { facts[index] = ask_device(device); });
  return facts[index];
}

/// Large units save trips to memory, small ones keep all of the device busy.
void choose_unit(Plan& plan, int warps_on_device) {
  const int64_t blocks =
      plan.params.batch * most_slots(plan.params) * plan.num_blocks * (plan.reads_draft_rows ? 2 : 1);
  plan.blocks_per_warp = static_cast<int>(
      std::clamp<int64_t>(blocks / (kLeastRounds * int64_t{warps_on_device}), 1, kMostBlocksPerWarp));
  const int blocks_per_unit = plan.blocks_per_warp * kWarpsPerCta;
  plan.units_per_row = (plan.num_blocks + blocks_per_unit - 1) / blocks_per_unit;
}

/// Large waves save judges, small ones rows: requests are judged at once where the device reads all of them
/// at once, and slot by slot where it has other requests to read meanwhile.
void choose_wave(Plan& plan, int warps_on_device) {
  const int64_t most = most_slots(plan.params);
  const int64_t blocks = plan.params.batch * plan.num_blocks * (plan.reads_draft_rows ? 2 : 1);
  const int64_t wave = std::clamp<int64_t>(kRoundsPerWave * int64_t{warps_on_device} / blocks,
                                           (most + Progress::kMostWaves - 1) / Progress::kMostWaves, most);
  plan.slots_per_wave = static_cast<int>(plan.params.fly_window_size > 0 ? most : wave);
  plan.num_waves = static_cast<int>((most + plan.slots_per_wave - 1) / plan.slots_per_wave);
}

}  // namespace

size_t chain_workspace_size(const ChainParams& params) {
  Plan plan = plan_of(params);
  return lay_out(plan, nullptr).size;
}

cudaError_t launch_chain(const ChainParams& params, void* workspace, int device, cudaStream_t stream) {
  const DeviceFacts& facts = facts_of(device);
  if (facts.error != cudaSuccess) return facts.error;
  Plan plan = plan_of(params);
  const Layout layout = lay_out(plan, workspace);
  const bool wide = params.target.dtype == DType::kFloat32 ||
                    (plan.reads_draft_rows && params.draft.dtype == DType::kFloat32);
  const DType widest = wide ? DType::kFloat32 : DType::kBFloat16;
  plan.stage_words = stage_words(widest);
  const int warps_on_device = facts.num_multiprocessors * kWarpsPerCta * (wide ? 2 : kCtasPerMultiprocessor);
  choose_unit(plan, warps_on_device);
  choose_wave(plan, warps_on_device);
  const int64_t num_units =
      params.batch * most_slots(params) * (plan.reads_draft_rows ? 2 : 1) * plan.units_per_row;
  const int64_t num_helpers =
      has_dense_law(params) && params.num_drafts > 0
          ? std::min<int64_t>(facts.num_multiprocessors, params.batch * plan.units_per_row)
          : 0;
  if (num_units + num_helpers > INT32_MAX) return cudaErrorInvalidConfiguration;
  plan.num_units = static_cast<uint32_t>(num_units);

  const size_t shared = kWarpsPerCta * plan.stage_words * sizeof(uint4) + sizeof(Scratch) +
                        2 * sizeof(double) * static_cast<size_t>(plan.num_blocks);
  if (shared > facts.dynamic_shared) return cudaErrorLaunchOutOfResources;

  const auto num_words = static_cast<int64_t>(layout.cleared / 16);
  const auto clear_grid = static_cast<unsigned>(std::clamp<int64_t>(num_words / kCtaSize, 1, 64));
  clear_workspace<<<clear_grid, kCtaSize, 0, stream>>>(static_cast<uint4*>(workspace), num_words);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;

  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(num_units + num_helpers);
  config.blockDim = kCtaSize;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = facts.has_programmatic_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, params.fly_window_size > 0 ? run_chain<true> : run_chain<false>, plan);
}

}  // namespace specdec_ops::cuda

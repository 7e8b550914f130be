// The chain program as one persistent kernel.
//
// Work is cut into units: a CTA takes a few blocks of one row. Which rows are worth reading is only known
// once earlier ones were judged, so units come from a queue. It starts with the first wave of every request:
// its first slots, as many as `slots_per_wave`. The CTA that finishes the last unit a request waits for
// judges its slots and, unless the request ends there, queues the rows that it needs next. So rows behind a
// rejected draft are not read, and while some requests are judged the others are being read. With FLy, where
// a verdict depends on those of later drafts, a request is judged once all its rows are read.
//
// A CTA owns a unit only once it runs, so the kernel gets through with any number of resident CTAs.

#include "cuda/chain.h"

#include <algorithm>
#include <mutex>

#include "cuda/judge.cuh"

namespace specdec_ops::cuda {
namespace {

/// Fills in what the warps of a unit need to know of its row.
__device__ __forceinline__ void describe_row(const Plan& plan, Job* job) {
  const Request& request = job->request;
  const bool is_draft = job->kind == JobKind::kDraft;
  const int64_t row = (is_draft ? request.first_draft : request.first_row) + job->slot;
  job->with_sum = is_draft || needs_law(plan.params, request);
  job->scale = is_draft ? request.draft_scale : request.scale;
  job->row = row_of(is_draft ? plan.params.draft : plan.params.target, row);
  job->stats = (is_draft ? plan.draft_stats : plan.target_stats) + row * plan.num_blocks;
  // A law that is not asked for, or a request without rows: the unit only arrives.
  if (is_draft ? !request.has_law || request.greedy : request.num_slots(plan.params) == 0) {
    job->stats = nullptr;
  }
}

/// A unit of the first wave of every request; kNone where the request has no such row. One without any row
/// (no drafts, and its bonus token is given) has one job all the same: somebody must judge it.
__device__ __forceinline__ void take_initial_job(const Plan& plan, uint32_t number, Job* job) {
  const uint32_t r = number / static_cast<uint32_t>(plan.jobs_per_request);
  const int j = static_cast<int>(number - r * static_cast<uint32_t>(plan.jobs_per_request));
  const bool is_draft = plan.reads_draft_rows && j % 2 == 1;
  job->kind = is_draft ? JobKind::kDraft : JobKind::kTarget;
  job->slot = plan.reads_draft_rows ? j / 2 : j;
  const Request request = Request::load(plan.params, r);
  const int64_t num_slots = request.num_slots(plan.params);
  const int64_t num_targets = max(num_slots, int64_t{1});
  if (job->slot >= (is_draft ? request.num_drafts : num_targets)) job->kind = JobKind::kNone;
  const int64_t wave = plan.slots_per_wave;
  const int64_t num_jobs =
      min(wave, num_targets) + (plan.reads_draft_rows ? min(wave, request.num_drafts) : 0);
  job->expected = static_cast<uint32_t>(num_jobs) * static_cast<uint32_t>(plan.units_per_row);
  job->request = request;
}

/// Waits for a queued unit; kAllDone once every request is finished.
__device__ __forceinline__ void take_queued_job(const Plan& plan, uint64_t place, Job* job) {
  const volatile unsigned long long* num_finished = &plan.counters->num_finished;
  for (;;) {
    // In this order: nothing is queued once all are finished.
    const bool all_finished = *num_finished == static_cast<unsigned long long>(plan.params.batch);
    const uint64_t entry = place < plan.queue_size ? load_acquire(plan.queue + place) : 0;
    if (entry != 0) {
      const int64_t r = static_cast<int64_t>(entry >> 32) - 1;
      job->kind = static_cast<JobKind>(entry & 3);
      job->slot = static_cast<int64_t>((entry & 0xFFFFFFFF) >> 2);
      job->expected = __ldcg(&plan.states[r].expected);
      job->request = Request::load(plan.params, r);
      return;
    }
    if (all_finished) {
      job->kind = JobKind::kAllDone;
      return;
    }
    __nanosleep(32);
  }
}

__device__ __forceinline__ void take_job(const Plan& plan, Job* job) {
  const uint64_t ticket = atomicAdd(&plan.counters->next_ticket, 1ULL);
  const auto units_per_row = static_cast<uint32_t>(plan.units_per_row);
  if (ticket < plan.initial_units) {
    const uint32_t number = static_cast<uint32_t>(ticket) / units_per_row;
    job->unit = static_cast<int>(static_cast<uint32_t>(ticket) - number * units_per_row);
    take_initial_job(plan, number, job);
  } else {
    const uint64_t queued = ticket - plan.initial_units;
    const uint64_t place = queued / units_per_row;
    job->unit = static_cast<int>(queued - place * units_per_row);
    take_queued_job(plan, place, job);
  }
  describe_row(plan, job);
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
__device__ __forceinline__ void run_residual_unit(const Plan& plan, const Job& job, uint4* stage) {
  constexpr int kWarps = kWarpsPerCta / 2;
  if (warp_index() >= kWarps) return;
#pragma unroll 1
  for (int i = warp_index(); i < kBlocksPerUnit; i += kWarps) {
    const int block = job.unit * kBlocksPerUnit + i;
    if (block >= plan.num_blocks) return;
    const float mass =
        residual_mass(plan, job.request, job.slot, block, stage, stage + kWarps * plan.stage_words);
    if (lane_index() == 0) plan.masses[job.request.index * plan.num_blocks + block] = mass;
  }
}

/// A unit of a row of logits: a warp to a block.
__device__ __forceinline__ void run_unit(const Plan& plan, const Job& job, uint4* stage) {
  const int block = job.unit * kBlocksPerUnit + warp_index();
  if (block >= plan.num_blocks || job.stats == nullptr) return;
  const BlockStats stats = block_stats(block_of(plan.params, job.row, block), job.scale, job.with_sum, stage);
  if (lane_index() == 0) *reinterpret_cast<float2*>(job.stats + block) = make_float2(stats.max, stats.sum);
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
__global__ void __launch_bounds__(kCtaSize, 4) run_chain(const __grid_constant__ Plan plan) {
  extern __shared__ uint4 shared[];
  __shared__ Job job;
  __shared__ bool is_last;
  uint4* stage = shared + warp_index() * plan.stage_words;
  Scratch& scratch = *reinterpret_cast<Scratch*>(shared + kWarpsPerCta * plan.stage_words);
  wait_for_cleared_workspace();
  for (;;) {
    if (threadIdx.x == 0) take_job(plan, &job);
    __syncthreads();
    if (job.kind == JobKind::kAllDone) return;
    if (job.kind != JobKind::kNone) {
      if (job.kind == JobKind::kResidual) {
        run_residual_unit(plan, job, stage);
      } else {
        run_unit(plan, job, stage);
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(&plan.states[job.request.index].arrived, 1u) + 1 == job.expected;
        __threadfence();
      }
      __syncthreads();
      if (is_last) {
        const Request request = job.request;
        Judge<kLooksAhead>(plan, request, stage, scratch, reinterpret_cast<double*>(&scratch + 1)).run();
      }
    }
    __syncthreads();
  }
}

// ---- Host ----

int64_t num_target_rows(const ChainParams& params) {
  return params.num_drafts + (params.has_bonus_rows ? params.batch : 0);
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
  const bool has_dense_law =
      params.draft_law == DraftLawKind::kLogits || params.draft_law == DraftLawKind::kProbs;
  const int64_t rows = num_target_rows(params);
  const int64_t draft_rows = plan.reads_draft_rows ? params.num_drafts : 0;
  const int64_t residuals = has_dense_law ? params.batch : 0;
  // Counts that nobody has checked may make requests share rows.
  const int64_t most_slots = std::min(params.width, params.num_drafts + 1);
  const int64_t queue_size = params.batch * most_slots * (plan.reads_draft_rows ? 2 : 1) + residuals;
  plan.queue_size = static_cast<uint64_t>(queue_size);
  Cutter cutter(workspace);
  plan.counters = cutter.take<Counters>(1);
  plan.states = cutter.take<RequestState>(params.batch);
  plan.queue = cutter.take<uint64_t>(queue_size);
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
  plan.units_per_row = (plan.num_blocks + kBlocksPerUnit - 1) / kBlocksPerUnit;
  plan.reads_draft_rows = params.draft_law == DraftLawKind::kLogits && !params.draft_logsumexp;
  plan.may_be_quick =
      params.logsumexp == nullptr && params.logprobs == nullptr && params.accept_probs == nullptr &&
      !params.final_uniforms &&
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

/// How eagerly rows are read: enough of them at once to keep the device busy while requests are judged.
void choose_wave(Plan& plan, int warps_on_device) {
  const int64_t most_slots = plan.params.width - (plan.params.bonus_token_ids ? 1 : 0);
  const int64_t most = std::clamp<int64_t>(most_slots, 1, kLargestWave);
  const int64_t blocks = plan.params.batch * plan.num_blocks * (plan.reads_draft_rows ? 2 : 1);
  const bool needs_all = plan.params.fly_window_size > 0;
  plan.slots_per_wave = static_cast<int>(
      needs_all ? most : std::clamp<int64_t>(3 * int64_t{warps_on_device} / blocks, 1, most));
  plan.jobs_per_request = plan.slots_per_wave * (plan.reads_draft_rows ? 2 : 1);
  plan.initial_units = static_cast<uint64_t>(plan.params.batch) *
                       static_cast<uint64_t>(plan.jobs_per_request) *
                       static_cast<uint64_t>(plan.units_per_row);
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
  const int ctas = facts.num_multiprocessors * (wide ? 2 : 4);
  choose_wave(plan, ctas * kWarpsPerCta);

  const size_t shared = kWarpsPerCta * plan.stage_words * sizeof(uint4) + sizeof(Scratch) +
                        2 * sizeof(double) * static_cast<size_t>(plan.num_blocks);
  if (shared > facts.dynamic_shared) return cudaErrorLaunchOutOfResources;

  const auto num_words = static_cast<int64_t>(layout.cleared / 16);
  const auto clear_grid = static_cast<unsigned>(std::clamp<int64_t>(num_words / kCtaSize, 1, 64));
  clear_workspace<<<clear_grid, kCtaSize, 0, stream>>>(static_cast<uint4*>(workspace), num_words);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;

  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(std::min<uint64_t>(ctas, plan.initial_units));
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

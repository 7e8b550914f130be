// The chain program in two launches, and a third between them where there are filters.
//
// The first reads: a CTA, a unit, finds the largest logit and the sum of weights of a few blocks of one row.
// The second judges: a CTA to a request. It is there before the first is done, with the drafts, their logits
// and their random numbers at hand, and waits for the sums (programmatic dependent launch).
//
// With filters the first launch also leaves the largest logits of parts of blocks. A launch between the two,
// a CTA to a row, finds where the row is cut and puts the numbers of what is left in place of those of the
// row. Where a token is drawn from the most likely ids of a row, a CTA to a row does all of that, and nothing
// is judged.
//
// A residual that is to be made is queued. The CTA that queued it makes it, and further CTAs of the launch,
// which judge nothing, help. Their patience is limited: they are not needed for progress, whatever the order
// in which CTAs start.

#include "cuda/chain.h"

#include <algorithm>
#include <mutex>

#include "common/cutter.h"
#include "cuda/filters.cuh"
#include "cuda/judge.cuh"
#include "cuda/sparse_sample.cuh"

namespace specdec_ops::cuda {
namespace {

/// CTAs that should fit a multiprocessor.
constexpr int kReadersPerMultiprocessor = 6;
constexpr int kFiltersPerMultiprocessor = 3;
/// With most warps. Where none is asked for, registers are spilled for the sake of a second one.
constexpr int kJudgesPerMultiprocessor = 1;
/// Blocks of a residual that a CTA takes at once.
constexpr int kBlocksOfResidualUnit = 4;
constexpr int kMostBlocksPerWarp = 2;
/// Units that each warp of the device should get at least.
constexpr int kLeastRounds = 3;
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

/// A unit of a residual. Each block takes the shared memory of two warps.
template <bool kFilters>
__device__ __forceinline__ void run_residual_unit(const Plan& plan, const Request& request, int slot,
                                                  int unit, uint4* stage) {
  const int warps = num_warps() / 2;
  if (warp_index() >= warps) return;
#pragma unroll 1
  for (int i = warp_index(); i < kBlocksOfResidualUnit; i += warps) {
    const int block = unit * kBlocksOfResidualUnit + i;
    if (block >= plan.num_blocks) return;
    const float mass =
        residual_mass<kFilters>(plan, request, slot, block, stage, stage + warps * plan.stage_words);
    if (lane_index() == 0) plan.masses[request.index * plan.num_blocks + block] = mass;
  }
}

__device__ __forceinline__ uint32_t residual_units(const Plan& plan) {
  return static_cast<uint32_t>((plan.num_blocks + kBlocksOfResidualUnit - 1) / kBlocksOfResidualUnit);
}

/// A unit of a row of logits: a warp to a block.
template <bool kFilters>
__device__ __forceinline__ void run_unit(const Plan& plan, Request request, const Unit& unit, uint4* stage) {
  int block = unit.unit * plan.blocks_per_warp * kReadingWarps + warp_index();
  const int end = min(block + plan.blocks_per_warp * kReadingWarps, plan.num_blocks);
  if (block >= end || (unit.is_draft && (!request.has_law || request.greedy))) return;
  const int64_t row = (unit.is_draft ? request.first_draft : request.first_row) + unit.slot;
  const RowRef row_ref = unit.is_draft ? row_of(request.of_drafts(plan.params.draft), unit.slot)
                                       : row_of(plan.params.target, row);
  BlockStats* stats_of_row = (unit.is_draft ? plan.draft_stats : plan.target_stats) + row * plan.num_blocks;
  stage_block(block_of(plan.params, row_ref, block), stage);
  request.find_scales();
  const float scale = unit.is_draft ? request.draft_scale : request.scale;
  // Probabilities are compared, and blocks chosen: digits that settle nothing send the judge back to the row.
  const Sum sum = !needs_law(plan.params, request) ? Sum::kNone
                  : plan.may_be_quick              ? Sum::kQuick
                                                   : Sum::kDefined;
  for (;;) {
    wait_for_copies();
    float part_max = kMasked;
    const BlockStats stats =
        block_stats(block_of(plan.params, row_ref, block), scale, sum, stage, kFilters ? &part_max : nullptr);
    if constexpr (kFilters) {
      float* part_maxima = unit.is_draft ? plan.draft_part_maxima : plan.target_part_maxima;
      if (part_maxima != nullptr) {
        part_maxima[(row * plan.num_blocks + block) * kWarpSize + lane_index()] = part_max;
      }
    }
    if (lane_index() == 0)
      *reinterpret_cast<float2*>(stats_of_row + block) = make_float2(stats.max, stats.sum);
    block += kReadingWarps;
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
__device__ __forceinline__ bool take_residual_unit(const Plan& plan, uint32_t* request, int* unit) {
  const auto units = static_cast<unsigned long long>(residual_units(plan));
  volatile Counters* counters = plan.counters;
  unsigned long long next = counters->next_residual_unit;
  while (next < counters->num_queued * units) {
    const unsigned long long seen = atomicCAS(&plan.counters->next_residual_unit, next, next + 1);
    if (seen == next) {
      // Its place was taken before the entry was written.
      uint32_t queued;
      while ((queued = load_acquire(&plan.residuals[next / units].queued)) == 0) {
      }
      *request = queued - 1;
      *unit = static_cast<int>(next % units);
      return true;
    }
    next = seen;
  }
  return false;
}

/// Takes one for the whole CTA; `patience`: how often to look again where there is none and requests are
/// undecided.
__device__ __forceinline__ bool take_together(const Plan& plan, int* patience, uint32_t* request, int* unit) {
  __shared__ uint32_t taken_request;
  __shared__ int taken_unit;
  __shared__ bool is_taken;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_taken = take_residual_unit(plan, &taken_request, &taken_unit);
    const volatile uint32_t* num_finished = &plan.counters->num_finished;
    for (; !is_taken && *patience > 0 && *num_finished < plan.params.batch; --*patience) {
      __nanosleep(200);
      is_taken = take_residual_unit(plan, &taken_request, &taken_unit);
    }
  }
  __syncthreads();
  *request = taken_request;
  *unit = taken_unit;
  return is_taken;
}

/// Makes residuals while there are any.
template <Variant kVariant>
__device__ __noinline__ void make_residuals(const Plan& plan, int patience, uint4* stage, Scratch& scratch) {
  uint32_t index;
  int unit;
  while (take_together(plan, &patience, &index, &unit)) {
    Request request = Request::load(plan.params, index);
    request.find_scales();
    const int slot = __ldcg(&plan.residuals[index].slot);
    run_residual_unit<Judge<kVariant>::kFilters>(plan, request, slot, unit, stage);
    if (!arrives_last(&plan.residuals[index].num_units, residual_units(plan))) continue;
    Judge<kVariant>(plan, request, stage, scratch, reinterpret_cast<double*>(&scratch + 1))
        .run_residual(slot);
  }
}

template <bool kFilters>
__global__ void __launch_bounds__(kReadingWarps* kWarpSize, kReadersPerMultiprocessor)
    read_rows(const __grid_constant__ Plan plan) {
  allow_next_launch();
  const Unit unit = Unit::of(plan, blockIdx.x);
  if (unit.unit == 0 && unit.slot == 0 && !unit.is_draft && threadIdx.x == 0) {
    if (unit.request == 0) *plan.counters = {};
    if (plan.has_dense_law) plan.residuals[unit.request] = {};
  }
  const Request request = Request::load(plan.params, unit.request);
  if (unit.slot >= (unit.is_draft ? request.num_drafts : request.num_slots(plan.params))) return;
  run_unit<kFilters>(plan, request, unit, dynamic_shared() + warp_index() * plan.stage_words);
}

/// A row of one slot to a CTA.
__global__ void __launch_bounds__(kMostFilteringWarps* kWarpSize, kFiltersPerMultiprocessor)
    filter_rows(const __grid_constant__ Plan plan) {
  allow_next_launch();
  const ChainParams& params = plan.params;
  const uint32_t kinds = plan.filters_targets && plan.filters_drafts ? 2 : 1;
  const auto batch = static_cast<uint32_t>(params.batch);
  const bool is_draft = plan.filters_drafts && blockIdx.x % kinds == kinds - 1;
  const uint32_t number = blockIdx.x / kinds;
  const int64_t slot = number / batch;
  Request request = Request::load(params, number % batch);
  request.find_scales();
  wait_for_previous_launch();
  if (slot >= (is_draft ? request.num_drafts : request.num_slots(params))) return;
  if (is_draft && (!request.has_law || request.greedy)) return;

  const int64_t row = (is_draft ? request.first_draft : request.first_row) + slot;
  const RowRef row_ref =
      is_draft ? row_of(request.of_drafts(params.draft), slot) : row_of(params.target, row);
  const float* part_maxima = is_draft ? plan.draft_part_maxima : plan.target_part_maxima;
  float threshold = kMasked;
  if (is_draft || !request.greedy) {
    const int64_t first_block = row * plan.num_blocks;
    RowFilter filter(plan, row_ref, is_draft ? request.draft_scale : request.scale,
                     (is_draft ? plan.draft_stats : plan.target_stats) + first_block,
                     part_maxima + first_block * kWarpSize, dynamic_shared());
    if (is_draft && params.draft_thresholds) {
      threshold = threshold_of_draft(plan, request, slot);
    } else {
      const FilterViews& views = is_draft ? params.draft_filters : params.filters;
      const Filters filters = filters_of(views, request.entry, params.vocab_size);
      if (filters.any()) threshold = filter.find_threshold(filters, params.joint_filters);
    }
    if (threshold > kMasked) filter.keep(threshold);
  }
  float* thresholds = is_draft ? plan.draft_thresholds : plan.target_thresholds;
  if (threadIdx.x == 0) thresholds[row] = threshold;
}

/// A row to a CTA.
__global__ void __launch_bounds__(kMostFilteringWarps* kWarpSize, kFiltersPerMultiprocessor)
    sample_from_laws(const __grid_constant__ Plan plan) {
  __shared__ LawScratch law;
  Request request = Request::load(plan.params, blockIdx.x);
  request.find_scales();
  wait_for_previous_launch();
  const int64_t first_block = request.first_row * plan.num_blocks;
  RowFilter filter(plan, row_of(plan.params.target, request.first_row), request.scale,
                   plan.target_stats + first_block, plan.target_part_maxima + first_block * kWarpSize,
                   dynamic_shared());
  SparseSample(plan, request, filter, law).run();
}

template <Variant kVariant>
__global__ void __launch_bounds__(kMostJudgingWarps* kWarpSize, kJudgesPerMultiprocessor)
    judge_requests(const __grid_constant__ Plan plan) {
  uint4* shared = dynamic_shared();
  uint4* stage = shared + warp_index() * plan.stage_words;
  Scratch& scratch = *reinterpret_cast<Scratch*>(shared + num_warps() * plan.stage_words);
  const bool is_helper = blockIdx.x >= plan.params.batch;
  if (!is_helper) {
    Request request = Request::load(plan.params, blockIdx.x);
    request.find_scales();
    const bool needs_residual =
        Judge<kVariant>(plan, request, stage, scratch, reinterpret_cast<double*>(&scratch + 1)).run();
    if (!needs_residual) return;
  } else {
    wait_for_previous_launch();
  }
  make_residuals<kVariant>(plan, is_helper ? kPatience : 0, stage, scratch);
}

// ---- Host ----

int64_t num_target_rows(const ChainParams& params) {
  return params.num_drafts + (params.has_bonus_rows ? params.batch : 0);
}

/// Slots of a request of which somebody reads a row, at least one.
int64_t most_slots(const ChainParams& params) {
  return std::max<int64_t>(params.width - (params.bonus_token_ids ? 1 : 0), 1);
}

/// The size of the workspace.
size_t lay_out(Plan& plan, void* workspace) {
  const ChainParams& params = plan.params;
  const int64_t rows = num_target_rows(params);
  const int64_t draft_rows = plan.reads_draft_rows ? params.num_drafts : 0;
  const int64_t residuals = plan.has_dense_law ? params.batch : 0;
  Cutter<16> cutter(workspace);
  plan.counters = cutter.take<Counters>(1);
  plan.target_stats = cutter.take<BlockStats>(rows * plan.num_blocks);
  plan.draft_stats = cutter.take<BlockStats>(draft_rows * plan.num_blocks);
  plan.residuals = cutter.take<ResidualState>(residuals);
  plan.laws = cutter.take<RowLaw>(2 * residuals);
  plan.masses = cutter.take<float>(residuals * plan.num_blocks);
  plan.block_slots = cutter.take<BlockSlot>(params.rule == Rule::kBlock ? params.num_drafts : 0);
  const auto take_if = [&](bool condition, int64_t count) {
    return condition ? cutter.take<float>(count) : nullptr;
  };
  plan.target_part_maxima = take_if(plan.filters_targets, rows * plan.num_blocks * kWarpSize);
  plan.draft_part_maxima = take_if(plan.filters_drafts, draft_rows * plan.num_blocks * kWarpSize);
  plan.target_thresholds = take_if(plan.filters_targets, rows);
  plan.draft_thresholds = take_if(plan.filters_drafts, draft_rows);
  return cutter.size();
}

/// Whether it takes Variant::kOtherRules.
bool has_other_rules(const ChainParams& params) {
  return params.rule == Rule::kBlock || params.rule == Rule::kExactMatch ||
         params.sampler == Sampler::kGumbel;
}

Plan plan_of(const ChainParams& params) {
  Plan plan = {};
  plan.params = params;
  plan.num_blocks = static_cast<int>((params.vocab_size + kBlockSize - 1) / kBlockSize);
  plan.reads_draft_rows = params.draft_law == DraftLawKind::kLogits && !params.draft_logsumexp;
  plan.has_dense_law = params.draft_law == DraftLawKind::kLogits || params.draft_law == DraftLawKind::kProbs;
  plan.filters_targets = params.filters || params.law_size > 0;
  plan.filters_drafts = plan.reads_draft_rows && (params.draft_filters || params.draft_thresholds);
  plan.may_be_quick =
      params.logsumexp == nullptr && params.logprobs == nullptr && params.accept_probs == nullptr &&
      !params.final_uniforms && params.fly_window_size == 0 && !has_other_rules(params) &&
      !is_lossy(params.rule) && plan.num_blocks <= kBlocksAtOnce &&
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
  for (auto* kernel :
       {read_rows<false>, read_rows<true>, filter_rows, sample_from_laws, judge_requests<Variant::kPlain>,
        judge_requests<Variant::kFilters>, judge_requests<Variant::kLooksAhead>,
        judge_requests<Variant::kOtherRules>, judge_requests<Variant::kLossyRules>}) {
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
  const int blocks_per_unit = plan.blocks_per_warp * kReadingWarps;
  plan.units_per_row = (plan.num_blocks + blocks_per_unit - 1) / blocks_per_unit;
}

auto judge_of(const Plan& plan) {
  if (plan.params.fly_window_size > 0) return judge_requests<Variant::kLooksAhead>;
  if (has_other_rules(plan.params)) return judge_requests<Variant::kOtherRules>;
  if (is_lossy(plan.params.rule)) return judge_requests<Variant::kLossyRules>;
  return plan.has_cut_rows() ? judge_requests<Variant::kFilters> : judge_requests<Variant::kPlain>;
}

/// `early`: CTAs may start before the launch before this one is done.
cudaError_t launch(void (*kernel)(Plan), int64_t num_ctas, int warps, size_t dynamic_shared,
                   cudaStream_t stream, bool early, const Plan& plan) {
  cudaLaunchConfig_t config = {};
  config.gridDim = static_cast<unsigned>(num_ctas);
  config.blockDim = static_cast<unsigned>(warps * kWarpSize);
  config.dynamicSmemBytes = dynamic_shared;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, plan);
}

/// A CTA to a row.
cudaError_t launch_by_row(void (*kernel)(Plan), int64_t num_rows, const DeviceFacts& facts,
                          cudaStream_t stream, const Plan& plan) {
  int warps = kMostFilteringWarps;
  while (warps > 1 && filter_scratch_size(plan.num_blocks, warps) > facts.dynamic_shared) warps /= 2;
  return launch(kernel, num_rows, warps, filter_scratch_size(plan.num_blocks, warps), stream,
                facts.has_programmatic_launch, plan);
}

}  // namespace

size_t chain_workspace_size(const ChainParams& params) {
  Plan plan = plan_of(params);
  return lay_out(plan, nullptr);
}

cudaError_t launch_chain(const ChainParams& params, void* workspace, int device, cudaStream_t stream) {
  const DeviceFacts& facts = facts_of(device);
  if (facts.error != cudaSuccess) return facts.error;
  Plan plan = plan_of(params);
  lay_out(plan, workspace);
  const bool wide = params.target.dtype == DType::kFloat32 ||
                    (plan.reads_draft_rows && params.draft.view.dtype == DType::kFloat32);
  const DType widest = wide ? DType::kFloat32 : DType::kBFloat16;
  plan.stage_words = stage_words(widest);
  choose_unit(plan, facts.num_multiprocessors * kReadingWarps * (wide ? 3 : kReadersPerMultiprocessor));
  const int64_t num_units =
      params.batch * most_slots(params) * (plan.reads_draft_rows ? 2 : 1) * plan.units_per_row;
  const int64_t num_helpers =
      plan.has_dense_law && params.num_drafts > 0
          ? std::min<int64_t>(facts.num_multiprocessors, params.batch * plan.units_per_row)
          : 0;
  if (num_units > INT32_MAX) return cudaErrorInvalidConfiguration;

  const auto of_judge = [&](int warps) {
    return warps * plan.stage_words * sizeof(uint4) + sizeof(Scratch) +
           2 * sizeof(double) * static_cast<size_t>(plan.num_blocks);
  };
  // More warps make more attempts at once; fewer leave room for more judges.
  const bool has_room = params.batch <= facts.num_multiprocessors;
  int warps = has_room ? kMostJudgingWarps : kFewestJudgingWarps;
  while (warps > kFewestJudgingWarps && of_judge(warps) > facts.dynamic_shared) warps /= 2;
  if (of_judge(warps) > facts.dynamic_shared) return cudaErrorLaunchOutOfResources;

  const bool cuts_rows = plan.filters_targets || plan.filters_drafts;
  cudaError_t error = launch(cuts_rows ? read_rows<true> : read_rows<false>, num_units, kReadingWarps,
                             kReadingWarps * plan.stage_words * sizeof(uint4), stream, false, plan);
  if (error == cudaSuccess && params.law_size > 0) {
    return launch_by_row(sample_from_laws, params.batch, facts, stream, plan);
  }
  if (error == cudaSuccess && cuts_rows) {
    const int64_t num_rows =
        params.batch * most_slots(params) * (plan.filters_targets && plan.filters_drafts ? 2 : 1);
    error = launch_by_row(filter_rows, num_rows, facts, stream, plan);
  }
  if (error != cudaSuccess) return error;
  return launch(judge_of(plan), params.batch + num_helpers, warps, of_judge(warps), stream,
                facts.has_programmatic_launch, plan);
}

}  // namespace specdec_ops::cuda

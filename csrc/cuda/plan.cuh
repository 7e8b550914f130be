#pragma once

#include "common/chain_params.h"
#include "cuda/blocks.cuh"

/// What the units and the judges of the chain program share: the plan of a call, its workspace, and requests.
namespace specdec_ops::cuda {

constexpr int kWarpsPerCta = 4;
constexpr int kCtaSize = kWarpsPerCta * kWarpSize;
constexpr int kBlocksPerUnit = kWarpsPerCta;
/// Slots that a CTA judges at once.
constexpr int kLargestWave = 8;
/// Blocks whose numbers are in shared memory at a time while laws are made.
constexpr int kBlocksAtOnce = 64;
constexpr int kRowsAtOnce = 2 * kLargestWave;
/// Room for the shared memory that does not grow with the arguments.
constexpr int kStaticShared = 1024;

enum class JobKind : int32_t { kTarget, kDraft, kResidual, kNone, kAllDone };

/// How far a request has got. Zeroes mean: its first wave is being read.
struct alignas(16) RequestState {
  uint32_t arrived;
  /// 0 in the first wave.
  uint32_t expected;
  /// The slots that are read but not judged; `end` is 0 in the first wave.
  int32_t begin, end;

  /// In place of `end` while the residual of slot `begin` is being made.
  static constexpr int32_t kInResidual = -1;
};

struct Counters {
  unsigned long long next_ticket;
  unsigned long long num_queued;
  unsigned long long num_finished;
};

/// What the host decides about a call, from shapes alone.
struct Plan {
  ChainParams params;
  int num_blocks;
  int units_per_row;
  /// Of shared memory, a warp.
  int stage_words;
  int slots_per_wave;
  /// Draft laws come from a pass over draft rows, which are read together with the target's.
  bool reads_draft_rows;
  /// Nothing is asked for that shows a law to the last bit.
  bool may_be_quick;
  int jobs_per_request;
  uint64_t initial_units;

  Counters* counters;
  RequestState* states;
  /// Jobs in the order in which they were found to be needed; 0 where there is none yet.
  uint64_t* queue;
  uint64_t queue_size;
  BlockStats* target_stats;  ///< [rows, num_blocks]
  BlockStats* draft_stats;   ///< [drafts, num_blocks]
  // Of the residual that a request waits for:
  RowLaw* laws;   ///< [batch, 2], target and draft
  float* masses;  ///< [batch, num_blocks]
};

__device__ __forceinline__ uint64_t packed(JobKind kind, int64_t request, int64_t slot) {
  return static_cast<uint64_t>(request + 1) << 32 | static_cast<uint64_t>(slot) << 2 |
         static_cast<uint64_t>(kind);
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(uint64_t* address, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

/// Numbers of other CTAs: past the first-level cache, which may hold what was there before.
__device__ __forceinline__ BlockStats load_stats(const BlockStats* address) {
  const float2 value = __ldcg(reinterpret_cast<const float2*>(address));
  return {value.x, value.y};
}
__device__ __forceinline__ RequestState load_state(const RequestState* address) {
  const uint4 words = __ldcg(reinterpret_cast<const uint4*>(address));
  return {words.x, words.y, static_cast<int32_t>(words.z), static_cast<int32_t>(words.w)};
}

__device__ __forceinline__ RowLaw load_law(const RowLaw* address) {
  RowLaw law;
  law.scale = __ldcg(&address->scale);
  law.reference = __ldcg(&address->reference);
  law.log2_total = __ldcg(&address->log2_total);
  law.logsumexp = __ldcg(&address->logsumexp);
  return law;
}

/// Waits until the launch before this one, which clears the counters, is done and visible.
__device__ __forceinline__ void wait_for_cleared_workspace() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// The parts of a request that do not change on its way.
struct Request {
  int64_t index, first_draft, num_drafts, first_row;
  float scale, draft_scale;
  bool greedy;
  /// Whether the drafts have a law other than one-hot.
  bool has_law;

  __device__ static Request load(const ChainParams& params, int64_t r) {
    Request request;
    request.index = r;
    // Every load before the first use: each may be a trip to device memory.
    const bool ragged = static_cast<bool>(params.cu_num_draft_tokens);
    const int64_t begin = ragged ? at(params.cu_num_draft_tokens, r) : r * params.drafts_per_request;
    const int64_t end = ragged ? at(params.cu_num_draft_tokens, r + 1) : begin + params.drafts_per_request;
    const float temperature = static_cast<float>(at(params.temperature, r));
    const float draft_temperature =
        params.draft_temperature ? static_cast<float>(at(params.draft_temperature, r)) : temperature;
    const bool has_draft_law = !params.has_draft_law || at(params.has_draft_law, r);

    // Nobody has checked the counts: none may lead out of the tensors.
    const int64_t most = ragged ? params.width - 1 : params.drafts_per_request;
    request.first_draft = min(max(begin, int64_t{0}), params.num_drafts);
    request.num_drafts =
        min(min(max(end, request.first_draft), params.num_drafts) - request.first_draft, most);
    request.first_row = request.first_draft + (params.has_bonus_rows ? r : 0);
    // Without random numbers there is nothing to sample with.
    request.greedy = is_greedy(temperature) || !(params.seeds || params.final_uniforms);
    request.scale = log2_scale(is_greedy(temperature) ? 1.0f : temperature);
    request.draft_scale = log2_scale(draft_temperature);
    // A greedy drafter's law is one-hot at its draft, whatever its logits.
    request.has_law = params.draft_law != DraftLawKind::kOneHot && has_draft_law &&
                      !(params.draft_law == DraftLawKind::kLogits && is_greedy(draft_temperature));
    return request;
  }

  __device__ int64_t num_slots(const ChainParams& params) const {
    return num_drafts + (params.has_bonus_rows ? 1 : 0);
  }
};

/// A unit of one row that is to be read.
struct Job {
  JobKind kind;
  int unit;
  int64_t slot;
  Request request;
  /// Units that the request waits for.
  uint32_t expected;

  // Unless it is a residual's:
  bool with_sum;
  float scale;
  RowRef row;
  /// Of the row's blocks.
  BlockStats* stats;
};

/// FLy asks for the entropy of greedy rows too.
__device__ __forceinline__ bool needs_law(const ChainParams& params, const Request& request) {
  return !request.greedy || params.logsumexp != nullptr || params.logprobs != nullptr ||
         params.fly_window_size > 0;
}

__device__ __forceinline__ BlockRef block_of(const ChainParams& params, const RowRef& row, int block) {
  const int64_t begin = static_cast<int64_t>(block) * kBlockSize;
  const int64_t rest = params.vocab_size - begin;
  return {row, begin, rest < kBlockSize ? static_cast<int>(rest) : kBlockSize};
}

}  // namespace specdec_ops::cuda

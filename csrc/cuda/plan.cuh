#pragma once

#include "common/chain_params.h"
#include "cuda/blocks.cuh"

/// What the units and the judges of the chain program share: the plan of a call, its workspace, and requests.
namespace specdec_ops::cuda {

constexpr int kWarpsPerCta = 4;
constexpr int kCtaSize = kWarpsPerCta * kWarpSize;
/// Slots that a CTA judges at once.
constexpr int kLargestWave = 8;
/// Blocks whose numbers are in shared memory at a time while laws are made.
constexpr int kBlocksAtOnce = 64;
constexpr int kRowsAtOnce = 2 * kLargestWave;
/// Room for the shared memory that does not grow with the arguments.
constexpr int kStaticShared = 1024;

/// How far a request has got.
struct alignas(16) RequestState {
  unsigned long long progress;
  /// Nothing further of the request is worth reading.
  uint32_t decided;
  /// Units of its residual that are done.
  uint32_t num_residual_units;
};

/// RequestState::progress: which waves are read, the first that is not judged, and whether a CTA is at it.
struct Progress {
  static constexpr int kMostWaves = 47, kShift = 48;
  static constexpr unsigned long long kIsJudged = 1ULL << 63;

  __device__ static unsigned long long read(int wave) { return 1ULL << wave; }
  __device__ static int next_wave(unsigned long long word) {
    return static_cast<int>((word & ~kIsJudged) >> kShift);
  }
  /// The end of the waves that are read without a gap from `next` on.
  __device__ static int end_wave(unsigned long long word, int next) {
    return next + __ffsll(static_cast<long long>(~(word >> next))) - 1;
  }
  __device__ static unsigned long long released(unsigned long long word, int next) {
    return (word & ((1ULL << kShift) - 1)) | static_cast<unsigned long long>(next) << kShift;
  }
};

struct Counters {
  unsigned long long next_residual_unit;
  uint32_t num_queued;
  uint32_t num_finished;
};

/// What the host decides about a call, from shapes alone.
struct Plan {
  ChainParams params;
  int num_blocks;
  /// Of a unit.
  int blocks_per_warp;
  int units_per_row;
  /// Of shared memory, a warp.
  int stage_words;
  int slots_per_wave;
  int num_waves;
  /// Draft laws come from a pass over draft rows, which are read together with the target's.
  bool reads_draft_rows;
  /// Nothing is asked for that shows a law to the last bit.
  bool may_be_quick;
  /// CTAs that read rows; those after them help with residuals.
  uint32_t num_units;

  Counters* counters;
  RequestState* states;
  uint32_t* arrived;  ///< [batch, num_waves], units
  /// Requests that wait for a residual, with the slot, in the order in which they were found; 0: none yet.
  uint64_t* queue;           ///< [batch]
  BlockStats* target_stats;  ///< [rows, num_blocks]
  BlockStats* draft_stats;   ///< [drafts, num_blocks]
  // Of the residual that a request waits for:
  RowLaw* laws;   ///< [batch, 2], target and draft
  float* masses;  ///< [batch, num_blocks]
};

/// An entry of the queue of residuals; never 0.
__device__ __forceinline__ uint64_t pack(int64_t request, int64_t slot) {
  return static_cast<uint64_t>(request + 1) << 32 | static_cast<uint64_t>(slot);
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
// Lighter than __threadfence before and after: what the CTA wrote before it synchronized is released, and
// what others released is acquired.
__device__ __forceinline__ uint32_t add_acq_rel(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}
__device__ __forceinline__ unsigned long long or_acq_rel(unsigned long long* address,
                                                         unsigned long long value) {
  unsigned long long before;
  asm volatile("atom.acq_rel.gpu.global.or.b64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(address), "l"(value)
               : "memory");
  return before;
}
__device__ __forceinline__ unsigned long long cas_acq_rel(unsigned long long* address,
                                                          unsigned long long expected,
                                                          unsigned long long value) {
  unsigned long long before;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(address), "l"(expected), "l"(value)
               : "memory");
  return before;
}
__device__ __forceinline__ void store_release(uint64_t* address, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

/// Numbers of other CTAs: past the first-level cache, which may hold what was there before.
__device__ __forceinline__ BlockStats load_stats(const BlockStats* address) {
  const float2 value = __ldcg(reinterpret_cast<const float2*>(address));
  return {value.x, value.y};
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

/// One number of an argument that a lane fetches: 1, 4 or 8 bytes.
struct Cell {
  const void* address = nullptr;
  int size = 0;

  Cell() = default;
  __device__ Cell(const IntView& view, int64_t index)
      : address(static_cast<const char*>(view.data) + index * view.stride * (view.is_int64 ? 8 : 4)),
        size(view ? view.is_int64 ? 8 : 4 : 0) {}
  __device__ Cell(const RealView& view, int64_t index)
      : address(static_cast<const char*>(view.data) + index * view.stride * (view.is_float64 ? 8 : 4)),
        size(view ? view.is_float64 ? 8 : 4 : 0) {}
  __device__ Cell(const BoolView& view, int64_t index)
      : address(view.data + index * view.stride), size(view ? 1 : 0) {}
};

/// What the lanes of a warp have fetched, for all of them.
struct FetchedCells {
  uint32_t low = 0, high = 0;

  __device__ explicit FetchedCells(const Cell& cell) {
    if (cell.size >= 4) low = __ldg(static_cast<const uint32_t*>(cell.address));
    if (cell.size == 8) high = __ldg(static_cast<const uint32_t*>(cell.address) + 1);
    if (cell.size == 1) low = __ldg(static_cast<const unsigned char*>(cell.address));
  }
  __device__ uint32_t low_of(int lane) const { return __shfl_sync(kAllLanes, low, lane); }
  __device__ int64_t integer(int lane, bool is_int64) const {
    const uint32_t lower = low_of(lane), upper = __shfl_sync(kAllLanes, high, lane);
    return is_int64 ? static_cast<int64_t>(uint64_t{upper} << 32 | lower) : static_cast<int32_t>(lower);
  }
  __device__ float real(int lane, bool is_float64) const {
    const uint32_t lower = low_of(lane), upper = __shfl_sync(kAllLanes, high, lane);
    return is_float64 ? static_cast<float>(__hiloint2double(static_cast<int>(upper), static_cast<int>(lower)))
                      : __uint_as_float(lower);
  }
};

/// The parts of a request that do not change on its way.
struct Request {
  int64_t index, first_draft, num_drafts, first_row;
  float temperature, draft_temperature, scale, draft_scale;
  bool decided, greedy;
  /// Whether the drafts have a law other than one-hot.
  bool has_law;
  /// 0 where there are none.
  int64_t seed, position;

  /// By a whole warp: each lane fetches a number, so that all of them take one trip to memory. `decided` may
  /// be null. find_scales completes the request.
  __device__ static Request load(const ChainParams& params, int64_t r, const uint32_t* decided = nullptr) {
    enum { kBegin, kEnd, kTemperature, kDraftTemperature, kHasLaw, kSeed, kPosition, kDecided };
    const int lane = lane_index();
    Cell cell;
    if (lane == kBegin || lane == kEnd) cell = Cell(params.cu_num_draft_tokens, r + (lane - kBegin));
    if (lane == kTemperature) cell = Cell(params.temperature, r);
    if (lane == kDraftTemperature) cell = Cell(params.draft_temperature, r);
    if (lane == kHasLaw) cell = Cell(params.has_draft_law, r);
    if (lane == kSeed) cell = Cell(params.seeds, r);
    if (lane == kPosition) cell = Cell(params.positions, r);
    FetchedCells cells(cell);
    if (lane == kDecided && decided != nullptr) cells.low = __ldcg(decided);

    Request request;
    request.decided = cells.low_of(kDecided) != 0;
    request.index = r;
    const bool ragged = static_cast<bool>(params.cu_num_draft_tokens);
    const bool wide = params.cu_num_draft_tokens.is_int64;
    const int64_t begin = ragged ? cells.integer(kBegin, wide) : r * params.drafts_per_request;
    const int64_t end = ragged ? cells.integer(kEnd, wide) : begin + params.drafts_per_request;
    request.temperature = cells.real(kTemperature, params.temperature.is_float64);
    request.draft_temperature = params.draft_temperature
                                    ? cells.real(kDraftTemperature, params.draft_temperature.is_float64)
                                    : request.temperature;
    const bool has_draft_law = !params.has_draft_law || cells.low_of(kHasLaw) != 0;
    request.seed = cells.integer(kSeed, params.seeds.is_int64);
    request.position = cells.integer(kPosition, params.positions.is_int64);

    // Nobody has checked the counts: none may lead out of the tensors.
    const int64_t most = ragged ? params.width - 1 : params.drafts_per_request;
    request.first_draft = min(max(begin, int64_t{0}), params.num_drafts);
    request.num_drafts =
        min(min(max(end, request.first_draft), params.num_drafts) - request.first_draft, most);
    request.first_row = request.first_draft + (params.has_bonus_rows ? r : 0);
    // Without random numbers there is nothing to sample with.
    request.greedy = is_greedy(request.temperature) || !(params.seeds || params.final_uniforms);
    // A greedy drafter's law is one-hot at its draft, whatever its logits.
    request.has_law = params.draft_law != DraftLawKind::kOneHot && has_draft_law &&
                      !(params.draft_law == DraftLawKind::kLogits && is_greedy(request.draft_temperature));
    return request;
  }

  /// Divisions take their time: after the first copies have begun.
  __device__ void find_scales() {
    scale = log2_scale(is_greedy(temperature) ? 1.0f : temperature);
    draft_scale = draft_temperature == temperature ? scale : log2_scale(draft_temperature);
  }

  __device__ int64_t num_slots(const ChainParams& params) const {
    return num_drafts + (params.has_bonus_rows ? 1 : 0);
  }
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

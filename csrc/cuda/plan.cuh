#pragma once

#include "common/chain_params.h"
#include "cuda/blocks.cuh"

/// What the units and the judges of the chain program share: the plan of a call, its workspace, and requests.
namespace specdec_ops::cuda {

/// Of a CTA that reads.
constexpr int kReadingWarps = 4;
/// Of a CTA that finds where a row is cut, where shared memory allows.
constexpr int kMostFilteringWarps = 8;
/// Of a CTA that judges: what its shared memory allows, a power of two.
constexpr int kFewestJudgingWarps = 4, kMostJudgingWarps = 8;
/// Slots that a CTA judges at once.
constexpr int kLargestWave = 8;
/// Blocks whose numbers are in shared memory at a time while laws are made.
constexpr int kBlocksAtOnce = 64;
constexpr int kRowsAtOnce = 2 * kLargestWave;
/// Room for the shared memory that does not grow with the arguments.
constexpr int kStaticShared = 1024;

/// A recovered token that waits for its residual. Cleared before each call.
struct ResidualState {
  /// Of the request, how many units of it are done.
  uint32_t num_units;
  /// Of the queue of residuals: an index of a request plus one, in the order in which they were found; 0:
  /// none yet.
  uint32_t queued;
  /// Of the request.
  int32_t slot;
};

/// A draft that block verification has read.
struct BlockSlot {
  /// -1 where the chain ends.
  int64_t x;
  double coin, p, q;
  /// How probable it is that all drafts up to this one are accepted.
  double chance;
  bool one_hot, is_unusable;
};

/// Cleared before each call.
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
  bool has_dense_law;
  /// Draft laws come from a pass over draft rows, which are read together with the target's.
  bool reads_draft_rows;
  /// Nothing is asked for that shows a law to the last bit.
  bool may_be_quick;
  /// Rows are cut before they are judged.
  bool filters_targets, filters_drafts;

  Counters* counters;
  BlockStats* target_stats;  ///< [rows, num_blocks]
  BlockStats* draft_stats;   ///< [drafts, num_blocks]
  // Of the residual that a request waits for:
  ResidualState* residuals;  ///< [batch]
  RowLaw* laws;              ///< [batch, 2], target and draft
  float* masses;             ///< [batch, num_blocks]
  BlockSlot* block_slots;    ///< [drafts], of Rule::kBlock
  // Of rows with filters, or null:
  float* target_part_maxima;  ///< [rows, num_blocks, warp]
  float* draft_part_maxima;   ///< [drafts, num_blocks, warp]
  float* target_thresholds;   ///< [rows]
  float* draft_thresholds;    ///< [drafts]

  bool has_cut_rows() const { return filters_targets || filters_drafts || params.draft_thresholds; }
};

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
  int64_t index, entry, first_draft, num_drafts, first_row;
  float temperature, draft_temperature, scale, draft_scale;
  bool greedy;
  /// Whether the drafts have a law other than one-hot.
  bool has_law;
  /// 0 where there are none.
  int64_t seed, position;
  int64_t final_slot;

  /// By a whole warp: each lane fetches a number, so that all of them take one trip to memory, after one for
  /// the index of the request where there are indices. find_scales completes the request.
  __device__ static Request load(const ChainParams& params, int64_t r) {
    enum { kBegin, kEnd, kTemperature, kDraftTemperature, kHasLaw, kSeed, kPosition, kFinalSlot };
    const int lane = lane_index();
    const int64_t own_entry = entry_of(params, r);
    const int64_t entry = max(own_entry, int64_t{0});
    Cell cell;
    if (lane == kBegin || lane == kEnd) cell = Cell(params.cu_num_draft_tokens, r + (lane - kBegin));
    if (lane == kTemperature) cell = Cell(params.temperature, entry);
    if (lane == kDraftTemperature) cell = Cell(params.draft_temperature, entry);
    if (lane == kHasLaw) cell = Cell(params.has_draft_law, entry);
    if (lane == kSeed) cell = Cell(params.seeds, entry);
    if (lane == kPosition) cell = Cell(params.positions, r);
    if (lane == kFinalSlot) cell = Cell(params.final_slots, r);
    const FetchedCells cells(cell);

    Request request;
    request.index = r;
    request.entry = entry;
    const bool ragged = static_cast<bool>(params.cu_num_draft_tokens);
    const bool wide = params.cu_num_draft_tokens.is_int64;
    const int64_t begin = ragged ? cells.integer(kBegin, wide) : r * params.drafts_per_request;
    const int64_t end = ragged ? cells.integer(kEnd, wide) : begin + params.drafts_per_request;
    const float temperature = cells.real(kTemperature, params.temperature.is_float64);
    request.temperature = own_entry < 0 ? 0.0f : temperature;
    request.draft_temperature = params.draft_temperature
                                    ? cells.real(kDraftTemperature, params.draft_temperature.is_float64)
                                    : request.temperature;
    const bool has_draft_law = !params.has_draft_law || cells.low_of(kHasLaw) != 0;
    request.seed = cells.integer(kSeed, params.seeds.is_int64);
    request.position = cells.integer(kPosition, params.positions.is_int64);
    const int64_t final_slot = cells.integer(kFinalSlot, params.final_slots.is_int64);
    request.final_slot = params.final_slots ? final_slot : params.final_slot;

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

  /// What each of its drafts has one of, by slot.
  template <class View>
  __device__ View of_drafts(const DraftView<View>& view) const {
    return view.of(first_draft, entry);
  }

  __device__ int64_t num_slots(const ChainParams& params) const {
    return num_drafts + (params.has_bonus_rows ? 1 : 0);
  }
};

/// Where rows are cut: known once the launch is done that filters.
__device__ __forceinline__ float threshold_of_target(const Plan& plan, int64_t row) {
  return plan.target_thresholds != nullptr ? __ldcg(plan.target_thresholds + row) : kMasked;
}
__device__ __forceinline__ float threshold_of_draft(const Plan& plan, const Request& request, int64_t slot) {
  if (plan.params.draft_thresholds) {
    return static_cast<float>(at(request.of_drafts(plan.params.draft_thresholds), slot));
  }
  return plan.draft_thresholds != nullptr ? __ldcg(plan.draft_thresholds + request.first_draft + slot)
                                          : kMasked;
}

/// FLy asks for the entropy of greedy rows too, and TopN for their probabilities.
__device__ __forceinline__ bool needs_law(const ChainParams& params, const Request& request) {
  return !request.greedy || params.logsumexp != nullptr || params.logprobs != nullptr ||
         params.fly_window_size > 0 || params.rule == Rule::kTopN;
}

__device__ __forceinline__ BlockRef block_of(const ChainParams& params, const RowRef& row, int block) {
  const int64_t begin = static_cast<int64_t>(block) * kBlockSize;
  const int64_t rest = params.vocab_size - begin;
  return {row, begin, rest < kBlockSize ? static_cast<int>(rest) : kBlockSize};
}

}  // namespace specdec_ops::cuda

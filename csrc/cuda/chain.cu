// The chain program as one persistent kernel.
//
// Work is cut into units: a CTA takes a few blocks of one row. Which rows are worth reading is only known once
// earlier ones were judged, so units come from a queue. It starts with the first wave of every request: its first
// slots, as many as `slots_per_wave`. The CTA that finishes the last unit a request waits for judges its slots
// and, unless the request ends there, queues the rows that it needs next. So rows behind a rejected draft are not
// read, and while some requests are judged the others are being read.
//
// A CTA owns a unit only once it runs, so the kernel gets through with any number of resident CTAs.

#include "cuda/chain.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "cuda/blocks.cuh"

namespace specdec_ops::cuda {
namespace {

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

enum class JobKind : int32_t { kTarget = 0, kDraft = 1, kResidual = 2, kNone = 3 };

/// One row to be read, in `units_per_row` units.
struct Job {
  JobKind kind;
  int64_t request;
  int64_t slot;
  int unit;
  /// Units that the request waits for.
  uint32_t expected;
};

/// How far a request has got. Zeroes mean: its first wave is being read.
struct RequestState {
  uint32_t arrived;
  /// 0 in the first wave.
  uint32_t expected;
  /// The slots that are read but not judged; `end` is 0 in the first wave.
  int32_t begin, end;
  /// One more than the slot whose draft row was read on its own.
  int32_t draft_ready;
  /// Whether the residual of slot `begin` is being made.
  int32_t in_residual;
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
  /// Draft rows are read together with the target's, instead of where a coin needs them.
  bool eager_drafts;
  /// Draft laws come from a pass over draft rows.
  bool reads_draft_rows;
  int jobs_per_request;
  uint64_t initial_jobs, initial_units;

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
  const uint2* words = reinterpret_cast<const uint2*>(address);
  const uint2 a = __ldcg(words), b = __ldcg(words + 1), c = __ldcg(words + 2);
  return {a.x,
          a.y,
          static_cast<int32_t>(b.x),
          static_cast<int32_t>(b.y),
          static_cast<int32_t>(c.x),
          static_cast<int32_t>(c.y)};
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

  __device__ Request(const ChainParams& params, int64_t r) : index(r) {
    if (params.cu_num_draft_tokens) {
      // Nobody has checked these: no count may lead out of the tensors.
      const int64_t most = params.num_drafts;
      first_draft = min(max(at(params.cu_num_draft_tokens, r), int64_t{0}), most);
      const int64_t end = min(max(at(params.cu_num_draft_tokens, r + 1), first_draft), most);
      num_drafts = min(end - first_draft, params.width - 1);
    } else {
      first_draft = r * params.drafts_per_request;
      num_drafts = params.drafts_per_request;
    }
    first_row = first_draft + (params.has_bonus_rows ? r : 0);
    const float temperature = static_cast<float>(at(params.temperature, r));
    const float draft_temperature =
        params.draft_temperature ? static_cast<float>(at(params.draft_temperature, r)) : temperature;
    // Without random numbers there is nothing to sample with.
    greedy = is_greedy(temperature) || !(params.seeds || params.final_uniforms);
    scale = log2_scale(is_greedy(temperature) ? 1.0f : temperature);
    draft_scale = log2_scale(draft_temperature);
    // A greedy drafter's law is one-hot at its draft, whatever its logits.
    has_law = params.draft_law != DraftLawKind::kOneHot &&
              (!params.has_draft_law || at(params.has_draft_law, r)) &&
              !(params.draft_law == DraftLawKind::kLogits && is_greedy(draft_temperature));
  }

  __device__ int64_t num_slots(const ChainParams& params) const {
    return num_drafts + (params.has_bonus_rows ? 1 : 0);
  }
};

__device__ __forceinline__ bool needs_law(const ChainParams& params, const Request& request) {
  return !request.greedy || params.logsumexp != nullptr || params.logprobs != nullptr;
}

__device__ __forceinline__ BlockRef block_of(const ChainParams& params, const RowRef& row, int block) {
  const int64_t begin = static_cast<int64_t>(block) * kBlockSize;
  const int64_t rest = params.vocab_size - begin;
  return {row, begin, rest < kBlockSize ? static_cast<int>(rest) : kBlockSize};
}

/// What to draw from where no further draft is accepted.
enum class Final : int32_t { kTarget, kTargetWithoutDraft, kSupportResidual, kDenseResidual };

enum class Outcome : int32_t { kAccepted, kNeedsDraftRow, kEnds, kDraws };

/// What became of one slot.
struct Verdict {
  Outcome outcome;
  Final final;
  Status status;
  float accept_prob;
  /// The draft, and the token that is emitted unless it is to be drawn.
  int64_t x, token;
};

struct Scratch {
  BlockStats stats[kRowsAtOnce][kBlocksAtOnce + 1];
  double weights[kRowsAtOnce][kBlocksAtOnce + 1];
  PickScratch pick[kWarpsPerCta];
  RowMax row_max[kRowsAtOnce];
  /// Of the target's rows, then of the drafts'.
  RowLaw laws[kRowsAtOnce];
  Verdict verdicts[kLargestWave];
  int64_t argmax[kLargestWave];
  double total;
  int64_t tokens[kThinningAttempts];
  bool kept[kThinningAttempts], unusable[kThinningAttempts];
};

/// p without the ids of a one-hot or sparse draft law, in a block that holds one of them.
struct SparseResidual {
  WeightsOfLogits target;
  const ChainParams* params;
  bool one_hot;
  int64_t draft, x;

  __device__ int size() const { return target.size(); }

  __device__ void octet(int i, float (&weights)[kOctet]) const {
    target.octet(i, weights);
    const int64_t first = target.block.begin + i;
    if (one_hot) {
#pragma unroll
      for (int j = 0; j < kOctet; ++j) weights[j] = x == first + j ? 0.0f : weights[j];
      return;
    }
    for (int64_t k = 0; k < params->draft_support_size; ++k) {
      const int64_t id = at(params->draft_support_ids, draft, k);
      if (id < first || id >= first + kOctet || id >= params->vocab_size) continue;
      const float q = static_cast<float>(exp2_f64(at(params->draft_support_logprobs, draft, k) * kLog2E));
#pragma unroll
      for (int j = 0; j < kOctet; ++j) {
        const float rest = weights[j] - q;
        if (id == first + j) weights[j] = rest > 0.0f ? rest : 0.0f;
      }
    }
  }
};

__device__ __noinline__ double random_number(int64_t seed, Stream stream, int64_t slot, int64_t position) {
  return uniform(seed, stream, slot, position);
}

/// The judge of one request, on a whole CTA.
class Judge {
 public:
  __device__ Judge(const Plan& plan, int64_t r, Scratch& scratch, double* masses)
      : plan_(plan),
        params_(plan.params),
        request_(plan.params, r),
        s_(scratch),
        masses_(masses),
        prefixes_(masses + plan.num_blocks) {}

  __device__ void run() {
    const int64_t num_slots = request_.num_slots(params_);
    const RequestState state = load_state(plan_.states + request_.index);
    begin_ = state.begin;
    end_ = state.end > 0 ? state.end : static_cast<int>(min(num_slots, int64_t{plan_.slots_per_wave}));
    draft_ready_ = state.draft_ready - 1;
    if (state.in_residual) end_ = begin_ + 1;
    make_laws();
    if (state.in_residual) return end_after_residual();

    find_argmaxes();
    const int count = end_ - begin_;
    if (thread() < count) s_.verdicts[thread()] = verdict_of(thread());
    __syncthreads();
    int last = 0;
    while (last < count && s_.verdicts[last].outcome == Outcome::kAccepted) ++last;
    if (thread() < count) write_slot(thread(), last);
    if (last == count) return queue_next_wave();
    Verdict& verdict = s_.verdicts[last];
    switch (verdict.outcome) {
      case Outcome::kNeedsDraftRow:
        return queue_alone(JobKind::kDraft, begin_ + last);
      case Outcome::kEnds:
        return finish(begin_ + last, verdict.status);
      default:
        return draw(last, verdict);
    }
  }

 private:
  __device__ static int thread() { return static_cast<int>(threadIdx.x); }

  __device__ RowRef target_row(int64_t slot) const { return row_of(params_.target, request_.first_row + slot); }
  __device__ RowRef draft_row(int64_t slot) const { return row_of(params_.draft, request_.first_draft + slot); }
  __device__ const BlockStats* target_stats(int64_t slot) const {
    return plan_.target_stats + (request_.first_row + slot) * plan_.num_blocks;
  }
  __device__ const BlockStats* draft_stats(int64_t slot) const {
    return plan_.draft_stats + (request_.first_draft + slot) * plan_.num_blocks;
  }

  /// Whether the draft row of a slot was read, where rows are what laws are made from.
  __device__ bool draft_row_is_read(int64_t slot) const { return plan_.eager_drafts || slot == draft_ready_; }

  /// Whether row i of the scratch memory, target rows first, has numbers in this wave.
  __device__ bool is_present(int row) const {
    const int64_t slot = begin_ + row % kLargestWave;
    if (slot >= end_) return false;
    if (row < kLargestWave) return true;
    return plan_.reads_draft_rows && slot < request_.num_drafts && request_.has_law && !request_.greedy &&
           draft_row_is_read(slot);
  }

  __device__ void load_stats_of_rows(int first_block, int num_blocks) {
    for (int i = thread(); i < kRowsAtOnce * kBlocksAtOnce; i += kCtaSize) {
      const int row = i / kBlocksAtOnce, block = i % kBlocksAtOnce;
      if (block >= num_blocks || !is_present(row)) continue;
      const int64_t slot = begin_ + row % kLargestWave;
      const BlockStats* stats = row < kLargestWave ? target_stats(slot) : draft_stats(slot);
      s_.stats[row][block] = load_stats(stats + first_block + block);
    }
    __syncthreads();
  }

  /// Calls visit(number of blocks) for a few blocks at a time, whose numbers are then in shared memory.
  template <class Visit>
  __device__ void for_blocks(bool loaded, const Visit& visit) {
    for (int first = 0; first < plan_.num_blocks; first += kBlocksAtOnce) {
      const int count = min(plan_.num_blocks - first, kBlocksAtOnce);
      if (!loaded) load_stats_of_rows(first, count);
      visit(count);
      __syncthreads();
    }
  }

  /// The largest logits of all rows of the wave, and their laws where they are needed.
  __device__ void make_laws() {
    if (thread() < kRowsAtOnce) s_.row_max[thread()] = {kMasked, false};
    for_blocks(false, [&](int count) {
      for (int row = warp_index(); row < kRowsAtOnce; row += kWarpsPerCta) {
        if (!is_present(row)) continue;
        float best = kMasked;
        bool non_finite = false;
        for (int block = lane_index(); block < count; block += kWarpSize) {
          best = fmaxf(best, s_.stats[row][block].max);
          non_finite |= s_.stats[row][block].sum != s_.stats[row][block].sum;
        }
        best = warp_max(best);
        non_finite = __any_sync(kAllLanes, non_finite);
        if (lane_index() == 0) {
          s_.row_max[row] = {fmaxf(s_.row_max[row].max, best), s_.row_max[row].non_finite || non_finite};
        }
      }
    });
    if (needs_law(params_, request_)) {
      double total = 0.0;
      for_blocks(plan_.num_blocks <= kBlocksAtOnce, [&](int count) {
        for (int i = thread(); i < kRowsAtOnce * kBlocksAtOnce; i += kCtaSize) {
          const int row = i / kBlocksAtOnce, block = i % kBlocksAtOnce;
          if (block >= count || !is_present(row)) continue;
          const BlockStats stats = s_.stats[row][block];
          s_.weights[row][block] =
              stats.sum > 0.0f ? block_weight(stats, s_.row_max[row].max, scale_of(row)) : 0.0;
        }
        __syncthreads();
        if (thread() < kRowsAtOnce && is_present(thread())) {
#pragma unroll 4
          for (int block = 0; block < count; ++block) {
            const float sum = s_.stats[thread()][block].sum;
            if (sum > 0.0f) total = fma64(static_cast<double>(sum), s_.weights[thread()][block], total);
          }
        }
      });
      if (thread() < kRowsAtOnce && is_present(thread())) {
        RowLaw law = row_law_from_total(scale_of(thread()), s_.row_max[thread()], total);
        if (thread() >= kLargestWave) law = row_law_from_logsumexp(scale_of(thread()), law.logsumexp);
        s_.laws[thread()] = law;
      }
    }
    // Draft laws whose logsumexp came with the call.
    const int i = thread() - kLargestWave;
    if (i >= 0 && i < kLargestWave && params_.draft_logsumexp && begin_ + i < min(int64_t{end_}, request_.num_drafts)) {
      s_.laws[thread()] = row_law_from_logsumexp(request_.draft_scale,
                                                 at(params_.draft_logsumexp, request_.first_draft + begin_ + i));
    }
    __syncthreads();
  }

  __device__ float scale_of(int row) const { return row < kLargestWave ? request_.scale : request_.draft_scale; }

  __device__ Status row_status(int i) const {
    if (s_.row_max[i].non_finite) return Status::kNonFiniteTarget;
    return s_.row_max[i].max > kMasked ? Status::kOk : Status::kMaskedTarget;
  }

  /// The lowest ids with the largest logit that is not NaN, a warp to a slot, where they are emitted.
  __device__ void find_argmaxes() {
    for (int i = warp_index(); i < end_ - begin_; i += kWarpsPerCta) {
      if (!request_.greedy && row_status(i) == Status::kOk) continue;
      const int64_t id = argmax_of(begin_ + i, s_.row_max[i].max);
      if (lane_index() == 0) s_.argmax[i] = id;
    }
    __syncthreads();
  }

  __device__ __noinline__ int64_t argmax_of(int64_t slot, float max) const {
    for (int first = 0; first < plan_.num_blocks; first += kWarpSize) {
      const int block = first + lane_index();
      const bool holds = block < plan_.num_blocks && load_stats(target_stats(slot) + block).max == max;
      for (unsigned rest = __ballot_sync(kAllLanes, holds); rest != 0; rest &= rest - 1) {
        const int candidate = first + __ffs(static_cast<int>(rest)) - 1;
        const BlockRef ref = block_of(params_, target_row(slot), candidate);
        const int found = first_equal(ref, max);
        if (found >= 0) return ref.begin + found;
      }
    }
    return 0;
  }

  __device__ double accept_uniform(int64_t slot) const {
    if (params_.accept_uniforms) return at(params_.accept_uniforms, request_.first_draft + slot);
    return random_number(at(params_.seeds, request_.index), Stream::kAccept, slot, at(params_.positions, request_.index));
  }

  /// The given uniform, or number `draw` of those at the position of the slot.
  __device__ double final_uniform(int64_t slot, int64_t draw) const {
    if (params_.final_uniforms) return at(params_.final_uniforms, request_.index);
    const int64_t seed = at(params_.seeds, request_.index), position = at(params_.positions, request_.index);
    if (params_.final_stream == Stream::kDraft) return random_number(seed, Stream::kDraft, params_.final_slot, position);
    return random_number(seed, Stream::kTarget, draw, position + slot);
  }

  /// What a thread makes of slot begin_ + i.
  __device__ Verdict verdict_of(int i) const {
    const int64_t slot = begin_ + i;
    Verdict verdict = {Outcome::kEnds, Final::kTarget, row_status(i), __builtin_nanf(""), -1, -1};
    if (verdict.status != Status::kOk) {
      verdict.token = s_.argmax[i];
      return verdict;
    }
    const bool is_draft = slot < request_.num_drafts;
    const int64_t x = is_draft ? at(params_.draft_token_ids, request_.first_draft + slot) : -1;
    const bool valid = x >= 0 && x < params_.vocab_size;
    verdict.x = x;
    if (is_draft && x != -1 && !valid) verdict.status = Status::kInvalidDraftId;
    if (request_.greedy) {
      const bool equal = s_.argmax[i] == x;
      if (valid) verdict.accept_prob = equal ? 1.0f : 0.0f;
      if (valid && equal && params_.rule == Rule::kTokenLevel) verdict.outcome = Outcome::kAccepted;
      verdict.token = s_.argmax[i];
      return verdict;
    }
    verdict.outcome = valid && accepts(i, &verdict) ? Outcome::kAccepted : verdict.outcome;
    if (verdict.outcome == Outcome::kEnds) verdict.outcome = Outcome::kDraws;
    verdict.token = x;
    return verdict;
  }

  /// Whether the valid draft of a sampled request is accepted; otherwise what to draw from.
  __device__ bool accepts(int i, Verdict* verdict) const {
    const int64_t slot = begin_ + i;
    const double p = prob_of(s_.laws[i], element(target_row(slot), verdict->x));
    const bool may_accept = params_.rule == Rule::kTokenLevel;
    const double coin = may_accept ? accept_uniform(slot) : 1.0;
    // No q is above 1: a coin below p accepts whatever q is, and the draft row need not be read.
    const bool accepted = may_accept && coin < p;
    if (!request_.has_law) {
      verdict->final = Final::kTargetWithoutDraft;
      verdict->accept_prob = static_cast<float>(p);
      return accepted;
    }
    if (accepted && params_.accept_probs == nullptr) return true;
    if (plan_.reads_draft_rows && !draft_row_is_read(slot)) {
      verdict->outcome = Outcome::kNeedsDraftRow;
      return false;
    }
    const double q = draft_prob(i, verdict->x);
    if (q != q) {
      // The one-hot law is exact for every drafter.
      verdict->final = Final::kTargetWithoutDraft;
      if (!accepted) verdict->status = Status::kUnusableDraftLaw;
      return accepted;
    }
    verdict->final =
        params_.draft_law == DraftLawKind::kSupport ? Final::kSupportResidual : Final::kDenseResidual;
    verdict->accept_prob = static_cast<float>(p < q ? p / q : 1.0);
    return accepted || (may_accept && coin * q < p);
  }

  /// q(x) of a draft that has a law; NaN where that law is not usable or cannot have produced x.
  __device__ double draft_prob(int i, int64_t x) const {
    double q = 0.0;
    if (params_.draft_law == DraftLawKind::kSupport) {
      const int64_t draft = request_.first_draft + begin_ + i;
      for (int64_t j = 0; j < params_.draft_support_size; ++j) {
        const int64_t id = at(params_.draft_support_ids, draft, j);
        if (id < 0 || id >= params_.vocab_size) continue;
        const double prob = exp2_f64(at(params_.draft_support_logprobs, draft, j) * kLog2E);
        if (!is_finite(prob)) return __builtin_nan("");
        if (id == x) q = q + prob;
      }
    } else {
      if (params_.draft_law == DraftLawKind::kLogits && !s_.laws[kLargestWave + i].usable())
        return __builtin_nan("");
      q = dense_prob(i, x);
    }
    return q > 0.0 && is_finite(q) ? q : __builtin_nan("");
  }

  /// The draft row's probability of an id, not finite where the row is not usable.
  __device__ __noinline__ double dense_prob(int i, int64_t id) const {
    const float value = element(draft_row(begin_ + i), id);
    if (params_.draft_law == DraftLawKind::kLogits) return prob_of(s_.laws[kLargestWave + i], value);
    return is_finite(static_cast<double>(value)) && value < 0.0f ? 0.0 : static_cast<double>(value);
  }

  // ---- Drawing ----

  __device__ void draw(int i, const Verdict& verdict) {
    Final final = verdict.final;
    Status status = verdict.status;
    const int64_t slot = begin_ + i;
    int64_t token = -1;
    if (final == Final::kDenseResidual) {
      if (params_.final_uniforms) return queue_alone(JobKind::kResidual, slot);
      target_masses(i);
      token = thin(i, &status);
      if (token < 0) return queue_alone(JobKind::kResidual, slot);
    } else {
      target_masses(i, /*scan=*/false);
      for (int block = warp_index(); block < plan_.num_blocks; block += kWarpsPerCta) {
        if (!touches(final, slot, verdict.x, block)) continue;
        const double mass = chunk_sums(sparse_residual(i, final, verdict.x, block), s_.pick + warp_index());
        if (lane_index() == 0) masses_[block] = mass;
      }
      scan_masses();
      token = pick_from_masses(i, final, verdict.x, 0, &status);
    }
    emit_drawn(i, token);
    finish(slot, status);
  }

  /// The residual of slot begin_ was made by a pass over both rows.
  __device__ void end_after_residual() {
    for (int block = thread(); block < plan_.num_blocks; block += kCtaSize) {
      masses_[block] = static_cast<double>(__ldcg(plan_.masses + request_.index * plan_.num_blocks + block));
    }
    scan_masses();
    Status status = Status::kOk;
    const int64_t draw_number = params_.final_uniforms ? 0 : 2 * kThinningAttempts;
    const int64_t token = pick_from_masses(0, Final::kDenseResidual, -1, draw_number, &status);
    emit_drawn(0, token);
    finish(begin_, status);
  }

  /// Masses of p by block.
  __device__ __noinline__ void target_masses(int i, bool scan = true) {
    const RowLaw& law = s_.laws[i];
    for (int block = thread(); block < plan_.num_blocks; block += kCtaSize) {
      const BlockStats stats = load_stats(target_stats(begin_ + i) + block);
      masses_[block] = stats.sum > 0.0f ? static_cast<double>(stats.sum) * prob_of(law, stats.max) : 0.0;
    }
    if (scan) {
      scan_masses();
    } else {
      __syncthreads();
    }
  }

  /// Sums of the masses before each block, and of all, in the order of the blocks.
  __device__ __noinline__ void scan_masses() {
    __syncthreads();
    if (thread() == 0) {
      double total = 0.0;
      for (int block = 0; block < plan_.num_blocks; ++block) {
        prefixes_[block] = total;
        total = total + masses_[block];
      }
      s_.total = total;
    }
    __syncthreads();
  }

  /// A token by the masses in shared memory; of p, if these leave nothing.
  __device__ int64_t pick_from_masses(int i, Final final, int64_t x, int64_t draw_number, Status* status) {
    if (!(s_.total > 0.0)) {
      // NaN: the draft row is not usable. Otherwise p and q agree but for rounding. Either way: p.
      if (s_.total != s_.total) *status = Status::kUnusableDraftLaw;
      final = Final::kTarget;
      __syncthreads();
      target_masses(i);
    }
    if (warp_index() == 0) {
      const int64_t token = pick(i, final, x, final_uniform(begin_ + i, draw_number) * s_.total);
      if (lane_index() == 0) s_.tokens[0] = token;
    }
    __syncthreads();
    return s_.tokens[0];
  }

  /// A recovered token without a pass over the rows: a token of p is kept with probability
  /// max(p - q, 0) / p, which gives the law of the residual exactly. -1 after too many attempts.
  __device__ int64_t thin(int i, Status* status) {
    const int64_t slot = begin_ + i;
    for (int first = 0; first < kThinningAttempts; first += kWarpsPerCta) {
      const int attempt = first + warp_index();
      const int64_t y = pick(i, Final::kTarget, -1, final_uniform(slot, 2 * attempt) * s_.total);
      const double p = prob_of(s_.laws[i], element(target_row(slot), y));
      const double q = dense_prob(i, y);
      if (lane_index() == 0) {
        s_.tokens[attempt] = y;
        s_.unusable[attempt] = !is_finite(q);
        s_.kept[attempt] = !is_finite(q) || final_uniform(slot, 2 * attempt + 1) * p < p - q;
      }
      __syncthreads();
      for (int a = first; a < first + kWarpsPerCta; ++a) {
        if (!s_.kept[a]) continue;
        if (s_.unusable[a]) *status = Status::kUnusableDraftLaw;
        return s_.tokens[a];
      }
    }
    return -1;
  }

  /// The token at `threshold` of the masses by block, found by one warp.
  __device__ __noinline__ int64_t pick(int i, Final final, int64_t x, double threshold) {
    int chosen = -1, last = 0;
    for (int first = 0; first < plan_.num_blocks && chosen < 0; first += kWarpSize) {
      const int block = first + lane_index();
      const double mass = block < plan_.num_blocks ? masses_[block] : 0.0;
      const int hit = first_lane(mass > 0.0 && prefixes_[block] + mass > threshold);
      if (hit >= 0) chosen = first + hit;
      const int weighty = last_lane(mass > 0.0);
      if (weighty >= 0) last = first + weighty;
    }
    // If rounding leaves no block, the last one with mass is chosen.
    double rest = chosen >= 0 ? threshold - prefixes_[chosen] : __builtin_inf();
    if (chosen < 0) chosen = last;

    const int64_t slot = begin_ + i;
    const BlockRef block = block_of(params_, target_row(slot), chosen);
    PickScratch* scratch = s_.pick + warp_index();
    int found;
    if (final == Final::kDenseResidual) {
      const WeightsOfLogits target = probs_of_block(block, s_.laws[i], target_max(slot, chosen));
      const BlockRef draft_block = block_of(params_, draft_row(slot), chosen);
      if (params_.draft_law == DraftLawKind::kProbs) {
        found = pick_in_block(Residual<GivenProbs>{target, {draft_block}}, rest, scratch);
      } else {
        const float max = plan_.reads_draft_rows ? load_stats(draft_stats(slot) + chosen).max : block_max(draft_block);
        const WeightsOfLogits draft = probs_of_block(draft_block, s_.laws[kLargestWave + i], max);
        found = pick_in_block(Residual<WeightsOfLogits>{target, draft}, rest, scratch);
      }
    } else if (touches(final, slot, x, chosen)) {
      found = pick_in_block(sparse_residual(i, final, x, chosen), rest, scratch);
    } else {
      // Unscaled weights: a block far below the row's maximum loses none of them to rounding.
      const float max = target_max(slot, chosen);
      rest = rest / prob_of(s_.laws[i], max);
      found = pick_in_block(WeightsOfLogits(block, max, request_.scale, 1.0f), rest, scratch);
    }
    return block.begin + found;
  }

  __device__ float target_max(int64_t slot, int block) const { return load_stats(target_stats(slot) + block).max; }

  __device__ SparseResidual sparse_residual(int i, Final final, int64_t x, int block) const {
    const int64_t slot = begin_ + i;
    const BlockRef ref = block_of(params_, target_row(slot), block);
    return {probs_of_block(ref, s_.laws[i], target_max(slot, block)), &params_,
            final == Final::kTargetWithoutDraft, request_.first_draft + slot, x};
  }

  /// Whether a block holds an id that a one-hot or sparse draft law takes something away from.
  __device__ bool touches(Final final, int64_t slot, int64_t x, int block) const {
    if (final == Final::kTargetWithoutDraft) return x / kBlockSize == block;
    if (final != Final::kSupportResidual) return false;
    bool touched = false;
    for (int64_t j = lane_index(); j < params_.draft_support_size; j += kWarpSize) {
      const int64_t id = at(params_.draft_support_ids, request_.first_draft + slot, j);
      touched |= id >= 0 && id < params_.vocab_size && id / kBlockSize == block;
    }
    return __any_sync(kAllLanes, touched);
  }

  // ---- Results ----

  __device__ void emit(int64_t slot, int64_t token) const {
    const int64_t i = request_.index * params_.width + slot;
    if (params_.token_ids_are_int64) {
      static_cast<int64_t*>(params_.token_ids)[i] = token;
    } else {
      static_cast<int32_t*>(params_.token_ids)[i] = static_cast<int32_t>(token);
    }
  }

  __device__ void emit_logprob(int64_t slot, double logprob) const {
    if (params_.logprobs != nullptr) {
      params_.logprobs[request_.index * params_.width + slot] = static_cast<float>(logprob);
    }
  }

  __device__ __noinline__ void emit_with_logprob(int i, int64_t token) const {
    emit(begin_ + i, token);
    if (params_.logprobs == nullptr) return;
    const bool has_prob = row_status(i) == Status::kOk;
    emit_logprob(begin_ + i, has_prob ? s_.laws[i].log2_prob(element(target_row(begin_ + i), token)) * kLn2
                                      : __builtin_nan(""));
  }

  __device__ void emit_drawn(int i, int64_t token) const {
    if (thread() == 0) emit_with_logprob(i, token);
  }

  /// What slot begin_ + i leaves behind, where `last` is the first that was not accepted.
  __device__ void write_slot(int i, int last) const {
    if (i > last) return;
    const int64_t slot = begin_ + i;
    const Verdict& verdict = s_.verdicts[i];
    if (params_.logsumexp != nullptr) params_.logsumexp[request_.first_row + slot] = s_.laws[i].logsumexp;
    if (params_.accept_probs != nullptr && slot < request_.num_drafts) {
      params_.accept_probs[request_.first_draft + slot] = verdict.accept_prob;
    }
    if (verdict.outcome == Outcome::kAccepted || verdict.outcome == Outcome::kEnds) {
      emit_with_logprob(i, verdict.token);
    }
  }

  __device__ void finish(int64_t num_accepted, Status status) const {
    for (int64_t slot = num_accepted + 1 + thread(); slot < params_.width; slot += kCtaSize) {
      emit(slot, -1);
      emit_logprob(slot, __builtin_nan(""));
    }
    const int64_t num_slots = request_.num_slots(params_);
    for (int64_t slot = num_accepted + 1 + thread(); slot < num_slots; slot += kCtaSize) {
      if (params_.logsumexp != nullptr) params_.logsumexp[request_.first_row + slot] = __builtin_nan("");
      if (params_.accept_probs != nullptr && slot < request_.num_drafts) {
        params_.accept_probs[request_.first_draft + slot] = __builtin_nanf("");
      }
    }
    if (thread() == 0) {
      if (params_.num_accepted != nullptr) {
        params_.num_accepted[request_.index] = static_cast<int32_t>(num_accepted);
      }
      params_.status[request_.index] = static_cast<int32_t>(status);
      atomicAdd(&plan_.counters->num_finished, 1ULL);
    }
  }

  // ---- What is read next ----

  __device__ void publish(RequestState next, int num_jobs) const {
    next.expected = static_cast<uint32_t>(num_jobs) * static_cast<uint32_t>(plan_.units_per_row);
    plan_.states[request_.index] = next;
  }

  __device__ void queue_alone(JobKind kind, int64_t slot) const {
    if (thread() != 0) return;
    const bool residual = kind == JobKind::kResidual;
    publish({0, 0, static_cast<int32_t>(slot), end_, static_cast<int32_t>(residual ? draft_ready_ : slot) + 1,
             residual},
            1);
    if (residual) {
      plan_.laws[2 * request_.index] = s_.laws[slot - begin_];
      plan_.laws[2 * request_.index + 1] = s_.laws[kLargestWave + slot - begin_];
    }
    const auto place = atomicAdd(&plan_.counters->num_queued, 1ULL);
    store_release(plan_.queue + place, packed(kind, request_.index, slot));
  }

  __device__ void queue_next_wave() const {
    if (thread() != 0) return;
    const int64_t end = min(request_.num_slots(params_), int64_t{end_} + plan_.slots_per_wave);
    const int num_targets = static_cast<int>(end - end_);
    const int num_drafts =
        plan_.eager_drafts ? static_cast<int>(min(end, request_.num_drafts) - min(int64_t{end_}, request_.num_drafts))
                           : 0;
    publish({0, 0, end_, static_cast<int32_t>(end), 0, 0}, num_targets + num_drafts);
    auto place = atomicAdd(&plan_.counters->num_queued, static_cast<unsigned long long>(num_targets + num_drafts));
    for (int64_t slot = end_; slot < end; ++slot) {
      store_release(plan_.queue + place++, packed(JobKind::kTarget, request_.index, slot));
      if (slot - end_ < num_drafts) {
        store_release(plan_.queue + place++, packed(JobKind::kDraft, request_.index, slot));
      }
    }
  }

  const Plan& plan_;
  const ChainParams& params_;
  const Request request_;
  Scratch& s_;
  double* masses_;
  double* prefixes_;
  /// The slots that are judged, and the one whose draft row was read on its own, or -1.
  int begin_ = 0, end_ = 0, draft_ready_ = -1;
};

__device__ __noinline__ void judge(const Plan& plan, int64_t request, void* shared) {
  Scratch& scratch = *static_cast<Scratch*>(shared);
  Judge(plan, request, scratch, reinterpret_cast<double*>(&scratch + 1)).run();
}

/// A unit of the first wave of every request; kNone where the request has no such row.
__device__ Job initial_job(const Plan& plan, uint64_t ticket) {
  const uint64_t number = ticket / static_cast<uint32_t>(plan.units_per_row);
  const int unit = static_cast<int>(ticket - number * static_cast<uint32_t>(plan.units_per_row));
  const int64_t r = static_cast<int64_t>(number / static_cast<uint32_t>(plan.jobs_per_request));
  const int64_t j = static_cast<int64_t>(number) - r * plan.jobs_per_request;
  const int64_t slot = plan.eager_drafts ? j / 2 : j;
  const bool is_draft = plan.eager_drafts && j % 2 == 1;
  const Request request(plan.params, r);
  const int64_t num_slots = request.num_slots(plan.params);
  if (slot >= (is_draft ? request.num_drafts : num_slots)) return {JobKind::kNone, r, slot, unit, 0};
  const int64_t wave = plan.slots_per_wave;
  const int64_t num_rows = min(wave, num_slots) + (plan.eager_drafts ? min(wave, request.num_drafts) : 0);
  return {is_draft ? JobKind::kDraft : JobKind::kTarget, r, slot, unit,
          static_cast<uint32_t>(num_rows) * static_cast<uint32_t>(plan.units_per_row)};
}

/// Waits for a queued unit; request -1 once every request is finished.
__device__ Job queued_job(const Plan& plan, uint64_t ticket) {
  const uint64_t number = ticket / static_cast<uint32_t>(plan.units_per_row);
  const int unit = static_cast<int>(ticket - number * static_cast<uint32_t>(plan.units_per_row));
  const uint64_t* place = plan.queue + (number - plan.initial_jobs);
  const volatile unsigned long long* num_finished = &plan.counters->num_finished;
  for (;;) {
    const bool all_finished = *num_finished == static_cast<unsigned long long>(plan.params.batch);
    const bool is_place = number - plan.initial_jobs < plan.queue_size;
    const uint64_t entry = is_place ? load_acquire(place) : 0;
    if (entry != 0) {
      const int64_t r = static_cast<int64_t>(entry >> 32) - 1;
      return {static_cast<JobKind>(entry & 3), r, static_cast<int64_t>((entry & 0xFFFFFFFF) >> 2), unit,
              __ldcg(&plan.states[r].expected)};
    }
    if (all_finished) return {JobKind::kNone, -1, 0, 0, 0};
    __nanosleep(64);
  }
}

/// The mass of max(p - q, 0) in one block, NaN if the draft law is not usable there.
__device__ __noinline__ float residual_mass(const Plan& plan, const Request& request, int64_t slot, int block) {
  const ChainParams& params = plan.params;
  const int64_t row = request.first_row + slot, draft = request.first_draft + slot;
  const BlockRef target_block = block_of(params, row_of(params.target, row), block);
  const BlockRef draft_block = block_of(params, row_of(params.draft, draft), block);
  const float target_max = load_stats(plan.target_stats + row * plan.num_blocks + block).max;
  const WeightsOfLogits target = probs_of_block(target_block, load_law(plan.laws + 2 * request.index), target_max);
  if (params.draft_law == DraftLawKind::kProbs) {
    return sum_in_lanes(Residual<GivenProbs>{target, {draft_block}}, target_block.rows());
  }
  const float draft_max = plan.reads_draft_rows ? load_stats(plan.draft_stats + draft * plan.num_blocks + block).max
                                                : block_max(draft_block);
  const WeightsOfLogits draft_probs =
      probs_of_block(draft_block, load_law(plan.laws + 2 * request.index + 1), draft_max);
  return sum_in_lanes(Residual<WeightsOfLogits>{target, draft_probs}, target_block.rows());
}

/// One warp's share of a unit: one block of one row.
__device__ void run_block(const Plan& plan, const Job& job, int block, uint4* stage) {
  const ChainParams& params = plan.params;
  const Request request(params, job.request);
  if (job.kind == JobKind::kResidual) {
    const float mass = residual_mass(plan, request, job.slot, block);
    if (lane_index() == 0) plan.masses[request.index * plan.num_blocks + block] = mass;
    return;
  }
  const bool is_draft = job.kind == JobKind::kDraft;
  if (is_draft && (!request.has_law || request.greedy)) return;
  const int64_t row = is_draft ? request.first_draft + job.slot : request.first_row + job.slot;
  const BlockRef ref = block_of(params, row_of(is_draft ? params.draft : params.target, row), block);
  const BlockStats stats = block_stats(ref, is_draft ? request.draft_scale : request.scale,
                                       is_draft || needs_law(params, request), stage);
  BlockStats* out = (is_draft ? plan.draft_stats : plan.target_stats) + row * plan.num_blocks + block;
  if (lane_index() == 0) *reinterpret_cast<float2*>(out) = make_float2(stats.max, stats.sum);
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

__global__ void __launch_bounds__(kCtaSize, 5) run_chain(const __grid_constant__ Plan plan) {
  extern __shared__ uint4 shared[];
  __shared__ Job job;
  __shared__ bool is_last;
  uint4* stage = shared + warp_index() * plan.stage_words;
  wait_for_cleared_workspace();
  for (;;) {
    if (threadIdx.x == 0) {
      const uint64_t ticket = atomicAdd(&plan.counters->next_ticket, 1ULL);
      job = ticket < plan.initial_units ? initial_job(plan, ticket) : queued_job(plan, ticket);
    }
    __syncthreads();
    if (job.request < 0) return;
    if (job.kind != JobKind::kNone) {
      const int block = job.unit * kBlocksPerUnit + warp_index();
      if (block < plan.num_blocks) run_block(plan, job, block, stage);
      __syncthreads();
      if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(&plan.states[job.request].arrived, 1u) + 1 == job.expected;
        __threadfence();
      }
      __syncthreads();
      if (is_last) judge(plan, job.request, shared);
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
  plan.queue_size = static_cast<uint64_t>(rows + draft_rows + residuals);
  Cutter cutter(workspace);
  plan.counters = cutter.take<Counters>(1);
  plan.states = cutter.take<RequestState>(params.batch);
  plan.queue = cutter.take<uint64_t>(rows + draft_rows + residuals);
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
  return plan;
}

/// What a launch needs to know of a device, asked for once.
struct DeviceFacts {
  cudaError_t error = cudaSuccess;
  int num_multiprocessors = 1;
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
  facts.error = cudaFuncSetAttribute(run_chain, cudaFuncAttributeMaxDynamicSharedMemorySize, shared - kStaticShared);
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

/// How eagerly rows are read: enough of them at once to keep the device busy, and no more.
void choose_wave(Plan& plan, int warps_on_device) {
  const int64_t most = std::min<int64_t>(
      kLargestWave, plan.params.has_bonus_rows ? plan.params.width : plan.params.drafts_per_request);
  const int64_t blocks = plan.params.batch * plan.num_blocks * (plan.reads_draft_rows ? 2 : 1);
  plan.slots_per_wave = static_cast<int>(std::clamp<int64_t>(warps_on_device / blocks, 1, most));
  plan.eager_drafts = plan.reads_draft_rows && (plan.slots_per_wave > 1 || plan.params.rule == Rule::kRejectAll ||
                                                blocks < warps_on_device * 2);
  if (const char* tune = getenv("SPECDEC_TUNE")) {
    int wave = 0, eager = 0;
    if (sscanf(tune, "%d,%d", &wave, &eager) == 2) {
      plan.slots_per_wave = static_cast<int>(std::clamp<int64_t>(wave, 1, most));
      plan.eager_drafts = plan.reads_draft_rows && eager != 0;
    }
  }
  plan.jobs_per_request = plan.slots_per_wave * (plan.eager_drafts ? 2 : 1);
  plan.initial_jobs = static_cast<uint64_t>(plan.params.batch) * plan.jobs_per_request;
  plan.initial_units = plan.initial_jobs * plan.units_per_row;
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
  const int ctas = facts.num_multiprocessors * (wide ? 3 : 5);
  choose_wave(plan, ctas * kWarpsPerCta);

  const auto num_words = static_cast<int64_t>(layout.cleared / 16);
  const auto clear_grid = static_cast<unsigned>(std::clamp<int64_t>(num_words / kCtaSize, 1, 64));
  clear_workspace<<<clear_grid, kCtaSize, 0, stream>>>(static_cast<uint4*>(workspace), num_words);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;

  const size_t shared = std::max(kWarpsPerCta * plan.stage_words * sizeof(uint4),
                                 sizeof(Scratch) + 2 * sizeof(double) * static_cast<size_t>(plan.num_blocks));
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
  return cudaLaunchKernelEx(&config, run_chain, plan);
}

}  // namespace specdec_ops::cuda
